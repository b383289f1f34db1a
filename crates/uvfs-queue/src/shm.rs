//! Sealed shared memory: a memfd that no process can shrink, grow or unseal, mapped once.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use rustix::fs::{FallocateFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// `f_type` of statfs(2) for tmpfs, which memfds without huge pages are on (linux/magic.h).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Where memory can be that has the same address in several programs: no system puts anything there by itself. The second is for
/// processors with 39 bits of addresses.
pub const SAME_IN_ALL: [usize; 2] = [0x2000_0000_0000, 0x20_0000_0000];

/// A mapping of a sealed memfd. The other side may change its bytes at any time, so nothing here
/// hands out a reference to plain memory: bytes are copied, and words are atomics.
#[derive(Debug)]
pub struct SharedMemory {
    ptr: NonNull<u8>,
    len: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping lives as long as the value, and every access is an atomic or a raw copy
// that assumes nothing about other writers.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; there is no interior state besides the shared bytes.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes `len` zeroed bytes (rounded up to pages), sealed against every change of size.
    ///
    /// # Errors
    /// The errors of memfd_create(2), ftruncate(2), fcntl(2) and mmap(2).
    pub fn create(name: &CStr, len: usize) -> io::Result<Self> {
        Self::create_at(name, len, None)
    }

    /// The same at this address.
    ///
    /// # Errors
    /// As [`SharedMemory::create`]; EEXIST where something else is.
    pub fn create_at(name: &CStr, len: usize, at: Option<usize>) -> io::Result<Self> {
        let len = len.next_multiple_of(4096);
        // The C library's call, as in `attach::socket`.
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a C string and a number.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
        uvfs_sys::checked(fd)?;
        // SAFETY: it was just made, and no other code knows it.
        let fd = crate::attach::aside(unsafe { OwnedFd::from_raw_fd(fd) });
        rustix::fs::ftruncate(&fd, len as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(fd, len, at)
    }

    /// Maps a memfd that the other side made, if it is sealed against shrinking and growing and
    /// is at most `max_len` bytes.
    ///
    /// # Errors
    /// `EINVAL` when it is not sealed, of huge pages, empty or too large; otherwise those of mmap(2).
    pub fn open(fd: OwnedFd, max_len: usize) -> io::Result<Self> {
        Self::open_at(fd, max_len, None)
    }

    /// The same at this address.
    ///
    /// # Errors
    /// As [`SharedMemory::open`]; EEXIST where something else is.
    pub fn open_at(fd: OwnedFd, max_len: usize, at: Option<usize>) -> io::Result<Self> {
        let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why.to_owned());
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|_| bad("shared memory must be a memfd with seals"))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(bad(
                "shared memory must be sealed against shrinking and growing",
            ));
        }
        if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(bad("shared memory must be writable by both sides"));
        }
        // A huge page that a client punches out may not come back: then a look at it is SIGBUS.
        if rustix::fs::fstatfs(&fd)?.f_type != TMPFS_MAGIC {
            return Err(bad("shared memory must not be of huge pages"));
        }
        let len = usize::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(0);
        if len == 0 || len > max_len || !len.is_multiple_of(4096) {
            return Err(bad("shared memory has an unacceptable size"));
        }
        Self::map(fd, len, at)
    }

    fn map(fd: OwnedFd, len: usize, at: Option<usize>) -> io::Result<Self> {
        let mut flags = MapFlags::SHARED;
        flags.set(MapFlags::FIXED_NOREPLACE, at.is_some());
        let wanted = std::ptr::with_exposed_provenance_mut(at.unwrap_or(0));
        // SAFETY: a new mapping at an address of the kernel's choice, or where the kernel finds that nothing is, aliases nothing
        // of ours.
        let ptr = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(wanted, len, protection, flags, &fd, 0)?
        };
        let ptr = NonNull::new(ptr.cast()).expect("mmap does not return null");
        let mapped = Self { ptr, len, fd };
        match at {
            // A kernel that does not know the flag takes the address for a wish.
            Some(at) if mapped.address() != at => Err(rustix::io::Errno::EXIST.into()),
            _ => Ok(mapped),
        }
    }

    /// The address of the first byte.
    pub fn address(&self) -> usize {
        self.ptr.addr().get()
    }

    /// Has the kernel map all pages of a range now. Their bytes stay as they are.
    ///
    /// # Errors
    /// The errors of madvise(2).
    pub fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        let start = self.at(offset, len).cast();
        // SAFETY: the range is inside of the mapping (checked by `at`), and the advice changes no byte.
        unsafe { rustix::mm::madvise(start, len, Advice::LinuxPopulateWrite)? };
        Ok(())
    }

    /// The size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the mapping is empty; it never is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A pointer to `len` bytes at `offset`, valid while `self` lives.
    ///
    /// # Panics
    /// When the range is not inside the mapping: callers check what comes from outside first.
    pub fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "range {offset}+{len} outside of {} bytes of shared memory",
            self.len
        );
        // SAFETY: the range was just checked to be inside the mapping.
        unsafe { self.ptr.as_ptr().add(offset) }
    }

    /// The word at `offset`, a multiple of 4.
    pub fn u32_at(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        // SAFETY: in bounds (checked by `at`), aligned, and only ever used as an atomic.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    /// The word at `offset`, a multiple of 8.
    pub fn u64_at(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        // SAFETY: in bounds (checked by `at`), aligned, and only ever used as an atomic.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }

    /// Copies bytes out.
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        let from = self.at(offset, to.len());
        // SAFETY: both ranges are valid for `to.len()` bytes, and a private slice cannot
        // overlap the mapping.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) }
    }

    /// Copies bytes in.
    pub fn write(&self, offset: usize, from: &[u8]) {
        let to = self.at(offset, from.len());
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    }

    /// Sets bytes to zero.
    pub fn zero(&self, offset: usize, len: usize) {
        // SAFETY: the range was checked by `at`.
        unsafe { std::ptr::write_bytes(self.at(offset, len), 0, len) }
    }

    /// Gives the memory of whole pages back to the system; they read as zeros afterwards.
    ///
    /// # Errors
    /// The errors of fallocate(2).
    pub fn discard(&self, offset: usize, len: usize) -> io::Result<()> {
        let _ = self.at(offset, len);
        rustix::fs::fallocate(
            &self.fd,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            offset as u64,
            len as u64,
        )?;
        Ok(())
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this is our own mapping, and nothing borrowed from it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

/// Sleeps while the shared word is `expected`, at most `timeout`. Returns also when woken, when
/// interrupted and for no reason: look again.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    let timeout = timeout.map(|t| libc::timespec {
        tv_sec: t.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let timeout = timeout
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    // By the C library: under `uvfs run` a system call of this code's own would trap.
    // SAFETY: a word that lives, and a timeout or none.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            timeout,
        )
    };
}

