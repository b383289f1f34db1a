//! Reads pages that the cache lacks, and drops those that were wanted once.

use super::super::Handle;
use crate::connection::pages::{Op, Request};
use crate::types::Lease;
use rustix::io::{self, Errno};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use uvfs_queue::arena::{PAGE_SIZE, Span};

use super::{Inode, PAGE, place, push_seg};

/// A read that was started for a caller that waits.
#[derive(Debug, Default)]
pub(crate) struct Fill {
    left: AtomicU32,
    errno: AtomicI32,
}

impl Fill {
    pub(crate) fn finished(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }
    pub(crate) fn error(&self) -> Option<Errno> {
        let errno = self.errno.load(Ordering::Acquire);
        (errno != 0).then(|| Errno::from_raw_os_error(errno))
    }
}

impl Inode {
    /// Starts reads of what is missing in `first..=last`; with memory short, at least of the
    /// first page if `must` (and else perhaps of none).
    pub(crate) fn fill(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        first: u64,
        last: u64,
        dropbehind: bool,
        must: bool,
    ) -> Arc<Fill> {
        let fill = Arc::new(Fill::default());
        let end = self.size().div_ceil(PAGE);
        if first >= end {
            return fill;
        }
        let last = last.min(end - 1);
        let mut pages = Vec::new();
        let want = usize::try_from(last - first + 1).unwrap_or(usize::MAX).min(
            // Never more than a part of the cache for one window.
            (self.cache.arena.pages() as usize / 8).max(1),
        );
        if must {
            self.cache.alloc(want, &mut pages);
        } else {
            self.cache.try_alloc(want, &mut pages);
        }
        let mut batch = Vec::new();
        let mut st = self.state();
        if st.lease.mode < Lease::Read {
            drop(st);
            self.cache.free(&mut pages);
            return fill;
        }
        let max_pages = self.cache.request_pages();
        let node = st.server_node;
        let mut run: Vec<(u32, Span)> = Vec::new();
        let mut run_at = first;
        for index in first..=last {
            let (ci, i) = place(index);
            let chunk = st.chunks.get_or_insert(ci);
            let skip = chunk.uptodate.get(i) || chunk.reading.get(i);
            if skip || run.len() >= max_pages {
                let run = std::mem::take(&mut run);
                self.fill_request(handle, run_at, run, dropbehind, &fill, &mut batch);
            }
            if skip {
                continue;
            }
            let Some(page) = pages.pop() else { break };
            let mut valid = Span::default();
            if chunk.present.get(i) {
                // Partly written: its own bytes stay, the rest comes from the server.
                let r = self.cache.arena.ranges(chunk.pages[i]);
                valid = r.dirty.union(r.writeback);
            } else {
                self.cache.arena.set_owner(page, node, index);
                chunk.insert(i, page);
                match dropbehind {
                    true => chunk.dropbehind.set(i),
                    false => chunk.expect(i),
                }
            }
            chunk.reading.set(i);
            if run.is_empty() {
                run_at = index;
            }
            run.push((page, valid));
        }
        self.fill_request(handle, run_at, run, dropbehind, &fill, &mut batch);
        drop(st);
        self.cache.free(&mut pages);
        if !batch.is_empty() {
            self.cache.counters.read_requests(batch.len() as u64);
            self.cache.io.submit(&mut batch);
        }
        fill
    }

    fn fill_request(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        first: u64,
        run: Vec<(u32, Span)>,
        dontcache: bool,
        fill: &Arc<Fill>,
        batch: &mut Vec<Request>,
    ) {
        if run.is_empty() {
            return;
        }
        let mut segs = Vec::new();
        for &(page, _) in &run {
            push_seg(&mut segs, self.cache.arena.seg(page, 0, PAGE_SIZE));
        }
        fill.left.fetch_add(1, Ordering::Relaxed);
        let (inode, fill, handle) = (self.clone(), fill.clone(), handle.clone());
        batch.push(Request {
            op: Op::Read,
            node: self.node,
            handle: handle.fh,
            offset: first * PAGE,
            len: run.len() * PAGE_SIZE,
            segs,
            dontcache,
            writeback: false,
            done: Box::new(move |result| {
                inode.end_fill(first, &run, result, &fill);
                drop(handle);
            }),
        });
    }

    fn end_fill(&self, first: u64, run: &[(u32, Span)], result: io::Result<usize>, fill: &Fill) {
        let arena = &self.cache.arena;
        let mut freed = Vec::new();
        let mut merged = 0;
        let got = match &result {
            Ok(n) => Some((*n).min(run.len() * PAGE_SIZE)),
            Err(e) => {
                fill.errno.store(e.raw_os_error(), Ordering::Release);
                None
            }
        };
        let mut st = self.state();
        for (k, &(page, valid)) in run.iter().enumerate() {
            let (ci, i) = place(first + k as u64);
            let chunk = st
                .chunks
                .get_mut(ci)
                .expect("a chunk with a page under I/O stays");
            debug_assert!(chunk.reading.get(i));
            chunk.reading.clear(i);
            let stale = chunk.stale.get(i);
            chunk.stale.clear(i);
            let own = chunk.pages[i] == page;
            let Some(got) = got.filter(|_| !stale) else {
                if own {
                    chunk.remove(i);
                }
                freed.push(page);
                continue;
            };
            // Beyond what the server had are zeros: the end of the file, or a hole that it does
            // not know of yet.
            let have = got.saturating_sub(k * PAGE_SIZE).min(PAGE_SIZE);
            arena.zero(page, have, PAGE_SIZE - have);
            if own {
                chunk.uptodate.set(i);
                continue;
            }
            let (start, end) = (usize::from(valid.start), usize::from(valid.end));
            for (from, to) in [(0, start), (end, PAGE_SIZE)] {
                if to > from {
                    arena.copy_page(page, chunk.pages[i], from, to - from);
                    merged += to - from;
                }
            }
            chunk.uptodate.set(i);
            freed.push(page);
        }
        st.chunks.remove_if_empty(place(first).0);
        drop(st);
        self.cache.counters.bytes_merged(merged as u64);
        self.cache.free(&mut freed);
        fill.left.fetch_sub(1, Ordering::Release);
        self.event.notify();
    }

    /// After an uncached read: the pages that such reads brought in go.
    pub(crate) fn drop_behind(&self, first: u64, last: u64) {
        let mut freed = Vec::new();
        let mut st = self.state();
        let mut next = 0;
        while let Some((ci, lo, hi)) = st.chunks.within(next, first, last) {
            next = ci + 1;
            let chunk = st.chunks.get_mut(ci).expect("next answers what is there");
            let go = chunk
                .clean()
                .and(&chunk.dropbehind)
                .without(&chunk.referenced());
            for i in go.iter().filter(|i| (lo..=hi).contains(i)) {
                freed.push(chunk.remove(i));
            }
            st.chunks.remove_if_empty(ci);
        }
        drop(st);
        self.cache.free(&mut freed);
    }
}
