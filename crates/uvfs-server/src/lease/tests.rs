use std::collections::{HashSet, VecDeque};

use super::*;

const NODE: u64 = 7;

/// A lease where there is no mount.
fn granted(table: &mut Table, who: Holder, mode: LeaseMode) -> u64 {
    match table.ask(NODE, who, mode, false) {
        Ask::Granted(seq) => seq,
        other => panic!("{other:?}"),
    }
}

/// The note that the kernel has nothing of a node is no lease, and ends when the node is forgotten.
#[test]
fn what_the_kernel_has_nothing_of_is_noted_beside_the_leases() {
    let mut t = Table::default();
    t.mark_unknown_to_kernel(NODE);
    t.mark_unknown_to_kernel(NODE);
    assert!(t.is_unknown_to_kernel(NODE) && t.is_free(NODE));
    // Leases come and go without it.
    let seq = granted(&mut t, 1, LeaseMode::Read);
    assert!(!t.is_free(NODE));
    t.returned(NODE, 1, seq, None);
    assert!(t.is_unknown_to_kernel(NODE) && t.is_free(NODE));
    t.mark_known_to_kernel(NODE);
    assert_eq!(
        (t.is_unknown_to_kernel(NODE), t.nodes.len(), t.hidden),
        (false, 0, 0)
    );
    // With a node that is forgotten it goes, and if there are too many of them all go.
    t.mark_unknown_to_kernel(NODE);
    t.forget(NODE, 1);
    assert_eq!(
        (t.is_unknown_to_kernel(NODE), t.nodes.len(), t.hidden),
        (false, 0, 0)
    );
    assert!(matches!(
        t.ask(NODE, 1, LeaseMode::Read, false),
        Ask::Granted(_)
    ));
    for node in 0..MOST_HIDDEN as u64 + 1 {
        t.mark_unknown_to_kernel(node);
    }
    assert!(
        t.is_unknown_to_kernel(MOST_HIDDEN as u64)
            && !t.is_unknown_to_kernel(NODE)
            && !t.is_free(NODE)
    );
    assert_eq!((t.nodes.len(), t.hidden), (2, 1));
}

/// The kernel is told once that a file has grown, until it may have learned an older size.
#[test]
fn the_kernel_is_told_of_a_length_once() {
    let mut t = Table::default();
    assert!(t.grows(NODE, 1, 10), "without a lease it may know anything");
    let seq = granted(&mut t, 1, LeaseMode::Write);
    let grown = [10, 10, 5, 11, 11].map(|length| t.grows(NODE, 1, length));
    assert_eq!(grown, [true, false, false, true, false]);
    t.mark_known_to_kernel(NODE);
    assert_eq!(
        [11, 11].map(|length| t.grows(NODE, 1, length)),
        [true, false]
    );
    t.returned(NODE, 1, seq, Some(LeaseMode::Read));
    granted(&mut t, 1, LeaseMode::Write);
    assert!(t.grows(NODE, 1, 11), "it was free to ask meanwhile");
}

