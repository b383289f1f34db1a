//! A uvfs server over a shared-memory queue pair, as a backend.
//!
//! A thread watches the socket. When the server is gone everything under way ends with ENOTCONN, and
//! the thread tries to attach to whoever serves the same source at the same path: then it finds the
//! files again that are open, opens them, takes their locks, tells the cache, and only then do others
//! see the new session. Requests name nodes and handles by numbers that stay the same (`known.rs`).

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwapOption;
use uvfs_proto::abi::{self, Opcode, SetattrValid};
use uvfs_proto::ext;
use uvfs_proto::import::{IMPORT, ImportIn, ImportOut};
use uvfs_proto::reply;
use uvfs_queue::arena::Arena;
use uvfs_queue::attach::{self, Message};
use uvfs_queue::pair::{ClientQueue, Direction, End, INLINE_SIZE, Published, Seg};
use uvfs_queue::wait::Patience;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::backend::{
    Again, Attr, Backend, DirEntry, Done, Entry, Figures, Grant, Imported, Lease, Limits, LockKind,
    LockRequest, NewFile, NodeId, OnReattach, OnRecall, Op, ROOT, RangeLock, Reattached, Recall,
    Request, SetAttr, StatFs,
};
use crate::cache::{errno, lock};
use crate::event::Event;
use crate::known::{Found, Known};
use crate::silence::{Sign, Silence};

/// Requests under way at most.
const DEPTH: u32 = 64;
/// How long a waiter polls for its reply before it sleeps.
const SPIN: Duration = Duration::from_micros(60);
/// How old what is published may be, and a little more when nothing happens.
const PUBLISHED: Duration = Duration::from_millis(100);
/// Bytes of a listing, an attribute's value or a list of names that are asked for at once.
const LISTING: usize = 64 << 10;
/// How long a server may answer nothing, unless [`Server::answers_within`] says otherwise.
const ANSWERS: Duration = Duration::from_secs(30);
/// How often the watcher looks for a server that came back, at first and at last.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// How long calls wait for a server that went, unless [`Server::reconnect_within`] says otherwise.
const RECONNECT: Duration = Duration::from_secs(5);
/// How long a call that begins later waits for an attempt to find it.
const LAST_LOOK: Duration = Duration::from_secs(1);
/// Lease numbers have the session's number in front of the server's.
const SEQ_BITS: u32 = 48;
/// Entries that only the answers to recalls take.
const FOR_RECALLS: u32 = 4;

thread_local! {
    /// This thread answers recalls.
    static ANSWERS_RECALLS: Cell<bool> = const { Cell::new(false) };
    /// This thread must not wait for the watcher: it is it, or the watcher may wait for it.
    static NEVER_WAITS: Cell<bool> = const { Cell::new(false) };
}

/// A reply to a request other than read and write.
type Reply = io::Result<Vec<u8>>;

/// A request that needs no answer.
struct Told {
    opcode: u32,
    node: u64,
    op: Vec<u8>,
}

enum Waiting {
    Nobody,
    /// A read or write: whether the reply is a `fuse_write_out`, and what to do then.
    Data(Op, usize, crate::backend::Done),
    /// A request that blocks its caller, and whether the reply's data is in a segment.
    Call(Arc<Mutex<Option<Reply>>>, bool),
    /// Nobody waits: release, forget.
    Ignored,
}

