//! Open files.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use uvfs_queue::arena::PAGE_SIZE;

use crate::backend::{Attr, Backend, Lease, LockRequest, NodeId, Op, SetAttr};
use crate::cache::{CARRIED, Cache, Direct, Fill, Flush, Handle, Inode, ReadStop, errno, lock};
use crate::client::Shared;
use crate::pending::{Pending, Step};

mod begun;

pub use begun::{Driver, Landed};

const PAGE: u64 = PAGE_SIZE as u64;
/// The first readahead window, in pages.
const FIRST_WINDOW: u64 = 16;
/// Bytes that are copied at once where the backend can't copy.
const COPY: usize = 1 << 20;
/// Requests of one file that uncached writes keep under way.
const UNCACHED_REQUESTS: usize = 8;

bitflags::bitflags! {
    /// How one call is to be done, as the `RWF_*` flags of preadv2(2).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Flags: u32 {
        /// Pages that the call brings in go when its I/O ends (`RWF_DONTCACHE`).
        const DONTCACHE = 1;
        /// Past the cache, all pieces at once (`O_DIRECT` for one call; no alignment is needed).
        const DIRECT = 2;
        /// The data is durable when the write returns (`RWF_DSYNC`).
        const DSYNC = 4;
    }
}

/// How a file is opened; as [`std::fs::OpenOptions`].
#[derive(Debug, Clone)]
pub struct OpenOptions {
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) append: bool,
    pub(crate) truncate: bool,
    pub(crate) create: bool,
    pub(crate) create_new: bool,
    pub(crate) mode: u32,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self::new()
    }
}

macro_rules! option {
    ($($(#[$doc:meta])* $name:ident: $type:ty),* $(,)?) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $name;
            self
        })*
    };
}

impl OpenOptions {
    /// Nothing set; permissions 0666 for new files.
    pub fn new() -> Self {
        Self {
            read: false,
            write: false,
            append: false,
            truncate: false,
            create: false,
            create_new: false,
            mode: 0o666,
        }
    }
    option! {
        /// For reading.
        read: bool,
        /// For writing.
        write: bool,
        /// For writing, always at the end of the file.
        append: bool,
        /// Cut to nothing first.
        truncate: bool,
        /// Make it if it is not there.
        create: bool,
        /// Make it, and fail if it is there.
        create_new: bool,
        /// Permissions of a new file.
        mode: u32,
    }
}

/// What the caller knows about its reads, as posix_fadvise(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Nothing.
    Normal,
    /// Sequential: read further ahead.
    Sequential,
    /// Random: read nothing ahead.
    Random,
    /// The range will be read soon: start reading it.
    WillNeed,
    /// The range will not be needed: write what is dirty of it, and drop it.
    DontNeed,
}

/// What [`File::allocate`] does with a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocateMode {
    /// Reserves space; the file grows if the range ends beyond it.
    Extend,
    /// Reserves space; the size stays.
    KeepSize,
    /// Makes a hole; the size stays.
    PunchHole,
    /// Makes zeros; the file grows if the range ends beyond it.
    ZeroRange,
}

