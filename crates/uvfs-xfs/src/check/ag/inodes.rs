//! Checks the inode B-trees of an allocation group.

use super::super::space::mix;
use super::super::{Chunk, Counter, Ctx, Place, Structure};
use super::GroupCheck;
use crate::format::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl GroupCheck<'_, '_, '_> {
    /// AGI, inode trees, and the chunks' blocks.
    pub(super) fn inodes(&mut self, sums: &mut Counts) {
        let ag = &self.ctx.ags[self.agno as usize];
        let lost = || {
            ag.inodes_known.store(false, Ordering::Relaxed);
            self.ctx.report.incomplete();
        };
        if self.agi(sums).is_none() {
            lost();
        }
    }

    /// Checks the AGI and what it leads to; `None` if not all inodes are known.
    fn agi(&mut self, sums: &mut Counts) -> Option<()> {
        let (ctx, agno) = (self.ctx, self.agno);
        let (g, report) = (ctx.g, ctx.report);
        let ag = &ctx.ags[agno as usize];
        let place = Place::ag(Structure::Agi, agno);
        let (bytes, ident) = self.sector(place, AGI_SECTOR)?;
        let agi = report.sound(place, check_agi(&bytes, &ident))?;
        self.head(place, "agi", [agi.versionnum, agi.seqno, agi.length]);
        ctx.lsn(place, &bytes, 320);
        let inodes_in_ag = u64::from(g.ag_blocks(agno)) << g.inopblog;
        let (mut chunks, mut frees) = (Vec::<Chunk>::new(), Vec::<u64>::new());
        // From the first pass.
        let known = ag.chunks.get().is_some();
        // The totals that the finobt should have.
        let (mut with_free, mut next) = (0u64, 0u64);
        let (mut count, mut free) = (0u64, 0u64);
        let (mut last_block, mut all) = (None, true);
        let root = agi.root_of(Btree::Ino);
        let ino = self.walk(Btree::Ino, root, &mut |place, i, r: &InobtRecord| {
            let Some(c) = unpack(ctx, place, agno, i, r) else {
                all = false;
                return;
            };
            if u64::from(c.startino) < next {
                report.out_of_order(place, "record", i);
                all = false;
                return;
            }
            next = u64::from(c.startino) + u64::from(INODES_PER_CHUNK);
            let holes = c.holes();
            count += u64::from(64 - holes.count_ones());
            free += u64::from((c.free & !holes).count_ones());
            if c.free & !holes != 0 {
                with_free = with_free.wrapping_add(chunk_sum(&c));
            }
            if !claim_chunk(ctx, place, agno, i, &c, &mut last_block) {
                all = false;
                return;
            }
            if !known {
                chunks.push(Chunk {
                    start: c.startino,
                    holemask: c.holemask,
                });
                frees.push(c.free);
            }
        });
        (sums.icount, sums.ifree) = (agi.count.get().into(), agi.freecount.get().into());
        if ino.whole {
            (sums.icount, sums.ifree) = (count, free);
            report.count_is(place, Counter::AgiCount, count, agi.count.get());
            report.count_is(place, Counter::AgiFreecount, free, agi.freecount.get());
            if g.features.inobtcount {
                report.count_is(place, Counter::AgiIblocks, ino.blocks, agi.iblocks.get());
            }
        }
        if g.features.finobt {
            self.free_inodes(agi, ino.whole.then_some(with_free));
        }
        // New inodes go beside the last chunk.
        let newino = agi.newino.get();
        if newino != NULLAGINO && ino.whole && u64::from(newino) >= inodes_in_ag {
            report.differ(place, "agi_newino", "an inode of the group", newino);
        }
        let heads = unlinked(ctx, place, agi, inodes_in_ag);
        let _ = ag.chunks.set(Arc::new(chunks));
        let _ = ag.free.set(Arc::new(frees));
        let _ = ag.unlinked.set(heads);
        (ino.whole && all).then_some(())
    }

    /// The tree of chunks with free inodes, and what the sum of its records should be, if that is known.
    fn free_inodes(&mut self, agi: &Agi, expected: Option<u64>) {
        let (ctx, agno) = (self.ctx, self.agno);
        let report = ctx.report;
        let (mut sum, mut next) = (0u64, 0u64);
        let root = agi.root_of(Btree::Fino);
        let fino = self.walk(Btree::Fino, root, &mut |place, i, r: &InobtRecord| {
            let Some(c) = unpack(ctx, place, agno, i, r) else {
                return;
            };
            if u64::from(c.startino) < next {
                report.out_of_order(place, "record", i);
            }
            next = u64::from(c.startino) + u64::from(INODES_PER_CHUNK);
            if c.free & !c.holes() == 0 {
                report.bad(place, format!("record {i} has no free inode"));
            }
            sum = sum.wrapping_add(chunk_sum(&c));
        });
        if fino.whole && expected.is_some_and(|e| e != sum) {
            let text = "it does not list the same free inodes as the inobt";
            report.bad(Place::ag(Btree::Fino, agno), text);
        }
        if fino.whole && ctx.g.features.inobtcount {
            let (place, found) = (Place::ag(Structure::Agi, agno), agi.fblocks.get());
            report.count_is(place, Counter::AgiFblocks, fino.blocks, found);
        }
    }
}

