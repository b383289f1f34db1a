//! The members of a tar archive: a header of one block each, and contents in whole blocks.
//!
//! Formats: POSIX.1-2017 (`pax`, "ustar Interchange Format" and "pax Header Block"), and `tar(5)` of libarchive for the
//! older one of GNU tar.

use super::pax::{self, Extended, Record, up_to_nul};
use super::sparse::Sparse;
use super::{Meta, Time, invalid};
use std::io::{self, Read};
use tar::Header;

/// The unit of an archive.
pub const BLOCK: usize = 512;
/// The longest extended header: a map of a million parts, or all attributes of a file fit into it.
const LONGEST: u64 = 16 << 20;

/// A member: a name, what it leads to, and how its contents are stored.
#[derive(Debug)]
pub struct Member {
    /// Its path, as the archive has it.
    pub path: Vec<u8>,
    /// The target of a link.
    pub link: Vec<u8>,
    /// The inode, with its access control list in the mode. Its type is 0 if this is a further name of one.
    pub meta: Meta,
    /// What extended headers say besides.
    pub extended: Extended,
}

/// An archive on its way in. After [`Members::next`] it reads as the contents of the member.
#[derive(Debug)]
pub struct Members<R> {
    from: R,
    /// Bytes read.
    at: u64,
    /// Bytes of contents to come.
    left: u64,
    /// Bytes behind them, up to the next block.
    padding: u64,
    /// Headers for all members to come.
    global: Vec<Record>,
}

/// A number of a header: octal digits, or big-endian if the first bit is set, with a sign in the second. Nothing is 0.
pub fn number(field: &[u8]) -> Option<i128> {
    let [first, rest @ ..] = field else {
        return None;
    };
    if first & 0x80 != 0 {
        // Twelve bytes at most.
        let sign = if first & 0x40 != 0 { -1 } else { 0 };
        let high = i128::from(first & 0x7f) | sign << 7;
        return Some(rest.iter().fold(high, |n, b| n << 8 | i128::from(*b)));
    }
    // GNU tar reads the fields of a program that begins them with a NUL.
    let field = if *first == 0 { rest } else { field };
    let digits = up_to_nul(field).trim_ascii();
    digits.iter().try_fold(0, |n, b| match b {
        b'0'..=b'7' => Some(n << 3 | i128::from(b - b'0')),
        _ => None,
    })
}

/// Whether a block is a header: the sum of its bytes, taken as signed ones by some old programs, is what it says.
pub fn is_header(block: &[u8; BLOCK]) -> bool {
    let (sum, rest) = (&block[148..156], [&block[..148], &block[156..]]);
    let Some(told) = number(sum) else {
        return false;
    };
    let add = |byte: fn(u8) -> i32| -> i128 {
        let all: i32 = rest
            .iter()
            .flat_map(|part| part.iter())
            .map(|b| byte(*b))
            .sum();
        // The sum itself counts as spaces.
        i128::from(all + 8 * 32)
    };
    told == add(|b| b.into()) || told == add(|b| (b as i8).into())
}

/// The type that a member's inode has, 0 for a further name of one.
fn type_bits(flag: u8, path: &[u8]) -> io::Result<u16> {
    Ok(match flag {
        // Before there was a type for directories, a slash made one.
        0 | b'0' | b'7' if path.ends_with(b"/") => 0o040_000,
        0 | b'0' | b'7' | b'S' => 0o100_000,
        b'1' => 0,
        b'2' => 0o120_000,
        b'3' => 0o020_000,
        b'4' => 0o060_000,
        b'5' | b'D' => 0o040_000,
        b'6' => 0o010_000,
        b'M' => return Err(invalid(pax::CONTINUED)),
        _ => {
            let flag = flag.escape_ascii();
            return Err(invalid(format!("members of type '{flag}' are not known")));
        }
    })
}

impl<R: Read> Members<R> {
    /// The members of an archive.
    pub fn new(from: R) -> Members<R> {
        Members {
            from,
            at: 0,
            left: 0,
            padding: 0,
            global: Vec::new(),
        }
    }

