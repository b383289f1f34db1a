//! The arguments and results of a connection's requests.

use std::collections::HashMap;
use std::ffi::OsString;
use std::time::Duration;

use rustix::fs::{FileType, OFlags};
use rustix::io;
/// A file's attributes, and a file system's numbers.
pub use uvfs_proto::abi::{Attr, Kstatfs as StatFs};

/// The file system's name for an inode; the root is 1.
pub type NodeId = u64;

/// The root directory.
pub const ROOT: NodeId = 1;

/// A name's inode. Each one returned counts as a lookup, undone by [`crate::Connection::forget`].
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
    pub flags: OFlags,
}

/// An open file that was taken over by a token; counts as a lookup and an open.
#[derive(Debug, Clone, Copy)]
pub struct Imported {
    /// The inode, and its attributes.
    pub entry: Entry,
    /// The open file.
    pub handle: u64,
    /// open(2)'s flags that it was opened with.
    pub flags: OFlags,
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
    /// Type.
    pub kind: FileType,
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
    pub nodes: &'a HashMap<NodeId, io::Result<Reclaimed>>,
    /// For each handle, by node and number, its number for the page descriptors, or the errno with
    /// which it was not opened.
    pub handles: &'a HashMap<(NodeId, u64), io::Result<u64>>,
}
