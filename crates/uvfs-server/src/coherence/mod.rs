//! Keeps what clients and the kernel cache in agreement: the waiting, recalling and invalidating
//! around the table of `lease.rs`.
//!
//! `stage/` calls this module, in a plain mount for next to nothing. A request that changes something is counted
//! before it looks at the stage. So the server knows when those that began before the first client came have ended,
//! and grants the first lease only then.
//!
//! A recall goes to the client through its notification ring, and the request that it is for waits
//! as a task; its queue serves others. Invalidations of the kernel's cache are system calls that
//! wait for pages which a request of the kernel's has locked, so they are made by threads of their
//! own. Nothing that a client needs to return a lease waits for an invalidation: its writeback
//! passes, and needs none, for while it holds a write lease the kernel knows nothing.
//!
//! The kernel is told only of what it may have: names and attributes that it was given
//! (`kernel_cache.rs`), and nothing of nodes that only clients ever were given. Changes that programs
//! of the host make come from the file system, where it watches for them (`host.rs`). Files that some programs read
//! through the kernel's page cache, while others write past it, need care without any client (`opens.rs`).

mod access;
mod grants;
mod host;
mod invalidator;
mod kernel_cache;
mod opens;
mod seen;
mod shows;
mod stale;
mod turns;
mod waiting;

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::Duration;

use foldhash::HashMap;
use rustix::io::Errno;
use smallvec::SmallVec;
use uvfs_io::ops;
use uvfs_proto::abi::InitFlags;
use uvfs_proto::request::Operation;
use uvfs_queue::pair::ServerQueue;

pub(crate) use access::AccessSet;
use access::Use;
use invalidator::Invalidator;
use kernel_cache::{KernelCache, Key};
use opens::{Mixed, Opens};
use seen::Seen;

use crate::fs::{Context, FileSystem, Node, Origin, Unlinked};
use crate::interrupt;
use crate::lease::{Access, Begin, Holder, Link, Recall, Table};
use crate::notify::Notifier;
use crate::reply::{Outcome, Reply};
use crate::request::DEPTH;
use crate::request::Request;
use crate::stats::{Leases, QueueStats};
use crate::switch::{Stage, Switch, TRACKED};
pub(crate) use shows::Since;
use uvfs_sys::lock;
use waiting::Waiting;

const SHARDS: usize = 16;
/// How long a client does without a lease of a node that the kernel reads and writes itself.
const PASSING: Duration = Duration::from_millis(20);
/// How often a waiting request looks again: a recall may not have fit into its ring.
const TICK: Duration = Duration::from_millis(100);
#[derive(Default)]
struct Shard {
    table: Table,
    /// Counts changes of the table that a request may wait for.
    version: u64,
    wakers: HashMap<u64, Vec<Waker>>,
    /// Pages that the kernel has asked for since they were invalidated, of nodes that were.
    seen: HashMap<u64, Seen>,
    /// How the kernel has nodes open.
    opens: HashMap<u64, Opens>,
}

impl Shard {
    fn changed(&mut self, node: u64) {
        self.version += 1;
        for waker in self.wakers.remove(&node).unwrap_or_default() {
            waker.wake();
        }
    }
}

#[derive(Default)]
struct Queues {
    links: HashMap<Holder, Arc<Link>>,
    next: Holder,
    /// Whether all requests that began untracked have ended.
    quiet: bool,
}

