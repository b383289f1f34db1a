//! Users of a mount get no more than their share, and other users of the machine get nothing.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use super::ANY;
use crate::harness::*;

/// A user who has nothing to do with the server.
const USER: u32 = 54_321;

/// The same, for other attacks.
pub fn user() -> u32 {
    USER
}

/// The server drops the capability to exceed quotas (CAP_SYS_RESOURCE), so that no user of its mount exceeds theirs,
/// and others that it has no use for. The effect on quotas itself is not seen here: kernels without them are common.
#[test]
fn no_thread_of_a_server_keeps_what_it_does_not_need() {
    const GIVEN_UP: [(u32, &str); 7] = [
        (5, "CAP_KILL"),
        (12, "CAP_NET_ADMIN"),
        (16, "CAP_SYS_MODULE"),
        (17, "CAP_SYS_RAWIO"),
        (19, "CAP_SYS_PTRACE"),
        (24, "CAP_SYS_RESOURCE"),
        (25, "CAP_SYS_TIME"),
    ];
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
            for (bit, name) in GIVEN_UP {
                assert_eq!(bits >> bit & 1, 0, "{name} in {set} {status}");
            }
        }
        threads += 1;
    }
    assert!(threads > 1, "workers among them");
}

/// The helper leads to no file that a user may replace, since mount(8) runs it as root.
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

/// The control socket refuses other users, whatever its mode.
#[test]
fn the_control_socket_answers_no_other_user() {
    let needs = [Need::Mount(ANY), Need::Uvfs, Need::Program("getfattr")];
    if !has(&needs) || !has(&[Need::Program("python3")]) {
        return;
    }
    const ASKS: &str = "import socket, sys\n\
        s = socket.socket(socket.AF_UNIX)\n\
        s.connect(sys.argv[1])\n\
        answer = b''\n\
        try:\n\
        \x20 s.sendall(b'stats\\n')\n\
        \x20 answer = s.recv(100)\n\
        except OSError: pass\n\
        print(len(answer))";
    let served = Served::new(&Serve::over(ANY));
    let path = run(Command::new("getfattr")
        .args(["--only-values", "-n", "user.uvfs.control"])
        .arg(&served.mount.at))
    .ok();
    let path = path.trim_end_matches('\0');
    fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    for (user, answered) in [(0, true), (USER, false)] {
        let mut asks = Command::new("python3");
        asks.args(["-c", ASKS, path]).uid(user).gid(user);
        let answer = run(&mut asks).ok();
        assert_eq!(answer.trim() != "0", answered, "{user}: {answer}");
    }
}

/// Takes space of the directory `$1` in one way until there is none left, and prints how much it got.
const FILLS: &str = "import os, sys\n\
    dir, way = sys.argv[1:3]\n\
    how = os.O_RDWR if way == 'update' else os.O_WRONLY\n\
    fd = os.open(dir + '/own', os.O_CREAT | how)\n\
    model = os.open(dir + '/model', os.O_RDONLY)\n\
    at = 0\n\
    for size in 1 << 20, 4096:\n\
    \x20 try:\n\
    \x20\x20 while at < 64 << 20:\n\
    \x20\x20\x20 if way == 'fallocate': os.posix_fallocate(fd, at, size)\n\
    \x20\x20\x20 if way == 'copy': got = os.copy_file_range(model, fd, size, 0, at)\n\
    \x20\x20\x20 elif way == 'fallocate': got = size\n\
    \x20\x20\x20 else: got = os.pwrite(fd, b'x' * size, at)\n\
    \x20\x20\x20 at += got\n\
    \x20 except OSError as e: assert e.errno == 28, e\n\
    try: os.fsync(fd)\n\
    except OSError as e: assert e.errno == 28, e\n\
    print(at)";

