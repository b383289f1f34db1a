//! SIGTERM, SIGINT and SIGHUP end the mounts of a program that does not handle these signals itself. (`uvfs mount`
//! does: `end_on_signals`.)
//!
//! A handler writes the signal's number into a pipe, which a thread reads. Handlers compose with programs that have
//! threads of their own; to block the signals would not, as a library can't block them in threads that are there
//! already. The handler is installed here, and not by a crate that shares handlers: only so can this module see
//! whether the program has installed one later, which then decides when the process ends.

use std::io;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use uvfs_sys::lock;
use uvfs_sys::process::SignalSet;

use crate::mount::{Ending, Mount, ending};

/// The signals that ask a program to end.
pub const SIGNALS: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The pipe that the handler writes to, and the process that it is for.
static PIPE: AtomicI32 = AtomicI32::new(-1);
static PROCESS: AtomicI32 = AtomicI32::new(0);

static MOUNTS: Mutex<Mounts> = Mutex::new(Mounts {
    all: Vec::new(),
    next: 0,
    installed: [false; 3],
    over: None,
});

struct Mounts {
    all: Vec<One>,
    next: u64,
    /// Of [`SIGNALS`].
    installed: [bool; 3],
    /// The signal by which the last mount ended, with no thread that waited for it.
    over: Option<i32>,
}

struct One {
    id: u64,
    ending: Ending,
    /// A thread waits for the mount's end: then the program goes on.
    waited: bool,
    signal: Option<i32>,
}

/// Writes the signal's number into the pipe.
extern "C" fn handler(signal: i32) {
    // SAFETY: all of these calls are allowed in a signal handler (signal-safety(7)); errno is kept for the code that
    // the signal has interrupted, and `byte` lives over the call.
    unsafe {
        let errno = *libc::__errno_location();
        if libc::getpid() == PROCESS.load(Ordering::Relaxed) {
            let byte = signal as u8;
            libc::write(PIPE.load(Ordering::Relaxed), (&raw const byte).cast(), 1);
        } else {
            // A child that was forked and has not called exec yet.
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
        *libc::__errno_location() = errno;
    }
}

fn own() -> libc::sighandler_t {
    handler as extern "C" fn(i32) as libc::sighandler_t
}

/// What the process does on a signal now.
fn disposition(signal: i32) -> libc::sighandler_t {
    // SAFETY: `now` is a plain structure, which sigaction fills; no handler is changed.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut now);
        now.sa_sigaction
    }
}

fn set_disposition(signal: i32, what: libc::sighandler_t) {
    // SAFETY: the structure is filled before it is used; `what` is SIG_DFL or a handler that only makes calls that
    // are allowed in one. System calls that it interrupts are restarted.
    unsafe {
        let mut new: libc::sigaction = std::mem::zeroed();
        libc::sigemptyset(&mut new.sa_mask);
        new.sa_flags = libc::SA_RESTART;
        new.sa_sigaction = what;
        libc::sigaction(signal, &new, std::ptr::null_mut());
    }
}

/// While this lives, signals end its mount.
#[derive(Debug)]
pub struct OnSignals(u64);

impl OnSignals {
    /// Has the signals end a mount ([`Ending`] says how), as far as the program has not done anything about them yet.
    /// When it has ended, the process ends by the signal as it would have without a mount; but not if a thread waits
    /// for the end ([`Waiter`]), or the program has installed a handler of its own meanwhile.
    ///
    /// To be dropped when the file system is destroyed.
    ///
    /// # Errors
    /// When there can be no pipe or no thread.
    pub fn new(mount: Mount) -> io::Result<Self> {
        let mut mounts = lock(&MOUNTS);
        if PIPE.load(Ordering::Relaxed) == -1 {
            start()?;
        }
        for (signal, installed) in SIGNALS.into_iter().zip(&mut mounts.installed) {
            if disposition(signal) == libc::SIG_DFL {
                set_disposition(signal, own());
                *installed = true;
            }
        }
        let id = mounts.next;
        mounts.next += 1;
        mounts.all.push(One {
            id,
            ending: Ending::new(mount, |text| tracing::warn!("{text}"), Mount::users),
            waited: false,
            signal: None,
        });
        Ok(Self(id))
    }

