//! Servers that are killed while clients use them, and others that come after them.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
use uvfs_client::{Client, Config, Connection, File, Flags, LockKind, OpenOptions};
use uvfs_server::{ClientLimits, Clients};
use uvfs_testing::{Need, has};

use crate::common::{DEADLINE, Random, eventually, rw, session};
use crate::server::Server;

const FILE: usize = 1 << 20;

/// A client that writes nothing by itself, and waits so long for a server that went.
fn client_for(dir: &Path, bound: Duration) -> Client {
    let config = Config::default()
        .memory(8 << 20)
        .writeback_after(Duration::from_secs(3600));
    let server = Connection::connect(dir.join("sock")).unwrap();
    Client::new(server.reconnect_within(bound), config).unwrap()
}

fn client(dir: &Path) -> Client {
    client_for(dir, DEADLINE)
}

fn code<T: std::fmt::Debug>(result: uvfs_client::Result<T>) -> Option<i32> {
    Some(result.unwrap_err().errno().raw_os_error())
}

/// One random call of a thread that alone uses the file; all of them succeed, and after a sync the
/// host's file is the model.
fn step(file: &File, host: &Path, model: &mut Vec<u8>, random: &mut Random) {
    let most = [6000, 100_000][usize::from(random.below(8) == 0)];
    let len = 1 + random.below(most) as usize;
    let at = random.below((FILE - len) as u64) as usize;
    let flags = match random.below(12) {
        0 => Flags::DIRECT,
        1 => Flags::DONTCACHE,
        2 => Flags::DSYNC,
        _ => Flags::empty(),
    };
    match random.below(40) {
        0..10 => {
            let mut read = vec![0; len];
            let n = file.read_at(&mut read, at as u64, flags).unwrap();
            assert_eq!(n, model.len().saturating_sub(at).min(len));
            assert!(read[..n] == model[at.min(model.len())..][..n]);
        }
        10 => {
            file.sync_data().unwrap();
            assert!(std::fs::read(host).unwrap() == *model, "after a sync");
        }
        11 => {
            file.set_len(at as u64).unwrap();
            model.resize(at, 0);
            assert_eq!(file.current_size().unwrap(), at as u64);
        }
        12 => {
            let data = vec![7; len];
            // Under way when the server goes it may be there or not.
            match file.submit_write_at(&data, at as u64, flags).wait() {
                Ok(n) => assert_eq!(n, len),
                Err(e) => {
                    assert_eq!(e.errno(), Errno::NOTCONN);
                    let n = file.write_at(&data, at as u64, flags).unwrap();
                    assert_eq!(n, len);
                }
            }
            model.resize(model.len().max(at + len), 0);
            model[at..at + len].fill(7);
        }
        _ => {
            let byte = 1 + random.below(255) as u8;
            let n = file.write_at(&vec![byte; len], at as u64, flags).unwrap();
            assert_eq!(n, len);
            model.resize(model.len().max(at + len), 0);
            model[at..at + len].fill(byte);
        }
    }
}

/// A restart of the server neither ends its clients nor loses their data.
#[test]
fn clients_go_on_when_the_server_is_killed_and_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(dir.path(), "data");
    let clients = [client(dir.path()), client(dir.path())];
    let (stop, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    let host = |t: usize| dir.path().join(format!("data/f{t}"));
    std::thread::scope(|s| {
        let mut users = Vec::new();
        for t in 0..4 {
            let (client, stop, steps, host) = (&clients[t % 2], &stop, &steps, host(t));
            users.push(s.spawn(move || {
                let file = client.open(format!("f{t}"), rw()).unwrap();
                let (mut model, mut random) = (Vec::new(), Random(t as u64));
                while !stop.load(Ordering::Relaxed) {
                    step(&file, &host, &mut model, &mut random);
                    if random.below(20) == 0 {
                        // Names as well.
                        let attr = client.stat(format!("f{t}")).unwrap();
                        assert_eq!(attr.size, model.len() as u64);
                        let other = client.open(format!("f{t}"), rw()).unwrap();
                        other.close().unwrap();
                    }
                    steps.fetch_add(1, Ordering::Relaxed);
                }
                (file, model)
            }));
        }
        let mut random = Random(99);
        let ended = || users.iter().any(|user| user.is_finished());
        for _ in 0..8 {
            let until = steps.load(Ordering::Relaxed) + 20 + random.below(400);
            eventually("calls succeed", || {
                steps.load(Ordering::Relaxed) >= until || ended()
            });
            server.kill();
            std::thread::sleep(Duration::from_millis(random.below(30)));
            server = Server::start(dir.path(), "data");
        }
        let until = steps.load(Ordering::Relaxed) + 50;
        eventually("calls succeed again", || {
            steps.load(Ordering::Relaxed) >= until || ended()
        });
        // Once more while nothing is under way.
        stop.store(true, Ordering::Relaxed);
        let users: Vec<_> = users.into_iter().map(|u| u.join().unwrap()).collect();
        server.kill();
        let _server = Server::start(dir.path(), "data");
        for (t, (file, model)) in users.iter().enumerate() {
            let mut read = vec![0; FILE];
            let n = file.read_at(&mut read, 0, Flags::empty()).unwrap();
            assert!(read[..n] == *model);
            file.sync_all().unwrap();
            assert!(std::fs::read(host(t)).unwrap() == *model);
        }
    });
    for client in &clients {
        assert_eq!(client.stats().dirty_pages, 0);
    }
}

