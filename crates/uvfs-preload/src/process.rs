//! The beginning and the end of processes: positions are in the kernel and data is at the server
//! before another process can look, and a child begins with nothing of its parent's.

use std::cell::RefCell;
use std::sync::MutexGuard;

use crate::aio;
use crate::calls;
use crate::dirs;
use crate::engage;
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
    streams: dirs::Held,
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
    // In the order of all locks.
    let pause = paths::pause();
    let hold = Hold::new();
    let streams = dirs::hold();
    let contexts = aio::hold();
    let free = table::hold();
    let held = Held {
        free,
        contexts,
        streams,
        hold,
        pause,
        _inside: inside,
    };
    HELD.with(|cell| *cell.borrow_mut() = Some(held));
}

extern "C" fn in_parent() {
    if let Some(held) = HELD.with(|held| held.borrow_mut().take()) {
        drop((held.free, held.contexts, held.streams));
        // Before anything can be imported or opened.
        held.hold.parent();
        drop(held.pause);
    }
}

extern "C" fn in_child() {
    calls::new_process();
    table::apart_no_more();
    signals::forget_deferred();
    match HELD.with(|held| held.borrow_mut().take()) {
        Some(held) => {
            drop(held.free);
            aio::child(held.contexts);
            dirs::child(held.streams);
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
    engage::begin();
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

    /// Nobody knows any more whose paths these are, or what other processes do with descriptors.
    fn elsewhere(first: c_int) {
        paths::off();
        everything(first);
    }

    /// It may wait for long.
    fn waiting(_: c_int) {
        paths::idle();
    }

    /// With all its arguments, the number first.
    extern "C" fn before_syscall(saved: *const [usize; 7]) -> *mut c_void {
        static NEXT: Next = Next::new(c"syscall");
        // SAFETY: saved below, in the order of the arguments on aarch64 and against it on x86_64.
        let mut words = unsafe { *saved };
        if cfg!(target_arch = "x86_64") {
            words.reverse();
        }
        let [number, ref arguments @ .., _] = words;
        paths::calls_the_kernel(number as i64, arguments);
        NEXT.get()
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    #[unsafe(naked)]
    pub unsafe extern "C" fn syscall() {
        #[cfg(target_arch = "x86_64")]
        naked_asm!(
            "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
            "push rax",
            "mov rdi, rsp",
            "call {hook}",
            "mov r11, rax",
            "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
            "jmp r11",
            hook = sym before_syscall,
        );
        #[cfg(target_arch = "aarch64")]
        naked_asm!(
            "stp x29, x30, [sp, #-80]!",
            "stp x0, x1, [sp, #16]",
            "stp x2, x3, [sp, #32]",
            "stp x4, x5, [sp, #48]",
            "stp x6, x7, [sp, #64]",
            "add x0, sp, #16",
            "bl {hook}",
            "mov x16, x0",
            "ldp x6, x7, [sp, #64]",
            "ldp x4, x5, [sp, #48]",
            "ldp x2, x3, [sp, #32]",
            "ldp x0, x1, [sp, #16]",
            "ldp x29, x30, [sp], #80",
            "br x16",
            hook = sym before_syscall,
        );
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
                        // Seven words and the return address: the stack is aligned again. dprintf's
                        // arguments may be floating-point numbers.
                        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
                        "push rax",
                        "sub rsp, 128",
                        "movaps [rsp], xmm0", "movaps [rsp + 16], xmm1",
                        "movaps [rsp + 32], xmm2", "movaps [rsp + 48], xmm3",
                        "movaps [rsp + 64], xmm4", "movaps [rsp + 80], xmm5",
                        "movaps [rsp + 96], xmm6", "movaps [rsp + 112], xmm7",
                        "call {hook}",
                        "mov r11, rax",
                        "movaps xmm0, [rsp]", "movaps xmm1, [rsp + 16]",
                        "movaps xmm2, [rsp + 32]", "movaps xmm3, [rsp + 48]",
                        "movaps xmm4, [rsp + 64]", "movaps xmm5, [rsp + 80]",
                        "movaps xmm6, [rsp + 96]", "movaps xmm7, [rsp + 112]",
                        "add rsp, 128",
                        "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                        "jmp r11",
                        hook = sym $hook,
                    );
                    #[cfg(target_arch = "aarch64")]
                    naked_asm!(
                        "stp x29, x30, [sp, #-224]!",
                        "stp x0, x1, [sp, #16]",
                        "stp x2, x3, [sp, #32]",
                        "stp x4, x5, [sp, #48]",
                        "stp x6, x7, [sp, #64]",
                        "str x8, [sp, #80]",
                        "stp q0, q1, [sp, #96]",
                        "stp q2, q3, [sp, #128]",
                        "stp q4, q5, [sp, #160]",
                        "stp q6, q7, [sp, #192]",
                        "bl {hook}",
                        "mov x16, x0",
                        "ldp q6, q7, [sp, #192]",
                        "ldp q4, q5, [sp, #160]",
                        "ldp q2, q3, [sp, #128]",
                        "ldp q0, q1, [sp, #96]",
                        "ldr x8, [sp, #80]",
                        "ldp x6, x7, [sp, #64]",
                        "ldp x4, x5, [sp, #48]",
                        "ldp x2, x3, [sp, #32]",
                        "ldp x0, x1, [sp, #16]",
                        "ldp x29, x30, [sp], #224",
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
        clone, before_clone, borrowing;
        _Fork, before_bare_fork, borrowing;
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
        setfsuid, before_setfsuid, elsewhere;
        setfsgid, before_setfsgid, elsewhere;
        chroot, before_chroot, elsewhere;
        unshare, before_unshare, elsewhere;
        setns, before_setns, elsewhere;
        pivot_root, before_pivot_root, elsewhere;
        sleep, before_sleep, waiting;
        usleep, before_usleep, waiting;
        nanosleep, before_nanosleep, waiting;
        clock_nanosleep, before_clock_nanosleep, waiting;
        pause, before_pause, waiting;
        sigsuspend, before_sigsuspend, waiting;
        epoll_wait, before_epoll_wait, waiting;
        epoll_pwait, before_epoll_pwait, waiting;
        accept, before_accept, waiting;
        accept4, before_accept4, waiting;
        recv, before_recv, waiting;
        recvfrom, before_recvfrom, waiting;
        recvmsg, before_recvmsg, waiting;
        pthread_join, before_pthread_join, waiting;
    }
}

/// Functions of which something has to be known when they return, and the threads of this library.
#[cfg(not(test))]
mod after {
    use libc::{
        FILE, gid_t, id_t, idtype_t, pid_t, pthread_attr_t, pthread_t, rusage, siginfo_t, uid_t,
    };
    use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

    use crate::calls;
    use crate::import;
    use crate::paths;
    use crate::real::{is_inside, set_inside};

    type Start = extern "C" fn(*mut c_void) -> *mut c_void;

    mod next {
        use super::*;
        use crate::real::{Next, next};

        next! {
            setuid(user: uid_t) -> c_int;
            seteuid(user: uid_t) -> c_int;
            setreuid(real: uid_t, user: uid_t) -> c_int;
            setresuid(real: uid_t, user: uid_t, saved: uid_t) -> c_int;
            setgid(group: gid_t) -> c_int;
            setegid(group: gid_t) -> c_int;
            setregid(real: gid_t, group: gid_t) -> c_int;
            setresgid(real: gid_t, group: gid_t, saved: gid_t) -> c_int;
            capset(header: *mut c_void, data: *const c_void) -> c_int;
            mount(from: *const c_char, at: *const c_char, kind: *const c_char, flags: c_ulong,
                data: *const c_void) -> c_int;
            umount(at: *const c_char) -> c_int;
            umount2(at: *const c_char, flags: c_int) -> c_int;
            move_mount(from_fd: c_int, from: *const c_char, to_fd: c_int, to: *const c_char,
                flags: u32) -> c_int;
            mount_setattr(fd: c_int, path: *const c_char, flags: u32, attr: *mut c_void,
                size: usize) -> c_int;
            wait(status: *mut c_int) -> pid_t;
            waitpid(child: pid_t, status: *mut c_int, options: c_int) -> pid_t;
            wait3(status: *mut c_int, options: c_int, usage: *mut rusage) -> pid_t;
            wait4(child: pid_t, status: *mut c_int, options: c_int, usage: *mut rusage) -> pid_t;
            waitid(kind: idtype_t, child: id_t, info: *mut siginfo_t, options: c_int) -> c_int;
            system(command: *const c_char) -> c_int;
            pclose(stream: *mut FILE) -> c_int;
            setrlimit(what: c_int, to: *const libc::rlimit) -> c_int;
            setrlimit64(what: c_int, to: *const libc::rlimit) -> c_int;
            prlimit(process: pid_t, what: c_int, to: *const libc::rlimit,
                old: *mut libc::rlimit) -> c_int;
            prlimit64(process: pid_t, what: c_int, to: *const libc::rlimit,
                old: *mut libc::rlimit) -> c_int;
            pthread_create(to: *mut pthread_t, how: *const pthread_attr_t, start: Start,
                argument: *mut c_void) -> c_int;
        }
    }

    macro_rules! around {
        ($($before:expr, $after:expr => $name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
            $(
                /// As the manual says.
                ///
                /// # Safety
                /// As the manual says.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                    $before;
                    // SAFETY: the caller's own arguments.
                    let done = unsafe { next::$name($($arg),*) };
                    $after;
                    done
                }
            )*
        };
    }

    fn limits(what: c_int) {
        if what == libc::RLIMIT_FSIZE as c_int {
            calls::aside(import::all_to_kernel);
        }
    }

    fn nothing() {}

    around! {
        nothing(), paths::identity_changed() => setuid(user: uid_t) -> c_int;
        nothing(), paths::identity_changed() => seteuid(user: uid_t) -> c_int;
        nothing(), paths::identity_changed() => setreuid(real: uid_t, user: uid_t) -> c_int;
        nothing(), paths::identity_changed() => setresuid(real: uid_t, user: uid_t, saved: uid_t) -> c_int;
        nothing(), paths::identity_changed() => setgid(group: gid_t) -> c_int;
        nothing(), paths::identity_changed() => setegid(group: gid_t) -> c_int;
        nothing(), paths::identity_changed() => setregid(real: gid_t, group: gid_t) -> c_int;
        nothing(), paths::identity_changed() => setresgid(real: gid_t, group: gid_t, saved: gid_t) -> c_int;
        nothing(), paths::identity_changed() => capset(header: *mut c_void, data: *const c_void) -> c_int;
        nothing(), paths::identity_changed() => mount(from: *const c_char, at: *const c_char,
            kind: *const c_char, flags: c_ulong, data: *const c_void) -> c_int;
        paths::idle(), paths::identity_changed() => umount(at: *const c_char) -> c_int;
        paths::idle(), paths::identity_changed() => umount2(at: *const c_char, flags: c_int) -> c_int;
        nothing(), paths::identity_changed() => move_mount(from_fd: c_int, from: *const c_char, to_fd: c_int,
            to: *const c_char, flags: u32) -> c_int;
        nothing(), paths::identity_changed() => mount_setattr(fd: c_int, path: *const c_char, flags: u32,
            attr: *mut c_void, size: usize) -> c_int;
        paths::idle(), paths::waited() => wait(status: *mut c_int) -> pid_t;
        paths::idle(), paths::waited() => waitpid(child: pid_t, status: *mut c_int, options: c_int)
            -> pid_t;
        paths::idle(), paths::waited() => wait3(status: *mut c_int, options: c_int,
            usage: *mut rusage) -> pid_t;
        paths::idle(), paths::waited() => wait4(child: pid_t, status: *mut c_int, options: c_int,
            usage: *mut rusage) -> pid_t;
        paths::idle(), paths::waited() => waitid(kind: idtype_t, child: id_t, info: *mut siginfo_t,
            options: c_int) -> c_int;
        calls::aside(import::publish_all), paths::waited() => system(command: *const c_char) -> c_int;
        paths::idle(), paths::waited() => pclose(stream: *mut FILE) -> c_int;
        limits(what), nothing() => setrlimit(what: c_int, to: *const libc::rlimit) -> c_int;
        limits(what), nothing() => setrlimit64(what: c_int, to: *const libc::rlimit) -> c_int;
        if !to.is_null() { limits(what) }, nothing() => prlimit(process: pid_t, what: c_int,
            to: *const libc::rlimit, old: *mut libc::rlimit) -> c_int;
        if !to.is_null() { limits(what) }, nothing() => prlimit64(process: pid_t, what: c_int,
            to: *const libc::rlimit, old: *mut libc::rlimit) -> c_int;
    }

    struct Begin {
        start: Start,
        argument: *mut c_void,
    }

    /// The body of a thread of this library's own: all that it calls is the C library's.
    extern "C" fn work(begin: *mut c_void) -> *mut c_void {
        set_inside(true);
        // SAFETY: of `pthread_create` below, for this thread alone.
        let begin = unsafe { Box::from_raw(begin.cast::<Begin>()) };
        (begin.start)(begin.argument)
    }

    /// As the manual says. Threads that are started by this library are at work in it for as long as
    /// they live: they answer recalls and look for servers, so they must not need what others hold
    /// who wait for them.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn pthread_create(
        to: *mut pthread_t,
        how: *const pthread_attr_t,
        start: Start,
        argument: *mut c_void,
    ) -> c_int {
        if !is_inside() {
            // SAFETY: the caller's own arguments.
            return unsafe { next::pthread_create(to, how, start, argument) };
        }
        let begin = Box::into_raw(Box::new(Begin { start, argument }));
        // SAFETY: the caller's own arguments, and a function that takes what it gets.
        let done = unsafe { next::pthread_create(to, how, work, begin.cast()) };
        if done != 0 {
            // SAFETY: no thread has it.
            drop(unsafe { Box::from_raw(begin) });
        }
        done
    }
}
