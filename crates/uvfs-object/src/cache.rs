//! The cache on the local disk: two files for each version of an object, evicted by use.

use std::collections::HashMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use rustix::fs::{FlockOperation, flock, statvfs};
use sha2::{Digest, Sha256};
use tokio::sync::Notify;
use uvfs_io::ops;
use uvfs_server::fs::{Errno, Error, ErrorContext, Result};

use crate::journal::NUMBERS;
use crate::map::{self, ENTRIES};
use crate::object::Object;
use crate::store::Version;

/// Mounts of one store that have a cache each.
const MOUNTS: u32 = 64;
/// The part of the free space that the cache takes by default.
const SHARE: u64 = 10;
/// The smallest cache: less could not hold what the reads of one moment need.
const LEAST: u64 = 64 << 20;

/// A version's number: its files are named by it.
pub(crate) type Id = [u8; 16];

/// The two files of a version.
struct Files {
    data: PathBuf,
    map: PathBuf,
}

/// The directory of one mount's cache.
pub(crate) struct Cache {
    root: PathBuf,
    /// The directories of other mounts of the store.
    others: Vec<PathBuf>,
    /// `root`, open to sync the names in it.
    names: Arc<ops::File>,
    _lock: File,
    limit: u64,
    /// The files of drafts that earlier mounts left.
    drafts: Vec<PathBuf>,
    /// A record of a draft has changed.
    pub(crate) noted: Notify,
    /// Bytes of drafts.
    drafted: AtomicU64,
    /// There are fewer of them.
    pub(crate) ended: Notify,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    versions: HashMap<Id, Slot>,
    /// Bytes of all pieces.
    used: u64,
    clock: u64,
}

struct Slot {
    bytes: u64,
    /// The clock when it was last opened.
    used: u64,
    /// Whether its pieces need no comparison of checksums: see [`Object::new`].
    verified: Arc<AtomicBool>,
    object: Weak<Object>,
}

/// A directory for the cache of one mount. Its lock shows other mounts that it is taken.
pub(crate) struct Lock {
    root: PathBuf,
    /// The directories of other mounts of the store.
    others: Vec<PathBuf>,
    file: File,
}

impl Lock {
    /// Takes a directory below `dir` for a store.
    pub(crate) fn take(dir: &Path, store: &str) -> io::Result<Self> {
        let digest = hex(&Sha256::digest(store.as_bytes())[..8]);
        for number in 0..MOUNTS {
            let root = dir.join(format!("{digest}-{number}"));
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&root)?;
            let mut how = OpenOptions::new();
            how.create(true).truncate(false).read(true).write(true);
            how.mode(0o600);
            let file = how.open(root.join("lock"))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Self::of(root, file),
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let why = format!("{}: {MOUNTS} mounts use it already", dir.display());
        Err(io::Error::other(why))
    }

    /// The directory of a lock that this process had before it executed this program.
    pub(crate) fn again(lock: OwnedFd) -> io::Result<Self> {
        let path = std::fs::read_link(format!("/proc/self/fd/{}", lock.as_raw_fd()))?;
        let root = path.parent().ok_or(io::ErrorKind::InvalidFilename)?;
        Self::of(root.to_owned(), File::from(lock))
    }

    /// Notes something for [`Lock::noted`] of a later program.
    pub(crate) fn note(&self, byte: u8) -> io::Result<()> {
        self.file.write_all_at(&[byte], 0)
    }

    pub(crate) fn noted(&self) -> io::Result<u8> {
        let mut byte = [0];
        self.file.read_exact_at(&mut byte, 0)?;
        Ok(byte[0])
    }

