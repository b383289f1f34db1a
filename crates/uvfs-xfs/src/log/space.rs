//! The free space of an allocation group, the owners of its blocks and how many share them: the records of its trees,
//! which are changed in memory and from which the trees are then built anew.

use super::items::stamped;
use crate::bulk::group::{Group, GroupTree};
use crate::bulk::space::{FreeRuns, Owner, normal, space_trees, subtract};
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use crate::overlay::Overlay;
use crate::walk::btree::group_tree;

const FLAGS: u64 = RMAP_OFF_ATTR_FORK | RMAP_OFF_BMBT_BLOCK;

/// What the trees of a group say of its blocks.
pub(super) struct Space {
    agno: u32,
    /// Free runs.
    free: Vec<(u32, u32)>,
    /// The records of the reverse mapping tree, less those of its own and of the trees of free space and references.
    owners: Vec<Owner>,
    /// Runs that several own, and how many.
    shared: Vec<(u32, u32, u32)>,
    /// Runs that copies on write are prepared in.
    staged: Vec<(u32, u32)>,
    /// Blocks of the trees of free space and owners, and of the free list.
    own: Vec<u32>,
    /// Blocks of the tree of references.
    references: Vec<u32>,
}

impl Space {
    /// Reads the trees of a group; `None` if one of them is damaged, or is not in order.
    pub fn read(disk: &Overlay, g: &Geometry, agno: u32) -> Option<Space> {
        let header = |n| disk.get(g.ag_header_daddr(agno, n) << 9, g.sector_size as usize);
        let agf = header(AGF_SECTOR).ok()?;
        let agf = *check_agf(&agf, &g.header_ident(agno, AGF_SECTOR)).ok()?;
        let mut own = Vec::new();
        let tree = |tree: Btree| {
            let walk = |records: &mut _| group_tree(g, agno, tree, agf.root_of(tree), records);
            let (blocks, bytes) = super::Records::read(disk, g, walk)?;
            let blocks = blocks.into_iter().map(|at| at as u32);
            Some((blocks.collect::<Vec<_>>(), bytes))
        };
        let inside = |start: u32, len: u32| g.fsb_run(g.fsbno(AgBlock { agno, agbno: start }), len);
        let mut free = Vec::new();
        for kind in [Btree::Bno, Btree::Cnt] {
            let (blocks, bytes) = tree(kind)?;
            own.extend(blocks);
            if kind == Btree::Bno {
                let records = AllocRecord::slice_at(&bytes, 0, bytes.len() / AllocRecord::SIZE);
                let run = |r: &AllocRecord| (r.startblock.get(), r.blockcount.get());
                free.extend(records.ok()?.iter().map(run));
            }
        }
        let mut owners = Vec::new();
        if g.features.rmapbt {
            let (blocks, bytes) = tree(Btree::Rmap)?;
            own.extend(blocks);
            let records = RmapRecord::slice_at(&bytes, 0, bytes.len() / RmapRecord::SIZE);
            for r in records.ok()? {
                let (start, len) = (r.startblock.get(), r.blockcount.get());
                let owner = r.owner.get();
                if !matches!(owner, RMAP_OWN_AG | RMAP_OWN_REFC) {
                    owners.push((start, len, owner, r.offset.get()));
                }
            }
        }
        let (mut shared, mut staged, mut references) = (Vec::new(), Vec::new(), Vec::new());
        if g.features.reflink {
            let (blocks, bytes) = tree(Btree::Refcount)?;
            references = blocks;
            let n = bytes.len() / RefcountRecord::SIZE;
            for r in RefcountRecord::slice_at(&bytes, 0, n).ok()? {
                let (start, len) = (r.startblock.get(), r.blockcount.get());
                match start & REFC_COW_START {
                    0 => shared.push((start, len, r.refcount.get())),
                    _ => staged.push((start & !REFC_COW_START, len)),
                }
            }
        }
        let agfl = header(AGFL_SECTOR).ok()?;
        let slots = check_agfl(&agfl, &g.header_ident(agno, AGFL_SECTOR)).ok()?;
        let n = agf.flcount.get() as usize;
        let first = agf.flfirst.get() as usize;
        let listed = (0..n.min(slots.len())).map(|i| slots[(first + i) % slots.len()].get());
        own.extend(listed);
        let runs = free.iter().chain(&staged).copied();
        let runs = runs.chain(own.iter().map(|b| (*b, 1)));
        let mut runs = runs.chain(shared.iter().map(|(s, n, _)| (*s, *n)));
        let sound = runs.all(|(s, n)| inside(s, n).is_some())
            && owners.iter().all(|o| o.0.checked_add(o.1).is_some());
        sound.then_some(Space {
            agno,
            free,
            owners,
            shared,
            staged,
            own,
            references,
        })
    }

