//! One inode's pages: reading, filling, writing, truncation, reclaim.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use uvfs_queue::arena::{PAGE_SIZE, Ranges, Span};
use uvfs_queue::pair::Seg;

use super::chunk::{CHUNK_PAGES, Chunks};
use super::lease::Leased;
use super::writeback::{Behind, ErrSeq, InFlight};
use super::{Cache, Handle, lock};
use crate::backend::{Lease, NodeId, Op, Request};
use crate::event::Event;

const PAGE: u64 = PAGE_SIZE as u64;
/// A write copies at most this much under one acquisition of the state lock.
const PIECE: usize = 256 << 10;
/// A stream is written back in runs of so many pages, which the processor's caches still have.
const RUN: u64 = 64;

pub(crate) struct Inode {
    pub(crate) node: NodeId,
    pub(super) cache: Arc<Cache>,
    /// Buffered writers and everything that changes the size hold it alone; direct writes within
    /// the file share it.
    pub(crate) write_lock: RwLock<()>,
    state: RwLock<State>,
    /// One thread at a time asks for a lease.
    pub(super) asking: Mutex<()>,
    /// A request of this inode ended.
    pub(crate) event: Event,
    pub(crate) errors: ErrSeq,
    /// Counts the writeback requests that ended because the server went.
    pub(super) unsent: AtomicU64,
    /// Direct writes under way.
    pub(super) direct: AtomicU32,
    /// Open files.
    pub(crate) opens: AtomicU32,
    /// Lookups at the backend that came with opened files.
    pub(crate) lookups: AtomicU64,
}

impl std::fmt::Debug for Inode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inode")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) size: u64,
    /// The session that the rest is of.
    pub(super) session: u64,
    /// The node's number in page descriptors, which the server reads.
    pub(super) server_node: NodeId,
    /// The same for handles that are older than the session.
    handles: HashMap<u64, u64>,
    /// What the server has for sure: nothing but zeros is beyond.
    pub(super) server_size: u64,
    pub(super) chunks: Chunks,
    /// Free pages that belong to this inode, so that not every write asks the shared list.
    pub(super) spare: Vec<u32>,
    /// Through which writeback goes: the last file that wrote.
    pub(super) writer: Option<Arc<Handle>>,
    /// Pages in `dirty` of any chunk.
    pub(super) dirty: u64,
    pub(super) dirtied_at: Option<Instant>,
    /// Writeback failed: not before this, unless somebody asks for it.
    pub(super) retry_at: Option<Instant>,
    pub(super) failing: Option<i32>,
    pub(super) in_flight: Vec<InFlight>,
    pub(super) next_request: u64,
    /// Where the next background writeback looks first.
    pub(super) cursor: u64,
    /// Where the last write ended, and how many bytes before it were written one after another.
    written: (u64, u64),
    /// No writeback may start: the size is being changed.
    pub(super) frozen: bool,
    /// Where reclaim looks next.
    hand: u64,
    /// Modification time and size when the pages were last known to be the file's.
    pub(crate) seen: Option<((i64, u32), u64)>,
    /// What may be cached. Pages that are there, and not stale, are as good as this says.
    pub(super) lease: Leased,
}

/// Why a read of cached pages ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReadStop {
    /// Nothing may be cached.
    NoLease,
    /// All that was asked for.
    Full,
    /// The end of the file.
    Eof,
    /// This page (its index in the file) is not there.
    Miss(u64),
}

/// A read that was started for somebody who waits.
#[derive(Debug, Default)]
pub(crate) struct Fill {
    left: AtomicU32,
    errno: AtomicI32,
}

impl Fill {
    pub(crate) fn finished(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }
    pub(crate) fn error(&self) -> Option<i32> {
        Some(self.errno.load(Ordering::Acquire)).filter(|&e| e != 0)
    }
}

/// Pages that a write made dirty, and those of them that no request was writing.
#[derive(Default)]
struct Dirtied {
    pages: u64,
    idle: u64,
}

/// What a write has to have before it can go on.
enum Need {
    /// The lease for it.
    Lease,
    Pages,
    /// The end of the read that fills the page.
    Read,
    /// The page's dirty bytes written: the new ones do not meet them.
    Flush(u64),
}

