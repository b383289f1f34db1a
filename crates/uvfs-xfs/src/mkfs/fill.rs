//! Fills a new file system from a source: one walk that allocates everything and writes the metadata,
//! while the threads of the pool list directories ahead and copy contents.

use super::inode::{ForkData, NewInode, device, put};
use super::layout::Plan;
use super::meta::Metadata;
use super::pool::{Below, FileRef, Job, Piece, Pool, Walk};
use super::source::{Data, Dir, Entry, Meta, Root, Time};
use super::space::{Full, REGION_BYTES, Run, Space};
use super::{MkfsError, Progress};
use crate::bulk::attr::{self, NewAttr, remote_header};
use crate::bulk::btree::{Shape, build_fork, fork_root_room};
use crate::bulk::dir::{self, DirLayout, NewEntry, Owner};
use crate::format::*;
use crate::geometry::Geometry;
use crate::verifier;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The least room for an attribute fork: a B-tree root with two pointers, rounded up.
const MIN_ATTR_ROOM: usize = 40;
/// The least room for a data fork: a B-tree root with three pointers, rounded up.
const MIN_DATA_ROOM: usize = 56;

/// Which times the new inodes get.
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
    Blocks(attr::Plan),
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
        None => (AttrForm::Blocks(attr::Plan::new(g, attrs)), data),
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

/// A region that small files' data is put into.
struct Batch {
    run: Run,
    used: u32,
    pieces: Vec<Piece>,
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
    pub l: &'a Plan,
    pub space: &'p mut Space,
    pub meta: &'p mut Metadata<'a>,
    pub pool: &'p Pool<'a>,
    pub progress: &'a Progress,
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
        l: &'a Plan,
        space: &'p mut Space,
        meta: &'p mut Metadata<'a>,
        pool: &'p Pool<'a>,
        progress: &'a Progress,
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
        let mut walk = Walk::new(self.pool, dir, pending);
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

    /// A new inode in `near` or wherever there is room.
    fn allocate(&mut self, near: u32, path: &dyn Fn() -> PathBuf) -> Result<u64, MkfsError> {
        let g = &self.l.g;
        let (agno, agino, new) = self.space.inode(near).map_err(|Full| self.full(path()))?;
        let ino = g.ino(agno, agino);
        if new {
            self.meta.new_unit(ino, |i| generation(g, i))?;
        }
        Ok(ino)
    }

