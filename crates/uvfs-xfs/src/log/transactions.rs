//! The transactions that the records of a log hold.
//!
//! A record is a row of operations, each of a transaction. A transaction begins with one, has a header and
//! items, and counts once an operation commits it. An item is a row of regions, of which the first says how
//! many there are; a region that did not fit into a record goes on in the next.

use super::{BLOCK, EXTENDED_HEADER, Log, Record};
use crate::format::*;
use std::collections::HashMap;

/// Regions of an item, at most: a buffer of 64 KiB of which every other chunk was logged.
const MAX_REGIONS: usize = 257;
/// Bytes of transactions without a commit, at most. A kernel keeps them far below a fourth of its largest log.
const MAX_OPEN: usize = 512 << 20;
/// What a transaction or a region takes besides its bytes, at most.
const OVERHEAD: usize = 128;

/// A change in the log.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Item {
    /// How many regions it has.
    total: usize,
    pub regions: Vec<Vec<u8>>,
}

impl Item {
    /// What it begins with.
    pub fn header(&self) -> &[u8] {
        self.region(0)
    }

    /// One of its regions, empty if there is none.
    pub fn region(&self, i: usize) -> &[u8] {
        self.regions.get(i).map_or(&[], Vec::as_slice)
    }

    /// Its type, 0 if it has none.
    pub fn kind(&self) -> u16 {
        Le16::at(self.header(), 0).map_or(0, |kind| kind.get())
    }
}

/// A transaction under way.
#[derive(Debug)]
struct Open {
    lsn: u64,
    /// Bytes of its header that there are yet.
    header: Vec<u8>,
    items: Vec<Item>,
    bytes: usize,
}

/// A committed transaction.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Transaction {
    /// The record that it begins in.
    pub lsn: u64,
    pub items: Vec<Item>,
}

/// Puts transactions together from operations.
#[derive(Debug, Default)]
pub(crate) struct Assembly {
    open: HashMap<u32, Open>,
    bytes: usize,
}

impl Assembly {
    /// Takes the data of a record, and gives the transactions that it commits to `committed`.
    pub fn take(
        &mut self,
        lsn: u64,
        mut ops: u32,
        mut data: &[u8],
        committed: &mut dyn FnMut(Transaction) -> Result<(), String>,
    ) -> Result<(), String> {
        while ops > 0 && !data.is_empty() {
            let op = *LogOpHeader::at(data, 0).map_err(|_| "an operation is cut off")?;
            let len = op.len.get() as usize;
            let rest = &data[LogOpHeader::SIZE..];
            let Some((region, rest)) = rest.split_at_checked(len) else {
                return Err("an operation is longer than its record".into());
            };
            if !matches!(op.clientid, LOG_CLIENT_TRANSACTION | LOG_CLIENT_LOG) {
                let client = op.clientid;
                return Err(format!("an operation is of the unknown client {client:#x}"));
            }
            if let Some(done) = self.operation(lsn, &op, region)? {
                committed(done)?;
            }
            data = rest;
            ops -= 1;
        }
        Ok(())
    }

    fn operation(
        &mut self,
        lsn: u64,
        op: &LogOpHeader,
        region: &[u8],
    ) -> Result<Option<Transaction>, String> {
        let tid = op.tid.get();
        let Some(open) = self.open.get_mut(&tid) else {
            // What belongs to a transaction that begins before the tail is not needed.
            if op.flags & LOG_OP_START != 0 {
                if !region.is_empty() {
                    return Err("the start of a transaction has data".into());
                }
                let open = Open {
                    lsn,
                    header: Vec::new(),
                    items: Vec::new(),
                    bytes: OVERHEAD,
                };
                self.open.insert(tid, open);
                self.grow(OVERHEAD)?;
            }
            return Ok(None);
        };
        if op.flags & LOG_OP_START != 0 {
            return Ok(None);
        }
        if op.flags & (LOG_OP_COMMIT | LOG_OP_UNMOUNT) != 0 {
            let open = self.open.remove(&tid);
            self.bytes -= open.as_ref().map_or(0, |open| open.bytes);
            return match open {
                Some(open) if op.flags & LOG_OP_COMMIT != 0 => open.committed().map(Some),
                _ => Ok(None),
            };
        }
        let bytes = region.len() + OVERHEAD;
        open.bytes += bytes;
        open.add(region, op.flags & LOG_OP_CONTINUED != 0)?;
        self.grow(bytes)?;
        Ok(None)
    }

