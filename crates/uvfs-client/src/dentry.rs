//! Names that are kept: which node a name of a directory is, or that there is none, and the
//! attributes and contents of nodes, for as long as a lease says that nobody changes them.
//!
//! A directory's names hold under the directory's lease, a node's attributes and short contents
//! under the node's own; both no longer than the file system lets the kernel keep them, as what is
//! done to the host's files past the server recalls nothing. What this client changes itself
//! recalls nothing either: it takes what becomes old out before it asks for the change ([`Change`]),
//! and an answer that was asked for before a change is not kept ([`Ticket`]).
//!
//! All lookups of nodes that have names here are owned here; whoever uses a node pins it.
//!
//! Of nodes that the page cache knows ([`super::cache::Inode`]) nothing but names is kept: their
//! lease is the page cache's.

use std::collections::VecDeque;
use std::collections::hash_map::Entry::Occupied;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use foldhash::HashMap;
use uvfs_proto::ext::{AHEAD_MAX, LISTED_MAX, PEEK_MAX, PeekedHead};

use crate::backend::{Attr, Backend, Entry, Lease, Listing, Looked, NodeId, ROOT, Recall};
use crate::cache::{Cache, errno, lock};

/// Names that are kept at most.
const MOST: usize = 32 << 10;
/// Bytes of short files' contents that are kept at most, with what it takes to remember one.
const MOST_CONTENTS: usize = 32 << 20;
const CONTENTS: usize = 128;
/// How long a name that this client made is kept at most: as long as a server lets others be.
const KEPT: Duration = Duration::from_secs(1);
/// How many files of a directory are opened in the order of its listing before the next ones are
/// asked for ahead; after how many that is tried again where it was for nothing; how many are asked
/// for at least, and at most where as many were opened in order; in how many requests at a time; and
/// how many of the listing may be left out on the way.
const RUN: i32 = 3;
const IN_VAIN: i32 = -200;
const AHEAD: usize = 32;
const FAR_AHEAD: usize = LISTED_MAX;
const REQUESTS: usize = 16;
const SKIPS: usize = 8;
/// Files that were read and of which the server was not told, at most.
const MOST_USED: usize = 256;
/// Names that have to be known of a directory for it to be listed as if all were.
const FEW: usize = 8;
/// Bytes that answer one such request.
const PEEK_ROOM: usize = 4096;
/// How far one insertion looks for a name that can go.
const LOOKS: usize = 32;

/// A short file's contents.
#[derive(Debug)]
pub(crate) struct Short {
    valid: AtomicBool,
    /// It came before anybody opened the file, or was written, and was not read yet.
    unseen: AtomicBool,
    bytes: Vec<u8>,
}

/// A file whose contents were asked for.
#[derive(Debug, Clone, Copy)]
struct Asked {
    node: NodeId,
    ticket: Ticket,
    spoiled: u64,
}

impl Short {
    pub(crate) fn new(bytes: Vec<u8>, unseen: bool) -> Arc<Self> {
        Arc::new(Self {
            valid: AtomicBool::new(true),
            unseen: AtomicBool::new(unseen),
            bytes,
        })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether this is the first time that a file that came ahead is read.
    pub(crate) fn take_unseen(&self) -> bool {
        self.unseen.load(Ordering::Relaxed) && self.unseen.swap(false, Ordering::Relaxed)
    }

    /// Copies from `offset` on, if that is still what the file holds.
    pub(crate) fn read(&self, buf: &mut [u8], offset: u64) -> Option<usize> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let from = from.min(self.bytes.len());
        let n = buf.len().min(self.bytes.len() - from);
        buf[..n].copy_from_slice(&self.bytes[from..from + n]);
        // Spoiled meanwhile: what was copied may be older than somebody's write that is over.
        self.valid.load(Ordering::SeqCst).then_some(n)
    }
}

#[derive(Debug)]
struct Name {
    /// Nothing: there is no such name.
    node: Option<NodeId>,
    until: Instant,
    /// Looked up since eviction last came by.
    used: bool,
}

#[derive(Debug, Default)]
struct Known {
    /// Lookups at the server.
    lookups: u64,
    pins: u32,
    /// Names that lead here.
    links: u32,
    /// Its type (S_IFMT).
    kind: u32,
    /// The lease's number; 0 for none.
    lease: u64,
    attr: Option<(Attr, Instant)>,
    short: Option<Arc<Short>>,
    names: HashMap<Arc<OsStr>, Name>,
    /// A name in it was looked up since it was last listed.
    searched: bool,
    /// This client's own changes: under way, and begun or ended.
    changing: u32,
    changes: u64,
    /// What was read of it counts no more: how often that was so.
    spoiled: u64,
    /// Its contents are asked for ahead.
    asked: bool,
    /// Of a directory: what was listed. Files, of which there are most, need no room for it.
    order: Option<Box<Order>>,
}

/// A directory's short files in the order of its listing. Who opens them in that order finds the next
/// ones' contents here already.
#[derive(Debug, Default)]
struct Order {
    /// What comes behind the one that was opened last.
    files: VecDeque<NodeId>,
    /// How many of them were seen to already.
    seen: usize,
    /// As the state had it when the last part was listed.
    disturbed: u64,
    /// How many were opened in order; below 0 where asking ahead was for nothing.
    run: i32,
}

impl Known {
    fn is_needed(&self) -> bool {
        self.pins > 0 || self.links > 0 || self.changing > 0
    }

