//! Dirty logs that are replayed, against the kernel and xfs_repair.
//!
//! An image is used at random and cut off, many times. What the kernel shows of a copy after it has mounted it
//! is what the reader shows without a mount; and a repair leaves what xfs_repair finds sound and the kernel
//! mounts. Needs root, loop devices and xfsprogs.

mod common;
#[path = "replay/damaged.rs"]
mod damaged;
#[path = "replay/intents.rs"]
mod intents;
#[path = "common/mutate.rs"]
mod mutate;
#[path = "common/sink.rs"]
mod sink;
#[path = "replay/workload.rs"]
mod workload;

use common::*;
use mutate::{Choose, LogRecord, MemImage, Random, damage_log, log_records};
use proptest::prelude::*;
use sink::FileSink;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::check::{CheckOptions, CheckProgress, check};
use uvfs_xfs::format::INCOMPAT_EXCHRANGE;
use uvfs_xfs::repair::{Change, RepairOptions, RepairOutcome, Sink, repair};
use uvfs_xfs::{Blocks, LogState, Volume};

/// Features of images: arguments of mkfs.xfs, and options of mounts. Most logs are as small as they can be, so that
/// they are gone around, which mkfs.xfs wants to be told twice.
const KINDS: [(&str, &str); 11] = [
    ("-m reflink=1", ""),
    ("-m rmapbt=1,reflink=1 -b size=1024", ""),
    (
        "--unsupported -l size=13m -m rmapbt=1,reflink=1",
        "logbsize=256k",
    ),
    (
        "--unsupported -l size=6m -m finobt=0,reflink=0 -i sparse=0",
        "",
    ),
    ("--unsupported -l size=8m,su=64k", ""),
    (
        "--unsupported -l size=25m,su=256k -m rmapbt=1",
        "logbsize=256k",
    ),
    ("-m reflink=1 -l su=4k", "logbsize=64k"),
    (
        "--unsupported -l size=6m -b size=1024 -m rmapbt=1,reflink=1",
        "logbsize=32k",
    ),
    (
        "--unsupported -l size=6m -b size=1024 -n size=4096 -s size=1024",
        "",
    ),
    (
        "--unsupported -l size=17m -i nrext64=1,size=1024 -s size=4096",
        "logbsize=128k",
    ),
    (
        "--unsupported -l size=6m -m bigtime=0,inobtcount=0 -i nrext64=0",
        "logbsize=16k",
    ),
];

fn open(path: &Path) -> Arc<dyn Blocks> {
    Arc::new(FileBlocks::open(path).unwrap())
}

fn copied(from: &Path, to: &Path) {
    let _ = fs::remove_file(to);
    let sparse = OsStr::new("--sparse=always");
    run("cp", &[sparse, from.as_os_str(), to.as_os_str()]);
}

/// Repairs an image; with its log replayed.
fn mend(path: &Path) -> RepairOutcome {
    let sink = FileSink::open(path);
    let options = RepairOptions::default();
    repair(open(path), Some(&sink), &options, &CheckProgress::default()).unwrap()
}

/// What went on in a series of points.
#[derive(Debug, Default)]
struct Seen {
    points: usize,
    /// Those that the kernel did not get over itself.
    kernel_failed: usize,
    inodes: usize,
    transactions: u64,
    /// What the log announced.
    finished: BTreeMap<&'static str, usize>,
    findings: u64,
    mended: u64,
}

