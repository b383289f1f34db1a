//! The on-disk structures of XFS as typed big-endian layouts, and the checks that a block must
//! pass before its contents mean anything.
//!
//! Names, sizes and values follow "XFS Algorithms & Data Structures" (the on-disk format
//! documentation that xfsprogs ships) and the kernel's `fs/xfs/libxfs/xfs_format.h`,
//! `xfs_da_format.h` and `xfs_log_format.h`; field names drop their structure's prefix (`sb_`,
//! `agf_`, `di_`). Every layout has alignment one, so a reference to it can be taken at any byte
//! of a block.
//!
//! Version 4 file systems have no checksums; version 5 ones put a CRC32c, the file system's uuid,
//! the block's own address and its owner in every metadata block. The `check_*` functions here
//! compare all of these against an [`Ident`].

use std::fmt;
use zerocopy::byteorder::{big_endian as be, little_endian as le};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Big-endian 16-bit integer.
pub type Be16 = be::U16;
/// Big-endian 32-bit integer.
pub type Be32 = be::U32;
/// Big-endian 64-bit integer.
pub type Be64 = be::U64;
/// Little-endian 32-bit integer; checksums are stored this way.
pub type Le32 = le::U32;
/// A file system identifier.
pub type Uuid = [u8; 16];

/// A layout that can be looked at in place in any byte buffer.
pub trait Layout: Sized + FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned {
    /// Size in bytes.
    const SIZE: usize = size_of::<Self>();

    /// The structure at byte `offset` of `bytes`, or [`Fault::Short`] if it does not fit.
    fn at(bytes: &[u8], offset: usize) -> Result<&Self, Fault> {
        bytes
            .get(offset..)
            .and_then(|b| Self::ref_from_prefix(b).ok())
            .map(|(v, _)| v)
            .ok_or(Fault::Short {
                need: offset.saturating_add(Self::SIZE),
                have: bytes.len(),
            })
    }

    /// `count` consecutive structures from byte `offset` of `bytes`, or [`Fault::Short`].
    fn slice_at(bytes: &[u8], offset: usize, count: usize) -> Result<&[Self], Fault> {
        bytes
            .get(offset..)
            .and_then(|b| <[Self]>::ref_from_prefix_with_elems(b, count).ok())
            .map(|(v, _)| v)
            .ok_or(Fault::Short {
                need: offset.saturating_add(count.saturating_mul(Self::SIZE)),
                have: bytes.len(),
            })
    }

    /// Writes the structure at byte `offset` of `bytes`: the inverse of [`Layout::at`].
    ///
    /// # Panics
    /// If it does not fit.
    fn put(&self, bytes: &mut [u8], offset: usize) {
        bytes[offset..offset + Self::SIZE].copy_from_slice(self.as_bytes());
    }
}
impl<T: Sized + FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned> Layout for T {}

macro_rules! layout {
    ($($(#[$meta:meta])* pub struct $name:ident: $size:literal {
        $($(#[$fmeta:meta])* pub $field:ident: $ty:ty,)*
    })*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

/// What is wrong with a structure: the first check that it failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The buffer ends before the structure does.
    Short {
        /// Bytes needed.
        need: usize,
        /// Bytes there are.
        have: usize,
    },
    /// The magic number is another.
    Magic {
        /// The number this kind of block starts with.
        expected: u32,
        /// The number found.
        found: u32,
    },
    /// The checksum does not match the contents.
    Crc {
        /// The checksum computed from the contents.
        expected: u32,
        /// The checksum stored.
        found: u32,
    },
    /// The block belongs to another file system (or an earlier one on the same device).
    Uuid {
        /// The file system's metadata uuid.
        expected: Uuid,
        /// The uuid in the block.
        found: Uuid,
    },
    /// The block belongs to another inode or allocation group.
    Owner {
        /// Inode or allocation group that led to the block.
        expected: u64,
        /// The owner in the block.
        found: u64,
    },
    /// The block was written for another address.
    BlockNumber {
        /// Where the block was read (512-byte sectors).
        expected: u64,
        /// The address in the block.
        found: u64,
    },
    /// Any other field out of its range or at odds with others.
    Field {
        /// The field.
        name: &'static str,
        /// What the format allows.
        expected: &'static str,
        /// The value found.
        found: u64,
    },
}

impl Fault {
    /// A [`Fault::Field`].
    pub fn field(name: &'static str, expected: &'static str, found: impl Into<u64>) -> Fault {
        Fault::Field {
            name,
            expected,
            found: found.into(),
        }
    }
}

/// A uuid the way people write it.
pub fn format_uuid(u: &Uuid) -> String {
    let mut s = String::with_capacity(36);
    for (i, b) in u.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            s.push('-');
        }
        s.push_str(&format!("{b:02x}"));
    }
    s
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Short { need, have } => {
                write!(
                    f,
                    "structure ends at byte {need} but only {have} bytes are there"
                )
            }
            Fault::Magic { expected, found } => {
                write!(f, "magic number {found:#x}, expected {expected:#x}")
            }
            Fault::Crc { expected, found } => {
                write!(f, "checksum {found:#010x}, expected {expected:#010x}")
            }
            Fault::Uuid { expected, found } => {
                write!(
                    f,
                    "uuid {}, expected {}",
                    format_uuid(found),
                    format_uuid(expected)
                )
            }
            Fault::Owner { expected, found } => write!(f, "owner {found}, expected {expected}"),
            Fault::BlockNumber { expected, found } => {
                write!(f, "block number {found:#x}, expected {expected:#x}")
            }
            Fault::Field {
                name,
                expected,
                found,
            } => {
                write!(f, "{name} is {found}, expected {expected}")
            }
        }
    }
}

impl std::error::Error for Fault {}

// ---------------------------------------------------------------------------------------------
// Superblock
// ---------------------------------------------------------------------------------------------

/// Magic number of the superblock, "XFSB".
pub const SB_MAGIC: u32 = 0x5846_5342;

layout! {
/// The superblock (`xfs_dsb`): first sector of each allocation group, the first one being the
/// file system's and the others copies of what mkfs and growfs wrote.
pub struct Superblock: 304 {
    /// [`SB_MAGIC`].
    pub magicnum: Be32,
    /// Block size in bytes.
    pub blocksize: Be32,
    /// Blocks of the data section.
    pub dblocks: Be64,
    /// Blocks of the realtime section.
    pub rblocks: Be64,
    /// Extents of the realtime section.
    pub rextents: Be64,
    /// User-visible file system uuid.
    pub uuid: Uuid,
    /// First block of the internal log, 0 when the log is on another device.
    pub logstart: Be64,
    /// Root directory's inode.
    pub rootino: Be64,
    /// Realtime bitmap's inode.
    pub rbmino: Be64,
    /// Realtime summary's inode.
    pub rsumino: Be64,
    /// Realtime extent size in blocks.
    pub rextsize: Be32,
    /// Blocks of every allocation group but the last.
    pub agblocks: Be32,
    /// Number of allocation groups.
    pub agcount: Be32,
    /// Blocks of the realtime bitmap.
    pub rbmblocks: Be32,
    /// Blocks of the log.
    pub logblocks: Be32,
    /// Version number (low four bits) and `VERSION_*` bits.
    pub versionnum: Be16,
    /// Sector size in bytes.
    pub sectsize: Be16,
    /// Inode size in bytes.
    pub inodesize: Be16,
    /// Inodes per block.
    pub inopblock: Be16,
    /// Label, padded with zero bytes.
    pub fname: [u8; 12],
    /// log2 of `blocksize`.
    pub blocklog: u8,
    /// log2 of `sectsize`.
    pub sectlog: u8,
    /// log2 of `inodesize`.
    pub inodelog: u8,
    /// log2 of `inopblock`.
    pub inopblog: u8,
    /// log2 of `agblocks`, rounded up.
    pub agblklog: u8,
    /// log2 of `rextents`, rounded down.
    pub rextslog: u8,
    /// mkfs has not finished.
    pub inprogress: u8,
    /// Most of the space that inodes may take, in percent; 0 is no limit.
    pub imax_pct: u8,
    /// Inodes allocated.
    pub icount: Be64,
    /// Inodes allocated and free.
    pub ifree: Be64,
    /// Free data blocks.
    pub fdblocks: Be64,
    /// Free realtime extents.
    pub frextents: Be64,
    /// User quota inode.
    pub uquotino: Be64,
    /// Group quota inode (on version 4 shared with project quota).
    pub gquotino: Be64,
    /// Quota flags.
    pub qflags: Be16,
    /// `SBF_*` flags.
    pub flags: u8,
    /// Reserved, 0.
    pub shared_vn: u8,
    /// Inode chunk alignment in blocks.
    pub inoalignmt: Be32,
    /// Stripe unit in blocks.
    pub unit: Be32,
    /// Stripe width in blocks.
    pub width: Be32,
    /// log2 of directory block size in blocks.
    pub dirblklog: u8,
    /// log2 of the log's sector size, 0 when the log version is 1 or sectors are 512 bytes.
    pub logsectlog: u8,
    /// Log sector size, 0 as above.
    pub logsectsize: Be16,
    /// Log stripe unit in bytes.
    pub logsunit: Be32,
    /// `VERSION2_*` bits.
    pub features2: Be32,
    /// Equal to `features2`; old kernels with other alignment wrote here.
    pub bad_features2: Be32,
    /// Compatible features.
    pub features_compat: Be32,
    /// Features that a writer must know (`RO_COMPAT_*`).
    pub features_ro_compat: Be32,
    /// Features that a reader must know (`INCOMPAT_*`).
    pub features_incompat: Be32,
    /// Features that log recovery must know.
    pub features_log_incompat: Be32,
    /// Checksum of the whole sector.
    pub crc: Le32,
    /// Sparse inode chunk alignment in blocks.
    pub spino_align: Be32,
    /// Project quota inode.
    pub pquotino: Be64,
    /// Log sequence number of the last write.
    pub lsn: Be64,
    /// The uuid stored in metadata, when `INCOMPAT_META_UUID` is set.
    pub meta_uuid: Uuid,
    /// Root of the metadata directory tree, with `INCOMPAT_METADIR`.
    pub metadirino: Be64,
    /// Realtime groups.
    pub rgcount: Be32,
    /// Size of a realtime group in extents.
    pub rgextents: Be32,
    /// log2 of a realtime group's blocks, rounded up.
    pub rgblklog: u8,
    /// Zero.
    pub pad: [u8; 7],
    /// First block of an internal realtime section.
    pub rtstart: Be64,
    /// Reserved realtime blocks.
    pub rtreserved: Be64,
}
}

