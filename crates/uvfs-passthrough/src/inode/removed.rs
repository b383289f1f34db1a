//! Descriptors of files that lost their last name, and of names that are about to go.

use crate::Source;
use crate::sys::{self, FileHandle};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use uvfs_server::fs::Unlinked;
use uvfs_sys::{lock, wait_while};

use super::Inode;
use super::find::tells_number;
use super::kept::{Kept, OpenCount};
use super::key::Key;

/// Descriptors of inodes whose last name was removed through the mount, kept for programs that still are in or at them:
/// no handle leads there any more. They close when the kernel forgets the inode, mostly at once, or when there are too
/// many: first those of the user who removed the most, oldest first.
pub(crate) struct Removed {
    /// With the user who removed the name.
    queue: Mutex<VecDeque<(u32, Weak<Inode>)>>,
    /// How many the queue may hold, forgotten ones included.
    capacity: usize,
    open: Arc<OpenCount>,
}

/// How long to wait for others to close descriptors, where space is wanted.
const CLOSING: Duration = Duration::from_millis(100);

impl Removed {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            queue: Mutex::default(),
            capacity,
            open: Arc::default(),
        }
    }

    /// Keeps a descriptor of an inode. A second one closes without a lock.
    pub(super) fn keep(&self, uid: u32, inode: &Arc<Inode>, fd: OwnedFd) {
        let cached = {
            let mut state = inode.state();
            if state.kept.is_some() {
                drop(state);
                return;
            }
            state.kept = Some(Arc::new(Kept::new(fd, &self.open)));
            state.fd.take()
        };
        drop(cached);
        let mut too_many = VecDeque::new();
        {
            let mut queue = lock(&self.queue);
            queue.push_back((uid, Arc::downgrade(inode)));
            if queue.len() > self.capacity {
                queue.retain(|(_, inode)| inode.strong_count() > 0);
                // Half stay, so that this is done once in many times.
                while queue.len() > self.capacity / 2 {
                    too_many.extend(excess(&mut queue, self.capacity / 2));
                }
            }
        }
        Self::close(&too_many);
    }

    pub(super) fn clear(&self) {
        let queue = std::mem::take(&mut *lock(&self.queue));
        Self::close(&queue);
    }

    fn close(inodes: &VecDeque<(u32, Weak<Inode>)>) {
        for inode in inodes.iter().filter_map(|(_, inode)| inode.upgrade()) {
            let kept = inode.state().kept.take();
            drop(kept);
        }
    }

    /// Closes all, for the space of their files. Whether any has closed.
    pub(crate) fn makes_room(&self) -> bool {
        let before = *lock(&self.open.count);
        if before == 0 {
            return false;
        }
        self.clear();
        // One that is being forgotten, or used, is another thread's to close.
        let count = lock(&self.open.count);
        self.open.waiting.fetch_add(1, Ordering::Relaxed);
        let waits = |count: &mut usize| *count >= before;
        let (count, _) = wait_while(&self.open.closed, count, CLOSING, waits);
        self.open.waiting.fetch_sub(1, Ordering::Relaxed);
        *count < before
    }
}

/// Takes out the oldest of the user who has the most: so many that `most` are left, or another user has as many.
fn excess<T>(queue: &mut VecDeque<(u32, T)>, most: usize) -> Vec<(u32, T)> {
    let mut users = HashMap::<u32, usize>::new();
    for (uid, _) in queue.iter() {
        *users.entry(*uid).or_default() += 1;
    }
    let Some((&user, &count)) = users.iter().max_by_key(|(_, count)| **count) else {
        return Vec::new();
    };
    users.remove(&user);
    let others = users.into_values().max().unwrap_or(0);
    let mut left = (count - others + 1).min(queue.len().saturating_sub(most));
    let (gone, kept) = queue.drain(..).partition(|(uid, _)| {
        let goes = *uid == user && left > 0;
        left -= usize::from(goes);
        goes
    });
    *queue = kept;
    let gone: VecDeque<_> = gone;
    gone.into()
}

