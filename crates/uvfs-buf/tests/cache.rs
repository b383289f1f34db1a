//! The buffer cache on image files, with every engine.

#[path = "cache/errors.rs"]
mod errors;
#[path = "cache/leader.rs"]
mod leader;
#[path = "cache/pressure.rs"]
mod pressure;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uvfs_buf::{
    Anything, BufError, Config, Corrupt, Extent, Prefetch, Target, Verifier, WriteQueue,
};
use uvfs_io::device::{Device, OpenOptions};
use uvfs_io::engine::{EngineConfig, EngineKind, Fault, Faults, Op, Rule};
use uvfs_mem::{Monitor, MonitorConfig, Shrinkers};

/// Sectors of one block of the test image; each block begins with its own address.
const BLOCK: u32 = 8;

fn block(n: u64) -> [Extent; 1] {
    [Extent {
        daddr: n * u64::from(BLOCK),
        len: BLOCK,
    }]
}

fn image(dir: &Path, blocks: u64) -> PathBuf {
    let path = dir.join("image");
    let mut data = Vec::with_capacity((blocks * 4096) as usize);
    for n in 0..blocks {
        data.extend_from_slice(&(n * u64::from(BLOCK)).to_be_bytes());
        data.resize(data.len() + 4088, n as u8);
    }
    fs::write(&path, data).unwrap();
    path
}

/// A block that begins with its own address.
struct Addressed;

impl Verifier for Addressed {
    fn name(&self) -> &'static str {
        "addressed"
    }

    fn verify(&self, daddr: u64, bytes: &[u8]) -> Result<(), Corrupt> {
        let found = u64::from_be_bytes(bytes[..8].try_into().unwrap());
        if found != daddr {
            return Err(format!("says it is at {found}").into());
        }
        Ok(())
    }
}

/// The same, needed often.
struct Hot;

impl Verifier for Hot {
    fn name(&self) -> &'static str {
        "hot"
    }

    fn verify(&self, daddr: u64, bytes: &[u8]) -> Result<(), Corrupt> {
        Addressed.verify(daddr, bytes)
    }

    fn references(&self) -> u8 {
        5
    }
}

fn open(path: &Path, kind: EngineKind, config: Config) -> Option<Target> {
    let options = OpenOptions {
        write: true,
        ..OpenOptions::default()
    };
    let device = Arc::new(Device::open(path, options).unwrap());
    match Target::open(device, kind, config) {
        Ok(target) => Some(target),
        Err(error)
            if [Errno::NOSYS, Errno::PERM]
                .iter()
                .any(|e| error.raw_os_error() == Some(e.raw_os_error())) =>
        {
            uvfs_testing::say(format_args!("{kind} is switched off ({error})"));
            None
        }
        Err(error) => panic!("{kind}: {error}"),
    }
}

/// Runs a test over an image of that many blocks with each engine, and asynchronous sync too.
fn each(blocks: u64, config: Config, test: impl Fn(&Target, &Path)) {
    for (kind, threads) in [
        (EngineKind::Sync, 0),
        (EngineKind::Sync, 3),
        (EngineKind::Aio, 0),
        (EngineKind::Uring, 0),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = image(dir.path(), blocks);
        let mut config = config.clone();
        config.engine.threads = threads;
        if let Some(target) = open(&path, kind, config) {
            test(&target, &path);
        }
    }
}

