//! Fills a new file system from a source: one walk that allocates everything and writes the metadata,
//! while the threads of the pool list directories ahead and copy contents.

mod write;

use super::inode::{ForkData, device};
use super::layout::FixedBlocks;
use super::meta::Metadata;
use super::pool::{Below, SourceWalk, WorkPool};
use super::source::{Data, Meta, Root, SourceDir, SourceEntry, Time};
use super::space::{BlockRun, Full, SpaceMap};
use super::{MkfsError, MkfsProgress};
use crate::bulk::attr::{self, NewAttr, remote_header};
use crate::bulk::dir::{self, DirLayout, NewEntry, Owner};
use crate::format::*;
use crate::geometry::Geometry;
use crate::read::verifier;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use write::{Batch, NLINK_OFFSET, append, daddr_of};

/// The least room for an attribute fork: a B-tree root with two pointers, rounded up.
const MIN_ATTR_ROOM: usize = 40;
/// The least room for a data fork: a B-tree root with three pointers, rounded up.
const MIN_DATA_ROOM: usize = 56;

/// The times that new inodes get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Times {
    /// The times of the source.
    Kept,
    /// The time of the last change of contents, but none later than this one, for all of them.
    Until(Time),
}

impl Times {
    pub fn apply(self, m: &mut Meta) {
        if let Times::Until(last) = self {
            m.mtime = m.mtime.min(last);
            (m.atime, m.ctime, m.crtime) = (m.mtime, m.mtime, m.mtime);
        }
    }
}

/// An inode's forks as far as the attributes decide about them.
pub(crate) enum AttrForm {
    None,
    Short(Vec<u8>),
    Blocks(attr::AttrPlan),
}

/// How the space of an inode is divided: the attributes' form, and the bytes of the data fork.
pub(crate) fn divide(g: &Geometry, attrs: &[NewAttr], device: bool) -> (AttrForm, usize) {
    let all = g.inode_size as usize - DINODE_V3_SIZE;
    if attrs.is_empty() {
        return (AttrForm::None, all);
    }
    // A device's data fork is always of this length if there are attributes.
    let least = if device { 8 } else { MIN_DATA_ROOM };
    let short = attr::short_form(attrs).filter(|s| s.len() <= all - least);
    let room = short.as_ref().map_or(MIN_ATTR_ROOM, Vec::len);
    let room = room.next_multiple_of(8).max(MIN_ATTR_ROOM);
    let data = if device { 8 } else { all - room };
    match short {
        Some(s) => (AttrForm::Short(s), data),
        None => (AttrForm::Blocks(attr::AttrPlan::new(g, attrs)), data),
    }
}

/// Refuses attributes that the format has no room for; a source that is no file system may have them.
fn fits(attrs: &[NewAttr], new: &Making<'_>) -> Result<(), MkfsError> {
    let named = |a: &NewAttr| (1..=MAXNAMELEN).contains(&a.name.len()) && !a.name.contains(&0);
    if !attrs.iter().all(named) {
        let why = "XFS has names of extended attributes from 1 to 255 bytes without NUL, after their namespace";
        return Err(new.unfit(why));
    }
    match attrs.iter().all(|a| a.value.len() <= ATTR_MAX_VALUE) {
        true => Ok(()),
        false => Err(new.unfit("XFS has values of extended attributes of up to 65536 bytes")),
    }
}

/// The ranges of blocks of a file that hold data: (first block, blocks).
pub(crate) fn block_runs(g: &Geometry, size: u64, data: &Data) -> Vec<(u64, u64)> {
    let blocks = |start: u64, end: u64| {
        let first = start >> g.blocklog;
        (first, end.div_ceil(u64::from(g.block_size)))
    };
    match data {
        Data::Dense if size == 0 => Vec::new(),
        Data::Dense => vec![(0, blocks(0, size).1)],
        Data::Runs(runs) => {
            let mut out: Vec<(u64, u64)> = Vec::with_capacity(runs.len());
            for (start, len) in runs {
                let (first, end) = blocks(*start, start + len);
                match out.last_mut() {
                    Some((s, n)) if first <= *s + *n => *n = (*n).max(end - *s),
                    _ => out.push((first, end - first)),
                }
            }
            out
        }
    }
}

