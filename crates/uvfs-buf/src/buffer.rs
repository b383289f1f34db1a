//! A handle of a buffer, and the guards of its content.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLockReadGuard, RwLockWriteGuard};

use uvfs_mem::Block;

use crate::inner::{Inner, Phase};
use crate::shared::Shared;
use crate::{BufError, Extent};

/// A reference to a buffer. While one exists, the buffer stays in memory.
pub struct Buffer {
    pub(crate) inner: Arc<Inner>,
    pub(crate) shared: Arc<Shared>,
}

impl Buffer {
    /// A further handle; the caller sees to it that the count is not zero, or holds the lock of
    /// the group.
    pub(crate) fn hold(inner: &Arc<Inner>, shared: &Arc<Shared>) -> Buffer {
        inner.holds.fetch_add(1, Ordering::Relaxed);
        Buffer {
            inner: inner.clone(),
            shared: shared.clone(),
        }
    }

    /// The disk address of its first sector.
    pub fn daddr(&self) -> u64 {
        self.inner.daddr()
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.inner.bytes()
    }

    /// Where it is on the device.
    pub fn extents(&self) -> &[Extent] {
        &self.inner.extents
    }

    /// Whether it was changed and not yet written.
    pub fn is_dirty(&self) -> bool {
        self.inner.state().dirty
    }

    /// The error of its last write. It stays until a write succeeds; the buffer stays dirty.
    pub fn write_error(&self) -> Option<BufError> {
        let errno = self.inner.state().write_error?;
        Some(self.inner.error("writing", errno))
    }

    /// Locks the content for reading. Waits for a write in progress to end.
    pub fn read(&self) -> ReadGuard<'_> {
        loop {
            let guard = self
                .inner
                .content
                .read()
                .unwrap_or_else(PoisonError::into_inner);
            if guard.is_some() {
                return ReadGuard(guard);
            }
            drop(guard);
            self.await_content();
        }
    }

    /// An owned handle of the content. Until it is dropped, [`Buffer::write`] waits; the content
    /// may be written to the device meanwhile. Waits for a write in progress to end.
    pub fn pin(self) -> Pinned {
        let bytes = {
            let guard = self.read();
            self.inner.pins.fetch_add(1, Ordering::Relaxed);
            NonNull::from(&*guard)
        };
        Pinned {
            bytes,
            buffer: self,
        }
    }

    /// Locks the content for changing it; the buffer is dirty from now on. Waits for a write in
    /// progress to end, and until no handle has the content pinned.
    pub fn write(&self) -> WriteGuard<'_> {
        loop {
            let guard = self.inner.content_mut();
            // Acquire: the last look through a pin happened before the change.
            if self.inner.pins.load(Ordering::Acquire) > 0 {
                drop(guard);
                let unpinned = || self.inner.pins.load(Ordering::Relaxed) == 0;
                self.shared.wait_until(unpinned);
                continue;
            }
            if guard.is_some() {
                let mut state = self.inner.state();
                state.dirty = true;
                state.verified = None;
                drop(state);
                return WriteGuard(guard);
            }
            drop(guard);
            self.await_content();
        }
    }

    fn await_content(&self) {
        self.shared.wait_until(|| {
            let phase = self.inner.phase();
            // A handle is only given out once there is content.
            assert!(
                !matches!(phase, Phase::Failed(_)),
                "a buffer without content"
            );
            phase == Phase::Ready
        });
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        Buffer::hold(&self.inner, &self.shared)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.inner.holds.fetch_sub(1, Ordering::Release) == 1 {
            self.shared.released();
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.inner.state();
        f.debug_struct("Buffer")
            .field("extents", &self.inner.extents)
            .field("phase", &state.phase)
            .field("dirty", &state.dirty)
            .finish_non_exhaustive()
    }
}

/// The content of a buffer, locked for reading.
pub struct ReadGuard<'a>(RwLockReadGuard<'a, Option<Block>>);

impl Deref for ReadGuard<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_ref().expect("checked when the guard was made")
    }
}

/// The content of a buffer, locked for changing.
pub struct WriteGuard<'a>(RwLockWriteGuard<'a, Option<Block>>);

impl Deref for WriteGuard<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_ref().expect("checked when the guard was made")
    }
}

impl DerefMut for WriteGuard<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.as_mut().expect("checked when the guard was made")
    }
}

/// The content of a buffer, held by an owned handle: see [`Buffer::pin`].
pub struct Pinned {
    bytes: NonNull<[u8]>,
    buffer: Buffer,
}

// SAFETY: `bytes` is shared memory that no thread changes while the handle exists; all else is Send.
unsafe impl Send for Pinned {}
// SAFETY: as above; a shared handle only reads.
unsafe impl Sync for Pinned {}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the arena's memory is mapped and the buffer's own for as long as `buffer` is
        // held: eviction passes held buffers over, and an I/O that writes the content gives the
        // same memory back. `Buffer::write`, the only way to change it, waits for the pin.
        unsafe { self.bytes.as_ref() }
    }
}

impl AsRef<[u8]> for Pinned {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.buffer.inner.pins.fetch_sub(1, Ordering::Release);
    }
}