fn limit(limit: usize) -> Config {
    Config {
        limit,
        memory_wait: Duration::from_millis(50),
        ..Config::default()
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A buffer is read once, and found again in any allocation group.
#[test]
fn found_again_and_in_any_group() {
    each(256, Config::default(), |target, _| {
        let before = target.read(&block(200), &Addressed).unwrap();
        target.set_groups(100);
        for n in 0..256 {
            let buffer = target.read(&block(n), &Addressed).unwrap();
            assert_eq!((buffer.daddr(), buffer.len()), (n * 8, 4096));
            let content = buffer.read();
            assert_eq!(content[..8], (n * 8).to_be_bytes());
            assert!(content[8..].iter().all(|&b| b == n as u8));
        }
        let stats = target.stats();
        assert_eq!((stats.hits, stats.misses, stats.reads), (1, 256, 256));
        assert_eq!(target.len(), 256);
        assert!(before.read().len() == 4096);
        // A buffer of another length at the same address is another buffer.
        let half = target
            .read(
                &[Extent {
                    daddr: 1600,
                    len: 4,
                }],
                &Addressed,
            )
            .unwrap();
        assert_eq!(half.len(), 2048);
        // Uncached reads leave the index alone.
        let uncached = target.read_many_uncached(&[&block(3)], &Addressed);
        assert_eq!(uncached[0].as_ref().unwrap().read()[8], 3);
        assert_eq!((target.len(), target.stats().uncached), (257, 1));
    });
}

/// A buffer of several extents has their contents in their order.
#[test]
fn batches_and_discontiguous_buffers() {
    each(64, Config::default(), |target, path| {
        let wanted: Vec<_> = (0..64).map(block).collect();
        let wanted: Vec<&[Extent]> = wanted.iter().map(|e| &e[..]).collect();
        for (n, buffer) in target
            .read_many_uncached(&wanted, &Addressed)
            .into_iter()
            .enumerate()
        {
            assert_eq!(buffer.unwrap().read()[4000], n as u8);
        }
        let pieces: Vec<Extent> = [40, 7, 8, 63].iter().flat_map(|&n| block(n)).collect();
        let buffer = target.read(&pieces, &Addressed).unwrap();
        let bytes: Vec<u8> = buffer.read().chunks(4096).map(|c| c[9]).collect();
        assert_eq!(bytes, [40, 7, 8, 63]);
        assert_eq!(buffer.extents(), &pieces[..]);
        // The same beginning and length, but other blocks: not the same buffer.
        let others: Vec<Extent> = [40, 1, 2, 3].iter().flat_map(|&n| block(n)).collect();
        let other = target.read(&others, &Addressed).unwrap();
        assert_eq!(other.read()[4096 + 9], 1);
        // And written where they belong.
        buffer.write()[4096 * 3 + 100] = 0xee;
        let mut queue = WriteQueue::new(target);
        queue.push(buffer);
        queue.flush().unwrap();
        assert_eq!(fs::read(path).unwrap()[63 * 4096 + 100], 0xee);
    });
}

/// A buffer beyond the device, or of no length, is refused.
#[test]
fn bounds_and_shapes() {
    each(4, Config::default(), |target, _| {
        let error = |extents: &[Extent]| target.read(extents, &Anything).unwrap_err();
        let range = |daddr, len| error(&[Extent { daddr, len }]);
        assert!(matches!(range(32, 1), BufError::Range { end: 32, .. }));
        assert!(matches!(range(31, 2), BufError::Range { .. }));
        assert!(matches!(range(u64::MAX, 1), BufError::Range { .. }));
        assert!(matches!(range(0, 0), BufError::Shape { .. }));
        assert!(matches!(range(0, u32::MAX), BufError::Shape { .. }));
        assert!(matches!(error(&[]), BufError::Shape { .. }));
        assert_eq!(range(32, 1).errno(), Errno::UCLEAN.raw_os_error());
        assert_eq!(target.stats().reads, 0);
    });
}

/// Threads that want one buffer at a time read it once.
#[test]
fn threads_read_one_buffer_once() {
    each(512, Config::default(), |target, _| {
        target.set_groups(512);
        let barrier = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for n in 0..512 {
                        barrier.wait();
                        let buffer = target.read(&block(n), &Addressed).unwrap();
                        assert_eq!(buffer.read()[8], n as u8);
                    }
                });
            }
        });
        assert_eq!(target.stats().reads, 512);
        assert_eq!(target.engine_stats().reads, 512);
    });
}

/// The cache stays within its limit, and evicts cold buffers before hot ones.
#[test]
fn the_limit_evicts_and_the_hot_stay() {
    each(1024, limit(1 << 20), |target, _| {
        let hot: Vec<_> = (0..8).collect();
        for &n in &hot {
            target.read(&block(n), &Hot).unwrap();
        }
        for n in 8..600 {
            target.read(&block(n), &Addressed).unwrap();
            let memory = target.memory();
            assert!(memory.in_use <= memory.limit && memory.resident <= memory.limit);
        }
        assert!(target.stats().evictions > 300);
        let before = target.stats();
        for &n in &hot {
            target.read(&block(n), &Hot).unwrap();
        }
        assert_eq!(target.stats().misses, before.misses, "hot buffers stayed");
        target.read(&block(8), &Addressed).unwrap();
        assert_eq!(target.stats().misses, before.misses + 1, "cold ones went");
    });
}