    fn grow(&mut self, bytes: usize) -> Result<(), String> {
        self.bytes += bytes;
        let most = MAX_OPEN >> 20;
        match self.bytes > MAX_OPEN {
            true => Err(format!("transactions of more than {most} MiB are open")),
            false => Ok(()),
        }
    }
}

impl Open {
    fn add(&mut self, region: &[u8], continued: bool) -> Result<(), String> {
        if region.is_empty() {
            return Ok(());
        }
        if self.header.len() < LOG_TRANSACTION_HEADER {
            self.header.extend_from_slice(region);
            let magic = |h: &[u8]| Le32::at(h, 0).is_ok_and(|m| m.get() != LOG_TRANSACTION_MAGIC);
            if self.header.len() > LOG_TRANSACTION_HEADER || magic(&self.header) {
                return Err("the header of a transaction makes no sense".into());
            }
            return Ok(());
        }
        let item = self.items.last_mut();
        if continued {
            let region_before = item.and_then(|item| item.regions.last_mut());
            let Some(before) = region_before else {
                return Err("a region goes on that never began".into());
            };
            before.extend_from_slice(region);
            return Ok(());
        }
        if let Some(item) = item.filter(|item| item.regions.len() < item.total) {
            item.regions.push(region.to_vec());
            return Ok(());
        }
        // The first region may itself go on in the next record, but not within its first words.
        let total = Le16::at(region, 2).map_or(0, |n| usize::from(n.get()));
        if total == 0 || total > MAX_REGIONS {
            return Err(format!("an item of {total} regions"));
        }
        self.items.push(Item {
            total,
            regions: vec![region.to_vec()],
        });
        Ok(())
    }

    fn committed(self) -> Result<Transaction, String> {
        if self.items.iter().any(|i| i.regions.len() != i.total) {
            return Err("a transaction was committed before its last item was complete".into());
        }
        Ok(Transaction {
            lsn: self.lsn,
            items: self.items,
        })
    }
}

impl Log<'_> {
    /// Gives all transactions that are committed in the records from `tail` up to `head`.
    pub(super) fn transactions(
        &self,
        tail: u64,
        head: u64,
        committed: &mut dyn FnMut(Transaction) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut assembly = Assembly::default();
        let (mut at, mut left) = (tail, self.distance(tail, head));
        while left > 0 {
            let record = self.record(at, &self.read(at)?);
            let Some(r) = record.filter(|r| r.whole() <= left && r.data > 0) else {
                return Err(format!("block {at}: no record begins here"));
            };
            let wrong = |why: String| format!("block {at}: {why}");
            match r.h.fmt.get() {
                LOG_FORMAT_LITTLE_ENDIAN => {}
                2 => return Err(wrong("it was written by a big-endian machine".into())),
                other => return Err(wrong(format!("its format {other} is not known"))),
            }
            let data = self.data(&r)?;
            let (lsn, ops) = (r.h.lsn.get(), r.h.num_logops.get());
            let taken = assembly.take(lsn, ops, &data, committed);
            taken.map_err(wrong)?;
            left -= r.whole();
            at = (at + r.whole()) % self.len;
        }
        Ok(())
    }

    /// The data of a record, with the words that the cycle numbers replaced put back.
    fn data(&self, r: &Record) -> Result<Vec<u8>, String> {
        let mut bytes = self.blocks(r.at, r.whole())?;
        let data = bytes.split_off(r.heads as usize * BLOCK);
        let heads = bytes;
        let mut data = data;
        let per_head = LOG_CYCLE_DATA_SIZE / BLOCK;
        for (i, block) in data.chunks_exact_mut(BLOCK).enumerate() {
            let word = match (i / per_head, i % per_head) {
                (0, n) => r.h.cycle_data[n],
                (head, n) => {
                    let further = heads.get(head * BLOCK..head * BLOCK + EXTENDED_HEADER);
                    let word = further.map(|head| Be32::at(head, 4 + 4 * n));
                    let Some(Ok(word)) = word else {
                        let at = r.at;
                        return Err(format!("block {at}: the record has too few headers"));
                    };
                    *word
                }
            };
            word.put(block, 0);
        }
        data.truncate(r.bytes);
        Ok(data)
    }
}
