//! Memory that I/O is done on.
//!
//! The kernel, and for shared memory another process, may read or write these bytes at any time
//! while a request is under way. So nothing safe here hands out a Rust reference to them: bytes are
//! copied in and out, or their address is given to a system call. [`Payload::bytes`] is for callers
//! that rule out writes.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use smallvec::SmallVec;

/// Owns a mapping that [`IoBuf`]s point into; dropping the last one unmaps it.
///
/// # Safety
/// `base()..base() + len()` stays mapped, readable and writable until the value is dropped.
pub unsafe trait Region: Send + Sync {
    /// The first byte of the mapping.
    fn base(&self) -> NonNull<u8>;
    /// Its length in bytes.
    fn len(&self) -> usize;
    /// Whether there is nothing in it.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Anonymous memory of this process.
struct Anonymous {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping has no thread affinity; all access goes through raw copies and system calls.
unsafe impl Send for Anonymous {}
// SAFETY: as above.
unsafe impl Sync for Anonymous {}

// SAFETY: the mapping is made in `IoBuf::alloc` and unmapped only in `drop`.
unsafe impl Region for Anonymous {
    fn base(&self) -> NonNull<u8> {
        self.base
    }
    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        // SAFETY: exactly the range that mmap returned, and no IoBuf is left that points into it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A contiguous range of I/O memory. Clones and slices share the memory and keep it mapped.
#[derive(Clone)]
pub struct IoBuf {
    ptr: NonNull<u8>,
    len: usize,
    region: Arc<dyn Region>,
}

// SAFETY: the pointer is into `region`, which is Send + Sync; bytes are only reached by raw copies
// that assume nothing about their content.
unsafe impl Send for IoBuf {}
// SAFETY: as above.
unsafe impl Sync for IoBuf {}

impl IoBuf {
    /// Zeroed memory of `len` bytes (rounded up to whole pages), page-aligned, of this process.
    ///
    /// # Errors
    /// ENOMEM, from mmap(2).
    pub fn alloc(len: usize) -> io::Result<Self> {
        let mapped = len.max(1).next_multiple_of(4096);
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice aliases nothing.
        let ptr = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let base = NonNull::new(ptr.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let region = Arc::new(Anonymous { base, len: mapped });
        Ok(Self {
            ptr: base,
            len,
            region,
        })
    }

    /// The whole of a region.
    pub fn from_region(region: Arc<dyn Region>) -> Self {
        Self {
            ptr: region.base(),
            len: region.len(),
            region,
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is of length 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for system calls.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// A part of it.
    ///
    /// # Panics
    /// When `range` does not lie inside.
    pub fn slice(&self, range: Range<usize>) -> Self {
        Self {
            ptr: self.start_of(&range),
            len: range.end - range.start,
            region: self.region.clone(),
        }
    }

    fn start_of(&self, range: &Range<usize>) -> NonNull<u8> {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of {}",
            self.len
        );
        // SAFETY: start <= len, so the result is in or one past the same mapping.
        unsafe { self.ptr.add(range.start) }
    }

    /// Copies `from` to the bytes at `at`.
    ///
    /// # Panics
    /// When it doesn't fit.
    pub fn copy_in(&self, at: usize, from: &[u8]) {
        let to = self.start_of(&(at..at + from.len())).as_ptr();
        // SAFETY: the range is inside; `from` is a Rust slice and so is not this memory, which no reference ever
        // points to.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    }

    /// Copies the bytes at `at` to `to`.
    ///
    /// # Panics
    /// When there are not so many.
    pub fn copy_out(&self, at: usize, to: &mut [u8]) {
        let from = self.start_of(&(at..at + to.len())).as_ptr();
        // SAFETY: as in `copy_in`.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) }
    }

    /// Sets all bytes of `range` to zero.
    ///
    /// # Panics
    /// When `range` does not lie inside.
    pub fn zero(&self, range: Range<usize>) {
        let len = range.end.saturating_sub(range.start);
        // SAFETY: the range is inside.
        unsafe { self.start_of(&range).write_bytes(0, len) }
    }
}

impl std::fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IoBuf({:p}, {})", self.ptr, self.len)
    }
}

/// The data of a request: an owned scatter list that an I/O engine fills or drains in place.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    parts: SmallVec<[IoBuf; 1]>,
    len: usize,
}

impl From<IoBuf> for Payload {
    fn from(part: IoBuf) -> Self {
        Self {
            len: part.len(),
            parts: SmallVec::from_buf([part]),
        }
    }
}

impl Payload {
    /// Of several parts, in order.
    pub fn from_parts(parts: impl IntoIterator<Item = IoBuf>) -> Self {
        let parts: SmallVec<[IoBuf; 1]> = parts.into_iter().collect();
        Self {
            len: parts.iter().map(IoBuf::len).sum(),
            parts,
        }
    }

