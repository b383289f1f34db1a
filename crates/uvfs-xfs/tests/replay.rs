//! Dirty logs that are replayed, against the kernel and xfs_repair.
//!
//! An image is used at random and cut off, many times. What the kernel shows of a copy after it has mounted it
//! is what the reader shows without a mount; and a repair leaves what xfs_repair finds sound and the kernel
//! mounts. Needs root, loop devices and xfsprogs.

mod common;
#[path = "common/mutate.rs"]
mod mutate;
#[path = "common/sink.rs"]
mod sink;
#[path = "replay/workload.rs"]
mod workload;

use common::*;
use mutate::{Choose, Random};
use sink::FileSink;
use std::ffi::OsStr;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::check::{CheckOptions, CheckProgress, check};
use uvfs_xfs::repair::{RepairOptions, RepairOutcome, repair};
use uvfs_xfs::{Blocks, LogState, Volume};

/// Features of images: arguments of mkfs.xfs, and options of mounts.
const KINDS: [(&[&str], &str); 9] = [
    (&[], ""),
    (&["-m", "rmapbt=1,reflink=1"], ""),
    (
        &["-m", "finobt=0,reflink=0", "-i", "sparse=0"],
        "logbsize=256k",
    ),
    (&["-l", "su=64k"], ""),
    (&["-l", "su=4k"], "logbsize=64k"),
    (
        &["-b", "size=1024", "-m", "rmapbt=1,reflink=1"],
        "logbsize=32k",
    ),
    (&["-b", "size=1024", "-n", "size=4096"], ""),
    (
        &["-i", "nrext64=1,size=1024", "-m", "bigtime=1"],
        "logbsize=128k",
    ),
    (
        &["-m", "bigtime=0,inobtcount=0", "-i", "nrext64=0"],
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
    inodes: usize,
    transactions: u64,
    unfinished: usize,
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
    let unfinished = match volume.log() {
        LogState::Replayed {
            transactions,
            unfinished,
            ..
        } => {
            seen.transactions += transactions;
            unfinished.len()
        }
        LogState::Clean => 0,
        other => panic!("{other:?}: {:?}", volume.warnings()),
    };
    seen.unfinished += unfinished;
    copied(&cut, &theirs);
    let mount = Mount::new(&theirs, "rw,noatime,nouuid").unwrap();
    seen.inodes += compare(&volume, mount.path());
    drop(mount);
    let checked = check(
        open(&cut),
        &CheckOptions::default(),
        &CheckProgress::default(),
    );
    let checked = checked.unwrap();
    seen.findings += checked.count;
    if unfinished == 0 {
        let found: Vec<String> = checked.findings.iter().map(ToString::to_string).collect();
        assert!(found.is_empty(), "{found:?}");
    }
    copied(&cut, &ours);
    let outcome = mend(&ours);
    assert_eq!(outcome.left_count, 0, "{:?}", outcome.left);
    seen.mended += outcome.found_count;
    assert_eq!(xfs_repair_n(&ours), None);
    let mount = Mount::new(&ours, "rw,noatime,nouuid").expect("the kernel mounts what was mended");
    // Readers see the same before and after the repair.
    compare(&volume, mount.path());
    drop(mount);
    fs::rename(&theirs, &cut).unwrap();
    seen.points += 1;
}

/// Uses an image at random and cuts it off, so many times.
fn series(kind: usize, seed: u64, points: usize) -> Result<Seen, String> {
    let (args, options) = KINDS[kind];
    let image = Image::new();
    let mut seen = Seen::default();
    if !image.mkfs(args) {
        return Ok(seen);
    }
    let mut random = Random(seed);
    let comma = if options.is_empty() { "" } else { "," };
    for point in 0..points {
        let mount = match Mount::new(&image.path(), &format!("rw,nouuid{comma}{options}")) {
            Ok(mount) => mount,
            Err(why) if point == 0 => {
                uvfs_testing::say(format_args!("this kernel does not mount {args:?}: {why}"));
                return Ok(seen);
            }
            Err(why) => return Err(why),
        };
        let count = 1 << (3 + random.below(9));
        let held = workload::work(mount.path(), &mut random, count);
        let flush = ["shutdown -f", "shutdown"][random.below(2) as usize];
        let args = ["-x", "-c", flush].map(OsStr::new);
        run("xfs_io", &[&args[..], &[mount.path().as_os_str()]].concat());
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
            return Err(format!("{args:?}, seed {seed}, point {point}: {said}"));
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
                Ok(seen) => eprintln!("{args:?} {options}: {seen:?}"),
                Err(why) => wrong.push(why),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
