//! Signals for the server of a mount in use, servers that are killed, and `uvfs umount` of several mounts.

use super::*;

/// A program that has a file of the mount open, and writes to it when it gets SIGUSR1.
fn user_of(mount: &Mount) -> Running {
    let script = "exec 3>>\"$1/file\"; trap 'echo late >&3; echo wrote' USR1; echo there; while :; do sleep 0.05; done";
    let user = Running::start(&mut shell(script, &[&mount.at]));
    wait_for("a user of the mount", || user.stdout().contains("there"));
    user
}

fn says(mount: &Mount, words: &[&str]) {
    let all = || {
        words
            .iter()
            .all(|word| mount.server.stderr().contains(word))
    };
    let said = wait_until(SOON, all);
    assert!(said, "not {words:?}: {}", mount.server.stderr());
}

/// A busy server names its users, waits for them, and keeps their changes.
fn in_use(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Uvfs]) {
        return;
    }
    let mut served = Served::new(&Serve::over(transport).option("writeback"));
    let mut user = user_of(&served.mount);
    let pid = user.pid().to_string();
    served.mount.server.signal(Signal::INT);
    says(&served.mount, &["in use by", &pid, "bash"]);
    assert!(mounted(&served.mount.at).is_some(), "it waits");
    // The second one takes it out of the tree, and goes on serving.
    served.mount.server.signal(Signal::INT);
    says(&served.mount, &["detached", &pid]);
    wait_for("the detached mount to go", || {
        mounted(&served.mount.at).is_none()
    });
    served.mount.expect_gone();
    user.signal(Signal::USR1);
    wait_for("a late write", || user.stdout().contains("wrote"));
    user.kill();
    let outcome = served.mount.server.wait(SOON).expect("no user, no server");
    assert!(outcome.status.success(), "{outcome}");
    assert_eq!(
        fs::read_to_string(served.source.join("file")).unwrap(),
        "late\n"
    );
}

/// Over /dev/fuse.
#[test]
fn a_server_in_use_dev() {
    in_use(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn a_server_in_use_uring() {
    in_use(Transport::Uring);
}

/// A mount that SIGINT ends goes when its users are done.
#[test]
fn an_interrupted_server_ends_with_its_last_user() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let mut served = Served::new(&Serve::over(Transport::Dev));
    let mut user = user_of(&served.mount);
    served.mount.server.signal(Signal::INT);
    says(&served.mount, &["in use by", "waits"]);
    user.kill();
    let outcome = served.mount.server.wait(SOON).expect("no user, no server");
    assert!(outcome.status.success(), "{outcome}");
    assert!(mounted(&served.mount.at).is_none());
    served.mount.expect_gone();
}

/// The last signal ends a server whose users never let go of it, and its mount.
#[test]
fn the_last_signal_cuts_users_off() {
    for transport in transports() {
        if !has(&[Need::Uvfs]) {
            return;
        }
        let mut served = Served::new(&Serve::over(transport));
        let mut user = user_of(&served.mount);
        // As of systemd and kill(1), which no user waits for: it detaches at once.
        served.mount.server.signal(Signal::TERM);
        says(&served.mount, &["detached", &user.pid().to_string()]);
        wait_for("the detached mount to go", || {
            mounted(&served.mount.at).is_none()
        });
        served.mount.server.signal(Signal::TERM);
        let outcome = served.mount.server.wait(SOON).expect("it ends");
        served.mount.expect_gone();
        user.kill();
        assert_eq!(outcome.status.code(), Some(1), "{outcome}");
        assert!(outcome.stderr.contains("cut off"), "{outcome}");
    }
}

/// The processes whose command line has this word.
fn with_word(word: &Path) -> usize {
    let word = word.to_str().unwrap();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.map(|one| fs::read(one.path().join("cmdline")).unwrap_or_default());
    lines
        .filter(|line| {
            line.split(|byte| *byte == 0)
                .any(|own| own == word.as_bytes())
        })
        .count()
}

/// With auto_unmount a killed server leaves no dead mount, and an orderly end no process.
#[test]
fn auto_unmount() {
    for transport in transports() {
        if !has(&[Need::Uvfs]) {
            return;
        }
        let serve = Serve::over(transport).option("auto_unmount");
        let mut served = Served::new(&serve);
        let at = served.mount.at.clone();
        let mut user = user_of(&served.mount);
        // All processes of a unit get the signal with which systemd ends it.
        served.mount.server.signal(Signal::KILL);
        served.mount.expect_gone();
        served
            .mount
            .server
            .wait(SOON)
            .expect("a killed server ends");
        wait_for("the dead mount to go", || mounted(&at).is_none());
        user.kill();
        wait_for("its guard to end", || with_word(&at) == 0);

        // Another mount in the place of the first one is not for its guard to take.
        let mut first = Mount::new(&serve, &served.source, &at);
        run(command("mount", ["-t", "tmpfs", "tmpfs"]).arg(&at)).ok();
        first.server.signal(Signal::KILL);
        first.expect_gone();
        first.server.wait(SOON).expect("a killed server ends");
        wait_for("its guard to end", || with_word(&at) == 0);
        assert_eq!(mounted(&at).expect("still there").kind, "tmpfs");
        unmount_by_force(&at);
        unmount_by_force(&at);

        Mount::new(&serve, &served.source, &at).unmount();
        wait_for("its guard to end", || with_word(&at) == 0);
    }
}

/// `uvfs umount` goes on after one that fails, and leaves mounts of other file systems.
#[test]
fn several_mounts() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("unshare"),
    ]) {
        return;
    }
    // In a namespace of its own, in which there is no other test's mount.
    let script = r#"
for at in $(findmnt -rno TARGET -t fuse.uvfs); do umount -l "$at"; done
cd "$1"; uvfs=$2; mkdir source a b c tmpfs; mount -t tmpfs tmpfs tmpfs
mounted() { findmnt -rno TARGET -t fuse.uvfs | sed 's|.*/||' | tr '\n' ' '; echo; }
"$uvfs" mount source a; "$uvfs" mount source b
"$uvfs" umount a nowhere tmpfs b 2>err && echo no error
grep -c 'nowhere: nothing is mounted' err; grep -c 'tmpfs: mounted as tmpfs' err; mounted
"$uvfs" mount source a; mkdir a/in; "$uvfs" mount tmpfs a/in; "$uvfs" mount -o subtype=other source c
"$uvfs" umount a 2>err || echo "status $?"; grep -o 'in use by the mount .*/a/in' err | sed 's|/.*/||'
"$uvfs" umount --all; mounted; findmnt -rno TARGET -M "$1/tmpfs" | sed 's|.*/||'; findmnt -n c || echo c is gone
"$uvfs" mount source a; (cd a; exec sleep 60 >&- 2>&-) & until [ "$(readlink /proc/$!/cwd)" = "$1/a" ]; do :; done
"$uvfs" umount --all 2>err || echo "status $?"; "$uvfs" umount -f a; mounted
ls /proc/$!/cwd/ 2>&1 | sed 's/.*: //'; kill $!; "$uvfs" umount --all a 2>err || echo "status $?"
"#;
    let scratch = Scratch::new();
    let root = scratch.tmpfs("root", "16m");
    let mut command = command("unshare", ["--mount", "bash", "-euc", script, "bash"]);
    let outcome = run(command.arg(&root).arg(env!("CARGO_BIN_EXE_uvfs")));
    let expected = "1\n1\n\nstatus 1\nin use by the mount in\n\ntmpfs\nc is gone\nstatus 1\n\n\
        Transport endpoint is not connected\nstatus 2\n";
    assert_eq!(outcome.ok(), expected);
}