    /// Bytes in all parts.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The parts, in order.
    pub fn parts(&self) -> &[IoBuf] {
        &self.parts
    }

    /// The bytes where they lie, if they are in one part.
    ///
    /// # Safety
    /// While the result is used nothing writes to them: no other process, no system call, and no holder of a
    /// clone of a part.
    pub unsafe fn bytes(&self) -> Option<&[u8]> {
        let [part] = &self.parts[..] else { return None };
        // SAFETY: the part lies in a mapping that lives as long as it does, mappings begin with zeros, so that
        // all bytes have a value, and the caller sees to it that they keep it.
        Some(unsafe { std::slice::from_raw_parts(part.as_ptr(), part.len()) })
    }

    /// The bytes of `range`, sharing the memory.
    ///
    /// # Panics
    /// When `range` does not lie inside.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of {}",
            self.len
        );
        let mut at = 0;
        let mut parts = SmallVec::new();
        for part in &self.parts {
            let (start, end) = (at.max(range.start), (at + part.len()).min(range.end));
            if start < end {
                parts.push(part.slice(start - at..end - at));
            }
            at += part.len();
        }
        Self {
            parts,
            len: range.end - range.start,
        }
    }

    /// Copies `from` to the bytes at `at`.
    ///
    /// # Panics
    /// When it doesn't fit.
    pub fn copy_in(&self, at: usize, mut from: &[u8]) {
        for part in self.slice(at..at + from.len()).parts() {
            let (now, later) = from.split_at(part.len());
            part.copy_in(0, now);
            from = later;
        }
    }

    /// Copies the bytes at `at` to `to`.
    ///
    /// # Panics
    /// When there are not so many.
    pub fn copy_out(&self, at: usize, mut to: &mut [u8]) {
        for part in self.slice(at..at + to.len()).parts() {
            let (now, later) = to.split_at_mut(part.len());
            part.copy_out(0, now);
            to = later;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Data is copied into and out of a payload's parts in their order.
    #[test]
    fn a_payload_is_its_parts_in_order() {
        let buf = IoBuf::alloc(10_000).unwrap();
        let payload =
            Payload::from_parts([buf.slice(5000..5003), buf.slice(0..4), buf.slice(9..9)]);
        assert_eq!(payload.len(), 7);
        payload.copy_in(1, b"abcde");
        let mut out = [9; 7];
        payload.copy_out(0, &mut out);
        assert_eq!(&out, b"\0abcde\0");
        let mut out = [0; 2];
        buf.copy_out(5001, &mut out);
        assert_eq!(&out, b"ab");
        assert_eq!(payload.slice(2..5).parts().len(), 2);
        assert_eq!(payload.slice(7..7).len(), 0);
    }

    /// A slice that leaves its buffer panics.
    #[test]
    #[should_panic]
    fn a_slice_outside_is_refused() {
        let _ = IoBuf::alloc(10).unwrap().slice(3..11);
    }
}
