//! Reads chunks of inodes, in large reads where they lie together.

use super::super::ctx::{DirectoryFacts, KIND_BAD};
use super::super::reader::MAX_READ;
use super::super::{Chunk, Ctx, Place, Reader, Structure};
use crate::format::*;
use crate::geometry::AgBlock;
use std::collections::VecDeque;
use std::ops::Range;

use super::{FORK_AHEAD, READS_AHEAD, SURVEYED, free_inode, used_inode};

/// Some chunks of an allocation group that are read at once.
#[derive(Clone, Copy, Default)]
struct Span {
    agno: u32,
    /// Index of the first chunk.
    first: usize,
    chunks: usize,
    /// Byte on the device.
    offset: u64,
    len: usize,
}

/// A span, and what was asked for ahead for it.
#[derive(Default)]
struct ChunkRun {
    span: Span,
    /// The pieces of the span itself.
    pieces: Vec<u64>,
    /// The blocks that its inodes lead to: the number of the inode after the last one, and the pieces.
    batches: VecDeque<(usize, Vec<u64>)>,
    /// Inodes whose forks were looked at for that.
    surveyed: usize,
    /// All its inodes were looked at for that.
    done: bool,
}

fn chunk_bytes(ctx: &Ctx<'_>) -> u64 {
    u64::from(INODES_PER_CHUNK) << ctx.g.inodelog
}

