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
use uvfs_xfs::check::{Options, Outcome, Prefetch, Progress, check};
use uvfs_xfs::format::LOG_RECORD_MAGIC;
use uvfs_xfs::{Blocks, LogState, Volume};

fn check_blocks(blocks: Arc<dyn Blocks>, options: &Options) -> uvfs_xfs::Result<Outcome> {
    check(blocks, options, &Progress::default())
}

fn check_file(path: &Path, options: &Options) -> uvfs_xfs::Result<Outcome> {
    check_blocks(Arc::new(FileBlocks::open(path).unwrap()), options)
}

/// Which damages are done: each that is a multiple of this. `UVFS_DAMAGE` is `full` or a number.
fn step() -> usize {
    match std::env::var("UVFS_DAMAGE").as_deref() {
        Ok("full") => 1,
        Ok(n) => n.parse().expect("UVFS_DAMAGE is full or a number"),
        Err(_) => 29,
    }
}

fn assert_clean(path: &Path, what: &str) {
    let outcome = check_file(path, &Options::default()).unwrap();
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

#[test]
fn clean_default() {
    clean(&[]);
}

#[test]
fn clean_16k() {
    clean(&["-b", "size=16384", "-m", "rmapbt=1", "-i", "size=1024"]);
}

#[test]
fn clean_large_dirs() {
    let args = "-b size=1024 -n size=16384 -m finobt=0,reflink=0 -i sparse=0";
    clean(&args.split(' ').collect::<Vec<_>>());
}

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

#[test]
fn clean_quota() {
    if !can_run() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&[]));
    match Mount::new(&image.path(), "rw,uquota,gquota,pquota") {
        Ok(m) => fill(m.path(), 4096),
        Err(e) => return eprintln!("skipped: this kernel has no quota: {e}"),
    }
    assert_clean(&image.path(), "quota");
}

