//! The client's end of a queue pair.

use crate::ring::{Bell, Consumer, Producer};
use crate::shm::{SharedMemory, futex_wait, futex_wake};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{
    CLIENT_CLOSED, CQ_BELL, Corrupt, Direction, End, HEADER_SIZE, INFO, INLINE, INLINE_SIZE,
    Layout, MAGIC, MAX_DEPTH, MAX_SEGS, NOTIFY_DEPTH, NOTIFY_HEAD, NOTIFY_SIZE, OP_SIZE, PUBLISHED,
    Published, RingCells, SEG_SIZE, SEGS, SERVER_CLOSED, SQ_BELL, Seg, VERSION, close, sleep_on,
};

/// The client's end of a queue pair.
#[derive(Debug)]
pub struct ClientQueue {
    pub(super) mem: Arc<SharedMemory>,
    pub(super) layout: Layout,
    pub(super) sq: Producer<RingCells>,
    pub(super) cq: Consumer<RingCells>,
    pub(super) nq: Consumer<RingCells>,
    /// Entries that are free to be reserved.
    pub(super) free: AtomicU64,
    /// Entries that the server has and has not completed.
    pub(super) in_flight: AtomicU64,
    /// How to wake the server, when it does not sleep on the word itself.
    pub(super) waker: std::sync::OnceLock<OwnedFd>,
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
            // By the C library, as in `futex_wake`.
            Some(fd) => {
                let one = 1u64.to_ne_bytes();
                // SAFETY: a buffer and its size.
                unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
            }
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

    /// A thread polls: the server need not wake one.
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
