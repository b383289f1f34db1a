//! A mount when something else breaks: the server dies, the source is full, read-only or
//! changed behind the mount's back, or many programs wait for a lock.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

use crate::child;
use crate::harness::*;

fn server_killed(transport: Transport) {
    if !has(&[Need::Mount(transport)]) {
        return;
    }
    let mut served = Served::new(&Serve::over(transport));
    let at = served.mount.at.clone();
    let mut reader = Running::start(
        shell(
            // An open for appending gets no backing file, with which the shell would go on.
            "exec 3>>\"$1/held\"; while echo x >&3; do sleep 0.01; done",
            &[&at],
        )
        .env("LC_ALL", "C"),
    );
    wait_for("the first write", || {
        served
            .source
            .join("held")
            .metadata()
            .is_ok_and(|m| m.len() > 0)
    });
    served.mount.expect_gone();
    served.mount.server.signal(Signal::KILL);
    served
        .mount
        .server
        .wait(SOON)
        .expect("a killed server ends");
    // A call that was under way when the connection ended may fail with ECONNABORTED.
    let (gone, aborted) = (
        "Transport endpoint is not connected",
        "Software caused connection abort",
    );
    wait_for(gone, || {
        let outcome = served
            .mount
            .run(Command::new("stat").arg(&at).env("LC_ALL", "C"));
        let expected = [gone, aborted].iter().any(|e| outcome.stderr.contains(e));
        assert!(expected, "{outcome}");
        outcome.stderr.contains(gone)
    });
    let outcome = reader
        .wait(SOON)
        .expect("a program with an open file goes on");
    // Shells differ in how they name the error that ended the loop.
    assert!(!outcome.stderr.is_empty(), "{outcome}");
    assert!(mounted(&at).is_some());
    if has(&[Need::Uvfs]) {
        run(uvfs().arg("umount").arg(&at)).ok();
        assert!(mounted(&at).is_none(), "uvfs umount left the dead mount");
        // The mount point serves again.
        Mount::new(&Serve::over(transport), &served.source, &at).unmount();
    }
}

