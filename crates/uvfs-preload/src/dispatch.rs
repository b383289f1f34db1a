//! Sees every system call of the program while a file is served.
//!
//! The table of descriptors (`table.rs`) holds what this library knows about a descriptor's number. It is
//! right only if no descriptor is closed, duplicated or moved behind its back. Calls of the C library come
//! by here, because this library stands in front of it. All others trap, by the kernel's Syscall User
//! Dispatch: every system call instruction outside the C library's text raises SIGSYS (`trap.rs`), and
//! is judged by what it could do to a served file (`verdict.rs`). Where that can't be followed, the process
//! *falls back to the kernel*: all files go back to the kernel for good, and then the call runs.
//!
//! The dispatch begins when the program opens the first file of a mount for writing, and at the latest
//! with the first import. Only a file that is opened after that has its position here (`table::opened`),
//! since only then it is sure that no other process has the description.
//!
//! The setting is a thread's own, and a thread can't be given it from outside. So each thread that the
//! program makes by the C library is armed as it starts (`threads.rs`); they share one selector byte, which
//! lets everything pass until the dispatch begins. A process with a thread that is not armed is not served.

pub(crate) mod last;
#[cfg(target_arch = "x86_64")]
mod start;
mod threads;
#[cfg(target_arch = "x86_64")]
mod trap;
#[cfg(target_arch = "x86_64")]
mod verdict;

#[cfg(all(target_arch = "x86_64", not(test)))]
mod exported;
#[cfg(all(target_arch = "x86_64", not(test)))]
mod linking;
#[cfg(not(test))]
mod masks;

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use crate::guard::aside;
#[cfg(target_arch = "x86_64")]
use crate::real::seconds;
use crate::real::{is_borrowed, is_inside};
use crate::{calls, import, table};

use threads::Threads;

/// Nothing has been served, and all calls pass.
const OFF: u8 = 0;
/// A thread prepares the dispatch. Calls may trap already.
const STARTING: u8 = 1;
/// Calls around the C library trap: files may be served.
const ON: u8 = 2;
/// A thread gives all files back.
const LEAVING: u8 = 3;
/// Nothing is served any more, and all calls pass.
const OVER: u8 = 4;

/// Values of the selector byte (linux/syscall_user_dispatch.h).
const ALLOW: u8 = 0;
#[cfg(target_arch = "x86_64")]
const BLOCK: u8 = 1;

/// Why a process is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Why {
    /// No Syscall User Dispatch, or a filter refuses it.
    Unsupported = 1,
    /// An io_uring, whose requests are no system calls.
    Ring,
    /// A thread or a process that shares the descriptors was made around the C library.
    Threads,
    /// A signal handler during which SIGSYS would be blocked, or one for SIGSYS.
    Signals,
    /// A call around the C library that can't be followed; with its number.
    Call,
    /// So many calls around it that they cost more than serving gains.
    Many,
    /// The program has reached a function of the C library without this library in front of it.
    Bound,
    /// The program has taken one of this library's descriptors.
    Taken,
}

impl Why {
    const ALL: [Self; 8] = [
        Self::Unsupported,
        Self::Ring,
        Self::Threads,
        Self::Signals,
        Self::Call,
        Self::Many,
        Self::Bound,
        Self::Taken,
    ];

    fn words(self) -> &'static str {
        match self {
            Self::Unsupported => {
                "system calls around the C library can't be seen here (no Syscall User Dispatch)"
            }
            Self::Ring => "the program uses io_uring",
            Self::Threads => "a thread or process was made around the C library",
            Self::Signals => "the program handles or blocks SIGSYS",
            Self::Call => "the program made a call around the C library that can't be followed",
            Self::Many => "the program makes most calls around the C library",
            Self::Bound => "the program calls the C library around this one",
            Self::Taken => "the program took a descriptor of this library",
        }
    }
}

/// The state of this module.
struct Dispatch {
    mode: AtomicU8,
    /// Read by the kernel at each system call outside the C library, in every armed thread.
    selector: AtomicU8,
    /// A [`Why`], or 0.
    why: AtomicU8,
    /// The system call that [`Why::Call`] is about.
    number: AtomicU32,
    /// A [`Why`] that holds for children as well, or 0.
    barred: AtomicU8,
    /// All that the process had done before the dispatch began was looked at.
    confirmed: AtomicBool,
    /// Calls that trapped in the second that `window` names.
    trapped: AtomicU32,
    window: AtomicU32,
    pub(crate) threads: Threads,
    pub(crate) last: last::Last,
}

static STATE: Dispatch = Dispatch {
    mode: AtomicU8::new(OFF),
    selector: AtomicU8::new(ALLOW),
    why: AtomicU8::new(0),
    number: AtomicU32::new(0),
    barred: AtomicU8::new(0),
    confirmed: AtomicBool::new(false),
    trapped: AtomicU32::new(0),
    window: AtomicU32::new(0),
    threads: Threads::new(),
    last: last::Last::new(),
};

fn mode() -> u8 {
    STATE.mode.load(Ordering::Acquire)
}

fn change(from: u8, to: u8) -> bool {
    let order = Ordering::AcqRel;
    (STATE.mode)
        .compare_exchange(from, to, order, Ordering::Acquire)
        .is_ok()
}

/// Whether every call is seen.
#[inline]
pub(crate) fn is_on() -> bool {
    mode() == ON
}

/// Whether nothing will be served in this process any more.
#[inline]
pub(crate) fn is_over() -> bool {
    mode() >= LEAVING
}

