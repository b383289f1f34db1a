//! The command's words: exit statuses, one clear line for each failure, and nothing left behind.

mod ends;
mod umount;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;

use crate::harness::*;

/// Asserts exit status 1, and one line on standard error that starts with `uvfs: ` and has
/// these words.
#[track_caller]
fn refused(outcome: &Outcome, words: &[&str]) {
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    let lines: Vec<_> = outcome.stderr.lines().collect();
    assert!(
        lines.len() == 1 && lines[0].starts_with("uvfs: "),
        "one line `uvfs: …`: {outcome}"
    );
    for word in words {
        assert!(
            lines[0].to_lowercase().contains(&word.to_lowercase()),
            "no {word:?}: {outcome}"
        );
    }
}

fn mount(source: &Path, at: &Path) -> Command {
    let mut command = uvfs();
    command.arg("mount").arg(source).arg(at);
    command
}

/// Scripts can tell wrong usage from a failure by the exit status.
#[test]
fn usage_errors_exit_with_2() {
    if !has(&[Need::Uvfs]) {
        return;
    }
    for arguments in [
        &[][..],
        &["no-such-command"],
        &["mount"],
        &["mount", "/tmp"],
        &["mount", "--no-such-option", "/tmp", "/tmp/x"],
        &["mount", "--transport", "pigeon", "/tmp", "/tmp/x"],
        &["mount", "--wait", "never", "/tmp", "/tmp/x"],
        &["umount"],
        &["stats"],
    ] {
        let outcome = run(uvfs().args(arguments));
        assert_eq!(outcome.status.code(), Some(2), "{outcome}");
        assert!(!outcome.stderr.is_empty(), "{outcome}");
    }
}

/// A misspelt option is refused.
#[test]
fn unknown_mount_option() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("mount"));
    let outcome = run(mount(&source, &at).args(["-o", "no_such_option"]));
    unmount_by_force(&at);
    assert_eq!(outcome.status.code(), Some(2), "{outcome}");
    assert!(outcome.stderr.contains("no_such_option"), "{outcome}");
}

/// A value that makes no sense is refused.
#[test]
fn bad_values_of_options() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("mount"));
    for option in [
        "attr_timeout=soon",
        "entry_timeout=-1",
        "max_write=much",
        "max_write=",
        "writeback=1",
        "cache=perhaps",
    ] {
        let outcome = run(mount(&source, &at).args(["-o", option]));
        let mounted = mounted(&at).is_some();
        unmount_by_force(&at);
        assert_eq!(outcome.status.code(), Some(2), "{option}: {outcome}");
        let name = option.split('=').next().unwrap();
        assert!(outcome.stderr.contains(name), "{option}: {outcome}");
        assert!(!mounted, "{option}");
    }
}

/// Where /dev has no fuse, a mount fails and says what to do.
#[test]
fn no_fuse_on_the_machine() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("unshare"),
    ]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.path("mount"));
    let script = "mount -t tmpfs tmpfs /dev; exec \"$1\" mount \"$2\" \"$3\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]);
    command
        .arg(env!("CARGO_BIN_EXE_uvfs"))
        .arg(&source)
        .arg(&at);
    refused(&run(&mut command), &["/dev/fuse", "no FUSE", "modprobe"]);
    assert!(!at.exists(), "the mount point that was made stayed");
}

/// A source that can't be served is refused.
#[test]
fn source_is_neither_directory_nor_image() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let at = scratch.dir("mount");
    let fifo = scratch.path("fifo");
    run(Command::new("mkfifo").arg(&fifo)).ok();
    refused(
        &run(&mut mount(&fifo, &at)),
        &["fifo", "neither a directory nor an image"],
    );
    refused(
        &run(&mut mount(Path::new("/dev/null"), &at)),
        &["/dev/null", "neither a directory nor an image"],
    );
    assert!(mounted(&at).is_none());
}

/// The error names the mount point.
#[test]
fn mount_point_cannot_be_made() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.dir("source");
    fs::write(scratch.path("file"), "").unwrap();
    refused(
        &run(&mut mount(&source, &scratch.path("file/mount"))),
        &["file/mount", "not a directory"],
    );
    let full = scratch.tmpfs("read-only", "1m");
    rustix::mount::mount_remount(&full, rustix::mount::MountFlags::RDONLY, "").unwrap();
    refused(
        &run(&mut mount(&source, &full.join("mount"))),
        &["read-only/mount", "read-only file system"],
    );
}

/// `--help` and `--version` succeed, and print to standard output.
#[test]
fn help_and_version() {
    if !has(&[Need::Uvfs]) {
        return;
    }
    let version = run(uvfs().arg("--version")).ok();
    assert!(version.starts_with("uvfs "), "{version}");
    let help = run(uvfs().arg("--help")).ok();
    for word in ["mount", "umount", "stats"] {
        assert!(help.contains(word), "no {word} in: {help}");
    }
    run(uvfs().args(["mount", "--help"])).ok();
}

/// A missing source is refused.
#[test]
fn missing_source() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let at = scratch.dir("mount");
    refused(
        &run(&mut mount(&scratch.path("nowhere"), &at)),
        &["nowhere", "no such file"],
    );
    assert!(mounted(&at).is_none());
}

/// A plain file is not served as a directory.
#[test]
fn source_is_a_file() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let at = scratch.dir("mount");
    let file = scratch.path("file");
    fs::write(&file, "").unwrap();
    refused(&run(&mut mount(&file, &at)), &["file", "XFS"]);
    assert!(mounted(&at).is_none());
}

/// Nothing is mounted over a file.
#[test]
fn mount_point_is_a_file() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.dir("source");
    let file = scratch.path("file");
    fs::write(&file, "").unwrap();
    refused(&run(&mut mount(&source, &file)), &["file", "directory"]);
    assert!(mounted(&file).is_none());
}

