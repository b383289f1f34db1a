//! A file system in memory: files, directories, symbolic links, and hard links.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};
use std::{ffi::CStr, ffi::CString, time::Duration};

use uvfs_server::{FileSystem, fs::*};

/// Nothing changes but by requests, so the kernel may keep names and attributes for long.
const TTL: Duration = Duration::from_secs(3600);

#[derive(Default)]
struct Inode {
    attr: Attr,
    /// The contents of a file, or the target of a symbolic link.
    bytes: Vec<u8>,
    /// The entries of a directory.
    names: BTreeMap<CString, Node>,
    /// The lookups that were not taken back: while there are any, the kernel or a client knows the node.
    lookups: u64,
}

/// The answer to a lookup of the node, which is counted.
fn entry(node: &mut Inode) -> Entry {
    node.lookups += 1;
    Entry::new(node.attr, TTL)
}

struct State {
    nodes: HashMap<Node, Inode>,
    /// The number of the newest node.
    last: Node,
}

impl State {
    fn node(&mut self, node: Node) -> Result<&mut Inode> {
        Ok(self.nodes.get_mut(&node).ok_or(Errno::STALE)?)
    }

    fn find(&mut self, parent: Node, name: &CStr) -> Result<&mut Inode> {
        let found = self.node(parent)?.names.get(name).copied();
        self.node(found.ok_or(Errno::NOENT)?)
    }

    /// Gives a node a name that is free.
    fn link(&mut self, node: Node, parent: Node, name: &CStr) -> Result<&mut Inode> {
        let directory = self.node(parent)?;
        (!directory.names.contains_key(name))
            .then_some(())
            .ok_or(Errno::EXIST)?;
        directory.names.insert(name.into(), node);
        touch(&mut directory.attr);
        let node = self.node(node)?;
        node.attr.nlink += 1;
        Ok(node)
    }

    /// Takes a name away, unless it is that of a directory with something in it.
    fn unlink(&mut self, parent: Node, name: &CStr) -> Result<Unlinked> {
        let node = self.find(parent, name)?;
        node.names.is_empty().then_some(()).ok_or(Errno::NOTEMPTY)?;
        node.attr.nlink -= 1;
        let (number, last) = (Node(node.attr.ino), node.attr.nlink == 0);
        let directory = self.node(parent)?;
        directory.names.remove(name);
        touch(&mut directory.attr);
        self.forget(number, 0);
        let node = Some(number);
        Ok(Unlinked { node, last })
    }

    /// A node goes with its last name and its last lookup, whichever is later.
    fn forget(&mut self, number: Node, lookups: u64) {
        if let Ok(node) = self.node(number) {
            node.lookups = node.lookups.saturating_sub(lookups);
            if node.lookups == 0 && node.attr.nlink == 0 {
                self.nodes.remove(&number);
            }
        }
    }

    /// Makes a node and gives it a name.
    fn make(&mut self, cx: &Context, at: Node, name: &CStr, new: &NewNode) -> Result<&mut Inode> {
        self.last.0 += 1;
        let mut attr = attr(self.last, new.kind, new.mode);
        (attr.uid, attr.gid, attr.nlink, attr.rdev) = (cx.uid, cx.gid, 0, new.rdev);
        touch(&mut attr);
        self.nodes.entry(self.last).or_default().attr = attr;
        self.link(self.last, at, name)
    }

    /// Fills up with zeros, or cuts off.
    fn resize(&mut self, node: Node, size: u64) -> Result<&mut Inode> {
        let node = self.node(node)?;
        let more = size.saturating_sub(node.attr.size) as usize;
        node.bytes.try_reserve(more).map_err(|_| Errno::NOSPC)?;
        node.bytes.resize(size as usize, 0);
        (node.attr.size, node.attr.blocks) = (size, size.div_ceil(512));
        touch(&mut node.attr);
        Ok(node)
    }
}

/// The file system.
pub struct Memory(Mutex<State>);