/// No program hangs on the mount of a server that was killed, and it can be mounted again.
#[test]
fn server_killed_dev() {
    server_killed(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn server_killed_uring() {
    server_killed(Transport::Uring);
}

/// Writes until it fails, or closing or fsync does; reports the error and what came of it.
pub fn fill(dir: &Path, _: &str) -> String {
    let path = dir.join("large");
    let mut file = File::create(&path).unwrap();
    let block = vec![7; 65536];
    let written = (0..256).try_for_each(|_| file.write_all(&block));
    let result = written.and_then(|()| file.sync_all());
    let error = result.map_or_else(|e| e.raw_os_error().unwrap_or(0), |()| 0);
    drop(file);
    fs::remove_file(&path).unwrap();
    let again = fs::write(dir.join("small"), vec![8; 65536]).is_ok();
    let content = fs::read(dir.join("small")).unwrap_or_default();
    format!("{error} {again} {}", content == vec![8; 65536])
}

fn source_full(transport: Transport) {
    if !has(&[Need::Mount(transport)]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "2m");
    let at = scratch.dir("mount");
    for option in ["", "writeback", "direct_io"] {
        let mount = Mount::new(&Serve::over(transport).option(option), &source, &at);
        let report = scratch.path("report");
        mount.run(&mut child::call("fill", &at, "", &report)).ok();
        let expected = format!("{} true true", Errno::NOSPC.raw_os_error());
        assert_eq!(
            fs::read_to_string(report).unwrap(),
            expected,
            "-o {option:?}"
        );
        mount.unmount();
    }
}

/// A full source gives ENOSPC, and loses no data that a write has acknowledged.
#[test]
fn source_full_dev() {
    source_full(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn source_full_uring() {
    source_full(Transport::Uring);
}

/// Asserts that everything that would change the file system fails with EROFS.
fn assert_read_only(mount: &Mount) {
    for (script, works) in [
        ("cat \"$1/file\"; ls \"$1\"; stat \"$1/file\"", true),
        ("echo >>\"$1/file\"", false),
        ("echo >\"$1/new\"", false),
        ("mkdir \"$1/new\"", false),
        ("rm \"$1/file\"", false),
        ("mv \"$1/file\" \"$1/other\"", false),
        ("chmod 600 \"$1/file\"", false),
        ("ln -s x \"$1/new\"", false),
        ("truncate -s 0 \"$1/file\"", false),
        ("setfattr -n user.x -v y \"$1/file\"", false),
    ] {
        let outcome = mount.run(shell(script, &[&mount.at]).env("LC_ALL", "C"));
        assert_eq!(outcome.status.success(), works, "{outcome}");
        assert!(
            works || outcome.stderr.contains("Read-only file system"),
            "{outcome}"
        );
    }
}

/// Changes on a read-only source fail with EROFS.
#[test]
fn source_read_only() {
    if !has(&[Need::Mount(Transport::Dev)]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "2m");
    fs::write(source.join("file"), "content").unwrap();
    rustix::mount::mount_remount(&source, MountFlags::RDONLY, "").unwrap();
    let mount = Mount::new(&Serve::over(Transport::Dev), &source, &scratch.dir("mount"));
    assert_read_only(&mount);
    mount.unmount();
}

/// With `-o ro` no program changes the source.
#[test]
fn mounted_read_only() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "2m");
    fs::write(source.join("file"), "content").unwrap();
    let serve = Serve::over(Transport::Dev).option("ro");
    let mount = Mount::new(&serve, &source, &scratch.dir("mount"));
    assert!(
        mounted(&mount.at)
            .unwrap()
            .options
            .iter()
            .any(|o| o == "ro")
    );
    assert_read_only(&mount);
    mount.unmount();
}

/// Opens a file, says so by making `opened` in the argument's directory, waits for `removed`
/// there, and reports what is left of the file.
pub fn hold_and_read(dir: &Path, signs: &str) -> String {
    let mut held = File::open(dir.join("sub/held")).unwrap();
    let mut content = String::new();
    held.read_to_string(&mut content).unwrap();
    let signs = Path::new(signs);
    fs::write(signs.join("opened"), "").unwrap();
    wait_for("removed", || signs.join("removed").exists());
    held.rewind().unwrap();
    let mut again = String::new();
    held.read_to_string(&mut again).unwrap();
    let gone = |path: &str| match fs::symlink_metadata(dir.join(path)) {
        Ok(_) => "there".to_owned(),
        Err(e) => match Errno::from_io_error(&e) {
            Some(Errno::NOENT | Errno::STALE) => "gone".to_owned(),
            _ => e.to_string(),
        },
    };
    let listing = fs::read_dir(dir).unwrap().count();
    format!(
        "{} {} {} {listing}",
        content == again,
        gone("sub/held"),
        gone("seen")
    )
}

/// Files are removed at the source itself, behind the mount's back.
fn files_vanish(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Uvfs]) {
        return;
    }
    let serve = Serve::over(transport)
        .option("attr_timeout=0")
        .option("entry_timeout=0");
    let served = Served::new(&serve);
    fs::create_dir(served.source.join("sub")).unwrap();
    fs::write(served.source.join("sub/held"), "content").unwrap();
    fs::write(served.source.join("seen"), "content").unwrap();
    let (report, signs) = (served.scratch.path("report"), served.scratch.dir("signs"));
    let argument = signs.to_str().unwrap();
    served
        .mount
        .run(Command::new("stat").arg(served.at("seen")))
        .ok();
    let mut child = Running::start(&mut child::call(
        "hold_and_read",
        &served.mount.at,
        argument,
        &report,
    ));
    wait_for("opened", || {
        signs.join("opened").exists() || child.ended().is_some()
    });
    fs::remove_dir_all(served.source.join("sub")).unwrap();
    fs::remove_file(served.source.join("seen")).unwrap();
    fs::write(served.source.join("came"), "").unwrap();
    fs::write(signs.join("removed"), "").unwrap();
    let outcome = child.wait(SOON).unwrap_or_else(|| {
        served.mount.abort();
        panic!("the reader hung")
    });
    outcome.ok();
    assert_eq!(fs::read_to_string(report).unwrap(), "true gone gone 1");
    served.mount.unmount();
}

