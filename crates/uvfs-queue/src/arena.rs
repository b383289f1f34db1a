//! The page arena: a client's cached pages and what is dirty about each, in one sealed memfd.
//!
//! The server maps it too. It reads and writes the pages themselves, and when the client dies it
//! finds the dirty bytes by the page descriptors ([`Arena::dirty`]) and writes them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use crate::pair::Seg;
use crate::shm::SharedMemory;

/// Bytes of a page.
pub const PAGE_SIZE: usize = 4096;

const MAGIC: u32 = 0x7566_7361;
const VERSION: u32 = 1;
const DESC_SIZE: usize = 32;

/// The dirty bytes of one page and those under writeback: two byte ranges, both may be empty.
/// One word in shared memory, so that it changes at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ranges {
    /// Bytes that the server does not have yet and that no request carries.
    pub dirty: Span,
    /// Bytes that a request under way carries.
    pub writeback: Span,
}

/// A range of bytes within a page: `start..end`, empty when they are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span {
    /// The first byte.
    pub start: u16,
    /// The byte after the last one, at most 4096.
    pub end: u16,
}

impl Span {
    /// `start..end` within a page.
    pub fn new(start: usize, end: usize) -> Self {
        assert!(start <= end && end <= PAGE_SIZE, "a span lies in one page");
        Self {
            start: start as u16,
            end: end as u16,
        }
    }

    /// Whether there is nothing in it.
    pub fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// Bytes.
    pub fn len(self) -> usize {
        usize::from(self.end.saturating_sub(self.start))
    }

    /// The smallest span that holds both.
    pub fn union(self, other: Self) -> Self {
        match (self.is_empty(), other.is_empty()) {
            (true, _) => other,
            (_, true) => self,
            _ => Self {
                start: self.start.min(other.start),
                end: self.end.max(other.end),
            },
        }
    }

    /// Whether the two overlap or meet, so that their union has no gap.
    pub fn touches(self, other: Self) -> bool {
        !self.is_empty() && !other.is_empty() && self.start <= other.end && other.start <= self.end
    }

    /// Whether all of `other` is in it.
    pub fn contains(self, other: Self) -> bool {
        other.is_empty() || (self.start <= other.start && other.end <= self.end)
    }

    /// The part before byte `end`.
    pub fn before(self, end: usize) -> Self {
        let cut = Self {
            start: self.start,
            end: self.end.min(end.min(PAGE_SIZE) as u16),
        };
        if cut.is_empty() { Self::default() } else { cut }
    }
}

impl Ranges {
    fn pack(self) -> u64 {
        u64::from(self.dirty.start)
            | u64::from(self.dirty.end) << 16
            | u64::from(self.writeback.start) << 32
            | u64::from(self.writeback.end) << 48
    }

    fn unpack(word: u64) -> Self {
        let part = |shift: u32| (word >> shift) as u16;
        Self {
            dirty: Span {
                start: part(0),
                end: part(16),
            },
            writeback: Span {
                start: part(32),
                end: part(48),
            },
        }
    }
}

/// Dirty bytes of a page that its client did not get to write, as [`Arena::dirty`] finds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirtyBytes {
    /// The inode, as the client named it. Not to be trusted.
    pub node: u64,
    /// The server's file handle that wrote to it last. Not to be trusted.
    pub handle: u64,
    /// Byte offset in the file.
    pub file_offset: u64,
    /// Where the bytes are in the arena.
    pub seg: Seg,
}

/// Pages and their descriptors. Only the client knows which pages are free.
#[derive(Debug)]
pub struct Arena {
    mem: SharedMemory,
    pages: u32,
    data: usize,
}

impl Arena {
    /// Makes an arena of `pages` zeroed pages.
    ///
    /// # Errors
    /// The errors of [`SharedMemory::create`].
    pub fn create(pages: u32) -> io::Result<Self> {
        let data = Self::data_offset(pages);
        let mem = SharedMemory::create(c"uvfs-arena", data + pages as usize * PAGE_SIZE)?;
        for (i, word) in [MAGIC, VERSION, pages].into_iter().enumerate() {
            mem.u32_at(i * 4).store(word, Ordering::Relaxed);
        }
        Ok(Self { mem, pages, data })
    }

