//! Names, attributes and contents that clients keep: several clients of one server change the same
//! directories in turn, and each sees at once what the host has.

mod common;

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use uvfs_client::{Attr, Client, Config, Flags, Names, Server, ShortFile};
use uvfs_passthrough::Passthrough;
use uvfs_server::{ClientLimits, InProcess, Session, in_process};

use common::{Random, session};

const NAMES: [&str; 8] = ["a", "b", "d", "e", "d/a", "d/b", "d/d", "d/d/a"];

/// The client goes before its side of the server.
struct Attached(Client, #[allow(dead_code)] InProcess);

impl std::ops::Deref for Attached {
    type Target = Client;
    fn deref(&self) -> &Client {
        &self.0
    }
}

fn client(session: &Arc<Session<Passthrough>>) -> Attached {
    let (serving, socket) = in_process(session, ClientLimits::default()).unwrap();
    let config = Config {
        memory: 1 << 20,
        ..Config::default()
    };
    Attached(Client::new(Server::from(socket), config).unwrap(), serving)
}

fn names(path: &str) -> Names {
    Names::parse(path.as_bytes()).unwrap()
}

fn open(client: &Client, path: &str, flags: i32) -> io::Result<ShortFile> {
    client.open_at(&client.root(), &names(path), flags, 0o644, 0)
}

fn contents(file: &ShortFile, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len + 1];
    let n = match file.read_short(&mut bytes, 0) {
        Some(n) => n,
        None => file.file().read_at(&mut bytes, 0, Flags::empty()).unwrap(),
    };
    bytes.truncate(n);
    bytes
}

/// Everything about a name that a client may have kept.
fn compare(client: &Client, source: &Path, path: &str, what: &str) {
    let at = source.join(path);
    let host = std::fs::symlink_metadata(&at);
    let here = client.stat_at(&client.root(), &names(path), false);
    let by_path = client.lstat(path);
    let code = |e: &io::Error| e.raw_os_error();
    match &host {
        Err(error) => {
            assert_eq!(
                here.as_ref().err().and_then(code),
                code(error),
                "{what}: {path}"
            );
            assert_eq!(
                by_path.as_ref().err().and_then(code),
                code(error),
                "{what}: {path}"
            );
        }
        Ok(host) => {
            let one = |attr: &Attr| (attr.ino, attr.mode, attr.nlink, attr.size, attr.mtime);
            let expected = (
                host.ino(),
                host.mode(),
                host.nlink() as u32,
                host.size(),
                (host.mtime(), host.mtime_nsec() as u32),
            );
            assert_eq!(one(&here.unwrap()), expected, "{what}: {path}");
            assert_eq!(one(&by_path.unwrap()), expected, "{what}: {path}");
            if host.is_file() {
                let file = open(client, path, libc::O_RDONLY).unwrap();
                let expected = std::fs::read(&at).unwrap();
                assert!(
                    contents(&file, expected.len()) == expected,
                    "{what}: {path}"
                );
            }
        }
    }
}

fn list(client: &Client, source: &Path, path: &str) {
    let at = source.join(path);
    let Ok(directory) = client.open_directory_at(&client.root(), &names(path)) else {
        assert!(!at.is_dir(), "{path}");
        return;
    };
    let mut found = Vec::new();
    let mut offset = 0;
    loop {
        let entries = directory.list(offset).unwrap();
        let Some(last) = entries.last() else { break };
        offset = last.next;
        found.extend(entries.into_iter().map(|entry| entry.name));
    }
    found.retain(|name| name != "." && name != "..");
    found.sort();
    let host = std::fs::read_dir(at).unwrap();
    let mut host: Vec<_> = host.map(|entry| entry.unwrap().file_name()).collect();
    host.sort();
    assert_eq!(found, host, "{path}");
}

fn step(client: &Client, random: &mut Random) -> String {
    let mut name = || NAMES[random.below(NAMES.len() as u64) as usize];
    let (path, other) = (name(), name());
    let kind = random.below(12);
    let root = client.root();
    let (at, to) = (names(path), names(other));
    // Whatever comes of it: the host says what is so then.
    let _ = match kind {
        0 => client.mkdir_at(&root, &at, 0o755, 0o022),
        1 => client.remove_at(&root, &at, true),
        2 | 3 => client.remove_at(&root, &at, false),
        4 => client.rename_at(&root, &at, &root, &to, 0),
        5 => client.link_at(&root, &at, &root, &to),
        6 => client.rename(path, other, libc::RENAME_EXCHANGE),
        7 => client
            .setattr(
                path,
                &uvfs_client::SetAttr {
                    mode: Some(0o600 | random.below(8) as u32),
                    ..Default::default()
                },
            )
            .map(drop),
        8 => client.mkdir(path, 0o755),
        _ => write(client, path, random),
    };
    format!("{kind} {path} {other}")
}

