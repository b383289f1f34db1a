//! Writing back what is dirty, making it durable, and closing.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use super::{File, PAGE};
use crate::cache::{Flush, errno};
use crate::pending::{Pending, Step};
use uvfs_sys::lock;

impl File {
    /// Writes what is dirty and makes it durable, as fdatasync(2).
    ///
    /// # Errors
    /// That of a writeback that failed since this file last heard of one (its pages stay dirty,
    /// and are tried again), and what the backend answers.
    pub fn sync_data(&self) -> io::Result<()> {
        self.sync(0, u64::MAX, true)
    }

    /// Writes what is dirty and makes data and attributes durable, as fsync(2).
    ///
    /// # Errors
    /// As [`File::sync_data`].
    pub fn sync_all(&self) -> io::Result<()> {
        self.sync(0, u64::MAX, false)
    }

    /// Starts [`File::sync_all`], or with `data_only` [`File::sync_data`]: of what is written when
    /// this is called.
    pub fn submit_sync(&self, data_only: bool) -> Pending<()> {
        let f = &*self.0;
        if let Err(e) = self.retried(|| Ok(())) {
            return Pending::ready(&f.cache, &f.inode, Err(e));
        }
        let step = SyncStep {
            file: self.clone(),
            data_only,
            flush: f.inode.start_flush(),
            end: None,
        };
        Pending::new(&f.cache, &f.inode, step)
    }

    /// Writes what is dirty of a range, as sync_file_range(2): `wait` for it, or only start. Nothing
    /// is made durable.
    ///
    /// # Errors
    /// When waiting, that of a writeback that failed since this file last heard of one.
    pub fn write_back(&self, offset: u64, len: u64, wait: bool) -> io::Result<()> {
        let (first, last) = (offset / PAGE, offset.saturating_add(len.max(1) - 1) / PAGE);
        if wait {
            return self.sync_range(first, last);
        }
        self.0.inode.write_range(first, last);
        Ok(())
    }

    /// Writes what is dirty and closes the file. Dropping a file closes it too, and starts the
    /// writing, but reports nothing.
    ///
    /// # Errors
    /// That of a writeback that failed since this file last heard of one.
    pub fn close(self) -> io::Result<()> {
        let f = &*self.0;
        if !f.wrote.load(Ordering::Relaxed) {
            return f
                .inode
                .errors
                .check(&f.errors)
                .map_or(Ok(()), |code| Err(errno(code)));
        }
        self.sync_range(0, u64::MAX)?;
        // The pages are what the server now has: worth keeping for the next open.
        if let Ok(attr) = f.cache.backend.files().getattr(f.inode.node) {
            f.inode.saw(attr.mtime, attr.size);
        }
        Ok(())
    }

    /// Writes a range and reports an error that this open file has not heard of.
    pub(super) fn sync_range(&self, first: u64, last: u64) -> io::Result<()> {
        let f = &*self.0;
        let written = self.retried(|| f.inode.write_and_wait(first, last));
        match f.inode.errors.check(&f.errors) {
            Some(code) => Err(errno(code)),
            None => written,
        }
    }

    /// Writes a range and makes what the server has of the file durable.
    pub(super) fn sync(&self, first: u64, last: u64, data_only: bool) -> io::Result<()> {
        let f = &*self.0;
        self.sync_range(first, last)?;
        // Data that the server had taken was in the file when it went, and is not to be written again.
        self.retried(|| {
            let backend = &f.cache.backend;
            backend.files().fsync(f.handle.node, f.handle.fh, data_only)
        })
    }

    /// Writes what is dirty, if this file has written.
    pub(super) fn flush(&self) -> io::Result<()> {
        if self.0.wrote.load(Ordering::Relaxed) {
            return self.retried(|| self.0.inode.write_and_wait(0, u64::MAX));
        }
        Ok(())
    }
}

/// A submitted sync: first the writeback, then the backend.
struct SyncStep {
    file: File,
    data_only: bool,
    flush: Flush,
    /// The backend's answer, once it was asked.
    end: Option<Arc<Mutex<Option<io::Result<usize>>>>>,
}

impl Step<()> for SyncStep {
    fn step(&mut self) -> Option<io::Result<()>> {
        let f = self.file.0.clone();
        if let Some(end) = &self.end {
            return lock(end).take().map(|result| result.map(drop));
        }
        let written = f.inode.step_flush(&mut self.flush)?;
        let failed = f.inode.errors.check(&f.errors).map(errno);
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
        f.cache
            .backend
            .files()
            .submit_fsync(node, fh, self.data_only, done);
        // Perhaps at once.
        self.step()
    }
}
