//! Functions under the names by which programs know them. Unit tests don't want them.

use crate::import;
use crate::promotion::Passing;
use crate::real::{aliases, exports, is_inside, set_errno};
use crate::report::Why;
use crate::table::{self, Known, Opened, Use};
use libc::{FILE, mode_t, msghdr};
use libc::{iovec, off_t, size_t, ssize_t};
use rustix::io::Errno;
use std::ffi::{c_char, c_int, c_ulong, c_void};
use uvfs_client::Flags;

use super::status::{status, status_of};
use super::transfer::{read_many, read_one, write_many, write_one};
use super::{
    advise, allocate, aside, closing, duplicated, flags_of, is_borrowed, is_plausible, making,
    mapping, noted, out_of_reach, place, published, refuses, seek, sync, sync_range, truncate,
    vacate,
};

/// Functions that open a file with these flags.
macro_rules! opens {
    ($($how:expr => $name:ident($($arg:ident: $type:ty),*);)*) => {
        exports! {$(
            fn $name($($arg: $type),*) -> c_int {
                let _making = making();
                // SAFETY: the caller's own arguments.
                noted(unsafe { next($($arg),*) }, $how)
            }
        )*}
    };
}

opens! {
    flags => open(path: *const c_char, flags: c_int, mode: mode_t);
    flags => open64(path: *const c_char, flags: c_int, mode: mode_t);
    flags => openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t);
    flags => openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t);
    libc::O_RDWR => creat(path: *const c_char, mode: mode_t);
    libc::O_RDWR => creat64(path: *const c_char, mode: mode_t);
    flags => __open_2(path: *const c_char, flags: c_int);
    flags => __open64_2(path: *const c_char, flags: c_int);
    flags => __openat_2(dir: c_int, path: *const c_char, flags: c_int);
    flags => __openat64_2(dir: c_int, path: *const c_char, flags: c_int);
    libc::O_RDWR => mkstemp(path: *mut c_char);
    libc::O_RDWR => mkstemp64(path: *mut c_char);
    libc::O_RDWR => mkostemp(path: *mut c_char, flags: c_int);
    libc::O_RDWR => mkostemp64(path: *mut c_char, flags: c_int);
    libc::O_RDWR => mkstemps(path: *mut c_char, suffix: c_int);
    libc::O_RDWR => mkostemps(path: *mut c_char, suffix: c_int, flags: c_int);
}

/// Functions that this library makes descriptors of its own by. The program's are not files of a
/// mount.
macro_rules! makes {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        exports! {$(
            fn $name($($arg: $type),*) -> c_int {
                let _making = making();
                // SAFETY: the caller's own arguments.
                let fd = unsafe { next($($arg),*) };
                match fd >= 0 && is_inside() && !is_borrowed() {
                    true => out_of_reach(fd),
                    false => fd,
                }
            }
        )*}
    };
}

makes! {
    socket(family: c_int, kind: c_int, protocol: c_int);
    memfd_create(name: *const c_char, flags: u32);
}

/// The call neither reads nor moves the kernel's position, or moves it to where it says.
fn no_position(_: c_int) {}

/// Functions whose result comes from an expression in `served`, or from the next definition.
/// The first function's result lives until the call is over.
macro_rules! serves {
    ($begin:path => $($name:ident($fd:ident: $first:ty $(, $arg:ident: $type:ty)*) -> $result:ty
        = $served:expr;)*) => {
        exports! {$(
            fn $name($fd: $first $(, $arg: $type)*) -> $result {
                #[allow(clippy::let_unit_value)] // Most hold nothing.
                let _passing = $begin($fd);
                // SAFETY: the caller's own arguments.
                #[allow(unused_unsafe)]
                let done = unsafe { $served };
                served!(done, next($fd $(, $arg)*))
            }
        )*}
    };
}

serves! {
    Passing::begin =>
    read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t = read_one(fd, to, len, None);
    __read_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t) -> ssize_t =
        if len > room { None } else { read_one(fd, to, len, None) };
    write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t =
        write_one(fd, from, len, None);
    readv(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t =
        read_many(fd, vector, count, None, Flags::empty());
    writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t =
        write_many(fd, vector, count, None, Flags::empty());
    preadv2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t =
        flags_of(flags).and_then(|f| read_many(fd, vector, count, place(at), f));
    preadv64v2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int)
        -> ssize_t = flags_of(flags).and_then(|f| read_many(fd, vector, count, place(at), f));
    pwritev2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int)
        -> ssize_t = flags_of(flags).and_then(|f| write_many(fd, vector, count, place(at), f));
    pwritev64v2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int)
        -> ssize_t = flags_of(flags).and_then(|f| write_many(fd, vector, count, place(at), f));
}

