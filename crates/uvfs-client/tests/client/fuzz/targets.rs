//! Turns a fuzzer's bytes into hostile sessions, attach messages, control requests, and legal
//! calls of several clients. Used by `fuzz.rs` and by the targets of `fuzz/`.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use rustix::fs::RenameFlags;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use uvfs_client::{Client, Config, Connection, File, Flags, OpenOptions};
use uvfs_passthrough::{Options, Passthrough};
use uvfs_proto::abi;
use uvfs_queue::arena::Arena;
use uvfs_queue::attach;
use uvfs_queue::pair::{ClientQueue, Direction, Seg};
use uvfs_server::control::Control;
use uvfs_server::{ClientLimits, Clients, Session, SessionOptions};
use zerocopy::FromBytes;

use crate::common::raw::{Raw, hello};

/// Panics on threads of the server, which contains those that a client causes: each is a finding.
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Counts the panics of the server's threads from now on.
pub fn watch_for_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if std::thread::current()
                .name()
                .is_some_and(|name| name.starts_with("uvfs"))
            {
                PANICS.fetch_add(1, Ordering::SeqCst);
            }
            before(info);
        }));
    });
}

/// The number of panics that were counted.
pub fn panics() -> usize {
    PANICS.load(Ordering::SeqCst)
}

fn no_panics() {
    assert_eq!(panics(), 0, "the server panicked");
}

/// Bytes, taken from the front; zeros when there are no more.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn some(&mut self, most: usize) -> &[u8] {
        let (first, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        first
    }

    fn word<const N: usize>(&mut self) -> [u8; N] {
        let mut word = [0; N];
        let some = self.some(N);
        word[..some.len()].copy_from_slice(some);
        word
    }

    fn byte(&mut self) -> u8 {
        self.word::<1>()[0]
    }

    fn short(&mut self) -> usize {
        usize::from(u16::from_le_bytes(self.word()))
    }

    fn below(&mut self, n: u64) -> u64 {
        u64::from(u32::from_le_bytes(self.word())) % n
    }
}

/// A server of a directory with a few files, and a client of it that behaves.
struct World {
    dir: tempfile::TempDir,
    session: Arc<Session<Passthrough>>,
    clients: Clients,
    good: Client,
}

fn limits() -> ClientLimits {
    ClientLimits {
        recall: Duration::from_millis(200),
        ..ClientLimits::default()
    }
}

fn small() -> Config {
    Config::default().memory(4 << 20)
}

impl World {
    fn new() -> Self {
        watch_for_panics();
        // In memory where that can be: syncs take most of the time elsewhere.
        let memory = Path::new("/dev/shm");
        let dir = match memory.is_dir() {
            true => tempfile::tempdir_in(memory),
            false => tempfile::tempdir(),
        };
        let dir = dir.unwrap();
        let source = dir.path().join("source");
        std::fs::create_dir_all(source.join("d/e")).unwrap();
        std::fs::write(source.join("f"), vec![7; 20_000]).unwrap();
        std::fs::write(source.join("good"), "untouched").unwrap();
        std::os::unix::fs::symlink("f", source.join("link")).unwrap();
        let fs = Passthrough::open(&source, Options::default()).unwrap();
        let session = Arc::new(Session::unmounted(fs, SessionOptions::default()).unwrap());
        let socket = dir.path().join("socket");
        let clients = Clients::listen(session.clone(), &socket, limits()).unwrap();
        let good = Client::new(Connection::connect(&socket).unwrap(), small()).unwrap();
        Self {
            dir,
            session,
            clients,
            good,
        }
    }

    fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("socket")
    }

    /// A client that behaves is served as before.
    fn is_well(&self) {
        no_panics();
        let attr = self.good.stat("good").expect("others are served");
        assert_eq!(attr.size, 9);
    }
}

/// A client whose memory the bytes write, too.
struct Hostile(Raw);