/// Bits of [`Superblock::versionnum`] that hold the version number, 4 or 5.
pub const VERSION_NUMBITS: u16 = 0x000f;
/// Extended attributes were used.
pub const VERSION_ATTR: u16 = 0x0010;
/// 32-bit link counts (version 2 inodes).
pub const VERSION_NLINK: u16 = 0x0020;
/// Quota was used.
pub const VERSION_QUOTA: u16 = 0x0040;
/// Inode chunks are aligned.
pub const VERSION_ALIGN: u16 = 0x0080;
/// Stripe alignment.
pub const VERSION_DALIGN: u16 = 0x0100;
/// Reserved, never set.
pub const VERSION_SHARED: u16 = 0x0200;
/// Version 2 log.
pub const VERSION_LOGV2: u16 = 0x0400;
/// Sectors are not 512 bytes.
pub const VERSION_SECTOR: u16 = 0x0800;
/// Unwritten extents.
pub const VERSION_EXTFLG: u16 = 0x1000;
/// Version 2 directories.
pub const VERSION_DIRV2: u16 = 0x2000;
/// ASCII case-insensitive names.
pub const VERSION_BORG: u16 = 0x4000;
/// `features2` counts.
pub const VERSION_MOREBITS: u16 = 0x8000;

/// Counters in the superblock are only right after a clean unmount.
pub const VERSION2_LAZYSBCOUNT: u32 = 0x0002;
/// Attribute fork sits at a flexible offset.
pub const VERSION2_ATTR2: u32 = 0x0008;
/// Reserved for an older design of parent pointers.
pub const VERSION2_PARENT: u32 = 0x0010;
/// 32-bit project identifiers.
pub const VERSION2_PROJID32: u32 = 0x0080;
/// Checksums (set on version 5).
pub const VERSION2_CRC: u32 = 0x0100;
/// File types in directory entries (version 4).
pub const VERSION2_FTYPE: u32 = 0x0200;

/// Free inode B-tree.
pub const RO_COMPAT_FINOBT: u32 = 1;
/// Reverse mapping B-tree.
pub const RO_COMPAT_RMAPBT: u32 = 1 << 1;
/// Reference count B-tree: shared data blocks.
pub const RO_COMPAT_REFLINK: u32 = 1 << 2;
/// Inode B-tree block counts in the AGI.
pub const RO_COMPAT_INOBTCNT: u32 = 1 << 3;
/// Every read-only compatible feature known here.
pub const RO_COMPAT_ALL: u32 =
    RO_COMPAT_FINOBT | RO_COMPAT_RMAPBT | RO_COMPAT_REFLINK | RO_COMPAT_INOBTCNT;

/// File types in directory entries.
pub const INCOMPAT_FTYPE: u32 = 1;
/// Sparse inode chunks.
pub const INCOMPAT_SPINODES: u32 = 1 << 1;
/// The metadata uuid is `meta_uuid`.
pub const INCOMPAT_META_UUID: u32 = 1 << 2;
/// Nanosecond timestamps up to the year 2486.
pub const INCOMPAT_BIGTIME: u32 = 1 << 3;
/// xfs_repair must run before the next mount.
pub const INCOMPAT_NEEDSREPAIR: u32 = 1 << 4;
/// 64-bit extent counts.
pub const INCOMPAT_NREXT64: u32 = 1 << 5;
/// Atomic exchange of file ranges.
pub const INCOMPAT_EXCHRANGE: u32 = 1 << 6;
/// Parent pointers in extended attributes.
pub const INCOMPAT_PARENT: u32 = 1 << 7;
/// Metadata directory tree and realtime groups.
pub const INCOMPAT_METADIR: u32 = 1 << 8;
/// Zoned realtime section.
pub const INCOMPAT_ZONED: u32 = 1 << 9;
/// Zones with unusable capacity.
pub const INCOMPAT_ZONE_GAPS: u32 = 1 << 10;

/// Logged extended attributes.
pub const LOG_INCOMPAT_XATTRS: u32 = 1;

/// Every feature bit by name, for messages: (word, bit, name). The word is `"ro_compat"` or
/// `"incompat"`.
pub const FEATURE_NAMES: &[(&str, u32, &str)] = &[
    ("ro_compat", RO_COMPAT_FINOBT, "finobt"),
    ("ro_compat", RO_COMPAT_RMAPBT, "rmapbt"),
    ("ro_compat", RO_COMPAT_REFLINK, "reflink"),
    ("ro_compat", RO_COMPAT_INOBTCNT, "inobtcount"),
    ("incompat", INCOMPAT_FTYPE, "ftype"),
    ("incompat", INCOMPAT_SPINODES, "sparse inodes"),
    ("incompat", INCOMPAT_META_UUID, "meta_uuid"),
    ("incompat", INCOMPAT_BIGTIME, "bigtime"),
    ("incompat", INCOMPAT_NEEDSREPAIR, "needsrepair"),
    ("incompat", INCOMPAT_NREXT64, "nrext64"),
    ("incompat", INCOMPAT_EXCHRANGE, "exchange-range"),
    ("incompat", INCOMPAT_PARENT, "parent pointers"),
    ("incompat", INCOMPAT_METADIR, "metadir"),
    ("incompat", INCOMPAT_ZONED, "zoned"),
    ("incompat", INCOMPAT_ZONE_GAPS, "zone gaps"),
];

/// User quota is accounted (bits of [`Superblock::qflags`]).
pub const UQUOTA_ACCT: u16 = 0x0001;
/// Group quota is accounted.
pub const GQUOTA_ACCT: u16 = 0x0040;
/// Project quota is accounted.
pub const PQUOTA_ACCT: u16 = 0x0008;

// ---------------------------------------------------------------------------------------------
// Allocation group headers
// ---------------------------------------------------------------------------------------------

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

// ---------------------------------------------------------------------------------------------
// B-trees
// ---------------------------------------------------------------------------------------------

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
    /// Left neighbour or [`NULLAGBLOCK`].
    pub leftsib: Be32,
    /// Right neighbour or [`NULLAGBLOCK`].
    pub rightsib: Be32,
}

/// What follows [`BtreeShort`] on version 5.
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
    /// Left neighbour or [`NULLFSBLOCK`].
    pub leftsib: Be64,
    /// Right neighbour or [`NULLFSBLOCK`].
    pub rightsib: Be64,
}

/// What follows [`BtreeLong`] on version 5.
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
    /// Bit set: the inode is not there.
    pub fn holes(&self) -> u64 {
        (0..16)
            .filter(|i| self.holemask >> i & 1 != 0)
            .fold(0, |m, i| m | 0xf << (i * 4))
    }
}

impl InobtRecord {
    /// The record of a chunk on a file system with sparse inodes: the inverse of
    /// [`InobtRecord::unpack`].
    pub fn pack(c: &InodeChunk) -> InobtRecord {
        InobtRecord {
            startino: Be32::new(c.startino),
            counts: Be32::new(u32::from(c.holemask) << 16 | c.count << 8 | c.freecount),
            free: Be64::new(c.free),
        }
    }

