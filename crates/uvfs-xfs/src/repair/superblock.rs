//! The superblock: the primary one is believed if most copies agree with it.

use super::{Mend, Place, Structure};
use crate::blocks::Blocks;
use crate::check::superblock as checked;
use crate::error::{Error, Result};
use crate::format::*;
use crate::geometry::Geometry;
use crate::read::volume::read_superblock;

/// Copies that are asked at most.
const MAX_VOTES: u32 = 64;

/// The fields that are the same in all superblocks of a file system.
fn key(sb: &Superblock) -> Vec<u8> {
    let mut s = *sb;
    for f in [
        &mut s.icount,
        &mut s.ifree,
        &mut s.fdblocks,
        &mut s.frextents,
        &mut s.rootino,
        &mut s.rbmino,
        &mut s.rsumino,
        &mut s.uquotino,
        &mut s.gquotino,
        &mut s.pquotino,
        &mut s.lsn,
    ] {
        f.set(0);
    }
    let version = s.versionnum.get() & !(VERSION_ATTR | VERSION_QUOTA | VERSION_NLINK);
    s.versionnum.set(version);
    let incompat = s.features_incompat.get() & !INCOMPAT_NEEDSREPAIR;
    s.features_incompat.set(incompat);
    s.features_log_incompat.set(0);
    s.qflags.set(0);
    (s.inprogress, s.flags, s.imax_pct) = (0, 0, 0);
    s.fname = [0; 12];
    s.crc.set(0);
    s.unit.set(0);
    s.width.set(0);
    let mut bytes = zerocopy::IntoBytes::as_bytes(&s).to_vec();
    bytes.truncate(264);
    bytes
}

/// A group's copy of the superblock, if it is sound. mkfs tells most copies no root directory.
fn copy(blocks: &dyn Blocks, g: &Geometry, agno: u32) -> Option<Superblock> {
    let offset = g.ag_header_daddr(agno, 0) << 9;
    let bytes = blocks.bytes(offset, g.sector_size as usize).ok()?;
    let mut sb = *check_superblock(&bytes).ok()?;
    sb.inprogress = 0;
    Some(sb)
}

/// Copies that agree with a superblock, and how many were asked.
fn votes(blocks: &dyn Blocks, sb: &Superblock, g: &Geometry) -> (u32, u32) {
    let step = g.agcount.div_ceil(MAX_VOTES).max(1);
    let wanted = key(sb);
    let (mut yes, mut asked) = (0, 0);
    for agno in (1..g.agcount).step_by(step as usize) {
        asked += 1;
        yes += u32::from(copy(blocks, g, agno).is_some_and(|c| key(&c) == wanted));
    }
    (yes, asked)
}

/// A superblock to go by.
pub(crate) struct Choice {
    pub sb: Superblock,
    pub g: Geometry,
    /// It is the primary one as it is on disk.
    pub as_is: bool,
}

impl Choice {
    /// How many group headers have the UUID of this superblock, damaged ones as well.
    pub(crate) fn headers(&self, blocks: &dyn Blocks) -> usize {
        let g = &self.g;
        let uuid = |agno, sector| {
            let at = g.ag_header_daddr(agno, sector) << 9;
            let bytes = blocks.bytes(at, g.sector_size as usize).ok()?;
            match sector {
                AGF_SECTOR => Agf::at(&bytes, 0).ok().map(|agf| agf.uuid),
                _ => Agi::at(&bytes, 0).ok().map(|agi| agi.uuid),
            }
        };
        (0..g.agcount)
            .flat_map(|agno| [(agno, AGF_SECTOR), (agno, AGI_SECTOR)])
            .filter(|(agno, sector)| uuid(*agno, *sector) == Some(g.meta_uuid))
            .count()
    }
}