    /// For a thread that is going to wait for the mount's end.
    pub fn waiter(&self) -> Waiter {
        Waiter(self.0)
    }
}

/// Tells that a thread of the program waits for a mount's end, and knows what to do then.
#[derive(Clone, Copy, Debug)]
pub struct Waiter(u64);

impl Waiter {
    /// From now on the process does not end with the mount.
    pub fn waits(self) {
        if let Some(one) = lock(&MOUNTS).all.iter_mut().find(|one| one.id == self.0) {
            one.waited = true;
        }
    }
}

impl Drop for OnSignals {
    fn drop(&mut self) {
        let mut mounts = lock(&MOUNTS);
        let Some(at) = mounts.all.iter().position(|one| one.id == self.0) else {
            return;
        };
        let one = mounts.all.swap_remove(at);
        if !mounts.all.is_empty() {
            return;
        }
        match one.signal {
            Some(signal) if !one.waited => {
                mounts.over = Some(signal);
                wake();
            }
            _ => mounts.uninstall(),
        }
    }
}

impl Mounts {
    /// Gives the signals back their default actions, unless others have taken them over.
    fn uninstall(&mut self) {
        for (signal, installed) in SIGNALS.into_iter().zip(&mut self.installed) {
            if std::mem::take(installed) && disposition(signal) == own() {
                set_disposition(signal, libc::SIG_DFL);
            }
        }
    }

    fn signal(&mut self, signal: i32) {
        for one in &mut self.all {
            one.signal.get_or_insert(signal);
            one.ending.signal(signal);
        }
    }

    fn tick(&mut self) -> bool {
        for one in &mut self.all {
            one.ending.tick();
        }
        self.all.iter().any(|one| one.ending.is_pending())
    }
}

/// Wakes the thread.
fn wake() {
    // SAFETY: the byte lives over the call.
    unsafe { libc::write(PIPE.load(Ordering::Relaxed), [0u8].as_ptr().cast(), 1) };
}

/// Makes the pipe, and the thread that reads it for as long as the process lives.
fn start() -> io::Result<()> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let _blocked = SignalSet::blocked(&SIGNALS);
    std::thread::Builder::new()
        .name("uvfs-signals".into())
        .spawn(move || obey(&reader))?;
    PROCESS.store(std::process::id() as i32, Ordering::Relaxed);
    PIPE.store(writer.into_raw_fd(), Ordering::Relaxed);
    Ok(())
}

fn obey(reader: &OwnedFd) {
    let mut pending = false;
    loop {
        let again = pending
            .then(|| Timespec::try_from(ending::AGAIN).ok())
            .flatten();
        let mut ready = [PollFd::new(reader, PollFlags::IN)];
        let _ = poll(&mut ready, again.as_ref());
        let mut signals = [0u8; 64];
        let read = rustix::io::read(reader, &mut signals).unwrap_or(0);
        let mut mounts = lock(&MOUNTS);
        for &signal in signals[..read].iter().filter(|signal| **signal != 0) {
            mounts.signal(i32::from(signal));
        }
        pending = mounts.tick();
        if mounts.all.is_empty()
            && let Some(signal) = mounts.over.take()
        {
            let theirs = disposition(signal) != own();
            mounts.uninstall();
            if !theirs {
                die(signal);
            }
        }
    }
}

/// Ends the process as the signal does by default.
fn die(signal: i32) -> ! {
    // SAFETY: the set is filled before it is used, and local. The last call is for the first process of a pid
    // namespace, which no signal ends by default.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
        libc::raise(signal);
        libc::_exit(128 + signal)
    }
}
