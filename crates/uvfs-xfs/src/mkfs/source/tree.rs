//! The tree that archives make: names and attributes in memory, contents in a temporary file.

use super::{Data, Meta, Root, SourceDir, SourceEntry, SourceReader, Time, as_path};
use crate::bulk::attr::NewAttr;
use crate::mkfs::MkfsError;
use smallvec::SmallVec;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The root directory's node.
pub const ROOT: usize = 0;
/// As many symbolic links the kernel follows on the way to a file.
const MOST_LINKS: usize = 40;
/// Bytes of contents that are written to the temporary file at a time.
const WRITE: usize = 1 << 20;

/// Where the contents of a file are: offset, length, offset in the temporary file.
pub type Parts = Vec<(u64, u64, u64)>;

/// A name, most of which need no memory of their own.
type Name = SmallVec<[u8; 16]>;

/// What a name in a directory leads to.
#[derive(Debug, Clone, Copy)]
struct Entry {
    node: u32,
    /// The last layer that has the name, or one below it.
    layer: u32,
}

/// What only some types of inodes have.
#[derive(Debug)]
pub enum Body {
    /// A directory.
    Directory(Directory),
    /// A regular file: its contents, and whether the rest is holes.
    File(Parts, bool),
    /// A regular file with the contents of one of the host's.
    Host(PathBuf),
    /// A symbolic link's target.
    Symlink(Box<[u8]>),
    /// A device or FIFO.
    Special,
}

#[derive(Debug, Default)]
pub struct Directory {
    parent: usize,
    name: Box<[u8]>,
    below: BTreeMap<Name, Entry>,
}

/// An inode.
#[derive(Debug)]
struct Inode {
    meta: Meta,
    attrs: Vec<NewAttr>,
    body: Body,
}

/// An inode, in less memory if it is like most.
#[derive(Debug)]
enum Node {
    /// A regular file with its contents in one piece of the temporary file, and nothing special.
    Plain {
        at: u64,
        size: u64,
        atime: Time,
        mtime: Time,
        uid: u32,
        gid: u32,
        mode: u16,
    },
    Other(Box<Inode>),
}

/// Bytes that attributes take.
fn memory_of(attrs: &[NewAttr]) -> usize {
    let each = |a: &NewAttr| size_of_val(a) + a.name.len() + a.value.len();
    attrs.iter().map(each).sum()
}

impl Body {
    /// An empty directory.
    pub fn directory(parent: usize, name: &[u8]) -> Body {
        Body::Directory(Directory {
            parent,
            name: name.into(),
            below: BTreeMap::new(),
        })
    }
}

impl Inode {
    /// Where its contents are, if [`Node::Plain`] says all else about it.
    fn plain(&self) -> Option<u64> {
        let at = match &self.body {
            Body::File(parts, false) => match parts[..] {
                [] if self.meta.size == 0 => 0,
                [(0, len, at)] if len == self.meta.size => at,
                _ => return None,
            },
            _ => return None,
        };
        let m = &self.meta;
        let same = m.ctime == m.mtime && m.crtime == m.mtime && m.flags == 0 && m.rdev == (0, 0);
        (same && self.attrs.is_empty()).then_some(at)
    }
}

impl Node {
    fn new(inode: Inode) -> Node {
        let m = &inode.meta;
        match inode.plain() {
            Some(at) => Node::Plain {
                at,
                size: m.size,
                atime: m.atime,
                mtime: m.mtime,
                uid: m.uid,
                gid: m.gid,
                mode: m.mode,
            },
            None => Node::Other(Box::new(inode)),
        }
    }

    fn meta(&self) -> Meta {
        match *self {
            Node::Other(ref inode) => inode.meta.clone(),
            Node::Plain {
                size,
                atime,
                mtime,
                uid,
                gid,
                mode,
                ..
            } => Meta {
                mode,
                uid,
                gid,
                size,
                rdev: (0, 0),
                atime,
                mtime,
                ctime: mtime,
                crtime: mtime,
                flags: 0,
            },
        }
    }

    fn attrs(&self) -> Vec<NewAttr> {
        self.other().map_or(Vec::new(), |it| it.attrs.clone())
    }

    fn other(&self) -> Option<&Inode> {
        match self {
            Node::Plain { .. } => None,
            Node::Other(inode) => Some(inode),
        }
    }

    fn dir(&self) -> Option<&Directory> {
        match &self.other()?.body {
            Body::Directory(dir) => Some(dir),
            _ => None,
        }
    }

    fn dir_mut(&mut self) -> Option<&mut Directory> {
        match self {
            Node::Other(inode) => match &mut inode.body {
                Body::Directory(dir) => Some(dir),
                _ => None,
            },
            Node::Plain { .. } => None,
        }
    }
}

