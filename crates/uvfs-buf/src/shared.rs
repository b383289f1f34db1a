//! The state of a target: index, memory, and I/O in flight.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::time::Duration;

use rustix::io::Errno;
use slab::Slab;
use smallvec::SmallVec;
use uvfs_io::device::Geometry;
use uvfs_io::engine::{Engine, Io};
use uvfs_mem::{Arena, Lru};

use crate::index::Index;
use crate::inner::Inner;

macro_rules! counters {
    ($($(#[$meta:meta])* $name:ident,)*) => {
        /// Counters of a target since it was opened. Bytes are bytes of content.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Stats { $($(#[$meta])* pub $name: u64,)* }

        #[derive(Default)]
        pub(crate) struct Counters { $(pub $name: AtomicU64,)* }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Lookups that found the buffer.
    hits,
    /// Lookups that did not.
    misses,
    /// Buffers read (not by readahead).
    reads,
    /// Buffers that readahead began to read.
    readahead,
    /// Bytes read between the buffers of a span and thrown away.
    gap_bytes,
    /// Reads past the index.
    uncached,
    /// Buffers that reclaim (or a shrinker) took.
    evictions,
    /// Times that a verifier found something wrong.
    verify_errors,
    /// Buffers whose read failed.
    read_errors,
    /// Buffers written.
    writes,
    /// I/Os that wrote them: fewer, where neighbours were merged.
    write_ios,
    /// Times that an allocation found the memory limit reached and nothing to evict.
    memory_waits,
}

pub(crate) fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Whose memory an I/O has: one entry per block. These hold their buffers by count alone,
/// because a handle here would keep the target alive for ever.
pub(crate) enum InFlight {
    /// `None`: a gap.
    Read(SmallVec<[Option<Arc<Inner>>; 1]>),
    Write(SmallVec<[Arc<Inner>; 1]>),
    Flush(Arc<Mutex<Option<Option<Errno>>>>),
}

#[derive(Default)]
pub(crate) struct Progress {
    pub(crate) round: u64,
    pub(crate) sleepers: usize,
}

/// The state that the target, its buffers and its queues share.
pub(crate) struct Shared {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) geometry: Geometry,
    pub(crate) arena: Arena,
    pub(crate) memory_wait: Duration,
    pub(crate) index: RwLock<Index>,
    pub(crate) lru: Mutex<Lru<Arc<Inner>>>,
    pub(crate) in_flight: Mutex<Slab<InFlight>>,
    /// Evicted buffers without content, so that a busy cache allocates nothing.
    pub(crate) spare: Mutex<Vec<Arc<Inner>>>,
    /// Held by the thread that collects completions for all.
    pub(crate) leader: Mutex<Vec<Io>>,
    /// Counts rounds of completions and submissions; changes with `changed`.
    pub(crate) progress: Mutex<Progress>,
    pub(crate) changed: Condvar,
    /// Threads that wait for a buffer to be released.
    pub(crate) starving: AtomicUsize,
    /// Bytes of readahead in flight.
    pub(crate) ahead: AtomicUsize,
    pub(crate) counters: Counters,
}
