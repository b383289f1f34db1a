//! Whether the log is clean.
//!
//! The log is a ring of 512-byte blocks, each of which begins with the number of the cycle that
//! wrote it (in a record's head: its second word). The head, where the next write would go, is
//! where the cycle number falls. A clean log's last record is an unmount record that ends at the
//! head. The log is never replayed here: of a dirty one, what it still holds is not seen.
//!
//! Records have checksums. As in the kernel's recovery, one that is wrong among the last records,
//! which are written at the same time, is a write that was cut off: the log ends before it. Further
//! back it is damage, with which the kernel refuses to mount.

use crate::blocks::{Blocks, DiskExtent, unverified};
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use std::ops::Range;

/// Bytes of a log block.
const BLOCK: usize = 512;
/// Blocks that are read at once.
const READ_BLOCKS: u64 = 64;
/// Records that the kernel writes at the same time (`XLOG_MAX_ICLOGS`).
const RECORDS_AT_ONCE: usize = 8;
/// Headers of a record: one for each 32 KiB of the largest log buffer, and room to spare.
const MAX_HEADS: u64 = 16;
/// Blocks of a record, headers and data.
const MAX_RECORD_BLOCKS: u64 = MAX_HEADS + (1 << 20) / BLOCK as u64;
/// Bytes of a further header: a cycle and the first words of 64 blocks.
const EXTENDED_HEADER: usize = 260;
/// Blocks that are searched for a record before the head: the largest record (256 KiB) with its
/// heads and padding to a stripe unit, and room to spare.
const SEARCH_BLOCKS: u64 = 2048;

/// Blocks before the head that may have been written at the same time.
const SCAN_BLOCKS: u64 = (RECORDS_AT_ONCE as u64 * (256 << 10)) / BLOCK as u64;

/// The state of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogState {
    /// Unmounted cleanly: nothing is missing.
    Clean,
    /// Never written, or zeroed by a repair: nothing is missing.
    Zeroed,
    /// There are changes that were not written back. Addresses are blocks of the log.
    Dirty {
        /// Where the next write would go.
        head: u64,
        /// The oldest record still needed, if the last record says.
        tail: Option<u64>,
        /// The last record was cut off: the log ends before it.
        torn: bool,
    },
    /// The log is on another device.
    External,
    /// The log could not be read or makes no sense.
    Unreadable(String),
}

impl LogState {
    /// Whether changes may be missing.
    pub fn is_clean(&self) -> bool {
        matches!(self, LogState::Clean | LogState::Zeroed)
    }

    /// The warning for the user, `None` if there is nothing to say.
    pub fn warning(&self) -> Option<String> {
        let stale = "what was changed last may be missing or half done: new, removed and renamed \
                     files, sizes, times, attributes, link counts and all free space counters; \
                     mount the file system once to replay it";
        match self {
            LogState::Clean | LogState::Zeroed => None,
            LogState::Dirty { head, tail, torn } => {
                let from = tail.map_or(String::new(), |t| format!(" from block {t}"));
                let torn = match torn {
                    true => " (where its last write was cut off)",
                    false => "",
                };
                Some(format!(
                    "the log is dirty{from} up to block {head}{torn}: {stale}"
                ))
            }
            LogState::External => Some(format!(
                "the log is on another device; if it is dirty, {stale}"
            )),
            LogState::Unreadable(why) => Some(format!(
                "cannot tell whether the log is clean ({why}); if it is not, {stale}"
            )),
        }
    }
}

/// Finds the head and looks at the last record.
pub(crate) fn state(blocks: &impl Blocks, g: &Geometry) -> LogState {
    if g.logstart == 0 {
        return LogState::External;
    }
    let Some(a) = g.fsb(g.logstart) else {
        return LogState::Unreadable("it lies outside the file system".into());
    };
    let log = Log::new(blocks, g, a);
    log.state().unwrap_or_else(LogState::Unreadable)
}

/// The first damaged block among the records of a dirty log that are still needed.
/// Recovery would fail there.
pub(crate) fn damage(blocks: &impl Blocks, g: &Geometry, state: &LogState) -> Option<String> {
    let LogState::Dirty {
        head,
        tail: Some(tail),
        ..
    } = *state
    else {
        return None;
    };
    let a = g.fsb(g.logstart)?;
    match Log::new(blocks, g, a).damage(tail, head) {
        Ok(None) => None,
        Ok(Some((block, why))) => Some(format!("block {block}: {why}")),
        Err(why) => Some(why),
    }
}

