//! The allocator: which blocks of which allocation group become what.
//!
//! Each allocation group has a few free extents. Inodes, directories and attributes, and the data of
//! small files are taken from regions of about 1 MiB each, so that what is written together lies
//! together and goes to the device in large writes. At the end what is left of a region is free
//! again. A part of each group is held back for its B-trees, whose size is known last.

use super::layout::FixedBlocks;
use crate::bulk::btree::Shape;
use crate::bulk::group::{self as bulk, GroupTree};
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use std::collections::BTreeMap;

/// Bytes of a region.
pub(crate) const REGION_BYTES: u32 = 1 << 20;

/// Blocks of a region.
pub(crate) fn region_blocks(g: &Geometry) -> u32 {
    (REGION_BYTES >> g.blocklog).min(g.agblocks / 32).max(16)
}

/// Consecutive blocks of an allocation group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockRun {
    pub agno: u32,
    pub agbno: u32,
    pub len: u32,
}

impl BlockRun {
    pub fn start(&self) -> AgBlock {
        AgBlock {
            agno: self.agno,
            agbno: self.agbno,
        }
    }
}

/// A part of a group from which blocks are taken in order.
#[derive(Debug, Default)]
struct Region {
    at: u32,
    left: u32,
}

impl Region {
    fn take(&mut self, n: u32) -> u32 {
        let at = self.at;
        self.at += n;
        self.left -= n;
        at
    }
}

/// The free extents of an allocation group.
#[derive(Debug, Default)]
struct Free {
    /// Start and length.
    extents: BTreeMap<u32, u32>,
    blocks: u32,
}

/// One allocation group's space.
#[derive(Debug, Default)]
struct Group {
    free: Free,
    /// Held back for the B-trees.
    reserve: Option<(u32, u32)>,
    inodes: Region,
    metadata: Region,
    /// First block of each unit of inodes, in the order in which they were allocated.
    units: Vec<u32>,
    /// Inodes in use in the last unit.
    used: u32,
}

impl Free {
    fn give(&mut self, mut at: u32, mut len: u32) {
        if len == 0 {
            return;
        }
        self.blocks += len;
        if let Some((&before, &n)) = self.extents.range(..at).next_back()
            && before + n == at
        {
            self.extents.remove(&before);
            (at, len) = (before, n + len);
        }
        if let Some(n) = self.extents.remove(&(at + len)) {
            len += n;
        }
        self.extents.insert(at, len);
    }

    /// Takes these blocks, which are free.
    fn carve(&mut self, at: u32, len: u32) {
        let Some((&start, &n)) = self.extents.range(..=at).next_back() else {
            return;
        };
        debug_assert!(at >= start && at + len <= start + n);
        self.extents.remove(&start);
        if at > start {
            self.extents.insert(start, at - start);
        }
        if at + len < start + n {
            self.extents.insert(at + len, start + n - at - len);
        }
        self.blocks -= len;
    }

    /// Takes `want` consecutive blocks; if there are none, the longest free extent, cut to a
    /// multiple of `granule`.
    fn take(&mut self, want: u32, granule: u32) -> Option<(u32, u32)> {
        let whole = self.extents.iter().find(|(_, n)| **n >= want);
        let (at, len) = match whole {
            Some((at, _)) => (*at, want),
            None => {
                let (at, n) = self.extents.iter().max_by_key(|(_, n)| **n)?;
                (*at, n / granule * granule)
            }
        };
        if len == 0 {
            return None;
        }
        self.carve(at, len);
        Some((at, len))
    }

    /// Takes `len` blocks whose first one is a multiple of `align`.
    fn take_aligned(&mut self, len: u32, align: u32) -> Option<u32> {
        let fit = self.extents.iter().find_map(|(at, n)| {
            let start = at.checked_next_multiple_of(align)?;
            (start - at < *n && n - (start - at) >= len).then_some(start)
        })?;
        self.carve(fit, len);
        Some(fit)
    }

    fn longest(&self) -> u32 {
        self.extents.values().copied().max().unwrap_or(0)
    }

    /// Takes blocks for the B-trees one by one, from the end of the longest free extent: that
    /// changes the number of extents only when there is nothing else left.
    fn take_for_trees(&mut self) -> Option<u32> {
        let (at, n) = self.extents.iter().max_by_key(|(_, n)| **n)?;
        let block = at + n - 1;
        self.carve(block, 1);
        Some(block)
    }
}

/// All space of the file system.
#[derive(Debug)]
pub(crate) struct SpaceMap {
    groups: Vec<Group>,
    region: u32,
    unit_blocks: u32,
    unit_inodes: u32,
    align: u32,
    inopblog: u8,
}

/// There is no such space left.
#[derive(Debug)]
pub(crate) struct Full;