serves! {
    no_position =>
    pread(fd: c_int, to: *mut c_void, len: size_t, at: off_t) -> ssize_t =
        read_one(fd, to, len, Some(at));
    pread64(fd: c_int, to: *mut c_void, len: size_t, at: off_t) -> ssize_t =
        read_one(fd, to, len, Some(at));
    __pread_chk(fd: c_int, to: *mut c_void, len: size_t, at: off_t, room: size_t) -> ssize_t =
        if len > room { None } else { read_one(fd, to, len, Some(at)) };
    __pread64_chk(fd: c_int, to: *mut c_void, len: size_t, at: off_t, room: size_t) -> ssize_t =
        if len > room { None } else { read_one(fd, to, len, Some(at)) };
    pwrite(fd: c_int, from: *const c_void, len: size_t, at: off_t) -> ssize_t =
        write_one(fd, from, len, Some(at));
    pwrite64(fd: c_int, from: *const c_void, len: size_t, at: off_t) -> ssize_t =
        write_one(fd, from, len, Some(at));
    preadv(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t =
        read_many(fd, vector, count, Some(at), Flags::empty());
    preadv64(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t =
        read_many(fd, vector, count, Some(at), Flags::empty());
    pwritev(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t =
        write_many(fd, vector, count, Some(at), Flags::empty());
    pwritev64(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t =
        write_many(fd, vector, count, Some(at), Flags::empty());
    lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t = seek(fd, offset, whence);
    lseek64(fd: c_int, offset: off_t, whence: c_int) -> off_t = seek(fd, offset, whence);
    fsync(fd: c_int) -> c_int = sync(fd, false);
    fdatasync(fd: c_int) -> c_int = sync(fd, true);
    sync_file_range(fd: c_int, from: off_t, len: off_t, flags: u32) -> c_int =
        sync_range(fd, from, len, flags);
    fstat(fd: c_int, to: *mut libc::stat) -> c_int = status(fd, to);
    fstat64(fd: c_int, to: *mut libc::stat) -> c_int = status(fd, to);
    __fxstat(version: c_int, fd: c_int, to: *mut libc::stat) -> c_int = status(fd, to);
    __fxstat64(version: c_int, fd: c_int, to: *mut libc::stat) -> c_int = status(fd, to);
    statx(fd: c_int, path: *const c_char, flags: c_int, mask: u32, to: *mut libc::statx)
        -> c_int = status_of(fd, path, flags, mask, to);
    ftruncate(fd: c_int, len: off_t) -> c_int = truncate(fd, len);
    ftruncate64(fd: c_int, len: off_t) -> c_int = truncate(fd, len);
    fallocate(fd: c_int, mode: c_int, from: off_t, len: off_t) -> c_int =
        allocate(fd, mode, from, len);
    fallocate64(fd: c_int, mode: c_int, from: off_t, len: off_t) -> c_int =
        allocate(fd, mode, from, len);
}

/// Functions that go to the next definition after something was done.
macro_rules! prepares {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty = $first:expr;)*) => {
        exports! {$(
            fn $name($($arg: $type),*) -> $result {
                #[allow(clippy::let_unit_value)] // Most have nothing to hold.
                let _first = $first;
                // SAFETY: the caller's own arguments.
                unsafe { next($($arg),*) }
            }
        )*}
    };
}

fn published_unless(fd: c_int, at: *mut off_t) {
    if at.is_null() {
        published(fd);
    }
}

/// The kernel reads from a descriptor by a call that takes the size as it knew it last: it is made
/// to ask.
fn read_by_kernel(fd: c_int, at: *mut off_t) {
    published_unless(fd, at);
    if !table::is_foreign(fd) {
        aside(|| import::refresh(fd));
    }
}

/// A stream's descriptor, which the C library uses without asking here.
fn stream(file: *mut FILE) -> Option<table::Closing> {
    match file.is_null() {
        true => None,
        // SAFETY: an open stream, as the caller's function wants.
        false => vacate(unsafe { libc::fileno(file) }),
    }
}

prepares! {
    mmap(at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, from: off_t)
        -> *mut c_void = mapping(flags, fd);
    mmap64(at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, from: off_t)
        -> *mut c_void = mapping(flags, fd);
    sendfile(to: c_int, from: c_int, at: *mut off_t, len: size_t) -> ssize_t =
        (published(to), read_by_kernel(from, at));
    sendfile64(to: c_int, from: c_int, at: *mut off_t, len: size_t) -> ssize_t =
        (published(to), read_by_kernel(from, at));
    splice(from: c_int, at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t, flags: u32)
        -> ssize_t = (read_by_kernel(from, at), published_unless(to, to_at));
    copy_file_range(from: c_int, at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t,
        flags: u32) -> ssize_t = (read_by_kernel(from, at), published_unless(to, to_at));
    sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t = {
        // SAFETY: the caller's message. It may carry descriptors to other processes.
        if !message.is_null() && unsafe { (*message).msg_controllen } > 0 {
            aside(super::publish_all);
        }
    };
    sendmmsg(socket: c_int, list: *mut libc::mmsghdr, count: u32, flags: c_int) -> c_int = {
        // SAFETY: the caller's messages.
        let carries = |at: usize| unsafe { (*list.add(at)).msg_hdr.msg_controllen } > 0;
        if !list.is_null() && (0..count as usize).any(carries) {
            aside(super::publish_all);
        }
    };
    fdopen(fd: c_int, mode: *const c_char) -> *mut FILE = published(fd);
    fclose(file: *mut FILE) -> c_int = stream(file);
    freopen(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE =
        stream(file);
    freopen64(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE =
        stream(file);
    _exit(code: c_int) -> () = crate::calls::ending();
    _Exit(code: c_int) -> () = crate::calls::ending();
}

/// The description of a descriptor whose imported file may be written.
fn written(fd: c_int) -> Option<Use> {
    if !table::is_imported(fd) {
        return None;
    }
    let writes = |opened: &Opened| opened.flags & libc::O_ACCMODE != libc::O_RDONLY;
    aside(|| match table::look(fd) {
        Known::Described(one) => Some(one).filter(|one| one.opened().is_some_and(writes)),
        _ => None,
    })?
}

/// Lets a description go, and tells an error of its file that the program has not heard of.
fn failed(one: Use) -> Option<Errno> {
    aside(move || one.opened().and_then(|opened| opened.file.failed()))?
}

/// As the manual says.
///
/// # Safety
/// As the manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: the caller's own argument.
    unsafe { close_range(first.max(0) as u32, u32::MAX, 0) };
}

aliases! {
    posix_fadvise64(fd: c_int, from: off_t, len: off_t, advice: c_int) -> c_int = posix_fadvise;
    __open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int = open;
    __open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int = open64;
    __close(fd: c_int) -> c_int = close;
    __dup2(fd: c_int, to: c_int) -> c_int = dup2;
    __fcntl(fd: c_int, command: c_int, arg: usize) -> c_int = fcntl;
    __libc_fcntl64(fd: c_int, command: c_int, arg: usize) -> c_int = fcntl64;
    __read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t = read;
    __write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t = write;
    __pread64(fd: c_int, to: *mut c_void, len: size_t, at: off_t) -> ssize_t = pread64;
    __libc_pread(fd: c_int, to: *mut c_void, len: size_t, at: off_t) -> ssize_t = pread;
    __pwrite64(fd: c_int, from: *const c_void, len: size_t, at: off_t) -> ssize_t = pwrite64;
    __libc_pwrite(fd: c_int, from: *const c_void, len: size_t, at: off_t) -> ssize_t = pwrite;
    __lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t = lseek;
    __mmap(at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, from: off_t)
        -> *mut c_void = mmap;
    _IO_fdopen(fd: c_int, mode: *const c_char) -> *mut FILE = fdopen;
    _IO_fclose(file: *mut FILE) -> c_int = fclose;
}

/// Before a call that counts from the kernel's position.
///
/// # Safety
/// `arg` is as the manual says for the command.
unsafe fn counted_from_position(fd: c_int, command: c_int, arg: usize) {
    let locks = [
        libc::F_GETLK,
        libc::F_SETLK,
        libc::F_SETLKW,
        libc::F_OFD_GETLK,
        libc::F_OFD_SETLK,
        libc::F_OFD_SETLKW,
    ];
    if locks.contains(&command)
        && is_plausible(arg as *const u8, size_of::<libc::flock>())
        // SAFETY: the caller's lock.
        && unsafe { (*(arg as *const libc::flock)).l_whence } == libc::SEEK_CUR as i16
    {
        published(fd);
    }
}

fn controlled(fd: c_int, command: c_int, arg: usize, done: c_int) -> c_int {
    if done < 0 {
        return done;
    }
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicated(fd, done),
        libc::F_SETFL if !table::is_foreign(fd) => {
            aside(|| {
                if let Known::Described(one) = table::look(fd)
                    && let Some(opened) = one.opened()
                    && (arg as c_int ^ opened.flags) & Opened::SWITCHED != 0
                {
                    // It was imported as something else.
                    import::give_up(fd, &one, Why::Changed);
                }
            });
            done
        }
        _ => done,
    }
}

exports! {
    fn posix_fadvise(fd: c_int, from: off_t, len: off_t, advice: c_int) -> c_int {
        match advise(fd, from, len, advice) {
            true => 0,
            // SAFETY: the caller's own arguments.
            false => unsafe { next(fd, from, len, advice) },
        }
    }

    fn close(fd: c_int) -> c_int {
        if is_inside()
            && !is_borrowed()
            // SAFETY: this library's own argument.
            && let Some(done) = table::close_own(fd, || unsafe { next(fd) })
        {
            return done;
        }
        let ours = || aside(|| matches!(table::look(fd), Known::Own)) == Some(true);
        if fd >= 0 && ours() {
            // Programs close whatever they did not open.
            set_errno(libc::EBADF);
            return -1;
        }
        let apart = import::any_session() && table::is_unknown(fd) && !is_inside() && !is_borrowed();
        let _apart = apart.then(table::RaceGuard::closes);
        let written = written(fd);
        let _closing = closing(fd, || {});
        // SAFETY: the caller's own argument.
        let done = unsafe { next(fd) };
        // The file system may have waited for what was dirty.
        match written.and_then(failed).filter(|_| done == 0) {
            None => done,
            Some(error) => {
                set_errno(error.raw_os_error());
                -1
            }
        }
    }

    fn close_range(first: u32, last: u32, flags: c_int) -> c_int {
        if flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 || is_borrowed() || first > last {
            // SAFETY: the caller's own arguments.
            return unsafe { next(first, last, flags) };
        }
        let _apart = (import::any_session() && !is_inside()).then(table::RaceGuard::closes);
        let mut from = first;
        for fd in table::all().filter(|fd| (first..=last).contains(&(*fd as u32))) {
            if !matches!(table::look(fd), Known::Own) {
                drop(closing(fd, || {}));
                continue;
            }
            if (fd as u32) > from {
                // SAFETY: a part of what the caller asked for, without this library's own.
                let done = unsafe { next(from, fd as u32 - 1, flags) };
                if done < 0 {
                    return done;
                }
            }
            from = fd as u32 + 1;
        }
        if from > last {
            return 0;
        }
        // SAFETY: as above.
        unsafe { next(from, last, flags) }
    }

    fn dup(fd: c_int) -> c_int {
        if refuses(fd) {
            return -1;
        }
        // SAFETY: the caller's own argument.
        duplicated(fd, unsafe { next(fd) })
    }

    fn dup2(fd: c_int, to: c_int) -> c_int {
        if refuses(fd) {
            return -1;
        }
        if fd == to {
            // SAFETY: the caller's own arguments.
            return unsafe { next(fd, to) };
        }
        let _closing = vacate(to);
        // SAFETY: the caller's own arguments.
        duplicated(fd, unsafe { next(fd, to) })
    }

    fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
        if refuses(fd) {
            return -1;
        }
        let _closing = if fd == to { None } else { vacate(to) };
        // SAFETY: the caller's own arguments.
        duplicated(fd, unsafe { next(fd, to, flags) })
    }

    /// Its third argument is one word at most, whatever it is.
    fn ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int {
        // FIONREAD gives what is left from the position on, and FS_IOC_RESVSP and its like ('X')
        // may count from it.
        if request == libc::FIONREAD || request >> 8 & 0xff == c_ulong::from(b'X') {
            read_by_kernel(fd, std::ptr::null_mut());
        }
        // SAFETY: the caller's own arguments.
        unsafe { next(fd, request, arg) }
    }
}

macro_rules! controls {
    ($($name:ident)*) => {
        exports! {$(
            /// Its third argument is one word at most, whatever it is.
            fn $name(fd: c_int, command: c_int, arg: usize) -> c_int {
                if refuses(fd) {
                    return -1;
                }
                // SAFETY: the caller's own arguments.
                unsafe { counted_from_position(fd, command, arg) };
                // SAFETY: the caller's own arguments.
                controlled(fd, command, arg, unsafe { next(fd, command, arg) })
            }
        )*}
    };
}

controls! { fcntl fcntl64 }
