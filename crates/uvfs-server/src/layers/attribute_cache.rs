//! A file system whose names and attributes are asked for once in a while.

use std::ffi::{CStr, CString};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use foldhash::HashMap;
use smallvec::{SmallVec, smallvec};
use uvfs_sys::lock;

use super::read_only::changes;
use super::{Layer, Opcode};
use crate::fs::*;

/// Parts of all nodes, each of which counts its changes.
const PARTS: usize = 64;
/// Counts the changes of which it is not known what they change.
const ANY: usize = PARTS;

/// Answers lookups and requests for attributes again for a while, for file systems that take long to. What the kernel
/// caches by the times in [`Entry`] and [`Attributes`] does not come here; this also serves clients, names that the
/// kernel dropped, and mounts of file systems that give no such times.
///
/// Changes by requests show at once, and so do those that the file system reports
/// ([`SessionHandle::host_changed`]). Others, and access times, show when the time is over. Names that don't exist are
/// not kept. Only for file systems that answer all callers alike. The file system below keeps a node for as long as a
/// name of it is kept here.
///
/// ```no_run
/// use std::time::Duration;
/// use uvfs_server::layers::AttributeCache;
/// use uvfs_server::{FileSystem, Options, mount};
///
/// # fn serve(fs: impl FileSystem) -> std::io::Result<()> {
/// let cached = AttributeCache::new(fs, Duration::from_secs(5), 100_000);
/// mount(cached, "/mnt", Options::named("cached"))?.wait();
/// # Ok(())
/// # }
/// ```
pub struct AttributeCache<F>(Arc<Cache<F>>);

struct Cache<F> {
    fs: F,
    ttl: Duration,
    most: usize,
    state: Mutex<State>,
}

struct State {
    /// Goes up whenever a change begins or ends.
    clock: u64,
    /// The changes under way, and the clock when one last began or ended.
    changes: [(u32, u64); PARTS + 1],
    attributes: HashMap<Node, (Attributes, Instant)>,
    names: HashMap<(Node, CString), (Entry, Instant)>,
    lookups: HashMap<Node, Lookups>,
}

/// The lookups of a node that names lead to, or did.
#[derive(Default)]
struct Lookups {
    /// Names that are kept. Meanwhile no lookup is taken back from the file system, so that it has the node.
    names: usize,
    /// The lookups that the file system has counted beyond those that the kernel and clients were given; negative for
    /// those that they were given from here.
    surplus: i64,
}

impl State {
    fn part(node: Node) -> usize {
        node.0 as usize % PARTS
    }

    /// Whether what was read of a node since then holds.
    fn holds(&self, node: Node, since: u64) -> bool {
        [Self::part(node), ANY].iter().all(|&part| {
            let (under_way, last) = self.changes[part];
            under_way == 0 && last <= since
        })
    }

    /// Drops a name; with the node that it leads to, and the lookups of that to take back.
    fn drop_name(&mut self, key: &(Node, CString)) -> Option<(Node, u64)> {
        let (entry, _) = self.names.remove(key)?;
        let lookups = self.lookups.entry(entry.node).or_default();
        lookups.names -= 1;
        if lookups.names > 0 {
            return Some((entry.node, 0));
        }
        let surplus = u64::try_from(lookups.surplus).unwrap_or(0);
        if lookups.surplus >= 0 {
            self.lookups.remove(&entry.node);
        }
        // Its number may come to be another node's.
        self.attributes.remove(&entry.node);
        Some((entry.node, surplus))
    }

    fn drop_names(&mut self) -> Vec<(Node, u64)> {
        let all: Vec<_> = self.names.keys().cloned().collect();
        all.iter().filter_map(|key| self.drop_name(key)).collect()
    }

    /// Notes the begin or the end of a change.
    fn note(&mut self, nodes: &[Node], begins: bool) {
        self.clock += 1;
        let clock = self.clock;
        let parts: SmallVec<[usize; 4]> = match nodes {
            [] => smallvec![ANY],
            nodes => nodes.iter().map(|&node| Self::part(node)).collect(),
        };
        for part in parts {
            let (under_way, last) = &mut self.changes[part];
            *under_way = if begins {
                *under_way + 1
            } else {
                *under_way - 1
            };
            *last = clock;
        }
        match nodes {
            [] => self.attributes.clear(),
            nodes => {
                for node in nodes {
                    self.attributes.remove(node);
                }
            }
        }
    }
}

/// A change that is under way: of these nodes, or of any, nothing is kept meanwhile.
struct Change<'a> {
    state: &'a Mutex<State>,
    nodes: SmallVec<[Node; 4]>,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        lock(self.state).note(&self.nodes, false);
    }
}