/// A uvfs server reached through the socket of `uvfs serve` or of a mount.
///
/// The pages of the client's cache are shared with the server: it reads and writes them in place,
/// and writes those that are left dirty when this process dies.
///
/// When the server dies, or is ended, calls wait for one that serves the same source at the same
/// path: [`Server::reconnect_within`] says how long. That one is attached to, open files are opened
/// there again, and what is dirty is written. What can't be carried over fails: files that are gone
/// with `ESTALE`, files whose locks somebody else has by now, or that somebody else has changed while
/// they were dirty here, with `EIO`. Files that a guest imported are its no more (`ESTALE`). Changes of
/// names that were under way fail with `ENOTCONN`, and may have been made.
///
/// A server that lives and answers nothing any more counts as gone after [`Server::answers_within`].
pub struct Server {
    inner: Arc<Inner>,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

/// Is told of descriptors of a server's sessions: of those that were opened as one came back (true),
/// and of all that are about to be closed (false).
pub type OnDescriptor = Arc<dyn Fn(RawFd, bool) + Send + Sync>;

/// What outlives a session.
struct Inner {
    /// Where the server is; without it nobody comes back.
    path: Option<PathBuf>,
    /// The user that the first server ran as.
    user: OnceLock<u32>,
    /// How long calls wait for a server that went.
    patience: OnceLock<Duration>,
    /// How long a server may answer nothing.
    answers: OnceLock<Duration>,
    on_descriptor: OnceLock<OnDescriptor>,
    /// The connection, until it is attached.
    first: Mutex<Option<UnixStream>>,
    current: ArcSwapOption<Shared>,
    /// One socket for all attempts to reach the next server. Making it takes numbers that a program
    /// under `uvfs run` may close or count on, so it is made while that waits for this client.
    spare: Mutex<Option<Ready>>,
    /// A session that is to become the current one.
    next: Mutex<Option<Arc<Shared>>>,
    known: Arc<Mutex<Known>>,
    /// Memory for listings and values, one at a time: a page of the arena.
    room: Mutex<u32>,
    recalls: Mutex<Option<Sender<(u64, Recall)>>>,
    /// To the thread that answers recalls, once there is one.
    recalled: Mutex<Option<Receiver<(u64, Recall)>>>,
    on_reattach: Mutex<Option<Arc<OnReattach>>>,
    /// This process's, found before it attaches: the threads that publish do no I/O of their own, as
    /// the program's functions for that may be this client's.
    name: [u8; 16],
    /// What there is to publish.
    figures: Arc<OnceLock<Figures>>,
    attempts: Mutex<Attempts>,
    /// An attempt is wanted, or has ended.
    attempted: Condvar,
    stop: AtomicBool,
}

/// The watcher's attempts to attach.
#[derive(Default)]
struct Attempts {
    /// Since when there is no server, as far as anybody has noticed.
    lost: Option<Instant>,
    /// Nobody looks for one any more.
    over: bool,
    wanted: bool,
    begun: u64,
    ended: u64,
    /// Another source is served at the path.
    other: bool,
}

struct Shared {
    /// How many servers there were before.
    generation: u64,
    socket: UnixStream,
    source: [u8; 16],
    queue: ClientQueue,
    arena: Arc<Arena>,
    max_payload: usize,
    slots: [Mutex<Waiting>; DEPTH as usize],
    /// Answers that were taken.
    answered: AtomicU64,
    silence: Silence,
    /// How long the server may answer nothing.
    answers: Duration,
    /// Held by whoever takes completions.
    consumer: Mutex<()>,
    /// Threads that poll now.
    pollers: AtomicU32,
    /// The reaper leaves completions to them, for a moment.
    reaper_rests: AtomicBool,
    patience: Patience,
    /// A reply came, or an entry became free.
    event: Event,
    unique: AtomicU64,
    /// What could not be sent for want of an entry.
    deferred: Mutex<Vec<Told>>,
    /// Where recalls go: to the thread that answers them.
    recalls: Mutex<Option<Sender<(u64, Recall)>>>,
    /// As in [`Inner`], as is what follows.
    name: [u8; 16],
    figures: Arc<OnceLock<Figures>>,
    /// The server is gone or broke the protocol.
    dead: AtomicBool,
    /// It broke the protocol.
    broken: AtomicBool,
    stop: AtomicBool,
    reaper: Mutex<Option<JoinHandle<()>>>,
    /// Last, as fields are dropped in order: what is told to be gone is closed.
    descriptors: Descriptors,
}

/// All that a session has open, and who wants to know when that begins and ends.
struct Descriptors {
    open: Vec<RawFd>,
    told: Option<OnDescriptor>,
    /// Of the first session who wants to know asks by himself.
    begins: bool,
}

impl Descriptors {
    fn add(&mut self, fd: RawFd) {
        self.open.push(fd);
        if let Some(call) = self.told.as_ref().filter(|_| self.begins) {
            call(fd, true);
        }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        if let Some(call) = &self.told {
            self.open.iter().for_each(|&fd| call(fd, false));
        }
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("path", &self.inner.path)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Connects to the socket of a server. Attaching comes with [`crate::Client::new`].
    ///
    /// # Errors
    /// `ENOENT` or `ECONNREFUSED` when no server is there, `EACCES` for another user's.
    pub fn connect(socket: impl AsRef<Path>) -> io::Result<Self> {
        let path = socket.as_ref();
        let socket = attach::socket()?;
        socket.set_write_timeout(Some(ANSWERS))?;
        attach::connect(&socket, path)?;
        // As it is found from elsewhere later.
        Ok(Self::new(socket, std::path::absolute(path).ok()))
    }

    /// How long calls wait for a server that went to come back (5 s unless this is said): counted
    /// from when it was first missed. Later ones fail with `ENOTCONN`, or `ESTALE` when another
    /// source is served at the path, after a look whether it is there now. What is dirty stays, and
    /// is written when it comes back.
    #[must_use]
    pub fn reconnect_within(self, bound: Duration) -> Self {
        let _ = self.inner.patience.set(bound);
        self
    }

    /// How long a server may answer nothing while it is asked for something (30 s unless this is said):
    /// then it counts as one that went, and calls wait for it to come back as
    /// [`Server::reconnect_within`] says. Before that the client asks it for a sign of life, so a single
    /// request that waits for a lock or a slow disk does not count. If the server goes on after all, it writes
    /// what is dirty, and the client attaches to it again. Also how long it may take to let the client attach
    /// (`ETIMEDOUT`).
    #[must_use]
    pub fn answers_within(self, bound: Duration) -> Self {
        let _ = self.inner.answers.set(bound.max(Duration::from_millis(1)));
        self
    }

    /// Has `call` told of descriptors that come and go after the client was made; those that it
    /// began with are [`crate::Client::descriptors`]. From threads of the client's own.
    #[must_use]
    pub fn on_descriptor(self, call: OnDescriptor) -> Self {
        let _ = self.inner.on_descriptor.set(call);
        self
    }

    fn new(socket: UnixStream, path: Option<PathBuf>) -> Self {
        let (recalls, recalled) = channel();
        Self {
            inner: Arc::new(Inner {
                path,
                user: OnceLock::new(),
                patience: OnceLock::new(),
                answers: OnceLock::new(),
                on_descriptor: OnceLock::new(),
                spare: Mutex::default(),
                next: Mutex::default(),
                first: Mutex::new(Some(socket)),
                current: ArcSwapOption::empty(),
                known: Arc::default(),
                room: Mutex::default(),
                recalls: Mutex::new(Some(recalls)),
                recalled: Mutex::new(Some(recalled)),
                on_reattach: Mutex::default(),
                name: process_name(),
                figures: Arc::default(),
                attempts: Mutex::default(),
                attempted: Condvar::new(),
                stop: AtomicBool::new(false),
            }),
            watcher: Mutex::default(),
        }
    }

    /// The session, whether or not its server still is there.
    fn shared(&self) -> io::Result<Arc<Shared>> {
        let current = self.inner.current.load_full();
        current.ok_or_else(|| errno(libc::ENOTCONN))
    }

    /// The session, a new one if the old one's server has gone and come back.
    fn living(&self) -> io::Result<Arc<Shared>> {
        let shared = self.shared()?;
        if shared.is_alive() {
            return Ok(shared);
        }
        self.reconnect()?;
        self.shared()
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        lock(&self.inner.known)
    }

    /// A node's number at the session's server.
    fn node(&self, shared: &Shared, node: NodeId) -> io::Result<u64> {
        if shared.generation == 0 {
            return Ok(node);
        }
        self.known().node(shared.generation, node)
    }

    /// A node's and a handle's numbers at the session's server.
    fn at(&self, shared: &Shared, node: NodeId, handle: u64) -> io::Result<(u64, u64)> {
        if shared.generation == 0 {
            return Ok((node, handle));
        }
        let known = self.known();
        Ok((
            known.node(shared.generation, node)?,
            known.handle(shared.generation, node, handle)?,
        ))
    }

    fn call(&self, opcode: Opcode, node: NodeId, op: &[u8], names: &[&OsStr]) -> Reply {
        let shared = self.living()?;
        let node = self.node(&shared, node)?;
        shared.call(opcode as u32, node, op, &joined(names)?, &[])
    }

    /// A call that is answered by an entry.
    fn call_entry(
        &self,
        opcode: Opcode,
        parent: NodeId,
        op: &[u8],
        names: &[&OsStr],
    ) -> io::Result<Entry> {
        let shared = self.living()?;
        let n = self.node(&shared, parent)?;
        let reply = shared.call(opcode as u32, n, op, &joined(names)?, &[])?;
        self.entry(&shared, &reply, parent, names[0])
    }

    /// An entry of this name that a session's server has answered.
    fn entry(
        &self,
        shared: &Shared,
        reply: &[u8],
        parent: NodeId,
        name: &OsStr,
    ) -> io::Result<Entry> {
        let mut entry = entry_of(reply)?;
        let by = Some((parent, name));
        entry.node = self.known().looked_up(shared.generation, entry.node, by)?;
        Ok(entry)
    }

    /// A call whose reply may be long; it comes back copied.
    fn call_long(&self, opcode: Opcode, node: NodeId, op: &[u8], inline: &[u8]) -> Reply {
        let shared = self.living()?;
        let node = self.node(&shared, node)?;
        self.call_long_at(&shared, opcode, node, op, inline)
    }

    fn call_long_at(
        &self,
        shared: &Shared,
        opcode: Opcode,
        node: u64,
        op: &[u8],
        inline: &[u8],
    ) -> Reply {
        let page = lock(&self.inner.room);
        let segs = [Seg {
            offset: shared.arena.seg(*page, 0, 0).offset,
            len: LISTING as u32,
        }];
        shared.call(opcode as u32, node, op, inline, &segs)
    }
}

fn joined(names: &[&OsStr]) -> io::Result<Vec<u8>> {
    let mut inline = Vec::with_capacity(names.iter().map(|name| name.len() + 1).sum());
    for name in names {
        if name.as_bytes().contains(&0) {
            return Err(errno(libc::EINVAL));
        }
        inline.extend_from_slice(name.as_bytes());
        inline.push(0);
    }
    Ok(inline)
}

/// A server at the other end of a connected socket: of `uvfs_server::in_process`, or one that was
/// connected or passed on by other means. When it goes it is gone for good.
impl From<UnixStream> for Server {
    fn from(socket: UnixStream) -> Self {
        Self::new(socket, None)
    }
}

fn parse<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> io::Result<T> {
    T::read_from_prefix(bytes)
        .map(|(value, _)| value)
        .map_err(|_| errno(libc::EIO))
}

fn wire(lease: Lease) -> u32 {
    match lease {
        Lease::None => ext::LEASE_NONE,
        Lease::Read => ext::LEASE_READ,
        Lease::Write => ext::LEASE_WRITE,
    }
}

pub(crate) fn attr_of(a: &abi::Attr) -> Attr {
    Attr {
        ino: a.ino,
        size: a.size,
        blocks: a.blocks,
        atime: (a.atime as i64, a.atimensec),
        mtime: (a.mtime as i64, a.mtimensec),
        ctime: (a.ctime as i64, a.ctimensec),
        mode: a.mode,
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        rdev: a.rdev,
        blksize: a.blksize,
    }
}

fn entry_of(bytes: &[u8]) -> io::Result<Entry> {
    let out: abi::EntryOut = parse(bytes)?;
    if out.nodeid == 0 {
        return Err(errno(libc::ENOENT));
    }
    Ok(Entry {
        node: out.nodeid,
        attr: attr_of(&out.attr),
    })
}

fn lock_in(handle: u64, request: &LockRequest) -> abi::LkIn {
    let flags = if request.flock {
        abi::LkFlags::FLOCK
    } else {
        abi::LkFlags::empty()
    };
    let kind = match request.kind {
        Some(LockKind::Shared) => libc::F_RDLCK,
        Some(LockKind::Exclusive) => libc::F_WRLCK,
        None => libc::F_UNLCK,
    };
    abi::LkIn {
        fh: handle,
        owner: request.owner.into(),
        lk: abi::FileLock {
            start: request.start,
            end: request.end,
            r#type: kind as u32,
            pid: 0,
        },
        lk_flags: flags.bits(),
        padding: 0,
    }
}

impl Shared {
    /// An entry to put a request in; waits for one.
    fn reserve(&self) -> io::Result<u32> {
        loop {
            if self.dead.load(Ordering::Acquire) {
                return Err(errno(libc::ENOTCONN));
            }
            self.look_for_life();
            // Recalls are answered even when all others wait for somebody else's.
            let rest = if ANSWERS_RECALLS.get() {
                0
            } else {
                FOR_RECALLS
            };
            if let Some(id) = self.queue.reserve_leaving(rest) {
                return Ok(id);
            }
            self.queue.ring();
            let mut got = None;
            let mut check = || {
                got = self.queue.reserve_leaving(rest);
                got.is_some() || self.dead.load(Ordering::Acquire)
            };
            self.poll(&mut check);
            if let Some(id) = got {
                return Ok(id);
            }
            let free = || {
                if self.dead.load(Ordering::Acquire) {
                    return Some(None);
                }
                self.queue.reserve_leaving(rest).map(Some)
            };
            // Not for long: of requests that nobody waits for the server tells nobody that they ended.
            if let Some(Some(id)) = self.event.wait_timeout(free, Duration::from_millis(2)) {
                return Ok(id);
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn send(
        &self,
        id: u32,
        opcode: u32,
        node: NodeId,
        op: &[u8],
        inline: &[u8],
        segs: &[Seg],
        direction: Direction,
        waiting: Waiting,
    ) {
        let header = abi::InHeader {
            len: (size_of::<abi::InHeader>() + op.len() + inline.len()) as u32,
            opcode,
            unique: self.unique.fetch_add(2, Ordering::Relaxed),
            nodeid: node,
            uid: 0,
            gid: 0,
            pid: 0,
            total_extlen: 0,
            padding: 0,
        };
        *lock(&self.slots[id as usize]) = waiting;
        self.queue
            .submit(id, header.as_bytes(), op, inline, segs, direction);
        if self.dead.load(Ordering::Acquire) {
            self.fail_all();
        }
    }

    fn call(&self, opcode: u32, node: NodeId, op: &[u8], inline: &[u8], segs: &[Seg]) -> Reply {
        if inline.len() > INLINE_SIZE {
            return Err(errno(libc::ENAMETOOLONG));
        }
        let direction = if segs.is_empty() {
            Direction::ToServer
        } else {
            Direction::FromServer
        };
        let answer = Arc::new(Mutex::new(None));
        let id = self.reserve()?;
        self.send(
            id,
            opcode,
            node,
            op,
            inline,
            segs,
            direction,
            Waiting::Call(answer.clone(), !segs.is_empty()),
        );
        self.queue.ring();
        let take = || lock(&answer).take();
        let mut found = None;
        self.poll(&mut || {
            found = take();
            found.is_some()
        });
        let reply = found.unwrap_or_else(|| self.event.wait(take))?;
        let Some(seg) = segs.first() else {
            return Ok(reply);
        };
        // The length is checked against the segment; the bytes are copied once.
        let len = u64::from_ne_bytes(reply[..8].try_into().expect("made by `take_reply`"));
        let mut bytes = vec![0; (len as usize).min(seg.len as usize)];
        self.arena.read(*seg, &mut bytes);
        Ok(bytes)
    }

    /// Sends what needs no answer, now or when there is room.
    fn tell(&self, opcode: u32, node: NodeId, op: &[u8]) {
        if self.dead.load(Ordering::Acquire) {
            return;
        }
        match self.queue.reserve() {
            Some(id) => {
                let to = Direction::ToServer;
                self.send(id, opcode, node, op, &[], &[], to, Waiting::Ignored);
                self.queue.ring();
            }
            None => lock(&self.deferred).push(Told {
                opcode,
                node,
                op: op.to_vec(),
            }),
        }
    }

    /// Ends every request that is there; says whether there were any.
    fn drain(&self) -> bool {
        let mut any = false;
        // Whoever finds the consumer busy leaves it all to it; so it looks again at the end.
        while self.drain_once(&mut any) && self.queue.has_replies() {}
        any
    }

    /// One round of [`Shared::drain`]; false when another thread is at it, or all is over.
    fn drain_once(&self, found: &mut bool) -> bool {
        let mut ended: Vec<(Done, i32, usize)> = Vec::new();
        let mut any = false;
        {
            let Ok(_consumer) = self.consumer.try_lock() else {
                return false;
            };
            loop {
                match self.queue.pop() {
                    Ok(Some(id)) => {
                        any = true;
                        self.answered.fetch_add(1, Ordering::Release);
                        let waiting = std::mem::replace(
                            &mut *lock(&self.slots[id as usize]),
                            Waiting::Nobody,
                        );
                        let mut header = [0; size_of::<abi::OutHeader>()];
                        self.queue.reply(id, &mut header, &mut []);
                        let out = abi::OutHeader::read_from_bytes(&header)
                            .expect("the array has its size");
                        let len = (out.len as usize).saturating_sub(header.len());
                        match waiting {
                            Waiting::Call(answer, in_segs) => {
                                let reply = self.take_reply(id, out.error, in_segs, len);
                                *lock(&answer) = Some(reply);
                            }
                            Waiting::Data(op, most, done) => {
                                let mut size = [0; 4];
                                let n = match op {
                                    Op::Read => len,
                                    Op::Write => {
                                        self.queue.reply(id, &mut [], &mut size);
                                        u32::from_ne_bytes(size) as usize
                                    }
                                };
                                ended.push((done, out.error, n.min(most)));
                            }
                            Waiting::Nobody | Waiting::Ignored => {}
                        }
                        self.queue.release(id);
                    }
                    Ok(None) => break,
                    Err(error) => {
                        tracing::error!(%error, "the server broke the protocol");
                        self.broken.store(true, Ordering::Release);
                        self.dead.store(true, Ordering::Release);
                        // Wakes the watcher.
                        let _ = self.socket.shutdown(std::net::Shutdown::Both);
                        break;
                    }
                }
            }
            while let Ok(Some(bytes)) = self.queue.pop_notification() {
                if let Some(recall) = recall_of(&bytes)
                    && let Some(recalls) = &*lock(&self.recalls)
                {
                    let _ = recalls.send((self.generation, recall));
                }
            }
        }
        if self.queue.server_closed() {
            self.dead.store(true, Ordering::Release);
        }
        for (done, error, n) in ended {
            done(if error == 0 {
                Ok(n)
            } else {
                Err(errno(-error))
            });
        }
        if any {
            *found = true;
            self.event.notify();
            self.send_deferred();
        }
        if self.dead.load(Ordering::Acquire) {
            self.fail_all();
            return false;
        }
        true
    }

    /// A call's reply: inline, or, when the data is in a segment, its length as eight bytes.
    fn take_reply(&self, id: u32, error: i32, in_segs: bool, len: usize) -> Reply {
        match (error, in_segs) {
            (0, true) => Ok((len as u64).to_ne_bytes().to_vec()),
            (0, false) => {
                let mut inline = vec![0; len.min(INLINE_SIZE)];
                self.queue.reply(id, &mut [], &mut inline);
                Ok(inline)
            }
            _ => Err(errno(-error)),
        }
    }

    fn send_deferred(&self) {
        loop {
            let next = lock(&self.deferred).pop();
            let Some(told) = next else {
                return;
            };
            let Some(id) = self.queue.reserve() else {
                lock(&self.deferred).push(told);
                return;
            };
            let (to, none) = (Direction::ToServer, Waiting::Ignored);
            let (opcode, op) = (told.opcode, &told.op);
            self.send(id, opcode, told.node, op, &[], &[], to, none);
            self.queue.ring();
        }
    }

    /// The server is gone: everything that waits for it ends with ENOTCONN. The entries stay
    /// taken; the session is over.
    fn fail_all(&self) {
        for slot in &self.slots {
            match std::mem::replace(&mut *lock(slot), Waiting::Nobody) {
                Waiting::Data(_, _, done) => done(Err(errno(libc::ENOTCONN))),
                Waiting::Call(answer, _) => *lock(&answer) = Some(Err(errno(libc::ENOTCONN))),
                Waiting::Nobody | Waiting::Ignored => {}
            }
        }
        self.event.notify();
    }

    /// Gives the session up when its server has answered nothing for too long.
    fn look_for_life(&self) {
        let waiting = self.queue.in_flight() > 0 && !self.dead.load(Ordering::Acquire);
        let answered = self.answered.load(Ordering::Acquire);
        let sign = (self.silence).look(Instant::now(), waiting, answered, self.answers);
        match sign {
            Sign::Lives => {}
            Sign::Ask => {
                // Of no client's business, so every server refuses it without looking at a file.
                if let Some(id) = self.queue.reserve() {
                    let (op, to) = (abi::InterruptIn::default(), Direction::ToServer);
                    let (opcode, waiting) = (Opcode::Interrupt as u32, Waiting::Ignored);
                    self.send(id, opcode, ROOT, op.as_bytes(), &[], &[], to, waiting);
                    self.queue.ring();
                }
            }
            Sign::Silent => {
                tracing::error!(after = ?self.answers, "the server lives and answers nothing");
                self.dead.store(true, Ordering::Release);
                // If it goes on it finds a client that is gone: it writes what is dirty, and closes the socket, which
                // the watcher waits for. Until then it may still answer into this session's memory.
                let _ = self.socket.shutdown(std::net::Shutdown::Write);
                self.fail_all();
            }
        }
    }

    /// Takes completions in the calling thread until `done` or the time for that is over.
    fn poll(&self, done: &mut dyn FnMut() -> bool) {
        self.pollers.fetch_add(1, Ordering::AcqRel);
        self.queue.disarm();
        let spin = self.patience.budget(SPIN);
        let answered = self.spin(spin, done);
        if !spin.is_zero() {
            self.patience.ended(answered);
        }
        if self.pollers.fetch_sub(1, Ordering::AcqRel) == 1 {
            // From now on the reaper is to be woken; what came meanwhile is ours to take.
            self.queue.arm();
            if self.queue.ready() {
                self.drain();
            }
            if !answered && self.reaper_rests.load(Ordering::Acquire) {
                // It has to take what this thread goes on to wait for.
                self.unpark_reaper();
            }
        }
    }

    fn spin(&self, longest: Duration, done: &mut dyn FnMut() -> bool) -> bool {
        let start = Instant::now();
        loop {
            if self.queue.ready() {
                self.drain();
            }
            if done() {
                return true;
            }
            if start.elapsed() >= longest {
                return false;
            }
            for _ in 0..8 {
                if self.queue.ready() {
                    break;
                }
                std::hint::spin_loop();
            }
        }
    }

    fn unpark_reaper(&self) {
        if let Some(reaper) = &*lock(&self.reaper) {
            reaper.thread().unpark();
        }
    }

    /// Tells the server's side what it may show of this client.
    fn publish(&self) {
        let Some(stats) = self.figures.get().and_then(|figures| figures()) else {
            return;
        };
        self.queue.publish(&Published {
            name: self.name,
            calls: stats.calls(),
            hits: stats.hits,
            bytes_read: stats.bytes_out,
            bytes_written: stats.bytes_in,
            waited_ns: stats.waited_ns,
        });
    }

    fn is_alive(&self) -> bool {
        !self.dead.load(Ordering::Acquire) && !self.queue.server_closed()
    }

    /// Ends the session: whatever waits for its server fails.
    fn end(&self) {
        self.dead.store(true, Ordering::Release);
        self.stop.store(true, Ordering::Release);
        self.queue.close();
        self.queue.interrupt();
        lock(&self.recalls).take();
        self.fail_all();
        let reaper = lock(&self.reaper).take();
        if let Some(reaper) = reaper {
            reaper.thread().unpark();
            // The last reference may go in the reaper itself.
            if reaper.thread().id() != std::thread::current().id() {
                let _ = reaper.join();
            }
        }
    }

    /// An answer, or the errno of one that is about a file. The error is the session's.
    fn answer(&self, reply: Reply) -> io::Result<Result<Vec<u8>, i32>> {
        match reply {
            Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) && !self.is_alive() => Err(e),
            Err(e) => Ok(Err(e.raw_os_error().unwrap_or(libc::EIO))),
            Ok(reply) => Ok(Ok(reply)),
        }
    }

    /// Finds a file that was open at a server before this one.
    fn find(&self, identity: &[u8]) -> io::Result<Result<Again, i32>> {
        if identity.is_empty() {
            return Ok(Err(libc::ESTALE));
        }
        Ok(
            match self.answer(self.call(ext::FIND, ROOT, &[], identity, &[]))? {
                Ok(reply) => entry_of(&reply).map_err(|_| libc::EIO).map(|entry| Again {
                    node: entry.node,
                    mtime: entry.attr.mtime,
                }),
                // A guest's: only a token gives it files.
                Err(libc::EPERM) => Err(libc::ESTALE),
                Err(code) => Err(code),
            },
        )
    }

    /// Opens a file again, with its locks; the handle.
    fn open_again(
        &self,
        node: u64,
        flags: i32,
        locks: &[LockRequest],
    ) -> io::Result<Result<u64, i32>> {
        let op = abi::OpenIn {
            flags: flags as u32,
            open_flags: 0,
        };
        let reply = self.call(Opcode::Open as u32, node, op.as_bytes(), &[], &[]);
        let fh = match self.answer(reply)?.map(|r| parse::<abi::OpenOut>(&r)) {
            Ok(Ok(out)) => out.fh,
            Ok(Err(_)) => return Ok(Err(libc::EIO)),
            Err(code) => return Ok(Err(code)),
        };
        for lock in locks {
            let op = lock_in(fh, lock);
            let reply = self.call(Opcode::Setlk as u32, node, op.as_bytes(), &[], &[]);
            if self.answer(reply)?.is_err() {
                // As with NFS, where a lock was lost.
                return Ok(Err(libc::EIO));
            }
        }
        Ok(Ok(fh))
    }

    /// Gives the locks `before` back, and takes those of `now`.
    fn lock_anew(&self, node: u64, fh: u64, before: &[LockRequest], now: &[LockRequest]) {
        let all = |lock: &LockRequest| LockRequest {
            kind: None,
            start: 0,
            end: i64::MAX as u64,
            ..*lock
        };
        for lock in before.iter().map(all).chain(now.iter().copied()) {
            let op = lock_in(fh, &lock);
            self.tell(Opcode::Setlk as u32, node, op.as_bytes());
        }
    }

    /// The body of the thread that ends requests nobody polls for.
    fn reap(&self) {
        let mut published = None::<Instant>;
        while !self.stop.load(Ordering::Acquire) {
            if published.is_none_or(|at| at.elapsed() >= PUBLISHED) {
                self.publish();
                published = Some(Instant::now());
            }
            self.look_for_life();
            if self.pollers.load(Ordering::Acquire) > 0 {
                self.reaper_rests.store(true, Ordering::Release);
                std::thread::park_timeout(Duration::from_millis(1));
                self.reaper_rests.store(false, Ordering::Release);
                continue;
            }
            self.queue.arm();
            if !self.drain() {
                self.queue.wait_armed(Duration::from_millis(200));
                self.drain();
            }
            if self.dead.load(Ordering::Acquire) {
                self.fail_all();
                std::thread::park_timeout(Duration::from_millis(100));
            } else if self.queue.in_flight() > 0 && hung_up(&self.socket) {
                // While the session is not the current one nobody else looks.
                self.dead.store(true, Ordering::Release);
            }
        }
    }
}

/// The name of the program's first thread, as ps(1) shows it.
fn process_name() -> [u8; 16] {
    let mut name = [0; 16];
    let text = std::fs::read("/proc/self/comm").unwrap_or_default();
    let text = text.strip_suffix(b"\n").unwrap_or(&text);
    let len = text.len().min(name.len());
    name[..len].copy_from_slice(&text[..len]);
    name
}

fn hung_up(socket: &UnixStream) -> bool {
    let mut fds = [rustix::event::PollFd::new(
        socket,
        rustix::event::PollFlags::RDHUP,
    )];
    let now = rustix::fs::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(n) if n > 0)
}

/// Waits until the other end of a socket is closed, or this one.
fn wait_closed(socket: &UnixStream) {
    let mut fds = [rustix::event::PollFd::new(
        socket,
        rustix::event::PollFlags::RDHUP,
    )];
    while !matches!(rustix::event::poll(&mut fds, None), Ok(n) if n > 0) {}
}

/// A session's socket, and the list of descriptors that it begins.
struct Ready {
    socket: UnixStream,
    /// Last, as in [`Shared`].
    descriptors: Descriptors,
}

/// A server that is gone, for who looks for the next.
struct Lost<'a> {
    /// Where that will be.
    path: &'a Path,
    old: &'a Shared,
    /// What the file system says of later changes is later than this.
    since: (i64, u32),
}

impl Inner {
    /// How long a server may answer nothing.
    fn answers(&self) -> Duration {
        *self.answers.get().unwrap_or(&ANSWERS)
    }

