//! The tree that archives make: names and attributes in one temporary file, contents in another.

use super::table::{Scratch, Table};
use super::{Data, Meta, Root, SourceDir, SourceEntry, SourceReader, Time, as_path};
use crate::bulk::attr::NewAttr;
use crate::mkfs::MkfsError;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use uvfs_sys::lock;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A directory's number: the keys of its entries begin with it.
pub type Dir = u32;

/// The root directory.
pub const ROOT: Dir = 0;
/// As many symbolic links the kernel follows on the way to a file.
const MOST_LINKS: usize = 40;
/// Bytes of contents that are written to the temporary file at a time.
const WRITE: usize = 1 << 20;

/// Where the contents of a file are: offset, length, offset in the temporary file.
pub type Parts = Vec<(u64, u64, u64)>;

/// What only some types of inodes have.
#[derive(Debug)]
pub enum Body {
    /// A directory.
    Directory,
    /// A regular file: its contents, and whether the rest is holes.
    File(Parts, bool),
    /// A regular file with the contents of one of the host's.
    Host(PathBuf),
    /// A symbolic link's target.
    Symlink(Box<[u8]>),
    /// A device or FIFO.
    Special,
}

/// An inode.
#[derive(Debug)]
pub struct Inode {
    pub meta: Meta,
    pub attrs: Vec<NewAttr>,
    pub body: Body,
}

/// Why a tree can't take a member.
#[derive(Debug)]
pub enum Refused {
    /// It has no place there.
    Unfit(&'static str),
    /// The new file system has no room for it: its size.
    Full(u64),
    /// The temporary file failed.
    Failed(MkfsError),
}

impl Refused {
    /// The same about a member.
    pub fn of(self, path: PathBuf) -> MkfsError {
        match self {
            Refused::Unfit(why) => MkfsError::unfit(path, why),
            Refused::Full(size) => MkfsError::NoSpace { path, size },
            Refused::Failed(error) => error,
        }
    }
}

impl From<MkfsError> for Refused {
    fn from(error: MkfsError) -> Refused {
        Refused::Failed(error)
    }
}

impl From<&'static str> for Refused {
    fn from(why: &'static str) -> Refused {
        Refused::Unfit(why)
    }
}

/// What the table has of a name, before attributes and the body ([`Inode::tail`]).
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    /// The same for all names of an inode.
    inode: u64,
    size: u64,
    /// Seconds and nanoseconds of the four times.
    secs: [i64; 4],
    nsecs: [u32; 4],
    /// Bytes of the tail, if it is in the file of contents. Then what follows here says where.
    outside: u64,
    rdev: [u32; 2],
    uid: u32,
    gid: u32,
    /// The last layer that has the name, or one below it.
    layer: u32,
    /// The number of a directory.
    dir: Dir,
    attrs: u32,
    mode: u16,
    flags: u16,
    kind: u8,
    /// The inode has several names, or had.
    several: u8,
    unused: [u8; 6],
}

const DIRECTORY: u8 = 0;
const DENSE: u8 = 1;
const SPARSE: u8 = 2;
const HOST: u8 = 3;
const SYMLINK: u8 = 4;
const SPECIAL: u8 = 5;

impl Head {
    fn of(value: &[u8]) -> Option<(Head, &[u8])> {
        Head::read_from_prefix(value).ok()
    }
}

impl Inode {
    /// A directory that no member is about.
    fn directory() -> Inode {
        Inode {
            meta: Meta::directory(Time::default()),
            attrs: Vec::new(),
            body: Body::Directory,
        }
    }

    fn kind(&self) -> u8 {
        match &self.body {
            Body::Directory => DIRECTORY,
            Body::File(_, false) => DENSE,
            Body::File(_, true) => SPARSE,
            Body::Host(_) => HOST,
            Body::Symlink(_) => SYMLINK,
            Body::Special => SPECIAL,
        }
    }