/// The superblock to go by. There are two if as many superblocks speak for the primary one as for another; the
/// primary one comes first.
pub(crate) fn settle(blocks: &dyn Blocks) -> Result<Vec<Choice>> {
    let first = read_superblock(blocks);
    let as_it_is = |(sb, g)| Choice { sb, g, as_is: true };
    let (primary, damage) = match first {
        Ok((sb, g)) => {
            let (yes, asked) = votes(blocks, &sb, &g);
            if asked == 0 || yes * 2 >= asked {
                return Ok(vec![as_it_is((sb, g))]);
            }
            (Some((sb, g)), None)
        }
        Err(e @ Error::Io { .. }) => return Err(e),
        Err(e) => (None, Some(e)),
    };
    let Some((copy, g)) = checked::search(blocks) else {
        return match (primary, damage) {
            (Some(primary), _) => Ok(vec![as_it_is(primary)]),
            (None, Some(e)) => Err(e),
            (None, None) => Err(Error::NotXfs { found: 0 }),
        };
    };
    let (yes, asked) = votes(blocks, &copy, &g);
    let Some(primary) = primary else {
        let sector = blocks.bytes(0, g.sector_size as usize).ok();
        let old = sector.and_then(|s| Superblock::at(&s, 0).ok().copied());
        let old = old.filter(|o| o.magicnum.get() == SB_MAGIC && o.uuid == copy.uuid);
        let sb = old.map_or(copy, |o| merged(&copy, &o));
        let as_is = false;
        return Ok(vec![Choice { sb, g, as_is }]);
    };
    let other = Choice {
        sb: merged(&copy, &primary.0),
        g,
        as_is: false,
    };
    Ok(match asked {
        // Neither has a majority: what is mounted is believed.
        _ if yes * 2 < asked => vec![as_it_is(primary)],
        // One against one.
        1 => vec![as_it_is(primary), other],
        _ => vec![other],
    })
}

/// A copy, with what only the primary superblock knows.
fn merged(copy: &Superblock, primary: &Superblock) -> Superblock {
    let mut s = *copy;
    for (to, from) in [
        (&mut s.rootino, primary.rootino),
        (&mut s.rbmino, primary.rbmino),
        (&mut s.rsumino, primary.rsumino),
        (&mut s.uquotino, primary.uquotino),
        (&mut s.gquotino, primary.gquotino),
        (&mut s.pquotino, primary.pquotino),
        (&mut s.icount, primary.icount),
        (&mut s.ifree, primary.ifree),
        (&mut s.fdblocks, primary.fdblocks),
    ] {
        *to = from;
    }
    s.qflags = primary.qflags;
    s.fname = primary.fname;
    s.imax_pct = primary.imax_pct;
    let sticky = VERSION_ATTR | VERSION_QUOTA | VERSION_NLINK;
    let version = copy.versionnum.get() | primary.versionnum.get() & sticky;
    s.versionnum.set(version);
    match Geometry::new(&s) {
        Ok(_) => s,
        Err(_) => *copy,
    }
}

/// Whether an inode looks like a directory that is its own parent.
fn is_root(m: &Mend<'_>, ino: u64) -> bool {
    m.raw(ino).is_some_and(|raw| {
        check_dinode(&raw, &m.g.ident(0, Some(ino)))
            .is_ok_and(|d| FileType::from_mode(d.mode.get()) == FileType::Directory)
    })
}

