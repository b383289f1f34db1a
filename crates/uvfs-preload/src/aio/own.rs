//! Descriptors of this library, and eventfds that wake a program in io_getevents.

use crate::table::{self};
use std::ffi::c_int;

use super::HIGH;

/// A descriptor of this library's own.
pub(super) struct Own(pub(super) c_int);

impl Own {
    /// A duplicate of a descriptor.
    pub(super) fn high(fd: c_int) -> Option<Self> {
        // SAFETY: no pointers.
        let high =
            unsafe { crate::real::syscall()(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, HIGH) };
        let high = c_int::try_from(high).ok().filter(|fd| *fd >= 0)?;
        table::own(high, true);
        Some(Self(high))
    }

    pub(super) fn eventfd() -> Option<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return None;
        }
        let own = Self::high(fd);
        // SAFETY: just made; the duplicate stays.
        unsafe { crate::real::syscall()(libc::SYS_close, fd) };
        own
    }

    /// One more, for an eventfd.
    pub(super) fn add(&self) {
        let one = 1_u64;
        // SAFETY: the pointer is to a local of eight bytes.
        unsafe { crate::real::syscall()(libc::SYS_write, self.0, &one, size_of::<u64>()) };
    }

    /// An eventfd that doesn't block is at zero again.
    pub(super) fn clear(&self) {
        let mut count = 0_u64;
        // SAFETY: as above.
        unsafe { crate::real::syscall()(libc::SYS_read, self.0, &mut count, size_of::<u64>()) };
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: this library's own.
        unsafe { crate::real::syscall()(libc::SYS_close, self.0) };
        table::own(self.0, false);
    }
}