    fn head(&self, inode: u64, dir: Dir, layer: u32) -> Head {
        let m = &self.meta;
        let times = [m.atime, m.mtime, m.ctime, m.crtime];
        Head {
            inode,
            size: m.size,
            secs: times.map(|t| t.sec),
            nsecs: times.map(|t| t.nsec),
            outside: 0,
            rdev: m.rdev.into(),
            uid: m.uid,
            gid: m.gid,
            layer,
            dir,
            attrs: self.attrs.len() as u32,
            mode: m.mode,
            flags: m.flags,
            kind: self.kind(),
            several: 0,
            unused: [0; 6],
        }
    }

    /// Attributes and the body.
    fn tail(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for a in &self.attrs {
            let lens = [a.name.len() as u32, a.value.len() as u32];
            out.push(a.flags);
            out.extend(lens.as_bytes());
            out.extend(&a.name);
            out.extend(&a.value);
        }
        match &self.body {
            Body::Directory | Body::Special => {}
            Body::File(parts, _) => {
                let words = parts.iter().map(|(at, len, from)| [*at, *len, *from]);
                words.for_each(|w| out.extend(w.as_bytes()));
            }
            Body::Host(path) => out.extend(path.as_os_str().as_bytes()),
            Body::Symlink(target) => out.extend(target),
        }
        out
    }

    /// The inode that has this head and this tail.
    fn new(head: &Head, mut tail: &[u8]) -> Option<Inode> {
        let time = |i: usize| Time {
            sec: head.secs[i],
            nsec: head.nsecs[i],
        };
        let meta = Meta {
            mode: head.mode,
            uid: head.uid,
            gid: head.gid,
            size: head.size,
            rdev: head.rdev.into(),
            atime: time(0),
            mtime: time(1),
            ctime: time(2),
            crtime: time(3),
            flags: head.flags,
        };
        let mut take = |n: usize| {
            let (taken, rest) = tail.split_at_checked(n)?;
            tail = rest;
            Some(taken)
        };
        let mut attrs = Vec::new();
        for _ in 0..head.attrs {
            let flags = *take(1)?.first()?;
            let [name, value] = <[u32; 2]>::read_from_bytes(take(8)?).ok()?;
            attrs.push(NewAttr {
                flags,
                name: take(name as usize)?.into(),
                value: take(value as usize)?.into(),
            });
        }
        let parts = || {
            let words = tail.chunks_exact(24);
            let words = words.filter_map(|w| <[u64; 3]>::read_from_bytes(w).ok());
            words.map(|[at, len, from]| (at, len, from)).collect()
        };
        let body = match head.kind {
            DIRECTORY => Body::Directory,
            DENSE => Body::File(parts(), false),
            SPARSE => Body::File(parts(), true),
            HOST => Body::Host(OsStr::from_bytes(tail).into()),
            SYMLINK => Body::Symlink(tail.into()),
            _ => Body::Special,
        };
        Some(Inode { meta, attrs, body })
    }
}

/// The key of a name.
type Key = SmallVec<[u8; 64]>;

fn key(dir: Dir, name: &[u8]) -> Key {
    let mut key = Key::from_slice(&dir.to_be_bytes());
    key.extend_from_slice(name);
    key
}

/// The temporary file of contents, to which they go in large writes.
#[derive(Debug)]
struct Contents {
    scratch: Scratch,
    /// What is to be written next, and how much of it there is.
    buffer: Box<[u8]>,
    filled: usize,
    /// Bytes in the file, and in the buffer behind them.
    end: u64,
}

impl Contents {
    fn new(directory: &Path) -> Result<Contents, MkfsError> {
        Ok(Contents {
            scratch: Scratch::new(directory)?,
            buffer: Box::default(),
            filled: 0,
            end: 0,
        })
    }

    /// Takes what comes next from a reader, up to `most` bytes.
    fn take(&mut self, from: &mut impl Read, most: u64) -> io::Result<u64> {
        if self.buffer.is_empty() {
            self.buffer = vec![0; WRITE].into();
        }
        let room = &mut self.buffer[self.filled..];
        let n = most.min(room.len() as u64) as usize;
        from.read_exact(&mut room[..n])?;
        self.filled += n;
        self.end += n as u64;
        Ok(n as u64)
    }

