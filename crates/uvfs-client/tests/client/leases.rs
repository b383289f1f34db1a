//! Clients of one server and a kernel mount of it see one another's writes as they return.
//!
//! Two kinds of checks. One caller at a time: whatever is read must be exactly what a model of the
//! files says. All at once: every writer counts up in places of its own, and what is read from them
//! must lie between the last count whose write had returned before the read began, and the last
//! that had begun when it ended.
//!
//! `UVFS_TEST_FULL=1` runs each for longer.

mod mounted;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use uvfs_client::{Client, Config, Connection, File, Flags, NewFile, OpenOptions, ROOT};
use uvfs_passthrough::Passthrough;
use uvfs_queue::arena::Arena;
use uvfs_server::mount::{MountOptions, mount, unmount};
use uvfs_server::{
    ClientLimits, Clients, Server, ServerOptions, Session, SessionOptions, Transport,
};
use uvfs_testing::full;

use crate::common::{DEADLINE, Random, rw, session};

fn serve(dir: &Path, recall: Duration) -> Clients {
    let limits = ClientLimits {
        recall,
        ..ClientLimits::default()
    };
    Clients::listen(session(dir.join("data")), &dir.join("sock"), limits).unwrap()
}

/// A client that writes nothing back unless it must.
fn client(dir: &Path) -> Client {
    let config = Config::default()
        .memory(4 << 20)
        .writeback_after(Duration::from_secs(3600));
    Client::new(Connection::connect(dir.join("sock")).unwrap(), config).unwrap()
}

/// A file as one of its users sees it.
trait Use: Send {
    fn read(&self, buf: &mut [u8], at: u64, how: Flags) -> usize;
    fn write(&self, buf: &[u8], at: u64, how: Flags);
    fn append(&self, buf: &[u8]);
    fn size(&self) -> u64;
    fn set_len(&self, size: u64);
    fn sync(&self);
}

impl Use for File {
    fn read(&self, buf: &mut [u8], at: u64, how: Flags) -> usize {
        self.read_at(buf, at, how).unwrap()
    }
    fn write(&self, buf: &[u8], at: u64, how: Flags) {
        assert_eq!(self.write_at(buf, at, how).unwrap(), buf.len());
    }
    fn append(&self, buf: &[u8]) {
        File::append(self, buf, Flags::empty()).unwrap();
    }
    fn size(&self) -> u64 {
        self.stat().unwrap().size
    }
    fn set_len(&self, size: u64) {
        File::set_len(self, size).unwrap();
    }
    fn sync(&self) {
        self.sync_data().unwrap();
    }
}

/// A file of a mount.
struct Kernel(std::fs::File);

impl Use for Kernel {
    fn read(&self, buf: &mut [u8], at: u64, _: Flags) -> usize {
        let mut done = 0;
        while done < buf.len() {
            match self.0.read_at(&mut buf[done..], at + done as u64).unwrap() {
                0 => break,
                n => done += n,
            }
        }
        done
    }
    fn write(&self, buf: &[u8], at: u64, _: Flags) {
        self.0.write_all_at(buf, at).unwrap();
    }
    fn append(&self, buf: &[u8]) {
        // The mount knows the end as of its last look; O_APPEND is what this stands for.
        let end = self.size();
        self.0.write_all_at(buf, end).unwrap();
    }
    fn size(&self) -> u64 {
        self.0.metadata().unwrap().len()
    }
    fn set_len(&self, size: u64) {
        self.0.set_len(size).unwrap();
    }
    fn sync(&self) {
        self.0.sync_data().unwrap();
    }
}

