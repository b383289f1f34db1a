//! The functions that this library stands in front of, and how the program's thread and errno are
//! left as they were.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_long, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering, compiler_fence};

/// The next definition of a symbol after this library's: libc's, or another preloaded library's.
pub(crate) struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    /// Of the symbol with this name, which ends with a NUL.
    pub(crate) const fn new(name: &'static str) -> Self {
        match CStr::from_bytes_with_nul(name.as_bytes()) {
            Ok(name) => Self {
                name,
                found: AtomicPtr::new(std::ptr::null_mut()),
            },
            Err(_) => panic!("a name without NUL"),
        }
    }

    /// Null when no library defines it.
    pub(crate) fn get(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: the name is a C string, and RTLD_NEXT asks for nothing else.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Declares the next definitions as functions of the same name, or `as` another.
macro_rules! next {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $($crate::real::next!($name as $name($($arg: $type),*) -> $result);)*
    };
    ($symbol:ident as $name:ident($($arg:ident: $type:ty),*) -> $result:ty) => {
        /// The next definition.
        ///
        /// # Safety
        /// As the function itself.
        pub(crate) unsafe fn $name($($arg: $type),*) -> $result {
            use $crate::real::Next;
            static NEXT: Next = Next::new(concat!(stringify!($symbol), "\0"));
            let found = NEXT.get();
            assert!(!found.is_null(), concat!("no ", stringify!($symbol)));
            type Call = unsafe extern "C" fn($($type),*) -> $result;
            // SAFETY: the symbol of this name has this signature (the C library's manual).
            let call = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Call>(found) };
            // SAFETY: the caller's duty.
            unsafe { call($($arg),*) }
        }
    };
}

/// Defines functions under the names by which programs know them. In a body, `next` is the next definition.
#[cfg(not(test))]
macro_rules! exports {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block
    )*) => {$(
        /// As the manual says.
        $(#[$meta])*
        ///
        /// # Safety
        /// As the manual says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
            $crate::real::next!($name as next($($arg: $type),*) -> $result);
            $body
        }
    )*};
}

/// Other names of the C library's for the same.
#[cfg(not(test))]
macro_rules! aliases {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty = $same:ident;)*) => {
        $(
            #[doc = concat!("As [`", stringify!($same), "`].")]
            ///
            /// # Safety
            /// As the manual says.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                // SAFETY: the caller's own arguments.
                unsafe { self::$same($($arg),*) }
            }
        )*
    };
}

/// Stands in front of functions whose arguments a Rust function can't pass on, or that must find no frame of this
/// library above them. Each calls its hook with its first three arguments, and then jumps to the next definition
/// with all of them in their registers.
#[cfg(not(test))]
macro_rules! before {
    ($($name:ident, $hook:ident, $what:expr;)*) => {
        $(
            extern "C" fn $hook(first: usize, second: usize, third: usize) -> *mut c_void {
                static NEXT: Next = Next::new(concat!(stringify!($name), "\0"));
                $what(first, second, third);
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

pub(crate) use next;
#[cfg(not(test))]
pub(crate) use {aliases, before, exports};

/// The C library's syscall(2), for this library's own calls: programs' are judged (`dispatch.rs`).
pub(crate) fn syscall() -> unsafe extern "C" fn(c_long, ...) -> c_long {
    static NEXT: Next = Next::new("syscall\0");
    // SAFETY: a function of this signature, which every C library has.
    unsafe { std::mem::transmute(NEXT.get()) }
}

thread_local! {
    /// This thread is at work in this library: what it calls goes to the C library.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// Whether this thread is at work in this library.
pub(crate) fn is_inside() -> bool {
    INSIDE.with(Cell::get) != 0
}

/// For `guard::Inside`, and for the signals that are raised at its end.
pub(crate) fn set_inside(inside: bool) {
    // Seen in this order by the thread's own signal handlers.
    compiler_fence(Ordering::SeqCst);
    INSIDE.with(|cell| cell.set(u32::from(inside)));
    compiler_fence(Ordering::SeqCst);
}

/// The state of this module.
struct Vforks {
    /// The process that this is, once `vforked` says so; its vfork children have another number and the
    /// same memory.
    process: AtomicI32,
    /// vfork was called: there may be such children.
    vforked: AtomicBool,
}

static STATE: Vforks = Vforks {
    process: AtomicI32::new(0),
    vforked: AtomicBool::new(false),
};

/// The process is a new one, alone in its memory.
pub(crate) fn new_process() {
    STATE.vforked.store(false, Ordering::Relaxed);
}

/// The process may have children that run in its memory, from now on.
pub(crate) fn vforks() {
    if !is_borrowed() {
        // SAFETY: no arguments.
        STATE
            .process
            .store(unsafe { libc::getpid() }, Ordering::Relaxed);
        STATE.vforked.store(true, Ordering::Relaxed);
    }
}

/// Whether this is a child that runs in its parent's memory, whose descriptors are not these.
pub(crate) fn is_borrowed() -> bool {
    STATE.vforked.load(Ordering::Relaxed)
        // SAFETY: no arguments.
        && STATE.process.load(Ordering::Relaxed) != unsafe { libc::getpid() }
}

/// Whether the environment has a variable. For the program's start: the standard library's way takes a
/// lock.
pub(crate) fn is_set(name: &CStr) -> bool {
    // SAFETY: a C string, and nothing changes the environment before the program begins.
    !unsafe { libc::getenv(name.as_ptr()) }.is_null()
}

pub(crate) fn errno() -> c_int {
    // SAFETY: the pointer is the thread's own and always valid.
    unsafe { *libc::__errno_location() }
}

pub(crate) fn set_errno(code: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = code }
}

/// Keeps signal handlers and cancellation away while something takes long or starts threads, which
/// inherit the mask.
pub(crate) struct SignalMask {
    mask: libc::sigset_t,
    cancel: c_int,
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

impl SignalMask {
    pub(crate) fn new() -> Self {
        // SAFETY: plain data, filled by the calls below.
        let (mut all, mut mask) = unsafe { std::mem::zeroed::<(libc::sigset_t, libc::sigset_t)>() };
        let mut cancel = 0;
        // SAFETY: the pointers are to locals of the right types.
        unsafe {
            libc::sigfillset(&mut all);
            // It may be raised by this library's own calls (`dispatch.rs`).
            libc::sigdelset(&mut all, libc::SIGSYS);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut mask);
            pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut cancel);
        }
        Self { mask, cancel }
    }
}

impl Drop for SignalMask {
    fn drop(&mut self) {
        // SAFETY: what `new` was given.
        unsafe {
            pthread_setcancelstate(self.cancel, std::ptr::null_mut());
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.mask, std::ptr::null_mut());
        }
    }
}

/// Seconds of the monotonic clock, without a system call.
pub(crate) fn seconds() -> u64 {
    // SAFETY: plain data, filled by the call.
    let mut now: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: a timespec. The vDSO answers.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
    now.tv_sec.unsigned_abs()
}

/// fstat(2).
pub(crate) fn stat(fd: c_int) -> Option<libc::stat> {
    // SAFETY: plain data, filled by the call.
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `st` is a stat buffer.
    (unsafe { libc::fstat(fd, &mut st) } == 0).then_some(st)
}

/// The size of a descriptor's file, if that is a regular one.
pub(crate) fn size_of(fd: c_int) -> Option<usize> {
    let st = stat(fd).filter(|st| st.st_mode & libc::S_IFMT == libc::S_IFREG)?;
    usize::try_from(st.st_size).ok()
}
