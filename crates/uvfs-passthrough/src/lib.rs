//! A file system that passes every request to a directory of the host.
//!
//! [`Passthrough`] serves what is below a source directory with everything that the host's file system gives. Its
//! handlers (`serve.rs`) are thin over the `*at()` system calls, relative to a descriptor of the node and with names
//! of one component, so that no name leads out of the source.

mod apart;
mod creds;
mod dir;
mod handle;
mod identity;
mod inode;
mod io;
mod lock;
mod meta;
mod mount;
mod mounted;
mod namespace;
mod open_file;
mod options;
mod owners;
mod rules;
mod serve;
mod slots;
mod survive;
mod sys;
mod watch;
mod watcher;
mod writers;
mod xattr;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::process::Resource;
use uvfs_server::fs::SessionHandle;

use crate::apart::Apart;
use crate::creds::Creds;
use crate::dir::OpenDir;
use crate::inode::{Crowd, Inodes, Mounts, PathFds, Removed};
use crate::mounted::Mounted;
use crate::open_file::OpenFile;
use crate::rules::Rules;
use crate::slots::Table;
use crate::sys::Result;
use crate::watcher::Watcher;
pub use crate::watcher::can_watch;
use crate::writers::Writers;
pub use options::{Backed, Error, KeepCache, Options};

/// Most O_PATH descriptors kept open for inodes that are known by handle.
const MAX_PATH_FDS: u64 = 1024;
/// Most descriptors kept of removed files that the kernel still knows.
const MAX_REMOVED: u64 = 1024;

/// A directory of the host, served.
///
/// ```no_run
/// use uvfs_passthrough::{Options, Passthrough};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let fs = Passthrough::open("/srv/data", Options::default())?;
/// uvfs_server::mount(fs, "/mnt/data", uvfs_server::Options::named("/srv/data"))?.wait();
/// # Ok(())
/// # }
/// ```
pub struct Passthrough(Arc<Source>);

/// The state that handlers use. Threads of a mount's own may call them (`apart.rs`).
pub(crate) struct Source {
    options: Options,
    creds: Creds,
    rules: Rules,
    /// The source, for reading.
    root: Arc<OwnedFd>,
    mounts: Arc<Mounts>,
    inodes: Arc<Inodes>,
    path_fds: PathFds,
    removed: Removed,
    crowd: Arc<Crowd>,
    files: Table<OpenFile>,
    dirs: Table<OpenDir>,
    /// Set by `init`.
    session: OnceLock<Arc<dyn SessionHandle>>,
    /// The kernel agreed to backing files.
    passes_through: AtomicBool,
    /// The kernel takes no backing files from this server, so no more are registered.
    backing_refused: AtomicBool,
    writers: Writers,
    caches_writes: AtomicBool,
    /// The kernel lists directories without opening them.
    lists_unopened: AtomicBool,
    /// Told when all nodes that an earlier server left are restored.
    restored: OnceLock<Sender<()>>,
    apart: Apart,
}