    /// What is known of the node itself is not so any more.
    fn stale(&mut self) {
        self.spoiled += 1;
        self.attr = None;
        self.drop_contents();
    }

    /// Its contents are kept no longer, so that nobody would say when they change.
    fn drop_contents(&mut self) {
        if let Some(short) = self.short.take() {
            short.valid.store(false, Ordering::SeqCst);
        }
    }
}

/// A moment at which something was asked for: what a directory's names hold under, and whether
/// anything happened to any node since.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    lease: u64,
    changes: u64,
    strays: u64,
    disturbed: u64,
}

#[derive(Debug, Default)]
struct State {
    /// What is known lies outside of the table, which moves all that it holds as it grows.
    nodes: HashMap<NodeId, Box<Known>>,
    /// The names in the order in which eviction comes by; some are gone already.
    clock: VecDeque<(NodeId, Arc<OsStr>)>,
    /// The nodes whose contents are kept, oldest first, and their lengths; of some they are not any more.
    contents: VecDeque<(NodeId, usize)>,
    /// What those sum up to, at most [`MOST_CONTENTS`].
    contents_size: usize,
    /// Counts recalls of leases that were not known to be had yet.
    strays: u64,
    /// Counts all recalls, and this client's own changes.
    disturbed: u64,
    /// Requests for contents ahead that are under way.
    requests: usize,
    /// Files that came ahead and were read, of which the server was not told yet.
    used: Vec<NodeId>,
}

/// Lookups to be undone, and leases to be given back, once the lock is free.
#[derive(Default)]
struct Left {
    forgets: Vec<(NodeId, u64)>,
    leases: Vec<(NodeId, u64)>,
}

impl Left {
    fn tell(mut self, backend: &dyn Backend) {
        for (node, lease) in self.leases {
            backend.return_lease(node, lease, Lease::None);
        }
        self.forgets.retain(|&(_, lookups)| lookups > 0);
        match self.forgets[..] {
            [] => {}
            [(node, lookups)] => backend.forget(node, lookups),
            ref many => backend.forget_all(many),
        }
    }
}

impl State {
    fn ticket(&mut self, node: NodeId) -> Ticket {
        let (strays, disturbed) = (self.strays, self.disturbed);
        let known = self.nodes.entry(node).or_default();
        Ticket {
            lease: known.lease,
            changes: known.changes,
            strays,
            disturbed,
        }
    }

    /// Lets go of a node that nobody needs, and of what only that needed.
    fn settle(&mut self, node: NodeId, left: &mut Left) {
        let (mut todo, mut next) = (Vec::new(), Some(node));
        while let Some(node) = next {
            if let Occupied(known) = self.nodes.entry(node)
                && !known.get().is_needed()
                && node != ROOT
            {
                let mut known = known.remove();
                known.stale();
                // The server drops its lease with the last lookup.
                left.forgets.push((node, known.lookups));
                self.unlink_all(known.names, &mut todo);
            }
            next = todo.pop();
        }
    }

    fn unlink_all(&mut self, names: HashMap<Arc<OsStr>, Name>, todo: &mut Vec<NodeId>) {
        for child in names.into_values().filter_map(|name| name.node) {
            let known = self.nodes.get_mut(&child).expect("names lead to nodes");
            known.links -= 1;
            todo.push(child);
        }
    }

    /// Nothing of what the lease protected holds any more.
    fn unleased(&mut self, node: NodeId, left: &mut Left) {
        self.disturbed += 1;
        let Some(known) = self.nodes.get_mut(&node) else {
            return;
        };
        known.lease = 0;
        known.stale();
        let names = std::mem::take(&mut known.names);
        let mut todo = vec![node];
        self.unlink_all(names, &mut todo);
        for node in todo {
            self.settle(node, left);
        }
    }

    /// A lease came with an answer. It may have been recalled before the answer was here.
    fn leased(&mut self, node: NodeId, lease: u64, ticket: &Ticket, left: &mut Left) {
        if lease == 0 {
            return;
        }
        if self.strays != ticket.strays {
            left.leases.push((node, lease));
            return;
        }
        let known = self.nodes.entry(node).or_default();
        known.lease = known.lease.max(lease);
    }

    fn remove_name(&mut self, parent: NodeId, name: &OsStr, left: &mut Left) {
        let parent = self.nodes.get_mut(&parent);
        let name = parent.and_then(|known| known.names.remove(name));
        if let Some(child) = name.and_then(|name| name.node) {
            let known = self.nodes.get_mut(&child).expect("names lead to nodes");
            known.links -= 1;
            self.settle(child, left);
        }
    }

    fn insert_name(
        &mut self,
        parent: NodeId,
        name: &OsStr,
        node: Option<NodeId>,
        until: Instant,
        left: &mut Left,
    ) {
        if let Some(node) = node {
            // First: removing the same name could be the last to need it.
            let known = self.nodes.get_mut(&node).expect("it was looked up");
            known.links += 1;
        }
        self.remove_name(parent, name, left);
        let known = self.nodes.entry(parent).or_default();
        let new = Name {
            node,
            until,
            used: false,
        };
        let name: Arc<OsStr> = name.into();
        known.names.insert(name.clone(), new);
        self.clock.push_back((parent, name));
        if self.clock.len() > MOST {
            self.evict(left);
        }
    }

