//! How a target is made, and how it reads ahead.

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
