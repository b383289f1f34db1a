//! A directory from its entries.
//!
//! The smallest of the four forms that holds them is taken: short form (in the inode), block (one
//! block with entries and index), leaf (data blocks and one index block), node (data blocks, a tree
//! of index blocks, and blocks that list the free space of the data blocks). Entries keep the order
//! in which they are given; that is the order of a listing.

use super::Put;
use crate::format::*;
use crate::geometry::Geometry;
use std::ops::Range;

/// An entry to be made.
#[derive(Debug, Clone, Copy)]
pub struct NewEntry<'a> {
    /// The name: 1 to 255 bytes, no slash, no zero byte, not "." or "..".
    pub name: &'a [u8],
    /// The inode.
    pub ino: u64,
    /// Its type.
    pub file_type: FileType,
}

/// A directory that was laid out: which blocks it takes, as runs of file system blocks of its fork.
#[derive(Debug)]
pub enum DirLayout {
    /// The fork's bytes in the inode.
    Short(Vec<u8>),
    /// Blocks.
    Blocks(DirPlan),
}

/// The layout of a directory in blocks.
#[derive(Debug)]
pub struct DirPlan {
    /// For each data block, the range of entries in it; "." and ".." come before the first.
    data: Vec<Range<usize>>,
    form: Form,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Block,
    Leaf,
    /// Blocks of each level of the index, leaves first, and free index blocks.
    Node {
        free: usize,
    },
}

const DOT_LEN: usize = 16;

impl DirPlan {
    /// The directory's size in bytes, as its inode has it.
    pub fn size(&self, g: &Geometry) -> u64 {
        self.data.len() as u64 * u64::from(g.dir_block_size)
    }

    /// The runs of directory blocks that it takes: first block of the fork (in file system blocks)
    /// and how many directory blocks.
    pub fn runs(&self, g: &Geometry) -> Vec<(u64, usize)> {
        let mut runs = vec![(0, self.data.len())];
        match self.form {
            Form::Block => {}
            Form::Leaf => runs.push((g.dir_index().start, 1)),
            Form::Node { free } => {
                let entries = self.data.last().map_or(0, |r| r.end) + 2;
                let index: usize = index_levels(g, entries).iter().sum();
                runs.push((g.dir_index().start, index));
                runs.push((g.dir_index().end, free));
            }
        }
        runs
    }
}

/// Entries of a leaf of a node directory, or of a node.
fn per_index_block(g: &Geometry) -> usize {
    (g.dir_block_size as usize - da_header_len(true)) / Dir2LeafEntry::SIZE
}

/// Slots of a free index block.
fn per_free_block(g: &Geometry) -> usize {
    (g.dir_block_size as usize - da_header_len(true)) / 2
}

/// Index blocks of each level, leaves first. One level means that the only leaf is the root.
fn index_levels(g: &Geometry, entries: usize) -> Vec<usize> {
    let mut levels = vec![entries.div_ceil(per_index_block(g)).max(1)];
    while let Some(&n) = levels.last()
        && n > 1
    {
        levels.push(n.div_ceil(per_index_block(g)));
    }
    levels
}

