//! The page cache: pages in a shared arena, an index per inode, writeback, reclaim.
//!
//! Locks, in the order in which they are taken: an inode's `write_lock` (writers, truncation), its
//! `state` (the index; never held while waiting or calling the server), the free list. No lock is
//! held while a request is submitted, so a layer may end requests in the submitting thread.

mod chunk;
mod direct;
mod errseq;
mod inode;
mod lease;
mod leased;
pub(crate) mod memory;
mod writeback;

use rustix::io::{self, Errno};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};
use uvfs_sys::{lock, wait_while};

use uvfs_queue::arena::{Arena, PAGE_SIZE};

use crate::connection::Connection;
use crate::connection::pages::PageIo;
use crate::error::Result;
use crate::event::Event;
use crate::stats::{Counters, Stats};
use crate::types::{Lease, NodeId};

pub(crate) use direct::{Direct, Then};
use inode::SPARED;
pub(crate) use inode::{Fill, Inode, ReadStop};
pub(crate) use writeback::Flush;

/// How often a call is repeated because the server went away: a call that kills every server must come to an end.
pub(crate) const CARRIED: u32 = 16;

/// The cache's limits.
///
/// ```
/// use uvfs_client::Config;
///
/// let small = Config::default().memory(16 << 20).readahead(0);
/// ```
#[derive(Debug, Clone)]
pub struct Config {
    pub(crate) memory: usize,
    pub(crate) dirty_percent: u32,
    pub(crate) background_percent: u32,
    pub(crate) writeback_after: Duration,
    pub(crate) yields: bool,
    pub(crate) readahead: usize,
    pub(crate) max_request: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            memory: Self::MEMORY,
            dirty_percent: 40,
            background_percent: 10,
            writeback_after: Duration::from_secs(5),
            yields: true,
            readahead: 1 << 20,
            max_request: 1 << 20,
        }
    }
}

impl Config {
    /// Bytes of the page arena, unless [`Config::memory`] says otherwise.
    pub const MEMORY: usize = 64 << 20;

    option! {
        /// Bytes of the page arena, at least 1 MiB: the cache never holds more.
        memory: usize,
        /// Writers wait while more than this percentage of the pages is dirty or under writeback.
        dirty_percent: u32,
        /// Writeback starts above this percentage.
        background_percent: u32,
        /// Dirty pages are written after this long.
        writeback_after: Duration,
        /// Whether the cache stops growing, and gives clean pages back, when the memory of the machine
        /// or of the process's control group is short.
        yields: bool,
        /// How far readahead may grow, in bytes; 0 turns it off.
        readahead: usize,
        /// The most bytes of one read or write request, a multiple of 4096. The server may allow fewer.
        max_request: usize,
    }
}

/// An open file at the server; closed when the last user (a `File`, the cache's writeback) is
/// done with it.
#[derive(Debug)]
pub(crate) struct Handle {
    cache: Weak<Cache>,
    pub(crate) node: NodeId,
    pub(crate) fh: u64,
    /// The session in which it was opened, and its number there.
    session: u64,
    server_fh: u64,
    /// The last session in which it was seen to be open.
    seen: AtomicU64,
}

impl Handle {
    pub(crate) fn new(cache: &Arc<Cache>, node: NodeId, fh: u64) -> Arc<Self> {
        let (session, _, server_fh) = cache.server.names(node, fh);
        Arc::new(Self {
            cache: Arc::downgrade(cache),
            node,
            fh,
            session,
            server_fh,
            seen: AtomicU64::new(session),
        })
    }

