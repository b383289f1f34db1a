//! The trait that a file system implements.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use uvfs_server::fs::Context;

use crate::*;

/// The caller of a request.
#[derive(Debug)]
pub struct Request {
    unique: u64,
    uid: u32,
    gid: u32,
    pid: u32,
}

impl Request {
    pub(crate) fn new(cx: &Context) -> Self {
        Self {
            unique: cx.unique,
            uid: cx.uid,
            gid: cx.gid,
            pid: cx.pid,
        }
    }

    /// The kernel's number of the request.
    pub fn unique(&self) -> RequestId {
        RequestId(self.unique)
    }

    /// The caller's user id.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// The caller's group id.
    pub fn gid(&self) -> u32 {
        self.gid
    }

    /// The caller's thread id.
    pub fn pid(&self) -> u32 {
        self.pid
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

/// Answers what the file system does not implement.
macro_rules! missing {
    ($reply:ident, $errno:ident, $name:literal) => {{
        tracing::warn!("{} is not implemented: {}", $name, stringify!($errno));
        $reply.error(Errno::$errno)
    }};
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

    /// Finds a name in a directory.
    fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        missing!(reply, ENOSYS, "lookup");
    }

    /// The kernel drops `nlookup` of its lookups of a node. With none left it no longer knows the node.
    fn forget(&self, req: &Request, ino: INodeNo, nlookup: u64) {}

    /// The kernel drops lookups of several nodes. By default this calls [`Filesystem::forget`] for each.
    fn batch_forget(&self, req: &Request, nodes: &[ForgetOne]) {
        for one in nodes {
            self.forget(req, one.nodeid, one.nlookup);
        }
    }

    /// A node's attributes; `fh` when asked through an open file.
    fn getattr(&self, req: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        missing!(reply, ENOSYS, "getattr");
    }

    /// Changes the attributes that are given. Linux never gives `crtime`, `chgtime`, `bkuptime` or `flags`.
    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        crtime: Option<SystemTime>,
        chgtime: Option<SystemTime>,
        bkuptime: Option<SystemTime>,
        flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        missing!(reply, ENOSYS, "setattr");
    }

    /// The target of a symbolic link.
    fn readlink(&self, req: &Request, ino: INodeNo, reply: ReplyData) {
        missing!(reply, ENOSYS, "readlink");
    }

    /// Makes a file, device, fifo or socket.
    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        missing!(reply, ENOSYS, "mknod");
    }

    /// Makes a directory.
    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        missing!(reply, ENOSYS, "mkdir");
    }

    /// Removes a name that is not a directory's.
    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        missing!(reply, ENOSYS, "unlink");
    }

    /// Removes an empty directory.
    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        missing!(reply, ENOSYS, "rmdir");
    }

    /// Makes a symbolic link. Answers EPERM by default.
    fn symlink(
        &self,
        req: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        missing!(reply, EPERM, "symlink");
    }

    /// Renames.
    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        missing!(reply, ENOSYS, "rename");
    }

    /// Makes a further name for a node. Answers EPERM by default.
    fn link(
        &self,
        req: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        missing!(reply, EPERM, "link");
    }

    /// Opens a file. Gives handle 0 by default.
    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    /// Reads `size` bytes; fewer mean the end of the file.
    fn read(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        missing!(reply, ENOSYS, "read");
    }

    /// Writes.
    fn write(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        missing!(reply, ENOSYS, "write");
    }

    /// A descriptor of an open file is closed.
    fn flush(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        missing!(reply, ENOSYS, "flush");
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

    /// Makes a file's data, and unless `datasync` its attributes, durable.
    fn fsync(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        datasync: bool,
        reply: ReplyEmpty,
    ) {
        missing!(reply, ENOSYS, "fsync");
    }

    /// Opens a directory. Gives handle 0 by default.
    fn opendir(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    /// Lists a directory from `offset` on: 0, or that of an earlier entry.
    fn readdir(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        reply: ReplyDirectory,
    ) {
        missing!(reply, ENOSYS, "readdir");
    }

    /// Lists a directory with attributes; asked only with `FUSE_DO_READDIRPLUS`.
    fn readdirplus(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        missing!(reply, ENOSYS, "readdirplus");
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

    /// Makes a directory's entries durable.
    fn fsyncdir(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        datasync: bool,
        reply: ReplyEmpty,
    ) {
        missing!(reply, ENOSYS, "fsyncdir");
    }

    /// Sizes and counts of the file system. By default they are 0, and names have up to 255 bytes.
    fn statfs(&self, req: &Request, ino: INodeNo, reply: ReplyStatfs) {
        reply.statfs(0, 0, 0, 0, 0, 512, 255, 0);
    }

    /// Sets an extended attribute.
    fn setxattr(
        &self,
        req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        position: u32,
        reply: ReplyEmpty,
    ) {
        missing!(reply, ENOSYS, "setxattr");
    }

    /// An extended attribute's value, of at most `size` bytes.
    fn getxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        missing!(reply, ENOSYS, "getxattr");
    }

    /// The names of extended attributes, in at most `size` bytes.
    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        missing!(reply, ENOSYS, "listxattr");
    }

    /// Removes an extended attribute.
    fn removexattr(&self, req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        missing!(reply, ENOSYS, "removexattr");
    }

    /// access(2); not asked with [`MountOption::DefaultPermissions`].
    fn access(&self, req: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        missing!(reply, ENOSYS, "access");
    }

    /// Makes a file unless it exists, and opens it. Without this handler the kernel calls `mknod` and `open`.
    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        missing!(reply, ENOSYS, "create");
    }

    /// Tests for a lock, and gives one that is in the way.
    fn getlk(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        reply: ReplyLock,
    ) {
        missing!(reply, ENOSYS, "getlk");
    }

    /// Takes or releases a lock. With `sleep` the caller waits for it.
    fn setlk(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        sleep: bool,
        reply: ReplyEmpty,
    ) {
        missing!(reply, ENOSYS, "setlk");
    }

    /// The block of the device that holds a block of the file.
    fn bmap(&self, req: &Request, ino: INodeNo, blocksize: u32, idx: u64, reply: ReplyBmap) {
        missing!(reply, ENOSYS, "bmap");
    }

    /// ioctl(2).
    fn ioctl(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        out_size: u32,
        reply: ReplyIoctl,
    ) {
        missing!(reply, ENOSYS, "ioctl");
    }

    /// The events of an open file that are ready. With `FUSE_POLL_SCHEDULE_NOTIFY`, the file system notifies
    /// `ph` when others are.
    fn poll(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        ph: PollNotifier,
        events: PollEvents,
        flags: PollFlags,
        reply: ReplyPoll,
    ) {
        missing!(reply, ENOSYS, "poll");
    }

    /// fallocate(2).
    fn fallocate(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        missing!(reply, ENOSYS, "fallocate");
    }

    /// lseek(2) with SEEK_DATA or SEEK_HOLE.
    fn lseek(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        missing!(reply, ENOSYS, "lseek");
    }

    /// Copies within the file system.
    fn copy_file_range(
        &self,
        req: &Request,
        ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        missing!(reply, ENOSYS, "copy_file_range");
    }
}
