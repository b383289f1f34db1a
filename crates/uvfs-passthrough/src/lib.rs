//! A file system that passes every request to a directory of the host.
//!
//! [`Passthrough`] serves what is below a source directory with everything that the host's file
//! system gives: handlers are thin over the `*at()` system calls, relative to a descriptor of the
//! node and with names of one component, so that no name leads out of the source.

mod apart;
mod creds;
mod dir;
mod handle;
mod identity;
mod inode;
mod io;
mod lock;
mod meta;
mod mounted;
mod namespace;
mod rules;
mod slots;
mod sys;
mod watch;
mod xattr;

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::process::Resource;
use uvfs_io::ops;
use uvfs_proto::abi;
use uvfs_server::fs::{
    Attributes, Bytes, Config, Context, CopyRange, DirSink, Entry, FileSystem, InitFlags, IoHow,
    Ioctl, Lock, LockHow, NewNode, OpenHow, Opened, Payload, SetAttr, Unlinked, Watch,
};

use crate::apart::{Apart, apart};
use crate::creds::Creds;
use crate::dir::OpenDir;
use crate::handle::OpenFile;
use crate::inode::{Inodes, Mounts, PathFds, Removed};
use crate::mounted::Mounted;
use crate::rules::Rules;
use crate::slots::Table;
use crate::watch::Watcher;
pub use crate::watch::{Report, can_watch};

type Result<T> = std::result::Result<T, Errno>;

/// Most O_PATH descriptors kept open for inodes that are known by handle.
const MAX_PATH_FDS: u64 = 1024;
/// Most descriptors kept of removed files that the kernel still knows.
const MAX_REMOVED: u64 = 1024;

/// How a directory is served.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kernel caches writes and writes back later (FUSE_WRITEBACK_CACHE). Programs of the host
    /// then see writes late. Off where `passthrough` is [`Backed::All`].
    pub writeback: bool,
    /// Rules of the mount, as in mount(2), that the server sees to: with RDONLY everything that changes
    /// something fails with EROFS; by NOATIME, NODIRATIME and STRICTATIME reading moves access times, and
    /// without them as the host has it. See [`Passthrough::remounted`].
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
    /// Which opens get a backing file, so that reads and writes go from the kernel straight to the
    /// host's file (FUSE passthrough, Linux 6.9), where the kernel allows it. See
    /// [`Passthrough::set_backing`].
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
    /// they change. See [`Passthrough::set_report`]. Not with `writeback`.
    pub watch: bool,
    /// How long attributes may be cached elsewhere.
    pub attr_ttl: Duration,
    /// How long names may be cached elsewhere.
    pub entry_ttl: Duration,
    /// How long it may be cached elsewhere that there is no such name.
    pub negative_ttl: Duration,
}

/// Which opens of the kernel's get the host's file as their backing file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backed {
    /// None.
    Off,
    /// Opens for reading and writing (not with `direct_io`), and opens with O_DIRECT for reading only
    /// or of files in memory. Not those with O_APPEND: when a program switches O_DIRECT or O_APPEND off,
    /// as dd(1) does for the end of a file, the kernel (6.18) goes on with the flags of the open, and
    /// most hosts then refuse what is not aligned.
    ///
    /// Opens for writing only begin without a backing file. Most of them make a small file, which a
    /// backing file would cost more than its few WRITEs.
    #[default]
    Auto,
    /// Those with O_DIRECT, and with them, as for [`Backed::Auto`], all others of the same file at the
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
        /// What open(2) said.
        errno: Errno,
    },
    /// The source can't be read.
    #[error("cannot read the source directory: {0}")]
    Read(Errno),
    /// There is no /proc, which descriptors are opened again through.
    #[error("/proc is not mounted ({0}); mount it: mount -t proc proc /proc")]
    NoProc(Errno),
}