    /// The chunk; `sparse` is whether the file system has sparse inodes.
    pub fn unpack(&self, sparse: bool) -> InodeChunk {
        let c = self.counts.get();
        let (holemask, count, freecount) = if sparse {
            ((c >> 16) as u16, c >> 8 & 0xff, c & 0xff)
        } else {
            (0, INODES_PER_CHUNK, c)
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

/// Reverse mapping owner: none.
pub const RMAP_OWN_NULL: u64 = -1i64 as u64;
/// Reverse mapping owner: unknown.
pub const RMAP_OWN_UNKNOWN: u64 = -2i64 as u64;
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

// ---------------------------------------------------------------------------------------------
// Inodes
// ---------------------------------------------------------------------------------------------

/// Magic number of an inode, "IN".
pub const DINODE_MAGIC: u16 = 0x494e;
/// Bytes of [`Dinode`] on version 1 and 2 inodes; the rest of [`Dinode`] is fork there.
pub const DINODE_V2_SIZE: usize = 100;
/// Bytes of [`Dinode`] on version 3 inodes.
pub const DINODE_V3_SIZE: usize = 176;

layout! {
/// An inode's core (`xfs_dinode`). Version 1 and 2 inodes end at [`DINODE_V2_SIZE`]; use
/// [`DinodeV2`] for those.
pub struct Dinode: 176 {
    /// The fields that every version has.
    pub v2: DinodeV2,
    /// Checksum of the inode.
    pub crc: Le32,
    /// Attribute changes.
    pub changecount: Be64,
    /// Log sequence number of the last write.
    pub lsn: Be64,
    /// `DIFLAG2_*`.
    pub flags2: Be64,
    /// Copy-on-write extent size hint in blocks.
    pub cowextsize: Be32,
    /// Zero.
    pub pad2: [u8; 12],
    /// Birth time.
    pub crtime: Be64,
    /// This inode's number.
    pub ino: Be64,
    /// Metadata uuid.
    pub uuid: Uuid,
}

/// The fields of an inode core that every version has.
pub struct DinodeV2: 100 {
    /// [`DINODE_MAGIC`].
    pub magic: Be16,
    /// Type and permissions.
    pub mode: Be16,
    /// 1, 2 or 3.
    pub version: u8,
    /// Data fork's format, `FORMAT_*`.
    pub format: u8,
    /// Link count of version 1 inodes; metadata file type with metadir.
    pub onlink: Be16,
    /// Owner.
    pub uid: Be32,
    /// Group.
    pub gid: Be32,
    /// Link count.
    pub nlink: Be32,
    /// Low half of the project identifier.
    pub projid_lo: Be16,
    /// High half of the project identifier.
    pub projid_hi: Be16,
    /// Data extents with [`DIFLAG2_NREXT64`]; otherwise padding and a flush counter.
    pub big_nextents: Be64,
    /// Access time; see [`Dinode`]'s `flags2` for the encoding.
    pub atime: Be64,
    /// Modification time.
    pub mtime: Be64,
    /// Change time.
    pub ctime: Be64,
    /// Size in bytes.
    pub size: Be64,
    /// Blocks used by both forks.
    pub nblocks: Be64,
    /// Extent size hint in blocks.
    pub extsize: Be32,
    /// Data extents; attribute extents with [`DIFLAG2_NREXT64`].
    pub nextents: Be32,
    /// Attribute extents; zero with [`DIFLAG2_NREXT64`].
    pub anextents: Be16,
    /// Attribute fork's offset in the literal area, in units of 8 bytes; 0: no attribute fork.
    pub forkoff: u8,
    /// Attribute fork's format.
    pub aformat: u8,
    /// Unused.
    pub dmevmask: Be32,
    /// Unused.
    pub dmstate: Be16,
    /// `DIFLAG_*`.
    pub flags: Be16,
    /// Generation.
    pub r#gen: Be32,
    /// Next in the AGI's list of unlinked inodes, or [`NULLAGINO`].
    pub next_unlinked: Be32,
}
}

/// Fork format: device number.
pub const FORMAT_DEV: u8 = 0;
/// Fork format: contents inside the inode.
pub const FORMAT_LOCAL: u8 = 1;
/// Fork format: extent list inside the inode.
pub const FORMAT_EXTENTS: u8 = 2;
/// Fork format: B-tree of extents, rooted inside the inode.
pub const FORMAT_BTREE: u8 = 3;
/// Fork format: unused.
pub const FORMAT_UUID: u8 = 4;
/// Fork format: metadata B-tree of a realtime group.
pub const FORMAT_META_BTREE: u8 = 5;

/// Data is in the realtime section.
pub const DIFLAG_REALTIME: u16 = 1;
/// Space was preallocated.
pub const DIFLAG_PREALLOC: u16 = 1 << 1;
/// Realtime bitmap of the new kind.
pub const DIFLAG_NEWRTBM: u16 = 1 << 2;
/// Immutable.
pub const DIFLAG_IMMUTABLE: u16 = 1 << 3;
/// Append only.
pub const DIFLAG_APPEND: u16 = 1 << 4;
/// Synchronous writes.
pub const DIFLAG_SYNC: u16 = 1 << 5;
/// Access time is not kept.
pub const DIFLAG_NOATIME: u16 = 1 << 6;
/// Not for dump.
pub const DIFLAG_NODUMP: u16 = 1 << 7;
/// New files go to the realtime section.
pub const DIFLAG_RTINHERIT: u16 = 1 << 8;
/// New files inherit the project.
pub const DIFLAG_PROJINHERIT: u16 = 1 << 9;
/// No symbolic links may be made here.
pub const DIFLAG_NOSYMLINKS: u16 = 1 << 10;
/// Extent size hint counts.
pub const DIFLAG_EXTSIZE: u16 = 1 << 11;
/// New files inherit the extent size hint.
pub const DIFLAG_EXTSZINHERIT: u16 = 1 << 12;
/// Not to be defragmented.
pub const DIFLAG_NODEFRAG: u16 = 1 << 13;
/// File streams allocator.
pub const DIFLAG_FILESTREAM: u16 = 1 << 14;

/// Direct access.
pub const DIFLAG2_DAX: u64 = 1;
/// May share blocks.
pub const DIFLAG2_REFLINK: u64 = 1 << 1;
/// Copy-on-write extent size hint counts.
pub const DIFLAG2_COWEXTSIZE: u64 = 1 << 2;
/// Times are nanoseconds since 1901.
pub const DIFLAG2_BIGTIME: u64 = 1 << 3;
/// Extent counts are the wide ones.
pub const DIFLAG2_NREXT64: u64 = 1 << 4;
/// A metadata file.
pub const DIFLAG2_METADATA: u64 = 1 << 5;

/// Seconds between the first moment of a bigtime stamp (December 1901) and 1970.
pub const BIGTIME_EPOCH_OFFSET: i64 = 1 << 31;

/// A time as (seconds since 1970, nanoseconds). Without bigtime the stamp is two 32-bit halves.
pub fn timestamp(raw: u64, bigtime: bool) -> (i64, u32) {
    if bigtime {
        (
            (raw / 1_000_000_000) as i64 - BIGTIME_EPOCH_OFFSET,
            (raw % 1_000_000_000) as u32,
        )
    } else {
        ((raw >> 32) as u32 as i32 as i64, raw as u32)
    }
}

/// The bigtime stamp of a moment, the inverse of [`timestamp`]; moments outside of what a stamp can
/// express (December 1901 to July 2486) become the nearest one.
pub fn bigtime_stamp(sec: i64, nsec: u32) -> u64 {
    /// `XFS_BIGTIME_TIME_MAX`: the last second, counted from the first.
    const LAST: i64 = (u64::MAX / 1_000_000_000) as i64 & !3;
    match sec.checked_add(BIGTIME_EPOCH_OFFSET) {
        Some(s) if s < 0 => 0,
        Some(s) if s <= LAST => {
            (s as u64 * 1_000_000_000).saturating_add(u64::from(nsec.min(999_999_999)))
        }
        _ if sec < 0 => 0,
        _ => LAST as u64 * 1_000_000_000,
    }
}

// ---------------------------------------------------------------------------------------------
// Directories
// ---------------------------------------------------------------------------------------------

/// Magic number of a single-block directory, "XD2B".
pub const DIR2_BLOCK_MAGIC: u32 = 0x5844_3242;
/// Magic number of a directory data block, "XD2D".
pub const DIR2_DATA_MAGIC: u32 = 0x5844_3244;
/// Magic number of a directory free index block, "XD2F".
pub const DIR2_FREE_MAGIC: u32 = 0x5844_3246;
/// Version 5 [`DIR2_BLOCK_MAGIC`], "XDB3".
pub const DIR3_BLOCK_MAGIC: u32 = 0x5844_4233;
/// Version 5 [`DIR2_DATA_MAGIC`], "XDD3".
pub const DIR3_DATA_MAGIC: u32 = 0x5844_4433;
/// Version 5 [`DIR2_FREE_MAGIC`], "XDF3".
pub const DIR3_FREE_MAGIC: u32 = 0x5844_4633;
/// Magic number of a directory's only leaf.
pub const DIR2_LEAF1_MAGIC: u16 = 0xd2f1;
/// Magic number of a leaf of a node directory.
pub const DIR2_LEAFN_MAGIC: u16 = 0xd2ff;
/// Version 5 [`DIR2_LEAF1_MAGIC`].
pub const DIR3_LEAF1_MAGIC: u16 = 0x3df1;
/// Version 5 [`DIR2_LEAFN_MAGIC`].
pub const DIR3_LEAFN_MAGIC: u16 = 0x3dff;
/// Magic number of an inner node of a directory or attribute tree.
pub const DA_NODE_MAGIC: u16 = 0xfebe;
/// Version 5 [`DA_NODE_MAGIC`].
pub const DA3_NODE_MAGIC: u16 = 0x3ebe;
/// Magic number of an attribute leaf.
pub const ATTR_LEAF_MAGIC: u16 = 0xfbee;
/// Version 5 [`ATTR_LEAF_MAGIC`].
pub const ATTR3_LEAF_MAGIC: u16 = 0x3bee;

/// Levels that a directory or attribute tree never exceeds (`XFS_DA_NODE_MAXDEPTH`).
pub const DA_NODE_MAXDEPTH: u16 = 5;
/// Directory byte address of the first leaf or node block: 32 GiB.
pub const DIR2_LEAF_OFFSET: u64 = 1 << 35;
/// Directory byte address of the first free index block: 64 GiB.
pub const DIR2_FREE_OFFSET: u64 = 1 << 36;
/// Marks a hole in a directory data block.
pub const DIR2_DATA_FREE_TAG: u16 = 0xffff;
/// Entries and holes are aligned to this many bytes.
pub const DIR2_DATA_ALIGN: usize = 8;
/// A stale leaf entry's address.
pub const DIR2_NULL_DATAPTR: u32 = 0;
/// No free space in a data block, in a free index.
pub const NULLDATAOFF: u16 = 0xffff;
/// Longest name.
pub const MAXNAMELEN: usize = 255;

layout! {
/// Head of a version 4 directory data block (`xfs_dir2_data_hdr`).
pub struct Dir2DataHeader: 16 {
    /// [`DIR2_BLOCK_MAGIC`] or [`DIR2_DATA_MAGIC`].
    pub magic: Be32,
    /// The largest holes.
    pub bestfree: [Dir2DataFree; 3],
}

/// Head of a version 5 directory data block (`xfs_dir3_data_hdr`).
pub struct Dir3DataHeader: 64 {
    /// The common head.
    pub hdr: Dir3BlockHeader,
    /// The largest holes.
    pub bestfree: [Dir2DataFree; 3],
    /// Zero.
    pub pad: Be32,
}

/// Head of version 5 directory data and free index blocks (`xfs_dir3_blk_hdr`).
pub struct Dir3BlockHeader: 48 {
    /// [`DIR3_BLOCK_MAGIC`], [`DIR3_DATA_MAGIC`] or [`DIR3_FREE_MAGIC`].
    pub magic: Be32,
    /// Checksum of the directory block.
    pub crc: Le32,
    /// This block's address in 512-byte sectors.
    pub blkno: Be64,
    /// Log sequence number of the last write.
    pub lsn: Be64,
    /// Metadata uuid.
    pub uuid: Uuid,
    /// The directory's inode.
    pub owner: Be64,
}

/// A hole known to a data block's head (`xfs_dir2_data_free`).
pub struct Dir2DataFree: 4 {
    /// Byte offset in the block.
    pub offset: Be16,
    /// Bytes.
    pub length: Be16,
}

/// Fixed head of a directory entry (`xfs_dir2_data_entry`); name, file type (with ftype) and
/// padding follow, and the last two bytes repeat the entry's offset.
pub struct Dir2DataEntry: 9 {
    /// Inode.
    pub inumber: Be64,
    /// Name length.
    pub namelen: u8,
}

/// Fixed head of a hole (`xfs_dir2_data_unused`); its last two bytes repeat its offset.
pub struct Dir2DataUnused: 4 {
    /// [`DIR2_DATA_FREE_TAG`].
    pub freetag: Be16,
    /// Bytes of the hole.
    pub length: Be16,
}

/// Last bytes of a single-block directory (`xfs_dir2_block_tail`); the leaf entries are before.
pub struct Dir2BlockTail: 8 {
    /// Leaf entries.
    pub count: Be32,
    /// Stale ones among them.
    pub stale: Be32,
}

/// An entry of the hash index (`xfs_dir2_leaf_entry`).
pub struct Dir2LeafEntry: 8 {
    /// Hash of the name, see [`da_hashname`].
    pub hashval: Be32,
    /// Byte address of the entry in the directory divided by 8, or [`DIR2_NULL_DATAPTR`].
    pub address: Be32,
}

/// Head of leaf and node blocks on version 4 (`xfs_da_blkinfo`).
pub struct DaBlockInfo: 12 {
    /// Next block on the same level, 0 for none.
    pub forw: Be32,
    /// Previous block on the same level, 0 for none.
    pub back: Be32,
    /// Which kind of block.
    pub magic: Be16,
    /// Zero.
    pub pad: Be16,
}

/// Head of leaf and node blocks on version 5 (`xfs_da3_blkinfo`).
pub struct Da3BlockInfo: 56 {
    /// The fields shared with version 4.
    pub hdr: DaBlockInfo,
    /// Checksum of the block.
    pub crc: Le32,
    /// This block's address in 512-byte sectors.
    pub blkno: Be64,
    /// Log sequence number of the last write.
    pub lsn: Be64,
    /// Metadata uuid.
    pub uuid: Uuid,
    /// The inode.
    pub owner: Be64,
}

/// What follows [`DaBlockInfo`] or [`Da3BlockInfo`] in a directory leaf. Version 5 adds four
/// bytes of padding.
pub struct Dir2LeafCounts: 4 {
    /// Entries.
    pub count: Be16,
    /// Stale ones among them.
    pub stale: Be16,
}

/// What follows [`DaBlockInfo`] or [`Da3BlockInfo`] in a node. Version 5 adds four bytes of
/// padding.
pub struct DaNodeCounts: 4 {
    /// Entries.
    pub count: Be16,
    /// Distance from the leaves, which are 0.
    pub level: Be16,
}

/// An entry of a node (`xfs_da_node_entry`).
pub struct DaNodeEntry: 8 {
    /// Greatest hash below.
    pub hashval: Be32,
    /// Block below, as a block number in the directory or fork.
    pub before: Be32,
}

/// What follows the magic number (version 4) or [`Dir3BlockHeader`] (version 5, plus four bytes
/// of padding) in a free index block.
pub struct Dir2FreeCounts: 12 {
    /// First data block that it covers, as a directory data block number.
    pub firstdb: Be32,
    /// Slots in use.
    pub nvalid: Be32,
    /// Slots that are not [`NULLDATAOFF`].
    pub nused: Be32,
}

/// Head of a short-form directory (`xfs_dir2_sf_hdr`) less the parent, whose size is 8 bytes if
/// `i8count` is not 0 and 4 otherwise.
pub struct Dir2SfHeader: 2 {
    /// Entries.
    pub count: u8,
    /// Entries (and the parent) that need 8-byte inode numbers.
    pub i8count: u8,
}

/// Fixed head of a short-form entry (`xfs_dir2_sf_entry`); name, file type (with ftype) and inode
/// follow.
pub struct Dir2SfEntry: 3 {
    /// Name length.
    pub namelen: u8,
    /// Where the entry would be in a single-block directory.
    pub offset: Be16,
}
}

/// Bytes of the head of a directory data block.
pub fn dir_data_header_len(crc: bool) -> usize {
    if crc {
        Dir3DataHeader::SIZE
    } else {
        Dir2DataHeader::SIZE
    }
}

/// Bytes of the head of a directory leaf, a node, or a free index block: the same for all three.
pub fn da_header_len(crc: bool) -> usize {
    if crc { 64 } else { 16 }
}

/// Bytes that a directory entry with a name of `namelen` takes in a data block.
pub fn dir_entry_len(namelen: usize, ftype: bool) -> usize {
    (Dir2DataEntry::SIZE + namelen + ftype as usize + 2).next_multiple_of(DIR2_DATA_ALIGN)
}

/// File types in directory entries, as `XFS_DIR3_FT_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum FileType {
    /// Not recorded.
    #[default]
    Unknown = 0,
    /// Regular file.
    Regular = 1,
    /// Directory.
    Directory = 2,
    /// Character device.
    CharDevice = 3,
    /// Block device.
    BlockDevice = 4,
    /// FIFO.
    Fifo = 5,
    /// Socket.
    Socket = 6,
    /// Symbolic link.
    Symlink = 7,
    /// Whiteout.
    Whiteout = 8,
}

impl FileType {
    /// From a directory entry; `None` for values that the format does not know.
    pub fn from_ftype(v: u8) -> Option<FileType> {
        Some(match v {
            0 => FileType::Unknown,
            1 => FileType::Regular,
            2 => FileType::Directory,
            3 => FileType::CharDevice,
            4 => FileType::BlockDevice,
            5 => FileType::Fifo,
            6 => FileType::Socket,
            7 => FileType::Symlink,
            8 => FileType::Whiteout,
            _ => return None,
        })
    }

    /// From an inode's mode; [`FileType::Unknown`] for a type that no file has.
    pub fn from_mode(mode: u16) -> FileType {
        match mode & 0o170000 {
            0o100000 => FileType::Regular,
            0o040000 => FileType::Directory,
            0o020000 => FileType::CharDevice,
            0o060000 => FileType::BlockDevice,
            0o010000 => FileType::Fifo,
            0o140000 => FileType::Socket,
            0o120000 => FileType::Symlink,
            _ => FileType::Unknown,
        }
    }

    /// The type bits of a mode, 0 for [`FileType::Unknown`].
    pub fn mode_bits(self) -> u32 {
        match self {
            FileType::Unknown => 0,
            FileType::Regular => 0o100000,
            FileType::Directory => 0o040000,
            FileType::CharDevice | FileType::Whiteout => 0o020000,
            FileType::BlockDevice => 0o060000,
            FileType::Fifo => 0o010000,
            FileType::Socket => 0o140000,
            FileType::Symlink => 0o120000,
        }
    }
}

/// The hash of a directory entry's or attribute's name (`xfs_da_hashname`).
pub fn da_hashname(name: &[u8]) -> u32 {
    let mut hash = 0u32;
    let mut four = name.chunks_exact(4);
    for c in &mut four {
        let (a, b) = (u32::from(c[0]), u32::from(c[1]));
        let (c, d) = (u32::from(c[2]), u32::from(c[3]));
        hash = (a << 21) ^ (b << 14) ^ (c << 7) ^ d ^ hash.rotate_left(28);
    }
    match *four.remainder() {
        [a, b, c] => {
            let (a, b, c) = (u32::from(a), u32::from(b), u32::from(c));
            (a << 14) ^ (b << 7) ^ c ^ hash.rotate_left(21)
        }
        [a, b] => (u32::from(a) << 7) ^ u32::from(b) ^ hash.rotate_left(14),
        [a] => u32::from(a) ^ hash.rotate_left(7),
        _ => hash,
    }
}

/// The hash of a directory entry's name where names are ASCII case-insensitive
/// (`xfs_ascii_ci_hashname`).
pub fn da_hashname_ci(name: &[u8]) -> u32 {
    name.iter().fold(0u32, |h, c| {
        u32::from(ascii_ci_lower(*c)) ^ h.rotate_left(7)
    })
}

/// Lower case as `xfs_ascii_ci_xfrm` has it: ASCII and the capital letters of ISO 8859-1.
pub fn ascii_ci_lower(c: u8) -> u8 {
    match c {
        b'A'..=b'Z' | 0xc0..=0xd6 | 0xd8..=0xde => c + 0x20,
        _ => c,
    }
}

// ---------------------------------------------------------------------------------------------
// Extended attributes and symbolic links
// ---------------------------------------------------------------------------------------------

/// Attribute flag: the value is in the leaf.
pub const ATTR_LOCAL: u8 = 1;
/// Attribute flag: the "trusted" namespace.
pub const ATTR_ROOT: u8 = 1 << 1;
/// Attribute flag: the "security" namespace.
pub const ATTR_SECURE: u8 = 1 << 2;
/// Attribute flag: a parent pointer.
pub const ATTR_PARENT: u8 = 1 << 3;
/// Attribute flag: its change was cut short; not to be seen.
pub const ATTR_INCOMPLETE: u8 = 1 << 7;
/// Every namespace flag.
pub const ATTR_NSP_MASK: u8 = ATTR_ROOT | ATTR_SECURE | ATTR_PARENT;
/// Longest value of an attribute.
pub const ATTR_MAX_VALUE: usize = 65536;

/// Magic number of a remote attribute block, "XARM".
pub const ATTR3_RMT_MAGIC: u32 = 0x5841_524d;
/// Magic number of a remote symbolic link block, "XSLM".
pub const SYMLINK_MAGIC: u32 = 0x5853_4c4d;
/// Longest target of a symbolic link.
pub const SYMLINK_MAXLEN: usize = 1024;

layout! {
/// Head of short-form attributes (`xfs_attr_sf_hdr`).
pub struct AttrSfHeader: 4 {
    /// Bytes, with this head.
    pub totsize: Be16,
    /// Attributes.
    pub count: u8,
    /// Zero.
    pub padding: u8,
}

/// Fixed head of a short-form attribute (`xfs_attr_sf_entry`); name and value follow.
pub struct AttrSfEntry: 3 {
    /// Name length.
    pub namelen: u8,
    /// Value length.
    pub valuelen: u8,
    /// `ATTR_*`.
    pub flags: u8,
}

/// What follows [`DaBlockInfo`] or [`Da3BlockInfo`] in an attribute leaf (`xfs_attr_leaf_hdr`).
/// Version 5 adds four bytes of padding.
pub struct AttrLeafCounts: 20 {
    /// Entries.
    pub count: Be16,
    /// Bytes used by names and values.
    pub usedbytes: Be16,
    /// First byte used by names and values; 0 stands for 65536.
    pub firstused: Be16,
    /// The free map is incomplete.
    pub holes: u8,
    /// Zero.
    pub pad1: u8,
    /// The largest holes: (base, size).
    pub freemap: [[Be16; 2]; 3],
}

/// An entry of an attribute leaf (`xfs_attr_leaf_entry`).
pub struct AttrLeafEntry: 8 {
    /// Hash of the name.
    pub hashval: Be32,
    /// Byte offset of name and value in the block.
    pub nameidx: Be16,
    /// `ATTR_*`.
    pub flags: u8,
    /// Zero.
    pub pad2: u8,
}

/// Fixed head of a name with its value in the leaf (`xfs_attr_leaf_name_local`).
pub struct AttrNameLocal: 3 {
    /// Value length.
    pub valuelen: Be16,
    /// Name length; name and value follow.
    pub namelen: u8,
}

/// Fixed head of a name with its value in other blocks (`xfs_attr_leaf_name_remote`).
pub struct AttrNameRemote: 9 {
    /// First block of the value in the attribute fork.
    pub valueblk: Be32,
    /// Value length.
    pub valuelen: Be32,
    /// Name length; the name follows.
    pub namelen: u8,
}

/// Head of each block of a remote value (`xfs_attr3_rmt_hdr`) or of a remote symbolic link
/// (`xfs_dsymlink_hdr`) on version 5; version 4 has none.
pub struct RemoteHeader: 56 {
    /// [`ATTR3_RMT_MAGIC`] or [`SYMLINK_MAGIC`].
    pub magic: Be32,
    /// Offset of this block's part.
    pub offset: Be32,
    /// Bytes in this block.
    pub bytes: Be32,
    /// Checksum of the block.
    pub crc: Le32,
    /// Metadata uuid.
    pub uuid: Uuid,
    /// The inode.
    pub owner: Be64,
    /// This block's address in 512-byte sectors.
    pub blkno: Be64,
    /// Log sequence number of the last write.
    pub lsn: Be64,
}

/// Value of a parent pointer attribute (`xfs_parent_rec`); its name is the entry's name.
pub struct ParentRecord: 12 {
    /// The parent's inode.
    pub ino: Be64,
    /// The parent's generation.
    pub r#gen: Be32,
}
}

/// Bytes of the head of an attribute leaf.
pub fn attr_leaf_header_len(crc: bool) -> usize {
    if crc { 80 } else { 32 }
}

// ---------------------------------------------------------------------------------------------
// Quota
// ---------------------------------------------------------------------------------------------

/// Magic number of a quota record, "DQ".
pub const DQUOT_MAGIC: u16 = 0x4451;
/// Quota record type: user.
pub const DQTYPE_USER: u8 = 1;
/// Quota record type: project.
pub const DQTYPE_PROJ: u8 = 2;
/// Quota record type: group.
pub const DQTYPE_GROUP: u8 = 4;
/// Quota record type flag: times are in bigtime.
pub const DQTYPE_BIGTIME: u8 = 1 << 7;

layout! {
/// A quota record as it is on disk (`xfs_dqblk`).
pub struct Dquot: 136 {
    /// [`DQUOT_MAGIC`].
    pub magic: Be16,
    /// 1.
    pub version: u8,
    /// `DQTYPE_*`.
    pub r#type: u8,
    /// User, group or project.
    pub id: Be32,
    /// Hard limit of blocks.
    pub blk_hardlimit: Be64,
    /// Soft limit of blocks.
    pub blk_softlimit: Be64,
    /// Hard limit of inodes.
    pub ino_hardlimit: Be64,
    /// Soft limit of inodes.
    pub ino_softlimit: Be64,
    /// Blocks used.
    pub bcount: Be64,
    /// Inodes used.
    pub icount: Be64,
    /// When the inode soft limit turns hard.
    pub itimer: Be32,
    /// When the block soft limit turns hard.
    pub btimer: Be32,
    /// Inode warnings.
    pub iwarns: Be16,
    /// Block warnings.
    pub bwarns: Be16,
    /// Zero.
    pub pad0: Be32,
    /// Hard limit of realtime blocks.
    pub rtb_hardlimit: Be64,
    /// Soft limit of realtime blocks.
    pub rtb_softlimit: Be64,
    /// Realtime blocks used.
    pub rtbcount: Be64,
    /// When the realtime soft limit turns hard.
    pub rtbtimer: Be32,
    /// Realtime warnings.
    pub rtbwarns: Be16,
    /// Zero.
    pub pad: Be16,
    /// Zero.
    pub fill: [u8; 4],
    /// Checksum of the record (version 5).
    pub crc: Le32,
    /// Log sequence number of the last write (version 5).
    pub lsn: Be64,
    /// Metadata uuid (version 5).
    pub uuid: Uuid,
}
}

// ---------------------------------------------------------------------------------------------
// Log
// ---------------------------------------------------------------------------------------------

/// Magic number of a log record.
pub const LOG_RECORD_MAGIC: u32 = 0xfeed_babe;
/// Bytes of log data that one head's cycle array covers.
pub const LOG_CYCLE_DATA_SIZE: usize = 32 * 1024;
/// Operation flag: the log was unmounted cleanly.
pub const LOG_OP_UNMOUNT: u8 = 0x20;
/// Client of the unmount record.
pub const LOG_CLIENT_LOG: u8 = 0xaa;

layout! {
/// Head of a log record (`xlog_rec_header`).
pub struct LogRecordHeader: 328 {
    /// [`LOG_RECORD_MAGIC`].
    pub magicno: Be32,
    /// Cycle of the log in which it was written.
    pub cycle: Be32,
    /// 1 or 2.
    pub version: Be32,
    /// Bytes of the record's data.
    pub len: Be32,
    /// This record: cycle (high half) and block.
    pub lsn: Be64,
    /// Oldest record still needed: cycle (high half) and block.
    pub tail_lsn: Be64,
    /// Checksum of the record.
    pub crc: Le32,
    /// Block of the previous record.
    pub prev_block: Be32,
    /// Operations in the record.
    pub num_logops: Be32,
    /// The first words of the data blocks, which cycle numbers replace.
    pub cycle_data: [Be32; 64],
    /// Format of the machine that wrote it.
    pub fmt: Be32,
    /// User-visible file system uuid.
    pub fs_uuid: Uuid,
    /// Log buffer size.
    pub size: Be32,
    /// Alignment of 64-bit machines.
    pub pad: Be32,
}

/// Head of an operation in a log record (`xlog_op_header`).
pub struct LogOpHeader: 12 {
    /// Transaction.
    pub tid: Be32,
    /// Bytes that follow.
    pub len: Be32,
    /// Who wrote it.
    pub clientid: u8,
    /// `LOG_OP_*`.
    pub flags: u8,
    /// Zero.
    pub res2: Be16,
}
}

// ---------------------------------------------------------------------------------------------
// Checks
// ---------------------------------------------------------------------------------------------

/// What a metadata block must say about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ident {
    /// Version 5: there are checksums and the rest of this counts.
    pub crc: bool,
    /// The metadata uuid.
    pub uuid: Uuid,
    /// Where the block is, in 512-byte sectors.
    pub daddr: u64,
    /// Allocation group or inode that owns it; `None` when it is not known.
    pub owner: Option<u64>,
}

impl Ident {
    fn check_uuid(&self, found: &Uuid) -> Result<(), Fault> {
        if *found == self.uuid {
            Ok(())
        } else {
            Err(Fault::Uuid {
                expected: self.uuid,
                found: *found,
            })
        }
    }

