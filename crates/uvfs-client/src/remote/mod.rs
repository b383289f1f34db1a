//! A uvfs server over a shared-memory queue pair, as a [`Backend`](crate::backend::Backend).
//!
//! A thread, the watcher, waits for the socket to close (`reconnect.rs`). Then everything under way ends with
//! ENOTCONN, and the watcher tries to attach to a server of the same source at the same path. It finds
//! the open files there, opens them, takes their locks and tells the cache. Only then do other threads see
//! the new session. Requests name nodes and handles by numbers that stay the same (`known.rs`).

mod backend;
mod codec;
mod file_ops;
mod reconnect;
mod session;

use std::ffi::OsStr;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use uvfs_proto::abi::Opcode;
use uvfs_queue::attach;
use uvfs_queue::pair::Seg;

use crate::backend::{Entry, Figures, NodeId, OnReattach, Recall, SharedServer};
use crate::cache::errno;
use crate::known::Known;
use codec::{entry_of, joined};
use reconnect::Ready;
pub use session::OnDescriptor;
use session::{NEVER_WAITS, Reply, Session, process_name};
use uvfs_sys::lock;

/// Bytes of a listing, an attribute's value or a list of names that are asked for at once.
const LISTING: usize = 64 << 10;
/// How long a server may answer nothing, unless [`Server::answers_within`] says otherwise.
const ANSWERS: Duration = Duration::from_secs(30);
/// How long calls wait for a server that went, unless [`Server::reconnect_within`] says otherwise.
const RECONNECT: Duration = Duration::from_secs(5);
/// How long a call that begins later waits for an attempt to find it.
const LAST_LOOK: Duration = Duration::from_secs(1);
/// Lease numbers have the session's number in front of the server's.
const SEQ_BITS: u32 = 48;

/// A uvfs server reached through the socket of `uvfs serve` or of a mount.
///
/// The pages of the client's cache are shared with the server: it reads and writes them in place,
/// and writes those that are left dirty when this process dies.
///
/// When the server dies, or is ended, calls wait for one that serves the same source at the same
/// path: [`Server::reconnect_within`] says how long. That one is attached to, open files are opened
/// there again, and what is dirty is written. Files that can't be carried over fail: those that are gone
/// with `ESTALE`, files whose locks another client has by now, or that another program has changed while
/// they were dirty here, with `EIO`. Files that a guest imported are its no more (`ESTALE`). Changes of
/// names that were under way fail with `ENOTCONN`, and may have been made.
///
/// A server that lives and answers nothing any more counts as gone after [`Server::answers_within`].
///
/// ```no_run
/// use std::time::Duration;
/// use uvfs_client::{Client, Config, Server};
///
/// # fn main() -> std::io::Result<()> {
/// // Of `uvfs serve DIRECTORY --socket /run/user/1000/files`.
/// let server = Server::connect("/run/user/1000/files")?;
/// let server = server.reconnect_within(Duration::from_secs(60));
/// let client = Client::new(server, Config::default())?;
/// println!("{} bytes", client.stat("file")?.size);
/// # Ok(())
/// # }
/// ```
pub struct Server {
    inner: Arc<Connection>,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

/// State that outlives a session.
struct Connection {
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
    current: ArcSwapOption<Session>,
    /// One socket for all attempts to reach the next server. Making it takes numbers that a program
    /// under `uvfs run` may close or count on, so it is made while that waits for this client.
    spare: Mutex<Option<Ready>>,
    /// A session that is to become the current one.
    next: Mutex<Option<Arc<Session>>>,
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
    /// The figures to publish.
    figures: Arc<OnceLock<Figures>>,
    attempts: Mutex<Attempts>,
    /// An attempt is wanted, or has ended.
    attempted: Condvar,
    stop: AtomicBool,
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
    /// source is served at the path, after a look whether it is there now. Dirty pages stay, and
    /// are written when it comes back.
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
            inner: Arc::new(Connection {
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
    fn current(&self) -> io::Result<Arc<Session>> {
        let current = self.inner.current.load_full();
        current.ok_or_else(|| errno(libc::ENOTCONN))
    }

    /// The session, a new one if the old one's server has gone and come back.
    fn living(&self) -> io::Result<Arc<Session>> {
        let session = self.current()?;
        if session.is_alive() {
            return Ok(session);
        }
        self.reconnect()?;
        self.current()
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        lock(&self.inner.known)
    }

    /// A node's number at the session's server.
    fn node(&self, session: &Session, node: NodeId) -> io::Result<u64> {
        if session.generation == 0 {
            return Ok(node);
        }
        self.known().node(session.generation, node)
    }

    /// A node's and a handle's numbers at the session's server.
    fn at(&self, session: &Session, node: NodeId, handle: u64) -> io::Result<(u64, u64)> {
        if session.generation == 0 {
            return Ok((node, handle));
        }
        let known = self.known();
        Ok((
            known.node(session.generation, node)?,
            known.handle(session.generation, node, handle)?,
        ))
    }

    fn call(&self, opcode: Opcode, node: NodeId, op: &[u8], names: &[&OsStr]) -> Reply {
        let session = self.living()?;
        let node = self.node(&session, node)?;
        session.call(opcode as u32, node, op, &joined(names)?, &[])
    }

    /// A call that is answered by an entry.
    fn call_entry(
        &self,
        opcode: Opcode,
        parent: NodeId,
        op: &[u8],
        names: &[&OsStr],
    ) -> io::Result<Entry> {
        let session = self.living()?;
        let n = self.node(&session, parent)?;
        let reply = session.call(opcode as u32, n, op, &joined(names)?, &[])?;
        self.entry(&session, &reply, parent, names[0])
    }

    /// An entry of this name that a session's server has answered.
    fn entry(
        &self,
        session: &Session,
        reply: &[u8],
        parent: NodeId,
        name: &OsStr,
    ) -> io::Result<Entry> {
        let mut entry = entry_of(reply)?;
        let by = Some((parent, name));
        entry.node = self.known().looked_up(session.generation, entry.node, by)?;
        Ok(entry)
    }

    /// A call whose reply may be long; it comes back copied.
    fn call_long(&self, opcode: Opcode, node: NodeId, op: &[u8], inline: &[u8]) -> Reply {
        let session = self.living()?;
        let node = self.node(&session, node)?;
        self.call_long_at(&session, opcode, node, op, inline)
    }

    fn call_long_at(
        &self,
        session: &Session,
        opcode: Opcode,
        node: u64,
        op: &[u8],
        inline: &[u8],
    ) -> Reply {
        let page = lock(&self.inner.room);
        let segs = [Seg {
            offset: session.arena.seg(*page, 0, 0).offset,
            len: LISTING as u32,
        }];
        session.call(opcode as u32, node, op, inline, &segs)
    }
}

/// A server at the other end of a connected socket: of `uvfs_server::in_process`, or one that was
/// connected or passed on by other means. When it goes it is gone for good.
impl From<UnixStream> for Server {
    fn from(socket: UnixStream) -> Self {
        Self::new(socket, None)
    }
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
        for session in [next, inner.current.load_full()].into_iter().flatten() {
            session.end();
            // Wakes the watcher.
            let _ = session.socket.shutdown(std::net::Shutdown::Both);
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
