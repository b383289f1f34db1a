//! Whether the log is clean, and the replay of one that is not.
//!
//! The log is a ring of 512-byte blocks, each of which begins with the number of the cycle that
//! wrote it (in a record's head: its second word). The head, where the next write would go, is
//! where the cycle number falls. A clean log's last record is an unmount record that ends at the
//! head.
//!
//! The head and the tail are found step by step as the kernel finds them (`xlog_find_tail`), so that
//! the same logs are clean: also those that xfs_repair formats, whose blocks after the first record
//! are of no cycle.
//!
//! Records have checksums. As in the kernel's recovery, one that is wrong among the last records,
//! which are written at the same time, is a write that was cut off: the log ends before it. Further
//! back it is damage, with which the kernel refuses to mount.
//!
//! A dirty log is replayed into an overlay ([`replay`]), as the kernel's recovery replays it into the device
//! (`xlog_do_log_recovery`): a first pass finds the buffers whose blocks were freed, a second applies all
//! transactions that were committed ([`transactions`], [`items`]). The kernel then goes on with transactions of its own:
//! [`finish`] does what the log announces and does not have, and
//! inodes that were unlinked while open are freed where a repair asks for it.

mod attributes;
mod finish;
mod items;
mod mappings;
mod space;
mod transactions;

use crate::blocks::{Block, Blocks};
use crate::error::{Error, Result as Read};
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use crate::overlay::{Overlay, Sink};
use crate::walk::btree::{Defect, Item, Visitor};
use items::{Applying, Cancelled};
use std::collections::HashSet;
use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a log block.
const BLOCK: usize = 512;
/// Blocks that are read at once.
const READ_BLOCKS: u64 = 64;
/// Steps of a search by halves whose blocks are read ahead together.
const STEPS_AHEAD: u32 = 4;
/// Records that the kernel writes at the same time (`XLOG_MAX_ICLOGS`).
const RECORDS_AT_ONCE: usize = 8;
/// Headers of a record: one for each 32 KiB of the largest log buffer, and room to spare.
const MAX_HEADS: u64 = 16;
/// Blocks of a record, headers and data.
const MAX_RECORD_BLOCKS: u64 = MAX_HEADS + (1 << 20) / BLOCK as u64;
/// Bytes of a further header: a cycle and the first words of 64 blocks.
const EXTENDED_HEADER: usize = 260;
/// Blocks before the head in which the last record begins: those of the largest buffer (256 KiB).
const RECORD_BLOCKS: u64 = (256 << 10) / BLOCK as u64;

/// Blocks before the head that may have been written at the same time.
const SCAN_BLOCKS: u64 = RECORDS_AT_ONCE as u64 * RECORD_BLOCKS;

/// The state of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogState {
    /// Unmounted cleanly: nothing is missing.
    Clean,
    /// Never written, or zeroed by a repair: nothing is missing.
    Zeroed,
    /// There were changes that were not written back. They are seen: the log was replayed over the image.
    Replayed {
        /// Where the next write would go, a block of the log.
        head: u64,
        /// The oldest record that was needed.
        tail: u64,
        /// The last record was cut off: the log ends before it.
        torn: bool,
        /// Transactions.
        transactions: u64,
        /// Changes that the log announced and did not have, in words: they were done as the kernel does them.
        finished: Vec<&'static str>,
        /// Changes that the log announced and that the replay could not do, in words.
        unfinished: Vec<&'static str>,
    },
    /// There are changes that were not written back, and are not seen. Addresses are blocks of the log.
    Dirty {
        /// Where the next write would go.
        head: u64,
        /// The oldest record still needed.
        tail: u64,
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
            LogState::Replayed { unfinished, .. } => {
                let first = unfinished.first()?;
                let more = match unfinished.len() {
                    1 => String::new(),
                    n => format!(" and {} more", n - 1),
                };
                let what = "the log ends within changes that the kernel finishes when it mounts";
                Some(format!("{what}: {first}{more}"))
            }
            LogState::Dirty { head, tail, torn } => {
                let torn = match torn {
                    true => " (where its last write was cut off)",
                    false => "",
                };
                let range = format!("from block {tail} up to block {head}{torn}");
                Some(format!("the log is dirty {range}: {stale}"))
            }
            LogState::External => {
                let what = "the log is on another device; if it is dirty";
                Some(format!("{what}, {stale}"))
            }
            LogState::Unreadable(why) => {
                let what = format!("cannot tell whether the log is clean ({why}); if it is not");
                Some(format!("{what}, {stale}"))
            }
        }
    }
}

