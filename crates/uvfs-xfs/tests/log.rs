//! Logs with blocks that were not written, against xfs_repair.
//!
//! Needs root, loop devices and xfsprogs.

mod common;
#[path = "common/sink.rs"]
mod sink;

use common::*;
use sink::FileSink;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::check::{CheckOptions, CheckProgress, check};
use uvfs_xfs::format::LOG_RECORD_MAGIC;
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

/// The same of ours; and what is found is mended.
fn ours(path: &Path) -> (bool, bool) {
    let blocks = || Arc::new(FileBlocks::open(path).unwrap()) as Arc<dyn Blocks>;
    let outcome = check(
        blocks(),
        &CheckOptions::default(),
        &CheckProgress::default(),
    )
    .unwrap();
    let dirty = matches!(outcome.log, LogState::Dirty { .. });
    if dirty || outcome.count > 0 {
        let options = RepairOptions {
            zero_log: true,
            ..RepairOptions::default()
        };
        let sink = FileSink::open(path);
        let mended = repair(blocks(), &sink, &options, &CheckProgress::default()).unwrap();
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
        let v = Volume::open(FileBlocks::open(path).unwrap()).unwrap();
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