    /// Writes what there is, if that is as much as one write has, or `all` is set.
    fn flush(&mut self, all: bool) -> Result<(), MkfsError> {
        if self.filled < self.buffer.len() && !all {
            return Ok(());
        }
        let full = &self.buffer[..self.filled];
        let written = self.scratch.write(full, self.end - full.len() as u64);
        self.filled = 0;
        if all {
            self.buffer = Box::default();
        }
        written
    }

    /// Adds bytes; gives where they are.
    fn put(&mut self, bytes: &[u8]) -> Result<u64, MkfsError> {
        let (at, mut left) = (self.end, bytes);
        while !left.is_empty() {
            let n = left.len() as u64;
            let taken = self.take(&mut left, n);
            taken.map_err(self.scratch.failed())?;
            self.flush(false)?;
        }
        Ok(at)
    }

    /// The inode that the table has as this.
    fn inode(&mut self, value: &[u8]) -> Result<Inode, MkfsError> {
        let inode = Head::of(value).and_then(|(head, tail)| match head.outside {
            0 => Some(Ok(Inode::new(&head, tail)?)),
            _ => Some(self.outside(&head, u64::read_from_bytes(tail).ok()?)),
        });
        let damaged = || self.scratch.failed()(io::ErrorKind::InvalidData.into());
        inode.unwrap_or_else(|| Err(damaged()))
    }

    /// The inode whose attributes and body are here.
    fn outside(&mut self, head: &Head, at: u64) -> Result<Inode, MkfsError> {
        self.flush(true)?;
        let tail = self.scratch.read(at, head.outside as usize)?;
        let damaged = || self.scratch.failed()(io::ErrorKind::InvalidData.into());
        Inode::new(head, &tail).ok_or_else(damaged)
    }
}

/// The tree. Members of later layers replace whatever has their names.
#[derive(Debug)]
pub struct Tree {
    root: Inode,
    /// All names, each behind the number of its directory.
    names: Table,
    contents: Contents,
    /// Inodes that were made, and directories of them.
    inodes: u64,
    dirs: Dir,
    /// Bytes of contents, names and attributes of the layer.
    taken: u64,
    /// The most that there may be of them.
    most: u64,
    /// Several layers lie on each other. Otherwise members are as one program extracts them.
    layered: bool,
    layer: u32,
}

impl Tree {
    /// A root directory with nothing in it. The temporary files are in the directory `beside`. `size` is that of the new
    /// file system if it is known.
    pub fn new(beside: &Path, layered: bool, size: Option<u64>) -> Result<Tree, MkfsError> {
        Ok(Tree {
            root: Inode::directory(),
            names: Table::new(Scratch::new(beside)?),
            contents: Contents::new(beside)?,
            inodes: 0,
            dirs: ROOT,
            taken: 0,
            most: size.unwrap_or(u64::MAX),
            layered,
            layer: 0,
        })
    }

    /// Begins a layer.
    pub fn next_layer(&mut self) {
        self.layer += 1;
        self.taken = 0;
    }

    /// Whether members called `.wh.` and more stand for what a layer removes.
    pub fn has_whiteouts(&self) -> bool {
        self.layered
    }

    fn head(&mut self, dir: Dir, name: &[u8]) -> Result<Option<Head>, MkfsError> {
        let value = self.names.get(&key(dir, name))?;
        Ok(value.and_then(Head::of).map(|(head, _)| head))
    }

    /// The inode of a name.
    fn inode(&mut self, dir: Dir, name: &[u8]) -> Result<Option<Inode>, MkfsError> {
        let value = self.names.get(&key(dir, name))?;
        value.map(|value| self.contents.inode(value)).transpose()
    }

    /// Changes what the table has of a name.
    fn change(&mut self, key: &[u8], change: impl FnOnce(&mut Head)) -> Result<(), MkfsError> {
        let value = self.names.get(key)?.and_then(Head::of);
        let Some((mut head, tail)) = value else {
            return Ok(());
        };
        change(&mut head);
        let value = [head.as_bytes(), tail].concat();
        self.names.insert(key, &value)
    }

    /// Whether the directory has this name.
    pub fn has(&mut self, dir: Dir, name: &[u8]) -> Result<bool, MkfsError> {
        Ok(self.head(dir, name)?.is_some())
    }

