//! Errors of writeback that every open file reports once.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

/// An error that every open file is to hear of once, as the kernel's errseq: a count of errors,
/// whether a file has heard of the last one, and its errno.
#[derive(Debug, Default)]
pub(crate) struct ErrSeq(AtomicU64);

const SEEN: u64 = 1 << 16;

/// The errno of an error that was set.
fn errno(word: u64) -> Errno {
    Errno::from_raw_os_error((word & (SEEN - 1)) as i32)
}

impl ErrSeq {
    pub(super) fn set(&self, errno: Errno) {
        let _ = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
                let count = old >> 17;
                Some((count + 1) << 17 | errno.raw_os_error() as u64 & (SEEN - 1))
            });
    }

    /// Where a file that is opened now begins: an error that no file has heard of is news to it.
    pub(crate) fn sample(&self) -> u64 {
        let now = self.0.load(Ordering::Acquire);
        if now != 0 && now & SEEN == 0 {
            0
        } else {
            now & !SEEN
        }
    }

    /// The count of errors until now.
    pub(super) fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire) & !SEEN
    }

    /// The last error, if there was one after `count`. No file counts as having heard of it.
    pub(super) fn after(&self, count: u64) -> Option<Errno> {
        let now = self.0.load(Ordering::Acquire);
        (now & !SEEN != count).then(|| errno(now))
    }

    /// The error since `since`, if there is one; moves `since` on.
    pub(crate) fn check(&self, since: &AtomicU64) -> Option<Errno> {
        let now = self.0.load(Ordering::Acquire);
        if now & !SEEN == since.load(Ordering::Acquire) {
            return None;
        }
        // Of two threads with the same file, one hears of it.
        let old = since.swap(now & !SEEN, Ordering::AcqRel);
        self.0.fetch_or(SEEN, Ordering::AcqRel);
        (old != now & !SEEN).then(|| errno(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every fsync(2) reports an error of writeback once.
    #[test]
    fn an_error_is_heard_once_by_everybody() {
        let errors = ErrSeq::default();
        let (a, b) = (
            AtomicU64::new(errors.sample()),
            AtomicU64::new(errors.sample()),
        );
        assert_eq!(errors.check(&a), None);
        errors.set(Errno::NOSPC);
        assert_eq!(errors.check(&a), Some(Errno::NOSPC));
        assert_eq!(errors.check(&a), None);
        // Opened after a file heard: not told.
        let c = AtomicU64::new(errors.sample());
        assert_eq!(errors.check(&c), None);
        assert_eq!(errors.check(&b), Some(Errno::NOSPC));
        errors.set(Errno::IO);
        // Opened before any file heard: told.
        let d = AtomicU64::new(errors.sample());
        assert_eq!(errors.check(&d), Some(Errno::IO));
        assert_eq!(errors.check(&c), Some(Errno::IO));
        assert_eq!(errors.check(&d), None);
    }
}