    /// Takes out a name or two that nobody looked up for long.
    fn evict(&mut self, left: &mut Left) {
        for _ in 0..LOOKS {
            let Some((parent, name)) = self.clock.pop_front() else {
                return;
            };
            let found = self.nodes.get_mut(&parent);
            let Some(found) = found.and_then(|known| known.names.get_mut(&name)) else {
                // Gone already.
                continue;
            };
            let used = std::mem::take(&mut found.used);
            let child = found.node.and_then(|node| self.nodes.get(&node));
            let needed = child.is_some_and(|child| child.pins > 0 || !child.names.is_empty());
            if used || needed {
                self.clock.push_back((parent, name));
                continue;
            }
            self.remove_name(parent, &name, left);
            if self.clock.len() <= MOST {
                return;
            }
        }
    }
}

/// What this client knows of names.
#[derive(Debug, Default)]
pub(crate) struct Dentries(Mutex<State>);

/// A node that is used; it stays known to the server for as long.
#[derive(Debug)]
pub(crate) struct Pinned {
    cache: Weak<Cache>,
    pub(crate) node: NodeId,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(cache) = self.cache.upgrade() {
            cache.dentries.unpin(&*cache.backend, self.node);
        }
    }
}

/// A name that was found.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) pin: Pinned,
    /// Its type (S_IFMT).
    pub(crate) kind: u32,
    /// Its attributes, if they are known.
    pub(crate) attr: Option<Attr>,
}

/// A change of a node by this client, from before it is asked for until it was answered. Nothing that
/// was known of the node, or is asked for meanwhile, holds.
pub(crate) struct NodeChange<'a> {
    cache: &'a Cache,
    node: NodeId,
    /// The node has names here, or is pinned.
    counted: bool,
    /// What the node's `spoiled` was before.
    before: u64,
    /// Until when attributes of before it could have been kept.
    until: Option<Instant>,
    /// Of after it began.
    changes: u64,
    spoiled: u64,
    strays: u64,
    /// What was answered is kept: there is nothing left to do.
    over: bool,
}

impl NodeChange<'_> {
    /// Whether nothing happened to the node between another change, which [`NodeChange::wrote`]
    /// answered with this, and this one.
    pub(crate) fn follows(&self, after: u64) -> bool {
        self.counted && self.before == after
    }

    /// The answer to a write came with the attributes after it; and all that the file holds is known,
    /// if it is short. Kept if nothing else happened to the node since the change began.
    pub(crate) fn wrote(mut self, attr: &Attr, contents: Option<Arc<Short>>) -> Option<u64> {
        // The page cache's inodes come and go under this.
        let _alone = self.cache.without_inode(self.node)?;
        let mut state = lock(&self.cache.dentries.0);
        let strays = state.strays;
        state.disturbed += 1;
        let known = state.nodes.get_mut(&self.node)?;
        let nothing_else = self.counted
            && known.changing == 1
            && known.changes == self.changes
            && known.spoiled == self.spoiled
            && strays == self.strays;
        if !nothing_else || known.lease == 0 || attr.nlink != 1 {
            return None;
        }
        let until = self.until?;
        // Others asked for contents meanwhile, perhaps.
        known.stale();
        known.attr = Some((*attr, until));
        known.changing -= 1;
        known.changes += 1;
        debug_assert!(known.pins > 0, "who writes has it open");
        self.over = true;
        let spoiled = known.spoiled;
        if let Some(contents) = contents {
            state.keep_contents(self.node, contents);
        }
        Some(spoiled)
    }
}

impl Drop for NodeChange<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let mut left = Left::default();
        {
            let mut state = lock(&self.cache.dentries.0);
            state.disturbed += 1;
            if let Some(known) = state.nodes.get_mut(&self.node) {
                known.stale();
                if self.counted {
                    known.changing -= 1;
                    known.changes += 1;
                }
                state.settle(self.node, &mut left);
            }
        }
        left.tell(&*self.cache.backend);
    }
}

/// A change of a name that this client asks the server for.
pub(crate) struct Change<'a> {
    cache: &'a Arc<Cache>,
    parent: NodeId,
    name: &'a OsStr,
    /// Of after it began.
    ticket: Ticket,
    /// What the name led to is told to be gone after the change: it does not wait for that.
    left: Left,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut left = std::mem::take(&mut self.left);
        {
            let mut state = lock(&self.cache.dentries.0);
            let known = state.nodes.get_mut(&self.parent).expect("it changes");
            known.changing -= 1;
            known.changes += 1;
            state.settle(self.parent, &mut left);
        }
        left.tell(&*self.cache.backend);
    }
}