/// Coordinates the caches of one session's clients and kernel.
#[derive(Default)]
pub(crate) struct Coherence {
    /// Whether there are clients is only changed under `attached`'s lock.
    stage: Switch,
    attached: Mutex<Queues>,
    shards: [Mutex<Shard>; SHARDS],
    /// Moves whenever attributes that a request has just read may have become old.
    epoch: AtomicU64,
    /// Tells the kernel of the mount, if there is one.
    kernel: std::sync::OnceLock<Arc<Invalidator>>,
    /// Tracks what that kernel may have cached.
    given: std::sync::OnceLock<KernelCache>,
    /// Of changes of the host.
    pub(crate) host: host::Counts,
    mixed: Mixed,
    /// The kernel keeps dirty pages (`-o writeback`).
    writes_back: AtomicBool,
    /// The kernel takes backing files.
    backs: AtomicBool,
    /// The kernel reads and writes every file without asking, or keeps dirty pages and a size of its
    /// own for as long as it likes: no lease is granted.
    alone: AtomicBool,
    /// Every queue of the session, to know of requests that began untracked.
    queues: Mutex<Vec<Arc<QueueStats>>>,
}

/// With more requests of one queue waiting for leases, their holders have less time ([`Link::is_late`]):
/// when none of a queue's entries is left, the mount stands still for the programs on that core.
const CROWD: usize = DEPTH / 2;

thread_local! {
    /// Requests of this thread's queue that wait for leases.
    static LEASE_WAITS: Cell<usize> = const { Cell::new(0) };
}

/// The process that made a request of the kernel's.
#[derive(Clone, Copy)]
pub(crate) struct Caller<'a> {
    /// Where it is interrupted.
    pub(crate) interrupts: &'a interrupt::Interrupts,
    pub(crate) cx: &'a Context,
    pub(crate) opcode: u32,
}

/// A request under way, on one node.
pub(crate) struct Entered<'a> {
    coherence: &'a Coherence,
    what: Use,
    /// By the holder of the node's write lease.
    own: bool,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let Use { node, access, .. } = self.what;
        if access == Access::Change {
            self.coherence.shard(node).table.ended(node);
        }
    }
}

/// A request under way: the nodes that it has entered, and since when its attributes may be old.
pub(crate) struct Under<'a> {
    entered: SmallVec<[Entered<'a>; 2]>,
    since: Since,
}

