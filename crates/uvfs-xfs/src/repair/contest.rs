//! Decides which inode owns a block that more than one claims.
//!
//! A claim is proven by a record of the reverse mapping tree, or by a block of metadata that names its
//! owner.

use super::trees::records;
use super::{Mend, fork};
use crate::check::Structure;
use crate::format::*;
use crate::geometry::AgBlock;
use crate::read::inode::{Fork, Inode};
use std::collections::HashMap;

/// An inode's claim to blocks that more than one inode claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Claim {
    /// It claims none of them.
    None,
    /// Each of its claims is proven.
    Proven,
    /// A claim of its may be wrong.
    Unproven,
}

/// The records of the reverse mapping trees of groups with such blocks: start, blocks, owner.
pub(crate) type Owners = HashMap<u32, Vec<(u32, u32, u64)>>;

/// Reads them; a group whose tree cannot be followed has none.
pub(crate) fn owners(m: &Mend<'_>) -> Owners {
    let g = &m.g;
    let mut out = Owners::new();
    if !g.features.rmapbt {
        return out;
    }
    for (agno, _, _) in &m.findings.contested {
        if out.contains_key(agno) || *agno >= g.agcount {
            continue;
        }
        let mine = m.findings.contested.iter().filter(|c| c.0 == *agno);
        let runs: Vec<(u32, u32)> = mine.map(|c| (c.1, c.2)).collect();
        let mut found = Vec::new();
        let walked = records(m, *agno, Btree::Rmap, &mut |r: &RmapRecord| {
            let (s, n) = (r.startblock.get(), r.blockcount.get());
            if runs.iter().any(|run| overlap(*run, (s, n))) {
                found.push((s, n, r.owner.get()));
            }
        });
        if walked.is_whole() {
            out.insert(*agno, found);
        }
    }
    out
}

/// The extents of data forks with findings, as the reverse mapping trees have them.
pub(crate) fn mapped(m: &Mend<'_>) -> HashMap<u64, Vec<Extent>> {
    let mut out: HashMap<u64, Vec<Extent>> = HashMap::new();
    if !m.g.features.rmapbt {
        return out;
    }
    let parts = [
        Structure::Inode,
        Structure::DataFork,
        Structure::Tree(Btree::Bmap),
    ];
    let about = m.findings.about.iter();
    let bad = about.filter(|(_, about)| parts.iter().any(|p| about.contains(p)));
    out.extend(bad.map(|(ino, _)| (*ino, Vec::new())));
    if out.is_empty() {
        return out;
    }
    for agno in 0..m.g.agcount {
        records(m, agno, Btree::Rmap, &mut |r: &RmapRecord| {
            let offset = r.offset.get();
            if offset & (RMAP_OFF_ATTR_FORK | RMAP_OFF_BMBT_BLOCK) == 0
                && let Some(extents) = out.get_mut(&r.owner.get())
            {
                let agbno = r.startblock.get();
                let (from, run) = (extents.len(), (AgBlock { agno, agbno }, r.blockcount.get()));
                fork::append(m, extents, offset & RMAP_OFF_MASK, &[run]);
                let unwritten = offset & RMAP_OFF_UNWRITTEN != 0;
                let new = extents[from..].iter_mut();
                new.for_each(|e| e.unwritten = unwritten);
            }
        });
    }
    out
}

fn overlap(a: (u32, u32), b: (u32, u32)) -> bool {
    a.0 < b.0.saturating_add(b.1) && b.0 < a.0.saturating_add(a.1)
}

/// Judges an inode's claim to blocks that more than one inode claims.
pub(crate) fn claim(m: &Mend<'_>, inode: &Inode, owners: &Owners) -> Claim {
    let g = &m.g;
    let mut out = Claim::None;
    for f in [Fork::Data, Fork::Attr] {
        let Some(FORMAT_EXTENTS | FORMAT_BTREE) = inode.fork_format(f) else {
            continue;
        };
        let map = fork::read(m, inode, f);
        let data = f == Fork::Data && inode.file_type() == FileType::Regular;
        for e in &map.extents {
            let Some(a) = g.fsb_run(e.startblock, e.blockcount) else {
                continue;
            };
            let run = (a.agbno, e.blockcount);
            let mut mine = m.findings.contested.iter().filter(|c| c.0 == a.agno);
            if !mine.any(|c| overlap((c.1, c.2), run)) {
                continue;
            }
            let its = |(s, n, o): &(u32, u32, u64)| *o == inode.ino && overlap((*s, *n), run);
            let recorded = owners.get(&a.agno).is_some_and(|r| r.iter().any(its));
            out = out.max(match recorded || (!data && names(m, a, inode.ino)) {
                true => Claim::Proven,
                false => Claim::Unproven,
            });
        }
    }
    out
}

/// Whether a block of metadata names its owner.
fn names(m: &Mend<'_>, a: AgBlock, ino: u64) -> bool {
    let daddr = m.g.daddr(a);
    let bytes = m.block(daddr).unwrap_or_default();
    let dir = Dir3BlockHeader::at(&bytes, 0);
    let node = Da3BlockInfo::at(&bytes, 0);
    let remote = RemoteHeader::at(&bytes, 0);
    let is = |uuid: &Uuid, owner: u64, blkno: u64| {
        *uuid == m.g.meta_uuid && owner == ino && blkno == daddr
    };
    dir.is_ok_and(|h| is(&h.uuid, h.owner.get(), h.blkno.get()))
        || node.is_ok_and(|h| is(&h.uuid, h.owner.get(), h.blkno.get()))
        || remote.is_ok_and(|h| is(&h.uuid, h.owner.get(), h.blkno.get()))
}
