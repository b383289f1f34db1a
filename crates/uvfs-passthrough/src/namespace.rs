//! Names: finding, making, moving and removing them.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, RenameFlags};
use rustix::io::Errno;
use uvfs_proto::abi;
use uvfs_server::fs::{Bytes, Context, Entry, NewNode, Node, Unlinked};

use crate::Source;
use crate::creds::Caller;
use crate::sys::{self, ProcPath, Result};

/// Refuses what is not the name of an entry, so that no name leads out of its directory.
pub(crate) fn name_ok(name: &CStr) -> Result<()> {
    let name = name.to_bytes();
    if name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') {
        return Err(Errno::INVAL);
    }
    Ok(())
}

/// The sticky bit's rule, for a caller whom the host does not check: others' files in such a directory are not its to
/// remove. A program of the host may still put another file there between this and the removal.
fn may_remove(cx: &Context, caller: &Caller, dir: BorrowedFd<'_>, name: &CStr) -> Result<()> {
    if !caller.unchecked {
        return Ok(());
    }
    let above = sys::stat(dir)?;
    if u32::from(above.stx_mode) & libc::S_ISVTX == 0 || above.stx_uid == cx.uid {
        return Ok(());
    }
    match sys::stat_at(dir, name) {
        Ok(st) if st.stx_uid != cx.uid => Err(Errno::PERM),
        _ => Ok(()),
    }
}

