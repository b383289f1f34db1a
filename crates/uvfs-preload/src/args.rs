//! The arguments of calls: buffers, vectors and flags.

use std::ffi::c_int;

use libc::iovec;
use uvfs_client::Flags;

/// The most that one call moves, as in the kernel (MAX_RW_COUNT).
pub(crate) const MOST: usize = 0x7fff_f000;
/// UIO_MAXIOV.
const VECTORS: c_int = 1024;
/// RWF_DONTCACHE of linux/fs.h, which the libc crate does not have yet.
const RWF_DONTCACHE: c_int = 0x80;

/// Whether memory can be there at all; else the kernel is asked, which gives EFAULT. An address that is
/// merely not mapped is not seen here and faults in the program: finding out would cost every call a system
/// call.
#[inline]
pub(crate) fn is_plausible(at: *const u8, len: usize) -> bool {
    /// Below no program has memory, as a rule (vm.mmap_min_addr).
    const LOWEST: usize = 4096;
    /// With four levels of page tables; what is above, and tagged, is the kernel's to judge.
    const END: usize = 1 << 47;
    let at = at as usize;
    (LOWEST..END).contains(&at) && len <= END - at
}

/// The caller's buffers, cut to what one call moves; nothing for what the kernel refuses.
///
/// # Safety
/// As for readv(2).
pub(crate) unsafe fn vectors(vector: *const iovec, count: c_int) -> Option<Vec<(*mut u8, usize)>> {
    if !(0..=VECTORS).contains(&count) || !is_plausible(vector.cast(), 0) {
        return None;
    }
    let mut left = MOST;
    let mut list = Vec::with_capacity(count as usize);
    for index in 0..count as usize {
        // SAFETY: the caller's array has `count` entries.
        let one = unsafe { vector.add(index).read() };
        let len = one.iov_len.min(left);
        left -= len;
        if len > 0 {
            if !is_plausible(one.iov_base.cast(), len) {
                return None;
            }
            list.push((one.iov_base.cast::<u8>(), len));
        }
    }
    Some(list)
}

/// RWF_* as the client has them; nothing for what only the kernel knows.
pub(crate) fn flags_of(raw: c_int) -> Option<Flags> {
    let known = libc::RWF_HIPRI | libc::RWF_DSYNC | RWF_DONTCACHE;
    if raw & !known != 0 {
        return None;
    }
    let mut flags = Flags::empty();
    flags.set(Flags::DSYNC, raw & libc::RWF_DSYNC != 0);
    flags.set(Flags::DONTCACHE, raw & RWF_DONTCACHE != 0);
    Some(flags)
}
