//! The use of each block, and fingerprints of the owners.

use std::sync::atomic::{AtomicU64, Ordering};

/// Blocks in a page of the map.
const PAGE_BLOCKS: u32 = 1 << 15;
/// Two bits a block.
const WORD_BLOCKS: u32 = 32;
const PAGE_WORDS: usize = (PAGE_BLOCKS / WORD_BLOCKS) as usize;

/// The use of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Use {
    /// Nothing has claimed it.
    Unknown = 0,
    /// In the free space trees.
    Free = 1,
    /// One structure's own.
    Meta = 2,
    /// File data, which may be shared.
    Data = 3,
}

impl Use {
    fn from_bits(bits: u64) -> Use {
        match bits & 3 {
            0 => Use::Unknown,
            1 => Use::Free,
            2 => Use::Meta,
            _ => Use::Data,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Use::Unknown => "unused",
            Use::Free => "free",
            Use::Meta => "in use by another structure",
            Use::Data => "in use by file data",
        }
    }
}

enum Page {
    Uniform(Use),
    Bits(Box<[u64; PAGE_WORDS]>),
}

/// A run of blocks that already had a use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Conflict {
    pub start: u32,
    pub len: u32,
    pub was: Use,
}

/// The use of every block of one allocation group: two bits a block, but only for pages that are
/// not the same throughout.
pub(crate) struct BlockMap {
    pages: Vec<Page>,
    blocks: u32,
}

fn repeat(u: Use) -> u64 {
    u64::from(u as u8) * 0x5555_5555_5555_5555
}

impl BlockMap {
    pub fn new(blocks: u32) -> BlockMap {
        let pages = blocks.div_ceil(PAGE_BLOCKS);
        BlockMap {
            pages: (0..pages).map(|_| Page::Uniform(Use::Unknown)).collect(),
            blocks,
        }
    }

    /// Most bytes that the map of `blocks` blocks can come to.
    pub fn max_bytes(blocks: u64) -> u64 {
        blocks / 4 + blocks / u64::from(PAGE_BLOCKS) * 16 + 16
    }

    /// Marks `start..start + len`, which must be inside the group, and gives the runs that had a
    /// use before. These keep it, unless it was to be free.
    pub fn claim(&mut self, start: u32, len: u32, new: Use) -> Vec<Conflict> {
        assert!(start <= self.blocks && len <= self.blocks - start);
        let mut conflicts: Vec<Conflict> = Vec::new();
        let mut clash = |block: u32, was: Use| match conflicts.last_mut() {
            Some(c) if c.was == was && c.start + c.len == block => c.len += 1,
            _ => conflicts.push(Conflict {
                start: block,
                len: 1,
                was,
            }),
        };
        let end = start + len;
        let mut at = start;
        while at < end {
            let page_no = at / PAGE_BLOCKS;
            let page_end = end.min((page_no + 1).saturating_mul(PAGE_BLOCKS));
            let whole_end = self.blocks.min((page_no + 1).saturating_mul(PAGE_BLOCKS));
            let page = &mut self.pages[page_no as usize];
            if let Page::Uniform(u) = page {
                if *u == Use::Unknown && at == page_no * PAGE_BLOCKS && page_end == whole_end {
                    *u = new;
                    at = page_end;
                    continue;
                }
                *page = Page::Bits(Box::new([repeat(*u); PAGE_WORDS]));
            }
            let Page::Bits(words) = page else {
                unreachable!("made one just now");
            };
            while at < page_end {
                let inside = at % PAGE_BLOCKS;
                let (w, first) = ((inside / WORD_BLOCKS) as usize, inside % WORD_BLOCKS);
                let n = (WORD_BLOCKS - first).min(page_end - at);
                let mask = if n == WORD_BLOCKS {
                    u64::MAX
                } else {
                    ((1u64 << (2 * n)) - 1) << (2 * first)
                };
                if words[w] & mask == 0 {
                    words[w] |= repeat(new) & mask;
                } else {
                    for i in 0..n {
                        let shift = 2 * (first + i);
                        let was = Use::from_bits(words[w] >> shift);
                        if was != Use::Unknown {
                            clash(at + i, was);
                        }
                        if was == Use::Unknown || was == Use::Free {
                            words[w] = words[w] & !(3 << shift) | (new as u64) << shift;
                        }
                    }
                }
                at += n;
            }
        }
        conflicts
    }

    /// Blocks of `start..start + len` that have this use have none any more. Data may have further owners,
    /// and keeps its use.
    pub fn release(&mut self, start: u32, len: u32, was: Use) {
        if was == Use::Data {
            return;
        }
        for at in start..start + len {
            let page = &mut self.pages[(at / PAGE_BLOCKS) as usize];
            if let Page::Uniform(u) = page {
                *page = Page::Bits(Box::new([repeat(*u); PAGE_WORDS]));
            }
            if let Page::Bits(words) = page {
                let inside = at % PAGE_BLOCKS;
                let word = &mut words[(inside / WORD_BLOCKS) as usize];
                let shift = 2 * (inside % WORD_BLOCKS);
                if Use::from_bits(*word >> shift) == was {
                    *word &= !(3 << shift);
                }
            }
        }
    }

    /// The runs of blocks that have one of these uses: in order, one use after another.
    pub fn list(&self, wanted: &[Use]) -> Vec<(u32, u32)> {
        let mut out = Vec::new();
        for u in wanted {
            self.runs(*u, &mut |start, len| out.push((start, len)));
        }
        out
    }

