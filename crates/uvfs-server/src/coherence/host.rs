//! Changes that programs of the host make behind the mount, as the file system that watches for
//! them reports them: the server invalidates what the kernel has of them.
//!
//! A change is noted before the kernel is told (`kernel_cache.rs`), so an answer that was read before
//! the change and is not sent yet gets no lifetime. An answer that was sent may still reach the
//! kernel's caches after it was told. So of what it was given lately the kernel is told again, several
//! times, until the answer must have arrived.
//!
//! A name is only made to expire. If it leads where it led before, the kernel then keeps it, and with
//! it the working directories and mounts below it; else the kernel drops it by itself. The kernel waits
//! for locked pages, and requests that filled them have read the file before; so pages are told once.

use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::kernel_cache::{Given, Key, UNDER_WAY};
use super::turns::Turns;
use super::{Coherence, Since};
use crate::fs::{HostChange, Node, Sizes};
use crate::notify::Notifier;
use crate::switch::WATCHED;

/// Changes that the kernel is yet to be told of; then a caller that reports more waits.
pub(super) const MOST_PENDING: usize = 1 << 16;
/// After so long the kernel is told once more of what it was given lately.
const AGAIN: [Duration; 4] = [
    Duration::from_millis(5),
    Duration::from_millis(50),
    Duration::from_millis(500),
    UNDER_WAY,
];
/// Things to be told again after the same time. Beyond that the oldest are told at once.
const MOST_AGAIN: usize = 1 << 15;

/// Something to invalidate in the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum What {
    /// A node's attributes.
    Inode(u64),
    /// A name in a directory.
    Entry(u64, CString),
    /// All names, and then the attributes and pages of these nodes.
    All(Vec<u64>),
}

/// How it is dropped.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct How {
    /// A node's pages go, too.
    pub(super) pages: bool,
    /// The kernel is told again: an old answer may be under way to it.
    pub(super) again: bool,
    /// A client has made the file at least so long.
    pub(super) grown: Option<u64>,
}

/// Things that are due at the same time after they were noted.
#[derive(Default)]
struct Stage {
    /// Each once, with the time at which to look at it.
    queue: VecDeque<(Instant, What)>,
    /// When each is due, and whether its pages go.
    due: HashMap<What, (Instant, bool)>,
}

impl Stage {
    fn add(&mut self, what: What, due: Instant, pages: bool) {
        if let Some(known) = self.due.get_mut(&what) {
            *known = (due, known.1 || pages);
            return;
        }
        self.queue.push_back((due, what.clone()));
        self.due.insert(what, (due, pages));
    }

    /// When to look next.
    fn next(&self) -> Option<Instant> {
        self.queue.front().map(|(at, _)| *at)
    }

    fn pop(&mut self, now: Instant) -> Option<(What, bool)> {
        // Each round takes one that is due, or puts one that was noted again to the end.
        for _ in 0..=self.queue.len() {
            let full = self.queue.len() > MOST_AGAIN;
            let (at, _) = self.queue.front()?;
            if *at > now && !full {
                return None;
            }
            let (_, what) = self.queue.pop_front()?;
            let &(due, pages) = self.due.get(&what)?;
            if due > now && !full {
                self.queue.push_back((due, what));
                continue;
            }
            self.due.remove(&what);
            return Some((what, pages));
        }
        None
    }
}

