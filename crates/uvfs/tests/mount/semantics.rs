//! The scenes of system calls in [`scenes`], on the host's file system and through the
//! mount, compared result by result.

pub mod scenes;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::harness::*;
use crate::own_process;

/// Results that may differ: the start of the step's name, where (the host's file system, or an
/// option of the mount; empty for everywhere), and why.
const BY_NATURE: &[(&str, &str, &str)] = &[
    (
        "fallocate collapse",
        "ext4",
        "the kernel's FUSE takes only KEEP_SIZE, PUNCH and ZERO",
    ),
    (
        "fallocate insert",
        "ext4",
        "the kernel's FUSE takes only KEEP_SIZE, PUNCH and ZERO",
    ),
    (
        "direct and others unaligned",
        "passthrough=direct",
        "the kernel writes to a backing file with the flags that it was opened with",
    ),
    (
        "direct and others of it",
        "passthrough=direct",
        "the kernel writes to a backing file with the flags that it was opened with",
    ),
    (
        "locks open child asks who",
        "host_locks",
        "the protocol does not tell a lock of an open file from a process's, so it shows a pid",
    ),
    (
        "locks open child asks who",
        "host_locks,nopassthrough",
        "the protocol does not tell a lock of an open file from a process's, so it shows a pid",
    ),
    (
        "times chattr moves",
        "writeback",
        "the times are the kernel's own",
    ),
    (
        "fallocate unshare",
        "ext4",
        "the kernel's FUSE takes only KEEP_SIZE, PUNCH and ZERO",
    ),
];

/// The steps of a report and their results.
fn steps(report: &str) -> BTreeMap<&str, &str> {
    report
        .lines()
        .filter_map(|line| line.split_once(": "))
        .collect()
}

fn play(dir: &Path, which: &str, scratch: &Scratch, mount: Option<&Mount>) -> String {
    let report = scratch.path("report");
    let mut scenes = own_process::call("scenes", dir, which, &report);
    let outcome = match mount {
        Some(mount) => mount.run(&mut scenes),
        None => run(&mut scenes),
    };
    // Shown if the test fails: what stopped a scene.
    eprintln!("{}", outcome.stderr);
    outcome.ok();
    fs::read_to_string(&report).unwrap()
}

/// Adds the steps whose results differ from the host's, but for those that may.
fn compare(
    host: &BTreeMap<&str, &str>,
    through: &BTreeMap<&str, &str>,
    name: &str,
    option: &str,
    differences: &mut Vec<String>,
) {
    for (step, expected) in host {
        let got = through.get(step).copied().unwrap_or("not done");
        let known = BY_NATURE
            .iter()
            .any(|(start, place, _)| step.starts_with(start) && ["", name, option].contains(place));
        if got != *expected && !known {
            differences.push(format!(
                "{step} ({name}, -o {option:?})\n    host:  {expected}\n    mount: {got}"
            ));
        }
    }
}

/// Plays the scenes in a directory of their own of a mount, which ends.
fn play_through(mount: Mount, which: &str, option: &str, scratch: &Scratch) -> String {
    let dir = mount.at.join(format!("through-{option}"));
    mount
        .run(std::process::Command::new("mkdir").arg(&dir))
        .ok();
    let through = play(&dir, which, scratch, Some(&mount));
    mount.unmount();
    through
}

fn none_differ(transport: Transport, differences: &[String]) {
    assert!(
        differences.is_empty(),
        "{} results over {transport} differ from the host's:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

fn same_as_the_host(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Program("mkfs.ext4")]) {
        return;
    }
    let scratch = Scratch::new();
    let at = scratch.dir("mount");
    let mut differences = Vec::new();
    for (name, source) in [
        ("tmpfs", scratch.tmpfs("tmpfs", "256m")),
        ("ext4", scratch.ext4("ext4")),
    ] {
        let host_dir = source.join("host");
        fs::create_dir(&host_dir).unwrap();
        let host = play(&host_dir, "", &scratch, None);
        let host = steps(&host);
        assert!(host.len() > 500, "only {} steps", host.len());
        let stopped = host
            .iter()
            .find(|(_, result)| **result == "stopped by a panic");
        assert!(stopped.is_none(), "on {name} itself: {stopped:?}");
        for option in [
            "",
            "writeback",
            "host_locks",
            "host_locks,nopassthrough",
            "passthrough=direct",
        ] {
            let mount = Mount::new(&Serve::over(transport).option(option), &source, &at);
            let through = play_through(mount, "", option, &scratch);
            compare(&host, &steps(&through), name, option, &mut differences);
        }
    }
    none_differ(transport, &differences);
}

/// A call's error, size, mode and contents are those of a kernel file system.
#[test]
fn same_as_the_host_over_dev() {
    same_as_the_host(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn same_as_the_host_over_uring() {
    same_as_the_host(Transport::Uring);
}

/// On a mount that only its owner may use the kernel checks no permissions: the server does, or they are not checked.
#[test]
fn permissions_on_a_mount_for_its_owner_alone() {
    for transport in transports() {
        let scratch = Scratch::new();
        let source = scratch.tmpfs("tmpfs", "256m");
        let host_dir = source.join("host");
        fs::create_dir(&host_dir).unwrap();
        let host = play(&host_dir, "alone", &scratch, None);
        let host = steps(&host);
        assert!(host.len() > 150, "only {} steps", host.len());
        let at = scratch.dir("mount");
        let mut differences = Vec::new();
        for option in ["", "writeback", "passthrough=off"] {
            let mut serve = Serve::over(transport);
            serve.options = vec!["fsname=alone".into()];
            let mount = Mount::new(&serve.option(option), &source, &at);
            let through = play_through(mount, "alone", option, &scratch);
            compare(&host, &steps(&through), "tmpfs", option, &mut differences);
        }
        none_differ(transport, &differences);
    }
}
