//! Clients over shared memory of a server that has a mount: tokens for open files, what they allow,
//! and what the kernel's view and the client's have to agree on.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::process::Signal;
use uvfs_client::backend::{FileOps, Op, PageIo, Request, SharedServer};
use uvfs_client::{
    AllocateMode, Client, Config, File as ClientFile, Flags, Imported, Server, SetAttr, Token,
};
use uvfs_queue::arena::Arena;

use crate::child;
use crate::harness::*;

const CONFIG: Config = Config {
    memory: 4 << 20,
    dirty_percent: 40,
    background_percent: 10,
    writeback_after: std::time::Duration::from_secs(5),
    yields: true,
    readahead: 1 << 20,
};

fn attach(token: &Token) -> Client {
    Client::new(Server::connect(token.socket()).unwrap(), CONFIG).unwrap()
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

fn read(file: &ClientFile, len: usize, offset: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let n = file.read_at(&mut bytes, offset, Flags::empty()).unwrap();
    bytes.truncate(n);
    bytes
}

fn create(path: &Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true);
    options.open(path).unwrap()
}

/// What a client reads and writes and what the kernel does are one file.
pub fn one_file(dir: &Path, _: &str) -> String {
    let path = dir.join("file");
    let mut kernel = create(&path);
    kernel.write_all(&[1; 10_000]).unwrap();
    let client = attach(&Token::of(kernel.as_fd()).unwrap());
    let file = client.import(kernel.as_fd()).unwrap();
    assert_eq!(read(&file, 20_000, 0), [1; 10_000]);
    for round in 0..50u8 {
        // The kernel has it all cached, the size too.
        let mut before = Vec::new();
        kernel.seek(SeekFrom::Start(0)).unwrap();
        kernel.read_to_end(&mut before).unwrap();
        let at = 5000 + u64::from(round) * 3000;
        let data = vec![round; 9000];
        assert_eq!(file.write_at(&data, at, Flags::empty()).unwrap(), 9000);
        assert_eq!(fs::metadata(&path).unwrap().len(), (at + 9000).max(10_000));
        let mut after = vec![0; 9000];
        kernel.read_exact_at(&mut after, at).unwrap();
        assert!(after == data);
        // And the other way round.
        kernel.write_all_at(&[round ^ 0xff; 100], at + 50).unwrap();
        assert_eq!(read(&file, 100, at + 50), [round ^ 0xff; 100]);
        kernel.set_len(at + 6000).unwrap();
        assert_eq!(file.size(), at + 6000);
        assert_eq!(read(&file, 9000, at).len(), 6000);
        file.set_len(at + 7000).unwrap();
        assert_eq!(kernel.metadata().unwrap().len(), at + 7000);
    }
    let expected = vec![0; 4096];
    let mut hole = vec![1; 4096];
    kernel.read_exact_at(&mut hole, 8192).unwrap();
    file.allocate(AllocateMode::PunchHole, 8192, 4096).unwrap();
    kernel.read_exact_at(&mut hole, 8192).unwrap();
    assert!(hole == expected);
    // Large calls, in many pieces.
    let large: Vec<u8> = (0..9 << 20).map(|i: u32| (i / 251) as u8).collect();
    assert_eq!(
        file.write_at(&large, 77, Flags::empty()).unwrap(),
        large.len()
    );
    let mut back = vec![0; large.len()];
    kernel.read_exact_at(&mut back, 77).unwrap();
    assert!(back == large && read(&file, large.len(), 77) == large);
    file.sync_all().unwrap();
    // An unlinked file stays one.
    fs::remove_file(&path).unwrap();
    file.write_at(b"still there", 0, Flags::DSYNC).unwrap();
    let mut start = [0; 11];
    kernel.read_exact_at(&mut start, 0).unwrap();
    assert_eq!(&start, b"still there");
    drop(kernel);
    assert_eq!(read(&file, 11, 0), b"still there");

    let append = File::options()
        .append(true)
        .create(true)
        .open(dir.join("log"))
        .unwrap();
    let log = client.import(append.as_fd()).unwrap();
    for line in 0..20 {
        writeln!(&append, "kernel {line}").unwrap();
        let text = format!("client {line}\n");
        log.write_at(text.as_bytes(), 0, Flags::empty()).unwrap();
    }
    let lines: Vec<String> = (0..20)
        .flat_map(|n| [format!("kernel {n}\n"), format!("client {n}\n")])
        .collect();
    let text = fs::read_to_string(dir.join("log")).unwrap();
    assert_eq!(text, lines.concat());
    "ok".into()
}

