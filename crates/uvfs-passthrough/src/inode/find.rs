//! Finds the inode of a name, a node or a descriptor, and opens it.

use crate::Source;
use crate::apart::open_leased;
use crate::mount::Mount;
use crate::sys::{self, O_PATH, Result};
use rustix::fs::{OFlags, Statx};
use rustix::io::Errno;
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use uvfs_server::fs::{Node, ROOT};

use super::key::Key;
use super::mounts::Mounts;
use super::path_fds::PathFd;
use super::{Inode, born};

/// Whether handles of what is in a directory say which inode they are of.
pub(super) fn tells_number(directory: &Inode) -> bool {
    let handle = directory.key.handle.as_ref();
    handle.is_some_and(|handle| handle.ino(directory.mount.fs_type).is_some())
}

/// The root's inode.
pub(crate) fn root(source: OwnedFd, mounts: &Mounts) -> Result<Arc<Inode>> {
    let st = sys::stat(source.as_fd())?;
    let kind = u32::from(st.stx_mode) & libc::S_IFMT;
    let mount = Mount::new(st.stx_mnt_id, source.as_fd(), &st);
    let mount = mounts.add(mount, false);
    let handle = match mount.fd {
        Some(_) => Some(sys::handle_at(source.as_fd(), c"")?.0),
        None => None,
    };
    Ok(Arc::new(Inode {
        node: ROOT,
        key: Key::new(st.stx_mnt_id, &st, handle),
        kind,
        born: born(&st),
        mount,
        held: Some(source),
        used: AtomicBool::new(false),
        opens: AtomicUsize::new(0),
        state: Mutex::default(),
    }))
}

impl Source {
    pub(crate) fn inode(&self, node: Node) -> Result<Arc<Inode>> {
        self.inodes.get(node)
    }

    /// A descriptor that stands for the inode; good for *at() calls and /proc paths, not for
    /// reading.
    pub(crate) fn path_fd(&self, inode: &Arc<Inode>) -> Result<PathFd> {
        if inode.held.is_some() {
            return Ok(PathFd::Held(inode.clone()));
        }
        {
            let state = inode.state();
            if let Some(kept) = &state.kept {
                return Ok(PathFd::Kept(kept.clone()));
            }
            if let Some(fd) = &state.fd {
                inode.used.store(true, Ordering::Relaxed);
                return Ok(PathFd::Cached(fd.clone()));
            }
            if let Some(file) = state.open.upgrade() {
                return Ok(PathFd::Open(file));
            }
        }
        let fd = Arc::new(self.open_inode(inode, O_PATH)?);
        self.path_fds.insert(inode, fd.clone());
        Ok(PathFd::Cached(fd))
    }

    /// A descriptor for `*at()` calls with names in a directory.
    pub(crate) fn dir_fd(&self, node: Node) -> Result<(Arc<Inode>, PathFd)> {
        let inode = self.inode(node)?;
        if !inode.is_dir() {
            return Err(Errno::NOTDIR);
        }
        let fd = self.path_fd(&inode)?;
        Ok((inode, fd))
    }

    /// Opens the inode. Only what is safe to open: never a device, pipe or socket but by O_PATH.
    pub(crate) fn open_inode(&self, inode: &Arc<Inode>, flags: OFlags) -> Result<OwnedFd> {
        if !flags.contains(OFlags::PATH) && !inode.is_regular() && !inode.is_dir() {
            return Err(Errno::NXIO);
        }
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        let open = |flags| {
            if let Some(held) = &inode.held {
                return sys::reopen(held.as_fd(), flags);
            }
            let (Some(mount), Some(handle)) = (self.mount_for(inode, flags), &inode.key.handle)
            else {
                unreachable!("an inode that holds no descriptor has a handle")
            };
            match sys::open_handle(mount, handle, flags) {
                Err(Errno::STALE) => {
                    // Some file systems find no handle of a file whose last name is gone.
                    let state = inode.state();
                    let open = state.open.upgrade();
                    let (kept, fd) = (state.kept.clone(), state.fd.clone());
                    drop(state);
                    match (open, kept, fd) {
                        (Some(file), _, _) => sys::reopen(file.as_fd(), flags),
                        (_, Some(kept), _) => sys::reopen(kept.as_fd(), flags),
                        (_, _, Some(fd)) => sys::reopen(fd.as_fd(), flags),
                        _ => Err(Errno::STALE),
                    }
                }
                result => result,
            }
        };
        let leasable = inode.is_regular() && !flags.contains(OFlags::PATH) && !inode.mount.remote;
        let attempt = || match leasable {
            true => open_leased(flags, open),
            false => open(flags),
        };
        self.with_descriptors(attempt)
    }

    /// Makes an attempt once more without the descriptors that are kept, if there was none left.
    fn with_descriptors(&self, attempt: impl Fn() -> Result<OwnedFd>) -> Result<OwnedFd> {
        match attempt() {
            Err(Errno::MFILE | Errno::NFILE) => {
                self.path_fds.clear();
                self.removed.clear();
                self.thin_out();
                attempt()
            }
            result => result,
        }
    }

