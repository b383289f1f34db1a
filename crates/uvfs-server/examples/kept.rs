//! A file system in memory that outlives its server: `cargo run -p uvfs-server --example kept -- MOUNTPOINT`. Kill the
//! process that serves, and the next one goes on with the same files.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use rustix::fs::{MemfdFlags, fallocate, memfd_create};
use uvfs_server::{FileSystem, Options, SessionHandle, fs::*};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

const TTL: Duration = Duration::from_secs(3600);
/// The most bytes of a file: its contents have so much room in the file with all contents.
const MOST: u64 = 1 << 32;
/// The bytes of a record.
const RECORD: u64 = size_of::<Record>() as u64;

/// All of a node but its contents. The kernel copies so few bytes, which lie in one page, as a whole: when the server is
/// killed, a record is the old one or the new one. Each change of the file system writes one record in the end.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Record {
    attr: Attr,
    /// Where its name is; 0 if it has none.
    parent: u64,
    len: u64,
    name: [u8; 408],
}

impl Record {
    fn rename(&mut self, parent: Node, name: &[u8]) -> Result<()> {
        let to = self.name.get_mut(..name.len()).ok_or(Errno::NAMETOOLONG)?;
        to.copy_from_slice(name);
        (self.parent, self.len) = (parent.0, name.len() as u64);
        Ok(())
    }

    fn name(&self) -> Option<(Node, CString)> {
        let name = self.name.get(..self.len as usize)?;
        let name = CString::new(name).ok()?;
        (self.parent != 0).then_some((Node(self.parent), name))
    }
}

/// What has to outlive a server: two files in memory. They could as well be on a disk.
struct Store {
    /// The records of the nodes, in the order of their numbers.
    records: File,
    contents: File,
}

impl Store {
    fn new() -> io::Result<Self> {
        let file = |name| memfd_create(name, MemfdFlags::CLOEXEC).map(File::from);
        Ok(Self {
            records: file(c"records")?,
            contents: file(c"contents")?,
        })
    }

    fn read(&self, node: Node) -> io::Result<Record> {
        let mut record = Record::new_zeroed();
        (self.records).read_exact_at(record.as_mut_bytes(), node.0 * RECORD)?;
        Ok(record)
    }

    fn write(&self, node: Node, record: &Record) -> io::Result<()> {
        (self.records).write_all_at(record.as_bytes(), node.0 * RECORD)
    }

    /// Has zeros from `offset` on.
    fn cut(&self, node: Node, offset: u64) -> io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if offset < MOST {
            fallocate(&self.contents, how, node.0 * MOST + offset, MOST - offset)?;
        }
        Ok(())
    }
}

struct Inode {
    record: Record,
    lookups: u64,
}

impl Inode {
    fn entry(&mut self) -> Entry {
        self.lookups += 1;
        Entry::new(self.record.attr, TTL)
    }
}

/// What a server finds quickly. It is lost with it, and made anew of the records.
#[derive(Default)]
struct State {
    nodes: HashMap<Node, Inode>,
    names: BTreeMap<(Node, CString), Node>,
    /// The highest number of a node.
    last: Node,
}

/// The file system.
struct Kept {
    store: Store,
    state: Mutex<State>,
    session: OnceLock<Arc<dyn SessionHandle>>,
}

impl Kept {
    fn new() -> io::Result<Self> {
        let store = Store::new()?;
        let mut root = Record::new_zeroed();
        root.attr = attr(ROOT, FileType::Directory, 0o755);
        store.write(ROOT, &root)?;
        Ok(Self {
            store,
            state: Mutex::default(),
            session: OnceLock::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no handler panics")
    }

    /// Reads all records.
    fn load(&self) -> io::Result<State> {
        let mut state = State::default();
        let end = self.store.records.metadata()?.len() / RECORD;
        for node in (1..end).map(Node) {
            let record = self.store.read(node)?;
            if record.attr.ino == 0 {
                continue;
            }
            state.last = node;
            state.names.extend(record.name().map(|name| (name, node)));
            let lookups = 0;
            state.nodes.insert(node, Inode { record, lookups });
        }
        Ok(state)
    }

    /// Changes a record.
    fn change<'a>(
        &self,
        state: &'a mut State,
        node: Node,
        change: impl FnOnce(&mut Record) -> Result<()>,
    ) -> Result<&'a mut Inode> {
        let inode = state.nodes.get_mut(&node).ok_or(Errno::STALE)?;
        let mut new = inode.record;
        change(&mut new)?;
        self.store.write(node, &new)?;
        inode.record = new;
        Ok(inode)
    }

    /// Changes the times of a directory, one of whose names has changed. The change is done: if a server is killed
    /// before this, its successor does not do that again.
    fn touch(&self, state: &mut State, directory: Node) {
        let _ = self.change(state, directory, |record| {
            touch(&mut record.attr);
            Ok(())
        });
    }

