//! Small parts that several crates need: locks that outlive a panic, the structures of Linux AIO, the mount
//! table, the limits behind errors, processes that share descriptors, and the list of a file's extended attributes.

pub mod aio;
pub mod dying;
pub mod limits;
pub mod mountinfo;
pub mod process;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, WaitTimeoutResult};
use std::time::Duration;

use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

/// fchmodat2(2), since Linux 6.6; the number is the same on every architecture.
pub const SYS_FCHMODAT2: libc::c_long = 452;

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

/// Waits for a change of what a mutex guards, as [`lock`] locks it.
pub fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// The same for at most `time`, and for as long as `waits` holds.
pub fn wait_while<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
    time: Duration,
    waits: impl FnMut(&mut T) -> bool,
) -> (MutexGuard<'a, T>, WaitTimeoutResult) {
    let waited = changed.wait_timeout_while(guard, time, waits);
    waited.unwrap_or_else(PoisonError::into_inner)
}

/// The time of a clock that has no time before zero, in nanoseconds (clock_gettime(2)).
pub fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Which of so many places a number belongs to: also numbers that are multiples of something are spread over all.
///
/// ```
/// let places: Vec<usize> = (0..64).map(|n| uvfs_sys::spread(n << 20, 16)).collect();
/// assert!((0..16).all(|place| places.contains(&place)));
/// ```
pub fn spread(number: u64, places: usize) -> usize {
    // By the golden ratio, in the upper half.
    (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % places
}

/// Whether a user is this process's own, or root.
pub fn is_own_user(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// The result of a call of the C library's that gives a number below zero, and sets errno, when it fails.
///
/// # Errors
/// That errno.
pub fn checked(result: impl TryInto<usize>) -> Result<usize, Errno> {
    let failed = |_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO);
    result.try_into().map_err(failed)
}

/// fcntl(2) with `F_OFD_SETLK` or `F_OFD_GETLK`: a lock that belongs to the open file description of `fd`.
///
/// # Errors
/// The kernel's error: `EAGAIN` if another description has a lock in the way.
pub fn ofd_lock(fd: BorrowedFd<'_>, command: i32, lock: &mut libc::flock) -> Result<(), Errno> {
    assert!(command == libc::F_OFD_SETLK || command == libc::F_OFD_GETLK);
    // SAFETY: both commands take a struct flock, which is borrowed mutably for the call.
    checked(unsafe { libc::fcntl(fd.as_raw_fd(), command, lock as *mut libc::flock) }).map(drop)
}

/// Whether no process has a file open for writing, nor mapped so that it can store to it, by this descriptor or any other. A
/// read lease, which is given back at once, tells: the kernel grants it only then (fcntl(2), `F_SETLEASE`). The process must not
/// open the file for writing meanwhile, because the kernel would send it SIGIO.
///
/// # Errors
/// EINVAL for a descriptor that is open for writing and for file systems without leases, EACCES for a file of another user.
pub fn is_unwritten(fd: BorrowedFd<'_>) -> io::Result<bool> {
    for kind in [libc::F_RDLCK, libc::F_UNLCK] {
        // SAFETY: the command takes a number.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, kind) } == -1 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock => Ok(false),
                _ => Err(error),
            };
        }
    }
    Ok(true)
}

/// A lock of a whole file, of kind `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
pub fn whole_file(kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// The directory that a name is in.
pub fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
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
