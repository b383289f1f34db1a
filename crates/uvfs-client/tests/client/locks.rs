//! Locks, asynchronous fsync and the client in the server's own program.

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::pin::pin;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use uvfs_client::{Client, Config, Connection, File, Flags, LockKind, OpenOptions};
use uvfs_server::{ClientLimits, Clients, in_process};

use crate::common::faulty::faulty;
use crate::common::{self, eventually, rw, session};

fn config() -> Config {
    Config::default().memory(2 << 20)
}

fn serve(dir: &Path) -> Clients {
    Clients::listen(
        session(dir.join("data")),
        &dir.join("sock"),
        ClientLimits::default(),
    )
    .unwrap()
}

fn connect(dir: &Path) -> Client {
    Client::new(Connection::connect(dir.join("sock")).unwrap(), config()).unwrap()
}

fn open(client: &Client) -> File {
    client.open("f", rw()).unwrap()
}

fn refused(result: uvfs_client::Result<()>) {
    assert_eq!(result.unwrap_err().errno(), Errno::AGAIN);
}

/// Checks which locks two open files of one file exclude, wherever they are.
fn two_files_lock(one: &Client, other: &Client) {
    let (a, b) = (open(one), open(other));
    a.lock_range(LockKind::Exclusive, 10..20).unwrap();
    refused(b.try_lock_range(LockKind::Shared, 19..30));
    refused(b.try_lock_range(LockKind::Exclusive, ..));
    b.try_lock_range(LockKind::Exclusive, 20..30).unwrap();
    let found = b.test_lock_range(LockKind::Shared, 0..15).unwrap().unwrap();
    assert_eq!(
        (found.kind, found.start, found.end),
        (LockKind::Exclusive, 10, 19)
    );
    assert_eq!(a.test_lock_range(LockKind::Exclusive, 0..20).unwrap(), None);
    // Its own locks don't stand in its way, and can be converted in part.
    a.lock_range(LockKind::Shared, 15..20).unwrap();
    b.try_lock_range(LockKind::Shared, 15..20).unwrap();
    refused(b.try_lock_range(LockKind::Shared, 14..20));
    a.unlock_range(..).unwrap();
    b.unlock_range(..).unwrap();
    a.try_lock_range(LockKind::Exclusive, ..).unwrap();
    a.unlock_range(..).unwrap();

    // Of the whole file.
    a.lock(LockKind::Shared).unwrap();
    b.lock(LockKind::Shared).unwrap();
    refused(b.try_lock(LockKind::Exclusive));
    a.unlock().unwrap();
    b.try_lock(LockKind::Exclusive).unwrap();
    refused(a.try_lock(LockKind::Shared));
    // The two kinds know nothing of each other.
    a.try_lock_range(LockKind::Exclusive, ..).unwrap();

    // Closing gives everything back, also with writes under way.
    b.write_at(b"written", 0, Flags::empty()).unwrap();
    b.close().unwrap();
    a.try_lock(LockKind::Exclusive).unwrap();
    let b = open(other);
    refused(b.try_lock_range(LockKind::Shared, 5..6));
    a.write_at(b"more", 0, Flags::empty()).unwrap();
    drop(a);
    b.try_lock_range(LockKind::Exclusive, ..).unwrap();
    b.try_lock(LockKind::Exclusive).unwrap();

    // A waiter gets it when it is given back.
    let a = open(one);
    let waiting = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            waiting.store(true, Ordering::Release);
            a.lock_range(LockKind::Exclusive, 0..1).unwrap();
            a.lock(LockKind::Exclusive).unwrap();
        });
        eventually("the other thread", || waiting.load(Ordering::Acquire));
        b.unlock_range(0..1).unwrap();
        b.close().unwrap();
    });

    // Wrong ones.
    let nothing = 7..7;
    let wrong = a.lock_range(LockKind::Shared, nothing).unwrap_err();
    assert_eq!(wrong.errno(), Errno::INVAL);
    let reader = one.open("f", OpenOptions::new().read(true)).unwrap();
    let wrong = reader.lock_range(LockKind::Exclusive, ..).unwrap_err();
    assert_eq!(wrong.errno(), Errno::BADF);
}

/// An exclusive lock excludes other clients.
#[test]
fn locks_of_one_client_and_of_two() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path());
    let (one, other) = (connect(dir.path()), connect(dir.path()));
    two_files_lock(&one, &one);
    two_files_lock(&one, &other);
}

/// Not a test by itself: locks, says so, and stays until it is killed.
#[test]
fn locker_to_be_killed() {
    let Some(dir) = std::env::var_os("UVFS_TEST_LOCKER") else {
        return;
    };
    let file = open(&connect(Path::new(&dir)));
    file.lock_range(LockKind::Exclusive, 0..100).unwrap();
    file.lock(LockKind::Exclusive).unwrap();
    println!("locked");
    loop {
        thread::park();
    }
}