    /// The node that this request was about, if an earlier server has begun it. Then it may be done.
    fn before(&self, cx: &Context) -> Option<Node> {
        Some(Node(self.session.get()?.again(cx)?.note?))
    }

    /// Tells the next server which node a request is about, before anything is done.
    fn note(&self, cx: &Context, node: Node) {
        if let Some(session) = self.session.get() {
            session.note(cx, node.0);
        }
    }

    /// Makes a node.
    fn make<'a>(
        &self,
        cx: &Context,
        state: &'a mut State,
        at: Node,
        name: &CStr,
        new: &NewNode,
    ) -> Result<&'a mut Inode> {
        let found = state.names.get(&(at, name.into())).copied();
        if let Some(found) = found {
            let again = self.before(cx) == Some(found);
            again.then_some(()).ok_or(Errno::EXIST)?;
            return Ok(state.nodes.get_mut(&found).ok_or(Errno::STALE)?);
        }
        let node = Node(state.last.0 + 1);
        self.note(cx, node);
        let mut record = Record::new_zeroed();
        record.attr = attr(node, new.kind, new.mode);
        (record.attr.uid, record.attr.gid, record.attr.rdev) = (cx.uid, cx.gid, new.rdev);
        touch(&mut record.attr);
        record.rename(at, name.to_bytes())?;
        self.store.write(node, &record)?;
        state.last = node;
        state.names.insert((at, name.into()), node);
        self.touch(state, at);
        let lookups = 0;
        let inode = state.nodes.entry(node);
        Ok(inode.insert_entry(Inode { record, lookups }).into_mut())
    }

    /// Takes a name away.
    fn remove(&self, state: &mut State, parent: Node, name: &CStr) -> Result<Unlinked> {
        let name = (parent, name.into());
        let node = *state.names.get(&name).ok_or(Errno::NOENT)?;
        let within = state.names.range((node, CString::default())..).next();
        let empty = within.is_none_or(|((parent, _), _)| *parent != node);
        empty.then_some(()).ok_or(Errno::NOTEMPTY)?;
        self.change(state, node, |record| {
            (record.parent, record.attr.nlink) = (0, 0);
            Ok(())
        })?;
        state.names.remove(&name);
        self.touch(state, parent);
        self.forget_some(state, node, 0);
        let (node, last) = (Some(node), true);
        Ok(Unlinked { node, last })
    }

    /// Unlinks for a request.
    fn unlink_once(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        let mut state = self.state();
        let found = state.names.get(&(parent, name.into())).copied();
        if let Some(before) = self.before(cx)
            && found != Some(before)
        {
            let (node, last) = (Some(before), true);
            return Ok(Unlinked { node, last });
        }
        self.note(cx, found.ok_or(Errno::NOENT)?);
        self.remove(&mut state, parent, name)
    }

    /// A node goes with its name and its last lookup.
    fn forget_some(&self, state: &mut State, node: Node, lookups: u64) {
        let Some(inode) = state.nodes.get_mut(&node) else {
            return;
        };
        inode.lookups = inode.lookups.saturating_sub(lookups);
        if inode.lookups > 0 || inode.record.attr.nlink > 0 {
            return;
        }
        state.nodes.remove(&node);
        // The number is free for another node once the contents are gone.
        let gone = self.store.cut(node, 0);
        let _ = gone.and_then(|()| self.store.write(node, &Record::new_zeroed()));
    }

    fn resize(&self, state: &mut State, node: Node, size: u64) -> Result<()> {
        (size <= MOST).then_some(()).ok_or(Errno::FBIG)?;
        self.change(state, node, |record| {
            (record.attr.size, record.attr.blocks) = (size, size.div_ceil(512));
            touch(&mut record.attr);
            Ok(())
        })?;
        Ok(())
    }
}

impl FileSystem for Kept {
    fn init(&self, _: &mut Config, session: Arc<dyn SessionHandle>) -> Result<()> {
        let _ = self.session.set(session);
        *self.state() = self.load()?;
        Ok(())
    }

    fn survive(&self) -> Option<&dyn Survive> {
        Some(self)
    }

    fn forget(&self, node: Node, lookups: u64) {
        self.forget_some(&mut self.state(), node, lookups);
    }

    async fn lookup(&self, _: &Context, parent: Node, name: &CStr) -> Result<Entry> {
        let mut state = self.state();
        let name = (parent, name.into());
        let node = *state.names.get(&name).ok_or(Errno::NOENT)?;
        Ok(state.nodes.get_mut(&node).ok_or(Errno::STALE)?.entry())
    }

    async fn getattr(&self, _: &Context, node: Node, _: Option<Handle>) -> Result<Attributes> {
        let state = self.state();
        let inode = state.nodes.get(&node).ok_or(Errno::STALE)?;
        Ok(Attributes::new(inode.record.attr, TTL))
    }