/// What archives may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of contents of each archive: those of the new file system, if they are known.
    pub contents: u64,
    /// Bytes of memory for names and attributes.
    pub memory: u64,
}

impl Limits {
    /// For a file system of this size. A part of the machine's memory, as compressed archives may be tiny.
    pub fn of(size: Option<u64>) -> Limits {
        let info = rustix::system::sysinfo();
        let memory = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit.max(1)));
        Limits {
            contents: size.unwrap_or(u64::MAX),
            memory: memory / 4,
        }
    }
}

/// The temporary file, to which contents go in large writes.
#[derive(Debug)]
struct Contents {
    file: Arc<File>,
    directory: PathBuf,
    /// What is to be written next, and how much of it there is.
    buffer: Box<[u8]>,
    filled: usize,
    /// Bytes in the file, and in the buffer behind them.
    end: u64,
}

impl Contents {
    fn new(directory: &Path) -> Result<Contents, MkfsError> {
        let file = tempfile::tempfile_in(directory)
            .map_err(|e| MkfsError::source(directory.into(), "making a temporary file", e))?;
        Ok(Contents {
            file: Arc::new(file),
            directory: directory.into(),
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
        let written = self.file.write_all_at(full, self.end - full.len() as u64);
        self.filled = 0;
        if all {
            self.buffer = Box::default();
        }
        written.map_err(|e| {
            MkfsError::source(self.directory.clone(), "writing a temporary file there", e)
        })
    }
}

/// The tree. Members of later layers replace whatever has their names.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Node>,
    contents: Contents,
    /// Bytes of contents when the layer began.
    begin: u64,
    /// Several layers lie on each other. Otherwise members are as one program extracts them.
    layered: bool,
    layer: u32,
    limits: Limits,
    /// Bytes of names and attributes.
    memory: u64,
}

impl Tree {
    /// A root directory with nothing in it. Contents go to a temporary file in the directory `beside`.
    pub fn new(beside: &Path, layered: bool, limits: Limits) -> Result<Tree, MkfsError> {
        Ok(Tree {
            nodes: vec![Node::new(Inode {
                meta: Meta::directory(Time::default()),
                attrs: Vec::new(),
                body: Body::Directory(Directory::default()),
            })],
            contents: Contents::new(beside)?,
            begin: 0,
            layered,
            layer: 0,
            limits,
            memory: 0,
        })
    }

    /// Begins a layer.
    pub fn next_layer(&mut self) {
        self.layer += 1;
        self.begin = self.contents.end;
    }

    /// Whether members called `.wh.` and more stand for what a layer removes.
    pub fn has_whiteouts(&self) -> bool {
        self.layered
    }

    fn below(&self, dir: usize, name: &[u8]) -> Option<usize> {
        let entry = self.nodes[dir].dir()?.below.get(name)?;
        Some(entry.node as usize)
    }

    /// Whether the directory has this name.
    pub fn has(&self, dir: usize, name: &[u8]) -> bool {
        self.below(dir, name).is_some()
    }

    /// Makes an inode.
    pub fn make(
        &mut self,
        meta: Meta,
        attrs: Vec<NewAttr>,
        body: Body,
    ) -> Result<usize, &'static str> {
        let inode = Inode { meta, attrs, body };
        let own = match (&inode.body, inode.plain()) {
            (_, Some(_)) => 0,
            // A B-tree of few entries has room for more.
            (Body::Directory(dir), _) => dir.name.len() + 400,
            (Body::File(parts, _), _) => size_of_val(&parts[..]),
            (Body::Host(path), _) => path.as_os_str().len(),
            (Body::Symlink(target), _) => target.len(),
            (Body::Special, _) => 0,
        };
        let node = Node::new(inode);
        let inode = node
            .other()
            .map_or(0, |it| size_of_val(it) + memory_of(&it.attrs));
        self.charge(size_of::<Node>() + inode + own)?;
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    fn charge(&mut self, bytes: usize) -> Result<(), &'static str> {
        self.memory += bytes as u64;
        let why = "the names and attributes up to here take more than a quarter of the memory";
        (self.memory <= self.limits.memory).then_some(()).ok_or(why)
    }