/// Files that the host removes neither hang the programs that have them open nor end the server.
#[test]
fn files_vanish_dev() {
    files_vanish(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn files_vanish_uring() {
    files_vanish(Transport::Uring);
}

/// How often the threads of a process have gone to sleep; `None` while one of them runs.
fn sleeps(pid: u32) -> Option<u64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("a running server");
    let one = |task: std::io::Result<fs::DirEntry>| {
        let status = fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let asleep = field("State:")?.trim().starts_with('S');
        let sleeps = field("voluntary_ctxt_switches:")?.trim().parse::<u64>();
        asleep.then_some(sleeps.ok()?)
    };
    tasks.map(one).sum()
}

fn idle_threads_sleep(transport: Transport) {
    if !has(&[Need::Mount(transport)]) {
        return;
    }
    let served = Served::new(&Serve::over(transport));
    let work = "for i in $(seq 200); do echo $i >\"$1/$i\"; done; cat \"$1\"/* >/dev/null";
    served.mount.run(&mut shell(work, &[&served.mount.at])).ok();
    let server = served.mount.server.pid();
    wait_for("a second in which hardly a thread wakes up", || {
        let before = sleeps(server);
        thread::sleep(Duration::from_secs(1));
        let woken = sleeps(server)
            .zip(before)
            .map(|(after, before)| after - before);
        woken.is_some_and(|woken| woken <= 3)
    });
    served.mount.unmount();
}

/// The threads of an idle server sleep: in a second they wake up three times at most, all together.
#[test]
fn idle_threads_sleep_dev() {
    idle_threads_sleep(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn idle_threads_sleep_uring() {
    idle_threads_sleep(Transport::Uring);
}

const WAITERS: usize = 32;

/// Holds a lock for which half of the waiting processes ask by fcntl and half by flock, does
/// other work meanwhile, and lets them have it. Reports how many got it.
pub fn lock_waiters(dir: &Path, _: &str) -> String {
    // All on one CPU, so that all their requests go to one of the kernel's queues.
    let mut here = CpuSet::new();
    here.set(sched_getcpu());
    sched_setaffinity(None, &here).unwrap();
    let create = |name: &str| File::create(dir.join(name)).unwrap();
    let (posix, whole) = (create("posix"), create("flock"));
    fcntl_lock(&posix, FlockOperation::LockExclusive).unwrap();
    flock(&whole, FlockOperation::LockExclusive).unwrap();
    // The shell's file is opened for appending, so that each waiter's line stays.
    let wait = |n: usize| {
        let script = if n.is_multiple_of(2) {
            r#"echo ready >>"$1.ready"; exec 3<>"$2/flock"; flock -x 3; echo got >>"$1.got""#
        } else {
            // No usual program waits for such a lock, so this one does.
            r#"echo ready >>"$1.ready"; exec 3<>"$2/posix"; "$3" --exact bad_days::posix_lock_from_stdin --nocapture <&3 >/dev/null; echo got >>"$1.got""#
        };
        let mut command = Command::new("bash");
        command
            .args(["-euc", script, "bash"])
            .arg(dir.join("waiters"))
            .arg(dir);
        command
            .arg(std::env::current_exe().unwrap())
            .env("UVFS_TEST_LOCK_STDIN", "1");
        command.spawn().unwrap()
    };
    let mut waiters: Vec<_> = (0..WAITERS).map(wait).collect();
    let lines = |name: &str| {
        fs::read_to_string(dir.join(name))
            .unwrap_or_default()
            .lines()
            .count()
    };
    wait_for("all waiters", || lines("waiters.ready") == WAITERS);
    for n in 0..200 {
        let path = dir.join(format!("other.{n}"));
        fs::write(&path, "x").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "x");
        fs::remove_file(&path).unwrap();
    }
    assert_eq!(lines("waiters.got"), 0, "a lock was given twice");
    drop((posix, whole));
    for waiter in &mut waiters {
        assert!(waiter.wait().unwrap().success());
    }
    lines("waiters.got").to_string()
}

/// Takes a POSIX lock on standard input and ends; does nothing when run as a test.
#[test]
fn posix_lock_from_stdin() {
    if std::env::var_os("UVFS_TEST_LOCK_STDIN").is_some() {
        fcntl_lock(std::io::stdin(), FlockOperation::LockExclusive).unwrap();
    }
}

/// Blocked requests hold up neither the others nor each other.
fn lock_waiters_wait_alone(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Program("flock")]) {
        return;
    }
    for option in ["", "host_locks"] {
        let served = Served::new(&Serve::over(transport).option(option));
        let report = served.scratch.path("report");
        served
            .mount
            .run(&mut child::call(
                "lock_waiters",
                &served.mount.at,
                "",
                &report,
            ))
            .ok();
        let got = fs::read_to_string(report).unwrap();
        assert_eq!(got, WAITERS.to_string(), "-o {option:?}");
        served.mount.unmount();
    }
}

/// Programs that wait for a lock stop no others, and all get it in the end.
#[test]
fn lock_waiters_dev() {
    lock_waiters_wait_alone(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn lock_waiters_uring() {
    lock_waiters_wait_alone(Transport::Uring);
}
