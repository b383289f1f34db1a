//! The end of a mount: `uvfs umount`, and signals.

use super::*;

/// `uvfs umount` and `uvfs mount` tell the mount of a killed server from one that works, and from none.
#[test]
fn dead_mount() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let mut served = Served::new(&Serve::over(Transport::Dev));
    let at = served.mount.at.clone();
    served.mount.expect_gone();
    served.mount.server.signal(Signal::KILL);
    served
        .mount
        .server
        .wait(SOON)
        .expect("a killed server ends");
    let name = at.to_str().unwrap();
    wait_for("the end of the connection", || {
        let outcome = run(&mut mount(&served.source, &at));
        outcome.stderr.contains("dead")
    });
    let again = run(&mut mount(&served.source, &at));
    refused(&again, &[name, "dead server", "uvfs umount"]);
    refused(&run(uvfs().arg("stats").arg(&at)), &[name]);
    assert!(mounted(&at).is_some());
    run(uvfs().arg("umount").arg(&at)).ok();
    refused(&run(uvfs().arg("umount").arg(&at)), &[name, "mounted"]);
    Mount::new(&Serve::over(Transport::Dev), &served.source, &at).unmount();
}

/// `uvfs mount` does not hang at a mount whose server does.
#[test]
fn a_mount_that_hangs() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("at"));
    let name = at.to_str().unwrap();
    run(&mut mount(&source, &at)).ok();
    let server = crate::observe::stats(&at)["pid"].as_i64().unwrap();
    let server = rustix::process::Pid::from_raw(server as i32).unwrap();
    let signal = |signal| rustix::process::kill_process(server, signal).unwrap();
    refused(&run(&mut mount(&source, &at)), &[name, "already mounted"]);
    signal(Signal::STOP);
    let outcome = run(&mut mount(&source, &at));
    signal(Signal::CONT);
    refused(&outcome, &[name, "does not answer", "--force"]);
    run(uvfs().arg("umount").arg(&at)).ok();
}

/// Only root and the user who mounted it may unmount.
#[test]
fn umount_by_somebody_else() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("setpriv"),
    ]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev));
    let program = uvfs_for_all(&served.scratch);
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.arg(&program).arg("umount").arg(&served.mount.at);
    let outcome = served.mount.run(&mut command);
    refused(&outcome, &[served.mount.at.to_str().unwrap()]);
    assert!(mounted(&served.mount.at).is_some());
    served.mount.unmount();
}

/// `uvfs umount` waits for the server's end, after which the source is free.
#[test]
fn a_source_is_free_after_umount() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("at"));
    for round in 0..10 {
        run(Command::new("mount")
            .args(["-t", "tmpfs", "tmpfs"])
            .arg(&source))
        .ok();
        fs::write(source.join("file"), "content").unwrap();
        let mounted = run(&mut mount(&source, &at));
        let read = fs::read_to_string(at.join("file"));
        let unmounted = run(uvfs().arg("umount").arg(&at));
        let freed = run(Command::new("umount").arg(&source));
        unmount_by_force(&at);
        unmount_by_force(&source);
        mounted.ok();
        assert_eq!(read.unwrap(), "content", "{round}");
        assert_eq!(unmounted.ok(), "");
        freed.ok();
    }
}

