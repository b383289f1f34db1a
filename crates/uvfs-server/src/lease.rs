//! The table of leases. Pure state, no I/O and no waiting, so that all of it
//! can be tested; `coherence/` does the rest.
//!
//! A node's pages, size and times are cached by clients that hold a lease of it: several may hold
//! [`LeaseMode::Read`], or one [`LeaseMode::Write`]. Another sender's request that would see old data, or
//! make cached data old, does not begin before the leases in its way came back. While one waits,
//! none is granted; and none is granted while a request that changes the node is under way, for
//! the server could not tell whether what is read then is old.
//!
//! The kernel of a mount caches too, and is never asked: the server invalidates what it has. That takes
//! a while, so a write lease is granted in two steps, [`Table::ask`] and [`Table::granted`], and
//! not at all if something came in between.
//!
//! The kernel reads and writes a node of which it has a backing file without asking: no client has a
//! lease of it then, and none is granted ([`Table::pass`]). Before it gets one, all leases are recalled
//! ([`Access::Direct`]).

mod link;

use std::collections::hash_map::Entry;

use foldhash::HashMap;
use smallvec::SmallVec;

use crate::fs::Origin;
use crate::stats::Leases;
pub(crate) use link::Link;

/// A client's number.
pub(crate) type Holder = u64;

/// The kind of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum LeaseMode {
    /// Data may be cached for reading.
    Read,
    /// Writes may be cached as well.
    Write,
}

/// The way in which a request uses a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Access {
    /// Looks at data or attributes.
    Look,
    /// Changes them.
    Change,
    /// Opens a file to read and write past the kernel's cache, for which it may get a backing file.
    Direct,
}

/// A lease to be recalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Recall {
    pub(crate) who: Holder,
    pub(crate) seq: u64,
    /// The most that may be kept.
    pub(crate) keep: Option<LeaseMode>,
}

/// Whether a request may begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// It has; a change ends with [`Table::ended`].
    Go,
    /// It is the holder of the write lease itself, and has begun.
    Own,
    /// These leases are in its way.
    Wait(Vec<Recall>),
}

/// The answer to a request for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// This one.
    Granted(u64),
    /// Once the kernel has dropped what it knows; then [`Table::granted`].
    Invalidate,
    /// Not now.
    Refused,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Held {
    who: Holder,
    mode: LeaseMode,
    seq: u64,
    /// A request waits for it to be no more than this.
    recalled: Option<Option<LeaseMode>>,
    /// The kernel knows that the file is at least so long. While a client may write the file, the kernel learns its
    /// size from nothing but what it is told, and from entries.
    length: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct NodeLeases {
    /// Mostly one client's.
    held: SmallVec<[Held; 1]>,
    /// Changes under way.
    changes: u32,
    /// Requests that wait for leases.
    waiting: u32,
    /// The client that gets a write lease once the kernel knows nothing any more, and whether something
    /// happened meanwhile that makes that worthless.
    granting: Option<(Holder, bool)>,
    /// The kernel has a backing file of it.
    passing: bool,
    /// The kernel has nothing of it.
    hidden: bool,
}

impl NodeLeases {
    fn check(&self) {
        let writers = self
            .held
            .iter()
            .filter(|h| h.mode == LeaseMode::Write)
            .count();
        assert!(
            writers == 0 || self.held.len() == 1,
            "a write lease is the only one: {self:?}"
        );
        assert!(
            !self.passing || (self.held.is_empty() && self.granting.is_none()),
            "the kernel asks nothing, so no client has a lease: {self:?}"
        );
        debug_assert!(
            self.held
                .iter()
                .enumerate()
                .all(|(i, a)| self.held[..i].iter().all(|b| b.who != a.who))
        );
    }

    fn is_idle(&self) -> bool {
        !self.hidden && self.is_free()
    }

    /// Whether no lease, request or grant is known of it.
    fn is_free(&self) -> bool {
        self.held.is_empty() && !self.is_busy()
    }

    /// Whether requests, a grant or the kernel's own work on it are under way.
    fn is_busy(&self) -> bool {
        self.changes != 0 || self.waiting != 0 || self.granting.is_some() || self.passing
    }

    fn fits(&self, who: Holder, mode: LeaseMode) -> bool {
        let others = || self.held.iter().filter(|h| h.who != who);
        self.changes == 0
            && self.waiting == 0
            && !self.passing
            && self.held.iter().all(|h| h.recalled.is_none())
            && match mode {
                LeaseMode::Read => others().all(|h| h.mode == LeaseMode::Read),
                LeaseMode::Write => others().next().is_none(),
            }
    }

    fn grant(&mut self, who: Holder, mode: LeaseMode, seq: u64) {
        self.held.retain(|h| h.who != who);
        self.held.push(Held {
            who,
            mode,
            seq,
            recalled: None,
            length: 0,
        });
        self.check();
    }
}

/// The leases of all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    nodes: HashMap<u64, NodeLeases>,
    seq: u64,
    /// How many nodes are hidden, at most [`MOST_HIDDEN`].
    hidden: usize,
}