    fn ready(&self, socket: UnixStream, begins: bool) -> Ready {
        let mut descriptors = Descriptors {
            open: Vec::new(),
            told: self.on_descriptor.get().cloned(),
            begins,
        };
        descriptors.add(socket.as_raw_fd());
        Ready {
            socket,
            descriptors,
        }
    }

    /// Attaches through a connected socket.
    fn attach(&self, ready: Ready, arena: &Arc<Arena>, generation: u64) -> io::Result<Arc<Shared>> {
        let mut descriptors = ready.descriptors;
        // After it, so that it is dropped before it.
        let socket = ready.socket;
        // The arena shows a server what was cached, and lets it change what is dirty. So a server that comes
        // later has to be the first one's user, or root.
        let user = attach::peer(&socket)?.uid;
        let first = *self.user.get_or_init(|| user);
        if user != 0 && user != first {
            return Err(errno(libc::EPERM));
        }
        let queue = ClientQueue::create(DEPTH)?;
        descriptors.add(queue.as_fd().as_raw_fd());
        socket.set_read_timeout(Some(self.answers()))?;
        let hello = Message {
            errno: 0,
            max_payload: 0,
            source: [0; 16],
        };
        let sent = attach::send(&socket, hello, &[arena.as_fd(), queue.as_fd()]);
        // A server without a place answers and closes before it reads: its answer says why.
        let (answer, mut fds) = match (attach::receive(&socket), &sent) {
            (Err(_), Err(_)) => return Err(sent.unwrap_err()),
            (Err(e), _) if e.raw_os_error() == Some(libc::EAGAIN) => {
                return Err(errno(libc::ETIMEDOUT));
            }
            (received, _) => received?,
        };
        if answer.errno != 0 {
            return Err(errno(answer.errno));
        }
        sent?;
        let (Some(bell), 4096..) = (fds.pop(), answer.max_payload) else {
            return Err(errno(libc::EPROTO));
        };
        let bell = attach::aside(bell);
        descriptors.add(bell.as_raw_fd());
        queue.wake_through(bell);
        let shared = Arc::new(Shared {
            name: self.name,
            figures: self.figures.clone(),
            generation,
            socket,
            source: answer.source,
            queue,
            max_payload: (answer.max_payload as usize).min(1 << 20) / 4096 * 4096,
            arena: arena.clone(),
            slots: std::array::from_fn(|_| Mutex::new(Waiting::Nobody)),
            answered: AtomicU64::new(0),
            silence: Silence::default(),
            answers: self.answers(),
            consumer: Mutex::default(),
            pollers: AtomicU32::new(0),
            reaper_rests: AtomicBool::new(false),
            patience: Patience::default(),
            event: Event::default(),
            unique: AtomicU64::new(2),
            deferred: Mutex::default(),
            recalls: Mutex::new(lock(&self.recalls).clone()),
            dead: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            reaper: Mutex::default(),
            descriptors,
        });
        let mine = shared.clone();
        let reaper = std::thread::Builder::new().name("uvfs-reaper".into());
        *lock(&shared.reaper) = Some(reaper.spawn(move || {
            NEVER_WAITS.set(true);
            mine.reap();
        })?);
        Ok(shared)
    }

