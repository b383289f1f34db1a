//! Walks B-trees: those of an allocation group, and those of a fork.
//!
//! A walk hands what it finds to a [`Visitor`], in order: each block that the tree leads to, the records of its
//! leaves, and each [`Defect`]. The visitor says whether to go on. The reader stops at a defect that keeps it from
//! following the tree, the check reports all of them, and a repair keeps what else there is.

use crate::blocks::Block;
use crate::bulk::btree::fork_root_room;
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use std::collections::HashSet;
use std::fmt::{self, Display};
use std::io;
use std::ops::Range;

/// Blocks below a node that are read ahead together.
pub(crate) const CHILDREN_AHEAD: usize = 32;

/// A key: as many of the numbers count as the kind of tree has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(pub u64, u64, u64);

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key(first, 0, 0) => first.fmt(f),
            Key(start, owner, offset) => write!(f, "{start}, {owner}, {offset:#x}"),
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    Be32::at(bytes, at).map_or(0, |w| w.get().into())
}

fn long(bytes: &[u8], at: usize) -> u64 {
    Be64::at(bytes, at).map_or(0, |w| w.get())
}

/// The key of a record, or that of a node's entry.
fn key(tree: Btree, b: &[u8], is_record: bool) -> Key {
    match tree {
        Btree::Cnt => Key(word(b, 4) << 32 | word(b, 0), 0, 0),
        Btree::Bmap if is_record => Key(long(b, 0) << 1 >> 10, 0, 0),
        Btree::Bmap => Key(long(b, 0), 0, 0),
        Btree::Rmap => {
            // The length is not part of the key, nor is the unwritten flag.
            let owner_at = if is_record { 8 } else { 4 };
            let offset = long(b, owner_at + 8) & !RMAP_OFF_UNWRITTEN;
            Key(word(b, 0), long(b, owner_at), offset)
        }
        _ => Key(word(b, 0), 0, 0),
    }
}

/// An item of a tree.
#[derive(Clone, Copy)]
pub(crate) enum Item<'b> {
    /// The tree leads to this block, which is not read yet.
    Block(u64),
    /// The block is one of the tree: its bytes.
    Sound(u64, &'b [u8]),
    /// The records of a leaf.
    Records {
        /// Its block.
        at: u64,
        bytes: &'b [u8],
        /// How many there are.
        n: usize,
    },
}

/// Something wrong with a tree.
pub(crate) enum Defect {
    /// A part of the tree that cannot be followed.
    Lost {
        /// The block that leads to it; `None` for the root of a fork's tree, which is no block.
        at: Option<u64>,
        /// Its keys.
        keys: Range<u64>,
        why: Cause,
    },
    /// A field that does not fit with others, of a block that is followed all the same.
    Differs {
        at: Option<u64>,
        field: Field,
        expected: String,
        found: String,
    },
}

/// Why a block could not be had.
pub(crate) enum Cause {
    Io(io::Error),
    Fault(Fault),
}

/// A field of a block that others determine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Field {
    Records,
    LeftSibling,
    RightSibling,
    Key(usize),
    HighKey(usize),
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Field::Records => f.write_str("bb_numrecs"),
            Field::LeftSibling => f.write_str("bb_leftsib"),
            Field::RightSibling => f.write_str("bb_rightsib"),
            Field::Key(i) => write!(f, "key {i}"),
            Field::HighKey(i) => write!(f, "high key {i}"),
        }
    }
}

/// Reads the blocks of a tree, and is given what is in it.
pub(crate) trait Visitor {
    /// Reads a block.
    fn read(&mut self, a: AgBlock) -> io::Result<Block>;

    /// A point for [`Visitor::ahead`].
    fn mark(&self) -> usize {
        0
    }

    /// These blocks will be read next; those since `mark` are needed no more.
    fn ahead(&mut self, mark: usize, blocks: &mut dyn Iterator<Item = AgBlock>) {
        let _ = (mark, blocks);
    }

    /// The keys that are still of interest; `None` for all. Only a walk of all looks for blocks that the tree leads to
    /// twice.
    fn range(&self) -> Option<Range<u64>> {
        None
    }

