//! Reads and writes of buffers, from their submission to their end.

use crate::inner::{Inner, OVERHEAD, Phase};
use crate::shared::{InFlight, Shared, count};
use crate::{BufError, Extent, SECTOR};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use uvfs_io::engine::{Io, IoExtent, Op};
use uvfs_mem::Block;

use super::Plug;
use uvfs_sys::lock;

impl Shared {
    /// Memory for a buffer. With a plug it may wait, and submits the plug first.
    pub(super) fn alloc(
        &self,
        daddr: u64,
        len: u64,
        mut plug: Option<&mut Plug>,
    ) -> Result<Block, BufError> {
        let bytes = (len * SECTOR) as usize;
        if bytes + OVERHEAD > self.arena.stats().limit {
            return Err(self.no_memory(daddr, len));
        }
        let mut deadline = None;
        loop {
            let seen = self.round();
            if let Ok(block) = self.arena.alloc_charged(bytes, OVERHEAD) {
                return Ok(block);
            }
            if self.evict(bytes.max(64 << 10)) > 0 {
                continue;
            }
            let Some(plug) = plug.as_deref_mut() else {
                return Err(self.no_memory(daddr, len));
            };
            self.submit(plug);
            if self.engine.in_flight() > 0 {
                self.step(|| false);
                continue;
            }
            count(&self.counters.memory_waits, 1);
            let now = Instant::now();
            let deadline = *deadline.get_or_insert(now + self.memory_wait);
            if now >= deadline {
                return Err(self.no_memory(daddr, len));
            }
            self.starving.fetch_add(1, Ordering::SeqCst);
            // In slices: a release between the attempt above and this line is not announced.
            self.pause(seen, (deadline - now).min(Duration::from_millis(20)));
            self.starving.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Hands all I/O of a plug to the engine.
    pub fn submit(&self, plug: &mut Plug) {
        if plug.ios.is_empty() {
            return;
        }
        loop {
            self.engine.submit(&mut plug.ios);
            if plug.ios.is_empty() {
                break;
            }
            self.step(|| false);
        }
        self.poll();
    }

    pub(super) fn io(
        &self,
        op: Op,
        extents: &[Extent],
        memory: SmallVec<[Block; 1]>,
        what: InFlight,
    ) -> Io {
        let tag = lock(&self.in_flight).insert(what) as u64;
        let extents = extents.iter().map(|extent| IoExtent {
            offset: extent.daddr * SECTOR,
            len: extent.len as usize * SECTOR as usize,
        });
        Io::new(op, tag, extents, memory)
    }

    /// A read into the buffer that the caller has claimed.
    pub(super) fn read_io(&self, inner: &Arc<Inner>, block: Block) -> Io {
        inner.holds.fetch_add(1, Ordering::Relaxed);
        let what = InFlight::Read(smallvec![Some(inner.clone())]);
        self.io(Op::Read, &inner.extents, smallvec![block], what)
    }

    /// A write of one or several buffers side by side, whose memory the caller took out.
    pub fn write_io(&self, buffers: SmallVec<[Arc<Inner>; 1]>, memory: SmallVec<[Block; 1]>) -> Io {
        for inner in &buffers {
            inner.holds.fetch_add(1, Ordering::Relaxed);
        }
        let extents: SmallVec<[Extent; 1]> = match &buffers[..] {
            [one] => one.extents.clone(),
            many => smallvec![Extent {
                daddr: many[0].daddr(),
                len: many.iter().map(|inner| inner.sectors as u32).sum(),
            }],
        };
        count(&self.counters.write_ios, 1);
        self.io(Op::Write, &extents, memory, InFlight::Write(buffers))
    }

    pub(super) fn complete(&self, io: Io) {
        let what = lock(&self.in_flight).remove(io.tag as usize);
        let error = io.error();
        // A single extent that failed half-way has served the buffers before that place.
        let good = match &io.results[..] {
            [one] => one.bytes,
            _ if error.is_none() => usize::MAX,
            _ => 0,
        };
        let mut end = 0;
        match what {
            InFlight::Read(buffers) => {
                for (inner, block) in buffers.into_iter().zip(io.memory) {
                    end += block.len();
                    let Some(inner) = inner else {
                        count(&self.counters.gap_bytes, block.len() as u64);
                        continue;
                    };
                    let phase = match error {
                        Some(error) if end > good => {
                            count(&self.counters.read_errors, 1);
                            // Threads that wait for it get the error, the next one tries again.
                            self.unindex(&inner);
                            Phase::Failed(error)
                        }
                        _ => {
                            *inner.content_mut() = Some(block);
                            Phase::Ready
                        }
                    };
                    let mut state = inner.state();
                    state.phase = phase;
                    if std::mem::take(&mut state.ahead) {
                        self.ahead.fetch_sub(inner.bytes(), Ordering::Relaxed);
                    }
                    drop(state);
                    self.let_go(&inner);
                }
            }
            InFlight::Write(buffers) => {
                for (inner, block) in buffers.into_iter().zip(io.memory) {
                    end += block.len();
                    let failed = error.filter(|_| end > good);
                    *inner.content_mut() = Some(block);
                    let mut state = inner.state();
                    state.phase = Phase::Ready;
                    state.dirty = failed.is_some();
                    state.write_error = failed;
                    drop(state);
                    count(&self.counters.writes, failed.is_none().into());
                    self.let_go(&inner);
                }
            }
            InFlight::Flush(result) => *lock(&result) = Some(error),
        }
    }
}
