//! Counts of what a mount does, one set a queue, written by the queue's thread alone.

mod failures;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uvfs_io::runtime::RuntimeCounts;
use uvfs_proto::abi::Opcode;
use uvfs_queue::pair::ServerQueue;
use uvfs_queue::wait::WaitCounts;

use crate::fs::Errno;
use crate::reply::{Outcome, Reply};
use crate::switch::Untracked;
pub use failures::Failure;
use failures::Failures;

/// Opcodes below this are counted one by one.
const OPCODES: usize = 64;
/// Latencies are counted by their power of two in nanoseconds.
const BUCKETS: usize = 40;
/// One request in this many is timed: to read the clock twice for each would cost too much.
const TIMED: u64 = 16;

/// One queue's counts.
#[derive(Debug)]
pub struct QueueStats {
    ops: [AtomicU64; OPCODES],
    errors: AtomicU64,
    failures: Failures,
    read: AtomicU64,
    written: AtomicU64,
    latency: [AtomicU64; BUCKETS],
    timed: AtomicU64,
    in_flight: AtomicU64,
    deepest: AtomicU64,
    spins: AtomicU64,
    sleeps: AtomicU64,
    enters: AtomicU64,
    /// Counts requests under way that the table of leases does not know.
    pub(crate) untracked: Untracked,
}

impl Default for QueueStats {
    fn default() -> Self {
        Self {
            ops: [const { AtomicU64::new(0) }; OPCODES],
            errors: AtomicU64::new(0),
            failures: Failures::default(),
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            latency: [const { AtomicU64::new(0) }; BUCKETS],
            timed: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            deepest: AtomicU64::new(0),
            spins: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
            enters: AtomicU64::new(0),
            untracked: Untracked::default(),
        }
    }
}

/// A load and a store are enough, as only the queue's thread writes.
fn add(counter: &AtomicU64, n: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(n),
        Ordering::Relaxed,
    );
}

impl QueueStats {
    /// A request begins; true when it is one to be timed.
    pub(crate) fn begin(&self, opcode: u32) -> bool {
        let counter = &self.ops[(opcode as usize).min(OPCODES - 1)];
        add(counter, 1);
        add(&self.in_flight, 1);
        let depth = self.in_flight.load(Ordering::Relaxed);
        if depth > self.deepest.load(Ordering::Relaxed) {
            self.deepest.store(depth, Ordering::Relaxed);
        }
        counter.load(Ordering::Relaxed) % TIMED == 1
    }

    /// A request has ended.
    pub(crate) fn end(&self, opcode: u32, failed: Option<Errno>) {
        add(&self.in_flight, u64::MAX);
        if let Some(errno) = failed {
            add(&self.errors, 1);
            self.failures.count(opcode, errno);
        }
    }

    pub(crate) fn timed(&self, took: Duration) {
        let nanos = took.as_nanos().max(1) as u64;
        add(&self.latency[(nanos.ilog2() as usize).min(BUCKETS - 1)], 1);
        add(&self.timed, nanos);
    }

    /// Requests, and bytes read and written.
    fn totals(&self) -> [u64; 3] {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let requests = self.ops.iter().map(get).sum();
        [requests, get(&self.read), get(&self.written)]
    }

    fn moved(&self, read: usize, written: usize) {
        add(&self.read, read as u64);
        add(&self.written, written as u64);
    }

    /// Counts what a READ gave or a WRITE took.
    pub(crate) fn count_bytes(&self, outcome: &Outcome) {
        match outcome {
            Ok(Reply::Read(read)) => self.moved(*read, 0),
            Ok(Reply::Written(out)) => self.moved(0, out.size as usize),
            _ => {}
        }
    }

    pub(crate) fn waited(&self, counts: RuntimeCounts) {
        self.spins.store(counts.waits.spins, Ordering::Relaxed);
        self.sleeps.store(counts.waits.sleeps, Ordering::Relaxed);
        self.enters.store(counts.enters, Ordering::Relaxed);
    }

