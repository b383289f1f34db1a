//! A server that an ordinary user starts: mounted by fusermount3, and for that user alone.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Command;

use rustix::io::Errno;

use crate::harness::sandbox;
use crate::harness::*;

const NOBODY: u32 = 65534;

/// A mount namespace in which every user may open /dev/fuse, as udev has it; a container may have it
/// otherwise.
struct Namespace {
    holder: Running,
}

impl Namespace {
    fn new(scratch: &Scratch) -> Namespace {
        let device = scratch.tmpfs("dev", "1m").join("fuse");
        let script = "mknod -m 666 \"$1\" c 10 229; mount --bind \"$1\" /dev/fuse; echo ready; exec sleep 600";
        let mut command = command("unshare", ["--mount", "sh", "-euc", script, "sh"]);
        let mut holder = Running::start(command.arg(device));
        wait_for("a mount namespace", || {
            holder.stdout().contains("ready") || holder.ended().is_some()
        });
        if let Some(outcome) = holder.ended() {
            panic!("{outcome}");
        }
        Namespace { holder }
    }

    /// `program` in it.
    fn command(&self, program: &str) -> Command {
        let mut command = command("nsenter", ["--mount", "--target"]);
        command.arg(self.holder.pid().to_string()).arg(program);
        command
    }

