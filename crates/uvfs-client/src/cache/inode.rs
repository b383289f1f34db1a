//! One inode's pages: reading, filling, writing, truncation, reclaim.

mod fill;
mod shrink;
mod write;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use rustix::io::Errno;
use uvfs_queue::arena::{PAGE_SIZE, Span};
use uvfs_queue::pair::Seg;

use super::chunk::{CHUNK_PAGES, Chunks};
use super::errseq::ErrSeq;
use super::leased::Leased;
use super::{Cache, Handle};
use crate::event::Event;
use crate::types::{Lease, NodeId};
pub(crate) use fill::Fill;
pub(super) use shrink::SPARED;

const PAGE: u64 = PAGE_SIZE as u64;
/// A write copies at most this much under one acquisition of the state lock.
const PIECE: usize = 256 << 10;
/// A stream is written back in runs of so many pages, which the processor's caches still have.
const RUN: u64 = 64;

pub(crate) struct Inode {
    pub(crate) node: NodeId,
    pub(super) cache: Arc<Cache>,
    /// Buffered writers and everything that changes the size hold it alone; direct writes within
    /// the file share it.
    pub(crate) write_lock: RwLock<()>,
    state: RwLock<State>,
    /// One thread at a time asks for a lease.
    pub(super) asking: Mutex<()>,
    /// A request of this inode ended.
    pub(crate) event: Event,
    pub(crate) errors: ErrSeq,
    /// Counts the writeback requests that ended because the server went.
    pub(super) unsent: AtomicU64,
    /// Pages that were read ahead are gone before a caller has used them.
    pub(crate) wasted: AtomicBool,
    /// Direct writes under way.
    pub(super) direct: AtomicU32,
    /// Open files.
    pub(crate) opens: AtomicU32,
    /// Lookups at the server that came with opened files.
    pub(crate) lookups: AtomicU64,
}

/// A writeback request under way.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) id: u64,
    pub(super) first: u64,
    pub(super) last: u64,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) size: u64,
    /// The session that the rest is of.
    pub(super) session: u64,
    /// The node's number in page descriptors, which the server reads.
    pub(super) server_node: NodeId,
    /// The same for handles that are older than the session.
    handles: HashMap<u64, u64>,
    /// The size that the server has for sure: nothing but zeros is beyond.
    pub(super) server_size: u64,
    pub(super) chunks: Chunks,
    /// Free pages that belong to this inode, so that not every write asks the shared list.
    pub(super) spare: Vec<u32>,
    /// Through which writeback goes: the last file that wrote.
    pub(super) writer: Option<Arc<Handle>>,
    /// Pages in `dirty` of any chunk.
    pub(super) dirty: u64,
    pub(super) dirtied_at: Option<Instant>,
    /// Writeback failed: not before this, unless a caller asks for it.
    pub(super) retry_at: Option<Instant>,
    pub(super) failing: Option<Errno>,
    pub(super) in_flight: Vec<InFlight>,
    pub(super) next_request: u64,
    /// Where the next background writeback looks first.
    pub(super) cursor: u64,
    /// Where the last write ended, and how many bytes before it were written one after another.
    written: (u64, u64),
    /// No writeback may start: the size is being changed.
    pub(super) frozen: bool,
    /// Where reclaim looks next, and how often it has come to the end.
    hand: u64,
    sweeps: u8,
    /// The lease. Pages that are there, and not stale, are as good as this says.
    pub(super) lease: Leased,
}

/// Why a read of cached pages ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReadStop {
    /// Nothing may be cached.
    NoLease,
    /// All that was asked for.
    Full,
    /// The end of the file.
    Eof,
    /// This page (its index in the file) is not there.
    Miss(u64),
}

/// A handle's number in page descriptors.
fn server_handle(old: &HashMap<u64, u64>, session: u64, handle: &Handle) -> u64 {
    if handle.session < session {
        // Not opened again: nothing can be written through it.
        old.get(&handle.fh).copied().unwrap_or(u64::MAX)
    } else {
        handle.server_fh
    }
}

fn place(index: u64) -> (u64, usize) {
    (
        index / CHUNK_PAGES as u64,
        (index % CHUNK_PAGES as u64) as usize,
    )
}

/// Adds a page's bytes to a scatter list, merging what is adjacent.
pub(super) fn push_seg(segs: &mut Vec<Seg>, seg: Seg) {
    match segs.last_mut() {
        Some(last) if last.offset + u64::from(last.len) == seg.offset => last.len += seg.len,
        _ => segs.push(seg),
    }
}

