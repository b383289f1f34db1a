//! Checks the index of a directory: the leaf blocks and the free index.

use super::super::da::DaTree;
use super::super::runs::read_run;
use super::super::{Ctx, Place, Reader, Structure};
use crate::format::*;
use crate::read::inode::Fork;

use super::{DirCheck, Parts};

/// The contents of the leaves of an index.
#[derive(Default)]
struct Leaves {
    /// (hash, address) of the entries that belong to the round.
    indexed: Vec<(u32, u32)>,
    /// The leaves, if they are read again.
    numbers: Vec<u32>,
    /// The longest hole of each data block, in a leaf that is the only one.
    bests: Option<Vec<u16>>,
    /// The last hash so far.
    previous: u32,
}

impl DirCheck<'_, '_> {
    /// Checks the index of a directory with more than one block, and its free index.
    pub(super) fn leaves(&mut self, rd: &mut Reader<'_>, parts: &Parts) {
        let (ctx, report) = (self.ctx, self.ctx.report);
        let place = Place::inode(Structure::DirectoryIndex, self.ino);
        let mut tree = DaTree::new(ctx, place, self.extents, Fork::Data);
        let root = ctx.g.dir_index().start as u32;
        let mut leaves = Leaves::default();
        let walked = tree.walk(rd, root, &mut |number, place, block| {
            self.leaf(&mut leaves, number == root, number, place, block)
        });
        match walked {
            Some(n) if n as u64 != parts.index_blocks => {
                report.differ(self.place, "blocks in its index", parts.index_blocks, n);
            }
            Some(_) => {
                leaves.indexed.sort_unstable();
                if self.whole && leaves.indexed != self.entries {
                    self.index_differs(&leaves.indexed);
                }
                leaves.indexed = Vec::new();
                if self.whole {
                    self.further_rounds(rd, &leaves.numbers);
                }
            }
            None => {}
        }
        let Some(bests) = leaves.bests else {
            if walked.is_some() {
                self.free_index(rd, &parts.free_blocks);
            }
            return;
        };
        if !parts.free_blocks.is_empty() {
            report.bad(self.place, "a leaf directory with a free index");
        }
        let (field, n) = ("bestcount of its leaf", bests.len() as u64);
        report.same(self.place, field, parts.data_end, n);
        self.compare_bests(0, &bests, self.place);
    }

    /// Checks a leaf; gives its last hash.
    fn leaf(
        &self,
        leaves: &mut Leaves,
        is_root: bool,
        number: u32,
        place: Place,
        block: &[u8],
    ) -> Option<u32> {
        let (g, report) = (self.ctx.g, self.ctx.report);
        let crc = g.features.crc;
        let max_entries = (g.dir_block_size as usize - da_header_len(crc)) / Dir2LeafEntry::SIZE;
        let is_leaf1 = da_block_kind(block, crc) == Some(DIR2_LEAF1_MAGIC);
        if is_leaf1 && !is_root {
            report.bad(place, "a single leaf inside a tree");
        }
        let (counts, entries) = report.sound(place, dir_leaf_entries(block, crc))?;
        if entries.len() > max_entries {
            let most = format!("at most {max_entries}");
            report.differ(place, "count", most, entries.len());
        }
        let stale = leaf_order(self.ctx, place, entries, &mut leaves.previous);
        report.same(place, "stale", stale, u32::from(counts.stale.get()));
        leaves.indexed.extend(self.of_round(entries));
        if self.rounds > 1 {
            leaves.numbers.push(number);
        }
        if is_leaf1 && let Some(b) = report.sound(place, dir_leaf1_bests(block)) {
            let room = da_header_len(crc) + size_of_val(entries);
            if room + size_of_val(b) + 4 > block.len() {
                report.bad(place, "entries and free index overlap");
            }
            leaves.bests = Some(b.iter().map(|b| b.get()).collect());
        }
        // An empty leaf keeps the hash that its parent has for it.
        entries.last().map(|e| e.hashval.get())
    }

    pub(super) fn index_differs(&self, indexed: &[(u32, u32)]) {
        // The first few that only one of the two has.
        let (mut i, mut j, mut told) = (0, 0, 0);
        while told < 8 {
            let text = match (self.entries.get(i), indexed.get(j)) {
                (None, None) => break,
                (x, y) if x == y => {
                    (i, j) = (i + 1, j + 1);
                    continue;
                }
                (Some((hash, at)), y) if y.is_none_or(|y| self.entries[i] < *y) => {
                    i += 1;
                    format!("entry at {at:#x} with hash {hash:#x} is not in the index")
                }
                _ => {
                    let (hash, at) = indexed[j];
                    j += 1;
                    format!("the index has hash {hash:#x} at {at:#x}, where no such entry is")
                }
            };
            self.ctx.report.bad(self.place, text);
            told += 1;
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
                let field = format!("free index for directory block {db}");
                self.ctx.report.differ(place, field, actual, *best);
            }
        }
    }

    pub(super) fn free_index(&self, rd: &mut Reader<'_>, blocks: &[u64]) {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        let (per, free_at) = (g.dir_blocks(), g.dir_index().end);
        let slots = ((g.dir_block_size as usize - da_header_len(g.features.crc)) / 2) as u64;
        let mut covered = 0;
        for start in blocks {
            let base = Place::inode(Structure::DirectoryFreeIndex, self.ino);
            let Some((bytes, a)) = read_run(ctx, rd, base, self.extents, *start, per) else {
                continue;
            };
            let place = base.at(a.agno, a.agbno);
            let ident = g.ident(g.daddr(a), Some(self.ino));
            let Some((counts, bests)) = report.sound(place, check_dir_free(&bytes, &ident)) else {
                continue;
            };
            ctx.lsn(place, &bytes, 16);
            let first = (start - free_at) / per * slots;
            report.same(place, "firstdb", first, u64::from(counts.firstdb.get()));
            let bests: Vec<u16> = bests.iter().map(|b| b.get()).collect();
            let used = bests.iter().filter(|b| **b != NULLDATAOFF).count();
            report.same(place, "nused", used, counts.nused.get() as usize);
            self.compare_bests(first, &bests, place);
            let before = |db| self.bests.partition_point(|b| b.0 < db);
            covered += before(first + bests.len() as u64) - before(first);
        }
        if self.whole {
            let field = "data blocks in its free index";
            report.same(self.place, field, self.bests.len(), covered);
        }
    }
}

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
            ctx.report.out_of_order(place, "entry", i);
        }
        *previous = hash;
        stale += u32::from(e.address.get() == DIR2_NULL_DATAPTR);
    }
    stale
}
