//! The target: index, memory, I/O and waiting.

mod find;
mod readahead;
mod transfer;
mod wait;

use std::collections::hash_map::Entry;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use uvfs_sys::lock;

use smallvec::SmallVec;
use uvfs_io::device::{Device, Geometry};
use uvfs_io::engine::{self, Engine, EngineKind, EngineStats, Io};
use uvfs_mem::{Arena, ArenaStats, Block, Shrinker, Verdict};

use crate::buffer::Buffer;
use crate::config::{Config, Prefetch};
use crate::index::{Buffers, Index, key};
use crate::inner::{Inner, OVERHEAD, Phase};
use crate::shared::{Counters, Shared, Stats, count};
use crate::{BufError, Extent, MAX_EXTENTS, MAX_SECTORS, SECTOR, Verifier};

/// I/O that is submitted together.
#[derive(Default)]
pub(crate) struct Plug {
    pub ios: Vec<Io>,
}

/// The outcome of a lookup.
enum Found {
    /// It was there.
    Cached(Buffer),
    /// It was not; it is now, waiting for its content, which the caller provides.
    Claimed(Buffer, Block),
}

impl Shared {
    fn validate(&self, extents: &[Extent]) -> Result<u64, BufError> {
        let daddr = extents.first().map_or(0, |e| e.daddr);
        let len: u64 = extents.iter().map(|e| u64::from(e.len)).sum();
        let shape = |why| Err(BufError::Shape { daddr, len, why });
        if extents.is_empty() || extents.iter().any(|e| e.len == 0) {
            return shape("an empty extent");
        }
        if extents.len() > MAX_EXTENTS || len > MAX_SECTORS {
            return shape("too long");
        }
        let end = self.geometry.size / SECTOR;
        for extent in extents {
            let len = u64::from(extent.len);
            if extent.daddr.checked_add(len).is_none_or(|e| e > end) {
                let daddr = extent.daddr;
                return Err(BufError::Range { daddr, len, end });
            }
            let block = u64::from(self.geometry.block);
            if !(extent.daddr * SECTOR).is_multiple_of(block)
                || !(len * SECTOR).is_multiple_of(block)
            {
                return shape("not a multiple of the device's block");
            }
        }
        Ok(len)
    }

    /// Gives back at least `want` bytes of unused buffers, if there are so many; returns how many.
    fn evict(&self, want: usize) -> usize {
        let mut freed = 0;
        let mut gone: SmallVec<[Arc<Inner>; 16]> = SmallVec::new();
        {
            let mut lru = lock(&self.lru);
            let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
            // Enough looks for the highest reference count.
            let looks = lru.len() * (usize::from(MAX_REFERENCES) + 1);
            lru.scan(
                looks,
                |inner| {
                    if inner.holds.load(Ordering::Relaxed) > 0 || !inner.refs.age() {
                        return Verdict::Rotate;
                    }
                    let mut group = lock(index.group(inner.daddr()));
                    // No thread can find it while the group is locked. Acquire: what the last
                    // holder did to it happened before.
                    if inner.holds.load(Ordering::Acquire) > 0 || inner.state().dirty {
                        return Verdict::Rotate;
                    }
                    remove(&mut group, inner);
                    freed += inner.bytes() + OVERHEAD;
                    if freed >= want {
                        Verdict::RemoveAndStop
                    } else {
                        Verdict::Remove
                    }
                },
                |inner| {
                    *lock(&inner.lru) = None;
                    gone.push(inner);
                },
            );
        }
        count(&self.counters.evictions, gone.len() as u64);
        let mut spare = lock(&self.spare);
        for mut inner in gone {
            // The content goes now, the rest serves the next buffer.
            if let Some(unshared) = Arc::get_mut(&mut inner) {
                unshared.clear();
                if spare.len() < MAX_SPARE {
                    spare.push(inner);
                }
            }
        }
        freed
    }

    /// A new buffer without content; with one hold, the caller's.
    fn make(&self, extents: &[Extent]) -> Arc<Inner> {
        let spare = lock(&self.spare).pop();
        match spare {
            Some(mut inner) => {
                *Arc::get_mut(&mut inner).expect("only the pool had it") = Inner::new(extents);
                inner
            }
            None => Arc::new(Inner::new(extents)),
        }
    }

    fn no_memory(&self, daddr: u64, len: u64) -> BufError {
        let stats = self.arena.stats();
        BufError::NoMemory {
            daddr,
            len,
            in_use: stats.in_use,
            limit: stats.limit,
        }
    }

