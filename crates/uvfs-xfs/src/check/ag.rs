//! Allocation groups: headers and the trees that hang off them.

mod copies;
mod inodes;
mod tree;

use super::ctx::{Ctx, SharedExtent};
use super::problem::{Counter, Place, Problem, Structure};
use super::reader::Reader;
use super::space::{Use, class, mix};
use crate::blocks::Block;
use crate::format::*;
use copies::superblock_copy;
use inodes::inodes;
use std::sync::Arc;
use tree::walk;
pub(crate) use tree::{AgTreeResult, positions};

/// Checks everything of an allocation group but its inodes.
pub(crate) fn check(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32) {
    let (g, report) = (ctx.g, ctx.report);
    let mut sums = Counts::default();
    let mark = rd.mark();
    let headers = g.ag_header_daddr(agno, 0) << 9;
    rd.want(headers, 4 * u64::from(g.sector_size));
    rd.go();
    ctx.claim_owned(
        Place::ag(Structure::GroupHeaders, agno),
        agno,
        0,
        g.header_blocks().min(g.ag_blocks(agno)),
        RMAP_OWN_FS,
    );
    if let Some(a) = g.fsb_run(g.logstart, g.logblocks)
        && g.logstart != 0
        && a.agno == agno
    {
        ctx.claim_owned(
            Place::block(Structure::Log, agno, a.agbno),
            agno,
            a.agbno,
            g.logblocks,
            RMAP_OWN_LOG,
        );
    }
    if agno > 0 {
        superblock_copy(ctx, rd, agno);
    }
    let whole = free_space(ctx, rd, agno, &mut sums);
    inodes(ctx, rd, agno, &mut sums);
    rd.release(mark);
    let ag = &ctx.ags[agno as usize];
    let _ = ag.sums.set(sums);
    let _ = ag.chunks.set(Arc::default());
    let _ = ag.free.set(Arc::default());
    let _ = ag.shared.set(Vec::new());
    let _ = ag.unlinked.set(Vec::new());
    if !whole {
        report.incomplete();
    }
}

/// A record of blocks that the group does not have.
fn not_there(at: usize, start: u32, blocks: u32) -> Problem {
    Problem::NotThere { at, start, blocks }
}

fn sector(ctx: &Ctx<'_>, rd: &mut Reader<'_>, place: Place, agno: u32, n: u32) -> Option<Block> {
    let at = ctx.g.ag_header_daddr(agno, n) << 9;
    match rd.bytes(at, ctx.g.sector_size as usize) {
        Ok(b) => Some(b),
        Err(e) => {
            ctx.io(place, &e);
            None
        }
    }
}

/// The free space that the tree by block lists.
#[derive(Default)]
struct Listed {
    blocks: u64,
    longest: u32,
    /// Of the extents, in whatever order.
    sum: u64,
}

/// The tree of free space by block.
fn by_block(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, agf: &Agf) -> (AgTreeResult, Listed) {
    let (max, report) = (ctx.g.ag_blocks(agno), ctx.report);
    // In order, no overlaps. The claims find what else is there.
    let (mut listed, mut end) = (Listed::default(), 0u32);
    let walked = walk(
        ctx,
        rd,
        agno,
        Btree::Bno,
        agf.root_of(Btree::Bno),
        &mut |place, i, r: &AllocRecord| {
            let (s, l) = (r.startblock.get(), r.blockcount.get());
            listed.sum = listed
                .sum
                .wrapping_add(mix(u64::from(s) << 32 | u64::from(l)));
            if l == 0 || s >= max || l > max - s {
                report.bad(place, not_there(i, s, l));
                return;
            }
            if s < end {
                report.differ(
                    place,
                    format!("record {i} out of order: start block"),
                    format!("at least {end}"),
                    s,
                );
            }
            end = end.max(s + l);
            listed.blocks += u64::from(l);
            listed.longest = listed.longest.max(l);
            ctx.claim(place, agno, s, l, Use::Free, false);
        },
    );
    (walked, listed)
}

/// The tree of free space by size, and the sum of its extents.
fn by_size(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, agf: &Agf) -> (AgTreeResult, u64) {
    let (max, report) = (ctx.g.ag_blocks(agno), ctx.report);
    let (mut sum, mut last) = (0u64, (0u32, 0u32));
    let walked = walk(
        ctx,
        rd,
        agno,
        Btree::Cnt,
        agf.root_of(Btree::Cnt),
        &mut |place, i, r: &AllocRecord| {
            let (s, l) = (r.startblock.get(), r.blockcount.get());
            sum = sum.wrapping_add(mix(u64::from(s) << 32 | u64::from(l)));
            if l == 0 || s >= max || l > max - s {
                report.bad(place, not_there(i, s, l));
            }
            if (l, s) < last {
                report.out_of_order(place, "record", i);
            }
            last = (l, s);
        },
    );
    (walked, sum)
}

