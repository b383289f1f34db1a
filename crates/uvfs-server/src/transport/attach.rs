//! Lets clients in: each attaches through a unix socket with a page arena and a queue pair, and is
//! served by a thread of the pool (`pool.rs`). Its user and group are those of its socket.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use uvfs_io::IoBuf;
use uvfs_io::blocking;
use uvfs_io::ops::{self, File, within};
use uvfs_io::runtime::Runtime;
use uvfs_queue::arena::Arena;
use uvfs_queue::attach::{self, Message};
use uvfs_queue::impatience::impatiently;
use uvfs_queue::pair::{End, MAX_SEGS, ServerQueue};
use uvfs_queue::wait::WaitConfig;

use crate::client::Client;
use crate::client::guests::{Guest, GuestLimits, Guests};
use crate::control::{Listening, directory, listen_at, socket_path};
use crate::fs::{FileSystem, ROOT};
use crate::session::Session;
use crate::stats::Attached;
use crate::transport::closing::{Closers, Place};
use crate::transport::pool::Pool;
use crate::transport::shm::{ArenaRegion, Channel};

/// A client that says nothing for so long while it attaches is dropped.
const PATIENCE: Duration = Duration::from_secs(5);
/// Sockets of clients of one user that were not let in, and wait to be closed.
const CLOSING: usize = 64;
/// Mounts of one source at a time whose clients find the next server by the socket's name.
const SAME_SOURCE: u32 = 64;

/// The limits that a server sets for its clients.
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// Clients at a time; further ones get EAGAIN.
    pub clients: usize,
    /// Pages of 4 KiB of each one's arena; larger ones get EINVAL.
    pub arena_pages: u32,
    /// How the threads that serve clients wait.
    pub wait: WaitConfig,
    /// Other users may attach too, up to half of `clients`, as guests: with nothing but what they
    /// import by tokens.
    pub guests: bool,
    /// The limits of each of them.
    pub per_guest: GuestLimits,
    /// A client that holds on to a recalled lease for so long, without writing anything back, is
    /// cut off.
    pub recall: Duration,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self {
            clients: 2048,
            arena_pages: 1 << 20,
            wait: WaitConfig::default(),
            guests: false,
            per_guest: GuestLimits::default(),
            recall: Duration::from_secs(5),
        }
    }
}

/// A socket that clients attach to; dropping it ends their sessions.
pub struct Clients {
    _listening: Listening,
}

impl Clients {
    /// Listens at `path`, which only this user may reach unless there may be guests; a dead server's
    /// socket there is replaced. Tokens of the session name this socket from now on.
    ///
    /// # Errors
    /// `EADDRINUSE` when a server answers there; those of bind(2); EMFILE when there is no descriptor to spare.
    pub fn listen<F: FileSystem>(
        session: Arc<Session<F>>,
        path: &Path,
        limits: ClientLimits,
    ) -> io::Result<Self> {
        if path.exists() && UnixStream::connect(path).is_ok() {
            return Err(Errno::ADDRINUSE.into());
        }
        match std::fs::symlink_metadata(path) {
            Ok(meta) if std::os::unix::fs::FileTypeExt::is_socket(&meta.file_type()) => {
                std::fs::remove_file(path)?;
            }
            _ => {}
        }
        // Before a client can come: the first one may find that there are no descriptors left.
        let spare = Spare::new()?;
        let listener = listen_at(path, if limits.guests { 0o666 } else { 0o600 })?;
        session.set_socket_path(path);
        let accept = move |listener: &_, stop: &_| accept(listener, &session, limits, stop, spare);
        let _listening = Listening::start(path, listener, "uvfs-attach", accept)?;
        Ok(Self { _listening })
    }
}

/// Listens for a mount's clients, where a server of the same source that comes after this one will
/// listen, too: its clients look for it there.
///
/// # Errors
/// When the directory or the socket can't be made.
pub(crate) fn listen_for_clients<F: FileSystem>(
    session: &Arc<Session<F>>,
    limits: ClientLimits,
) -> io::Result<Clients> {
    let source = source(session);
    if source == [0; 16] {
        return Clients::listen(session.clone(), &socket_path(".clients")?, limits);
    }
    let dir = directory()?;
    // Two servers that begin at once must not both take a dead one's socket for theirs.
    let lock = std::fs::File::open(&dir)?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)?;
    let source = u128::from_ne_bytes(source);
    for number in 0..SAME_SOURCE {
        let path = dir.join(format!("{source:032x}-{number}.clients"));
        match Clients::listen(session.clone(), &path, limits) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            other => return other,
        }
    }
    Clients::listen(session.clone(), &socket_path(".clients")?, limits)
}

