//! Repairs whose process is killed: the next one ends with a sound file system.
//!
//! A process of this test runs the repair with an engine that kills it when so many writes have reached
//! the image. Needs root, loop devices and xfsprogs.

mod common;
#[path = "common/damages.rs"]
mod damages;
#[path = "common/mutate.rs"]
mod mutate;

use common::*;
use mutate::{MemImage, Random};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use uvfs_buf::Target;
use uvfs_io::device::{Device, Geometry, OpenOptions};
use uvfs_io::engine::{self, Engine, EngineConfig, EngineKind, EngineStats, Io, Op};
use uvfs_xfs::Blocks;
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::check::{CheckOptions, CheckProgress, check};
use uvfs_xfs::repair::{DeviceSink, RepairOptions, repair};

/// Kills the process once this many writes are done.
struct Killing {
    engine: Arc<dyn Engine>,
    left: AtomicUsize,
}

impl Engine for Killing {
    fn name(&self) -> &'static str {
        self.engine.name()
    }
    fn geometry(&self) -> Geometry {
        self.engine.geometry()
    }
    fn depth(&self) -> usize {
        self.engine.depth()
    }
    fn submit(&self, ios: &mut Vec<Io>) {
        self.engine.submit(ios);
    }
    /// The writes that are in flight when it is killed may reach the image, each or not.
    fn reap(&self, wait: bool, out: &mut Vec<Io>) -> usize {
        let before = out.len();
        let n = self.engine.reap(wait, out);
        for io in &out[before..] {
            if io.op == Op::Write && self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
                let me = rustix::process::getpid();
                rustix::process::kill_process(me, rustix::process::Signal::KILL).unwrap();
            }
        }
        n
    }
    fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }
    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }
}

const IMAGE: &str = "UVFS_TEST_KILLED_IMAGE";
const WRITES: &str = "UVFS_TEST_KILLED_WRITES";
const ENGINE: &str = "UVFS_TEST_KILLED_ENGINE";
const THREADS: &str = "UVFS_TEST_KILLED_THREADS";

/// An engine, and how many threads it has.
type Kind = (EngineKind, usize);

/// Every engine: the synchronous one in the caller's thread and with threads of its own.
const ENGINES: [Kind; 4] = [
    (EngineKind::Sync, 0),
    (EngineKind::Sync, 2),
    (EngineKind::Aio, 0),
    (EngineKind::Uring, 0),
];

/// The process that is killed: nothing unless [`killed_after`] started it.
#[test]
fn victim() {
    let Some(image) = std::env::var_os(IMAGE) else {
        return;
    };
    let left = std::env::var(WRITES).unwrap().parse().unwrap();
    let options = OpenOptions {
        write: true,
        ..OpenOptions::default()
    };
    let device = Arc::new(Device::open(Path::new(&image), options).unwrap());
    let kind: EngineKind = std::env::var(ENGINE).unwrap().parse().unwrap();
    let threads = std::env::var(THREADS).unwrap().parse().unwrap();
    let config = EngineConfig {
        threads,
        ..EngineConfig::default()
    };
    let engine = engine::open(kind, device, config).unwrap();
    let engine = Killing {
        engine,
        left: AtomicUsize::new(left),
    };
    let target = Target::with_engine(Arc::new(engine), uvfs_buf::Config::default()).unwrap();
    let blocks: Arc<dyn Blocks> = Arc::new(FileBlocks::open(Path::new(&image)).unwrap());
    let options = RepairOptions {
        zero_log: true,
        ..RepairOptions::default()
    };
    let sink = DeviceSink::through(target);
    let outcome = repair(blocks, Some(&sink), &options, &CheckProgress::default()).unwrap();
    assert_eq!(outcome.left_count, 0, "{:?}", outcome.left);
}

/// Repairs an image in a process of its own, which is killed after so many writes.
fn killed_after(image: &Path, (kind, threads): Kind, writes: usize) -> ExitStatus {
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "victim", "--nocapture"])
        .env(IMAGE, image)
        .env(WRITES, writes.to_string())
        .env(ENGINE, kind.name())
        .env(THREADS, threads.to_string())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    let ended = out.status.success() || out.status.signal() == Some(9);
    assert!(ended, "{:?}: {text}", out.status);
    out.status
}

fn findings(path: &Path) -> Vec<String> {
    let blocks: Arc<dyn Blocks> = Arc::new(FileBlocks::open(path).unwrap());
    let outcome = check(blocks, &CheckOptions::default(), &CheckProgress::default()).unwrap();
    outcome.findings.iter().map(|f| f.to_string()).collect()
}

/// An image whose repair was killed can still be repaired.
#[test]
fn a_killed_repair_is_done_again() {
    if !can_compare() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&["-m", "rmapbt=1", "-d", "agcount=2"]));
    let mount = Mount::new(&image.path(), "rw").unwrap();
    fill_some(mount.path());
    for i in 0..500 {
        fs::write(mount.path().join(format!("file-{i}")), pattern(i, 3000)).unwrap();
    }
    drop(mount);
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let dev = Device::open(image.path(), OpenOptions::default())
        .map(Arc::new)
        .unwrap();
    // Side by side: each mostly waits for other programs.
    std::thread::scope(|scope| {
        for (kind, threads) in ENGINES {
            if let Err(e) = engine::open(kind, dev.clone(), EngineConfig::default()) {
                uvfs_testing::skip(format_args!("{kind}: {e}"));
                continue;
            }
            let (image, mem, regions) = (&image, &mem, &regions);
            scope.spawn(move || kill_and_repair(image, mem, regions, (kind, threads)));
        }
    });
}

/// Kills the repair of damaged copies of an image after each of its writes, and repairs what is left.
fn kill_and_repair(image: &Image, mem: &MemImage, regions: &[mutate::Region], engine: Kind) {
    let (kind, threads) = engine;
    let copy = image.dir().join(format!("damaged-{kind}-{threads}"));
    let mut kills = 0;
    for seed in [1, 2, 3] {
        let mut random = Random(seed);
        let mut damaged = mem.clone();
        let what: Vec<String> = (0..3)
            .map(|_| mutate::damage(&mut damaged, regions, &mut random))
            .collect();
        for writes in 1.. {
            let _ = fs::remove_file(&copy);
            let from = image.path();
            let args = [
                "--sparse=always".as_ref(),
                from.as_os_str(),
                copy.as_os_str(),
            ];
            run::<&OsStr>("cp", &args);
            damages::write_regions(&copy, &damaged, regions);
            let whole = killed_after(&copy, engine, writes).success();
            if !whole {
                kills += 1;
                assert!(killed_after(&copy, engine, usize::MAX).success());
            }
            assert_eq!(
                findings(&copy),
                Vec::<String>::new(),
                "{what:?}, {kind} with {threads} threads, {writes} writes"
            );
            let theirs = ["-n".as_ref(), "-f".as_ref(), copy.as_os_str()];
            run::<&OsStr>("xfs_repair", &theirs);
            if whole {
                break;
            }
        }
    }
    eprintln!("{kind} with {threads} threads: killed {kills} times");
    assert!(kills > 3, "{kind} with {threads} threads: {kills}");
}
