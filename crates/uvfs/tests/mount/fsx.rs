//! fsx: random reads, writes, mappings, truncations and holes in one file, each read verified.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::harness::*;
use crate::survive::{survives, while_replaced};

const CONFIGURATION: &str = r#"
[opsize]
max = 65536
[weights]
close_open = 1
invalidate = 1
mapread = {mapread}
mapwrite = 10
read = 10
write = 10
truncate = 10
fsync = 1
fdatasync = 1
posix_fallocate = 5
punch_hole = 5
sendfile = 5
posix_fadvise = 1
copy_file_range = 5
"#;

fn exercise(transport: Transport, option: &str) {
    if !has(&[Need::Mount(transport), Need::Tool("fsx")]) {
        return;
    }
    let served = Served::new(&Serve::over(transport).option(option));
    exercise_by(&served, |fsx, limit| served.mount.run_within(limit, fsx));
    served.mount.unmount();
}

fn exercise_by(served: &Served, run: impl Fn(&mut Command, Duration) -> Outcome) {
    // fsx never unmaps what it reads through a mapping, so every truncation looks through all of
    // them, on any file system: long runs have few.
    let (operations, seeds, mapread, limit) = match full() {
        true => (200_000, 3, 1, 3 * LATER),
        false => (8_000, 2, 10, LATER),
    };
    let configuration = CONFIGURATION.replace("{mapread}", &mapread.to_string());
    fs::write(served.scratch.path("configuration"), configuration).unwrap();
    for seed in 1..=seeds {
        let mut fsx = fsx(&served.scratch, operations, seed);
        fsx.arg(served.at(&format!("file.{seed}")));
        let outcome = run(&mut fsx, limit);
        assert!(outcome.status.success(), "seed {seed}: {outcome}");
    }
}

/// The command, without the file. Its configuration has to be in `scratch`.
fn fsx(scratch: &Scratch, operations: u32, seed: u32) -> Command {
    let mut fsx = command(tool("fsx"), ["-q", "-N"]);
    fsx.args([operations.to_string(), "-S".into(), seed.to_string()]);
    fsx.arg("-P").arg(scratch.path(""));
    fsx.arg("-f").arg(scratch.path("configuration"));
    fsx
}

/// The next mount of an object store, and one with an empty cache, has the file that fsx left.
#[cfg(feature = "object")]
#[test]
fn reads_back_from_stores() {
    let need = [Need::Mount(Transport::Dev), Need::Tool("fsx"), Need::Uvfs];
    if !has(&need) {
        return;
    }
    let (operations, seeds) = if full() { (2_500, 20) } else { (600, 2) };
    for promise in ["write=close", "write=back"] {
        let fake = crate::fake::Fake::start();
        let uri = crate::stores::At::uri(&fake).replacen("/p?", "/p/?", 1);
        let (uri, scratch) = (Path::new(&uri), Scratch::new());
        let configuration = CONFIGURATION.replace("{mapread}", "1");
        fs::write(scratch.path("configuration"), configuration).unwrap();
        let over = |cache: &str| {
            let cache = format!("cache_dir={}", scratch.path(cache).display());
            Serve::over(Transport::Dev).option(&cache)
        };
        let (at, serve) = (scratch.dir("mount"), over("cache").option(promise));
        for seed in 1..=seeds {
            let mount = Mount::new(&serve, uri, &at);
            let file = at.join("file");
            let outcome = mount.run_within(LATER, fsx(&scratch, operations, seed).arg(&file));
            assert!(
                outcome.status.success(),
                "{promise}, seed {seed}: {outcome}"
            );
            let left = fs::read(&file).unwrap();
            mount.unmount().ok();
            for serve in [&serve, &over("other")] {
                let mount = Mount::new(serve, uri, &at);
                assert!(fs::read(&file).unwrap() == left, "{promise}, seed {seed}");
                mount.unmount().ok();
            }
        }
    }
}

/// A random mix of writes, truncations, holes and mappings reads back what was written.
#[test]
fn reads_back_over_dev() {
    exercise(Transport::Dev, "");
}

/// The same with the kernel's own writeback.
#[test]
fn reads_back_over_dev_with_writeback() {
    exercise(Transport::Dev, "writeback");
}

/// The same where the kernel reads and writes by itself.
#[test]
fn reads_back_over_dev_with_passthrough() {
    passthrough(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn reads_back_over_uring() {
    exercise(Transport::Uring, "");
}

/// The same over io_uring, with the kernel's own writeback.
#[test]
fn reads_back_over_uring_with_writeback() {
    exercise(Transport::Uring, "writeback");
}

/// The same over io_uring, where the kernel reads and writes by itself.
#[test]
fn reads_back_over_uring_with_passthrough() {
    passthrough(Transport::Uring);
}

fn while_the_server_is_replaced(option: &str) {
    let need = [Need::Mount(Transport::Dev), Need::Tool("fsx"), Need::Uvfs];
    if !has(&need) {
        return;
    }
    let served = Served::new(&survives().option(option));
    exercise_by(&served, |fsx, limit| {
        while_replaced(&served.mount, || served.mount.run_within(limit, fsx))
    });
    served.mount.unmount();
}

/// The same while the server is replaced again and again.
#[test]
fn reads_back_while_the_server_is_replaced() {
    while_the_server_is_replaced("");
}

/// The same where the kernel asks the server for all data.
#[test]
fn reads_back_without_backing_files_while_the_server_is_replaced() {
    while_the_server_is_replaced("nopassthrough");
}

/// The same with the kernel's own writeback.
#[test]
fn reads_back_with_writeback_while_the_server_is_replaced() {
    while_the_server_is_replaced("nopassthrough,writeback");
}

/// FUSE passthrough came with Linux 6.9, as a choice of the kernel's configuration.
fn passthrough(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "16m");
    let serve = Serve::over(transport).option("passthrough");
    match Mount::attempt(&serve, &source, &scratch.dir("mount")) {
        Ok(mount) => drop(mount.unmount()),
        Err(outcome) if outcome.stderr.contains("passthrough") => {
            return uvfs_testing::say(format_args!("no backing files here: {outcome}"));
        }
        Err(outcome) => panic!("{outcome}"),
    }
    exercise(transport, "passthrough");
}