    /// How many records there are, which is how long a change takes.
    pub fn len(&self) -> usize {
        self.free.len() + self.owners.len() + self.shared.len() + self.staged.len()
    }

    /// Builds the trees and headers; `None` if there is no space for them.
    pub fn write(self, disk: &Overlay, g: &Geometry, lsn: u64) -> Option<()> {
        let agno = self.agno;
        let free = normal(self.free);
        let mut pool = FreeRuns {
            usable: free.clone(),
            free,
            taken: Vec::new(),
        };
        let (mut trees, mut owners) = (Vec::new(), self.owners);
        if g.features.reflink {
            let staged = normal(self.staged);
            let staged = staged.iter().map(|(s, n)| (s | REFC_COW_START, *n, 1));
            let words = self.shared.into_iter().chain(staged);
            let words = words.flat_map(|(start, blocks, count)| [start, blocks, count]);
            let records: Vec<u8> = words.flat_map(u32::to_be_bytes).collect();
            let need = GroupTree::shape(Btree::Refcount, &records, g.block_size).blocks();
            let mut at = self.references;
            let rest = at.split_off(need.min(at.len()));
            pool.give(&rest);
            at.extend(pool.take(need - at.len())?);
            if g.features.rmapbt {
                owners.extend(at.iter().map(|b| (*b, 1, RMAP_OWN_REFC, 0)));
            }
            trees.push(GroupTree {
                tree: Btree::Refcount,
                records,
                at,
            });
        }
        let free_list = space_trees(g, owners, self.own, &mut pool, &mut trees)?;
        let group = Group {
            agno,
            free: pool.rest(),
            chunks: Vec::new(),
            trees,
            free_list,
        };
        for b in group.blocks(g) {
            let at = g.daddr(AgBlock { agno, agbno: b.at });
            disk.write(at << 9, &stamped(b.bytes, lsn));
        }
        let [agf, _, agfl] = group.headers(g);
        for (n, sector) in [(AGF_SECTOR, agf), (AGFL_SECTOR, agfl)] {
            disk.write(g.ag_header_daddr(agno, n) << 9, &stamped(sector, lsn));
        }
        Some(())
    }

    /// Frees blocks.
    pub fn free(&mut self, start: u32, len: u32) {
        self.free.push((start, len));
    }

    /// Takes free blocks, in few runs.
    pub fn take(&mut self, blocks: u32) -> Option<Vec<(u32, u32)>> {
        self.free = normal(std::mem::take(&mut self.free));
        let (mut out, mut left) = (Vec::new(), blocks);
        let whole = self.free.iter().position(|(_, n)| *n >= blocks);
        for run in &mut self.free[whole.unwrap_or(0)..] {
            let n = left.min(run.1);
            if n > 0 {
                out.push((run.0, n));
            }
            *run = (run.0 + n, run.1 - n);
            left -= n;
        }
        self.free.retain(|run| run.1 > 0);
        (left == 0).then_some(out)
    }

    /// Gives blocks an owner.
    pub fn own(&mut self, owner: Owner) {
        self.owners.push(owner);
    }

    /// Takes blocks away from an owner.
    pub fn disown(&mut self, (start, len, owner, offset): Owner) {
        let fixed = owner >> 63 != 0 || offset & RMAP_OFF_BMBT_BLOCK != 0;
        let place = |at: u32, offset: u64| match fixed {
            true => 0,
            false => (offset & RMAP_OFF_MASK).wrapping_sub(at.into()),
        };
        self.cut(start, len, &|(s, _, o, off)| {
            o == owner && (off ^ offset) & FLAGS == 0 && place(s, off) == place(start, offset)
        });
    }

