//! The mounts of the host below the source.

use crate::apart::is_remote;
use crate::sys::{self};
use crate::watch::Watching;
use rustix::fs::{OFlags, Statx};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use uvfs_sys::lock;

use super::find::O_PATH;
use super::{Inode, Mount};

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
        let mount = Arc::new(Mount::new(id, fd, st));
        // The name that leads there is cached by what is known of the mount.
        if parent.is_watched()
            && let Some(watcher) = self.watching.get()
        {
            watcher.add(&mount);
        }
        let mut mounts = lock(&self.known);
        if let Some(other) = mounts.get(&id).and_then(Weak::upgrade) {
            return other;
        }
        mounts.retain(|_, mount| mount.strong_count() > 0);
        mounts.insert(id, Arc::downgrade(&mount));
        mount
    }

    pub(super) fn add(&self, mount: &Arc<Mount>) {
        lock(&self.known).insert(mount.id, Arc::downgrade(mount));
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

impl Mount {
    /// Of a file on it. It has handles if that file has one which can be opened.
    pub(super) fn new(id: u64, file: BorrowedFd<'_>, st: &Statx) -> Self {
        let kind = u32::from(st.stx_mode) & libc::S_IFMT;
        let try_handles = || {
            let fd = match kind {
                libc::S_IFDIR => sys::reopen(file, OFlags::RDONLY | OFlags::DIRECTORY)?,
                libc::S_IFREG => sys::reopen(file, OFlags::RDONLY | OFlags::NONBLOCK)?,
                // Opening anything else could act on a device or wait for a peer.
                _ => return Err(Errno::OPNOTSUPP),
            };
            let (handle, _) = sys::handle_at(file, c"")?;
            sys::open_handle(fd.as_fd(), &handle, O_PATH)?;
            Ok(fd)
        };
        let fd = try_handles();
        if let Err(errno) = &fd {
            tracing::info!(mount = id, %errno, "no file handles: a descriptor for every inode");
        }
        let fs_type = rustix::fs::fstatfs(file).map_or(0, |stat| stat.f_type);
        Self {
            id,
            fd: fd.ok(),
            private: OnceLock::new(),
            fs_type,
            remote: is_remote(fs_type),
            // ext2 to ext4, and F2FS.
            reserves: matches!(fs_type, 0xef53 | 0xf2f5_2010),
            device: (st.stx_dev_major, st.stx_dev_minor),
            watched: OnceLock::new(),
            in_memory: uvfs_io::ops::in_memory(file),
            no_dontcache: AtomicBool::new(false),
            no_backing: AtomicBool::new(false),
        }
    }
}