/// One at a time: exactly what the model says.
fn one_at_a_time(users: &[Vec<Box<dyn Use>>], seed: u64, ops: usize) {
    const MOST: u64 = 50_000;
    let mut random = Random(seed);
    let mut models: Vec<Vec<u8>> = vec![Vec::new(); users[0].len()];
    for op in 0..ops {
        // Mostly the same one for a while, so that leases are had.
        let user = random.below(users.len() as u64) as usize;
        let file = random.below(models.len() as u64) as usize;
        for _ in 0..1 + random.below(6) {
            let (f, model) = (&users[user][file], &mut models[file]);
            let how = match random.below(6) {
                0 => Flags::DIRECT,
                1 => Flags::DONTCACHE,
                _ => Flags::empty(),
            };
            let at = random.below(MOST);
            let len = 1 + if random.below(3) == 0 {
                random.below(12_000)
            } else {
                random.below(300)
            } as usize;
            match random.below(20) {
                0..8 => {
                    let mut buf = vec![0; len];
                    let n = f.read(&mut buf, at, how);
                    let start = (at as usize).min(model.len());
                    let want = &model[start..(start + len).min(model.len())];
                    assert_eq!(n, want.len(), "op {op}: user {user} reads {len} at {at}");
                    let differs = buf.iter().zip(want).position(|(a, b)| a != b);
                    assert_eq!(differs, None, "op {op}: user {user} reads {len} at {at}");
                }
                8..15 => {
                    let data = vec![1 + random.below(255) as u8; len];
                    f.write(&data, at, how);
                    let end = at as usize + len;
                    if model.len() < end {
                        model.resize(end, 0);
                    }
                    model[at as usize..end].copy_from_slice(&data);
                }
                15 => {
                    let data = vec![1 + random.below(255) as u8; len.min(500)];
                    f.append(&data);
                    model.extend_from_slice(&data);
                }
                16 => {
                    f.set_len(at);
                    model.resize(at as usize, 0);
                }
                17 => f.sync(),
                _ => assert_eq!(f.size(), model.len() as u64, "op {op}: user {user}"),
            }
            if model.len() > 2 * MOST as usize {
                f.set_len(0);
                model.clear();
            }
        }
    }
}

/// All at once, each counting up in its own places, which share pages with those of the others.
fn all_at_once(users: Vec<Box<dyn Use>>, seed: u64, time: Duration) {
    const PLACES: u64 = 8;
    let n = users.len() as u64;
    let at = |user: u64, place: u64| (place * n + user) * 8 * 37;
    let zero: Vec<[AtomicU64; 2]> = (0..n * PLACES).map(|_| Default::default()).collect();
    let counts = &zero;
    users[0].set_len(0);
    users[0].set_len(at(n, PLACES));
    let stop = &AtomicBool::new(false);
    std::thread::scope(|s| {
        for (user, file) in (0..n).zip(users) {
            s.spawn(move || {
                struct Over<'a>(&'a AtomicBool);
                impl Drop for Over<'_> {
                    fn drop(&mut self) {
                        self.0.store(true, Ordering::Relaxed);
                    }
                }
                let _over = Over(stop);
                let mut random = Random(seed + user);
                let began = Instant::now();
                while began.elapsed() < time && !stop.load(Ordering::Relaxed) {
                    let how = match random.below(8) {
                        0 => Flags::DIRECT,
                        _ => Flags::empty(),
                    };
                    let place = random.below(PLACES);
                    if random.below(3) == 0 {
                        let [begun, returned] = &counts[(place * n + user) as usize];
                        let value = begun.load(Ordering::SeqCst) + 1;
                        begun.store(value, Ordering::SeqCst);
                        file.write(&value.to_ne_bytes(), at(user, place), how);
                        returned.store(value, Ordering::SeqCst);
                        continue;
                    }
                    let other = random.below(n);
                    let [begun, returned] = &counts[(place * n + other) as usize];
                    let least = returned.load(Ordering::SeqCst);
                    let mut buf = [0; 8];
                    assert_eq!(file.read(&mut buf, at(other, place), how), 8);
                    let most = begun.load(Ordering::SeqCst);
                    let value = u64::from_ne_bytes(buf);
                    assert!(
                        (least..=most).contains(&value),
                        "user {user} read {value} of {other}, which is {least} to {most}"
                    );
                }
            });
        }
    });
}