    fn check_blkno(&self, found: u64) -> Result<(), Fault> {
        if found == self.daddr {
            Ok(())
        } else {
            Err(Fault::BlockNumber {
                expected: self.daddr,
                found,
            })
        }
    }

    fn check_owner(&self, found: u64) -> Result<(), Fault> {
        match self.owner {
            Some(expected) if expected != found => Err(Fault::Owner { expected, found }),
            _ => Ok(()),
        }
    }
}

fn check_magic(expected: u32, found: u32) -> Result<(), Fault> {
    if expected == found {
        Ok(())
    } else {
        Err(Fault::Magic { expected, found })
    }
}

/// The CRC32c of `bytes` with the four bytes at `crc_offset` taken as zero.
///
/// # Panics
/// If `crc_offset + 4` is beyond `bytes`.
pub fn compute_crc(bytes: &[u8], crc_offset: usize) -> u32 {
    let c = crc32c::crc32c(&bytes[..crc_offset]);
    let c = crc32c::crc32c_append(c, &[0; 4]);
    crc32c::crc32c_append(c, &bytes[crc_offset + 4..])
}

/// Compares the checksum stored at `crc_offset` with the one that `bytes` have.
pub fn check_crc(bytes: &[u8], crc_offset: usize) -> Result<(), Fault> {
    let found = Le32::at(bytes, crc_offset)?.get();
    let expected = compute_crc(bytes, crc_offset);
    if expected == found {
        Ok(())
    } else {
        Err(Fault::Crc { expected, found })
    }
}

/// Stores the checksum of `bytes` at `crc_offset`; for those who damage or make images.
///
/// # Panics
/// If `crc_offset + 4` is beyond `bytes`.
pub fn store_crc(bytes: &mut [u8], crc_offset: usize) {
    let crc = compute_crc(bytes, crc_offset);
    bytes[crc_offset..crc_offset + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Byte offset of the checksum in the superblock.
pub const SB_CRC_OFFSET: usize = 224;
/// Byte offset of the checksum in the AGF.
pub const AGF_CRC_OFFSET: usize = 216;
/// Byte offset of the checksum in the AGI.
pub const AGI_CRC_OFFSET: usize = 312;
/// Byte offset of the checksum in the AGFL.
pub const AGFL_CRC_OFFSET: usize = 32;
/// Byte offset of the checksum in a short B-tree block.
pub const BTREE_SHORT_CRC_OFFSET: usize = 52;
/// Byte offset of the checksum in a long B-tree block.
pub const BTREE_LONG_CRC_OFFSET: usize = 64;
/// Byte offset of the checksum in an inode.
pub const DINODE_CRC_OFFSET: usize = 100;
/// Byte offset of the checksum in directory data and free index blocks.
pub const DIR3_DATA_CRC_OFFSET: usize = 4;
/// Byte offset of the checksum in leaf and node blocks of directories and attributes.
pub const DA3_CRC_OFFSET: usize = 12;
/// Byte offset of the checksum in remote attribute and symbolic link blocks.
pub const REMOTE_CRC_OFFSET: usize = 12;
/// Byte offset of the log sequence number in these.
pub const REMOTE_LSN_OFFSET: usize = 48;
/// Byte offset of the checksum in a quota record.
pub const DQUOT_CRC_OFFSET: usize = 108;

/// Checks a superblock sector's magic and, on version 5, checksum, and gives the superblock.
/// `sector` is one whole sector; [`Superblock::sector_size`] tells how long that is.
pub fn check_superblock(sector: &[u8]) -> Result<&Superblock, Fault> {
    let sb = Superblock::at(sector, 0)?;
    check_magic(SB_MAGIC, sb.magicnum.get())?;
    if sb.is_v5() {
        check_crc(sector, SB_CRC_OFFSET)?;
    }
    Ok(sb)
}

impl Superblock {
    /// Whether the version is 5 (checksums).
    pub fn is_v5(&self) -> bool {
        self.versionnum.get() & VERSION_NUMBITS == 5
    }

    /// The sector size if it is one that XFS knows (512 to 32768 bytes).
    pub fn sector_size(&self) -> Option<usize> {
        let s = usize::from(self.sectsize.get());
        (s.is_power_of_two() && (512..=32768).contains(&s)).then_some(s)
    }

    /// The uuid that metadata carries.
    pub fn metadata_uuid(&self) -> Uuid {
        if self.is_v5() && self.features_incompat.get() & INCOMPAT_META_UUID != 0 {
            self.meta_uuid
        } else {
            self.uuid
        }
    }
}

/// Checks an AGF sector's magic, checksum and uuid.
pub fn check_agf<'a>(sector: &'a [u8], ident: &Ident) -> Result<&'a Agf, Fault> {
    let agf = Agf::at(sector, 0)?;
    check_magic(AGF_MAGIC, agf.magicnum.get())?;
    if ident.crc {
        check_crc(sector, AGF_CRC_OFFSET)?;
        ident.check_uuid(&agf.uuid)?;
    }
    Ok(agf)
}

/// Checks an AGI sector's magic, checksum and uuid.
pub fn check_agi<'a>(sector: &'a [u8], ident: &Ident) -> Result<&'a Agi, Fault> {
    let agi = Agi::at(sector, 0)?;
    check_magic(AGI_MAGIC, agi.magicnum.get())?;
    if ident.crc {
        check_crc(sector, AGI_CRC_OFFSET)?;
        ident.check_uuid(&agi.uuid)?;
    }
    Ok(agi)
}

