//! The engine of plain system calls.
//!
//! Without worker threads the I/O is done inside `submit`, by the thread that wants it: nothing
//! is faster for a device whose data is in memory. With them `submit` only queues.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::io::Errno;

use super::{Engine, EngineConfig, EngineStats, Fault, Faults, Io, Op};
use crate::device::{Device, Geometry};
use uvfs_sys::{checked, lock, wait};

#[derive(Default)]
struct SyncState {
    queue: VecDeque<Io>,
    finished: VecDeque<Io>,
    /// Taken and not yet in `finished`.
    running: usize,
    stats: EngineStats,
    stop: bool,
}

struct SyncShared {
    device: Arc<Device>,
    faults: Option<Arc<Faults>>,
    state: Mutex<SyncState>,
    /// Work was queued, or it is time to stop.
    work: Condvar,
    /// An I/O was finished.
    done: Condvar,
}

pub(super) struct Sync {
    shared: Arc<SyncShared>,
    depth: usize,
    workers: Vec<JoinHandle<()>>,
}

impl Sync {
    pub(super) fn start(
        device: Arc<Device>,
        depth: usize,
        config: EngineConfig,
    ) -> io::Result<Arc<dyn Engine>> {
        let shared = Arc::new(SyncShared {
            device,
            faults: config.faults,
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let mut engine = Sync {
            shared,
            depth,
            workers: Vec::new(),
        };
        for n in 0..config.threads.min(depth) {
            let shared = engine.shared.clone();
            let worker = thread::Builder::new()
                .name(format!("uvfs-io-{n}"))
                .spawn(move || shared.work())?;
            engine.workers.push(worker);
        }
        Ok(Arc::new(engine))
    }
}

impl Drop for Sync {
    fn drop(&mut self) {
        self.shared.state().stop = true;
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl SyncShared {
    fn state(&self) -> MutexGuard<'_, SyncState> {
        lock(&self.state)
    }

    fn work(&self) {
        let mut state = self.state();
        loop {
            if let Some(io) = state.queue.pop_front() {
                drop(state);
                self.run(io);
                state = self.state();
            } else if state.stop {
                return;
            } else {
                state = wait(&self.work, state);
            }
        }
    }

    /// Does all of an I/O.
    fn run(&self, mut io: Io) {
        let mut stats = EngineStats::default();
        match io.refuse(&self.device.geometry()) {
            Some(error) => io.fail(error),
            None => {
                io.begin();
                let mut iovs = Vec::new();
                for extent in 0..io.results.len() {
                    self.run_extent(&mut io, extent, &mut iovs, &mut stats);
                }
            }
        }
        for result in &io.results {
            stats.count(io.op, result);
        }
        let mut state = self.state();
        state.stats.add(&stats);
        state.running -= 1;
        state.finished.push_back(io);
        self.done.notify_all();
    }

    fn run_extent(
        &self,
        io: &mut Io,
        extent: usize,
        iovs: &mut Vec<libc::iovec>,
        stats: &mut EngineStats,
    ) {
        let mut tries = 0;
        loop {
            let place = io.extents.get(extent).copied();
            let done = io.results[extent].bytes;
            let (offset, len) = place.map_or((0, 0), |e| (e.offset + done as u64, e.len - done));
            let fault = self
                .faults
                .as_ref()
                .and_then(|f| f.next(io.op, offset, len));
            let limit = match fault {
                Some(Fault::Short(bytes)) => bytes,
                _ => usize::MAX,
            };
            io.segments(extent, limit, iovs);
            let asked: usize = iovs.iter().map(|iov| iov.iov_len).sum();
            if let Some(Fault::Delay(delay)) = fault {
                thread::sleep(delay);
            }
            let result = match fault {
                Some(Fault::Error(error)) => Err(error),
                Some(Fault::Again) => Err(Errno::AGAIN),
                _ => {
                    stats.submits += 1;
                    self.transfer(io.op, offset, iovs)
                }
            };
            match result {
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) if tries < super::core::MAX_AGAIN => {
                    tries += 1;
                    stats.again += 1;
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
                _ => {}
            }
            stats.short += u64::from(result.is_ok_and(|n| n > 0 && n < asked.max(len)));
            if io.advance(extent, result) {
                return;
            }
        }
    }

    fn transfer(&self, op: Op, offset: u64, iovs: &[libc::iovec]) -> Result<usize, Errno> {
        let fd = self.device.as_fd().as_raw_fd();
        let count = iovs.len() as libc::c_int;
        // SAFETY: the vectors describe blocks that the I/O owns until this call has returned,
        // and their number is at most IOV_MAX.
        checked(unsafe {
            match op {
                Op::Read => libc::preadv64(fd, iovs.as_ptr(), count, offset as i64),
                Op::Write => libc::pwritev64(fd, iovs.as_ptr(), count, offset as i64),
                Op::Flush => libc::fdatasync(fd) as isize,
            }
        })
    }
}

impl Engine for Sync {
    fn name(&self) -> &'static str {
        "sync"
    }

    fn geometry(&self) -> Geometry {
        self.shared.device.geometry()
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn submit(&self, ios: &mut Vec<Io>) {
        let mut state = self.shared.state();
        let room = (self.depth * 4).saturating_sub(state.running + state.finished.len());
        let take = room.min(ios.len());
        state.running += take;
        if self.workers.is_empty() {
            drop(state);
            for io in ios.drain(..take) {
                self.shared.run(io);
            }
        } else {
            state.queue.extend(ios.drain(..take));
            drop(state);
            self.shared.work.notify_all();
        }
    }

    fn reap(&self, waits: bool, out: &mut Vec<Io>) -> usize {
        let mut state = self.shared.state();
        while waits && state.finished.is_empty() && state.running > 0 {
            state = wait(&self.shared.done, state);
        }
        let count = state.finished.len();
        out.extend(state.finished.drain(..));
        count
    }

    fn in_flight(&self) -> usize {
        let state = self.shared.state();
        state.running + state.finished.len()
    }

    fn stats(&self) -> EngineStats {
        self.shared.state().stats
    }
}
