//! The part of a buffer that the index, the list and the handles share.

use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};

use rustix::io::Errno;
use smallvec::SmallVec;
use uvfs_mem::{Block, LruKey, RefCount};

use crate::{BufError, Corrupt, Extent, Verifier};

/// The state of a buffer's content.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Being read (or about to be): no content.
    #[default]
    Reading,
    /// The read failed: no content.
    Failed(Errno),
    /// There.
    Ready,
    /// Being written (or about to be): its memory is with the I/O.
    Writing,
}

#[derive(Default)]
pub(crate) struct State {
    pub phase: Phase,
    /// Changed since it was read or written.
    pub dirty: bool,
    /// The error of the last write, until one succeeds.
    pub write_error: Option<Errno>,
    /// The verifier that looked at this content last, and its result.
    pub verified: Option<(&'static str, Result<(), Corrupt>)>,
    pub verifier: Option<&'static dyn Verifier>,
    /// It is being read ahead, and counted as that.
    pub ahead: bool,
}

/// A buffer's place, state and content.
pub(crate) struct Inner {
    pub extents: SmallVec<[Extent; 1]>,
    pub sectors: u64,
    /// Handles and I/Os. Goes from zero to one only under the lock of its group.
    pub holds: AtomicU32,
    pub refs: RefCount,
    /// Owned read handles. Goes up only under a read lock of the content.
    pub pins: AtomicU32,
    pub state: Mutex<State>,
    pub content: RwLock<Option<Block>>,
    /// Its place in the list; changed under the list's lock only.
    pub lru: Mutex<Option<LruKey>>,
}

/// The cost of one buffer beside its content, counted against the limit: itself, its entry in
/// the index, its place in the list.
pub(crate) const OVERHEAD: usize = size_of::<Inner>() + 96;

impl Inner {
    /// A buffer about to be read, with one hold.
    pub fn new(extents: &[Extent]) -> Inner {
        Inner {
            extents: extents.into(),
            sectors: extents.iter().map(|e| u64::from(e.len)).sum(),
            holds: AtomicU32::new(1),
            refs: RefCount::new(0),
            pins: AtomicU32::new(0),
            state: Mutex::default(),
            content: RwLock::default(),
            lru: Mutex::default(),
        }
    }

    /// Gives the content's memory back.
    pub fn clear(&mut self) {
        *self
            .content
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub fn daddr(&self) -> u64 {
        self.extents[0].daddr
    }

    pub fn bytes(&self) -> usize {
        self.sectors as usize * crate::SECTOR as usize
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn phase(&self) -> Phase {
        self.state().phase
    }

    pub fn content_mut(&self) -> RwLockWriteGuard<'_, Option<Block>> {
        self.content.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn error(&self, what: &'static str, errno: Errno) -> BufError {
        BufError::Io {
            what,
            daddr: self.daddr(),
            len: self.sectors,
            errno,
        }
    }
}
