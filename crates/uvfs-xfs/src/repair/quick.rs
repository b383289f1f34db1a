//! Makes the first check of a repair, and repairs damage of which the check sees the whole: with what the check has
//! counted, so that only what was changed is checked again.
//!
//! Such is damage of directories, with what follows for the inodes that they lead to, and of the structures that say
//! which blocks are free. Inode B-trees, if nothing else of the groups is damaged, are built anew from the inodes
//! before the inodes are checked. Trees that are sound say who owns all other blocks. If the outcome is not a sound
//! file system, these changes are dropped, and `repair/mod.rs` repairs in rounds.

use super::dir::{self, DirectoryTree};
use super::space::{self, AgToMend};
use super::trees::records;
use super::{Mend, Overlay, RepairOutcome, chunks, groups, links, local};
use crate::bulk::space::normal;
use crate::check::space::{BlockMap, Use};
use crate::check::{
    self, ChangedSince, CheckOptions, CheckOutcome, CheckProgress, Counter, Finding, Kept, Problem,
    Structure,
};
use crate::error::Result;
use crate::format::*;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The structures that tell which blocks of a group are free.
const SPACE: [Structure; 5] = [
    Structure::Agf,
    Structure::Agfl,
    Structure::Tree(Btree::Bno),
    Structure::Tree(Btree::Cnt),
    Structure::FreeSpace,
];
/// Further owners of shared blocks in a group: a tree with more is not unfolded.
const MAX_SHARED: u64 = 1 << 22;

/// The outcome of a quick repair.
pub(crate) enum Quick {
    /// The file system is sound now.
    Mended(RepairOutcome),
    /// Nothing was repaired. Has the outcome of the check, if that was complete and of the unchanged image.
    Not(Option<CheckOutcome>),
}

/// Checks the file system, and repairs it if that is quickly done. `disk` is that of `m`.
pub(crate) fn mend(
    m: &mut Mend<'_>,
    disk: &Arc<Overlay>,
    options: &CheckOptions,
    progress: &CheckProgress,
) -> Result<Quick> {
    let mut out = RepairOutcome::default();
    let (mut outcome, mut kept) = check::keeping(disk.clone(), options, progress, true)?;
    (out.found, out.found_count) = (outcome.findings.clone(), outcome.count);
    let trees = kept.take_if(|k| k.stopped);
    if let Some(trees) = &trees {
        out.rounds += 1;
        if !inode_trees(m, trees, &outcome) {
            return Ok(Quick::Not(None));
        }
        (outcome, kept) = check::keeping(disk.clone(), options, progress, false)?;
        // Lost space is no finding here: it is the blocks of the old trees, which this repair has left behind.
        let new = outcome.findings.iter().filter(|f| !is_lost_space(f));
        out.found.extend(new.cloned());
        let lost = outcome.findings.iter().filter(|f| is_lost_space(f)).count();
        out.found_count += outcome.count - lost as u64;
    }
    out.inodes = outcome.inodes;
    if outcome.count == 0 {
        return Ok(Quick::Mended(out));
    }
    out.rounds += 1;
    if local::mend(m, &outcome.findings, outcome.count, outcome.late) {
        return Ok(Quick::Mended(out));
    }
    let is_mended = match kept {
        Some(kept) if is_simple(&kept, &outcome) => directories(m, kept, &outcome),
        _ => false,
    };
    Ok(match is_mended {
        true => Quick::Mended(out),
        false => Quick::Not(Some(outcome).filter(|_| trees.is_none())),
    })
}

/// Whether a finding is about blocks without an owner.
fn is_lost_space(f: &Finding) -> bool {
    matches!(f.problem, Problem::Unowned(_))
}

/// Groups whose free space has to be counted anew.
fn space_of(outcome: &CheckOutcome) -> BTreeSet<u32> {
    let places = outcome.findings.iter().map(|f| f.place);
    let about = places.filter(|p| p.inode.is_none() && SPACE.contains(&p.what));
    about.filter_map(|p| p.ag).collect()
}