/// Cuts the next run off the front of a range of chunks.
fn cut(ctx: &Ctx<'_>, gap: u64, agno: u32, range: &mut Range<usize>) -> Option<Span> {
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
    Some(Span {
        agno,
        first,
        chunks: n,
        offset: (g.daddr(AgBlock { agno, agbno: 0 }) << 9) + offset(first),
        len: end.saturating_sub(offset(first)) as usize,
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
    let mut out = DirectoryFacts::default();
    let gap = rd.gap();
    let mut item: Option<(u32, Range<usize>)> = None;
    let mut cut_next = || loop {
        if let Some((agno, range)) = &mut item
            && let Some(span) = cut(ctx, gap, *agno, range)
        {
            return Some(span);
        }
        item = Some(next()?);
    };
    let mut queue: VecDeque<ChunkRun> = VecDeque::with_capacity(READS_AHEAD);
    let mut more = true;
    loop {
        while more && queue.len() < READS_AHEAD && (queue.is_empty() || rd.has_room()) {
            let Some(span) = cut_next() else {
                more = false;
                break;
            };
            let mark = rd.mark();
            rd.want(span.offset, span.len as u64);
            rd.go();
            queue.push_back(ChunkRun {
                span,
                pieces: rd.since(mark),
                ..ChunkRun::default()
            });
        }
        // Not those at the end of the queue: they have only just been sent.
        let arrived = queue.len().div_ceil(2).min(SURVEYED);
        for run in queue.iter_mut().take(arrived) {
            if !run.done && !survey(ctx, rd, run) {
                break;
            }
        }
        rd.send();
        let Some(mut run) = queue.pop_front() else {
            break;
        };
        scan_run(ctx, rd, &mut run, &mut out);
        let batches = run.batches.into_iter().flat_map(|(_, pieces)| pieces);
        for p in run.pieces.into_iter().chain(batches) {
            rd.forget(p);
        }
    }
    let mut tree = ctx.counted.tree.lock().expect("no holder panics");
    tree.append(out);
}

/// The inodes of a span that are there: (chunk, index in the chunk, where in the span).
fn inodes_of<'c>(
    ctx: &'c Ctx<'_>,
    span: Span,
) -> impl Iterator<Item = (usize, &'c Chunk, u32, usize)> {
    let g = ctx.g;
    let chunks = ctx.ags[span.agno as usize]
        .chunks
        .get()
        .map_or(&[][..], |c| &c[..]);
    let range = span.first..span.first + span.chunks;
    let start = chunks.get(span.first).map_or(0, |c| c.start);
    range.flat_map(move |k| {
        let chunk = &chunks[k];
        let at = ((chunk.start - start) as usize) << g.inodelog;
        (0..INODES_PER_CHUNK)
            .filter(|slot| chunk.holemask >> (slot / INODES_PER_HOLEMASK_BIT) & 1 == 0)
            .map(move |slot| (k, chunk, slot, at + ((slot as usize) << g.inodelog)))
    })
}

/// Asks for what the inodes of a run lead to, as far as there is room. Gives whether that was all. Nothing
/// here is believed: what makes no sense is found when the inode is checked.
fn survey(ctx: &Ctx<'_>, rd: &mut Reader<'_>, run: &mut ChunkRun) -> bool {
    let span = run.span;
    let frees = ctx.ags[span.agno as usize].free.get();
    // A run that was not asked for ahead is read when its turn comes.
    let (Some(frees), false) = (frees, run.pieces.is_empty()) else {
        run.done = true;
        return true;
    };
    let Ok(bytes) = rd.bytes(span.offset, span.len) else {
        run.done = true;
        return true;
    };
    let size = ctx.g.inode_size as usize;
    let mut inodes = inodes_of(ctx, span).skip(run.surveyed);
    while !run.done && rd.has_room_for_batch() {
        let mark = rd.mark();
        while rd.wanted() < rd.batch() {
            let Some((k, _, slot, from)) = inodes.next() else {
                run.done = true;
                break;
            };
            run.surveyed += 1;
            let used = frees[k] >> slot & 1 == 0;
            if let Some(raw) = bytes.get(from..from + size).filter(|_| used) {
                survey_inode(ctx, rd, raw);
            }
        }
        rd.go();
        let pieces = rd.since(mark);
        run.batches.push_back((run.surveyed, pieces));
    }
    run.done
}

/// Asks for what an inode leads to.
fn survey_inode(ctx: &Ctx<'_>, rd: &mut Reader<'_>, raw: &[u8]) {
    let Ok(d) = DinodeV2::at(raw, 0) else {
        return;
    };
    let kind = FileType::from_mode(d.mode.get());
    let (data_at, (n, an)) = match Dinode::at(raw, 0) {
        Ok(v3) if d.version == 3 => (DINODE_V3_SIZE, v3.extent_counts()),
        _ => {
            let counts = (d.nextents.get().into(), d.anextents.get().into());
            (DINODE_V2_SIZE, counts)
        }
    };
    let attr_at = match d.forkoff {
        0 => raw.len(),
        f => (data_at + usize::from(f) * 8).min(raw.len()),
    };
    if kind != FileType::Regular || d.format == FORMAT_BTREE {
        survey_fork(ctx, rd, d.format, n, raw.get(data_at..attr_at));
    }
    if d.forkoff != 0 {
        survey_fork(ctx, rd, d.aformat, an, raw.get(attr_at..));
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

/// Checks the inodes of a run. If it cannot be read as a whole, each chunk of it is read alone.
fn scan_run(ctx: &Ctx<'_>, rd: &mut Reader<'_>, run: &mut ChunkRun, out: &mut DirectoryFacts) {
    let (g, span) = (ctx.g, run.span);
    let ag = &ctx.ags[span.agno as usize];
    let Some(chunks) = ag.chunks.get() else {
        return;
    };
    let start = chunks[span.first].start;
    match rd.bytes(span.offset, span.len) {
        Ok(bytes) => scan_inodes(ctx, rd, run, &bytes, out),
        Err(e) if span.chunks == 1 => {
            let place = Place::block(Structure::InodeChunk, span.agno, start >> g.inopblog);
            ctx.io(place, &e);
            if let Some(f) = ag.facts.get() {
                let slots = span.first * 64..(span.first + 1) * 64;
                slots.for_each(|slot| f.set_inode(slot, KIND_BAD, 0));
            }
        }
        Err(_) => {
            for first in span.first..span.first + span.chunks {
                let skip = u64::from(chunks[first].start - start) << g.inodelog;
                let span = Span {
                    first,
                    chunks: 1,
                    offset: span.offset + skip,
                    len: (span.len as u64 - skip).min(chunk_bytes(ctx)) as usize,
                    ..span
                };
                let mut one = ChunkRun {
                    span,
                    done: true,
                    ..ChunkRun::default()
                };
                scan_run(ctx, rd, &mut one, out);
            }
        }
    }
}

/// Checks the inodes of a run. Blocks that some of them led to are let go of when they are done, and more is asked
/// for.
fn scan_inodes(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    run: &mut ChunkRun,
    bytes: &[u8],
    out: &mut DirectoryFacts,
) {
    let span = run.span;
    let (g, agno) = (ctx.g, span.agno);
    let ag = &ctx.ags[agno as usize];
    let Some(frees) = ag.free.get() else {
        return;
    };
    let size = g.inode_size as usize;
    let mut done = 0;
    for (i, (k, chunk, slot, from)) in inodes_of(ctx, span).enumerate() {
        while run.batches.front().is_some_and(|(end, _)| *end <= i) {
            let (_, pieces) = run.batches.pop_front().unwrap_or_default();
            pieces.into_iter().for_each(|p| rd.forget(p));
            if !run.done {
                survey(ctx, rd, run);
                rd.send();
            }
        }
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
