//! The channel of one session: the queue pair with the server, and the thread that takes its replies (the reaper).

use std::cell::Cell;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::Timespec;
use rustix::io::{self, Errno};
use uvfs_proto::abi::{self, Opcode};
use uvfs_queue::arena::Arena;
use uvfs_queue::pair::{ClientQueue, Direction, INLINE_SIZE, Published, Seg};
use uvfs_queue::wait::Patience;
use zerocopy::{FromBytes, IntoBytes};

use super::Events;
use super::codec::{recall_of, refusal};
use super::pages::{Done, Op};
use super::silence::{Sign, Silence};
use crate::event::Event;
use crate::types::{NodeId, ROOT, Recall};
use uvfs_sys::lock;

/// Is told of descriptors of a server's sessions: of those that were opened as one came back (true),
/// and of all that are about to be closed (false).
pub type OnDescriptor = Arc<dyn Fn(RawFd, bool) + Send + Sync>;

/// Requests under way at most.
pub(super) const DEPTH: u32 = 64;
/// How long a waiter polls for its reply before it sleeps.
pub(super) const SPIN: Duration = Duration::from_micros(60);
/// How old the published statistics may be; a little older while nothing happens.
pub(super) const PUBLISHED: Duration = Duration::from_millis(100);
/// Entries that only the answers to recalls take.
pub(super) const FOR_RECALLS: u32 = 4;

thread_local! {
    /// This thread answers recalls.
    pub(super) static ANSWERS_RECALLS: Cell<bool> = const { Cell::new(false) };
    /// This thread must not wait for the watcher: it is the watcher, or the watcher may wait for this thread.
    pub(super) static NEVER_WAITS: Cell<bool> = const { Cell::new(false) };
}

/// A reply to a request other than read and write.
pub(super) type Reply = io::Result<Vec<u8>>;

/// A request that needs no answer.
pub(super) struct Told {
    pub(super) opcode: u32,
    pub(super) node: u64,
    pub(super) op: Vec<u8>,
}

pub(super) enum Waiting {
    Free,
    /// A read or write: its direction, the most bytes that it moves, and the function to call at its end.
    Data(Op, usize, Done),
    /// A request that blocks its caller, and whether the reply's data is in a segment.
    Call(Arc<Mutex<Option<Reply>>>, bool),
    /// No thread waits: release, forget.
    Ignored,
}

pub(super) struct Channel {
    /// How many servers there were before.
    pub(super) generation: u64,
    pub(super) socket: UnixStream,
    pub(super) source: [u8; 16],
    pub(super) queue: ClientQueue,
    pub(super) arena: Arc<Arena>,
    pub(super) max_payload: usize,
    pub(super) slots: [Mutex<Waiting>; DEPTH as usize],
    /// Answers that were taken.
    pub(super) answered: AtomicU64,
    pub(super) silence: Silence,
    /// How long the server may answer nothing.
    pub(super) answers: Duration,
    /// Held by the thread that takes completions.
    pub(super) consumer: Mutex<()>,
    /// Threads that poll now.
    pub(super) pollers: AtomicU32,
    /// The reaper leaves completions to them, for a moment.
    pub(super) reaper_rests: AtomicBool,
    pub(super) patience: Patience,
    /// A reply came, or an entry became free.
    pub(super) event: Event,
    pub(super) unique: AtomicU64,
    /// Requests that could not be sent because no entry was free.
    pub(super) deferred: Mutex<Vec<Told>>,
    /// Where recalls go: to the thread that answers them.
    pub(super) recalls: Mutex<Option<Sender<(u64, Recall)>>>,
    /// As in [`super::Inner`], as is what follows.
    pub(super) name: [u8; 16],
    pub(super) cache: Arc<OnceLock<Weak<dyn Events>>>,
    /// The server is gone or broke the protocol.
    pub(super) dead: AtomicBool,
    /// It broke the protocol.
    pub(super) broken: AtomicBool,
    pub(super) stop: AtomicBool,
    pub(super) reaper: Mutex<Option<JoinHandle<()>>>,
    /// The last field, as fields are dropped in order: descriptors are closed before `told` hears that they are gone.
    pub(super) descriptors: Descriptors,
}

