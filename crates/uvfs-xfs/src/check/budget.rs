//! How a bound on memory is kept.
//!
//! Tables that grow with the file system are kept for a window of its blocks at a time: the uses of
//! blocks, the sharing records, the link counts of the inodes in them, and the directories among
//! these. The image is gone through once for each window. Windows are cut where the chunks of inodes
//! and the sharing records are, so that none of them needs more than there is room for. A run of
//! blocks that reaches over a cut may be reported in two parts.
//!
//! Beside that there is a share for what is read ahead, one for the entries of a directory (a large
//! one is gone through several times, see `dir`), and one for the ids of quota (see
//! [`super::usage::Class`]). With several windows a temporary file says which directory is in
//! which. Whole stay the lists of inode chunks, a quarter of a byte for each inode, and
//! the extents of one directory for each thread.

use super::CheckRun;
use super::ag;
use super::ctx::FACT_BYTES;
use super::reader::{MAX_AHEAD, MIN_AHEAD};
use super::superblock;
use super::usage::USAGE_BYTES;
use super::{BlockMap, Reader, Report};
use crate::blocks::Blocks;
use crate::error::Result;
use crate::format::*;
use crate::geometry::Geometry;
use std::cmp::Ordering;
use std::ops::Range;

/// Set aside for the program itself: its code and stacks, findings (10,000 at most), the ways to
/// inodes that they are about.
const PROGRAM: u64 = 16 << 20;
/// The least that is needed beside the program and the lists of chunks.
const LEAST: u64 = 8 << 20;
/// Bytes in the lists of chunks for each of them.
const CHUNK_BYTES: u64 = 16;
/// Bytes for an inode in a window: its facts, and two pairs if it is a directory.
const INODE_BYTES: u64 = FACT_BYTES + 16;
/// Bytes for a record of shared blocks.
const SHARED_BYTES: u64 = 12;
/// Bytes for a group that is in a window: two fingerprints, and what every group has.
const GROUP_BYTES: u64 = 8192;
/// Directories that are looked through to find the path of an inode: at most, and for how many
/// bytes one.
const PATH_DIRS: usize = 200_000;
const PATH_DIR_BYTES: u64 = 1024;

/// The parts of a check's memory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    pub threads: usize,
    /// Bytes that a thread may read ahead.
    pub ahead: usize,
    /// Bytes that a thread may use for the entries of a directory.
    pub directory: u64,
    /// Ids of quota that are counted at a time.
    pub quota_ids: usize,
    /// Directories that are looked through for paths.
    pub path_dirs: usize,
    /// Bytes for what is known of a window; `None` is no bound.
    pub room: Option<u64>,
    /// Inodes of each group, if there is a bound.
    inodes: Vec<u64>,
}

impl Budget {
    /// Divides `memory` up; as many threads as have room, `threads` at most.
    pub fn new(g: &Geometry, blocks: &dyn Blocks, memory: Option<u64>, threads: usize) -> Budget {
        let Some(memory) = memory else {
            return Budget {
                threads,
                ahead: MAX_AHEAD,
                directory: u64::MAX,
                quota_ids: usize::MAX,
                path_dirs: PATH_DIRS,
                room: None,
                inodes: Vec::new(),
            };
        };
        let inodes: Vec<u64> = (0..g.agcount).map(|a| inodes(g, blocks, a)).collect();
        let given = memory.saturating_sub(PROGRAM + lists(&inodes));
        // Too little is dealt with as well as it goes.
        let usable = given.max(LEAST / 64);
        let each = MIN_AHEAD as u64;
        let threads = (usable / 4 / each).clamp(1, threads as u64);
        let ahead = (usable / 4 / threads).clamp(each, MAX_AHEAD as u64);
        let directory = usable / 8 / threads;
        let quota = usable / 16;
        let used = threads * (ahead + directory) + quota;
        Budget {
            threads: threads as usize,
            ahead: ahead as usize,
            directory,
            quota_ids: (quota / USAGE_BYTES) as usize,
            path_dirs: PATH_DIRS.min((usable / PATH_DIR_BYTES) as usize),
            room: Some(usable.saturating_sub(used).max(usable / 4)),
            inodes,
        }
    }
}

