//! The per-inode index: chunks of 2 MiB, each with its pages and a bit per page and state.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages of a chunk.
pub(super) const CHUNK_PAGES: usize = 512;
const WORDS: usize = CHUNK_PAGES / 64;

/// A bit per page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Bits([u64; WORDS]);

/// The bits `first..=last` of word `word`.
fn mask(word: usize, first: usize, last: usize) -> u64 {
    let (lo, hi) = (word * 64, word * 64 + 63);
    if last < lo || first > hi {
        return 0;
    }
    let from = first.max(lo) - lo;
    let to = last.min(hi) - lo;
    (u64::MAX << from) & (u64::MAX >> (63 - to))
}

impl Bits {
    fn load(words: &[AtomicU64; WORDS]) -> Self {
        Self(std::array::from_fn(|w| words[w].load(Ordering::Relaxed)))
    }

    #[inline]
    pub(super) fn get(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 != 0
    }
    #[inline]
    pub(super) fn set(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }
    #[inline]
    pub(super) fn clear(&mut self, i: usize) {
        self.0[i / 64] &= !(1 << (i % 64));
    }
    pub(super) fn set_range(&mut self, first: usize, last: usize) {
        for w in first / 64..=last / 64 {
            self.0[w] |= mask(w, first, last);
        }
    }
    pub(super) fn clear_range(&mut self, first: usize, last: usize) {
        for w in first / 64..=last / 64 {
            self.0[w] &= !mask(w, first, last);
        }
    }
    pub(super) fn any_in(&self, first: usize, last: usize) -> bool {
        (first / 64..=last / 64).any(|w| self.0[w] & mask(w, first, last) != 0)
    }
    pub(super) fn any(&self) -> bool {
        self.0.iter().any(|&w| w != 0)
    }
    /// The first set bit at or after `i`, up to `last`.
    pub(super) fn next(&self, i: usize, last: usize) -> Option<usize> {
        (i <= last).then(|| {
            (i / 64..=last / 64).find_map(|w| {
                let bits = self.0[w] & mask(w, i, last);
                (bits != 0).then(|| w * 64 + bits.trailing_zeros() as usize)
            })
        })?
    }
    pub(super) fn and(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a &= b);
        self
    }
    pub(super) fn without(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a &= !b);
        self
    }
    pub(super) fn iter(self) -> impl Iterator<Item = usize> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let i = self.next(at, CHUNK_PAGES - 1)?;
            at = i + 1;
            Some(i)
        })
    }
}

/// 512 consecutive pages of a file.
#[derive(Debug)]
pub(super) struct Chunk {
    /// The arena page of each page that is present.
    pub(super) pages: [u32; CHUNK_PAGES],
    /// There is a page.
    pub(super) present: Bits,
    /// Every byte of it is valid; otherwise only those in its descriptor's ranges.
    pub(super) uptodate: Bits,
    /// It has bytes to be written that no request carries.
    pub(super) dirty: Bits,
    /// A request carries bytes of it.
    pub(super) writeback: Bits,
    /// A request fills it; its content must not be changed meanwhile.
    pub(super) reading: Bits,
    /// The data that is being read into it is old already: throw it away when it comes.
    pub(super) stale: Bits,
    /// It goes when its I/O ends, unless another call has used it.
    pub(super) dropbehind: Bits,
    /// It came before a caller asked for it, or as one did, and was not used yet. Cleared by readers, which share the lock.
    unused: [AtomicU64; WORDS],
    /// Reclaim passes it once: it was used again since reclaim last looked, or was not used yet. Set by readers.
    referenced: [AtomicU64; WORDS],
}

impl Chunk {
    fn new() -> Box<Self> {
        Box::new(Self {
            pages: [0; CHUNK_PAGES],
            present: Bits::default(),
            uptodate: Bits::default(),
            dirty: Bits::default(),
            writeback: Bits::default(),
            reading: Bits::default(),
            stale: Bits::default(),
            dropbehind: Bits::default(),
            unused: Default::default(),
            referenced: Default::default(),
        })
    }

