//! The connection to a uvfs server over a shared-memory queue pair.
//!
//! - `pages.rs` sends the page cache's reads and writes.
//! - `requests.rs` makes FUSE's other requests.
//! - `leases.rs` asks for leases, and imports open files.
//!
//! All of them put a request into the queue pair by `channel.rs`.
//!
//! A thread, the watcher, waits for the socket to close (`reconnect.rs`). Then everything under way ends with
//! ENOTCONN, and the watcher tries to attach to a server of the same source at the same path. It finds
//! the open files there, opens them, takes their locks and tells the cache. Only then do other threads see
//! the new session. Requests name nodes and handles by numbers that stay the same (`known.rs`).

mod channel;
mod codec;
mod known;
mod leases;
pub(crate) mod pages;
mod reconnect;
mod requests;
mod silence;

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use rustix::io::{self, Errno};
use uvfs_proto::abi::Opcode;
use uvfs_queue::arena::Arena;
use uvfs_queue::attach;
use uvfs_queue::pair::{End, Seg};

use crate::error::{Doing, Result};
use crate::stats::Stats;
use crate::types::{Entry, NodeId, Reattached, Recall};
pub use channel::OnDescriptor;
use channel::{ANSWERS_RECALLS, Channel, NEVER_WAITS, Reply, process_name};
use codec::{entry_of, joined};
use known::Known;
use reconnect::Ready;
use uvfs_sys::lock;

/// Bytes of a listing, an attribute's value or a list of names that are asked for at once.
const LISTING: usize = 64 << 10;
/// How long a server may answer nothing, unless [`Connection::answers_within`] says otherwise.
const ANSWERS: Duration = Duration::from_secs(30);
/// How long calls wait for a server that went, unless [`Connection::reconnect_within`] says otherwise.
const RECONNECT: Duration = Duration::from_secs(5);
/// How long a call that begins later waits for an attempt to find it.
const LAST_LOOK: Duration = Duration::from_secs(1);
/// Lease numbers have the session's number in front of the server's.
const SEQ_BITS: u32 = 48;

/// The connection to a uvfs server, through the socket of `uvfs serve` or of a mount.
///
/// The pages of the client's cache are shared with the server: it reads and writes them in place,
/// and writes those that are left dirty when this process dies.
///
/// When the server dies, or is ended, calls wait for one that serves the same source at the same
/// path: [`Connection::reconnect_within`] says how long. That one is attached to, open files are opened
/// there again, and what is dirty is written. Files that can't be carried over fail: those that are gone
/// with `ESTALE`, files whose locks another client has by now, or that another program has changed while
/// they were dirty here, with `EIO`. Files that a guest imported are its no more (`ESTALE`). Changes of
/// names that were under way fail with `ENOTCONN`, and may have been made.
///
/// A server that lives and answers nothing any more counts as gone after [`Connection::answers_within`].
///
/// ```no_run
/// use std::time::Duration;
/// use uvfs_client::{Client, Config, Connection};
///
/// # fn main() -> uvfs_client::Result<()> {
/// // Of `uvfs serve DIRECTORY --socket /run/user/1000/files`.
/// let server = Connection::connect("/run/user/1000/files")?;
/// let server = server.reconnect_within(Duration::from_secs(60));
/// let client = Client::new(server, Config::default())?;
/// println!("{} bytes", client.stat("file")?.size);
/// # Ok(())
/// # }
/// ```
///
/// Its methods are requests to the server; [`crate::Client`] has paths, and a cache. A request fails with
/// the errno that the server answers, or with `ENOTCONN` when there is none.
pub struct Connection {
    inner: Arc<Inner>,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

/// State that outlives a session.
struct Inner {
    /// Where the server is; without it the client does not re-attach.
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
    current: ArcSwapOption<Channel>,
    /// One socket for all attempts to reach the next server. It is made in advance, while a program under `uvfs run`
    /// waits for this client: making it takes descriptor numbers that the program may close or count on.
    spare: Mutex<Option<Ready>>,
    /// A session that is to become the current one.
    next: Mutex<Option<Arc<Channel>>>,
    known: Arc<Mutex<Known>>,
    /// The file system does nothing when a file is closed.
    ignores_closes: AtomicBool,
    /// Memory for listings and values, one at a time: a page of the arena.
    room: Mutex<u32>,
    recalls: Mutex<Option<Sender<(u64, Recall)>>>,
    /// To the thread that answers recalls, once there is one.
    recalled: Mutex<Option<Receiver<(u64, Recall)>>>,
    /// The process's name, read before it attaches. The threads that publish it do no I/O of their own, as the
    /// program's I/O functions may lead into this client.
    name: [u8; 16],
    /// Set by [`Connection::tell`].
    cache: Arc<OnceLock<Weak<dyn Events>>>,
    attempts: Mutex<Attempts>,
    /// An attempt is wanted, or has ended.
    attempted: Condvar,
    stop: AtomicBool,
}

/// The cache above a connection, as far as the connection knows it: it takes recalls and reattachments, and gives the
/// statistics.
pub(crate) trait Events: Send + Sync {
    /// The server wants a lease back. Comes from a thread of its own, and may block.
    fn recalled(&self, recall: Recall);

