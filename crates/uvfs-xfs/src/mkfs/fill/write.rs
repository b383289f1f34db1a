//! Writes inodes, the contents of files, and their forks.

use super::super::MkfsError;
use super::super::inode::{ForkData, NewInode, put};
use super::super::pool::{FilePiece, Job, SourceFile};
use super::super::source::{Meta, SourceEntry};
use super::super::space::{BlockRun, Full, REGION_BYTES};
use crate::bulk::attr::NewAttr;
use crate::bulk::btree::{Shape, build_fork, extent_records, fork_root_room};
use crate::format::*;
use crate::geometry::Geometry;
use crate::read::verifier;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{AttrForm, Filler, Making, block_runs, generation};

/// A region that small files' data is put into.
pub(super) struct Batch {
    run: BlockRun,
    used: u32,
    pieces: Vec<FilePiece>,
}

/// Adds runs of blocks to a list of extents from block `at` of the file on; those that go on where
/// the last one ends become one.
pub(super) fn append(g: &Geometry, extents: &mut Vec<Extent>, mut at: u64, runs: &[BlockRun]) {
    for r in runs {
        let startblock = g.fsbno(r.start());
        match extents.last_mut() {
            Some(e)
                if e.end() == at
                    && e.startblock + u64::from(e.blockcount) == startblock
                    && g.fsb(e.startblock).map(|a| a.agno) == Some(r.agno)
                    && e.blockcount + r.len <= MAX_EXTENT_BLOCKS =>
            {
                e.blockcount += r.len;
            }
            _ => extents.push(Extent {
                startoff: at,
                startblock,
                blockcount: r.len,
                unwritten: false,
            }),
        }
        at += u64::from(r.len);
    }
}

/// Where a block of a fork is on disk.
pub(super) fn daddr_of(g: &Geometry, extents: &[Extent], block: u64) -> u64 {
    let i = extents.partition_point(|e| e.startoff <= block);
    let e = &extents[i.saturating_sub(1)];
    let fsbno = e.startblock + (block - e.startoff);
    g.fsb(fsbno).map_or(0, |a| g.daddr(a))
}

/// Where the link count is in an inode.
pub(super) const NLINK_OFFSET: usize = std::mem::offset_of!(DinodeV2, nlink);

impl<'p, 'a> Filler<'p, 'a> {
    /// Allocates a file's blocks and has them filled.
    pub(super) fn contents(
        &mut self,
        new: &Making<'_>,
        e: &SourceEntry,
    ) -> Result<Vec<Extent>, MkfsError> {
        let g = &self.l.g;
        let mut extents = Vec::new();
        let runs = block_runs(g, e.meta.size, &e.data);
        let region = REGION_BYTES >> g.blocklog;
        let small = u64::from(region / 2).max(1);
        let total: u64 = runs.iter().map(|(_, n)| n).sum();
        if total > self.space.free_blocks() + u64::from(region) * self.batches.len() as u64 {
            return Err(self.full(new.path()));
        }
        let several = runs.len() > 1 || total > small;
        let file = SourceFile::new(new.dir.clone(), e.name.clone(), e.meta.size, several);
        for (first, n) in runs {
            let start = first << g.blocklog;
            let bytes = (n << g.blocklog).min(e.meta.size - start);
            if n <= small {
                self.small(new, &file, (first, n as u32), bytes, &mut extents)?;
                continue;
            }
            let runs = self.space.runs(new.agno, n, 1);
            let runs = runs.map_err(|Full| self.full(new.path()))?;
            append(g, &mut extents, first, &runs);
            let (mut at, end) = (start, start + bytes);
            for r in runs {
                let mut done = 0;
                while done < r.len {
                    let n = (r.len - done).min(region.max(1));
                    let len = (n as usize) << g.blocklog;
                    let part = (end - at).min(len as u64) as usize;
                    let run = BlockRun {
                        agbno: r.agbno + done,
                        ..r
                    };
                    let pieces = vec![FilePiece {
                        file: file.clone(),
                        offset: at,
                        at: 0,
                        len: part,
                    }];
                    self.job(run, len, pieces)?;
                    at += part as u64;
                    done += n;
                }
            }
        }
        Ok(extents)
    }

    fn job(&self, run: BlockRun, len: usize, pieces: Vec<FilePiece>) -> Result<(), MkfsError> {
        let offset = self.l.g.daddr(run.start()) << 9;
        self.pool.push(Job {
            offset,
            len,
            pieces,
        })
    }