/// The server's side of a client in the same program, from [`in_process`]. Dropping it ends the
/// client's session.
pub struct InProcess {
    socket: Arc<File>,
    thread: Option<JoinHandle<()>>,
}

/// Serves one client of this program, on a thread of its own: without a path, a mount or another
/// process, but else like any client. It attaches to the descriptor that comes with it (see
/// `uvfs_client::Connection::from`).
///
/// # Errors
/// When the thread or the pair of sockets can't be had.
pub fn in_process<F: FileSystem>(
    session: &Arc<Session<F>>,
    limits: ClientLimits,
) -> io::Result<(InProcess, UnixStream)> {
    let (theirs, ours) = UnixStream::pair()?;
    let socket = ours_alone(ours)?;
    let (session, ours) = (session.clone(), socket.clone());
    let thread = std::thread::Builder::new()
        .name("uvfs-client".into())
        .spawn(move || {
            let gate = Gate::new(limits);
            let served = gate.lets_in(&ours, limits, None).and_then(|places| {
                let runtime = Runtime::new(limits.wait)?;
                runtime.block_on(serve(session, ours, limits, gate, places))
            });
            if let Err(error) = served {
                tracing::warn!(%error, "no runtime for a client");
            }
        })?;
    let server = InProcess {
        socket,
        thread: Some(thread),
    };
    Ok((server, theirs))
}

