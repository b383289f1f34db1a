//! The beginning and the end of processes: positions are in the kernel and data is at the server
//! before another process can look, and a child begins with nothing of its parent's.

use std::cell::RefCell;
use std::sync::MutexGuard;

use crate::aio;
use crate::calls;
use crate::import::{self, Hold};
use crate::paths::{self, Pause};
use crate::real::Inside;
use crate::report;
use crate::signals;
use crate::table::{self, Description};

/// What the thread that forks holds, and has to give back in this order.
struct Held {
    free: MutexGuard<'static, Vec<&'static Description>>,
    contexts: aio::Held,
    hold: Hold,
    pause: Pause,
    _inside: Inside,
}

thread_local! {
    /// What the thread that forks holds meanwhile.
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

extern "C" fn before_fork() {
    let Some(inside) = Inside::enter() else {
        // In a signal handler, amid a call.
        return;
    };
    // First: it is taken first elsewhere too.
    let pause = paths::pause();
    let hold = Hold::new();
    let held = Held {
        hold,
        pause,
        contexts: aio::hold(),
        free: table::hold(),
        _inside: inside,
    };
    HELD.with(|cell| *cell.borrow_mut() = Some(held));
}

extern "C" fn in_parent() {
    if let Some(held) = HELD.with(|held| held.borrow_mut().take()) {
        drop((held.free, held.contexts, held.pause));
        held.hold.parent();
    }
}

extern "C" fn in_child() {
    calls::new_process();
    signals::forget_deferred();
    match HELD.with(|held| held.borrow_mut().take()) {
        Some(held) => {
            drop(held.free);
            aio::child(held.contexts);
            held.hold.child();
            held.pause.child();
        }
        None => {
            // Locks may be held for ever here.
            import::READY.store(false, std::sync::atomic::Ordering::Relaxed);
            paths::off();
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
    calls::new_process();
    // SAFETY: functions that live as long as the process, as a preloaded library is never unloaded.
    // Registered after the allocator's, so that they run while it still works.
    unsafe { pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    calls::aside(report::begin);
    calls::aside(paths::begin);
    import::READY.store(true, std::sync::atomic::Ordering::Release);
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

/// Functions that other processes come from, or that this one ends by; and some whose arguments
/// can't be passed on by a function of Rust's: each calls what prepares it, with its arguments left
/// in their registers, and then jumps to the next definition.
#[cfg(not(test))]
mod before {
    use std::arch::naked_asm;
    use std::ffi::{CStr, c_int, c_void};
    use std::sync::atomic::Ordering;

    use crate::calls;
    use crate::import;
    use crate::paths;
    use crate::real::Next;
    use crate::table;

    fn everything(_: c_int) {
        calls::aside(import::publish_all);
    }

    fn borrowing(first: c_int) {
        everything(first);
        calls::VFORKED.store(true, Ordering::Relaxed);
    }

    fn descriptor(first: c_int) {
        if !table::is_foreign(first) {
            calls::aside(|| import::publish_fd(first));
        }
    }

    /// It gets a descriptor of the kernel's, if it has none.
    fn number(first: c_int) {
        let _ = paths::solid(first);
    }

    fn identity(_: c_int) {
        paths::identity_changes();
    }

    fn elsewhere(_: c_int) {
        paths::off();
    }

    macro_rules! before {
        ($($name:ident, $hook:ident, $what:expr;)*) => {
            $(
                extern "C" fn $hook(first: c_int) -> *mut c_void {
                    static NEXT: Next = Next::new(
                        match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                            Ok(name) => name,
                            Err(_) => panic!("a name without NUL"),
                        },
                    );
                    $what(first);
                    NEXT.get()
                }

                /// As the manual says.
                ///
                /// # Safety
                /// As the manual says.
                #[unsafe(no_mangle)]
                #[unsafe(naked)]
                pub unsafe extern "C" fn $name() {
                    #[cfg(target_arch = "x86_64")]
                    naked_asm!(
                        // Seven words and the return address: the stack is aligned again.
                        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
                        "push rax",
                        "call {hook}",
                        "mov r11, rax",
                        "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                        "jmp r11",
                        hook = sym $hook,
                    );
                    #[cfg(target_arch = "aarch64")]
                    naked_asm!(
                        "stp x29, x30, [sp, #-96]!",
                        "stp x0, x1, [sp, #16]",
                        "stp x2, x3, [sp, #32]",
                        "stp x4, x5, [sp, #48]",
                        "stp x6, x7, [sp, #64]",
                        "str x8, [sp, #80]",
                        "bl {hook}",
                        "mov x16, x0",
                        "ldr x8, [sp, #80]",
                        "ldp x6, x7, [sp, #64]",
                        "ldp x4, x5, [sp, #48]",
                        "ldp x2, x3, [sp, #32]",
                        "ldp x0, x1, [sp, #16]",
                        "ldp x29, x30, [sp], #96",
                        "br x16",
                        hook = sym $hook,
                    );
                }
            )*
        };
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
        system, before_system, everything;
        popen, before_popen, everything;
        dprintf, before_dprintf, descriptor;
        vdprintf, before_vdprintf, descriptor;
        ioctl, before_ioctl, number;
        flock, before_flock, number;
        lockf, before_lockf, number;
        lockf64, before_lockf64, number;
        fchmod, before_fchmod, number;
        fchown, before_fchown, number;
        futimens, before_futimens, number;
        futimes, before_futimes, number;
        fgetxattr, before_fgetxattr, number;
        fsetxattr, before_fsetxattr, number;
        flistxattr, before_flistxattr, number;
        fremovexattr, before_fremovexattr, number;
        fstatfs, before_fstatfs, number;
        fstatfs64, before_fstatfs64, number;
        fstatvfs, before_fstatvfs, number;
        fstatvfs64, before_fstatvfs64, number;
        fpathconf, before_fpathconf, number;
        readahead, before_readahead, number;
        syncfs, before_syncfs, number;
        isatty, before_isatty, number;
        posix_fallocate, before_posix_fallocate, number;
        posix_fallocate64, before_posix_fallocate64, number;
        vmsplice, before_vmsplice, number;
        utimensat, before_utimensat, number;
        futimesat, before_futimesat, number;
        fchmodat, before_fchmodat, number;
        fchownat, before_fchownat, number;
        mknodat, before_mknodat, number;
        mkfifoat, before_mkfifoat, number;
        fdopendir, before_fdopendir, number;
        setuid, before_setuid, identity;
        seteuid, before_seteuid, identity;
        setreuid, before_setreuid, identity;
        setresuid, before_setresuid, identity;
        setgid, before_setgid, identity;
        setegid, before_setegid, identity;
        setregid, before_setregid, identity;
        setresgid, before_setresgid, identity;
        capset, before_capset, identity;
        setfsuid, before_setfsuid, elsewhere;
        setfsgid, before_setfsgid, elsewhere;
        chroot, before_chroot, elsewhere;
        unshare, before_unshare, elsewhere;
        setns, before_setns, elsewhere;
    }
}
