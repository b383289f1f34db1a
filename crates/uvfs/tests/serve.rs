//! `uvfs serve` as a user starts it, with clients that attach from this process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use uvfs_client::{Client, Config, Connection, Flags, LockKind, OpenOptions};
use uvfs_testing::{Need, has};

/// For everything that should take a moment: generous, as the machine may be loaded.
const SOON: Duration = Duration::from_secs(90);

/// A directory, and a server of it that ends with the test.
struct Served {
    dir: tempfile::TempDir,
    child: Child,
}

fn command(source: &Path, socket: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uvfs"));
    command.arg("serve").arg(source).arg("--socket").arg(socket);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Asks again and again until there is an answer.
fn soon<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "{what}: not within {SOON:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

impl Served {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("source")).unwrap();
        let child = command(&dir.path().join("source"), &dir.path().join("socket"))
            .spawn()
            .unwrap();
        let mut served = Self { dir, child };
        served.wait_until_it_answers();
        served
    }

    fn source(&self, name: &str) -> PathBuf {
        self.dir.path().join("source").join(name)
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    fn wait_until_it_answers(&mut self) {
        let socket = self.socket();
        soon("the server's socket", || {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the server ended: {status}");
            }
            Connection::connect(&socket).ok()
        });
    }

    fn attach(&self) -> Client {
        let server = Connection::connect(self.socket()).unwrap();
        Client::new(server, Config::default()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn wait(&mut self) -> ExitStatus {
        soon("the server's end", || self.child.try_wait().unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes that differ from place to place.
fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 7 + i / 4096) as u8).collect()
}

/// A client of `uvfs serve` and the host see each other's files.
#[test]
fn what_a_client_writes_is_on_the_host_and_the_other_way_round() {
    let mut served = Served::start();
    let client = served.attach();
    let data = bytes((3 << 20) + 123);
    client.mkdir("dir", 0o755).unwrap();
    for (name, flags) in [
        ("dir/buffered", Flags::empty()),
        ("dir/uncached", Flags::DONTCACHE),
        ("dir/direct", Flags::DIRECT),
    ] {
        let file = client.create(name).unwrap();
        assert_eq!(file.write_at(&data, 0, flags).unwrap(), data.len());
        file.close().unwrap();
        assert!(fs::read(served.source(name)).unwrap() == data, "{name}");
    }
    fs::write(served.source("dir/host"), &data).unwrap();
    let file = client
        .open("dir/host", OpenOptions::new().read(true))
        .unwrap();
    for flags in [Flags::empty(), Flags::DONTCACHE, Flags::DIRECT] {
        let mut read = vec![0; data.len() + 1];
        assert_eq!(file.read_at(&mut read, 0, flags).unwrap(), data.len());
        assert!(read[..data.len()] == data, "{flags:?}");
    }
    let mut names: Vec<_> = client
        .readdir("dir")
        .unwrap()
        .into_iter()
        .map(|entry| entry.name)
        .collect();
    names.sort();
    assert_eq!(names, ["buffered", "direct", "host", "uncached"]);
    drop((file, client));

    served.signal(Signal::TERM);
    assert!(served.wait().success());
    assert!(!served.socket().exists(), "the socket is gone");
}

/// SIGTERM loses nothing that clients wrote.
#[test]
fn a_server_that_is_told_to_end_writes_what_its_clients_left_dirty() {
    let mut served = Served::start();
    let client = served.attach();
    let data = bytes(100_000);
    let file = client.create("dirty").unwrap();
    file.write_at(&data, 0, Flags::empty()).unwrap();
    // The client stays, with its pages dirty.
    served.signal(Signal::TERM);
    assert!(served.wait().success());
    assert!(!served.socket().exists(), "the socket is gone");
    assert!(fs::read(served.source("dirty")).unwrap() == data);
    assert!(client.stat("dirty").is_err(), "the server is gone");
}

/// A second server takes no clients of one that is alive.
#[test]
fn a_socket_is_taken_from_a_dead_server_and_not_from_a_living_one() {
    let mut served = Served::start();
    let other = command(&served.source("."), &served.socket())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(other.status.code(), Some(1));
    let message = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(message.contains("socket"), "{message}");
    // Nor did that take it away.
    served.attach().mkdir("first", 0o755).unwrap();

    served.signal(Signal::KILL);
    served.wait();
    assert!(served.socket().exists(), "it could not clean up");
    served.child = command(&served.source("."), &served.socket())
        .spawn()
        .unwrap();
    served.wait_until_it_answers();
    served.attach().mkdir("second", 0o755).unwrap();
    assert!(served.source("first").is_dir() && served.source("second").is_dir());
    served.signal(Signal::TERM);
    assert!(served.wait().success());
    assert!(!served.socket().exists());
}

/// The error names the source that can't be served.
#[test]
fn what_cannot_be_served_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let ended = command(&missing, &dir.path().join("socket"))
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(ended.status.code(), Some(1));
    let message = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(message.contains("missing"), "{message}");
    assert!(!dir.path().join("socket").exists());
}

/// The server can't see the numbers of processes beside its own pid namespace: such a client's is 0.
#[test]
fn a_client_outside_the_servers_pid_namespace_is_served() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("source")).unwrap();
    let serve = command(&dir.path().join("source"), &dir.path().join("socket"));
    let mut command = Command::new("unshare");
    // The namespace ends with its first process, and that one with unshare(1).
    command.args(["--pid", "--fork", "--kill-child", "--"]);
    command.arg(serve.get_program()).args(serve.get_args());
    command.stdin(Stdio::null()).stdout(Stdio::null());
    if !has(&[Need::Root]) {
        return;
    }
    let child = command.spawn().unwrap();
    let mut served = Served { dir, child };
    served.wait_until_it_answers();
    let client = served.attach();
    let file = client.create("file").unwrap();
    assert_eq!(file.write_at(b"data", 0, Flags::empty()).unwrap(), 4);
    file.lock(LockKind::Exclusive).unwrap();
    file.sync_all().unwrap();
    assert_eq!(fs::read(served.source("file")).unwrap(), b"data");
}