    /// Takes one buffer out of the index and the list.
    fn unindex(&self, inner: &Arc<Inner>) {
        let mut lru = lock(&self.lru);
        if let Some(key) = lock(&inner.lru).take() {
            lru.remove(key);
        }
        drop(lru);
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        remove(&mut lock(index.group(inner.daddr())), inner);
    }

    /// Drops the count that an I/O had.
    fn let_go(&self, inner: &Inner) {
        if inner.holds.fetch_sub(1, Ordering::Release) == 1 {
            self.released();
        }
    }

    /// Takes all buffers out of the index.
    fn forget(&self) {
        let mut gone = Vec::new();
        {
            let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
            for group in &index.groups {
                gone.extend(lock(group).drain());
            }
        }
        let mut lru = lock(&self.lru);
        for (_, inner) in &gone {
            inner.state().dirty = false;
            if let Some(key) = lock(&inner.lru).take() {
                lru.remove(key);
            }
        }
    }

    pub fn dirty(self: &Arc<Self>) -> Vec<Buffer> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let mut found = Vec::new();
        for group in &index.groups {
            let group = lock(group);
            found.extend(
                group
                    .values()
                    .filter(|inner| inner.state().dirty)
                    .map(|inner| Buffer::hold(inner, self)),
            );
        }
        found
    }
}

/// Takes a buffer out of its group of the index, unless another has its place.
fn remove(group: &mut Buffers, inner: &Arc<Inner>) {
    if let Entry::Occupied(entry) = group.entry(key(inner))
        && Arc::ptr_eq(entry.get(), inner)
    {
        entry.remove();
    }
}

/// The most evicted buffers kept for their next use.
const MAX_SPARE: usize = 256;

/// The highest count that [`Verifier::references`] has an effect with.
const MAX_REFERENCES: u8 = 7;

impl Shrinker for Shared {
    fn name(&self) -> &str {
        "buffers"
    }

    fn count(&self) -> usize {
        self.arena.stats().resident
    }

    fn scan(&self, bytes: usize) -> usize {
        let before = self.arena.stats().resident;
        self.evict(bytes);
        self.arena.trim();
        before.saturating_sub(self.arena.stats().resident)
    }
}

/// A device with its cache of buffers. Clones are the same target.
#[derive(Clone)]
pub struct Target {
    pub(crate) shared: Arc<Shared>,
}

impl Target {
    /// A target over a device, with an engine of its own. All of it is one group at first.
    ///
    /// # Errors
    /// When the engine or the memory cannot be had, see [`engine::open`] and [`Arena::new`].
    pub fn open(device: Arc<Device>, kind: EngineKind, config: Config) -> io::Result<Target> {
        let engine = engine::open(kind, device, config.engine.clone())?;
        Target::with_engine(engine, config)
    }

    /// A target over any engine, a remote device's for one.
    ///
    /// # Errors
    /// When the memory cannot be had, see [`Arena::new`].
    pub fn with_engine(engine: Arc<dyn Engine>, config: Config) -> io::Result<Target> {
        let geometry = engine.geometry();
        Ok(Target {
            shared: Arc::new(Shared {
                index: RwLock::new(Index::new(u64::MAX, geometry.size / SECTOR)),
                engine,
                geometry,
                arena: Arena::new(config.limit)?,
                memory_wait: config.memory_wait,
                lru: Mutex::default(),
                in_flight: Mutex::default(),
                spare: Mutex::default(),
                leader: Mutex::default(),
                progress: Mutex::default(),
                changed: Condvar::new(),
                starving: AtomicUsize::new(0),
                ahead: AtomicUsize::new(0),
                counters: Counters::default(),
            }),
        })
    }

    /// Divides the index into groups of this many sectors, once the superblock has told.
    pub fn set_groups(&self, sectors_per_group: u64) {
        let shared = &self.shared;
        let mut index = shared.index.write().unwrap_or_else(PoisonError::into_inner);
        let new = Index::new(sectors_per_group, shared.geometry.size / SECTOR);
        for group in &index.groups {
            for (key, inner) in lock(group).drain() {
                lock(new.group(key.0)).insert(key, inner);
            }
        }
        *index = new;
    }

    /// The device's sizes.
    pub fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    /// The device's size in sectors of 512 bytes.
    pub fn sectors(&self) -> u64 {
        self.shared.geometry.size / SECTOR
    }

