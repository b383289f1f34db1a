//! Counters that several threads bump without sharing a cache line.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const SHARDS: usize = 8;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The statistics of a client's cache.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            /// Pages that hold data now.
            pub cached_pages: u64,
            /// Pages that are dirty or under writeback now.
            pub dirty_pages: u64,
            /// The most pages that held data at once.
            pub peak_pages: u64,
        }

        #[derive(Debug, Default)]
        #[repr(align(128))]
        struct Shard {
            $($name: AtomicU64,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            shards: [Shard; SHARDS],
        }

        impl Counters {
            $(
                #[inline]
                pub(crate) fn $name(&self, n: u64) {
                    self.shards[shard()].$name.fetch_add(n, Ordering::Relaxed);
                }
            )*

            pub(crate) fn sum(&self) -> Stats {
                let mut stats = Stats::default();
                for shard in &self.shards {
                    $(stats.$name += shard.$name.load(Ordering::Relaxed);)*
                }
                stats
            }
        }
    };
}

counters! {
    /// Reads that were served from the cache alone.
    hits,
    /// Reads that had to ask the server.
    misses,
    /// Writes.
    writes,
    /// Reads and writes that began past the cache.
    direct_calls,
    /// Nanoseconds that threads waited for data, or for room.
    waited_ns,
    /// Bytes copied from callers into pages.
    bytes_in,
    /// Bytes copied from pages to callers.
    bytes_out,
    /// Bytes moved from page to page (only when a read completes a partly written page).
    bytes_merged,
    /// Read requests sent for the cache.
    read_requests,
    /// Pages asked for ahead of need.
    readahead_pages,
    /// Writeback requests sent.
    writeback_requests,
    /// Pages in those.
    writeback_pages,
    /// Lock acquisitions to start and to end writeback.
    writeback_locks,
    /// Times a writer had to wait for the dirty limit.
    throttles,
    /// Clean pages taken back to make room.
    reclaimed_pages,
    /// Requests of direct reads and writes.
    direct_requests,
}

impl Stats {
    /// Reads and writes that callers made.
    pub fn calls(&self) -> u64 {
        self.hits + self.misses + self.writes + self.direct_calls
    }
}

#[inline]
fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static MINE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
    }
    MINE.with(|mine| *mine)
}
