//! Finds the chunks of inodes.

use super::Mend;
use super::space::UNSEEN;
use super::trees::{self, walk};
use crate::check::TREES;
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes read at once in the search for inodes.
const SEARCH: usize = 1 << 20;
/// Threads that search.
const SEARCHERS: usize = 4;

/// The records of an inode tree that make sense, and where there may be more.
fn records(
    m: &Mend<'_>,
    agno: u32,
    tree: Btree,
    root: (u32, u32),
) -> (Vec<InodeChunk>, Vec<(u32, u32)>) {
    let g = &m.g;
    let mut out: Vec<InodeChunk> = Vec::new();
    let mut fine = true;
    let walked = walk(m, agno, tree, root, &mut |recs, n| {
        for r in InobtRecord::slice_at(recs, 0, n).unwrap_or_default() {
            let c = r.unpack(g.features.sparse);
            let after = |l: &InodeChunk| u64::from(l.startino) + 64 <= c.startino.into();
            let order = out.last().is_none_or(after);
            match g.is_chunk(agno, c.startino) && order && g.holes_fit(c.holemask) {
                true => out.push(c),
                false => fine = false,
            }
        }
    });
    let gaps = match fine {
        true => walked.gaps,
        false => vec![(0, u32::MAX)],
    };
    (out, gaps)
}

/// Finds the chunks of a group whose inode trees alone are damaged: those that the sound blocks of the
/// tree have, and for what the others may have had the blocks are searched. Gives for each the inodes that
/// are in use.
pub(crate) fn complete(m: &mut Mend<'_>, agno: u32) {
    let (bytes, ident) = m.header(agno, AGI_SECTOR);
    let agi = check_agi(&bytes, &ident).ok();
    let root = |tree| agi.map(|a| a.root_of(tree)).unwrap_or_default();
    let (mut known, gaps) = records(m, agno, Btree::Ino, root(Btree::Ino));
    let mut chunks = known.clone();
    // Chunks in the gaps may be listed in the other tree, which says how chunks are cut.
    if !gaps.is_empty() && m.g.features.finobt {
        known.extend(records(m, agno, Btree::Fino, root(Btree::Fino)).0);
        known.sort_unstable_by_key(|c| c.startino);
    }
    // A block that says that it has fewer records than it has leaves no gap.
    let count = |c: &InodeChunk| u64::from(64 - c.holes().count_ones());
    let counted: u64 = known.iter().map(count).sum();
    let forgot = agi.is_none_or(|a| u64::from(a.count.get()) != counted);
    for (first, end) in gaps {
        let whole = (first, end) == (0, u32::MAX);
        let found = search(m, agno, &known, (first, end));
        if whole {
            chunks = found;
            break;
        }
        let inside = |c: &InodeChunk| (first..end).contains(&c.startino);
        chunks.extend(found.into_iter().filter(inside));
    }
    if forgot {
        chunks = with_others(m, agno, chunks, &known);
    }
    chunks.sort_unstable_by_key(|c| c.startino);
    let ag = &mut m.ags[agno as usize];
    ag.kind = vec![0; chunks.len() * 64];
    ag.chunks = chunks;
    for (k, c) in ag.chunks.iter().enumerate() {
        for slot in (0..64).filter(|s| c.has(*s) && c.free >> s & 1 == 0) {
            ag.kind[k * 64 + slot as usize] = 1;
        }
    }
}

/// Chunks of a group's tree, and those in its blocks that the tree does not have.
fn with_others(
    m: &Mend<'_>,
    agno: u32,
    mut chunks: Vec<InodeChunk>,
    known: &[InodeChunk],
) -> Vec<InodeChunk> {
    chunks.sort_unstable_by_key(|c| c.startino);
    let before = |a: &InodeChunk, b: &InodeChunk| a.startino.saturating_add(64) <= b.startino;
    let apart = |c: &InodeChunk| {
        let i = chunks.partition_point(|o| before(o, c));
        chunks.get(i).is_none_or(|o| before(c, o))
    };
    let found = search(m, agno, known, (0, u32::MAX)).into_iter();
    let others: Vec<InodeChunk> = found.filter(apart).collect();
    chunks.extend(others);
    chunks.sort_unstable_by_key(|c| c.startino);
    chunks
}

