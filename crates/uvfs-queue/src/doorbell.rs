//! The handshake between one that sleeps and those who bring it work.
//!
//! The sleeper announces its sleep and then looks once more for work; a bringer leaves work and
//! then looks whether the sleeper had announced. Whichever comes second sees the other, so work is
//! never left with the sleeper asleep; and a bringer makes the costly wake-up call only for a
//! sleeper that really sleeps, and only one bringer does.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Says whether a waiter sleeps or is about to.
#[derive(Debug, Default)]
pub struct Doorbell {
    sleeping: AtomicBool,
}

impl Doorbell {
    /// Of a waiter that is awake.
    pub fn new() -> Self {
        Self {
            sleeping: AtomicBool::new(false),
        }
    }

    /// The waiter is going to sleep. It must look for work after this call, and call
    /// [`Doorbell::awake`] in place of sleeping if there is some.
    pub fn announce_sleep(&self) {
        self.sleeping.store(true, Ordering::Relaxed);
        // Orders the announcement before the look for work; pairs with the fence in `ring`.
        fence(Ordering::SeqCst);
    }

    /// The waiter is awake.
    pub fn awake(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }

    /// Work was left: true for the one caller that must wake the waiter now.
    pub fn ring(&self) -> bool {
        // Orders the work before the look at the sleeper; pairs with the one in `announce_sleep`.
        fence(Ordering::SeqCst);
        self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::Relaxed)
    }
}
