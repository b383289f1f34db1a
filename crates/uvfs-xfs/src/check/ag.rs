//! Allocation groups: headers and the trees that hang off them.

mod copies;
mod inodes;
mod tree;

use super::ctx::SharedExtent;
use super::space::{class, mix};
use super::{Counter, Ctx, Place, Problem, Reader, Structure, Use};
use crate::blocks::Block;
use crate::format::*;
use std::sync::Arc;
use tree::AgTreeResult;
pub(crate) use tree::positions;

/// An allocation group that is checked.
struct GroupCheck<'c, 'a, 'r> {
    ctx: &'c Ctx<'a>,
    rd: &'c mut Reader<'r>,
    agno: u32,
}

/// Checks everything of an allocation group but its inodes.
pub(crate) fn check(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32) {
    let g = ctx.g;
    let mark = rd.mark();
    let headers = g.ag_header_daddr(agno, 0) << 9;
    rd.want(headers, 4 * u64::from(g.sector_size));
    rd.go();
    let place = Place::ag(Structure::GroupHeaders, agno);
    let blocks = g.header_blocks().min(g.ag_blocks(agno));
    ctx.claim_owned(place, agno, 0, blocks, RMAP_OWN_FS);
    if let Some(a) = g.fsb_run(g.logstart, g.logblocks)
        && g.logstart != 0
        && a.agno == agno
    {
        let place = Place::block(Structure::Log, agno, a.agbno);
        ctx.claim_owned(place, agno, a.agbno, g.logblocks, RMAP_OWN_LOG);
    }
    let mut group = GroupCheck { ctx, rd, agno };
    if agno > 0 {
        group.superblock_copy();
    }
    let mut sums = Counts::default();
    let whole = group.free_space(&mut sums);
    group.inodes(&mut sums);
    rd.release(mark);
    let ag = &ctx.ags[agno as usize];
    let _ = ag.sums.set(sums);
    let _ = ag.chunks.set(Arc::default());
    let _ = ag.free.set(Arc::default());
    let _ = ag.shared.set(Vec::new());
    let _ = ag.unlinked.set(Vec::new());
    if whole.is_none() {
        ctx.report.incomplete();
    }
}

