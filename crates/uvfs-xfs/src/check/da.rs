//! The hash-ordered trees of directories and attribute forks.

use super::runs::{read_run, want_run};
use super::{Ctx, Place, Reader};
use crate::format::*;
use crate::read::inode::Fork;
use crate::walk::btree::CHILDREN_AHEAD;
use std::collections::HashSet;
use std::ops::Range;

/// A tree to walk.
pub(crate) struct DaTree<'c, 'a> {
    ctx: &'c Ctx<'a>,
    place: Place,
    extents: &'c [Extent],
    /// File blocks of one block of the tree.
    count: u64,
    /// File blocks that the tree may be in.
    range: Range<u64>,
    /// Kinds of leaves that fit, by version 4's magic numbers.
    leaves: &'static [u16],
    seen: HashSet<u32>,
    last: [Option<(u32, u32)>; DA_NODE_MAXDEPTH as usize + 1],
    whole: bool,
}

/// Checks a leaf and gives its greatest hash: (number, where, bytes).
pub(crate) type VisitLeaf<'v> = &'v mut dyn FnMut(u32, Place, &[u8]) -> Option<u32>;

impl<'c, 'a> DaTree<'c, 'a> {
    /// The tree of an inode's directory or attributes.
    pub fn new(ctx: &'c Ctx<'a>, place: Place, extents: &'c [Extent], fork: Fork) -> Self {
        DaTree {
            ctx,
            place,
            extents,
            count: match fork {
                Fork::Data => ctx.g.dir_blocks(),
                Fork::Attr => 1,
            },
            range: match fork {
                Fork::Data => ctx.g.dir_index(),
                // Block numbers of an attribute fork are 32 bits.
                Fork::Attr => 0..1 << 32,
            },
            leaves: match fork {
                Fork::Data => &[DIR2_LEAF1_MAGIC, DIR2_LEAFN_MAGIC],
                Fork::Attr => &[ATTR_LEAF_MAGIC],
            },
            seen: HashSet::new(),
            last: [None; DA_NODE_MAXDEPTH as usize + 1],
            whole: true,
        }
    }

    /// Walks from the block `root`. Gives how many blocks there are, or `None` if not all could be
    /// followed.
    pub fn walk(&mut self, rd: &mut Reader<'_>, root: u32, visit: VisitLeaf<'_>) -> Option<usize> {
        self.node(rd, root, None, visit);
        for (level, last) in self.last.into_iter().enumerate() {
            if let Some((number, forw)) = last.filter(|l| l.1 != 0) {
                let field = format!("forw of block {number} at level {level}");
                self.ctx.report.differ(self.place, field, 0, forw);
            }
        }
        self.whole.then_some(self.seen.len())
    }

    fn lost(&mut self) -> Option<u32> {
        self.whole = false;
        None
    }

    fn node(
        &mut self,
        rd: &mut Reader<'_>,
        number: u32,
        level: Option<u16>,
        visit: VisitLeaf<'_>,
    ) -> Option<u32> {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        if !self.range.contains(&u64::from(number)) {
            report.differ(self.place, "pointer", "a block of the tree", number);
            return self.lost();
        }
        if !self.seen.insert(number) {
            let text = format!("its tree leads to file block {number} twice");
            report.bad(self.place, text);
            return self.lost();
        }
        let (at, start) = (self.place, number.into());
        let Some((block, a)) = read_run(ctx, rd, at, self.extents, start, self.count) else {
            return self.lost();
        };
        let place = self.place.at(a.agno, a.agbno);
        let ident = g.ident(g.daddr(a), self.place.inode);
        let kind = da_block_kind(&block, g.features.crc);
        let fits = kind.is_some_and(|k| k == DA_NODE_MAGIC || self.leaves.contains(&k));
        if !fits {
            let found = DaBlockInfo::at(&block, 0).map_or(0, |i| i.magic.get());
            let found = format!("{found:#x}");
            report.differ(place, "magic number", "a node or leaf", found);
            return self.lost();
        }
        let Some(&info) = report.sound(place, check_da_info(&block, &ident)) else {
            return self.lost();
        };
        ctx.lsn(place, &block, 24);
        let is_node = kind == Some(DA_NODE_MAGIC);
        let node = is_node.then(|| report.sound(place, da_node_entries(&block, g.features.crc)));
        let node = match node {
            Some(None) => return self.lost(),
            node => node.flatten(),
        };
        let this = node.map_or(0, |(c, _)| c.level.get());
        let right_level = match level {
            None if is_node => (1..=DA_NODE_MAXDEPTH).contains(&this),
            None => true,
            Some(l) => this == l && (is_node == (l > 0)),
        };
        if !right_level {
            let expected = level.map_or("from 1 to 5".into(), |l| l.to_string());
            report.differ(place, "level", expected, this);
            return self.lost();
        }
        // Neighbours on the same level.
        let slot = self.last[usize::from(this)];
        let back = slot.map_or(0, |(n, _)| n);
        report.same(place, "back", back, info.back.get());
        if let Some((n, forw)) = slot
            && forw != number
        {
            report.differ(place, format!("forw of block {n}"), number, forw);
        }
        self.last[usize::from(this)] = Some((number, info.forw.get()));
        let Some((_, entries)) = node else {
            return visit(number, place, &block);
        };
        self.children(rd, place, this, entries, visit)
    }

    /// Walks what a node of level `this` leads to; the last hash below it.
    fn children(
        &mut self,
        rd: &mut Reader<'_>,
        place: Place,
        this: u16,
        entries: &[DaNodeEntry],
        visit: VisitLeaf<'_>,
    ) -> Option<u32> {
        let (ctx, report) = (self.ctx, self.ctx.report);
        if entries.is_empty() {
            report.bad(place, "a node without entries");
            return self.lost();
        }
        let mut previous = 0;
        let mark = rd.mark();
        for (i, e) in entries.iter().enumerate() {
            if i % CHILDREN_AHEAD == 0 {
                rd.release(mark);
                for e in entries[i..].iter().take(CHILDREN_AHEAD) {
                    want_run(ctx, rd, self.extents, e.before.get().into(), self.count);
                }
                rd.go();
            }
            let hash = e.hashval.get();
            if hash < previous {
                report.out_of_order(place, "entry", i);
            }
            previous = hash;
            let below = self.node(rd, e.before.get(), Some(this - 1), visit);
            if let Some(h) = below.filter(|h| *h != hash) {
                let (expected, found) = (format!("{h:#x}"), format!("{hash:#x}"));
                report.differ(place, format!("hash of entry {i}"), expected, found);
            }
        }
        rd.release(mark);
        Some(previous)
    }
}
