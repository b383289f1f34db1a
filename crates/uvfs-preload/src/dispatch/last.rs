//! A program ends with the last of its threads. This library's threads would keep it alive, so one of them looks,
//! once the main thread has ended, whether others than they are left. As long as the main thread lives, so does
//! the program.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use super::STATE;
use crate::guard::aside;
use crate::import;
use crate::real::{SignalMask, set_inside};

/// The main thread lives.
const LIVES: i32 = -1;
/// The C library has ended it. It ends the process by exit(3) then, with status 0.
const BY_LIBRARY: i32 = 256;
const NO_KEY: u32 = u32::MAX;

/// The state of this module.
pub(crate) struct Last {
    /// [`LIVES`], [`BY_LIBRARY`], or the process's status once the main thread has ended itself.
    main: AtomicI32,
    /// This library's threads.
    own: AtomicUsize,
    watched: AtomicBool,
    /// Of pthread_key_create(3): its destructor tells of the main thread's end.
    key: AtomicU32,
}

impl Last {
    pub(super) const fn new() -> Self {
        Self {
            main: AtomicI32::new(LIVES),
            own: AtomicUsize::new(0),
            watched: AtomicBool::new(false),
            key: AtomicU32::new(NO_KEY),
        }
    }

    /// In a child process, whose main thread is the calling one.
    pub(super) fn forget(&self) {
        self.main.store(LIVES, Ordering::Relaxed);
        self.own.store(0, Ordering::Relaxed);
        self.watched.store(false, Ordering::Relaxed);
        is_main();
    }
}

/// The body of one of this library's threads.
pub(super) fn counted<T>(work: impl FnOnce() -> T) -> T {
    let own = &STATE.last.own;
    own.fetch_add(1, Ordering::SeqCst);
    let done = work();
    own.fetch_sub(1, Ordering::SeqCst);
    done
}

/// The process begins: the calling thread is its main one.
pub(crate) fn begin() {
    let mut key = 0;
    // SAFETY: room for a key, and a function that lives as long as the process.
    if unsafe { libc::pthread_key_create(&mut key, Some(main_ended)) } == 0 {
        STATE.last.key.store(key, Ordering::Relaxed);
        is_main();
    }
}

/// The calling thread is the main one from now on.
fn is_main() {
    let key = STATE.last.key.load(Ordering::Relaxed);
    if key != NO_KEY {
        // SAFETY: a key, and a value that is never followed.
        unsafe { libc::pthread_setspecific(key, STATE.last.key.as_ptr().cast()) };
    }
}

/// The C library has ended the main thread.
unsafe extern "C" fn main_ended(_: *mut c_void) {
    main_ends(BY_LIBRARY);
}

/// The calling thread ends itself by the system call, with a status.
#[cfg(target_arch = "x86_64")]
pub(super) fn ends(status: c_int) {
    let own = super::threads::own();
    // SAFETY: no arguments.
    if own == unsafe { libc::getpid() } {
        // Beside a later one, which ends by the C library, the status is that one's.
        let last = !STATE.threads.others(own);
        main_ends(if last { status & 0xff } else { 0 });
    }
}

fn main_ends(how: i32) {
    STATE.last.main.store(how, Ordering::SeqCst);
    watch();
}

/// Begins to look, if the main thread has ended and there is, or will be, a session with threads.
pub(crate) fn watch() {
    let last = &STATE.last;
    if last.main.load(Ordering::SeqCst) == LIVES
        || !import::any_session()
        || last.watched.swap(true, Ordering::SeqCst)
    {
        return;
    }
    let begin = || {
        let _calm = SignalMask::new();
        // If that fails, the process stays, as it did before.
        let _ = std::thread::Builder::new().spawn(wait);
    };
    // In the middle of an import it is this library's thread already.
    if crate::real::is_inside() {
        begin();
    } else {
        aside(begin);
    }
}

fn wait() {
    let mut pause = Duration::from_millis(1);
    while !is_over() {
        std::thread::sleep(pause);
        pause = (2 * pause).min(Duration::from_millis(100));
    }
    let how = STATE.last.main.load(Ordering::SeqCst);
    // It is the program's last thread now.
    set_inside(false);
    if how == BY_LIBRARY {
        #[cfg(target_arch = "x86_64")]
        let _ = super::threads::arm();
        // SAFETY: no other thread of the program is there.
        unsafe { libc::exit(0) }
    }
    crate::calls::ending();
    // SAFETY: as above.
    unsafe { libc::_exit(how) }
}

/// Whether the program's threads have ended. It opens no file, whose descriptor the program could meet.
fn is_over() -> bool {
    let mut room = 0;
    // A main thread that has ended counts until the process does, and has no program any more.
    // SAFETY: a C string, and room.
    let main = unsafe { libc::readlink(c"/proc/self/exe".as_ptr(), &raw mut room, 1) };
    main < 0 && is_last()
}

/// Whether one thread is there beside this library's.
fn is_last() -> bool {
    let own = || STATE.last.own.load(Ordering::SeqCst);
    let before = own();
    // One of this library's that ended meanwhile would hide a thread of the program.
    tasks() == Some(1 + before) && own() == before
}

/// The number of threads: the links of their directory, without a look at each.
pub(super) fn tasks() -> Option<usize> {
    // SAFETY: plain data, filled by the call.
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a C string and a buffer.
    let done = unsafe { libc::stat(c"/proc/self/task".as_ptr(), &mut st) };
    (done == 0).then(|| (st.st_nlink as usize).saturating_sub(2))
}
