//! Keeps the book: what a successor of this worker needs of the kernel's nodes, its open files and its requests.

use std::cmp::Reverse;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use foldhash::{HashMap, HashSet};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, getppid, kill_process};
use rustix::time::ClockId;
use smallvec::SmallVec;
use uvfs_proto::abi::{InitIn, UNIQUE_RESEND, WriteFlags};
use uvfs_proto::request::Operation;
use uvfs_queue::placement;
use uvfs_queue::shm::{SAME_IN_ALL, SharedMemory};
use uvfs_sys::lock;
use uvfs_sys::process::Orphans;

use super::book::{self, Book, EntriesAt, Head, Intent, Kind, Record};
use super::keeper::READY;
use crate::fs::{
    Again, Errno, FileSystem, Handle, MOST_SAVED, Node, OFlags, ROOT, Survive, Unlinked,
};
use crate::notify::Writers;
use crate::reply::{Outcome, Reply};
use crate::request::{DEPTH, Request};

/// How many locks the nodes and handles are spread over.
const SHARDS: usize = 64;
/// After so long the kernel has sent again all that it had.
pub(crate) const SETTLES: Duration = Duration::from_secs(5);

/// There is one more thread to restore nodes for each so many of them.
const NODES_A_THREAD: usize = 4096;

/// Each has slots for as many requests as it has under way.
const MOST_QUEUES: usize = book::SLOTS / DEPTH;

/// Places of the book, and what is there.
type Places = Vec<(usize, Head)>;

/// Where a node is in the book.
struct Place {
    index: usize,
    lookups: u64,
    /// The request that last added lookups, and how many.
    by: u64,
    added: u64,
}

/// An open file or directory: a file system may give one number to several.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Open {
    kind: Kind,
    fh: u64,
    node: u64,
}

impl Open {
    fn new(kind: Kind, fh: u64, node: u64) -> Self {
        Self { kind, fh, node }
    }
}

#[derive(Default)]
struct Shard {
    nodes: HashMap<u64, Place>,
    handles: HashMap<Open, SmallVec<[usize; 1]>>,
    /// Requests that must not be done twice: their slots, and what an earlier worker had begun.
    under_way: HashMap<u64, (usize, Option<Again>)>,
}

/// The places of the book that are free.
#[derive(Default)]
struct Free {
    /// Behind it none was ever used.
    next: usize,
    before: Vec<usize>,
    stamp: u32,
}

/// The request that last added lookups of a node, the node, and how many it added.
type Added = (u64, u64, u64);

/// What the requests that earlier workers did not answer have done. Few come again, so all but the intents are lists.
#[derive(Default)]
struct Left {
    intents: HashMap<u64, Intent>,
    lookups: Vec<Added>,
    /// The request, and what it opened.
    handles: Vec<(u64, Open)>,
}

/// What a successor of this worker needs to serve on.
pub struct Ledger {
    book: Book,
    writers: Writers,
    keeper: Pid,
    shards: [Mutex<Shard>; SHARDS],
    free: Mutex<Free>,
    left: Mutex<Left>,
    orphans: Mutex<Option<Orphans>>,
    /// The connections that an earlier worker has left.
    devices: Mutex<Vec<OwnedFd>>,
    /// The memory of the entries of io_uring that it has left, and the size of a payload.
    entries: Mutex<Option<(Arc<SharedMemory>, usize)>>,
    /// Ends of pipes whose other ends the rings of earlier workers hold, and their places in the book.
    pipes: Mutex<Vec<(usize, OwnedFd)>>,
    /// The same of this worker.
    own_pipe: Mutex<Option<OwnedFd>>,
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger")
            .field("generation", &self.book.generation())
            .finish_non_exhaustive()
    }
}

/// The shard of a node, a handle or a request.
fn shard(number: u64) -> usize {
    uvfs_sys::spread(number, SHARDS)
}

