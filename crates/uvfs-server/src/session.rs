//! A file system that is served: the negotiation with the kernel, and the state that its queues share. (A client's
//! session is something else: `client/`.)

mod handle;
pub(crate) mod stuck;
mod tokens;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;
use uvfs_proto::abi::{self, InitFlags, NotifyCode};
use uvfs_proto::reply;
use uvfs_proto::request::{self, Negotiated, Operation, Request};
use zerocopy::{Immutable, IntoBytes};

use crate::coherence::Coherence;
use crate::drop_behind::{DropBehind, Recent};
use crate::fs::{Config, Error, FileSystem, HostChange, Node, Result};
use crate::interrupt;
use crate::notify::{Notifier, Retrievals, Writers};
pub(crate) use crate::request::DEPTH;
use crate::stats::{self, Attached, OpCount, QueueStats, Report, SurviveReport, WatchReport};
use crate::survive::Ledger;
use crate::token;
use uvfs_sys::lock;

/// The kernel's own limit of a request's pages (fs.fuse.max_pages_limit) by default.
const MAX_PAGES: u32 = 256;
const PAGE: u32 = 4096;
/// The protocol counts a request's pages in 16 bits.
const MOST_WRITE: u32 = u16::MAX as u32 * PAGE;

/// The transport of a session without a mount.
const UNMOUNTED: &str = "shm";

/// How a session serves.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// The name that `stats` shows.
    pub source: String,
    /// Largest write in bytes, from 4096 to 65,535 pages of that size; others are refused.
    pub max_write: u32,
    /// Largest readahead in bytes.
    pub max_readahead: u32,
    /// Handlers are told to leave nothing in the store's cache, and the kernel's own pages of a
    /// mount are dropped behind its reads and writes.
    pub uncached: bool,
    /// Every open of the kernel's is to have a backing file, if the kernel takes those: then clients
    /// are granted no leases.
    pub all_backed: bool,
    /// Writes are to be durable when they return (the mount option `sync`): the kernel sees to its own,
    /// and clients are told.
    pub synchronous: bool,
    /// The server logs requests that have waited for longer, and `uvfs stats` lists them; zero for neither.
    pub slow: Duration,
}

impl Default for SessionOptions {
    fn default() -> Self {
        let max_write = MAX_PAGES * PAGE;
        Self {
            source: String::new(),
            max_write,
            max_readahead: max_write,
            uncached: false,
            all_backed: false,
            synchronous: false,
            slow: Duration::from_secs(10),
        }
    }
}

/// The outcome of the file system's `init`, and of the kernel's.
struct Agreement {
    negotiated: Negotiated,
    /// In bytes.
    max_write: u32,
    takes_uncached: bool,
}

/// The state that all queues of one mount share.
pub struct Session<F> {
    pub(crate) fs: F,
    pub(crate) options: SessionOptions,
    pub(crate) interrupts: interrupt::Interrupts,
    pub(crate) coherence: Arc<Coherence>,
    device: Arc<OwnedFd>,
    agreed: OnceLock<Agreement>,
    retrievals: Retrievals,
    /// Where threads that notify are noted, if the mount outlives this server.
    writers: Arc<OnceLock<Writers>>,
    queues: Mutex<Vec<Arc<QueueStats>>>,
    transport: OnceLock<&'static str>,
    control: OnceLock<PathBuf>,
    socket: OnceLock<PathBuf>,
    pub(crate) tokens: token::Tokens,
    clients: Mutex<Vec<Arc<Attached>>>,
    /// Counters of clients that have gone, for the next clients.
    spare_queues: Mutex<Vec<Arc<QueueStats>>>,
    /// The ranges that the kernel may have cached, where they are to be dropped again.
    pub(crate) recent: OnceLock<Arc<Recent>>,
    /// Opens that were answered with a backing file.
    backed: AtomicU64,
    /// The file system has answered ENOSYS to copy_file_range(2).
    pub(crate) copies_not: AtomicBool,
    /// Paths of the files that slow requests are about.
    pub(crate) slow: stuck::Names,
    /// What the next server of the mount gets, if there may be one.
    ledger: OnceLock<Arc<Ledger>>,
    began: Instant,
}

/// The offer in the kernel's first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    /// The kernel's minor protocol version.
    pub minor: u32,
    /// The features that it offers.
    pub flags: InitFlags,
}

/// The kernel's INIT, read and not yet answered.
pub struct Init {
    header: abi::InHeader,
    arg: abi::InitIn,
    /// An earlier server has answered it.
    answered: bool,
}

