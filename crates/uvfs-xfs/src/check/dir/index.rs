//! Checks the index of a directory: the leaf blocks and the free index.

use super::super::ctx::Ctx;
use super::super::inode::read_run;
use super::super::reader::Reader;
use super::super::report::Place;
use crate::format::*;

use super::Dir;

/// Checks that a leaf's entries are in the order of their hashes, and counts the stale ones.
pub(super) fn leaf_order(
    ctx: &Ctx<'_>,
    place: Place,
    entries: &[Dir2LeafEntry],
    previous: &mut u32,
) -> u32 {
    let mut stale = 0;
    for (i, e) in entries.iter().enumerate() {
        let hash = e.hashval.get();
        if hash < *previous {
            ctx.report.bad(place, format!("entry {i} is out of order"));
        }
        *previous = hash;
        stale += u32::from(e.address.get() == DIR2_NULL_DATAPTR);
    }
    stale
}

impl Dir<'_, '_> {
    pub(super) fn index_differs(&self, indexed: &[(u32, u32)]) {
        // The first few that only one of the two has.
        let (mut i, mut j, mut told) = (0, 0, 0);
        while told < 8 && (i < self.entries.len() || j < indexed.len()) {
            let (a, b) = (self.entries.get(i), indexed.get(j));
            match (a, b) {
                (Some(x), Some(y)) if x == y => (i, j) = (i + 1, j + 1),
                (Some(x), y) if y.is_none_or(|y| x < y) => {
                    self.ctx.report.bad(
                        self.place,
                        format!(
                            "entry at {:#x} with hash {:#x} is not in the index",
                            x.1, x.0
                        ),
                    );
                    (i, told) = (i + 1, told + 1);
                }
                (_, Some(y)) => {
                    self.ctx.report.bad(
                        self.place,
                        format!(
                            "the index has hash {:#x} at {:#x}, where no such entry is",
                            y.0, y.1
                        ),
                    );
                    (j, told) = (j + 1, told + 1);
                }
                _ => break,
            }
        }
    }

    /// Compares a free index from data block `first` on with what the data blocks have.
    pub(super) fn compare_bests(&self, first: u64, index: &[u16], place: Place) {
        if !self.whole {
            return;
        }
        let mut i = self.bests.partition_point(|b| b.0 < first);
        for (slot, best) in index.iter().enumerate() {
            let db = first + slot as u64;
            let actual = match self.bests.get(i) {
                Some((d, b)) if *d == db => {
                    i += 1;
                    *b
                }
                _ => NULLDATAOFF,
            };
            if actual != *best {
                self.ctx.report.differ(
                    place,
                    format!("free index for directory block {db}"),
                    actual,
                    best,
                );
            }
        }
    }

    pub(super) fn free_index(&self, rd: &mut Reader<'_>, blocks: &[u64], data_end: u64) {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        let per = u64::from(1u32 << g.dirblklog);
        let free_at = DIR2_FREE_OFFSET >> g.blocklog;
        let slots = ((g.dir_block_size as usize - da_header_len(g.features.crc)) / 2) as u64;
        let mut covered = 0;
        for start in blocks {
            let base = Place::inode("directory free index", self.ino);
            let Some((bytes, a)) = read_run(ctx, rd, base, self.extents, *start, per) else {
                continue;
            };
            let place = base.at(a.agno, a.agbno);
            let ident = g.ident(g.daddr(a), Some(self.ino));
            let (counts, bests) = match check_dir_free(&bytes, &ident) {
                Ok(v) => v,
                Err(f) => {
                    report.fault(place, &f);
                    continue;
                }
            };
            ctx.lsn(place, &bytes, 16);
            let first = (start - free_at) / per * slots;
            if u64::from(counts.firstdb.get()) != first {
                report.differ(place, "firstdb", first, counts.firstdb.get());
            }
            let bests: Vec<u16> = bests.iter().map(|b| b.get()).collect();
            let used = bests.iter().filter(|b| **b != NULLDATAOFF).count();
            if counts.nused.get() as usize != used {
                report.differ(place, "nused", used, counts.nused.get());
            }
            self.compare_bests(first, &bests, place);
            covered += self
                .bests
                .partition_point(|b| b.0 < first + bests.len() as u64)
                - self.bests.partition_point(|b| b.0 < first);
        }
        if self.whole && covered != self.bests.len() {
            report.differ(
                self.place,
                "data blocks in its free index",
                self.bests.len(),
                covered,
            );
        }
        let _ = data_end;
    }
}
