//! Logs of all kinds, against xfs_repair and the kernel.
//!
//! Needs root, loop devices and xfsprogs.

mod common;
#[path = "common/mutate.rs"]
mod mutate;
#[path = "common/sink.rs"]
mod sink;

use common::*;
use mutate::{Choose, Random};
use sink::FileSink;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::check::{CheckOptions, CheckProgress, check};
use uvfs_xfs::format::{LOG_RECORD_MAGIC, SB_CRC_OFFSET, store_crc};
use uvfs_xfs::repair::{RepairOptions, repair};
use uvfs_xfs::{Blocks, LogState, Volume};

fn use_it(path: &Path, from: usize, files: usize) {
    let mount = Mount::new(path, "rw").unwrap();
    for i in from..from + files {
        fs::write(mount.path().join(format!("file-{i}")), b"x").unwrap();
        rustix::fs::syncfs(File::open(mount.path()).unwrap()).unwrap();
    }
}

/// Whether xfs_repair finds the log dirty, and whether it finds anything else.
fn theirs(path: &Path) -> (bool, bool) {
    let args = [OsStr::new("-n"), OsStr::new("-f"), path.as_os_str()];
    let out = output("xfs_repair", &args).unwrap();
    let text = [out.stdout, out.stderr].concat();
    let dirty = String::from_utf8_lossy(&text).contains("valuable metadata changes in a log");
    // Any dirty log is damage to it.
    (dirty, out.status.code() != Some(0) && !dirty)
}

/// The same of ours; and what is found is repaired.
fn ours(path: &Path) -> (bool, bool) {
    let blocks = || Arc::new(FileBlocks::open(path).unwrap()) as Arc<dyn Blocks>;
    let outcome = check(
        blocks(),
        &CheckOptions::default(),
        &CheckProgress::default(),
    )
    .unwrap();
    let dirty = !outcome.log.is_clean();
    if dirty || outcome.count > 0 {
        let options = RepairOptions {
            zero_log: true,
            ..RepairOptions::default()
        };
        let sink = FileSink::open(path);
        let mended = repair(blocks(), Some(&sink), &options, &CheckProgress::default()).unwrap();
        assert_eq!(mended.left_count, 0, "{:?}", mended.left);
        assert_eq!(theirs(path), (false, false));
        drop(Mount::new(path, "rw,nouuid").expect("the kernel mounts what was mended"));
    }
    (dirty, outcome.count > 0 && !dirty)
}

/// Blocks of a clean log that are zeros, or of the cycle before: the log ends there to the kernel and
/// to xfs_repair, if they may have been in flight when the machine went down.
#[test]
fn holes() {
    if !can_compare() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&[]));
    let path = &image.path();
    for cycles in 0..2 {
        if cycles > 0 {
            // Now all blocks are of some cycle.
            run(
                "xfs_repair",
                &[OsStr::new("-L"), OsStr::new("-f"), path.as_os_str()],
            );
        }
        use_it(path, cycles * 1000, 700);
        let v = Volume::open(Arc::new(FileBlocks::open(path).unwrap())).unwrap();
        assert_eq!(*v.log(), LogState::Clean);
        let g = v.geometry();
        let log = g.daddr(g.fsb(g.logstart).unwrap()) * 512;
        let mut bytes = vec![0; (g.logblocks as usize) << g.blocklog];
        let file = File::open(path).unwrap();
        file.read_exact_at(&mut bytes, log).unwrap();
        let old = bytes[bytes.len() - 512..].to_vec();
        let head = bytes.chunks_exact(512).position(|b| {
            let record = b[..4] == LOG_RECORD_MAGIC.to_be_bytes();
            b[if record { 4..8 } else { 0..4 }] == old[..4]
        });
        let head = head.unwrap();
        assert!(head > 4096, "{head} blocks of the log are in use");
        let before = [head - 4097, head - 4000, head / 2, head - 40];
        let near = [head - 3, head - 2, head - 1, head, head + 1];
        let mut dirty = 0;
        for at in [&[0, 1, 2, 5, 17, 100][..], &before, &near].concat() {
            for hole in [&[0; 512][..], &old] {
                let copy = image.dir().join("hole");
                let _ = fs::remove_file(&copy);
                run(
                    "cp",
                    &[
                        OsStr::new("--sparse=always"),
                        path.as_os_str(),
                        copy.as_os_str(),
                    ],
                );
                let file = File::options().write(true).open(&copy).unwrap();
                file.write_all_at(hole, log + at as u64 * 512).unwrap();
                let want = theirs(&copy);
                dirty += usize::from(want.0);
                assert_eq!(
                    ours(&copy),
                    want,
                    "block {at} of {head}, cycle {:?}",
                    &hole[..4]
                );
            }
        }
        assert!(dirty > 5, "{dirty}");
    }
}

