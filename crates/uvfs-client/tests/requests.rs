//! Requests of clients as they go through the queue pair: what a server makes of bad ones, and what a
//! client makes of a server that is older than it.

mod common;

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use uvfs_client::{Client, Config, Names, Server};
use uvfs_proto::abi::{self, Opcode};
use uvfs_proto::ext::{self, RemoveIn};
use uvfs_proto::reply;
use uvfs_queue::arena::Arena;
use uvfs_queue::attach::{self, Message};
use uvfs_queue::pair::ServerQueue;
use uvfs_server::FileSystem;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use common::raw::{Raw, hello};
use common::{eventually, session};

const ROOT: u64 = 1;

#[test]
fn a_node_is_forgotten_with_a_name_by_who_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path());
    let (raw, other) = (Raw::attach(&session), Raw::attach(&session));
    for name in ["f", "g", "h", "two"] {
        std::fs::write(dir.path().join(name), name).unwrap();
    }
    std::fs::hard_link(dir.path().join("two"), dir.path().join("names")).unwrap();
    let there = |name: &str| dir.path().join(name).exists();
    let lookups = |node| session.fs().lookups(node);
    let (f, g) = (raw.look_up(b"f\0"), other.look_up(b"g\0"));

    // Refused, and nothing is forgotten: another's node, none, the root, too many; a node that the
    // name can't be in; half of a structure.
    for (node, nlookup) in [(g, 1), (g + 1, 1), (0, 0), (ROOT, 1), (f, 2), (f, u64::MAX)] {
        assert_eq!(raw.remove(b"f\0", node, nlookup), Err(libc::EINVAL));
    }
    let op = RemoveIn {
        node: f,
        nlookup: 1,
    };
    let elsewhere = raw.call(ext::REMOVE, g, op.as_bytes(), b"f\0");
    assert_eq!(elsewhere, Err(libc::ESTALE));
    let half = raw.call(ext::REMOVE, ROOT, &op.as_bytes()[..8], b"f\0");
    assert_eq!(half, Err(libc::EINVAL));
    assert_eq!((lookups(f), lookups(g)), (Some(1), Some(1)));
    assert!(there("f"));

    // Tried, in vain: it is forgotten all the same.
    for (name, error) in [
        (&b"none\0"[..], libc::ENOENT),
        (b"", libc::EINVAL),
        (b"f", libc::EINVAL),
        (b"../f\0", libc::EINVAL),
    ] {
        let f = raw.look_up(b"f\0");
        let count = lookups(f).unwrap();
        assert_eq!(raw.remove(name, f, count), Err(error));
        assert_eq!(raw.links(f), Err(libc::ESTALE));
        eventually("it is forgotten", || lookups(f).is_none());
    }
    assert!(there("f"));

    // Two at once have it once.
    let f = raw.look_up(b"f\0");
    let op = RemoveIn {
        node: f,
        nlookup: 1,
    };
    let sent = [b"f\0", b"h\0"].map(|name| raw.send(ext::REMOVE, ROOT, op.as_bytes(), name));
    let (one, two) = (raw.answer(), raw.answer());
    let of = |id| if one.0 == id { &one.1 } else { &two.1 };
    assert_eq!(of(sent[0]), &Ok(Vec::new()));
    assert_eq!(of(sent[1]), &Err(libc::EINVAL));
    assert!(!there("f") && there("h"));
    eventually("it is forgotten", || lookups(f).is_none());

    // What somebody else has stays.
    assert_eq!((raw.look_up(b"g\0"), lookups(g)), (g, Some(2)));
    assert_eq!(raw.remove(b"g\0", g, 1), Ok(()));
    assert_eq!(raw.links(g), Err(libc::ESTALE));
    assert_eq!((other.links(g), lookups(g)), (Ok(0), Some(1)));
    // As does what has another name, or what the client only has one lookup less of.
    let two = raw.look_up(b"two\0");
    assert_eq!(raw.look_up(b"names\0"), two);
    assert_eq!(raw.remove(b"two\0", two, 1), Ok(()));
    assert_eq!(raw.links(two), Ok(1));
    assert_eq!(raw.remove(b"names\0", two, 0), Ok(()));
    assert_eq!(raw.links(two), Ok(0));
    // And what is forgotten needs not be what had the name.
    let h = raw.look_up(b"h\0");
    assert_eq!(raw.remove(b"h\0", two, 1), Ok(()));
    assert_eq!((raw.links(h), raw.links(two)), (Ok(0), Err(libc::ESTALE)));
    drop((raw, other));
    assert_eq!(session.fs().known_inodes(), 0);
}