    pub(crate) fn waited_here(&self, counts: WaitCounts) {
        self.spins.store(counts.spins, Ordering::Relaxed);
        self.sleeps.store(counts.sleeps, Ordering::Relaxed);
    }
}

/// Requests of one kind, or one of the counts of a file system's own.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct OpCount {
    /// The opcode's name, as in `LOOKUP`, or the name that the file system gives.
    pub name: String,
    /// How many.
    pub count: u64,
}

/// One bar of the latency histogram.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct LatencyBar {
    /// Upper bound in nanoseconds, exclusive.
    pub below_ns: u64,
    /// Timed requests in it.
    pub count: u64,
}

/// One queue's figures.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct QueueReport {
    /// Requests under way.
    pub in_flight: u64,
    /// The most there ever were.
    pub deepest: u64,
    /// Waits that ended while spinning.
    pub spins: u64,
    /// Waits that went to sleep, and so wake-ups.
    pub sleeps: u64,
    /// Calls of io_uring_enter(2).
    pub enters: u64,
}

/// One attached client's figures.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct ClientReport {
    /// Its process, as its socket tells.
    pub pid: u32,
    /// Its user, likewise.
    pub uid: u32,
    /// Requests of it that were received.
    pub requests: u64,
    /// Bytes that those read.
    pub bytes_read: u64,
    /// Bytes that those wrote.
    pub bytes_written: u64,
    /// The client's own statistics.
    pub says: ClientSays,
}

/// A client's own statistics, which the server can't check; at most a moment old.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct ClientSays {
    /// Its name.
    pub name: String,
    /// Reads and writes that its program made.
    pub calls: u64,
    /// Reads that its cache alone served.
    pub hits: u64,
    /// Bytes that its program read.
    pub bytes_read: u64,
    /// Bytes that its program wrote.
    pub bytes_written: u64,
    /// Nanoseconds that its program's threads waited.
    pub waited_ns: u64,
}

/// A client that is attached.
pub(crate) struct Attached {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) stats: Arc<QueueStats>,
    /// The counts of earlier clients, which are gone.
    before: [u64; 3],
    pub(crate) queue: Arc<ServerQueue>,
}

impl Attached {
    pub(crate) fn new(pid: u32, uid: u32, stats: Arc<QueueStats>, queue: Arc<ServerQueue>) -> Self {
        Self {
            pid,
            uid,
            before: stats.totals(),
            stats,
            queue,
        }
    }

    pub(crate) fn report(&self) -> ClientReport {
        let now = self.stats.totals();
        let [requests, bytes_read, bytes_written] =
            std::array::from_fn(|i| now[i].wrapping_sub(self.before[i]));
        let says = self.queue.published();
        // It may hold anything, and goes to a terminal.
        let shown = |byte: &u8| match byte {
            b' '..=b'~' => char::from(*byte),
            _ => '?',
        };
        let end = says.name.iter().position(|byte| *byte == 0);
        ClientReport {
            pid: self.pid,
            uid: self.uid,
            requests,
            bytes_read,
            bytes_written,
            says: ClientSays {
                name: says.name[..end.unwrap_or(says.name.len())]
                    .iter()
                    .map(shown)
                    .collect(),
                calls: says.calls,
                hits: says.hits,
                bytes_read: says.bytes_read,
                bytes_written: says.bytes_written,
                waited_ns: says.waited_ns,
            },
        }
    }
}

/// Whether the server watches for changes that programs of the host make.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct WatchReport {
    /// It does: the kernel caches names, attributes and data until they change.
    pub on: bool,
    /// Why it does not: the kernel caches them for a while.
    pub why_not: Option<String>,
    /// File systems below the source that are not watched, although the source's own is.
    pub unwatched: u64,
    /// Events that came.
    pub events: u64,
    /// Things that the server invalidated in the kernel.
    pub told: u64,
    /// Times that events were lost, and everything was dropped.
    pub lost: u64,
}

