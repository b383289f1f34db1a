//! Direct I/O: no piece of a call waits for another, and all are waited for together.

use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io;
use uvfs_queue::arena::{Arena, PAGE_SIZE};

use super::Handle;
use super::inode::{Inode, push_seg};
use crate::connection::pages::{Op, Request};
use uvfs_sys::lock;

const PAGE: u64 = PAGE_SIZE as u64;

/// How one piece of a direct call ended: its bytes.
type Piece = io::Result<usize>;

/// Called once when the last piece has ended, by whichever thread takes completions.
pub(crate) struct Then(pub(crate) Box<dyn FnOnce(&Direct) + Send>);

/// A direct read or write whose pieces are under way. Its pages belong to it until the last one
/// has ended, also when no caller waits.
pub(crate) struct Direct {
    inode: Arc<Inode>,
    op: Op,
    offset: u64,
    len: usize,
    /// Bytes of each piece but the last one.
    piece: usize,
    pages: Vec<u32>,
    pieces: Mutex<Vec<(usize, Piece)>>,
    left: AtomicUsize,
    ended: AtomicBool,
    then: Mutex<Option<Then>>,
    /// A caller waits, and copies each piece while others are still on their way.
    eager: AtomicBool,
}

impl Inode {
    fn bounce_limit(&self) -> usize {
        (self.cache.arena.pages() as usize / 4).max(1) * PAGE_SIZE
    }

    /// How much of a direct call goes in one round: what its bounce pages may take of the cache.
    pub(crate) fn direct_round(&self, len: usize) -> usize {
        len.min(self.bounce_limit())
    }

    /// Waits until no direct write is under way. The caller holds the write lock alone, so no
    /// other can begin.
    pub(crate) fn wait_direct(&self) {
        self.cache.wait(&self.event, || {
            (self.direct.load(Ordering::Acquire) == 0).then_some(())
        });
    }

    /// Makes a range's cached pages agree with the server before a direct call: writes what is
    /// dirty, and for a write throws the pages away.
    pub(crate) fn prepare_direct(
        self: &Arc<Self>,
        op: Op,
        offset: u64,
        len: usize,
    ) -> io::Result<()> {
        let (first, last) = (offset / PAGE, (offset + len as u64 - 1) / PAGE);
        let (dirty, ahead) = {
            let st = self.read_state();
            (st.is_unwritten(), st.size > st.server_size)
        };
        if dirty {
            if op == Op::Read && ahead {
                // The server would see the end of the file where there is none.
                self.write_and_wait(0, u64::MAX)?;
            } else {
                self.write_and_wait(first, last)?;
            }
        }
        if op == Op::Write {
            self.invalidate_range(first, last, None);
        }
        Ok(())
    }

    /// Sends all pieces of a direct read at once; `then` is done at the end.
    pub(crate) fn start_read(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        len: usize,
        dontcache: bool,
        then: Option<Then>,
    ) -> Arc<Direct> {
        let direct = Direct::new(self, Op::Read, offset, len, then);
        let starts = (0..len).step_by(direct.piece);
        let mut batch = starts
            .map(|start| direct.request(handle, start, dontcache))
            .collect();
        self.cache.io.submit(&mut batch);
        direct
    }

    /// Sends all pieces of a direct write; `then` is done at the end.
    pub(crate) fn start_write(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        data: &[IoSlice<'_>],
        dontcache: bool,
        then: Option<Then>,
    ) -> Arc<Direct> {
        let len = data.iter().map(|part| part.len()).sum();
        let direct = Direct::new(self, Op::Write, offset, len, then);
        self.direct.fetch_add(1, Ordering::AcqRel);
        let mut data = Source { data, at: 0 };
        let mut batch = Vec::with_capacity(1);
        for start in (0..len).step_by(direct.piece) {
            let n = direct.piece.min(len - start);
            data.copy_in(&self.cache.arena, &direct.pages, start, n);
            // A piece is on its way while the next one is copied.
            batch.push(direct.request(handle, start, dontcache));
            self.cache.io.submit(&mut batch);
        }
        direct
    }
}

/// The data of a write, taken piece by piece.
struct Source<'a> {
    data: &'a [IoSlice<'a>],
    /// How much of the first slice is taken.
    at: usize,
}

impl Source<'_> {
    /// Copies the next `len` bytes to where `pages` has what begins at `start`.
    fn copy_in(&mut self, arena: &Arena, pages: &[u32], start: usize, len: usize) {
        let end = start + len;
        let mut to = start;
        while to < end {
            let (first, others) = self.data.split_first().expect("as much data as was said");
            let rest = &first[self.at..];
            if rest.is_empty() {
                (self.data, self.at) = (others, 0);
                continue;
            }
            let inside = to % PAGE_SIZE;
            let n = rest.len().min(PAGE_SIZE - inside).min(end - to);
            arena.copy_in(pages[to / PAGE_SIZE], inside, &rest[..n]);
            self.at += n;
            to += n;
        }
    }
}

