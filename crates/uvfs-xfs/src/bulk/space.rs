//! The free space of an allocation group and the owners of its blocks, and the trees of both.

use super::btree::Shape;
use super::group::{Group, GroupTree, by_size, free_records};
use crate::format::*;
use crate::geometry::Geometry;
use zerocopy::IntoBytes;

/// Blocks that the free list begins with.
const LIST: usize = 6;

/// A record of the reverse mapping tree: first block, blocks, owner, offset with its flags.
pub(crate) type Owner = (u32, u32, u64, u64);

/// Runs of blocks less those in `minus`; both in order of blocks.
pub(crate) fn subtract(runs: &[(u32, u32)], minus: &[(u32, u32)]) -> Vec<(u32, u32)> {
    let mut out = Vec::with_capacity(runs.len());
    let mut k = 0;
    for (start, len) in runs {
        let (mut at, end) = (*start, start + len);
        while k < minus.len() && minus[k].0 + minus[k].1 <= at {
            k += 1;
        }
        let mut i = k;
        while at < end {
            match minus.get(i) {
                Some((s, n)) if *s < end => {
                    if *s > at {
                        out.push((at, s - at));
                    }
                    at = at.max(s + n);
                    i += 1;
                }
                _ => {
                    out.push((at, end - at));
                    at = end;
                }
            }
        }
    }
    out
}

/// Sorted, without overlaps.
pub(crate) fn normal(mut runs: Vec<(u32, u32)>) -> Vec<(u32, u32)> {
    runs.sort_unstable();
    let mut out: Vec<(u32, u32)> = Vec::with_capacity(runs.len());
    for (s, n) in runs {
        match out.last_mut() {
            Some((a, b)) if *a + *b >= s => *b = (*b).max(s + n - *a),
            _ => out.push((s, n)),
        }
    }
    out
}

/// Sorts owners, and joins those that go on.
fn joined(mut owners: Vec<Owner>) -> Vec<Owner> {
    owners.sort_unstable_by_key(|(s, n, owner, offset)| {
        (*s, *owner, offset & !RMAP_OFF_UNWRITTEN, *n)
    });
    let mut out: Vec<Owner> = Vec::with_capacity(owners.len());
    for (s, n, owner, offset) in owners {
        if let Some((start, len, o, off)) = out.last_mut() {
            let special = owner >> 63 != 0 || offset & RMAP_OFF_BMBT_BLOCK != 0;
            let goes_on = match special {
                true => *off == offset,
                false => off.wrapping_add(u64::from(*len)) == offset,
            };
            if *o == owner && *start + *len == s && goes_on {
                *len += n;
                continue;
            }
        }
        out.push((s, n, owner, offset));
    }
    out
}

/// Free runs that blocks of trees are taken from.
pub(crate) struct FreeRuns {
    /// All of them.
    pub free: Vec<(u32, u32)>,
    /// Taken from in this order: the first ones were not in use before.
    pub usable: Vec<(u32, u32)>,
    /// Taken so far.
    pub taken: Vec<(u32, u32)>,
}

impl FreeRuns {
    /// Takes blocks.
    pub fn take(&mut self, n: usize) -> Option<Vec<u32>> {
        let mut out = Vec::with_capacity(n);
        while out.len() < n {
            let run = self.usable.iter_mut().find(|r| r.1 > 0)?;
            let k = (n - out.len()).min(run.1 as usize) as u32;
            out.extend(run.0..run.0 + k);
            self.taken.push((run.0, k));
            *run = (run.0 + k, run.1 - k);
        }
        Some(out)
    }

    /// Takes the blocks of a tree of these records.
    pub fn tree(&mut self, g: &Geometry, tree: Btree, records: Vec<u8>) -> Option<GroupTree> {
        let at = self.take(GroupTree::shape(tree, &records, g.block_size).blocks())?;
        Some(GroupTree { tree, records, at })
    }

    /// Makes blocks free that others had.
    pub fn give(&mut self, blocks: &[u32]) {
        let more = blocks.iter().map(|b| (*b, 1));
        self.free = normal(self.free.iter().copied().chain(more).collect());
    }

