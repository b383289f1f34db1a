//! Directory blocks, directory/attribute ("da") trees, and the hash of names.

use super::{Be16, Be32, Be64, Layout, Le32, Uuid};
use zerocopy::TryFromBytes;

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
    /// The kind of block.
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

/// The fields behind [`DaBlockInfo`] or [`Da3BlockInfo`] in a directory leaf. Version 5 adds four
/// bytes of padding.
pub struct Dir2LeafCounts: 4 {
    /// Entries.
    pub count: Be16,
    /// Stale ones among them.
    pub stale: Be16,
}

/// The fields behind [`DaBlockInfo`] or [`Da3BlockInfo`] in a node. Version 5 adds four bytes of
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

/// The fields behind the magic number (version 4) or [`Dir3BlockHeader`] (version 5, plus four bytes
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
    match crc {
        true => Dir3DataHeader::SIZE,
        false => Dir2DataHeader::SIZE,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, TryFromBytes)]
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
    /// Whether a file of this type has neither data nor a target: a device, FIFO, socket or whiteout, or no type.
    pub fn is_special(self) -> bool {
        !matches!(
            self,
            FileType::Regular | FileType::Directory | FileType::Symlink
        )
    }

    /// Whether a file whose entry says this type may be a directory.
    pub fn may_be_directory(self) -> bool {
        matches!(self, FileType::Directory | FileType::Unknown)
    }

    /// From a directory entry; `None` for values that the format does not know.
    pub fn from_ftype(v: u8) -> Option<FileType> {
        FileType::try_read_from_bytes(&[v]).ok()
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