/// Whether all findings are about the contents of directories, or follow from these; or about free space.
fn is_simple(kept: &Kept, outcome: &CheckOutcome) -> bool {
    use Structure::{Directory, DirectoryData, DirectoryFreeIndex, DirectoryIndex, ShortDirectory};
    let is_simple = |f: &Finding| match (f.place.what, f.place.inode) {
        (
            Directory | DirectoryData | DirectoryIndex | DirectoryFreeIndex | ShortDirectory,
            Some(ino),
        ) => {
            let fact = kept.fact(ino);
            fact.is_some_and(|f| f.kind == FileType::Directory as u32)
                && !matches!(f.problem, Problem::Unreadable(_))
        }
        (Structure::Inode, Some(_)) => match f.problem {
            Problem::Count { counter, .. } => counter == Counter::Links,
            _ => f.problem == Problem::NoEntry,
        },
        // With reverse mappings, or shared data, more than free space is lost with these.
        (what, None) if SPACE.contains(&what) => f
            .place
            .ag
            .is_some_and(|agno| is_lost_space(f) || !(kept.has_owners() || kept.is_shared(agno))),
        _ => false,
    };
    outcome.missing.is_empty()
        && outcome.count == outcome.findings.len() as u64
        && outcome.findings.iter().all(is_simple)
}

/// Gives a repair what the check knows of the groups. Blocks of no known use are free if `all` were seen.
fn begin(m: &mut Mend<'_>, kept: &Kept, all: bool) {
    for (agno, k) in kept.counted.ags.iter().enumerate() {
        let ag = &mut m.ags[agno];
        *ag = AgToMend {
            avoid: std::mem::take(&mut ag.avoid),
            ..AgToMend::default()
        };
        let chunks = k.chunks.get().into_iter().flat_map(|c| c.iter());
        let free = k.free.get().into_iter().flat_map(|f| f.iter());
        let chunks = chunks.zip(free);
        ag.chunks = chunks
            .map(|(c, free)| InodeChunk::new(c.start, c.holemask, *free))
            .collect();
        let mut map = BlockMap::new(m.g.ag_blocks(agno as u32));
        if let Some(known) = &k.map {
            let known = known.lock().expect("no holder panics");
            let used = match all {
                true => &[Use::Meta, Use::Data][..],
                false => &[Use::Meta, Use::Data, Use::Unknown],
            };
            for (s, n) in known.list(used) {
                map.claim(s, n, Use::Meta);
            }
        }
        ag.map = Some(map);
    }
    m.recount = false;
}

/// Repairs directories.
fn directories(m: &mut Mend<'_>, mut kept: Kept, outcome: &CheckOutcome) -> bool {
    let before = m.disk.snapshot();
    m.read_findings(&outcome.findings);
    m.touched = space_of(outcome);
    let whole = |f: &&Finding| is_lost_space(f) || f.place.inode.is_some();
    let broken = outcome.findings.iter().filter(|f| !whole(f));
    m.broken = broken.filter_map(|f| f.place.ag).collect();
    for agno in m.touched.clone() {
        // Only the inodes count for the use of blocks, not its trees.
        kept.forget_group(m.disk, agno);
        let old = space::old_blocks(m, agno);
        m.ags[agno as usize].avoid.extend(old);
    }
    begin(m, &kept, true);
    for agno in m.touched.clone() {
        let ag = &mut m.ags[agno as usize];
        ag.avoid = normal(std::mem::take(&mut ag.avoid));
        let fixed = space::fresh(&m.g, agno, &ag.chunks);
        if let Some(map) = &mut ag.map {
            for (s, n) in fixed.list(&[Use::Meta]) {
                map.claim(s, n, Use::Meta);
            }
        }
    }
    let places = outcome.findings.iter().map(|f| f.place);
    let about_entries = places.filter(|p| p.what != Structure::Inode);
    let bad: BTreeSet<u64> = about_entries.filter_map(|p| p.inode).collect();
    let dirs: Vec<u64> = bad.into_iter().collect();
    // Something cannot be read that could be when it was checked.
    if kept.forget(m.disk, &dirs).is_err() {
        return false;
    }
    for (agno, k) in kept.counted.ags.iter().enumerate() {
        let ag = &mut m.ags[agno];
        let slots = ag.chunks.len() * 64;
        (ag.kind, ag.seen, ag.nlink) = (vec![0; slots], vec![0; slots], vec![0; slots]);
        let Some(facts) = k.facts.get() else { continue };
        for slot in 0..slots {
            let Some(f) = facts.get(slot) else { continue };
            ag.kind[slot] = f.kind as u8;
            (ag.seen[slot], ag.nlink[slot]) = (f.seen, f.nlink);
        }
    }
    let mut tree = DirectoryTree::default();
    let ino = |index: u32| kept.counted.ino_of(&m.g, index).unwrap_or(0);
    let inos = |(a, b): &(u32, u32)| (ino(*a), ino(*b));
    {
        let known = kept.counted.tree.lock().expect("no holder panics");
        tree.dotdot = known.dotdot.iter().map(inos).collect();
        tree.entries = known.parent.iter().map(inos).collect();
    }
    for dir in &dirs {
        let Some(inode) = m.inode(*dir) else {
            return false;
        };
        dir::one(m, &inode, &mut tree);
    }
    links::settle(m, tree);
    links::all(m);
    // A group of which some blocks cannot be told, or a directory for which there was no space.
    if m.recount || !touched(m, &kept) {
        return false;
    }
    let changed = ChangedSince {
        sb: m.sb,
        inodes: &m.changed,
        groups: &m.touched,
    };
    let left = kept.check(&before, m.disk, &changed);
    matches!(left, Ok(Some((_, 0))))
}