    /// The runs that are free in the end.
    pub fn rest(&self) -> Vec<(u32, u32)> {
        subtract(&self.free, &normal(self.taken.clone()))
    }
}

/// Adds the trees of free space and owners, which take blocks from what they describe, the first ones from `own`. Gives the
/// blocks of the free list: those that were taken and are not needed, too.
pub(crate) fn space_trees(
    g: &Geometry,
    owners: Vec<Owner>,
    mut own: Vec<u32>,
    pool: &mut FreeRuns,
    trees: &mut Vec<GroupTree>,
) -> Option<Vec<u32>> {
    let size = g.block_size as usize;
    let rmap = g.features.rmapbt;
    let shape = |tree, n| Shape::new(tree, size, n).blocks();
    let owners = joined(owners);
    let (records, each, wide) = loop {
        let rest = pool.rest();
        let mut all = Vec::new();
        if rmap {
            all.clone_from(&owners);
            all.extend(own.iter().map(|b| (*b, 1, RMAP_OWN_AG, 0)));
            all = joined(all);
        }
        let each = shape(Btree::Bno, rest.len());
        let wide = match rmap {
            true => shape(Btree::Rmap, all.len()),
            false => 0,
        };
        let need = 2 * each + wide;
        // The free list has no room for the blocks that trees of more records had.
        if own.len() > need + Group::free_list_slots(g) / 2 {
            pool.give(&own.split_off(need + LIST));
            continue;
        }
        if own.len() >= need {
            break (all, each, wide);
        }
        let free: usize = rest.iter().map(|(_, n)| *n as usize).sum();
        let spare = LIST.min((free / 4).saturating_sub(need));
        own.extend(pool.take(need + spare - own.len())?);
    };
    let rest = pool.rest();
    let mut at = own.into_iter();
    let mut add = |tree, records, blocks| {
        let at = at.by_ref().take(blocks).collect();
        trees.push(GroupTree { tree, records, at });
    };
    add(Btree::Bno, free_records(&rest), each);
    add(Btree::Cnt, free_records(&by_size(&rest)), each);
    if rmap {
        let record = |(s, n, owner, offset)| RmapRecord {
            startblock: Be32::new(s),
            blockcount: Be32::new(n),
            owner: Be64::new(owner),
            offset: Be64::new(offset),
        };
        let records: Vec<RmapRecord> = records.into_iter().map(record).collect();
        add(Btree::Rmap, records.as_bytes().to_vec(), wide);
    }
    Some(at.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Used blocks are taken out of free ones.
    #[test]
    fn runs_less_other_runs() {
        assert_eq!(
            normal(vec![(5, 5), (1, 2), (8, 4), (3, 1)]),
            [(1, 3), (5, 7)]
        );
        let runs = [(0, 10), (20, 10)];
        assert_eq!(subtract(&runs, &[]), runs);
        assert_eq!(
            subtract(&runs, &[(2, 3), (8, 14), (29, 5)]),
            [(0, 2), (5, 3), (22, 7)]
        );
        assert_eq!(subtract(&runs, &[(0, 40)]), []);
    }

    /// Records of one owner that go on are joined, as xfs_repair requires.
    #[test]
    fn owners_that_go_on_are_one() {
        let ino = 131;
        let records = joined(vec![
            (14, 2, ino, 4),
            (10, 4, ino, 0),
            (16, 1, ino, 6 | RMAP_OFF_UNWRITTEN),
            (30, 1, RMAP_OWN_AG, 0),
            (31, 1, RMAP_OWN_AG, 0),
            (32, 1, RMAP_OWN_REFC, 0),
        ]);
        assert_eq!(
            records,
            [
                (10, 6, ino, 0),
                (16, 1, ino, 6 | RMAP_OFF_UNWRITTEN),
                (30, 2, RMAP_OWN_AG, 0),
                (32, 1, RMAP_OWN_REFC, 0),
            ]
        );
    }
}
