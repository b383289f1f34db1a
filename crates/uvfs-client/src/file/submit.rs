//! Calls that are begun here and end in another thread: what asynchronous I/O interfaces of other
//! programs are made of.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Weak;
use std::time::Duration;

use rustix::io::Errno;

use super::{File, Flags, checked_end};
use crate::cache::{Cache, Direct, Then};
use crate::connection::pages::Op;

/// The data of a direct read, to be copied out of the cache's pages.
pub struct Landed<'a> {
    direct: &'a Direct,
    len: usize,
}

impl Landed<'_> {
    /// Bytes that were read.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the file ended before.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies it into buffers, one after another; the rest of them stays as it is.
    pub fn copy_to(&self, bufs: &mut [IoSliceMut<'_>]) {
        let mut at = 0;
        for buf in bufs {
            let n = buf.len().min(self.len - at);
            self.direct.copy_out_from(at, &mut buf[..n]);
            at += n;
        }
    }
}

/// Drives begun calls of a client on from a thread that waits for them. Does not keep the client.
#[derive(Clone, Debug)]
pub struct Driver(Weak<Cache>);

impl Driver {
    /// Ends what has been answered, for a short while or until `done`, in this thread.
    pub fn drive(&self, mut done: impl FnMut() -> bool) {
        if let Some(cache) = self.0.upgrade() {
            cache.io.poll(&mut done);
        }
    }

    /// Counts the time that a caller waited for begun calls.
    pub fn waited(&self, time: Duration) {
        if let Some(cache) = self.0.upgrade() {
            cache.counters.waited_ns(time.as_nanos() as u64);
        }
    }

    /// Whether it is of the same client as another one.
    pub fn is(&self, other: &Self) -> bool {
        self.0.ptr_eq(&other.0)
    }
}

impl File {
    /// Gives the driver of this file's calls.
    pub fn driver(&self) -> Driver {
        Driver(std::sync::Arc::downgrade(&self.0.cache))
    }

    /// Begins a direct read; `done` is called with what came, once, in this thread or another, and
    /// must not wait for other calls. False where it can't be done without waiting (it isn't
    /// direct, or larger than the cache's bounce pages allow at once): then nothing was begun.
    pub fn begin_read_at(
        &self,
        len: usize,
        offset: u64,
        flags: Flags,
        done: impl FnOnce(Result<Landed<'_>, Errno>) + Send + 'static,
    ) -> bool {
        let f = &*self.0;
        if !flags.contains(Flags::DIRECT)
            || !f.readable
            || len == 0
            || checked_end(offset, len).is_err()
            || f.inode.direct_round(len) < len
        {
            return false;
        }
        f.cache.counters.direct_calls(1);
        if let Err(error) = self.retried(|| Ok(())) {
            done(Err(error));
            return true;
        }
        if let Err(error) = f.inode.prepare_direct(Op::Read, offset, len) {
            done(Err(error));
            return true;
        }
        let cache = f.cache.clone();
        let then = Then(Box::new(move |direct: &Direct| {
            let landed = direct.result().map(|len| Landed { direct, len });
            if let Ok(landed) = &landed {
                cache.counters.bytes_out(landed.len as u64);
            }
            done(landed);
        }));
        let dontcache = flags.contains(Flags::DONTCACHE);
        f.inode
            .start_read(&f.handle, offset, len, dontcache, Some(then));
        true
    }

    /// Begins a direct write within the file. The data is copied before this returns; the rest as
    /// for [`File::begin_read_at`]. False also for what makes the file longer, or has to be durable.
    pub fn begin_write_at(
        &self,
        bufs: &[IoSlice<'_>],
        offset: u64,
        flags: Flags,
        done: impl FnOnce(Result<usize, Errno>) + Send + 'static,
    ) -> bool {
        let f = &*self.0;
        let len: usize = bufs.iter().map(|buf| buf.len()).sum();
        if !self.is_sent_whole(offset, len, flags) {
            return false;
        }
        // Held until the write is counted as under way.
        let _within = match self.prepare_write(offset, len) {
            Ok(Some(within)) => within,
            Ok(None) => return false,
            Err(error) => {
                done(Err(error));
                return true;
            }
        };
        f.cache.counters.bytes_in(len as u64);
        let then = Then(Box::new(move |direct: &Direct| done(direct.result())));
        let dontcache = flags.contains(Flags::DONTCACHE);
        f.inode
            .start_write(&f.handle, offset, bufs, dontcache, Some(then));
        true
    }

    /// Writes what is dirty, and begins to make data (and, unless `data_only`, attributes) durable;
    /// `done` as for [`File::begin_read_at`].
    pub fn begin_sync(
        &self,
        data_only: bool,
        done: impl FnOnce(Result<(), Errno>) + Send + 'static,
    ) {
        if let Err(error) = self.sync_range(0, u64::MAX) {
            return done(Err(error));
        }
        let f = &*self.0;
        // It stays open until then.
        let handle = f.handle.clone();
        let end = Box::new(move |result: Result<usize, Errno>| {
            done(result.map(drop));
            drop(handle);
        });
        f.cache
            .server
            .submit_fsync(f.handle.node, f.handle.fh, data_only, end);
    }
}
