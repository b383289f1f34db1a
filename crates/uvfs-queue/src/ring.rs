//! A bounded ring of slot numbers between two processes that do not trust each other, and the
//! handshake by which one side sleeps and the other wakes it.
//!
//! A cell holds `(sequence << 32) | value`. The producers' tail and the consumer's head live in
//! private memory; only the cells are shared, so a hostile peer can at worst put a wrong value
//! into a cell (which the consumer checks) or leave it empty (which stops its own session).

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Where a ring's cells live. `len` is a power of two and never changes.
pub trait Cells {
    /// The number of cells, a power of two.
    fn len(&self) -> usize;
    /// Cell `index`, which is below [`Cells::len`].
    fn cell(&self, index: usize) -> &AtomicU64;
    /// Whether there are no cells at all (never true of a usable ring).
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The end that puts values in. Several threads may push at the same time.
#[derive(Debug)]
pub struct Producer<C> {
    cells: C,
    tail: AtomicU32,
}

impl<C: Cells> Producer<C> {
    /// A producer at the start of zeroed `cells`.
    pub fn new(cells: C) -> Self {
        assert!(
            cells.len().is_power_of_two(),
            "a ring has a power of two of cells"
        );
        Self {
            cells,
            tail: AtomicU32::new(0),
        }
    }

    /// Appends `value`.
    ///
    /// The caller guarantees room: it never has more values between the two ends than there are
    /// cells (a queue pair has as many cells as it has slots, and a slot is in a ring once).
    pub fn push(&self, value: u32) {
        let at = self.tail.fetch_add(1, Ordering::Relaxed);
        let cell = self.cells.cell(at as usize & (self.cells.len() - 1));
        cell.store(
            u64::from(at.wrapping_add(1)) << 32 | u64::from(value),
            Ordering::Release,
        );
    }

    /// How many values were pushed so far, modulo 2^32.
    pub fn pushed(&self) -> u32 {
        self.tail.load(Ordering::Relaxed)
    }
}

/// The end that takes values out. One thread at a time may pop.
#[derive(Debug)]
pub struct Consumer<C> {
    cells: C,
    head: AtomicU32,
}

impl<C: Cells> Consumer<C> {
    /// A consumer at the start of zeroed `cells`.
    pub fn new(cells: C) -> Self {
        assert!(
            cells.len().is_power_of_two(),
            "a ring has a power of two of cells"
        );
        Self {
            cells,
            head: AtomicU32::new(0),
        }
    }

    /// Takes the next value, if its producer has published it.
    ///
    /// The value comes from the other side: check it before use. Callers serialise `pop` among
    /// themselves; two at once may see the same value.
    pub fn pop(&self) -> Option<u32> {
        let at = self.head.load(Ordering::Relaxed);
        let value = self.peek_at(at)?;
        self.head.store(at.wrapping_add(1), Ordering::Relaxed);
        Some(value)
    }

    /// Whether a value is there to be taken.
    pub fn ready(&self) -> bool {
        self.peek_at(self.head.load(Ordering::Relaxed)).is_some()
    }

    /// How many values were popped so far, modulo 2^32.
    pub fn popped(&self) -> u32 {
        self.head.load(Ordering::Relaxed)
    }

    fn peek_at(&self, at: u32) -> Option<u32> {
        let cell = self
            .cells
            .cell(at as usize & (self.cells.len() - 1))
            .load(Ordering::Acquire);
        ((cell >> 32) as u32 == at.wrapping_add(1)).then_some(cell as u32)
    }
}

/// The word through which a consumer says that it sleeps.
///
/// Consumer: [`Bell::going_to_sleep`], look at the ring once more, sleep on the word while it is
/// [`Bell::ASLEEP`], [`Bell::awake`]. Producer: push, then wake the word if [`Bell::must_wake`].
/// Every change of the word is a read-modify-write, so the changes have one order and each sees
/// what came before those ahead of it: a producer either finds the sleeper, or its push is seen
/// by the consumer's last look.
#[derive(Debug, Clone, Copy)]
pub struct Bell<'a>(pub &'a AtomicU32);

impl Bell<'_> {
    /// The consumer does not sleep on the word.
    pub const AWAKE: u32 = 0;
    /// The consumer sleeps, or is about to.
    pub const ASLEEP: u32 = 1;

    /// Announces that the caller will sleep. It must look for work once more after this.
    pub fn going_to_sleep(self) {
        self.0.swap(Self::ASLEEP, Ordering::AcqRel);
    }

    /// Takes the announcement back, after sleeping or instead of it.
    pub fn awake(self) {
        self.0.swap(Self::AWAKE, Ordering::AcqRel);
    }

    /// Whether the caller, who has just pushed, has to wake the other side.
    pub fn must_wake(self) -> bool {
        self.0.swap(Self::AWAKE, Ordering::AcqRel) == Self::ASLEEP
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[derive(Clone)]
    struct Heap(Arc<Vec<AtomicU64>>);

    impl Heap {
        fn new(n: usize) -> Self {
            Self(Arc::new((0..n).map(|_| AtomicU64::new(0)).collect()))
        }
    }

    impl Cells for Heap {
        fn len(&self) -> usize {
            self.0.len()
        }
        fn cell(&self, index: usize) -> &AtomicU64 {
            &self.0[index]
        }
    }

    /// Values come out once and in order, also when the ring has gone around.
    #[test]
    fn values_come_out_in_order_over_many_laps() {
        let cells = Heap::new(4);
        let (tx, rx) = (Producer::new(cells.clone()), Consumer::new(cells));
        for lap in 0..100 {
            assert_eq!(rx.pop(), None);
            for i in 0..4 {
                tx.push(lap * 4 + i);
            }
            for i in 0..4 {
                assert!(rx.ready());
                assert_eq!(rx.pop(), Some(lap * 4 + i));
            }
        }
        assert_eq!(tx.pushed(), rx.popped());
    }

    /// The ring goes on when its sequence numbers wrap.
    #[test]
    fn the_sequence_number_wraps() {
        let cells = Heap::new(2);
        let (tx, rx) = (Producer::new(cells.clone()), Consumer::new(cells));
        tx.tail.store(u32::MAX - 2, Ordering::Relaxed);
        rx.head.store(u32::MAX - 2, Ordering::Relaxed);
        for i in 0..10 {
            assert_eq!(rx.pop(), None);
            tx.push(i);
            assert_eq!(rx.pop(), Some(i));
        }
    }

    /// A cell without the expected sequence number is not a value.
    #[test]
    fn a_stale_or_foreign_cell_is_not_a_value() {
        let cells = Heap::new(2);
        let rx = Consumer::new(cells.clone());
        cells.0[0].store(77 << 32 | 5, Ordering::Relaxed);
        assert_eq!(rx.pop(), None);
    }
}
