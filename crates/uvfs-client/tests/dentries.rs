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
    let bytes = vec![random.below(256) as u8; 1 + random.below(6000) as usize];
    let at = random.below(100);
    let wrote = match file.write_short(&bytes, at) {
        Some(wrote) => wrote?,
        None => file.file().write_at(&bytes, at, Flags::empty())?,
    };
    assert_eq!(wrote, bytes.len());
    drop(file);
    // So that the host has it.
    client.flush()
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
    other.unlink("f").unwrap();
    assert_eq!(contents(&unread, 10), b"here");
    assert_eq!(contents(&file, 10), b"here");
    assert_eq!(file.stat().unwrap().nlink, 0);
    let gone = open(&one, "f", libc::O_RDONLY).unwrap_err();
    assert_eq!(gone.raw_os_error(), Some(libc::ENOENT));
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
