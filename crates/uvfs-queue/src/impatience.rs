//! Calls that may wait for long, cut short.
//!
//! close(2) of the last descriptor of a socket waits until what it was sent has arrived, if the socket lingers
//! (SO_LINGER). The process that is handed a descriptor can't know. A signal ends that wait, and the socket is closed all the
//! same.

use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

/// A call that waits is interrupted this often, in nanoseconds.
const PERIOD: i64 = 2_000_000;

/// A signal that the program has left alone, with a handler that does nothing.
fn signal() -> Option<libc::c_int> {
    static SIGNAL: OnceLock<Option<libc::c_int>> = OnceLock::new();
    extern "C" fn nothing(_: libc::c_int) {}
    *SIGNAL.get_or_init(|| {
        (libc::SIGRTMIN()..=libc::SIGRTMAX()).rev().find(|&signal| {
            // SAFETY: zeros are a valid sigaction, the structures live over the calls, and the handler does nothing.
            unsafe {
                let mut action: libc::sigaction = zeroed();
                if libc::sigaction(signal, null(), &mut action) != 0
                    || action.sa_sigaction != libc::SIG_DFL
                {
                    return false;
                }
                action.sa_sigaction = nothing as *const () as usize;
                action.sa_flags = libc::SA_RESTART;
                libc::sigaction(signal, &action, null_mut()) == 0
            }
        })
    })
}

/// Signals the thread that made it, again and again.
struct Timer(libc::timer_t);

impl Timer {
    fn start() -> Option<Self> {
        let signal = signal()?;
        // SAFETY: zeros are a valid sigset_t, sigevent and itimerspec; all pointers are to local values that live over
        // the calls, and the timer is one that timer_create gave.
        unsafe {
            let mut set: libc::sigset_t = zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, null_mut());
            let mut event: libc::sigevent = zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer = null_mut();
            if libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) != 0 {
                return None;
            }
            let timer = Self(timer);
            let mut times: libc::itimerspec = zeroed();
            times.it_value.tv_nsec = PERIOD as _;
            times.it_interval.tv_nsec = PERIOD as _;
            (libc::timer_settime(timer.0, 0, &times, null_mut()) == 0).then_some(timer)
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the timer was made by timer_create, and nothing uses it after this.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// Calls `work` in this thread, and interrupts every few milliseconds what waits in it. Takes the highest real-time
/// signal that has its default action; without one `work` may wait.
pub fn impatiently<T>(work: impl FnOnce() -> T) -> T {
    let _timer = Timer::start();
    work()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use rustix::net::sockopt::set_socket_linger;

    use super::*;

    /// Closing a socket with unsent data and a long SO_LINGER does not wait.
    #[test]
    fn a_lingering_socket_closes_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _unread = listener.accept().unwrap();
        set_socket_linger(&socket, Some(Duration::from_secs(300))).unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 1 << 16]).is_ok() {}
        let began = Instant::now();
        impatiently(|| drop(socket));
        assert!(began.elapsed() < Duration::from_secs(100));
    }
}
