//! The descriptor that keeps an inode reachable when it has lost its last name.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use uvfs_sys::lock;

/// How many descriptors are open, told when one has closed.
#[derive(Default)]
pub(super) struct OpenCount {
    pub(super) count: Mutex<usize>,
    pub(super) closed: Condvar,
    /// The number of threads that wait for that. Only changed under the lock.
    pub(super) waiting: AtomicUsize,
}

/// An O_PATH descriptor of an inode that has lost its last name.
pub(crate) struct Kept {
    /// Always there until it is dropped.
    fd: Option<OwnedFd>,
    open: Arc<OpenCount>,
}

impl AsFd for Kept {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            None => unreachable!("only dropping takes it"),
        }
    }
}

impl Kept {
    /// Counts the descriptor until it has closed.
    pub(super) fn new(fd: OwnedFd, open: &Arc<OpenCount>) -> Self {
        *lock(&open.count) += 1;
        Self {
            fd: Some(fd),
            open: open.clone(),
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // Counted until it has closed, which is when its file's space is free.
        self.fd = None;
        *lock(&self.open.count) -= 1;
        if self.open.waiting.load(Ordering::Relaxed) > 0 {
            self.open.closed.notify_all();
        }
    }
}
