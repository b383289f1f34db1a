//! Telling the kernel what it can't know. From any thread: a notification is a write of its own
//! to `/dev/fuse`, so it waits for no queue.
//!
//! The kernel may take an inode's lock for it. A handler must not notify about the node that its
//! own request holds (a directory that a name is made in, a file that is written), or both wait for
//! each other for ever; another thread may.

use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::Duration;

use rustix::io::Errno;
use rustix::time::ClockId;
use uvfs_proto::abi::{
    EXPIRE_ONLY, NotifyCode, NotifyDeleteOut, NotifyInvalEntryOut, NotifyInvalInodeOut,
    NotifyPollWakeupOut, NotifyPruneOut, NotifyRetrieveOut, NotifyStoreOut,
};
use uvfs_proto::notify::message;
use uvfs_queue::shm::SharedMemory;
use zerocopy::{Immutable, IntoBytes};

use crate::fs::Node;
use uvfs_sys::lock;

/// Takes what was retrieved: where it begins, and the bytes.
pub(crate) type Retrieved = SyncSender<(u64, Vec<u8>)>;
/// Where what was retrieved is taken to, by the numbers of the retrievals.
pub(crate) type Retrievals = Arc<Mutex<HashMap<u64, Retrieved>>>;

/// Invalidates things in the kernel's caches, or stores things there.
///
/// ```no_run
/// use uvfs_server::{FileSystem, Options, fs::Node};
///
/// # struct Hello;
/// # impl FileSystem for Hello {}
/// # fn main() -> std::io::Result<()> {
/// let mounted = uvfs_server::mount(Hello, "/mnt", Options::named("hello"))?;
/// let notifier = mounted.session().notifier();
/// // The file has other contents now.
/// notifier.invalidate_inode(Node(2), 0, 0)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Notifier {
    device: Arc<OwnedFd>,
    retrievals: Retrievals,
    writers: Arc<OnceLock<Writers>>,
}

/// Numbers retrievals; apart from the kernel's even numbers of requests, and from the numbers of an earlier server of the mount,
/// whose data may still come.
static RETRIEVALS: LazyLock<AtomicU64> =
    LazyLock::new(|| AtomicU64::new(uvfs_sys::nanoseconds(ClockId::Boottime) | 1));

/// The threads that write a notification now, in memory that the keeper of a mount sees, too: the kernel may have such a
/// thread wait for an answer, and lets no signal end that.
#[derive(Clone, Debug)]
pub(crate) struct Writers {
    memory: Arc<SharedMemory>,
    at: usize,
}

impl Writers {
    /// As many are noted. The keeper waits for the others.
    const MOST: usize = 128;
    pub(crate) const SIZE: usize = Self::MOST * size_of::<u64>();

    /// Those that are noted in memory at this place.
    pub(crate) fn new(memory: Arc<SharedMemory>, at: usize) -> Self {
        Self { memory, at }
    }

    fn places(&self) -> impl Iterator<Item = &AtomicU64> {
        let places = (self.at..self.at + Self::SIZE).step_by(size_of::<u64>());
        places.map(|at| self.memory.u64_at(at))
    }

    fn enter(&self) -> Option<&AtomicU64> {
        let own = rustix::thread::gettid().as_raw_nonzero().get() as u64;
        let takes = |place: &&AtomicU64| {
            let free = place.compare_exchange(0, own, Ordering::AcqRel, Ordering::Relaxed);
            free.is_ok()
        };
        self.places().find(takes)
    }

    /// The numbers of the threads.
    pub(crate) fn all(&self) -> Vec<u64> {
        let all = self.places().map(|place| place.load(Ordering::Acquire));
        all.filter(|thread| *thread != 0).collect()
    }

    /// Forgets those of a process that is dead.
    pub(crate) fn clear(&self) {
        self.places()
            .for_each(|place| place.store(0, Ordering::Release));
    }
}

pub(crate) fn send<T: IntoBytes + Immutable>(
    writers: Option<&Writers>,
    device: BorrowedFd<'_>,
    code: NotifyCode,
    arg: &T,
    data: &[u8],
) -> io::Result<()> {
    let message = message(code, arg, data)?;
    let place = writers.and_then(Writers::enter);
    let wrote = rustix::io::write(device, &message);
    if let Some(place) = place {
        place.store(0, Ordering::Release);
    }
    wrote?;
    Ok(())
}

/// Has the kernel take `data` for what a node holds at `offset`.
pub(crate) fn store(nodeid: u64, offset: u64, data: &[u8]) -> NotifyStoreOut {
    NotifyStoreOut {
        nodeid,
        offset,
        size: data.len() as u32,
        padding: 0,
    }
}

impl Notifier {
    pub(crate) fn new(
        device: Arc<OwnedFd>,
        retrievals: Retrievals,
        writers: Arc<OnceLock<Writers>>,
    ) -> Self {
        Self {
            device,
            retrievals,
            writers,
        }
    }

    fn send<T>(&self, code: NotifyCode, arg: &T, data: &[u8]) -> io::Result<()>
    where
        T: IntoBytes + Immutable,
    {
        send(self.writers.get(), self.device.as_fd(), code, arg, data)
    }

    /// Not being cached is as good as being forgotten.
    fn forgiving(result: io::Result<()>) -> io::Result<()> {
        match result {
            Err(error) if error.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => Ok(()),
            other => other,
        }
    }

    /// Drops a node's attributes, and its pages from `offset` on for `len` bytes (0: to the end)
    /// unless `offset` is negative.
    ///
    /// # Errors
    /// When the mount is gone.
    pub fn invalidate_inode(&self, node: Node, offset: i64, len: i64) -> io::Result<()> {
        let arg = NotifyInvalInodeOut {
            ino: node.0,
            off: offset,
            len,
        };
        Self::forgiving(self.send(NotifyCode::InvalInode, &arg, &[]))
    }