impl Inode {
    pub(super) fn new(cache: &Arc<Cache>, node: NodeId, size: u64) -> Arc<Self> {
        let (session, server_node, _) = cache.server.names(node, 0);
        Arc::new(Self {
            node,
            cache: cache.clone(),
            write_lock: RwLock::new(()),
            state: RwLock::new(State {
                size,
                session,
                server_node,
                handles: HashMap::new(),
                server_size: size,
                chunks: Chunks::default(),
                spare: Vec::new(),
                writer: None,
                dirty: 0,
                dirtied_at: None,
                retry_at: None,
                failing: None,
                in_flight: Vec::new(),
                next_request: 0,
                cursor: 0,
                written: (0, 0),
                frozen: false,
                hand: 0,
                sweeps: 0,
                lease: Leased::new(),
            }),
            asking: Mutex::new(()),
            event: Event::default(),
            errors: ErrSeq::default(),
            unsent: AtomicU64::new(0),
            wasted: AtomicBool::new(false),
            direct: AtomicU32::new(0),
            opens: AtomicU32::new(0),
            lookups: AtomicU64::new(0),
        })
    }

    pub(super) fn read_state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn shared(&self) -> RwLockReadGuard<'_, ()> {
        self.write_lock
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn exclusive(&self) -> RwLockWriteGuard<'_, ()> {
        self.write_lock
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn size(&self) -> u64 {
        self.read_state().size
    }

    /// The size, if this client knows it better than the server does.
    pub(crate) fn known_size(&self) -> Option<u64> {
        let st = self.read_state();
        let ours = self.opens.load(Ordering::Acquire) > 0 || st.dirty > 0;
        let ours = ours && st.knows_size();
        (ours || !st.in_flight.is_empty()).then_some(st.size)
    }

    /// A file of it was closed: when it was the last one and all is written, the handle that
    /// writeback used goes too.
    pub(crate) fn closed(&self) {
        let mut spare = Vec::new();
        let mut writer = None;
        {
            let mut st = self.state();
            if self.opens.load(Ordering::Acquire) == 0 {
                spare.append(&mut st.spare);
                if st.dirty == 0 && st.in_flight.is_empty() {
                    writer = st.writer.take();
                }
            }
        }
        drop(writer);
        self.cache.free(&mut spare);
    }

    /// Waits until at most `most` writeback requests are under way.
    pub(crate) fn wait_few_in_flight(&self, most: usize) {
        self.cache.wait(&self.event, || {
            (self.read_state().in_flight.len() <= most).then_some(())
        });
    }

    /// Whether the cache can forget it.
    pub(super) fn is_idle(&self) -> bool {
        let st = self.read_state();
        self.opens.load(Ordering::Acquire) == 0
            && st.chunks.next(0).is_none()
            && st.in_flight.is_empty()
            && st.spare.is_empty()
    }

    /// Copies what is cached at `offset`. `keep` marks the pages from there on as used by a caller that wants
    /// them to stay.
    pub(crate) fn read_cached(
        &self,
        buf: &mut [u8],
        offset: u64,
        keep: Option<u64>,
    ) -> (usize, ReadStop) {
        let st = self.read_state();
        if st.lease.mode < Lease::Read {
            return (0, ReadStop::NoLease);
        }
        let Some(left) = st.size.checked_sub(offset).filter(|&l| l > 0) else {
            return (0, ReadStop::Eof);
        };
        let want = buf.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let mut done = 0;
        while done < want {
            let at = offset + done as u64;
            let (ci, first) = place(at / PAGE);
            let Some(chunk) = st.chunks.get(ci) else {
                return (done, ReadStop::Miss(at / PAGE));
            };
            let mut i = first;
            while done < want && i < CHUNK_PAGES {
                let start = ((offset + done as u64) % PAGE) as usize;
                let n = (PAGE_SIZE - start).min(want - done);
                if !chunk.uptodate.get(i) {
                    let valid = chunk.present.get(i) && {
                        let r = self.cache.arena.ranges(chunk.pages[i]);
                        r.dirty
                            .union(r.writeback)
                            .contains(Span::new(start, start + n))
                    };
                    if !valid {
                        return (done, ReadStop::Miss((offset + done as u64) / PAGE));
                    }
                }
                self.cache
                    .arena
                    .copy_out(chunk.pages[i], start, &mut buf[done..done + n]);
                if keep.is_some_and(|keep| offset + done as u64 >= keep) {
                    chunk.touch(i);
                }
                done += n;
                i += 1;
            }
        }
        (
            done,
            if done == buf.len() {
                ReadStop::Full
            } else {
                ReadStop::Eof
            },
        )
    }

    /// Whether a page is being filled right now.
    pub(crate) fn is_reading(&self, index: u64) -> bool {
        let (ci, i) = place(index);
        self.read_state()
            .chunks
            .get(ci)
            .is_some_and(|c| c.reading.get(i))
    }

    /// The inode has other numbers at the server of a new session: puts them into the descriptors
    /// of all pages.
    pub(super) fn rename(&self, st: &mut State, node: u64, handles: HashMap<u64, u64>) {
        st.server_node = node;
        st.handles = handles;
        let fh = match &st.writer {
            Some(writer) => server_handle(&st.handles, st.session, writer),
            None => u64::MAX,
        };
        let mut next = st.chunks.next(0);
        while let Some(ci) = next {
            let chunk = st.chunks.get(ci).expect("next answers what is there");
            for i in chunk.present.iter() {
                self.cache.arena.rename(chunk.pages[i], node, fh);
            }
            next = st.chunks.next(ci + 1);
        }
    }
}
