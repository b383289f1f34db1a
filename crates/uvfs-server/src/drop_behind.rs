//! Drops the kernel's own pages of a mount behind its reads and writes ([`SessionOptions::uncached`]).
//!
//! Pages that were read or written last stay for a while, as the caller may not have come to pages that were
//! read ahead for it; beyond [`KEEP`] the oldest goes, and after [`IDLE`] without traffic all of it.
//! A thread of its own sends the notifications: they wait for pages that are locked by requests
//! under way, which the queues' threads answer meanwhile.
//!
//! [`SessionOptions::uncached`]: crate::SessionOptions

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::io::Errno;

use crate::fs::Node;
use crate::notify::Notifier;

/// Bytes that stay: enough for the readahead of some readers at a time.
const KEEP: u64 = 32 << 20;
/// Everything goes when there was no traffic for this long.
const IDLE: Duration = Duration::from_secs(1);
/// Ranges that are remembered; more are not dropped (they are many small ones).
const MAX_RANGES: usize = 16384;
/// A range grows up to this by what follows it.
const MAX_RANGE: u64 = 2 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    node: u64,
    offset: u64,
    len: u64,
}

#[derive(Debug, Default)]
struct Ranges {
    ranges: VecDeque<Range>,
    /// The sum of their lengths.
    bytes: u64,
    /// Something was added since the thread last looked.
    busy: bool,
    stop: bool,
}

impl Ranges {
    fn add(&mut self, range: Range) {
        self.busy = true;
        let follows = |last: &&mut Range| {
            last.node == range.node
                && last.offset.checked_add(last.len) == Some(range.offset)
                && last.len + range.len <= MAX_RANGE
        };
        if let Some(last) = self.ranges.back_mut().filter(follows) {
            last.len += range.len;
        } else if self.ranges.len() < MAX_RANGES {
            self.ranges.push_back(range);
        } else {
            return;
        }
        self.bytes += range.len;
    }

    /// Takes the oldest until at most `keep` bytes are left.
    fn take(&mut self, keep: u64) -> Vec<Range> {
        let mut taken = Vec::new();
        while self.bytes > keep {
            let Some(range) = self.ranges.pop_front() else {
                break;
            };
            self.bytes -= range.len;
            taken.push(range);
        }
        taken
    }
}

/// Ranges that were read or written and may still be in the kernel's cache.
#[derive(Debug, Default)]
pub(crate) struct Recent {
    queue: Mutex<Ranges>,
    changed: Condvar,
}

impl Recent {
    fn lock(&self) -> MutexGuard<'_, Ranges> {
        uvfs_sys::lock(&self.queue)
    }

    /// A request of so many bytes was served. Never waits for the kernel.
    pub(crate) fn add(&self, node: u64, offset: u64, len: usize) {
        if len == 0 {
            return;
        }
        let mut queue = self.lock();
        let slept = !queue.busy;
        queue.add(Range {
            node,
            offset,
            len: len as u64,
        });
        let wake = slept || queue.bytes > KEEP;
        drop(queue);
        if wake {
            self.changed.notify_one();
        }
    }

    /// Waits for what is to be dropped now; nothing when it is over.
    fn next(&self) -> Option<Vec<Range>> {
        let mut queue = self.lock();
        loop {
            if queue.stop {
                return None;
            }
            if queue.bytes > KEEP {
                return Some(queue.take(KEEP));
            }
            if queue.ranges.is_empty() {
                queue = uvfs_sys::wait(&self.changed, queue);
                continue;
            }
            queue.busy = false;
            let waits = |queue: &mut Ranges| !queue.busy && !queue.stop;
            let timeout;
            (queue, timeout) = uvfs_sys::wait_while(&self.changed, queue, IDLE, waits);
            if timeout.timed_out() {
                return Some(queue.take(0));
            }
        }
    }
}

/// The thread that drops; ends when dropped itself.
pub(crate) struct DropBehind {
    recent: Arc<Recent>,
    thread: Option<JoinHandle<()>>,
}

impl DropBehind {
    /// Starts it.
    pub(crate) fn start(recent: Arc<Recent>, notifier: Notifier) -> io::Result<Self> {
        let mine = recent.clone();
        let thread = std::thread::Builder::new()
            .name("uvfs-behind".into())
            .spawn(move || {
                while let Some(ranges) = mine.next() {
                    for range in ranges {
                        let (offset, len) = (range.offset as i64, range.len as i64);
                        match notifier.invalidate_inode(Node(range.node), offset, len) {
                            Ok(()) => {}
                            Err(error) if error.raw_os_error() == gone() => return,
                            Err(error) => {
                                tracing::debug!(%error, node = range.node, "pages stay cached");
                            }
                        }
                    }
                }
            })?;
        Ok(Self {
            recent,
            thread: Some(thread),
        })
    }
}

/// The error of a notification once the mount has ended.
fn gone() -> Option<i32> {
    Some(Errno::NODEV.raw_os_error())
}

impl Drop for DropBehind {
    fn drop(&mut self) {
        self.recent.lock().stop = true;
        self.recent.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Ranges are dropped oldest first, and neighbours as one range.
    #[test]
    fn the_oldest_goes_first_and_neighbours_are_one() {
        let mut queue = Ranges::default();
        let range = |node, offset, len| Range { node, offset, len };
        for (node, offset) in [(1, 0), (1, MIB), (1, 2 * MIB), (2, 3 * MIB)] {
            queue.add(range(node, offset, MIB));
        }
        assert_eq!(queue.bytes, 4 * MIB);
        assert_eq!(queue.take(2 * MIB), [range(1, 0, 2 * MIB)]);
        assert_eq!(
            queue.take(0),
            [range(1, 2 * MIB, MIB), range(2, 3 * MIB, MIB)]
        );
        assert!(queue.take(0).is_empty() && queue.bytes == 0);
        queue.add(range(1, u64::MAX, 1));
        queue.add(range(1, 0, 1));
        assert_eq!(queue.ranges.len(), 2);
    }

    /// At most `MAX_RANGES` ranges are remembered.
    #[test]
    fn what_is_remembered_is_bounded() {
        let mut queue = Ranges::default();
        for i in 0..2 * MAX_RANGES as u64 {
            queue.add(Range {
                node: i,
                offset: 0,
                len: 1,
            });
        }
        assert_eq!(queue.ranges.len(), MAX_RANGES);
        assert_eq!(queue.bytes, MAX_RANGES as u64);
    }
}