/// An append is done once, also when a restart interrupts it.
#[test]
fn appended_lines_are_there_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(dir.path(), "data");
    let client = client(dir.path());
    let log = client
        .open("log", OpenOptions::new().append(true).create(true))
        .unwrap();
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let (_server, doubtful) = std::thread::scope(|s| {
        let writer = s.spawn(|| {
            let mut doubtful = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let line = count.load(Ordering::Relaxed);
                match log.append(format!("{line:09}\n").as_bytes(), Flags::empty()) {
                    Ok(_) => {}
                    // The one that was under way may have been made.
                    Err(e) => {
                        assert_eq!(e.errno(), Errno::NOTCONN);
                        doubtful.push(line);
                    }
                }
                count.fetch_add(1, Ordering::Relaxed);
            }
            doubtful
        });
        for _ in 0..4 {
            let until = count.load(Ordering::Relaxed) + 500;
            eventually("lines are appended", || {
                count.load(Ordering::Relaxed) >= until || writer.is_finished()
            });
            server.kill();
            server = Server::start(dir.path(), "data");
        }
        stop.store(true, Ordering::Relaxed);
        (server, writer.join().unwrap())
    });
    assert!(doubtful.len() <= 4, "{doubtful:?}");
    log.sync_all().unwrap();
    let text = std::fs::read_to_string(dir.path().join("data/log")).unwrap();
    let lines: Vec<u64> = text.lines().map(|line| line.parse().unwrap()).collect();
    let expected: Vec<u64> = (0..count.load(Ordering::Relaxed))
        .filter(|line| lines.binary_search(line).is_ok() || !doubtful.contains(line))
        .collect();
    let differ = expected.iter().zip(&lines).position(|(a, b)| a != b);
    let around = differ.map(|at| (&expected[at..][..1], &lines[at.saturating_sub(2)..][..4]));
    let counts = (expected.len(), lines.len());
    assert!(expected == lines, "{counts:?} {around:?} {doubtful:?}");
}

/// Calls without a server fail after a time, and dirty data stays.
#[test]
fn without_a_server_calls_fail_after_the_bound_and_what_is_dirty_waits() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let client = client_for(dir.path(), Duration::from_millis(300));
    let file = client.open("f", rw()).unwrap();
    file.write_at(&[1; 10_000], 0, Flags::empty()).unwrap();
    server.kill();
    let gone = Some(libc::ENOTCONN);
    eventually("the end is noticed", || {
        file.read_at(&mut [0; 10], 0, Flags::empty()).is_err()
    });
    assert_eq!(code(file.read_at(&mut [0; 10], 0, Flags::empty())), gone);
    assert_eq!(code(file.write_at(&[2; 10], 0, Flags::empty())), gone);
    assert_eq!(code(file.write_at(&[2; 10], 0, Flags::DIRECT)), gone);
    assert_eq!(code(file.append(&[2; 10], Flags::empty())), gone);
    assert_eq!(code(file.set_len(5)), gone);
    assert_eq!(code(file.stat()), gone);
    assert_eq!(code(file.current_size()), gone);
    assert_eq!(code(file.try_lock(LockKind::Shared)), gone);
    assert_eq!(code(client.stat("f")), gone);
    assert_eq!(code(client.mkdir("d", 0o755)), gone);
    assert_eq!(code(client.open("g", rw())), gone);
    let pending = file.submit_read_at(vec![0; 10], 0, Flags::DIRECT);
    assert_eq!(code(pending.wait()), gone);
    assert_eq!(code(file.submit_sync(false).wait()), gone);
    assert_eq!(code(file.sync_all()), gone);
    assert_eq!(code(client.flush()), gone);
    assert!(client.stats().dirty_pages >= 3, "they stay");
    // Late, but there: nothing was lost, and no error is left.
    let _server = Server::start(dir.path(), "data");
    eventually("attached again", || client.stat("f").is_ok());
    file.sync_all().unwrap();
    let host = dir.path().join("data/f");
    assert!(std::fs::read(host).unwrap() == [1; 10_000]);
    file.write_at(b"on", 0, Flags::empty()).unwrap();
    file.close().unwrap();
}