/// A log as the kernel sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Verdict {
    Clean,
    Dirty,
    /// It can't be replayed.
    Damaged,
}

/// The kernel replays no log on a read-only device.
fn the_kernels(path: &Path) -> Verdict {
    let clean = Mount::new(path, "ro,nouuid").is_ok();
    match Mount::new(path, "rw,nouuid") {
        Ok(_) if clean => Verdict::Clean,
        Ok(_) => Verdict::Dirty,
        Err(_) => Verdict::Damaged,
    }
}

fn open(path: &Path) -> Arc<dyn Blocks> {
    Arc::new(FileBlocks::open(path).unwrap())
}

fn checked(path: &Path) -> (LogState, Vec<String>) {
    let o = check(
        open(path),
        &CheckOptions::default(),
        &CheckProgress::default(),
    )
    .unwrap();
    (o.log, o.findings.iter().map(|f| f.to_string()).collect())
}

/// Our verdict, and what it comes from.
fn our_verdict(path: &Path) -> (Verdict, String) {
    let (log, found) = checked(path);
    let verdict = match &log {
        _ if !found.is_empty() => Verdict::Damaged,
        LogState::Clean | LogState::Zeroed => Verdict::Clean,
        _ => Verdict::Dirty,
    };
    (verdict, format!("{log:?} {found:?}"))
}

/// Repairs an image with any log.
fn mend(path: &Path) {
    let options = RepairOptions {
        zero_log: true,
        ..RepairOptions::default()
    };
    let sink = FileSink::open(path);
    let o = repair(open(path), Some(&sink), &options, &CheckProgress::default()).unwrap();
    assert_eq!(o.left_count, 0, "{:?}", o.left);
}

fn shut_down(mount: &Mount) {
    let args = ["-x", "-c", "shutdown -f"].map(OsStr::new);
    let root = mount.path().as_os_str();
    run("xfs_io", &[&args[..], &[root]].concat());
}

fn copied(from: &Path, to: &Path) {
    let _ = fs::remove_file(to);
    let sparse = OsStr::new("--sparse=always");
    run("cp", &[sparse, from.as_os_str(), to.as_os_str()]);
}

fn format_log(path: &Path) {
    let args = [OsStr::new("-L"), OsStr::new("-f"), path.as_os_str()];
    run("xfs_repair", &args);
}

/// Images with logs of several kinds.
fn logs(dir: &Path) -> Vec<(&'static str, std::path::PathBuf)> {
    let image = Image::new();
    let mut out = Vec::new();
    let mut keep = |name: &'static str, path: &Path| {
        let to = dir.join(name);
        copied(path, &to);
        out.push((name, to));
    };
    let path = &image.path();
    assert!(image.mkfs(&[]));
    keep("made", path);
    use_it(path, 0, 20);
    keep("used", path);
    let mount = Mount::new(path, "rw").unwrap();
    let file = |i: usize| File::create(mount.path().join(format!("more-{i}"))).unwrap();
    (0..20).for_each(|i| file(i).sync_all().unwrap());
    shut_down(&mount);
    drop(mount);
    keep("dirty", path);
    format_log(path);
    keep("formatted", path);
    use_it(path, 100, 3);
    keep("formatted-and-used", path);
    assert!(image.mkfs(&["-l", "su=64k"]));
    use_it(path, 0, 3);
    keep("stripes", path);
    out
}

/// A place in the log's range, near where something begins.
fn some_block(random: &mut Random, near: &[u64], len: u64) -> u64 {
    let at = near[random.below(near.len() as u64) as usize];
    (at + len + random.below(9) - 4) % len
}

