//! POSIX access control lists as archives have them: `acl(5)`, and `linux/posix_acl_xattr.h` for the binary form.

use crate::bulk::attr::{NewAttr, acl_from_xattr};
use crate::format::ATTR_ROOT;
use crate::read::attr::ACL_NAMES;

// The tags of entries (`linux/posix_acl.h`), in the order in which entries are kept.
const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const GROUP: u16 = 8;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// A list: tag, id and permissions of each entry, in order; or why it can't be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acl(Result<Vec<(u16, u32, u16)>, &'static str>);

const NO_LIST: &str = "its access control list is not one";
const NO_NUMBER: &str = "its access control list has a user or group by name only; \
    write the archive with numbers (GNU tar: --acls --xattrs)";

impl Acl {
    /// The list that a text stands for; `None` if it has no entries.
    pub fn given(text: &[u8]) -> Option<Acl> {
        let mut entries = Vec::new();
        for line in text.split(|b| matches!(b, b',' | b'\n')) {
            let line = line.split(|b| *b == b'#').next().unwrap_or_default();
            match line.trim_ascii() {
                b"" => {}
                line => match entry(line) {
                    Ok(entry) => entries.push(entry),
                    Err(why) => return Some(Acl(Err(why))),
                },
            }
        }
        entries.sort_unstable();
        (!entries.is_empty()).then_some(Acl(Ok(entries)))
    }

    /// The list in the form of an extended attribute.
    pub fn binary(value: &[u8]) -> Result<Acl, &'static str> {
        let (head, entries) = value.split_at_checked(4).ok_or(NO_LIST)?;
        let (entries, rest) = entries.as_chunks::<8>();
        if head != 2u32.to_le_bytes() || !rest.is_empty() {
            return Err(NO_LIST);
        }
        let entries = entries.iter().map(|&[t, ag, p, erm, a, b, c, d]| {
            let tag = u16::from_le_bytes([t, ag]);
            let id = match tag {
                USER | GROUP => u32::from_le_bytes([a, b, c, d]),
                _ => u32::MAX,
            };
            (tag, id, u16::from_le_bytes([p, erm]))
        });
        let mut entries: Vec<_> = entries.collect();
        entries.sort_unstable();
        Ok(Acl(Ok(entries)))
    }

    fn entries(&self) -> &[(u16, u32, u16)] {
        self.0.as_deref().unwrap_or_default()
    }

    fn of(&self, tag: u16) -> Option<u16> {
        let entry = self.entries().iter().find(|e| e.0 == tag);
        entry.map(|e| e.2)
    }

    /// Why the kernel would refuse the list.
    pub fn check(&self) -> Result<(), &'static str> {
        let entries = self.0.as_ref().map_err(|why| *why)?;
        let known = |e: &(u16, u32, u16)| {
            e.2 <= 7 && matches!(e.0, USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER)
        };
        let once = entries
            .windows(2)
            .all(|w| (w[0].0, w[0].1) != (w[1].0, w[1].1));
        let named = entries.iter().any(|e| matches!(e.0, USER | GROUP));
        let whole = [USER_OBJ, GROUP_OBJ, OTHER]
            .iter()
            .all(|t| self.of(*t).is_some());
        let masked = !named || self.of(MASK).is_some();
        let sound = entries.is_empty() || (whole && masked);
        (entries.iter().all(known) && once && sound)
            .then_some(())
            .ok_or(NO_LIST)
    }

    /// The mode of an inode that has this list: the kernel takes its permissions from there.
    pub fn mode(&self, mode: u16) -> u16 {
        let group = self.of(MASK).or(self.of(GROUP_OBJ));
        match (self.of(USER_OBJ), group, self.of(OTHER)) {
            (Some(user), Some(group), Some(other)) => {
                mode & !0o777 | user << 6 | group << 3 | other
            }
            _ => mode,
        }
    }

    /// The attribute of a list for access, unless the mode says it all.
    pub fn stored_access(&self) -> Option<NewAttr> {
        match self.entries().len() {
            0..=3 => None,
            _ => self.stored(ACL_NAMES[0].0),
        }
    }

    /// The attribute of a directory's default list.
    pub fn stored_default(&self) -> Option<NewAttr> {
        match self.entries() {
            [] => None,
            _ => self.stored(ACL_NAMES[1].0),
        }
    }

    fn stored(&self, name: &[u8]) -> Option<NewAttr> {
        let mut value = 2u32.to_le_bytes().to_vec();
        for (tag, id, perm) in self.entries() {
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&perm.to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        Some(NewAttr {
            flags: ATTR_ROOT,
            name: name.into(),
            value: acl_from_xattr(&value)?.into(),
        })
    }
}

