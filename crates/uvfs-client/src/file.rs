//! Open files. Each kind of operation has a module of its own.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use uvfs_queue::arena::PAGE_SIZE;

use crate::backend::Backend;
use crate::cache::{CARRIED, Cache, Handle, Inode, errno};
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
/// # fn main() -> std::io::Result<()> {
/// # let dir = tempfile::tempdir()?;
/// # let client = Client::new(uvfs_local::LocalStore::open(dir.path())?, Config::default())?;
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
#[derive(Debug, Clone)]
pub struct File(Arc<FileInner>);

#[derive(Debug)]
struct FileInner {
    inode: Arc<Inode>,
    handle: Arc<Handle>,
    cache: Arc<Cache>,
    readable: bool,
    writable: bool,
    append: bool,
    /// Each write is durable when it returns.
    synchronous: bool,
    ahead: Mutex<Ahead>,
    /// A read of this page starts the next window.
    mark: AtomicU64,
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
        options: &OpenOptions,
    ) -> Self {
        inode.opens.fetch_add(1, Ordering::AcqRel);
        Self(Arc::new(FileInner {
            errors: AtomicU64::new(inode.errors.sample()),
            cache: client.cache.clone(),
            _client: client,
            inode,
            handle,
            readable: options.read,
            writable: options.write || options.append,
            append: options.append,
            synchronous: options.synchronous,
            ahead: Mutex::default(),
            mark: AtomicU64::new(u64::MAX),
            advice: AtomicU8::new(0),
            wrote: AtomicBool::new(false),
            owner: {
                static NEXT: AtomicU32 = AtomicU32::new(1);
                NEXT.fetch_add(1, Ordering::Relaxed)
            },
            locked: Default::default(),
        }))
    }

    /// Makes a call that does no harm when it is made twice, and makes it again when the server went
    /// meanwhile and came back.
    pub(crate) fn retried<T>(&self, mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        self.retried_until(&Cell::new(false), |_| call())
    }

    /// As [`File::carried`], but not again once the call has said that it has begun. The call is told
    /// its session.
    fn retried_until<T>(
        &self,
        begun: &Cell<bool>,
        mut call: impl FnMut(u64) -> io::Result<T>,
    ) -> io::Result<T> {
        let f = &*self.0;
        let backend = &*f.cache.backend;
        retried_until(backend, begun, |session| {
            f.handle.check(backend, session)?;
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

/// Makes a call once there is a server, and again when that went meanwhile and there is another.
pub(crate) fn retried<T>(
    backend: &dyn Backend,
    mut call: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    retried_until(backend, &Cell::new(false), |_| call())
}

/// As [`carried`], but not again once the call has said that it has begun.
fn retried_until<T>(
    backend: &dyn Backend,
    begun: &Cell<bool>,
    mut call: impl FnMut(u64) -> io::Result<T>,
) -> io::Result<T> {
    for round in 0.. {
        let session = match backend.session() {
            Some(session) => session,
            None => {
                backend.reconnect()?;
                // Gone already, perhaps: then the call says it.
                backend.session().unwrap_or(u64::MAX)
            }
        };
        match call(session) {
            // The second is of a node that was known and not open.
            Err(e)
                if matches!(errno_of(&e), libc::ENOTCONN | libc::ESTALE)
                    && round < CARRIED
                    && !begun.get()
                    && backend.session() != Some(session) => {}
            other => return other,
        }
    }
    unreachable!("the rounds end")
}

fn checked_end(offset: u64, len: usize) -> io::Result<u64> {
    offset
        .checked_add(len as u64)
        .filter(|&end| end <= i64::MAX as u64)
        .ok_or_else(|| errno(libc::EINVAL))
}

fn errno_of(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}
