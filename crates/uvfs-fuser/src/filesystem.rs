//! The trait that a file system implements.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;
use std::{fmt, io};

use uvfs_server::fs::{Again, Context, SessionHandle};

use crate::survive::Survive;
use crate::*;

/// The caller of a request.
pub struct Request {
    pub(crate) cx: Context,
    /// The session, if the mount outlives its process.
    session: Option<Arc<dyn SessionHandle>>,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Request").field(&self.cx).finish()
    }
}

impl Request {
    pub(crate) fn new(cx: &Context, session: Option<Arc<dyn SessionHandle>>) -> Self {
        Self { cx: *cx, session }
    }

    /// A request that no caller is behind.
    pub(crate) fn of_none() -> Self {
        Self::new(&Context::default(), None)
    }

    /// Whether an earlier process of a mount that outlives it had begun this request when it was killed, so that it may
    /// be done already ([`SessionHandle::again`]). fuser does not have this.
    pub fn again(&self) -> Option<Again> {
        self.session.as_ref()?.again(&self.cx)
    }

    /// Keeps a number for the next process, before the handler does what must not be done twice
    /// ([`SessionHandle::note`]). fuser does not have this.
    pub fn note(&self, note: u64) {
        if let Some(session) = &self.session {
            session.note(&self.cx, note);
        }
    }

    /// The kernel's number of the request.
    pub fn unique(&self) -> RequestId {
        RequestId(self.cx.unique)
    }

    /// The caller's user id.
    pub fn uid(&self) -> u32 {
        self.cx.uid
    }

    /// The caller's group id.
    pub fn gid(&self) -> u32 {
        self.cx.gid
    }

    /// The caller's thread id.
    pub fn pid(&self) -> u32 {
        self.cx.pid
    }
}

/// A node, and how many of its lookups the kernel drops.
#[derive(Debug)]
pub struct ForgetOne {
    nodeid: INodeNo,
    nlookup: u64,
}

impl ForgetOne {
    pub(crate) fn new(nodeid: INodeNo, nlookup: u64) -> Self {
        Self { nodeid, nlookup }
    }

    /// The node.
    pub fn nodeid(&self) -> INodeNo {
        self.nodeid
    }

    /// The number of lookups.
    pub fn nlookup(&self) -> u64 {
        self.nlookup
    }
}

/// Declares handlers with the error that they answer by default.
macro_rules! handlers {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) -> $reply:ty = $errno:ident;)*) => {$(
        $(#[$doc])*
        fn $name(&self, req: &Request, $($arg: $type,)* reply: $reply) {
            let (name, errno) = (stringify!($name), stringify!($errno));
            tracing::warn!("{name} is not implemented: {errno}");
            reply.error(Errno::$errno);
        }
    )*};
}

