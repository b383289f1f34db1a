//! I/O engines: three ways to have the kernel move blocks, behind one trait.
//!
//! | engine | how |
//! |---|---|
//! | `sync` | preadv(2) and pwritev(2), in the caller's thread or by a few worker threads |
//! | `aio` | io_submit(2) and io_getevents(2), one control block per extent; asynchronous for direct I/O only |
//! | `uring` | io_uring(7) with the device as a registered file; a batch is one system call |
//!
//! An [`Io`] has extents on the device and blocks of memory, both walked in order: one extent
//! over several blocks scatters or gathers, several extents over one block make a discontiguous
//! buffer. It owns its memory from [`Engine::submit`] until it comes back from
//! [`Engine::reap`], with the result of each extent. Short transfers and `EAGAIN` are continued
//! by the engine; what it reports is final.
//!
//! Memory can be registered with the `uring` engine ([`EngineConfig::memory`]): the kernel need not
//! look its pages up for each transfer. That pins it, so it suits what is read through a bounded set
//! of buffers, as the checker does, and not a cache, which must give memory back under pressure.
//!
//! An engine has a ring of its own, as it is used from any thread. A thread that runs a
//! [`crate::runtime::Runtime`] reads and writes on that one's ring, by [`crate::ops`].

mod aio;
mod core;
mod fault;
mod sync;
mod uring;

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;

use rustix::io::Errno;
use smallvec::{SmallVec, smallvec};
use uvfs_mem::{Arena, Block};

use crate::device::{Device, Geometry};

pub use fault::{Fault, Faults, Rule};

/// The direction of an [`Io`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Device to memory.
    Read,
    /// Memory to device.
    Write,
    /// Make the writes that ended before it durable (fdatasync(2)). No extents.
    Flush,
}

/// A range of the device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoExtent {
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub len: usize,
}

/// The outcome of one extent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExtentResult {
    /// Bytes transferred before the end or the error.
    pub bytes: usize,
    /// Why the transfer ended early. `ENODATA`: the device ended there.
    pub error: Option<Errno>,
}

/// One I/O of one or several extents, with its memory.
#[derive(Debug)]
pub struct Io {
    /// The caller's; not looked at.
    pub tag: u64,
    /// Read or write.
    pub op: Op,
    /// Where on the device; the lengths add up to those of the memory.
    pub extents: SmallVec<[IoExtent; 1]>,
    /// The memory, in the order of the extents.
    pub memory: SmallVec<[Block; 1]>,
    /// One per extent once it is done. A flush has one too.
    pub results: SmallVec<[ExtentResult; 1]>,
}

impl Io {
    /// An I/O of any shape.
    pub fn new(
        op: Op,
        tag: u64,
        extents: impl IntoIterator<Item = IoExtent>,
        memory: impl IntoIterator<Item = Block>,
    ) -> Io {
        Io {
            tag,
            op,
            extents: extents.into_iter().collect(),
            memory: memory.into_iter().collect(),
            results: SmallVec::new(),
        }
    }

    /// Makes the writes that ended before it durable.
    pub fn flush(tag: u64) -> Io {
        Io {
            tag,
            op: Op::Flush,
            extents: SmallVec::new(),
            memory: SmallVec::new(),
            results: SmallVec::new(),
        }
    }

    /// The first error of its extents, if any.
    pub fn error(&self) -> Option<Errno> {
        self.results.iter().find_map(|result| result.error)
    }

    /// Why an engine cannot take it, if so. Every engine asks before it begins.
    pub fn refuse(&self, geometry: &Geometry) -> Option<Errno> {
        if self.op == Op::Flush {
            let empty = self.extents.is_empty() && self.memory.is_empty();
            return (!empty).then_some(Errno::INVAL);
        }
        if self.op == Op::Write && geometry.read_only {
            return Some(Errno::ROFS);
        }
        let mut total = 0usize;
        for extent in &self.extents {
            let block = u64::from(geometry.block.max(1));
            let aligned =
                extent.offset.is_multiple_of(block) && (extent.len as u64).is_multiple_of(block);
            if extent.len == 0 || !aligned {
                return Some(Errno::INVAL);
            }
            if extent
                .offset
                .checked_add(extent.len as u64)
                .is_none_or(|end| end > geometry.size)
            {
                return Some(Errno::NXIO);
            }
            total = total.checked_add(extent.len)?;
        }
        let memory: usize = self.memory.iter().map(|block| block.len()).sum();
        (total == 0 || total != memory).then_some(Errno::INVAL)
    }

    /// Ends it with nothing transferred.
    pub fn fail(&mut self, error: Errno) {
        let result = ExtentResult {
            bytes: 0,
            error: Some(error),
        };
        self.results = smallvec![result; self.extents.len().max(1)];
    }

    fn begin(&mut self) {
        self.results = smallvec![ExtentResult::default(); self.extents.len().max(1)];
    }

    /// The memory of what is left of an extent, as the kernel takes it; at most `limit` bytes
    /// and [`MAX_SEGMENTS`] pieces.
    fn segments(&self, extent: usize, limit: usize, out: &mut Vec<libc::iovec>) {
        out.clear();
        let Some(this) = self.extents.get(extent) else {
            return;
        };
        let before: usize = self.extents[..extent].iter().map(|e| e.len).sum();
        let mut skip = before + self.results[extent].bytes;
        let mut left = (this.len - self.results[extent].bytes).min(limit);
        for block in &self.memory {
            if left == 0 || out.len() == MAX_SEGMENTS {
                break;
            }
            if skip >= block.len() {
                skip -= block.len();
                continue;
            }
            let len = (block.len() - skip).min(left);
            // The sum of the lengths was checked by `refuse`; `skip` is inside the block.
            out.push(libc::iovec {
                iov_base: block.as_ptr().wrapping_add(skip).cast(),
                iov_len: len,
            });
            skip = 0;
            left -= len;
        }
    }