fn write(client: &Client, path: &str, random: &mut Random) -> io::Result<()> {
    let cut = [0, libc::O_TRUNC][random.below(2) as usize];
    let file = open(client, path, libc::O_WRONLY | libc::O_CREAT | cut)?;
    let most = [40, 6000][random.below(2) as usize];
    let mut at = [0, random.below(100)][random.below(2) as usize];
    for _ in 0..1 + random.below(3) {
        let bytes = vec![random.below(256) as u8; 1 + random.below(most) as usize];
        write_at(&file, &bytes, at)?;
        at += bytes.len() as u64;
    }
    drop(file);
    // So that the host has it.
    client.flush()
}

fn write_at(file: &ShortFile, bytes: &[u8], at: u64) -> io::Result<()> {
    let wrote = match file.write_short(bytes, at) {
        Some(wrote) => wrote?,
        None => file.file().write_at(bytes, at, Flags::empty())?,
    };
    assert_eq!(wrote, bytes.len());
    Ok(())
}

#[test]
fn clients_see_what_others_do_at_once() {
    for seed in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let session = session(dir.path());
        let clients: Vec<_> = (0..3).map(|_| client(&session)).collect();
        let mut random = Random(seed);
        for n in 0..1500 {
            let who = random.below(3) as usize;
            let what = format!(
                "seed {seed}, step {n}: {}",
                step(&clients[who], &mut random)
            );
            for _ in 0..3 {
                let looker = &clients[random.below(3) as usize];
                let path = NAMES[random.below(NAMES.len() as u64) as usize];
                match random.below(8) {
                    0 => list(looker, dir.path(), "d"),
                    1 => list(looker, dir.path(), "."),
                    _ => compare(looker, dir.path(), path, &what),
                }
            }
        }
    }
}

#[test]
fn a_removed_file_that_is_open_still_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path());
    let (one, other) = (client(&session), client(&session));
    std::fs::write(dir.path().join("f"), "here").unwrap();
    let file = open(&one, "f", libc::O_RDONLY).unwrap();
    assert_eq!(contents(&file, 10), b"here");
    let unread = open(&one, "f", libc::O_RDONLY).unwrap();
    // Who removes it has looked at it, and forgets it.
    other.lstat("f").unwrap();
    other.unlink("f").unwrap();
    assert_eq!(contents(&unread, 10), b"here");
    assert_eq!(contents(&file, 10), b"here");
    assert_eq!(file.stat().unwrap().nlink, 0);
    let gone = open(&one, "f", libc::O_RDONLY).unwrap_err();
    assert_eq!(gone.raw_os_error(), Some(libc::ENOENT));
}

#[test]
fn a_file_that_its_remover_has_open_still_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path());
    let one = client(&session);
    for name in ["read", "unread", "written", "cached", "linked", "closed"] {
        std::fs::write(dir.path().join(name), name).unwrap();
    }
    std::fs::hard_link(dir.path().join("linked"), dir.path().join("other")).unwrap();
    list(&one, dir.path(), ".");
    let read = open(&one, "read", libc::O_RDONLY).unwrap();
    assert_eq!(contents(&read, 10), b"read");
    let unread = open(&one, "unread", libc::O_RDONLY).unwrap();
    let written = open(&one, "written", libc::O_RDWR).unwrap();
    let cached = one.open("cached", common::rw()).unwrap();
    let linked = one.lstat("linked").unwrap();
    let closed = one.lstat("closed").unwrap();
    assert_eq!((linked.nlink, closed.nlink), (2, 1));
    for name in ["read", "unread", "written", "cached", "linked", "closed"] {
        one.remove_at(&one.root(), &names(name), false).unwrap();
        compare(&one, dir.path(), name, "removed");
    }
    assert_eq!(one.lstat("other").unwrap().nlink, 1);
    assert_eq!(contents(&read, 10), b"read");
    assert_eq!(contents(&unread, 10), b"unread");
    let wrote = written.write_short(b"W", 0).map(|wrote| wrote.unwrap());
    let wrote = wrote.unwrap_or_else(|| written.file().write_at(b"W", 0, Flags::empty()).unwrap());
    assert_eq!((wrote, contents(&written, 10)), (1, b"Written".to_vec()));
    let mut bytes = [0; 6];
    assert_eq!(cached.read_at(&mut bytes, 0, Flags::empty()).unwrap(), 6);
    assert_eq!(&bytes, b"cached");
    for file in [&read, &unread, &written] {
        assert_eq!(file.stat().unwrap().nlink, 0);
    }
    one.unlink("other").unwrap();
    drop((read, unread, written, cached));
    common::eventually("all are forgotten but what the page cache keeps", || {
        session.fs().known_inodes() <= 2
    });
    drop(one);
    common::eventually("all are forgotten", || session.fs().known_inodes() == 0);
}

