//! Descriptors that stand for inodes.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};

use uvfs_io::ops::File;
use uvfs_sys::lock;

use super::Inode;
use super::kept::Kept;

/// The bounded cache of O_PATH descriptors. The descriptors are in the inodes; this is the order in
/// which they go, oldest first unless used since.
pub(crate) struct PathFds {
    queue: Mutex<VecDeque<Weak<Inode>>>,
    capacity: usize,
}

impl PathFds {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            queue: Mutex::new(VecDeque::with_capacity(capacity + 1)),
            capacity,
        }
    }

    pub(super) fn insert(&self, inode: &Arc<Inode>, fd: Arc<OwnedFd>) {
        {
            let mut state = inode.state();
            if state.fd.is_some() {
                return;
            }
            state.fd = Some(fd);
        }
        let mut queue = lock(&self.queue);
        queue.push_back(Arc::downgrade(inode));
        // Each round drops an entry or clears a flag, so this ends within two rounds of the queue
        // even while others set the flags again.
        for _ in 0..2 * queue.len() {
            if queue.len() <= self.capacity {
                return;
            }
            let Some(oldest) = queue.pop_front() else {
                return;
            };
            let Some(oldest) = oldest.upgrade() else {
                continue;
            };
            if oldest.used.swap(false, Ordering::Relaxed) {
                queue.push_back(Arc::downgrade(&oldest));
                continue;
            }
            oldest.drop_fd();
        }
    }

    /// Closes all that no call uses at the moment, when descriptors run out.
    pub(super) fn clear(&self) {
        let queue = std::mem::take(&mut *lock(&self.queue));
        for inode in queue.iter().filter_map(Weak::upgrade) {
            inode.drop_fd();
        }
    }
}

/// A descriptor that stands for an inode, O_PATH or not, for the length of a call.
pub(crate) enum PathFd {
    Held(Arc<Inode>),
    Cached(Arc<OwnedFd>),
    Kept(Arc<Kept>),
    Open(Arc<File>),
}

impl AsFd for PathFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            PathFd::Held(inode) => match &inode.held {
                Some(fd) => fd.as_fd(),
                None => unreachable!("only made of an inode that holds one"),
            },
            PathFd::Cached(fd) => fd.as_fd(),
            PathFd::Kept(kept) => kept.as_fd(),
            PathFd::Open(file) => file.as_fd(),
        }
    }
}
