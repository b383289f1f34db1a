//! Reading: through the cache, or past it.

use std::io::IoSliceMut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::{self, Errno};

use super::{File, Flags, PAGE, checked_end};
use crate::cache::{Direct, Fill, ReadStop};
use crate::connection::pages::Op;
use crate::error::{Doing, Result};
use crate::pending::{Pending, Step};
use crate::types::Lease;

impl File {
    /// Reads at `offset` until `buf` is full or the file ends.
    ///
    /// # Errors
    /// `EBADF` when the file is not open for reading, `EINVAL` for an impossible offset, and what
    /// the server answers.
    pub fn read_at(&self, buf: &mut [u8], offset: u64, flags: Flags) -> Result<usize> {
        self.read(buf, offset, flags).doing("reading", &self.0.name)
    }

    pub(super) fn read(&self, buf: &mut [u8], offset: u64, flags: Flags) -> io::Result<usize> {
        let f = &*self.0;
        if !f.readable {
            return Err(Errno::BADF);
        }
        if buf.is_empty() {
            return Ok(0);
        }
        checked_end(offset, buf.len())?;
        if flags.contains(Flags::DIRECT) {
            f.cache.counters.direct_calls(1);
        }
        // A server that gave this client up lets others write, so without a session
        // nothing is read.
        self.retried(|| match flags.contains(Flags::DIRECT) {
            true => self.read_direct(buf, offset, flags),
            false => self.read_buffered(buf, offset, flags),
        })
    }

