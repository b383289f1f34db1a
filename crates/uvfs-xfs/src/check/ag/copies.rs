//! Compares the copies of the superblock.

use super::super::ctx::Ctx;
use super::super::problem::{Place, Structure};
use super::super::reader::Reader;
use super::super::superblock::ranges;
use crate::format::*;

use super::sector;

pub(super) fn superblock_copy(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32) {
    let place = Place::ag(Structure::SuperblockCopy, agno);
    let Some(bytes) = sector(ctx, rd, place, agno, 0) else {
        return;
    };
    let copy = match check_superblock(&bytes) {
        Ok(s) => s,
        Err(f) => return ctx.report.bad(place, f),
    };
    ctx.lsn(place, &bytes, 240);
    let sb = ctx.sb;
    macro_rules! same {
        ($($field:ident),*) => {$(
            if copy.$field.get() != sb.$field.get() {
                ctx.report.differ(place, concat!("sb_", stringify!($field)),
                    sb.$field.get(), copy.$field.get());
            }
        )*};
    }
    macro_rules! same_byte {
        ($($field:ident),*) => {$(
            if copy.$field != sb.$field {
                ctx.report.differ(place, concat!("sb_", stringify!($field)),
                    sb.$field, copy.$field);
            }
        )*};
    }
    same!(
        blocksize,
        dblocks,
        rblocks,
        rextents,
        logstart,
        rextsize,
        agblocks,
        agcount,
        rbmblocks,
        logblocks,
        sectsize,
        inodesize,
        inopblock,
        inoalignmt,
        unit,
        width,
        logsectsize,
        logsunit
    );
    same_byte!(
        blocklog, sectlog, inodelog, inopblog, agblklog, rextslog, dirblklog, logsectlog
    );
    if copy.uuid != sb.uuid {
        let (e, f) = (format_uuid(&sb.uuid), format_uuid(&copy.uuid));
        ctx.report.differ(place, "sb_uuid", e, f);
    }
    let version =
        |s: &Superblock| s.versionnum.get() & !(VERSION_ATTR | VERSION_QUOTA | VERSION_NLINK);
    if version(copy) != version(sb) {
        let (e, f) = (version(sb), version(copy));
        ctx.report
            .differ(place, "sb_versionnum", format!("{e:#x}"), format!("{f:#x}"));
    }
    if ctx.g.features.crc {
        same!(
            spino_align,
            features2,
            features_compat,
            features_ro_compat,
            features_incompat
        );
    }
    ranges(copy, ctx.g, place, ctx.report);
    unused(ctx, place, copy, &bytes);
}

/// Checks that a copy has nothing where nothing belongs.
fn unused(ctx: &Ctx<'_>, place: Place, copy: &Superblock, bytes: &[u8]) {
    // A copy that is as mkfs left it has none of what mounts add.
    if copy.inprogress == 1 {
        for (name, value) in [
            ("sb_uquotino", copy.uquotino.get()),
            ("sb_gquotino", copy.gquotino.get()),
            ("sb_pquotino", copy.pquotino.get()),
        ] {
            if value != 0 && value != NULLFSINO {
                ctx.report.differ(place, name, 0, value);
            }
        }
        if copy.qflags.get() != 0 {
            ctx.report.differ(place, "sb_qflags", 0, copy.qflags.get());
        }
    }
    // Fields that the file system's features do not have are zeros.
    let end = if !ctx.g.features.crc {
        SB_CRC_OFFSET - 16
    } else if ctx.g.features.meta_uuid {
        264
    } else {
        248
    };
    if bytes[end..].iter().any(|b| *b != 0) {
        ctx.report
            .bad(place, format!("bytes that are not zero after byte {end}"));
    }
}
