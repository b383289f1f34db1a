//! Quota inodes: their records, and the usage that they say.

use super::runs::read_run;
use super::{Ctx, Place, Reader, Structure, Usage};
use crate::format::*;
use crate::read::inode::Inode;

/// User, group and project quota: the type of its records, and the flags that it was counted (`XFS_[UGP]QUOTA_CHKD`) and
/// that it is on.
pub(crate) const KINDS: [(Structure, u8, u16, u16); 3] = [
    (Structure::UserQuota, DQTYPE_USER, 0x0004, 0x0003),
    (Structure::GroupQuota, DQTYPE_GROUP, 0x0100, 0x00c0),
    (Structure::ProjectQuota, DQTYPE_PROJ, 0x0400, 0x0208),
];

impl Usage {
    /// Compares what was seen with what the records say.
    pub fn compare(&self, ctx: &Ctx<'_>) {
        let flags = ctx.sb.qflags.get();
        for (k, (what, _, checked, _)) in KINDS.into_iter().enumerate() {
            let there = ctx.g.quota_inodes[k].is_some();
            if !there || flags & checked == 0 {
                continue;
            }
            let place = Place::fs(what);
            let mut ids: Vec<u32> = self.seen[k].keys().copied().collect();
            ids.extend(self.recorded[k].keys());
            ids.sort_unstable();
            ids.dedup();
            for id in ids {
                let [seen, recorded] =
                    [&self.seen, &self.recorded].map(|ids| ids[k].get(&id).copied());
                let (seen, recorded) = (seen.unwrap_or_default(), recorded.unwrap_or_default());
                if seen != recorded {
                    let show = |(blocks, inodes)| format!("{blocks} blocks, {inodes} inodes");
                    let field = format!("usage of id {id}");
                    ctx.report.differ(place, field, show(seen), show(recorded));
                }
            }
        }
    }
}

/// Whether usage is to be counted.
pub(crate) fn counted(sb: &Superblock) -> bool {
    KINDS.iter().any(|kind| sb.qflags.get() & kind.2 != 0)
}

/// Checks the records of a quota inode.
pub(crate) fn records(ctx: &Ctx<'_>, rd: &mut Reader<'_>, inode: &Inode, extents: &[Extent]) {
    let (g, report) = (ctx.g, ctx.report);
    let Some(k) = g.quota_inodes.iter().position(|q| *q == Some(inode.ino)) else {
        return;
    };
    let (what, want, checked, _) = KINDS[k];
    let base = Place::inode(what, inode.ino);
    let per_block = g.block_size as usize / Dquot::SIZE;
    let counted = ctx.sb.qflags.get() & checked != 0;
    for e in extents.iter().filter(|e| !e.unwritten) {
        for b in e.startoff..e.end() {
            let Some((bytes, a)) = read_run(ctx, rd, base, extents, b, 1) else {
                continue;
            };
            let place = base.at(a.agno, a.agbno);
            let ident = g.ident(g.daddr(a), None);
            for i in 0..per_block {
                let id = b.saturating_mul(per_block as u64) + i as u64;
                let record = &bytes[i * Dquot::SIZE..(i + 1) * Dquot::SIZE];
                let Some(d) = report.sound(place, check_dquot(record, &ident)) else {
                    continue;
                };
                if u64::from(d.id.get()) != id {
                    report.differ(place, format!("d_id of record {i}"), id, d.id.get());
                }
                if d.r#type & !DQTYPE_BIGTIME != want {
                    report.differ(place, format!("d_type of record {i}"), want, d.r#type);
                }
                let used = (d.bcount.get(), d.icount.get());
                if counted
                    && used != (0, 0)
                    && let Some(u) = &ctx.counted.usage
                {
                    let mut u = u.lock().expect("no holder panics");
                    u.record(k, d.id.get(), used);
                }
            }
        }
    }
}
