//! Neighbours that try to harm a mount, or to use it against others.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use rustix::thread::{CpuSet, sched_setaffinity};
use uvfs_client::{Client, Config, Flags, Server, Token};
use uvfs_queue::attach;

use crate::child;
use crate::harness::*;
use crate::preload::{How, served_any, uvfs_run};

/// The transport of tests that are about something else.
const ANY: Transport = Transport::Dev;
/// Somebody who has nothing to do with the server.
const USER: u32 = 54_321;

/// If the server kept the capability to exceed quotas (CAP_SYS_RESOURCE), every user of its mount would
/// exceed theirs; the others are of no use to it, and of much to who takes it over. The effect on quotas
/// itself is not seen here: kernels without them are common.
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

/// If the mode of the control socket alone kept others out, they could ask before it is set.
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

/// If the server took space as root for everybody, every user of its mount could take the blocks that the host's
/// file system keeps for root, who then could not even log in.
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

/// Takes a write lease of a file of its own, and waits to be stopped.
pub fn leaseholder(dir: &Path, ready: &str) -> String {
    let held = fs::File::create(dir.join("held")).unwrap();
    let token = Token::of(held.as_fd()).unwrap();
    let client = Client::new(Server::connect(token.socket()).unwrap(), Config::default()).unwrap();
    let file = client.import(held.as_fd()).unwrap();
    file.write_at(b"held back", 0, Flags::empty()).unwrap();
    fs::write(ready, "").unwrap();
    loop {
        std::thread::park();
    }
}

/// A client that has the write lease of a file, and answers no recall.
fn stopped_leaseholder(served: &Served) -> Running {
    let (report, ready) = (served.scratch.path("holder"), served.scratch.path("holds"));
    let argument = ready.to_str().unwrap();
    let at = &served.mount.at;
    let holder = Running::start(&mut child::call("leaseholder", at, argument, &report));
    wait_for("the lease", || ready.exists());
    holder.signal(Signal::STOP);
    assert_eq!(fs::read(served.source.join("held")).unwrap(), b"");
    holder
}

/// On one core, more callers than its queue has entries want to see files. Reports for how long another
/// caller then waits for something else, and goes without those that still wait.
pub fn crowd(dir: &Path, name: &str) -> String {
    let mut core = CpuSet::new();
    core.set(0);
    sched_setaffinity(None, &core).unwrap();
    for number in 0..150 {
        let path = dir.join(name.replace('#', &number.to_string()));
        std::thread::spawn(move || fs::metadata(path).map(|found| found.len()));
    }
    // All of them are under way.
    std::thread::sleep(Duration::from_millis(300));
    let began = Instant::now();
    assert!(fs::metadata(dir.join("none")).is_err());
    began.elapsed().as_millis().to_string()
}

/// If those who wait for a lease could fill a queue for as long as its holder may take, one client
/// would stop a whole mount with a file of its own.
#[test]
fn a_crowd_that_waits_for_a_lease_stops_nobody_else() {
    for transport in [Transport::Dev, Transport::Uring] {
        if !has(&[Need::Mount(transport), Need::Uvfs]) {
            continue;
        }
        let served = Served::new(&Serve::over(transport).option("nopassthrough"));
        let mut holder = stopped_leaseholder(&served);
        let report = served.scratch.path("crowd");
        let command = &mut child::call("crowd", &served.mount.at, "held", &report);
        served.mount.run(command).ok();
        let waited: u64 = fs::read_to_string(report).unwrap().parse().unwrap();
        println!("{transport:?}: {waited} ms");
        // The time that a client has for a recall is five seconds, counted from 0.3 s earlier.
        assert!(waited < 2500, "{transport:?}: {waited} ms");
        assert_eq!(fs::read(served.source.join("held")).unwrap(), b"held back");
        holder.kill();
    }
}

/// Looks at the file "held", while signals come that it handles, or that end it.
pub fn signalled(dir: &Path, ready: &str) -> String {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing; the action lives as long as the call, and zeros are valid.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        assert_eq!(
            libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()),
            0
        );
    }
    fs::write(ready, "").unwrap();
    fs::metadata(dir.join("held")).unwrap().len().to_string()
}

