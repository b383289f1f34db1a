//! Blocks of B-trees, and the records and keys of each kind of tree.

use super::{Be16, Be32, Be64, Layout, Le32, Uuid};

/// The B-trees of XFS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Btree {
    /// Free space by block.
    Bno,
    /// Free space by size.
    Cnt,
    /// Inode chunks.
    Ino,
    /// Inode chunks with free inodes.
    Fino,
    /// Reverse mappings.
    Rmap,
    /// Reference counts.
    Refcount,
    /// A fork's extents.
    Bmap,
}

impl Btree {
    /// The magic number, which differs between version 4 (`crc` false) and 5.
    pub fn magic(self, crc: bool) -> u32 {
        let m: &[u8; 4] = match (self, crc) {
            (Btree::Bno, false) => b"ABTB",
            (Btree::Bno, true) => b"AB3B",
            (Btree::Cnt, false) => b"ABTC",
            (Btree::Cnt, true) => b"AB3C",
            (Btree::Ino, false) => b"IABT",
            (Btree::Ino, true) => b"IAB3",
            (Btree::Fino, false) => b"FIBT",
            (Btree::Fino, true) => b"FIB3",
            (Btree::Rmap, _) => b"RMB3",
            (Btree::Refcount, _) => b"R3FC",
            (Btree::Bmap, false) => b"BMAP",
            (Btree::Bmap, true) => b"BMA3",
        };
        u32::from_be_bytes(*m)
    }

    /// The name used in the format's documentation.
    pub fn name(self) -> &'static str {
        match self {
            Btree::Bno => "bnobt",
            Btree::Cnt => "cntbt",
            Btree::Ino => "inobt",
            Btree::Fino => "finobt",
            Btree::Rmap => "rmapbt",
            Btree::Refcount => "refcountbt",
            Btree::Bmap => "bmbt",
        }
    }

    /// The owner of a group's tree in the reverse mapping tree: `RMAP_OWN_*`.
    pub fn owner(self) -> u64 {
        match self {
            Btree::Bno | Btree::Cnt | Btree::Rmap => RMAP_OWN_AG,
            Btree::Refcount => RMAP_OWN_REFC,
            _ => RMAP_OWN_INOBT,
        }
    }

    /// Bytes of a block's header: short pointers within an allocation group, long ones for
    /// [`Btree::Bmap`].
    pub fn header_len(self, crc: bool) -> usize {
        match (self, crc) {
            (Btree::Bmap, false) => 24,
            (Btree::Bmap, true) => 72,
            (_, false) => 16,
            (_, true) => 56,
        }
    }

    /// Bytes of a record in a leaf.
    pub fn record_len(self) -> usize {
        match self {
            Btree::Bno | Btree::Cnt => AllocRecord::SIZE,
            Btree::Ino | Btree::Fino => InobtRecord::SIZE,
            Btree::Rmap => RmapRecord::SIZE,
            Btree::Refcount => RefcountRecord::SIZE,
            Btree::Bmap => ExtentRecord::SIZE,
        }
    }

    /// Bytes of a key in a node. The reverse mapping tree has two keys (low and high) for each
    /// pointer; this is the size of both.
    pub fn key_len(self) -> usize {
        match self {
            Btree::Bno | Btree::Cnt => 8,
            Btree::Ino | Btree::Fino | Btree::Refcount => 4,
            Btree::Rmap => 2 * RmapKey::SIZE,
            Btree::Bmap => 8,
        }
    }

    /// Bytes of a pointer in a node.
    pub fn ptr_len(self) -> usize {
        if self == Btree::Bmap { 8 } else { 4 }
    }

    /// Most records that a block of `block_size` bytes holds: in a leaf (`level` 0) or a node.
    pub fn max_records(self, block_size: usize, crc: bool, level: u16) -> usize {
        let room = block_size.saturating_sub(self.header_len(crc));
        if level == 0 {
            room / self.record_len()
        } else {
            room / (self.key_len() + self.ptr_len())
        }
    }

    /// Byte offset of pointer `index` in a node of `block_size` bytes: pointers come after room
    /// for the greatest number of keys.
    pub fn ptr_offset(self, block_size: usize, crc: bool, index: usize) -> usize {
        self.header_len(crc)
            + self.max_records(block_size, crc, 1) * self.key_len()
            + index * self.ptr_len()
    }
}

/// Levels that no B-tree of XFS exceeds (`XFS_BTREE_MAXLEVELS` is 9 for space trees; fork
/// trees stay under it too).
pub const BTREE_MAXLEVELS: u16 = 16;

