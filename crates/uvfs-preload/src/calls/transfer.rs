//! Reads and writes of imported files, of one buffer and of several.

use crate::promotion::Moves;
use crate::report;
use crate::table::{self};
use libc::{iovec, off_t};
use std::ffi::{c_int, c_void};
use std::io::{IoSlice, IoSliceMut};
use uvfs_client::Flags;

use super::{MOST, aside, is_plausible, transfer, vectors};

fn read_at(
    fd: c_int,
    bufs: &mut [IoSliceMut<'_>],
    at: Option<off_t>,
    flags: Flags,
) -> Option<Result<usize, c_int>> {
    let moves = Moves::Read(bufs.iter().map(|buf| buf.len()).sum());
    let done = transfer(fd, at, moves, |opened, at| {
        let how = flags | opened.how();
        opened.file.read_vectored_at(bufs, at, how)
    });
    if let Some(Ok(n)) = done {
        report::served(n, 0);
    }
    done
}

fn write_at(
    fd: c_int,
    bufs: &[IoSlice<'_>],
    at: Option<off_t>,
    flags: Flags,
) -> Option<Result<usize, c_int>> {
    let moves = Moves::Write(bufs.iter().map(|buf| buf.len()).sum());
    let done = transfer(fd, at, moves, |opened, at| {
        let how = flags | opened.how();
        let done = opened.file.write_vectored_at(bufs, at, how)?;
        if opened.syncs_all() {
            opened.file.sync_all()?;
        }
        Ok(done)
    });
    if let Some(Ok(n)) = done {
        report::served(0, n);
    }
    done
}

/// # Safety
/// `to` has room for `len` bytes, as for read(2).
pub(super) unsafe fn read_one(
    fd: c_int,
    to: *mut c_void,
    len: usize,
    at: Option<off_t>,
) -> Option<Result<usize, c_int>> {
    // Memory for a foreign descriptor may be anything: only the kernel looks at it.
    if table::is_foreign(fd) || !is_plausible(to.cast(), len.min(MOST)) {
        report::passed();
        return None;
    }
    // SAFETY: the caller's room; bytes are only ever written to it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), len.min(MOST)) };
    read_at(fd, &mut [IoSliceMut::new(bytes)], at, Flags::empty())
}

/// # Safety
/// `from` has `len` bytes, as for write(2).
pub(super) unsafe fn write_one(
    fd: c_int,
    from: *const c_void,
    len: usize,
    at: Option<off_t>,
) -> Option<Result<usize, c_int>> {
    if table::is_foreign(fd) || !is_plausible(from.cast(), len.min(MOST)) {
        report::passed();
        return None;
    }
    // SAFETY: the caller's bytes.
    let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len.min(MOST)) };
    write_at(fd, &[IoSlice::new(bytes)], at, Flags::empty())
}

/// The buffers of a call that may be served.
///
/// # Safety
/// As for readv(2).
unsafe fn buffers(fd: c_int, vector: *const iovec, count: c_int) -> Option<Vec<(*mut u8, usize)>> {
    if table::is_foreign(fd) {
        report::passed();
        return None;
    }
    // SAFETY: the caller's duty.
    aside(|| unsafe { vectors(vector, count) }).flatten()
}

/// # Safety
/// As for preadv(2).
pub(super) unsafe fn read_many(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    at: Option<off_t>,
    flags: Flags,
) -> Option<Result<usize, c_int>> {
    // SAFETY: the caller's duty.
    let mut bufs: Vec<_> = unsafe { buffers(fd, vector, count) }?
        .into_iter()
        // SAFETY: the caller's room; bytes are only ever written to it.
        .map(|(to, len)| IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(to, len) }))
        .collect();
    read_at(fd, &mut bufs, at, flags)
}

/// # Safety
/// As for pwritev(2).
pub(super) unsafe fn write_many(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    at: Option<off_t>,
    flags: Flags,
) -> Option<Result<usize, c_int>> {
    // SAFETY: the caller's duty.
    let bufs: Vec<_> = unsafe { buffers(fd, vector, count) }?
        .into_iter()
        // SAFETY: the caller's bytes.
        .map(|(from, len)| IoSlice::new(unsafe { std::slice::from_raw_parts(from, len) }))
        .collect();
    write_at(fd, &bufs, at, flags)
}
