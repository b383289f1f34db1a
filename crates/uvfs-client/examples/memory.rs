//! A file system in memory: `cargo run -p uvfs-client --example memory -- MOUNTPOINT`, then use it. Programs
//! under `uvfs run` use it over shared memory. Without a mount point the example uses it in process.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use uvfs_client::{Client, Config, Flags, OpenOptions, Server};
use uvfs_server::fs::*;
use uvfs_server::{ClientLimits, FileSystem, Options, Session, SessionOptions, in_process};

/// Nothing changes but by requests, which the kernel sees: it may keep names and attributes for long.
const TTL: Duration = Duration::from_secs(3600);
/// Bytes of the longest name.
const NAME_MAX: usize = 255;

enum Content {
    File(Vec<u8>),
    Directory(BTreeMap<CString, Node>),
    Link(CString),
}

struct Inode {
    attr: Attr,
    content: Content,
    /// Lookups that the kernel and clients have not taken back.
    lookups: u64,
}

impl Inode {
    fn names(&mut self) -> Result<&mut BTreeMap<CString, Node>> {
        match &mut self.content {
            Content::Directory(names) => Ok(names),
            _ => Err(Errno::NOTDIR),
        }
    }

    fn bytes(&mut self) -> Result<&mut Vec<u8>> {
        match &mut self.content {
            Content::File(bytes) => Ok(bytes),
            _ => Err(Errno::INVAL),
        }
    }

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.attr.mode)
    }

    /// Counts a lookup.
    fn entry(&mut self) -> Entry {
        self.lookups += 1;
        Entry::new(self.attr, TTL)
    }

    fn set_size(&mut self, size: usize) -> Result<()> {
        let bytes = self.bytes()?;
        let more = size.saturating_sub(bytes.len());
        bytes.try_reserve(more).map_err(|_| Errno::NOSPC)?;
        bytes.resize(size, 0);
        (self.attr.size, self.attr.blocks) = (size as u64, size.div_ceil(512) as u64);
        touch(&mut self.attr);
        Ok(())
    }
}

#[derive(Default)]
struct State {
    nodes: HashMap<Node, Inode>,
    /// The flags that each handle was opened with.
    handles: HashMap<Handle, OFlags>,
    /// The last number of a node or handle.
    last: u64,
}

impl State {
    fn node(&mut self, node: Node) -> Result<&mut Inode> {
        self.nodes.get_mut(&node).ok_or(Errno::STALE)
    }

    fn find(&mut self, parent: Node, name: &CStr) -> Result<Node> {
        if name.count_bytes() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let found = self.node(parent)?.names()?.get(name).copied();
        found.ok_or(Errno::NOENT)
    }

    fn open(&mut self, flags: OFlags) -> Opened {
        self.last += 1;
        let fh = Handle(self.last);
        self.handles.insert(fh, flags);
        Opened::new(fh)
    }

    fn make(
        &mut self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new: &NewNode,
        content: Content,
    ) -> Result<Entry> {
        self.last += 1;
        let node = Node(self.last);
        let mut attr = attr(node, new.kind, new.mode);
        (attr.uid, attr.gid, attr.nlink, attr.rdev) = (cx.uid, cx.gid, 0, new.rdev);
        let lookups = 0;
        self.nodes.insert(
            node,
            Inode {
                attr,
                content,
                lookups,
            },
        );
        self.name(parent, name, node)
    }

    fn name(&mut self, parent: Node, name: &CStr, node: Node) -> Result<Entry> {
        let directory = self.node(parent)?;
        directory.names()?.insert(name.to_owned(), node);
        touch(&mut directory.attr);
        let named = self.node(node)?;
        named.attr.nlink += 1;
        touch(&mut named.attr);
        Ok(named.entry())
    }

    /// Takes a name away, and with the last one and the last lookup the node.
    fn remove(&mut self, parent: Node, name: &CStr) -> Result<Unlinked> {
        let number = self.find(parent, name)?;
        let node = self.node(number)?;
        if node.names().is_ok_and(|names| !names.is_empty()) {
            return Err(Errno::NOTEMPTY);
        }
        node.attr.nlink -= 1;
        touch(&mut node.attr);
        let last = node.attr.nlink == 0;
        let directory = self.node(parent)?;
        directory.names()?.remove(name);
        touch(&mut directory.attr);
        self.forget(number, 0);
        Ok(Unlinked {
            node: Some(number),
            last,
        })
    }

    fn forget(&mut self, number: Node, lookups: u64) {
        let Some(node) = self.nodes.get_mut(&number) else {
            return;
        };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0 && node.attr.nlink == 0 {
            self.nodes.remove(&number);
        }
    }
}

/// The file system.
pub struct Memory(Mutex<State>);

impl Default for Memory {
    /// With nothing in it.
    fn default() -> Self {
        let root = Inode {
            attr: attr(ROOT, FileType::Directory, 0o755),
            content: Content::Directory(BTreeMap::new()),
            lookups: 1,
        };
        let state = State {
            nodes: HashMap::from([(ROOT, root)]),
            last: ROOT.0,
            ..State::default()
        };
        Self(Mutex::new(state))
    }
}

impl Memory {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no handler panics")
    }
}

impl FileSystem for Memory {
    async fn lookup(&self, _: &Context, parent: Node, name: &CStr) -> Result<Entry> {
        let mut state = self.state();
        let found = state.find(parent, name)?;
        Ok(state.node(found)?.entry())
    }

    fn forget(&self, node: Node, lookups: u64) {
        self.state().forget(node, lookups);
    }

    async fn getattr(&self, _: &Context, node: Node, _: Option<Handle>) -> Result<Attributes> {
        Ok(Attributes::new(self.state().node(node)?.attr, TTL))
    }