/// Checks an AGFL sector's magic, checksum and uuid (version 4 has none) and gives its slots.
pub fn check_agfl<'a>(sector: &'a [u8], ident: &Ident) -> Result<&'a [Be32], Fault> {
    if !ident.crc {
        return Be32::slice_at(sector, 0, sector.len() / 4);
    }
    let agfl = Agfl::at(sector, 0)?;
    check_magic(AGFL_MAGIC, agfl.magicnum.get())?;
    check_crc(sector, AGFL_CRC_OFFSET)?;
    ident.check_uuid(&agfl.uuid)?;
    Be32::slice_at(sector, Agfl::SIZE, (sector.len() - Agfl::SIZE) / 4)
}

/// Checks a B-tree block of an allocation group: magic, checksum, uuid, block number, owner, and
/// that its record count fits.
pub fn check_btree_short<'a>(
    block: &'a [u8],
    tree: Btree,
    ident: &Ident,
) -> Result<&'a BtreeShort, Fault> {
    debug_assert!(tree != Btree::Bmap);
    let h = BtreeShort::at(block, 0)?;
    check_magic(tree.magic(ident.crc), h.magic.get())?;
    if ident.crc {
        let c = BtreeShortCrc::at(block, BtreeShort::SIZE)?;
        check_crc(block, BTREE_SHORT_CRC_OFFSET)?;
        ident.check_uuid(&c.uuid)?;
        ident.check_blkno(c.blkno.get())?;
        ident.check_owner(u64::from(c.owner.get()))?;
    }
    check_btree_counts(block, tree, ident.crc, h.level.get(), h.numrecs.get())?;
    Ok(h)
}

