//! Reads chunks of inodes, in large reads where they lie together.

use super::super::ctx::{Chunk, Ctx, KIND_BAD};
use super::super::reader::{MAX_READ, Reader};
use super::super::report::Place;
use crate::format::*;
use crate::geometry::AgBlock;
use std::collections::VecDeque;
use std::ops::Range;

use super::{FORK_AHEAD, Gathered, READS_AHEAD, SURVEYED, free_inode, used_inode};

/// Some chunks of an allocation group that are read at once.
struct Run {
    agno: u32,
    /// Index of the first chunk.
    first: usize,
    chunks: usize,
    /// Byte on the device.
    offset: u64,
    len: usize,
    /// The pieces that were asked for ahead for it.
    pieces: Vec<u64>,
}

fn chunk_bytes(ctx: &Ctx<'_>) -> u64 {
    u64::from(INODES_PER_CHUNK) << ctx.g.inodelog
}

/// Cuts the next run off the front of a range of chunks.
fn cut(ctx: &Ctx<'_>, gap: u64, agno: u32, range: &mut Range<usize>) -> Option<Run> {
    let g = ctx.g;
    let chunks = ctx.ags[agno as usize].chunks.get()?;
    let offset = |i: usize| u64::from(chunks[i].start) << g.inodelog;
    let first = range.clone().next()?;
    let bytes = chunk_bytes(ctx);
    let mut n = 1;
    while first + n < range.end {
        let between = offset(first + n) - (offset(first + n - 1) + bytes);
        if between > gap || offset(first + n) + bytes - offset(first) > MAX_READ {
            break;
        }
        n += 1;
    }
    range.start += n;
    // A sparse chunk may reach beyond the end of the group.
    let ag_bytes = u64::from(g.ag_blocks(agno)) << g.blocklog;
    let end = (offset(first + n - 1) + bytes).min(ag_bytes);
    Some(Run {
        agno,
        first,
        chunks: n,
        offset: (g.daddr(AgBlock { agno, agbno: 0 }) << 9) + offset(first),
        len: end.saturating_sub(offset(first)) as usize,
        pieces: Vec::new(),
    })
}

/// Checks the inodes of all the chunks that `next` gives: (allocation group, range of chunks).
///
/// Reads of inodes are started well ahead. When one has arrived, what its directories, attributes
/// and trees lead to is read ahead, too, so that little is left to wait for when it is checked.
pub(crate) fn scan(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    next: &mut dyn FnMut() -> Option<(u32, Range<usize>)>,
) {
    let mut out = Gathered::default();
    let gap = rd.gap();
    let mut item: Option<(u32, Range<usize>)> = None;
    let mut cut_next = || loop {
        if let Some((agno, range)) = &mut item
            && let Some(run) = cut(ctx, gap, *agno, range)
        {
            return Some(run);
        }
        item = Some(next()?);
    };
    let mut queue: VecDeque<Run> = VecDeque::with_capacity(READS_AHEAD);
    let mut surveyed = 0;
    let mut more = true;
    loop {
        while more && queue.len() < READS_AHEAD && (queue.is_empty() || rd.has_room()) {
            let Some(mut run) = cut_next() else {
                more = false;
                break;
            };
            let mark = rd.mark();
            rd.want(run.offset, run.len as u64);
            rd.go();
            run.pieces = rd.since(mark);
            queue.push_back(run);
        }
        // Not those at the end of the queue: they have only just been sent.
        while surveyed < queue.len().div_ceil(2).min(SURVEYED) {
            let run = &mut queue[surveyed];
            surveyed += 1;
            if run.pieces.is_empty() {
                continue;
            }
            if let Ok(bytes) = rd.bytes(run.offset, run.len) {
                let mark = rd.mark();
                survey(ctx, rd, run, &bytes);
                rd.go();
                run.pieces.append(&mut rd.since(mark));
            }
        }
        rd.send();
        let Some(run) = queue.pop_front() else { break };
        surveyed = surveyed.saturating_sub(1);
        scan_run(ctx, rd, &run, &mut out);
        for p in run.pieces {
            rd.forget(p);
        }
    }
    out.merge(&mut ctx.tree.lock().expect("no holder panics"));
}

/// The inodes of a run that are there: (chunk, index in the chunk, where in the run).
fn inodes_of<'c>(
    ctx: &'c Ctx<'_>,
    run: &'c Run,
) -> impl Iterator<Item = (usize, &'c Chunk, u32, usize)> {
    let g = ctx.g;
    let chunks = ctx.ags[run.agno as usize]
        .chunks
        .get()
        .map_or(&[][..], |c| &c[..]);
    let range = run.first..run.first + run.chunks;
    let start = chunks.get(run.first).map_or(0, |c| c.start);
    range.flat_map(move |k| {
        let chunk = &chunks[k];
        let at = ((chunk.start - start) as usize) << g.inodelog;
        (0..INODES_PER_CHUNK)
            .filter(|slot| chunk.holemask >> (slot / INODES_PER_HOLEMASK_BIT) & 1 == 0)
            .map(move |slot| (k, chunk, slot, at + ((slot as usize) << g.inodelog)))
    })
}