impl Change<'_> {
    /// What the name led to, if nobody needs it any more: to be forgotten by who asks, and how often.
    pub(crate) fn forgets(&mut self) -> Option<(NodeId, u64)> {
        match self.left.forgets[..] {
            [one] if one.1 > 0 => self.left.forgets.pop(),
            _ => None,
        }
    }

    /// The name was made: it is this now.
    pub(crate) fn made(&self, entry: &Entry) -> Pinned {
        let looked = Looked {
            entry_ttl: KEPT,
            ..Looked::default()
        };
        self.made_leased(entry, &looked)
    }

    /// As `made`, with what the answer says of keeping it.
    pub(crate) fn made_leased(&self, entry: &Entry, looked: &Looked) -> Pinned {
        let mut left = Left::default();
        {
            // The page cache's inodes come and go under this.
            let alone = self.cache.without_inode(entry.node);
            let mut state = lock(&self.cache.dentries.0);
            state.looked_up(entry);
            state.nodes.get_mut(&entry.node).expect("looked up").pins += 1;
            state.keep_node(entry, looked, alone.is_some(), &self.ticket, &mut left);
            state.leased(self.parent, looked.parent_lease, &self.ticket, &mut left);
            let parent = state.nodes.get(&self.parent).expect("it changes");
            let alone = parent.changing == 1 && parent.changes == self.ticket.changes;
            // One that came with this was asked for before.
            let all_along =
                parent.lease == self.ticket.lease || parent.lease == looked.parent_lease;
            if alone && parent.lease != 0 && all_along {
                let until = Instant::now() + looked.entry_ttl.min(KEPT);
                state.insert_name(self.parent, self.name, Some(entry.node), until, &mut left);
            }
        }
        left.tell(&*self.cache.backend);
        Pinned {
            cache: Arc::downgrade(self.cache),
            node: entry.node,
        }
    }
}

impl State {
    /// Counts a lookup that the server has answered.
    fn looked_up(&mut self, entry: &Entry) {
        let known = self.nodes.entry(entry.node).or_default();
        known.lookups += u64::from(entry.node != ROOT);
        known.kind = entry.attr.mode & libc::S_IFMT;
    }

    /// Keeps what came with a node's name, unless the page cache has the node.
    fn keep_node(
        &mut self,
        entry: &Entry,
        looked: &Looked,
        alone: bool,
        ticket: &Ticket,
        left: &mut Left,
    ) {
        self.node_leased(entry.node, looked.node_lease, alone, ticket, left);
        if alone {
            self.keep_attr(entry.node, &entry.attr, ticket, looked.attr_ttl);
        }
    }

    /// A node's lease came with an answer. It is given back if the page cache has the node.
    fn node_leased(
        &mut self,
        node: NodeId,
        lease: u64,
        alone: bool,
        ticket: &Ticket,
        left: &mut Left,
    ) {
        if alone {
            self.leased(node, lease, ticket, left);
        } else if lease != 0 {
            left.leases.push((node, lease));
        }
    }

    /// Keeps a name that was asked for with a ticket, if it still is so.
    fn keep_name(
        &mut self,
        parent: NodeId,
        name: &OsStr,
        looked: &Looked,
        ticket: &Ticket,
        left: &mut Left,
    ) {
        let directory = self.nodes.get(&parent).expect("made by the ticket");
        // One that came since may be of after a recall, and the answer of before it.
        let all_along = directory.lease == ticket.lease || self.disturbed == ticket.disturbed;
        if directory.lease != 0
            && all_along
            && directory.changing == 0
            && directory.changes == ticket.changes
        {
            let until = Instant::now() + looked.entry_ttl;
            let node = looked.entry.map(|entry| entry.node);
            self.insert_name(parent, name, node, until, left);
        }
    }

    /// Keeps attributes that came with a lease. With several names, what is done to another name
    /// changes them unseen.
    fn keep_attr(&mut self, node: NodeId, attr: &Attr, ticket: &Ticket, ttl: Duration) {
        let known = self.nodes.get_mut(&node).expect("it was looked up");
        let single = attr.nlink == 1 || known.kind == libc::S_IFDIR;
        if single && known.lease != 0 && known.changing == 0 && self.disturbed == ticket.disturbed {
            known.attr = Some((*attr, Instant::now() + ttl));
        }
    }
}

/// Whether so many are most of all.
fn is_most(some: usize, all: usize) -> bool {
    some > 0 && some * 4 >= all * 3
}

/// Whether there was no room for a request.
fn is_busy<T>(answer: &io::Result<T>) -> bool {
    matches!(answer, Err(e) if e.raw_os_error() == Some(libc::EAGAIN))
}

impl State {
    /// A node's contents are about to be asked for.
    fn asked(&mut self, node: NodeId) -> Asked {
        let ticket = self.ticket(node);
        Asked {
            node,
            ticket,
            spoiled: self.nodes[&node].spoiled,
        }
    }

    /// Keeps contents under the node's lease, if nothing happened to it since they were asked for.
    fn keep_short(&mut self, asked: &Asked, short: &Arc<Short>) -> bool {
        let known = self.nodes.get_mut(&asked.node).expect("pinned");
        // A recall of a lease that was not known yet may have been of this one.
        let same = known.spoiled == asked.spoiled && self.strays == asked.ticket.strays;
        let keep = same && known.lease != 0;
        if keep {
            self.keep_contents(asked.node, short.clone());
        }
        keep
    }

    /// Keeps a node's contents, and lets go of those that were kept first when there are too many bytes.
    fn keep_contents(&mut self, node: NodeId, short: Arc<Short>) {
        let size = short.bytes.len() + CONTENTS;
        self.nodes.get_mut(&node).expect("pinned").short = Some(short);
        self.contents.push_back((node, size));
        self.contents_size += size;
        while self.contents_size > MOST_CONTENTS {
            let (oldest, size) = self.contents.pop_front().expect("they sum up to more");
            self.contents_size -= size;
            if let Some(known) = self.nodes.get_mut(&oldest) {
                known.drop_contents();
            }
        }
    }