/// Checks a block of a fork's B-tree: magic, checksum, uuid, block number, owner, and that its
/// record count fits.
pub fn check_btree_long<'a>(block: &'a [u8], ident: &Ident) -> Result<&'a BtreeLong, Fault> {
    let h = BtreeLong::at(block, 0)?;
    check_magic(Btree::Bmap.magic(ident.crc), h.magic.get())?;
    if ident.crc {
        let c = BtreeLongCrc::at(block, BtreeLong::SIZE)?;
        check_crc(block, BTREE_LONG_CRC_OFFSET)?;
        ident.check_uuid(&c.uuid)?;
        ident.check_blkno(c.blkno.get())?;
        ident.check_owner(c.owner.get())?;
    }
    check_btree_counts(
        block,
        Btree::Bmap,
        ident.crc,
        h.level.get(),
        h.numrecs.get(),
    )?;
    Ok(h)
}

fn check_btree_counts(
    block: &[u8],
    tree: Btree,
    crc: bool,
    level: u16,
    numrecs: u16,
) -> Result<(), Fault> {
    if level >= BTREE_MAXLEVELS {
        return Err(Fault::field(
            "bb_level",
            "fewer levels than any tree has",
            level,
        ));
    }
    if usize::from(numrecs) > tree.max_records(block.len(), crc, level) {
        return Err(Fault::field(
            "bb_numrecs",
            "as many records as fit in the block",
            numrecs,
        ));
    }
    Ok(())
}