/// Whether a killed caller ended before the lease that it waited for did; who only got a signal waited.
fn killed_caller_ends(transport: Transport) -> bool {
    let served = Served::new(&Serve::over(transport).option("nopassthrough"));
    let mut holder = stopped_leaseholder(&served);
    let start = |name: &str| -> (Running, PathBuf) {
        let (report, ready) = (served.scratch.path(name), served.scratch.path("looks"));
        let _ = fs::remove_file(&ready);
        let argument = ready.to_str().unwrap();
        let at = &served.mount.at;
        let caller = Running::start(&mut child::call("signalled", at, argument, &report));
        wait_for("the caller", || ready.exists());
        std::thread::sleep(Duration::from_millis(100));
        (caller, report)
    };
    let (mut signalled, report) = start("signalled");
    let (mut killed, _) = start("killed");
    signalled.signal(Signal::USR1);
    // The kernel says only once that a caller was interrupted.
    killed.signal(Signal::USR1);
    std::thread::sleep(Duration::from_millis(100));
    killed.signal(Signal::KILL);
    killed.wait(SOON).expect("it ends");
    let before = fs::read(served.source.join("held")).unwrap().is_empty();
    signalled.wait(SOON).expect("the lease ends").ok();
    assert_eq!(fs::read_to_string(report).unwrap(), "9");
    holder.kill();
    before
}

/// If interrupts were not looked at, a killed caller would stay until the lease came back; and if each
/// counted, callers would get an error that no other file system gives.
#[test]
fn a_killed_caller_waits_for_no_lease_and_a_signalled_one_does() {
    for transport in [Transport::Dev, Transport::Uring] {
        if has(&[Need::Mount(transport), Need::Uvfs]) {
            // On a loaded machine the five seconds of the lease may pass before the callers are there.
            let ends = (0..4).any(|_| killed_caller_ends(transport));
            assert!(ends, "{transport:?}: it ended only after the lease did");
        }
    }
}

/// If the client did not know of it, a write to a mount that is to be synchronous would only be in the
/// memory of the program that `uvfs run` serves.
#[test]
fn a_synchronous_mount_holds_nothing_back_under_uvfs_run() {
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("python3")]) {
        return;
    }
    // The host's file, before this one is closed or synced.
    let script = "import os, sys\n\
        fd = os.open(sys.argv[1] + '/file', os.O_CREAT | os.O_RDWR)\n\
        os.write(fd, b'first')\n\
        os.pwrite(fd, b'second', 5)\n\
        print(open(sys.argv[2] + '/file').read())";
    for (option, expected) in [("async", ""), ("sync", "firstsecond")] {
        let served = Served::new(&Serve::for_clients(ANY).option(option));
        let mut command = uvfs_run(How::Eager);
        command.args(["--", "python3", "-c", script]);
        command.arg(&served.mount.at).arg(&served.source);
        let outcome = served.mount.run(&mut command);
        assert!(served_any(&outcome), "{option}: {outcome}");
        assert_eq!(outcome.ok().trim(), expected, "{option}");
    }
}

/// If the library's waits had no end, a program would never have its files back from a server that answers
/// nothing. Afterwards it is the kernel's call that waits, until the server goes on.
#[test]
fn a_silent_server_gives_its_files_back_to_the_kernel() {
    const BOUND: Duration = Duration::from_secs(2);
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("python3")]) {
        return;
    }
    let script = "import os, sys, time\n\
        fd = os.open(sys.argv[1] + '/file', os.O_CREAT | os.O_RDWR)\n\
        for at in range(0, 1 << 20, 4096): os.pwrite(fd, b'a' * 4096, at)\n\
        print('written', flush=True)\n\
        while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n\
        os.pwrite(fd, b'late', 4096)\n\
        os.fsync(fd)\n\
        print('synced', flush=True)";
    let served = Served::new(&Serve::for_clients(ANY).option("nopassthrough"));
    let sign = served.scratch.path("sign");
    let mut command = uvfs_run(How::Eager);
    let bound = BOUND.as_secs().to_string();
    command.args(["--timeout", &bound, "--reconnect", "0"]);
    command.args(["--", "python3", "-c", script]);
    command.arg(&served.mount.at).arg(&sign);
    let mut program = Running::start(&mut command);
    wait_for("the file is written", || {
        program.stdout().contains("written")
    });
    let server = Pid::from_raw(served.mount.server.pid() as i32).unwrap();
    // A request of the library's own may be under way when the server stops.
    let began = Instant::now();
    served.mount.server.signal(Signal::STOP);
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(server), options).unwrap();
    fs::write(sign, "").unwrap();
    let gives_up = "going on through the kernel";
    let given_up = wait_until(SOON, || program.stderr().contains(gives_up));
    let took = began.elapsed();
    let waits = program.ended().is_none() && !program.stdout().contains("synced");
    served.mount.server.signal(Signal::CONT);
    assert!(given_up && took >= BOUND, "{took:?} {}", program.stderr());
    assert!(waits, "nobody can have synced it");
    let outcome = program.wait(SOON).expect("it goes on");
    assert!(served_any(&outcome), "{outcome}");
    outcome.ok();
    let mut expected = vec![b'a'; 1 << 20];
    expected[4096..4100].copy_from_slice(b"late");
    assert!(fs::read(served.source.join("file")).unwrap() == expected);
}