impl Hostile {
    /// Sends a request that may be a real one.
    fn request(&self, bytes: &mut Bytes<'_>) {
        let choice = bytes.byte();
        let opcode = match choice & 3 {
            // FUSE's own, and those of clients.
            0..3 => u32::from(bytes.byte()) % 56,
            _ => u32::from_le_bytes(bytes.word()),
        };
        let op_len = usize::from(bytes.byte()) % 129;
        let mut op = bytes.some(op_len).to_vec();
        // Structures that are too short end early.
        op.resize(op_len, 0);
        let mut payload = match choice & 0xc {
            0 => b"f\0".to_vec(),
            4 => b"d/e\0good\0".to_vec(),
            _ => {
                let len = usize::from(bytes.byte());
                bytes.some(len).to_vec()
            }
        };
        payload.truncate(uvfs_queue::pair::INLINE_SIZE);
        let segs: Vec<_> = (0..choice >> 6)
            .map(|_| Seg {
                offset: (bytes.short() as u64) * 16,
                len: bytes.short() as u32,
            })
            .collect();
        let node = u64::from(bytes.byte()) % 8;
        let direction = match choice & 0x10 {
            0 => Direction::ToServer,
            _ => Direction::FromServer,
        };
        let payload = if segs.is_empty() || choice & 0x10 != 0 {
            &payload[..]
        } else {
            &[]
        };
        let _ = (self.0).try_submit(opcode, node, &op, payload, &segs, direction);
    }

    /// Answers make room for more requests; an answer that the client's own half finds broken does not matter. Gives
    /// how many requests succeeded.
    fn answers(&self) -> usize {
        let mut served = 0;
        self.0.queue.ring();
        while let Ok(Some(id)) = self.0.queue.pop() {
            let mut header = [0; size_of::<abi::OutHeader>()];
            self.0.queue.reply(id, &mut header, &mut []);
            let answer = abi::OutHeader::read_from_bytes(&header).expect("it has the size");
            served += usize::from(answer.error == 0);
            self.0.queue.release(id);
        }
        served
    }

    fn step(&self, bytes: &mut Bytes<'_>) {
        let size = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_size as u64;
        match bytes.byte() % 8 {
            0 => {
                let (fd, len) = (self.0.queue.as_fd(), usize::from(bytes.byte() % 32));
                let at = bytes.below(size(fd));
                let len = len.min((size(fd) - at) as usize);
                let _ = rustix::io::pwrite(fd, bytes.some(len), at);
            }
            1 => {
                let (fd, len) = (self.0.arena.as_fd(), usize::from(bytes.byte()));
                let at = bytes.below(size(fd));
                let len = len.min((size(fd) - at) as usize);
                let _ = rustix::io::pwrite(fd, bytes.some(len), at);
            }
            2 => {
                let _ = rustix::io::write(&self.0.bell, &bytes.word::<8>());
            }
            3 => drop(self.answers()),
            _ => self.request(bytes),
        }
    }
}

/// Bytes as what a client does to its session: what it asks, and what it writes into the memory that it
/// shares with a real server.
pub struct Sessions {
    world: World,
    hostile: Option<Hostile>,
    runs: usize,
    /// Requests that the server took for real ones, as far as this target looked.
    pub served: usize,
}

impl Default for Sessions {
    fn default() -> Self {
        Self {
            world: World::new(),
            hostile: None,
            runs: 0,
            served: 0,
        }
    }
}

impl Sessions {
    pub fn run(&mut self, input: &[u8]) {
        let mut bytes = Bytes(input);
        let path = self.world.socket();
        let hostile = self
            .hostile
            .get_or_insert_with(|| Hostile(Raw::connect(&path)));
        while !bytes.is_empty() {
            // The client's own half does not trust its memory either, but may give up by a panic.
            let step = std::panic::AssertUnwindSafe(|| hostile.step(&mut bytes));
            if std::panic::catch_unwind(step).is_err() {
                self.hostile = None;
                break;
            }
        }
        if let Some(hostile) = &self.hostile {
            self.served += hostile.answers();
        }
        self.runs += 1;
        // One that was cut off is of no more use, nor is one that has lost all its places.
        let spent = |one: &Hostile| one.0.queue.server_closed();
        if self.hostile.as_ref().is_some_and(spent) || self.runs.is_multiple_of(64) {
            // The server has had time meanwhile, also on a loaded machine.
            self.world.is_well();
            let last = self.hostile.take();
            self.served += last.map_or(0, |hostile| hostile.answers());
        }
    }
}