/// Checks an inode: magic, version and, on version 3, checksum, uuid and inode number.
/// `inode` is the whole inode; `ident.owner` is its number.
pub fn check_dinode<'a>(inode: &'a [u8], ident: &Ident) -> Result<&'a DinodeV2, Fault> {
    let d = DinodeV2::at(inode, 0)?;
    check_magic(u32::from(DINODE_MAGIC), u32::from(d.magic.get()))?;
    if ident.crc {
        if d.version != 3 {
            return Err(Fault::field("di_version", "3", d.version));
        }
        let d3 = Dinode::at(inode, 0)?;
        check_crc(inode, DINODE_CRC_OFFSET)?;
        ident.check_uuid(&d3.uuid)?;
        ident.check_owner(d3.ino.get())?;
    } else if !(1..=2).contains(&d.version) {
        return Err(Fault::field("di_version", "1 or 2", d.version));
    }
    Ok(d)
}

/// Checks a directory data block (or, `single`, a single-block directory): magic, checksum,
/// uuid, block number, owner. Gives the table of largest holes.
pub fn check_dir_data<'a>(
    block: &'a [u8],
    single: bool,
    ident: &Ident,
) -> Result<&'a [Dir2DataFree; 3], Fault> {
    if ident.crc {
        let h = Dir3DataHeader::at(block, 0)?;
        check_magic(
            if single {
                DIR3_BLOCK_MAGIC
            } else {
                DIR3_DATA_MAGIC
            },
            h.hdr.magic.get(),
        )?;
        check_dir3_header(block, &h.hdr, ident)?;
        Ok(&h.bestfree)
    } else {
        let h = Dir2DataHeader::at(block, 0)?;
        check_magic(
            if single {
                DIR2_BLOCK_MAGIC
            } else {
                DIR2_DATA_MAGIC
            },
            h.magic.get(),
        )?;
        Ok(&h.bestfree)
    }
}

fn check_dir3_header(block: &[u8], h: &Dir3BlockHeader, ident: &Ident) -> Result<(), Fault> {
    check_crc(block, DIR3_DATA_CRC_OFFSET)?;
    ident.check_uuid(&h.uuid)?;
    ident.check_blkno(h.blkno.get())?;
    ident.check_owner(h.owner.get())
}

/// Checks a free index block: magic, checksum, uuid, block number, owner, and that its slots fit.
/// Gives the counts and the slots (`nvalid` of them).
pub fn check_dir_free<'a>(
    block: &'a [u8],
    ident: &Ident,
) -> Result<(&'a Dir2FreeCounts, &'a [Be16]), Fault> {
    let magic = Be32::at(block, 0)?.get();
    let counts_at = if ident.crc {
        check_magic(DIR3_FREE_MAGIC, magic)?;
        check_dir3_header(block, Dir3BlockHeader::at(block, 0)?, ident)?;
        Dir3BlockHeader::SIZE
    } else {
        check_magic(DIR2_FREE_MAGIC, magic)?;
        4
    };
    let c = Dir2FreeCounts::at(block, counts_at)?;
    let bests =
        Be16::slice_at(block, da_header_len(ident.crc), c.nvalid.get() as usize).map_err(|_| {
            Fault::field(
                "nvalid",
                "as many slots as fit in the block",
                c.nvalid.get(),
            )
        })?;
    Ok((c, bests))
}

/// The kind of a leaf or node block by its magic number, with version 4's number: one of
/// [`DIR2_LEAF1_MAGIC`], [`DIR2_LEAFN_MAGIC`], [`DA_NODE_MAGIC`], [`ATTR_LEAF_MAGIC`], or `None`
/// for a number that does not belong to this version.
pub fn da_block_kind(block: &[u8], crc: bool) -> Option<u16> {
    let m = DaBlockInfo::at(block, 0).ok()?.magic.get();
    let pairs = [
        (DIR2_LEAF1_MAGIC, DIR3_LEAF1_MAGIC),
        (DIR2_LEAFN_MAGIC, DIR3_LEAFN_MAGIC),
        (DA_NODE_MAGIC, DA3_NODE_MAGIC),
        (ATTR_LEAF_MAGIC, ATTR3_LEAF_MAGIC),
    ];
    pairs
        .iter()
        .find(|(v4, v5)| m == if crc { *v5 } else { *v4 })
        .map(|(v4, _)| *v4)
}

/// Checks what all leaf and node blocks share (checksum, uuid, block number, owner) and gives the
/// head's common part. The kind must have been told by [`da_block_kind`] first.
pub fn check_da_info<'a>(block: &'a [u8], ident: &Ident) -> Result<&'a DaBlockInfo, Fault> {
    if ident.crc {
        let i = Da3BlockInfo::at(block, 0)?;
        check_crc(block, DA3_CRC_OFFSET)?;
        ident.check_uuid(&i.uuid)?;
        ident.check_blkno(i.blkno.get())?;
        ident.check_owner(i.owner.get())?;
        Ok(&i.hdr)
    } else {
        DaBlockInfo::at(block, 0)
    }
}

fn da_counts_offset(crc: bool) -> usize {
    if crc {
        Da3BlockInfo::SIZE
    } else {
        DaBlockInfo::SIZE
    }
}

/// The counts and entries of a directory leaf block whose kind and head were checked.
pub fn dir_leaf_entries(
    block: &[u8],
    crc: bool,
) -> Result<(&Dir2LeafCounts, &[Dir2LeafEntry]), Fault> {
    let c = Dir2LeafCounts::at(block, da_counts_offset(crc))?;
    let entries = Dir2LeafEntry::slice_at(block, da_header_len(crc), c.count.get().into())
        .map_err(|_| {
            Fault::field(
                "count",
                "as many entries as fit in the block",
                c.count.get(),
            )
        })?;
    Ok((c, entries))
}