/// Host changes that the kernel is to be told of.
#[derive(Default)]
pub(super) struct Pending {
    order: VecDeque<What>,
    how: HashMap<What, How>,
    again: [Stage; AGAIN.len()],
    /// Threads that tell of them now.
    pub(super) telling: usize,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.order.len() >= MOST_PENDING
    }

    pub(super) fn add(&mut self, what: What, how: How) {
        if let Some(known) = self.how.get_mut(&what) {
            known.pages |= how.pages;
            known.again |= how.again;
            known.grown = known.grown.max(how.grown);
            return;
        }
        self.how.insert(what.clone(), how);
        self.order.push_back(what);
    }

    /// When something is due to be told again.
    pub(super) fn next(&self) -> Option<Instant> {
        self.again.iter().filter_map(Stage::next).min()
    }

    /// The next item to tell the kernel, how, and how often it was told before.
    pub(super) fn pop(&mut self) -> Option<(What, How, usize)> {
        if let Some(what) = self.order.pop_front() {
            let how = self.how.remove(&what).unwrap_or_default();
            return Some((what, how, 0));
        }
        self.next()?;
        let now = Instant::now();
        for (round, stage) in self.again.iter_mut().enumerate() {
            if let Some((what, pages)) = stage.pop(now) {
                let how = How {
                    pages,
                    again: true,
                    grown: None,
                };
                return Some((what, how, round + 1));
            }
        }
        None
    }

    /// The kernel was told for the time with this number.
    pub(super) fn told(&mut self, what: What, how: How, round: usize) {
        if how.again
            && let Some(stage) = self.again.get_mut(round)
        {
            stage.add(what, Instant::now() + AGAIN[round], how.pages);
        }
    }
}

/// Tells the kernel. `size` gives the size of a file whose contents have changed: the kernel goes by the size that it
/// knows where it does not ask for one.
pub(super) fn tell(
    notifier: &Notifier,
    turns: &Turns,
    size: impl Fn(Node) -> Option<u64>,
    what: &What,
    how: How,
    round: usize,
) {
    let offset = if how.pages { 0 } else { -1 };
    let drop = |node: u64| {
        notifier.invalidate_inode(Node(node), offset, 0)?;
        match how.pages || how.grown.is_some() {
            true => grow(notifier, turns, &size, node, how.grown, how.pages),
            false => Ok(()),
        }
    };
    let told = match what {
        What::Inode(node) => drop(*node),
        What::Entry(parent, name) => notifier.expire_entry(Node(*parent), name),
        What::All(nodes) => {
            let epoch = match round {
                0 => notifier.new_epoch(),
                _ => Ok(()),
            };
            let dropped = nodes.iter().try_for_each(|&node| drop(node));
            epoch.and(dropped)
        }
    };
    if let Err(error) = told {
        // Mostly, the mount has ended.
        tracing::debug!(%error, ?what, "telling the kernel of the host's changes");
    }
}

/// Tells the kernel that a file is at least as long as a client has made it (`grown`), or, with `pages`, as it is now. If
/// another program has cut it meanwhile, its pages go again: then the next read tells the kernel better. While the kernel
/// truncates the file, this is left out ([`Turns`]).
pub(super) fn grow(
    notifier: &Notifier,
    turns: &Turns,
    size: impl Fn(Node) -> Option<u64>,
    node: u64,
    grown: Option<u64>,
    pages: bool,
) -> std::io::Result<()> {
    let Some(_turn) = turns.grow(node) else {
        return Ok(());
    };
    let now = pages.then(|| size(Node(node))).flatten();
    let Some(grown) = grown.max(now) else {
        return Ok(());
    };
    notifier.grow(Node(node), grown)?;
    match size(Node(node)).is_some_and(|now| now < grown) {
        true => notifier.invalidate_inode(Node(node), 0, 0),
        false => Ok(()),
    }
}

/// Counts for `uvfs stats`.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Things that the kernel was told of.
    pub(crate) told: AtomicU64,
    /// Times that everything was dropped.
    pub(crate) lost: AtomicU64,
}

impl Coherence {
    /// The host's changes will be reported; `sizes` says how long a file is then.
    /// False where there is no kernel.
    pub(crate) fn host_is_watched(&self, sizes: Box<Sizes>) -> bool {
        let Some(kernel) = self.kernel.get() else {
            return false;
        };
        kernel.set_sizes(sizes);
        self.enter_stage(WATCHED);
        true
    }

