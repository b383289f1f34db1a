//! How a server serves many clients, and clients that attack it while they attach or through what they
//! share with it.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::raw::{ROOT, Raw, hello};
use crate::common::{eventually, session};
use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::thread::CpuSet;
use uvfs_proto::abi;
use uvfs_proto::ext::{LEASE, LEASE_WRITE, LeaseIn, LeaseOut};
use uvfs_queue::arena::{Arena, Ranges, Span};
use uvfs_queue::attach;
use uvfs_queue::pair::{ClientQueue, Direction, End};
use uvfs_server::fs::{
    Attributes, Context, FileType, Handle, Kstatfs, Node, Result as FsResult, attr,
};
use uvfs_server::{ClientLimits, Clients, FileSystem, Session, SessionOptions};
use zerocopy::{FromBytes, IntoBytes};

/// Nothing here takes long, unless it never ends.
const PATIENCE: Duration = Duration::from_secs(60);

fn listen(dir: &Path, limits: ClientLimits) -> Clients {
    let data = dir.join("data");
    std::fs::create_dir_all(&data).unwrap();
    std::fs::write(data.join("f"), "contents").unwrap();
    Clients::listen(session(data), &dir.join("sock"), limits).unwrap()
}

/// The threads of this process that have a name.
fn threads(name: &str) -> usize {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter(|task| {
            let comm = task.as_ref().unwrap().path().join("comm");
            std::fs::read_to_string(comm).is_ok_and(|comm| comm.trim() == name)
        })
        .count()
}

/// Fails if `work` doesn't end.
fn ends<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = channel();
    std::thread::spawn(move || done.send(work()));
    ended.recv_timeout(PATIENCE).expect(what)
}

/// A thousand clients take no more threads of the server than one.
#[test]
fn a_thousand_clients_share_one_thread_for_each_core() {
    let dir = tempfile::tempdir().unwrap();
    let server = listen(dir.path(), ClientLimits::default());
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(threads("uvfs-clients"), 0, "no client needs them yet");
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let clients: Vec<Raw> = (0..1000)
        .map(|_| Raw::connect(&dir.path().join("sock")))
        .collect();
    let node = clients[0].look_up(b"f\0");
    for client in &clients {
        assert_eq!(client.look_up(b"f\0"), node);
    }
    assert_eq!(threads("uvfs-clients"), cores);
    let queues: Vec<ClientQueue> = clients.into_iter().map(Raw::die).collect();
    eventually("all sessions end", || {
        queues.iter().all(ClientQueue::server_closed)
    });
    drop(queues);
    let for_its_threads = 16;
    eventually("the server keeps nothing of them", || {
        descriptors() <= before + for_its_threads
    });
    drop(server);
    assert_eq!(threads("uvfs-clients"), 0);
}

/// A client shares the eventfd by which it rings with the server. One that blocks stops neither the recall of its
/// lease nor the server's end.
#[test]
fn a_bell_that_blocks_stops_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let limits = ClientLimits {
        recall: Duration::from_millis(200),
        ..ClientLimits::default()
    };
    let server = listen(dir.path(), limits);
    let hostile = Raw::connect(&dir.path().join("sock"));
    let node = hostile.look_up(b"f\0");
    let lease = LeaseIn {
        mode: LEASE_WRITE,
        padding: 0,
    };
    let granted = hostile.call(LEASE, node, lease.as_bytes(), &[]).unwrap();
    let (granted, _) = LeaseOut::read_from_prefix(&granted).unwrap();
    assert_eq!(granted.granted, LEASE_WRITE);
    // Now a write to it waits until the other side reads, and a read until it writes.
    rustix::fs::fcntl_setfl(&hostile.bell, OFlags::empty()).unwrap();
    let full = (u64::MAX - 1).to_ne_bytes();
    rustix::io::write(&hostile.bell, &full).unwrap();

    let path = dir.path().join("sock");
    let links = ends("the recall of the hostile client's lease", move || {
        let other = Raw::connect(&path);
        let node = other.look_up(b"f\0");
        other.links(node)
    });
    assert_eq!(links, Ok(1));
    assert!(hostile.queue.server_closed(), "it was cut off");

    // One that rings all the time and sends nothing.
    let ringing = Raw::connect(&dir.path().join("sock"));
    rustix::fs::fcntl_setfl(&ringing.bell, OFlags::empty()).unwrap();
    let bell = ringing.bell.try_clone().unwrap();
    std::thread::spawn(move || {
        for _ in 0..10_000 {
            let _ = rustix::io::write(&bell, &1u64.to_ne_bytes());
            std::thread::yield_now();
        }
    });
    let path = dir.path().join("sock");
    let served = ends("the next client's request", move || {
        Raw::connect(&path).links(ROOT).is_ok()
    });
    assert!(served);
    ends("the server's end", move || drop(server));
}

