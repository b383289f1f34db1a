//! Waits for reads and writes of buffers.

use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::shared::{Progress, Shared};
use uvfs_sys::{lock, wait_while};

impl Shared {
    /// Something happened that others may wait for.
    pub(super) fn bump(&self) {
        let mut progress = lock(&self.progress);
        progress.round += 1;
        // Waking costs a system call, even when no thread sleeps.
        if progress.sleepers > 0 {
            self.changed.notify_all();
        }
    }

    pub(super) fn round(&self) -> u64 {
        lock(&self.progress).round
    }

    /// A buffer has no handle any more.
    pub fn released(&self) {
        if self.starving.load(Ordering::SeqCst) > 0 {
            self.bump();
        }
    }

    /// Sleeps until something happened since the round `seen`.
    pub(super) fn pause(&self, seen: u64, timeout: Duration) {
        let mut progress = lock(&self.progress);
        progress.sleepers += 1;
        let waits = |now: &mut Progress| now.round == seen;
        let (mut progress, _) = wait_while(&self.changed, progress, timeout, waits);
        progress.sleepers -= 1;
    }

    /// Collects completions, or waits until another thread did, once; returns early if `ready`.
    pub(super) fn step(&self, ready: impl Fn() -> bool) {
        let seen = self.round();
        let mut done = match self.leader.try_lock() {
            Ok(done) => done,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                // The leader moves `progress` on after it has stepped down.
                self.pause(seen, Duration::MAX);
                return;
            }
        };
        let collected = if ready() {
            1
        } else {
            self.engine.reap(true, &mut done)
        };
        for io in done.drain(..) {
            self.complete(io);
        }
        drop(done);
        self.bump();
        if collected == 0 {
            // Another thread claimed a buffer and is about to submit its I/O.
            self.pause(seen + 1, Duration::from_millis(1));
        }
    }

    /// Waits until `ready`, which some completion brings about.
    pub fn wait_until(&self, ready: impl Fn() -> bool) {
        while !ready() {
            self.step(&ready);
        }
    }

    /// Takes in what is done, without waiting.
    pub(super) fn poll(&self) {
        if let Ok(mut done) = self.leader.try_lock() {
            self.engine.reap(false, &mut done);
            for io in done.drain(..) {
                self.complete(io);
            }
            drop(done);
            // Also if no I/O was done: a thread that met this leader sleeps until the leader steps down.
            self.bump();
        }
    }
}