/// A record of a tree of inodes, unless it is no chunk of the group.
fn unpack(ctx: &Ctx<'_>, place: Place, agno: u32, i: usize, r: &InobtRecord) -> Option<InodeChunk> {
    let (g, report) = (ctx.g, ctx.report);
    let c = r.unpack(g.features.sparse);
    let differ = |field: &str, expected: &str, found: u32| {
        report.differ(place, format!("record {i}: {field}"), expected, found);
    };
    if !g.is_chunk(agno, c.startino) {
        differ("startino", "an inode chunk of the group", c.startino);
        return None;
    }
    if !g.holes_fit(c.holemask) {
        report.bad(place, format!("record {i}: a hole of a part of a cluster"));
        return None;
    }
    let align = match g.features.sparse && c.holemask != 0 {
        true => g.spino_align,
        false => g.inoalignmt,
    };
    if g.features.aligned_inodes
        && align > 1
        && g.chunk_blocks() > 1
        && !(c.startino >> g.inopblog).is_multiple_of(align)
    {
        let expected = format!("aligned to {align} blocks");
        differ("startino", &expected, c.startino);
    }
    let holes = c.holes();
    let there = 64 - holes.count_ones();
    if c.count != there {
        differ("count", &there.to_string(), c.count);
    }
    if c.free & holes != holes {
        report.bad(place, format!("record {i}: inodes in use in a hole"));
    }
    let n = (c.free & !holes).count_ones();
    if c.freecount != n {
        differ("freecount", &n.to_string(), c.freecount);
    }
    Some(c)
}

/// The heads of the lists of unlinked inodes.
fn unlinked(ctx: &Ctx<'_>, place: Place, agi: &Agi, inodes_in_ag: u64) -> Vec<u32> {
    let mut heads = Vec::new();
    for (bucket, head) in agi.unlinked.iter().enumerate() {
        let head = head.get();
        if head == NULLAGINO {
            continue;
        }
        let differ = |expected: &str| {
            let field = format!("agi_unlinked[{bucket}]");
            ctx.report.differ(place, field, expected, head);
        };
        if head == 0 || u64::from(head) >= inodes_in_ag {
            differ("an inode of the group");
            continue;
        }
        if ctx.log_clean {
            // A clean unmount leaves none.
            differ("none");
        }
        if head as usize % AGI_UNLINKED_BUCKETS != bucket {
            differ("an inode of this bucket");
        }
        heads.push(head);
    }
    heads
}

fn chunk_sum(c: &InodeChunk) -> u64 {
    mix(mix(u64::from(c.startino) << 16 | u64::from(c.holemask)) ^ c.free)
}

/// Claims the blocks that a chunk's inodes are in.
fn claim_chunk(
    ctx: &Ctx<'_>,
    place: Place,
    agno: u32,
    i: usize,
    c: &InodeChunk,
    last: &mut Option<u32>,
) -> bool {
    let g = ctx.g;
    let first = c.startino >> g.inopblog;
    let claim = |block| {
        let place = Place::block(Structure::InodeChunk, agno, block);
        ctx.claim_owned(place, agno, block, 1, RMAP_OWN_INODES);
    };
    if g.inopblog >= 6 {
        // A block of one or several chunks: claimed once, by the first that comes.
        if last.replace(first) != Some(first) {
            claim(first);
        }
        return true;
    }
    let per_block = 1u32 << g.inopblog;
    let holes = c.holes();
    for b in 0..g.chunk_blocks() {
        let mask = ((1u64 << per_block) - 1) << (b * per_block);
        let bad = |text: &str| ctx.report.bad(place, format!("record {i}: {text}"));
        match holes & mask {
            0 => {}
            m if m == mask => continue,
            _ => bad("a hole ends inside a block"),
        }
        if !g.has_agb(agno, first + b) {
            bad("the chunk ends beyond the group");
            return false;
        }
        claim(first + b);
    }
    true
}
