//! Checks that need all inodes and directories together: unlinked lists, link counts, kinds, parents,
//! and what no directory leads to.

use super::ctx::{KIND_BAD, KIND_FREE, Pair};
use super::{Counter, Ctx, Place, Problem, Reader, Structure};
use crate::format::*;
use std::cmp::Ordering;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Follows the lists of unlinked inodes. Their members are in use without being in a directory.
pub(crate) fn unlinked(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32) {
    let (g, report) = (ctx.g, ctx.report);
    let ag = &ctx.ags[agno as usize];
    let (Some(heads), Some(facts), Some(frees)) =
        (ag.unlinked.get(), ag.facts.get(), ag.free.get())
    else {
        return;
    };
    if heads.is_empty() {
        return;
    }
    // Not in the facts, which may be of other inodes than a list goes through.
    let mut seen = vec![0u64; frees.len()];
    for head in heads {
        let mut at = *head;
        while at != NULLAGINO {
            let ino = g.ino(agno, at);
            let place = Place::inode(Structure::UnlinkedList, ino);
            let Some(slot) = ag.slot(at) else {
                report.bad(place, "it leads to an inode that does not exist");
                break;
            };
            let (chunk, bit) = (slot / 64, 1 << (slot % 64));
            if ag.is_free(slot) {
                report.bad(place, "it leads to a free inode");
                break;
            }
            // Each inode is visited once, so this ends.
            if seen[chunk] & bit != 0 {
                report.bad(place, "it leads to this inode twice");
                break;
            }
            seen[chunk] |= bit;
            facts.set_unlinked(slot);
            let Some(a) = g.inode(ino) else { break };
            let read = rd.bytes(g.inode_byte(a), g.inode_size as usize);
            let raw = read.map_err(|e| ctx.io(place, &e)).ok();
            let Some(Ok(d)) = raw.as_ref().map(|raw| DinodeV2::at(raw, 0)) else {
                break;
            };
            report.same(place, "di_nlink", 0, d.nlink.get());
            at = d.next_unlinked.get();
        }
    }
}

fn kind_name(kind: u32) -> &'static str {
    match FileType::from_ftype(kind as u8) {
        Some(FileType::Regular) => "regular file",
        Some(FileType::Directory) => "directory",
        Some(FileType::CharDevice) => "character device",
        Some(FileType::BlockDevice) => "block device",
        Some(FileType::Fifo) => "FIFO",
        Some(FileType::Socket) => "socket",
        Some(FileType::Symlink) => "symbolic link",
        Some(FileType::Whiteout) => "whiteout",
        _ => "unknown",
    }
}

/// Compares the link counts of an allocation group's inodes with the entries seen.
pub(crate) fn counts(ctx: &Ctx<'_>, agno: u32) {
    let (g, report) = (ctx.g, ctx.report);
    let ag = &ctx.ags[agno as usize];
    let (Some(chunks), Some(facts)) = (ag.chunks.get(), ag.facts.get()) else {
        return;
    };
    let incomplete = report.is_incomplete();
    for k in facts.chunks() {
        let chunk = chunks[k];
        for slot in 0..INODES_PER_CHUNK {
            let Some(f) = facts.get(k * 64 + slot as usize) else {
                continue;
            };
            if matches!(f.kind, KIND_FREE | KIND_BAD) {
                continue;
            }
            let ino = g.ino(agno, chunk.start + slot);
            let place = Place::inode(Structure::Inode, ino);
            let is_dir = f.kind == FileType::Directory as u32;
            if g.is_own(ino) {
                let names = ("regular file", kind_name(f.kind));
                report.same(place, "one of the file system's own", names.0, names.1);
                if f.nlink == 0 {
                    report.count_is(place, Counter::Links, 1u64, 0u64);
                }
                continue;
            }
            if f.claimed != 0 && (f.mixed || f.claimed != f.kind) {
                let found = match f.mixed {
                    true => "different types",
                    false => kind_name(f.claimed),
                };
                let field = "file type in a directory entry";
                report.differ(place, field, kind_name(f.kind), found);
            }
            if f.unlinked {
                let own_dot = u32::from(is_dir);
                if f.seen > own_dot {
                    report.bad(place, "on an unlinked list, but in a directory");
                }
                continue;
            }
            if incomplete {
                continue;
            }
            if f.seen == 0 && !is_dir {
                report.add(place, Problem::NoEntry);
            } else if !f.links_match() {
                report.count_is(place, Counter::Links, f.seen, f.nlink);
            }
        }
    }
}

