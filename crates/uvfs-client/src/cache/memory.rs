//! Memory behind the arena's pages: they get it when they are first used, as far as there is room,
//! and lose it under memory pressure.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use uvfs_mem::{Monitor, MonitorConfig, Room, Shrinker, Shrinkers};
use uvfs_queue::arena::PAGE_SIZE;

use super::Cache;
use uvfs_sys::lock;

/// Pages that get memory after one look at how much there is.
const STEP: usize = 1024;
/// Pages that the cache may have whatever there is: what a few requests need to go on.
const MIN: usize = 256;
/// After a look that found no room, the next one comes so much later.
const PATIENCE: Duration = Duration::from_millis(10);
/// The same after memory had to be given back: what has it by then goes round meanwhile. To get memory and to lose it again costs
/// much more than a page that was used long ago.
const REST: Duration = Duration::from_secs(1);

/// Pages without memory, and how many of them may get some.
pub(super) struct Cold {
    pages: Vec<u32>,
    all: usize,
    /// How many may be taken without another look.
    credit: usize,
    room: Option<Room>,
    /// No look before that.
    rests: Option<Instant>,
}

impl Cold {
    pub(super) fn new(pages: u32, yields: bool) -> Self {
        Self {
            // Handed out from the end: ascending pages, which make few long segments.
            pages: (0..pages).rev().collect(),
            all: pages as usize,
            credit: 0,
            room: yields.then(|| Room::new(&MonitorConfig::default())),
            rests: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Takes up to `want` pages.
    pub(super) fn take(&mut self, want: usize, into: &mut Vec<u32>) -> usize {
        let n = want.min(self.pages.len());
        let n = n.min(self.allowed(n));
        self.credit = self.credit.saturating_sub(n);
        into.extend(self.pages.drain(self.pages.len() - n..));
        n
    }

    /// Takes up to `want` pages, whatever room there is.
    pub(super) fn take_anyway(&mut self, want: usize, into: &mut Vec<u32>) -> usize {
        let n = want.min(self.pages.len());
        into.extend(self.pages.drain(self.pages.len() - n..));
        n
    }

    /// How many of `want` pages may be taken.
    fn allowed(&mut self, want: usize) -> usize {
        let Some(room) = &self.room else {
            return want;
        };
        if want > self.credit && self.rests.is_none_or(|until| until <= Instant::now()) {
            let step = STEP.max(want);
            if room.bytes() / PAGE_SIZE as u64 > 2 * step as u64 {
                self.credit = step;
                self.rests = None;
            } else {
                self.rests = Some(Instant::now() + PATIENCE);
            }
        }
        let warm = self.all - self.pages.len();
        self.credit.max(MIN.saturating_sub(warm))
    }

    /// Takes pages back whose memory is gone.
    fn put(&mut self, pages: &mut Vec<u32>) {
        self.pages.append(pages);
        self.credit = 0;
        self.rests = Some(Instant::now() + REST);
    }
}

impl Cache {
    /// Gives the memory of unused pages back to the kernel.
    pub(super) fn cool(&self, pages: &mut Vec<u32>) {
        // In the order in which they are handed out, with the neighbours in one call.
        pages.sort_unstable_by(|a, b| b.cmp(a));
        for run in pages.chunk_by(|a, b| *a == b + 1) {
            let first = *run.last().expect("a run is not empty");
            self.arena.discard(first, run.len() as u32);
        }
        lock(&self.cold).put(pages);
    }
}

impl Shrinker for Cache {
    fn name(&self) -> &str {
        "pages of files"
    }

    fn count(&self) -> usize {
        let stats = self.stats();
        let clean = stats.cached_pages.saturating_sub(stats.dirty_pages) as usize;
        (clean + lock(&self.free).len()) * PAGE_SIZE
    }

    fn scan(&self, bytes: usize) -> usize {
        let want = bytes.div_ceil(PAGE_SIZE);
        let mut unused = {
            let mut free = lock(&self.free);
            let at = free.len().saturating_sub(want);
            free.split_off(at)
        };
        let n = unused.len();
        self.cool(&mut unused);
        let more = if n < want {
            self.reclaim(want - n, true)
        } else {
            0
        };
        (n + more) * PAGE_SIZE
    }
}

/// The thread that asks all caches of a process for memory when it is short.
struct Watch {
    /// Threads are not inherited by a child.
    process: u32,
    shrinkers: Arc<Shrinkers>,
    monitor: Option<Monitor>,
}

static WATCH: Mutex<Option<Watch>> = Mutex::new(None);

/// Has a cache asked for memory when it is short: by one thread for all caches of the process.
pub(super) fn watch(cache: &Arc<Cache>) {
    let mut watch = lock(&WATCH);
    let process = std::process::id();
    if watch.as_ref().is_none_or(|watch| watch.process != process) {
        let shrinkers = Arc::new(Shrinkers::new());
        let monitor = Monitor::start(MonitorConfig::default(), shrinkers.clone())
            .inspect_err(|error| tracing::warn!(%error, "memory pressure is not watched"))
            .ok();
        let new = Watch {
            process,
            shrinkers,
            monitor,
        };
        // The parent's stays as it is: its thread is not here, and its descriptors may be closed.
        std::mem::forget(watch.replace(new));
    }
    if let Some(watch) = &*watch {
        let shrinker: Arc<dyn Shrinker> = cache.clone();
        watch.shrinkers.register(&shrinker);
    }
}

/// The descriptors that the thread has open for as long as the process lives.
pub(crate) fn descriptors() -> Vec<RawFd> {
    let watch = lock(&WATCH);
    let monitor = watch.as_ref().and_then(|watch| watch.monitor.as_ref());
    monitor.map_or_else(Vec::new, |monitor| monitor.descriptors().to_vec())
}

/// Ends the thread. The next cache begins another.
pub(crate) fn unwatch() {
    // Without the lock: the thread may ask a cache, and this waits for it.
    let watch = lock(&WATCH).take_if(|watch| watch.process == std::process::id());
    drop(watch);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client's cache takes only memory that the machine has, and always gets some.
    #[test]
    fn pages_are_handed_out_in_their_order_and_some_always() {
        let mut cold = Cold::new(2000, false);
        let mut got = Vec::new();
        assert_eq!(cold.take(3, &mut got), 3);
        got.sort_unstable();
        assert_eq!(got, [0, 1, 2]);
        assert_eq!(cold.take(5000, &mut got), 1997);

        let dir = tempfile::tempdir().unwrap();
        let meminfo = dir.path().join("meminfo");
        let set = |available: u64| {
            let text = format!("MemTotal: 1000000 kB\nMemAvailable: {available} kB\n");
            std::fs::write(&meminfo, text).unwrap();
        };
        let mut cold = Cold::new(20_000, false);
        cold.room = Some(Room::new(&MonitorConfig {
            meminfo: meminfo.clone(),
            cgroup: None,
            ..MonitorConfig::default()
        }));
        set(50_000);
        got.clear();
        assert_eq!(cold.take(1000, &mut got), MIN);
        assert_eq!(cold.take(1000, &mut got), 0);
        set(900_000);
        std::thread::sleep(2 * PATIENCE);
        assert_eq!(cold.take(1000, &mut got), 1000);
        // An allowance stays until it is used up.
        set(50_000);
        assert_eq!(cold.take(1000, &mut got), STEP - 1000);
        assert_eq!(cold.take(1000, &mut got), 0);
        assert_eq!(cold.len(), 20_000 - got.len());
    }
}