/// AGF, AGFL, and the trees of free space, owners and sharing. Gives whether all could be followed.
fn free_space(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, sums: &mut Counts) -> bool {
    let (g, report) = (ctx.g, ctx.report);
    let place = Place::ag(Structure::Agf, agno);
    let Some(bytes) = sector(ctx, rd, place, agno, AGF_SECTOR) else {
        return false;
    };
    let ident = g.ident(g.ag_header_daddr(agno, AGF_SECTOR), Some(agno.into()));
    let agf = match check_agf(&bytes, &ident) {
        Ok(a) => a,
        Err(f) => {
            report.bad(place, f);
            return false;
        }
    };
    head(
        ctx,
        place,
        "agf",
        agno,
        agf.versionnum.get(),
        agf.seqno.get(),
        agf.length.get(),
    );
    ctx.lsn(place, &bytes, 208);
    let mut whole = true;
    let (bno, listed) = by_block(ctx, rd, agno, agf);
    let (cnt, by_size) = by_size(ctx, rd, agno, agf);
    let (free, longest) = (listed.blocks, listed.longest);
    whole &= bno.whole && cnt.whole;
    if bno.whole && cnt.whole && listed.sum != by_size {
        report.bad(
            Place::ag(Btree::Cnt, agno),
            "it does not list the same free extents as the bnobt",
        );
    }
    if bno.whole {
        report.count_is(place, Counter::AgfFreeblks, free, agf.freeblks.get());
        report.count_is(place, Counter::AgfLongest, longest, agf.longest.get());
    }
    // The superblock is compared with what should be there.
    sums.fdblocks = u64::from(agf.flcount.get())
        + match bno.whole {
            true => free,
            false => agf.freeblks.get().into(),
        };
    let mut tree_blocks = (bno.blocks + cnt.blocks).saturating_sub(2);

    if g.features.rmapbt {
        let rmap = reverse_mappings(ctx, rd, agno, agf);
        whole &= rmap.whole;
        tree_blocks += rmap.blocks.saturating_sub(1);
        if rmap.whole {
            let found = agf.rmap_blocks.get();
            report.count_is(place, Counter::AgfRmapBlocks, rmap.blocks, found);
        }
    }
    if g.features.reflink {
        let refcount = reference_counts(ctx, rd, agno, agf);
        whole &= refcount.whole;
        if refcount.whole {
            let found = agf.refcount_blocks.get();
            report.count_is(place, Counter::AgfRefcountBlocks, refcount.blocks, found);
        }
    }
    if whole && g.features.lazy_counters {
        let found = agf.btreeblks.get();
        report.count_is(place, Counter::AgfBtreeblks, tree_blocks, found);
    }
    if g.features.lazy_counters {
        sums.fdblocks += match whole {
            true => u64::from(tree_blocks),
            false => agf.btreeblks.get().into(),
        };
    }
    free_list(ctx, rd, agno, agf) && whole
}

fn head(ctx: &Ctx<'_>, place: Place, p: &str, agno: u32, version: u32, seqno: u32, length: u32) {
    if version != 1 {
        ctx.report
            .differ(place, format!("{p}_versionnum"), 1, version);
    }
    if seqno != agno {
        ctx.report.differ(place, format!("{p}_seqno"), agno, seqno);
    }
    let blocks = ctx.g.ag_blocks(agno);
    if length != blocks {
        ctx.report
            .differ(place, format!("{p}_length"), blocks, length);
    }
}

fn free_list(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, agf: &Agf) -> bool {
    let (g, report) = (ctx.g, ctx.report);
    let place = Place::ag(Structure::Agfl, agno);
    let Some(bytes) = sector(ctx, rd, place, agno, AGFL_SECTOR) else {
        return false;
    };
    let ident = g.ident(g.ag_header_daddr(agno, AGFL_SECTOR), Some(agno.into()));
    let slots = match check_agfl(&bytes, &ident) {
        Ok(s) => s,
        Err(f) => {
            report.bad(place, f);
            return false;
        }
    };
    if g.features.crc
        && let Ok(h) = Agfl::at(&bytes, 0)
        && h.seqno.get() != agno
    {
        report.differ(place, "agfl_seqno", agno, h.seqno.get());
    }
    ctx.lsn(place, &bytes, 24);
    // The kernel looks at the slots that are not in use, too.
    let outside = |b: &Be32| b.get() != NULLAGBLOCK && b.get() >= g.agblocks;
    if let Some(b) = slots.iter().find(|b| outside(b)) {
        report.differ(place, "a slot", "a block of the group or none", b.get());
    }
    let len = slots.len() as u32;
    let (first, last, count) = (agf.flfirst.get(), agf.fllast.get(), agf.flcount.get());
    let agf_place = Place::ag(Structure::Agf, agno);
    if first >= len || last >= len || count > len {
        report.differ(
            agf_place,
            "agf_flfirst, agf_fllast, agf_flcount",
            format!("slots below {len}"),
            format!("{first}, {last}, {count}"),
        );
        return false;
    }
    let active = if count == 0 {
        0
    } else if last >= first {
        last - first + 1
    } else {
        len - first + last + 1
    };
    if active != count {
        report.differ(agf_place, "agf_flcount", active, count);
    }
    for i in 0..active {
        let b = slots[((first + i) % len) as usize].get();
        if !g.has_agb(agno, b) {
            report.differ(place, format!("slot {i}"), "a block of the group", b);
            continue;
        }
        ctx.claim_owned(place, agno, b, 1, RMAP_OWN_AG);
    }
    true
}