/// An open file. Clones are the same open file.
#[derive(Debug, Clone)]
pub struct File(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    inode: Arc<Inode>,
    handle: Arc<Handle>,
    cache: Arc<Cache>,
    readable: bool,
    writable: bool,
    append: bool,
    ahead: Mutex<Ahead>,
    /// A read of this page starts the next window.
    mark: AtomicU64,
    advice: AtomicU8,
    /// Where this open file is in the inode's errors.
    errors: AtomicU64,
    wrote: AtomicBool,
    /// As which it owns locks.
    owner: u32,
    /// It may have locks: of ranges, of the whole.
    locked: [AtomicBool; 2],
    // Last: the client's end waits for writeback.
    _client: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Ahead {
    /// The page after the last one that was asked for.
    expect: u64,
    /// The page after the window.
    end: u64,
    /// Pages of the window; 0 when reads are not sequential.
    window: u64,
}

fn checked_end(offset: u64, len: usize) -> io::Result<u64> {
    offset
        .checked_add(len as u64)
        .filter(|&end| end <= i64::MAX as u64)
        .ok_or_else(|| errno(libc::EINVAL))
}

/// The part `from..from + len` of a list of slices.
fn cut<'a>(bufs: &'a [IoSlice<'a>], mut from: usize, mut len: usize) -> Vec<IoSlice<'a>> {
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
    pub(crate) fn new(
        client: Arc<Shared>,
        inode: Arc<Inode>,
        handle: Arc<Handle>,
        options: &OpenOptions,
    ) -> Self {
        inode.opens.fetch_add(1, Ordering::AcqRel);
        Self(Arc::new(Inner {
            errors: AtomicU64::new(inode.errors.sample()),
            cache: client.cache.clone(),
            _client: client,
            inode,
            handle,
            readable: options.read,
            writable: options.write || options.append,
            append: options.append,
            ahead: Mutex::default(),
            mark: AtomicU64::new(u64::MAX),
            advice: AtomicU8::new(0),
            wrote: AtomicBool::new(false),
            owner: {
                static NEXT: AtomicU32 = AtomicU32::new(1);
                NEXT.fetch_add(1, Ordering::Relaxed)
            },
            locked: Default::default(),
        }))
    }

    /// What names it to the backend.
    pub(crate) fn at_backend(&self) -> (NodeId, u64, &dyn Backend) {
        let f = &*self.0;
        (f.handle.node, f.handle.fh, &*f.cache.backend)
    }

    /// Whether it is open for reading, and for writing.
    pub(crate) fn is_open_for(&self) -> (bool, bool) {
        (self.0.readable, self.0.writable)
    }

    pub(crate) fn lock_owner(&self) -> u32 {
        self.0.owner
    }

    /// A lock is about to be asked for: closing the file gives it back.
    pub(crate) fn note_lock(&self, flock: bool) {
        self.0.locked[usize::from(flock)].store(true, Ordering::Release);
    }

    /// Writes what is dirty, if this file has written.
    pub(crate) fn flush(&self) -> io::Result<()> {
        if self.0.wrote.load(Ordering::Relaxed) {
            return self.carried(|| self.0.inode.write_and_wait(0, u64::MAX));
        }
        Ok(())
    }

    /// Makes a call that does no harm when it is made twice, and makes it again when the server went
    /// meanwhile and came back.
    pub(crate) fn carried<T>(&self, mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        self.carried_until(&Cell::new(false), |_| call())
    }

    /// As [`File::carried`], but not again once the call has said that it has begun. The call is told
    /// its session.
    fn carried_until<T>(
        &self,
        begun: &Cell<bool>,
        mut call: impl FnMut(u64) -> io::Result<T>,
    ) -> io::Result<T> {
        let f = &*self.0;
        let backend = &*f.cache.backend;
        carried_until(backend, begun, |session| {
            f.handle.check(backend, session)?;
            call(session)
        })
    }

    // Reading.

    /// Reads at `offset` until `buf` is full or the file ends.
    ///
    /// # Errors
    /// `EBADF` when the file is not open for reading, `EINVAL` for an impossible offset, and what
    /// the backend answers.
    pub fn read_at(&self, buf: &mut [u8], offset: u64, flags: Flags) -> io::Result<usize> {
        let f = &*self.0;
        if !f.readable {
            return Err(errno(libc::EBADF));
        }
        if buf.is_empty() {
            return Ok(0);
        }
        checked_end(offset, buf.len())?;
        if flags.contains(Flags::DIRECT) {
            f.cache.counters.direct_calls(1);
        }
        // What a server that gave us up lets others write is not for us to know: without a session
        // nothing is read.
        self.carried(|| match flags.contains(Flags::DIRECT) {
            true => self.read_direct(buf, offset, flags),
            false => self.read_buffered(buf, offset, flags),
        })
    }

    fn read_buffered(&self, buf: &mut [u8], offset: u64, flags: Flags) -> io::Result<usize> {
        let f = &*self.0;
        let dontcache = flags.contains(Flags::DONTCACHE);
        let (mut done, mut stop) = f.inode.read_cached(buf, offset, !dontcache);
        if let ReadStop::Miss(_) = stop {
            f.cache.counters.misses(1);
        } else {
            f.cache.counters.hits(1);
        }
        let mut failed = None;
        loop {
            let page = match stop {
                ReadStop::Miss(page) => page,
                ReadStop::NoLease if f.inode.lease(Lease::Read) => {
                    let at = offset + done as u64;
                    let (n, next) = f.inode.read_cached(&mut buf[done..], at, !dontcache);
                    done += n;
                    stop = next;
                    continue;
                }
                ReadStop::NoLease => {
                    let at = offset + done as u64;
                    return match self.read_direct(&mut buf[done..], at, flags) {
                        Ok(n) => Ok(done + n),
                        // Made again from the beginning, if the server comes back.
                        Err(e) if done == 0 || errno_of(&e) == libc::ENOTCONN => Err(e),
                        Err(_) => Ok(done),
                    };
                }
                ReadStop::Full | ReadStop::Eof => break,
            };
            let last = (offset + buf.len() as u64 - 1) / PAGE;
            let fill = if f.inode.is_reading(page) {
                // Readahead or another reader brings it.
                Arc::default()
            } else {
                self.read_missing(page, last, dontcache)
            };
            let ready = || fill.finished() && !f.inode.is_reading(page);
            f.cache.wait(&f.inode.event, || ready().then_some(()));
            if let Some(code) = fill.error() {
                failed = Some(code);
                break;
            }
            let (n, next) = f
                .inode
                .read_cached(&mut buf[done..], offset + done as u64, !dontcache);
            done += n;
            stop = next;
        }
        self.after_read(offset, done, dontcache);
        match failed {
            Some(code) if done == 0 || code == libc::ENOTCONN => Err(errno(code)),
            _ => Ok(done),
        }
    }

    fn after_read(&self, offset: u64, done: usize, dontcache: bool) {
        let f = &*self.0;
        if done == 0 {
            return;
        }
        f.cache.counters.bytes_out(done as u64);
        let (first, last) = (offset / PAGE, (offset + done as u64 - 1) / PAGE);
        let mark = f.mark.load(Ordering::Relaxed);
        if (first..=last).contains(&mark) {
            self.read_ahead(dontcache);
        }
        if dontcache {
            // A page that the next read still needs stays for it, if this one ended within.
            let whole = (offset + done as u64) / PAGE;
            if whole > first || (offset + done as u64) >= f.inode.size() {
                let last = if offset + done as u64 >= f.inode.size() {
                    last
                } else {
                    whole - 1
                };
                f.inode.drop_behind(first, last);
            }
        }
    }

    /// Starts reading what is missing for a read of `page..=last`, and more if reads are
    /// sequential.
    fn read_missing(&self, page: u64, last: u64, dontcache: bool) -> Arc<Fill> {
        let f = &*self.0;
        let max = self.window_limit();
        let mut end = last + 1;
        {
            let mut ahead = lock(&f.ahead);
            let sequential = page == ahead.expect || page == ahead.end;
            if sequential && max > 0 {
                ahead.window = (ahead.window * 2).clamp(FIRST_WINDOW.min(max), max);
                end = end.max(page + ahead.window);
                ahead.end = end;
                f.mark.store(page + (end - page) / 2, Ordering::Relaxed);
            } else {
                ahead.window = 0;
                ahead.end = end;
                f.mark.store(u64::MAX, Ordering::Relaxed);
            }
            ahead.expect = last + 1;
        }
        f.cache.counters.readahead_pages(end - last - 1);
        f.inode.fill(&f.handle, page, end - 1, dontcache, true)
    }

    fn window_limit(&self) -> u64 {
        let max = self.0.cache.config.readahead as u64 / PAGE;
        match self.0.advice.load(Ordering::Relaxed) {
            a if a == Advice::Random as u8 => 0,
            a if a == Advice::Sequential as u8 => max * 2,
            _ => max,
        }
    }

    /// The reader has come to the middle of the window: start the next one.
    fn read_ahead(&self, dontcache: bool) {
        let f = &*self.0;
        let max = self.window_limit();
        let (first, n) = {
            let mut ahead = lock(&f.ahead);
            if ahead.window == 0 || max == 0 {
                return;
            }
            ahead.window = (ahead.window * 2).min(max);
            let first = ahead.end;
            ahead.end += ahead.window;
            f.mark.store(first, Ordering::Relaxed);
            (first, ahead.window)
        };
        f.cache.counters.readahead_pages(n);
        let _ = f
            .inode
            .fill(&f.handle, first, first + n - 1, dontcache, false);
    }

    fn read_direct(&self, buf: &mut [u8], offset: u64, flags: Flags) -> io::Result<usize> {
        let f = &*self.0;
        let mut done = 0;
        while done < buf.len() {
            let n = f.inode.direct_round(buf.len() - done);
            let at = offset + done as u64;
            let moved = f.inode.prepare_direct(Op::Read, at, n).and_then(|()| {
                let dontcache = flags.contains(Flags::DONTCACHE);
                let d = f
                    .inode
                    .start_direct(&f.handle, Op::Read, at, n, &[], dontcache, None);
                d.wait_copying(&mut buf[done..done + n]);
                d.result()
            });
            match moved {
                Ok(moved) => {
                    done += moved;
                    if moved < n {
                        break;
                    }
                }
                Err(e) if done == 0 || errno_of(&e) == libc::ENOTCONN => return Err(e),
                Err(_) => break,
            }
        }
        f.cache.counters.bytes_out(done as u64);
        Ok(done)
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
    ) -> io::Result<usize> {
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
        let ready = |result| Pending::ready(&f.cache, &f.inode, result);
        if !f.readable {
            return ready(Err(errno(libc::EBADF)));
        }
        if let Err(e) = checked_end(offset, buf.len()) {
            return ready(Err(e));
        }
        if buf.is_empty() || (direct && f.inode.direct_round(buf.len()) < buf.len()) {
            // Larger than the bounce pages allow at once: in rounds, here.
            return ready(self.read_at(&mut buf, offset, flags).map(|n| {
                buf.truncate(n);
                buf
            }));
        }
        if let Err(e) = self.carried(|| Ok(())) {
            return ready(Err(e));
        }
        if direct {
            f.cache.counters.direct_calls(1);
            if let Err(e) = f.inode.prepare_direct(Op::Read, offset, buf.len()) {
                return ready(Err(e));
            }
            let dontcache = flags.contains(Flags::DONTCACHE);
            let d =
                f.inode
                    .start_direct(&f.handle, Op::Read, offset, buf.len(), &[], dontcache, None);
            return Pending::new(
                &f.cache,
                &f.inode,
                DirectRead {
                    direct: d,
                    buf,
                    copied: 0,
                },
            );
        }
        let dontcache = flags.contains(Flags::DONTCACHE);
        let step = BufferedRead {
            file: self.clone(),
            buf,
            offset,
            done: 0,
            dontcache,
            fill: None,
            direct: None,
        };
        f.inode.lease(Lease::Read);
        Pending::new(&f.cache, &f.inode, step)
    }

    // Writing.

    /// Writes all of `buf` at `offset`, or at the end when the file was opened for appending.
    ///
    /// A buffered write is in the cache when this returns, and in the file after
    /// [`File::sync_data`], [`File::close`] or a while.
    ///
    /// # Errors
    /// `EBADF` when the file is not open for writing, `EINVAL` for an impossible offset, `EFBIG`
    /// beyond the largest one, and what the backend answers. After part was written, the error
    /// comes with the next call.
    pub fn write_at(&self, buf: &[u8], offset: u64, flags: Flags) -> io::Result<usize> {
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
    ) -> io::Result<usize> {
        self.write_where(bufs, (!self.0.append).then_some(offset), flags)
            .map(|(_, n)| n)
    }

    /// Writes at the end of the file; answers where that was.
    ///
    /// # Errors
    /// As [`File::write_at`].
    pub fn append(&self, buf: &[u8], flags: Flags) -> io::Result<u64> {
        self.write_where(&[IoSlice::new(buf)], None, flags)
            .map(|(at, _)| at)
    }

    fn write_where(
        &self,
        bufs: &[IoSlice<'_>],
        offset: Option<u64>,
        flags: Flags,
    ) -> io::Result<(u64, usize)> {
        let f = &*self.0;
        if !f.writable {
            return Err(errno(libc::EBADF));
        }
        let len: usize = bufs.iter().map(|b| b.len()).sum();
        if len == 0 {
            return Ok((offset.map_or_else(|| self.current_size(), Ok)?, 0));
        }
        if let Some(offset) = offset {
            checked_end(offset, len)?;
        }
        f.cache.counters.writes(1);
        if !f.wrote.load(Ordering::Relaxed) {
            f.wrote.store(true, Ordering::Relaxed);
        }
        let shared = f.cache.backend.is_shared();
        let begun = Cell::new(false);
        let write = |session| -> io::Result<(u64, usize)> {
            let written = match offset {
                None if shared => self.append_shared(bufs, len, flags, &begun)?,
                _ if flags.contains(Flags::DIRECT) => {
                    self.write_direct(bufs, len, offset, flags)?
                }
                _ => self.write_cached(bufs, len, offset, flags)?,
            };
            if shared {
                // Given up before that was in the cache: then the server did not find it there.
                fence(Ordering::SeqCst);
                if f.cache.backend.session() != Some(session) {
                    return Err(errno(libc::ENOTCONN));
                }
            }
            Ok(written)
        };
        // What may have been appended is not appended again; at a place it does no harm.
        let again = Cell::new(false);
        let (at, done) = self.carried_until(offset.map_or(&begun, |_| &again), write)?;
        if done == 0 {
            return Ok((at, 0));
        }
        let (first, last) = (at / PAGE, (at + done as u64 - 1) / PAGE);
        if flags.contains(Flags::DONTCACHE) && !flags.contains(Flags::DIRECT) {
            f.inode.write_range(first, last);
            f.inode.wait_few_in_flight(UNCACHED_REQUESTS);
        }
        if flags.contains(Flags::DSYNC) {
            self.sync(first, last, true)?;
        }
        Ok((at, done))
    }

    /// A write through the cache; what can't be cached goes to the server.
    fn write_cached(
        &self,
        bufs: &[IoSlice<'_>],
        len: usize,
        offset: Option<u64>,
        flags: Flags,
    ) -> io::Result<(u64, usize)> {
        let f = &*self.0;
        let dontcache = flags.contains(Flags::DONTCACHE);
        let writer = f.inode.exclusive();
        let at = offset.unwrap_or_else(|| f.inode.size());
        checked_end(at, len).map_err(|_| errno(libc::EFBIG))?;
        let mut done = f.inode.write(&f.handle, bufs, at, None, dontcache)?;
        while done < len && f.inode.lease(Lease::Write) {
            let rest = cut(bufs, done, len - done);
            let n = f
                .inode
                .write(&f.handle, &rest, at + done as u64, None, dontcache);
            match n {
                Ok(n) => done += n,
                Err(e) if done == 0 => return Err(e),
                Err(_) => return Ok((at, done)),
            }
        }
        drop(writer);
        if done < len {
            let rest = cut(bufs, done, len - done);
            let here = Some(at + done as u64);
            match self.write_direct(&rest, len - done, here, flags) {
                Ok((_, n)) => done += n,
                Err(e) if done == 0 => return Err(e),
                Err(_) => {}
            }
        }
        Ok((at, done))
    }

    /// Appends where others may append too: the lease keeps the end of the file where it is.
    fn append_shared(
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
            checked_end(at, len - done).map_err(|_| errno(libc::EFBIG))?;
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
            // Nobody gets a lease of it: as good as can be.
            let at = f.inode.current_size()?;
            begun.set(true);
            return self.write_direct(bufs, len, Some(at), flags);
        };
        if flags.contains(Flags::DIRECT) {
            f.inode.write_and_wait(0, u64::MAX)?;
        }
        Ok((at, done))
    }

    fn write_direct(
        &self,
        bufs: &[IoSlice<'_>],
        len: usize,
        offset: Option<u64>,
        flags: Flags,
    ) -> io::Result<(u64, usize)> {
        let f = &*self.0;
        // A write within the file shares it with other direct ones; one that makes it longer
        // has it alone until its pieces have ended.
        let shared = f
            .inode
            .write_lock
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let within = offset.is_some_and(|at| at + len as u64 <= f.inode.size());
        let (_shared, _alone) = if within {
            (Some(shared), None)
        } else {
            drop(shared);
            let alone = f.inode.exclusive();
            f.inode.wait_direct();
            (None, Some(alone))
        };
        let old_size = f.inode.size();
        let at = offset.unwrap_or(old_size);
        checked_end(at, len).map_err(|_| errno(libc::EFBIG))?;
        let mut done = 0;
        while done < len {
            let n = f.inode.direct_round(len - done);
            let here = at + done as u64;
            let direct = f.inode.prepare_direct(Op::Write, here, n).map(|()| {
                let dontcache = flags.contains(Flags::DONTCACHE);
                let data = cut(bufs, done, n);
                let d = f
                    .inode
                    .start_direct(&f.handle, Op::Write, here, n, &data, dontcache, None);
                d.wait();
                d
            });
            let moved = direct.as_ref().map_or_else(
                |e| Err(errno_of(e)),
                |d| d.result().map_err(|e| errno_of(&e)),
            );
            let (moved, failed) = match moved {
                Ok(moved) => (moved, None),
                Err(code) => (0, Some(code)),
            };
            done += moved;
            if moved < n {
                // Others may have made it longer where it is shared.
                let shared = f.cache.backend.is_shared();
                if !within && !shared && direct.is_ok_and(|d| d.has_stray_pieces(moved)) {
                    // Pieces behind the one that failed made the file longer than it is.
                    let size = old_size.max(at + done as u64);
                    let _ = self.tell_size(size);
                }
                if let Some(code) = failed.filter(|_| done == 0) {
                    return Err(errno(code));
                }
                break;
            }
        }
        f.cache.counters.bytes_in(done as u64);
        Ok((at, done))
    }

    /// Starts a write. The data is copied before this returns. A buffered write is then done
    /// (it waits like any other when too much is dirty); a direct one within the file is under
    /// way; one that makes the file longer waits for its pieces here.
    pub fn submit_write_at(&self, buf: &[u8], offset: u64, flags: Flags) -> Pending<usize> {
        let f = &*self.0;
        let ready = |result| Pending::ready(&f.cache, &f.inode, result);
        let plain = !flags.contains(Flags::DIRECT)
            || flags.contains(Flags::DSYNC)
            || f.append
            || !f.writable
            || buf.is_empty()
            || checked_end(offset, buf.len()).is_err()
            || f.inode.direct_round(buf.len()) < buf.len();
        if plain {
            return ready(self.write_at(buf, offset, flags));
        }
        let shared = f
            .inode
            .write_lock
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if offset + buf.len() as u64 > f.inode.size() {
            drop(shared);
            return ready(self.write_at(buf, offset, flags));
        }
        f.wrote.store(true, Ordering::Relaxed);
        f.cache.counters.writes(1);
        if let Err(e) = self.carried(|| Ok(())) {
            return ready(Err(e));
        }
        if let Err(e) = f.inode.prepare_direct(Op::Write, offset, buf.len()) {
            return ready(Err(e));
        }
        let data = [IoSlice::new(buf)];
        let dontcache = flags.contains(Flags::DONTCACHE);
        let d = f.inode.start_direct(
            &f.handle,
            Op::Write,
            offset,
            buf.len(),
            &data,
            dontcache,
            None,
        );
        drop(shared);
        f.cache.counters.bytes_in(buf.len() as u64);
        Pending::new(&f.cache, &f.inode, DirectWrite(d))
    }

    // Durability.

    /// Writes a range and reports an error that this open file has not heard of.
    fn sync_range(&self, first: u64, last: u64) -> io::Result<()> {
        let f = &*self.0;
        let written = self.carried(|| f.inode.write_and_wait(first, last));
        match f.inode.errors.check(&f.errors) {
            Some(code) => Err(errno(code)),
            None => written,
        }
    }

    /// Writes a range and makes what the server has of the file durable.
    fn sync(&self, first: u64, last: u64, data_only: bool) -> io::Result<()> {
        let f = &*self.0;
        self.sync_range(first, last)?;
        // What the server had taken was in the file when it went, and is not to be written again.
        self.carried(|| {
            let backend = &f.cache.backend;
            backend.fsync(f.handle.node, f.handle.fh, data_only)
        })
    }

    /// Writes what is dirty and makes it durable, as fdatasync(2).
    ///
    /// # Errors
    /// That of a writeback that failed since this file last heard of one (its pages stay dirty,
    /// and are tried again), and what the backend answers.
    pub fn sync_data(&self) -> io::Result<()> {
        self.sync(0, u64::MAX, true)
    }

    /// Writes what is dirty and makes data and attributes durable, as fsync(2).
    ///
    /// # Errors
    /// As [`File::sync_data`].
    pub fn sync_all(&self) -> io::Result<()> {
        self.sync(0, u64::MAX, false)
    }

    /// Writes what is dirty of a range, as sync_file_range(2): `wait` for it, or only start. Nothing
    /// is made durable.
    ///
    /// # Errors
    /// When waiting, that of a writeback that failed since this file last heard of one.
    pub fn write_back(&self, offset: u64, len: u64, wait: bool) -> io::Result<()> {
        let (first, last) = (offset / PAGE, offset.saturating_add(len.max(1) - 1) / PAGE);
        if wait {
            return self.sync_range(first, last);
        }
        self.0.inode.write_range(first, last);
        Ok(())
    }

    /// Starts [`File::sync_all`], or with `data_only` [`File::sync_data`]: of what is written when
    /// this is called.
    pub fn submit_sync(&self, data_only: bool) -> Pending<()> {
        let f = &*self.0;
        if let Err(e) = self.carried(|| Ok(())) {
            return Pending::ready(&f.cache, &f.inode, Err(e));
        }
        let step = SyncStep {
            file: self.clone(),
            data_only,
            flush: f.inode.start_flush(),
            end: None,
        };
        Pending::new(&f.cache, &f.inode, step)
    }

    /// Writes what is dirty and closes the file. Dropping a file closes it too, and starts the
    /// writing, but reports nothing.
    ///
    /// # Errors
    /// That of a writeback that failed since this file last heard of one.
    pub fn close(self) -> io::Result<()> {
        let f = &*self.0;
        if !f.wrote.load(Ordering::Relaxed) {
            return f
                .inode
                .errors
                .check(&f.errors)
                .map_or(Ok(()), |code| Err(errno(code)));
        }
        self.sync_range(0, u64::MAX)?;
        // The pages are what the server now has: worth keeping for whoever opens it next.
        if let Ok(attr) = f.cache.backend.getattr(f.inode.node) {
            f.inode.saw(attr.mtime, attr.size);
        }
        Ok(())
    }

    // Size and space.

    /// The size in bytes, with what is not written yet.
    pub fn size(&self) -> u64 {
        self.current_size().unwrap_or_else(|_| self.0.inode.size())
    }

    /// As [`File::size`], for those who want to know why it can't be told.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn current_size(&self) -> io::Result<u64> {
        self.carried(|| self.0.inode.current_size())
    }

    /// The attributes now. Writes what is dirty, so that the times are those of the last write.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn stat(&self) -> io::Result<Attr> {
        self.carried(|| self.0.inode.current_attr())
    }

    fn tell_size(&self, size: u64) -> io::Result<()> {
        let f = &*self.0;
        let set = SetAttr {
            size: Some(size),
            handle: Some(f.handle.fh),
            ..SetAttr::default()
        };
        f.cache.backend.setattr(f.inode.node, &set).map(drop)
    }

    /// Cuts or extends the file to `size` bytes, as ftruncate(2).
    ///
    /// # Errors
    /// `EINVAL` when the file is not open for writing or the size is impossible, and what the
    /// backend answers.
    pub fn set_len(&self, size: u64) -> io::Result<()> {
        let f = &*self.0;
        if !f.writable || size > i64::MAX as u64 {
            return Err(errno(libc::EINVAL));
        }
        let _writer = f.inode.exclusive();
        f.wrote.store(true, Ordering::Relaxed);
        self.carried(|| f.inode.set_len(size, || self.tell_size(size)))
    }

    /// Reserves, punches or zeroes a range, as fallocate(2).
    ///
    /// # Errors
    /// `EBADF` when the file is not open for writing, `EINVAL` for an empty or impossible range,
    /// `EOPNOTSUPP` when the backend cannot.
    pub fn allocate(&self, mode: AllocateMode, offset: u64, len: u64) -> io::Result<()> {
        let f = &*self.0;
        if !f.writable {
            return Err(errno(libc::EBADF));
        }
        let end = offset
            .checked_add(len)
            .filter(|&e| len > 0 && e <= i64::MAX as u64);
        let Some(end) = end else {
            return Err(errno(libc::EINVAL));
        };
        let (raw, grows) = match mode {
            AllocateMode::Extend => (0, true),
            AllocateMode::KeepSize => (libc::FALLOC_FL_KEEP_SIZE, false),
            AllocateMode::PunchHole => (
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                false,
            ),
            AllocateMode::ZeroRange => (libc::FALLOC_FL_ZERO_RANGE, true),
        };
        let _writer = f.inode.exclusive();
        f.inode.wait_direct();
        f.wrote.store(true, Ordering::Relaxed);
        self.carried(|| {
            // The whole file: the server's size must be ours before it grows or keeps it.
            f.inode.write_and_wait(0, u64::MAX)?;
            let backend = &f.cache.backend;
            backend.fallocate(f.inode.node, f.handle.fh, raw, offset, len)
        })?;
        f.inode
            .invalidate_range(offset / PAGE, (end - 1) / PAGE, grows.then_some(end));
        Ok(())
    }

    /// Copies up to `len` bytes from `offset` of this file to `to_offset` of another, or elsewhere in
    /// the same one, as copy_file_range(2): at the server, where the backend can. Answers how many;
    /// fewer at the end of this file, and when it was told to stop.
    ///
    /// # Errors
    /// `EBADF` when this file is not open for reading, or the other not for writing or for appending;
    /// `EINVAL` for impossible or overlapping ranges; and what the backend answers.
    pub fn copy_range(&self, offset: u64, to: &File, to_offset: u64, len: u64) -> io::Result<u64> {
        let (f, t) = (&*self.0, &*to.0);
        if !f.readable || !t.writable || t.append {
            return Err(errno(libc::EBADF));
        }
        let end = |offset: u64| {
            offset
                .checked_add(len)
                .filter(|&end| end <= i64::MAX as u64)
        };
        let (Some(from_end), Some(to_end)) = (end(offset), end(to_offset)) else {
            return Err(errno(libc::EINVAL));
        };
        let same = Arc::ptr_eq(&f.cache, &t.cache);
        let one = same && f.inode.node == t.inode.node;
        if one && offset < to_end && to_offset < from_end {
            return Err(errno(libc::EINVAL));
        }
        if len == 0 {
            return Ok(0);
        }
        if same {
            match self.copy_at_server(offset, to, to_offset, len) {
                Err(e) if matches!(errno_of(&e), libc::EOPNOTSUPP | libc::ENOSYS | libc::EXDEV) => {
                }
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
        let copied = to.carried_until(&Cell::new(false), |session| {
            f.handle.check(&*f.cache.backend, session)?;
            // All of both: what the server takes for their ends must be so.
            f.inode.write_and_wait(0, u64::MAX)?;
            t.inode.write_and_wait(0, u64::MAX)?;
            f.cache.backend.copy_range(
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
                .read_at(&mut buf[..want], offset + done, Flags::empty())
                .and_then(|n| to.write_at(&buf[..n], to_offset + done, Flags::empty()));
            match moved {
                Ok(0) => break,
                Ok(n) => done += n as u64,
                Err(e) if done == 0 => return Err(e),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    // Extended attributes.

    /// Sets an extended attribute, as fsetxattr(2) with its `flags`.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn setxattr(&self, name: impl AsRef<OsStr>, value: &[u8], flags: i32) -> io::Result<()> {
        let f = &*self.0;
        f.cache
            .backend
            .setxattr(f.inode.node, name.as_ref(), value, flags)
    }

    /// An extended attribute's value, as fgetxattr(2).
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the backend answers.
    pub fn getxattr(&self, name: impl AsRef<OsStr>) -> io::Result<Vec<u8>> {
        let f = &*self.0;
        self.carried(|| f.cache.backend.getxattr(f.inode.node, name.as_ref()))
    }

    /// The names of all extended attributes, as flistxattr(2).
    ///
    /// # Errors
    /// What the backend answers.
    pub fn listxattr(&self) -> io::Result<Vec<OsString>> {
        let f = &*self.0;
        self.carried(|| f.cache.backend.listxattr(f.inode.node))
    }

    /// Removes an extended attribute, as fremovexattr(2).
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the backend answers.
    pub fn removexattr(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        let f = &*self.0;
        f.cache.backend.removexattr(f.inode.node, name.as_ref())
    }

    /// The first data at or after `offset`, as lseek(2) with `SEEK_DATA`.
    ///
    /// # Errors
    /// `ENXIO` when there is none.
    pub fn seek_data(&self, offset: u64) -> io::Result<u64> {
        self.seek(offset, libc::SEEK_DATA)
    }

    /// The first hole at or after `offset` (the end of the file is one), as lseek(2) with
    /// `SEEK_HOLE`.
    ///
    /// # Errors
    /// `ENXIO` when `offset` is beyond the end.
    pub fn seek_hole(&self, offset: u64) -> io::Result<u64> {
        self.seek(offset, libc::SEEK_HOLE)
    }

    fn seek(&self, offset: u64, whence: i32) -> io::Result<u64> {
        let f = &*self.0;
        self.carried(|| {
            if offset >= f.inode.current_size()? {
                return Err(errno(libc::ENXIO));
            }
            f.inode.write_and_wait(0, u64::MAX)?;
            let backend = &f.cache.backend;
            backend.lseek(f.inode.node, f.handle.fh, offset, whence)
        })
    }

    /// Tells what the caller knows about its reads of a range; for the first three, of the file.
    ///
    /// # Errors
    /// With [`Advice::DontNeed`], that of the writeback.
    pub fn advise(&self, advice: Advice, offset: u64, len: u64) -> io::Result<()> {
        let f = &*self.0;
        let (first, last) = (offset / PAGE, offset.saturating_add(len.max(1) - 1) / PAGE);
        match advice {
            Advice::Normal | Advice::Sequential | Advice::Random => {
                f.advice.store(advice as u8, Ordering::Relaxed);
            }
            Advice::WillNeed if f.readable => {
                f.inode.lease(Lease::Read);
                let _ = f.inode.fill(&f.handle, first, last, false, false);
            }
            Advice::WillNeed => {}
            Advice::DontNeed => {
                self.carried(|| f.inode.write_and_wait(first, last))?;
                f.inode.invalidate_range(first, last, None);
            }
        }
        Ok(())
    }
}

/// Makes a call once there is a server, and again when that went meanwhile and there is another.
pub(crate) fn carried<T>(
    backend: &dyn Backend,
    mut call: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    carried_until(backend, &Cell::new(false), |_| call())
}

/// As [`carried`], but not again once the call has said that it has begun.
fn carried_until<T>(
    backend: &dyn Backend,
    begun: &Cell<bool>,
    mut call: impl FnMut(u64) -> io::Result<T>,
) -> io::Result<T> {
    for round in 0.. {
        let session = match backend.session() {
            Some(session) => session,
            None => {
                backend.reconnect()?;
                // Gone already, perhaps: then the call says it.
                backend.session().unwrap_or(u64::MAX)
            }
        };
        match call(session) {
            // The second is of a node that was known and not open.
            Err(e)
                if matches!(errno_of(&e), libc::ENOTCONN | libc::ESTALE)
                    && round < CARRIED
                    && !begun.get()
                    && backend.session() != Some(session) => {}
            other => return other,
        }
    }
    unreachable!("the rounds end")
}

fn errno_of(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

impl Drop for Inner {
    fn drop(&mut self) {
        for (flock, locked) in [false, true].into_iter().zip(&self.locked) {
            if locked.load(Ordering::Acquire) {
                // Writeback may keep the handle, with which they would go, for a while.
                let _ = self.inode.write_and_wait(0, u64::MAX);
                let all = LockRequest {
                    owner: self.owner,
                    flock,
                    kind: None,
                    start: 0,
                    end: i64::MAX as u64,
                };
                let (node, fh) = (self.handle.node, self.handle.fh);
                let _ = self.cache.backend.lock(node, fh, &all, false);
            }
        }
        if self.wrote.load(Ordering::Relaxed) {
            self.inode.write_range(0, u64::MAX);
        }
        self.inode.opens.fetch_sub(1, Ordering::AcqRel);
        self.inode.closed();
    }
}

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

struct DirectWrite(Arc<Direct>);

impl Step<usize> for DirectWrite {
    fn step(&mut self) -> Option<io::Result<usize>> {
        self.0.ended().then(|| self.0.result())
    }
}

struct SyncStep {
    file: File,
    data_only: bool,
    flush: Flush,
    /// The backend's answer, once it was asked.
    end: Option<Arc<Mutex<Option<io::Result<usize>>>>>,
}

impl Step<()> for SyncStep {
    fn step(&mut self) -> Option<io::Result<()>> {
        let f = self.file.0.clone();
        if let Some(end) = &self.end {
            return lock(end).take().map(|result| result.map(drop));
        }
        let written = f.inode.step_flush(&mut self.flush)?;
        let failed = f.inode.errors.check(&f.errors).map(errno);
        if let Some(error) = failed.or(written.err()) {
            return Some(Err(error));
        }
        let end = Arc::new(Mutex::new(None));
        self.end = Some(end.clone());
        let inode = f.inode.clone();
        let done = Box::new(move |result| {
            *lock(&end) = Some(result);
            inode.event.notify();
        });
        let (node, fh) = (f.handle.node, f.handle.fh);
        f.cache.backend.submit_fsync(node, fh, self.data_only, done);
        // Perhaps at once.
        self.step()
    }
}

struct BufferedRead {
    file: File,
    buf: Vec<u8>,
    offset: u64,
    done: usize,
    dontcache: bool,
    fill: Option<Arc<Fill>>,
    /// Reads the rest past the cache: there is no lease.
    direct: Option<Arc<Direct>>,
}

impl Step<Vec<u8>> for BufferedRead {
    fn step(&mut self) -> Option<io::Result<Vec<u8>>> {
        let f = self.file.0.clone();
        loop {
            if let Some(direct) = &self.direct {
                if !direct.ended() {
                    return None;
                }
                let moved = match direct.result() {
                    Ok(moved) => moved,
                    Err(e) if self.done == 0 => return Some(Err(e)),
                    Err(_) => break,
                };
                let asked = f.inode.direct_round(self.buf.len() - self.done);
                direct.copy_out_from(0, &mut self.buf[self.done..self.done + moved]);
                self.done += moved;
                self.direct = None;
                if moved < asked || self.done == self.buf.len() {
                    break;
                }
            }
            if let Some(fill) = &self.fill {
                if !fill.finished() {
                    return None;
                }
                if let Some(code) = fill.error().filter(|_| self.done == 0) {
                    return Some(Err(errno(code)));
                }
                if fill.error().is_some() {
                    break;
                }
            }
            let at = self.offset + self.done as u64;
            let (n, stop) = f
                .inode
                .read_cached(&mut self.buf[self.done..], at, !self.dontcache);
            self.done += n;
            let page = match stop {
                ReadStop::Miss(page) => page,
                ReadStop::NoLease => {
                    let at = self.offset + self.done as u64;
                    let n = f.inode.direct_round(self.buf.len() - self.done);
                    self.fill = None;
                    self.direct = Some(f.inode.start_direct(
                        &f.handle,
                        Op::Read,
                        at,
                        n,
                        &[],
                        self.dontcache,
                        None,
                    ));
                    continue;
                }
                ReadStop::Full | ReadStop::Eof => break,
            };
            if f.inode.is_reading(page) {
                // Somebody else's read brings it.
                self.fill = None;
                return None;
            }
            let last = (self.offset + self.buf.len() as u64 - 1) / PAGE;
            self.fill = Some(self.file.read_missing(page, last, self.dontcache));
        }
        let mut buf = std::mem::take(&mut self.buf);
        buf.truncate(self.done);
        self.file.after_read(self.offset, self.done, self.dontcache);
        Some(Ok(buf))
    }
}