/// If a host's call on a mount below the source kept its queue's thread, a neighbour that never answers
/// would stop the whole mount.
#[test]
fn a_hung_mount_below_the_source_stops_nobody_else() {
    for transport in [Transport::Dev, Transport::Uring] {
        if !has(&[Need::Mount(transport), Need::Uvfs]) {
            continue;
        }
        let served = Served::new(&Serve::over(transport));
        let (other, below) = (served.scratch.dir("other"), served.source.join("below"));
        fs::create_dir(&below).unwrap();
        fs::write(other.join("1"), "one").unwrap();
        let mut hung = Mount::new(&Serve::over(ANY), &other, &below);
        // While it answers it is as everything else.
        let script = "cd \"$1/below\"; cat 1; ls; mkdir -p d/e; mv d/e f; echo new >2; stat -c %s 2; rm 2; ls";
        let mut looks = shell(script, &[&served.mount.at]);
        let seen = served.mount.run(&mut looks).ok();
        assert_eq!(seen, "one1\n4\n1\nd\nf\n");
        hung.server.signal(Signal::STOP);
        let report = served.scratch.path("crowd");
        let crowd = &mut child::call("crowd", &served.mount.at, "below/#", &report);
        let mut crowd = Running::start(crowd);
        let outcome = crowd.wait(Duration::from_secs(40));
        if outcome.is_none() {
            hung.server.signal(Signal::CONT);
        }
        outcome.expect("those who wait can be ended").ok();
        let waited: u64 = fs::read_to_string(report).unwrap().parse().unwrap();
        println!("{transport:?}: {waited} ms");
        // And then it goes on.
        hung.server.signal(Signal::CONT);
        let mut looks = shell("cat \"$1/below/1\"", &[&served.mount.at]);
        assert_eq!(served.mount.run(&mut looks).ok(), "one");
        // The server closes what it has open there with its own mount.
        hung.expect_gone();
        served.mount.unmount().ok();
    }
}

/// Open files of a mount that hangs, more than the mount has threads for them, and than a ring has.
const HUNG_FILES: usize = 20;