/// An inode that is made, and what it is made from.
struct Making<'d> {
    ino: u64,
    /// The group for its blocks.
    agno: u32,
    dir: &'d Arc<dyn SourceDir>,
    /// Its name there; empty for the directory itself.
    name: &'d [u8],
}

impl Making<'_> {
    fn path(&self) -> PathBuf {
        self.dir.path(self.name)
    }

    fn unfit(&self, why: &'static str) -> MkfsError {
        MkfsError::unfit(self.path(), why)
    }
}

/// An inode with several names.
struct Linked {
    ino: u64,
    nlink: u32,
}

/// A directory that is known by name, to be filled.
struct Pending {
    ino: u64,
    parent: u64,
    agno: u32,
    meta: Meta,
    attrs: Vec<NewAttr>,
}

/// The source of the generation numbers: they follow from the uuid.
pub(crate) fn generation(g: &Geometry, ino: u64) -> u32 {
    let half = |i| u64::from_be_bytes(g.uuid[i..i + 8].try_into().unwrap_or_default());
    // The mixing function of splitmix64.
    let mut x = half(0) ^ half(8).rotate_left(17) ^ ino.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ x >> 31) as u32
}

/// Everything that the walk works on.
pub(crate) struct Filler<'p, 'a> {
    pub l: &'a FixedBlocks,
    pub space: &'p mut SpaceMap,
    pub meta: &'p mut Metadata<'a>,
    pub pool: &'p WorkPool<'a>,
    pub progress: &'a MkfsProgress,
    pub times: Times,
    batches: HashMap<u32, Batch>,
    links: HashMap<(u64, u64), Linked>,
    /// Some inode has attributes.
    pub has_attrs: bool,
    /// Inodes that were made.
    pub inodes: u64,
}

impl<'p, 'a> Filler<'p, 'a> {
    pub fn new(
        l: &'a FixedBlocks,
        space: &'p mut SpaceMap,
        meta: &'p mut Metadata<'a>,
        pool: &'p WorkPool<'a>,
        progress: &'a MkfsProgress,
        times: Times,
    ) -> Filler<'p, 'a> {
        Filler {
            l,
            space,
            meta,
            pool,
            progress,
            times,
            batches: HashMap::new(),
            links: HashMap::new(),
            has_attrs: false,
            inodes: 0,
        }
    }

    /// Walks the whole source.
    pub fn fill(&mut self, root: Root) -> Result<(), MkfsError> {
        let Root {
            dir,
            mut meta,
            attrs,
        } = root;
        self.times.apply(&mut meta);
        let ino = self.l.g.rootino;
        let pending = Pending {
            ino,
            parent: ino,
            agno: 0,
            meta,
            attrs,
        };
        let mut walk = SourceWalk::new(self.pool, dir, pending);
        while let Some(((dir, entries), pending)) = walk.next()? {
            let below = self.directory(&dir, entries, pending)?;
            walk.descend(&dir, below);
        }
        for (_, batch) in std::mem::take(&mut self.batches) {
            self.flush(batch)?;
        }
        Ok(())
    }

    fn full(&self, path: PathBuf) -> MkfsError {
        MkfsError::NoSpace {
            path,
            size: self.l.g.data_bytes(),
        }
    }

    /// Blocks for metadata of an inode, in runs that are multiples of `granule`.
    fn metadata(
        &mut self,
        new: &Making<'_>,
        blocks: u32,
        granule: u32,
    ) -> Result<Vec<BlockRun>, MkfsError> {
        let runs = self.space.metadata(new.agno, blocks, granule);
        runs.map_err(|Full| self.full(new.path()))
    }

