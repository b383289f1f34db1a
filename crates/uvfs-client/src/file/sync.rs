//! Writing back what is dirty, making it durable, and closing.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use super::{File, PAGE};
use crate::cache::Flush;
use crate::error::{Doing, Result};
use crate::pending::{Pending, Step};
use rustix::io::{self, Errno};
use uvfs_sys::lock;

impl File {
    /// Writes what is dirty and makes it durable, as fdatasync(2).
    ///
    /// # Errors
    /// That of a writeback that failed since this file last heard of one (its pages stay dirty,
    /// and are tried again), and what the server answers.
    pub fn sync_data(&self) -> Result<()> {
        self.sync(0, u64::MAX, true).doing("syncing", &self.0.name)
    }

    /// Writes what is dirty and makes data and attributes durable, as fsync(2).
    ///
    /// # Errors
    /// As [`File::sync_data`].
    pub fn sync_all(&self) -> Result<()> {
        let synced = self.sync(0, u64::MAX, false);
        synced.doing("syncing", &self.0.name)
    }

    /// Starts [`File::sync_all`], or with `data_only` [`File::sync_data`]: of what is written when
    /// this is called.
    pub fn submit_sync(&self, data_only: bool) -> Pending<()> {
        let f = &*self.0;
        if let Err(e) = self.retried(|| Ok(())) {
            return Pending::ready(self, "syncing", Err(e));
        }
        let step = SyncStep {
            file: self.clone(),
            data_only,
            flush: f.inode.start_flush(0, u64::MAX),
            end: None,
        };
        Pending::new(self, "syncing", step)
    }

    /// Writes what is dirty of a range, as sync_file_range(2): `wait` for it, or only start. Nothing
    /// is made durable.
    ///
    /// # Errors
    /// When waiting, that of a writeback that failed since this file last heard of one.
    pub fn write_back(&self, offset: u64, len: u64, wait: bool) -> Result<()> {
        let (first, last) = (offset / PAGE, offset.saturating_add(len.max(1) - 1) / PAGE);
        if wait {
            let written = self.sync_range(first, last);
            return written.doing("writing back", &self.0.name);
        }
        self.0.inode.write_range(first, last);
        Ok(())
    }

    /// Writes what is dirty and closes the file, as close(2). Dropping a file closes it too, and starts the
    /// writing, but reports nothing.
    ///
    /// # Errors
    /// That of a writeback that failed since this file last heard of one, and what the server answers.
    pub fn close(self) -> Result<()> {
        let f = &*self.0;
        let written = match f.wrote.load(Ordering::Relaxed) {
            true => self.sync_range(0, u64::MAX),
            false => self.failed().map_or(Ok(()), Err),
        };
        let (node, fh) = (f.handle.node, f.handle.fh);
        let closed = written.and_then(|()| match f.writable {
            true => self.retried(|| f.cache.server.flush(node, fh, f.owner)),
            false => Ok(()),
        });
        closed.doing("closing", &f.name)
    }

    /// The error of a writeback that failed since this file last heard of one.
    pub fn failed(&self) -> Option<Errno> {
        self.0.inode.errors.check(&self.0.errors)
    }

    /// Writes a range and reports an error that this open file has not heard of.
    pub(super) fn sync_range(&self, first: u64, last: u64) -> io::Result<()> {
        let f = &*self.0;
        let written = self.retried(|| f.inode.write_and_wait(first, last));
        match self.failed() {
            Some(error) => Err(error),
            None => written,
        }
    }

    /// Writes a range and makes what the server has of the file durable.
    pub(super) fn sync(&self, first: u64, last: u64, data_only: bool) -> io::Result<()> {
        let f = &*self.0;
        self.sync_range(first, last)?;
        // Data that the server had taken was in the file when it went, and is not to be written again.
        self.retried(|| f.cache.server.fsync(f.handle.node, f.handle.fh, data_only))
    }

    /// Writes what is dirty, if this file has written.
    pub(super) fn flush(&self) -> io::Result<()> {
        if self.0.wrote.load(Ordering::Relaxed) {
            return self.retried(|| self.0.inode.write_and_wait(0, u64::MAX));
        }
        Ok(())
    }
}

/// A submitted sync: first the writeback, then the server.
struct SyncStep {
    file: File,
    data_only: bool,
    flush: Flush,
    /// The server's answer, once it was asked.
    end: Option<Arc<Mutex<Option<io::Result<usize>>>>>,
}

impl Step<()> for SyncStep {
    fn step(&mut self) -> Option<io::Result<()>> {
        let f = self.file.0.clone();
        if let Some(end) = &self.end {
            return lock(end).take().map(|result| result.map(drop));
        }
        let written = f.inode.step_flush(&mut self.flush)?;
        let failed = self.file.failed();
        if let Some(error) = failed.or(written.err()) {
            return Some(Err(error));
        }
        let end = Arc::new(Mutex::new(None));
        self.end = Some(end.clone());
        let inode = f.inode.clone();
        let done = Box::new(move |result| {
            *lock(&end) = Some(result);
            inode.event.notify();
        });
        let (node, fh) = (f.handle.node, f.handle.fh);
        f.cache.server.submit_fsync(node, fh, self.data_only, done);
        // Perhaps at once.
        self.step()
    }
}