impl Memory {
    pub fn new() -> Self {
        let mut nodes = HashMap::<Node, Inode>::new();
        nodes.entry(ROOT).or_default().attr = attr(ROOT, FileType::Directory, 0o755);
        Self(Mutex::new(State { nodes, last: ROOT }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no handler panics")
    }
}

impl FileSystem for Memory {
    async fn lookup(&self, _: &Context, parent: Node, name: &CStr) -> Result<Entry> {
        Ok(entry(self.state().find(parent, name)?))
    }

    fn forget(&self, node: Node, lookups: u64) {
        self.state().forget(node, lookups);
    }

    async fn getattr(&self, _: &Context, node: Node, _: Option<Handle>) -> Result<Attributes> {
        Ok(Attributes::new(self.state().node(node)?.attr, TTL))
    }

    async fn setattr(&self, _: &Context, node: Node, set: &SetAttr) -> Result<Attributes> {
        let mut state = self.state();
        let node = match set.size {
            Some(size) => state.resize(node, size)?,
            None => state.node(node)?,
        };
        set.apply(&mut node.attr);
        Ok(Attributes::new(node.attr, TTL))
    }

    async fn mknod(&self, cx: &Context, parent: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        Ok(entry(self.state().make(cx, parent, name, new)?))
    }

    async fn mkdir(&self, cx: &Context, parent: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        self.mknod(cx, parent, name, new).await
    }

    async fn symlink(&self, cx: &Context, parent: Node, name: &CStr, to: &CStr) -> Result<Entry> {
        let new = NewNode {
            kind: FileType::Symlink,
            mode: 0o777.into(),
            umask: Mode::empty(),
            rdev: 0,
        };
        let mut state = self.state();
        let link = state.make(cx, parent, name, &new)?;
        (link.bytes, link.attr.size) = (to.to_bytes().into(), to.count_bytes() as u64);
        Ok(entry(link))
    }

    async fn readlink(&self, _: &Context, node: Node) -> Result<Bytes> {
        Ok(self.state().node(node)?.bytes.clone())
    }

    async fn link(&self, _: &Context, node: Node, parent: Node, name: &CStr) -> Result<Entry> {
        Ok(entry(self.state().link(node, parent, name)?))
    }

    async fn unlink(&self, _: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        self.state().unlink(parent, name)
    }

    async fn rmdir(&self, _: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        self.state().unlink(parent, name)
    }

    async fn rename(
        &self,
        _: &Context,
        parent: Node,
        name: &CStr,
        new_parent: Node,
        new_name: &CStr,
        flags: RenameFlags,
    ) -> Result<Unlinked> {
        flags.is_empty().then_some(()).ok_or(Errno::INVAL)?;
        let mut state = self.state();
        let moved = Node(state.find(parent, name)?.attr.ino);
        let replaced = match state.unlink(new_parent, new_name) {
            Err(error) if error == Errno::NOENT => Unlinked::default(),
            replaced => replaced?,
        };
        state.link(moved, new_parent, new_name)?.attr.nlink -= 1;
        let directory = state.node(parent)?;
        directory.names.remove(name);
        touch(&mut directory.attr);
        Ok(replaced)
    }

    /// The handle is open(2)'s flags, as nothing else is to be known of an open file.
    async fn open(&self, _: &Context, _: Node, how: &OpenHow) -> Result<Opened> {
        Ok(Opened::new(Handle(how.flags.bits().into())))
    }

    async fn read(&self, _: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        Ok(read_from(&self.state().node(node)?.bytes, how.offset, data))
    }

    async fn write(&self, _: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let mut state = self.state();
        let (start, end) = (how.offset, how.offset + data.len() as u64);
        let size = state.node(node)?.attr.size.max(end);
        let bytes = &mut state.resize(node, size)?.bytes;
        data.copy_out(0, &mut bytes[start as usize..end as usize]);
        Ok(data.len())
    }

    async fn readdir(
        &self,
        _: &Context,
        node: Node,
        _: Handle,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let state = self.state();
        let kind = |node| FileType::from_raw_mode(state.nodes[node].attr.mode);
        let names = &state.nodes.get(&node).ok_or(Errno::STALE)?.names;
        let names = names.iter();
        let names = names.map(|(name, node)| (*node, kind(node), name.to_bytes()));
        list(node, names, sink);
        Ok(())
    }

    fn clients(&self) -> Option<&dyn ClientSupport> {
        Some(self)
    }
}

/// Programs under `uvfs run` take their open files along.
impl ClientSupport for Memory {
    fn open_flags(&self, _: Node, fh: Handle) -> Result<OFlags> {
        Ok(OFlags::from_bits_retain(fh.0 as u32))
    }

    fn share(&self, node: Node, fh: Handle) -> BoxFuture<'_, Result<Handle>> {
        Box::pin(async move { self.state().node(node).map(entry).map(|_| fh) })
    }
}
