//! Checks the extents of a fork, in the inode or in a B-tree.

use super::super::ctx::Ctx;
use super::super::problem::{Place, Problem, Structure};
use super::super::reader::{CHILDREN_AHEAD, Reader};
use super::super::space::Use;
use crate::format::*;
use crate::geometry::AgBlock;
use crate::inode::{Fork, Inode};
use std::collections::HashSet;

/// Extents of a fork that are kept; no directory or attribute fork comes near.
const MAX_EXTENTS: usize = 1 << 20;

/// A fork's extents being walked.
pub(super) struct ForkWalk<'c, 'a> {
    pub(super) ctx: &'c Ctx<'a>,
    pub(super) inode: &'c Inode,
    pub(super) fork: Fork,
    pub(super) kind: FileType,
    /// First file block that the next extent may begin at.
    pub(super) next: u64,
    pub(super) records: u64,
    /// Blocks of extents and of the tree.
    pub(super) blocks: u64,
    pub(super) keep: Option<Vec<Extent>>,
    pub(super) seen: HashSet<u64>,
    pub(super) last: [Option<(u64, u64)>; BTREE_MAXLEVELS as usize],
    pub(super) whole: bool,
    pub(super) realtime: bool,
}

impl ForkWalk<'_, '_> {
    fn place(&self) -> Place {
        let what = match self.fork {
            Fork::Data => Structure::DataFork,
            Fork::Attr => Structure::AttributeFork,
        };
        Place::inode(what, self.inode.ino)
    }

    pub(super) fn run(&mut self, rd: &mut Reader<'_>, format: u8) {
        let root = self.inode.fork_bytes(self.fork);
        match format {
            FORMAT_EXTENTS => {
                let n = match self.fork {
                    Fork::Data => self.inode.nextents,
                    Fork::Attr => self.inode.anextents,
                };
                // Inode::parse has checked that they fit.
                let recs = ExtentRecord::slice_at(root, 0, n as usize).unwrap_or_default();
                for r in recs {
                    self.extent(r.unpack());
                }
            }
            FORMAT_BTREE => self.btree(rd, root),
            _ => {}
        }
    }

    fn extent(&mut self, e: Extent) {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        let n = self.records;
        self.records += 1;
        let len = u64::from(e.blockcount);
        if e.startoff < self.next {
            report.differ(
                self.place(),
                format!("extent {n} out of order: br_startoff"),
                format!("at least {}", self.next),
                e.startoff,
            );
            self.whole = false;
        }
        // The greatest file offset is 2^63 - 1.
        if e.startoff + len > 1 << (63 - g.blocklog) {
            report.differ(
                self.place(),
                format!("extent {n}: br_startoff"),
                "an offset that a file can have",
                e.startoff,
            );
            self.whole = false;
        }
        self.next = self.next.max(e.startoff + len);
        self.blocks += len;
        if self.realtime {
            if e.startblock >= g.rblocks || len > g.rblocks - e.startblock || len == 0 {
                report.differ(
                    self.place(),
                    format!("extent {n}: br_startblock"),
                    "a run of blocks of the realtime section",
                    e.startblock,
                );
            }
            return;
        }
        let Some(a) = g.fsb_run(e.startblock, e.blockcount) else {
            self.whole = false;
            report.differ(
                self.place(),
                format!("extent {n}: br_startblock, br_blockcount"),
                "a run of blocks inside an allocation group",
                format!("{}, {}", e.startblock, e.blockcount),
            );
            return;
        };
        let data = self.fork == Fork::Data && self.kind == FileType::Regular;
        if e.unwritten && (!data || !g.features.unwritten) {
            report.bad(self.place(), format!("extent {n} is unwritten"));
        }
        let place = self.place();
        let reflink = self.inode.flags2 & DIFLAG2_REFLINK != 0;
        let new = if data { Use::Data } else { Use::Meta };
        ctx.claim(
            place,
            a.agno,
            a.agbno,
            e.blockcount,
            new,
            data && g.features.reflink,
        );
        let mut flags = 0;
        if self.fork == Fork::Attr {
            flags |= RMAP_OFF_ATTR_FORK;
        }
        if e.unwritten {
            flags |= RMAP_OFF_UNWRITTEN;
        }
        let delta = e.startoff.wrapping_sub(a.agbno.into());
        ctx.own(a.agno, a.agbno, e.blockcount, self.inode.ino, flags, delta);
        if data {
            ctx.refer(a.agno, a.agbno, e.blockcount);
            if g.features.reflink
                && !reflink
                && let Some(shared) = ctx.ags[a.agno as usize].shared.get()
            {
                let i = shared.partition_point(|s| s.start + s.len <= a.agbno);
                if shared
                    .get(i)
                    .is_some_and(|s| s.start < a.agbno + e.blockcount)
                {
                    let place = place.at(a.agno, shared[i].start.max(a.agbno));
                    report.add(place, Problem::NoReflinkFlag);
                }
            }
        }
        if let Some(keep) = &mut self.keep {
            if keep.len() < MAX_EXTENTS {
                keep.push(e);
            } else {
                self.whole = false;
                report.bad(self.place(), "too many extents");
            }
        }
    }