layout! {
/// Head of a B-tree block within an allocation group (`xfs_btree_block`, short form).
pub struct BtreeShort: 16 {
    /// See [`Btree::magic`].
    pub magic: Be32,
    /// Distance from the leaves, which are 0.
    pub level: Be16,
    /// Records, or keys and pointers.
    pub numrecs: Be16,
    /// Left neighbour or [`NULLAGBLOCK`](super::NULLAGBLOCK).
    pub leftsib: Be32,
    /// Right neighbour or [`NULLAGBLOCK`](super::NULLAGBLOCK).
    pub rightsib: Be32,
}

/// The fields behind [`BtreeShort`] on version 5.
pub struct BtreeShortCrc: 40 {
    /// This block's address in 512-byte sectors.
    pub blkno: Be64,
    /// Log sequence number of the last write.
    pub lsn: Be64,
    /// Metadata uuid.
    pub uuid: Uuid,
    /// Allocation group.
    pub owner: Be32,
    /// Checksum of the block.
    pub crc: Le32,
}

/// Head of a B-tree block with pointers to anywhere (`xfs_btree_block`, long form).
pub struct BtreeLong: 24 {
    /// See [`Btree::magic`].
    pub magic: Be32,
    /// Distance from the leaves, which are 0.
    pub level: Be16,
    /// Records, or keys and pointers.
    pub numrecs: Be16,
    /// Left neighbour or [`NULLFSBLOCK`](super::NULLFSBLOCK).
    pub leftsib: Be64,
    /// Right neighbour or [`NULLFSBLOCK`](super::NULLFSBLOCK).
    pub rightsib: Be64,
}

/// The fields behind [`BtreeLong`] on version 5.
pub struct BtreeLongCrc: 48 {
    /// This block's address in 512-byte sectors.
    pub blkno: Be64,
    /// Log sequence number of the last write.
    pub lsn: Be64,
    /// Metadata uuid.
    pub uuid: Uuid,
    /// Inode.
    pub owner: Be64,
    /// Checksum of the block.
    pub crc: Le32,
    /// Zero.
    pub pad: Be32,
}

/// Record and key of the free space trees (`xfs_alloc_rec`).
pub struct AllocRecord: 8 {
    /// First free block.
    pub startblock: Be32,
    /// Free blocks.
    pub blockcount: Be32,
}

/// Record of the inode trees (`xfs_inobt_rec`).
pub struct InobtRecord: 16 {
    /// First inode of the chunk of 64.
    pub startino: Be32,
    /// With sparse inodes: holemask (16 bits), count (8), freecount (8); otherwise freecount.
    pub counts: Be32,
    /// Bit set: inode free (or not there, in a sparse chunk).
    pub free: Be64,
}

/// Record of the reverse mapping tree (`xfs_rmap_rec`).
pub struct RmapRecord: 24 {
    /// First block.
    pub startblock: Be32,
    /// Blocks.
    pub blockcount: Be32,
    /// Inode or `RMAP_OWN_*`.
    pub owner: Be64,
    /// Offset in the owner and `RMAP_OFF_*` flags.
    pub offset: Be64,
}

/// Key of the reverse mapping tree (`xfs_rmap_key`).
pub struct RmapKey: 20 {
    /// First block.
    pub startblock: Be32,
    /// Inode or `RMAP_OWN_*`.
    pub owner: Be64,
    /// Offset in the owner and `RMAP_OFF_*` flags.
    pub offset: Be64,
}

/// Record of the reference count tree (`xfs_refcount_rec`).
pub struct RefcountRecord: 12 {
    /// First block; [`REFC_COW_START`] marks staging extents.
    pub startblock: Be32,
    /// Blocks.
    pub blockcount: Be32,
    /// Owners: at least 2, or 1 for staging extents.
    pub refcount: Be32,
}

/// An extent of a fork (`xfs_bmbt_rec`), packed; see [`ExtentRecord::unpack`].
pub struct ExtentRecord: 16 {
    /// Unwritten flag, file offset, top of the start block.
    pub l0: Be64,
    /// Rest of the start block, block count.
    pub l1: Be64,
}

/// Head of a B-tree root inside an inode (`xfs_bmdr_block`); keys and pointers follow, each with
/// room for the greatest number.
pub struct BmdrBlock: 4 {
    /// Levels below and including this one, less one: at least 1.
    pub level: Be16,
    /// Keys and pointers.
    pub numrecs: Be16,
}
}

/// Inodes of a chunk.
pub const INODES_PER_CHUNK: u32 = 64;
/// Inodes that one bit of a sparse chunk's hole mask stands for.
pub const INODES_PER_HOLEMASK_BIT: u32 = 4;

/// An inode chunk, unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeChunk {
    /// First inode, within the allocation group.
    pub startino: u32,
    /// Bit set: four inodes that are not there. 0 without sparse inodes.
    pub holemask: u16,
    /// Inodes there are.
    pub count: u32,
    /// Free inodes.
    pub freecount: u32,
    /// Bit set: inode free or not there.
    pub free: u64,
}

impl InodeChunk {
    /// A chunk whose inodes in `free` are free. Those in holes are, too.
    pub fn new(startino: u32, holemask: u16, free: u64) -> InodeChunk {
        let holes = holes(holemask);
        InodeChunk {
            startino,
            holemask,
            count: 64 - holes.count_ones(),
            freecount: (free & !holes).count_ones(),
            free: free | holes,
        }
    }

    /// Bit set: the inode is not there.
    pub fn holes(&self) -> u64 {
        holes(self.holemask)
    }