/// A request's number, whether it came for the first time or again.
fn number(unique: u64) -> u64 {
    unique & !UNIQUE_RESEND
}

/// Whether a request must not be done twice.
fn is_once(operation: &Operation<'_>) -> bool {
    use Operation::*;
    match operation {
        Symlink { .. }
        | Mknod(..)
        | Mkdir(..)
        | Unlink(_)
        | Rmdir(_)
        | Rename { .. }
        | Rename2 { .. }
        | Link(..)
        | Create(..)
        | Tmpfile(..)
        | Setxattr(..)
        | Removexattr(_) => true,
        Write(arg) => {
            let cached = arg.write_flags & WriteFlags::CACHE.bits() != 0;
            !cached && OFlags::from_bits_retain(arg.flags).contains(OFlags::APPEND)
        }
        _ => false,
    }
}

impl Ledger {
    /// Over a book; `orphans` are the descriptors that an earlier worker has left.
    pub(super) fn new(book: Book, orphans: Option<Orphans>, keeper: Pid) -> Self {
        book.next_generation();
        // The mount ends with a first server that dies before it serves.
        if book.generation() > 1 {
            uvfs_sys::dying::arm();
        }
        let writers = book.writers();
        writers.clear();
        Self {
            book,
            writers,
            keeper,
            shards: std::array::from_fn(|_| Mutex::default()),
            free: Mutex::default(),
            left: Mutex::default(),
            orphans: Mutex::new(orphans),
            devices: Mutex::default(),
            entries: Mutex::default(),
            pipes: Mutex::default(),
            own_pipe: Mutex::default(),
        }
    }

    /// The process that keeps the mount; none if it is dead.
    pub fn keeper(&self) -> Option<Pid> {
        // Another process is then this one's parent, which is not always the first one.
        getppid().filter(|parent| *parent == self.keeper)
    }

    /// Tells the keeper that this worker serves, or has another entry of io_uring.
    pub(crate) fn tell_ready(&self) {
        if let Some(keeper) = self.keeper() {
            let _ = kill_process(keeper, READY);
        }
    }

    /// Where the threads that notify are noted.
    pub(crate) fn writers(&self) -> &Writers {
        &self.writers
    }

    /// How many workers there were, this one included.
    pub fn generation(&self) -> u64 {
        self.book.generation()
    }

    /// How many programs have served the mount: the number moves when another one does.
    pub fn programs(&self) -> u64 {
        self.book.programs()
    }

    /// Requests that the kernel has sent again.
    pub fn sent_again(&self) -> u64 {
        self.book.sent_again()
    }

    fn shard(&self, number: u64) -> &Mutex<Shard> {
        &self.shards[shard(number)]
    }

    /// For tests.
    pub(super) fn book(&self) -> &Book {
        &self.book
    }

    /// Notes nodes and handles as if a request had given them to the kernel. For tests.
    pub(super) fn note_all(
        &self,
        fs: &dyn Survive,
        nodes: &[Node],
        handles: &[(bool, Node, Handle)],
    ) {
        for node in nodes {
            self.found(fs, node.0, 1);
        }
        for (directory, node, fh) in handles {
            let kind = match directory {
                true => Kind::Directory,
                false => Kind::File,
            };
            self.opened(fs, Open::new(kind, fh.0, node.0), 1);
        }
    }

    /// The INIT that an earlier worker has answered.
    pub(crate) fn init(&self) -> io::Result<Option<InitIn>> {
        self.book.init()
    }

    /// INIT is answered.
    pub(crate) fn agreed(&self, init: &InitIn) {
        self.book.set_init(init);
    }