impl<F: FileSystem> Cache<F> {
    /// Begins a change of these nodes' attributes.
    fn change(&self, nodes: &[Node]) -> Change<'_> {
        lock(&self.state).note(nodes, true);
        let (state, nodes) = (&self.state, nodes.into());
        Change { state, nodes }
    }

    /// Begins a change that takes a name from a node, and maybe another. It is one of their attributes and of their
    /// directories', and of any node's if it is not known where the first name leads.
    fn change_names(
        &self,
        gone: Option<(Node, &CStr)>,
        other: Option<(Node, &CStr)>,
    ) -> Change<'_> {
        let (mut nodes, mut back) = (SmallVec::<[Node; 4]>::new(), SmallVec::<[_; 2]>::new());
        let (mut known, mut state) = (true, lock(&self.state));
        for (parent, name) in gone.into_iter().chain(other) {
            nodes.push(parent);
            match state.drop_name(&(parent, name.to_owned())) {
                Some(dropped) => {
                    nodes.push(dropped.0);
                    back.push(dropped);
                }
                None => known &= gone != Some((parent, name)),
            }
        }
        if !known {
            nodes.clear();
        }
        state.note(&nodes, true);
        drop(state);
        self.take_back(back);
        let state = &self.state;
        Change { state, nodes }
    }

    /// A node has lost a name.
    fn lost(&self, unlinked: Unlinked) {
        if let Some(node) = unlinked.node {
            drop(self.change(&[node]));
        }
    }

    fn take_back(&self, lookups: impl IntoIterator<Item = (Node, u64)>) {
        for (node, lookups) in lookups {
            if lookups > 0 {
                self.fs.forget(node, lookups);
            }
        }
    }

    /// Keeps what was read of a node since then, and a name that leads to it.
    fn keep(&self, read: Attributes, node: Node, since: u64, name: Option<(Node, &CStr, Entry)>) {
        let now = Instant::now();
        let (until, mut state) = (now + self.ttl, lock(&self.state));
        if !state.holds(node, since) {
            return;
        }
        let mut back = Vec::new();
        if let Some((parent, name, entry)) = name
            && state.holds(parent, since)
        {
            if state.names.len() >= self.most {
                back = state.drop_names();
            }
            let key = (parent, name.to_owned());
            state.lookups.entry(node).or_default().names += 1;
            back.extend(state.drop_name(&key));
            state.names.insert(key, (entry, until));
        }
        if state.attributes.len() >= self.most {
            state.attributes.retain(|_, (_, until)| *until > now);
            if state.attributes.len() >= self.most {
                state.attributes.clear();
            }
        }
        state.attributes.insert(node, (read, until));
        drop(state);
        self.take_back(back);
    }

    /// A change that the file system reports.
    fn reported(&self, change: &HostChange<'_>) {
        match change {
            HostChange::Contents(node)
            | HostChange::Attributes(node)
            | HostChange::KnownAttributes(node) => drop(self.change(&[*node])),
            HostChange::Name(parent, name) => {
                drop(self.change_names(None, Some((*parent, *name))));
            }
            HostChange::Anything(_) => {
                let back = lock(&self.state).drop_names();
                self.take_back(back);
                drop(self.change(&[]));
            }
        }
    }
}

impl<F: FileSystem> AttributeCache<F> {
    /// Keeps what `fs` answers for `ttl`, for `most` names and `most` nodes at a time.
    pub fn new(fs: F, ttl: Duration, most: usize) -> Self {
        let state = State {
            clock: 0,
            changes: [(0, 0); PARTS + 1],
            attributes: HashMap::default(),
            names: HashMap::default(),
            lookups: HashMap::default(),
        };
        let state = Mutex::new(state);
        // No clock knows the end of an endless time.
        let ttl = ttl.min(Duration::from_secs(1 << 32));
        Self(Arc::new(Cache {
            fs,
            ttl,
            most,
            state,
        }))
    }
}

impl<F: FileSystem> Layer for AttributeCache<F> {
    type Inner = F;

    fn inner(&self) -> &F {
        &self.0.fs
    }

    async fn around<T>(
        &self,
        _: &Context,
        opcode: Opcode,
        node: Node,
        call: impl AsyncFnOnce(Node) -> Result<T>,
    ) -> Result<T> {
        let changes = changes(opcode) || opcode == Opcode::Ioctl;
        let _change = changes.then(|| self.0.change(&[node]));
        call(node).await
    }

    fn init(&self, config: &mut Config, session: Arc<dyn SessionHandle>) -> Result<()> {
        let cache = Arc::downgrade(&self.0);
        self.0.fs.init(config, Arc::new(Reports { session, cache }))
    }

