//! Reading through the buffer cache.

use crate::blocks::{Block, Blocks, DiskExtent, Stream, pread_exact};
use crate::read::wait;
use rustix::fs::Advice;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use uvfs_buf::{Anything, BufError, Extent, MAX_SECTORS, Prefetch, SECTOR, Target, Verifier};
use uvfs_io::device::Device;
use uvfs_io::engine::EngineKind;

/// Sectors of one read of file data where that doesn't go through the page cache.
const DATA_SECTORS: u64 = 2048;
/// Of the cache's memory, the part that such reads of one caller take at a time.
const DATA_SHARE: u64 = 4;

/// A device behind a buffer cache: metadata is cached there, file data is not.
///
/// Where the device reads in units larger than a sector (direct I/O on 4 KiB sectors), blocks are read in
/// those units.
pub struct CachedBlocks {
    target: Arc<Target>,
    /// The device, if the kernel's page cache has its data.
    file: Option<Arc<Device>>,
    /// Readahead goes to the kernel's page cache, because the engine would read while we wait.
    advise: bool,
}

impl CachedBlocks {
    /// Reads `device` through `target`, which must be a cache of the same device.
    pub fn new(target: Arc<Target>, device: Arc<Device>) -> CachedBlocks {
        // AIO waits for what is not in the page cache already, when it is told to read.
        let waits = target.engine_name() != EngineKind::Uring.name();
        let file = (!device.is_direct()).then_some(device);
        CachedBlocks {
            target,
            advise: file.is_some() && waits,
            file,
        }
    }

    /// Reads a device that only the engine of `target` reaches.
    pub fn remote(target: Arc<Target>) -> CachedBlocks {
        CachedBlocks {
            target,
            file: None,
            advise: false,
        }
    }

    /// The cache.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    /// `e` widened to whole units of the device, and how many bytes come before it.
    fn widen(&self, daddr: u64, bytes: u64) -> (Extent, usize) {
        let unit = (u64::from(self.target.geometry().block) / SECTOR).max(1);
        let start = daddr / unit * unit;
        let end = (daddr + bytes.div_ceil(SECTOR)).next_multiple_of(unit);
        let extent = Extent {
            daddr: start,
            len: (end - start) as u32,
        };
        (extent, ((daddr - start) * SECTOR) as usize)
    }

    /// The extent that a short read of file data takes, and how many bytes come before the data.
    fn widen_data(&self, offset: u64, len: usize) -> (Extent, usize) {
        let within = offset % SECTOR;
        let (extent, skip) = self.widen(offset / SECTOR, within + len as u64);
        (extent, skip + within as usize)
    }

    /// `extents` widened, and whether they were as wide before.
    fn widen_all(&self, extents: &[DiskExtent]) -> (SmallVec<[Extent; 1]>, bool) {
        let wide = |e: &DiskExtent| self.widen(e.daddr, e.bytes.into()).0;
        let wide: SmallVec<[Extent; 1]> = extents.iter().map(wide).collect();
        let same = |(e, w): (&DiskExtent, &Extent)| {
            e.daddr == w.daddr && u64::from(e.bytes) == u64::from(w.len) * SECTOR
        };
        let exact = extents.iter().zip(&wide).all(same);
        (wide, exact)
    }
}

fn error(e: BufError) -> io::Error {
    match e {
        BufError::Io { errno, .. } => errno.into(),
        BufError::Range { .. } => io::ErrorKind::UnexpectedEof.into(),
        BufError::NoMemory { .. } => io::Error::new(io::ErrorKind::OutOfMemory, e),
        e => io::Error::other(e),
    }
}

impl Blocks for CachedBlocks {
    fn size(&self) -> u64 {
        self.target.geometry().size
    }

