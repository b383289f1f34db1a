//! Records of the log.

use super::{Be16, Be32, Be64, Le16, Le32, Le64, Uuid};

/// Magic number of a log record.
pub const LOG_RECORD_MAGIC: u32 = 0xfeed_babe;
/// Bytes of log data that one head's cycle array covers.
pub const LOG_CYCLE_DATA_SIZE: usize = 32 * 1024;
/// Format of the machine that wrote a log: Linux, little-endian.
pub const LOG_FORMAT_LITTLE_ENDIAN: u32 = 1;
/// Operation flag: a transaction begins.
pub const LOG_OP_START: u8 = 0x01;
/// Operation flag: a transaction is complete.
pub const LOG_OP_COMMIT: u8 = 0x02;
/// Operation flag: goes on with the region that the operation before it began.
pub const LOG_OP_CONTINUED: u8 = 0x08;
/// Operation flag: the log was unmounted cleanly.
pub const LOG_OP_UNMOUNT: u8 = 0x20;
/// Client of transactions.
pub const LOG_CLIENT_TRANSACTION: u8 = 0x69;
/// Magic number of a transaction's header.
pub const LOG_TRANSACTION_MAGIC: u32 = 0x5452_414e;
/// Bytes of a transaction's header.
pub const LOG_TRANSACTION_HEADER: usize = 16;
/// Bytes of a buffer that one bit of a buffer item's map stands for.
pub const LOG_BUFFER_CHUNK: usize = 128;
/// Buffer item: inodes, of which only the lists of unlinked ones are replayed.
pub const LOG_BUFFER_INODES: u16 = 1;
/// Buffer item: the buffer's blocks are freed, and what was logged of it before is not replayed.
pub const LOG_BUFFER_CANCEL: u16 = 1 << 1;
/// Inode item: the device number.
pub const LOG_INODE_DEV: u32 = 0x10;
/// Inode item: data fork in the inode, extents, or root of a tree.
pub const LOG_INODE_DATA: [u32; 3] = [0x2, 0x4, 0x8];
/// Inode item: the same of the attribute fork.
pub const LOG_INODE_ATTR: [u32; 3] = [0x40, 0x80, 0x100];
/// Inode item: the blocks of a fork's tree get the inode as their owner.
pub const LOG_INODE_OWNER: u32 = 0x200 | 0x400;
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
    /// The writer.
    pub clientid: u8,
    /// `LOG_OP_*`.
    pub flags: u8,
    /// Zero.
    pub res2: Be16,
}

/// What each item begins with, and its number if it announces changes (an intent) or says that they are done.
pub struct LogItemHeader: 16 {
    /// `XFS_LI_*`.
    pub r#type: Le16,
    /// Regions of the item.
    pub size: Le16,
    /// Extents of an intent.
    pub count: Le32,
    /// The intent's number.
    pub id: Le64,
}

/// A mapping that an intent is about (`xfs_map_extent`).
pub struct LogMapping: 32 {
    /// The inode.
    pub owner: Le64,
    /// First block on disk.
    pub startblock: Le64,
    /// First block in the file.
    pub startoff: Le64,
    /// Blocks.
    pub len: Le32,
    /// What is done with it.
    pub flags: Le32,
}

/// A change of an extended attribute (`xfs_attri_log_format`); names and values follow.
pub struct LogAttribute: 40 {
    /// `XFS_LI_ATTRI`.
    pub r#type: Le16,
    /// Regions of the item.
    pub size: Le16,
    /// Generation of the inode, for parent pointers.
    pub igen: Le32,
    /// The intent's number.
    pub id: Le64,
    /// The inode.
    pub ino: Le64,
    /// The operation: an attribute is set, removed or replaced.
    pub op: Le32,
    /// Bytes of the name; in halves those of the old and of the new one if one replaces the other.
    pub name_len: Le32,
    /// Bytes of a value.
    pub value_len: Le32,
    /// `ATTR_*`.
    pub filter: Le32,
}

/// An exchange of the contents of two files (`xfs_xmi_log_format`).
pub struct LogExchange: 88 {
    /// `XFS_LI_XMI`.
    pub r#type: Le16,
    /// Regions of the item.
    pub size: Le16,
    /// Zero.
    pub pad: Le32,
    /// The intent's number.
    pub id: Le64,
    /// The inodes.
    pub ino: [Le64; 2],
    /// Their generations.
    pub generation: [Le32; 2],
    /// Where what is left begins in each, in blocks.
    pub start: [Le64; 2],
    /// How many blocks are left.
    pub blocks: Le64,
    /// Options of the exchange, such as that sizes are exchanged too.
    pub flags: Le64,
    /// The sizes in the end, in bytes.
    pub size_bytes: [Le64; 2],
}

/// A logged buffer (`xfs_buf_log_format`), before the map of the chunks that were logged.
pub struct LogBuffer: 20 {
    /// `XFS_LI_BUF`.
    pub r#type: Le16,
    /// Regions of the item.
    pub size: Le16,
    /// `LOG_BUFFER_*`; the type of the buffer in the upper five bits.
    pub flags: Le16,
    /// Sectors of the buffer.
    pub len: Le16,
    /// First sector.
    pub blkno: Le64,
    /// Words of the map.
    pub map_size: Le32,
}

/// A logged inode (`xfs_inode_log_format`).
pub struct LogInode: 56 {
    /// `XFS_LI_INODE`.
    pub r#type: Le16,
    /// Regions of the item.
    pub size: Le16,
    /// `LOG_INODE_*`.
    pub fields: Le32,
    /// Bytes of the attribute fork.
    pub asize: Le16,
    /// Bytes of the data fork.
    pub dsize: Le16,
    /// Alignment of 64-bit machines; others have logged without it.
    pub pad: Le32,
    /// The inode.
    pub ino: Le64,
    /// Device number.
    pub rdev: Le32,
    /// The rest of a union.
    pub unused: [u8; 12],
    /// First sector of the buffer that it lies in.
    pub blkno: Le64,
    /// Sectors of that.
    pub len: Le32,
    /// Its first byte there.
    pub boffset: Le32,
}

/// A new chunk of inodes (`xfs_icreate_log`).
pub struct LogInodeChunk: 28 {
    /// `XFS_LI_ICREATE`.
    pub r#type: Le16,
    /// Regions of the item.
    pub size: Le16,
    /// Allocation group.
    pub ag: Be32,
    /// First block.
    pub agbno: Be32,
    /// Inodes.
    pub count: Be32,
    /// Bytes of an inode.
    pub isize: Be32,
    /// Blocks.
    pub length: Be32,
    /// Generation of the inodes.
    pub r#gen: Be32,
}

/// A logged quota record (`xfs_dq_logformat`).
pub struct LogDquot: 24 {
    /// `XFS_LI_DQUOT`.
    pub r#type: Le16,
    /// Regions of the item.
    pub size: Le16,
    /// User, group or project.
    pub id: Le32,
    /// First sector of the buffer that it lies in.
    pub blkno: Le64,
    /// Blocks of the buffer.
    pub len: Le32,
    /// Its first byte there.
    pub boffset: Le32,
}
}