    /// Gives an inode a name. What had it before loses it.
    pub fn put(&mut self, dir: usize, name: &[u8], node: usize) -> Result<(), &'static str> {
        if !self.layered
            && let Some(old) = self.below(dir, name)
            && self.nodes[old].dir().is_some_and(|d| !d.below.is_empty())
        {
            return Err("a directory has this name already, and is not empty");
        }
        // The name, and what a B-tree needs for it.
        self.charge(name.len() + 64)?;
        let layer = self.layer;
        let node = u32::try_from(node).map_err(|_| "it is one of too many members")?;
        if let Some(dir) = self.nodes[dir].dir_mut() {
            dir.below
                .insert(Name::from_slice(name), Entry { node, layer });
        }
        Ok(())
    }

    /// Makes a directory, or gives these attributes to the one that there is.
    pub fn put_directory(
        &mut self,
        dir: usize,
        name: &[u8],
        meta: Meta,
        attrs: Vec<NewAttr>,
    ) -> Result<(), &'static str> {
        match self
            .below(dir, name)
            .filter(|n| self.nodes[*n].dir().is_some())
        {
            Some(old) => {
                self.describe(old, meta, attrs)?;
                self.touch(dir, name);
                Ok(())
            }
            None => {
                let node = self.make(meta, attrs, Body::directory(dir, name))?;
                self.put(dir, name, node)
            }
        }
    }

    /// Gives a directory other attributes.
    pub fn describe(
        &mut self,
        dir: usize,
        meta: Meta,
        attrs: Vec<NewAttr>,
    ) -> Result<(), &'static str> {
        self.charge(memory_of(&attrs))?;
        if let Node::Other(inode) = &mut self.nodes[dir] {
            (inode.meta, inode.attrs) = (meta, attrs);
        }
        Ok(())
    }

    fn touch(&mut self, dir: usize, name: &[u8]) {
        let layer = self.layer;
        let entry = self.nodes[dir]
            .dir_mut()
            .and_then(|d| d.below.get_mut(name));
        if let Some(entry) = entry {
            entry.layer = layer;
        }
    }

    /// The directory that these names lead to, through symbolic links; nothing leads out of the tree. Directories that
    /// are missing are made if `make` is set.
    pub fn directory(
        &mut self,
        names: &[&[u8]],
        make: bool,
    ) -> Result<Option<usize>, &'static str> {
        let mut at = ROOT;
        // What is left of targets of links, and then of `names`.
        let mut inner: VecDeque<Box<[u8]>> = VecDeque::new();
        let mut outer = names.iter();
        let mut links = 0;
        loop {
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
                at = self.nodes[at].dir().map_or(ROOT, |d| d.parent);
                continue;
            }
            let found = self.below(at, name);
            match found.map(|node| (node, self.nodes[node].other().map(|it| &it.body))) {
                Some((node, Some(Body::Directory(_)))) => {
                    if make {
                        self.touch(at, name);
                    }
                    at = node;
                }
                Some((_, Some(Body::Symlink(target)))) => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err("it lies below too many symbolic links");
                    }
                    let absolute = target.starts_with(b"/");
                    for part in target.split(|b| *b == b'/').rev() {
                        inner.push_front(part.into());
                    }
                    if absolute {
                        at = ROOT;
                    }
                }
                _ if !make => return Ok(None),
                Some(_) if !self.layered => {
                    return Err("it lies below something that is no directory");
                }
                None if from_link.is_some() && !self.layered => {
                    return Err("it lies below a symbolic link to nothing that came before");
                }
                _ => {
                    let body = Body::directory(at, name);
                    let node = self.make(Meta::directory(Time::default()), Vec::new(), body)?;
                    self.put(at, name, node)?;
                    at = node;
                }
            }
        }
    }

    /// What is no directory and has these names; the last is not followed.
    pub fn file(&mut self, names: &[&[u8]]) -> Result<Option<usize>, &'static str> {
        let Some((name, above)) = names.split_last() else {
            return Ok(None);
        };
        let above = self.directory(above, false)?;
        let node = above.and_then(|above| self.below(above, name));
        Ok(node.filter(|n| self.nodes[*n].dir().is_none()))
    }

    /// Removes what layers below this one have under a name.
    pub fn whiteout(&mut self, dir: usize, name: &[u8]) {
        let layer = self.layer;
        let Some(entries) = self.nodes[dir].dir_mut().map(|d| &mut d.below) else {
            return;
        };
        match entries.get(name) {
            Some(entry) if entry.layer < layer => {
                entries.remove(name);
            }
            Some(entry) => {
                let node = entry.node as usize;
                self.opaque(node);
            }
            None => {}
        }
    }

    /// Removes what layers below this one have in a directory.
    pub fn opaque(&mut self, dir: usize) {
        let layer = self.layer;
        let mut todo = vec![dir];
        while let Some(node) = todo.pop() {
            if let Some(dir) = self.nodes[node].dir_mut() {
                dir.below.retain(|_, entry| entry.layer >= layer);
                todo.extend(dir.below.values().map(|entry| entry.node as usize));
            }
        }
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
            if len.saturating_add(self.contents.end - self.begin) > self.limits.contents {
                return Err(MkfsError::NoSpace {
                    path: path(),
                    size: self.limits.contents,
                });
            }
            let mut left = *len;
            while left > 0 {
                left -= self.contents.take(from, left).map_err(failed)?;
                self.contents.flush(false)?;
            }
        }
        Ok(parts)
    }

    /// Whether the root has a file that an image of layers has.
    pub fn may_be_image(&self) -> bool {
        let marks: [&[u8]; 2] = [b"oci-layout", b"manifest.json"];
        marks.iter().any(|name| self.below(ROOT, name).is_some())
    }

    /// The tree, which is not changed any more.
    pub fn finish(mut self) -> Result<Finished, MkfsError> {
        self.contents.flush(true)?;
        let mut names = vec![0u32; self.nodes.len()];
        let mut todo = vec![ROOT];
        while let Some(node) = todo.pop() {
            for entry in self.nodes[node].dir().iter().flat_map(|d| d.below.values()) {
                let node = entry.node as usize;
                names[node] += 1;
                if self.nodes[node].dir().is_some() {
                    todo.push(node);
                }
            }
        }
        Ok(Finished(Arc::new((self, names))))
    }
}

