//! Tracks how the kernel has each file open: whether its page cache may hold data that the file system does not
//! have yet, and whether pages that it reads may be older than what a direct write has changed.
//!
//! - Dirty pages: a program stores through a mapping, or the kernel writes back later (`-o writeback`). lseek(2) with
//!   SEEK_DATA and SEEK_HOLE does not write them back, so what the file system takes for a hole has to be written
//!   back first ([`Coherence::write_back_hole`]).
//! - Old pages: the kernel drops the pages of a direct write's range as the write is submitted. A read for the page
//!   cache may bring one back before the write is applied, and the kernel drops it again only after a synchronous
//!   write (Linux 6.16), not after one by libaio or io_uring. So the pages that were read since go before the write
//!   is answered ([`Coherence::direct_write`]).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use smallvec::SmallVec;
use uvfs_io::ops;
use uvfs_proto::abi::{self, OpenFlags, WriteFlags};

use super::seen::pages;
use super::{Coherence, Shard};
use crate::fs::OFlags;
use crate::request::DEPTH;

/// A direct write that may not wait for its pages does so for this long.
const CROWDED_WAIT: Duration = Duration::from_millis(50);

/// How the kernel uses an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Use {
    fh: u64,
    access: OFlags,
    /// Reads and writes go past the page cache.
    direct: bool,
    /// It may leave dirty pages.
    dirties: bool,
}

/// The kernel's open files of a node, but for those with a backing file.
#[derive(Debug, Default)]
pub(super) struct Opens(SmallVec<[Use; 2]>);

impl Opens {
    fn caches(&self) -> bool {
        self.0.iter().any(|one| !one.direct)
    }

    /// Whether some open files use the page cache, and others write past it.
    fn is_mixed(&self) -> bool {
        let writes_past = |one: &Use| one.direct && one.access != OFlags::RDONLY;
        self.caches() && self.0.iter().any(writes_past)
    }

    fn is_direct(&self, fh: u64) -> bool {
        self.0.iter().any(|one| one.fh == fh && one.direct)
    }
}

/// Counts that need no lock.
#[derive(Debug, Default)]
pub(super) struct Mixed {
    /// Nodes that are mixed.
    nodes: AtomicUsize,
    /// Direct writes that wait for pages.
    waits: AtomicUsize,
    /// So many may do so for as long as it takes.
    most_waits: AtomicUsize,
}

impl Shard {
    /// Changes a node's open files, and forgets which pages the kernel asked for when nothing follows that any more.
    fn change_opens(&mut self, node: u64, tracks: bool, change: impl FnOnce(&mut Opens)) -> isize {
        let opens = self.opens.entry(node).or_default();
        let before = opens.is_mixed();
        change(opens);
        let after = opens.is_mixed();
        if opens.0.is_empty() {
            self.opens.remove(&node);
        }
        if before && !after && !tracks {
            self.seen.remove(&node);
        }
        isize::from(after) - isize::from(before)
    }
}

impl Coherence {
    fn change_opens(&self, node: u64, change: impl FnOnce(&mut Opens)) {
        let tracks = self.tracks();
        let change = self.shard(node).change_opens(node, tracks, change);
        match change {
            1 => drop(self.mixed.nodes.fetch_add(1, Ordering::SeqCst)),
            -1 => {
                self.mixed.nodes.fetch_sub(1, Ordering::SeqCst);
                // The last reader may leave pages that are older than a write under way.
                if let Some(kernel) = self.kernel.get() {
                    kernel.drop_later(node);
                }
            }
            _ => {}
        }
    }

    /// The kernel is about to be given an open file.
    pub(crate) fn opened(&self, node: u64, flags: OFlags, file: &abi::OpenOut, writes_back: bool) {
        let how = OpenFlags::from_bits_retain(file.open_flags);
        if how.contains(OpenFlags::PASSTHROUGH) {
            return;
        }
        let access = flags & OFlags::RWMODE;
        let past = how.contains(OpenFlags::DIRECT_IO);
        let one = Use {
            fh: file.fh,
            access,
            direct: past || flags.contains(OFlags::DIRECT),
            // A mapping can be stored to if the file is open for both.
            dirties: access == OFlags::RDWR || access == OFlags::WRONLY && writes_back && !past,
        };
        self.change_opens(node, |opens| opens.0.push(one));
    }

    /// The kernel has closed an open file.
    pub(crate) fn released(&self, node: u64, fh: u64, flags: OFlags) {
        if !self.shard(node).opens.contains_key(&node) {
            return;
        }
        let access = flags & OFlags::RWMODE;
        self.change_opens(node, |opens| {
            // Not every file system has a handle of its own for each.
            let is_it = |one: &Use| one.fh == fh && one.access == access;
            if let Some(at) = opens.0.iter().position(is_it) {
                opens.0.swap_remove(at);
            }
        });
    }

    /// Whether the kernel may have dirty pages of a node.
    pub(crate) fn may_be_dirty(&self, node: u64) -> bool {
        let shard = self.shard(node);
        let opens = shard.opens.get(&node);
        opens.is_some_and(|opens| opens.0.iter().any(|one| one.dirties))
    }

