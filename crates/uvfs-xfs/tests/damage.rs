//! The checker against xfs_repair -n: the same verdict on sound images and on damaged ones. And no
//! panic, hang or unbounded memory on any image.
//!
//! Needs root, loop devices and xfsprogs. `UVFS_DAMAGE=full` runs every damage (some minutes);
//! without it a part that takes less than a minute.

mod common;
#[path = "common/damages.rs"]
mod damages;
#[path = "common/mutate.rs"]
mod mutate;
#[path = "damage/verdicts.rs"]
mod verdicts;

use common::*;
use damages::{Damage, all_damages};
use mutate::{Choose, MemImage, Random};
use proptest::prelude::*;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::check::{CheckOptions, CheckOutcome, CheckProgress, Prefetch, check};
use uvfs_xfs::format::LOG_RECORD_MAGIC;
use uvfs_xfs::{Blocks, LogState, Volume};
use verdicts::{How, Tally, judge};

fn check_blocks(blocks: Arc<dyn Blocks>, options: &CheckOptions) -> uvfs_xfs::Result<CheckOutcome> {
    check(blocks, options, &CheckProgress::default())
}

fn check_file(path: &Path, options: &CheckOptions) -> uvfs_xfs::Result<CheckOutcome> {
    check_blocks(Arc::new(FileBlocks::open(path).unwrap()), options)
}

/// The damages that are done: each whose number is a multiple of this. `UVFS_DAMAGE` is `full` or a number.
fn step() -> usize {
    match std::env::var("UVFS_DAMAGE").as_deref() {
        Ok("full") => 1,
        Ok(n) => n.parse().expect("UVFS_DAMAGE is full or a number"),
        Err(_) => 29,
    }
}

fn assert_clean(path: &Path, what: &str) {
    let outcome = check_file(path, &CheckOptions::default()).unwrap();
    for f in &outcome.findings {
        eprintln!("{f}");
    }
    assert_eq!(outcome.count, 0, "{what}");
    assert!(outcome.log.is_clean(), "{what}");
    assert!(!outcome.incomplete);
}

/// A filled image that was sound when it was empty; `None` if this kernel does not mount such.
fn filled(args: &[&str]) -> Option<Image> {
    filled_after(args, |path| assert_clean(path, "empty"))
}

fn base() -> Option<Arc<Image>> {
    base_after(|path| assert_clean(path, "empty"))
}

fn clean(args: &[&str]) {
    if !can_run() {
        return;
    }
    if let Some(image) = filled(args) {
        assert_clean(&image.path(), "filled");
    }
}

/// The checker finds no damage in a sound image.
#[test]
fn clean_default() {
    clean(&[]);
}

/// The same with blocks of 16 KiB.
#[test]
fn clean_16k() {
    clean(&["-b", "size=16384", "-m", "rmapbt=1", "-i", "size=1024"]);
}

/// The same with large directory blocks.
#[test]
fn clean_large_dirs() {
    let args = "-b size=1024 -n size=16384 -m finobt=0,reflink=0 -i sparse=0";
    clean(&args.split(' ').collect::<Vec<_>>());
}

/// The same with the old format.
#[test]
fn clean_v4() {
    if !can_run() {
        return;
    }
    for args in [
        &["-m", "crc=0"][..],
        &["-m", "crc=0", "-n", "ftype=0", "-b", "size=1024"],
        &["-m", "crc=0,finobt=0", "-n", "version=ci"],
    ] {
        if let Some(image) = proto::make(args, &proto::tree(true)) {
            assert_clean(&image.path(), &format!("{args:?}"));
        }
    }
}

/// The same with quotas.
#[test]
fn clean_quota() {
    if !can_run() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&[]));
    match Mount::new(&image.path(), "rw,uquota,gquota,pquota") {
        Ok(m) => fill(m.path(), 4096),
        Err(e) => return uvfs_testing::say(format_args!("this kernel has no quota: {e}")),
    }
    assert_clean(&image.path(), "quota");
}

