//! A queue pair: submission ring, completion ring, notification ring and the request entries, in
//! one sealed memfd that the client makes and the server maps.
//!
//! An entry is laid out as FUSE-over-io_uring lays it out: 128 bytes for the request's or reply's
//! header, 128 bytes for the operation's fixed argument, a small description of the payload, and
//! the payload itself: the first bytes inline, the rest in a list of [`Seg`]s of another shared
//! memory (the client's page arena).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::ring::{Bell, Cells, Consumer, Producer};
use crate::shm::{SharedMemory, futex_wait, futex_wake};

/// Bytes of the header area (`fuse_in_header` or `fuse_out_header`).
pub const HEADER_SIZE: usize = 128;
/// Bytes of the operation area (the fixed argument of a request).
pub const OP_SIZE: usize = 128;
/// Bytes of payload that fit into the entry itself: names, attributes, small replies.
pub const INLINE_SIZE: usize = 4096;
/// The most segments of one request: 1 MiB in single pages, and one for a ragged end.
pub const MAX_SEGS: usize = 257;
/// The most entries of a pair (the in-flight set is one word).
pub const MAX_DEPTH: u32 = 64;
/// Bytes of one notification, header included.
pub const NOTIFY_SIZE: usize = 512;
/// Notifications that may be under way at once.
pub const NOTIFY_DEPTH: u32 = 64;

const MAGIC: u32 = 0x7566_7371;
const VERSION: u32 = 1;
const SQ_BELL: usize = 64;
const CQ_BELL: usize = 128;
const CLIENT_CLOSED: usize = 192;
const SERVER_CLOSED: usize = 256;
const NOTIFY_HEAD: usize = 320;
const PUBLISHED: usize = 1024;
const RINGS: usize = 4096;

const INFO: usize = HEADER_SIZE + OP_SIZE;
const SEGS: usize = INFO + 64;
const INLINE: usize = (SEGS + MAX_SEGS * SEG_SIZE).next_multiple_of(64);
const ENTRY_SIZE: usize = INLINE + INLINE_SIZE;
const SEG_SIZE: usize = 16;

/// A run of bytes in the client's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seg {
    /// Byte offset in the arena.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// The other side broke the protocol; its session must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corrupt(pub &'static str);

impl std::fmt::Display for Corrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "queue pair: the other side wrote {}", self.0)
    }
}

impl std::error::Error for Corrupt {}

impl From<Corrupt> for io::Error {
    fn from(e: Corrupt) -> Self {
        io::Error::new(io::ErrorKind::InvalidData, e)
    }
}

#[derive(Debug, Clone)]
struct RingCells {
    mem: Arc<SharedMemory>,
    offset: usize,
    len: usize,
}

impl Cells for RingCells {
    fn len(&self) -> usize {
        self.len
    }
    fn cell(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < self.len);
        self.mem.u64_at(self.offset + index * 8)
    }
}

#[derive(Debug, Clone, Copy)]
struct Layout {
    depth: u32,
}

impl Layout {
    fn sq(self) -> usize {
        RINGS
    }
    fn cq(self) -> usize {
        self.sq() + self.depth as usize * 8
    }
    fn nq(self) -> usize {
        self.cq() + self.depth as usize * 8
    }
    fn notify(self, slot: u32) -> usize {
        (self.nq() + NOTIFY_DEPTH as usize * 8).next_multiple_of(64) + slot as usize * NOTIFY_SIZE
    }
    fn entry(self, id: u32) -> usize {
        self.notify(NOTIFY_DEPTH).next_multiple_of(4096) + id as usize * ENTRY_SIZE
    }
    fn len(self) -> usize {
        self.entry(self.depth).next_multiple_of(4096)
    }
    fn ring(self, mem: &Arc<SharedMemory>, offset: usize, len: u32) -> RingCells {
        RingCells {
            mem: mem.clone(),
            offset,
            len: len as usize,
        }
    }
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// What a client says of itself, for people to look at: nothing may depend on it, as it may say
/// anything. Numbers are of its whole session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Published {
    /// Its name, zeros behind it.
    pub name: [u8; 16],
    /// Reads and writes that its program made.
    pub calls: u64,
    /// Reads that its cache alone served.
    pub hits: u64,
    /// Bytes that its program read.
    pub bytes_read: u64,
    /// Bytes that its program wrote.
    pub bytes_written: u64,
    /// Nanoseconds that its program's threads waited for the server.
    pub waited_ns: u64,
}

