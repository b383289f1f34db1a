//! Files with a backing file: the kernel reads and writes the host's file itself.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::harness::*;

const PAGE: usize = 4096;

/// A count of requests by `uvfs stats`, or another number that it gives.
pub fn figure(mount: &Mount, name: &str) -> u64 {
    let stats = mount.run(uvfs().args(["stats", "--json"]).arg(&mount.at));
    let stats: serde_json::Value = serde_json::from_str(&stats.ok()).expect("JSON");
    let ops = stats["ops"].as_array().expect("a list");
    match ops.iter().find(|op| op["name"] == name) {
        Some(op) => op["count"].as_u64().expect("a number"),
        None => stats[name].as_u64().unwrap_or(0),
    }
}

/// A database's writes cost no request each, and the options say which opens have a backing file.
#[test]
fn programs_that_work_on_a_file_need_no_requests() {
    let python = r#"
import os, sys
flags = os.O_CREAT | getattr(os, sys.argv[2])
if len(sys.argv) > 3: flags |= getattr(os, sys.argv[3])
fd = os.open(sys.argv[1] + "/file", flags)
for n in range(100): os.pwrite(fd, b"%4096d" % n, 4096 * n)
if flags & os.O_RDWR: assert os.pread(fd, 4096, 4096 * 7) == b"%4096d" % 7
"#;
    for transport in transports() {
        if !has(&[Need::Mount(transport), Need::Uvfs, Need::Program("python3")]) {
            return;
        }
        for (option, flags, expected) in [
            ("", &["O_RDWR"][..], 1),
            ("cache=always", &["O_RDWR"], 1),
            ("", &["O_WRONLY"], 1),
            ("", &["O_WRONLY", "O_APPEND"], 0),
            ("", &["O_RDWR", "O_APPEND"], 0),
            ("passthrough=direct", &["O_RDWR"], 0),
            ("nopassthrough", &["O_RDWR"], 0),
            ("direct_io", &["O_RDWR"], 0),
            ("writeback", &["O_RDWR"], 0),
            ("noatime", &["O_RDWR"], 1),
        ] {
            let served = Served::new(&Serve::over(transport).option(option));
            let mut program = command("python3", ["-c", python]);
            program.arg(&served.mount.at).args(flags);
            served.mount.run(&mut program).ok();
            let what = format!("-o {option}, {flags:?}");
            assert_eq!(figure(&served.mount, "backed_opens"), expected, "{what}");
            if expected == 1 {
                let moved = figure(&served.mount, "READ") + figure(&served.mount, "WRITE");
                assert_eq!(moved, 0, "{what}");
            }
            let host = fs::read(served.source.join("file")).expect("the file");
            let pages = host.chunks(PAGE).enumerate();
            let mut wrong = pages.filter(|(n, page)| **page != *format!("{n:4096}").as_bytes());
            assert_eq!((host.len(), wrong.next()), (100 * PAGE, None), "{what}");
            served.mount.unmount().ok();
        }
    }
}

/// A program that writes many small files gets a backing file for the first alone, one that writes large files for
/// each.
#[test]
fn a_file_gets_a_backing_file_if_the_last_one_was_large() {
    let python = r#"
import json, os, subprocess, sys
mount, sizes, uvfs = sys.argv[1:]
def released():
    stats = json.loads(subprocess.check_output([uvfs, "stats", "--json", mount]))
    return sum(op["count"] for op in stats["ops"] if op["name"] == "RELEASE")
for size in map(int, sizes.split(",")):
    before = released()
    fd = os.open(mount + "/file%d" % size, os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"x" * size)
    os.close(fd)
    # The kernel sends RELEASE after close(2) has returned.
    while released() == before: pass
"#;
    for transport in transports() {
        if !has(&[Need::Mount(transport), Need::Uvfs, Need::Program("python3")]) {
            return;
        }
        for (sizes, expected) in [
            ("1,2,3,4,5", 1),
            ("100000,200000,300000", 3),
            ("100000,1,2,3", 2),
            // A large file that is written in place has one in any case.
            ("1,2,1048576", 2),
        ] {
            let served = Served::new(&Serve::over(transport));
            let large = File::create(served.source.join("file1048576")).expect("on the host");
            large.set_len(1 << 20).expect("it grows");
            let mut program = command("python3", ["-c", python]);
            program
                .arg(&served.mount.at)
                .args([sizes, env!("CARGO_BIN_EXE_uvfs")]);
            served.mount.run(&mut program).ok();
            let backed = figure(&served.mount, "backed_opens");
            assert_eq!(backed, expected, "{sizes}");
            served.mount.unmount().ok();
        }
    }
}

