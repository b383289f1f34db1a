//! The superblock: found even when the first one is damaged, its fields, its counters.

use super::is_refusal;
use super::{Counter, Ctx, Place, Report, Structure};
use crate::blocks::Blocks;
use crate::error::{Error, Result};
use crate::format::*;
use crate::geometry::Geometry;
use crate::read::volume::read_superblock;

/// Bytes read at once in the search for a copy.
const SEARCH: usize = 1 << 20;

const PLACE: Structure = Structure::Superblock;

/// The superblock and geometry; from a copy, and with a finding, if the first is damaged.
pub(crate) fn find(blocks: &dyn Blocks, report: &Report) -> Result<(Superblock, Geometry)> {
    let damage = match read_superblock(blocks) {
        Ok(found) => return Ok(found),
        Err(e) if is_refusal(&e) => return Err(e),
        Err(e) => e,
    };
    // A first superblock with the right magic number is XFS, if there is nothing else.
    let Some(found) = search(blocks) else {
        return Err(damage);
    };
    match damage {
        Error::Corrupt { fault, .. } => report.bad(Place::ag(PLACE, 0), fault),
        e => report.bad(Place::ag(PLACE, 0), e.to_string()),
    }
    Ok(found)
}

/// Looks for a superblock copy that is sound and lies where it says allocation groups begin.
pub(crate) fn search(blocks: &dyn Blocks) -> Option<(Superblock, Geometry)> {
    let size = blocks.size();
    let mut buf = vec![0; SEARCH];
    let mut at = 0u64;
    while at < size {
        let len = (size - at).min(SEARCH as u64) as usize;
        let part = &mut buf[..len];
        if blocks.read_data(at, part).is_ok() {
            for (i, sector) in part.chunks_exact(512).enumerate() {
                if sector[..4] != SB_MAGIC.to_be_bytes() {
                    continue;
                }
                let offset = at + i as u64 * 512;
                if let Some(found) = copy_at(blocks, offset) {
                    return Some(found);
                }
            }
        }
        at += SEARCH as u64;
    }
    None
}

fn copy_at(blocks: &dyn Blocks, offset: u64) -> Option<(Superblock, Geometry)> {
    let len = 32768.min(blocks.size().saturating_sub(offset));
    let sector = blocks.bytes(offset, len as usize).ok()?;
    let size = Superblock::at(&sector, 0).ok()?.sector_size()?;
    let mut sb = *check_superblock(sector.get(..size)?).ok()?;
    // mkfs leaves most copies marked as in progress.
    sb.inprogress = 0;
    let g = Geometry::new(&sb).ok()?;
    let ag_bytes = u64::from(g.agblocks) << g.blocklog;
    (offset != 0 && offset.is_multiple_of(ag_bytes) && offset < g.data_bytes()).then_some((sb, g))
}

/// Fields that [`Geometry::new`] does not need.
pub(crate) fn fields(sb: &Superblock, g: &Geometry, head_lsn: Option<u64>, report: &Report) {
    let place = Place::ag(PLACE, 0);
    let f = &g.features;
    if let (Some(head), true) = (head_lsn, f.crc) {
        report.lsn(place, head, sb.lsn.get());
    }
    if f.needsrepair {
        report.bad(place, "marked as needing repair");
    }
    let compat = if f.crc { sb.features_compat.get() } else { 0 };
    for (name, bits) in [
        ("sb_features_compat", compat),
        ("sb_features_ro_compat", f.unknown_ro_compat),
        ("sb_features_log_incompat", f.unknown_log_incompat),
    ] {
        if bits != 0 {
            report.differ(place, name, "no unknown bits", format!("{bits:#x}"));
        }
    }
    ranges(sb, g, place, report);
    // Zero is an old file system's that no kernel has repaired yet.
    if sb.bad_features2.get() != 0 {
        let [expected, found] = [sb.features2, sb.bad_features2].map(|f| format!("{f:#x}"));
        report.same(place, "sb_bad_features2", expected, found);
    }
    // With sparse chunks the alignment is that of whole chunks.
    let chunk = (INODES_PER_CHUNK << g.inodelog) >> g.blocklog;
    if f.sparse && g.inoalignmt != chunk {
        report.differ(place, "sb_inoalignmt", chunk, g.inoalignmt);
    }
    // The root directory is in the first chunk, and the realtime inodes are next to it.
    for (name, ino, next) in [("sb_rbmino", g.rbmino, 1), ("sb_rsumino", g.rsumino, 2)] {
        report.same(place, name, g.rootino + next, ino);
    }
    let log_bytes = u64::from(g.logblocks) << g.blocklog;
    if g.logblocks == 0 || log_bytes > 1 << 31 {
        report.differ(place, "sb_logblocks", "a log of at most 2 GiB", g.logblocks);
    }
}