    /// The walk is done with all keys below this one.
    fn passed(&mut self, key: u64) {
        let _ = key;
    }

    /// Takes an item; gives whether to go on.
    fn item(&mut self, item: Result<Item<'_>, Defect>) -> bool;
}

/// The first key below a block and, for the reverse mapping tree, the last block.
type Bounds = (Key, u32);

/// Everything below.
const ALL: Range<u64> = 0..u64::MAX;

struct Walk<'w, V> {
    g: &'w Geometry,
    tree: Btree,
    /// The allocation group or the inode.
    owner: u64,
    visitor: &'w mut V,
    seen: HashSet<u64>,
    /// For each level the last block visited, and the right neighbour that it named.
    last: [Option<(u64, Option<u64>)>; BTREE_MAXLEVELS as usize],
    stopped: bool,
}

/// Walks a tree of an allocation group, from its root and with so many levels.
pub(crate) fn group_tree<V: Visitor>(
    g: &Geometry,
    agno: u32,
    tree: Btree,
    (root, levels): (u32, u32),
    visitor: &mut V,
) {
    let mut walk = Walk::new(g, tree, agno.into(), visitor);
    if !(1..=u32::from(BTREE_MAXLEVELS)).contains(&levels) {
        let fault = Fault::field("levels", "at least 1 and what fits", levels);
        return walk.lost(None, ALL, fault);
    }
    walk.node(root.into(), (levels - 1) as u16, true, ALL);
    walk.end();
}

/// Walks the tree of a fork of inode `ino`, whose bytes in the inode are `root`.
pub(crate) fn fork_tree<V: Visitor>(g: &Geometry, ino: u64, root: &[u8], visitor: &mut V) {
    let mut walk = Walk::new(g, Btree::Bmap, ino, visitor);
    let room = fork_root_room(root.len());
    let head = BmdrBlock::at(root, 0).ok();
    let (level, n) = head.map_or((0, 0), |h| (h.level.get(), usize::from(h.numrecs.get())));
    if !(1..BTREE_MAXLEVELS).contains(&level) {
        let fault = Fault::field("bb_level", "from 1 to the greatest", level);
        return walk.lost(None, ALL, fault);
    }
    if n == 0 || n > room {
        let expected = "what fits in the inode";
        walk.lost(None, ALL, Fault::field("bb_numrecs", expected, n as u64));
        if walk.stopped {
            return;
        }
    }
    let n = n.min(room);
    let keys = Be64::slice_at(root, BmdrBlock::SIZE, n).unwrap_or_default();
    let ptrs = Be64::slice_at(root, BmdrBlock::SIZE + room * 8, n).unwrap_or_default();
    walk.children(None, level, n, ALL, &|i| {
        (Key(keys[i].get(), 0, 0), 0, ptrs[i].get())
    });
    walk.end();
}

