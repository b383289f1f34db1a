//! Clients that break the rules: they change memory while the server reads it, guess other clients'
//! numbers, or die at a bad moment. No other client may notice.

use std::ffi::CStr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::raw::{ROOT, Raw};
use crate::common::{eventually, session};
use uvfs_passthrough::{Options, Passthrough};
use uvfs_proto::abi::{self, Opcode};
use uvfs_proto::ext;
use uvfs_queue::arena::{Ranges, Span};
use uvfs_queue::pair::{Direction, End, Seg};
use uvfs_server::fs::{
    Attributes, ClientSupport, Context, Entry, Errno, Handle, IoHow, LockOwner, Node, OFlags,
    OpenHow, Opened, Payload, Result as FsResult,
};
use uvfs_server::{FileSystem, Session, SessionOptions};
use zerocopy::{FromBytes, IntoBytes};

/// Writes `words` by turns to `seg` of a client's arena until `work` is done.
fn while_changing<T>(raw: &Raw, seg: Seg, words: [u64; 2], work: impl FnOnce() -> T) -> T {
    assert_eq!(seg.len, 8);
    // SAFETY: the segment is 8 aligned bytes of the arena's mapping, which outlives the scope. All
    // accesses of this process are atomic; the server copies the bytes with plain loads of memory
    // that it takes for another process's.
    let word = unsafe { AtomicU64::from_ptr(raw.arena.ptr(seg).cast()) };
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Also when the work panics.
        let _ends = Ends(&done);
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for value in words {
                    word.store(value, Ordering::Relaxed);
                    for _ in 0..40 {
                        std::hint::spin_loop();
                    }
                }
            }
        });
        work()
    })
}

/// A hostile client takes away no nodes that others use.
#[test]
fn a_batch_of_forgets_that_changes_while_it_is_read_takes_nothing_of_others() {
    const RECORDS: usize = 3000;
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path());
    std::fs::write(dir.path().join("own"), "").unwrap();
    std::fs::write(dir.path().join("others"), "").unwrap();
    let (raw, other) = (Raw::attach(&session), Raw::attach(&session));
    let (own, others) = (raw.look_up(b"own\0"), other.look_up(b"others\0"));
    // Its number stays while there is one lookup.
    assert_eq!(raw.look_up(b"own\0"), own);
    // Records that forget nothing give the last one time to change.
    let record = size_of::<abi::ForgetOne>();
    let all = Seg {
        offset: raw.arena.seg(0, 0, 1).offset,
        len: (RECORDS * record) as u32,
    };
    for at in 0..RECORDS {
        let one = abi::ForgetOne {
            nodeid: own,
            nlookup: u64::from(at + 1 == RECORDS),
        };
        let at = at * record;
        raw.arena
            .copy_in((at / 4096) as u32, at % 4096, one.as_bytes());
    }
    let last = Seg {
        offset: all.offset + ((RECORDS - 1) * record) as u64,
        len: 8,
    };
    let op = abi::BatchForgetIn {
        count: RECORDS as u32,
        dummy: 0,
    };
    while_changing(&raw, last, [own, others], || {
        for _ in 0..1000 {
            let opcode = Opcode::BatchForget as u32;
            let answer = raw.call_in_arena(opcode, ROOT, op.as_bytes(), all, Direction::ToServer);
            assert!(answer.is_ok() || answer == Err(libc::EINVAL), "{answer:?}");
            assert_eq!(
                session.fs().lookups(Node(others)),
                Some(1),
                "another client has it"
            );
            if answer.is_ok() {
                assert_eq!(raw.look_up(b"own\0"), own);
            }
            // The server forgot exactly the lookups that were accounted.
            assert_eq!(session.fs().lookups(Node(own)), Some(2));
        }
    });
    drop((raw, other));
    assert_eq!(session.fs().known_inodes(), 0);
}

