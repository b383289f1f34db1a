//! With FUSE-over-io_uring switched off. A test binary of its own: it switches for the whole
//! machine, and cargo runs one test binary after the other.

#[path = "mount/harness.rs"]
#[allow(dead_code, unused_imports, reason = "the mount tests use the rest")]
mod harness;

use std::fs;
use std::process::Command;

use harness::*;

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// FUSE-over-io_uring is switched off for as long as this lives.
struct Off;

impl Off {
    fn new() -> Off {
        fs::write(PARAMETER, "N").expect("root may switch it");
        Off
    }
}

impl Drop for Off {
    fn drop(&mut self) {
        // It was on, or the test would have been skipped.
        let on = fs::write(PARAMETER, "Y");
        assert!(on.is_ok() || std::thread::panicking(), "{on:?}");
    }
}

/// Where root has not switched io_uring on, mounts use /dev/fuse, and say why; `--transport uring` fails.
#[test]
fn auto_falls_back_and_says_why_and_uring_fails() {
    if !has(&[Need::Mount(Transport::Uring), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("mount"));
    fs::write(source.join("file"), "content").unwrap();
    let mount = |transport: &str| {
        let mut command = uvfs();
        command.args(["mount", "--transport", transport]);
        run(command.arg(&source).arg(&at))
    };
    let why = "FUSE-over-io_uring is switched off";
    let remedy = format!("echo Y > {PARAMETER}");

    let off = Off::new();
    let refused = mount("uring");
    let after_refusal = mounted(&at).is_some();
    unmount_by_force(&at);
    let fallen_back = mount("auto");
    drop(off);
    let content = run(Command::new("cat").arg(at.join("file")));
    let stats = run(uvfs().args(["stats", "--json"]).arg(&at));
    let unmounted = run(uvfs().arg("umount").arg(&at));
    unmount_by_force(&at);
    let on = mount("auto");
    let on_stats = run(uvfs().args(["stats", "--json"]).arg(&at));
    let on_unmounted = run(uvfs().arg("umount").arg(&at));
    unmount_by_force(&at);

    assert_eq!(refused.status.code(), Some(1), "{refused}");
    assert!(!after_refusal, "a failed mount stayed");
    for outcome in [&refused, &fallen_back] {
        let lines: Vec<_> = outcome.stderr.lines().collect();
        assert!(
            lines.len() == 1 && lines[0].starts_with("uvfs: "),
            "one line: {outcome}"
        );
        for word in [why, &remedy] {
            assert!(lines[0].contains(word), "no {word:?}: {outcome}");
        }
    }
    let transport = |stats: Outcome| {
        let stats: serde_json::Value = serde_json::from_str(&stats.ok()).expect("JSON");
        stats["transport"].as_str().unwrap_or_default().to_owned()
    };
    fallen_back.ok();
    assert_eq!(
        (content.ok().as_str(), &*transport(stats)),
        ("content", "dev")
    );
    unmounted.ok();
    // Where there is nothing to fall back from nothing is said.
    assert_eq!(on.stderr, "");
    on.ok();
    assert_eq!(transport(on_stats), "uring");
    on_unmounted.ok();
}
