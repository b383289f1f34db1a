//! A uvfs server over a shared-memory queue pair, as a backend.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use uvfs_proto::abi::{self, Opcode, SetattrValid};
use uvfs_proto::ext::{self, AtIn};
use uvfs_proto::import::{IMPORT, ImportIn, ImportOut};
use uvfs_queue::arena::Arena;
use uvfs_queue::attach::{self, Message};
use uvfs_queue::pair::{ClientQueue, Direction, INLINE_SIZE, Seg};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::backend::{
    Attr, Backend, DirEntry, Done, Entry, Grant, Imported, Lease, Limits, LockKind, LockRequest,
    NodeId, OnRecall, Op, ROOT, RangeLock, Recall, Request, SetAttr, StatFs,
};
use crate::cache::{errno, lock};
use crate::event::Event;

/// Requests under way at most.
const DEPTH: u32 = 64;
/// How long a waiter polls for its reply before it sleeps.
const SPIN: Duration = Duration::from_micros(60);
/// Bytes of a listing, an attribute's value or a list of names that are asked for at once.
const LISTING: usize = 64 << 10;
/// Entries that only the answers to recalls take.
const FOR_RECALLS: u32 = 4;

thread_local! {
    /// This thread answers recalls.
    static ANSWERS_RECALLS: Cell<bool> = const { Cell::new(false) };
}

/// A reply to a request other than read and write.
type Reply = io::Result<Vec<u8>>;

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
pub struct Server {
    socket: UnixStream,
    /// All that this session has open.
    descriptors: Mutex<Vec<RawFd>>,
    shared: OnceLock<Arc<Shared>>,
    reaper: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    queue: ClientQueue,
    arena: Arc<Arena>,
    max_payload: usize,
    slots: [Mutex<Waiting>; DEPTH as usize],
    /// Held by whoever takes completions.
    consumer: Mutex<()>,
    /// Threads that poll now.
    pollers: AtomicU32,
    /// A reply came, or an entry became free.
    event: Event,
    unique: AtomicU64,
    /// What could not be sent for want of an entry: opcode, node, argument.
    deferred: Mutex<Vec<(u32, NodeId, Vec<u8>)>>,
    /// Where recalls go: to the thread that answers them.
    recalls: Mutex<Option<Sender<Recall>>>,
    /// The server is gone or broke the protocol.
    dead: AtomicBool,
    /// Memory for listings and values, one at a time.
    room: Mutex<u32>,
    stop: AtomicBool,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Connects to the socket of a server. Attaching comes with [`crate::Client::new`].
    ///
    /// # Errors
    /// `ENOENT` or `ECONNREFUSED` when no server is there, `EACCES` for another user's.
    pub fn connect(socket: impl AsRef<Path>) -> io::Result<Self> {
        let socket = UnixStream::connect(socket)?;
        Ok(UnixStream::from(attach::aside(socket.into())).into())
    }

    fn shared(&self) -> io::Result<&Arc<Shared>> {
        self.shared.get().ok_or_else(|| errno(libc::ENOTCONN))
    }

    fn call(&self, opcode: Opcode, node: NodeId, op: &[u8], names: &[&OsStr]) -> Reply {
        let mut inline = Vec::new();
        for name in names {
            if name.as_bytes().contains(&0) {
                return Err(errno(libc::EINVAL));
            }
            inline.extend_from_slice(name.as_bytes());
            inline.push(0);
        }
        self.shared()?.call(opcode as u32, node, op, &inline, &[])
    }

    /// A call whose reply may be long; it comes back copied.
    fn call_long(&self, opcode: Opcode, node: NodeId, op: &[u8], inline: &[u8]) -> Reply {
        let shared = self.shared()?;
        let page = lock(&shared.room);
        let segs = [Seg {
            offset: shared.arena.seg(*page, 0, 0).offset,
            len: LISTING as u32,
        }];
        shared.call(opcode as u32, node, op, inline, &segs)
    }
}