/// Tells whether the group has the blocks of a record, by its number, first block and length; reports it if not.
fn inside<'c>(ctx: &'c Ctx<'_>, agno: u32) -> impl Fn(Place, usize, u32, u32) -> bool + 'c {
    let max = ctx.g.ag_blocks(agno);
    move |place, at, start, blocks| {
        let is = blocks > 0 && start < max && blocks <= max - start;
        if !is {
            ctx.report
                .bad(place, Problem::NotThere { at, start, blocks });
        }
        is
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

/// The part of a free extent in the sum of all.
fn extent_sum(start: u32, len: u32) -> u64 {
    mix(u64::from(start) << 32 | u64::from(len))
}

impl GroupCheck<'_, '_, '_> {
    /// A header sector, and what it should say of itself.
    fn sector(&mut self, place: Place, n: u32) -> Option<(Block, Ident)> {
        let g = self.ctx.g;
        let ident = g.header_ident(self.agno, n);
        let read = self.rd.bytes(ident.daddr << 9, g.sector_size as usize);
        let block = read.map_err(|e| self.ctx.io(place, &e)).ok()?;
        Some((block, ident))
    }

    /// Checks the version, number and length of a group in its AGF or AGI.
    fn head(&self, place: Place, prefix: &str, found: [Be32; 3]) {
        let expected = [1, self.agno, self.ctx.g.ag_blocks(self.agno)];
        let names = ["versionnum", "seqno", "length"].into_iter();
        for ((name, expected), found) in names.zip(expected).zip(found.map(Be32::get)) {
            if expected != found {
                let field = format!("{prefix}_{name}");
                self.ctx.report.differ(place, field, expected, found);
            }
        }
    }

    /// The tree of free space by block.
    fn by_block(&mut self, agf: &Agf) -> (AgTreeResult, Listed) {
        let (ctx, agno) = (self.ctx, self.agno);
        let inside = inside(ctx, agno);
        // In order, no overlaps. The claims find what else is there.
        let (mut listed, mut end) = (Listed::default(), 0u32);
        let root = agf.root_of(Btree::Bno);
        let walked = self.walk(Btree::Bno, root, &mut |place, i, r: &AllocRecord| {
            let (s, l) = (r.startblock.get(), r.blockcount.get());
            listed.sum = listed.sum.wrapping_add(extent_sum(s, l));
            if !inside(place, i, s, l) {
                return;
            }
            if s < end {
                let field = format!("record {i} out of order: start block");
                ctx.report
                    .differ(place, field, format!("at least {end}"), s);
            }
            end = end.max(s + l);
            listed.blocks += u64::from(l);
            listed.longest = listed.longest.max(l);
            ctx.claim(place, agno, s, l, Use::Free, false);
        });
        (walked, listed)
    }

    /// The tree of free space by size, and the sum of its extents.
    fn by_size(&mut self, agf: &Agf) -> (AgTreeResult, u64) {
        let report = self.ctx.report;
        let inside = inside(self.ctx, self.agno);
        let (mut sum, mut last) = (0u64, (0u32, 0u32));
        let root = agf.root_of(Btree::Cnt);
        let walked = self.walk(Btree::Cnt, root, &mut |place, i, r: &AllocRecord| {
            let (s, l) = (r.startblock.get(), r.blockcount.get());
            sum = sum.wrapping_add(extent_sum(s, l));
            inside(place, i, s, l);
            if (l, s) < last {
                report.out_of_order(place, "record", i);
            }
            last = (l, s);
        });
        (walked, sum)
    }

    /// AGF, AGFL, and the trees of free space, owners and sharing. `None` if not all could be followed.
    fn free_space(&mut self, sums: &mut Counts) -> Option<()> {
        let (ctx, agno) = (self.ctx, self.agno);
        let (features, report) = (&ctx.g.features, ctx.report);
        let place = Place::ag(Structure::Agf, agno);
        let (bytes, ident) = self.sector(place, AGF_SECTOR)?;
        let agf = report.sound(place, check_agf(&bytes, &ident))?;
        self.head(place, "agf", [agf.versionnum, agf.seqno, agf.length]);
        ctx.lsn(place, &bytes, 208);
        let (bno, listed) = self.by_block(agf);
        let (cnt, by_size) = self.by_size(agf);
        let (free, longest) = (listed.blocks, listed.longest);
        let mut whole = bno.whole && cnt.whole;
        if whole && listed.sum != by_size {
            let text = "it does not list the same free extents as the bnobt";
            report.bad(Place::ag(Btree::Cnt, agno), text);
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

        if features.rmapbt {
            let rmap = self.reverse_mappings(agf);
            whole &= rmap.whole;
            tree_blocks += rmap.blocks.saturating_sub(1);
            if rmap.whole {
                let found = agf.rmap_blocks.get();
                report.count_is(place, Counter::AgfRmapBlocks, rmap.blocks, found);
            }
        }
        if features.reflink {
            let refcount = self.reference_counts(agf);
            whole &= refcount.whole;
            if refcount.whole {
                let found = agf.refcount_blocks.get();
                report.count_is(place, Counter::AgfRefcountBlocks, refcount.blocks, found);
            }
        }
        if features.lazy_counters {
            let found = agf.btreeblks.get();
            sums.fdblocks += u64::from(if whole { tree_blocks } else { found });
            if whole {
                report.count_is(place, Counter::AgfBtreeblks, tree_blocks, found);
            }
        }
        self.free_list(agf)?;
        whole.then_some(())
    }

    /// The AGFL; `None` if it could not be followed.
    fn free_list(&mut self, agf: &Agf) -> Option<()> {
        let (ctx, agno) = (self.ctx, self.agno);
        let (g, report) = (ctx.g, ctx.report);
        let place = Place::ag(Structure::Agfl, agno);
        let (bytes, ident) = self.sector(place, AGFL_SECTOR)?;
        let slots = report.sound(place, check_agfl(&bytes, &ident))?;
        if g.features.crc
            && let Ok(h) = Agfl::at(&bytes, 0)
        {
            report.same(place, "agfl_seqno", agno, h.seqno.get());
        }
        ctx.lsn(place, &bytes, 24);
        // The kernel looks at the slots that are not in use, too.
        let outside = |b: &&Be32| b.get() != NULLAGBLOCK && b.get() >= g.agblocks;
        if let Some(b) = slots.iter().find(outside) {
            report.differ(place, "a slot", "a block of the group or none", b.get());
        }
        let len = slots.len() as u32;
        let (first, last, count) = (agf.flfirst.get(), agf.fllast.get(), agf.flcount.get());
        let agf_place = Place::ag(Structure::Agf, agno);
        if first >= len || last >= len || count > len {
            let field = "agf_flfirst, agf_fllast, agf_flcount";
            let found = format!("{first}, {last}, {count}");
            report.differ(agf_place, field, format!("slots below {len}"), found);
            return None;
        }
        let active = match count {
            0 => 0,
            _ if last >= first => last - first + 1,
            _ => len - first + last + 1,
        };
        report.same(agf_place, "agf_flcount", active, count);
        for i in 0..active {
            let b = slots[((first + i) % len) as usize].get();
            if !g.has_agb(agno, b) {
                report.differ(place, format!("slot {i}"), "a block of the group", b);
                continue;
            }
            ctx.claim_owned(place, agno, b, 1, RMAP_OWN_AG);
        }
        Some(())
    }

    fn reverse_mappings(&mut self, agf: &Agf) -> AgTreeResult {
        let (ctx, agno) = (self.ctx, self.agno);
        let (g, report, inside) = (ctx.g, ctx.report, inside(ctx, agno));
        let mut last = (0u32, 0u64, 0u64);
        let root = agf.root_of(Btree::Rmap);
        self.walk(Btree::Rmap, root, &mut |place, i, r: &RmapRecord| {
            let (s, l) = (r.startblock.get(), r.blockcount.get());
            let (owner, offset) = (r.owner.get(), r.offset.get());
            if !inside(place, i, s, l) {
                return;
            }
            let special = owner >> 63 != 0;
            let known = match special {
                true => (RMAP_OWN_COW..=RMAP_OWN_FS).contains(&owner),
                false => g.inode(owner).is_some(),
            };
            if !known {
                let field = format!("record {i}: owner");
                report.differ(place, field, "an inode or a structure", owner);
            }
            let key = (s, owner, offset & !RMAP_OFF_UNWRITTEN);
            if key < last {
                report.out_of_order(place, "record", i);
            }
            last = key;
            if special && offset != 0 {
                report.differ(place, format!("record {i}: offset"), 0, offset);
            }
            let flags = offset & !RMAP_OFF_MASK;
            let c = match special || offset & RMAP_OFF_BMBT_BLOCK != 0 {
                true => class(owner, if special { 0 } else { flags }, 0),
                false => {
                    let delta = (offset & RMAP_OFF_MASK).wrapping_sub(s.into());
                    class(owner, flags, delta)
                }
            };
            ctx.owned(agno, s, l, c, u64::MAX);
        })
    }

    fn reference_counts(&mut self, agf: &Agf) -> AgTreeResult {
        let (ctx, agno) = (self.ctx, self.agno);
        let (report, inside) = (ctx.report, inside(ctx, agno));
        let ag = &ctx.ags[agno as usize];
        let mut shared: Vec<SharedExtent> = Vec::new();
        // Sharing and staging records are ordered apart: the mark is the key's top bit.
        let (mut end, mut last_key, mut last_count) = ([0u32; 2], 0u32, 0u32);
        let root = agf.root_of(Btree::Refcount);
        let w = self.walk(
            Btree::Refcount,
            root,
            &mut |place, i, r: &RefcountRecord| {
                let staging = r.startblock.get() & REFC_COW_START != 0;
                let s = r.startblock.get() & !REFC_COW_START;
                let (l, count) = (r.blockcount.get(), r.refcount.get());
                if !inside(place, i, s, l) {
                    return;
                }
                let end = &mut end[usize::from(staging)];
                if r.startblock.get() < last_key || s < *end {
                    report.out_of_order(place, "record", i);
                } else if !staging && s == *end && count == last_count && *end != 0 {
                    let text = format!("record {i} should be one with the record before");
                    report.bad(place, text);
                }
                (last_key, last_count) = (r.startblock.get(), count);
                *end = (*end).max(s + l);
                let field = || format!("record {i}: rc_refcount");
                if staging {
                    if count != 1 {
                        report.differ(place, field(), 1, count);
                    }
                    ctx.claim_owned(place, agno, s, l, RMAP_OWN_COW);
                    // Left over from a crash; the next mount frees it.
                    if !ctx.log_clean {
                        return;
                    }
                    let text = format!("{l} blocks are left over from a copy-on-write");
                    return report.bad(place.at(agno, s), text);
                }
                if count < 2 {
                    report.differ(place, field(), "at least 2", count);
                }
                if s < ag.window.end && s + l > ag.window.start {
                    shared.push(SharedExtent {
                        start: s,
                        len: l,
                        count,
                    });
                }
            },
        );
        let _ = ag.shared.set(shared);
        w
    }
}