/// Where the next write to the log would go, as a log sequence number: cycle in the high half,
/// block in the low one. Nothing on disk can have been logged later than that.
pub(crate) fn head_lsn(blocks: &impl Blocks, g: &Geometry) -> Option<u64> {
    let a = g.fsb(g.logstart).filter(|_| g.logstart != 0)?;
    let log = Log::new(blocks, g, a);
    if log.len < 4 {
        return None;
    }
    Some(match log.head().ok()? {
        // Without a log there is nothing that metadata can have been logged in.
        None => 0,
        Some(head) => {
            let cycle = u64::from(log.cycle(head - 1).ok()?);
            match head == log.len {
                true => (cycle + 1) << 32,
                false => cycle << 32 | head,
            }
        }
    })
}

struct Log<'a, B> {
    blocks: &'a B,
    /// First sector.
    start: u64,
    /// Blocks of 512 bytes.
    len: u64,
    uuid: Uuid,
}

impl<'a, B: Blocks> Log<'a, B> {
    fn new(blocks: &'a B, g: &Geometry, at: AgBlock) -> Log<'a, B> {
        Log {
            blocks,
            start: g.daddr(at),
            len: u64::from(g.logblocks) << (g.blocklog - 9),
            uuid: g.uuid,
        }
    }

    fn read(&self, block: u64) -> Result<Vec<u8>, String> {
        debug_assert!(block < self.len);
        self.blocks(block, 1)
    }

    /// The cycle that wrote a block.
    fn cycle(&self, block: u64) -> Result<u32, String> {
        Ok(cycle_of(&self.read(block)?))
    }

    /// The first block in `low..high` whose cycle is `cycle`, if all from there on have it and
    /// none before; `high` if there is none.
    fn first_with(&self, mut low: u64, mut high: u64, cycle: u32) -> Result<u64, String> {
        while low < high {
            let mid = low + (high - low) / 2;
            if self.cycle(mid)? == cycle {
                high = mid;
            } else {
                low = mid + 1;
            }
        }
        Ok(low)
    }

    /// The first block of `range` that was written in this cycle.
    fn find_cycle(&self, range: Range<u64>, cycle: u32) -> Result<Option<u64>, String> {
        let mut bytes = vec![0; (READ_BLOCKS as usize * BLOCK) << 3];
        let step = (bytes.len() / BLOCK) as u64;
        for from in range.clone().step_by(step as usize) {
            let n = step.min(range.end - from) as usize;
            let part = &mut bytes[..n * BLOCK];
            self.blocks
                .read_data((self.start + from) * BLOCK as u64, part)
                .map_err(|e| format!("reading its block {from}: {e}"))?;
            if let Some(i) = part.chunks_exact(BLOCK).position(|b| cycle_of(b) == cycle) {
                return Ok(Some(from + i as u64));
            }
        }
        Ok(None)
    }

    /// The block after the last one that was written, as the kernel finds it; `None` if nothing was.
    fn head(&self) -> Result<Option<u64>, String> {
        let (first, last) = (self.cycle(0)?, self.cycle(self.len - 1)?);
        if first == 0 {
            return Ok(None);
        }
        // The head is where the last cycle's blocks give way to the previous cycle's (or to
        // blocks never written, whose cycle is 0). A log that is in one cycle throughout ends at
        // its end.
        let (head, old) = match first == last {
            true => (self.len, last.wrapping_sub(1)),
            false => (self.first_with(1, self.len, last)?, last),
        };
        // Blocks of several records are written at the same time: the first one that was not
        // written, among those that may have been in flight, is the end of the log.
        let scan = SCAN_BLOCKS.min(self.len);
        if last != 0 && head < scan {
            let end = self.len - (scan - head)..self.len;
            if let Some(hole) = self.find_cycle(end, old.wrapping_sub(1))? {
                return Ok(Some(hole));
            }
        }
        let hole = self.find_cycle(head.saturating_sub(scan)..head, old)?;
        // The first block is of another cycle.
        Ok(Some(hole.unwrap_or(head).max(1)))
    }

    /// Reads blocks, around the end of the log if need be.
    fn blocks(&self, start: u64, count: u64) -> Result<Vec<u8>, String> {
        let mut out = Vec::with_capacity(count as usize * BLOCK);
        let mut done = 0;
        while done < count {
            let at = (start + done) % self.len;
            let n = (count - done).min(self.len - at).min(READ_BLOCKS);
            let e = [DiskExtent {
                daddr: self.start + at,
                bytes: n as u32 * BLOCK as u32,
            }];
            let part = self.blocks.read(&e, &unverified);
            let part = part.map_err(|e| format!("reading its block {at}: {e:?}"))?;
            out.extend_from_slice(&part);
            done += n;
        }
        Ok(out)
    }

    /// How far `to` is from `from`, forwards.
    fn distance(&self, from: u64, to: u64) -> u64 {
        (to + self.len - from) % self.len
    }

    /// The last record that begins before `end`, at most `limit` blocks before it.
    fn record_before(&self, end: u64, limit: u64) -> Result<Option<Record>, String> {
        let limit = limit.min(self.len);
        let mut back = 0;
        while back < limit {
            let n = READ_BLOCKS.min(limit - back);
            let from = (end + self.len - back - n) % self.len;
            let bytes = self.blocks(from, n)?;
            for (i, block) in bytes.chunks_exact(BLOCK).enumerate().rev() {
                if let Some(r) = self.record((from + i as u64) % self.len, block) {
                    return Ok(Some(r));
                }
            }
            back += n;
        }
        Ok(None)
    }

    /// The record that begins with this block, if one does.
    fn record(&self, at: u64, block: &[u8]) -> Option<Record> {
        let h = LogRecordHeader::at(block, 0).ok()?;
        if h.magicno.get() != LOG_RECORD_MAGIC || h.fs_uuid != self.uuid {
            return None;
        }
        let of = |bytes: u32, unit: usize| (bytes as usize).div_ceil(unit) as u64;
        let heads = match h.version.get() & 2 {
            0 => 1,
            _ => of(h.size.get(), LOG_CYCLE_DATA_SIZE).clamp(1, MAX_HEADS),
        };
        Some(Record {
            at,
            heads,
            data: of(h.len.get(), BLOCK),
            ops: h.num_logops.get(),
            tail: Some(h.tail_lsn.get() & 0xffff_ffff).filter(|t| *t < self.len),
            crc: h.crc.get(),
            bytes: h.len.get() as usize,
            extended: h.version.get() & 2 != 0,
        })
    }

    /// Whether a record's checksum is right. Records of a version 4 file system may have none.
    fn is_sound(&self, r: &Record) -> Result<bool, String> {
        if r.crc == 0 {
            return Ok(true);
        }
        if r.whole() > MAX_RECORD_BLOCKS.min(self.len) {
            return Ok(false);
        }
        let bytes = self.blocks(r.at, r.whole())?;
        let (heads, data) = bytes.split_at(r.heads as usize * BLOCK);
        // 32-bit machines of some architectures do not pad the header.
        Ok([LogRecordHeader::SIZE, LogRecordHeader::SIZE - 4]
            .into_iter()
            .any(|size| r.checksum(size, heads, data) == r.crc))
    }

    /// Where the log really ends: a record among the last ones that is not whole, because the
    /// machine went down while it was written, is the end of it, and so is a gap. The records are
    /// written several at a time, so that a later one may be whole.
    fn sound_head(&self, head: u64, last: Record) -> Result<(u64, Option<Record>), String> {
        let tail = last.tail;
        let mut records = vec![last];
        while records.len() < RECORDS_AT_ONCE {
            let first = records.last().expect("has at least one");
            if tail == Some(first.at) {
                break;
            }
            let limit = tail.map_or(SEARCH_BLOCKS, |t| self.distance(t, first.at));
            match self.record_before(first.at, limit.min(SEARCH_BLOCKS))? {
                Some(r) => records.push(r),
                None => break,
            }
        }
        let mut end: Option<u64> = None;
        let mut before: Option<Record> = None;
        for r in records.into_iter().rev() {
            let gap = end.is_some_and(|e| e != r.at);
            if gap || !self.is_sound(&r)? {
                let head = if gap { end.unwrap_or(r.at) } else { r.at };
                let before = match before {
                    Some(b) => Some(b),
                    None => self.record_before(head, SEARCH_BLOCKS)?,
                };
                return Ok((head, before));
            }
            end = Some((r.at + r.whole()) % self.len);
            before = Some(r);
        }
        Ok((head, before))
    }

    /// Whether a record that ends at `head` says that the file system was unmounted.
    fn unmounted(&self, r: &Record, head: u64) -> Result<bool, String> {
        if (r.at + r.whole()) % self.len != head || r.ops != 1 {
            return Ok(false);
        }
        let op = self.read((r.at + r.heads) % self.len)?;
        Ok(LogOpHeader::at(&op, 0)
            .is_ok_and(|op| op.flags & LOG_OP_UNMOUNT != 0 && op.clientid == LOG_CLIENT_LOG))
    }

    fn state(&self) -> Result<LogState, String> {
        if self.len < 4 {
            return Err("it has no blocks".into());
        }
        let Some(head) = self.head()? else {
            return Ok(LogState::Zeroed);
        };
        let mut head = head % self.len;
        let found = head;
        // The last record before the head.
        let mut record = self.record_before(head, SEARCH_BLOCKS)?;
        while let Some(r) = &record
            && r.whole() > self.distance(r.at, head)
        {
            // Its write was cut off: recovery ends before it.
            head = r.at;
            record = self.record_before(head, SEARCH_BLOCKS.min(self.distance(found, head)))?;
        }
        let clean = |record: &Option<Record>, head| match record {
            Some(r) => self.unmounted(r, head),
            None => Ok(false),
        };
        if clean(&record, head)? {
            return Ok(LogState::Clean);
        }
        if let Some(r) = record {
            let sound = self.sound_head(head, r)?;
            let moved = head != sound.0;
            (head, record) = sound;
            if moved && clean(&record, head)? {
                return Ok(LogState::Clean);
            }
        }
        Ok(LogState::Dirty {
            head,
            tail: record.and_then(|r| r.tail),
            torn: head != found,
        })
    }

    /// Goes through the records from `tail` up to `head`: the block of the first one that is not
    /// sound, and what is wrong with it.
    fn damage(&self, tail: u64, head: u64) -> Result<Option<(u64, &'static str)>, String> {
        let mut at = tail;
        // A record has a block at least, so this ends.
        let mut left = self.distance(tail, head);
        while left > 0 {
            let Some(r) = self.record(at, &self.read(at)?) else {
                return Ok(Some((at, "no record begins where the one before it ends")));
            };
            if r.whole() > left {
                return Ok(Some((at, "the record is longer than the log")));
            }
            if !self.is_sound(&r)? {
                return Ok(Some((at, "the record's checksum is wrong")));
            }
            left -= r.whole();
            at = (at + r.whole()) % self.len;
        }
        Ok(None)
    }
}

/// The cycle that wrote a block.
fn cycle_of(block: &[u8]) -> u32 {
    let word = |i| Be32::at(block, i).map_or(0, |w| w.get());
    match word(0) {
        LOG_RECORD_MAGIC => word(4),
        cycle => cycle,
    }
}

/// The checksum of a record of `bytes` bytes of data that begins with `heads` blocks of headers.
pub(crate) fn record_checksum(record: &[u8], heads: usize, bytes: usize) -> u32 {
    let r = Record {
        at: 0,
        heads: heads as u64,
        data: 0,
        ops: 0,
        tail: None,
        crc: 0,
        bytes,
        extended: heads > 1,
    };
    let (heads, data) = record.split_at(heads * BLOCK);
    r.checksum(LogRecordHeader::SIZE, heads, data)
}

/// A record of the log.
#[derive(Debug, Clone, Copy)]
struct Record {
    /// Its first block.
    at: u64,
    /// Blocks of headers, and of data.
    heads: u64,
    data: u64,
    ops: u32,
    /// The block of the oldest record still needed.
    tail: Option<u64>,
    crc: u32,
    /// Bytes of data.
    bytes: usize,
    /// Its headers after the first are part of the checksum.
    extended: bool,
}

impl Record {
    /// All its blocks.
    fn whole(&self) -> u64 {
        self.heads + self.data
    }

    /// The checksum of a record: of its header of `size` bytes with zeros for the checksum, the
    /// further headers that its data needs, and its data as it is on disk.
    fn checksum(&self, size: usize, heads: &[u8], data: &[u8]) -> u32 {
        const AT: usize = 32;
        let mut crc = compute_crc(&heads[..size], AT);
        if self.extended {
            let needed = self.bytes.div_ceil(LOG_CYCLE_DATA_SIZE);
            for head in heads.chunks_exact(BLOCK).take(needed).skip(1) {
                crc = crc32c::crc32c_append(crc, &head[..EXTENDED_HEADER]);
            }
        }
        crc32c::crc32c_append(crc, &data[..self.bytes.min(data.len())])
    }
}
