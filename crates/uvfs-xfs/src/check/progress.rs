//! How far a check has come.

use std::sync::atomic::{AtomicU64, Ordering};

/// How far a check has come.
#[derive(Debug, Default)]
pub struct CheckProgress {
    done: AtomicU64,
    total: AtomicU64,
}

impl CheckProgress {
    /// Inodes looked at, and how many there are as far as is known.
    pub fn get(&self) -> (u64, u64) {
        (
            self.done.load(Ordering::Relaxed),
            self.total.load(Ordering::Relaxed),
        )
    }

    pub(crate) fn add_done(&self, n: u64) {
        self.done.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn add_total(&self, n: u64) {
        self.total.fetch_add(n, Ordering::Relaxed);
    }
}
