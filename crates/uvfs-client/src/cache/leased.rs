//! The state of this client's lease of an inode; `lease.rs` asks for leases and returns them.

use std::time::{Duration, Instant};

use crate::types::Lease;

/// After a recall an inode stays uncached for so long, and longer if it was recalled soon again.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(5);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// A lease that was held for less was not worth asking for.
pub(super) const SOON: Duration = Duration::from_millis(100);
/// This client's lease of an inode.
#[derive(Debug)]
pub(super) struct Leased {
    pub(super) mode: Lease,
    /// The lease's number.
    pub(super) seq: u64,
    /// Leases up to this number were recalled.
    pub(super) recalled: u64,
    /// A recall is being answered.
    pub(super) recalling: bool,
    pub(super) granted: Instant,
    /// The client asks for no lease before this.
    pub(super) again: Instant,
    /// The server refused the lease because the file is in use without leases: an append does not wait for it.
    pub(super) taken: bool,
    pub(super) pause: Duration,
    /// The dirty pages were written under a lease of a server that is gone.
    pub(super) orphan: bool,
    /// Counts the changes that did not go through the cache.
    pub(super) changes: u64,
}

impl Leased {
    /// That of a new inode: none.
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            mode: Lease::None,
            seq: 0,
            recalled: 0,
            recalling: false,
            granted: now,
            again: now,
            taken: false,
            pause: FIRST_PAUSE,
            orphan: false,
            changes: 0,
        }
    }

    /// The file was changed past the cache: attributes that were read before are old.
    pub(super) fn changed(&mut self) {
        self.changes += 1;
    }
}
