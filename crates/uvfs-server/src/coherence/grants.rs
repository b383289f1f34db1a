//! Leases of clients: asked for, granted and returned.

use crate::fs::Origin;
use crate::lease::{Access, Ask, LeaseMode, Link};
use rustix::io::Errno;
use std::sync::atomic::Ordering;
use std::time::Duration;
use uvfs_sys::lock;

use super::access::Use;
use super::{Coherence, Entered, PASSING};

/// Why a lease is not granted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refusal {
    /// After how long it is worth asking again.
    pub(crate) retry: Duration,
    /// The kernel reads and writes the node by itself; no lease or request is in the way.
    pub(crate) passing: bool,
}

impl Refusal {
    fn of_passing(retry: Duration) -> Self {
        let passing = true;
        Self { retry, passing }
    }
}

impl Coherence {
    /// Whether a node's attributes in a client's answer may be another holder's to change.
    pub(super) fn is_anothers(&self, link: &Link, node: u64) -> bool {
        self.writes_back.load(Ordering::Relaxed)
            || self.shard(node).table.is_anothers(node, link.id)
    }

    /// Lets a client look at a node's attributes, once what others may have changed is there.
    pub(crate) async fn looks(&self, link: &Link, node: u64) -> Result<Entered<'_>, Errno> {
        self.write_back(node).await;
        let what = Use::data(node, Access::Look);
        self.enter(Origin::Client(link), what, None).await
    }

    /// Grants a lease: its number, or why not.
    pub(crate) async fn grant(
        &self,
        link: &Link,
        node: u64,
        mode: LeaseMode,
    ) -> Result<u64, Refusal> {
        const SOON: Refusal = Refusal {
            retry: Duration::from_millis(1),
            passing: false,
        };
        if self.alone.load(Ordering::Relaxed) {
            return Err(Refusal::of_passing(Duration::from_secs(3600)));
        }
        if self.shard(node).table.passes(node) {
            return Err(Refusal::of_passing(PASSING));
        }
        if link.is_over() || !self.settled() {
            return Err(SOON);
        }
        let access = match mode {
            LeaseMode::Read => Access::Look,
            LeaseMode::Write => Access::Change,
        };
        let mut asked = self.ask(link, node, mode).await;
        if asked.is_none() {
            // Others' leases come back first. Another client may be faster; then the caller does without.
            let what = Use::data(node, access);
            let entered = self.enter(Origin::Client(link), what, None).await;
            drop(entered.map_err(|_| SOON)?);
            asked = self.ask(link, node, mode).await;
        }
        let seq = asked.ok_or(SOON)?;
        self.epoch.fetch_add(1, Ordering::SeqCst);
        Ok(seq)
    }

    pub(super) async fn ask(&self, link: &Link, node: u64, mode: LeaseMode) -> Option<u64> {
        let kernel = self.kernel.get();
        let asked = {
            let mut shard = self.shard(node);
            let mounted = kernel.is_some() && !shard.table.is_unknown_to_kernel(node);
            shard.table.ask(node, link.id, mode, mounted)
        };
        match (asked, kernel) {
            (Ask::Granted(seq), _) => Some(seq),
            (Ask::Invalidate, Some(_)) => {
                self.invalidate(node, 0, 0).await;
                self.shard(node).table.granted(node, link.id)
            }
            _ => None,
        }
    }

    /// A lease comes back.
    pub(crate) fn returned(&self, link: &Link, node: u64, seq: u64, keep: Option<LeaseMode>) {
        let mut shard = self.shard(node);
        shard.table.returned(node, link.id, seq, keep);
        link.gave_back(node);
        shard.changed(node);
    }

    /// A client forgot a node, and with it its lease.
    pub(crate) fn forget(&self, link: &Link, node: u64) {
        let mut shard = self.shard(node);
        shard.table.forget(node, link.id);
        link.gave_back(node);
        shard.changed(node);
    }

    /// A client that has ended needs its leases of these nodes no more.
    pub(crate) fn give_up(&self, link: &Link, which: impl Fn(u64) -> bool) {
        for shard in &self.shards {
            let mut shard = lock(shard);
            for node in shard.table.nodes_of(link.id) {
                if which(node) {
                    shard.table.forget(node, link.id);
                    shard.changed(node);
                }
            }
        }
    }

    /// Whether a client may have dirty pages of a node.
    pub(crate) fn writes(&self, link: &Link, node: u64) -> bool {
        self.shard(node).table.writes(node, link.id)
    }
}
