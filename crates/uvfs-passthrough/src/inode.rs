//! Inodes: which host file a node number stands for, and how it is reached.
//!
//! A file on a mount whose file system has handles is known by its handle alone and holds no
//! descriptor; a bounded cache keeps O_PATH descriptors of those in use. Elsewhere each inode holds
//! an O_PATH descriptor, which also keeps its inode number from being used again.

use std::borrow::Borrow;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::CStr;
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, SystemTime};

use rustix::fs::{OFlags, Statx};
use rustix::io::Errno;
use uvfs_server::fs::{ROOT, Unlinked};

use crate::Source;
use crate::apart::is_remote;
use crate::handle::OpenFile;
use crate::lock::Owners;
use crate::rules::Copy;
use crate::slots::{SHARDS, Slab, lock, shard_of};
use crate::sys::{self, FileHandle, Result};
use crate::watch::{FsId, Watching};

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
    /// Its data is in memory.
    pub(crate) in_memory: bool,
    /// Others answer for it, and may not do so.
    pub(crate) remote: bool,
    /// Its file system has no uncached I/O (RWF_DONTCACHE).
    pub(crate) no_dontcache: AtomicBool,
    /// Its files can't be backing files.
    pub(crate) no_backing: AtomicBool,
}

/// What identifies an inode of the host.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// Of the rest. Made once: for each name it is used several times, and when a set grows.
    hash: u64,
    mount: u64,
    /// st_dev and st_ino.
    device: (u32, u32),
    ino: u64,
    /// Tells apart uses of the same inode number. `None` where a held descriptor keeps it in use.
    handle: Option<FileHandle>,
}

impl Key {
    /// Of the inode with these attributes, on a mount with this id.
    pub(crate) fn new(mount: u64, st: &Statx, handle: Option<FileHandle>) -> Self {
        let device = (st.stx_dev_major, st.stx_dev_minor);
        Self::of(mount, device, st.stx_ino, handle)
    }

    pub(crate) fn of(mount: u64, device: (u32, u32), ino: u64, handle: Option<FileHandle>) -> Self {
        static SEED: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        let mut hasher = SEED.build_hasher();
        hasher.write_u64(ino);
        if let Some(handle) = &handle {
            // With the number it is nearly always enough.
            hasher.write(handle.parts().1);
        }
        Self {
            hash: hasher.finish(),
            mount,
            device,
            ino,
            handle,
        }
    }

    pub(crate) fn ino(&self) -> u64 {
        self.ino
    }

    pub(crate) fn device(&self) -> (u32, u32) {
        self.device
    }

