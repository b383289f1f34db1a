//! The three engines do the same, on real files and on a loop device.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uvfs_io::device::{Device, OpenError, OpenOptions};
use uvfs_io::engine::{
    self, Engine, EngineConfig, EngineKind, Fault, Faults, Io, IoExtent, Op, Rule,
};
use uvfs_mem::{Arena, Block};

const SIZE: usize = 4 << 20;

/// xorshift64*: the same numbers on every run.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % below
    }
}

fn pattern() -> Vec<u8> {
    let mut random = Random(1);
    (0..SIZE).map(|_| random.next(256) as u8).collect()
}

/// Every engine that this machine allows, the sync one both ways, with this set-up; one at a
/// time, because a block device is opened exclusively.
fn engines<'a>(
    path: &'a Path,
    options: OpenOptions,
    config: &'a EngineConfig,
) -> impl Iterator<Item = Arc<dyn Engine>> + 'a {
    let kinds = [
        (EngineKind::Sync, 0),
        (EngineKind::Sync, 3),
        (EngineKind::Aio, 0),
        (EngineKind::Uring, 0),
    ];
    kinds.into_iter().filter_map(move |(kind, threads)| {
        let device = Arc::new(Device::open(path, options).unwrap());
        let config = EngineConfig {
            threads,
            ..config.clone()
        };
        match engine::open(kind, device, config) {
            Ok(engine) => Some(engine),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                uvfs_testing::say(format_args!("{kind} is switched off ({error})"));
                None
            }
            Err(error) => panic!("{kind}: {error}"),
        }
    })
}

/// Runs I/Os to their end.
fn run(engine: &dyn Engine, mut ios: Vec<Io>) -> HashMap<u64, Io> {
    let mut done = HashMap::new();
    let count = ios.len();
    let mut out = Vec::new();
    while done.len() < count {
        engine.submit(&mut ios);
        assert!(engine.reap(true, &mut out) > 0);
        done.extend(out.drain(..).map(|io| (io.tag, io)));
    }
    assert_eq!(engine.in_flight(), 0);
    assert_eq!(engine.reap(true, &mut out), 0);
    done
}

fn memory(io: &Io) -> Vec<u8> {
    io.memory.iter().flat_map(|block| block.to_vec()).collect()
}

/// An I/O of random extents over randomly cut memory.
fn random_io(random: &mut Random, arena: &Arena, tag: u64, op: Op, taken: &mut [bool]) -> Io {
    let mut extents = Vec::new();
    for _ in 0..1 + random.next(5) {
        let sectors = 1 + random.next(40);
        let at = random.next(taken.len() - sectors);
        // Writes must not overlap: no engine promises their order.
        if op == Op::Write && taken[at..at + sectors].contains(&true) {
            continue;
        }
        if op == Op::Write {
            taken[at..at + sectors].fill(true);
        }
        extents.push(IoExtent {
            offset: at as u64 * 512,
            len: sectors * 512,
        });
    }
    let mut left: usize = extents.iter().map(|e| e.len / 512).sum();
    let mut blocks: Vec<Block> = Vec::new();
    while left > 0 {
        let sectors = (1 + random.next(30)).min(left);
        let mut block = arena.alloc(sectors * 512).unwrap();
        block.fill(tag as u8 ^ 0x5a);
        blocks.push(block);
        left -= sectors;
    }
    Io::new(op, tag, extents, blocks)
}

fn random_io_is_equal(path: &Path, options: OpenOptions, config: &EngineConfig) {
    random_io_in(path, options, config, &Arena::new(64 << 20).unwrap());
}

