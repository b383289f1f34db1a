//! Open files. Each kind of operation has a module of its own.

use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::{self, Errno};
use uvfs_queue::arena::PAGE_SIZE;

use crate::cache::{CARRIED, Cache, Handle, Inode};
use crate::connection::Connection;
use crate::event::Event;
use crate::shared::Shared;

mod ahead;
mod append;
mod copy;
mod lock;
mod options;
mod read;
mod size;
mod submit;
mod sync;
mod write;
mod xattr;

use ahead::Ahead;

pub use ahead::Advice;
pub use options::OpenOptions;
pub use size::AllocateMode;
pub use submit::{Driver, Landed};

const PAGE: u64 = PAGE_SIZE as u64;

bitflags::bitflags! {
    /// How one call is to be done, as the `RWF_*` flags of preadv2(2).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Flags: u32 {
        /// Pages that the call brings in go when its I/O ends (`RWF_DONTCACHE`).
        const DONTCACHE = 1;
        /// Past the cache, all pieces at once (`O_DIRECT` for one call; no alignment is needed).
        const DIRECT = 2;
        /// The data is durable when the write returns (`RWF_DSYNC`).
        const DSYNC = 4;
    }
}

/// An open file. Clones are the same open file.
///
/// ```
/// # use uvfs_client::{Client, Config, Flags};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let fs = uvfs_passthrough::Passthrough::open(dir.path(), uvfs_passthrough::Options::default())?;
/// # let session = uvfs_server::Session::unmounted(fs, uvfs_server::SessionOptions::default())?;
/// # let limits = uvfs_server::ClientLimits::default();
/// # let (_serving, socket) = uvfs_server::in_process(&std::sync::Arc::new(session), limits)?;
/// # let client = Client::new(socket.into(), Config::default())?;
/// let file = client.create("data")?;
/// // Into the cache, past it, and through it without leaving anything there.
/// file.write_at(&[1; 4096], 0, Flags::empty())?;
/// file.write_at(&[2; 4096], 4096, Flags::DIRECT)?;
/// file.write_at(&[3; 4096], 8192, Flags::DONTCACHE)?;
/// file.sync_data()?;
/// assert_eq!(file.size(), 3 * 4096);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct File(Arc<FileInner>);

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("File").field(&self.0.name).finish()
    }
}

struct FileInner {
    inode: Arc<Inode>,
    handle: Arc<Handle>,
    cache: Arc<Cache>,
    /// As it was opened, for errors.
    name: Box<Path>,
    readable: bool,
    writable: bool,
    append: bool,
    /// Each write is durable when it returns.
    synchronous: bool,
    ahead: Mutex<Ahead>,
    /// A read of this page starts the next window.
    mark: AtomicU64,
    /// Where the last read that did not end with a page has ended.
    read_to: AtomicU64,
    advice: AtomicU8,
    /// Where this open file is in the inode's errors.
    errors: AtomicU64,
    wrote: AtomicBool,
    /// As which it owns locks.
    owner: u32,
    /// It may have locks: of ranges, of the whole.
    locked: [AtomicBool; 2],
    // Last: the client's end waits for writeback.
    _client: Arc<Shared>,
}

impl File {
    pub(crate) fn new(
        client: Arc<Shared>,
        inode: Arc<Inode>,
        handle: Arc<Handle>,
        name: &Path,
        options: &OpenOptions,
    ) -> Self {
        inode.opens.fetch_add(1, Ordering::AcqRel);
        Self(Arc::new(FileInner {
            errors: AtomicU64::new(inode.errors.sample()),
            cache: client.cache.clone(),
            _client: client,
            name: name.into(),
            inode,
            handle,
            readable: options.read,
            writable: options.write || options.append,
            append: options.append,
            synchronous: options.synchronous,
            ahead: Mutex::default(),
            mark: AtomicU64::new(u64::MAX),
            read_to: AtomicU64::new(0),
            advice: AtomicU8::new(0),
            wrote: AtomicBool::new(false),
            owner: {
                static NEXT: AtomicU32 = AtomicU32::new(1);
                NEXT.fetch_add(1, Ordering::Relaxed)
            },
            locked: Default::default(),
        }))
    }

    pub(crate) fn name(&self) -> &Path {
        &self.0.name
    }

    /// Notifies when a request of the file has ended.
    pub(crate) fn event(&self) -> &Event {
        &self.0.inode.event
    }

    /// Waits until `check` has something, and asks it after each event of the file.
    pub(crate) fn wait(&self, check: impl FnMut() -> Option<()>) {
        self.0.cache.wait(self.event(), check);
    }

    /// Makes a call that may be made twice, and repeats it if the server went away meanwhile and came back.
    pub(crate) fn retried<T>(&self, mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        self.retried_until(&Cell::new(false), |_| call())
    }

    /// As [`File::retried`], but does not repeat a call that has set `begun`. The call gets the session's number.
    fn retried_until<T>(
        &self,
        begun: &Cell<bool>,
        mut call: impl FnMut(u64) -> io::Result<T>,
    ) -> io::Result<T> {
        let f = &*self.0;
        let server = &f.cache.server;
        retried_until(server, begun, |session| {
            f.handle.check(server, session)?;
            call(session)
        })
    }
}

impl Drop for FileInner {
    fn drop(&mut self) {
        self.unlock_all();
        if self.wrote.load(Ordering::Relaxed) {
            self.inode.write_range(0, u64::MAX);
        }
        self.inode.opens.fetch_sub(1, Ordering::AcqRel);
        self.inode.closed();
    }
}

/// Makes a call once there is a server, and repeats it if that server went away meanwhile and another came.
pub(crate) fn retried<T>(
    server: &Connection,
    mut call: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    retried_until(server, &Cell::new(false), |_| call())
}

/// As [`retried`], but does not repeat a call that has set `begun`.
fn retried_until<T>(
    server: &Connection,
    begun: &Cell<bool>,
    mut call: impl FnMut(u64) -> io::Result<T>,
) -> io::Result<T> {
    for round in 0.. {
        let session = match server.session() {
            Some(session) => session,
            None => {
                server.reconnect()?;
                // If the server has gone away again, the call reports it.
                server.session().unwrap_or(u64::MAX)
            }
        };
        match call(session) {
            // The second is of a node that was known and not open.
            Err(e)
                if matches!(e, Errno::NOTCONN | Errno::STALE)
                    && round < CARRIED
                    && !begun.get()
                    && server.session() != Some(session) => {}
            other => return other,
        }
    }
    unreachable!("the rounds end")
}

fn checked_end(offset: u64, len: usize) -> io::Result<u64> {
    offset
        .checked_add(len as u64)
        .filter(|&end| end <= i64::MAX as u64)
        .ok_or(Errno::INVAL)
}
