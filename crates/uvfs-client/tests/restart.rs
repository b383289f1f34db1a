//! Servers that are killed while clients use them, and others that come after them.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use uvfs_client::{Client, Config, File, Flags, OpenOptions, Server as Socket};
use uvfs_passthrough::Passthrough;
use uvfs_server::{ClientLimits, Clients, Session, SessionOptions};

/// Generous: the machine may be loaded.
const DEADLINE: Duration = Duration::from_secs(60);
const FILE: usize = 1 << 20;

/// Not a test by itself: the server that the others run in a process of its own, to be killed.
#[test]
fn server_to_be_killed() {
    let Some(dir) = std::env::var_os("UVFS_TEST_SERVER") else {
        return;
    };
    let dir = Path::new(&dir);
    let source = std::env::var_os("UVFS_TEST_SOURCE").unwrap();
    let fs = Passthrough::open(source, uvfs_passthrough::Options::default()).unwrap();
    let session = Arc::new(Session::unmounted(fs, SessionOptions::default()).unwrap());
    let clients = Clients::listen(session, &dir.join("sock"), ClientLimits::default()).unwrap();
    // Until the pipe is closed: told to end, or the test is over.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
    drop(clients);
}

struct Server(Child);

impl Server {
    fn start(dir: &Path, source: &str) -> Self {
        std::fs::create_dir_all(dir.join(source)).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "server_to_be_killed", "--nocapture"])
            .env("UVFS_TEST_SERVER", dir)
            .env("UVFS_TEST_SOURCE", dir.join(source))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self(child);
        eventually("the server answers", || {
            std::os::unix::net::UnixStream::connect(dir.join("sock")).is_ok()
        });
        server
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// As SIGTERM would.
    fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !check() {
        assert!(Instant::now() < deadline, "waited too long: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn client(dir: &Path) -> Client {
    let config = Config {
        memory: 8 << 20,
        writeback_after: Duration::from_secs(3600),
        ..Config::default()
    };
    Client::new(Socket::connect(dir.join("sock")).unwrap(), config).unwrap()
}

fn rw() -> OpenOptions {
    OpenOptions::new().read(true).write(true).create(true)
}

fn code<T: std::fmt::Debug>(result: std::io::Result<T>) -> Option<i32> {
    result.unwrap_err().raw_os_error()
}

/// Numbers that look random, the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x ^ (x >> 31)) % n
    }
}

/// What a file must have: bytes that were acknowledged, and where a write failed.
struct Model {
    bytes: Vec<u8>,
    doubtful: Vec<bool>,
}

impl Model {
    fn new() -> Self {
        Self {
            bytes: vec![0; FILE],
            doubtful: vec![false; FILE],
        }
    }

    fn check(&self, real: &[u8], what: &str) {
        let end = self
            .bytes
            .iter()
            .rposition(|&b| b != 0)
            .map_or(0, |e| e + 1);
        assert!(
            real.len() >= end || self.doubtful[real.len()..end].iter().all(|&d| d),
            "{what}: {} bytes, not {end}",
            real.len()
        );
        for (i, &byte) in real.iter().enumerate() {
            assert!(
                self.doubtful[i] || byte == self.bytes[i],
                "{what}: byte {i}"
            );
        }
    }
}

/// One random call; says whether it succeeded.
fn step(file: &File, model: &mut Model, random: &mut Random) -> bool {
    let most = [6000, 100_000][usize::from(random.below(8) == 0)];
    let len = 1 + random.below(most) as usize;
    let at = random.below((FILE - len) as u64) as usize;
    let flags = match random.below(12) {
        0 => Flags::DIRECT,
        1 => Flags::DONTCACHE,
        2 => Flags::DSYNC,
        _ => Flags::empty(),
    };
    if random.below(4) == 0 {
        let mut read = vec![0; len];
        let Ok(n) = file.read_at(&mut read, at as u64, flags) else {
            return false;
        };
        for (i, &byte) in read[..n].iter().enumerate() {
            assert!(
                model.doubtful[at + i] || byte == model.bytes[at + i],
                "byte {}",
                at + i
            );
        }
        return true;
    }
    if random.below(40) == 0 {
        return file.sync_data().is_ok();
    }
    let byte = 1 + random.below(255) as u8;
    let written = file.write_at(&vec![byte; len], at as u64, flags);
    let n = *written.as_ref().unwrap_or(&0);
    model.bytes[at..at + n].fill(byte);
    // Durable or not is in doubt with an error of DSYNC: the data is there, or was before.
    model.doubtful[at..at + n].fill(false);
    model.doubtful[at + n..at + len].fill(true);
    written.is_ok()
}