/// The state of the log, and the log sequence number of its head: cycle in the high half, block in
/// the low one. Nothing on disk can have been logged later than that.
pub(crate) fn survey(blocks: &dyn Blocks, g: &Geometry) -> (LogState, Option<u64>) {
    let Some(log) = Log::new(blocks, g) else {
        let state = match g.logstart {
            0 => LogState::External,
            _ => LogState::Unreadable("it lies outside the file system".into()),
        };
        return (state, None);
    };
    match log.end() {
        // A log that was never written begins in the first cycle.
        Ok(None) => (LogState::Zeroed, Some(1 << 32)),
        Ok(Some(end)) => {
            let state = match end.clean || end.tail.block == end.head {
                true => LogState::Clean,
                false => LogState::Dirty {
                    head: end.head,
                    tail: end.tail.block,
                    torn: end.torn,
                },
            };
            (state, Some(u64::from(end.cycle) << 32 | end.head))
        }
        Err(why) => (LogState::Unreadable(why), None),
    }
}

/// An error if the log is on another device that was not named; also a copy of the superblock has to say so.
pub(crate) fn wanted(blocks: &dyn Blocks, g: &Geometry) -> Read<()> {
    let copy = || {
        let at = g.ag_header_daddr(1, 0) * 512;
        let copy = blocks.bytes(at, g.sector_size as usize).ok()?;
        Some(check_superblock(&copy).ok()?.logstart.get())
    };
    let external = g.logstart == 0 && blocks.log().is_none();
    match external && (g.agcount == 1 || copy() == Some(0)) {
        true => Err(Error::LogDevice),
        false => Ok(()),
    }
}

/// An image with its log replayed over it.
pub(crate) struct Replayed {
    pub disk: Arc<Overlay>,
    /// [`LogState::Replayed`].
    pub state: LogState,
    /// The geometry that it was replayed by.
    g: Geometry,
    /// The log sequence number of the log's head, which is later than all that was replayed.
    head: u64,
    /// Intents: changes that the log announces and does not have.
    pending: Vec<transactions::Item>,
}

/// Replays the log of `blocks`, of which `surveyed` is what [`survey`] gave, into an overlay that keeps about `keep`
/// bytes in memory; `None` if there is nothing to replay.
pub(crate) fn replay(
    blocks: &Arc<dyn Blocks>,
    g: &Geometry,
    surveyed: &(LogState, Option<u64>),
    keep: u64,
) -> Read<Option<Replayed>> {
    let (LogState::Dirty { head, tail, torn }, Some(lsn)) = *surveyed else {
        return Ok(None);
    };
    let failed = |why: String| Error::Log(why);
    if !g.features.crc {
        return Err(failed("it is of XFS version 4".into()));
    }
    if g.features.unknown_log_incompat != 0 {
        let bits = g.features.unknown_log_incompat;
        return Err(failed(format!("it has the unknown features {bits:#x}")));
    }
    let Some(log) = Log::new(&**blocks, g) else {
        return Ok(None);
    };
    let tail = match log.needed(tail, head).map_err(failed)? {
        Ok(tail) => tail,
        Err(bad) => return Err(failed(format!("block {}: {}", bad.at, bad.why))),
    };
    let mut cancelled = Cancelled::default();
    let mut note = |t: transactions::Transaction| {
        cancelled.note(&t);
        Ok(())
    };
    log.transactions(tail, head, &mut note).map_err(failed)?;
    let disk = Arc::new(Overlay::new(blocks.clone(), keep));
    let mut applying = Applying::new(&disk, g.clone(), cancelled);
    let mut transactions = 0;
    let mut apply = |t: transactions::Transaction| {
        transactions += 1;
        applying.apply(&t)
    };
    log.transactions(tail, head, &mut apply).map_err(failed)?;
    let pending = applying.pending();
    count(&disk);
    let state = LogState::Replayed {
        head,
        tail,
        torn,
        transactions,
        finished: Vec::new(),
        unfinished: pending.iter().map(|i| finish::name(i.kind())).collect(),
    };
    Ok(Some(Replayed {
        disk,
        state,
        g: g.clone(),
        head: lsn,
        pending,
    }))
}