fn times() -> (usize, Duration) {
    if full() {
        (20_000, Duration::from_secs(30))
    } else {
        (400, Duration::from_secs(1))
    }
}

/// A client reads what another one wrote last.
#[test]
fn two_clients_one_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path(), Duration::from_secs(20));
    let clients = [client(dir.path()), client(dir.path())];
    let open = |c: &Client, name: &str| Box::new(c.open(name, rw()).unwrap()) as Box<dyn Use>;
    let users: Vec<Vec<_>> = clients
        .iter()
        .map(|c| vec![open(c, "a"), open(c, "b")])
        .collect();
    one_at_a_time(&users, 1, times().0);
}

/// Clients at work at the same time neither lose nor mix up writes.
#[test]
fn three_clients_all_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path(), Duration::from_secs(20));
    let clients: Vec<_> = (0..3).map(|_| client(dir.path())).collect();
    let users = clients
        .iter()
        .map(|c| Box::new(c.open("f", rw()).unwrap()) as Box<dyn Use>)
        .collect();
    all_at_once(users, 1, times().1);
}

/// A read of cached data costs no request.
#[test]
fn what_is_cached_is_cached() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path(), Duration::from_secs(20));
    let (a, b) = (client(dir.path()), client(dir.path()));
    let file = a.open("f", rw()).unwrap();
    file.write_at(&[1; 10_000], 0, Flags::empty()).unwrap();
    let host = dir.path().join("data/f");
    assert_eq!(
        std::fs::metadata(&host).unwrap().len(),
        0,
        "not written yet"
    );
    // Another's look at it brings everything to light.
    assert_eq!(b.stat("f").unwrap().size, 10_000);
    assert_eq!(std::fs::read(&host).unwrap(), [1; 10_000]);
    let mut buf = [0; 10];
    assert_eq!(file.read_at(&mut buf, 5, Flags::empty()).unwrap(), 10);
    // No client has been writing since: both may cache it, and a change reaches both.
    let other = b.open("f", rw()).unwrap();
    assert_eq!(other.read_at(&mut buf, 5, Flags::empty()).unwrap(), 10);
    other.write_at(&[2; 3], 5, Flags::empty()).unwrap();
    file.read_at(&mut buf, 5, Flags::empty()).unwrap();
    assert_eq!(buf, [2, 2, 2, 1, 1, 1, 1, 1, 1, 1]);
    other.set_len(6).unwrap();
    assert_eq!(
        (
            file.size(),
            file.read_at(&mut buf, 5, Flags::empty()).unwrap()
        ),
        (6, 1)
    );
    file.append(b"end", Flags::empty()).unwrap();
    assert_eq!(other.stat().unwrap().size, 9);
}

/// Two clients that append don't overwrite each other.
#[test]
fn appends_of_several_clients_all_stay() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path(), Duration::from_secs(20));
    std::thread::scope(|s| {
        for who in 0..3u8 {
            let client = client(dir.path());
            s.spawn(move || {
                let file = client
                    .open("log", OpenOptions::new().append(true).create(true))
                    .unwrap();
                for i in 0..100u8 {
                    file.write_at(&[who, i], 0, Flags::empty()).unwrap();
                }
                file.close().unwrap();
            });
        }
    });
    let log = std::fs::read(dir.path().join("data/log")).unwrap();
    let mut next = [0u8; 3];
    for record in log.chunks(2) {
        assert_eq!(
            record[1], next[record[0] as usize],
            "in the order of each one's calls"
        );
        next[record[0] as usize] += 1;
    }
    assert_eq!(next, [100; 3]);
}