/// Bytes as what is sent to the socket that clients attach to, with descriptors of all kinds.
pub struct Attaching(World, usize);

impl Default for Attaching {
    fn default() -> Self {
        Self(World::new(), 0)
    }
}

fn descriptor(kind: u8) -> OwnedFd {
    let memfd = |flags: MemfdFlags, size: u64, seals: SealFlags| {
        let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("fuzz", flags).unwrap();
        let _ = rustix::fs::ftruncate(&fd, size);
        let _ = rustix::fs::fcntl_add_seals(&fd, seals);
        fd
    };
    let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    match kind % 12 {
        0 | 1 => ClientQueue::create(8)
            .unwrap()
            .as_fd()
            .try_clone_to_owned()
            .unwrap(),
        2 | 3 => Arena::create(16)
            .unwrap()
            .as_fd()
            .try_clone_to_owned()
            .unwrap(),
        4 => memfd(MemfdFlags::empty(), 1 << 16, SealFlags::empty()),
        5 => memfd(MemfdFlags::empty(), 0, sealed),
        6 => memfd(MemfdFlags::empty(), 1 << 40, sealed),
        7 => memfd(MemfdFlags::HUGETLB, 2 << 20, sealed),
        8 => rustix::pipe::pipe().unwrap().1,
        9 => std::fs::File::open("/dev/null").unwrap().into(),
        10 => UnixStream::pair().unwrap().0.into(),
        _ => memfd(MemfdFlags::empty(), 12_345, sealed),
    }
}

impl Attaching {
    pub fn run(&mut self, input: &[u8]) {
        let mut bytes = Bytes(input);
        let fds: Vec<_> = (0..bytes.byte() % 4)
            .map(|_| descriptor(bytes.byte()))
            .collect();
        let real = bytes.byte() & 1 == 0;
        let socket = UnixStream::connect(self.0.socket()).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        if real && borrowed.len() <= 2 {
            // A server that has no room for another client hangs up before it reads.
            let _ = attach::send(&socket, hello(), &borrowed);
        } else {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !borrowed.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&borrowed));
            }
            let text = match bytes.is_empty() {
                true => b"x",
                false => bytes.0,
            };
            let text = [IoSlice::new(text)];
            let _ = rustix::net::sendmsg(&socket, &text, &mut control, SendFlags::NOSIGNAL);
        }
        let _ = socket.shutdown(std::net::Shutdown::Write);
        // It answers, or closes; it does neither in an hour.
        match attach::receive(&socket) {
            Ok(_) => {}
            Err(error) => assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "no answer"),
        }
        self.1 += 1;
        if self.1.is_multiple_of(64) {
            self.0.is_well();
        }
    }
}

/// Bytes as what is sent to the control socket.
pub struct Controlling {
    world: World,
    _control: Control,
    path: std::path::PathBuf,
}

impl Default for Controlling {
    fn default() -> Self {
        let world = World::new();
        let control = Control::start(&world.session).unwrap();
        let path = world.session.report().control.expect("there is one").into();
        Self {
            world,
            _control: control,
            path,
        }
    }
}

impl Controlling {
    pub fn run(&mut self, input: &[u8]) {
        let mut socket = UnixStream::connect(&self.path).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let _ = socket.write_all(input);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        if let Err(error) = socket.read_to_end(&mut answer) {
            assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "no answer");
            return;
        }
        if !answer.is_empty() {
            let line = answer.strip_suffix(b"\n").expect("an answer is a line");
            assert!(line.starts_with(b"{") && line.ends_with(b"}"), "{line:?}");
        }
        no_panics();
        let _ = &self.world;
    }
}