/// A session without the client's own checks.
struct Raw(Server, Arc<Arena>);

impl Raw {
    fn attach(token: &Token) -> Self {
        let server = Server::connect(token.socket()).unwrap();
        let arena = Arc::new(Arena::create(64 + server.reserved_pages()).unwrap());
        server.attach(&arena).unwrap();
        Self(server, arena)
    }

    fn import(&self, file: &File) -> Imported {
        let token = Token::of(file.as_fd()).unwrap();
        self.0.import(token.secret()).unwrap()
    }

    fn transfer(&self, op: Op, node: u64, handle: u64) -> std::io::Result<usize> {
        let (sender, receiver) = channel();
        let request = Request {
            op,
            node,
            handle,
            offset: 0,
            segs: vec![self.1.seg(0, 0, 100)],
            len: 100,
            dontcache: false,
            writeback: false,
            done: Box::new(move |result| sender.send(result).unwrap()),
        };
        self.0.submit(&mut vec![request]);
        receiver.recv_timeout(SOON).unwrap()
    }
}

/// What a client must not be able to do.
pub fn hostile(dir: &Path, _: &str) -> String {
    let path = dir.join("file");
    fs::write(&path, [7; 200]).unwrap();
    let reader = File::open(&path).unwrap();
    let writer = File::options().write(true).open(&path).unwrap();
    let token = Token::of(reader.as_fd()).unwrap();
    let raw = Raw::attach(&token);
    // Wrong, used, and made up.
    assert_eq!(errno(raw.0.import(&[0; 32])), libc::EACCES);
    let mut wrong = *token.secret();
    wrong[31] ^= 1;
    assert_eq!(errno(raw.0.import(&wrong)), libc::EACCES);
    let read = raw.0.import(token.secret()).unwrap();
    assert_eq!(errno(raw.0.import(token.secret())), libc::EACCES);
    let (node, handle) = (read.entry.node, read.handle);
    assert_eq!(read.entry.attr.size, 200);
    // Opened for reading: not for anything else.
    assert_eq!(raw.transfer(Op::Read, node, handle).unwrap(), 100);
    assert_eq!(errno(raw.transfer(Op::Write, node, handle)), libc::EBADF);
    assert_eq!(errno(raw.0.fallocate(node, handle, 0, 0, 10)), libc::EBADF);
    let cut = SetAttr {
        size: Some(0),
        handle: Some(handle),
        ..SetAttr::default()
    };
    assert_eq!(errno(raw.0.setattr(node, &cut)), libc::EINVAL);
    let write = raw.import(&writer);
    assert_eq!(write.entry.node, node);
    assert_eq!(
        errno(raw.transfer(Op::Read, node, write.handle)),
        libc::EBADF
    );
    assert_eq!(raw.transfer(Op::Write, node, write.handle).unwrap(), 100);
    // Handles that others have: the kernel's are the numbers before.
    for handle in [0, 1, handle - (1 << 32), handle - 1, handle + 1, u64::MAX] {
        assert_eq!(errno(raw.transfer(Op::Read, node, handle)), libc::EBADF);
    }
    // Gone with the client's release, not with the kernel's.
    drop((reader, writer));
    assert_eq!(raw.transfer(Op::Read, node, handle).unwrap(), 100);
    raw.0.release(node, handle);
    assert_eq!(errno(raw.transfer(Op::Read, node, handle)), libc::EBADF);
    // A token of a closed file is worth nothing; one of a directory there is not.
    let token = Token::of(File::open(&path).unwrap().as_fd()).unwrap();
    wait_for("the kernel's release", || {
        let file = File::open(&path).unwrap();
        let late = Token::of(file.as_fd()).unwrap();
        drop(file);
        raw.0.import(late.secret()).is_err()
    });
    let _ = raw.0.import(token.secret());
    assert!(Token::of(File::open(dir).unwrap().as_fd()).is_err());
    let elsewhere = tempfile::tempfile().unwrap();
    assert_eq!(errno(Token::of(elsewhere.as_fd())), libc::ENOTTY);
    "ok".into()
}

