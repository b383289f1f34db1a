//! Truncations, and the sizes that the server gives the kernel, take turns for each node.
//!
//! The server tells the kernel of a file that has grown by storing a byte at its end, which only ever raises the size
//! that the kernel has (`host.rs`). A size that was read before a truncation must not arrive after it: fstat(2) would
//! give the old size once more. Once the answer to the truncation is on its way, the size that is read is the new one.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use uvfs_io::ops;
use uvfs_sys::lock;

/// How often a truncation looks whether the kernel has been told of a size, and how many times: the kernel may wait
/// for a page that a request to a host which hangs has locked.
const LOOK: Duration = Duration::from_micros(200);
const LOOKS: usize = 500;

#[derive(Debug, Default)]
struct Turn {
    truncations: usize,
    growths: usize,
    /// A growth was left out during a truncation.
    left_out: bool,
}

impl Turn {
    fn is_over(&self) -> bool {
        self.truncations == 0 && self.growths == 0
    }
}

/// The nodes that are being truncated, or of whose size the kernel is being told.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<HashMap<u64, Turn>>);

/// The kernel is being told of a node's size.
pub(super) struct Growth<'a>(&'a Turns, u64);

/// A node is being truncated.
pub(super) struct Truncation<'a>(&'a Turns, u64);

impl Turns {
    fn end(&self, node: u64, change: impl FnOnce(&mut Turn)) -> bool {
        let mut turns = lock(&self.0);
        let Some(turn) = turns.get_mut(&node) else {
            return false;
        };
        change(turn);
        let left_out = turn.truncations == 0 && std::mem::take(&mut turn.left_out);
        if turn.is_over() {
            turns.remove(&node);
        }
        left_out
    }

    /// Begins to tell the kernel of a node's size; not while it is truncated. Then [`Truncation::end`] says that it is
    /// to be done again.
    pub(super) fn grow(&self, node: u64) -> Option<Growth<'_>> {
        let mut turns = lock(&self.0);
        let turn = turns.entry(node).or_default();
        if turn.truncations > 0 {
            turn.left_out = true;
            return None;
        }
        turn.growths += 1;
        Some(Growth(self, node))
    }

    /// Begins a truncation, once the kernel has been told of the sizes that were read before.
    pub(super) async fn truncate(&self, node: u64) -> Truncation<'_> {
        lock(&self.0).entry(node).or_default().truncations += 1;
        let truncation = Truncation(self, node);
        for _ in 0..LOOKS {
            if lock(&self.0)
                .get(&node)
                .is_none_or(|turn| turn.growths == 0)
            {
                break;
            }
            ops::sleep(LOOK).await;
        }
        truncation
    }
}

impl Truncation<'_> {
    /// Ends it. Whether the kernel is to be told of the size again.
    pub(super) fn end(self) -> bool {
        let left_out = self.0.end(self.1, |turn| turn.truncations -= 1);
        std::mem::forget(self);
        left_out
    }
}

impl Drop for Truncation<'_> {
    fn drop(&mut self) {
        self.0.end(self.1, |turn| turn.truncations -= 1);
    }
}

impl Drop for Growth<'_> {
    fn drop(&mut self) {
        self.0.end(self.1, |turn| turn.growths -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uvfs_io::runtime::Runtime;
    use uvfs_queue::wait::WaitConfig;

    /// A truncation waits for a growth; a growth during a truncation is left out, and done again.
    #[test]
    fn growths_and_truncations_take_turns() {
        let turns = Turns::default();
        let runtime = Runtime::new(WaitConfig::default()).unwrap();
        let ran = runtime.block_on(async move {
            let growth = turns.grow(1).expect("nothing truncates it");
            let waits = ops::within(Duration::from_millis(5), turns.truncate(1)).await;
            assert!(waits.is_none());
            drop(growth);
            let first = turns.truncate(1).await;
            let second = turns.truncate(1).await;
            assert!(turns.grow(1).is_none() && turns.grow(2).is_some());
            assert!(!first.end(), "another is under way");
            assert!(second.end() && lock(&turns.0).is_empty());
            assert!(!turns.truncate(1).await.end());
        });
        ran.unwrap();
    }
}
