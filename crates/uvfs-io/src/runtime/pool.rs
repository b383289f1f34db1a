//! The driver without io_uring: a pool of threads makes the calls that may wait, and the runtime's own thread
//! waits for descriptors and timeouts by ppoll(2).
//!
//! A call that a thread has begun can't be cancelled: it runs to its end, and its memory is kept until then, as
//! with an operation of a ring that the kernel can't cancel.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::CapabilitiesSecureBits;

use super::call::Call;
use super::remote::{Message, Shared};
use crate::blocking;

/// Threads that make calls. A request makes one call at a time, and a core's thread has 64 requests under way, so
/// calls that never end use up all threads only where hundreds of requests wait for them.
const THREADS: usize = 512;

fn threads() -> &'static Arc<blocking::Pool> {
    static POOL: OnceLock<Arc<blocking::Pool>> = OnceLock::new();
    POOL.get_or_init(|| blocking::Pool::new(THREADS))
}

/// The user and group by which the host charges for what a call allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    uid: u32,
    gid: u32,
}

impl Identity {
    /// The calling thread's.
    fn current() -> Self {
        // SAFETY: takes no pointers. No user or group has this number, so that nothing changes.
        let (uid, gid) = unsafe { (libc::setfsuid(u32::MAX), libc::setfsgid(u32::MAX)) };
        Self {
            uid: uid as u32,
            gid: gid as u32,
        }
    }

    /// The process's.
    fn own() -> Self {
        Self {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        }
    }

    /// Makes it the calling thread's, which keeps its capabilities.
    fn assume(self) {
        thread_local! {
            static KEEPS: () = {
                if let Ok(bits) = rustix::thread::capabilities_secure_bits() {
                    let keep = bits | CapabilitiesSecureBits::NO_SETUID_FIXUP;
                    // Without it the call has less than the server's capabilities: stricter, never laxer.
                    let _ = rustix::thread::set_capabilities_secure_bits(keep);
                }
            };
        }
        KEEPS.with(|()| ());
        // SAFETY: takes no pointers, and concerns the calling thread alone.
        unsafe {
            libc::setfsgid(self.gid);
            libc::setfsuid(self.uid);
        }
    }

    /// Runs `work` with it. A thread of the pool begins with what the thread had that started it, and where no
    /// thread can be had this is the runtime's.
    fn within<T>(self, work: impl FnOnce() -> T) -> T {
        let before = Self::current();
        if before == self {
            return work();
        }
        self.assume();
        let done = work();
        before.assume();
        done
    }
}

/// A call on its way to another thread.
struct OnItsWay(Call);

// SAFETY: the OpEntry of the call keeps all that it points to until its completion has come back, whatever
// becomes of the runtime.
unsafe impl Send for OnItsWay {}

impl OnItsWay {
    fn make(self) -> i32 {
        // SAFETY: as above.
        unsafe { self.0.make() }
    }
}

pub(super) struct Pool {
    shared: Arc<Shared>,
    /// Descriptors that are waited for: the bell first.
    polled: Vec<libc::pollfd>,
    /// The operations of all but the first of them.
    polling: Vec<usize>,
    timeouts: BTreeSet<(Instant, usize)>,
    /// Operations that have ended here.
    completed: VecDeque<(usize, i32)>,
    /// Registered credentials; the first has number 1.
    identities: Vec<Identity>,
}

impl Pool {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        let bell = libc::pollfd {
            fd: shared.eventfd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        Self {
            shared: shared.clone(),
            polled: vec![bell],
            polling: Vec::new(),
            timeouts: BTreeSet::new(),
            completed: VecDeque::new(),
            identities: Vec::new(),
        }
    }

    pub(super) fn register_personality(&mut self) -> u16 {
        self.identities.push(Identity::current());
        self.identities.len() as u16
    }