    /// The body of the thread that notices a server's end and looks for the next.
    fn watch(&self) {
        NEVER_WAITS.set(true);
        while let Some(old) = self.current.load_full() {
            wait_closed(&old.socket);
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            let since = since.unwrap_or_default();
            let since = (since.as_secs() as i64, since.subsec_nanos());
            old.end();
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            lock(&self.attempts).lost.get_or_insert_with(Instant::now);
            let end = old.queue.server_end();
            let over = end == End::CutOff || old.broken.load(Ordering::Acquire);
            let Some(path) = self.path.as_ref().filter(|_| !over) else {
                tracing::error!(path = ?self.path, ?end, "the server is gone for good");
                lock(&self.attempts).over = true;
                self.attempted.notify_all();
                return;
            };
            tracing::warn!(?path, ?end, "the server is gone");
            let mut pause = FIRST_PAUSE;
            let lost = Lost {
                path,
                old: &old,
                since,
            };
            while let Err(error) = self.attempt(&lost) {
                if self.stop.load(Ordering::Acquire) {
                    return;
                }
                tracing::debug!(%error, ?path, "not attached again");
                let attempts = lock(&self.attempts);
                let quiet = |a: &mut Attempts| !a.wanted && !self.stop.load(Ordering::Acquire);
                drop(self.attempted.wait_timeout_while(attempts, pause, quiet));
                // Callers may want many; the machine is to bring the server back.
                std::thread::sleep(FIRST_PAUSE.min(pause));
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            tracing::warn!(?path, "attached to a server again");
        }
    }

    fn attempt(&self, lost: &Lost<'_>) -> io::Result<()> {
        {
            let mut attempts = lock(&self.attempts);
            attempts.wanted = false;
            attempts.begun += 1;
        }
        let result = self.reattach(lost);
        lock(&self.next).take();
        let mut attempts = lock(&self.attempts);
        attempts.ended = attempts.begun;
        attempts.other = matches!(&result, Err(e) if e.raw_os_error() == Some(libc::ESTALE));
        if result.is_ok() {
            attempts.lost = None;
        }
        self.attempted.notify_all();
        result
    }

    /// Attaches to the server that now is at the path, if it serves the same source, finds there
    /// what was open, and makes that the current session.
    fn reattach(&self, lost: &Lost<'_>) -> io::Result<()> {
        let spare = lock(&self.spare).take();
        let ready = match spare {
            Some(ready) => ready,
            None => self.ready(attach::socket()?, true),
        };
        ready.socket.set_write_timeout(Some(self.answers()))?;
        if let Err(error) = attach::connect(&ready.socket, lost.path) {
            *lock(&self.spare) = Some(ready);
            return Err(error);
        }
        let new = self.attach(ready, &lost.old.arena, lost.old.generation + 1)?;
        *lock(&self.next) = Some(new.clone());
        let found = match self.stop.load(Ordering::Acquire) {
            true => Err(errno(libc::ENOTCONN)),
            false => self.find_again(lost, &new),
        };
        if found.is_ok() {
            let next = attach::socket().ok();
            *lock(&self.spare) = next.map(|socket| self.ready(socket, true));
        } else {
            new.end();
            let _ = new.socket.shutdown(std::net::Shutdown::Both);
        }
        found
    }

    fn find_again(&self, lost: &Lost<'_>, new: &Arc<Shared>) -> io::Result<()> {
        let &Lost {
            path, old, since, ..
        } = lost;
        if new.source != old.source || new.source == [0; 16] {
            tracing::error!(
                ?path,
                "another source is served there, or one that can't be told from others: \
                 what is dirty stays until the same one is served again"
            );
            return Err(errno(libc::ESTALE));
        }
        if new.max_payload < old.max_payload {
            return Err(errno(libc::EPROTO));
        }
        let (nodes, handles) = {
            let mut known = lock(&self.known);
            (known.nodes(), known.handles())
        };
        let mut found: Found<NodeId, Again> = Found::new();
        for (node, identity) in nodes {
            let again = new.find(&identity)?;
            if let Err(code) = again {
                let error = errno(code);
                tracing::error!(node, %error, "an open file was not found again");
            }
            found.insert(node, again);
        }
        let mut opened = Found::new();
        for &((node, ours), flags, ref locks) in &handles {
            let at_server = match found.get(&node).copied().unwrap_or(Err(libc::ESTALE)) {
                Ok(again) => new.open_again(again.node, flags, locks)?,
                Err(code) => Err(code),
            };
            if let Err(code) = at_server {
                let error = errno(code);
                tracing::error!(node, %error, "a file could not be opened or locked again");
            }
            opened.insert((node, ours), at_server);
        }
        let end = old.queue.server_end();
        let call = lock(&self.on_reattach).clone();
        if let Some(call) = call {
            call(&Reattached {
                session: new.generation,
                written: matches!(end, End::Written | End::Lost),
                lost: end == End::Lost,
                since,
                nodes: &found,
                handles: &opened,
            });
        }
        let (closed, gone, locked) = {
            let mut known = lock(&self.known);
            let (closed, gone) = known.rebind(&found, &opened);
            (closed, gone, known.handles())
        };
        self.current.store(Some(new.clone()));
        let locked: HashMap<_, _> = locked
            .into_iter()
            .map(|(at, _, locks)| (at, locks))
            .collect();
        for (at, _, before) in &handles {
            if let (Some(now), Some(Ok(again)), Some(Ok(fh))) =
                (locked.get(at), found.get(&at.0), opened.get(at))
                && now != before
            {
                // Given back while they were taken again.
                new.lock_anew(again.node, *fh, before, now);
            }
        }
        for (node, fh) in closed {
            let op = abi::ReleaseIn {
                fh,
                ..Default::default()
            };
            new.tell(Opcode::Release as u32, node, op.as_bytes());
        }
        for node in gone {
            let op = abi::ForgetIn { nlookup: 1 };
            new.tell(Opcode::Forget as u32, node, op.as_bytes());
        }
        Ok(())
    }
}

/// A recall; nothing for what is not understood.
fn recall_of(bytes: &[u8]) -> Option<Recall> {
    let (header, rest) = abi::OutHeader::read_from_prefix(bytes).ok()?;
    let (recall, _) = ext::NotifyRecallOut::read_from_prefix(rest).ok()?;
    (header.unique == 0 && header.error == ext::NOTIFY_RECALL).then_some(Recall {
        node: recall.node,
        seq: recall.seq,
        keep: if recall.keep == ext::LEASE_READ {
            Lease::Read
        } else {
            Lease::None
        },
    })
}

impl Drop for Server {
    fn drop(&mut self) {
        let inner = &self.inner;
        {
            let _attempts = lock(&inner.attempts);
            inner.stop.store(true, Ordering::Release);
            inner.attempted.notify_all();
        }
        // Ends the thread that answers recalls; it may be this one.
        lock(&inner.recalls).take();
        lock(&inner.on_reattach).take();
        let next = lock(&inner.next).take();
        for shared in [next, inner.current.load_full()].into_iter().flatten() {
            shared.end();
            // Wakes the watcher.
            let _ = shared.socket.shutdown(std::net::Shutdown::Both);
        }
        let watcher = lock(&self.watcher).take();
        if let Some(watcher) = watcher {
            // The last reference may go in one of our own threads.
            if !NEVER_WAITS.get() {
                let _ = watcher.join();
            }
        }
    }
}

impl Backend for Server {
    fn attach(&self, arena: &Arc<Arena>) -> io::Result<()> {
        let socket = lock(&self.inner.first).take();
        let socket = socket.ok_or_else(|| errno(libc::EBUSY))?;
        // The last pages, which the cache was not given.
        *lock(&self.inner.room) = arena.pages() - self.reserved_pages();
        let ready = self.inner.ready(socket, false);
        if self.inner.path.is_some() {
            *lock(&self.inner.spare) = Some(self.inner.ready(attach::socket()?, true));
        }
        let shared = self.inner.attach(ready, arena, 0)?;
        self.inner.current.store(Some(shared));
        let inner = self.inner.clone();
        let watcher = std::thread::Builder::new().name("uvfs-watcher".into());
        *lock(&self.watcher) = Some(watcher.spawn(move || inner.watch())?);
        Ok(())
    }