/// Finds the chunks of a group.
pub(crate) fn collect(m: &mut Mend<'_>, agno: u32) {
    let (bytes, ident) = m.header(agno, AGI_SECTOR);
    let agi = Agi::at(&bytes, 0);
    let root = |tree| agi.as_ref().map(|a| a.root_of(tree)).unwrap_or_default();
    let header = check_agi(&bytes, &ident).is_ok();
    let (mut known, gaps) = records(m, agno, Btree::Ino, root(Btree::Ino));
    let doubt = TREES.iter().any(|what| m.hurt(*what, agno));
    let chunks = if !gaps.is_empty() || !header || doubt {
        if m.g.features.finobt {
            known.extend(records(m, agno, Btree::Fino, root(Btree::Fino)).0);
        }
        known.sort_unstable_by_key(|c| c.startino);
        search(m, agno, &known, (0, u32::MAX))
    } else if m.missing.contains(&agno) {
        with_others(m, agno, known.clone(), &known)
    } else {
        known
    };
    let ag = &mut m.ags[agno as usize];
    let slots = chunks.len() * 64;
    ag.chunks = chunks;
    ag.kind = vec![UNSEEN; slots];
    ag.seen = vec![0; slots];
    ag.nlink = vec![0; slots];
}

/// Runs of a group that the free space tree has, or that the reverse mapping tree says are of
/// inodes; `None` if it cannot be followed.
fn runs(m: &Mend<'_>, agno: u32, tree: Btree) -> Option<Vec<(u32, u32)>> {
    let g = &m.g;
    let mut out = Vec::new();
    let mut inside = true;
    let mut push = |start: u32, len: u32| {
        let room = g.ag_blocks(agno).checked_sub(start);
        inside &= room.is_some_and(|r| len <= r);
        out.push((start, len));
    };
    let walked = match tree {
        Btree::Rmap => trees::records(m, agno, tree, &mut |r: &RmapRecord| {
            if r.owner.get() == RMAP_OWN_INODES {
                push(r.startblock.get(), r.blockcount.get());
            }
        }),
        _ => trees::records(m, agno, tree, &mut |r: &AllocRecord| {
            push(r.startblock.get(), r.blockcount.get());
        }),
    };
    (walked.is_whole() && inside).then(|| crate::bulk::space::normal(out))
}

/// The records that an inode may be in; all are in order.
fn near(known: &[InodeChunk], agino: u32) -> &[InodeChunk] {
    let from = known.partition_point(|c| c.startino.saturating_add(64) <= agino);
    let to = known.partition_point(|c| c.startino <= agino.saturating_add(64));
    &known[from..to.max(from)]
}

/// Looks through the blocks of a group where inodes of these numbers would be, for those of inodes that name
/// themselves, and puts them together to chunks.
fn search(m: &Mend<'_>, agno: u32, known: &[InodeChunk], inos: (u32, u32)) -> Vec<InodeChunk> {
    let (g, disk) = (&*m.g, m.disk);
    let inodes = match g.features.rmapbt {
        true => runs(m, agno, Btree::Rmap),
        false => None,
    };
    let free = runs(m, agno, Btree::Bno);
    let inside = |runs: &[(u32, u32)], b: u32| {
        let i = runs.partition_point(|(s, _)| *s <= b);
        i > 0 && b - runs[i - 1].0 < runs[i - 1].1
    };
    let listed = |b: u32| {
        let per = 1u32 << g.inopblog;
        let first = b << g.inopblog;
        near(known, first).iter().any(|c| {
            let slots = (first..first + per).filter_map(|i| i.checked_sub(c.startino));
            slots.into_iter().any(|s| s < 64 && c.has(s))
        })
    };
    let plausible = |b: u32| match (&inodes, &free) {
        (Some(runs), _) if inside(runs, b) => true,
        (_, Some(free)) => !inside(free, b) || listed(b),
        (Some(_), None) => listed(b),
        (None, None) => true,
    };
    // A chunk that begins among the last may end behind them.
    let end = (inos.1.saturating_add(INODES_PER_CHUNK) >> g.inopblog).saturating_add(1);
    let blocks = g.ag_blocks(agno).min(end);
    let per_read = (SEARCH >> g.blocklog).max(1) as u32;
    // Whether nothing from block `first` to `end` is worth reading: all free, as both trees have it.
    let quiet = |first: u32, end: u32| {
        // The last run that begins before the end: its beginning and end.
        let last = |runs: &Option<Vec<(u32, u32)>>| {
            let runs = runs.as_deref()?;
            let i = runs.partition_point(|(s, _)| *s < end).checked_sub(1)?;
            Some((runs[i].0, runs[i].0 + runs[i].1))
        };
        let all_free = last(&free).is_some_and(|(s, e)| s <= first && e >= end);
        let some_inodes = last(&inodes).is_some_and(|(_, e)| e > first);
        let from = known.partition_point(|c| c.startino.saturating_add(64) <= first << g.inopblog);
        let next = known.get(from);
        let listed = next.is_some_and(|c| c.startino >> g.inopblog < end);
        all_free && !some_inodes && !listed
    };
    let next = AtomicU32::new(inos.0 >> g.inopblog);
    let look = || {
        let mut found: Vec<(u32, Vec<u64>)> = Vec::new();
        loop {
            let first = next.fetch_add(per_read, Ordering::Relaxed);
            if first >= blocks {
                return found;
            }
            let n = per_read.min(blocks - first);
            if quiet(first, first + n) {
                continue;
            }
            let daddr = g.daddr(AgBlock { agno, agbno: first });
            let Ok(bytes) = disk.get(daddr << 9, (n as usize) << g.blocklog) else {
                continue;
            };
            let all = (first..).zip(bytes.chunks_exact(g.block_size as usize));
            let these = all.filter(|(b, raw)| names_itself(g, agno, *b, raw) && plausible(*b));
            found.extend(these.map(|(b, raw)| (b, in_use(g, raw))));
        }
    };
    let mut at: Vec<(u32, Vec<u64>)> = std::thread::scope(|s| {
        let others: Vec<_> = (1..SEARCHERS).map(|_| s.spawn(look)).collect();
        let mut at = look();
        at.extend(others.into_iter().filter_map(|t| t.join().ok()).flatten());
        at
    });
    at.sort_unstable();
    together(m, at, known)
}

