//! A queue pair: submission ring, completion ring, notification ring and the request entries, in
//! one sealed memfd that the client makes and the server maps.
//!
//! An entry is laid out as FUSE-over-io_uring lays it out: 128 bytes for the request's or reply's
//! header, 128 bytes for the operation's fixed argument, a small description of the payload, and
//! the payload itself: the first bytes inline, the rest in a list of [`Seg`]s of another shared
//! memory (the client's page arena).

mod client;
mod server;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::ring::{Bell, Cells};
use crate::shm::{SharedMemory, futex_wait, futex_wake};
pub use client::ClientQueue;
pub use server::{ServerQueue, Submission};

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

/// A client's own statistics, for people to look at: nothing may depend on them, as a client may say
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

/// The direction of a request's data.
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
    /// The pages that the client left dirty have been written.
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

#[cfg(test)]
mod tests;
