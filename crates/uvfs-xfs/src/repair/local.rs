//! Numbers that the check has counted, and that nothing else depends on: they are set, and neither
//! is anything else read, nor need all be checked again.

use super::{Mend, log};
use crate::check::{Finding, Late};
use crate::format::*;

/// A field that a finding is about.
enum Field {
    Links(u64),
    Agf(u32),
    Agi(u32),
    Superblock,
}

/// Fields of which the checker says by their name what should be there.
const NAMES: [&str; 13] = [
    "di_nlink",
    "agf_freeblks",
    "agf_longest",
    "agf_btreeblks",
    "agf_rmap_blocks",
    "agf_refcount_blocks",
    "agi_count",
    "agi_freecount",
    "agi_iblocks",
    "agi_fblocks",
    "sb_icount",
    "sb_ifree",
    "sb_fdblocks",
];

/// The field, and what should be there.
fn field(f: &Finding) -> Option<(Field, u64)> {
    if !NAMES.contains(&f.problem.as_str()) {
        return None;
    }
    let value = f.expected.as_ref()?.parse().ok()?;
    let field = match (f.what, f.inode, f.ag) {
        ("inode", Some(ino), _) => Field::Links(ino),
        ("AGF", None, Some(agno)) => Field::Agf(agno),
        ("AGI", None, Some(agno)) => Field::Agi(agno),
        ("superblock", None, _) => Field::Superblock,
        _ => return None,
    };
    Some((field, value))
}

/// Sets the fields right, if all findings are about such; or formats the log, if all are about log
/// sequence numbers that are ahead of it.
pub(crate) fn mend(m: &mut Mend<'_>, found: &[Finding], count: u64, late: Late) -> bool {
    if count > 0 && late.count == count {
        m.max_lsn = m.max_lsn.max(late.latest);
        return log::format(m);
    }
    let fields: Option<Vec<(Field, u64)>> = found.iter().map(field).collect();
    let Some(fields) = fields.filter(|f| f.len() as u64 == count) else {
        return false;
    };
    // All of them, or none.
    let there = fields.iter().all(|(field, _)| match field {
        Field::Links(ino) => m.raw(*ino).is_some(),
        Field::Agf(agno) | Field::Agi(agno) => *agno < m.g.agcount,
        Field::Superblock => true,
    });
    if !there {
        return false;
    }
    for ((field, value), f) in fields.iter().zip(found) {
        let name = f.problem.as_str();
        match field {
            Field::Links(ino) => links(m, *ino, *value as u32),
            Field::Agf(agno) => header(m, *agno, AGF_SECTOR, name, *value as u32),
            Field::Agi(agno) => header(m, *agno, AGI_SECTOR, name, *value as u32),
            Field::Superblock => {
                let mut sb = m.sb;
                match name {
                    "sb_icount" => sb.icount.set(*value),
                    "sb_ifree" => sb.ifree.set(*value),
                    _ => sb.fdblocks.set(*value),
                }
                m.put_superblock(sb);
            }
        }
        let text = match field {
            Field::Links(_) => format!("link count set to {value}"),
            _ => format!("{name} set to {value}"),
        };
        m.say(f.what, f.ag, f.inode, text);
    }
    true
}

fn links(m: &mut Mend<'_>, ino: u64, value: u32) {
    let Some(mut raw) = m.raw(ino) else { return };
    let Ok(d) = Dinode::at(&raw, 0) else { return };
    let mut d = *d;
    d.v2.nlink.set(value);
    d.put(&mut raw, 0);
    m.put_inode(ino, &mut raw);
}

fn header(m: &mut Mend<'_>, agno: u32, sector: u32, name: &str, value: u32) {
    let daddr = m.g.ag_header_daddr(agno, sector);
    let Ok(mut bytes) = m.disk.get(daddr << 9, m.g.sector_size as usize) else {
        return;
    };
    let value = Be32::new(value);
    if let (AGF_SECTOR, Ok(agf)) = (sector, Agf::at(&bytes, 0)) {
        let mut agf = *agf;
        match name {
            "agf_freeblks" => agf.freeblks = value,
            "agf_longest" => agf.longest = value,
            "agf_btreeblks" => agf.btreeblks = value,
            "agf_rmap_blocks" => agf.rmap_blocks = value,
            _ => agf.refcount_blocks = value,
        }
        agf.put(&mut bytes, 0);
        m.put_block(daddr, &bytes, AGF_CRC_OFFSET);
    } else if let Ok(agi) = Agi::at(&bytes, 0) {
        let mut agi = *agi;
        match name {
            "agi_count" => agi.count = value,
            "agi_freecount" => agi.freecount = value,
            "agi_iblocks" => agi.iblocks = value,
            _ => agi.fblocks = value,
        }
        agi.put(&mut bytes, 0);
        m.put_block(daddr, &bytes, AGI_CRC_OFFSET);
    }
}
