//! Where a sandbox refuses system calls, as the seccomp profiles of containers do.

use std::fs;
use std::path::Path;
use std::process::Command;

use rustix::io::Errno;

use crate::harness::sandbox::{IO_URING, refuse};
use crate::harness::*;

/// `uvfs mount` with these calls refused; returns when the mount answers, or failed.
fn mount(transport: &str, calls: &[libc::c_long], errno: Errno, paths: [&Path; 2]) -> Outcome {
    let mut command = uvfs();
    command
        .args(["mount", "--transport", transport])
        .args(paths);
    refuse(&mut command, calls, errno);
    run(&mut command)
}

/// Reads and writes that wait for a device, and calls that make, change and list files.
const WORK: &str = r#"
cd "$1"; head -c 3000000 /dev/urandom >random; cp random copy; cmp random copy
dd if=random of=direct bs=64k iflag=direct oflag=direct,sync conv=fsync status=none; cmp random direct
fallocate -l 1M room; stat -c '%s %b' room; mkdir d; for i in $(seq 100); do echo $i >d/$i; done; ls d | wc -l
mv d/1 d/one; ln d/2 two; ln -s d/3 three; cat d/one two three; chmod 600 two; stat -c '%a %h' two
flock two true; truncate -s 1 two; stat -c %s d/2; sync -f random; rm -r *; ls -A
"#;

/// In a container without io_uring a mount works over /dev/fuse, and says so.
#[test]
fn without_io_uring_every_transport_but_its_own_serves() {
    // With UVFS_TEST_NO_IO_URING another filter would have its own error.
    if !has(&[Need::Mount(Transport::Uring), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    // On ext4 reads and writes may wait; on tmpfs none does.
    let source = scratch.ext4("source");
    let host = scratch.dir("host");
    let expected = run(&mut shell(WORK, &[&host])).ok();
    let at = scratch.dir("mount");
    let each: &[&[libc::c_long]] = &[IO_URING, &IO_URING[..1], &IO_URING[1..2], &IO_URING[2..]];
    let mut cases: Vec<_> = each
        .iter()
        .map(|calls| (*calls, Errno::PERM, "EPERM"))
        .collect();
    cases.push((IO_URING, Errno::NOSYS, "ENOSYS"));
    cases.push((IO_URING, Errno::NOMEM, "ENOMEM"));
    for (calls, errno, name) in cases {
        for transport in ["auto", "dev"] {
            let mounting = mount(transport, calls, errno, [&source, &at]);
            let worked = run(&mut shell(WORK, &[&at]));
            let stats = run(uvfs().args(["stats", "--json"]).arg(&at));
            let unmounted = run(uvfs().arg("umount").arg(&at));
            unmount_by_force(&at);
            assert_eq!(mounting.stderr.lines().count(), 1, "said once: {mounting}");
            for word in ["serving over /dev/fuse", "slower", name] {
                assert!(mounting.stderr.contains(word), "no {word:?}: {mounting}");
            }
            mounting.ok();
            assert_eq!(worked.ok(), expected, "{name} {transport}");
            let stats: serde_json::Value = serde_json::from_str(&stats.ok()).expect("JSON");
            assert_eq!(stats["transport"], "dev", "{stats}");
            unmounted.ok();
        }
        let refused = mount("uring", calls, errno, [&source, &at]);
        let left = mounted(&at).is_some();
        unmount_by_force(&at);
        assert_eq!(refused.status.code(), Some(1), "{refused}");
        assert!(refused.stderr.contains(name), "{refused}");
        assert!(!left, "a failed mount stayed");
    }
}

/// A mount whose server can't work fails, and does not stay.
#[test]
fn a_server_whose_threads_fail_makes_no_mount() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("mount"));
    // Each runtime has an eventfd; no answer reaches the kernel without writev.
    let mut cases = vec![(libc::SYS_eventfd2, "Operation not permitted")];
    if full() {
        cases.push((libc::SYS_writev, "did not answer within"));
    }
    for (call, why) in cases {
        for foreground in [false, true] {
            for transport in ["dev", "auto"] {
                let mut command = uvfs();
                command.args(["mount", "--transport", transport]);
                if foreground {
                    command.arg("--foreground");
                }
                refuse(&mut command, &[call], Errno::PERM);
                let outcome = run(command.arg(&source).arg(&at));
                let left = mounted(&at).is_some();
                unmount_by_force(&at);
                assert_eq!(outcome.status.code(), Some(1), "{outcome}");
                assert!(outcome.stderr.contains(why), "{outcome}");
                assert!(!left, "a dead mount stayed: {outcome}");
            }
        }
    }
}