impl Passthrough {
    /// Of the directory at `path`.
    ///
    /// # Errors
    /// When it is not a directory that can be read, or /proc is missing.
    pub fn open(path: impl AsRef<Path>, options: Options) -> std::result::Result<Self, Error> {
        let path = path.as_ref();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let source = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| Error::Open {
            path: path.to_owned(),
            errno,
        })?;
        Self::new(source, options)
    }

    /// Of the directory that `source` is a descriptor of, O_PATH or for reading.
    ///
    /// # Errors
    /// When it is not a directory that can be read, or /proc is missing.
    pub fn new(source: OwnedFd, options: Options) -> std::result::Result<Self, Error> {
        let source = match options.xdev {
            true => mount::alone(source.as_fd()).unwrap_or(source),
            false => source,
        };
        Self::again(source, options)
    }

    /// Of the directory that [`root`](Self::root) was a descriptor of in an earlier program of this process, which has kept
    /// the mount ([`survive`](uvfs_server::survive)).
    ///
    /// # Errors
    /// As [`Passthrough::new`].
    pub fn again(source: OwnedFd, options: Options) -> std::result::Result<Self, Error> {
        let read = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(&source, c".", read, Mode::empty()).map_err(Error::Read)?;
        sys::reopen(root.as_fd(), OFlags::PATH).map_err(Error::NoProc)?;
        let path = rustix::fs::openat(&root, c".", read | OFlags::PATH, Mode::empty())
            .map_err(Error::Read)?;
        let mounts = Mounts::default();
        let inode = inode::root(path, &mounts).map_err(Error::Read)?;
        let limit = rustix::process::getrlimit(Resource::Nofile)
            .current
            .unwrap_or(u64::MAX);
        let path_fds = (limit / 4).clamp(16, MAX_PATH_FDS) as usize;
        Ok(Self(Arc::new(Source {
            rules: Rules::new(options.rules),
            creds: Creds::new(options.checks_permissions),
            options,
            root: Arc::new(root),
            mounts: Arc::new(mounts),
            inodes: Arc::new(Inodes::new(inode)),
            path_fds: PathFds::new(path_fds),
            crowd: Crowd::new(limit),
            removed: Removed::new((limit / 8).clamp(16, MAX_REMOVED) as usize),
            files: Table::default(),
            dirs: Table::default(),
            session: OnceLock::new(),
            passes_through: AtomicBool::new(false),
            backing_refused: AtomicBool::new(false),
            writers: Writers::default(),
            caches_writes: AtomicBool::new(false),
            lists_unopened: AtomicBool::new(false),
            restored: OnceLock::new(),
            apart: Apart::new(),
        })))
    }

    /// The directory that is served.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.0.root.as_fd()
    }

    /// Says which of the rules in [`Options::rules`] hold from now on.
    pub fn remounted(&self, rules: MountFlags) {
        self.0.rules.set(rules);
        for mount in self.0.mounts.all() {
            mount.follow(rules);
        }
    }

    /// How many inodes the kernel knows, the root not counted.
    pub fn known_inodes(&self) -> usize {
        self.0.inodes.len()
    }
}

impl Source {
    /// Begins to watch for what the host changes, or says why not. `minor` is the kernel's version of
    /// the protocol.
    fn watch_host(&self, minor: u32) -> std::result::Result<Arc<Watcher>, String> {
        let session = self.session.get().ok_or("there is no session")?;
        if !self.options.watch {
            return Err("the mount's options say for how long to cache".into());
        }
        if self.options.writeback {
            return Err("the kernel caches writes (writeback)".into());
        }
        let known = self.inodes.clone();
        let size = move |node| known.get(node).ok()?.size_now();
        if !session.host_is_watched(Box::new(size)) {
            return Err("there is no mount".into());
        }
        let watcher = Watcher::new(&self.inodes.root().mount, minor, &**session)?;
        let mounted = Mounted::new(self.root.clone());
        let mounted = mounted.map_err(|error| format!("/proc/self/mountinfo: {error}"))?;
        let (inodes, mounts) = (self.inodes.clone(), self.mounts.clone());
        let (told, restored) = std::sync::mpsc::channel();
        let _ = self.restored.set(told);
        let session = session.clone();
        let started = watch::start(watcher.clone(), inodes, mounts, mounted, session, restored);
        started.map_err(|error| format!("no thread: {error}"))?;
        Ok(watcher)
    }

    fn writable(&self) -> Result<()> {
        match self.rules.read_only() {
            true => Err(Errno::ROFS),
            false => Ok(()),
        }
    }

    /// Tries again where space may have become free.
    fn with_room<T>(&self, attempt: impl Fn() -> Result<T>) -> Result<T> {
        match attempt() {
            Err(errno) if self.makes_room(errno) => attempt(),
            result => result,
        }
    }

    /// Whether the kernel caches writes.
    fn writes_back(&self) -> bool {
        self.caches_writes.load(Ordering::Relaxed)
    }
}
