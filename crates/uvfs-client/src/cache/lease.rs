//! Leases: whether an inode's pages may be used, and what happens when the server recalls one.
//!
//! Every cached call looks at the lease under the same lock as at the pages, so a recall that takes
//! it away there has no call in progress behind it. Then it writes what is dirty, drops the pages
//! and gives the lease back. Without a lease calls go to the server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Cache;
use super::inode::{Inode, State};
use super::leased::{FIRST_PAUSE, LONGEST_PAUSE, SOON};
use crate::connection::Events;
use crate::stats::Stats;
use crate::types::{Attr, Grant, Lease, Reattached, Recall};
use rustix::io::{self, Errno};
use uvfs_sys::lock;

/// How long an append waits for a lease, without which it can't know the end of the file.
const APPEND_PATIENCE: Duration = Duration::from_secs(10);

impl State {
    /// Whether the size is known here, if not better than the server: under a lease, or because of
    /// what an earlier server was not given.
    pub(super) fn knows_size(&self) -> bool {
        self.lease.mode >= Lease::Read || self.lease.orphan
    }
}

impl Inode {
    /// Waits until no recall is being answered; what is cached then, and under which number.
    fn settled(&self) -> (Lease, u64) {
        let look = || {
            let st = self.read_state();
            (!st.lease.recalling).then_some((st.lease.mode, st.lease.seq))
        };
        match look() {
            Some(found) => found,
            None => self.cache.wait(&self.event, look),
        }
    }

    /// Whether the client has a lease of at least `want`. Asks the server for one, unless it was refused or recalled
    /// just now.
    pub(crate) fn lease(self: &Arc<Self>, want: Lease) -> bool {
        if self.settled().0 >= want {
            return true;
        }
        if self.read_state().lease.again > Instant::now() {
            return false;
        }
        let _one = lock(&self.asking);
        if !self.settle_orphans() {
            return false;
        }
        let changes = {
            let st = self.read_state();
            if st.lease.mode >= want && !st.lease.recalling {
                return true;
            }
            if st.lease.again > Instant::now() {
                return false;
            }
            st.lease.changes
        };
        let grant = self.cache.server.lease(self.node, want);
        let mut freed = Vec::new();
        let mut st = self.state();
        st.lease.taken = matches!(grant, Ok(Grant::Taken(_)));
        let (session, seq, attr) = match grant {
            Ok(Grant::Granted { session, seq, attr }) => (session, seq, attr),
            Ok(Grant::Refused(retry) | Grant::Taken(retry)) => {
                st.lease.again = Instant::now() + retry;
                return false;
            }
            // The call itself will report the error.
            Err(_) => return false,
        };
        if session < st.session || st.lease.orphan {
            // Of a server that is gone.
            return false;
        }
        if session > st.session {
            // The server came back since: the inode may have another number there.
            (st.session, st.server_node, _) = self.cache.server.names(self.node, 0);
        }
        let useless = st.lease.recalled >= seq || st.lease.recalling;
        if useless || (st.lease.mode == Lease::None && st.lease.changes != changes) {
            // The lease was recalled before its grant arrived, or the file has changed since the grant.
            st.lease.mode = Lease::None;
            debug_assert_eq!(st.dirty, 0, "pages become dirty under a write lease only");
            self.invalidate(&mut st, 0, u64::MAX, &mut freed);
            drop(st);
            self.cache.free(&mut freed);
            self.cache.server.return_lease(self.node, seq, Lease::None);
            return false;
        }
        if st.lease.mode == Lease::None {
            st.size = attr.size;
            st.server_size = attr.size;
        }
        st.lease.mode = want;
        st.lease.seq = seq;
        st.lease.granted = Instant::now();
        true
    }

