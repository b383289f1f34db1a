//! Inodes: which host file a node number stands for, and how it is reached.
//!
//! A file on a mount whose file system has handles is known by its handle alone and holds no
//! descriptor; a bounded cache keeps O_PATH descriptors of those in use. Elsewhere each inode holds
//! an O_PATH descriptor, which also keeps its inode number from being used again.

mod find;
mod key;
mod mounts;
mod removed;

use std::collections::{HashSet, VecDeque};
use std::hash::BuildHasherDefault;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, SystemTime};

use rustix::fs::{OFlags, Statx};
use rustix::io::Errno;
use uvfs_server::fs::{Node, ROOT};

use crate::handle::OpenFile;
use crate::lock::Owners;
use crate::rules::Copy;
use crate::slots::{SHARDS, Slab, shard_of};
use crate::sys::{self, Result};
use crate::watch::FsId;
pub(crate) use key::Key;
use key::{AsIs, ByKey};
pub(crate) use mounts::Mounts;
pub(crate) use removed::{Kept, Removed};
use uvfs_sys::lock;

/// A mount below the source.
pub(crate) struct Mount {
    /// As in `/proc/self/mountinfo`.
    pub(crate) id: u64,
    /// A descriptor that handles of this mount are opened through; `None` when it has none that
    /// can be opened.
    pub(crate) fd: Option<OwnedFd>,
    /// A private copy with rules for access times of its own, once there was a need.
    pub(crate) private: OnceLock<Option<Copy>>,
    /// statfs(2)'s f_type.
    pub(crate) fs_type: i64,
    /// Its device, of all its files where handles tell the inode's number.
    pub(crate) device: (u32, u32),
    /// Its file system, if changes there are watched for.
    pub(crate) watched: OnceLock<FsId>,
    /// It keeps blocks for root.
    pub(crate) reserves: bool,
    /// Its data is in memory.
    pub(crate) in_memory: bool,
    /// Others answer for it, and may not do so.
    pub(crate) remote: bool,
    /// Its file system has no uncached I/O (RWF_DONTCACHE).
    pub(crate) no_dontcache: AtomicBool,
    /// Its files can't be backing files.
    pub(crate) no_backing: AtomicBool,
}

/// A file that changed no longer ago than this may change again without its time changing.
const TIME_GRAIN: Duration = Duration::from_millis(50);

/// The attributes that the kernel was last told, to know whether what it has cached is still right.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Told {
    pub(crate) mtime: (i64, u32),
    pub(crate) size: u64,
}

impl Told {
    pub(crate) fn of(st: &Statx) -> Self {
        Self {
            mtime: (st.stx_mtime.tv_sec, st.stx_mtime.tv_nsec),
            size: st.stx_size,
        }
    }

    /// Whether a change from now on would show in the file's time.
    pub(crate) fn is_settled(&self) -> bool {
        let secs = u64::try_from(self.mtime.0).unwrap_or(0);
        let changed = SystemTime::UNIX_EPOCH + Duration::new(secs, self.mtime.1);
        SystemTime::now()
            .duration_since(changed)
            .is_ok_and(|age| age > TIME_GRAIN)
    }
}

/// A backing file that is registered with the kernel while the inode is open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackingUse {
    pub(crate) id: i32,
    pub(crate) opens: u32,
    /// There was an open for reading and writing among them, which can be mapped to store to.
    pub(crate) mappable: bool,
}

/// The part of a file that the kernel may have cached and that is old after a write that it did not see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stale {
    /// The attributes that were told last are still right.
    Nothing,
    Attributes,
    /// Its pages, and its attributes.
    Contents,
}

