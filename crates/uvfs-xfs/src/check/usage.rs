//! The use of blocks and inodes by each user, group and project.

use super::space::mix;
use crate::read::inode::Inode;
use std::collections::BTreeMap;

/// Bytes of an entry of [`Usage`], with its share of the map's nodes.
pub(crate) const USAGE_BYTES: u64 = 48;
/// Fewer entries are not worth a bound.
pub(super) const LEAST_IDS: usize = 1024;

/// Blocks and inodes of each user, group and project.
pub(super) type Ids = BTreeMap<u32, (u64, u64)>;

/// The ids that are counted in a pass: those whose hash has this remainder. When
/// there are too many, half of them are left to another pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class {
    pub remainder: u64,
    /// A power of two.
    pub classes: u64,
}

/// The use by inodes and the recorded use, of the ids of a class.
pub(crate) struct Usage {
    pub(super) class: Class,
    pub(super) seen: [Ids; 3],
    pub(super) recorded: [Ids; 3],
    /// Entries of all maps.
    limit: usize,
}

impl Usage {
    /// Counts the ids of `class`, with about `limit` entries at most.
    pub fn new(class: Class, limit: usize) -> Usage {
        Usage {
            class,
            seen: Default::default(),
            recorded: Default::default(),
            limit: limit.max(LEAST_IDS),
        }
    }

    /// The class that was counted in the end: in the first pass it may have become smaller.
    pub fn class(&self) -> Class {
        self.class
    }

    fn has(&self, id: u32) -> bool {
        mix(id.into()) % self.class.classes == self.class.remainder
    }

    /// Makes room if there are too many.
    fn shrink(&mut self) {
        // A class with another remainder is counted whole: it is about as large as the first.
        while self.class.remainder == 0 && self.class.classes < 1 << 31 {
            let maps = || self.seen.iter().chain(&self.recorded);
            if maps().map(|m| m.len()).sum::<usize>() <= self.limit {
                break;
            }
            self.class.classes *= 2;
            let class = self.class;
            for map in self.seen.iter_mut().chain(&mut self.recorded) {
                map.retain(|id, _| mix(u64::from(*id)) % class.classes == class.remainder);
            }
        }
    }

    /// Counts an inode for its owners, or takes it back.
    pub fn add(&mut self, i: &Inode, undo: bool) {
        for (k, id) in [i.uid, i.gid, i.projid].into_iter().enumerate() {
            if self.has(id) {
                let e = self.seen[k].entry(id).or_default();
                if undo {
                    e.0 = e.0.wrapping_sub(i.nblocks);
                    e.1 = e.1.wrapping_sub(1);
                    continue;
                }
                e.0 += i.nblocks;
                e.1 += 1;
                if e.1 == 1 {
                    self.shrink();
                }
            }
        }
    }

    /// Notes what is recorded of an id of kind `k`.
    pub(super) fn record(&mut self, k: usize, id: u32, used: (u64, u64)) {
        if self.has(id) {
            self.recorded[k].insert(id, used);
            self.shrink();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A check of quotas with little memory counts each id once.
    #[test]
    fn classes_cover_all_ids_once() {
        let first = Class {
            remainder: 0,
            classes: 1,
        };
        let mut u = Usage::new(first, LEAST_IDS);
        for id in 0..10_000u32 {
            u.record(0, id, (1, 1));
            assert!(u.recorded[0].len() <= LEAST_IDS);
        }
        let classes = u.class().classes;
        assert!(classes > 1 && classes.is_power_of_two());
        let mut all: Vec<u32> = u.recorded[0].keys().copied().collect();
        for remainder in 1..classes {
            let mut u = Usage::new(Class { remainder, classes }, LEAST_IDS);
            for id in 0..10_000u32 {
                u.record(0, id, (1, 1));
            }
            assert!(u.recorded[0].len() < 2 * LEAST_IDS);
            assert_eq!(u.class(), Class { remainder, classes });
            all.extend(u.recorded[0].keys());
        }
        all.sort_unstable();
        assert_eq!(all, (0..10_000).collect::<Vec<u32>>());
    }
}