impl Drop for InProcess {
    fn drop(&mut self) {
        let _ = shutdown(&*self.socket, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The server's end of a client's socket. No call on it blocks.
fn ours_alone(socket: UnixStream) -> io::Result<Arc<File>> {
    socket.set_nonblocking(true)?;
    Ok(Arc::new(File::from(OwnedFd::from(socket))))
}

fn accept<F: FileSystem>(
    listener: &UnixListener,
    session: &Arc<Session<F>>,
    limits: ClientLimits,
    stop: &AtomicBool,
    mut spare: Spare,
) {
    let all = Arc::default();
    let gate = Gate::new(limits);
    let mut pool = None;
    for client in listener.incoming() {
        if stop.load(Ordering::Acquire) {
            break;
        }
        let socket = match client.and_then(ours_alone) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::error!(%error, "a client could not be let in");
                spare.refuse_next(listener, &gate);
                // Not a reason to spin.
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
        };
        spare.keep();
        let Some(place) = Place::take(&all, limits.clients) else {
            let _ = refuse(&socket, Errno::AGAIN);
            gate.retire(socket, None);
            continue;
        };
        let pool = match &mut pool {
            Some(pool) => pool,
            None => match Pool::start(limits.wait) {
                Ok(started) => pool.insert(started),
                Err(error) => {
                    tracing::error!(%error, "no threads to serve clients");
                    let _ = refuse(&socket, errno_of(&error, Errno::AGAIN));
                    gate.retire(socket, None);
                    continue;
                }
            },
        };
        let places = match gate.lets_in(&socket, limits, Some(place)) {
            Ok(places) => places,
            Err(error) => {
                let _ = refuse(&socket, errno_of(&error, Errno::AGAIN));
                gate.retire(socket, None);
                continue;
            }
        };
        let (session, gate, ours) = (session.clone(), gate.clone(), socket.clone());
        pool.serve(socket, move || async move {
            serve(session, ours, limits, gate, places).await;
        });
    }
}

fn refuse(client: &File, errno: Errno) -> io::Result<()> {
    attach::send(
        client,
        Message {
            errno: errno.raw_os_error(),
            max_payload: 0,
            source: [0; 16],
        },
        &[],
    )
}

/// The errno of an error, or what stands for one without.
fn errno_of(error: &io::Error, otherwise: Errno) -> Errno {
    Errno::from_io_error(error).unwrap_or(otherwise)
}

/// A descriptor that is given up for a moment when there are no more, so that a client hears of it.
struct Spare(Option<OwnedFd>);

impl Spare {
    fn new() -> io::Result<Self> {
        Ok(Self(Some(eventfd(0, EventfdFlags::CLOEXEC)?)))
    }

    /// Takes a descriptor again if another thread got the one that was given up.
    fn keep(&mut self) {
        if self.0.is_none() {
            self.0 = eventfd(0, EventfdFlags::CLOEXEC).ok();
        }
    }

    /// Tells the client that waits first, if there is one, that there are no descriptors left.
    fn refuse_next(&mut self, listener: &UnixListener, gate: &Gate) {
        drop(self.0.take());
        let waits = rustix::event::Timespec::default();
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        if matches!(rustix::event::poll(&mut fds, Some(&waits)), Ok(1))
            && let Ok((socket, _)) = listener.accept()
            && let Ok(socket) = ours_alone(socket)
        {
            let _ = refuse(&socket, Errno::MFILE);
            gate.retire(socket, None);
        }
        self.keep();
    }
}

/// Where clients come in: other users, all of them together and each for itself; and threads for what may wait.
///
/// A client sends descriptors of any file with its messages. The last close of one may wait for the server of
/// that file, or for a socket that lingers, for ever. The thread that reads the message makes it, the kernel for
/// that thread where the message has too many, or the process that closes this socket before the message was read.
/// So each user has a thread for that, and only a bounded number of sockets that wait for it.
#[derive(Clone)]
struct Gate {
    all: Arc<AtomicUsize>,
    each: Arc<Guests>,
    /// Reads the first messages, one thread for each that hangs. Their number is that of the places.
    receiving: Arc<blocking::Pool>,
    closers: Arc<Closers>,
}

/// A client's places, which are taken also for as long as something that it sent is not closed.
struct Places {
    _all: Option<Place>,
    _guests: Option<Place>,
    guest: Option<Arc<Guest>>,
}

impl Gate {
    fn new(limits: ClientLimits) -> Self {
        Self {
            all: Arc::default(),
            each: Guests::new(limits.per_guest),
            receiving: blocking::Pool::new(limits.clients.max(1)),
            closers: Arc::default(),
        }
    }

    /// A place for a client, which has one among all clients already.
    fn lets_in(
        &self,
        socket: &File,
        limits: ClientLimits,
        all: Option<Place>,
    ) -> io::Result<Places> {
        let uid = attach::peer(socket)?.uid;
        let (guest, guests) = match uvfs_sys::is_own_user(uid) {
            true => (None, None),
            false if !limits.guests => return Err(Errno::PERM.into()),
            false => {
                let place = Place::take(&self.all, limits.clients / 2).ok_or(Errno::AGAIN)?;
                (Some(Arc::new(self.each.comes(uid)?)), Some(place))
            }
        };
        Ok(Places {
            _all: all,
            _guests: guests,
            guest,
        })
    }

    /// Ends a client's socket. An unread message is read first, by a thread that may wait. The thread that
    /// lets clients in closes what is too much for that one.
    fn retire(&self, socket: Arc<File>, places: Option<Arc<Places>>) {
        // Nothing more can come after this.
        let _ = shutdown(&*socket, Shutdown::Both);
        let bytes = rustix::io::ioctl_fionread(&*socket).unwrap_or(0);
        if bytes == 0 {
            return;
        }
        let uid = attach::peer(&*socket).map_or(u32::MAX, |peer| peer.uid);
        // A client that was let in has a place, so that no more count is needed.
        let most = if places.is_some() {
            usize::MAX
        } else {
            CLOSING
        };
        let theirs = socket.clone();
        let read = move || {
            // Each takes one byte at least.
            for _ in 0..bytes {
                match attach::receive(&*theirs) {
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                    _ => {}
                }
            }
            drop((theirs, places));
        };
        if !self.closers.close(uid, most, read) {
            impatiently(|| drop(socket));
        }
    }
}

/// A client's socket, for as long as it is served.
struct Door {
    gate: Gate,
    socket: Arc<File>,
    places: Arc<Places>,
}

impl Drop for Door {
    fn drop(&mut self) {
        (self.gate).retire(self.socket.clone(), Some(self.places.clone()));
    }
}

/// A hash of the source (FNV-1a of the root's identity), by which a client that comes back knows it.
pub(crate) fn source<F: FileSystem>(session: &Session<F>) -> [u8; 16] {
    let clients = session.fs().clients();
    let Some(identity) = clients.and_then(|clients| clients.identity(ROOT)) else {
        return [0; 16];
    };
    const PRIME: u128 = (1 << 88) + 0x13b;
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for byte in identity {
        hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
    }
    hash.to_ne_bytes()
}

/// Serves a client until it goes.
async fn serve<F: FileSystem>(
    session: Arc<Session<F>>,
    socket: Arc<File>,
    limits: ClientLimits,
    gate: Gate,
    places: Places,
) {
    let door = Door {
        gate,
        socket,
        places: Arc::new(places),
    };
    let attended = attend(session, &door.socket, limits, &door.gate, &door.places).await;
    if let Err(error) = attended {
        tracing::warn!(%error, "a client's session ended");
    }
}

/// Reads a client's first message: two memfds, or else whatever came with it.
fn receive(socket: &File) -> io::Result<Result<[OwnedFd; 2], Vec<OwnedFd>>> {
    let (_, fds) = attach::receive(socket)?;
    // To close a memfd takes no wait.
    let are_memfds = (fds.iter()).all(|fd| rustix::fs::fcntl_get_seals(fd).is_ok());
    Ok(match are_memfds {
        true => fds.try_into(),
        false => Err(fds),
    })
}

/// Waits for a client's message, and takes its arena and queue pair.
async fn introduce<F: FileSystem>(
    session: &Session<F>,
    socket: &Arc<File>,
    limits: ClientLimits,
    gate: &Gate,
    places: &Arc<Places>,
) -> io::Result<Option<(Arc<Arena>, ServerQueue, usize)>> {
    let readable = ops::poll(socket, (libc::POLLIN | libc::POLLRDHUP) as u32);
    if within(PATIENCE, readable).await.is_none() {
        return Err(Errno::TIMEDOUT.into());
    }
    let held = (socket.clone(), places.clone());
    let received = gate.receiving.run(move || (receive(&held.0), held));
    let received = match within(PATIENCE, received).await {
        None => Err(Errno::TIMEDOUT.into()),
        // A process that only looked whether the server is there.
        Some((Err(error), _)) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Some((received, _)) => received,
    };
    let max_payload = session.max_payload().min((MAX_SEGS - 1) * 4096);
    let opened = received.and_then(|received| match received {
        Err(others) => {
            let (uid, held) = (attach::peer(&**socket)?.uid, (others, places.clone()));
            gate.closers.close(uid, usize::MAX, move || drop(held));
            Err(Errno::INVAL.into())
        }
        Ok([arena, queue]) => {
            let arena = Arena::open(arena, limits.arena_pages)?;
            let queue = ServerQueue::open(queue, arena.len(), max_payload)?;
            Ok((Arc::new(arena), queue, max_payload))
        }
    });
    if let Err(error) = &opened {
        refuse(socket, errno_of(error, Errno::INVAL))?;
    }
    opened.map(Some)
}

/// Lets a client attach, serves it until it goes, and cleans up behind it.
async fn attend<F: FileSystem>(
    session: Arc<Session<F>>,
    socket: &Arc<File>,
    limits: ClientLimits,
    gate: &Gate,
    places: &Arc<Places>,
) -> io::Result<()> {
    let peer = attach::peer(&**socket)?;
    let Some((arena, queue, max_payload)) =
        introduce(&session, socket, limits, gate, places).await?
    else {
        return Ok(());
    };
    let guest = places.guest.clone();
    if let Some(guest) = &guest
        && let Err(errno) = guest.has_pages(arena.len() / 4096)
    {
        return refuse(socket, errno);
    }
    // All that may be lacking is taken before the client hears that it is attached.
    let taken = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(io::Error::from)
        .and_then(|bell| Ok((bell, Channel::<F>::room()?)));
    let (bell, room) = match taken {
        Ok(taken) => taken,
        Err(error) => {
            refuse(socket, errno_of(&error, Errno::NOMEM))?;
            return Err(error);
        }
    };
    let agreed = Message {
        errno: 0,
        max_payload: max_payload as u32,
        source: source(&session),
    };
    attach::send(&**socket, agreed, &[bell.as_fd()])?;
    let queue = Arc::new(queue);
    let link = session.coherence.attach(
        session.negotiated().flags,
        session.options.all_backed,
        queue.clone(),
        limits.recall,
        guest.is_some(),
    );
    let stats = session.client_queue();
    let listed = Arc::new(Attached::new(
        peer.pid,
        peer.uid,
        stats.clone(),
        queue.clone(),
    ));
    session.client_attached(&listed);
    let number = {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
    let client = Rc::new(Client {
        link,
        session,
        stats,
        listed,
        guest,
        queue,
        memory: IoBuf::from_region(Arc::new(ArenaRegion(arena.clone()))),
        arena,
        uid: peer.uid,
        gid: peer.gid,
        pid: peer.pid,
        number,
        handles: RefCell::default(),
        imported: RefCell::default(),
        over: Cell::new(false),
        salvaged: Cell::new(false),
        socket: socket.clone(),
    });
    let bell = Arc::new(File::from(bell));
    let channel = Rc::new(Channel::new(client.clone(), bell, room, limits.wait));
    channel.clone().serve().await;
    let all = client.salvage().await;
    // A client whose socket closed is gone, or was told to go as this server ends: then it may
    // come back to the next one. Others were given up.
    client.queue.close_as(match (channel.is_gone(), all) {
        (false, _) => End::CutOff,
        (true, true) => End::Written,
        (true, false) => End::Lost,
    });
    client.session.coherence.detach(&client.link);
    client.release().await;
    Ok(())
}