/// Without io_uring programs attach over shared memory, and image tools work.
#[test]
fn without_io_uring_clients_and_image_tools_work() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.ext4("source"), scratch.dir("mount"));
    let image = source.join("image");
    let refused = |arguments: &[&str], paths: &[&Path]| {
        let mut command = uvfs();
        command.args(arguments).args(paths);
        refuse(&mut command, IO_URING, Errno::PERM);
        run(&mut command)
    };
    fs::create_dir(source.join("tree")).unwrap();
    fs::write(source.join("tree/file"), "content").unwrap();
    fs::write(source.join("large"), vec![7; 8 << 20]).unwrap();
    refused(&["mkfs", "--from"], &[&source.join("tree"), &image]).ok();
    refused(&["check"], &[&image]).ok();
    refused(&["repair"], &[&image]).ok();
    assert_eq!(
        refused(&["cat"], &[&image, "/file".as_ref()]).ok(),
        "content"
    );
    let explicit = refused(&["check", "--engine", "uring"], &[&image]);
    assert!(!explicit.status.success(), "{explicit}");
    assert!(explicit.stderr.contains("EPERM"), "{explicit}");

    refused(&["mount"], &[&image, &at]).ok();
    let read = run(Command::new("cat").arg(at.join("file")));
    let unmounted = run(uvfs().arg("umount").arg(&at));
    unmount_by_force(&at);
    assert_eq!(read.ok(), "content");
    unmounted.ok();

    refused(&["mount", "-o", "passthrough=direct"], &[&source, &at]).ok();
    let copied = refused(
        &["run", "--report", "--", "dd", "bs=4k", "status=none"],
        &[
            format!("if={}", at.join("large").display()).as_ref(),
            format!("of={}", at.join("copy").display()).as_ref(),
        ],
    );
    let compared = run(Command::new("cmp").args(["large", "copy"].map(|name| source.join(name))));
    let stats = run(uvfs().args(["stats", "--json"]).arg(&at));
    let unmounted = run(uvfs().arg("umount").arg(&at));
    unmount_by_force(&at);
    copied.ok();
    compared.ok();
    let stats: serde_json::Value = serde_json::from_str(&stats.ok()).expect("JSON");
    unmounted.ok();
    assert!(stats.to_string().contains("client"), "{stats}");
}

/// An error says which limit was reached, and no dead mount stays.
#[test]
fn a_low_limit_is_named_with_its_value() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("prlimit"),
    ]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("mount"));
    for (limit, words) in [
        ("--nofile=20", ["open files is 20", "ulimit -n"]),
        (
            "--as=102400000",
            ["address space is 100000 KiB", "ulimit -v"],
        ),
    ] {
        for transport in ["auto", "dev"] {
            let mut command = command("prlimit", [limit, env!("CARGO_BIN_EXE_uvfs")]);
            command.args(["mount", "--transport", transport]);
            let outcome = run(command.arg(&source).arg(&at));
            let left = mounted(&at).is_some();
            unmount_by_force(&at);
            assert_eq!(outcome.status.code(), Some(1), "{outcome}");
            for word in words {
                assert!(outcome.stderr.contains(word), "no {word:?}: {outcome}");
            }
            assert!(!left, "a dead mount stayed: {outcome}");
        }
    }
}

