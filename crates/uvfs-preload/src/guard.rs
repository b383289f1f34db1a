//! The re-entrancy guard: while a thread is at work in this library, its calls go to the C library.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::real::{errno, is_borrowed, is_inside, set_errno, set_inside};
use crate::signals;

/// Marks the thread as at work in this library while it lives.
pub(crate) struct Inside;

impl Inside {
    /// Nothing when it is already: in a signal handler, or in what this library itself calls.
    pub(crate) fn enter() -> Option<Self> {
        if is_inside() {
            return None;
        }
        set_inside(true);
        Some(Self)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        set_inside(false);
        while signals::any_deferred() {
            signals::raise_deferred();
        }
    }
}

/// Runs `work` unless this thread is at work here already, with errno as it was.
pub(crate) fn aside<T>(work: impl FnOnce() -> T) -> Option<T> {
    if is_borrowed() {
        return None;
    }
    let _inside = Inside::enter()?;
    let before = errno();
    let done = catch_unwind(AssertUnwindSafe(work)).ok();
    set_errno(before);
    done
}