/// A program can exit while its server is away.
#[test]
fn a_client_that_ends_without_a_server_does_not_hang() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let client = client_for(dir.path(), Duration::from_millis(100));
    for i in 0..20 {
        let file = client.open(format!("f{i}"), rw()).unwrap();
        file.write_at(&[1; 10_000], 0, Flags::empty()).unwrap();
    }
    server.kill();
    drop(client);
}

/// After a restart a client writes to no other file of the same name.
#[test]
fn files_that_were_removed_or_replaced_are_stale_and_renamed_ones_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let data = dir.path().join("data");
    let client = client(dir.path());
    client.mkdir("dir", 0o755).unwrap();
    let [kept, removed, replaced, renamed] =
        ["dir/kept", "removed", "replaced", "renamed"].map(|name| {
            let file = client.open(name, rw()).unwrap();
            file.write_at(name.as_bytes(), 0, Flags::empty()).unwrap();
            file
        });
    server.kill();
    std::fs::remove_file(data.join("removed")).unwrap();
    std::fs::write(data.join("new"), b"another").unwrap();
    std::fs::rename(data.join("new"), data.join("replaced")).unwrap();
    // Without privileges a file is found under the name that it had.
    let privileged = rustix::process::geteuid().is_root();
    if privileged {
        std::fs::rename(data.join("renamed"), data.join("elsewhere")).unwrap();
    }
    let _server = Server::start(dir.path(), "data");
    let stale = Some(libc::ESTALE);
    for file in [&removed, &replaced] {
        assert_eq!(code(file.sync_all()), stale);
        assert_eq!(code(file.read_at(&mut [0; 10], 0, Flags::empty())), stale);
        assert_eq!(code(file.write_at(&[0; 10], 0, Flags::empty())), stale);
    }
    kept.sync_all().unwrap();
    renamed.sync_all().unwrap();
    assert_eq!(client.stats().dirty_pages, 0, "those of lost files went");
    assert_eq!(std::fs::read(data.join("dir/kept")).unwrap(), b"dir/kept");
    assert_eq!(std::fs::read(data.join("replaced")).unwrap(), b"another");
    let name = ["renamed", "elsewhere"][usize::from(privileged)];
    assert_eq!(std::fs::read(data.join(name)).unwrap(), b"renamed");
    // Nothing of it is in the way of what has the name now.
    let again = client.open("replaced", rw()).unwrap();
    again.write_at(b"ANOTHER", 0, Flags::empty()).unwrap();
    again.close().unwrap();
    assert_eq!(std::fs::read(data.join("replaced")).unwrap(), b"ANOTHER");
}

/// A client overwrites nothing that others wrote during the restart.
#[test]
fn what_others_changed_meanwhile_is_seen_and_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let data = dir.path().join("data");
    let client = client(dir.path());
    let [clean, dirty, touched] = ["clean", "dirty", "touched"].map(|name| {
        let file = client.open(name, rw()).unwrap();
        file.write_at(name.as_bytes(), 0, Flags::empty()).unwrap();
        file
    });
    clean.sync_all().unwrap();
    server.kill();
    for name in ["clean", "dirty"] {
        std::fs::write(data.join(name), b"by others").unwrap();
        // Later than the end of the server, whenever the client noticed that.
        let later = SystemTime::now() + Duration::from_secs(3600);
        let file = std::fs::File::options().write(true).open(data.join(name));
        file.unwrap().set_modified(later).unwrap();
    }
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(data.join("touched"), mode).unwrap();
    let _server = Server::start(dir.path(), "data");
    let read = |file: &File| {
        let mut read = [0; 20];
        let n = file.read_at(&mut read, 0, Flags::empty()).unwrap();
        read[..n].to_vec()
    };
    // Cached data is good until the end is noticed.
    eventually("it is seen", || read(&clean) == b"by others");
    assert_eq!(code(dirty.sync_all()), Some(libc::EIO), "said once");
    dirty.sync_all().unwrap();
    assert_eq!(read(&dirty), b"by others");
    assert_eq!(read(&touched), b"touched", "its data is as it was");
    for file in [clean, dirty, touched] {
        file.write_at(b"BY", 0, Flags::empty()).unwrap();
        file.close().unwrap();
    }
    assert_eq!(std::fs::read(data.join("clean")).unwrap(), b"BY others");
    assert_eq!(std::fs::read(data.join("dirty")).unwrap(), b"BY others");
    assert_eq!(std::fs::read(data.join("touched")).unwrap(), b"BYuched");
}

