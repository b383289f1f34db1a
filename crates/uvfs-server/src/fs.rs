//! The trait that a file system implements, and its types.

mod clients;
mod error;
mod listing;
mod session;
mod survive;
mod types;

use std::ffi::CStr;
use std::sync::Arc;
use std::time::Duration;

pub use clients::{BoxFuture, ClientSupport};
pub use error::{Error, ErrorContext, Result};
pub use listing::{DirEntry, DirSink, list, read_from};
pub use rustix::fs::{Access, FallocateFlags, FileType, Mode, OFlags, RenameFlags, XattrFlags};
pub use rustix::io::Errno;
pub use session::{SessionHandle, Sizes};
pub use survive::{Again, MOST_SAVED, Orphans, Saved, Survive};
pub(crate) use types::IOC_WRITE;
pub use types::{
    Attributes, Bytes, Config, Context, CopyRange, Entry, Handle, HostChange, IoHow, Ioctl, Lock,
    LockHow, LockOwner, NewNode, Node, OpenHow, Opened, Origin, Poll, ROOT, Seek, SetAttr, SetTime,
    Unlinked, Watch, attr, timespec, touch,
};
pub use uvfs_io::Payload;
use uvfs_proto::abi;
pub use uvfs_proto::abi::{Attr, InitFlags, Kstatfs, OpenFlags, Statx};

macro_rules! unsupported {
    ($($unused:ident),*) => {{ $(let _ = $unused;)* Err(Errno::NOSYS.into()) }};
}

