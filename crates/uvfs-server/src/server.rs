//! A server: a session and the threads of its queues.

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{DumpableBehavior, geteuid};
use uvfs_io::runtime::{self, Runtime};
use uvfs_proto::abi::InitFlags;
use uvfs_queue::placement;
use uvfs_queue::wait::{WaitConfig, WaitMode};
use uvfs_sys::limits::explain;
use uvfs_sys::process::SignalSet;

use crate::control::Control;
use crate::drop_behind::DropBehind;
use crate::fs::{FileSystem, Node};
use crate::mount;
use crate::session::{Init, Session};
use crate::signals::SIGNALS;
use crate::slow::Slow;
use crate::survive;
use crate::transport::attach::{self, ClientLimits, Clients};
use crate::transport::{dev, uring};

/// How requests come by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// FUSE-over-io_uring where the kernel offers it, else `/dev/fuse`.
    #[default]
    Auto,
    /// FUSE-over-io_uring or nothing.
    Uring,
    /// `/dev/fuse`.
    Dev,
}

/// How a server's threads run.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerOptions {
    /// The transport.
    pub transport: Transport,
    /// The wait policy.
    pub wait: WaitConfig,
    /// The limits of clients over shared memory; `None` for no clients.
    pub clients: Option<ClientLimits>,
}

/// A thread that has not started after this time never will.
const START: Duration = Duration::from_secs(20);

/// Ends the process when a queue's thread panics or fails. No thread would answer that queue any more, and its
/// callers would wait for ever; when the process ends, the kernel fails their calls, and clients look for the next
/// server.
struct EndsWithIt;

impl Drop for EndsWithIt {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("a queue's thread panicked: this server ends");
            std::process::abort();
        }
    }
}

/// A running server. It ends when its mount does.
pub struct Server<F: FileSystem> {
    session: Arc<Session<F>>,
    threads: Vec<JoinHandle<()>>,
    ended: Receiver<()>,
    _control: Option<Control>,
    clients: Option<Clients>,
    _behind: Option<DropBehind>,
    _slow: Option<Slow>,
    fallback: Option<String>,
}

/// Why there is no FUSE-over-io_uring, and what to do; nothing when there is.
fn no_uring(init: &Init) -> Option<String> {
    if !init.offered().flags.contains(InitFlags::OVER_IO_URING) {
        return Some(match mount::uring_parameter() {
            None => {
                "this kernel is too old for FUSE-over-io_uring (it came with Linux 6.14)".into()
            }
            Some(_) => "FUSE-over-io_uring is switched off (as root: echo Y > \
                /sys/module/fuse/parameters/enable_uring)"
                .into(),
        });
    }
    // The kernel asks for payloads of as many of its pages as a request may have, and is told a number
    // that goes by pages of 4 KiB.
    let page = rustix::param::page_size();
    if page != 4096 {
        return Some(format!(
            "FUSE-over-io_uring is used with pages of 4 KiB, and this kernel has {} KiB",
            page >> 10
        ));
    }
    // Each core's thread has one, and they may share a limit of locked memory.
    refused(placement::allowed_cores().map_or(1, |cores| cores.len()))
}

/// Why this process can't have `rings` io_urings, if it can't.
fn refused(rings: usize) -> Option<String> {
    match runtime::refusal(rings) {
        Ok(None) => None,
        Ok(Some(refused)) => Some(refused.to_string()),
        Err(error) => Some(format!("io_uring can't be used here: {}", explain(&error))),
    }
}

/// The transport that a session and the kernel have agreed on.
#[derive(Clone, Debug)]
pub struct Agreed {
    uring: bool,
    fallback: Option<String>,
}

impl Agreed {
    /// Answers the kernel's first request. Its others wait until [`Server::serve`].
    ///
    /// # Errors
    /// When the chosen transport is not available; the error of the file system's `init`.
    pub fn on<F: FileSystem>(session: &Session<F>, transport: Transport) -> io::Result<Self> {
        let init = session.read_init()?;
        // Over io_uring only where that is asked for.
        let transport = match (session.ledger(), transport) {
            (Some(_), Transport::Auto) => Transport::Dev,
            _ => transport,
        };
        let offered = init.offered().flags;
        if session.ledger().is_some() && !offered.contains(InitFlags::HAS_RESEND) {
            // As below.
            let _ = session.answer_init(&init, false);
            return Err(io::Error::other(
                "this kernel can't send again what a killed server had begun (Linux 6.9 can)",
            ));
        }
        let mut fallback = None;
        let without = match transport {
            Transport::Dev => refused(1),
            _ => no_uring(&init),
        };
        let uring = match (transport, without) {
            (Transport::Dev, why) => {
                fallback = why;
                false
            }
            (_, None) => true,
            (Transport::Auto, Some(why)) => {
                fallback = Some(why);
                false
            }
            (Transport::Uring, Some(why)) => {
                // Without an answer to INIT the mount would wait for ever.
                let _ = session.answer_init(&init, false);
                return Err(io::Error::other(why));
            }
        };
        session.set_transport(if uring { "uring" } else { "dev" });
        session.answer_init(&init, uring)?;
        Ok(Self { uring, fallback })
    }
}

