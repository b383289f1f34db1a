//! Quota records (`xfs_dqblk`).

use super::{Be16, Be32, Be64, Le32, Uuid};

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
