//! The parts of replies beyond plain structures: their header, directory entries, times.

use std::time::Duration;

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::abi::{Dirent, Direntplus, EntryOut, OutHeader};
use crate::rec_align;

/// The header of a reply: `error` is 0 or a negative errno, `len` the bytes that follow.
///
/// # Panics
///
/// If the reply is 4 GiB or longer; no request can ask for that much.
pub fn header(unique: u64, error: i32, len: usize) -> OutHeader {
    let len = u32::try_from(size_of::<OutHeader>() + len).expect("a reply is shorter than 4 GiB");
    OutHeader { len, error, unique }
}

/// A lifetime as the wire has it: seconds, and nanoseconds of the last one.
pub fn ttl(duration: Duration) -> (u64, u32) {
    (duration.as_secs(), duration.subsec_nanos())
}

/// The lifetime of an [`EntryOut`] or an `AttrOut`. As in the kernel, nanoseconds beyond a second
/// count as just under one.
pub fn duration(secs: u64, nsec: u32) -> Duration {
    Duration::new(secs, nsec.min(999_999_999))
}

impl EntryOut {
    /// Sets for how long the name may be cached.
    pub fn set_entry_ttl(&mut self, ttl: Duration) {
        (self.entry_valid, self.entry_valid_nsec) = self::ttl(ttl);
    }

    /// Sets for how long the attributes may be cached.
    pub fn set_attr_ttl(&mut self, ttl: Duration) {
        (self.attr_valid, self.attr_valid_nsec) = self::ttl(ttl);
    }
}

/// The buffer has no room for another entry: what was appended is the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the buffer is full")]
pub struct Full;

/// Writes the reply to READDIR or READDIRPLUS into a buffer.
///
/// The kernel refuses names that are empty or have a slash.
#[derive(Debug)]
pub struct DirBuf<'a> {
    buf: &'a mut [u8],
    len: usize,
}

impl<'a> DirBuf<'a> {
    /// An empty list; `buf` is as long as the request's `size`.
    pub fn new(buf: &'a mut [u8]) -> Self {
        Self { buf, len: 0 }
    }

    /// Bytes written.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was appended.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends an entry of READDIR. `off` is where reading goes on after it, `kind` its file type
    /// (`DT_*`).
    pub fn push(&mut self, ino: u64, off: u64, kind: u32, name: &[u8]) -> Result<(), Full> {
        let namelen = u32::try_from(name.len()).map_err(|_| Full)?;
        self.push_record(
            Dirent {
                ino,
                off,
                namelen,
                r#type: kind,
            }
            .as_bytes(),
            name,
        )
    }

    /// Appends an entry of READDIRPLUS. With a `nodeid` of 0 the kernel takes the name only and
    /// counts no lookup; with another it counts one.
    pub fn push_plus(
        &mut self,
        entry_out: &EntryOut,
        ino: u64,
        off: u64,
        kind: u32,
        name: &[u8],
    ) -> Result<(), Full> {
        let namelen = u32::try_from(name.len()).map_err(|_| Full)?;
        let dirent = Dirent {
            ino,
            off,
            namelen,
            r#type: kind,
        };
        self.push_record(
            Direntplus {
                entry_out: *entry_out,
                dirent,
            }
            .as_bytes(),
            name,
        )
    }

    fn push_record(&mut self, fixed: &[u8], name: &[u8]) -> Result<(), Full> {
        let len = fixed.len() + name.len();
        let room = self.buf[self.len..].get_mut(..rec_align(len)).ok_or(Full)?;
        room[..fixed.len()].copy_from_slice(fixed);
        room[fixed.len()..len].copy_from_slice(name);
        room[len..].fill(0);
        self.len += room.len();
        Ok(())
    }
}

