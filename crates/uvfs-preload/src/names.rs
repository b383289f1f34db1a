//! The C library's functions that take paths, as programs call them: `paths.rs` serves what it can.

use std::ffi::{c_char, c_int};

use crate::calls::{is_plausible, stat_of, statx_of};
use crate::paths::{self, Given};

/// The next definitions.
mod next {
    use std::ffi::{CStr, c_char, c_int, c_void};

    use libc::{mode_t, size_t, ssize_t};

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
        stat(path: *const c_char, to: *mut libc::stat) -> c_int;
        stat64(path: *const c_char, to: *mut libc::stat) -> c_int;
        lstat(path: *const c_char, to: *mut libc::stat) -> c_int;
        lstat64(path: *const c_char, to: *mut libc::stat) -> c_int;
        __xstat(version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int;
        __xstat64(version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int;
        __lxstat(version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int;
        __lxstat64(version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int;
        access(path: *const c_char, mode: c_int) -> c_int;
        euidaccess(path: *const c_char, mode: c_int) -> c_int;
        eaccess(path: *const c_char, mode: c_int) -> c_int;
        faccessat(dir: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int;
        readlink(path: *const c_char, to: *mut c_char, room: size_t) -> ssize_t;
        readlinkat(dir: c_int, path: *const c_char, to: *mut c_char, room: size_t) -> ssize_t;
        mkdir(path: *const c_char, mode: mode_t) -> c_int;
        mkdirat(dir: c_int, path: *const c_char, mode: mode_t) -> c_int;
        rmdir(path: *const c_char) -> c_int;
        unlink(path: *const c_char) -> c_int;
        unlinkat(dir: c_int, path: *const c_char, flags: c_int) -> c_int;
        remove(path: *const c_char) -> c_int;
        rename(from: *const c_char, to: *const c_char) -> c_int;
        renameat(old: c_int, from: *const c_char, new: c_int, to: *const c_char) -> c_int;
        renameat2(old: c_int, from: *const c_char, new: c_int, to: *const c_char, flags: u32)
            -> c_int;
        link(from: *const c_char, to: *const c_char) -> c_int;
        linkat(old: c_int, from: *const c_char, new: c_int, to: *const c_char, flags: c_int)
            -> c_int;
        symlink(target: *const c_char, path: *const c_char) -> c_int;
        symlinkat(target: *const c_char, dir: c_int, path: *const c_char) -> c_int;
        chdir(path: *const c_char) -> c_int;
        fchdir(dir: c_int) -> c_int;
        umask(mask: mode_t) -> mode_t;
        poll(list: *mut libc::pollfd, count: libc::nfds_t, wait: c_int) -> c_int;
        ppoll(list: *mut libc::pollfd, count: libc::nfds_t, wait: *const libc::timespec,
            mask: *const libc::sigset_t) -> c_int;
        select(count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set,
            except: *mut libc::fd_set, wait: *mut libc::timeval) -> c_int;
        pselect(count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set,
            except: *mut libc::fd_set, wait: *const libc::timespec, mask: *const libc::sigset_t)
            -> c_int;
        epoll_ctl(epoll: c_int, what: c_int, fd: c_int, event: *mut c_void) -> c_int;
        aio_read(one: *mut libc::aiocb) -> c_int;
        aio_read64(one: *mut libc::aiocb) -> c_int;
        aio_write(one: *mut libc::aiocb) -> c_int;
        aio_write64(one: *mut libc::aiocb) -> c_int;
        lio_listio(mode: c_int, list: *const *mut libc::aiocb, count: c_int,
            event: *mut libc::sigevent) -> c_int;
        lio_listio64(mode: c_int, list: *const *mut libc::aiocb, count: c_int,
            event: *mut libc::sigevent) -> c_int;
    }
}

fn here(path: *const c_char) -> Given {
    Given {
        dir: libc::AT_FDCWD,
        path,
    }
}

/// fstatat(2) of a path.
///
/// # Safety
/// As for fstatat(2).
pub(crate) unsafe fn look(
    dir: c_int,
    path: *const c_char,
    to: *mut libc::stat,
    flags: c_int,
) -> Option<Result<c_int, c_int>> {
    let known = libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT | libc::AT_EMPTY_PATH;
    if !paths::on() || flags & !known != 0 || !is_plausible(to.cast(), size_of::<libc::stat>()) {
        return None;
    }
    let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    // SAFETY: the caller's duty.
    let found = unsafe { paths::look(Given { dir, path }, follow, false) }?;
    // SAFETY: the caller's buffer.
    Some(
        found
            .map(|found| unsafe { to.write(stat_of(&found)) })
            .map(|()| 0),
    )
}

/// statx(2) of a path.
///
/// # Safety
/// As for statx(2).
pub(crate) unsafe fn lookx(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mask: u32,
    to: *mut libc::statx,
) -> Option<Result<c_int, c_int>> {
    let known = libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT | libc::AT_EMPTY_PATH;
    if !paths::on()
        || flags & !known != 0
        || mask & !libc::STATX_BASIC_STATS != 0
        || !is_plausible(to.cast(), size_of::<libc::statx>())
    {
        return None;
    }
    let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    // The kernel says more of a mount's root.
    // SAFETY: the caller's duty.
    let found = unsafe { paths::look(Given { dir, path }, follow, true) }?;
    // SAFETY: the caller's buffer.
    Some(
        found
            .map(|found| unsafe { to.write(statx_of(&found)) })
            .map(|()| 0),
    )
}

/// Functions under the names by which programs know them.
#[cfg(not(test))]
#[allow(non_snake_case)]
mod exported {
    use libc::{aiocb, fd_set, mode_t, nfds_t, pollfd, size_t, ssize_t};

    use super::*;
    use crate::calls::{making, noted, served};
    use crate::real::set_errno;

    /// Functions whose result comes from an expression, or from the next definition once
    /// `descriptors` are ones that the kernel knows.
    macro_rules! serves {
        ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty,
            [$($fd:expr),*] = $served:expr;)*) => {
            $(
                /// As the manual says.
                ///
                /// # Safety
                /// As the manual says.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                    // SAFETY: the caller's own arguments.
                    #[allow(unused_unsafe)]
                    let done = unsafe { $served };
                    $(if done.is_none() && let Err(code) = paths::solid($fd) {
                        set_errno(code);
                        return -1;
                    })*
                    served!(done, next::$name($($arg),*))
                }
            )*
        };
    }

    /// As `serves`, for what opens files.
    macro_rules! opens {
        ($($name:ident($($arg:ident: $type:ty),*), $dir:expr, $path:expr, $flags:expr, $mode:expr;)*) => {
            $(
                /// As the manual says.
                ///
                /// # Safety
                /// As the manual says.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                    let given = Given { dir: $dir, path: $path };
                    // SAFETY: the caller's own arguments.
                    match unsafe { paths::open(given, $flags, $mode as u32) } {
                        Some(Ok(fd)) => {
                            if fd <= libc::STDERR_FILENO {
                                // Streams use these inside the C library.
                                let _ = paths::solid(fd);
                            }
                            fd
                        }
                        Some(Err(code)) => {
                            set_errno(code);
                            -1
                        }
                        None => {
                            let _ = paths::solid($dir);
                            let _making = making();
                            // SAFETY: as above.
                            noted(unsafe { next::$name($($arg),*) })
                        }
                    }
                }
            )*
        };
    }