/// The server takes space as the caller, so that users leave the blocks that the host's file system keeps for root.
#[test]
fn blocks_that_are_kept_for_root_are_not_the_users() {
    let needs = [Need::Mount(ANY), Need::Uvfs, Need::Program("mkfs.ext4")];
    if !has(&needs) || !has(&[Need::Program("python3")]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.ext4("source"), scratch.dir("mount"));
    fs::set_permissions(&source, fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(source.join("model"), vec![b'm'; 1 << 20]).unwrap();
    run(Command::new("sync").arg("-f").arg(&source)).ok();
    let space = || rustix::fs::statvfs(&source).unwrap();
    let now = space();
    let (kept, block) = (now.f_bfree - now.f_bavail, now.f_frsize);
    assert!(kept * block > 8 << 20, "{kept} blocks of {block}");
    // Little is left for the users.
    let filler = fs::File::create(source.join("filler")).unwrap();
    let most = (now.f_bavail * block).saturating_sub(8 << 20);
    rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), 0, most).unwrap();
    let fills = |dir: &Path, way: &str, user: u32| {
        let mut fills = Command::new("python3");
        fills.args(["-c", FILLS]).arg(dir).arg(way);
        fills.uid(user).gid(user);
        fills
    };
    for transport in [Transport::Dev, Transport::Uring] {
        if !has(&[Need::Mount(transport)]) {
            continue;
        }
        for option in ["host", "", "nopassthrough", "direct_io", "writeback"] {
            for way in ["write", "update", "fallocate", "copy"] {
                let what = format!("{transport} {option} {way}");
                let mount = (option != "host").then(|| {
                    let serve = Serve::over(transport).option(option);
                    Mount::new(&serve, &source, &at)
                });
                let dir = mount.as_ref().map_or(&source, |mount| &mount.at);
                let got = run(&mut fills(dir, way, USER)).ok();
                let got: u64 = got.trim().parse().unwrap();
                run(Command::new("sync").arg("-f").arg(&source)).ok();
                let left = space().f_bfree;
                assert!(left >= kept / 10 * 9, "{what}: {left} blocks of {kept}");
                assert!(
                    got > 1 << 20 && (got < 16 << 20 || option == "writeback"),
                    "{what}: {got}"
                );
                // They are root's, where the host knows who writes.
                if way == "write" && option == "nopassthrough" {
                    let got = run(&mut fills(dir, way, 0)).ok();
                    assert!(
                        got.trim().parse::<u64>().unwrap() > 8 << 20,
                        "{what}: {got}"
                    );
                    run(Command::new("sync").arg("-f").arg(&source)).ok();
                    let left = space().f_bfree;
                    assert!(left < kept / 2, "{what}: {left} blocks of {kept}");
                }
                fs::remove_file(dir.join("own")).unwrap();
                if let Some(mount) = mount {
                    mount.unmount().ok();
                }
                run(Command::new("sync").arg("-f").arg(&source)).ok();
            }
        }
    }
}

/// Forks `$2` processes on one core, which wait for the lock of `$1`; prints how each ended.
const LOCKS: &str = "import fcntl, os, sys\n\
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n\
    for _ in range(int(sys.argv[2])):\n\
    \x20 if os.fork() == 0:\n\
    \x20\x20\x20 try: fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)\n\
    \x20\x20\x20 except OSError as e: os._exit(e.errno)\n\
    \x20\x20\x20 os._exit(0)\n\
    try:\n\
    \x20 while True: print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)\n\
    except ChildProcessError: pass";

/// If one user's waits for locks could take all places that a queue has for them, no one else's program could wait.
#[test]
fn a_user_who_waits_for_locks_leaves_places_to_others() {
    /// Places of one user.
    const SHARE: usize = 24;
    let needs = [Need::Mount(Transport::Uring), Need::Uvfs];
    if !has(&needs) || !has(&[Need::Program("python3")]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Uring).option("host_locks"));
    let path = served.source.join("locked");
    let held = fs::File::create(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    held.lock().unwrap();
    let waits = |user: u32, count: usize| {
        let mut python = Command::new("python3");
        python.args(["-c", LOCKS]).arg(served.at("locked"));
        python.arg(count.to_string()).uid(user).gid(user);
        Running::start(&mut python)
    };
    let ended = |running: &Running, how: i32| {
        let how = how.to_string();
        running.stdout().lines().filter(|line| *line == how).count()
    };
    let refused = rustix::io::Errno::NOLCK.raw_os_error();
    let mut users = Vec::new();
    // The second user's share is whole. One more is refused, by which one sees that the others wait.
    for (user, more) in [(USER, 10), (USER + 1, 1)] {
        let mut running = waits(user, SHARE + more);
        wait_for("what is above the share", || {
            ended(&running, refused) == more || running.ended().is_some()
        });
        users.push((running, more));
    }
    held.unlock().unwrap();
    for (mut running, more) in users {
        let outcome = running.wait(SOON).expect("all end");
        assert_eq!(ended(&running, refused), more, "{outcome}");
        assert_eq!(ended(&running, 0), SHARE, "{outcome}");
    }
}