/// The ways to read and the bound on memory change nothing.
#[test]
fn same_findings_in_every_way() {
    let Some(image) = base() else { return };
    let path = image.path();
    let options = |prefetch, threads, memory| Options {
        threads,
        prefetch,
        memory,
        ..Options::default()
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
        let run = |o: Options| {
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
            let options = Options {
                threads: 1,
                prefetch,
                ..Options::default()
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

// -------------------------------------------------------------------------------------------
// Damage by xfs_db
// -------------------------------------------------------------------------------------------

/// Where the two differ on purpose.
struct Explained {
    /// Part of the damage's name.
    damage: &'static str,
    /// The findings that xfs_repair does not have: how one begins, and part of the rest. Each of
    /// our findings is one of these.
    ours: &'static [(&'static str, &'static str)],
    /// Why.
    why: &'static str,
}

const EXPLAINED: &[Explained] = &[
    Explained {
        damage: "",
        ours: &[
            // Only blocks of B-trees have these two.
            ("", ": bb_leftsib: expected"),
            ("", ": bb_rightsib: expected"),
            ("directory index", ": forw of block"),
            ("directory index", ": back: expected"),
            ("attributes AG", ": forw of block"),
            ("attributes AG", ": back: expected"),
            ("attributes inode", ": forw of block"),
        ],
        why: "xfs_repair walks by parents only and never looks at neighbours",
    },
    Explained {
        damage: "",
        ours: &[
            ("AGFL AG", ": magic number: expected"),
            ("AGFL AG", ": uuid: expected"),
            ("AGFL AG", ": checksum"),
            ("AGFL AG", ": agfl_seqno: expected"),
            ("AGFL AG", ": log sequence number: expected"),
        ],
        why: "xfs_repair only says what is wrong with an AGFL's head or checksum, and goes on",
    },
    Explained {
        damage: "",
        ours: &[("attributes AG", ": freemap[")],
        why: "xfs_repair ignores an attribute leaf's free map; the kernel trusts it",
    },
    Explained {
        damage: "",
        ours: &[
            ("rmapbt AG", ": owners of the"),
            ("rmapbt AG", ": key "),
            ("rmapbt AG", ": high key "),
        ],
        why: "xfs_repair asks of each owner seen whether a record covers it, and so takes records \
              that cover too much or have more owners, and keys that do not lead to them; here \
              both must be equal",
    },
    Explained {
        damage: "",
        ours: &[
            ("attributes AG", ": uuid: expected"),
            ("attributes AG", ": owner: expected"),
            ("attributes AG", ": own block number: expected"),
            ("attributes AG", ": log sequence number: expected"),
            ("attributes AG", ": checksum"),
            ("attributes AG", ": firstused: expected"),
            // The next block's neighbour is then unknown.
            ("attributes AG", ": back: expected"),
            ("attributes AG", ": forw of block"),
        ],
        why: "xfs_repair does not check whose an attribute block is, and only says that the head or \
              the checksum of a leaf below the root is wrong, and goes on",
    },
    Explained {
        damage: "features_log_incompat",
        ours: &[("superblock", ": sb_features_log_incompat: expected")],
        why: "a kernel that does not know the feature refuses to mount; xfs_repair goes on",
    },
    Explained {
        damage: "sb 1",
        ours: &[
            ("superblock copy AG", ": sb_uuid: expected"),
            ("superblock copy AG", ": sb_dirblklog: expected"),
        ],
        why: "xfs_repair does not compare these fields of the copies",
    },
    Explained {
        damage: "",
        ours: &[("attribute value AG", ": bytes: expected")],
        why: "a value's block that holds more than the value: xfs_repair reads what it needs",
    },
    Explained {
        damage: "logsunit",
        ours: &[("superblock copy AG", ": sb_logsunit: expected")],
        why: "xfs_repair does not compare the log's stripe unit with the copies'",
    },
    Explained {
        damage: "core.forkoff",
        ours: &[
            ("", ": di_nextents: expected what fits"),
            ("", ": di_forkoff"),
        ],
        why: "an extent that lies in what should be the attribute fork; xfs_repair reads it \
              nevertheless",
    },
];

#[derive(Default)]
struct Tally {
    done: usize,
    corrupt: usize,
    dirty: usize,
    explained: Vec<String>,
    wrong: Vec<String>,
}

fn compare_one(
    dir: &Path,
    base: &Path,
    mem: &MemImage,
    regions: &[mutate::Region],
    d: &Damage,
    tally: &Mutex<Tally>,
) {
    let path = dir.join("damaged");
    let _ = fs::remove_file(&path);
    run(
        "cp",
        &[
            OsStr::new("--sparse=auto"),
            base.as_os_str(),
            path.as_os_str(),
        ],
    );
    let Some(name) = d.apply(&path, mem, regions) else {
        return;
    };
    judge(&path, name, How::Whole, tally);
}

/// Lines of xfs_repair that say nothing of what it found.
fn is_noise(line: &str) -> bool {
    [
        "Phase",
        "        - ",
        "No modify",
        "Cannot get host",
        "Repair may fail",
        "the image and the host",
    ]
    .iter()
    .any(|n| line.starts_with(n))
}

/// Whether a line of xfs_repair about an image with a dirty log is about more than that log.
fn is_complaint(line: &str) -> bool {
    let of_the_log = [
        "ALERT: The filesystem has valuable metadata",
        "ignored because the -n option was used",
        "replay the log",
        // Mounting counts these again, so while the log is dirty they say nothing.
        "sb_icount ",
        "sb_ifree ",
        "sb_fdblocks ",
    ];
    !line.trim().is_empty() && !is_noise(line) && !of_the_log.iter().any(|l| line.contains(l))
}

/// The state of an image.
#[derive(Clone, Copy, PartialEq)]
enum How {
    /// Not in use when it was damaged.
    Whole,
    /// Cut off while in use: what counts is whether the log is dirty, and what else is found.
    Cut,
    /// Copied while in use, so no state that it ever had: whether the log is dirty.
    Torn,
}

/// Compares the verdicts on an image.
fn judge(path: &Path, name: String, how: How, tally: &Mutex<Tally>) {
    let ours = std::panic::catch_unwind(|| check_file(path, &Options::default()));
    let (findings, log): (Vec<String>, _) = match ours {
        Ok(Ok(o)) => (
            o.findings.iter().map(|f| f.to_string()).collect(),
            Some(o.log),
        ),
        Ok(Err(e)) => (vec![e.to_string()], None),
        Err(_) => {
            let mut t = tally.lock().unwrap();
            t.wrong.push(format!("PANIC: {name}"));
            return;
        }
    };
    let found = !findings.is_empty();
    let args = [OsStr::new("-n"), OsStr::new("-f"), path.as_os_str()];
    let out = output(
        "timeout",
        &[&[OsStr::new("60"), OsStr::new("xfs_repair")][..], &args].concat(),
    )
    .unwrap();
    let text =
        String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    let theirs = match how {
        How::Whole => out.status.code() != Some(0),
        // It calls any dirty log damage: what else does it complain of?
        _ => text.lines().any(is_complaint),
    };
    let mut t = tally.lock().unwrap();
    t.done += 1;
    t.corrupt += usize::from(found);
    if how != How::Whole {
        let ours_dirty = matches!(log, Some(LogState::Dirty { .. }));
        let theirs_dirty = text.contains("valuable metadata changes in a log");
        t.dirty += usize::from(ours_dirty);
        if ours_dirty != theirs_dirty {
            t.wrong.push(format!(
                "{name}: log: ours {log:?}, xfs_repair {}",
                if theirs_dirty { "dirty" } else { "clean" }
            ));
        }
    }
    if found == theirs || how == How::Torn {
        return;
    }
    let is = |f: &str, (begin, part): &(&str, &str)| f.starts_with(begin) && f.contains(part);
    let explained = EXPLAINED.iter().find(|e| {
        found && name.contains(e.damage) && findings.iter().all(|f| e.ours.iter().any(|o| is(f, o)))
    });
    if let Some(e) = explained {
        let first = findings.first().map_or("nothing", |f| f);
        t.explained.push(format!("{name}: {first}: {}", e.why));
        return;
    }
    let theirs_said = text
        .lines()
        .filter(|l| !is_noise(l))
        .take(4)
        .map(|l| format!("\n    xfs_repair: {l}"));
    let ours_said = findings.iter().take(4).map(|f| format!("\n    ours: {f}"));
    t.wrong.push(format!(
        "{name}: ours {}, xfs_repair {}{}",
        if found { "corrupt" } else { "clean" },
        if theirs { "corrupt" } else { "clean" },
        ours_said.chain(theirs_said).collect::<String>(),
    ));
}

fn compare_all(image: &Image, damages: &[Damage]) {
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    assert!(regions.len() > 100);
    let tally = Mutex::new(Tally::default());
    let next = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for k in 0..3 {
            let dir: PathBuf = image.dir().join(format!("worker-{k}"));
            fs::create_dir_all(&dir).unwrap();
            let (tally, next, mem, regions) = (&tally, &next, &mem, &regions);
            let base = image.path();
            s.spawn(move || {
                while let Some(d) = damages.get(next.fetch_add(1, Ordering::Relaxed)) {
                    compare_one(&dir, &base, mem, regions, d, tally);
                }
                let _ = fs::remove_dir_all(&dir);
            });
        }
    });
    let t = tally.into_inner().unwrap();
    eprintln!(
        "{} damages: {} corrupt, {} differ for a known reason, {} differ",
        t.done,
        t.corrupt,
        t.explained.len(),
        t.wrong.len()
    );
    for e in &t.explained {
        eprintln!("differs for a known reason: {e}");
    }
    assert!(t.wrong.is_empty(), "{}", t.wrong.join("\n"));
    assert!(t.done * 3 > damages.len(), "most damages could not be done");
}

#[test]
fn verdicts() {
    let Some(image) = base() else { return };
    let mut damages = all_damages(&image.path());
    let mut i = 0;
    damages.retain(|d| {
        i += 1;
        i % step() == 0 || d.name().contains("lsn")
    });
    eprintln!("{} damages to do", damages.len());
    compare_all(&image, &damages);
}

// -------------------------------------------------------------------------------------------
// Crashes
// -------------------------------------------------------------------------------------------

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
        let image = Image::new();
        assert!(image.mkfs(args), "mkfs.xfs {args:?}");
        let mount = Mount::new(&image.path(), "rw").unwrap();
        let stop = AtomicBool::new(false);
        let copy = |name: &str| {
            let to = image.dir().join(name);
            let from = image.path();
            run(
                "cp",
                &["--sparse=always".as_ref(), from.as_os_str(), to.as_os_str()],
            );
            to
        };
        let count = AtomicUsize::new(0);
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
            // Writes everything in place: what comes later is in the log only.
            for flag in ["-f", "-u"] {
                run("xfs_freeze", &[OsStr::new(flag), mount.path().as_os_str()]);
            }
            let copies: Vec<PathBuf> = (0..3)
                .map(|i| {
                    work(100);
                    rustix::fs::syncfs(File::open(mount.path()).unwrap()).unwrap();
                    copy(&format!("copy-{i}"))
                })
                .collect();
            let mut shutdown = String::from("shutdown");
            if round % 2 == 0 {
                shutdown += " -f";
            }
            run(
                "xfs_io",
                &[
                    OsStr::new("-x"),
                    OsStr::new("-c"),
                    OsStr::new(&shutdown),
                    mount.path().as_os_str(),
                ],
            );
            stop.store(true, Ordering::Relaxed);
            copies
        });
        drop(mount);
        for (i, path) in copies.iter().enumerate() {
            judge(path, format!("{args:?}, copy {i}"), How::Torn, &tally);
        }
        let crashed = copy("crashed");
        judge(&crashed, format!("{args:?}, shut down"), How::Cut, &tally);
        let volume = Volume::open(FileBlocks::open(&crashed).unwrap()).unwrap();
        let LogState::Dirty { head, .. } = *volume.log() else {
            panic!("{:?}", volume.log());
        };
        let g = volume.geometry();
        let log = g.daddr(g.fsb(g.logstart).unwrap()) * 512;
        // The end of the last write is missing: the log has not been once around, so what was
        // there before is zeros.
        for blocks in [1, 3, 7] {
            let cut = copy("cut");
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

/// A record of the log with a bit flipped is the end of the log if it is among the last, and damage
/// further back, as for the kernel.
#[test]
fn damaged_records_of_the_log() {
    if !can_compare() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&[]));
    let mount = Mount::new(&image.path(), "rw").unwrap();
    let at = mount.path().as_os_str();
    for flag in ["-f", "-u"] {
        run("xfs_freeze", &[OsStr::new(flag), at]);
    }
    // Each is a record at least.
    for i in 0..40 {
        let file = File::create(mount.path().join(format!("file-{i}"))).unwrap();
        file.sync_all().unwrap();
    }
    let shutdown = ["-x", "-c", "shutdown -f"].map(OsStr::new);
    run("xfs_io", &[&shutdown[..], &[at]].concat());
    drop(mount);
    let crashed = &image.path();
    let copy = |name: &str| {
        let to = image.dir().join(name);
        let (from, sparse) = (crashed.as_os_str(), OsStr::new("--sparse=always"));
        run("cp", &[sparse, from, to.as_os_str()]);
        to
    };
    let volume = Volume::open(FileBlocks::open(crashed).unwrap()).unwrap();
    let LogState::Dirty { head, .. } = *volume.log() else {
        panic!("{:?}", volume.log());
    };
    let g = volume.geometry();
    // It has not been once around.
    let log = g.daddr(g.fsb(g.logstart).unwrap()) * 512;
    let mut bytes = vec![0; head as usize * 512];
    File::open(crashed)
        .unwrap()
        .read_exact_at(&mut bytes, log)
        .unwrap();
    let starts = |b: &&[u8]| b[..4] == LOG_RECORD_MAGIC.to_be_bytes();
    let blocks = bytes.chunks_exact(512).enumerate();
    let records: Vec<usize> = blocks.filter(|(_, b)| starts(b)).map(|(i, _)| i).collect();
    let state = |path: &Path| {
        let volume = Volume::open(FileBlocks::open(path).unwrap()).unwrap();
        volume.log().clone()
    };
    let LogState::Dirty {
        tail: Some(tail),
        torn: false,
        ..
    } = state(crashed)
    else {
        panic!("{:?}", state(crashed));
    };
    let about_log = |path: &Path| {
        let outcome = check_file(path, &Options::default()).unwrap();
        let about: Vec<String> = outcome.findings.iter().map(|f| f.to_string()).collect();
        about.into_iter().find(|f| f.starts_with("log: "))
    };
    assert_eq!(about_log(crashed), None);
    let flip = |record: usize| {
        let path = copy("flipped");
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
        LogState::Dirty { head, torn, .. } => assert_eq!((head, torn), (last as u64, true)),
        // The record before was an unmount.
        other => assert!(other.is_clean(), "{other:?}"),
    }
    assert_eq!(about_log(&path), None);
    drop(Mount::new(&path, "rw,nouuid").expect("the kernel leaves out the last record"));
    // One that is still needed, before the last ones.
    let first = records.iter().position(|r| *r as u64 == tail).unwrap();
    assert!(records.len() - first > 12, "{records:?}, tail {tail}");
    let path = flip(records[first + 1]);
    assert_eq!(state(&path), state(crashed));
    let found = about_log(&path).expect("damage of the log");
    assert!(found.contains(&records[first + 1].to_string()), "{found}");
    assert!(
        Mount::new(&path, "rw,nouuid").is_err(),
        "the kernel replays a damaged record"
    );
}

// -------------------------------------------------------------------------------------------
// No image makes it panic
// -------------------------------------------------------------------------------------------

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
            let options = Options { threads: 1, ..Options::default() };
            let _ = check_blocks(blocks.clone(), &options);
            read_everything(&blocks);
            prop_assert!(start.elapsed() < Duration::from_secs(120));
        }
    }
}
