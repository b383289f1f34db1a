//! A host that takes only a part of a write, fails to write, or never answers for one file.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};

use crate::harness::*;
use crate::preload::{How, served_any, uvfs_run};

/// The transport of tests that are about something else.
const ANY: Transport = Transport::Dev;

/// Writes 300,000 bytes in pieces, goes on where a write ended, and syncs it. Prints the first error, or 0, and
/// how far the writes came.
const WRITES: &str = "import os, sys\n\
    fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)\n\
    at = error = 0\n\
    try:\n\
    \x20 while at < 300000: at += os.pwrite(fd, b'a' * 100000, at)\n\
    \x20 os.fsync(fd)\n\
    except OSError as e: error = e.errno\n\
    print(error, at)";

/// The three ways to write to a file: on the host, on the mount, and under `uvfs run` on the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Host,
    Mount,
    Run,
}

/// What [`WRITES`] prints when it writes to this file.
fn writes(way: Way, served: &Served) -> Vec<u64> {
    let mut command = match way {
        Way::Run => {
            let mut command = uvfs_run(How::Eager);
            command.args(["--", "python3"]);
            command
        }
        _ => Command::new("python3"),
    };
    let dir = match way {
        Way::Host => &served.source,
        _ => &served.mount.at,
    };
    command.args(["-c", WRITES]).arg(dir.join("file"));
    let outcome = served.mount.run(&mut command);
    assert_eq!(served_any(&outcome), way == Way::Run, "{outcome}");
    let words = outcome.ok();
    words
        .split_whitespace()
        .map(|w| w.parse().unwrap())
        .collect()
}

fn can() -> bool {
    has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("python3")])
}

/// If a write that the host takes in part counted as whole, or the signal that comes with it (SIGXFSZ) ended the
/// server, bytes would be lost in silence, or everybody's mount. Here the server's own limit for the size of files
/// cuts writes short.
#[test]
fn a_write_that_the_host_takes_in_part_is_one_that_the_caller_sees() {
    const LIMIT: u64 = 250_000;
    if !can() {
        return;
    }
    let no_option = "nopassthrough";
    for (way, option) in [
        (Way::Mount, no_option),
        (Way::Mount, "direct_io"),
        (Way::Mount, "writeback"),
        (Way::Run, no_option),
    ] {
        let served = Served::new(&Serve::for_clients(ANY).option(option));
        let server = Pid::from_raw(served.mount.server.pid() as i32);
        let limit = Rlimit {
            current: Some(LIMIT),
            maximum: getrlimit(Resource::Fsize).maximum,
        };
        prlimit(server, Resource::Fsize, limit).unwrap();
        let saw = writes(way, &served);
        let file = fs::read(served.source.join("file")).unwrap();
        assert!(file.iter().all(|&b| b == b'a'), "{way:?} {option}");
        assert_eq!(file.len() as u64, LIMIT, "{way:?} {option}");
        // The sync fails for what was written into a cache.
        let caches = way == Way::Run || option == "writeback";
        let expected = [libc::EFBIG as u64, if caches { 300_000 } else { LIMIT }];
        assert_eq!(saw, expected, "{way:?} {option}");
        let alive = served.mount.run(&mut shell(
            "echo ok >\"$1/small\"; cat \"$1/small\"",
            &[&served.mount.at],
        ));
        assert_eq!(alive.ok(), "ok\n");
    }
}

/// If an error of the host's disk were lost on its way, a program would take its data for safe. The disk is a
/// sparse file on a file system that gets full.
#[test]
fn an_error_of_the_hosts_disk_comes_with_the_sync() {
    if !can() {
        return;
    }
    for way in [Way::Host, Way::Mount, Way::Run] {
        let scratch = Scratch::new();
        let source = scratch.ext4("source");
        fs::write(source.join("file"), "before").unwrap();
        run(Command::new("sync").arg("-f").arg(&source)).ok();
        let mount = Mount::new(&Serve::for_clients(ANY), &source, &scratch.dir("mount"));
        let served = Served {
            mount,
            source,
            scratch,
        };
        let mut rest = fs::File::create(served.scratch.path("source.image/rest")).unwrap();
        let piece = vec![1; 1 << 20];
        while rest.write_all(&piece).is_ok() {}
        let saw = writes(way, &served);
        // It depends on what is written first.
        let expected = [libc::EIO as u64, libc::ENOSPC as u64];
        assert!(
            expected.contains(&saw[0]) && saw[1] == 300_000,
            "{way:?}: {saw:?}"
        );
    }
}

/// If a read that hangs counted as a server's silence, or kept its program from being ended, a file on a mount
/// that hangs would take all others with it.
#[test]
fn a_read_that_hangs_takes_nothing_else_under_uvfs_run() {
    if !can() {
        return;
    }
    let script = "import os, sys, threading, time\n\
        def open_here(name): return os.open(sys.argv[1] + name, os.O_RDWR | os.O_CREAT)\n\
        hung, other = open_here('/below/file'), open_here('/other')\n\
        os.pread(hung, 4096, 0)\n\
        os.pwrite(other, b'first', 0)\n\
        print('open', flush=True)\n\
        while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n\
        threading.Thread(target=lambda: print(os.pread(hung, 4096, 1 << 20)), daemon=True).start()\n\
        end, n = time.monotonic() + 3, 0\n\
        while time.monotonic() < end:\n\
        \x20 n += 1\n\
        \x20 os.pwrite(other, b'%09d' % n, 0)\n\
        \x20 os.fsync(other)\n\
        \x20 time.sleep(0.05)\n\
        print('served', flush=True)\n\
        time.sleep(1000)";
    let served = Served::new(&Serve::for_clients(ANY));
    let (other, below) = (served.scratch.dir("hung"), served.source.join("below"));
    fs::create_dir(&below).unwrap();
    fs::write(other.join("file"), vec![b'f'; 4 << 20]).unwrap();
    let mut hung = Mount::new(&Serve::over(ANY).option("nopassthrough"), &other, &below);
    let sign = served.scratch.path("sign");
    let mut command = uvfs_run(How::Eager);
    // The reads take three times as long as a server may be silent.
    command.args(["--timeout", "1", "--", "python3", "-c", script]);
    command.arg(&served.mount.at).arg(&sign);
    let mut program = Running::start(&mut command);
    wait_for("the files are open", || program.stdout().contains("open"));
    hung.server.signal(Signal::STOP);
    fs::write(&sign, "").unwrap();
    let ended = wait_until(SOON, || program.stdout().contains("served"));
    let attached = attached(&served.mount.at);
    program.signal(Signal::TERM);
    let outcome = program.wait(Duration::from_secs(5));
    // The server has noticed, and others are served.
    let mut looks = shell("cat \"$1/other\"; echo", &[&served.mount.at]);
    let seen = served.mount.run(&mut looks);
    hung.server.signal(Signal::CONT);
    assert!(ended, "{}", program.stderr());
    assert_eq!(attached, 1, "its session lives: {}", program.stderr());
    let outcome = outcome.expect("it ends while its read hangs");
    assert!(
        !outcome.status.success() && !outcome.stderr.contains("answers nothing"),
        "{outcome}"
    );
    let number: u64 = seen.ok().trim().parse().unwrap();
    assert!(number > 5, "{number}");
    wait_for("the session to end", || {
        self::attached(&served.mount.at) == 0
    });
    hung.expect_gone();
    served.mount.unmount().ok();
}

/// How many clients are attached to a mount.
fn attached(at: &Path) -> usize {
    let report = run(uvfs().args(["stats", "--json"]).arg(at)).ok();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    report["clients"].as_array().unwrap().len()
}
