//! Compares the copies of the superblock.

use super::super::superblock::ranges;
use super::super::{Ctx, Place, Structure};
use super::GroupCheck;
use crate::format::*;
use zerocopy::IntoBytes;

/// The fields that are the same in all superblocks of a file system.
const SHARED: &str = "blocksize dblocks rblocks rextents logstart rextsize agblocks agcount \
    rbmblocks logblocks sectsize inodesize inopblock blocklog sectlog inodelog inopblog agblklog \
    rextslog inoalignmt unit width dirblklog logsectlog logsectsize logsunit";
/// Those that only version 5 has.
const SHARED_V5: &str =
    "spino_align features2 features_compat features_ro_compat features_incompat";

impl GroupCheck<'_, '_, '_> {
    pub(super) fn superblock_copy(&mut self) {
        let (ctx, sb) = (self.ctx, self.ctx.sb);
        let report = ctx.report;
        let place = Place::ag(Structure::SuperblockCopy, self.agno);
        let Some((bytes, _)) = self.sector(place, 0) else {
            return;
        };
        let Some(copy) = report.sound(place, check_superblock(&bytes)) else {
            return;
        };
        ctx.lsn(place, &bytes, 240);
        let v5 = if ctx.g.features.crc { SHARED_V5 } else { "" };
        let shared: Vec<&str> = [SHARED, v5]
            .iter()
            .flat_map(|s| s.split_whitespace())
            .collect();
        for f in Superblock::FIELDS {
            let number = |sb: &Superblock| {
                let bytes = sb.as_bytes()[f.at..f.at + f.len].iter();
                bytes.fold(0, |n, b| n << 8 | u64::from(*b))
            };
            if shared.contains(&f.name) && number(sb) != number(copy) {
                report.differ(place, format!("sb_{}", f.name), number(sb), number(copy));
            }
        }
        if copy.uuid != sb.uuid {
            let (e, f) = (format_uuid(&sb.uuid), format_uuid(&copy.uuid));
            report.differ(place, "sb_uuid", e, f);
        }
        let sticky = VERSION_ATTR | VERSION_QUOTA | VERSION_NLINK;
        let version = |s: &Superblock| format!("{:#x}", s.versionnum.get() & !sticky);
        report.same(place, "sb_versionnum", version(sb), version(copy));
        ranges(copy, ctx.g, place, report);
        unused(ctx, place, copy, &bytes);
    }
}

/// Checks that a copy has nothing where nothing belongs.
fn unused(ctx: &Ctx<'_>, place: Place, copy: &Superblock, bytes: &[u8]) {
    // A copy that is as mkfs left it has none of what mounts add.
    if copy.inprogress == 1 {
        for (name, ino) in copy.quota_inodes() {
            if ino != 0 && ino != NULLFSINO {
                ctx.report.differ(place, name, 0, ino);
            }
        }
        ctx.report.same(place, "sb_qflags", 0, copy.qflags.get());
    }
    // Fields that the file system's features do not have are zeros.
    let end = match (ctx.g.features.crc, ctx.g.features.meta_uuid) {
        (false, _) => SB_CRC_OFFSET - 16,
        (true, true) => 264,
        (true, false) => 248,
    };
    if bytes[end..].iter().any(|b| *b != 0) {
        let text = format!("bytes that are not zero after byte {end}");
        ctx.report.bad(place, text);
    }
}