    /// A server came back, which no call can use yet. All requests to the one before have ended or are about to,
    /// with an error. Must make no request, but for [`Connection::release`].
    fn reattached(&self, found: &Reattached<'_>);

    /// The statistics for the server's `uvfs stats`.
    fn stats(&self) -> Stats;
}

/// The watcher's attempts to attach.
#[derive(Default)]
struct Attempts {
    /// When the client noticed that there is no server.
    lost: Option<Instant>,
    /// The watcher no longer looks for one.
    over: bool,
    wanted: bool,
    begun: u64,
    ended: u64,
    /// Another source is served at the path.
    other: bool,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("path", &self.inner.path)
            .finish_non_exhaustive()
    }
}

impl Connection {
    /// The pages at the arena's end that the connection keeps for itself.
    pub const RESERVED_PAGES: u32 = (LISTING / 4096) as u32;

    /// Connects to the socket of a server. Attaching comes with [`crate::Client::new`].
    ///
    /// # Errors
    /// `ENOENT` or `ECONNREFUSED` when no server is there, `EACCES` for another user's.
    pub fn connect(socket: impl AsRef<Path>) -> Result<Self> {
        let path = socket.as_ref();
        let connect = || {
            let socket = attach::socket()?;
            socket.set_write_timeout(Some(ANSWERS))?;
            attach::connect(&socket, path).map(|()| socket)
        };
        let socket = connect().doing("connecting to", path)?;
        // As it is found from elsewhere later.
        Ok(Self::new(socket, std::path::absolute(path).ok()))
    }

    /// How long calls wait for a server that went to come back (5 s unless this is said): counted
    /// from when it was first missed. Later ones fail with `ENOTCONN`, or `ESTALE` when another
    /// source is served at the path, after a look whether it is there now. Dirty pages stay, and
    /// are written when it comes back.
    #[must_use]
    pub fn reconnect_within(self, bound: Duration) -> Self {
        let _ = self.inner.patience.set(bound);
        self
    }

