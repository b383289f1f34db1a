//! Memory for the data of writes, used again and again: a new megabyte for each write would cost as much as the
//! write.

use std::sync::{Mutex, MutexGuard};

/// How many buffers wait for their next use. More writes at a time allocate.
const KEPT: usize = 8;

/// Buffers that no write uses.
#[derive(Default)]
pub(crate) struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    fn lock(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        uvfs_sys::lock(&self.0)
    }

    /// A buffer of at least this length, with any contents.
    pub(crate) fn take(&self, len: usize) -> Vec<u8> {
        let mut buffer = self.lock().pop().unwrap_or_default();
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        buffer
    }

    /// Keeps a buffer for the next write.
    pub(crate) fn give_back(&self, buffer: Vec<u8>) {
        let mut kept = self.lock();
        if kept.len() < KEPT {
            kept.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A buffer is used again, and at most `KEPT` idle ones are kept.
    #[test]
    fn a_buffer_is_used_again_for_more_and_for_less() {
        let buffers = Buffers::default();
        for len in [4096, 1 << 20, 100] {
            let buffer = buffers.take(len);
            assert!(buffer.len() >= len);
            assert!(buffers.lock().is_empty(), "the one that is there is used");
            buffers.give_back(buffer);
        }
        assert_eq!(buffers.lock().len(), 1);
        for _ in 0..2 * KEPT {
            buffers.give_back(Vec::new());
        }
        assert_eq!(buffers.lock().len(), KEPT);
    }
}
