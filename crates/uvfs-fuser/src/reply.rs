//! The replies that handlers are given. A reply answers its request, at any time and from any thread.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use uvfs_proto::abi;
use uvfs_server::fs::{self, Payload, timespec};

use crate::slot::Sender;
use crate::{BackingId, Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo};

/// The most bytes that an extended attribute, or a list of their names, may have.
pub(crate) const XATTR_MAX: u32 = 64 << 10;

/// The data of a reply.
pub(crate) enum Data {
    /// This many bytes lie where the kernel takes them from.
    Placed(usize),
    Bytes(Vec<u8>),
}

/// The type's bits of st_mode.
fn type_bits(kind: FileType) -> u32 {
    match kind {
        FileType::NamedPipe => libc::S_IFIFO,
        FileType::CharDevice => libc::S_IFCHR,
        FileType::BlockDevice => libc::S_IFBLK,
        FileType::Directory => libc::S_IFDIR,
        FileType::RegularFile => libc::S_IFREG,
        FileType::Symlink => libc::S_IFLNK,
        FileType::Socket => libc::S_IFSOCK,
    }
}

fn attributes(attr: &FileAttr) -> abi::Attr {
    let (atime, atimensec) = timespec(attr.atime);
    let (mtime, mtimensec) = timespec(attr.mtime);
    let (ctime, ctimensec) = timespec(attr.ctime);
    abi::Attr {
        ino: attr.ino.0,
        size: attr.size,
        blocks: attr.blocks,
        atime: atime as _,
        mtime: mtime as _,
        ctime: ctime as _,
        atimensec,
        mtimensec,
        ctimensec,
        mode: type_bits(attr.kind) | u32::from(attr.perm),
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: attr.blksize,
        ..Default::default()
    }
}

fn entry(ttl: &Duration, attr: &FileAttr, generation: Generation) -> fs::Entry {
    let mut entry = fs::Entry::new(attributes(attr), *ttl);
    entry.generation = generation.0;
    entry
}

/// An entry of a listing; its name is the next `name_len` bytes of the listing's names.
struct Listed<T> {
    ino: u64,
    next: u64,
    kind: FileType,
    name_len: usize,
    more: T,
}

/// A listing as a handler fills it.
pub(crate) struct Listing<T> {
    entries: Vec<Listed<T>>,
    names: Vec<u8>,
    room: usize,
}

impl<T> Listing<T> {
    fn new(room: usize) -> Self {
        Self {
            entries: Vec::new(),
            names: Vec::new(),
            room,
        }
    }

    /// Adds an entry whose structure has `fixed` bytes; true when there was no room for it.
    fn add(&mut self, fixed: usize, dir: (u64, u64, FileType), name: &[u8], more: T) -> bool {
        let len = (fixed + name.len()).next_multiple_of(8);
        let Some(room) = self.room.checked_sub(len) else {
            return true;
        };
        self.room = room;
        self.names.extend_from_slice(name);
        let (ino, next, kind) = dir;
        self.entries.push(Listed {
            ino,
            next,
            kind,
            name_len: name.len(),
            more,
        });
        false
    }

    /// The entries, as uvfs has them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (fs::DirEntry<'_>, &T)> {
        let mut names = &self.names[..];
        self.entries.iter().map(move |entry| {
            let (name, rest) = names.split_at(entry.name_len);
            names = rest;
            let dir = fs::DirEntry {
                ino: entry.ino,
                next: entry.next,
                kind: fs::FileType::from_raw_mode(type_bits(entry.kind)),
                name,
            };
            (dir, &entry.more)
        })
    }
}

/// A reply that is made of the way to its request, and of the mount's descriptor. The others are made of a
/// [`Sender`], which is one too.
pub(crate) trait Reply: Send + 'static {
    type Answer: Send + 'static;

    fn new(sender: Sender<Self::Answer>, device: &Arc<OwnedFd>) -> Self;
}

impl<T: Send + 'static> Reply for Sender<T> {
    type Answer = T;

    fn new(sender: Sender<T>, _: &Arc<OwnedFd>) -> Self {
        sender
    }
}

