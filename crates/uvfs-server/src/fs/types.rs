//! The arguments of handlers and their results.

use rustix::fs::OFlags;
use std::time::{Duration, SystemTime};

use super::{Attr, Bytes, FileType, InitFlags, OpenFlags, Origin};

/// The caller of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Context {
    /// The kernel's number of the request, unique among those under way.
    pub unique: u64,
    /// The caller's file-system user id.
    pub uid: u32,
    /// The caller's file-system group id.
    pub gid: u32,
    /// The caller's thread id in the server's pid namespace, 0 where it has none there. Reading
    /// `/proc` of it from a handler can deadlock, but for `status`: the caller may hold locks of its
    /// memory while it waits.
    pub pid: u32,
    /// A supplementary group of the caller that owns the parent directory of what it creates
    /// (FUSE_CREATE_SUPP_GROUP).
    pub group: Option<u32>,
}

/// A directory entry that was found or made; it counts as one lookup of `attr.ino`'s node.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The node's number, or 0 for "there is no such name" that may be cached.
    pub node: u64,
    /// Distinguishes uses of the same node number.
    pub generation: u64,
    /// The node's attributes.
    pub attr: Attr,
    /// How long `attr` may be cached.
    pub attr_ttl: Duration,
    /// How long the name may be cached.
    pub entry_ttl: Duration,
}

impl Entry {
    /// An entry of the node `attr.ino`. The kernel may keep the name and the attributes for `ttl`.
    pub fn new(attr: Attr, ttl: Duration) -> Self {
        Self {
            node: attr.ino,
            generation: 0,
            attr,
            attr_ttl: ttl,
            entry_ttl: ttl,
        }
    }
}

/// Attributes and how long they may be cached.
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    /// The attributes.
    pub attr: Attr,
    /// How long they may be cached.
    pub ttl: Duration,
}

impl Attributes {
    /// Attributes that the kernel may keep for `ttl`.
    pub fn new(attr: Attr, ttl: Duration) -> Self {
        Self { attr, ttl }
    }
}

/// The attributes of a new node: its number, type and permission bits, and one link; everything else is 0.
/// One link of a directory says that its subdirectories are not counted.
pub fn attr(node: u64, kind: FileType, permissions: u32) -> Attr {
    Attr {
        ino: node,
        mode: kind.as_raw_mode() | permissions & 0o7777,
        nlink: 1,
        blksize: 4096,
        ..Attr::default()
    }
}

/// An open file or directory.
#[derive(Clone, Debug, Default)]
pub struct Opened {
    /// The handle that later requests name it by.
    pub fh: u64,
    /// FOPEN_* flags.
    pub flags: OpenFlags,
    /// A backing file registered with [`crate::Session::register_backing`], for
    /// [`OpenFlags::PASSTHROUGH`]; only where [`OpenHow::origin`] is the kernel.
    pub backing: i32,
    /// All that is in a small file, which the kernel then has in its cache before the open returns:
    /// reading it needs no further request. Of use only with [`OpenFlags::KEEP_CACHE`], and only
    /// right if no other handle of the file is open: one with a read or write under way may have
    /// locked the pages until this very thread has answered it.
    pub contents: Option<Bytes>,
    /// The file's attributes are not those that the kernel was told: it forgets them before the
    /// open returns, and so reads as far as the file goes now.
    pub changed: bool,
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the call.
    Now,
    /// Seconds and nanoseconds since 1970.
    At(i64, u32),
}

/// The attributes that setattr changes; `None` leaves one as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size in bytes.
    pub size: Option<u64>,
    /// Access time.
    pub atime: Option<SetTime>,
    /// Modification time.
    pub mtime: Option<SetTime>,
    /// Change time; only sent with the writeback cache.
    pub ctime: Option<SetTime>,
    /// The open file that the call was made on.
    pub fh: Option<u64>,
    /// Set-user-id, set-group-id and capabilities are to be cleared (FATTR_KILL_SUIDGID).
    pub kill_suidgid: bool,
}

impl SetAttr {
    /// Changes attributes in memory as asked, but for the size, and moves the change time. A set of the owner,
    /// and [`SetAttr::kill_suidgid`], clear set-user-id and set-group-id bits.
    pub fn apply(&self, attr: &mut Attr) {
        let now = SetTime::Now.seconds();
        let permissions = self.mode.unwrap_or(attr.mode) & 0o7777;
        attr.mode = attr.mode & !0o7777 | permissions;
        if self.kill_suidgid || self.uid.or(self.gid).is_some() && self.mode.is_none() {
            attr.mode &= !0o6000;
        }
        attr.uid = self.uid.unwrap_or(attr.uid);
        attr.gid = self.gid.unwrap_or(attr.gid);
        (attr.ctime, attr.ctimensec) = self.ctime.map_or(now, SetTime::seconds);
        if let Some(time) = self.atime {
            (attr.atime, attr.atimensec) = time.seconds();
        }
        if let Some(time) = self.mtime {
            (attr.mtime, attr.mtimensec) = time.seconds();
        }
    }
}

impl SetTime {
    /// Seconds and nanoseconds as attributes have them.
    fn seconds(self) -> (u64, u32) {
        let (seconds, nanos) = match self {
            Self::Now => timespec(SystemTime::now()),
            Self::At(seconds, nanos) => (seconds, nanos),
        };
        (seconds.cast_unsigned(), nanos)
    }
}

/// Sets the times of modification and change to now.
pub fn touch(attr: &mut Attr) {
    let now = SetTime::Now.seconds();
    (attr.mtime, attr.mtimensec) = now;
    (attr.ctime, attr.ctimensec) = now;
}