fn random_io_in(path: &Path, options: OpenOptions, config: &EngineConfig, arena: &Arena) {
    let data = pattern();
    let mut results: Vec<(String, Vec<u8>)> = Vec::new();
    write_image(path, &data);
    let rules = config
        .faults
        .as_ref()
        .map_or(Vec::new(), |faults| faults.rules());
    for engine in engines(path, options, config) {
        // Each engine gets all faults: the first would use them up.
        if let Some(faults) = &config.faults {
            faults.clear();
            rules.iter().for_each(|rule| faults.add(rule.clone()));
        }
        let mut random = Random(77);
        let mut taken = vec![false; SIZE / 512];
        let reads: Vec<Io> = (0..300)
            .map(|tag| random_io(&mut random, arena, tag, Op::Read, &mut taken))
            .collect();
        let mut bytes = 0;
        for io in run(&*engine, reads).values() {
            assert_eq!(io.error(), None, "{}", engine.name());
            let want: Vec<u8> = io
                .extents
                .iter()
                .flat_map(|e| &data[e.offset as usize..e.offset as usize + e.len])
                .copied()
                .collect();
            assert!(
                memory(io) == want,
                "{}: read {:?}",
                engine.name(),
                io.extents
            );
            bytes += want.len() as u64;
        }
        assert_eq!(engine.stats().read_bytes, bytes);
        let writes: Vec<Io> = (0..100)
            .map(|tag| random_io(&mut random, arena, tag, Op::Write, &mut taken))
            .filter(|io| !io.extents.is_empty())
            .collect();
        for io in run(&*engine, writes).values() {
            assert_eq!(io.error(), None, "{}", engine.name());
        }
        let flushed = run(&*engine, vec![Io::flush(0)]);
        assert_eq!(flushed[&0].error(), None);
        assert_eq!(engine.stats().flushes, 1);
        let name = engine.name().to_owned();
        drop(engine);
        let left = config
            .faults
            .as_ref()
            .map_or(Vec::new(), |faults| faults.rules());
        for (rule, left) in rules.iter().zip(left) {
            assert!(left.times < rule.times, "{name} had no {rule:?}");
        }
        results.push((name, fs::read(path).unwrap()));
        write_image(path, &data);
    }
    assert_eq!(arena.stats().used, 0, "all memory came back");
    for (name, image) in &results[1..] {
        assert!(image == &results[0].1, "{name} wrote something else");
    }
    assert!(results[0].1 != data);
}

fn write_image(path: &Path, data: &[u8]) {
    use std::io::Write;
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .unwrap();
    file.write_all(data).unwrap();
    file.sync_all().unwrap();
}

const WRITE: OpenOptions = OpenOptions {
    write: true,
    direct: false,
    shared: false,
};

/// Memory that is registered, and memory that is not beside it.
#[test]
fn registered_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    write_image(&path, &pattern());
    let arena = Arena::pinned(32 << 20).unwrap();
    let config = EngineConfig {
        memory: Some(arena.clone()),
        ..EngineConfig::default()
    };
    for direct in [false, true] {
        let options = OpenOptions { direct, ..WRITE };
        if direct && Device::open(&path, options).is_err() {
            uvfs_testing::say("no direct I/O here");
            continue;
        }
        random_io_in(&path, options, &config, &arena);
        random_io_in(&path, options, &config, &Arena::new(64 << 20).unwrap());
    }
}

/// Every engine reads and writes the bytes of an image file.
#[test]
fn buffered_image() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    write_image(&path, &pattern());
    random_io_is_equal(&path, WRITE, &EngineConfig::default());
    let narrow = EngineConfig {
        depth: 1,
        ..EngineConfig::default()
    };
    random_io_is_equal(&path, WRITE, &narrow);
}

/// The same with O_DIRECT.
#[test]
fn direct_image() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let path = dir.path().join("image");
    write_image(&path, &pattern());
    let options = OpenOptions {
        direct: true,
        ..WRITE
    };
    // Not while the image is open, and so locked.
    match Device::open(&path, options).map(|device| device.geometry().block) {
        Ok(..=512) => random_io_is_equal(&path, options, &EngineConfig::default()),
        Ok(block) => uvfs_testing::say(format_args!("direct I/O in units of {block}")),
        Err(OpenError::NoDirect(_)) => uvfs_testing::say("no direct I/O here"),
        Err(error) => panic!("{error}"),
    }
}

