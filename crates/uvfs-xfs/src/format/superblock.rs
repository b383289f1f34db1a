//! The superblock, and its feature bits and flags (`xfs_dsb`).

use super::{Be16, Be32, Be64, Le32, SB_CRC_OFFSET, Uuid, store_crc};
use std::mem::offset_of;
use zerocopy::IntoBytes;

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

/// The inodes and free blocks that a superblock counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Inodes allocated.
    pub icount: u64,
    /// Inodes allocated and free.
    pub ifree: u64,
    /// Free data blocks.
    pub fdblocks: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Counts) {
        self.icount += more.icount;
        self.ifree += more.ifree;
        self.fdblocks += more.fdblocks;
    }
}

impl Superblock {
    /// The counters.
    pub fn counts(&self) -> Counts {
        Counts {
            icount: self.icount.get(),
            ifree: self.ifree.get(),
            fdblocks: self.fdblocks.get(),
        }
    }

    /// Sets the counters.
    pub fn set_counts(&mut self, counts: Counts) {
        self.icount.set(counts.icount);
        self.ifree.set(counts.ifree);
        self.fdblocks.set(counts.fdblocks);
    }

    /// The quota inodes, with the names of the fields.
    pub fn quota_inodes(&self) -> [(&'static str, u64); 3] {
        [
            ("sb_uquotino", self.uquotino.get()),
            ("sb_gquotino", self.gquotino.get()),
            ("sb_pquotino", self.pquotino.get()),
        ]
    }

    /// The sector of `size` bytes that holds this superblock of version 5, with its checksum.
    pub fn sector(&self, size: usize) -> Vec<u8> {
        // Fields that this file system's features do not have are zeros.
        let len = match self.features_incompat.get() & INCOMPAT_META_UUID {
            0 => offset_of!(Superblock, meta_uuid),
            _ => offset_of!(Superblock, metadirino),
        };
        let mut sector = vec![0; size];
        sector[..len].copy_from_slice(&self.as_bytes()[..len]);
        store_crc(&mut sector, SB_CRC_OFFSET);
        sector
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
/// 32-bit project identifiers.
pub const VERSION2_PROJID32: u32 = 0x0080;
/// Checksums (set on version 5).
pub const VERSION2_CRC: u32 = 0x0100;
/// File types in directory entries (version 4).
pub const VERSION2_FTYPE: u32 = 0x0200;

/// Sets the bits that version 5 always has, and takes off those that it does not know; gives whether that changed
/// anything.
pub(crate) fn fit_v5(version: &mut u16, features2: &mut u32) -> bool {
    let old = (*version, *features2);
    *version |= VERSION_NLINK
        | VERSION_ALIGN
        | VERSION_LOGV2
        | VERSION_EXTFLG
        | VERSION_DIRV2
        | VERSION_MOREBITS;
    let always = VERSION2_LAZYSBCOUNT | VERSION2_ATTR2 | VERSION2_PROJID32 | VERSION2_CRC;
    *features2 = *features2 & VERSION2_FTYPE | always;
    old != (*version, *features2)
}

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

/// The names of incompatible features that cannot be read, for messages.
pub const UNREADABLE_NAMES: [(u32, &str); 3] = [
    (INCOMPAT_METADIR, "metadir"),
    (INCOMPAT_ZONED, "zoned"),
    (INCOMPAT_ZONE_GAPS, "zone gaps"),
];

/// Project quota is accounted (bits of [`Superblock::qflags`]).
pub const PQUOTA_ACCT: u16 = 0x0008;
/// User quota is counted.
pub const UQUOTA_ACCT: u16 = 0x0001;
/// Group quota is counted.
pub const GQUOTA_ACCT: u16 = 0x0040;
/// State of group or project quota on version 4, which version 5 never has.
pub const OQUOTA_FLAGS: u16 = 0x0030;
