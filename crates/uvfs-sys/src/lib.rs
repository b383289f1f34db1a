//! Small parts that several crates need: locks that outlive a panic, the structures of Linux AIO, the mount
//! table, and the list of a file's extended attributes.

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

/// The names in what listxattr(2) returns: each ends with a null byte.
///
/// ```
/// assert!(uvfs_sys::xattr_names(b"user.a\0user.b\0").eq([b"user.a", b"user.b"]));
/// ```
pub fn xattr_names(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
}
