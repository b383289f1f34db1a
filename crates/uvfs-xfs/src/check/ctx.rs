//! The shared state of all parts of a check: the image, the findings, and the facts about each allocation
//! group.

use super::space::class;
use super::{BlockMap, CheckRun, Fingerprint, Place, Problem, Usage, Use};
use crate::format::*;
use crate::geometry::Geometry;
use std::io;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use zerocopy::FromZeros;

/// An inode chunk of 64, less the holes of a sparse one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chunk {
    /// First inode in the allocation group.
    pub start: u32,
    /// Bit set: four inodes that are not there.
    pub holemask: u16,
}

/// An inode's state in [`Facts`]: free.
pub(crate) const KIND_FREE: u32 = 0;
/// In use, but too damaged to tell more; reported already.
pub(crate) const KIND_BAD: u32 = 15;
const NLINK_BITS: u32 = 22;
const NLINK_MAX: u32 = (1 << NLINK_BITS) - 1;
const KIND_SHIFT: u32 = 22;
const CLAIM_SHIFT: u32 = 26;
const MIXED: u32 = 1 << 30;
const UNLINKED: u32 = 1 << 31;

/// Bytes of [`Facts`] for an inode.
pub(crate) const FACT_BYTES: u64 = 8;

/// Link counts of 64-inode chunks: eight bytes an inode. The first word counts entries seen; the
/// second has the link count (22 bits, saturating), the kind of inode ([`FileType`], or
/// `KIND_*`), the kind that directory entries say, and two flags.
///
/// Facts about inodes of other chunks are for another pass, and ignored.
pub(crate) struct Facts {
    /// The chunks, by their place in the list of the group.
    chunks: Range<usize>,
    seen: Vec<AtomicU32>,
    info: Vec<AtomicU32>,
}

/// One inode's [`Facts`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fact {
    pub seen: u32,
    pub nlink: u32,
    pub kind: u32,
    pub claimed: u32,
    /// Entries say different kinds.
    pub mixed: bool,
    /// On an unlinked list.
    pub unlinked: bool,
}

impl Fact {
    /// Whether as many entries were seen as the inode says.
    pub fn links_match(&self) -> bool {
        self.seen.min(NLINK_MAX) == self.nlink
    }
}

impl Facts {
    pub fn new(chunks: Range<usize>) -> Facts {
        let zeros = || AtomicU32::new_vec_zeroed(chunks.len() * 64).expect("out of memory");
        Facts {
            seen: zeros(),
            info: zeros(),
            chunks,
        }
    }

    /// The chunks whose inodes this has.
    pub fn chunks(&self) -> Range<usize> {
        self.chunks.clone()
    }

    fn words(&self, i: usize) -> Option<(&AtomicU32, &AtomicU32)> {
        let i = i.checked_sub(self.chunks.start * 64)?;
        Some((self.seen.get(i)?, self.info.get(i)?))
    }

    /// Whether this has the inode.
    pub fn has(&self, i: usize) -> bool {
        self.words(i).is_some()
    }

    pub fn set_inode(&self, i: usize, kind: u32, nlink: u32) {
        if let Some((_, info)) = self.words(i) {
            let v = nlink.min(NLINK_MAX) | kind << KIND_SHIFT;
            info.fetch_or(v, Ordering::Relaxed);
        }
    }

    /// Sets an inode's kind and link count, whatever they were.
    pub fn replace_inode(&self, i: usize, kind: u32, nlink: u32) {
        if let Some((_, info)) = self.words(i) {
            info.fetch_and(!(NLINK_MAX | 15 << KIND_SHIFT), Ordering::Relaxed);
        }
        self.set_inode(i, kind, nlink);
    }

    pub fn set_unlinked(&self, i: usize) {
        if let Some((_, info)) = self.words(i) {
            info.fetch_or(UNLINKED, Ordering::Relaxed);
        }
    }

    /// Counts a directory entry that says that the inode is of this kind (0: does not say).
    pub fn link(&self, i: usize, kind: FileType) {
        let Some((seen, info)) = self.words(i) else {
            return;
        };
        seen.fetch_add(1, Ordering::Relaxed);
        if kind != FileType::Unknown {
            let kind = kind as u32;
            let claimed = |v| match v >> CLAIM_SHIFT & 15 {
                0 => Some(v | kind << CLAIM_SHIFT),
                old => (old != kind).then_some(v | MIXED),
            };
            let _ = info.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claimed);
        }
    }

    /// Takes back what [`Facts::link`] has counted, but the kind that the entry said.
    pub fn unlink(&self, i: usize) {
        if let Some((seen, _)) = self.words(i) {
            seen.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub fn get(&self, i: usize) -> Option<Fact> {
        let (seen, info) = self.words(i)?;
        let v = info.load(Ordering::Relaxed);
        Some(Fact {
            seen: seen.load(Ordering::Relaxed),
            nlink: v & NLINK_MAX,
            kind: v >> KIND_SHIFT & 15,
            claimed: v >> CLAIM_SHIFT & 15,
            mixed: v & MIXED != 0,
            unlinked: v & UNLINKED != 0,
        })
    }
}

/// A sharing record of the refcountbt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedExtent {
    pub start: u32,
    pub len: u32,
    pub count: u32,
}