/// An entry: its tag, a name, its permissions, and as some programs write it the number that belongs to the name.
fn entry(line: &[u8]) -> Result<(u16, u32, u16), &'static str> {
    let fields: Vec<&[u8]> = line.split(|b| *b == b':').map(<[u8]>::trim_ascii).collect();
    let (tag, name, perms, number) = match fields[..] {
        [tag @ (b"other" | b"o" | b"mask" | b"m"), perms] => (tag, &b""[..], perms, &b""[..]),
        [tag, name, perms] => (tag, name, perms, &b""[..]),
        [tag, name, perms, number] => (tag, name, perms, number),
        _ => return Err(NO_LIST),
    };
    let tag = match (tag, name.is_empty() && number.is_empty()) {
        (b"user" | b"u", true) => USER_OBJ,
        (b"user" | b"u", false) => USER,
        (b"group" | b"g", true) => GROUP_OBJ,
        (b"group" | b"g", false) => GROUP,
        (b"mask" | b"m", true) => MASK,
        (b"other" | b"o", true) => OTHER,
        _ => return Err(NO_LIST),
    };
    let perm = perms.iter().try_fold(0, |bits, b| {
        Ok(bits
            | match b {
                b'r' => 4,
                b'w' => 2,
                b'x' => 1,
                b'-' => 0,
                _ => return Err(NO_LIST),
            })
    })?;
    let id = match tag {
        USER | GROUP => {
            let parsed = |text| std::str::from_utf8(text).ok()?.parse().ok();
            match (parsed(number).or_else(|| parsed(name)), name) {
                (Some(id), _) => id,
                // It has this number everywhere.
                (None, b"root") => 0,
                _ => return Err(NO_NUMBER),
            }
        }
        _ => u32::MAX,
    };
    Ok((tag, id, perm))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_all_programs_are_read() {
        let gnu = b"user::rw-\nuser:1234:rw-\t#effective:r--\ngroup::r--\nmask::r--\nother::---\n";
        let bsd = b"user::rw-,group::r--,other::---,user:joe:rw-:1234,mask::r--";
        let short = b"u::rw,u:1234:rw,g::r,m:r,o:-";
        let expected = Acl::given(gnu).unwrap();
        assert_eq!(expected.check(), Ok(()));
        assert_eq!(expected.mode(0o104_777), 0o104_640);
        assert_eq!(expected.entries().len(), 5);
        assert_eq!(Acl::given(bsd).unwrap(), expected);
        assert_eq!(Acl::given(short).unwrap(), expected);
    }

    #[test]
    fn lists_that_the_kernel_refuses_are_refused() {
        for text in [
            "user::rw-",
            "user::rw-,group::r--,other::r--,user:5:r--",
            "user::rw-,group::r--,other::r--,other::r--",
            "user::rw-,group::r--,other::r-q",
            "user::rw-,group::r--,other:5:r--",
            "nonsense",
        ] {
            let acl = Acl::given(text.as_bytes()).unwrap();
            assert_eq!(acl.check(), Err(NO_LIST), "{text}");
        }
        let named = Acl::given(b"user::rw-,group::r--,other::r--,user:joe:r--,mask::r--");
        assert_eq!(named.unwrap().check(), Err(NO_NUMBER));
        assert!(Acl::binary(b"\x02\0\0\0junk").is_err());
    }
}