    /// A new inode in `near` or wherever there is room, for the entry `name`.
    fn allocate(
        &mut self,
        near: u32,
        dir: &Arc<dyn SourceDir>,
        name: &[u8],
    ) -> Result<u64, MkfsError> {
        let g = &self.l.g;
        let found = self.space.inode(near);
        let (agno, agino, new) = found.map_err(|Full| self.full(dir.path(name)))?;
        let ino = g.ino(agno, agino);
        if new {
            self.meta.new_unit(ino);
        }
        Ok(ino)
    }

    /// Makes all inodes in a directory that are no directories, and the directory itself; gives its
    /// subdirectories.
    fn directory(
        &mut self,
        dir: &Arc<dyn SourceDir>,
        entries: Vec<SourceEntry>,
        pending: Pending,
    ) -> Result<Below<Pending>, MkfsError> {
        let agno = self.space.choose(pending.agno);
        let mut inos = Vec::with_capacity(entries.len());
        let mut fresh = Vec::with_capacity(entries.len());
        for e in &entries {
            let known = e.links.and_then(|id| self.links.get_mut(&id));
            if let Some(link) = known {
                link.nlink += 1;
                let (ino, nlink) = (link.ino, link.nlink);
                // The inode itself may come later in this directory.
                inos.push(ino);
                fresh.push(false);
                self.meta.inode(ino, false, |b| {
                    if let Ok(d) = DinodeV2::at(b, 0)
                        && d.mode.get() != 0
                    {
                        Be32::new(nlink).put(b, NLINK_OFFSET);
                    }
                })?;
                continue;
            }
            let ino = self.allocate(agno, dir, &e.name)?;
            if let Some(id) = e.links {
                self.links.insert(id, Linked { ino, nlink: 1 });
            }
            inos.push(ino);
            fresh.push(true);
        }
        let names: Vec<NewEntry<'_>> = entries
            .iter()
            .zip(&inos)
            .map(|(e, ino)| NewEntry {
                name: &e.name,
                ino: *ino,
                file_type: FileType::from_mode(e.meta.mode),
            })
            .collect();
        self.directory_inode(dir, &pending, &names, agno)?;
        drop(names);
        let mut below = Vec::new();
        for ((mut e, ino), fresh) in entries.into_iter().zip(inos).zip(fresh) {
            if !fresh {
                continue;
            }
            self.times.apply(&mut e.meta);
            if e.meta.is_dir() {
                let next = Pending {
                    ino,
                    parent: pending.ino,
                    agno,
                    meta: e.meta,
                    attrs: e.attrs,
                };
                below.push((e.name, next));
            } else {
                let nlink = e.links.and_then(|id| self.links.get(&id));
                let nlink = nlink.map_or(1, |l| l.nlink);
                self.file(dir, e, ino, agno, nlink)?;
            }
        }
        Ok(below)
    }