/// Another process of this program, told what to be by its environment.
struct Helper {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Helper {
    fn start(name: &str, dir: &Path, more: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("leases::{name}"), "--nocapture"])
            .env("UVFS_TEST_LEASES", dir)
            .env("UVFS_TEST_MORE", more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        // Nothing waits for ever.
        let pid = Pid::from_child(&child);
        std::thread::spawn(move || {
            std::thread::sleep(DEADLINE * if full() { 4 } else { 1 });
            let _ = kill_process(pid, Signal::KILL);
        });
        let mut helper = Self {
            child,
            input,
            output,
        };
        while helper.line() != "ready" {}
        helper
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let n = self.output.read_line(&mut line).unwrap();
        assert_ne!(n, 0, "the other process ended");
        line.trim_end().to_owned()
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn environment() -> Option<(PathBuf, String)> {
    let dir = std::env::var_os("UVFS_TEST_LEASES")?;
    Some((dir.into(), std::env::var("UVFS_TEST_MORE").unwrap()))
}

/// Not a test by itself: a client in another process. Writes a line's bytes where it says.
#[test]
fn writes_as_told() {
    let Some((dir, _)) = environment() else {
        return;
    };
    let client = client(&dir);
    let file = client.open("f", rw()).unwrap();
    println!("\nready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (at, text) = line.split_once(' ').unwrap();
        match file.write_at(text.as_bytes(), at.parse().unwrap(), Flags::empty()) {
            Ok(n) => println!("wrote {n}"),
            Err(e) => println!("failed {}", e.errno().raw_os_error()),
        }
    }
}

/// A client that ignores a recall is cut off, so that others get the file.
#[test]
fn a_client_that_ignores_a_recall_is_cut_off_and_its_data_written() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path(), Duration::from_millis(300));
    let good = client(dir.path());
    let mut other = Helper::start("writes_as_told", dir.path(), "");
    other.tell("0 first");
    assert_eq!(other.line(), "wrote 5");
    let host = dir.path().join("data/f");
    assert_eq!(std::fs::metadata(&host).unwrap().len(), 0, "it is cached");
    other.signal(Signal::STOP);
    let file = good.open("f", rw()).unwrap();
    let mut buf = [0; 10];
    assert_eq!(file.read_at(&mut buf, 0, Flags::empty()).unwrap(), 5);
    assert_eq!(&buf[..5], b"first");
    file.write_at(b"F", 0, Flags::empty()).unwrap();
    // It comes to, and finds that it is out; what it says then changes nothing.
    other.signal(Signal::CONT);
    other.tell("0 later");
    assert_eq!(other.line(), format!("failed {}", libc::ENOTCONN));
    assert_eq!(file.read_at(&mut buf, 0, Flags::empty()).unwrap(), 5);
    assert_eq!(&buf[..5], b"First");
    file.close().unwrap();
    assert_eq!(std::fs::read(&host).unwrap(), b"First");
}

/// Two recalls that cross do not deadlock.
#[test]
fn two_clients_that_wait_for_each_other_both_get_on() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path(), Duration::from_secs(20));
    let (a, b) = (client(dir.path()), client(dir.path()));
    let data = vec![7; 2 << 20];
    std::thread::scope(|s| {
        for (mine, theirs, c) in [("x", "y", &a), ("y", "x", &b)] {
            let data = &data;
            s.spawn(move || {
                let (mine, theirs) = (c.open(mine, rw()).unwrap(), c.open(theirs, rw()).unwrap());
                for _ in 0..10 {
                    mine.write_at(&data[..64 << 10], 0, Flags::empty()).unwrap();
                    let many: Vec<_> = (0..100u64)
                        .map(|i| theirs.submit_read_at(vec![0; 4096], i * 4096, Flags::DIRECT))
                        .collect();
                    many.into_iter().for_each(|one| drop(one.wait().unwrap()));
                }
            });
        }
    });
}

/// Not a test by itself: a client in another process that counts up, and says how far it is.
#[test]
fn counts_up() {
    let Some((dir, more)) = environment() else {
        return;
    };
    let client = client(&dir);
    let file = client.open("f", rw()).unwrap();
    let at: u64 = more.parse().unwrap();
    println!("\nready");
    for i in 1u64.. {
        file.write_at(&i.to_ne_bytes(), at, Flags::empty()).unwrap();
        println!("{i}");
    }
}

