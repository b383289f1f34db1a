//! B-trees from sorted records.
//!
//! Leaves are filled to [`FILL_PERCENT`], so that the first insertion into each splits nothing, and
//! never to less than half, the least that the format allows for any block but the root.

use crate::format::*;
use crate::geometry::{AgBlock, Geometry};

/// How full blocks are made, in percent, as far as the bounds of the format allow.
pub const FILL_PERCENT: usize = 85;

/// How many blocks each level of a tree has: the leaves first, the root's level last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    levels: Vec<usize>,
}

impl Shape {
    /// The shape of a tree of an allocation group, whose root is a block too.
    pub fn new(tree: Btree, block_size: usize, records: usize) -> Shape {
        Shape::below(tree, block_size, records, 1)
    }

    /// The shape of a fork's tree whose root is in the inode and has room for `root` pointers.
    pub fn of_fork(block_size: usize, records: usize, root: usize) -> Shape {
        Shape::below(Btree::Bmap, block_size, records, root.max(1))
    }

    /// A shape whose top level has `top` blocks at most.
    fn below(tree: Btree, block_size: usize, records: usize, top: usize) -> Shape {
        let most = |level| tree.max_records(block_size, true, level);
        let mut levels = vec![blocks_for(records, most(0))];
        while let Some(&n) = levels.last()
            && n > top
        {
            levels.push(blocks_for(n, most(1)));
        }
        Shape { levels }
    }

    /// Levels of blocks.
    pub fn levels(&self) -> usize {
        self.levels.len()
    }

    /// All blocks.
    pub fn blocks(&self) -> usize {
        self.levels.iter().sum()
    }
}

/// Blocks for `n` records of which `max` fit in one, each at least half full if there are several.
fn blocks_for(n: usize, max: usize) -> usize {
    if n <= max {
        return 1;
    }
    let fill = (max * FILL_PERCENT / 100).max(1);
    n.div_ceil(fill)
        .min(n / (max / 2).max(1))
        .max(n.div_ceil(max))
}

/// The part of `n` records that falls to block `i` of `blocks`: as even as can be.
fn share(n: usize, blocks: usize, i: usize) -> std::ops::Range<usize> {
    n * i / blocks..n * (i + 1) / blocks
}

/// A block that was built, and where it belongs.
#[derive(Debug)]
pub struct Built<A> {
    /// Its address, as the caller gave it.
    pub at: A,
    /// Its content, without the checksum.
    pub bytes: Vec<u8>,
}

/// The key of a node's entry for a block that begins with `record` (or, in a node, with such a key)
/// and, for the reverse mapping tree, ends with the mapping that reaches farthest, `high`.
fn key_of_record(tree: Btree, record: &[u8], out: &mut Vec<u8>) {
    match tree {
        // The key is the record.
        Btree::Bno | Btree::Cnt => out.extend_from_slice(&record[..8]),
        Btree::Ino | Btree::Fino | Btree::Refcount => out.extend_from_slice(&record[..4]),
        Btree::Rmap => {
            // Start block, owner and offset, without the unwritten flag.
            out.extend_from_slice(&record[..4]);
            out.extend_from_slice(&record[8..16]);
            out.extend_from_slice(&rmap_offset(record).to_be_bytes());
        }
        Btree::Bmap => {
            let word = Be64::at(record, 0).map_or(0, |w| w.get());
            let offset = (word & !(1 << 63)) >> 9;
            out.extend_from_slice(&offset.to_be_bytes());
        }
    }
}

fn rmap_offset(record: &[u8]) -> u64 {
    Be64::at(record, 16).map_or(0, |w| w.get()) & !RMAP_OFF_UNWRITTEN
}

/// The key of the last block that a reverse mapping covers.
fn rmap_high_key(record: &[u8]) -> [u8; RmapKey::SIZE] {
    let word = |at| Be32::at(record, at).map_or(0, |w: &Be32| w.get());
    let last = word(4).saturating_sub(1);
    let owner = Be64::at(record, 8).map_or(0, |w| w.get());
    let mut offset = rmap_offset(record);
    // Only mappings of file data have an offset that grows with the block.
    if owner >> 63 == 0 && offset & RMAP_OFF_BMBT_BLOCK == 0 {
        offset += u64::from(last);
    }
    let mut key = [0; RmapKey::SIZE];
    key[..4].copy_from_slice(&word(0).saturating_add(last).to_be_bytes());
    key[4..12].copy_from_slice(&owner.to_be_bytes());
    key[12..].copy_from_slice(&offset.to_be_bytes());
    key
}

/// A level of entries to be spread over blocks: records, or keys with pointers.
struct Level<A> {
    /// The low key of each entry.
    low: Vec<u8>,
    /// The high key of each entry (reverse mapping tree).
    high: Vec<[u8; RmapKey::SIZE]>,
    /// The block or file that each entry points to.
    ptrs: Vec<A>,
}

