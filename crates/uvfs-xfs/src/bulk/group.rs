//! The headers and B-trees of an allocation group.

use super::btree::{Built, Shape, build};
use crate::format::*;
use crate::geometry::Geometry;

/// A B-tree of an allocation group that is to be built.
#[derive(Debug)]
pub struct GroupTree {
    /// Its kind.
    pub tree: Btree,
    /// Its records, in order, as they are on disk.
    pub records: Vec<u8>,
    /// The blocks of the group for it, the root's first: as many as its [`GroupTree::shape`] has.
    pub at: Vec<u32>,
}

impl GroupTree {
    /// The shape of a tree of these records, in blocks of `block_size` bytes.
    pub fn shape(tree: Btree, records: &[u8], block_size: u32) -> Shape {
        Shape::new(tree, block_size as usize, records.len() / tree.record_len())
    }

    fn levels(&self, g: &Geometry) -> Be32 {
        let shape = GroupTree::shape(self.tree, &self.records, g.block_size);
        Be32::new(shape.levels() as u32)
    }
}

/// The records of a tree of free runs: start and length of each.
pub fn free_records(runs: &[(u32, u32)]) -> Vec<u8> {
    let words = runs.iter().flat_map(|(start, len)| [*start, *len]);
    words.flat_map(u32::to_be_bytes).collect()
}

/// The same runs in the order of a tree by size.
pub fn by_size(runs: &[(u32, u32)]) -> Vec<(u32, u32)> {
    let mut sorted = runs.to_vec();
    sorted.sort_unstable_by_key(|(start, len)| (*len, *start));
    sorted
}

/// The records of a tree of inode chunks; `sparse` is whether the file system has sparse inodes.
pub fn chunk_records<'c>(
    chunks: impl IntoIterator<Item = &'c InodeChunk>,
    sparse: bool,
) -> Vec<u8> {
    let records = chunks.into_iter().map(|c| InobtRecord::pack(c, sparse));
    let records: Vec<InobtRecord> = records.collect();
    zerocopy::IntoBytes::as_bytes(&records[..]).to_vec()
}

/// The contents of an allocation group.
#[derive(Debug)]
pub struct Group {
    /// Its number.
    pub agno: u32,
    /// The free runs: start and length.
    pub free: Vec<(u32, u32)>,
    /// The inode chunks, in order.
    pub chunks: Vec<InodeChunk>,
    /// All its B-trees.
    pub trees: Vec<GroupTree>,
    /// The blocks in the free list, no more than [`Group::free_list_slots`].
    pub free_list: Vec<u32>,
}

impl Group {
    /// How many blocks the free list of a group has room for.
    pub fn free_list_slots(g: &Geometry) -> usize {
        (g.sector_size as usize - Agfl::SIZE) / 4
    }

    /// The blocks of the trees, without checksums. Addresses are blocks of the group.
    pub fn blocks(&self, g: &Geometry) -> impl Iterator<Item = Built<u32>> {
        let trees = self.trees.iter();
        trees.flat_map(|t| build(g, self.agno, t.tree, &t.records, &t.at))
    }

    /// Free blocks that are blocks of trees or in the free list: the trees of free space and of owners have
    /// all but their roots from free space.
    fn tree_blocks(&self) -> usize {
        let of_space = |t: &&GroupTree| matches!(t.tree, Btree::Bno | Btree::Cnt | Btree::Rmap);
        let trees = self.trees.iter().filter(of_space);
        trees.map(|t| t.at.len() - 1).sum()
    }

    fn free_blocks(&self) -> u64 {
        self.free.iter().map(|(_, n)| u64::from(*n)).sum()
    }

    /// The group's share in the counters of the superblock.
    pub fn counts(&self) -> Counts {
        let sum = |n: fn(&InodeChunk) -> u32| self.chunks.iter().map(|c| u64::from(n(c))).sum();
        Counts {
            icount: sum(|c| c.count),
            ifree: sum(|c| c.freecount),
            fdblocks: self.free_blocks() + (self.free_list.len() + self.tree_blocks()) as u64,
        }
    }

