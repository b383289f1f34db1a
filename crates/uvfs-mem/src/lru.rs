//! A list of cache entries in order of age.

use std::sync::atomic::{AtomicU8, Ordering};

const NONE: u32 = u32::MAX;

/// Where an entry is in its list; given by [`Lru::push`], dead once the entry left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LruKey(u32);

/// The decision of a scan about one entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It leaves the list (its owner drops it).
    Remove,
    /// It was used, or cannot go now: to the young end.
    Rotate,
    /// It leaves the list, and the scan ends.
    RemoveAndStop,
}

struct Node<T> {
    value: Option<T>,
    older: u32,
    younger: u32,
}

/// A doubly linked list in a slab: pushing, removing and rotating take constant time and, once
/// the slab has grown, no allocation. Not locked: its owner does that.
pub struct Lru<T> {
    nodes: Vec<Node<T>>,
    vacant: u32,
    oldest: u32,
    youngest: u32,
    len: usize,
}

impl<T> Default for Lru<T> {
    fn default() -> Self {
        Lru {
            nodes: Vec::new(),
            vacant: NONE,
            oldest: NONE,
            youngest: NONE,
            len: 0,
        }
    }
}

impl<T> Lru<T> {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many entries are in the list.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the list holds none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn unlink(&mut self, index: u32) {
        let (older, younger) = {
            let node = &self.nodes[index as usize];
            (node.older, node.younger)
        };
        match older {
            NONE => self.oldest = younger,
            o => self.nodes[o as usize].younger = younger,
        }
        match younger {
            NONE => self.youngest = older,
            y => self.nodes[y as usize].older = older,
        }
    }

    fn link_youngest(&mut self, index: u32) {
        let youngest = self.youngest;
        let node = &mut self.nodes[index as usize];
        node.older = youngest;
        node.younger = NONE;
        match youngest {
            NONE => self.oldest = index,
            y => self.nodes[y as usize].younger = index,
        }
        self.youngest = index;
    }

    /// Adds an entry at the young end.
    pub fn push(&mut self, value: T) -> LruKey {
        let node = Node {
            value: Some(value),
            older: NONE,
            younger: NONE,
        };
        let index = if self.vacant == NONE {
            assert!(self.nodes.len() < NONE as usize, "list too long");
            self.nodes.push(node);
            self.nodes.len() as u32 - 1
        } else {
            let index = self.vacant;
            self.vacant = self.nodes[index as usize].younger;
            self.nodes[index as usize] = node;
            index
        };
        self.link_youngest(index);
        self.len += 1;
        LruKey(index)
    }

    /// Takes an entry out. `None` for a key that is not (or no longer) in the list.
    pub fn remove(&mut self, key: LruKey) -> Option<T> {
        let value = self.nodes.get_mut(key.0 as usize)?.value.take()?;
        self.unlink(key.0);
        self.nodes[key.0 as usize].younger = self.vacant;
        self.vacant = key.0;
        self.len -= 1;
        Some(value)
    }

    /// Moves an entry to the young end.
    pub fn touch(&mut self, key: LruKey) {
        if self.nodes[key.0 as usize].value.is_some() {
            self.unlink(key.0);
            self.link_youngest(key.0);
        }
    }

    /// Shows up to `max` entries, oldest first, to `judge`, and hands those removed to `removed`.
    /// Returns how many were looked at.
    pub fn scan(
        &mut self,
        max: usize,
        mut judge: impl FnMut(&T) -> Verdict,
        mut removed: impl FnMut(T),
    ) -> usize {
        let mut looked = 0;
        while looked < max && self.oldest != NONE {
            looked += 1;
            let key = LruKey(self.oldest);
            let value = self.nodes[key.0 as usize].value.as_ref();
            match judge(value.expect("a linked node has a value")) {
                Verdict::Rotate => self.touch(key),
                verdict => {
                    removed(self.remove(key).expect("a linked node has a value"));
                    if verdict == Verdict::RemoveAndStop {
                        break;
                    }
                }
            }
        }
        looked
    }
}

/// How many more looks of reclaim an entry survives. Set on every use, without a lock; one look
/// takes one away, and an entry at zero may go.
#[derive(Debug, Default)]
pub struct RefCount(AtomicU8);

impl RefCount {
    /// A counter at `n`.
    pub const fn new(n: u8) -> Self {
        RefCount(AtomicU8::new(n))
    }

    /// The entry was used: at least `n` from now.
    pub fn used(&self, n: u8) {
        // Mostly unchanged, and then the cache line stays shared.
        if self.0.load(Ordering::Relaxed) < n {
            self.0.fetch_max(n, Ordering::Relaxed);
        }
    }

    /// A look of reclaim: true if the entry may go, otherwise its count is one less.
    pub fn age(&self) -> bool {
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
            .is_err()
    }

    /// The entry may go at the next look.
    pub fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(lru: &mut Lru<u32>) -> Vec<u32> {
        let mut seen = Vec::new();
        let len = lru.len();
        lru.scan(
            len,
            |&v| {
                seen.push(v);
                Verdict::Rotate
            },
            |_| (),
        );
        seen
    }

    /// The order is by last use, and a key leads to its own entry until that is removed.
    #[test]
    fn oldest_first_and_keys_stay_valid() {
        let mut lru = Lru::new();
        let keys: Vec<_> = (0..5).map(|v| lru.push(v)).collect();
        lru.touch(keys[0]);
        assert_eq!(lru.remove(keys[2]), Some(2));
        assert_eq!(lru.remove(keys[2]), None);
        assert_eq!(order(&mut lru), [1, 3, 4, 0]);
        let again = lru.push(9);
        assert_eq!(again, keys[2], "the slot is used again");
        assert_eq!(order(&mut lru), [1, 3, 4, 0, 9]);
    }

    /// A scan removes the entries that it is told to, and rotates the others.
    #[test]
    fn a_scan_removes_what_it_is_told() {
        let mut lru = Lru::new();
        for v in 0..10 {
            lru.push(v);
        }
        let mut gone = Vec::new();
        let looked = lru.scan(
            100,
            |&v| match v {
                7 => Verdict::RemoveAndStop,
                v if v % 2 == 0 => Verdict::Remove,
                _ => Verdict::Rotate,
            },
            |v| gone.push(v),
        );
        assert_eq!((looked, gone), (8, vec![0, 2, 4, 6, 7]));
        assert_eq!(order(&mut lru), [8, 9, 1, 3, 5]);
    }

    /// A count outlives as many scans as the buffer was used.
    #[test]
    fn reference_counts_age() {
        let count = RefCount::new(0);
        assert!(count.age());
        count.used(2);
        count.used(1);
        assert!(!count.age() && !count.age() && count.age());
    }
}
