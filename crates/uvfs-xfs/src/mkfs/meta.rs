//! Metadata on its way to the device: buffers of the cache, written sorted and merged.

use super::MkfsError;
use super::fill::generation;
use super::layout::FixedBlocks;
use crate::format::{Dinode, Layout as _};
use crate::geometry::{AgBlock, BBSIZE};
use crate::read::verifier;
use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use uvfs_buf::{BufError, Buffer, Extent as Sectors, Target, Verifier, WriteQueue};

/// Bytes that are collected before they are written; as many more may be on their way.
const QUEUE_BYTES: usize = 2 << 20;
/// Most bytes of inodes that are held because some of their unit are yet to come.
const OPEN_BYTES: usize = 8 << 20;
/// The cache's bound on memory.
pub(crate) const CACHE_BYTES: usize = 16 << 20;

/// A unit of inodes that is not complete.
struct Unit {
    buffer: Buffer,
    /// Inodes yet to come; `None` if that is not known any more.
    missing: Option<u32>,
}

/// Writes metadata.
pub(crate) struct Metadata<'a> {
    l: &'a FixedBlocks,
    target: Target,
    queue: WriteQueue,
    queued: usize,
    /// Units none of whose inodes is written yet.
    fresh: HashSet<u64>,
    units: HashMap<u64, Unit>,
    /// The units, oldest first; complete ones may still be in here.
    order: VecDeque<u64>,
    image: PathBuf,
}

impl<'a> Metadata<'a> {
    pub fn new(l: &'a FixedBlocks, target: Target, image: PathBuf) -> Metadata<'a> {
        Metadata {
            l,
            queue: WriteQueue::new(&target),
            target,
            queued: 0,
            fresh: HashSet::new(),
            units: HashMap::new(),
            order: VecDeque::new(),
            image,
        }
    }

    fn failed(&self, error: BufError) -> MkfsError {
        MkfsError::Write {
            image: self.image.clone(),
            error: error.to_string(),
        }
    }

    /// Writes a block of any kind.
    pub fn put(
        &mut self,
        daddr: u64,
        bytes: &[u8],
        verifier: &'static dyn Verifier,
    ) -> Result<(), MkfsError> {
        let sectors = Sectors {
            daddr,
            len: (bytes.len() as u64 / BBSIZE) as u32,
        };
        let buffer = self.target.get(&[sectors], verifier);
        let buffer = buffer.map_err(|e| self.failed(e))?;
        buffer.write().copy_from_slice(bytes);
        self.push(buffer)
    }

    fn push(&mut self, buffer: Buffer) -> Result<(), MkfsError> {
        self.queued += buffer.len();
        self.queue.push(buffer);
        if self.queued < QUEUE_BYTES {
            return Ok(());
        }
        self.queued = 0;
        // Earlier writes have been on their way for long.
        let done = self.queue.wait();
        self.queue.submit();
        done.map_err(|e| self.failed(e))
    }

    fn unit_bytes(&self) -> usize {
        (self.l.g.chunk_blocks() * self.l.g.block_size) as usize
    }

    /// Where the unit of an inode is, and the inode in it.
    fn unit_of(&self, ino: u64) -> (Sectors, usize) {
        let g = &self.l.g;
        let blocks = self.l.g.chunk_blocks();
        let a = g.inode(ino).expect("an inode that was allocated");
        // Units are aligned to their length, or are one block.
        let first = match g.inoalignmt > 1 {
            true => a.agbno / blocks * blocks,
            false => a.agbno,
        };
        let at = AgBlock {
            agno: a.agno,
            agbno: first,
        };
        let index = ((a.agbno - first) << g.inopblog) + a.index;
        let sectors = Sectors {
            daddr: g.daddr(at),
            len: (self.unit_bytes() as u64 / BBSIZE) as u32,
        };
        (sectors, (index << g.inodelog) as usize)
    }

    /// Announces a new unit of inodes, the first of which is `ino`. It takes memory from the first of them that is
    /// written on: all inodes of a directory are allocated before.
    pub fn new_unit(&mut self, ino: u64) {
        let (sectors, _) = self.unit_of(ino);
        self.fresh.insert(sectors.daddr);
    }

    /// The unit of `ino` as it is on disk, or with free inodes only if it is new.
    fn unit(&mut self, ino: u64) -> Result<(Buffer, Option<u32>), MkfsError> {
        let (sectors, at) = self.unit_of(ino);
        let g = &self.l.g;
        let kind = verifier::inodes(g.inode_size);
        if !self.fresh.remove(&sectors.daddr) {
            // It was written when too many were open.
            let buffer = self.target.read(&[sectors], kind);
            return Ok((buffer.map_err(|e| self.failed(e))?, None));
        }
        let buffer = self.target.get(&[sectors], kind);
        let buffer = buffer.map_err(|e| self.failed(e))?;
        let size = g.inode_size as usize;
        let first = ino - (at / size) as u64;
        for (inode, ino) in buffer.write().chunks_exact_mut(size).zip(first..) {
            inode.fill(0);
            Dinode::free(g.meta_uuid, ino, generation(g, ino)).put(inode, 0);
        }
        Ok((buffer, Some(self.l.unit_inodes())))
    }

    /// Takes a unit into those that are open, and writes the oldest if these are too many.
    fn open(&mut self, at: u64, buffer: Buffer, missing: Option<u32>) -> Result<(), MkfsError> {
        self.units.insert(at, Unit { buffer, missing });
        self.order.push_back(at);
        self.bound()
    }

    /// Writes the oldest units as they are if too many are open.
    fn bound(&mut self) -> Result<(), MkfsError> {
        let most = (OPEN_BYTES / self.unit_bytes()).max(8);
        while self.units.len() > most {
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            if let Some(unit) = self.units.remove(&oldest) {
                self.push(unit.buffer)?;
            }
        }
        if self.order.len() > 4 * most {
            let units = &self.units;
            self.order.retain(|u| units.contains_key(u));
        }
        Ok(())
    }

    /// Changes the inode `ino`. `complete`: it was the last time, so far as is known.
    pub fn inode(
        &mut self,
        ino: u64,
        complete: bool,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<(), MkfsError> {
        let (sectors, at) = self.unit_of(ino);
        let size = self.l.g.inode_size as usize;
        if !self.units.contains_key(&sectors.daddr) {
            let (buffer, missing) = self.unit(ino)?;
            self.open(sectors.daddr, buffer, missing)?;
        }
        let Some(unit) = self.units.get_mut(&sectors.daddr) else {
            return Ok(());
        };
        change(&mut unit.buffer.write()[at..at + size]);
        if complete && let Some(missing) = &mut unit.missing {
            *missing -= 1;
            if *missing == 0
                && let Some(unit) = self.units.remove(&sectors.daddr)
            {
                self.push(unit.buffer)?;
            }
        }
        Ok(())
    }

    /// Writes everything and makes it durable.
    pub fn finish(&mut self) -> Result<(), MkfsError> {
        self.order.clear();
        for (_, unit) in std::mem::take(&mut self.units) {
            self.queue.push(unit.buffer);
        }
        self.queued = 0;
        let flushed = self.queue.flush().and_then(|()| self.target.sync());
        flushed.map_err(|e| self.failed(e))
    }

    /// Gives up: nothing more is written.
    pub fn abandon(&mut self) {
        self.queue.clear();
        self.units.clear();
        self.target.invalidate_all();
    }
}
