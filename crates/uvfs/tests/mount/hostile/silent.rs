//! Servers, and file systems below a mount, that stop answering.

use std::fs;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use rustix::thread::{CpuSet, sched_setaffinity};
use uvfs_queue::attach;

use super::ANY;
use crate::harness::*;
use crate::own_process;
use crate::preload::{How, served_any, uvfs_run};

/// The library's waits have an end, after which the kernel has the files of a server that answers nothing. The
/// kernel's calls then wait until the server goes on.
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
    assert!(waits, "the server can't have synced it");
    let outcome = program.wait(SOON).expect("it goes on");
    assert!(served_any(&outcome), "{outcome}");
    outcome.ok();
    let mut expected = vec![b'a'; 1 << 20];
    expected[4096..4100].copy_from_slice(b"late");
    assert!(fs::read(served.source.join("file")).unwrap() == expected);
}

/// A call on a mount below the source that never answers holds no queue's thread.
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
        let crowd = &mut own_process::call("crowd", &served.mount.at, "below/#", &report);
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

/// Calls on open files of a mount that never answers hold no queue's thread, nor the threads that its ring has for
/// all files.
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
        let crowd =
            &mut own_process::call("crowd_of_open_files", &served.mount.at, &argument, &report);
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

/// Attaches with descriptors whose close does not return: of a file whose file system stopped answering.
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

/// The server's threads do not close what a client sends: a close may wait for the server of that file.
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
    let call = &mut own_process::call("attach_with_hung_files", &hung.at, &argument, &report);
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
