//! How a directory is served, and what can go wrong when that begins.

use rustix::io::Errno;
use rustix::mount::MountFlags;
use std::path::PathBuf;
use std::time::Duration;

/// How a directory is served.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kernel caches writes and writes back later (FUSE_WRITEBACK_CACHE). Programs of the host
    /// then see writes late. Off where `passthrough` is [`Backed::All`].
    pub writeback: bool,
    /// Rules of the mount, as in mount(2), that the server sees to: with RDONLY everything that changes
    /// something fails with EROFS; by NOATIME, NODIRATIME and STRICTATIME reading moves access times, and
    /// without them as the host has it. See [`Passthrough::remounted`](super::Passthrough::remounted).
    pub rules: MountFlags,
    /// Locks are shared with programs of the host. Otherwise the kernel keeps those of the mount.
    pub host_locks: bool,
    /// Stays on the file system of the source: directories that others are mounted on show as they
    /// are below the mount, or fail with EXDEV where the server may not look there.
    pub xdev: bool,
    /// Leaves nothing of the data in the host's page cache (RWF_DONTCACHE, Linux 6.14), where the
    /// file system can do so.
    pub uncached: bool,
    /// Reads and writes bypass the kernel's page cache of the mount.
    pub direct_io: bool,
    /// The opens that get a backing file, so that reads and writes go from the kernel straight to the
    /// host's file (FUSE passthrough, Linux 6.9), where the kernel allows it.
    pub passthrough: Backed,
    /// When what the kernel has cached of a file's data stays cached as the file is opened again.
    pub keep_cache: KeepCache,
    /// The kernel caches listings of a directory for as long as it is open.
    pub cache_readdir: bool,
    /// The kernel of the mount checks permissions, and so has to know access control lists. Not
    /// needed where only one user has access, whom the host checks.
    pub checks_permissions: bool,
    /// Where the server sees what the host changes (fanotify, which takes CAP_SYS_ADMIN, on ext2 to
    /// ext4, XFS and tmpfs), names, missing names, attributes, data and listings are cached until
    /// they change. Not with `writeback`.
    pub watch: bool,
    /// How long attributes may be cached elsewhere.
    pub attr_ttl: Duration,
    /// How long names may be cached elsewhere.
    pub entry_ttl: Duration,
    /// How long it may be cached elsewhere that there is no such name.
    pub negative_ttl: Duration,
}

/// The kernel's opens that get the host's file as their backing file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backed {
    /// None.
    Off,
    /// Opens for reading and writing, and opens for reading only of large files (neither with
    /// `direct_io`); and opens with O_DIRECT for reading only or of files in memory. Not those with O_APPEND: when a program switches O_DIRECT or O_APPEND off,
    /// as dd(1) does for the end of a file, the kernel (6.18) goes on with the flags of the open, and
    /// most hosts then refuse what is not aligned.
    ///
    /// Opens for writing only begin without a backing file. Most of them make a small file, which a
    /// backing file would cost more than its few WRITEs.
    #[default]
    Auto,
    /// Opens with O_DIRECT, and with them, as for [`Backed::Auto`], all others of the same file at the
    /// same time. Neither with `writeback`, which the kernel doesn't combine with it, nor with
    /// `uncached`, which it doesn't see to.
    Direct,
    /// All.
    All,
}

/// Whether cached data outlives the last close of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeepCache {
    /// It does not.
    Never,
    /// While the file did not change, by its size and modification time.
    #[default]
    Unchanged,
    /// It does, for sources that only change through the mount: nothing is dropped because
    /// attributes changed.
    Always,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            writeback: false,
            rules: MountFlags::empty(),
            host_locks: false,
            xdev: false,
            uncached: false,
            direct_io: false,
            passthrough: Backed::default(),
            keep_cache: KeepCache::Unchanged,
            cache_readdir: false,
            checks_permissions: true,
            watch: true,
            attr_ttl: Duration::from_secs(1),
            entry_ttl: Duration::from_secs(1),
            negative_ttl: Duration::ZERO,
        }
    }
}

/// Why a directory can't be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The source can't be opened.
    #[error("cannot open the source directory {}: {errno}", .path.display())]
    Open {
        /// The source.
        path: PathBuf,
        /// The error of open(2).
        errno: Errno,
    },
    /// The source can't be read.
    #[error("cannot read the source directory: {0}")]
    Read(Errno),
    /// There is no /proc, which descriptors are opened again through.
    #[error("/proc is not mounted ({0}); mount it: mount -t proc proc /proc")]
    NoProc(Errno),
}