/// Data that a client wrote before it was killed is not lost.
#[test]
fn a_client_killed_with_a_lease_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path(), Duration::from_secs(20));
    let good = client(dir.path());
    let file = good.open("f", rw()).unwrap();
    let rounds = if full() { 40 } else { 6 };
    for round in 0..rounds {
        let at = round * 8;
        let mut other = Helper::start("counts_up", dir.path(), &at.to_string());
        let mut last = 0;
        // Now and then it is asked for its lease meanwhile.
        for _ in 0..200 + 131 * round {
            last = other.line().parse().unwrap();
            if round % 2 == 1 && last % 64 == 0 {
                let mut buf = [0; 8];
                file.read_at(&mut buf, at, Flags::empty()).unwrap();
                assert!(u64::from_ne_bytes(buf) >= last);
            }
        }
        other.signal(Signal::KILL);
        let mut rest = String::new();
        while other.output.read_line(&mut rest).is_ok_and(|n| n > 0) {
            if rest.ends_with('\n') {
                last = rest.trim().parse().unwrap_or(last);
            }
            rest.clear();
        }
        let mut buf = [0; 8];
        assert_eq!(file.read_at(&mut buf, at, Flags::empty()).unwrap(), 8);
        let value = u64::from_ne_bytes(buf);
        assert!(value == last || value == last + 1, "{value} after {last}");
        file.write_at(&[1; 8], at, Flags::empty()).unwrap();
    }
}

// With a kernel mount, which another process serves: a process must not use its own.

/// CREATE with O_TRUNC names no node: what others have cached of the file that it cuts goes all the
/// same, dirty or clean.
#[test]
fn a_create_that_cuts_recalls_what_others_have() {
    let dir = tempfile::tempdir().unwrap();
    let _clients = serve(dir.path(), DEADLINE);
    let host = dir.path().join("data/f");
    let [a, b] = [client(dir.path()), client(dir.path())];
    let raw = Connection::connect(dir.path().join("sock")).unwrap();
    let arena = Arc::new(Arena::create(16 + Connection::RESERVED_PAGES).unwrap());
    raw.attach(&arena).unwrap();
    let name = std::ffi::OsStr::new("f");
    let create = |flags| {
        let new = NewFile {
            mode: 0o644,
            flags: OFlags::RDWR | OFlags::TRUNC | flags,
        };
        raw.create(ROOT, name, new)
    };
    let file = a.open("f", rw()).unwrap();
    for synced in [false, true] {
        file.write_at(b"some data", 0, Flags::empty()).unwrap();
        if synced {
            file.sync_all().unwrap();
            // Cached by two.
            let other = b.open("f", rw()).unwrap();
            assert_eq!(Use::read(&other, &mut [0; 20], 0, Flags::empty()), 9);
            assert_eq!(Use::read(&file, &mut [0; 20], 0, Flags::empty()), 9);
        }
        let (entry, fh) = create(OFlags::empty()).unwrap();
        assert_eq!(entry.attr.size, 0);
        assert_eq!(file.stat().unwrap().size, 0);
        assert_eq!(Use::read(&file, &mut [0; 20], 0, Flags::empty()), 0);
        file.sync_all().unwrap();
        assert_eq!(std::fs::read(&host).unwrap(), b"");
        // The handle is one.
        raw.fsync(entry.node, fh, false).unwrap();
        raw.release(entry.node, fh);
        raw.forget(entry.node, 1);
    }
    file.write_at(b"kept", 0, Flags::empty()).unwrap();
    let refused = create(OFlags::EXCL).unwrap_err();
    assert_eq!(refused, Errno::EXIST);
    assert_eq!(file.stat().unwrap().size, 4);
    // A new file, which its mode keeps from being opened again for writing.
    let new = NewFile {
        mode: 0o444,
        flags: OFlags::RDWR | OFlags::TRUNC,
    };
    let (entry, _) = raw.create(ROOT, "new".as_ref(), new).unwrap();
    assert_eq!(entry.attr.size, 0);
}
