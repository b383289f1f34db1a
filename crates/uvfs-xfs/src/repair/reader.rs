//! Reads the inodes of a group, a MiB at once, and the blocks of directories with them.

use super::Mend;
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use crate::overlay::{Fetched, Overlay};
use std::sync::mpsc;

/// Bytes of inodes read at once.
const MAX_READ: u64 = 1 << 20;
/// Bytes of directory blocks that are read with them.
const MAX_AHEAD: usize = 2 << 20;
/// Threads that read inodes, each of which holds one run.
const READERS: usize = 4;

/// The bytes of a run of inodes, and blocks of its directories.
type InodeRun = (Vec<u8>, Option<Fetched>);

/// Is given an inode's number, its place in the lists, and its bytes.
type Visit<'v> = &'v mut dyn FnMut(&mut Mend<'_>, u64, usize, &[u8]);

/// Visits the inodes of a group that are there: number, place in the lists, bytes.
/// `ahead`: directories will be read, too.
pub(crate) fn each(m: &mut Mend<'_>, agno: u32, ahead: bool, visit: Visit<'_>) {
    let geometry = m.g.clone();
    let g = &*geometry;
    let size = g.inode_size as usize;
    let bytes = u64::from(INODES_PER_CHUNK) << g.inodelog;
    let base = g.daddr(AgBlock { agno, agbno: 0 }) << 9;
    let ag_bytes = u64::from(g.ag_blocks(agno)) << g.blocklog;
    let runs = runs(&m.ags[agno as usize].chunks, g);
    let disk = m.disk;
    let read = |(_, n): (usize, usize), start: u64| {
        let len = (start + n as u64 * bytes)
            .min(ag_bytes)
            .saturating_sub(start);
        let mut run = vec![0; len as usize];
        let at = base + start;
        // Bytes that cannot be read stay zeros, and so are no inodes.
        if crate::Blocks::read_data(disk, at, &mut run).is_err() {
            for (k, one) in run.chunks_mut(size).enumerate() {
                let _ = crate::Blocks::read_data(disk, at + (k * size) as u64, one);
            }
        }
        let ahead = ahead.then(|| fetch(disk, g, &run));
        (run, ahead)
    };
    let chunks = &m.ags[agno as usize].chunks;
    let starts = runs
        .iter()
        .map(|r| u64::from(chunks[r.0].startino) << g.inodelog);
    let runs: Vec<((usize, usize), u64)> = runs.iter().copied().zip(starts).collect();
    std::thread::scope(|s| {
        // Reader k has the runs k, k + READERS and so on: they are taken in order.
        let readers: Vec<mpsc::Receiver<InodeRun>> = (0..READERS.min(runs.len()))
            .map(|k| {
                let (give, take) = mpsc::sync_channel(0);
                let (read, mine) = (&read, runs[k..].iter().step_by(READERS));
                s.spawn(move || {
                    for (run, start) in mine {
                        if give.send(read(*run, *start)).is_err() {
                            break;
                        }
                    }
                });
                take
            })
            .collect();
        for (i, ((first, n), start_at)) in runs.iter().enumerate() {
            let Ok((run, blocks)) = readers[i % READERS].recv() else {
                break;
            };
            if let Some(blocks) = blocks {
                disk.expect(blocks);
            }
            for k in *first..first + n {
                let chunk = m.ags[agno as usize].chunks[k];
                for slot in (0..INODES_PER_CHUNK).filter(|s| chunk.has(*s)) {
                    let agino = chunk.startino + slot;
                    let from = ((u64::from(agino) << g.inodelog) - start_at) as usize;
                    if let Some(raw) = run.get(from..from + size) {
                        let ino = g.ino(agno, agino);
                        visit(m, ino, k * 64 + slot as usize, raw);
                    }
                }
            }
        }
    });
}

/// Runs of chunks that lie one after another: the first, and how many.
fn runs(chunks: &[InodeChunk], g: &Geometry) -> Vec<(usize, usize)> {
    let most = (MAX_READ >> (g.inodelog + 6)).max(1) as usize;
    let mut out: Vec<(usize, usize)> = Vec::new();
    for (i, c) in chunks.iter().enumerate() {
        match out.last_mut() {
            Some((_, n)) if *n < most && chunks[i - 1].startino + 64 == c.startino => *n += 1,
            _ => out.push((i, 1)),
        }
    }
    out
}

/// Reads the blocks of directories in a run of inodes ahead. Nothing here is believed.
fn fetch(disk: &Overlay, g: &Geometry, run: &[u8]) -> Fetched {
    let per = 1u32 << g.dirblklog;
    let mut wanted = Vec::new();
    for raw in run.chunks_exact(g.inode_size as usize) {
        let Ok(d) = Dinode::at(raw, 0) else { continue };
        let dir = FileType::from_mode(d.v2.mode.get()) == FileType::Directory;
        if !dir || d.v2.format != FORMAT_EXTENTS {
            continue;
        }
        let n = (d.v2.nextents.get() as usize).min((raw.len() - DINODE_V3_SIZE) / 16);
        let extents = ExtentRecord::slice_at(raw, DINODE_V3_SIZE, n);
        for e in extents.unwrap_or_default() {
            let e = e.unpack();
            if e.startoff >= DIR2_LEAF_OFFSET >> g.blocklog {
                break;
            }
            if let Some(a) = g.fsb_run(e.startblock, e.blockcount) {
                let blocks = (0..e.blockcount.min(1024)).step_by(per as usize);
                wanted.extend(blocks.map(|b| {
                    let agbno = a.agbno + b;
                    g.daddr(AgBlock { agbno, ..a }) << 9
                }));
            }
        }
    }
    // Further blocks are read when they are needed.
    wanted.truncate((MAX_AHEAD / g.dir_block_size as usize).max(1));
    wanted.sort_unstable();
    disk.fetch(&wanted, g.dir_block_size as usize)
}