    fn is_empty(&mut self, dir: Dir) -> Result<bool, MkfsError> {
        let mut empty = true;
        self.names.scan(&key(dir, b""), |_, _| {
            empty = false;
            Ok(false)
        })?;
        Ok(empty)
    }

    /// Refuses more than the new file system may have room for.
    fn charge(&mut self, bytes: u64) -> Result<(), Refused> {
        self.taken = self.taken.saturating_add(bytes);
        match self.taken <= self.most {
            true => Ok(()),
            false => Err(Refused::Full(self.most)),
        }
    }

    /// Gives a name to an inode.
    fn set(&mut self, key: &[u8], mut head: Head, inode: &Inode) -> Result<(), Refused> {
        let attrs = inode.attrs.iter().map(|a| a.name.len() + a.value.len());
        self.charge(key.len() as u64 + attrs.sum::<usize>() as u64)?;
        let mut tail = inode.tail();
        if !Table::fits(key.len() + size_of::<Head>() + tail.len()) {
            head.outside = tail.len() as u64;
            tail = self.contents.put(&tail)?.to_ne_bytes().to_vec();
        }
        let value = [head.as_bytes(), &tail].concat();
        Ok(self.names.insert(key, &value)?)
    }

    /// Refuses to give a name to something else where a program would not.
    fn may_replace(&mut self, dir: Dir, name: &[u8]) -> Result<(), Refused> {
        if !self.layered
            && let Some(old) = self.head(dir, name)?
            && old.kind == DIRECTORY
            && !self.is_empty(old.dir)?
        {
            return Err("a directory has this name already, and is not empty".into());
        }
        Ok(())
    }

    /// Gives a name to a new inode. What had it before loses it. Gives the number of a directory.
    pub fn put(&mut self, dir: Dir, name: &[u8], inode: &Inode) -> Result<Dir, Refused> {
        self.may_replace(dir, name)?;
        let number = match inode.body {
            Body::Directory => {
                let many = "it is one of too many directories";
                self.dirs = self.dirs.checked_add(1).ok_or(many)?;
                self.dirs
            }
            _ => ROOT,
        };
        self.inodes += 1;
        let head = inode.head(self.inodes, number, self.layer);
        self.set(&key(dir, name), head, inode)?;
        Ok(number)
    }

    /// Gives a further name to what has this one. What had it before loses it.
    pub fn link(&mut self, dir: Dir, name: &[u8], to: &Key) -> Result<(), Refused> {
        self.may_replace(dir, name)?;
        self.change(to, |head| head.several = 1)?;
        let Some(value) = self.names.get(to)?.map(<[u8]>::to_vec) else {
            return Ok(());
        };
        let key = key(dir, name);
        self.charge(key.len() as u64)?;
        self.names.insert(&key, &value)?;
        let layer = self.layer;
        Ok(self.change(&key, |head| head.layer = layer)?)
    }

    /// Makes a directory, or gives this inode to the one that there is.
    pub fn put_directory(&mut self, dir: Dir, name: &[u8], inode: &Inode) -> Result<(), Refused> {
        let old = self.head(dir, name)?;
        match old.filter(|old| old.kind == DIRECTORY) {
            Some(old) => {
                let head = inode.head(old.inode, old.dir, self.layer);
                self.set(&key(dir, name), head, inode)
            }
            None => self.put(dir, name, inode).map(|_| ()),
        }
    }

    /// Gives the root directory this inode.
    pub fn describe(&mut self, root: Inode) {
        self.root = root;
    }