/// The image, with its log replayed and all done that the log announces; and the log's state. As it is if there is
/// nothing to replay.
pub(crate) fn recovered(
    blocks: Arc<dyn Blocks>,
    g: &Geometry,
    keep: u64,
) -> (Arc<dyn Blocks>, LogState, Option<Error>) {
    let surveyed = survey(&*blocks, g);
    match replay(&blocks, g, &surveyed, keep) {
        Ok(None) => (blocks, surveyed.0, None),
        Ok(Some(mut replayed)) => {
            let disk = replayed.disk.clone();
            replayed.finish(&disk);
            (disk, replayed.state, None)
        }
        Err(why) => (blocks, surveyed.0, Some(why)),
    }
}

impl Replayed {
    /// The geometry that the replay left, or if the superblock is damaged, that of the copy that it was replayed by.
    fn geometry(&self, disk: &Overlay) -> Geometry {
        superblock(disk).map_or_else(|| self.g.clone(), |(g, _)| g)
    }

    /// Does the changes that the log announces and does not have, in an overlay over [`Replayed::disk`] or in that itself.
    pub fn finish(&mut self, disk: &Overlay) {
        if !self.pending.is_empty() {
            let g = self.geometry(disk);
            let (done, left) = finish::finish(disk, &g, self.head, &self.pending);
            count(disk);
            if let LogState::Replayed {
                finished,
                unfinished,
                ..
            } = &mut self.state
            {
                (*finished, *unfinished) = (done, left);
            }
        }
    }

    /// Frees the inodes that were unlinked while they were open, as the kernel does after a replay, and writes all
    /// that has changed to `sink`; gives how many bytes that was. The inodes' blocks, and their bits in the trees,
    /// are left to a repair.
    ///
    /// Wherever this is cut off, the lists still lead to all inodes that are not free yet: each step is written
    /// before the next begins.
    pub fn free_unlinked(&self, sink: Option<&dyn Sink>) -> io::Result<u64> {
        let disk = &*self.disk;
        let g = self.geometry(disk);
        let commit = |heads: bool| match sink {
            Some(sink) => disk.commit(sink, u8::from(heads), &|sector| {
                let first = g
                    .daddr_block(sector)
                    .map_or(0, |a| g.ag_header_daddr(a.agno, AGI_SECTOR));
                let sectors = u64::from(g.sector_size / 512);
                u8::from((first..first + sectors).contains(&sector))
            }),
            None => Ok(0),
        };
        let mut freed = Vec::new();
        let mut seen = HashSet::new();
        for agno in 0..g.agcount {
            for head in unlinked(disk, &g, agno) {
                let mut next = head.get();
                // A list that leads into itself ends.
                while next != NULLAGINO && seen.insert(g.ino(agno, next)) {
                    let ino = g.ino(agno, next);
                    let Some(after) = free_inode(disk, &g, ino, self.head) else {
                        break;
                    };
                    freed.push(ino);
                    next = after;
                }
            }
        }
        let mut written = commit(false)?;
        for agno in 0..g.agcount {
            if unlinked(disk, &g, agno)
                .iter()
                .all(|head| head.get() == NULLAGINO)
            {
                continue;
            }
            let at = g.ag_header_daddr(agno, AGI_SECTOR) * 512;
            let mut agi = disk.get(at, g.sector_size as usize)?;
            if let Ok(header) = Agi::at_mut(&mut agi, 0) {
                header.unlinked = [Be32::new(NULLAGINO); AGI_UNLINKED_BUCKETS];
                // A replay after a repair that was cut off makes new chunks of inodes again, with inodes that were
                // unlinked: it has to make the lists again, too.
                header.lsn.set(0);
            }
            store_crc(&mut agi, AGI_CRC_OFFSET);
            disk.write(at, &agi);
        }
        written += commit(true)?;
        for ino in freed {
            with_inode(disk, &g, ino, |inode| {
                let d = DinodeV2::at_mut(inode, 0).ok()?;
                d.next_unlinked.set(NULLAGINO);
                Some(())
            });
        }
        Ok(written + commit(false)?)
    }
}

