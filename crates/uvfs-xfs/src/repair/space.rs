//! All that is known of an allocation group, and which of its blocks are free for what is built anew.

use super::Mend;
use super::trees::walk;
use crate::bulk::space::{normal, subtract};
use crate::check::space::{BlockMap, Use};
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};

/// The kind of an inode that was not looked at yet.
pub(crate) const UNSEEN: u8 = 0xff;
/// With this bit: the kind that a directory says of such an inode.
pub(crate) const EXPECTED: u8 = 0x80;

/// An allocation group.
#[derive(Default)]
pub(crate) struct AgToMend {
    pub chunks: Vec<InodeChunk>,
    /// For each slot of each chunk: the kind of inode, 0 for a free one; [`UNSEEN`] and
    /// [`EXPECTED`] before it was looked at.
    pub kind: Vec<u8>,
    /// Directory entries, and what the inode says.
    pub seen: Vec<u32>,
    pub nlink: Vec<u32>,
    pub map: Option<BlockMap>,
    /// Blocks that were in use when the repair began: not to be overwritten while what they hold
    /// may still be needed.
    pub avoid: Vec<(u32, u32)>,
    /// Blocks of trees and of the free list.
    pub old: Vec<(u32, u32)>,
    /// Runs of data with one more owner, once for each.
    pub shared: Vec<(u32, u32)>,
    /// Blocks in the map that directories had before they were built anew.
    pub released: Vec<(u32, u32)>,
    /// Records of the reverse mapping tree, if there is one: start, blocks, owner, offset.
    pub owners: Vec<(u32, u32, u64, u64)>,
    /// Runs that new structures are taken from.
    pub free: Option<Vec<(u32, u32)>>,
}

impl AgToMend {
    /// The place of an inode in the lists of the group.
    pub fn slot(&self, agino: u32) -> Option<usize> {
        let i = self.chunks.partition_point(|c| c.startino <= agino);
        let c = self.chunks.get(i.checked_sub(1)?)?;
        let at = agino - c.startino;
        (at < INODES_PER_CHUNK && c.has(at)).then_some((i - 1) * 64 + at as usize)
    }

    /// The inode at a place in the lists.
    pub fn agino(&self, slot: usize) -> u32 {
        self.chunks[slot / 64].startino + slot as u32 % 64
    }

    /// Whether a block that begins with this inode is one of inodes.
    pub fn chunk_of(&self, agino: u32, g: &Geometry) -> bool {
        let per = 1u32 << g.inopblog;
        (agino..agino.saturating_add(per)).any(|i| self.slot(i).is_some())
    }
}

/// Makes the maps of blocks, with what is at fixed places and the chunks of inodes in them.
pub(crate) fn begin(m: &mut Mend<'_>) {
    for agno in 0..m.g.agcount {
        let old = old_blocks(m, agno);
        let ag = &mut m.ags[agno as usize];
        // The blocks that were in use so far.
        if let Some(map) = ag.map.take() {
            let mut avoid = std::mem::take(&mut ag.avoid);
            avoid.extend(map.list(&[Use::Meta, Use::Data]));
            ag.avoid = normal(avoid);
        }
        ag.old = normal(old);
        ag.free = None;
        ag.shared.clear();
        ag.released.clear();
        ag.owners.clear();
        ag.map = Some(fresh(&m.g, agno, &ag.chunks));
    }
}

/// A map of a group with what is at fixed places and the chunks of inodes.
pub(crate) fn fresh(g: &Geometry, agno: u32, chunks: &[InodeChunk]) -> BlockMap {
    let blocks = g.ag_blocks(agno);
    let mut map = BlockMap::new(blocks);
    map.claim(0, g.header_blocks().min(blocks), Use::Meta);
    if let Some(a) = g.fsb_run(g.logstart, g.logblocks)
        && a.agno == agno
    {
        map.claim(a.agbno, g.logblocks, Use::Meta);
    }
    for (start, len) in chunk_runs(g, chunks) {
        if start < blocks && len <= blocks - start {
            map.claim(start, len, Use::Meta);
        }
    }
    map
}

/// The blocks of chunks, in order.
pub(crate) fn chunk_runs(g: &Geometry, chunks: &[InodeChunk]) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    let per = 1u32 << g.inopblog;
    for c in chunks {
        let first = c.startino >> g.inopblog;
        for b in 0..g.chunk_blocks() {
            let there = (0..per.min(64)).any(|i| c.has((b * per + i).min(63)));
            if !there {
                continue;
            }
            match runs.last_mut() {
                Some((s, n)) if *s + *n == first + b => *n += 1,
                Some((s, n)) if *s + *n > first + b => {}
                _ => runs.push((first + b, 1)),
            }
        }
    }
    runs
}