/// A handle's number in page descriptors.
fn server_handle(old: &HashMap<u64, u64>, session: u64, handle: &Handle) -> u64 {
    if handle.session < session {
        // Not opened again: nothing can be written through it.
        old.get(&handle.fh).copied().unwrap_or(u64::MAX)
    } else {
        handle.server_fh
    }
}

fn place(index: u64) -> (u64, usize) {
    (
        index / CHUNK_PAGES as u64,
        (index % CHUNK_PAGES as u64) as usize,
    )
}

/// Adds a page's bytes to a scatter list, merging what is adjacent.
pub(super) fn push_seg(segs: &mut Vec<Seg>, seg: Seg) {
    match segs.last_mut() {
        Some(last) if last.offset + u64::from(last.len) == seg.offset => last.len += seg.len,
        _ => segs.push(seg),
    }
}

impl Inode {
    pub(super) fn new(cache: &Arc<Cache>, node: NodeId, mtime: (i64, u32), size: u64) -> Arc<Self> {
        let (session, server_node, _) = cache.backend.names(node, 0);
        Arc::new(Self {
            node,
            cache: cache.clone(),
            write_lock: RwLock::new(()),
            state: RwLock::new(State {
                size,
                session,
                server_node,
                handles: HashMap::new(),
                server_size: size,
                chunks: Chunks::default(),
                spare: Vec::new(),
                writer: None,
                dirty: 0,
                dirtied_at: None,
                retry_at: None,
                failing: None,
                in_flight: Vec::new(),
                next_request: 0,
                cursor: 0,
                written: (0, 0),
                frozen: false,
                hand: 0,
                seen: Some((mtime, size)),
                lease: Leased::new(cache.backend.is_shared()),
            }),
            asking: Mutex::new(()),
            event: Event::default(),
            errors: ErrSeq::default(),
            unsent: AtomicU64::new(0),
            direct: AtomicU32::new(0),
            opens: AtomicU32::new(0),
            lookups: AtomicU64::new(0),
        })
    }

    pub(super) fn read_state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn shared(&self) -> RwLockReadGuard<'_, ()> {
        self.write_lock
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn exclusive(&self) -> RwLockWriteGuard<'_, ()> {
        self.write_lock
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn size(&self) -> u64 {
        self.read_state().size
    }

    /// The size, if this client knows it better than the server does.
    pub(crate) fn known_size(&self) -> Option<u64> {
        let st = self.read_state();
        let ours = self.opens.load(Ordering::Acquire) > 0 || st.dirty > 0;
        let ours = ours && st.knows_size();
        (ours || !st.in_flight.is_empty()).then_some(st.size)
    }

    /// A file of it was closed: when it was the last one and all is written, the handle that
    /// writeback used goes too.
    pub(crate) fn closed(&self) {
        let mut spare = Vec::new();
        let mut writer = None;
        {
            let mut st = self.state();
            if self.opens.load(Ordering::Acquire) == 0 {
                spare.append(&mut st.spare);
                if st.dirty == 0 && st.in_flight.is_empty() {
                    writer = st.writer.take();
                }
            }
        }
        drop(writer);
        self.cache.free(&mut spare);
    }

    /// Waits until at most `most` writeback requests are under way.
    pub(crate) fn wait_few_in_flight(&self, most: usize) {
        self.cache.wait(&self.event, || {
            (self.read_state().in_flight.len() <= most).then_some(())
        });
    }

    /// Whether the cache can forget it.
    pub(super) fn is_idle(&self) -> bool {
        let st = self.read_state();
        self.opens.load(Ordering::Acquire) == 0
            && st.chunks.next(0).is_none()
            && st.in_flight.is_empty()
            && st.spare.is_empty()
    }

    /// A token of a moment at which nothing was dirty or under way, for [`Inode::revalidate`].
    pub(crate) fn quiet(&self) -> Option<u64> {
        let st = self.read_state();
        let quiet = st.dirty == 0
            && st.in_flight.is_empty()
            && self.opens.load(Ordering::Acquire) == 0
            && self.direct.load(Ordering::Acquire) == 0;
        quiet.then_some(st.next_request)
    }

