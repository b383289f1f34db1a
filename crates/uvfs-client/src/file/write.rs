//! Writing: through the cache, or past it.

use std::cell::Cell;
use std::io::IoSlice;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, RwLockReadGuard};

use rustix::io::{self, Errno};

use super::{File, Flags, PAGE, checked_end};
use crate::cache::Direct;
use crate::connection::pages::Op;
use crate::error::{Doing, Result};
use crate::pending::{Pending, Step};
use crate::types::Lease;

/// Requests of one file that uncached writes keep under way.
const UNCACHED_REQUESTS: usize = 8;

/// The part `from..from + len` of a list of slices.
pub(super) fn cut<'a>(
    bufs: &'a [IoSlice<'a>],
    mut from: usize,
    mut len: usize,
) -> Vec<IoSlice<'a>> {
    let mut parts = Vec::new();
    for buf in bufs {
        let start = from.min(buf.len());
        from -= start;
        let n = (buf.len() - start).min(len);
        len -= n;
        if n > 0 {
            parts.push(IoSlice::new(&buf[start..start + n]));
        }
    }
    parts
}

impl File {
    /// Writes all of `buf` at `offset`, or at the end when the file was opened for appending.
    ///
    /// A buffered write is in the cache when this returns, and in the file after
    /// [`File::sync_data`], [`File::close`] or a while.
    ///
    /// # Errors
    /// `EBADF` when the file is not open for writing, `EINVAL` for an impossible offset, `EFBIG`
    /// beyond the largest one, and what the server answers. After part was written, the error
    /// comes with the next call.
    pub fn write_at(&self, buf: &[u8], offset: u64, flags: Flags) -> Result<usize> {
        self.write_vectored_at(&[IoSlice::new(buf)], offset, flags)
    }

    /// As [`File::write_at`], from several buffers one after another, in one piece as far as
    /// other writers are concerned.
    ///
    /// # Errors
    /// As [`File::write_at`].
    pub fn write_vectored_at(
        &self,
        bufs: &[IoSlice<'_>],
        offset: u64,
        flags: Flags,
    ) -> Result<usize> {
        let written = self.write_where(bufs, (!self.0.append).then_some(offset), flags);
        written.map(|(_, n)| n).doing("writing", &self.0.name)
    }

    pub(super) fn write(&self, buf: &[u8], offset: u64, flags: Flags) -> io::Result<usize> {
        let at = (!self.0.append).then_some(offset);
        Ok(self.write_where(&[IoSlice::new(buf)], at, flags)?.1)
    }

    /// Starts a write. The data is copied before this returns. A buffered write is then done
    /// (it waits like any other when too much is dirty); a direct one within the file is under
    /// way; one that makes the file longer waits for its pieces here.
    pub fn submit_write_at(&self, buf: &[u8], offset: u64, flags: Flags) -> Pending<usize> {
        let f = &*self.0;
        let ready = |result| Pending::ready(self, "writing", result);
        if !self.is_sent_whole(offset, buf.len(), flags) {
            return ready(self.write(buf, offset, flags));
        }
        let within = match self.prepare_write(offset, buf.len()) {
            Ok(Some(within)) => within,
            Ok(None) => return ready(self.write(buf, offset, flags)),
            Err(e) => return ready(Err(e)),
        };
        let data = [IoSlice::new(buf)];
        let dontcache = flags.contains(Flags::DONTCACHE);
        let direct = f
            .inode
            .start_write(&f.handle, offset, &data, dontcache, None);
        drop(within);
        f.cache.counters.bytes_in(buf.len() as u64);
        Pending::new(self, "writing", DirectWrite(direct))
    }

    /// Whether all pieces of a write can be sent at once and left to themselves, if it ends within
    /// the file.
    pub(super) fn is_sent_whole(&self, offset: u64, len: usize, flags: Flags) -> bool {
        let f = &*self.0;
        flags.contains(Flags::DIRECT)
            && !flags.contains(Flags::DSYNC)
            && !f.synchronous
            && f.writable
            && !f.append
            && len > 0
            && checked_end(offset, len).is_ok()
            && f.inode.direct_round(len) == len
    }

    /// Prepares such a write. The caller holds the guard, which keeps the size as it is, until the pieces are sent.
    /// `None` if the write would make the file longer.
    pub(super) fn prepare_write(
        &self,
        offset: u64,
        len: usize,
    ) -> io::Result<Option<RwLockReadGuard<'_, ()>>> {
        let f = &*self.0;
        self.retried(|| Ok(()))?;
        let within = f.inode.shared();
        if offset + len as u64 > f.inode.size() {
            return Ok(None);
        }
        f.wrote.store(true, Ordering::Relaxed);
        f.cache.counters.writes(1);
        f.inode.prepare_direct(Op::Write, offset, len)?;
        Ok(Some(within))
    }