    /// The connections to the kernel, one for each queue, which `make` makes if there is no earlier worker.
    pub(crate) fn devices(
        &self,
        make: impl FnOnce() -> io::Result<Vec<OwnedFd>>,
    ) -> io::Result<Vec<OwnedFd>> {
        let left = std::mem::take(&mut *lock(&self.devices));
        if !left.is_empty() {
            return Ok(left);
        }
        let made = make()?;
        if made.len() > MOST_QUEUES {
            return Err(too_many_cores());
        }
        let numbers: Vec<i32> = made.iter().map(AsRawFd::as_raw_fd).collect();
        self.book.set_devices(&numbers);
        Ok(made)
    }

    /// The memory of the entries of so many queues of io_uring, `len(payload)` bytes, which is at the same address in each worker;
    /// and the size of a payload, which is `payload` if there is no earlier worker.
    pub(crate) fn entries(
        &self,
        queues: usize,
        payload: usize,
        len: impl Fn(usize) -> usize,
    ) -> io::Result<(Arc<SharedMemory>, usize)> {
        // One more reads from `/dev/fuse`.
        if queues >= MOST_QUEUES {
            return Err(too_many_cores());
        }
        if let Some((memory, payload)) = lock(&self.entries).take() {
            return match memory.len() == len(payload).next_multiple_of(4096) {
                true => Ok((memory, payload)),
                false => Err(book::invalid("the size of the entries")),
            };
        }
        let make = |at| SharedMemory::create_at(c"uvfs-entries", len(payload), Some(at));
        let [first, second] = SAME_IN_ALL;
        let memory = make(first).or_else(|_| make(second))?;
        self.book.set_entries(EntriesAt {
            fd: memory.as_fd().as_raw_fd(),
            address: memory.address(),
            payload,
        });
        Ok((Arc::new(memory), payload))
    }

    /// An end of a pipe for the rings of this worker to hold. Once the last of them is gone, the next worker knows that none of
    /// their I/O is under way.
    pub(crate) fn pipe(&self) -> io::Result<OwnedFd> {
        let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        self.book.add_pipe(ours.as_raw_fd());
        *lock(&self.own_pipe) = Some(ours);
        Ok(theirs)
    }