/// A file system in user space, in the terms of fuser 0.18.
///
/// Every handler is given a reply, which answers the request at once or later, from any thread.
/// A handler that is not implemented answers ENOSYS, unless its description says otherwise.
#[allow(clippy::too_many_arguments)]
#[allow(unused_variables)]
pub trait Filesystem: Send + Sync + 'static {
    /// The first call; `config` says what the kernel offers and is asked for. An error ends the mount.
    fn init(&mut self, req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        Ok(())
    }

    /// The last call.
    fn destroy(&mut self) {}

    /// How the next process of a mount with `MountOption::CUSTOM("survive")` goes on with the inode numbers and open files
    /// of one that was killed. If these numbers mean the same to each process, the defaults of [`Survive`] do. fuser does
    /// not have this.
    fn survive(&self) -> Option<&dyn Survive> {
        None
    }

    /// The kernel drops `nlookup` of its lookups of a node. With none left it no longer knows the node.
    fn forget(&self, req: &Request, ino: INodeNo, nlookup: u64) {}

    /// The kernel drops lookups of several nodes. By default this calls [`Filesystem::forget`] for each.
    fn batch_forget(&self, req: &Request, nodes: &[ForgetOne]) {
        for one in nodes {
            self.forget(req, one.nodeid, one.nlookup);
        }
    }

    /// Opens a file. Gives handle 0 by default.
    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    /// The last descriptor was closed. `lock_owner` names the owner of a flock(2) lock that ends. Succeeds by
    /// default.
    fn release(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        flush: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    /// Opens a directory. Gives handle 0 by default.
    fn opendir(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    /// The last descriptor of a directory was closed. Succeeds by default.
    fn releasedir(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    /// Sizes and counts of the file system. By default they are 0, and names have up to 255 bytes.
    fn statfs(&self, req: &Request, ino: INodeNo, reply: ReplyStatfs) {
        reply.statfs(0, 0, 0, 0, 0, 512, 255, 0);
    }

    handlers! {
        /// Finds a name in a directory.
        lookup(parent: INodeNo, name: &OsStr) -> ReplyEntry = ENOSYS;
        /// A node's attributes; `fh` when asked through an open file.
        getattr(ino: INodeNo, fh: Option<FileHandle>) -> ReplyAttr = ENOSYS;
        /// Changes the attributes that are given. Linux never gives `crtime`, `chgtime`, `bkuptime` or `flags`.
        setattr(
            ino: INodeNo, mode: Option<u32>, uid: Option<u32>, gid: Option<u32>, size: Option<u64>,
            atime: Option<TimeOrNow>, mtime: Option<TimeOrNow>, ctime: Option<SystemTime>,
            fh: Option<FileHandle>, crtime: Option<SystemTime>, chgtime: Option<SystemTime>,
            bkuptime: Option<SystemTime>, flags: Option<BsdFileFlags>
        ) -> ReplyAttr = ENOSYS;
        /// The target of a symbolic link.
        readlink(ino: INodeNo) -> ReplyData = ENOSYS;
        /// Makes a file, device, fifo or socket.
        mknod(
            parent: INodeNo, name: &OsStr, mode: u32, umask: u32, rdev: u32
        ) -> ReplyEntry = ENOSYS;
        /// Makes a directory.
        mkdir(parent: INodeNo, name: &OsStr, mode: u32, umask: u32) -> ReplyEntry = ENOSYS;
        /// Removes a name that is not a directory's.
        unlink(parent: INodeNo, name: &OsStr) -> ReplyEmpty = ENOSYS;
        /// Removes an empty directory.
        rmdir(parent: INodeNo, name: &OsStr) -> ReplyEmpty = ENOSYS;
        /// Makes a symbolic link. Answers EPERM by default.
        symlink(parent: INodeNo, link_name: &OsStr, target: &Path) -> ReplyEntry = EPERM;
        /// Renames.
        rename(
            parent: INodeNo, name: &OsStr, newparent: INodeNo, newname: &OsStr, flags: RenameFlags
        ) -> ReplyEmpty = ENOSYS;
        /// Makes a further name for a node. Answers EPERM by default.
        link(ino: INodeNo, newparent: INodeNo, newname: &OsStr) -> ReplyEntry = EPERM;
        /// Reads `size` bytes; fewer mean the end of the file.
        read(
            ino: INodeNo, fh: FileHandle, offset: u64, size: u32, flags: OpenFlags,
            lock_owner: Option<LockOwner>
        ) -> ReplyData = ENOSYS;
        /// Writes.
        write(
            ino: INodeNo, fh: FileHandle, offset: u64, data: &[u8], write_flags: WriteFlags,
            flags: OpenFlags, lock_owner: Option<LockOwner>
        ) -> ReplyWrite = ENOSYS;
        /// A descriptor of an open file is closed.
        flush(ino: INodeNo, fh: FileHandle, lock_owner: LockOwner) -> ReplyEmpty = ENOSYS;
        /// Makes a file's data, and unless `datasync` its attributes, durable.
        fsync(ino: INodeNo, fh: FileHandle, datasync: bool) -> ReplyEmpty = ENOSYS;
        /// Lists a directory from `offset` on: 0, or that of an earlier entry.
        readdir(ino: INodeNo, fh: FileHandle, offset: u64) -> ReplyDirectory = ENOSYS;
        /// Lists a directory with attributes; asked only with `FUSE_DO_READDIRPLUS`.
        readdirplus(ino: INodeNo, fh: FileHandle, offset: u64) -> ReplyDirectoryPlus = ENOSYS;
        /// Makes a directory's entries durable.
        fsyncdir(ino: INodeNo, fh: FileHandle, datasync: bool) -> ReplyEmpty = ENOSYS;
        /// Sets an extended attribute.
        setxattr(
            ino: INodeNo, name: &OsStr, value: &[u8], flags: i32, position: u32
        ) -> ReplyEmpty = ENOSYS;
        /// An extended attribute's value, of at most `size` bytes.
        getxattr(ino: INodeNo, name: &OsStr, size: u32) -> ReplyXattr = ENOSYS;
        /// The names of extended attributes, in at most `size` bytes.
        listxattr(ino: INodeNo, size: u32) -> ReplyXattr = ENOSYS;
        /// Removes an extended attribute.
        removexattr(ino: INodeNo, name: &OsStr) -> ReplyEmpty = ENOSYS;
        /// access(2); not asked with [`MountOption::DefaultPermissions`].
        access(ino: INodeNo, mask: AccessFlags) -> ReplyEmpty = ENOSYS;
        /// Makes a file unless it exists, and opens it. Without this handler the kernel calls `mknod` and `open`.
        create(
            parent: INodeNo, name: &OsStr, mode: u32, umask: u32, flags: i32
        ) -> ReplyCreate = ENOSYS;
        /// Tests for a lock, and gives one that is in the way.
        getlk(
            ino: INodeNo, fh: FileHandle, lock_owner: LockOwner, start: u64, end: u64, typ: i32,
            pid: u32
        ) -> ReplyLock = ENOSYS;
        /// Takes or releases a lock. With `sleep` the caller waits for it.
        setlk(
            ino: INodeNo, fh: FileHandle, lock_owner: LockOwner, start: u64, end: u64, typ: i32,
            pid: u32, sleep: bool
        ) -> ReplyEmpty = ENOSYS;
        /// The block of the device that holds a block of the file.
        bmap(ino: INodeNo, blocksize: u32, idx: u64) -> ReplyBmap = ENOSYS;
        /// ioctl(2).
        ioctl(
            ino: INodeNo, fh: FileHandle, flags: IoctlFlags, cmd: u32, in_data: &[u8], out_size: u32
        ) -> ReplyIoctl = ENOSYS;
        /// The events of an open file that are ready. With `FUSE_POLL_SCHEDULE_NOTIFY`, the file system notifies
        /// `ph` when others are.
        poll(
            ino: INodeNo, fh: FileHandle, ph: PollNotifier, events: PollEvents, flags: PollFlags
        ) -> ReplyPoll = ENOSYS;
        /// fallocate(2).
        fallocate(
            ino: INodeNo, fh: FileHandle, offset: u64, length: u64, mode: i32
        ) -> ReplyEmpty = ENOSYS;
        /// lseek(2) with SEEK_DATA or SEEK_HOLE.
        lseek(ino: INodeNo, fh: FileHandle, offset: i64, whence: i32) -> ReplyLseek = ENOSYS;
        /// Copies within the file system.
        copy_file_range(
            ino_in: INodeNo, fh_in: FileHandle, offset_in: u64, ino_out: INodeNo,
            fh_out: FileHandle, offset_out: u64, len: u64, flags: CopyFileRangeFlags
        ) -> ReplyWrite = ENOSYS;
    }
}