    fn descriptors(&self) -> Vec<RawFd> {
        // Without waiting for a lock: also for the child of a fork.
        let current = self.inner.current.load();
        let mut descriptors = Vec::new();
        if let Some(shared) = current.as_ref() {
            descriptors.extend(&shared.descriptors.open);
            descriptors.push(shared.arena.as_fd().as_raw_fd());
        }
        if let Ok(spare) = self.inner.spare.try_lock() {
            descriptors.extend(spare.iter().flat_map(|ready| &ready.descriptors.open));
        }
        descriptors
    }

    fn reserved_pages(&self) -> u32 {
        (LISTING / 4096) as u32
    }

    fn limits(&self) -> Limits {
        let max = self.shared().map_or(4096, |s| s.max_payload);
        Limits {
            max_read: max,
            max_write: max,
        }
    }

    fn submit(&self, batch: &mut Vec<Request>) {
        let shared = match self.shared() {
            Ok(shared) => shared,
            Err(e) => {
                let code = e.raw_os_error().unwrap_or(libc::EIO);
                return batch.drain(..).for_each(|r| (r.done)(Err(errno(code))));
            }
        };
        for r in batch.drain(..) {
            let at = self.at(&shared, r.node, r.handle);
            let reserved = at.and_then(|at| Ok((at, shared.reserve()?)));
            let ((node, fh), id) = match reserved {
                Ok(reserved) => reserved,
                Err(e) => {
                    (r.done)(Err(e));
                    continue;
                }
            };
            let waiting = Waiting::Data(r.op, r.len, r.done);
            match r.op {
                Op::Read => {
                    let op = abi::ReadIn {
                        fh,
                        offset: r.offset,
                        size: r.len as u32,
                        read_flags: if r.dontcache {
                            abi::ReadFlags::DONTCACHE.bits()
                        } else {
                            0
                        },
                        ..Default::default()
                    };
                    let from = Direction::FromServer;
                    let op = op.as_bytes();
                    shared.send(
                        id,
                        Opcode::Read as u32,
                        node,
                        op,
                        &[],
                        &r.segs,
                        from,
                        waiting,
                    );
                }
                Op::Write => {
                    let mut flags = abi::WriteFlags::empty();
                    flags.set(abi::WriteFlags::CACHE, r.writeback);
                    flags.set(abi::WriteFlags::DONTCACHE, r.dontcache);
                    let op = abi::WriteIn {
                        fh,
                        offset: r.offset,
                        size: r.len as u32,
                        write_flags: flags.bits(),
                        ..Default::default()
                    };
                    let (to, op) = (Direction::ToServer, op.as_bytes());
                    shared.send(
                        id,
                        Opcode::Write as u32,
                        node,
                        op,
                        &[],
                        &r.segs,
                        to,
                        waiting,
                    );
                }
            }
        }
        shared.queue.ring();
    }