    /// The directory that these names lead to, through symbolic links; nothing leads out of the tree. Directories that
    /// are missing are made if `make` is set.
    pub fn directory(&mut self, names: &[&[u8]], make: bool) -> Result<Option<Dir>, Refused> {
        // The directories on the way, without the root.
        let mut way = Vec::new();
        // What is left of targets of links, and then of `names`.
        let mut inner: VecDeque<Box<[u8]>> = VecDeque::new();
        let mut outer = names.iter();
        let mut links = 0;
        loop {
            let at = way.last().copied().unwrap_or(ROOT);
            let from_link = inner.pop_front();
            let name = match (&from_link, outer.len()) {
                (Some(name), _) => &name[..],
                (None, 0) => return Ok(Some(at)),
                (None, _) => outer.next().copied().unwrap_or_default(),
            };
            if matches!(name, b"" | b".") {
                continue;
            }
            if name == b".." {
                way.pop();
                continue;
            }
            let found = self.head(at, name)?;
            match found.map(|head| (head.kind, head)) {
                Some((DIRECTORY, head)) => {
                    if make && head.layer < self.layer {
                        let layer = self.layer;
                        self.change(&key(at, name), |head| head.layer = layer)?;
                    }
                    way.push(head.dir);
                }
                Some((SYMLINK, _)) => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err("it lies below too many symbolic links".into());
                    }
                    let Some(Body::Symlink(target)) = self.inode(at, name)?.map(|it| it.body)
                    else {
                        continue;
                    };
                    for part in target.split(|b| *b == b'/').rev() {
                        inner.push_front(part.into());
                    }
                    if target.starts_with(b"/") {
                        way.clear();
                    }
                }
                _ if !make => return Ok(None),
                Some(_) if !self.layered => {
                    return Err("it lies below something that is no directory".into());
                }
                None if from_link.is_some() && !self.layered => {
                    return Err("it lies below a symbolic link to nothing that came before".into());
                }
                _ => way.push(self.put(at, name, &Inode::directory())?),
            }
        }
    }

    /// What is no directory and has these names; the last is not followed.
    pub fn file(&mut self, names: &[&[u8]]) -> Result<Option<Key>, Refused> {
        let Some((name, above)) = names.split_last() else {
            return Ok(None);
        };
        let Some(above) = self.directory(above, false)? else {
            return Ok(None);
        };
        let head = self.head(above, name)?;
        let head = head.filter(|head| head.kind != DIRECTORY);
        Ok(head.map(|_| key(above, name)))
    }

    /// Removes what layers below this one have under a name.
    pub fn whiteout(&mut self, dir: Dir, name: &[u8]) -> Result<(), MkfsError> {
        match self.head(dir, name)? {
            Some(head) if head.layer < self.layer => self.names.remove(&key(dir, name)),
            Some(head) if head.kind == DIRECTORY => self.opaque(head.dir),
            _ => Ok(()),
        }
    }

    /// Removes what layers below this one have in a directory.
    pub fn opaque(&mut self, dir: Dir) -> Result<(), MkfsError> {
        let mut todo = vec![dir];
        while let Some(dir) = todo.pop() {
            let mut older = Vec::new();
            self.names.scan(&key(dir, b""), |name, value| {
                match Head::of(value) {
                    Some((head, _)) if head.layer < self.layer => older.push(key(dir, name)),
                    Some((head, _)) if head.kind == DIRECTORY => todo.push(head.dir),
                    _ => {}
                }
                Ok(true)
            })?;
            for key in older {
                self.names.remove(&key)?;
            }
        }
        Ok(())
    }

    /// Copies the parts of a file that are there to the temporary file.
    pub fn store(
        &mut self,
        from: &mut impl Read,
        map: &[(u64, u64)],
        path: impl Fn() -> PathBuf,
    ) -> Result<Parts, MkfsError> {
        let failed = |error| MkfsError::source(path(), "reading its contents", error);
        let mut parts = Vec::with_capacity(map.len());
        for (at, len) in map.iter().filter(|(_, len)| *len > 0) {
            parts.push((*at, *len, self.contents.end));
            self.charge(*len).map_err(|e| e.of(path()))?;
            let mut left = *len;
            while left > 0 {
                left -= self.contents.take(from, left).map_err(failed)?;
                self.contents.flush(false)?;
            }
        }
        Ok(parts)
    }

    /// Whether the root has a file that an image of layers has.
    pub fn may_be_image(&mut self) -> Result<bool, MkfsError> {
        Ok(self.has(ROOT, b"oci-layout")? || self.has(ROOT, b"manifest.json")?)
    }

    /// The tree, which is not changed any more.
    pub fn finish(mut self) -> Result<Finished, MkfsError> {
        self.contents.flush(true)?;
        Ok(Finished(Arc::new(Mutex::new(self))))
    }
}