/// Run by another user than the server's.
pub fn guest(dir: &Path, _: &str) -> String {
    let file = File::options()
        .read(true)
        .write(true)
        .open(dir.join("shared"))
        .unwrap();
    let token = Token::of(file.as_fd()).unwrap();
    let client = attach(&token);
    // No names, and no root.
    for result in [
        client.stat("/").map(drop),
        client.stat("shared").map(drop),
        client.readdir("/").map(drop),
        client.mkdir("made", 0o755),
        client.unlink("shared"),
        client.create("new").map(drop),
        client.statfs().map(drop),
        client.getxattr("shared", "user.x").map(drop),
    ] {
        let code = errno(result);
        assert!(code == libc::ESTALE || code == libc::EPERM, "{code}");
    }
    // A new one, as the first is good for ten seconds: the server still takes back what others had.
    let token = Token::of(file.as_fd()).unwrap();
    let imported = client.import_token(&token).unwrap();
    assert_eq!(read(&imported, 6, 0), b"shared");
    // What it may change it changes as itself.
    assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o6777);
    imported.write_at(b"SHARED", 0, Flags::empty()).unwrap();
    assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o777);
    assert_eq!(fs::read(dir.join("shared")).unwrap(), b"SHARED");
    // By the node's number either.
    let raw = Raw::attach(&Token::of(file.as_fd()).unwrap());
    let node = raw.import(&file).entry.node;
    assert_eq!(errno(raw.0.open(node, libc::O_RDWR)), libc::EPERM);
    assert_eq!(errno(raw.0.open(1, libc::O_RDWR)), libc::ESTALE);
    let chmod = SetAttr {
        mode: Some(0o4777),
        ..SetAttr::default()
    };
    assert_eq!(errno(raw.0.setattr(node, &chmod)), libc::EPERM);
    assert_eq!(raw.0.getattr(node).unwrap().size, 6);
    "ok".into()
}

/// Uses an imported file until the server says no.
pub fn until_the_end(dir: &Path, ready: &str) -> String {
    let file = create(&dir.join("file"));
    let client = attach(&Token::of(file.as_fd()).unwrap());
    let imported = client.import(file.as_fd()).unwrap();
    drop(file);
    let mut said = false;
    loop {
        match imported.write_at(b"data", 0, Flags::empty()) {
            Ok(_) if !said => fs::write(ready, "").unwrap(),
            Ok(_) => {}
            Err(error) => return error.raw_os_error().unwrap().to_string(),
        }
        said = true;
    }
}

/// Uses an imported file of a server that is killed, until another is there; gives what it got.
pub fn until_it_is_back(dir: &Path, flags: &str) -> String {
    let flags = Path::new(flags);
    let path = dir.join("shared");
    let file = File::options().read(true).write(true).open(path).unwrap();
    let token = Token::of(file.as_fd()).unwrap();
    let server = Server::connect(token.socket()).unwrap();
    let client = Client::new(server.reconnect_within(SOON), CONFIG).unwrap();
    let imported = client.import_token(&token).unwrap();
    imported.write_at(b"before", 0, Flags::empty()).unwrap();
    fs::write(flags.join("ready"), "").unwrap();
    wait_for("the server's end", || flags.join("gone").exists());
    let written = imported.write_at(b"after", 6, Flags::empty());
    let synced = imported.sync_all();
    match (written, synced) {
        (Ok(5), Ok(())) => String::from_utf8(read(&imported, 20, 0)).unwrap(),
        // It may have been cached before the end was noticed.
        (_, Err(synced)) => synced.raw_os_error().unwrap().to_string(),
        other => panic!("{other:?}"),
    }
}