/// Without file handles, which take a capability, each file that the kernel knows takes a descriptor. A tree of more
/// files than the limit of these is served all the same.
#[test]
fn a_tree_of_more_files_than_descriptors_is_served() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs])
        || !has(&["prlimit", "setpriv"].map(Need::Program))
    {
        return;
    }
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut version = kernel.split('.').map(|part| part.parse().unwrap_or(0));
    if (version.next(), version.next()) < (Some(6), Some(18)) {
        return uvfs_testing::skip("needs Linux 6.18, which can be told to forget files");
    }
    const LOOK: &str = "cd \"$1\"; ls -lR --time-style=+ | md5sum; grep -r 7 | sort | md5sum; find . -size 1 | wc -l";
    const COPY: &str = "cd \"$1\"; cp -r 1 copy; diff -r 1 copy; rm -r copy 2; ls";
    let scratch = Scratch::new();
    let at = scratch.dir("mount");
    for transport in transports() {
        let source = scratch.tmpfs(&format!("source-{transport}"), "64m");
        for dir in 1..=8 {
            fs::create_dir(source.join(dir.to_string())).unwrap();
            for file in 0..150 {
                fs::write(source.join(format!("{dir}/{file}")), file.to_string()).unwrap();
            }
        }
        let looked = run(&mut shell(LOOK, &[&source])).ok();
        let lacks = "-dac_read_search";
        let mut mount = command("prlimit", ["--nofile=256:256", "setpriv"]);
        mount.args(["--bounding-set", lacks, "--inh-caps", lacks]);
        mount.args([env!("CARGO_BIN_EXE_uvfs"), "mount", "--transport"]);
        let mounting = run(mount.arg(transport.to_string()).args([&source, &at]));
        let through = run(&mut shell(LOOK, &[&at]));
        let copied = run(&mut shell(COPY, &[&at]));
        let unmounted = run(uvfs().arg("umount").arg(&at));
        unmount_by_force(&at);
        mounting.ok();
        assert_eq!(through.ok(), looked, "{transport}");
        assert_eq!(copied.ok(), "1\n3\n4\n5\n6\n7\n8\n", "{transport}");
        unmounted.ok();
    }
}

/// A file that can't be made for lack of descriptors is not there afterwards, whichever of them was missing.
#[test]
fn a_create_that_fails_leaves_no_file() {
    let needs = [
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("setpriv"),
    ];
    if !has(&needs) {
        return;
    }
    let scratch = Scratch::new();
    let at = scratch.dir("mount");
    // One more each time, so that the limit falls on each descriptor that a file takes.
    for extra in 0..4 {
        let source = scratch.tmpfs(&format!("source-{extra}"), "64m");
        fs::write(source.join("there"), "x").unwrap();
        let lacks = "-dac_read_search";
        let mut mount = command("prlimit", ["--nofile=128:128", "setpriv"]);
        mount.args(["--bounding-set", lacks, "--inh-caps", lacks]);
        mount.args([env!("CARGO_BIN_EXE_uvfs"), "mount", "--transport", "dev"]);
        run(mount.args([&source, &at])).ok();
        let mut open: Vec<_> = (0..extra)
            .map(|_| fs::File::open(at.join("there")).unwrap())
            .collect();
        let (failed, error) = loop {
            let name = open.len().to_string();
            match fs::File::create_new(at.join(&name)) {
                Ok(file) => open.push(file),
                Err(error) => break (name, error),
            }
            assert!(open.len() < 128, "the limit holds");
        };
        let is_there = source.join(&failed).exists();
        drop(open);
        run(uvfs().arg("umount").arg(&at)).ok();
        unmount_by_force(&at);
        assert_eq!(error.raw_os_error(), Some(libc::EMFILE), "{error}");
        assert!(!is_there, "{failed}, with {extra} more");
    }
}
