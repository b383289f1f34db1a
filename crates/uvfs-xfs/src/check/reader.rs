//! Reads for one thread: what will be needed soon is asked for ahead, many reads in flight.

use crate::blocks::{Block, Blocks, Stream};
use crate::geometry::{AgBlock, Geometry};
use std::collections::BTreeMap;
use std::io;

use super::ctx::Ctx;

/// Most bytes of a thread that are held or in flight; beyond that nothing is read ahead.
pub(crate) const MAX_AHEAD: usize = 8 << 20;
/// As many are always allowed.
pub(crate) const MIN_AHEAD: usize = 2 * MAX_READ as usize;
/// Bytes of one read ahead.
pub(crate) const MAX_READ: u64 = 256 << 10;
/// Most bytes of what inodes lead to that are asked for together.
const MAX_BATCH: u64 = 1 << 20;
/// Bytes between two things wanted that are read with them rather than skipped, where large reads
/// suit the device.
const GAP: u64 = 64 << 10;

/// A read that was started.
struct PendingRead {
    len: usize,
    /// The number of users; with none it goes when it has arrived.
    refs: u32,
    state: PendingState,
}

enum PendingState {
    InFlight,
    Here(Block),
    Failed,
}

/// Reads for one thread: exactly what is asked for, or what was asked for ahead.
pub(crate) struct Reader<'a> {
    blocks: &'a dyn Blocks,
    stream: Option<Box<dyn Stream + 'a>>,
    gap: u64,
    /// Bytes that may be held.
    room: usize,
    pieces: BTreeMap<u64, PendingRead>,
    /// Bytes of all pieces.
    held: usize,
    /// Asked for since the last [`Reader::go`]: (offset, end).
    wanted: Vec<(u64, u64)>,
    /// Pieces wanted, in the order they were asked for: see [`Reader::mark`].
    log: Vec<u64>,
}