    /// `program` in it, as a user without any right.
    fn as_nobody(&self, program: &Path) -> Command {
        let mut command = self.command("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        command.arg(program);
        command
    }

    /// Whether uvfs is mounted there.
    fn mounted(&self, at: &Path) -> bool {
        let file = format!("/proc/{}/mountinfo", self.holder.pid());
        let at = format!(" {} ", at.display());
        let table = fs::read_to_string(file).expect("mountinfo");
        table
            .lines()
            .any(|line| line.contains(&at) && line.contains(" - fuse.uvfs "))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.holder.kill();
    }
}

/// Calls that any user makes on files of their own.
const WORK: &str = r#"
cd "$1"; umask 022
echo one >a; mkdir d; mv a d/b; ln d/b c; ln -s c l; chmod 600 c; cat l
stat -c '%n %a %h %s %u' c d l
for i in $(seq 300); do echo "$i" >"d/$i"; done; ls d | wc -l; cat d/* | sort -n | tail -1
truncate -s 2 c; exec 3<c; rm c d/b; cat <&3; echo; stat -L -c '%h %s' /proc/self/fd/3
mkdir gone; (cd gone; rmdir ../gone; ls -a; echo x >y) 2>&1 | sed 's/.*: //' || true
head -c 3000000 /dev/zero | tr '\0' x >large; md5sum <large; cp large copy; cmp large copy
dd if=large of=copy bs=64k iflag=direct oflag=direct conv=notrunc status=none; cmp large copy
chown 0 large 2>&1 | sed 's/.*: //' || true; mknod null c 1 3 2>&1 | sed 's/.*: //' || true
rm -r d large copy l; ls -A
"#;

fn serves_its_user(transport: Transport) {
    use Need::*;
    if !has(&[Mount(transport), Uvfs])
        || !has(&["setpriv", "unshare", "nsenter", "fusermount3"].map(Program))
    {
        return;
    }
    let scratch = Scratch::new();
    let host = scratch.tmpfs("host", "64m");
    let source = scratch.tmpfs("source", "64m");
    let at = scratch.dir("mount");
    for dir in [&host, &source, &at] {
        chown(dir, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let program = uvfs_for_all(&scratch);
    let namespace = Namespace::new(&scratch);
    let as_nobody = |program: &Path| namespace.as_nobody(program);

    let mounting = run(as_nobody(&program)
        .args(["mount", "--transport", &transport.to_string()])
        .args([&source, &at]));
    // From here on the mount must go, whatever comes. Every program is one that can be killed.
    let mounted = namespace.mounted(&at);
    let work = |dir: &Path| {
        let mut work = as_nobody(Path::new("/bin/bash"));
        work.args(["-euo", "pipefail", "-c", WORK, "bash"]).arg(dir);
        run(&mut work)
    };
    let expected = work(&host);
    let got = work(&at);
    let stats = run(as_nobody(&program).args(["stats", "--json"]).arg(&at));
    let others = run(namespace.command("ls").arg("-d").arg(at.join(".")));
    let mut user = Running::start(
        as_nobody(Path::new("/bin/sh"))
            .args(["-c", "cd \"$1\" && echo there && exec sleep 600", "sh"])
            .arg(&at),
    );
    wait_for("a user of the mount", || {
        user.stdout().contains("there") || user.ended().is_some()
    });
    let busy = run(as_nobody(&program).arg("umount").arg(&at));
    let pid = user.pid().to_string();
    user.kill();
    let still = namespace.mounted(&at);
    let unmounted = run(as_nobody(&program).arg("umount").arg(&at));
    let after = namespace.mounted(&at);
    run(namespace.command("umount").arg("--lazy").arg(&at));

    mounting.ok();
    assert!(mounted, "not mounted");
    assert_eq!(got.ok(), expected.ok());
    let stats: serde_json::Value = serde_json::from_str(&stats.ok()).expect("JSON");
    assert_eq!(stats["transport"], transport.to_string(), "{stats}");
    // Nothing is lost where the server may not give the kernel the host's files.
    assert_eq!(stats["backed_opens"], 0, "{stats}");
    // Nor where it may not see what the host changes.
    let watch = &stats["watch"];
    assert_eq!(watch["on"], false, "{watch}");
    let why = watch["why_not"].as_str().expect("a reason");
    assert!(why.contains("CAP_DAC_READ_SEARCH"), "{why}");
    assert!(
        !others.status.success(),
        "not even root may use it: {others}"
    );
    assert_eq!(busy.status.code(), Some(1), "{busy}");
    for word in ["uvfs: ", "in use", &pid] {
        assert!(busy.stderr.contains(word), "no {word:?}: {busy}");
    }
    assert!(still, "a busy mount was unmounted");
    unmounted.ok();
    assert!(!after, "still mounted");
}

/// A user without privileges can mount, and gets none of root's.
#[test]
fn a_user_mounts_over_dev() {
    serves_its_user(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn a_user_mounts_over_uring() {
    serves_its_user(Transport::Uring);
}

/// With auto_unmount, fusermount3 takes away the mount of a user's server that was killed.
#[test]
fn auto_unmount() {
    use Need::*;
    if !has(&[Mount(Transport::Dev), Uvfs])
        || !has(&["setpriv", "unshare", "nsenter", "fusermount3"].map(Program))
    {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "1m");
    let at = scratch.dir("mount");
    chown(&at, Some(NOBODY), Some(NOBODY)).unwrap();
    let program = uvfs_for_all(&scratch);
    let namespace = Namespace::new(&scratch);
    let mut server = Running::start(
        namespace
            .as_nobody(&program)
            .args(["mount", "--foreground", "-o", "auto_unmount"])
            .args([&source, &at]),
    );
    let mounted = wait_until(SOON, || namespace.mounted(&at));
    // Its answer comes after the watching process has been started.
    run(namespace.as_nobody(Path::new("ls")).arg(&at)).ok();
    server.signal(rustix::process::Signal::KILL);
    let ended = server.wait(SOON).expect("a killed server ends");
    let gone = wait_until(SOON, || !namespace.mounted(&at));
    run(namespace.command("umount").arg("--lazy").arg(&at));
    assert!(mounted && gone, "{mounted} {gone} {ended}");
}

/// A rootless container, which is a user namespace, needs no more than /dev/fuse: no fusermount3, no right of root's, and
/// no io_uring.
#[test]
fn a_user_namespace_needs_the_device_alone() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("unshare"),
        Need::Program("setpriv"),
    ]) {
        return;
    }
    let scratch = Scratch::new();
    let namespace = Namespace::new(&scratch);
    let (source, at, host) = (
        scratch.dir("source"),
        scratch.dir("at"),
        scratch.dir("host"),
    );
    for dir in [&source, &at, &host] {
        chown(dir, Some(NOBODY), Some(NOBODY)).expect("chown");
    }
    let script = "if [ \"$4\" ]; then \"$4\" mount \"$2\" \"$3\"; fi; bash -euo pipefail -c \"$1\" bash \"$3\"; \
        if [ \"$4\" ]; then \"$4\" umount \"$3\"; fi";
    let work = |source: &Path, at: &Path, program: &str| {
        let mut inside = namespace.as_nobody(Path::new("unshare"));
        inside.args([
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-euc",
            script,
            "sh",
            WORK,
        ]);
        inside.args([source, at]).arg(program);
        sandbox::refuse(&mut inside, sandbox::IO_URING, Errno::PERM);
        run(&mut inside).ok()
    };
    let shown = work(&source, &at, env!("CARGO_BIN_EXE_uvfs"));
    assert_eq!(shown, work(&source, &host, ""));
}

/// A user whom a sandbox keeps fusermount3's rights from learns why.
#[test]
fn a_sandbox_that_keeps_rights_away_is_named() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs])
        || !has(&["setpriv", "unshare", "nsenter", "fusermount3"].map(Need::Program))
    {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("at"));
    for dir in [&source, &at] {
        chown(dir, Some(NOBODY), Some(NOBODY)).expect("chown");
    }
    let program = uvfs_for_all(&scratch);
    let namespace = Namespace::new(&scratch);
    let nobody = [
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--inh-caps=-all",
    ];
    for (sandbox, words) in [
        ("--no-new-privs", "no_new_privs"),
        ("--bounding-set=-sys_admin", "--cap-add SYS_ADMIN"),
    ] {
        let mut mount = namespace.command("setpriv");
        mount.args(nobody).arg(sandbox).arg(&program).arg("mount");
        let mounting = run(mount.args([&source, &at]));
        assert_eq!(mounting.status.code(), Some(1), "{mounting}");
        assert!(mounting.stderr.contains(words), "no {words:?}: {mounting}");
    }
}
