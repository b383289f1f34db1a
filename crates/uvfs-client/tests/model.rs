//! Random calls with all flags mixed, on a client's file and on a file of the host: every result
//! and every byte must agree.

mod common;

use std::io::{IoSlice, IoSliceMut};
use std::os::unix::fs::FileExt;

use proptest::prelude::*;
use uvfs_client::{Advice, AllocateMode, Client, Config, File, Flags};
use uvfs_local::LocalStore;

use common::rw;

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

fn host_allocate(host: &std::fs::File, mode: rustix::fs::FallocateFlags, at: u64, len: u64) {
    // tmpfs has no FALLOC_FL_ZERO_RANGE: what it means can be said otherwise.
    if mode == rustix::fs::FallocateFlags::ZERO_RANGE {
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
    let beyond = |e: std::io::Error| assert_eq!(e.raw_os_error(), Some(libc::ENXIO));
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

fn run(calls: &[Call], workers: usize, config: Config) {
    let dir = tempfile::tempdir().unwrap();
    let host = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(dir.path().join("host"))
        .unwrap();
    let store = LocalStore::with(dir.path(), workers, 16 << 10).unwrap();
    let client = Client::new(store, config).unwrap();
    let mut file = open(&client);
    for (i, call) in calls.iter().enumerate() {
        match *call {
            Call::WriteVectored {
                at,
                ref lens,
                flags,
            } => {
                let data = pattern(i, lens.iter().sum());
                let mut rest = &data[..];
                let slices: Vec<IoSlice<'_>> = lens
                    .iter()
                    .map(|&len| {
                        let (part, tail) = rest.split_at(len);
                        rest = tail;
                        IoSlice::new(part)
                    })
                    .collect();
                let n = file.write_vectored_at(&slices, at, flags).unwrap();
                assert_eq!(n, data.len());
                host.write_all_at(&data, at).unwrap();
            }
            Call::ReadVectored {
                at,
                ref lens,
                flags,
            } => {
                let want = host_read(&host, at, lens.iter().sum());
                let mut parts: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0xee; len]).collect();
                let mut slices: Vec<IoSliceMut<'_>> =
                    parts.iter_mut().map(|part| IoSliceMut::new(part)).collect();
                let n = file.read_vectored_at(&mut slices, at, flags).unwrap();
                let mut got = parts.concat();
                got.truncate(n);
                assert!(got == want, "call {i} {call:?}");
            }
            Call::Seek { at } => seek(&file, &host, at),
            Call::SubmitSync { data_only, wait } => {
                let pending = file.submit_sync(data_only);
                if wait {
                    pending.wait().unwrap();
                    let real = std::fs::read(dir.path().join("file")).unwrap();
                    let want = std::fs::read(dir.path().join("host")).unwrap();
                    assert!(real == want, "after the sync of call {i}");
                }
            }
            Call::Advise(advice, at, len) => file.advise(advice, at, len).unwrap(),
            Call::Stat => {
                let (name, host) = (client.stat("file").unwrap(), host.metadata().unwrap());
                assert_eq!(
                    (name.size, file.stat().unwrap().size),
                    (host.len(), host.len())
                );
                assert_eq!((name.mode & libc::S_IFMT, name.nlink), (libc::S_IFREG, 1));
            }
            Call::Write {
                at,
                len,
                flags,
                submit,
            } => {
                let data = pattern(i, len);
                let n = if submit {
                    file.submit_write_at(&data, at, flags).wait().unwrap()
                } else {
                    file.write_at(&data, at, flags).unwrap()
                };
                assert_eq!(n, len);
                host.write_all_at(&data, at).unwrap();
            }
            Call::Append { len, flags } => {
                let data = pattern(i, len);
                let end = host.metadata().unwrap().len();
                assert_eq!(file.append(&data, flags).unwrap(), end);
                host.write_all_at(&data, end).unwrap();
            }
            Call::Read {
                at,
                len,
                flags,
                submit,
            } => {
                let want = host_read(&host, at, len);
                let got = if submit {
                    file.submit_read_at(vec![0xee; len], at, flags)
                        .wait()
                        .unwrap()
                } else {
                    let mut buf = vec![0xee; len];
                    let n = file.read_at(&mut buf, at, flags).unwrap();
                    buf.truncate(n);
                    buf
                };
                assert_eq!(got.len(), want.len(), "length of call {i} {call:?}");
                if let Some(bad) = (0..got.len()).find(|&k| got[k] != want[k]) {
                    panic!(
                        "call {i} {call:?}: byte {bad} is {} not {}",
                        got[bad], want[bad]
                    );
                }
            }
            Call::SetLen(size) => {
                file.set_len(size).unwrap();
                host.set_len(size).unwrap();
            }
            Call::Punch { at, len } => {
                file.allocate(AllocateMode::PunchHole, at, len).unwrap();
                let mode =
                    rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
                host_allocate(&host, mode, at, len);
            }
            Call::Zero { at, len } => match file.allocate(AllocateMode::ZeroRange, at, len) {
                Ok(()) => {
                    host_allocate(&host, rustix::fs::FallocateFlags::ZERO_RANGE, at, len);
                }
                Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EOPNOTSUPP)),
            },
            Call::Allocate { at, len, keep } => {
                let (mode, flags) = if keep {
                    (
                        AllocateMode::KeepSize,
                        rustix::fs::FallocateFlags::KEEP_SIZE,
                    )
                } else {
                    (AllocateMode::Extend, rustix::fs::FallocateFlags::empty())
                };
                file.allocate(mode, at, len).unwrap();
                host_allocate(&host, flags, at, len);
            }
            Call::SyncData => file.sync_data().unwrap(),
            Call::Reopen => {
                if i % 2 == 0 {
                    file.close().unwrap();
                    file = open(&client);
                } else {
                    // Dropped, with its writeback perhaps still under way.
                    file = open(&client);
                }
            }
            Call::DontNeed { at, len } => file.advise(Advice::DontNeed, at, len).unwrap(),
            Call::Shrink => {
                client.shrink(1 << 20);
            }
            Call::Size => {}
        }
        assert_eq!(
            file.size(),
            host.metadata().unwrap().len(),
            "size after call {i} {call:?}"
        );
    }
    // An earlier open file's writes may still be under way, which a close of this one, if it has
    // written nothing, does not wait for.
    file.sync_all().unwrap();
    file.close().unwrap();
    let real = std::fs::read(dir.path().join("file")).unwrap();
    let want = std::fs::read(dir.path().join("host")).unwrap();
    assert_eq!(real.len(), want.len());
    if let Some(bad) = (0..real.len()).find(|&k| real[k] != want[k]) {
        let n = (bad..real.len())
            .take_while(|&k| real[k] != want[k])
            .count();
        let (real, want) = (real[bad], want[bad]);
        panic!("after the last close byte {bad} and {n} more: {real} not {want}");
    }
    assert_eq!(client.stats().dirty_pages, 0);
}

fn small() -> Config {
    Config {
        memory: 1 << 20,
        readahead: 64 << 10,
        ..Config::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    /// Some sequence of reads, writes and truncations would give other bytes than an array does.
    #[test]
    fn a_file_is_a_file(calls in prop::collection::vec(call(), 1..60)) {
        run(&calls, 1, small());
    }

    /// The same where each request ends before its submission returns.
    #[test]
    fn a_file_is_a_file_when_requests_end_at_once(calls in prop::collection::vec(call(), 1..60)) {
        run(&calls, 0, small());
    }

    /// The same where writeback runs all the time.
    #[test]
    fn a_file_is_a_file_with_eager_writeback(calls in prop::collection::vec(call(), 1..60)) {
        let config = Config {
            writeback_after: std::time::Duration::ZERO,
            background_percent: 1,
            dirty_percent: 5,
            ..small()
        };
        run(&calls, 2, config);
    }
}