impl<'a> Reader<'a> {
    pub fn new(ctx: &Ctx<'a>) -> Reader<'a> {
        Reader {
            blocks: ctx.blocks,
            stream: ctx.blocks.stream(ctx.budget.ahead),
            gap: if ctx.large { GAP } else { 0 },
            room: ctx.budget.ahead,
            pieces: BTreeMap::new(),
            held: 0,
            wanted: Vec::new(),
            log: Vec::new(),
        }
    }

    /// Bytes that lie between two things wanted and are read with them.
    pub fn gap(&self) -> u64 {
        self.gap
    }

    /// Says that these bytes will be needed.
    pub fn want(&mut self, offset: u64, len: u64) {
        if self.stream.is_some() && len > 0 {
            self.wanted.push((offset, offset.saturating_add(len)));
        }
    }

    /// Says that these blocks will be needed.
    pub fn want_blocks(&mut self, g: &Geometry, agno: u32, agbno: u32, n: u32) {
        let at = g.daddr(AgBlock { agno, agbno }) << 9;
        self.want(at, u64::from(n) << g.blocklog);
    }

    /// Starts reading what is wanted, as far as there is room; neighbours are read
    /// together.
    pub fn go(&mut self) {
        let Some(stream) = &mut self.stream else {
            return;
        };
        if self.wanted.is_empty() {
            return;
        }
        let unit = stream.unit();
        let size = self.blocks.size() / unit * unit;
        self.wanted.sort_unstable();
        let mut i = 0;
        while i < self.wanted.len() {
            let (first, mut end) = self.wanted[i];
            i += 1;
            while let Some((offset, e)) = self.wanted.get(i).copied()
                && offset <= end.saturating_add(self.gap)
                && e.max(end) - first <= MAX_READ
            {
                end = end.max(e);
                i += 1;
            }
            if let Some(at) = covering(&self.pieces, first, end) {
                let p = self.pieces.get_mut(&at).expect("just found");
                p.refs += 1;
                self.log.push(at);
                continue;
            }
            if end > size {
                continue;
            }
            let (start, end) = (first / unit * unit, end.next_multiple_of(unit));
            let len = (end - start) as usize;
            if end - start > MAX_READ + 2 * unit
                || self.held + len > self.room
                || self.pieces.contains_key(&start)
                || !stream.start(start, len)
            {
                continue;
            }
            self.held += len;
            self.log.push(start);
            let piece = PendingRead {
                len,
                refs: 1,
                state: PendingState::InFlight,
            };
            self.pieces.insert(start, piece);
        }
        self.wanted.clear();
    }

    /// Sends to the device what was started, which happens anyway when something is waited for.
    pub fn send(&mut self) {
        if let Some(stream) = &mut self.stream {
            stream.send();
        }
    }

    /// Whether there is room for reads of what comes later; the rest is for what these lead to.
    pub fn has_room(&self) -> bool {
        self.held < self.room / 2
    }

    /// Bytes of directories, attributes and trees that are asked for together.
    pub fn batch(&self) -> u64 {
        MAX_BATCH.min(self.room as u64 / 4)
    }

    /// Whether there is room for a batch of what inodes lead to.
    pub fn has_room_for_batch(&self) -> bool {
        self.held as u64 + self.batch() <= self.room as u64
    }

    /// Bytes asked for since the last [`Reader::go`].
    pub fn wanted(&self) -> u64 {
        self.wanted.iter().map(|(offset, end)| end - offset).sum()
    }

    /// A point to which [`Reader::release`] and [`Reader::since`] go back.
    pub fn mark(&self) -> usize {
        self.log.len()
    }

    /// Takes over what was wanted since `mark`.
    pub fn since(&mut self, mark: usize) -> Vec<u64> {
        self.log.split_off(mark)
    }

    /// Pieces that were wanted since `mark` are needed no more.
    pub fn release(&mut self, mark: usize) {
        while self.log.len() > mark {
            let at = self.log.pop().expect("longer than something");
            self.forget(at);
        }
    }

    /// One that wanted this piece (of [`Reader::since`]) needs it no more.
    pub fn forget(&mut self, at: u64) {
        if let Some(p) = self.pieces.get_mut(&at) {
            p.refs -= 1;
            if p.refs == 0 && !matches!(p.state, PendingState::InFlight) {
                self.held -= p.len;
                self.pieces.remove(&at);
            }
        }
    }

    /// Waits until a piece has arrived.
    fn arrive(&mut self, at: u64) {
        let Some(stream) = &mut self.stream else {
            return;
        };
        let in_flight = |p: &PendingRead| matches!(p.state, PendingState::InFlight);
        while self.pieces.get(&at).is_some_and(in_flight) {
            let Some((offset, result)) = stream.next() else {
                break;
            };
            let Some(p) = self.pieces.get_mut(&offset) else {
                continue;
            };
            if p.refs == 0 {
                self.held -= p.len;
                self.pieces.remove(&offset);
                continue;
            }
            p.state = match result {
                Ok(block) => PendingState::Here(block),
                // Each reads its own again: one bad sector must not hide its neighbours.
                Err(_) => PendingState::Failed,
            };
        }
    }

    /// Reads bytes of the device.
    pub fn bytes(&mut self, offset: u64, len: usize) -> io::Result<Block> {
        let end = offset.saturating_add(len as u64);
        if let Some(at) = covering(&self.pieces, offset, end) {
            self.arrive(at);
            if let Some(PendingState::Here(block)) = self.pieces.get(&at).map(|p| &p.state) {
                let from = (offset - at) as usize;
                return Ok(block.part(from..from + len));
            }
        }
        self.blocks.bytes(offset, len).map(Block::new)
    }

    /// Reads blocks of an allocation group.
    pub fn blocks(&mut self, g: &Geometry, agno: u32, agbno: u32, n: u32) -> io::Result<Block> {
        let at = g.daddr(AgBlock { agno, agbno }) << 9;
        self.bytes(at, (n as usize) << g.blocklog)
    }
}

/// The piece that has these bytes, if there is one.
fn covering(pieces: &BTreeMap<u64, PendingRead>, offset: u64, end: u64) -> Option<u64> {
    let (at, p) = pieces.range(..=offset).next_back()?;
    (end <= at + p.len as u64).then_some(*at)
}
