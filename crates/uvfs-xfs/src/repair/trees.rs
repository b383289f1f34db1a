//! Trees of an allocation group, followed as far as they can be believed.

use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use crate::overlay::Overlay;
use std::collections::HashSet;

/// A tree that was walked.
#[derive(Default)]
pub(crate) struct Walked {
    /// Its blocks.
    pub blocks: HashSet<u32>,
    /// Nothing was in the way.
    pub whole: bool,
    /// The parts that could not be followed, by their first keys and those of what comes after them.
    pub gaps: Vec<(u32, u32)>,
}

struct TreeWalk<'a> {
    disk: &'a Overlay,
    g: &'a Geometry,
    agno: u32,
    tree: Btree,
    out: Walked,
}

/// Gives the records of each leaf to `visit`: their bytes and count.
pub(crate) fn walk(
    disk: &Overlay,
    g: &Geometry,
    agno: u32,
    tree: Btree,
    root: (u32, u32),
    visit: &mut dyn FnMut(&[u8], usize),
) -> Walked {
    let (root, levels) = root;
    let mut w = TreeWalk {
        disk,
        g,
        agno,
        tree,
        out: Walked::default(),
    };
    w.out.whole = (1..=u32::from(BTREE_MAXLEVELS)).contains(&levels);
    if w.out.whole {
        w.node(root, (levels - 1) as u16, (0, u32::MAX), visit);
    } else {
        w.out.gaps.push((0, u32::MAX));
    }
    w.out
}

impl TreeWalk<'_> {
    /// Follows what begins with keys in this range.
    fn node(
        &mut self,
        agbno: u32,
        level: u16,
        keys: (u32, u32),
        visit: &mut dyn FnMut(&[u8], usize),
    ) {
        let g = self.g;
        if !g.has_agb(self.agno, agbno) || !self.out.blocks.insert(agbno) {
            self.lost(keys);
            return;
        }
        let at = AgBlock {
            agno: self.agno,
            agbno,
        };
        let daddr = g.daddr(at);
        let ident = g.ident(daddr, Some(self.agno.into()));
        let block = self.disk.get(daddr << 9, g.block_size as usize);
        let block = block.unwrap_or_default();
        let head = check_btree_short(&block, self.tree, &ident);
        let Some(head) = head.ok().filter(|h| h.level.get() == level).copied() else {
            // Not a block of the tree: others may have it.
            self.out.blocks.remove(&agbno);
            self.lost(keys);
            return;
        };
        let n = usize::from(head.numrecs.get());
        let start = self.tree.header_len(true);
        if level == 0 {
            visit(&block[start..start + n * self.tree.record_len()], n);
            return;
        }
        let len = self.tree.key_len();
        let key = |i: usize| Be32::at(&block, start + i * len).map(|k| k.get());
        for i in 0..n {
            let at = self.tree.ptr_offset(block.len(), true, i);
            let first = if i == 0 { Ok(keys.0) } else { key(i) };
            let end = if i + 1 == n { Ok(keys.1) } else { key(i + 1) };
            match (Be32::at(&block, at), first, end) {
                (Ok(p), Ok(first), Ok(end)) => self.node(p.get(), level - 1, (first, end), visit),
                _ => self.lost(keys),
            }
        }
    }

    fn lost(&mut self, keys: (u32, u32)) {
        self.out.whole = false;
        self.out.gaps.push(keys);
    }
}
