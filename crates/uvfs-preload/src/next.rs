//! The next definitions of the functions that this library stands in front of.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

use libc::{FILE, iovec, mode_t, msghdr, off_t, size_t, ssize_t};

use crate::real::{Next, next};

next! {
    open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    creat(path: *const c_char, mode: mode_t) -> c_int;
    creat64(path: *const c_char, mode: mode_t) -> c_int;
    __open_2(path: *const c_char, flags: c_int) -> c_int;
    __open64_2(path: *const c_char, flags: c_int) -> c_int;
    __openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int;
    __openat64_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int;
    mkstemp(path: *mut c_char) -> c_int;
    mkstemp64(path: *mut c_char) -> c_int;
    mkostemp(path: *mut c_char, flags: c_int) -> c_int;
    mkostemp64(path: *mut c_char, flags: c_int) -> c_int;
    mkstemps(path: *mut c_char, suffix: c_int) -> c_int;
    mkostemps(path: *mut c_char, suffix: c_int, flags: c_int) -> c_int;
    close(fd: c_int) -> c_int;
    socket(family: c_int, kind: c_int, protocol: c_int) -> c_int;
    memfd_create(name: *const c_char, flags: u32) -> c_int;
    close_range(first: u32, last: u32, flags: c_int) -> c_int;
    dup(fd: c_int) -> c_int;
    dup2(fd: c_int, to: c_int) -> c_int;
    dup3(fd: c_int, to: c_int, flags: c_int) -> c_int;
    fcntl(fd: c_int, command: c_int, arg: usize) -> c_int;
    fcntl64(fd: c_int, command: c_int, arg: usize) -> c_int;
    ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int;
    read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t;
    __read_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t) -> ssize_t;
    pread(fd: c_int, to: *mut c_void, len: size_t, at: off_t) -> ssize_t;
    pread64(fd: c_int, to: *mut c_void, len: size_t, at: off_t) -> ssize_t;
    __pread_chk(fd: c_int, to: *mut c_void, len: size_t, at: off_t, room: size_t) -> ssize_t;
    __pread64_chk(fd: c_int, to: *mut c_void, len: size_t, at: off_t, room: size_t) -> ssize_t;
    write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t;
    pwrite(fd: c_int, from: *const c_void, len: size_t, at: off_t) -> ssize_t;
    pwrite64(fd: c_int, from: *const c_void, len: size_t, at: off_t) -> ssize_t;
    readv(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t;
    writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t;
    preadv(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t;
    preadv64(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t;
    pwritev(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t;
    pwritev64(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t;
    preadv2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
    preadv64v2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
    pwritev2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
    pwritev64v2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
    lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t;
    lseek64(fd: c_int, offset: off_t, whence: c_int) -> off_t;
    fsync(fd: c_int) -> c_int;
    fdatasync(fd: c_int) -> c_int;
    sync_file_range(fd: c_int, from: off_t, len: off_t, flags: u32) -> c_int;
    posix_fadvise(fd: c_int, from: off_t, len: off_t, advice: c_int) -> c_int;
    fstat(fd: c_int, to: *mut libc::stat) -> c_int;
    fstat64(fd: c_int, to: *mut libc::stat) -> c_int;
    __fxstat(version: c_int, fd: c_int, to: *mut libc::stat) -> c_int;
    __fxstat64(version: c_int, fd: c_int, to: *mut libc::stat) -> c_int;
    statx(fd: c_int, path: *const c_char, flags: c_int, mask: u32, to: *mut libc::statx) -> c_int;
    ftruncate(fd: c_int, len: off_t) -> c_int;
    ftruncate64(fd: c_int, len: off_t) -> c_int;
    fallocate(fd: c_int, mode: c_int, from: off_t, len: off_t) -> c_int;
    fallocate64(fd: c_int, mode: c_int, from: off_t, len: off_t) -> c_int;
    mmap(at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, from: off_t) -> *mut c_void;
    mmap64(at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, from: off_t) -> *mut c_void;
    sendfile(to: c_int, from: c_int, at: *mut off_t, len: size_t) -> ssize_t;
    sendfile64(to: c_int, from: c_int, at: *mut off_t, len: size_t) -> ssize_t;
    splice(from: c_int, at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t, flags: u32) -> ssize_t;
    copy_file_range(from: c_int, at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t, flags: u32) -> ssize_t;
    sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    sendmmsg(socket: c_int, list: *mut libc::mmsghdr, count: u32, flags: c_int) -> c_int;
    fdopen(fd: c_int, mode: *const c_char) -> *mut FILE;
    fclose(stream: *mut FILE) -> c_int;
    freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE;
    freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE;
    _exit(code: c_int) -> ();
    _Exit(code: c_int) -> ();
}

/// The flags of an open file, as fcntl(2) gives them (`F_GETFL`); nothing for a number that is none.
pub(crate) fn status_flags(fd: c_int) -> Option<c_int> {
    // SAFETY: without a third argument.
    let flags = unsafe { fcntl(fd, libc::F_GETFL, 0) };
    (flags >= 0).then_some(flags)
}