    pub(crate) fn handle(&self) -> Option<&FileHandle> {
        self.handle.as_ref()
    }
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

/// What changes in an inode. There are as many as the kernel and clients know files: what few of them
/// have lies elsewhere.
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
    /// What the file was when the kernel was given its contents, unasked.
    pub(crate) given: Option<Box<Told>>,
    /// Of the kernel's opens those with a backing file, and how many there are without: never both
    /// at a time.
    pub(crate) backing: Option<BackingUse>,
    pub(crate) plain: u32,
    /// There were opens with a backing file since the last one that the kernel's cache was used by.
    pub(crate) was_backed: bool,
    /// Who locks ranges of it (with the option `host_locks`).
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
    pub(crate) node: u64,
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

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// An inode in its set, found by its key.
struct ByKey {
    /// The key's, at hand when the set grows.
    hash: u64,
    inode: Arc<Inode>,
}

impl Borrow<Key> for ByKey {
    fn borrow(&self) -> &Key {
        &self.inode.key
    }
}
impl PartialEq for ByKey {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.inode.key == other.inode.key
    }
}
impl Eq for ByKey {}
impl Hash for ByKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// Takes the hash that a key has for what it is.
#[derive(Default)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys write a number")
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
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
    pub(crate) fn get(&self, node: u64) -> Result<Arc<Inode>> {
        if node == ROOT {
            return Ok(self.root.clone());
        }
        let known = &mut lock(&self.shards[shard_of(node)]).slots;
        known
            .get(node)
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
        shard.slots.get(inode.node)?.lookups += 1;
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
    pub(crate) fn nodes(&self) -> Vec<u64> {
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
        make: impl FnOnce(u64, Key) -> Arc<Inode>,
    ) -> Result<Arc<Inode>> {
        if self.root.key == key {
            return Ok(self.root.clone());
        }
        let index = Self::shard(&key);
        let mut shard = lock(&self.shards[index]);
        let shard = &mut *shard;
        if let Some(known) = shard.by_key.get(&key) {
            let inode = known.inode.clone();
            shard.slots.get(inode.node).ok_or(Errno::IO)?.lookups += 1;
            return Ok(inode);
        }
        let node = shard
            .slots
            .insert(index, |node| Known {
                inode: make(node, key),
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
    pub(crate) fn remember(&self, node: u64) -> Result<()> {
        if node == ROOT {
            return Ok(());
        }
        let mut shard = lock(&self.shards[shard_of(node)]);
        shard.slots.get(node).ok_or(Errno::STALE)?.lookups += 1;
        Ok(())
    }

    /// How many lookups of a node are counted.
    pub(crate) fn lookups(&self, node: u64) -> Option<u64> {
        let mut shard = lock(&self.shards[shard_of(node)]);
        Some(shard.slots.get(node)?.lookups)
    }

    /// Takes back lookups of a node.
    pub(crate) fn forget(&self, node: u64, lookups: u64) {
        if node == ROOT {
            return;
        }
        let gone = {
            let mut shard = lock(&self.shards[shard_of(node)]);
            let Some(known) = shard.slots.get(node) else {
                tracing::warn!(node, "the kernel forgot a node that it did not know");
                return;
            };
            if lookups > known.lookups {
                tracing::warn!(
                    node,
                    lookups,
                    counted = known.lookups,
                    "forgotten too often"
                );
            }
            known.lookups = known.lookups.saturating_sub(lookups);
            if known.lookups > 0 {
                return;
            }
            let gone = shard.slots.remove(node);
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

/// Descriptors of inodes whose last name was removed through the mount, kept for those who still
/// are in or at them: no handle leads there any more. They close when the kernel forgets the inode,
/// mostly at once, or when there are too many, oldest first.
pub(crate) struct Removed {
    queue: Mutex<VecDeque<Weak<Inode>>>,
    /// How many the queue may hold, forgotten ones included.
    capacity: usize,
    open: Arc<OpenCount>,
}

/// How many descriptors are open, told when one has closed.
#[derive(Default)]
struct OpenCount {
    count: Mutex<usize>,
    closed: Condvar,
    /// Who waits for that. Only changed under the lock.
    waiting: AtomicUsize,
}

/// An O_PATH descriptor of an inode that has lost its last name.
pub(crate) struct Kept {
    /// Always there until it is dropped.
    fd: Option<OwnedFd>,
    open: Arc<OpenCount>,
}

impl AsFd for Kept {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            None => unreachable!("only dropping takes it"),
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // Counted until it has closed, which is when its file's space is free.
        self.fd = None;
        *lock(&self.open.count) -= 1;
        if self.open.waiting.load(Ordering::Relaxed) > 0 {
            self.open.closed.notify_all();
        }
    }
}

/// How long to wait for others to close descriptors, where space is wanted.
const CLOSING: Duration = Duration::from_millis(100);

impl Removed {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            queue: Mutex::default(),
            capacity,
            open: Arc::default(),
        }
    }

    /// Keeps a descriptor of an inode. What is not needed closes without a lock.
    fn keep(&self, inode: &Arc<Inode>, fd: OwnedFd) {
        let cached = {
            let mut state = inode.state();
            if state.kept.is_some() {
                drop(state);
                return;
            }
            *lock(&self.open.count) += 1;
            state.kept = Some(Arc::new(Kept {
                fd: Some(fd),
                open: self.open.clone(),
            }));
            state.fd.take()
        };
        drop(cached);
        let mut too_many = VecDeque::new();
        {
            let mut queue = lock(&self.queue);
            queue.push_back(Arc::downgrade(inode));
            if queue.len() > self.capacity {
                queue.retain(|inode| inode.strong_count() > 0);
                // Half stay, so that this is done once in many times.
                let excess = queue.len().saturating_sub(self.capacity / 2);
                too_many.extend(queue.drain(..excess));
            }
        }
        Self::close(&too_many);
    }

    fn clear(&self) {
        let queue = std::mem::take(&mut *lock(&self.queue));
        Self::close(&queue);
    }

    fn close(inodes: &VecDeque<Weak<Inode>>) {
        for inode in inodes.iter().filter_map(Weak::upgrade) {
            let kept = inode.state().kept.take();
            drop(kept);
        }
    }

    /// Closes all, for the space of their files. Whether any has closed.
    pub(crate) fn makes_room(&self) -> bool {
        let before = *lock(&self.open.count);
        if before == 0 {
            return false;
        }
        self.clear();
        // One that is being forgotten, or used, is another thread's to close.
        let count = lock(&self.open.count);
        self.open.waiting.fetch_add(1, Ordering::Relaxed);
        let waited = self
            .open
            .closed
            .wait_timeout_while(count, CLOSING, |count| *count >= before);
        let (count, _) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        self.open.waiting.fetch_sub(1, Ordering::Relaxed);
        *count < before
    }
}

/// A name that is about to be removed, of what may have to be kept or told.
pub(crate) enum Leaving {
    /// What the name led to when its handle was asked for, and then was opened.
    Known(Arc<Inode>, OwnedFd),
    /// What else has a handle.
    Handle {
        fd: OwnedFd,
        handle: FileHandle,
        mount: u64,
    },
    /// What else it is, and its links.
    Key(Key, u32),
}

impl Leaving {
    fn of(fd: OwnedFd) -> Option<Self> {
        let (handle, mount) = sys::handle_at(fd.as_fd(), c"").ok()?;
        Some(Self::Handle { fd, handle, mount })
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

const O_PATH: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The mounts seen below the source, by id. A mount in use is kept by its inodes, and its id is not
/// used again while its descriptor is open.
#[derive(Default)]
pub(crate) struct Mounts {
    known: Mutex<HashMap<u64, Weak<Mount>>>,
    pub(crate) watching: Watching,
}

impl Mounts {
    /// The mount that `fd`, a descriptor of a file of `kind` found in `parent`, is on.
    fn get(&self, id: u64, fd: BorrowedFd<'_>, st: &Statx, parent: &Inode) -> Arc<Mount> {
        if let Some(mount) = lock(&self.known).get(&id).and_then(Weak::upgrade) {
            return mount;
        }
        let mount = Arc::new(Mount::new(id, fd, st));
        // The name that leads there is cached by what is known of the mount.
        if parent.is_watched()
            && let Some(watcher) = self.watching.get()
        {
            watcher.add(&mount);
        }
        let mut mounts = lock(&self.known);
        if let Some(other) = mounts.get(&id).and_then(Weak::upgrade) {
            return other;
        }
        mounts.retain(|_, mount| mount.strong_count() > 0);
        mounts.insert(id, Arc::downgrade(&mount));
        mount
    }

    fn add(&self, mount: &Arc<Mount>) {
        lock(&self.known).insert(mount.id, Arc::downgrade(mount));
    }

    /// All mounts in use.
    pub(crate) fn all(&self) -> Vec<Arc<Mount>> {
        let known = lock(&self.known);
        known.values().filter_map(Weak::upgrade).collect()
    }

    /// The mounts in use whose file systems are watched.
    pub(crate) fn watched(&self) -> Vec<Arc<Mount>> {
        let mut mounts = self.all();
        mounts.retain(|mount| mount.watched.get().is_some());
        mounts
    }
}

impl Mount {
    /// Of a file on it. It has handles if that file has one which can be opened.
    fn new(id: u64, file: BorrowedFd<'_>, st: &Statx) -> Self {
        let kind = u32::from(st.stx_mode) & libc::S_IFMT;
        let try_handles = || {
            let fd = match kind {
                libc::S_IFDIR => sys::reopen(file, OFlags::RDONLY | OFlags::DIRECTORY)?,
                libc::S_IFREG => sys::reopen(file, OFlags::RDONLY | OFlags::NONBLOCK)?,
                // Opening anything else could act on a device or wait for a peer.
                _ => return Err(Errno::OPNOTSUPP),
            };
            let (handle, _) = sys::handle_at(file, c"")?;
            sys::open_handle(fd.as_fd(), &handle, O_PATH)?;
            Ok(fd)
        };
        let fd = try_handles();
        if let Err(errno) = &fd {
            tracing::info!(mount = id, %errno, "no file handles: a descriptor for every inode");
        }
        let fs_type = rustix::fs::fstatfs(file).map_or(0, |stat| stat.f_type);
        Self {
            id,
            fd: fd.ok(),
            private: OnceLock::new(),
            fs_type,
            remote: is_remote(fs_type),
            device: (st.stx_dev_major, st.stx_dev_minor),
            watched: OnceLock::new(),
            in_memory: uvfs_io::ops::in_memory(file),
            no_dontcache: AtomicBool::new(false),
            no_backing: AtomicBool::new(false),
        }
    }
}

/// Whether handles of what is in a directory say which inode they are of.
fn tells_number(directory: &Inode) -> bool {
    let handle = directory.key.handle();
    handle.is_some_and(|handle| handle.ino(directory.mount.fs_type).is_some())
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

impl Source {
    pub(crate) fn inode(&self, node: u64) -> Result<Arc<Inode>> {
        self.inodes.get(node)
    }

    /// A descriptor that stands for the inode; good for *at() calls and /proc paths, not for
    /// reading.
    pub(crate) fn path_fd(&self, inode: &Arc<Inode>) -> Result<PathFd> {
        if inode.held.is_some() {
            return Ok(PathFd::Held(inode.clone()));
        }
        {
            let state = inode.state();
            if let Some(kept) = &state.kept {
                return Ok(PathFd::Kept(kept.clone()));
            }
            if let Some(fd) = &state.fd {
                inode.used.store(true, Ordering::Relaxed);
                return Ok(PathFd::Cached(fd.clone()));
            }
            if let Some(file) = state.open.upgrade() {
                return Ok(PathFd::Open(file));
            }
        }
        let fd = Arc::new(self.open_inode(inode, O_PATH)?);
        self.path_fds.insert(inode, fd.clone());
        Ok(PathFd::Cached(fd))
    }

    /// A descriptor for `*at()` calls with names in a directory.
    pub(crate) fn dir_fd(&self, node: u64) -> Result<(Arc<Inode>, PathFd)> {
        let inode = self.inode(node)?;
        if !inode.is_dir() {
            return Err(Errno::NOTDIR);
        }
        let fd = self.path_fd(&inode)?;
        Ok((inode, fd))
    }

    /// Opens the inode. Only what is safe to open: never a device, pipe or socket but by O_PATH.
    pub(crate) fn open_inode(&self, inode: &Arc<Inode>, flags: OFlags) -> Result<OwnedFd> {
        if !flags.contains(OFlags::PATH) && !inode.is_regular() && !inode.is_dir() {
            return Err(Errno::NXIO);
        }
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        let attempt = || {
            if let Some(held) = &inode.held {
                return sys::reopen(held.as_fd(), flags);
            }
            let (Some(mount), Some(handle)) = (self.mount_for(inode, flags), &inode.key.handle)
            else {
                unreachable!("an inode that holds no descriptor has a handle")
            };
            match sys::open_handle(mount, handle, flags) {
                Err(Errno::STALE) => {
                    // Some file systems find no handle of a file whose last name is gone.
                    let state = inode.state();
                    let open = state.open.upgrade();
                    let (kept, fd) = (state.kept.clone(), state.fd.clone());
                    drop(state);
                    match (open, kept, fd) {
                        (Some(file), _, _) => sys::reopen(file.as_fd(), flags),
                        (_, Some(kept), _) => sys::reopen(kept.as_fd(), flags),
                        (_, _, Some(fd)) => sys::reopen(fd.as_fd(), flags),
                        _ => Err(Errno::STALE),
                    }
                }
                result => result,
            }
        };
        self.with_descriptors(attempt)
    }

    /// Makes an attempt once more without the descriptors that are kept, if there was none left.
    fn with_descriptors(&self, attempt: impl Fn() -> Result<OwnedFd>) -> Result<OwnedFd> {
        match attempt() {
            Err(Errno::MFILE | Errno::NFILE) => {
                self.path_fds.clear();
                self.removed.clear();
                attempt()
            }
            result => result,
        }
    }

    /// Opens a name as O_PATH.
    fn open_name(&self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd> {
        self.with_descriptors(|| rustix::fs::openat(dir, name, O_PATH, rustix::fs::Mode::empty()))
    }

    /// Finds a name and counts a lookup of what it names.
    pub(crate) fn find(
        &self,
        parent: &Arc<Inode>,
        dir: BorrowedFd<'_>,
        name: &CStr,
    ) -> Result<(Arc<Inode>, Statx)> {
        let batches = self.mounts.watching.batches();
        if parent.mount.fd.is_some() {
            // Without opening it, if its handle tells its number or the kernel knows it already.
            match sys::handle_at(dir, name) {
                Ok((handle, mount)) if mount == parent.mount.id => {
                    let st = sys::stat_at(dir, name)?;
                    let key = Key::new(mount, &st, Some(handle));
                    // The name may have changed hands between the two calls. Then the number is
                    // another, but for a file that is gone (its handle leads nowhere) and whose
                    // number the next one got.
                    let number = key.handle().and_then(|it| it.ino(parent.mount.fs_type));
                    if number == Some(st.stx_ino) && st.stx_mnt_id == mount {
                        let inode = self.insert(key, parent.mount.clone(), &st, None)?;
                        if self.mounts.watching.batches() == batches {
                            return Ok((inode, st));
                        }
                        // The host changed something, maybe this before it was known.
                        match sys::stat_at(dir, name) {
                            Ok(st) if inode.is(&st) => return Ok((inode, st)),
                            _ => self.inodes.forget(inode.node, 1),
                        }
                        return self.find_new(parent, dir, name);
                    }
                    // Where handles don't tell: no inode that is known has both.
                    if let Some(inode) = self.inodes.find(&key) {
                        return Ok((inode, st));
                    }
                }
                Err(errno @ (Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG)) => {
                    return Err(errno);
                }
                // On another mount, or of a kind without handles.
                _ => {}
            }
        }
        self.find_new(parent, dir, name)
    }

    /// As `find`, of a name that was just made.
    pub(crate) fn find_new(
        &self,
        parent: &Arc<Inode>,
        dir: BorrowedFd<'_>,
        name: &CStr,
    ) -> Result<(Arc<Inode>, Statx)> {
        let fd = self.open_name(dir, name)?;
        self.adopt(parent, fd)
    }

    /// Counts a lookup of what `fd`, an O_PATH descriptor found in `parent`, stands for.
    pub(crate) fn adopt(&self, parent: &Arc<Inode>, fd: OwnedFd) -> Result<(Arc<Inode>, Statx)> {
        let batches = self.mounts.watching.batches();
        let st = self.stat_found(parent, fd.as_fd())?;
        let (key, mount) = self.identify(parent, fd.as_fd(), &st)?;
        if key.handle.is_none() {
            let inode = self.insert(key, mount, &st, Some(fd))?;
            return Ok((inode, st));
        }
        let inode = self.insert(key, mount, &st, None)?;
        let st = self.current(batches, st, fd.as_fd(), &inode)?;
        if inode.is_dir() && inode.held.is_none() {
            // What is found in a directory is likely wanted next.
            self.path_fds.insert(&inode, Arc::new(fd));
        }
        Ok((inode, st))
    }

    /// Counts a lookup of the file that was just made and opened as `file` in `parent`.
    pub(crate) fn adopt_open(
        &self,
        parent: &Arc<Inode>,
        file: BorrowedFd<'_>,
    ) -> Result<(Arc<Inode>, Statx)> {
        let batches = self.mounts.watching.batches();
        let st = sys::stat(file)?;
        let (key, mount) = self.identify(parent, file, &st)?;
        let held = match key.handle {
            Some(_) => None,
            // Not a copy of `file`: that would keep the file open for writing.
            None => Some(sys::reopen(file, OFlags::PATH)?),
        };
        let inode = self.insert(key, mount, &st, held)?;
        let st = self.current(batches, st, file, &inode)?;
        Ok((inode, st))
    }

    /// The attributes of an inode that was just looked up as `fd`, read again if the host has changed
    /// something since `batches`: then the inode may have changed before it was known.
    fn current(&self, batches: u64, st: Statx, fd: BorrowedFd<'_>, inode: &Inode) -> Result<Statx> {
        if self.mounts.watching.batches() == batches {
            return Ok(st);
        }
        sys::stat(fd).inspect_err(|_| self.inodes.forget(inode.node, 1))
    }

    fn identify(
        &self,
        parent: &Arc<Inode>,
        fd: BorrowedFd<'_>,
        st: &Statx,
    ) -> Result<(Key, Arc<Mount>)> {
        let mount = if st.stx_mnt_id == parent.mount.id {
            parent.mount.clone()
        } else if self.options.xdev {
            return Err(Errno::XDEV);
        } else {
            self.mounts.get(st.stx_mnt_id, fd, st, parent)
        };
        let handle = match mount.fd {
            Some(_) => sys::handle_at(fd, c"").ok().map(|(handle, _)| handle),
            None => None,
        };
        Ok((Key::new(mount.id, st, handle), mount))
    }

    fn insert(
        &self,
        key: Key,
        mount: Arc<Mount>,
        st: &Statx,
        held: Option<OwnedFd>,
    ) -> Result<Arc<Inode>> {
        debug_assert!(held.is_some() || (key.handle.is_some() && mount.fd.is_some()));
        self.inodes.find_or_insert(key, |node, key| {
            Arc::new(Inode {
                node,
                key,
                kind: u32::from(st.stx_mode) & libc::S_IFMT,
                born: born(st),
                mount,
                held,
                used: AtomicBool::new(false),
                opens: AtomicUsize::new(0),
                state: Mutex::default(),
            })
        })
    }

    /// To be called before a name is removed, and given to `keep_removed` afterwards. Nothing where
    /// the name leads to what nobody knows.
    pub(crate) fn leaving(
        &self,
        parent: &Arc<Inode>,
        dir: BorrowedFd<'_>,
        name: &CStr,
    ) -> Option<Leaving> {
        if parent.mount.fd.is_none() {
            // Every inode holds a descriptor.
            let st = sys::stat_at(dir, name).ok()?;
            let key = Key::new(st.stx_mnt_id, &st, None);
            return Some(Leaving::Key(key, st.stx_nlink));
        }
        if tells_number(parent) {
            match sys::handle_at(dir, name) {
                Ok((handle, mount)) if mount == parent.mount.id => {
                    // A mount of such a file system has one device.
                    if let Some(ino) = handle.ino(parent.mount.fs_type) {
                        let key = Key::of(mount, parent.key.device, ino, Some(handle));
                        let inode = self.inodes.peek(&key)?;
                        let fd = self.open_name(dir, name).ok()?;
                        return Some(Leaving::Known(inode, fd));
                    }
                }
                Err(Errno::NOENT) => return None,
                // On another mount, or of a kind without handles.
                _ => {}
            }
        }
        Leaving::of(self.open_name(dir, name).ok()?)
    }

    /// Says what lost a name, and if that was its last one keeps it reachable for those who still
    /// are in or at it.
    pub(crate) fn keep_removed(&self, leaving: Option<Leaving>) -> Unlinked {
        match leaving {
            None => Unlinked::default(),
            Some(Leaving::Key(key, links)) => {
                let inode = self.inodes.peek(&key);
                let is_dir = inode.as_ref().is_some_and(|inode| inode.is_dir());
                Unlinked {
                    node: inode.map(|inode| inode.node),
                    last: links <= 1 || is_dir,
                }
            }
            Some(Leaving::Known(inode, fd)) => {
                let Ok(st) = sys::stat(fd.as_fd()) else {
                    return Unlinked::default();
                };
                if inode.is(&st) {
                    self.lost_name(Some(inode), fd, &st)
                } else {
                    // The name changed hands between the two calls.
                    let handle = sys::handle_at(fd.as_fd(), c"").ok();
                    let key = handle.map(|(handle, mount)| Key::new(mount, &st, Some(handle)));
                    let inode = key.and_then(|key| self.inodes.peek(&key));
                    self.lost_name(inode, fd, &st)
                }
            }
            Some(Leaving::Handle { fd, handle, mount }) => {
                let Ok(st) = sys::stat(fd.as_fd()) else {
                    return Unlinked::default();
                };
                let key = Key::new(mount, &st, Some(handle));
                self.lost_name(self.inodes.peek(&key), fd, &st)
            }
        }
    }

    /// `fd` has lost a name: of the inode, if it is known.
    fn lost_name(&self, inode: Option<Arc<Inode>>, fd: OwnedFd, st: &Statx) -> Unlinked {
        let is_dir = u32::from(st.stx_mode) & libc::S_IFMT == libc::S_IFDIR;
        let last = st.stx_nlink == 0 || is_dir;
        if let Some(inode) = &inode
            && last
        {
            self.removed.keep(inode, fd);
        }
        Unlinked {
            node: inode.map(|inode| inode.node),
            last,
        }
    }

    /// Whether trying again may help: what is kept of removed files also keeps its space from being used.
    pub(crate) fn makes_room(&self, errno: Errno) -> bool {
        matches!(errno, Errno::NOSPC | Errno::DQUOT) && self.removed.makes_room()
    }
}