/// Why nothing is served, in words; `None` while files may be.
pub(crate) fn reason() -> Option<String> {
    let code = STATE.why.load(Ordering::Acquire);
    let why = Why::ALL.into_iter().find(|why| *why as u8 == code)?;
    let mut words = why.words().to_owned();
    if why == Why::Call {
        let number = STATE.number.load(Ordering::Relaxed);
        words.push_str(&format!(" (number {number})"));
    }
    Some(words)
}

/// All calls pass from now on. The mode has been left to this thread.
fn allow(why: Why) {
    let none = (Ordering::AcqRel, Ordering::Relaxed);
    let _ = (STATE.why).compare_exchange(0, why as u8, none.0, none.1);
    STATE.selector.store(ALLOW, Ordering::SeqCst);
    STATE.mode.store(OVER, Ordering::Release);
}

/// A descriptor was opened by a call that this library saw. `likely` says that it may come to be served by
/// its position, so that the dispatch should begin now.
pub(crate) fn opened(fd: c_int, likely: bool) {
    let private = match mode() {
        ON => true,
        OFF if likely && import::is_on_mount(fd) => begin(fd).unwrap_or(false),
        _ => false,
    };
    // The C library's streams write to standard error at the kernel's position.
    match private && fd != libc::STDERR_FILENO {
        true => table::opened(fd),
        false => table::made(fd),
    }
}

/// Begins the dispatch; nothing if it can't, or if another thread is about to. Else says whether the
/// descriptor, which this thread has opened a moment ago, is known to no other process.
#[cfg(target_arch = "x86_64")]
fn begin(fd: c_int) -> Option<bool> {
    if !change(OFF, STARTING) {
        return None;
    }
    match start::start(fd) {
        Ok(private) => change(STARTING, ON).then_some(private),
        Err(why) => {
            allow(why);
            None
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn begin(_: c_int) -> Option<bool> {
    if change(OFF, STARTING) {
        allow(Why::Unsupported);
    }
    None
}

/// Whether a descriptor may be imported: all calls are seen, and nothing that the process did before can
/// reach its descriptors unseen. `mapped` is told of files that are mapped shared. The caller holds the lock of the
/// servers, and nothing has been imported before this has said yes once.
pub(crate) fn may_import(fd: c_int, mapped: impl FnMut((u64, u64))) -> bool {
    if mode() == OFF {
        begin(fd);
    }
    if !is_on() {
        return false;
    }
    if STATE.confirmed.load(Ordering::Relaxed) {
        return true;
    }
    #[cfg(target_arch = "x86_64")]
    match start::look_back(fd, mapped) {
        Ok(()) => STATE.confirmed.store(true, Ordering::Relaxed),
        Err(why) if change(ON, LEAVING) => allow(why),
        Err(_) => {}
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = mapped;
    is_on()
}

/// Gives all files back to the kernel for good and lets all calls pass. Returns once that is so.
#[cold]
pub(crate) fn fall_back(why: Why) {
    // A child that borrows this memory has descriptors of its own. A handler amid a call of this library
    // can't wait for the locks that the call holds.
    if is_borrowed() || is_inside() {
        return;
    }
    loop {
        match mode() {
            now @ (OFF | STARTING) if change(now, LEAVING) => return allow(why),
            ON if change(ON, LEAVING) => {
                aside(calls::leave);
                return allow(why);
            }
            OVER => return,
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}

/// As [`fall_back`], for this process and for its children.
#[cfg(not(test))]
#[cold]
pub(crate) fn bar(why: Why) {
    if is_borrowed() {
        return;
    }
    STATE.barred.store(why as u8, Ordering::Relaxed);
    fall_back(why);
}

/// The program has taken a descriptor of this library, and all files are the kernel's.
pub(crate) fn retired() {
    if change(ON, LEAVING) {
        allow(Why::Taken);
    }
}

/// The address of the handler of SIGSYS.
#[cfg(target_arch = "x86_64")]
pub(crate) fn handler() -> usize {
    trap::handler()
}

/// There is none.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn handler() -> usize {
    libc::SIG_DFL
}

/// In a child process, which has this one thread, and no dispatch.
pub(crate) fn child() {
    let one = &STATE;
    one.threads.forget();
    one.last.forget();
    one.selector.store(ALLOW, Ordering::Relaxed);
    one.confirmed.store(false, Ordering::Relaxed);
    let barred = one.barred.load(Ordering::Relaxed);
    one.why.store(barred, Ordering::Relaxed);
    let mode = if barred == 0 { OFF } else { OVER };
    one.mode.store(mode, Ordering::Release);
}

/// A descriptor is used by a call that does not come by here: the kernel has it from now on.
#[cfg(target_arch = "x86_64")]
fn give_back(fd: c_int) {
    use crate::report::Why::Around;
    use crate::table::Known;
    for _ in 0..8 {
        match table::look(fd) {
            Known::Described(one) => return import::give_up(fd, &one, Around),
            Known::Undecided(seen, _) if table::decide(fd, seen, None) => return,
            Known::Undecided(..) => {}
            Known::Foreign | Known::Own => return,
        }
    }
}

/// Counts a call that trapped; whether there are too many of them.
#[cfg(target_arch = "x86_64")]
fn too_many() -> bool {
    /// In a second. A trap takes about 3 µs: with more, the program would lose 3% of a core.
    const MOST: u32 = 10_000;
    let second = seconds() as u32;
    if STATE.window.swap(second, Ordering::Relaxed) != second {
        STATE.trapped.store(0, Ordering::Relaxed);
    }
    STATE.trapped.fetch_add(1, Ordering::Relaxed) > MOST
}
