//! Reading a device through one of the I/O engines.

use crate::blocks::{Block, Blocks, Stream, pread};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use uvfs_io::device::Device;
use uvfs_io::engine::{self, Engine, EngineConfig, EngineKind, Io, IoExtent, Op};
use uvfs_mem::Arena;

/// Transfers in flight for one reader.
const DEPTH: usize = 128;

/// A device: single reads are system calls, those of a [`Stream`] go through an engine of its own.
pub struct DeviceBlocks {
    device: Arc<Device>,
    kind: EngineKind,
    arena: Arena,
    /// Engines of streams, each with memory of its own.
    streams: Mutex<Vec<Registered>>,
    reads: AtomicU64,
    bytes: AtomicU64,
}

impl DeviceBlocks {
    /// Reads `device` by engines of `kind`. Fails if the kernel refuses such an engine.
    pub fn new(device: Arc<Device>, kind: EngineKind) -> io::Result<DeviceBlocks> {
        let blocks = DeviceBlocks {
            device,
            kind,
            arena: Arena::new(1 << 30)?,
            streams: Mutex::default(),
            reads: AtomicU64::default(),
            bytes: AtomicU64::default(),
        };
        // An engine of this kind may be refused, and `best` then tries the next.
        blocks.open(None)?;
        Ok(blocks)
    }

    /// Reads `device` by the engine that suits it: past the page cache many reads in flight, if the
    /// kernel lets us; through it plain reads, as these are what its readahead is for.
    pub fn best(device: Arc<Device>) -> io::Result<DeviceBlocks> {
        let open = |kind| DeviceBlocks::new(device.clone(), kind);
        match device.is_direct() {
            true => (open(EngineKind::Uring).or_else(|_| open(EngineKind::Aio)))
                .or_else(|_| open(EngineKind::Sync)),
            false => open(EngineKind::Sync),
        }
    }

    /// The kind of engine.
    pub fn engine(&self) -> EngineKind {
        self.kind
    }

    /// Reads so far, and their bytes.
    pub fn stats(&self) -> (u64, u64) {
        let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
        (count(&self.reads), count(&self.bytes))
    }

    fn open(&self, memory: Option<Arena>) -> io::Result<Arc<dyn Engine>> {
        let config = EngineConfig {
            depth: DEPTH,
            memory,
            ..EngineConfig::default()
        };
        engine::open(self.kind, self.device.clone(), config)
    }

    /// An engine with memory for `room` bytes in reads of any length, that is not in use.
    fn take_registered(&self, room: usize) -> io::Result<Registered> {
        let mut streams = self.streams.lock().expect("no holder panics");
        if let Some(i) = streams.iter().position(|s| s.room >= room) {
            return Ok(streams.swap_remove(i));
        }
        drop(streams);
        // Room that is lost between reads of different lengths, and to their rounding up.
        let arena = Arena::pinned(room + room / 2)?;
        Ok(Registered {
            engine: self.open(Some(arena.clone()))?,
            arena,
            room,
        })
    }

    fn count(&self, bytes: usize) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Reads into `buf` what there is from byte `at` on, and gives how much that is.
    fn pread(&self, at: u64, buf: &mut [u8]) -> io::Result<usize> {
        let done = pread(&*self.device, at, buf)?;
        self.count(done);
        Ok(done)
    }
}

impl Blocks for DeviceBlocks {
    fn size(&self) -> u64 {
        self.device.geometry().size
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if buf.is_empty() {
            return Ok(());
        }
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.size()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let g = self.device.geometry();
        let mut unit = u64::from(g.block.max(1));
        let end = offset + buf.len() as u64;
        if end.next_multiple_of(unit) > g.size {
            // Of the part of a file after its last whole unit, direct I/O gives what there is.
            unit = unit.max(4096);
        }
        let (start, stop) = (offset / unit * unit, end.next_multiple_of(unit));
        let is_aligned = (buf.as_ptr() as usize).is_multiple_of(g.memory_align.max(1) as usize);
        if (start, stop) == (offset, end) && is_aligned {
            return match self.pread(offset, buf)? {
                n if n == buf.len() => Ok(()),
                _ => Err(io::ErrorKind::UnexpectedEof.into()),
            };
        }
        let len = (stop - start) as usize;
        let mut block = self.arena.alloc(len).map_err(io::Error::other)?;
        let have = self.pread(start, &mut block)?;
        let from = (offset - start) as usize;
        let part = block[..have].get(from..from + buf.len());
        buf.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn stream(&self, room: usize) -> Option<Box<dyn Stream + '_>> {
        Some(Box::new(DeviceStream {
            blocks: self,
            // Without one, each read is waited for: slower, but it works.
            using: Some(self.take_registered(room).ok()?),
            waiting: Vec::new(),
            done: Vec::new(),
        }))
    }

    fn waits(&self) -> bool {
        self.kind == EngineKind::Sync
    }
}

/// An engine, and memory that it has registered with the kernel if it could.
struct Registered {
    engine: Arc<dyn Engine>,
    arena: Arena,
    /// Bytes that the memory is meant for.
    room: usize,
}

/// Reads in flight in one engine.
struct DeviceStream<'a> {
    blocks: &'a DeviceBlocks,
    /// There until it is dropped.
    using: Option<Registered>,
    waiting: Vec<Io>,
    done: Vec<Io>,
}

impl DeviceStream<'_> {
    fn using(&self) -> &Registered {
        self.using.as_ref().expect("only dropping takes it")
    }
}

impl Stream for DeviceStream<'_> {
    fn unit(&self) -> u64 {
        self.blocks.device.geometry().block.max(1).into()
    }

    fn start(&mut self, offset: u64, len: usize) -> bool {
        let Ok(block) = self.using().arena.alloc(len) else {
            return false;
        };
        let extent = IoExtent { offset, len };
        self.waiting
            .push(Io::new(Op::Read, offset, [extent], [block]));
        true
    }

    fn send(&mut self) {
        if !self.waiting.is_empty() {
            let engine = self.using().engine.clone();
            engine.submit(&mut self.waiting);
        }
    }

    fn next(&mut self) -> Option<(u64, io::Result<Block>)> {
        if self.done.is_empty() {
            self.send();
            let engine = self.using().engine.clone();
            engine.reap(true, &mut self.done);
        }
        let io = self.done.pop()?;
        let result = match io.error() {
            Some(e) => Err(e.into()),
            None => {
                let mut memory = io.memory;
                let block = memory.pop().expect("a read has one block of memory");
                self.blocks.count(block.len());
                Ok(Block::new(Whole(block)))
            }
        };
        Some((io.tag, result))
    }
}

/// All of a piece of the arena.
struct Whole(uvfs_mem::Block);

impl AsRef<[u8]> for Whole {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for DeviceStream<'_> {
    fn drop(&mut self) {
        // An engine is put back without anything in it.
        self.waiting.clear();
        let Some(using) = self.using.take() else {
            return;
        };
        while using.engine.reap(true, &mut self.done) > 0 {
            self.done.clear();
        }
        let mut streams = self.blocks.streams.lock().expect("no holder panics");
        streams.push(using);
    }
}
