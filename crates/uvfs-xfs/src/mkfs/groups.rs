//! The headers and B-trees of the allocation groups, once everything is allocated.

use super::MkfsError;
use super::layout::FixedBlocks;
use super::meta::Metadata;
use super::space::{Finished, Full, SpaceMap};
use crate::bulk::btree::{Shape, build};
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use crate::verifier;

/// The counters of the superblock.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    pub inodes: u64,
    pub free_inodes: u64,
    pub free_blocks: u64,
}

/// Writes the B-trees of all groups, and gives the counts and, for each group, its headers less the
/// superblock.
pub(crate) fn trees(
    l: &FixedBlocks,
    space: &mut SpaceMap,
    meta: &mut Metadata<'_>,
) -> Result<(Counts, Vec<Vec<u8>>), MkfsError> {
    let mut counts = Counts::default();
    let mut headers = Vec::with_capacity(l.g.agcount as usize);
    for agno in 0..l.g.agcount {
        let f = space.finish(l, agno).map_err(|Full| MkfsError::NoSpace {
            path: "the B-trees of an allocation group".into(),
            size: l.g.data_bytes(),
        })?;
        headers.push(group(l, agno, &f, meta, &mut counts)?);
    }
    Ok((counts, headers))
}

/// Writes the trees of a group; their levels.
fn put_trees(
    g: &Geometry,
    agno: u32,
    f: &Finished,
    meta: &mut Metadata<'_>,
) -> Result<Vec<u32>, MkfsError> {
    let free_record = |(at, n): &(u32, u32)| {
        let r = AllocRecord {
            startblock: Be32::new(*at),
            blockcount: Be32::new(*n),
        };
        [r.startblock.to_bytes(), r.blockcount.to_bytes()].concat()
    };
    let by_block: Vec<u8> = f.free.iter().flat_map(free_record).collect();
    let mut sorted = f.free.clone();
    sorted.sort_unstable_by_key(|(at, n)| (*n, *at));
    let by_size: Vec<u8> = sorted.iter().flat_map(free_record).collect();
    let chunk_records = |chunks: &[InodeChunk]| -> Vec<u8> {
        let mut out = vec![0; chunks.len() * InobtRecord::SIZE];
        for (i, c) in chunks.iter().enumerate() {
            InobtRecord::pack(c).put(&mut out, i * InobtRecord::SIZE);
        }
        out
    };
    let (chunks, with_free) = (chunk_records(&f.chunks), chunk_records(&f.with_free));
    let mut levels = Vec::new();
    for (tree, records, at) in [
        (Btree::Bno, &by_block, &f.bno),
        (Btree::Cnt, &by_size, &f.cnt),
        (Btree::Ino, &chunks, &f.ino),
        (Btree::Fino, &with_free, &f.fino),
        (Btree::Refcount, &Vec::new(), &f.refcount),
    ] {
        for b in build(g, agno, tree, records, at) {
            let daddr = g.daddr(AgBlock { agno, agbno: b.at });
            meta.put(daddr, &b.bytes, verifier::BTREE_SHORT)?;
        }
        let n = records.len() / tree.record_len();
        levels.push(Shape::new(tree, g.block_size as usize, n).levels() as u32);
    }
    Ok(levels)
}

fn group(
    l: &FixedBlocks,
    agno: u32,
    f: &Finished,
    meta: &mut Metadata<'_>,
    counts: &mut Counts,
) -> Result<Vec<u8>, MkfsError> {
    let g = &l.g;
    let levels = put_trees(g, agno, f, meta)?;
    let free: u64 = f.free.iter().map(|(_, n)| u64::from(*n)).sum();
    let inodes: u64 = f.chunks.iter().map(|c| u64::from(c.count)).sum();
    let free_inodes: u64 = f.chunks.iter().map(|c| u64::from(c.freecount)).sum();
    let mut list: Vec<u32> = (0..l.free_list)
        .map(|i| l.free_list_start(agno) + i)
        .collect();
    list.extend_from_slice(&f.left_over);
    let tree_blocks = f.bno.len() + f.cnt.len() - 2;
    counts.inodes += inodes;
    counts.free_inodes += free_inodes;
    counts.free_blocks += free + list.len() as u64 + tree_blocks as u64;

    let sector = g.sector_size as usize;
    let mut bytes = vec![0; l.header_blocks as usize * g.block_size as usize];
    let header = |n: u32| n as usize * sector;
    let uuid = g.meta_uuid;
    let be = Be32::new;
    Agf {
        magicnum: be(AGF_MAGIC),
        versionnum: be(1),
        seqno: be(agno),
        length: be(g.ag_blocks(agno)),
        bno_root: be(f.bno[0]),
        cnt_root: be(f.cnt[0]),
        rmap_root: be(0),
        bno_level: be(levels[0]),
        cnt_level: be(levels[1]),
        rmap_level: be(0),
        flfirst: be(0),
        fllast: be(list.len() as u32 - 1),
        flcount: be(list.len() as u32),
        freeblks: be(free as u32),
        longest: be(f.free.iter().map(|(_, n)| *n).max().unwrap_or(0)),
        btreeblks: be(tree_blocks as u32),
        uuid,
        rmap_blocks: be(0),
        refcount_blocks: be(f.refcount.len() as u32),
        refcount_root: be(f.refcount[0]),
        refcount_level: be(levels[4]),
        spare64: [Be64::new(0); 14],
        lsn: Be64::new(0),
        crc: Le32::new(0),
        spare2: be(0),
    }
    .put(&mut bytes, header(AGF_SECTOR));
    let last = f.chunks.last().map_or(NULLAGINO, |c| c.startino);
    Agi {
        magicnum: be(AGI_MAGIC),
        versionnum: be(1),
        seqno: be(agno),
        length: be(g.ag_blocks(agno)),
        count: be(inodes as u32),
        root: be(f.ino[0]),
        level: be(levels[2]),
        freecount: be(free_inodes as u32),
        newino: be(last),
        dirino: be(NULLAGINO),
        unlinked: [be(NULLAGINO); AGI_UNLINKED_BUCKETS],
        uuid,
        crc: Le32::new(0),
        pad32: be(0),
        lsn: Be64::new(0),
        free_root: be(f.fino[0]),
        free_level: be(levels[3]),
        iblocks: be(f.ino.len() as u32),
        fblocks: be(f.fino.len() as u32),
    }
    .put(&mut bytes, header(AGI_SECTOR));
    free_list(g, agno, &list, &mut bytes[header(AGFL_SECTOR)..][..sector]);
    Ok(bytes)
}

/// Fills the sector of a free list.
pub(crate) fn free_list(g: &Geometry, agno: u32, list: &[u32], sector: &mut [u8]) {
    sector.fill(0xff);
    Agfl {
        magicnum: Be32::new(AGFL_MAGIC),
        seqno: Be32::new(agno),
        uuid: g.meta_uuid,
        lsn: Be64::new(0),
        crc: Le32::new(0),
    }
    .put(sector, 0);
    let slots = (sector.len() - Agfl::SIZE) / 4;
    for (i, b) in list.iter().take(slots).enumerate() {
        Be32::new(*b).put(sector, Agfl::SIZE + i * 4);
    }
    // The rest of the sector after the last whole slot is zeros.
    sector[Agfl::SIZE + slots * 4..].fill(0);
}