/// Work on one file gives a client no more time to return its lease of another.
#[test]
fn work_on_one_file_gives_no_more_time_for_another() {
    let dir = tempfile::tempdir().unwrap();
    let recall = Duration::from_millis(500);
    let limits = ClientLimits {
        recall,
        ..ClientLimits::default()
    };
    let _server = listen(dir.path(), limits);
    std::fs::write(dir.path().join("data/g"), "").unwrap();
    let hostile = Raw::connect(&dir.path().join("sock"));
    let lease = LeaseIn {
        mode: LEASE_WRITE,
        padding: 0,
    };
    for name in [b"f\0", b"g\0"] {
        let node = hostile.look_up(name);
        hostile.call(LEASE, node, lease.as_bytes(), &[]).unwrap();
    }
    let busy = hostile.look_up(b"g\0");
    let fh = hostile.open(busy, libc::O_RDWR);
    let path = dir.path().join("sock");
    let waiting = std::thread::spawn(move || {
        let other = Raw::connect(&path);
        let node = other.look_up(b"f\0");
        let began = Instant::now();
        other.links(node).unwrap();
        began.elapsed()
    });
    let write = abi::WriteIn {
        fh,
        size: 1,
        ..Default::default()
    };
    let opcode = abi::Opcode::Write as u32;
    while !waiting.is_finished() && !hostile.queue.server_closed() {
        hostile.send(opcode, busy, write.as_bytes(), b"x");
        hostile.queue.ring();
        while !hostile.queue.server_closed() {
            if let Some(id) = hostile.queue.pop().unwrap() {
                hostile.queue.release(id);
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let waited = waiting.join().unwrap();
    assert!(waited < recall * 8, "{waited:?}");
    assert!(hostile.queue.server_closed(), "it was cut off");
}

fn attaches_with(dir: &Path, fds: &[BorrowedFd<'_>]) -> i32 {
    let socket = UnixStream::connect(dir.join("sock")).unwrap();
    attach::send(&socket, hello(), fds).unwrap();
    attach::receive(&socket).unwrap().0.errno
}

fn huge() -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let fd = rustix::fs::memfd_create("huge", flags).unwrap();
    rustix::fs::ftruncate(&fd, 2 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .unwrap();
    fd
}

/// The server takes only sealed memfds of ordinary pages, which make it neither wait nor die of SIGBUS.
#[test]
fn odd_descriptors_are_refused_and_harm_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let server = listen(dir.path(), ClientLimits::default());
    let good = Raw::connect(&dir.path().join("sock"));
    let (arena, queue) = (Arena::create(16).unwrap(), ClientQueue::create(8).unwrap());
    let (read, write) = rustix::pipe::pipe().unwrap();
    let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, 1 << 20).unwrap();
    let huge = huge();
    let odd: [&[BorrowedFd<'_>]; 8] = [
        &[],
        &[arena.as_fd()],
        &[queue.as_fd(), arena.as_fd()],
        &[read.as_fd(), write.as_fd()],
        &[arena.as_fd(), write.as_fd()],
        &[unsealed.as_fd(), queue.as_fd()],
        &[huge.as_fd(), queue.as_fd()],
        &[arena.as_fd(), huge.as_fd()],
    ];
    for (at, fds) in odd.iter().enumerate() {
        // More often than descriptors may be waiting to be closed.
        for _ in 0..50 {
            assert_eq!(attaches_with(dir.path(), fds), libc::EINVAL, "{at}");
        }
    }
    assert_eq!(
        attaches_with(dir.path(), &[arena.as_fd(), queue.as_fd()]),
        0
    );
    good.look_up(b"f\0");
    drop((good, server));
}

/// A socket whose last close blocks: for two minutes it waits for its peer to read.
fn lingers() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&one, Some(PATIENCE * 2)).unwrap();
    one.set_nonblocking(true).unwrap();
    while one.write(&[0; 1 << 16]).is_ok() {}
    (one, peer)
}

/// Sends any bytes with any number of descriptors.
fn sends(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    let bytes = [IoSlice::new(bytes)];
    // It may have closed its end already.
    let _ = rustix::net::sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL);
}

