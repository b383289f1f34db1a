//! Random calls with all flags mixed, on a client's file and on a file of the host: every result
//! and every byte must agree.

use std::io::{IoSlice, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use uvfs_client::{Advice, AllocateMode, Client, Config, File, Flags};
use uvfs_server::InProcess;

use crate::common::faulty::faulty;
use crate::common::rw;

#[derive(Debug, Clone)]
enum Call {
    Write {
        at: u64,
        len: usize,
        flags: Flags,
        submit: bool,
    },
    Append {
        len: usize,
        flags: Flags,
    },
    Read {
        at: u64,
        len: usize,
        flags: Flags,
        submit: bool,
    },
    WriteVectored {
        at: u64,
        lens: Vec<usize>,
        flags: Flags,
    },
    ReadVectored {
        at: u64,
        lens: Vec<usize>,
        flags: Flags,
    },
    Seek {
        at: u64,
    },
    SubmitSync {
        data_only: bool,
        wait: bool,
    },
    Advise(Advice, u64, u64),
    Stat,
    SetLen(u64),
    Punch {
        at: u64,
        len: u64,
    },
    Zero {
        at: u64,
        len: u64,
    },
    Allocate {
        at: u64,
        len: u64,
        keep: bool,
    },
    SyncData,
    Reopen,
    DontNeed {
        at: u64,
        len: u64,
    },
    Shrink,
    Size,
}

const MAX: u64 = 400_000;

fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..MAX,
        (0..MAX / 4096).prop_map(|p| p * 4096),
        (1..MAX / 4096, -3i64..4).prop_map(|(p, d)| (p * 4096).saturating_add_signed(d)),
        0..9000u64,
    ]
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        1..200usize,
        1..5000usize,
        Just(4096),
        Just(8192),
        1..100_000usize
    ]
}

fn lengths() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![0..200usize, 0..20_000usize, Just(4096)], 1..5)
}

fn advice() -> impl Strategy<Value = Advice> {
    prop::sample::select(vec![
        Advice::Normal,
        Advice::Sequential,
        Advice::Random,
        Advice::WillNeed,
        Advice::DontNeed,
    ])
}

fn flags() -> impl Strategy<Value = Flags> {
    prop_oneof![
        4 => Just(Flags::empty()),
        2 => Just(Flags::DONTCACHE),
        2 => Just(Flags::DIRECT),
        1 => Just(Flags::DSYNC),
        1 => Just(Flags::DSYNC | Flags::DIRECT),
        1 => Just(Flags::DSYNC | Flags::DONTCACHE),
    ]
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        8 => (offset(), length(), flags(), any::<bool>())
            .prop_map(|(at, len, flags, submit)| Call::Write { at, len, flags, submit }),
        2 => (length(), flags()).prop_map(|(len, flags)| Call::Append { len, flags }),
        8 => (offset(), length(), flags(), any::<bool>())
            .prop_map(|(at, len, flags, submit)| Call::Read { at, len, flags, submit }),
        2 => (offset(), lengths(), flags())
            .prop_map(|(at, lens, flags)| Call::WriteVectored { at, lens, flags }),
        2 => (offset(), lengths(), flags())
            .prop_map(|(at, lens, flags)| Call::ReadVectored { at, lens, flags }),
        2 => offset().prop_map(|at| Call::Seek { at }),
        1 => (any::<bool>(), any::<bool>())
            .prop_map(|(data_only, wait)| Call::SubmitSync { data_only, wait }),
        1 => (advice(), offset(), 0..100_000u64)
            .prop_map(|(advice, at, len)| Call::Advise(advice, at, len)),
        1 => Just(Call::Stat),
        1 => offset().prop_map(Call::SetLen),
        1 => (offset(), 1..50_000u64).prop_map(|(at, len)| Call::Punch { at, len }),
        1 => (offset(), 1..50_000u64).prop_map(|(at, len)| Call::Zero { at, len }),
        1 => (offset(), 1..50_000u64, any::<bool>())
            .prop_map(|(at, len, keep)| Call::Allocate { at, len, keep }),
        1 => Just(Call::SyncData),
        1 => Just(Call::Reopen),
        1 => (offset(), 1..100_000u64).prop_map(|(at, len)| Call::DontNeed { at, len }),
        1 => Just(Call::Shrink),
        1 => Just(Call::Size),
    ]
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i.wrapping_mul(31) ^ seed.wrapping_mul(97) ^ (i >> 8)) as u8)
        .collect()
}

fn host_read(host: &std::fs::File, at: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0; len];
    let mut done = 0;
    while done < len {
        match host.read_at(&mut buf[done..], at + done as u64).unwrap() {
            0 => break,
            n => done += n,
        }
    }
    buf.truncate(done);
    buf
}

