//! Many programs that wait for a lock.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

use crate::harness::*;
use crate::own_process;

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
            r#"echo ready >>"$1.ready"; exec 3<>"$2/posix"; "$3" --exact lock_waiters::posix_lock_from_stdin --nocapture <&3 >/dev/null; echo got >>"$1.got""#
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
            .run(&mut own_process::call(
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