    /// What the server says about a file that is being opened. Other people's changes make the
    /// pages worthless; but if this client may have written since the `token` was taken, what it
    /// knows is newer.
    pub(crate) fn revalidate(&self, token: Option<u64>, mtime: (i64, u32), size: u64) {
        // With leases the pages are right for as long as there is one.
        if self.cache.backend.is_shared() || token.is_none() || self.quiet() != token {
            return;
        }
        let mut freed = Vec::new();
        let mut st = self.state();
        if Some(st.next_request) == token && st.dirty == 0 && st.seen != Some((mtime, size)) {
            self.invalidate(&mut st, 0, u64::MAX, &mut freed);
            st.size = size;
            st.server_size = size;
            st.seen = Some((mtime, size));
        }
        drop(st);
        self.cache.free(&mut freed);
    }

    /// The attributes after our own last write: the pages are still the file's.
    pub(crate) fn saw(&self, mtime: (i64, u32), size: u64) {
        let mut st = self.state();
        st.seen =
            (st.dirty == 0 && st.in_flight.is_empty() && st.size == size).then_some((mtime, size));
    }

    // Reading.

    /// Copies what is cached at `offset`. `keep` marks the pages as used by somebody who wants
    /// them to stay.
    pub(crate) fn read_cached(&self, buf: &mut [u8], offset: u64, keep: bool) -> (usize, ReadStop) {
        let st = self.read_state();
        if st.lease.mode < Lease::Read {
            return (0, ReadStop::NoLease);
        }
        let Some(left) = st.size.checked_sub(offset).filter(|&l| l > 0) else {
            return (0, ReadStop::Eof);
        };
        let want = buf.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let mut done = 0;
        while done < want {
            let at = offset + done as u64;
            let (ci, first) = place(at / PAGE);
            let Some(chunk) = st.chunks.get(ci) else {
                return (done, ReadStop::Miss(at / PAGE));
            };
            let mut i = first;
            while done < want && i < CHUNK_PAGES {
                let start = ((offset + done as u64) % PAGE) as usize;
                let n = (PAGE_SIZE - start).min(want - done);
                if !chunk.uptodate.get(i) {
                    let valid = chunk.present.get(i) && {
                        let r = self.cache.arena.ranges(chunk.pages[i]);
                        r.dirty
                            .union(r.writeback)
                            .contains(Span::new(start, start + n))
                    };
                    if !valid {
                        return (done, ReadStop::Miss((offset + done as u64) / PAGE));
                    }
                }
                self.cache
                    .arena
                    .copy_out(chunk.pages[i], start, &mut buf[done..done + n]);
                if keep {
                    chunk.touch(i);
                }
                done += n;
                i += 1;
            }
        }
        (
            done,
            if done == buf.len() {
                ReadStop::Full
            } else {
                ReadStop::Eof
            },
        )
    }

    /// Whether a page is being filled right now.
    pub(crate) fn is_reading(&self, index: u64) -> bool {
        let (ci, i) = place(index);
        self.read_state()
            .chunks
            .get(ci)
            .is_some_and(|c| c.reading.get(i))
    }

    /// Starts reads of what is missing in `first..=last`; with memory short, at least of the
    /// first page if `must` (and else perhaps of none).
    pub(crate) fn fill(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        first: u64,
        last: u64,
        dropbehind: bool,
        must: bool,
    ) -> Arc<Fill> {
        let fill = Arc::new(Fill::default());
        let end = self.size().div_ceil(PAGE);
        if first >= end {
            return fill;
        }
        let last = last.min(end - 1);
        let mut pages = Vec::new();
        let want = usize::try_from(last - first + 1).unwrap_or(usize::MAX).min(
            // Never more than a part of the cache for one window.
            (self.cache.arena.pages() as usize / 8).max(1),
        );
        if must {
            self.cache.alloc(want, &mut pages);
        } else {
            self.cache.try_alloc(want, &mut pages);
        }
        let mut batch = Vec::new();
        let mut st = self.state();
        if st.lease.mode < Lease::Read {
            drop(st);
            self.cache.free(&mut pages);
            return fill;
        }
        let max_pages = (self.cache.limits.max_read / PAGE_SIZE).max(1);
        let node = st.server_node;
        let mut run: Vec<(u32, Span)> = Vec::new();
        let mut run_at = first;
        for index in first..=last {
            let (ci, i) = place(index);
            let chunk = st.chunks.get_or_insert(ci);
            let skip = chunk.uptodate.get(i) || chunk.reading.get(i);
            if skip || run.len() >= max_pages {
                let run = std::mem::take(&mut run);
                self.fill_request(handle, run_at, run, dropbehind, &fill, &mut batch);
            }
            if skip {
                continue;
            }
            let Some(page) = pages.pop() else { break };
            let mut valid = Span::default();
            if chunk.present.get(i) {
                // Partly written: its own bytes stay, the rest comes from the server.
                let r = self.cache.arena.ranges(chunk.pages[i]);
                valid = r.dirty.union(r.writeback);
            } else {
                self.cache.arena.set_owner(page, node, index);
                chunk.insert(i, page);
                if dropbehind {
                    chunk.dropbehind.set(i);
                }
            }
            chunk.reading.set(i);
            if run.is_empty() {
                run_at = index;
            }
            run.push((page, valid));
        }
        self.fill_request(handle, run_at, run, dropbehind, &fill, &mut batch);
        drop(st);
        self.cache.free(&mut pages);
        if !batch.is_empty() {
            self.cache.counters.read_requests(batch.len() as u64);
            self.cache.backend.submit(&mut batch);
        }
        fill
    }

