//! Who may cache what: the table of leases. Pure state, no I/O and no waiting, so that all of it
//! can be tested; `mod.rs` does the rest.
//!
//! A node's pages, size and times are cached by clients that hold a lease of it: several may hold
//! [`Mode::Read`], or one [`Mode::Write`]. A request of somebody else that would see old data, or
//! make cached data old, does not begin before the leases in its way came back. While one waits,
//! none is granted; and none is granted while a request that changes the node is under way, for
//! nobody could tell whether what is read then is old.
//!
//! The kernel of a mount caches too, and is never asked: it is told to drop what it has. That takes
//! a while, so a write lease is granted in two steps, [`Table::ask`] and [`Table::granted`], and
//! not at all if something came in between.
//!
//! A node that the kernel has a backing file of it reads and writes without asking: nobody has a
//! lease of it then, and none is granted ([`Table::pass`]). Before it gets one, all leases are recalled
//! ([`Access::Direct`]).

use std::collections::hash_map::Entry;

use foldhash::HashMap;
use smallvec::SmallVec;

use crate::fs::Origin;
use crate::stats::Leases;

/// A client's number.
pub(crate) type Holder = u64;

/// What a lease allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Mode {
    /// Data may be cached for reading.
    Read,
    /// Writes may be cached as well.
    Write,
}

/// What a request does to a node.
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
    pub(crate) keep: Option<Mode>,
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

/// What became of a request for a lease.
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
    mode: Mode,
    seq: u64,
    /// Somebody waits for it to be no more than this.
    recalled: Option<Option<Mode>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Node {
    /// Mostly one client's.
    held: SmallVec<[Held; 1]>,
    /// Changes under way.
    changes: u32,
    /// Requests that wait for leases.
    waiting: u32,
    /// Who is to get a write lease once the kernel knows nothing any more, and whether something
    /// happened meanwhile that makes that worthless.
    granting: Option<(Holder, bool)>,
    /// The kernel has a backing file of it.
    passing: bool,
    /// The kernel has nothing of it.
    hidden: bool,
}