impl Source {
    pub(crate) fn look_up(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Entry> {
        name_ok(name)?;
        let (parent, dir) = self.dir_fd(parent)?;
        match self.find(&parent, dir.as_fd(), name) {
            Ok((inode, st)) => Ok(self.entry(cx, &inode, &st)),
            Err(Errno::NOENT) if !self.negative_ttl(&parent).is_zero() => {
                Ok(Entry::missing(self.negative_ttl(&parent)))
            }
            Err(errno) => Err(errno),
        }
    }

    pub(crate) fn read_link(&self, node: Node) -> Result<Bytes> {
        let inode = self.inode(node)?;
        if inode.kind != libc::S_IFLNK {
            return Err(Errno::INVAL);
        }
        let target = rustix::fs::readlinkat(self.path_fd(&inode)?, c"", Vec::new())?;
        Ok(target.into_bytes())
    }

    /// Makes something by `make`, which is given the directory, and finds it.
    fn make(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        make: impl FnOnce(BorrowedFd<'_>) -> Result<()>,
    ) -> Result<Entry> {
        name_ok(name)?;
        self.writable()?;
        let (parent, dir) = self.dir_fd(parent)?;
        match make(dir.as_fd()) {
            Err(Errno::EXIST) if self.made_before(cx, dir.as_fd(), name) => {}
            made => made?,
        }
        let (inode, st) = self.find_new(&parent, dir.as_fd(), name)?;
        Ok(self.entry(cx, &inode, &st))
    }

    pub(crate) fn make_symlink(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        target: &CStr,
    ) -> Result<Entry> {
        self.make(cx, parent, name, |dir| {
            let link = |_: &Caller| rustix::fs::symlinkat(target, dir, name);
            self.creds.as_caller(cx, None, link)
        })
    }

    pub(crate) fn make_node(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new: &NewNode,
    ) -> Result<Entry> {
        self.make(cx, parent, name, |dir| {
            let dev = match new.kind {
                FileType::RegularFile | FileType::Fifo | FileType::Socket => 0,
                FileType::CharacterDevice | FileType::BlockDevice => {
                    // Any user may make a whiteout; devices take an administrator.
                    let whiteout = new.kind == FileType::CharacterDevice && new.rdev == 0;
                    if cx.uid != 0 && !whiteout {
                        return Err(Errno::PERM);
                    }
                    let (major, minor) = abi::decode_dev(new.rdev);
                    rustix::fs::makedev(major, minor)
                }
                _ => return Err(Errno::INVAL),
            };
            let mode = self.mode_in(cx, dir, new.mode)?;
            self.creds.as_caller(cx, Some(new.umask), |caller| {
                rustix::fs::mknodat(dir, name, new.kind, caller.mode(mode), dev)
            })
        })
    }

    pub(crate) fn make_dir(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new: &NewNode,
    ) -> Result<Entry> {
        self.make(cx, parent, name, |dir| {
            self.creds.as_caller(cx, Some(new.umask), |caller| {
                rustix::fs::mkdirat(dir, name, caller.mode(new.mode))
            })
        })
    }

    /// Removes a file, or with AT_REMOVEDIR a directory.
    pub(crate) fn remove_name(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        flags: AtFlags,
    ) -> Result<Unlinked> {
        name_ok(name)?;
        self.writable()?;
        let (parent, dir) = self.dir_fd(parent)?;
        let leaving = self.leaving(&parent, dir.as_fd(), name);
        let removed = self.creds.as_caller(cx, None, |caller| {
            may_remove(cx, caller, dir.as_fd(), name)?;
            rustix::fs::unlinkat(&dir, name, flags)
        });
        match removed {
            Err(Errno::NOENT) if self.again(cx).is_some() => {}
            removed => removed?,
        }
        Ok(self.keep_removed(cx.uid, leaving))
    }

    pub(crate) fn move_name(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new_parent: Node,
        new_name: &CStr,
        flags: RenameFlags,
    ) -> Result<Unlinked> {
        name_ok(name)?;
        name_ok(new_name)?;
        self.writable()?;
        let (_, from) = self.dir_fd(parent)?;
        let (new_parent, to) = self.dir_fd(new_parent)?;
        let replaced = match flags.is_empty() {
            true => self.leaving(&new_parent, to.as_fd(), new_name),
            false => None,
        };
        if self.moved_before(cx, (from.as_fd(), name), (to.as_fd(), new_name)) {
            return Ok(Unlinked::default());
        }
        self.creds.as_caller(cx, None, |caller| {
            may_remove(cx, caller, from.as_fd(), name)?;
            may_remove(cx, caller, to.as_fd(), new_name)?;
            rustix::fs::renameat_with(&from, name, &to, new_name, flags)
        })?;
        Ok(self.keep_removed(cx.uid, replaced))
    }

    /// Whether an earlier server has moved this name for the same request; else notes which inode is about to be moved.
    fn moved_before(
        &self,
        cx: &Context,
        (from, name): (BorrowedFd<'_>, &CStr),
        (to, new_name): (BorrowedFd<'_>, &CStr),
    ) -> bool {
        if !self.outlives() {
            return false;
        }
        let ino = |dir, name| sys::stat_at(dir, name).ok().map(|st| st.stx_ino);
        match self.again(cx).and_then(|again| again.note) {
            Some(moved) => ino(to, new_name) == Some(moved) && ino(from, name) != Some(moved),
            None => {
                if let Some(ino) = ino(from, name) {
                    self.note(cx, ino);
                }
                false
            }
        }
    }

    pub(crate) fn make_link(
        &self,
        cx: &Context,
        node: Node,
        new_parent: Node,
        new_name: &CStr,
    ) -> Result<Entry> {
        name_ok(new_name)?;
        self.writable()?;
        let inode = self.inode(node)?;
        let (parent, dir) = self.dir_fd(new_parent)?;
        if inode.mount.id != parent.mount.id {
            return Err(Errno::XDEV);
        }
        let fd = self.path_fd(&inode)?;
        let linked = self.creds.as_caller(cx, None, |_| {
            match rustix::fs::linkat(fd.as_fd(), c"", dir.as_fd(), new_name, AtFlags::EMPTY_PATH) {
                // Without CAP_DAC_READ_SEARCH the same is said by a path.
                Err(Errno::NOENT) => rustix::fs::linkat(
                    rustix::fs::CWD,
                    ProcPath::new(fd.as_fd()).as_c_str(),
                    dir.as_fd(),
                    new_name,
                    AtFlags::SYMLINK_FOLLOW,
                ),
                result => result,
            }
        });
        match linked {
            Err(Errno::EXIST) if self.again(cx).is_some() => {
                if sys::stat_at(dir.as_fd(), new_name)?.stx_ino != inode.key.ino {
                    return Err(Errno::EXIST);
                }
            }
            linked => linked?,
        }
        let (inode, st) = self.find_new(&parent, dir.as_fd(), new_name)?;
        Ok(self.entry(cx, &inode, &st))
    }

    pub(crate) async fn sync_all(&self) -> Result<()> {
        let mounts = self.mounts.all();
        let root = self.root.clone();
        uvfs_io::blocking::run(move || {
            rustix::fs::syncfs(root.as_fd())?;
            for fd in mounts.iter().filter_map(|mount| mount.fd.as_ref()) {
                rustix::fs::syncfs(fd)?;
            }
            Ok(())
        })
        .await
    }

    /// Attributes of an entry of a directory listing that could not be looked up.
    pub(crate) fn no_entry(&self, ino: u64) -> Entry {
        let mut entry = Entry::missing(Duration::ZERO);
        entry.attr.ino = ino;
        entry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names that lead elsewhere, such as `..`, are refused.
    #[test]
    fn only_plain_names_are_names() {
        for bad in [c"", c".", c"..", c"a/b", c"/", c"a/"] {
            assert_eq!(name_ok(bad), Err(Errno::INVAL), "{bad:?}");
        }
        for good in [c"a", c"...", c".a", c"\xff"] {
            assert_eq!(name_ok(good), Ok(()));
        }
    }
}
