//! SIGSYS stays unblocked: the kernel ends a program whose call traps while it is blocked.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec};

use crate::real::{exports, is_inside};

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
        exports! {$(
            fn $name($($arg: $type),*) -> c_int {
                let mut copy = MaybeUninit::uninit();
                // Threads of this library have no dispatch, and block all.
                let $set = match $blocks && !is_inside() {
                    true => without($set, &mut copy),
                    false => $set,
                };
                // SAFETY: the caller's own arguments, or a copy.
                unsafe { next($($arg),*) }
            }
        )*}
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

/// Functions that block signals in other ways; SIGSYS is unblocked after them.
mod older {
    use super::*;

    crate::real::next! {
        pthread_sigmask(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int;
    }

    fn unblocked<T>(done: T) -> T {
        let mut set = MaybeUninit::<sigset_t>::uninit();
        // SAFETY: a set that is filled here.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGSYS);
            pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
        }
        done
    }

    macro_rules! unblocking {
        ($($name:ident($arg:ident: $type:ty);)*) => {
            exports! {$(
                fn $name($arg: $type) -> c_int {
                    // SAFETY: the caller's own argument.
                    unblocked(unsafe { next($arg) })
                }
            )*}
        };
    }

    unblocking! {
        sighold(signal: c_int);
        sigblock(mask: c_int);
        sigsetmask(mask: c_int);
    }

    exports! {
        fn sigset(signal: c_int, handler: usize) -> usize {
            if signal == libc::SIGSYS {
                crate::dispatch::fall_back(crate::dispatch::Why::Signals);
            }
            // SAFETY: the caller's own arguments.
            unblocked(unsafe { next(signal, handler) })
        }
    }
}

/// setcontext(3), whose mask the program may have filled.
#[cfg(target_arch = "x86_64")]
mod contexts {
    use libc::ucontext_t;

    use super::*;

    /// # Safety
    /// A context, or null.
    unsafe fn unblock(to: *mut ucontext_t) {
        // SAFETY: the caller's.
        if let Some(to) = unsafe { to.as_mut() } {
            // SAFETY: a set.
            unsafe { libc::sigdelset(&mut to.uc_sigmask, libc::SIGSYS) };
        }
    }

    exports! {
        fn setcontext(to: *mut ucontext_t) -> c_int {
            // SAFETY: the caller's own.
            unsafe { unblock(to) };
            // SAFETY: as above.
            unsafe { next(to) }
        }

        fn swapcontext(from: *mut ucontext_t, to: *mut ucontext_t) -> c_int {
            // SAFETY: the caller's own.
            unsafe { unblock(to) };
            // SAFETY: as above. It returns to this frame, which the C library has saved with the rest.
            unsafe { next(from, to) }
        }
    }
}

/// longjmp(3), which restores a mask that was saved before this library took SIGSYS out of it, or that the program
/// has filled.
#[cfg(target_arch = "x86_64")]
mod jumps {
    use std::arch::naked_asm;

    use super::*;
    use crate::real::{Next, before};

    /// The C library's struct __jmp_buf_tag (bits/types/struct___jmp_buf_tag.h).
    #[repr(C)]
    struct JumpBuffer {
        registers: [usize; 8],
        mask_was_saved: c_int,
        mask: sigset_t,
    }

    fn jumping(to: usize, _: usize, _: usize) {
        // SAFETY: the caller's, from sigsetjmp(3).
        let to = unsafe { &mut *(to as *mut JumpBuffer) };
        if to.mask_was_saved != 0 {
            // SAFETY: a set.
            unsafe { libc::sigdelset(&mut to.mask, libc::SIGSYS) };
        }
    }

    before! {
        longjmp, before_longjmp, jumping;
        _longjmp, before_bare_longjmp, jumping;
        siglongjmp, before_siglongjmp, jumping;
        __longjmp_chk, before_longjmp_chk, jumping;
    }
}
