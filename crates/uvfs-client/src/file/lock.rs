//! Locks of open files: of ranges of bytes as fcntl(2)'s open file description locks, and of whole
//! files as flock(2) and [`std::fs::File::lock`].

use std::ops::{Bound, RangeBounds};
use std::sync::atomic::Ordering;

use rustix::io::{self, Errno};

use super::{File, FileInner};
use crate::error::{Doing, Result};
use crate::types::{LockKind, LockRequest, RangeLock};

/// The last byte that a lock can have.
const LAST: u64 = i64::MAX as u64;

/// The first and the last byte of a range that is not empty.
fn bounds(range: impl RangeBounds<u64>) -> io::Result<(u64, u64)> {
    let start = match range.start_bound() {
        Bound::Included(&start) => Some(start),
        Bound::Excluded(&before) => before.checked_add(1),
        Bound::Unbounded => Some(0),
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => Some(last.min(LAST)),
        Bound::Excluded(&end) => end.checked_sub(1).map(|last| last.min(LAST)),
        Bound::Unbounded => Some(LAST),
    };
    match (start, end) {
        (Some(start), Some(end)) if start <= end => Ok((start, end)),
        _ => Err(Errno::INVAL),
    }
}

/// Locks are of this open file: its clones share them, other open files (of this client, of other
/// clients, and with the server's option `host_locks` of other programs) conflict with them. They
/// go when the file is closed, and when the client dies. Changes of a range that is locked already
/// convert, split and join it as fcntl(2) does.
impl File {
    /// Locks a range of bytes, and waits for it. An exclusive lock needs a file that is open for
    /// writing, a shared one a file that is open for reading.
    ///
    /// # Errors
    /// `EINVAL` for an empty range, `EBADF` when the file is not open in the right way, `ENOLCK`
    /// when the server has too many that wait, and what the server answers.
    pub fn lock_range(&self, kind: LockKind, range: impl RangeBounds<u64>) -> Result<()> {
        self.change_lock(false, Some(kind), bounds(range), true)
    }

    /// As [`File::lock_range`], but fails with `EAGAIN` when
    /// another owner has a lock in the way.
    ///
    /// # Errors
    /// As [`File::lock_range`].
    pub fn try_lock_range(&self, kind: LockKind, range: impl RangeBounds<u64>) -> Result<()> {
        self.change_lock(false, Some(kind), bounds(range), false)
    }

    /// Gives back what this file has locked of a range.
    ///
    /// # Errors
    /// `EINVAL` for an empty range, and what the server answers.
    pub fn unlock_range(&self, range: impl RangeBounds<u64>) -> Result<()> {
        self.change_lock(false, None, bounds(range), false)
    }

    /// The first lock of another owner that is in the way of one like this, if there is one.
    ///
    /// # Errors
    /// `EINVAL` for an empty range, and what the server answers.
    pub fn test_lock_range(
        &self,
        kind: LockKind,
        range: impl RangeBounds<u64>,
    ) -> Result<Option<RangeLock>> {
        let f = &*self.0;
        let (start, end) = bounds(range).doing("testing a lock of", &f.name)?;
        let request = f.lock_request(false, Some(kind), start, end);
        let (node, fh) = (f.handle.node, f.handle.fh);
        let found = self.retried(|| f.cache.server.test_lock(node, fh, &request));
        found.doing("testing a lock of", &f.name)
    }

    /// Locks the whole file, as flock(2), and waits for it. These locks and those of ranges know
    /// nothing of each other.
    ///
    /// # Errors
    /// The server's error.
    pub fn lock(&self, kind: LockKind) -> Result<()> {
        self.change_lock(true, Some(kind), Ok((0, LAST)), true)
    }

    /// As [`File::lock`], but fails with `EAGAIN` when another
    /// owner has it.
    ///
    /// # Errors
    /// As [`File::lock`].
    pub fn try_lock(&self, kind: LockKind) -> Result<()> {
        self.change_lock(true, Some(kind), Ok((0, LAST)), false)
    }

    /// Gives the lock of [`File::lock`] back.
    ///
    /// # Errors
    /// The server's error.
    pub fn unlock(&self) -> Result<()> {
        self.change_lock(true, None, Ok((0, LAST)), false)
    }

    fn change_lock(
        &self,
        flock: bool,
        kind: Option<LockKind>,
        range: io::Result<(u64, u64)>,
        wait: bool,
    ) -> Result<()> {
        let changed = range.and_then(|range| self.lock_or_unlock(flock, kind, range, wait));
        changed.doing("locking", &self.0.name)
    }

    fn lock_or_unlock(
        &self,
        flock: bool,
        kind: Option<LockKind>,
        (start, end): (u64, u64),
        wait: bool,
    ) -> io::Result<()> {
        let f = &*self.0;
        let allowed = match kind {
            Some(LockKind::Shared) if !flock => f.readable,
            Some(LockKind::Exclusive) if !flock => f.writable,
            _ => true,
        };
        if !allowed {
            return Err(Errno::BADF);
        }
        if kind.is_none() {
            // The next owner is to find the data that was written under the lock.
            self.flush()?;
        }
        if kind.is_some() {
            f.locked[usize::from(flock)].store(true, Ordering::Release);
        }
        let request = f.lock_request(flock, kind, start, end);
        let (node, fh) = (f.handle.node, f.handle.fh);
        self.retried(|| f.cache.server.lock(node, fh, &request, wait))
    }
}

impl FileInner {
    fn lock_request(
        &self,
        flock: bool,
        kind: Option<LockKind>,
        start: u64,
        end: u64,
    ) -> LockRequest {
        LockRequest {
            owner: self.owner,
            flock,
            kind,
            start,
            end,
        }
    }

    /// Gives all locks back: the file is closed.
    pub(super) fn unlock_all(&self) {
        for (flock, locked) in [false, true].into_iter().zip(&self.locked) {
            if locked.load(Ordering::Acquire) {
                // Writeback may keep the handle, with which they would go, for a while.
                let _ = self.inode.write_and_wait(0, u64::MAX);
                let all = self.lock_request(flock, None, 0, LAST);
                let (node, fh) = (self.handle.node, self.handle.fh);
                let _ = self.cache.server.lock(node, fh, &all, false);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lock on a range covers exactly its bytes.
    #[test]
    fn ranges_have_a_first_and_a_last_byte() {
        assert_eq!(bounds(..).unwrap(), (0, LAST));
        assert_eq!(bounds(3..10).unwrap(), (3, 9));
        assert_eq!(bounds(3..=10).unwrap(), (3, 10));
        assert_eq!(bounds(3..u64::MAX).unwrap(), (3, LAST));
        let nothing = 5..5;
        for bad in [nothing, 0..0, u64::MAX..u64::MAX] {
            assert!(bounds(bad).is_err());
        }
    }
}
