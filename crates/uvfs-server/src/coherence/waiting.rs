//! A request that waits for leases to come back.

use crate::interrupt::{Cause, Waits, interrupted, is_dying};
use crate::lease::Recall;
use rustix::io::Errno;
use smallvec::SmallVec;
use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Instant;
use uvfs_sys::lock;

use super::{CROWD, Caller, Coherence, LEASE_WAITS, Shard};

/// A request that waits for leases: until it is dropped, none is granted.
pub(super) struct Waiting<'a> {
    coherence: &'a Coherence,
    node: u64,
    since: Instant,
    /// Of the kernel's requests, which take one of a queue's entries each.
    caller: Option<Caller<'a>>,
    /// The kernel said that the caller has got a signal.
    interrupted: bool,
}

impl<'a> Waiting<'a> {
    /// Begins; `shard` is the node's.
    pub(super) fn begin(
        coherence: &'a Coherence,
        shard: &mut Shard,
        node: u64,
        caller: Option<Caller<'a>>,
    ) -> Self {
        shard.table.wait(node);
        if caller.is_some() {
            LEASE_WAITS.set(LEASE_WAITS.get() + 1);
        }
        Self {
            coherence,
            node,
            since: Instant::now(),
            caller,
            interrupted: false,
        }
    }

    /// Has the holders asked to give back what is in the request's way, and cuts off those that take too
    /// long.
    pub(super) fn recall(&self, recalls: &[Recall], sent: &mut SmallVec<[Recall; 4]>) {
        let crowded = self.caller.is_some() && LEASE_WAITS.get() > CROWD;
        for &recall in recalls {
            let links = &self.coherence.attached;
            let Some(holder) = lock(links).links.get(&recall.who).cloned() else {
                continue;
            };
            if !sent.contains(&recall) && holder.recall(self.node, recall) {
                sent.push(recall);
            }
            if holder.is_late(self.node, self.since, crowded) && holder.cut_off() {
                tracing::warn!(
                    client = holder.id,
                    node = self.node,
                    crowded,
                    "a client did not return a lease in time: it is cut off"
                );
                holder.end();
            }
        }
    }

    /// Waits until the node's leases have changed since `version`, or a while.
    ///
    /// # Errors
    /// EINTR when the caller is being killed. Other signals wait, as on every file system but those
    /// of networks: no program expects that a stat is interrupted.
    pub(super) async fn changed(&mut self, version: u64) -> Result<(), Errno> {
        let mut changed = pin!(self.coherence.changed(self.node, version));
        let Some(Caller {
            interrupts,
            cx,
            opcode,
        }) = self.caller
        else {
            changed.await;
            return Ok(());
        };
        if self.interrupted {
            // The kernel says it once, whatever signal comes next.
            changed.await;
        } else {
            let wait = std::future::poll_fn(|cx| match interrupted() {
                true => Poll::Ready(true),
                false => changed.as_mut().poll(cx).map(|()| false),
            });
            let waits = Waits {
                since: Some(self.since),
                ..Waits::new(cx, opcode, self.node, Cause::Lease)
            };
            self.interrupted = interrupts.guard(waits, wait).await == Some(true);
        }
        match self.interrupted && is_dying(cx.pid) {
            true => Err(Errno::INTR),
            false => Ok(()),
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.caller.is_some() {
            LEASE_WAITS.set(LEASE_WAITS.get() - 1);
        }
        self.coherence.shard(self.node).table.waited(self.node);
    }
}