impl<F: FileSystem> Server<F> {
    /// Answers the kernel's first request and starts the queues' threads.
    ///
    /// # Errors
    /// When the chosen transport can't be had, or a thread or its memory.
    pub fn start(session: Arc<Session<F>>, options: ServerOptions) -> io::Result<Self> {
        let agreed = Agreed::on(&session, options.transport)?;
        Self::serve(session, agreed, options)
    }

    /// Starts the queues' threads of a session whose first request is answered.
    ///
    /// # Errors
    /// When a thread or its memory can't be had.
    pub fn serve(
        session: Arc<Session<F>>,
        agreed: Agreed,
        options: ServerOptions,
    ) -> io::Result<Self> {
        let Agreed { uring, fallback } = agreed;
        if uring && session.ledger().is_some() {
            // A server that dumps core waits for all threads, also for those that wait in the kernel for the next server: until then
            // the kernel gives new requests to its entries.
            rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
        }
        // Signals are for the program's threads.
        let _blocked = SignalSet::blocked(&SIGNALS);
        // First: it closes what an earlier server has left, and with that gives up the locks of names of sockets.
        let restored = match (session.ledger(), session.fs().survive()) {
            (Some(ledger), Some(fs)) if ledger.generation() > 1 => {
                let nodes = ledger.restore(fs)?;
                // Before any queue reads: what this server has under way would come a second time.
                session.notifier().resend()?;
                Some(nodes)
            }
            _ => None,
        };
        let control = Control::start(&session)
            .inspect_err(
                |error| tracing::warn!(%error, "no control socket: `uvfs stats` won't work"),
            )
            .ok();
        let clients = options.clients.and_then(|limits| {
            attach::listen_for_clients(&session, limits)
                .inspect_err(|error| tracing::warn!(%error, "no clients besides the kernel"))
                .ok()
        });
        let behind = session.drop_behind()?;
        let slow = Slow::start(&session)?;
        // See docs/waiting.md.
        let wait = match options.wait.mode {
            WaitMode::Adaptive if geteuid().is_root() => WaitConfig {
                mode: WaitMode::Sleep,
                ..options.wait
            },
            _ => options.wait,
        };
        let (end, ended) = channel();
        let (start, started) = channel();
        let mut queues = QueueThreads {
            session: &session,
            cores: placement::allowed_cores()?,
            wait,
            end,
            start,
            threads: Vec::new(),
        };
        let crew = match uring {
            true => Some(queues.start_uring()?),
            false => queues.start_dev().map(|()| None)?,
        };
        let threads = queues.threads;
        for _ in &threads {
            match started.recv_timeout(START) {
                Ok(None) => {}
                Ok(Some(error)) => return Err(error),
                Err(_) => return Err(io::Error::other("a queue's thread did not start")),
            }
        }
        if let Some(nodes) = restored {
            if let (Some(crew), Some(ledger)) = (crew, session.ledger()) {
                crew.go_on(ledger)?;
            }
            clean_up(session.clone(), nodes)?;
        }
        Ok(Self {
            session,
            threads,
            ended,
            _control: control,
            clients,
            _behind: behind,
            _slow: slow,
            fallback,
        })
    }

    /// Why [`Transport::Auto`] did not take FUSE-over-io_uring, or why a server over `/dev/fuse` has no io_uring for
    /// its file I/O, and what to do about it.
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// The session.
    pub fn session(&self) -> &Arc<Session<F>> {
        &self.session
    }

    /// Whether the mount ends within `time`.
    pub fn ends_within(&self, time: Duration) -> bool {
        self.ended.recv_timeout(time).is_ok()
            || self.threads.iter().any(|thread| thread.is_finished())
    }

    /// Waits until the mount has ended and every request's handler is done.
    pub fn wait(self) {
        for thread in self.threads {
            let _ = thread.join();
        }
        // The clients' nodes and handles are taken back before the file system ends.
        drop(self.clients);
        self.session.fs.destroy();
    }
}

/// The threads of the queues, as they are started.
struct QueueThreads<'a, F: FileSystem> {
    session: &'a Arc<Session<F>>,
    cores: Vec<usize>,
    wait: WaitConfig,
    /// Told when a queue ends.
    end: Sender<()>,
    /// Told when a queue is served, or why it never will be.
    start: Sender<Option<io::Error>>,
    threads: Vec<JoinHandle<()>>,
}

