//! A backend that fails and dawdles on purpose, around a real one.

use std::collections::BinaryHeap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use uvfs_queue::arena::Arena;

use crate::backend::{
    Attr, Backend, DirEntry, Done, Entry, Figures, Grant, Lease, Limits, LockRequest, NewFile,
    NodeId, OnReattach, OnRecall, Op, RangeLock, Request, SetAttr, StatFs,
};

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
    /// Requests seen.
    pub requests: AtomicU64,
    /// Requests failed.
    pub failed: AtomicU64,
    /// The most requests under way at once.
    pub peak: AtomicU64,
    now: AtomicU64,
}

struct Delayed(Instant, Request);

impl PartialEq for Delayed {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl Eq for Delayed {}
impl PartialOrd for Delayed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Delayed {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.0.cmp(&self.0)
    }
}

#[derive(Default)]
struct Delay {
    heap: Mutex<(BinaryHeap<Delayed>, bool)>,
    more: Condvar,
}

/// Injects errors, short transfers and latency into another backend's reads and writes.
pub struct Faulty<B> {
    inner: Arc<B>,
    /// The faults.
    pub fault: Arc<Fault>,
    delay: Arc<Delay>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl<B: Backend> Faulty<B> {
    /// Wraps `inner`; does nothing until told to.
    pub fn new(inner: B) -> Self {
        let (inner, delay) = (Arc::new(inner), Arc::new(Delay::default()));
        let thread = {
            let (inner, delay) = (inner.clone(), delay.clone());
            std::thread::spawn(move || deliver(&*inner, &delay))
        };
        Self {
            inner,
            fault: Arc::default(),
            delay,
            thread: Some(thread),
        }
    }
}

fn deliver<B: Backend>(inner: &B, delay: &Delay) {
    let mut heap = delay.heap.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let now = Instant::now();
        let mut batch = Vec::new();
        while heap.0.peek().is_some_and(|d| d.0 <= now || heap.1) {
            batch.extend(heap.0.pop().map(|d| d.1));
        }
        if !batch.is_empty() {
            drop(heap);
            inner.submit(&mut batch);
            heap = delay.heap.lock().unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        if heap.1 {
            return;
        }
        let timeout = heap.0.peek().map_or(Duration::from_secs(1), |d| d.0 - now);
        heap = delay
            .more
            .wait_timeout(heap, timeout)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
    }
}

impl<B> Drop for Faulty<B> {
    fn drop(&mut self) {
        self.delay
            .heap
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .1 = true;
        self.delay.more.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn hits(every: &AtomicU64, n: u64) -> bool {
    let every = every.load(Ordering::Relaxed);
    every != 0 && n.is_multiple_of(every)
}

impl<B: Backend> Backend for Faulty<B> {
    fn attach(&self, arena: &Arc<Arena>) -> io::Result<()> {
        self.inner.attach(arena)
    }
    fn reserved_pages(&self) -> u32 {
        self.inner.reserved_pages()
    }
    fn limits(&self) -> Limits {
        self.inner.limits()
    }
    fn is_shared(&self) -> bool {
        self.inner.is_shared()
    }
    fn lease(&self, node: NodeId, lease: Lease) -> io::Result<Grant> {
        self.inner.lease(node, lease)
    }
    fn return_lease(&self, node: NodeId, seq: u64, keep: Lease) {
        self.inner.return_lease(node, seq, keep);
    }
    fn on_recall(&self, call: OnRecall) {
        self.inner.on_recall(call);
    }
    fn publish_from(&self, figures: Figures) {
        self.inner.publish_from(figures);
    }
    fn is_alive(&self) -> bool {
        self.inner.is_alive()
    }
    fn session(&self) -> Option<u64> {
        self.inner.session()
    }
    fn still_open(&self, node: NodeId, handle: u64) -> io::Result<()> {
        self.inner.still_open(node, handle)
    }
    fn names(&self, node: NodeId, handle: u64) -> (u64, u64, u64) {
        self.inner.names(node, handle)
    }
    fn has_written(&self) -> bool {
        self.inner.has_written()
    }
    fn reconnect(&self) -> io::Result<()> {
        self.inner.reconnect()
    }
    fn on_reattach(&self, call: OnReattach) {
        self.inner.on_reattach(call);
    }
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
                (request.done)(Err(io::Error::from_raw_os_error(errno)));
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
            return;
        }
        let due = Instant::now() + latency;
        let mut heap = self
            .delay
            .heap
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let first = heap.0.peek().is_none_or(|next| due < next.0);
        heap.0.extend(pass.into_iter().map(|r| Delayed(due, r)));
        drop(heap);
        // Otherwise the thread wakes in time by itself.
        if first {
            self.delay.more.notify_all();
        }
    }
    fn poll(&self, done: &mut dyn FnMut() -> bool) {
        self.inner.poll(done);
    }
    fn help(&self, done: &mut dyn FnMut() -> bool) {
        self.inner.help(done);
    }
    fn lookup(&self, parent: NodeId, name: &OsStr) -> io::Result<Entry> {
        self.inner.lookup(parent, name)
    }
    fn forget(&self, node: NodeId, lookups: u64) {
        self.inner.forget(node, lookups);
    }
    fn getattr(&self, node: NodeId) -> io::Result<Attr> {
        self.inner.getattr(node)
    }
    fn setattr(&self, node: NodeId, set: &SetAttr) -> io::Result<Attr> {
        self.inner.setattr(node, set)
    }
    fn readlink(&self, node: NodeId) -> io::Result<OsString> {
        self.inner.readlink(node)
    }
    fn symlink(&self, parent: NodeId, name: &OsStr, target: &OsStr) -> io::Result<Entry> {
        self.inner.symlink(parent, name, target)
    }
    fn mknod(&self, parent: NodeId, name: &OsStr, mode: u32, rdev: u32) -> io::Result<Entry> {
        self.inner.mknod(parent, name, mode, rdev)
    }
    fn mkdir(&self, parent: NodeId, name: &OsStr, mode: u32) -> io::Result<Entry> {
        self.inner.mkdir(parent, name, mode)
    }
    fn unlink(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        self.inner.unlink(parent, name)
    }
    fn rmdir(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        self.inner.rmdir(parent, name)
    }
    fn rename(&self, p: NodeId, n: &OsStr, np: NodeId, nn: &OsStr, flags: u32) -> io::Result<()> {
        self.inner.rename(p, n, np, nn, flags)
    }
    fn link(&self, node: NodeId, new_parent: NodeId, new_name: &OsStr) -> io::Result<Entry> {
        self.inner.link(node, new_parent, new_name)
    }
    fn open(&self, node: NodeId, flags: i32) -> io::Result<u64> {
        self.inner.open(node, flags)
    }
    fn create(&self, p: NodeId, n: &OsStr, new: NewFile) -> io::Result<(Entry, u64)> {
        self.inner.create(p, n, new)
    }
    fn release(&self, node: NodeId, handle: u64) {
        self.inner.release(node, handle);
    }
    fn fsync(&self, node: NodeId, handle: u64, data_only: bool) -> io::Result<()> {
        self.inner.fsync(node, handle, data_only)
    }
    fn submit_fsync(&self, node: NodeId, handle: u64, data_only: bool, done: Done) {
        self.inner.submit_fsync(node, handle, data_only, done);
    }
    fn lock(&self, n: NodeId, handle: u64, request: &LockRequest, wait: bool) -> io::Result<()> {
        self.inner.lock(n, handle, request, wait)
    }
    fn test_lock(&self, n: NodeId, h: u64, lock: &LockRequest) -> io::Result<Option<RangeLock>> {
        self.inner.test_lock(n, h, lock)
    }
    fn copy_range(
        &self,
        from: (NodeId, u64),
        from_offset: u64,
        to: (NodeId, u64),
        to_offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        self.inner.copy_range(from, from_offset, to, to_offset, len)
    }
    fn fallocate(&self, n: NodeId, h: u64, mode: i32, offset: u64, len: u64) -> io::Result<()> {
        self.inner.fallocate(n, h, mode, offset, len)
    }
    fn lseek(&self, node: NodeId, handle: u64, offset: u64, whence: i32) -> io::Result<u64> {
        self.inner.lseek(node, handle, offset, whence)
    }
    fn readdir(&self, node: NodeId) -> io::Result<Vec<DirEntry>> {
        self.inner.readdir(node)
    }
    fn statfs(&self, node: NodeId) -> io::Result<StatFs> {
        self.inner.statfs(node)
    }
    fn setxattr(&self, node: NodeId, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        self.inner.setxattr(node, name, value, flags)
    }
    fn getxattr(&self, node: NodeId, name: &OsStr) -> io::Result<Vec<u8>> {
        self.inner.getxattr(node, name)
    }
    fn listxattr(&self, node: NodeId) -> io::Result<Vec<OsString>> {
        self.inner.listxattr(node)
    }
    fn removexattr(&self, node: NodeId, name: &OsStr) -> io::Result<()> {
        self.inner.removexattr(node, name)
    }
}