/// A tree that is not changed any more, and how many names each node has.
#[derive(Debug)]
pub struct Finished(Arc<(Tree, Vec<u32>)>);

impl Finished {
    /// The tree as a source.
    pub fn root(&self) -> Root {
        let root = &self.0.0.nodes[ROOT];
        Root {
            meta: root.meta(),
            attrs: root.attrs(),
            dir: Arc::new(TreeDir {
                tree: self.0.clone(),
                node: ROOT,
            }),
        }
    }

    /// The tree, to be changed again.
    pub fn into_tree(self) -> Option<Tree> {
        Arc::into_inner(self.0).map(|(tree, _)| tree)
    }
}

#[derive(Debug)]
struct TreeDir {
    tree: Arc<(Tree, Vec<u32>)>,
    node: usize,
}

impl TreeDir {
    fn nodes(&self) -> &[Node] {
        &self.tree.0.nodes
    }

    fn find(&self, name: &[u8]) -> Result<usize, MkfsError> {
        let missing = || {
            let error = io::ErrorKind::NotFound.into();
            MkfsError::source(self.path(name), "opening it", error)
        };
        let found = self.tree.0.below(self.node, name);
        found.ok_or_else(missing)
    }
}

impl SourceDir for TreeDir {
    fn list_wanted(&self, wanted: &dyn Fn(&[u8]) -> bool) -> Result<Vec<SourceEntry>, MkfsError> {
        let dir = self.nodes()[self.node].dir();
        let below = dir.iter().flat_map(|d| &d.below);
        let entries = below.filter(|(name, _)| wanted(name)).map(|(name, entry)| {
            let node = entry.node as usize;
            let n = &self.nodes()[node];
            let body = n.other().map(|it| &it.body);
            SourceEntry {
                name: name[..].into(),
                meta: n.meta(),
                links: (self.tree.1[node] > 1).then_some((0, node as u64)),
                attrs: n.attrs(),
                target: match body {
                    Some(Body::Symlink(target)) => target.clone(),
                    _ => Box::default(),
                },
                data: match body {
                    Some(Body::File(parts, true)) => {
                        Data::Runs(parts.iter().map(|p| (p.0, p.1)).collect())
                    }
                    _ => Data::Dense,
                },
            }
        });
        Ok(entries.collect())
    }

    fn enter(self: Arc<Self>, name: &[u8]) -> Result<Option<Arc<dyn SourceDir>>, MkfsError> {
        let node = self.find(name)?;
        let tree = self.tree.clone();
        Ok(Some(Arc::new(TreeDir { tree, node })))
    }

    fn open(&self, name: &[u8]) -> Result<Option<SourceReader>, MkfsError> {
        let node = self.find(name)?;
        let parts = match &self.nodes()[node] {
            Node::Plain { at, size, .. } => [(0, *size, *at)].into(),
            Node::Other(inode) => match &inode.body {
                Body::File(parts, _) => parts.as_slice().into(),
                Body::Host(path) => {
                    let failed = |e| MkfsError::source(path.clone(), "opening it", e);
                    let file = File::open(path).map_err(failed)?;
                    let size = file.metadata().map_err(failed)?.len();
                    return Ok(Some(SourceReader::Host(file.into(), size)));
                }
                _ => return Ok(None),
            },
        };
        Ok(Some(SourceReader::Parts {
            file: self.tree.0.contents.file.clone(),
            parts,
        }))
    }

    fn path(&self, name: &[u8]) -> PathBuf {
        let mut names = vec![name];
        let mut node = self.node;
        while node != ROOT {
            let Some(dir) = self.nodes()[node].dir() else {
                break;
            };
            names.push(&dir.name);
            node = dir.parent;
        }
        let names = names.iter().rev().filter(|n| !n.is_empty());
        names.map(|n| as_path(n)).collect()
    }
}