/// Opens files, and then has as many threads on one core ask for something that is about open files. Reports for
/// how long another caller then waits for something else.
pub fn crowd_of_open_files(dir: &Path, argument: &str) -> String {
    let (kind, signs) = argument.rsplit_once(' ').unwrap();
    let (kind, signs) = (kind.to_owned(), Path::new(signs));
    let open = |name: String| {
        let path = dir.join("below").join(name);
        let mut options = fs::File::options();
        options.read(true).write(true).open(path).unwrap()
    };
    let mut core = CpuSet::new();
    core.set(0);
    sched_setaffinity(None, &core).unwrap();
    let files = (0..HUNG_FILES).map(|n| (open(format!("from{n}")), open(format!("to{n}"))));
    let files: Vec<_> = files.collect();
    fs::write(signs.join("open"), "").unwrap();
    wait_for("the file system to stop", || signs.join("stopped").exists());
    for (from, to) in files {
        let kind = kind.clone();
        std::thread::spawn(move || match &*kind {
            "ioctl" => drop(rustix::fs::ioctl_getflags(&from)),
            "copy" => drop(rustix::fs::copy_file_range(&from, None, &to, None, 3)),
            "large copy" => drop(rustix::fs::copy_file_range(&from, None, &to, None, 1 << 20)),
            "read" => drop(rustix::io::pread(&from, &mut [0; 8], 1 << 17)),
            "write" => drop(rustix::io::pwrite(&to, b"late", 0)),
            "allocation" => {
                let mode = rustix::fs::FallocateFlags::empty();
                let _ = rustix::fs::fallocate(&to, mode, 0, 1 << 20);
            }
            "fsync" => drop(from.sync_all()),
            _ => drop(rustix::fs::fcntl_lock(
                &to,
                rustix::fs::FlockOperation::LockExclusive,
            )),
        });
    }
    std::thread::sleep(Duration::from_millis(300));
    let began = Instant::now();
    assert!(fs::metadata(dir.join("none")).is_err());
    let mut other = fs::File::create(dir.join("other")).unwrap();
    other.write_all(&vec![7; 1 << 20]).unwrap();
    other.sync_all().unwrap();
    began.elapsed().as_millis().to_string()
}

/// If calls on open files waited on a queue's thread, or took the threads that its ring has for all files, those
/// of a neighbour that never answers would stop the whole mount.
#[test]
fn calls_on_open_files_of_a_hung_mount_stop_nobody_else() {
    if !has(&[Need::Mount(ANY), Need::Uvfs]) {
        return;
    }
    let kinds = [
        "ioctl",
        "copy",
        "large copy",
        "lock",
        "read",
        "write",
        "allocation",
        "fsync",
    ];
    for kind in kinds {
        // The second takes locks from its own kernel, so the first waits for it.
        let serve = Serve::over(ANY)
            .option("host_locks")
            .option("nopassthrough");
        let served = Served::new(&serve);
        let (other, below) = (served.scratch.dir("other"), served.source.join("below"));
        fs::create_dir(&below).unwrap();
        for n in 0..HUNG_FILES {
            fs::write(other.join(format!("from{n}")), vec![b'f'; 1 << 18]).unwrap();
            fs::write(other.join(format!("to{n}")), "early").unwrap();
        }
        let mut hung = Mount::new(&serve, &other, &below);
        let (signs, report) = (served.scratch.dir("signs"), served.scratch.path("crowd"));
        let argument = format!("{kind} {}", signs.display());
        let crowd = &mut child::call("crowd_of_open_files", &served.mount.at, &argument, &report);
        let mut crowd = Running::start(crowd);
        wait_for("the files to be open", || signs.join("open").exists());
        hung.server.signal(Signal::STOP);
        fs::write(signs.join("stopped"), "").unwrap();
        // Its end may wait for the hung mount, as it would on the host: each close is a request there.
        let saw = wait_until(Duration::from_secs(20), || report.exists());
        hung.server.signal(Signal::CONT);
        crowd.wait(SOON).expect("all calls end").ok();
        assert!(saw, "{kind}: the mount stood still");
        let waited: u64 = fs::read_to_string(report).unwrap().parse().unwrap();
        println!("{kind}: {waited} ms");
        assert!(waited < 10_000, "{kind}: {waited} ms");
        // And it goes on: all are read, written and closed as before.
        let script =
            "cd \"$1/below\"; echo new >to0; cat to0; head -c 3 from1; flock to1 echo locked";
        let seen = served.mount.run(&mut shell(script, &[&served.mount.at]));
        assert_eq!(seen.ok(), "new\nffflocked\n");
        hung.expect_gone();
        served.mount.unmount().ok();
    }
}