/// Registers a node's file and gives its id.
pub type Register = dyn Fn(u64, BorrowedFd<'_>) -> std::io::Result<i32> + Send + Sync;

/// How backing files are registered with the kernel, and it is told of what a request changed: by
/// `Session::register_backing`, `Session::unregister_backing` and so on of uvfs_server.
pub struct Backing {
    /// Registers a node's file and gives its id.
    pub register: Box<Register>,
    /// Takes back a node's registration.
    pub unregister: Box<dyn Fn(u64, i32) + Send + Sync>,
    /// Has the kernel drop what it has cached of a node's attributes: `Session::attributes_changed`.
    pub changed: Box<dyn Fn(u64) + Send + Sync>,
}

/// A directory of the host, served.
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
    /// Where the host's changes are reported, until the mount begins.
    report: Mutex<Option<Box<Report>>>,
    path_fds: PathFds,
    removed: Removed,
    files: Table<OpenFile>,
    dirs: Table<OpenDir>,
    backing: OnceLock<Backing>,
    /// What the kernel agreed to.
    passes_through: AtomicBool,
    /// The kernel takes no backing files from this server, so no more are registered.
    backing_refused: AtomicBool,
    caches_writes: AtomicBool,
    /// The kernel lists directories without opening them.
    lists_unopened: AtomicBool,
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
            true => rules::alone(source.as_fd()).unwrap_or(source),
            false => source,
        };
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
            options,
            creds: Creds::new(),
            root: Arc::new(root),
            mounts: Arc::new(mounts),
            inodes: Arc::new(Inodes::new(inode)),
            report: Mutex::default(),
            path_fds: PathFds::new(path_fds),
            removed: Removed::new((limit / 8).clamp(16, MAX_REMOVED) as usize),
            files: Table::default(),
            dirs: Table::default(),
            backing: OnceLock::new(),
            passes_through: AtomicBool::new(false),
            backing_refused: AtomicBool::new(false),
            caches_writes: AtomicBool::new(false),
            lists_unopened: AtomicBool::new(false),
            apart: Apart::default(),
        })))
    }

    /// Says how backing files are registered, for [`Options::passthrough`]. Counts once, and before
    /// the session begins.
    pub fn set_backing(&self, backing: Backing) {
        let _ = self.0.backing.set(backing);
    }

    /// Says where to report what programs of the host change, for [`Options::watch`]:
    /// `Session::host_changed` of uvfs_server. Before the session begins.
    pub fn set_report(&self, report: Box<Report>) {
        *slots::lock(&self.0.report) = Some(report);
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
        let report = slots::lock(&self.report).take();
        let report = report.ok_or("there is no mount")?;
        if !self.options.watch {
            return Err("the mount's options say for how long to cache".into());
        }
        if self.options.writeback {
            return Err("the kernel caches writes (writeback)".into());
        }
        let watcher = Watcher::new(&self.inodes.root().mount, minor)?;
        let mounted = Mounted::new(self.root.clone());
        let mounted = mounted.map_err(|error| format!("/proc/self/mountinfo: {error}"))?;
        let (inodes, mounts) = (self.inodes.clone(), self.mounts.clone());
        let started = watcher.clone().start(inodes, mounts, mounted, report);
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

impl Passthrough {
    /// Takes back what a caller has no more use for, also when nobody waits for that any more.
    async fn give_back(
        &self,
        cx: &Context,
        node: u64,
        call: impl FnOnce(&Source) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        match self.0.leads_elsewhere(node) {
            true => Box::pin(self.0.surely_elsewhere(cx, call)).await,
            false => call(&self.0),
        }
    }
}

impl FileSystem for Passthrough {
    fn init(&self, config: &mut Config) -> Result<()> {
        let options = &self.0.options;
        config.wanted |= InitFlags::ASYNC_READ
            | InitFlags::ASYNC_DIO
            | InitFlags::BIG_WRITES
            | InitFlags::CACHE_SYMLINKS
            | InitFlags::CREATE_SUPP_GROUP
            | InitFlags::DONT_MASK
            | InitFlags::DO_READDIRPLUS
            | InitFlags::READDIRPLUS_AUTO
            | InitFlags::HANDLE_KILLPRIV_V2
            | InitFlags::MAX_PAGES
            | InitFlags::NO_EXPORT_SUPPORT
            | InitFlags::PARALLEL_DIROPS
            | InitFlags::SETXATTR_EXT
            | InitFlags::DIRECT_IO_ALLOW_MMAP;
        // Not ATOMIC_O_TRUNC: with O_RDONLY the kernel would ask for the truncation before it looks
        // whether the file is being executed.
        config.wanted -= InitFlags::ATOMIC_O_TRUNC
            | InitFlags::EXPORT_SUPPORT
            | InitFlags::HANDLE_KILLPRIV
            | InitFlags::EXPLICIT_INVAL_DATA
            | InitFlags::SPLICE_READ
            | InitFlags::SPLICE_WRITE
            | InitFlags::SPLICE_MOVE;
        let all = options.passthrough == Backed::All;
        let wanted = match options.passthrough {
            Backed::Off => false,
            // The server's own capability decides, not the caller's.
            Backed::Auto | Backed::Direct => {
                !(options.writeback || options.uncached)
                    && self.0.backing.get().is_some()
                    && creds::is_administrator()
            }
            Backed::All => true,
        };
        let passthrough = wanted && config.offered.contains(InitFlags::PASSTHROUGH);
        if all && !passthrough {
            tracing::warn!("the kernel has no FUSE passthrough (it needs Linux 6.9); without it");
        }
        // The kernel takes one of the two.
        let writeback = options.writeback && !passthrough;
        let writeback = writeback && config.offered.contains(InitFlags::WRITEBACK_CACHE);
        // With them the kernel checks permissions, asked to or not.
        config
            .wanted
            .set(InitFlags::POSIX_ACL, options.checks_permissions);
        config.wanted.set(InitFlags::PASSTHROUGH, passthrough);
        config.wanted.set(InitFlags::WRITEBACK_CACHE, writeback);
        // With the writeback cache, times are the kernel's own.
        let always = options.keep_cache == KeepCache::Always;
        config
            .wanted
            .set(InitFlags::AUTO_INVAL_DATA, !writeback && !always);
        config
            .wanted
            .set(InitFlags::POSIX_LOCKS, options.host_locks);
        config
            .wanted
            .set(InitFlags::FLOCK_LOCKS, options.host_locks);
        if passthrough {
            config.max_stack_depth = config.max_stack_depth.max(1);
        }
        config.time_gran = 1;
        let watcher = self.0.watch_host(config.minor);
        match &watcher {
            Ok(_) => tracing::debug!("watching for what the host changes"),
            Err(why) => tracing::info!(why, "not watching for what the host changes"),
        }
        // It then caches all listings, and the host checks nobody's permissions. Since this version of the
        // protocol (Linux 6.9) the host's offsets outlive the descriptor that they were read from, tmpfs's too.
        let unopened = watcher.is_ok()
            && (options.checks_permissions || self.0.creds.is_root())
            && !self.0.rules.strictatime()
            && config.minor >= 40
            && config.offered.contains(InitFlags::NO_OPENDIR_SUPPORT);
        self.0.lists_unopened.store(unopened, Ordering::Relaxed);
        self.0.mounts.watching.set(watcher);
        self.0.passes_through.store(passthrough, Ordering::Relaxed);
        self.0.caches_writes.store(writeback, Ordering::Relaxed);
        Ok(())
    }

    fn destroy(&self) {
        self.0.mounts.watching.stop();
        self.0.files.clear();
        self.0.dirs.clear();
        self.0.inodes.clear();
    }

    fn watch(&self) -> Option<Watch> {
        self.0.mounts.watching.report()
    }

    fn takes_uncached(&self) -> bool {
        true
    }

    fn identity(&self, node: u64) -> Option<Bytes> {
        self.0.identity_of(node).ok()
    }

    fn path(&self, node: u64) -> Option<Bytes> {
        self.0.path_of(node).ok()
    }

    async fn find(&self, _: &Context, identity: &[u8]) -> Result<Entry> {
        self.0.find_again(identity)
    }

    fn forget(&self, node: u64, lookups: u64) {
        self.0.inodes.forget(node, lookups);
    }

    fn lookups(&self, node: u64) -> Option<u64> {
        self.0.inodes.lookups(node)
    }

    async fn lookup(&self, cx: &Context, parent: u64, name: &CStr) -> Result<Entry> {
        apart!(self, cx, [parent], Some(name), [name], |source| source
            .look_up(parent, name))
    }

    async fn getattr(&self, cx: &Context, node: u64, fh: Option<u64>) -> Result<Attributes> {
        apart!(self, cx, [node], None, [], |source| source
            .get_attr(node, fh))
    }

    async fn statx(
        &self,
        cx: &Context,
        node: u64,
        fh: Option<u64>,
        mask: u32,
    ) -> Result<(abi::Statx, Duration)> {
        apart!(self, cx, [node], None, [], |source| source
            .get_statx(node, fh, mask))
    }

    async fn setattr(&self, cx: &Context, node: u64, set: &SetAttr) -> Result<Attributes> {
        apart!(self, cx, [node], None, [cx, set], |source| source
            .set_attr(cx, node, set))
    }

    async fn readlink(&self, cx: &Context, node: u64) -> Result<Bytes> {
        apart!(self, cx, [node], None, [], |source| source.read_link(node))
    }

    async fn symlink(
        &self,
        cx: &Context,
        parent: u64,
        name: &CStr,
        target: &CStr,
    ) -> Result<Entry> {
        apart!(
            self,
            cx,
            [parent],
            Some(name),
            [cx, name, target],
            |source| source.with_room(|| source.make_symlink(cx, parent, name, target))
        )
    }

    async fn mknod(&self, cx: &Context, parent: u64, name: &CStr, new: &NewNode) -> Result<Entry> {
        apart!(self, cx, [parent], Some(name), [cx, name, new], |source| {
            source.with_room(|| source.make_node(cx, parent, name, new))
        })
    }

    async fn mkdir(&self, cx: &Context, parent: u64, name: &CStr, new: &NewNode) -> Result<Entry> {
        apart!(self, cx, [parent], Some(name), [cx, name, new], |source| {
            source.with_room(|| source.make_dir(cx, parent, name, new))
        })
    }

    async fn unlink(&self, cx: &Context, parent: u64, name: &CStr) -> Result<Unlinked> {
        apart!(self, cx, [parent], Some(name), [name], |source| source
            .remove(parent, name))
    }

    async fn rmdir(&self, cx: &Context, parent: u64, name: &CStr) -> Result<Unlinked> {
        apart!(self, cx, [parent], Some(name), [name], |source| source
            .remove_dir(parent, name))
    }

    async fn rename(
        &self,
        cx: &Context,
        parent: u64,
        name: &CStr,
        new_parent: u64,
        new_name: &CStr,
        flags: u32,
    ) -> Result<Unlinked> {
        apart!(
            self,
            cx,
            [parent, new_parent],
            Some(name),
            [cx, name, new_name],
            |source| source
                .with_room(|| source.move_name(cx, parent, name, new_parent, new_name, flags))
        )
    }

    async fn link(
        &self,
        cx: &Context,
        node: u64,
        new_parent: u64,
        new_name: &CStr,
    ) -> Result<Entry> {
        apart!(
            self,
            cx,
            [new_parent, node],
            Some(new_name),
            [new_name],
            |source| source.with_room(|| source.make_link(node, new_parent, new_name))
        )
    }

    async fn open(&self, cx: &Context, node: u64, how: &OpenHow) -> Result<Opened> {
        apart!(self, cx, [node], None, [cx, how], |source| source
            .open_file(cx, node, how))
    }

    async fn create(
        &self,
        cx: &Context,
        parent: u64,
        name: &CStr,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        apart!(
            self,
            cx,
            [parent],
            Some(name),
            [cx, name, new, how],
            |source| source.with_room(|| source.create_file(cx, parent, name, new, how))
        )
    }

    async fn tmpfile(
        &self,
        cx: &Context,
        parent: u64,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        apart!(self, cx, [parent], None, [cx, new, how], |source| source
            .with_room(|| source.make_tmpfile(cx, parent, new, how)))
    }

    async fn read(&self, cx: &Context, node: u64, how: &IoHow, data: &Payload) -> Result<usize> {
        match self.0.leads_elsewhere(node) {
            true => Box::pin(self.0.read_elsewhere(cx, how, data)).await,
            false => self.0.read_file(how, data).await,
        }
    }

    async fn write(&self, cx: &Context, node: u64, how: &IoHow, data: &Payload) -> Result<usize> {
        let (mut done, mut how, mut left) = (0, *how, None);
        loop {
            let rest = left.as_ref().unwrap_or(data);
            let written = match self.0.leads_elsewhere(node) {
                true => Box::pin(self.0.write_elsewhere(cx, &how, rest)).await,
                false => self.0.write_file(cx, &how, rest).await,
            };
            match written {
                Err(errno) if self.0.makes_room(errno) => {}
                // A cache takes its pages for written unless it hears of an error.
                Err(errno) if done == 0 || how.from_cache => return Err(errno),
                Err(_) => return Ok(done),
                Ok(0) if how.from_cache && !rest.is_empty() => return Err(Errno::IO),
                Ok(more) if more == 0 || more == rest.len() => return Ok(done + more),
                // The next attempt says why, or has room: but not at the end of the file, where others may have
                // written meanwhile.
                Ok(more) if io::appends(how.flags) && !how.from_cache => return Ok(done + more),
                Ok(more) => {
                    done += more;
                    how.offset += more as u64;
                    left = Some(data.slice(done..data.len()));
                }
            }
        }
    }

    async fn flush(&self, cx: &Context, node: u64, fh: u64, owner: u64) -> Result<()> {
        if !self.0.options.host_locks {
            // Nothing is held back here, and the kernel then need not ask at each close.
            return Err(Errno::NOSYS);
        }
        let call = move |source: &Source| source.drop_locks(fh, owner);
        self.give_back(cx, node, call).await
    }

    async fn release(
        &self,
        cx: &Context,
        node: u64,
        fh: u64,
        _: u32,
        _: Option<u64>,
    ) -> Result<()> {
        // A flock(2) lock goes with the host's open file.
        let call = move |source: &Source| source.release_file(fh);
        self.give_back(cx, node, call).await
    }

    async fn fsync(&self, cx: &Context, node: u64, fh: u64, data_only: bool) -> Result<()> {
        match self.0.leads_elsewhere(node) {
            true => {
                let call = move |source: &Source| io::sync(source.file(fh)?.as_fd(), data_only);
                Box::pin(self.0.elsewhere(cx, call)).await
            }
            false => ops::fsync(&self.0.file(fh)?.fd, data_only).await,
        }
    }

    async fn opendir(&self, cx: &Context, node: u64, how: &OpenHow) -> Result<Opened> {
        let kernel = matches!(how.origin, uvfs_server::fs::Origin::Kernel);
        if kernel && self.0.lists_unopened.load(Ordering::Relaxed) {
            return Err(Errno::NOSYS);
        }
        apart!(self, cx, [node], None, [], |source| source.open_dir(node))
    }

    async fn readdir(
        &self,
        cx: &Context,
        node: u64,
        fh: u64,
        offset: u64,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        if !self.0.apart.any() || !self.0.is_apart(&*self.0.inode(node)?) {
            return self.0.list(node, fh, offset, sink);
        }
        let dir = apart!(self, cx, [node], None, [], |source| source
            .read_ahead(node, fh, offset))?;
        self.0.list_read(&dir, sink)
    }

    async fn releasedir(&self, cx: &Context, node: u64, fh: u64, _: u32) -> Result<()> {
        let call = move |source: &Source| source.dirs.remove(fh).map(drop).ok_or(Errno::BADF);
        self.give_back(cx, node, call).await
    }

    async fn fsyncdir(&self, cx: &Context, node: u64, fh: u64, data_only: bool) -> Result<()> {
        if self.0.leads_elsewhere(node) {
            let call = move |source: &Source| io::sync(source.dir(node, fh)?.as_fd(), data_only);
            return Box::pin(self.0.elsewhere(cx, call)).await;
        }
        ops::fsync(&self.0.dir(node, fh)?.fd, data_only).await
    }

    async fn statfs(&self, cx: &Context, node: u64) -> Result<abi::Kstatfs> {
        apart!(self, cx, [node], None, [], |source| source.stat_fs(node))
    }

    async fn getxattr(&self, cx: &Context, node: u64, name: &CStr) -> Result<Bytes> {
        apart!(self, cx, [node], None, [cx, name], |source| source
            .get_xattr(cx, node, name))
    }

    async fn listxattr(&self, cx: &Context, node: u64) -> Result<Bytes> {
        apart!(self, cx, [node], None, [cx], |source| source
            .list_xattr(cx, node))
    }

    async fn setxattr(
        &self,
        cx: &Context,
        node: u64,
        name: &CStr,
        value: &[u8],
        flags: u32,
        kill_sgid: bool,
    ) -> Result<()> {
        apart!(self, cx, [node], None, [cx, name, value], |source| source
            .set_xattr(cx, node, name, value, flags, kill_sgid))
    }

    async fn removexattr(&self, cx: &Context, node: u64, name: &CStr) -> Result<()> {
        apart!(self, cx, [node], None, [cx, name], |source| source
            .remove_xattr(cx, node, name))
    }

    async fn getlk(&self, cx: &Context, node: u64, how: &LockHow, lock: &Lock) -> Result<Lock> {
        apart!(self, cx, [node], None, [how, lock], |source| source
            .test_lock(how, lock))
    }

    async fn setlk(&self, cx: &Context, node: u64, how: &LockHow, lock: &Lock) -> Result<()> {
        lock::patiently(how.wait, async || {
            apart!(self, cx, [node], None, [how, lock], |source| source
                .try_lock(how, lock))
        })
        .await
    }

    async fn fallocate(
        &self,
        cx: &Context,
        node: u64,
        fh: u64,
        offset: u64,
        len: u64,
        mode: u32,
    ) -> Result<()> {
        loop {
            let done = match self.0.leads_elsewhere(node) {
                true => {
                    let (context, range) = (*cx, (offset, len));
                    let call =
                        move |source: &Source| source.fallocate_waiting(&context, fh, range, mode);
                    Box::pin(self.0.elsewhere(cx, call)).await
                }
                false => self.0.fallocate_file(cx, fh, offset, len, mode).await,
            };
            match done {
                Err(errno) if self.0.makes_room(errno) => {}
                result => return result,
            }
        }
    }

    async fn lseek(
        &self,
        cx: &Context,
        node: u64,
        fh: u64,
        offset: u64,
        whence: u32,
    ) -> Result<u64> {
        apart!(self, cx, [node], None, [], |source| source
            .seek_file(fh, offset, whence))
    }

    async fn copy_file_range(&self, cx: &Context, node: u64, copy: &CopyRange) -> Result<u64> {
        match self.0.leads_elsewhere(node) || self.0.leads_elsewhere(copy.node_out) {
            true => {
                let (context, copy) = (*cx, *copy);
                let call = move |source: &Source| source.begin_copy(&context, &copy)?();
                Box::pin(self.0.elsewhere(cx, call)).await
            }
            false => self.0.copy_file(cx, copy).await,
        }
    }

    async fn ioctl(&self, cx: &Context, node: u64, ioctl: &Ioctl<'_>) -> Result<(i32, Bytes)> {
        let (input, head) = (
            ioctl.input,
            Ioctl {
                input: &[],
                ..*ioctl
            },
        );
        apart!(self, cx, [node], None, [cx, input], |source| {
            source.file_ioctl(cx, node, &Ioctl { input, ..head })
        })
    }

    fn open_flags(&self, node: u64, fh: u64) -> Result<u32> {
        self.0.asked_flags(node, fh)
    }

    async fn share(&self, node: u64, fh: u64) -> Result<u64> {
        self.0.share_file(node, fh)
    }

    async fn syncfs(&self, _: &Context, _: u64) -> Result<()> {
        self.0.sync_all().await
    }
}
