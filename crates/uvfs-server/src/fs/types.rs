//! The arguments of handlers and their results.

use std::ffi::CStr;
use std::fmt;
use std::time::{Duration, SystemTime};

use rustix::fs::{FileType, Mode, OFlags};
use uvfs_proto::abi::{Attr, InitFlags, OpenFlags};

macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident)*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<u64> for $name {
            fn from(number: u64) -> Self {
                Self(number)
            }
        }
    )* };
}

numbers! {
    /// The number of a file or directory (the nodeid of FUSE). [`ROOT`](super::ROOT) is the root directory; the
    /// file system chooses the others, but not 0.
    Node

    /// The number of one open of a file or directory, which the file system chooses.
    Handle

    /// The owner of a lock: a process's files for a POSIX lock, an open file for one of flock(2).
    LockOwner
}

/// The root directory's node.
pub const ROOT: Node = Node(1);

/// The sender of a request: the kernel of the mount, or a client over shared memory (`C` names which).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Origin<C = ()> {
    /// The kernel of the mount.
    #[default]
    Kernel,
    /// A client over shared memory.
    Client(C),
}

impl<C> Origin<C> {
    /// Names the client in another way.
    pub fn map<T>(self, name: impl FnOnce(C) -> T) -> Origin<T> {
        match self {
            Self::Kernel => Origin::Kernel,
            Self::Client(client) => Origin::Client(name(client)),
        }
    }
}

/// A reply of variable length to getxattr and listxattr is cut by the session to what the caller
/// has room for.
pub type Bytes = Vec<u8>;

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

/// A directory entry that was found or made; it counts as one lookup of its node.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Entry {
    /// The node, or 0 for a name that does not exist, which the kernel may cache: [`Entry::missing`].
    pub node: Node,
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
            node: Node(attr.ino),
            generation: 0,
            attr,
            attr_ttl: ttl,
            entry_ttl: ttl,
        }
    }

    /// A name that does not exist. The kernel may keep that for `ttl`, unlike an ENOENT.
    ///
    /// ```
    /// use std::time::Duration;
    /// use uvfs_server::fs::{Entry, Node};
    ///
    /// assert_eq!(Entry::missing(Duration::from_secs(1)).node, Node(0));
    /// ```
    pub fn missing(ttl: Duration) -> Self {
        Self {
            attr_ttl: Duration::ZERO,
            ..Self::new(Attr::default(), ttl)
        }
    }
}

impl From<Attributes> for Entry {
    /// An entry of the node `attr.ino`, whose name the kernel may keep for as long as its attributes.
    fn from(attributes: Attributes) -> Self {
        Self::new(attributes.attr, attributes.ttl)
    }
}

/// Attributes and how long they may be cached.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
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

/// The attributes of a new node: its number, type and mode, and one link; everything else is 0. One link of a
/// directory says that its subdirectories are not counted.
///
/// ```
/// use uvfs_server::fs::{FileType, Node, attr};
///
/// let file = attr(Node(2), FileType::RegularFile, 0o644);
/// assert_eq!((file.ino, file.mode, file.size), (2, 0o100_644, 0));
/// ```
pub fn attr(node: Node, kind: FileType, mode: impl Into<Mode>) -> Attr {
    Attr {
        ino: node.0,
        mode: kind.as_raw_mode() | mode.into().as_raw_mode() & PERMISSIONS,
        nlink: 1,
        blksize: 4096,
        ..Attr::default()
    }
}

/// The bits of a mode that chmod(2) changes.
const PERMISSIONS: u32 = 0o7777;

/// An open file or directory.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Opened {
    /// The handle that later requests name it by.
    pub fh: Handle,
    /// FOPEN_* flags.
    pub flags: OpenFlags,
    /// A backing file registered with [`SessionHandle::register_backing`](super::SessionHandle::register_backing), for
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

impl Opened {
    /// A file or directory that is open with this handle.
    pub fn new(fh: Handle) -> Self {
        Self {
            fh,
            ..Self::default()
        }
    }

    /// With these FOPEN_* flags.
    pub fn with_flags(self, flags: OpenFlags) -> Self {
        Self { flags, ..self }
    }
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
    /// Permission bits, with set-user-id, set-group-id and sticky bits.
    pub mode: Option<Mode>,
    /// The file's type, which the kernel sends along with `mode`. It does not change.
    pub kind: Option<FileType>,
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
    pub fh: Option<Handle>,
    /// Set-user-id, set-group-id and capabilities are to be cleared (FATTR_KILL_SUIDGID).
    pub kill_suidgid: bool,
}

