//! Takes pages away: truncation, invalidation and reclaim.

use super::super::chunk::CHUNK_PAGES;
use rustix::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uvfs_queue::arena::{PAGE_SIZE, Span};
use uvfs_sys::lock;

use super::{Inode, PAGE, State, place};

/// Reclaim takes pages that were read ahead, and not used yet, in one of so many of its sweeps over a file.
pub(in crate::cache) const SPARED: u8 = 4;

impl Inode {
    /// Changes the size, at the server first. The caller holds the write lock.
    pub(crate) fn set_len(
        self: &Arc<Self>,
        size: u64,
        tell: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        self.wait_direct();
        let old = self.size();
        if size >= old {
            tell()?;
            let mut st = self.state();
            st.lease.changed();
            st.size = size;
            st.server_size = st.server_size.max(size);
            return Ok(());
        }
        // Writeback beyond the new end would make the file longer again.
        let cut_page = size / PAGE;
        self.state().frozen = true;
        self.wait_in_flight(cut_page, u64::MAX, u64::MAX);
        let told = tell();
        let mut freed = Vec::new();
        let mut st = self.state();
        st.frozen = false;
        st.lease.changed();
        if told.is_ok() {
            st.size = size;
            st.server_size = st.server_size.min(size);
            self.truncate_pages(&mut st, size, &mut freed);
        }
        drop(st);
        self.cache.free(&mut freed);
        self.event.notify();
        told
    }

    pub(in crate::cache) fn truncate_pages(&self, st: &mut State, size: u64, freed: &mut Vec<u32>) {
        let arena = &self.cache.arena;
        let first_gone = size.div_ceil(PAGE);
        let mut next = st.chunks.next(place(size / PAGE).0);
        while let Some(ci) = next {
            let chunk = st.chunks.get_mut(ci).expect("next answers what is there");
            for i in chunk.present.iter() {
                let index = ci * CHUNK_PAGES as u64 + i as u64;
                if (index + 1) * PAGE <= size {
                    continue;
                }
                let page = chunk.pages[i];
                debug_assert!(!chunk.writeback.get(i));
                let mut ranges = arena.ranges(page);
                let was_dirty = chunk.dirty.get(i);
                if index >= first_gone {
                    ranges.dirty = Span::default();
                } else {
                    let cut = (size % PAGE) as usize;
                    ranges.dirty = ranges.dirty.before(cut);
                    if !chunk.reading.get(i) {
                        arena.zero(page, cut, PAGE_SIZE - cut);
                    }
                }
                arena.set_ranges(page, ranges);
                if was_dirty && ranges.dirty.is_empty() {
                    chunk.dirty.clear(i);
                    st.dirty -= 1;
                    self.cache.sub_dirty(1);
                }
                if chunk.reading.get(i) {
                    chunk.stale.set(i);
                } else if index >= first_gone || (!chunk.uptodate.get(i) && !chunk.dirty.get(i)) {
                    freed.push(chunk.remove(i));
                }
            }
            st.chunks.remove_if_empty(ci);
            next = st.chunks.next(ci + 1);
        }
    }

    /// Throws away the clean pages of a range; those being read are thrown away when they come.
    pub(in crate::cache) fn invalidate(
        &self,
        st: &mut State,
        first: u64,
        last: u64,
        freed: &mut Vec<u32>,
    ) {
        let mut next = 0;
        while let Some((ci, lo, hi)) = st.chunks.within(next, first, last) {
            next = ci + 1;
            let chunk = st.chunks.get_mut(ci).expect("within answers what is there");
            for i in chunk.present.iter().filter(|i| (lo..=hi).contains(i)) {
                if chunk.reading.get(i) {
                    chunk.stale.set(i);
                } else if !chunk.dirty.get(i) && !chunk.writeback.get(i) {
                    freed.push(chunk.remove(i));
                }
            }
            st.chunks.remove_if_empty(ci);
        }
    }

    /// As [`Inode::invalidate`], and makes the file at least `size` long.
    pub(crate) fn invalidate_range(&self, first: u64, last: u64, size: Option<u64>) {
        let mut freed = Vec::new();
        let mut st = self.state();
        st.lease.changed();
        self.invalidate(&mut st, first, last, &mut freed);
        if let Some(size) = size {
            st.size = st.size.max(size);
            st.server_size = st.server_size.max(size);
        }
        drop(st);
        self.cache.free(&mut freed);
    }

    /// Takes up to `want` clean pages that were not used lately, from where it ended the last time to the end of the file.
    /// False if it came there.
    pub(in crate::cache) fn reclaim(&self, want: usize, pages: &mut Vec<u32>) -> bool {
        let mut st = self.state();
        let enough = pages.len() + want;
        let State { spare, .. } = &mut *st;
        if self.opens.load(Ordering::Relaxed) == 0 || lock(&self.cache.free).is_empty() {
            pages.append(spare);
        }
        let spares_unused = !st.sweeps.is_multiple_of(SPARED);
        let mut next = st.chunks.next(st.hand);
        while let Some(ci) = next {
            let chunk = st.chunks.get_mut(ci).expect("next answers what is there");
            let mut go = chunk.clean().without(&chunk.referenced());
            if spares_unused {
                go = go.without(&chunk.unused());
            }
            for i in go.iter() {
                if pages.len() >= enough {
                    st.hand = ci;
                    return true;
                }
                if chunk.unused().get(i) {
                    self.wasted.store(true, Ordering::Relaxed);
                }
                pages.push(chunk.remove(i));
            }
            chunk.unreference();
            st.chunks.remove_if_empty(ci);
            next = st.chunks.next(ci + 1);
        }
        st.hand = 0;
        st.sweeps = st.sweeps.wrapping_add(1);
        false
    }
}
