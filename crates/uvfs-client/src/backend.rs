//! The client's side of a file system: three traits, by their users.
//!
//! - [`PageIo`] moves data between files and the pages of the arena: the page cache calls it.
//! - [`FileOps`] has FUSE's other operations: [`crate::Client`] and [`crate::File`] call them.
//! - [`SharedServer`] has leases, and sessions that end and begin again. Only a server has it that others use, too.
//!
//! A [`Backend`] gives them. One that wraps another passes on those that it does not change.

mod types;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use uvfs_queue::arena::Arena;

pub use types::*;

fn unsupported<T>() -> io::Result<T> {
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}

/// Reads and writes of pages. They are submitted and end later.
pub trait PageIo: Send + Sync {
    /// Tells the backend the arena that all segments mean. Called once, before anything else.
    fn attach(&self, arena: &Arc<Arena>) -> io::Result<()>;

    /// The descriptors that the backend has open once it is attached.
    fn descriptors(&self) -> Vec<RawFd>;

    /// How many pages at the arena's end the backend keeps for itself.
    fn reserved_pages(&self) -> u32;

    /// How much one request may carry.
    fn limits(&self) -> Limits;

    /// Starts all requests of a batch; leaves it empty. The client calls it without any lock of
    /// its own, so a request may end before this returns.
    fn submit(&self, batch: &mut Vec<Request>);

    /// As [`PageIo::submit`], by a caller that can spare the time and whose processor's caches have
    /// the data: a backend that works in this process does the requests here and now.
    fn carry_out(&self, batch: &mut Vec<Request>);

    /// Gives the caller's time to ending requests until `done` says so, if the backend can use
    /// it. It may return early: the caller then sleeps until a request ends.
    fn poll(&self, done: &mut dyn FnMut() -> bool);

    /// Does some of the work that was submitted, until `done` says so, if the backend works in
    /// this process. Unlike [`PageIo::poll`] it never uses up time for nothing: its caller
    /// has long to wait.
    fn help(&self, done: &mut dyn FnMut() -> bool);
}

/// The operations of a file system but reads and writes. They block.
///
/// Every method answers with the errno that a kernel file system would give; operations that a
/// backend does not have are `ENOSYS`.
#[allow(unused_variables)]
pub trait FileOps: Send + Sync {
    /// Finds a name.
    fn lookup(&self, parent: NodeId, name: &OsStr) -> io::Result<Entry> {
        unsupported()
    }

    /// Undoes `lookups` lookups.
    fn forget(&self, node: NodeId, lookups: u64) {}

    /// Attributes.
    fn getattr(&self, node: NodeId) -> io::Result<Attr> {
        unsupported()
    }

    /// Changes attributes; answers the new ones.
    fn setattr(&self, node: NodeId, set: &SetAttr) -> io::Result<Attr> {
        unsupported()
    }

    /// The target of a symbolic link.
    fn readlink(&self, node: NodeId) -> io::Result<OsString> {
        unsupported()
    }

    /// Makes a symbolic link.
    fn symlink(&self, parent: NodeId, name: &OsStr, target: &OsStr) -> io::Result<Entry> {
        unsupported()
    }

    /// Makes a file, fifo, socket or device, as mknod(2).
    fn mknod(&self, parent: NodeId, name: &OsStr, mode: u32, rdev: u32) -> io::Result<Entry> {
        unsupported()
    }

    /// Makes a directory.
    fn mkdir(&self, parent: NodeId, name: &OsStr, mode: u32) -> io::Result<Entry> {
        unsupported()
    }

    /// Removes a name that is no directory.
    fn unlink(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        unsupported()
    }

    /// Removes an empty directory.
    fn rmdir(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        unsupported()
    }

    /// Renames; `flags` as renameat2(2).
    fn rename(
        &self,
        parent: NodeId,
        name: &OsStr,
        new_parent: NodeId,
        new_name: &OsStr,
        flags: u32,
    ) -> io::Result<()> {
        unsupported()
    }

    /// Makes a hard link.
    fn link(&self, node: NodeId, new_parent: NodeId, new_name: &OsStr) -> io::Result<Entry> {
        unsupported()
    }