#[test]
fn making_and_writing_tell_more_than_fuse_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path());
    let (raw, other) = (Raw::attach(&session), Raw::attach(&session));
    let op = abi::CreateIn {
        flags: (libc::O_CREAT | libc::O_EXCL | libc::O_RDWR) as u32,
        mode: libc::S_IFREG | 0o640,
        ..Default::default()
    };
    let made = raw.call(ext::CREATE, ROOT, op.as_bytes(), b"f\0").unwrap();
    let (entry, rest) = abi::EntryOut::read_from_prefix(&made).unwrap();
    let (opened, rest) = abi::OpenOut::read_from_prefix(rest).unwrap();
    let (leases, identity) = ext::Leases::read_from_prefix(rest).unwrap();
    assert_eq!(entry.attr.mode, libc::S_IFREG | 0o640);
    assert!(leases.parent != 0 && leases.node != 0 && !identity.is_empty());
    let again = raw.call(ext::CREATE, ROOT, op.as_bytes(), b"f\0");
    assert_eq!(again, Err(libc::EEXIST));
    let more = raw.call(ext::CREATE, ROOT, op.as_bytes(), b"g\0").unwrap();
    let at = size_of::<abi::EntryOut>() + size_of::<abi::OpenOut>();
    let (leases, _) = ext::Leases::read_from_prefix(&more[at..]).unwrap();
    assert!(leases.parent == 0 && leases.node != 0, "one is had already");

    let (node, fh) = (entry.nodeid, opened.fh);
    let op = abi::WriteIn {
        fh,
        offset: 2,
        size: 4,
        ..Default::default()
    };
    let wrote = raw.call(ext::WRITE, node, op.as_bytes(), b"data").unwrap();
    let (out, rest) = abi::WriteOut::read_from_prefix(&wrote).unwrap();
    let attr = abi::Attr::read_from_bytes(rest).unwrap();
    let host = std::fs::metadata(dir.path().join("f")).unwrap();
    assert_eq!((out.size, attr.size, host.len()), (4, 6, 6));
    let mtime = (attr.mtime as i64, i64::from(attr.mtimensec));
    assert_eq!(mtime, (host.mtime(), host.mtime_nsec()));

    // What is bad of FUSE's requests is bad of these.
    for (who, node, op, data, error) in [
        (&raw, node, &op.as_bytes()[..20], &b"data"[..], libc::EINVAL),
        (&raw, node, op.as_bytes(), b"dat", libc::EINVAL),
        (
            &raw,
            entry.nodeid + 1000,
            op.as_bytes(),
            b"data",
            libc::ESTALE,
        ),
        (&other, node, op.as_bytes(), b"data", libc::ESTALE),
    ] {
        assert_eq!(who.call(ext::WRITE, node, op, data), Err(error));
    }
    assert_eq!(other.look_up(b"f\0"), node);
    let handle = other.call(ext::WRITE, node, op.as_bytes(), b"data");
    assert_eq!(handle, Err(libc::EBADF));
    let short = raw.call(ext::CREATE, ROOT, &[0; 4], b"h\0");
    assert_eq!(short, Err(libc::EINVAL));
    let nowhere = other.call(ext::CREATE, node + 1000, &[0; 16], b"h\0");
    assert_eq!(nowhere, Err(libc::ESTALE));
    assert!(!dir.path().join("h").exists());
}