/// A client for the whole file system that `dir` is the mount of.
fn client_of(dir: &Path) -> Client {
    let file = create(&dir.join("way in"));
    let client = attach(&Token::of(file.as_fd()).unwrap());
    fs::remove_file(dir.join("way in")).unwrap();
    client
}

fn names_in(dir: &Path) -> BTreeSet<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
    let names = fs::read_dir(dir).unwrap().map(name);
    names.map(|name| name.into_string().unwrap()).collect()
}

/// Whatever a client does to names, the kernel sees at once, whatever it had cached.
pub fn names(dir: &Path, _: &str) -> String {
    let client = client_of(dir);
    let at = |name: &str| dir.join(name);
    let stat = |name: &str| fs::symlink_metadata(at(name)).unwrap();
    let missing = |name: &str| {
        let gone = fs::symlink_metadata(at(name))
            .map(drop)
            .map_err(|e| e.kind());
        assert_eq!(gone, Err(ErrorKind::NotFound), "{name}");
    };
    for round in 0..30 {
        // What was not there, twice: the second time it is cached.
        missing("new");
        missing("new");
        drop(client.create("new").unwrap());
        assert!(stat("new").is_file());
        assert!(names_in(dir).contains("new"));
        client.unlink("new").unwrap();
        missing("new");
        assert!(!names_in(dir).contains("new"));
        client.symlink("target", "new").unwrap();
        assert_eq!(fs::read_link(at("new")).unwrap(), Path::new("target"));
        client.unlink("new").unwrap();
        missing("new");

        // One file's name goes to another.
        fs::write(at("one"), "1").unwrap();
        fs::write(at("two"), "22").unwrap();
        let open = File::open(at("two")).unwrap();
        let (one, two) = (stat("one").ino(), stat("two").ino());
        assert_eq!(open.metadata().unwrap().nlink(), 1);
        client.rename("one", "two", 0).unwrap();
        missing("one");
        assert_eq!(stat("two").ino(), one);
        assert_eq!(fs::read_to_string(at("two")).unwrap(), "1");
        let old = open.metadata().unwrap();
        assert_eq!((old.ino(), old.nlink()), (two, 0));
        fs::write(at("one"), "333").unwrap();
        let new = stat("one").ino();
        client.rename("one", "two", libc::RENAME_EXCHANGE).unwrap();
        assert_eq!((stat("one").ino(), stat("two").ino()), (one, new));
        client.unlink("one").unwrap();
        client.unlink("two").unwrap();
        missing("one");
        missing("two");

        // A name that the kernel moved, and one that it made and removed.
        fs::write(at("from"), "").unwrap();
        stat("from");
        fs::rename(at("from"), at("to")).unwrap();
        client.unlink("to").unwrap();
        missing("to");
        missing("from");
        drop(client.create("to").unwrap());
        fs::remove_file(at("to")).unwrap();
        missing("to");
        drop(client.create("to").unwrap());
        assert!(stat("to").is_file());
        client.unlink("to").unwrap();

        // Links.
        fs::write(at("file"), "").unwrap();
        let open = File::open(at("file")).unwrap();
        assert_eq!(stat("file").nlink(), 1);
        client.link("file", "other").unwrap();
        assert_eq!(stat("file").nlink(), 2);
        assert_eq!(open.metadata().unwrap().nlink(), 2);
        assert_eq!(stat("other").nlink(), 2);
        client.unlink("file").unwrap();
        assert_eq!(stat("other").nlink(), 1);
        assert_eq!(open.metadata().unwrap().nlink(), 1);
        client.unlink("other").unwrap();
        assert_eq!(open.metadata().unwrap().nlink(), 0);

        // Of two names a client looked at one, and forgets the file with it.
        fs::write(at("file"), "data").unwrap();
        fs::hard_link(at("file"), at("other")).unwrap();
        let open = File::open(at("other")).unwrap();
        assert_eq!(client.lstat("file").unwrap().nlink, 2);
        assert_eq!(stat("other").nlink(), 2);
        client.unlink("file").unwrap();
        missing("file");
        assert_eq!(open.metadata().unwrap().nlink(), 1);
        assert_eq!(stat("other").nlink(), 1);
        assert_eq!(client.lstat("other").unwrap().nlink, 1);
        client.unlink("other").unwrap();
        missing("other");
        assert_eq!(open.metadata().unwrap().nlink(), 0);
        let mut data = [0; 5];
        assert_eq!(open.read_at(&mut data, 0).unwrap(), 4);
        assert_eq!(&data[..4], b"data");

        // Directories: their own attributes, and what is below one that moves.
        let (links, time) = (stat(".").nlink(), stat(".").modified().unwrap());
        client.mkdir("dir", 0o700).unwrap();
        assert_eq!(stat(".").nlink(), links + 1);
        assert!(stat(".").modified().unwrap() >= time);
        fs::create_dir(at("dir/sub")).unwrap();
        fs::write(at("dir/sub/child"), "child").unwrap();
        assert_eq!(stat("dir").nlink(), 3);
        std::env::set_current_dir(at("dir/sub")).unwrap();
        assert!(Path::new("child").exists());
        client.rename("dir", "moved", 0).unwrap();
        missing("dir");
        missing("dir/sub/child");
        assert_eq!(fs::read_to_string(at("moved/sub/child")).unwrap(), "child");
        assert_eq!(fs::read_to_string("child").unwrap(), "child");
        assert_eq!(std::env::current_dir().unwrap(), at("moved/sub"));
        client.rename("moved/sub/child", "moved/child", 0).unwrap();
        assert!(!Path::new("child").exists());
        assert!(Path::new("../child").exists());
        assert!(names_in(Path::new(".")).is_empty());
        client.unlink("moved/child").unwrap();
        assert!(!Path::new("../child").exists());
        client.rmdir("moved/sub").unwrap();
        assert_eq!(fs::metadata(".").unwrap().nlink(), 0);
        missing("moved/sub");
        assert_eq!(stat("moved").nlink(), 2);
        std::env::set_current_dir(dir).unwrap();
        client.rmdir("moved").unwrap();
        missing("moved");
        assert_eq!(stat(".").nlink(), links, "{round}");
    }
    "ok".into()
}

