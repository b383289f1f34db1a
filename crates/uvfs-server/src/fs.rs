//! What a file system implements.

use std::ffi::CStr;
use std::time::{Duration, SystemTime};

pub use crate::coherence::HostChange;
pub use rustix::fs::FileType;
use rustix::fs::OFlags;
pub use rustix::io::Errno;
pub use uvfs_io::Payload;
use uvfs_proto::abi;
pub use uvfs_proto::abi::{Attr, InitFlags, Kstatfs, OpenFlags};

/// What a handler gives: a value, or the errno that the caller gets.
pub type Result<T> = std::result::Result<T, Errno>;

/// The number of the root directory's node.
pub const ROOT: u64 = 1;

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

/// What setattr changes; what is `None` stays.
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

/// What open and create ask for.
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

/// What a new name gets.
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
    /// [`FileSystem::takes_uncached`].
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

/// Who asks for a lock and how.
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

/// One entry of a directory listing.
#[derive(Clone, Copy, Debug)]
pub struct DirEntry<'a> {
    /// Inode number to show.
    pub ino: u64,
    /// The offset to go on from after this entry.
    pub next: u64,
    /// DT_* file type: [`FileType::as_raw_mode`] shifted right by 12.
    pub kind: u32,
    /// The name.
    pub name: &'a [u8],
}

/// Takes the entries of a listing until it is full.
pub trait DirSink {
    /// Adds an entry; false when it did not fit, and the listing ends before it.
    fn add(&mut self, entry: DirEntry<'_>) -> bool;
    /// Whether entries with attributes are wanted (READDIRPLUS).
    fn wants_attributes(&self) -> bool;
    /// Whether `add` or `add_plus` of a name of this length would succeed. Ask before counting a
    /// lookup.
    fn fits(&self, name_len: usize) -> bool;
    /// The bytes that are left for entries. An entry takes its structure on the wire and its name, rounded up
    /// to 8.
    fn room(&self) -> usize;
    /// Adds an entry with what a lookup of it gives; `entry.node` 0 for names that count no lookup
    /// (`.` and `..`).
    fn add_plus(&mut self, dir: DirEntry<'_>, entry: &Entry) -> bool;
}

/// Fills `data` with the bytes of a file in memory from `offset` on, and says how many there were: the
/// answer of a [`FileSystem::read`].
pub fn read_from(file: &[u8], offset: u64, data: &Payload) -> usize {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let rest = file.get(start..).unwrap_or_default();
    let len = rest.len().min(data.len());
    data.copy_in(0, &rest[..len]);
    len
}

/// Lists a directory whose entries are numbered by their position: `offset` is that of a
/// [`FileSystem::readdir`], and each entry is an inode number, a type and a name. The list has to begin
/// with `.` and `..`, and entries have to keep their position while the directory does not change.
pub fn list<'a>(
    entries: impl IntoIterator<Item = (u64, FileType, &'a [u8])>,
    offset: u64,
    sink: &mut dyn DirSink,
) {
    let first = usize::try_from(offset).unwrap_or(usize::MAX);
    for (next, (ino, kind, name)) in (1..).zip(entries).skip(first) {
        // A type's DT_* number is the upper bits of its mode.
        let kind = kind.as_raw_mode() >> 12;
        let entry = DirEntry {
            ino,
            next,
            kind,
            name,
        };
        if !sink.add(entry) {
            break;
        }
    }
}

/// A reply of variable length to getxattr and listxattr is cut by the session to what the caller
/// has room for.
pub type Bytes = Vec<u8>;

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

/// What a name was taken from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unlinked {
    /// Its node, if it is known to anybody.
    pub node: Option<u64>,
    /// That was its last name.
    pub last: bool,
}

/// What copy_file_range is asked for.
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

/// What is agreed with the kernel when a mount starts. A file system asks in
/// [`FileSystem::init`]; what the kernel does not offer stays off.
#[derive(Clone, Debug)]
pub struct Config {
    /// What the kernel offers.
    pub offered: InitFlags,
    /// What the session asks for; a file system adds and removes.
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

macro_rules! unsupported {
    ($($unused:ident),*) => {{ $(let _ = $unused;)* Err(Errno::NOSYS) }};
}

/// A file system in user space.
///
/// Handlers run on the thread of the queue that their request came by; many are under way at once,
/// and one that awaits holds up no other. They must not block for long otherwise: what can block
/// goes through [`uvfs_io`]. Nodes are named by numbers that the file system chooses ([`ROOT`] is the root) and
/// that are valid until [`FileSystem::forget`] took back all lookups.
///
/// A handler that is not implemented answers ENOSYS, which for many requests makes the kernel not ask again.
/// But files and directories can be opened, with handle 0, and the file system tells no sizes.
///
/// Every error is the errno that a kernel file system would give.
#[allow(async_fn_in_trait)] // Futures stay on the thread of their queue; Send is not wanted.
#[allow(unused_variables)]
pub trait FileSystem: Send + Sync + 'static {
    /// Called once, before any other request.
    fn init(&self, config: &mut Config) -> Result<()> {
        Ok(())
    }