    /// Has the kernel write back what is dirty from `begin` to `end`, or to the end of the file; the pages there go.
    /// For a request that holds no page.
    pub(crate) async fn write_back_hole(&self, node: u64, begin: u64, end: Option<u64>) {
        let Ok(offset) = i64::try_from(begin) else {
            return;
        };
        let len = end.map_or(0, |end| end.saturating_sub(begin));
        self.invalidate(node, offset, i64::try_from(len).unwrap_or(0))
            .await;
    }

    /// Takes note that the kernel may have `most` requests under way in the background.
    pub(crate) fn set_background(&self, most: u16) {
        let most = usize::from(most).min(DEPTH) / 4;
        self.mixed.most_waits.store(most, Ordering::Relaxed);
    }

    /// Whether some file is open both for writes past the page cache and for use of it, so that reads for the cache
    /// have to be noted.
    pub(crate) fn mixes(&self) -> bool {
        self.mixed.nodes.load(Ordering::SeqCst) > 0
    }

    /// Whether a write of the kernel's may go past a page cache that others use. Not what comes from the cache, whose
    /// pages wait for the very answer.
    pub(crate) fn may_go_past(&self, arg: &abi::WriteIn) -> bool {
        let from_cache = WriteFlags::from_bits_retain(arg.write_flags).contains(WriteFlags::CACHE);
        !from_cache && (Self::is_direct(arg) || self.mixes())
    }

    fn is_direct(arg: &abi::WriteIn) -> bool {
        OFlags::from_bits_retain(arg.flags).contains(OFlags::DIRECT)
    }

    /// A write of the kernel's, for which [`Coherence::may_go_past`] holds, has been applied. If it went past a page
    /// cache that others use, the pages that the kernel may have read before go.
    pub(crate) async fn direct_write(&self, node: u64, arg: &abi::WriteIn) {
        let asked = Self::is_direct(arg);
        let old = {
            let shard = self.shard(node);
            let Some(opens) = shard.opens.get(&node) else {
                return;
            };
            if !opens.caches() || !(asked || opens.is_direct(arg.fh)) {
                return;
            }
            match shard.seen.get(&node) {
                // Which pages were read is noted from now on.
                None => Some((0, 0)),
                Some(seen) => pages(arg.offset, arg.size.into())
                    .any(|page| seen.contains(page))
                    .then_some((arg.offset, arg.size)),
            }
        };
        let Some((offset, len)) = old else { return };
        let drops = self.invalidate(node, offset as i64, len.into());
        // The kernel waits for pages that reads have locked. Such a read may itself wait in the kernel, until one of
        // the requests ends that it may have under way: so not all of those may wait for pages.
        let _wait = Wait::begin(&self.mixed.waits);
        let most = self.mixed.most_waits.load(Ordering::Relaxed);
        if self.mixed.waits.load(Ordering::SeqCst) <= most {
            drops.await;
        } else {
            ops::within(CROWDED_WAIT, drops).await;
        }
    }
}

/// A direct write that waits for pages.
struct Wait<'a>(&'a AtomicUsize);

impl<'a> Wait<'a> {
    fn begin(waits: &'a AtomicUsize) -> Self {
        waits.fetch_add(1, Ordering::SeqCst);
        Self(waits)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: u64 = 7;

    fn file(fh: u64, flags: OpenFlags) -> abi::OpenOut {
        abi::OpenOut {
            fh,
            open_flags: flags.bits(),
            backing_id: 0,
        }
    }

    #[test]
    fn a_node_is_mixed_while_one_reads_the_cache_and_one_writes_past_it() {
        let coherence = Coherence::default();
        let cached = file(1, OpenFlags::empty());
        let direct = file(2, OpenFlags::DIRECT_IO);
        coherence.opened(NODE, OFlags::RDONLY, &cached, false);
        assert!(!coherence.mixes() && !coherence.may_be_dirty(NODE));
        coherence.opened(NODE, OFlags::WRONLY, &direct, false);
        assert!(coherence.mixes() && !coherence.may_be_dirty(NODE));
        coherence.released(NODE, 1, OFlags::RDONLY);
        assert!(!coherence.mixes());
        // Two without handles of their own.
        let unnumbered = file(0, OpenFlags::empty());
        coherence.opened(NODE, OFlags::RDONLY, &unnumbered, false);
        coherence.opened(NODE, OFlags::RDWR, &unnumbered, false);
        assert!(coherence.mixes() && coherence.may_be_dirty(NODE));
        coherence.released(NODE, 0, OFlags::RDWR);
        assert!(coherence.mixes() && !coherence.may_be_dirty(NODE));
        coherence.released(NODE, 0, OFlags::RDONLY);
        coherence.released(NODE, 2, OFlags::WRONLY);
        assert!(!coherence.mixes() && coherence.shard(NODE).opens.is_empty());
        // A node with a backing file has no pages.
        let backed = file(3, OpenFlags::PASSTHROUGH);
        coherence.opened(NODE, OFlags::RDWR, &backed, false);
        assert!(!coherence.may_be_dirty(NODE));
        coherence.released(NODE, 3, OFlags::RDWR);
        // With the writeback cache what is only open for writing leaves dirty pages, too.
        coherence.opened(NODE, OFlags::WRONLY, &cached, true);
        assert!(coherence.may_be_dirty(NODE));
    }
}
