//! Signals that come while a call is served are handled at its end, as the kernel does with calls
//! on files. A handler that ran in the middle of one could need, of the kernel, a file whose lease
//! has to be recalled first, which the interrupted call may hold up; or leave the call for good by
//! `longjmp`.
//!
//! The program's handlers are installed behind [`arrived`]. A signal that finds its thread at work
//! here is noted and raised again, for the same thread and with the same information, when the
//! call has ended. Not put off are signals that faults cause, and handlers for one occasion
//! (SA_RESETHAND).

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use libc::siginfo_t;

use crate::dispatch;
use crate::real::{errno, is_borrowed, is_inside, set_errno, set_inside};

/// The kernel's _NSIG, and one, as there is no signal 0.
const SIGNALS: usize = 65;
/// One call puts off at most so many signals; further ones are handled at once.
const MOST: usize = 16;
/// From here on every one of a signal counts.
const FIRST_REAL_TIME: c_int = 32;

/// The state of this module.
struct Handlers {
    /// The program's handlers behind [`arrived`].
    handlers: [AtomicUsize; SIGNALS],
    /// Whether the kernel tells it more than the number.
    informed: [AtomicBool; SIGNALS],
}

static STATE: Handlers = Handlers {
    handlers: [const { AtomicUsize::new(0) }; SIGNALS],
    informed: [const { AtomicBool::new(false) }; SIGNALS],
};

type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

#[derive(Clone, Copy)]
struct Noted {
    signal: c_int,
    info: Option<siginfo_t>,
}

struct Deferred {
    /// Only this thread and its signal handlers change it.
    count: AtomicUsize,
    list: UnsafeCell<[Noted; MOST]>,
}

const NOTHING: Noted = Noted {
    signal: 0,
    info: None,
};

thread_local! {
    static DEFERRED: Deferred = const {
        Deferred {
            count: AtomicUsize::new(0),
            list: UnsafeCell::new([NOTHING; MOST]),
        }
    };
}

/// Whether signals wait for the end of this thread's call.
#[inline]
pub(crate) fn any_deferred() -> bool {
    DEFERRED.with(|deferred| deferred.count.load(Ordering::Relaxed) > 0)
}

/// In a child process: they are the parent's.
pub(crate) fn forget_deferred() {
    DEFERRED.with(|deferred| deferred.count.store(0, Ordering::Relaxed));
}

/// Raises what was put off. The thread is outside again, so the handlers run here.
#[cold]
pub(crate) fn raise_deferred() {
    set_inside(true);
    let (list, count) = DEFERRED.with(|deferred| {
        loop {
            let count = deferred.count.load(Ordering::SeqCst).min(MOST);
            // SAFETY: only handlers on this thread write, each to an element of its own at the end.
            let list = unsafe { *deferred.list.get() };
            let none =
                deferred
                    .count
                    .compare_exchange(count, 0, Ordering::SeqCst, Ordering::SeqCst);
            if none.is_ok() {
                return (list, count);
            }
        }
    });
    set_inside(false);
    let before = errno();
    for noted in &list[..count] {
        // SAFETY: no pointers but to the information, which is a local. A process may send itself
        // any information.
        unsafe {
            let (process, thread) = (libc::getpid(), crate::real::syscall()(libc::SYS_gettid));
            let queued = noted.info.as_ref().is_some_and(|info| {
                let (call, info) = (libc::SYS_rt_tgsigqueueinfo, std::ptr::from_ref(info));
                crate::real::syscall()(call, process, thread, noted.signal, info) == 0
            });
            if !queued {
                crate::real::syscall()(libc::SYS_tgkill, process, thread, noted.signal);
            }
        }
    }
    set_errno(before);
}

fn defer(signal: c_int, info: *mut siginfo_t) -> bool {
    if !is_inside() || is_borrowed() {
        return false;
    }
    DEFERRED.with(|deferred| {
        let list = deferred.list.get().cast::<Noted>();
        let count = deferred.count.load(Ordering::SeqCst).min(MOST);
        // SAFETY: elements below the count, of this thread.
        let seen = |index| unsafe { (*list.add(index)).signal == signal };
        if signal < FIRST_REAL_TIME && (0..count).any(seen) {
            return true;
        }
        let index = deferred.count.fetch_add(1, Ordering::SeqCst);
        if index >= MOST {
            deferred.count.fetch_sub(1, Ordering::SeqCst);
            return false;
        }
        let informed = STATE.informed[signal as usize].load(Ordering::Relaxed);
        // SAFETY: this element was just taken, by this handler alone; and `info` is the kernel's
        // where the handler asked for it.
        unsafe {
            let info = informed.then(|| info.read());
            list.add(index).write(Noted { signal, info });
        }
        true
    })
}