/// Faults of all kinds are continued, by every engine, without a difference in the outcome.
#[test]
fn short_transfers_and_eagain_are_continued() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    write_image(&path, &pattern());
    let faults = Arc::new(Faults::new());
    for op in [Op::Read, Op::Write] {
        for (start, fault) in [
            (0, Fault::Short(512)),
            (1 << 20, Fault::Again),
            (2 << 20, Fault::Delay(Duration::from_millis(3))),
            (3 << 20, Fault::Short(1024)),
        ] {
            faults.add(Rule {
                op,
                range: start..start + (1 << 20),
                times: 200,
                fault,
            });
        }
    }
    let config = EngineConfig {
        depth: 8,
        faults: Some(faults),
        ..EngineConfig::default()
    };
    random_io_is_equal(&path, WRITE, &config);
}

/// An extent that fails is reported by itself, and the others succeed.
#[test]
fn each_extent_has_its_own_result() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let data = pattern();
    write_image(&path, &data);
    let arena = Arena::new(1 << 20).unwrap();
    let faults = Arc::new(Faults::new());
    let config = EngineConfig {
        faults: Some(faults.clone()),
        ..EngineConfig::default()
    };
    for engine in engines(&path, WRITE, &config) {
        faults.clear();
        faults.add(Rule {
            op: Op::Read,
            range: 8192..8193,
            times: 1,
            fault: Fault::Error(Errno::IO),
        });
        let extents = [0u64, 8192, 65536].map(|offset| IoExtent { offset, len: 4096 });
        let io = Io::new(Op::Read, 5, extents, [arena.alloc(3 * 4096).unwrap()]);
        let done = &run(&*engine, vec![io])[&5];
        let got: Vec<_> = done.results.iter().map(|r| (r.bytes, r.error)).collect();
        assert_eq!(
            got,
            [(4096, None), (0, Some(Errno::IO)), (4096, None)],
            "{}",
            engine.name()
        );
        assert!(memory(done)[8192..] == data[65536..65536 + 4096]);
        assert_eq!(engine.stats().errors, 1);
    }
}

/// An I/O beyond the device, of a wrong length, or a write to a read-only device is refused.
#[test]
fn what_is_wrong_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    write_image(&path, &pattern());
    let arena = Arena::new(1 << 20).unwrap();
    let io = |op, offset, len, memory| {
        Io::new(
            op,
            0,
            [IoExtent { offset, len }],
            [arena.alloc(memory).unwrap()],
        )
    };
    let config = EngineConfig::default();
    for engine in engines(&path, OpenOptions::default(), &config) {
        for (io, want) in [
            (io(Op::Read, SIZE as u64 - 512, 1024, 1024), Errno::NXIO),
            (io(Op::Read, u64::MAX - 100, 512, 512), Errno::NXIO),
            (io(Op::Read, 0, 512, 1024), Errno::INVAL),
            (io(Op::Read, 0, 0, 512), Errno::INVAL),
            (io(Op::Write, 0, 512, 512), Errno::ROFS),
        ] {
            let done = run(&*engine, vec![io]);
            assert_eq!(done[&0].error(), Some(want), "{}", engine.name());
        }
        // The file shrinks behind our back: the end of data is an error, not an endless loop.
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(1000)
            .unwrap();
        let done = run(&*engine, vec![io(Op::Read, 512, 1024, 1024)]);
        assert_eq!(done[&0].results[0].bytes, 488);
        assert_eq!(done[&0].error(), Some(Errno::NODATA));
        write_image(&path, &pattern());
    }
}

