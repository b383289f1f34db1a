//! A clean log: a record that says that the file system was unmounted, and zeros.

use super::layout::FixedBlocks;
use crate::format::*;
use crate::geometry::Geometry;
use uvfs_io::device::Geometry as Sizes;

const BLOCK: usize = 512;
/// The cycle that a new log begins with.
pub(crate) const CYCLE: u32 = 1;
/// The transaction of the unmount record, by convention.
const TRANSACTION: u32 = 0xb0c0_d0d0;
/// The unmount record's magic number, "Un" in the byte order of the machine (little-endian here).
const UNMOUNT_MAGIC: [u8; 8] = [0x6e, 0x55, 0, 0, 0, 0, 0, 0];

/// The first blocks of the log, with the unmount record. Its length is a multiple of the file system's
/// block and of what the device takes.
pub(crate) fn start(l: &FixedBlocks, sizes: &Sizes) -> Vec<u8> {
    of_cycle(&l.g, CYCLE, sizes.block.max(1) as usize)
}

/// [`start`] in a cycle, of a multiple of `unit` bytes.
pub(crate) fn of_cycle(g: &Geometry, cycle: u32, unit: usize) -> Vec<u8> {
    // With a log stripe the record is padded to it, and has a header for each 32 KiB.
    let stripe = match g.logsunit {
        0 | 1 => 0,
        s => s as usize,
    };
    let buffer = stripe.max(LOG_CYCLE_DATA_SIZE);
    let heads = buffer / LOG_CYCLE_DATA_SIZE;
    let first = heads * BLOCK;
    let data = stripe.max(first + BLOCK) - first;
    let len = (first + data)
        .next_multiple_of(g.block_size as usize)
        .next_multiple_of(unit);
    let mut bytes = vec![0; len];
    let lsn = Be64::new(u64::from(cycle) << 32);
    let mut cycle_data = [Be32::new(0); 64];
    cycle_data[0] = Be32::new(TRANSACTION);
    LogOpHeader {
        // The cycle is in the place of the first word of each block.
        tid: Be32::new(cycle),
        len: Be32::new(UNMOUNT_MAGIC.len() as u32),
        clientid: LOG_CLIENT_LOG,
        flags: LOG_OP_UNMOUNT,
        res2: Be16::new(0),
    }
    .put(&mut bytes, first);
    bytes[first + LogOpHeader::SIZE..][..UNMOUNT_MAGIC.len()].copy_from_slice(&UNMOUNT_MAGIC);
    // The further headers and the blocks of the padding begin with the cycle, too.
    let further = (BLOCK..first).chain(first + BLOCK..first + data);
    for at in further.step_by(BLOCK) {
        Be32::new(cycle).put(&mut bytes, at);
    }
    LogRecordHeader {
        magicno: Be32::new(LOG_RECORD_MAGIC),
        cycle: Be32::new(cycle),
        version: Be32::new(2),
        len: Be32::new(data as u32),
        lsn,
        tail_lsn: lsn,
        crc: Le32::new(0),
        prev_block: Be32::new(u32::MAX),
        num_logops: Be32::new(1),
        cycle_data,
        fmt: Be32::new(LOG_FORMAT_LITTLE_ENDIAN),
        fs_uuid: g.uuid,
        size: Be32::new(buffer as u32),
        pad: Be32::new(0),
    }
    .put(&mut bytes, 0);
    let (header, further) = bytes[..first].split_at(LogRecordHeader::SIZE);
    let header = (header, &further[BLOCK - LogRecordHeader::SIZE..]);
    let crc = crate::log::record_checksum(header, &bytes[first..], data);
    Le32::new(crc).put(&mut bytes, 32);
    bytes
}