    /// The last call, after the mount has ended.
    fn destroy(&self) {}

    /// How it watches for changes that others make, which it reports by
    /// [`crate::Session::host_changed`]. Nothing where there is nobody else.
    fn watch(&self) -> Option<Watch> {
        None
    }

    /// Whether reads and writes can leave nothing in a cache of the store. Without it
    /// [`IoHow::uncached`] is never set, and what clients ask for goes no further than their caches.
    fn takes_uncached(&self) -> bool {
        false
    }

    /// What names a node's file across restarts of the server, and never another file: clients give
    /// it to [`FileSystem::find`] when their server came back. The root's says which source is
    /// served. At most [`uvfs_proto::ext::IDENTITY_MAX`] bytes; `None` when there is no such thing,
    /// and then what clients have dirty can't be written after a restart. Asked for at each open.
    fn identity(&self, node: u64) -> Option<Bytes> {
        None
    }

    /// The path below the root by which a node's file can be found now, for who did not look it up;
    /// `None` when there is no such thing.
    fn path(&self, node: u64) -> Option<Bytes> {
        None
    }

    /// Finds the node of an identity and counts a lookup; ESTALE when it is gone. Behind the identity
    /// is a path by which the client found the file, or nothing. All of it comes from a client: it
    /// must lead to nothing that lookups would not.
    async fn find(&self, cx: &Context, identity: &[u8]) -> Result<Entry> {
        let _ = (cx, identity);
        Err(Errno::OPNOTSUPP)
    }

    /// `lookups` of a node are taken back; at 0 the kernel knows it no longer. Has no answer.
    fn forget(&self, node: u64, lookups: u64) {}

    /// How many lookups of a node are counted, for who wants to know whether anybody else has it.
    /// Nothing where that is not known.
    fn lookups(&self, node: u64) -> Option<u64> {
        None
    }

    /// Finds a name in a directory.
    async fn lookup(&self, cx: &Context, parent: u64, name: &CStr) -> Result<Entry> {
        unsupported!(cx, parent, name)
    }

    /// A node's attributes; `fh` when asked through an open file.
    async fn getattr(&self, cx: &Context, node: u64, fh: Option<u64>) -> Result<Attributes> {
        unsupported!(cx, node, fh)
    }

    /// statx(2) with the STATX_* `mask`. On ENOSYS the kernel asks by `getattr` from then on.
    async fn statx(
        &self,
        cx: &Context,
        node: u64,
        fh: Option<u64>,
        mask: u32,
    ) -> Result<(abi::Statx, Duration)> {
        unsupported!(cx, node, fh, mask)
    }

    /// Changes attributes.
    async fn setattr(&self, cx: &Context, node: u64, set: &SetAttr) -> Result<Attributes> {
        unsupported!(cx, node, set)
    }

    /// The target of a symbolic link.
    async fn readlink(&self, cx: &Context, node: u64) -> Result<Bytes> {
        unsupported!(cx, node)
    }

    /// Makes a symbolic link.
    async fn symlink(
        &self,
        cx: &Context,
        parent: u64,
        name: &CStr,
        target: &CStr,
    ) -> Result<Entry> {
        unsupported!(cx, parent, name, target)
    }

    /// Makes a file, device, fifo or socket.
    async fn mknod(&self, cx: &Context, parent: u64, name: &CStr, new: &NewNode) -> Result<Entry> {
        unsupported!(cx, parent, name, new)
    }

