//! The help, the manual pages and the errors of the benchmarks' command.

use std::process::{Command, Output};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uvfs-bench"));
    command.args(arguments).output().expect("uvfs-bench")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const BENCHMARKS: [&str; 10] = [
    "all",
    "compare",
    "report",
    "wakeup",
    "check",
    "writeback",
    "uncached",
    "direct",
    "programs",
    "load",
];

/// Help is as `uvfs bench` shows it, and fits a terminal; each benchmark has a manual page.
#[test]
fn help_and_manual_pages() {
    let dir = tempfile::tempdir().unwrap();
    let man = bench(&["man", dir.path().to_str().unwrap()]);
    assert!(man.status.success(), "{man:?}");
    let all = text(&bench(&["--help"]).stdout);
    for name in BENCHMARKS {
        assert!(all.contains(&format!("\n  {name} ")), "{name}: {all}");
        let help = bench(&[name, "--help"]);
        assert!(help.status.success(), "{help:?}");
        let help = text(&help.stdout);
        assert!(
            help.contains(&format!("Usage: uvfs bench {name}")),
            "{help}"
        );
        assert!(
            help.lines().all(|line| line.chars().count() <= 100),
            "{help}"
        );
        let page = std::fs::read_to_string(dir.path().join(format!("uvfs-bench-{name}.1")));
        let page = page.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(page.contains(".SH SYNOPSIS"), "{page}");
    }
    assert!(!all.contains("  client "), "{all}");
}

/// A program can tell why a benchmark failed.
#[test]
fn errors_are_json_when_asked_for() {
    for arguments in [
        &["compare", "/no/such", "/no/such"][..],
        &["load", "--no-such-option"],
    ] {
        let plain = bench(arguments);
        let json = bench(&[arguments, &["--json"]].concat());
        assert_eq!(plain.status.code(), json.status.code());
        assert!(plain.stderr.starts_with(b"uvfs: "), "{plain:?}");
        let error: Value = serde_json::from_slice(&json.stderr).expect("JSON");
        assert_eq!(error["version"], 1);
        assert_eq!(
            error["exit_status"].as_i64(),
            json.status.code().map(i64::from)
        );
    }
}