    /// Bytes of the member's contents that were not read yet.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// The next member, `None` at the end. The path is for the message if it fails.
    pub fn next(&mut self) -> Result<Option<Member>, (Vec<u8>, io::Error)> {
        let nowhere = |e| (Vec::new(), e);
        let (mut local, mut name, mut link) = (Vec::new(), None, None);
        loop {
            let block = match self.header().map_err(nowhere)? {
                Some(block) => block,
                None => return Ok(None),
            };
            let header = Header::from_byte_slice(&block);
            let flag = block[156];
            let size = number(&header.as_old().size).and_then(|n| u64::try_from(n).ok());
            let size = size.ok_or_else(|| nowhere(self.senseless("the size")))?;
            match flag {
                b'g' => self.global = self.extended(size).map_err(nowhere)?,
                b'x' | b'X' => local = self.extended(size).map_err(nowhere)?,
                b'L' => name = Some(up_to_nul(&self.special(size).map_err(nowhere)?).to_vec()),
                b'K' => link = Some(up_to_nul(&self.special(size).map_err(nowhere)?).to_vec()),
                // The archive's name.
                b'V' => self.contents(size),
                _ => {
                    let path = name.unwrap_or_else(|| header.path_bytes().into_owned());
                    let link =
                        link.unwrap_or_else(|| up_to_nul(&header.as_old().linkname).to_vec());
                    let member = self.member(header, flag, size, (&path, link), local);
                    return member.map(Some).map_err(|e| (path, e));
                }
            }
        }
    }

    fn senseless(&self, what: &str) -> io::Error {
        let at = self.at - BLOCK as u64;
        invalid(format!("{what} in the header at byte {at} makes no sense"))
    }

    /// Announces contents.
    fn contents(&mut self, size: u64) {
        self.left = size;
        self.padding = size.wrapping_neg() % BLOCK as u64;
    }