impl Direct {
    /// A call with pages of its own, whose pieces are still to be sent.
    fn new(inode: &Arc<Inode>, op: Op, offset: u64, len: usize, then: Option<Then>) -> Arc<Self> {
        assert!(len > 0 && len <= inode.bounce_limit());
        let cache = &inode.cache;
        let piece = cache.max_request / PAGE_SIZE * PAGE_SIZE;
        let pieces = len.div_ceil(piece);
        cache.counters.direct_requests(pieces as u64);
        let want = len.div_ceil(PAGE_SIZE);
        let mut pages = Vec::with_capacity(want);
        while pages.len() < want {
            cache.alloc(want - pages.len(), &mut pages);
        }
        // `alloc` hands pages out from the end of its list: turned round, they ascend.
        pages.reverse();
        Arc::new(Self {
            inode: inode.clone(),
            op,
            offset,
            len,
            piece,
            pages,
            pieces: Mutex::new(Vec::with_capacity(pieces)),
            left: AtomicUsize::new(pieces),
            ended: AtomicBool::new(false),
            then: Mutex::new(then),
            eager: AtomicBool::new(false),
        })
    }

    /// The piece that begins at byte `start` of the call. The file stays open until it has ended.
    fn request(self: &Arc<Self>, handle: &Arc<Handle>, start: usize, dontcache: bool) -> Request {
        let len = self.piece.min(self.len - start);
        let arena = &self.inode.cache.arena;
        let mut segs = Vec::new();
        for at in (start..start + len).step_by(PAGE_SIZE) {
            let part = PAGE_SIZE.min(start + len - at);
            push_seg(&mut segs, arena.seg(self.pages[at / PAGE_SIZE], 0, part));
        }
        let (direct, open) = (self.clone(), handle.clone());
        Request {
            op: self.op,
            node: self.inode.node,
            handle: handle.fh,
            offset: self.offset + start as u64,
            len,
            segs,
            dontcache,
            writeback: false,
            done: Box::new(move |result| {
                direct.piece_ended(start, result);
                drop(open);
            }),
        }
    }

    fn piece_ended(&self, start: usize, piece: Piece) {
        lock(&self.pieces).push((start, piece));
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            if self.eager.load(Ordering::Acquire) {
                self.inode.event.notify();
            }
            return;
        }
        if self.op == Op::Write {
            // Pages that others read into the cache meanwhile may be old. The size moves only now.
            let (first, last) = (
                self.offset / PAGE,
                (self.offset + self.len as u64 - 1) / PAGE,
            );
            let written = self.result().unwrap_or(0) as u64;
            let end = (written > 0).then(|| self.offset + written);
            self.inode.invalidate_range(first, last, end);
            self.inode.direct.fetch_sub(1, Ordering::AcqRel);
        }
        self.ended.store(true, Ordering::Release);
        self.inode.event.notify();
        let then = lock(&self.then).take();
        if let Some(Then(then)) = then {
            then(self);
        }
    }

    pub(crate) fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn wait(&self) {
        self.inode
            .cache
            .wait(&self.inode.event, || self.ended().then_some(()));
    }

    /// The bytes moved before the first short or failed piece; its error when there are none.
    pub(crate) fn result(&self) -> io::Result<usize> {
        let mut pieces = lock(&self.pieces).clone();
        pieces.sort_unstable_by_key(|p| p.0);
        let mut done = 0;
        for (start, piece) in pieces {
            debug_assert!(start >= done);
            match piece {
                Ok(n) if start == done => done += n.min(self.len - start),
                Err(code) if done == 0 && start == 0 => return Err(code),
                _ => break,
            }
        }
        Ok(done)
    }

    /// Copies what a read brought, from some byte of it on. The pieces with it have ended.
    pub(crate) fn copy_out_from(&self, mut from: usize, mut buf: &mut [u8]) {
        while !buf.is_empty() {
            let start = from % PAGE_SIZE;
            let (part, rest) = buf.split_at_mut(buf.len().min(PAGE_SIZE - start));
            let page = self.pages[from / PAGE_SIZE];
            self.inode.cache.arena.copy_out(page, start, part);
            from += part.len();
            buf = rest;
        }
    }

    /// Has the waiter woken for each piece, so that [`Direct::copy_out`] keeps up with them.
    pub(crate) fn hurry(&self) {
        self.eager.store(true, Ordering::Release);
    }

    /// Waits, and copies what a read brings to `buf` as it comes.
    pub(crate) fn wait_copying(&self, buf: &mut [u8]) {
        self.hurry();
        let mut copied = 0;
        let mut ended = false;
        while !ended {
            // Once for each few pieces: a waiter woken by the first helps with those that are left.
            self.inode.cache.wait(&self.inode.event, || {
                // Looked at first: what ended before it was set is copied after it.
                ended = self.ended();
                (self.copy_out(buf, &mut copied) || ended).then_some(())
            });
        }
    }

    /// Copies what pieces of a read brought that ended since the last call; `copied` counts them.
    /// Behind a piece that is short or failed there may be more than [`Direct::result`] says.
    /// True when there were any.
    pub(crate) fn copy_out(&self, buf: &mut [u8], copied: &mut usize) -> bool {
        let before = *copied;
        loop {
            let Some(&(start, piece)) = lock(&self.pieces).get(*copied) else {
                return *copied > before;
            };
            *copied += 1;
            let Ok(n) = piece else { continue };
            self.copy_out_from(start, &mut buf[start..self.len.min(start + n)]);
        }
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        self.inode.cache.free(&mut self.pages);
    }
}