/// Nodes of one table of which it is noted that the kernel has nothing; with more, all of these notes
/// go. There are only so many when clients have very many files that they made.
const MOST_HIDDEN: usize = 16384;

impl Table {
    fn tidy(&mut self, node: u64) {
        if self.nodes.get(&node).is_some_and(NodeLeases::is_idle) {
            self.nodes.remove(&node);
        }
    }

    /// Begins a request, or says what is in its way; that counts as recalled from now on.
    pub(crate) fn begin(&mut self, node: u64, who: Origin<Holder>, access: Access) -> Begin {
        if access != Access::Change && !self.nodes.contains_key(&node) {
            return Begin::Go;
        }
        let n = self.nodes.entry(node).or_default();
        let mut recalls = Vec::new();
        let mut own = false;
        for h in &mut n.held {
            if Origin::Client(h.who) == who {
                own = h.mode == LeaseMode::Write;
                continue;
            }
            let keep = match (access, h.mode) {
                (Access::Look, LeaseMode::Read) => continue,
                (Access::Look, LeaseMode::Write) => Some(LeaseMode::Read),
                (Access::Change | Access::Direct, _) => None,
            };
            let keep = h.recalled.map_or(keep, |before| before.min(keep));
            h.recalled = Some(keep);
            recalls.push(Recall {
                who: h.who,
                seq: h.seq,
                keep,
            });
        }
        if !recalls.is_empty() {
            return Begin::Wait(recalls);
        }
        if let Some((_, disturbed)) = &mut n.granting
            && (who == Origin::Kernel || access == Access::Change)
        {
            *disturbed = true;
        }
        if access == Access::Change {
            n.changes += 1;
        }
        if own { Begin::Own } else { Begin::Go }
    }

    /// A change has ended.
    pub(crate) fn ended(&mut self, node: u64) {
        let n = self.nodes.get_mut(&node).expect("a change is under way");
        n.changes -= 1;
        self.tidy(node);
    }

    /// A request waits from now on, so that nothing is granted.
    pub(crate) fn wait(&mut self, node: u64) {
        self.nodes.entry(node).or_default().waiting += 1;
    }

    /// It waits no longer.
    pub(crate) fn waited(&mut self, node: u64) {
        let n = self.nodes.get_mut(&node).expect("a request waits");
        n.waiting -= 1;
        self.tidy(node);
    }

    /// Asks for a lease. `mounted`: there is a kernel that caches too. A holder's earlier lease of
    /// the node becomes the new one.
    pub(crate) fn ask(&mut self, node: u64, who: Holder, mode: LeaseMode, mounted: bool) -> Ask {
        let n = self.nodes.entry(node).or_default();
        let answer = if n.granting.is_some() || !n.fits(who, mode) {
            Ask::Refused
        } else if mounted && mode == LeaseMode::Write {
            n.granting = Some((who, false));
            Ask::Invalidate
        } else {
            self.seq += 1;
            n.grant(who, mode, self.seq);
            Ask::Granted(self.seq)
        };
        self.tidy(node);
        answer
    }

    /// After [`Ask::Invalidate`]: the kernel has dropped what it had. The lease's number, unless
    /// something came in between.
    pub(crate) fn granted(&mut self, node: u64, who: Holder) -> Option<u64> {
        let n = self.nodes.get_mut(&node)?;
        // Its asker may have been ended meanwhile.
        let (asker, disturbed) = n.granting.take()?;
        if asker != who {
            n.granting = Some((asker, disturbed));
            return None;
        }
        let mut seq = None;
        if !disturbed && n.fits(who, LeaseMode::Write) {
            self.seq += 1;
            n.grant(who, LeaseMode::Write, self.seq);
            seq = Some(self.seq);
        }
        self.tidy(node);
        seq
    }

    /// A lease comes back, down to `keep`. A lease that is not (or no longer) held changes nothing.
    pub(crate) fn returned(&mut self, node: u64, who: Holder, seq: u64, keep: Option<LeaseMode>) {
        let Some(n) = self.nodes.get_mut(&node) else {
            return;
        };
        n.held.retain_mut(|h| {
            if h.who != who || h.seq != seq {
                return true;
            }
            let Some(keep) = keep else { return false };
            h.mode = h.mode.min(keep);
            if h.recalled.is_some_and(|most| Some(h.mode) <= most) {
                h.recalled = None;
            }
            true
        });
        n.check();
        self.tidy(node);
    }

    /// All that `who` has of the node is gone. Its number may be another file's next, so it is not
    /// hidden any more either.
    pub(crate) fn forget(&mut self, node: u64, who: Holder) {
        let Entry::Occupied(mut entry) = self.nodes.entry(node) else {
            return;
        };
        let n = entry.get_mut();
        if std::mem::take(&mut n.hidden) {
            self.hidden -= 1;
        }
        n.held.retain(|h| h.who != who);
        if n.granting.is_some_and(|(asker, _)| asker == who) {
            n.granting = None;
        }
        if n.is_idle() {
            entry.remove();
        }
    }