    /// Makes a directory.
    async fn mkdir(&self, cx: &Context, parent: u64, name: &CStr, new: &NewNode) -> Result<Entry> {
        unsupported!(cx, parent, name, new)
    }

    /// Removes a name that is not a directory's.
    async fn unlink(&self, cx: &Context, parent: u64, name: &CStr) -> Result<Unlinked> {
        unsupported!(cx, parent, name)
    }

    /// Removes an empty directory.
    async fn rmdir(&self, cx: &Context, parent: u64, name: &CStr) -> Result<Unlinked> {
        unsupported!(cx, parent, name)
    }

    /// Renames, with renameat2(2)'s flags. Gives what lost the new name.
    async fn rename(
        &self,
        cx: &Context,
        parent: u64,
        name: &CStr,
        new_parent: u64,
        new_name: &CStr,
        flags: u32,
    ) -> Result<Unlinked> {
        unsupported!(cx, parent, name, new_parent, new_name, flags)
    }

    /// Makes a further name for a node.
    async fn link(
        &self,
        cx: &Context,
        node: u64,
        new_parent: u64,
        new_name: &CStr,
    ) -> Result<Entry> {
        unsupported!(cx, node, new_parent, new_name)
    }

    /// Opens a file. ENOSYS lets the kernel open without asking from then on.
    async fn open(&self, cx: &Context, node: u64, how: &OpenHow) -> Result<Opened> {
        Ok(Opened::default())
    }

    /// Makes a file unless it is there and opens it.
    async fn create(
        &self,
        cx: &Context,
        parent: u64,
        name: &CStr,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        unsupported!(cx, parent, name, new, how)
    }

    /// Makes a file without a name (O_TMPFILE) and opens it.
    async fn tmpfile(
        &self,
        cx: &Context,
        parent: u64,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        unsupported!(cx, parent, new, how)
    }

    /// Fills `data` from the file; less than its length means the end of the file.
    async fn read(&self, cx: &Context, node: u64, how: &IoHow, data: &Payload) -> Result<usize> {
        unsupported!(cx, node, how, data)
    }

    /// Writes `data` to the file and says how much of it.
    async fn write(&self, cx: &Context, node: u64, how: &IoHow, data: &Payload) -> Result<usize> {
        unsupported!(cx, node, how, data)
    }

    /// A descriptor of the open file was closed; `owner`'s POSIX locks go.
    async fn flush(&self, cx: &Context, node: u64, fh: u64, owner: u64) -> Result<()> {
        unsupported!(cx, node, fh, owner)
    }

    /// The last descriptor was closed, of a file open with open(2)'s `flags`. `flock` names an owner
    /// whose flock(2) lock goes.
    async fn release(
        &self,
        cx: &Context,
        node: u64,
        fh: u64,
        flags: u32,
        flock: Option<u64>,
    ) -> Result<()> {
        Ok(())
    }

    /// Makes the file's data (and unless `data_only` its attributes) durable.
    async fn fsync(&self, cx: &Context, node: u64, fh: u64, data_only: bool) -> Result<()> {
        unsupported!(cx, node, fh, data_only)
    }

    /// Opens a directory. ENOSYS lets the kernel list without asking.
    async fn opendir(&self, cx: &Context, node: u64, how: &OpenHow) -> Result<Opened> {
        Ok(Opened::default())
    }

    /// Lists a directory from `offset` (0, or an earlier entry's `next`) on.
    async fn readdir(
        &self,
        cx: &Context,
        node: u64,
        fh: u64,
        offset: u64,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        unsupported!(cx, node, fh, offset, sink)
    }

    /// The last descriptor of a directory was closed.
    async fn releasedir(&self, cx: &Context, node: u64, fh: u64, flags: u32) -> Result<()> {
        Ok(())
    }

    /// Makes a directory's entries durable.
    async fn fsyncdir(&self, cx: &Context, node: u64, fh: u64, data_only: bool) -> Result<()> {
        unsupported!(cx, node, fh, data_only)
    }

