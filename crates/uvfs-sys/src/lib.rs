//! Small parts that several crates need: locks that outlive a panic, the structures of Linux AIO, and the
//! mount table.

pub mod aio;
pub mod mountinfo;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after another holder has panicked: no code of uvfs leaves what it guards half done.
///
/// ```
/// use std::sync::Mutex;
///
/// let count = Mutex::new(1);
/// *uvfs_sys::lock(&count) += 1;
/// assert_eq!(count.into_inner().unwrap(), 2);
/// ```
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