impl<F: FileSystem> QueueThreads<'_, F> {
    /// Starts a thread that serves a queue by `run`, which calls the function that it is given once it serves.
    fn start(
        &mut self,
        name: String,
        run: impl FnOnce(Box<dyn FnOnce()>) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let (end, start) = (self.end.clone(), self.start.clone());
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let _ends = EndsWithIt;
            let (told, serves) = (start.clone(), Rc::new(Cell::new(false)));
            let served = serves.clone();
            let ran = run(Box::new(move || {
                served.set(true);
                let _ = told.send(None);
            }));
            // Either the start fails with this error, or the server has started: then this queue's requests
            // would never be answered.
            if let Err(error) = ran
                && let Err(SendError(Some(error))) = start.send(Some(error))
                && serves.get()
            {
                tracing::error!(%error, "a queue's thread failed: this server ends");
                std::process::abort();
            }
            let _ = end.send(());
        })?;
        self.threads.push(thread);
        Ok(())
    }

    /// A thread for each core's io_uring queue, and one for `/dev/fuse`.
    fn start_uring(&mut self) -> io::Result<Arc<uring::Crew<F>>> {
        let queues = mount::possible_cores()?;
        let cores = self.cores.clone();
        let crew = uring::Crew::new(self.session, cores.len(), queues)?;
        let ledger = self.session.ledger();
        let end = ledger
            .map(|ledger| ledger.pipe())
            .transpose()?
            .map(Arc::new);
        let wait = self.wait;
        for (index, &core) in cores.iter().enumerate() {
            // The queue of a core that this process may not use is served by another core's thread.
            let ids: Vec<u16> = (0..queues)
                .filter(|queue| match cores.iter().position(|core| core == queue) {
                    Some(own) => own == index,
                    None => queue % cores.len() == index,
                })
                .map(|queue| queue as u16)
                .collect();
            let (crew, end) = (crew.clone(), end.clone());
            self.start(format!("uvfs-queue-{core}"), move |started| {
                bind(core);
                let runtime = Runtime::with_ring(wait)?;
                uring::run(&runtime, crew, index, ids, end, started)
            })?;
        }
        // Forgets, interrupts and what comes before the ring is complete.
        let device = self.session.device().try_clone_to_owned()?;
        let session = self.session.clone();
        self.start("uvfs-device".into(), move |started| {
            dev::run(
                &Runtime::new(wait)?,
                session,
                device,
                queues,
                wait,
                true,
                started,
            )
        })?;
        Ok(crew)
    }

    /// A thread for each core that reads requests from `/dev/fuse`.
    fn start_dev(&mut self) -> io::Result<()> {
        let wait = self.wait;
        let open = || devices(self.session, &self.cores);
        let devices = match self.session.ledger() {
            Some(ledger) => ledger.devices(open)?,
            None => open()?,
        };
        // Of a mount that has outlived a server there are as many as that one had cores.
        let cores = self.cores.clone().into_iter().cycle();
        for (queue, (device, core)) in devices.into_iter().zip(cores).enumerate() {
            let session = self.session.clone();
            self.start(format!("uvfs-worker-{core}"), move |started| {
                bind(core);
                let runtime = Runtime::new(wait)?;
                dev::run(&runtime, session, device, queue, wait, false, started)
            })?;
        }
        Ok(())
    }
}

/// A descriptor for each core's worker. If `/dev/fuse` can't be opened again there is one worker only: workers can't
/// share a descriptor, because each decides for itself whether it blocks.
fn devices<F: FileSystem>(session: &Session<F>, cores: &[usize]) -> io::Result<Vec<OwnedFd>> {
    let clones: io::Result<Vec<_>> = cores
        .iter()
        .map(|_| mount::clone_device(session.raw_device()))
        .collect();
    match clones {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::info!(%error, "one worker");
            Ok(vec![session.device().try_clone_to_owned()?])
        }
        clones => clones,
    }
}

/// Cleans up after an earlier server, on a thread of its own: the kernel waits for requests to be answered before it drops
/// pages.
fn clean_up<F: FileSystem>(session: Arc<Session<F>>, nodes: Vec<Node>) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("uvfs-cleans-up".into());
    thread.spawn(move || {
        if let Err(error) = session.drop_old(nodes) {
            tracing::warn!(%error, "what the kernel has cached may be old");
        }
        std::thread::sleep(survive::SETTLES);
        if let Some(ledger) = session.ledger() {
            ledger.settle();
        }
    })?;
    Ok(())
}

/// Binds the calling thread to a core. If a sandbox forbids that, the thread is only slower.
fn bind(core: usize) {
    if let Err(error) = placement::bind_to_core(core) {
        tracing::debug!(%error, core, "this thread is bound to no core");
    }
}