impl SpaceMap {
    /// All space but what is at fixed places; the root directory's unit of inodes is allocated, with
    /// `used` inodes in use.
    pub fn new(l: &FixedBlocks, used: u32) -> SpaceMap {
        let g = &l.g;
        let align = g.inoalignmt.max(1);
        let mut space = SpaceMap {
            groups: Vec::new(),
            // Parts of a small group that are kept for one use must not be all of it.
            region: region_blocks(g),
            unit_blocks: g.chunk_blocks(),
            unit_inodes: l.unit_inodes(),
            align,
            inopblog: g.inopblog,
        };
        for agno in 0..g.agcount {
            let mut group = Group {
                used: l.unit_inodes(),
                ..Group::default()
            };
            let blocks = g.ag_blocks(agno);
            let start = l.first_free(agno);
            group.free.give(start, blocks.saturating_sub(start));
            if agno == 0 {
                let root = (g.rootino >> g.inopblog) as u32;
                group.free.carve(root, space.unit_blocks);
                group.units.push(root);
                group.used = used;
            }
            // As many inodes as fit, and free extents as many as there are regions.
            let chunks = blocks / g.chunk_blocks() * (l.unit_inodes() / INODES_PER_CHUNK);
            let extents = (blocks / space.region.min(64)) as usize + 64;
            let most = |tree, records| Shape::new(tree, g.block_size as usize, records).blocks();
            let trees = [
                most(Btree::Ino, chunks as usize),
                most(Btree::Fino, chunks as usize),
                2 * most(Btree::Bno, extents),
            ];
            let trees: usize = trees.iter().sum();
            if let Some((&at, &len)) = group.free.extents.last_key_value() {
                let n = (trees as u32).min(group.free.blocks / 8).min(len / 2);
                if n > 0 {
                    group.free.carve(at + len - n, n);
                    group.reserve = Some((at + len - n, n));
                }
            }
            space.groups.push(group);
        }
        space
    }

    /// A group to put more into: `near` unless another has twice as much free.
    pub fn choose(&self, near: u32) -> u32 {
        let free = |a: u32| self.groups[a as usize].free.blocks;
        let best = self.emptiest();
        match u64::from(free(near)) * 2 >= u64::from(free(best)) {
            true => near,
            false => best,
        }
    }

    fn emptiest(&self) -> u32 {
        let free = self.groups.iter().map(|g| g.free.blocks);
        let best = free.enumerate().rev().max_by_key(|(_, n)| *n);
        best.map_or(0, |(i, _)| i as u32)
    }

    /// Free blocks of all groups.
    pub fn free_blocks(&self) -> u64 {
        self.groups.iter().map(|g| u64::from(g.free.blocks)).sum()
    }

    /// The number within its group of a new inode, in `near` or wherever there is room: (group, inode,
    /// and whether it is the first of a unit that is not written yet).
    pub fn inode(&mut self, near: u32) -> Result<(u32, u32, bool), Full> {
        let (unit_inodes, inopblog) = (self.unit_inodes, self.inopblog);
        let mut agno = near;
        for _ in 0..=self.groups.len() {
            let group = &mut self.groups[agno as usize];
            let new = group.used == unit_inodes;
            if new {
                let Some(at) = self.unit(agno) else {
                    agno = (agno + 1) % self.groups.len() as u32;
                    continue;
                };
                let group = &mut self.groups[agno as usize];
                group.units.push(at);
                group.used = 0;
            }
            let group = &mut self.groups[agno as usize];
            let unit = *group.units.last().expect("there is one with room");
            let agino = (unit << inopblog) + group.used;
            group.used += 1;
            return Ok((agno, agino, new));
        }
        Err(Full)
    }

    /// Blocks for a unit of inodes.
    fn unit(&mut self, agno: u32) -> Option<u32> {
        let (blocks, align) = (self.unit_blocks, self.align.max(1));
        let region = self.region / blocks * blocks;
        let group = &mut self.groups[agno as usize];
        if group.inodes.left < blocks {
            let Region { at, left } = std::mem::take(&mut group.inodes);
            group.free.give(at, left);
            let mut lens = [region.max(blocks), blocks].into_iter();
            let found = |left| {
                let at = group.free.take_aligned(left, align)?;
                Some(Region { at, left })
            };
            group.inodes = lens.find_map(found)?;
        }
        Some(group.inodes.take(blocks))
    }

    /// `blocks` blocks for metadata, in runs that are multiples of `granule`.
    pub fn metadata(
        &mut self,
        near: u32,
        blocks: u32,
        granule: u32,
    ) -> Result<Vec<BlockRun>, Full> {
        let region = self.region;
        if blocks <= region / 4 {
            let group = &mut self.groups[near as usize];
            if group.metadata.left < blocks {
                let Region { at, left } = std::mem::take(&mut group.metadata);
                group.free.give(at, left);
                if let Some((at, left)) = group.free.take(region, 1) {
                    group.metadata = Region { at, left };
                }
            }
            if group.metadata.left >= blocks {
                return Ok(vec![BlockRun {
                    agno: near,
                    agbno: group.metadata.take(blocks),
                    len: blocks,
                }]);
            }
        }
        self.runs(near, u64::from(blocks), granule)
    }