/// How open and create open a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenHow {
    /// open(2)'s flags, as the kernel passes them on.
    pub flags: u32,
    /// Set-user-id and set-group-id are to be cleared as the file is truncated
    /// (FUSE_OPEN_KILL_SUIDGID).
    pub kill_suidgid: bool,
    /// The sender of the request. Only the kernel may be given a backing file.
    pub origin: Origin,
}

impl OpenHow {
    /// Whether the file is opened for writing, alone or with reading.
    pub fn writes(&self) -> bool {
        const ACCESS: u32 = 3;
        self.flags & ACCESS != OFlags::RDONLY.bits()
    }
}

/// The file that a new name is made for.
#[derive(Clone, Copy, Debug, Default)]
pub struct NewNode {
    /// File type and permission bits. With [`InitFlags::DONT_MASK`] the umask is not yet applied.
    pub mode: u32,
    /// The caller's umask.
    pub umask: u32,
    /// Device number of a device node, in the kernel's 32-bit encoding.
    pub rdev: u32,
}

/// Where and how to read or write.
#[derive(Clone, Copy, Debug, Default)]
pub struct IoHow {
    /// The handle.
    pub fh: u64,
    /// Position in bytes.
    pub offset: u64,
    /// open(2)'s flags of the file now.
    pub flags: u32,
    /// Writes: comes from the page cache, not straight from a caller (FUSE_WRITE_CACHE).
    pub from_cache: bool,
    /// Writes: set-user-id and set-group-id are to be cleared (FUSE_WRITE_KILL_SUIDGID).
    pub kill_suidgid: bool,
    /// The owner of POSIX locks that reads or writes, where the kernel says so.
    pub owner: Option<u64>,
    /// Leave nothing of it in a cache of the store (RWF_DONTCACHE). Only for file systems that say
    /// [`FileSystem::takes_uncached`](super::FileSystem::takes_uncached).
    pub uncached: bool,
}

/// A lock, as in struct flock, with an absolute range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lock {
    /// First byte.
    pub start: u64,
    /// Last byte, inclusive; `i64::MAX` means to the end.
    pub end: u64,
    /// F_RDLCK, F_WRLCK or F_UNLCK.
    pub kind: u32,
    /// The process that holds it.
    pub pid: u32,
}

/// The owner of a lock that is asked for, and whether to wait.
#[derive(Clone, Copy, Debug, Default)]
pub struct LockHow {
    /// The handle.
    pub fh: u64,
    /// The owner: locks of one owner don't conflict.
    pub owner: u64,
    /// A flock(2) lock of the whole file and of the open file.
    pub flock: bool,
    /// Wait for it.
    pub wait: bool,
}

/// The node that a name was taken from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unlinked {
    /// Its node, if it is known to anybody.
    pub node: Option<u64>,
    /// That was its last name.
    pub last: bool,
}

/// The range that copy_file_range copies.
#[derive(Clone, Copy, Debug)]
pub struct CopyRange {
    /// Handle to read from.
    pub fh_in: u64,
    /// Position to read from.
    pub offset_in: u64,
    /// Node to write to.
    pub node_out: u64,
    /// Handle to write to.
    pub fh_out: u64,
    /// Position to write to.
    pub offset_out: u64,
    /// Bytes.
    pub len: u64,
    /// copy_file_range(2)'s flags.
    pub flags: u64,
}

/// The features and sizes that are agreed with the kernel when a mount starts. A file system asks in
/// [`FileSystem::init`](super::FileSystem::init); what the kernel does not offer stays off.
#[derive(Clone, Debug)]
pub struct Config {
    /// The features that the kernel offers.
    pub offered: InitFlags,
    /// The features that the session asks for; a file system adds and removes.
    pub wanted: InitFlags,
    /// Largest write in bytes.
    pub max_write: u32,
    /// Largest readahead in bytes.
    pub max_readahead: u32,
    /// Requests that the kernel may have under way in the background (readahead, writeback).
    pub max_background: u16,
    /// The number of background requests from which on the kernel holds back readahead and writeback.
    pub congestion_threshold: u16,
    /// The smallest step of times, in nanoseconds, a power of ten.
    pub time_gran: u32,
    /// How deep file systems stack below, for passthrough.
    pub max_stack_depth: u32,
    /// The kernel's minor version of the protocol.
    pub minor: u32,
}

/// How a file system watches for changes that others make to what it serves.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    /// Why it does not.
    pub why_not: Option<String>,
    /// File systems of the host below the source that are not watched, beside its own.
    pub unwatched: u64,
    /// Events that came.
    pub events: u64,
}

/// An ioctl.
#[derive(Clone, Copy, Debug)]
pub struct Ioctl<'a> {
    /// The handle.
    pub fh: u64,
    /// The command.
    pub cmd: u32,
    /// The argument.
    pub arg: u64,
    /// FUSE_IOCTL_* flags.
    pub flags: u32,
    /// The caller's data.
    pub input: &'a [u8],
    /// Room for data to the caller.
    pub out_size: u32,
}

/// A request of poll(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Poll {
    /// The handle.
    pub fh: u64,
    /// The kernel's number of the caller, for [`crate::notify::Notifier::poll_ready`].
    pub kh: u64,
    /// The POLL* events that the caller waits for.
    pub events: u32,
    /// The caller waits: the file system tells the kernel when one of the events is ready.
    pub notify: bool,
}

/// Seconds and nanoseconds of a time, for attributes.
pub fn timespec(time: SystemTime) -> (i64, u32) {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => (after.as_secs() as i64, after.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            match before.subsec_nanos() {
                0 => (-(before.as_secs() as i64), 0),
                nanos => (-(before.as_secs() as i64) - 1, 1_000_000_000 - nanos),
            }
        }
    }
}
