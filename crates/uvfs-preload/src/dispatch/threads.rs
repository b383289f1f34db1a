//! The threads of the program, each armed as it starts.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

/// Threads that are known at a time. A process with more is not served.
const MOST: usize = 1 << 12;

pub(crate) struct Threads {
    /// The numbers of the threads that are armed; those of threads that have ended may stay for a while.
    armed: [AtomicI32; MOST],
    /// Threads that are made and not armed yet.
    begin: AtomicI32,
}

impl Threads {
    pub(super) const fn new() -> Self {
        Self {
            armed: [const { AtomicI32::new(0) }; MOST],
            begin: AtomicI32::new(0),
        }
    }

    /// Whether a thread is armed.
    pub(super) fn has(&self, thread: c_int) -> bool {
        self.armed
            .iter()
            .any(|slot| slot.load(Ordering::Acquire) == thread)
    }

    /// Whether a thread is made and not armed yet.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn any_begins(&self) -> bool {
        self.begin.load(Ordering::Acquire) > 0
    }

    /// Whether a thread of the program lives beside `own`. All are armed where the dispatch sees their calls.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn others(&self, own: c_int) -> bool {
        self.any_begins()
            || self.armed.iter().any(|slot| {
                let thread = slot.load(Ordering::Acquire);
                thread != 0 && thread != own && lives(thread)
            })
    }

    /// A thread was armed.
    fn add(&self, thread: c_int) {
        let take = |free: &dyn Fn(c_int) -> bool| {
            self.armed.iter().any(|slot| {
                let now = slot.load(Ordering::Relaxed);
                let order = Ordering::AcqRel;
                free(now) && (slot.compare_exchange(now, thread, order, Ordering::Relaxed)).is_ok()
            })
        };
        // Without a place it counts as one that is not armed.
        let _ = take(&|now| now == 0) || take(&|now| !lives(now));
    }

    /// A thread is not armed any more.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn remove(&self, thread: c_int) {
        for slot in &self.armed {
            let order = Ordering::AcqRel;
            let _ = slot.compare_exchange(thread, 0, order, Ordering::Relaxed);
        }
    }

    /// In a child process: they are the parent's.
    pub(super) fn forget(&self) {
        self.begin.store(0, Ordering::Relaxed);
        for slot in &self.armed {
            if slot.load(Ordering::Relaxed) != 0 {
                slot.store(0, Ordering::Relaxed);
            }
        }
    }
}

/// Whether a number is that of a thread of this process.
fn lives(thread: c_int) -> bool {
    // SAFETY: no pointers; signal 0 is none.
    unsafe { crate::real::syscall()(libc::SYS_tgkill, libc::getpid(), thread, 0) == 0 }
}

/// The calling thread's number.
pub(super) fn own() -> c_int {
    // SAFETY: no arguments.
    unsafe { crate::real::syscall()(libc::SYS_gettid) as c_int }
}

/// Arms the calling thread, unless it is. Its calls pass until the dispatch begins.
#[cfg(target_arch = "x86_64")]
pub(super) fn arm() -> Result<(), super::Why> {
    let (own, threads) = (own(), &super::STATE.threads);
    if threads.has(own) {
        return Ok(());
    }
    super::trap::arm()?;
    threads.add(own);
    Ok(())
}

/// Functions under the names by which programs know them.
#[cfg(not(test))]
mod exported {
    use std::ffi::{c_int, c_void};
    use std::sync::atomic::Ordering;

    use libc::{pthread_attr_t, pthread_t};

    use crate::real::{exports, is_inside, set_inside};

    type Start = extern "C" fn(*mut c_void) -> *mut c_void;

    /// The start of a thread.
    #[repr(C)]
    struct Begin {
        start: Start,
        argument: *mut c_void,
    }

    /// The body of a thread of this library's own: all that it calls is the C library's.
    extern "C" fn work(begin: *mut c_void) -> *mut c_void {
        set_inside(true);
        // SAFETY: of `begin_with` below, for this thread alone.
        let begin = unsafe { Box::from_raw(begin.cast::<Begin>()) };
        super::super::last::counted(|| (begin.start)(begin.argument))
    }

    /// The first words of a thread of the program.
    #[cfg(target_arch = "x86_64")]
    extern "C" fn armed(begin: *mut c_void) -> Begin {
        if super::super::mode() < super::super::LEAVING && super::arm().is_err() {
            super::super::fall_back(super::super::Why::Unsupported);
        }
        (super::super::STATE.threads.begin).fetch_sub(1, Ordering::Release);
        // SAFETY: of `begin_with` below, for this thread alone.
        *unsafe { Box::from_raw(begin.cast::<Begin>()) }
    }

    /// The body of a thread of the program. It leaves no frame behind, as the thread may end by pthread_exit.
    #[cfg(target_arch = "x86_64")]
    #[unsafe(naked)]
    extern "C" fn program(begin: *mut c_void) -> *mut c_void {
        std::arch::naked_asm!(
            "sub rsp, 8",
            "call {armed}",
            "add rsp, 8",
            "mov rdi, rdx",
            "jmp rax",
            armed = sym armed,
        );
    }

    /// Makes a thread through `create`.
    fn begin_with(
        start: Start,
        argument: *mut c_void,
        create: impl FnOnce(Start, *mut c_void) -> c_int,
    ) -> c_int {
        let own = is_inside();
        let body = match own {
            true => work,
            #[cfg(target_arch = "x86_64")]
            false if !super::super::is_over() && super::arm().is_ok() => program,
            false => return create(start, argument),
        };
        let begins = &super::super::STATE.threads.begin;
        begins.fetch_add(i32::from(!own), Ordering::Relaxed);
        let begin = Box::into_raw(Box::new(Begin { start, argument }));
        let done = create(body, begin.cast());
        if done != 0 {
            // SAFETY: no thread has it.
            drop(unsafe { Box::from_raw(begin) });
            begins.fetch_sub(i32::from(!own), Ordering::Relaxed);
        }
        done
    }

    exports! {
        /// Threads that are started by this library are at work in it for as long as they live: they answer recalls and
        /// look for servers, so they must not need what a thread that waits for them holds. A thread of the program arms
        /// itself before its first line.
        fn pthread_create(
            to: *mut pthread_t, how: *const pthread_attr_t, start: Start, argument: *mut c_void
        ) -> c_int {
            begin_with(start, argument, |start, argument| {
                // SAFETY: the caller's own arguments, or a function that takes what it gets.
                unsafe { next(to, how, start, argument) }
            })
        }

        fn thrd_create(to: *mut c_void, start: Start, argument: *mut c_void) -> c_int {
            begin_with(start, argument, |start, argument| {
                // SAFETY: as above. A start function's result stays in its register.
                unsafe { next(to, start, argument) }
            })
        }
    }
}
