//! The mounts of the host below the source.

use crate::mount::Mount;
use crate::watcher::Watching;
use rustix::fs::Statx;
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};
use uvfs_sys::lock;

use super::Inode;

/// The mounts seen below the source, by id. A mount in use is kept by its inodes, and its id is not
/// used again while its descriptor is open.
#[derive(Default)]
pub(crate) struct Mounts {
    known: Mutex<HashMap<u64, Weak<Mount>>>,
    pub(crate) watching: Watching,
}

impl Mounts {
    /// The mount that `fd`, a descriptor of a file of `kind` found in `parent`, is on.
    pub(super) fn get(
        &self,
        id: u64,
        fd: BorrowedFd<'_>,
        st: &Statx,
        parent: &Inode,
    ) -> Arc<Mount> {
        if let Some(mount) = lock(&self.known).get(&id).and_then(Weak::upgrade) {
            return mount;
        }
        // The name that leads there is cached by what is known of the mount.
        self.add(Mount::new(id, fd, st), parent.is_watched())
    }

    /// The same mount that another thread has added, or this one; it is watched if it is to be, and can be.
    pub(super) fn add(&self, mount: Mount, watched: bool) -> Arc<Mount> {
        let mount = Arc::new(mount);
        if watched && let Some(watcher) = self.watching.get() {
            watcher.add(&mount);
        }
        let mut mounts = lock(&self.known);
        if let Some(other) = mounts.get(&mount.id).and_then(Weak::upgrade) {
            return other;
        }
        mounts.retain(|_, mount| mount.strong_count() > 0);
        mounts.insert(mount.id, Arc::downgrade(&mount));
        mount
    }

    /// All mounts in use.
    pub(crate) fn all(&self) -> Vec<Arc<Mount>> {
        let known = lock(&self.known);
        known.values().filter_map(Weak::upgrade).collect()
    }

    /// The mounts in use whose file systems are watched.
    pub(crate) fn watched(&self) -> Vec<Arc<Mount>> {
        let mut mounts = self.all();
        mounts.retain(|mount| mount.watched.get().is_some());
        mounts
    }
}
