//! The client against a real server over shared memory.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{RenameFlags, XattrFlags};
use rustix::io::Errno;
use uvfs_client::{AllocateMode, Client, Config, Connection, Flags, OpenOptions, SetAttr};
use uvfs_queue::arena::Arena;
use uvfs_queue::attach::{self, Message};
use uvfs_queue::pair::{ClientQueue, Direction, Seg};
use uvfs_server::{ClientLimits, Clients};

use crate::common::{eventually, rw, session};

const MIB: usize = 1 << 20;

fn serve(dir: &Path, limits: ClientLimits) -> Clients {
    Clients::listen(session(dir.join("data")), &dir.join("sock"), limits).unwrap()
}

fn client(dir: &Path) -> Client {
    client_of(dir, 8 * MIB).unwrap()
}

fn client_of(dir: &Path, memory: usize) -> uvfs_client::Result<Client> {
    let config = Config::default().memory(memory);
    Client::new(Connection::connect(dir.join("sock")).unwrap(), config)
}

/// A session ends with its client.
#[test]
fn a_client_that_is_dropped_leaves_its_server() {
    let dir = tempfile::tempdir().unwrap();
    let served = session(dir.path().join("data"));
    let socket = dir.path().join("sock");
    let _server = Clients::listen(served.clone(), &socket, ClientLimits::default()).unwrap();
    let client = client(dir.path());
    let file = client.open("f", rw()).unwrap();
    file.write_at(b"text", 0, Flags::empty()).unwrap();
    drop(file);
    drop(client.open("f", OpenOptions::new().read(true)).unwrap());
    assert_eq!(served.report().clients.len(), 1);
    drop(client);
    eventually("it is gone", || served.report().clients.is_empty());
}

/// A call over shared memory gives the host's result.
#[test]
fn files_names_and_attributes_over_shared_memory() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path(), ClientLimits::default());
    let client = client(dir.path());
    client.mkdir("d", 0o755).unwrap();
    let file = client.open("d/f", rw()).unwrap();
    let data: Vec<u8> = (0..3 * MIB + 123).map(|i| (i / 7) as u8).collect();
    for flags in [
        Flags::empty(),
        Flags::DONTCACHE,
        Flags::DIRECT,
        Flags::DSYNC,
    ] {
        file.set_len(0).unwrap();
        assert_eq!(file.write_at(&data, 0, flags).unwrap(), data.len());
        file.sync_all().unwrap();
        assert!(std::fs::read(dir.path().join("data/d/f")).unwrap() == data);
        for read in [Flags::empty(), Flags::DONTCACHE, Flags::DIRECT] {
            let mut back = vec![0; data.len() + 10];
            assert_eq!(file.read_at(&mut back, 0, read).unwrap(), data.len());
            assert!(back[..data.len()] == data);
        }
    }
    let pending: Vec<_> = (0..16u64)
        .map(|i| file.submit_read_at(vec![0; 100_000], i * 100_000, Flags::DIRECT))
        .collect();
    for (i, p) in pending.into_iter().enumerate() {
        assert!(p.wait().unwrap() == data[i * 100_000..(i + 1) * 100_000]);
    }
    file.allocate(AllocateMode::PunchHole, 4096, 4096).unwrap();
    let mut hole = [1; 4096];
    assert_eq!(file.read_at(&mut hole, 4096, Flags::empty()).unwrap(), 4096);
    assert_eq!(hole, [0; 4096]);
    file.close().unwrap();

    client.symlink("d/f", "link").unwrap();
    assert_eq!(client.readlink("link").unwrap().to_str(), Some("d/f"));
    client.link("d/f", "hard").unwrap();
    assert_eq!(client.stat("hard").unwrap().nlink, 2);
    client.rename("hard", "d/g", RenameFlags::empty()).unwrap();
    for i in 0..300 {
        drop(
            client
                .create(format!("d/file-with-a-rather-long-name-{i}"))
                .unwrap(),
        );
    }
    assert_eq!(client.readdir("d").unwrap().len(), 302);
    let set = SetAttr {
        mode: Some(0o600),
        mtime: Some((5, 6)),
        ..SetAttr::default()
    };
    let attr = client.setattr("d/g", &set).unwrap();
    assert_eq!(
        (attr.mode & 0o777, (attr.mtime, attr.mtimensec)),
        (0o600, (5, 6))
    );
    match client.setxattr("d/g", "user.k", b"value", XattrFlags::empty()) {
        Ok(()) => {
            assert_eq!(client.getxattr("d/g", "user.k").unwrap(), b"value");
            assert_eq!(client.listxattr("d/g").unwrap(), ["user.k"]);
            client.removexattr("d/g", "user.k").unwrap();
        }
        Err(e) => assert_eq!(e.errno(), Errno::OPNOTSUPP),
    }
    assert_eq!(client.stat("nothing").unwrap_err().errno(), Errno::NOENT);
    assert!(client.statfs().unwrap().blocks > 0);
    client.unlink("d/g").unwrap();
}