/// The heads of a group's lists of unlinked inodes; none if its header is damaged.
fn unlinked(disk: &Overlay, g: &Geometry, agno: u32) -> Vec<Be32> {
    let at = g.ag_header_daddr(agno, AGI_SECTOR) * 512;
    let read = disk.get(at, g.sector_size as usize).unwrap_or_default();
    let agi = check_agi(&read, &g.ident(0, None));
    agi.map_or(Vec::new(), |agi| agi.unlinked.to_vec())
}

/// Bytes of the records of one tree, at most: a tree of more is left as it is.
const MAX_RECORDS: usize = 256 << 20;

/// The records of a tree, and its blocks.
struct Records<'a> {
    disk: &'a Overlay,
    g: &'a Geometry,
    blocks: Vec<u64>,
    bytes: Vec<u8>,
    sound: bool,
}

impl<'a> Records<'a> {
    /// Reads what `walk` goes through; `None` if it is damaged.
    fn read(
        disk: &'a Overlay,
        g: &'a Geometry,
        walk: impl FnOnce(&mut Self),
    ) -> Option<(Vec<u64>, Vec<u8>)> {
        let mut records = Records {
            disk,
            g,
            blocks: Vec::new(),
            bytes: Vec::new(),
            sound: true,
        };
        walk(&mut records);
        records.sound.then_some((records.blocks, records.bytes))
    }
}

impl Visitor for Records<'_> {
    fn read(&mut self, a: AgBlock) -> io::Result<Block> {
        let at = self.g.daddr(a) << 9;
        self.disk
            .get(at, self.g.block_size as usize)
            .map(Block::new)
    }

    fn item(&mut self, item: Result<Item<'_>, Defect>) -> bool {
        match item {
            Ok(Item::Sound(at, _)) => self.blocks.push(at),
            Ok(Item::Records { bytes, .. }) => self.bytes.extend_from_slice(bytes),
            Ok(Item::Block(_)) => {}
            Err(_) => self.sound = false,
        }
        self.sound = self.sound && self.bytes.len() <= MAX_RECORDS;
        self.sound
    }
}

/// The bytes of an inode; `None` if it cannot be read.
fn read_inode(disk: &Overlay, g: &Geometry, ino: u64) -> Option<Vec<u8>> {
    let at = g.inode_byte(g.inode(ino)?);
    let mut bytes = vec![0; g.inode_size as usize];
    disk.read_data(at, &mut bytes).ok()?;
    check_dinode(&bytes, &g.ident(0, Some(ino))).ok()?;
    Some(bytes)
}

/// Changes an inode, and sets its checksum; nothing is written if it cannot be read or `change` gives `None`.
fn with_inode<T>(
    disk: &Overlay,
    g: &Geometry,
    ino: u64,
    change: impl FnOnce(&mut [u8]) -> Option<T>,
) -> Option<T> {
    let at = g.inode_byte(g.inode(ino)?);
    let (sector, within) = (at / 512 * 512, (at % 512) as usize);
    let size = g.inode_size as usize;
    let mut bytes = disk
        .get(sector, (within + size).next_multiple_of(512))
        .ok()?;
    let inode = &mut bytes[within..within + size];
    check_dinode(inode, &g.ident(0, Some(ino))).ok()?;
    let done = change(inode)?;
    store_crc(inode, DINODE_CRC_OFFSET);
    disk.write(sector, &bytes);
    Some(done)
}

/// Frees an inode without names, which stays on its list. Gives the next there.
fn free_inode(disk: &Overlay, g: &Geometry, ino: u64, lsn: u64) -> Option<u32> {
    with_inode(disk, g, ino, |inode| {
        let whole = Dinode::at_mut(inode, 0).ok()?;
        let d = &mut whole.v2;
        if d.nlink.get() != 0 {
            return None;
        }
        let next = d.next_unlinked.get();
        if d.mode.get() == 0 {
            return Some(next);
        }
        d.mode.set(0);
        d.format = FORMAT_EXTENTS;
        d.aformat = FORMAT_EXTENTS;
        d.big_nextents.set(0);
        d.nextents.set(0);
        d.anextents.set(0);
        d.forkoff = 0;
        d.size.set(0);
        d.nblocks.set(0);
        d.flags.set(0);
        d.r#gen.set(d.r#gen.get().wrapping_add(1));
        whole.flags2.set(whole.flags2.get() & DIFLAG2_BIGTIME);
        // Should the repair be cut off, the next replay leaves it as it is.
        whole.lsn.set(lsn);
        Some(next)
    })
}