fn host_allocate(host: &std::fs::File, mode: FallocateFlags, at: u64, len: u64) {
    // tmpfs has no FALLOC_FL_ZERO_RANGE: what it means can be said otherwise.
    if mode == FallocateFlags::ZERO_RANGE {
        host.write_all_at(&vec![0; len as usize], at).unwrap();
        return;
    }
    rustix::fs::fallocate(host, mode, at, len).unwrap();
}

fn open(client: &Client) -> File {
    client.open("file", rw()).unwrap()
}

/// Where the holes are is up to a file system, but a hole has no data, and an end is an end.
fn seek(file: &File, host: &std::fs::File, at: u64) {
    let size = host.metadata().unwrap().len();
    let zero = |from: u64, to: u64| {
        let bytes = host_read(host, from, (to - from) as usize);
        bytes.iter().all(|&b| b == 0)
    };
    let beyond = |e: uvfs_client::Error| assert_eq!(e.errno(), Errno::NXIO);
    match file.seek_data(at) {
        Ok(data) => {
            assert!(data >= at && data < size, "data at {data}");
            assert!(zero(at, data));
        }
        Err(e) => {
            beyond(e);
            assert!(at >= size || zero(at, size));
        }
    }
    match file.seek_hole(at) {
        Ok(hole) => {
            assert!(hole >= at && hole <= size && at < size, "a hole at {hole}");
            let data = file.seek_data(hole).unwrap_or(size);
            assert!(zero(hole, data));
        }
        Err(e) => {
            beyond(e);
            assert!(at >= size);
        }
    }
}

/// A client's file, and a file of the host that every call is made on too.
struct Both {
    dir: tempfile::TempDir,
    client: Client,
    file: File,
    host: std::fs::File,
    _serving: InProcess,
}

impl Both {
    fn new(waits: bool, config: Config) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let host = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(dir.path().join("host"))
            .unwrap();
        let config = config.max_request(16 << 10);
        let (serving, client, fault) = faulty(dir.path(), config);
        fault.waits.store(waits, Ordering::Relaxed);
        let file = open(&client);
        Self {
            dir,
            client,
            file,
            host,
            _serving: serving,
        }
    }

    /// Makes the call with this number on both, and compares the results.
    fn make(mut self, i: usize, call: &Call) -> Self {
        let file = &self.file;
        match *call {
            Call::Write {
                at,
                len,
                flags,
                submit,
            } => self.write(&pattern(i, len), at, flags, submit),
            Call::WriteVectored {
                at,
                ref lens,
                flags,
            } => self.write_vectored(&pattern(i, lens.iter().sum()), lens, at, flags),
            Call::Append { len, flags } => self.append(&pattern(i, len), flags),
            Call::Read {
                at,
                len,
                flags,
                submit,
            } => {
                let got = self.read(at, len, flags, submit);
                same(
                    &format!("call {i} {call:?}"),
                    &got,
                    &self.host_read(at, len),
                );
            }
            Call::ReadVectored {
                at,
                ref lens,
                flags,
            } => {
                let got = self.read_vectored(lens, at, flags);
                let want = self.host_read(at, lens.iter().sum());
                same(&format!("call {i} {call:?}"), &got, &want);
            }
            Call::Seek { at } => seek(file, &self.host, at),
            Call::SubmitSync { data_only, wait } => {
                let pending = file.submit_sync(data_only);
                if wait {
                    pending.wait().unwrap();
                    same_on_disk(&self.dir, &format!("after the sync of call {i}"));
                }
            }
            Call::Advise(advice, at, len) => file.advise(advice, at, len).unwrap(),
            Call::DontNeed { at, len } => file.advise(Advice::DontNeed, at, len).unwrap(),
            Call::Stat => self.stat(),
            Call::SetLen(size) => {
                file.set_len(size).unwrap();
                self.host.set_len(size).unwrap();
            }
            Call::Punch { at, len } => self.allocate(AllocateMode::PunchHole, at, len),
            Call::Zero { at, len } => self.allocate(AllocateMode::ZeroRange, at, len),
            Call::Allocate {
                at,
                len,
                keep: true,
            } => self.allocate(AllocateMode::KeepSize, at, len),
            Call::Allocate { at, len, .. } => self.allocate(AllocateMode::Extend, at, len),
            Call::SyncData => file.sync_data().unwrap(),
            Call::Reopen => {
                // Else the file is dropped, with its writeback perhaps still under way.
                if i.is_multiple_of(2) {
                    self.file.close().unwrap();
                }
                self.file = open(&self.client);
            }
            Call::Shrink => {
                self.client.shrink(1 << 20);
            }
            Call::Size => {}
        }
        let size = self.host.metadata().unwrap().len();
        assert_eq!(self.file.size(), size, "size after call {i} {call:?}");
        self
    }

    fn write(&self, data: &[u8], at: u64, flags: Flags, submit: bool) {
        let n = match submit {
            true => self.file.submit_write_at(data, at, flags).wait().unwrap(),
            false => self.file.write_at(data, at, flags).unwrap(),
        };
        assert_eq!(n, data.len());
        self.host.write_all_at(data, at).unwrap();
    }

    fn write_vectored(&self, data: &[u8], lens: &[usize], at: u64, flags: Flags) {
        let mut rest = data;
        let parts = lens.iter().map(|&len| {
            let (part, tail) = rest.split_at(len);
            rest = tail;
            IoSlice::new(part)
        });
        let parts: Vec<_> = parts.collect();
        let n = self.file.write_vectored_at(&parts, at, flags).unwrap();
        assert_eq!(n, data.len());
        self.host.write_all_at(data, at).unwrap();
    }

    fn append(&self, data: &[u8], flags: Flags) {
        let end = self.host.metadata().unwrap().len();
        assert_eq!(self.file.append(data, flags).unwrap(), end);
        self.host.write_all_at(data, end).unwrap();
    }

    fn read(&self, at: u64, len: usize, flags: Flags, submit: bool) -> Vec<u8> {
        let mut buf = vec![0xee; len];
        if submit {
            return self.file.submit_read_at(buf, at, flags).wait().unwrap();
        }
        let n = self.file.read_at(&mut buf, at, flags).unwrap();
        buf.truncate(n);
        buf
    }

    fn read_vectored(&self, lens: &[usize], at: u64, flags: Flags) -> Vec<u8> {
        let mut parts: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0xee; len]).collect();
        let slices = parts.iter_mut().map(|part| IoSliceMut::new(part));
        let mut slices: Vec<_> = slices.collect();
        let n = self.file.read_vectored_at(&mut slices, at, flags).unwrap();
        let mut got = parts.concat();
        got.truncate(n);
        got
    }

    fn host_read(&self, at: u64, len: usize) -> Vec<u8> {
        host_read(&self.host, at, len)
    }

    fn stat(&self) {
        let name = self.client.stat("file").unwrap();
        let size = self.host.metadata().unwrap().len();
        assert_eq!((name.size, self.file.stat().unwrap().size), (size, size));
        assert_eq!((name.mode & libc::S_IFMT, name.nlink), (libc::S_IFREG, 1));
    }

    fn allocate(&self, mode: AllocateMode, at: u64, len: u64) {
        let host = match mode {
            AllocateMode::Extend => FallocateFlags::empty(),
            AllocateMode::KeepSize => FallocateFlags::KEEP_SIZE,
            AllocateMode::PunchHole => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            AllocateMode::ZeroRange => FallocateFlags::ZERO_RANGE,
        };
        match self.file.allocate(mode, at, len) {
            // Where the host lacks it, the client does too.
            Err(e) if host == FallocateFlags::ZERO_RANGE => {
                assert_eq!(e.errno(), Errno::OPNOTSUPP);
            }
            result => {
                result.unwrap();
                host_allocate(&self.host, host, at, len);
            }
        }
    }

    fn end(self) {
        // An earlier open file's writes may still be under way, which a close of this one, if it has
        // written nothing, does not wait for.
        self.file.sync_all().unwrap();
        let Self {
            dir, client, file, ..
        } = self;
        file.close().unwrap();
        same_on_disk(&dir, "after the last close");
        assert_eq!(client.stats().dirty_pages, 0);
    }
}

