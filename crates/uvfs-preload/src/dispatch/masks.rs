//! SIGSYS stays unblocked: the kernel ends a program whose call traps while it is blocked.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;

use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec};

use crate::real::{Next, is_inside, next};

mod next {
    use super::*;

    next! {
        sigprocmask(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int;
        pthread_sigmask(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int;
        pthread_attr_setsigmask_np(how: *mut c_void, mask: *const sigset_t) -> c_int;
        sigsuspend(mask: *const sigset_t) -> c_int;
        ppoll(list: *mut pollfd, count: nfds_t, time: *const timespec, mask: *const sigset_t) -> c_int;
        __ppoll_chk(list: *mut pollfd, count: nfds_t, time: *const timespec, mask: *const sigset_t,
            room: usize) -> c_int;
        pselect(count: c_int, reads: *mut fd_set, writes: *mut fd_set, others: *mut fd_set,
            time: *const timespec, mask: *const sigset_t) -> c_int;
        epoll_pwait(fd: c_int, to: *mut epoll_event, most: c_int, time: c_int,
            mask: *const sigset_t) -> c_int;
        epoll_pwait2(fd: c_int, to: *mut epoll_event, most: c_int, time: *const timespec,
            mask: *const sigset_t) -> c_int;
    }
}

/// The set without SIGSYS: itself, or a copy.
fn without(set: *const sigset_t, copy: &mut MaybeUninit<sigset_t>) -> *const sigset_t {
    // SAFETY: the caller's, or null.
    if set.is_null() || unsafe { libc::sigismember(set, libc::SIGSYS) } != 1 {
        return set;
    }
    let copy = copy.as_mut_ptr();
    // SAFETY: the caller's, and room for it.
    unsafe {
        copy.copy_from(set, 1);
        libc::sigdelset(copy, libc::SIGSYS);
    }
    copy
}

/// Functions with a set that is to be blocked, if the condition holds.
macro_rules! blocking {
    ($($name:ident($($arg:ident: $type:ty),*), $set:ident if $blocks:expr;)*) => {
        $(
            /// As the manual says.
            ///
            /// # Safety
            /// As the manual says.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                let mut copy = MaybeUninit::uninit();
                // Threads of this library have no dispatch, and block all.
                let $set = match $blocks && !is_inside() {
                    true => without($set, &mut copy),
                    false => $set,
                };
                // SAFETY: the caller's own arguments, or a copy.
                unsafe { next::$name($($arg),*) }
            }
        )*
    };
}

blocking! {
    sigprocmask(how: c_int, new: *const sigset_t, old: *mut sigset_t),
        new if how != libc::SIG_UNBLOCK;
    pthread_sigmask(how: c_int, new: *const sigset_t, old: *mut sigset_t),
        new if how != libc::SIG_UNBLOCK;
    pthread_attr_setsigmask_np(how: *mut c_void, mask: *const sigset_t), mask if true;
    sigsuspend(mask: *const sigset_t), mask if true;
    ppoll(list: *mut pollfd, count: nfds_t, time: *const timespec, mask: *const sigset_t),
        mask if true;
    __ppoll_chk(list: *mut pollfd, count: nfds_t, time: *const timespec, mask: *const sigset_t,
        room: usize), mask if true;
    pselect(count: c_int, reads: *mut fd_set, writes: *mut fd_set, others: *mut fd_set,
        time: *const timespec, mask: *const sigset_t), mask if true;
    epoll_pwait(fd: c_int, to: *mut epoll_event, most: c_int, time: c_int, mask: *const sigset_t),
        mask if true;
    epoll_pwait2(fd: c_int, to: *mut epoll_event, most: c_int, time: *const timespec,
        mask: *const sigset_t), mask if true;
}