/// The server counts no node for a client that it did not give.
#[test]
fn a_listing_that_changes_in_the_arena_gives_no_node() {
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path());
    std::fs::create_dir(dir.path().join("dir")).unwrap();
    for n in 0..40 {
        std::fs::write(dir.path().join(format!("dir/{n}")), "").unwrap();
    }
    std::fs::write(dir.path().join("others"), "").unwrap();
    let (raw, other) = (Raw::attach(&session), Raw::attach(&session));
    let (dir, others) = (raw.look_up(b"dir\0"), other.look_up(b"others\0"));
    let op = abi::OpenIn::default();
    let opened = raw.call(Opcode::Opendir as u32, dir, op.as_bytes(), &[]);
    let (opened, _) = abi::OpenOut::read_from_prefix(&opened.unwrap()).unwrap();
    let op = abi::ReadIn {
        fh: opened.fh,
        size: 32 << 10,
        ..Default::default()
    };
    let room = Seg {
        offset: raw.arena.seg(0, 0, 1).offset,
        len: 48 << 10,
    };
    // The entry of ".", which counts no lookup.
    let first = Seg {
        offset: room.offset,
        len: 8,
    };
    while_changing(&raw, first, [others, others], || {
        for _ in 0..300 {
            let (opcode, from) = (Opcode::Readdirplus as u32, Direction::FromServer);
            let listed = raw.call_in_arena(opcode, dir, op.as_bytes(), room, from);
            assert!(listed.is_ok(), "{listed:?}");
            let links = raw.links(others);
            assert_eq!(links, Err(libc::ESTALE), "it was never given it");
        }
    });
    drop(raw);
    assert_eq!(session.fs().lookups(Node(others)), Some(1));
}

/// The owner of an open file takes an OFD lock, as another program would.
fn is_locked(file: &std::fs::File) -> bool {
    let mut flock = libc::flock {
        l_type: libc::F_WRLCK as _,
        l_whence: libc::SEEK_SET as _,
        l_start: 0,
        l_len: 10,
        l_pid: 0,
    };
    // SAFETY: F_OFD_GETLK takes a struct flock, which outlives the call.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut flock) };
    assert_eq!(asked, 0);
    i32::from(flock.l_type) != libc::F_UNLCK
}

/// A client releases no locks of another one.
#[test]
fn nobody_drops_the_locks_of_a_guessed_owner() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        host_locks: true,
        ..Options::default()
    };
    let fs = Passthrough::open(dir.path(), options).unwrap();
    let session = Arc::new(Session::unmounted(fs, SessionOptions::default()).unwrap());
    std::fs::write(dir.path().join("f"), "").unwrap();
    let host = std::fs::File::open(dir.path().join("f")).unwrap();
    let (raw, other) = (Raw::attach(&session), Raw::attach(&session));
    let node = raw.look_up(b"f\0");
    assert_eq!(other.look_up(b"f\0"), node);
    let (fh, others) = (raw.open(node, libc::O_RDWR), other.open(node, libc::O_RDWR));
    let op = abi::LkIn {
        fh,
        owner: 7,
        lk: abi::FileLock {
            start: 0,
            end: 9,
            r#type: libc::F_WRLCK as u32,
            pid: 0,
        },
        ..Default::default()
    };
    raw.call(Opcode::Setlk as u32, node, op.as_bytes(), &[])
        .unwrap();
    assert!(is_locked(&host));
    // Every number that the first client can have, and its owner with none.
    let mut refused = Vec::new();
    for number in 0..64 {
        let lock_owner = number << 32 | 7;
        let flush = abi::FlushIn {
            fh: others,
            lock_owner,
            ..Default::default()
        };
        let flushed = other.call(Opcode::Flush as u32, node, flush.as_bytes(), &[]);
        assert!(is_locked(&host), "owner {lock_owner:x}: {flushed:?}");
        refused.push(flushed.err());
    }
    assert_eq!(refused[0], None, "an owner of its own that has no locks");
    assert!(
        refused[1..]
            .iter()
            .all(|&errno| errno == Some(libc::EINVAL))
    );
    // Its own it may.
    let flush = abi::FlushIn {
        fh,
        lock_owner: 7,
        ..Default::default()
    };
    raw.call(Opcode::Flush as u32, node, flush.as_bytes(), &[])
        .unwrap();
    assert!(!is_locked(&host));
}

/// One file, of which a write takes no more than it is told to.
#[derive(Default)]
struct Short {
    /// The most bytes that the next writes take.
    takes: Mutex<Vec<usize>>,
    file: Mutex<Vec<u8>>,
    /// The owners that came with FLUSH and RELEASE.
    owners: Mutex<Vec<u64>>,
}

const NODE: u64 = 2;

impl FileSystem for Short {
    async fn lookup(&self, _: &Context, _: Node, _: &CStr) -> FsResult<Entry> {
        let attr = abi::Attr {
            ino: NODE,
            ..Default::default()
        };
        Ok(Entry::new(attr, Duration::ZERO))
    }

    async fn getattr(&self, _: &Context, _: Node, _: Option<Handle>) -> FsResult<Attributes> {
        Ok(Attributes::new(abi::Attr::default(), Duration::ZERO))
    }

