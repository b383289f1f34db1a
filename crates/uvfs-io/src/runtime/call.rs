//! The operations that every driver can do.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{opcode, squeue, types};

use super::op::Keep;
use super::ring::Sqe;

/// preadv2(2) or pwritev2(2).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) write: bool,
    pub(crate) fd: RawFd,
    pub(crate) iovecs: *const libc::iovec,
    pub(crate) count: u32,
    pub(crate) offset: u64,
    pub(crate) flags: i32,
    /// Another thread does it, whether or not it would wait.
    pub(crate) hand_over: bool,
}

/// An operation. The memory that it points to is kept, with its descriptor, until it completes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    Transfer(Transfer),
    /// fsync(2) or fdatasync(2).
    Sync {
        fd: RawFd,
        data_only: bool,
    },
    /// fallocate(2).
    Allocate {
        fd: RawFd,
        mode: i32,
        offset: u64,
        len: u64,
    },
    /// Waits for one of the events of poll(2).
    Poll {
        fd: RawFd,
        events: u32,
    },
    /// Ends with ETIME after so long.
    Timeout(Duration),
}

impl Call {
    /// The ring's entry for it. `keep` gets what the entry points to besides.
    pub(super) fn entry(&self, keep: &mut Keep) -> Sqe {
        let entry = match *self {
            Call::Transfer(t) => {
                let target = types::Fd(t.fd);
                let entry = match t.write {
                    false => opcode::Readv::new(target, t.iovecs, t.count)
                        .offset(t.offset)
                        .rw_flags(t.flags)
                        .build(),
                    true => opcode::Writev::new(target, t.iovecs, t.count)
                        .offset(t.offset)
                        .rw_flags(t.flags)
                        .build(),
                };
                match t.hand_over {
                    true => entry.flags(squeue::Flags::ASYNC),
                    false => entry,
                }
            }
            Call::Sync { fd, data_only } => {
                let flags = match data_only {
                    true => types::FsyncFlags::DATASYNC,
                    false => types::FsyncFlags::empty(),
                };
                opcode::Fsync::new(types::Fd(fd)).flags(flags).build()
            }
            Call::Allocate {
                fd,
                mode,
                offset,
                len,
            } => opcode::Fallocate::new(types::Fd(fd), len)
                .offset(offset)
                .mode(mode)
                .build(),
            Call::Poll { fd, events } => opcode::PollAdd::new(types::Fd(fd), events).build(),
            Call::Timeout(time) => {
                let spec = Arc::new(types::Timespec::from(time));
                let entry = opcode::Timeout::new(&*spec).build();
                debug_assert!(keep.other.is_none(), "a timeout keeps nothing else");
                keep.other = Some(spec);
                entry
            }
        };
        Sqe::from(entry)
    }

    /// Makes a call that may wait, in this thread: its result, negative for an errno.
    ///
    /// # Safety
    /// The memory that it points to, and its descriptor, stay valid until this returns.
    pub(super) unsafe fn make(&self) -> i32 {
        let result = match *self {
            Call::Transfer(t) => {
                let (count, offset) = (t.count as i32, t.offset as i64);
                // SAFETY: the caller keeps the iovecs and the memory that they describe.
                unsafe {
                    match t.write {
                        false => libc::preadv2(t.fd, t.iovecs, count, offset, t.flags),
                        true => libc::pwritev2(t.fd, t.iovecs, count, offset, t.flags),
                    }
                }
            }
            // SAFETY: these take no pointers.
            Call::Sync { fd, data_only } => unsafe {
                match data_only {
                    true => libc::fdatasync(fd) as isize,
                    false => libc::fsync(fd) as isize,
                }
            },
            Call::Allocate {
                fd,
                mode,
                offset,
                len,
            } => {
                // SAFETY: takes no pointers.
                unsafe { libc::fallocate(fd, mode, offset as i64, len as i64) as isize }
            }
            Call::Poll { .. } | Call::Timeout(_) => unreachable!("the driver waits for these"),
        };
        // A transfer moves less than 2 GiB (MAX_RW_COUNT).
        uvfs_sys::checked(result).map_or_else(|errno| -errno.raw_os_error(), |done| done as i32)
    }
}