/// Waits until the mount shows something.
fn until(what: &str, shows: impl Fn() -> bool) {
    let began = Instant::now();
    while !shows() {
        assert!(began.elapsed() < SEEN, "{what}: not seen");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Size and time of a file on the mount are the host's at once.
fn same(what: &str, mount: &Path, host: &Path, open: Option<&File>) {
    let of = |meta: fs::Metadata| (meta.len(), meta.mtime(), meta.mtime_nsec(), meta.blocks());
    let expected = of(host.metadata().expect("on the host"));
    assert_eq!(
        of(mount.metadata().expect("on the mount")),
        expected,
        "{what}"
    );
    if let Some(file) = open {
        assert_eq!(of(file.metadata().expect("fstat")), expected, "{what}");
    }
}

/// Writes to a file, stores to a mapping of it, and has the host write to it.
pub fn work(mount: &Path, host: &str) -> String {
    let (at, host) = (mount.join("file"), Path::new(host).join("file"));
    fs::write(&at, [1; 100]).expect("a file");
    // The kernel caches attributes and pages of it.
    assert_eq!(fs::read(&at).expect("it is read"), [1; 100]);
    let open = || OpenOptions::new().read(true).write(true).open(&at);
    for round in 0..20u64 {
        let file = open().expect("the file opens");
        file.write_all_at(&[round as u8; PAGE], round * 1000)
            .expect("it is written");
        same("a write", &at, &host, Some(&file));
        store(&file, round as u8);
        same("a store", &at, &host, Some(&file));
        // The host writes while the kernel has the file for itself, and when it is closed.
        let other = OpenOptions::new()
            .write(true)
            .open(&host)
            .expect("on the host");
        let len = (round + 1) * 10_000;
        other.set_len(len).expect("it grows");
        until("the host's change", || {
            at.metadata().is_ok_and(|it| it.len() == len)
        });
        drop(file);
        assert_eq!(fs::read(&at).expect("it is read").len() as u64, len);
        other.write_all_at(b"host", len - 4).expect("on the host");
        until("the host's text", || {
            fs::read(&at).is_ok_and(|it| it.ends_with(b"host"))
        });
        same("after all", &at, &host, None);
        other.set_len(10_000).expect("it shrinks");
    }
    "ok".into()
}

/// Stores a byte to the first page of a file, in a mapping, and syncs it.
fn store(file: &File, byte: u8) {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a page that the file has, used and taken away here alone.
    unsafe {
        let fd = file.as_raw_fd();
        let page = libc::mmap(std::ptr::null_mut(), PAGE, prot, libc::MAP_SHARED, fd, 0);
        assert_ne!(page, libc::MAP_FAILED);
        page.cast::<u8>().write_volatile(byte);
        assert_eq!(libc::msync(page, PAGE, libc::MS_SYNC), 0);
        libc::munmap(page, PAGE);
    }
}

/// The mount shows the size and times of a file that the kernel writes by itself, and the host's writes to it.
#[test]
fn attributes_are_right_while_the_kernel_writes() {
    for transport in transports() {
        if !has(&[Need::Mount(transport), Need::Uvfs]) {
            return;
        }
        for option in ["", "passthrough"] {
            let served = Served::new(&Serve::over(transport).option(option));
            let report = served.scratch.path("report");
            let source = served.source.to_str().expect("a name");
            let mut child =
                crate::own_process::call("backed_work", &served.mount.at, source, &report);
            served.mount.run_within(LATER, &mut child).ok();
            assert_eq!(fs::read_to_string(report).expect("a report"), "ok");
            served.mount.unmount().ok();
        }
    }
}
