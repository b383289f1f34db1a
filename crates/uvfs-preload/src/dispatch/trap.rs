//! System calls outside the C library's text: SIGSYS, and what its handler does.
//!
//! The handler runs on the stack that the program has given for signals, if any: the stack of the caller may be small
//! (goroutines). Work that takes more room than a handler may count on runs on a stack made for it. The call itself is
//! made from the handler with the program's signal mask, so that signals interrupt it as always.

use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::Ordering;

use libc::{sigaction as Action, siginfo_t, ucontext_t};

use super::verdict::{Change, Verdict, Words, verdict};
use super::{
    ALLOW, LEAVING, STATE, Why, fall_back, give_back, last, mode, start, threads, too_many,
};
use crate::guard::aside;
use crate::real::{Next, errno, is_borrowed, is_inside, next, set_errno, stat};
use crate::{calls, import, table};

mod next {
    use super::*;

    next! {
        sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int;
        syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long;
    }
}

const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
const PR_SYS_DISPATCH_OFF: usize = 0;
const PR_SYS_DISPATCH_ON: usize = 1;
/// `si_code` of a call that was dispatched (asm-generic/siginfo.h).
const SYS_USER_DISPATCH: c_int = 2;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
/// The length of `syscall`, and of `int 0x80`.
const INSTRUCTION: i64 = 2;

/// The address of the function that makes this library's own calls.
pub(super) fn passing_on() -> usize {
    static NEXT: Next = Next::new("syscall\0");
    NEXT.get() as usize
}

/// The C library's syscall(2), with what the kernel answered.
fn call(number: usize, a: &Words) -> isize {
    // SAFETY: the program's own call, or one of this module's.
    let done = unsafe { next::syscall(number as c_long, a[0], a[1], a[2], a[3], a[4], a[5]) };
    match done {
        -1 => -(errno() as isize),
        done => done as isize,
    }
}

/// The C library's sigaction(2), without this library in front of it.
///
/// # Safety
/// As the manual says.
pub(super) unsafe fn action(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    // SAFETY: the caller's duty.
    unsafe { next::sigaction(signal, new, old) }
}

/// The address of the handler.
pub(crate) fn handler() -> usize {
    trapped as *const () as usize
}