    /// A short file of a directory is opened. What is to be asked for ahead then, in requests.
    fn opened(&mut self, directory: NodeId, node: NodeId) -> Vec<Vec<Asked>> {
        let Some(known) = self.nodes.get_mut(&directory) else {
            return Vec::new();
        };
        let order = known.order.get_or_insert_default();
        let place = order.files.iter().take(SKIPS).position(|&n| n == node);
        let Some(place) = place else {
            order.run = order.run.min(0);
            return Vec::new();
        };
        order.files.drain(..=place);
        order.seen = order.seen.saturating_sub(place + 1);
        order.run = order.run.saturating_add(1);
        self.ahead(directory)
    }

    fn ahead(&mut self, directory: NodeId) -> Vec<Vec<Asked>> {
        let mut batches = Vec::new();
        let Some(known) = self.nodes.get_mut(&directory) else {
            return batches;
        };
        let Some(mut order) = known.order.take() else {
            return batches;
        };
        let now = Instant::now();
        let most = AHEAD.max(order.run.max(0) as usize).min(FAR_AHEAD);
        while order.run >= RUN
            && order.seen <= most - AHEAD_MAX
            && order.seen < order.files.len()
            && self.requests < REQUESTS
        {
            let (mut batch, mut room) = (Vec::new(), PEEK_ROOM);
            for &node in order.files.range(order.seen..) {
                let Some(size) = self.wants(node, now) else {
                    order.seen += 1;
                    continue;
                };
                let takes = size_of::<PeekedHead>() + size.next_multiple_of(8);
                if batch.len() == AHEAD_MAX || takes > room || order.seen >= most {
                    break;
                }
                (room, order.seen) = (room - takes, order.seen + 1);
                let asked = self.asked(node);
                let known = self.nodes.get_mut(&node).expect("looked at");
                known.asked = true;
                known.pins += 1;
                batch.push(asked);
            }
            if batch.is_empty() {
                break;
            }
            self.requests += 1;
            batches.push(batch);
        }
        let known = self.nodes.get_mut(&directory).expect("it was there");
        known.order = Some(order);
        batches
    }

    /// What a name leads to, if that and its attributes are known and still hold.
    fn holds(&self, name: &Name, now: Instant) -> Option<(NodeId, Attr)> {
        let node = name.node.filter(|_| now < name.until)?;
        let (attr, until) = self.nodes.get(&node)?.attr?;
        (now < until).then_some((node, attr))
    }

    fn known_as(&self, parent: NodeId, name: &OsStr, now: Instant) -> Option<(NodeId, Attr)> {
        self.holds(self.nodes.get(&parent)?.names.get(name)?, now)
    }

    /// The size of a short file whose contents may be kept and are not.
    fn wants(&self, node: NodeId, now: Instant) -> Option<usize> {
        let known = self.nodes.get(&node)?;
        let (attr, until) = known.attr?;
        let wants = known.lease != 0 && !known.asked && known.short.is_none() && now < until;
        let size = usize::try_from(attr.size).ok()?;
        (wants && size <= PEEK_MAX).then_some(size)
    }

    /// A directory's listing begins, or goes on, with these nodes.
    fn list_order(
        &mut self,
        directory: NodeId,
        nodes: impl Iterator<Item = (NodeId, Attr)>,
        begins: bool,
    ) {
        let Some(known) = self.nodes.get_mut(&directory) else {
            return;
        };
        let order = known.order.get_or_insert_default();
        if begins {
            **order = Order::default();
        }
        let short = nodes.filter(|(_, attr)| {
            attr.mode & libc::S_IFMT == libc::S_IFREG && attr.size <= PEEK_MAX as u64
        });
        order.files.extend(short.map(|(node, _)| node));
        // Who opens none of them lists on and on.
        let over = order.files.len().saturating_sub(MOST);
        order.files.drain(..over);
        order.seen = order.seen.saturating_sub(over);
    }
}

impl Dentries {
    /// The server was told of files that were read, or has to be told again.
    fn told(&self, used: &[NodeId], answer: &io::Result<Vec<io::Result<Vec<u8>>>>) {
        let mut state = lock(&self.0);
        if is_busy(answer) && state.used.len() < MOST_USED {
            state.used.extend_from_slice(used);
        }
    }

    fn take_used(&self) -> Vec<NodeId> {
        let mut state = lock(&self.0);
        let most = state.used.len().min(AHEAD_MAX);
        state.used.drain(..most).collect()
    }

    fn is_asked(&self, node: NodeId) -> bool {
        lock(&self.0).nodes.get(&node).is_some_and(|n| n.asked)
    }

    fn unpin(&self, backend: &dyn Backend, node: NodeId) {
        let mut left = Left::default();
        {
            let mut state = lock(&self.0);
            let Some(known) = state.nodes.get_mut(&node) else {
                return;
            };
            known.pins -= 1;
            state.settle(node, &mut left);
        }
        left.tell(backend);
    }

    /// The page cache has the node from now on. Called with the lock of its inodes.
    pub(crate) fn taken(&self, backend: &dyn Backend, node: NodeId) {
        let lease = {
            let mut state = lock(&self.0);
            state.disturbed += 1;
            let Some(known) = state.nodes.get_mut(&node) else {
                return;
            };
            known.stale();
            std::mem::take(&mut known.lease)
        };
        if lease != 0 {
            backend.return_lease(node, lease, Lease::None);
        }
    }