/// A client writes nothing to the server of another source.
#[test]
fn another_source_on_the_socket_is_refused_until_ours_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let client = client_for(dir.path(), Duration::from_millis(200));
    let file = client.open("f", rw()).unwrap();
    file.write_at(b"ours", 0, Flags::empty()).unwrap();
    server.kill();
    let other = Server::start(dir.path(), "other");
    eventually("it is refused", || {
        client.stat("").is_err_and(|e| e.errno() == Errno::STALE)
    });
    assert_eq!(code(file.sync_all()), Some(libc::ESTALE));
    assert_eq!(
        std::fs::read_dir(dir.path().join("other")).unwrap().count(),
        0
    );
    other.kill();
    let _server = Server::start(dir.path(), "data");
    eventually("what is dirty is written", || file.sync_all().is_ok());
    assert_eq!(std::fs::read(dir.path().join("data/f")).unwrap(), b"ours");
}

/// A client takes its locks again, and loses a file whose lock another one took.
#[test]
fn locks_are_taken_again_and_a_file_whose_lock_is_lost_fails() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let ours = client(dir.path());
    let [kept, lost] = ["kept", "lost"].map(|name| ours.open(name, rw()).unwrap());
    kept.lock_range(LockKind::Exclusive, 10..20).unwrap();
    kept.unlock_range(12..14).unwrap();
    kept.lock(LockKind::Shared).unwrap();
    lost.lock(LockKind::Exclusive).unwrap();
    lost.write_at(b"dirty", 0, Flags::empty()).unwrap();
    server.kill();
    // Another client is faster.
    let _server = Server::start_at(dir.path(), "data", "sock2");
    let theirs = Client::new(
        Connection::connect(dir.path().join("sock2")).unwrap(),
        Config::default(),
    )
    .unwrap();
    let taken = theirs.open("lost", rw()).unwrap();
    taken.try_lock(LockKind::Exclusive).unwrap();
    std::fs::rename(dir.path().join("sock2"), dir.path().join("sock")).unwrap();
    kept.sync_all().unwrap();
    let other = theirs.open("kept", rw()).unwrap();
    let busy = Some(libc::EAGAIN);
    let exclusive = LockKind::Exclusive;
    assert_eq!(code(other.try_lock_range(exclusive, 10..12)), busy);
    other.try_lock_range(exclusive, 12..14).unwrap();
    assert_eq!(code(other.try_lock_range(exclusive, 14..20)), busy);
    assert_eq!(code(other.try_lock(exclusive)), busy);
    other.try_lock(LockKind::Shared).unwrap();
    let io = Some(libc::EIO);
    assert_eq!(code(lost.sync_all()), io);
    assert_eq!(code(lost.read_at(&mut [0; 10], 0, Flags::empty())), io);
    assert_eq!(code(lost.write_at(&[0; 10], 0, Flags::empty())), io);
    assert_eq!(std::fs::read(dir.path().join("data/lost")).unwrap(), b"");
    // Opened again it is as any other.
    drop(lost);
    let again = ours.open("lost", rw()).unwrap();
    assert_eq!(code(again.try_lock(exclusive)), busy);
    drop(taken);
    again.lock(exclusive).unwrap();
}

/// A client writes nothing again that the old server wrote.
#[test]
fn a_server_that_ended_in_order_has_written_and_nothing_is_written_twice() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "data");
    let [a, b] = [client(dir.path()), client(dir.path())];
    let file = a.open("f", rw()).unwrap();
    file.write_at(b"first", 0, Flags::empty()).unwrap();
    server.end();
    assert_eq!(std::fs::read(dir.path().join("data/f")).unwrap(), b"first");
    // The host changes it before the client reads it again.
    std::fs::write(dir.path().join("data/f"), b"second").unwrap();
    let server = Server::start(dir.path(), "data");
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

