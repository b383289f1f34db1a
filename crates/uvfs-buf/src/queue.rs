//! Delayed writes.

use std::sync::{Arc, Mutex, TryLockError};

use smallvec::SmallVec;
use uvfs_io::engine::Io;
use uvfs_mem::Block;
use uvfs_sys::lock;

use crate::buffer::Buffer;
use crate::inner::{Inner, Phase};
use crate::shared::{InFlight, count};
use crate::target::{Plug, Target};
use crate::{BufError, SECTOR};

/// The longest I/O that neighbours are merged into, in sectors (1 MiB).
const MAX_MERGED: u64 = (1 << 20) / SECTOR;
/// The most buffers in one I/O.
const MAX_BUFFERS: usize = 256;

/// Changed buffers that are to be written together. It holds them, so that they stay in memory
/// until they are written.
pub struct WriteQueue {
    target: Target,
    queued: Vec<Buffer>,
    writing: Vec<Buffer>,
    /// The first buffer whose verifier refused it.
    refused: Option<BufError>,
}

/// Neighbours on the way into one I/O.
#[derive(Default)]
struct Run {
    buffers: SmallVec<[Arc<Inner>; 1]>,
    memory: SmallVec<[Block; 1]>,
    end: u64,
    sectors: u64,
}

impl WriteQueue {
    /// An empty queue for buffers of this target.
    pub fn new(target: &Target) -> WriteQueue {
        WriteQueue {
            target: target.clone(),
            queued: Vec::new(),
            writing: Vec::new(),
            refused: None,
        }
    }

    /// Adds a buffer. Adding it twice does no harm.
    pub fn push(&mut self, buffer: Buffer) {
        assert!(
            Arc::ptr_eq(&buffer.shared, &self.target.shared),
            "a buffer of another target"
        );
        self.queued.push(buffer);
    }

    /// How many buffers wait or are being written.
    pub fn len(&self) -> usize {
        self.queued.len() + self.writing.len()
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Starts to write all that is queued, in the order of addresses, neighbours as one I/O. Does
    /// not wait for it, but waits for guards of the buffers' content.
    ///
    /// A buffer that its verifier refuses stays in the queue; [`WriteQueue::wait`] reports it.
    pub fn submit(&mut self) {
        let shared = &self.target.shared;
        let mut buffers = std::mem::take(&mut self.queued);
        buffers.sort_by_key(|buffer| (buffer.daddr(), Arc::as_ptr(&buffer.inner) as usize));
        buffers.dedup_by(|a, b| Arc::ptr_eq(&a.inner, &b.inner));
        let mut plug = Plug::default();
        let mut run = Run::default();
        for buffer in buffers {
            match self.take(&buffer, &mut run, &mut plug) {
                Ok(None) => {}
                Ok(Some(block)) => {
                    let inner = &buffer.inner;
                    let single = inner.extents.len() == 1;
                    let joins = single
                        && run.end == inner.daddr()
                        && run.sectors + inner.sectors <= MAX_MERGED
                        && run.buffers.len() < MAX_BUFFERS;
                    if !joins {
                        self.end(&mut run, &mut plug);
                    }
                    run.buffers.push(inner.clone());
                    run.memory.push(block);
                    run.sectors += inner.sectors;
                    // Nothing joins a buffer in pieces.
                    run.end = if single {
                        inner.daddr() + inner.sectors
                    } else {
                        u64::MAX
                    };
                    self.writing.push(buffer);
                }
                Err(error) => {
                    self.refused.get_or_insert(error);
                    self.queued.push(buffer);
                }
            }
        }
        self.end(&mut run, &mut plug);
        shared.submit(&mut plug);
    }

    fn end(&self, run: &mut Run, plug: &mut Plug) {
        let Run {
            buffers, memory, ..
        } = std::mem::take(run);
        if !buffers.is_empty() {
            plug.ios.push(self.target.shared.write_io(buffers, memory));
        }
    }

    /// Takes a buffer's memory out of it for the write; `None` if it is not dirty.
    fn take(
        &self,
        buffer: &Buffer,
        run: &mut Run,
        plug: &mut Plug,
    ) -> Result<Option<Block>, BufError> {
        let shared = &self.target.shared;
        let inner = &buffer.inner;
        loop {
            let mut content = match inner.content.try_write() {
                Ok(content) => content,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    // Its holder may wait for a buffer whose memory this thread holds: let that go on
                    // its way first.
                    self.end(run, plug);
                    shared.submit(plug);
                    inner.content_mut()
                }
            };
            let Some(bytes) = content.as_deref_mut() else {
                // Another thread is writing it.
                drop(content);
                self.end(run, plug);
                shared.submit(plug);
                shared.wait_until(|| inner.phase() != Phase::Writing);
                continue;
            };
            let (dirty, verifier) = {
                let state = inner.state();
                (state.dirty, state.verifier)
            };
            if !dirty {
                return Ok(None);
            }
            if let Some(verifier) = verifier
                && let Err(what) = {
                    verifier.seal(inner.daddr(), bytes);
                    verifier.verify(inner.daddr(), bytes)
                }
            {
                count(&shared.counters.verify_errors, 1);
                return Err(BufError::Verify {
                    daddr: inner.daddr(),
                    verifier: verifier.name(),
                    what,
                });
            }
            inner.state().phase = Phase::Writing;
            return Ok(content.take());
        }
    }

    /// Waits for all that was submitted.
    ///
    /// # Errors
    /// The first buffer that could not be written. All that failed are queued again, so that
    /// another [`WriteQueue::flush`] tries again; they carry [`Buffer::write_error`].
    pub fn wait(&mut self) -> Result<(), BufError> {
        let mut first = self.refused.take();
        for buffer in self.writing.drain(..) {
            let inner = &buffer.inner;
            self.target
                .shared
                .wait_until(|| inner.phase() != Phase::Writing);
            if let Some(error) = buffer.write_error() {
                first.get_or_insert(error);
                self.queued.push(buffer);
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// Writes all that is queued and waits for it.
    ///
    /// # Errors
    /// As [`WriteQueue::wait`].
    pub fn flush(&mut self) -> Result<(), BufError> {
        self.submit();
        self.wait()
    }

    /// Gives up on what is queued: the changes stay in the buffers, which stay dirty (and in
    /// memory) until a caller writes or invalidates them.
    pub fn clear(&mut self) {
        self.queued.clear();
        self.refused = None;
    }
}

impl Drop for WriteQueue {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!(%error, "a write queue was dropped with unwritten buffers");
        }
    }
}

impl Target {
    /// Writes all changed buffers and makes them, and all that was written before, durable.
    ///
    /// # Errors
    /// The first one; the buffers that could not be written stay dirty.
    pub fn sync(&self) -> Result<(), BufError> {
        let mut queue = WriteQueue::new(self);
        for buffer in self.shared.dirty() {
            queue.push(buffer);
        }
        queue.flush()?;
        drop(queue);
        let shared = &self.shared;
        let result = Arc::new(Mutex::new(None));
        let tag = lock(&shared.in_flight).insert(InFlight::Flush(result.clone())) as u64;
        let mut plug = Plug::default();
        plug.ios.push(Io::flush(tag));
        shared.submit(&mut plug);
        shared.wait_until(|| lock(&result).is_some());
        match lock(&result).flatten() {
            Some(errno) => Err(BufError::Io {
                what: "flushing after",
                daddr: 0,
                len: self.sectors(),
                errno,
            }),
            None => Ok(()),
        }
    }
}