/// Reading ahead reads the buffers that are wanted, each once.
#[test]
fn readahead_of_both_kinds() {
    for how in [
        Prefetch::Exact,
        Prefetch::Span {
            max_gap: 16,
            max_len: 512,
        },
    ] {
        each(512, Config::default(), |target, _| {
            // Every third block: gaps of two.
            let wanted: Vec<_> = (0..100).map(|n| block(n * 3)).collect();
            let mut begun = 0;
            while begun < 100 {
                begun += target.readahead(wanted[begun..].iter().map(|e| &e[..]), &Addressed, how);
            }
            for (n, extents) in wanted.iter().enumerate() {
                let buffer = target.read(extents, &Addressed).unwrap();
                assert_eq!(buffer.read()[8], (n * 3) as u8);
            }
            let stats = target.stats();
            assert_eq!((stats.readahead, stats.reads, stats.hits), (100, 0, 100));
            let ios = target.engine_stats().reads;
            match how {
                Prefetch::Exact => assert_eq!((ios, stats.gap_bytes), (100, 0)),
                Prefetch::Span { .. } => {
                    assert!(ios <= 12, "{ios} I/Os");
                    assert!(stats.gap_bytes > 0);
                }
            }
            // It never waits, takes a quarter of the memory at most, and is no error where it
            // makes no sense.
            let wrong = [Extent {
                daddr: 1 << 40,
                len: 8,
            }];
            assert_eq!(target.readahead([&wrong[..]], &Addressed, how), 0);
        });
    }
    each(1024, limit(1 << 20), |target, _| {
        let wanted: Vec<_> = (0..1024).map(block).collect();
        for n in (0..1024).step_by(32) {
            target.readahead(
                wanted[n..].iter().map(|e| &e[..]),
                &Addressed,
                Prefetch::Exact,
            );
            assert!(target.memory().resident <= 1 << 20);
        }
    });
}

/// Writes of neighbours go to the device as one.
#[test]
fn delayed_writes_are_sorted_and_merged() {
    each(256, Config::default(), |target, path| {
        let mut queue = WriteQueue::new(target);
        // Two runs and one alone, in no order, one of them twice.
        let order = [9, 3, 4, 100, 8, 1, 2, 7, 3];
        for n in order {
            let buffer = target.get(&block(n), &Addressed).unwrap();
            {
                let mut content = buffer.write();
                content.fill(0xd0);
                content[..8].copy_from_slice(&(n * 8).to_be_bytes());
            }
            queue.push(buffer);
        }
        queue.submit();
        queue.wait().unwrap();
        let stats = target.stats();
        assert_eq!((stats.writes, stats.write_ios, stats.reads), (8, 3, 0));
        target.sync().unwrap();
        assert_eq!(target.engine_stats().flushes, 1);
        let on_disk = fs::read(path).unwrap();
        let changed: HashSet<u64> = order.into_iter().collect();
        for n in 0..256 {
            let want = if changed.contains(&n) { 0xd0 } else { n as u8 };
            assert_eq!(on_disk[n as usize * 4096 + 8], want, "block {n}");
        }
        // Clean buffers are not written again.
        queue.push(target.read(&block(3), &Addressed).unwrap());
        queue.flush().unwrap();
        assert_eq!(target.stats().writes, 8);
        // `sync` finds a buffer that was not queued.
        target.read(&block(50), &Addressed).unwrap().write()[100] = 0xab;
        target.sync().unwrap();
        assert_eq!(fs::read(path).unwrap()[50 * 4096 + 100], 0xab);
    });
}

/// An invalidated buffer is read anew, and a handle of the old one keeps its content.
#[test]
fn invalidated_buffers_are_read_anew() {
    each(64, Config::default(), |target, path| {
        let held = target.read(&block(7), &Anything).unwrap();
        target.read(&block(8), &Anything).unwrap().write()[0] = 0x77;
        fs::write(path, vec![0xaa; 64 * 4096]).unwrap();
        assert_eq!(target.read(&block(7), &Anything).unwrap().read()[8], 7);
        target.invalidate_all();
        assert_eq!(target.read(&block(7), &Anything).unwrap().read()[8], 0xaa);
        assert_eq!(target.read(&block(8), &Anything).unwrap().read()[8], 0xaa);
        assert_eq!(held.read()[8], 7);
        target.invalidate_all();
        assert!(target.is_empty());
        assert!(target.memory().used > 0, "one is held");
        drop(held);
        assert_eq!(target.memory().used, 0);
    });
}