/// What the superblock says after a replay, which may have added groups, and its sector.
fn superblock(disk: &Overlay) -> Option<(Geometry, Vec<u8>)> {
    let first = disk.get(0, BLOCK).ok()?;
    let size = Superblock::at(&first, 0).ok()?.sector_size()?;
    let sector = disk.get(0, size).ok()?;
    let g = Geometry::new(check_superblock(&sector).ok()?).ok()?;
    Some((g, sector))
}

/// Sets the superblock's counters, which are not logged, from those of the groups. What cannot be read is left
/// as it is: a check finds it.
fn count(disk: &Overlay) {
    let Some((g, mut sector)) = superblock(disk) else {
        return;
    };
    let size = sector.len();
    let mut counts = Counts::default();
    for agno in 0..g.agcount {
        let header = |n| disk.get(g.ag_header_daddr(agno, n) * 512, size);
        let (Ok(agf), Ok(agi)) = (header(AGF_SECTOR), header(AGI_SECTOR)) else {
            return;
        };
        let ident = g.ident(0, None);
        let (Ok(agf), Ok(agi)) = (check_agf(&agf, &ident), check_agi(&agi, &ident)) else {
            return;
        };
        let free = [agf.freeblks, agf.flcount, agf.btreeblks];
        counts.fdblocks += free.iter().map(|n| u64::from(n.get())).sum::<u64>();
        counts.icount += u64::from(agi.count.get());
        counts.ifree += u64::from(agi.freecount.get());
    }
    if let Ok(sb) = Superblock::at_mut(&mut sector, 0) {
        sb.set_counts(counts);
    }
    store_crc(&mut sector, SB_CRC_OFFSET);
    disk.write(0, &sector);
}

/// The first damaged block among the records of a dirty log that are still needed.
/// Recovery would fail there.
pub(crate) fn damage(blocks: &dyn Blocks, g: &Geometry, state: &LogState) -> Option<String> {
    let LogState::Dirty { head, tail, .. } = *state else {
        return None;
    };
    match Log::new(blocks, g)?.needed(tail, head) {
        Ok(Ok(_)) => None,
        Ok(Err(bad)) => Some(format!("block {}: {}", bad.at, bad.why)),
        Err(why) => Some(why),
    }
}

/// The device that a log is on.
enum On<'a> {
    Image(&'a dyn Blocks),
    Own(Arc<dyn Blocks>),
}

struct Log<'a> {
    on: On<'a>,
    /// First sector.
    start: u64,
    /// Blocks of 512 bytes.
    len: u64,
    uuid: Uuid,
    /// Records that are to be replayed need checksums.
    summed: bool,
    /// Bytes of a buffer that is written at once, at least.
    buffer: usize,
}