#[test]
fn what_was_acknowledged_is_there_after_the_server_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(dir.path(), "data");
    let clients = [client(dir.path()), client(dir.path())];
    let (stop, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| {
        let mut users = Vec::new();
        for t in 0..4 {
            let (client, stop, steps) = (&clients[t % 2], &stop, &steps);
            users.push(s.spawn(move || {
                let name = format!("f{t}");
                let file = client.open(&name, rw()).unwrap();
                let (mut model, mut random) = (Model::new(), Random(t as u64));
                while !stop.load(Ordering::Relaxed) {
                    if step(&file, &mut model, &mut random) {
                        steps.fetch_add(1, Ordering::Relaxed);
                    } else {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                (name, file, model)
            }));
        }
        let mut random = Random(99);
        for _ in 0..5 {
            let until = steps.load(Ordering::Relaxed) + 20 + random.below(400);
            eventually("calls succeed", || steps.load(Ordering::Relaxed) >= until);
            server.kill();
            std::thread::sleep(Duration::from_millis(random.below(30)));
            server = Server::start(dir.path(), "data");
        }
        let until = steps.load(Ordering::Relaxed) + 50;
        eventually("calls succeed again", || {
            steps.load(Ordering::Relaxed) >= until
        });
        // Once more while nothing is under way.
        stop.store(true, Ordering::Relaxed);
        let users: Vec<_> = users.into_iter().map(|u| u.join().unwrap()).collect();
        server.kill();
        let _server = Server::start(dir.path(), "data");
        for (name, file, model) in &users {
            // What failed is said once.
            if file.sync_all().is_err() {
                eventually("what is dirty is written", || file.sync_all().is_ok());
            }
            let real = std::fs::read(dir.path().join("data").join(name)).unwrap();
            model.check(&real, name);
            let mut read = vec![0; FILE];
            let n = file.read_at(&mut read, 0, Flags::empty()).unwrap();
            assert!(read[..n] == real);
        }
    });
}

#[test]
fn without_a_server_everything_fails_and_nothing_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let client = client(dir.path());
    let file = client.open("f", rw()).unwrap();
    file.write_at(&[1; 10_000], 0, Flags::empty()).unwrap();
    server.kill();
    eventually("the end is noticed", || {
        file.read_at(&mut [0; 10], 0, Flags::empty()).is_err()
    });
    let gone = Some(libc::ENOTCONN);
    assert_eq!(code(file.read_at(&mut [0; 10], 0, Flags::empty())), gone);
    assert_eq!(code(file.write_at(&[2; 10], 0, Flags::empty())), gone);
    assert_eq!(code(file.write_at(&[2; 10], 0, Flags::DIRECT)), gone);
    assert_eq!(code(file.set_len(5)), gone);
    assert_eq!(code(client.stat("f")), gone);
    assert!(client.stats().dirty_pages >= 3, "they stay");
    assert!(file.sync_all().is_err());
    assert!(file.close().is_err());
    drop(client);
}

#[test]
fn files_that_were_removed_or_replaced_are_stale_and_renamed_ones_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let data = dir.path().join("data");
    let client = client(dir.path());
    let [kept, removed, replaced] = ["kept", "removed", "replaced"].map(|name| {
        let file = client.open(name, rw()).unwrap();
        file.write_at(name.as_bytes(), 0, Flags::empty()).unwrap();
        file
    });
    server.kill();
    std::fs::remove_file(data.join("removed")).unwrap();
    std::fs::write(data.join("new"), b"another").unwrap();
    std::fs::rename(data.join("new"), data.join("replaced")).unwrap();
    let _server = Server::start(dir.path(), "data");
    eventually("attached again", || client.stat("").is_ok());
    for file in [&removed, &replaced] {
        assert_eq!(code(file.sync_all()), Some(libc::ESTALE));
        assert_eq!(
            code(file.read_at(&mut [0; 10], 0, Flags::empty())),
            Some(libc::ESTALE)
        );
    }
    if kept.sync_all().is_err() {
        kept.sync_all().unwrap();
    }
    assert_eq!(client.stats().dirty_pages, 0, "those of lost files went");
    assert_eq!(std::fs::read(data.join("kept")).unwrap(), b"kept");
    assert_eq!(std::fs::read(data.join("replaced")).unwrap(), b"another");
    // Nothing of it is in the way of what has the name now.
    let again = client.open("replaced", rw()).unwrap();
    again.write_at(b"ANOTHER", 0, Flags::empty()).unwrap();
    again.close().unwrap();
    assert_eq!(std::fs::read(data.join("replaced")).unwrap(), b"ANOTHER");
}

#[test]
fn another_source_on_the_socket_is_refused_until_ours_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let client = client(dir.path());
    let file = client.open("f", rw()).unwrap();
    file.write_at(b"ours", 0, Flags::empty()).unwrap();
    server.kill();
    let other = Server::start(dir.path(), "other");
    eventually("it is refused", || {
        client
            .stat("")
            .is_err_and(|e| e.raw_os_error() == Some(libc::ESTALE))
    });
    assert!(file.sync_all().is_err());
    assert_eq!(
        std::fs::read_dir(dir.path().join("other")).unwrap().count(),
        0
    );
    other.kill();
    let _server = Server::start(dir.path(), "data");
    eventually("what is dirty is written", || file.sync_all().is_ok());
    assert_eq!(std::fs::read(dir.path().join("data/f")).unwrap(), b"ours");
}

#[test]
fn a_server_that_ended_in_order_has_written_and_nothing_is_written_twice() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let [a, b] = [client(dir.path()), client(dir.path())];
    let file = a.open("f", rw()).unwrap();
    file.write_at(b"first", 0, Flags::empty()).unwrap();
    server.end();
    assert_eq!(std::fs::read(dir.path().join("data/f")).unwrap(), b"first");
    // Somebody else changes it before it is read again.
    std::fs::write(dir.path().join("data/f"), b"second").unwrap();
    let server = Server::start(dir.path(), "data");
    eventually("attached again", || {
        a.stat("").is_ok() && b.stat("").is_ok()
    });
    file.sync_all().unwrap();
    let mut read = [0; 10];
    assert_eq!(file.read_at(&mut read, 0, Flags::empty()).unwrap(), 6);
    assert_eq!(&read[..6], b"second");
    // Leases are had and recalled as before, and a client that dies is salvaged.
    file.write_at(b"third", 0, Flags::empty()).unwrap();
    let other = b.open("f", rw()).unwrap();
    assert_eq!(other.read_at(&mut read, 0, Flags::empty()).unwrap(), 6);
    assert_eq!(&read[..6], b"thirdd");
    file.write_at(b"FOURTH", 0, Flags::empty()).unwrap();
    server.end();
    assert_eq!(std::fs::read(dir.path().join("data/f")).unwrap(), b"FOURTH");
}