    fn fill_request(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        first: u64,
        run: Vec<(u32, Span)>,
        dontcache: bool,
        fill: &Arc<Fill>,
        batch: &mut Vec<Request>,
    ) {
        if run.is_empty() {
            return;
        }
        let mut segs = Vec::new();
        for &(page, _) in &run {
            push_seg(&mut segs, self.cache.arena.seg(page, 0, PAGE_SIZE));
        }
        fill.left.fetch_add(1, Ordering::Relaxed);
        let (inode, fill, handle) = (self.clone(), fill.clone(), handle.clone());
        batch.push(Request {
            op: Op::Read,
            node: self.node,
            handle: handle.fh,
            offset: first * PAGE,
            len: run.len() * PAGE_SIZE,
            segs,
            dontcache,
            writeback: false,
            done: Box::new(move |result| {
                inode.end_fill(first, &run, result, &fill);
                drop(handle);
            }),
        });
    }

    fn end_fill(&self, first: u64, run: &[(u32, Span)], result: io::Result<usize>, fill: &Fill) {
        let arena = &self.cache.arena;
        let mut freed = Vec::new();
        let mut merged = 0;
        let got = match &result {
            Ok(n) => Some((*n).min(run.len() * PAGE_SIZE)),
            Err(e) => {
                fill.errno
                    .store(e.raw_os_error().unwrap_or(libc::EIO), Ordering::Release);
                None
            }
        };
        let mut st = self.state();
        for (k, &(page, valid)) in run.iter().enumerate() {
            let (ci, i) = place(first + k as u64);
            let chunk = st
                .chunks
                .get_mut(ci)
                .expect("a chunk with a page under I/O stays");
            debug_assert!(chunk.reading.get(i));
            chunk.reading.clear(i);
            let stale = chunk.stale.get(i);
            chunk.stale.clear(i);
            let own = chunk.pages[i] == page;
            let Some(got) = got.filter(|_| !stale) else {
                if own {
                    chunk.remove(i);
                }
                freed.push(page);
                continue;
            };
            // Beyond what the server had are zeros: the end of the file, or a hole that it does
            // not know of yet.
            let have = got.saturating_sub(k * PAGE_SIZE).min(PAGE_SIZE);
            arena.zero(page, have, PAGE_SIZE - have);
            if own {
                chunk.uptodate.set(i);
                continue;
            }
            let (start, end) = (usize::from(valid.start), usize::from(valid.end));
            for (from, to) in [(0, start), (end, PAGE_SIZE)] {
                if to > from {
                    arena.copy_page(page, chunk.pages[i], from, to - from);
                    merged += to - from;
                }
            }
            chunk.uptodate.set(i);
            freed.push(page);
        }
        st.chunks.remove_if_empty(place(first).0);
        drop(st);
        self.cache.counters.bytes_merged(merged as u64);
        self.cache.free(&mut freed);
        fill.left.fetch_sub(1, Ordering::Release);
        self.event.notify();
    }

