//! The common part of the asynchronous engines: transfers to be started, in flight and done.
//!
//! Each extent of an I/O is one transfer. A transfer that ends short is started again for what
//! is left, one that the kernel has no resources for waits until another has ended.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slab::Slab;

use super::{Engine, EngineStats, Fault, Faults, Io, Op};
use crate::device::Geometry;
use uvfs_sys::lock;

/// A transfer that the kernel refuses with `EAGAIN` although nothing else is in flight is tried
/// this often, once per millisecond.
pub(super) const MAX_AGAIN: usize = 5000;

/// One transfer for a backend to start.
pub(super) struct Transfer {
    /// Comes back with its event.
    pub key: u64,
    pub op: Op,
    pub offset: u64,
    /// Where its pieces of memory are in the batch's list.
    pub first: usize,
    pub count: usize,
}

/// An asynchronous interface of the kernel.
pub(super) trait Backend: Send + Sync {
    fn name(&self) -> &'static str;

    /// Starts transfers in order; says how many. Called under the engine's lock. The memory
    /// that `iovs` describes stays until the event of the transfer; `iovs` itself does not.
    /// An error is about the first transfer.
    fn start(&self, batch: &[Transfer], iovs: &[libc::iovec]) -> Result<usize, Errno>;

    /// Appends events (key, result as of the system call); with `wait` at least one. Not called
    /// by two threads at once; may run at the same time as `start`.
    fn collect(&self, wait: bool, events: &mut Vec<(u64, Result<usize, Errno>)>) -> io::Result<()>;
}

struct Running {
    io: Io,
    /// Extents not yet finished.
    left: usize,
    /// Injected latency: not reported before.
    not_before: Option<Instant>,
}

#[derive(Default)]
struct State {
    running: Slab<Running>,
    /// Transfers to be started.
    pending: VecDeque<u64>,
    /// Transfers that the kernel has.
    started: usize,
    finished: VecDeque<Io>,
    delayed: Vec<(Instant, Io)>,
    /// `EAGAIN` in a row without any progress.
    starved: usize,
    stats: EngineStats,
    batch: Vec<Transfer>,
    iovs: Vec<libc::iovec>,
    scratch: Vec<libc::iovec>,
}

// SAFETY: the raw pointers in `iovs` and `scratch` are only used while a batch is started, and
// point into blocks that the I/Os in `running` own.
unsafe impl Send for State {}

/// An engine over a [`Backend`].
pub(super) struct Core<B: Backend> {
    backend: B,
    geometry: Geometry,
    depth: usize,
    faults: Option<Arc<Faults>>,
    state: Mutex<State>,
    /// Held by the thread that collects events.
    events: Mutex<Vec<(u64, Result<usize, Errno>)>>,
}

fn key(io: usize, extent: usize) -> u64 {
    (io as u64) << 32 | extent as u64
}

fn parts(key: u64) -> (usize, usize) {
    ((key >> 32) as usize, (key & u64::from(u32::MAX)) as usize)
}

impl State {
    fn in_flight(&self) -> usize {
        self.running.len() + self.finished.len() + self.delayed.len()
    }

    fn take_finished(&mut self, out: &mut Vec<Io>) -> usize {
        if !self.delayed.is_empty() {
            let now = Instant::now();
            let mut index = 0;
            while index < self.delayed.len() {
                if self.delayed[index].0 <= now {
                    self.finished.push_back(self.delayed.swap_remove(index).1);
                } else {
                    index += 1;
                }
            }
        }
        let count = self.finished.len();
        out.extend(self.finished.drain(..));
        count
    }

    /// A transfer has ended.
    fn complete(&mut self, key: u64, result: Result<usize, Errno>) {
        let (index, extent) = parts(key);
        let running = &mut self.running[index];
        let left =
            running.io.extents.get(extent).map_or(0, |e| e.len) - running.io.results[extent].bytes;
        match result {
            // io_uring cancels what a thread has begun and not finished when that thread ends.
            Err(Errno::AGAIN | Errno::INTR | Errno::CANCELED) => {
                self.stats.again += 1;
                self.pending.push_back(key);
                return;
            }
            Ok(n) if n > 0 && n < left => self.stats.short += 1,
            _ => {}
        }
        if !running.io.advance(extent, result) {
            self.pending.push_front(key);
            return;
        }
        self.stats.count(running.io.op, &running.io.results[extent]);
        running.left -= 1;
        if running.left == 0 {
            let Running { io, not_before, .. } = self.running.remove(index);
            match not_before {
                Some(when) => self.delayed.push((when, io)),
                None => self.finished.push_back(io),
            }
        }
    }
}

