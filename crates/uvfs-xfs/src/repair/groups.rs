//! The headers and B-trees of the allocation groups, from what all inodes own.

use super::space::{self, fresh, normal, subtract};
use super::{Mend, fork, reader};
use crate::bulk::btree::{Shape, build};
use crate::check::space::{BlockMap, Use};
use crate::check::{Place, Structure};
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use crate::inode::{Fork, Inode};

/// Blocks that the free list begins with.
const LIST: usize = 6;

/// The blocks of a group, and their owners.
pub(crate) struct Owned {
    /// Runs without an owner.
    free_blocks: Vec<(u32, u32)>,
    /// Records of the reverse mapping tree: start, blocks, owner, offset.
    owners: Vec<(u32, u32, u64, u64)>,
    /// Runs that have one more owner, once for each.
    shared: Vec<(u32, u32)>,
    /// For each chunk: the inodes that are free or not there.
    free: Vec<u64>,
}

/// A tree to be built.
struct TreePlan {
    tree: Btree,
    records: Vec<u8>,
    at: Vec<u32>,
}

/// Builds all groups anew.
pub(crate) fn all(m: &mut Mend<'_>) {
    let owned: Vec<Owned> = match m.recount {
        true => walk(m),
        false => m.ags.iter_mut().map(owned).collect(),
    };
    let (mut icount, mut ifree, mut fdblocks) = (0, 0, 0);
    for (agno, o) in owned.into_iter().enumerate() {
        match group(m, agno as u32, o) {
            Some((i, f, b)) => {
                icount += i;
                ifree += f;
                fdblocks += b;
            }
            None => {
                let text = "no space for its B-trees";
                m.say(Place::ag(Structure::Group, agno as u32), text);
            }
        }
    }
    counters(m, icount, ifree, fdblocks);
}

/// Sets the counters of the superblock.
pub(crate) fn counters(m: &mut Mend<'_>, icount: u64, ifree: u64, fdblocks: u64) {
    let mut sb = m.sb;
    let old = (sb.icount.get(), sb.ifree.get(), sb.fdblocks.get());
    if old != (icount, ifree, fdblocks) {
        sb.icount.set(icount);
        sb.ifree.set(ifree);
        sb.fdblocks.set(fdblocks);
        let text = format!("counters set to {icount} inodes, {ifree} free, {fdblocks} free blocks");
        m.say(Place::ag(Structure::Superblock, 0), text);
    }
    m.put_superblock(sb);
}

