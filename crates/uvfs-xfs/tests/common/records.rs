//! Damage to the records of a dirty log.

use super::{Choose, MemImage};
use uvfs_xfs::Geometry;
use uvfs_xfs::format::*;

const BLOCK: usize = 512;
const HEADER: usize = LogRecordHeader::SIZE;
/// Bytes of a further header that count.
const FURTHER: usize = 260;

/// A record of a log.
#[derive(Debug, Clone, Copy)]
pub struct LogRecord {
    /// Its first byte.
    pub offset: u64,
    heads: usize,
    len: usize,
}

/// The records of the log that do not go around its end, in the order in which they lie.
pub fn log_records(image: &MemImage, g: &Geometry) -> Vec<LogRecord> {
    let start = g.daddr(g.fsb(g.logstart).unwrap()) * 512;
    let end = start + (u64::from(g.logblocks) << g.blocklog);
    let mut out = Vec::new();
    let mut head = [0; BLOCK];
    for offset in (start..end).step_by(BLOCK) {
        image.get(offset, &mut head);
        let h = LogRecordHeader::at(&head, 0).unwrap();
        let (len, size) = (h.len.get() as usize, h.size.get() as usize);
        let heads = size.div_ceil(LOG_CYCLE_DATA_SIZE).max(1);
        let whole = (heads * BLOCK + len.next_multiple_of(BLOCK)) as u64;
        if h.magicno.get() == LOG_RECORD_MAGIC && len < 1 << 20 && offset + whole <= end {
            out.push(LogRecord { offset, heads, len });
        }
    }
    out
}

/// Changes something in one of the last records; most often its checksum is right afterwards. Or writes zeros over a
/// part of the log.
pub fn damage_log(image: &mut MemImage, records: &[LogRecord], c: &mut dyn Choose) -> String {
    let near = records.len().min(40) as u64;
    let r = records[records.len() - 1 - c.below(near) as usize];
    let mut bytes = vec![0; r.heads * BLOCK + r.len];
    image.get(r.offset, &mut bytes);
    // Few of the operations, and the first words of the items, are where most is decided.
    let (from, room) = match c.below(8) {
        0 => (0, HEADER),
        1..=4 => (r.heads * BLOCK, r.len.min(700)),
        _ => (r.heads * BLOCK, r.len),
    };
    if room == 0 {
        return "nothing".into();
    }
    let at = from + c.below(room as u64) as usize;
    let what = match c.below(5) {
        0 | 1 => {
            let bit = c.below(8);
            bytes[at] ^= 1 << bit;
            format!("bit {bit} of byte {at}")
        }
        2 | 3 => {
            let width = 1 << c.below(4);
            let at = at / width * width;
            let values = [0, 1, 2, 3, 0x7f, 0xff, 0x1000, u64::MAX, 1 << 31];
            let value = values[c.below(values.len() as u64) as usize].to_le_bytes();
            let n = width.min(bytes.len() - at);
            bytes[at..at + n].copy_from_slice(&value[..n]);
            format!("{n} bytes at {at} to {value:02x?}")
        }
        _ => {
            let n = (1 + c.below(64) as usize).min(bytes.len() - at);
            let other = c.below((bytes.len() - n) as u64 + 1) as usize;
            bytes.copy_within(other..other + n, at);
            format!("{n} bytes from {other} to {at}")
        }
    };
    let whole = c.below(16) != 0;
    if whole {
        let further = (1..r.len.div_ceil(LOG_CYCLE_DATA_SIZE).min(r.heads))
            .flat_map(|i| bytes[i * BLOCK..i * BLOCK + FURTHER].to_vec());
        let summed: Vec<u8> = (bytes[..HEADER].iter().copied())
            .chain(further)
            .chain(bytes[r.heads * BLOCK..].iter().copied())
            .collect();
        let crc = std::mem::offset_of!(LogRecordHeader, crc);
        let sum = compute_crc(&summed, crc);
        bytes[crc..crc + 4].copy_from_slice(&sum.to_le_bytes());
    }
    if c.below(32) == 0 {
        bytes[at..].fill(0);
    }
    image.put(r.offset, &bytes);
    format!("record at {}: {what}, checksum set: {whole}", r.offset)
}
