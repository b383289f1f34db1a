//! Inodes on disk, their flags and timestamps (`xfs_dinode`).

use super::{Be16, Be32, Be64, Le32, NULLAGINO, Uuid};

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

/// Data is in the realtime section.
pub const DIFLAG_REALTIME: u16 = 1;
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

impl Dinode {
    /// The core of a free inode of a file system of version 5.
    pub(crate) fn free(uuid: Uuid, ino: u64, generation: u32) -> Dinode {
        let mut d: Dinode = zerocopy::FromZeros::new_zeroed();
        d.v2.magic.set(DINODE_MAGIC);
        d.v2.version = 3;
        d.v2.r#gen.set(generation);
        d.v2.next_unlinked.set(NULLAGINO);
        d.ino.set(ino);
        d.uuid = uuid;
        d
    }

    /// The numbers of extents of the data and the attribute fork.
    pub fn extent_counts(&self) -> (u64, u64) {
        let d = &self.v2;
        match self.flags2.get() & DIFLAG2_NREXT64 != 0 {
            true => (d.big_nextents.get(), d.nextents.get().into()),
            false => (d.nextents.get().into(), d.anextents.get().into()),
        }
    }

    /// Sets the number of extents of the data or the attribute fork.
    pub(crate) fn set_extents(&mut self, attr: bool, n: u64) {
        let d = &mut self.v2;
        match (attr, self.flags2.get() & DIFLAG2_NREXT64 != 0) {
            (false, true) => d.big_nextents.set(n),
            (false, false) | (true, true) => d.nextents.set(n as u32),
            (true, false) => d.anextents.set(n as u16),
        }
    }
}

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