/// If an open waited on a queue's thread for a program of the host that does not give up its lease of the file, that
/// program would stop the mount for 45 s, with a file of its own, and again.
#[test]
fn a_host_program_with_leases_stops_nobody() {
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("python3")]) {
        return;
    }
    const HOLDS: &str = "import fcntl, os, signal, sys, time\n\
        signal.signal(signal.SIGIO, signal.SIG_IGN)\n\
        held = [os.open(sys.argv[1] + '/leased%d' % n, os.O_RDWR) for n in range(8)]\n\
        for fd in held: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
        print('held', flush=True)\n\
        time.sleep(1000)";
    for transport in [Transport::Dev, Transport::Uring] {
        if !has(&[Need::Mount(transport)]) {
            continue;
        }
        let served = Served::new(&Serve::over(transport));
        for n in 0..8 {
            fs::write(served.source.join(format!("leased{n}")), "mine").unwrap();
        }
        let holds = &mut Command::new("python3");
        let mut holder = Running::start(holds.args(["-c", HOLDS]).arg(&served.source));
        wait_for("the leases", || holder.stdout().contains("held"));
        let script = "for n in 0 1 2 3 4 5 6 7; do cat \"$1/leased$n\" & done; wait";
        let mut opens = Running::start(&mut shell(script, &[&served.mount.at]));
        let mut script = shell(
            "sleep 0.5; echo here >\"$1/other\"; cat \"$1/other\"",
            &[&served.mount.at],
        );
        let seen = (served.mount).run_within(Duration::from_secs(20), &mut script);
        let waiting = opens.ended().is_none();
        holder.kill();
        assert_eq!(seen.ok(), "here\n", "{transport}");
        assert!(waiting, "{transport}: they open it without the holder");
        let opened = opens.wait(SOON).expect("the holder is gone").ok();
        assert_eq!(opened, "mine".repeat(8), "{transport}");
    }
}

/// Attaches with descriptors that nobody can close: of a file whose file system stopped answering.
pub fn attach_with_hung_files(dir: &Path, argument: &str) -> String {
    let (socket, flags) = argument.split_once(' ').unwrap();
    let flags = Path::new(flags);
    let file = fs::File::open(dir.join("1")).unwrap();
    fs::write(flags.join("open"), "").unwrap();
    wait_for("the file system to stop", || flags.join("stopped").exists());
    let message = attach::Message {
        errno: 0,
        max_payload: 0,
        source: [0; 16],
    };
    let mut refused = 0;
    // More than the server closes at a time.
    for _ in 0..40 {
        let stream = UnixStream::connect(socket).unwrap();
        attach::send(&stream, message, &[file.as_fd(), file.as_fd()]).unwrap();
        let answer = attach::receive(&stream).unwrap().0.errno;
        assert!([libc::EINVAL, libc::EAGAIN].contains(&answer), "{answer}");
        refused += 1;
    }
    fs::write(flags.join("done"), refused.to_string()).unwrap();
    // Its own descriptor can't be closed either, for now.
    "ok".into()
}

/// If the server closed what a client sends itself, it would wait for whoever serves that file.
#[test]
fn descriptors_that_cannot_be_closed_stop_nobody() {
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("getfattr")]) {
        return;
    }
    let served = Served::new(&Serve::over(ANY));
    let (other, at) = (served.scratch.dir("other"), served.scratch.dir("hung"));
    fs::write(other.join("1"), "one").unwrap();
    // With the host's locks each close is a request.
    let hung = Mount::new(&Serve::over(ANY).option("host_locks"), &other, &at);
    let socket = run(Command::new("getfattr")
        .args(["--only-values", "-n", "user.uvfs.socket"])
        .arg(&served.mount.at))
    .ok();
    let (flags, report) = (served.scratch.dir("flags"), served.scratch.path("report"));
    let argument = format!("{} {}", socket.trim_end_matches('\0'), flags.display());
    let call = &mut child::call("attach_with_hung_files", &hung.at, &argument, &report);
    let mut hostile = Running::start(call);
    wait_for("the file", || flags.join("open").exists());
    hung.server.signal(Signal::STOP);
    fs::write(flags.join("stopped"), "").unwrap();
    let refused = wait_until(Duration::from_secs(60), || flags.join("done").exists());
    // Others are served meanwhile.
    let seen = served.mount.run_within(
        Duration::from_secs(20),
        &mut shell(
            "echo still >\"$1/here\"; cat \"$1/here\"",
            &[&served.mount.at],
        ),
    );
    hung.server.signal(Signal::CONT);
    assert!(refused, "the server waits");
    assert_eq!(seen.ok(), "still\n");
    hostile.wait(SOON).expect("it can close its file now").ok();
    served.mount.unmount().ok();
    hung.unmount().ok();
}
