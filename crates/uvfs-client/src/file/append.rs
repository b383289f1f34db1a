//! Writing at the end of a file.

use std::cell::Cell;
use std::io::IoSlice;

use rustix::io::{self, Errno};

use super::write::cut;
use super::{File, Flags, checked_end};
use crate::error::{Doing, Result};

impl File {
    /// Writes at the end of the file; answers where that was.
    ///
    /// # Errors
    /// As [`File::write_at`].
    pub fn append(&self, buf: &[u8], flags: Flags) -> Result<u64> {
        let written = self.write_where(&[IoSlice::new(buf)], None, flags);
        written.map(|(at, _)| at).doing("writing", &self.0.name)
    }

    /// Appends where others may append too: the lease keeps the end of the file where it is.
    pub(super) fn write_at_end(
        &self,
        bufs: &[IoSlice<'_>],
        len: usize,
        flags: Flags,
        begun: &Cell<bool>,
    ) -> io::Result<(u64, usize)> {
        let f = &*self.0;
        let dontcache = flags.contains(Flags::DONTCACHE);
        let writer = f.inode.exclusive();
        let (mut began, mut done) = (None, 0);
        while let Some((seq, at)) = f.inode.append_lease() {
            checked_end(at, len - done).map_err(|_| Errno::FBIG)?;
            let rest = cut(bufs, done, len - done);
            match f.inode.write(&f.handle, &rest, at, Some(seq), dontcache) {
                Ok(0) => continue,
                Ok(n) => done += n,
                Err(e) if done == 0 => return Err(e),
                Err(_) => break,
            }
            began.get_or_insert(at);
            begun.set(true);
            if done == len {
                break;
            }
        }
        drop(writer);
        let Some(at) = began else {
            // There is no lease of it: as good as can be.
            let at = f.inode.current_size()?;
            begun.set(true);
            checked_end(at, len).map_err(|_| Errno::FBIG)?;
            return Ok((at, self.write_direct(bufs, len, at, flags)?));
        };
        if flags.contains(Flags::DIRECT) {
            f.inode.write_and_wait(0, u64::MAX)?;
        }
        Ok((at, done))
    }
}