    /// How long a server may answer nothing while it is asked for something (30 s unless this is said):
    /// then it counts as one that went, and calls wait for it to come back as
    /// [`Connection::reconnect_within`] says. Before that the client asks it for a sign of life, so a single
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
        let (recalls, recalled) = mpsc::channel();
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
                ignores_closes: AtomicBool::new(false),
                room: Mutex::default(),
                recalls: Mutex::new(Some(recalls)),
                recalled: Mutex::new(Some(recalled)),
                name: process_name(),
                cache: Arc::default(),
                attempts: Mutex::default(),
                attempted: Condvar::new(),
                stop: AtomicBool::new(false),
            }),
            watcher: Mutex::default(),
        }
    }

    /// Attaches to the server, which then reads and writes the pages of `arena`. Called once, before any request;
    /// [`crate::Client::new`] does it.
    ///
    /// # Errors
    /// `EBUSY` when it is attached already, the errors of the socket and the queue, and the server's refusal.
    pub fn attach(&self, arena: &Arc<Arena>) -> Result<()> {
        let socket = lock(&self.inner.first).take();
        let socket = socket.ok_or(Errno::BUSY)?;
        // The last pages, which the cache was not given.
        *lock(&self.inner.room) = arena.pages() - Self::RESERVED_PAGES;
        let ready = self.inner.ready(socket, false);
        if self.inner.path.is_some() {
            *lock(&self.inner.spare) = Some(self.inner.ready(attach::socket()?, true));
        }
        let path = self.inner.path.as_deref();
        let channel = self.inner.attach(ready, arena, 0);
        let channel = channel.doing("attaching to", path.unwrap_or("the server".as_ref()))?;
        self.inner.current.store(Some(channel));
        let inner = self.inner.clone();
        let watcher = std::thread::Builder::new().name("uvfs-watcher".into());
        *lock(&self.watcher) = Some(watcher.spawn(move || inner.watch())?);
        Ok(())
    }

    /// The descriptors that the connection has open once it is attached.
    pub fn descriptors(&self) -> Vec<RawFd> {
        // Without waiting for a lock: also for the child of a fork.
        let current = self.inner.current.load();
        let mut descriptors = Vec::new();
        if let Some(channel) = current.as_ref() {
            descriptors.extend(&channel.descriptors.open);
            descriptors.push(channel.arena.as_fd().as_raw_fd());
        }
        if let Ok(spare) = self.inner.spare.try_lock() {
            descriptors.extend(spare.iter().flat_map(|ready| &ready.descriptors.open));
        }
        descriptors
    }

    /// The most bytes of one read or write.
    pub fn max_payload(&self) -> usize {
        self.current().map_or(4096, |channel| channel.max_payload)
    }

    /// Says which cache is told of events. Called once, after [`Connection::attach`]. Starts the thread that answers
    /// recalls.
    pub(crate) fn tell(&self, cache: Weak<dyn Events>) {
        let Some(recalls) = lock(&self.inner.recalled).take() else {
            return;
        };
        let _ = self.inner.cache.set(cache.clone());
        let known = self.inner.known.clone();
        let answer = move || {
            ANSWERS_RECALLS.set(true);
            NEVER_WAITS.set(true);
            while let Ok((generation, mut recall)) = recalls.recv() {
                let node = lock(&known).ours(generation, recall.node);
                if let (Some(node), Some(cache)) = (node, cache.upgrade()) {
                    recall.node = node;
                    recall.seq |= generation << SEQ_BITS;
                    cache.recalled(recall);
                }
            }
        };
        let thread = std::thread::Builder::new().name("uvfs-recalls".into());
        if let Err(error) = thread.spawn(answer) {
            tracing::error!(%error, "recalls will not be answered");
        }
    }

    /// Whether the server still stands by its leases.
    pub fn is_alive(&self) -> bool {
        (self.inner.current.load().as_ref()).is_some_and(|channel| channel.is_alive())
    }

    /// The session's number, if the server stands by its leases: another number makes void what was cached
    /// before.
    pub(crate) fn session(&self) -> Option<u64> {
        let current = self.inner.current.load();
        let channel = current.as_ref().filter(|channel| channel.is_alive())?;
        Some(channel.generation)
    }

    /// Whether a handle that was opened in a session before this one was opened again.
    ///
    /// # Errors
    /// The errno with which it was not.
    pub(crate) fn still_open(&self, node: NodeId, handle: u64) -> io::Result<()> {
        let channel = self.current()?;
        self.at(&channel, node, handle).map(drop)
    }

    /// The session now, and a node's and a handle's numbers at its server, which page descriptors have;
    /// `u64::MAX` for what has none.
    pub(crate) fn names(&self, node: NodeId, handle: u64) -> (u64, u64, u64) {
        let Ok(channel) = self.current() else {
            return (0, node, handle);
        };
        if channel.generation == 0 {
            return (0, node, handle);
        }
        let known = self.known();
        let generation = channel.generation;
        (
            generation,
            known.node(generation, node).unwrap_or(u64::MAX),
            known.handle(generation, node, handle).unwrap_or(u64::MAX),
        )
    }

    /// Waits for a server that went to come back, for as long as [`Connection::reconnect_within`] says.
    ///
    /// # Errors
    /// `ENOTCONN` when there still is none, `ESTALE` when there is one that serves something else.
    pub(crate) fn reconnect(&self) -> io::Result<()> {
        let inner = &*self.inner;
        let gone = Err(Errno::NOTCONN);
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
            true => Err(Errno::STALE),
            false => gone,
        }
    }

    /// Whether the server that went has written everything that was dirty, as one that ends in order does. Waits
    /// while it is at it.
    pub(crate) fn has_written(&self) -> bool {
        let Ok(channel) = self.current() else {
            return false;
        };
        let bound = *self.inner.patience.get().unwrap_or(&RECONNECT);
        let began = Instant::now();
        loop {
            // Looked at first: once the watcher has ended the session nothing changes any more.
            let last = channel.stop.load(Ordering::Acquire) || NEVER_WAITS.get();
            match channel.queue.server_end() {
                End::Closed if !last && began.elapsed() < bound => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                end => return end == End::Written,
            }
        }
    }

    /// The session, whether or not its server still is there.
    fn current(&self) -> io::Result<Arc<Channel>> {
        let current = self.inner.current.load_full();
        current.ok_or(Errno::NOTCONN)
    }

    /// The session, a new one if the old one's server has gone and come back.
    fn living(&self) -> io::Result<Arc<Channel>> {
        let channel = self.current()?;
        if channel.is_alive() {
            return Ok(channel);
        }
        self.reconnect()?;
        self.current()
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        lock(&self.inner.known)
    }

    /// A node's number at the session's server.
    fn node(&self, channel: &Channel, node: NodeId) -> io::Result<u64> {
        if channel.generation == 0 {
            return Ok(node);
        }
        self.known().node(channel.generation, node)
    }

    /// A node's and a handle's numbers at the session's server.
    fn at(&self, channel: &Channel, node: NodeId, handle: u64) -> io::Result<(u64, u64)> {
        if channel.generation == 0 {
            return Ok((node, handle));
        }
        let known = self.known();
        Ok((
            known.node(channel.generation, node)?,
            known.handle(channel.generation, node, handle)?,
        ))
    }

    fn call(&self, opcode: Opcode, node: NodeId, op: &[u8], names: &[&OsStr]) -> Reply {
        let channel = self.living()?;
        let node = self.node(&channel, node)?;
        channel.call(opcode as u32, node, op, &joined(names)?, &[])
    }

    /// A call that is answered by an entry.
    fn call_entry(
        &self,
        opcode: Opcode,
        parent: NodeId,
        op: &[u8],
        names: &[&OsStr],
    ) -> io::Result<Entry> {
        let channel = self.living()?;
        let n = self.node(&channel, parent)?;
        let reply = channel.call(opcode as u32, n, op, &joined(names)?, &[])?;
        self.entry(&channel, &reply, parent, names[0])
    }

    /// An entry of this name that a session's server has answered.
    fn entry(
        &self,
        channel: &Channel,
        reply: &[u8],
        parent: NodeId,
        name: &OsStr,
    ) -> io::Result<Entry> {
        let mut entry = entry_of(reply)?;
        let by = Some((parent, name));
        entry.node = self.known().looked_up(channel.generation, entry.node, by)?;
        Ok(entry)
    }

    /// A call whose reply may be long; it comes back copied.
    fn call_long(&self, opcode: Opcode, node: NodeId, op: &[u8], names: &[&OsStr]) -> Reply {
        let channel = self.living()?;
        let node = self.node(&channel, node)?;
        self.call_long_at(&channel, opcode, node, op, &joined(names)?)
    }

    fn call_long_at(
        &self,
        channel: &Channel,
        opcode: Opcode,
        node: u64,
        op: &[u8],
        inline: &[u8],
    ) -> Reply {
        let page = lock(&self.inner.room);
        let segs = [Seg {
            offset: channel.arena.seg(*page, 0, 0).offset,
            len: LISTING as u32,
        }];
        channel.call(opcode as u32, node, op, inline, &segs)
    }
}

/// A server at the other end of a connected socket: of `uvfs_server::in_process`, or one that was
/// connected or passed on by other means. When it goes it is gone for good.
impl From<UnixStream> for Connection {
    fn from(socket: UnixStream) -> Self {
        Self::new(socket, None)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let inner = &self.inner;
        {
            let _attempts = lock(&inner.attempts);
            inner.stop.store(true, Ordering::Release);
            inner.attempted.notify_all();
        }
        // Ends the thread that answers recalls; it may be this one.
        lock(&inner.recalls).take();
        let next = lock(&inner.next).take();
        for channel in [next, inner.current.load_full()].into_iter().flatten() {
            channel.end();
            // Wakes the watcher.
            let _ = channel.socket.shutdown(std::net::Shutdown::Both);
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