/// What the names in some directories should be, with each file's number and kind.
type Names = BTreeMap<(usize, usize), (u64, bool)>;

/// Clients and the kernel change names in the same directories, one after the other and at random,
/// while others look at them all the time.
pub fn random_names(dir: &Path, seed: &str) -> String {
    const DIRS: usize = 3;
    const NAMES: usize = 5;
    let client = client_of(dir);
    let mut state = seed.parse::<u64>().unwrap() * 2 + 1;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) as usize % below
    };
    let path = |(d, n): (usize, usize)| format!("d{d}/n{n}");
    for d in 0..DIRS {
        fs::create_dir(dir.join(format!("d{d}"))).unwrap();
    }
    let over = AtomicBool::new(false);
    let over = &over;
    let look = move || {
        while !over.load(Ordering::Relaxed) {
            for d in 0..DIRS {
                let at = dir.join(format!("d{d}"));
                for n in 0..NAMES {
                    let _ = fs::symlink_metadata(at.join(format!("n{n}")));
                }
                let entries = fs::read_dir(&at).into_iter().flatten();
                entries.for_each(|entry| drop(entry.and_then(|entry| entry.metadata())));
            }
        }
    };
    let run = || {
        let mut model = Names::new();
        let mut last = Vec::new();
        for step in 0..400 {
            let (one, two) = ((random(DIRS), random(NAMES)), (random(DIRS), random(NAMES)));
            let (from, to) = (path(one), path(two));
            let (at, new) = (dir.join(&from), dir.join(&to));
            let kernel = random(2) == 0;
            let ino = |path: &str| match kernel {
                true => fs::symlink_metadata(dir.join(path)).unwrap().ino(),
                false => client.lookup(path).unwrap().1.ino,
            };
            let what = random(8);
            last.push(format!("{step}: {what} {from} {to} kernel {kernel}"));
            match (what, model.get(&one).copied(), model.get(&two).copied()) {
                (0 | 1, None, _) => {
                    match kernel {
                        true => drop(File::create_new(&at).unwrap()),
                        false => drop(client.create(&from).unwrap()),
                    }
                    model.insert(one, (ino(&from), false));
                }
                (2, None, _) => {
                    match kernel {
                        true => fs::create_dir(&at).unwrap(),
                        false => client.mkdir(&from, 0o755).unwrap(),
                    }
                    model.insert(one, (ino(&from), true));
                }
                (0..=2, Some((_, false)), _) => {
                    match kernel {
                        true => fs::remove_file(&at).unwrap(),
                        false => client.unlink(&from).unwrap(),
                    }
                    model.remove(&one);
                }
                (0..=2, Some((_, true)), _) => {
                    match kernel {
                        true => fs::remove_dir(&at).unwrap(),
                        false => client.rmdir(&from).unwrap(),
                    }
                    model.remove(&one);
                }
                (3 | 4, Some((old, is_dir)), target)
                    if target.is_none_or(|(ino, dir)| dir == is_dir && ino != old) =>
                {
                    match kernel {
                        true => fs::rename(&at, &new).unwrap(),
                        false => client.rename(&from, &to, 0).unwrap(),
                    }
                    model.remove(&one);
                    model.insert(two, (old, is_dir));
                }
                (5, Some((old, false)), None) => {
                    match kernel {
                        true => fs::hard_link(&at, &new).unwrap(),
                        false => client.link(&from, &to).unwrap(),
                    }
                    model.insert(two, (old, false));
                }
                (6, Some(a), Some(b)) => {
                    let flags = RenameFlags::EXCHANGE;
                    match kernel {
                        true => renameat_with(CWD, &at, CWD, &new, flags).unwrap(),
                        false => client.rename(&from, &to, libc::RENAME_EXCHANGE).unwrap(),
                    }
                    model.insert(one, b);
                    model.insert(two, a);
                }
                (7, ..) if one.0 != two.0 && random(4) == 0 => {
                    let (a, b) = (format!("d{}", one.0), format!("d{}", two.0));
                    let flags = RenameFlags::EXCHANGE;
                    match kernel {
                        true => renameat_with(CWD, dir.join(a), CWD, dir.join(b), flags).unwrap(),
                        false => client.rename(&a, &b, libc::RENAME_EXCHANGE).unwrap(),
                    }
                    let swap = |d| match d {
                        d if d == one.0 => two.0,
                        d if d == two.0 => one.0,
                        d => d,
                    };
                    let all = std::mem::take(&mut model).into_iter();
                    model = all.map(|((d, n), what)| ((swap(d), n), what)).collect();
                }
                _ => {
                    last.pop();
                    continue;
                }
            }
            let links = |ino| model.values().filter(|what| what.0 == ino).count() as u64;
            let tail = || last[last.len().saturating_sub(12)..].join("\n");
            let mut dirs = BTreeSet::from([one.0, two.0]);
            if step % 20 == 0 {
                dirs.extend(0..DIRS);
            }
            for d in dirs {
                let mut listed = BTreeSet::new();
                for n in 0..NAMES {
                    let name = path((d, n));
                    let expected = model.get(&(d, n)).map(|&(ino, is_dir)| {
                        listed.insert(format!("n{n}"));
                        (ino, if is_dir { 2 } else { links(ino) })
                    });
                    let seen = fs::symlink_metadata(dir.join(&name)).ok();
                    let seen = seen.map(|meta| (meta.ino(), meta.nlink()));
                    assert_eq!(seen, expected, "the kernel, {name} after\n{}", tail());
                    if (d, n) == one || (d, n) == two {
                        let seen = client.lookup(&name).ok();
                        let seen = seen.map(|(_, attr)| (attr.ino, u64::from(attr.nlink)));
                        assert_eq!(seen, expected, "the client, {name} after\n{}", tail());
                    }
                }
                let at = dir.join(format!("d{d}"));
                assert_eq!(names_in(&at), listed, "d{d} after\n{}", tail());
                let below = model.iter().filter(|(at, what)| at.0 == d && what.1);
                let links = 2 + below.count() as u64;
                assert_eq!(
                    fs::metadata(&at).unwrap().nlink(),
                    links,
                    "d{d} after\n{}",
                    tail()
                );
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(look);
        scope.spawn(look);
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        over.store(true, Ordering::Relaxed);
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
    "ok".into()
}

fn in_child(served: &Served, function: &str, argument: &str, user: Option<u32>) {
    let reports = served.scratch.path("reports");
    fs::create_dir_all(&reports).unwrap();
    fs::set_permissions(&reports, fs::Permissions::from_mode(0o777)).unwrap();
    let report = reports.join(function);
    let mut command = child::call(function, &served.mount.at, argument, &report);
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    served.mount.run(&mut command).ok();
    assert_eq!(fs::read_to_string(report).unwrap(), "ok");
}

fn with_each(function: &str) {
    for transport in [Transport::Dev, Transport::Uring] {
        if has(&[Need::Mount(transport), Need::Uvfs]) {
            in_child(
                &Served::new(&Serve::for_clients(transport)),
                function,
                "",
                None,
            );
        }
    }
}

#[test]
fn a_client_and_the_kernel_see_one_file() {
    with_each("one_file");
}

/// With lifetimes that no test outlasts.
fn long_lived(transport: Transport) -> Serve {
    let serve = Serve::for_clients(transport).option("entry_timeout=600");
    serve
        .option("negative_timeout=600")
        .option("attr_timeout=600")
}

#[test]
fn the_kernel_sees_what_a_client_does_to_names() {
    for transport in [Transport::Dev, Transport::Uring] {
        if has(&[Need::Mount(transport), Need::Uvfs]) {
            in_child(
                &Served::new(&Serve::for_clients(transport)),
                "names",
                "",
                None,
            );
            in_child(&Served::new(&long_lived(transport)), "names", "", None);
        }
    }
}

#[test]
fn clients_and_the_kernel_agree_on_names() {
    for transport in [Transport::Dev, Transport::Uring] {
        if has(&[Need::Mount(transport), Need::Uvfs]) {
            let served = Served::new(&long_lived(transport));
            in_child(&served, "random_names", "1", None);
            let served = Served::new(&Serve::for_clients(transport));
            in_child(&served, "random_names", "2", None);
        }
    }
}

#[test]
fn tokens_give_no_more_than_the_descriptor() {
    with_each("hostile");
}

#[test]
fn another_user_is_a_guest() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let file = served.source.join("shared");
    fs::write(&file, "shared").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o6777)).unwrap();
    in_child(&served, "guest", "", Some(54321));
}