    /// The next header; `None` if there are no more.
    fn header(&mut self) -> io::Result<Option<[u8; BLOCK]>> {
        let behind = self.left.saturating_add(self.padding);
        let skipped = io::copy(&mut (&mut self.from).take(behind), &mut io::sink())?;
        if skipped < behind {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += skipped;
        self.contents(0);
        let mut block = [0; BLOCK];
        if !self.block(&mut block)? {
            // A program that fails while it writes into a pipe leaves an archive without its end.
            let why = match self.at {
                0 => "it is empty; did the program that writes it fail?",
                _ => "it has no end; did the program that writes it fail?",
            };
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
        }
        if block.iter().all(|b| *b == 0) {
            // Behind the end comes padding, until the writer is done.
            io::copy(&mut self.from, &mut io::sink())?;
            return Ok(None);
        }
        if !is_header(&block) {
            return Err(match self.at {
                512 => invalid("it is no tar archive: the checksum of the first header is wrong"),
                _ => self.senseless("the checksum"),
            });
        }
        Ok(Some(block))
    }

    /// Reads a block; `false` if there is nothing more.
    fn block(&mut self, block: &mut [u8; BLOCK]) -> io::Result<bool> {
        match (&mut self.from).take(BLOCK as u64).read(block)? {
            0 => return Ok(false),
            n => self.from.read_exact(&mut block[n..])?,
        }
        self.at += BLOCK as u64;
        Ok(true)
    }

    /// All of the contents of a header that is about another one.
    fn special(&mut self, size: u64) -> io::Result<Vec<u8>> {
        if size > LONGEST {
            let why = "an extended header is longer than 16 MiB";
            return Err(invalid(why));
        }
        self.contents(size);
        let mut bytes = Vec::new();
        self.take(size).read_to_end(&mut bytes)?;
        match self.left {
            0 => Ok(bytes),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn extended(&mut self, size: u64) -> io::Result<Vec<Record>> {
        pax::records(&self.special(size)?)
    }

    fn member(
        &mut self,
        header: &Header,
        flag: u8,
        size: u64,
        (path, link): (&[u8], Vec<u8>),
        local: Vec<Record>,
    ) -> io::Result<Member> {
        let fields = header.as_old();
        let get = |field: &[u8], what| number(field).ok_or_else(|| self.senseless(what));
        let mut sparse = Sparse::default();
        if flag == b'S' {
            let gnu = header.as_gnu();
            let gnu = gnu.ok_or_else(|| invalid("a map of holes, and no header of GNU tar"))?;
            let real = get(&gnu.realsize, "the size")?;
            sparse.size = u64::try_from(real).ok();
            let mut parts: Vec<_> = (gnu.sparse.iter())
                .map(|p| (p.offset, p.numbytes))
                .collect();
            let mut more = gnu.isextended[0] != 0;
            loop {
                sparse.old(&parts)?;
                if !more {
                    break;
                }
                let mut block = [0; BLOCK];
                if !self.block(&mut block)? {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                let (pairs, _) = block.as_chunks::<12>();
                let (pairs, _) = pairs[..42].as_chunks::<2>();
                parts = pairs.iter().map(|[at, len]| (*at, *len)).collect();
                more = block[504] != 0;
            }
        }
        let get = |field: &[u8], what| number(field).ok_or_else(|| self.senseless(what));
        // GNU tar takes attributes from the member's own headers only.
        let common = |(keyword, _): &&Record| !keyword.starts_with(b"SCHILY.xattr.");
        let records = self.global.iter().filter(common).chain(&local);
        let extended = Extended::new(records, sparse)?;
        let path = (extended.sparse.name.as_deref())
            .or(extended.path.as_deref())
            .unwrap_or(path)
            .to_vec();
        let kind = type_bits(flag, &path)?;
        let mtime = match extended.mtime {
            Some(time) => time,
            None => Time {
                sec: i64::try_from(get(&fields.mtime, "the time")?)
                    .map_err(|_| self.senseless("the time"))?,
                nsec: 0,
            },
        };
        let id = |told: Option<u32>, field: &[u8], what| match told {
            Some(id) => Ok(id),
            None => pax::owner(get(field, what)?),
        };
        let uid = id(extended.uid, &fields.uid, "the owner")?;
        let gid = id(extended.gid, &fields.gid, "the group")?;
        let mode = match kind {
            // Linux gives all of them this one.
            0o120_000 => 0o777,
            _ => get(&fields.mode, "the mode")? as u16 & 0o7777,
        };
        let rdev = match (kind, header.as_ustar(), header.as_gnu()) {
            (0o020_000 | 0o060_000, Some(h), _) => (&h.dev_major, &h.dev_minor),
            (0o020_000 | 0o060_000, _, Some(h)) => (&h.dev_major, &h.dev_minor),
            _ => (&[0; 8], &[0; 8]),
        };
        let device = |field: &[u8]| {
            let n = u32::try_from(get(field, "the device number")?);
            n.map_err(|_| self.senseless("the device number"))
        };
        let rdev = (device(rdev.0)?, device(rdev.1)?);
        let size = extended.size.unwrap_or(size);
        // Links, devices and directories have no contents, whatever size their headers have.
        let stored = kind == 0o100_000 || flag == b'D';
        let mut meta = Meta {
            mode: kind | mode,
            uid,
            gid,
            size: if kind == 0o100_000 { size } else { 0 },
            rdev,
            atime: extended.atime.unwrap_or(mtime),
            mtime,
            ctime: mtime,
            crtime: extended.birth.unwrap_or(mtime),
            flags: 0,
        };
        if let Some(acl) = &extended.access
            && kind != 0o120_000
        {
            meta.mode = acl.mode(meta.mode);
        }
        let link = extended.link.as_deref().map_or(link, <[u8]>::to_vec);
        self.contents(if stored { size } else { 0 });
        Ok(Member {
            path,
            link,
            meta,
            extended,
        })
    }
}

impl<R: Read> Read for Members<R> {
    /// Reads the contents of the member that was given last.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let most = self.left.min(buf.len() as u64) as usize;
        if most == 0 {
            return Ok(0);
        }
        let n = self.from.read(&mut buf[..most])?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (self.left, self.at) = (self.left - n as u64, self.at + n as u64);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_binary() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   644 \0"), Some(0o644));
        assert_eq!(number(b"\x000644 "), Some(0o644));
        assert_eq!(number(b"77777777"), Some(0o77_777_777));
        assert_eq!(number(&[0; 12]), Some(0));
        assert_eq!(number(b"        "), Some(0));
        assert_eq!(number(b"644x"), None);
        assert_eq!(number(b"\x80\0\0\0\0\0\0\x07"), Some(7));
        assert_eq!(number(&[0xff; 12]), Some(-1));
        let mut most = [0xff; 12];
        most[0] = 0xbf;
        assert_eq!(number(&most), Some((1 << 94) - 1));
    }
}