/// Judges an image that was cut off. Then it is what the kernel makes of it.
fn judge(image: &Image, seen: &mut Seen) {
    let (cut, theirs, ours) = (
        image.path(),
        image.dir().join("theirs"),
        image.dir().join("ours"),
    );
    let volume = Volume::open(open(&cut)).unwrap();
    let finished = match volume.log() {
        LogState::Replayed {
            transactions,
            finished,
            unfinished,
            ..
        } => {
            seen.transactions += transactions;
            assert_eq!(unfinished, &[""; 0], "after {finished:?}");
            finished.clone()
        }
        LogState::Clean => Vec::new(),
        other => panic!("{other:?}: {:?}", volume.warnings()),
    };
    for what in &finished {
        *seen.finished.entry(what).or_default() += 1;
    }
    copied(&cut, &theirs);
    let mount = Mount::new(&theirs, "rw,noatime,nouuid").unwrap();
    // A kernel that frees an unlinked inode may find the blocks of its attributes in other use, and shuts down: it had
    // freed them before, in a transaction of their own.
    let works = fs::metadata(mount.path()).is_ok();
    if works {
        seen.inodes += compare_trees(&volume, mount.path(), finished.is_empty());
    }
    drop(mount);
    let checked = check(
        open(&cut),
        &CheckOptions::default(),
        &CheckProgress::default(),
    );
    let checked = checked.unwrap();
    seen.findings += checked.count;
    // The kernel leaves an attribute whose value was not written yet; a repair takes it away.
    let found: Vec<String> = checked.findings.iter().map(ToString::to_string).collect();
    let (incomplete, others): (Vec<_>, Vec<_>) =
        (found.iter()).partition(|f| f.ends_with("was left incomplete"));
    assert!(others.is_empty(), "after {finished:?}: {others:?}");
    seen.points += 1;
    seen.kernel_failed += usize::from(!works);
    if volume.geometry().features.parent {
        return fs::rename(theirs, &cut).unwrap();
    }
    copied(&cut, &ours);
    let outcome = mend(&ours);
    assert_eq!(outcome.left_count, 0, "{:?}", outcome.left);
    seen.mended += outcome.found_count;
    // An old xfs_repair does not know it; it changes nothing of what is on disk.
    intents::set_features(&ours, INCOMPAT_EXCHRANGE, false);
    assert_eq!(xfs_repair_n(&ours), None);
    let mount = Mount::new(&ours, "rw,noatime,nouuid").expect("the kernel mounts what was mended");
    // Readers see the same before and after the repair.
    if incomplete.is_empty() {
        compare_trees(&volume, mount.path(), finished.is_empty());
    }
    drop(mount);
    fs::rename(if works { theirs } else { ours }, &cut).unwrap();
    assert!(seen.kernel_failed < 3, "{seen:?}");
}

/// Ends a mount as if the machine had lost its power, once what is in the log in memory was written or without that.
fn cut_off(mount: &Path, flush: bool) {
    let how = if flush { "shutdown -f" } else { "shutdown" };
    let args = ["-x", "-c", how].map(OsStr::new);
    run("xfs_io", &[&args[..], &[mount.as_os_str()]].concat());
}

/// Takes so many of the last blocks of the log away that it ends anywhere, also within a record: as if the image had
/// been cut off earlier. The log must not have been gone around.
fn tear(path: &Path, random: &mut Random) {
    if let LogState::Replayed { head, tail, .. } = *Volume::open(open(path)).unwrap().log()
        && head > tail + 1
    {
        tear_at(path, head - random.below(head - tail - 1));
    }
}

/// Takes the blocks of a dirty log from `end` on away.
fn tear_at(path: &Path, end: u64) {
    let volume = Volume::open(open(path)).unwrap();
    let g = volume.geometry();
    if let LogState::Replayed { head, tail, .. } = *volume.log()
        && (tail + 1..head).contains(&end)
    {
        let log = g.daddr(g.fsb(g.logstart).unwrap()) * 512;
        let file = File::options().write(true).open(path).unwrap();
        let zeros = vec![0; (head - end) as usize * 512];
        file.write_all_at(&zeros, log + end * 512).unwrap();
    }
}

/// Uses an image at random and cuts it off, so many times.
fn series(kind: usize, seed: u64, points: usize) -> Result<Seen, String> {
    let (args, options) = KINDS[kind];
    let image = Image::new();
    let mut seen = Seen::default();
    let all: Vec<&str> = args.split(' ').collect();
    assert!(image.mkfs(&all), "mkfs.xfs {args}");
    let mut random = Random(seed);
    let comma = if options.is_empty() { "" } else { "," };
    for point in 0..points {
        let options = format!("rw,nouuid{comma}{options}");
        let mount = Mount::new(&image.path(), &options)?;
        let count = 1 << (3 + random.below(10));
        let seeds = [random.next(), random.next()];
        let flush = random.below(2) == 0;
        let at = mount.path();
        // Half of the time the two are cut off in the middle of it.
        let early = (random.below(2) == 0).then(|| Duration::from_millis(random.below(400)));
        let held = std::thread::scope(|scope| {
            let work = |seed| move || workload::work(at, &mut Random(seed), count);
            let both = seeds.map(|seed| scope.spawn(work(seed)));
            if early.is_some() {
                // Each fsync writes what is in the log in memory, also within what other threads do in several
                // transactions.
                scope.spawn(move || workload::sync_until_it_fails(at));
                scope.spawn(move || workload::share_until_it_fails(at));
            }
            if let Some(early) = early {
                std::thread::sleep(early);
                cut_off(at, flush);
            }
            both.map(|work| work.join().unwrap())
        });
        if early.is_none() {
            cut_off(at, flush);
        }
        drop(held);
        drop(mount);
        let cut = image.dir().join("kept");
        copied(&image.path(), &cut);
        let judged = catch_unwind(AssertUnwindSafe(|| judge(&image, &mut seen)));
        if let Err(panic) = judged {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| Some((*panic.downcast_ref::<&str>()?).into()));
            if let Some(keep) = std::env::var_os("UVFS_KEEP") {
                let name = format!("kind-{kind}-seed-{seed}-point-{point}");
                copied(&cut, &Path::new(&keep).join(name));
            }
            let said = said.unwrap_or_default();
            return Err(format!("{args}, seed {seed}, point {point}: {said}"));
        }
    }
    Ok(seen)
}

