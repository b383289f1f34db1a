//! The headers of an allocation group: AGF, AGI and AGFL.

use super::{Be32, Be64, Btree, Le32, Uuid};

/// Magic number of the AGF, "XAGF".
pub const AGF_MAGIC: u32 = 0x5841_4746;
/// Magic number of the AGI, "XAGI".
pub const AGI_MAGIC: u32 = 0x5841_4749;
/// Magic number of a version 5 AGFL, "XAFL".
pub const AGFL_MAGIC: u32 = 0x5841_464c;
/// No block, in an allocation group.
pub const NULLAGBLOCK: u32 = u32::MAX;
/// No inode, in an allocation group.
pub const NULLAGINO: u32 = u32::MAX;
/// No block of the file system.
pub const NULLFSBLOCK: u64 = u64::MAX;
/// No inode.
pub const NULLFSINO: u64 = u64::MAX;
/// Hash buckets of unlinked inodes in the AGI.
pub const AGI_UNLINKED_BUCKETS: usize = 64;
/// Sector of the AGF in its allocation group.
pub const AGF_SECTOR: u32 = 1;
/// Sector of the AGI in its allocation group.
pub const AGI_SECTOR: u32 = 2;
/// Sector of the AGFL in its allocation group.
pub const AGFL_SECTOR: u32 = 3;

layout! {
/// Free space of an allocation group (`xfs_agf`).
pub struct Agf: 224 {
    /// [`AGF_MAGIC`].
    pub magicnum: Be32,
    /// 1.
    pub versionnum: Be32,
    /// The allocation group's number.
    pub seqno: Be32,
    /// The allocation group's size in blocks.
    pub length: Be32,
    /// Root of the free space B-tree by block.
    pub bno_root: Be32,
    /// Root of the free space B-tree by size.
    pub cnt_root: Be32,
    /// Root of the reverse mapping B-tree.
    pub rmap_root: Be32,
    /// Levels of the B-tree by block.
    pub bno_level: Be32,
    /// Levels of the B-tree by size.
    pub cnt_level: Be32,
    /// Levels of the reverse mapping B-tree.
    pub rmap_level: Be32,
    /// First used slot of the AGFL.
    pub flfirst: Be32,
    /// Last used slot of the AGFL.
    pub fllast: Be32,
    /// Blocks in the AGFL.
    pub flcount: Be32,
    /// Free blocks.
    pub freeblks: Be32,
    /// Longest free extent.
    pub longest: Be32,
    /// Blocks of the free space and reverse mapping B-trees, less their roots.
    pub btreeblks: Be32,
    /// Metadata uuid.
    pub uuid: Uuid,
    /// Blocks of the reverse mapping B-tree.
    pub rmap_blocks: Be32,
    /// Blocks of the reference count B-tree.
    pub refcount_blocks: Be32,
    /// Root of the reference count B-tree.
    pub refcount_root: Be32,
    /// Levels of the reference count B-tree.
    pub refcount_level: Be32,
    /// Zero.
    pub spare64: [Be64; 14],
    /// Log sequence number of the last write.
    pub lsn: Be64,
    /// Checksum of the sector.
    pub crc: Le32,
    /// Zero.
    pub spare2: Be32,
}

/// Inodes of an allocation group (`xfs_agi`).
pub struct Agi: 344 {
    /// [`AGI_MAGIC`].
    pub magicnum: Be32,
    /// 1.
    pub versionnum: Be32,
    /// The allocation group's number.
    pub seqno: Be32,
    /// The allocation group's size in blocks.
    pub length: Be32,
    /// Inodes allocated.
    pub count: Be32,
    /// Root of the inode B-tree.
    pub root: Be32,
    /// Levels of the inode B-tree.
    pub level: Be32,
    /// Inodes allocated and free.
    pub freecount: Be32,
    /// Last inode chunk allocated.
    pub newino: Be32,
    /// Unused, [`NULLAGINO`].
    pub dirino: Be32,
    /// Heads of the lists of inodes that were unlinked while open.
    pub unlinked: [Be32; AGI_UNLINKED_BUCKETS],
    /// Metadata uuid.
    pub uuid: Uuid,
    /// Checksum of the sector.
    pub crc: Le32,
    /// Zero.
    pub pad32: Be32,
    /// Log sequence number of the last write.
    pub lsn: Be64,
    /// Root of the free inode B-tree.
    pub free_root: Be32,
    /// Levels of the free inode B-tree.
    pub free_level: Be32,
    /// Blocks of the inode B-tree, with inobtcount.
    pub iblocks: Be32,
    /// Blocks of the free inode B-tree, with inobtcount.
    pub fblocks: Be32,
}

/// Header of a version 5 AGFL (`xfs_agfl`); block numbers (`Be32`) follow to the sector's end.
/// A version 4 AGFL is block numbers only.
pub struct Agfl: 36 {
    /// [`AGFL_MAGIC`].
    pub magicnum: Be32,
    /// The allocation group's number.
    pub seqno: Be32,
    /// Metadata uuid.
    pub uuid: Uuid,
    /// Log sequence number of the last write.
    pub lsn: Be64,
    /// Checksum of the sector.
    pub crc: Le32,
}
}

impl Agf {
    /// The root of a tree of free space, reference counts or owners, and its levels.
    pub fn root_of(&self, tree: Btree) -> (u32, u32) {
        let (root, levels) = match tree {
            Btree::Bno => (self.bno_root, self.bno_level),
            Btree::Cnt => (self.cnt_root, self.cnt_level),
            Btree::Rmap => (self.rmap_root, self.rmap_level),
            _ => (self.refcount_root, self.refcount_level),
        };
        (root.get(), levels.get())
    }
}

impl Agi {
    /// The root of a tree of inodes, and its levels.
    pub fn root_of(&self, tree: Btree) -> (u32, u32) {
        let (root, levels) = match tree {
            Btree::Fino => (self.free_root, self.free_level),
            _ => (self.root, self.level),
        };
        (root.get(), levels.get())
    }
}
