//! Sizes, attributes, and what is data or a hole.

use std::sync::atomic::Ordering;

use rustix::fs::FallocateFlags;
use rustix::io::{self, Errno};

use super::{File, PAGE};
use crate::error::{Doing, Result};
use crate::types::{Attr, SetAttr};

/// The change that [`File::allocate`] makes to a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocateMode {
    /// Reserves space; the file grows if the range ends beyond it.
    Extend,
    /// Reserves space; the size stays.
    KeepSize,
    /// Makes a hole; the size stays.
    PunchHole,
    /// Makes zeros; the file grows if the range ends beyond it.
    ZeroRange,
}

impl File {
    /// The size in bytes, with what is not written yet.
    pub fn size(&self) -> u64 {
        self.end().unwrap_or_else(|_| self.0.inode.size())
    }

    /// As [`File::size`], for a caller that wants to know why it can't be told.
    ///
    /// # Errors
    /// The server's error.
    pub fn current_size(&self) -> Result<u64> {
        self.end().doing("asking for the size of", &self.0.name)
    }

    pub(super) fn end(&self) -> io::Result<u64> {
        self.retried(|| self.0.inode.current_size())
    }

    /// The attributes now. Writes what is dirty, so that the times are those of the last write.
    ///
    /// # Errors
    /// The server's error.
    pub fn stat(&self) -> Result<Attr> {
        let attr = self.retried(|| self.0.inode.current_attr());
        attr.doing("asking for the attributes of", &self.0.name)
    }

    /// Cuts or extends the file to `size` bytes, as ftruncate(2).
    ///
    /// # Errors
    /// `EINVAL` when the file is not open for writing or the size is impossible, and what the
    /// server answers.
    pub fn set_len(&self, size: u64) -> Result<()> {
        self.cut(size).doing("setting the size of", &self.0.name)
    }

    pub(crate) fn cut(&self, size: u64) -> io::Result<()> {
        let f = &*self.0;
        if !f.writable || size > i64::MAX as u64 {
            return Err(Errno::INVAL);
        }
        let _writer = f.inode.exclusive();
        f.wrote.store(true, Ordering::Relaxed);
        let set = SetAttr {
            size: Some(size),
            handle: Some(f.handle.fh),
            ..SetAttr::default()
        };
        let (server, node) = (&f.cache.server, f.inode.node);
        self.retried(|| {
            f.inode
                .set_len(size, || server.setattr(node, &set).map(drop))
        })
    }

    /// Reserves, punches or zeroes a range, as fallocate(2).
    ///
    /// # Errors
    /// `EBADF` when the file is not open for writing, `EINVAL` for an empty or impossible range,
    /// `EOPNOTSUPP` when the server cannot.
    pub fn allocate(&self, mode: AllocateMode, offset: u64, len: u64) -> Result<()> {
        let done = self.fallocate(mode, offset, len);
        done.doing("allocating space of", &self.0.name)
    }

    fn fallocate(&self, mode: AllocateMode, offset: u64, len: u64) -> io::Result<()> {
        let f = &*self.0;
        if !f.writable {
            return Err(Errno::BADF);
        }
        let end = offset
            .checked_add(len)
            .filter(|&e| len > 0 && e <= i64::MAX as u64);
        let Some(end) = end else {
            return Err(Errno::INVAL);
        };
        let (raw, grows) = match mode {
            AllocateMode::Extend => (FallocateFlags::empty(), true),
            AllocateMode::KeepSize => (FallocateFlags::KEEP_SIZE, false),
            AllocateMode::PunchHole => (
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                false,
            ),
            AllocateMode::ZeroRange => (FallocateFlags::ZERO_RANGE, true),
        };
        let _writer = f.inode.exclusive();
        f.inode.wait_direct();
        f.wrote.store(true, Ordering::Relaxed);
        self.retried(|| {
            // The whole file: the server's size must be ours before it grows or keeps it.
            f.inode.write_and_wait(0, u64::MAX)?;
            f.cache
                .server
                .fallocate(f.inode.node, f.handle.fh, raw, offset, len)
        })?;
        f.inode
            .invalidate_range(offset / PAGE, (end - 1) / PAGE, grows.then_some(end));
        Ok(())
    }

    /// The first data at or after `offset`, as lseek(2) with `SEEK_DATA`.
    ///
    /// # Errors
    /// `ENXIO` when there is none.
    pub fn seek_data(&self, offset: u64) -> Result<u64> {
        self.seek(offset, libc::SEEK_DATA)
    }

    /// The first hole at or after `offset` (the end of the file is one), as lseek(2) with
    /// `SEEK_HOLE`.
    ///
    /// # Errors
    /// `ENXIO` when `offset` is beyond the end.
    pub fn seek_hole(&self, offset: u64) -> Result<u64> {
        self.seek(offset, libc::SEEK_HOLE)
    }

    fn seek(&self, offset: u64, whence: i32) -> Result<u64> {
        let f = &*self.0;
        let found = self.retried(|| {
            let size = f.inode.current_size()?;
            if offset >= size {
                return Err(Errno::NXIO);
            }
            f.inode.write_and_wait(0, u64::MAX)?;
            let server = &f.cache.server;
            match server.lseek(f.inode.node, f.handle.fh, offset, whence) {
                // As the kernel: the file system knows of no holes.
                Err(Errno::NOSYS) if whence == libc::SEEK_HOLE => Ok(size),
                Err(Errno::NOSYS) => Ok(offset),
                found => found,
            }
        });
        found.doing("seeking in", &f.name)
    }
}