impl Node {
    fn check(&self) {
        let writers = self.held.iter().filter(|h| h.mode == Mode::Write).count();
        assert!(
            writers == 0 || self.held.len() == 1,
            "a write lease is the only one: {self:?}"
        );
        assert!(
            !self.passing || (self.held.is_empty() && self.granting.is_none()),
            "the kernel asks nobody, so nobody has a lease: {self:?}"
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

    fn fits(&self, who: Holder, mode: Mode) -> bool {
        let others = || self.held.iter().filter(|h| h.who != who);
        self.changes == 0
            && self.waiting == 0
            && !self.passing
            && self.held.iter().all(|h| h.recalled.is_none())
            && match mode {
                Mode::Read => others().all(|h| h.mode == Mode::Read),
                Mode::Write => others().next().is_none(),
            }
    }

    fn grant(&mut self, who: Holder, mode: Mode, seq: u64) {
        self.held.retain(|h| h.who != who);
        self.held.push(Held {
            who,
            mode,
            seq,
            recalled: None,
        });
        self.check();
    }
}

/// The leases of all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    nodes: HashMap<u64, Node>,
    seq: u64,
    /// How many nodes are hidden, at most [`MOST_HIDDEN`].
    hidden: usize,
}

/// Nodes of one table of which it is noted that the kernel has nothing; with more, all of these notes
/// go. There are only so many when clients have very many files that they made.
const MOST_HIDDEN: usize = 16384;

impl Table {
    fn tidy(&mut self, node: u64) {
        if self.nodes.get(&node).is_some_and(Node::is_idle) {
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
                own = h.mode == Mode::Write;
                continue;
            }
            let keep = match (access, h.mode) {
                (Access::Look, Mode::Read) => continue,
                (Access::Look, Mode::Write) => Some(Mode::Read),
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
    pub(crate) fn ask(&mut self, node: u64, who: Holder, mode: Mode, mounted: bool) -> Ask {
        let n = self.nodes.entry(node).or_default();
        let answer = if n.granting.is_some() || !n.fits(who, mode) {
            Ask::Refused
        } else if mounted && mode == Mode::Write {
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
        if !disturbed && n.fits(who, Mode::Write) {
            self.seq += 1;
            n.grant(who, Mode::Write, self.seq);
            seq = Some(self.seq);
        }
        self.tidy(node);
        seq
    }

    /// A lease comes back, down to `keep`. What is not (or no longer) held changes nothing.
    pub(crate) fn returned(&mut self, node: u64, who: Holder, seq: u64, keep: Option<Mode>) {
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

    /// Whatever `who` has of the node is gone. It may be another file's number next, so it is not
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

    /// The kernel is to read and write the node without asking from now on; false, and nothing
    /// happened, where a lease is in the way. There is no end to that by itself: it is not asked to
    /// stop, so leases wait for [`Table::passed`].
    pub(crate) fn pass(&mut self, node: u64) -> bool {
        let n = self.nodes.entry(node).or_default();
        assert!(!n.passing, "a node has one backing file at a time");
        n.passing = n.held.is_empty() && n.granting.is_none();
        let passing = n.passing;
        self.tidy(node);
        passing
    }

    /// It no longer does.
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
                Mode::Read => leases.read += 1,
                Mode::Write => leases.write += 1,
            }
        }
        leases
    }

    /// The nodes of which `who` has or is about to get a lease.
    pub(crate) fn nodes_of(&self, who: Holder) -> Vec<u64> {
        let has = |n: &Node| {
            n.held.iter().any(|h| h.who == who) || n.granting.is_some_and(|(asker, _)| asker == who)
        };
        let nodes = self.nodes.iter().filter(|(_, n)| has(n));
        nodes.map(|(&node, _)| node).collect()
    }

    /// Whether `who` may have dirty pages of the node.
    pub(crate) fn writes(&self, node: u64, who: Holder) -> bool {
        let held = self.nodes.get(&node).map(|n| &n.held[..]);
        held.is_some_and(|held| held.iter().any(|h| h.who == who && h.mode == Mode::Write))
    }

    /// Whether no lease, request or grant is known of the node.
    pub(crate) fn is_free(&self, node: u64) -> bool {
        self.nodes.get(&node).is_none_or(Node::is_free)
    }

    /// Whether there is more to know of the node than leases of `who`'s.
    pub(crate) fn is_anothers(&self, node: u64, who: Holder) -> bool {
        let n = self.nodes.get(&node);
        n.is_some_and(|n| n.is_busy() || n.held.iter().any(|h| h.who != who))
    }

    /// The kernel has nothing of the node, until [`Table::show`] says otherwise.
    pub(crate) fn hide(&mut self, node: u64) {
        if self.hidden >= MOST_HIDDEN {
            self.show_all();
        }
        let n = self.nodes.entry(node).or_default();
        if !std::mem::replace(&mut n.hidden, true) {
            self.hidden += 1;
        }
    }

    /// The kernel may have something of the node.
    pub(crate) fn show(&mut self, node: u64) {
        if let Some(n) = self.nodes.get_mut(&node)
            && std::mem::take(&mut n.hidden)
        {
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
    pub(crate) fn hides(&self, node: u64) -> bool {
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
        n.changes == 0 && n.waiting == 0 && n.held.iter().all(|h| h.mode == Mode::Read)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};

    use super::*;

    const NODE: u64 = 7;

    /// A lease where there is no mount.
    fn granted(table: &mut Table, who: Holder, mode: Mode) -> u64 {
        match table.ask(NODE, who, mode, false) {
            Ask::Granted(seq) => seq,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_the_kernel_has_nothing_of_is_noted_beside_the_leases() {
        let mut t = Table::default();
        t.hide(NODE);
        t.hide(NODE);
        assert!(t.hides(NODE) && t.is_free(NODE));
        // Leases come and go without it.
        let seq = granted(&mut t, 1, Mode::Read);
        assert!(!t.is_free(NODE));
        t.returned(NODE, 1, seq, None);
        assert!(t.hides(NODE) && t.is_free(NODE));
        t.show(NODE);
        assert_eq!((t.hides(NODE), t.nodes.len(), t.hidden), (false, 0, 0));
        // With a node that is forgotten it goes, and if there are too many of them all go.
        t.hide(NODE);
        t.forget(NODE, 1);
        assert_eq!((t.hides(NODE), t.nodes.len(), t.hidden), (false, 0, 0));
        assert!(matches!(t.ask(NODE, 1, Mode::Read, false), Ask::Granted(_)));
        for node in 0..MOST_HIDDEN as u64 + 1 {
            t.hide(node);
        }
        assert!(t.hides(MOST_HIDDEN as u64) && !t.hides(NODE) && !t.is_free(NODE));
        assert_eq!((t.nodes.len(), t.hidden), (2, 1));
    }

    #[test]
    fn one_writes_or_several_read() {
        let mut t = Table::default();
        let a = granted(&mut t, 1, Mode::Read);
        let b = granted(&mut t, 2, Mode::Read);
        assert_eq!(t.ask(NODE, 1, Mode::Write, false), Ask::Refused);
        assert_eq!(t.begin(NODE, Origin::Client(3), Access::Look), Begin::Go);
        let recall = |who, seq, keep| Recall { who, seq, keep };
        assert_eq!(
            t.begin(NODE, Origin::Client(1), Access::Change),
            Begin::Wait(vec![recall(2, b, None)])
        );
        t.returned(NODE, 2, b, None);
        assert_eq!(t.begin(NODE, Origin::Client(1), Access::Change), Begin::Go);
        assert_eq!(t.ask(NODE, 1, Mode::Write, false), Ask::Refused);
        t.ended(NODE);
        let w = granted(&mut t, 1, Mode::Write);
        assert!(w > a && t.writes(NODE, 1));
        assert_eq!(t.begin(NODE, Origin::Client(1), Access::Look), Begin::Own);
        assert_eq!(
            t.begin(NODE, Origin::Kernel, Access::Look),
            Begin::Wait(vec![recall(1, w, Some(Mode::Read))])
        );
        // An old number means nothing; the right one keeps what may be kept.
        t.returned(NODE, 1, a, None);
        t.returned(NODE, 1, w, Some(Mode::Read));
        assert_eq!(t.begin(NODE, Origin::Kernel, Access::Look), Begin::Go);
        assert_eq!(
            t.begin(NODE, Origin::Client(2), Access::Change),
            Begin::Wait(vec![recall(1, w, None)])
        );
        t.forget(NODE, 1);
        assert_eq!(
            t,
            Table {
                seq: w,
                ..Table::default()
            }
        );
    }

    #[test]
    fn a_direct_open_recalls_all_leases() {
        let mut t = Table::default();
        let a = granted(&mut t, 1, Mode::Read);
        let Ask::Granted(b) = t.ask(NODE, 2, Mode::Read, true) else {
            panic!()
        };
        let recall = |who, seq| Recall {
            who,
            seq,
            keep: None,
        };
        let direct = |t: &mut Table| t.begin(NODE, Origin::Kernel, Access::Direct);
        assert_eq!(
            direct(&mut t),
            Begin::Wait(vec![recall(1, a), recall(2, b)])
        );
        t.returned(NODE, 1, a, None);
        assert_eq!(direct(&mut t), Begin::Wait(vec![recall(2, b)]));
        t.returned(NODE, 2, b, None);
        assert_eq!(direct(&mut t), Begin::Go);
        assert!(t.pass(NODE));
        assert_eq!(t.ask(NODE, 1, Mode::Read, true), Ask::Refused);
        t.passed(NODE);
        granted(&mut t, 1, Mode::Read);
    }

    #[test]
    fn there_are_no_leases_of_what_the_kernel_has_a_backing_file_of() {
        let mut t = Table::default();
        let Ask::Granted(a) = t.ask(NODE, 1, Mode::Read, true) else {
            panic!()
        };
        assert!(!t.pass(NODE) && !t.passes(NODE));
        t.returned(NODE, 1, a, None);
        // Nor while one is being granted.
        assert_eq!(t.ask(NODE, 1, Mode::Write, true), Ask::Invalidate);
        assert!(!t.pass(NODE));
        assert!(t.granted(NODE, 1).is_some());
        t.forget(NODE, 1);
        assert!(t.pass(NODE) && t.passes(NODE) && !t.passes(NODE + 1));
        assert_eq!(t.ask(NODE, 1, Mode::Read, true), Ask::Refused);
        assert_eq!(t.ask(NODE, 1, Mode::Write, true), Ask::Refused);
        assert_eq!(t.begin(NODE, Origin::Client(1), Access::Change), Begin::Go);
        t.ended(NODE);
        t.passed(NODE);
        assert!(t.is_free(NODE));
    }

    #[test]
    fn what_the_kernel_does_meanwhile_spoils_a_grant() {
        let mut t = Table::default();
        assert_eq!(t.ask(NODE, 1, Mode::Write, true), Ask::Invalidate);
        assert_eq!(t.ask(NODE, 2, Mode::Read, true), Ask::Refused);
        assert_eq!(t.begin(NODE, Origin::Client(2), Access::Look), Begin::Go);
        assert_eq!(t.begin(NODE, Origin::Kernel, Access::Look), Begin::Go);
        assert_eq!(t.granted(NODE, 1), None);
        assert_eq!(t.ask(NODE, 1, Mode::Write, true), Ask::Invalidate);
        assert!(t.granted(NODE, 1).is_some());
        assert!(!t.steady(NODE) && t.steady(NODE + 1));
    }

    // Every order of every step that two clients and a kernel can take on one node, with what they
    // cache: whatever is read must be what was last written, if that write had returned.

    const CLIENTS: usize = 2;
    /// Values that are written: enough for a lost one to show.
    const WRITES: u8 = 3;

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Step {
        Idle,
        /// A request that waits, and whether [`Table::wait`] knows.
        Wants(Access, bool),
        /// Under way; a change carries its value, and says whether it is applied.
        Looks {
            since: u8,
        },
        Changes {
            value: u8,
            applied: bool,
            own: bool,
        },
        /// The kernel is dropping what it has, for a lease of this client.
        Invalidates {
            done: bool,
        },
    }

    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct Client {
        step: Step,
        lease: Option<(Mode, u64)>,
        /// Cached value, and whether it is dirty.
        cached: Option<u8>,
        dirty: bool,
        alive: bool,
    }

    #[derive(Clone, Debug)]
    struct World {
        table: Table,
        clients: [Client; CLIENTS],
        kernel: Step,
        kernel_cached: Option<u8>,
        /// The kernel has a backing file.
        passing: bool,
        /// The server's value, the last one given, and the newest that a returned write wrote.
        server: u8,
        last: u8,
        acked: u8,
    }

    type Key = (
        Vec<Node>,
        [Client; CLIENTS],
        (Step, bool),
        Option<u8>,
        u8,
        u8,
        u8,
    );

    impl World {
        fn key(&self) -> Key {
            // Numbers of leases grow for ever; only which one is current matters.
            let mut table: Vec<Node> = self.table.nodes.values().cloned().collect();
            let mut clients = self.clients.clone();
            for node in &mut table {
                for h in &mut node.held {
                    let c = &mut clients[h.who as usize - 1];
                    c.lease = c.lease.map(|(mode, seq)| (mode, u64::from(seq == h.seq)));
                    h.seq = 0;
                }
                node.held.sort_by_key(|h| h.who);
            }
            let (kernel, server) = ((self.kernel, self.passing), self.server);
            let numbers = (self.last, self.acked);
            (
                table,
                clients,
                kernel,
                self.kernel_cached,
                server,
                numbers.0,
                numbers.1,
            )
        }

        fn read(&self, value: u8, since: u8, by: &str) {
            assert!(
                value >= since,
                "{by} read {value} after {since} was written: {self:#?}"
            );
        }

        /// All worlds that one step of client `i` leads to.
        fn client_steps(&self, i: usize, out: &mut Vec<World>) {
            let who = i as Holder + 1;
            let c = &self.clients[i];
            let mut go = |f: &mut dyn FnMut(&mut World)| {
                let mut w = self.clone();
                f(&mut w);
                out.push(w);
            };
            if !c.alive {
                return;
            }
            let mode = c.lease.map(|l| l.0);
            // Cached calls take no time.
            if let (Some(_), Some(value)) = (mode, c.cached) {
                self.read(value, self.acked, "a client");
            }
            if mode == Some(Mode::Write) && self.last < WRITES {
                go(&mut |w| {
                    w.last += 1;
                    w.acked = w.acked.max(w.last);
                    w.clients[i].cached = Some(w.last);
                    w.clients[i].dirty = true;
                });
            }
            // Writeback, a recall that came, or a lease given up: flush, drop, return.
            if c.dirty {
                go(&mut |w| {
                    assert_eq!(
                        w.table.begin(NODE, Origin::Client(who), Access::Change),
                        Begin::Own
                    );
                    w.server = w.clients[i].cached.unwrap();
                    w.clients[i].dirty = false;
                    w.table.ended(NODE);
                });
            } else if let Some((mode, seq)) = c.lease {
                go(&mut |w| {
                    w.clients[i].lease = None;
                    w.clients[i].cached = None;
                    w.table.returned(NODE, who, seq, None);
                });
                if mode == Mode::Write {
                    go(&mut |w| {
                        w.clients[i].lease = Some((Mode::Read, seq));
                        w.table.returned(NODE, who, seq, Some(Mode::Read));
                    });
                }
            }
            // It fills its cache in one step: the server takes it in one.
            if c.lease.is_some() && c.cached.is_none() {
                go(
                    &mut |w| match w.table.begin(NODE, Origin::Client(who), Access::Look) {
                        Begin::Wait(_) => panic!("a holder waits for its own read: {w:#?}"),
                        _ => w.clients[i].cached = Some(w.server),
                    },
                );
            }
            // Death: the server writes what is dirty, then drops the leases.
            go(&mut |w| {
                match w.clients[i].step {
                    Step::Changes { .. } => w.table.ended(NODE),
                    Step::Wants(_, true) => w.table.waited(NODE),
                    _ => {}
                }
                let c = &mut w.clients[i];
                if c.dirty {
                    assert!(w.table.writes(NODE, who));
                    w.server = c.cached.unwrap();
                }
                *c = Client {
                    step: Step::Idle,
                    lease: None,
                    cached: None,
                    dirty: false,
                    alive: false,
                };
                w.table.forget(NODE, who);
            });
            match c.step {
                Step::Idle => {
                    for want in [Mode::Read, Mode::Write] {
                        if mode.is_none_or(|m| m < want) {
                            go(&mut |w| match w.table.ask(NODE, who, want, true) {
                                Ask::Granted(seq) => w.clients[i].lease = Some((want, seq)),
                                Ask::Invalidate => {
                                    w.clients[i].step = Step::Invalidates { done: false };
                                }
                                Ask::Refused => {}
                            });
                        }
                    }
                    if mode.is_none() {
                        go(&mut |w| w.clients[i].step = Step::Wants(Access::Look, false));
                        go(&mut |w| w.clients[i].step = Step::Wants(Access::Change, false));
                    }
                }
                Step::Wants(access, waits) => go(&mut |w| {
                    w.clients[i].step = w.enter(Origin::Client(who), access, waits);
                }),
                Step::Looks { since } => go(&mut |w| {
                    w.read(w.server, since, "a client's request");
                    w.clients[i].step = Step::Idle;
                }),
                Step::Changes {
                    value,
                    applied: false,
                    own,
                } => go(&mut |w| {
                    w.server = value;
                    w.clients[i].step = Step::Changes {
                        value,
                        applied: true,
                        own,
                    };
                }),
                // Invalidation waits for what the kernel has under way: its pages are locked.
                Step::Changes { own: false, .. } | Step::Invalidates { done: false }
                    if matches!(self.kernel, Step::Looks { .. } | Step::Changes { .. }) => {}
                Step::Changes { value, own, .. } => go(&mut |w| {
                    // The kernel is told, then the change ends, then the client drops its page.
                    if !own {
                        w.kernel_cached = None;
                    }
                    w.table.ended(NODE);
                    w.acked = w.acked.max(w.server.min(value));
                    if w.clients[i]
                        .lease
                        .is_none_or(|(mode, _)| mode == Mode::Read)
                    {
                        w.clients[i].cached = None;
                    }
                    w.clients[i].step = Step::Idle;
                }),
                Step::Invalidates { done } => go(&mut |w| {
                    if !done {
                        w.kernel_cached = None;
                        w.clients[i].step = Step::Invalidates { done: true };
                        return;
                    }
                    if let Some(seq) = w.table.granted(NODE, who) {
                        assert_eq!(w.kernel_cached, None, "the kernel knows: {w:#?}");
                        w.clients[i].lease = Some((Mode::Write, seq));
                    }
                    w.clients[i].step = Step::Idle;
                }),
            }
        }

        fn kernel_steps(&self, out: &mut Vec<World>) {
            let mut go = |f: &mut dyn FnMut(&mut World)| {
                let mut w = self.clone();
                f(&mut w);
                out.push(w);
            };
            if let Some(value) = self.kernel_cached {
                self.read(value, self.acked, "the kernel");
            }
            if self.passing {
                // It reads and writes at the server's file, and none of it is anybody's to know.
                assert!(self.table.passes(NODE) && self.kernel_cached.is_none());
                assert!(self.clients.iter().all(|c| c.cached.is_none()));
                self.read(self.server, self.acked, "the kernel");
                let changing = self.table.nodes.get(&NODE).is_some_and(|n| n.changes > 0);
                if !changing && self.last < WRITES {
                    go(&mut |w| {
                        w.last += 1;
                        (w.server, w.acked) = (w.last, w.acked.max(w.last));
                    });
                }
                go(&mut |w| {
                    w.table.passed(NODE);
                    w.passing = false;
                });
                return;
            }
            match self.kernel {
                Step::Idle => {
                    // Its opens without one are closed, and it drops its pages.
                    go(&mut |w| {
                        w.passing = w.table.pass(NODE);
                        if w.passing {
                            w.kernel_cached = None;
                        }
                    });
                    if self.kernel_cached.is_none() {
                        go(&mut |w| w.kernel = Step::Wants(Access::Look, false));
                    }
                    go(&mut |w| w.kernel = Step::Wants(Access::Change, false));
                    go(&mut |w| w.kernel = Step::Wants(Access::Direct, false));
                }
                Step::Wants(access, waits) => go(&mut |w| {
                    w.kernel = w.enter(Origin::Kernel, access, waits);
                }),
                Step::Looks { since } => go(&mut |w| {
                    w.read(w.server, since, "the kernel's request");
                    w.kernel_cached = Some(w.server);
                    w.kernel = Step::Idle;
                }),
                Step::Changes { value, .. } => go(&mut |w| {
                    w.server = value;
                    w.kernel_cached = Some(value);
                    w.acked = w.acked.max(value);
                    w.table.ended(NODE);
                    w.kernel = Step::Idle;
                }),
                Step::Invalidates { .. } => unreachable!(),
            }
        }

        /// A request tries to begin. Values grow with the order in which changes begin, and only
        /// one is let be under way, so that it is clear which is the newest.
        fn enter(&mut self, who: Origin<Holder>, access: Access, waits: bool) -> Step {
            let changing = self.table.nodes.get(&NODE).is_some_and(|n| n.changes > 0);
            if access == Access::Change && (changing || self.last == WRITES) {
                return Step::Wants(access, waits);
            }
            let began = self.table.begin(NODE, who, access);
            if let Begin::Wait(_) = began {
                if !waits {
                    self.table.wait(NODE);
                }
                return Step::Wants(access, true);
            }
            if waits {
                self.table.waited(NODE);
            }
            let own = began == Begin::Own;
            match access {
                Access::Look => Step::Looks { since: self.acked },
                Access::Direct => {
                    let held = self.table.nodes.get(&NODE).map(|n| &n.held[..]);
                    assert!(held.unwrap_or_default().is_empty());
                    Step::Idle
                }
                Access::Change => {
                    self.last += 1;
                    let value = self.last;
                    Step::Changes {
                        value,
                        applied: false,
                        own,
                    }
                }
            }
        }
    }

    #[test]
    fn no_order_of_steps_shows_old_data() {
        let client = Client {
            step: Step::Idle,
            lease: None,
            cached: None,
            dirty: false,
            alive: true,
        };
        let first = World {
            table: Table::default(),
            clients: [client.clone(), client],
            kernel: Step::Idle,
            kernel_cached: None,
            passing: false,
            server: 0,
            last: 0,
            acked: 0,
        };
        let mut seen = HashSet::from([first.key()]);
        let mut todo = VecDeque::from([first]);
        let mut next = Vec::new();
        while let Some(world) = todo.pop_front() {
            for i in 0..CLIENTS {
                world.client_steps(i, &mut next);
            }
            world.kernel_steps(&mut next);
            for world in next.drain(..) {
                world.table.nodes.values().for_each(Node::check);
                if seen.insert(world.key()) {
                    todo.push_back(world);
                }
            }
        }
        // It went somewhere: grants, recalls, deaths.
        assert!(seen.len() > 10_000, "{}", seen.len());
    }
}
