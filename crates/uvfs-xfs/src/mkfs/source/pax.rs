//! Extended headers of tar archives: records of a keyword and a value.
//!
//! Keywords: POSIX.1-2017 `pax`; the manual of GNU tar ("Sparse Formats", `--xattrs`, `--acls`, `--selinux`); `tar(5)`
//! of libarchive.

use super::acl::Acl;
use super::host;
use super::sparse::Sparse;
use super::{Time, invalid};
use crate::bulk::attr::NewAttr;
use std::collections::BTreeMap;
use std::io;

/// A keyword and its value, which may have any bytes.
pub type Record = (Box<[u8]>, Box<[u8]>);

/// Why a member of one archive of several is refused.
pub const CONTINUED: &str =
    "it continues a file that begins in another volume; give mkfs all volumes as one archive";

/// An owner. The kernel takes the greatest number of 32 bits for none.
pub fn owner(n: i128) -> io::Result<u32> {
    let n = u32::try_from(n).ok().filter(|n| *n < u32::MAX);
    n.ok_or_else(|| invalid("Linux has owners and groups from 0 to 4294967294"))
}

/// A name up to the first NUL.
pub fn up_to_nul(name: &[u8]) -> &[u8] {
    name.split(|b| *b == 0).next().unwrap_or_default()
}

/// Takes extended headers apart. Each record begins with its length in decimal digits.
pub fn records(mut bytes: &[u8]) -> io::Result<Vec<Record>> {
    let mut records = Vec::new();
    while bytes.first().is_some_and(|b| *b != 0) {
        let taken = record(bytes).ok_or_else(|| invalid("a malformed extended header"))?;
        records.push(taken.0);
        bytes = &bytes[taken.1..];
    }
    Ok(records)
}

/// The first record and its length.
fn record(bytes: &[u8]) -> Option<(Record, usize)> {
    let digits = bytes.iter().position(|b| !b.is_ascii_digit())?;
    let len: usize = std::str::from_utf8(&bytes[..digits]).ok()?.parse().ok()?;
    let record = bytes.get(digits..len)?.strip_prefix(b" ")?;
    let record = record.strip_suffix(b"\n")?;
    let equals = record.iter().position(|b| matches!(b, b'=' | 0))?;
    if record[equals] == 0 {
        return None;
    }
    let (keyword, value) = (&record[..equals], &record[equals + 1..]);
    Some(((keyword.into(), value.into()), len))
}

/// Decimal seconds with a fraction.
fn time(text: &str) -> Option<Time> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let sec: i64 = whole.parse().ok()?;
    let nsec: u32 = format!("{fraction:0<9.9}").parse().ok()?;
    let below = fraction.bytes().skip(9).any(|b| b != b'0');
    Some(match whole.starts_with('-') {
        // Times before 1970 are rounded down, too.
        true => {
            let nsec = nsec + u32::from(below);
            Time {
                sec: sec.checked_sub(i64::from(nsec > 0))?,
                nsec: (1_000_000_000 - nsec) % 1_000_000_000,
            }
        }
        false => Time { sec, nsec },
    })
}

/// Replaces `%XX`: of these characters only, or of all if there are none.
fn percent_decoded(name: &[u8], only: &[u8]) -> Vec<u8> {
    let digit = |b: u8| match b {
        b'0'..=b'9' => Some(b - b'0'),
        b'A'..=b'F' => Some(b - b'A' + 10),
        _ => None,
    };
    let mut out = Vec::with_capacity(name.len());
    let mut rest = name;
    while let [first, more @ ..] = rest {
        rest = more;
        let escaped = match (first, more) {
            (b'%', [high, low, ..]) => digit(*high).zip(digit(*low)).map(|(h, l)| h << 4 | l),
            _ => None,
        };
        match escaped.filter(|b| only.is_empty() || only.contains(b)) {
            Some(byte) => {
                out.push(byte);
                rest = &more[2..];
            }
            None => out.push(*first),
        }
    }
    out
}