/// A killed client's locks are released.
#[test]
fn a_killed_client_leaves_no_locks() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path());
    let file = open(&connect(dir.path()));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "locks::locker_to_be_killed", "--nocapture"])
        .env("UVFS_TEST_LOCKER", dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("locked")));
    refused(file.try_lock_range(LockKind::Shared, 50..60));
    refused(file.try_lock(LockKind::Shared));
    thread::scope(|scope| {
        // One waits for it, and one looks again.
        scope.spawn(|| file.lock_range(LockKind::Exclusive, 0..200).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("the lock of the dead", || {
            file.try_lock(LockKind::Exclusive).is_ok()
        });
    });
}

/// A client can end while it waits for a lock.
#[test]
fn a_client_that_waits_for_a_lock_can_go() {
    let dir = tempfile::tempdir().unwrap();
    let server = serve(dir.path());
    // The server locks the host's file, so that another program can hold it up.
    let other = connect(dir.path());
    let waiter = open(&other);
    let holder = std::fs::File::create(dir.path().join("data/f")).unwrap();
    rustix::fs::fcntl_lock(&holder, FlockOperation::NonBlockingLockExclusive).unwrap();
    let waits = thread::spawn(move || waiter.lock_range(LockKind::Shared, ..));
    assert!(other.stat("f").is_ok());
    // Ends every session, also the one with a request that waits (or is about to).
    drop(server);
    assert!(waits.join().unwrap().is_err());
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

/// Every way to wait for an fsync returns.
#[test]
fn fsync_can_be_waited_for_polled_and_awaited() {
    let dir = tempfile::tempdir().unwrap();
    let (data, (_serving, connection)) = (dir.path(), common::connect(dir.path()));
    let client = Client::new(connection, config()).unwrap();
    let file = open(&client);
    let bytes: Vec<u8> = (0..1_000_000).map(|i| (i / 3) as u8).collect();
    file.write_at(&bytes, 0, Flags::empty()).unwrap();
    file.submit_sync(false).wait().unwrap();
    assert!(std::fs::read(data.join("f")).unwrap() == bytes);
    for i in 0..20u64 {
        file.write_at(b"again", i * 5000, Flags::empty()).unwrap();
        if i % 2 == 0 {
            block_on(file.submit_sync(true)).unwrap();
            let real = std::fs::read(data.join("f")).unwrap();
            assert_eq!(&real[i as usize * 5000..][..5], b"again");
        } else {
            // Several at a time, and one that no thread waits for.
            drop(file.submit_sync(false));
            let mut both = [file.submit_sync(true), file.submit_sync(false)];
            eventually("both", || both.iter_mut().all(|p| p.is_done()));
            both.into_iter().for_each(|p| p.wait().unwrap());
        }
    }
    file.close().unwrap();
}

/// A program learns once that its data was not written.
#[test]
fn an_asynchronous_fsync_tells_of_failed_writeback_once() {
    let dir = tempfile::tempdir().unwrap();
    let (_serving, client, fault) = faulty(dir.path(), config());
    let file = open(&client);
    fault.errno.store(libc::ENOSPC, Ordering::Relaxed);
    fault.every.store(1, Ordering::Relaxed);
    file.write_at(&[1; 10_000], 0, Flags::empty()).unwrap();
    let failed = file.submit_sync(false).wait().unwrap_err();
    assert_eq!(failed.errno(), Errno::NOSPC);
    fault.every.store(0, Ordering::Relaxed);
    file.submit_sync(false).wait().unwrap();
    assert_eq!(std::fs::read(dir.path().join("f")).unwrap(), [1; 10_000]);
}

/// A client in the server's process does not deadlock with it.
#[test]
fn a_client_in_the_servers_own_program() {
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path().join("data"));
    let (serving, socket) = in_process(&session, ClientLimits::default()).unwrap();
    let client = Client::new(Connection::from(socket), config()).unwrap();
    let file = open(&client);
    let bytes: Vec<u8> = (0..5_000_000).map(|i| (i / 11) as u8).collect();
    file.write_at(&bytes, 0, Flags::empty()).unwrap();
    file.sync_all().unwrap();
    let mut back = vec![0; bytes.len()];
    assert_eq!(
        file.read_at(&mut back, 0, Flags::DIRECT).unwrap(),
        back.len()
    );
    assert!(back == bytes);
    // A second one beside it, which sees the same files; it goes first.
    let (other_serving, socket) = in_process(&session, ClientLimits::default()).unwrap();
    let other = Client::new(Connection::from(socket), config()).unwrap();
    assert_eq!(other.stat("f").unwrap().size, bytes.len() as u64);
    drop(other);
    drop(other_serving);
    // The server writes dirty pages when it goes first.
    file.write_at(b"the end", 0, Flags::empty()).unwrap();
    drop(serving);
    assert!(file.sync_all().is_err());
    let real = std::fs::read(dir.path().join("data/f")).unwrap();
    assert_eq!(&real[..7], b"the end");
}