fn reverse_mappings(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, agf: &Agf) -> AgTreeResult {
    let (g, report) = (ctx.g, ctx.report);
    let max = g.ag_blocks(agno);
    let mut last = (0u32, 0u64, 0u64);
    walk(
        ctx,
        rd,
        agno,
        Btree::Rmap,
        agf.root_of(Btree::Rmap),
        &mut |place, i, r: &RmapRecord| {
            let (s, l) = (r.startblock.get(), r.blockcount.get());
            let (owner, offset) = (r.owner.get(), r.offset.get());
            if l == 0 || s >= max || l > max - s {
                report.bad(place, not_there(i, s, l));
                return;
            }
            let special = owner >> 63 != 0;
            let known = (RMAP_OWN_COW..=RMAP_OWN_FS).contains(&owner);
            if (special && !known) || (!special && g.inode(owner).is_none()) {
                report.differ(
                    place,
                    format!("record {i}: owner"),
                    "an inode or a structure",
                    owner,
                );
            }
            let key = (s, owner, offset & !RMAP_OFF_UNWRITTEN);
            if key < last {
                report.out_of_order(place, "record", i);
            }
            last = key;
            let flags = offset & !RMAP_OFF_MASK;
            if special && offset != 0 {
                report.differ(place, format!("record {i}: offset"), 0, offset);
            }
            let c = if special {
                class(owner, 0, 0)
            } else if offset & RMAP_OFF_BMBT_BLOCK != 0 {
                class(owner, flags, 0)
            } else {
                let delta = (offset & RMAP_OFF_MASK).wrapping_sub(s.into());
                class(owner, flags, delta)
            };
            ctx.owned(agno, s, l, c, u64::MAX);
        },
    )
}

fn reference_counts(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, agf: &Agf) -> AgTreeResult {
    let (g, report) = (ctx.g, ctx.report);
    let max = g.ag_blocks(agno);
    let mut shared: Vec<SharedExtent> = Vec::new();
    // Sharing and staging records are ordered apart: the mark is the key's top bit.
    let (mut end, mut last_key, mut last_count) = ([0u32; 2], 0u32, 0u32);
    let w = walk(
        ctx,
        rd,
        agno,
        Btree::Refcount,
        agf.root_of(Btree::Refcount),
        &mut |place, i, r: &RefcountRecord| {
            let staging = r.startblock.get() & REFC_COW_START != 0;
            let s = r.startblock.get() & !REFC_COW_START;
            let (l, count) = (r.blockcount.get(), r.refcount.get());
            if l == 0 || s >= max || l > max - s {
                report.bad(place, not_there(i, s, l));
                return;
            }
            let end = &mut end[usize::from(staging)];
            if r.startblock.get() < last_key || s < *end {
                report.out_of_order(place, "record", i);
            } else if !staging && s == *end && count == last_count && *end != 0 {
                report.bad(
                    place,
                    format!("record {i} should be one with the record before"),
                );
            }
            (last_key, last_count) = (r.startblock.get(), count);
            *end = (*end).max(s + l);
            if staging {
                if count != 1 {
                    report.differ(place, format!("record {i}: rc_refcount"), 1, count);
                }
                ctx.claim_owned(place, agno, s, l, RMAP_OWN_COW);
                // Left over from a crash; the next mount frees it.
                report.bad(
                    place.at(agno, s),
                    format!("{l} blocks are left over from a copy-on-write"),
                );
            } else {
                if count < 2 {
                    report.differ(
                        place,
                        format!("record {i}: rc_refcount"),
                        "at least 2",
                        count,
                    );
                }
                let window = &ctx.ags[agno as usize].window;
                if s < window.end && s + l > window.start {
                    shared.push(SharedExtent {
                        start: s,
                        len: l,
                        count,
                    });
                }
            }
        },
    );
    let _ = ctx.ags[agno as usize].shared.set(shared);
    w
}