/// Says what the inodes of a run lead to. Nothing here is believed: what makes no sense is found
/// when the inode is checked.
fn survey(ctx: &Ctx<'_>, rd: &mut Reader<'_>, run: &Run, bytes: &[u8]) {
    let g = ctx.g;
    let Some(frees) = ctx.ags[run.agno as usize].free.get() else {
        return;
    };
    let size = g.inode_size as usize;
    for (k, _, slot, from) in inodes_of(ctx, run) {
        if frees[k] >> slot & 1 != 0 {
            continue;
        }
        let Some(raw) = bytes.get(from..from + size) else {
            continue;
        };
        let Ok(d) = DinodeV2::at(raw, 0) else {
            continue;
        };
        let kind = FileType::from_mode(d.mode.get());
        let (data_at, big) = match Dinode::at(raw, 0) {
            Ok(v3) if d.version == 3 => (DINODE_V3_SIZE, v3.flags2.get() & DIFLAG2_NREXT64 != 0),
            _ => (DINODE_V2_SIZE, false),
        };
        let (n, an) = if big {
            (d.big_nextents.get(), d.nextents.get())
        } else {
            (d.nextents.get().into(), d.anextents.get().into())
        };
        let attr_at = match d.forkoff {
            0 => size,
            f => (data_at + usize::from(f) * 8).min(size),
        };
        if kind != FileType::Regular || d.format == FORMAT_BTREE {
            survey_fork(ctx, rd, d.format, n, raw.get(data_at..attr_at));
        }
        if d.forkoff != 0 {
            survey_fork(ctx, rd, d.aformat, an.into(), raw.get(attr_at..));
        }
    }
}

fn survey_fork(ctx: &Ctx<'_>, rd: &mut Reader<'_>, format: u8, n: u64, fork: Option<&[u8]>) {
    let g = ctx.g;
    let Some(fork) = fork else { return };
    match format {
        FORMAT_EXTENTS => {
            let n = n.min((fork.len() / ExtentRecord::SIZE) as u64) as usize;
            let mut left = FORK_AHEAD;
            for r in ExtentRecord::slice_at(fork, 0, n).unwrap_or_default() {
                let e = r.unpack();
                let count = e.blockcount.min(left);
                left -= count;
                if let Some(a) = g.fsb_run(e.startblock, count).filter(|_| count > 0) {
                    rd.want_blocks(g, a.agno, a.agbno, count);
                }
            }
        }
        FORMAT_BTREE => {
            let Ok(head) = BmdrBlock::at(fork, 0) else {
                return;
            };
            let room = (fork.len() - BmdrBlock::SIZE) / 16;
            let n = usize::from(head.numrecs.get()).min(room);
            for p in Be64::slice_at(fork, BmdrBlock::SIZE + room * 8, n).unwrap_or_default() {
                if let Some(a) = g.fsb(p.get()) {
                    rd.want_blocks(g, a.agno, a.agbno, 1);
                }
            }
        }
        _ => {}
    }
}

fn scan_run(ctx: &Ctx<'_>, rd: &mut Reader<'_>, run: &Run, out: &mut Gathered) {
    let (g, agno) = (ctx.g, run.agno);
    let ag = &ctx.ags[agno as usize];
    let (Some(chunks), Some(frees)) = (ag.chunks.get(), ag.free.get()) else {
        return;
    };
    let bytes = match rd.bytes(run.offset, run.len) {
        Ok(b) => b,
        // Find the chunk that cannot be read.
        Err(_) if run.chunks > 1 => {
            let start = chunks[run.first].start;
            for (k, chunk) in chunks.iter().enumerate().skip(run.first).take(run.chunks) {
                let skip = u64::from(chunk.start - start) << g.inodelog;
                let len = (run.len as u64 - skip).min(chunk_bytes(ctx));
                let one = Run {
                    agno,
                    first: k,
                    chunks: 1,
                    offset: run.offset + skip,
                    len: len as usize,
                    pieces: Vec::new(),
                };
                scan_run(ctx, rd, &one, out);
            }
            return;
        }
        Err(e) => {
            let block = chunks[run.first].start >> g.inopblog;
            ctx.io(Place::block("inode chunk", agno, block), &e);
            if let Some(f) = ag.facts.get() {
                for slot in 0..64 {
                    f.set_inode(run.first * 64 + slot, KIND_BAD, 0);
                }
            }
            return;
        }
    };
    let size = g.inode_size as usize;
    let mut done = 0;
    for (k, chunk, slot, from) in inodes_of(ctx, run) {
        done += 1;
        let Some(raw) = bytes.get(from..from + size) else {
            continue;
        };
        let ino = g.ino(agno, chunk.start + slot);
        if frees[k] >> slot & 1 != 0 {
            free_inode(ctx, ino, raw);
        } else {
            let (kind, nlink) = used_inode(ctx, rd, ino, raw, out);
            if let Some(f) = ag.facts.get() {
                f.set_inode(k * 64 + slot as usize, kind, nlink);
            }
        }
    }
    ctx.progress.add_done(done);
}