    fn of(root: PathBuf, file: File) -> io::Result<Self> {
        let name = root.file_name().and_then(|name| name.to_str());
        let name = name.and_then(|name| name.rsplit_once('-'));
        let (store, _) = name.ok_or(io::ErrorKind::InvalidFilename)?;
        let all = (0..MOUNTS).map(|number| root.with_file_name(format!("{store}-{number}")));
        Ok(Self {
            others: all.filter(|other| *other != root).collect(),
            root,
            file,
        })
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Cache {
    /// Opens the cache in a directory.
    pub(crate) fn open(lock: Lock, size: Option<u64>) -> io::Result<Self> {
        let Lock { root, others, file } = lock;
        let limit = size.unwrap_or_else(|| free(&root) / SHARE).max(LEAST);
        let (state, drafts) = found(&root)?;
        let cache = Self {
            others,
            names: Arc::new(ops::File::from(OwnedFd::from(File::open(&root)?))),
            root,
            _lock: file,
            limit,
            drafts,
            noted: Notify::new(),
            drafted: AtomicU64::new(0),
            ended: Notify::new(),
            state: Mutex::new(state),
        };
        cache.evict();
        Ok(cache)
    }

    /// The pieces of a version: those that are there, or none yet.
    pub(crate) fn object(&self, key: &str, version: &Version) -> Result<Arc<Object>> {
        let id = id(key, version);
        let mut state = self.state();
        state.clock += 1;
        let now = state.clock;
        if let Some(slot) = state.versions.get_mut(&id) {
            slot.used = now;
            if let Some(object) = slot.object.upgrade() {
                return Ok(object);
            }
        }
        let slot = state.versions.entry(id).or_insert_with(|| Slot {
            bytes: 0,
            used: now,
            verified: Arc::new(AtomicBool::new(true)),
            object: Weak::new(),
        });
        let verified = slot.verified.clone();
        let object = Arc::new(self.files_of(&id, key, version, verified)?);
        slot.object = Arc::downgrade(&object);
        Ok(object)
    }

    /// Whether all of a version is there, as far as that is known without its files.
    pub(crate) fn is_whole(&self, key: &str, version: &Version) -> bool {
        let id = id(key, version);
        let state = self.state();
        let slot = state.versions.get(&id);
        slot.is_some_and(|slot| slot.bytes >= version.size)
    }

    /// The data file of a version that is all there, as far as that is known.
    pub(crate) fn whole(&self, key: &str, version: &Version) -> Option<PathBuf> {
        let path = files(&self.root, &id(key, version)).data;
        self.is_whole(key, version).then_some(path)
    }

    /// How many bytes drafts may grow by and still leave half of the cache to others.
    pub(crate) fn room_for_drafts(&self) -> u64 {
        (self.limit / 2).saturating_sub(self.drafted.load(Ordering::Relaxed))
    }

    /// Opens or makes the files of a version.
    fn files_of(
        &self,
        id: &Id,
        key: &str,
        version: &Version,
        verified: Arc<AtomicBool>,
    ) -> Result<Object> {
        let files = files(&self.root, id);
        let begin = || -> io::Result<Object> {
            let header = map::header(key, version).ok_or(io::ErrorKind::InvalidFilename)?;
            let open = |path: &Path| {
                let mut how = OpenOptions::new();
                how.read(true)
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .mode(0o600);
                how.open(path)
            };
            let (data, map) = (open(&files.data)?, open(&files.map)?);
            if data.metadata()?.len() != version.size || map.metadata()?.len() < ENTRIES {
                // New, or not finished: nothing of it counts.
                map.set_len(0)?;
                data.set_len(0)?;
                data.set_len(version.size)?;
                std::os::unix::fs::FileExt::write_all_at(&map, &header, 0)?;
            }
            Object::new(*id, key.to_owned(), version.clone(), data, map, verified)
        };
        begin()
            .map_err(Error::from)
            .with_context(|| files.data.display().to_string())
    }

    /// Writes to a file of the cache. Where the disk is full, what was used longest ago makes room.
    pub(crate) fn with_room(&self, write: impl Fn() -> io::Result<()>) -> Result<()> {
        let done = match write() {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                self.make_room();
                write()
            }
            done => done,
        };
        done.map_err(Error::from)
            .context("the cache on the local disk")
    }

    /// Frees a part of the cache: the disk is full.
    pub(crate) fn make_room(&self) {
        self.free(self.limit / 16);
    }

    /// Waits until the disk has the names of the cache's files.
    pub(crate) fn sync(&self) -> io::Result<()> {
        File::open(&self.root)?.sync_all()
    }

    /// The same for a handler.
    pub(crate) async fn sync_names(&self) -> std::result::Result<(), Errno> {
        ops::fsync(&self.names, false).await
    }

    /// Waits until the disk has all of the cache.
    pub(crate) fn sync_all(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(&self.root)?)?)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The directories of this store that no mount has, locked.
    pub(crate) fn others(&self) -> io::Result<Vec<(PathBuf, File)>> {
        let mut free = Vec::new();
        for other in &self.others {
            let lock = match File::open(other.join("lock")) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                lock => lock?,
            };
            if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
                free.push((other.clone(), lock));
            }
        }
        Ok(free)
    }

    /// The files of drafts that were there when this mount began.
    pub(crate) fn drafts(&self) -> &[PathBuf] {
        &self.drafts
    }

    /// Takes over a file that has all of a version, whose pieces have these checksums.
    pub(crate) fn adopt(
        &self,
        data: &Path,
        key: &str,
        version: &Version,
        sums: &[u32],
    ) -> io::Result<()> {
        let pieces = version.size.div_ceil(1 << map::piece_log(version.size));
        if sums.len() as u64 != pieces {
            return Ok(());
        }
        let mut map = map::header(key, version).ok_or(io::ErrorKind::InvalidFilename)?;
        let entries = sums.iter().map(|sum| map::THERE | u64::from(*sum));
        map.extend(entries.flat_map(u64::to_le_bytes));
        let id = id(key, version);
        let files = files(&self.root, &id);
        let mut state = self.state();
        if state.versions.contains_key(&id) {
            return Ok(());
        }
        uvfs_sys::dying::may_die();
        let taken = std::fs::rename(data, &files.data);
        uvfs_sys::dying::may_die();
        let taken = taken.and_then(|()| std::fs::write(&files.map, map));
        taken.inspect_err(|_| remove_version(&files))?;
        state.clock += 1;
        let slot = Slot {
            bytes: version.size,
            used: state.clock,
            verified: Arc::new(AtomicBool::new(true)),
            object: Weak::new(),
        };
        state.used += version.size;
        state.versions.insert(id, slot);
        drop(state);
        self.evict();
        Ok(())
    }

    /// An object was copied and the original removed: what the cache has of the one, it has of the other, unless it is open.
    pub(crate) fn moved(&self, from: (&str, &Version), to: (&str, &Version)) {
        let (old, new) = (id(from.0, from.1), id(to.0, to.1));
        let Some(header) = map::header(to.0, to.1) else {
            return;
        };
        let mut state = self.state();
        let closed = |slot: &Slot| slot.object.strong_count() == 0;
        if !state.versions.get(&old).is_some_and(closed) || state.versions.contains_key(&new) {
            return;
        }
        let slot = state.versions.remove(&old).expect("it is there");
        let (had, has) = (files(&self.root, &old), files(&self.root, &new));
        let done = || -> io::Result<()> {
            let map = OpenOptions::new().write(true).open(&had.map)?;
            std::os::unix::fs::FileExt::write_all_at(&map, &header, 0)?;
            std::fs::rename(&had.data, &has.data)?;
            std::fs::rename(&had.map, &has.map)
        };
        match done() {
            Ok(()) => {
                state.versions.insert(new, slot);
            }
            Err(error) => {
                tracing::debug!(%error, "the cache gives a file up");
                state.used = state.used.saturating_sub(slot.bytes);
                remove_version(&had);
                remove_version(&has);
            }
        }
    }

    /// A piece of a version was written.
    pub(crate) fn grown(&self, object: &Object, bytes: u64) {
        let mut state = self.state();
        state.used += bytes;
        if let Some(slot) = state.versions.get_mut(&object.id) {
            slot.bytes += bytes;
        }
        drop(state);
        self.evict();
    }

    /// Pieces of a version turned out to be damaged.
    pub(crate) fn shrunk(&self, object: &Object, bytes: u64) {
        let mut state = self.state();
        state.used = state.used.saturating_sub(bytes);
        if let Some(slot) = state.versions.get_mut(&object.id) {
            slot.bytes = slot.bytes.saturating_sub(bytes);
        }
    }

    /// A draft takes so many bytes, and took so many before.
    pub(crate) fn drafted(&self, now: u64, before: u64) {
        if now >= before {
            self.drafted.fetch_add(now - before, Ordering::Relaxed);
            self.evict();
        } else {
            self.drafted.fetch_sub(before - now, Ordering::Relaxed);
            self.ended.notify_waiters();
        }
    }

    /// Whether drafts alone take what the cache may take.
    pub(crate) fn is_full_of_drafts(&self) -> bool {
        self.drafted.load(Ordering::Relaxed) >= self.limit
    }

    /// Brings the cache below its limit, as far as drafts leave that to it.
    fn evict(&self) {
        let used = self.state().used;
        let limit = (self.limit).saturating_sub(self.drafted.load(Ordering::Relaxed));
        if used > limit {
            self.free(used - limit + self.limit / 16);
        }
    }

    /// Frees bytes: first of versions that are not open, the least recently used first, then pieces of those that are.
    fn free(&self, bytes: u64) {
        let mut freed = 0;
        let mut state = self.state();
        let mut closed: Vec<_> = (state.versions.iter())
            .filter(|(_, slot)| slot.object.strong_count() == 0)
            .map(|(id, slot)| (slot.used, *id))
            .collect();
        closed.sort_unstable();
        for (_, id) in closed {
            if freed >= bytes {
                return;
            }
            let slot = state.versions.remove(&id).expect("it was listed");
            state.used -= slot.bytes;
            freed += slot.bytes;
            remove_version(&files(&self.root, &id));
        }
        let mut open: Vec<_> = (state.versions.iter())
            .filter_map(|(id, slot)| Some((slot.used, *id, slot.object.upgrade()?)))
            .collect();
        open.sort_unstable_by_key(|(used, ..)| *used);
        for (_, id, object) in open {
            if freed >= bytes {
                break;
            }
            let given = object.give_back(bytes - freed);
            if let Some(slot) = state.versions.get_mut(&id) {
                slot.bytes = slot.bytes.saturating_sub(given);
            }
            state.used = state.used.saturating_sub(given);
            freed += given;
        }
        drop(state);
        if freed < bytes {
            tracing::debug!(bytes, freed, "all of the cache is in use");
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        uvfs_sys::lock(&self.state)
    }
}

