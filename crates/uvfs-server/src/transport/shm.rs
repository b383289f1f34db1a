//! Clients over shared memory: each attaches through a unix socket with a page arena and a queue
//! pair, and has a thread and a runtime of its own.
//!
//! Nothing of a client is trusted: entries are copied and checked as they are taken, its user and
//! group are those of its socket, its numbers for requests are replaced. A client that breaks the
//! protocol loses its session. A guest, another user than the server's, may import open files that it
//! has tokens for (`token.rs`), and use those. What it leaves dirty in its arena is written, through files that
//! it had open.

use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashSet};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use smallvec::SmallVec;
use uvfs_io::buf::Region;
use uvfs_io::ops::{self, File};
use uvfs_io::runtime::{self, Runtime};
use uvfs_io::{IoBuf, Payload};
use uvfs_proto::abi::{self, GetattrFlags, InHeader, Opcode, SetattrValid, URING_OP_IN_OUT_SZ};
use uvfs_proto::ext;
use uvfs_proto::import::{IMPORT, ImportIn, ImportOut};
use uvfs_proto::reply;
use uvfs_proto::request::Records;
use uvfs_queue::arena::Arena;
use uvfs_queue::attach::{self, Message};
use uvfs_queue::pair::{Direction, End, INLINE_SIZE, MAX_DEPTH, MAX_SEGS, ServerQueue, Submission};
use uvfs_queue::wait::{Spinner, WaitConfig};
use zerocopy::{FromBytes, IntoBytes};

use crate::coherence::{self, Link};
use crate::dispatch;
use crate::fs::{Context, FileSystem, ROOT};
use crate::lease::Mode;
use crate::session::Session;
use crate::slot::{Answer, Scratch, Slot};
use crate::stats::{Attached, QueueStats};
use crate::transport::lead::Lead;
use crate::transport::serve_for;

/// A client that says nothing for so long while it attaches is dropped.
const PATIENCE: Duration = Duration::from_secs(5);
/// Numbers of clients' requests have this bit, which the kernel's never have.
pub(crate) const OURS: u64 = 1 << 62;

/// What one server allows its clients.
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// Clients at a time; further ones get EAGAIN.
    pub clients: usize,
    /// Pages of 4 KiB of each one's arena; larger ones get EINVAL.
    pub arena_pages: u32,
    /// How its thread waits.
    pub wait: WaitConfig,
    /// Other users may attach too, up to half of `clients`, as guests: with nothing but what they
    /// import by tokens.
    pub guests: bool,
    /// A client that holds on to a recalled lease for so long, without writing anything back, is
    /// cut off.
    pub recall: Duration,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self {
            clients: 64,
            arena_pages: 1 << 20,
            wait: WaitConfig::default(),
            guests: false,
            recall: Duration::from_secs(5),
        }
    }
}