    async fn setattr(&self, _: &Context, node: Node, set: &SetAttr) -> Result<Attributes> {
        let mut state = self.state();
        if let Some(size) = set.size {
            self.resize(&mut state, node, size)?;
            self.store.cut(node, size)?;
        }
        let inode = self.change(&mut state, node, |record| {
            set.apply(&mut record.attr);
            Ok(())
        })?;
        Ok(Attributes::new(inode.record.attr, TTL))
    }

    async fn mknod(&self, cx: &Context, at: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        Ok(self.make(cx, &mut self.state(), at, name, new)?.entry())
    }

    async fn mkdir(&self, cx: &Context, at: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        self.mknod(cx, at, name, new).await
    }

    async fn unlink(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        self.unlink_once(cx, parent, name)
    }

    async fn rmdir(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        self.unlink_once(cx, parent, name)
    }

    async fn rename(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new_parent: Node,
        new_name: &CStr,
        flags: RenameFlags,
    ) -> Result<Unlinked> {
        flags.is_empty().then_some(()).ok_or(Errno::INVAL)?;
        let mut state = self.state();
        let (old, new) = ((parent, name.into()), (new_parent, new_name.into()));
        let moved = state.names.get(&old).copied();
        if let Some(before) = self.before(cx)
            && moved != Some(before)
        {
            return Ok(Unlinked::default());
        }
        let moved = moved.ok_or(Errno::NOENT)?;
        self.note(cx, moved);
        let replaced = match self.remove(&mut state, new_parent, new_name) {
            Err(error) if error == Errno::NOENT => Unlinked::default(),
            replaced => replaced?,
        };
        self.change(&mut state, moved, |record| {
            record.rename(new_parent, new_name.to_bytes())
        })?;
        state.names.remove(&old);
        state.names.insert(new, moved);
        self.touch(&mut state, parent);
        self.touch(&mut state, new_parent);
        Ok(replaced)
    }

    async fn read(&self, _: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let state = self.state();
        let inode = state.nodes.get(&node).ok_or(Errno::STALE)?;
        let rest = inode.record.attr.size.saturating_sub(how.offset);
        let len = rest.min(data.len() as u64) as usize;
        drop(state);
        let mut bytes = vec![0; len];
        let at = node.0 * MOST + how.offset;
        // The file with the contents may end before: there are zeros.
        let read = self.store.contents.read_at(&mut bytes, at)?;
        bytes[read..].fill(0);
        data.copy_in(0, &bytes);
        Ok(len)
    }

    async fn write(&self, _: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let end = how.offset + data.len() as u64;
        (end <= MOST).then_some(()).ok_or(Errno::FBIG)?;
        let mut bytes = vec![0; data.len()];
        data.copy_out(0, &mut bytes);
        let mut state = self.state();
        let inode = state.nodes.get(&node).ok_or(Errno::STALE)?;
        let size = inode.record.attr.size.max(end);
        let at = node.0 * MOST + how.offset;
        self.store.contents.write_all_at(&bytes, at)?;
        self.resize(&mut state, node, size)?;
        Ok(bytes.len())
    }

    async fn readdir(
        &self,
        _: &Context,
        at: Node,
        _: Handle,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let state = self.state();
        let names = state.names.range((at, CString::default())..);
        let names = names.take_while(|((parent, _), _)| *parent == at);
        let kind = |node| FileType::from_raw_mode(state.nodes[node].record.attr.mode);
        let names = names.map(|((_, name), node)| (*node, kind(node), name.to_bytes()));
        list(at, names, sink);
        Ok(())
    }
}

/// The numbers of the nodes stay the same, and there are no handles. What is lost with a server are the lookups.
impl Survive for Kept {
    fn restore_node(&self, node: Node, lookups: u64, _: &[u8], _: &Orphans) -> io::Result<()> {
        let mut state = self.state();
        state.nodes.get_mut(&node).ok_or(Errno::STALE)?.lookups = lookups;
        Ok(())
    }

    /// Nodes without a name that the kernel does not know either go.
    fn restored(&self, _: &Orphans) {
        let mut state = self.state();
        let all: Vec<Node> = state.nodes.keys().copied().collect();
        for node in all {
            self.forget_some(&mut state, node, 0);
        }
    }
}

fn main() -> io::Result<()> {
    let mountpoint = std::env::args_os().nth(1).expect("usage: kept MOUNTPOINT");
    let mut options = Options::named("kept");
    options.mount.allow_other = true;
    options.survive = true;
    let mounted = uvfs_server::mount(Kept::new()?, mountpoint, options)?;
    // Each server comes here.
    println!("process {} serves", std::process::id());
    mounted.wait();
    Ok(())
}