/// Installs the handler.
pub(super) fn install() -> Result<(), Why> {
    // SAFETY: plain data.
    let mut new: Action = unsafe { std::mem::zeroed() };
    new.sa_sigaction = handler();
    new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESTART;
    // SAFETY: an action with an empty mask.
    match unsafe { action(libc::SIGSYS, &new, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(Why::Signals),
    }
}

fn dispatch(on: bool) -> bool {
    let Some(text) = start::text() else {
        return false;
    };
    let selector = STATE.selector.as_ptr() as usize;
    let words = match on {
        true => [
            PR_SET_SYSCALL_USER_DISPATCH,
            PR_SYS_DISPATCH_ON,
            text.start,
            text.len(),
            selector,
            0,
        ],
        false => [
            PR_SET_SYSCALL_USER_DISPATCH,
            PR_SYS_DISPATCH_OFF,
            0,
            0,
            0,
            0,
        ],
    };
    call(libc::SYS_prctl as usize, &words) == 0
}

/// Sets or asks for the mask of this thread's signals: SIG_*, and a bit for each.
fn mask(how: c_int, signals: u64) -> u64 {
    let mut before = 0_u64;
    let words = [
        how as usize,
        &raw const signals as usize,
        &raw mut before as usize,
        8,
        0,
        0,
    ];
    call(libc::SYS_rt_sigprocmask as usize, &words);
    before
}

/// Has the calling thread's calls outside the C library looked at, once the dispatch has begun.
pub(super) fn arm() -> Result<(), Why> {
    // SAFETY: plain data, filled by the call.
    let mut now: Action = unsafe { std::mem::zeroed() };
    // SAFETY: a buffer, and no new action.
    unsafe { action(libc::SIGSYS, std::ptr::null(), &mut now) };
    if now.sa_sigaction != libc::SIG_DFL && now.sa_sigaction != handler() {
        // The program may have a dispatch of its own.
        return Err(Why::Signals);
    }
    // A parent may have left it blocked. Then the first trap would end the program.
    mask(libc::SIG_UNBLOCK, 1 << (libc::SIGSYS - 1));
    dispatch(true).then_some(()).ok_or(Why::Unsupported)
}

/// Changes the program's descriptors, as its call of the C library would.
fn changed(change: Change) -> c_int {
    // SAFETY: the program's own descriptors.
    unsafe {
        match change {
            Change::Close(fd) => calls::close(fd),
            Change::CloseRange(first, last, flags) => calls::close_range(first, last, flags),
            Change::Dup(fd) => calls::dup(fd),
            Change::Dup2(fd, to) => calls::dup2(fd, to),
            Change::Dup3(fd, to, flags) => calls::dup3(fd, to, flags),
            Change::Control(fd, command, from) => calls::fcntl(fd, command, from),
        }
    }
}

/// Does what a call needs before it runs; `Err` with its result where nothing is left to do.
pub(super) fn prepare(number: usize, judged: Verdict) -> Result<(), isize> {
    match judged {
        Verdict::Pass | Verdict::Opens => {}
        // The program has no such descriptor.
        Verdict::Asks(fd) | Verdict::Uses(fd, _) | Verdict::Uses(_, fd) if table::is_own(fd) => {
            return Err(-(libc::EBADF as isize));
        }
        Verdict::Asks(_) => {}
        Verdict::Uses(first, second) => {
            for fd in [first, second] {
                if !table::is_foreign(fd) {
                    aside(|| give_back(fd));
                }
            }
        }
        Verdict::Table(change) => {
            return match changed(change) {
                -1 => Err(-(errno() as isize)),
                done => Err(done as isize),
            };
        }
        Verdict::Maps { flags, fd } => calls::mapping(flags, fd),
        Verdict::Leaves(status) => last::ends(status),
        Verdict::Ends => crate::calls::ending(),
        Verdict::Aside(why) => {
            if why == Why::Call {
                STATE.number.store(number as u32, Ordering::Relaxed);
            }
            fall_back(why);
        }
    }
    Ok(())
}

/// A call has run. A file that it has opened may be longer than the kernel knows, which would append to it at the
/// old end: the kernel asks now.
pub(super) fn ran(judged: Verdict, done: isize) {
    if judged == Verdict::Opens && done >= 0 && import::any() {
        let _ = stat(done as c_int);
    }
}

/// Whether a call can be prepared on the stack of the handler.
fn is_light(verdict: Verdict) -> bool {
    match verdict {
        Verdict::Pass | Verdict::Opens | Verdict::Asks(_) => true,
        Verdict::Uses(first, second) => [first, second].into_iter().all(table::is_foreign),
        Verdict::Table(Change::Close(fd)) | Verdict::Maps { fd, .. } => table::is_foreign(fd),
        Verdict::Table(_) | Verdict::Leaves(_) | Verdict::Ends | Verdict::Aside(_) => false,
    }
}

/// A call that is prepared elsewhere.
struct Prepared {
    number: usize,
    judged: Verdict,
    result: Result<(), isize>,
}

extern "C" fn prepare_there(one: *mut c_void) {
    // SAFETY: of `prepare_apart`, which waits.
    let one = unsafe { &mut *one.cast::<Prepared>() };
    one.result = prepare(one.number, one.judged);
}

/// As [`prepare`], on a stack of its own, with all signals blocked: a handler would begin on the stack that
/// this handler's frame is on. So calls of this library must not trap meanwhile.
fn prepare_apart(number: usize, judged: Verdict) -> Result<(), isize> {
    const STACK: usize = 1 << 20;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let new = [0, STACK, access as usize, kind as usize, usize::MAX, 0];
    let stack = call(libc::SYS_mmap as usize, &new);
    if stack < 0 {
        return prepare(number, judged);
    }
    let mut one = Prepared {
        number,
        judged,
        result: Ok(()),
    };
    let before = mask(libc::SIG_SETMASK, u64::MAX);
    dispatch(false);
    // SAFETY: the stack is this call's alone, and large enough. The function is of the C ABI, so it leaves r12
    // as it was, and does not unwind.
    unsafe {
        std::arch::asm!(
            "xchg rsp, r12",
            "call {there}",
            "mov rsp, r12",
            there = in(reg) prepare_there as *const () as usize,
            inout("r12") stack as usize + STACK => _,
            in("rdi") &raw mut one,
            clobber_abi("C"),
        );
    }
    if mode() < LEAVING {
        dispatch(true);
    }
    mask(libc::SIG_SETMASK, before);
    let gone = [stack as usize, STACK, 0, 0, 0, 0];
    call(libc::SYS_munmap as usize, &gone);
    one.result
}

/// The part of siginfo_t about a call (`_sigsys` of asm-generic/siginfo.h).
#[repr(C)]
struct Info {
    signal: c_int,
    errno: c_int,
    code: c_int,
    _pad: c_int,
    at: usize,
    number: c_int,
    arch: u32,
}

/// The kernel calls this in place of a system call outside the C library.
extern "C" fn trapped(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let before = errno();
    // SAFETY: of the kernel.
    let (info, context) = unsafe { (&*info.cast::<Info>(), &mut *context.cast::<ucontext_t>()) };
    if info.code != SYS_USER_DISPATCH {
        return as_by_default(signal);
    }
    let registers = &mut context.uc_mcontext.gregs;
    let word = |register: c_int| registers[register as usize] as usize;
    let words = [
        libc::REG_RDI,
        libc::REG_RSI,
        libc::REG_RDX,
        libc::REG_R10,
        libc::REG_R8,
        libc::REG_R9,
    ]
    .map(word);
    // The kernel has put the number back. It may be one of another kind (x32).
    let number = word(libc::REG_RAX);
    let native = info.arch == AUDIT_ARCH_X86_64;
    let judged = match native {
        _ if start::is_own(info.at) => Verdict::Pass,
        true => verdict(number, &words),
        false => Verdict::Aside(Why::Call),
    };
    let mut again = false;
    let done = if judged == Verdict::Pass && !too_many() {
        Ok(())
    } else if is_inside() || is_borrowed() {
        // The dynamic linker's on behalf of this library, or a handler's amid a served call.
        match judged {
            Verdict::Table(Change::Close(fd) | Change::Dup2(_, fd) | Change::Dup3(_, fd, _)) => {
                table::abandon_unless_own(fd);
            }
            Verdict::Aside(_) => {
                // It would not work from here, and files can't be given back now.
                dispatch(false);
                STATE.threads.remove(threads::own());
                again = true;
            }
            _ => {}
        }
        Ok(())
    } else if too_many() {
        prepare_apart(number, Verdict::Aside(Why::Many))
    } else if is_light(judged) {
        prepare(number, judged)
    } else {
        prepare_apart(number, judged)
    };
    match done {
        Err(result) => registers[libc::REG_RAX as usize] = result as i64,
        // It runs where it stands, and does not trap any more.
        Ok(()) if again || STATE.selector.load(Ordering::SeqCst) == ALLOW => {
            registers[libc::REG_RIP as usize] -= INSTRUCTION;
        }
        Ok(()) => {
            let done = call(number, &words);
            ran(judged, done);
            registers[libc::REG_RAX as usize] = done as i64;
        }
    }
    set_errno(before);
}

/// A SIGSYS that something else has sent.
fn as_by_default(signal: c_int) {
    // SAFETY: plain data: the default action.
    let default: Action = unsafe { std::mem::zeroed() };
    // SAFETY: an action; and no pointers.
    unsafe {
        action(signal, &default, std::ptr::null_mut());
        libc::raise(signal);
    }
}