    /// Maps an arena of at most `max_pages` pages that a client made.
    ///
    /// # Errors
    /// `EINVAL` for memory that is not a sealed arena of this version.
    pub fn open(fd: OwnedFd, max_pages: u32) -> io::Result<Self> {
        let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why.to_owned());
        let max = Self::data_offset(max_pages) + max_pages as usize * PAGE_SIZE;
        let mem = SharedMemory::open(fd, max)?;
        let word = |i: usize| mem.u32_at(i * 4).load(Ordering::Relaxed);
        if word(0) != MAGIC || word(1) != VERSION {
            return Err(bad("not a page arena of this version"));
        }
        let pages = word(2);
        let data = Self::data_offset(pages);
        if pages > max_pages || mem.len() != data + pages as usize * PAGE_SIZE {
            return Err(bad("the arena's size does not fit its pages"));
        }
        Ok(Self { mem, pages, data })
    }

    fn data_offset(pages: u32) -> usize {
        (PAGE_SIZE + pages as usize * DESC_SIZE).next_multiple_of(PAGE_SIZE)
    }

    /// The number of pages.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Bytes of the whole shared memory: segments must end before this.
    pub fn len(&self) -> u64 {
        self.mem.len() as u64
    }

    /// Where the arena is mapped, for [`Arena::len`] bytes and while it lives.
    pub fn base(&self) -> std::ptr::NonNull<u8> {
        std::ptr::NonNull::new(self.mem.at(0, self.mem.len())).expect("a mapping is not at null")
    }

    /// Whether the arena has no pages.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// The bytes `start..start + len` of a page as a segment.
    pub fn seg(&self, page: u32, start: usize, len: usize) -> Seg {
        debug_assert!(page < self.pages && start + len <= PAGE_SIZE);
        Seg {
            offset: (self.data + page as usize * PAGE_SIZE + start) as u64,
            len: len as u32,
        }
    }

    /// Where a segment is mapped; the memory is shared, so never make a reference to it.
    ///
    /// # Panics
    /// When the segment is not inside the arena.
    pub fn ptr(&self, seg: Seg) -> *mut u8 {
        let offset = usize::try_from(seg.offset).expect("64-bit");
        self.mem.at(offset, seg.len as usize)
    }

    /// Copies a segment out.
    pub fn read(&self, seg: Seg, to: &mut [u8]) {
        assert!(to.len() <= seg.len as usize);
        self.mem
            .read(usize::try_from(seg.offset).expect("64-bit"), to);
    }

    /// Copies from a page.
    #[inline]
    pub fn copy_out(&self, page: u32, start: usize, to: &mut [u8]) {
        self.mem
            .read(self.data + page as usize * PAGE_SIZE + start, to);
    }

    /// Copies into a page.
    #[inline]
    pub fn copy_in(&self, page: u32, start: usize, from: &[u8]) {
        self.mem
            .write(self.data + page as usize * PAGE_SIZE + start, from);
    }

    /// Copies `len` bytes at `start` of one page to the same place of another.
    pub fn copy_page(&self, from: u32, to: u32, start: usize, len: usize) {
        assert_ne!(from, to);
        let (from, to) = (
            self.ptr(self.seg(from, start, len)),
            self.ptr(self.seg(to, start, len)),
        );
        // SAFETY: both ranges were checked by `ptr`, and different pages do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
    }

    /// Sets part of a page to zero.
    pub fn zero(&self, page: u32, start: usize, len: usize) {
        self.mem
            .zero(self.data + page as usize * PAGE_SIZE + start, len);
    }

    /// Gives the memory of `count` pages from `first` on back to the system until they are used
    /// again.
    pub fn discard(&self, first: u32, count: u32) {
        // Only an optimisation; the pages stay usable when the kernel refuses.
        let _ = self.mem.discard(
            self.data + first as usize * PAGE_SIZE,
            count as usize * PAGE_SIZE,
        );
    }

    fn desc(&self, page: u32) -> usize {
        assert!(page < self.pages);
        PAGE_SIZE + page as usize * DESC_SIZE
    }

    /// Says whose page it is. Its ranges must be empty.
    pub fn set_owner(&self, page: u32, node: u64, index: u64) {
        let at = self.desc(page);
        debug_assert_eq!(
            self.ranges(page),
            Ranges::default(),
            "only a clean page changes owner"
        );
        self.mem.u64_at(at).store(node, Ordering::Relaxed);
        self.mem.u64_at(at + 8).store(index, Ordering::Relaxed);
    }

    /// Records the server's handle through which the page may be written.
    pub fn set_handle(&self, page: u32, handle: u64) {
        self.mem
            .u64_at(self.desc(page) + 24)
            .store(handle, Ordering::Relaxed);
    }

    /// Changes a page's node and handle; what is dirty stays. For a new session, whose server has
    /// other numbers and does not look yet.
    pub fn rename(&self, page: u32, node: u64, handle: u64) {
        self.mem
            .u64_at(self.desc(page))
            .store(node, Ordering::Relaxed);
        self.set_handle(page, handle);
    }

    /// The dirty bytes of a page.
    #[inline]
    pub fn ranges(&self, page: u32) -> Ranges {
        Ranges::unpack(
            self.mem
                .u64_at(self.desc(page) + 16)
                .load(Ordering::Acquire),
        )
    }

    /// Records what is dirty in a page, after its bytes were written.
    #[inline]
    pub fn set_ranges(&self, page: u32, ranges: Ranges) {
        self.mem
            .u64_at(self.desc(page) + 16)
            .store(ranges.pack(), Ordering::Release);
    }

    /// Every run of bytes that is dirty or was under writeback, for the server of a client that
    /// died. Answers only what lies inside the pages, whatever the descriptors say.
    pub fn dirty(&self) -> impl Iterator<Item = DirtyBytes> + '_ {
        (0..self.pages).flat_map(move |page| {
            let at = self.desc(page);
            let ranges = self.ranges(page);
            let node = self.mem.u64_at(at).load(Ordering::Relaxed);
            let index = self.mem.u64_at(at + 8).load(Ordering::Relaxed);
            let handle = self.mem.u64_at(at + 24).load(Ordering::Relaxed);
            let spans = if ranges.dirty.touches(ranges.writeback) {
                [ranges.dirty.union(ranges.writeback), Span::default()]
            } else {
                [ranges.writeback, ranges.dirty]
            };
            spans.into_iter().filter_map(move |span| {
                let (start, end) = (usize::from(span.start), usize::from(span.end));
                if span.is_empty() || end > PAGE_SIZE {
                    return None;
                }
                let page_offset = index.checked_mul(PAGE_SIZE as u64)?;
                let file_end = page_offset.checked_add(end as u64)?;
                (file_end <= i64::MAX as u64).then(|| DirtyBytes {
                    node,
                    handle,
                    file_offset: page_offset + start as u64,
                    seg: self.seg(page, start, end - start),
                })
            })
        })
    }
}

