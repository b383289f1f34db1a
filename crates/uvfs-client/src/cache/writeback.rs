//! Writeback: from dirty pages to requests and back, one lock acquisition at each end.
//!
//! All of it begins in `Inode::start_writeback` and ends in `Inode::end_writeback`. These begin it: a call that needs
//! the data at the server, such as a sync or a recall (`write_and_wait`, or `start_flush` without blocking), the
//! flusher (`write_batch`), a writer while too many pages are dirty (`write_full`), an uncached write or a close
//! (`write_range`), and a stream (`write_stream`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::{self, Errno};
use uvfs_queue::arena::{PAGE_SIZE, Span};
use uvfs_queue::pair::Seg;

use super::Handle;
use super::chunk::{Bits, CHUNK_PAGES, Chunk};
use super::inode::{InFlight, Inode, State, push_seg};
use crate::connection::pages::{Op, Request};

const PAGE: u64 = PAGE_SIZE as u64;
/// How long background writeback leaves an inode alone after a failure.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// A stream waits a moment while it has more requests under way than these: what it writes next then
/// lies in the pages of the first of them.
const STREAM_REQUESTS: usize = 4;
/// How long it waits at most; a slow store is to get more at once.
const STREAM_PATIENCE: Duration = Duration::from_millis(1);
/// The most requests that [`Inode::write_full`] starts at once: dirty pages may lie far apart.
const FULL_BATCH: usize = 16;

/// An [`Inode::write_and_wait`] in steps, none of which blocks.
#[derive(Debug)]
pub(crate) struct Flush {
    first: u64,
    last: u64,
    /// The inode's errors when it began.
    errors: u64,
    /// The inode's [`Inode::unsent`] when it began.
    unsent: u64,
    /// Requests below this number carry what was dirty.
    before: u64,
    /// Some dirty pages could not be taken.
    busy: bool,
    /// They could not be taken since the last pass.
    blocked: bool,
    /// There was a second pass.
    repeated: bool,
}

/// The pages that [`Inode::start_writeback`] found.
#[derive(Default)]
struct Started {
    batch: Vec<Request>,
    /// Dirty pages that could not be taken: they are being written, read, or truncated.
    busy: bool,
}

/// Pages of a chunk whose dirty bytes follow one another.
struct Run {
    /// The last page.
    to: usize,
    /// Where the bytes begin in the chunk, and how many they are.
    start: u64,
    len: usize,
    segs: Vec<Seg>,
}

/// The fate of pages once they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behind {
    /// The cache drops the pages of uncached writes, and keeps the others.
    Stay,
    /// As `Stay`, and the writer's next bytes take the pages that are dropped.
    Reuse,
    /// The writer's next bytes take all pages: the cache can't hold a stream.
    Pass,
}