    /// Makes all inodes in a directory that are no directories, and the directory itself; gives its
    /// subdirectories.
    fn directory(
        &mut self,
        dir: &Arc<dyn Dir>,
        entries: Vec<Entry>,
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
            let ino = self.allocate(agno, &|| dir.path(&e.name))?;
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
        dir: &Arc<dyn Dir>,
        p: &Pending,
        entries: &[NewEntry<'_>],
        agno: u32,
    ) -> Result<(), MkfsError> {
        let l = self.l;
        let g = &l.g;
        let path = || dir.path(b"");
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
                    let blocks = n as u32 * granule;
                    let runs = self.space.metadata(agno, blocks, granule);
                    let runs = runs.map_err(|Full| self.full(path()))?;
                    append(g, &mut extents, start, &runs);
                }
                let owner = Owner {
                    ino: p.ino,
                    parent: p.parent,
                };
                let daddr = |block| daddr_of(g, &extents, block);
                let meta = &mut self.meta;
                dir::fill(g, owner, entries, &plan, &daddr, &mut |block, bytes| {
                    let index = block >= DIR2_LEAF_OFFSET >> g.blocklog
                        && block < DIR2_FREE_OFFSET >> g.blocklog;
                    let kind = if index {
                        verifier::DA
                    } else {
                        verifier::DIR_DATA
                    };
                    meta.put(daddr(block), bytes, kind)
                })?;
                let size = plan.size(g);
                (self.fork(p.ino, room, &extents, agno, &path)?, size)
            }
        };
        let below = entries
            .iter()
            .filter(|e| e.file_type == FileType::Directory);
        let nlink = 2 + below.count() as u32;
        self.write_inode(
            &p.meta, &p.attrs, form, room, p.ino, nlink, size, data, agno, &path,
        )
    }

    /// Writes a file that is no directory, and has its contents copied.
    fn file(
        &mut self,
        dir: &Arc<dyn Dir>,
        e: Entry,
        ino: u64,
        agno: u32,
        nlink: u32,
    ) -> Result<(), MkfsError> {
        let l = self.l;
        let g = &l.g;
        let kind = FileType::from_mode(e.meta.mode);
        let named = e.name.clone();
        let path = || dir.path(&named);
        let special = !matches!(kind, FileType::Regular | FileType::Symlink);
        let (form, room) = divide(g, &e.attrs, special);
        let mut size = 0;
        let data = match kind {
            FileType::Regular => {
                size = e.meta.size;
                if size > i64::MAX as u64 {
                    return Err(MkfsError::unfit(path(), "it is too large"));
                }
                let extents = self.contents(dir, &e, agno, &path)?;
                self.fork(ino, room, &extents, agno, &path)?
            }
            FileType::Symlink => {
                size = e.target.len() as u64;
                self.symlink(ino, &e.target, room, agno, &path)?
            }
            FileType::CharDevice | FileType::BlockDevice => {
                ForkData::local(FORMAT_DEV, device(e.meta.rdev.0, e.meta.rdev.1))
            }
            FileType::Fifo | FileType::Socket => ForkData::local(FORMAT_DEV, device(0, 0)),
            _ => return Err(MkfsError::unfit(path(), "its type is not known")),
        };
        self.write_inode(
            &e.meta, &e.attrs, form, room, ino, nlink, size, data, agno, &path,
        )
    }

    /// A symbolic link's target: in the inode, or in blocks.
    fn symlink(
        &mut self,
        ino: u64,
        target: &[u8],
        room: usize,
        agno: u32,
        path: &dyn Fn() -> PathBuf,
    ) -> Result<ForkData, MkfsError> {
        let l = self.l;
        let g = &l.g;
        if target.is_empty() || target.len() >= SYMLINK_MAXLEN {
            let why = "XFS has targets of symbolic links from 1 to 1023 bytes";
            return Err(MkfsError::unfit(path(), why));
        }
        if target.len() <= room {
            return Ok(ForkData::local(FORMAT_LOCAL, target.to_vec()));
        }
        let payload = g.block_size as usize - RemoteHeader::SIZE;
        let blocks = target.len().div_ceil(payload) as u32;
        let runs = self.space.metadata(agno, blocks, 1);
        let runs = runs.map_err(|Full| self.full(path()))?;
        let mut extents = Vec::new();
        append(g, &mut extents, 0, &runs);
        // Each extent has one head.
        let mut rest = target;
        for e in &extents {
            let mut bytes = vec![0; e.blockcount as usize * g.block_size as usize];
            let n = rest.len().min(bytes.len() - RemoteHeader::SIZE);
            let daddr = daddr_of(g, &extents, e.startoff);
            let offset = target.len() - rest.len();
            remote_header(g, ino, SYMLINK_MAGIC, daddr, offset, &rest[..n], &mut bytes);
            self.meta.put(daddr, &bytes, verifier::REMOTE)?;
            rest = &rest[n..];
        }
        self.fork(ino, room, &extents, agno, path)
    }

    /// Allocates a file's blocks and has them filled.
    fn contents(
        &mut self,
        dir: &Arc<dyn Dir>,
        e: &Entry,
        agno: u32,
        path: &dyn Fn() -> PathBuf,
    ) -> Result<Vec<Extent>, MkfsError> {
        let l = self.l;
        let g = &l.g;
        let mut extents = Vec::new();
        let runs = block_runs(g, e.meta.size, &e.data);
        let region = REGION_BYTES >> g.blocklog;
        let small = u64::from(region / 2).max(1);
        let total: u64 = runs.iter().map(|(_, n)| n).sum();
        if total > self.space.free_blocks() + u64::from(region) * self.batches.len() as u64 {
            return Err(self.full(path()));
        }
        let file = match runs.len() == 1 && total <= small {
            true => FileRef::Once(dir.clone(), e.name.clone()),
            false => FileRef::shared(dir.clone(), e.name.clone()),
        };
        for (first, n) in runs {
            let start = first << g.blocklog;
            let bytes = (n << g.blocklog).min(e.meta.size - start);
            if n <= small {
                self.small(&file, first, n as u32, bytes, agno, &mut extents, path)?;
                continue;
            }
            let runs = self.space.runs(agno, n, 1);
            let runs = runs.map_err(|Full| self.full(path()))?;
            append(g, &mut extents, first, &runs);
            let (mut at, end) = (start, start + bytes);
            for r in runs {
                let mut done = 0;
                while done < r.len {
                    let n = (r.len - done).min(region.max(1));
                    let len = (n as usize) << g.blocklog;
                    let part = (end - at).min(len as u64) as usize;
                    let run = Run {
                        agbno: r.agbno + done,
                        ..r
                    };
                    let pieces = vec![Piece {
                        file: file.clone(),
                        offset: at,
                        at: 0,
                        len: part,
                    }];
                    self.job(run, len, pieces)?;
                    at += part as u64;
                    done += n;
                }
            }
        }
        Ok(extents)
    }

    fn job(&self, run: Run, len: usize, pieces: Vec<Piece>) -> Result<(), MkfsError> {
        let offset = self.l.g.daddr(run.start()) << 9;
        self.pool.push(Job {
            offset,
            len,
            pieces,
        })
    }

    /// Puts a short run of a file's blocks into the current region, and the next one if need be.
    #[expect(clippy::too_many_arguments, reason = "one call")]
    fn small(
        &mut self,
        file: &FileRef,
        first: u64,
        blocks: u32,
        bytes: u64,
        agno: u32,
        extents: &mut Vec<Extent>,
        path: &dyn Fn() -> PathBuf,
    ) -> Result<(), MkfsError> {
        let g = &self.l.g;
        let (mut at, mut left) = (first, blocks);
        let end = (first << g.blocklog) + bytes;
        while left > 0 {
            if !self.batches.contains_key(&agno) {
                let run = self.space.data_region(agno);
                let run = run.map_err(|Full| self.full(path()))?;
                let batch = Batch {
                    run,
                    used: 0,
                    pieces: Vec::new(),
                };
                self.batches.insert(agno, batch);
            }
            let Some(b) = self.batches.get_mut(&agno) else {
                continue;
            };
            let n = left.min(b.run.len - b.used);
            let offset = at << g.blocklog;
            b.pieces.push(Piece {
                file: file.clone(),
                offset,
                at: (b.used as usize) << g.blocklog,
                len: (end - offset).min(u64::from(n) << g.blocklog) as usize,
            });
            let run = Run {
                agno: b.run.agno,
                agbno: b.run.agbno + b.used,
                len: n,
            };
            append(g, extents, at, &[run]);
            b.used += n;
            at += u64::from(n);
            left -= n;
            if b.used == b.run.len
                && let Some(full) = self.batches.remove(&agno)
            {
                self.flush(full)?;
            }
        }
        Ok(())
    }

    /// Has a region filled, and gives back what is left of it.
    fn flush(&mut self, b: Batch) -> Result<(), MkfsError> {
        self.space.give(Run {
            agbno: b.run.agbno + b.used,
            len: b.run.len - b.used,
            ..b.run
        });
        if b.used == 0 {
            return Ok(());
        }
        self.job(b.run, (b.used as usize) << self.l.g.blocklog, b.pieces)
    }

    /// A fork of `room` bytes with these extents: in the inode, or in a B-tree.
    fn fork(
        &mut self,
        ino: u64,
        room: usize,
        extents: &[Extent],
        agno: u32,
        path: &dyn Fn() -> PathBuf,
    ) -> Result<ForkData, MkfsError> {
        let l = self.l;
        let g = &l.g;
        let mut fork = ForkData::empty();
        fork.extents = extents.len() as u64;
        fork.blocks = extents.iter().map(|e| u64::from(e.blockcount)).sum();
        if extents.len() * ExtentRecord::SIZE <= room {
            fork.bytes = vec![0; extents.len() * ExtentRecord::SIZE];
            for (i, e) in extents.iter().enumerate() {
                ExtentRecord::pack(e).put(&mut fork.bytes, i * ExtentRecord::SIZE);
            }
            return Ok(fork);
        }
        if extents.len() > i32::MAX as usize {
            return Err(MkfsError::unfit(path(), "it has too many extents"));
        }
        let shape = Shape::of_fork(g.block_size as usize, extents.len(), fork_root_room(room));
        let runs = self.space.metadata(agno, shape.blocks() as u32, 1);
        let runs = runs.map_err(|Full| self.full(path()))?;
        let at: Vec<u64> = runs
            .iter()
            .flat_map(|r| (0..r.len).map(|i| g.fsbno(r.start()) + u64::from(i)))
            .collect();
        let tree = build_fork(g, ino, room, extents, &at);
        for b in tree.blocks {
            let daddr = g.fsb(b.at).map_or(0, |a| g.daddr(a));
            self.meta.put(daddr, &b.bytes, verifier::BTREE_LONG)?;
        }
        fork.format = FORMAT_BTREE;
        fork.blocks += at.len() as u64;
        fork.bytes = tree.root;
        Ok(fork)
    }

    /// Writes the attributes' blocks and the inode.
    #[expect(clippy::too_many_arguments, reason = "all of an inode")]
    fn write_inode(
        &mut self,
        meta: &Meta,
        attrs: &[NewAttr],
        form: AttrForm,
        room: usize,
        ino: u64,
        nlink: u32,
        size: u64,
        data: ForkData,
        agno: u32,
        path: &dyn Fn() -> PathBuf,
    ) -> Result<(), MkfsError> {
        let l = self.l;
        let g = &l.g;
        let attr_room = g.inode_size as usize - DINODE_V3_SIZE - room;
        let attr = match form {
            AttrForm::None => ForkData::empty(),
            AttrForm::Short(bytes) => ForkData::local(FORMAT_LOCAL, bytes),
            AttrForm::Blocks(plan) => {
                let blocks = plan.blocks() as u32;
                let runs = self.space.metadata(agno, blocks, 1);
                let runs = runs.map_err(|Full| self.full(path()))?;
                let mut extents = Vec::new();
                append(g, &mut extents, 0, &runs);
                if extents.len() > i16::MAX as usize {
                    return Err(self.full(path()));
                }
                let daddr = |block| daddr_of(g, &extents, block);
                let to = &mut self.meta;
                plan.fill(g, ino, attrs, &daddr, &mut |block, bytes| {
                    let value = Be32::at(bytes, 0).is_ok_and(|m| m.get() == ATTR3_RMT_MAGIC);
                    let kind = if value {
                        verifier::REMOTE
                    } else {
                        verifier::DA
                    };
                    to.put(daddr(block), bytes, kind)
                })?;
                self.fork(ino, attr_room, &extents, agno, path)?
            }
        };
        let forkoff = if attrs.is_empty() { 0 } else { room / 8 };
        self.has_attrs |= forkoff > 0;
        let new = NewInode {
            ino,
            generation: generation(g, ino),
            meta,
            nlink,
            size,
            flags: 0,
            data,
            forkoff: forkoff as u8,
            attr,
        };
        self.meta.inode(ino, true, |b| put(g, &new, b))?;
        self.inodes += 1;
        self.progress.inodes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Where the link count is in an inode.
const NLINK_OFFSET: usize = std::mem::offset_of!(DinodeV2, nlink);

/// Adds runs of blocks to a list of extents from block `at` of the file on; those that go on where
/// the last one ends become one.
fn append(g: &Geometry, extents: &mut Vec<Extent>, mut at: u64, runs: &[Run]) {
    for r in runs {
        let startblock = g.fsbno(r.start());
        match extents.last_mut() {
            Some(e)
                if e.startoff + u64::from(e.blockcount) == at
                    && e.startblock + u64::from(e.blockcount) == startblock
                    && g.fsb(e.startblock).map(|a| a.agno) == Some(r.agno)
                    && e.blockcount + r.len <= MAX_EXTENT_BLOCKS =>
            {
                e.blockcount += r.len;
            }
            _ => extents.push(Extent {
                startoff: at,
                startblock,
                blockcount: r.len,
                unwritten: false,
            }),
        }
        at += u64::from(r.len);
    }
}

/// Where a block of a fork is on disk.
fn daddr_of(g: &Geometry, extents: &[Extent], block: u64) -> u64 {
    let i = extents.partition_point(|e| e.startoff <= block);
    let e = &extents[i.saturating_sub(1)];
    let fsbno = e.startblock + (block - e.startoff);
    g.fsb(fsbno).map_or(0, |a| g.daddr(a))
}