/// More is submitted than an engine takes at once, from several threads.
#[test]
fn threads_share_an_engine() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let data = pattern();
    write_image(&path, &data);
    let arena = Arena::new(16 << 20).unwrap();
    let config = EngineConfig {
        depth: 4,
        ..EngineConfig::default()
    };
    for engine in engines(&path, WRITE, &config) {
        let end = Instant::now() + Duration::from_secs(60);
        let total = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (engine, arena, data, total) = (&engine, &arena, &data, &total);
                scope.spawn(move || {
                    let mut ios: Vec<Io> = (0..200)
                        .map(|n| {
                            let offset = (thread * 200 + n) * 4096 % SIZE as u64;
                            let extent = IoExtent { offset, len: 4096 };
                            Io::new(Op::Read, n, [extent], [arena.alloc(4096).unwrap()])
                        })
                        .collect();
                    let mut out = Vec::new();
                    while total.load(std::sync::atomic::Ordering::SeqCst) < 800 {
                        assert!(Instant::now() < end, "{} hangs", engine.name());
                        engine.submit(&mut ios);
                        engine.reap(false, &mut out);
                        for io in out.drain(..) {
                            assert_eq!(io.error(), None);
                            let at = io.extents[0].offset as usize;
                            assert!(memory(&io) == data[at..at + 4096]);
                            total.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert_eq!(engine.in_flight(), 0);
    }
}

/// An engine that is dropped with I/O in flight waits for it: the memory is still the kernel's.
#[test]
fn dropped_engines_wait_for_the_kernel() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    write_image(&path, &pattern());
    let arena = Arena::new(16 << 20).unwrap();
    for engine in engines(&path, WRITE, &EngineConfig::default()) {
        let mut ios: Vec<Io> = (0..100)
            .map(|n| {
                let extent = IoExtent {
                    offset: n * 32768,
                    len: 32768,
                };
                Io::new(Op::Read, n, [extent], [arena.alloc(32768).unwrap()])
            })
            .collect();
        engine.submit(&mut ios);
        drop(ios);
        drop(engine);
        assert_eq!(arena.stats().used, 0);
    }
}

/// A loop device that goes away with its guard.
struct Loop(String);

impl Loop {
    fn attach(image: &Path) -> Option<Loop> {
        let out = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(image)
            .output()
            .ok()?;
        out.status
            .success()
            .then(|| Loop(String::from_utf8_lossy(&out.stdout).trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// A block device has the size and the bytes of its image, and is opened by one at a time.
#[test]
fn loop_device() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    write_image(&image, &pattern());
    let Some(device) = Loop::attach(&image) else {
        return uvfs_testing::skip("needs root and a loop device");
    };
    let path = Path::new(&device.0);
    let first = Device::open(path, WRITE).unwrap();
    assert!(first.is_block_device());
    assert_eq!(first.geometry().size, SIZE as u64);
    assert_eq!(first.geometry().block, 512);
    let error = Device::open(path, WRITE).unwrap_err();
    assert!(
        matches!(error, OpenError::Busy(_)),
        "claimed twice: {error}"
    );
    drop(first);
    random_io_is_equal(path, WRITE, &EngineConfig::default());
    let direct = OpenOptions {
        direct: true,
        ..WRITE
    };
    random_io_is_equal(path, direct, &EngineConfig::default());
}

/// A device that is mounted for writing is refused, and one that is mounted read-only is opened only for reading.
#[test]
fn a_mounted_device_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let made = Command::new("mkfs.ext4").arg("-q").arg(&image).status();
    let at = dir.path().join("at");
    fs::create_dir(&at).unwrap();
    let Some(device) = made
        .is_ok_and(|status| status.success())
        .then(|| Loop::attach(&image))
        .flatten()
    else {
        return uvfs_testing::skip("needs mkfs.ext4 and a loop device");
    };
    let mount = |options: &str| {
        Command::new("mount")
            .args(["-t", "ext4", "-o", options, &device.0])
            .arg(&at)
            .status()
            .is_ok_and(|status| status.success())
    };
    if !mount("rw") {
        return uvfs_testing::skip("may not mount");
    }
    let refused: Vec<_> = [Path::new(&device.0), &image]
        .iter()
        .map(|path| Device::open(path, OpenOptions::default()))
        .collect();
    let shared = OpenOptions {
        shared: true,
        ..OpenOptions::default()
    };
    let allowed = Device::open(&device.0, shared);
    let unmount = || Command::new("umount").arg(&at).status().unwrap().success();
    assert!(unmount());
    for result in refused {
        assert!(
            matches!(result, Err(OpenError::Mounted { .. })),
            "{result:?}"
        );
    }
    allowed.unwrap();
    if mount("ro") {
        let reading = Device::open(&device.0, OpenOptions::default());
        let writing = Device::open(&device.0, WRITE);
        assert!(unmount());
        reading.unwrap();
        assert!(
            matches!(writing, Err(OpenError::Mounted { .. })),
            "{writing:?}"
        );
    }
}
