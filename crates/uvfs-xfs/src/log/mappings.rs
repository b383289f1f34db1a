//! Changes of a file's mapping that the log announces (`xfs_bui_log_format`), for files whose extents are in the
//! inode. A fork with a tree is left as it is: the change may need more or fewer blocks than the tree has.

use super::transactions::Item;
use crate::format::*;
use crate::geometry::Geometry;
use crate::overlay::Overlay;

const MAP: u32 = 1;
const UNMAP: u32 = 2;
const KIND: u32 = 0xff;
const ATTR_FORK: u32 = 1 << 31;
const UNWRITTEN: u32 = 1 << 30;

/// Does what an intent announces; gives whether that was possible. Nothing is changed otherwise.
pub(super) fn finish(disk: &Overlay, g: &Geometry, item: &Item) -> bool {
    change(disk, g, item).is_some()
}

fn change(disk: &Overlay, g: &Geometry, item: &Item) -> Option<()> {
    let head = LogItemHeader::at(item.header(), 0).ok()?;
    let map = LogMapping::at(item.header(), LogItemHeader::SIZE).ok()?;
    let (ino, flags, len) = (map.owner.get(), map.flags.get(), map.len.get());
    let known = flags & !(KIND | ATTR_FORK | UNWRITTEN) == 0;
    let extent = Extent {
        startoff: map.startoff.get(),
        startblock: map.startblock.get(),
        blockcount: len,
        unwritten: flags & UNWRITTEN != 0,
    };
    let inside = extent.startoff <= 1 << (63 - g.blocklog) && len <= MAX_EXTENT_BLOCKS;
    if head.count.get() != 1 || !known || !inside {
        return None;
    }
    g.fsb_run(extent.startblock, len)?;
    super::with_inode(disk, g, ino, |inode| {
        let d = *Dinode::at(inode, 0).ok()?;
        let start = DINODE_V3_SIZE;
        let attr = match d.v2.forkoff {
            0 => inode.len(),
            n => start + usize::from(n) * 8,
        };
        let (data, attrs) = d.extent_counts();
        let (fork, format, count) = match flags & ATTR_FORK {
            0 => (start..attr, d.v2.format, data),
            _ => (attr..inode.len(), d.v2.aformat, attrs),
        };
        let fork = inode.get_mut(fork)?;
        if d.v2.mode.get() == 0 || format != FORMAT_EXTENTS {
            return None;
        }
        let old = ExtentRecord::slice_at(fork, 0, usize::try_from(count).ok()?).ok()?;
        let old: Vec<Extent> = old.iter().map(ExtentRecord::unpack).collect();
        let (new, blocks) = match flags & KIND {
            MAP => (mapped(&old, extent)?, d.v2.nblocks.get() + u64::from(len)),
            UNMAP => {
                let (new, gone) = unmapped(&old, extent);
                (new, d.v2.nblocks.get().checked_sub(gone)?)
            }
            _ => return None,
        };
        let bytes = crate::bulk::btree::extent_records(&new);
        fork.get_mut(..bytes.len())?.copy_from_slice(&bytes);
        let to = Dinode::at_mut(inode, 0).ok()?;
        to.v2.nblocks.set(blocks);
        let n = new.len() as u64;
        match (flags & ATTR_FORK, d.flags2.get() & DIFLAG2_NREXT64 != 0) {
            (0, true) => to.v2.big_nextents.set(n),
            (0, false) | (_, true) => to.v2.nextents.set(n as u32),
            (_, false) => to.v2.anextents.set(n as u16),
        }
        Some(())
    })
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

/// The extents without those parts that lie in `hole`, and how many blocks that took away.
fn unmapped(old: &[Extent], hole: Extent) -> (Vec<Extent>, u64) {
    let mut gone = 0;
    let mut new = Vec::with_capacity(old.len() + 1);
    for e in old {
        let part = |from: u64, to: u64| Extent {
            startoff: from,
            startblock: e.startblock + (from - e.startoff),
            blockcount: (to - from) as u32,
            unwritten: e.unwritten,
        };
        let (from, to) = (hole.startoff.max(e.startoff), hole.end().min(e.end()));
        if from >= to {
            new.push(*e);
            continue;
        }
        gone += to - from;
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
        let (rest, gone) = unmapped(&both, extent(3, 0, 4));
        assert_eq!(
            (&rest[..], gone),
            (&[extent(0, 100, 3), extent(7, 107, 8)][..], 4)
        );
        let (rest, gone) = unmapped(&old, extent(2, 0, 10));
        assert_eq!(
            (&rest[..], gone),
            (&[extent(0, 100, 2), extent(12, 112, 3)][..], 5)
        );
    }
}
