//! The next definitions of functions that this library stands in front of and calls itself.

use std::ffi::c_int;

use libc::{iovec, off_t, ssize_t};

use crate::real::next;

next! {
    close(fd: c_int) -> c_int;
    fcntl(fd: c_int, command: c_int, arg: usize) -> c_int;
    preadv64(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t;
    pwritev64(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t;
    lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t;
    fsync(fd: c_int) -> c_int;
    fdatasync(fd: c_int) -> c_int;
}

/// The flags of an open file, as fcntl(2) gives them (`F_GETFL`); nothing for a number that is none.
pub(crate) fn status_flags(fd: c_int) -> Option<c_int> {
    // SAFETY: without a third argument.
    let flags = unsafe { fcntl(fd, libc::F_GETFL, 0) };
    (flags >= 0).then_some(flags)
}
