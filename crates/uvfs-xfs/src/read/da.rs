//! The hash-ordered trees of directories and attributes: down to a leaf, and along the leaves.

use crate::blocks::Block;
use crate::error::Result;
use crate::format::*;
use crate::read::inode::{Fork, Inode};
use crate::read::verifier;
use crate::read::volume::Volume;

/// Neighbouring leaves that may hold nothing but one hash before it counts as a loop.
/// Collisions beyond this (hundreds of thousands of names with one hash) are refused.
pub(super) const MAX_EQUAL_BLOCKS: u32 = 4096;

/// A tree of an inode.
pub(super) struct DaTree<'v> {
    pub volume: &'v Volume,
    pub inode: &'v Inode,
    /// The data fork of a directory, or the attribute fork.
    pub fork: Fork,
}

impl DaTree<'_> {
    fn node(&self) -> &'static str {
        match self.fork {
            Fork::Data => "directory node block",
            Fork::Attr => "attribute node block",
        }
    }

    pub fn leaf(&self) -> &'static str {
        match self.fork {
            Fork::Data => "directory leaf block",
            Fork::Attr => "attribute leaf block",
        }
    }

    /// Whether a block is one of this tree, by its kind.
    fn is_kind(&self, kind: Option<u16>) -> bool {
        match kind {
            Some(DA_NODE_MAGIC) => true,
            Some(DIR2_LEAF1_MAGIC | DIR2_LEAFN_MAGIC) => self.fork == Fork::Data,
            Some(ATTR_LEAF_MAGIC) => self.fork == Fork::Attr,
            _ => false,
        }
    }

    /// Checks a leaf or node block.
    fn check(&self, block: &[u8], ident: &Ident) -> Result<(), Fault> {
        if self.is_kind(da_block_kind(block, ident.crc)) {
            return check_da_info(block, ident).map(|_| ());
        }
        let expected = match (self.fork, ident.crc) {
            (Fork::Data, true) => DIR3_LEAFN_MAGIC,
            (Fork::Data, false) => DIR2_LEAFN_MAGIC,
            (Fork::Attr, true) => ATTR3_LEAF_MAGIC,
            (Fork::Attr, false) => ATTR_LEAF_MAGIC,
        };
        Err(Fault::Magic {
            expected: expected.into(),
            found: DaBlockInfo::at(block, 0)?.magic.get().into(),
        })
    }

    /// Reads a leaf or node block, `number` counted in file system blocks.
    fn block(&self, number: u32) -> Result<Block> {
        let (g, inode) = (self.volume.geometry(), self.inode);
        let start = u64::from(number);
        let (what, count) = match self.fork {
            Fork::Data => ("directory index block", g.dir_blocks()),
            Fork::Attr => ("attribute block", 1),
        };
        if self.fork == Fork::Data && !g.dir_index().contains(&start) {
            let expected = "a block of the directory's index";
            return Err(inode.wrong(self.node(), "before", expected, number));
        }
        let check = |b: &[u8], ident: &Ident| self.check(b, ident);
        let range = (self.fork, start, count as u32);
        let block = (self.volume).read_fork_block(what, inode, range, verifier::DA, &check)?;
        block.ok_or_else(|| inode.wrong(what, "mapping", "a block, not a hole", number))
    }

    /// Goes down from the block `root` to the first leaf, or the first that may have `hash`; `None` if none has it.
    pub fn descend(&self, root: u32, hash: Option<u32>) -> Result<Option<Block>> {
        let crc = self.volume.geometry().features.crc;
        let bad = |f| self.inode.fault(self.node(), f);
        let mut descent = Descent::default();
        let mut block = self.block(root)?;
        // The level falls by one at each step.
        while da_block_kind(&block, crc) == Some(DA_NODE_MAGIC) {
            let (counts, entries) = da_node_entries(&block, crc).map_err(bad)?;
            descent.node(counts.level.get()).map_err(bad)?;
            let i = hash.map_or(0, |h| entries.partition_point(|e| e.hashval.get() < h));
            let next = match entries.get(i) {
                Some(e) => e.before.get(),
                None if hash.is_some() => return Ok(None),
                None => return Err(bad(Fault::field("count", "at least 1", 0u64))),
            };
            block = self.block(next)?;
        }
        descent.leaf().map_err(bad)?;
        Ok(Some(block))
    }

    /// The leaf after this one, which must be of kind `leaf`; `None` after the last.
    pub fn next(&self, block: &Block, leaf: u16) -> Result<Option<Block>> {
        let crc = self.volume.geometry().features.crc;
        let info = DaBlockInfo::at(block, 0).map_err(|f| self.inode.fault(self.leaf(), f))?;
        let forw = info.forw.get();
        if forw == 0 {
            return Ok(None);
        }
        let next = self.block(forw)?;
        match da_block_kind(&next, crc) == Some(leaf) {
            true => Ok(Some(next)),
            false => Err(self.inode.wrong(self.leaf(), "forw", "the next leaf", forw)),
        }
    }
}