/// Whether the stripe's unit and width, and the version's bit for them, agree.
pub(crate) fn stripe_fits(sb: &Superblock) -> bool {
    let (unit, width) = (sb.unit.get(), sb.width.get());
    let bit = sb.versionnum.get() & VERSION_DALIGN != 0;
    (unit != 0) == bit && (unit == 0) == (width == 0) && width.is_multiple_of(unit.max(1))
}

/// Ranges that hold in the primary superblock and in its copies.
pub(crate) fn ranges(sb: &Superblock, g: &Geometry, place: Place, report: &Report) {
    if sb.imax_pct > 100 {
        report.differ(place, "sb_imax_pct", "at most 100", sb.imax_pct);
    }
    if g.features.crc {
        let (mut version, mut features2) = (sb.versionnum.get(), sb.features2.get());
        let found = format!("{version:#x}, {features2:#x}");
        if fit_v5(&mut version, &mut features2) {
            let expected = format!("{version:#x}, {features2:#x}");
            report.differ(place, "sb_versionnum, sb_features2", expected, found);
        }
        if sb.qflags.get() & OQUOTA_FLAGS != 0 {
            let found = format!("{:#x}", sb.qflags.get());
            report.differ(place, "sb_qflags", "no flags of version 4", found);
        }
    }
    if sb.flags & !1 != 0 {
        report.differ(place, "sb_flags", "no unknown bits", sb.flags);
    }
    if !stripe_fits(sb) {
        let expected = "a stripe width of whole units, and the version's bit for it";
        let found = format!("{}, {}", sb.unit.get(), sb.width.get());
        report.differ(place, "sb_unit, sb_width", expected, found);
    }
    let rextsize = u64::from(sb.rextsize.get()) << g.blocklog;
    if !(4096.min(u64::from(g.block_size))..=1 << 30).contains(&rextsize) {
        let expected = "an extent of at most 1 GiB";
        report.differ(place, "sb_rextsize", expected, sb.rextsize.get());
    }
    let realtime = (sb.rextents.get(), sb.rbmblocks.get(), sb.frextents.get());
    if g.rblocks == 0 && realtime != (0, 0, 0) {
        let field = "sb_rextents, sb_rbmblocks, sb_frextents";
        let found = format!("{}, {}, {}", realtime.0, realtime.1, realtime.2);
        report.differ(place, field, "zeros without a realtime section", found);
    }
    let (size, log) = (u32::from(sb.logsectsize.get()), sb.logsectlog);
    if (size != 0 || log != 0) && 1u32.checked_shl(log.into()) != Some(size) {
        report.differ(place, "sb_logsectlog", "log2 of sb_logsectsize", log);
    }
}

/// The quota inodes must be regular files that exist.
pub(crate) fn quota(ctx: &Ctx<'_>) {
    let (features, report) = (&ctx.g.features, ctx.report);
    let place = Place::ag(PLACE, 0);
    if features.quota && ctx.g.quota_inodes == [None; 3] {
        let found = format!("{:#x}", ctx.sb.versionnum.get());
        let expected = "no quota without inodes of it";
        report.differ(place, "sb_versionnum", expected, found);
    }
    // Version 4 has no project quota of its own.
    let fields = if features.crc { 3 } else { 2 };
    for (name, ino) in ctx.sb.quota_inodes().into_iter().take(fields) {
        if ino == 0 || ino == NULLFSINO {
            continue;
        }
        if !features.quota {
            report.differ(place, name, "none without quota", ino);
        } else if ctx.index(ino).is_none() {
            report.differ(place, name, "an inode in use", ino);
        }
    }
}

/// The sums over allocation groups of what the superblock counts.
pub(crate) fn sums(ctx: &Ctx<'_>) -> Counts {
    let mut sums = Counts::default();
    for counts in ctx.ags.iter().filter_map(|ag| ag.sums.get()) {
        sums += *counts;
    }
    sums
}

/// Compares the counters with the sums over allocation groups; they are right when the log is
/// clean.
pub(crate) fn counters(ctx: &Ctx<'_>) {
    if !ctx.log_clean || ctx.report.is_incomplete() {
        return;
    }
    let sums = sums(ctx);
    let found = ctx.sb.counts();
    let place = Place::ag(PLACE, 0);
    for (counter, sum, found) in [
        (Counter::SbIcount, sums.icount, found.icount),
        (Counter::SbIfree, sums.ifree, found.ifree),
        (Counter::SbFdblocks, sums.fdblocks, found.fdblocks),
    ] {
        ctx.report.count_is(place, counter, sum, found);
    }
}
