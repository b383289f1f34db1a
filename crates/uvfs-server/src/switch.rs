//! The stage that a mount is in (`stage/mod.rs`), and how it changes while requests are under way. A model checks it over
//! every interleaving (`uvfs-queue/tests/loom.rs`).
//!
//! A request counts itself, and then looks at the stage; the thread that changes the stage then looks at the counts. All of
//! this is in one order for all threads (SeqCst). So either the request sees the new stage, or the count shows it.

#[cfg(all(loom, test))]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(all(loom, test)))]
use std::sync::atomic::{AtomicU64, Ordering};

/// Loom takes SeqCst for AcqRel, but for fences. In the model this stands for the order of all that is SeqCst.
#[cfg(all(loom, test))]
fn in_one_order() {
    fence(Ordering::SeqCst);
}

#[cfg(not(all(loom, test)))]
fn in_one_order() {}

/// The file system reports changes of the host.
pub(crate) const WATCHED: u64 = 1;
/// There are clients.
pub(crate) const TRACKED: u64 = 2;
/// How often the stage has changed.
const CHANGED: u64 = 4;

/// A stage at some moment: [`WATCHED`] and [`TRACKED`], and above them how often that has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stage(u64);

impl Stage {
    /// There are no clients, and no reports of what the host changes.
    pub(crate) fn is_plain(self) -> bool {
        self.0.is_multiple_of(CHANGED)
    }

    /// There are clients.
    pub(crate) fn tracks(self) -> bool {
        self.0 & TRACKED != 0
    }
}

/// The stage of a mount.
#[derive(Debug)]
pub(crate) struct Switch(AtomicU64);

impl Default for Switch {
    fn default() -> Self {
        Self(AtomicU64::new(0))
    }
}

impl Switch {
    /// The stage now. If another one comes later, it has changed meanwhile.
    pub(crate) fn stage(&self) -> Stage {
        Stage(self.0.load(Ordering::SeqCst))
    }

    /// Adds a bit to the stage.
    pub(crate) fn enter(&self, bit: u64) {
        self.change(|stage| stage | bit);
    }

    /// Takes a bit from the stage.
    pub(crate) fn leave(&self, bit: u64) {
        self.change(|stage| stage & !bit);
    }

    fn change(&self, change: impl Fn(u64) -> u64) {
        let next = |stage| Some(change(stage) + CHANGED);
        let changed = (self.0).fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        debug_assert!(changed.is_ok(), "there is always a next stage");
        in_one_order();
    }
}

/// Counts the requests of one queue that are under way without leases.
#[derive(Debug)]
pub(crate) struct Untracked(AtomicU64);

impl Default for Untracked {
    fn default() -> Self {
        Self(AtomicU64::new(0))
    }
}

impl Untracked {
    /// A request begins, and is about to look at the stage.
    pub(crate) fn begin(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        in_one_order();
    }

    /// It has ended, or takes the way of leases.
    pub(crate) fn end(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether no such request is under way. Called after the stage has changed.
    pub(crate) fn is_none(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0
    }
}
