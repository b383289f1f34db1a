//! The server's end of a queue pair. It copies and checks everything that the client wrote.

use crate::ring::{Bell, Consumer, Producer};
use crate::shm::{SharedMemory, futex_wake};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{
    CLIENT_CLOSED, CQ_BELL, Corrupt, Direction, End, HEADER_SIZE, INFO, INLINE, INLINE_SIZE,
    Layout, MAGIC, MAX_DEPTH, MAX_SEGS, NOTIFY_DEPTH, NOTIFY_HEAD, NOTIFY_SIZE, OP_SIZE, PUBLISHED,
    Published, RingCells, SEG_SIZE, SEGS, SERVER_CLOSED, SQ_BELL, Seg, VERSION, close, get_u32,
    sleep_on,
};

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
    /// The direction of its data.
    pub direction: Direction,
}

/// The server's end of a queue pair. Trusts nothing that it finds in the memory.
#[derive(Debug)]
pub struct ServerQueue {
    pub(super) mem: Arc<SharedMemory>,
    pub(super) layout: Layout,
    pub(super) sq: Consumer<RingCells>,
    pub(super) cq: Producer<RingCells>,
    pub(super) nq: Producer<RingCells>,
    /// Entries that were taken and not completed yet.
    pub(super) taken: AtomicU64,
    pub(super) arena_len: u64,
    pub(super) max_payload: usize,
    pub(super) notifying: std::sync::Mutex<()>,
}

impl ServerQueue {
    /// The statistics that the client published last; while it does that, in parts.
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
