//! An event that threads and tasks wait for, and that costs its sender nothing when none does.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::task::Waker;
use std::time::Duration;
use uvfs_sys::wait_while;

#[derive(Debug, Default)]
struct Waiters {
    sequence: u64,
    wakers: Vec<Waker>,
}

/// Something changed: look again. The condition itself lives elsewhere, under its own lock.
#[derive(Debug, Default)]
pub(crate) struct Event {
    waiters: AtomicU32,
    inner: Mutex<Waiters>,
    changed: Condvar,
}

impl Event {
    fn lock(&self) -> MutexGuard<'_, Waiters> {
        uvfs_sys::lock(&self.inner)
    }

    /// Wakes all waiters. Call after the condition has changed and its lock is free.
    pub(crate) fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::Relaxed) == 0 {
            return;
        }
        let wakers = {
            let mut inner = self.lock();
            inner.sequence += 1;
            let wakers = std::mem::take(&mut inner.wakers);
            self.waiters
                .fetch_sub(wakers.len() as u32, Ordering::Relaxed);
            wakers
        };
        self.changed.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits until `check` answers, which is asked again after every notification.
    pub(crate) fn wait<T>(&self, mut check: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(found) = self.wait_timeout(&mut check, Duration::from_secs(3600)) {
                return found;
            }
        }
    }

    /// As [`Event::wait`], but gives up after `timeout`.
    pub(crate) fn wait_timeout<T>(
        &self,
        mut check: impl FnMut() -> Option<T>,
        timeout: Duration,
    ) -> Option<T> {
        if let Some(found) = check() {
            return Some(found);
        }
        let deadline = std::time::Instant::now() + timeout;
        self.waiters.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let result = loop {
            let before = self.lock().sequence;
            if let Some(found) = check() {
                break Some(found);
            }
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                break None;
            }
            let same = |inner: &mut Waiters| inner.sequence == before;
            drop(wait_while(&self.changed, self.lock(), left, same));
        };
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        result
    }

    /// Has `waker` called at the next notification. Check the condition once more afterwards.
    pub(crate) fn register(&self, waker: &Waker) {
        let mut inner = self.lock();
        if !inner.wakers.iter().any(|w| w.will_wake(waker)) {
            inner.wakers.push(waker.clone());
            self.waiters.fetch_add(1, Ordering::SeqCst);
        }
        drop(inner);
        fence(Ordering::SeqCst);
    }
}