    fn btree(&mut self, rd: &mut Reader<'_>, root: &[u8]) {
        let (g, report) = (self.ctx.g, self.ctx.report);
        let place = self.place();
        let Ok(head) = BmdrBlock::at(root, 0) else {
            self.whole = false;
            return report.bad(place, "no room for the root of its B-tree");
        };
        let (level, n) = (head.level.get(), usize::from(head.numrecs.get()));
        let room = (root.len() - BmdrBlock::SIZE) / 16;
        if level == 0 || level >= BTREE_MAXLEVELS || n == 0 || n > room {
            self.whole = false;
            return report.differ(
                place,
                "bmdr level, numrecs",
                format!("a level from 1, 1 to {room} records"),
                format!("{level}, {n}"),
            );
        }
        let keys = Be64::slice_at(root, BmdrBlock::SIZE, n).unwrap_or_default();
        let ptrs = Be64::slice_at(root, BmdrBlock::SIZE + room * 8, n).unwrap_or_default();
        for (key, ptr) in keys.iter().zip(ptrs) {
            if let Some(low) = self.node(rd, ptr.get(), level - 1, n == 1)
                && low != key.get()
            {
                report.differ(place, "key of its B-tree's root", low, key.get());
            }
        }
        for (b, right) in self.last.into_iter().flatten() {
            if right != NULLFSBLOCK {
                let a = g.fsb(b).unwrap_or(AgBlock { agno: 0, agbno: 0 });
                let place = Place::inode(Btree::Bmap, self.inode.ino).at(a.agno, a.agbno);
                report.differ(place, "bb_rightsib", "none", right);
            }
        }
    }

    /// Gives the first key below.
    fn node(&mut self, rd: &mut Reader<'_>, fsbno: u64, level: u16, alone: bool) -> Option<u64> {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        let Some(a) = g.fsb(fsbno) else {
            self.whole = false;
            report.differ(
                self.place(),
                "pointer in its B-tree",
                "a block of the file system",
                fsbno,
            );
            return None;
        };
        let place = Place::inode(Btree::Bmap, self.inode.ino).at(a.agno, a.agbno);
        if !self.seen.insert(fsbno) {
            self.whole = false;
            report.bad(place, "the tree leads to this block twice");
            return None;
        }
        self.blocks += 1;
        ctx.claim(place, a.agno, a.agbno, 1, Use::Meta, false);
        let flags = RMAP_OFF_BMBT_BLOCK
            | match self.fork {
                Fork::Data => 0,
                Fork::Attr => RMAP_OFF_ATTR_FORK,
            };
        ctx.own(a.agno, a.agbno, 1, self.inode.ino, flags, 0);
        let block = match rd.blocks(g, a.agno, a.agbno, 1) {
            Ok(b) => b,
            Err(e) => {
                self.whole = false;
                ctx.io(place, &e);
                return None;
            }
        };
        let ident = g.ident(g.daddr(a), Some(self.inode.ino));
        let head = match check_btree_long(&block, &ident) {
            Ok(h) => *h,
            Err(f) => {
                self.whole = false;
                report.bad(place, f);
                return None;
            }
        };
        ctx.lsn(place, &block, 32);
        if head.level.get() != level {
            self.whole = false;
            report.differ(place, "bb_level", level, head.level.get());
            return None;
        }
        let n = usize::from(head.numrecs.get());
        let most = Btree::Bmap.max_records(block.len(), g.features.crc, level);
        if n == 0 || (!alone && n < most / 2) {
            report.differ(place, "bb_numrecs", format!("at least {}", most / 2), n);
        }
        let slot = self.last[usize::from(level)];
        let left = slot.map_or(NULLFSBLOCK, |(b, _)| b);
        if head.leftsib.get() != left {
            report.differ(place, "bb_leftsib", left, head.leftsib.get());
        }
        if let Some((_, right)) = slot
            && right != fsbno
        {
            report.differ(place, "right neighbour of the block before", fsbno, right);
        }
        self.last[usize::from(level)] = Some((fsbno, head.rightsib.get()));
        let at = Btree::Bmap.header_len(g.features.crc);
        if level == 0 {
            let recs = ExtentRecord::slice_at(&block, at, n).unwrap_or_default();
            for r in recs {
                self.extent(r.unpack());
            }
            return recs.first().map(|r| r.unpack().startoff);
        }
        let keys = Be64::slice_at(&block, at, n).unwrap_or_default();
        let ptrs_at = Btree::Bmap.ptr_offset(block.len(), g.features.crc, 0);
        let ptrs = Be64::slice_at(&block, ptrs_at, n).unwrap_or_default();
        let mark = rd.mark();
        for (i, (key, ptr)) in keys.iter().zip(ptrs).enumerate() {
            if i % CHILDREN_AHEAD == 0 {
                rd.release(mark);
                for a in ptrs[i..]
                    .iter()
                    .take(CHILDREN_AHEAD)
                    .filter_map(|p| g.fsb(p.get()))
                {
                    rd.want_blocks(g, a.agno, a.agbno, 1);
                }
                rd.go();
            }
            if let Some(low) = self.node(rd, ptr.get(), level - 1, false)
                && low != key.get()
            {
                report.differ(place, format!("key {i}"), low, key.get());
            }
        }
        rd.release(mark);
        keys.first().map(|k| k.get())
    }
}