/// One client has a write lease of a node, or several have read leases.
#[test]
fn one_writes_or_several_read() {
    let mut t = Table::default();
    let a = granted(&mut t, 1, LeaseMode::Read);
    let b = granted(&mut t, 2, LeaseMode::Read);
    assert_eq!(t.ask(NODE, 1, LeaseMode::Write, false), Ask::Refused);
    assert_eq!(t.begin(NODE, Origin::Client(3), Access::Look), Begin::Go);
    let recall = |who, seq, keep| Recall { who, seq, keep };
    assert_eq!(
        t.begin(NODE, Origin::Client(1), Access::Change),
        Begin::Wait(vec![recall(2, b, None)])
    );
    t.returned(NODE, 2, b, None);
    assert_eq!(t.begin(NODE, Origin::Client(1), Access::Change), Begin::Go);
    assert_eq!(t.ask(NODE, 1, LeaseMode::Write, false), Ask::Refused);
    t.ended(NODE);
    let w = granted(&mut t, 1, LeaseMode::Write);
    assert!(w > a && t.writes(NODE, 1));
    assert_eq!(t.begin(NODE, Origin::Client(1), Access::Look), Begin::Own);
    assert_eq!(
        t.begin(NODE, Origin::Kernel, Access::Look),
        Begin::Wait(vec![recall(1, w, Some(LeaseMode::Read))])
    );
    // An old number means nothing; the right one keeps what may be kept.
    t.returned(NODE, 1, a, None);
    t.returned(NODE, 1, w, Some(LeaseMode::Read));
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

/// An O_DIRECT open begins once all leases of the node have come back.
#[test]
fn a_direct_open_recalls_all_leases() {
    let mut t = Table::default();
    let a = granted(&mut t, 1, LeaseMode::Read);
    let Ask::Granted(b) = t.ask(NODE, 2, LeaseMode::Read, true) else {
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
    assert_eq!(t.ask(NODE, 1, LeaseMode::Read, true), Ask::Refused);
    t.passed(NODE);
    granted(&mut t, 1, LeaseMode::Read);
}

/// A node with a backing file gets no lease, and a node with a lease gets no backing file.
#[test]
fn there_are_no_leases_of_what_the_kernel_has_a_backing_file_of() {
    let mut t = Table::default();
    let Ask::Granted(a) = t.ask(NODE, 1, LeaseMode::Read, true) else {
        panic!()
    };
    assert!(!t.pass(NODE) && !t.passes(NODE));
    t.returned(NODE, 1, a, None);
    // Nor while one is being granted.
    assert_eq!(t.ask(NODE, 1, LeaseMode::Write, true), Ask::Invalidate);
    assert!(!t.pass(NODE));
    assert!(t.granted(NODE, 1).is_some());
    t.forget(NODE, 1);
    assert!(t.pass(NODE) && t.passes(NODE) && !t.passes(NODE + 1));
    assert_eq!(t.ask(NODE, 1, LeaseMode::Read, true), Ask::Refused);
    assert_eq!(t.ask(NODE, 1, LeaseMode::Write, true), Ask::Refused);
    assert_eq!(t.begin(NODE, Origin::Client(1), Access::Change), Begin::Go);
    t.ended(NODE);
    t.passed(NODE);
    assert!(t.is_free(NODE));
}

/// A lease is refused if the kernel read the node while it was being granted.
#[test]
fn what_the_kernel_does_meanwhile_spoils_a_grant() {
    let mut t = Table::default();
    assert_eq!(t.ask(NODE, 1, LeaseMode::Write, true), Ask::Invalidate);
    assert_eq!(t.ask(NODE, 2, LeaseMode::Read, true), Ask::Refused);
    assert_eq!(t.begin(NODE, Origin::Client(2), Access::Look), Begin::Go);
    assert_eq!(t.begin(NODE, Origin::Kernel, Access::Look), Begin::Go);
    assert_eq!(t.granted(NODE, 1), None);
    assert_eq!(t.ask(NODE, 1, LeaseMode::Write, true), Ask::Invalidate);
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
    lease: Option<(LeaseMode, u64)>,
    /// Cached value, and whether it is dirty.
    cached: Option<u8>,
    dirty: bool,
    alive: bool,
}

impl Client {
    fn new() -> Self {
        Self {
            step: Step::Idle,
            lease: None,
            cached: None,
            dirty: false,
            alive: true,
        }
    }
}

/// The number that the table knows a client by.
fn holder(i: usize) -> Holder {
    i as Holder + 1
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
    Vec<NodeLeases>,
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
        let mut table: Vec<NodeLeases> = self.table.nodes.values().cloned().collect();
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

    /// Adds the world that a step leads to.
    fn then(&self, out: &mut Vec<World>, step: impl FnOnce(&mut World)) {
        let mut world = self.clone();
        step(&mut world);
        out.push(world);
    }

    /// All worlds that one step of client `i` leads to.
    fn client_steps(&self, i: usize, out: &mut Vec<World>) {
        if self.clients[i].alive {
            self.cached_steps(i, out);
            self.flush_steps(i, out);
            self.then(out, |w| w.dies(i));
            self.request_steps(i, out);
        }
    }

    /// Calls that the cache serves, which take no time, and the one that fills it.
    fn cached_steps(&self, i: usize, out: &mut Vec<World>) {
        let c = &self.clients[i];
        let Some((mode, _)) = c.lease else { return };
        if let Some(value) = c.cached {
            self.read(value, self.acked, "a client");
        } else {
            // In one step: the server takes it in one.
            self.then(out, |w| {
                match w.table.begin(NODE, Origin::Client(holder(i)), Access::Look) {
                    Begin::Wait(_) => panic!("a holder waits for its own read: {w:#?}"),
                    _ => w.clients[i].cached = Some(w.server),
                }
            });
        }
        if mode == LeaseMode::Write && self.last < WRITES {
            self.then(out, |w| {
                w.last += 1;
                w.acked = w.acked.max(w.last);
                w.clients[i].cached = Some(w.last);
                w.clients[i].dirty = true;
            });
        }
    }

    /// Writeback, a recall that came, or a lease given up: flush, drop, return.
    fn flush_steps(&self, i: usize, out: &mut Vec<World>) {
        let (c, who) = (&self.clients[i], holder(i));
        if c.dirty {
            self.then(out, |w| {
                let began = w.table.begin(NODE, Origin::Client(who), Access::Change);
                assert_eq!(began, Begin::Own);
                w.server = w.clients[i].cached.unwrap();
                w.clients[i].dirty = false;
                w.table.ended(NODE);
            });
        } else if let Some((mode, seq)) = c.lease {
            self.then(out, |w| {
                w.clients[i].lease = None;
                w.clients[i].cached = None;
                w.table.returned(NODE, who, seq, None);
            });
            if mode == LeaseMode::Write {
                self.then(out, |w| {
                    w.clients[i].lease = Some((LeaseMode::Read, seq));
                    w.table.returned(NODE, who, seq, Some(LeaseMode::Read));
                });
            }
        }
    }

    /// The server writes what is dirty, then drops the leases.
    fn dies(&mut self, i: usize) {
        match self.clients[i].step {
            Step::Changes { .. } => self.table.ended(NODE),
            Step::Wants(_, true) => self.table.waited(NODE),
            _ => {}
        }
        let c = &mut self.clients[i];
        if c.dirty {
            assert!(self.table.writes(NODE, holder(i)));
            self.server = c.cached.unwrap();
        }
        *c = Client {
            alive: false,
            ..Client::new()
        };
        self.table.forget(NODE, holder(i));
    }

    /// Requests to the server: the next one, or the next step of the one that is under way.
    fn request_steps(&self, i: usize, out: &mut Vec<World>) {
        let (c, who) = (&self.clients[i], holder(i));
        match c.step {
            Step::Idle => {
                let mode = c.lease.map(|l| l.0);
                for want in [LeaseMode::Read, LeaseMode::Write] {
                    if mode.is_none_or(|m| m < want) {
                        self.then(out, |w| match w.table.ask(NODE, who, want, true) {
                            Ask::Granted(seq) => w.clients[i].lease = Some((want, seq)),
                            Ask::Invalidate => {
                                w.clients[i].step = Step::Invalidates { done: false };
                            }
                            Ask::Refused => {}
                        });
                    }
                }
                if mode.is_none() {
                    for access in [Access::Look, Access::Change] {
                        self.then(out, |w| w.clients[i].step = Step::Wants(access, false));
                    }
                }
            }
            Step::Wants(access, waits) => self.then(out, |w| {
                w.clients[i].step = w.enter(Origin::Client(who), access, waits);
            }),
            Step::Looks { since } => self.then(out, |w| {
                w.read(w.server, since, "a client's request");
                w.clients[i].step = Step::Idle;
            }),
            Step::Changes {
                value,
                applied: false,
                own,
            } => self.then(out, |w| {
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
            Step::Changes { value, own, .. } => self.then(out, |w| w.change_ends(i, value, own)),
            Step::Invalidates { done: false } => self.then(out, |w| {
                w.kernel_cached = None;
                w.clients[i].step = Step::Invalidates { done: true };
            }),
            Step::Invalidates { done: true } => self.then(out, |w| {
                if let Some(seq) = w.table.granted(NODE, who) {
                    assert_eq!(w.kernel_cached, None, "the kernel knows: {w:#?}");
                    w.clients[i].lease = Some((LeaseMode::Write, seq));
                }
                w.clients[i].step = Step::Idle;
            }),
        }
    }

    /// The kernel is told of a client's change, then the change ends, then the client drops its page.
    fn change_ends(&mut self, i: usize, value: u8, own: bool) {
        if !own {
            self.kernel_cached = None;
        }
        self.table.ended(NODE);
        self.acked = self.acked.max(self.server.min(value));
        let c = &mut self.clients[i];
        if c.lease.is_none_or(|(mode, _)| mode == LeaseMode::Read) {
            c.cached = None;
        }
        c.step = Step::Idle;
    }

    fn kernel_steps(&self, out: &mut Vec<World>) {
        if let Some(value) = self.kernel_cached {
            self.read(value, self.acked, "the kernel");
        }
        if self.passing {
            // It reads and writes at the server's file, of which no cache has anything.
            assert!(self.table.passes(NODE) && self.kernel_cached.is_none());
            assert!(self.clients.iter().all(|c| c.cached.is_none()));
            self.read(self.server, self.acked, "the kernel");
            let changing = self.table.nodes.get(&NODE).is_some_and(|n| n.changes > 0);
            if !changing && self.last < WRITES {
                self.then(out, |w| {
                    w.last += 1;
                    (w.server, w.acked) = (w.last, w.acked.max(w.last));
                });
            }
            self.then(out, |w| {
                w.table.passed(NODE);
                w.passing = false;
            });
            return;
        }
        match self.kernel {
            Step::Idle => {
                // Its opens without one are closed, and it drops its pages.
                self.then(out, |w| {
                    w.passing = w.table.pass(NODE);
                    if w.passing {
                        w.kernel_cached = None;
                    }
                });
                if self.kernel_cached.is_none() {
                    self.then(out, |w| w.kernel = Step::Wants(Access::Look, false));
                }
                self.then(out, |w| w.kernel = Step::Wants(Access::Change, false));
                self.then(out, |w| w.kernel = Step::Wants(Access::Direct, false));
            }
            Step::Wants(access, waits) => self.then(out, |w| {
                w.kernel = w.enter(Origin::Kernel, access, waits);
            }),
            Step::Looks { since } => self.then(out, |w| {
                w.read(w.server, since, "the kernel's request");
                w.kernel_cached = Some(w.server);
                w.kernel = Step::Idle;
            }),
            Step::Changes { value, .. } => self.then(out, |w| {
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

/// No order of reads, writes, grants and recalls shows a program old data.
#[test]
fn no_order_of_steps_shows_old_data() {
    let first = World {
        table: Table::default(),
        clients: [Client::new(), Client::new()],
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
            world.table.nodes.values().for_each(NodeLeases::check);
            if seen.insert(world.key()) {
                todo.push_back(world);
            }
        }
    }
    // It went somewhere: grants, recalls, deaths.
    assert!(seen.len() > 10_000, "{}", seen.len());
}
