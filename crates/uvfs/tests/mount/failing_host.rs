//! A host that reads or writes only a part, fails to, or never answers for one file.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use uvfs_server::layers::{Faults, Opcode};

use crate::harness::*;
use crate::own_process;
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

/// The output of a script about the file "file".
fn python(way: Way, served: &Served, script: &str) -> String {
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
    command.args(["-c", script]).arg(dir.join("file"));
    let outcome = served.mount.run(&mut command);
    assert_eq!(served_any(&outcome), way == Way::Run, "{outcome}");
    outcome.ok()
}

/// The output of [`WRITES`] on this file.
fn writes(way: Way, served: &Served) -> Vec<u64> {
    let words = python(way, served, WRITES);
    words
        .split_whitespace()
        .map(|w| w.parse().unwrap())
        .collect()
}

fn can() -> bool {
    has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("python3")])
}

/// A write that the host takes in part is a short one for the caller, and the signal that comes with it (SIGXFSZ)
/// does not end the server. Here the server's own limit for the size of files cuts writes short.
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

/// A program's fsync reports an error of the host's disk. The disk is a sparse file on a file system that gets full.
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

/// A read that hangs is no silence of the server, and does not keep its program from being ended: other files are
/// served meanwhile.
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

/// A file on a mount that hangs delays no other file that a dead client left: the others can be read, and have all
/// that the client wrote.
#[test]
fn what_a_dead_client_left_waits_for_no_mount_that_hangs() {
    if !can() {
        return;
    }
    let script = "import os, sys, time\n\
        for name in '/first', '/below/file', '/last':\n\
        \x20 fd = os.open(sys.argv[1] + name, os.O_RDWR | os.O_CREAT)\n\
        \x20 os.pwrite(fd, b'x' * 5000, 0)\n\
        print('dirty', flush=True)\n\
        time.sleep(1000)";
    let served = Served::new(&Serve::for_clients(ANY));
    let (other, below) = (served.scratch.dir("hung"), served.source.join("below"));
    fs::create_dir(&below).unwrap();
    let mut hung = Mount::new(&Serve::over(ANY).option("nopassthrough"), &other, &below);
    let mut command = uvfs_run(How::Eager);
    command.args(["--", "python3", "-c", script]);
    command.arg(&served.mount.at);
    let mut program = Running::start(&mut command);
    wait_for("the files are dirty", || program.stdout().contains("dirty"));
    hung.server.signal(Signal::STOP);
    program.signal(Signal::KILL);
    let mut looks = shell("cat \"$1/first\" \"$1/last\" | wc -c", &[&served.mount.at]);
    let seen = served
        .mount
        .run_within(Duration::from_secs(20), &mut looks)
        .ok();
    let early = fs::metadata(other.join("file")).unwrap().len();
    hung.server.signal(Signal::CONT);
    program.wait(SOON).expect("it is killed");
    assert_eq!(seen.trim(), "10000");
    assert_eq!(early, 0, "the hung file was written before");
    wait_for("the rest", || {
        fs::read(other.join("file")).unwrap() == vec![b'x'; 5000]
    });
    wait_for("the session to end", || attached(&served.mount.at) == 0);
    hung.expect_gone();
    served.mount.unmount().ok();
}

/// How many clients are attached to a mount.
fn attached(at: &Path) -> usize {
    let report = run(uvfs().args(["stats", "--json"]).arg(at)).ok();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    report["clients"].as_array().unwrap().len()
}

/// Pages of a failing host's file.
const PAGE: u64 = 4096;
/// It has so many, of which this one can't be read.
const PAGES: u64 = 64;
const BAD_PAGE: u64 = 16;
const BAD: std::ops::Range<u64> = BAD_PAGE * PAGE..(BAD_PAGE + 1) * PAGE;

/// Serves a directory whose file has a bad place, until it is unmounted: nothing there can be read or written. One call
/// transfers at most `most` bytes, and less before the bad place. There are no extended attributes.
pub fn failing(at: &Path, most: &str) -> String {
    let most: usize = most.parse().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file: Vec<u8> = (0..PAGES * PAGE).map(|at| (at / PAGE) as u8).collect();
    fs::write(dir.path().join("file"), file).unwrap();
    let options = uvfs_passthrough::Options {
        // As it is called: no cache of this mount makes other calls of it.
        direct_io: true,
        passthrough: uvfs_passthrough::Backed::Off,
        watch: false,
        attr_ttl: Duration::ZERO,
        entry_ttl: Duration::ZERO,
        ..Default::default()
    };
    let fs = uvfs_passthrough::Passthrough::open(dir.path(), options).unwrap();
    let fs = Faults::new(fs, move |call| {
        let start = call.range.start;
        match call.opcode {
            Opcode::Read | Opcode::Write if BAD.contains(&start) => Err(Errno::IO.into()),
            Opcode::Read | Opcode::Write if start < BAD.start => {
                Ok(most.min((BAD.start - start) as usize))
            }
            Opcode::Getxattr | Opcode::Listxattr => Err(Errno::NOSYS.into()),
            _ => Ok(most),
        }
    });
    let options = uvfs_server::Options::named("failing");
    uvfs_server::mount(fs, at, options).unwrap().wait();
    "ended".into()
}