    /// As [`File::read_at`], into several buffers one after another.
    ///
    /// # Errors
    /// As [`File::read_at`].
    pub fn read_vectored_at(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        offset: u64,
        flags: Flags,
    ) -> Result<usize> {
        let mut done = 0;
        for buf in bufs {
            match self.read_at(buf, offset + done as u64, flags) {
                Ok(n) => {
                    done += n;
                    if n < buf.len() {
                        break;
                    }
                }
                Err(e) if done == 0 => return Err(e),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Starts a read; the result is the buffer, as long as what was read.
    pub fn submit_read_at(&self, mut buf: Vec<u8>, offset: u64, flags: Flags) -> Pending<Vec<u8>> {
        let f = &*self.0;
        let direct = flags.contains(Flags::DIRECT);
        let ready = |result| Pending::ready(self, "reading", result);
        if !f.readable {
            return ready(Err(Errno::BADF));
        }
        if let Err(e) = checked_end(offset, buf.len()) {
            return ready(Err(e));
        }
        if buf.is_empty() || (direct && f.inode.direct_round(buf.len()) < buf.len()) {
            // Larger than the bounce pages allow at once: in rounds, here.
            return ready(self.read(&mut buf, offset, flags).map(|n| {
                buf.truncate(n);
                buf
            }));
        }
        if let Err(e) = self.retried(|| Ok(())) {
            return ready(Err(e));
        }
        let dontcache = flags.contains(Flags::DONTCACHE);
        if direct {
            f.cache.counters.direct_calls(1);
            if let Err(e) = f.inode.prepare_direct(Op::Read, offset, buf.len()) {
                return ready(Err(e));
            }
            let direct = f
                .inode
                .start_read(&f.handle, offset, buf.len(), dontcache, None);
            let step = DirectRead {
                direct,
                buf,
                copied: 0,
            };
            return Pending::new(self, "reading", step);
        }
        f.inode.lease(Lease::Read);
        let step = BufferedRead {
            file: self.clone(),
            buf,
            offset,
            done: 0,
            dontcache,
            singly: false,
            fill: None,
            direct: None,
        };
        Pending::new(self, "reading", step)
    }

    fn read_buffered(&self, buf: &mut [u8], offset: u64, flags: Flags) -> io::Result<usize> {
        let f = &*self.0;
        let dontcache = flags.contains(Flags::DONTCACHE);
        let keep = (!dontcache).then(|| self.uses_from(offset));
        let (mut done, mut stop) = f.inode.read_cached(buf, offset, keep);
        if let ReadStop::Miss(_) = stop {
            f.cache.counters.misses(1);
        } else {
            f.cache.counters.hits(1);
        }
        let mut failed = None;
        // Once the device failed to read several pages, each is read alone.
        let mut singly = false;
        loop {
            let at = offset + done as u64;
            match stop {
                ReadStop::Full | ReadStop::Eof => break,
                ReadStop::NoLease if f.inode.lease(Lease::Read) => {}
                ReadStop::NoLease => {
                    let rest = &mut buf[done..];
                    let read = match self.read_direct(rest, at, flags) {
                        Err(Errno::IO) => self.read_pages(rest, at, flags),
                        read => read,
                    };
                    return match read {
                        Ok(n) => Ok(done + n),
                        Err(e) => cut_short(done, e),
                    };
                }
                ReadStop::Miss(page) => {
                    let last = (offset + buf.len() as u64 - 1) / PAGE;
                    failed = match self.bring(page, last, singly, dontcache) {
                        Err(Errno::IO) if !singly => {
                            singly = true;
                            None
                        }
                        brought => brought.err(),
                    };
                    if failed.is_some() {
                        break;
                    }
                }
            }
            let (n, next) = f.inode.read_cached(&mut buf[done..], at, keep);
            done += n;
            stop = next;
        }
        self.after_read(offset, done, dontcache);
        failed.map_or(Ok(done), |code| cut_short(done, code))
    }

    /// From where on a read at `offset` uses pages: the page that the last read has ended in is not used once more.
    fn uses_from(&self, offset: u64) -> u64 {
        let goes_on =
            !offset.is_multiple_of(PAGE) && self.0.read_to.load(Ordering::Relaxed) == offset;
        match goes_on {
            true => offset.next_multiple_of(PAGE),
            false => offset,
        }
    }

    /// Has a page that is missing for a read up to page `last` read, alone or with those behind it, and waits
    /// for it.
    fn bring(&self, page: u64, last: u64, singly: bool, dontcache: bool) -> io::Result<()> {
        let f = &*self.0;
        let fill = if f.inode.is_reading(page) {
            // Readahead or another reader brings it.
            Arc::default()
        } else if singly {
            f.inode.fill(&f.handle, page, page, dontcache, true)
        } else {
            self.read_missing(page, last, dontcache)
        };
        let ready = || fill.finished() && !f.inode.is_reading(page);
        f.cache.wait(&f.inode.event, || ready().then_some(()));
        fill.error().map_or(Ok(()), Err)
    }

    /// Ends a read: begins more readahead, and drops pages.
    fn after_read(&self, offset: u64, done: usize, dontcache: bool) {
        let f = &*self.0;
        if done == 0 {
            return;
        }
        f.cache.counters.bytes_out(done as u64);
        let end = offset + done as u64;
        if !end.is_multiple_of(PAGE) {
            f.read_to.store(end, Ordering::Relaxed);
        }
        let (first, last) = (offset / PAGE, (end - 1) / PAGE);
        let mark = f.mark.load(Ordering::Relaxed);
        if (first..=last).contains(&mark) {
            self.read_ahead(dontcache);
        }
        if dontcache {
            // A page that the next read still needs stays for it, if this one ended within.
            let next = if end >= f.inode.size() {
                last + 1
            } else {
                end / PAGE
            };
            if next > first {
                f.inode.drop_behind(first, next - 1);
            }
        }
    }

    /// A read past the cache, in as many rounds as its bounce pages take.
    fn read_direct(&self, buf: &mut [u8], offset: u64, flags: Flags) -> io::Result<usize> {
        let f = &*self.0;
        let dontcache = flags.contains(Flags::DONTCACHE);
        let mut done = 0;
        while done < buf.len() {
            let n = f.inode.direct_round(buf.len() - done);
            let part = &mut buf[done..done + n];
            match self.read_round(part, offset + done as u64, dontcache) {
                Ok(moved) => {
                    done += moved;
                    if moved < n {
                        break;
                    }
                }
                Err(e) => {
                    done = cut_short(done, e)?;
                    break;
                }
            }
        }
        f.cache.counters.bytes_out(done as u64);
        Ok(done)
    }

    /// As [`File::read_direct`], each page by itself: up to the first that can't be read.
    fn read_pages(&self, buf: &mut [u8], offset: u64, flags: Flags) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let n = (buf.len() - done).min((PAGE - at % PAGE) as usize);
            match self.read_direct(&mut buf[done..done + n], at, flags) {
                Ok(moved) => {
                    done += moved;
                    if moved < n {
                        break;
                    }
                }
                Err(e) => return cut_short(done, e),
            }
        }
        Ok(done)
    }

    /// One round of a direct read.
    fn read_round(&self, buf: &mut [u8], at: u64, dontcache: bool) -> io::Result<usize> {
        let f = &*self.0;
        f.inode.prepare_direct(Op::Read, at, buf.len())?;
        let direct = f
            .inode
            .start_read(&f.handle, at, buf.len(), dontcache, None);
        direct.wait_copying(buf);
        direct.result()
    }
}

/// The result of a read that failed after `done` bytes: their number, unless it is to be made again from
/// the beginning, should the server come back.
fn cut_short(done: usize, error: Errno) -> io::Result<usize> {
    match done == 0 || error == Errno::NOTCONN {
        true => Err(error),
        false => Ok(done),
    }
}

/// A submitted direct read.
struct DirectRead {
    direct: Arc<Direct>,
    buf: Vec<u8>,
    copied: usize,
}

impl Step<Vec<u8>> for DirectRead {
    fn step(&mut self) -> Option<io::Result<Vec<u8>>> {
        let ended = self.direct.ended();
        self.direct.copy_out(&mut self.buf, &mut self.copied);
        ended.then(|| {
            let n = self.direct.result()?;
            self.buf.truncate(n);
            Ok(std::mem::take(&mut self.buf))
        })
    }