impl AsFd for Arena {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mem.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server finds the dirty pages of a client that died.
    #[test]
    fn the_other_side_finds_what_is_dirty() {
        let a = Arena::create(4).unwrap();
        a.set_owner(1, 7, 3);
        a.set_handle(1, 5);
        a.copy_in(1, 10, b"dirty");
        a.set_ranges(
            1,
            Ranges {
                dirty: Span::new(10, 15),
                writeback: Span::default(),
            },
        );
        a.set_owner(2, 8, 0);
        a.set_ranges(
            2,
            Ranges {
                dirty: Span::new(0, 9),
                writeback: Span::new(9, 20),
            },
        );
        let b = Arena::open(a.as_fd().try_clone_to_owned().unwrap(), 4).unwrap();
        let got: Vec<_> = b.dirty().collect();
        assert_eq!(got.len(), 2);
        assert_eq!(
            (got[0].node, got[0].handle, got[0].file_offset),
            (7, 5, 3 * 4096 + 10)
        );
        assert_eq!(got[0].seg, a.seg(1, 10, 5));
        assert_eq!(
            (got[1].node, got[1].file_offset, got[1].seg.len),
            (8, 0, 20)
        );
    }

    /// Dirty pages that a descriptor places outside of the arena are left out.
    #[test]
    fn a_hostile_descriptor_yields_nothing_outside() {
        let a = Arena::create(2).unwrap();
        for word in [u64::MAX, 0xffff_0000, 5000 << 16, 9 | 3 << 16] {
            a.mem
                .u64_at(a.desc(0) + 8)
                .store(u64::MAX, Ordering::Relaxed);
            a.mem.u64_at(a.desc(0) + 16).store(word, Ordering::Relaxed);
            assert_eq!(a.dirty().count(), 0, "{word:x}");
        }
        // The last page of all: with all of it, the end is not a number any more.
        a.mem
            .u64_at(a.desc(0) + 8)
            .store(u64::MAX / 4096, Ordering::Relaxed);
        for end in [10, 4096] {
            a.mem
                .u64_at(a.desc(0) + 16)
                .store(end << 16, Ordering::Relaxed);
            assert_eq!(a.dirty().count(), 0, "{end}");
        }
        assert!(Arena::open(a.as_fd().try_clone_to_owned().unwrap(), 1).is_err());
    }

    /// Spans that touch or overlap can be joined, and cut at a byte.
    #[test]
    fn spans() {
        let (a, b) = (Span::new(0, 10), Span::new(10, 20));
        assert!(a.touches(b) && b.touches(a));
        assert_eq!(a.union(b), Span::new(0, 20));
        assert!(!a.touches(Span::new(11, 12)));
        assert_eq!(b.before(15), Span::new(10, 15));
        assert!(b.before(5).is_empty());
        assert!(Span::new(0, 20).contains(b));
    }
}
