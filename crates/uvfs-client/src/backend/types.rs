//! The arguments and results of a backend's operations.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::time::Duration;

use uvfs_queue::pair::Seg;

/// The file system's name for an inode; the root is 1.
pub type NodeId = u64;

/// The root directory.
pub const ROOT: NodeId = 1;

/// A file's attributes, as `struct fuse_attr` has them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// 512-byte units that are allocated.
    pub blocks: u64,
    /// Last access: seconds and nanoseconds.
    pub atime: (i64, u32),
    /// Last change of data.
    pub mtime: (i64, u32),
    /// Last change of anything.
    pub ctime: (i64, u32),
    /// Type and permissions.
    pub mode: u32,
    /// Hard links.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device file.
    pub rdev: u32,
    /// Preferred size of a read or write.
    pub blksize: u32,
}

/// A name's inode. Each one returned counts as a lookup, undone by [`super::FileOps::forget`].
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// The inode.
    pub node: NodeId,
    /// Its attributes.
    pub attr: Attr,
}

/// A file that is to be made and opened.
#[derive(Debug, Clone, Copy)]
pub struct NewFile {
    /// Its permissions, as for open(2).
    pub mode: u32,
    /// As open(2).
    pub flags: i32,
}

/// An open file that was taken over by a token; counts as a lookup and an open.
#[derive(Debug, Clone, Copy)]
pub struct Imported {
    /// The inode, and its attributes.
    pub entry: Entry,
    /// The open file.
    pub handle: u64,
    /// open(2)'s flags that it was opened with.
    pub flags: i32,
}

/// Attributes to change; `None` stays as it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct SetAttr {
    /// Permissions.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Bytes.
    pub size: Option<u64>,
    /// Last access; seconds and nanoseconds.
    pub atime: Option<(i64, u32)>,
    /// Last change of data.
    pub mtime: Option<(i64, u32)>,
    /// An open file of the inode, for a change of size.
    pub handle: Option<u64>,
}

/// A directory's entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// The name; never `.` or `..`.
    pub name: OsString,
    /// Inode number.
    pub ino: u64,
    /// Type, as `DT_*` of readdir(3).
    pub kind: u8,
}

/// A file system's numbers, as statvfs(3) has them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StatFs {
    /// Blocks of `frsize` bytes.
    pub blocks: u64,
    /// Free blocks.
    pub bfree: u64,
    /// Blocks free to the unprivileged.
    pub bavail: u64,
    /// Inodes.
    pub files: u64,
    /// Free inodes.
    pub ffree: u64,
    /// Preferred block size.
    pub bsize: u32,
    /// The unit of `blocks`.
    pub frsize: u32,
    /// Longest name.
    pub namelen: u32,
}

/// The locks that a lock goes together with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// With other shared ones (`F_RDLCK`, `LOCK_SH`).
    Shared,
    /// With none (`F_WRLCK`, `LOCK_EX`).
    Exclusive,
}

/// A byte range that is locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RangeLock {
    /// How.
    pub kind: LockKind,
    /// The first byte.
    pub start: u64,
    /// The last byte; `i64::MAX` for all to the end of the file, wherever that is.
    pub end: u64,
    /// The process that holds it, 0 when that is not known.
    pub pid: u32,
}

/// A lock that is asked for or given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockRequest {
    /// Locks of one owner of this client don't conflict.
    pub owner: u32,
    /// Of the whole file, as flock(2), instead of a range.
    pub flock: bool,
    /// How; `None` gives back.
    pub kind: Option<LockKind>,
    /// The first byte.
    pub start: u64,
    /// The last byte, at most `i64::MAX`.
    pub end: u64,
}

/// The direction of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// From the file into the pages.
    Read,
    /// From the pages into the file.
    Write,
}

/// Called once, from any thread, with the bytes moved or the error.
pub type Done = Box<dyn FnOnce(io::Result<usize>) + Send>;

/// One read or write of consecutive bytes of a file.
pub struct Request {
    /// The direction of the data.
    pub op: Op,
    /// The inode.
    pub node: NodeId,
    /// The open file.
    pub handle: u64,
    /// Where in the file.
    pub offset: u64,
    /// Where in the arena; together `len` bytes.
    pub segs: Vec<Seg>,
    /// Bytes.
    pub len: usize,
    /// The data should not stay in the server's caches either.
    pub dontcache: bool,
    /// Whether this is the cache's writeback (and not a direct write).
    pub writeback: bool,
    /// Takes the result at the end. Must be called whatever happens.
    pub done: Done,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request")
            .field("op", &self.op)
            .field("node", &self.node)
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// How much one request may carry.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of a read.
    pub max_read: usize,
    /// Bytes of a write.
    pub max_write: usize,
}

/// The lease of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Lease {
    /// Nothing.
    #[default]
    None,
    /// Pages, size and times, for reading.
    Read,
    /// Writes as well.
    Write,
}

/// The answer to a request for a lease.
#[derive(Debug, Clone, Copy)]
pub enum Grant {
    /// It is held until it is recalled. The attributes are those of that moment.
    Granted {
        /// The session that it is of.
        session: u64,
        /// Its number; later ones are larger.
        seq: u64,
        /// The inode's attributes.
        attr: Attr,
    },
    /// Not now; worth asking again after this long.
    Refused(Duration),
    /// As [`Grant::Refused`], and not worth waiting for: the file is in use without leases, for as
    /// long as its users like.
    Taken(Duration),
}

/// A lease that the server wants back.
#[derive(Debug, Clone, Copy)]
pub struct Recall {
    /// The inode.
    pub node: NodeId,
    /// The lease's number.
    pub seq: u64,
    /// The most that may be kept.
    pub keep: Lease,
}

/// Gives the statistics of a client's cache; nothing when it is gone.
pub type Figures = Box<dyn Fn() -> Option<crate::Stats> + Send + Sync>;

/// Is called for each recall, from a thread of its own, and may block: flushes, drops, returns.
pub type OnRecall = Box<dyn Fn(Recall) + Send>;

/// A file that was found again at a server that came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reclaimed {
    /// The node's number at that server, for the page descriptors.
    pub node: u64,
    /// When its data was changed last: seconds and nanoseconds since 1970.
    pub mtime: (i64, u32),
}

/// A server came back: what has become of what was open.
#[derive(Debug)]
pub struct Reattached<'a> {
    /// The new session's number.
    pub session: u64,
    /// The server that went had written everything that was dirty, or tried to.
    pub written: bool,
    /// It could not write all of it.
    pub lost: bool,
    /// When it was gone: another program made the changes that are later. Seconds and
    /// nanoseconds since 1970.
    pub since: (i64, u32),
    /// For each node with open files what it is now, or the errno with which it was not found.
    pub nodes: &'a HashMap<NodeId, Result<Reclaimed, i32>>,
    /// For each handle, by node and number, its number for the page descriptors, or the errno with
    /// which it was not opened.
    pub handles: &'a HashMap<(NodeId, u64), Result<u64, i32>>,
}

/// Is called when a server came back, before any call can use it. All requests to the one before
/// have ended or are about to, with an error. Must not call the backend, but for [`super::FileOps::release`].
pub type OnReattach = Box<dyn Fn(&Reattached<'_>) + Send + Sync>;