    const CREAT: c_int = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;

    opens! {
        open(path: *const c_char, flags: c_int, mode: mode_t), CWD, path, flags, mode;
        open64(path: *const c_char, flags: c_int, mode: mode_t), CWD, path, flags, mode;
        openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t), dir, path, flags, mode;
        openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t), dir, path, flags, mode;
        creat(path: *const c_char, mode: mode_t), CWD, path, CREAT, mode;
        creat64(path: *const c_char, mode: mode_t), CWD, path, CREAT, mode;
        __open_2(path: *const c_char, flags: c_int), CWD, path, flags, 0u32;
        __open64_2(path: *const c_char, flags: c_int), CWD, path, flags, 0u32;
        __openat_2(dir: c_int, path: *const c_char, flags: c_int), dir, path, flags, 0u32;
        __openat64_2(dir: c_int, path: *const c_char, flags: c_int), dir, path, flags, 0u32;
    }

    const NOFOLLOW: c_int = libc::AT_SYMLINK_NOFOLLOW;
    const CWD: c_int = libc::AT_FDCWD;

    /// remove(3): of what is no directory.
    unsafe fn removed(path: *const c_char) -> Option<Result<c_int, c_int>> {
        // SAFETY: the caller's duty.
        unsafe { paths::remove(here(path), false) }
    }

    unsafe fn unlinked(
        dir: c_int,
        path: *const c_char,
        flags: c_int,
    ) -> Option<Result<c_int, c_int>> {
        if flags & !libc::AT_REMOVEDIR != 0 {
            return None;
        }
        // SAFETY: the caller's duty.
        unsafe { paths::remove(Given { dir, path }, flags == libc::AT_REMOVEDIR) }
    }

    unsafe fn accessible(
        dir: c_int,
        path: *const c_char,
        mode: c_int,
        flags: c_int,
    ) -> Option<Result<c_int, c_int>> {
        if flags & !(libc::AT_EACCESS | NOFOLLOW) != 0 {
            return None;
        }
        // SAFETY: the caller's duty.
        unsafe { paths::access(Given { dir, path }, mode, flags & NOFOLLOW == 0) }
    }

    serves! {
        stat(path: *const c_char, to: *mut libc::stat) -> c_int, [] = look(CWD, path, to, 0);
        stat64(path: *const c_char, to: *mut libc::stat) -> c_int, [] = look(CWD, path, to, 0);
        lstat(path: *const c_char, to: *mut libc::stat) -> c_int, [] =
            look(CWD, path, to, NOFOLLOW);
        lstat64(path: *const c_char, to: *mut libc::stat) -> c_int, [] =
            look(CWD, path, to, NOFOLLOW);
        __xstat(version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int, [] =
            look(CWD, path, to, 0);
        __xstat64(version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int, [] =
            look(CWD, path, to, 0);
        __lxstat(version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int, [] =
            look(CWD, path, to, NOFOLLOW);
        __lxstat64(version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int, [] =
            look(CWD, path, to, NOFOLLOW);
        access(path: *const c_char, mode: c_int) -> c_int, [] = accessible(CWD, path, mode, 0);
        euidaccess(path: *const c_char, mode: c_int) -> c_int, [] =
            accessible(CWD, path, mode, 0);
        eaccess(path: *const c_char, mode: c_int) -> c_int, [] = accessible(CWD, path, mode, 0);
        faccessat(dir: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int, [dir] =
            accessible(dir, path, mode, flags);
        readlink(path: *const c_char, to: *mut c_char, room: size_t) -> ssize_t, [] =
            paths::readlink(here(path), to, room);
        readlinkat(dir: c_int, path: *const c_char, to: *mut c_char, room: size_t) -> ssize_t,
            [dir] = paths::readlink(Given { dir, path }, to, room);
        mkdir(path: *const c_char, mode: mode_t) -> c_int, [] = paths::mkdir(here(path), mode);
        mkdirat(dir: c_int, path: *const c_char, mode: mode_t) -> c_int, [dir] =
            paths::mkdir(Given { dir, path }, mode);
        rmdir(path: *const c_char) -> c_int, [] = paths::remove(here(path), true);
        unlink(path: *const c_char) -> c_int, [] = paths::remove(here(path), false);
        unlinkat(dir: c_int, path: *const c_char, flags: c_int) -> c_int, [dir] =
            unlinked(dir, path, flags);
        remove(path: *const c_char) -> c_int, [] = removed(path);
        rename(from: *const c_char, to: *const c_char) -> c_int, [] =
            paths::rename(here(from), here(to), 0);
        renameat(old: c_int, from: *const c_char, new: c_int, to: *const c_char) -> c_int,
            [old, new] =
            paths::rename(Given { dir: old, path: from }, Given { dir: new, path: to }, 0);
        renameat2(old: c_int, from: *const c_char, new: c_int, to: *const c_char, flags: u32)
            -> c_int, [old, new] =
            paths::rename(Given { dir: old, path: from }, Given { dir: new, path: to }, flags);
        link(from: *const c_char, to: *const c_char) -> c_int, [] =
            paths::link(here(from), here(to));
        linkat(old: c_int, from: *const c_char, new: c_int, to: *const c_char, flags: c_int)
            -> c_int, [old, new] = match flags {
                0 => paths::link(Given { dir: old, path: from }, Given { dir: new, path: to }),
                _ => None,
            };
        symlink(target: *const c_char, path: *const c_char) -> c_int, [] =
            paths::symlink(target, here(path));
        symlinkat(target: *const c_char, dir: c_int, path: *const c_char) -> c_int, [dir] =
            paths::symlink(target, Given { dir, path });
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn chdir(path: *const c_char) -> c_int {
        // SAFETY: the caller's own argument.
        let done = unsafe { next::chdir(path) };
        paths::moved();
        done
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn fchdir(dir: c_int) -> c_int {
        let _ = paths::solid(dir);
        // SAFETY: the caller's own argument.
        let done = unsafe { next::fchdir(dir) };
        paths::moved();
        done
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn umask(mask: mode_t) -> mode_t {
        paths::masked(mask);
        // SAFETY: the caller's own argument.
        unsafe { next::umask(mask) }
    }

    fn polled(list: *const pollfd, count: nfds_t) {
        paths::idle();
        if !paths::on() || !is_plausible(list.cast(), 0) {
            return;
        }
        for at in 0..count as usize {
            // SAFETY: the caller's list has so many entries.
            let _ = paths::solid(unsafe { (*list.add(at)).fd });
        }
    }

    fn selected(count: c_int, sets: [*const fd_set; 3]) {
        paths::idle();
        if !paths::on() {
            return;
        }
        for set in sets.into_iter().filter(|set| !set.is_null()) {
            for fd in 0..count.min(libc::FD_SETSIZE as c_int) {
                // SAFETY: the caller's set, which holds as many as it says.
                if unsafe { libc::FD_ISSET(fd, set) } {
                    let _ = paths::solid(fd);
                }
            }
        }
    }

    fn watched(fd: c_int) {
        let _ = paths::solid(fd);
    }

    fn submitted(one: *const aiocb) {
        if paths::on() && is_plausible(one.cast(), size_of::<aiocb>()) {
            // SAFETY: the caller's control block.
            let _ = paths::solid(unsafe { (*one).aio_fildes });
        }
    }

    fn all_submitted(list: *const *mut aiocb, count: c_int) {
        if !paths::on() || !is_plausible(list.cast(), 0) {
            return;
        }
        for at in 0..count.max(0) as usize {
            // SAFETY: the caller's list has so many entries.
            submitted(unsafe { *list.add(at) });
        }
    }

    /// Functions that go to the next definition after something was done.
    macro_rules! prepares {
        ($($name:ident($($arg:ident: $type:ty),*) = $first:expr;)*) => {
            $(
                /// As the manual says.
                ///
                /// # Safety
                /// As the manual says.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                    $first;
                    // SAFETY: the caller's own arguments.
                    unsafe { next::$name($($arg),*) }
                }
            )*
        };
    }

    prepares! {
        poll(list: *mut pollfd, count: nfds_t, wait: c_int) = polled(list, count);
        ppoll(list: *mut pollfd, count: nfds_t, wait: *const libc::timespec,
            mask: *const libc::sigset_t) = polled(list, count);
        select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
            wait: *mut libc::timeval) = selected(count, [read, write, except]);
        pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
            wait: *const libc::timespec, mask: *const libc::sigset_t) =
            selected(count, [read, write, except]);
        epoll_ctl(epoll: c_int, what: c_int, fd: c_int, event: *mut std::ffi::c_void) =
            watched(fd);
        aio_read(one: *mut aiocb) = submitted(one);
        aio_read64(one: *mut aiocb) = submitted(one);
        aio_write(one: *mut aiocb) = submitted(one);
        aio_write64(one: *mut aiocb) = submitted(one);
        lio_listio(mode: c_int, list: *const *mut aiocb, count: c_int,
            event: *mut libc::sigevent) = all_submitted(list, count);
        lio_listio64(mode: c_int, list: *const *mut aiocb, count: c_int,
            event: *mut libc::sigevent) = all_submitted(list, count);
    }
}
