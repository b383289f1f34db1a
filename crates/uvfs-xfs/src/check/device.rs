//! Reading a device through one of the I/O engines.

use crate::blocks::{Block, Blocks, Stream};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use uvfs_io::device::Device;
use uvfs_io::engine::{self, Engine, EngineConfig, EngineKind, Io, IoExtent, Op};
use uvfs_mem::Arena;

/// Bytes of one transfer: a large read is several of them at once.
const PIECE: usize = 256 << 10;
/// Transfers in flight for one reader.
const DEPTH: usize = 128;

/// A device read through an engine: one for each reader that is at work at a time, so that a read
/// waits only for itself.
pub struct DeviceBlocks {
    device: Arc<Device>,
    kind: EngineKind,
    arena: Arena,
    idle: Mutex<Vec<Arc<dyn Engine>>>,
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
            idle: Mutex::new(Vec::new()),
            streams: Mutex::new(Vec::new()),
            reads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        };
        let first = blocks.open(None)?;
        blocks.idle.lock().expect("no holder panics").push(first);
        Ok(blocks)
    }

    /// Reads `device` by the engine that suits it: past the page cache many reads in flight, if the
    /// kernel lets us; through it plain reads, as these are what its readahead is for.
    pub fn best(device: Arc<Device>) -> io::Result<DeviceBlocks> {
        let kinds: &[EngineKind] = match device.is_direct() {
            true => &[EngineKind::Uring, EngineKind::Aio],
            false => &[],
        };
        for kind in kinds {
            if let Ok(blocks) = DeviceBlocks::new(device.clone(), *kind) {
                return Ok(blocks);
            }
        }
        DeviceBlocks::new(device, EngineKind::Sync)
    }

    /// The kind of engine.
    pub fn engine(&self) -> EngineKind {
        self.kind
    }

    /// Reads so far, and their bytes.
    pub fn stats(&self) -> (u64, u64) {
        (
            self.reads.load(Ordering::Relaxed),
            self.bytes.load(Ordering::Relaxed),
        )
    }

    fn open(&self, memory: Option<Arena>) -> io::Result<Arc<dyn Engine>> {
        let config = EngineConfig {
            depth: DEPTH,
            memory,
            ..EngineConfig::default()
        };
        engine::open(self.kind, self.device.clone(), config)
    }

    /// An engine that is not in use.
    fn take(&self) -> io::Result<Arc<dyn Engine>> {
        let idle = self.idle.lock().expect("no holder panics").pop();
        match idle {
            Some(e) => Ok(e),
            None => self.open(None),
        }
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

    /// Reads straight into `buf`, which the device can take as it is.
    fn pread(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            match rustix::io::pread(&*self.device, &mut buf[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        self.count(buf.len());
        Ok(())
    }

    fn through_engine(&self, engine: &dyn Engine, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let g = self.device.geometry();
        let unit = u64::from(g.block.max(1));
        let end = offset + buf.len() as u64;
        let (start, stop) = (offset / unit * unit, end.next_multiple_of(unit).min(g.size));
        if stop < end {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // The part of the device after its last whole unit can't be read this way.
        if !stop.is_multiple_of(unit) {
            return self.tail(offset, buf);
        }
        let mut ios = Vec::new();
        let mut at = start;
        while at < stop {
            let len = (stop - at).min(PIECE as u64) as usize;
            let block = self.arena.alloc(len).map_err(io::Error::other)?;
            ios.push(Io::new(
                Op::Read,
                at,
                [IoExtent { offset: at, len }],
                [block],
            ));
            at += len as u64;
        }
        let mut result = Ok(());
        let mut done = Vec::new();
        while !ios.is_empty() || engine.in_flight() > 0 {
            engine.submit(&mut ios);
            engine.reap(true, &mut done);
            for io in done.drain(..) {
                if let Some(e) = io.error() {
                    result = Err(e.into());
                    continue;
                }
                let bytes = &io.memory[0][..];
                self.count(bytes.len());
                let from = io.tag.max(offset);
                let to = (io.tag + bytes.len() as u64).min(end);
                if from < to {
                    buf[(from - offset) as usize..(to - offset) as usize]
                        .copy_from_slice(&bytes[(from - io.tag) as usize..(to - io.tag) as usize]);
                }
            }
        }
        result
    }

    fn tail(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        // Direct I/O past the end of a file gives what there is.
        let unit = u64::from(self.device.geometry().block.max(4096));
        let start = offset / unit * unit;
        let len = (offset + buf.len() as u64 - start).next_multiple_of(unit) as usize;
        let mut block = self.arena.alloc(len).map_err(io::Error::other)?;
        let mut have = 0;
        while have < len {
            match rustix::io::pread(&*self.device, &mut block[have..], start + have as u64) {
                Ok(0) | Err(rustix::io::Errno::INVAL) => break,
                Ok(n) => have += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        self.count(have);
        let from = (offset - start) as usize;
        match block[..have].get(from..from + buf.len()) {
            Some(b) => {
                buf.copy_from_slice(b);
                Ok(())
            }
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
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
        if offset
            .checked_add(buf.len() as u64)
            .is_none_or(|end| end > self.size())
        {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let g = self.device.geometry();
        let unit = u64::from(g.block.max(1));
        let fits = offset.is_multiple_of(unit)
            && (buf.len() as u64).is_multiple_of(unit)
            && (buf.as_ptr() as usize).is_multiple_of(g.memory_align.max(1) as usize);
        if self.kind == EngineKind::Sync && fits {
            return self.pread(offset, buf);
        }
        let engine = self.take()?;
        let result = self.through_engine(&*engine, offset, buf);
        self.idle.lock().expect("no holder panics").push(engine);
        result
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
