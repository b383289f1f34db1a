//! Checks the extents of a fork, in the inode or in a B-tree.

use super::super::tree::TreeCheck;
use super::super::{Ctx, Place, Problem, Reader, Structure, Use};
use crate::format::*;
use crate::read::inode::{Fork, Inode};
use crate::walk::btree::{Item, fork_tree};

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
                for r in self.inode.records(self.fork) {
                    self.extent(r.unpack());
                }
            }
            FORMAT_BTREE => self.btree(rd, root),
            _ => {}
        }
    }

    fn extent(&mut self, e: Extent) {
        let ctx = self.ctx;
        let (g, report, place) = (ctx.g, ctx.report, self.place());
        let n = self.records;
        self.records += 1;
        let len = u64::from(e.blockcount);
        if e.startoff < self.next {
            let field = format!("extent {n} out of order: br_startoff");
            report.differ(place, field, format!("at least {}", self.next), e.startoff);
            self.whole = false;
        }
        // The greatest file offset is 2^63 - 1.
        if e.startoff + len > 1 << (63 - g.blocklog) {
            let field = format!("extent {n}: br_startoff");
            report.differ(place, field, "an offset that a file can have", e.startoff);
            self.whole = false;
        }
        self.next = self.next.max(e.startoff + len);
        self.blocks += len;
        if self.realtime {
            if e.startblock >= g.rblocks || len > g.rblocks - e.startblock || len == 0 {
                let field = format!("extent {n}: br_startblock");
                let expected = "a run of blocks of the realtime section";
                report.differ(place, field, expected, e.startblock);
            }
            return;
        }
        let Some(a) = g.fsb_run(e.startblock, e.blockcount) else {
            self.whole = false;
            let field = format!("extent {n}: br_startblock, br_blockcount");
            let found = format!("{}, {}", e.startblock, e.blockcount);
            let expected = "a run of blocks inside an allocation group";
            return report.differ(place, field, expected, found);
        };
        let data = self.fork == Fork::Data && self.kind == FileType::Regular;
        if e.unwritten && (!data || !g.features.unwritten) {
            report.bad(place, format!("extent {n} is unwritten"));
        }
        let reflink = self.inode.flags2 & DIFLAG2_REFLINK != 0;
        let new = if data { Use::Data } else { Use::Meta };
        let may_share = data && g.features.reflink;
        ctx.claim(place, a.agno, a.agbno, e.blockcount, new, may_share);
        let flags = match e.unwritten {
            true => self.fork.rmap_flag() | RMAP_OFF_UNWRITTEN,
            false => self.fork.rmap_flag(),
        };
        let delta = e.startoff.wrapping_sub(a.agbno.into());
        ctx.own(a.agno, a.agbno, e.blockcount, self.inode.ino, flags, delta);
        if data {
            ctx.refer(a.agno, a.agbno, e.blockcount);
            if g.features.reflink
                && !reflink
                && let Some(shared) = ctx.ags[a.agno as usize].shared.get()
            {
                let i = shared.partition_point(|s| s.start + s.len <= a.agbno);
                let first = shared.get(i).map_or(u32::MAX, |s| s.start);
                if first < a.agbno + e.blockcount {
                    let place = place.at(a.agno, first.max(a.agbno));
                    report.add(place, Problem::NoReflinkFlag);
                }
            }
        }
        if let Some(keep) = &mut self.keep {
            if keep.len() < MAX_EXTENTS {
                keep.push(e);
            } else {
                self.whole = false;
                report.bad(place, "too many extents");
            }
        }
    }

    fn btree(&mut self, rd: &mut Reader<'_>, root: &[u8]) {
        let (ctx, ino) = (self.ctx, self.inode.ino);
        let mut check = TreeCheck {
            ctx,
            rd,
            tree: Btree::Bmap,
            of: self.place(),
            whole: true,
            each: &mut |place, item| self.tree_item(place, item),
        };
        fork_tree(ctx.g, ino, root, &mut check);
        let whole = check.whole;
        self.whole &= whole;
    }

    fn tree_item(&mut self, place: Place, item: Item<'_>) {
        let ctx = self.ctx;
        match item {
            Item::Block(at) => {
                let Some(a) = ctx.g.fsb(at) else { return };
                self.blocks += 1;
                ctx.claim(place, a.agno, a.agbno, 1, Use::Meta, false);
                let flags = RMAP_OFF_BMBT_BLOCK | self.fork.rmap_flag();
                ctx.own(a.agno, a.agbno, 1, self.inode.ino, flags, 0);
            }
            Item::Records { bytes, n, .. } => {
                let recs = ExtentRecord::slice_at(bytes, 0, n).unwrap_or_default();
                recs.iter().for_each(|r| self.extent(r.unpack()));
            }
            Item::Sound(..) => {}
        }
    }
}