    /// The runs of blocks that have the use `wanted`, in order.
    pub fn runs(&self, wanted: Use, visit: &mut dyn FnMut(u32, u32)) {
        let mut open: Option<u32> = None;
        let mut step = |at: u32, is: bool| match (open, is) {
            (None, true) => open = Some(at),
            (Some(start), false) => {
                visit(start, at - start);
                open = None;
            }
            _ => {}
        };
        for (i, page) in self.pages.iter().enumerate() {
            let base = i as u32 * PAGE_BLOCKS;
            match page {
                Page::Uniform(u) => step(base, *u == wanted),
                Page::Bits(words) => {
                    for (w, word) in words.iter().enumerate() {
                        let base = base + w as u32 * WORD_BLOCKS;
                        if *word == repeat(wanted) {
                            step(base.min(self.blocks), base < self.blocks);
                            continue;
                        }
                        // Both bits of a pair are set where the use is the wanted one.
                        let same = !(*word ^ repeat(wanted));
                        if same & same >> 1 & repeat(Use::Free) == 0 {
                            step(base.min(self.blocks), false);
                            continue;
                        }
                        for b in 0..WORD_BLOCKS {
                            let at = base + b;
                            if at >= self.blocks {
                                break;
                            }
                            step(at, Use::from_bits(*word >> (2 * b)) == wanted);
                        }
                    }
                }
            }
        }
        step(self.blocks, false);
    }
}

/// A mixing function (splitmix64's): every input bit changes about half of the output's.
pub(crate) fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A kind of ownership as one number: two runs that continue each other have the same.
pub(crate) fn class(owner: u64, flags: u64, delta: u64) -> u64 {
    mix(mix(mix(owner) ^ flags).wrapping_add(delta)) | 1
}

/// The weight that a run of blocks adds to a fingerprint, per unit of class. Runs add up: the weight of two
/// neighbouring runs is that of their union, so it does not matter how extents are cut.
pub(crate) fn weight(start: u32, len: u32) -> u64 {
    mix(u64::from(start) + u64::from(len)).wrapping_sub(mix(start.into()))
}

/// Sums of ownership over regions of an allocation group, to compare the owners that blocks were seen to have with
/// those in the reverse mapping tree, in memory that does not grow with either.
pub(crate) struct Fingerprint {
    sums: Vec<AtomicU64>,
    region: u32,
}

impl Fingerprint {
    pub fn new(blocks: u32) -> Fingerprint {
        let region = blocks.div_ceil(256).max(1);
        Fingerprint {
            sums: (0..blocks.div_ceil(region))
                .map(|_| AtomicU64::new(0))
                .collect(),
            region,
        }
    }

    /// The same sums, apart.
    pub fn copy(&self) -> Fingerprint {
        let sum = |s: &AtomicU64| AtomicU64::new(s.load(Ordering::Relaxed));
        Fingerprint {
            sums: self.sums.iter().map(sum).collect(),
            region: self.region,
        }
    }

    /// Adds `times` (modulo 2^64) the run's ownership.
    pub fn add(&self, start: u32, len: u32, class: u64, times: u64) {
        let (mut at, end) = (start, start.saturating_add(len));
        while at < end {
            let r = at / self.region;
            let stop = end.min((r + 1).saturating_mul(self.region));
            if let Some(s) = self.sums.get(r as usize) {
                let v = weight(at, stop - at)
                    .wrapping_mul(class)
                    .wrapping_mul(times);
                s.fetch_add(v, Ordering::Relaxed);
            }
            at = stop;
        }
    }

    /// The regions whose sum is not 0, neighbours merged: (first block, blocks).
    pub fn differences(&self) -> Vec<(u32, u32)> {
        let mut out: Vec<(u32, u32)> = Vec::new();
        for (i, s) in self.sums.iter().enumerate() {
            if s.load(Ordering::Relaxed) != 0 {
                let start = i as u32 * self.region;
                match out.last_mut() {
                    Some((s, n)) if *s + *n == start => *n += self.region,
                    _ => out.push((start, self.region)),
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(m: &BlockMap, u: Use) -> Vec<(u32, u32)> {
        m.list(&[u])
    }

    /// Blocks with two owners are noticed.
    #[test]
    fn claims_and_conflicts() {
        let blocks = 3 * PAGE_BLOCKS + 77;
        let mut m = BlockMap::new(blocks);
        assert!(m.claim(0, blocks, Use::Free).is_empty());
        assert_eq!(runs(&m, Use::Free), [(0, blocks)]);
        let mut m = BlockMap::new(blocks);
        assert!(m.claim(5, PAGE_BLOCKS + 40, Use::Data).is_empty());
        assert!(m.claim(PAGE_BLOCKS * 3, 77, Use::Meta).is_empty());
        let c = m.claim(0, 10, Use::Meta);
        assert_eq!(
            c,
            [Conflict {
                start: 5,
                len: 5,
                was: Use::Data
            }]
        );
        assert_eq!(runs(&m, Use::Meta), [(0, 5), (PAGE_BLOCKS * 3, 77)]);
        assert_eq!(runs(&m, Use::Data), [(5, PAGE_BLOCKS + 40)]);
        let unknown = PAGE_BLOCKS + 45;
        assert_eq!(
            runs(&m, Use::Unknown),
            [(unknown, 3 * PAGE_BLOCKS - unknown)]
        );
    }

    /// Two trees may cut an extent in different places.
    #[test]
    fn fingerprints_do_not_see_cuts() {
        let f = Fingerprint::new(100_000);
        let c = class(7, 0, 3);
        f.add(10, 5000, c, 1);
        f.add(10, 100, c, u64::MAX);
        f.add(110, 4900, c, u64::MAX);
        assert!(f.differences().is_empty());
        f.add(900, 1, class(8, 0, 3), 1);
        assert_eq!(f.differences(), [(782, 391)]);
    }
}