    /// Gives a lease back, if it is one of these; else the page cache may have it.
    pub(crate) fn recalled(&self, backend: &dyn Backend, recall: &Recall) -> bool {
        let mut left = Left::default();
        let mine = {
            let mut state = lock(&self.0);
            let known = state.nodes.get(&recall.node);
            let mine = known.is_some_and(|known| known.lease == recall.seq);
            match mine {
                true => state.unleased(recall.node, &mut left),
                false => {
                    state.strays += 1;
                    state.disturbed += 1;
                }
            }
            mine
        };
        if mine {
            backend.return_lease(recall.node, recall.seq, Lease::None);
        }
        left.tell(backend);
        mine
    }

    /// A server came back: nothing is leased, and only what is in use is known.
    pub(crate) fn reattached(&self, backend: &dyn Backend) {
        let mut left = Left::default();
        {
            let mut state = lock(&self.0);
            state.strays += 1;
            let nodes: Vec<NodeId> = state.nodes.keys().copied().collect();
            for node in nodes {
                state.unleased(node, &mut left);
            }
            state.clock.clear();
            state.used.clear();
        }
        left.tell(backend);
    }

    /// Whether nothing was recalled or changed since this was last asked of a directory.
    pub(crate) fn is_calm(&self, node: NodeId) -> bool {
        let mut state = lock(&self.0);
        let now = state.disturbed;
        let known = state.nodes.get_mut(&node);
        known.is_some_and(|known| {
            let order = known.order.get_or_insert_default();
            std::mem::replace(&mut order.disturbed, now) == now
        })
    }

    /// Whether what is in a directory seems to be known, by a few of its names.
    pub(crate) fn knows_most(&self, node: NodeId) -> bool {
        let state = lock(&self.0);
        let now = Instant::now();
        let Some(known) = state.nodes.get(&node) else {
            return false;
        };
        let few = known.names.values().take(LOOKS);
        let (mut seen, mut holds) = (0, 0);
        for name in few.filter(|name| name.node.is_some()) {
            seen += 1;
            holds += usize::from(state.holds(name, now).is_some());
        }
        holds >= FEW && is_most(holds, seen)
    }

    /// Whether a name of a directory was looked up since this was last asked.
    pub(crate) fn take_searched(&self, node: NodeId) -> bool {
        let mut state = lock(&self.0);
        let known = state.nodes.get_mut(&node);
        known.is_some_and(|known| std::mem::take(&mut known.searched))
    }

    /// A node's contents, if they are kept and still are so.
    pub(crate) fn short(&self, node: NodeId) -> Option<Arc<Short>> {
        let state = lock(&self.0);
        let known = state.nodes.get(&node)?;
        let (_, until) = known.attr?;
        known.short.clone().filter(|_| Instant::now() < until)
    }
}

/// What is kept of a name.
enum Kept {
    Is(Found),
    Absent,
    Ask(Ticket),
}

impl Cache {
    fn kept(self: &Arc<Self>, parent: NodeId, name: &OsStr, with_attr: bool) -> Kept {
        let mut state = lock(&self.dentries.0);
        let ticket = state.ticket(parent);
        let known = state.nodes.get_mut(&parent).expect("made by `ticket`");
        known.searched = true;
        let Some(found) = known.names.get_mut(name) else {
            return Kept::Ask(ticket);
        };
        let now = Instant::now();
        if found.until <= now {
            return Kept::Ask(ticket);
        }
        found.used = true;
        let Some(node) = found.node else {
            return Kept::Absent;
        };
        let child = state.nodes.get_mut(&node).expect("names lead to nodes");
        let attr = child.attr.filter(|(_, until)| now < *until);
        if with_attr && attr.is_none() {
            return Kept::Ask(ticket);
        }
        child.pins += 1;
        Kept::Is(Found {
            pin: self.pinned(node),
            kind: child.kind,
            attr: attr.map(|(attr, _)| attr),
        })
    }

    fn pinned(self: &Arc<Self>, node: NodeId) -> Pinned {
        Pinned {
            cache: Arc::downgrade(self),
            node,
        }
    }

    /// The root directory.
    pub(crate) fn root(self: &Arc<Self>) -> Found {
        let mut state = lock(&self.dentries.0);
        let known = state.nodes.entry(ROOT).or_default();
        known.pins += 1;
        Found {
            pin: self.pinned(ROOT),
            kind: libc::S_IFDIR,
            attr: None,
        }
    }

    /// Pins a node once more.
    pub(crate) fn pin(self: &Arc<Self>, pin: &Pinned) -> Pinned {
        let mut state = lock(&self.dentries.0);
        state.nodes.get_mut(&pin.node).expect("pinned").pins += 1;
        self.pinned(pin.node)
    }

    /// Whether a name is known to be there.
    pub(crate) fn is_kept(&self, parent: NodeId, name: &OsStr) -> bool {
        let state = lock(&self.dentries.0);
        let known = state.nodes.get(&parent);
        let found = known.and_then(|known| known.names.get(name));
        found.is_some_and(|found| found.node.is_some())
    }

