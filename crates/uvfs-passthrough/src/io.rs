//! Reading and writing open files through the thread's I/O engine.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rustix::io::{Errno, ReadWriteFlags};
use uvfs_io::Payload;
use uvfs_io::ops;

use crate::open_file::OpenFile;
use crate::sys::Result;

/// RWF_APPEND of pwritev2(2): write at the end of the file, wherever that is. RWF_NOAPPEND (Linux 6.9): not there, whatever
/// the file was opened with.
const APPEND: u32 = 0x10;
const NOAPPEND: u32 = 0x20;

/// Where a write goes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    At(u64),
    /// The end of the file.
    End,
    /// Where the end was before an earlier server appended the same data.
    Again(u64),
}

impl Place {
    /// The offset and the flags of pwritev2(2) for a file.
    fn of(self, file: &OpenFile) -> (u64, u32) {
        match self {
            Place::At(offset) => (offset, 0),
            Place::End => (0, APPEND),
            Place::Again(offset) if file.appends => (offset, NOAPPEND),
            Place::Again(offset) => (offset, 0),
        }
    }
}

/// Fills `data` from `offset` on, as far as the file goes. `uncached`: leaves nothing of it in the
/// host's page cache, where the host can do so.
pub(crate) async fn read(
    file: &OpenFile,
    data: &Payload,
    offset: u64,
    uncached: bool,
) -> Result<usize> {
    let read = async |flags| match file.direct {
        true => ops::read_some_at(&file.fd, data, offset, flags).await,
        // A cache takes a short read for the end of the file.
        false => ops::read_at(&file.fd, data, offset, flags).await,
    };
    let lacking = &file.inode.mount.no_dontcache;
    if uncached && !lacking.load(Ordering::Relaxed) {
        match read(ops::DONTCACHE).await {
            Err(Errno::OPNOTSUPP) => lacking.store(true, Ordering::Relaxed),
            result => return result,
        }
    }
    read(0).await
}

/// The contents of a file that is exactly `len` bytes long, if the host has them in memory.
pub(crate) fn read_now(file: &OpenFile, len: usize) -> Option<Vec<u8>> {
    // One more, to see that the file ends there.
    let mut data = vec![0; len + 1];
    let flags = match file.inode.mount.in_memory {
        // A read never waits there, and not every such file system takes the flag.
        true => ReadWriteFlags::empty(),
        false => ReadWriteFlags::NOWAIT,
    };
    let mut room = [IoSliceMut::new(&mut data)];
    let read = rustix::io::preadv2(file.as_fd(), &mut room, 0, flags).ok()?;
    data.truncate(read);
    (read == len).then_some(data)
}

/// Writes `data` at a place.
pub(crate) async fn write(
    file: &OpenFile,
    data: &Payload,
    place: Place,
    uncached: bool,
) -> Result<usize> {
    let (offset, flags) = place.of(file);
    let lacking = &file.inode.mount.no_dontcache;
    if uncached && !lacking.load(Ordering::Relaxed) {
        match ops::write_at(&file.fd, data, offset, flags | ops::DONTCACHE).await {
            Err(Errno::OPNOTSUPP) => lacking.store(true, Ordering::Relaxed),
            result => return result,
        }
    }
    ops::write_at(&file.fd, data, offset, flags).await
}

/// As [`read`], in this thread, which may wait.
pub(crate) fn read_waiting(file: &OpenFile, bytes: &mut [u8], offset: u64) -> Result<usize> {
    let len = bytes.len();
    piecewise(len, offset, file.direct, |done, at| {
        rustix::io::pread(file.as_fd(), &mut bytes[done..], at)
    })
}

/// Writes all of `bytes`, in this thread, which may wait; says how many went before an error.
pub(crate) fn write_waiting(file: &OpenFile, bytes: &[u8], place: Place) -> Result<usize> {
    let (offset, flags) = place.of(file);
    let flags = ReadWriteFlags::from_bits_retain(flags);
    piecewise(bytes.len(), offset, true, |done, at| {
        rustix::io::pwritev2(file, &[IoSlice::new(&bytes[done..])], at, flags)
    })
}

/// Repeats a call for what is left, until it transfers nothing. An error after some bytes is dropped if the transfer
/// `may_be_short`.
fn piecewise(
    len: usize,
    offset: u64,
    may_be_short: bool,
    mut call: impl FnMut(usize, u64) -> Result<usize>,
) -> Result<usize> {
    if i64::try_from(offset).is_err() {
        return Err(Errno::INVAL);
    }
    let mut done = 0;
    while done < len {
        match call(done, offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(error) if done == 0 || !may_be_short => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// fsync(2), or fdatasync(2) with `data_only`, in this thread, which may wait.
pub(crate) fn sync(fd: BorrowedFd<'_>, data_only: bool) -> Result<()> {
    match data_only {
        true => rustix::fs::fdatasync(fd),
        false => rustix::fs::fsync(fd),
    }
}
