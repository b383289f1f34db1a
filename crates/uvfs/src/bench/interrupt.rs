//! Notes SIGINT, SIGTERM and SIGHUP, so that a benchmark can unmount before it goes.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

static SEEN: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: libc::c_int) {
    SEEN.store(true, Ordering::Relaxed);
}

/// Starts noting the signals. The second of a kind ends the process at once, in case the
/// cleaning up hangs.
pub fn install() -> Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: an all-zero sigaction is a valid value of that plain C structure.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = note as extern "C" fn(libc::c_int) as usize;
        // No SA_RESTART: a wait should end when a signal comes.
        action.sa_flags = libc::SA_RESETHAND;
        // SAFETY: `action` is initialised and outlives the call; the handler only stores to an
        // atomic, which is async-signal-safe.
        if unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } != 0 {
            let e = std::io::Error::last_os_error();
            return Err(Error::new(format!("catching signal {signal}: {e}")));
        }
    }
    Ok(())
}

/// Whether one of the signals has come.
pub fn seen() -> bool {
    SEEN.load(Ordering::Relaxed)
}

/// An error once one of the signals has come.
pub fn check() -> Result<()> {
    if seen() {
        return Err(Error::new("interrupted").with_code(130));
    }
    Ok(())
}
