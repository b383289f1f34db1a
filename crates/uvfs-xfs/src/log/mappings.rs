//! The mapping of a fork, in the inode or in a tree, and its changes.

use super::finish::Finishing;
use super::items::stamped;
use crate::bulk::btree::{Shape, build_fork, extent_records, fork_root_room};
use crate::format::*;
use crate::walk::btree::fork_tree;
use std::ops::Range;

/// A fork of an inode.
pub(super) struct Fork {
    pub ino: u64,
    pub attr: bool,
    /// Its extents, in order.
    pub extents: Vec<Extent>,
    /// The blocks of its tree.
    tree: Vec<u64>,
    /// Its bytes in the inode.
    pub room: usize,
    /// Blocks that it had.
    blocks: u64,
}

/// The part of an inode that a fork has.
pub(super) fn fork_range(d: &Dinode, size: usize, attr: bool) -> Range<usize> {
    let start = DINODE_V3_SIZE;
    let middle = match d.v2.forkoff {
        0 => size,
        n => size.min(start + usize::from(n) * 8),
    };
    if attr { middle..size } else { start..middle }
}

impl Fork {
    /// Reads a fork; `None` if it has no extents, or is damaged.
    pub fn read(f: &Finishing<'_>, ino: u64, attr: bool) -> Option<Fork> {
        let raw = super::read_inode(f.disk, f.g, ino)?;
        let d = Dinode::at(&raw, 0).ok()?;
        let bytes = raw.get(fork_range(d, raw.len(), attr))?;
        let (data, attrs) = d.extent_counts();
        let (format, count) = match attr {
            false => (d.v2.format, data),
            true => (d.v2.aformat, attrs),
        };
        let unpacked = |bytes: &[u8], n| {
            let records = ExtentRecord::slice_at(bytes, 0, n).ok()?.iter();
            Some(records.map(ExtentRecord::unpack).collect::<Vec<_>>())
        };
        let (tree, extents) = match format {
            _ if d.v2.mode.get() == 0 || bytes.is_empty() => return None,
            FORMAT_EXTENTS => (Vec::new(), unpacked(bytes, usize::try_from(count).ok()?)?),
            FORMAT_BTREE => {
                let walk = |records: &mut _| fork_tree(f.g, ino, bytes, records);
                let (tree, records) = super::Records::read(f.disk, f.g, walk)?;
                (
                    tree,
                    unpacked(&records, records.len() / ExtentRecord::SIZE)?,
                )
            }
            FORMAT_LOCAL if attr => Default::default(),
            _ => return None,
        };
        let fits = |e: &Extent| {
            e.end() <= 1 << (63 - f.g.blocklog) && f.g.fsb_run(e.startblock, e.blockcount).is_some()
        };
        let sorted = extents.is_sorted_by(|a, b| a.end() <= b.startoff);
        if !sorted || !extents.iter().all(fits) {
            return None;
        }
        let mut fork = Fork {
            ino,
            attr,
            extents,
            tree,
            room: bytes.len(),
            blocks: 0,
        };
        fork.blocks = fork.count();
        Some(fork)
    }

    fn count(&self) -> u64 {
        let blocks = self.extents.iter().map(|e| u64::from(e.blockcount));
        blocks.sum::<u64>() + self.tree.len() as u64
    }

    /// Adds an extent; `None` if its place is taken.
    pub fn map(&mut self, f: &mut Finishing<'_>, e: Extent) -> Option<()> {
        f.worked(self.extents.len());
        self.extents = mapped(&self.extents, e)?;
        f.own(e.startblock, e.blockcount, self.ino, self.offset(&e));
        Some(())
    }

    /// Takes away all that is mapped in a range of the fork's blocks, and gives it.
    pub fn unmap(&mut self, f: &mut Finishing<'_>, range: Range<u64>) -> Vec<Extent> {
        f.worked(self.extents.len());
        let (rest, gone) = unmapped(&self.extents, range);
        self.extents = rest;
        for e in &gone {
            f.disown(e.startblock, e.blockcount, self.ino, self.offset(e));
        }
        gone
    }

    fn flags(&self) -> u64 {
        if self.attr { RMAP_OFF_ATTR_FORK } else { 0 }
    }

    fn offset(&self, e: &Extent) -> u64 {
        let unwritten = if e.unwritten { RMAP_OFF_UNWRITTEN } else { 0 };
        e.startoff | self.flags() | unwritten
    }

