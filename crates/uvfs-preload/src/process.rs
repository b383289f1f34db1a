//! The beginning and the end of processes: positions are in the kernel and data is at the server
//! before another process can look, and a child begins with nothing of its parent's.

use std::cell::RefCell;

use crate::aio;
use crate::calls;
use crate::dispatch;
use crate::guard::{Inside, aside};
use crate::import::{self, Hold};
use crate::promotion;
use crate::real;
use crate::report;
use crate::signals;
use crate::table;

/// The locks that a forking thread holds, and gives back in this order.
struct ForkLocks {
    table: table::TableLocks,
    contexts: aio::ContextsLock,
    hold: Hold,
    _inside: Inside,
}

thread_local! {
    /// The locks of a fork that this thread has begun.
    static HELD: RefCell<Option<ForkLocks>> = const { RefCell::new(None) };
}

extern "C" fn before_fork() {
    let Some(inside) = Inside::enter() else {
        // In a signal handler, amid a call.
        return;
    };
    import::show();
    // In the order of their ranks.
    let hold = Hold::new();
    let contexts = aio::hold();
    let table = table::hold();
    let held = ForkLocks {
        table,
        contexts,
        hold,
        _inside: inside,
    };
    HELD.with(|cell| *cell.borrow_mut() = Some(held));
}

extern "C" fn in_parent() {
    if let Some(held) = HELD.with(|held| held.borrow_mut().take()) {
        drop((held.table, held.contexts));
        held.hold.parent();
    }
}

extern "C" fn in_child() {
    real::new_process();
    dispatch::child();
    table::forget_races();
    signals::forget_deferred();
    match HELD.with(|held| held.borrow_mut().take()) {
        Some(held) => {
            drop(held.table);
            aio::child(held.contexts);
            held.hold.child();
        }
        None => {
            // Locks may be held for ever here.
            import::set_ready(false);
            table::forget_all();
        }
    }
}