    /// Takes in what the kernel said about a transfer: true if the extent is finished.
    fn advance(&mut self, extent: usize, result: Result<usize, Errno>) -> bool {
        let len = self.extents.get(extent).map_or(0, |e| e.len);
        let state = &mut self.results[extent];
        match result {
            Ok(0) if state.bytes < len => state.error = Some(Errno::NODATA),
            Ok(n) => state.bytes = (state.bytes + n).min(len),
            Err(error) => state.error = Some(error),
        }
        state.error.is_some() || state.bytes == len
    }
}

/// The most pieces of memory that one system call takes (IOV_MAX, readv(2)).
pub const MAX_SEGMENTS: usize = 1024;

/// Counters of an engine, since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Reads finished, counted in extents.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes finished, counted in extents.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes finished.
    pub flushes: u64,
    /// Extents (and flushes) that failed.
    pub errors: u64,
    /// Transfers that ended short and were continued.
    pub short: u64,
    /// Transfers that the kernel had no resources for and that were sent again.
    pub again: u64,
    /// System calls that started I/O: with batching fewer than the extents.
    pub submits: u64,
}

impl EngineStats {
    fn add(&mut self, other: &EngineStats) {
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.writes += other.writes;
        self.written_bytes += other.written_bytes;
        self.flushes += other.flushes;
        self.errors += other.errors;
        self.short += other.short;
        self.again += other.again;
        self.submits += other.submits;
    }

    /// Counts an extent, or a flush, that is done.
    pub fn count(&mut self, op: Op, result: &ExtentResult) {
        let bytes = result.bytes as u64;
        match op {
            Op::Read => {
                self.reads += 1;
                self.read_bytes += bytes;
            }
            Op::Write => {
                self.writes += 1;
                self.written_bytes += bytes;
            }
            Op::Flush => self.flushes += 1,
        }
        self.errors += u64::from(result.error.is_some());
    }
}

/// A way to do I/O on one device. Used from several threads at once.
///
/// A device that is no local file (NBD, RBD) is one more implementation of this trait.
pub trait Engine: Send + Sync {
    /// Its name in messages and statistics.
    fn name(&self) -> &'static str;

    /// The device's sizes: I/O outside or unaligned fails.
    fn geometry(&self) -> Geometry;

    /// How many transfers it keeps in flight.
    fn depth(&self) -> usize;

    /// Takes I/Os from the front of `ios` and starts them, until they or its queue (a few times
    /// its depth) are at the end: what is left needs a [`Engine::reap`] first. Errors are
    /// reported by each I/O's results.
    fn submit(&self, ios: &mut Vec<Io>);

    /// Appends I/Os that are done to `out` and returns how many. With `wait` it waits until
    /// there is at least one, and returns zero only when none is in flight.
    fn reap(&self, wait: bool, out: &mut Vec<Io>) -> usize;

    /// How many I/Os were taken and not yet reaped.
    fn in_flight(&self) -> usize;

    /// Counters since it was made.
    fn stats(&self) -> EngineStats;

    /// Counts of its own, for the statistics of a mount.
    fn counts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Why a remote device is given up, if so: all further I/O fails.
    fn failure(&self) -> Option<String> {
        None
    }
}

/// The kind of engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// System calls that block.
    Sync,
    /// Linux AIO.
    Aio,
    /// io_uring.
    Uring,
}

impl EngineKind {
    /// All of them.
    pub const ALL: [EngineKind; 3] = [EngineKind::Sync, EngineKind::Aio, EngineKind::Uring];

    /// The name that [`FromStr`] takes.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Sync => "sync",
            EngineKind::Aio => "aio",
            EngineKind::Uring => "uring",
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for EngineKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        EngineKind::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| format!("no engine {name:?}: sync, aio or uring"))
    }
}

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Transfers in flight at once (1 to 4096).
    pub depth: usize,
    /// Worker threads of the sync engine; with 0 the I/O is done inside `submit`.
    pub threads: usize,
    /// Memory that is registered with the kernel if the engine can: an arena made by
    /// [`Arena::pinned`]. I/O into other memory is done as well. Where the kernel refuses (limits on
    /// locked memory) nothing is registered.
    pub memory: Option<Arena>,
    /// Faults to inject, for tests.
    pub faults: Option<Arc<Faults>>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            depth: 128,
            threads: 0,
            memory: None,
            faults: None,
        }
    }
}

/// Makes an engine for a device.
///
/// # Errors
/// When the kernel refuses what the engine needs: `ENOSYS` or `EPERM` where io_uring or AIO is
/// switched off, `EAGAIN` when the machine's `fs.aio-max-nr` is used up.
pub fn open(
    kind: EngineKind,
    device: Arc<Device>,
    config: EngineConfig,
) -> io::Result<Arc<dyn Engine>> {
    let (geometry, depth) = (device.geometry(), config.depth.clamp(1, 4096));
    Ok(match kind {
        EngineKind::Sync => sync::Sync::start(device, depth, config)?,
        EngineKind::Aio => {
            let backend = aio::Aio::new(device, depth)?;
            Arc::new(core::Core::new(backend, geometry, depth, config.faults))
        }
        EngineKind::Uring => {
            let backend = uring::Uring::new(device, depth, config.memory)?;
            Arc::new(core::Core::new(backend, geometry, depth, config.faults))
        }
    })
}