    fn poll(&self, done: &mut dyn FnMut() -> bool) {
        if let Ok(shared) = self.shared() {
            shared.poll(done);
        }
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn lease(&self, node: NodeId, lease: Lease) -> io::Result<Grant> {
        let op = ext::LeaseIn {
            mode: wire(lease),
            padding: 0,
        };
        let shared = self.living()?;
        let node = self.node(&shared, node)?;
        let reply = shared.call(ext::LEASE, node, op.as_bytes(), &[], &[])?;
        let out: ext::LeaseOut = parse(&reply)?;
        Ok(if out.granted == ext::LEASE_NONE {
            let retry = Duration::from_millis(out.retry_ms.into());
            match out.seq {
                0 => Grant::Refused(retry),
                _ => Grant::Taken(retry),
            }
        } else {
            Grant::Granted {
                session: shared.generation,
                seq: shared.generation << SEQ_BITS | out.seq,
                attr: attr_of(&out.attr),
            }
        })
    }

    fn return_lease(&self, node: NodeId, seq: u64, keep: Lease) {
        // One of a server that is gone went with it.
        if let Ok(shared) = self.shared()
            && shared.generation == seq >> SEQ_BITS
            && let Ok(node) = self.node(&shared, node)
        {
            let op = ext::LeaseReturnIn {
                seq: seq & ((1 << SEQ_BITS) - 1),
                keep: wire(keep),
                padding: 0,
            };
            shared.tell(ext::LEASE_RETURN, node, op.as_bytes());
        }
    }

    fn publish_from(&self, figures: Figures) {
        let _ = self.inner.figures.set(figures);
    }

    fn on_recall(&self, call: OnRecall) {
        let Some(recalls) = lock(&self.inner.recalled).take() else {
            return;
        };
        let known = self.inner.known.clone();
        let answer = move || {
            ANSWERS_RECALLS.set(true);
            NEVER_WAITS.set(true);
            while let Ok((generation, mut recall)) = recalls.recv() {
                let node = lock(&known).ours(generation, recall.node);
                if let Some(node) = node {
                    recall.node = node;
                    recall.seq |= generation << SEQ_BITS;
                    call(recall);
                }
            }
        };
        let thread = std::thread::Builder::new().name("uvfs-recalls".into());
        if let Err(error) = thread.spawn(answer) {
            tracing::error!(%error, "recalls will not be answered");
        }
    }

    fn is_alive(&self) -> bool {
        (self.inner.current.load().as_ref()).is_some_and(|shared| shared.is_alive())
    }

    fn session(&self) -> Option<u64> {
        let current = self.inner.current.load();
        let shared = current.as_ref().filter(|shared| shared.is_alive())?;
        Some(shared.generation)
    }

    fn still_open(&self, node: NodeId, handle: u64) -> io::Result<()> {
        let shared = self.shared()?;
        self.at(&shared, node, handle).map(drop)
    }

    fn names(&self, node: NodeId, handle: u64) -> (u64, u64, u64) {
        let Ok(shared) = self.shared() else {
            return (0, node, handle);
        };
        if shared.generation == 0 {
            return (0, node, handle);
        }
        let known = self.known();
        let generation = shared.generation;
        (
            generation,
            known.node(generation, node).unwrap_or(u64::MAX),
            known.handle(generation, node, handle).unwrap_or(u64::MAX),
        )
    }

    fn has_written(&self) -> bool {
        let Ok(shared) = self.shared() else {
            return false;
        };
        let bound = *self.inner.patience.get().unwrap_or(&RECONNECT);
        let began = Instant::now();
        loop {
            // Looked at first: once the watcher has ended the session nothing changes any more.
            let last = shared.stop.load(Ordering::Acquire) || NEVER_WAITS.get();
            match shared.queue.server_end() {
                End::Closed if !last && began.elapsed() < bound => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                end => return end == End::Written,
            }
        }
    }

    fn reconnect(&self) -> io::Result<()> {
        let inner = &*self.inner;
        let gone = Err(errno(libc::ENOTCONN));
        if self.is_alive() {
            return Ok(());
        }
        if NEVER_WAITS.get() || inner.path.is_none() {
            return gone;
        }
        let mut attempts = lock(&inner.attempts);
        if self.is_alive() {
            return Ok(());
        }
        let bound = *inner.patience.get().unwrap_or(&RECONNECT);
        let lost = *attempts.lost.get_or_insert_with(Instant::now);
        let left = bound.saturating_sub(lost.elapsed());
        // One that began before may have looked too early.
        let wait_for = attempts.begun + 1;
        attempts.wanted = true;
        inner.attempted.notify_all();
        let waits = |a: &mut Attempts| {
            !a.over && a.lost.is_some() && (lost.elapsed() < bound || a.ended < wait_for)
        };
        let waited =
            inner
                .attempted
                .wait_timeout_while(attempts, left.max(LAST_LOOK.min(bound)), waits);
        let (attempts, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match attempts.other {
            _ if self.is_alive() => Ok(()),
            true => Err(errno(libc::ESTALE)),
            false => gone,
        }
    }

    fn on_reattach(&self, call: OnReattach) {
        *lock(&self.inner.on_reattach) = Some(Arc::new(call));
    }

    fn lookup(&self, parent: NodeId, name: &OsStr) -> io::Result<Entry> {
        self.call_entry(Opcode::Lookup, parent, &[], &[name])
    }

    fn forget(&self, node: NodeId, lookups: u64) {
        if let Ok(shared) = self.shared() {
            let told = self.known().forget(shared.generation, node, lookups);
            if let Some((node, nlookup)) = told {
                let op = abi::ForgetIn { nlookup };
                shared.tell(Opcode::Forget as u32, node, op.as_bytes());
            }
        }
    }

    fn getattr(&self, node: NodeId) -> io::Result<Attr> {
        let op = abi::GetattrIn::default();
        let out: abi::AttrOut = parse(&self.call(Opcode::Getattr, node, op.as_bytes(), &[])?)?;
        Ok(attr_of(&out.attr))
    }

    fn setattr(&self, node: NodeId, set: &SetAttr) -> io::Result<Attr> {
        let mut valid = SetattrValid::empty();
        valid.set(SetattrValid::MODE, set.mode.is_some());
        valid.set(SetattrValid::UID, set.uid.is_some());
        valid.set(SetattrValid::GID, set.gid.is_some());
        valid.set(SetattrValid::SIZE, set.size.is_some());
        valid.set(SetattrValid::ATIME, set.atime.is_some());
        valid.set(SetattrValid::MTIME, set.mtime.is_some());
        valid.set(SetattrValid::FH, set.handle.is_some() && set.size.is_some());
        let (atime, mtime) = (set.atime.unwrap_or_default(), set.mtime.unwrap_or_default());
        let shared = self.living()?;
        let (node, fh) = match set.handle {
            Some(handle) => self.at(&shared, node, handle)?,
            None => (self.node(&shared, node)?, 0),
        };
        let op = abi::SetattrIn {
            valid: valid.bits(),
            fh,
            size: set.size.unwrap_or(0),
            atime: atime.0 as u64,
            atimensec: atime.1,
            mtime: mtime.0 as u64,
            mtimensec: mtime.1,
            mode: set.mode.unwrap_or(0),
            uid: set.uid.unwrap_or(0),
            gid: set.gid.unwrap_or(0),
            ..Default::default()
        };
        let opcode = Opcode::Setattr as u32;
        let out: abi::AttrOut = parse(&shared.call(opcode, node, op.as_bytes(), &[], &[])?)?;
        Ok(attr_of(&out.attr))
    }

    fn readlink(&self, node: NodeId) -> io::Result<OsString> {
        let target = self.call_long(Opcode::Readlink, node, &[], &[])?;
        Ok(OsStr::from_bytes(&target).to_owned())
    }

    fn symlink(&self, parent: NodeId, name: &OsStr, target: &OsStr) -> io::Result<Entry> {
        self.call_entry(Opcode::Symlink, parent, &[], &[name, target])
    }

    fn mknod(&self, parent: NodeId, name: &OsStr, mode: u32, rdev: u32) -> io::Result<Entry> {
        let op = abi::MknodIn {
            mode,
            rdev,
            umask: 0,
            padding: 0,
        };
        self.call_entry(Opcode::Mknod, parent, op.as_bytes(), &[name])
    }

    fn mkdir(&self, parent: NodeId, name: &OsStr, mode: u32) -> io::Result<Entry> {
        let op = abi::MkdirIn { mode, umask: 0 };
        self.call_entry(Opcode::Mkdir, parent, op.as_bytes(), &[name])
    }

    fn unlink(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Unlink, parent, &[], &[name]).map(drop)
    }

    fn rmdir(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Rmdir, parent, &[], &[name]).map(drop)
    }