    /// Waits for a lease to write; its number and the size of the file, which stays so as long as
    /// the lease does. Nothing when it can't be had for a long time, or for an unknown one.
    pub(crate) fn append_lease(self: &Arc<Self>) -> Option<(u64, u64)> {
        let began = Instant::now();
        loop {
            if self.lease(Lease::Write) {
                let st = self.read_state();
                if st.lease.mode == Lease::Write {
                    return Some((st.lease.seq, st.size));
                }
            } else if began.elapsed() > APPEND_PATIENCE || !self.cache.server.is_alive() {
                return None;
            }
            let wait = {
                let st = self.read_state();
                let wait = st.lease.again.saturating_duration_since(Instant::now());
                if st.lease.taken || wait > APPEND_PATIENCE {
                    return None;
                }
                wait.clamp(Duration::from_micros(50), Duration::from_millis(20))
            };
            std::thread::sleep(wait);
        }
    }

    /// The size now, from the cache if it may be cached.
    ///
    /// # Errors
    /// The server's error.
    pub(crate) fn current_size(self: &Arc<Self>) -> io::Result<u64> {
        if self.lease(Lease::Read) {
            let st = self.read_state();
            if st.lease.mode >= Lease::Read {
                return Ok(st.size);
            }
        }
        let settled = {
            let _one = lock(&self.asking);
            self.settle_orphans()
        };
        if !settled {
            // The server has not got all that the file is.
            return match self.cache.server.is_alive() {
                true => Ok(self.size()),
                false => Err(Errno::NOTCONN),
            };
        }
        self.cache.server.getattr(self.node).map(|attr| attr.size)
    }

    /// The attributes now: the server's, with the size that this client knows better. Dirty pages
    /// are written first, as the times come with it.
    ///
    /// # Errors
    /// The server's error.
    pub(crate) fn current_attr(self: &Arc<Self>) -> io::Result<Attr> {
        self.settled();
        if self.read_state().is_unwritten() {
            // A failure is for the next fsync or close to tell.
            let _ = self.write_and_wait(0, u64::MAX);
        }
        let mut attr = self.cache.server.getattr(self.node)?;
        let st = self.read_state();
        if st.knows_size() {
            attr.size = st.size;
        }
        Ok(attr)
    }

    /// Writes what is left of a session before this one, and drops it: others may change the file
    /// until there is a lease again. False when that can't be.
    fn settle_orphans(self: &Arc<Self>) -> bool {
        if !self.read_state().lease.orphan {
            return true;
        }
        if self.write_and_wait(0, u64::MAX).is_err() {
            return false;
        }
        let mut freed = Vec::new();
        let mut st = self.state();
        let done = !st.is_unwritten();
        if done {
            self.invalidate(&mut st, 0, u64::MAX, &mut freed);
            st.lease.orphan = false;
        }
        drop(st);
        self.cache.free(&mut freed);
        done
    }

    /// A server came back. Nothing is leased any more, and what is clean goes. Dirty pages get the
    /// numbers that the new server knows, or go where they can't or must not be written.
    fn reattached(self: &Arc<Self>, found: &Reattached<'_>) {
        let again = found.nodes.get(&self.node).copied();
        let again = again.unwrap_or(Err(Errno::STALE));
        let mut freed = Vec::new();
        let mut st = loop {
            // All of them fail at once.
            self.wait_in_flight(0, u64::MAX, u64::MAX);
            let st = self.state();
            if st.in_flight.is_empty() {
                break st;
            }
        };
        st.lease.mode = Lease::None;
        st.lease.again = Instant::now();
        st.lease.changed();
        st.retry_at = None;
        st.failing = None;
        self.invalidate(&mut st, 0, u64::MAX, &mut freed);
        let dirty = st.dirty > 0;
        st.session = found.session;
        let handles = found.handles.iter().filter(|(name, _)| name.0 == self.node);
        let handles = handles.filter_map(|(name, fh)| Some((name.1, fh.ok()?)));
        let handles = handles.collect();
        let node = again.map_or(u64::MAX, |again| again.node);
        self.rename(&mut st, node, handles);
        let writer = st.writer.as_ref().map(|writer| {
            let handle = found.handles.get(&(self.node, writer.fh));
            handle.copied().unwrap_or(Err(Errno::STALE))
        });
        // Whether what is dirty goes, and with which error.
        let gone = match (again, writer) {
            _ if found.written => Some(found.lost.then_some(Errno::IO)),
            (Err(code), _) | (_, Some(Err(code))) => Some(Some(code)),
            // Another program's changes are newer.
            (Ok(again), _) if again.mtime > found.since => Some(Some(Errno::IO)),
            _ => None,
        };
        if let Some(code) = gone {
            if let Some(error) = code.filter(|_| dirty) {
                let changed = again.is_ok_and(|again| again.mtime > found.since);
                tracing::error!(node = self.node, %error, changed, "dirty pages are lost");
                self.errors.set(error);
            }
            self.drop_pages(&mut st, &mut freed);
        }
        st.lease.orphan = dirty && gone.is_none();
        drop(st);
        self.cache.free(&mut freed);
        self.event.notify();
        self.closed();
    }

