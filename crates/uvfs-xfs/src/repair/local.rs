//! Sets numbers that the check has counted and that nothing else depends on. The repair then reads nothing else, and
//! needs no second check.

use super::{Mend, log};
use crate::check::{Counter, Finding, Late, Place, Problem};
use crate::format::*;
use std::mem::offset_of;

/// Sets the counters, if all findings are about counters; or formats the log, if all are about log sequence numbers
/// ahead of it.
pub(crate) fn mend(m: &mut Mend<'_>, found: &[Finding], count: u64, late: Late) -> bool {
    if count > 0 && late.count == count {
        m.max_lsn = m.max_lsn.max(late.latest);
        return log::format(m, false);
    }
    let counter = |f: &Finding| match f.problem {
        Problem::Count {
            counter, expected, ..
        } => Some((f.place, counter, expected)),
        _ => None,
    };
    let counters: Option<Vec<_>> = found.iter().map(counter).collect();
    let Some(counters) = counters.filter(|c| c.len() as u64 == count) else {
        return false;
    };
    // All of them, or none.
    let there = |p: &Place| match (p.inode, p.ag) {
        (Some(ino), _) => m.raw(ino).is_some(),
        (None, agno) => agno.is_none_or(|agno| agno < m.g.agcount),
    };
    if !counters.iter().all(|(place, ..)| there(place)) {
        return false;
    }
    for (place, counter, value) in counters {
        set(m, place, counter, value);
    }
    true
}

/// Sets a counter, and tells it.
pub(crate) fn set(m: &mut Mend<'_>, place: Place, counter: Counter, value: u64) {
    let text = match counter {
        Counter::Links => format!("link count set to {value}"),
        _ => format!("{counter} set to {value}"),
    };
    m.say(place, text);
    let agf = |at| (AGF_SECTOR, at, AGF_CRC_OFFSET);
    let agi = |at| (AGI_SECTOR, at, AGI_CRC_OFFSET);
    let mut sb = m.sb;
    let (sector, at, crc) = match counter {
        Counter::Links => return links(m, place.inode.unwrap_or(0), value as u32),
        Counter::AgfFreeblks => agf(offset_of!(Agf, freeblks)),
        Counter::AgfLongest => agf(offset_of!(Agf, longest)),
        Counter::AgfBtreeblks => agf(offset_of!(Agf, btreeblks)),
        Counter::AgfRmapBlocks => agf(offset_of!(Agf, rmap_blocks)),
        Counter::AgfRefcountBlocks => agf(offset_of!(Agf, refcount_blocks)),
        Counter::AgiCount => agi(offset_of!(Agi, count)),
        Counter::AgiFreecount => agi(offset_of!(Agi, freecount)),
        Counter::AgiIblocks => agi(offset_of!(Agi, iblocks)),
        Counter::AgiFblocks => agi(offset_of!(Agi, fblocks)),
        Counter::SbIcount | Counter::SbIfree | Counter::SbFdblocks => {
            match counter {
                Counter::SbIcount => sb.icount.set(value),
                Counter::SbIfree => sb.ifree.set(value),
                _ => sb.fdblocks.set(value),
            }
            return m.put_superblock(sb);
        }
    };
    let (mut bytes, ident) = m.header(place.ag.unwrap_or(0), sector);
    if !bytes.is_empty() {
        Be32::new(value as u32).put(&mut bytes, at);
        m.put_block(ident.daddr, &bytes, crc);
    }
}

fn links(m: &mut Mend<'_>, ino: u64, value: u32) {
    if let Some(mut raw) = m.raw(ino) {
        Be32::new(value).put(&mut raw, offset_of!(DinodeV2, nlink));
        m.put_inode(ino, &mut raw);
    }
}
