//! The structures, opcodes and flags of the wire, as `include/uapi/linux/fuse.h` of Linux 6.18
//! (protocol 7.45) lays them out.
//!
//! A structure is called what the kernel calls it, without `fuse_` and in camel case; its fields
//! carry the kernel's names and are plain integers in the machine's byte order, so that any bytes
//! are a valid value. Flag words have a type of their own here (`OpenFlags` for
//! [`OpenOut::open_flags`], and so on); unknown bits survive `from_bits_retain`.
//!
//! Each structure's size is checked against the kernel's when this crate is compiled.

use bitflags::bitflags;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Major version of the protocol (`FUSE_KERNEL_VERSION`).
pub const KERNEL_VERSION: u32 = 7;
/// Newest minor version that this crate knows (`FUSE_KERNEL_MINOR_VERSION`, Linux 6.18).
pub const KERNEL_MINOR_VERSION: u32 = 45;
/// Oldest minor version that this crate speaks (Linux 5.4).
pub const MIN_MINOR_VERSION: u32 = 31;
/// Smallest buffer, in bytes, that the kernel accepts for a read of `/dev/fuse`.
pub const MIN_READ_BUFFER: usize = 8192;
/// Bytes of [`InitIn`] that kernels before 7.36 send: they have no `flags2`.
pub const COMPAT_INIT_IN_SIZE: usize = 16;
/// Bytes of [`SetxattrIn`] without [`InitFlags::SETXATTR_EXT`].
pub const COMPAT_SETXATTR_IN_SIZE: usize = 8;
/// Bit of a request's `unique` that says that it was sent before (`FUSE_UNIQUE_RESEND`).
pub const UNIQUE_RESEND: u64 = 1 << 63;
/// Type in an [`ExtHeader`] of supplementary groups (`FUSE_EXT_GROUPS`).
pub const EXT_GROUPS: u32 = 32;
/// Bytes to which extensions and directory entries are aligned.
pub const REC_ALIGN: usize = 8;
/// Bytes of the header area of a FUSE-over-io_uring entry (`FUSE_URING_IN_OUT_HEADER_SZ`).
pub const URING_IN_OUT_HEADER_SZ: usize = 128;
/// Bytes of the per-opcode area of a FUSE-over-io_uring entry (`FUSE_URING_OP_IN_OUT_SZ`).
pub const URING_OP_IN_OUT_SZ: usize = 128;
/// io_uring command that registers an entry and fetches its first request.
pub const IO_URING_CMD_REGISTER: u32 = 1;
/// io_uring command that answers an entry's request and fetches the next.
pub const IO_URING_CMD_COMMIT_AND_FETCH: u32 = 2;
/// ioctl of `/dev/fuse` that attaches a descriptor to the session of another (argument: `u32` fd).
pub const DEV_IOC_CLONE: u32 = 0x8004_e500;
/// ioctl of `/dev/fuse` that registers a backing file (argument: [`BackingMap`]).
pub const DEV_IOC_BACKING_OPEN: u32 = 0x4010_e501;
/// ioctl of `/dev/fuse` that forgets a backing file (argument: `u32` id).
pub const DEV_IOC_BACKING_CLOSE: u32 = 0x4004_e502;

/// `FSYNC`: data only, not metadata (`FUSE_FSYNC_FDATASYNC`, of [`FsyncIn::fsync_flags`]).
pub const FSYNC_FDATASYNC: u32 = 1 << 0;
/// Clear suid and sgid if the file is executable (`FUSE_OPEN_KILL_SUIDGID`, of
/// [`OpenIn::open_flags`] and [`CreateIn::open_flags`]).
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
/// The entry expires but is not unhashed (`FUSE_EXPIRE_ONLY`, of [`NotifyInvalEntryOut::flags`]).
pub const EXPIRE_ONLY: u32 = 1 << 0;

/// An opcode that this crate does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown FUSE opcode {0}")]
pub struct UnknownOpcode(pub u32);