/// Sets right the fields that only the primary superblock has.
pub(crate) fn fields(m: &mut Mend<'_>) {
    let (mut sb, g) = (m.sb, m.g.clone());
    let mut set = Vec::new();
    // The three inodes follow each other; two of three tell.
    let (root, rbm, rsum) = (sb.rootino.get(), sb.rbmino.get(), sb.rsumino.get());
    let guesses = [root, rbm.wrapping_sub(1), rsum.wrapping_sub(2)];
    let agree = |r: u64| guesses.iter().filter(|g| **g == r).count();
    let best = guesses
        .into_iter()
        .filter(|r| g.inode(*r).is_some())
        .max_by_key(|r| (agree(*r) > 1, is_root(m, *r)));
    // Some of the copies have it, too.
    let copies = (1..g.agcount.min(MAX_VOTES)).filter_map(|agno| {
        let root = copy(m.disk, &g, agno)?.rootino.get();
        Some(root).filter(|r| is_root(m, *r))
    });
    let best = best
        .filter(|r| is_root(m, *r))
        .or_else(|| copies.min())
        .or(best);
    if let Some(r) = best
        && (root, rbm, rsum) != (r, r + 1, r + 2)
    {
        sb.rootino.set(r);
        sb.rbmino.set(r + 1);
        sb.rsumino.set(r + 2);
        set.push("sb_rootino, sb_rbmino, sb_rsumino");
    }
    if sb.imax_pct > 100 {
        sb.imax_pct = 25;
        set.push("sb_imax_pct");
    }
    let (mut version, mut features2) = (sb.versionnum.get(), sb.features2.get());
    if fit_v5(&mut version, &mut features2) {
        sb.versionnum.set(version);
        sb.features2.set(features2);
        set.push("sb_versionnum, sb_features2");
    }
    if sb.flags & !1 != 0 {
        sb.flags = 0;
        set.push("sb_flags");
    }
    if sb.features_compat.get() != 0 {
        sb.features_compat.set(0);
        set.push("sb_features_compat");
    }
    if sb.features_log_incompat.get() != 0 {
        sb.features_log_incompat.set(0);
        set.push("sb_features_log_incompat");
    }
    if !checked::stripe_fits(&sb) {
        sb.versionnum.set(sb.versionnum.get() & !VERSION_DALIGN);
        sb.unit.set(0);
        sb.width.set(0);
        set.push("sb_unit, sb_width");
    }
    if g.rblocks == 0 && (sb.rextents.get(), sb.rbmblocks.get(), sb.frextents.get()) != (0, 0, 0) {
        sb.rextents.set(0);
        sb.rbmblocks.set(0);
        sb.frextents.set(0);
        set.push("sb_rextents, sb_rbmblocks, sb_frextents");
    }
    if sb.bad_features2.get() != sb.features2.get() {
        sb.bad_features2 = sb.features2;
        set.push("sb_bad_features2");
    }
    if sb.shared_vn != 0 {
        sb.shared_vn = 0;
        set.push("sb_shared_vn");
    }
    quota(&mut sb, &mut set);
    for name in set {
        let text = format!("{name} set right");
        m.say(Place::ag(Structure::Superblock, 0), text);
    }
    m.put_superblock(sb);
}

/// Quota inodes exist only with quota.
fn quota(sb: &mut Superblock, set: &mut Vec<&'static str>) {
    let all = [sb.uquotino.get(), sb.gquotino.get(), sb.pquotino.get()];
    let none = all.iter().all(|i| *i == 0 || *i == NULLFSINO);
    let mut on = sb.versionnum.get() & VERSION_QUOTA != 0;
    if on && none {
        sb.versionnum.set(sb.versionnum.get() & !VERSION_QUOTA);
        set.push("sb_versionnum");
        on = false;
    }
    if !on && !none {
        sb.uquotino.set(0);
        sb.gquotino.set(0);
        sb.pquotino.set(0);
        set.push("sb_uquotino, sb_gquotino, sb_pquotino");
    }
    let flags = if on { !OQUOTA_FLAGS } else { 0 };
    if sb.qflags.get() & !flags != 0 {
        sb.qflags.set(sb.qflags.get() & flags);
        set.push("sb_qflags");
    }
}

/// Writes all copies, and the counters into the primary superblock.
pub(crate) fn copies(m: &mut Mend<'_>) {
    let g = m.g.clone();
    let wanted = key(&m.sb);
    for agno in 1..g.agcount {
        let sector = g.sector_size as usize;
        let offset = g.ag_header_daddr(agno, 0) << 9;
        let old = m.disk.get(offset, sector).unwrap_or_default();
        let fine = check_superblock(&old).is_ok_and(|c| key(c) == wanted)
            && old[264..].iter().all(|b| *b == 0);
        if fine && !m.hurt(Structure::SuperblockCopy, agno) {
            continue;
        }
        let mut copy = m.sb;
        copy.inprogress = 1;
        let features = copy.features_incompat.get() & !INCOMPAT_NEEDSREPAIR;
        copy.features_incompat.set(features);
        for ino in [&mut copy.uquotino, &mut copy.gquotino, &mut copy.pquotino] {
            ino.set(0);
        }
        copy.qflags.set(0);
        copy.lsn.set(0);
        m.disk.write(offset, &copy.sector(sector));
        let text = "rewritten from the primary superblock";
        m.say(Place::ag(Structure::SuperblockCopy, agno), text);
    }
}