/// The bytes that base64 text stands for, with or without padding.
fn base64_decoded(text: &[u8]) -> Option<Vec<u8>> {
    let text = text.trim_ascii_end();
    let text = text.strip_suffix(b"=").unwrap_or(text);
    let text = text.strip_suffix(b"=").unwrap_or(text);
    let mut out = Vec::with_capacity(text.len() * 3 / 4);
    for four in text.chunks(4) {
        let mut bits = 0u32;
        for b in four {
            let six = match b {
                b'A'..=b'Z' => b - b'A',
                b'a'..=b'z' => b - b'a' + 26,
                b'0'..=b'9' => b - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(six);
        }
        let bytes = (bits << (6 * (4 - four.len()) + 8)).to_be_bytes();
        out.extend_from_slice(match four.len() {
            1 => return None,
            n => &bytes[..n - 1],
        });
    }
    Some(out)
}

/// What the extended headers of a member say.
#[derive(Debug, Default)]
pub struct Extended {
    /// Its path.
    pub path: Option<Box<[u8]>>,
    /// The target of a link.
    pub link: Option<Box<[u8]>>,
    /// Bytes of contents in the archive.
    pub size: Option<u64>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last change of the contents.
    pub mtime: Option<Time>,
    /// Last access.
    pub atime: Option<Time>,
    /// Birth.
    pub birth: Option<Time>,
    /// Holes.
    pub sparse: Sparse,
    /// Access control list.
    pub access: Option<Acl>,
    /// Access control list of a directory for what is made in it.
    default: Option<Acl>,
    /// Other attributes, by their full names.
    attrs: BTreeMap<Box<[u8]>, Box<[u8]>>,
}

impl Extended {
    /// Takes records in their order: a later one counts. `sparse` is what the header itself says of holes.
    pub fn new<'r>(
        records: impl Iterator<Item = &'r Record>,
        sparse: Sparse,
    ) -> io::Result<Extended> {
        let mut it = Extended {
            sparse,
            ..Extended::default()
        };
        // Names of libarchive are the same in both forms, and other programs read its second one differently.
        let mut encoded = BTreeMap::new();
        let mut context = None;
        for (keyword, value) in records {
            it.take(keyword, value, &mut encoded, &mut context)
                .ok_or_else(|| {
                    let keyword = keyword.escape_ascii();
                    invalid(format!("the value of {keyword} makes no sense"))
                })??;
        }
        for (name, value) in encoded {
            let plain = percent_decoded(name, b"%=");
            it.attrs.remove(&plain[..]);
            let value = base64_decoded(value);
            let value = value.ok_or_else(|| invalid("an attribute that is not in base64"))?;
            it.attrs
                .insert(percent_decoded(name, b"").into(), value.into());
        }
        if let Some(context) = context {
            // The kernel keeps it with a NUL.
            let value = [context, b"\0"].concat();
            let name = b"security.selinux"[..].into();
            it.attrs.entry(name).or_insert_with(|| value.into());
        }
        // Binary lists have numbers where the others may have names.
        for (name, acl) in [
            (&b"system.posix_acl_access"[..], &mut it.access),
            (b"system.posix_acl_default", &mut it.default),
        ] {
            if let Some(value) = it.attrs.remove(name) {
                *acl = Some(Acl::binary(&value).map_err(invalid)?);
            }
        }
        for acl in it.access.iter().chain(&it.default) {
            acl.check().map_err(invalid)?;
        }
        Ok(it)
    }

    /// Takes a record; `None` if its value makes no sense.
    fn take<'r>(
        &mut self,
        keyword: &'r [u8],
        value: &'r [u8],
        encoded: &mut BTreeMap<&'r [u8], &'r [u8]>,
        context: &mut Option<&'r [u8]>,
    ) -> Option<io::Result<()>> {
        let text = std::str::from_utf8(value).unwrap_or("?");
        // The kernel ends a name at a NUL, for every program that extracts one.
        let name = up_to_nul(value);
        let id = || {
            let id = text.parse::<i128>().ok()?;
            Some(owner(id))
        };
        match keyword {
            b"path" | b"linkpath" if name.is_empty() => return None,
            b"path" => self.path = Some(name.into()),
            b"linkpath" => self.link = Some(name.into()),
            b"size" => self.size = Some(text.parse().ok()?),
            b"uid" => match id()? {
                Ok(id) => self.uid = Some(id),
                Err(e) => return Some(Err(e)),
            },
            b"gid" => match id()? {
                Ok(id) => self.gid = Some(id),
                Err(e) => return Some(Err(e)),
            },
            b"mtime" => self.mtime = Some(time(text)?),
            b"atime" => self.atime = Some(time(text)?),
            b"LIBARCHIVE.creationtime" => self.birth = Some(time(text)?),
            b"RHT.security.selinux" => *context = Some(value),
            b"SCHILY.acl.access" => self.access = Acl::given(value),
            b"SCHILY.acl.default" => self.default = Acl::given(value),
            b"SCHILY.acl.ace" => {
                let why = "it has an access control list of NFSv4, which XFS has not";
                return Some(Err(invalid(why)));
            }
            b"GNU.volume.filename" | b"GNU.volume.offset" => {
                return Some(Err(invalid(CONTINUED)));
            }
            _ => {
                if let Some(name) = keyword.strip_prefix(b"SCHILY.xattr.") {
                    let name = percent_decoded(name, b"%=");
                    self.attrs.insert(name.into(), value.into());
                } else if let Some(name) = keyword.strip_prefix(b"LIBARCHIVE.xattr.") {
                    encoded.insert(name, value);
                } else {
                    return Some(self.sparse.take(keyword, value));
                }
            }
        }
        Some(Ok(()))
    }

    /// The attributes of an inode of this mode, as they are stored, in order.
    pub fn attributes(&self, mode: u16) -> Vec<NewAttr> {
        let kind = mode & 0o170_000;
        let plain = matches!(kind, 0o100_000 | 0o040_000);
        let named = (self.attrs.iter())
            // Linux has these for files and directories.
            .filter(|(name, _)| plain || !name.starts_with(b"user."))
            .filter_map(|(name, value)| host::attribute(name, value).ok()?);
        let mut attrs: Vec<_> = named.collect();
        if kind != 0o120_000 {
            attrs.extend(self.access.as_ref().and_then(Acl::stored_access));
        }
        if kind == 0o040_000 {
            attrs.extend(self.default.as_ref().and_then(Acl::stored_default));
        }
        host::sort_attributes(&mut attrs);
        attrs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files from an archive get its times, with fractions.
    #[test]
    fn times_have_fractions() {
        let t = |sec, nsec| Some(Time { sec, nsec });
        assert_eq!(time("12.5"), t(12, 500_000_000));
        assert_eq!(time("12"), t(12, 0));
        assert_eq!(time("-1.25"), t(-2, 750_000_000));
        assert_eq!(time("-0.5"), t(-1, 500_000_000));
        assert_eq!(time("-1.0000000001"), t(-2, 999_999_999));
        assert_eq!(time("-0.9999999999"), t(-1, 0));
        assert_eq!(time("1.1234567891"), t(1, 123_456_789));
        for wrong in ["x", "", "1.+5", "1.5e3", "-9223372036854775808.5"] {
            assert_eq!(time(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn values_have_any_bytes() {
        let record = |text: &[u8]| {
            let records = records(text).unwrap();
            records.into_iter().map(|(_, value)| value).next_back()
        };
        assert_eq!(record(b"8 a=\nb\n\n"), Some(b"\nb\n"[..].into()));
        assert_eq!(record(b"6 a==\n6 b=c\n"), Some(b"c"[..].into()));
        assert_eq!(record(b"5 a=\n\0\0\0"), Some(b""[..].into()));
        let wrong: [&[u8]; 8] = [
            b"6 a=\n",
            b"4 a=\n",
            b"5 ab\n",
            b"5a=b\n",
            b" 6 a=b\n",
            b"1 ",
            b"0 ",
            b"99999999999999999999 a=b\n",
        ];
        for wrong in wrong {
            assert!(records(wrong).is_err(), "{}", wrong.escape_ascii());
        }
    }

    #[test]
    fn names_and_values_are_decoded() {
        assert_eq!(percent_decoded(b"a%3Db%25c%20%3d%", b"%="), b"a=b%c%20%3d%");
        assert_eq!(percent_decoded(b"a%3Db%25c%20%2", b""), b"a=b%c %2");
        assert_eq!(base64_decoded(b"eAp5").unwrap(), b"x\ny");
        assert_eq!(base64_decoded(b"eno").unwrap(), b"zz");
        assert_eq!(base64_decoded(b"eno=").unwrap(), b"zz");
        assert_eq!(base64_decoded(b"eg==").unwrap(), b"z");
        assert_eq!(base64_decoded(b"").unwrap(), b"");
        assert_eq!(base64_decoded(b"e"), None);
        assert_eq!(base64_decoded(b"e?=="), None);
    }
}