impl<'w, V: Visitor> Walk<'w, V> {
    fn new(g: &'w Geometry, tree: Btree, owner: u64, visitor: &'w mut V) -> Walk<'w, V> {
        Walk {
            g,
            tree,
            owner,
            visitor,
            seen: HashSet::new(),
            last: [None; BTREE_MAXLEVELS as usize],
            stopped: false,
        }
    }

    fn give(&mut self, item: Result<Item<'_>, Defect>) {
        self.stopped = self.stopped || !self.visitor.item(item);
    }

    fn lost(&mut self, at: Option<u64>, keys: Range<u64>, fault: Fault) {
        let why = Cause::Fault(fault);
        self.give(Err(Defect::Lost { at, keys, why }));
    }

    fn differs(
        &mut self,
        at: Option<u64>,
        field: Field,
        expected: impl Display,
        found: impl Display,
    ) {
        let (expected, found) = (expected.to_string(), found.to_string());
        self.give(Err(Defect::Differs {
            at,
            field,
            expected,
            found,
        }));
    }

    /// The block that a pointer leads to.
    fn block(g: &Geometry, tree: Btree, owner: u64, at: u64) -> Option<AgBlock> {
        if tree == Btree::Bmap {
            return g.fsb(at);
        }
        let (agno, agbno) = (owner as u32, at as u32);
        g.has_agb(agno, agbno).then_some(AgBlock { agno, agbno })
    }

    /// Number of records and neighbours of a block, if it is one of this tree and level.
    fn head(
        &self,
        block: &Block,
        a: AgBlock,
        level: u16,
    ) -> Result<(usize, [Option<u64>; 2]), Fault> {
        let ident = Ident {
            summed: block.is_verified(),
            ..self.g.ident(self.g.daddr(a), Some(self.owner))
        };
        let (found, n, siblings, none) = if self.tree == Btree::Bmap {
            let h = check_btree_long(block, &ident)?;
            let siblings = [h.leftsib.get(), h.rightsib.get()];
            (h.level, h.numrecs, siblings, NULLFSBLOCK)
        } else {
            let h = check_btree_short(block, self.tree, &ident)?;
            let siblings = [h.leftsib.get().into(), h.rightsib.get().into()];
            (h.level, h.numrecs, siblings, NULLAGBLOCK.into())
        };
        let (found, n) = (found.get(), n.get());
        if found != level {
            let expected = "one less than the parent's";
            return Err(Fault::field("bb_level", expected, found));
        }
        match (found, n) {
            (1.., 0) => Err(Fault::field("bb_numrecs", "at least 1", 0u64)),
            _ => Ok((n.into(), siblings.map(|b| Some(b).filter(|b| *b != none)))),
        }
    }

    /// Walks what a block leads to, whose keys should be in `keys`. `alone`: it has no neighbours.
    fn node(&mut self, at: u64, level: u16, alone: bool, keys: Range<u64>) -> Option<Bounds> {
        let Some(a) = Self::block(self.g, self.tree, self.owner, at) else {
            let expected = "a block of the group or the file system";
            self.lost(Some(at), keys, Fault::field("block pointer", expected, at));
            return None;
        };
        // A range that begins at what was passed bounds the walk anyway.
        if self.visitor.range().is_none() && !self.seen.insert(at) {
            let expected = "a block that no other pointer leads to";
            self.lost(Some(at), keys, Fault::field("block pointer", expected, at));
            return None;
        }
        self.give(Ok(Item::Block(at)));
        let block = match self.visitor.read(a) {
            Ok(block) => block,
            Err(e) => {
                let (at, why) = (Some(at), Cause::Io(e));
                self.give(Err(Defect::Lost { at, keys, why }));
                return None;
            }
        };
        let (n, siblings) = match self.head(&block, a, level) {
            Ok(head) => head,
            Err(fault) => {
                self.lost(Some(at), keys, fault);
                return None;
            }
        };
        self.give(Ok(Item::Sound(at, &block)));
        let crc = self.g.features.crc;
        let least = match alone {
            // The root of a group's tree may be a leaf without records.
            true => usize::from(self.tree == Btree::Bmap),
            false => self.tree.max_records(block.len(), crc, level) / 2,
        };
        if n < least {
            self.differs(Some(at), Field::Records, format!("at least {least}"), n);
        }
        if self.visitor.range().is_none() {
            self.neighbours(at, level, siblings);
        }
        if self.stopped {
            return None;
        }
        // The check of the head has made sure that the records fit.
        let (tree, start) = (self.tree, self.tree.header_len(crc));
        if level == 0 {
            let len = tree.record_len();
            let bytes = &block[start..start + n * len];
            self.give(Ok(Item::Records { at, bytes, n }));
            let high = match tree {
                Btree::Rmap => bytes.chunks_exact(len).map(run_end).max().unwrap_or(0),
                _ => 0,
            };
            return Some((key(tree, bytes.get(..len)?, true), high));
        }
        let block = &block[..];
        self.children(Some(at), level, n, keys, &|i| {
            let bytes = &block[start + i * tree.key_len()..];
            let ptr_at = tree.ptr_offset(block.len(), crc, i);
            let (high, ptr) = match tree {
                Btree::Bmap => (0, long(block, ptr_at)),
                Btree::Rmap => (word(bytes, RmapKey::SIZE) as u32, word(block, ptr_at)),
                _ => (0, word(block, ptr_at)),
            };
            (key(tree, bytes, false), high, ptr)
        })
    }

    /// Compares what neighbours say of each other.
    fn neighbours(&mut self, at: u64, level: u16, [left, right]: [Option<u64>; 2]) {
        let before = self.last[usize::from(level)].replace((at, right));
        let expected = before.map(|(b, _)| b);
        if left != expected {
            self.differs(Some(at), Field::LeftSibling, name(expected), name(left));
        }
        if let Some((before, found)) = before.filter(|b| b.1 != Some(at)) {
            self.differs(Some(before), Field::RightSibling, at, name(found));
        }
    }

    /// The last block of each level has no right neighbour.
    fn end(&mut self) {
        for (b, right) in self.last.into_iter().flatten() {
            if right.is_some() {
                self.differs(Some(b), Field::RightSibling, name(None), name(right));
            }
        }
    }

    /// Walks what the `n` entries (low key, high key's block, pointer) of a node of this level lead to.
    fn children(
        &mut self,
        at: Option<u64>,
        level: u16,
        n: usize,
        keys: Range<u64>,
        entry: &dyn Fn(usize) -> (Key, u32, u64),
    ) -> Option<Bounds> {
        let (mut bounds, mut previous): (Option<Bounds>, _) = (None, Key::default());
        let mark = self.visitor.mark();
        // The last one that does not begin after the start of what is of interest.
        let first = match self.visitor.range() {
            Some(range) if range.start > 0 => {
                let (mut first, mut after) = (0, n);
                while first < after {
                    let middle = first.midpoint(after);
                    match entry(middle).0.0 <= range.start {
                        true => first = middle + 1,
                        false => after = middle,
                    }
                }
                first.saturating_sub(1)
            }
            _ => 0,
        };
        for i in first..n {
            if (i - first) % CHILDREN_AHEAD == 0 {
                let (g, tree, owner) = (self.g, self.tree, self.owner);
                let next = i..n.min(i + CHILDREN_AHEAD);
                let mut blocks = next.filter_map(|k| Self::block(g, tree, owner, entry(k).2));
                self.visitor.ahead(mark, &mut blocks);
            }
            let (low, high, ptr) = entry(i);
            let start = if i == 0 { keys.start } else { low.0 };
            let end = match i + 1 == n {
                true => keys.end,
                false => entry(i + 1).0.0,
            };
            if let Some(range) = self.visitor.range() {
                if i > first && start >= range.end {
                    break;
                }
                if i > first && start < range.start {
                    // What came before reaches beyond this key.
                    let fault = Fault::field("br_startoff", "keys in order", start);
                    self.lost(at, start..end, fault);
                    return None;
                }
                if end <= range.start {
                    continue;
                }
            }
            if previous > low {
                self.differs(at, Field::Key(i), format!("at least {previous}"), low);
            }
            previous = low;
            let below = self.node(ptr, level - 1, at.is_none() && n == 1, start..end);
            if self.stopped {
                return None;
            }
            self.visitor.passed(end);
            let Some(below) = below else { continue };
            if below.0 != low {
                self.differs(at, Field::Key(i), below.0, low);
            }
            if below.1 != high {
                self.differs(at, Field::HighKey(i), below.1, high);
            }
            bounds = Some(bounds.map_or(below, |(low, high)| (low, high.max(below.1))));
        }
        self.visitor.ahead(mark, &mut std::iter::empty());
        bounds
    }
}

/// A neighbour, as messages have it.
fn name(block: Option<u64>) -> String {
    block.map_or("none".into(), |b| b.to_string())
}

/// Last block of a record that begins with start and count.
fn run_end(record: &[u8]) -> u32 {
    (word(record, 0) + word(record, 4))
        .saturating_sub(1)
        .min(u32::MAX.into()) as u32
}
