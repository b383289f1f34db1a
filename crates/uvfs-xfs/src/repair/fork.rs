//! Forks: where they lead, as far as that makes sense, and new ones.

use super::Mend;
use crate::blocks::Block;
use crate::bulk::btree::{Shape, build_fork, extent_records, fork_root_room};
use crate::format::*;
use crate::geometry::AgBlock;
use crate::read::inode::{Fork, Inode};
use crate::walk::btree::{Defect, Field, Item, Visitor, fork_tree};
use std::io;
use std::ops::Range;

/// Where a fork leads.
#[derive(Default)]
pub(crate) struct Map {
    /// Its extents that make sense, in order.
    pub extents: Vec<Extent>,
    /// The blocks of its tree.
    pub tree: Vec<u64>,
    /// Something had to be left out.
    pub hurt: bool,
    /// The fork has to be built anew.
    pub rebuild: bool,
}

impl Map {
    /// All its blocks.
    pub fn blocks(&self) -> u64 {
        let data = self.extents.iter().map(|e| u64::from(e.blockcount));
        data.sum::<u64>() + self.tree.len() as u64
    }

    /// Notes that these blocks are an inode's, for the reverse mapping tree.
    pub fn own(&self, m: &mut Mend<'_>, ino: u64, fork: Fork) {
        if !m.g.features.rmapbt || m.recount {
            return;
        }
        let (g, attr) = (m.g.clone(), fork.rmap_flag());
        for e in &self.extents {
            if let Some(a) = g.fsb_run(e.startblock, e.blockcount) {
                let unwritten = if e.unwritten { RMAP_OFF_UNWRITTEN } else { 0 };
                let offset = e.startoff | attr | unwritten;
                let owners = &mut m.ags[a.agno as usize].owners;
                owners.push((a.agbno, e.blockcount, ino, offset));
            }
        }
        for a in self.tree.iter().filter_map(|b| g.fsb(*b)) {
            let owners = &mut m.ags[a.agno as usize].owners;
            owners.push((a.agbno, 1, ino, attr | RMAP_OFF_BMBT_BLOCK));
        }
    }

    /// Takes the extents that are missing from `others`, if all are then as many as they should be; gives whether
    /// they are.
    pub fn complete(&mut self, others: &[Extent], count: u64) -> bool {
        let mut all = [&self.extents[..], others].concat();
        all.sort_by_key(|e| e.startoff);
        let mut end = 0;
        all.retain(|e| {
            let fits = e.startoff >= end;
            end = end.max(e.end());
            fits
        });
        let complete = all.len() as u64 == count && self.extents.len() < all.len();
        if complete {
            self.extents = all;
            (self.hurt, self.rebuild) = (false, true);
        }
        complete
    }

    /// Gives up the blocks of an inode's data fork, which have no other owner.
    pub fn release(&self, m: &mut Mend<'_>, ino: u64) {
        let g = m.g.clone();
        let extents = self.extents.iter().map(|e| (e.startblock, e.blockcount));
        for (b, n) in extents.chain(self.tree.iter().map(|b| (*b, 1))) {
            let Some(a) = g.fsb_run(b, n) else { continue };
            m.touched.insert(a.agno);
            m.rebuilt.insert(ino);
            let ag = &mut m.ags[a.agno as usize];
            ag.released.push((a.agbno, n));
            ag.owners
                .retain(|(_, _, owner, offset)| *owner != ino || offset & RMAP_OFF_ATTR_FORK != 0);
        }
    }

    /// Byte on the device of a block of the fork, if all of `count` blocks from it on are there
    /// one after another.
    pub fn offset(&self, m: &Mend<'_>, block: u64, count: u64) -> Option<u64> {
        let i = self.extents.partition_point(|e| e.startoff <= block);
        let e = self.extents.get(i.checked_sub(1)?)?;
        let skip = block - e.startoff;
        if skip + count > e.blockcount.into() {
            return None;
        }
        let a = m.g.fsb(e.startblock + skip)?;
        Some(m.g.daddr(a) << 9)
    }

