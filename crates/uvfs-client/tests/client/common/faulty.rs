//! A layer below the page cache that fails and dawdles on purpose.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use uvfs_client::layer::{Op, PageIo, Request};
use uvfs_client::{Client, Config};
use uvfs_server::InProcess;

use super::connect;

/// The faults to inject. All can be changed while requests are under way.
#[derive(Debug, Default)]
pub struct Fault {
    /// Fail every n-th read or write (0: none).
    pub every: AtomicU64,
    /// The errno to fail with.
    pub errno: AtomicI32,
    /// Microseconds to add to each read and write; those under way wait together.
    pub latency_us: AtomicU64,
    /// Cut every n-th write or read short by half (0: none).
    pub short_every: AtomicU64,
    /// Whether a call returns only once its requests have ended.
    pub waits: AtomicBool,
    /// Requests seen.
    pub requests: AtomicU64,
    /// Requests failed.
    pub failed: AtomicU64,
    /// The most requests under way at once.
    pub peak: AtomicU64,
    now: AtomicU64,
}

/// Injects errors, short transfers and latency into reads and writes.
struct Faulty {
    inner: Arc<dyn PageIo>,
    fault: Arc<Fault>,
}

/// A client of a directory that a server in this process serves, and the faults of its reads and writes: none yet.
pub fn faulty(source: &Path, config: Config) -> (InProcess, Client, Arc<Fault>) {
    let (serving, connection) = connect(source);
    let fault = Arc::<Fault>::default();
    let client = Client::layered(connection, config, 0, |_, inner| {
        let fault = fault.clone();
        Arc::new(Faulty { inner, fault })
    });
    (serving, client.unwrap(), fault)
}

fn hits(every: &AtomicU64, n: u64) -> bool {
    let every = every.load(Ordering::Relaxed);
    every != 0 && n.is_multiple_of(every)
}

impl PageIo for Faulty {
    fn submit(&self, batch: &mut Vec<Request>) {
        let latency = Duration::from_micros(self.fault.latency_us.load(Ordering::Relaxed));
        let mut pass = Vec::new();
        for mut request in batch.drain(..) {
            let n = self.fault.requests.fetch_add(1, Ordering::Relaxed) + 1;
            let now = self.fault.now.fetch_add(1, Ordering::Relaxed) + 1;
            self.fault.peak.fetch_max(now, Ordering::Relaxed);
            let fault = self.fault.clone();
            let done = request.done;
            request.done = Box::new(move |result| {
                fault.now.fetch_sub(1, Ordering::Relaxed);
                done(result);
            });
            if hits(&self.fault.every, n) {
                self.fault.failed.fetch_add(1, Ordering::Relaxed);
                let errno = self.fault.errno.load(Ordering::Relaxed);
                (request.done)(Err(Errno::from_raw_os_error(errno)));
                continue;
            }
            if hits(&self.fault.short_every, n) && request.len > 1 && request.op == Op::Write {
                let mut left = request.len / 2;
                request.len = left;
                request.segs.retain_mut(|seg| {
                    seg.len = seg.len.min(left as u32);
                    left -= seg.len as usize;
                    seg.len > 0
                });
            }
            pass.push(request);
        }
        if latency.is_zero() {
            self.inner.submit(&mut pass);
            while self.fault.waits.load(Ordering::Relaxed)
                && self.fault.now.load(Ordering::Relaxed) > 0
            {
                let ended = || self.fault.now.load(Ordering::Relaxed) == 0;
                self.inner.poll(&mut { ended });
            }
            return;
        }
        let inner = self.inner.clone();
        std::thread::spawn(move || {
            std::thread::sleep(latency);
            inner.submit(&mut pass);
        });
    }

    fn poll(&self, done: &mut dyn FnMut() -> bool) {
        self.inner.poll(done);
    }
}