    fn rename(&self, p: NodeId, n: &OsStr, np: NodeId, nn: &OsStr, flags: u32) -> io::Result<()> {
        let shared = self.living()?;
        let op = abi::Rename2In {
            newdir: self.node(&shared, np)?,
            flags,
            padding: 0,
        };
        let (p, names) = (self.node(&shared, p)?, joined(&[n, nn])?);
        let opcode = Opcode::Rename2 as u32;
        shared.call(opcode, p, op.as_bytes(), &names, &[]).map(drop)
    }

    fn link(&self, node: NodeId, new_parent: NodeId, new_name: &OsStr) -> io::Result<Entry> {
        let shared = self.living()?;
        let op = abi::LinkIn {
            oldnodeid: self.node(&shared, node)?,
        };
        let (parent, names) = (self.node(&shared, new_parent)?, joined(&[new_name])?);
        let opcode = Opcode::Link as u32;
        let reply = shared.call(opcode, parent, op.as_bytes(), &names, &[])?;
        self.entry(&shared, &reply, new_parent, new_name)
    }

    fn open(&self, node: NodeId, flags: i32) -> io::Result<u64> {
        let op = abi::OpenIn {
            flags: flags as u32,
            open_flags: 0,
        };
        let shared = self.living()?;
        let at_server = self.node(&shared, node)?;
        let reply = shared.call(Opcode::Open as u32, at_server, op.as_bytes(), &[], &[])?;
        let out: abi::OpenOut = parse(&reply)?;
        let identity = &reply[size_of::<abi::OpenOut>()..];
        self.known()
            .opened(shared.generation, node, out.fh, flags, identity, false)
    }

    fn import(&self, secret: &[u8; 32]) -> io::Result<Imported> {
        let op = ImportIn { token: *secret };
        let shared = self.living()?;
        let reply = shared.call(IMPORT, 0, op.as_bytes(), &[], &[])?;
        let out: ImportOut = parse(&reply)?;
        let identity = &reply[size_of::<ImportOut>()..];
        let flags = out.flags as i32;
        let mut known = self.known();
        let node = known.looked_up(shared.generation, out.nodeid, None)?;
        let handle = known.opened(shared.generation, node, out.fh, flags, identity, true)?;
        Ok(Imported {
            entry: Entry {
                node,
                attr: attr_of(&out.attr),
            },
            handle,
            flags,
        })
    }

    fn create(&self, parent: NodeId, name: &OsStr, new: NewFile) -> io::Result<(Entry, u64)> {
        let op = abi::CreateIn {
            flags: (new.flags | libc::O_CREAT) as u32,
            mode: new.mode | libc::S_IFREG,
            ..Default::default()
        };
        let shared = self.living()?;
        let (at_server, names) = (self.node(&shared, parent)?, joined(&[name])?);
        let opcode = Opcode::Create as u32;
        let reply = shared.call(opcode, at_server, op.as_bytes(), &names, &[])?;
        let entry = self.entry(&shared, &reply, parent, name)?;
        let rest = &reply[size_of::<abi::EntryOut>()..];
        let (out, identity) = abi::OpenOut::read_from_prefix(rest).map_err(|_| errno(libc::EIO))?;
        let (generation, flags) = (shared.generation, new.flags);
        let mut known = self.known();
        let fh = known.opened(generation, entry.node, out.fh, flags, identity, false)?;
        Ok((entry, fh))
    }

    fn release(&self, node: NodeId, handle: u64) {
        if let Ok(shared) = self.shared() {
            let at_server = self.node(&shared, node);
            let fh = self.known().closed(shared.generation, node, handle);
            if let (Ok(node), Some(fh)) = (at_server, fh) {
                let op = abi::ReleaseIn {
                    fh,
                    ..Default::default()
                };
                shared.tell(Opcode::Release as u32, node, op.as_bytes());
            }
        }
    }

