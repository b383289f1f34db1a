//! How other threads reach a client: recalls of its leases, its end, and the lookups that it has.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;
use std::time::{Duration, Instant};

use foldhash::HashMap;
use uvfs_proto::abi;
use uvfs_proto::ext::{LEASE_NONE, LEASE_READ, LEASE_WRITE, NOTIFY_RECALL, NotifyRecallOut};
use uvfs_proto::reply;
use uvfs_queue::pair::ServerQueue;
use zerocopy::IntoBytes;

use super::{Holder, LeaseMode, Recall};
use uvfs_sys::lock;

/// A client that writes back all the while may take so many deadlines for a recall.
const MOST_DEADLINES: u32 = 12;
/// When a queue of the kernel's is full of requests that wait, a client that does nothing for the recall
/// has this part of the deadline, and a guest has it in all.
const CROWDED: u32 = 10;

/// A mode as the wire has it.
fn wire(mode: Option<LeaseMode>) -> u32 {
    match mode {
        None => LEASE_NONE,
        Some(LeaseMode::Read) => LEASE_READ,
        Some(LeaseMode::Write) => LEASE_WRITE,
    }
}

/// How a client is reached from other threads.
pub(crate) struct Link {
    pub(crate) id: Holder,
    queue: Arc<ServerQueue>,
    /// Wakes the task that takes its requests.
    waker: Mutex<Option<Waker>>,
    /// Its session ends: what waits on its behalf gives up.
    over: AtomicBool,
    /// It did not answer a recall.
    cut: AtomicBool,
    deadline: Duration,
    /// Another user's.
    guest: bool,
    /// Of each node whose lease is recalled, when its last writeback ended.
    progress: Mutex<HashMap<u64, Instant>>,
    /// Lookups that it has not undone.
    lookups: Mutex<HashMap<u64, u64>>,
}

impl Link {
    pub(crate) fn new(
        id: Holder,
        queue: Arc<ServerQueue>,
        deadline: Duration,
        guest: bool,
    ) -> Self {
        Self {
            id,
            queue,
            waker: Mutex::default(),
            over: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            deadline,
            guest,
            progress: Mutex::default(),
            lookups: Mutex::default(),
        }
    }

    /// The lookups of nodes that the client has not undone.
    pub(crate) fn lookups(&self) -> MutexGuard<'_, HashMap<u64, u64>> {
        lock(&self.lookups)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Its session has ended.
    pub(crate) fn ended(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// Whether it is to be cut off for an unanswered recall; true once.
    pub(crate) fn cut_off(&self) -> bool {
        !self.cut.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn was_cut_off(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }

    /// Ends its session.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.wake();
    }

    /// Has the task woken that takes the client's requests, from now on. It looks once more whether the
    /// session is over after this.
    pub(crate) fn wakes(&self, waker: &Waker) {
        *lock(&self.waker) = Some(waker.clone());
    }

    /// Wakes the task that takes the client's requests. Not through the eventfd that the client rings: it
    /// shares that one's flags, and could make a write to it wait for ever.
    pub(crate) fn wake(&self) {
        let waker = lock(&self.waker).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn recall(&self, node: u64, recall: Recall) -> bool {
        lock(&self.progress)
            .entry(node)
            .or_insert_with(Instant::now);
        let body = NotifyRecallOut {
            node,
            seq: recall.seq,
            keep: wire(recall.keep),
            padding: 0,
        };
        let header = reply::header(0, NOTIFY_RECALL, size_of_val(&body));
        let mut bytes = [0; size_of::<abi::OutHeader>() + size_of::<NotifyRecallOut>()];
        let (head, tail) = bytes.split_at_mut(size_of::<abi::OutHeader>());
        head.copy_from_slice(header.as_bytes());
        tail.copy_from_slice(body.as_bytes());
        self.queue.notify(&bytes)
    }

    /// A writeback of a node under the client's write lease has ended.
    pub(crate) fn progressed(&self, node: u64) {
        if let Some(last) = lock(&self.progress).get_mut(&node) {
            *last = Instant::now();
        }
    }

    /// The client gave back what it had of a node.
    pub(crate) fn gave_back(&self, node: u64) {
        lock(&self.progress).remove(&node);
    }

    /// Whether the client had long enough to give back its lease of a node, for which a request has waited
    /// since `since`. Writeback of that node gives it more time. `crowded`: the wait holds up others.
    pub(crate) fn is_late(&self, node: u64, since: Instant, crowded: bool) -> bool {
        let waited = since.elapsed();
        let last = lock(&self.progress).get(&node).copied();
        let idle = last.map_or(waited, |last| last.elapsed());
        let (idle_for, in_all) = match (crowded, self.guest) {
            (false, _) => (self.deadline, self.deadline * MOST_DEADLINES),
            (true, false) => (self.deadline / CROWDED, self.deadline * MOST_DEADLINES),
            (true, true) => (self.deadline / CROWDED, self.deadline / CROWDED),
        };
        waited >= in_all || waited.min(idle) >= idle_for
    }
}
