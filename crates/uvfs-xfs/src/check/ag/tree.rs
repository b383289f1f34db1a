//! Walks a B-tree of an allocation group: each block once, its keys in order.

use super::super::ctx::Ctx;
use super::super::problem::{Place, Structure};
use super::super::reader::{CHILDREN_AHEAD, Reader};
use crate::format::*;
use std::collections::HashSet;

use super::sector;

/// A tree of an allocation group being walked.
struct AgTreeWalk<'c, 'a> {
    ctx: &'c Ctx<'a>,
    agno: u32,
    tree: Btree,
    seen: HashSet<u32>,
    /// For each level the last block visited and the right neighbour that it named.
    last: [Option<(u32, u32)>; BTREE_MAXLEVELS as usize],
    whole: bool,
}

/// First key below a block and, for the reverse mapping tree, the highest block.
struct Bounds {
    low: u128,
    high: u32,
}

/// The low key of a record or node entry as a number that sorts as keys do.
fn low_key(tree: Btree, b: &[u8]) -> Result<u128, Fault> {
    let word = |i: usize| Be32::at(b, i).map(|w| u128::from(w.get()));
    let long = |i: usize| Be64::at(b, i).map(|w| u128::from(w.get()));
    Ok(match tree {
        Btree::Bno => word(0)?,
        Btree::Cnt => word(4)? << 32 | word(0)?,
        Btree::Ino | Btree::Fino | Btree::Refcount => word(0)?,
        // Start block, owner and offset are 32, 64 and 64 bits: hash the owner and offset away
        // (order among equal start blocks is checked on the records).
        Btree::Rmap => word(0)?,
        Btree::Bmap => long(0)?,
    })
}

/// The result of a walk.
pub(crate) struct AgTreeResult {
    pub blocks: u32,
    pub whole: bool,
}

impl AgTreeWalk<'_, '_> {
    fn place(&self, agbno: u32) -> Place {
        Place::block(self.tree, self.agno, agbno)
    }

    fn lost(&mut self) {
        self.whole = false;
        self.ctx.report.incomplete();
    }

    fn node(
        &mut self,
        rd: &mut Reader<'_>,
        agbno: u32,
        level: u16,
        root: bool,
        visit: &mut dyn FnMut(u32, &[u8], usize),
    ) -> Option<Bounds> {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        let place = self.place(agbno);
        if !g.has_agb(self.agno, agbno) {
            self.lost();
            report.differ(place, "block pointer", "a block of the group", agbno);
            return None;
        }
        if !self.seen.insert(agbno) {
            self.lost();
            report.bad(place, "the tree leads to this block twice");
            return None;
        }
        ctx.claim_owned(place, self.agno, agbno, 1, self.tree.owner());
        let block = match rd.blocks(g, self.agno, agbno, 1) {
            Ok(b) => b,
            Err(e) => {
                self.lost();
                ctx.io(place, &e);
                return None;
            }
        };
        let daddr = g.daddr(crate::geometry::AgBlock {
            agno: self.agno,
            agbno,
        });
        let ident = g.ident(daddr, Some(self.agno.into()));
        let head = match check_btree_short(&block, self.tree, &ident) {
            Ok(h) => *h,
            Err(f) => {
                self.lost();
                report.bad(place, f);
                return None;
            }
        };
        ctx.lsn(place, &block, 24);
        if head.level.get() != level {
            self.lost();
            report.differ(place, "bb_level", level, head.level.get());
            return None;
        }
        let n = usize::from(head.numrecs.get());
        let max = self.tree.max_records(block.len(), g.features.crc, level);
        let least = if root {
            usize::from(level > 0)
        } else {
            max / 2
        };
        if n < least {
            report.differ(place, "bb_numrecs", format!("at least {least}"), n);
        }
        // Neighbours.
        let slot = &mut self.last[usize::from(level)];
        let left = slot.map_or(NULLAGBLOCK, |(b, _)| b);
        if head.leftsib.get() != left {
            report.differ(place, "bb_leftsib", name(left), name(head.leftsib.get()));
        }
        if let Some((_, right)) = *slot
            && right != agbno
        {
            report.differ(
                self.tree_place(left),
                "bb_rightsib",
                name(agbno),
                name(right),
            );
        }
        self.last[usize::from(level)] = Some((agbno, head.rightsib.get()));
        let at = self.tree.header_len(g.features.crc);
        if level == 0 {
            let len = self.tree.record_len();
            // check_btree_short has checked that they fit.
            let records = &block[at..at + n * len];
            visit(agbno, records, n);
            let low = records
                .get(..len)
                .and_then(|r| low_key(self.tree, r).ok())?;
            let high = records.chunks_exact(len).map(run_end).max().unwrap_or(0);
            return Some(Bounds { low, high });
        }
        self.children(rd, place, &block, n, level, visit)
    }

