//! Trees of an allocation group, followed as far as they can be believed.

use super::Mend;
use crate::blocks::Block;
use crate::format::*;
use crate::geometry::AgBlock;
use crate::walk::btree::{Defect, Item, Visitor, group_tree};
use std::collections::HashSet;
use std::io;

/// A tree that was walked.
#[derive(Default)]
pub(crate) struct Walked {
    /// Its blocks.
    pub blocks: HashSet<u32>,
    /// The parts that could not be followed, by their first keys and those of what comes after them.
    pub gaps: Vec<(u32, u32)>,
}

impl Walked {
    /// Whether the walk could follow all of the tree.
    pub fn is_whole(&self) -> bool {
        self.gaps.is_empty()
    }
}

struct Follower<'w, 'a> {
    m: &'w Mend<'a>,
    out: Walked,
    visit: &'w mut dyn FnMut(&[u8], usize),
}

/// Gives the records of each leaf to `visit`: their bytes and count.
pub(crate) fn walk(
    m: &Mend<'_>,
    agno: u32,
    tree: Btree,
    root: (u32, u32),
    visit: &mut dyn FnMut(&[u8], usize),
) -> Walked {
    let out = Walked::default();
    let mut follower = Follower { m, out, visit };
    group_tree(&m.g, agno, tree, root, &mut follower);
    follower.out
}

impl Visitor for Follower<'_, '_> {
    fn read(&mut self, a: AgBlock) -> io::Result<Block> {
        self.m.block(self.m.g.daddr(a)).map(Block::new)
    }

    fn item(&mut self, item: Result<Item<'_>, Defect>) -> bool {
        match item {
            Ok(Item::Sound(at, _)) => drop(self.out.blocks.insert(at as u32)),
            Ok(Item::Records { bytes, n, .. }) => (self.visit)(bytes, n),
            Err(Defect::Lost { keys, .. }) => {
                let end = keys.end.min(u32::MAX.into());
                self.out.gaps.push((keys.start as u32, end as u32));
            }
            Ok(Item::Block(_)) | Err(Defect::Differs { .. }) => {}
        }
        true
    }
}

/// Gives the records of a tree in a group's AGF to `visit`, unless the AGF is damaged.
pub(crate) fn records<R: Layout>(
    m: &Mend<'_>,
    agno: u32,
    tree: Btree,
    visit: &mut dyn FnMut(&R),
) -> Walked {
    let (sector, ident) = m.header(agno, AGF_SECTOR);
    let agf = check_agf(&sector, &ident);
    // A tree without levels is lost.
    let root = agf.map_or((0, 0), |agf| agf.root_of(tree));
    walk(m, agno, tree, root, &mut |bytes, n| {
        let records = R::slice_at(bytes, 0, n).unwrap_or_default();
        records.iter().for_each(&mut *visit);
    })
}
