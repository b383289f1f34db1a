//! fstat(2) and statx(2) of imported files.

use crate::import::Wants;
use crate::table::{self};
use std::ffi::{c_char, c_int};
use std::sync::OnceLock;
use uvfs_client::Attr;

use super::{Step, is_hidden, is_plausible, with};

/// Whether owners are numbered here as at the server: not so in a user namespace.
fn owners_agree() -> bool {
    static AGREE: OnceLock<bool> = OnceLock::new();
    *AGREE.get_or_init(|| {
        ["/proc/self/uid_map", "/proc/self/gid_map"]
            .iter()
            .all(|path| {
                let map = std::fs::read_to_string(path).unwrap_or_default();
                map.split_whitespace().eq(["0", "0", "4294967295"])
            })
    })
}

/// Attributes, and the device and inode numbers that the mount gives.
type Attributes = (Attr, (u64, u64));

/// The attributes of what is imported.
fn attributes(fd: c_int) -> Option<Result<Attributes, c_int>> {
    with(fd, Wants::Imported, |_, opened| match owners_agree() {
        true => Step::Done(opened.file.stat().map(|attr| (attr, opened.inode))),
        false => Step::Kernel,
    })
}

/// The kernel gives the power of two below, and the page's size for none.
fn block_size(attr: &Attr) -> u32 {
    attr.blksize.checked_ilog2().map_or(4096, |bits| 1 << bits)
}

/// # Safety
/// `to` is a caller's buffer.
pub(super) unsafe fn status(fd: c_int, to: *mut libc::stat) -> Option<Result<c_int, c_int>> {
    if is_hidden(fd) {
        return Some(Err(libc::EBADF));
    }
    if table::is_foreign(fd) || !is_plausible(to.cast(), size_of::<libc::stat>()) {
        return None;
    }
    Some(attributes(fd)?.map(|found| {
        // SAFETY: the caller's buffer.
        unsafe { to.write(stat_of(&found)) };
        0
    }))
}

/// A device's number as the kernel decodes it (new_decode_dev).
fn device(number: u32) -> libc::dev_t {
    libc::makedev(number >> 8 & 0xfff, number & 0xff | number >> 12 & 0xfff00)
}

/// As stat(2) gives them.
fn stat_of((attr, (dev, ino)): &Attributes) -> libc::stat {
    let (dev, ino) = (*dev, *ino);
    // SAFETY: plain data.
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    st.st_rdev = device(attr.rdev);
    st.st_dev = dev;
    st.st_ino = ino;
    st.st_mode = attr.mode;
    st.st_nlink = attr.nlink as _;
    st.st_uid = attr.uid;
    st.st_gid = attr.gid;
    st.st_size = attr.size as _;
    st.st_blksize = block_size(attr) as _;
    st.st_blocks = attr.blocks as _;
    (st.st_atime, st.st_atime_nsec) = (attr.atime as _, attr.atimensec.into());
    (st.st_mtime, st.st_mtime_nsec) = (attr.mtime as _, attr.mtimensec.into());
    (st.st_ctime, st.st_ctime_nsec) = (attr.ctime as _, attr.ctimensec.into());
    st
}

/// Whether a path names the descriptor itself.
///
/// # Safety
/// `path` is null or a string.
unsafe fn is_itself(fd: c_int, path: *const c_char, flags: c_int) -> bool {
    flags & libc::AT_EMPTY_PATH != 0
        && !table::is_foreign(fd)
        && is_plausible(path.cast(), 1)
        // SAFETY: the caller's string has a first byte.
        && unsafe { *path } == 0
}

/// # Safety
/// As for statx(2).
pub(super) unsafe fn status_of(
    fd: c_int,
    path: *const c_char,
    flags: c_int,
    mask: u32,
    to: *mut libc::statx,
) -> Option<Result<c_int, c_int>> {
    let known = libc::AT_EMPTY_PATH | libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT;
    // SAFETY: the caller's string.
    if !unsafe { is_itself(fd, path, flags) }
        || flags & !known != 0
        || mask & !libc::STATX_BASIC_STATS != 0
        || !is_plausible(to.cast(), size_of::<libc::statx>())
    {
        return None;
    }
    Some(attributes(fd)?.map(|found| {
        // SAFETY: the caller's buffer.
        unsafe { to.write(statx_of(&found)) };
        0
    }))
}

/// As statx(2) gives them.
fn statx_of((attr, (dev, ino)): &Attributes) -> libc::statx {
    let (dev, ino) = (*dev, *ino);
    // SAFETY: plain data.
    let mut st: libc::statx = unsafe { std::mem::zeroed() };
    st.stx_mask = libc::STATX_BASIC_STATS;
    st.stx_blksize = block_size(attr);
    let rdev = device(attr.rdev);
    (st.stx_rdev_major, st.stx_rdev_minor) = (libc::major(rdev) as _, libc::minor(rdev) as _);
    st.stx_nlink = attr.nlink;
    st.stx_uid = attr.uid;
    st.stx_gid = attr.gid;
    st.stx_mode = attr.mode as u16;
    st.stx_ino = ino;
    st.stx_size = attr.size;
    st.stx_blocks = attr.blocks;
    (st.stx_dev_major, st.stx_dev_minor) = (libc::major(dev) as _, libc::minor(dev) as _);
    for (to, from) in [
        (&mut st.stx_atime, (attr.atime as i64, attr.atimensec)),
        (&mut st.stx_mtime, (attr.mtime as i64, attr.mtimensec)),
        (&mut st.stx_ctime, (attr.ctime as i64, attr.ctimensec)),
    ] {
        (to.tv_sec, to.tv_nsec) = from;
    }
    st
}