    /// A program of the host has changed something. Waits for nothing but room to note it.
    pub(crate) fn host_changed(&self, change: HostChange<'_>) {
        let given = self.given();
        match change {
            HostChange::Contents(Node(node)) => {
                let known = given.host_change(Key::attributes(node));
                if self.tracks() {
                    self.shard(node).drops(node, 0, 0);
                }
                self.tell_of_host(What::Inode(node), true, known);
            }
            // Without clients it was the kernel that was told.
            HostChange::KnownAttributes(_) if !self.tracks() => {}
            HostChange::Attributes(Node(node)) | HostChange::KnownAttributes(Node(node)) => {
                let known = given.host_change(Key::attributes(node));
                if known != Given::Never {
                    self.tell_of_host(What::Inode(node), false, known);
                }
            }
            HostChange::Name(Node(parent), name) => {
                let known = given.host_change(Key::name(parent, name.to_bytes()));
                if known != Given::Never {
                    self.tell_of_host(What::Entry(parent, name.to_owned()), false, known);
                }
                // The pages of a directory are its listing.
                let known = given.host_change(Key::attributes(parent));
                if known != Given::Never {
                    self.tell_of_host(What::Inode(parent), true, known);
                }
            }
            HostChange::Anything(nodes) => {
                self.host.lost.fetch_add(1, Ordering::Relaxed);
                given.host_changed_all();
                let nodes = nodes.into_iter().map(|node| node.0).collect();
                self.tell_of_host(What::All(nodes), true, Given::Lately);
            }
        }
    }

    fn tell_of_host(&self, what: What, pages: bool, given: Given) {
        if let Some(kernel) = self.kernel.get() {
            self.host.told.fetch_add(1, Ordering::Relaxed);
            let again = given == Given::Lately;
            let how = How {
                pages,
                again,
                grown: None,
            };
            kernel.tell_of_host(what, how);
        }
    }

    /// The kernel is about to be given a part of a directory's listing, which it may keep, or was
    /// given a file's contents, read since `since`. If the host changed it meanwhile it goes again.
    pub(crate) fn shows_pages(&self, node: u64, since: Since) {
        if self.stage().is_plain() {
            return;
        }
        let (given, key) = (self.given(), Key::attributes(node));
        given.give(key, self.tracks());
        if given.changed_since(key, since.last) {
            self.tell_of_host(What::Inode(node), true, Given::Lately);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: How = How {
        pages: true,
        again: false,
        grown: None,
    };

    /// Changes of one inode become one notification, which is repeated after each delay of `AGAIN`.
    #[test]
    fn what_is_to_be_told_is_merged() {
        let mut pending = Pending::default();
        let again = How {
            pages: false,
            again: true,
            grown: None,
        };
        pending.add(What::Inode(3), again);
        pending.add(What::Entry(1, c"x".into()), PAGES);
        pending.add(What::Inode(3), PAGES);
        let (what, how, round) = pending.pop().expect("the first");
        assert_eq!((&what, round), (&What::Inode(3), 0));
        assert!(how.pages && how.again);
        pending.told(what, how, round);
        let (what, how, round) = pending.pop().expect("the second");
        assert_eq!(what, What::Entry(1, c"x".into()));
        assert!(!how.again);
        pending.told(what, how, round);
        assert!(pending.is_empty());
        for round in 0..AGAIN.len() {
            let next = pending.next().expect("it is told again");
            pending.again[round].queue[0].0 = Instant::now();
            let due = pending.again[round].due.get_mut(&What::Inode(3));
            due.expect("it is there").0 = Instant::now();
            let (what, how, told) = pending.pop().expect("it is due");
            assert_eq!((&what, told), (&What::Inode(3), round + 1));
            assert!(next > Instant::now() - UNDER_WAY && how.pages);
            pending.told(what, how, told);
        }
        assert!(pending.next().is_none() && pending.pop().is_none());
    }

    /// A stage postpones a node that changes again, and holds a bounded number of nodes.
    #[test]
    fn a_stage_is_bounded_and_postpones_what_changes_again() {
        let mut stage = Stage::default();
        let (now, later) = (Instant::now(), Instant::now() + UNDER_WAY);
        stage.add(What::Inode(1), now, false);
        stage.add(What::Inode(1), later, true);
        assert!(stage.pop(now).is_none());
        assert_eq!(stage.pop(later), Some((What::Inode(1), true)));
        for node in 0..=MOST_AGAIN as u64 {
            assert!(stage.pop(now).is_none());
            stage.add(What::Inode(node), later, false);
        }
        assert_eq!(stage.pop(now), Some((What::Inode(0), false)));
        assert!(stage.pop(now).is_none());
    }
}
