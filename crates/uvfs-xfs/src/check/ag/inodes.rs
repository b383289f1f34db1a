//! Checks the inode B-trees of an allocation group.

use super::super::ctx::{Chunk, Ctx};
use super::super::problem::{Counter, Place, Structure};
use super::super::reader::Reader;
use super::super::space::mix;
use crate::format::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::tree::walk;
use super::{head, sector};

/// AGI, inode trees, and the chunks' blocks.
pub(super) fn inodes(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, sums: &mut Counts) {
    let (g, report) = (ctx.g, ctx.report);
    let ag = &ctx.ags[agno as usize];
    let place = Place::ag(Structure::Agi, agno);
    let lost = || {
        ag.inodes_known.store(false, Ordering::Relaxed);
        report.incomplete();
    };
    let Some(bytes) = sector(ctx, rd, place, agno, AGI_SECTOR) else {
        return lost();
    };
    let ident = g.ident(g.ag_header_daddr(agno, AGI_SECTOR), Some(agno.into()));
    let agi = match check_agi(&bytes, &ident) {
        Ok(a) => a,
        Err(f) => {
            report.bad(place, f);
            return lost();
        }
    };
    head(
        ctx,
        place,
        "agi",
        agno,
        agi.versionnum.get(),
        agi.seqno.get(),
        agi.length.get(),
    );
    ctx.lsn(place, &bytes, 320);
    let inodes_in_ag = u64::from(g.ag_blocks(agno)) << g.inopblog;
    let (mut chunks, mut frees) = (Vec::<Chunk>::new(), Vec::<u64>::new());
    // From the first pass.
    let known = ag.chunks.get().is_some();
    // The totals that the finobt should have.
    let (mut with_free, mut next) = (0u64, 0u64);
    let (mut count, mut free) = (0u64, 0u64);
    let mut last_block = None;
    let ino = walk(
        ctx,
        rd,
        agno,
        Btree::Ino,
        agi.root_of(Btree::Ino),
        &mut |place, i, r: &InobtRecord| {
            let Some(c) = unpack(ctx, place, agno, i, r) else {
                lost();
                return;
            };
            if u64::from(c.startino) < next {
                report.out_of_order(place, "record", i);
                lost();
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
                lost();
                return;
            }
            if !known {
                chunks.push(Chunk {
                    start: c.startino,
                    holemask: c.holemask,
                });
                frees.push(c.free);
            }
        },
    );
    if !ino.whole {
        lost();
    } else {
        counters(ctx, place, agi, (count, free), ino.blocks);
    }
    (sums.icount, sums.ifree) = match ino.whole {
        true => (count, free),
        false => (agi.count.get().into(), agi.freecount.get().into()),
    };
    if g.features.finobt {
        free_inodes(ctx, rd, agno, agi, ino.whole.then_some(with_free));
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
}

/// A record of a tree of inodes, unless it is no chunk of the group.
fn unpack(ctx: &Ctx<'_>, place: Place, agno: u32, i: usize, r: &InobtRecord) -> Option<InodeChunk> {
    let (g, report) = (ctx.g, ctx.report);
    let inodes_in_ag = u64::from(g.ag_blocks(agno)) << g.inopblog;
    let c = r.unpack(g.features.sparse);
    let start = u64::from(c.startino);
    let aligned = if g.chunk_blocks() == 1 {
        // Several chunks in a block, or exactly one.
        c.startino.is_multiple_of(INODES_PER_CHUNK)
    } else {
        c.startino & ((1 << g.inopblog) - 1) == 0
    };
    if !aligned || start >> g.inopblog == 0 || start >= inodes_in_ag {
        report.differ(
            place,
            format!("record {i}: startino"),
            "an inode chunk of the group",
            c.startino,
        );
        return None;
    }
    if !g.holes_fit(c.holemask) {
        report.bad(place, format!("record {i}: a hole of a part of a cluster"));
        return None;
    }
    let align = if g.features.sparse && c.holemask != 0 {
        g.spino_align
    } else {
        g.inoalignmt
    };
    if g.features.aligned_inodes
        && align > 1
        && g.chunk_blocks() > 1
        && !(c.startino >> g.inopblog).is_multiple_of(align)
    {
        report.differ(
            place,
            format!("record {i}: startino"),
            format!("aligned to {align} blocks"),
            c.startino,
        );
    }
    let holes = c.holes();
    let there = 64 - holes.count_ones();
    if c.count != there {
        report.differ(place, format!("record {i}: count"), there, c.count);
    }
    if c.free & holes != holes {
        report.bad(place, format!("record {i}: inodes in use in a hole"));
    }
    let n = (c.free & !holes).count_ones();
    if c.freecount != n {
        report.differ(place, format!("record {i}: freecount"), n, c.freecount);
    }
    Some(c)
}

/// Compares the counters of inodes and blocks with what the tree has.
fn counters(ctx: &Ctx<'_>, place: Place, agi: &Agi, (count, free): (u64, u64), blocks: u32) {
    let (g, report) = (ctx.g, ctx.report);
    report.count_is(place, Counter::AgiCount, count, agi.count.get());
    report.count_is(place, Counter::AgiFreecount, free, agi.freecount.get());
    if g.features.inobtcount {
        report.count_is(place, Counter::AgiIblocks, blocks, agi.iblocks.get());
    }
}

/// The tree of chunks with free inodes, and what the sum of its records should be, if that is known.
fn free_inodes(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, agi: &Agi, expected: Option<u64>) {
    let (g, report) = (ctx.g, ctx.report);
    let place = Place::ag(Structure::Agi, agno);
    let (mut sum, mut next) = (0u64, 0u64);
    let fino = walk(
        ctx,
        rd,
        agno,
        Btree::Fino,
        agi.root_of(Btree::Fino),
        &mut |place, i, r: &InobtRecord| {
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
        },
    );
    if fino.whole && expected.is_some_and(|e| e != sum) {
        report.bad(
            Place::ag(Btree::Fino, agno),
            "it does not list the same free inodes as the inobt",
        );
    }
    if fino.whole && g.features.inobtcount {
        let found = agi.fblocks.get();
        report.count_is(place, Counter::AgiFblocks, fino.blocks, found);
    }
}

/// The heads of the lists of unlinked inodes.
fn unlinked(ctx: &Ctx<'_>, place: Place, agi: &Agi, inodes_in_ag: u64) -> Vec<u32> {
    let report = ctx.report;
    let mut heads = Vec::new();
    for (bucket, head) in agi.unlinked.iter().enumerate() {
        let head = head.get();
        if head == NULLAGINO {
            continue;
        }
        if head == 0 || u64::from(head) >= inodes_in_ag {
            report.differ(
                place,
                format!("agi_unlinked[{bucket}]"),
                "an inode of the group",
                head,
            );
            continue;
        }
        if ctx.log_clean {
            // A clean unmount leaves none.
            report.differ(place, format!("agi_unlinked[{bucket}]"), "none", head);
        }
        if head as usize % AGI_UNLINKED_BUCKETS != bucket {
            report.differ(
                place,
                format!("agi_unlinked[{bucket}]"),
                "an inode of this bucket",
                head,
            );
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
    if g.inopblog >= 6 {
        // A block of one or several chunks: claimed once, by the first that comes.
        if *last != Some(first) {
            *last = Some(first);
            ctx.claim_owned(
                Place::block(Structure::InodeChunk, agno, first),
                agno,
                first,
                1,
                RMAP_OWN_INODES,
            );
        }
        return true;
    }
    let per_block = 1u32 << g.inopblog;
    let blocks = g.chunk_blocks();
    let holes = c.holes();
    for b in 0..blocks {
        let mask = ((1u64 << per_block) - 1) << (b * per_block);
        match holes & mask {
            0 => {}
            m if m == mask => continue,
            _ => {
                ctx.report
                    .bad(place, format!("record {i}: a hole ends inside a block"));
            }
        }
        if !g.has_agb(agno, first + b) {
            ctx.report.bad(
                place,
                format!("record {i}: the chunk ends beyond the group"),
            );
            return false;
        }
        ctx.claim_owned(
            Place::block(Structure::InodeChunk, agno, first + b),
            agno,
            first + b,
            1,
            RMAP_OWN_INODES,
        );
    }
    true
}