    async fn setattr(&self, _: &Context, node: Node, set: &SetAttr) -> Result<Attributes> {
        let mut state = self.state();
        let node = state.node(node)?;
        if let Some(size) = set.size {
            node.set_size(usize::try_from(size).map_err(|_| Errno::FBIG)?)?;
        }
        set.apply(&mut node.attr);
        Ok(Attributes::new(node.attr, TTL))
    }

    async fn mkdir(&self, cx: &Context, parent: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        let content = Content::Directory(BTreeMap::new());
        self.state().make(cx, parent, name, new, content)
    }

    async fn mknod(&self, cx: &Context, parent: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        let content = Content::File(Vec::new());
        self.state().make(cx, parent, name, new, content)
    }

    async fn create(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        let mut state = self.state();
        let content = Content::File(Vec::new());
        let entry = state.make(cx, parent, name, new, content)?;
        Ok((entry, state.open(how.flags)))
    }

    async fn symlink(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        target: &CStr,
    ) -> Result<Entry> {
        let new = NewNode {
            kind: FileType::Symlink,
            mode: Mode::from_raw_mode(0o777),
            umask: Mode::empty(),
            rdev: 0,
        };
        let content = Content::Link(target.to_owned());
        self.state().make(cx, parent, name, &new, content)
    }

    async fn readlink(&self, _: &Context, node: Node) -> Result<Bytes> {
        match &self.state().node(node)?.content {
            Content::Link(target) => Ok(target.to_bytes().to_vec()),
            _ => Err(Errno::INVAL),
        }
    }

    async fn link(&self, _: &Context, node: Node, parent: Node, name: &CStr) -> Result<Entry> {
        self.state().name(parent, name, node)
    }

    async fn unlink(&self, _: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        self.state().remove(parent, name)
    }

    async fn rmdir(&self, _: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        self.state().remove(parent, name)
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
        if !flags.is_empty() {
            return Err(Errno::INVAL);
        }
        let mut state = self.state();
        let moved = state.find(parent, name)?;
        let replaced = match state.remove(new_parent, new_name) {
            Err(Errno::NOENT) => Unlinked::default(),
            replaced => replaced?,
        };
        for (directory, name, node) in [(parent, name, None), (new_parent, new_name, Some(moved))] {
            let directory = state.node(directory)?;
            match node {
                Some(node) => directory.names()?.insert(name.to_owned(), node),
                None => directory.names()?.remove(name),
            };
            touch(&mut directory.attr);
        }
        Ok(replaced)
    }

    async fn open(&self, _: &Context, _: Node, how: &OpenHow) -> Result<Opened> {
        Ok(self.state().open(how.flags))
    }

    async fn release(
        &self,
        _: &Context,
        _: Node,
        fh: Handle,
        _: OFlags,
        _: Option<LockOwner>,
    ) -> Result<()> {
        self.state().handles.remove(&fh);
        Ok(())
    }

    async fn read(&self, _: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        Ok(read_from(
            self.state().node(node)?.bytes()?,
            how.offset,
            data,
        ))
    }

    async fn write(&self, _: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let mut state = self.state();
        let node = state.node(node)?;
        let start = usize::try_from(how.offset).map_err(|_| Errno::FBIG)?;
        let end = start.checked_add(data.len()).ok_or(Errno::FBIG)?;
        let size = node.bytes()?.len();
        node.set_size(size.max(end))?;
        data.copy_out(0, &mut node.bytes()?[start..end]);
        Ok(data.len())
    }

    async fn readdir(
        &self,
        _: &Context,
        node: Node,
        _: Handle,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let mut state = self.state();
        let names = state.node(node)?.names()?.clone();
        let kind = |node| {
            state
                .nodes
                .get(&node)
                .map_or(FileType::Unknown, Inode::kind)
        };
        let all = names
            .iter()
            .map(|(name, &node)| (node, kind(node), name.to_bytes()));
        list(node, all, sink);
        Ok(())
    }

    fn clients(&self) -> Option<&dyn ClientSupport> {
        Some(self)
    }
}

/// Lets programs under `uvfs run` take their open files along.
impl ClientSupport for Memory {
    fn open_flags(&self, _: Node, fh: Handle) -> Result<OFlags> {
        self.state().handles.get(&fh).copied().ok_or(Errno::BADF)
    }

    fn share(&self, node: Node, fh: Handle) -> BoxFuture<'_, Result<Handle>> {
        Box::pin(async move {
            let mut state = self.state();
            let flags = *state.handles.get(&fh).ok_or(Errno::BADF)?;
            state.node(node)?.lookups += 1;
            Ok(state.open(flags).fh)
        })
    }

    fn lookups(&self, node: Node) -> Option<u64> {
        self.state().node(node).ok().map(|node| node.lookups)
    }
}

fn main() -> std::io::Result<()> {
    if let Some(mountpoint) = std::env::args_os().nth(1) {
        let mut options = Options::named("memory");
        options.mount.allow_other = true;
        options.server.clients = Some(ClientLimits::default());
        uvfs_server::mount(Memory::default(), mountpoint, options)?.wait();
        return Ok(());
    }
    let session = Session::unmounted(Memory::default(), SessionOptions::default())?;
    let (_server, socket) = in_process(&Arc::new(session), ClientLimits::default())?;
    let client = Client::new(Server::from(socket), Config::default())?;
    client.mkdir("dir", 0o755)?;
    let file = client.open(
        "dir/file",
        OpenOptions::new().read(true).write(true).create(true),
    )?;
    file.write_at(b"in this process", 0, Flags::empty())?;
    println!("dir/file has {} bytes", client.stat("dir/file")?.size);
    Ok(())
}