macro_rules! replies {
    ($(
        $(#[$meta:meta])* $name:ident($what:ty)
        $({ $(#[$doc:meta])* $answer:ident($($arg:ident: $type:ty),*) = $value:expr })?;
    )*) => {$(
        $(#[$meta])*
        #[derive(Debug)]
        pub struct $name(Sender<$what>);

        impl Reply for $name {
            type Answer = $what;

            fn new(sender: Sender<$what>, _: &Arc<OwnedFd>) -> Self {
                Self(sender)
            }
        }

        impl $name {
            $(
                $(#[$doc])*
                pub fn $answer(self, $($arg: $type),*) {
                    self.0.send(Ok($value));
                }
            )?

            /// Answers with an error.
            pub fn error(self, err: Errno) {
                self.0.send(Err(err));
            }
        }
    )*};
}

replies! {
    /// Answers a request that succeeds or fails, and gives nothing else.
    ReplyEmpty(()) {
        /// The request succeeded.
        ok() = ()
    };
    /// Answers a request that finds or makes a node.
    ReplyEntry(fs::Entry);
    /// Answers a request for attributes.
    ReplyAttr(fs::Attributes) {
        /// Gives the attributes. The kernel may keep them for `ttl`.
        attr(ttl: &Duration, attr: &FileAttr) = fs::Attributes::new(attributes(attr), *ttl)
    };
    /// Answers a write or a copy.
    ReplyWrite(u32) {
        /// Gives the number of bytes that were written.
        written(size: u32) = size
    };
    /// Answers statfs(2).
    ReplyStatfs(abi::Kstatfs);
    /// Answers a test for a lock.
    ReplyLock(fs::Lock) {
        /// Gives the lock that is in the way, or one of type F_UNLCK.
        locked(start: u64, end: u64, typ: i32, pid: u32) =
            fs::Lock { start, end, kind: typ as u32, pid }
    };
    /// Answers a request for the place of a block.
    ReplyBmap(u64) {
        /// Gives the block of the device.
        bmap(block: u64) = block
    };
    /// Answers ioctl(2).
    ReplyIoctl((i32, Vec<u8>));
    /// Answers poll(2).
    ReplyPoll(u32) {
        /// Gives the events that are ready.
        poll(revents: crate::PollEvents) = revents.bits()
    };
    /// Answers getxattr(2) or listxattr(2).
    ReplyXattr(Vec<u8>);
    /// Answers lseek(2).
    ReplyLseek(u64) {
        /// Gives the new position.
        offset(offset: i64) = offset as u64
    };
}

impl ReplyEntry {
    /// Gives the node. The kernel may keep its name and its attributes for `ttl`.
    pub fn entry(self, ttl: &Duration, attr: &FileAttr, generation: Generation) {
        self.entry_with_ttls(ttl, ttl, attr, generation);
    }

    /// Gives the node. The kernel may keep its attributes for `attr_ttl`, and its name for `entry_ttl`.
    pub fn entry_with_ttls(
        self,
        attr_ttl: &Duration,
        entry_ttl: &Duration,
        attr: &FileAttr,
        generation: Generation,
    ) {
        let mut entry = entry(attr_ttl, attr, generation);
        entry.entry_ttl = *entry_ttl;
        self.0.send(Ok(entry));
    }
}

impl ReplyStatfs {
    /// Gives the file system's sizes and counts.
    #[allow(clippy::too_many_arguments)]
    pub fn statfs(
        self,
        blocks: u64,
        bfree: u64,
        bavail: u64,
        files: u64,
        ffree: u64,
        bsize: u32,
        namelen: u32,
        frsize: u32,
    ) {
        self.0.send(Ok(abi::Kstatfs {
            blocks,
            bfree,
            bavail,
            files,
            ffree,
            bsize,
            namelen,
            frsize,
            ..Default::default()
        }));
    }
}

impl ReplyIoctl {
    /// Gives the value that ioctl(2) returns, and data for its caller.
    pub fn ioctl(self, result: i32, data: &[u8]) {
        self.0.send_with(|| Ok((result, data.to_vec())));
    }
}

impl ReplyXattr {
    /// Gives the length of the value. Handlers are never asked for it alone (see the crate's
    /// documentation), so a handler that gives it can only mean a value of zeros.
    pub fn size(self, size: u32) {
        self.0.send_with(|| match size {
            0..=XATTR_MAX => Ok(vec![0; size as usize]),
            _ => Err(Errno::E2BIG),
        });
    }

    /// Gives the value, or the names with a 0 byte after each.
    pub fn data(self, data: &[u8]) {
        self.0.send_with(|| Ok(data.to_vec()));
    }
}

/// Answers a read.
#[derive(Debug)]
pub struct ReplyData {
    sender: Sender<Data>,
    /// The memory that the kernel takes the data from.
    room: Option<Payload>,
}

impl ReplyData {
    pub(crate) fn new(sender: Sender<Data>, room: Option<Payload>) -> Self {
        Self { sender, room }
    }

    /// Gives the data.
    pub fn data(self, data: &[u8]) {
        let Self { sender, room } = self;
        sender.send_with(|| match room {
            None => Ok(Data::Bytes(data.to_vec())),
            Some(room) if data.len() > room.len() => {
                tracing::error!(asked = room.len(), given = data.len(), "too much data");
                Err(Errno::EIO)
            }
            Some(room) => {
                room.copy_in(0, data);
                Ok(Data::Placed(data.len()))
            }
        });
    }

    /// Answers with an error.
    pub fn error(self, err: Errno) {
        self.sender.send(Err(err));
    }
}

/// Answers an open of a file or directory.
#[derive(Debug)]
pub struct ReplyOpen {
    sender: Sender<fs::Opened>,
    device: Arc<OwnedFd>,
}

/// Answers a request that makes a file and opens it.
#[derive(Debug)]
pub struct ReplyCreate {
    sender: Sender<(fs::Entry, fs::Opened)>,
    device: Arc<OwnedFd>,
}

macro_rules! backing {
    ($name:ident, $what:ty) => {
        impl Reply for $name {
            type Answer = $what;

            fn new(sender: Sender<$what>, device: &Arc<OwnedFd>) -> Self {
                let device = device.clone();
                Self { sender, device }
            }
        }

        impl $name {
            /// Registers a file that the kernel can read and write by itself. All opens of a node that
            /// exist at one time have to be given the same file.
            pub fn open_backing(&self, fd: impl AsFd) -> std::io::Result<BackingId> {
                BackingId::create(&self.device, fd)
            }

            /// Takes the number of a registered file. Dropping the result closes it.
            ///
            /// # Safety
            /// The number has to be one of this session's, and nothing else may close it. No memory depends
            /// on that.
            pub unsafe fn wrap_backing(&self, id: u32) -> BackingId {
                BackingId::wrap(&self.device, id)
            }

            /// Answers with an error.
            pub fn error(self, err: Errno) {
                self.sender.send(Err(err));
            }
        }
    };
}

backing!(ReplyOpen, fs::Opened);
backing!(ReplyCreate, (fs::Entry, fs::Opened));

fn unbacked(fh: FileHandle, flags: FopenFlags) -> fs::Opened {
    assert!(
        !flags.contains(FopenFlags::FOPEN_PASSTHROUGH),
        "an open with a backing file is answered with its number"
    );
    let flags = fs::OpenFlags::from_bits_retain(flags.bits());
    fs::Opened::new(fh.0.into()).with_flags(flags)
}

fn backed(fh: FileHandle, flags: FopenFlags, id: &BackingId) -> fs::Opened {
    let flags = flags | FopenFlags::FOPEN_PASSTHROUGH;
    let flags = fs::OpenFlags::from_bits_retain(flags.bits());
    let mut opened = fs::Opened::new(fh.0.into()).with_flags(flags);
    opened.backing = id.backing_id as i32;
    opened
}

impl ReplyOpen {
    /// The file is open. Later requests name it by `fh`.
    ///
    /// # Panics
    /// When the flags hold `FOPEN_PASSTHROUGH`: [`ReplyOpen::opened_passthrough`] is for that.
    pub fn opened(self, fh: FileHandle, flags: FopenFlags) {
        self.sender.send(Ok(unbacked(fh, flags)));
    }

    /// The file is open, and the kernel reads and writes its backing file.
    pub fn opened_passthrough(self, fh: FileHandle, flags: FopenFlags, backing_id: &BackingId) {
        self.sender.send(Ok(backed(fh, flags, backing_id)));
    }
}

impl ReplyCreate {
    /// Gives the new file and its handle.
    ///
    /// # Panics
    /// When the flags hold `FOPEN_PASSTHROUGH`: [`ReplyCreate::created_passthrough`] is for that.
    pub fn created(
        self,
        ttl: &Duration,
        attr: &FileAttr,
        generation: Generation,
        fh: FileHandle,
        flags: FopenFlags,
    ) {
        let open = unbacked(fh, flags);
        self.sender.send(Ok((entry(ttl, attr, generation), open)));
    }

    /// Gives the new file and its handle. The kernel reads and writes its backing file.
    pub fn created_passthrough(
        self,
        ttl: &Duration,
        attr: &FileAttr,
        generation: Generation,
        fh: FileHandle,
        flags: FopenFlags,
        backing_id: &BackingId,
    ) {
        let open = backed(fh, flags, backing_id);
        self.sender.send(Ok((entry(ttl, attr, generation), open)));
    }
}

/// Answers a listing of a directory.
pub struct ReplyDirectory {
    sender: Sender<Listing<()>>,
    listing: Listing<()>,
}

/// Answers a listing of a directory with attributes.
pub struct ReplyDirectoryPlus {
    sender: Sender<Listing<fs::Entry>>,
    listing: Listing<fs::Entry>,
}

macro_rules! directory {
    ($name:ident, $what:ty) => {
        impl $name {
            pub(crate) fn new(sender: Sender<Listing<$what>>, room: usize) -> Self {
                let listing = Listing::new(room);
                Self { sender, listing }
            }

            /// The listing is complete, or has no room for more.
            pub fn ok(self) {
                self.sender.send(Ok(self.listing));
            }

            /// Answers with an error.
            pub fn error(self, err: Errno) {
                self.sender.send(Err(err));
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("sender", &self.sender)
                    .field("entries", &self.listing.entries.len())
                    .finish()
            }
        }
    };
}

directory!(ReplyDirectory, ());
directory!(ReplyDirectoryPlus, fs::Entry);

impl ReplyDirectory {
    /// Adds an entry; a later listing goes on after it with `offset`. True when there was no room for it,
    /// and it was not added.
    #[must_use]
    pub fn add<T: AsRef<OsStr>>(
        &mut self,
        ino: INodeNo,
        offset: u64,
        kind: FileType,
        name: T,
    ) -> bool {
        let fixed = size_of::<abi::Dirent>();
        let name = name.as_ref().as_bytes();
        self.listing.add(fixed, (ino.0, offset, kind), name, ())
    }
}

impl ReplyDirectoryPlus {
    /// Adds an entry with its attributes, which the kernel may keep for `ttl`; a later listing goes on after
    /// it with `offset`. True when there was no room for it, and it was not added. Otherwise it counts as a
    /// lookup.
    pub fn add<T: AsRef<OsStr>>(
        &mut self,
        ino: INodeNo,
        offset: u64,
        name: T,
        ttl: &Duration,
        attr: &FileAttr,
        generation: Generation,
    ) -> bool {
        // The attributes hold the same number.
        let _ = ino;
        let fixed = size_of::<abi::Direntplus>();
        let name = name.as_ref().as_bytes();
        let found = entry(ttl, attr, generation);
        let dir = (attr.ino.0, offset, attr.kind);
        self.listing.add(fixed, dir, name, found)
    }
}
