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
    Directory(BTreeMap<CString, u64>),
    Link(CString),
}

struct Node {
    attr: Attr,
    content: Content,
    /// Lookups that the kernel and clients have not taken back.
    lookups: u64,
}

impl Node {
    fn names(&mut self) -> Result<&mut BTreeMap<CString, u64>> {
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
    nodes: HashMap<u64, Node>,
    /// open(2)'s flags of each handle.
    handles: HashMap<u64, u32>,
    last: u64,
}

impl State {
    fn node(&mut self, node: u64) -> Result<&mut Node> {
        self.nodes.get_mut(&node).ok_or(Errno::STALE)
    }

    fn find(&mut self, parent: u64, name: &CStr) -> Result<u64> {
        if name.count_bytes() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let found = self.node(parent)?.names()?.get(name).copied();
        found.ok_or(Errno::NOENT)
    }

    fn open(&mut self, flags: u32) -> Opened {
        self.last += 1;
        self.handles.insert(self.last, flags);
        Opened {
            fh: self.last,
            ..Opened::default()
        }
    }

    fn make(
        &mut self,
        cx: &Context,
        parent: u64,
        name: &CStr,
        (mode, rdev): (u32, u32),
        content: Content,
    ) -> Result<Entry> {
        self.last += 1;
        let node = self.last;
        let mut attr = attr(node, FileType::from_raw_mode(mode), mode);
        (attr.uid, attr.gid, attr.nlink, attr.rdev) = (cx.uid, cx.gid, 0, rdev);
        let lookups = 0;
        self.nodes.insert(
            node,
            Node {
                attr,
                content,
                lookups,
            },
        );
        self.name(parent, name, node)
    }

    fn name(&mut self, parent: u64, name: &CStr, node: u64) -> Result<Entry> {
        let directory = self.node(parent)?;
        directory.names()?.insert(name.to_owned(), node);
        touch(&mut directory.attr);
        let named = self.node(node)?;
        named.attr.nlink += 1;
        touch(&mut named.attr);
        Ok(named.entry())
    }

    /// Takes a name away, and with the last one and the last lookup the node.
    fn remove(&mut self, parent: u64, name: &CStr) -> Result<Unlinked> {
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

    fn forget(&mut self, number: u64, lookups: u64) {
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
        let root = Node {
            attr: attr(ROOT, FileType::Directory, 0o755),
            content: Content::Directory(BTreeMap::new()),
            lookups: 1,
        };
        let state = State {
            nodes: HashMap::from([(ROOT, root)]),
            last: ROOT,
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
    async fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> Result<Entry> {
        let mut state = self.state();
        let found = state.find(parent, name)?;
        Ok(state.node(found)?.entry())
    }

    fn forget(&self, node: u64, lookups: u64) {
        self.state().forget(node, lookups);
    }

    fn lookups(&self, node: u64) -> Option<u64> {
        self.state().node(node).ok().map(|node| node.lookups)
    }

    async fn getattr(&self, _: &Context, node: u64, _: Option<u64>) -> Result<Attributes> {
        Ok(Attributes::new(self.state().node(node)?.attr, TTL))
    }

    async fn setattr(&self, _: &Context, node: u64, set: &SetAttr) -> Result<Attributes> {
        let mut state = self.state();
        let node = state.node(node)?;
        if let Some(size) = set.size {
            node.set_size(usize::try_from(size).map_err(|_| Errno::FBIG)?)?;
        }
        set.apply(&mut node.attr);
        Ok(Attributes::new(node.attr, TTL))
    }

    async fn mkdir(&self, cx: &Context, parent: u64, name: &CStr, new: &NewNode) -> Result<Entry> {
        let mode = FileType::Directory.as_raw_mode() | new.mode;
        self.state().make(
            cx,
            parent,
            name,
            (mode, 0),
            Content::Directory(BTreeMap::new()),
        )
    }

    async fn mknod(&self, cx: &Context, parent: u64, name: &CStr, new: &NewNode) -> Result<Entry> {
        self.state().make(
            cx,
            parent,
            name,
            (new.mode, new.rdev),
            Content::File(Vec::new()),
        )
    }

    async fn create(
        &self,
        cx: &Context,
        parent: u64,
        name: &CStr,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        let mut state = self.state();
        let entry = state.make(
            cx,
            parent,
            name,
            (new.mode, new.rdev),
            Content::File(Vec::new()),
        )?;
        Ok((entry, state.open(how.flags)))
    }

    async fn symlink(
        &self,
        cx: &Context,
        parent: u64,
        name: &CStr,
        target: &CStr,
    ) -> Result<Entry> {
        let mode = FileType::Symlink.as_raw_mode() | 0o777;
        self.state().make(
            cx,
            parent,
            name,
            (mode, 0),
            Content::Link(target.to_owned()),
        )
    }

    async fn readlink(&self, _: &Context, node: u64) -> Result<Bytes> {
        match &self.state().node(node)?.content {
            Content::Link(target) => Ok(target.to_bytes().to_vec()),
            _ => Err(Errno::INVAL),
        }
    }

    async fn link(&self, _: &Context, node: u64, parent: u64, name: &CStr) -> Result<Entry> {
        self.state().name(parent, name, node)
    }

    async fn unlink(&self, _: &Context, parent: u64, name: &CStr) -> Result<Unlinked> {
        self.state().remove(parent, name)
    }

    async fn rmdir(&self, _: &Context, parent: u64, name: &CStr) -> Result<Unlinked> {
        self.state().remove(parent, name)
    }

    async fn rename(
        &self,
        _: &Context,
        parent: u64,
        name: &CStr,
        new_parent: u64,
        new_name: &CStr,
        flags: u32,
    ) -> Result<Unlinked> {
        if flags != 0 {
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

    async fn open(&self, _: &Context, _: u64, how: &OpenHow) -> Result<Opened> {
        Ok(self.state().open(how.flags))
    }

    async fn release(&self, _: &Context, _: u64, fh: u64, _: u32, _: Option<u64>) -> Result<()> {
        self.state().handles.remove(&fh);
        Ok(())
    }

    async fn read(&self, _: &Context, node: u64, how: &IoHow, data: &Payload) -> Result<usize> {
        Ok(read_from(
            self.state().node(node)?.bytes()?,
            how.offset,
            data,
        ))
    }

    async fn write(&self, _: &Context, node: u64, how: &IoHow, data: &Payload) -> Result<usize> {
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
        node: u64,
        _: u64,
        offset: u64,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let mut state = self.state();
        let names = state.node(node)?.names()?.clone();
        let dots = [
            (ROOT, FileType::Directory, &b"."[..]),
            (ROOT, FileType::Directory, b".."),
        ];
        let kind = |node| state.nodes.get(&node).map_or(FileType::Unknown, Node::kind);
        let all = names
            .iter()
            .map(|(name, &node)| (node, kind(node), name.to_bytes()));
        list(dots.into_iter().chain(all), offset, sink);
        Ok(())
    }

    // These two let programs under `uvfs run` take their open files along.

    fn open_flags(&self, _: u64, fh: u64) -> Result<u32> {
        self.state().handles.get(&fh).copied().ok_or(Errno::BADF)
    }

    async fn share(&self, node: u64, fh: u64) -> Result<u64> {
        let mut state = self.state();
        let flags = *state.handles.get(&fh).ok_or(Errno::BADF)?;
        state.node(node)?.lookups += 1;
        Ok(state.open(flags).fh)
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