unsafe extern "C" {
    fn pthread_atfork(
        before: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> std::ffi::c_int;
}

extern "C" fn begin() {
    // SAFETY: called once, before anything forks.
    unsafe { dlmalloc::enable_alloc_after_fork() };
    // SAFETY: functions that live as long as the process, as a preloaded library is never unloaded.
    // Registered after the allocator's, so that they run while it still works.
    unsafe { pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    dispatch::last::begin();
    promotion::begin();
    aside(report::begin);
    import::set_ready(true);
}

extern "C" fn end() {
    calls::ending();
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

/// Functions that make other processes or replace this one, and some whose arguments a Rust function
/// can't pass on.
#[cfg(not(test))]
#[allow(non_snake_case)] // As C has them.
mod before {
    use crate::calls;
    use crate::dispatch::{self, Why};
    use crate::guard::aside;
    use crate::import;
    use crate::real::{self, Next, before};
    use crate::table;
    use std::arch::naked_asm;
    use std::ffi::{c_int, c_void};

    /// The libc crate has it on some machines only.
    const SIGEV_THREAD: c_int = 2;

    fn everything(_: usize, _: usize, _: usize) {
        aside(calls::publish_all);
    }

    fn borrowing(first: usize, second: usize, third: usize) {
        everything(first, second, third);
        real::vforks();
    }

    /// clone(2), whose flags come third. The child is not armed.
    fn cloning(first: usize, second: usize, flags: usize) {
        let flags = flags as c_int;
        let shares = flags & libc::CLONE_VM != 0 && flags & libc::CLONE_VFORK == 0;
        if shares || flags & libc::CLONE_FILES != 0 {
            dispatch::fall_back(Why::Threads);
        }
        borrowing(first, second, flags as usize);
    }

    /// unshare(2): the thread would have descriptors of its own.
    fn parting(flags: usize, _: usize, _: usize) {
        if flags as c_int & libc::CLONE_FILES != 0 {
            dispatch::fall_back(Why::Threads);
        }
    }

    /// Threads of the C library's making run functions of the program, or use its descriptors.
    fn threads(_: usize, _: usize, _: usize) {
        dispatch::fall_back(Why::Threads);
    }

    /// timer_create(2) and mq_notify(3), which take a sigevent second.
    fn notifying(_: usize, event: usize, _: usize) {
        let event = event as *const libc::sigevent;
        // SAFETY: the caller's, or null.
        if unsafe { event.as_ref() }.is_some_and(|event| event.sigev_notify == SIGEV_THREAD) {
            dispatch::fall_back(Why::Threads);
        }
    }

    /// A descriptor that something else holds comes to be shared, or gets another number.
    fn sharing(_: usize, _: usize, _: usize) {
        dispatch::fall_back(Why::Call);
    }

    /// dlopen(3), whose mode comes second. A library that is bound to its own dependencies first calls the C
    /// library directly. The linker looks at the caller.
    fn loading(_: usize, mode: usize, _: usize) {
        if mode as c_int & libc::RTLD_DEEPBIND != 0 {
            dispatch::bar(Why::Bound);
        }
    }

    /// The process ends inside the C library.
    fn ending(_: usize, _: usize, _: usize) {
        calls::ending();
    }

    fn descriptor(first: usize, _: usize, _: usize) {
        let fd = first as c_int;
        if !table::is_foreign(fd) {
            aside(|| import::publish_fd(fd));
        }
    }

    before! {
        vfork, before_vfork, borrowing;
        execve, before_execve, everything;
        execv, before_execv, everything;
        execvp, before_execvp, everything;
        execvpe, before_execvpe, everything;
        execl, before_execl, everything;
        execlp, before_execlp, everything;
        execle, before_execle, everything;
        fexecve, before_fexecve, everything;
        execveat, before_execveat, everything;
        posix_spawn, before_posix_spawn, everything;
        posix_spawnp, before_posix_spawnp, everything;
        clone, before_clone, cloning;
        __clone, before_clone_alias, cloning;
        __vfork, before_vfork_alias, borrowing;
        unshare, before_unshare, parting;
        pidfd_getfd, before_pidfd_getfd, sharing;
        login_tty, before_login_tty, sharing;
        daemon, before_daemon, everything;
        wordexp, before_wordexp, everything;
        quick_exit, before_quick_exit, ending;
        timer_create, before_timer_create, notifying;
        mq_notify, before_mq_notify, notifying;
        aio_read, before_aio_read, threads;
        aio_read64, before_aio_read64, threads;
        aio_write, before_aio_write, threads;
        aio_write64, before_aio_write64, threads;
        aio_fsync, before_aio_fsync, threads;
        aio_fsync64, before_aio_fsync64, threads;
        lio_listio, before_lio_listio, threads;
        lio_listio64, before_lio_listio64, threads;
        getaddrinfo_a, before_getaddrinfo_a, threads;
        dlopen, before_dlopen, loading;
        _Fork, before_bare_fork, borrowing;
        popen, before_popen, everything;
        system, before_system, everything;
        dprintf, before_dprintf, descriptor;
        vdprintf, before_vdprintf, descriptor;
        // Locks count from the position.
        lockf, before_lockf, descriptor;
        lockf64, before_lockf64, descriptor;
    }
}

/// Limits of files' sizes, which are the kernel's to keep.
#[cfg(not(test))]
mod around {
    use std::ffi::c_int;

    use libc::pid_t;

    use crate::guard::aside;
    use crate::import;
    use crate::real::exports;

    fn limits(what: c_int, to: *const libc::rlimit) {
        if what == libc::RLIMIT_FSIZE as c_int && !to.is_null() {
            aside(import::all_to_kernel);
        }
    }

    /// Each with the arguments that are the limit's kind and the new limit.
    macro_rules! limiting {
        ($($what:ident, $new:ident => $name:ident($($arg:ident: $type:ty),*);)*) => {
            exports! {$(
                fn $name($($arg: $type),*) -> c_int {
                    limits($what, $new);
                    // SAFETY: the caller's own arguments.
                    unsafe { next($($arg),*) }
                }
            )*}
        };
    }

    limiting! {
        what, to => setrlimit(what: c_int, to: *const libc::rlimit);
        what, to => setrlimit64(what: c_int, to: *const libc::rlimit);
        what, to => prlimit(process: pid_t, what: c_int, to: *const libc::rlimit,
            old: *mut libc::rlimit);
        what, to => prlimit64(process: pid_t, what: c_int, to: *const libc::rlimit,
            old: *mut libc::rlimit);
    }
}