/// The short form, if it takes at most `room` bytes.
fn short_form(parent: u64, entries: &[NewEntry<'_>], room: usize) -> Option<Vec<u8>> {
    if entries.len() > usize::from(u8::MAX) {
        return None;
    }
    let small = |ino: u64| ino <= u64::from(u32::MAX);
    let big = entries.iter().filter(|e| !small(e.ino)).count() + usize::from(!small(parent));
    let ino_len = if big > 0 { 8 } else { 4 };
    let each = |e: &NewEntry<'_>| Dir2SfEntry::SIZE + e.name.len() + 1 + ino_len;
    let len = Dir2SfHeader::SIZE + ino_len + entries.iter().map(each).sum::<usize>();
    if len > room {
        return None;
    }
    let mut out = Vec::with_capacity(len);
    let put_ino = |ino: u64, out: &mut Vec<u8>| {
        out.extend_from_slice(&ino.to_be_bytes()[8 - ino_len..]);
    };
    out.push(entries.len() as u8);
    out.push(big as u8);
    put_ino(parent, &mut out);
    let mut offset = dir_data_header_len(true) + 2 * DOT_LEN;
    for e in entries {
        out.push(e.name.len() as u8);
        out.extend_from_slice(&(offset as u16).to_be_bytes());
        out.extend_from_slice(e.name);
        out.push(e.file_type as u8);
        put_ino(e.ino, &mut out);
        offset += dir_entry_len(e.name.len(), true);
    }
    Some(out)
}

/// Lays out a directory. `room` is what its inode has for a short form.
pub fn layout(g: &Geometry, parent: u64, entries: &[NewEntry<'_>], room: usize) -> DirLayout {
    if let Some(bytes) = short_form(parent, entries, room) {
        return DirLayout::Short(bytes);
    }
    let block = g.dir_block_size as usize;
    let header = dir_data_header_len(true);
    let mut data = Vec::new();
    let (mut start, mut used) = (0, header + 2 * DOT_LEN);
    for (i, e) in entries.iter().enumerate() {
        let len = dir_entry_len(e.name.len(), true);
        if used + len > block {
            data.push(start..i);
            (start, used) = (i, header);
        }
        used += len;
    }
    data.push(start..entries.len());
    let count = entries.len() + 2;
    let index = count * Dir2LeafEntry::SIZE;
    let form = if data.len() == 1 && used + index + Dir2BlockTail::SIZE <= block {
        Form::Block
    } else if da_header_len(true) + index + data.len() * 2 + 4 <= block {
        Form::Leaf
    } else {
        Form::Node {
            free: data.len().div_ceil(per_free_block(g)),
        }
    };
    DirLayout::Blocks(DirPlan { data, form })
}

/// The owner of the blocks.
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    /// The directory.
    pub ino: u64,
    /// Its parent.
    pub parent: u64,
}

/// Fills the blocks of a laid-out directory. `daddr` gives the disk address of the directory block at
/// a block of the fork; `put` takes each block: the block of the fork, and its bytes without the
/// checksum.
pub fn fill<E>(
    g: &Geometry,
    owner: Owner,
    entries: &[NewEntry<'_>],
    plan: &DirPlan,
    daddr: &dyn Fn(u64) -> u64,
    put: &mut Put<'_, E>,
) -> Result<(), E> {
    let size = g.dir_block_size as usize;
    let per_block = g.dir_blocks();
    let ino = owner.ino;
    let new = NewBlocks { g, ino, daddr };
    let mut index: Vec<(u32, u32)> = Vec::with_capacity(entries.len() + 2);
    let mut bests: Vec<u16> = Vec::with_capacity(plan.data.len());
    let mut bytes = vec![0; size];
    for (db, range) in plan.data.iter().enumerate() {
        bytes.fill(0);
        let at = db as u64 * per_block;
        let mut offset = dir_data_header_len(true);
        let base = db as u64 * size as u64;
        let mut add = |name: &[u8], ino: u64, t: FileType, bytes: &mut [u8]| {
            let len = dir_entry_len(name.len(), true);
            Dir2DataEntry {
                inumber: Be64::new(ino),
                namelen: name.len() as u8,
            }
            .put(bytes, offset);
            let name_at = offset + Dir2DataEntry::SIZE;
            bytes[name_at..name_at + name.len()].copy_from_slice(name);
            bytes[name_at + name.len()] = t as u8;
            Be16::new(offset as u16).put(bytes, offset + len - 2);
            let address = (base + offset as u64) / DIR2_DATA_ALIGN as u64;
            index.push((g.hash_name(name), address as u32));
            offset += len;
        };
        if db == 0 {
            add(b".", owner.ino, FileType::Directory, &mut bytes);
            add(b"..", owner.parent, FileType::Directory, &mut bytes);
        }
        for e in &entries[range.clone()] {
            add(e.name, e.ino, e.file_type, &mut bytes);
        }
        let end = match plan.form {
            Form::Block => {
                let start = size - Dir2BlockTail::SIZE - index.len() * Dir2LeafEntry::SIZE;
                index.sort_unstable();
                put_index(&index, &mut bytes, start);
                Dir2BlockTail {
                    count: Be32::new(index.len() as u32),
                    stale: Be32::new(0),
                }
                .put(&mut bytes, size - Dir2BlockTail::SIZE);
                start
            }
            _ => size,
        };
        let magic = match plan.form {
            Form::Block => DIR3_BLOCK_MAGIC,
            _ => DIR3_DATA_MAGIC,
        };
        new.data_header(at, magic, offset..end, &mut bytes);
        bests.push((end - offset) as u16);
        put(at, &bytes)?;
    }
    if plan.form == Form::Block {
        return Ok(());
    }
    index.sort_unstable();
    let leaf_at = g.dir_index().start;
    if plan.form == Form::Leaf {
        bytes.fill(0);
        let counts = (index.len(), 0);
        new.da_header(&[leaf_at], 0, DIR3_LEAF1_MAGIC, counts, &mut bytes);
        put_index(&index, &mut bytes, da_header_len(true));
        let tail = size - 4;
        Be32::new(bests.len() as u32).put(&mut bytes, tail);
        for (i, b) in bests.iter().enumerate() {
            Be16::new(*b).put(&mut bytes, tail - bests.len() * 2 + i * 2);
        }
        return put(leaf_at, &bytes);
    }
    new.fill_index(&index, leaf_at, put)?;
    new.fill_free(&bests, put)
}

fn put_index(index: &[(u32, u32)], bytes: &mut [u8], at: usize) {
    for (i, (hash, address)) in index.iter().enumerate() {
        Dir2LeafEntry {
            hashval: Be32::new(*hash),
            address: Be32::new(*address),
        }
        .put(bytes, at + i * Dir2LeafEntry::SIZE);
    }
}

/// The part of `all` that falls to block `i` of `blocks`: as even as can be.
fn share<T>(all: &[T], blocks: usize, i: usize) -> &[T] {
    &all[all.len() * i / blocks..all.len() * (i + 1) / blocks]
}

/// Blocks to be built for a fork of an inode.
pub(super) struct NewBlocks<'a> {
    pub g: &'a Geometry,
    pub ino: u64,
    /// Gives the disk address of a block of the fork.
    pub daddr: &'a dyn Fn(u64) -> u64,
}

impl NewBlocks<'_> {
    /// The head of the data block at `at`, and the record of its free space.
    fn data_header(&self, at: u64, magic: u32, room: Range<usize>, bytes: &mut [u8]) {
        let hole = |offset, len| Dir2DataFree {
            offset: Be16::new(offset),
            length: Be16::new(len),
        };
        let mut bestfree = [hole(0, 0); 3];
        if !room.is_empty() {
            let (offset, len) = (room.start as u16, room.len() as u16);
            bestfree[0] = hole(offset, len);
            Dir2DataUnused {
                freetag: Be16::new(DIR2_DATA_FREE_TAG),
                length: Be16::new(len),
            }
            .put(bytes, room.start);
            Be16::new(offset).put(bytes, room.end - 2);
        }
        Dir3DataHeader {
            hdr: self.block_header(magic, at),
            bestfree,
            pad: Be32::new(0),
        }
        .put(bytes, 0);
    }

    fn block_header(&self, magic: u32, at: u64) -> Dir3BlockHeader {
        Dir3BlockHeader {
            magic: Be32::new(magic),
            crc: Le32::new(0),
            blkno: Be64::new((self.daddr)(at)),
            lsn: Be64::new(0),
            uuid: self.g.meta_uuid,
            owner: Be64::new(self.ino),
        }
    }

    /// The head of the leaf or node that is block `i` of a row, with its counts: entries, and the level of a node
    /// (or 0 stale entries of a leaf).
    pub fn da_header(
        &self,
        row: &[u64],
        i: usize,
        magic: u16,
        (count, level): (usize, usize),
        bytes: &mut [u8],
    ) {
        let neighbour = |b: Option<&u64>| Be32::new(b.map_or(0, |b| *b as u32));
        Da3BlockInfo {
            hdr: DaBlockInfo {
                forw: neighbour(row.get(i + 1)),
                back: neighbour(row[..i].last()),
                magic: Be16::new(magic),
                pad: Be16::new(0),
            },
            crc: Le32::new(0),
            blkno: Be64::new((self.daddr)(row[i])),
            lsn: Be64::new(0),
            uuid: self.g.meta_uuid,
            owner: Be64::new(self.ino),
        }
        .put(bytes, 0);
        DaNodeCounts {
            count: Be16::new(count as u16),
            level: Be16::new(level as u16),
        }
        .put(bytes, Da3BlockInfo::SIZE);
    }

    /// The nodes over a row of leaves. `leaves` are the greatest hash and the block of each; the root
    /// goes to `blocks[0]`, which nothing else has, and the other nodes to the blocks after it.
    pub fn fill_nodes<E>(
        &self,
        node_size: usize,
        leaves: Vec<(u32, u64)>,
        blocks: &[u64],
        put: &mut Put<'_, E>,
    ) -> Result<(), E> {
        let per_node = (node_size - da_header_len(true)) / DaNodeEntry::SIZE;
        let (root, mut rest) = blocks.split_at(1);
        let mut below = leaves;
        let mut bytes = vec![0; node_size];
        for level in 1.. {
            let n = below.len().div_ceil(per_node);
            let row = match n {
                1 => root,
                _ => rest.split_off(..n).expect("as many blocks as nodes"),
            };
            let mut above = Vec::with_capacity(n);
            for (i, address) in row.iter().enumerate() {
                let part = share(&below, n, i);
                bytes.fill(0);
                self.da_header(row, i, DA3_NODE_MAGIC, (part.len(), level), &mut bytes);
                for (k, (hash, before)) in part.iter().enumerate() {
                    DaNodeEntry {
                        hashval: Be32::new(*hash),
                        before: Be32::new(*before as u32),
                    }
                    .put(&mut bytes, da_header_len(true) + k * DaNodeEntry::SIZE);
                }
                above.push((part.last().map_or(0, |e| e.0), *address));
                put(*address, &bytes)?;
            }
            if n == 1 {
                break;
            }
            below = above;
        }
        Ok(())
    }

    /// The leaves and nodes of a node directory.
    fn fill_index<E>(
        &self,
        index: &[(u32, u32)],
        first: u64,
        put: &mut Put<'_, E>,
    ) -> Result<(), E> {
        let size = self.g.dir_block_size as usize;
        let levels = index_levels(self.g, index.len());
        let total = levels.iter().sum::<usize>() as u64;
        let blocks: Vec<u64> = (0..total)
            .map(|i| first + i * self.g.dir_blocks())
            .collect();
        // The root has the first block; the nodes between it and the leaves the last ones.
        let n = levels[0];
        let row = if n == 1 { &blocks[..1] } else { &blocks[1..=n] };
        let mut bytes = vec![0; size];
        let mut leaves = Vec::with_capacity(n);
        for (i, at) in row.iter().enumerate() {
            let part = share(index, n, i);
            bytes.fill(0);
            self.da_header(row, i, DIR3_LEAFN_MAGIC, (part.len(), 0), &mut bytes);
            put_index(part, &mut bytes, da_header_len(true));
            leaves.push((part.last().map_or(0, |e| e.0), *at));
            put(*at, &bytes)?;
        }
        if n == 1 {
            return Ok(());
        }
        let nodes = [&blocks[..1], &blocks[n + 1..]].concat();
        self.fill_nodes(size, leaves, &nodes, put)
    }

    /// The free index blocks of a node directory.
    fn fill_free<E>(&self, bests: &[u16], put: &mut Put<'_, E>) -> Result<(), E> {
        let g = self.g;
        let slots = per_free_block(g);
        let mut bytes = vec![0; g.dir_block_size as usize];
        for (i, part) in bests.chunks(slots).enumerate() {
            bytes.fill(0);
            let at = g.dir_index().end + i as u64 * g.dir_blocks();
            self.block_header(DIR3_FREE_MAGIC, at).put(&mut bytes, 0);
            Dir2FreeCounts {
                firstdb: Be32::new((i * slots) as u32),
                nvalid: Be32::new(part.len() as u32),
                nused: Be32::new(part.len() as u32),
            }
            .put(&mut bytes, Dir3BlockHeader::SIZE);
            for (k, b) in part.iter().enumerate() {
                Be16::new(*b).put(&mut bytes, da_header_len(true) + k * 2);
            }
            put(at, &bytes)?;
        }
        Ok(())
    }
}
