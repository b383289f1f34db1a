//! Clients that attach while their server has no descriptors, threads or memory left.

use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use uvfs_client::{Client, Config, Connection, Flags};
use uvfs_testing::{Need, has};

use crate::common::{DEADLINE, eventually, rw};
use crate::server::Server;

/// No other process runs as this user.
const USER: u32 = 54_399;
/// How many processes and threads it may have.
const PROCESSES: u64 = 24;

/// Processes of that user, which leave room for fewer.
struct Others(Vec<Child>);

impl Others {
    fn start(count: u64) -> Self {
        let start = |_| {
            Command::new("sleep")
                .arg("1000")
                .uid(USER)
                .gid(USER)
                .spawn()
                .unwrap()
        };
        Self((0..count).map(start).collect())
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for other in &mut self.0 {
            let _ = other.kill();
            let _ = other.wait();
        }
    }
}

fn attach(dir: &Path, memory: usize) -> uvfs_client::Result<Client> {
    let config = Config::default().memory(memory);
    let server = Connection::connect(dir.join("sock"))?.answers_within(DEADLINE);
    Client::new(server, config)
}

/// Lets the server have so many of a resource, or as many as before.
fn limit(server: &Server, resource: Resource, most: Option<u64>) {
    // It has inherited those of this process.
    let own = getrlimit(resource);
    let new = Rlimit {
        current: most.or(own.current),
        maximum: own.maximum,
    };
    prlimit(Some(server.pid()), resource, new)
        .unwrap_or_else(|e| panic!("{resource:?} {new:?}: {e}"));
}

fn entries(pid: Pid, of: &str) -> u64 {
    let dir = format!("/proc/{}/{of}", pid.as_raw_nonzero());
    std::fs::read_dir(dir).unwrap().count() as u64
}

/// A server that has no client yet.
fn begin(dir: &Path, user: Option<u32>) -> Server {
    std::fs::create_dir_all(dir.join("data")).unwrap();
    std::fs::write(dir.join("data/f"), "contents").unwrap();
    let server = Server::command(dir, "data", "sock");
    let mut command = Command::new("bash");
    let most = format!("[ $(id -u) != {USER} ] || ulimit -u {PROCESSES}; exec \"$@\"");
    command
        .args(["-c", &most, "bash"])
        .arg(server.get_program())
        .args(server.get_args());
    command.envs(
        server
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    if let Some(user) = user {
        for path in ["", "data", "data/f"] {
            chown(dir.join(path), Some(user), Some(user)).unwrap();
        }
        command.uid(user).gid(user);
    }
    let server = Server::begin(&mut command);
    eventually("the server listens", || dir.join("sock").exists());
    server
}

/// Whether an attempt was refused with one of the errors that say what is missing.
fn is_refused(attempt: uvfs_client::Result<Client>, what: &str) -> bool {
    let clear = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN];
    match attempt {
        Ok(_) => false,
        Err(error) if clear.contains(&error.errno()) => true,
        Err(error) => panic!("{what}: {error}"),
    }
}

/// A client attaches and is served.
fn is_well(dir: &Path) {
    let client = attach(dir, 4 << 20).unwrap();
    let file = client.open("f", rw()).unwrap();
    let mut read = [0; 8];
    assert_eq!(file.read_at(&mut read, 0, Flags::empty()).unwrap(), 8);
    assert_eq!(&read, b"contents");
}

/// Without descriptors the server refuses a client at once, and keeps nothing that it had taken for it.
#[test]
fn without_descriptors_a_client_is_refused_and_nothing_is_kept() {
    let mut refused = 0;
    // With the threads for clients still to be made: each has a ring and an eventfd.
    for more in 0..24 {
        let dir = tempfile::tempdir().unwrap();
        let server = begin(dir.path(), None);
        eventually("it has begun", || entries(server.pid(), "task") > 2);
        let has = entries(server.pid(), "fd");
        limit(&server, Resource::Nofile, Some(has + more));
        let attempt = attach(dir.path(), 4 << 20);
        refused += u32::from(is_refused(attempt, &format!("first, {more} more")));
        limit(&server, Resource::Nofile, None);
        is_well(dir.path());
        // And once they are there.
        eventually("clients are gone", || {
            let now = entries(server.pid(), "fd");
            std::thread::sleep(Duration::from_millis(30));
            now == entries(server.pid(), "fd")
        });
        let has = entries(server.pid(), "fd");
        limit(&server, Resource::Nofile, Some(has + more));
        for _ in 0..3 {
            let attempt = attach(dir.path(), 4 << 20);
            refused += u32::from(is_refused(attempt, &format!("later, {more} more")));
        }
        limit(&server, Resource::Nofile, None);
        is_well(dir.path());
        eventually("all is given back", || entries(server.pid(), "fd") <= has);
        server.end();
    }
    assert!(refused >= 12, "{refused}");
}

/// Without threads the server does the same, and ends those that it had begun.
#[test]
fn without_threads_a_client_is_refused_and_nothing_is_kept() {
    // The server runs as another user.
    if !has(&[Need::Root]) {
        return;
    }
    let mut refused = 0;
    for more in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let server = begin(dir.path(), Some(USER));
        eventually("it has begun", || entries(server.pid(), "task") > 2);
        let has = entries(server.pid(), "task");
        let others = Others::start(PROCESSES - has - more);
        let attempt = attach(dir.path(), 4 << 20);
        let failed = is_refused(attempt, &format!("{more} more"));
        if failed {
            eventually("its fellows end", || entries(server.pid(), "task") == has);
        }
        refused += u32::from(failed);
        drop(others);
        is_well(dir.path());
        server.end();
    }
    assert!(refused >= 1, "{refused}");
}

/// An arena that does not fit into memory is ENOMEM, not an invalid one.
#[test]
fn without_memory_a_client_is_refused_and_smaller_ones_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let server = begin(dir.path(), None);
    is_well(dir.path());
    let status = format!("/proc/{}/statm", server.pid().as_raw_nonzero());
    let pages = || -> u64 {
        let text = std::fs::read_to_string(&status).unwrap();
        text.split(' ').next().unwrap().parse().unwrap()
    };
    let has = pages();
    limit(&server, Resource::As, Some((has << 12) + (32 << 20)));
    for _ in 0..20 {
        let refused = attach(dir.path(), 64 << 20).err().map(|e| e.errno());
        assert_eq!(refused, Some(Errno::NOMEM));
    }
    is_well(dir.path());
    limit(&server, Resource::As, None);
    drop(attach(dir.path(), 64 << 20).unwrap());
    eventually("all is given back", || pages() <= has + (4 << 20 >> 12));
    server.end();
}