#[test]
fn a_name_that_leads_elsewhere_by_now_is_what_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path());
    let (one, other) = (client(&session), client(&session));
    for name in ["f", "g", "h"] {
        std::fs::write(dir.path().join(name), name).unwrap();
    }
    list(&one, dir.path(), ".");
    let g = open(&other, "g", libc::O_RDONLY).unwrap();
    // Past the server: what the client knows of the names is not so any more.
    std::fs::rename(dir.path().join("g"), dir.path().join("f")).unwrap();
    std::fs::remove_file(dir.path().join("h")).unwrap();
    std::fs::create_dir(dir.path().join("h")).unwrap();
    one.unlink("f").unwrap();
    assert!(!dir.path().join("f").exists());
    assert_eq!(contents(&g, 10), b"g");
    assert_eq!(g.stat().unwrap().nlink, 0);
    let is_dir = one.unlink("h").unwrap_err();
    assert_eq!(is_dir.raw_os_error(), Some(libc::EISDIR));
    compare(&one, dir.path(), "h", "still there");
    one.rmdir("h").unwrap();
}

#[test]
fn more_names_than_are_kept() {
    const FILES: usize = 40_000;
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path());
    let client = client(&session);
    for n in 0..FILES {
        std::fs::write(dir.path().join(format!("{n}")), []).unwrap();
    }
    for n in 0..FILES {
        let attr = client
            .stat_at(&client.root(), &names(&format!("{n}")), true)
            .unwrap();
        assert_eq!(attr.size, 0);
    }
    let missing = client.stat_at(&client.root(), &names("missing"), true);
    assert_eq!(missing.unwrap_err().raw_os_error(), Some(libc::ENOENT));
    // What the server has to know is bounded as well.
    common::eventually("names that go are forgotten", || {
        session.fs().known_inodes() < 35_000
    });
}

#[test]
fn more_contents_than_are_kept() {
    // 36 MB, of which 32 MiB may be kept.
    const FILES: usize = 9000;
    let dir = directory_of(1, |_| b"");
    let session = session(dir.path());
    let (client, other) = (client(&session), client(&session));
    let holds = |n: usize| vec![n as u8; 4000 - n % 7];
    let path = |n: usize| format!("d/{n}");
    let file = |n: usize| {
        let file = open(&client, &path(n), libc::O_RDWR | libc::O_CREAT).unwrap();
        write_at(&file, &holds(n), 0).unwrap();
        file
    };
    let first = file(0);
    for n in 1..FILES {
        file(n);
    }
    // Who has it open, and who opens it, both find what is kept no longer.
    assert!(contents(&first, 4000) == holds(0));
    for n in (0..FILES).step_by(100).chain(FILES - 10..FILES) {
        assert!(read(&client, &path(n)) == holds(n), "{n}");
    }
    // And what others write is seen.
    for n in [0, 5, FILES / 2, FILES - 1] {
        let new = open(&other, &path(n), libc::O_WRONLY | libc::O_TRUNC).unwrap();
        write_at(&new, b"new", 0).unwrap();
        assert_eq!(read(&client, &path(n)), b"new", "{n}");
    }
    assert_eq!(contents(&first, 4000), b"new");
}

/// Opens a directory's files in the order of its listing, part by part, and gives their names to
/// `look`, until that has enough.
fn in_order(client: &Client, path: &str, mut look: impl FnMut(&str) -> bool) {
    let directory = client
        .open_directory_at(&client.root(), &names(path))
        .unwrap();
    let mut offset = 0;
    loop {
        let entries = directory.list(offset).unwrap();
        let Some(last) = entries.last() else { return };
        offset = last.next;
        let found = entries.iter().map(|entry| entry.name.to_str().unwrap());
        for name in found.filter(|&name| name != "." && name != "..") {
            let at = format!("{path}/{name}");
            client.stat_at(&client.root(), &names(&at), true).unwrap();
            if !look(&at) {
                return;
            }
        }
    }
}

