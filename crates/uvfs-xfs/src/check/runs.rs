//! Reads runs of a file's blocks.

use super::{Ctx, Place, Reader};
use crate::blocks::Block;
use crate::format::*;
use crate::geometry::AgBlock;

/// Where a run of file blocks is on disk, as (group, block, blocks): `None` if part of it is a
/// hole.
pub(crate) fn map_run(
    ctx: &Ctx<'_>,
    extents: &[Extent],
    start: u64,
    count: u64,
) -> Option<Vec<(AgBlock, u32)>> {
    let mut out = Vec::new();
    let (mut at, end) = (start, start + count);
    let mut i = extents.partition_point(|e| e.end() <= start);
    while at < end {
        let e = extents.get(i).filter(|e| e.startoff <= at)?;
        let skip = at - e.startoff;
        let n = (u64::from(e.blockcount).checked_sub(skip)?).min(end - at);
        let a = ctx.g.fsb_run(e.startblock + skip, n as u32)?;
        out.push((a, n as u32));
        at += n;
        i += 1;
    }
    Some(out)
}

/// Reads a run of file blocks; with its first block's place.
pub(crate) fn read_run(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    place: Place,
    extents: &[Extent],
    start: u64,
    count: u64,
) -> Option<(Block, AgBlock)> {
    let Some(runs) = map_run(ctx, extents, start, count) else {
        ctx.report
            .bad(place, format!("file block {start} is a hole"));
        return None;
    };
    let first = runs.first()?.0;
    let mut bytes: Option<Block> = None;
    for (a, n) in &runs {
        let read = rd.blocks(ctx.g, a.agno, a.agbno, *n);
        let read = read.map_err(|e| ctx.io(place.at(a.agno, a.agbno), &e));
        let read = read.ok()?;
        bytes = Some(match bytes.take() {
            None => read,
            Some(first) => Block::new([&first[..], &read[..]].concat()),
        });
    }
    Some((bytes?, first))
}

/// Says that a run of file blocks will be needed.
pub(crate) fn want_run(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    extents: &[Extent],
    start: u64,
    count: u64,
) {
    for (a, n) in map_run(ctx, extents, start, count).unwrap_or_default() {
        rd.want_blocks(ctx.g, a.agno, a.agbno, n);
    }
}
