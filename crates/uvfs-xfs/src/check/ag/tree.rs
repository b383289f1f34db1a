//! Checks a B-tree of an allocation group.

use super::super::tree::TreeCheck;
use super::super::{Ctx, Place, Reader, Structure};
use super::GroupCheck;
use crate::format::*;
use crate::walk::btree::{Item, group_tree};

/// The result of a walk.
pub(super) struct AgTreeResult {
    pub blocks: u32,
    pub whole: bool,
}

impl GroupCheck<'_, '_, '_> {
    /// Walks a tree from its root, with so many levels. Gives its records to `visit`: the block that has
    /// it, its place there, and the record.
    pub(super) fn walk<R: Layout>(
        &mut self,
        tree: Btree,
        root: (u32, u32),
        visit: &mut impl FnMut(Place, usize, &R),
    ) -> AgTreeResult {
        let (ctx, agno) = (self.ctx, self.agno);
        let mut blocks = 0;
        let mut check = TreeCheck {
            ctx,
            rd: self.rd,
            tree,
            of: Place::ag(tree, agno),
            whole: true,
            each: &mut |place, item| match item {
                Item::Block(at) => {
                    blocks += 1;
                    ctx.claim_owned(place, agno, at as u32, 1, tree.owner());
                }
                Item::Records { bytes, n, .. } => {
                    let records = R::slice_at(bytes, 0, n).unwrap_or_default();
                    (records.iter().enumerate()).for_each(|(i, r)| visit(place, i, r));
                }
                Item::Sound(..) => {}
            },
        };
        group_tree(ctx.g, agno, tree, root, &mut check);
        let whole = check.whole;
        if !whole {
            ctx.report.incomplete();
        }
        AgTreeResult { blocks, whole }
    }
}

/// Where the chunks of inodes and the records of shared blocks of a group begin, in order. It is for
/// [`check`](super::check) to find what is wrong with the trees.
pub(crate) fn positions(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    agno: u32,
    chunk: &mut dyn FnMut(u32),
    shared: &mut dyn FnMut(u32),
) {
    let g = ctx.g;
    let mut group = GroupCheck { ctx, rd, agno };
    let nowhere = Place::ag(Structure::Agi, agno);
    if let Some((bytes, ident)) = group.sector(nowhere, AGI_SECTOR)
        && let Ok(agi) = check_agi(&bytes, &ident)
    {
        let visit = &mut |_, _, r: &InobtRecord| chunk(r.unpack(g.features.sparse).startino);
        group.walk(Btree::Ino, agi.root_of(Btree::Ino), visit);
    }
    if g.features.reflink
        && let Some((bytes, ident)) = group.sector(nowhere, AGF_SECTOR)
        && let Ok(agf) = check_agf(&bytes, &ident)
    {
        let visit = &mut |_, _, r: &RefcountRecord| {
            let start = r.startblock.get();
            if start & REFC_COW_START == 0 {
                shared(start);
            }
        };
        group.walk(Btree::Refcount, agf.root_of(Btree::Refcount), visit);
    }
}
