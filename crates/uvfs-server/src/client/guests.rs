//! Limits of a guest, another user than the server's, over all of its sessions together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use foldhash::HashMap;
use rustix::io::Errno;

use uvfs_sys::lock;

/// A guest that was cut off may attach again after so long: else it could stop others time and again.
const BANNED: Duration = Duration::from_secs(10);

/// Limits of one guest, however many sessions it has.
#[derive(Clone, Copy, Debug)]
pub struct GuestLimits {
    /// Sessions at a time; further ones get EAGAIN.
    pub sessions: usize,
    /// Pages of 4 KiB of all its arenas; a session with more gets EAGAIN.
    pub arena_pages: u64,
    /// Imported files that are open, and as many that it may still ask about; further ones get EMFILE.
    pub handles: usize,
}

impl Default for GuestLimits {
    fn default() -> Self {
        Self {
            sessions: 128,
            arena_pages: 1 << 20,
            handles: 8192,
        }
    }
}

#[derive(Default)]
struct Usage {
    sessions: usize,
    pages: u64,
    handles: usize,
    nodes: usize,
    cut_off: Option<Instant>,
}

impl Usage {
    fn is_banned(&self) -> bool {
        self.cut_off.is_some_and(|cut| cut.elapsed() < BANNED)
    }
}

/// The guests of a server, by their users.
pub(crate) struct Guests {
    limits: GuestLimits,
    users: Mutex<HashMap<u32, Usage>>,
}

impl Guests {
    pub(crate) fn new(limits: GuestLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            users: Mutex::default(),
        })
    }

    /// One more session of a user's.
    ///
    /// # Errors
    /// EAGAIN when it has enough, or was cut off a moment ago.
    pub(crate) fn comes(self: &Arc<Self>, uid: u32) -> Result<Guest, Errno> {
        let mut users = lock(&self.users);
        users.retain(|_, usage| usage.sessions > 0 || usage.is_banned());
        let usage = users.entry(uid).or_default();
        if usage.sessions >= self.limits.sessions || usage.is_banned() {
            return Err(Errno::AGAIN);
        }
        usage.sessions += 1;
        Ok(Guest {
            guests: self.clone(),
            uid,
            pages: AtomicU64::new(0),
        })
    }
}

/// A session of a guest's.
pub(crate) struct Guest {
    guests: Arc<Guests>,
    uid: u32,
    pages: AtomicU64,
}

impl Guest {
    fn with<T>(&self, change: impl FnOnce(&mut Usage, &GuestLimits) -> T) -> T {
        let mut users = lock(&self.guests.users);
        // There for as long as a session is.
        change(users.entry(self.uid).or_default(), &self.guests.limits)
    }

    /// The session has an arena of so many pages.
    ///
    /// # Errors
    /// EAGAIN when that is more than the guest may have.
    pub(crate) fn has_pages(&self, pages: u64) -> Result<(), Errno> {
        self.with(|usage, limits| {
            if usage.pages + pages > limits.arena_pages {
                return Err(Errno::AGAIN);
            }
            usage.pages += pages;
            self.pages.fetch_add(pages, Ordering::Relaxed);
            Ok(())
        })
    }

    /// Whether it may have one more open file. It then has.
    pub(crate) fn opens(&self) -> bool {
        self.with(|usage, limits| {
            let may = usage.handles < limits.handles && usage.nodes < limits.handles;
            usage.handles += usize::from(may);
            may
        })
    }

    /// Files were closed.
    pub(crate) fn closed(&self, count: usize) {
        self.with(|usage, _| usage.handles -= count);
    }

    /// A session was given a node that it did not have.
    pub(crate) fn knows(&self) {
        self.with(|usage, _| usage.nodes += 1);
    }

    /// A session gave nodes back.
    pub(crate) fn forgot(&self, count: usize) {
        self.with(|usage, _| usage.nodes -= count);
    }

    /// It did not answer a recall.
    pub(crate) fn was_cut_off(&self) {
        self.with(|usage, _| usage.cut_off = Some(Instant::now()));
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let pages = *self.pages.get_mut();
        self.with(|usage, _| {
            usage.sessions -= 1;
            usage.pages -= pages;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest has at most its sessions, pages and handles, and gives all of them back.
    #[test]
    fn a_guest_has_no_more_than_it_may_and_gives_all_back() {
        let guests = Guests::new(GuestLimits {
            sessions: 2,
            arena_pages: 100,
            handles: 3,
        });
        for _ in 0..3 {
            let (a, b) = (guests.comes(7).unwrap(), guests.comes(7).unwrap());
            assert_eq!(guests.comes(7).err(), Some(Errno::AGAIN));
            let _other = guests.comes(8).unwrap();
            assert_eq!(a.has_pages(101), Err(Errno::AGAIN));
            a.has_pages(60).unwrap();
            assert_eq!(b.has_pages(60), Err(Errno::AGAIN));
            b.has_pages(40).unwrap();
            assert!(a.opens() && b.opens() && a.opens() && !b.opens());
            a.closed(1);
            assert!(b.opens());
            a.closed(1);
            b.closed(2);
            // Files that are closed and not forgotten count, too.
            for _ in 0..3 {
                a.knows();
            }
            assert!(!b.opens());
            a.forgot(1);
            assert!(b.opens());
            b.closed(1);
            a.forgot(2);
        }
        guests.comes(7).unwrap().was_cut_off();
        assert_eq!(guests.comes(7).err(), Some(Errno::AGAIN));
        assert!(guests.comes(8).is_ok());
    }
}