/// The ways to read and the bound on memory change nothing.
#[test]
fn same_findings_in_every_way() {
    let Some(image) = base() else { return };
    let path = image.path();
    let options = |prefetch, threads, memory| CheckOptions {
        threads,
        prefetch,
        memory,
        ..CheckOptions::default()
    };
    let once = check_file(&path, &options(Prefetch::Large, 1, None)).unwrap();
    assert_eq!((once.passes, once.count), (1, 0));
    let several = check_file(&path, &options(Prefetch::Exact, 3, Some(1))).unwrap();
    // Groups are cut in parts, too.
    assert!(several.passes > image.open().geometry().agcount as usize);
    assert_eq!((several.count, several.inodes), (0, once.inodes));
    let mem = MemImage::load(&path).unwrap();
    let regions = mutate::regions(&mem);
    let mut random = Random(7);
    for i in 0..40 {
        let mut damaged = mem.clone();
        let what = mutate::damage(&mut damaged, &regions, &mut random);
        let blocks: Arc<dyn Blocks> = Arc::new(damaged);
        let run = |o: CheckOptions| {
            check_blocks(blocks.clone(), &o).map_or_else(
                |e| vec![e.to_string()],
                |o| o.findings.iter().map(|f| f.to_string()).collect(),
            )
        };
        let a = run(options(Prefetch::Large, 1, None));
        let b = run(options(Prefetch::Exact, 4, None));
        assert_eq!(a, b, "{what}");
        // That takes many passes.
        if i % 20 == 0 {
            let c = run(options(Prefetch::Exact, 2, Some(1)));
            assert_eq!(a.is_empty(), c.is_empty(), "{what}: {a:?} {c:?}");
        }
    }
}

/// One bad sector hides what is in it, and not what is read with it.
#[test]
fn reading_ahead_hides_nothing() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let mut random = Random(11);
    for i in 0..30 {
        let mut damaged = mem.clone();
        let what = mutate::damage(&mut damaged, &regions, &mut random);
        let bad = regions[random.below(regions.len() as u64) as usize];
        // The superblock has to be read.
        let bad = match bad.offset {
            0 => 0..0,
            at if i % 3 != 0 => at..at + 512,
            _ => 0..0,
        };
        let run = |ahead, prefetch| {
            let blocks = mutate::Partly {
                image: damaged.clone(),
                bad: bad.clone(),
                ahead,
            };
            let options = CheckOptions {
                threads: 1,
                prefetch,
                ..CheckOptions::default()
            };
            check_blocks(Arc::new(blocks), &options).map_or_else(
                |e| vec![e.to_string()],
                |o| o.findings.iter().map(|f| f.to_string()).collect(),
            )
        };
        let plain = run(false, Prefetch::Exact);
        assert_eq!(plain, run(true, Prefetch::Exact), "{what}, bad {bad:?}");
        assert_eq!(plain, run(true, Prefetch::Large), "{what}, bad {bad:?}");
    }
}

/// Changes of every kind, until told to stop or the file system is shut down.
fn busy(root: &Path, worker: usize, stop: &AtomicBool, count: &AtomicUsize) {
    let dir = root.join(format!("busy-{worker}"));
    let step = || -> std::io::Result<()> {
        fs::create_dir_all(&dir)?;
        for round in 0.. {
            for i in 0..40 {
                if stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                count.fetch_add(1, Ordering::Relaxed);
                let path = dir.join(entry_name(i));
                match (round + i) % 5 {
                    0 => fs::write(&path, pattern(i as u64, 100 * i * (round + 1)))?,
                    1 => fs::rename(&path, dir.join(format!("{round}-{i}")))?,
                    2 => File::create(&path)?.write_all_at(b"far", 1 << 20)?,
                    3 => {
                        let _ = fs::hard_link(&path, dir.join(format!("link-{round}-{i}")));
                    }
                    _ => fs::remove_file(&path)?,
                }
            }
            if round % 8 == 7 {
                File::open(&dir)?.sync_all()?;
            }
        }
        Ok(())
    };
    // Names that are not there, a full device and the shutdown are all the same here.
    while !stop.load(Ordering::Relaxed) {
        let _ = step();
    }
}

/// The copies of a file system that is at work, and what is left of it after it was shut down, with or without its log.
struct Crash {
    image: Image,
    copies: Vec<PathBuf>,
}