/// A socket that clients attach to; dropping it ends their sessions.
pub struct Clients {
    path: PathBuf,
    listener: UnixListener,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Clients {
    /// Listens at `path`, which only this user may reach unless there may be guests; a dead server's
    /// socket there is replaced. Tokens of the session name this socket from now on.
    ///
    /// # Errors
    /// `EADDRINUSE` when a server answers there; those of bind(2).
    pub fn listen<F: FileSystem>(
        session: Arc<Session<F>>,
        path: &Path,
        limits: ClientLimits,
    ) -> io::Result<Self> {
        if path.exists() && UnixStream::connect(path).is_ok() {
            return Err(Errno::ADDRINUSE.into());
        }
        match std::fs::symlink_metadata(path) {
            Ok(meta) if std::os::unix::fs::FileTypeExt::is_socket(&meta.file_type()) => {
                std::fs::remove_file(path)?;
            }
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        let mode = if limits.guests { 0o666 } else { 0o600 };
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
        session.set_socket_path(path);
        let stop = Arc::new(AtomicBool::new(false));
        let flag = stop.clone();
        let other = listener.try_clone()?;
        let thread = std::thread::Builder::new()
            .name("uvfs-clients".into())
            .spawn(move || accept(&other, &session, limits, &flag))?;
        Ok(Self {
            path: path.to_owned(),
            listener,
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // First, so that a server that comes after this one finds the name free, and keeps it.
        let _ = std::fs::remove_file(&self.path);
        // Wakes the accept, also where somebody removed the socket's name.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The server's side of a client in the same program, from [`in_process`]. Dropping it ends the
/// client's session.
pub struct InProcess {
    socket: UnixStream,
    thread: Option<JoinHandle<()>>,
}

/// Serves one client of this program, on a thread of its own: without a path, a mount or another
/// process, but else like any client. It attaches to the descriptor that comes with it (see
/// `uvfs_client::Server::from`).
///
/// # Errors
/// When the thread or the pair of sockets can't be had.
pub fn in_process<F: FileSystem>(
    session: &Arc<Session<F>>,
    limits: ClientLimits,
) -> io::Result<(InProcess, UnixStream)> {
    let (theirs, ours) = UnixStream::pair()?;
    let (session, socket) = (session.clone(), ours.try_clone()?);
    let thread = std::thread::Builder::new()
        .name("uvfs-client".into())
        .spawn(move || {
            if let Err(error) = attend(&session, ours, limits, &AtomicUsize::new(0)) {
                tracing::warn!(%error, "a client's session ended");
            }
        })?;
    let server = InProcess {
        socket,
        thread: Some(thread),
    };
    Ok((server, theirs))
}

impl Drop for InProcess {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept<F: FileSystem>(
    listener: &UnixListener,
    session: &Arc<Session<F>>,
    limits: ClientLimits,
    stop: &Arc<AtomicBool>,
) {
    let (now, guests) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut threads: Vec<(JoinHandle<()>, UnixStream)> = Vec::new();
    for client in listener.incoming() {
        if stop.load(Ordering::Acquire) {
            break;
        }
        let Ok(client) = client else {
            // Out of descriptors, say: not a reason to spin.
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        threads.retain(|(thread, _)| !thread.is_finished());
        if now.load(Ordering::Acquire) >= limits.clients {
            let _ = refuse(&client, Errno::AGAIN);
            continue;
        }
        let Ok(other) = client.try_clone() else {
            continue;
        };
        now.fetch_add(1, Ordering::AcqRel);
        let (session, count, guests) = (session.clone(), now.clone(), guests.clone());
        let thread = std::thread::Builder::new()
            .name("uvfs-client".into())
            .spawn(move || {
                if let Err(error) = attend(&session, client, limits, &guests) {
                    tracing::warn!(%error, "a client's session ended");
                }
                count.fetch_sub(1, Ordering::AcqRel);
            });
        match thread {
            Ok(thread) => threads.push((thread, other)),
            Err(error) => {
                tracing::error!(%error, "no thread for a client");
                now.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
    for (thread, socket) in threads {
        // The other end is closed when what the client left dirty has been written.
        let _ = socket.shutdown(std::net::Shutdown::Read);
        let _ = thread.join();
    }
}

fn refuse(client: &UnixStream, errno: Errno) -> io::Result<()> {
    attach::send(
        client,
        Message {
            errno: errno.raw_os_error(),
            max_payload: 0,
            source: [0; 16],
        },
        &[],
    )
}

/// One of a bounded number of places.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(taken: &'a AtomicUsize, most: usize) -> Option<Self> {
        let more = |n| (n < most).then_some(n + 1);
        taken
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
            .ok()
            .map(|_| Self(taken))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What tells a source from others, for clients that come back: FNV-1a of the root's identity.
pub(crate) fn source<F: FileSystem>(session: &Session<F>) -> [u8; 16] {
    let Some(identity) = session.fs().identity(ROOT) else {
        return [0; 16];
    };
    const PRIME: u128 = (1 << 88) + 0x13b;
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for byte in identity {
        hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
    }
    hash.to_ne_bytes()
}

struct ArenaRegion(Arc<Arena>);

// SAFETY: the arena's mapping stays, whole and writable, as long as the arena that is held here.
unsafe impl Region for ArenaRegion {
    fn base(&self) -> NonNull<u8> {
        self.0.base()
    }
    fn len(&self) -> usize {
        self.0.len() as usize
    }
}

/// Takes a client's descriptors, serves it until it goes, and cleans up behind it.
fn attend<F: FileSystem>(
    session: &Arc<Session<F>>,
    socket: UnixStream,
    limits: ClientLimits,
    guests: &AtomicUsize,
) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(&socket)?;
    let guest = !peer.uid.is_root() && peer.uid != rustix::process::geteuid();
    if guest && !limits.guests {
        return refuse(&socket, Errno::PERM);
    }
    let _place = match guest.then(|| Place::take(guests, limits.clients / 2)) {
        Some(None) => return refuse(&socket, Errno::AGAIN),
        place => place.flatten(),
    };
    socket.set_read_timeout(Some(PATIENCE))?;
    let (_, fds) = match attach::receive(&socket) {
        // Somebody who only looked whether we are there.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
        other => other?,
    };
    let Ok([arena, queue]) = <[OwnedFd; 2]>::try_from(fds) else {
        return refuse(&socket, Errno::INVAL);
    };
    let max_payload = session.max_payload().min((MAX_SEGS - 1) * 4096);
    let opened = Arena::open(arena, limits.arena_pages).and_then(|arena| {
        let queue = ServerQueue::open(queue, arena.len(), max_payload)?;
        Ok((Arc::new(arena), queue))
    });
    let (arena, queue) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            refuse(&socket, Errno::INVAL)?;
            return Err(error);
        }
    };
    let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let agreed = Message {
        errno: 0,
        max_payload: max_payload as u32,
        source: source(session),
    };
    attach::send(&socket, agreed, &[bell.as_fd()])?;
    socket.set_read_timeout(None)?;
    let runtime = Runtime::new(limits.wait)?;
    let queue = Arc::new(queue);
    let bell = Arc::new(File::from(bell));
    let link = session.coherence.attach(
        session.invalidator(),
        session.negotiated().flags,
        session.options.all_backed,
        queue.clone(),
        bell.clone(),
        limits.recall,
    );
    let stats = session.client_queue();
    let listed = Arc::new(Attached::new(
        peer.pid.as_raw_nonzero().get() as u32,
        peer.uid.as_raw(),
        stats.clone(),
        queue.clone(),
    ));
    session.client_attached(&listed);
    let client = Rc::new(Client {
        link,
        session: session.clone(),
        stats,
        listed,
        guest,
        queue,
        memory: IoBuf::from_region(Arc::new(ArenaRegion(arena.clone()))),
        inline: IoBuf::alloc(MAX_DEPTH as usize * INLINE_SIZE)?,
        arena,
        peer: (
            peer.uid.as_raw(),
            peer.gid.as_raw(),
            peer.pid.as_raw_nonzero().get() as u32,
        ),
        busy: Cell::new(0),
        lead: Lead::default(),
        taken: Cell::new(0),
        transferring: Transferring::default(),
        over: Cell::new(false),
        end: RefCell::default(),
        gone: Cell::new(false),
        handles: RefCell::default(),
        imported: RefCell::default(),
        bell,
        socket: Arc::new(File::from(OwnedFd::from(socket))),
        spinner: RefCell::new(Spinner::new(limits.wait)),
        number: {
            static NEXT: AtomicU32 = AtomicU32::new(1);
            NEXT.fetch_add(1, Ordering::Relaxed)
        },
        lock_waiters: RefCell::default(),
        salvaged: Cell::new(false),
    });
    runtime.block_on(async move {
        client.clone().serve().await;
        let all = client.salvage().await;
        // A client whose socket closed is gone, or was told to go as this server ends: then it may
        // come back to the next one. Others were given up.
        client.queue.close_as(match (client.gone.get(), all) {
            (false, _) => End::CutOff,
            (true, true) => End::Written,
            (true, false) => End::Lost,
        });
        client.session.coherence.detach(&client.link);
        client.release().await;
    })
}

/// How many clients' threads are busy with large transfers.
static TRANSFERRING: AtomicUsize = AtomicUsize::new(0);

/// How many threads can run at once.
fn cores() -> usize {
    static CORES: LazyLock<usize> =
        LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));
    *CORES
}

/// Whether a client is one of those that [`TRANSFERRING`] counts: from a large transfer on until its
/// thread sleeps.
#[derive(Default)]
struct Transferring(Cell<bool>);

impl Transferring {
    fn begin(&self) {
        if !self.0.replace(true) {
            TRANSFERRING.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn end(&self) {
        if self.0.replace(false) {
            TRANSFERRING.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Transferring {
    fn drop(&mut self) {
        self.end();
    }
}

pub(super) struct Client<F: FileSystem> {
    pub(super) session: Arc<Session<F>>,
    /// How others recall its leases.
    pub(super) link: Arc<Link>,
    pub(super) stats: Arc<QueueStats>,
    /// As people see it.
    listed: Arc<Attached>,
    /// Another user's: may use what it imported and nothing else.
    pub(super) guest: bool,
    queue: Arc<ServerQueue>,
    arena: Arc<Arena>,
    memory: IoBuf,
    /// Where each entry's inline payload is copied to.
    pub(super) inline: IoBuf,
    peer: (u32, u32, u32),
    /// Requests that were taken and are not answered.
    busy: Cell<usize>,
    /// Which of the tasks that answer requests takes them, see [`Client::work`].
    lead: Lead,
    /// Requests that were taken since other tasks could run.
    taken: Cell<u32>,
    transferring: Transferring,
    /// No request is taken any more.
    over: Cell<bool>,
    /// Who waits for that, and for those that were taken to be answered.
    end: RefCell<Option<Waker>>,
    /// The socket was closed.
    gone: Cell<bool>,
    /// Open files and directories: node, handle, whether it is a directory.
    pub(super) handles: RefCell<HashSet<(u64, u64, bool)>>,
    /// Of the handles those that were imported, with open(2)'s flags that they were opened with.
    imported: RefCell<HashMap<(u64, u64), u32>>,
    bell: Arc<File>,
    socket: Arc<File>,
    spinner: RefCell<Spinner>,
    /// Tells its locks from other clients'.
    number: u32,
    /// Requests that wait for locks.
    lock_waiters: RefCell<HashSet<u64>>,
    /// What it left dirty was seen to.
    salvaged: Cell<bool>,
}

/// Takes its request off the list when that ends.
struct LockWaiter<F: FileSystem> {
    client: Rc<Client<F>>,
    unique: u64,
}

impl<F: FileSystem> Drop for LockWaiter<F> {
    fn drop(&mut self) {
        self.client.lock_waiters.borrow_mut().remove(&self.unique);
    }
}

/// Whatever ends a session, a panic too, the client hears of it.
impl<F: FileSystem> Drop for Client<F> {
    fn drop(&mut self) {
        if !self.salvaged.get() {
            self.queue.close_as(End::CutOff);
        }
        self.session.client_gone(&self.listed);
        self.session.client_queue_ended(self.stats.clone());
        self.session.coherence.detach(&self.link);
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
    }
}

/// The nodes of a listing, of which each counts as a lookup.
fn listed(slot: &Slot, answer: &Answer) -> Vec<u64> {
    let room;
    let bytes = match answer {
        Answer::Room(len) => {
            room = Scratch::copy_of(&slot.room, *len);
            &room[..]
        }
        Answer::Body(body) => &body[..],
        Answer::None | Answer::Error(_) => return Vec::new(),
    };
    let entries = reply::direntpluses(bytes).flatten();
    let nodes = entries.map(|(entry, _)| entry.entry_out.nodeid);
    nodes.filter(|&node| node != 0).collect()
}

/// What FORGET and BATCH_FORGET take back.
fn forgotten(slot: &Slot) -> SmallVec<[abi::ForgetOne; 1]> {
    if slot.header.opcode == Opcode::Forget as u32 {
        return SmallVec::from_elem(
            abi::ForgetOne {
                nodeid: slot.header.nodeid,
                nlookup: word(&slot.op, 0),
            },
            1,
        );
    }
    let mut bytes = vec![0; slot.input.len()];
    slot.input.copy_out(0, &mut bytes);
    let records = Records::new(&bytes).iter();
    records.take(word(&slot.op, 0) as u32 as usize).collect()
}

/// The 8 bytes at `at` as a number; 0 past the end.
fn word(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..at + 8)
        .map_or(0, |b| u64::from_ne_bytes(b.try_into().expect("eight")))
}

/// Whether a request is one whose answer nobody waits for: the client is not woken for it, and takes it
/// along with the next.
fn is_told(opcode: u32) -> bool {
    opcode == ext::LEASE_RETURN
        || matches!(
            Opcode::try_from(opcode),
            Ok(Opcode::Release | Opcode::Releasedir | Opcode::Forget | Opcode::BatchForget)
        )
}

/// Lets the runtime's other tasks run.
async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl<F: FileSystem> Client<F> {
    /// Serves the client until it goes or breaks the protocol, and all that it had asked for is
    /// answered. Those that wait for locks wait for nobody.
    async fn serve(self: Rc<Self>) {
        let me = self.clone();
        runtime::spawn(async move {
            // The client sends nothing more: readable means closed.
            let events = (libc::POLLIN | libc::POLLRDHUP) as u32;
            while let Err(Errno::INTR | Errno::AGAIN) = ops::poll(&me.socket, events).await {}
            me.gone.set(true);
            let _ = rustix::io::write(&*me.bell, &1u64.to_ne_bytes());
        });
        self.pass_lead();
        std::future::poll_fn(|cx| {
            if self.over.get() && self.busy.get() == 0 {
                return Poll::Ready(());
            }
            *self.end.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Takes requests and answers them, while it has the lead. As many tasks are made as requests wait at
    /// a time, and then stay: their state is large.
    async fn work(self: Rc<Self>, number: u32) {
        loop {
            self.lead.taken(number).await;
            while let Some(request) = self.next().await {
                let mut leads = true;
                let mut answers = pin!(self.one(request));
                std::future::poll_fn(|cx| {
                    let answered = answers.as_mut().poll(cx);
                    if answered.is_pending() && std::mem::take(&mut leads) {
                        self.pass_lead();
                    }
                    answered
                })
                .await;
                if !leads {
                    break;
                }
            }
            if self.over.get() {
                return;
            }
        }
    }

    /// Has another task take requests from now on.
    fn pass_lead(self: &Rc<Self>) {
        if let Some(number) = self.lead.pass() {
            assert!(number <= MAX_DEPTH, "each but the leader has a request");
            runtime::spawn(self.clone().work(number));
        }
    }

    /// The next request, for the task that has the lead; None when there will be none.
    async fn next(&self) -> Option<Submission> {
        loop {
            if self.link.is_over() {
                break;
            }
            // Those that wait may be able to go on, also while there is always another request.
            if self.busy.get() > 0 && self.taken.get() >= MAX_DEPTH {
                self.taken.set(0);
                yield_now().await;
            }
            match self.queue.pop() {
                Ok(Some(request)) => {
                    self.busy.set(self.busy.get() + 1);
                    self.taken.set(self.taken.get().saturating_add(1));
                    return Some(request);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, uid = self.peer.0, "a client is cut off");
                    break;
                }
            }
            if self.gone.get() || self.queue.client_closed() {
                break;
            }
            let taken = self.taken.replace(0);
            if self.busy.get() > 0 && taken > 0 {
                // The client may then have more to ask.
                yield_now().await;
                continue;
            }
            self.sleep().await;
        }
        self.over();
        None
    }

    /// Nothing more is taken.
    fn over(&self) {
        self.link.end();
        self.queue.close();
        self.over.set(true);
        for &unique in self.lock_waiters.borrow().iter() {
            // Not found is not waiting.
            let _ = self.session.interrupts.interrupt(unique);
        }
        self.looks_for_end();
    }

    /// Wakes who waits for the end.
    fn looks_for_end(&self) {
        if self.over.get()
            && self.busy.get() == 0
            && let Some(waker) = self.end.borrow_mut().take()
        {
            waker.wake();
        }
    }

    async fn sleep(&self) {
        let start = Instant::now();
        if self.busy.get() == 0 {
            let budget = self.spinner.borrow().budget();
            // Not in the condition: the borrow would last as long as its body.
            let leave = self.spinner.borrow().begin();
            if !budget.is_zero() && leave.is_some() {
                while start.elapsed() < budget {
                    for _ in 0..16 {
                        if self.queue.ready() {
                            self.spinner.borrow_mut().ended(start.elapsed(), false);
                            self.stats.waited_here(self.spinner.borrow().counts());
                            return;
                        }
                        std::hint::spin_loop();
                    }
                }
            }
        }
        self.queue.arm();
        if !self.queue.ready() && !self.gone.get() && !self.link.is_over() {
            if self.busy.get() == 0 {
                self.transferring.end();
            }
            while let Err(Errno::INTR | Errno::AGAIN) =
                ops::poll(&self.bell, libc::POLLIN as u32).await
            {}
            let mut count = [0; 8];
            let _ = rustix::io::read(&*self.bell, &mut count);
        }
        self.queue.disarm();
        if self.busy.get() == 0 {
            self.spinner.borrow_mut().ended(start.elapsed(), true);
            self.stats.waited_here(self.spinner.borrow().counts());
        }
    }

    pub(super) fn header(&self, opcode: u32, nodeid: u64, len: usize) -> InHeader {
        static UNIQUE: AtomicU64 = AtomicU64::new(0);
        InHeader {
            len: len as u32,
            opcode,
            // In steps of two, as the kernel's: the lowest bit marks interrupts.
            unique: OURS | UNIQUE.fetch_add(2, Ordering::Relaxed),
            nodeid,
            uid: self.peer.0,
            gid: self.peer.1,
            pid: self.peer.2,
            total_extlen: 0,
            padding: 0,
        }
    }

    async fn one(self: &Rc<Self>, request: Submission) {
        let (theirs, _) =
            InHeader::read_from_prefix(&request.header).expect("the area holds a header");
        let segs = Payload::from_parts(request.segs.iter().map(|seg| {
            let start = seg.offset as usize;
            self.memory.slice(start..start + seg.len as usize)
        }));
        let at = request.id as usize * INLINE_SIZE;
        self.queue
            .inline(&request, |from, part| self.inline.copy_in(at + from, part));
        let inline = Payload::from(self.inline.slice(at..at + request.inline_len));
        let (input, room) = match request.direction {
            Direction::ToServer if !segs.is_empty() => (segs, Payload::default()),
            Direction::ToServer => (inline, Payload::default()),
            Direction::FromServer => (inline, segs),
        };
        let len = size_of::<InHeader>() + request.op_len + input.len();
        // Those of FUSE whose answers tell more.
        let (opcode, more) = match theirs.opcode {
            ext::CREATE => (Opcode::Create as u32, true),
            ext::WRITE => (Opcode::Write as u32, true),
            opcode => (opcode, false),
        };
        let mut slot = Slot {
            header: self.header(opcode, theirs.nodeid, len),
            op: request.op,
            op_len: request.op_len,
            input,
            room,
            forgets: None,
        };
        // One thread serves a whole client: what it sends together goes to the host side by side,
        // unless every core has a client's thread to do it.
        if slot.input.len().max(slot.room.len()) >= ops::LARGE {
            self.transferring.begin();
        }
        let cores_left = TRANSFERRING.load(Ordering::Relaxed) < cores();
        let others = self.busy.get() > 1 || self.queue.ready();
        runtime::hand_over_large(others && cores_left);
        let may = match opcode {
            IMPORT
            | ext::LEASE
            | ext::LEASE_RETURN
            | ext::FIND
            | ext::LOOKUP
            | ext::LIST
            | ext::PEEK
            | ext::PEEK_AHEAD
            | ext::TOKEN => Ok(()),
            ext::REMOVE => self.removes(&mut slot),
            _ => self.may(&slot).and_then(|()| self.own_locks(&mut slot)),
        };
        self.constrain(&mut slot);
        let answer = match (may, opcode) {
            (Err(errno), _) => Answer::Error(errno),
            (Ok(()), IMPORT) => match pin!(self.import(&slot)).await {
                Ok(answer) => self.identified(&slot, answer),
                Err(errno) => Answer::Error(errno),
            },
            (Ok(()), ext::LEASE) => pin!(self.lease(&slot)).await.unwrap_or_else(Answer::Error),
            (Ok(()), ext::LEASE_RETURN) => self.lease_return(&slot),
            (Ok(()), ext::FIND) => pin!(self.find(&slot)).await.unwrap_or_else(Answer::Error),
            (Ok(()), ext::LOOKUP) => {
                let found = pin!(self.lookup_leased(&slot)).await;
                found.unwrap_or_else(Answer::Error)
            }
            (Ok(()), ext::LIST) => pin!(self.list(&slot)).await.unwrap_or_else(Answer::Error),
            (Ok(()), ext::PEEK) => pin!(self.peek(&slot, at))
                .await
                .unwrap_or_else(Answer::Error),
            (Ok(()), ext::PEEK_AHEAD) => {
                let read = pin!(self.peek_ahead(&slot, at)).await;
                read.unwrap_or_else(Answer::Error)
            }
            (Ok(()), ext::TOKEN) => self.token(&slot).unwrap_or_else(Answer::Error),
            (Ok(()), opcode) if self.over.get() && opcode == Opcode::Setlkw as u32 => {
                Answer::Error(Errno::INTR)
            }
            (Ok(()), _) => {
                let _waiting = self.lock_waiter(&slot);
                let more = more.then(|| self.more(&slot));
                let work = serve_for(&self.session, &self.stats, &slot, Some(&self.link));
                let mut answer = pin!(work).await;
                if let Some(more) = more {
                    answer = pin!(self.tell_more(&slot, answer, more)).await;
                }
                self.identified(&slot, answer)
            }
        };
        let answer = match answer {
            // That would say that there is no such request, and that nothing is forgotten.
            Answer::Error(Errno::NOSYS) if theirs.opcode == ext::REMOVE => {
                Answer::Error(Errno::PERM)
            }
            answer => answer,
        };
        // Of what is made of several, the steps were noted. All else is noted once the client is told,
        // who goes on meanwhile: its next request is taken after that.
        let in_room = matches!(answer, Answer::Room(_));
        if in_room {
            // The client could change it afterwards.
            self.note(&slot, &answer);
        }
        let (error, len, body) = match &answer {
            Answer::None => (0, 0, &[][..]),
            Answer::Error(errno) => (-errno.raw_os_error(), 0, &[][..]),
            Answer::Room(len) => (0, *len, &[][..]),
            Answer::Body(body) if slot.room.is_empty() && body.len() <= INLINE_SIZE => {
                (0, body.len(), &body[..])
            }
            Answer::Body(body) if body.len() <= slot.room.len() => {
                slot.room.copy_in(0, body);
                (0, body.len(), &[][..])
            }
            Answer::Body(_) => (-Errno::RANGE.raw_os_error(), 0, &[][..]),
        };
        let header = reply::header(theirs.unique, error, len);
        self.queue.complete(request.id, header.as_bytes(), body);
        if !is_told(theirs.opcode) {
            self.queue.ring();
        }
        if !in_room {
            self.note(&slot, &answer);
        }
        if let Some(gone) = slot.forgets {
            self.forget(gone);
        }
        self.busy.set(self.busy.get() - 1);
        self.looks_for_end();
    }

    /// Changes a token for a handle of the client's own.
    async fn import(&self, slot: &Slot) -> Result<Answer, Errno> {
        let (asked, _) =
            ImportIn::read_from_prefix(&slot.op[..slot.op_len]).map_err(|_| Errno::INVAL)?;
        let grant = self
            .session
            .tokens
            .take(&asked.token, Instant::now())
            .ok_or(Errno::ACCESS)?;
        let (session, stats) = (&self.session, &self.stats);
        stats.begin(IMPORT);
        let fs = session.fs();
        let cx = Context {
            unique: slot.header.unique,
            uid: self.peer.0,
            gid: self.peer.1,
            pid: self.peer.2,
            group: None,
        };
        let work = async {
            let fh = fs.share(grant.node, grant.fh).await?;
            // From here on it goes when the client goes.
            self.handles.borrow_mut().insert((grant.node, fh, false));
            self.imported
                .borrow_mut()
                .insert((grant.node, fh), grant.flags);
            *self.link.lookups().entry(grant.node).or_default() += 1;
            if fs.open_flags(grant.node, fh)? != grant.flags {
                return Err(Errno::BADF);
            }
            let attributes = fs.getattr(&cx, grant.node, Some(fh)).await?;
            Ok(ImportOut {
                nodeid: grant.node,
                fh,
                flags: grant.flags,
                padding: 0,
                attr: attributes.attr,
            })
        };
        let done = session.interrupts.guard(slot.header.unique, work).await;
        stats.end(!matches!(done, Some(Ok(_))));
        done.unwrap_or(Err(Errno::IO)).map(|out| Answer::of(&out))
    }

    /// What an imported handle was opened for: whether for reading, whether for writing. Others
    /// the file system checks itself.
    fn access(&self, node: u64, fh: u64) -> (bool, bool) {
        match self.imported.borrow().get(&(node, fh)) {
            None => (true, true),
            Some(flags) => match *flags as i32 & libc::O_ACCMODE {
                libc::O_RDONLY => (true, false),
                libc::O_WRONLY => (false, true),
                libc::O_RDWR => (true, true),
                _ => (false, false),
            },
        }
    }

    /// Whether a request is one that a guest may make.
    fn guest_may(&self, opcode: Opcode, slot: &Slot) -> bool {
        match opcode {
            Opcode::Read
            | Opcode::Write
            | Opcode::Flush
            | Opcode::Release
            | Opcode::Fsync
            | Opcode::Fallocate
            | Opcode::Lseek
            | Opcode::CopyFileRange
            | Opcode::CopyFileRange64
            | Opcode::Getattr
            | Opcode::Statx
            | Opcode::Forget => true,
            Opcode::Setattr => {
                let size = SetattrValid::SIZE | SetattrValid::FH | SetattrValid::LOCKOWNER;
                let valid = SetattrValid::from_bits_retain(word(&slot.op, 0) as u32);
                valid.contains(SetattrValid::SIZE | SetattrValid::FH) && size.contains(valid)
            }
            _ => false,
        }
    }

    /// Makes a request no more than its handle and its sender allow.
    pub(super) fn constrain(&self, slot: &mut Slot) {
        let node = slot.header.nodeid;
        // The file system's callers have no privileges here unless they are root.
        let kill = self.peer.0 != 0;
        if slot.header.opcode == Opcode::Write as u32
            && let Ok((mut arg, _)) = abi::WriteIn::read_from_prefix(&slot.op[..slot.op_len])
        {
            if let Some(&flags) = self.imported.borrow().get(&(node, arg.fh)) {
                arg.flags = flags;
            }
            if kill {
                arg.write_flags |= abi::WriteFlags::KILL_SUIDGID.bits();
            }
            slot.op[..size_of::<abi::WriteIn>()].copy_from_slice(arg.as_bytes());
        }
        if slot.header.opcode == Opcode::Setattr as u32
            && kill
            && let Ok((mut arg, _)) = abi::SetattrIn::read_from_prefix(&slot.op[..slot.op_len])
            && arg.valid & SetattrValid::SIZE.bits() != 0
        {
            arg.valid |= SetattrValid::KILL_SUIDGID.bits();
            slot.op[..size_of::<abi::SetattrIn>()].copy_from_slice(arg.as_bytes());
        }
    }

    /// Grants a lease, if that can be now.
    async fn lease(&self, slot: &Slot) -> Result<Answer, Errno> {
        let (arg, _) =
            ext::LeaseIn::read_from_prefix(&slot.op[..slot.op_len]).map_err(|_| Errno::INVAL)?;
        let mode = match arg.mode {
            ext::LEASE_READ => Mode::Read,
            ext::LEASE_WRITE => Mode::Write,
            _ => return Err(Errno::INVAL),
        };
        let node = slot.header.nodeid;
        if !self.link.lookups().contains_key(&node) {
            return Err(Errno::STALE);
        }
        let writable = |(&(n, fh), _): (&(u64, u64), &u32)| n == node && self.access(n, fh).1;
        if self.guest && mode == Mode::Write && !self.imported.borrow().iter().any(writable) {
            return Err(Errno::ACCESS);
        }
        let coherence = &self.session.coherence;
        let seq = match coherence.grant(&self.link, node, mode).await {
            Ok(seq) => seq,
            Err(refusal) => {
                return Ok(Answer::of(&ext::LeaseOut {
                    retry_ms: refusal.retry.as_millis() as u32,
                    seq: u64::from(refusal.passing),
                    ..Default::default()
                }));
            }
        };
        // Of a moment at which nobody else could change them any more.
        let attr = coherence::attributes(&self.session, slot, node).await;
        let attr = attr.inspect_err(|_| coherence.returned(&self.link, node, seq, None))?;
        Ok(Answer::of(&ext::LeaseOut {
            granted: arg.mode,
            retry_ms: 0,
            seq,
            attr,
        }))
    }

    /// Finds again what the client had at a server before this one. Not for guests: an identity
    /// can be made up, and leads to any file of the source.
    async fn find(&self, slot: &Slot) -> Result<Answer, Errno> {
        if self.guest {
            return Err(Errno::PERM);
        }
        if slot.input.len() > ext::IDENTITY_MAX {
            return Err(Errno::INVAL);
        }
        let mut identity = vec![0; slot.input.len()];
        slot.input.copy_out(0, &mut identity);
        let cx = dispatch::context(&slot.header);
        let (session, stats) = (&self.session, &self.stats);
        stats.begin(ext::FIND);
        let work = session.fs().find(&cx, &identity);
        let done = session.interrupts.guard(slot.header.unique, work).await;
        stats.end(!matches!(done, Some(Ok(_))));
        let entry = done.unwrap_or(Err(Errno::IO))?;
        *self.link.lookups().entry(entry.node).or_default() += 1;
        Ok(Answer::of(&dispatch::entry_out(&entry)))
    }

    /// Adds what finds an opened file again after a restart.
    fn identified(&self, slot: &Slot, answer: Answer) -> Answer {
        let Answer::Body(mut body) = answer else {
            return answer;
        };
        let node = match Opcode::try_from(slot.header.opcode) {
            Ok(Opcode::Open) => slot.header.nodeid,
            Ok(Opcode::Create) => word(&body, 0),
            _ if slot.header.opcode == IMPORT && !self.guest => word(&body, 0),
            _ => return Answer::Body(body),
        };
        let fs = self.session.fs();
        if let Some(mut identity) = fs.identity(node) {
            // Who opened it knows where it is.
            if slot.header.opcode == IMPORT
                && let Some(path) = fs.path(node)
                && identity.len() + path.len() <= ext::IDENTITY_MAX
            {
                identity.extend_from_slice(&path);
            }
            if identity.len() <= ext::IDENTITY_MAX {
                body.extend_from_slice(&identity);
            }
        }
        Answer::Body(body)
    }

    fn lease_return(&self, slot: &Slot) -> Answer {
        let Ok((arg, _)) = ext::LeaseReturnIn::read_from_prefix(&slot.op[..slot.op_len]) else {
            return Answer::Error(Errno::INVAL);
        };
        let keep = (arg.keep == ext::LEASE_READ).then_some(Mode::Read);
        let coherence = &self.session.coherence;
        coherence.returned(&self.link, slot.header.nodeid, arg.seq, keep);
        Answer::empty()
    }

    /// Whether the client was given a node.
    pub(super) fn knows_node(&self, node: u64) -> bool {
        (node == ROOT && !self.guest) || self.link.lookups().contains_key(&node)
    }

    /// Whether the client was given what its request names: numbers of nodes and handles can be
    /// guessed, and others use the same file system.
    fn may(&self, slot: &Slot) -> Result<(), Errno> {
        let opcode = Opcode::try_from(slot.header.opcode).map_err(|_| Errno::NOSYS)?;
        let node = slot.header.nodeid;
        let knows = |node| self.knows_node(node);
        let has = |node, fh, dir| match self.handles.borrow().contains(&(node, fh, dir)) {
            true => Ok(()),
            false => Err(Errno::BADF),
        };
        let first = word(&slot.op, 0);
        let reads = |node, fh| match self.access(node, fh).0 {
            true => Ok(()),
            false => Err(Errno::BADF),
        };
        let writes = |node, fh| match self.access(node, fh).1 {
            true => Ok(()),
            false => Err(Errno::BADF),
        };
        // GETATTR's and SETATTR's flag of the same value, which says that a handle follows.
        let by_handle = |flag: u32| word(&slot.op, 0) as u32 & flag != 0;
        if !knows(node) && opcode != Opcode::Statfs {
            return Err(Errno::STALE);
        }
        if self.guest && !self.guest_may(opcode, slot) {
            return Err(Errno::PERM);
        }
        match opcode {
            // Between the kernel and the server alone, or about others' requests.
            Opcode::Init
            | Opcode::Destroy
            | Opcode::Interrupt
            | Opcode::NotifyReply
            | Opcode::Poll
            | Opcode::Ioctl => Err(Errno::NOSYS),
            Opcode::Forget => {
                match self
                    .link
                    .lookups()
                    .get(&node)
                    .is_some_and(|&count| first <= count)
                {
                    true => Ok(()),
                    false => Err(Errno::INVAL),
                }
            }
            Opcode::BatchForget => {
                let lookups = self.link.lookups();
                let mut all = forgotten(slot);
                let whole = all.len() == first as u32 as usize;
                // Together: a node may be there more than once.
                all.sort_unstable_by_key(|one| one.nodeid);
                let may = all.chunk_by(|a, b| a.nodeid == b.nodeid).all(|same| {
                    let sum = same
                        .iter()
                        .try_fold(0u64, |n, one| n.checked_add(one.nlookup));
                    let count = lookups.get(&same[0].nodeid);
                    sum.is_some_and(|sum| count.is_some_and(|&count| sum <= count))
                });
                if whole && may {
                    Ok(())
                } else {
                    Err(Errno::INVAL)
                }
            }
            Opcode::Read => has(node, first, false).and_then(|()| reads(node, first)),
            Opcode::Write | Opcode::Fallocate => {
                has(node, first, false).and_then(|()| writes(node, first))
            }
            Opcode::Release
            | Opcode::Flush
            | Opcode::Fsync
            | Opcode::Lseek
            | Opcode::Getlk
            | Opcode::Setlk
            | Opcode::Setlkw => has(node, first, false),
            Opcode::Readdir | Opcode::Readdirplus | Opcode::Releasedir | Opcode::Fsyncdir => {
                has(node, first, true)
            }
            Opcode::CopyFileRange | Opcode::CopyFileRange64 => {
                let (to, to_fh) = (word(&slot.op, 16), word(&slot.op, 24));
                has(node, first, false).and_then(|()| reads(node, first))?;
                has(to, to_fh, false).and_then(|()| writes(to, to_fh))
            }
            Opcode::Getattr | Opcode::Statx if by_handle(GetattrFlags::FH.bits()) => {
                has(node, word(&slot.op, 8), false).or(has(node, word(&slot.op, 8), true))
            }
            Opcode::Setattr if by_handle(SetattrValid::FH.bits()) => {
                // As ftruncate(2): EINVAL for what is not open for writing.
                let fh = word(&slot.op, 8);
                has(node, fh, false)?;
                writes(node, fh).map_err(|_| Errno::INVAL)
            }
            Opcode::Rename | Opcode::Rename2 | Opcode::Link if !knows(first) => Err(Errno::STALE),
            _ => Ok(()),
        }
    }

    /// Makes a [`uvfs_proto::ext::REMOVE`] the UNLINK that it is, with what the client forgets.
    fn removes(&self, slot: &mut Slot) -> Result<(), Errno> {
        let (arg, _) =
            ext::RemoveIn::read_from_prefix(&slot.op[..slot.op_len]).map_err(|_| Errno::INVAL)?;
        slot.header.len -= slot.op_len as u32;
        slot.header.opcode = Opcode::Unlink as u32;
        slot.op_len = 0;
        self.may(slot)?;
        // From here on the client has them no more, whatever it sends next.
        let mut lookups = self.link.lookups();
        let Entry::Occupied(mut count) = lookups.entry(arg.node) else {
            return Err(Errno::INVAL);
        };
        *count.get_mut() = count.get().checked_sub(arg.nlookup).ok_or(Errno::INVAL)?;
        if *count.get() == 0 {
            count.remove();
        }
        slot.forgets = Some(abi::ForgetOne {
            nodeid: arg.node,
            nlookup: arg.nlookup,
        });
        Ok(())
    }

    /// Forgets what the client has no more.
    fn forget(&self, gone: abi::ForgetOne) {
        self.stats.begin(Opcode::Forget as u32);
        self.session.fs().forget(gone.nodeid, gone.nlookup);
        // It may have been given the node again.
        if !self.link.lookups().contains_key(&gone.nodeid) {
            self.session.coherence.forget(&self.link, gone.nodeid);
        }
        self.stats.end(false);
    }

    /// Puts the client's own name in a lock's owner, so that no client can be another's.
    fn own_locks(&self, slot: &mut Slot) -> Result<(), Errno> {
        let opcode = slot.header.opcode;
        if ![Opcode::Getlk, Opcode::Setlk, Opcode::Setlkw]
            .map(|o| o as u32)
            .contains(&opcode)
        {
            return Ok(());
        }
        let (mut arg, _) =
            abi::LkIn::read_from_prefix(&slot.op[..slot.op_len]).map_err(|_| Errno::INVAL)?;
        let theirs = u32::try_from(arg.owner).map_err(|_| Errno::INVAL)?;
        arg.owner = u64::from(self.number) << 32 | u64::from(theirs);
        arg.lk.pid = self.peer.2;
        slot.op[..size_of::<abi::LkIn>()].copy_from_slice(arg.as_bytes());
        Ok(())
    }

    /// A request that may wait for a lock, to be interrupted when the client goes.
    fn lock_waiter(self: &Rc<Self>, slot: &Slot) -> Option<LockWaiter<F>> {
        (slot.header.opcode == Opcode::Setlkw as u32).then(|| {
            let unique = slot.header.unique;
            self.lock_waiters.borrow_mut().insert(unique);
            LockWaiter {
                client: self.clone(),
                unique,
            }
        })
    }

    /// Remembers what the client has of the file system, to take it back when it goes.
    pub(super) fn note(&self, slot: &Slot, answer: &Answer) {
        let node = slot.header.nodeid;
        if let Answer::Error(_) = answer {
            return;
        }
        let mut handles = self.handles.borrow_mut();
        let mut lookups = self.link.lookups();
        match (Opcode::try_from(slot.header.opcode), answer) {
            (Ok(Opcode::Open), Answer::Body(body)) => {
                handles.insert((node, word(body, 0), false));
            }
            (Ok(Opcode::Opendir), Answer::Body(body)) => {
                handles.insert((node, word(body, 0), true));
            }
            (Ok(Opcode::Create), Answer::Body(body)) => {
                let made = word(body, 0);
                handles.insert((made, word(body, size_of::<abi::EntryOut>()), false));
                *lookups.entry(made).or_default() += 1;
            }
            (
                Ok(Opcode::Lookup | Opcode::Mkdir | Opcode::Mknod | Opcode::Symlink | Opcode::Link),
                Answer::Body(body),
            ) => *lookups.entry(word(body, 0)).or_default() += 1,
            (Ok(Opcode::Readdirplus), _) => {
                for node in listed(slot, answer) {
                    *lookups.entry(node).or_default() += 1;
                }
            }
            (Ok(Opcode::Release), _) => {
                handles.remove(&(node, word(&slot.op, 0), false));
                self.imported
                    .borrow_mut()
                    .remove(&(node, word(&slot.op, 0)));
            }
            (Ok(Opcode::Releasedir), _) => drop(handles.remove(&(node, word(&slot.op, 0), true))),
            (Ok(Opcode::Forget | Opcode::BatchForget), _) => {
                for one in forgotten(slot) {
                    let Entry::Occupied(mut count) = lookups.entry(one.nodeid) else {
                        continue;
                    };
                    *count.get_mut() = count.get().saturating_sub(one.nlookup);
                    if *count.get() == 0 {
                        count.remove();
                        self.session.coherence.forget(&self.link, one.nodeid);
                    }
                }
            }
            _ => {}
        }
    }

    /// A request as if the client had sent it.
    pub(super) fn request(
        &self,
        opcode: Opcode,
        node: u64,
        op: &[u8],
        input: Payload,
        room: Payload,
    ) -> Slot {
        let mut area = [0; URING_OP_IN_OUT_SZ];
        area[..op.len()].copy_from_slice(op);
        let len = size_of::<InHeader>() + op.len() + input.len();
        Slot {
            header: self.header(opcode as u32, node, len),
            op: area,
            op_len: op.len(),
            input,
            room,
            forgets: None,
        }
    }

    async fn ask(&self, opcode: Opcode, node: u64, op: &[u8], input: Payload) -> Answer {
        let slot = self.request(opcode, node, op, input, Payload::default());
        serve_for(&self.session, &self.stats, &slot, Some(&self.link)).await
    }

    /// Writes what the client left dirty: through files that it had open, and where it says. Whether
    /// that was all.
    async fn salvage(&self) -> bool {
        let (mut written, mut lost) = (0usize, 0usize);
        for dirty in self.arena.dirty() {
            let len = dirty.seg.len as usize;
            let open = self
                .handles
                .borrow()
                .contains(&(dirty.node, dirty.handle, false));
            let open = open && self.access(dirty.node, dirty.handle).1;
            // Without the lease they were written already, and others' data is there now.
            if !open || !self.session.coherence.writes(&self.link, dirty.node) {
                lost += len;
                continue;
            }
            let op = abi::WriteIn {
                fh: dirty.handle,
                offset: dirty.file_offset,
                size: dirty.seg.len,
                write_flags: match self.peer.0 {
                    0 => abi::WriteFlags::CACHE.bits(),
                    _ => (abi::WriteFlags::CACHE | abi::WriteFlags::KILL_SUIDGID).bits(),
                },
                ..Default::default()
            };
            let start = dirty.seg.offset as usize;
            let data = Payload::from(self.memory.slice(start..start + len));
            match self
                .ask(Opcode::Write, dirty.node, op.as_bytes(), data)
                .await
            {
                Answer::Body(_) => written += len,
                _ => lost += len,
            }
        }
        if written + lost > 0 {
            tracing::warn!(
                written,
                lost,
                pid = self.peer.2,
                "wrote what a client left dirty"
            );
        }
        self.salvaged.set(true);
        lost == 0
    }

    /// Takes back the client's handles and lookups.
    async fn release(&self) {
        let handles = std::mem::take(&mut *self.handles.borrow_mut());
        for (node, fh, directory) in handles {
            let op = abi::ReleaseIn {
                fh,
                ..Default::default()
            };
            let opcode = if directory {
                Opcode::Releasedir
            } else {
                Opcode::Release
            };
            self.ask(opcode, node, op.as_bytes(), Payload::default())
                .await;
        }
        let lookups = std::mem::take(&mut *self.link.lookups());
        for (node, nlookup) in lookups {
            let op = abi::ForgetIn { nlookup };
            self.ask(Opcode::Forget, node, op.as_bytes(), Payload::default())
                .await;
        }
    }
}