/// As another user: takes as much as it gets.
pub fn greedy(dir: &Path, _: &str) -> String {
    let file = File::options().read(true).open(dir.join("shared")).unwrap();
    let token = Token::of(file.as_fd()).unwrap();
    let attach = |pages: u32| -> std::io::Result<Raw> {
        let server = Server::connect(token.socket())?;
        let arena = Arc::new(Arena::create(pages + server.reserved_pages()).unwrap());
        server.attach(&arena)?;
        Ok(Raw(server, arena))
    };
    let mut sessions: Vec<_> = (0..300).map_while(|_| attach(64).ok()).collect();
    assert_eq!(
        (
            sessions.len(),
            attach(64).err().and_then(|e| e.raw_os_error())
        ),
        (128, Some(libc::EAGAIN))
    );
    sessions.truncate(1);
    // The server notices a moment later.
    wait_for("one more session", || match attach(64) {
        Ok(session) => {
            sessions.push(session);
            true
        }
        Err(_) => false,
    });
    // 4 GiB in all.
    let arenas: Vec<_> = (0..8).map_while(|_| attach(1 << 18).ok()).collect();
    assert_eq!(arenas.len(), 3);
    let import = |session: &Raw| {
        let token = Token::of(file.as_fd())?;
        session.0.import(token.secret())
    };
    let one = &sessions[0];
    let opened = (0..20_000).map_while(|_| import(one).ok()).count();
    assert_eq!(opened, 8192);
    // Nor by another session.
    assert_eq!(errno(import(&sessions[1])), libc::EMFILE);
    let tokens = (0..5000)
        .map_while(|_| Token::of(file.as_fd()).ok())
        .count();
    // The first one of all is out as well, for ten seconds.
    assert!((1023..=1024).contains(&tokens), "{tokens}");
    assert_eq!(errno(Token::of(file.as_fd())), libc::EAGAIN);
    "ok".into()
}