    /// Writes a directory's blocks and inode.
    fn directory_inode(
        &mut self,
        dir: &Arc<dyn SourceDir>,
        p: &Pending,
        entries: &[NewEntry<'_>],
        agno: u32,
    ) -> Result<(), MkfsError> {
        let g = &self.l.g;
        let new = &Making {
            ino: p.ino,
            agno,
            dir,
            name: b"",
        };
        fits(&p.attrs, new)?;
        let (form, room) = divide(g, &p.attrs, false);
        let (data, size) = match dir::layout(g, p.parent, entries, room) {
            DirLayout::Short(bytes) => {
                let size = bytes.len() as u64;
                (ForkData::local(FORMAT_LOCAL, bytes), size)
            }
            DirLayout::Blocks(plan) => {
                let granule = 1u32 << g.dirblklog;
                let mut extents = Vec::new();
                for (start, n) in plan.runs(g) {
                    let runs = self.metadata(new, n as u32 * granule, granule)?;
                    append(g, &mut extents, start, &runs);
                }
                let owner = Owner {
                    ino: p.ino,
                    parent: p.parent,
                };
                let daddr = |block| daddr_of(g, &extents, block);
                let meta = &mut self.meta;
                dir::fill(g, owner, entries, &plan, &daddr, &mut |block, bytes| {
                    let kind = match g.dir_index().contains(&block) {
                        true => verifier::DA,
                        false => verifier::DIR_DATA,
                    };
                    meta.put(daddr(block), bytes, kind)
                })?;
                let size = plan.size(g);
                (self.fork(new, room, &extents)?, size)
            }
        };
        let is_dir = |e: &&NewEntry<'_>| e.file_type == FileType::Directory;
        let nlink = 2 + entries.iter().filter(is_dir).count() as u32;
        let attrs = (&p.attrs[..], form);
        self.write_inode(new, &p.meta, attrs, nlink, size, (room, data))
    }

    /// Writes a file that is no directory, and has its contents copied.
    fn file(
        &mut self,
        dir: &Arc<dyn SourceDir>,
        e: SourceEntry,
        ino: u64,
        agno: u32,
        nlink: u32,
    ) -> Result<(), MkfsError> {
        let g = &self.l.g;
        let kind = FileType::from_mode(e.meta.mode);
        let new = &Making {
            ino,
            agno,
            dir,
            name: &e.name,
        };
        let special = !matches!(kind, FileType::Regular | FileType::Symlink);
        fits(&e.attrs, new)?;
        let (form, room) = divide(g, &e.attrs, special);
        let mut size = 0;
        let data = match kind {
            FileType::Regular => {
                size = e.meta.size;
                if size > i64::MAX as u64 {
                    return Err(new.unfit("it is too large"));
                }
                let extents = self.contents(new, &e)?;
                self.fork(new, room, &extents)?
            }
            FileType::Symlink => {
                size = e.target.len() as u64;
                self.symlink(new, &e.target, room)?
            }
            FileType::CharDevice | FileType::BlockDevice => {
                let (major, minor) = e.meta.rdev;
                let why = "XFS has device numbers up to 511 (major) and 262143 (minor)";
                let number = device(major, minor).ok_or_else(|| new.unfit(why))?;
                ForkData::local(FORMAT_DEV, number)
            }
            FileType::Fifo | FileType::Socket => ForkData::local(FORMAT_DEV, vec![0; 4]),
            _ => return Err(new.unfit("its type is not known")),
        };
        let attrs = (&e.attrs[..], form);
        self.write_inode(new, &e.meta, attrs, nlink, size, (room, data))
    }

    /// A symbolic link's target: in the inode, or in blocks.
    fn symlink(
        &mut self,
        new: &Making<'_>,
        target: &[u8],
        room: usize,
    ) -> Result<ForkData, MkfsError> {
        let g = &self.l.g;
        if target.is_empty() || target.len() >= SYMLINK_MAXLEN || target.contains(&0) {
            let why = "XFS has targets of symbolic links from 1 to 1023 bytes without NUL";
            return Err(new.unfit(why));
        }
        if target.len() <= room {
            return Ok(ForkData::local(FORMAT_LOCAL, target.to_vec()));
        }
        let payload = g.block_size as usize - RemoteHeader::SIZE;
        let runs = self.metadata(new, target.len().div_ceil(payload) as u32, 1)?;
        let mut extents = Vec::new();
        append(g, &mut extents, 0, &runs);
        // Each extent has one head.
        let mut rest = target;
        for e in &extents {
            let mut bytes = vec![0; e.blockcount as usize * g.block_size as usize];
            let n = rest.len().min(bytes.len() - RemoteHeader::SIZE);
            let daddr = daddr_of(g, &extents, e.startoff);
            let offset = target.len() - rest.len();
            let (part, next) = rest.split_at(n);
            remote_header(g, new.ino, SYMLINK_MAGIC, daddr, offset, part, &mut bytes);
            self.meta.put(daddr, &bytes, verifier::REMOTE)?;
            rest = next;
        }
        self.fork(new, room, &extents)
    }
}
