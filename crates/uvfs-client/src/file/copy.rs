//! Copying from file to file.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::{self, Errno};

use super::{File, Flags, PAGE};
use crate::error::{Doing, Result};

/// Bytes that are copied at once where the server can't copy.
const COPY: usize = 1 << 20;

impl File {
    /// Copies up to `len` bytes from `offset` of this file to `to_offset` of another, or elsewhere in
    /// the same one, as copy_file_range(2): at the server, where the server can. Answers how many;
    /// fewer at the end of this file, and when it was told to stop.
    ///
    /// # Errors
    /// `EBADF` when this file is not open for reading, or the other not for writing or for appending;
    /// `EINVAL` for impossible or overlapping ranges; and what the server answers.
    pub fn copy_range(&self, offset: u64, to: &File, to_offset: u64, len: u64) -> Result<u64> {
        let copied = self.copy(offset, to, to_offset, len);
        copied.doing("copying", &self.0.name)
    }

    fn copy(&self, offset: u64, to: &File, to_offset: u64, len: u64) -> io::Result<u64> {
        let (f, t) = (&*self.0, &*to.0);
        if !f.readable || !t.writable || t.append {
            return Err(Errno::BADF);
        }
        let end = |offset: u64| {
            offset
                .checked_add(len)
                .filter(|&end| end <= i64::MAX as u64)
        };
        let (Some(from_end), Some(to_end)) = (end(offset), end(to_offset)) else {
            return Err(Errno::INVAL);
        };
        let same = Arc::ptr_eq(&f.cache, &t.cache);
        let one = same && f.inode.node == t.inode.node;
        if one && offset < to_end && to_offset < from_end {
            return Err(Errno::INVAL);
        }
        if len == 0 {
            return Ok(0);
        }
        if same {
            match self.copy_at_server(offset, to, to_offset, len) {
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::XDEV) => {}
                other => return other,
            }
        }
        self.copy_through_cache(offset, to, to_offset, len)
    }

    fn copy_at_server(&self, offset: u64, to: &File, to_offset: u64, len: u64) -> io::Result<u64> {
        let (f, t) = (&*self.0, &*to.0);
        let _writer = t.inode.exclusive();
        t.inode.wait_direct();
        t.wrote.store(true, Ordering::Relaxed);
        let copied = to.retried_until(&Cell::new(false), |session| {
            f.handle.check(&f.cache.server, session)?;
            // All of both: what the server takes for their ends must be so.
            f.inode.write_and_wait(0, u64::MAX)?;
            t.inode.write_and_wait(0, u64::MAX)?;
            f.cache.server.copy_range(
                (f.inode.node, f.handle.fh),
                offset,
                (t.inode.node, t.handle.fh),
                to_offset,
                len,
            )
        })?;
        if copied > 0 {
            let end = to_offset + copied;
            let (first, last) = (to_offset / PAGE, (end - 1) / PAGE);
            t.inode.invalidate_range(first, last, Some(end));
        }
        Ok(copied)
    }

    fn copy_through_cache(
        &self,
        offset: u64,
        to: &File,
        to_offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let mut buf = vec![0; usize::try_from(len).unwrap_or(COPY).min(COPY)];
        let mut done = 0;
        while done < len {
            let want = usize::try_from(len - done).unwrap_or(COPY).min(COPY);
            let moved = self
                .read(&mut buf[..want], offset + done, Flags::empty())
                .and_then(|n| to.write(&buf[..n], to_offset + done, Flags::empty()));
            match moved {
                Ok(0) => break,
                Ok(n) => done += n as u64,
                Err(e) if done == 0 => return Err(e),
                Err(_) => break,
            }
        }
        Ok(done)
    }
}