/// The entries of a reply to READDIR. A record that is cut off or has no name ends the list with
/// EIO.
pub fn dirents(mut bytes: &[u8]) -> impl Iterator<Item = Result<(Dirent, &[u8]), Errno>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let record = (|| {
            let (entry, rest) = Dirent::read_from_prefix(bytes).ok()?;
            let namelen = usize::try_from(entry.namelen).ok().filter(|&len| len > 0)?;
            let name = rest.get(..namelen)?;
            bytes = bytes.get(rec_align(size_of::<Dirent>() + namelen)..)?;
            Some((entry, name))
        })();
        if record.is_none() {
            bytes = &[];
        }
        Some(record.ok_or(Errno::IO))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lifetime travels as seconds and nanoseconds, and values out of range are clamped.
    #[test]
    fn times_are_seconds_and_nanoseconds() {
        assert_eq!(ttl(Duration::from_millis(1500)), (1, 500_000_000));
        assert_eq!(duration(1, 500_000_000), Duration::from_millis(1500));
        assert_eq!(
            duration(u64::MAX, u32::MAX),
            Duration::new(u64::MAX, 999_999_999)
        );
        assert_eq!(ttl(Duration::MAX), (u64::MAX, 999_999_999));
    }

    /// Entries of a listing are aligned to 8 bytes, read back unchanged, and refused when they do not fit.
    #[test]
    fn entries_are_aligned_and_read_back() {
        let mut buf = [0xff; 128];
        let mut dir = DirBuf::new(&mut buf);
        assert!(dir.is_empty());
        dir.push(2, 1, 4, b".").unwrap();
        assert_eq!(dir.len(), 32);
        dir.push(3, 2, 8, b"12345678").unwrap();
        assert_eq!(dir.len(), 64);
        dir.push(4, 3, 8, b"123456789").unwrap();
        assert_eq!(dir.len(), 104);
        assert_eq!(
            dir.push(5, 4, 8, b"x"),
            Err(Full),
            "24 bytes are left, 32 needed"
        );
        assert_eq!(dir.len(), 104);
        assert_eq!(buf[25..32], [0; 7]);
        let entries: Vec<_> = dirents(&buf[..104]).map(Result::unwrap).collect();
        assert_eq!(
            entries[0],
            (
                Dirent {
                    ino: 2,
                    off: 1,
                    namelen: 1,
                    r#type: 4
                },
                &b"."[..]
            )
        );
        assert_eq!(entries[1].1, b"12345678");
        assert_eq!(entries[2].1, b"123456789");
        assert_eq!(entries.len(), 3);
        let cut: Vec<_> = dirents(&buf[..100]).collect();
        assert_eq!(cut.len(), 3);
        assert_eq!(cut[2], Err(Errno::IO));
    }

    /// A listing carries the attributes and lifetimes of its entries.
    #[test]
    fn plus_entries_carry_attributes() {
        let mut buf = [0; 512];
        let mut dir = DirBuf::new(&mut buf);
        let mut entry = EntryOut {
            nodeid: 7,
            ..Default::default()
        };
        entry.set_entry_ttl(Duration::from_millis(1500));
        entry.set_attr_ttl(Duration::from_secs(2));
        dir.push_plus(&entry, 9, 1, 8, b"name").unwrap();
        let len = dir.len();
        assert_eq!(len, 160);
        let (read, name) = Direntplus::read_from_prefix(&buf[..len]).unwrap();
        assert_eq!(
            (read.entry_out, read.dirent.ino, name),
            (entry, 9, &b"name\0\0\0\0"[..])
        );
        assert_eq!(
            (entry.entry_valid, entry.entry_valid_nsec, entry.attr_valid),
            (1, 500_000_000, 2)
        );
    }

    /// A reply's length includes its header.
    #[test]
    fn a_header_counts_itself() {
        assert_eq!(
            header(5, -2, 0),
            OutHeader {
                len: 16,
                error: -2,
                unique: 5
            }
        );
        assert_eq!(header(5, 0, 128).len, 144);
    }
}