/// The kernel calls this in place of the program's handlers.
extern "C" fn arrived(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    if defer(signal, info) {
        return;
    }
    let handler = STATE.handlers[signal as usize].load(Ordering::Acquire);
    // SAFETY: a function that the program has given; one that wants fewer arguments ignores some.
    let handler = unsafe { std::mem::transmute::<usize, Handler>(handler) };
    handler(signal, info, context);
    // The signals that the program has left there are blocked when this returns.
    if let Some(context) = unsafe {
        // SAFETY: of the kernel, or null.
        context.cast::<libc::ucontext_t>().as_mut()
    } {
        // SAFETY: a set.
        unsafe { libc::sigdelset(&mut context.uc_sigmask, libc::SIGSYS) };
    }
}

/// Whether a handler of this signal is put behind [`arrived`].
fn takes(signal: c_int, handler: usize) -> bool {
    let fault = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
        libc::SIGSYS,
    ];
    (1..SIGNALS as c_int).contains(&signal)
        && !fault.contains(&signal)
        && ![libc::SIG_DFL, libc::SIG_IGN, libc::SIG_ERR].contains(&handler)
        // A child that borrows this memory has handlers of its own.
        && !is_borrowed()
}

/// The program's handler where `found` is [`arrived`].
fn shown(found: usize, before: usize) -> usize {
    if found == arrived as *const () as usize {
        before
    } else if found == dispatch::handler() {
        libc::SIG_DFL
    } else {
        found
    }
}

fn handler_of(signal: c_int) -> usize {
    usize::try_from(signal)
        .ok()
        .and_then(|signal| STATE.handlers.get(signal))
        .map_or(libc::SIG_DFL, |handler| handler.load(Ordering::Acquire))
}

/// Functions under the names by which programs know them.
#[cfg(not(test))]
mod exported {
    use libc::{SA_RESETHAND, SA_SIGINFO, sigaction as Action};

    use super::*;
    use crate::real::{aliases, exports};

    exports! {
        fn sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
            let before = handler_of(signal);
            // SAFETY: the caller's, or null.
            let mut action = unsafe { new.as_ref() }.copied();
            if let Some(action) = &mut action {
                taking(signal);
                // A call around the C library during the handler would end the program.
                // SAFETY: a copy of the caller's set.
                unsafe { libc::sigdelset(&mut action.sa_mask, libc::SIGSYS) };
            }
            let new = match &mut action {
                Some(action)
                    if takes(signal, action.sa_sigaction) && action.sa_flags & SA_RESETHAND == 0 =>
                {
                    let informed = action.sa_flags & SA_SIGINFO != 0;
                    STATE.informed[signal as usize].store(informed, Ordering::Relaxed);
                    STATE.handlers[signal as usize].store(action.sa_sigaction, Ordering::Release);
                    action.sa_sigaction = arrived as *const () as usize;
                    std::ptr::from_ref(action)
                }
                Some(action) => std::ptr::from_ref(action),
                None => new,
            };
            // SAFETY: the caller's own arguments, or a copy.
            let done = unsafe { next(signal, new, old) };
            if done == 0 {
                // SAFETY: filled by the call, or null.
                if let Some(old) = unsafe { old.as_mut() } {
                    old.sa_sigaction = shown(old.sa_sigaction, before);
                }
            }
            done
        }
    }

    /// SIGSYS becomes the program's.
    fn taking(signal: c_int) {
        if signal == libc::SIGSYS {
            dispatch::fall_back(dispatch::Why::Signals);
        }
    }

    exports! {
        fn signal(signal: c_int, handler: usize) -> usize {
            taking(signal);
            let before = handler_of(signal);
            let handler = match takes(signal, handler) {
                true => {
                    STATE.informed[signal as usize].store(false, Ordering::Relaxed);
                    STATE.handlers[signal as usize].store(handler, Ordering::Release);
                    arrived as *const () as usize
                }
                false => handler,
            };
            // SAFETY: the caller's own arguments, or our handler.
            shown(unsafe { next(signal, handler) }, before)
        }
    }

    aliases! {
        bsd_signal(signal: c_int, handler: usize) -> usize = signal;
    }
}