    /// A part of a remote value or of a link's target, in `count` blocks from `block` on: their byte on the device, their
    /// bytes with a right checksum, and the range of the part in these. Its bytes are as many as the head says, whatever the
    /// checksum was.
    pub fn remote(
        &self,
        m: &Mend<'_>,
        ino: u64,
        (block, count): (u64, u64),
        magic: u32,
        offset: usize,
    ) -> Option<(u64, Vec<u8>, Range<usize>)> {
        let at = self.offset(m, block, count)?;
        let bytes = m.disk.get(at, (count as usize) << m.g.blocklog).ok()?;
        let bytes = summed(&bytes, REMOTE_CRC_OFFSET);
        let ident = m.g.ident(at >> 9, Some(ino));
        let len = check_remote(&bytes, magic, offset as u32, &ident)
            .ok()?
            .len();
        let part = RemoteHeader::SIZE..RemoteHeader::SIZE + len;
        (len > 0).then_some((at, bytes, part))
    }

    /// Reads `count` blocks of the fork, wherever they are.
    pub fn read(&self, m: &Mend<'_>, block: u64, count: u64) -> Option<Vec<u8>> {
        if let Some(at) = self.offset(m, block, count) {
            return m.disk.get(at, (count as usize) << m.g.blocklog).ok();
        }
        let mut out = Vec::new();
        for b in block..block + count {
            let at = self.offset(m, b, 1)?;
            out.extend(m.disk.get(at, m.g.block_size as usize).ok()?);
        }
        Some(out)
    }
}

struct ForkReader<'m, 'a> {
    m: &'m Mend<'a>,
    /// Extents may be unwritten.
    data: bool,
    next: u64,
    map: Map,
}

/// How many records the root of a fork's tree has, if they fit and all lead to blocks of this inode.
pub(crate) fn whole_root(m: &Mend<'_>, ino: u64, root: &[u8]) -> Option<usize> {
    let g = &m.g;
    let head = BmdrBlock::at(root, 0).ok()?;
    let (level, n) = (head.level.get(), usize::from(head.numrecs.get()));
    let room = fork_root_room(root.len());
    if !(1..BTREE_MAXLEVELS).contains(&level) || n == 0 || n > room {
        return None;
    }
    let ptrs = Be64::slice_at(root, BmdrBlock::SIZE + room * 8, n).ok()?;
    let leads = |p: &Be64| {
        let at = g.daddr(g.fsb(p.get())?);
        let bytes = m.block(at).ok()?;
        let bytes = summed(&bytes, BTREE_LONG_CRC_OFFSET);
        let head = check_btree_long(&bytes, &g.ident(at, Some(ino))).ok()?;
        (head.level.get() == level - 1).then_some(())
    };
    ptrs.iter().all(|p| leads(p).is_some()).then_some(n)
}

/// Follows a fork of extents or a tree.
pub(crate) fn read(m: &Mend<'_>, inode: &Inode, fork: Fork) -> Map {
    let mut r = ForkReader {
        m,
        data: fork == Fork::Data && inode.file_type() == FileType::Regular,
        next: 0,
        map: Map::default(),
    };
    let root = inode.fork_bytes(fork);
    match inode.fork_format(fork) {
        Some(FORMAT_EXTENTS) => {
            let records = inode.records(fork).iter();
            records.for_each(|e| r.extent(e.unpack()));
        }
        Some(FORMAT_BTREE) => fork_tree(&m.g, inode.ino, root, &mut r),
        _ => {}
    }
    r.map
}