impl Published {
    fn words(&self) -> [u64; 7] {
        let half = |from: usize| {
            u64::from_ne_bytes(self.name[from..from + 8].try_into().expect("eight bytes"))
        };
        [
            half(0),
            half(8),
            self.calls,
            self.hits,
            self.bytes_read,
            self.bytes_written,
            self.waited_ns,
        ]
    }

    fn from_words(words: [u64; 7]) -> Self {
        let mut name = [0; 16];
        name[..8].copy_from_slice(&words[0].to_ne_bytes());
        name[8..].copy_from_slice(&words[1].to_ne_bytes());
        Self {
            name,
            calls: words[2],
            hits: words[3],
            bytes_read: words[4],
            bytes_written: words[5],
            waited_ns: words[6],
        }
    }
}

/// Which way a request's segments go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The server reads them (a write's data).
    ToServer,
    /// The server fills them (a read's data).
    FromServer,
}

/// How a server has ended a session, as far as the client can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It has not, or died before it could.
    None,
    /// It answers no more, and has yet to write what the client left dirty.
    Closed,
    /// What the client left dirty has been written.
    Written,
    /// Some of it could not be written.
    Lost,
    /// It gave the client up: what was dirty is out of date.
    CutOff,
}

impl End {
    fn of(word: u32) -> Self {
        match word {
            0 => Self::None,
            1 => Self::Closed,
            2 => Self::Written,
            3 => Self::Lost,
            _ => Self::CutOff,
        }
    }
}

/// The client's end of a queue pair.
#[derive(Debug)]
pub struct ClientQueue {
    mem: Arc<SharedMemory>,
    layout: Layout,
    sq: Producer<RingCells>,
    cq: Consumer<RingCells>,
    nq: Consumer<RingCells>,
    /// Entries that are free to be reserved.
    free: AtomicU64,
    /// Entries that the server has and has not completed.
    in_flight: AtomicU64,
    /// How to wake the server, when it does not sleep on the word itself.
    waker: std::sync::OnceLock<OwnedFd>,
}

impl ClientQueue {
    /// Makes a queue pair with `depth` entries (a power of two, at most [`MAX_DEPTH`]).
    ///
    /// # Errors
    /// `EINVAL` for a bad depth; those of [`SharedMemory::create`].
    pub fn create(depth: u32) -> io::Result<Self> {
        if !depth.is_power_of_two() || depth > MAX_DEPTH {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let layout = Layout { depth };
        let mem = Arc::new(SharedMemory::create(c"uvfs-queue", layout.len())?);
        for (i, word) in [MAGIC, VERSION, depth, NOTIFY_DEPTH]
            .into_iter()
            .enumerate()
        {
            mem.u32_at(i * 4).store(word, Ordering::Relaxed);
        }
        Ok(Self {
            sq: Producer::new(layout.ring(&mem, layout.sq(), depth)),
            cq: Consumer::new(layout.ring(&mem, layout.cq(), depth)),
            nq: Consumer::new(layout.ring(&mem, layout.nq(), NOTIFY_DEPTH)),
            free: AtomicU64::new(if depth == 64 {
                u64::MAX
            } else {
                (1 << depth) - 1
            }),
            in_flight: AtomicU64::new(0),
            waker: std::sync::OnceLock::new(),
            mem,
            layout,
        })
    }

    /// The number of entries.
    pub fn depth(&self) -> u32 {
        self.layout.depth
    }

    /// Says what the server may show of this client.
    pub fn publish(&self, published: &Published) {
        for (i, word) in published.words().into_iter().enumerate() {
            let at = self.mem.u64_at(PUBLISHED + i * 8);
            at.store(word, Ordering::Relaxed);
        }
    }

    /// Takes a free entry, if there is one.
    pub fn reserve(&self) -> Option<u32> {
        self.reserve_leaving(0)
    }

    /// Takes a free entry, if then there still are `rest` for others.
    pub fn reserve_leaving(&self, rest: u32) -> Option<u32> {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            if free.count_ones() <= rest {
                return None;
            }
            let id = free.trailing_zeros();
            match self.free.compare_exchange_weak(
                free,
                free & !(1 << id),
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(id),
                Err(now) => free = now,
            }
        }
    }