impl<B: Backend> Core<B> {
    pub(super) fn new(
        backend: B,
        geometry: Geometry,
        depth: usize,
        faults: Option<Arc<Faults>>,
    ) -> Self {
        Core {
            backend,
            geometry,
            depth,
            faults,
            state: Mutex::default(),
            events: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Starts pending transfers as far as the depth and the kernel allow.
    fn start(&self, state: &mut State) {
        while state.started < self.depth && !state.pending.is_empty() {
            let room = self.depth - state.started;
            let mut batch = std::mem::take(&mut state.batch);
            let mut iovs = std::mem::take(&mut state.iovs);
            let mut scratch = std::mem::take(&mut state.scratch);
            batch.clear();
            iovs.clear();
            while batch.len() < room {
                let Some(key) = state.pending.pop_front() else {
                    break;
                };
                let (index, extent) = parts(key);
                let running = &mut state.running[index];
                let (offset, len) = running.io.extents.get(extent).map_or((0, 0), |e| {
                    let done = running.io.results[extent].bytes;
                    (e.offset + done as u64, e.len - done)
                });
                let op = running.io.op;
                let mut limit = usize::MAX;
                match self.faults.as_ref().and_then(|f| f.next(op, offset, len)) {
                    Some(Fault::Error(error)) => {
                        state.complete(key, Err(error));
                        continue;
                    }
                    Some(Fault::Again) => {
                        state.complete(key, Err(Errno::AGAIN));
                        continue;
                    }
                    Some(Fault::Short(bytes)) => limit = bytes,
                    Some(Fault::Delay(delay)) => {
                        running.not_before = Some(Instant::now() + delay);
                    }
                    None => {}
                }
                running.io.segments(extent, limit, &mut scratch);
                batch.push(Transfer {
                    key,
                    op,
                    offset,
                    first: iovs.len(),
                    count: scratch.len(),
                });
                iovs.append(&mut scratch);
            }
            let mut begun = 0;
            let mut stuck = false;
            while begun < batch.len() {
                state.stats.submits += 1;
                match self.backend.start(&batch[begun..], &iovs) {
                    Ok(n) => {
                        debug_assert!(n > 0);
                        state.started += n;
                        state.starved = 0;
                        begun += n;
                    }
                    Err(Errno::AGAIN | Errno::INTR)
                        if state.started > 0 || state.starved < MAX_AGAIN =>
                    {
                        state.starved += usize::from(state.started == 0);
                        state.stats.again += 1;
                        stuck = true;
                        break;
                    }
                    Err(error) => {
                        // Not EAGAIN for `complete`: it has been tried long enough.
                        let error = if error == Errno::AGAIN {
                            Errno::NOMEM
                        } else {
                            error
                        };
                        state.complete(batch[begun].key, Err(error));
                        begun += 1;
                    }
                }
            }
            for transfer in batch[begun..].iter().rev() {
                state.pending.push_front(transfer.key);
            }
            state.batch = batch;
            state.iovs = iovs;
            state.scratch = scratch;
            if stuck {
                return;
            }
        }
    }

    /// Takes in events; the memory of a transfer is only touched again after its event.
    fn collect(&self, wait: bool, events: &mut Vec<(u64, Result<usize, Errno>)>) {
        events.clear();
        if let Err(error) = self.backend.collect(wait, events) {
            // Only misuse makes the kernel refuse to hand out events, and without them memory
            // can never be known to be free again.
            panic!("{}: collecting events: {error}", self.backend.name());
        }
        let mut state = self.state();
        for (key, result) in events.drain(..) {
            state.started -= 1;
            state.complete(key, result);
        }
        self.start(&mut state);
    }
}

impl<B: Backend> Engine for Core<B> {
    fn name(&self) -> &'static str {
        self.backend.name()
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn submit(&self, ios: &mut Vec<Io>) {
        let mut state = self.state();
        let room = (self.depth * 4).saturating_sub(state.in_flight());
        let take = room.min(ios.len());
        for mut io in ios.drain(..take) {
            if let Some(error) = io.refuse(&self.geometry) {
                io.fail(error);
                for result in &io.results {
                    state.stats.count(io.op, result);
                }
                state.finished.push_back(io);
                continue;
            }
            io.begin();
            let left = io.results.len();
            let index = state.running.insert(Running {
                io,
                left,
                not_before: None,
            });
            assert!(index < u32::MAX as usize && left < u32::MAX as usize);
            state
                .pending
                .extend((0..left).map(|extent| key(index, extent)));
        }
        self.start(&mut state);
    }

    fn reap(&self, wait: bool, out: &mut Vec<Io>) -> usize {
        let mut events = if wait {
            lock(&self.events)
        } else {
            match self.events.try_lock() {
                Ok(events) => events,
                Err(_) => return self.state().take_finished(out),
            }
        };
        loop {
            let (started, delayed) = {
                let mut state = self.state();
                let count = state.take_finished(out);
                if count > 0 || state.in_flight() == 0 {
                    return count;
                }
                self.start(&mut state);
                (state.started > 0, !state.delayed.is_empty())
            };
            if !wait {
                if started {
                    self.collect(false, &mut events);
                }
                return self.state().take_finished(out);
            }
            // Events, the end of an injected delay, or resources: only the first can be
            // waited for, and the others are rare.
            if started {
                self.collect(!delayed, &mut events);
            }
            if !started || delayed {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.state().in_flight()
    }

    fn stats(&self) -> EngineStats {
        self.state().stats
    }
}

impl<B: Backend> Drop for Core<B> {
    fn drop(&mut self) {
        // The kernel may still write to the memory of what is in flight.
        self.state().pending.clear();
        while self.state().started > 0 {
            let mut events = Vec::new();
            if self.backend.collect(true, &mut events).is_err() {
                std::mem::forget(std::mem::take(&mut *self.state()));
                return;
            }
            self.state().started -= events.len();
        }
    }
}