/// The descriptors of a session, and the function that is told when they come and go.
pub(super) struct Descriptors {
    pub(super) open: Vec<RawFd>,
    pub(super) told: Option<OnDescriptor>,
    /// Not for the first session, whose descriptors the caller asks for by itself.
    pub(super) begins: bool,
}

impl Descriptors {
    pub(super) fn add(&mut self, fd: RawFd) {
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

impl Channel {
    /// An entry to put a request in; waits for one.
    pub(super) fn reserve(&self) -> io::Result<u32> {
        loop {
            if self.dead.load(Ordering::Acquire) {
                return Err(Errno::NOTCONN);
            }
            // A recall is answered even when all other requests wait for another client's lease.
            let rest = if ANSWERS_RECALLS.get() {
                0
            } else {
                FOR_RECALLS
            };
            if let Some(id) = self.queue.reserve_leaving(rest) {
                return Ok(id);
            }
            // Only here: a request that finds an entry at once reads no clock. The reaper looks too.
            self.look_for_life();
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
            // Not for long: the server does not wake the client for requests that no thread waits for.
            if let Some(Some(id)) = self.event.wait_timeout(free, Duration::from_millis(2)) {
                return Ok(id);
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn send(
        &self,
        id: u32,
        opcode: u32,
        node: NodeId,
        op: &[u8],
        inline: &[u8],
        segs: &[Seg],
        waiting: Waiting,
    ) {
        let writes = matches!(waiting, Waiting::Data(Op::Write, ..));
        let direction = match segs.is_empty() || writes {
            true => Direction::ToServer,
            false => Direction::FromServer,
        };
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

    pub(super) fn call(
        &self,
        opcode: u32,
        node: NodeId,
        op: &[u8],
        inline: &[u8],
        segs: &[Seg],
    ) -> Reply {
        if inline.len() > INLINE_SIZE {
            return Err(Errno::NAMETOOLONG);
        }
        let answer = Arc::new(Mutex::new(None));
        let id = self.reserve()?;
        let waiting = Waiting::Call(answer.clone(), !segs.is_empty());
        self.send(id, opcode, node, op, inline, segs, waiting);
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
    pub(super) fn tell(&self, opcode: u32, node: NodeId, op: &[u8]) {
        if self.dead.load(Ordering::Acquire) {
            return;
        }
        match self.queue.reserve() {
            Some(id) => {
                self.send(id, opcode, node, op, &[], &[], Waiting::Ignored);
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
    pub(super) fn drain(&self) -> bool {
        let mut any = false;
        // A thread that finds the consumer busy leaves all replies to it, so the consumer looks again at its end.
        while self.drain_once(&mut any) && self.queue.has_replies() {}
        any
    }

    /// One round of [`Channel::drain`]; false when another thread drains, or the session is over.
    pub(super) fn drain_once(&self, found: &mut bool) -> bool {
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
                        let waiting =
                            std::mem::replace(&mut *lock(&self.slots[id as usize]), Waiting::Free);
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
                            Waiting::Free | Waiting::Ignored => {}
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
                Err(refusal(error))
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
    pub(super) fn take_reply(&self, id: u32, error: i32, in_segs: bool, len: usize) -> Reply {
        match (error, in_segs) {
            (0, true) => Ok((len as u64).to_ne_bytes().to_vec()),
            (0, false) => {
                let mut inline = vec![0; len.min(INLINE_SIZE)];
                self.queue.reply(id, &mut [], &mut inline);
                Ok(inline)
            }
            _ => Err(refusal(error)),
        }
    }

    pub(super) fn send_deferred(&self) {
        loop {
            let next = lock(&self.deferred).pop();
            let Some(told) = next else {
                return;
            };
            let Some(id) = self.queue.reserve() else {
                lock(&self.deferred).push(told);
                return;
            };
            let (opcode, op) = (told.opcode, &told.op);
            self.send(id, opcode, told.node, op, &[], &[], Waiting::Ignored);
            self.queue.ring();
        }
    }

    /// The server is gone: everything that waits for it ends with ENOTCONN. The entries stay
    /// taken; the session is over.
    pub(super) fn fail_all(&self) {
        for slot in &self.slots {
            match std::mem::replace(&mut *lock(slot), Waiting::Free) {
                Waiting::Data(_, _, done) => done(Err(Errno::NOTCONN)),
                Waiting::Call(answer, _) => *lock(&answer) = Some(Err(Errno::NOTCONN)),
                Waiting::Free | Waiting::Ignored => {}
            }
        }
        self.event.notify();
    }

    /// Gives the session up when its server has answered nothing for too long.
    pub(super) fn look_for_life(&self) {
        let waiting = self.queue.in_flight() > 0 && !self.dead.load(Ordering::Acquire);
        let answered = self.answered.load(Ordering::Acquire);
        let sign = (self.silence).look(Instant::now(), waiting, answered, self.answers);
        match sign {
            Sign::Lives => {}
            Sign::Ask => {
                // No client may send an INTERRUPT, so every server refuses it without looking at a file.
                if let Some(id) = self.queue.reserve() {
                    let (opcode, op) = (Opcode::Interrupt as u32, abi::InterruptIn::default());
                    self.send(id, opcode, ROOT, op.as_bytes(), &[], &[], Waiting::Ignored);
                    self.queue.ring();
                }
            }
            Sign::Silent => {
                tracing::error!(after = ?self.answers, "the server lives and answers nothing");
                self.dead.store(true, Ordering::Release);
                // A server that goes on after all finds that the client is gone: it writes the dirty pages, and
                // closes the socket, which the watcher waits for. Until then it may still answer into this session's
                // memory.
                let _ = self.socket.shutdown(std::net::Shutdown::Write);
                self.fail_all();
            }
        }
    }

    /// Takes completions in the calling thread until `done` is true, or the time for polling is over.
    pub(super) fn poll(&self, done: &mut dyn FnMut() -> bool) {
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
                // The reaper has to take the answer that this thread goes on to wait for.
                self.unpark_reaper();
            }
        }
    }

    pub(super) fn spin(&self, longest: Duration, done: &mut dyn FnMut() -> bool) -> bool {
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

    pub(super) fn unpark_reaper(&self) {
        if let Some(reaper) = &*lock(&self.reaper) {
            reaper.thread().unpark();
        }
    }

    /// Tells the server's side what it may show of this client.
    pub(super) fn publish(&self) {
        let cache = self.cache.get().and_then(Weak::upgrade);
        let Some(stats) = cache.map(|cache| cache.stats()) else {
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

    pub(super) fn is_alive(&self) -> bool {
        !self.dead.load(Ordering::Acquire) && !self.queue.server_closed()
    }

    /// Ends the session: everything that waits for its server fails.
    pub(super) fn end(&self) {
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

    /// The body of the thread that ends requests that no other thread polls for.
    pub(super) fn reap(&self) {
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
            } else if self.queue.in_flight() > 0
                && hangs_up(&self.socket, Some(&Timespec::default()))
            {
                // While the session is not the current one no other thread looks.
                self.dead.store(true, Ordering::Release);
            }
        }
    }
}

/// The name of the program's first thread, as ps(1) shows it.
pub(super) fn process_name() -> [u8; 16] {
    let mut name = [0; 16];
    let text = std::fs::read("/proc/self/comm").unwrap_or_default();
    let text = text.strip_suffix(b"\n").unwrap_or(&text);
    let len = text.len().min(name.len());
    name[..len].copy_from_slice(&text[..len]);
    name
}

/// Whether the other end has hung up, or does so within a time.
pub(super) fn hangs_up(socket: &UnixStream, within: Option<&Timespec>) -> bool {
    let rdhup = rustix::event::PollFlags::RDHUP;
    let mut fds = [rustix::event::PollFd::new(socket, rdhup)];
    matches!(rustix::event::poll(&mut fds, within), Ok(n) if n > 0)
}