    /// Opens a file; `flags` as open(2), never with `O_APPEND`, `O_CREAT` or `O_EXCL`.
    fn open(&self, node: NodeId, flags: i32) -> io::Result<u64> {
        unsupported()
    }

    /// Makes and opens a file; fails with `EEXIST` only when its flags have `O_EXCL`.
    fn create(&self, parent: NodeId, name: &OsStr, new: NewFile) -> io::Result<(Entry, u64)> {
        unsupported()
    }

    /// Closes a file.
    fn release(&self, node: NodeId, handle: u64) {}

    /// Makes a file's data (and, unless `data_only`, its attributes) durable.
    fn fsync(&self, node: NodeId, handle: u64, data_only: bool) -> io::Result<()> {
        unsupported()
    }

    /// As [`FileOps::fsync`], without waiting: `done` is told (the number means nothing). A
    /// backend that can't do that waits here.
    fn submit_fsync(&self, node: NodeId, handle: u64, data_only: bool, done: Done) {
        done(self.fsync(node, handle, data_only).map(|()| 0));
    }

    /// Takes or gives back a lock; waits for it with `wait`, else fails with `EAGAIN`. Locks go
    /// with their handle.
    fn lock(&self, node: NodeId, handle: u64, request: &LockRequest, wait: bool) -> io::Result<()> {
        unsupported()
    }

    /// The first lock that is in the way of a range lock.
    fn test_lock(
        &self,
        node: NodeId,
        handle: u64,
        request: &LockRequest,
    ) -> io::Result<Option<RangeLock>> {
        unsupported()
    }

    /// Copies up to `len` bytes between open files, `from` and `to` by node and handle, and answers how
    /// many; 0 at the end of the one that is read.
    fn copy_range(
        &self,
        from: (NodeId, u64),
        from_offset: u64,
        to: (NodeId, u64),
        to_offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        unsupported()
    }

    /// As fallocate(2).
    fn fallocate(
        &self,
        node: NodeId,
        handle: u64,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        unsupported()
    }

    /// As lseek(2) with `SEEK_DATA` or `SEEK_HOLE`.
    fn lseek(&self, node: NodeId, handle: u64, offset: u64, whence: i32) -> io::Result<u64> {
        unsupported()
    }

    /// All names of a directory, without `.` and `..`.
    fn readdir(&self, node: NodeId) -> io::Result<Vec<DirEntry>> {
        unsupported()
    }

    /// The file system's numbers.
    fn statfs(&self, node: NodeId) -> io::Result<StatFs> {
        unsupported()
    }

    /// As setxattr(2).
    fn setxattr(&self, node: NodeId, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        unsupported()
    }

    /// As getxattr(2), the whole value.
    fn getxattr(&self, node: NodeId, name: &OsStr) -> io::Result<Vec<u8>> {
        unsupported()
    }

    /// All attribute names.
    fn listxattr(&self, node: NodeId) -> io::Result<Vec<OsString>> {
        unsupported()
    }

    /// As removexattr(2).
    fn removexattr(&self, node: NodeId, name: &OsStr) -> io::Result<()> {
        unsupported()
    }
}

/// A server that others use, too: nothing may be cached without a lease. It may go away and come back.
pub trait SharedServer: Send + Sync {
    /// Asks for a lease of an inode.
    fn lease(&self, node: NodeId, lease: Lease) -> io::Result<Grant>;

    /// Gives a lease back, or keeps less of it.
    fn return_lease(&self, node: NodeId, seq: u64, keep: Lease);

    /// Says what is to be done with recalls. Called once, after [`PageIo::attach`].
    fn on_recall(&self, call: OnRecall);

    /// Where to ask what to tell the other side's `uvfs stats`. Called once, as above.
    fn publish_from(&self, figures: Figures);

    /// Whether the backend still stands by its leases.
    fn is_alive(&self) -> bool;

    /// The session's number, if the backend stands by its leases: another number makes void what
    /// was cached before.
    fn session(&self) -> Option<u64>;

    /// Whether a handle that was opened in a session before this one was opened again.
    ///
    /// # Errors
    /// The errno with which it was not.
    fn still_open(&self, node: NodeId, handle: u64) -> io::Result<()>;