    /// Gives an entry back, after its completion was used or instead of submitting it.
    pub fn release(&self, id: u32) {
        debug_assert!(self.in_flight.load(Ordering::Relaxed) & (1 << id) == 0);
        let before = self.free.fetch_or(1 << id, Ordering::Release);
        debug_assert!(before & (1 << id) == 0, "an entry is released once");
    }

    /// Fills a reserved entry and puts it into the submission ring. Wake the server with
    /// [`ClientQueue::ring`] after the last of a batch.
    ///
    /// # Panics
    /// When a part does not fit its area; sizes are the caller's own.
    pub fn submit(
        &self,
        id: u32,
        header: &[u8],
        op: &[u8],
        inline: &[u8],
        segs: &[Seg],
        direction: Direction,
    ) {
        assert!(header.len() <= HEADER_SIZE && op.len() <= OP_SIZE);
        assert!(inline.len() <= INLINE_SIZE && segs.len() <= MAX_SEGS);
        let at = self.layout.entry(id);
        self.mem.write(at, header);
        self.mem.write(at + HEADER_SIZE, op);
        let mut info = [0u8; 16];
        for (i, word) in [
            u32::try_from(op.len()).expect("checked above"),
            u32::try_from(inline.len()).expect("checked above"),
            u32::try_from(segs.len()).expect("checked above"),
            u32::from(direction == Direction::FromServer),
        ]
        .into_iter()
        .enumerate()
        {
            info[i * 4..][..4].copy_from_slice(&word.to_ne_bytes());
        }
        self.mem.write(at + INFO, &info);
        self.mem.write(at + INLINE, inline);
        for (i, seg) in segs.iter().enumerate() {
            let mut raw = [0u8; SEG_SIZE];
            raw[..8].copy_from_slice(&seg.offset.to_ne_bytes());
            raw[8..12].copy_from_slice(&seg.len.to_ne_bytes());
            self.mem.write(at + SEGS + i * SEG_SIZE, &raw);
        }
        self.in_flight.fetch_or(1 << id, Ordering::Relaxed);
        self.sq.push(id);
    }

    /// Has the server woken through an eventfd from now on: it sleeps where it waits for other
    /// things too.
    pub fn wake_through(&self, eventfd: OwnedFd) {
        let _ = self.waker.set(eventfd);
    }

    fn wake_server(&self) {
        match self.waker.get() {
            // Full means that it has not been read: the server is awake.
            Some(fd) => drop(rustix::io::write(fd, &1u64.to_ne_bytes())),
            None => futex_wake(self.mem.u32_at(SQ_BELL)),
        }
    }

    /// Wakes the server if it sleeps.
    pub fn ring(&self) {
        if Bell(self.mem.u32_at(SQ_BELL)).must_wake() {
            self.wake_server();
        }
    }

    /// Asks to be woken for completions; look for some once more after this.
    pub fn arm(&self) {
        Bell(self.mem.u32_at(CQ_BELL)).going_to_sleep();
    }

    /// Somebody polls: no need to wake anybody.
    pub fn disarm(&self) {
        Bell(self.mem.u32_at(CQ_BELL)).awake();
    }

    /// Sleeps while the queue is armed, at most `timeout`.
    pub fn wait_armed(&self, timeout: Duration) {
        futex_wait(self.mem.u32_at(CQ_BELL), Bell::ASLEEP, Some(timeout));
    }

