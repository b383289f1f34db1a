//! Inodes are saved for the next server of a mount, and restored there: docs/survive.md.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use uvfs_server::fs::{Node, Orphans, Saved};

use super::{Inode, Key, born as born_at};
use crate::Source;
use crate::mount::Mount;
use crate::sys::{self, FileHandle, Result};

/// A bit beside the nanoseconds of a time: see [`State::set_id`](super::State::set_id).
const SET_ID: u64 = 1 << 31;
/// No descriptor.
const NONE: RawFd = -1;

impl Source {
    pub(crate) fn save_inode(&self, node: Node, to: &mut Vec<u8>) -> Result<()> {
        let inode = self.inode(node)?;
        let number = |fd: &dyn AsFd| fd.as_fd().as_raw_fd();
        let (kept, set_id) = {
            let state = inode.state();
            (state.kept.clone(), state.set_id)
        };
        let flag = if set_id { SET_ID } else { 0 };
        let fds = [
            inode.mount.fd.as_ref().map(|fd| number(fd)),
            inode.held.as_ref().map(|fd| number(fd)),
            kept.as_ref().map(|fd| number(&**fd)),
        ];
        let words = [
            inode.mount.id,
            inode.key.ino,
            u64::from(inode.key.device.0) << 32 | u64::from(inode.key.device.1),
            inode.born.0 as u64,
            u64::from(inode.kind) << 32 | u64::from(inode.born.1) | flag,
        ];
        to.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
        to.extend(fds.iter().flat_map(|fd| fd.unwrap_or(NONE).to_ne_bytes()));
        if let Some(handle) = &inode.key.handle {
            let (kind, bytes) = handle.parts();
            to.extend(kind.to_ne_bytes());
            to.extend(bytes);
        }
        Ok(())
    }

    /// Makes an inode known again. What is claimed has to be the inode: a server that was killed may have closed a
    /// descriptor, and opened another under the same number.
    pub(crate) fn restore_inode(
        &self,
        node: Node,
        lookups: u64,
        saved: &[u8],
        orphans: &Orphans,
    ) -> Result<()> {
        let mut saved = Saved(saved);
        let [mount_id, ino, device, born, kind] = saved.words()?;
        let [mount_fd, held, kept] = saved.numbers()?;
        let handle = match saved.0.is_empty() {
            true => None,
            false => {
                let [kind] = saved.numbers()?;
                Some(FileHandle::from_parts(kind, saved.0).ok_or(Errno::INVAL)?)
            }
        };
        let device = ((device >> 32) as u32, device as u32);
        let set_id = kind & SET_ID != 0;
        let kind = kind & !SET_ID;
        let since = (born as i64, kind as u32);
        // Claims a descriptor, if it is of this inode: another's stays for that one.
        let own = |fd: RawFd| {
            let st = orphans.look(fd, sys::stat).ok_or(Errno::STALE)??;
            let same = st.stx_ino == ino && born_at(&st) == since && st.stx_mnt_id == mount_id;
            if !same || (st.stx_dev_major, st.stx_dev_minor) != device {
                return Err(Errno::STALE);
            }
            orphans.claim(fd).map_err(|_| Errno::STALE)
        };
        let held = match held {
            NONE => None,
            held => Some(own(held)?),
        };
        let root = &self.inodes.root().mount;
        let known = match root.id == mount_id {
            true => Some(root.clone()),
            false => (self.mounts.all().into_iter()).find(|known| known.id == mount_id),
        };
        let mount = match known {
            Some(known) => known,
            None => {
                let made = |file: BorrowedFd<'_>| {
                    let st = sys::stat(file)?;
                    match st.stx_mnt_id == mount_id {
                        true => Ok(self.mounts.add(Mount::new(mount_id, file, &st), true)),
                        false => Err(Errno::STALE),
                    }
                };
                match &held {
                    Some(held) => made(held.as_fd())?,
                    None => orphans.look(mount_fd, made).ok_or(Errno::STALE)??,
                }
            }
        };
        if held.is_none() && (handle.is_none() || mount.fd.is_none()) {
            return Err(Errno::STALE);
        }
        let inode = Arc::new(Inode {
            node,
            key: Key::of(mount.id, device, ino, handle),
            kind: (kind >> 32) as u32,
            born: since,
            mount,
            held,
            used: AtomicBool::new(false),
            opens: AtomicUsize::new(0),
            state: Mutex::default(),
        });
        if let Some(held) = &inode.held {
            self.holds(held);
        }
        {
            // The kernel may have cached anything of the file, by any kind of open.
            let mut state = inode.state();
            state.was_backed = true;
            state.set_id = set_id;
        }
        self.inodes.restore(inode.clone(), lookups)?;
        if kept != NONE
            && let Ok(kept) = own(kept)
        {
            self.removed.keep(0, &inode, kept);
        }
        Ok(())
    }
}