/// Writers lose none of each other's changes, and a reader sees the content of its own buffer.
#[test]
fn readers_and_writers_of_the_same_buffers() {
    each(64, limit(1 << 20), |target, path| {
        let done = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..2u64 {
                let done = &done;
                scope.spawn(move || {
                    for round in 0..60u64 {
                        let mut queue = WriteQueue::new(target);
                        for n in 0..16 {
                            let buffer = target.read(&block(n), &Addressed).unwrap();
                            let mut content = buffer.write();
                            let old = u64::from_be_bytes(content[16..24].try_into().unwrap());
                            content[16..24].copy_from_slice(&old.wrapping_add(1).to_be_bytes());
                            drop(content);
                            queue.push(buffer);
                        }
                        if round % 2 == thread {
                            queue.submit();
                        }
                        queue.flush().unwrap();
                    }
                    done.fetch_add(1, Ordering::SeqCst);
                });
            }
            scope.spawn(|| {
                while done.load(Ordering::SeqCst) < 2 {
                    for n in 0..64 {
                        let buffer = target.read(&block(n), &Addressed).unwrap();
                        let first = buffer.read();
                        let second = target.read(&block((n + 1) % 64), &Addressed).unwrap();
                        assert_eq!(second.read()[..8], ((n + 1) % 64 * 8).to_be_bytes());
                        assert_eq!(first[..8], (n * 8).to_be_bytes());
                    }
                }
            });
        });
        target.sync().unwrap();
        let on_disk = fs::read(path).unwrap();
        for n in 0..16u64 {
            let start = u64::from_be_bytes([n as u8; 8]);
            let at = n as usize * 4096 + 16;
            let found = u64::from_be_bytes(on_disk[at..at + 8].try_into().unwrap());
            assert_eq!(
                found,
                start.wrapping_add(120),
                "block {n}: an update was lost"
            );
        }
    });
}

/// A pin keeps the content as it is: a change waits for it, reclaim passes it over.
#[test]
fn pinned_content_stays() {
    each(64, limit(256 << 10), |target, _| {
        let pinned = target.read(&block(1), &Addressed).unwrap().pin();
        let before = pinned.to_vec();
        for n in 2..64 {
            target.read(&block(n), &Addressed).unwrap();
        }
        assert_eq!(&*pinned, &before[..]);
        let again = target.read(&block(1), &Addressed).unwrap();
        std::thread::scope(|scope| {
            let change = scope.spawn(|| again.write()[100] ^= 0xff);
            assert_eq!(&*pinned, &before[..]);
            drop(pinned);
            change.join().unwrap();
        });
        assert_ne!(&*again.read(), &before[..]);
    });
}

/// The cache gives memory back under pressure.
#[test]
fn pressure_shrinks_the_cache() {
    each(1024, Config::default(), |target, _| {
        let held = target.read(&block(1023), &Addressed).unwrap();
        for n in 0..1000 {
            target.read(&block(n), &Addressed).unwrap();
        }
        let before = target.memory().resident;
        assert!(before > 4 << 20);
        let dir = tempfile::tempdir().unwrap();
        let meminfo = dir.path().join("meminfo");
        fs::write(&meminfo, "MemTotal: 1000 kB\nMemAvailable: 10 kB\n").unwrap();
        let shrinkers = Arc::new(Shrinkers::new());
        let shrinker = target.shrinker();
        shrinkers.register(&shrinker);
        let config = MonitorConfig {
            psi: dir.path().join("none"),
            cgroup: None,
            meminfo,
            interval: Duration::from_millis(1),
            ..MonitorConfig::default()
        };
        let monitor = Monitor::start(config, shrinkers).unwrap();
        until("the cache shrinks", || {
            target.memory().resident < before / 4
        });
        drop(monitor);
        assert_eq!(held.read()[8], 1023u64 as u8);
        assert_eq!(target.read(&block(0), &Addressed).unwrap().read()[8], 0);
    });
}

/// Readahead that no caller waits for does not keep a dropped target alive.
#[test]
fn dropped_with_io_in_flight() {
    each(256, Config::default(), |target, _| {
        let wanted: Vec<_> = (0..100).map(block).collect();
        target.readahead(wanted.iter().map(|e| &e[..]), &Addressed, Prefetch::Exact);
    });
}

/// A read that a thread began before it ended is carried out all the same.
#[test]
fn threads_may_end_with_io_in_flight() {
    each(512, Config::default(), |target, _| {
        let wanted: Vec<_> = (0..512).map(block).collect();
        for chunk in wanted.chunks(64) {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let ahead = chunk.iter().map(|e| &e[..]);
                    target.readahead(ahead, &Addressed, Prefetch::Exact);
                });
            });
        }
        for (n, extents) in wanted.iter().enumerate() {
            let buffer = target.read(extents, &Addressed).unwrap();
            assert_eq!(buffer.read()[8], n as u8);
        }
        assert_eq!(target.stats().read_errors, 0);
    });
}