/// A file system in user space.
///
/// Handlers run on the thread of the queue that their request came by; many are under way at once,
/// and one that awaits holds up no other. They must not block for long otherwise: what can block
/// goes through [`uvfs_io`]. The file system chooses a number for each [`Node`], but for
/// the root's, which is [`ROOT`]. A number is valid until [`FileSystem::forget`] took back all lookups.
///
/// A handler that is not implemented answers ENOSYS, which for many requests makes the kernel not ask again.
/// But files and directories can be opened, with handle 0, and the file system tells no sizes.
///
/// Every error has the errno that a kernel file system would give: see [`Error`].
///
/// An empty directory:
///
/// ```
/// use std::time::Duration;
/// use uvfs_server::fs::*;
/// use uvfs_server::{FileSystem, Session, SessionOptions};
///
/// struct Empty;
///
/// impl FileSystem for Empty {
///     async fn getattr(&self, _: &Context, _: Node, _: Option<Handle>) -> Result<Attributes> {
///         let root = attr(ROOT, FileType::Directory, 0o755);
///         Ok(Attributes::new(root, Duration::from_secs(3600)))
///     }
///
///     async fn readdir(&self, _: &Context, _: Node, _: Handle, sink: &mut dyn DirSink) -> Result<()> {
///         list(ROOT, [], sink);
///         Ok(())
///     }
/// }
///
/// # fn main() -> std::io::Result<()> {
/// // For clients of this program; `uvfs_server::mount` mounts it for all programs.
/// let session = Session::unmounted(Empty, SessionOptions::default())?;
/// assert!(session.report().clients.is_empty());
/// # Ok(())
/// # }
/// ```
#[allow(async_fn_in_trait)] // Futures stay on the thread of their queue; Send is not wanted.
#[allow(unused_variables)]
pub trait FileSystem: Send + Sync + 'static {
    /// Called once, before any other request. `session` is for what comes by no request: notifications, backing files,
    /// and changes that other programs make.
    fn init(&self, config: &mut Config, session: Arc<dyn SessionHandle>) -> Result<()> {
        Ok(())
    }

    /// The last call, after the mount has ended.
    fn destroy(&self) {}

    /// How it watches for changes that other programs make, which it reports by
    /// [`SessionHandle::host_changed`]. `None` where no other program can make any.
    fn watch(&self) -> Option<Watch> {
        None
    }

    /// Counts of its own, which `uvfs stats` and the metrics show by these names. A name has lower-case letters, digits and
    /// `_`, and a count only grows. The server asks on a thread of its own, whenever a program asks for the statistics.
    fn counts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// How clients over shared memory use the file system, beyond what the kernel asks for: see
    /// [`ClientSupport`]. Without it programs under `uvfs run` go on through the kernel.
    fn clients(&self) -> Option<&dyn ClientSupport> {
        None
    }

    /// How the mount outlives its server, if it can ([`survive`](crate::survive)).
    fn survive(&self) -> Option<&dyn Survive> {
        None
    }

    /// `lookups` of a node are taken back; at 0 the kernel knows it no longer. Has no answer.
    fn forget(&self, node: Node, lookups: u64) {}

    /// Finds a name in a directory.
    async fn lookup(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Entry> {
        unsupported!(cx, parent, name)
    }

    /// A node's attributes; `fh` when asked through an open file.
    async fn getattr(&self, cx: &Context, node: Node, fh: Option<Handle>) -> Result<Attributes> {
        unsupported!(cx, node, fh)
    }

    /// statx(2) with the STATX_* `mask`. On ENOSYS the kernel asks by `getattr` from then on.
    async fn statx(
        &self,
        cx: &Context,
        node: Node,
        fh: Option<Handle>,
        mask: u32,
    ) -> Result<(abi::Statx, Duration)> {
        unsupported!(cx, node, fh, mask)
    }

    /// Changes attributes.
    async fn setattr(&self, cx: &Context, node: Node, set: &SetAttr) -> Result<Attributes> {
        unsupported!(cx, node, set)
    }

    /// The target of a symbolic link.
    async fn readlink(&self, cx: &Context, node: Node) -> Result<Bytes> {
        unsupported!(cx, node)
    }

    /// Makes a symbolic link.
    async fn symlink(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        target: &CStr,
    ) -> Result<Entry> {
        unsupported!(cx, parent, name, target)
    }

    /// Makes a file, device, fifo or socket.
    async fn mknod(&self, cx: &Context, parent: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        unsupported!(cx, parent, name, new)
    }

    /// Makes a directory.
    async fn mkdir(&self, cx: &Context, parent: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        unsupported!(cx, parent, name, new)
    }

    /// Removes a name that is not a directory's.
    async fn unlink(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        unsupported!(cx, parent, name)
    }

    /// Removes an empty directory.
    async fn rmdir(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        unsupported!(cx, parent, name)
    }

    /// Renames, and gives what lost the new name.
    async fn rename(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new_parent: Node,
        new_name: &CStr,
        flags: RenameFlags,
    ) -> Result<Unlinked> {
        unsupported!(cx, parent, name, new_parent, new_name, flags)
    }

    /// Makes a further name for a node.
    async fn link(
        &self,
        cx: &Context,
        node: Node,
        new_parent: Node,
        new_name: &CStr,
    ) -> Result<Entry> {
        unsupported!(cx, node, new_parent, new_name)
    }

    /// Opens a file. ENOSYS lets the kernel open without asking from then on.
    async fn open(&self, cx: &Context, node: Node, how: &OpenHow) -> Result<Opened> {
        Ok(Opened::default())
    }

    /// Makes a file unless it is there and opens it. Without this method, `mknod` and `open` do.
    async fn create(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        let entry = match self.mknod(cx, parent, name, new).await {
            Err(error) if error == Errno::EXIST && !how.flags.contains(OFlags::EXCL) => {
                self.lookup(cx, parent, name).await?
            }
            made => made?,
        };
        let opened = self.open(cx, entry.node, how).await;
        let opened = opened.inspect_err(|_| self.forget(entry.node, 1))?;
        Ok((entry, opened))
    }

    /// Makes a file without a name (O_TMPFILE) and opens it.
    async fn tmpfile(
        &self,
        cx: &Context,
        parent: Node,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        unsupported!(cx, parent, new, how)
    }

    /// Fills `data` from the file; less than its length means the end of the file.
    async fn read(&self, cx: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        unsupported!(cx, node, how, data)
    }

    /// Writes `data` to the file and says how much of it.
    async fn write(&self, cx: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        unsupported!(cx, node, how, data)
    }

    /// A descriptor of the open file was closed; `owner`'s POSIX locks go. What clients wrote is in the file by then.
    async fn flush(&self, cx: &Context, node: Node, fh: Handle, owner: LockOwner) -> Result<()> {
        unsupported!(cx, node, fh, owner)
    }

    /// The last descriptor was closed, of a file that is open with `flags`. `flock` names an owner
    /// whose flock(2) lock goes.
    async fn release(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        flags: OFlags,
        flock: Option<LockOwner>,
    ) -> Result<()> {
        Ok(())
    }

    /// Makes the file's data (and unless `data_only` its attributes) durable.
    async fn fsync(&self, cx: &Context, node: Node, fh: Handle, data_only: bool) -> Result<()> {
        unsupported!(cx, node, fh, data_only)
    }

    /// Opens a directory. ENOSYS lets the kernel list without asking.
    async fn opendir(&self, cx: &Context, node: Node, how: &OpenHow) -> Result<Opened> {
        Ok(Opened::default())
    }

    /// Lists a directory from [`DirSink::offset`] on.
    async fn readdir(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        unsupported!(cx, node, fh, sink)
    }

    /// The last descriptor of a directory was closed.
    async fn releasedir(&self, cx: &Context, node: Node, fh: Handle, flags: OFlags) -> Result<()> {
        Ok(())
    }

    /// Makes a directory's entries durable.
    async fn fsyncdir(&self, cx: &Context, node: Node, fh: Handle, data_only: bool) -> Result<()> {
        unsupported!(cx, node, fh, data_only)
    }

    /// Sizes and counts of the file system.
    async fn statfs(&self, cx: &Context, node: Node) -> Result<Kstatfs> {
        Ok(Kstatfs {
            bsize: 4096,
            frsize: 4096,
            namelen: 255,
            ..Kstatfs::default()
        })
    }

    /// An extended attribute's value; the session handles sizes.
    async fn getxattr(&self, cx: &Context, node: Node, name: &CStr) -> Result<Bytes> {
        unsupported!(cx, node, name)
    }

    /// The names of extended attributes, each ended by a 0 byte.
    async fn listxattr(&self, cx: &Context, node: Node) -> Result<Bytes> {
        unsupported!(cx, node)
    }

    /// Sets an extended attribute. `kill_sgid`: the set-group-id bit goes, as an ACL takes it
    /// (FUSE_SETXATTR_ACL_KILL_SGID).
    async fn setxattr(
        &self,
        cx: &Context,
        node: Node,
        name: &CStr,
        value: &[u8],
        flags: XattrFlags,
        kill_sgid: bool,
    ) -> Result<()> {
        unsupported!(cx, node, name, value, flags, kill_sgid)
    }

    /// Removes an extended attribute.
    async fn removexattr(&self, cx: &Context, node: Node, name: &CStr) -> Result<()> {
        unsupported!(cx, node, name)
    }

    /// access(2), and chdir(2); not asked with `default_permissions`. ENOSYS allows everything from then on.
    ///
    /// Without this method the answer is what the kernel does: it executes no file without an execute bit, and
    /// leaves all else to the handlers.
    async fn access(&self, cx: &Context, node: Node, mask: Access) -> Result<()> {
        if !mask.contains(Access::EXEC_OK) {
            return Ok(());
        }
        let mode = self.getattr(cx, node, None).await?.attr.mode;
        let executable = mode & 0o111 != 0;
        let file = FileType::from_raw_mode(mode) == FileType::RegularFile;
        match file && !executable {
            true => Err(Errno::ACCESS.into()),
            false => Ok(()),
        }
    }

    /// The lock that stands in the way of `lock`, or one of kind F_UNLCK.
    async fn getlk(&self, cx: &Context, node: Node, how: &LockHow, lock: &Lock) -> Result<Lock> {
        unsupported!(cx, node, how, lock)
    }

    /// Takes or gives back a lock. A wait ends with EINTR when `interrupted()` of
    /// [`crate::interrupt`] says so: the future is told by being resumed.
    async fn setlk(&self, cx: &Context, node: Node, how: &LockHow, lock: &Lock) -> Result<()> {
        unsupported!(cx, node, how, lock)
    }

    /// fallocate(2).
    async fn fallocate(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        offset: u64,
        len: u64,
        mode: FallocateFlags,
    ) -> Result<()> {
        unsupported!(cx, node, fh, offset, len, mode)
    }

    /// Where the next data or the next hole begins, from `offset` on (lseek(2)).
    async fn lseek(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        offset: u64,
        whence: Seek,
    ) -> Result<u64> {
        unsupported!(cx, node, fh, offset, whence)
    }

    /// Copies within the file system and says how much.
    async fn copy_file_range(&self, cx: &Context, node: Node, copy: &CopyRange) -> Result<u64> {
        unsupported!(cx, node, copy)
    }

    /// ioctl(2): the result and data for the caller.
    async fn ioctl(&self, cx: &Context, node: Node, ioctl: &Ioctl<'_>) -> Result<(i32, Bytes)> {
        unsupported!(cx, node, ioctl)
    }

    /// The ready POLL* events of an open file.
    async fn poll(&self, cx: &Context, node: Node, poll: &Poll) -> Result<u32> {
        unsupported!(cx, node, poll)
    }

    /// The block of the device that a file's block is on.
    async fn bmap(&self, cx: &Context, node: Node, block: u64, block_size: u32) -> Result<u64> {
        unsupported!(cx, node, block, block_size)
    }

    /// Makes the whole file system durable.
    ///
    /// The kernel does not ask a mount of the kind `fuse` for this: it sends SYNCFS to virtiofs and to block devices
    /// (`fuseblk`) alone. syncfs(2) on the mount only writes dirty pages to the server, so what has to be durable is for
    /// [`FileSystem::fsync`] and [`FileSystem::fsyncdir`].
    async fn syncfs(&self, cx: &Context, node: Node) -> Result<()> {
        unsupported!(cx, node)
    }
}
