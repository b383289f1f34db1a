//! `uvfs mount IMAGE`.

use std::fs;

use rustix::process::Signal;

use crate::commands::refused;
use crate::fixture::*;
use crate::harness::*;

fn mounted_like_the_kernel(transport: Transport) {
    if !has(&NEEDS) || !has(&[Need::Mount(transport)]) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let kernel = image.shown_by_kernel();
    let expected = run(&mut describe(&kernel, false)).ok();
    for part in [
        "many/dir-040/file ",
        "./a/sparse",
        "system.posix_acl_access",
        "user.big",
    ] {
        assert!(expected.contains(part), "no {part:?} in\n{expected}");
    }
    let at = scratch.dir("mount");
    for options in [
        &[][..],
        &["memory=4M", "engine=uring"],
        &["memory=4M", "engine=aio"],
    ] {
        let mut serve = Serve::over(transport);
        for option in options {
            serve = serve.option(option);
        }
        let mount = Mount::new(&serve, &image.path, &at);
        // Twice: from the image, and from what the kernel was told to keep.
        for _ in 0..2 {
            let shown = mount.run(&mut describe(&at, false)).ok();
            same(&shown, &expected);
        }
        let options = mounted(&at).unwrap().options;
        assert!(options.iter().any(|o| o == "ro"), "{options:?}");
        let touched = mount.run(&mut shell("echo >> $1/a/hello", &[&at]));
        assert!(touched.stderr.contains("Read-only"), "{touched}");
        mount.unmount().ok();
    }
}

/// A mounted image shows the files of the kernel's mount of it.
#[test]
fn a_mounted_image_is_like_the_kernels_over_dev() {
    mounted_like_the_kernel(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn a_mounted_image_is_like_the_kernels_over_uring() {
    mounted_like_the_kernel(Transport::Uring);
}

/// Listings first go without attributes, then with them, then are sampled: all show the same.
#[test]
fn listed_and_looked_at_in_turns() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let kernel = image.shown_by_kernel();
    let mount = Mount::new(
        &Serve::over(Transport::Dev),
        &image.path,
        &scratch.dir("mount"),
    );
    let script = "cd \"$1\" && find . | sort && ls -lnR --time-style=full-iso . && ls -ln many/*/.";
    let shown = mount.run(&mut shell(script, &[&mount.at])).ok();
    let expected = run(&mut shell(script, &[&kernel])).ok();
    same(&shown, &expected);
    mount.unmount().ok();
}

/// What only the log of an image holds is there in a mount of it.
#[test]
fn a_dirty_log_is_served() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    image.crash();
    let at = scratch.path("mount");
    let mount = run(uvfs().arg("mount").arg(&image.path).arg(&at));
    let there = at.join("new").exists();
    let gone = run(uvfs().arg("umount").arg(&at));
    assert!(there, "{mount}");
    assert!(mount.stderr.is_empty(), "{mount}");
    mount.ok();
    gone.ok();
}

/// A mount that fails leaves nothing at the mount point.
#[test]
fn what_is_no_image_is_refused_and_nothing_is_left() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let text = scratch.path("text");
    fs::write(&text, vec![b'x'; 100_000]).unwrap();
    let at = scratch.path("mount");
    let outcome = run(uvfs().arg("mount").arg(&text).arg(&at));
    unmount_by_force(&at);
    refused(&outcome, &["text", "not an XFS file system"]);
    assert!(!at.exists());
    for bad in ["memory=1", "memory=x", "engine=steam"] {
        let outcome = run(uvfs().args(["mount", "-o", bad]).arg(&text).arg(&at));
        assert_eq!(outcome.status.code(), Some(2), "{outcome}");
        assert!(outcome.stderr.contains(bad), "{outcome}");
    }
}

