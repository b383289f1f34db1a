//! Servers that live and answer nothing.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use uvfs_client::{Client, Config, Connection, Flags, LockKind};

use crate::common::{DEADLINE, eventually, rw};
use crate::server::Server;

const BOUND: Duration = Duration::from_secs(2);

/// A client that writes nothing by itself, and waits so long for an answer.
fn client(dir: &Path, answers: Duration) -> Client {
    let config = Config::default()
        .memory(8 << 20)
        .writeback_after(Duration::from_secs(3600));
    let server = Connection::connect(dir.join("sock")).unwrap();
    let server = server.reconnect_within(Duration::from_millis(100));
    Client::new(server.answers_within(answers), config).unwrap()
}

fn code<T: std::fmt::Debug>(result: uvfs_client::Result<T>) -> Option<i32> {
    Some(result.unwrap_err().errno().raw_os_error())
}

/// Every wait of a call has an end.
#[test]
fn every_kind_of_call_ends_when_its_server_answers_nothing() {
    type Call = fn(&Client, &uvfs_client::File) -> Option<i32>;
    let calls: [(&str, Call); 10] = [
        ("read", |_, f| {
            code(f.read_at(&mut [0; 10], 1 << 20, Flags::empty()))
        }),
        ("direct read", |_, f| {
            code(f.read_at(&mut [0; 4096], 0, Flags::DIRECT))
        }),
        ("fsync", |_, f| code(f.sync_all())),
        ("submitted fsync", |_, f| code(f.submit_sync(false).wait())),
        // More than the cache holds: it waits for pages, and for the limit of what is dirty.
        ("large write", |_, f| {
            let data = vec![3; 1 << 20];
            let writes = |at: u64| f.write_at(&data, at << 20, Flags::empty());
            code((1..64).try_for_each(|at| writes(at).map(drop)))
        }),
        ("direct write", |_, f| {
            code(f.write_at(&[2; 4096], 0, Flags::DIRECT))
        }),
        ("truncation", |_, f| code(f.set_len(5))),
        ("lock", |_, f| code(f.lock(LockKind::Exclusive))),
        ("stat", |c, _| code(c.stat("f"))),
        ("flush", |c, _| code(c.flush())),
    ];
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("data")).unwrap();
    std::fs::write(dir.path().join("data/f"), vec![1; 2 << 20]).unwrap();
    std::thread::scope(|scope| {
        for (index, (name, call)) in calls.into_iter().enumerate() {
            let dir = dir.path();
            scope.spawn(move || {
                // Each has a server and a file of its own.
                let own = dir.join(index.to_string());
                std::fs::create_dir(&own).unwrap();
                let server = Server::start(&own, "data");
                std::fs::copy(dir.join("data/f"), own.join("data/f")).unwrap();
                let client = client(&own, BOUND);
                let file = client.open("f", rw()).unwrap();
                file.write_at(&[9; 100], 0, Flags::empty()).unwrap();
                server.signal(Signal::STOP);
                let began = Instant::now();
                assert_eq!(call(&client, &file), Some(libc::ENOTCONN), "{name}");
                let took = began.elapsed();
                assert!(took >= BOUND, "{name} ended after {took:?}");
                assert!(took < DEADLINE, "{name} ended after {took:?}");
                // It goes on: what was acknowledged is there, and the client comes back.
                server.signal(Signal::CONT);
                eventually("attached again", || client.stat("f").is_ok());
                let mut read = [0; 100];
                if name != "truncation" && name != "direct write" {
                    let n = file.read_at(&mut read, 0, Flags::empty()).unwrap();
                    assert_eq!((n, read), (100, [9; 100]), "{name}");
                    file.sync_all().unwrap();
                    let host = std::fs::read(own.join("data/f")).unwrap();
                    assert!(
                        host[..100] == [9; 100] && host[100..4096].iter().all(|&b| b == 1),
                        "{name}"
                    );
                }
            });
        }
    });
}

/// A server that stops for less than the bound, and then goes on, fails no call.
#[test]
fn a_server_that_goes_on_in_time_has_lost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let client = client(dir.path(), BOUND);
    let file = client.open("f", rw()).unwrap();
    for round in 0..3u8 {
        let data = vec![round + 1; 300_000];
        file.write_at(&data, 0, Flags::empty()).unwrap();
        server.signal(Signal::STOP);
        std::thread::scope(|scope| {
            let synced = scope.spawn(|| file.sync_all());
            std::thread::sleep(BOUND * 3 / 4);
            assert!(!synced.is_finished(), "the server has not answered");
            server.signal(Signal::CONT);
            synced.join().unwrap().unwrap();
        });
        assert!(std::fs::read(dir.path().join("data/f")).unwrap() == data);
    }
}

/// A single request that waits, as for a lock, is no silence of the server.
#[test]
fn a_lock_may_be_waited_for_longer() {
    let dir = tempfile::tempdir().unwrap();
    let _server = Server::start(dir.path(), "data");
    let bound = Duration::from_millis(400);
    let (one, other) = (client(dir.path(), bound), client(dir.path(), bound));
    let (held, wanted) = (one.open("f", rw()).unwrap(), other.open("f", rw()).unwrap());
    held.lock(LockKind::Exclusive).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| wanted.lock(LockKind::Exclusive));
        std::thread::sleep(bound * 6);
        assert!(!waits.is_finished());
        held.unlock().unwrap();
        waits.join().unwrap().unwrap();
    });
}

/// Attaching to a silent server fails after a time.
#[test]
fn attaching_to_a_silent_server_ends() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    server.signal(Signal::STOP);
    let socket = Connection::connect(dir.path().join("sock")).unwrap();
    let began = Instant::now();
    let client = Client::new(socket.answers_within(BOUND), Config::default());
    assert_eq!(code(client), Some(libc::ETIMEDOUT));
    assert!(began.elapsed() >= BOUND);
    server.signal(Signal::CONT);
}