/// Changes the log of an image, or what the superblock says of it; gives what was done.
fn change(path: &Path, random: &mut Random) -> String {
    let v = Volume::open(Arc::new(FileBlocks::open(path).unwrap())).unwrap();
    let g = v.geometry();
    let log = g.daddr(g.fsb(g.logstart).unwrap()) * 512;
    let len = (u64::from(g.logblocks) << g.blocklog) / 512;
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut bytes = vec![0; 4096 * 512];
    file.read_exact_at(&mut bytes, log).unwrap();
    let magic = LOG_RECORD_MAGIC.to_be_bytes();
    let blocks = bytes.chunks_exact(512).enumerate();
    let starts: Vec<u64> = blocks
        .filter(|(_, b)| b[..4] == magic)
        .map(|(i, _)| i as u64)
        .collect();
    let last = *starts.last().unwrap();
    let near = [0, len - 1, last, last + 4, starts[starts.len() / 2]];
    match random.below(5) {
        0 => {
            let (at, n) = (some_block(random, &near, len), 1 + random.below(3));
            for i in 0..n.min(len - at) {
                file.write_all_at(&[0; 512], log + (at + i) * 512).unwrap();
            }
            format!("{n} blocks of zeros at {at}")
        }
        1 => {
            let at = some_block(random, &near, len);
            let cycle = random.below(3) as u32;
            let mut block = [0; 512];
            block[..4].copy_from_slice(&cycle.to_be_bytes());
            file.write_all_at(&block, log + at * 512).unwrap();
            format!("cycle {cycle} at {at}")
        }
        2 | 3 => {
            // A field of the header of one of the last records.
            let i = starts.len() - 1 - random.below(starts.len().min(12) as u64) as usize;
            let field = [4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 300, 304, 320];
            let at = starts[i] * 512 + field[random.below(13) as usize];
            let values = [0, 1, 2, 7, 512, 0x1_0000, u32::MAX];
            let value: u32 = values[random.below(7) as usize];
            file.write_all_at(&value.to_be_bytes(), log + at).unwrap();
            format!("{value} at byte {} of record {}", at % 512, at / 512)
        }
        _ => {
            let mut sector = vec![0; g.sector_size as usize];
            file.read_exact_at(&mut sector, 0).unwrap();
            let lsn = random.below(6) << 32 | random.below(900);
            sector[240..248].copy_from_slice(&lsn.to_be_bytes());
            store_crc(&mut sector, SB_CRC_OFFSET);
            file.write_all_at(&sector, 0).unwrap();
            format!("superblock at {}:{}", lsn >> 32, lsn & 0xffff_ffff)
        }
    }
}

/// The kernel is asked about many logs: whole ones, those of xfs_repair, and changed ones.
#[test]
fn verdicts_on_logs() {
    if !can_compare() {
        return;
    }
    let dir = Image::new();
    let logs = logs(dir.dir());
    let path = dir.path();
    let judge = |name: &str| {
        let (ours, why) = our_verdict(&path);
        // The kernel's replay changes the image.
        let again = dir.dir().join("again");
        copied(&path, &again);
        let kernels = the_kernels(&again);
        let same = ours == kernels;
        if !same {
            return Some(format!(
                "{name}: the kernel: {kernels:?}, ours: {ours:?}: {why}"
            ));
        }
        if ours != Verdict::Clean {
            mend(&path);
            if the_kernels(&path) != Verdict::Clean || our_verdict(&path).0 != Verdict::Clean {
                return Some(format!("{name}: not mended"));
            }
        }
        None
    };
    let mut wrong = Vec::new();
    for (name, from) in &logs {
        copied(from, &path);
        wrong.extend(judge(name));
    }
    let mut random = Random(5);
    for i in 0..if uvfs_testing::full() { 300 } else { 30 } {
        let (name, from) = &logs[i % logs.len()];
        copied(from, &path);
        let what = change(&path, &mut random);
        wrong.extend(judge(&format!("{i}: {name}: {what}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A log that was zeroed after use: what was written later than its beginning is ahead of it.
#[test]
fn a_log_zeroed_after_use_is_formatted() {
    if !can_compare() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&[]));
    let path = &image.path();
    use_it(path, 0, 20);
    let v = Volume::open(Arc::new(FileBlocks::open(path).unwrap())).unwrap();
    let g = v.geometry().clone();
    let log = g.daddr(g.fsb(g.logstart).unwrap()) * 512;
    let file = File::options().write(true).open(path).unwrap();
    let zeros = vec![0; (g.logblocks as usize) << g.blocklog];
    file.write_all_at(&zeros, log).unwrap();
    assert!(Mount::new(path, "ro,nouuid").is_err());
    let (state, found) = checked(path);
    assert_eq!(state, LogState::Zeroed);
    assert!(
        !found.is_empty() && found.iter().all(|f| f.contains("log sequence number")),
        "{found:?}"
    );
    mend(path);
    assert_eq!(theirs(path), (false, false));
    let mount = Mount::new(path, "rw,nouuid").expect("the kernel mounts what was mended");
    assert_eq!(fs::read_dir(mount.path()).unwrap().count(), 20);
}