/// The changing part of an inode. There are as many as the kernel and clients know files: fields that few
/// have lie elsewhere.
#[derive(Default)]
pub(crate) struct State {
    /// An O_PATH descriptor in the cache.
    fd: Option<Arc<OwnedFd>>,
    /// Of an inode that has lost its last name.
    kept: Option<Arc<Kept>>,
    /// The file as it was last opened. Reaches it when its last name is gone, at no cost.
    pub(crate) open: Weak<OpenFile>,
    /// None when it has none cached.
    pub(crate) told: Option<Told>,
    /// A change since `told` would show in the file's time.
    pub(crate) settled: bool,
    /// The file's size and time when the kernel was given its contents, unasked.
    pub(crate) given: Option<Box<Told>>,
    /// Of the kernel's opens those with a backing file, and how many there are without: never both
    /// at a time.
    pub(crate) backing: Option<BackingUse>,
    pub(crate) plain: u32,
    /// There were opens with a backing file since the last one that the kernel's cache was used by.
    pub(crate) was_backed: bool,
    /// The owners of locks on ranges of it (with the option `host_locks`).
    pub(crate) owners: Owners,
}

impl State {
    /// Whether programs may store to the file through a mapping of its backing file. That moves its times
    /// and nobody tells the kernel of the mount, so it caches no attributes meanwhile.
    pub(crate) fn is_mappable(&self) -> bool {
        self.backing.is_some_and(|backing| backing.mappable)
    }
}

/// A host file that the kernel knows.
pub(crate) struct Inode {
    pub(crate) node: Node,
    pub(crate) key: Key,
    /// S_IFMT bits of its mode.
    pub(crate) kind: u32,
    /// Its time of birth; zeros where the file system has none.
    pub(crate) born: (i64, u32),
    pub(crate) mount: Arc<Mount>,
    /// The O_PATH descriptor of an inode without a handle.
    held: Option<OwnedFd>,
    /// The cached descriptor was used since the cache last looked.
    used: AtomicBool,
    /// Open files of it.
    pub(crate) opens: AtomicUsize,
    state: Mutex<State>,
}

impl Inode {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Closes the cached descriptor, outside the lock.
    fn drop_fd(&self) {
        let fd = self.state().fd.take();
        drop(fd);
    }

    /// Whether these are its attributes, as far as they tell.
    fn is(&self, st: &Statx) -> bool {
        let device = (st.stx_dev_major, st.stx_dev_minor);
        let same = self.key.ino == st.stx_ino && self.key.device == device;
        same && self.mount.id == st.stx_mnt_id && self.born == born(st)
    }

    /// Whether the kernel is told of what the host changes: then it may cache for ever.
    pub(crate) fn is_watched(&self) -> bool {
        self.mount.watched.get().is_some() && self.key.handle.is_some()
    }

    /// A file of the host was written to, by a program of the host or by the kernel of the mount, which
    /// writes to backing files itself. Says what the kernel may have cached of it that is old now.
    pub(crate) fn written(&self) -> Stale {
        let (told, open) = {
            let mut state = self.state();
            state.given = None;
            if !self.is_regular() {
                return Stale::Attributes;
            }
            // The kernel drops pages that are older than a backing file before anybody can read them.
            if state.backing.is_none() && (!state.was_backed || state.plain > 0) {
                return Stale::Contents;
            }
            (state.told, state.open.upgrade())
        };
        let Some(told) = told else {
            return Stale::Nothing;
        };
        let now = match (open, &self.mount.fd, self.key.handle()) {
            (Some(open), ..) => sys::stat(open.as_fd()),
            (None, Some(mount), Some(handle)) => {
                sys::open_handle(mount.as_fd(), handle, OFlags::PATH)
                    .and_then(|fd| sys::stat(fd.as_fd()))
            }
            _ => return Stale::Attributes,
        };
        match now.is_ok_and(|now| told == Told::of(&now)) {
            true => Stale::Nothing,
            false => Stale::Attributes,
        }
    }

    pub(crate) fn is_regular(&self) -> bool {
        self.kind == libc::S_IFREG
    }

    pub(crate) fn is_dir(&self) -> bool {
        self.kind == libc::S_IFDIR
    }
}

struct Known {
    inode: Arc<Inode>,
    /// How often the kernel was given the node; it takes them back with FORGET.
    lookups: u64,
}

#[derive(Default)]
struct Shard {
    by_key: HashSet<ByKey, BuildHasherDefault<AsIs>>,
    slots: Slab<Known>,
}

/// All inodes that the kernel knows, by node number and by key. A key and the number given to it
/// are in the same shard, so that a count changes under the lock that finds it: a lookup and a
/// forget of the same inode come one after the other.
pub(crate) struct Inodes {
    shards: [Mutex<Shard>; SHARDS],
    root: Arc<Inode>,
}

