//! The counts of a check, kept for a repair that changes little: only what it changed is looked at
//! again.
//!
//! Everything that a check counts is a sum over groups and inodes. The part of one of them is taken back
//! by looking at it as it was, with [`Ctx::undo`]; then it is looked at as it is now. At the end stands
//! what a check of everything would have counted.

use super::ctx::{DirectoryFacts, Fact, KIND_FREE};
use super::inode::{free_inode, used_inode};
use super::links::{self, Ups};
use super::{
    Budget, CheckProgress, CheckRun, Chunk, Counted, Ctx, Finding, Reader, Report, Structure, ag,
    space, superblock,
};
use crate::blocks::Blocks;
use crate::format::*;
use crate::geometry::Geometry;
use std::collections::{BTreeSet, HashSet};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

/// The structures that say which inodes there are.
pub(crate) const TREES: [Structure; 4] = [
    Structure::Agi,
    Structure::Tree(Btree::Ino),
    Structure::Tree(Btree::Fino),
    Structure::InodeChunk,
];

/// The counts of a check of all inodes in one pass.
pub(crate) struct Kept {
    g: Geometry,
    sb: Superblock,
    pub counted: Counted,
    log_clean: bool,
    head_lsn: Option<u64>,
    /// Directories of which nothing is counted at present.
    forgotten: BTreeSet<u64>,
    /// Groups of whose own structures nothing is counted at present.
    forgotten_groups: BTreeSet<u32>,
    /// The inodes were not looked at.
    pub stopped: bool,
}

/// The inodes and blocks that were changed since.
pub(crate) struct ChangedSince<'c> {
    pub sb: Superblock,
    pub inodes: &'c BTreeSet<u64>,
    pub groups: &'c BTreeSet<u32>,
}

impl Kept {
    pub(super) fn new(run: &CheckRun<'_>, counted: Counted, stopped: bool) -> Kept {
        Kept {
            g: run.g.clone(),
            sb: *run.sb,
            counted,
            log_clean: run.log_clean,
            head_lsn: run.head_lsn,
            forgotten: BTreeSet::new(),
            forgotten_groups: BTreeSet::new(),
            stopped,
        }
    }

