//! Processes that die between two of their writes, for tests of what survives them.
//!
//! A signal from outside comes at any time, and so seldom in the few microseconds between two writes that belong together. Here the
//! process kills itself there. Builds without debug assertions have none of this.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Signal, getpid, kill_process};

/// The environment variable that says within how many writes an armed process dies.
pub const WITHIN: &str = "UVFS_TEST_DIES";

/// Writes until the process dies; 0 if it does not.
static LEFT: AtomicU64 = AtomicU64::new(0);

/// Has this process die at one of its next writes, if [`WITHIN`] says so.
pub fn arm() {
    if cfg!(debug_assertions)
        && let Ok(within) = std::env::var(WITHIN)
        && let Ok(within) = within.parse::<u64>()
    {
        let random = RandomState::new().hash_one(0);
        LEFT.store(1 + random % within.max(1), Ordering::Relaxed);
    }
}

/// Called before each write that outlives the process.
#[inline]
pub fn may_die() {
    if cfg!(debug_assertions)
        && LEFT.load(Ordering::Relaxed) > 0
        && LEFT.fetch_sub(1, Ordering::Relaxed) == 1
    {
        let _ = kill_process(getpid(), Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}