    /// Requests that were submitted and not taken back.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed).count_ones()
    }

    /// Takes the next completed entry. One thread at a time.
    ///
    /// # Errors
    /// [`Corrupt`] when the server completed what it does not have.
    pub fn pop(&self) -> Result<Option<u32>, Corrupt> {
        let Some(id) = self.cq.pop() else {
            return Ok(None);
        };
        if id >= self.layout.depth {
            return Err(Corrupt("a completion for an entry that does not exist"));
        }
        if self.in_flight.fetch_and(!(1 << id), Ordering::Relaxed) & (1 << id) == 0 {
            return Err(Corrupt("a completion for an entry that is not in flight"));
        }
        Ok(Some(id))
    }

    /// Whether a completion or notification waits to be taken.
    pub fn has_replies(&self) -> bool {
        self.cq.ready() || self.nq.ready()
    }

    /// As [`ClientQueue::has_replies`], or the server is gone.
    pub fn ready(&self) -> bool {
        self.cq.ready() || self.nq.ready() || self.server_closed()
    }

    /// The reply's header area and inline payload, copied once. `inline` is filled as far as it
    /// goes; how much of it means something is in the header, which the caller checks.
    pub fn reply(&self, id: u32, header: &mut [u8], inline: &mut [u8]) {
        assert!(header.len() <= HEADER_SIZE && inline.len() <= INLINE_SIZE);
        let at = self.layout.entry(id);
        self.mem.read(at, header);
        self.mem.read(at + INLINE, inline);
    }

    /// Takes the next notification. One thread at a time.
    ///
    /// # Errors
    /// [`Corrupt`] when the server names a slot that does not exist.
    pub fn pop_notification(&self) -> Result<Option<[u8; NOTIFY_SIZE]>, Corrupt> {
        let Some(slot) = self.nq.pop() else {
            return Ok(None);
        };
        if slot >= NOTIFY_DEPTH {
            return Err(Corrupt("a notification slot that does not exist"));
        }
        let mut bytes = [0; NOTIFY_SIZE];
        self.mem.read(self.layout.notify(slot), &mut bytes);
        self.mem
            .u32_at(NOTIFY_HEAD)
            .store(self.nq.popped(), Ordering::Release);
        Ok(Some(bytes))
    }

    /// Sleeps until there is something to take, or `timeout`. One thread at a time.
    pub fn sleep(&self, timeout: Option<Duration>) {
        sleep_on(self.mem.u32_at(CQ_BELL), timeout, || self.ready());
    }

    /// Makes a sleeping [`ClientQueue::sleep`] of this process return.
    pub fn interrupt(&self) {
        let word = self.mem.u32_at(CQ_BELL);
        Bell(word).awake();
        futex_wake(word);
    }

    /// Whether the server has said that it will answer no more.
    pub fn server_closed(&self) -> bool {
        self.mem.u32_at(SERVER_CLOSED).load(Ordering::Acquire) != 0
    }

    /// How the server has ended the session.
    pub fn server_end(&self) -> End {
        End::of(self.mem.u32_at(SERVER_CLOSED).load(Ordering::Acquire))
    }

    /// Says that no more requests will come, and wakes the server.
    pub fn close(&self) {
        close(&self.mem, CLIENT_CLOSED, SQ_BELL, 1);
        self.wake_server();
    }
}

impl AsFd for ClientQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mem.as_fd()
    }
}

fn sleep_on(word: &AtomicU32, timeout: Option<Duration>, ready: impl Fn() -> bool) {
    Bell(word).going_to_sleep();
    if !ready() {
        futex_wait(word, Bell::ASLEEP, timeout);
    }
    Bell(word).awake();
}

/// Closes one end, and wakes the other; a later way to do so counts.
fn close(mem: &SharedMemory, flag: usize, bell: usize, how: u32) {
    mem.u32_at(flag).fetch_max(how, Ordering::SeqCst);
    Bell(mem.u32_at(bell)).awake();
    futex_wake(mem.u32_at(bell));
}

