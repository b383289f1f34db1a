//! Clients over shared memory of a server that has a mount: tokens for open files, what they allow,
//! and what the kernel's view and the client's have to agree on.

mod names;

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

use rustix::fs::{CWD, FallocateFlags, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;
use rustix::process::Signal;
use uvfs_client::layer::{Op, PageIo, Request};
use uvfs_client::{
    AllocateMode, Client, Config, Connection, Error, File as ClientFile, Flags, Imported, SetAttr,
    Token,
};
use uvfs_queue::arena::Arena;

use crate::harness::*;
use crate::own_process;
pub use names::{names, random_names};

fn config() -> Config {
    Config::default().memory(4 << 20)
}

fn attach(token: &Token) -> Client {
    Client::new(Connection::connect(token.socket()).unwrap(), config()).unwrap()
}

fn errno<T: std::fmt::Debug>(result: Result<T, impl Into<Error> + std::fmt::Debug>) -> i32 {
    result.unwrap_err().into().errno().raw_os_error()
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

/// Reads and writes of a client and of the kernel reach the same file.
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
struct Raw(Connection, Arc<Arena>);

impl Raw {
    fn attach(token: &Token) -> Self {
        let server = Connection::connect(token.socket()).unwrap();
        let arena = Arc::new(Arena::create(64 + Connection::RESERVED_PAGES).unwrap());
        server.attach(&arena).unwrap();
        Self(server, arena)
    }

    fn import(&self, file: &File) -> Imported {
        let token = Token::of(file.as_fd()).unwrap();
        self.0.import(token.secret()).unwrap()
    }

    fn transfer(&self, op: Op, node: u64, handle: u64) -> Result<usize, Errno> {
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

/// Requests that a client must not be able to make.
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
    assert_eq!(
        errno(
            raw.0
                .fallocate(node, handle, FallocateFlags::empty(), 0, 10)
        ),
        libc::EBADF
    );
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
    // It changes as itself the files that it may change.
    assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o6777);
    imported.write_at(b"SHARED", 0, Flags::empty()).unwrap();
    assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o777);
    assert_eq!(fs::read(dir.join("shared")).unwrap(), b"SHARED");
    // By the node's number either.
    let raw = Raw::attach(&Token::of(file.as_fd()).unwrap());
    let node = raw.import(&file).entry.node;
    assert_eq!(errno(raw.0.open(node, OFlags::RDWR)), libc::EPERM);
    assert_eq!(errno(raw.0.open(1, OFlags::RDWR)), libc::ESTALE);
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
            Err(error) => return error.errno().raw_os_error().to_string(),
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
    let server = Connection::connect(token.socket()).unwrap();
    let client = Client::new(server.reconnect_within(SOON), config()).unwrap();
    let imported = client.import_token(&token).unwrap();
    imported.write_at(b"before", 0, Flags::empty()).unwrap();
    fs::write(flags.join("ready"), "").unwrap();
    wait_for("the server's end", || flags.join("gone").exists());
    let written = imported.write_at(b"after", 6, Flags::empty());
    let synced = imported.sync_all();
    match (written, synced) {
        (Ok(5), Ok(())) => String::from_utf8(read(&imported, 20, 0)).unwrap(),
        // It may have been cached before the end was noticed.
        (_, Err(synced)) => synced.errno().raw_os_error().to_string(),
        other => panic!("{other:?}"),
    }
}

/// A client for the whole file system that `dir` is the mount of.
pub fn client_of(dir: &Path) -> Client {
    let file = create(&dir.join("way in"));
    let client = attach(&Token::of(file.as_fd()).unwrap());
    fs::remove_file(dir.join("way in")).unwrap();
    client
}

fn in_child(served: &Served, function: &str, argument: &str, user: Option<u32>) {
    let reports = served.scratch.path("reports");
    fs::create_dir_all(&reports).unwrap();
    fs::set_permissions(&reports, fs::Permissions::from_mode(0o777)).unwrap();
    let report = reports.join(function);
    let mut command = own_process::call(function, &served.mount.at, argument, &report);
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

/// A program on the mount and a client see each other's writes to a file.
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

/// A token of a descriptor that only reads gives a client no write.
#[test]
fn tokens_give_no_more_than_the_descriptor() {
    with_each("hostile");
}

/// Another user's client reaches only the files that it opened.
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
    let attach = |pages: u32| -> uvfs_client::Result<Raw> {
        let server = Connection::connect(token.socket())?;
        let arena = Arc::new(Arena::create(pages + Connection::RESERVED_PAGES).unwrap());
        server.attach(&arena)?;
        Ok(Raw(server, arena))
    };
    let mut sessions: Vec<_> = (0..300).map_while(|_| attach(64).ok()).collect();
    assert_eq!(
        (
            sessions.len(),
            attach(64).err().map(|e| e.errno().raw_os_error())
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
        let token = Token::of(file.as_fd()).map_err(|error| error.errno())?;
        session.0.import(token.secret())
    };
    let one = &sessions[0];
    let opened = (0..20_000).map_while(|_| import(one).ok()).count();
    assert_eq!(opened, 8192);
    // Nor by another session.
    assert_eq!(errno(import(&sessions[1])), libc::EMFILE);
    // Nor by closing files that it does not forget.
    drop((sessions, arenas));
    let mut again = None;
    wait_for("the end of its sessions", || {
        again = again.take().or_else(|| attach(64).ok());
        again.as_ref().is_some_and(|one| import(one).is_ok())
    });
    let one = again.unwrap();
    let known = (0..9000).map_while(|n| {
        let file = File::open(dir.join(format!("many/{n}"))).unwrap();
        let token = Token::of(file.as_fd()).unwrap();
        let imported = one.0.import(token.secret()).ok()?;
        one.0.release(imported.entry.node, imported.handle);
        Some(())
    });
    // And the one from before.
    assert_eq!(known.count(), 8191);
    let tokens = (0..5000)
        .map_while(|_| Token::of(file.as_fd()).ok())
        .count();
    // The first one of all is out as well, for ten seconds.
    assert!((1023..=1024).contains(&tokens), "{tokens}");
    assert_eq!(errno(Token::of(file.as_fd())), libc::EAGAIN);
    "ok".into()
}

/// Limits are for each user: one takes nothing from the others.
#[test]
fn a_guest_has_no_more_than_its_share() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let file = served.source.join("shared");
    fs::write(&file, "shared").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    fs::create_dir(served.source.join("many")).unwrap();
    for n in 0..9000 {
        fs::write(served.source.join(format!("many/{n}")), "").unwrap();
    }
    in_child(&served, "greedy", "", Some(54321));
    // Its tokens are still out.
    fs::set_permissions(&file, fs::Permissions::from_mode(0o6777)).unwrap();
    // The mount sees what the host does a moment later.
    wait_for("the mode on the mount", || {
        let mut stat = command("stat", ["-c", "%a"]);
        let mode = served.mount.run(stat.arg(served.mount.at.join("shared")));
        mode.ok().trim() == "6777"
    });
    in_child(&served, "guest", "", Some(54322));
    in_child(&served, "one_file", "", None);
}

/// Calls of a client end with the mount.
#[test]
fn clients_end_with_the_mount() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    for kill in [false, true] {
        let mut served = Served::new(&Serve::for_clients(Transport::Dev));
        let (report, ready) = (served.scratch.path("report"), served.scratch.path("ready"));
        let at = served.mount.at.clone();
        let mut client = Running::start(&mut own_process::call(
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

/// A client finds the next server of a mount that was killed and mounted anew.
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
        let mut command = own_process::call("until_it_is_back", &at, name, &report);
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

/// Programs find the socket of a mount.
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

/// A client can't import a file whose data the kernel may not have written back yet.
#[test]
fn a_mount_that_writes_back_gives_no_tokens() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev).option("writeback"));
    let report = served.scratch.path("report");
    let mut command = own_process::call("refused", &served.mount.at, "", &report);
    served.mount.run(&mut command).ok();
    let expected = libc::EOPNOTSUPP.to_string();
    assert_eq!(fs::read_to_string(report).unwrap(), expected);
}
