//! Quota inodes and their records.

use super::{Mend, Place, fork};
use crate::check::quota::KINDS;
use crate::format::*;
use crate::read::inode::{Fork, Inode};

/// Repairs the quota inodes: their records, and whether they are to be counted again.
pub(crate) fn all(m: &mut Mend<'_>) {
    let mut sb = m.sb;
    let inodes = m.g.quota_inodes;
    for (k, (what, kind, checked, on)) in KINDS.into_iter().enumerate() {
        let Some(ino) = inodes[k] else { continue };
        let regular = m.kind_of(ino) == FileType::Regular;
        let twice = inodes[..k].contains(&Some(ino)) || ino == m.g.rootino;
        let records = m.is_about(ino, what);
        if !regular || twice {
            [&mut sb.uquotino, &mut sb.gquotino, &mut sb.pquotino][k].set(0);
            sb.qflags.set(sb.qflags.get() & !(checked | on));
            m.say(Place::inode(what, ino), "taken away: it is no file");
        } else if records || m.hurt(what, 0) {
            if records {
                dquots(m, ino, kind);
            }
            sb.qflags.set(sb.qflags.get() & !checked);
            m.say(Place::fs(what), "to be counted again at the next mount");
        }
    }
    if zerocopy::IntoBytes::as_bytes(&sb) != zerocopy::IntoBytes::as_bytes(&m.sb) {
        m.put_superblock(sb);
    }
}

/// Resets the records of a quota inode that make no sense.
fn dquots(m: &mut Mend<'_>, ino: u64, kind: u8) {
    let g = m.g.clone();
    let Some(Ok(inode)) = m.raw(ino).map(|raw| Inode::parse(ino, &raw, &g)) else {
        return;
    };
    let map = fork::read(m, &inode, Fork::Data);
    let per = g.block_size as usize / Dquot::SIZE;
    for e in map.extents.iter().filter(|e| !e.unwritten) {
        for i in 0..u64::from(e.blockcount) {
            let Some(at) = map.offset(m, e.startoff + i, 1) else {
                continue;
            };
            let Ok(mut bytes) = m.disk.get(at, g.block_size as usize) else {
                continue;
            };
            let ident = g.ident(at >> 9, None);
            let mut changed = false;
            for k in 0..per {
                let id = ((e.startoff + i) * per as u64 + k as u64) as u32;
                let record = &mut bytes[k * Dquot::SIZE..(k + 1) * Dquot::SIZE];
                let fine = |record: &[u8]| {
                    check_dquot(record, &ident)
                        .is_ok_and(|d| d.id.get() == id && d.r#type & !DQTYPE_BIGTIME == kind)
                };
                if fine(record) {
                    continue;
                }
                changed = true;
                // Limits are kept where only the checksum is wrong.
                let kept = summed(record, DQUOT_CRC_OFFSET);
                if fine(&kept) {
                    record.copy_from_slice(&kept);
                    continue;
                }
                record.fill(0);
                use zerocopy::FromZeros;
                let mut d = Dquot::new_zeroed();
                d.magic.set(DQUOT_MAGIC);
                d.version = 1;
                d.r#type = kind;
                d.id.set(id);
                d.uuid = g.meta_uuid;
                d.put(record, 0);
                store_crc(record, DQUOT_CRC_OFFSET);
            }
            if changed {
                m.disk.write(at, &bytes);
            }
        }
    }
}