impl SetAttr {
    /// Changes attributes in memory as asked, but for the size, and moves the change time. A set of the owner,
    /// and [`SetAttr::kill_suidgid`], clear set-user-id and set-group-id bits.
    pub fn apply(&self, attr: &mut Attr) {
        let now = SetTime::Now.seconds();
        if let Some(mode) = self.mode {
            attr.mode = attr.mode & !PERMISSIONS | mode.as_raw_mode() & PERMISSIONS;
        }
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
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct OpenHow {
    /// The flags of open(2), as the kernel passes them on.
    pub flags: OFlags,
    /// Set-user-id and set-group-id are to be cleared as the file is truncated
    /// (FUSE_OPEN_KILL_SUIDGID).
    pub kill_suidgid: bool,
    /// The sender of the request. Only the kernel may be given a backing file.
    pub origin: Origin,
}

impl Default for OpenHow {
    fn default() -> Self {
        Self::new(OFlags::empty())
    }
}

impl OpenHow {
    /// An open by the kernel with these flags.
    pub fn new(flags: OFlags) -> Self {
        Self {
            flags,
            kill_suidgid: false,
            origin: Origin::Kernel,
        }
    }

    /// Whether the file is opened for writing, alone or with reading.
    pub fn writes(&self) -> bool {
        self.flags.intersects(OFlags::RWMODE)
    }
}

/// The file that a new name is made for.
#[derive(Clone, Copy, Debug)]
pub struct NewNode {
    /// The type of the file: a directory's for mkdir, a regular file's for create and tmpfile.
    pub kind: FileType,
    /// Permission bits. With [`InitFlags::DONT_MASK`] the umask is not yet applied.
    pub mode: Mode,
    /// The caller's umask.
    pub umask: Mode,
    /// Device number of a device node, in the kernel's 32-bit encoding.
    pub rdev: u32,
}

/// Where and how to read or write.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct IoHow {
    /// The handle.
    pub fh: Handle,
    /// Position in bytes.
    pub offset: u64,
    /// The flags of open(2) that the file has now.
    pub flags: OFlags,
    /// Writes: comes from the page cache, not straight from a caller (FUSE_WRITE_CACHE).
    pub from_cache: bool,
    /// Writes: set-user-id and set-group-id are to be cleared (FUSE_WRITE_KILL_SUIDGID).
    pub kill_suidgid: bool,
    /// The owner of POSIX locks that reads or writes, where the kernel says so.
    pub owner: Option<LockOwner>,
    /// Leave nothing of it in a cache of the store (RWF_DONTCACHE). Only for file systems that ask for it by
    /// [`Config::uncached`].
    pub uncached: bool,
}

impl Default for IoHow {
    fn default() -> Self {
        Self::new(Handle::default(), 0)
    }
}

impl IoHow {
    /// A read or write of an open file at a position in bytes.
    pub fn new(fh: Handle, offset: u64) -> Self {
        Self {
            fh,
            offset,
            flags: OFlags::empty(),
            from_cache: false,
            kill_suidgid: false,
            owner: None,
            uncached: false,
        }
    }

    /// Of a file that is open with these flags.
    pub fn with_flags(self, flags: OFlags) -> Self {
        Self { flags, ..self }
    }
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
    pub fh: Handle,
    /// The owner: locks of one owner don't conflict.
    pub owner: LockOwner,
    /// A flock(2) lock of the whole file and of the open file.
    pub flock: bool,
    /// Wait for it.
    pub wait: bool,
}

/// The target of lseek(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// The next byte of data (SEEK_DATA).
    Data,
    /// The next hole (SEEK_HOLE); the end of the file is one.
    Hole,
}

/// The node that a name was taken from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unlinked {
    /// Its node, if the kernel or a client knows it.
    pub node: Option<Node>,
    /// That was its last name.
    pub last: bool,
}

/// The range that copy_file_range copies.
#[derive(Clone, Copy, Debug)]
pub struct CopyRange {
    /// Handle to read from.
    pub fh_in: Handle,
    /// Position to read from.
    pub offset_in: u64,
    /// Node to write to.
    pub node_out: Node,
    /// Handle to write to.
    pub fh_out: Handle,
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
#[non_exhaustive]
pub struct Config {
    /// The features that the kernel offers.
    pub offered: InitFlags,
    /// The features that the session asks for; a file system adds and removes.
    pub wanted: InitFlags,
    /// Largest write in bytes, from 4096 to [`SessionOptions::max_write`](crate::SessionOptions::max_write), which it is
    /// before; others are refused.
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
    /// Set by a file system whose reads and writes can leave nothing in a cache of the store. Without it
    /// [`IoHow::uncached`] is never set, and what clients ask for goes no further than their caches.
    pub uncached: bool,
}

impl Config {
    /// What a session begins with, of a kernel that offers these features and speaks 7.`minor`.
    pub fn new(offered: InitFlags, minor: u32) -> Self {
        const BACKGROUND: u16 = 64;
        Self {
            offered,
            wanted: InitFlags::empty(),
            max_write: 1 << 20,
            max_readahead: 1 << 20,
            max_background: BACKGROUND,
            congestion_threshold: BACKGROUND / 4 * 3,
            time_gran: 1,
            max_stack_depth: 0,
            minor,
            uncached: false,
        }
    }
}

/// Something that a program of the host has changed.
#[derive(Debug)]
pub enum HostChange<'a> {
    /// A file's contents, and its attributes.
    Contents(Node),
    /// A node's attributes.
    Attributes(Node),
    /// A node's attributes, which the kernel or a client was told after the change: mostly the kernel made
    /// it by itself, in a backing file.
    KnownAttributes(Node),
    /// A name in a directory came, went, or leads elsewhere.
    Name(Node, &'a CStr),
    /// Anything: changes were lost. With all nodes that are known.
    Anything(Vec<Node>),
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
    /// It goes on where an earlier server's ended ([`SessionHandle::kept`](super::SessionHandle::kept)), and reports all
    /// changes of names that the kernel may not have been told of.
    pub goes_on: bool,
    /// And all changes of contents and attributes.
    pub contents_go_on: bool,
}

/// _IOC_WRITE where a command of ioctl(2) has it: it hands something over.
pub(crate) const IOC_WRITE: u32 = 1 << 30;

/// An ioctl.
#[derive(Clone, Copy, Debug)]
pub struct Ioctl<'a> {
    /// The handle.
    pub fh: Handle,
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
    pub fh: Handle,
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