    /// Drops a cached name.
    ///
    /// # Errors
    /// ENOTEMPTY for a directory in use; when the mount is gone.
    pub fn invalidate_entry(&self, parent: Node, name: &CStr) -> io::Result<()> {
        self.drop_entry(parent, name, 0)
    }

    /// Lets a cached name expire: it is looked up again at its next use.
    ///
    /// # Errors
    /// When the mount is gone.
    pub fn expire_entry(&self, parent: Node, name: &CStr) -> io::Result<()> {
        self.drop_entry(parent, name, EXPIRE_ONLY)
    }

    fn drop_entry(&self, parent: Node, name: &CStr, flags: u32) -> io::Result<()> {
        let arg = NotifyInvalEntryOut {
            parent: parent.0,
            namelen: name.count_bytes() as u32,
            flags,
        };
        Self::forgiving(self.send(NotifyCode::InvalEntry, &arg, name.to_bytes_with_nul()))
    }

    /// Says that a name was removed, so that watchers see it.
    ///
    /// # Errors
    /// When the mount is gone.
    pub fn deleted(&self, parent: Node, child: Node, name: &CStr) -> io::Result<()> {
        let arg = NotifyDeleteOut {
            parent: parent.0,
            child: child.0,
            namelen: name.count_bytes() as u32,
            padding: 0,
        };
        Self::forgiving(self.send(NotifyCode::Delete, &arg, name.to_bytes_with_nul()))
    }

    /// Puts data into the page cache of a node.
    ///
    /// # Errors
    /// ENOENT when the kernel doesn't know the node; when the mount is gone.
    pub fn store(&self, node: Node, offset: u64, data: &[u8]) -> io::Result<()> {
        self.send(NotifyCode::Store, &store(node.0, offset, data), data)
    }

    /// Says that a file has grown to `size` bytes or more. Programs that the kernel does not ask the file system
    /// for then reach what is new: sendfile(2), splice(2), copy_file_range(2), ioctl(2) with FIONREAD, and faults
    /// in a mapping go by the size that the kernel knows, and an expired attribute does not change that.
    ///
    /// No page changes: [`Notifier::invalidate_inode`] drops those that are old. If the size turns out to be too large,
    /// drop the pages as well: the next read that asks the file system, or stat(2), then corrects it. As the kernel
    /// waits for the page at the new end, this must not be called on a queue's thread, which may be the one that is to
    /// answer the read of that page.
    ///
    /// # Errors
    /// When the mount is gone.
    pub fn grow(&self, node: Node, size: u64) -> io::Result<()> {
        let Some(last) = size.checked_sub(1) else {
            return Ok(());
        };
        let mut message = message(NotifyCode::Store, &store(node.0, last, &[0]), &[0])?;
        // The kernel moves the size before it fetches the data. Were there any, it would overwrite a byte that a
        // program may just have stored through a mapping.
        message.pop();
        match crate::mount::write_without_end(self.device.as_fd(), &message) {
            Err(Errno::FAULT) | Ok(_) => Ok(()),
            Err(errno) => Self::forgiving(Err(errno.into())),
        }
    }

    /// Reads a node's pages in the page cache from `offset` on, up to `size` bytes, and says where they begin.
    /// Must not be called on a queue's thread, which may be the one that the data comes by.
    ///
    /// # Errors
    /// ENOENT when the kernel doesn't know the node, ETIMEDOUT when no data came for 10 seconds.
    pub fn retrieve(&self, node: Node, offset: u64, size: u32) -> io::Result<(u64, Vec<u8>)> {
        let unique = RETRIEVALS.fetch_add(2, Ordering::Relaxed);
        let (sender, receiver) = sync_channel(1);
        lock(&self.retrievals).insert(unique, sender);
        let ask = NotifyRetrieveOut {
            notify_unique: unique,
            nodeid: node.0,
            offset,
            size,
            padding: 0,
        };
        let asked = self.send(NotifyCode::Retrieve, &ask, &[]);
        let result = asked.and_then(|()| {
            receiver
                .recv_timeout(Duration::from_secs(10))
                .map_err(|_| Errno::TIMEDOUT.into())
        });
        lock(&self.retrievals).remove(&unique);
        result
    }

    /// Says that a file that was polled is ready.
    ///
    /// # Errors
    /// When the mount is gone.
    pub fn poll_ready(&self, kh: u64) -> io::Result<()> {
        self.send(NotifyCode::Poll, &NotifyPollWakeupOut { kh }, &[])
    }

    /// Has all requests under way sent once more (Linux 6.9).
    ///
    /// # Errors
    /// EINVAL where the kernel doesn't know it; when the mount is gone.
    pub fn resend(&self) -> io::Result<()> {
        self.send(NotifyCode::Resend, &(), &[])
    }

    /// Makes every cached name stale (Linux 6.16).
    ///
    /// # Errors
    /// EINVAL where the kernel doesn't know it; when the mount is gone.
    pub fn new_epoch(&self) -> io::Result<()> {
        self.send(NotifyCode::IncEpoch, &(), &[])
    }

    /// Drops nodes that are not in use (Linux 6.18).
    ///
    /// # Errors
    /// EINVAL where the kernel doesn't know it; when the mount is gone.
    pub fn prune(&self, nodes: &[Node]) -> io::Result<()> {
        let nodes: Vec<u64> = nodes.iter().map(|node| node.0).collect();
        let arg = NotifyPruneOut {
            count: nodes.len() as u32,
            ..Default::default()
        };
        self.send(NotifyCode::Prune, &arg, nodes.as_bytes())
    }
}