    /// Finds a name, here or at the server; its attributes are known then if they are asked for.
    pub(crate) fn find_name(
        self: &Arc<Self>,
        parent: NodeId,
        name: &OsStr,
        with_attr: bool,
    ) -> io::Result<Found> {
        let ticket = match self.kept(parent, name, with_attr) {
            Kept::Is(found) => return Ok(found),
            Kept::Absent => return Err(errno(libc::ENOENT)),
            Kept::Ask(ticket) => ticket,
        };
        let looked = self.backend.lookup_leased(parent, name)?;
        let entry = looked.entry;
        self.looked(parent, name, &looked, &ticket);
        let entry = entry.ok_or_else(|| errno(libc::ENOENT))?;
        Ok(Found {
            pin: self.pinned(entry.node),
            kind: entry.attr.mode & libc::S_IFMT,
            attr: Some(entry.attr),
        })
    }

    /// Keeps what a lookup has answered; the node is pinned.
    fn looked(self: &Arc<Self>, parent: NodeId, name: &OsStr, looked: &Looked, ticket: &Ticket) {
        let mut left = Left::default();
        {
            // The page cache's inodes come and go under this.
            let alone = looked.entry.map(|entry| self.without_inode(entry.node));
            let mut state = lock(&self.dentries.0);
            state.leased(parent, looked.parent_lease, ticket, &mut left);
            if let Some(entry) = &looked.entry {
                state.looked_up(entry);
                let known = state.nodes.get_mut(&entry.node).expect("looked up");
                known.pins += 1;
                state.keep_node(entry, looked, alone.flatten().is_some(), ticket, &mut left);
            }
            state.keep_name(parent, name, looked, ticket, &mut left);
        }
        left.tell(&*self.backend);
    }

    /// Keeps a listing's names. What can't be kept is forgotten.
    pub(crate) fn listed(
        self: &Arc<Self>,
        node: NodeId,
        list: &Listing,
        ticket: &Ticket,
        begins: bool,
    ) {
        let mut left = Left::default();
        lock(&self.dentries.0).leased(node, list.lease, ticket, &mut left);
        for one in &list.entries {
            let Some(looked) = &one.looked else { continue };
            let Some(entry) = &looked.entry else { continue };
            let alone = self.without_inode(entry.node);
            let mut state = lock(&self.dentries.0);
            state.looked_up(entry);
            state.keep_node(entry, looked, alone.is_some(), ticket, &mut left);
            state.keep_name(node, &one.name, looked, ticket, &mut left);
            state.settle(entry.node, &mut left);
        }
        let batches = {
            let mut state = lock(&self.dentries.0);
            let entries = list.entries.iter().filter_map(|one| one.looked?.entry);
            let nodes = entries.map(|entry| (entry.node, entry.attr));
            state.list_order(node, nodes, begins);
            state.ahead(node)
        };
        left.tell(&*self.backend);
        self.look_ahead(node, batches);
    }

    /// As `listed`, of a listing that tells names only, if what most of them lead to is known; says
    /// whether it is.
    pub(crate) fn listed_names(
        self: &Arc<Self>,
        node: NodeId,
        list: &Listing,
        begins: bool,
    ) -> bool {
        let batches = {
            let mut state = lock(&self.dentries.0);
            let now = Instant::now();
            let names = list.entries.iter().map(|one| one.name.as_os_str());
            let names = names.filter(|name| !matches!(name.as_bytes(), b"." | b".."));
            let of: Vec<_> = names.map(|name| state.known_as(node, name, now)).collect();
            if !is_most(of.iter().flatten().count(), of.len()) {
                return false;
            }
            state.list_order(node, of.into_iter().flatten(), begins);
            state.ahead(node)
        };
        self.look_ahead(node, batches);
        true
    }

    /// A ticket for what is asked about a directory that is pinned.
    pub(crate) fn ticket(&self, pin: &Pinned) -> Ticket {
        lock(&self.dentries.0).ticket(pin.node)
    }

    /// What a short file of a directory holds: kept, or asked for. Nothing where that can't be known
    /// to stay so.
    ///
    /// # Errors
    /// EFBIG for a file that isn't short, EAGAIN where there is no lease, and what opening it gives.
    pub(crate) fn contents(
        self: &Arc<Self>,
        parent: NodeId,
        pin: &Pinned,
    ) -> io::Result<Option<Arc<Short>>> {
        let batches = lock(&self.dentries.0).opened(parent, pin.node);
        self.look_ahead(parent, batches);
        if let Some(short) = self.dentries.short(pin.node) {
            return Ok(Some(short));
        }
        if self.dentries.is_asked(pin.node) {
            let mut came = || !self.dentries.is_asked(pin.node);
            self.backend.wait(&mut came);
            if let Some(short) = self.dentries.short(pin.node) {
                return Ok(Some(short));
            }
        }
        let asked = lock(&self.dentries.0).asked(pin.node);
        let (lease, bytes) = self.backend.peek(pin.node)?;
        let short = Short::new(bytes, false);
        let mut left = Left::default();
        let kept = {
            let alone = self.without_inode(pin.node);
            let mut state = lock(&self.dentries.0);
            let ticket = &asked.ticket;
            state.node_leased(pin.node, lease, alone.is_some(), ticket, &mut left);
            alone.is_some() && state.keep_short(&asked, &short)
        };
        left.tell(&*self.backend);
        Ok(kept.then_some(short))
    }

    /// Asks for the contents of files that nobody opened yet. They are pinned.
    fn look_ahead(self: &Arc<Self>, directory: NodeId, batches: Vec<Vec<Asked>>) {
        for batch in batches {
            let nodes: Vec<NodeId> = batch.iter().map(|asked| asked.node).collect();
            let used = self.dentries.take_used();
            let (cache, told) = (Arc::downgrade(self), used.clone());
            self.backend.peek_ahead(
                &nodes,
                &used,
                Box::new(move |found| {
                    if let Some(cache) = cache.upgrade() {
                        cache.dentries.told(&told, &found);
                        cache.looked_ahead(directory, &batch, found);
                    }
                }),
            );
        }
    }