/// The bytes that are free where a directory is; 0 if that is not known.
pub(crate) fn free(dir: &Path) -> u64 {
    let free = statvfs(dir).map(|host| host.f_bavail.saturating_mul(host.f_frsize));
    free.unwrap_or(0)
}

/// The number of a draft that a file belongs to. Those that leave no room for others are of no draft.
pub(crate) fn number(path: &Path) -> Option<u64> {
    let number = u64::from_str_radix(path.file_stem()?.to_str()?, 16).ok();
    number.filter(|number| *number < NUMBERS)
}

/// Finds the versions that earlier mounts cached, the least recently used first, and the files of drafts. Removes
/// incomplete versions.
fn found(root: &Path) -> io::Result<(State, Vec<PathBuf>)> {
    let (mut maps, mut drafts) = (Vec::new(), Vec::new());
    for entry in root.read_dir()? {
        let path = entry?.path();
        let extension = path.extension().and_then(|end| end.to_str());
        match extension {
            Some("map") => maps.push(path),
            Some("data") if !path.with_extension("map").exists() => {
                let _ = std::fs::remove_file(&path);
            }
            Some("new" | "kept" | "tmp" | "lost") => drafts.push(path),
            _ => {}
        }
    }
    let mut versions = Vec::new();
    for map in maps {
        let pair = Files {
            data: map.with_extension("data"),
            map,
        };
        match known(&pair) {
            Ok(Some(version)) if files(root, &version.0).map == pair.map => versions.push(version),
            _ => remove_version(&pair),
        }
    }
    versions.sort_unstable_by_key(|(_, _, time)| *time);
    let mut state = State::default();
    for (id, bytes, _) in versions {
        state.clock += 1;
        state.used += bytes;
        let slot = Slot {
            bytes,
            used: state.clock,
            verified: Arc::default(),
            object: Weak::new(),
        };
        state.versions.insert(id, slot);
    }
    Ok((state, drafts))
}