/// Points at which images of all kinds are cut off. The long variant does a thousand.
#[test]
fn the_kernel_shows_the_same() {
    if !can_compare() {
        return;
    }
    let (points, seeds) = if uvfs_testing::full() {
        (28, 4)
    } else {
        (3, 1)
    };
    let mut wrong = Vec::new();
    for seed in 0..seeds {
        for (kind, (args, options)) in KINDS.iter().enumerate() {
            match series(kind, seed, points) {
                Ok(seen) => eprintln!("{args} {options}: {seen:?}"),
                Err(why) => wrong.push(why),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// One log that ends at many places, most of them within what takes several transactions.
#[test]
fn every_end_of_a_log() {
    if !can_compare() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&["-m", "rmapbt=1,reflink=1", "-b", "size=1024"]));
    let mount = Mount::new(&image.path(), "rw").unwrap();
    let at = mount.path();
    std::thread::scope(|scope| {
        scope.spawn(move || workload::sync_until_it_fails(at));
        scope.spawn(move || workload::share_until_it_fails(at));
        scope.spawn(move || workload::work(at, &mut Random(8), 100));
        std::thread::sleep(Duration::from_millis(400));
        cut_off(at, true);
    });
    drop(mount);
    let whole = image.dir().join("whole");
    fs::rename(image.path(), &whole).unwrap();
    let mut seen = Seen::default();
    let mut random = Random(2);
    for _ in 0..if uvfs_testing::full() { 200 } else { 5 } {
        copied(&whole, &image.path());
        tear(&image.path(), &mut random);
        judge(&image, &mut seen);
    }
    eprintln!("{seen:?}");
}

/// Fails after so many writes.
struct Failing {
    sink: FileSink,
    left: AtomicUsize,
}

impl Sink for Failing {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let taken = |left: usize| left.checked_sub(1);
        let left = self.left.fetch_update(Relaxed, Relaxed, taken);
        left.map_err(|_| io::Error::other("cut off"))?;
        self.sink.write(offset, bytes)
    }

    fn flush(&self) -> io::Result<()> {
        self.sink.flush()
    }
}

/// A repair that is cut off while it replays or afterwards is done again, and nothing is lost.
#[test]
fn a_repair_that_is_cut_off() {
    if !can_compare() {
        return;
    }
    let image = Image::new();
    // The repair has only the inodes to free: of an attribute that was not complete it would give up the block.
    for seed in 4.. {
        assert!(image.mkfs(&["-m", "rmapbt=1,reflink=1"]));
        let mount = Mount::new(&image.path(), "rw").unwrap();
        let held = workload::work(mount.path(), &mut Random(seed), 700);
        assert!(!held.is_empty(), "some inodes are unlinked");
        cut_off(mount.path(), true);
        drop((held, mount));
        let options = CheckOptions::default();
        let checked = check(open(&image.path()), &options, &CheckProgress::default());
        if checked.unwrap().count == 0 {
            break;
        }
    }
    let whole = image.dir().join("whole");
    fs::rename(image.path(), &whole).unwrap();
    let volume = Volume::open(open(&whole)).unwrap();
    let mut cut = 0;
    let mut writes = 1;
    loop {
        copied(&whole, &image.path());
        let sink = Failing {
            sink: FileSink::open(&image.path()),
            left: writes.into(),
        };
        let options = RepairOptions::default();
        let blocks = open(&image.path());
        let done = repair(blocks, Some(&sink), &options, &CheckProgress::default());
        let outcome = mend(&image.path());
        assert_eq!(outcome.left_count, 0, "{writes} writes: {:?}", outcome.left);
        let lost = |c: &&Change| c.to_string().contains("lost+found");
        assert_eq!(outcome.changes.iter().find(lost), None, "{writes} writes");
        assert_eq!(xfs_repair_n(&image.path()), None, "{writes} writes");
        let mount = Mount::new(&image.path(), "rw,noatime,nouuid").unwrap();
        compare(&volume, mount.path());
        if done.is_ok() {
            break;
        }
        cut += 1;
        writes += if uvfs_testing::full() {
            1
        } else {
            1 + writes / 2
        };
    }
    assert!(cut > 4, "{cut}");
}

/// A log that tells of groups that were added.
#[test]
fn a_file_system_that_grew() {
    if !can_compare() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&["-d", "size=310m"]));
    let mount = Mount::new(&image.path(), "rw").unwrap();
    run("xfs_growfs", &[mount.path()]);
    for i in 0..40 {
        let dir = mount.path().join(format!("dir-{i}"));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("file"), pattern(i, 100_000)).unwrap();
    }
    cut_off(mount.path(), true);
    drop(mount);
    let blocks = image.open().geometry().dblocks;
    assert_eq!(blocks, 400 << 8);
    let mut seen = Seen::default();
    judge(&image, &mut seen);
    assert!(seen.inodes > 80, "{seen:?}");
}

