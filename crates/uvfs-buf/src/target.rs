//! The target: index, memory, I/O and waiting.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slab::Slab;
use smallvec::{SmallVec, smallvec};
use uvfs_io::device::{Device, Geometry};
use uvfs_io::engine::{self, Engine, EngineConfig, EngineKind, EngineStats, Io, IoExtent, Op};
use uvfs_mem::{Arena, ArenaStats, Block, Lru, Shrinker, Verdict};

use crate::buffer::{Buffer, Inner, OVERHEAD, Phase};
use crate::{BufError, Extent, MAX_EXTENTS, MAX_SECTORS, SECTOR, Verifier};

/// How a target is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// The most memory that the buffers and what keeps track of them may take, in bytes.
    pub limit: usize,
    /// How long an allocation waits for somebody to release a buffer when all memory is in use.
    pub memory_wait: Duration,
    /// The engine's set-up.
    pub engine: EngineConfig,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            limit: 64 << 20,
            memory_wait: Duration::from_secs(1),
            engine: EngineConfig::default(),
        }
    }
}

/// How readahead turns buffers into I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefetch {
    /// Each buffer by itself: best on a device that does very many small reads a second.
    Exact,
    /// Buffers near each other together, with what is between them: best where the number of
    /// I/Os is what limits the device.
    Span {
        /// The largest gap between two buffers, in sectors.
        max_gap: u32,
        /// The longest I/O, in sectors.
        max_len: u32,
    },
}

/// Counters of a target since it was opened. Bytes are bytes of content.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Lookups that found the buffer.
    pub hits: u64,
    /// Lookups that did not.
    pub misses: u64,
    /// Buffers read (not by readahead).
    pub reads: u64,
    /// Bytes of all buffers read, readahead included.
    pub read_bytes: u64,
    /// Buffers that readahead began to read.
    pub readahead: u64,
    /// Bytes read between the buffers of a span and thrown away.
    pub gap_bytes: u64,
    /// Reads past the index.
    pub uncached: u64,
    /// Buffers that reclaim (or a shrinker) took.
    pub evictions: u64,
    /// Times that a verifier found something wrong.
    pub verify_errors: u64,
    /// Buffers whose read failed.
    pub read_errors: u64,
    /// Buffers written.
    pub writes: u64,
    /// I/Os that wrote them: fewer, where neighbours were merged.
    pub write_ios: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Buffers whose write failed.
    pub write_errors: u64,
    /// Times that an allocation found the memory limit reached and nothing to evict.
    pub memory_waits: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        #[derive(Default)]
        pub(crate) struct Counters { $(pub $name: AtomicU64),* }
        impl Counters {
            fn snapshot(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}
counters!(
    hits,
    misses,
    reads,
    read_bytes,
    readahead,
    gap_bytes,
    uncached,
    evictions,
    verify_errors,
    read_errors,
    writes,
    write_ios,
    written_bytes,
    write_errors,
    memory_waits
);

pub(crate) fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Disk addresses are multiples of the block size and near each other: multiply, and fold the
/// high half in.
#[derive(Default)]
struct DaddrHasher(u64);

impl Hasher for DaddrHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, n: u64) {
        let mixed = u128::from(self.0 ^ n ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        self.0 = (mixed as u64) ^ (mixed >> 64) as u64;
    }
}

/// First address and length in sectors.
type Key = (u64, u64);
type Group = Mutex<HashMap<Key, Arc<Inner>, BuildHasherDefault<DaddrHasher>>>;

struct Index {
    sectors_per_group: u64,
    groups: Vec<Group>,
}

impl Index {
    /// The most groups; a device with more shares them.
    const MAX_GROUPS: u64 = 4096;

    fn new(sectors_per_group: u64, sectors: u64) -> Index {
        let sectors_per_group = sectors_per_group.max(1);
        let count = sectors
            .div_ceil(sectors_per_group)
            .clamp(1, Self::MAX_GROUPS);
        Index {
            sectors_per_group,
            groups: (0..count).map(|_| Group::default()).collect(),
        }
    }

    fn group(&self, daddr: u64) -> &Group {
        let number = daddr / self.sectors_per_group % self.groups.len() as u64;
        &self.groups[number as usize]
    }
}