/// A mount's figures, as `uvfs stats --json` prints them.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Report {
    /// The served directory or image.
    pub source: String,
    /// `uring` or `dev`.
    pub transport: String,
    /// Where this report comes from.
    pub control: Option<String>,
    /// Where clients attach.
    #[serde(default)]
    pub socket: Option<String>,
    /// The server's process.
    pub pid: u32,
    /// Seconds since the mount began.
    pub uptime_s: u64,
    /// Requests received, of any kind.
    pub requests: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Bytes that callers read.
    pub bytes_read: u64,
    /// Bytes that callers wrote.
    pub bytes_written: u64,
    /// Opens whose reads and writes the kernel makes at the host's file itself, so that they are not
    /// among those counted here.
    #[serde(default)]
    pub backed_opens: u64,
    /// Whether changes behind the mount are watched for. Nothing where there can be none.
    #[serde(default)]
    pub watch: Option<WatchReport>,
    /// Errors by kind and errno, the most frequent first.
    #[serde(default)]
    pub failures: Vec<Failure>,
    /// By kind, the most frequent first.
    pub ops: Vec<OpCount>,
    /// The counts of the file system's own ([`FileSystem::counts`](crate::FileSystem::counts)).
    #[serde(default)]
    pub counts: Vec<OpCount>,
    /// Of one request in 16: from decoding to the answer. All bars, the last of which holds longer times, too.
    pub latency: Vec<LatencyBar>,
    /// Nanoseconds that these requests took together.
    #[serde(default)]
    pub latency_ns: u64,
    /// Queue by queue.
    pub queues: Vec<QueueReport>,
    /// Clients that are attached now.
    #[serde(default)]
    pub clients: Vec<ClientReport>,
    /// Leases that clients have.
    #[serde(default)]
    pub leases: Leases,
    /// How often the mount has outlived its server. Nothing for a mount that does not.
    #[serde(default)]
    pub survive: Option<SurviveReport>,
    /// Requests that have waited for longer than the mount's `slow`, the oldest first, at most 64.
    #[serde(default)]
    pub stuck: Vec<StuckRequest>,
}

/// How often a mount has outlived its server.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct SurviveReport {
    /// The process that keeps the mount, 0 if it is dead. SIGUSR2 has it execute the program anew (`uvfs upgrade`).
    pub keeper: u32,
    /// How many programs have served the mount, this one included; 0 if it can't be replaced by another.
    pub programs: u64,
    /// How many servers the mount has had, this one included.
    pub generation: u64,
    /// Requests that the kernel has sent again, because a server was killed before it answered them.
    pub sent_again: u64,
}

/// How many leases clients have.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Leases {
    /// Leases to read.
    pub read: u64,
    /// Leases to write.
    pub write: u64,
}

/// A request that has waited for long.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct StuckRequest {
    /// The opcode's name, as in `LOOKUP`.
    pub opcode: String,
    /// The number of the file. For a request about a name in a directory: that of the directory.
    pub node: u64,
    /// The path below the source, if the server could find it.
    pub file: Option<String>,
    /// The caller's thread; 0 where the server can't see it.
    pub pid: u32,
    /// How long the request has waited, in milliseconds.
    pub age_ms: u64,
    /// `the file system`, `a client's lease` or `a lock`.
    pub waits_for: String,
}

/// An opcode's name, for logs and reports.
pub(crate) fn opcode_name(opcode: u32) -> String {
    match Opcode::try_from(opcode) {
        Ok(opcode) => opcode.name().to_owned(),
        Err(_) => format!("opcode {opcode}"),
    }
}

