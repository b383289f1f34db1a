//! The headers and B-trees of the allocation groups, from what all inodes own.

use super::space::{self, fresh};
use super::{Mend, Place, Structure, fork, reader};
use crate::bulk::group::{Group, GroupTree, chunk_records};
use crate::bulk::space::{FreeRuns, Owner, normal, space_trees, subtract};
use crate::check::space::{BlockMap, Use};
use crate::format::*;
use crate::geometry::AgBlock;
use crate::read::inode::{Fork, Inode};

/// The blocks of a group, and their owners.
pub(crate) struct Owned {
    /// Runs without an owner.
    free_blocks: Vec<(u32, u32)>,
    /// Records of the reverse mapping tree: start, blocks, owner, offset.
    owners: Vec<Owner>,
    /// Runs that have one more owner, once for each.
    shared: Vec<(u32, u32)>,
    /// For each chunk: the inodes that are free or not there.
    free: Vec<u64>,
}

/// Builds all groups anew.
pub(crate) fn all(m: &mut Mend<'_>) {
    let owned: Vec<Owned> = match m.recount {
        true => walk(m),
        false => m.ags.iter_mut().map(owned).collect(),
    };
    let mut counts = Counts::default();
    for (agno, o) in (0..).zip(owned) {
        match group(m, agno, o) {
            Some(group) => counts += group,
            None => {
                let text = "no space for its B-trees";
                m.say(Place::ag(Structure::Group, agno), text);
            }
        }
    }
    counters(m, counts);
}

/// Sets the counters of the superblock.
pub(crate) fn counters(m: &mut Mend<'_>, counts: Counts) {
    let mut sb = m.sb;
    if sb.counts() != counts {
        sb.set_counts(counts);
        let Counts { icount, ifree, .. } = counts;
        let blocks = counts.fdblocks;
        let text = format!("counters set to {icount} inodes, {ifree} free, {blocks} free blocks");
        m.say(Place::ag(Structure::Superblock, 0), text);
    }
    m.put_superblock(sb);
}

/// The blocks and inodes of a group that were seen in use.
pub(crate) fn owned(ag: &mut space::AgToMend) -> Owned {
    let mut runs = std::mem::take(&mut ag.released);
    if let Some(map) = &ag.map {
        runs.extend(map.list(&[Use::Unknown]));
    }
    let mut free = vec![u64::MAX; ag.chunks.len()];
    for slot in (0..ag.kind.len()).filter(|s| ag.kind[*s] != 0) {
        free[slot / 64] &= !(1 << (slot % 64));
    }
    Owned {
        free_blocks: normal(runs),
        owners: std::mem::take(&mut ag.owners),
        shared: std::mem::take(&mut ag.shared),
        free,
    }
}

/// Walks all inodes.
fn walk(m: &mut Mend<'_>) -> Vec<Owned> {
    let groups = (0..m.g.agcount).zip(&m.ags);
    let mut maps: Vec<BlockMap> = groups
        .map(|(agno, ag)| fresh(&m.g, agno, &ag.chunks))
        .collect();
    let mut frees: Vec<Vec<u64>> = Vec::new();
    for ag in &mut m.ags {
        frees.push(vec![u64::MAX; ag.chunks.len()]);
        ag.owners.clear();
        ag.shared.clear();
    }
    m.recount = false;
    for agno in 0..m.g.agcount {
        reader::each(m, agno, false, &mut |m, ino, slot, raw| {
            let used = Be16::at(raw, 2).is_ok_and(|mode| mode.get() != 0);
            let Some(inode) = used.then(|| Inode::parse(ino, raw, &m.g).ok()).flatten() else {
                return;
            };
            frees[agno as usize][slot / 64] &= !(1 << (slot % 64));
            own(m, &inode, &mut maps);
        });
    }
    let ags = m.ags.iter_mut().zip(maps).zip(frees);
    ags.map(|((ag, map), free)| Owned {
        free_blocks: map.list(&[Use::Unknown]),
        owners: std::mem::take(&mut ag.owners),
        shared: std::mem::take(&mut ag.shared),
        free,
    })
    .collect()
}

/// Counts an inode's blocks as its own.
fn own(m: &mut Mend<'_>, inode: &Inode, maps: &mut [BlockMap]) {
    let g = m.g.clone();
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
            let new = if data { Use::Data } else { Use::Meta };
            for c in maps[a.agno as usize].claim(a.agbno, e.blockcount, new) {
                if data && c.was == Use::Data {
                    m.ags[a.agno as usize].shared.push((c.start, c.len));
                }
            }
        }
        for a in map.tree.iter().filter_map(|b| g.fsb(*b)) {
            maps[a.agno as usize].claim(a.agbno, 1, Use::Meta);
        }
        map.own(m, inode.ino, f);
    }
}

