//! Copies written data into pages.

use super::super::Handle;
use super::super::writeback::Behind;
use crate::types::Lease;
use rustix::io;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;
use uvfs_queue::arena::{PAGE_SIZE, Ranges, Span};

use super::{Inode, PAGE, PIECE, RUN, State, place, server_handle};

/// Pages that a write made dirty, and those of them that no request was writing.
#[derive(Default)]
struct Dirtied {
    pages: u64,
    idle: u64,
}

/// A step that has to end before a buffered write goes on.
enum Need {
    /// The lease for it.
    Lease,
    Pages,
    /// The end of the read that fills the page.
    Read,
    /// A flush of the page: the new bytes do not adjoin its dirty ones.
    Flush(u64),
}

impl Inode {
    /// A buffered write of all slices at `offset`. The caller holds the write lock. Gives the bytes written: fewer
    /// than all if the write lease (number `lease`, or any) is gone.
    pub(crate) fn write(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        bufs: &[IoSlice<'_>],
        offset: u64,
        lease: Option<u64>,
        dontcache: bool,
    ) -> io::Result<usize> {
        let mut done = 0usize;
        for buf in bufs {
            let mut at = 0;
            while at < buf.len() {
                let piece = &buf[at..buf.len().min(at + PIECE)];
                let part = self.write_piece(handle, offset + done as u64, piece, lease, dontcache);
                match part {
                    Ok(n) if n == piece.len() => {}
                    Ok(n) => {
                        self.cache.counters.bytes_in((done + n) as u64);
                        return Ok(done + n);
                    }
                    Err(e) if done == 0 => return Err(e),
                    Err(_) => return Ok(done),
                }
                at += piece.len();
                done += piece.len();
            }
        }
        self.cache.counters.bytes_in(done as u64);
        Ok(done)
    }

    fn write_piece(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        buf: &[u8],
        lease: Option<u64>,
        dontcache: bool,
    ) -> io::Result<usize> {
        let mut done = 0;
        loop {
            self.cache.throttle(self)?;
            let mut dirtied = Dirtied::default();
            let mut st = self.state();
            let need = self.copy_in(
                &mut st,
                handle,
                offset,
                buf,
                &mut done,
                &mut dirtied,
                lease,
                dontcache,
            );
            if dirtied.pages > 0 {
                st.dirty += dirtied.pages;
                // Under the lock: no writeback can have taken them yet.
                self.cache.add_dirty(dirtied.idle);
                if st.dirtied_at.is_none() {
                    st.dirtied_at = Some(Instant::now());
                }
            }
            let enough = st.dirty > self.cache.request_pages() as u64;
            let end = offset + done as u64;
            let behind = match st.written.1 >= self.cache.stream_bytes() {
                _ if dontcache => Behind::Reuse,
                true => Behind::Pass,
                false => Behind::Stay,
            };
            drop(st);
            match need {
                None => {
                    let (first, next) = (offset / PAGE / RUN * RUN, end / PAGE / RUN * RUN);
                    if behind != Behind::Stay && first < next {
                        self.write_stream(first, next - 1, behind);
                    } else if dirtied.pages > 0 && enough && self.cache.above_background() {
                        self.write_full();
                    }
                    return Ok(done);
                }
                Some(Need::Lease) => return Ok(done),
                Some(Need::Pages) => {
                    let want = (buf.len() - done).div_ceil(PAGE_SIZE).max(self.cache.lend) + 1;
                    let mut pages = Vec::new();
                    self.cache.alloc(want, &mut pages);
                    self.state().spare.append(&mut pages);
                }
                Some(Need::Read) => {
                    let index = (offset + done as u64) / PAGE;
                    self.cache
                        .wait(&self.event, || (!self.is_reading(index)).then_some(()));
                }
                Some(Need::Flush(index)) => {
                    self.write_and_wait(index, index)?;
                }
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn copy_in(
        &self,
        st: &mut State,
        handle: &Arc<Handle>,
        offset: u64,
        buf: &[u8],
        done: &mut usize,
        dirtied: &mut Dirtied,
        lease: Option<u64>,
        dontcache: bool,
    ) -> Option<Need> {
        let arena = &self.cache.arena;
        if st.lease.mode < Lease::Write || lease.is_some_and(|seq| seq != st.lease.seq) {
            return Some(Need::Lease);
        }
        if !st.writer.as_ref().is_some_and(|w| Arc::ptr_eq(w, handle)) {
            st.writer = Some(handle.clone());
        }
        let next = offset + *done as u64;
        let on = st.written.0 == next;
        if !on {
            st.written = (next, 0);
        }
        while *done < buf.len() {
            let at = offset + *done as u64;
            let (index, start) = (at / PAGE, (at % PAGE) as usize);
            let n = (PAGE_SIZE - start).min(buf.len() - *done);
            let span = Span::new(start, start + n);
            let (ci, i) = place(index);
            let chunk = st.chunks.get_or_insert(ci);
            let (page, mut ranges);
            if chunk.present.get(i) {
                if chunk.reading.get(i) {
                    return Some(Need::Read);
                }
                page = chunk.pages[i];
                ranges = arena.ranges(page);
                if !chunk.uptodate.get(i) {
                    let valid = ranges.dirty.union(ranges.writeback);
                    if n < PAGE_SIZE && !valid.is_empty() && !valid.touches(span) {
                        return Some(Need::Flush(index));
                    }
                }
                // Filling up the page that the last write began is not another use of it.
                let fills_up = on && at == next && start > 0;
                if !dontcache && !fills_up {
                    chunk.touch(i);
                }
            } else {
                let Some(new) = st.spare.pop() else {
                    return Some(Need::Pages);
                };
                page = new;
                ranges = Ranges::default();
                arena.set_owner(page, st.server_node, index);
                chunk.insert(i, page);
                if dontcache {
                    chunk.dropbehind.set(i);
                }
                if n < PAGE_SIZE && index * PAGE >= st.server_size {
                    // The page is beyond the end of the file at the server: around the new bytes are zeros.
                    arena.zero(page, 0, start);
                    arena.zero(page, start + n, PAGE_SIZE - start - n);
                    chunk.uptodate.set(i);
                }
            }
            arena.copy_in(page, start, &buf[*done..*done + n]);
            st.size = st.size.max(at + n as u64);
            ranges.dirty = ranges.dirty.union(span);
            if !chunk.uptodate.get(i) {
                let valid = ranges.dirty.union(ranges.writeback);
                let end = usize::from(valid.end);
                if valid.start == 0 && (end == PAGE_SIZE || index * PAGE + end as u64 >= st.size) {
                    arena.zero(page, end, PAGE_SIZE - end);
                    chunk.uptodate.set(i);
                }
            }
            if !chunk.dirty.get(i) {
                chunk.dirty.set(i);
                arena.set_handle(page, server_handle(&st.handles, st.session, handle));
                dirtied.pages += 1;
                dirtied.idle += u64::from(!chunk.writeback.get(i));
            }
            arena.set_ranges(page, ranges);
            *done += n;
            st.written.0 += n as u64;
            st.written.1 += n as u64;
        }
        None
    }
}