/// Where the directories lead up to: (directory, parent) in the order of directories. In memory, or
/// in a file if the image is gone through in several passes.
#[derive(Default)]
pub(crate) struct Ups {
    /// All of them, or what is not in the file yet.
    pairs: Vec<Pair>,
    file: Option<File>,
    /// The first directory of each page of the file.
    firsts: Vec<u32>,
    len: usize,
    /// Pages of the file that were read last.
    pages: Vec<Option<(usize, Vec<Pair>)>>,
}

/// Pairs in a page of a file.
const PAGE_PAIRS: usize = 512;
/// Pages that are kept.
const PAGES: usize = 64;

impl Ups {
    /// None yet. They are kept in memory, unless `spill`.
    pub fn new(spill: bool) -> io::Result<Ups> {
        Ok(Ups {
            file: spill.then(tempfile::tempfile).transpose()?,
            pages: vec![None; PAGES],
            ..Ups::default()
        })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Adds one of a greater directory than all before.
    fn push(&mut self, pair: Pair) -> io::Result<()> {
        self.pairs.push(pair);
        self.len += 1;
        let Some(file) = &self.file else {
            return Ok(());
        };
        if self.pairs.len() == PAGE_PAIRS {
            let at = (self.firsts.len() * PAGE_PAIRS * size_of::<Pair>()) as u64;
            let words = self.pairs.iter().flat_map(|(dir, up)| [*dir, *up]);
            let bytes: Vec<u8> = words.flat_map(u32::to_ne_bytes).collect();
            file.write_all_at(&bytes, at)?;
            self.firsts.push(self.pairs[0].0);
            self.pairs.clear();
        }
        Ok(())
    }

    /// Number `i` of them.
    fn get(&mut self, i: usize) -> io::Result<Pair> {
        let (page, slot) = (i / PAGE_PAIRS, i % PAGE_PAIRS);
        let Some(file) = &self.file else {
            return Ok(self.pairs[i]);
        };
        if page == self.firsts.len() {
            return Ok(self.pairs[slot]);
        }
        if let Some((p, pairs)) = &self.pages[page % PAGES]
            && *p == page
        {
            return Ok(pairs[slot]);
        }
        let mut bytes = [0; PAGE_PAIRS * size_of::<Pair>()];
        let at = (page * bytes.len()) as u64;
        file.read_exact_at(&mut bytes, at)?;
        let word = |w: [u8; 4]| u32::from_ne_bytes(w);
        let words = bytes.as_chunks::<4>().0.as_chunks::<2>().0.iter();
        let pairs: Vec<Pair> = words.map(|[dir, up]| (word(*dir), word(*up))).collect();
        let pair = pairs[slot];
        self.pages[page % PAGES] = Some((page, pairs));
        Ok(pair)
    }

    /// Where a directory is among them.
    fn find(&mut self, dir: u32) -> io::Result<Option<usize>> {
        let (mut low, mut high) = (0, self.len);
        if self.file.is_some() {
            // The page that it would be in; what is not in the file follows it.
            let page = self.firsts.partition_point(|f| *f <= dir);
            let last = self.pairs.first().is_some_and(|p| p.0 <= dir);
            let page = if last { page } else { page.saturating_sub(1) };
            low = page * PAGE_PAIRS;
            high = (low + PAGE_PAIRS).min(self.len);
        }
        while low < high {
            let mid = low + (high - low) / 2;
            match self.get(mid)?.0.cmp(&dir) {
                Ordering::Less => low = mid + 1,
                Ordering::Greater => high = mid,
                Ordering::Equal => return Ok(Some(mid)),
            }
        }
        Ok(None)
    }
}

/// Checks that every directory of the pass has one parent and says so itself, and notes that in
/// `ups`.
pub(crate) fn tree(ctx: &Ctx<'_>, ups: &mut Ups) -> io::Result<()> {
    let (g, report) = (ctx.g, ctx.report);
    let mut tree = ctx.counted.tree.lock().expect("no holder panics");
    let place = Place::inode(Structure::RootDirectory, g.rootino);
    let root = ctx.index(g.rootino);
    if let Some(f) = ctx.fact(g.rootino)
        && f.kind != FileType::Directory as u32
        && f.kind != KIND_BAD
    {
        report.bad(place, "not a directory");
    } else if root.is_none() {
        report.bad(place, "it does not exist");
    }
    let Some(root) = root else { return Ok(()) };
    tree.dotdot.sort_unstable();
    tree.parent.sort_unstable();
    let (dotdot, parent) = (&tree.dotdot[..], &tree.parent[..]);
    let dir_place = |i: u32| Place::inode(Structure::Directory, ctx.ino_of(i).unwrap_or(0));
    let show = |i: u32| ctx.ino_of(i).map_or("?".into(), |i| i.to_string());
    let parents = |child: u32| -> &[Pair] {
        let from = parent.partition_point(|p| p.0 < child);
        let n = parent[from..].partition_point(|p| p.0 == child);
        &parent[from..from + n]
    };
    let incomplete = report.is_incomplete();
    let mut last = None;
    for (dir, up) in dotdot {
        let entries = parents(*dir);
        if *dir == root {
            if *up != root {
                report.differ(place, "inode of \"..\"", g.rootino, show(*up));
            }
            if !entries.is_empty() {
                report.bad(place, "a directory has an entry for it");
            }
            continue;
        }
        match entries {
            [] => {
                let fact = ctx.ino_of(*dir).and_then(|i| ctx.fact(i));
                if !incomplete && !fact.is_some_and(|f| f.unlinked) {
                    report.bad(dir_place(*dir), "in use, but in no other directory");
                }
            }
            [(_, one)] => {
                if one != up {
                    report.differ(dir_place(*dir), "inode of \"..\"", show(*one), show(*up));
                }
            }
            more => {
                let field = "directories with an entry for it";
                report.differ(dir_place(*dir), field, 1, more.len());
            }
        }
        // A damaged directory may have several entries "..".
        if let Some((_, up)) = entries.first()
            && last.replace(*dir) != Some(*dir)
        {
            ups.push((*dir, *up))?;
        }
    }
    Ok(())
}

/// Checks that every directory leads up to the root.
pub(crate) fn cycles(ctx: &Ctx<'_>, ups: &mut Ups) -> io::Result<()> {
    if ctx.report.is_incomplete() {
        return Ok(());
    }
    // Up from each directory: not seen, on this way, done. Two bits each.
    const ON: u8 = 1;
    const DONE: u8 = 2;
    let mut states = vec![0u8; ups.len().div_ceil(4)];
    let state = |states: &[u8], i: usize| states[i / 4] >> (i % 4 * 2) & 3;
    for start in 0..ups.len() {
        let mut at = Some(start);
        while let Some(i) = at {
            match state(&states, i) {
                0 => {
                    states[i / 4] |= ON << (i % 4 * 2);
                    let (_, up) = ups.get(i)?;
                    at = ups.find(up)?;
                }
                ON => {
                    let ino = ctx.ino_of(ups.get(i)?.0).unwrap_or(0);
                    let place = Place::inode(Structure::Directory, ino);
                    ctx.report.bad(place, "it is its own ancestor");
                    break;
                }
                _ => break,
            }
        }
        // The same way again.
        let mut at = Some(start);
        while let Some(i) = at.filter(|i| state(&states, *i) == ON) {
            states[i / 4] ^= (ON ^ DONE) << (i % 4 * 2);
            let (_, up) = ups.get(i)?;
            at = ups.find(up)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A check with little memory knows the same parents of directories.
    #[test]
    fn ups_in_a_file_are_those_in_memory() {
        for n in [0usize, 1, 511, 512, 513, 5000] {
            let (mut memory, mut file) = (Ups::new(false).unwrap(), Ups::new(true).unwrap());
            for i in 0..n {
                let pair = (i as u32 * 3 + 1, i as u32 / 2);
                memory.push(pair).unwrap();
                file.push(pair).unwrap();
            }
            assert_eq!(file.len(), n);
            for i in (0..n).rev().step_by(7) {
                assert_eq!(file.get(i).unwrap(), memory.get(i).unwrap());
            }
            for dir in 0..n as u32 * 3 + 5 {
                let want = (dir % 3 == 1 && dir / 3 < n as u32).then_some(dir as usize / 3);
                assert_eq!(memory.find(dir).unwrap(), want, "{dir} of {n}");
                assert_eq!(file.find(dir).unwrap(), want, "{dir} of {n}");
            }
        }
    }
}