/// A request as the server took it: copied out of shared memory once and checked, but for the inline
/// payload, which [`ServerQueue::inline`] copies.
#[derive(Debug, Clone)]
pub struct Submission {
    /// The entry, for [`ServerQueue::complete`].
    pub id: u32,
    /// The header area.
    pub header: [u8; HEADER_SIZE],
    /// The operation's fixed argument, and zeros.
    pub op: [u8; OP_SIZE],
    /// Bytes of `op` that count.
    pub op_len: usize,
    /// Bytes of the inline payload (names and the like), at most [`INLINE_SIZE`].
    pub inline_len: usize,
    /// The payload in the arena, each segment inside it.
    pub segs: Vec<Seg>,
    /// Which way the segments go.
    pub direction: Direction,
}

/// The server's end of a queue pair. Trusts nothing that it finds in the memory.
#[derive(Debug)]
pub struct ServerQueue {
    mem: Arc<SharedMemory>,
    layout: Layout,
    sq: Consumer<RingCells>,
    cq: Producer<RingCells>,
    nq: Producer<RingCells>,
    /// Entries that were taken and not completed yet.
    taken: AtomicU64,
    arena_len: u64,
    max_payload: usize,
    notifying: std::sync::Mutex<()>,
}

impl ServerQueue {
    /// What the client published last; while it does that, in parts.
    pub fn published(&self) -> Published {
        let word = |i: usize| self.mem.u64_at(PUBLISHED + i * 8).load(Ordering::Relaxed);
        Published::from_words(std::array::from_fn(word))
    }