fn read(client: &Client, path: &str) -> Vec<u8> {
    contents(&open(client, path, libc::O_RDONLY).unwrap(), 8192)
}

/// A source whose directory `d` has files 0, 1, ... that hold what `contents` says.
fn directory_of<B: AsRef<[u8]>>(files: usize, contents: impl Fn(usize) -> B) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("d")).unwrap();
    for n in 0..files {
        std::fs::write(dir.path().join(format!("d/{n}")), contents(n)).unwrap();
    }
    dir
}

#[test]
fn files_come_ahead_of_who_opens_them_in_order() {
    const FILES: usize = 600;
    let long = |n: usize| vec![n as u8; if n % 50 == 49 { 3000 + n } else { n % 40 }];
    let dir = directory_of(FILES, long);
    let session = session(dir.path());
    let client = client(&session);
    let asked = || session.report().requests;
    let before = asked();
    let mut seen = 0;
    in_order(&client, "d", |path| {
        let number = path[2..].parse().unwrap();
        assert!(read(&client, path) == long(number), "{path}");
        seen += 1;
        true
    });
    assert_eq!(seen, FILES);
    let asked = asked() - before;
    assert!(asked < FILES as u64 / 3, "{asked} requests");
}

#[test]
fn what_comes_ahead_is_seen_by_nobody_until_it_is_used() {
    const FILES: usize = 100;
    let dir = directory_of(FILES, |_| "short");
    let at = |n: usize| dir.path().join(format!("d/{n}"));
    for n in 0..FILES {
        let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let file = std::fs::File::options().write(true).open(at(n)).unwrap();
        file.set_times(std::fs::FileTimes::new().set_accessed(old))
            .unwrap();
    }
    let read_at = |n: usize| std::fs::metadata(at(n)).unwrap().atime();
    let session = session(dir.path());
    let client = client(&session);
    let mut used = Vec::new();
    in_order(&client, "d", |path| {
        assert_eq!(read(&client, path), b"short");
        used.push(path[2..].parse().unwrap());
        used.len() < 40
    });
    let others = (0..FILES).filter(|n| !used.contains(n));
    others.for_each(|n| assert_eq!(read_at(n), 1_000_000, "{n} was not opened"));
    std::fs::write(at(FILES), "probe").unwrap();
    let host = rustix::fs::statvfs(dir.path()).unwrap().f_flag;
    if !host.contains(rustix::fs::StatVfsMountFlags::NOATIME) {
        common::eventually("what was used has a new time of access", || {
            used.iter().all(|&n| read_at(n) > 1_000_000)
        });
    }
}

#[test]
fn what_comes_ahead_is_never_old() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    const FILES: usize = 120;
    let dir = directory_of(FILES, |_| 0u64.to_ne_bytes());
    let session = session(dir.path());
    let (one, other) = (client(&session), client(&session));
    let written: Vec<_> = (0..FILES).map(|_| AtomicU64::new(0)).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(7);
            let mut value = 0u64;
            while !over.load(Ordering::SeqCst) {
                value += 1;
                let n = random.below(FILES as u64) as usize;
                let path = format!("d/{n}");
                if random.below(4) == 0 {
                    std::fs::write(dir.path().join("new"), value.to_ne_bytes()).unwrap();
                    let root = other.root();
                    let (from, to) = (names("new"), names(&path));
                    other.rename_at(&root, &from, &root, &to, 0).unwrap();
                } else {
                    let file = open(&other, &path, libc::O_WRONLY).unwrap();
                    write_at(&file, &value.to_ne_bytes(), 0).unwrap();
                }
                written[n].store(value, Ordering::SeqCst);
                if random.below(3) == 0 {
                    std::thread::sleep(std::time::Duration::from_micros(random.below(400)));
                }
            }
        });
        for _ in 0..60 {
            in_order(&one, "d", |path| {
                let Ok(n) = path[2..].parse::<usize>() else {
                    return true;
                };
                let least = written[n].load(Ordering::SeqCst);
                let value = u64::from_ne_bytes(read(&one, path).try_into().unwrap());
                assert!(value >= least, "{path} has {value} after {least}");
                true
            });
        }
        over.store(true, Ordering::SeqCst);
    });
}