/// A sector of an allocation group's header, and what it should say of itself.
fn header(g: &Geometry, blocks: &dyn Blocks, agno: u32, sector: u32) -> (Vec<u8>, Ident) {
    let ident = g.header_ident(agno, sector);
    let read = blocks.bytes(ident.daddr << 9, g.sector_size as usize);
    (read.unwrap_or_default(), ident)
}

/// Inodes of an allocation group, as far as its header can be believed.
fn inodes(g: &Geometry, blocks: &dyn Blocks, agno: u32) -> u64 {
    let (bytes, ident) = header(g, blocks, agno, AGI_SECTOR);
    let count = check_agi(&bytes, &ident).map_or(0, |agi| agi.count.get().into());
    count.min(u64::from(g.ag_blocks(agno)) << g.inopblog)
}

/// Blocks of one of an allocation group's trees, as far as its AGF can be believed.
fn tree_blocks(g: &Geometry, blocks: &dyn Blocks, agno: u32, of: fn(&Agf) -> Be32) -> u64 {
    let (bytes, ident) = header(g, blocks, agno, AGF_SECTOR);
    let n = check_agf(&bytes, &ident).map_or(0, |agf| of(agf).get());
    n.min(g.ag_blocks(agno)).into()
}

/// Bytes of the lists of all chunks, where the groups have so many inodes.
fn lists(inodes: &[u64]) -> u64 {
    let chunks = |n: &u64| n.div_ceil(INODES_PER_CHUNK.into());
    inodes.iter().map(|n| chunks(n) * CHUNK_BYTES).sum()
}

/// The least bound on memory that [`super::check`] can keep on this file system: 24 MiB, and a
/// quarter of a byte for each inode. Fails as [`super::check`] does.
pub fn least_memory(blocks: &dyn Blocks) -> Result<u64> {
    let (_, g) = superblock::find(blocks, &Report::default())?;
    let inodes: Vec<u64> = (0..g.agcount).map(|a| inodes(&g, blocks, a)).collect();
    Ok(PROGRAM + LEAST + lists(&inodes))
}

/// Bytes that a repair of the file system needs beside its checks, about: for each inode its kind
/// and two link counts, for each block its use twice, and what is known of `directories`; where there is
/// a reverse mapping tree, its records, and those of one group twice more while they are sorted.
pub(crate) fn repair_tables(g: &Geometry, blocks: &dyn Blocks, directories: u64) -> u64 {
    const INODE: u64 = 10;
    const DIRECTORY: u64 = 160;
    const OWNER: u64 = 24;
    let per_leaf = Btree::Rmap.max_records(g.block_size as usize, g.features.crc, 0) as u64;
    let (mut need, mut most) = (directories * DIRECTORY, 0);
    for agno in 0..g.agcount {
        let n = g.ag_blocks(agno);
        need += inodes(g, blocks, agno) * INODE + 2 * BlockMap::max_bytes(n.into());
        if g.features.rmapbt {
            let records = tree_blocks(g, blocks, agno, |agf| agf.rmap_blocks) * per_leaf;
            need += records * OWNER;
            most = most.max(records * OWNER);
        }
    }
    need + 2 * most
}

/// The blocks that a pass is about, in the order of groups: from one up to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    from: (u32, u32),
    to: (u32, u32),
}

impl Window {
    /// No block at all.
    pub const NOTHING: Window = Window {
        from: (0, 0),
        to: (0, 0),
    };

    /// The blocks of a group.
    pub fn of(&self, agno: u32, blocks: u32) -> Range<u32> {
        // How much of the group lies before a place.
        let before = |(a, b): (u32, u32)| match agno.cmp(&a) {
            Ordering::Less => blocks,
            Ordering::Equal => b.min(blocks),
            Ordering::Greater => 0,
        };
        let (from, to) = (before(self.from), before(self.to));
        from..to.max(from)
    }
}

