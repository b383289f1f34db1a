//! Whether the log is clean.
//!
//! The log is a ring of 512-byte blocks, each of which begins with the number of the cycle that
//! wrote it (in a record's head: its second word). The head, where the next write would go, is
//! where the cycle number falls. A clean log's last record is an unmount record that ends at the
//! head. The log is never replayed here: of a dirty one, what it still holds is not seen.

use crate::blocks::{Blocks, DiskExtent, unverified};
use crate::format::*;
use crate::geometry::Geometry;

/// Bytes of a log block.
const BLOCK: usize = 512;
/// Blocks that are searched for a record before the head: the largest record (256 KiB) with its
/// heads and padding to a stripe unit, and room to spare.
const SEARCH_BLOCKS: u64 = 2048;

/// What the log says.
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

    /// What to tell the user, `None` if there is nothing to say.
    pub fn warning(&self) -> Option<String> {
        let stale = "what was changed last may be missing or half done: new, removed and renamed \
                     files, sizes, times, attributes, link counts and all free space counters; \
                     mount the file system once to replay it";
        match self {
            LogState::Clean | LogState::Zeroed => None,
            LogState::Dirty { head, tail } => {
                let from = tail.map_or(String::new(), |t| format!(" from block {t}"));
                Some(format!(
                    "the log is dirty{from} up to block {head}: {stale}"
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
    let log = Log {
        blocks,
        start: g.daddr(a),
        len: u64::from(g.logblocks) << (g.blocklog - 9),
        uuid: g.uuid,
    };
    log.state().unwrap_or_else(LogState::Unreadable)
}

/// Where the next write to the log would go, as a log sequence number: cycle in the high half,
/// block in the low one. Nothing on disk can have been logged later than that.
pub(crate) fn head_lsn(blocks: &impl Blocks, g: &Geometry) -> Option<u64> {
    let a = g.fsb(g.logstart).filter(|_| g.logstart != 0)?;
    let log = Log {
        blocks,
        start: g.daddr(a),
        len: u64::from(g.logblocks) << (g.blocklog - 9),
        uuid: g.uuid,
    };
    if log.len < 4 {
        return None;
    }
    let (first, last) = (log.cycle(0).ok()?, log.cycle(log.len - 1).ok()?);
    if first == 0 {
        return None;
    }
    if first == last {
        return Some((u64::from(first) + 1) << 32);
    }
    let head = log.first_with(1, log.len, last).ok()?;
    Some(u64::from(first) << 32 | head)
}

struct Log<'a, B> {
    blocks: &'a B,
    /// First sector.
    start: u64,
    /// Blocks of 512 bytes.
    len: u64,
    uuid: Uuid,
}

impl<B: Blocks> Log<'_, B> {
    fn read(&self, block: u64) -> Result<crate::blocks::Block, String> {
        debug_assert!(block < self.len);
        let e = [DiskExtent {
            daddr: self.start + block,
            bytes: BLOCK as u32,
        }];
        self.blocks
            .read(&e, &unverified)
            .map_err(|e| format!("reading its block {block}: {e:?}"))
    }

    /// The cycle that wrote a block.
    fn cycle(&self, block: u64) -> Result<u32, String> {
        let b = self.read(block)?;
        let word = |i| Be32::at(&b, i).map_or(0, |w| w.get());
        Ok(if word(0) == LOG_RECORD_MAGIC {
            word(4)
        } else {
            word(0)
        })
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

    fn state(&self) -> Result<LogState, String> {
        if self.len < 4 {
            return Err("it has no blocks".into());
        }
        let (first, last) = (self.cycle(0)?, self.cycle(self.len - 1)?);
        if first == 0 {
            return Ok(LogState::Zeroed);
        }
        // The head is where the last cycle's blocks give way to the previous cycle's (or to
        // blocks never written, whose cycle is 0). A log that is in one cycle throughout ends at
        // its end.
        let mut head = if first == last {
            0
        } else {
            self.first_with(1, self.len, last)?
        };
        // The last record before the head.
        let mut back = 0;
        for _ in 0..SEARCH_BLOCKS.min(self.len) {
            back += 1;
            let at = (head + self.len - back) % self.len;
            let block = self.read(at)?;
            let Ok(h) = LogRecordHeader::at(&block, 0) else {
                break;
            };
            if h.magicno.get() != LOG_RECORD_MAGIC || h.fs_uuid != self.uuid {
                continue;
            }
            let tail = h.tail_lsn.get() & 0xffff_ffff;
            let tail = (tail < self.len).then_some(tail);
            let heads = if h.version.get() & 2 != 0 {
                (h.size.get() as usize)
                    .div_ceil(LOG_CYCLE_DATA_SIZE)
                    .clamp(1, 16)
            } else {
                1
            };
            let data = (h.len.get() as usize).div_ceil(BLOCK);
            let whole = (heads + data) as u64;
            if whole > back {
                // Its write was cut off: recovery ends before it.
                (head, back) = (at, 0);
                continue;
            }
            if whole != back || h.num_logops.get() != 1 {
                return Ok(LogState::Dirty { head, tail });
            }
            let op = self.read((at + heads as u64) % self.len)?;
            let unmounted = LogOpHeader::at(&op, 0)
                .is_ok_and(|op| op.flags & LOG_OP_UNMOUNT != 0 && op.clientid == LOG_CLIENT_LOG);
            return Ok(if unmounted {
                LogState::Clean
            } else {
                LogState::Dirty { head, tail }
            });
        }
        Ok(LogState::Dirty { head, tail: None })
    }
}