/// Reads the file of [`failing`] as cat(1) does, then each of its pages. Prints the error that ended the first,
/// or 0, how much it had, the pages that can't be read or are not as they were, and the size.
const READS: &str = "import os, sys\n\
    fd, error, had = os.open(sys.argv[1], os.O_RDONLY), 0, 0\n\
    try:\n\
    \x20 while True:\n\
    \x20\x20 piece = os.read(fd, 131072)\n\
    \x20\x20 if not piece: break\n\
    \x20\x20 had += len(piece)\n\
    except OSError as e: error = e.errno\n\
    bad = []\n\
    for page in range(64):\n\
    \x20 try: read = os.pread(fd, 4096, page * 4096)\n\
    \x20 except OSError as e: read = e.errno\n\
    \x20 if read != bytes([page]) * 4096: bad.append((page, read))\n\
    print(error, had, bad, os.fstat(fd).st_size)";

/// A read that fails behind some bytes is no short one, which every cache would take for the end of the file. The
/// pages around the bad one are read.
#[test]
fn a_bad_place_of_the_hosts_disk_is_no_end_of_a_file() {
    let ways = [
        (Way::Host, ""),
        (Way::Mount, ""),
        (Way::Mount, "direct_io"),
        (Way::Mount, "writeback"),
        (Way::Mount, "uncached"),
        (Way::Run, ""),
    ];
    on_failing_hosts(&ways, |what, (way, _), most, served| {
        let saw = python(way, served, READS);
        let whole = format!(" [({BAD_PAGE}, 5)] {}\n", PAGES * PAGE);
        let had = saw
            .strip_prefix("5 ")
            .unwrap_or_else(|| panic!("{what}: {saw}"));
        let had: u64 = had.split(' ').next().unwrap().parse().unwrap();
        assert!(had <= BAD.start, "{what}: {saw}");
        let no_other = match (way, most) {
            (Way::Host, 3000) => true,
            _ => saw.ends_with(&whole),
        };
        assert!(no_other, "{what}: {saw}");
        // Through the page cache of a kernel a program has all that is before the bad place.
        assert!(way != Way::Run || had == BAD.start, "{what}: {saw}");
    });
}

/// A program learns of an error of the host, and a short write of the host is continued.
#[test]
fn a_write_to_a_bad_place_fails_and_one_that_is_short_is_gone_on_with() {
    let ways = [
        (Way::Mount, ""),
        (Way::Mount, "direct_io"),
        (Way::Mount, "writeback"),
        (Way::Mount, "sync"),
        (Way::Run, ""),
    ];
    on_failing_hosts(&ways, |what, (way, option), _, served| {
        let saw = writes(way, served);
        let caches = way == Way::Run || option == "writeback";
        assert_eq!(saw[0], libc::EIO as u64, "{what}: {saw:?}");
        // The sync fails for what was written into a cache. A write that comes in part to the bad place may fail
        // as a whole, by the rules of the host's kernel.
        let most = if caches { 300_000 } else { BAD.start };
        assert!(
            saw[1] == most || !caches && saw[1] < most,
            "{what}: {saw:?}"
        );
        // All acknowledged bytes were taken.
        let taken = if caches { 0 } else { saw[1] };
        let mut bytes = Vec::new();
        let file = fs::File::open(served.source.join("file")).unwrap();
        file.take(taken).read_to_end(&mut bytes).unwrap();
        assert!(bytes == vec![b'a'; taken as usize], "{what}");
    });
}

/// Runs a test each way on a host with a bad place, first with whole calls of the host, then with short ones.
fn on_failing_hosts(ways: &[(Way, &str)], test: impl Fn(&str, (Way, &str), usize, &Served)) {
    if !can() {
        return;
    }
    for most in [usize::MAX, 3000] {
        for &(way, option) in ways {
            let (served, mut host) = failing_host(option, most);
            let what = format!("{way:?} {option} {most}");
            test(&what, (way, option), most, &served);
            drop(served);
            host.wait(SOON).expect("it ends with its mount").ok();
        }
    }
}

/// `uvfs stats` finds the server without a call on the mount: it waits for no source that hangs, and needs no
/// extended attributes.
#[test]
fn stats_are_shown_of_a_source_that_hangs_and_one_without_attributes() {
    if !can() {
        return;
    }
    let (served, mut host) = failing_host("", usize::MAX);
    // The kernel asks such a file system once, and then no more.
    let asked = rustix::fs::getxattr(&served.source, "user.any", &mut [0u8; 16]);
    assert_eq!(asked, Err(Errno::OPNOTSUPP));
    let text = run(uvfs().arg("stats").arg(&served.source)).ok();
    assert!(
        text.contains(&format!("server     pid {},", host.pid())),
        "{text}"
    );
    host.signal(Signal::STOP);
    let mut stats = Running::start(uvfs().arg("stats").arg(&served.mount.at));
    let shown = stats.wait(SOON);
    host.signal(Signal::CONT);
    let text = shown.expect("it asks no server that hangs").ok();
    let server = served.mount.server.pid();
    assert!(
        text.contains(&format!("server     pid {server},")),
        "{text}"
    );
    drop(served);
    host.wait(SOON).expect("it ends with its mount").ok();
}

/// Serves a mount of [`failing`], which a process of its own serves.
fn failing_host(option: &str, most: usize) -> (Served, Running) {
    let scratch = Scratch::new();
    let (source, most) = (scratch.dir("source"), most.to_string());
    // It outlives the directory.
    let report = Path::new("/dev/null");
    let host = Running::start(&mut own_process::call("failing", &source, &most, report));
    wait_for("the failing file system", || mounted(&source).is_some());
    let serve = Serve::for_clients(ANY).option(option);
    let mount = Mount::new(&serve, &source, &scratch.dir("mount"));
    let served = Served {
        mount,
        source,
        scratch,
    };
    (served, host)
}