/// `uvfs umount` fails where there is nothing to unmount.
#[test]
fn umount_of_what_is_not_mounted() {
    if !has(&[Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let dir = scratch.dir("dir");
    refused(
        &run(uvfs().arg("umount").arg(&dir)),
        &["mounted", dir.to_str().unwrap()],
    );
    refused(
        &run(uvfs().arg("umount").arg(scratch.path("nowhere"))),
        &["nowhere"],
    );
    refused(
        &run(uvfs().arg("stats").arg(&dir)),
        &[dir.to_str().unwrap()],
    );
}

/// `uvfs umount` takes away no other file system.
#[test]
fn umount_leaves_other_file_systems_alone() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let other = scratch.tmpfs("other", "1m");
    refused(
        &run(uvfs().arg("umount").arg(&other)),
        &[other.to_str().unwrap()],
    );
    assert!(mounted(&other).is_some());
}

/// In the foreground, each of the signals that ask a program to end unmounts, after what was
/// written has been kept.
fn ended_by_signals(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Uvfs]) {
        return;
    }
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut served = Served::new(&Serve::over(transport).option("writeback"));
        let write = "head -c 8000000 /dev/zero | tr '\\0' x >\"$1/large\"";
        served
            .mount
            .run(&mut shell(write, &[&served.mount.at]))
            .ok();
        served.mount.server.signal(signal);
        let outcome = served.mount.server.wait(SOON);
        let outcome = outcome.unwrap_or_else(|| panic!("{signal:?} does not end the server"));
        assert!(outcome.status.success(), "{signal:?}: {outcome}");
        assert!(
            mounted(&served.mount.at).is_none(),
            "{signal:?}: still mounted"
        );
        served.mount.expect_gone();
        let large = fs::read(served.source.join("large")).unwrap();
        assert!(
            large.len() == 8_000_000 && large.iter().all(|b| *b == b'x'),
            "{signal:?}"
        );
    }
}

/// SIGTERM, SIGINT and SIGHUP unmount.
#[test]
fn ended_by_signals_dev() {
    ended_by_signals(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn ended_by_signals_uring() {
    ended_by_signals(Transport::Uring);
}

/// A busy mount stays, and its users are named.
#[test]
fn busy_mount() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev));
    let at = &served.mount.at;
    let mut user = Running::start(Command::new("sleep").arg("600").current_dir(at));
    let outcome = served.mount.run(uvfs().arg("umount").arg(at));
    let still = mounted(at).is_some();
    let pid = user.pid().to_string();
    user.kill();
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    for word in ["uvfs: ", "in use", &pid, "sleep"] {
        assert!(outcome.stderr.contains(word), "no {word:?}: {outcome}");
    }
    assert!(still, "a busy mount was unmounted");
    served.mount.run(uvfs().arg("umount").arg(at)).ok();
    assert!(mounted(at).is_none());
    let mut served = served;
    let outcome = served
        .mount
        .server
        .wait(SOON)
        .expect("the server ends with its mount");
    served.mount.expect_gone();
    assert!(outcome.status.success(), "{outcome}");
}

/// `uvfs umount` waits a moment for the end of what can't be seen, as the kernel closes the files of a process that has
/// ended a little later.
#[test]
fn an_unseen_user_that_ends() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("python3"),
    ]) {
        return;
    }
    let mut served = Served::new(&Serve::over(Transport::Dev));
    let at = served.mount.at.clone();
    // A descriptor that is under way is in no process.
    let script = "import os, socket, sys, time; a, b = socket.socketpair(); fd = os.open(sys.argv[1], os.O_RDONLY); \
                  socket.send_fds(a, [b'x'], [fd]); os.close(fd); print('sent', flush=True); time.sleep(float(sys.argv[2]))";
    let user = |seconds: &str| {
        let user = command("python3", ["-c", script, at.to_str().unwrap(), seconds]);
        let user = Running::start(&mut { user });
        wait_for("the descriptor to be sent", || {
            user.stdout().contains("sent")
        });
        user
    };
    let mut stays = user("600");
    let outcome = served.mount.run(uvfs().arg("umount").arg(&at));
    stays.kill();
    refused(&outcome, &["in use", "can't be seen"]);
    let mut ends = user("0.5");
    served.mount.run(uvfs().arg("umount").arg(&at)).ok();
    assert!(mounted(&at).is_none());
    ends.kill();
    served.mount.expect_gone();
    let outcome = served.mount.server.wait(SOON).expect("the server ends");
    assert!(outcome.status.success(), "{outcome}");
}