    fn read(&self, extents: &[DiskExtent], verifier: &'static dyn Verifier) -> io::Result<Block> {
        let (wide, exact) = self.widen_all(extents);
        let here = || match exact {
            true => self.target.contains(&wide),
            false => wide.iter().all(|w| self.target.contains(&[*w])),
        };
        if wait::is_forbidden() && !here() {
            wait::note(extents);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if exact {
            // The content itself, not a copy: nothing writes through this cache.
            let content = |verifier| Ok(Block::new(self.target.read(&wide, verifier)?.pin()));
            return match content(verifier) {
                Ok(block) if verifier.name() == Anything.name() => Ok(block),
                Ok(block) => Ok(block.verified()),
                // The caller finds what is wrong with it.
                Err(BufError::Verify { .. }) => content(&Anything).map_err(error),
                Err(e) => Err(error(e)),
            };
        }
        let mut bytes = Vec::with_capacity(extents.iter().map(|e| e.bytes as usize).sum());
        for (e, w) in extents.iter().zip(&wide) {
            let buffer = self.target.read(&[*w], &Anything).map_err(error)?;
            let skip = ((e.daddr - w.daddr) * SECTOR) as usize;
            bytes.extend_from_slice(&buffer.read()[skip..skip + e.bytes as usize]);
        }
        Ok(Block::new(bytes))
    }

    fn data_file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|file| file.as_fd())
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if let Some(file) = &self.file {
            return pread_exact(&**file, offset, buf);
        }
        const { assert!(DATA_SECTORS < MAX_SECTORS) };
        let one = DATA_SECTORS * SECTOR;
        if buf.len() as u64 <= one {
            let (extent, from) = self.widen_data(offset, buf.len());
            // It was read ahead.
            if self.target.contains(&[extent]) {
                let read = self.target.read(&[extent], &Anything).map_err(error)?;
                buf.copy_from_slice(&read.read()[from..from + buf.len()]);
                return Ok(());
            }
        }
        let at_a_time = self.target.memory().limit as u64 / DATA_SHARE / one;
        let mut at = offset;
        for parts in buf.chunks_mut((at_a_time.max(1) * one) as usize) {
            let mut wide = Vec::new();
            let mut places = Vec::new();
            for part in parts.chunks_mut(one as usize) {
                let (extent, from) = self.widen_data(at, part.len());
                at += part.len() as u64;
                wide.push([extent]);
                places.push((from, part));
            }
            let wide: Vec<&[Extent]> = wide.iter().map(|extent| &extent[..]).collect();
            let read = self.target.read_many_uncached(&wide, &Anything);
            for ((from, part), read) in places.into_iter().zip(read) {
                let read = read.map_err(error)?;
                part.copy_from_slice(&read.read()[from..from + part.len()]);
            }
        }
        Ok(())
    }

    fn readahead(&self, extents: &[DiskExtent]) {
        let (wide, exact) = self.widen_all(extents);
        let target = &self.target;
        if self.advise {
            for e in &wide {
                let len = NonZeroU64::new(u64::from(e.len) * SECTOR);
                if len.is_some()
                    && !target.contains(&[*e])
                    && let Some(file) = &self.file
                {
                    // A hint: what it cannot do is done when the block is read.
                    let at = e.daddr * SECTOR;
                    let _ = rustix::fs::fadvise(&**file, at, len, Advice::WillNeed);
                }
            }
        } else if exact {
            target.readahead([&wide[..]], &Anything, Prefetch::Exact);
        } else {
            target.readahead(wide.chunks(1), &Anything, Prefetch::Exact);
        }
    }

    fn readahead_data(&self, offset: u64, len: usize) {
        if self.file.is_none() && !self.waits() && len as u64 <= DATA_SECTORS * SECTOR {
            let extent = [self.widen_data(offset, len).0];
            let target = &self.target;
            target.readahead([&extent[..]], &Anything, Prefetch::Exact);
        }
    }

    fn waits(&self) -> bool {
        self.target.engine_name() == EngineKind::Sync.name()
    }

    fn stream(&self, _room: usize) -> Option<Box<dyn Stream + '_>> {
        Some(Box::new(CachedStream {
            blocks: self,
            wanted: VecDeque::new(),
            sent: 0,
        }))
    }
}

/// Reads into the cache, many in flight.
struct CachedStream<'a> {
    blocks: &'a CachedBlocks,
    wanted: VecDeque<[Extent; 1]>,
    /// The first of `wanted` that are on their way.
    sent: usize,
}

impl Stream for CachedStream<'_> {
    fn unit(&self) -> u64 {
        u64::from(self.blocks.target.geometry().block).max(SECTOR)
    }

    fn start(&mut self, offset: u64, len: usize) -> bool {
        self.wanted.push_back([Extent {
            daddr: offset / SECTOR,
            len: (len as u64 / SECTOR) as u32,
        }]);
        true
    }

    fn send(&mut self) {
        let more = self.wanted.range(self.sent..).map(|e| &e[..]);
        let target = &self.blocks.target;
        self.sent += target.readahead(more, &Anything, Prefetch::Exact);
    }

    fn next(&mut self) -> Option<(u64, io::Result<Block>)> {
        self.send();
        let extent = self.wanted.pop_front()?;
        self.sent = self.sent.saturating_sub(1);
        let read = self.blocks.target.read(&extent, &Anything);
        let block = read.map(|buffer| Block::new(buffer.pin()));
        Some((extent[0].daddr * SECTOR, block.map_err(error)))
    }
}