    /// Takes blocks away from the one that owns all of them, if there is one.
    pub fn disown_any(&mut self, start: u32, len: u32) {
        let mut all = self.owners.iter();
        let one = all.find(|(s, n, ..)| *s <= start && s + n >= start + len);
        if let Some(one) = one.copied() {
            self.cut(start, len, &|o| o == one);
        }
    }

    fn cut(&mut self, start: u32, len: u32, is: &dyn Fn(Owner) -> bool) {
        let end = start + len;
        let mut rests = Vec::new();
        self.owners.retain(|record| {
            let (s, n, owner, offset) = *record;
            if s >= end || s + n <= start || !is(*record) {
                return true;
            }
            let fixed = owner >> 63 != 0 || offset & RMAP_OFF_BMBT_BLOCK != 0;
            rests.push((s, start.saturating_sub(s), owner, offset));
            let skip = u64::from(end - s) * u64::from(!fixed);
            rests.push((end, (s + n).saturating_sub(end), owner, offset + skip));
            false
        });
        self.owners.extend(rests.iter().filter(|rest| rest.1 > 0));
    }

    /// Counts one owner more of a run, or one less. Gives the runs that have none left.
    pub fn count(&mut self, start: u32, len: u32, more: bool) -> Vec<(u32, u32)> {
        let (end, mut parts) = (start + len, Vec::new());
        for (s, n, count) in std::mem::take(&mut self.shared) {
            let cuts = [s, start.clamp(s, s + n), end.clamp(s, s + n), s + n];
            parts.extend(cuts.windows(2).map(|c| (c[0], c[1] - c[0], count)));
        }
        let known: Vec<(u32, u32)> = parts.iter().map(|(s, n, _)| (*s, *n)).collect();
        let once = subtract(&[(start, len)], &known).into_iter();
        parts.extend(once.map(|(s, n)| (s, n, 1)));
        parts.retain(|part| part.1 > 0);
        parts.sort_unstable();
        let mut gone = Vec::new();
        for (s, n, count) in parts {
            let count = match (start..end).contains(&s) {
                false => count,
                true if more => count.saturating_add(1),
                true => count.saturating_sub(1),
            };
            match (count, self.shared.last_mut()) {
                (0, _) => gone.push((s, n)),
                (1, _) => {}
                (_, Some((at, len, c))) if *at + *len == s && *c == count => *len += n,
                _ => self.shared.push((s, n, count)),
            }
        }
        gone
    }

    /// Notes that copies on write are prepared in a run, or no longer.
    pub fn stage(&mut self, start: u32, len: u32, more: bool) {
        match more {
            true => self.staged.push((start, len)),
            false => {
                let staged = normal(std::mem::take(&mut self.staged));
                self.staged = subtract(&staged, &[(start, len)]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> Space {
        Space {
            agno: 0,
            free: vec![(10, 2), (20, 10)],
            owners: vec![(40, 10, 131, 5), (40, 10, 132, 0), (60, 1, RMAP_OWN_COW, 0)],
            shared: vec![(40, 10, 2)],
            staged: vec![(60, 1)],
            own: Vec::new(),
            references: Vec::new(),
        }
    }

    #[test]
    fn blocks_change_owners() {
        let mut s = space();
        s.disown((43, 2, 131, 8));
        s.disown((43, 2, 132, 4));
        s.owners.sort_unstable();
        let owners = [(40, 3, 131, 5), (40, 10, 132, 0), (45, 5, 131, 10)];
        assert_eq!(s.owners[..3], owners);
        s.disown_any(60, 1);
        assert_eq!(s.owners.len(), 3);
    }

    #[test]
    fn owners_are_counted() {
        let mut s = space();
        assert_eq!(s.count(38, 4, true), []);
        assert_eq!(s.shared, [(38, 2, 2), (40, 2, 3), (42, 8, 2)]);
        assert_eq!(s.count(36, 4, false), [(36, 2)]);
        assert_eq!(s.shared, [(40, 2, 3), (42, 8, 2)]);
        assert_eq!(s.count(40, 2, false), []);
        assert_eq!(s.shared, [(40, 10, 2)]);
    }

    #[test]
    fn blocks_are_taken() {
        let mut s = space();
        assert_eq!(s.take(5), Some(vec![(20, 5)]));
        assert_eq!(s.take(6), Some(vec![(10, 2), (25, 4)]));
        assert_eq!(s.take(2), None);
    }
}
