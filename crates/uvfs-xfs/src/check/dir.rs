//! Directories: entries, hash index, free index.

mod index;
mod short;

use super::ctx::DirectoryFacts;
use super::problem::show;
use super::runs::{read_run, want_run};
use super::space::mix;
use super::{Ctx, Place, Problem, Reader, Structure};
use crate::blocks::Block;
use crate::format::*;
use crate::geometry::AgBlock;
use crate::read::inode::{Fork, Inode};
use crate::walk::dir::{Record, data_record, dir_blocks, is_single, records};
use index::leaf_order;
use smallvec::SmallVec;
use std::sync::atomic::Ordering;

/// Blocks of a directory that are read ahead together.
const BLOCKS_AHEAD: usize = 32;
/// Rounds that a directory is gone through.
const MAX_ROUNDS: u64 = 4096;

/// A directory being checked. If it has more entries than there is room for, it is gone through in
/// rounds, each for the entries whose hashes have one remainder.
struct DirCheck<'c, 'a> {
    ctx: &'c Ctx<'a>,
    out: &'c mut DirectoryFacts,
    ino: u64,
    index: Option<u32>,
    /// Whether it is among the inodes that this pass is about.
    here: bool,
    place: Place,
    extents: &'c [Extent],
    /// (hash, address) of each entry found.
    entries: Vec<(u32, u32)>,
    round: u64,
    rounds: u64,
    /// (directory block, longest hole) of each data block.
    bests: Vec<(u64, u16)>,
    dot: bool,
    dotdot: bool,
    /// The directory was removed while it was open: it is no link to the one above.
    removed: bool,
    /// Everything could be read.
    whole: bool,
}

/// The mapped directory blocks of each part.
#[derive(Default)]
struct Parts {
    index_blocks: u64,
    /// File blocks of the free index.
    free_blocks: Vec<u64>,
    /// The directory block after the last one of data.
    data_end: u64,
    /// The first data block has the index in it.
    single: bool,
}

/// Checks a directory's contents.
pub(crate) fn check(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    inode: &Inode,
    extents: &[Extent],
    out: &mut DirectoryFacts,
) {
    let mut d = DirCheck {
        ctx,
        out,
        ino: inode.ino,
        index: ctx.index(inode.ino),
        here: ctx.fact(inode.ino).is_some(),
        place: Place::inode(Structure::Directory, inode.ino),
        extents,
        entries: Vec::new(),
        round: 0,
        rounds: 1,
        bests: Vec::new(),
        dot: false,
        dotdot: false,
        removed: inode.nlink == 0,
        whole: true,
    };
    if inode.fork_format(Fork::Data) == Some(FORMAT_LOCAL) {
        d.shortform(inode);
    } else {
        d.blocks(rd, inode);
    }
}

impl DirCheck<'_, '_> {
    /// Reports an entry.
    fn bad_entry(&self, name: &[u8], why: String) {
        let name = name.to_vec();
        let problem = Problem::BadEntry { name, why };
        self.ctx.report.bad(self.place, problem);
    }

    /// Counts an entry for the inode that it names.
    fn link(&mut self, name: &[u8], ino: u64, kind: FileType) {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        let bad = |why| self.bad_entry(name, why);
        let Some(a) = g.inode(ino) else {
            return bad(format!("is for inode {ino}, which cannot exist"));
        };
        if self.removed && name == b".." {
            return;
        }
        let is_dot = matches!(name, b"." | b"..");
        if !is_dot && g.is_own(ino) {
            return bad(format!("is for the file system's own inode {ino}"));
        }
        let ag = &ctx.ags[a.agno as usize];
        let Some(slot) = ag.slot(a.agino) else {
            if ag.inodes_known.load(Ordering::Relaxed) {
                report.missing(a.agno);
                bad(format!("is for inode {ino}, which does not exist"));
            }
            return;
        };
        if ag.is_free(slot) {
            return bad(format!("is for inode {ino}, which is free"));
        }
        let facts = ag.facts.get();
        let child_here = facts.is_some_and(|f| f.has(slot));
        match facts {
            Some(f) if ctx.undo => f.unlink(slot),
            Some(f) => f.link(slot, kind),
            None => {}
        }
        let child = ctx.counted.index_of(a.agno as usize, slot);
        let (Some(parent), Some(child)) = (self.index, child) else {
            return;
        };
        match name {
            b"." => {}
            b".." if self.here => self.out.dotdot.push((parent, child)),
            b".." => {}
            _ if child_here && matches!(kind, FileType::Directory | FileType::Unknown) => {
                self.out.parent.push((child, parent));
            }
            _ => {}
        }
    }