impl Inodes {
    pub(crate) fn new(root: Arc<Inode>) -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            root,
        }
    }

    /// The root's inode.
    pub(crate) fn root(&self) -> &Arc<Inode> {
        &self.root
    }

    /// The inode of a node number.
    pub(crate) fn get(&self, node: Node) -> Result<Arc<Inode>> {
        if node == ROOT {
            return Ok(self.root.clone());
        }
        let known = &mut lock(&self.shards[shard_of(node.0)]).slots;
        known
            .get(node.0)
            .map(|known| known.inode.clone())
            .ok_or(Errno::STALE)
    }

    fn shard(key: &Key) -> usize {
        // Bits in the middle; a set uses the lowest and the highest ones.
        (key.hash >> 32) as usize % SHARDS
    }

    /// Counts a lookup of the inode with this key, if there is one.
    fn find(&self, key: &Key) -> Option<Arc<Inode>> {
        if self.root.key == *key {
            return Some(self.root.clone());
        }
        let mut shard = lock(&self.shards[Self::shard(key)]);
        let inode = shard.by_key.get(key)?.inode.clone();
        shard.slots.get(inode.node.0)?.lookups += 1;
        Some(inode)
    }

    /// The inode with this key, if the kernel knows it. Counts nothing.
    fn peek(&self, key: &Key) -> Option<Arc<Inode>> {
        let shard = lock(&self.shards[Self::shard(key)]);
        shard.by_key.get(key).map(|known| known.inode.clone())
    }

    /// The inode with this key, the root's as well. Counts nothing.
    pub(crate) fn known(&self, key: &Key) -> Option<Arc<Inode>> {
        match self.root.key == *key {
            true => Some(self.root.clone()),
            false => self.peek(key),
        }
    }

    /// The numbers of all nodes.
    pub(crate) fn nodes(&self) -> Vec<Node> {
        let mut nodes = vec![ROOT];
        for shard in &self.shards {
            let shard = lock(shard);
            nodes.extend(shard.by_key.iter().map(|known| known.inode.node));
        }
        nodes
    }

    /// Counts a lookup of the inode with this key and makes it with `make` if there is none.
    fn find_or_insert(
        &self,
        key: Key,
        make: impl FnOnce(Node, Key) -> Arc<Inode>,
    ) -> Result<Arc<Inode>> {
        if self.root.key == key {
            return Ok(self.root.clone());
        }
        let index = Self::shard(&key);
        let mut shard = lock(&self.shards[index]);
        let shard = &mut *shard;
        if let Some(known) = shard.by_key.get(&key) {
            let inode = known.inode.clone();
            shard.slots.get(inode.node.0).ok_or(Errno::IO)?.lookups += 1;
            return Ok(inode);
        }
        let node = shard
            .slots
            .insert(index, |node| Known {
                inode: make(Node(node), key),
                lookups: 1,
            })
            .ok_or(Errno::NFILE)?;
        let inode = shard.slots.get(node).ok_or(Errno::IO)?.inode.clone();
        let added = shard.by_key.insert(ByKey {
            hash: inode.key.hash,
            inode: inode.clone(),
        });
        debug_assert!(added, "it was not there under the same lock");
        Ok(inode)
    }

    /// Counts one more lookup of a node.
    pub(crate) fn remember(&self, node: Node) -> Result<()> {
        if node == ROOT {
            return Ok(());
        }
        let mut shard = lock(&self.shards[shard_of(node.0)]);
        shard.slots.get(node.0).ok_or(Errno::STALE)?.lookups += 1;
        Ok(())
    }

    /// How many lookups of a node are counted.
    pub(crate) fn lookups(&self, node: Node) -> Option<u64> {
        let mut shard = lock(&self.shards[shard_of(node.0)]);
        Some(shard.slots.get(node.0)?.lookups)
    }

    /// Takes back lookups of a node.
    pub(crate) fn forget(&self, node: Node, lookups: u64) {
        if node == ROOT {
            return;
        }
        let gone = {
            let mut shard = lock(&self.shards[shard_of(node.0)]);
            let Some(known) = shard.slots.get(node.0) else {
                tracing::warn!(%node, "the kernel forgot a node that it did not know");
                return;
            };
            if lookups > known.lookups {
                tracing::warn!(
                    %node,
                    lookups,
                    counted = known.lookups,
                    "forgotten too often"
                );
            }
            known.lookups = known.lookups.saturating_sub(lookups);
            if known.lookups > 0 {
                return;
            }
            let gone = shard.slots.remove(node.0);
            if let Some(gone) = &gone {
                shard.by_key.remove(&gone.inode.key);
            }
            gone
        };
        // Its descriptors close without the lock.
        drop(gone);
    }

    /// How many inodes the kernel knows, the root not counted.
    pub(crate) fn len(&self) -> usize {
        self.shards
            .iter()
            .map(|shard| lock(shard).slots.len())
            .sum()
    }

    /// Forgets everything, after the mount has ended.
    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let old = std::mem::take(&mut *lock(shard));
            drop(old);
        }
    }
}

