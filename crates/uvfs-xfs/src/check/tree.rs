//! Checks B-trees: reports what a walk finds wrong.

use super::{Ctx, Place, Reader};
use crate::blocks::Block;
use crate::format::*;
use crate::geometry::AgBlock;
use crate::walk::btree::{Cause, Defect, Item, Visitor};
use std::io;

/// A tree being checked.
pub(crate) struct TreeCheck<'w, 'c, 'r, 'a> {
    pub ctx: &'c Ctx<'a>,
    pub rd: &'w mut Reader<'r>,
    pub tree: Btree,
    /// The allocation group, or the fork of an inode.
    pub of: Place,
    /// All of it could be followed.
    pub whole: bool,
    /// Takes each block that the tree leads to, and the records.
    pub each: &'w mut dyn FnMut(Place, Item<'_>),
}

impl TreeCheck<'_, '_, '_, '_> {
    fn place(&self, at: Option<u64>) -> Place {
        let Some(at) = at else { return self.of };
        match (self.of.inode, self.of.ag) {
            (Some(ino), _) => self.ctx.g.fsb(at).map_or(self.of, |a| {
                Place::inode(self.tree, ino).at(a.agno, a.agbno)
            }),
            (None, agno) => self.of.at(agno.unwrap_or(0), at as u32),
        }
    }
}

impl Visitor for TreeCheck<'_, '_, '_, '_> {
    fn read(&mut self, a: AgBlock) -> io::Result<Block> {
        self.rd.blocks(self.ctx.g, a.agno, a.agbno, 1)
    }

    fn mark(&self) -> usize {
        self.rd.mark()
    }

    fn ahead(&mut self, mark: usize, blocks: &mut dyn Iterator<Item = AgBlock>) {
        self.rd.release(mark);
        for a in blocks {
            self.rd.want_blocks(self.ctx.g, a.agno, a.agbno, 1);
        }
        self.rd.go();
    }

    fn item(&mut self, item: Result<Item<'_>, Defect>) -> bool {
        let (ctx, report) = (self.ctx, self.ctx.report);
        let defect = match item {
            Ok(Item::Sound(at, block)) => {
                let lsn_at = if self.tree == Btree::Bmap { 32 } else { 24 };
                ctx.lsn(self.place(Some(at)), block, lsn_at);
                return true;
            }
            Ok(item @ (Item::Block(at) | Item::Records { at, .. })) => {
                let place = self.place(Some(at));
                (self.each)(place, item);
                return true;
            }
            Err(defect) => defect,
        };
        match defect {
            Defect::Lost { at, why, .. } => {
                self.whole = false;
                match why {
                    Cause::Io(e) => ctx.io(self.place(at), &e),
                    Cause::Fault(f) => report.bad(self.place(at), f),
                }
            }
            Defect::Differs {
                at,
                field,
                expected,
                found,
            } => report.differ(self.place(at), field.to_string(), expected, found),
        }
        true
    }
}