/// The blocks of a group's trees and free list, as far as its headers can be believed.
pub(crate) fn old_blocks(m: &Mend<'_>, agno: u32) -> Vec<(u32, u32)> {
    let g = &m.g;
    let mut out = Vec::new();
    let ((agf, _), (agi, _)) = (m.header(agno, AGF_SECTOR), m.header(agno, AGI_SECTOR));
    let (agfl, ident) = m.header(agno, AGFL_SECTOR);
    let (agf, agi) = (Agf::at(&agf, 0), Agi::at(&agi, 0));
    let trees = [
        Btree::Bno,
        Btree::Cnt,
        Btree::Rmap,
        Btree::Refcount,
        Btree::Ino,
        Btree::Fino,
    ];
    for tree in trees.into_iter().filter(|t| g.features.has_tree(*t)) {
        let root = match tree {
            Btree::Ino | Btree::Fino => agi.as_ref().map(|agi| agi.root_of(tree)),
            _ => agf.as_ref().map(|agf| agf.root_of(tree)),
        };
        let Ok(root) = root else { continue };
        let w = walk(m, agno, tree, root, &mut |_, _| {});
        out.extend(w.blocks.into_iter().map(|b| (b, 1)));
    }
    if let (Ok(slots), Ok(f)) = (check_agfl(&agfl, &ident), agf) {
        let (first, n) = (f.flfirst.get(), f.flcount.get());
        for i in 0..n.min(slots.len() as u32) {
            let b = slots[(first.wrapping_add(i) as usize) % slots.len()].get();
            if g.has_agb(agno, b) {
                out.push((b, 1));
            }
        }
    }
    out
}

impl Mend<'_> {
    /// The runs of a group that nothing uses or used. `desperate`: that nothing uses.
    fn usable(&self, agno: u32, desperate: bool) -> Vec<(u32, u32)> {
        let ag = &self.ags[agno as usize];
        let runs = ag.map.as_ref().map(|map| map.list(&[Use::Unknown]));
        let runs = runs.unwrap_or_default();
        match desperate {
            true => runs,
            false => subtract(&subtract(&runs, &ag.avoid), &ag.old),
        }
    }

    /// `blocks` blocks in few runs, each a multiple of `granule`, from `near` or another group.
    pub fn allocate(
        &mut self,
        near: u32,
        blocks: u32,
        granule: u32,
    ) -> Option<Vec<(AgBlock, u32)>> {
        let mut out = Vec::new();
        let mut left = blocks;
        for desperate in [false, true] {
            for k in 0..self.g.agcount {
                let agno = (near + k) % self.g.agcount;
                if desperate || self.ags[agno as usize].free.is_none() {
                    self.ags[agno as usize].free = Some(self.usable(agno, desperate));
                }
                let ag = &mut self.ags[agno as usize];
                let (Some(free), Some(map)) = (&mut ag.free, &mut ag.map) else {
                    continue;
                };
                // One run for all of it, if there is one.
                let whole = free.iter().position(|(_, n)| *n >= left);
                let mut i = whole.unwrap_or(0);
                while left > 0 && i < free.len() {
                    let (start, len) = free[i];
                    let n = left.min(len / granule * granule);
                    if n > 0 {
                        out.push((AgBlock { agno, agbno: start }, n));
                        map.claim(start, n, Use::Meta);
                        left -= n;
                    }
                    free[i] = (start + n, len - n);
                    i += 1;
                }
                if left == 0 {
                    self.moved = true;
                    let groups = out.iter().map(|(a, _): &(AgBlock, u32)| a.agno);
                    self.touched.extend(groups);
                    return Some(out);
                }
            }
        }
        None
    }

    /// Claims blocks; gives the runs that others have.
    pub fn claim(&mut self, a: AgBlock, len: u32, data: bool) -> Vec<(u32, u32, bool)> {
        let Some(map) = &mut self.ags[a.agno as usize].map else {
            return Vec::new();
        };
        let new = if data { Use::Data } else { Use::Meta };
        let clashes = map.claim(a.agbno, len, new).into_iter();
        clashes
            .map(|c| (c.start, c.len, c.was == Use::Data))
            .collect()
    }
}