    /// `blocks` blocks in few runs, each a multiple of `granule`, the first ones in `near`.
    pub fn runs(&mut self, near: u32, blocks: u64, granule: u32) -> Result<Vec<BlockRun>, Full> {
        let longest = MAX_EXTENT_BLOCKS / granule * granule;
        let mut left = blocks;
        let mut runs = Vec::new();
        let mut agno = near;
        while left > 0 {
            let want = left.min(longest.into()) as u32;
            match self.groups[agno as usize].free.take(want, granule) {
                Some((agbno, len)) => {
                    runs.push(BlockRun { agno, agbno, len });
                    left -= u64::from(len);
                }
                None => {
                    let next = self.emptiest();
                    if self.groups[next as usize].free.longest() < granule {
                        for r in runs {
                            self.give(r);
                        }
                        return Err(Full);
                    }
                    agno = next;
                }
            }
        }
        Ok(runs)
    }

    /// A region for the data of small files.
    pub fn data_region(&mut self, near: u32) -> Result<BlockRun, Full> {
        for agno in [near, self.emptiest()] {
            if let Some((agbno, len)) = self.groups[agno as usize].free.take(self.region, 1) {
                return Ok(BlockRun { agno, agbno, len });
            }
        }
        Err(Full)
    }

    /// Makes blocks free again.
    pub fn give(&mut self, r: BlockRun) {
        self.groups[r.agno as usize].free.give(r.agbno, r.len);
    }

    /// Ends the allocation in a group: everything that was held back is free. Takes what its trees
    /// need, and gives what the group holds then.
    pub fn finish(&mut self, l: &FixedBlocks, agno: u32) -> Result<bulk::Group, Full> {
        let size = l.g.block_size;
        let group = &mut self.groups[agno as usize];
        for r in [&mut group.inodes, &mut group.metadata] {
            let Region { at, left } = std::mem::take(r);
            group.free.give(at, left);
        }
        if let Some((at, n)) = group.reserve.take() {
            group.free.give(at, n);
        }
        let chunks = chunks(group, l);
        let with_free = chunks.iter().filter(|c| c.freecount > 0);
        let mut trees = Vec::new();
        for (tree, records) in [
            (
                Btree::Ino,
                bulk::chunk_records(&chunks, l.g.features.sparse),
            ),
            (
                Btree::Fino,
                bulk::chunk_records(with_free, l.g.features.sparse),
            ),
            (Btree::Refcount, Vec::new()),
        ] {
            let mut at = vec![l.root(tree)];
            let blocks = GroupTree::shape(tree, &records, size).blocks();
            while at.len() < blocks {
                at.push(group.free.take_for_trees().ok_or(Full)?);
            }
            trees.push(GroupTree { tree, records, at });
        }
        // The free space trees take blocks from what they describe.
        let mut extra = Vec::new();
        let each = loop {
            let runs = group.free.extents.len();
            let each = Shape::new(Btree::Bno, size as usize, runs).blocks() - 1;
            // There are more than needed if an extent went with the last block taken. The free list
            // takes those, so that this ends.
            if extra.len() >= 2 * each {
                break each;
            }
            extra.push(group.free.take_for_trees().ok_or(Full)?);
        };
        let free: Vec<(u32, u32)> = group.free.extents.iter().map(|(a, n)| (*a, *n)).collect();
        let mut extra = extra.into_iter();
        for (tree, runs) in [(Btree::Bno, &free), (Btree::Cnt, &bulk::by_size(&free))] {
            let records = bulk::free_records(runs);
            let mut at = vec![l.root(tree)];
            at.extend(extra.by_ref().take(each));
            trees.push(GroupTree { tree, records, at });
        }
        let start = l.free_list_start(agno);
        Ok(bulk::Group {
            agno,
            free,
            chunks,
            trees,
            free_list: (start..start + l.free_list).chain(extra).collect(),
        })
    }
}

/// The inode chunks of a group, in order.
fn chunks(group: &Group, l: &FixedBlocks) -> Vec<InodeChunk> {
    let unit = l.unit_inodes();
    let mut chunks = Vec::new();
    for (i, at) in group.units.iter().enumerate() {
        let last = i + 1 == group.units.len();
        let used = if last { group.used } else { unit };
        let first = at << l.g.inopblog;
        for start in (0..unit).step_by(INODES_PER_CHUNK as usize) {
            let used = used.saturating_sub(start).min(INODES_PER_CHUNK);
            let free = u64::MAX.checked_shl(used).unwrap_or(0);
            chunks.push(InodeChunk::new(first + start, 0, free));
        }
    }
    chunks.sort_unstable_by_key(|c| c.startino);
    chunks
}