#[test]
fn a_listing_is_left_before_its_next_part_is_read() {
    const FILES: usize = 1500;
    let dir = directory_of(FILES, |_| "short");
    let session = session(dir.path());
    let (one, other) = (client(&session), client(&session));
    let mut random = Random(3);
    for stop in [FILES, 1, 240, 500, 750, 1000, 1400, FILES] {
        let mut seen = 0;
        in_order(&one, "d", |_| {
            seen += 1;
            seen < stop
        });
        assert_eq!(seen, stop);
        for _ in 0..20 {
            let path = format!("d/{}", random.below(FILES as u64));
            write(&other, &path, &mut random).unwrap();
            compare(&one, dir.path(), &path, "written by another");
        }
        list(&one, dir.path(), "d");
    }
}

#[test]
fn what_was_made_here_is_known() {
    const FILES: usize = 200;
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path());
    let (one, other) = (client(&session), client(&session));
    one.mkdir_at(&one.root(), &names("d"), 0o755, 0o022)
        .unwrap();
    let holds = |n: usize| vec![n as u8; 2 + n % 50];
    let create = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
    for n in 0..FILES {
        let file = open(&one, &format!("d/{n}"), create).unwrap();
        let bytes = holds(n);
        let (first, rest) = bytes.split_at(1 + n % 2);
        write_at(&file, first, 0).unwrap();
        if !rest.is_empty() {
            write_at(&file, rest, first.len() as u64).unwrap();
        }
    }
    let before = session.report().requests;
    let mut seen = 0;
    in_order(&one, "d", |path| {
        let n = path[2..].parse().unwrap();
        assert!(read(&one, path) == holds(n), "{path}");
        seen += 1;
        true
    });
    assert_eq!(seen, FILES);
    let asked = session.report().requests - before;
    assert!(asked < FILES as u64 / 4, "{asked} requests");
    let at = |n: usize| dir.path().join(format!("d/{n}"));
    common::eventually("what was read has a new time of access", || {
        (0..FILES).all(|n| {
            let host = std::fs::metadata(at(n)).unwrap();
            (host.atime(), host.atime_nsec()) >= (host.mtime(), host.mtime_nsec())
        })
    });
    let mut random = Random(5);
    for n in (0..FILES).step_by(7) {
        let path = format!("d/{n}");
        match n % 3 {
            0 => write(&other, &path, &mut random).unwrap(),
            1 => other.unlink(&path).unwrap(),
            _ => other.rename("d/0", &path, 0).unwrap(),
        }
        compare(&one, dir.path(), &path, "changed by another");
        compare(&one, dir.path(), "d/0", "changed by another");
        list(&one, dir.path(), "d");
        if !at(0).exists() {
            write(&one, "d/0", &mut random).unwrap();
        }
    }
}

#[test]
fn what_was_written_here_is_never_old() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    const FILES: u64 = 6;
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path());
    let clients = [client(&session), client(&session)];
    let written: Vec<_> = (0..FILES).map(|_| AtomicU64::new(0)).collect();
    let turn: Vec<_> = (0..FILES).map(|_| std::sync::Mutex::new(0u64)).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (who, client) in clients.iter().enumerate() {
            let (written, turn, over) = (&written, &turn, &over);
            // Each makes files anew, or writes over them, one at a time.
            scope.spawn(move || {
                let mut random = Random(who as u64 + 20);
                while !over.load(Ordering::SeqCst) {
                    let n = random.below(FILES);
                    let path = n.to_string();
                    let mut last = turn[n as usize].lock().unwrap();
                    *last += 1;
                    if random.below(3) == 0 {
                        let _ = client.remove_at(&client.root(), &names(&path), false);
                    }
                    let file = open(client, &path, libc::O_WRONLY | libc::O_CREAT).unwrap();
                    let bytes = last.to_ne_bytes();
                    // In two parts at times, of which the first keeps the number as it was or 0.
                    match random.below(2) {
                        0 => write_at(&file, &bytes, 0).unwrap(),
                        _ => {
                            write_at(&file, &bytes[..2], 0).unwrap();
                            write_at(&file, &bytes[2..], 2).unwrap();
                        }
                    }
                    written[n as usize].store(*last, Ordering::SeqCst);
                    drop(last);
                }
            });
            scope.spawn(move || {
                let mut random = Random(who as u64);
                for _ in 0..20_000 {
                    let n = random.below(FILES);
                    let least = written[n as usize].load(Ordering::SeqCst);
                    let Ok(file) = open(client, &n.to_string(), libc::O_RDONLY) else {
                        continue;
                    };
                    // It may be being made.
                    if let Ok(bytes) = contents(&file, 8).try_into() {
                        let value = u64::from_ne_bytes(bytes);
                        assert!(value >= least, "{n} has {value} after {least}");
                    }
                }
                over.store(true, Ordering::SeqCst);
            });
        }
    });
}
