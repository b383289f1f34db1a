//! Allocation groups: headers and the trees that hang off them.

use super::ctx::{AgSums, Chunk, Ctx, Shared};
use super::reader::{Bytes, Reader};
use super::report::Place;
use super::space::{Use, class, mix};
use crate::format::*;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Blocks below a node of a tree that are read ahead together.
pub(crate) const CHILDREN_AHEAD: usize = 32;

/// A tree of an allocation group being walked.
struct Walk<'c, 'a> {
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

/// What a walk came to.
pub(crate) struct Walked {
    pub blocks: u32,
    pub whole: bool,
}

impl Walk<'_, '_> {
    fn place(&self, agbno: u32) -> Place {
        Place::block(self.tree.name(), self.agno, agbno)
    }

    fn lost(&mut self) {
        self.whole = false;
        self.ctx.report.incomplete();
    }

    fn owner(&self) -> u64 {
        match self.tree {
            Btree::Bno | Btree::Cnt | Btree::Rmap => RMAP_OWN_AG,
            Btree::Refcount => RMAP_OWN_REFC,
            _ => RMAP_OWN_INOBT,
        }
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
        if !g.has_agb(self.agno, agbno) || agbno == 0 {
            self.lost();
            report.differ(place, "block pointer", "a block of the group", agbno);
            return None;
        }
        if !self.seen.insert(agbno) {
            self.lost();
            report.bad(place, "the tree leads to this block twice");
            return None;
        }
        ctx.claim_owned(place, self.agno, agbno, 1, self.owner());
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
                report.fault(place, &f);
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
        let key_len = self.tree.key_len();
        let (mut low, mut high, mut previous) = (None, 0, None);
        let mark = rd.mark();
        for i in 0..n {
            if i % CHILDREN_AHEAD == 0 {
                rd.release(mark);
                for k in i..n.min(i + CHILDREN_AHEAD) {
                    let ptr_at = self.tree.ptr_offset(block.len(), g.features.crc, k);
                    match Be32::at(&block, ptr_at) {
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
                report.bad(place, format!("key {i} is out of order"));
            }
            previous = Some(key_low);
            let ptr_at = self.tree.ptr_offset(block.len(), g.features.crc, i);
            let Ok(ptr) = Be32::at(&block, ptr_at) else {
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
        Place::block(self.tree.name(), self.agno, agbno)
    }
}

fn name(agbno: u32) -> String {
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
fn walk(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    agno: u32,
    tree: Btree,
    root: u32,
    levels: u32,
    visit: &mut dyn FnMut(u32, &[u8], usize),
) -> Walked {
    let place = Place::ag(tree.name(), agno);
    if levels == 0 || levels > u32::from(BTREE_MAXLEVELS) {
        ctx.report.incomplete();
        ctx.report
            .differ(place, "levels", "at least 1 and what fits", levels);
        return Walked {
            blocks: 0,
            whole: false,
        };
    }
    let mut w = Walk {
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
    Walked {
        blocks: w.seen.len() as u32,
        whole: w.whole,
    }
}

/// Where the chunks of inodes and the records of shared blocks of a group begin, in order. What is
/// wrong with the trees is for [`check`] to find.
pub(crate) fn positions(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    agno: u32,
    chunk: &mut dyn FnMut(u32),
    shared: &mut dyn FnMut(u32),
) {
    let g = ctx.g;
    let ident = |sector| g.ident(g.ag_header_daddr(agno, sector), Some(agno.into()));
    let nowhere = Place::ag("", agno);
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

/// Checks everything of an allocation group but its inodes.
pub(crate) fn check(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32) {
    let (g, report) = (ctx.g, ctx.report);
    let mut sums = AgSums::default();
    let mark = rd.mark();
    let headers = g.ag_header_daddr(agno, 0) << 9;
    rd.want(headers, 4 * u64::from(g.sector_size));
    rd.go();
    let header_blocks = (4 * g.sector_size).div_ceil(g.block_size);
    ctx.claim_owned(
        Place::ag("allocation group headers", agno),
        agno,
        0,
        header_blocks.min(g.ag_blocks(agno)),
        RMAP_OWN_FS,
    );
    if let Some(a) = g.fsb_run(g.logstart, g.logblocks)
        && g.logstart != 0
        && a.agno == agno
    {
        ctx.claim_owned(
            Place::block("log", agno, a.agbno),
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

fn sector(ctx: &Ctx<'_>, rd: &mut Reader<'_>, place: Place, agno: u32, n: u32) -> Option<Bytes> {
    let at = ctx.g.ag_header_daddr(agno, n) << 9;
    match rd.bytes(at, ctx.g.sector_size as usize) {
        Ok(b) => Some(b),
        Err(e) => {
            ctx.io(place, &e);
            None
        }
    }
}

fn superblock_copy(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32) {
    let place = Place::ag("superblock copy", agno);
    let Some(bytes) = sector(ctx, rd, place, agno, 0) else {
        return;
    };
    let copy = match check_superblock(&bytes) {
        Ok(s) => s,
        Err(f) => return ctx.report.fault(place, &f),
    };
    ctx.lsn(place, &bytes, 240);
    let sb = ctx.sb;
    macro_rules! same {
        ($($field:ident),*) => {$(
            if copy.$field.get() != sb.$field.get() {
                ctx.report.differ(place, concat!("sb_", stringify!($field)),
                    sb.$field.get(), copy.$field.get());
            }
        )*};
    }
    macro_rules! same_byte {
        ($($field:ident),*) => {$(
            if copy.$field != sb.$field {
                ctx.report.differ(place, concat!("sb_", stringify!($field)),
                    sb.$field, copy.$field);
            }
        )*};
    }
    same!(
        blocksize,
        dblocks,
        rblocks,
        rextents,
        logstart,
        rextsize,
        agblocks,
        agcount,
        rbmblocks,
        logblocks,
        sectsize,
        inodesize,
        inopblock,
        inoalignmt,
        unit,
        width,
        logsectsize,
        logsunit
    );
    same_byte!(
        blocklog, sectlog, inodelog, inopblog, agblklog, rextslog, dirblklog, logsectlog
    );
    if copy.uuid != sb.uuid {
        let (e, f) = (format_uuid(&sb.uuid), format_uuid(&copy.uuid));
        ctx.report.differ(place, "sb_uuid", e, f);
    }
    let version =
        |s: &Superblock| s.versionnum.get() & !(VERSION_ATTR | VERSION_QUOTA | VERSION_NLINK);
    if version(copy) != version(sb) {
        let (e, f) = (version(sb), version(copy));
        ctx.report
            .differ(place, "sb_versionnum", format!("{e:#x}"), format!("{f:#x}"));
    }
    if ctx.g.features.crc {
        same!(
            spino_align,
            features2,
            features_compat,
            features_ro_compat,
            features_incompat
        );
    }
    if copy.flags & !1 != 0 {
        ctx.report.differ(place, "sb_flags", 0, copy.flags);
    }
    if copy.rextents.get() == 0 && copy.frextents.get() != 0 {
        let found = copy.frextents.get();
        ctx.report.differ(place, "sb_frextents", 0, found);
    }
    // A copy that is as mkfs left it has none of what mounts add.
    if copy.inprogress == 1 {
        for (name, value) in [
            ("sb_uquotino", copy.uquotino.get()),
            ("sb_gquotino", copy.gquotino.get()),
            ("sb_pquotino", copy.pquotino.get()),
        ] {
            if value != 0 && value != NULLFSINO {
                ctx.report.differ(place, name, 0, value);
            }
        }
        if copy.qflags.get() != 0 {
            ctx.report.differ(place, "sb_qflags", 0, copy.qflags.get());
        }
    }
    // What the file system's features have no field for is zeros.
    let end = if !ctx.g.features.crc {
        SB_CRC_OFFSET - 16
    } else if ctx.g.features.meta_uuid {
        264
    } else {
        248
    };
    if bytes[end..].iter().any(|b| *b != 0) {
        ctx.report
            .bad(place, format!("bytes that are not zero after byte {end}"));
    }
}

/// AGF, AGFL, and the trees of free space, owners and sharing. Gives whether all could be followed.
fn free_space(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, sums: &mut AgSums) -> bool {
    let (g, report) = (ctx.g, ctx.report);
    let place = Place::ag("AGF", agno);
    let Some(bytes) = sector(ctx, rd, place, agno, AGF_SECTOR) else {
        return false;
    };
    let ident = g.ident(g.ag_header_daddr(agno, AGF_SECTOR), Some(agno.into()));
    let agf = match check_agf(&bytes, &ident) {
        Ok(a) => a,
        Err(f) => {
            report.fault(place, &f);
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
    let max = g.ag_blocks(agno);

    // By block: in order, no overlaps. The claims find what else is there.
    let (mut free, mut longest, mut by_bno, mut end) = (0u64, 0u32, 0u64, 0u32);
    let bno = walk(
        ctx,
        rd,
        agno,
        Btree::Bno,
        agf.bno_root.get(),
        agf.bno_level.get(),
        &mut |at, recs, n| {
            let place = Place::block("bnobt", agno, at);
            for (i, r) in AllocRecord::slice_at(recs, 0, n)
                .unwrap_or_default()
                .iter()
                .enumerate()
            {
                let (s, l) = (r.startblock.get(), r.blockcount.get());
                by_bno = by_bno.wrapping_add(mix(u64::from(s) << 32 | u64::from(l)));
                if l == 0 || s >= max || l > max - s {
                    report.bad(
                        place,
                        format!("record {i}: {l} blocks from {s} are not there"),
                    );
                    continue;
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
                free += u64::from(l);
                longest = longest.max(l);
                ctx.claim(place, agno, s, l, Use::Free, false);
            }
        },
    );
    whole &= bno.whole;
    let (mut by_cnt, mut last) = (0u64, (0u32, 0u32));
    let cnt = walk(
        ctx,
        rd,
        agno,
        Btree::Cnt,
        agf.cnt_root.get(),
        agf.cnt_level.get(),
        &mut |at, recs, n| {
            let place = Place::block("cntbt", agno, at);
            for (i, r) in AllocRecord::slice_at(recs, 0, n)
                .unwrap_or_default()
                .iter()
                .enumerate()
            {
                let (s, l) = (r.startblock.get(), r.blockcount.get());
                by_cnt = by_cnt.wrapping_add(mix(u64::from(s) << 32 | u64::from(l)));
                if l == 0 || s >= max || l > max - s {
                    report.bad(
                        place,
                        format!("record {i}: {l} blocks from {s} are not there"),
                    );
                }
                if (l, s) < last {
                    report.bad(place, format!("record {i} is out of order"));
                }
                last = (l, s);
            }
        },
    );
    whole &= cnt.whole;
    if bno.whole && cnt.whole && by_bno != by_cnt {
        report.bad(
            Place::ag("cntbt", agno),
            "it does not list the same free extents as the bnobt",
        );
    }
    if bno.whole {
        if u64::from(agf.freeblks.get()) != free {
            report.differ(place, "agf_freeblks", free, agf.freeblks.get());
        }
        if agf.longest.get() != longest {
            report.differ(place, "agf_longest", longest, agf.longest.get());
        }
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
        if rmap.whole && agf.rmap_blocks.get() != rmap.blocks {
            report.differ(place, "agf_rmap_blocks", rmap.blocks, agf.rmap_blocks.get());
        }
    }
    if g.features.reflink {
        let refcount = reference_counts(ctx, rd, agno, agf);
        whole &= refcount.whole;
        if refcount.whole && agf.refcount_blocks.get() != refcount.blocks {
            report.differ(
                place,
                "agf_refcount_blocks",
                refcount.blocks,
                agf.refcount_blocks.get(),
            );
        }
    }
    if whole && g.features.lazy_counters && agf.btreeblks.get() != tree_blocks {
        report.differ(place, "agf_btreeblks", tree_blocks, agf.btreeblks.get());
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
    let place = Place::ag("AGFL", agno);
    let Some(bytes) = sector(ctx, rd, place, agno, AGFL_SECTOR) else {
        return false;
    };
    let ident = g.ident(g.ag_header_daddr(agno, AGFL_SECTOR), Some(agno.into()));
    let slots = match check_agfl(&bytes, &ident) {
        Ok(s) => s,
        Err(f) => {
            report.fault(place, &f);
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
    let len = slots.len() as u32;
    let (first, last, count) = (agf.flfirst.get(), agf.fllast.get(), agf.flcount.get());
    let agf_place = Place::ag("AGF", agno);
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
        if b == 0 || !g.has_agb(agno, b) {
            report.differ(place, format!("slot {i}"), "a block of the group", b);
            continue;
        }
        ctx.claim_owned(place, agno, b, 1, RMAP_OWN_AG);
    }
    true
}

fn reverse_mappings(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, agf: &Agf) -> Walked {
    let (g, report) = (ctx.g, ctx.report);
    let max = g.ag_blocks(agno);
    let mut last = (0u32, 0u64, 0u64);
    walk(
        ctx,
        rd,
        agno,
        Btree::Rmap,
        agf.rmap_root.get(),
        agf.rmap_level.get(),
        &mut |at, recs, n| {
            let place = Place::block("rmapbt", agno, at);
            let recs = RmapRecord::slice_at(recs, 0, n).unwrap_or_default();
            for (i, r) in recs.iter().enumerate() {
                let (s, l) = (r.startblock.get(), r.blockcount.get());
                let (owner, offset) = (r.owner.get(), r.offset.get());
                if l == 0 || s >= max || l > max - s {
                    report.bad(
                        place,
                        format!("record {i}: {l} blocks from {s} are not there"),
                    );
                    continue;
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
                    report.bad(place, format!("record {i} is out of order"));
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
            }
        },
    )
}

fn reference_counts(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, agf: &Agf) -> Walked {
    let (g, report) = (ctx.g, ctx.report);
    let max = g.ag_blocks(agno);
    let mut shared: Vec<Shared> = Vec::new();
    // Sharing and staging records are ordered apart: the mark is the key's top bit.
    let (mut end, mut last_key, mut last_count) = ([0u32; 2], 0u32, 0u32);
    let w = walk(
        ctx,
        rd,
        agno,
        Btree::Refcount,
        agf.refcount_root.get(),
        agf.refcount_level.get(),
        &mut |at, recs, n| {
            let place = Place::block("refcountbt", agno, at);
            let recs = RefcountRecord::slice_at(recs, 0, n).unwrap_or_default();
            for (i, r) in recs.iter().enumerate() {
                let staging = r.startblock.get() & REFC_COW_START != 0;
                let s = r.startblock.get() & !REFC_COW_START;
                let (l, count) = (r.blockcount.get(), r.refcount.get());
                if l == 0 || s >= max || l > max - s {
                    report.bad(
                        place,
                        format!("record {i}: {l} blocks from {s} are not there"),
                    );
                    continue;
                }
                let end = &mut end[usize::from(staging)];
                if r.startblock.get() < last_key || s < *end {
                    report.bad(place, format!("record {i} is out of order"));
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
                        shared.push(Shared {
                            start: s,
                            len: l,
                            count,
                        });
                    }
                }
            }
        },
    );
    let _ = ctx.ags[agno as usize].shared.set(shared);
    w
}

/// AGI, inode trees, and the chunks' blocks.
fn inodes(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32, sums: &mut AgSums) {
    let (g, report) = (ctx.g, ctx.report);
    let ag = &ctx.ags[agno as usize];
    let place = Place::ag("AGI", agno);
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
            report.fault(place, &f);
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
    let mut chunks: Vec<Chunk> = Vec::new();
    let mut frees: Vec<u64> = Vec::new();
    // From the first pass.
    let known = ag.chunks.get().is_some();
    // What the finobt should have, in sum.
    let (mut with_free, mut next) = (0u64, 0u64);
    let (mut count, mut free) = (0u64, 0u64);
    let mut last_block = None;
    let unpack = |at: u32, i: usize, r: &InobtRecord, tree: Btree| -> Option<InodeChunk> {
        let place = Place::block(tree.name(), agno, at);
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
    };
    let ino = walk(
        ctx,
        rd,
        agno,
        Btree::Ino,
        agi.root.get(),
        agi.level.get(),
        &mut |at, recs, n| {
            let place = Place::block("inobt", agno, at);
            let recs = InobtRecord::slice_at(recs, 0, n).unwrap_or_default();
            for (i, r) in recs.iter().enumerate() {
                let Some(c) = unpack(at, i, r, Btree::Ino) else {
                    lost();
                    continue;
                };
                if u64::from(c.startino) < next {
                    report.bad(place, format!("record {i} is out of order"));
                    lost();
                    continue;
                }
                next = u64::from(c.startino) + u64::from(INODES_PER_CHUNK);
                let holes = c.holes();
                count += u64::from(64 - holes.count_ones());
                free += u64::from((c.free & !holes).count_ones());
                if c.free & !holes != 0 {
                    with_free = with_free.wrapping_add(chunk_sum(&c));
                }
                if !claim_chunk(ctx, agno, at, i, &c, &mut last_block) {
                    lost();
                    continue;
                }
                if !known {
                    chunks.push(Chunk {
                        start: c.startino,
                        holemask: c.holemask,
                    });
                    frees.push(c.free);
                }
            }
        },
    );
    if !ino.whole {
        lost();
    } else {
        if u64::from(agi.count.get()) != count {
            report.differ(place, "agi_count", count, agi.count.get());
        }
        if u64::from(agi.freecount.get()) != free {
            report.differ(place, "agi_freecount", free, agi.freecount.get());
        }
        if g.features.inobtcount && agi.iblocks.get() != ino.blocks {
            report.differ(place, "agi_iblocks", ino.blocks, agi.iblocks.get());
        }
    }
    (sums.icount, sums.ifree) = match ino.whole {
        true => (count, free),
        false => (agi.count.get().into(), agi.freecount.get().into()),
    };
    if g.features.finobt {
        let (mut sum, mut next) = (0u64, 0u64);
        let fino = walk(
            ctx,
            rd,
            agno,
            Btree::Fino,
            agi.free_root.get(),
            agi.free_level.get(),
            &mut |at, recs, n| {
                let place = Place::block("finobt", agno, at);
                let recs = InobtRecord::slice_at(recs, 0, n).unwrap_or_default();
                for (i, r) in recs.iter().enumerate() {
                    let Some(c) = unpack(at, i, r, Btree::Fino) else {
                        continue;
                    };
                    if u64::from(c.startino) < next {
                        report.bad(place, format!("record {i} is out of order"));
                    }
                    next = u64::from(c.startino) + u64::from(INODES_PER_CHUNK);
                    if c.free & !c.holes() == 0 {
                        report.bad(place, format!("record {i} has no free inode"));
                    }
                    sum = sum.wrapping_add(chunk_sum(&c));
                }
            },
        );
        if fino.whole && ino.whole && sum != with_free {
            report.bad(
                Place::ag("finobt", agno),
                "it does not list the same free inodes as the inobt",
            );
        }
        if fino.whole && g.features.inobtcount && agi.fblocks.get() != fino.blocks {
            report.differ(place, "agi_fblocks", fino.blocks, agi.fblocks.get());
        }
    }
    // New inodes go beside the last chunk.
    let newino = agi.newino.get();
    if newino != NULLAGINO && ino.whole && u64::from(newino) >= inodes_in_ag {
        report.differ(place, "agi_newino", "an inode of the group", newino);
    }
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
    let _ = ag.chunks.set(Arc::new(chunks));
    let _ = ag.free.set(Arc::new(frees));
    let _ = ag.unlinked.set(heads);
}

fn chunk_sum(c: &InodeChunk) -> u64 {
    mix(mix(u64::from(c.startino) << 16 | u64::from(c.holemask)) ^ c.free)
}

/// Claims the blocks that a chunk's inodes are in.
fn claim_chunk(
    ctx: &Ctx<'_>,
    agno: u32,
    at: u32,
    i: usize,
    c: &InodeChunk,
    last: &mut Option<u32>,
) -> bool {
    let g = ctx.g;
    let place = Place::block("inobt", agno, at);
    let first = c.startino >> g.inopblog;
    if g.inopblog >= 6 {
        // A block of one or several chunks: claimed once, by the first that comes.
        if *last != Some(first) {
            *last = Some(first);
            ctx.claim_owned(
                Place::block("inode chunk", agno, first),
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
            Place::block("inode chunk", agno, first + b),
            agno,
            first + b,
            1,
            RMAP_OWN_INODES,
        );
    }
    true
}