/// An attacker who takes over a thread that reads an image, by that image's bytes, has next to nothing.
#[test]
fn the_threads_that_serve_an_image_are_confined() {
    const IPC_LOCK_AND_SYS_NICE: u64 = 1 << 14 | 1 << 23;
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let serve = Serve::over(Transport::Dev);
    let mut mount = Mount::new(&serve, &image.path, &scratch.dir("mount"));
    let mut confined = 0;
    for task in fs::read_dir(format!("/proc/{}/task", mount.server.pid())).unwrap() {
        let task = task.unwrap().path();
        let name = fs::read_to_string(task.join("comm")).unwrap();
        let serves = ["uvfs-worker", "uvfs-control", "uvfs-attach"];
        if !serves.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        let status = fs::read_to_string(task.join("status")).unwrap();
        let value = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap().trim().to_owned()
        };
        // A filter.
        assert_eq!(value("Seccomp:"), "2", "{name}");
        assert_eq!(value("NoNewPrivs:"), "1", "{name}");
        for set in ["CapEff:", "CapPrm:", "CapInh:"] {
            let set = u64::from_str_radix(&value(set), 16).unwrap();
            assert_eq!(set & !IPC_LOCK_AND_SYS_NICE, 0, "{name}");
        }
        confined += 1;
    }
    assert!(confined >= 2, "{confined}");
    // The server does everything else as before.
    let stats = mount.run(uvfs().arg("stats").arg(&mount.at)).ok();
    assert!(
        stats.contains("READ") || stats.contains("requests"),
        "{stats}"
    );
    mount.server.signal(Signal::TERM);
    mount.expect_gone();
    mount.server.wait(SOON).expect("a signal unmounts it").ok();
    assert!(mounted(&mount.at).is_none());
}

/// The same for the commands: an image or an archive may come from any user.
#[test]
fn commands_that_read_an_image_are_confined() {
    use std::process::{Command, Stdio};
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "large");
    image.write("head -c 4M /dev/zero >zeros");
    let new = scratch.path("new");
    let uvfs = env!("CARGO_BIN_EXE_uvfs");
    // Each waits for a pipe.
    for command in [
        &["cat", image.arg(), "zeros"][..],
        &["mkfs", "--from", "-", new.to_str().unwrap()],
    ] {
        let mut command = Command::new(uvfs)
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let status = format!("/proc/{}/status", command.id());
        let confined = wait_until(SOON, || {
            let status = fs::read_to_string(&status).unwrap();
            status.contains("Seccomp:\t2\n") && status.contains("NoNewPrivs:\t1\n")
        });
        let _ = command.kill();
        command.wait().unwrap();
        assert!(confined, "{command:?}");
    }
}

/// An idmapped mount of an image, as containers have them, shows the owners that the kernel's shows.
#[test]
fn idmapped() {
    if !has(&NEEDS)
        || !has(&[
            Need::Mount(Transport::Dev),
            Need::Program("python3"),
            Need::Program("setpriv"),
        ])
    {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let kernel = image.shown_by_kernel();
    for transport in transports() {
        let (at, mapped) = (
            scratch.dir(&format!("at-{transport}")),
            scratch.dir(&format!("mapped-{transport}")),
        );
        let mount = Mount::new(&Serve::over(transport), &image.path, &at);
        let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/image/programs/idmap.py");
        // As a user whom the mapping makes the root of the image, and as one whom the mapping does not know.
        let script = r#"python3 "$3" "$1" "$2"; cd "$2"; find . -printf '%P %U %G %m\n' | sort
for user in 100000 5; do setpriv --reuid=$user --regid=$user --clear-groups sh -c '
for file in $(find . -type f | sort | head -200); do test -r $file && md5sum $file; done'; done; cd /; umount "$2""#;
        let show = |from: &std::path::Path| {
            let mut command = shell(script, &[from, &mapped, program.as_ref()]);
            mount.run(&mut command).ok()
        };
        let (shown, expected) = (show(&at), show(&kernel));
        assert!(expected.contains(" 100000 100000 "), "{expected}");
        same(&shown, &expected);
        mount.unmount().ok();
    }
}

/// A program that keeps file handles, as backups and NFS servers do, finds its files again.
#[test]
fn handles_lead_to_files_that_the_kernel_has_forgotten() {
    if !has(&NEEDS) || !has(&[Need::Mount(Transport::Dev), Need::Program("python3")]) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let kernel = image.shown_by_kernel();
    let at = scratch.dir("at");
    let mount = Mount::new(&Serve::over(Transport::Dev), &image.path, &at);
    let opened = |root: &std::path::Path| {
        let program = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/image/programs/handles.py"
        );
        let mut command = command("python3", [program]);
        command.arg(root);
        command.args(["a/hello", "a/sparse", "a", "many", "many/dir-040/file", "."]);
        mount.run(&mut command).ok()
    };
    let (shown, expected) = (opened(&at), opened(&kernel));
    assert_eq!(shown, expected);
    mount.unmount().ok();
}
