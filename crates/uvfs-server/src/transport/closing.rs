//! Closes what clients sent, without making a queue's thread wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use uvfs_io::blocking;
use uvfs_queue::impatience::impatiently;
use uvfs_sys::lock;

/// One of a bounded number of places.
pub(super) struct Place(Arc<AtomicUsize>);

impl Place {
    /// Unless `most` are taken.
    pub(super) fn take(taken: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let more = |n| (n < most).then_some(n + 1);
        taken
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
            .ok()
            .map(|_| Self(taken.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The threads that close what clients sent, one for each user who has sent something.
#[derive(Default)]
pub(super) struct Closers(Mutex<HashMap<u32, Closer>>);

/// A user's thread, and how much waits for it.
struct Closer {
    thread: Arc<blocking::Pool>,
    waiting: Arc<AtomicUsize>,
}

impl Closers {
    /// Has a user's thread do `work`, unless `most` wait for it.
    pub(super) fn close(
        &self,
        uid: u32,
        most: usize,
        work: impl FnOnce() + Send + 'static,
    ) -> bool {
        let mut users = lock(&self.0);
        users.retain(|_, closer| closer.waiting.load(Ordering::Acquire) > 0);
        let closer = users.entry(uid).or_insert_with(|| Closer {
            thread: blocking::Pool::new(1),
            waiting: Arc::default(),
        });
        let Some(place) = Place::take(&closer.waiting, most) else {
            return false;
        };
        let thread = closer.thread.clone();
        drop(users);
        drop(thread.run(move || {
            impatiently(work);
            drop(place);
        }));
        true
    }
}
