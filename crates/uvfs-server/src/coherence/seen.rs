//! Which pages of a node the kernel may have read since they were invalidated.

use std::time::Duration;

use foldhash::HashSet;
use uvfs_io::ops;
use uvfs_proto::abi;

use super::{Coherence, Shard};

/// Nodes of a shard whose invalidated pages are remembered; more are only there when clients change
/// very many files of a mount.
const MOST_SEEN: usize = 4096;
/// Pages of a node that are remembered one by one.
const MOST_PAGES: usize = 1 << 16;
/// How long the answer to a write of the kernel's waits for its pages to be dropped. They can only
/// be locked if the kernel threw them away by itself, and then they have to be answered first.
const DROP_WRITTEN: Duration = Duration::from_millis(50);

/// Pages that the kernel may have.
pub(super) enum Seen {
    These(HashSet<u64>),
    All,
}

impl Seen {
    pub(super) fn contains(&self, page: u64) -> bool {
        match self {
            Self::These(pages) => pages.contains(&page),
            Self::All => true,
        }
    }

    fn add(&mut self, pages: std::ops::RangeInclusive<u64>) {
        if let Self::These(these) = self {
            these.extend(pages);
            if these.len() > MOST_PAGES {
                *self = Self::All;
            }
        }
    }

    fn remove(&mut self, gone: &std::ops::RangeInclusive<u64>) {
        match self {
            _ if *gone.start() == 0 && *gone.end() == *pages(0, u64::MAX).end() => {
                *self = Self::These(HashSet::default());
            }
            Self::These(these) => these.retain(|page| !gone.contains(page)),
            Self::All => {}
        }
    }
}

/// The pages of some bytes of a file.
pub(super) fn pages(offset: u64, len: u64) -> std::ops::RangeInclusive<u64> {
    offset / 4096..=offset.saturating_add(len.saturating_sub(1)) / 4096
}

impl Shard {
    /// The kernel is about to drop a range of a node's pages; with a `len` of 0, all from there on,
    /// and with a negative offset none.
    pub(super) fn drops(&mut self, node: u64, offset: i64, len: i64) {
        let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) else {
            return;
        };
        if self.seen.len() >= MOST_SEEN && !self.seen.contains_key(&node) {
            self.seen.clear();
        }
        let len = if len == 0 { u64::MAX } else { len };
        let nothing = || Seen::These(HashSet::default());
        let seen = self.seen.entry(node).or_insert_with(nothing);
        seen.remove(&pages(offset, len));
    }
}

impl Coherence {
    /// Notes the pages of a read of the kernel's that begins, as it may bring back pages that were invalidated. Does
    /// nothing in a mount without clients, unless a file is open both ways ([`Coherence::mixes`]).
    pub(crate) fn sees(&self, node: u64, arg: &abi::ReadIn, room: usize) {
        if !self.mixes() && !self.tracks() {
            return;
        }
        if let Some(seen) = self.shard(node).seen.get_mut(&node) {
            // No more than a request has room for.
            let size = u64::from(arg.size).min(room as u64);
            seen.add(pages(arg.offset, size));
        }
    }

    /// A write of the kernel's has been applied. The kernel puts the data into its page and lets go
    /// of it before it sends the request. If the page was dropped in between, and read again before
    /// the data was there, the kernel now has an old page: it goes before the write is answered.
    pub(super) async fn drop_written(&self, node: u64, arg: abi::WriteIn) {
        let seen = {
            let shard = self.shard(node);
            let mut written = pages(arg.offset, arg.size.into());
            let seen = shard.seen.get(&node);
            seen.is_some_and(|seen| written.any(|page| seen.contains(page)))
        };
        if seen {
            let drops = self.invalidate(node, arg.offset as i64, arg.size.into());
            ops::within(DROP_WRITTEN, drops).await;
        }
    }
}