macro_rules! opcodes {
    ($($variant:ident$(($structure:ty))? = $value:literal, $name:literal, $doc:literal;)*) => {
        /// The kinds of requests (`enum fuse_opcode`).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum Opcode {
            $(#[doc = $doc] $variant = $value,)*
        }

        impl Opcode {
            /// Every opcode, in the order of their numbers.
            pub const ALL: &'static [Opcode] = &[$(Opcode::$variant),*];

            /// The kernel's name, without its prefix: `LOOKUP`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Opcode::$variant => $name,)*
                }
            }

            /// Bytes of its structure.
            pub(crate) const fn structure_len(self) -> usize {
                match self {
                    $(Opcode::$variant => 0 $(+ size_of::<$structure>())?,)*
                }
            }

            /// Whether a request of it is answered; if not, an error of it is not either.
            pub const fn has_answer(self) -> bool {
                !matches!(self, Opcode::Forget | Opcode::BatchForget | Opcode::NotifyReply)
            }
        }

        impl TryFrom<u32> for Opcode {
            type Error = UnknownOpcode;

            fn try_from(value: u32) -> Result<Self, UnknownOpcode> {
                match value {
                    $($value => Ok(Opcode::$variant),)*
                    _ => Err(UnknownOpcode(value)),
                }
            }
        }
    };
}

opcodes! {
    Lookup = 1, "LOOKUP", "Find a name in a directory.";
    Forget(ForgetIn) = 2, "FORGET", "Drop references to an inode; has no reply.";
    Getattr(GetattrIn) = 3, "GETATTR", "Read attributes.";
    Setattr(SetattrIn) = 4, "SETATTR", "Change attributes.";
    Readlink = 5, "READLINK", "Read a symbolic link's target.";
    Symlink = 6, "SYMLINK", "Make a symbolic link.";
    Mknod(MknodIn) = 8, "MKNOD", "Make a file, device or socket.";
    Mkdir(MkdirIn) = 9, "MKDIR", "Make a directory.";
    Unlink = 10, "UNLINK", "Remove a name.";
    Rmdir = 11, "RMDIR", "Remove a directory.";
    Rename(RenameIn) = 12, "RENAME", "Rename without flags.";
    Link(LinkIn) = 13, "LINK", "Make a hard link.";
    Open(OpenIn) = 14, "OPEN", "Open a file.";
    Read(ReadIn) = 15, "READ", "Read from an open file.";
    Write(WriteIn) = 16, "WRITE", "Write to an open file.";
    Statfs = 17, "STATFS", "Statistics of the file system.";
    Release(ReleaseIn) = 18, "RELEASE", "The last reference to an open file is gone.";
    Fsync(FsyncIn) = 20, "FSYNC", "Make a file durable.";
    Setxattr(SetxattrIn) = 21, "SETXATTR", "Set an extended attribute.";
    Getxattr(GetxattrIn) = 22, "GETXATTR", "Read an extended attribute.";
    Listxattr(GetxattrIn) = 23, "LISTXATTR", "List extended attributes' names.";
    Removexattr = 24, "REMOVEXATTR", "Remove an extended attribute.";
    Flush(FlushIn) = 25, "FLUSH", "A descriptor of an open file was closed.";
    Init(InitIn) = 26, "INIT", "Negotiate version and features; the first request.";
    Opendir(OpenIn) = 27, "OPENDIR", "Open a directory.";
    Readdir(ReadIn) = 28, "READDIR", "Read directory entries.";
    Releasedir(ReleaseIn) = 29, "RELEASEDIR", "The last reference to an open directory is gone.";
    Fsyncdir(FsyncIn) = 30, "FSYNCDIR", "Make a directory durable.";
    Getlk(LkIn) = 31, "GETLK", "Test for a lock.";
    Setlk(LkIn) = 32, "SETLK", "Take or drop a lock, without waiting.";
    Setlkw(LkIn) = 33, "SETLKW", "Take or drop a lock, waiting for it.";
    Access(AccessIn) = 34, "ACCESS", "Check permission.";
    Create(CreateIn) = 35, "CREATE", "Make a file and open it.";
    Interrupt(InterruptIn) = 36, "INTERRUPT", "The caller of a pending request was interrupted.";
    Bmap(BmapIn) = 37, "BMAP", "Map a file's block to the device's.";
    Destroy = 38, "DESTROY", "The file system is being unmounted.";
    Ioctl(IoctlIn) = 39, "IOCTL", "An ioctl on an open file.";
    Poll(PollIn) = 40, "POLL", "Test for readiness.";
    NotifyReply(NotifyRetrieveIn) = 41, "NOTIFY_REPLY", "The kernel's answer to a retrieve notification.";
    BatchForget(BatchForgetIn) = 42, "BATCH_FORGET", "Drop references to several inodes; has no reply.";
    Fallocate(FallocateIn) = 43, "FALLOCATE", "Allocate or punch a range.";
    Readdirplus(ReadIn) = 44, "READDIRPLUS", "Read directory entries with their attributes.";
    Rename2(Rename2In) = 45, "RENAME2", "Rename with flags.";
    Lseek(LseekIn) = 46, "LSEEK", "Find data or a hole.";
    CopyFileRange(CopyFileRangeIn) = 47, "COPY_FILE_RANGE", "Copy between files; replies with [`WriteOut`].";
    Syncfs(SyncfsIn) = 50, "SYNCFS", "Make the file system durable (7.34).";
    Tmpfile(CreateIn) = 51, "TMPFILE", "Make and open a file without a name (7.37).";
    Statx(StatxIn) = 52, "STATX", "Read extended attributes of an inode (7.39).";
    CopyFileRange64(CopyFileRangeIn) = 53, "COPY_FILE_RANGE_64",
        "Copy between files; replies with [`CopyFileRangeOut`] (7.45).";
}