    /// Walks what the `n` keys of a node of this level lead to.
    fn children(
        &mut self,
        rd: &mut Reader<'_>,
        place: Place,
        block: &[u8],
        n: usize,
        level: u16,
        visit: &mut dyn FnMut(u32, &[u8], usize),
    ) -> Option<Bounds> {
        let (g, report) = (self.ctx.g, self.ctx.report);
        let at = self.tree.header_len(g.features.crc);
        let key_len = self.tree.key_len();
        let (mut low, mut high, mut previous) = (None, 0, None);
        let mark = rd.mark();
        for i in 0..n {
            if i % CHILDREN_AHEAD == 0 {
                rd.release(mark);
                for k in i..n.min(i + CHILDREN_AHEAD) {
                    let ptr_at = self.tree.ptr_offset(block.len(), g.features.crc, k);
                    match Be32::at(block, ptr_at) {
                        Ok(p) if g.has_agb(self.agno, p.get()) => {
                            rd.want_blocks(g, self.agno, p.get(), 1);
                        }
                        _ => {}
                    }
                }
                rd.go();
            }
            let key = &block[at + i * key_len..at + (i + 1) * key_len];
            let key_low = low_key(self.tree, key).unwrap_or(0);
            if previous.is_some_and(|p| p > key_low) {
                report.out_of_order(place, "key", i);
            }
            previous = Some(key_low);
            let ptr_at = self.tree.ptr_offset(block.len(), g.features.crc, i);
            let Ok(ptr) = Be32::at(block, ptr_at) else {
                break;
            };
            let Some(b) = self.node(rd, ptr.get(), level - 1, false, visit) else {
                continue;
            };
            if b.low != key_low {
                report.differ(place, format!("key {i}"), b.low, key_low);
            }
            if self.tree == Btree::Rmap {
                let key_high = Be32::at(key, RmapKey::SIZE).map_or(0, |w| w.get());
                if key_high != b.high {
                    report.differ(place, format!("high key {i}"), b.high, key_high);
                }
            }
            low = low.or(Some(b.low));
            high = high.max(b.high);
        }
        rd.release(mark);
        low.map(|low| Bounds { low, high })
    }

    fn tree_place(&self, agbno: u32) -> Place {
        Place::block(self.tree, self.agno, agbno)
    }
}

pub(super) fn name(agbno: u32) -> String {
    if agbno == NULLAGBLOCK {
        "none".into()
    } else {
        agbno.to_string()
    }
}

/// Last block of a record that begins with start and count.
fn run_end(record: &[u8]) -> u32 {
    let word = |i| Be32::at(record, i).map_or(0, |w: &Be32| w.get());
    word(0).saturating_add(word(4)).saturating_sub(1)
}

/// Walks a tree and hands its leaves' records to `visit`: (block, records, count).
pub(super) fn walk(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    agno: u32,
    tree: Btree,
    root: u32,
    levels: u32,
    visit: &mut dyn FnMut(u32, &[u8], usize),
) -> AgTreeResult {
    let place = Place::ag(tree, agno);
    if levels == 0 || levels > u32::from(BTREE_MAXLEVELS) {
        ctx.report.incomplete();
        ctx.report
            .differ(place, "levels", "at least 1 and what fits", levels);
        return AgTreeResult {
            blocks: 0,
            whole: false,
        };
    }
    let mut w = AgTreeWalk {
        ctx,
        agno,
        tree,
        seen: HashSet::new(),
        last: [None; BTREE_MAXLEVELS as usize],
        whole: true,
    };
    w.node(rd, root, (levels - 1) as u16, true, visit);
    for (b, right) in w.last.into_iter().flatten() {
        if right != NULLAGBLOCK {
            ctx.report
                .differ(w.tree_place(b), "bb_rightsib", "none", right);
        }
    }
    AgTreeResult {
        blocks: w.seen.len() as u32,
        whole: w.whole,
    }
}

/// Where the chunks of inodes and the records of shared blocks of a group begin, in order. It is for
/// [`check`] to find what is wrong with the trees.
pub(crate) fn positions(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    agno: u32,
    chunk: &mut dyn FnMut(u32),
    shared: &mut dyn FnMut(u32),
) {
    let g = ctx.g;
    let ident = |sector| g.ident(g.ag_header_daddr(agno, sector), Some(agno.into()));
    let nowhere = Place::ag(Structure::Agi, agno);
    if let Some(bytes) = sector(ctx, rd, nowhere, agno, AGI_SECTOR)
        && let Ok(agi) = check_agi(&bytes, &ident(AGI_SECTOR))
    {
        let (root, levels) = (agi.root.get(), agi.level.get());
        let visit = &mut |_, recs: &[u8], n| {
            for r in InobtRecord::slice_at(recs, 0, n).unwrap_or_default() {
                chunk(r.unpack(g.features.sparse).startino);
            }
        };
        walk(ctx, rd, agno, Btree::Ino, root, levels, visit);
    }
    if g.features.reflink
        && let Some(bytes) = sector(ctx, rd, nowhere, agno, AGF_SECTOR)
        && let Ok(agf) = check_agf(&bytes, &ident(AGF_SECTOR))
    {
        let (root, levels) = (agf.refcount_root.get(), agf.refcount_level.get());
        let visit = &mut |_, recs: &[u8], n| {
            for r in RefcountRecord::slice_at(recs, 0, n).unwrap_or_default() {
                if r.startblock.get() & REFC_COW_START == 0 {
                    shared(r.startblock.get());
                }
            }
        };
        walk(ctx, rd, agno, Btree::Refcount, root, levels, visit);
    }
}
