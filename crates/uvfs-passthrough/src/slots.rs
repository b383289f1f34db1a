//! Numbers of nodes and open files: O(1) to look up, and never valid again once the object is gone.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use uvfs_sys::lock;

use uvfs_server::fs::Handle;

/// How many locks the numbers are spread over.
pub(crate) const SHARDS: usize = 64;
const SHARD_BITS: u32 = SHARDS.trailing_zeros();
/// Bits 0 to 5: shard; 6 to 31: slot; 32 to 63: generation, never 0.
const MAX_SLOTS: usize = 1 << (32 - SHARD_BITS);

/// As many slots of a shard may be restored: the book of a mount that outlives its server has half as many places for each
/// shard. What is restored comes from another program's memory, and a number takes memory for all slots below.
const MOST_RESTORED: usize = 1 << 20;

/// The shard that a number belongs to.
pub(crate) fn shard_of(number: u64) -> usize {
    number as usize % SHARDS
}

struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// The slots of one shard.
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    /// The generation that a slot begins with.
    first: u32,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            first: 1,
        }
    }
}

impl<T> Slab<T> {
    /// Puts the value that `make` makes of its own number into a free slot; `None` when all slots are taken.
    pub(crate) fn insert(&mut self, shard: usize, make: impl FnOnce(u64) -> T) -> Option<u64> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < MAX_SLOTS => {
                self.slots.push(Slot {
                    generation: self.first,
                    value: None,
                });
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.value.is_none());
        let number =
            u64::from(slot.generation) << 32 | u64::from(index) << SHARD_BITS | shard as u64;
        slot.value = Some(make(number));
        Some(number)
    }

    /// Puts a value under the number that it had in an earlier process; false where another has the slot.
    pub(crate) fn restore(&mut self, number: u64, value: T) -> bool {
        let index = number as u32 as usize >> SHARD_BITS;
        if index >= MOST_RESTORED {
            return false;
        }
        while self.slots.len() <= index {
            self.slots.push(Slot {
                generation: 0,
                value: None,
            });
        }
        let slot = &mut self.slots[index];
        if slot.value.is_some() || number >> 32 == 0 {
            return false;
        }
        slot.generation = (number >> 32) as u32;
        slot.value = Some(value);
        true
    }

    /// To be called when all are restored. The free slots begin with any generation from now on, so that numbers which
    /// the earlier process has given are not given again.
    pub(crate) fn restored(&mut self) {
        self.first = (RandomState::new().hash_one(0) as u32).max(1);
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if slot.value.is_none() {
                slot.generation = self.first;
                self.free.push(index as u32);
            }
        }
    }

    fn slot(&mut self, number: u64) -> Option<&mut Slot<T>> {
        let slot = self.slots.get_mut(number as u32 as usize >> SHARD_BITS)?;
        (u64::from(slot.generation) == number >> 32).then_some(slot)
    }

    pub(crate) fn get(&mut self, number: u64) -> Option<&mut T> {
        self.slot(number)?.value.as_mut()
    }

    pub(crate) fn remove(&mut self, number: u64) -> Option<T> {
        let slot = self.slot(number)?;
        let value = slot.value.take()?;
        slot.generation = slot.generation.checked_add(1).unwrap_or(1);
        self.free.push(number as u32 >> SHARD_BITS);
        Some(value)
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

/// Open files or directories by their handles.
pub(crate) struct Table<T> {
    shards: [Mutex<Slab<Arc<T>>>; SHARDS],
    next: AtomicU32,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            next: AtomicU32::new(0),
        }
    }
}

impl<T> Table<T> {
    pub(crate) fn insert(&self, value: Arc<T>) -> Option<Handle> {
        let shard = self.next.fetch_add(1, Ordering::Relaxed) as usize % SHARDS;
        let number = lock(&self.shards[shard]).insert(shard, |_| value);
        number.map(Handle)
    }

    /// As [`Slab::restore`].
    pub(crate) fn restore(&self, fh: Handle, value: Arc<T>) -> bool {
        lock(&self.shards[shard_of(fh.0)]).restore(fh.0, value)
    }

    /// As [`Slab::restored`].
    pub(crate) fn restored(&self) {
        for shard in &self.shards {
            lock(shard).restored();
        }
    }

    pub(crate) fn get(&self, fh: Handle) -> Option<Arc<T>> {
        lock(&self.shards[shard_of(fh.0)]).get(fh.0).cloned()
    }

    pub(crate) fn remove(&self, fh: Handle) -> Option<Arc<T>> {
        lock(&self.shards[shard_of(fh.0)]).remove(fh.0)
    }

    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let old = std::mem::take(&mut *lock(shard));
            drop(old);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stale handle reaches no other open file.
    #[test]
    fn a_number_dies_with_its_thing() {
        let table = Table::default();
        let numbers: Vec<Handle> = (0..200)
            .map(|n| table.insert(Arc::new(n)).unwrap())
            .collect();
        for (n, &number) in numbers.iter().enumerate() {
            assert!(number.0 > u64::from(u32::MAX));
            assert_eq!(*table.get(number).unwrap(), n);
        }
        assert_eq!(*table.remove(numbers[7]).unwrap(), 7);
        assert!(table.get(numbers[7]).is_none() && table.remove(numbers[7]).is_none());
        // The slot is used again, under another number.
        let more: Vec<Handle> = (0..SHARDS)
            .map(|n| table.insert(Arc::new(n)).unwrap())
            .collect();
        assert!(more.iter().any(|n| n.0 as u32 == numbers[7].0 as u32));
        assert!(table.get(numbers[7]).is_none());
        for number in [0, 1, u64::MAX] {
            assert!(table.get(Handle(number)).is_none());
        }
    }

    /// What is restored has its old number, and no new one has a number that was given before.
    #[test]
    fn a_restored_thing_has_its_old_number() {
        let old = Table::default();
        let numbers: Vec<Handle> = (0..200).map(|n| old.insert(Arc::new(n)).unwrap()).collect();
        let table = Table::default();
        for &n in &[150, 7, 99] {
            assert!(table.restore(numbers[n], Arc::new(n)));
            assert!(!table.restore(numbers[n], Arc::new(n)));
        }
        assert!(!table.restore(Handle(3), Arc::new(3)));
        table.restored();
        let new: Vec<Handle> = (0..400)
            .map(|n| table.insert(Arc::new(1000 + n)).unwrap())
            .collect();
        assert!(new.iter().all(|number| !numbers.contains(number)));
        assert_eq!(*table.get(numbers[99]).unwrap(), 99);
        assert_eq!(*table.remove(numbers[7]).unwrap(), 7);
    }
}
