//! Guesses whether a file that a thread begins to write will be large.

use std::sync::atomic::{AtomicU32, Ordering};

/// Threads that are remembered at a time.
const SLOTS: usize = 256;
/// A backing file pays for a file of at least so many bytes.
const LARGE: u64 = 64 << 10;
/// The bit of a slot that says that the thread's last file was large. The other bits are the thread's id.
const WAS_LARGE: u32 = 1;

/// The last file that each thread wrote: large or small.
///
/// Programs that write many files write files of one kind: tar and git write small ones, a backup program large
/// ones. Most other programs write one file. Two threads may share a slot, and then forget each other.
pub(crate) struct Writers([AtomicU32; SLOTS]);

impl Default for Writers {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

impl Writers {
    fn slot(&self, thread: u32) -> &AtomicU32 {
        &self.0[thread as usize % SLOTS]
    }

    /// Whether the file that this thread now opens for writing may become large: the thread's first file
    /// may, and others may if the last one did.
    pub(crate) fn begin(&self, thread: u32) -> bool {
        // Until this file is closed, the thread's next ones count as small.
        let last = self.slot(thread).swap(thread << 1, Ordering::Relaxed);
        last >> 1 != thread || last & WAS_LARGE != 0
    }

    /// This thread's file has been closed, after so many bytes were written to it.
    pub(crate) fn end(&self, thread: u32, written: u64) {
        let large = u32::from(written >= LARGE) * WAS_LARGE;
        self.slot(thread)
            .store(thread << 1 | large, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that unpacks many small files pays for one backing file only.
    #[test]
    fn only_the_first_of_many_small_files_counts_as_large() {
        let writers = Writers::default();
        assert!(writers.begin(7));
        assert!(!writers.begin(7), "two at a time");
        for _ in 0..3 {
            writers.end(7, LARGE - 1);
            assert!(!writers.begin(7));
        }
        assert!(writers.begin(8), "another thread");
    }

    /// A program that copies many large files gets a backing file for each of them.
    #[test]
    fn after_a_large_file_the_next_counts_as_large() {
        let writers = Writers::default();
        for _ in 0..3 {
            assert!(writers.begin(7));
            writers.end(7, LARGE);
        }
    }
}