    /// Waits until the rings of earlier workers are gone, at most for so long.
    pub(crate) fn rings_are_gone(&self, time: Duration) {
        let deadline = Instant::now() + time;
        for (place, pipe) in std::mem::take(&mut *lock(&self.pipes)) {
            let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now()));
            let mut pipe = [PollFd::new(&pipe, PollFlags::empty())];
            if !matches!(left.map(|left| poll(&mut pipe, Some(&left))), Ok(Ok(1))) {
                tracing::warn!("direct I/O of an earlier server may be under way");
            }
            // Before its number can be that of something else.
            self.book.remove_pipe(place);
        }
    }

    /// The descriptors that the file system of an earlier worker has kept open.
    pub(crate) fn kept(&self) -> Option<[OwnedFd; 2]> {
        let [one, other] = self.book.kept()?;
        let mut orphans = lock(&self.orphans);
        let orphans = orphans.as_mut()?;
        Some([orphans.claim(one).ok()?, orphans.claim(other).ok()?])
    }

    /// The next worker gets these descriptors.
    pub(crate) fn keep(&self, kept: [BorrowedFd<'_>; 2]) {
        self.book.keep(kept.map(|fd| fd.as_raw_fd()));
    }

    /// Whether the mount has ever had clients. The kernel may not have been told of what they changed.
    pub(crate) fn had_clients(&self) -> bool {
        self.book.had_clients()
    }

    /// There is a client.
    pub(crate) fn has_clients(&self) {
        self.book.has_clients();
    }

    /// Gives a file system the nodes and open files of the kernel's that an earlier worker has left, and closes other
    /// descriptors that it has left. The nodes.
    pub(crate) fn restore(&self, fs: &dyn Survive) -> io::Result<Vec<Node>> {
        let Some(orphans) = lock(&self.orphans).take() else {
            return Ok(Vec::new());
        };
        self.book.check()?;
        let devices = self.book.devices()?;
        if devices.len() > MOST_QUEUES {
            return Err(book::invalid("too many connections"));
        }
        for device in devices {
            lock(&self.devices).push(orphans.claim(device)?);
        }
        if let Some(EntriesAt {
            fd,
            address,
            payload,
        }) = self.book.entries()?
        {
            let memory = SharedMemory::open_at(orphans.claim(fd)?, usize::MAX, Some(address))?;
            *lock(&self.entries) = Some((Arc::new(memory), payload));
        }
        for (place, pipe) in self.book.pipes() {
            match orphans.claim(pipe) {
                Ok(pipe) => lock(&self.pipes).push((place, pipe)),
                // A worker was killed after it noted that it is closed.
                Err(_) => self.book.remove_pipe(place),
            }
        }
        let mut left = Left::default();
        for intent in self.book.carry() {
            left.add(intent);
        }
        let (nodes, handles) = self.records();
        let threads = match fs.restores_in_parallel() {
            true => (nodes.len() / NODES_A_THREAD + 1).min(placement::allowed_cores()?.len()),
            false => 1,
        };
        let part = |n| self.restore_nodes(fs, &orphans, &nodes, (n, threads));
        let restored = thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|n| scope.spawn(move || part(n))).collect();
            let mut restored = part(0);
            for other in others {
                let other = other.join().unwrap_or_else(|panic| resume_unwind(panic));
                restored.extend(other);
            }
            restored
        });
        let added = restored.iter().filter(|(_, _, added)| *added > 0);
        left.lookups.extend(added);
        let mut buffer = [0; MOST_SAVED];
        for (index, head) in handles {
            let Some(record) = self.book.read(index, &head, &mut buffer) else {
                self.give_back(index);
                continue;
            };
            let (fh, node) = (Handle(record.id), Node(record.value));
            let directory = record.kind == Kind::Directory;
            let saved = record.saved;
            if let Err(error) = fs.restore_handle(directory, node, fh, saved, &orphans) {
                tracing::warn!(%node, %error, "an open file is lost");
                self.give_back(index);
                continue;
            }
            let open = Open::new(record.kind, record.id, record.value);
            left.handles.push((record.by, open));
            let mut shard = lock(self.shard(open.fh));
            shard.handles.entry(open).or_default().push(index);
        }
        fs.restored(&orphans);
        let closed = orphans.close();
        let generation = self.generation();
        tracing::info!(generation, nodes = restored.len(), closed, "goes on");
        *lock(&self.left) = left;
        Ok(restored.iter().map(|(_, node, _)| Node(*node)).collect())
    }

    /// Restores those of the nodes that are in this part of the shards, as (part, parts).
    fn restore_nodes(
        &self,
        fs: &dyn Survive,
        orphans: &Orphans,
        nodes: &Places,
        (part, parts): (usize, usize),
    ) -> Vec<Added> {
        let mut restored = Vec::with_capacity(nodes.len() / parts);
        let mut buffer = [0; MOST_SAVED];
        for (index, head) in nodes {
            if parts > 1 && shard(head.id) % parts != part {
                continue;
            }
            let Some(record) = self.book.read(*index, head, &mut buffer) else {
                self.give_back(*index);
                continue;
            };
            let node = Node(record.id);
            if lock(self.shard(record.id)).nodes.contains_key(&record.id) {
                // A worker was killed between writing the newer record and taking this away.
                self.give_back(*index);
                continue;
            }
            if let Err(error) = fs.restore_node(node, record.value, record.saved, orphans) {
                tracing::warn!(%node, %error, "a node is lost");
                self.give_back(*index);
                continue;
            }
            let place = Place {
                index: *index,
                lookups: record.value,
                by: record.by,
                added: record.added,
            };
            lock(self.shard(record.id)).nodes.insert(record.id, place);
            restored.push((record.by, record.id, record.added));
        }
        restored
    }

    /// The places of all nodes, the newest first, and of all handles.
    fn records(&self) -> (Places, Places) {
        let mut free = lock(&self.free);
        let (mut nodes, mut handles) = (Vec::new(), Vec::new());
        let (mut more, mut used) = (Vec::new(), HashSet::default());
        for (index, head) in self.book.heads() {
            free.next = index + 1;
            let Some(head) = head else {
                free.before.push(index);
                continue;
            };
            match head.kind {
                Kind::Node => nodes.push((index, head)),
                Kind::File | Kind::Directory => handles.push((index, head)),
                Kind::More => more.push(index),
            }
            used.extend(self.book.others(index, &head).unwrap_or_default());
            free.stamp = free.stamp.max(head.stamp);
        }
        // A worker was killed before it wrote the record that goes on here, or after it took that away.
        for index in more.into_iter().filter(|index| !used.contains(index)) {
            self.book.empty(index);
            free.before.push(index);
        }
        nodes.sort_unstable_by_key(|(_, head)| Reverse(head.stamp));
        (nodes, handles)
    }

    /// The kernel has sent again all that it had.
    pub(crate) fn settle(&self) {
        *lock(&self.left) = Left::default();
        self.book.settle();
    }

    fn place(&self) -> Result<(usize, u32), Errno> {
        let mut free = lock(&self.free);
        free.stamp = free.stamp.wrapping_add(1);
        let stamp = free.stamp;
        if let Some(index) = free.before.pop() {
            return Ok((index, stamp));
        }
        let index = free.next;
        if index == book::MOST_RECORDS {
            return Err(Errno::NFILE);
        }
        // In order: a successor reads up to the first place that was never used.
        self.book.empty(index);
        free.next += 1;
        Ok((index, stamp))
    }

    fn give_back(&self, index: usize) {
        let head = self.book.at(index);
        let others = head.and_then(|head| self.book.others(index, &head));
        for index in [index].into_iter().chain(others.unwrap_or_default()) {
            self.book.empty(index);
            lock(&self.free).before.push(index);
        }
    }

    /// Writes a record.
    fn put(
        &self,
        (kind, id): (Kind, u64),
        value: u64,
        (by, added): (u64, u64),
        saved: io::Result<Vec<u8>>,
    ) -> io::Result<usize> {
        let saved = saved?;
        if saved.len() > MOST_SAVED {
            return Err(Errno::NAMETOOLONG.into());
        }
        let (index, stamp) = self.place()?;
        let more = (0..Book::more(saved.len())).map(|_| Ok(self.place()?.0));
        let more = more.collect::<io::Result<Vec<_>>>()?;
        let record = Record {
            kind,
            stamp,
            id,
            value,
            by,
            added,
            saved: &saved,
        };
        self.book.put(index, &more, &record);
        Ok(index)
    }

    /// A request of the kernel's begins, in a slot of a queue. Its outcome, if an earlier worker has done it.
    pub(crate) fn begins<F: FileSystem>(
        &self,
        fs: &F,
        slot: usize,
        request: &Request<'_>,
    ) -> Option<Outcome> {
        let unique = number(request.cx.unique);
        let again = request.cx.unique & UNIQUE_RESEND != 0;
        match &request.operation {
            Operation::Forget(arg) => self.forget(request.node, arg.nlookup),
            Operation::BatchForget(_, forgets) => {
                for one in forgets.iter() {
                    self.forget(one.nodeid, one.nlookup);
                }
            }
            Operation::Release(arg) => self.close(Open::new(Kind::File, arg.fh, request.node)),
            Operation::Releasedir(arg) => {
                self.close(Open::new(Kind::Directory, arg.fh, request.node));
            }
            _ => {}
        }
        let mut before = None;
        if again {
            self.book.count_sent_again();
            before = lock(&self.left).intents.get(&unique).cloned();
            if let Some((error, body)) = before.as_mut().and_then(|intent| intent.answer.take()) {
                return Some(match (error, body.is_empty()) {
                    (0, true) => Ok(Reply::Empty),
                    (0, false) => Ok(Reply::Bytes(body.into())),
                    (error, _) => Err(Errno::from_raw_os_error(error)),
                });
            }
            self.take_back(fs, unique);
        }
        if is_once(&request.operation) {
            let began = before.as_ref().map_or_else(now, |intent| intent.began);
            self.book.begin(slot, unique, began);
            let before = before.map(|intent| {
                if let Some(note) = intent.note {
                    self.book.note(slot, note);
                }
                Again {
                    began: SystemTime::UNIX_EPOCH + Duration::from_nanos(intent.began),
                    note: intent.note,
                }
            });
            let mut shard = lock(self.shard(unique));
            shard.under_way.insert(unique, (slot, before));
        }
        None
    }

    /// What an earlier worker had begun of a request.
    pub(crate) fn again(&self, unique: u64) -> Option<Again> {
        if unique & UNIQUE_RESEND == 0 {
            return None;
        }
        let unique = number(unique);
        let shard = lock(self.shard(unique));
        shard.under_way.get(&unique)?.1
    }

    /// Notes a number with the intent of a request.
    pub(crate) fn note(&self, unique: u64, note: u64) {
        let unique = number(unique);
        let shard = lock(self.shard(unique));
        if let Some((slot, _)) = shard.under_way.get(&unique) {
            self.book.note(*slot, note);
        }
    }

    /// A request is about to be answered.
    pub(crate) fn ends<F: FileSystem>(&self, fs: &F, request: &Request<'_>, outcome: &mut Outcome) {
        let unique = number(request.cx.unique);
        let Some(survive) = fs.survive() else {
            return;
        };
        match outcome {
            Ok(Reply::Entry(entry)) => self.found(survive, entry.nodeid, unique),
            Ok(Reply::Created(entry, file)) => {
                self.found(survive, entry.nodeid, unique);
                let open = Open::new(Kind::File, file.out.fh, entry.nodeid);
                self.opened(survive, open, unique);
            }
            Ok(Reply::Opened(file)) => {
                let kind = match request.operation {
                    Operation::Opendir(_) => Kind::Directory,
                    _ => Kind::File,
                };
                let open = Open::new(kind, file.out.fh, request.node);
                self.opened(survive, open, unique);
            }
            Ok(Reply::Listing(listed)) => listed.entries(|_, entry| {
                self.found(survive, entry.nodeid, unique);
            }),
            Ok(Reply::Removed(Unlinked {
                node: Some(node),
                last: true,
            })) => self.save_again(*node, &mut |to| survive.save_node(*node, to)),
            _ => {}
        }
        if !is_once(&request.operation) {
            return;
        }
        let under_way = lock(self.shard(unique)).under_way.remove(&unique);
        if let Some((slot, _)) = under_way {
            let (error, body) = match outcome {
                Ok(reply) => (0, reply.parts()),
                Err(errno) => (errno.raw_os_error(), [&[][..]; 2]),
            };
            let fits = self.book.answer(slot, error, body);
            debug_assert!(fits, "answers to changes are short");
        }
    }

    fn found(&self, fs: &dyn Survive, node: u64, by: u64) {
        if node == 0 || node == ROOT.0 {
            return;
        }
        let mut shard = lock(self.shard(node));
        if let Some(place) = shard.nodes.get_mut(&node) {
            place.lookups += 1;
            place.added = if place.by == by { place.added + 1 } else { 1 };
            place.by = by;
            self.book.count(place.index, place.lookups, by, place.added);
            return;
        }
        let mut saved = Vec::new();
        let saves = fs.save_node(Node(node), &mut saved);
        match self.put((Kind::Node, node), 1, (by, 1), saves.map(|()| saved)) {
            Ok(index) => {
                let place = Place {
                    index,
                    lookups: 1,
                    by,
                    added: 1,
                };
                shard.nodes.insert(node, place);
            }
            Err(error) => tracing::warn!(node, %error, "a node won't outlive this server"),
        }
    }

    fn opened(&self, fs: &dyn Survive, open: Open, by: u64) {
        let Open { kind, fh, node } = open;
        let mut saved = Vec::new();
        let saves = fs.save_handle(kind == Kind::Directory, Handle(fh), &mut saved);
        if saves.is_ok() && saved.is_empty() {
            // The next server needs nothing to know it.
            return;
        }
        match self.put((kind, fh), node, (by, 0), saves.map(|()| saved)) {
            Ok(index) => {
                let mut shard = lock(self.shard(fh));
                shard.handles.entry(open).or_default().push(index);
            }
            Err(error) => tracing::warn!(node, %error, "an open file won't outlive this server"),
        }
    }

    /// A node may be found by something else from now on.
    pub(crate) fn save_again(
        &self,
        node: Node,
        save: &mut dyn FnMut(&mut Vec<u8>) -> io::Result<()>,
    ) {
        let mut shard = lock(self.shard(node.0));
        let Some(place) = shard.nodes.get_mut(&node.0) else {
            return;
        };
        let mut saved = Vec::new();
        let saves = save(&mut saved).map(|()| saved);
        let by = (place.by, place.added);
        match self.put((Kind::Node, node.0), place.lookups, by, saves) {
            Ok(index) => self.give_back(std::mem::replace(&mut place.index, index)),
            Err(error) => tracing::warn!(%node, %error, "a node won't outlive this server"),
        }
    }

    /// The kernel gives lookups of a node back.
    fn forget(&self, node: u64, lookups: u64) {
        let mut shard = lock(self.shard(node));
        let Some(place) = shard.nodes.get_mut(&node) else {
            return;
        };
        place.lookups = place.lookups.saturating_sub(lookups);
        if place.lookups > 0 {
            return self.book.set_lookups(place.index, place.lookups);
        }
        let index = place.index;
        shard.nodes.remove(&node);
        self.give_back(index);
    }

    fn close(&self, open: Open) {
        let mut shard = lock(self.shard(open.fh));
        let Some(places) = shard.handles.get_mut(&open) else {
            return;
        };
        if let Some(index) = places.pop() {
            self.give_back(index);
        }
        if places.is_empty() {
            shard.handles.remove(&open);
        }
    }

    /// Undoes what an earlier worker had given the kernel in an answer that it did not send.
    fn take_back<F: FileSystem>(&self, fs: &F, unique: u64) {
        let mut left = lock(&self.left);
        let lookups: Vec<_> = left.lookups.extract_if(.., |one| one.0 == unique).collect();
        let handles: Vec<_> = left.handles.extract_if(.., |one| one.0 == unique).collect();
        drop(left);
        for (_, node, lookups) in lookups {
            self.forget(node, lookups);
            fs.forget(Node(node), lookups);
        }
        for (_, open) in handles {
            self.close(open);
            if let Some(survive) = fs.survive() {
                survive.drop_handle(open.kind == Kind::Directory, Handle(open.fh));
            }
        }
    }
}

impl Left {
    /// Adds an intent. A request that was done again before this worker has two or more: the answer counts, then what the file
    /// system noted, and then the time at which it was begun first.
    fn add(&mut self, intent: Intent) {
        let rank = |intent: &Intent| {
            let (answer, note) = (intent.answer.is_none(), intent.note.is_none());
            (answer, note, intent.began)
        };
        match self.intents.get(&intent.unique) {
            Some(known) if rank(known) <= rank(&intent) => {}
            _ => drop(self.intents.insert(intent.unique, intent)),
        }
    }
}

fn too_many_cores() -> io::Error {
    io::Error::other("survive: there are more cores than it is made for")
}

/// The time that a file made now gets, in nanoseconds since 1970.
fn now() -> u64 {
    uvfs_sys::nanoseconds(ClockId::RealtimeCoarse)
}