bitflags! {
    /// Features of INIT: `flags` in bits 0 to 31, `flags2` in bits 32 to 63.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct InitFlags: u64 {
        /// Asynchronous read requests.
        const ASYNC_READ = 1 << 0;
        /// POSIX locks are sent to the file system.
        const POSIX_LOCKS = 1 << 1;
        /// The kernel sends a handle for fstat and the like (not used).
        const FILE_OPS = 1 << 2;
        /// The file system handles `O_TRUNC` of open.
        const ATOMIC_O_TRUNC = 1 << 3;
        /// The file system handles lookups of "." and "..".
        const EXPORT_SUPPORT = 1 << 4;
        /// Writes may be larger than 4 KiB.
        const BIG_WRITES = 1 << 5;
        /// The umask is not applied by the kernel.
        const DONT_MASK = 1 << 6;
        /// The device can be spliced to.
        const SPLICE_WRITE = 1 << 7;
        /// Pages can be moved when splicing.
        const SPLICE_MOVE = 1 << 8;
        /// The device can be spliced from.
        const SPLICE_READ = 1 << 9;
        /// BSD locks are sent to the file system.
        const FLOCK_LOCKS = 1 << 10;
        /// ioctl on directories.
        const HAS_IOCTL_DIR = 1 << 11;
        /// Cached pages are dropped when the modification time changes.
        const AUTO_INVAL_DATA = 1 << 12;
        /// READDIRPLUS is used.
        const DO_READDIRPLUS = 1 << 13;
        /// READDIRPLUS is used where it seems to help.
        const READDIRPLUS_AUTO = 1 << 14;
        /// Asynchronous direct I/O.
        const ASYNC_DIO = 1 << 15;
        /// Buffered writes are cached and written back later.
        const WRITEBACK_CACHE = 1 << 16;
        /// ENOSYS as the answer to OPEN means that opens need no request.
        const NO_OPEN_SUPPORT = 1 << 17;
        /// Lookups and reads of one directory may run in parallel.
        const PARALLEL_DIROPS = 1 << 18;
        /// The file system clears suid, sgid and capabilities on write, chown and truncate.
        const HANDLE_KILLPRIV = 1 << 19;
        /// POSIX access control lists.
        const POSIX_ACL = 1 << 20;
        /// Reading the device after an abort gives ECONNABORTED.
        const ABORT_ERROR = 1 << 21;
        /// [`InitOut::max_pages`] is valid.
        const MAX_PAGES = 1 << 22;
        /// Symbolic links' targets are cached.
        const CACHE_SYMLINKS = 1 << 23;
        /// ENOSYS as the answer to OPENDIR means that opens of directories need no request.
        const NO_OPENDIR_SUPPORT = 1 << 24;
        /// Cached pages are dropped only on request.
        const EXPLICIT_INVAL_DATA = 1 << 25;
        /// [`InitOut::map_alignment`] is valid.
        const MAP_ALIGNMENT = 1 << 26;
        /// Submounts are made from a flag of the attributes.
        const SUBMOUNTS = 1 << 27;
        /// As `HANDLE_KILLPRIV`, but only where the caller lacks CAP_FSETID.
        const HANDLE_KILLPRIV_V2 = 1 << 28;
        /// SETXATTR carries the whole [`SetxattrIn`].
        const SETXATTR_EXT = 1 << 29;
        /// INIT carries `flags2`.
        const INIT_EXT = 1 << 30;
        /// Reserved; never set.
        const INIT_RESERVED = 1 << 31;
        /// Create, mkdir, symlink and mknod carry security contexts.
        const SECURITY_CTX = 1 << 32;
        /// DAX per inode.
        const HAS_INODE_DAX = 1 << 33;
        /// Requests that create carry one supplementary group, that of the parent directory.
        const CREATE_SUPP_GROUP = 1 << 34;
        /// [`EXPIRE_ONLY`] is known.
        const HAS_EXPIRE_ONLY = 1 << 35;
        /// Shared mappings are allowed with [`OpenFlags::DIRECT_IO`].
        const DIRECT_IO_ALLOW_MMAP = 1 << 36;
        /// Reads and writes may pass through to a backing file.
        const PASSTHROUGH = 1 << 37;
        /// No lookup by node id; handles to files end with the mount.
        const NO_EXPORT_SUPPORT = 1 << 38;
        /// Pending requests can be sent again.
        const HAS_RESEND = 1 << 39;
        /// Idmapped mounts.
        const ALLOW_IDMAP = 1 << 40;
        /// Requests over io_uring.
        const OVER_IO_URING = 1 << 41;
        /// [`InitOut::request_timeout`] is valid.
        const REQUEST_TIMEOUT = 1 << 42;
    }

    /// How an open file is treated (`FOPEN_*`, of [`OpenOut::open_flags`]).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct OpenFlags: u32 {
        /// Bypass the page cache.
        const DIRECT_IO = 1 << 0;
        /// Keep what the page cache holds.
        const KEEP_CACHE = 1 << 1;
        /// The file cannot seek.
        const NONSEEKABLE = 1 << 2;
        /// The directory may be cached.
        const CACHE_DIR = 1 << 3;
        /// The file has no position.
        const STREAM = 1 << 4;
        /// No FLUSH on close.
        const NOFLUSH = 1 << 5;
        /// Direct writes to one inode may run in parallel.
        const PARALLEL_DIRECT_WRITES = 1 << 6;
        /// Reads and writes go to the backing file.
        const PASSTHROUGH = 1 << 7;
    }

    /// The valid fields of [`SetattrIn`] (`FATTR_*`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct SetattrValid: u32 {
        /// `mode`.
        const MODE = 1 << 0;
        /// `uid`.
        const UID = 1 << 1;
        /// `gid`.
        const GID = 1 << 2;
        /// `size`.
        const SIZE = 1 << 3;
        /// `atime` and `atimensec`.
        const ATIME = 1 << 4;
        /// `mtime` and `mtimensec`.
        const MTIME = 1 << 5;
        /// `fh`.
        const FH = 1 << 6;
        /// The access time is set to now.
        const ATIME_NOW = 1 << 7;
        /// The modification time is set to now.
        const MTIME_NOW = 1 << 8;
        /// `lock_owner`.
        const LOCKOWNER = 1 << 9;
        /// `ctime` and `ctimensec`.
        const CTIME = 1 << 10;
        /// Clear suid and sgid.
        const KILL_SUIDGID = 1 << 11;
    }

    /// Of [`WriteIn::write_flags`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct WriteFlags: u32 {
        /// A delayed write from the page cache; the handle is a guess.
        const CACHE = 1 << 0;
        /// `lock_owner` is valid.
        const LOCKOWNER = 1 << 1;
        /// Clear suid and sgid.
        const KILL_SUIDGID = 1 << 2;
        /// The store is to keep nothing of it cached (RWF_DONTCACHE). Not the kernel's: only
        /// between uvfs's own client and server.
        const DONTCACHE = 1 << 31;
    }

    /// Of [`ReadIn::read_flags`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ReadFlags: u32 {
        /// `lock_owner` is valid.
        const LOCKOWNER = 1 << 1;
        /// As [`WriteFlags::DONTCACHE`].
        const DONTCACHE = 1 << 31;
    }

    /// Of [`ReleaseIn::release_flags`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ReleaseFlags: u32 {
        /// Flush first.
        const FLUSH = 1 << 0;
        /// Drop the file's BSD lock.
        const FLOCK_UNLOCK = 1 << 1;
    }

    /// Of [`GetattrIn::getattr_flags`] and [`StatxIn::getattr_flags`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct GetattrFlags: u32 {
        /// `fh` is valid.
        const FH = 1 << 0;
    }

    /// Of [`LkIn::lk_flags`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct LkFlags: u32 {
        /// A BSD lock.
        const FLOCK = 1 << 0;
    }

    /// Of [`PollIn::flags`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct PollFlags: u32 {
        /// Send a poll notification when the file is ready.
        const SCHEDULE_NOTIFY = 1 << 0;
    }

    /// Of [`SetxattrIn::setxattr_flags`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct SetxattrFlags: u32 {
        /// Clear sgid, as `system.posix_acl_access` is set.
        const ACL_KILL_SGID = 1 << 0;
    }
}