    /// Begins with an operation.
    pub(super) fn start(&mut self, key: usize, call: Call, personality: u16) {
        match call {
            Call::Poll { fd, events } => {
                // Flags of epoll(7) are above the events of poll(2), and go.
                let events = events as i16;
                let revents = 0;
                self.polled.push(libc::pollfd {
                    fd,
                    events,
                    revents,
                });
                self.polling.push(key);
            }
            Call::Timeout(time) => {
                self.timeouts.insert((Instant::now() + time, key));
            }
            call => {
                let identity = match personality {
                    0 => Identity::own(),
                    number => self.identities[usize::from(number) - 1],
                };
                let (call, shared) = (OnItsWay(call), self.shared.clone());
                threads().start(move || {
                    let result = identity.within(|| call.make());
                    shared.send(Message::Completed(key, result));
                });
            }
        }
    }

    /// Ends an operation that waits here; one that a thread has goes on.
    pub(super) fn cancel(&mut self, key: usize) {
        let polled = self.polling.iter().position(|&polling| polling == key);
        let timed = self
            .timeouts
            .iter()
            .copied()
            .find(|&(_, timed)| timed == key);
        if let Some(at) = polled {
            self.polling.swap_remove(at);
            self.polled.swap_remove(at + 1);
        } else if let Some(timeout) = timed {
            self.timeouts.remove(&timeout);
        } else {
            return;
        }
        let canceled = -Errno::CANCELED.raw_os_error();
        self.completed.push_back((key, canceled));
    }

    pub(super) fn has_work(&self) -> bool {
        !self.completed.is_empty()
    }

    /// Whether a system call might find that something has ended.
    pub(super) fn has_unseen(&self) -> bool {
        !self.polling.is_empty() || !self.timeouts.is_empty()
    }

    /// Looks what has ended, and waits for something if `wait`.
    pub(super) fn enter(&mut self, wait: bool) -> io::Result<()> {
        let wait = wait && self.completed.is_empty();
        let until = match (wait, self.timeouts.first()) {
            (false, _) => Some(Duration::ZERO),
            (true, None) => None,
            (true, Some((end, _))) => Some(end.saturating_duration_since(Instant::now())),
        };
        let until = until.map(|time| libc::timespec {
            tv_sec: time.as_secs() as libc::time_t,
            tv_nsec: time.subsec_nanos().into(),
        });
        let until = until.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let len = self.polled.len() as libc::nfds_t;
        // SAFETY: the kernel writes to `len` structures that live over the call, and reads the time.
        let ready = unsafe { libc::ppoll(self.polled.as_mut_ptr(), len, until, std::ptr::null()) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::Interrupted => Ok(()),
                _ => Err(error),
            };
        }
        if ready > 0 {
            self.take_ready();
        }
        while let Some(&(end, key)) = self.timeouts.first() {
            if end > Instant::now() {
                break;
            }
            self.timeouts.pop_first();
            let time = -Errno::TIME.raw_os_error();
            self.completed.push_back((key, time));
        }
        Ok(())
    }

    /// Takes the descriptors that have an event.
    fn take_ready(&mut self) {
        if self.polled[0].revents != 0 {
            self.shared.bell_is_heard();
        }
        for at in (0..self.polling.len()).rev() {
            let events = self.polled[at + 1].revents;
            let result = match events {
                0 => continue,
                events if events & libc::POLLNVAL != 0 => -Errno::BADF.raw_os_error(),
                events => events.into(),
            };
            self.polled.swap_remove(at + 1);
            self.completed
                .push_back((self.polling.swap_remove(at), result));
        }
    }

    /// The next operation that has ended here, and its result.
    pub(super) fn completed(&mut self) -> Option<(usize, i32)> {
        self.completed.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// The host sees a caller's ids during that caller's call alone, and the thread keeps its capabilities.
    #[test]
    fn an_identity_holds_for_its_call_alone_and_keeps_capabilities() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let file = std::fs::File::create(dir.path().join(name)).unwrap();
            file.metadata().unwrap().uid()
        };
        let other = Identity { uid: 1, gid: 2 };
        // The directory is root's alone.
        assert_eq!(other.within(|| make("a")), 1);
        assert_eq!(Identity::own().within(|| make("b")), 0);
        assert_eq!(Identity::current(), Identity::own());
    }
}