impl Coherence {
    fn shard(&self, node: u64) -> MutexGuard<'_, Shard> {
        lock(&self.shards[uvfs_sys::spread(node, SHARDS)])
    }

    /// Counts the leases that clients have.
    pub(crate) fn leases(&self) -> Leases {
        let mut leases = Leases::default();
        for shard in &self.shards {
            let count = lock(shard).table.count();
            leases.read += count.read;
            leases.write += count.write;
        }
        leases
    }

    /// Whether there are clients.
    pub(crate) fn tracks(&self) -> bool {
        self.stage().tracks()
    }

    /// The stage that the mount is in. If another one comes later, it has changed meanwhile.
    pub(crate) fn stage(&self) -> Stage {
        self.stage.stage()
    }

    /// From now on what the kernel may have cached is noted. It may have been given anything before.
    fn enter_stage(&self, bit: u64) {
        if self.stage().is_plain() && self.kernel.get().is_some() {
            self.given().assume_all();
        }
        self.stage.enter(bit);
    }

    /// Watches a queue of the session for requests that begin untracked.
    pub(crate) fn watch(&self, queue: Arc<QueueStats>) {
        lock(&self.queues).push(queue);
    }

    /// A kernel uses the session, which `notifier` tells.
    pub(crate) fn mounted(&self, notifier: Notifier) {
        self.kernel
            .get_or_init(|| Invalidator::new(notifier).into());
    }

    /// A client has come. `all_backed` says that every open of the session's kernel, if it has one, is to have a
    /// backing file.
    pub(crate) fn attach(
        &self,
        agreed: InitFlags,
        all_backed: bool,
        queue: Arc<ServerQueue>,
        deadline: Duration,
        guest: bool,
    ) -> Arc<Link> {
        if self.kernel.get().is_some() {
            let writes_back = agreed.contains(InitFlags::WRITEBACK_CACHE);
            self.writes_back.store(writes_back, Ordering::Relaxed);
            let backs = agreed.contains(InitFlags::PASSTHROUGH);
            self.backs.store(backs, Ordering::Relaxed);
            let alone = writes_back || (all_backed && backs);
            self.alone.store(alone, Ordering::Relaxed);
        }
        let mut attached = lock(&self.attached);
        attached.next += 1;
        let link = Arc::new(Link::new(attached.next, queue, deadline, guest));
        attached.links.insert(link.id, link.clone());
        self.enter_stage(TRACKED);
        link
    }

    /// A client has gone, its dirty pages are written: requests that wait for its leases go on.
    pub(crate) fn detach(&self, link: &Link) {
        link.ended();
        self.give_up(link, |_| true);
        let mut attached = lock(&self.attached);
        attached.links.remove(&link.id);
        if attached.links.is_empty() {
            attached.quiet = false;
            self.stage.leave(TRACKED);
            for shard in &self.shards {
                let mut shard = lock(shard);
                shard.seen.clear();
                shard.table.show_all();
            }
            if let Some(given) = self.given.get() {
                given.settle();
            }
        }
    }

    /// The kernel is to be given a backing file of a node. Whether it may: no client has a lease of it,
    /// and from now on none gets one.
    pub(crate) fn pass(&self, node: u64) -> bool {
        self.shard(node).table.pass(node)
    }

    /// The kernel was given no backing file after all, or its backing file was closed.
    pub(crate) fn passed(&self, node: u64) {
        self.shard(node).table.passed(node);
    }

    /// Whether nothing is under way that the table does not know.
    fn settled(&self) -> bool {
        let mut attached = lock(&self.attached);
        if !attached.quiet {
            attached.quiet = (lock(&self.queues).iter()).all(|queue| queue.untracked.is_none());
        }
        attached.quiet
    }

    /// A client was given a node. Remembers it as one that the kernel does not know, if this is its
    /// only lookup.
    fn learns<F: FileSystem>(&self, fs: &F, node: u64) {
        let alone = || lookups(fs, Node(node)) == Some(1);
        if self.kernel.get().is_none() || !alone() || !self.settled() {
            return;
        }
        self.shard(node).table.mark_unknown_to_kernel(node);
        // Again: a sender that got a lookup in between either counts now, or finds it here.
        if !alone() {
            self.shard(node).table.mark_known_to_kernel(node);
        }
    }

    /// Whether the kernel of a mount may know a node.
    pub(crate) fn is_known_to_kernel(&self, node: u64) -> bool {
        self.kernel.get().is_some() && !self.is_unknown_to_kernel(node)
    }

    fn given(&self) -> &KernelCache {
        self.given.get_or_init(KernelCache::default)
    }

    /// A RENAME of the kernel's is about to begin: names move, and keep the lifetime that they had.
    pub(crate) fn moves(&self, request: &Request<'_>) {
        let (to, names) = match request.operation {
            Operation::Rename { arg, name, newname } => (arg.newdir, [name, newname]),
            Operation::Rename2 { arg, name, newname } => (arg.newdir, [name, newname]),
            _ => return,
        };
        for (parent, name) in [request.node, to].into_iter().zip(names) {
            let key = Key::name(parent, name.to_bytes());
            self.given().give(key, self.tracks());
        }
    }

    /// Begins a request's work on one node; waits until no lease is in its way. `caller` says which program
    /// waits then, and how it is interrupted, for requests of the kernel's.
    async fn enter(
        &self,
        origin: Origin<&Link>,
        what: Use,
        caller: Option<Caller<'_>>,
    ) -> Result<Entered<'_>, Errno> {
        let who = origin.map(|link| link.id);
        let Use { node, access, .. } = what;
        let mut waiting = None;
        let mut sent: SmallVec<[Recall; 4]> = SmallVec::new();
        loop {
            let (recalls, version) = {
                let mut shard = self.shard(node);
                let own = match shard.table.begin(node, who, access) {
                    Begin::Wait(recalls) => Err(recalls),
                    Begin::Own => Ok(true),
                    Begin::Go => Ok(false),
                };
                match own {
                    Ok(own) => {
                        drop(shard);
                        drop(waiting);
                        return Ok(Entered {
                            coherence: self,
                            what,
                            own,
                        });
                    }
                    Err(recalls) => {
                        waiting
                            .get_or_insert_with(|| Waiting::begin(self, &mut shard, node, caller));
                        (recalls, shard.version)
                    }
                }
            };
            if let Origin::Client(link) = origin
                && link.is_over()
            {
                return Err(Errno::NOTCONN);
            }
            if let Some(waiting) = &mut waiting {
                waiting.recall(&recalls, &mut sent);
                pin!(waiting.changed(version)).await?;
            }
        }
    }

    /// Waits until the node's leases have changed since `version`, or a while.
    async fn changed(&self, node: u64, version: u64) {
        let mut tick = pin!(ops::sleep(TICK));
        std::future::poll_fn(|cx| {
            let mut shard = self.shard(node);
            if shard.version != version {
                return Poll::Ready(());
            }
            let wakers = shard.wakers.entry(node).or_default();
            if !wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                wakers.push(cx.waker().clone());
            }
            drop(shard);
            tick.as_mut().poll(cx)
        })
        .await;
    }

    /// Lets a request begin once no lease is in its way.
    ///
    /// # Errors
    /// ENOTCONN when the client that it comes from is being ended.
    pub(crate) async fn begin(
        &self,
        request: &Request<'_>,
        access: &AccessSet<'_>,
        interrupts: &interrupt::Interrupts,
    ) -> Result<Under<'_>, Errno> {
        let since = self.now();
        let mut entered = SmallVec::new();
        let is_kernels = matches!(request.origin, Origin::Kernel);
        let cx = &request.cx;
        let caller = is_kernels.then_some(Caller {
            interrupts,
            cx,
            opcode: request.operation.opcode() as u32,
        });
        for &what in &access.nodes {
            if what.access == Access::Direct && !(is_kernels && self.backs.load(Ordering::Relaxed))
            {
                continue;
            }
            if !is_kernels {
                self.write_back(what.node).await;
            }
            entered.push(self.enter(request.origin, what, caller).await?);
        }
        if is_kernels {
            self.moves(request);
        }
        Ok(Under { entered, since })
    }

    /// Runs a handler that sets the size of a node. The kernel is told of no size of it meanwhile.
    pub(crate) async fn in_turn<T>(&self, node: u64, handler: impl Future<Output = T>) -> T {
        let Some(kernel) = self.kernel.get() else {
            return handler.await;
        };
        let truncation = kernel.truncates(node).await;
        let done = handler.await;
        kernel.truncated(node, truncation);
        done
    }

    /// Has the kernel write back its dirty pages of a node, if it may have any.
    async fn write_back(&self, node: u64) {
        if self.writes_back.load(Ordering::Relaxed) {
            self.invalidate(node, 0, 0).await;
        }
    }

    /// Invalidates a node's attributes in the kernel, and its pages unless `offset` is negative.
    async fn invalidate(&self, node: u64, offset: i64, len: i64) {
        let Some(kernel) = self.kernel.get() else {
            return;
        };
        self.shard(node).drops(node, offset, len);
        Box::pin(kernel.inode(node, offset, len)).await;
    }

    /// Whether any client may have cached something of a node.
    pub(crate) fn is_leased(&self, node: u64) -> bool {
        !self.shard(node).table.is_free(node)
    }

    /// After a request's handler: tells the kernel what a client has changed, and corrects what in the reply may be old.
    /// `grown` is a node whose file a client has made longer, maybe, and how long that is at least. Gives the node of a
    /// client's reply whose attributes may be another holder's to change: they have to be asked for, see
    /// [`Coherence::looks`].
    pub(crate) async fn end<F: FileSystem>(
        &self,
        fs: &F,
        request: &Request<'_>,
        access: &AccessSet<'_>,
        under: Under<'_>,
        grown: Option<(u64, u64)>,
        outcome: &mut Outcome,
    ) -> Option<u64> {
        if let (Origin::Client(link), Ok(Reply::Written(_))) = (request.origin, &*outcome)
            && self.writes(link, request.node)
        {
            link.progressed(request.node);
        }
        if outcome.is_err() && under.entered.is_empty() {
            return None;
        }
        match (request.origin, &request.operation) {
            (Origin::Client(link), _) => {
                self.tell(self.stale(link, access, &under, grown)).await;
            }
            (Origin::Kernel, &Operation::Write(arg)) => {
                Box::pin(self.drop_written(request.node, arg)).await;
            }
            (Origin::Kernel, _) => {}
        }
        let since = under.since;
        drop(under);
        let Ok(reply) = outcome else { return None };
        let Origin::Client(link) = request.origin else {
            if let Some(entry) = reply.entry_mut()
                && !self.may_keep(entry.nodeid, since)
            {
                entry.set_attr_ttl(Duration::ZERO);
            }
            self.shows(fs, request, reply, since);
            return None;
        };
        if let Reply::Listing(listed) = reply {
            self.lists(fs, listed, since, |_, _| {});
        }
        let unlinked = match reply {
            Reply::Removed(unlinked) => *unlinked,
            _ => Unlinked::default(),
        };
        let unlinked = Unlinked {
            node: unlinked.node.filter(|&node| {
                // The kernel has nothing to drop of a node that only this client was given.
                let own = link.lookups().get(&node.0).map_or(0, |&own| own);
                own == 0 || lookups(fs, node) != Some(own)
            }),
            ..unlinked
        };
        self.tell(self.stale_names(access, unlinked)).await;
        let entry = reply.entry_mut()?;
        self.learns(fs, entry.nodeid);
        self.is_anothers(link, entry.nodeid).then_some(entry.nodeid)
    }
}