    /// Whether an inode of the chunk is there.
    pub fn has(&self, slot: u32) -> bool {
        self.holemask >> (slot / INODES_PER_HOLEMASK_BIT) & 1 == 0
    }
}

/// The inodes that are not there, of the holes of a chunk: each bit stands for four.
pub fn holes(holemask: u16) -> u64 {
    (0..16)
        .filter(|i| holemask >> i & 1 != 0)
        .fold(0, |m, i| m | 0xf << (i * 4))
}

impl InobtRecord {
    /// The record of a chunk: the inverse of [`InobtRecord::unpack`].
    pub fn pack(c: &InodeChunk, sparse: bool) -> InobtRecord {
        let counts = match sparse {
            true => u32::from(c.holemask) << 16 | c.count << 8 | c.freecount,
            false => c.freecount,
        };
        InobtRecord {
            startino: Be32::new(c.startino),
            counts: Be32::new(counts),
            free: Be64::new(c.free),
        }
    }

    /// The chunk; `sparse` is whether the file system has sparse inodes.
    pub fn unpack(&self, sparse: bool) -> InodeChunk {
        let c = self.counts.get();
        let (holemask, count, freecount) = match sparse {
            true => ((c >> 16) as u16, c >> 8 & 0xff, c & 0xff),
            false => (0, INODES_PER_CHUNK, c),
        };
        InodeChunk {
            startino: self.startino.get(),
            holemask,
            count,
            freecount,
            free: self.free.get(),
        }
    }
}

/// Reverse mapping offset flag: attribute fork.
pub const RMAP_OFF_ATTR_FORK: u64 = 1 << 63;
/// Reverse mapping offset flag: a block of the fork's B-tree.
pub const RMAP_OFF_BMBT_BLOCK: u64 = 1 << 62;
/// Reverse mapping offset flag: unwritten.
pub const RMAP_OFF_UNWRITTEN: u64 = 1 << 61;
/// The offset proper.
pub const RMAP_OFF_MASK: u64 = (1 << 54) - 1;

/// Reverse mapping owner: allocation group headers.
pub const RMAP_OWN_FS: u64 = -3i64 as u64;
/// Reverse mapping owner: the log.
pub const RMAP_OWN_LOG: u64 = -4i64 as u64;
/// Reverse mapping owner: free space and reverse mapping trees, AGFL.
pub const RMAP_OWN_AG: u64 = -5i64 as u64;
/// Reverse mapping owner: inode trees.
pub const RMAP_OWN_INOBT: u64 = -6i64 as u64;
/// Reverse mapping owner: inode chunks.
pub const RMAP_OWN_INODES: u64 = -7i64 as u64;
/// Reverse mapping owner: reference count tree.
pub const RMAP_OWN_REFC: u64 = -8i64 as u64;
/// Reverse mapping owner: copy-on-write staging.
pub const RMAP_OWN_COW: u64 = -9i64 as u64;

/// Bit of a reference count record's start block: a copy-on-write staging extent.
pub const REFC_COW_START: u32 = 1 << 31;
/// Greatest reference count.
pub const REFC_MAX: u32 = u32::MAX;

/// A run of file blocks on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First block in the file.
    pub startoff: u64,
    /// First block on disk, as a file system block number.
    pub startblock: u64,
    /// Blocks.
    pub blockcount: u32,
    /// Allocated, but reads as zeros.
    pub unwritten: bool,
}

impl Extent {
    /// The block in the file after the last one.
    pub fn end(&self) -> u64 {
        self.startoff + u64::from(self.blockcount)
    }

    /// `len` blocks of it, less the first `skip`.
    pub fn part(self, skip: u64, len: u32) -> Extent {
        Extent {
            startoff: self.startoff + skip,
            startblock: self.startblock + skip,
            blockcount: len,
            ..self
        }
    }
}

/// Most blocks of one extent record: its count has 21 bits.
pub const MAX_EXTENT_BLOCKS: u32 = (1 << 21) - 1;

impl ExtentRecord {
    /// The record of an extent: the inverse of [`ExtentRecord::unpack`]. Values wider than their
    /// bit fields lose their high bits.
    pub fn pack(e: &Extent) -> ExtentRecord {
        let startoff = e.startoff & ((1 << 54) - 1);
        let startblock = e.startblock & ((1 << 52) - 1);
        ExtentRecord {
            l0: Be64::new(u64::from(e.unwritten) << 63 | startoff << 9 | startblock >> 43),
            l1: Be64::new(startblock << 21 | u64::from(e.blockcount & MAX_EXTENT_BLOCKS)),
        }
    }

    /// The extent: 1 bit unwritten, 54 bits offset, 52 bits block, 21 bits count.
    pub fn unpack(&self) -> Extent {
        let (l0, l1) = (self.l0.get(), self.l1.get());
        Extent {
            startoff: (l0 & !(1 << 63)) >> 9,
            startblock: (l0 & 0x1ff) << 43 | l1 >> 21,
            blockcount: (l1 & 0x1f_ffff) as u32,
            unwritten: l0 >> 63 != 0,
        }
    }
}