impl Init {
    /// The kernel's offer.
    pub fn offered(&self) -> Offered {
        Offered {
            minor: self.arg.minor.min(abi::KERNEL_MINOR_VERSION),
            flags: self.arg.init_flags(),
        }
    }
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl<F: FileSystem> Session<F> {
    /// Of a `/dev/fuse` descriptor that is mounted (or about to be).
    pub fn new(fs: F, device: OwnedFd, options: SessionOptions) -> Self {
        let session = Self::of(fs, device, options);
        session.coherence.mounted(session.notifier());
        session
    }

    fn of(fs: F, device: OwnedFd, options: SessionOptions) -> Self {
        Self {
            fs,
            options,
            interrupts: interrupt::Interrupts::default(),
            coherence: Arc::default(),
            device: Arc::new(device),
            agreed: OnceLock::new(),
            retrievals: Retrievals::default(),
            writers: Arc::default(),
            queues: Mutex::default(),
            transport: OnceLock::new(),
            control: OnceLock::new(),
            socket: OnceLock::new(),
            tokens: token::Tokens::default(),
            clients: Mutex::default(),
            spare_queues: Mutex::default(),
            recent: OnceLock::new(),
            backed: AtomicU64::new(0),
            copies_not: AtomicBool::new(false),
            slow: stuck::Names::default(),
            ledger: OnceLock::new(),
            began: Instant::now(),
        }
    }

    /// Of a file system that is not mounted: only clients over shared memory use it.
    ///
    /// # Errors
    /// The error of the file system's `init`.
    pub fn unmounted(fs: F, options: SessionOptions) -> io::Result<Self> {
        // A notification would be written to this.
        let null = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
        let offered = InitFlags::ASYNC_READ
            | InitFlags::BIG_WRITES
            | InitFlags::MAX_PAGES
            | InitFlags::INIT_EXT
            | InitFlags::DONT_MASK;
        let mut config = Config::new(offered, abi::KERNEL_MINOR_VERSION);
        config.wanted = offered;
        config.max_write = options.max_write;
        config.max_readahead = options.max_readahead;
        let session = Self::of(fs, null.into(), options);
        session.set_transport(UNMOUNTED);
        session.fs.init(&mut config, session.handle())?;
        let _ = session.agreed.set(Agreement {
            negotiated: Negotiated {
                minor: abi::KERNEL_MINOR_VERSION,
                flags: config.wanted & offered,
            },
            max_write: session.largest_write(&config)?,
            takes_uncached: config.uncached,
        });
        Ok(session)
    }

    /// The file system.
    pub fn fs(&self) -> &F {
        &self.fs
    }

    /// The mounted `/dev/fuse` descriptor.
    pub fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// Tells the kernel what it can't know; from any thread. Without a mount, notifications go nowhere.
    pub fn notifier(&self) -> Notifier {
        let retrievals = self.retrievals.clone();
        Notifier::new(self.device.clone(), retrievals, self.writers.clone())
    }

    /// Starts dropping the kernel's pages, if that is wanted.
    pub(crate) fn drop_behind(&self) -> io::Result<Option<DropBehind>> {
        if !self.options.uncached {
            return Ok(None);
        }
        let recent = self.recent.get_or_init(Arc::default).clone();
        DropBehind::start(recent, self.notifier()).map(Some)
    }

    pub(crate) fn retrieved(&self, unique: u64, offset: u64, data: Vec<u8>) {
        let sender = lock(&self.retrievals).remove(&unique);
        match sender {
            // The caller may have given up.
            Some(sender) => drop(sender.try_send((offset, data))),
            None => tracing::warn!(unique, "the kernel sent data that was not asked for"),
        }
    }

    /// Invalidates the attributes that the kernel has of a node, where a request of its own changed them
    /// and the answer can't say so.
    pub(crate) fn drop_attributes(&self, node: u64) {
        let arg = abi::NotifyInvalInodeOut {
            ino: node,
            // None of its pages: that could wait for one that another request has locked.
            off: -1,
            len: 0,
        };
        self.tell(node, NotifyCode::InvalInode, &arg, &[]);
    }

    pub(crate) fn tell<T>(&self, node: u64, code: NotifyCode, arg: &T, data: &[u8])
    where
        T: IntoBytes + Immutable,
    {
        let writers = self.writers.get();
        let told = crate::notify::send(writers, self.device.as_fd(), code, arg, data);
        if let Err(error) = told {
            tracing::debug!(node, %error, "a notification was not taken");
        }
    }

    /// The kernel was given a file with a backing file.
    pub(crate) fn counts_backed_open(&self) {
        self.backed.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes, for `drop_behind.rs`, bytes that a READ or WRITE of the kernel's has transferred: the kernel may have
    /// cached them.
    pub(crate) fn moved(&self, node: u64, offset: u64, len: usize) {
        if let Some(recent) = self.recent.get() {
            recent.add(node, offset, len);
        }
    }

    /// The mount outlives this server, whose state is kept in `ledger` ([`survive`](crate::survive)). To be called before
    /// [`Server::start`](crate::Server::start), which then serves over `/dev/fuse`, or with [`Transport::Uring`](crate::Transport::Uring)
    /// over io_uring.
    ///
    /// # Errors
    /// EOPNOTSUPP if the file system has no [`FileSystem::survive`].
    pub fn outlives(&self, ledger: &Arc<Ledger>) -> io::Result<()> {
        if self.fs.survive().is_none() {
            return Err(Errno::OPNOTSUPP.into());
        }
        let _ = self.writers.set(ledger.writers().clone());
        let _ = self.ledger.set(ledger.clone());
        Ok(())
    }

    /// What the next server gets, if there may be one.
    pub(crate) fn ledger(&self) -> Option<&Arc<Ledger>> {
        self.ledger.get()
    }

    /// Has the kernel drop what it may have cached and is old by now, after an earlier server was killed: that one may have
    /// answered a change whose notification it did not send.
    ///
    /// Names stay where that is safe: with a name that is dropped goes what is mounted below it, and files that are open there
    /// lose their path in /proc.
    pub(crate) fn drop_old(&self, nodes: Vec<Node>) -> io::Result<()> {
        let notifier = self.notifier();
        let had_clients = self.ledger().is_some_and(|ledger| ledger.had_clients());
        if let Some(watch) = self.fs.watch().filter(|watch| watch.why_not.is_none()) {
            if !watch.goes_on || had_clients {
                self.coherence.host_changed(HostChange::Anything(nodes));
                return Ok(());
            }
            if watch.contents_go_on {
                return Ok(());
            }
            for node in nodes {
                self.coherence.host_changed(HostChange::Contents(node));
            }
            return Ok(());
        }
        // Without a watcher the kernel keeps names for as long as the file system allows, told or not. An older kernel
        // keeps them in any case.
        if had_clients {
            let _ = notifier.new_epoch();
        }
        for node in nodes {
            notifier.invalidate_inode(node, -1, 0)?;
        }
        Ok(())
    }

    /// Waits for the kernel's first request.
    ///
    /// # Errors
    /// When the mount is gone, or speaks a protocol older than 7.31.
    pub fn read_init(&self) -> io::Result<Init> {
        if let Some(ledger) = self.ledger()
            && let Some(arg) = ledger.init()?
        {
            return Ok(Init {
                header: abi::InHeader::default(),
                arg,
                answered: true,
            });
        }
        let mut message = vec![0; abi::MIN_READ_BUFFER + 4096 + self.options.max_write as usize];
        loop {
            let len = match rustix::io::read(&self.device, &mut message) {
                Ok(len) => len,
                Err(Errno::INTR | Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            };
            let message = &message[..len];
            let malformed = |error: request::ParseError| invalid(error.to_string());
            let before = Negotiated::default();
            let (header, op, rest) = request::split(message, before).map_err(malformed)?;
            let parsed = Request::parse(&header, op, rest, before).map_err(malformed)?;
            let Operation::Init(arg) = parsed.operation else {
                return Err(invalid(format!(
                    "the first request is no INIT: {header:?} {parsed:?}"
                )));
            };
            if arg.major > abi::KERNEL_VERSION {
                // The kernel asks again with the version that it is told here.
                let out = abi::InitOut {
                    major: abi::KERNEL_VERSION,
                    ..Default::default()
                };
                self.reply(header.unique, out.as_bytes())?;
                continue;
            }
            if arg.major < abi::KERNEL_VERSION || arg.minor < abi::MIN_MINOR_VERSION {
                self.reply_error(header.unique, Errno::PROTO)?;
                return Err(invalid(format!(
                    "the kernel speaks FUSE {}.{}, and 7.{} (Linux 5.4) is the oldest that will do",
                    arg.major,
                    arg.minor,
                    abi::MIN_MINOR_VERSION
                )));
            }
            return Ok(Init {
                header,
                arg,
                answered: false,
            });
        }
    }

    /// Answers the kernel's first request; from then on it sends others.
    ///
    /// # Errors
    /// The error of the file system's `init`, or when the mount is gone.
    pub fn answer_init(&self, init: &Init, over_io_uring: bool) -> io::Result<()> {
        let Offered {
            minor,
            flags: offered,
        } = init.offered();
        let mut config = Config::new(offered, minor);
        config.wanted = InitFlags::ASYNC_READ
            | InitFlags::BIG_WRITES
            | InitFlags::MAX_PAGES
            | InitFlags::PARALLEL_DIROPS
            | InitFlags::ASYNC_DIO
            | InitFlags::ABORT_ERROR
            | InitFlags::HAS_RESEND
            | InitFlags::INIT_EXT;
        config.max_write = self.options.max_write;
        config.max_readahead = self.options.max_readahead.min(init.arg.max_readahead);
        let agreed = self.fs.init(&mut config, self.handle());
        let agreed = agreed.and_then(|()| self.largest_write(&config));
        let max_write = match agreed {
            Ok(max_write) => max_write,
            Err(error) if init.answered => return Err(error.into()),
            Err(error) => {
                self.reply_error(init.header.unique, error.errno())?;
                return Err(error.into());
            }
        };
        let mut flags = config.wanted & offered;
        flags.set(InitFlags::OVER_IO_URING, over_io_uring);
        if minor < 38 {
            flags.remove(InitFlags::SECURITY_CTX | InitFlags::CREATE_SUPP_GROUP);
        }
        self.coherence.set_background(config.max_background);
        let (low, high) = flags.words();
        let out = abi::InitOut {
            major: abi::KERNEL_VERSION,
            minor,
            max_readahead: config.max_readahead,
            flags: low,
            flags2: high,
            max_background: config.max_background,
            congestion_threshold: config.congestion_threshold,
            max_write,
            time_gran: config.time_gran,
            max_pages: max_write.div_ceil(4096) as u16,
            max_stack_depth: config.max_stack_depth,
            ..Default::default()
        };
        let agreed = Agreement {
            negotiated: Negotiated { minor, flags },
            max_write,
            takes_uncached: config.uncached,
        };
        if self.agreed.set(agreed).is_err() {
            return Err(invalid("a second INIT".into()));
        }
        tracing::debug!(minor, ?flags, max_write, "negotiated");
        if init.answered {
            return Ok(());
        }
        if let Some(ledger) = self.ledger() {
            ledger.agreed(&init.arg);
        }
        self.reply(init.header.unique, out.as_bytes())
    }

    /// The largest write that the file system and the options allow.
    fn largest_write(&self, config: &Config) -> Result<u32> {
        let within = |name: &str, value: u32, most: u32| match value {
            value if (PAGE..=most).contains(&value) => Ok(()),
            _ => {
                let why = format!("{name} is {value}, and has to be from {PAGE} to {most}");
                Err(Error::new(Errno::INVAL, why))
            }
        };
        let most = self.options.max_write;
        within("SessionOptions::max_write", most, MOST_WRITE)?;
        within("Config::max_write", config.max_write, most)?;
        Ok(config.max_write)
    }

    fn reply(&self, unique: u64, body: &[u8]) -> io::Result<()> {
        let mut message = reply::header(unique, 0, body.len()).as_bytes().to_vec();
        message.extend_from_slice(body);
        rustix::io::write(&self.device, &message)?;
        Ok(())
    }

    fn reply_error(&self, unique: u64, errno: Errno) -> io::Result<()> {
        let header = reply::header(unique, -errno.raw_os_error(), 0);
        rustix::io::write(&self.device, header.as_bytes())?;
        Ok(())
    }

    pub(crate) fn negotiated(&self) -> Negotiated {
        let agreed = self.agreed.get();
        agreed.map_or_else(Negotiated::default, |agreed| agreed.negotiated)
    }

    /// Whether the file system can leave nothing of a read or write in a cache of its store.
    pub(crate) fn takes_uncached(&self) -> bool {
        self.agreed
            .get()
            .is_some_and(|agreed| agreed.takes_uncached)
    }

    /// The most payload that one request has, in bytes.
    pub(crate) fn max_payload(&self) -> usize {
        let agreed = self.agreed.get();
        let max_write = agreed.map_or(self.options.max_write, |agreed| agreed.max_write);
        (max_write as usize)
            .max(abi::MIN_READ_BUFFER)
            .max(MAX_PAGES as usize * 4096)
    }

    pub(crate) fn raw_device(&self) -> i32 {
        self.device.as_raw_fd()
    }

    /// Counts of a new queue.
    pub(crate) fn add_queue(&self) -> Arc<QueueStats> {
        let stats = Arc::new(QueueStats::default());
        self.coherence.watch(stats.clone());
        lock(&self.queues).push(stats.clone());
        stats
    }

    /// Lists a client.
    pub(crate) fn client_attached(&self, one: &Arc<Attached>) {
        if let Some(ledger) = self.ledger() {
            ledger.has_clients();
        }
        lock(&self.clients).push(one.clone());
    }

    /// A client goes.
    pub(crate) fn client_gone(&self, one: &Arc<Attached>) {
        lock(&self.clients).retain(|other| !Arc::ptr_eq(one, other));
    }

    /// Counters for a client. Those of a client that has gone are used again, so that they stay few and no count is
    /// lost.
    pub(crate) fn client_queue(&self) -> Arc<QueueStats> {
        let spare = lock(&self.spare_queues).pop();
        spare.unwrap_or_else(|| self.add_queue())
    }

    /// Gives back what [`Session::client_queue`] gave.
    pub(crate) fn client_queue_ended(&self, queue: Arc<QueueStats>) {
        lock(&self.spare_queues).push(queue);
    }

    /// Whether there is a kernel that has caches of its own.
    pub(crate) fn is_mounted(&self) -> bool {
        self.transport.get().is_some_and(|&name| name != UNMOUNTED)
    }

    /// Whether the kernel may hold writes that this server has not seen.
    pub(crate) fn kernel_writes_back(&self) -> bool {
        self.is_mounted() && self.negotiated().flags.contains(InitFlags::WRITEBACK_CACHE)
    }

    pub(crate) fn set_socket_path(&self, path: &Path) {
        let _ = self.socket.set(path.to_owned());
    }

    /// Where clients attach.
    pub(crate) fn socket_path(&self) -> Option<&Path> {
        self.socket.get().map(PathBuf::as_path)
    }

    pub(crate) fn set_transport(&self, name: &'static str) {
        let _ = self.transport.set(name);
    }

    pub(crate) fn set_control_path(&self, path: &Path) {
        let _ = self.control.set(path.to_owned());
    }

    pub(crate) fn control_path(&self) -> Option<&Path> {
        self.control.get().map(PathBuf::as_path)
    }

    /// The mount's figures.
    pub fn report(&self) -> Report {
        let queues = lock(&self.queues);
        let mut report = stats::report(queues.iter().map(|queue| &**queue));
        report.source = self.options.source.clone();
        report.transport = self.transport.get().unwrap_or(&"none").to_string();
        report.control = self.control_path().map(|path| path.display().to_string());
        report.socket = self.socket_path().map(|path| path.display().to_string());
        report.backed_opens = self.backed.load(Ordering::Relaxed);
        let clients = lock(&self.clients);
        report.clients = clients.iter().map(|one| one.report()).collect();
        report.watch = self.fs.watch().map(|watch| WatchReport {
            on: watch.why_not.is_none(),
            why_not: watch.why_not,
            unwatched: watch.unwatched,
            events: watch.events,
            told: self.coherence.host.told.load(Ordering::Relaxed),
            lost: self.coherence.host.lost.load(Ordering::Relaxed),
        });
        let counts = self.fs.counts().into_iter();
        let counts = counts.map(|(name, count)| OpCount {
            name: name.to_owned(),
            count,
        });
        report.counts = counts.collect();
        report.leases = self.coherence.leases();
        report.survive = self.ledger().map(|ledger| SurviveReport {
            keeper: Pid::as_raw(ledger.keeper()) as u32,
            programs: ledger.programs(),
            generation: ledger.generation(),
            sent_again: ledger.sent_again(),
        });
        report.stuck = stuck::stuck(&self.interrupts, &self.slow, self.options.slow);
        report.uptime_s = self.began.elapsed().as_secs();
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::{self, SessionHandle};

    /// A file system that wants writes of this size.
    struct Wants(u32);

    impl FileSystem for Wants {
        fn init(&self, config: &mut Config, _: Arc<dyn SessionHandle>) -> fs::Result<()> {
            config.max_write = self.0;
            Ok(())
        }
    }

    /// A write size that can't be had is refused, with its name and its limits.
    #[test]
    fn a_write_size_out_of_bounds_is_refused() {
        let session = |wants, max_write| {
            let options = SessionOptions {
                max_write,
                ..SessionOptions::default()
            };
            let session = Session::unmounted(Wants(wants), options);
            session.map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(session(4096, 8192), Ok(()));
        for (wants, max_write, expected) in [
            (
                12288,
                8192,
                "Config::max_write is 12288, and has to be from 4096 to 8192",
            ),
            (
                100,
                8192,
                "Config::max_write is 100, and has to be from 4096 to 8192",
            ),
            (
                4096,
                0,
                "SessionOptions::max_write is 0, and has to be from 4096 to 268431360",
            ),
        ] {
            assert_eq!(session(wants, max_write), Err(expected.to_string()));
        }
    }
}