/// The version that two files hold, their bytes, and when they were last used.
fn known(files: &Files) -> io::Result<Option<(Id, u64, i64)>> {
    let map = File::open(&files.map)?;
    let mut header = Vec::new();
    (&map).take(ENTRIES).read_to_end(&mut header)?;
    let Some((key, version)) = map::parse(&header) else {
        return Ok(None);
    };
    let data = files.data.metadata()?;
    let bytes = (512 * data.blocks()).min(version.size);
    let used = map.metadata()?.mtime();
    Ok((data.len() == version.size).then(|| (id(&key, &version), bytes, used)))
}

fn remove_version(files: &Files) {
    // The map first: a data file without one counts as nothing.
    remove_or_warn(&files.map);
    remove_or_warn(&files.data);
}

/// Removes a file, if it is there.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    uvfs_sys::dying::may_die();
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

pub(crate) fn remove_or_warn(path: &Path) {
    if let Err(error) = remove(path) {
        tracing::warn!(%error, path = %path.display(), "the cache can't remove it");
    }
}

fn files(root: &Path, id: &Id) -> Files {
    let name = hex(id);
    Files {
        data: root.join(format!("{name}.data")),
        map: root.join(format!("{name}.map")),
    }
}

/// The name of a version's files.
pub(crate) fn id(key: &str, version: &Version) -> Id {
    let mut hash = Sha256::new();
    let text = match &version.etag {
        Some(etag) => format!("e {etag}"),
        None => format!("m {:?}", version.modified),
    };
    for part in [key, &text] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.update(version.size.to_le_bytes());
    let mut id = Id::default();
    id.copy_from_slice(&hash.finalize()[..16]);
    id
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