impl ForkReader<'_, '_> {
    fn extent(&mut self, e: Extent) {
        let g = &self.m.g;
        let end = e.end();
        let fits = e.startoff >= self.next
            && end <= 1 << (63 - g.blocklog)
            && g.fsb_run(e.startblock, e.blockcount).is_some();
        if !fits {
            self.map.hurt = true;
            return;
        }
        self.next = end;
        let mut e = e;
        if e.unwritten && !self.data {
            e.unwritten = false;
            self.map.hurt = true;
        }
        self.map.extents.push(e);
    }
}

impl Visitor for ForkReader<'_, '_> {
    fn read(&mut self, a: AgBlock) -> io::Result<Block> {
        let bytes = self.m.block(self.m.g.daddr(a))?;
        // A block that only has a wrong checksum is believed, as far as its extents make sense.
        Ok(Block::new(bytes).verified())
    }

    fn item(&mut self, item: Result<Item<'_>, Defect>) -> bool {
        match item {
            Ok(Item::Sound(at, _)) => self.map.tree.push(at),
            Ok(Item::Records { bytes, n, .. }) => {
                let recs = ExtentRecord::slice_at(bytes, 0, n).unwrap_or_default();
                recs.iter().for_each(|r| self.extent(r.unpack()));
            }
            Ok(Item::Block(_)) => {}
            Err(Defect::Differs { field, .. }) if !matches!(field, Field::Key(_)) => {}
            Err(_) => self.map.hurt = true,
        }
        true
    }
}

/// A fork that was made: its format, its bytes in the inode, and the blocks of its tree.
pub(crate) struct MadeFork {
    pub format: u8,
    pub bytes: Vec<u8>,
    pub tree: Vec<u64>,
}

/// Makes a fork of `room` bytes with these extents; `None` if there is no space for its tree.
pub(crate) fn make(
    m: &mut Mend<'_>,
    ino: u64,
    extents: &[Extent],
    room: usize,
) -> Option<MadeFork> {
    if extents.len() * ExtentRecord::SIZE <= room {
        return Some(MadeFork {
            format: FORMAT_EXTENTS,
            bytes: extent_records(extents),
            tree: Vec::new(),
        });
    }
    if fork_root_room(room) == 0 {
        return None;
    }
    let g = m.g.clone();
    let shape = Shape::of_fork(g.block_size as usize, extents.len(), fork_root_room(room));
    let near = g.inode(ino).map_or(0, |a| a.agno);
    let runs = m.allocate(near, shape.blocks() as u32, 1)?;
    let blocks = |(a, n): &(AgBlock, u32)| g.fsbno(*a)..g.fsbno(*a) + u64::from(*n);
    let at: Vec<u64> = runs.iter().flat_map(blocks).collect();
    let tree = build_fork(&g, ino, room, extents, &at);
    for b in tree.blocks {
        let daddr = g.fsb(b.at).map_or(0, |a| g.daddr(a));
        m.put_block(daddr, &b.bytes, BTREE_LONG_CRC_OFFSET);
    }
    Some(MadeFork {
        format: FORMAT_BTREE,
        bytes: tree.root,
        tree: at,
    })
}

/// Extents for blocks that were allocated, from block `at` of the fork on.
pub(crate) fn append(
    m: &Mend<'_>,
    extents: &mut Vec<Extent>,
    mut at: u64,
    runs: &[(AgBlock, u32)],
) {
    for (a, n) in runs {
        let (mut skip, mut left) = (0, *n);
        while left > 0 {
            let part = left.min(MAX_EXTENT_BLOCKS);
            extents.push(Extent {
                startoff: at,
                startblock: m.g.fsbno(*a) + u64::from(skip),
                blockcount: part,
                unwritten: false,
            });
            (skip, left, at) = (skip + part, left - part, at + u64::from(part));
        }
    }
}

/// Sets the number of extents of a fork.
pub(crate) fn set_extents(raw: &mut [u8], f: Fork, n: u64) {
    if let Ok(d) = Dinode::at_mut(raw, 0) {
        d.set_extents(f == Fork::Attr, n);
    }
}