/// Builds damaged inode trees anew from the inodes in their groups.
fn inode_trees(m: &mut Mend<'_>, kept: &Kept, outcome: &CheckOutcome) -> bool {
    m.read_findings(&outcome.findings);
    begin(m, kept, false);
    m.touched = outcome.findings.iter().filter_map(|f| f.place.ag).collect();
    for agno in m.touched.clone() {
        chunks::complete(m, agno);
        // The free space trees are believed: what they have is no inode's.
        for (s, n) in space::chunk_runs(&m.g, &m.ags[agno as usize].chunks) {
            let room = m.g.ag_blocks(agno).saturating_sub(s);
            let Some(map) = m.ags[agno as usize].map.as_mut().filter(|_| n <= room) else {
                return false;
            };
            let used: u32 = map.claim(s, n, Use::Meta).iter().map(|c| c.len).sum();
            if used != n {
                return false;
            }
        }
    }
    touched(m, kept)
}

/// Builds the groups anew that were changed. The use of blocks stays as their sound trees have it.
fn touched(m: &mut Mend<'_>, kept: &Kept) -> bool {
    let mut counts = Counts::default();
    for agno in 0..m.g.agcount {
        let group = match m.touched.contains(&agno) {
            true => {
                let old = space::old_blocks(m, agno);
                if !m.broken.contains(&agno) && !trees(m, agno) {
                    return false;
                }
                let ag = &mut m.ags[agno as usize];
                ag.released.extend(&old);
                // They are not to be overwritten, whatever else is repaired.
                ag.avoid = normal([&ag.avoid[..], &old].concat());
                let owned = groups::owned(ag);
                groups::group(m, agno, owned)
            }
            false => kept.counted.ags[agno as usize].sums.get().copied(),
        };
        let Some(group) = group else { return false };
        counts += group;
    }
    groups::counters(m, counts);
    true
}

/// Reads the reverse mapping and reference count trees of a group.
fn trees(m: &mut Mend<'_>, agno: u32) -> bool {
    let (mut owners, mut shared, mut further) = (Vec::new(), Vec::new(), 0);
    if m.g.features.rmapbt {
        let walked = records(m, agno, Btree::Rmap, &mut |r: &RmapRecord| {
            let (owner, offset) = (r.owner.get(), r.offset.get());
            let rebuilt = m.rebuilt.contains(&owner) && offset & RMAP_OFF_ATTR_FORK == 0;
            if owner >> 63 == 0 && !rebuilt {
                owners.push((r.startblock.get(), r.blockcount.get(), owner, offset));
            }
        });
        if !walked.is_whole() {
            return false;
        }
    }
    if m.g.features.reflink {
        let visit = &mut |r: &RefcountRecord| {
            let count = u64::from(r.refcount.get()).saturating_sub(1);
            further += count;
            if further <= MAX_SHARED {
                let run = (r.startblock.get(), r.blockcount.get());
                shared.extend((0..count).map(|_| run));
            }
        };
        let walked = records(m, agno, Btree::Refcount, visit);
        if !walked.is_whole() || further > MAX_SHARED {
            return false;
        }
    }
    let ag = &mut m.ags[agno as usize];
    ag.owners.extend(owners);
    ag.shared = shared;
    true
}