    /// After an uncached read: the pages that such reads brought in go.
    pub(crate) fn drop_behind(&self, first: u64, last: u64) {
        let mut freed = Vec::new();
        let mut st = self.state();
        let mut next = st.chunks.next(place(first).0);
        while let Some(ci) = next {
            let base = ci * CHUNK_PAGES as u64;
            if base > last {
                break;
            }
            let chunk = st.chunks.get_mut(ci).expect("next answers what is there");
            let go = chunk
                .clean()
                .and(&chunk.dropbehind)
                .without(&chunk.referenced());
            let lo = first.saturating_sub(base) as usize;
            let hi = (last - base).min(CHUNK_PAGES as u64 - 1) as usize;
            for i in go.iter().filter(|i| (lo..=hi).contains(i)) {
                freed.push(chunk.remove(i));
            }
            st.chunks.remove_if_empty(ci);
            next = st.chunks.next(ci + 1);
        }
        drop(st);
        self.cache.free(&mut freed);
    }

    // Writing.

    /// A buffered write of all slices at `offset`. The caller holds the write lock. Answers how much
    /// was written: less than all when the lease for it (number `lease`, or any) is gone.
    pub(crate) fn write(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        bufs: &[IoSlice<'_>],
        offset: u64,
        lease: Option<u64>,
        dontcache: bool,
    ) -> io::Result<usize> {
        let mut done = 0usize;
        for buf in bufs {
            let mut at = 0;
            while at < buf.len() {
                let piece = &buf[at..buf.len().min(at + PIECE)];
                let part = self.write_piece(handle, offset + done as u64, piece, lease, dontcache);
                match part {
                    Ok(n) if n == piece.len() => {}
                    Ok(n) => {
                        self.cache.counters.bytes_in((done + n) as u64);
                        return Ok(done + n);
                    }
                    Err(e) if done == 0 => return Err(e),
                    Err(_) => return Ok(done),
                }
                at += piece.len();
                done += piece.len();
            }
        }
        self.cache.counters.bytes_in(done as u64);
        Ok(done)
    }

    fn write_piece(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        buf: &[u8],
        lease: Option<u64>,
        dontcache: bool,
    ) -> io::Result<usize> {
        let mut done = 0;
        loop {
            self.cache.throttle(self)?;
            let mut dirtied = Dirtied::default();
            let mut st = self.state();
            let need = self.copy_in(
                &mut st,
                handle,
                offset,
                buf,
                &mut done,
                &mut dirtied,
                lease,
                dontcache,
            );
            if dirtied.pages > 0 {
                st.dirty += dirtied.pages;
                // Under the lock: nobody can have written them yet.
                self.cache.add_dirty(dirtied.idle);
                if st.dirtied_at.is_none() {
                    st.dirtied_at = Some(Instant::now());
                }
            }
            let enough = st.dirty > self.cache.request_pages() as u64;
            let end = offset + done as u64;
            let behind = match st.written.1 >= self.cache.stream_bytes() {
                _ if dontcache => Behind::Reuse,
                true => Behind::Pass,
                false => Behind::Stay,
            };
            drop(st);
            match need {
                None => {
                    let (first, next) = (offset / PAGE / RUN * RUN, end / PAGE / RUN * RUN);
                    if behind != Behind::Stay && first < next {
                        self.write_stream(first, next - 1, behind);
                    } else if dirtied.pages > 0 && enough && self.cache.above_background() {
                        self.write_full();
                    }
                    return Ok(done);
                }
                Some(Need::Lease) => return Ok(done),
                Some(Need::Pages) => {
                    let want = (buf.len() - done).div_ceil(PAGE_SIZE).max(self.cache.lend) + 1;
                    let mut pages = Vec::new();
                    self.cache.alloc(want, &mut pages);
                    self.state().spare.append(&mut pages);
                }
                Some(Need::Read) => {
                    let index = (offset + done as u64) / PAGE;
                    self.cache
                        .wait(&self.event, || (!self.is_reading(index)).then_some(()));
                }
                Some(Need::Flush(index)) => {
                    self.write_and_wait(index, index)?;
                }
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn copy_in(
        &self,
        st: &mut State,
        handle: &Arc<Handle>,
        offset: u64,
        buf: &[u8],
        done: &mut usize,
        dirtied: &mut Dirtied,
        lease: Option<u64>,
        dontcache: bool,
    ) -> Option<Need> {
        let arena = &self.cache.arena;
        if st.lease.mode < Lease::Write || lease.is_some_and(|seq| seq != st.lease.seq) {
            return Some(Need::Lease);
        }
        if !st.writer.as_ref().is_some_and(|w| Arc::ptr_eq(w, handle)) {
            st.writer = Some(handle.clone());
        }
        let next = offset + *done as u64;
        let on = st.written.0 == next;
        if !on {
            st.written = (next, 0);
        }
        while *done < buf.len() {
            let at = offset + *done as u64;
            let (index, start) = (at / PAGE, (at % PAGE) as usize);
            let n = (PAGE_SIZE - start).min(buf.len() - *done);
            let span = Span::new(start, start + n);
            let (ci, i) = place(index);
            let chunk = st.chunks.get_or_insert(ci);
            let (page, mut ranges);
            if chunk.present.get(i) {
                if chunk.reading.get(i) {
                    return Some(Need::Read);
                }
                page = chunk.pages[i];
                ranges = arena.ranges(page);
                if !chunk.uptodate.get(i) {
                    let valid = ranges.dirty.union(ranges.writeback);
                    if n < PAGE_SIZE && !valid.is_empty() && !valid.touches(span) {
                        return Some(Need::Flush(index));
                    }
                }
                // Filling up the page that the last write began is not another use of it.
                let fills_up = on && at == next && start > 0;
                if !dontcache && !fills_up {
                    chunk.touch(i);
                }
            } else {
                let Some(new) = st.spare.pop() else {
                    return Some(Need::Pages);
                };
                page = new;
                ranges = Ranges::default();
                arena.set_owner(page, st.server_node, index);
                chunk.insert(i, page);
                if dontcache {
                    chunk.dropbehind.set(i);
                }
                if n < PAGE_SIZE && index * PAGE >= st.server_size {
                    // Nothing but zeros can be around it.
                    arena.zero(page, 0, start);
                    arena.zero(page, start + n, PAGE_SIZE - start - n);
                    chunk.uptodate.set(i);
                }
            }
            arena.copy_in(page, start, &buf[*done..*done + n]);
            st.size = st.size.max(at + n as u64);
            ranges.dirty = ranges.dirty.union(span);
            if !chunk.uptodate.get(i) {
                let valid = ranges.dirty.union(ranges.writeback);
                let end = usize::from(valid.end);
                if valid.start == 0 && (end == PAGE_SIZE || index * PAGE + end as u64 >= st.size) {
                    arena.zero(page, end, PAGE_SIZE - end);
                    chunk.uptodate.set(i);
                }
            }
            if !chunk.dirty.get(i) {
                chunk.dirty.set(i);
                arena.set_handle(page, server_handle(&st.handles, st.session, handle));
                dirtied.pages += 1;
                dirtied.idle += u64::from(!chunk.writeback.get(i));
            }
            arena.set_ranges(page, ranges);
            *done += n;
            st.written.0 += n as u64;
            st.written.1 += n as u64;
        }
        None
    }

    // Size and holes.

    /// Changes the size, at the server first. The caller holds the write lock.
    pub(crate) fn set_len(
        self: &Arc<Self>,
        size: u64,
        tell: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        self.wait_direct();
        let old = self.size();
        if size >= old {
            tell()?;
            let mut st = self.state();
            st.lease.changed();
            st.size = size;
            st.server_size = st.server_size.max(size);
            return Ok(());
        }
        // What is under way beyond the new end would make the file longer again.
        let cut_page = size / PAGE;
        self.state().frozen = true;
        self.wait_in_flight(cut_page, u64::MAX, u64::MAX);
        let told = tell();
        let mut freed = Vec::new();
        let mut st = self.state();
        st.frozen = false;
        st.lease.changed();
        if told.is_ok() {
            st.size = size;
            st.server_size = st.server_size.min(size);
            self.truncate_pages(&mut st, size, &mut freed);
        }
        drop(st);
        self.cache.free(&mut freed);
        self.event.notify();
        told
    }

    pub(super) fn truncate_pages(&self, st: &mut State, size: u64, freed: &mut Vec<u32>) {
        let arena = &self.cache.arena;
        let first_gone = size.div_ceil(PAGE);
        let mut next = st.chunks.next(place(size / PAGE).0);
        while let Some(ci) = next {
            let chunk = st.chunks.get_mut(ci).expect("next answers what is there");
            for i in chunk.present.iter() {
                let index = ci * CHUNK_PAGES as u64 + i as u64;
                if (index + 1) * PAGE <= size {
                    continue;
                }
                let page = chunk.pages[i];
                debug_assert!(!chunk.writeback.get(i));
                let mut ranges = arena.ranges(page);
                let was_dirty = chunk.dirty.get(i);
                if index >= first_gone {
                    ranges.dirty = Span::default();
                } else {
                    let cut = (size % PAGE) as usize;
                    ranges.dirty = ranges.dirty.before(cut);
                    if !chunk.reading.get(i) {
                        arena.zero(page, cut, PAGE_SIZE - cut);
                    }
                }
                arena.set_ranges(page, ranges);
                if was_dirty && ranges.dirty.is_empty() {
                    chunk.dirty.clear(i);
                    st.dirty -= 1;
                    self.cache.sub_dirty(1);
                }
                if chunk.reading.get(i) {
                    chunk.stale.set(i);
                } else if index >= first_gone || (!chunk.uptodate.get(i) && !chunk.dirty.get(i)) {
                    freed.push(chunk.remove(i));
                }
            }
            st.chunks.remove_if_empty(ci);
            next = st.chunks.next(ci + 1);
        }
    }

    /// Throws away the clean pages of a range; those being read are thrown away when they come.
    pub(super) fn invalidate(&self, st: &mut State, first: u64, last: u64, freed: &mut Vec<u32>) {
        let mut next = st.chunks.next(place(first).0);
        while let Some(ci) = next {
            let base = ci * CHUNK_PAGES as u64;
            if base > last {
                break;
            }
            let chunk = st.chunks.get_mut(ci).expect("next answers what is there");
            let lo = first.saturating_sub(base) as usize;
            let hi = (last - base).min(CHUNK_PAGES as u64 - 1) as usize;
            for i in chunk.present.iter().filter(|i| (lo..=hi).contains(i)) {
                if chunk.reading.get(i) {
                    chunk.stale.set(i);
                } else if !chunk.dirty.get(i) && !chunk.writeback.get(i) {
                    freed.push(chunk.remove(i));
                }
            }
            st.chunks.remove_if_empty(ci);
            next = st.chunks.next(ci + 1);
        }
    }

    /// As [`Inode::invalidate`], and makes the file at least `size` long.
    pub(crate) fn invalidate_range(&self, first: u64, last: u64, size: Option<u64>) {
        let mut freed = Vec::new();
        let mut st = self.state();
        st.lease.changed();
        self.invalidate(&mut st, first, last, &mut freed);
        if let Some(size) = size {
            st.size = st.size.max(size);
            st.server_size = st.server_size.max(size);
        }
        drop(st);
        self.cache.free(&mut freed);
    }

    /// The inode has other numbers at the server of a new session: puts them into the descriptors
    /// of all pages.
    pub(super) fn rename(&self, st: &mut State, node: u64, handles: HashMap<u64, u64>) {
        st.server_node = node;
        st.handles = handles;
        let fh = match &st.writer {
            Some(writer) => server_handle(&st.handles, st.session, writer),
            None => u64::MAX,
        };
        let mut next = st.chunks.next(0);
        while let Some(ci) = next {
            let chunk = st.chunks.get(ci).expect("next answers what is there");
            for i in chunk.present.iter() {
                self.cache.arena.rename(chunk.pages[i], node, fh);
            }
            next = st.chunks.next(ci + 1);
        }
    }

    /// Takes up to `want` clean pages that were not used lately.
    pub(super) fn reclaim(&self, want: usize, pages: &mut Vec<u32>) {
        let mut st = self.state();
        let enough = pages.len() + want;
        let State { spare, .. } = &mut *st;
        if self.opens.load(Ordering::Relaxed) == 0 || lock(&self.cache.free).is_empty() {
            pages.append(spare);
        }
        let hand = st.hand;
        for (from, to) in [(hand, u64::MAX), (0, hand)] {
            let mut next = st.chunks.next(from).filter(|&n| n < to);
            while let Some(ci) = next {
                let chunk = st.chunks.get_mut(ci).expect("next answers what is there");
                for i in chunk.clean().without(&chunk.referenced()).iter() {
                    if pages.len() >= enough {
                        st.hand = ci;
                        return;
                    }
                    pages.push(chunk.remove(i));
                }
                chunk.unreference();
                st.chunks.remove_if_empty(ci);
                next = st.chunks.next(ci + 1).filter(|&n| n < to);
            }
        }
        st.hand = 0;
    }
}