    /// A caller uses a page. With its first use it is as good as any other: a stream reads each page once, and then needs the
    /// memory for those ahead.
    #[inline]
    pub(super) fn touch(&self, i: usize) {
        let (word, bit) = (i / 64, 1 << (i % 64));
        let (unused, referenced) = (&self.unused[word], &self.referenced[word]);
        if unused.load(Ordering::Relaxed) & bit != 0 {
            unused.fetch_and(!bit, Ordering::Relaxed);
            referenced.fetch_and(!bit, Ordering::Relaxed);
        } else if referenced.load(Ordering::Relaxed) & bit == 0 {
            referenced.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// A page is there that will be used.
    pub(super) fn expect(&mut self, i: usize) {
        *self.unused[i / 64].get_mut() |= 1 << (i % 64);
        *self.referenced[i / 64].get_mut() |= 1 << (i % 64);
    }

    pub(super) fn referenced(&self) -> Bits {
        Bits::load(&self.referenced)
    }

    pub(super) fn unused(&self) -> Bits {
        Bits::load(&self.unused)
    }

    pub(super) fn unreference(&mut self) {
        self.referenced = Default::default();
    }

    /// Puts a page in.
    pub(super) fn insert(&mut self, i: usize, page: u32) {
        debug_assert!(!self.present.get(i));
        self.pages[i] = page;
        self.present.set(i);
    }

    /// Takes a page out; the caller frees it.
    pub(super) fn remove(&mut self, i: usize) -> u32 {
        debug_assert!(self.present.get(i) && !self.writeback.get(i) && !self.reading.get(i));
        self.present.clear(i);
        self.uptodate.clear(i);
        self.dirty.clear(i);
        self.dropbehind.clear(i);
        *self.unused[i / 64].get_mut() &= !(1 << (i % 64));
        *self.referenced[i / 64].get_mut() &= !(1 << (i % 64));
        self.pages[i]
    }

    /// Pages that can go: no request has them and nothing would be lost.
    pub(super) fn clean(&self) -> Bits {
        self.present
            .without(&self.dirty)
            .without(&self.writeback)
            .without(&self.reading)
    }
}

/// Chunks by number: a plain vector as far as files usually go, a tree beyond.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    low: Vec<Option<Box<Chunk>>>,
    high: BTreeMap<u64, Box<Chunk>>,
}

const LOW: u64 = 1 << 16;

impl Chunks {
    #[inline]
    pub(super) fn get(&self, n: u64) -> Option<&Chunk> {
        if n < LOW {
            self.low.get(n as usize)?.as_deref()
        } else {
            self.high.get(&n).map(|c| &**c)
        }
    }

    #[inline]
    pub(super) fn get_mut(&mut self, n: u64) -> Option<&mut Chunk> {
        if n < LOW {
            self.low.get_mut(n as usize)?.as_deref_mut()
        } else {
            self.high.get_mut(&n).map(|c| &mut **c)
        }
    }

    pub(super) fn get_or_insert(&mut self, n: u64) -> &mut Chunk {
        if n < LOW {
            let n = n as usize;
            if self.low.len() <= n {
                self.low.resize_with(n + 1, || None);
            }
            self.low[n].get_or_insert_with(Chunk::new)
        } else {
            self.high.entry(n).or_insert_with(Chunk::new)
        }
    }

    /// The first chunk at or after `n`.
    pub(super) fn next(&self, n: u64) -> Option<u64> {
        let from = usize::try_from(n.min(LOW)).expect("small");
        let low = self
            .low
            .get(from..)
            .and_then(|tail| tail.iter().position(Option::is_some));
        low.map(|i| (from + i) as u64)
            .or_else(|| self.high.range(n..).next().map(|(&k, _)| k))
    }

    /// The first chunk at or after `n` that has pages in `first..=last`, and which of its pages that may be: from one
    /// to another.
    pub(super) fn within(&self, n: u64, first: u64, last: u64) -> Option<(u64, usize, usize)> {
        let ci = self.next(n.max(first / CHUNK_PAGES as u64))?;
        let base = ci * CHUNK_PAGES as u64;
        let lo = first.saturating_sub(base) as usize;
        let hi = last.checked_sub(base)?.min(CHUNK_PAGES as u64 - 1) as usize;
        Some((ci, lo, hi))
    }

    /// Forgets a chunk that has no pages any more.
    pub(super) fn remove_if_empty(&mut self, n: u64) {
        if self.get(n).is_some_and(|c| !c.present.any()) {
            if n < LOW {
                self.low[n as usize] = None;
            } else {
                self.high.remove(&n);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Masks of pages are set, cleared and searched at every bound of their words.
    #[test]
    fn masks_and_searches() {
        let mut bits = Bits::default();
        bits.set_range(60, 130);
        assert!(!bits.get(59) && bits.get(60) && bits.get(130) && !bits.get(131));
        assert_eq!(bits.iter().count(), 71);
        assert_eq!(bits.next(0, 511), Some(60));
        assert_eq!(bits.next(131, 511), None);
        assert!(bits.any_in(0, 60) && !bits.any_in(0, 59) && !bits.any_in(131, 511));
        bits.clear_range(64, 127);
        assert_eq!(
            bits.iter().collect::<Vec<_>>(),
            [60, 61, 62, 63, 128, 129, 130]
        );
        bits.set_range(0, 511);
        assert_eq!(bits.iter().count(), 512);
    }

    /// The client finds the cached pages of sparse files.
    #[test]
    fn chunks_near_and_far() {
        let mut chunks = Chunks::default();
        assert_eq!(chunks.next(0), None);
        chunks.get_or_insert(3).insert(0, 1);
        chunks.get_or_insert(1 << 40).insert(0, 2);
        assert_eq!(chunks.next(0), Some(3));
        assert_eq!(chunks.next(4), Some(1 << 40));
        assert_eq!(chunks.next((1 << 40) + 1), None);
        chunks.get_mut(3).unwrap().remove(0);
        chunks.remove_if_empty(3);
        assert_eq!(chunks.next(0), Some(1 << 40));
    }
}