/// How many lookups of a node the file system counts, if it does.
fn lookups<F: FileSystem>(fs: &F, node: Node) -> Option<u64> {
    fs.clients()?.lookups(node)
}

#[cfg(test)]
mod tests {
    use uvfs_proto::abi;

    use super::*;

    const NODE: u64 = 40;
    const OTHER: u64 = 50;

    /// The kernel gets no lifetime with a name that has changed since, or that is contended.
    #[test]
    fn the_kernel_is_given_no_lifetime_of_what_a_client_changes() {
        let coherence = Coherence::default();
        coherence.enter_stage(TRACKED);
        let entry = || {
            let mut entry = abi::EntryOut {
                nodeid: OTHER,
                ..Default::default()
            };
            entry.set_entry_ttl(Duration::from_secs(1));
            entry.set_attr_ttl(Duration::from_secs(2));
            entry
        };
        let lives = |since, name: &[u8]| {
            let mut entry = entry();
            coherence.shows_entry(Some((NODE, name)), &mut entry, since);
            (entry.entry_valid, entry.attr_valid)
        };
        coherence.shard(OTHER).table.mark_unknown_to_kernel(OTHER);
        let before = coherence.now();
        assert_eq!(lives(before, b"name"), (1, 2));
        // From now on the kernel knows the node.
        assert!(!coherence.is_unknown_to_kernel(OTHER));
        let name = Key::name(NODE, b"name");
        let version = coherence.given().change(name).expect("it was given");
        assert_eq!(lives(before, b"name"), (0, 2));
        assert_eq!(lives(before, b"another"), (1, 2));
        assert_eq!(lives(coherence.now(), b"name"), (1, 2));
        // Contended from here.
        coherence.given().dropped(name, version);
        assert_eq!(lives(coherence.now(), b"name"), (0, 2));
        assert!(coherence.stale_links(OTHER).is_some());
        assert!(coherence.stale_links(NODE).is_none());
    }
}