    /// Opens a name as O_PATH.
    pub(super) fn open_name(&self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd> {
        self.with_descriptors(|| rustix::fs::openat(dir, name, O_PATH, rustix::fs::Mode::empty()))
    }

    /// Finds a name and counts a lookup of what it names.
    pub(crate) fn find(
        &self,
        parent: &Arc<Inode>,
        dir: BorrowedFd<'_>,
        name: &CStr,
    ) -> Result<(Arc<Inode>, Statx)> {
        let batches = self.mounts.watching.batches();
        if parent.mount.fd.is_some() {
            // Without opening it, if its handle tells its number or the kernel knows it already.
            match sys::handle_at(dir, name) {
                Ok((handle, mount)) if mount == parent.mount.id => {
                    let st = sys::stat_at(dir, name)?;
                    let key = Key::new(mount, &st, Some(handle));
                    // The name may have changed hands between the two calls. Then the number is
                    // another, but for a file that is gone (its handle leads nowhere) and whose
                    // number the next one got.
                    let number = key
                        .handle
                        .as_ref()
                        .and_then(|it| it.ino(parent.mount.fs_type));
                    if number == Some(st.stx_ino) && st.stx_mnt_id == mount {
                        let inode = self.insert(key, parent.mount.clone(), &st, None)?;
                        if self.mounts.watching.batches() == batches {
                            return Ok((inode, st));
                        }
                        // The host changed something, maybe this before it was known.
                        match sys::stat_at(dir, name) {
                            Ok(st) if inode.is(&st) => return Ok((inode, st)),
                            _ => self.inodes.forget(inode.node, 1),
                        }
                        return self.find_new(parent, dir, name);
                    }
                    // Where handles don't tell: no inode that is known has both.
                    if let Some(inode) = self.inodes.find(&key) {
                        return Ok((inode, st));
                    }
                }
                Err(errno @ (Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG)) => {
                    return Err(errno);
                }
                // On another mount, or of a kind without handles.
                _ => {}
            }
        }
        self.find_new(parent, dir, name)
    }

    /// As `find`, of a name that was just made.
    pub(crate) fn find_new(
        &self,
        parent: &Arc<Inode>,
        dir: BorrowedFd<'_>,
        name: &CStr,
    ) -> Result<(Arc<Inode>, Statx)> {
        let fd = self.open_name(dir, name)?;
        self.adopt(parent, fd)
    }

    /// Counts a lookup of what `fd`, an O_PATH descriptor found in `parent`, stands for.
    pub(crate) fn adopt(&self, parent: &Arc<Inode>, fd: OwnedFd) -> Result<(Arc<Inode>, Statx)> {
        let batches = self.mounts.watching.batches();
        let st = self.stat_found(parent, fd.as_fd())?;
        let (key, mount) = self.identify(parent, fd.as_fd(), &st)?;
        if key.handle.is_none() {
            let inode = self.insert(key, mount, &st, Some(fd))?;
            return Ok((inode, st));
        }
        let inode = self.insert(key, mount, &st, None)?;
        let st = self.current(batches, st, fd.as_fd(), &inode)?;
        if inode.is_dir() && inode.held.is_none() {
            // A file in this directory is likely wanted next.
            self.path_fds.insert(&inode, Arc::new(fd));
        }
        Ok((inode, st))
    }

    /// Counts a lookup of the file that was just made and opened as `file` in `parent`.
    pub(crate) fn adopt_open(
        &self,
        parent: &Arc<Inode>,
        file: BorrowedFd<'_>,
    ) -> Result<(Arc<Inode>, Statx)> {
        let batches = self.mounts.watching.batches();
        let st = sys::stat(file)?;
        let (key, mount) = self.identify(parent, file, &st)?;
        let held = match key.handle {
            Some(_) => None,
            // Not a copy of `file`: that would keep the file open for writing.
            None => Some(sys::reopen(file, OFlags::PATH)?),
        };
        let inode = self.insert(key, mount, &st, held)?;
        let st = self.current(batches, st, file, &inode)?;
        Ok((inode, st))
    }

    /// The attributes of an inode that was just looked up as `fd`, read again if the host has changed
    /// something since `batches`: then the inode may have changed before it was known.
    fn current(&self, batches: u64, st: Statx, fd: BorrowedFd<'_>, inode: &Inode) -> Result<Statx> {
        if self.mounts.watching.batches() == batches {
            return Ok(st);
        }
        sys::stat(fd).inspect_err(|_| self.inodes.forget(inode.node, 1))
    }

    fn identify(
        &self,
        parent: &Arc<Inode>,
        fd: BorrowedFd<'_>,
        st: &Statx,
    ) -> Result<(Key, Arc<Mount>)> {
        let mount = if st.stx_mnt_id == parent.mount.id {
            parent.mount.clone()
        } else if self.options.xdev {
            return Err(Errno::XDEV);
        } else {
            self.mounts.get(st.stx_mnt_id, fd, st, parent)
        };
        let handle = match mount.fd {
            Some(_) => sys::handle_at(fd, c"").ok().map(|(handle, _)| handle),
            None => None,
        };
        Ok((Key::new(mount.id, st, handle), mount))
    }

    pub(super) fn insert(
        &self,
        key: Key,
        mount: Arc<Mount>,
        st: &Statx,
        held: Option<OwnedFd>,
    ) -> Result<Arc<Inode>> {
        debug_assert!(held.is_some() || (key.handle.is_some() && mount.fd.is_some()));
        if let Some(fd) = &held {
            self.holds(fd);
        }
        self.inodes.find_or_insert(key, |node, key| {
            Arc::new(Inode {
                node,
                key,
                kind: u32::from(st.stx_mode) & libc::S_IFMT,
                born: born(st),
                mount,
                held,
                used: AtomicBool::new(false),
                opens: AtomicUsize::new(0),
                state: Mutex::default(),
            })
        })
    }

    /// Whether trying again may help: what is kept of removed files also keeps its space from being used.
    pub(crate) fn makes_room(&self, errno: Errno) -> bool {
        matches!(errno, Errno::NOSPC | Errno::DQUOT) && self.removed.makes_room()
    }
}