/// References of blocks with more than one: the records of the tree.
fn references(shared: &[(u32, u32)]) -> Vec<(u32, u32, u32)> {
    let edges = shared.iter().flat_map(|(s, n)| [(*s, 1), (s + n, -1)]);
    let mut edges: Vec<(u32, i64)> = edges.collect();
    edges.sort_unstable();
    let mut out: Vec<(u32, u32, u32)> = Vec::new();
    let (mut at, mut count) = (0, 1i64);
    for (edge, change) in edges {
        if edge > at && count > 1 {
            let count = u32::try_from(count).unwrap_or(REFC_MAX);
            match out.last_mut() {
                Some((s, n, c)) if *s + *n == at && *c == count => *n = edge - *s,
                _ => out.push((at, edge - at, count)),
            }
        }
        at = edge;
        count += change;
    }
    out
}

/// Builds a group; gives its inodes and free blocks. `None`: there is no space for its trees.
pub(crate) fn group(m: &mut Mend<'_>, agno: u32, o: Owned) -> Option<Counts> {
    let g = m.g.clone();
    let free = o.free_blocks;
    let ag = &mut m.ags[agno as usize];
    let used = ag.map.as_ref().map(|map| map.list(&[Use::Meta, Use::Data]));
    let mut before = used.unwrap_or_default();
    before.extend(ag.avoid.iter().chain(&ag.old));
    let fresh = subtract(&free, &normal(before));
    let reused = subtract(&free, &fresh);
    let mut pool = FreeRuns {
        usable: [fresh, reused].concat(),
        free,
        taken: Vec::new(),
    };
    for (c, free) in ag.chunks.iter_mut().zip(&o.free) {
        *c = InodeChunk::new(c.startino, c.holemask, *free);
    }
    let chunks = ag.chunks.clone();
    let mut trees = vec![pool.tree(&g, Btree::Ino, chunk_records(&chunks, g.features.sparse))?];
    if g.features.finobt {
        let with_free = chunks.iter().filter(|c| c.freecount > 0);
        trees.push(pool.tree(&g, Btree::Fino, chunk_records(with_free, g.features.sparse))?);
    }
    if g.features.reflink {
        let words = references(&o.shared).into_iter();
        let words = words.flat_map(|(start, blocks, count)| [start, blocks, count]);
        let records = words.flat_map(u32::to_be_bytes).collect();
        trees.push(pool.tree(&g, Btree::Refcount, records)?);
    }
    let mut owners = o.owners;
    if g.features.rmapbt {
        owners.extend(fixed(m, agno, &trees));
    }
    let free_list = space_trees(&g, owners, Vec::new(), &mut pool, &mut trees)?;
    let group = Group {
        agno,
        free: pool.rest(),
        chunks,
        trees,
        free_list,
    };
    for b in group.blocks(&g) {
        let daddr = g.daddr(AgBlock { agno, agbno: b.at });
        m.put_block(daddr, &b.bytes, BTREE_SHORT_CRC_OFFSET);
    }
    let places = [
        (AGF_SECTOR, AGF_CRC_OFFSET),
        (AGI_SECTOR, AGI_CRC_OFFSET),
        (AGFL_SECTOR, AGFL_CRC_OFFSET),
    ];
    for (sector, (n, crc)) in group.headers(&g).iter().zip(places) {
        m.put_block(g.ag_header_daddr(agno, n), sector, crc);
    }
    let text = "headers and B-trees built anew";
    m.say(Place::ag(Structure::Group, agno), text);
    Some(group.counts())
}

/// The owners that are no inodes.
fn fixed(m: &Mend<'_>, agno: u32, trees: &[GroupTree]) -> Vec<Owner> {
    let g = &m.g;
    let mut out = vec![(0, g.header_blocks(), RMAP_OWN_FS, 0)];
    if let Some(a) = g.fsb(g.logstart).filter(|a| a.agno == agno) {
        out.push((a.agbno, g.logblocks, RMAP_OWN_LOG, 0));
    }
    for (s, n) in space::chunk_runs(g, &m.ags[agno as usize].chunks) {
        out.push((s, n, RMAP_OWN_INODES, 0));
    }
    for t in trees {
        out.extend(t.at.iter().map(|b| (*b, 1, t.tree.owner(), 0)));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference counts that repair writes are those of the files that share the blocks.
    #[test]
    fn references_of_shared_runs() {
        assert_eq!(references(&[]), []);
        // Two more owners of a part, one of the rest; neighbours with as many are one.
        assert_eq!(
            references(&[(10, 10), (15, 5), (20, 4), (40, 1)]),
            [(10, 5, 2), (15, 5, 3), (20, 4, 2), (40, 1, 2)]
        );
        assert_eq!(references(&[(10, 10), (20, 4)]), [(10, 14, 2)]);
    }
}
