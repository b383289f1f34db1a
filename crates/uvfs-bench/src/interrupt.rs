//! Notes SIGINT, SIGTERM and SIGHUP, so that a benchmark can unmount before it goes.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::time::{ClockId, clock_gettime};
use uvfs_cli::{Error, Result};

/// When the first signal came, in milliseconds of the monotonic clock; 0 before.
static SEEN: AtomicU64 = AtomicU64::new(0);

/// Signals that come within so many milliseconds are one: timeout(1) sends one to the process and
/// another to its group.
const TOGETHER: u64 = 500;

extern "C" fn note(signal: libc::c_int) {
    let time = clock_gettime(ClockId::Monotonic);
    let now = (time.tv_sec * 1000 + time.tv_nsec / 1_000_000).max(1) as u64;
    let first = SEEN.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    if first.is_err_and(|first| now - first > TOGETHER) {
        // SAFETY: both calls are async-signal-safe. The signal ends the process once this returns.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
}

/// Starts noting the signals. One that comes later than the first ends the process at once, in case
/// the cleaning up hangs.
pub fn install() -> Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: an all-zero sigaction is a valid value of that plain C structure, and means
        // no SA_RESTART: a wait should end when a signal comes.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = note as extern "C" fn(libc::c_int) as usize;
        // SAFETY: `action` is initialised and outlives the call; the handler only makes calls that
        // are async-signal-safe.
        if unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } != 0 {
            let e = std::io::Error::last_os_error();
            return Err(Error::new(format!("catching signal {signal}: {e}")));
        }
    }
    Ok(())
}

/// Whether one of the signals has come.
pub fn seen() -> bool {
    SEEN.load(Ordering::Relaxed) != 0
}

/// An error once one of the signals has come.
pub fn check() -> Result<()> {
    if seen() {
        return Err(Error::new("interrupted").with_code(130));
    }
    Ok(())
}