/// Builds a tree of an allocation group from `records`, which are sorted and lie one after another
/// as they do on disk. `at` are the addresses for its blocks, as many as its [`Shape`] says: the
/// root's first.
///
/// # Panics
/// If `at` has another length than the shape asks for, or for [`Btree::Bmap`].
pub fn build(g: &Geometry, agno: u32, tree: Btree, records: &[u8], at: &[u32]) -> Vec<Built<u32>> {
    assert!(tree != Btree::Bmap, "a fork's tree has long pointers");
    let count = records.len() / tree.record_len();
    let shape = Shape::new(tree, g.block_size as usize, count);
    let daddr = |agbno: u32| g.daddr(AgBlock { agno, agbno });
    let head = |at: u32, level: u16, n: usize, left: Option<u32>, right: Option<u32>| {
        let mut bytes = vec![0; g.block_size as usize];
        BtreeShort {
            magic: Be32::new(tree.magic(true)),
            level: Be16::new(level),
            numrecs: Be16::new(n as u16),
            leftsib: Be32::new(left.unwrap_or(NULLAGBLOCK)),
            rightsib: Be32::new(right.unwrap_or(NULLAGBLOCK)),
        }
        .put(&mut bytes, 0);
        BtreeShortCrc {
            blkno: Be64::new(daddr(at)),
            lsn: Be64::new(0),
            uuid: g.meta_uuid,
            owner: Be32::new(agno),
            crc: Le32::new(0),
        }
        .put(&mut bytes, BtreeShort::SIZE);
        bytes
    };
    build_levels(tree, records, &shape, at, head, |p, out| {
        out.copy_from_slice(&p.to_be_bytes());
    })
    .0
}

/// A fork's tree: its blocks, and its root, which lies in the inode.
#[derive(Debug)]
pub struct ForkTree {
    /// The blocks; addresses are file system block numbers.
    pub blocks: Vec<Built<u64>>,
    /// The fork's bytes in the inode: the root, padded to the fork's length.
    pub root: Vec<u8>,
}

/// How many pointers the root of a fork's tree has room for in a fork of `fork_len` bytes.
pub fn fork_root_room(fork_len: usize) -> usize {
    fork_len.saturating_sub(BmdrBlock::SIZE) / (8 + 8)
}

/// The records of extents.
pub fn extent_records(extents: &[Extent]) -> Vec<u8> {
    let records = extents.iter().map(ExtentRecord::pack);
    let words = records.flat_map(|r| [r.l0, r.l1]);
    words.flat_map(Be64::to_bytes).collect()
}

/// Builds the tree of inode `ino`'s fork of `fork_len` bytes from `extents`, which are sorted. `at`
/// are the addresses for its blocks, as many as [`Shape::of_fork`] says.
///
/// # Panics
/// If `at` has another length than the shape asks for.
pub fn build_fork(
    g: &Geometry,
    ino: u64,
    fork_len: usize,
    extents: &[Extent],
    at: &[u64],
) -> ForkTree {
    let records = extent_records(extents);
    let room = fork_root_room(fork_len);
    let shape = Shape::of_fork(g.block_size as usize, extents.len(), room);
    let daddr = |fsbno: u64| g.fsb(fsbno).map_or(0, |a| g.daddr(a));
    let head = |at: u64, level: u16, n: usize, left: Option<u64>, right: Option<u64>| {
        let mut bytes = vec![0; g.block_size as usize];
        BtreeLong {
            magic: Be32::new(Btree::Bmap.magic(true)),
            level: Be16::new(level),
            numrecs: Be16::new(n as u16),
            leftsib: Be64::new(left.unwrap_or(NULLFSBLOCK)),
            rightsib: Be64::new(right.unwrap_or(NULLFSBLOCK)),
        }
        .put(&mut bytes, 0);
        BtreeLongCrc {
            blkno: Be64::new(daddr(at)),
            lsn: Be64::new(0),
            uuid: g.meta_uuid,
            owner: Be64::new(ino),
            crc: Le32::new(0),
            pad: Be32::new(0),
        }
        .put(&mut bytes, BtreeLong::SIZE);
        bytes
    };
    let (blocks, top) = build_levels(Btree::Bmap, &records, &shape, at, head, |p, out| {
        out.copy_from_slice(&p.to_be_bytes());
    });
    let mut root = vec![0; fork_len];
    BmdrBlock {
        level: Be16::new(shape.levels() as u16),
        numrecs: Be16::new(top.ptrs.len() as u16),
    }
    .put(&mut root, 0);
    root[BmdrBlock::SIZE..][..top.low.len()].copy_from_slice(&top.low);
    for (i, p) in top.ptrs.iter().enumerate() {
        Be64::new(*p).put(&mut root, BmdrBlock::SIZE + room * 8 + i * 8);
    }
    ForkTree { blocks, root }
}