impl InitFlags {
    /// Joins the two words of INIT.
    pub const fn from_words(flags: u32, flags2: u32) -> Self {
        Self::from_bits_retain(flags as u64 | (flags2 as u64) << 32)
    }

    /// The two words of INIT: `(flags, flags2)`.
    pub const fn words(self) -> (u32, u32) {
        (self.bits() as u32, (self.bits() >> 32) as u32)
    }
}

macro_rules! wire {
    ($($(#[$meta:meta])* $name:ident, $size:literal {
        $($(#[$field_meta:meta])* $field:ident: $ty:ty,)*
    })*) => {
        $(
            $(#[$meta])*
            #[derive(
                Clone, Copy, Debug, Default, PartialEq, Eq,
                FromBytes, IntoBytes, Immutable, KnownLayout,
            )]
            #[repr(C)]
            #[allow(missing_docs, reason = "the fields are the kernel's")]
            pub struct $name {
                $($(#[$field_meta])* pub $field: $ty,)*
            }

            const _: () = assert!(size_of::<$name>() == $size);
        )*
    };
}
pub(crate) use wire;

wire! {
    /// Attributes of an inode.
    Attr, 88 {
        ino: u64,
        /// Bytes.
        size: u64,
        /// Units of 512 bytes.
        blocks: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        nlink: u32,
        uid: u32,
        gid: u32,
        rdev: u32,
        blksize: u32,
        flags: u32,
    }

    /// A time of [`Statx`].
    SxTime, 16 { tv_sec: i64, tv_nsec: u32, __reserved: i32, }

    /// Attributes of an inode as statx(2) has them.
    Statx, 256 {
        /// The valid fields (`STATX_*`).
        mask: u32,
        blksize: u32,
        attributes: u64,
        nlink: u32,
        uid: u32,
        gid: u32,
        mode: u16,
        __spare0: [u16; 1],
        ino: u64,
        size: u64,
        blocks: u64,
        attributes_mask: u64,
        atime: SxTime,
        btime: SxTime,
        ctime: SxTime,
        mtime: SxTime,
        rdev_major: u32,
        rdev_minor: u32,
        dev_major: u32,
        dev_minor: u32,
        __spare2: [u64; 14],
    }

    /// Statistics of a file system.
    Kstatfs, 80 {
        blocks: u64,
        bfree: u64,
        bavail: u64,
        files: u64,
        ffree: u64,
        bsize: u32,
        namelen: u32,
        frsize: u32,
        padding: u32,
        spare: [u32; 6],
    }

    /// A lock; `end` is the last byte locked, `type` one of `F_RDLCK`, `F_WRLCK`, `F_UNLCK`.
    FileLock, 24 { start: u64, end: u64, r#type: u32, pid: u32, }

    /// Reply to the requests that find or make an inode.
    EntryOut, 128 {
        nodeid: u64,
        /// `nodeid` and `generation` together are unique for the file system's life.
        generation: u64,
        /// Seconds for which the name may be cached.
        entry_valid: u64,
        /// Seconds for which the attributes may be cached.
        attr_valid: u64,
        entry_valid_nsec: u32,
        attr_valid_nsec: u32,
        attr: Attr,
    }

    /// FORGET.
    ForgetIn, 8 { nlookup: u64, }

    /// One inode of BATCH_FORGET.
    ForgetOne, 16 { nodeid: u64, nlookup: u64, }

    /// BATCH_FORGET; `count` times [`ForgetOne`] follow.
    BatchForgetIn, 8 { count: u32, dummy: u32, }

    /// GETATTR.
    GetattrIn, 16 {
        /// [`GetattrFlags`].
        getattr_flags: u32,
        dummy: u32,
        fh: u64,
    }

    /// Reply to GETATTR and SETATTR.
    AttrOut, 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr, }

    /// STATX.
    StatxIn, 24 {
        /// [`GetattrFlags`].
        getattr_flags: u32,
        reserved: u32,
        fh: u64,
        sx_flags: u32,
        sx_mask: u32,
    }

    /// Reply to STATX.
    StatxOut, 288 {
        attr_valid: u64,
        attr_valid_nsec: u32,
        flags: u32,
        spare: [u64; 2],
        stat: Statx,
    }

    /// MKNOD; the name follows.
    MknodIn, 16 { mode: u32, rdev: u32, umask: u32, padding: u32, }

    /// MKDIR; the name follows.
    MkdirIn, 8 { mode: u32, umask: u32, }

    /// RENAME; the old name and the new follow.
    RenameIn, 8 { newdir: u64, }

    /// RENAME2; the old name and the new follow.
    Rename2In, 16 { newdir: u64, flags: u32, padding: u32, }

    /// LINK; the new name follows.
    LinkIn, 8 { oldnodeid: u64, }

    /// SETATTR.
    SetattrIn, 88 {
        /// [`SetattrValid`].
        valid: u32,
        padding: u32,
        fh: u64,
        size: u64,
        lock_owner: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        unused4: u32,
        uid: u32,
        gid: u32,
        unused5: u32,
    }

    /// OPEN and OPENDIR.
    OpenIn, 8 {
        /// Flags of open(2).
        flags: u32,
        open_flags: u32,
    }

    /// CREATE and TMPFILE; the name follows.
    CreateIn, 16 { flags: u32, mode: u32, umask: u32, open_flags: u32, }

    /// Reply to OPEN and OPENDIR, and second part of that to CREATE and TMPFILE.
    OpenOut, 16 {
        fh: u64,
        /// [`OpenFlags`].
        open_flags: u32,
        backing_id: i32,
    }

    /// RELEASE and RELEASEDIR.
    ReleaseIn, 24 {
        fh: u64,
        flags: u32,
        /// [`ReleaseFlags`].
        release_flags: u32,
        lock_owner: u64,
    }

    /// FLUSH.
    FlushIn, 24 { fh: u64, unused: u32, padding: u32, lock_owner: u64, }

    /// READ, READDIR and READDIRPLUS.
    ReadIn, 40 {
        fh: u64,
        offset: u64,
        size: u32,
        /// [`ReadFlags`].
        read_flags: u32,
        lock_owner: u64,
        flags: u32,
        padding: u32,
    }

    /// WRITE; `size` bytes follow.
    WriteIn, 40 {
        fh: u64,
        offset: u64,
        size: u32,
        /// [`WriteFlags`].
        write_flags: u32,
        lock_owner: u64,
        flags: u32,
        padding: u32,
    }

    /// Reply to WRITE and COPY_FILE_RANGE.
    WriteOut, 8 { size: u32, padding: u32, }

    /// Reply to STATFS.
    StatfsOut, 80 { st: Kstatfs, }

    /// FSYNC and FSYNCDIR.
    FsyncIn, 16 { fh: u64, fsync_flags: u32, padding: u32, }

    /// SETXATTR; the name and `size` bytes of value follow. Without
    /// [`InitFlags::SETXATTR_EXT`] the wire has the first 8 bytes only.
    SetxattrIn, 16 {
        size: u32,
        flags: u32,
        /// [`SetxattrFlags`].
        setxattr_flags: u32,
        padding: u32,
    }

    /// GETXATTR (the name follows) and LISTXATTR; a size of 0 asks for the length.
    GetxattrIn, 8 { size: u32, padding: u32, }

    /// Reply to GETXATTR and LISTXATTR with a size of 0.
    GetxattrOut, 8 { size: u32, padding: u32, }

    /// GETLK, SETLK and SETLKW.
    LkIn, 48 {
        fh: u64,
        owner: u64,
        lk: FileLock,
        /// [`LkFlags`].
        lk_flags: u32,
        padding: u32,
    }

    /// Reply to GETLK.
    LkOut, 24 { lk: FileLock, }

    /// ACCESS.
    AccessIn, 8 { mask: u32, padding: u32, }

    /// INIT.
    InitIn, 64 {
        major: u32,
        minor: u32,
        max_readahead: u32,
        /// Low half of [`InitFlags`].
        flags: u32,
        /// High half of [`InitFlags`].
        flags2: u32,
        unused: [u32; 11],
    }

    /// Reply to INIT.
    InitOut, 64 {
        major: u32,
        minor: u32,
        max_readahead: u32,
        /// Low half of [`InitFlags`].
        flags: u32,
        max_background: u16,
        congestion_threshold: u16,
        max_write: u32,
        /// Granularity of timestamps, in ns.
        time_gran: u32,
        max_pages: u16,
        map_alignment: u16,
        /// High half of [`InitFlags`].
        flags2: u32,
        max_stack_depth: u32,
        /// Seconds after which an unanswered request aborts the connection.
        request_timeout: u16,
        unused: [u16; 11],
    }

    /// INTERRUPT; `unique` is that of the request to interrupt.
    InterruptIn, 8 { unique: u64, }

    /// BMAP.
    BmapIn, 16 { block: u64, blocksize: u32, padding: u32, }

    /// Reply to BMAP.
    BmapOut, 8 { block: u64, }

    /// IOCTL; `in_size` bytes follow.
    IoctlIn, 32 {
        fh: u64,
        flags: u32,
        cmd: u32,
        arg: u64,
        in_size: u32,
        out_size: u32,
    }

    /// Reply to IOCTL; data follow.
    IoctlOut, 16 {
        result: i32,
        flags: u32,
        in_iovs: u32,
        out_iovs: u32,
    }

    /// POLL.
    PollIn, 24 {
        fh: u64,
        /// Names this poll in [`NotifyPollWakeupOut`].
        kh: u64,
        /// [`PollFlags`].
        flags: u32,
        events: u32,
    }

    /// Reply to POLL.
    PollOut, 8 { revents: u32, padding: u32, }

    /// FALLOCATE.
    FallocateIn, 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32, }

    /// Starts every request.
    InHeader, 40 {
        /// Bytes of the whole request, this header included.
        len: u32,
        /// [`Opcode`].
        opcode: u32,
        unique: u64,
        nodeid: u64,
        uid: u32,
        gid: u32,
        pid: u32,
        /// Length of the extensions at the request's end, in units of 8 bytes (7.38).
        total_extlen: u16,
        padding: u16,
    }

    /// Starts every reply (`error` is 0 or a negative errno) and every notification (`unique`
    /// is 0 and `error` the notification's code).
    OutHeader, 16 {
        /// Bytes of the whole reply, this header included.
        len: u32,
        error: i32,
        unique: u64,
    }

    /// A directory entry; `namelen` bytes of name follow, then padding to 8 bytes.
    Dirent, 24 {
        ino: u64,
        /// Where reading goes on after this entry.
        off: u64,
        namelen: u32,
        /// File type: bits 12 to 15 of the mode, shifted down (`DT_*`).
        r#type: u32,
    }

    /// A directory entry of READDIRPLUS.
    Direntplus, 152 { entry_out: EntryOut, dirent: Dirent, }

    /// LSEEK.
    LseekIn, 24 { fh: u64, offset: u64, whence: u32, padding: u32, }

    /// Reply to LSEEK.
    LseekOut, 8 { offset: u64, }

    /// COPY_FILE_RANGE and COPY_FILE_RANGE_64.
    CopyFileRangeIn, 56 {
        fh_in: u64,
        off_in: u64,
        nodeid_out: u64,
        fh_out: u64,
        off_out: u64,
        len: u64,
        flags: u64,
    }

    /// Reply to COPY_FILE_RANGE_64.
    CopyFileRangeOut, 8 { bytes_copied: u64, }

    /// SYNCFS.
    SyncfsIn, 8 { padding: u64, }

    /// Starts an extension; `size` counts this header.
    ExtHeader, 8 { size: u32, r#type: u32, }

    /// Supplementary groups; `nr_groups` times `u32` follow.
    SuppGroups, 4 { nr_groups: u32, }

    /// A backing file for [`DEV_IOC_BACKING_OPEN`].
    BackingMap, 16 { fd: i32, flags: u32, padding: u64, }

    /// Last part of a FUSE-over-io_uring entry's header.
    UringEntInOut, 32 {
        flags: u64,
        /// To be given back in [`UringCmdReq::commit_id`].
        commit_id: u64,
        /// Bytes used of the payload buffer.
        payload_sz: u32,
        padding: u32,
        reserved: u64,
    }

    /// In the command area of a FUSE-over-io_uring submission.
    UringCmdReq, 24 { flags: u64, commit_id: u64, qid: u16, padding: [u8; 6], }

    /// Notification: a polled file is ready.
    NotifyPollWakeupOut, 8 { kh: u64, }

    /// Notification: drop cached attributes and, if `off` is not negative, pages.
    NotifyInvalInodeOut, 24 { ino: u64, off: i64, len: i64, }

    /// Notification: drop a name; it follows, with NUL (not counted in `namelen`).
    NotifyInvalEntryOut, 16 {
        parent: u64,
        namelen: u32,
        /// 0 or [`EXPIRE_ONLY`].
        flags: u32,
    }

    /// Notification: a name was removed; it follows, with NUL (not counted in `namelen`).
    NotifyDeleteOut, 24 { parent: u64, child: u64, namelen: u32, padding: u32, }

    /// Notification: put the `size` bytes that follow into the page cache.
    NotifyStoreOut, 24 { nodeid: u64, offset: u64, size: u32, padding: u32, }

    /// Notification: send what the page cache holds, in a NOTIFY_REPLY with `notify_unique`.
    NotifyRetrieveOut, 32 {
        notify_unique: u64,
        nodeid: u64,
        offset: u64,
        size: u32,
        padding: u32,
    }

    /// NOTIFY_REPLY; `size` bytes follow. Laid out like [`WriteIn`].
    NotifyRetrieveIn, 40 {
        dummy1: u64,
        offset: u64,
        size: u32,
        dummy2: u32,
        dummy3: u64,
        dummy4: u64,
    }

    /// Notification: drop unused inodes; `count` node ids (`u64`) follow (7.45).
    NotifyPruneOut, 16 { count: u32, padding: u32, spare: u64, }
}

/// Header of a FUSE-over-io_uring entry: its first buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct UringReqHeader {
    /// [`InHeader`] when fetched, [`OutHeader`] when committed.
    pub in_out: [u8; URING_IN_OUT_HEADER_SZ],
    /// The request's structure.
    pub op_in: [u8; URING_OP_IN_OUT_SZ],
    /// Length of the payload, and the id to commit with.
    pub ring_ent_in_out: UringEntInOut,
}

const _: () = assert!(size_of::<UringReqHeader>() == 288);

impl Default for UringReqHeader {
    fn default() -> Self {
        Self::new_zeroed()
    }
}

impl InitIn {
    /// Both words of flags; the high one counts only with [`InitFlags::INIT_EXT`].
    pub const fn init_flags(&self) -> InitFlags {
        let low = InitFlags::from_words(self.flags, 0);
        if low.contains(InitFlags::INIT_EXT) {
            InitFlags::from_words(self.flags, self.flags2)
        } else {
            low
        }
    }
}

/// The kinds of notifications (`enum fuse_notify_code`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum NotifyCode {
    /// A polled file is ready.
    Poll = 1,
    /// Drop cached attributes and pages.
    InvalInode = 2,
    /// Drop a name.
    InvalEntry = 3,
    /// Put data into the page cache.
    Store = 4,
    /// Send what the page cache holds.
    Retrieve = 5,
    /// A name was removed.
    Delete = 6,
    /// Send all pending requests again (7.40).
    Resend = 7,
    /// Every cached name is stale (7.44).
    IncEpoch = 8,
    /// Drop unused inodes (7.45).
    Prune = 9,
}

impl SxTime {
    /// A time since 1970.
    pub fn new(tv_sec: i64, tv_nsec: u32) -> Self {
        Self {
            tv_sec,
            tv_nsec,
            ..Self::default()
        }
    }
}

/// Device numbers as the kernel encodes them in 32 bits (`new_encode_dev`).
pub fn encode_dev(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & !0xff) << 12)
}

