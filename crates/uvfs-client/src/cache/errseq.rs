//! Errors of writeback that every open file reports once.

use std::sync::atomic::{AtomicU64, Ordering};

/// An error that every open file is to hear of once, as the kernel's errseq: a count of errors,
/// whether a file has heard of the last one, and its errno.
#[derive(Debug, Default)]
pub(crate) struct ErrSeq(AtomicU64);

const SEEN: u64 = 1 << 16;

impl ErrSeq {
    pub(super) fn set(&self, errno: i32) {
        let _ = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
                let count = old >> 17;
                Some((count + 1) << 17 | u64::try_from(errno).unwrap_or(0) & (SEEN - 1))
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
    pub(super) fn after(&self, count: u64) -> Option<i32> {
        let now = self.0.load(Ordering::Acquire);
        (now & !SEEN != count).then_some((now & (SEEN - 1)) as i32)
    }

    /// The error since `since`, if there is one; moves `since` on.
    pub(crate) fn check(&self, since: &AtomicU64) -> Option<i32> {
        let now = self.0.load(Ordering::Acquire);
        if now & !SEEN == since.load(Ordering::Acquire) {
            return None;
        }
        // Of two threads with the same file, one hears of it.
        let old = since.swap(now & !SEEN, Ordering::AcqRel);
        self.0.fetch_or(SEEN, Ordering::AcqRel);
        (old != now & !SEEN).then_some((now & (SEEN - 1)) as i32)
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
        errors.set(28);
        assert_eq!(errors.check(&a), Some(28));
        assert_eq!(errors.check(&a), None);
        // Opened after a file heard: not told.
        let c = AtomicU64::new(errors.sample());
        assert_eq!(errors.check(&c), None);
        assert_eq!(errors.check(&b), Some(28));
        errors.set(5);
        // Opened before any file heard: told.
        let d = AtomicU64::new(errors.sample());
        assert_eq!(errors.check(&d), Some(5));
        assert_eq!(errors.check(&c), Some(5));
        assert_eq!(errors.check(&d), None);
    }
}