/// Bytes as legal calls of several clients, one at a time, on two files: what each sees is what a model
/// says.
pub struct Coherent {
    _clients: Clients,
    users: Vec<(Client, [File; 2])>,
    models: [Vec<u8>; 2],
    host: std::path::PathBuf,
    _dir: tempfile::TempDir,
    _good: Client,
}

const MOST: u64 = 40_000;

impl Default for Coherent {
    fn default() -> Self {
        let World {
            dir,
            clients,
            good,
            session: _,
        } = World::new();
        let open = || {
            let server = Connection::connect(dir.path().join("socket")).unwrap();
            let client = Client::new(server, small()).unwrap();
            let rw = OpenOptions::new().read(true).write(true).create(true);
            let files = ["x", "y"].map(|name| client.open(name, rw.clone()).unwrap());
            (client, files)
        };
        Self {
            users: (0..3).map(|_| open()).collect(),
            models: Default::default(),
            host: dir.path().join("source"),
            _clients: clients,
            _dir: dir,
            _good: good,
        }
    }
}

impl Coherent {
    pub fn run(&mut self, input: &[u8]) {
        let mut bytes = Bytes(input);
        for (at, model) in self.models.iter_mut().enumerate() {
            if !model.is_empty() {
                self.users[0].1[at].set_len(0).unwrap();
                model.clear();
            }
        }
        let mut touched = [false; 2];
        while !bytes.is_empty() {
            touched[self.step(&mut bytes)] = true;
        }
        for at in (0..2).filter(|&at| touched[at]) {
            for (_, files) in &self.users {
                files[at].sync_data().unwrap();
            }
            let name = ["x", "y"][at];
            let host = std::fs::read(self.host.join(name)).unwrap();
            assert!(
                host == self.models[at],
                "what the host has of {name} after all synced"
            );
        }
        no_panics();
    }

    /// One call of one of them; which of the files it was for.
    fn step(&mut self, bytes: &mut Bytes<'_>) -> usize {
        let who = bytes.byte();
        let which = usize::from(who >> 7);
        let (client, files) = &mut self.users[usize::from(who) % 3];
        let (file, model) = (&files[which], &mut self.models[which]);
        let how = match who >> 4 & 7 {
            0 => Flags::DIRECT,
            1 => Flags::DONTCACHE,
            2 => Flags::DSYNC,
            _ => Flags::empty(),
        };
        let what = bytes.byte();
        let at = bytes.below(MOST);
        let len = 1 + match what & 0x80 {
            0 => bytes.below(300),
            _ => bytes.below(12_000),
        } as usize;
        match what % 16 {
            0..5 => {
                let mut buf = vec![0; len];
                let n = file.read_at(&mut buf, at, how).unwrap();
                let start = (at as usize).min(model.len());
                let want = &model[start..(start + len).min(model.len())];
                assert!(
                    n == want.len() && buf[..n] == *want,
                    "a read of {len} at {at}"
                );
            }
            5..10 => {
                let data = vec![what | 1; len];
                assert_eq!(file.write_at(&data, at, how).unwrap(), len);
                let end = at as usize + len;
                model.resize(model.len().max(end), 0);
                model[at as usize..end].copy_from_slice(&data);
            }
            10 => {
                file.set_len(at).unwrap();
                model.resize(at as usize, 0);
            }
            11 => file.sync_data().unwrap(),
            12 => assert_eq!(file.current_size().unwrap(), model.len() as u64),
            13 => {
                let name = ["x", "y"][which];
                assert_eq!(client.stat(name).unwrap().size, model.len() as u64);
            }
            14 => {
                // Closed and opened again.
                let name = ["x", "y"][which];
                let rw = OpenOptions::new().read(true).write(true);
                files[which] = client.open(name, rw).unwrap();
            }
            _ => {
                // Under another name and back; clients that have it open do not notice.
                let name = ["x", "y"][which];
                client.rename(name, "z", RenameFlags::empty()).unwrap();
                client.rename("z", name, RenameFlags::empty()).unwrap();
            }
        }
        which
    }
}