    /// The lease of an inode that is no longer in use, to be given back.
    pub(super) fn take_lease(&self) -> Option<u64> {
        let mut st = self.state();
        let had = std::mem::replace(&mut st.lease.mode, Lease::None);
        (had != Lease::None).then_some(st.lease.seq)
    }

    /// Answers a recall: writes what is dirty, drops what may not be kept, gives the lease back.
    pub(super) fn recall(self: &Arc<Self>, recall: Recall) {
        let session = self.cache.server.session();
        // Else the pages are not this recall's any more.
        let same = || session.is_some() && self.cache.server.session() == session;
        {
            let mut st = self.state();
            let lease = &mut st.lease;
            if lease.mode == Lease::None || recall.seq < lease.seq {
                // Given back already, or not known to be had yet: the call that asks finds out.
                lease.recalled = lease.recalled.max(recall.seq);
                drop(st);
                let server = &self.cache.server;
                return server.return_lease(self.node, recall.seq, Lease::None);
            }
            // A newer number: we have the older one until the answer that brings it comes.
            lease.recalled = lease.recalled.max(recall.seq);
            lease.mode = lease.mode.min(if recall.seq == lease.seq {
                recall.keep
            } else {
                Lease::None
            });
            lease.recalling = true;
            lease.pause = if lease.granted.elapsed() < SOON {
                (lease.pause * 2).min(LONGEST_PAUSE)
            } else {
                FIRST_PAUSE
            };
            lease.again = Instant::now() + lease.pause;
        }
        let written = self.write_and_wait(0, u64::MAX);
        let mut freed = Vec::new();
        let mut st = self.state();
        if let Err(error) = written
            && same()
        {
            // As in the kernel: every file hears of it, and the data is gone.
            tracing::error!(node = self.node, %error, "dirty pages are lost: writeback failed");
            drop(st);
            self.wait_in_flight(0, u64::MAX, u64::MAX);
            st = self.state();
            st.lease.mode = Lease::None;
        }
        if st.lease.mode == Lease::None && !st.lease.orphan && same() {
            self.drop_pages(&mut st, &mut freed);
        }
        let keep = st.lease.mode;
        st.lease.recalling = false;
        drop(st);
        self.cache.free(&mut freed);
        self.cache.server.return_lease(self.node, recall.seq, keep);
        self.event.notify();
    }

    fn drop_pages(&self, st: &mut State, freed: &mut Vec<u32>) {
        let size = st.size;
        self.truncate_pages(st, 0, freed);
        st.size = size;
    }
}

impl Events for Cache {
    fn reattached(&self, found: &Reattached<'_>) {
        for inode in self.inodes() {
            inode.reattached(found);
        }
        self.wake_flusher();
    }

    /// Of an inode that may not be known here any more.
    fn recalled(&self, recall: Recall) {
        match self.find(recall.node) {
            Some(inode) => inode.recall(recall),
            None => self
                .server
                .return_lease(recall.node, recall.seq, Lease::None),
        }
    }

    fn stats(&self) -> Stats {
        Cache::stats(self)
    }
}