/// A missing mount point is made, as the README says.
#[test]
fn missing_mount_point_is_made() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.dir("source");
    fs::write(source.join("file"), "content").unwrap();
    let at = scratch.path("new/mount");
    run(&mut mount(&source, &at)).ok();
    let content = run(Command::new("cat").arg(at.join("file"))).stdout;
    let unmounted = run(uvfs().arg("umount").arg(&at));
    unmount_by_force(&at);
    assert_eq!(content, "content");
    unmounted.ok();
}

/// A second mount on a mount point is refused.
#[test]
fn mounted_already() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev));
    let at = &served.mount.at;
    let outcome = served.mount.run(&mut mount(&served.source, at));
    let still = mounts().iter().filter(|m| m.at == *at).count();
    refused(&outcome, &["mounted", at.to_str().unwrap()]);
    assert_eq!(still, 1);
    served.mount.unmount();
}

/// A user who may neither mount nor write to the mount point gets an error.
#[test]
fn no_permission() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("setpriv"),
    ]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at, empty) = (
        scratch.dir("source"),
        scratch.dir("mount"),
        scratch.dir("empty"),
    );
    let program = uvfs_for_all(&scratch);
    let setpriv = "/usr/bin/setpriv";
    let as_nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let mut command = Command::new(setpriv);
    command
        .args(as_nobody)
        .arg(&program)
        .arg("mount")
        .arg(&source)
        .arg(&at)
        .env("PATH", &empty);
    let outcome = run(&mut command);
    unmount_by_force(&at);
    refused(&outcome, &[]);

    let private = scratch.dir("private");
    fs::set_permissions(&private, fs::Permissions::from_mode(0o700)).unwrap();
    let mut command = Command::new(setpriv);
    command
        .args(as_nobody)
        .arg(&program)
        .arg("mount")
        .arg(&private)
        .arg(&at);
    let outcome = run(&mut command);
    unmount_by_force(&at);
    refused(&outcome, &["private", "permission denied"]);
}

fn in_the_background(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.tmpfs("source", "16m"), scratch.dir("mount"));
    fs::write(source.join("file"), "content").unwrap();
    let transport = transport.to_string();
    let mounting = run(mount(&source, &at).args(["--transport", &transport]));
    // From here on the mount must go, whatever comes.
    let answers = mounted(&at).map(|m| m.kind);
    let content = run(Command::new("cat").arg(at.join("file")));
    let written = run(&mut shell("echo more >\"$1/new\"; cat \"$1/new\"", &[&at]));
    let text = run(uvfs().arg("stats").arg(&at));
    let json = run(uvfs().args(["stats", "--json"]).arg(&at));
    let unmounted = run(uvfs().arg("umount").arg(&at));
    let after = mounted(&at).is_some();
    unmount_by_force(&at);

    assert_eq!(
        (mounting.ok().as_str(), answers.as_deref()),
        ("", Some("fuse.uvfs"))
    );
    assert_eq!(
        (content.ok(), written.ok()),
        ("content".into(), "more\n".into())
    );
    let text = text.ok();
    assert!(text.to_uppercase().contains("LOOKUP"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&json.ok()).expect("JSON");
    assert!(
        json.is_object() && json.to_string().to_uppercase().contains("LOOKUP"),
        "{json}"
    );
    unmounted.ok();
    assert!(!after, "still mounted");
    assert_eq!(fs::read_to_string(source.join("new")).unwrap(), "more\n");
}

/// `uvfs mount` returns once the mount answers, and is then detached from the terminal.
#[test]
fn in_the_background_dev() {
    in_the_background(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn in_the_background_uring() {
    in_the_background(Transport::Uring);
}

/// systemd learns when a server in the foreground is ready: then its mount answers.
#[test]
fn systemd_is_told_when_the_mount_answers() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("mount"));
    fs::write(source.join("file"), "content").unwrap();
    let socket = scratch.path("notify");
    let told = UnixDatagram::bind(&socket).unwrap();
    told.set_read_timeout(Some(SOON)).unwrap();
    let mut command = mount(&source, &at);
    let mut server = Running::start(command.arg("--foreground").env("NOTIFY_SOCKET", &socket));
    let mut message = [0; 64];
    let len = told.recv(&mut message);
    let content = run(Command::new("cat").arg(at.join("file")));
    let unmounted = run(uvfs().arg("umount").arg(&at));
    unmount_by_force(&at);
    let outcome = server.wait(SOON);

    assert_eq!(&message[..len.expect("a message")], b"READY=1\n");
    assert_eq!(content.ok(), "content");
    unmounted.ok();
    outcome.expect("it ends").ok();
}

/// Without `default_permissions` a user gets no more than the files' modes allow.
#[test]
fn permissions_hold_without_the_option() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("setpriv"),
    ]) {
        return;
    }
    let mut serve = Serve::over(Transport::Dev);
    serve.options = vec!["allow_other".into()];
    let served = Served::new(&serve);
    fs::write(served.source.join("secret"), "secret").unwrap();
    let secret = served.source.join("secret");
    fs::set_permissions(secret, fs::Permissions::from_mode(0o600)).unwrap();
    for script in [
        "cat \"$1/secret\"",
        "echo >\"$1/secret\"",
        "rm -f \"$1/secret\"",
        "mkdir \"$1/d\"",
    ] {
        let mut command = Command::new("setpriv");
        command.args([
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "bash",
            "-c",
            script,
        ]);
        let outcome = served.mount.run(command.arg("bash").arg(&served.mount.at));
        assert!(!outcome.status.success(), "{outcome}");
        assert!(outcome.stderr.contains("denied"), "{outcome}");
    }
    served.mount.unmount();
}
