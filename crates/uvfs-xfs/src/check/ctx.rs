//! The shared state of all parts of a check: the image, the findings, and the facts about each allocation
//! group.

use super::problem::{Place, Problem};
use super::progress::CheckProgress;
use super::report::Report;
use super::space::{BlockMap, Fingerprint, Use, class};
use super::usage::Usage;
use crate::blocks::Blocks;
use crate::format::*;
use crate::geometry::Geometry;
use std::io;
use std::ops::Range;
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
            let _ = info.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |v| {
                let old = v >> CLAIM_SHIFT & 15;
                match old {
                    0 => Some(v | (kind as u32) << CLAIM_SHIFT),
                    _ if old != kind as u32 => Some(v | MIXED),
                    _ => None,
                }
            });
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
    /// The chunk that has an inode and its place in the list, if it is there.
    pub fn find_chunk(&self, agino: u32) -> Option<(usize, usize)> {
        let chunks = self.chunks.get()?;
        let i = chunks
            .partition_point(|c| c.start <= agino)
            .checked_sub(1)?;
        let at = agino - chunks[i].start;
        (at < INODES_PER_CHUNK && chunks[i].holemask >> (at / INODES_PER_HOLEMASK_BIT) & 1 == 0)
            .then_some((i, i * 64 + at as usize))
    }
}

/// The inode of an index among all; `bases` has the first chunk of each group.
pub(crate) fn ino_of(g: &Geometry, bases: &[u32], ags: &[AgFacts], index: u32) -> Option<u64> {
    let agno = bases.partition_point(|b| *b <= index / 64).checked_sub(1)?;
    // Groups without chunks share their base with the next one; partition_point gives the
    // last, which is the one that has them.
    let chunk = index / 64 - bases[agno];
    let c = ags.get(agno)?.chunks.get()?.get(chunk as usize)?;
    Some(g.ino(agno as u32, c.start + index % 64))
}

/// A directory and one that it names or that names it, as inode indices.
pub(crate) type Pair = (u32, u32);

/// The results that one thread gathers from the inodes that it looks at.
#[derive(Default)]
pub(crate) struct Gathered {
    pub dotdot: Vec<Pair>,
    pub parent: Vec<Pair>,
}

impl Gathered {
    pub fn merge(&mut self, tree: &mut DirectoryFacts) {
        tree.dotdot.append(&mut self.dotdot);
        tree.parent.append(&mut self.parent);
    }
}

/// The facts about the directories in the pass.
#[derive(Default)]
pub(crate) struct DirectoryFacts {
    /// (directory, inode that its ".." names).
    pub dotdot: Vec<Pair>,
    /// (directory, directory that has an entry for it).
    pub parent: Vec<Pair>,
}

pub(crate) struct Ctx<'a> {
    pub g: &'a Geometry,
    pub sb: &'a Superblock,
    pub blocks: &'a dyn Blocks,
    pub report: &'a Report,
    pub progress: &'a CheckProgress,
    pub ags: Vec<AgFacts>,
    /// The first pass: nothing is known of the groups yet.
    pub first: bool,
    /// First chunk of each allocation group in the order of all chunks.
    pub bases: OnceLock<Vec<u32>>,
    pub tree: Mutex<DirectoryFacts>,
    pub large: bool,
    /// Bytes that a thread may read ahead.
    pub ahead: usize,
    /// Bytes that a thread may use for the entries of a directory.
    pub directory: u64,
    pub log_clean: bool,
    /// The log sequence number of the log's end, if that is known.
    pub head_lsn: Option<u64>,
    pub usage: Option<Mutex<Usage>>,
    /// This pass takes back what an earlier one has counted.
    pub undo: bool,
}

impl<'a> Ctx<'a> {
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
            let times = if self.undo {
                times.wrapping_neg()
            } else {
                times
            };
            f.add(start, len, class, times);
        }
    }

    /// Counts a reference to blocks of file data.
    pub fn refer(&self, agno: u32, start: u32, len: u32) {
        if let Some(f) = &self.ags[agno as usize].refs
            && let Some((start, len)) = self.clip(agno, start, len)
        {
            f.add(start, len, 1, if self.undo { u64::MAX } else { 1 });
        }
    }

    /// Claims blocks for metadata, and notes their owner.
    pub fn claim_owned(&self, place: Place, agno: u32, start: u32, len: u32, owner: u64) -> bool {
        self.own(agno, start, len, owner, 0, 0);
        self.claim(place, agno, start, len, Use::Meta, false)
    }

    /// The chunk that has an inode and its place in the list of its group, if it is there.
    pub fn find_chunk(&self, agno: u32, agino: u32) -> Option<(usize, usize)> {
        self.ags[agno as usize].find_chunk(agino)
    }

    /// The index of an inode among all: `None` if the inode trees do not have it.
    pub fn index(&self, ino: u64) -> Option<u32> {
        let a = self.g.inode(ino)?;
        let (_, i) = self.find_chunk(a.agno, a.agino)?;
        self.index_of(a.agno, i)
    }

    /// The index among all of the inode at place `i` of its group's.
    pub fn index_of(&self, agno: u32, i: usize) -> Option<u32> {
        let base = *self.bases.get()?.get(agno as usize)?;
        Some(base * 64 + i as u32)
    }

    /// The inode of an index.
    pub fn ino_of(&self, index: u32) -> Option<u64> {
        ino_of(self.g, self.bases.get()?, &self.ags, index)
    }

    /// An inode's facts, if it is there and in this pass.
    pub fn fact(&self, ino: u64) -> Option<Fact> {
        let a = self.g.inode(ino)?;
        let (_, i) = self.find_chunk(a.agno, a.agino)?;
        self.ags[a.agno as usize].facts.get()?.get(i)
    }

    pub fn io(&self, place: Place, e: &io::Error) {
        self.report.incomplete();
        let problem = Problem::Unreadable(e.to_string());
        self.report.add(place, problem);
    }
}