/// The blocks and inodes of a group that were seen in use.
pub(crate) fn owned(ag: &mut space::AgToMend) -> Owned {
    let mut runs = std::mem::take(&mut ag.released);
    if let Some(map) = &ag.map {
        map.runs(Use::Unknown, &mut |s, n| runs.push((s, n)));
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
    let mut maps: Vec<BlockMap> = (0..m.g.agcount)
        .map(|agno| {
            let chunks = &m.ags[agno as usize].chunks;
            fresh(&m.g, agno, chunks, m.g.ag_blocks(agno))
        })
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
    ags.map(|((ag, map), free)| {
        let mut free_blocks = Vec::new();
        map.runs(Use::Unknown, &mut |s, n| free_blocks.push((s, n)));
        Owned {
            free_blocks,
            owners: std::mem::take(&mut ag.owners),
            shared: std::mem::take(&mut ag.shared),
            free,
        }
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
    let mut edges: Vec<(u32, i64)> = Vec::with_capacity(shared.len() * 2);
    for (s, n) in shared {
        edges.push((*s, 1));
        edges.push((s + n, -1));
    }
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

/// Sorts owners, and joins those that go on.
fn joined(mut owners: Vec<(u32, u32, u64, u64)>) -> Vec<(u32, u32, u64, u64)> {
    owners.sort_unstable_by_key(|(s, n, owner, offset)| {
        (*s, *owner, offset & !RMAP_OFF_UNWRITTEN, *n)
    });
    let mut out: Vec<(u32, u32, u64, u64)> = Vec::with_capacity(owners.len());
    for (s, n, owner, offset) in owners {
        if let Some((start, len, o, off)) = out.last_mut() {
            let special = owner >> 63 != 0 || offset & RMAP_OFF_BMBT_BLOCK != 0;
            let goes_on = match special {
                true => *off == offset,
                false => off.wrapping_add(u64::from(*len)) == offset,
            };
            if *o == owner && *start + *len == s && goes_on {
                *len += n;
                continue;
            }
        }
        out.push((s, n, owner, offset));
    }
    out
}

/// Free runs that blocks of trees are taken from.
struct FreeRuns {
    free: Vec<(u32, u32)>,
    /// Taken from in this order: the first ones were not in use before.
    usable: Vec<(u32, u32)>,
    taken: Vec<(u32, u32)>,
}

impl FreeRuns {
    fn take(&mut self, n: usize) -> Option<Vec<u32>> {
        let mut out = Vec::with_capacity(n);
        while out.len() < n {
            let run = self.usable.iter_mut().find(|r| r.1 > 0)?;
            let k = (n - out.len()).min(run.1 as usize) as u32;
            out.extend(run.0..run.0 + k);
            self.taken.push((run.0, k));
            *run = (run.0 + k, run.1 - k);
        }
        Some(out)
    }

    /// The runs that are free in the end.
    fn rest(&self) -> Vec<(u32, u32)> {
        subtract(&self.free, &normal(self.taken.clone()))
    }
}

/// Builds a group: its inodes, those free, and its free blocks. `None`: there is no space for it.
pub(crate) fn group(m: &mut Mend<'_>, agno: u32, o: Owned) -> Option<(u64, u64, u64)> {
    let g = m.g.clone();
    let size = g.block_size as usize;
    let free = o.free_blocks;
    let ag = &mut m.ags[agno as usize];
    let mut before = Vec::new();
    if let Some(map) = &ag.map {
        for u in [Use::Meta, Use::Data] {
            map.runs(u, &mut |s, n| before.push((s, n)));
        }
    }
    before.extend(ag.avoid.iter().chain(&ag.old));
    let fresh = subtract(&free, &normal(before));
    let reused = subtract(&free, &fresh);
    let mut pool = FreeRuns {
        usable: [fresh, reused].concat(),
        free,
        taken: Vec::new(),
    };
    let mut chunks = Vec::with_capacity(ag.chunks.len());
    for (c, free) in ag.chunks.iter_mut().zip(&o.free) {
        let mut chunk = InodeChunk {
            startino: c.start,
            holemask: c.holemask,
            count: 0,
            freecount: 0,
            free: *free,
        };
        let holes = chunk.holes();
        chunk.free |= holes;
        chunk.count = 64 - holes.count_ones();
        chunk.freecount = (chunk.free & !holes).count_ones();
        c.free = chunk.free;
        chunks.push(chunk);
    }
    let pack = |chunks: &mut dyn Iterator<Item = &InodeChunk>| {
        let mut out = Vec::new();
        for c in chunks {
            out.extend_from_slice(zerocopy::IntoBytes::as_bytes(&InobtRecord::pack(c)));
        }
        out
    };
    let mut plans = Vec::new();
    let mut plan = |tree: Btree, records: Vec<u8>, pool: &mut FreeRuns| {
        let n = records.len() / tree.record_len();
        let at = pool.take(Shape::new(tree, size, n).blocks())?;
        plans.push(TreePlan { tree, records, at });
        Some(())
    };
    plan(Btree::Ino, pack(&mut chunks.iter()), &mut pool)?;
    if g.features.finobt {
        let mut with = chunks.iter().filter(|c| c.freecount > 0);
        plan(Btree::Fino, pack(&mut with), &mut pool)?;
    }
    if g.features.reflink {
        let mut out = Vec::new();
        for (s, n, c) in references(&o.shared) {
            for word in [s, n, c] {
                out.extend_from_slice(&word.to_be_bytes());
            }
        }
        plan(Btree::Refcount, out, &mut pool)?;
    }
    space_trees(m, agno, o.owners, &mut pool, &mut plans)?;
    Some(write(m, agno, &chunks, &pool, plans))
}

/// The owners that are no inodes.
fn fixed(m: &Mend<'_>, agno: u32, plans: &[TreePlan]) -> Vec<(u32, u32, u64, u64)> {
    let g = &m.g;
    let mut out = vec![(0, g.header_blocks(), RMAP_OWN_FS, 0)];
    if let Some(a) = g.fsb(g.logstart).filter(|a| a.agno == agno) {
        out.push((a.agbno, g.logblocks, RMAP_OWN_LOG, 0));
    }
    for (s, n) in space::chunk_runs(g, &m.ags[agno as usize].chunks) {
        out.push((s, n, RMAP_OWN_INODES, 0));
    }
    for p in plans {
        let owner = match p.tree {
            Btree::Refcount => RMAP_OWN_REFC,
            _ => RMAP_OWN_INOBT,
        };
        out.extend(p.at.iter().map(|b| (*b, 1, owner, 0)));
    }
    out
}

/// Plans the trees of free space and owners, which take blocks from what they describe. Blocks that
/// are taken and not needed go to the free list.
fn space_trees(
    m: &Mend<'_>,
    agno: u32,
    mut owners: Vec<(u32, u32, u64, u64)>,
    pool: &mut FreeRuns,
    plans: &mut Vec<TreePlan>,
) -> Option<()> {
    let g = &m.g;
    let size = g.block_size as usize;
    let rmap = g.features.rmapbt;
    if rmap {
        owners.extend(fixed(m, agno, plans));
    }
    let mut own: Vec<u32> = Vec::new();
    let shape = |tree, n| Shape::new(tree, size, n).blocks();
    let owners = joined(owners);
    let (records, each, wide) = loop {
        let rest = pool.rest();
        let mut all = Vec::new();
        if rmap {
            all.clone_from(&owners);
            all.extend(own.iter().map(|b| (*b, 1, RMAP_OWN_AG, 0)));
            all = joined(all);
        }
        let each = shape(Btree::Bno, rest.len());
        let wide = if rmap {
            shape(Btree::Rmap, all.len())
        } else {
            0
        };
        let need = 2 * each + wide;
        if own.len() >= need {
            break (all, each, wide);
        }
        let free: usize = rest.iter().map(|(_, n)| *n as usize).sum();
        let spare = LIST.min((free / 4).saturating_sub(need));
        own.extend(pool.take(need + spare - own.len())?);
    };
    let rest = pool.rest();
    let pack = |runs: &[(u32, u32)]| {
        let words = runs.iter().flat_map(|(s, n)| [*s, *n]);
        words.flat_map(u32::to_be_bytes).collect::<Vec<u8>>()
    };
    let mut sorted = rest.clone();
    sorted.sort_unstable_by_key(|(s, n)| (*n, *s));
    let mut at = own.into_iter();
    let mut some = |n: usize| at.by_ref().take(n).collect::<Vec<u32>>();
    let (bno, cnt, rm) = (some(each), some(each), some(wide));
    plans.push(TreePlan {
        tree: Btree::Bno,
        records: pack(&rest),
        at: bno,
    });
    plans.push(TreePlan {
        tree: Btree::Cnt,
        records: pack(&sorted),
        at: cnt,
    });
    if rmap {
        let mut bytes = Vec::with_capacity(records.len() * RmapRecord::SIZE);
        for (s, n, owner, offset) in records {
            bytes.extend_from_slice(&s.to_be_bytes());
            bytes.extend_from_slice(&n.to_be_bytes());
            bytes.extend_from_slice(&owner.to_be_bytes());
            bytes.extend_from_slice(&offset.to_be_bytes());
        }
        plans.push(TreePlan {
            tree: Btree::Rmap,
            records: bytes,
            at: rm,
        });
    }
    // The free list, as a plan without a tree.
    plans.push(TreePlan {
        tree: Btree::Bmap,
        records: Vec::new(),
        at: at.collect(),
    });
    Some(())
}

/// Notes the root, the levels and the blocks of a tree in the headers of its group.
fn set_root(g: &Geometry, p: &TreePlan, agf: &mut Agf, agi: &mut Agi) {
    let be = Be32::new;
    let n = p.records.len() / p.tree.record_len();
    let levels = be(Shape::new(p.tree, g.block_size as usize, n).levels() as u32);
    let (root, blocks) = (be(p.at[0]), be(p.at.len() as u32));
    match p.tree {
        Btree::Bno => (agf.bno_root, agf.bno_level) = (root, levels),
        Btree::Cnt => (agf.cnt_root, agf.cnt_level) = (root, levels),
        Btree::Rmap => {
            (agf.rmap_root, agf.rmap_level) = (root, levels);
            agf.rmap_blocks = blocks;
        }
        Btree::Refcount => {
            (agf.refcount_root, agf.refcount_level) = (root, levels);
            agf.refcount_blocks = blocks;
        }
        Btree::Ino => {
            (agi.root, agi.level) = (root, levels);
            agi.iblocks = blocks;
        }
        _ => {
            (agi.free_root, agi.free_level) = (root, levels);
            agi.fblocks = blocks;
        }
    }
}

/// Writes a group's trees and headers.
fn write(
    m: &mut Mend<'_>,
    agno: u32,
    chunks: &[InodeChunk],
    pool: &FreeRuns,
    plans: Vec<TreePlan>,
) -> (u64, u64, u64) {
    let g = m.g.clone();
    let be = Be32::new;
    use zerocopy::FromZeros;
    let (mut agf, mut agi) = (Agf::new_zeroed(), Agi::new_zeroed());
    let mut list = Vec::new();
    let mut tree_blocks = 0;
    for p in plans {
        if p.tree == Btree::Bmap {
            list = p.at;
            continue;
        }
        set_root(&g, &p, &mut agf, &mut agi);
        if matches!(p.tree, Btree::Bno | Btree::Cnt | Btree::Rmap) {
            tree_blocks += p.at.len() as u32 - 1;
        }
        for b in build(&g, agno, p.tree, &p.records, &p.at) {
            let daddr = g.daddr(AgBlock { agno, agbno: b.at });
            m.put_block(daddr, &b.bytes, BTREE_SHORT_CRC_OFFSET);
        }
    }
    if !g.features.inobtcount {
        (agi.iblocks, agi.fblocks) = (be(0), be(0));
    }
    let rest = pool.rest();
    let free: u64 = rest.iter().map(|(_, n)| u64::from(*n)).sum();
    let slots = (g.sector_size as usize - Agfl::SIZE) / 4;
    agf.magicnum = be(AGF_MAGIC);
    agf.versionnum = be(1);
    agf.seqno = be(agno);
    agf.length = be(g.ag_blocks(agno));
    agf.fllast = be(match list.len() {
        0 => slots as u32 - 1,
        n => n as u32 - 1,
    });
    agf.flcount = be(list.len() as u32);
    agf.freeblks = be(free as u32);
    agf.longest = be(rest.iter().map(|(_, n)| *n).max().unwrap_or(0));
    agf.btreeblks = be(tree_blocks);
    agf.uuid = g.meta_uuid;
    let inodes: u64 = chunks.iter().map(|c| u64::from(c.count)).sum();
    let ifree: u64 = chunks.iter().map(|c| u64::from(c.freecount)).sum();
    agi.magicnum = be(AGI_MAGIC);
    agi.versionnum = be(1);
    agi.seqno = be(agno);
    agi.length = be(g.ag_blocks(agno));
    agi.count = be(inodes as u32);
    agi.freecount = be(ifree as u32);
    agi.newino = be(chunks.last().map_or(NULLAGINO, |c| c.startino));
    agi.dirino = be(NULLAGINO);
    agi.unlinked = [be(NULLAGINO); AGI_UNLINKED_BUCKETS];
    agi.uuid = g.meta_uuid;
    let sector = g.sector_size as usize;
    let put = |n: u32, bytes: &[u8], crc: usize| {
        m.put_block(g.ag_header_daddr(agno, n), bytes, crc);
    };
    let mut bytes = vec![0; sector];
    agf.put(&mut bytes, 0);
    put(AGF_SECTOR, &bytes, AGF_CRC_OFFSET);
    bytes.fill(0);
    agi.put(&mut bytes, 0);
    put(AGI_SECTOR, &bytes, AGI_CRC_OFFSET);
    crate::mkfs::free_list(&g, agno, &list, &mut bytes);
    put(AGFL_SECTOR, &bytes, AGFL_CRC_OFFSET);
    m.say(
        Place::ag(Structure::Group, agno),
        "headers and B-trees built anew",
    );
    (
        inodes,
        ifree,
        free + list.len() as u64 + u64::from(tree_blocks),
    )
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

    /// Records of one owner that go on are joined, as xfs_repair requires.
    #[test]
    fn owners_that_go_on_are_one() {
        let ino = 131;
        let records = joined(vec![
            (14, 2, ino, 4),
            (10, 4, ino, 0),
            (16, 1, ino, 6 | RMAP_OFF_UNWRITTEN),
            (30, 1, RMAP_OWN_AG, 0),
            (31, 1, RMAP_OWN_AG, 0),
            (32, 1, RMAP_OWN_REFC, 0),
        ]);
        assert_eq!(
            records,
            [
                (10, 6, ino, 0),
                (16, 1, ino, 6 | RMAP_OFF_UNWRITTEN),
                (30, 2, RMAP_OWN_AG, 0),
                (32, 1, RMAP_OWN_REFC, 0),
            ]
        );
    }
}