    fn forget(&self, node: Node, lookups: u64) {
        let mut state = lock(&self.0.state);
        let mut left = lookups;
        if let Some(known) = state.lookups.get_mut(&node) {
            let count = i64::try_from(lookups).unwrap_or(i64::MAX);
            known.surplus = known.surplus.saturating_add(count);
            if known.names > 0 {
                return;
            }
            left = u64::try_from(known.surplus).unwrap_or(0);
            if known.surplus >= 0 {
                state.lookups.remove(&node);
            }
        }
        // Its number may come to be another node's.
        state.attributes.remove(&node);
        drop(state);
        self.0.take_back([(node, left)]);
    }

    async fn lookup(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Entry> {
        let since = {
            let state = &mut *lock(&self.0.state);
            let now = Instant::now();
            if let Some((entry, until)) = state.names.get(&(parent, name.to_owned()))
                && let Some((attributes, fresh)) = state.attributes.get(&entry.node)
                && now < *until.min(fresh)
            {
                state.lookups.entry(entry.node).or_default().surplus -= 1;
                return Ok(Entry {
                    attr: attributes.attr,
                    ..*entry
                });
            }
            state.clock
        };
        let entry = self.0.fs.lookup(cx, parent, name).await?;
        if entry.node != Node(0) && entry.node != ROOT && name != c"." && name != c".." {
            let attributes = Attributes::new(entry.attr, entry.attr_ttl);
            let name = Some((parent, name, entry));
            self.0.keep(attributes, entry.node, since, name);
        }
        Ok(entry)
    }

    async fn getattr(&self, cx: &Context, node: Node, fh: Option<Handle>) -> Result<Attributes> {
        let since = {
            let state = lock(&self.0.state);
            if let Some((attributes, until)) = state.attributes.get(&node)
                && Instant::now() < *until
            {
                return Ok(*attributes);
            }
            state.clock
        };
        let attributes = self.0.fs.getattr(cx, node, fh).await?;
        self.0.keep(attributes, node, since, None);
        Ok(attributes)
    }

    async fn open(&self, cx: &Context, node: Node, how: &OpenHow) -> Result<Opened> {
        let truncates = how.flags.contains(OFlags::TRUNC);
        let _change = truncates.then(|| self.0.change(&[node]));
        self.0.fs.open(cx, node, how).await
    }

    async fn create(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        let _change = self.0.change(&[parent]);
        let made = self.0.fs.create(cx, parent, name, new, how).await?;
        // It may have truncated a file.
        drop(self.0.change(&[made.0.node]));
        Ok(made)
    }

    async fn unlink(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        let _change = self.0.change_names(Some((parent, name)), None);
        let lost = self.0.fs.unlink(cx, parent, name).await;
        lost.inspect(|lost| self.0.lost(*lost))
    }

    async fn rmdir(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        let _change = self.0.change_names(Some((parent, name)), None);
        self.0.fs.rmdir(cx, parent, name).await
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
        let (from, to) = ((parent, name), (new_parent, new_name));
        let _change = self.0.change_names(Some(from), Some(to));
        let fs = &self.0.fs;
        let lost = fs
            .rename(cx, parent, name, new_parent, new_name, flags)
            .await;
        lost.inspect(|lost| self.0.lost(*lost))
    }

    async fn link(
        &self,
        cx: &Context,
        node: Node,
        new_parent: Node,
        new_name: &CStr,
    ) -> Result<Entry> {
        let _change = self.0.change(&[node, new_parent]);
        self.0.fs.link(cx, node, new_parent, new_name).await
    }

    async fn copy_file_range(&self, cx: &Context, node: Node, copy: &CopyRange) -> Result<u64> {
        let _change = self.0.change(&[copy.node_out]);
        self.0.fs.copy_file_range(cx, node, copy).await
    }
}

/// The session of the file system below, whose reports are for the cache, too.
struct Reports<F> {
    session: Arc<dyn SessionHandle>,
    cache: Weak<Cache<F>>,
}

impl<F: FileSystem> SessionHandle for Reports<F> {
    fn outer(&self) -> Option<&dyn SessionHandle> {
        Some(&*self.session)
    }

    fn attributes_changed(&self, node: Node) {
        if let Some(cache) = self.cache.upgrade() {
            drop(cache.change(&[node]));
        }
        self.session.attributes_changed(node);
    }

    fn host_changed(&self, change: HostChange<'_>) {
        if let Some(cache) = self.cache.upgrade() {
            cache.reported(&change);
        }
        self.session.host_changed(change);
    }
}