    fn hurry(&self) {
        self.direct.hurry();
    }

    fn progress(&self) -> usize {
        self.copied
    }
}

/// A submitted read through the cache.
struct BufferedRead {
    file: File,
    buf: Vec<u8>,
    offset: u64,
    done: usize,
    dontcache: bool,
    /// The device failed to read several pages: each is read alone.
    singly: bool,
    fill: Option<Arc<Fill>>,
    /// Reads the rest past the cache: there is no lease.
    direct: Option<Arc<Direct>>,
}

impl BufferedRead {
    /// How much of the rest a direct read is to bring.
    fn round(&self) -> usize {
        let rest = self.buf.len() - self.done;
        let at = self.offset + self.done as u64;
        match self.singly {
            true => rest.min((PAGE - at % PAGE) as usize),
            false => self.file.0.inode.direct_round(rest),
        }
    }

    /// Takes what was asked for last, once it is there: whether anything is to come after it.
    fn take(&mut self) -> Option<io::Result<bool>> {
        if let Some(direct) = &self.direct {
            if !direct.ended() {
                return None;
            }
            let asked = self.round();
            let moved = match direct.result() {
                Ok(moved) => moved,
                Err(Errno::IO) if !self.singly => {
                    (self.direct, self.singly) = (None, true);
                    return Some(Ok(true));
                }
                Err(e) if self.done == 0 => return Some(Err(e)),
                Err(_) => return Some(Ok(false)),
            };
            let rest = &mut self.buf[self.done..];
            direct.copy_out_from(0, &mut rest[..moved]);
            self.done += moved;
            self.direct = None;
            return Some(Ok(moved == asked && self.done < self.buf.len()));
        }
        let Some(fill) = &self.fill else {
            return Some(Ok(true));
        };
        if !fill.finished() {
            return None;
        }
        match fill.error() {
            Some(Errno::IO) if !self.singly => {
                self.singly = true;
                Some(Ok(true))
            }
            Some(code) if self.done == 0 => Some(Err(code)),
            failed => Some(Ok(failed.is_none())),
        }
    }

    /// Reads what is cached and asks for what is missing; false when there is nothing to wait for.
    fn ask(&mut self) -> Option<bool> {
        let f = &*self.file.0;
        let rest = &mut self.buf[self.done..];
        let at = self.offset + self.done as u64;
        let keep = (!self.dontcache).then(|| self.file.uses_from(self.offset));
        let (n, stop) = f.inode.read_cached(rest, at, keep);
        self.done += n;
        self.fill = None;
        match stop {
            ReadStop::Full | ReadStop::Eof => return Some(false),
            ReadStop::NoLease => {
                let at = at + n as u64;
                let len = self.round();
                let direct = f.inode.start_read(&f.handle, at, len, self.dontcache, None);
                self.direct = Some(direct);
            }
            // Another read brings it.
            ReadStop::Miss(page) if f.inode.is_reading(page) => return None,
            ReadStop::Miss(page) if self.singly => {
                self.fill = Some(f.inode.fill(&f.handle, page, page, self.dontcache, true));
            }
            ReadStop::Miss(page) => {
                let last = (self.offset + self.buf.len() as u64 - 1) / PAGE;
                self.fill = Some(self.file.read_missing(page, last, self.dontcache));
            }
        }
        Some(true)
    }
}

impl Step<Vec<u8>> for BufferedRead {
    fn step(&mut self) -> Option<io::Result<Vec<u8>>> {
        loop {
            match self.take()? {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => return Some(Err(e)),
            }
            if !self.ask()? {
                break;
            }
        }
        let mut buf = std::mem::take(&mut self.buf);
        buf.truncate(self.done);
        self.file.after_read(self.offset, self.done, self.dontcache);
        Some(Ok(buf))
    }
}