    /// Puts a short run of a file's blocks into the current region, and the next one if need be.
    fn small(
        &mut self,
        new: &Making<'_>,
        file: &Arc<SourceFile>,
        (first, blocks): (u64, u32),
        bytes: u64,
        extents: &mut Vec<Extent>,
    ) -> Result<(), MkfsError> {
        let (g, agno) = (&self.l.g, new.agno);
        let (mut at, mut left) = (first, blocks);
        let end = (first << g.blocklog) + bytes;
        while left > 0 {
            if !self.batches.contains_key(&agno) {
                let run = self.space.data_region(agno);
                let batch = Batch {
                    run: run.map_err(|Full| self.full(new.path()))?,
                    used: 0,
                    pieces: Vec::new(),
                };
                self.batches.insert(agno, batch);
            }
            let Some(b) = self.batches.get_mut(&agno) else {
                continue;
            };
            let n = left.min(b.run.len - b.used);
            let offset = at << g.blocklog;
            b.pieces.push(FilePiece {
                file: file.clone(),
                offset,
                at: (b.used as usize) << g.blocklog,
                len: (end - offset).min(u64::from(n) << g.blocklog) as usize,
            });
            let run = BlockRun {
                agno: b.run.agno,
                agbno: b.run.agbno + b.used,
                len: n,
            };
            append(g, extents, at, &[run]);
            b.used += n;
            at += u64::from(n);
            left -= n;
            if b.used == b.run.len
                && let Some(full) = self.batches.remove(&agno)
            {
                self.flush(full)?;
            }
        }
        Ok(())
    }

    /// Has a region filled, and gives back what is left of it.
    pub(super) fn flush(&mut self, b: Batch) -> Result<(), MkfsError> {
        self.space.give(BlockRun {
            agbno: b.run.agbno + b.used,
            len: b.run.len - b.used,
            ..b.run
        });
        if b.used == 0 {
            return Ok(());
        }
        self.job(b.run, (b.used as usize) << self.l.g.blocklog, b.pieces)
    }

    /// A fork of `room` bytes with these extents: in the inode, or in a B-tree.
    pub(super) fn fork(
        &mut self,
        new: &Making<'_>,
        room: usize,
        extents: &[Extent],
    ) -> Result<ForkData, MkfsError> {
        let g = &self.l.g;
        let mut fork = ForkData::empty();
        fork.extents = extents.len() as u64;
        fork.blocks = extents.iter().map(|e| u64::from(e.blockcount)).sum();
        if extents.len() * ExtentRecord::SIZE <= room {
            fork.bytes = extent_records(extents);
            return Ok(fork);
        }
        if extents.len() > i32::MAX as usize {
            return Err(new.unfit("it has too many extents"));
        }
        let shape = Shape::of_fork(g.block_size as usize, extents.len(), fork_root_room(room));
        let runs = self.metadata(new, shape.blocks() as u32, 1)?;
        let blocks = |r: &BlockRun| g.fsbno(r.start())..g.fsbno(r.start()) + u64::from(r.len);
        let at: Vec<u64> = runs.iter().flat_map(blocks).collect();
        let tree = build_fork(g, new.ino, room, extents, &at);
        for b in tree.blocks {
            let daddr = g.fsb(b.at).map_or(0, |a| g.daddr(a));
            self.meta.put(daddr, &b.bytes, verifier::BTREE_LONG)?;
        }
        fork.format = FORMAT_BTREE;
        fork.blocks += at.len() as u64;
        fork.bytes = tree.root;
        Ok(fork)
    }

    /// Writes the attributes' blocks and the inode.
    pub(super) fn write_inode(
        &mut self,
        new: &Making<'_>,
        meta: &Meta,
        (attrs, form): (&[NewAttr], AttrForm),
        nlink: u32,
        size: u64,
        (room, data): (usize, ForkData),
    ) -> Result<(), MkfsError> {
        let (g, ino) = (&self.l.g, new.ino);
        let attr_room = g.inode_size as usize - DINODE_V3_SIZE - room;
        let attr = match form {
            AttrForm::None => ForkData::empty(),
            AttrForm::Short(bytes) => ForkData::local(FORMAT_LOCAL, bytes),
            AttrForm::Blocks(plan) => {
                let runs = self.metadata(new, plan.blocks() as u32, 1)?;
                let mut extents = Vec::new();
                append(g, &mut extents, 0, &runs);
                if extents.len() > i16::MAX as usize {
                    return Err(self.full(new.path()));
                }
                let daddr = |block| daddr_of(g, &extents, block);
                let to = &mut self.meta;
                plan.fill(g, ino, attrs, &daddr, &mut |block, bytes| {
                    let value = Be32::at(bytes, 0).is_ok_and(|m| m.get() == ATTR3_RMT_MAGIC);
                    let kind = match value {
                        true => verifier::REMOTE,
                        false => verifier::DA,
                    };
                    to.put(daddr(block), bytes, kind)
                })?;
                self.fork(new, attr_room, &extents)?
            }
        };
        let forkoff = if attrs.is_empty() { 0 } else { room / 8 };
        self.has_attrs |= forkoff > 0;
        let new = NewInode {
            ino,
            generation: generation(g, ino),
            meta,
            nlink,
            size,
            flags: 0,
            data,
            forkoff: forkoff as u8,
            attr,
        };
        self.meta.inode(ino, true, |b| put(g, &new, b))?;
        self.inodes += 1;
        self.progress.inodes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
