//! Neighbours that try to harm a mount, or to use it against others.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::harness::*;

/// The transport of tests that are about something else.
const ANY: Transport = Transport::Dev;

/// If the server kept the capability to exceed quotas (CAP_SYS_RESOURCE), every user of its mount would
/// exceed theirs. The effect itself is not seen here: kernels without quotas are common.
#[test]
fn no_thread_of_a_server_may_exceed_disk_quotas() {
    const CAP_SYS_RESOURCE: u32 = 24;
    if !has(&[Need::Mount(ANY), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::over(ANY));
    let tasks = format!("/proc/{}/task", served.mount.server.pid());
    let mut threads = 0;
    for task in fs::read_dir(tasks).unwrap() {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        for set in ["CapPrm:", "CapEff:", "CapInh:"] {
            let line = status.lines().find_map(|line| line.strip_prefix(set));
            let bits = u64::from_str_radix(line.unwrap().trim(), 16).unwrap();
            assert_eq!(bits >> CAP_SYS_RESOURCE & 1, 0, "{set} {status}");
        }
        threads += 1;
    }
    assert!(threads > 1, "workers among them");
}

/// If only the text of the paths were compared, this server would come to serve its own mount, and hang.
#[test]
fn a_source_that_contains_its_mount_point_by_another_path() {
    if !has(&[Need::Mount(ANY), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    // A mount of its own that shares what is mounted below it.
    let source = scratch.tmpfs("source", "64m");
    run(Command::new("mount").arg("--make-shared").arg(&source)).ok();
    let other = scratch.dir("other");
    run(Command::new("mount").arg("--bind").arg(&source).arg(&other)).ok();
    fs::create_dir(source.join("mnt")).unwrap();
    fs::write(source.join("mnt/hidden"), "here").unwrap();
    let mount = Mount::new(&Serve::over(ANY), &source, &other.join("mnt"));
    let listing = run_within(
        Duration::from_secs(20),
        Command::new("find")
            .arg(&mount.at)
            .arg("-name")
            .arg("hidden"),
    )
    .ok();
    assert_eq!(
        listing.trim(),
        mount.at.join("mnt/hidden").display().to_string()
    );
}

/// If the helper led to a file that a user may replace, mount(8) would run that user's program as root.
#[test]
fn the_helper_leads_only_to_what_root_alone_can_change() {
    if !has(&[Need::Mount(ANY), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (bin, sbin) = (scratch.dir("bin"), scratch.dir("sbin"));
    let program = bin.join("uvfs");
    fs::copy(env!("CARGO_BIN_EXE_uvfs"), &program).unwrap();
    let install = || {
        run(Command::new(&program)
            .args(["install-helper", "--dir"])
            .arg(&sbin))
    };
    let link = sbin.join("mount.fuse.uvfs");
    let refused = |why: &str| {
        let outcome = install();
        assert_eq!(outcome.status.code(), Some(1), "{why}: {outcome}");
        assert!(outcome.stderr.contains("bin"), "{why}: {outcome}");
        assert!(fs::symlink_metadata(&link).is_err(), "{why}");
    };
    chown(&program, Some(1234), None).unwrap();
    refused("another user's file");
    chown(&program, Some(0), None).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o775)).unwrap();
    refused("a file that a group may write");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&bin, fs::Permissions::from_mode(0o777)).unwrap();
    refused("a directory that all may write");
    fs::set_permissions(&bin, fs::Permissions::from_mode(0o755)).unwrap();
    install().ok();
    assert_eq!(fs::read_link(&link).unwrap(), program);
}

/// If a client of the control socket could take its time, it would hold up the server's end.
#[test]
fn a_slow_client_of_the_control_socket_holds_up_nobody() {
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("getfattr")]) {
        return;
    }
    let served = Served::new(&Serve::over(ANY));
    let path = run(Command::new("getfattr")
        .args(["--only-values", "-n", "user.uvfs.control"])
        .arg(&served.mount.at))
    .ok();
    let mut slow = UnixStream::connect(path.trim_end_matches('\0')).unwrap();
    let began = Instant::now();
    // It never ends its line, and never stops for as long as one call may wait.
    let ended = std::iter::from_fn(|| {
        std::thread::sleep(Duration::from_millis(300));
        Some(slow.write_all(b"s"))
    })
    .take(100)
    .any(|sent| sent.is_err());
    assert!(ended, "the server listens to it still");
    println!("dropped after {:?}", began.elapsed());
    let mut rest = Vec::new();
    let _ = slow.read_to_end(&mut rest);
    served.mount.unmount().ok();
}