/// An fsync reports what the old server could not write at its end.
#[test]
fn what_a_server_could_not_write_at_its_end_is_told_once_it_is_back() {
    const LIMIT: u64 = 10_000;
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("data")).unwrap();
    // It outlives the signal that comes with a write beyond its limit for the size of files.
    let plain = Server::command(dir.path(), "data", "sock");
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"])
        .arg(plain.get_program())
        .args(plain.get_args())
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let envs = plain.get_envs();
    command.envs(envs.filter_map(|(name, value)| Some((name, value?))));
    let server = Server::begin(&mut command);
    eventually("the server listens", || dir.path().join("sock").exists());
    let client = client(dir.path());
    let (large, small) = (
        client.open("large", rw()).unwrap(),
        client.open("small", rw()).unwrap(),
    );
    large.write_at(&[1; 20_000], 0, Flags::empty()).unwrap();
    small.write_at(b"kept", 0, Flags::empty()).unwrap();
    let limit = Rlimit {
        current: Some(LIMIT),
        maximum: getrlimit(Resource::Fsize).maximum,
    };
    prlimit(Some(server.pid()), Resource::Fsize, limit).unwrap();
    server.end();
    let host = |name: &str| std::fs::read(dir.path().join("data").join(name)).unwrap();
    assert!(host("large").len() as u64 <= LIMIT);
    assert_eq!(host("small"), b"kept");
    let _server = Server::start(dir.path(), "data");
    assert_eq!(code(large.sync_all()), Some(libc::EIO));
}

/// Names are removed at the new server as at the old one.
#[test]
fn names_are_removed_at_a_server_that_came_back() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, data) = (dir.path().join("sock"), dir.path().join("data"));
    let serve = || {
        let session = session(&data);
        let clients = Clients::listen(session.clone(), &socket, ClientLimits::default()).unwrap();
        (session, clients)
    };
    let (first, clients) = serve();
    for name in ["open", "known", "new", "both", "last"] {
        std::fs::write(data.join(name), name).unwrap();
    }
    std::fs::hard_link(data.join("both"), data.join("link")).unwrap();
    let client = client(dir.path());
    let file = client.open("open", rw()).unwrap();
    for name in ["known", "both"] {
        client.lstat(name).unwrap();
    }
    client.unlink("last").unwrap();
    drop((clients, first));
    let (second, _clients) = serve();
    // Numbers of the second server's, in another order than the first one's.
    for name in ["link", "new", "known", "both"] {
        client.lstat(name).unwrap();
    }
    for name in ["known", "both", "new"] {
        client.unlink(name).unwrap();
        assert_eq!(code(client.lstat(name)), Some(libc::ENOENT));
        assert!(!data.join(name).exists());
    }
    assert_eq!(client.lstat("link").unwrap().nlink, 1);
    client.unlink("link").unwrap();
    client.unlink("open").unwrap();
    let mut bytes = [0; 4];
    assert_eq!(file.read_at(&mut bytes, 0, Flags::empty()).unwrap(), 4);
    assert_eq!(&bytes, b"open");
    assert_eq!(file.stat().unwrap().nlink, 0);
    eventually("all but the open one are forgotten", || {
        second.fs().known_inodes() == 1
    });
}

/// The client hands its memory only to a server of the same user as before.
#[test]
fn another_users_server_gets_no_memory() {
    if !has(&[Need::Root]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (socket, data) = (dir.path().join("sock"), dir.path().join("data"));
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(dir.path(), everybody).unwrap();
    let listen = || Clients::listen(session(&data), &socket, ClientLimits::default()).unwrap();
    let server = listen();
    let client = client(dir.path());
    let file = client.open("f", rw()).unwrap();
    file.write_at(b"secret", 0, Flags::empty()).unwrap();
    drop(server);
    let path = socket.clone();
    let (sender, received) = std::sync::mpsc::channel();
    let impostor = std::thread::spawn(move || {
        // Of this thread alone; clients see the user of the thread that listens.
        let nobody = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let answer = uvfs_queue::attach::receive(&stream);
        std::fs::remove_file(&path).unwrap();
        sender.send(answer.map(|(_, fds)| fds.len())).unwrap();
    });
    let tried = received.recv_timeout(DEADLINE).expect("the client looks");
    assert!(tried.is_err(), "descriptors for another user: {tried:?}");
    impostor.join().unwrap();
    let _server = listen();
    let mut read = [0; 6];
    eventually("the client is back", || {
        file.read_at(&mut read, 0, Flags::empty()).is_ok()
    });
    assert_eq!(&read, b"secret");
}