fn same_on_disk(dir: &tempfile::TempDir, when: &str) {
    let read = |name| std::fs::read(dir.path().join(name)).unwrap();
    same(when, &read("file"), &read("host"));
}

fn same(when: &str, got: &[u8], want: &[u8]) {
    assert_eq!(got.len(), want.len(), "{when}: length");
    if let Some(bad) = (0..got.len()).find(|&k| got[k] != want[k]) {
        let n = (bad..got.len()).take_while(|&k| got[k] != want[k]).count();
        let (got, want) = (got[bad], want[bad]);
        panic!("{when}: byte {bad} and {n} more: {got} not {want}");
    }
}

fn run(calls: &[Call], waits: bool, config: Config) {
    let mut both = Both::new(waits, config);
    for (i, call) in calls.iter().enumerate() {
        both = both.make(i, call);
    }
    both.end();
}

fn small() -> Config {
    Config::default().memory(1 << 20).readahead(64 << 10)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    /// Every sequence of reads, writes and truncations gives the bytes that an array does.
    #[test]
    fn a_file_is_a_file(calls in prop::collection::vec(call(), 1..60)) {
        run(&calls, false, small());
    }

    /// The same where each request ends before its submission returns.
    #[test]
    fn a_file_is_a_file_when_requests_end_at_once(calls in prop::collection::vec(call(), 1..60)) {
        run(&calls, true, small());
    }

    /// The same where writeback runs all the time.
    #[test]
    fn a_file_is_a_file_with_eager_writeback(calls in prop::collection::vec(call(), 1..60)) {
        let config = small().writeback_after(std::time::Duration::ZERO).background_percent(1).dirty_percent(5);
        run(&calls, false, config);
    }
}