/// A tree that is not changed any more.
#[derive(Debug)]
pub struct Finished(Arc<Mutex<Tree>>);

impl Finished {
    /// The tree as a source.
    pub fn root(&self) -> Root {
        let tree = lock(&self.0);
        Root {
            meta: tree.root.meta.clone(),
            attrs: tree.root.attrs.clone(),
            dir: Arc::new(TreeDir {
                tree: self.0.clone(),
                dir: ROOT,
                parent: None,
                name: Box::default(),
            }),
        }
    }

    /// The tree, to be changed again.
    pub fn into_tree(self) -> Option<Tree> {
        Arc::into_inner(self.0)?.into_inner().ok()
    }
}

#[derive(Debug)]
struct TreeDir {
    tree: Arc<Mutex<Tree>>,
    dir: Dir,
    parent: Option<Arc<TreeDir>>,
    name: Box<[u8]>,
}

impl TreeDir {
    fn missing(&self, name: &[u8]) -> MkfsError {
        let error = io::ErrorKind::NotFound.into();
        MkfsError::source(self.path(name), "opening it", error)
    }
}

impl SourceDir for TreeDir {
    fn list_wanted(&self, wanted: &dyn Fn(&[u8]) -> bool) -> Result<Vec<SourceEntry>, MkfsError> {
        let Tree {
            names, contents, ..
        } = &mut *lock(&self.tree);
        // A list that grows leaves holes in the memory of the threads.
        let mut count = 0;
        names.scan(&key(self.dir, b""), |_, _| {
            count += 1;
            Ok(true)
        })?;
        let mut entries = Vec::with_capacity(count);
        names.scan(&key(self.dir, b""), |name, value| {
            if wanted(name) {
                let several = Head::of(value).filter(|(head, _)| head.several > 0);
                let inode = contents.inode(value)?;
                let mut entry = SourceEntry {
                    name: name.into(),
                    meta: inode.meta,
                    links: several.map(|(head, _)| (0, head.inode)),
                    attrs: inode.attrs,
                    target: Box::default(),
                    data: Data::Dense,
                };
                match inode.body {
                    Body::Symlink(target) => entry.target = target,
                    Body::File(parts, true) => {
                        entry.data = Data::Runs(parts.iter().map(|p| (p.0, p.1)).collect());
                    }
                    _ => {}
                }
                entries.push(entry);
            }
            Ok(true)
        })?;
        Ok(entries)
    }

    fn enter(self: Arc<Self>, name: &[u8]) -> Result<Option<Arc<dyn SourceDir>>, MkfsError> {
        let head = lock(&self.tree).head(self.dir, name)?;
        Ok(Some(Arc::new(TreeDir {
            tree: self.tree.clone(),
            dir: head.ok_or_else(|| self.missing(name))?.dir,
            name: name.into(),
            parent: Some(self),
        })))
    }

    fn open(&self, name: &[u8]) -> Result<Option<SourceReader>, MkfsError> {
        let mut tree = lock(&self.tree);
        let inode = tree.inode(self.dir, name)?;
        match inode.ok_or_else(|| self.missing(name))?.body {
            Body::File(parts, _) => Ok(Some(SourceReader::Parts {
                file: tree.contents.scratch.file.clone(),
                parts: parts.into(),
            })),
            Body::Host(path) => {
                let failed = |e| MkfsError::source(path.clone(), "opening it", e);
                let file = File::open(&path).map_err(failed)?;
                let size = file.metadata().map_err(failed)?.len();
                Ok(Some(SourceReader::Host(file.into(), size)))
            }
            _ => Ok(None),
        }
    }

    fn path(&self, name: &[u8]) -> PathBuf {
        let mut names = vec![name];
        let mut dir = self;
        while let Some(parent) = &dir.parent {
            names.push(&dir.name);
            dir = parent;
        }
        let names = names.iter().rev().filter(|n| !n.is_empty());
        names.map(|n| as_path(n)).collect()
    }
}