    /// The session now, and a node's and a handle's numbers at its server, which page descriptors
    /// have; `u64::MAX` for what has none.
    fn names(&self, node: NodeId, handle: u64) -> (u64, u64, u64);

    /// Waits for a server that went to come back, for as long as the backend is to wait.
    ///
    /// # Errors
    /// `ENOTCONN` when there still is none, `ESTALE` when there is one that serves something else.
    fn reconnect(&self) -> io::Result<()>;

    /// Whether the server that went has written everything that was dirty, as one that ends in order
    /// does. Waits while it is at it.
    fn has_written(&self) -> bool;

    /// Says what is to be done when a server came back. Called once, after [`PageIo::attach`].
    fn on_reattach(&self, call: OnReattach);

    /// Takes over an open file by the secret of a [`crate::Token`].
    fn import(&self, secret: &[u8; 32]) -> io::Result<Imported>;
}

/// A file system, for [`crate::Client::new`].
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use uvfs_client::backend::{Backend, Entry, FileOps, NodeId, PageIo, SharedServer};
/// use uvfs_client::{Client, Config};
///
/// /// Counts lookups, and passes everything else on.
/// struct Counting<B>(B, Arc<AtomicUsize>);
///
/// impl<B: Backend> Backend for Counting<B> {
///     fn pages(&self) -> &dyn PageIo {
///         self.0.pages()
///     }
///     fn files(&self) -> &dyn FileOps {
///         self.1.fetch_add(1, Ordering::Relaxed);
///         self.0.files()
///     }
///     fn shared(&self) -> Option<&dyn SharedServer> {
///         self.0.shared()
///     }
/// }
///
/// # fn main() -> std::io::Result<()> {
/// # let dir = tempfile::tempdir()?;
/// let calls = Arc::new(AtomicUsize::new(0));
/// # let store = uvfs_local::LocalStore::open(dir.path())?;
/// let client = Client::new(Counting(store, calls.clone()), Config::default())?;
/// client.mkdir("dir", 0o755)?;
/// assert!(calls.load(Ordering::Relaxed) > 0);
/// # Ok(())
/// # }
/// ```
pub trait Backend: Send + Sync + 'static {
    /// Reads and writes of pages.
    fn pages(&self) -> &dyn PageIo;
    /// The other operations.
    fn files(&self) -> &dyn FileOps;
    /// Leases and sessions, where others use the same files. A backend without them has its files to itself.
    fn shared(&self) -> Option<&dyn SharedServer>;
}

/// The answers of a backend that has its files to itself, and the server's own of another.
impl dyn Backend + '_ {
    pub(crate) fn is_shared(&self) -> bool {
        self.shared().is_some()
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.shared().is_none_or(|server| server.is_alive())
    }

    /// See [`SharedServer::session`].
    pub(crate) fn session(&self) -> Option<u64> {
        self.shared().map_or(Some(0), |server| server.session())
    }

    /// See [`SharedServer::still_open`].
    pub(crate) fn still_open(&self, node: NodeId, handle: u64) -> io::Result<()> {
        self.shared()
            .map_or(Ok(()), |server| server.still_open(node, handle))
    }

    /// See [`SharedServer::names`].
    pub(crate) fn names(&self, node: NodeId, handle: u64) -> (u64, u64, u64) {
        let own = (0, node, handle);
        self.shared()
            .map_or(own, |server| server.names(node, handle))
    }

    pub(crate) fn reconnect(&self) -> io::Result<()> {
        self.shared().map_or(Ok(()), |server| server.reconnect())
    }

    pub(crate) fn has_written(&self) -> bool {
        self.shared().is_some_and(|server| server.has_written())
    }

    pub(crate) fn lease(&self, node: NodeId, lease: Lease) -> io::Result<Grant> {
        self.shared()
            .map_or_else(unsupported, |server| server.lease(node, lease))
    }

    pub(crate) fn return_lease(&self, node: NodeId, seq: u64, keep: Lease) {
        if let Some(server) = self.shared() {
            server.return_lease(node, seq, keep);
        }
    }

    pub(crate) fn import(&self, secret: &[u8; 32]) -> io::Result<Imported> {
        self.shared()
            .map_or_else(unsupported, |server| server.import(secret))
    }
}