impl Crash {
    fn new(args: &[&str], keeps_log: bool) -> Self {
        let image = Image::new();
        assert!(image.mkfs(args), "mkfs.xfs {args:?}");
        let mount = Mount::new(&image.path(), "rw").unwrap();
        let (stop, count) = (AtomicBool::new(false), AtomicUsize::new(0));
        let copies = std::thread::scope(|s| {
            for worker in 0..2 {
                let (root, stop, count) = (mount.path(), &stop, &count);
                s.spawn(move || busy(root, worker, stop, count));
            }
            let work = |steps: usize| {
                let until = count.load(Ordering::Relaxed) + steps;
                let start = Instant::now();
                while count.load(Ordering::Relaxed) < until {
                    assert!(start.elapsed() < Duration::from_secs(300), "no progress");
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            work(300);
            freeze_and_thaw(mount.path());
            let copies: Vec<PathBuf> = (0..3)
                .map(|i| {
                    work(100);
                    rustix::fs::syncfs(File::open(mount.path()).unwrap()).unwrap();
                    copy(&image, &format!("copy-{i}"))
                })
                .collect();
            shut_down(mount.path(), keeps_log);
            stop.store(true, Ordering::Relaxed);
            copies
        });
        drop(mount);
        Crash { image, copies }
    }
}

/// A copy of an image, beside it.
fn copy(image: &Image, name: &str) -> PathBuf {
    let (from, to) = (image.path(), image.dir().join(name));
    let sparse = OsStr::new("--sparse=always");
    run("cp", &[sparse, from.as_os_str(), to.as_os_str()]);
    to
}

/// Writes everything in place: what comes later is in the log only.
fn freeze_and_thaw(mount: &Path) {
    for flag in ["-f", "-u"] {
        run("xfs_freeze", &[OsStr::new(flag), mount.as_os_str()]);
    }
}

fn shut_down(mount: &Path, keeps_log: bool) {
    let how = if keeps_log { "shutdown -f" } else { "shutdown" };
    let arguments = ["-x", "-c", how].map(OsStr::new);
    run("xfs_io", &[&arguments[..], &[mount.as_os_str()]].concat());
}

/// Where the log is, in bytes, and its head, in blocks of 512 bytes: it has not been once around.
fn dirty_log(path: &Path) -> (u64, u64) {
    let volume = Volume::open(Arc::new(FileBlocks::open(path).unwrap())).unwrap();
    let LogState::Replayed { head, .. } = *volume.log() else {
        panic!("{:?}", volume.log());
    };
    let g = volume.geometry();
    (g.daddr(g.fsb(g.logstart).unwrap()) * 512, head)
}

/// Images that were cut off in the middle of work: copied while the kernel writes, shut down with
/// and without the log, and with the end of the log missing. The log is dirty for both, and what
/// else is wrong or not is the same; replayed, both find them sound.
#[test]
fn crashes() {
    if !can_compare() {
        return;
    }
    let tally = Mutex::new(Tally::default());
    for (round, args) in [
        &["-b", "size=1024", "-m", "rmapbt=1,reflink=1"][..],
        &["-m", "rmapbt=0"],
        &["-m", "finobt=0", "-i", "sparse=0"],
    ]
    .into_iter()
    .enumerate()
    {
        let crash = Crash::new(args, round % 2 == 0);
        for (i, path) in crash.copies.iter().enumerate() {
            judge(path, format!("{args:?}, copy {i}"), How::Torn, &tally);
        }
        let crashed = copy(&crash.image, "crashed");
        judge(&crashed, format!("{args:?}, shut down"), How::Cut, &tally);
        let (log, head) = dirty_log(&crashed);
        // The end of the last write is missing: what was there before is zeros.
        for blocks in [1, 3, 7] {
            let cut = copy(&crash.image, "cut");
            let file = File::options().write(true).open(&cut).unwrap();
            let zeros = vec![0; blocks * 512];
            let at = log + (head - blocks as u64) * 512;
            file.write_all_at(&zeros, at).unwrap();
            let name = format!("{args:?}, without {blocks} blocks of the log");
            judge(&cut, name, How::Cut, &tally);
        }
        drop(Mount::new(&crashed, "rw,nouuid").unwrap());
        assert_clean(&crashed, "replayed");
        judge(&crashed, format!("{args:?}, replayed"), How::Whole, &tally);
    }
    let t = tally.into_inner().unwrap();
    eprintln!(
        "{} crashes: {} with a dirty log, {} with findings, {} differ for a known reason",
        t.done,
        t.dirty,
        t.corrupt,
        t.explained.len()
    );
    for e in &t.explained {
        eprintln!("differs for a known reason: {e}");
    }
    assert!(t.wrong.is_empty(), "{}", t.wrong.join("\n"));
    assert!(t.dirty >= 3, "{}", t.dirty);
}

/// An image with many small records in its log, and the blocks of the log in which they begin.
fn many_records() -> (Image, Vec<usize>) {
    let image = Image::new();
    assert!(image.mkfs(&[]));
    let mount = Mount::new(&image.path(), "rw").unwrap();
    freeze_and_thaw(mount.path());
    // Each is a record at least.
    for i in 0..40 {
        let file = File::create(mount.path().join(format!("file-{i}"))).unwrap();
        file.sync_all().unwrap();
    }
    shut_down(mount.path(), true);
    drop(mount);
    let (log, head) = dirty_log(&image.path());
    let mut bytes = vec![0; head as usize * 512];
    File::open(image.path())
        .unwrap()
        .read_exact_at(&mut bytes, log)
        .unwrap();
    let starts = |b: &&[u8]| b[..4] == LOG_RECORD_MAGIC.to_be_bytes();
    let blocks = bytes.chunks_exact(512).enumerate();
    let records = blocks.filter(|(_, b)| starts(b)).map(|(i, _)| i).collect();
    (image, records)
}

/// A record of the log with a bit flipped is the end of the log if it is among the last, and damage
/// further back, as for the kernel.
#[test]
fn damaged_records_of_the_log() {
    if !can_compare() {
        return;
    }
    let (image, records) = many_records();
    let crashed = &image.path();
    let (log, _) = dirty_log(crashed);
    let state = |path: &Path| {
        let volume = Volume::open(Arc::new(FileBlocks::open(path).unwrap())).unwrap();
        volume.log().clone()
    };
    let LogState::Replayed {
        tail, torn: false, ..
    } = state(crashed)
    else {
        panic!("{:?}", state(crashed));
    };
    let about_log = |path: &Path| {
        let outcome = check_file(path, &CheckOptions::default()).unwrap();
        let about: Vec<String> = outcome.findings.iter().map(|f| f.to_string()).collect();
        about.into_iter().find(|f| f.starts_with("log: "))
    };
    assert_eq!(about_log(crashed), None);
    let flip = |record: usize| {
        let path = copy(&image, "flipped");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        // In the header, beyond what is looked at otherwise.
        let at = log + record as u64 * 512 + 100;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
        path
    };
    let last = *records.last().unwrap();
    let path = flip(last);
    match state(&path) {
        LogState::Replayed { head, torn, .. } => assert_eq!((head, torn), (last as u64, true)),
        // The record before was an unmount.
        other => assert!(other.is_clean(), "{other:?}"),
    }
    assert_eq!(about_log(&path), None);
    drop(Mount::new(&path, "rw,nouuid").expect("the kernel leaves out the last record"));
    // One that is still needed, before the last ones.
    let first = records.iter().position(|r| *r as u64 == tail).unwrap();
    assert!(records.len() - first > 12, "{records:?}, tail {tail}");
    let path = flip(records[first + 1]);
    assert!(matches!(state(&path), LogState::Dirty { tail: t, .. } if t == tail));
    let found = about_log(&path).expect("damage of the log");
    assert!(found.contains(&records[first + 1].to_string()), "{found}");
    assert!(
        Mount::new(&path, "rw,nouuid").is_err(),
        "the kernel replays a damaged record"
    );
}

/// Reads a damaged image in every way.
fn read_everything(blocks: &Arc<dyn Blocks>) {
    let Ok(v) = Volume::open(blocks.clone()) else {
        return;
    };
    let root = v.geometry().rootino;
    let mut seen = std::collections::BTreeSet::from([root]);
    let mut todo = vec![root];
    let mut buf = vec![0; 65536];
    while let Some(ino) = todo.pop() {
        let Ok(inode) = v.inode(ino) else { continue };
        let _ = v.xattr_names(&inode, &mut |_| true);
        let _ = v.readlink(&inode);
        let _ = v.read(&inode, 0, &mut buf);
        let _ = v.lookup(&inode, b"entry-00007-");
        let _ = v.readdir(&inode, 0, &mut |e| {
            if seen.len() < 300 && seen.insert(e.ino) {
                todo.push(e.ino);
            }
            true
        });
    }
    let mut out = Bounded(64 << 20);
    let trust = uvfs_xfs::tools::Trust::TRUSTED;
    let _ = uvfs_xfs::tools::archive(&v, b"/", &mut out, trust, &mut |_, _| {});
    let _ = uvfs_xfs::tools::expand(&v, b"/*/*[0-9]*");
}

/// Takes so many bytes.
struct Bounded(usize);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let left = self.0.checked_sub(bytes.len());
        self.0 = left.ok_or(std::io::ErrorKind::StorageFull)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A small image of many shapes, in memory.
fn small() -> Option<&'static (MemImage, Vec<mutate::Region>)> {
    static SMALL: OnceLock<Option<(MemImage, Vec<mutate::Region>)>> = OnceLock::new();
    SMALL
        .get_or_init(|| {
            let image = base()?;
            let mem = MemImage::load(&image.path()).unwrap();
            let regions = mutate::regions(&mem);
            Some((mem, regions))
        })
        .as_ref()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// A damaged image neither crashes nor hangs `uvfs check` or a mount of it.
    #[test]
    fn no_panic_no_hang(seed: u64, count in 1usize..6) {
        if let Some((mem, regions)) = small() {
            let mut damaged = mem.clone();
            let mut random = Random(seed);
            for _ in 0..count {
                mutate::damage(&mut damaged, regions, &mut random);
            }
            if seed % 16 == 0 {
                damaged.truncate(random.below(mem.size()));
            }
            let blocks: Arc<dyn Blocks> = Arc::new(damaged);
            let start = Instant::now();
            let options = CheckOptions { threads: 1, ..CheckOptions::default() };
            let _ = check_blocks(blocks.clone(), &options);
            read_everything(&blocks);
            prop_assert!(start.elapsed() < Duration::from_secs(120));
        }
    }
}