impl Inode {
    /// Makes requests of the dirty pages in `first..=last`, at most `max` and none once `budget`
    /// pages are in them; one lock acquisition for all of them. `behind` says what becomes of the
    /// pages.
    fn start_writeback(
        self: &Arc<Self>,
        first: u64,
        last: u64,
        max: usize,
        budget: u64,
        behind: Behind,
    ) -> Started {
        let mut started = Started::default();
        self.cache.counters.writeback_locks(1);
        let mut st = self.state();
        let st = &mut *st;
        if st.dirty == 0 {
            return started;
        }
        if st.frozen {
            started.busy = true;
            return started;
        }
        let Some(handle) = st.writer.clone() else {
            return started;
        };
        let mut pages = 0;
        let mut next = 0;
        'chunks: while let Some((ci, lo, hi)) = st.chunks.within(next, first, last) {
            next = ci + 1;
            let base = ci * CHUNK_PAGES as u64;
            let chunk = st.chunks.get_mut(ci).expect("next answers what is there");
            let ready = chunk
                .dirty
                .without(&chunk.writeback)
                .without(&chunk.reading);
            started.busy |= chunk.dirty.without(&ready).any_in(lo, hi);
            let mut at = lo;
            while let Some(from) = ready.next(at, hi) {
                if started.batch.len() >= max || pages >= budget {
                    break 'chunks;
                }
                let dontcache = chunk.dropbehind.get(from);
                let run = self.take_run(chunk, &ready, from, hi);
                let (to, len) = (run.to, run.len);
                let offset = base * PAGE + run.start;
                chunk.writeback.set_range(from, to);
                chunk.dirty.clear_range(from, to);
                let count = (to - from + 1) as u64;
                st.dirty -= count;
                pages += count;
                let id = st.next_request;
                st.next_request += 1;
                st.in_flight.push(InFlight {
                    id,
                    first: base + from as u64,
                    last: base + to as u64,
                });
                let (inode, handle) = (self.clone(), handle.clone());
                started.batch.push(Request {
                    op: Op::Write,
                    node: self.node,
                    handle: handle.fh,
                    offset,
                    len,
                    segs: run.segs,
                    dontcache,
                    writeback: true,
                    done: Box::new(move |result| {
                        let end = offset + len as u64;
                        inode.end_writeback(id, ci, (from, to), end, len, behind, result);
                        drop::<Arc<Handle>>(handle);
                    }),
                });
                st.cursor = base + to as u64 + 1;
                at = to + 1;
            }
        }
        if st.dirty == 0 {
            st.dirtied_at = None;
        }
        self.cache
            .counters
            .writeback_requests(started.batch.len() as u64);
        self.cache.counters.writeback_pages(pages);
        started
    }

    /// Takes a run of ready pages, from `from` to at most `hi`, whose dirty bytes meet, and that stay or
    /// go alike: their dirty bytes are under writeback then.
    fn take_run(&self, chunk: &Chunk, ready: &Bits, from: usize, hi: usize) -> Run {
        let arena = &self.cache.arena;
        let max_pages = self.cache.request_pages();
        let dontcache = chunk.dropbehind.get(from);
        let mut run = Run {
            to: from,
            start: from as u64 * PAGE + u64::from(arena.ranges(chunk.pages[from]).dirty.start),
            len: 0,
            segs: Vec::new(),
        };
        loop {
            let page = chunk.pages[run.to];
            let mut ranges = arena.ranges(page);
            let span = ranges.dirty;
            debug_assert!(!span.is_empty() && ranges.writeback.is_empty());
            ranges.writeback = span;
            ranges.dirty = Span::default();
            arena.set_ranges(page, ranges);
            push_seg(
                &mut run.segs,
                arena.seg(page, span.start.into(), span.len()),
            );
            run.len += span.len();
            let next = run.to + 1;
            let more = usize::from(span.end) == PAGE_SIZE
                && next <= hi
                && next - from < max_pages
                && ready.get(next)
                && chunk.dropbehind.get(next) == dontcache
                && arena.ranges(chunk.pages[next]).dirty.start == 0;
            if !more {
                return run;
            }
            run.to = next;
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn end_writeback(
        &self,
        id: u64,
        ci: u64,
        (from, to): (usize, usize),
        end: u64,
        len: usize,
        behind: Behind,
        result: io::Result<usize>,
    ) {
        let arena = &self.cache.arena;
        let failed = match result {
            Ok(n) if n >= len => None,
            // As the kernel reports a write that ends short without an error.
            Ok(_) => Some(Errno::IO),
            Err(e) => Some(e),
        };
        let mut freed = Vec::new();
        let mut cleaned = 0;
        self.cache.counters.writeback_locks(1);
        let mut guard = self.state();
        let st = &mut *guard;
        let chunk = st
            .chunks
            .get_mut(ci)
            .expect("a chunk with a page under I/O stays");
        chunk.writeback.clear_range(from, to);
        let referenced = chunk.referenced();
        for i in from..=to {
            let page = chunk.pages[i];
            let mut ranges = arena.ranges(page);
            let written = std::mem::take(&mut ranges.writeback);
            if failed.is_some() {
                ranges.dirty = ranges.dirty.union(written);
                if !chunk.dirty.get(i) {
                    chunk.dirty.set(i);
                    st.dirty += 1;
                }
            }
            arena.set_ranges(page, ranges);
            if chunk.dirty.get(i) {
                continue;
            }
            cleaned += 1;
            let gone = !chunk.uptodate.get(i)
                || ((behind == Behind::Pass || chunk.dropbehind.get(i)) && !referenced.get(i))
                || chunk.stale.get(i);
            if gone && !chunk.reading.get(i) {
                chunk.stale.clear(i);
                freed.push(chunk.remove(i));
            }
        }
        st.chunks.remove_if_empty(ci);
        if behind != Behind::Stay && self.opens.load(Ordering::Acquire) > 0 {
            // The next pages of the stream are those that the processor's caches still have,
            // ascending, so that they make one segment.
            let room = self.cache.stream_spare().saturating_sub(st.spare.len());
            let at = freed.len().saturating_sub(room);
            st.spare.extend(freed.drain(at..).rev());
        }
        match failed {
            None => {
                st.server_size = st.server_size.max(end);
                st.failing = None;
                st.retry_at = None;
                if st.dirty > 0 && st.dirtied_at.is_none() {
                    st.dirtied_at = Some(Instant::now());
                }
            }
            Some(code) => {
                let session = self.cache.server.session();
                if code == Errno::NOTCONN && session != Some(st.session) {
                    // The server went away, which is no error of the file: the dirty pages wait for the next server.
                    self.unsent.fetch_add(1, Ordering::AcqRel);
                } else {
                    self.errors.set(code);
                }
                st.failing = Some(code);
                let now = Instant::now();
                st.retry_at = Some(now + RETRY_AFTER);
                st.dirtied_at.get_or_insert(now);
            }
        }
        let at = st
            .in_flight
            .iter()
            .position(|f| f.id == id)
            .expect("it was under way");
        st.in_flight.swap_remove(at);
        // Lets the server close the file when no other open has it; not under the lock.
        let last =
            st.dirty == 0 && st.in_flight.is_empty() && self.opens.load(Ordering::Acquire) == 0;
        let writer = if last { st.writer.take() } else { None };
        drop(guard);
        drop(writer);
        self.cache.free(&mut freed);
        self.event.notify();
        self.cache.cleaned(cleaned);
    }

    /// Starts up to `max` requests where the last batch ended; says whether there were any. Leaves
    /// an inode alone whose writeback has just failed.
    pub(super) fn write_batch(self: &Arc<Self>, max: usize) -> bool {
        self.write_up_to(max, |_| u64::MAX)
    }

    /// As [`Inode::write_batch`], but only as many pages as fill whole requests: the page that a
    /// writer is filling stays, instead of going in several small ones.
    pub(super) fn write_full(self: &Arc<Self>) -> bool {
        let full = self.cache.request_pages() as u64;
        self.write_up_to(FULL_BATCH, |dirty| dirty / full * full)
    }

    /// Starts up to `max` requests where the last batch ended, for as many pages as `budget` says of the dirty ones.
    fn write_up_to(self: &Arc<Self>, max: usize, budget: impl Fn(u64) -> u64) -> bool {
        let (cursor, budget) = {
            let st = self.read_state();
            let budget = budget(st.dirty);
            if st.dirty == 0 || budget == 0 || st.retry_at.is_some_and(|t| t > Instant::now()) {
                return false;
            }
            (st.cursor, budget)
        };
        let mut batch = self
            .start_writeback(cursor, u64::MAX, max, budget, Behind::Stay)
            .batch;
        if batch.is_empty() && cursor > 0 {
            batch = self
                .start_writeback(0, u64::MAX, max, budget, Behind::Stay)
                .batch;
        }
        let any = !batch.is_empty();
        if any {
            self.cache.io.submit(&mut batch);
        }
        any
    }

    /// As [`Inode::write_batch`], of an inode whose writeback has just failed as well.
    pub(super) fn retry_batch(self: &Arc<Self>, max: usize) -> bool {
        self.state().retry_at = None;
        self.write_batch(max)
    }

    /// Whether its dirty pages are old enough to be written.
    pub(super) fn wants_writeback(&self, after: Duration) -> bool {
        let st = self.read_state();
        if st.lease.orphan {
            return st.dirty > 0;
        }
        st.dirty > 0 && st.dirtied_at.is_some_and(|t| t.elapsed() >= after)
    }

    pub(super) fn under_writeback(&self) -> bool {
        !self.read_state().in_flight.is_empty()
    }

    /// The errno with which writeback fails at the moment.
    pub(super) fn failing(&self) -> Option<Errno> {
        self.read_state().failing
    }

    /// Starts writeback of a range without waiting for it (an uncached write, an old page).
    pub(crate) fn write_range(self: &Arc<Self>, first: u64, last: u64) {
        let mut batch = self
            .start_writeback(first, last, usize::MAX, u64::MAX, Behind::Stay)
            .batch;
        if !batch.is_empty() {
            self.cache.io.submit(&mut batch);
        }
    }

    /// Writes back what a stream or an uncached write has just completed, while the processor's
    /// caches have it, and gives its pages to the next bytes.
    pub(super) fn write_stream(self: &Arc<Self>, first: u64, last: u64, behind: Behind) {
        if self
            .read_state()
            .retry_at
            .is_some_and(|t| t > Instant::now())
        {
            return;
        }
        let mut batch = self
            .start_writeback(first, last, usize::MAX, u64::MAX, behind)
            .batch;
        if batch.is_empty() {
            return;
        }
        self.cache.io.submit(&mut batch);
        let few = || (self.read_state().in_flight.len() <= STREAM_REQUESTS).then_some(());
        if few().is_none() {
            self.event.wait_timeout(few, STREAM_PATIENCE);
        }
    }

    /// Waits until the requests that overlap `first..=last` and were started before number
    /// `before` have ended.
    pub(super) fn wait_in_flight(&self, first: u64, last: u64, before: u64) {
        self.cache.wait(&self.event, || {
            (!Self::in_flight(&self.read_state(), first, last, before)).then_some(())
        });
    }

    fn in_flight(st: &State, first: u64, last: u64, before: u64) -> bool {
        st.in_flight
            .iter()
            .any(|f| f.id < before && f.first <= last && f.last >= first)
    }

    /// Starts writing what is dirty in `first..=last`.
    pub(crate) fn start_flush(self: &Arc<Self>, first: u64, last: u64) -> Flush {
        let mut flush = Flush {
            first,
            last,
            errors: self.errors.count(),
            unsent: self.unsent.load(Ordering::Acquire),
            before: 0,
            busy: false,
            blocked: false,
            repeated: false,
        };
        self.flush_pass(&mut flush);
        flush
    }

    fn flush_pass(self: &Arc<Self>, flush: &mut Flush) {
        let (first, last) = (flush.first, flush.last);
        let Started { mut batch, busy } =
            self.start_writeback(first, last, usize::MAX, u64::MAX, Behind::Stay);
        if !batch.is_empty() {
            self.cache.io.submit(&mut batch);
        }
        flush.busy = busy;
        flush.before = self.read_state().next_request;
    }

    /// The result, once everything is written. Called again after each event. Errors as of [`Inode::write_and_wait`].
    pub(crate) fn step_flush(self: &Arc<Self>, flush: &mut Flush) -> Option<io::Result<()>> {
        loop {
            let (first, last) = (flush.first, flush.last);
            if Self::in_flight(&self.read_state(), first, last, flush.before) {
                return None;
            }
            if let Some(code) = self.errors.after(flush.errors) {
                return Some(Err(code));
            }
            if self.unsent.load(Ordering::Acquire) != flush.unsent {
                return Some(Err(Errno::NOTCONN));
            }
            if !flush.busy {
                return Some(Ok(()));
            }
            // A page that is being read, or a size that is being changed, is worth waiting for as often as it takes.
            let blocked = {
                let st = self.read_state();
                st.frozen || st.dirty_and_reading(first, last)
            };
            if blocked {
                flush.blocked = true;
                return None;
            }
            // Other pages that were busy at first were dirtied again during their writeback: a second pass takes them.
            if !std::mem::take(&mut flush.blocked) && std::mem::replace(&mut flush.repeated, true) {
                return Some(Ok(()));
            }
            self.flush_pass(flush);
        }
    }

    /// Writes everything in `first..=last` that is dirty now, and waits for it.
    ///
    /// # Errors
    /// That of the last request that failed meanwhile, `ENOTCONN` when the server went. The pages stay
    /// dirty.
    pub(crate) fn write_and_wait(self: &Arc<Self>, first: u64, last: u64) -> io::Result<()> {
        let mut flush = self.start_flush(first, last);
        self.cache.wait(&self.event, || self.step_flush(&mut flush))
    }
}

impl State {
    /// Whether the server may not have all data yet.
    pub(super) fn is_unwritten(&self) -> bool {
        self.dirty > 0 || !self.in_flight.is_empty()
    }

    fn dirty_and_reading(&self, first: u64, last: u64) -> bool {
        let mut next = 0;
        while let Some((ci, lo, hi)) = self.chunks.within(next, first, last) {
            next = ci + 1;
            if self
                .chunks
                .get(ci)
                .is_some_and(|c| c.dirty.and(&c.reading).any_in(lo, hi))
            {
                return true;
            }
        }
        false
    }
}