    /// Writes the fork, with a tree if the inode has no room for its extents; `None` if there is no space for that.
    pub fn write(mut self, f: &mut Finishing<'_>) -> Option<()> {
        let g = f.g;
        let in_tree = self.extents.len() * ExtentRecord::SIZE > self.room;
        let need = match in_tree {
            true => {
                let room = fork_root_room(self.room);
                Shape::of_fork(g.block_size as usize, self.extents.len(), room).blocks()
            }
            false => 0,
        };
        let of_tree = self.flags() | RMAP_OFF_BMBT_BLOCK;
        for block in self.tree.split_off(need.min(self.tree.len())) {
            f.disown(block, 1, self.ino, of_tree);
            f.free(block, 1);
        }
        let near = self.extents.first().map_or(0, |e| e.startblock);
        for (start, n) in f.take(near, (need - self.tree.len()) as u32)? {
            for block in start..start + u64::from(n) {
                f.own(block, 1, self.ino, of_tree);
                self.tree.push(block);
            }
        }
        let (format, bytes) = match in_tree {
            false => (FORMAT_EXTENTS, extent_records(&self.extents)),
            true => {
                let tree = build_fork(g, self.ino, self.room, &self.extents, &self.tree);
                for b in tree.blocks {
                    f.disk
                        .write(g.daddr(g.fsb(b.at)?) << 9, &stamped(b.bytes, f.lsn));
                }
                (FORMAT_BTREE, tree.root)
            }
        };
        let (n, blocks) = (self.extents.len() as u64, self.count());
        super::with_inode(f.disk, g, self.ino, |inode| {
            let d = Dinode::at(inode, 0).ok()?;
            let range = fork_range(d, inode.len(), self.attr);
            let part = inode.get_mut(range)?;
            part.fill(0);
            part.get_mut(..bytes.len())?.copy_from_slice(&bytes);
            let d = Dinode::at_mut(inode, 0).ok()?;
            d.set_extents(self.attr, n);
            match self.attr {
                false => d.v2.format = format,
                true => d.v2.aformat = format,
            }
            let all = (d.v2.nblocks.get() + blocks).checked_sub(self.blocks)?;
            d.v2.nblocks.set(all);
            d.lsn.set(f.lsn);
            Some(())
        })
    }
}

/// The extents with one more, which is one with its neighbours where they go on; `None` if its place is taken.
fn mapped(old: &[Extent], e: Extent) -> Option<Vec<Extent>> {
    let at = old.partition_point(|o| o.startoff < e.startoff);
    let (before, after) = old.split_at(at);
    let clear = before.last().is_none_or(|b| b.end() <= e.startoff)
        && after.first().is_none_or(|a| a.startoff >= e.end());
    if !clear {
        return None;
    }
    let mut new: Vec<Extent> = Vec::with_capacity(old.len() + 1);
    for next in before.iter().chain([&e]).chain(after) {
        match new.last_mut() {
            // Only the new extent is joined: the others stay as the kernel has left them.
            Some(last)
                if (*last == e || *next == e || last.end() == e.end()) && goes_on(last, next) =>
            {
                last.blockcount += next.blockcount;
            }
            _ => new.push(*next),
        }
    }
    Some(new)
}

fn goes_on(a: &Extent, b: &Extent) -> bool {
    a.end() == b.startoff
        && a.startblock + u64::from(a.blockcount) == b.startblock
        && a.unwritten == b.unwritten
        && a.blockcount + b.blockcount <= MAX_EXTENT_BLOCKS
}

/// The extents without those parts that lie in `hole`, and these parts.
fn unmapped(old: &[Extent], hole: Range<u64>) -> (Vec<Extent>, Vec<Extent>) {
    let mut gone = Vec::new();
    let mut new = Vec::with_capacity(old.len() + 1);
    for e in old {
        let part = |from: u64, to: u64| e.part(from - e.startoff, (to - from) as u32);
        let (from, to) = (hole.start.max(e.startoff), hole.end.min(e.end()));
        if from >= to {
            new.push(*e);
            continue;
        }
        gone.push(part(from, to));
        new.extend((e.startoff < from).then(|| part(e.startoff, from)));
        new.extend((to < e.end()).then(|| part(to, e.end())));
    }
    (new, gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(startoff: u64, startblock: u64, blockcount: u32) -> Extent {
        Extent {
            startoff,
            startblock,
            blockcount,
            unwritten: false,
        }
    }

    #[test]
    fn extents_are_joined_and_cut() {
        let old = [extent(0, 100, 5), extent(10, 110, 5)];
        let both = mapped(&old, extent(5, 105, 5)).unwrap();
        assert_eq!(both, [extent(0, 100, 15)]);
        let apart = mapped(&old, extent(5, 300, 2)).unwrap();
        assert_eq!(apart, [old[0], extent(5, 300, 2), old[1]]);
        assert_eq!(mapped(&old, extent(4, 300, 2)), None);
        assert_eq!(mapped(&old, extent(9, 300, 2)), None);
        let (rest, gone) = unmapped(&both, 3..7);
        assert_eq!(
            (&rest[..], &gone[..]),
            (
                &[extent(0, 100, 3), extent(7, 107, 8)][..],
                &[extent(3, 103, 4)][..]
            )
        );
        let (rest, gone) = unmapped(&old, 2..12);
        assert_eq!(
            (&rest[..], &gone[..]),
            (
                &[extent(0, 100, 2), extent(12, 112, 3)][..],
                &[extent(2, 102, 3), extent(10, 110, 2)][..]
            )
        );
    }
}