fn key(inner: &Inner) -> Key {
    (inner.daddr(), inner.sectors)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whose memory an I/O has: one entry per block. These hold their buffers by count alone,
/// because a handle here would keep the target alive for ever.
pub(crate) enum InFlight {
    /// `None`: a gap.
    Read(SmallVec<[Option<Arc<Inner>>; 1]>),
    Write(SmallVec<[Arc<Inner>; 1]>),
    Flush(Arc<Mutex<Option<Option<Errno>>>>),
}

#[derive(Default)]
struct Progress {
    round: u64,
    sleepers: usize,
}

pub(crate) struct Shared {
    engine: Arc<dyn Engine>,
    geometry: Geometry,
    arena: Arena,
    memory_wait: Duration,
    index: RwLock<Index>,
    lru: Mutex<Lru<Arc<Inner>>>,
    in_flight: Mutex<Slab<InFlight>>,
    /// Evicted buffers without content, so that a busy cache allocates nothing.
    spare: Mutex<Vec<Arc<Inner>>>,
    /// Held by the thread that collects completions for all.
    leader: Mutex<Vec<Io>>,
    /// Counts rounds of completions and submissions; changes with `changed`.
    progress: Mutex<Progress>,
    changed: Condvar,
    /// Threads that wait for a buffer to be released.
    starving: AtomicUsize,
    /// Bytes of readahead in flight.
    ahead: AtomicUsize,
    pub(crate) counters: Counters,
}

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

    // ---- waiting ----------------------------------------------------------------------------

    /// Something happened that others may wait for.
    fn bump(&self) {
        let mut progress = lock(&self.progress);
        progress.round += 1;
        // Waking costs a system call, even when nobody sleeps.
        if progress.sleepers > 0 {
            self.changed.notify_all();
        }
    }

    fn round(&self) -> u64 {
        lock(&self.progress).round
    }

    /// A buffer has no handle any more.
    pub fn released(&self) {
        if self.starving.load(Ordering::SeqCst) > 0 {
            self.bump();
        }
    }

    /// Sleeps until something happened since the round `seen`.
    fn pause(&self, seen: u64, timeout: Duration) {
        let mut progress = lock(&self.progress);
        progress.sleepers += 1;
        let (mut progress, _) = self
            .changed
            .wait_timeout_while(progress, timeout, |now| now.round == seen)
            .unwrap_or_else(PoisonError::into_inner);
        progress.sleepers -= 1;
    }

    /// Collects completions, or waits until somebody did, once; returns early if `ready`.
    fn step(&self, ready: impl Fn() -> bool) {
        let seen = self.round();
        let mut done = match self.leader.try_lock() {
            Ok(done) => done,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                // The leader moves `progress` on after it has stepped down.
                self.pause(seen, Duration::MAX);
                return;
            }
        };
        let collected = if ready() {
            1
        } else {
            self.engine.reap(true, &mut done)
        };
        for io in done.drain(..) {
            self.complete(io);
        }
        drop(done);
        self.bump();
        if collected == 0 {
            // Another thread claimed a buffer and is about to submit its I/O.
            self.pause(seen + 1, Duration::from_millis(1));
        }
    }

    /// Waits until `ready`, which some completion brings about.
    pub fn wait_until(&self, ready: impl Fn() -> bool) {
        while !ready() {
            self.step(&ready);
        }
    }

    /// Takes in what is done, without waiting.
    fn poll(&self) {
        if let Ok(mut done) = self.leader.try_lock() {
            if self.engine.reap(false, &mut done) == 0 {
                return;
            }
            for io in done.drain(..) {
                self.complete(io);
            }
            drop(done);
            self.bump();
        }
    }

    // ---- memory -----------------------------------------------------------------------------

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
                    // Nobody can find it while the group is locked. Acquire: what the last
                    // holder did to it happened before.
                    if inner.holds.load(Ordering::Acquire) > 0 || inner.state().dirty {
                        return Verdict::Rotate;
                    }
                    if group
                        .get(&key(inner))
                        .is_some_and(|i| Arc::ptr_eq(i, inner))
                    {
                        group.remove(&key(inner));
                    }
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
                let unshared = Arc::get_mut(&mut inner).expect("only the pool had it");
                unshared.reset(extents);
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

    /// Memory for a buffer. With a plug it may wait, and submits the plug first.
    fn alloc(&self, daddr: u64, len: u64, mut plug: Option<&mut Plug>) -> Result<Block, BufError> {
        let bytes = (len * SECTOR) as usize;
        if bytes + OVERHEAD > self.arena.stats().limit {
            return Err(self.no_memory(daddr, len));
        }
        let mut deadline = None;
        loop {
            let seen = self.round();
            if let Ok(block) = self.arena.alloc_charged(bytes, OVERHEAD) {
                return Ok(block);
            }
            if self.evict(bytes.max(64 << 10)) > 0 {
                continue;
            }
            let Some(plug) = plug.as_deref_mut() else {
                return Err(self.no_memory(daddr, len));
            };
            self.submit(plug);
            if self.engine.in_flight() > 0 {
                self.step(|| false);
                continue;
            }
            count(&self.counters.memory_waits, 1);
            let now = Instant::now();
            let deadline = *deadline.get_or_insert(now + self.memory_wait);
            if now >= deadline {
                return Err(self.no_memory(daddr, len));
            }
            self.starving.fetch_add(1, Ordering::SeqCst);
            // In slices: a release between the attempt above and this line is not announced.
            self.pause(seen, (deadline - now).min(Duration::from_millis(20)));
            self.starving.fetch_sub(1, Ordering::SeqCst);
        }
    }

    // ---- I/O --------------------------------------------------------------------------------

    /// Hands all I/O of a plug to the engine.
    pub fn submit(&self, plug: &mut Plug) {
        if plug.ios.is_empty() {
            return;
        }
        loop {
            self.engine.submit(&mut plug.ios);
            if plug.ios.is_empty() {
                break;
            }
            self.step(|| false);
        }
        self.poll();
    }

    fn io(&self, op: Op, extents: &[Extent], memory: SmallVec<[Block; 1]>, what: InFlight) -> Io {
        let tag = lock(&self.in_flight).insert(what) as u64;
        let extents = extents.iter().map(|extent| IoExtent {
            offset: extent.daddr * SECTOR,
            len: extent.len as usize * SECTOR as usize,
        });
        Io::new(op, tag, extents, memory)
    }

    /// A read into the buffer that the caller has claimed.
    fn read_io(&self, inner: &Arc<Inner>, block: Block) -> Io {
        inner.holds.fetch_add(1, Ordering::Relaxed);
        let what = InFlight::Read(smallvec![Some(inner.clone())]);
        self.io(Op::Read, &inner.extents, smallvec![block], what)
    }

    /// A write of one or several buffers side by side, whose memory the caller took out.
    pub fn write_io(&self, buffers: SmallVec<[Arc<Inner>; 1]>, memory: SmallVec<[Block; 1]>) -> Io {
        for inner in &buffers {
            inner.holds.fetch_add(1, Ordering::Relaxed);
        }
        let extents: SmallVec<[Extent; 1]> = match &buffers[..] {
            [one] => one.extents.clone(),
            many => smallvec![Extent {
                daddr: many[0].daddr(),
                len: many.iter().map(|inner| inner.sectors as u32).sum(),
            }],
        };
        count(&self.counters.write_ios, 1);
        self.io(Op::Write, &extents, memory, InFlight::Write(buffers))
    }

    fn complete(&self, io: Io) {
        let what = lock(&self.in_flight).remove(io.tag as usize);
        let error = io.error();
        // A single extent that failed half-way has served the buffers before that place.
        let good = match &io.results[..] {
            [one] => one.bytes,
            _ if error.is_none() => usize::MAX,
            _ => 0,
        };
        let mut end = 0;
        match what {
            InFlight::Read(buffers) => {
                for (inner, block) in buffers.into_iter().zip(io.memory) {
                    end += block.len();
                    let Some(inner) = inner else {
                        count(&self.counters.gap_bytes, block.len() as u64);
                        continue;
                    };
                    let phase = match error {
                        Some(error) if end > good => {
                            count(&self.counters.read_errors, 1);
                            // Those who wait for it get the error, the next one tries again.
                            self.unindex(&inner);
                            Phase::Failed(error)
                        }
                        _ => {
                            count(&self.counters.read_bytes, block.len() as u64);
                            *inner.content_mut() = Some(block);
                            Phase::Ready
                        }
                    };
                    let mut state = inner.state();
                    state.phase = phase;
                    if std::mem::take(&mut state.ahead) {
                        self.ahead.fetch_sub(inner.bytes(), Ordering::Relaxed);
                    }
                    drop(state);
                    self.let_go(&inner);
                }
            }
            InFlight::Write(buffers) => {
                for (inner, block) in buffers.into_iter().zip(io.memory) {
                    end += block.len();
                    let failed = error.filter(|_| end > good);
                    *inner.content_mut() = Some(block);
                    let mut state = inner.state();
                    state.phase = Phase::Ready;
                    state.dirty = failed.is_some();
                    state.write_error = failed;
                    drop(state);
                    match failed {
                        Some(_) => count(&self.counters.write_errors, 1),
                        None => {
                            count(&self.counters.writes, 1);
                            count(&self.counters.written_bytes, inner.bytes() as u64);
                        }
                    }
                    self.let_go(&inner);
                }
            }
            InFlight::Flush(result) => *lock(&result) = Some(error),
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
        let mut group = lock(index.group(inner.daddr()));
        if group
            .get(&key(inner))
            .is_some_and(|i| Arc::ptr_eq(i, inner))
        {
            group.remove(&key(inner));
        }
    }

    /// Drops the count that an I/O had.
    fn let_go(&self, inner: &Inner) {
        if inner.holds.fetch_sub(1, Ordering::Release) == 1 {
            self.released();
        }
    }

    // ---- lookup -----------------------------------------------------------------------------

    fn find(self: &Arc<Self>, extents: &[Extent], key: Key) -> Option<Buffer> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let group = lock(index.group(key.0));
        group
            .get(&key)
            .map(|inner| Buffer::hold(inner, self))
            .filter(|found| found.extents() == extents)
    }

    fn find_or_claim(
        self: &Arc<Self>,
        extents: &[Extent],
        verifier: &'static dyn Verifier,
        cached: bool,
        plug: Option<&mut Plug>,
    ) -> Result<Found, BufError> {
        let len = self.validate(extents)?;
        let daddr = extents[0].daddr;
        let references = verifier.references().min(MAX_REFERENCES);
        if cached {
            if let Some(buffer) = self.find(extents, (daddr, len)) {
                buffer.inner.refs.used(references);
                count(&self.counters.hits, 1);
                return Ok(Found::Cached(buffer));
            }
            count(&self.counters.misses, 1);
        } else {
            count(&self.counters.uncached, 1);
        }
        let block = self.alloc(daddr, len, plug)?;
        let inner = self.make(extents);
        inner.refs.used(references);
        let buffer = Buffer {
            inner,
            shared: self.clone(),
        };
        if !cached {
            return Ok(Found::Claimed(buffer, block));
        }
        let inner = &buffer.inner;
        {
            let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
            let mut group = lock(index.group(daddr));
            if let Some(other) = group.get(&key(inner)) {
                if other.extents[..] == *extents {
                    // Somebody else was faster.
                    let other = Buffer::hold(other, self);
                    drop(group);
                    return Ok(Found::Cached(other));
                }
                // Same first address and length, but elsewhere after that: the metadata
                // contradict themselves. Each reader gets what it asked for; the first stays.
                return Ok(Found::Claimed(buffer, block));
            }
            group.insert(key(inner), inner.clone());
        }
        let mut lru = lock(&self.lru);
        *lock(&inner.lru) = Some(lru.push(inner.clone()));
        drop(lru);
        Ok(Found::Claimed(buffer, block))
    }

    /// Finds a buffer, or begins to read it.
    fn begin(
        self: &Arc<Self>,
        extents: &[Extent],
        verifier: &'static dyn Verifier,
        cached: bool,
        plug: &mut Plug,
    ) -> Result<Buffer, BufError> {
        match self.find_or_claim(extents, verifier, cached, Some(plug))? {
            Found::Claimed(buffer, block) => {
                count(&self.counters.reads, 1);
                plug.ios.push(self.read_io(&buffer.inner, block));
                Ok(buffer)
            }
            Found::Cached(buffer) => Ok(buffer),
        }
    }

    /// Waits for a buffer that [`Shared::begin`] found, and has it verified.
    fn finish(&self, buffer: Buffer, verifier: &'static dyn Verifier) -> Result<Buffer, BufError> {
        let inner = &buffer.inner;
        self.wait_until(|| inner.phase() != Phase::Reading);
        if let Phase::Failed(errno) = inner.phase() {
            return Err(inner.error("reading", errno));
        }
        self.verify(&buffer, verifier)?;
        Ok(buffer)
    }

    fn verify(&self, buffer: &Buffer, verifier: &'static dyn Verifier) -> Result<(), BufError> {
        let inner = &buffer.inner;
        let known = {
            let state = inner.state();
            match &state.verified {
                Some((name, outcome)) if *name == verifier.name() => Some(outcome.clone()),
                // Changed content is sealed and judged when it is written.
                _ if state.dirty && state.verifier.is_some_and(|v| v.name() == verifier.name()) => {
                    Some(Ok(()))
                }
                _ => None,
            }
        };
        let outcome = match known {
            Some(outcome) => outcome,
            None => {
                let content = buffer.read();
                let outcome = verifier.verify(inner.daddr(), &content);
                let mut state = inner.state();
                state.verified = Some((verifier.name(), outcome.clone()));
                state.verifier = Some(verifier);
                if outcome.is_err() {
                    count(&self.counters.verify_errors, 1);
                }
                outcome
            }
        };
        outcome.map_err(|what| BufError::Verify {
            daddr: inner.daddr(),
            verifier: verifier.name(),
            what,
        })
    }

    // ---- readahead --------------------------------------------------------------------------

    fn readahead(
        self: &Arc<Self>,
        wanted: &mut dyn Iterator<Item = &[Extent]>,
        verifier: &'static dyn Verifier,
        how: Prefetch,
    ) -> usize {
        self.poll();
        let room = (self.engine.depth() * 2).saturating_sub(self.engine.in_flight());
        let budget = self.arena.stats().limit / 4;
        let mut claimed: Vec<(Buffer, Block)> = Vec::new();
        for extents in wanted {
            let bytes: u64 = extents.iter().map(|e| u64::from(e.len) * SECTOR).sum();
            if claimed.len() >= room.max(1) * if how == Prefetch::Exact { 1 } else { 16 }
                || self.ahead.load(Ordering::Relaxed) as u64 + bytes > budget as u64
            {
                break;
            }
            // Readahead is only a hint: what cannot be read now is read (and complained about)
            // when it is needed.
            if let Ok(Found::Claimed(buffer, block)) =
                self.find_or_claim(extents, verifier, true, None)
            {
                buffer.inner.state().ahead = true;
                self.ahead.fetch_add(buffer.len(), Ordering::Relaxed);
                claimed.push((buffer, block));
            }
        }
        let total = claimed.len();
        count(&self.counters.readahead, total as u64);
        let mut plug = Plug::default();
        match how {
            Prefetch::Exact => {
                for (buffer, block) in claimed {
                    plug.ios.push(self.read_io(&buffer.inner, block));
                }
            }
            Prefetch::Span { max_gap, max_len } => self.spans(claimed, max_gap, max_len, &mut plug),
        }
        self.submit(&mut plug);
        total
    }

    /// Turns claimed buffers into I/Os that cover several of them.
    fn spans(
        &self,
        mut claimed: Vec<(Buffer, Block)>,
        max_gap: u32,
        max_len: u32,
        plug: &mut Plug,
    ) {
        claimed.sort_by_key(|(buffer, _)| buffer.daddr());
        let mut span: Option<Span> = None;
        for (buffer, block) in claimed {
            if buffer.extents().len() > 1 {
                plug.ios.push(self.read_io(&buffer.inner, block));
                continue;
            }
            let (from, to) = (buffer.daddr(), buffer.daddr() + buffer.inner.sectors);
            let gap = span.as_ref().and_then(|s| from.checked_sub(s.range.end));
            let joins = span.as_ref().zip(gap).is_some_and(|(s, gap)| {
                gap <= u64::from(max_gap)
                    && to - s.range.start <= u64::from(max_len)
                    && s.memory.len() + 2 <= engine::MAX_SEGMENTS
            });
            let filler = match gap {
                Some(gap) if joins && gap > 0 => {
                    self.arena.alloc((gap * SECTOR) as usize).ok().map(Some)
                }
                Some(0) if joins => Some(None),
                _ => None,
            };
            let current = match (&mut span, filler) {
                (Some(current), Some(filler)) => {
                    if let Some(filler) = filler {
                        current.memory.push(filler);
                        current.buffers.push(None);
                    }
                    current
                }
                _ => {
                    self.end_span(span.take(), plug);
                    span.insert(Span {
                        range: from..from,
                        buffers: SmallVec::new(),
                        memory: SmallVec::new(),
                    })
                }
            };
            buffer.inner.holds.fetch_add(1, Ordering::Relaxed);
            current.buffers.push(Some(buffer.inner.clone()));
            current.memory.push(block);
            current.range.end = to;
        }
        self.end_span(span, plug);
    }

    fn end_span(&self, span: Option<Span>, plug: &mut Plug) {
        if let Some(Span {
            range,
            buffers,
            memory,
        }) = span
        {
            let extent = Extent {
                daddr: range.start,
                len: (range.end - range.start) as u32,
            };
            plug.ios
                .push(self.io(Op::Read, &[extent], memory, InFlight::Read(buffers)));
        }
    }

    // ---- forgetting -------------------------------------------------------------------------

    /// Takes buffers out of the index.
    fn forget(&self, mut which: impl FnMut(&Inner) -> bool) {
        let mut gone = Vec::new();
        {
            let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
            for group in &index.groups {
                gone.extend(lock(group).extract_if(|_, inner| which(inner)));
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

struct Span {
    range: Range<u64>,
    buffers: SmallVec<[Option<Arc<Inner>>; 1]>,
    memory: SmallVec<[Block; 1]>,
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
        self.read_one(extents, verifier, true)
    }

    /// Reads a buffer past the index: nobody else finds it, and its memory is free when its last
    /// handle is dropped.
    ///
    /// # Errors
    /// As [`Target::read`].
    pub fn read_uncached(
        &self,
        extents: &[Extent],
        verifier: &'static dyn Verifier,
    ) -> Result<Buffer, BufError> {
        self.read_one(extents, verifier, false)
    }

    fn read_one(
        &self,
        extents: &[Extent],
        verifier: &'static dyn Verifier,
        cached: bool,
    ) -> Result<Buffer, BufError> {
        let mut plug = Plug::default();
        let buffer = self.shared.begin(extents, verifier, cached, &mut plug);
        self.shared.submit(&mut plug);
        self.shared.finish(buffer?, verifier)
    }

    /// Whether a buffer is in the cache, or on its way there. Not counted as a use.
    pub fn contains(&self, extents: &[Extent]) -> bool {
        let sectors = extents.iter().map(|e| u64::from(e.len)).sum();
        extents
            .first()
            .is_some_and(|e| self.shared.find(extents, (e.daddr, sectors)).is_some())
    }

    /// As [`Target::read`] for several buffers: all I/O is submitted before any is waited for.
    /// They are all held at once, so they should be few against the memory limit.
    pub fn read_many(
        &self,
        wanted: &[&[Extent]],
        verifier: &'static dyn Verifier,
    ) -> Vec<Result<Buffer, BufError>> {
        let mut plug = Plug::default();
        let begun: Vec<_> = wanted
            .iter()
            .map(|extents| self.shared.begin(extents, verifier, true, &mut plug))
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

    /// Forgets all buffers that touch a range of the device, changes included: the next read
    /// goes to the device. Handles keep what they have. Looks through the whole index.
    pub fn invalidate(&self, range: Extent) {
        let end = range.daddr.saturating_add(u64::from(range.len));
        self.shared.forget(|inner| {
            inner
                .extents
                .iter()
                .any(|e| e.daddr < end && range.daddr < e.daddr + u64::from(e.len))
        });
    }

    /// Forgets all buffers, changes included, and gives the memory of those not in use back.
    pub fn invalidate_all(&self) {
        self.shared.forget(|_| true);
        self.shared.arena.trim();
    }

    /// Writes all changed buffers and makes them, and all that was written before, durable.
    ///
    /// # Errors
    /// The first one; the buffers that could not be written stay dirty.
    pub fn sync(&self) -> Result<(), BufError> {
        let mut queue = crate::WriteQueue::new(self);
        for buffer in self.shared.dirty() {
            queue.push(buffer);
        }
        queue.flush()?;
        drop(queue);
        let shared = &self.shared;
        let result = Arc::new(Mutex::new(None));
        let tag = lock(&shared.in_flight).insert(InFlight::Flush(result.clone())) as u64;
        let mut plug = Plug::default();
        plug.ios.push(Io::flush(tag));
        shared.submit(&mut plug);
        shared.wait_until(|| lock(&result).is_some());
        match lock(&result).flatten() {
            Some(errno) => Err(BufError::Io {
                what: "flushing after",
                daddr: 0,
                len: self.sectors(),
                errno,
            }),
            None => Ok(()),
        }
    }

    /// What gives this target's memory back under pressure; for [`uvfs_mem::Shrinkers`].
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

    /// What its memory is used for.
    pub fn memory(&self) -> ArenaStats {
        self.shared.arena.stats()
    }
}