/// Sums up queues.
pub(crate) fn report<'a>(queues: impl Iterator<Item = &'a QueueStats> + Clone) -> Report {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let mut ops = [0; OPCODES];
    let mut latency = [0; BUCKETS];
    let mut report = Report {
        pid: std::process::id(),
        ..Report::default()
    };
    report.failures = failures::sum(queues.clone().map(|queue| &queue.failures));
    for queue in queues {
        for (sum, counter) in ops.iter_mut().zip(&queue.ops) {
            *sum += get(counter);
        }
        for (sum, counter) in latency.iter_mut().zip(&queue.latency) {
            *sum += get(counter);
        }
        report.errors += get(&queue.errors);
        report.latency_ns += get(&queue.timed);
        report.bytes_read += get(&queue.read);
        report.bytes_written += get(&queue.written);
        report.queues.push(QueueReport {
            in_flight: get(&queue.in_flight),
            deepest: get(&queue.deepest),
            spins: get(&queue.spins),
            sleeps: get(&queue.sleeps),
            enters: get(&queue.enters),
        });
    }
    report.requests = ops.iter().sum();
    for (opcode, &count) in ops.iter().enumerate().filter(|(_, count)| **count > 0) {
        report.ops.push(OpCount {
            name: opcode_name(opcode as u32),
            count,
        });
    }
    report
        .ops
        .sort_by(|a, b| b.count.cmp(&a.count).then(a.name.cmp(&b.name)));
    for (bit, &count) in latency.iter().enumerate() {
        report.latency.push(LatencyBar {
            below_ns: 2 << bit,
            count,
        });
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A report has `?` for each byte of a client's name that is not printable ASCII.
    #[test]
    fn a_client_may_say_anything_of_itself() {
        use std::os::fd::AsFd;
        use uvfs_queue::pair::{ClientQueue, Published};

        let client = ClientQueue::create(4).unwrap();
        let fd = client.as_fd().try_clone_to_owned().unwrap();
        let queue = Arc::new(ServerQueue::open(fd, 1 << 20, 1 << 20).unwrap());
        let stats = Arc::new(QueueStats::default());
        stats.begin(Opcode::Read as u32);
        let one = Attached::new(7, 8, stats.clone(), queue);
        assert_eq!(one.report().says, ClientSays::default());
        client.publish(&Published {
            name: *b"\x1b[31m\xff\n\"name\xc3\xa9!\x7f",
            calls: u64::MAX,
            hits: u64::MAX,
            bytes_read: 5,
            bytes_written: u64::MAX,
            waited_ns: u64::MAX,
        });
        stats.begin(Opcode::Read as u32);
        stats.moved(100, 0);
        let report = one.report();
        assert_eq!((report.pid, report.uid, report.requests), (7, 8, 1));
        assert_eq!((report.bytes_read, report.bytes_written), (100, 0));
        assert_eq!(report.says.name, "?[31m??\"name??!?");
        assert_eq!((report.says.calls, report.says.bytes_read), (u64::MAX, 5));
        // Through the control socket and back.
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<ClientReport>(&text).unwrap(), report);
    }

    /// A report has the sums of all queues' counts.
    #[test]
    fn queues_are_summed() {
        let (a, b) = (QueueStats::default(), QueueStats::default());
        assert!(a.begin(Opcode::Read as u32));
        assert!(!a.begin(Opcode::Read as u32));
        a.end(Opcode::Read as u32, Some(Errno::ACCESS));
        b.begin(9999);
        b.moved(5, 7);
        b.timed(Duration::from_nanos(1000));
        let report = report([&a, &b].into_iter());
        assert_eq!((report.requests, report.errors), (3, 1));
        assert_eq!(
            report.ops[0],
            OpCount {
                name: "READ".into(),
                count: 2
            }
        );
        assert_eq!(report.latency.len(), BUCKETS);
        let filled: Vec<_> = report.latency.iter().filter(|bar| bar.count > 0).collect();
        assert_eq!(
            (filled.len(), filled[0].below_ns, filled[0].count),
            (1, 1024, 1)
        );
        let failure = &report.failures[0];
        assert_eq!(
            (&*failure.op, &*failure.errno, failure.count),
            ("READ", "EACCES", 1)
        );
        assert_eq!(
            (report.queues[0].in_flight, report.queues[0].deepest),
            (1, 2)
        );
        assert_eq!(report.latency_ns, 1000);
        assert_eq!((report.bytes_read, report.bytes_written), (5, 7));
    }
}