    /// The sectors of AGF, AGI and AGFL, in this order, without checksums.
    pub fn headers(&self, g: &Geometry) -> [Vec<u8>; 3] {
        let mut sectors = [(); 3].map(|()| vec![0; g.sector_size as usize]);
        let [agf, agi, agfl] = &mut sectors;
        self.agf(g).put(agf, 0);
        self.agi(g).put(agi, 0);
        self.agfl(g, agfl);
        sectors
    }

    fn agf(&self, g: &Geometry) -> Agf {
        let be = Be32::new;
        let mut agf: Agf = zerocopy::FromZeros::new_zeroed();
        agf.magicnum = be(AGF_MAGIC);
        agf.versionnum = be(1);
        agf.seqno = be(self.agno);
        agf.length = be(g.ag_blocks(self.agno));
        for t in &self.trees {
            let (root, levels, blocks) = (be(t.at[0]), t.levels(g), be(t.at.len() as u32));
            match t.tree {
                Btree::Bno => (agf.bno_root, agf.bno_level) = (root, levels),
                Btree::Cnt => (agf.cnt_root, agf.cnt_level) = (root, levels),
                Btree::Rmap => {
                    (agf.rmap_root, agf.rmap_level, agf.rmap_blocks) = (root, levels, blocks);
                }
                Btree::Refcount => {
                    (agf.refcount_root, agf.refcount_level) = (root, levels);
                    agf.refcount_blocks = blocks;
                }
                _ => {}
            }
        }
        // The last slot in use is the one before the first if there is none.
        let n = self.free_list.len();
        let last = n.checked_sub(1).unwrap_or(Group::free_list_slots(g) - 1);
        agf.fllast = be(last as u32);
        agf.flcount = be(n as u32);
        agf.freeblks = be(self.free_blocks() as u32);
        agf.longest = be(self.free.iter().map(|(_, n)| *n).max().unwrap_or(0));
        agf.btreeblks = be(self.tree_blocks() as u32);
        agf.uuid = g.meta_uuid;
        agf
    }

    fn agi(&self, g: &Geometry) -> Agi {
        let be = Be32::new;
        let mut agi: Agi = zerocopy::FromZeros::new_zeroed();
        agi.magicnum = be(AGI_MAGIC);
        agi.versionnum = be(1);
        agi.seqno = be(self.agno);
        agi.length = be(g.ag_blocks(self.agno));
        for t in &self.trees {
            let blocks = t.at.len() * usize::from(g.features.inobtcount);
            let (root, levels, blocks) = (be(t.at[0]), t.levels(g), be(blocks as u32));
            match t.tree {
                Btree::Ino => (agi.root, agi.level, agi.iblocks) = (root, levels, blocks),
                Btree::Fino => {
                    (agi.free_root, agi.free_level, agi.fblocks) = (root, levels, blocks)
                }
                _ => {}
            }
        }
        let counts = self.counts();
        agi.count = be(counts.icount as u32);
        agi.freecount = be(counts.ifree as u32);
        agi.newino = be(self.chunks.last().map_or(NULLAGINO, |c| c.startino));
        agi.dirino = be(NULLAGINO);
        agi.unlinked = [be(NULLAGINO); AGI_UNLINKED_BUCKETS];
        agi.uuid = g.meta_uuid;
        agi
    }

    fn agfl(&self, g: &Geometry, sector: &mut [u8]) {
        // The rest of the sector after the last whole slot is zeros.
        let slots = Group::free_list_slots(g);
        sector[Agfl::SIZE..][..slots * 4].fill(0xff);
        Agfl {
            magicnum: Be32::new(AGFL_MAGIC),
            seqno: Be32::new(self.agno),
            uuid: g.meta_uuid,
            lsn: Be64::new(0),
            crc: Le32::new(0),
        }
        .put(sector, 0);
        for (i, b) in self.free_list.iter().take(slots).enumerate() {
            Be32::new(*b).put(sector, Agfl::SIZE + i * 4);
        }
    }
}
