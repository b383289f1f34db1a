//! Calls of the host.

use crate::errno;
use rustix::fs::OFlags;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use uvfs_client::backend::{Attr, LockKind, LockRequest};

/// One name: anything else would leave the directory.
pub(super) fn check(name: &OsStr) -> io::Result<&OsStr> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') {
        return Err(errno(libc::EINVAL));
    }
    Ok(name)
}

/// A lock of an open file description, as fcntl(2) has it.
pub(super) fn ofd_lock(
    fd: &OwnedFd,
    command: i32,
    request: &LockRequest,
) -> io::Result<libc::flock> {
    let start = i64::try_from(request.start).map_err(|_| errno(libc::EINVAL))?;
    let len = match request.end {
        end if end >= i64::MAX as u64 => 0,
        end => i64::try_from(end - request.start + 1).map_err(|_| errno(libc::EINVAL))?,
    };
    let kind = match request.kind {
        Some(LockKind::Shared) => libc::F_RDLCK,
        Some(LockKind::Exclusive) => libc::F_WRLCK,
        None => libc::F_UNLCK,
    };
    let mut lock = libc::flock {
        l_type: kind as _,
        l_whence: libc::SEEK_SET as _,
        l_start: start,
        l_len: len,
        l_pid: 0,
    };
    loop {
        // SAFETY: fcntl reads and writes the structure, which lives over the call, alone.
        if unsafe { libc::fcntl(fd.as_raw_fd(), command, &mut lock) } >= 0 {
            return Ok(lock);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // Either may be said of a lock that another process has.
            Some(libc::EACCES) => return Err(errno(libc::EAGAIN)),
            _ => return Err(error),
        }
    }
}

pub(super) fn proc_path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

pub(super) fn flags(flags: i32) -> OFlags {
    OFlags::from_bits_retain(flags as u32)
}

pub(super) fn attr_of(fd: &OwnedFd) -> io::Result<Attr> {
    let s = rustix::fs::fstat(fd)?;
    Ok(Attr {
        ino: s.st_ino,
        size: s.st_size as u64,
        blocks: s.st_blocks as u64,
        atime: (s.st_atime, s.st_atime_nsec as u32),
        mtime: (s.st_mtime, s.st_mtime_nsec as u32),
        ctime: (s.st_ctime, s.st_ctime_nsec as u32),
        mode: s.st_mode,
        nlink: s.st_nlink as u32,
        uid: s.st_uid,
        gid: s.st_gid,
        rdev: s.st_rdev as u32,
        blksize: s.st_blksize as u32,
    })
}