    /// Does some work on what was kept, with the image as it is in `blocks`.
    fn with<R>(
        &self,
        blocks: &dyn Blocks,
        report: &Report,
        undo: bool,
        work: impl FnOnce(&Ctx<'_>) -> R,
    ) -> R {
        let run = CheckRun {
            g: &self.g,
            sb: &self.sb,
            blocks,
            report,
            progress: &CheckProgress::default(),
            large: false,
            budget: &Budget::new(&self.g, blocks, None, 1),
            log_clean: self.log_clean,
            head_lsn: self.head_lsn,
            groups: Vec::new(),
        };
        work(&Ctx {
            undo,
            ..run.context(&self.counted)
        })
    }

    /// Whether the groups have trees that say whose each block is.
    pub fn has_owners(&self) -> bool {
        self.g.features.rmapbt
    }

    /// Whether data of the group was seen to have two owners.
    pub fn is_shared(&self, agno: u32) -> bool {
        let ag = self.counted.ags.get(agno as usize);
        ag.is_none_or(|ag| ag.is_shared.load(Ordering::Relaxed))
    }

    /// The facts about an inode.
    pub fn fact(&self, ino: u64) -> Option<Fact> {
        self.counted.fact(&self.g, ino)
    }

    fn raw(&self, blocks: &dyn Blocks, ino: u64) -> io::Result<Vec<u8>> {
        let a = self.g.inode(ino).ok_or(io::ErrorKind::InvalidInput)?;
        blocks.bytes(self.g.inode_byte(a), self.g.inode_size as usize)
    }

    /// Takes back what directories have added, as they are in `blocks`. The facts about themselves stay.
    pub fn forget(&mut self, blocks: &dyn Blocks, dirs: &[u64]) -> io::Result<()> {
        let raws: io::Result<Vec<Vec<u8>>> = dirs.iter().map(|d| self.raw(blocks, *d)).collect();
        let raws = raws?;
        let index = |d: &u64| self.counted.index(&self.g, *d);
        let gone: HashSet<u32> = dirs.iter().filter_map(index).collect();
        self.with(blocks, &Report::default(), true, |ctx| {
            let mut rd = Reader::new(ctx);
            for (ino, raw) in dirs.iter().zip(&raws) {
                used_inode(ctx, &mut rd, *ino, raw, &mut DirectoryFacts::default());
            }
        });
        let tree = self.counted.tree.get_mut().expect("no holder panics");
        tree.dotdot.retain(|(dir, _)| !gone.contains(dir));
        tree.parent.retain(|(_, from)| !gone.contains(from));
        self.forgotten.extend(dirs);
        Ok(())
    }

    /// Looks again at what was changed from what `before` has to what `now` has. Gives what is wrong now
    /// and how many findings that is; nothing if it was changed in a way that has to be checked as a whole.
    pub fn check(
        mut self,
        before: &dyn Blocks,
        now: &dyn Blocks,
        changed: &ChangedSince<'_>,
    ) -> io::Result<Option<(Vec<Finding>, u64)>> {
        let mut old = Vec::new();
        let mut new: Vec<(u64, Vec<u8>)> = Vec::new();
        for ino in changed.inodes.union(&self.forgotten) {
            let is = self.raw(now, *ino)?;
            let was = self.raw(before, *ino)?;
            if self.forgotten.contains(ino) {
                new.push((*ino, is));
                continue;
            }
            let Some((agno, slot)) = self.counted.slot(&self.g, *ino) else {
                return Ok(None);
            };
            if let Some(nlink) = only_links(&was, &is) {
                let facts = self.counted.ags[agno].facts.get();
                if let (Some(facts), Some(f)) = (facts, self.fact(*ino)) {
                    facts.replace_inode(slot, f.kind, nlink);
                }
                continue;
            }
            for raw in [&was, &is] {
                let mode = Be16::at(raw, 2).map_or(0, |m| m.get());
                if mode != 0 && FileType::from_mode(mode) != FileType::Directory {
                    return Ok(None);
                }
            }
            if self.fact(*ino).is_some_and(|f| f.kind != KIND_FREE) {
                old.push(*ino);
            }
            new.push((*ino, is));
        }
        self.forget(before, &old)?;
        self.sb = changed.sb;
        let report = Report::default();
        for agno in changed.groups {
            if !self.group(before, now, *agno, &report) {
                return Ok(None);
            }
        }
        self.with(now, &report, false, |ctx| {
            let mut rd = Reader::new(ctx);
            let mut out = DirectoryFacts::default();
            for (ino, raw) in &new {
                let Some((agno, slot)) = ctx.counted.slot(ctx.g, *ino) else {
                    continue;
                };
                let ag = &ctx.ags[agno];
                let (kind, nlink) = match ag.is_free(slot) {
                    true => {
                        free_inode(ctx, *ino, raw);
                        (KIND_FREE, 0)
                    }
                    false => used_inode(ctx, &mut rd, *ino, raw, &mut out),
                };
                if let Some(f) = ag.facts.get() {
                    f.replace_inode(slot, kind, nlink);
                }
            }
            let counted = ctx.counted;
            counted.tree.lock().expect("no holder panics").append(out);
            for agno in 0..ctx.g.agcount {
                links::counts(ctx, agno);
                space(ctx, agno);
            }
            let mut ups = Ups::new(false)?;
            links::tree(ctx, &mut ups)?;
            superblock::quota(ctx);
            superblock::counters(ctx);
            if let Some(usage) = &counted.usage
                && ctx.log_clean
            {
                usage.lock().expect("no holder panics").compare(ctx);
            }
            links::cycles(ctx, &mut ups)
        })?;
        Ok(Some(report.take()))
    }

    /// Takes back what a group's own structures have added, as they are in `blocks`.
    pub fn forget_group(&mut self, blocks: &dyn Blocks, agno: u32) {
        if self.forgotten_groups.insert(agno) {
            self.look_at(blocks, agno, &Report::default(), true);
        }
    }

    /// Looks at a group; gives the chunks of inodes that it was known to have.
    fn look_at(
        &mut self,
        blocks: &dyn Blocks,
        agno: u32,
        report: &Report,
        undo: bool,
    ) -> Arc<Vec<Chunk>> {
        let ag = &mut self.counted.ags[agno as usize];
        (ag.free, ag.shared) = (OnceLock::new(), OnceLock::new());
        (ag.unlinked, ag.sums) = (OnceLock::new(), OnceLock::new());
        let chunks = std::mem::take(&mut ag.chunks);
        self.with(blocks, report, undo, |ctx| {
            ag::check(ctx, &mut Reader::new(ctx), agno);
        });
        chunks.into_inner().unwrap_or_default()
    }

    /// Looks at a group in `now` instead of `before`. False: it has other inodes there.
    fn group(&mut self, before: &dyn Blocks, now: &dyn Blocks, agno: u32, report: &Report) -> bool {
        self.forget_group(before, agno);
        let known = self.look_at(now, agno, report, false);
        let chunk = |c: &Chunk| (c.start, c.holemask);
        let now = self.counted.ags[agno as usize].chunks.get();
        now.is_some_and(|now| known.iter().map(chunk).eq(now.iter().map(chunk)))
    }
}

/// The link count of an inode in which nothing else changed.
fn only_links(was: &[u8], is: &[u8]) -> Option<u32> {
    let without = |raw: &[u8]| {
        let mut d = *Dinode::at(raw, 0).ok()?;
        let nlink = d.v2.nlink.get();
        d.v2.nlink.set(0);
        d.crc.set(0);
        let mut rest = raw.to_vec();
        d.put(&mut rest, 0);
        Some((nlink, rest))
    };
    let ((_, was), (nlink, is)) = (without(was)?, without(is)?);
    (was == is).then_some(nlink)
}
