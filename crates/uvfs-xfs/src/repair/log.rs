//! An empty log.

use super::{Mend, Place, Structure};
use crate::format::*;

const BLOCK: usize = 512;
/// Cycles that are gone on by, as xfs_repair does.
const AHEAD: u64 = 3;
/// Cycles after this one are left for the log's use.
const LAST_CYCLE: u64 = u32::MAX as u64 / 2;

/// Writes an empty log whose cycle comes after all that metadata speaks of. Gives whether there is such a
/// cycle.
pub(crate) fn format(m: &mut Mend<'_>, replayed: bool) -> bool {
    let g = m.g.clone();
    let start = match (g.logstart, g.fsb_run(g.logstart, g.logblocks)) {
        (0, _) => 0,
        (_, Some(a)) => g.daddr(a) << 9,
        (_, None) => return false,
    };
    let disk = m.disk.of_log();
    let len = (g.logblocks as usize) << g.blocklog;
    let mut old = vec![0; len.min(1 << 20)];
    let _ = crate::Blocks::read_data(disk, start, &mut old);
    // The cycle of the records that there are, of inodes and of the superblock.
    let heads = old
        .chunks_exact(BLOCK)
        .filter_map(|b| LogRecordHeader::at(b, 0).ok())
        .filter(|h| h.magicno.get() == LOG_RECORD_MAGIC && h.fs_uuid == g.uuid)
        .map(|h| u64::from(h.cycle.get()));
    let most = heads.max().unwrap_or(0);
    let most = most.max(m.sb.lsn.get() >> 32).max(m.max_lsn >> 32);
    let cycle = (most + AHEAD).min(LAST_CYCLE) as u32;
    let mut bytes = crate::mkfs::log_of_cycle(&g, cycle, 1);
    bytes.truncate(len);
    // The blocks after the record are of the cycle before.
    for block in bytes.chunks_exact_mut(BLOCK) {
        if block[..4] == [0; 4] {
            Be32::new(cycle - 1).put(block, 0);
        }
    }
    disk.write(start, &bytes);
    let mut rest = vec![0; 64 << 10];
    for block in rest.chunks_exact_mut(BLOCK) {
        Be32::new(cycle - 1).put(block, 0);
    }
    let mut at = bytes.len();
    while at < len {
        let n = (len - at).min(rest.len());
        disk.write(start + at as u64, &rest[..n]);
        at += n;
    }
    m.log_formatted = true;
    if m.sb.lsn.get() >> 32 >= u64::from(cycle) {
        let mut sb = m.sb;
        sb.lsn.set(0);
        m.put_superblock(sb);
    }
    let text = match replayed {
        true => "replayed, and written anew, empty",
        false => "written anew, empty: what it held is lost",
    };
    m.say(Place::fs(Structure::Log), text);
    u64::from(cycle) > most
}