/// Puts blocks of inodes together to chunks. Each block comes with its inodes that are in use.
fn together(m: &Mend<'_>, at: Vec<(u32, Vec<u64>)>, known: &[InodeChunk]) -> Vec<InodeChunk> {
    let g = &*m.g;
    // Of each chunk the inodes that are there, and those in use.
    let mut found: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for (b, used) in at {
        let agino = b << g.inopblog;
        let start = chunk_start(m, agino, known);
        let mask = u64::MAX >> (64 - (1u32 << g.inopblog).min(64));
        for (k, used) in (0..).step_by(64).zip(used) {
            let start = start + k;
            let shift = (agino + k - start).min(63);
            let chunk = found.entry(start).or_default();
            chunk.0 |= mask << shift;
            chunk.1 |= used << shift;
        }
    }
    let holes = |there: u64| (0..16).filter(move |i| there >> (i * 4) & 0xf == 0);
    let chunk = |(start, (there, used)): (u32, (u64, u64))| {
        let holemask = holes(there).fold(0, |h, i| h | 1 << i);
        InodeChunk::new(start, holemask, !used)
    };
    found.into_iter().map(chunk).collect()
}

/// The inodes of a block that are not free, 64 in a word.
fn in_use(g: &Geometry, block: &[u8]) -> Vec<u64> {
    let used = |raw: &[u8]| u64::from(Be16::at(raw, 2).is_ok_and(|mode| mode.get() != 0));
    let inodes: Vec<&[u8]> = block.chunks_exact(g.inode_size as usize).collect();
    let word = |some: &[&[u8]]| (0..).zip(some).fold(0, |w, (i, raw)| w | used(raw) << i);
    inodes.chunks(64).map(word).collect()
}

/// The first inode of the chunk that an inode is in.
fn chunk_start(m: &Mend<'_>, agino: u32, known: &[InodeChunk]) -> u32 {
    let g = &m.g;
    if g.chunk_blocks() == 1 {
        return agino / 64 * 64;
    }
    let aligned =
        |start: u32| g.inoalignmt <= 1 || (start >> g.inopblog).is_multiple_of(g.inoalignmt.max(1));
    let of = near(known, agino)
        .iter()
        .find(|c| aligned(c.startino) && agino.checked_sub(c.startino).is_some_and(|s| s < 64));
    match of {
        Some(c) => c.startino,
        None => {
            let align = u64::from(g.inoalignmt.max(g.chunk_blocks())) << g.inopblog;
            let past = (u64::from(agino) % align) as u32;
            agino - past % 64
        }
    }
}

/// Whether the inodes in a block say that they are these.
fn names_itself(g: &Geometry, agno: u32, agbno: u32, block: &[u8]) -> bool {
    let first = u64::from(agbno) << g.inopblog;
    let mut yes = 0;
    let all = block.chunks_exact(g.inode_size as usize);
    let n = all.len();
    for (i, raw) in all.enumerate() {
        let ino = g.ino(agno, first as u32 + i as u32);
        yes += usize::from(Dinode::at(raw, 0).is_ok_and(|d| {
            let named = d.ino.get() == ino && d.uuid == g.meta_uuid;
            named && (d.v2.magic.get() == DINODE_MAGIC || n > 1)
        }));
    }
    yes * 2 >= n && yes > 0
}