/// Each thread of a client gets its own answers.
#[test]
fn threads_share_a_session() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path(), ClientLimits::default());
    let client = client(dir.path());
    std::thread::scope(|s| {
        for t in 0..4u8 {
            let client = &client;
            s.spawn(move || {
                let file = client.open(format!("f{t}"), rw()).unwrap();
                let data = vec![t + 1; 33_000];
                for i in 0..200u64 {
                    let flags = if i % 3 == 0 {
                        Flags::DIRECT
                    } else {
                        Flags::empty()
                    };
                    assert_eq!(file.write_at(&data, i * 33_000, flags).unwrap(), 33_000);
                    let mut back = vec![0; 33_000];
                    let n = file.read_at(&mut back, i * 33_000, Flags::DIRECT).unwrap();
                    assert!(n == 33_000 && back == data);
                }
                file.close().unwrap();
            });
        }
    });
    for t in 0..4u8 {
        let real = std::fs::read(dir.path().join(format!("data/f{t}"))).unwrap();
        assert!(real.len() == 200 * 33_000 && real.iter().all(|&b| b == t + 1));
    }
}

/// Clients of a server that ended get an error.
#[test]
fn a_server_that_goes_leaves_its_clients_with_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let server = serve(dir.path(), ClientLimits::default());
    let client = client(dir.path());
    let file = client.open("f", rw()).unwrap();
    file.write_at(b"kept", 0, Flags::empty()).unwrap();
    drop(server);
    assert_eq!(client.stat("f").unwrap_err().errno(), Errno::NOTCONN);
    assert!(file.sync_all().is_err());
}

fn serve_two(dir: &Path) -> Clients {
    let limits = ClientLimits {
        clients: 2,
        arena_pages: 4096,
        ..ClientLimits::default()
    };
    serve(dir, limits)
}

/// A client that asks for too much, or points out of its arena, takes no place, memory or data of others.
#[test]
fn hostile_clients_harm_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve_two(dir.path());
    let good = client(dir.path());
    let file = good.open("f", rw()).unwrap();
    file.write_at(&[1; 10_000], 0, Flags::empty()).unwrap();
    let connect = || UnixStream::connect(dir.path().join("sock")).unwrap();
    let hello = Message {
        errno: 0,
        max_payload: 0,
        source: [0; 16],
    };

    // Too large an arena, and descriptors that are none.
    let e = client_of(dir.path(), 64 * MIB).unwrap_err();
    assert!(matches!(e.errno(), Errno::INVAL | Errno::AGAIN), "{e}");
    let null = std::fs::File::open("/dev/null").unwrap();
    eventually("a refused client's place is free again", || {
        let socket = connect();
        // A full server refuses before it reads.
        let _ = attach::send(&socket, hello, &[null.as_fd(), null.as_fd()]);
        attach::receive(&socket).is_ok_and(|(m, _)| m.errno == libc::EINVAL)
    });

    // A segment outside of the arena: cut off.
    let (arena, queue) = (Arena::create(16).unwrap(), ClientQueue::create(4).unwrap());
    let mut socket = connect();
    eventually("there is a place", || {
        socket = connect();
        // A full server refuses before it reads.
        let _ = attach::send(&socket, hello, &[arena.as_fd(), queue.as_fd()]);
        attach::receive(&socket).is_ok_and(|(m, fds)| {
            if m.errno == 0 {
                queue.wake_through(fds.into_iter().next().unwrap());
            }
            m.errno == 0
        })
    });
    let id = queue.reserve().unwrap();
    let outside = [Seg {
        offset: arena.len(),
        len: 4096,
    }];
    queue.submit(id, &[0; 40], &[0; 40], b"", &outside, Direction::FromServer);
    queue.ring();
    eventually("the session is closed", || queue.server_closed());

    file.sync_all().unwrap();
    assert_eq!(
        std::fs::read(dir.path().join("data/f")).unwrap(),
        [1; 10_000]
    );
}

/// The server admits only so many clients at a time.
#[test]
fn a_third_client_finds_no_place_while_two_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve_two(dir.path());
    let first = client(dir.path());
    let second = client_of(dir.path(), MIB).unwrap();
    let e = client_of(dir.path(), MIB).unwrap_err();
    assert_eq!(e.errno(), Errno::AGAIN);
    drop(second);
    let mut third = None;
    eventually("the place is free", || {
        third = client_of(dir.path(), MIB).ok();
        third.is_some()
    });
    let file = first.open("f", rw()).unwrap();
    file.write_at(&[1; 10_000], 0, Flags::empty()).unwrap();
    file.sync_all().unwrap();
}