    /// Lets the kernel read and write the node without asking from now on; false, and nothing happened, if a client
    /// has a lease or is being granted one. The server can't ask the kernel to stop, so leases wait for
    /// [`Table::passed`].
    pub(crate) fn pass(&mut self, node: u64) -> bool {
        let n = self.nodes.entry(node).or_default();
        assert!(!n.passing, "a node has one backing file at a time");
        n.passing = n.held.is_empty() && n.granting.is_none();
        let passing = n.passing;
        self.tidy(node);
        passing
    }

    /// The kernel no longer reads and writes the node without asking.
    pub(crate) fn passed(&mut self, node: u64) {
        let n = self.nodes.get_mut(&node).expect("it has a backing file");
        assert!(n.passing, "it has a backing file");
        n.passing = false;
        self.tidy(node);
    }

    /// Whether the kernel reads and writes a node without asking.
    pub(crate) fn passes(&self, node: u64) -> bool {
        self.nodes.get(&node).is_some_and(|n| n.passing)
    }

    /// Counts leases, to read and to write.
    pub(crate) fn count(&self) -> Leases {
        let mut leases = Leases::default();
        for held in self.nodes.values().flat_map(|node| &node.held) {
            match held.mode {
                LeaseMode::Read => leases.read += 1,
                LeaseMode::Write => leases.write += 1,
            }
        }
        leases
    }

    /// The nodes of which `who` has or is about to get a lease.
    pub(crate) fn nodes_of(&self, who: Holder) -> Vec<u64> {
        let has = |n: &NodeLeases| {
            n.held.iter().any(|h| h.who == who) || n.granting.is_some_and(|(asker, _)| asker == who)
        };
        let nodes = self.nodes.iter().filter(|(_, n)| has(n));
        nodes.map(|(&node, _)| node).collect()
    }

    /// Whether `who` may have dirty pages of the node.
    pub(crate) fn writes(&self, node: u64, who: Holder) -> bool {
        let held = self.nodes.get(&node).map(|n| &n.held[..]);
        held.is_some_and(|held| {
            held.iter()
                .any(|h| h.who == who && h.mode == LeaseMode::Write)
        })
    }

    /// `who` has made the file at least so long: whether the kernel has yet to be told.
    pub(crate) fn grows(&mut self, node: u64, who: Holder, length: u64) -> bool {
        let held = self.nodes.get_mut(&node).map(|n| &mut n.held[..]);
        let mut own = held.unwrap_or_default().iter_mut().filter(|h| h.who == who);
        own.next().is_none_or(|h| {
            let grows = length > h.length;
            h.length = h.length.max(length);
            grows
        })
    }

    /// Whether no lease, request or grant is known of the node.
    pub(crate) fn is_free(&self, node: u64) -> bool {
        self.nodes.get(&node).is_none_or(NodeLeases::is_free)
    }

    /// Whether there is more to know of the node than leases of `who`'s.
    pub(crate) fn is_anothers(&self, node: u64, who: Holder) -> bool {
        let n = self.nodes.get(&node);
        n.is_some_and(|n| n.is_busy() || n.held.iter().any(|h| h.who != who))
    }

    /// The kernel has nothing of the node, until [`Table::mark_known_to_kernel`] says otherwise.
    pub(crate) fn mark_unknown_to_kernel(&mut self, node: u64) {
        if self.hidden >= MOST_HIDDEN {
            self.show_all();
        }
        let n = self.nodes.entry(node).or_default();
        if !std::mem::replace(&mut n.hidden, true) {
            self.hidden += 1;
        }
    }

    /// The kernel may have something of the node, and may have learned an older size.
    pub(crate) fn mark_known_to_kernel(&mut self, node: u64) {
        let Some(n) = self.nodes.get_mut(&node) else {
            return;
        };
        for held in &mut n.held {
            held.length = 0;
        }
        if std::mem::take(&mut n.hidden) {
            self.hidden -= 1;
            self.tidy(node);
        }
    }

    /// The kernel may have something of each node.
    pub(crate) fn show_all(&mut self) {
        self.nodes.retain(|_, n| {
            n.hidden = false;
            !n.is_idle()
        });
        self.hidden = 0;
    }

    /// Whether the kernel has nothing of the node; false if that is not known.
    pub(crate) fn is_unknown_to_kernel(&self, node: u64) -> bool {
        self.nodes.get(&node).is_some_and(|n| n.hidden)
    }

    /// Whether attributes of the node, read without [`Table::begin`], may be kept: no lease makes
    /// them old, and nothing changes them now. If so, it counts as if the kernel had looked.
    pub(crate) fn steady(&mut self, node: u64) -> bool {
        let Some(n) = self.nodes.get_mut(&node) else {
            return true;
        };
        if let Some((_, disturbed)) = &mut n.granting {
            *disturbed = true;
        }
        n.changes == 0 && n.waiting == 0 && n.held.iter().all(|h| h.mode == LeaseMode::Read)
    }
}

#[cfg(test)]
mod tests;