    /// Whether entries with this hash belong to the round.
    fn has(&self, hash: u32) -> bool {
        self.rounds == 1 || mix(hash.into()) % self.rounds == self.round
    }

    /// The (hash, address) of index entries that belong to the round.
    fn of_round<'e>(
        &'e self,
        entries: &'e [Dir2LeafEntry],
    ) -> impl Iterator<Item = (u32, u32)> + 'e {
        let there = |e: &&Dir2LeafEntry| e.address.get() != DIR2_NULL_DATAPTR;
        let pairs = entries.iter().filter(there);
        let pairs = pairs.map(|e| (e.hashval.get(), e.address.get()));
        pairs.filter(|e| self.has(e.0))
    }

    /// The rounds after the first: what the entries and the index leaves `leaves` have. All of it
    /// was sound in the first.
    fn further_rounds(&mut self, rd: &mut Reader<'_>, leaves: &[u32]) {
        let g = self.ctx.g;
        let (per, leaf_at) = (g.dir_blocks(), g.dir_index().start);
        for round in 1..self.rounds {
            self.round = round;
            let mut entries = std::mem::take(&mut self.entries);
            entries.clear();
            for db in dir_blocks(self.extents, per).take_while(|db| db * per < leaf_at) {
                let run = self.read(rd, self.place, db * per);
                let Some((block, _)) = run else { return };
                for record in records(&block, block.len(), db, g) {
                    let Ok(record) = record else { return };
                    let hashed = record.entry;
                    let hashed = hashed.map(|e| (g.hash_name(e.name), (e.next - 1) as u32));
                    entries.extend(hashed.filter(|e| self.has(e.0)));
                }
            }
            entries.sort_unstable();
            let mut indexed: Vec<(u32, u32)> = Vec::with_capacity(entries.len());
            for number in leaves {
                let run = self.read(rd, self.place, (*number).into());
                let Some((block, _)) = run else { return };
                let Ok((_, part)) = dir_leaf_entries(&block, g.features.crc) else {
                    return;
                };
                indexed.extend(self.of_round(part));
            }
            indexed.sort_unstable();
            self.entries = entries;
            self.duplicates(rd);
            if indexed != self.entries {
                self.index_differs(&indexed);
            }
        }
    }

    /// The file type byte of an entry.
    fn file_type(&self, name: &[u8], byte: u8) -> FileType {
        if !self.ctx.g.features.ftype {
            return FileType::Unknown;
        }
        let kind = FileType::from_ftype(byte).unwrap_or_default();
        if kind == FileType::Unknown {
            let field = format!("file type of entry {}", show(name));
            self.ctx
                .report
                .differ(self.place, field, "a file type", byte);
        }
        kind
    }

    /// Reads the directory block at a file block.
    fn read(&self, rd: &mut Reader<'_>, place: Place, start: u64) -> Option<(Block, AgBlock)> {
        let per = self.ctx.g.dir_blocks();
        read_run(self.ctx, rd, place, self.extents, start, per)
    }

    /// Checks a directory that has blocks of its own.
    fn blocks(&mut self, rd: &mut Reader<'_>, inode: &Inode) {
        let (g, report) = (self.ctx.g, self.ctx.report);
        // The least entry takes 16 bytes, and so does what is kept of it here and of its index.
        let leaf_at = g.dir_index().start;
        let data = self.extents.iter().filter(|e| e.startoff < leaf_at);
        let bytes = data.map(|e| u64::from(e.blockcount)).sum::<u64>() << g.blocklog;
        let room = self.ctx.budget.directory.max(1);
        self.rounds = bytes.div_ceil(room).clamp(1, MAX_ROUNDS);
        let parts = self.parts(rd);
        let size = parts.data_end * u64::from(g.dir_block_size);
        report.same(self.place, "di_size", size, inode.size);
        if self.whole {
            if !self.dot {
                report.bad(self.place, "no entry \".\"");
            }
            if !self.dotdot {
                report.bad(self.place, "no entry \"..\"");
            }
        } else {
            report.incomplete();
        }
        self.entries.sort_unstable();
        self.duplicates(rd);
        if !parts.single {
            self.leaves(rd, &parts);
        } else if parts.index_blocks != 0 || !parts.free_blocks.is_empty() || parts.data_end != 1 {
            report.bad(self.place, "a single-block directory with other blocks");
        }
    }

    /// Checks the data blocks, and counts those of the other parts.
    fn parts(&mut self, rd: &mut Reader<'_>) -> Parts {
        let (ctx, extents) = (self.ctx, self.extents);
        let (per, index) = (ctx.g.dir_blocks(), ctx.g.dir_index());
        let end_at = index.end + (index.end - index.start);
        let mut parts = Parts::default();
        let mut numbers = dir_blocks(extents, per);
        let mark = rd.mark();
        loop {
            let some: SmallVec<[u64; BLOCKS_AHEAD]> = numbers.by_ref().take(BLOCKS_AHEAD).collect();
            if some.is_empty() {
                return parts;
            }
            for db in &some {
                want_run(ctx, rd, extents, db * per, per);
            }
            rd.go();
            for db in some {
                let start = db * per;
                if start < index.start {
                    parts.data_end = db + 1;
                    self.whole &= self.data_block(rd, db, &mut parts).is_some();
                } else if start < index.end {
                    parts.index_blocks += 1;
                } else if start < end_at {
                    parts.free_blocks.push(start);
                } else {
                    let text = format!("file block {start} is beyond its end");
                    ctx.report.bad(self.place, text);
                }
            }
            rd.release(mark);
        }
    }

    /// Checks data block `db`; `None` if not all of it could be followed.
    fn data_block(&mut self, rd: &mut Reader<'_>, db: u64, parts: &mut Parts) -> Option<()> {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        let base = Place::inode(Structure::DirectoryData, self.ino);
        let (block, a) = self.read(rd, base, db * g.dir_blocks())?;
        let place = base.at(a.agno, a.agbno);
        let ident = g.ident(g.daddr(a), Some(self.ino));
        let single = db == 0 && is_single(&block, g.features.crc);
        parts.single |= single;
        let best = report.sound(place, check_dir_data(&block, single, &ident))?;
        ctx.lsn(place, &block, 16);
        let index = match single {
            true => Some(report.sound(place, dir_block_entries(&block))?),
            false => None,
        };
        let taken = index.map_or(0, |(_, e)| Dir2BlockTail::SIZE + size_of_val(e));
        let end = block.len() - taken;
        if end < dir_data_header_len(g.features.crc) {
            report.bad(place, "its index leaves no room for entries");
            return None;
        }
        let mut holes = self.records(place, &block, end, db)?;
        // The table of the largest holes.
        holes.sort_unstable_by(|a, b| b.cmp(a));
        for (i, b) in best.iter().enumerate() {
            let (len, at) = (b.length.get(), b.offset.get());
            let want = holes.get(i).map_or(0, |h| h.0);
            if len != want {
                report.differ(place, format!("bestfree[{i}].length"), want, len);
            } else if (len != 0 && !holes.contains(&(len, at))) || (len == 0 && at != 0) {
                report.differ(place, format!("bestfree[{i}].offset"), "that of a hole", at);
            }
        }
        self.bests.push((db, holes.first().map_or(0, |h| h.0)));
        if let Some((tail, entries)) = index {
            self.tail(place, tail, entries);
        }
        Some(())
    }

    /// Checks the entries and holes of block `db`. Gives the holes, length first; `None` if it could not go on
    /// to the end.
    fn records(
        &mut self,
        place: Place,
        block: &[u8],
        end: usize,
        db: u64,
    ) -> Option<Vec<(u16, u16)>> {
        let (g, report) = (self.ctx.g, self.ctx.report);
        let (mut holes, mut after_hole, mut first) = (Vec::new(), false, db == 0);
        for record in records(block, end, db, g) {
            let Record { offset, len, entry } = report.sound(place, record)?;
            let Some(e) = entry else {
                let tag = Be16::at(block, offset + len - 2).map_or(0, |t| t.get());
                report.same(place, "tag of a hole", offset, tag.into());
                if after_hole {
                    report.bad(place, format!("two holes side by side at {offset}"));
                }
                after_hole = true;
                holes.push((len as u16, offset as u16));
                continue;
            };
            after_hole = false;
            let byte = block.get(offset + Dir2DataEntry::SIZE + e.name.len());
            let kind = self.file_type(e.name, byte.copied().unwrap_or(0));
            self.dots(place, e.name, e.ino, first);
            first = false;
            self.link(e.name, e.ino, kind);
            let hash = g.hash_name(e.name);
            if self.has(hash) {
                self.entries.push((hash, (e.next - 1) as u32));
            }
        }
        Some(holes)
    }

    /// Checks an entry if it is "." or "..". `first`: it is the first of the directory.
    fn dots(&mut self, place: Place, name: &[u8], ino: u64, first: bool) {
        let report = self.ctx.report;
        match name {
            b"." => {
                if self.dot || !first {
                    report.bad(place, "an entry \".\" that is not the first");
                }
                if ino != self.ino {
                    report.differ(place, "inode of \".\"", self.ino, ino);
                }
                self.dot = true;
            }
            b".." => {
                if self.dotdot {
                    report.bad(place, "two entries \"..\"");
                }
                self.dotdot = true;
            }
            _ => {}
        }
    }

    /// Checks the index of a single-block directory.
    fn tail(&mut self, place: Place, tail: &Dir2BlockTail, entries: &[Dir2LeafEntry]) {
        let stale = leaf_order(self.ctx, place, entries, &mut 0);
        let report = self.ctx.report;
        report.same(place, "stale", stale, tail.stale.get());
        let mut indexed: Vec<(u32, u32)> = self.of_round(entries).collect();
        indexed.sort_unstable();
        self.entries.sort_unstable();
        if indexed != self.entries {
            self.index_differs(&indexed);
        }
    }

    /// Looks at the names of entries whose hashes are equal.
    fn duplicates(&self, rd: &mut Reader<'_>) {
        let g = self.ctx.g;
        let mut i = 0;
        while i < self.entries.len() {
            let hash = self.entries[i].0;
            let n = self.entries[i..].iter().take_while(|e| e.0 == hash).count();
            if n > 1 {
                // No more than a bounded number of names with one hash at a time.
                let mut names: Vec<Vec<u8>> = Vec::new();
                for (_, address) in self.entries[i..i + n].iter().take(4096) {
                    let Some(name) = self.name_at(rd, *address) else {
                        continue;
                    };
                    if names.iter().any(|n| g.same_name(n, &name)) {
                        let text = format!("two entries named {}", show(&name));
                        self.ctx.report.bad(self.place, text);
                    }
                    names.push(name);
                }
            }
            i += n;
        }
    }

    fn name_at(&self, rd: &mut Reader<'_>, address: u32) -> Option<Vec<u8>> {
        let g = self.ctx.g;
        let (db, offset) = g.dir_entry(address);
        let (block, _) = self.read(rd, self.place, db * g.dir_blocks())?;
        let (_, e) = data_record(&block, offset, block.len(), db, g, true).ok()?;
        Some(e?.name.to_vec())
    }
}
