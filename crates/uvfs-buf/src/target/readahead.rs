//! Reads buffers ahead, those that lie together in one request.

use crate::buffer::Buffer;
use crate::config::Prefetch;
use crate::inner::Inner;
use crate::shared::{InFlight, Shared, count};
use crate::{Extent, SECTOR, Verifier};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uvfs_io::engine::{self, Op};
use uvfs_mem::Block;

use super::{Found, Plug};

pub(super) struct Span {
    range: Range<u64>,
    buffers: SmallVec<[Option<Arc<Inner>>; 1]>,
    memory: SmallVec<[Block; 1]>,
}

impl Shared {
    pub(super) fn readahead(
        self: &Arc<Self>,
        wanted: &mut dyn Iterator<Item = &[Extent]>,
        verifier: &'static dyn Verifier,
        how: Prefetch,
    ) -> usize {
        self.poll();
        let room = (self.engine.depth() * 2).saturating_sub(self.engine.in_flight());
        let budget = self.arena.stats().limit / 4;
        let mut claimed: Vec<(Buffer, Block)> = Vec::new();
        for extents in wanted {
            let bytes: u64 = extents.iter().map(|e| u64::from(e.len) * SECTOR).sum();
            if claimed.len() >= room.max(1) * if how == Prefetch::Exact { 1 } else { 16 }
                || self.ahead.load(Ordering::Relaxed) as u64 + bytes > budget as u64
            {
                break;
            }
            // Readahead is only a hint: what cannot be read now is read (and complained about)
            // when it is needed.
            if let Ok(Found::Claimed(buffer, block)) =
                self.find_or_claim(extents, verifier, true, None)
            {
                buffer.inner.state().ahead = true;
                self.ahead.fetch_add(buffer.len(), Ordering::Relaxed);
                claimed.push((buffer, block));
            }
        }
        let total = claimed.len();
        count(&self.counters.readahead, total as u64);
        let mut plug = Plug::default();
        match how {
            Prefetch::Exact => {
                for (buffer, block) in claimed {
                    plug.ios.push(self.read_io(&buffer.inner, block));
                }
            }
            Prefetch::Span { max_gap, max_len } => self.spans(claimed, max_gap, max_len, &mut plug),
        }
        self.submit(&mut plug);
        total
    }

    /// Turns claimed buffers into I/Os that cover several of them.
    fn spans(
        &self,
        mut claimed: Vec<(Buffer, Block)>,
        max_gap: u32,
        max_len: u32,
        plug: &mut Plug,
    ) {
        claimed.sort_by_key(|(buffer, _)| buffer.daddr());
        let mut span: Option<Span> = None;
        for (buffer, block) in claimed {
            if buffer.extents().len() > 1 {
                plug.ios.push(self.read_io(&buffer.inner, block));
                continue;
            }
            let (from, to) = (buffer.daddr(), buffer.daddr() + buffer.inner.sectors);
            let gap = span.as_ref().and_then(|s| from.checked_sub(s.range.end));
            let joins = span.as_ref().zip(gap).is_some_and(|(s, gap)| {
                gap <= u64::from(max_gap)
                    && to - s.range.start <= u64::from(max_len)
                    && s.memory.len() + 2 <= engine::MAX_SEGMENTS
            });
            let filler = match gap {
                Some(gap) if joins && gap > 0 => {
                    self.arena.alloc((gap * SECTOR) as usize).ok().map(Some)
                }
                Some(0) if joins => Some(None),
                _ => None,
            };
            let current = match (&mut span, filler) {
                (Some(current), Some(filler)) => {
                    if let Some(filler) = filler {
                        current.memory.push(filler);
                        current.buffers.push(None);
                    }
                    current
                }
                _ => {
                    self.end_span(span.take(), plug);
                    span.insert(Span {
                        range: from..from,
                        buffers: SmallVec::new(),
                        memory: SmallVec::new(),
                    })
                }
            };
            buffer.inner.holds.fetch_add(1, Ordering::Relaxed);
            current.buffers.push(Some(buffer.inner.clone()));
            current.memory.push(block);
            current.range.end = to;
        }
        self.end_span(span, plug);
    }

    fn end_span(&self, span: Option<Span>, plug: &mut Plug) {
        if let Some(Span {
            range,
            buffers,
            memory,
        }) = span
        {
            let extent = Extent {
                daddr: range.start,
                len: (range.end - range.start) as u32,
            };
            plug.ios
                .push(self.io(Op::Read, &[extent], memory, InFlight::Read(buffers)));
        }
    }
}
