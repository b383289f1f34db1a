//! Counts of each descriptor's calls that went to the kernel, by which `promotion.rs` decides.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::DESCRIPTORS;
use crate::passing::Calls;

/// The calls of one descriptor that went to the kernel.
pub(crate) struct Traffic {
    /// The score of its writes.
    pub(crate) written: AtomicU64,
    pub(crate) reads: AtomicU32,
    pub(crate) read: AtomicU64,
    /// Calls that use the kernel's position at this moment.
    pub(crate) passing: Calls,
}

/// By descriptor.
static TRAFFIC: [Traffic; DESCRIPTORS] = [const {
    Traffic {
        written: AtomicU64::new(0),
        reads: AtomicU32::new(0),
        read: AtomicU64::new(0),
        passing: Calls::new(),
    }
}; DESCRIPTORS];

pub(crate) fn of(fd: c_int) -> Option<&'static Traffic> {
    TRAFFIC.get(usize::try_from(fd).ok()?)
}

/// A descriptor is another one from now on.
pub(crate) fn forget(fd: c_int) {
    let Some(traffic) = of(fd) else { return };
    traffic.written.store(0, Ordering::Relaxed);
    traffic.reads.store(0, Ordering::Relaxed);
    traffic.read.store(0, Ordering::Relaxed);
    traffic.passing.reset();
}