impl<'a> Log<'a> {
    /// The log of a file system; `None` if it lies outside, or on a device that was not named.
    fn new(blocks: &'a dyn Blocks, g: &Geometry) -> Option<Log<'a>> {
        let (on, start) = match g.logstart {
            0 => (On::Own(blocks.log()?), 0),
            start => (On::Image(blocks), g.daddr(g.fsb(start)?)),
        };
        Some(Log {
            on,
            start,
            len: u64::from(g.logblocks) << (g.blocklog - 9),
            uuid: g.uuid,
            summed: g.features.crc,
            buffer: (g.logsunit as usize).max(LOG_CYCLE_DATA_SIZE),
        })
    }

    fn device(&self) -> &dyn Blocks {
        match &self.on {
            On::Image(blocks) => *blocks,
            On::Own(blocks) => &**blocks,
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
        let mut steps = 0;
        while low < high {
            if steps % STEPS_AHEAD == 0 {
                self.readahead_middles(low, high, STEPS_AHEAD);
            }
            steps += 1;
            let mid = low + (high - low) / 2;
            if self.cycle(mid)? == cycle {
                high = mid;
            } else {
                low = mid + 1;
            }
        }
        Ok(low)
    }

    /// Reads ahead the blocks that so many steps of a search by halves may come to.
    fn readahead_middles(&self, low: u64, high: u64, steps: u32) {
        if low < high && steps > 0 {
            let mid = low + (high - low) / 2;
            self.readahead(mid, 1);
            self.readahead_middles(low, mid, steps - 1);
            self.readahead_middles(mid + 1, high, steps - 1);
        }
    }

    /// The first block of `range` that was written in this cycle.
    fn find_cycle(&self, range: Range<u64>, cycle: u32) -> Result<Option<u64>, String> {
        let is = |at, block: &[u8]| (cycle_of(block) == cycle).then_some(at);
        let step = 8 * READ_BLOCKS;
        self.find(range.start, range.end - range.start, step, is)
    }

    /// What `is` gives for the first block that it gives something for, of `count` blocks from `start` on, around the end
    /// of the log if need be. `step` blocks are read at once.
    fn find<T>(
        &self,
        start: u64,
        count: u64,
        step: u64,
        is: impl Fn(u64, &[u8]) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let steps = || (0..count).step_by(step as usize);
        for done in steps() {
            self.readahead((start + done) % self.len, step.min(count - done));
        }
        for done in steps() {
            let from = (start + done) % self.len;
            let bytes = self.blocks(from, step.min(count - done))?;
            let mut blocks = (from..).zip(bytes.chunks_exact(BLOCK));
            let found = blocks.find_map(|(at, block)| is(at % self.len, block));
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// The block after the last record, by the cycles of the blocks; `None` if nothing was written.
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
            false => (self.first_with(1, self.len - 1, last)?, last),
        };
        // Blocks of several records are written at the same time: the first one that was not
        // written, among those that may have been in flight, is the end of the log.
        let scan = SCAN_BLOCKS.min(self.len);
        let mut hole = None;
        if last != 0 && head < scan {
            let end = self.len - (scan - head)..self.len;
            hole = self.find_cycle(end, old.wrapping_sub(1))?;
        }
        if hole.is_none() {
            hole = self.find_cycle(head.saturating_sub(scan)..head, old)?;
        }
        let head = self.whole_records(hole.unwrap_or(head))?;
        Ok(Some(if head == self.len { 0 } else { head }))
    }

    /// Moves the head back to where the record before it begins, unless that ends there: a part of
    /// it is missing, or nothing after it belongs to it.
    fn whole_records(&self, head: u64) -> Result<u64, String> {
        let limit = RECORD_BLOCKS.min(head);
        let last = match self.record_before(head, limit)? {
            Some(r) => Some(r),
            None if limit < RECORD_BLOCKS => self.record_before(0, RECORD_BLOCKS - limit)?,
            None => None,
        };
        let Some(last) = last else {
            return Err("no record ends at its head".into());
        };
        if !last.ours {
            return Err("its last record is of a file system with another UUID".into());
        }
        Ok(match last.at < head {
            true if last.whole() != head - last.at => last.at,
            false if last.whole() != head + self.len - last.at => last.at,
            _ => head,
        })
    }

    /// Reads blocks, around the end of the log if need be.
    fn blocks(&self, start: u64, count: u64) -> Result<Vec<u8>, String> {
        let mut out = vec![0; count as usize * BLOCK];
        let before_end = count.min(self.len - start) as usize * BLOCK;
        let (before, after) = out.split_at_mut(before_end);
        for (at, part) in [(start, before), (0, after)] {
            let read = match part {
                [] => Ok(()),
                part => self
                    .device()
                    .read_data((self.start + at) * BLOCK as u64, part),
            };
            read.map_err(|e| format!("reading its block {at}: {e}"))?;
        }
        Ok(out)
    }

    /// Says that [`Log::blocks`] will be called.
    fn readahead(&self, start: u64, count: u64) {
        let before_end = count.min(self.len - start);
        for (at, count) in [(start, before_end), (0, count - before_end)] {
            if count > 0 {
                let offset = (self.start + at) * BLOCK as u64;
                self.device().readahead_data(offset, count as usize * BLOCK);
            }
        }
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
        if h.magicno.get() != LOG_RECORD_MAGIC {
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
            // Logs of IRIX have none.
            ours: h.fs_uuid == self.uuid || h.fs_uuid == [0; 16],
            tail: Position {
                cycle: (h.tail_lsn.get() >> 32) as u32,
                block: h.tail_lsn.get() & 0xffff_ffff,
            },
            bytes: h.len.get() as usize,
            h: *h,
        })
    }

    /// Whether a record's checksum is right.
    fn is_sound(&self, r: &Record) -> Result<bool, String> {
        if r.whole() > MAX_RECORD_BLOCKS.min(self.len) {
            return Ok(false);
        }
        let bytes = self.blocks(r.at, r.whole())?;
        let (heads, data) = bytes.split_at(r.heads as usize * BLOCK);
        // 32-bit machines of some architectures do not pad the header.
        let mut sizes = [LogRecordHeader::SIZE, LogRecordHeader::SIZE - 4].into_iter();
        let heads = |size| (&heads[..size], r.further(heads));
        Ok(sizes.any(|size| record_checksum(heads(size), data, r.bytes) == r.h.crc.get()))
    }

    /// The first record that begins in `from..head`, around the end of the log if need be.
    fn record_from(&self, from: u64, head: u64) -> Result<Option<Record>, String> {
        let count = self.distance(from, head);
        let is = |at, block: &[u8]| self.record(at, block);
        self.find(from, count, READ_BLOCKS, is)
    }

    /// Whether a record that ends at `head` says that the file system was unmounted.
    fn unmounted(&self, r: &Record, head: u64) -> Result<bool, String> {
        if (r.at + r.whole()) % self.len != head || r.h.num_logops.get() != 1 {
            return Ok(false);
        }
        let op = self.read((r.at + r.heads) % self.len)?;
        Ok(LogOpHeader::at(&op, 0).is_ok_and(|op| op.flags & LOG_OP_UNMOUNT != 0))
    }

    /// The end of the log if its head is at `head`, and its oldest record not after `tail`.
    fn end_at(&self, head: u64, tail: u64) -> Result<End, String> {
        let limit = match self.distance(tail, head) {
            0 => self.len,
            n => n,
        };
        let last = self.record_before(head, limit)?;
        let last = last.ok_or_else(|| String::from("it has no record"))?;
        Ok(End {
            head,
            // The next write begins a new cycle if the last record lies at the end of the log.
            cycle: (last.h.cycle.get()).wrapping_add(u32::from(last.at >= head)),
            tail: last.tail,
            clean: self.unmounted(&last, head)?,
            torn: false,
        })
    }

    /// Finds the end of the log; `None` if nothing was ever written.
    fn end(&self) -> Result<Option<End>, String> {
        if self.len < 4 {
            return Err("it has no blocks".into());
        }
        let Some(head) = self.head()? else {
            return Ok(None);
        };
        let mut end = self.end_at(head, head)?;
        if !end.clean
            && let Some(bad) = self.torn(&end)?
        {
            end = self.end_at(bad, end.tail.block)?;
            end.torn = true;
        }
        let (tail, head) = (end.tail, end.head);
        let follows = match end.cycle == tail.cycle {
            true => head >= tail.block,
            false => head < tail.block && end.cycle == tail.cycle.wrapping_add(1),
        };
        if !follows || tail.block >= self.len {
            let Position { cycle, block } = tail;
            let head = format!("{}:{head}", end.cycle);
            return Err(format!(
                "its tail, {cycle}:{block}, contradicts its head, {head}"
            ));
        }
        Ok(Some(end))
    }

    /// The first record that is not whole, among those that were written at the same time as the
    /// last one. The machine went down while it was written, and the log ends before it; a later one
    /// may be whole.
    fn torn(&self, end: &End) -> Result<Option<u64>, String> {
        let tail = end.tail.block;
        if tail >= self.len {
            return Ok(None);
        }
        let mut first = end.head;
        for _ in 0..RECORDS_AT_ONCE {
            let limit = match self.distance(tail, first) {
                0 if first == end.head => self.len,
                n => n,
            };
            match self.record_before(first, limit)? {
                Some(r) if r.at != end.head => first = r.at,
                _ => break,
            }
        }
        Ok(self.damaged(first, end.head, false)?.map(|b| b.at))
    }

    /// Where the records begin that recovery needs, from `tail` up to `head`; or the first damage among them.
    fn needed(&self, tail: u64, head: u64) -> Result<Result<u64, Damage>, String> {
        let mut from = self.record_from(tail, head)?;
        while let Some(r) = from {
            let Some(bad) = self.damaged(r.at, head, true)? else {
                return Ok(Ok(r.at));
            };
            // The writes that were cut off may have been about to take the tail's place: what
            // lies that near ahead of the head is not needed.
            let ahead = self.distance(head, bad.at);
            let buffer = u64::from(r.h.size.get()).div_ceil(BLOCK as u64);
            if ahead > RECORDS_AT_ONCE as u64 * buffer {
                return Ok(Err(bad));
            }
            from = self.record_from((bad.at + 1) % self.len, head)?;
            if from.is_none() {
                return Ok(Err(bad));
            }
        }
        Ok(Ok(head))
    }

    /// Goes through the records from the one at `first` up to `head`: the first one that is not
    /// sound. Programs that format a log give their records no checksum; those have nothing to replay.
    fn damaged(&self, first: u64, head: u64, replay: bool) -> Result<Option<Damage>, String> {
        let mut at = first;
        // A record has a block at least, so this ends.
        let mut left = self.distance(first, head);
        loop {
            let bad = |why| Ok(Some(Damage { at, why }));
            let Some(r) = self.record(at, &self.read(at)?) else {
                return bad("no record begins where the one before it ends");
            };
            if !r.ours {
                return bad("the record is of a file system with another UUID");
            }
            if !r.is_valid(self.buffer) {
                return bad("the record's header makes no sense");
            }
            if left == 0 {
                return Ok(None);
            }
            if r.whole() > left {
                return bad("the record is longer than the log");
            }
            let summed = r.h.crc.get() != 0 || (replay && self.summed);
            if summed && !self.is_sound(&r)? {
                return bad("the record's checksum is wrong");
            }
            left -= r.whole();
            at = (at + r.whole()) % self.len;
            if left == 0 {
                return Ok(None);
            }
        }
    }
}

/// The end of a log.
struct End {
    /// Where the next write goes.
    head: u64,
    /// The cycle of the next write.
    cycle: u32,
    /// The oldest record that is still needed.
    tail: Position,
    /// The last record says that the file system was unmounted.
    clean: bool,
    /// A record after the head was cut off.
    torn: bool,
}

/// A place in the log.
#[derive(Debug, Clone, Copy)]
struct Position {
    cycle: u32,
    block: u64,
}

/// A record that is not sound.
struct Damage {
    /// Its first block.
    at: u64,
    why: &'static str,
}

/// The cycle that wrote a block.
fn cycle_of(block: &[u8]) -> u32 {
    let word = |i| Be32::at(block, i).map_or(0, |w| w.get());
    match word(0) {
        LOG_RECORD_MAGIC => word(4),
        cycle => cycle,
    }
}

/// The checksum of a record: of its header with zeros for the checksum, the `further` headers that its data needs, and
/// `bytes` bytes of its data as it is on disk.
pub(crate) fn record_checksum((header, further): (&[u8], &[u8]), data: &[u8], bytes: usize) -> u32 {
    let crc = compute_crc(header, offset_of!(LogRecordHeader, crc));
    let further = further.chunks_exact(BLOCK).map(|h| &h[..EXTENDED_HEADER]);
    let parts = further.chain([&data[..bytes.min(data.len())]]);
    parts.fold(crc, crc32c::crc32c_append)
}

/// A record of the log.
#[derive(Debug, Clone, Copy)]
struct Record {
    /// Its first block.
    at: u64,
    /// Blocks of headers, and of data.
    heads: u64,
    data: u64,
    /// It is of this file system.
    ours: bool,
    /// The oldest record still needed.
    tail: Position,
    /// Bytes of data.
    bytes: usize,
    /// Its header.
    h: LogRecordHeader,
}

impl Record {
    /// All its blocks.
    fn whole(&self) -> u64 {
        self.heads + self.data
    }

    /// Whether its header makes sense, in a log that is written from buffers of `buffer` bytes. Programs that
    /// format a log write its one operation, which fills a stripe unit, with the size of the least buffer.
    fn is_valid(&self, buffer: usize) -> bool {
        let (version, ops) = (self.h.version.get(), self.h.num_logops.get());
        let size = self.h.size.get() as usize;
        let fits = self.bytes <= size || (ops == 1 && self.bytes <= buffer);
        version != 0 && version & !3 == 0 && self.bytes > 0 && fits
    }

    /// The headers after the first that its data needs, of all `heads`.
    fn further<'h>(&self, heads: &'h [u8]) -> &'h [u8] {
        let needed = match self.h.version.get() & 2 {
            0 => 1,
            _ => self.bytes.div_ceil(LOG_CYCLE_DATA_SIZE),
        };
        &heads[BLOCK..heads.len().min(needed.max(1) * BLOCK)]
    }
}
