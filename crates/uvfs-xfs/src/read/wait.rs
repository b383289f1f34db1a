//! Reading without waiting for the device.
//!
//! The reader is ordinary code that blocks when a block is not in the cache. A server's thread has
//! other requests to go on with: it runs the reader by [`without_waiting`], has what was missing
//! fetched, and runs it again. The blocks of the first time are in the cache by then.

use crate::blocks::DiskExtent;
use std::cell::RefCell;

thread_local! {
    /// `Some` while this thread must not wait: what it would have waited for.
    static MISSING: RefCell<Option<Vec<DiskExtent>>> = const { RefCell::new(None) };
}

/// Lets the thread wait again, also when a panic ends what it ran.
struct Patient;

impl Drop for Patient {
    fn drop(&mut self) {
        MISSING.set(None);
    }
}

/// Runs `op` on this thread; where it would have to wait for the device, a cache gives it an error
/// instead. Then its result means nothing, and this gives what was missing.
pub(crate) fn without_waiting<T>(op: impl FnOnce() -> T) -> Result<T, Vec<DiskExtent>> {
    MISSING.set(Some(Vec::new()));
    let patient = Patient;
    let result = op();
    let missing = MISSING.take().unwrap_or_default();
    drop(patient);
    if missing.is_empty() {
        Ok(result)
    } else {
        Err(missing)
    }
}

/// Whether this thread must not wait.
pub(crate) fn is_forbidden() -> bool {
    MISSING.with_borrow(Option::is_some)
}

/// Notes what a cache would have to wait for. It fails instead.
pub(crate) fn note(extents: &[DiskExtent]) {
    MISSING.with_borrow_mut(|missing| {
        if let Some(missing) = missing {
            missing.extend_from_slice(extents);
        }
    });
}
