//! The tree that archives make: names and attributes in memory, contents in a temporary file.

use super::{Data, Meta, Root, SourceDir, SourceEntry, SourceReader, Time, as_path};
use crate::bulk::attr::NewAttr;
use crate::mkfs::MkfsError;
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

/// Where the contents of a file are: offset, length, offset in the temporary file.
pub type Parts = Vec<(u64, u64, u64)>;

/// A name in a directory.
#[derive(Debug, Clone, Copy)]
struct Entry {
    node: usize,
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
    below: BTreeMap<Box<[u8]>, Entry>,
}

#[derive(Debug)]
struct Node {
    meta: Meta,
    attrs: Vec<NewAttr>,
    body: Body,
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

impl Node {
    fn dir(&self) -> Option<&Directory> {
        match &self.body {
            Body::Directory(dir) => Some(dir),
            _ => None,
        }
    }

    fn dir_mut(&mut self) -> Option<&mut Directory> {
        match &mut self.body {
            Body::Directory(dir) => Some(dir),
            _ => None,
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

/// The tree. Members of later layers replace whatever has their names.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Node>,
    contents: Arc<File>,
    /// Bytes in that file, and how many there were when the layer began.
    end: u64,
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
        let contents = tempfile::tempfile_in(beside)
            .map_err(|e| MkfsError::source(beside.into(), "making a temporary file", e))?;
        Ok(Tree {
            nodes: vec![Node {
                meta: Meta::directory(Time::default()),
                attrs: Vec::new(),
                body: Body::Directory(Directory::default()),
            }],
            contents: Arc::new(contents),
            end: 0,
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
        self.begin = self.end;
    }

    /// Whether members called `.wh.` and more stand for what a layer removes.
    pub fn has_whiteouts(&self) -> bool {
        self.layered
    }

    fn below(&self, dir: usize, name: &[u8]) -> Option<usize> {
        let entry = self.nodes[dir].dir()?.below.get(name)?;
        Some(entry.node)
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
        let own = match &body {
            // A B-tree of few entries has room for more.
            Body::Directory(dir) => dir.name.len() + 400,
            Body::File(parts, _) => size_of_val(&parts[..]),
            Body::Host(path) => path.as_os_str().len(),
            Body::Symlink(target) => target.len(),
            Body::Special => 0,
        };
        self.charge(size_of::<Node>() + own + memory_of(&attrs))?;
        self.nodes.push(Node { meta, attrs, body });
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
        if let Some(dir) = self.nodes[dir].dir_mut() {
            dir.below.insert(name.into(), Entry { node, layer });
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
            .filter(|n| self.nodes[*n].meta.is_dir())
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
        (self.nodes[dir].meta, self.nodes[dir].attrs) = (meta, attrs);
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
            match found.map(|node| (node, &self.nodes[node].body)) {
                Some((node, Body::Directory(_))) => {
                    if make {
                        self.touch(at, name);
                    }
                    at = node;
                }
                Some((_, Body::Symlink(target))) => {
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
        Ok(node.filter(|n| !self.nodes[*n].meta.is_dir()))
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
                let node = entry.node;
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
                todo.extend(dir.below.values().map(|entry| entry.node));
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
        let mut buf = vec![0; 256 << 10];
        for (at, len) in map.iter().filter(|(_, len)| *len > 0) {
            parts.push((*at, *len, self.end));
            if len.saturating_add(self.end - self.begin) > self.limits.contents {
                return Err(MkfsError::NoSpace {
                    path: path(),
                    size: self.limits.contents,
                });
            }
            let mut left = *len;
            while left > 0 {
                let n = left.min(buf.len() as u64) as usize;
                from.read_exact(&mut buf[..n]).map_err(failed)?;
                let written = self.contents.write_all_at(&buf[..n], self.end);
                written.map_err(|error| {
                    MkfsError::source(path(), "copying it to a temporary file", error)
                })?;
                (left, self.end) = (left - n as u64, self.end + n as u64);
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
    pub fn finish(self) -> Finished {
        let mut names = vec![0u32; self.nodes.len()];
        let mut todo = vec![ROOT];
        while let Some(node) = todo.pop() {
            for entry in self.nodes[node].dir().iter().flat_map(|d| d.below.values()) {
                names[entry.node] += 1;
                if self.nodes[entry.node].meta.is_dir() {
                    todo.push(entry.node);
                }
            }
        }
        Finished(Arc::new((self, names)))
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
            meta: root.meta.clone(),
            attrs: root.attrs.clone(),
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
            let n = &self.nodes()[entry.node];
            SourceEntry {
                name: name.clone(),
                meta: n.meta.clone(),
                links: (self.tree.1[entry.node] > 1).then_some((0, entry.node as u64)),
                attrs: n.attrs.clone(),
                target: match &n.body {
                    Body::Symlink(target) => target.clone(),
                    _ => Box::default(),
                },
                data: match &n.body {
                    Body::File(parts, true) => {
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
        let parts = match &self.nodes()[node].body {
            Body::File(parts, _) => parts.as_slice().into(),
            Body::Host(path) => {
                let failed = |e| MkfsError::source(path.clone(), "opening it", e);
                let file = File::open(path).map_err(failed)?;
                let size = file.metadata().map_err(failed)?.len();
                return Ok(Some(SourceReader::Host(file.into(), size)));
            }
            _ => return Ok(None),
        };
        Ok(Some(SourceReader::Parts {
            file: self.tree.0.contents.clone(),
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