/// The windows that the passes are about.
pub(crate) fn windows(run: &CheckRun<'_>) -> Vec<Window> {
    let (g, blocks) = (run.g, run.blocks);
    let mut cuts: Vec<(u32, u32)> = Vec::new();
    if let Some(room) = run.budget.room {
        let mut used = 0u64;
        for agno in 0..g.agcount {
            let n = g.ag_blocks(agno);
            let per_block = Btree::Refcount.max_records(g.block_size as usize, g.features.crc, 0);
            let shared = match g.features.reflink {
                true => tree_blocks(g, blocks, agno, |agf| agf.refcount_blocks) * per_block as u64,
                false => 0,
            };
            let need = run.budget.inodes[agno as usize] * INODE_BYTES
                + BlockMap::max_bytes(n.into())
                + shared.min(n.into()) * SHARED_BYTES
                + GROUP_BYTES;
            if used > 0 && used + need > room {
                cuts.push((agno, 0));
                used = 0;
            }
            used += need;
            if need > room {
                cuts.extend(split(run, agno, room).into_iter().map(|b| (agno, b)));
                // The last part may be as large as the others.
                used = room;
            }
        }
    }
    let mut out = Vec::with_capacity(cuts.len() + 1);
    let mut from = (0, 0);
    for to in cuts.into_iter().chain([(g.agcount, 0)]) {
        out.push(Window { from, to });
        from = to;
    }
    out
}

/// Where to cut a group that needs more than there is room for.
fn split(run: &CheckRun<'_>, agno: u32, room: u64) -> Vec<u32> {
    let report = Report::default();
    let quiet = CheckRun {
        report: &report,
        groups: Vec::new(),
        ..*run
    };
    let counted = quiet.counted(Window::NOTHING, None);
    let ctx = quiet.context(&counted);
    let mut rd = Reader::new(&ctx);
    // A half for inodes, a quarter each for the uses of blocks and for sharing.
    let mut inodes = Cutter::new(room / 2, u32::MAX);
    let most = u32::try_from(room.saturating_sub(GROUP_BYTES)).unwrap_or(u32::MAX);
    let mut sharing = Cutter::new(room / 4, most);
    let per_chunk = u64::from(INODES_PER_CHUNK) * INODE_BYTES;
    let chunk = &mut |start: u32| inodes.add(start >> ctx.g.inopblog, per_chunk);
    let shared = &mut |start: u32| sharing.add(start, SHARED_BYTES);
    ag::positions(&ctx, &mut rd, agno, chunk, shared);
    sharing.add(ctx.g.ag_blocks(agno), 0);
    let mut cuts = inodes.cuts;
    cuts.append(&mut sharing.cuts);
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

/// Cuts where so many bytes or blocks have come together.
#[derive(Default)]
struct Cutter {
    room: u64,
    most_blocks: u32,
    used: u64,
    last: u32,
    cuts: Vec<u32>,
}

impl Cutter {
    fn new(room: u64, most_blocks: u32) -> Cutter {
        Cutter {
            room,
            most_blocks: most_blocks.max(1),
            ..Cutter::default()
        }
    }

    /// At `block`, not before those that came before it, `bytes` more are needed.
    fn add(&mut self, block: u32, bytes: u64) {
        while block.saturating_sub(self.last) > self.most_blocks {
            self.cut(self.last + self.most_blocks);
        }
        if self.used + bytes > self.room && block > self.last {
            self.cut(block);
        }
        self.used += bytes;
    }

    fn cut(&mut self, block: u32) {
        self.cuts.push(block);
        (self.last, self.used) = (block, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The passes of a check within a memory limit cover each block once.
    #[test]
    fn windows_of_groups() {
        let cuts = [(0, 0), (0, 30), (2, 0), (2, 99), (4, 0)];
        let mut seen = [0; 4];
        for w in cuts.windows(2) {
            let w = Window {
                from: w[0],
                to: w[1],
            };
            for (agno, seen) in seen.iter_mut().enumerate() {
                let blocks = w.of(agno as u32, 50);
                // The next one begins where the last one ended.
                assert!(blocks.is_empty() || blocks.start == *seen, "{w:?}");
                *seen += blocks.len() as u32;
            }
        }
        assert_eq!(seen, [50; 4]);
        assert!(Window::NOTHING.of(0, 50).is_empty());
    }

    /// Each pass of a check stays within its memory limit.
    #[test]
    fn cuts() {
        let mut c = Cutter::new(100, 1000);
        for block in [0, 10, 20, 30, 40, 50, 5000] {
            c.add(block, 40);
        }
        assert_eq!(c.cuts, [20, 40, 1040, 2040, 3040, 4040]);
    }
}