/// The bounded cache of O_PATH descriptors. The descriptors are in the inodes; this is the order in
/// which they go, oldest first unless used since.
pub(crate) struct PathFds {
    queue: Mutex<VecDeque<Weak<Inode>>>,
    capacity: usize,
}

impl PathFds {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            queue: Mutex::new(VecDeque::with_capacity(capacity + 1)),
            capacity,
        }
    }

    fn insert(&self, inode: &Arc<Inode>, fd: Arc<OwnedFd>) {
        {
            let mut state = inode.state();
            if state.fd.is_some() {
                return;
            }
            state.fd = Some(fd);
        }
        let mut queue = lock(&self.queue);
        queue.push_back(Arc::downgrade(inode));
        // Each round drops an entry or clears a flag, so this ends within two rounds of the queue
        // even while others set the flags again.
        for _ in 0..2 * queue.len() {
            if queue.len() <= self.capacity {
                return;
            }
            let Some(oldest) = queue.pop_front() else {
                return;
            };
            let Some(oldest) = oldest.upgrade() else {
                continue;
            };
            if oldest.used.swap(false, Ordering::Relaxed) {
                queue.push_back(Arc::downgrade(&oldest));
                continue;
            }
            oldest.drop_fd();
        }
    }

    /// Closes all that no call uses at the moment, when descriptors run out.
    fn clear(&self) {
        let queue = std::mem::take(&mut *lock(&self.queue));
        for inode in queue.iter().filter_map(Weak::upgrade) {
            inode.drop_fd();
        }
    }
}

/// A descriptor that stands for an inode, O_PATH or not, for the length of a call.
pub(crate) enum PathFd {
    Held(Arc<Inode>),
    Cached(Arc<OwnedFd>),
    Kept(Arc<Kept>),
    Open(Arc<OpenFile>),
}

impl AsFd for PathFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            PathFd::Held(inode) => match &inode.held {
                Some(fd) => fd.as_fd(),
                None => unreachable!("only made of an inode that holds one"),
            },
            PathFd::Cached(fd) => fd.as_fd(),
            PathFd::Kept(kept) => kept.as_fd(),
            PathFd::Open(file) => file.as_fd(),
        }
    }
}

/// A file's time of birth.
pub(crate) fn born(st: &Statx) -> (i64, u32) {
    (st.stx_btime.tv_sec, st.stx_btime.tv_nsec)
}

/// The root's inode.
pub(crate) fn root(source: OwnedFd, mounts: &Mounts) -> Result<Arc<Inode>> {
    let st = sys::stat(source.as_fd())?;
    let kind = u32::from(st.stx_mode) & libc::S_IFMT;
    let mount = Arc::new(Mount::new(st.stx_mnt_id, source.as_fd(), &st));
    mounts.add(&mount);
    let handle = match mount.fd {
        Some(_) => Some(sys::handle_at(source.as_fd(), c"")?.0),
        None => None,
    };
    Ok(Arc::new(Inode {
        node: ROOT,
        key: Key::new(st.stx_mnt_id, &st, handle),
        kind,
        born: born(&st),
        mount,
        held: Some(source),
        used: AtomicBool::new(false),
        opens: AtomicUsize::new(0),
        state: Mutex::default(),
    }))
}
