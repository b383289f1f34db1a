//! The owners of an inode's POSIX locks (option `host_locks`).

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use uvfs_server::fs::{Handle, LockOwner};

/// An owner of POSIX locks of an inode.
pub(crate) struct Owner {
    /// Its own open file description; closing it gives back what it holds.
    pub(crate) fd: Arc<OwnedFd>,
    /// The process that last locked by it.
    pub(crate) pid: u32,
    /// The handle that it last locked by.
    pub(crate) fh: Handle,
}

/// The owners of an inode's POSIX locks. Most inodes have none, and then no room for the map either.
#[derive(Default)]
#[allow(clippy::box_collection)]
pub(crate) struct Owners(pub(crate) Option<Box<HashMap<LockOwner, Owner>>>);

impl Owners {
    pub(crate) fn get(&self, owner: LockOwner) -> Option<Arc<OwnedFd>> {
        Some(self.0.as_ref()?.get(&owner)?.fd.clone())
    }

    pub(crate) fn remove(&mut self, owner: LockOwner) -> Option<Owner> {
        let owners = self.0.as_mut()?;
        let removed = owners.remove(&owner);
        if owners.is_empty() {
            self.0 = None;
        }
        removed
    }
}