    async fn open(&self, _: &Context, _: Node, _: &OpenHow) -> FsResult<Opened> {
        Ok(Opened::default())
    }

    async fn flush(&self, _: &Context, _: Node, _: Handle, owner: LockOwner) -> FsResult<()> {
        self.owners.lock().unwrap().push(owner.0);
        Ok(())
    }

    async fn release(
        &self,
        _: &Context,
        _: Node,
        _: Handle,
        _: OFlags,
        flock: Option<LockOwner>,
    ) -> FsResult<()> {
        self.owners
            .lock()
            .unwrap()
            .extend(flock.map(|owner| owner.0));
        Ok(())
    }

    async fn write(&self, _: &Context, _: Node, how: &IoHow, data: &Payload) -> FsResult<usize> {
        let most = self.takes.lock().unwrap().pop().ok_or(Errno::NOSPC)?;
        let mut bytes = vec![0; data.len().min(most)];
        data.slice(0..bytes.len()).copy_out(0, &mut bytes);
        let mut file = self.file.lock().unwrap();
        assert_eq!(file.len() as u64, how.offset);
        file.extend(&bytes);
        Ok(bytes.len())
    }
}

fn short(takes: &[usize]) -> Arc<Session<Short>> {
    let fs = Short {
        takes: Mutex::new(takes.iter().rev().copied().collect()),
        ..Short::default()
    };
    Arc::new(Session::unmounted(fs, SessionOptions::default()).unwrap())
}

/// Recovery continues a short write, or reports the data as lost.
#[test]
fn what_a_dead_client_left_is_written_whole_or_counts_as_lost() {
    for (takes, written, end) in [
        (&[4096][..], 100, End::Written),
        (&[30, 69, 1], 100, End::Written),
        (&[30], 30, End::Lost),
        (&[30, 0, 4096], 30, End::Lost),
    ] {
        let session = short(takes);
        let raw = Raw::attach(&session);
        assert_eq!(raw.look_up(b"f\0"), NODE);
        let fh = raw.open(NODE, libc::O_RDWR);
        let op = ext::LeaseIn {
            mode: ext::LEASE_WRITE,
            padding: 0,
        };
        let lease = raw.call(ext::LEASE, NODE, op.as_bytes(), &[]).unwrap();
        let (lease, _) = ext::LeaseOut::read_from_prefix(&lease).unwrap();
        assert_eq!(lease.granted, ext::LEASE_WRITE);
        raw.arena.set_owner(3, NODE, 0);
        raw.arena.set_handle(3, fh);
        raw.arena.copy_in(3, 0, &[b'x'; 100]);
        let ranges = Ranges {
            dirty: Span::new(0, 100),
            writeback: Span::default(),
        };
        raw.arena.set_ranges(3, ranges);
        let queue = raw.die();
        eventually("the session has ended", || {
            ![End::None, End::Closed].contains(&queue.server_end())
        });
        assert_eq!(queue.server_end(), end, "{takes:?}");
        assert_eq!(*session.fs().file.lock().unwrap(), vec![b'x'; written]);
    }
}

/// A client locks in no other client's name.
#[test]
fn every_owner_of_locks_is_the_clients_own() {
    let session = short(&[]);
    let (raw, other) = (Raw::attach(&session), Raw::attach(&session));
    let mut ends = Vec::new();
    for (raw, lock_owner) in [(&raw, 7), (&other, 7), (&raw, 1 << 32 | 7)] {
        assert_eq!(raw.look_up(b"f\0"), NODE);
        let fh = raw.open(NODE, libc::O_RDWR);
        let flush = abi::FlushIn {
            fh,
            lock_owner,
            ..Default::default()
        };
        let flushed = raw.call(Opcode::Flush as u32, NODE, flush.as_bytes(), &[]);
        let release = abi::ReleaseIn {
            fh,
            release_flags: abi::ReleaseFlags::FLOCK_UNLOCK.bits(),
            lock_owner,
            ..Default::default()
        };
        let released = raw.call(Opcode::Release as u32, NODE, release.as_bytes(), &[]);
        ends.push((flushed.err(), released.err()));
    }
    let refused = Some(libc::EINVAL);
    assert_eq!(ends, [(None, None), (None, None), (refused, refused)]);
    let owners = session.fs().owners.lock().unwrap().clone();
    let [flushed, released, others, and_released] = owners[..] else {
        panic!("{owners:?}");
    };
    assert_eq!((flushed, others), (released, and_released));
    assert_eq!((flushed as u32, others as u32), (7, 7));
    assert!(flushed >> 32 != others >> 32 && flushed >> 32 != 0);
}
