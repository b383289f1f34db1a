//! The lifetimes that the kernel may be given in a reply.

use std::sync::atomic::Ordering;
use std::time::Duration;

use uvfs_proto::abi;
use uvfs_proto::reply;
use uvfs_proto::request::Operation;

use super::Coherence;
use super::kernel_cache::{KernelCache, Key};
use crate::fs::{FileSystem, Node};
use crate::reply::{Listed, Reply};
use crate::request::Request;

/// A moment, for telling whether something that was read since may be old.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Since {
    /// Of attributes that leases are about.
    pub(super) epoch: u64,
    /// Of names, and of attributes that change with them.
    pub(super) last: u64,
}

impl Since {
    /// Before anything was noted.
    pub(crate) const ALWAYS: Self = Self { epoch: 0, last: 0 };
}

impl Coherence {
    /// Whether the kernel can't have anything of a node.
    pub(super) fn is_unknown_to_kernel(&self, node: u64) -> bool {
        self.shard(node).table.is_unknown_to_kernel(node)
    }

    /// Whether an answer to the kernel, of what was read since `since`, may give `key` a lifetime.
    fn may_give(&self, key: Key, since: Since) -> bool {
        let (given, tracks) = (self.given(), self.tracks());
        if tracks && given.is_contended(key) {
            return false;
        }
        given.give(key, tracks);
        // Only now: a later change finds what was noted.
        !given.changed_since(key, since.last)
    }

    /// An entry is about to be given to the kernel, under the name that it may be kept by. An answer that may
    /// be old already loses its lifetime.
    pub(crate) fn shows_entry(
        &self,
        name: Option<(u64, &[u8])>,
        entry: &mut abi::EntryOut,
        since: Since,
    ) {
        let lifetime = reply::duration(entry.entry_valid, entry.entry_valid_nsec);
        if let Some((parent, name)) = name
            && !lifetime.is_zero()
            && !self.may_give(Key::name(parent, name), since)
        {
            entry.set_entry_ttl(Duration::ZERO);
        }
        if entry.nodeid == 0 {
            return;
        }
        if self.tracks() {
            self.shard(entry.nodeid)
                .table
                .mark_known_to_kernel(entry.nodeid);
        }
        let lifetime = reply::duration(entry.attr_valid, entry.attr_valid_nsec);
        if !lifetime.is_zero() && !self.may_give(Key::attributes(entry.nodeid), since) {
            entry.set_attr_ttl(Duration::ZERO);
        }
    }

    fn shows_attributes(&self, node: u64, secs: &mut u64, nanos: &mut u32, since: Since) {
        let lifetime = reply::duration(*secs, *nanos);
        if !lifetime.is_zero() && !self.may_give(Key::attributes(node), since) {
            (*secs, *nanos) = (0, 0);
        }
    }

    /// A request of the kernel's is about to be answered. An answer that may be old already loses its lifetime.
    pub(crate) fn shows<F: FileSystem>(
        &self,
        fs: &F,
        request: &Request<'_>,
        reply: &mut Reply,
        since: Since,
    ) {
        let node = request.node;
        match reply {
            Reply::Entry(entry) | Reply::Created(entry, _) => {
                let name = request.entry_name().map(|name| (node, name.to_bytes()));
                self.shows_entry(name, entry, since);
            }
            Reply::Attributes(out) => {
                self.shows_attributes(node, &mut out.attr_valid, &mut out.attr_valid_nsec, since);
            }
            Reply::Statx(out) => {
                self.shows_attributes(node, &mut out.attr_valid, &mut out.attr_valid_nsec, since);
            }
            Reply::Listing(listed) => {
                self.lists(fs, listed, since, |name, entry| {
                    self.shows_entry(Some((node, name)), entry, since);
                });
                self.shows_pages(node, since);
            }
            // A listing that the kernel keeps would only be looked at again when the directory's
            // time has changed, and that may be no finer than the clock's ticks.
            Reply::Opened(opened)
                if matches!(request.operation, Operation::Opendir(_)) && self.tracks() =>
            {
                let keeps = abi::OpenFlags::CACHE_DIR | abi::OpenFlags::KEEP_CACHE;
                opened.out.open_flags &= !keeps.bits();
            }
            _ => {}
        }
    }

    /// A listing is about to be given to the kernel or a client. Of an entry whose attributes another client may know
    /// better, only the name stays, to be looked up when it is used; the others are shown to `each`.
    pub(super) fn lists<F: FileSystem>(
        &self,
        fs: &F,
        listed: &mut Listed,
        since: Since,
        each: impl Fn(&[u8], &mut abi::EntryOut),
    ) {
        listed.entries(|name, entry| {
            if entry.nodeid != 0 && !self.may_keep(entry.nodeid, since) {
                fs.forget(Node(entry.nodeid), 1);
                *entry = abi::EntryOut::default();
            } else {
                each(name, entry);
            }
        });
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Where things stand that are read now; see [`Coherence::may_keep`].
    pub(crate) fn now(&self) -> Since {
        Since {
            epoch: self.epoch(),
            last: self.given.get().map_or(0, KernelCache::last),
        }
    }

    /// Whether the kernel may keep attributes of a node that were read since `since`, as far as
    /// leases are concerned.
    pub(crate) fn may_keep(&self, node: u64, since: Since) -> bool {
        !self.tracks() || (self.shard(node).table.steady(node) && self.epoch() == since.epoch)
    }
}
