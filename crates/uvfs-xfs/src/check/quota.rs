//! Quota inodes: their records, and the usage that they say.

use super::ctx::Ctx;
use super::inode::read_run;
use super::reader::Reader;
use super::report::Place;
use super::space::mix;
use crate::format::*;
use crate::inode::Inode;
use std::collections::BTreeMap;

/// Quota was counted: user, group, project (`XFS_[UGP]QUOTA_CHKD`).
const CHECKED: [u16; 3] = [0x0004, 0x0100, 0x0400];
/// Bytes of an entry of [`Usage`], with its share of the map's nodes.
pub(crate) const USAGE_BYTES: u64 = 48;
/// Fewer entries are not worth a bound.
const LEAST_IDS: usize = 1024;

const TYPES: [(u8, &str); 3] = [
    (DQTYPE_USER, "user quota"),
    (DQTYPE_GROUP, "group quota"),
    (DQTYPE_PROJ, "project quota"),
];

/// Blocks and inodes of each user, group and project.
type Ids = BTreeMap<u32, (u64, u64)>;

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
    class: Class,
    seen: [Ids; 3],
    recorded: [Ids; 3],
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
    fn record(&mut self, k: usize, id: u32, used: (u64, u64)) {
        if self.has(id) {
            self.recorded[k].insert(id, used);
            self.shrink();
        }
    }

    /// Compares what was seen with what the records say.
    pub fn compare(&self, ctx: &Ctx<'_>) {
        let flags = ctx.sb.qflags.get();
        for k in 0..3 {
            let there = ctx.g.quota_inodes[k].is_some();
            if !there || flags & CHECKED[k] == 0 {
                continue;
            }
            let place = Place::fs(TYPES[k].1);
            let mut ids: Vec<u32> = self.seen[k].keys().copied().collect();
            ids.extend(self.recorded[k].keys());
            ids.sort_unstable();
            ids.dedup();
            for id in ids {
                let seen = self.seen[k].get(&id).copied().unwrap_or_default();
                let recorded = self.recorded[k].get(&id).copied().unwrap_or_default();
                if seen != recorded {
                    ctx.report.differ(
                        place,
                        format!("usage of id {id}"),
                        format!("{} blocks, {} inodes", seen.0, seen.1),
                        format!("{} blocks, {} inodes", recorded.0, recorded.1),
                    );
                }
            }
        }
    }
}

/// Whether usage is to be counted.
pub(crate) fn counted(sb: &Superblock) -> bool {
    CHECKED.iter().any(|c| sb.qflags.get() & c != 0)
}

/// Checks the records of a quota inode.
pub(crate) fn records(ctx: &Ctx<'_>, rd: &mut Reader<'_>, inode: &Inode, extents: &[Extent]) {
    let (g, report) = (ctx.g, ctx.report);
    let Some(k) = g.quota_inodes.iter().position(|q| *q == Some(inode.ino)) else {
        return;
    };
    let (want, what) = TYPES[k];
    let base = Place::inode(what, inode.ino);
    let per_block = g.block_size as usize / Dquot::SIZE;
    let counted = ctx.sb.qflags.get() & CHECKED[k] != 0;
    for e in extents.iter().filter(|e| !e.unwritten) {
        for b in e.startoff..e.startoff + u64::from(e.blockcount) {
            let Some((bytes, a)) = read_run(ctx, rd, base, extents, b, 1) else {
                continue;
            };
            let place = base.at(a.agno, a.agbno);
            let ident = g.ident(g.daddr(a), None);
            for i in 0..per_block {
                let id = b.saturating_mul(per_block as u64) + i as u64;
                let record = &bytes[i * Dquot::SIZE..(i + 1) * Dquot::SIZE];
                let d = match check_dquot(record, &ident) {
                    Ok(d) => d,
                    Err(f) => {
                        report.fault(place, &f);
                        continue;
                    }
                };
                if u64::from(d.id.get()) != id {
                    report.differ(place, format!("d_id of record {i}"), id, d.id.get());
                }
                if d.r#type & !DQTYPE_BIGTIME != want {
                    report.differ(place, format!("d_type of record {i}"), want, d.r#type);
                }
                let used = (d.bcount.get(), d.icount.get());
                if counted
                    && used != (0, 0)
                    && let Some(u) = &ctx.usage
                {
                    let mut u = u.lock().expect("no holder panics");
                    u.record(k, d.id.get(), used);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A check of quotas with little memory would miss an id, or count it twice.
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