/// A server of one directory in which there is every file, from before there were REMOVE, CREATE and WRITE
/// beside FUSE's. Answers the
/// operations that it was asked for, without those of leases.
fn older_server(socket: UnixStream, asked: Asked) {
    let (_, fds) = attach::receive(&socket).unwrap();
    let [arena, queue] = <[_; 2]>::try_from(fds).unwrap();
    let arena = Arena::open(arena, 1 << 20).unwrap();
    let queue = ServerQueue::open(queue, arena.len(), 1 << 20).unwrap();
    let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let agreed = Message {
        max_payload: 1 << 20,
        ..hello()
    };
    attach::send(&socket, agreed, &[bell.as_fd()]).unwrap();
    let mut node = 10;
    while !queue.client_closed() {
        let Some(request) = queue.pop().unwrap() else {
            std::thread::sleep(Duration::from_micros(100));
            continue;
        };
        let (header, _) = abi::InHeader::read_from_prefix(&request.header).unwrap();
        let (error, body) = match header.opcode {
            ext::LOOKUP => {
                node += 1;
                let mut out = ext::LeasedEntry {
                    parent: if node == 11 { 1 } else { 0 },
                    node,
                    ..Default::default()
                };
                out.entry.nodeid = node;
                out.entry.attr.mode = libc::S_IFREG;
                out.entry.attr.nlink = 1;
                (out.entry.entry_valid, out.entry.attr_valid) = (60, 60);
                (0, out.as_bytes().to_vec())
            }
            ext::LEASE_RETURN => (0, Vec::new()),
            opcode => {
                asked.lock().unwrap().push(opcode);
                match Opcode::try_from(opcode) {
                    Ok(Opcode::Unlink | Opcode::Forget | Opcode::Release) => (0, Vec::new()),
                    Ok(Opcode::Create) => {
                        node += 1;
                        let mut entry = abi::EntryOut::new_zeroed();
                        (entry.nodeid, entry.attr.mode) = (node, libc::S_IFREG);
                        let opened = abi::OpenOut::new_zeroed();
                        (0, [entry.as_bytes(), opened.as_bytes()].concat())
                    }
                    Ok(Opcode::Write) => {
                        let (arg, _) = abi::WriteIn::read_from_prefix(&request.op).unwrap();
                        let mut out = abi::WriteOut::new_zeroed();
                        out.size = arg.size;
                        (0, out.as_bytes().to_vec())
                    }
                    _ => (-libc::ENOSYS, Vec::new()),
                }
            }
        };
        let header = reply::header(header.unique, error, body.len());
        queue.complete(request.id, header.as_bytes(), &body);
        queue.ring();
    }
    queue.close();
}

type Asked = Arc<Mutex<Vec<u32>>>;

fn client_of_older_server() -> (Client, Asked, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let asked = Asked::default();
    let mine = asked.clone();
    let server = std::thread::spawn(move || older_server(theirs, mine));
    let config = Config {
        memory: 1 << 20,
        ..Config::default()
    };
    let client = Client::new(Server::from(ours), config).unwrap();
    (client, asked, server)
}

#[test]
fn an_older_server_is_asked_as_fuse_has_it() {
    let (client, asked, server) = client_of_older_server();
    let (create, write) = (Opcode::Create as u32, Opcode::Write as u32);
    let release = Opcode::Release as u32;
    for expected in [
        &[ext::CREATE, create, write, write, release][..],
        &[create, write, write, release],
    ] {
        let names = Names::parse(b"new").unwrap();
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
        let file = client.open_at(&client.root(), &names, flags, 0o600, 0);
        let file = file.unwrap();
        assert_eq!(file.write_short(b"one", 0).unwrap().unwrap(), 3);
        assert_eq!(file.write_short(b"four", 3).unwrap().unwrap(), 4);
        drop(file);
        let told = |asked: &Asked| asked.lock().unwrap().contains(&release);
        eventually("it is told", || told(&asked));
        let mut asked = std::mem::take(&mut *asked.lock().unwrap());
        asked.retain(|&opcode| opcode != Opcode::Forget as u32);
        assert_eq!(asked, expected);
    }
    drop(client);
    server.join().unwrap();
}

#[test]
fn an_older_server_is_asked_to_remove_and_then_to_forget() {
    let (client, asked, server) = client_of_older_server();
    let (unlink, forget) = (Opcode::Unlink as u32, Opcode::Forget as u32);
    for expected in [
        &[ext::REMOVE, unlink, forget][..],
        &[unlink, forget],
        &[unlink, forget],
    ] {
        client.lstat(Path::new("file")).unwrap();
        client.unlink("file").unwrap();
        eventually("it is told", || {
            asked.lock().unwrap().len() >= expected.len()
        });
        assert_eq!(std::mem::take(&mut *asked.lock().unwrap()), expected);
    }
    drop(client);
    server.join().unwrap();
}