    /// Whether it is open in a session, too: files and locks may be lost with a server.
    pub(crate) fn check(&self, server: &Connection, session: u64) -> io::Result<()> {
        if self.seen.load(Ordering::Relaxed) != session {
            server.still_open(self.node, self.fh)?;
            self.seen.store(session, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(cache) = self.cache.upgrade() {
            cache.server.release(self.node, self.fh);
        }
    }
}

pub(crate) struct Cache {
    pub(crate) server: Arc<Connection>,
    /// Takes the reads and writes: `server`, or a layer above it.
    pub(crate) io: Arc<dyn PageIo>,
    pub(crate) arena: Arc<Arena>,
    /// Bytes of one request.
    pub(crate) max_request: usize,
    pub(crate) config: Config,
    pub(crate) counters: Counters,
    /// Pages that the cache has.
    pages: u64,
    /// Free pages, with memory behind them.
    free: Mutex<Vec<u32>>,
    /// Free pages that take no memory.
    cold: Mutex<memory::Cold>,
    /// Pages that the free list lends at once to one inode.
    pub(super) lend: usize,
    /// Pages that are dirty or under writeback.
    dirty: AtomicU64,
    dirty_limit: u64,
    background_limit: u64,
    inodes: Mutex<foldhash::HashMap<NodeId, Arc<Inode>>>,
    /// The inodes again, in the order in which reclaim visits them.
    clock: Mutex<VecDeque<Weak<Inode>>>,
    /// Pages were freed, or dirty ones written.
    pub(crate) changed: Event,
    /// Throttled writers may go on.
    room: Event,
    kick: (Mutex<bool>, Condvar),
    peak: AtomicU64,
    stop: AtomicBool,
    /// The flusher was woken and has not looked yet, so it need not be woken again.
    flusher_awake: AtomicBool,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Cache {
    pub(crate) fn new(
        server: Connection,
        config: Config,
        layer_pages: u32,
        layer: impl FnOnce(&Arc<Arena>, Arc<Connection>) -> Arc<dyn PageIo>,
    ) -> Result<Arc<Self>> {
        let pages =
            u32::try_from(config.memory.max(1 << 20) / PAGE_SIZE).map_err(|_| Errno::INVAL)?;
        let arena = Arena::create(pages + layer_pages + Connection::RESERVED_PAGES)?;
        let (arena, server) = (Arc::new(arena), Arc::new(server));
        server.attach(&arena)?;
        let max_request = config.max_request.min(server.max_payload()).max(PAGE_SIZE);
        let percent = |p: u32| (u64::from(pages) * u64::from(p.min(95)) / 100).max(1);
        let cache = Arc::new(Self {
            max_request,
            io: layer(&arena, server.clone()),
            pages: u64::from(pages),
            free: Mutex::default(),
            cold: Mutex::new(memory::Cold::new(pages, config.yields)),
            lend: (pages as usize / 256).clamp(1, 64),
            dirty: AtomicU64::new(0),
            dirty_limit: percent(config.dirty_percent),
            background_limit: percent(config.background_percent.min(config.dirty_percent)),
            inodes: Mutex::default(),
            clock: Mutex::default(),
            changed: Event::default(),
            room: Event::default(),
            kick: (Mutex::new(false), Condvar::new()),
            peak: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            flusher_awake: AtomicBool::new(false),
            counters: Counters::default(),
            server,
            arena,
            config,
        });
        if cache.config.yields {
            memory::watch(&cache);
        }
        Ok(cache)
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = self.counters.sum();
        stats.cached_pages = self.used();
        stats.dirty_pages = self.dirty.load(Ordering::Relaxed);
        stats.peak_pages = self.peak.load(Ordering::Relaxed);
        stats
    }

    /// Waits for `check`, taking answers in this thread first.
    pub(crate) fn wait<T>(&self, event: &Event, mut check: impl FnMut() -> Option<T>) -> T {
        if let Some(found) = check() {
            return found;
        }
        let began = Instant::now();
        let mut found = None;
        self.io.poll(&mut || {
            found = check();
            found.is_some()
        });
        let found = match found {
            Some(found) => found,
            None => event.wait(check),
        };
        self.counters.waited_ns(began.elapsed().as_nanos() as u64);
        found
    }

    /// The inode, made when it is new.
    pub(crate) fn inode(self: &Arc<Self>, node: NodeId, size: u64) -> Arc<Inode> {
        let mut inodes = lock(&self.inodes);
        if let Some(inode) = inodes.get(&node) {
            return inode.clone();
        }
        let inode = Inode::new(self, node, size);
        inodes.insert(node, inode.clone());
        lock(&self.clock).push_back(Arc::downgrade(&inode));
        inode
    }

    pub(crate) fn inodes(&self) -> Vec<Arc<Inode>> {
        lock(&self.inodes).values().cloned().collect()
    }

    pub(crate) fn find(&self, node: NodeId) -> Option<Arc<Inode>> {
        lock(&self.inodes).get(&node).cloned()
    }

    /// Forgets an inode that is closed and holds nothing, here and at the server.
    pub(crate) fn evict(&self, node: NodeId) {
        let mut inodes = lock(&self.inodes);
        match inodes.get(&node) {
            // The map's reference and nothing else: no thread can get another while we hold the map.
            Some(inode) if Arc::strong_count(inode) == 1 && inode.is_idle() => {
                let lookups = inode.lookups.load(Ordering::Acquire);
                let inode = inodes.remove(&node);
                drop(inodes);
                // The server may know the node for longer, by its name.
                if let Some(lease) = inode.as_ref().and_then(|inode| inode.take_lease()) {
                    self.server.return_lease(node, lease, Lease::None);
                }
                if lookups > 0 {
                    self.server.forget(node, lookups);
                }
                drop(inode);
            }
            _ => {}
        }
    }

    // Pages.

    /// Takes up to `want` free pages.
    fn take_free(&self, want: usize, into: &mut Vec<u32>) -> usize {
        let mut free = lock(&self.free);
        let mut n = want.min(free.len());
        let at = free.len() - n;
        // Reversed, so that the first page taken is the one that was on top.
        into.extend(free.drain(at..));
        if n < want {
            // Pages that have memory are used again before others get some.
            let mut cold = lock(&self.cold);
            n += cold.take(want - n, into);
            let used = self.pages - (free.len() + cold.len()) as u64;
            self.peak.fetch_max(used, Ordering::Relaxed);
        }
        n
    }

    /// Pages that are handed out.
    fn used(&self) -> u64 {
        let free = lock(&self.free);
        self.pages - (free.len() + lock(&self.cold).len()) as u64
    }

    /// Gives pages back.
    pub(crate) fn free(&self, pages: &mut Vec<u32>) {
        if !pages.is_empty() {
            lock(&self.free).append(pages);
            self.changed.notify();
        }
    }

    /// Takes pages from the free list or from clean cached ones. Never waits for I/O, so a server
    /// that is itself answering a request may call it.
    pub(crate) fn try_alloc(&self, want: usize, into: &mut Vec<u32>) -> usize {
        let mut got = self.take_free(want, into);
        while got < want {
            let more = (want - got).max(self.lend).max(64);
            if self.reclaim(more, false) == 0 {
                break;
            }
            let n = self.take_free(want - got, into);
            if n == 0 {
                break;
            }
            got += n;
        }
        got
    }

    /// Takes at least one page and at most `want`, waiting until there are some.
    pub(crate) fn alloc(&self, want: usize, into: &mut Vec<u32>) -> usize {
        for round in 0.. {
            let mut got = self.try_alloc(want, into);
            if got == 0 && (round > 50 || self.dirty.load(Ordering::Relaxed) == 0) {
                // No page can be written or dropped: calls under way have them all, and may wait for each other. So
                // pages are taken even if memory is short.
                got = lock(&self.cold).take_anyway(want, into);
            }
            if got > 0 {
                return got;
            }
            // All pages are dirty, under I/O or bounce buffers of direct I/O: have some written.
            self.write_some();
            self.changed.wait_timeout(
                || (!lock(&self.free).is_empty()).then_some(()),
                Duration::from_millis(20),
            );
        }
        unreachable!("the rounds don't end")
    }

    /// Takes clean pages back, least recently used first (a clock, whose hand goes through one inode after another). Skips
    /// what is under I/O.
    pub(crate) fn reclaim(&self, want: usize, discard: bool) -> usize {
        let mut pages = Vec::with_capacity(want);
        // Once to unmark what was used, and then until those come that it spares.
        let rounds = lock(&self.clock).len() * (1 + usize::from(SPARED));
        for _ in 0..rounds {
            // The lock is held for the queue only, not for the inode's work.
            let Some(weak) = lock(&self.clock).pop_front() else {
                break;
            };
            let Some(inode) = weak.upgrade() else {
                continue;
            };
            let there_is_more = inode.reclaim(want - pages.len(), &mut pages);
            match there_is_more {
                true => lock(&self.clock).push_front(weak),
                false => lock(&self.clock).push_back(weak),
            }
            if pages.len() >= want {
                break;
            }
        }
        let n = pages.len();
        self.counters.reclaimed_pages(n as u64);
        // Taken from the end, they ascend: neighbours make one long segment.
        pages.reverse();
        if discard {
            self.cool(&mut pages);
        } else {
            self.free(&mut pages);
        }
        n
    }

    // Dirty pages.

    /// Bytes that a file is written from one end to the other before it counts as a stream, which
    /// the cache can't hold: half of it.
    pub(super) fn stream_bytes(&self) -> u64 {
        self.pages / 2 * PAGE_SIZE as u64
    }

    /// The most pages that a stream keeps for its next bytes.
    pub(super) fn stream_spare(&self) -> usize {
        (self.pages as usize / 16).clamp(1, 256)
    }

    /// The most pages of a writeback request.
    pub(super) fn request_pages(&self) -> usize {
        (self.max_request / PAGE_SIZE).clamp(1, 256)
    }

    pub(super) fn add_dirty(&self, pages: u64) {
        if pages > 0 {
            self.dirty.fetch_add(pages, Ordering::Relaxed);
        }
    }

    pub(super) fn sub_dirty(&self, pages: u64) {
        if pages > 0 {
            let before = self.dirty.fetch_sub(pages, Ordering::Relaxed);
            debug_assert!(before >= pages, "dirty pages are counted once");
        }
    }

    pub(super) fn above_background(&self) -> bool {
        self.dirty.load(Ordering::Relaxed) > self.background_limit
    }

    /// Whether a writer that was throttled may go on: somewhat below the limit, so that it sleeps
    /// once for several requests and not once for each.
    fn has_room(&self) -> bool {
        self.dirty.load(Ordering::Relaxed) <= self.dirty_limit - self.dirty_limit / 8
    }

    /// Dirty pages have been written.
    pub(super) fn cleaned(&self, pages: u64) {
        self.sub_dirty(pages);
        if self.has_room() {
            self.room.notify();
        }
        self.changed.notify();
    }

    pub(super) fn above_limit(&self) -> bool {
        self.dirty.load(Ordering::Relaxed) > self.dirty_limit
    }

    /// Writes everything that is dirty and waits for it; calls `failed` for each inode that can't be written.
    pub(crate) fn write_all(&self, mut failed: impl FnMut(&Inode, Errno)) {
        let mut gone = false;
        for inode in self.inodes() {
            let mut written = inode.write_and_wait(0, u64::MAX);
            for _ in 0..CARRIED {
                if gone || written != Err(Errno::NOTCONN) {
                    break;
                }
                if self.server.has_written() {
                    return;
                }
                // One wait is enough for all of them.
                gone = self.server.reconnect().is_err();
                written = inode.write_and_wait(0, u64::MAX);
            }
            if let Err(error) = written {
                failed(&inode, error);
            }
        }
    }

    /// Starts writeback of one batch of every inode that has dirty pages.
    fn write_some(&self) {
        for inode in self.inodes() {
            inode.write_batch(4);
        }
    }

    /// Makes a writer wait until fewer pages are dirty, or fails it with the error that keeps them dirty.
    pub(super) fn throttle(&self, inode: &Arc<Inode>) -> io::Result<()> {
        if !self.above_limit() {
            return Ok(());
        }
        self.counters.throttles(1);
        let mut forced = 0;
        loop {
            let mut started = inode.write_full();
            if !started && !inode.under_writeback() {
                started = inode.write_batch(4);
            }
            if !started && forced < 2 && inode.failing().is_some() && !inode.under_writeback() {
                // It failed a moment ago: worth another try before the writer is told.
                forced += 1;
                started = inode.retry_batch(4);
            }
            if !self.above_limit() {
                return Ok(());
            }
            if !started && !inode.under_writeback() {
                // This inode's pages can't be written. Those of other inodes may.
                if let Some(code) = inode.failing() {
                    return Err(code);
                }
                self.wake_flusher();
            }
            let room = || self.has_room().then_some(());
            let waited = self.room.wait_timeout(room, Duration::from_millis(20));
            if waited.is_some() {
                return Ok(());
            }
        }
    }

    // The flusher.

    pub(crate) fn wake_flusher(&self) {
        if !self.flusher_awake.swap(true, Ordering::Relaxed) {
            *lock(&self.kick.0) = true;
            self.kick.1.notify_one();
        }
    }

    /// The body of the flusher thread: writes pages that have been dirty for long, and others while too many are
    /// dirty.
    pub(crate) fn flusher(weak: &Weak<Self>) {
        loop {
            let Some(cache) = weak.upgrade() else { return };
            if cache.stop.load(Ordering::Acquire) {
                return;
            }
            cache.flusher_awake.store(false, Ordering::Relaxed);
            for inode in cache.inodes() {
                // Without a server it would only fail.
                if cache.server.session().is_none() {
                    break;
                }
                if inode.wants_writeback(cache.config.writeback_after) || cache.above_background() {
                    while inode.write_batch(8) && cache.above_background() {}
                }
                let node = inode.node;
                drop(inode);
                cache.evict(node);
            }
            let pause = (cache.config.writeback_after / 4)
                .clamp(Duration::from_millis(10), Duration::from_secs(1));
            let kicked = lock(&cache.kick.0);
            let (mut kicked, _) = wait_while(&cache.kick.1, kicked, pause, |k| !*k);
            *kicked = false;
        }
    }

    /// Drops the inodes, which refer to the cache, as the client is gone.
    pub(crate) fn forget_all(&self) {
        let inodes = std::mem::take(&mut *lock(&self.inodes));
        for (node, inode) in inodes {
            inode.closed();
            self.server
                .forget(node, inode.lookups.load(Ordering::Acquire));
        }
    }

    pub(crate) fn stop_flusher(&self) {
        self.stop.store(true, Ordering::Release);
        *lock(&self.kick.0) = true;
        self.kick.1.notify_all();
    }
}