/// If limits were for all users together, one could take everything from all others.
#[test]
fn a_guest_has_no_more_than_its_share() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let file = served.source.join("shared");
    fs::write(&file, "shared").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    in_child(&served, "greedy", "", Some(54321));
    // Its tokens are still out.
    fs::set_permissions(&file, fs::Permissions::from_mode(0o6777)).unwrap();
    in_child(&served, "guest", "", Some(54322));
    in_child(&served, "one_file", "", None);
}

#[test]
fn clients_end_with_the_mount() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    for kill in [false, true] {
        let mut served = Served::new(&Serve::for_clients(Transport::Dev));
        let (report, ready) = (served.scratch.path("report"), served.scratch.path("ready"));
        let at = served.mount.at.clone();
        let mut client = Running::start(&mut child::call(
            "until_the_end",
            &at,
            ready.to_str().unwrap(),
            &report,
        ));
        wait_for("the client", || ready.exists());
        if kill {
            served.mount.expect_gone();
            served.mount.server.signal(Signal::KILL);
        } else {
            served.mount.unmount().ok();
        }
        client.wait(SOON).expect("the client hears of it").ok();
        let expected = libc::ENOTCONN.to_string();
        assert_eq!(fs::read_to_string(report).unwrap(), expected);
    }
}

#[test]
fn clients_of_a_mount_find_the_next_one() {
    for (transport, guest) in [
        (Transport::Dev, false),
        (Transport::Dev, true),
        (Transport::Uring, false),
    ] {
        if !has(&[Need::Mount(transport), Need::Uvfs]) {
            continue;
        }
        let serve = Serve::for_clients(transport);
        let mut served = Served::new(&serve);
        let file = served.source.join("shared");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        let flags = served.scratch.dir("flags");
        fs::set_permissions(&flags, fs::Permissions::from_mode(0o777)).unwrap();
        let (report, at) = (flags.join("report"), served.mount.at.clone());
        let name = flags.to_str().unwrap();
        let mut command = child::call("until_it_is_back", &at, name, &report);
        if guest {
            command.uid(54321).gid(54321);
        }
        let mut client = Running::start(&mut command);
        wait_for("the client", || flags.join("ready").exists());
        let gone = || fs::write(flags.join("gone"), "").unwrap();
        let again = served.comes_back(&serve, gone);
        client.wait(SOON).expect("it goes on").ok();
        let got = fs::read_to_string(report).unwrap();
        // A guest has no other way to a file than a token.
        let stale = libc::ESTALE.to_string();
        let expected = if guest { &stale } else { "beforeafter" };
        assert_eq!(got, expected);
        let expected = if guest { "" } else { "beforeafter" };
        assert_eq!(fs::read_to_string(file).unwrap(), expected);
        again.unmount().ok();
    }
}

#[test]
fn the_socket_is_shown() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let mut getfattr = command("getfattr", ["--only-values", "-n", "user.uvfs.socket"]);
    let socket = served.mount.run(getfattr.arg(&served.mount.at)).ok();
    let shown = run(uvfs().arg("stats").arg(&served.mount.at)).ok();
    assert!(shown.contains(&format!("clients    {socket}")), "{shown}");
    let json = run(uvfs().args(["stats", "--json"]).arg(&served.mount.at)).ok();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["socket"], socket.as_str());
    assert!(Path::new(&socket).exists());
    served.mount.unmount().ok();
    assert!(!PathBuf::from(socket).exists());
}

/// Tries to import; gives the error.
pub fn refused(dir: &Path, _: &str) -> String {
    let file = create(&dir.join("file"));
    errno(Token::of(file.as_fd())).to_string()
}

#[test]
fn a_mount_that_writes_back_gives_no_tokens() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev).option("writeback"));
    let report = served.scratch.path("report");
    let mut command = child::call("refused", &served.mount.at, "", &report);
    served.mount.run(&mut command).ok();
    let expected = libc::EOPNOTSUPP.to_string();
    assert_eq!(fs::read_to_string(report).unwrap(), expected);
}
