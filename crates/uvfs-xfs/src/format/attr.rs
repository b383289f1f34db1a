//! Extended attributes, remote values and symbolic links.

use super::{Be16, Be32, Be64, Le32, Uuid};

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

/// The fields behind [`DaBlockInfo`](super::DaBlockInfo) or [`Da3BlockInfo`](super::Da3BlockInfo) in an attribute leaf (`xfs_attr_leaf_hdr`).
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
}

/// Bytes of the head of an attribute leaf.
pub fn attr_leaf_header_len(crc: bool) -> usize {
    if crc { 80 } else { 32 }
}