/// Wakes one sleeper on a shared word.
pub fn futex_wake(word: &AtomicU32) {
    // SAFETY: a word that lives.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    /// Both sides see each other's data in a sealed memfd.
    #[test]
    fn a_sealed_memfd_is_accepted_and_shared() {
        let a = SharedMemory::create(c"test", 5000).unwrap();
        assert_eq!(a.len(), 8192);
        let b = SharedMemory::open(a.as_fd().try_clone_to_owned().unwrap(), 8192).unwrap();
        a.write(100, b"hello");
        let mut got = [0; 5];
        b.read(100, &mut got);
        assert_eq!(&got, b"hello");
        assert!(ftruncate(&a, 0).is_err(), "sealed");
        b.discard(0, 4096).unwrap();
        a.read(100, &mut got);
        assert_eq!(got, [0; 5]);
    }

    /// Memory that could be shrunk later (SIGBUS), is too large, or is no memfd is refused.
    #[test]
    fn unsealed_too_large_and_foreign_descriptors_are_refused() {
        let fd = memfd_create(c"t", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 4096).unwrap();
        assert!(SharedMemory::open(fd.try_clone().unwrap(), 1 << 20).is_err());
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        assert!(SharedMemory::open(fd.try_clone().unwrap(), 1 << 20).is_err());
        fcntl_add_seals(&fd, SealFlags::GROW).unwrap();
        assert!(SharedMemory::open(fd.try_clone().unwrap(), 100).is_err());
        assert!(SharedMemory::open(fd, 4096).is_ok());
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(SharedMemory::open(null.into(), 4096).is_err());
    }

    /// An access beyond the mapping panics.
    #[test]
    #[should_panic(expected = "outside")]
    fn ranges_are_checked() {
        SharedMemory::create(c"test", 4096).unwrap().at(4096, 1);
    }
}
