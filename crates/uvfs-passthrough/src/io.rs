//! Reading, writing and the like: what an I/O engine does for open files.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::io::Errno;
use uvfs_io::{Payload, blocking};

use crate::handle::OpenFile;
use crate::sys::{self, RWF_APPEND, RWF_DONTCACHE, Result, Way};

/// How a transfer is done.
#[derive(Clone, Copy, Default)]
pub(crate) struct Flags {
    /// Leave nothing of it in the host's page cache, where it can do so.
    pub(crate) uncached: bool,
    /// Write at the end of the file, wherever that is.
    pub(crate) append: bool,
}

/// Fills `data` from `offset` on, as far as the file goes.
pub(crate) async fn read(
    file: &Arc<OpenFile>,
    data: &Payload,
    offset: u64,
    flags: Flags,
) -> Result<usize> {
    transfer(Way::Read, file, data, offset, flags)
}

/// Writes `data` at `offset`.
pub(crate) async fn write(
    file: &Arc<OpenFile>,
    data: &Payload,
    offset: u64,
    flags: Flags,
) -> Result<usize> {
    transfer(Way::Write, file, data, offset, flags)
}

fn transfer(
    way: Way,
    file: &OpenFile,
    data: &Payload,
    offset: u64,
    flags: Flags,
) -> Result<usize> {
    let no_dontcache = &file.inode.mount.no_dontcache;
    let mut bits = 0;
    if flags.append {
        bits |= RWF_APPEND;
    }
    if flags.uncached && !no_dontcache.load(Ordering::Relaxed) {
        bits |= RWF_DONTCACHE;
    }
    let mut done = 0;
    while done < data.len() {
        match sys::transfer(way, file.as_fd(), data, done, offset + done as u64, bits) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP) if bits & RWF_DONTCACHE != 0 => {
                no_dontcache.store(true, Ordering::Relaxed);
                bits &= !RWF_DONTCACHE;
            }
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// Makes a file or directory durable.
pub(crate) async fn fsync<F: AsFd + Send + Sync + 'static>(
    file: Arc<F>,
    data_only: bool,
) -> Result<()> {
    blocking::run(move || {
        if data_only {
            rustix::fs::fdatasync(&*file)
        } else {
            rustix::fs::fsync(&*file)
        }
    })
    .await
}

/// Waits.
pub(crate) async fn sleep(time: Duration) {
    blocking::run(move || std::thread::sleep(time)).await;
}

/// fallocate(2).
pub(crate) async fn fallocate(
    file: &Arc<OpenFile>,
    mode: u32,
    offset: u64,
    len: u64,
) -> Result<()> {
    let file = file.clone();
    let mode = rustix::fs::FallocateFlags::from_bits_retain(mode);
    blocking::run(move || rustix::fs::fallocate(file.as_fd(), mode, offset, len)).await
}