/// The reverse (`new_decode_dev`).
pub fn decode_dev(dev: u32) -> (u32, u32) {
    ((dev >> 8) & 0xfff, (dev & 0xff) | ((dev >> 12) & 0xfff00))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Device files show, and are made with, the right device numbers.
    #[test]
    fn device_numbers_survive_their_encoding() {
        for (major, minor) in [(0, 0), (1, 3), (8, 255), (259, 70_000), (0xfff, 0xf_ffff)] {
            assert_eq!(decode_dev(encode_dev(major, minor)), (major, minor));
        }
        assert_eq!(encode_dev(1, 3), 0x103);
    }

    /// Each opcode is found by its number, and an unknown number is an error.
    #[test]
    fn opcodes_are_their_numbers() {
        for &op in Opcode::ALL {
            assert_eq!(Opcode::try_from(op as u32), Ok(op));
        }
        assert!(Opcode::ALL.is_sorted());
        assert_eq!(Opcode::CopyFileRange64.name(), "COPY_FILE_RANGE_64");
        assert_eq!(Opcode::try_from(7), Err(UnknownOpcode(7)));
    }

    /// Capabilities of newer kernels survive the negotiation.
    #[test]
    fn init_flags_keep_unknown_bits() {
        let flags = InitFlags::from_words(1 << 30, 0x8000_0200);
        assert!(flags.contains(InitFlags::INIT_EXT | InitFlags::OVER_IO_URING));
        assert_eq!(flags.words(), (1 << 30, 0x8000_0200));
    }
}