/// Not a test by itself: what the next one runs in another process, to be killed.
#[test]
fn writer_to_be_killed() {
    let Some(dir) = std::env::var_os("UVFS_TEST_WRITER") else {
        return;
    };
    let config = Config::default()
        .memory(8 * MIB)
        .writeback_after(Duration::from_secs(3600));
    let socket = Path::new(&dir).join("sock");
    let client = Client::new(Connection::connect(socket).unwrap(), config).unwrap();
    let file = client.open("f", rw()).unwrap();
    for i in 0.. {
        // Small, unaligned, and again and again over the same pages.
        let at = i * 1500 % (6 * MIB as u64);
        assert_eq!(
            file.write_at(&(i + 1).to_ne_bytes(), at, Flags::empty())
                .unwrap(),
            8
        );
        println!("wrote {i}");
        std::io::stdout().flush().unwrap();
    }
}

/// Data that a client wrote before it was killed is not lost.
#[test]
fn what_a_killed_client_has_written_is_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let server = serve(dir.path(), ClientLimits::default());
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "shm::writer_to_be_killed", "--nocapture"])
        .env("UVFS_TEST_WRITER", dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut last = None;
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for line in lines.by_ref() {
        let line = line.unwrap();
        if let Some((_, n)) = line.split_once("wrote ") {
            last = n.trim().parse::<u64>().ok();
        }
        if last == Some(9000) {
            child.kill().unwrap();
            break;
        }
    }
    // Lines that it still printed before it died were written as well.
    for line in lines.map_while(Result::ok) {
        if let Some((_, n)) = line.split_once("wrote ") {
            last = n.trim().parse::<u64>().ok().or(last);
        }
    }
    child.wait().unwrap();
    let last = last.unwrap();
    assert!(last >= 9000);
    let mut want = vec![0u8; 7 * MIB];
    for i in 0..=last {
        let at = (i * 1500 % (6 * MIB as u64)) as usize;
        want[at..at + 8].copy_from_slice(&(i + 1).to_ne_bytes());
    }
    // Ends when the salvage is done.
    drop(server);
    let real = std::fs::read(dir.path().join("data/f")).unwrap();
    // One more write may have been under way.
    let next = ((last + 1) * 1500 % (6 * MIB as u64)) as usize;
    for (i, &byte) in real.iter().enumerate() {
        assert!(byte == want[i] || (next..next + 8).contains(&i), "byte {i}");
    }
    let end = want.iter().rposition(|&b| b != 0).unwrap();
    assert!(real.len() > end);
}

/// Copies and extended attributes work over shared memory.
#[test]
fn open_files_copy_ranges_and_have_attributes_over_shared_memory() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve(dir.path(), ClientLimits::default());
    let [a, b] = [client(dir.path()), client(dir.path())];
    let [from, to] = ["from", "to"].map(|name| a.open(name, rw()).unwrap());
    from.write_at(&[1; 100_000], 0, Flags::empty()).unwrap();
    to.write_at(&[2; 50_000], 0, Flags::empty()).unwrap();
    // Another client has both cached, and sees what is copied.
    let theirs = b.open("to", OpenOptions::new().read(true)).unwrap();
    let mut read = vec![0; 200_000];
    assert_eq!(
        theirs.read_at(&mut read, 0, Flags::empty()).unwrap(),
        50_000
    );
    assert_eq!(from.copy_range(10, &to, 40_000, 80_000).unwrap(), 80_000);
    for file in [&to, &theirs] {
        let n = file.read_at(&mut read, 0, Flags::empty()).unwrap();
        assert_eq!(n, 120_000);
        assert!(read[..40_000].iter().all(|&b| b == 2));
        assert!(read[40_000..n].iter().all(|&b| b == 1));
    }
    let host = std::fs::read(dir.path().join("data/to")).unwrap();
    assert!(host == read[..120_000]);

    let (name, no) = ("user.uvfs-test", Errno::NODATA);
    // Also of a file that has no name any more.
    a.unlink("from").unwrap();
    match from.setxattr(name, b"value", XattrFlags::CREATE) {
        Err(e) if e.errno() == Errno::OPNOTSUPP => return,
        other => other.unwrap(),
    }
    assert_eq!(from.getxattr(name).unwrap(), b"value");
    assert!(from.listxattr().unwrap().iter().any(|n| n == name));
    let twice = from.setxattr(name, b"value", XattrFlags::CREATE);
    assert_eq!(twice.unwrap_err().errno(), Errno::EXIST);
    from.removexattr(name).unwrap();
    assert_eq!(from.getxattr(name).unwrap_err().errno(), no);
    assert_eq!(from.removexattr(name).unwrap_err().errno(), no);
}