    /// Finds a buffer, or reads it and waits. The content is verified, once per verifier. A
    /// failed verification is remembered with the content: the same verifier gets the same
    /// error again without I/O, another (see [`Anything`](crate::Anything)) has its own look.
    ///
    /// # Errors
    /// [`BufError::Io`] (the next read tries again), [`BufError::Verify`], [`BufError::Range`],
    /// [`BufError::Shape`], [`BufError::NoMemory`].
    pub fn read(
        &self,
        extents: &[Extent],
        verifier: &'static dyn Verifier,
    ) -> Result<Buffer, BufError> {
        let mut plug = Plug::default();
        let buffer = self.shared.begin(extents, verifier, true, &mut plug);
        self.shared.submit(&mut plug);
        self.shared.finish(buffer?, verifier)
    }

    /// Whether a buffer is in the cache, so that reading it waits for no device. Not counted as a use.
    pub fn contains(&self, extents: &[Extent]) -> bool {
        let sectors = extents.iter().map(|e| u64::from(e.len)).sum();
        let key = extents.first().map(|e| (e.daddr, sectors));
        let found = key.and_then(|key| self.shared.find(extents, key));
        found.is_some_and(|buffer| buffer.inner.phase() != Phase::Reading)
    }

    /// Reads several buffers past the index: no other caller finds them, and the memory of each is free when its last
    /// handle is dropped. All I/O is submitted before any is waited for. They are all held at once, so they should be
    /// few against the memory limit.
    pub fn read_many_uncached(
        &self,
        wanted: &[&[Extent]],
        verifier: &'static dyn Verifier,
    ) -> Vec<Result<Buffer, BufError>> {
        let mut plug = Plug::default();
        let begun: Vec<_> = wanted
            .iter()
            .map(|extents| self.shared.begin(extents, verifier, false, &mut plug))
            .collect();
        self.shared.submit(&mut plug);
        begun
            .into_iter()
            .map(|buffer| self.shared.finish(buffer?, verifier))
            .collect()
    }

    /// Begins to read buffers that will be needed, in their order, and does not wait (but the
    /// sync engine without threads reads inside this call). Stops when the engine has enough to
    /// do or a quarter of the memory limit is being read ahead. Returns how many it began.
    pub fn readahead<'a>(
        &self,
        wanted: impl IntoIterator<Item = &'a [Extent]>,
        verifier: &'static dyn Verifier,
        how: Prefetch,
    ) -> usize {
        self.shared
            .readahead(&mut wanted.into_iter(), verifier, how)
    }

    /// Finds a buffer, or makes one full of zeroes without reading it: for content that is to be
    /// written anew. The verifier judges it before it is written.
    ///
    /// # Errors
    /// As [`Target::read`], except for those of I/O and verification.
    pub fn get(
        &self,
        extents: &[Extent],
        verifier: &'static dyn Verifier,
    ) -> Result<Buffer, BufError> {
        let shared = &self.shared;
        let mut plug = Plug::default();
        let (buffer, mut block) = loop {
            match shared.find_or_claim(extents, verifier, true, Some(&mut plug))? {
                Found::Claimed(buffer, block) => break (buffer, block),
                Found::Cached(buffer) => {
                    shared.wait_until(|| buffer.inner.phase() != Phase::Reading);
                    // A buffer whose read failed has left the index.
                    if !matches!(buffer.inner.phase(), Phase::Failed(_)) {
                        buffer.inner.state().verifier = Some(verifier);
                        return Ok(buffer);
                    }
                }
            }
        };
        block.fill(0);
        *buffer.inner.content_mut() = Some(block);
        let mut state = buffer.inner.state();
        state.phase = Phase::Ready;
        state.verifier = Some(verifier);
        drop(state);
        shared.bump();
        Ok(buffer)
    }

    /// Forgets all buffers, changes included, and gives the memory of those not in use back: the next read goes to the
    /// device. Handles keep what they have.
    pub fn invalidate_all(&self) {
        self.shared.forget();
        self.shared.arena.trim();
    }

    /// The shrinker that gives this target's memory back under pressure; for [`uvfs_mem::Shrinkers`].
    pub fn shrinker(&self) -> Arc<dyn Shrinker> {
        self.shared.clone()
    }

    /// How many buffers are in the cache.
    pub fn len(&self) -> usize {
        lock(&self.shared.lru).len()
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Counters since it was opened.
    pub fn stats(&self) -> Stats {
        self.shared.counters.snapshot()
    }

    /// The engine's counters.
    pub fn engine_stats(&self) -> EngineStats {
        self.shared.engine.stats()
    }

    /// The name of its engine.
    pub fn engine_name(&self) -> &'static str {
        self.shared.engine.name()
    }

    /// Why the device is given up, if so; see [`Engine::failure`].
    pub fn failure(&self) -> Option<String> {
        self.shared.engine.failure()
    }

    /// The use of its memory.
    pub fn memory(&self) -> ArenaStats {
        self.shared.arena.stats()
    }
}
