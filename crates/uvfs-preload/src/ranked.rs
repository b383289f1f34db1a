//! Locks with ranks: a thread takes them in rising order only, so that no two threads wait for each other.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};

/// A lock that is taken after those of lower rank. Debug builds check that.
pub(crate) struct Ranked<T, const RANK: u32>(Mutex<T>);

impl<T, const RANK: u32> Ranked<T, RANK> {
    pub(crate) const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> Guard<'_, T, RANK> {
        held::enter(RANK);
        Guard(uvfs_sys::lock(&self.0))
    }
}

/// A [`Ranked`] lock that is held.
pub(crate) struct Guard<'a, T, const RANK: u32>(MutexGuard<'a, T>);

impl<T, const RANK: u32> Deref for Guard<'_, T, RANK> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T, const RANK: u32> DerefMut for Guard<'_, T, RANK> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T, const RANK: u32> Drop for Guard<'_, T, RANK> {
    fn drop(&mut self) {
        held::leave(RANK);
    }
}

#[cfg(debug_assertions)]
mod held {
    use std::cell::Cell;

    thread_local! {
        /// A bit for each rank of which this thread has a lock.
        static HELD: Cell<u32> = const { Cell::new(0) };
    }

    pub(super) fn enter(rank: u32) {
        let held = HELD.get();
        assert!(
            held >> rank == 0,
            "a lock of rank {rank} is taken after {held:#b}"
        );
        HELD.set(held | 1 << rank);
    }

    pub(super) fn leave(rank: u32) {
        HELD.set(HELD.get() & !(1 << rank));
    }
}

#[cfg(not(debug_assertions))]
mod held {
    pub(super) fn enter(_: u32) {}
    pub(super) fn leave(_: u32) {}
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    static FIRST: Ranked<u8, 1> = Ranked::new(1);
    static SECOND: Ranked<u8, 2> = Ranked::new(2);

    /// No thread takes locks in falling order, so that no two wait for each other for ever.
    #[test]
    fn locks_are_taken_in_rising_order() {
        let (first, second) = (FIRST.lock(), SECOND.lock());
        assert_eq!((*first, *second), (1, 2));
        drop(first);
        drop(second);
        let falling = std::thread::spawn(|| {
            let _second = SECOND.lock();
            let _first = FIRST.lock();
        });
        assert!(falling.join().is_err());
    }
}