/// A server at the other end of a connected socket: of `uvfs_server::in_process`, or one that was
/// connected or passed on by other means.
impl From<UnixStream> for Server {
    fn from(socket: UnixStream) -> Self {
        Self {
            socket,
            descriptors: Mutex::default(),
            shared: OnceLock::new(),
            reaper: Mutex::default(),
        }
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
            if let Some(Some(id)) = self.event.wait_timeout(free, Duration::from_millis(100)) {
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
            None => lock(&self.deferred).push((opcode, node, op.to_vec())),
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
        let mut ended: Vec<(Waiting, i32, usize, u32)> = Vec::new();
        let mut any = false;
        {
            let Ok(_consumer) = self.consumer.try_lock() else {
                return false;
            };
            loop {
                match self.queue.pop() {
                    Ok(Some(id)) => {
                        any = true;
                        let waiting = std::mem::replace(
                            &mut *lock(&self.slots[id as usize]),
                            Waiting::Nobody,
                        );
                        let mut header = [0; size_of::<abi::OutHeader>()];
                        self.queue.reply(id, &mut header, &mut []);
                        let out = abi::OutHeader::read_from_bytes(&header)
                            .expect("the array has its size");
                        let len = (out.len as usize).saturating_sub(header.len());
                        match &waiting {
                            Waiting::Call(answer, in_segs) => {
                                let n = if *in_segs { 0 } else { len.min(INLINE_SIZE) };
                                let mut inline = [0; INLINE_SIZE];
                                self.queue.reply(id, &mut header, &mut inline[..n]);
                                *lock(answer) =
                                    Some(take_reply(out.error, *in_segs, len, &inline[..n]));
                                self.queue.release(id);
                            }
                            Waiting::Data(Op::Write, ..) => {
                                let mut size = [0; 4];
                                self.queue.reply(id, &mut header, &mut size);
                                let size = u32::from_ne_bytes(size);
                                self.queue.release(id);
                                ended.push((waiting, out.error, size as usize, id));
                            }
                            _ => {
                                self.queue.release(id);
                                ended.push((waiting, out.error, len, id));
                            }
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        tracing::error!(%error, "the server broke the protocol");
                        self.dead.store(true, Ordering::Release);
                        break;
                    }
                }
            }
            while let Ok(Some(bytes)) = self.queue.pop_notification() {
                if let Some(recall) = recall_of(&bytes)
                    && let Some(recalls) = &*lock(&self.recalls)
                {
                    let _ = recalls.send(recall);
                }
            }
        }
        if self.queue.server_closed() {
            self.dead.store(true, Ordering::Release);
        }
        for (waiting, error, n, _) in ended {
            if let Waiting::Data(_, len, done) = waiting {
                done(if error == 0 {
                    Ok(n.min(len))
                } else {
                    Err(errno(-error))
                });
            }
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

    fn send_deferred(&self) {
        loop {
            let next = lock(&self.deferred).pop();
            let Some((opcode, node, op)) = next else {
                return;
            };
            let Some(id) = self.queue.reserve() else {
                lock(&self.deferred).push((opcode, node, op));
                return;
            };
            let to = Direction::ToServer;
            self.send(id, opcode, node, &op, &[], &[], to, Waiting::Ignored);
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

    /// Takes completions in the calling thread until `done` or the time for that is over.
    fn poll(&self, done: &mut dyn FnMut() -> bool) {
        self.pollers.fetch_add(1, Ordering::AcqRel);
        self.queue.disarm();
        let start = Instant::now();
        loop {
            self.drain();
            if done() || start.elapsed() > SPIN {
                break;
            }
            for _ in 0..8 {
                if self.queue.ready() {
                    break;
                }
                std::hint::spin_loop();
            }
        }
        if self.pollers.fetch_sub(1, Ordering::AcqRel) == 1 {
            // From now on the reaper is to be woken; what came meanwhile is ours to take.
            self.queue.arm();
            if self.queue.ready() {
                self.drain();
            }
        }
    }

    /// The body of the thread that ends requests nobody polls for.
    fn reap(&self, socket: &UnixStream) {
        while !self.stop.load(Ordering::Acquire) {
            if self.pollers.load(Ordering::Acquire) > 0 {
                std::thread::park_timeout(Duration::from_millis(1));
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
            } else if self.queue.in_flight() > 0 && hung_up(socket) {
                tracing::error!("the server is gone");
                self.dead.store(true, Ordering::Release);
            }
        }
    }
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

/// A call's reply: inline, or, when the data is in a segment, its length as eight bytes.
fn take_reply(error: i32, in_segs: bool, len: usize, inline: &[u8]) -> Reply {
    match (error, in_segs) {
        (0, true) => Ok((len as u64).to_ne_bytes().to_vec()),
        (0, false) => Ok(inline.to_vec()),
        _ => Err(errno(-error)),
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.get() {
            shared.stop.store(true, Ordering::Release);
            shared.queue.close();
            shared.queue.interrupt();
            // Ends the thread that answers recalls; it may be this one.
            lock(&shared.recalls).take();
            if let Some(reaper) = lock(&self.reaper).take() {
                reaper.thread().unpark();
                // The last reference may go in the reaper itself.
                if reaper.thread().id() != std::thread::current().id() {
                    let _ = reaper.join();
                }
            }
        }
    }
}

impl Backend for Server {
    fn attach(&self, arena: &Arc<Arena>) -> io::Result<()> {
        let queue = ClientQueue::create(DEPTH)?;
        self.socket
            .set_read_timeout(Some(Duration::from_secs(10)))?;
        let hello = Message {
            errno: 0,
            max_payload: 0,
        };
        let sent = attach::send(&self.socket, hello, &[arena.as_fd(), queue.as_fd()]);
        // A server without a place answers and closes before it reads: its answer says why.
        let (answer, mut fds) = match (attach::receive(&self.socket), &sent) {
            (Err(_), Err(_)) => return Err(sent.unwrap_err()),
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
        let watched = UnixStream::from(attach::aside(self.socket.try_clone()?.into()));
        *lock(&self.descriptors) = [
            self.socket.as_fd(),
            watched.as_fd(),
            arena.as_fd(),
            queue.as_fd(),
            bell.as_fd(),
        ]
        .map(|fd| fd.as_raw_fd())
        .to_vec();
        queue.wake_through(bell);
        let shared = Arc::new(Shared {
            queue,
            max_payload: (answer.max_payload as usize).min(1 << 20) / 4096 * 4096,
            // The last pages, which the cache was not given.
            room: Mutex::new(arena.pages() - self.reserved_pages()),
            arena: arena.clone(),
            slots: std::array::from_fn(|_| Mutex::new(Waiting::Nobody)),
            consumer: Mutex::default(),
            pollers: AtomicU32::new(0),
            event: Event::default(),
            unique: AtomicU64::new(2),
            deferred: Mutex::default(),
            recalls: Mutex::default(),
            dead: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let (mine, socket) = (shared.clone(), watched);
        *lock(&self.reaper) = Some(
            std::thread::Builder::new()
                .name("uvfs-reaper".into())
                .spawn(move || mine.reap(&socket))?,
        );
        self.shared.set(shared).map_err(|_| errno(libc::EBUSY))
    }

    fn descriptors(&self) -> Vec<RawFd> {
        lock(&self.descriptors).clone()
    }

    fn reserved_pages(&self) -> u32 {
        (LISTING / 4096) as u32
    }

    fn limits(&self) -> Limits {
        let max = self.shared.get().map_or(4096, |s| s.max_payload);
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
            let id = match shared.reserve() {
                Ok(id) => id,
                Err(e) => {
                    (r.done)(Err(e));
                    continue;
                }
            };
            let waiting = Waiting::Data(r.op, r.len, r.done);
            match r.op {
                Op::Read => {
                    let op = abi::ReadIn {
                        fh: r.handle,
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
                        r.node,
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
                        fh: r.handle,
                        offset: r.offset,
                        size: r.len as u32,
                        write_flags: flags.bits(),
                        ..Default::default()
                    };
                    let (to, op) = (Direction::ToServer, op.as_bytes());
                    shared.send(
                        id,
                        Opcode::Write as u32,
                        r.node,
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
        if let Some(shared) = self.shared.get() {
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
        let reply = self
            .shared()?
            .call(ext::LEASE, node, op.as_bytes(), &[], &[])?;
        let out: ext::LeaseOut = parse(&reply)?;
        Ok(if out.granted == ext::LEASE_NONE {
            Grant::Refused(Duration::from_millis(out.retry_ms.into()))
        } else {
            Grant::Granted {
                seq: out.seq,
                attr: attr_of(&out.attr),
            }
        })
    }

    fn return_lease(&self, node: NodeId, seq: u64, keep: Lease) {
        if let Some(shared) = self.shared.get() {
            let op = ext::LeaseReturnIn {
                seq,
                keep: wire(keep),
                padding: 0,
            };
            shared.tell(ext::LEASE_RETURN, node, op.as_bytes());
        }
    }

    fn on_recall(&self, call: OnRecall) {
        let Some(shared) = self.shared.get() else {
            return;
        };
        let (send, recalls) = channel();
        let answer = move || {
            ANSWERS_RECALLS.set(true);
            while let Ok(recall) = recalls.recv() {
                call(recall);
            }
        };
        let thread = std::thread::Builder::new().name("uvfs-recalls".into());
        match thread.spawn(answer) {
            Ok(_) => *lock(&shared.recalls) = Some(send),
            Err(error) => tracing::error!(%error, "recalls will not be answered"),
        }
    }

    fn is_alive(&self) -> bool {
        self.shared.get().is_some_and(|shared| {
            !shared.dead.load(Ordering::Acquire) && !shared.queue.server_closed()
        })
    }

    fn lookup(&self, parent: NodeId, name: &OsStr) -> io::Result<Entry> {
        entry_of(&self.call(Opcode::Lookup, parent, &[], &[name])?)
    }

    fn forget(&self, node: NodeId, lookups: u64) {
        if let Some(shared) = self.shared.get().filter(|_| lookups > 0) {
            shared.tell(
                Opcode::Forget as u32,
                node,
                abi::ForgetIn { nlookup: lookups }.as_bytes(),
            );
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
        let op = abi::SetattrIn {
            valid: valid.bits(),
            fh: set.handle.unwrap_or(0),
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
        let out: abi::AttrOut = parse(&self.call(Opcode::Setattr, node, op.as_bytes(), &[])?)?;
        Ok(attr_of(&out.attr))
    }

    fn readlink(&self, node: NodeId) -> io::Result<OsString> {
        let target = self.call_long(Opcode::Readlink, node, &[], &[])?;
        Ok(OsStr::from_bytes(&target).to_owned())
    }

    fn symlink(&self, parent: NodeId, name: &OsStr, target: &OsStr) -> io::Result<Entry> {
        entry_of(&self.call(Opcode::Symlink, parent, &[], &[name, target])?)
    }

    fn mknod(&self, parent: NodeId, name: &OsStr, mode: u32, rdev: u32) -> io::Result<Entry> {
        let op = abi::MknodIn {
            mode,
            rdev,
            umask: 0,
            padding: 0,
        };
        entry_of(&self.call(Opcode::Mknod, parent, op.as_bytes(), &[name])?)
    }

    fn mkdir(&self, parent: NodeId, name: &OsStr, mode: u32) -> io::Result<Entry> {
        let op = abi::MkdirIn { mode, umask: 0 };
        entry_of(&self.call(Opcode::Mkdir, parent, op.as_bytes(), &[name])?)
    }

    fn unlink(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Unlink, parent, &[], &[name]).map(drop)
    }

    fn rmdir(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Rmdir, parent, &[], &[name]).map(drop)
    }

    fn rename(&self, p: NodeId, n: &OsStr, np: NodeId, nn: &OsStr, flags: u32) -> io::Result<()> {
        let op = abi::Rename2In {
            newdir: np,
            flags,
            padding: 0,
        };
        self.call(Opcode::Rename2, p, op.as_bytes(), &[n, nn])
            .map(drop)
    }

    fn link(&self, node: NodeId, new_parent: NodeId, new_name: &OsStr) -> io::Result<Entry> {
        let op = abi::LinkIn { oldnodeid: node };
        entry_of(&self.call(Opcode::Link, new_parent, op.as_bytes(), &[new_name])?)
    }

    fn open(&self, node: NodeId, flags: i32) -> io::Result<u64> {
        let op = abi::OpenIn {
            flags: flags as u32,
            open_flags: 0,
        };
        let out: abi::OpenOut = parse(&self.call(Opcode::Open, node, op.as_bytes(), &[])?)?;
        Ok(out.fh)
    }

    fn import(&self, secret: &[u8; 32]) -> io::Result<Imported> {
        let op = ImportIn { token: *secret };
        let reply = self.shared()?.call(IMPORT, 0, op.as_bytes(), &[], &[])?;
        let out: ImportOut = parse(&reply)?;
        Ok(Imported {
            entry: Entry {
                node: out.nodeid,
                attr: attr_of(&out.attr),
            },
            handle: out.fh,
            flags: out.flags as i32,
        })
    }

    fn create(&self, p: NodeId, n: &OsStr, mode: u32, flags: i32) -> io::Result<(Entry, u64)> {
        let op = abi::CreateIn {
            flags: (flags | libc::O_CREAT) as u32,
            mode: mode | libc::S_IFREG,
            umask: 0,
            open_flags: 0,
        };
        let reply = self.call(Opcode::Create, p, op.as_bytes(), &[n])?;
        let rest = reply.get(size_of::<abi::EntryOut>()..).unwrap_or_default();
        let out: abi::OpenOut = parse(rest)?;
        Ok((entry_of(&reply)?, out.fh))
    }

    fn release(&self, node: NodeId, handle: u64) {
        if let Some(shared) = self.shared.get() {
            let op = abi::ReleaseIn {
                fh: handle,
                ..Default::default()
            };
            shared.tell(Opcode::Release as u32, node, op.as_bytes());
        }
    }

    fn fsync(&self, node: NodeId, handle: u64, data_only: bool) -> io::Result<()> {
        let fsync_flags = if data_only { abi::FSYNC_FDATASYNC } else { 0 };
        let op = abi::FsyncIn {
            fh: handle,
            fsync_flags,
            padding: 0,
        };
        match self.call(Opcode::Fsync, node, op.as_bytes(), &[]) {
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
        let (shared, id) = match self.shared().and_then(|s| Ok((s, s.reserve()?))) {
            Ok(found) => found,
            Err(e) => return done(Err(e)),
        };
        let op = abi::FsyncIn {
            fh: handle,
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
        let op = lock_in(handle, request);
        self.call(opcode, n, op.as_bytes(), &[]).map(drop)
    }

    fn test_lock(&self, n: NodeId, h: u64, lock: &LockRequest) -> io::Result<Option<RangeLock>> {
        let op = lock_in(h, lock);
        let out: abi::LkOut = parse(&self.call(Opcode::Getlk, n, op.as_bytes(), &[])?)?;
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

    fn fallocate(&self, n: NodeId, h: u64, mode: i32, offset: u64, len: u64) -> io::Result<()> {
        let op = abi::FallocateIn {
            fh: h,
            offset,
            length: len,
            mode: mode as u32,
            padding: 0,
        };
        match self.call(Opcode::Fallocate, n, op.as_bytes(), &[]) {
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => Err(errno(libc::EOPNOTSUPP)),
            other => other.map(drop),
        }
    }

    fn lseek(&self, node: NodeId, handle: u64, offset: u64, whence: i32) -> io::Result<u64> {
        let op = abi::LseekIn {
            fh: handle,
            offset,
            whence: whence as u32,
            padding: 0,
        };
        let out: abi::LseekOut = parse(&self.call(Opcode::Lseek, node, op.as_bytes(), &[])?)?;
        Ok(out.offset)
    }

    fn readdir(&self, node: NodeId) -> io::Result<Vec<DirEntry>> {
        let op = abi::OpenIn {
            flags: libc::O_DIRECTORY as u32,
            open_flags: 0,
        };
        let opened: abi::OpenOut = parse(&self.call(Opcode::Opendir, node, op.as_bytes(), &[])?)?;
        let list = self.list(node, opened.fh);
        let op = abi::ReleaseIn {
            fh: opened.fh,
            ..Default::default()
        };
        self.shared()?
            .tell(Opcode::Releasedir as u32, node, op.as_bytes());
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
        self.shared()?
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

    fn step(&self, node: NodeId, arg: &AtIn, names: &[u8]) -> io::Result<Vec<u8>> {
        self.shared()?
            .call(ext::AT, node, arg.as_bytes(), names, &[])
    }

    fn close(&self, node: NodeId, fh: u64, seq: u64) {
        if let Some(shared) = self.shared.get() {
            shared.tell(ext::CLOSE, node, ext::CloseIn { fh, seq }.as_bytes());
        }
    }

    fn name_of(&self, node: NodeId, fh: u64) -> io::Result<OsString> {
        let op = ext::TokenIn { fh };
        let reply = self
            .shared()?
            .call(ext::TOKEN, node, op.as_bytes(), &[], &[])?;
        Ok(ext::token_name(&parse(&reply)?).into())
    }

    fn write_short(&self, n: NodeId, fh: u64, offset: u64, data: &[u8]) -> io::Result<usize> {
        let op = abi::WriteIn {
            fh,
            offset,
            size: data.len() as u32,
            ..Default::default()
        };
        let shared = self.shared()?;
        let reply = shared.call(Opcode::Write as u32, n, op.as_bytes(), data, &[])?;
        let out: abi::WriteOut = parse(&reply)?;
        Ok((out.size as usize).min(data.len()))
    }

    fn list_from(&self, node: NodeId, fh: u64, offset: u64) -> io::Result<Vec<u8>> {
        let op = abi::ReadIn {
            fh,
            offset,
            size: LISTING as u32,
            ..Default::default()
        };
        self.call_long(Opcode::Readdir, node, op.as_bytes(), &[])
    }

    fn close_directory(&self, node: NodeId, fh: u64) {
        if let Some(shared) = self.shared.get() {
            let op = abi::ReleaseIn {
                fh,
                ..Default::default()
            };
            shared.tell(Opcode::Releasedir as u32, node, op.as_bytes());
            self.forget(node, u64::from(node != ROOT));
        }
    }

    fn removexattr(&self, node: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Removexattr, node, &[], &[name]).map(drop)
    }
}

impl Server {
    fn list(&self, node: NodeId, fh: u64) -> io::Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        let mut offset = 0;
        loop {
            let op = abi::ReadIn {
                fh,
                offset,
                size: LISTING as u32,
                ..Default::default()
            };
            let bytes = self.call_long(Opcode::Readdir, node, op.as_bytes(), &[])?;
            let mut rest = &bytes[..];
            let before = offset;
            while let Ok((dirent, tail)) = abi::Dirent::read_from_prefix(rest) {
                let len = dirent.namelen as usize;
                let Some(name) = tail.get(..len) else { break };
                if name != b"." && name != b".." {
                    entries.push(DirEntry {
                        name: OsStr::from_bytes(name).to_owned(),
                        ino: dirent.ino,
                        kind: dirent.r#type as u8,
                    });
                }
                offset = dirent.off;
                rest = tail.get(len.next_multiple_of(8)..).unwrap_or_default();
            }
            if bytes.is_empty() || offset == before {
                return Ok(entries);
            }
        }
    }
}