    /// Writes at `offset`, or at the end of the file; answers where that was, and how much.
    pub(super) fn write_where(
        &self,
        bufs: &[IoSlice<'_>],
        offset: Option<u64>,
        flags: Flags,
    ) -> io::Result<(u64, usize)> {
        let f = &*self.0;
        if !f.writable {
            return Err(Errno::BADF);
        }
        let len: usize = bufs.iter().map(|b| b.len()).sum();
        if len == 0 {
            return Ok((offset.map_or_else(|| self.end(), Ok)?, 0));
        }
        if let Some(offset) = offset {
            checked_end(offset, len)?;
        }
        f.cache.counters.writes(1);
        if !f.wrote.load(Ordering::Relaxed) {
            f.wrote.store(true, Ordering::Relaxed);
        }
        let begun = Cell::new(false);
        let write = |session| -> io::Result<(u64, usize)> {
            let written = match offset {
                None => self.write_at_end(bufs, len, flags, &begun)?,
                Some(at) if flags.contains(Flags::DIRECT) => {
                    (at, self.write_direct(bufs, len, at, flags)?)
                }
                Some(at) => (at, self.write_cached(bufs, len, at, flags)?),
            };
            // If the session ended before the data was in the cache, the server's recovery did not find it there.
            fence(Ordering::SeqCst);
            if f.cache.server.session() != Some(session) {
                return Err(Errno::NOTCONN);
            }
            Ok(written)
        };
        // A write at a fixed offset may be repeated. An append that has begun may not.
        let again = Cell::new(false);
        let (at, done) = self.retried_until(offset.map_or(&begun, |_| &again), write)?;
        if done == 0 {
            return Ok((at, 0));
        }
        self.after_write(at, done, flags)?;
        Ok((at, done))
    }

    /// Carries out the flags once something is written.
    fn after_write(&self, at: u64, done: usize, flags: Flags) -> io::Result<()> {
        let inode = &self.0.inode;
        let (first, last) = (at / PAGE, (at + done as u64 - 1) / PAGE);
        if flags.contains(Flags::DONTCACHE) && !flags.contains(Flags::DIRECT) {
            inode.write_range(first, last);
            inode.wait_few_in_flight(UNCACHED_REQUESTS);
        }
        if self.0.synchronous || flags.contains(Flags::DSYNC) {
            self.sync(first, last, true)?;
        }
        Ok(())
    }

    /// A write through the cache; what can't be cached goes to the server.
    fn write_cached(
        &self,
        bufs: &[IoSlice<'_>],
        len: usize,
        at: u64,
        flags: Flags,
    ) -> io::Result<usize> {
        let f = &*self.0;
        let dontcache = flags.contains(Flags::DONTCACHE);
        let writer = f.inode.exclusive();
        let mut done = f.inode.write(&f.handle, bufs, at, None, dontcache)?;
        while done < len && f.inode.lease(Lease::Write) {
            let rest = cut(bufs, done, len - done);
            let n = f
                .inode
                .write(&f.handle, &rest, at + done as u64, None, dontcache);
            match n {
                Ok(n) => done += n,
                Err(e) if done == 0 => return Err(e),
                Err(_) => return Ok(done),
            }
        }
        drop(writer);
        if done < len {
            let rest = cut(bufs, done, len - done);
            match self.write_direct(&rest, len - done, at + done as u64, flags) {
                Ok(n) => done += n,
                Err(e) if done == 0 => return Err(e),
                Err(_) => {}
            }
        }
        Ok(done)
    }

    /// A write past the cache, in as many rounds as its bounce pages take.
    pub(super) fn write_direct(
        &self,
        bufs: &[IoSlice<'_>],
        len: usize,
        at: u64,
        flags: Flags,
    ) -> io::Result<usize> {
        let f = &*self.0;
        let dontcache = flags.contains(Flags::DONTCACHE);
        // A write within the file shares it with other direct ones; one that makes it longer
        // has it alone until its pieces have ended.
        let shared = f.inode.shared();
        let (_shared, _alone) = if at + len as u64 <= f.inode.size() {
            (Some(shared), None)
        } else {
            drop(shared);
            let alone = f.inode.exclusive();
            f.inode.wait_direct();
            (None, Some(alone))
        };
        let mut done = 0;
        while done < len {
            let n = f.inode.direct_round(len - done);
            let data = cut(bufs, done, n);
            let here = at + done as u64;
            let moved = f.inode.prepare_direct(Op::Write, here, n).and_then(|()| {
                let direct = f.inode.start_write(&f.handle, here, &data, dontcache, None);
                direct.wait();
                direct.result()
            });
            match moved {
                Ok(moved) if moved == n => done += n,
                Err(e) if done == 0 => return Err(e),
                short => {
                    done += short.unwrap_or(0);
                    break;
                }
            }
        }
        f.cache.counters.bytes_in(done as u64);
        Ok(done)
    }
}

/// A submitted direct write.
struct DirectWrite(Arc<Direct>);

impl Step<usize> for DirectWrite {
    fn step(&mut self) -> Option<io::Result<usize>> {
        self.0.ended().then(|| self.0.result())
    }
}
