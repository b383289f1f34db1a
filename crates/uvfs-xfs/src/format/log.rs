//! Records of the log.

use super::{Be16, Be32, Be64, Le32, Uuid};

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
    /// The writer.
    pub clientid: u8,
    /// `LOG_OP_*`.
    pub flags: u8,
    /// Zero.
    pub res2: Be16,
}
}
