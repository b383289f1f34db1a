//! How a target is made, and its counters.

use std::time::Duration;
use uvfs_io::engine::EngineConfig;

/// How a target is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// The most memory that the buffers and what keeps track of them may take, in bytes.
    pub limit: usize,
    /// How long an allocation waits for a buffer to be released when all memory is in use.
    pub memory_wait: Duration,
    /// The engine's set-up.
    pub engine: EngineConfig,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            limit: 64 << 20,
            memory_wait: Duration::from_secs(1),
            engine: EngineConfig::default(),
        }
    }
}

/// How readahead turns buffers into I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefetch {
    /// Each buffer by itself: best on a device that does very many small reads a second.
    Exact,
    /// Buffers near each other together, with what is between them: best where the number of
    /// I/Os is what limits the device.
    Span {
        /// The largest gap between two buffers, in sectors.
        max_gap: u32,
        /// The longest I/O, in sectors.
        max_len: u32,
    },
}

/// Counters of a target since it was opened. Bytes are bytes of content.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Lookups that found the buffer.
    pub hits: u64,
    /// Lookups that did not.
    pub misses: u64,
    /// Buffers read (not by readahead).
    pub reads: u64,
    /// Bytes of all buffers read, readahead included.
    pub read_bytes: u64,
    /// Buffers that readahead began to read.
    pub readahead: u64,
    /// Bytes read between the buffers of a span and thrown away.
    pub gap_bytes: u64,
    /// Reads past the index.
    pub uncached: u64,
    /// Buffers that reclaim (or a shrinker) took.
    pub evictions: u64,
    /// Times that a verifier found something wrong.
    pub verify_errors: u64,
    /// Buffers whose read failed.
    pub read_errors: u64,
    /// Buffers written.
    pub writes: u64,
    /// I/Os that wrote them: fewer, where neighbours were merged.
    pub write_ios: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Buffers whose write failed.
    pub write_errors: u64,
    /// Times that an allocation found the memory limit reached and nothing to evict.
    pub memory_waits: u64,
}