/// A dirty log on another device: it is asked for and read from there.
#[test]
fn a_log_on_another_device() {
    if !can_compare() {
        return;
    }
    let image = Image::new();
    let log = image.dir().join("log");
    for (path, size) in [(&image.path(), 400), (&log, 80)] {
        File::create(path).unwrap().set_len(size << 20).unwrap();
    }
    let attach = |path: &Path| {
        let args = ["-f", "--show"].map(OsStr::new);
        let said = run("losetup", &[&args[..], &[path.as_os_str()]].concat());
        said.trim().to_string()
    };
    let devices = [attach(&image.path()), attach(&log)];
    let [of_image, of_log] = &devices;
    let logdev = format!("logdev={of_log}");
    run(
        "mkfs.xfs",
        &["-q", "-f", "-l", &format!("{logdev},size=70m"), of_image],
    );
    let mount = Mount::new(Path::new(of_image), &format!("rw,{logdev}"));
    let mount = mount.unwrap();
    fs::create_dir(mount.path().join("dir")).unwrap();
    cut_off(mount.path(), true);
    drop(mount);
    for device in &devices {
        run("losetup", &["-d", device]);
    }
    assert!(matches!(
        Volume::open(open(&image.path())),
        Err(uvfs_xfs::Error::LogDevice)
    ));
    let both = || -> Arc<dyn Blocks> {
        Arc::new(uvfs_xfs::blocks::WithLog::new(
            open(&image.path()),
            open(&log),
        ))
    };
    let volume = Volume::open(both()).unwrap();
    assert!(matches!(volume.log(), LogState::Replayed { .. }));
    assert!(volume.resolve(b"/dir", false).unwrap().is_dir());
}

/// An image with a dirty log, in memory, and the records of its log.
fn dirty() -> Option<&'static (MemImage, Vec<LogRecord>)> {
    static DIRTY: OnceLock<Option<(MemImage, Vec<LogRecord>)>> = OnceLock::new();
    let made = DIRTY.get_or_init(|| {
        if !can_compare() {
            return None;
        }
        let image = Image::new();
        let args = ["-b", "size=1024", "-m", "rmapbt=1,reflink=1"];
        assert!(image.mkfs(&args));
        let mount = Mount::new(&image.path(), "rw").unwrap();
        let held = workload::work(mount.path(), &mut Random(3), 600);
        cut_off(mount.path(), true);
        drop((held, mount));
        let volume = image.open();
        let replayed = matches!(volume.log(), LogState::Replayed { .. });
        assert!(replayed, "{:?}", volume.log());
        let mem = MemImage::load(&image.path()).unwrap();
        let records = log_records(&mem, volume.geometry());
        Some((mem, records))
    });
    made.as_ref()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// A damaged log is replayed or refused; the reader, the check and the repair neither crash nor hang.
    #[test]
    fn hostile_logs(seed: u64, count in 1usize..6) {
        if let Some((mem, records)) = dirty() {
            let mut damaged = mem.clone();
            let mut random = Random(seed);
            for _ in 0..count {
                damage_log(&mut damaged, records, &mut random);
            }
            if seed % 16 == 0 {
                damaged.truncate(random.below(mem.size()));
            }
            let blocks: Arc<dyn Blocks> = Arc::new(damaged);
            let start = Instant::now();
            let options = CheckOptions { threads: 1, ..CheckOptions::default() };
            let _ = check(blocks.clone(), &options, &CheckProgress::default());
            if let Ok(volume) = Volume::open(blocks.clone()) {
                let root = volume.inode(volume.geometry().rootino);
                let _ = root.and_then(|root| volume.readdir(&root, 0, &mut |_| true));
            }
            let options = RepairOptions { check: options, ..RepairOptions::default() };
            if seed % 4 == 0 {
                let _ = repair(blocks, None, &options, &CheckProgress::default());
            }
            prop_assert!(start.elapsed() < Duration::from_secs(120));
        }
    }
}