    /// Sizes and counts of the file system.
    async fn statfs(&self, cx: &Context, node: u64) -> Result<Kstatfs> {
        Ok(Kstatfs {
            bsize: 4096,
            frsize: 4096,
            namelen: 255,
            ..Kstatfs::default()
        })
    }

    /// An extended attribute's value; the session handles sizes.
    async fn getxattr(&self, cx: &Context, node: u64, name: &CStr) -> Result<Bytes> {
        unsupported!(cx, node, name)
    }

    /// The names of extended attributes, each ended by a 0 byte.
    async fn listxattr(&self, cx: &Context, node: u64) -> Result<Bytes> {
        unsupported!(cx, node)
    }

    /// Sets an extended attribute. `kill_sgid`: the set-group-id bit goes, as an ACL takes it
    /// (FUSE_SETXATTR_ACL_KILL_SGID).
    async fn setxattr(
        &self,
        cx: &Context,
        node: u64,
        name: &CStr,
        value: &[u8],
        flags: u32,
        kill_sgid: bool,
    ) -> Result<()> {
        unsupported!(cx, node, name, value, flags, kill_sgid)
    }

    /// Removes an extended attribute.
    async fn removexattr(&self, cx: &Context, node: u64, name: &CStr) -> Result<()> {
        unsupported!(cx, node, name)
    }

    /// access(2); not asked with `default_permissions`.
    async fn access(&self, cx: &Context, node: u64, mask: u32) -> Result<()> {
        unsupported!(cx, node, mask)
    }

    /// The lock that stands in the way of `lock`, or one of kind F_UNLCK.
    async fn getlk(&self, cx: &Context, node: u64, how: &LockHow, lock: &Lock) -> Result<Lock> {
        unsupported!(cx, node, how, lock)
    }

    /// Takes or gives back a lock. A wait ends with EINTR when `interrupted()` of
    /// [`crate::interrupt`] says so: the future is told by being resumed.
    async fn setlk(&self, cx: &Context, node: u64, how: &LockHow, lock: &Lock) -> Result<()> {
        unsupported!(cx, node, how, lock)
    }

    /// fallocate(2).
    async fn fallocate(
        &self,
        cx: &Context,
        node: u64,
        fh: u64,
        offset: u64,
        len: u64,
        mode: u32,
    ) -> Result<()> {
        unsupported!(cx, node, fh, offset, len, mode)
    }

    /// lseek(2) with SEEK_DATA or SEEK_HOLE.
    async fn lseek(
        &self,
        cx: &Context,
        node: u64,
        fh: u64,
        offset: u64,
        whence: u32,
    ) -> Result<u64> {
        unsupported!(cx, node, fh, offset, whence)
    }

    /// Copies within the file system and says how much.
    async fn copy_file_range(&self, cx: &Context, node: u64, copy: &CopyRange) -> Result<u64> {
        unsupported!(cx, node, copy)
    }

    /// ioctl(2): the result and data for the caller.
    async fn ioctl(&self, cx: &Context, node: u64, ioctl: &Ioctl<'_>) -> Result<(i32, Bytes)> {
        unsupported!(cx, node, ioctl)
    }

    /// The ready POLL* events of an open file.
    async fn poll(&self, cx: &Context, node: u64, poll: &Poll) -> Result<u32> {
        unsupported!(cx, node, poll)
    }

    /// open(2)'s flags that a file was opened with. Answered by file systems that clients over shared
    /// memory may use the open files of; see [`FileSystem::share`]. EBUSY for one that is better left
    /// to the kernel, which reads and writes it without asking.
    fn open_flags(&self, node: u64, fh: u64) -> Result<u32> {
        unsupported!(node, fh)
    }

    /// A further handle of an open file, of the same access, for a client who has a descriptor of
    /// it. It outlives `fh`, is released like any other, and comes with a lookup of the node.
    async fn share(&self, node: u64, fh: u64) -> Result<u64> {
        unsupported!(node, fh)
    }

    /// The block of the device that a file's block is on.
    async fn bmap(&self, cx: &Context, node: u64, block: u64, block_size: u32) -> Result<u64> {
        unsupported!(cx, node, block, block_size)
    }

    /// Makes the whole file system durable.
    async fn syncfs(&self, cx: &Context, node: u64) -> Result<()> {
        unsupported!(cx, node)
    }
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