/// The bytes that `attach::send` writes.
fn message() -> [u8; 32] {
    let (ours, theirs) = UnixStream::pair().unwrap();
    attach::send(&ours, hello(), &[]).unwrap();
    let mut bytes = [0; 32];
    (&theirs).read_exact(&mut bytes).unwrap();
    bytes
}

/// Sends a descriptor.
type Sends = Box<dyn FnOnce(&TcpStream)>;

/// A way to send a descriptor, in two steps; the server is held up during the second.
type Way = (&'static str, fn(&Path) -> Sends);

const WAYS: [Way; 5] = [
    ("no message", |path| {
        let socket = UnixStream::connect(path).unwrap();
        Box::new(move |bad| sends(&socket, b"no message", &[bad.as_fd()]))
    }),
    ("one that is no memfd", |path| {
        let socket = UnixStream::connect(path).unwrap();
        Box::new(move |bad| sends(&socket, &message(), &[bad.as_fd()]))
    }),
    ("one too many", |path| {
        let socket = UnixStream::connect(path).unwrap();
        let (arena, queue) = (Arena::create(16).unwrap(), ClientQueue::create(8).unwrap());
        Box::new(move |bad| {
            sends(
                &socket,
                &message(),
                &[arena.as_fd(), queue.as_fd(), bad.as_fd()],
            );
        })
    }),
    ("one that the server does not read", |path| {
        let client = Raw::connect(path);
        Box::new(move |bad| {
            sends(&client.socket, b"more", &[bad.as_fd()]);
            client.die();
        })
    }),
    ("one to a server that has no place", |path| {
        let path = path.to_owned();
        Box::new(move |bad| {
            for _ in 0..20 {
                let socket = UnixStream::connect(&path).unwrap();
                sends(&socket, b"more", &[bad.as_fd()]);
            }
        })
    }),
];

/// No thread that serves or admits clients closes the descriptors that a client sent: a close may wait for the server
/// of that file.
#[test]
fn no_thread_that_serves_others_closes_what_a_client_sent() {
    for (what, way) in WAYS {
        let session = Session::unmounted(Flooded::default(), SessionOptions::default()).unwrap();
        let session = Arc::new(session);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let limits = ClientLimits {
            clients: 3,
            ..ClientLimits::default()
        };
        let server = listen_on_one_thread(&session, &path, limits);
        let good = Raw::connect(&path);
        let ways = [way(&path), way(&path)];
        session.fs().left.store(1, Ordering::SeqCst);
        let held_up = session.fs().client.lock().unwrap();
        good.send(abi::Opcode::Statfs as u32, ROOT, &[], &[]);
        good.queue.ring();
        eventually("the thread waits", || {
            session.fs().left.load(Ordering::SeqCst) == 0
        });
        let mut peers = Vec::new();
        for send in ways {
            let (bad, peer) = lingers();
            send(&bad);
            peers.push(peer);
            // The last one to close it waits: the server, unless it was fast.
            let closes = std::thread::spawn(move || drop(bad));
            for _ in 0..100 {
                if !closes.is_finished() {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        drop(held_up);
        let served = ends(what, move || {
            (good.answer().1.is_ok(), good.links(ROOT).is_ok())
        });
        assert_eq!(served, (true, true), "{what}");
        ends("the server's end", move || drop(server));
        drop(peers);
    }
}

/// A client whose next request is there before the last one is answered, so often.
#[derive(Default)]
struct Flooded {
    left: AtomicU64,
    client: Mutex<Option<Raw>>,
}

impl Flooded {
    fn floods(client: &Raw) {
        while let Ok(Some(id)) = client.queue.pop() {
            client.queue.release(id);
        }
        let opcode = abi::Opcode::Statfs as u32;
        client.try_submit(opcode, ROOT, &[], &[], &[], Direction::ToServer);
    }
}

impl FileSystem for Flooded {
    async fn getattr(&self, _: &Context, _: Node, _: Option<Handle>) -> FsResult<Attributes> {
        let root = attr(Node(ROOT), FileType::Directory, 0o755);
        Ok(Attributes::new(root, Duration::ZERO))
    }

    async fn statfs(&self, _: &Context, _: Node) -> FsResult<Kstatfs> {
        let less = |left: u64| left.checked_sub(1);
        let more = (self.left).fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        if more.is_ok()
            && let Some(client) = &*self.client.lock().unwrap()
        {
            Self::floods(client);
        }
        Ok(Kstatfs::default())
    }
}

/// Listens, and serves all clients by one thread.
fn listen_on_one_thread<F: FileSystem>(
    session: &Arc<Session<F>>,
    path: &Path,
    limits: ClientLimits,
) -> Clients {
    // There is one for each core that the thread that begins it may use.
    let of_one_core = || {
        let (all, mut core) = (
            rustix::thread::sched_getaffinity(None).unwrap(),
            CpuSet::new(),
        );
        let first = (0..CpuSet::MAX_CPU).find(|&core| all.is_set(core));
        core.set(first.expect("there is a core"));
        rustix::thread::sched_setaffinity(None, &core).unwrap();
        Clients::listen(session.clone(), path, limits).unwrap()
    };
    std::thread::scope(|scope| scope.spawn(of_one_core).join().unwrap())
}

/// The server goes on serving others while it looks at the very many pages that a client left.
#[test]
fn a_client_that_leaves_very_many_dirty_pages_stops_nobody() {
    const PAGES: u32 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sock");
    let server = listen_on_one_thread(&session(dir.path()), &path, ClientLimits::default());
    let (good, hostile) = (Raw::connect(&path), Raw::with_pages(&path, PAGES));
    let dirty = Ranges {
        dirty: Span::new(0, 1),
        writeback: Span::new(2, 3),
    };
    for page in 0..PAGES {
        hostile.arena.set_ranges(page, dirty);
    }
    let queue = hostile.die();
    let mut served = 0;
    while [End::None, End::Closed].contains(&queue.server_end()) {
        good.links(ROOT).unwrap();
        served += usize::from(queue.server_end() == End::Closed);
    }
    assert_eq!(queue.server_end(), End::Lost);
    assert!(served > 10, "{served} requests while it looked");
    drop((good, server));
}

/// A client that always has one more request leaves its thread time to serve and to admit others.
#[test]
fn a_client_that_floods_its_queue_stops_nobody() {
    const REQUESTS: u64 = 1_000_000;
    let flooded = Flooded::default();
    flooded.left.store(REQUESTS, Ordering::SeqCst);
    let session = Session::unmounted(flooded, SessionOptions::default()).unwrap();
    let session = Arc::new(session);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sock");
    let server = listen_on_one_thread(&session, &path, ClientLimits::default());
    let client = Raw::connect(&path);
    {
        let mut place = session.fs().client.lock().unwrap();
        let client = place.insert(client);
        Flooded::floods(client);
        client.queue.ring();
    }
    let left = || session.fs().left.load(Ordering::SeqCst);
    let deadline = Instant::now() + PATIENCE;
    while left() == REQUESTS {
        assert!(Instant::now() < deadline, "it is not served");
        std::thread::yield_now();
    }
    assert!(Raw::connect(&path).links(ROOT).is_ok());
    assert!(
        left() > 0,
        "another client is served once the flood is over"
    );
    session.fs().left.store(0, Ordering::SeqCst);
    drop(session.fs().client.lock().unwrap().take());
    drop(server);
}