/// The facts about one allocation group.
#[derive(Default)]
pub(crate) struct AgFacts {
    /// The blocks that this pass looks at.
    pub window: Range<u32>,
    /// Uses of the blocks of the window; `None` if there are none.
    pub map: Option<Mutex<BlockMap>>,
    /// Owners seen less owners recorded.
    pub owners: Option<Fingerprint>,
    /// References to data seen less those recorded.
    pub refs: Option<Fingerprint>,
    pub chunks: OnceLock<Arc<Vec<Chunk>>>,
    pub free: OnceLock<Arc<Vec<u64>>>,
    pub facts: OnceLock<Facts>,
    pub shared: OnceLock<Vec<SharedExtent>>,
    /// Heads of the unlinked lists.
    pub unlinked: OnceLock<Vec<u32>>,
    /// The group's share in the counters of the superblock.
    pub sums: OnceLock<Counts>,
    /// Data was seen to have two owners.
    pub is_shared: AtomicBool,
    /// The inode tree could be followed to its end.
    pub inodes_known: AtomicBool,
}

impl AgFacts {
    /// The place of an inode in the list, if it is there.
    pub fn slot(&self, agino: u32) -> Option<usize> {
        let chunks = self.chunks.get()?;
        let i = chunks.partition_point(|c| c.start <= agino);
        let c = chunks.get(i.checked_sub(1)?)?;
        let at = agino - c.start;
        let there = at < INODES_PER_CHUNK && c.holemask >> (at / INODES_PER_HOLEMASK_BIT) & 1 == 0;
        there.then_some((i - 1) * 64 + at as usize)
    }

    /// Whether the inode at a place in the list is free.
    pub fn is_free(&self, slot: usize) -> bool {
        let free = self.free.get().and_then(|f| f.get(slot / 64));
        free.is_some_and(|f| f >> (slot % 64) & 1 != 0)
    }
}

/// A directory and one that it names or that names it, as inode indices.
pub(crate) type Pair = (u32, u32);

/// The facts about the directories in the pass, or those that one thread gathers.
#[derive(Default)]
pub(crate) struct DirectoryFacts {
    /// (directory, inode that its ".." names).
    pub dotdot: Vec<Pair>,
    /// (directory, directory that has an entry for it).
    pub parent: Vec<Pair>,
}

impl DirectoryFacts {
    pub fn append(&mut self, mut more: DirectoryFacts) {
        self.dotdot.append(&mut more.dotdot);
        self.parent.append(&mut more.parent);
    }
}

/// All that a pass counts.
pub(crate) struct Counted {
    pub ags: Vec<AgFacts>,
    /// First chunk of each allocation group in the order of all chunks.
    pub bases: OnceLock<Vec<u32>>,
    pub tree: Mutex<DirectoryFacts>,
    pub usage: Option<Mutex<Usage>>,
}

impl Counted {
    /// The group of an inode and its place in it, if it is there.
    pub fn slot(&self, g: &Geometry, ino: u64) -> Option<(usize, usize)> {
        let a = g.inode(ino)?;
        let agno = a.agno as usize;
        Some((agno, self.ags.get(agno)?.slot(a.agino)?))
    }

    /// The index among all of the inode at place `slot` of its group's.
    pub fn index_of(&self, agno: usize, slot: usize) -> Option<u32> {
        Some(self.bases.get()?.get(agno)? * 64 + slot as u32)
    }

    /// The index of an inode among all: `None` if the inode trees do not have it.
    pub fn index(&self, g: &Geometry, ino: u64) -> Option<u32> {
        let (agno, slot) = self.slot(g, ino)?;
        self.index_of(agno, slot)
    }

    /// The inode of an index.
    pub fn ino_of(&self, g: &Geometry, index: u32) -> Option<u64> {
        let bases = self.bases.get()?;
        // Groups without chunks share their base with the next one; partition_point gives the
        // last, which is the one that has them.
        let agno = bases.partition_point(|b| *b <= index / 64).checked_sub(1)?;
        let chunk = index / 64 - bases[agno];
        let c = self.ags.get(agno)?.chunks.get()?.get(chunk as usize)?;
        Some(g.ino(agno as u32, c.start + index % 64))
    }