    fn fsync(&self, node: NodeId, handle: u64, data_only: bool) -> io::Result<()> {
        let fsync_flags = if data_only { abi::FSYNC_FDATASYNC } else { 0 };
        let shared = self.living()?;
        let (node, fh) = self.at(&shared, node, handle)?;
        let op = abi::FsyncIn {
            fh,
            fsync_flags,
            padding: 0,
        };
        match shared.call(Opcode::Fsync as u32, node, op.as_bytes(), &[], &[]) {
            // As the kernel: a file system without fsync has nothing to do for it.
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
            other => other.map(drop),
        }
    }

    fn submit_fsync(&self, node: NodeId, handle: u64, data_only: bool, done: Done) {
        let done: Done = Box::new(|result| match result {
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => done(Ok(0)),
            other => done(other),
        });
        let found = self.living().and_then(|shared| {
            let at = self.at(&shared, node, handle)?;
            let id = shared.reserve()?;
            Ok((shared, at, id))
        });
        let (shared, (node, fh), id) = match found {
            Ok(found) => found,
            Err(e) => return done(Err(e)),
        };
        let op = abi::FsyncIn {
            fh,
            fsync_flags: if data_only { abi::FSYNC_FDATASYNC } else { 0 },
            padding: 0,
        };
        let (to, op) = (Direction::ToServer, op.as_bytes());
        // Its answer has no body, as that of a read of nothing.
        let waiting = Waiting::Data(Op::Read, 0, done);
        shared.send(id, Opcode::Fsync as u32, node, op, &[], &[], to, waiting);
        shared.queue.ring();
    }

    fn lock(&self, n: NodeId, handle: u64, request: &LockRequest, wait: bool) -> io::Result<()> {
        let opcode = if wait { Opcode::Setlkw } else { Opcode::Setlk };
        if request.kind.is_none() {
            // Whatever comes, it is not to be taken again; without a server it is gone as it is.
            self.known().locked(n, handle, request);
            if !self.is_alive() {
                return Ok(());
            }
        }
        let shared = self.living()?;
        let (at, fh) = self.at(&shared, n, handle)?;
        let op = lock_in(fh, request);
        shared.call(opcode as u32, at, op.as_bytes(), &[], &[])?;
        if request.kind.is_some() {
            let mut known = self.known();
            known.check(shared.generation)?;
            known.locked(n, handle, request);
        }
        Ok(())
    }

    fn test_lock(&self, n: NodeId, h: u64, lock: &LockRequest) -> io::Result<Option<RangeLock>> {
        let shared = self.living()?;
        let (n, h) = self.at(&shared, n, h)?;
        let op = lock_in(h, lock);
        let opcode = Opcode::Getlk as u32;
        let out: abi::LkOut = parse(&shared.call(opcode, n, op.as_bytes(), &[], &[])?)?;
        let kind = match out.lk.r#type as i32 {
            libc::F_RDLCK => LockKind::Shared,
            libc::F_WRLCK => LockKind::Exclusive,
            _ => return Ok(None),
        };
        Ok(Some(RangeLock {
            kind,
            start: out.lk.start,
            end: out.lk.end,
            pid: out.lk.pid,
        }))
    }

    fn copy_range(
        &self,
        from: (NodeId, u64),
        from_offset: u64,
        to: (NodeId, u64),
        to_offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let shared = self.living()?;
        let (node, fh_in) = self.at(&shared, from.0, from.1)?;
        let (nodeid_out, fh_out) = self.at(&shared, to.0, to.1)?;
        let op = abi::CopyFileRangeIn {
            fh_in,
            off_in: from_offset,
            nodeid_out,
            fh_out,
            off_out: to_offset,
            len,
            flags: 0,
        };
        let opcode = Opcode::CopyFileRange64 as u32;
        match shared.call(opcode, node, op.as_bytes(), &[], &[]) {
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => Err(errno(libc::EOPNOTSUPP)),
            Err(e) => Err(e),
            Ok(reply) => Ok(parse::<abi::CopyFileRangeOut>(&reply)?
                .bytes_copied
                .min(len)),
        }
    }

    fn fallocate(&self, n: NodeId, h: u64, mode: i32, offset: u64, len: u64) -> io::Result<()> {
        let shared = self.living()?;
        let (n, h) = self.at(&shared, n, h)?;
        let op = abi::FallocateIn {
            fh: h,
            offset,
            length: len,
            mode: mode as u32,
            padding: 0,
        };
        match shared.call(Opcode::Fallocate as u32, n, op.as_bytes(), &[], &[]) {
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => Err(errno(libc::EOPNOTSUPP)),
            other => other.map(drop),
        }
    }

    fn lseek(&self, node: NodeId, handle: u64, offset: u64, whence: i32) -> io::Result<u64> {
        let shared = self.living()?;
        let (node, fh) = self.at(&shared, node, handle)?;
        let op = abi::LseekIn {
            fh,
            offset,
            whence: whence as u32,
            padding: 0,
        };
        let out: abi::LseekOut =
            parse(&shared.call(Opcode::Lseek as u32, node, op.as_bytes(), &[], &[])?)?;
        Ok(out.offset)
    }

    fn readdir(&self, node: NodeId) -> io::Result<Vec<DirEntry>> {
        let op = abi::OpenIn {
            flags: libc::O_DIRECTORY as u32,
            open_flags: 0,
        };
        let shared = self.living()?;
        let node = self.node(&shared, node)?;
        let opcode = Opcode::Opendir as u32;
        let opened: abi::OpenOut = parse(&shared.call(opcode, node, op.as_bytes(), &[], &[])?)?;
        let list = self.list_all(&shared, node, opened.fh);
        let op = abi::ReleaseIn {
            fh: opened.fh,
            ..Default::default()
        };
        shared.tell(Opcode::Releasedir as u32, node, op.as_bytes());
        list
    }

    fn statfs(&self, node: NodeId) -> io::Result<StatFs> {
        let out: abi::StatfsOut = parse(&self.call(Opcode::Statfs, node, &[], &[])?)?;
        Ok(StatFs {
            blocks: out.st.blocks,
            bfree: out.st.bfree,
            bavail: out.st.bavail,
            files: out.st.files,
            ffree: out.st.ffree,
            bsize: out.st.bsize,
            frsize: out.st.frsize,
            namelen: out.st.namelen,
        })
    }

    fn setxattr(&self, node: NodeId, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        // Without SETXATTR_EXT, which this session does not negotiate, the structure is short.
        let mut op = (value.len() as u32).to_ne_bytes().to_vec();
        op.extend_from_slice(&flags.to_ne_bytes());
        let mut inline = name.as_bytes().to_vec();
        inline.push(0);
        inline.extend_from_slice(value);
        if inline.len() > INLINE_SIZE {
            return Err(errno(libc::E2BIG));
        }
        let shared = self.living()?;
        let node = self.node(&shared, node)?;
        shared
            .call(Opcode::Setxattr as u32, node, &op, &inline, &[])
            .map(drop)
    }

    fn getxattr(&self, node: NodeId, name: &OsStr) -> io::Result<Vec<u8>> {
        let op = abi::GetxattrIn {
            size: LISTING as u32,
            padding: 0,
        };
        let mut inline = name.as_bytes().to_vec();
        inline.push(0);
        self.call_long(Opcode::Getxattr, node, op.as_bytes(), &inline)
    }

    fn listxattr(&self, node: NodeId) -> io::Result<Vec<OsString>> {
        let op = abi::GetxattrIn {
            size: LISTING as u32,
            padding: 0,
        };
        let list = self.call_long(Opcode::Listxattr, node, op.as_bytes(), &[])?;
        Ok(list
            .split(|&b| b == 0)
            .filter(|name| !name.is_empty())
            .map(|name| OsStr::from_bytes(name).to_owned())
            .collect())
    }

    fn removexattr(&self, node: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Removexattr, node, &[], &[name]).map(drop)
    }
}

impl Server {
    /// The entries of a session's open directory, without `.` and `..`.
    fn list_all(&self, shared: &Shared, node: u64, fh: u64) -> io::Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        let mut offset = 0;
        loop {
            let op = abi::ReadIn {
                fh,
                offset,
                size: LISTING as u32,
                ..Default::default()
            };
            let bytes = self.call_long_at(shared, Opcode::Readdir, node, op.as_bytes(), &[])?;
            let mut next = offset;
            for one in reply::dirents(&bytes) {
                let (entry, name) = one.map_err(|_| errno(libc::EIO))?;
                next = entry.off;
                if name != b"." && name != b".." {
                    entries.push(DirEntry {
                        name: OsStr::from_bytes(name).to_owned(),
                        ino: entry.ino,
                        kind: entry.r#type as u8,
                    });
                }
            }
            // None, or a server that would go on for ever.
            if next == offset {
                return Ok(entries);
            }
            offset = next;
        }
    }
}