/// Builds all levels of blocks, and gives them with the keys and pointers of the top level.
fn build_levels<A: Copy>(
    tree: Btree,
    records: &[u8],
    shape: &Shape,
    at: &[A],
    head: impl Fn(A, u16, usize, Option<A>, Option<A>) -> Vec<u8>,
    put_ptr: impl Fn(A, &mut [u8]),
) -> (Vec<Built<A>>, Level<A>) {
    assert_eq!(at.len(), shape.blocks(), "as many addresses as blocks");
    let (record_len, key_len, ptr_len) = (tree.record_len(), tree.key_len(), tree.ptr_len());
    let low_len = match tree {
        Btree::Rmap => RmapKey::SIZE,
        _ => key_len,
    };
    let mut built = Vec::with_capacity(at.len());
    // Addresses go to the levels from the root down.
    let mut rest = at;
    let mut addresses: Vec<&[A]> = Vec::new();
    for n in shape.levels.iter().rev() {
        let (now, then) = rest.split_at(*n);
        addresses.push(now);
        rest = then;
    }
    addresses.reverse();
    let mut below: Option<Level<A>> = None;
    for (level, at) in addresses.into_iter().enumerate() {
        let entries = match &below {
            None => records.len() / record_len,
            Some(l) => l.ptrs.len(),
        };
        let mut above = Level {
            low: Vec::new(),
            high: Vec::new(),
            ptrs: Vec::with_capacity(at.len()),
        };
        for (i, address) in at.iter().enumerate() {
            let part = share(entries, at.len(), i);
            let left = i.checked_sub(1).map(|l| at[l]);
            let right = at.get(i + 1).copied();
            let mut bytes = head(*address, level as u16, part.len(), left, right);
            let start = tree.header_len(true);
            match &below {
                None => {
                    let part = &records[part.start * record_len..part.end * record_len];
                    bytes[start..start + part.len()].copy_from_slice(part);
                    if let Some(first) = part.get(..record_len) {
                        key_of_record(tree, first, &mut above.low);
                    } else {
                        above.low.resize(above.low.len() + low_len, 0);
                    }
                    if tree == Btree::Rmap {
                        let high = part.chunks_exact(record_len).map(rmap_high_key).max();
                        above.high.push(high.unwrap_or_default());
                    }
                }
                Some(l) => {
                    for (k, e) in part.clone().enumerate() {
                        let key_at = start + k * key_len;
                        let low = &l.low[e * low_len..(e + 1) * low_len];
                        bytes[key_at..key_at + low_len].copy_from_slice(low);
                        if let Some(high) = l.high.get(e) {
                            bytes[key_at + low_len..key_at + key_len].copy_from_slice(high);
                        }
                        let ptr_at = tree.ptr_offset(bytes.len(), true, k);
                        put_ptr(l.ptrs[e], &mut bytes[ptr_at..ptr_at + ptr_len]);
                    }
                    let first = part.start * low_len;
                    above.low.extend_from_slice(&l.low[first..first + low_len]);
                    if let Some(high) = l.high.get(part).and_then(|h| h.iter().max()) {
                        above.high.push(*high);
                    }
                }
            }
            above.ptrs.push(*address);
            built.push(Built {
                at: *address,
                bytes,
            });
        }
        below = Some(above);
    }
    (built, below.expect("a tree has a level"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks of a new image's trees are filled as the kernel and xfs_repair require.
    #[test]
    fn no_block_but_the_root_is_less_than_half_full() {
        for max in [10, 11, 505] {
            for n in 0..max * 12 {
                let blocks = blocks_for(n, max);
                for i in 0..blocks {
                    let len = share(n, blocks, i).len();
                    assert!(len <= max, "{n} records, {max} a block");
                    assert!(blocks == 1 || len >= max / 2, "{n} records, {max} a block");
                }
            }
        }
    }

    /// A tree has the levels and blocks that its records take.
    #[test]
    fn shapes() {
        let s = Shape::new(Btree::Bno, 4096, 0);
        assert_eq!((s.levels(), s.blocks()), (1, 1));
        let s = Shape::new(Btree::Bno, 4096, 505);
        assert_eq!((s.levels(), s.blocks()), (1, 1));
        let s = Shape::new(Btree::Bno, 4096, 506);
        assert_eq!((s.levels(), s.blocks()), (2, 3));
        let s = Shape::of_fork(4096, 251 * 9, 9);
        assert_eq!(s.levels(), 2);
        assert_eq!(Shape::of_fork(4096, 251 * 7, 9).levels(), 1);
    }
}