    /// An inode's facts, if it is there and in the pass.
    pub fn fact(&self, g: &Geometry, ino: u64) -> Option<Fact> {
        let (agno, slot) = self.slot(g, ino)?;
        self.ags[agno].facts.get()?.get(slot)
    }
}

/// A pass of a check.
pub(crate) struct Ctx<'a> {
    pub run: &'a CheckRun<'a>,
    pub counted: &'a Counted,
    pub ags: &'a [AgFacts],
    /// This pass takes back what an earlier one has counted.
    pub undo: bool,
}

impl<'a> Deref for Ctx<'a> {
    type Target = CheckRun<'a>;

    fn deref(&self) -> &CheckRun<'a> {
        self.run
    }
}

impl Ctx<'_> {
    /// Whether this pass looks at any of the group's blocks.
    pub fn in_pass(&self, agno: u32) -> bool {
        !self.ags[agno as usize].window.is_empty()
    }

    /// The part of a run of blocks that this pass looks at: first block and length.
    fn clip(&self, agno: u32, start: u32, len: u32) -> Option<(u32, u32)> {
        let w = &self.ags[agno as usize].window;
        let (from, to) = (start.max(w.start), start.saturating_add(len).min(w.end));
        (from < to).then(|| (from, to - from))
    }

    /// Marks blocks, which must exist, as used, and reports those that already were. Gives whether
    /// they were unused.
    pub fn claim(
        &self,
        place: Place,
        agno: u32,
        start: u32,
        len: u32,
        new: Use,
        may_share: bool,
    ) -> bool {
        let ag = &self.ags[agno as usize];
        let (Some(map), Some((start, len))) = (&ag.map, self.clip(agno, start, len)) else {
            return true;
        };
        let first = ag.window.start;
        let mut map = map.lock().expect("no holder panics");
        if self.undo {
            map.release(start - first, len, new);
            return true;
        }
        let conflicts = map.claim(start - first, len, new);
        drop(map);
        let mut fine = true;
        for c in conflicts {
            if may_share && new == Use::Data && c.was == Use::Data {
                ag.is_shared.store(true, Ordering::Relaxed);
                continue;
            }
            fine = false;
            let problem = Problem::UsedTwice {
                blocks: c.len,
                was: c.was,
                new,
            };
            self.report.add(place.at(agno, first + c.start), problem);
        }
        fine
    }

    /// Looks at the log sequence number at byte `at` of a structure.
    pub fn lsn(&self, place: Place, bytes: &[u8], at: usize) {
        if let (Some(head), true) = (self.head_lsn, self.g.features.crc)
            && let Ok(lsn) = Be64::at(bytes, at)
        {
            self.report.lsn(place, head, lsn.get());
        }
    }

    /// Counts blocks as owned, for the comparison with the reverse mapping tree. `delta` is the
    /// owner's offset less the block number.
    pub fn own(&self, agno: u32, start: u32, len: u32, owner: u64, flags: u64, delta: u64) {
        self.owned(agno, start, len, class(owner, flags, delta), 1);
    }

    /// Counts `times` (modulo 2^64) that blocks have an owner of this [`class`].
    pub fn owned(&self, agno: u32, start: u32, len: u32, class: u64, times: u64) {
        if let Some(f) = &self.ags[agno as usize].owners
            && let Some((start, len)) = self.clip(agno, start, len)
        {
            f.add(start, len, class, self.times(times));
        }
    }

    /// Counts a reference to blocks of file data.
    pub fn refer(&self, agno: u32, start: u32, len: u32) {
        if let Some(f) = &self.ags[agno as usize].refs
            && let Some((start, len)) = self.clip(agno, start, len)
        {
            f.add(start, len, 1, self.times(1));
        }
    }

    /// How often what is looked at counts (modulo 2^64).
    fn times(&self, times: u64) -> u64 {
        match self.undo {
            true => times.wrapping_neg(),
            false => times,
        }
    }

    /// Claims blocks for metadata, and notes their owner.
    pub fn claim_owned(&self, place: Place, agno: u32, start: u32, len: u32, owner: u64) -> bool {
        self.own(agno, start, len, owner, 0, 0);
        self.claim(place, agno, start, len, Use::Meta, false)
    }

    /// The index of an inode among all: `None` if the inode trees do not have it.
    pub fn index(&self, ino: u64) -> Option<u32> {
        self.counted.index(self.g, ino)
    }

    /// The inode of an index.
    pub fn ino_of(&self, index: u32) -> Option<u64> {
        self.counted.ino_of(self.g, index)
    }

    /// An inode's facts, if it is there and in this pass.
    pub fn fact(&self, ino: u64) -> Option<Fact> {
        self.counted.fact(self.g, ino)
    }

    pub fn io(&self, place: Place, e: &io::Error) {
        self.report.incomplete();
        let problem = Problem::Unreadable(e.to_string());
        self.report.add(place, problem);
    }
}