    /// A file that came ahead was read.
    pub(crate) fn was_read(self: &Arc<Self>, node: NodeId) {
        let many = {
            let mut state = lock(&self.dentries.0);
            state.used.push(node);
            state.used.len() > AHEAD_MAX
        };
        if many {
            self.tell_used();
        }
    }

    /// Tells the server which files that came ahead were read.
    pub(crate) fn tell_used(self: &Arc<Self>) {
        let used = self.dentries.take_used();
        if used.is_empty() {
            return;
        }
        let (cache, told) = (Arc::downgrade(self), used.clone());
        self.backend.peek_ahead(
            &[],
            &used,
            Box::new(move |found| {
                if let Some(cache) = cache.upgrade() {
                    cache.dentries.told(&told, &found);
                }
            }),
        );
    }

    fn looked_ahead(
        self: &Arc<Self>,
        directory: NodeId,
        batch: &[Asked],
        found: io::Result<Vec<io::Result<Vec<u8>>>>,
    ) {
        let mut left = Left::default();
        // There was no room for the request, which says nothing.
        let busy = is_busy(&found);
        let found = found.unwrap_or_default();
        let in_vain = !busy && found.iter().all(Result::is_err);
        for (asked, found) in batch.iter().zip(found) {
            let Ok(bytes) = found else { continue };
            let short = Short::new(bytes, true);
            let alone = self.without_inode(asked.node);
            if alone.is_some() {
                lock(&self.dentries.0).keep_short(asked, &short);
            }
        }
        {
            let mut state = lock(&self.dentries.0);
            state.requests -= 1;
            if in_vain && let Some(known) = state.nodes.get_mut(&directory) {
                known.order.get_or_insert_default().run = IN_VAIN;
            }
            for asked in batch {
                let known = state.nodes.get_mut(&asked.node).expect("pinned");
                known.asked = false;
                known.pins -= 1;
                state.settle(asked.node, &mut left);
            }
        }
        left.tell(&*self.backend);
    }

    /// This client is about to change something of a node.
    pub(crate) fn change_node(&self, node: NodeId) -> NodeChange<'_> {
        let mut state = lock(&self.dentries.0);
        state.disturbed += 1;
        let strays = state.strays;
        let mut change = NodeChange {
            cache: self,
            node,
            counted: false,
            before: 0,
            until: None,
            changes: 0,
            spoiled: 0,
            strays,
            over: false,
        };
        if let Some(known) = state.nodes.get_mut(&node) {
            change.counted = true;
            change.before = known.spoiled;
            change.until = known.attr.map(|(_, until)| until);
            known.stale();
            known.changing += 1;
            known.changes += 1;
            (change.changes, change.spoiled) = (known.changes, known.spoiled);
        }
        change
    }

    /// This client is about to change a name: nothing is known of it until that is done.
    pub(crate) fn change<'a>(self: &'a Arc<Self>, parent: NodeId, name: &'a OsStr) -> Change<'a> {
        let mut left = Left::default();
        let ticket = {
            let mut state = lock(&self.dentries.0);
            state.disturbed += 1;
            let known = state.nodes.entry(parent).or_default();
            known.changing += 1;
            known.changes += 1;
            known.stale();
            let child = known.names.remove(name).and_then(|name| name.node);
            let ticket = state.ticket(parent);
            if let Some(child) = child {
                let known = state.nodes.get_mut(&child).expect("names lead to nodes");
                known.links -= 1;
                // Its number of links, for one.
                known.attr = None;
                state.settle(child, &mut left);
            }
            ticket
        };
        Change {
            cache: self,
            parent,
            name,
            ticket,
            left,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_bounded_by_bytes() {
        const LEN: usize = 4000;
        const FILES: usize = MOST_CONTENTS / LEN + 100;
        let mut state = State::default();
        let mut kept = Vec::new();
        for node in 2..FILES as u64 {
            state.nodes.entry(node).or_default();
            let short = Short::new(vec![1; LEN], false);
            kept.push((node, short.clone()));
            state.keep_contents(node, short);
            assert!(state.contents_size <= MOST_CONTENTS);
        }
        let valid = |short: &Short| short.read(&mut [0; 8], 0).is_some();
        let holds: Vec<bool> = kept.iter().map(|(_, short)| valid(short)).collect();
        let first = holds.iter().position(|&holds| holds).expect("the last");
        assert!(first > 0 && holds[first..].iter().all(|&holds| holds));
        assert_eq!(holds.len() - first, MOST_CONTENTS / (LEN + CONTENTS));
        for (node, short) in &kept {
            assert_eq!(state.nodes[node].short.is_some(), valid(short));
        }
        // What is written again and again is one file's, but counts each time; so what is small goes, too.
        for _ in 0..2 * MOST_CONTENTS / CONTENTS {
            state.keep_contents(2, Short::new(Vec::new(), false));
        }
        assert!(state.contents.len() <= MOST_CONTENTS / CONTENTS);
        let left = state.nodes.values().filter(|known| known.short.is_some());
        assert!(left.count() <= 1);
    }
}