/// A name that is about to be removed, of what may have to be kept or told.
pub(crate) enum Leaving {
    /// A known inode that the name led to when its handle was asked for, and its descriptor.
    Known(Arc<Inode>, OwnedFd),
    /// Another file that has a handle.
    Handle {
        fd: OwnedFd,
        handle: FileHandle,
        mount: u64,
    },
    /// Any other file, and its links.
    Key(Key, u32),
}

impl Leaving {
    fn of(fd: OwnedFd) -> Option<Self> {
        let (handle, mount) = sys::handle_at(fd.as_fd(), c"").ok()?;
        Some(Self::Handle { fd, handle, mount })
    }
}

impl Source {
    /// To be called before a name is removed, and given to `keep_removed` afterwards. Nothing where the name leads to
    /// no known inode.
    pub(crate) fn leaving(
        &self,
        parent: &Arc<Inode>,
        dir: BorrowedFd<'_>,
        name: &CStr,
    ) -> Option<Leaving> {
        if parent.mount.fd.is_none() {
            // Every inode holds a descriptor.
            let st = sys::stat_at(dir, name).ok()?;
            let key = Key::new(st.stx_mnt_id, &st, None);
            return Some(Leaving::Key(key, st.stx_nlink));
        }
        if tells_number(parent) {
            match sys::handle_at(dir, name) {
                Ok((handle, mount)) if mount == parent.mount.id => {
                    // A mount of such a file system has one device.
                    if let Some(ino) = handle.ino(parent.mount.fs_type) {
                        let key = Key::of(mount, parent.key.device, ino, Some(handle));
                        let inode = self.inodes.peek(&key)?;
                        let fd = self.open_name(dir, name).ok()?;
                        return Some(Leaving::Known(inode, fd));
                    }
                }
                Err(Errno::NOENT) => return None,
                // On another mount, or of a kind without handles.
                _ => {}
            }
        }
        Leaving::of(self.open_name(dir, name).ok()?)
    }

    /// Says what lost a name, and if that was its last one keeps it reachable for programs that still are in or at it.
    pub(crate) fn keep_removed(&self, uid: u32, leaving: Option<Leaving>) -> Unlinked {
        let (fd, known, handle) = match leaving {
            None => return Unlinked::default(),
            Some(Leaving::Key(key, links)) => {
                let inode = self.inodes.peek(&key);
                let is_dir = inode.as_ref().is_some_and(|inode| inode.is_dir());
                return Unlinked {
                    node: inode.map(|inode| inode.node),
                    last: links <= 1 || is_dir,
                };
            }
            Some(Leaving::Known(inode, fd)) => (fd, Some(inode), None),
            Some(Leaving::Handle { fd, handle, mount }) => (fd, None, Some((handle, mount))),
        };
        let Ok(st) = sys::stat(fd.as_fd()) else {
            return Unlinked::default();
        };
        let inode = known.filter(|inode| inode.is(&st)).or_else(|| {
            // Where one is known, the name changed hands between the two calls.
            let (handle, mount) = handle.or_else(|| sys::handle_at(fd.as_fd(), c"").ok())?;
            self.inodes.peek(&Key::new(mount, &st, Some(handle)))
        });
        let is_dir = u32::from(st.stx_mode) & libc::S_IFMT == libc::S_IFDIR;
        let last = st.stx_nlink == 0 || is_dir;
        if let Some(inode) = &inode
            && last
        {
            self.removed.keep(uid, inode, fd);
        }
        Unlinked {
            node: inode.map(|inode| inode.node),
            last,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A user who removes many files loses its own, and takes from other users none that they are still in.
    #[test]
    fn a_user_who_removes_many_files_loses_its_own() {
        let mut queue: VecDeque<_> = (0..100).map(|n| (n % 10, n)).collect();
        queue.extend((100..200).map(|n| (3, n)));
        let gone = excess(&mut queue, 100);
        assert_eq!(gone.len(), 100);
        assert!(gone.iter().all(|(uid, _)| *uid == 3));
        assert_eq!(gone[0], (3, 3));
        assert_eq!(queue.len(), 100);
        // All have as many: none loses all.
        while queue.len() > 50 {
            excess(&mut queue, 50);
        }
        for uid in 0..10 {
            assert!(queue.iter().any(|(one, _)| *one == uid), "{uid}");
        }
    }
}
