//! A client whose memory changes while each kind of its requests is served. The fuzz targets write between
//! requests; here another thread writes all the time.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use uvfs_client::{Client, Config, Connection, Flags};
use uvfs_proto::abi::{self, Opcode};
use uvfs_proto::request::{Negotiated, op_len};
use uvfs_proto::{ext, import};
use uvfs_queue::pair::{Direction, Seg};
use uvfs_server::{ClientLimits, Clients};
use zerocopy::FromBytes;

use crate::common::raw::{ROOT, Raw};
use crate::common::{Random, eventually, rw, session};
use crate::fuzz::targets::{panics, watch_for_panics};

/// Writes other bytes to random places of a client's memory until told to stop: mostly single bits, as those
/// leave a request that is nearly right.
fn flip(memory: [BorrowedFd<'_>; 2], stop: &AtomicBool, seed: u64) -> usize {
    let mut random = Random(seed);
    let mut flips = 0;
    let sizes = memory.map(|fd| rustix::fs::fstat(fd).unwrap().st_size as u64);
    while !stop.load(Ordering::Relaxed) {
        // Of the queue less, as its rings are there, and a session with a broken ring ends.
        let which = usize::from(random.below(16) == 0);
        // The pages that the requests below name, and the entries.
        let at = match which {
            0 => sizes[0] - 8 * 4096 + random.below(8 * 4096),
            _ => random.below(sizes[1]),
        };
        let mut byte = [0];
        let _ = rustix::io::pread(memory[which], &mut byte, at);
        let before = byte;
        byte[0] = match random.below(4) {
            0 => random.below(256) as u8,
            bit => byte[0] ^ (1 << (bit + random.below(5))),
        };
        let _ = rustix::io::pwrite(memory[which], &byte, at);
        if random.below(2) == 0 {
            let _ = rustix::io::pwrite(memory[which], &before, at);
        }
        flips += 1;
    }
    flips
}

struct Flipped {
    raw: Raw,
    node: u64,
    handles: [u64; 2],
}

impl Flipped {
    fn attach(path: &std::path::Path) -> Self {
        let raw = Raw::connect(path);
        let node = raw.look_up(b"f\0");
        let file = raw.open(node, libc::O_RDWR);
        let op = [(libc::O_DIRECTORY as u32).to_ne_bytes(), [0; 4]].concat();
        let opened = raw.call(Opcode::Opendir as u32, ROOT, &op, &[]).unwrap();
        let dir = abi::OpenOut::read_from_prefix(&opened).unwrap().0.fh;
        Self {
            raw,
            node,
            handles: [file, dir],
        }
    }

    /// A request of this kind that is right but for what changes meanwhile.
    fn send(&self, opcode: u32, random: &mut Random) -> bool {
        let known = Opcode::try_from(opcode).ok();
        let len = match known {
            Some(known) => op_len(known, Negotiated::default()),
            None => [8, 16, 32, 0][(opcode - ext::LEASE) as usize & 3],
        };
        let of_root = matches!(
            known,
            Some(
                Opcode::Opendir
                    | Opcode::Readdir
                    | Opcode::Readdirplus
                    | Opcode::Releasedir
                    | Opcode::Fsyncdir
            )
        ) || random.below(3) == 0;
        let (node, handle) = match of_root {
            true => (ROOT, self.handles[1]),
            false => (self.node, self.handles[0]),
        };
        // Most structures begin with a handle; then come places and lengths.
        let mut op = vec![0; len];
        for (at, word) in op.chunks_mut(8).enumerate() {
            let value = match at {
                0 => handle,
                _ => random.below(3) * 4096,
            };
            word.copy_from_slice(&value.to_ne_bytes()[..word.len()]);
        }
        let names = [&b"f\0"[..], b"g\0h\0", b"g\0", b"user.x\0value"];
        let name = names[random.below(4) as usize];
        let base = self.raw.arena.len() - 8 * 4096;
        let segs = [Seg {
            offset: base + random.below(4) * 4096,
            len: [name.len() as u32, 4096, 8192][random.below(3) as usize],
        }];
        let raw = &self.raw;
        let sent = match random.below(3) {
            0 => raw.try_submit(opcode, node, &op, name, &[], Direction::ToServer),
            1 => {
                let _ = rustix::io::pwrite(raw.arena.as_fd(), name, segs[0].offset);
                raw.try_submit(opcode, node, &op, &[], &segs, Direction::ToServer)
            }
            _ => raw.try_submit(opcode, node, &op, name, &segs, Direction::FromServer),
        };
        sent.is_some()
    }
}

impl Flipped {
    /// Sends requests until the server ends the session, or 200; how many were answered.
    fn many(&self, opcode: u32, random: &mut Random) -> usize {
        let mut served = 0;
        for _ in 0..200 {
            // Its own half believes no more of it than the server does, and may give up by a panic.
            let step = std::panic::AssertUnwindSafe(|| {
                let sent = self.send(opcode, random);
                self.raw.queue.ring();
                let mut answered = 0;
                for _ in 0..if sent { 200 } else { 1 } {
                    match self.raw.queue.pop() {
                        Ok(Some(id)) => {
                            self.raw.queue.release(id);
                            answered += 1;
                        }
                        Ok(None) if answered == 0 => std::thread::yield_now(),
                        _ => break,
                    }
                }
                answered
            });
            match std::panic::catch_unwind(step) {
                Ok(answered) => served += answered,
                Err(_) => break,
            }
            if self.raw.queue.server_closed() {
                break;
            }
        }
        served
    }
}

/// The server reads memory once and checks what it read: no kind of request makes it panic, or take what the client
/// beside has.
#[test]
fn memory_that_changes_under_every_kind_of_request_harms_only_its_client() {
    watch_for_panics();
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    std::fs::create_dir_all(data.join("good")).unwrap();
    std::fs::write(data.join("good/file"), "untouched").unwrap();
    let session = session(&data);
    let path = dir.path().join("sock");
    let limits = ClientLimits {
        recall: Duration::from_millis(200),
        ..ClientLimits::default()
    };
    let clients = Clients::listen(session.clone(), &path, limits).unwrap();
    let config = Config::default().memory(4 << 20);
    let good = Client::new(Connection::connect(&path).unwrap(), config).unwrap();
    let file = good.open("good/file", rw()).unwrap();
    let mut random = Random(1);
    let kinds = Opcode::ALL.iter().map(|&opcode| opcode as u32);
    let kinds: Vec<u32> = kinds
        .chain([ext::LEASE, ext::LEASE_RETURN, import::IMPORT, ext::FIND])
        .collect();
    let (mut served, mut flips) = (0, 0);
    for (at, &opcode) in kinds.iter().enumerate() {
        // The bytes that the last run left do not matter.
        let _ = std::fs::remove_file(data.join("f"));
        let _ = std::fs::remove_dir_all(data.join("f"));
        std::fs::write(data.join("f"), vec![1; 20_000]).unwrap();
        let hostile = Flipped::attach(&path);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let memory = [hostile.raw.arena.as_fd(), hostile.raw.queue.as_fd()];
            let ends = &stop;
            let flipper = scope.spawn(move || flip(memory, ends, at as u64));
            served += hostile.many(opcode, &mut random);
            stop.store(true, Ordering::Relaxed);
            flips += flipper.join().unwrap();
        });
        drop(hostile);
        assert_eq!(panics(), 0, "the server panicked: {opcode}");
        let mut read = [0; 20];
        let n = file
            .read_at(&mut read, 0, Flags::DIRECT)
            .expect("others are served");
        assert_eq!(&read[..n], b"untouched", "{opcode}");
        assert_eq!(good.stat("good/file").unwrap().size, 9, "{opcode}");
    }
    eprintln!("{} kinds, {served} answers, {flips} flips", kinds.len());
    assert!(
        served > kinds.len() * 20,
        "{served} answers: hardly anything was served"
    );
    assert!(flips > 10_000);
    // The other client still has its resources, and nothing of the hostile clients' is left.
    file.write_at(b"and well", 0, Flags::DSYNC).unwrap();
    assert_eq!(std::fs::read(data.join("good/file")).unwrap(), b"and welld");
    drop((file, good));
    eventually("all is given back", || session.report().clients.is_empty());
    drop(clients);
}
