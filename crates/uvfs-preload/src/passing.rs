//! Calls that use the file position that the kernel keeps, and imports that take it over.
//!
//! A call counts itself, and then looks whether the descriptor was imported. An import makes the file
//! visible, and then looks at the count. So either the call sees the file, or the import sees the call
//! and leaves the position to the kernel. `uvfs-queue/tests/loom.rs` checks this file with loom.

#[cfg(all(loom, test))]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(all(loom, test)))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// The number of calls that use a position in the kernel at this moment.
#[derive(Debug)]
pub(crate) struct Calls(AtomicU32);

impl Calls {
    #[cfg(not(all(loom, test)))]
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Counts a call. The caller looks at the descriptor after this, not before.
    #[inline]
    pub(crate) fn begin(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Ends a call. The descriptor's number may belong to another file by now, whose count is zero.
    pub(crate) fn end(&self) {
        let less = |calls: u32| calls.checked_sub(1);
        let _ = (self.0).fetch_update(Ordering::SeqCst, Ordering::Relaxed, less);
    }

    /// The calls under way. An import has made the file visible before it asks.
    pub(crate) fn under_way(&self) -> u32 {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::SeqCst)
    }

    /// Forgets all calls: the descriptor is another one.
    pub(crate) fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