    /// Maps a client's queue pair. Segments must lie in an arena of `arena_len` bytes and sum up
    /// to at most `max_payload` bytes per request.
    ///
    /// # Errors
    /// `EINVAL` for memory that is not a sealed queue pair of this version.
    pub fn open(fd: OwnedFd, arena_len: u64, max_payload: usize) -> io::Result<Self> {
        let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why.to_owned());
        let mem = Arc::new(SharedMemory::open(fd, Layout { depth: MAX_DEPTH }.len())?);
        let word = |i: usize| mem.u32_at(i * 4).load(Ordering::Relaxed);
        if word(0) != MAGIC || word(1) != VERSION || word(3) != NOTIFY_DEPTH {
            return Err(bad("not a queue pair of this version"));
        }
        let depth = word(2);
        if !depth.is_power_of_two() || depth > MAX_DEPTH {
            return Err(bad("a queue pair has 1 to 64 entries, a power of two"));
        }
        let layout = Layout { depth };
        if mem.len() != layout.len() {
            return Err(bad("the queue pair's size does not fit its depth"));
        }
        Ok(Self {
            sq: Consumer::new(layout.ring(&mem, layout.sq(), depth)),
            cq: Producer::new(layout.ring(&mem, layout.cq(), depth)),
            nq: Producer::new(layout.ring(&mem, layout.nq(), NOTIFY_DEPTH)),
            taken: AtomicU64::new(0),
            arena_len,
            max_payload,
            notifying: std::sync::Mutex::new(()),
            mem,
            layout,
        })
    }

    /// Takes the next request. One thread at a time.
    ///
    /// # Errors
    /// [`Corrupt`] when the client broke the protocol; end its session.
    pub fn pop(&self) -> Result<Option<Submission>, Corrupt> {
        let Some(id) = self.sq.pop() else {
            return Ok(None);
        };
        if id >= self.layout.depth {
            return Err(Corrupt("a submission of an entry that does not exist"));
        }
        if self.taken.fetch_or(1 << id, Ordering::Relaxed) & (1 << id) != 0 {
            return Err(Corrupt("a submission of an entry that is in flight"));
        }
        let at = self.layout.entry(id);
        let mut header = [0; HEADER_SIZE];
        self.mem.read(at, &mut header);
        let mut info = [0; 16];
        self.mem.read(at + INFO, &mut info);
        let op_len = get_u32(&info, 0) as usize;
        let inline_len = get_u32(&info, 4) as usize;
        let nsegs = get_u32(&info, 8) as usize;
        let direction = match get_u32(&info, 12) {
            0 => Direction::ToServer,
            1 => Direction::FromServer,
            _ => return Err(Corrupt("an unknown direction")),
        };
        if op_len > OP_SIZE || inline_len > INLINE_SIZE || nsegs > MAX_SEGS {
            return Err(Corrupt("an entry larger than its areas"));
        }
        let mut op = [0; OP_SIZE];
        self.mem.read(at + HEADER_SIZE, &mut op[..op_len]);
        let mut segs = Vec::with_capacity(nsegs);
        let mut total = 0usize;
        for i in 0..nsegs {
            let mut raw = [0; SEG_SIZE];
            self.mem.read(at + SEGS + i * SEG_SIZE, &mut raw);
            let seg = Seg {
                offset: u64::from_ne_bytes(raw[..8].try_into().expect("eight bytes")),
                len: get_u32(&raw, 8),
            };
            total += seg.len as usize;
            if seg.len == 0
                || total > self.max_payload
                || seg
                    .offset
                    .checked_add(seg.len.into())
                    .is_none_or(|end| end > self.arena_len)
            {
                return Err(Corrupt(
                    "a segment outside of its arena or beyond the limit",
                ));
            }
            segs.push(seg);
        }
        Ok(Some(Submission {
            id,
            header,
            op,
            op_len,
            inline_len,
            segs,
            direction,
        }))
    }

    /// Hands over the inline payload of a taken entry, part by part, each with its offset. The client
    /// may change it meanwhile: what counts is what was handed over, so this is done once.
    ///
    /// # Panics
    /// When the entry was completed already.
    pub fn inline(&self, taken: &Submission, mut to: impl FnMut(usize, &[u8])) {
        assert!(
            self.taken.load(Ordering::Relaxed) & (1 << taken.id) != 0,
            "of a taken entry"
        );
        let from = self.layout.entry(taken.id) + INLINE;
        // Most are a name.
        let mut part = [0; 256];
        for at in (0..taken.inline_len).step_by(part.len()) {
            let len = part.len().min(taken.inline_len - at);
            self.mem.read(from + at, &mut part[..len]);
            to(at, &part[..len]);
        }
    }

    /// Writes the reply of a taken entry and puts it into the completion ring; wake the client
    /// with [`ServerQueue::ring`] after the last of a batch. Any thread may complete.
    ///
    /// # Panics
    /// When the entry was not taken, or a part does not fit its area.
    pub fn complete(&self, id: u32, header: &[u8], inline: &[u8]) {
        assert!(header.len() <= HEADER_SIZE && inline.len() <= INLINE_SIZE);
        let before = self.taken.fetch_and(!(1 << id), Ordering::Relaxed);
        assert!(
            before & (1 << id) != 0,
            "only a taken entry is completed, and once"
        );
        let at = self.layout.entry(id);
        self.mem.write(at, header);
        self.mem.write(at + INLINE, inline);
        self.cq.push(id);
    }

    /// Wakes the client if it sleeps.
    pub fn ring(&self) {
        let word = self.mem.u32_at(CQ_BELL);
        if Bell(word).must_wake() {
            futex_wake(word);
        }
    }

    /// Sends a notification of at most [`NOTIFY_SIZE`] bytes; false when the client has not taken
    /// the earlier ones yet.
    pub fn notify(&self, bytes: &[u8]) -> bool {
        assert!(bytes.len() <= NOTIFY_SIZE);
        let _one = self
            .notifying
            .lock()
            .expect("nothing panics while notifying");
        let head = self.mem.u32_at(NOTIFY_HEAD).load(Ordering::Acquire);
        let tail = self.nq.pushed();
        if tail.wrapping_sub(head) >= NOTIFY_DEPTH {
            return false;
        }
        let slot = tail % NOTIFY_DEPTH;
        self.mem.write(self.layout.notify(slot), bytes);
        self.nq.push(slot);
        self.ring();
        true
    }

    /// Requests that were taken and not completed.
    pub fn in_flight(&self) -> u32 {
        self.taken.load(Ordering::Relaxed).count_ones()
    }

    /// Whether a request waits, or the client is gone.
    pub fn ready(&self) -> bool {
        self.sq.ready() || self.client_closed()
    }

    /// Asks to be woken for requests; look for some once more after this.
    pub fn arm(&self) {
        Bell(self.mem.u32_at(SQ_BELL)).going_to_sleep();
    }

    /// Takes [`ServerQueue::arm`] back.
    pub fn disarm(&self) {
        Bell(self.mem.u32_at(SQ_BELL)).awake();
    }

    /// Sleeps until a request comes, or `timeout`. One thread at a time.
    pub fn sleep(&self, timeout: Option<Duration>) {
        sleep_on(self.mem.u32_at(SQ_BELL), timeout, || self.ready());
    }

    /// Makes a sleeping [`ServerQueue::sleep`] of this process return.
    pub fn interrupt(&self) {
        let word = self.mem.u32_at(SQ_BELL);
        Bell(word).awake();
        futex_wake(word);
    }

    /// Whether the client has said that it is done.
    pub fn client_closed(&self) -> bool {
        self.mem.u32_at(CLIENT_CLOSED).load(Ordering::Acquire) != 0
    }

    /// Says that nothing will be answered any more, and wakes the client.
    pub fn close(&self) {
        self.close_as(End::Closed);
    }

    /// As [`ServerQueue::close`], and says how the session ended. Only what comes later in [`End`]
    /// counts.
    pub fn close_as(&self, end: End) {
        close(&self.mem, SERVER_CLOSED, CQ_BELL, end as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(depth: u32) -> (ClientQueue, ServerQueue) {
        let client = ClientQueue::create(depth).unwrap();
        let fd = client.as_fd().try_clone_to_owned().unwrap();
        let server = ServerQueue::open(fd, 1 << 20, 1 << 20).unwrap();
        (client, server)
    }

    #[test]
    fn a_request_travels_and_its_reply_comes_back() {
        let (client, server) = pair(4);
        assert!(server.pop().unwrap().is_none());
        let id = client.reserve().unwrap();
        let segs = [Seg {
            offset: 4096,
            len: 100,
        }];
        let name: Vec<u8> = (0..INLINE_SIZE).map(|i| i as u8).collect();
        client.submit(id, b"header", b"op", &name, &segs, Direction::ToServer);
        let got = server.pop().unwrap().unwrap();
        assert_eq!(&got.header[..6], b"header");
        assert_eq!(
            (&got.op[..got.op_len], &got.segs[..]),
            (&b"op"[..], &segs[..])
        );
        let mut inline = Vec::new();
        server.inline(&got, |at, part| {
            assert_eq!(at, inline.len());
            inline.extend_from_slice(part);
        });
        assert_eq!(inline, name);
        assert_eq!(server.in_flight(), 1);
        server.complete(got.id, b"reply!", b"attr");
        assert_eq!(client.pop().unwrap(), Some(id));
        let (mut header, mut inline) = ([0; 6], [0; 4]);
        client.reply(id, &mut header, &mut inline);
        assert_eq!((&header, &inline), (b"reply!", b"attr"));
        client.release(id);
    }

    #[test]
    fn entries_are_bounded() {
        let (client, _server) = pair(2);
        let (a, b) = (client.reserve().unwrap(), client.reserve().unwrap());
        assert_ne!(a, b);
        assert_eq!(client.reserve(), None);
        client.release(a);
        assert_eq!(client.reserve(), Some(a));
    }

    #[test]
    fn threads_on_both_sides_lose_nothing_and_sleep_when_idle() {
        const EACH: u32 = 5_000;
        let (client, server) = pair(8);
        let server_side = std::thread::spawn(move || {
            let mut n = 0;
            loop {
                match server.pop().unwrap() {
                    Some(s) => {
                        n += 1;
                        server.complete(s.id, &s.header[..8], b"");
                        server.ring();
                    }
                    None if server.client_closed() => return n,
                    None => server.sleep(None),
                }
            }
        });
        let client = &client;
        let done = AtomicU32::new(0);
        std::thread::scope(|s| {
            for t in 0..2u32 {
                s.spawn(move || {
                    let mut i = 0;
                    while i < EACH {
                        let Some(id) = client.reserve() else {
                            std::thread::yield_now();
                            continue;
                        };
                        let tag = u64::from(t) << 32 | u64::from(i);
                        client.submit(id, &tag.to_ne_bytes(), b"", b"", &[], Direction::ToServer);
                        client.ring();
                        i += 1;
                    }
                });
            }
            s.spawn(|| {
                while done.load(Ordering::Relaxed) < 2 * EACH {
                    match client.pop().unwrap() {
                        Some(id) => {
                            client.release(id);
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                        None => client.sleep(None),
                    }
                }
            });
        });
        client.close();
        assert_eq!(server_side.join().unwrap(), 2 * EACH);
    }

    #[test]
    fn notifications_are_bounded_and_arrive() {
        let (client, server) = pair(2);
        for i in 0..NOTIFY_DEPTH {
            assert!(server.notify(&i.to_ne_bytes()));
        }
        assert!(!server.notify(b"one too many"));
        for i in 0..NOTIFY_DEPTH {
            assert_eq!(
                client.pop_notification().unwrap().unwrap()[..4],
                i.to_ne_bytes()
            );
        }
        assert!(client.pop_notification().unwrap().is_none());
        assert!(server.notify(b"again"));
    }

    #[test]
    fn a_hostile_client_is_found_out() {
        let segs = |s: Seg| {
            let (client, server) = pair(2);
            let id = client.reserve().unwrap();
            client.submit(id, b"", b"", b"", &[s], Direction::FromServer);
            server.pop().unwrap_err()
        };
        segs(Seg {
            offset: 1 << 20,
            len: 1,
        });
        segs(Seg {
            offset: u64::MAX,
            len: 2,
        });
        segs(Seg { offset: 0, len: 0 });
        segs(Seg {
            offset: 0,
            len: (1 << 20) + 1,
        });

        // The same entry twice, and one that does not exist.
        let (client, server) = pair(2);
        let id = client.reserve().unwrap();
        client.submit(id, b"", b"", b"", &[], Direction::ToServer);
        client.sq.push(id);
        assert!(server.pop().unwrap().is_some());
        server.pop().unwrap_err();
        client.sq.push(99);
        server.pop().unwrap_err();

        // Sizes beyond the areas.
        for at in [0, 4, 8, 12] {
            let (client, server) = pair(2);
            let id = client.reserve().unwrap();
            client.submit(id, b"", b"", b"", &[], Direction::ToServer);
            let info = client.layout.entry(id) + INFO;
            client.mem.write(info + at, &u32::MAX.to_ne_bytes());
            server.pop().unwrap_err();
        }
    }

    #[test]
    fn a_hostile_server_is_found_out() {
        let (client, server) = pair(2);
        server.cq.push(1);
        client.pop().unwrap_err();
        server.cq.push(70);
        client.pop().unwrap_err();
        server.nq.push(NOTIFY_DEPTH);
        client.pop_notification().unwrap_err();
    }

    #[test]
    fn memory_that_is_no_queue_pair_is_refused() {
        let mem = SharedMemory::create(c"t", 1 << 20).unwrap();
        let fd = mem.as_fd().try_clone_to_owned().unwrap();
        assert!(ServerQueue::open(fd, 0, 0).is_err());
        let client = ClientQueue::create(4).unwrap();
        client.mem.u32_at(8).store(64, Ordering::Relaxed);
        let fd = client.as_fd().try_clone_to_owned().unwrap();
        assert!(ServerQueue::open(fd, 0, 0).is_err());
    }
}