/// The table at the end of a [`DIR2_LEAF1_MAGIC`] block: longest free space of each data block.
pub fn dir_leaf1_bests(block: &[u8]) -> Result<&[Be16], Fault> {
    let tail = block.len().saturating_sub(4);
    let count = Be32::at(block, tail)?.get();
    let start = (count as usize)
        .checked_mul(2)
        .and_then(|n| tail.checked_sub(n))
        .ok_or(Fault::field(
            "bestcount",
            "as many slots as fit in the block",
            count,
        ))?;
    Be16::slice_at(block, start, count as usize)
}

/// The counts and entries of a node block whose kind and head were checked.
pub fn da_node_entries(block: &[u8], crc: bool) -> Result<(&DaNodeCounts, &[DaNodeEntry]), Fault> {
    let c = DaNodeCounts::at(block, da_counts_offset(crc))?;
    let entries =
        DaNodeEntry::slice_at(block, da_header_len(crc), c.count.get().into()).map_err(|_| {
            Fault::field(
                "count",
                "as many entries as fit in the block",
                c.count.get(),
            )
        })?;
    Ok((c, entries))
}

/// The levels of node blocks on the way from the root of a directory's or an attribute's tree to its
/// leaves.
#[derive(Debug, Default)]
pub struct Descent(Option<u16>);

impl Descent {
    /// Goes on to a node block: one level below the one before, and above the leaves.
    pub fn node(&mut self, level: u16) -> Result<(), Fault> {
        let fits = match self.0 {
            None => (1..=DA_NODE_MAXDEPTH).contains(&level),
            Some(above) => level > 0 && level == above - 1,
        };
        if !fits {
            return Err(Fault::field("level", "one less than the parent's", level));
        }
        self.0 = Some(level);
        Ok(())
    }

    /// Goes on to a leaf, which is below a node block of level 1 or the root.
    pub fn leaf(&self) -> Result<(), Fault> {
        match self.0 {
            None | Some(1) => Ok(()),
            Some(level) => Err(Fault::field("level", "1 above a leaf", level)),
        }
    }
}

/// The counts and entries of an attribute leaf whose kind and head were checked.
pub fn attr_leaf_entries(
    block: &[u8],
    crc: bool,
) -> Result<(&AttrLeafCounts, &[AttrLeafEntry]), Fault> {
    let c = AttrLeafCounts::at(block, da_counts_offset(crc))?;
    let entries = AttrLeafEntry::slice_at(block, attr_leaf_header_len(crc), c.count.get().into())
        .map_err(|_| {
        Fault::field(
            "count",
            "as many entries as fit in the block",
            c.count.get(),
        )
    })?;
    Ok((c, entries))
}

/// The tail and leaf entries of a single-block directory.
pub fn dir_block_entries(block: &[u8]) -> Result<(&Dir2BlockTail, &[Dir2LeafEntry]), Fault> {
    let tail_at = block.len().saturating_sub(Dir2BlockTail::SIZE);
    let tail = Dir2BlockTail::at(block, tail_at)?;
    let count = tail.count.get() as usize;
    let start = count
        .checked_mul(Dir2LeafEntry::SIZE)
        .and_then(|n| tail_at.checked_sub(n))
        .ok_or(Fault::field(
            "count",
            "as many entries as fit in the block",
            tail.count.get(),
        ))?;
    Ok((tail, Dir2LeafEntry::slice_at(block, start, count)?))
}

/// Checks a block of a remote attribute value or remote symbolic link on version 5 (`magic` is
/// [`ATTR3_RMT_MAGIC`] or [`SYMLINK_MAGIC`]): magic, checksum, uuid, block number, owner, offset,
/// and that its bytes fit. Gives its part of the contents.
pub fn check_remote<'a>(
    block: &'a [u8],
    magic: u32,
    offset: u32,
    ident: &Ident,
) -> Result<&'a [u8], Fault> {
    let h = RemoteHeader::at(block, 0)?;
    check_magic(magic, h.magic.get())?;
    check_crc(block, REMOTE_CRC_OFFSET)?;
    ident.check_uuid(&h.uuid)?;
    ident.check_blkno(h.blkno.get())?;
    ident.check_owner(h.owner.get())?;
    if h.offset.get() != offset {
        return Err(Fault::field(
            "offset",
            "where the previous block ends",
            h.offset.get(),
        ));
    }
    block[RemoteHeader::SIZE..]
        .get(..h.bytes.get() as usize)
        .ok_or(Fault::field(
            "bytes",
            "as many bytes as fit in the block",
            h.bytes.get(),
        ))
}

/// Checks a quota record: magic and version and, on version 5, checksum and uuid.
pub fn check_dquot<'a>(record: &'a [u8], ident: &Ident) -> Result<&'a Dquot, Fault> {
    let d = Dquot::at(record, 0)?;
    check_magic(u32::from(DQUOT_MAGIC), u32::from(d.magic.get()))?;
    if d.version != 1 {
        return Err(Fault::field("d_version", "1", d.version));
    }
    if ident.crc {
        check_crc(d.as_bytes(), DQUOT_CRC_OFFSET)?;
        ident.check_uuid(&d.uuid)?;
    }
    Ok(d)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extent_records_unpack() {
        let rec = ExtentRecord {
            l0: Be64::new((1 << 63) | (0x12_3456_789a << 9)),
            l1: Be64::new((0x1_2345_6789u64 << 21) | 0x1f_fffe),
        };
        let e = rec.unpack();
        assert_eq!(
            e,
            Extent {
                startoff: 0x12_3456_789a,
                startblock: 0x1_2345_6789,
                blockcount: 0x1f_fffe,
                unwritten: true
            }
        );
        let all = ExtentRecord {
            l0: Be64::new(u64::MAX >> 1),
            l1: Be64::new(u64::MAX),
        }
        .unpack();
        assert_eq!(all.startoff, (1 << 54) - 1);
        assert_eq!(all.startblock, (1 << 52) - 1);
        assert!(!all.unwritten);
    }

    #[test]
    fn name_hashes() {
        assert_eq!(da_hashname(b"."), 0x2e);
        assert_eq!(da_hashname(b".."), 0x172e);
        assert_eq!(da_hashname(b""), 0);
        assert_eq!(da_hashname_ci(b"ABC"), da_hashname_ci(b"abc"));
    }

    #[test]
    fn times() {
        assert_eq!(timestamp(0, false), (0, 0));
        assert_eq!(timestamp(0xffff_ffff_0000_0005, false), (-1, 5));
        assert_eq!(timestamp(0, true), (-(1 << 31), 0));
        assert_eq!(timestamp((1u64 << 31) * 1_000_000_000 + 7, true), (0, 7));
    }

    #[test]
    fn records_pack_as_they_unpack() {
        for e in [
            Extent {
                startoff: (1 << 54) - 1,
                startblock: (1 << 52) - 1,
                blockcount: MAX_EXTENT_BLOCKS,
                unwritten: false,
            },
            Extent {
                startoff: 0x12_3456_789a,
                startblock: 0x1_2345_6789,
                blockcount: 1,
                unwritten: true,
            },
        ] {
            assert_eq!(ExtentRecord::pack(&e).unpack(), e);
        }
        let c = InodeChunk {
            startino: 128,
            holemask: 0xff00,
            count: 32,
            freecount: 16,
            free: u64::MAX << 16,
        };
        assert_eq!(InobtRecord::pack(&c).unpack(true), c);
        for t in [
            (0, 7),
            (-1, 999_999_999),
            (13_569_465_600, 123),
            (-(1 << 31), 0),
        ] {
            assert_eq!(timestamp(bigtime_stamp(t.0, t.1), true), t);
        }
        assert_eq!(bigtime_stamp(i64::MIN, 5), 0);
        assert_eq!(bigtime_stamp(i64::MAX, 5), bigtime_stamp(1 << 60, 0));
    }

    #[test]
    fn sparse_chunks() {
        let r = InobtRecord {
            startino: Be32::new(128),
            counts: Be32::new(0xff00_2010),
            free: Be64::new(u64::MAX),
        };
        let c = r.unpack(true);
        assert_eq!((c.holemask, c.count, c.freecount), (0xff00, 32, 16));
        assert_eq!(c.holes(), 0xffff_ffff_0000_0000);
        assert_eq!(r.unpack(false).count, 64);
    }

    #[test]
    fn crcs() {
        let mut b = vec![7u8; 512];
        store_crc(&mut b, 100);
        assert_eq!(check_crc(&b, 100), Ok(()));
        b[3] ^= 1;
        assert!(matches!(check_crc(&b, 100), Err(Fault::Crc { .. })));
        assert!(matches!(check_crc(&b, 510), Err(Fault::Short { .. })));
    }
}
