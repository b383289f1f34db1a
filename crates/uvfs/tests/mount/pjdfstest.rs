//! pjdfstest: what passes on the host's file system passes through the mount.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::harness::*;
use crate::preload::{How, uvfs_run};
use crate::survive::{survives, while_replaced};

/// Tests that may differ, each with the reason.
const BY_NATURE: &[(&str, &str)] = &[(
    "link::link_count_max",
    "the C library knows LINK_MAX by the file system's type, and tells 127 for a FUSE mount",
)];

const CONFIGURATION: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}
[settings]
# Longer than the tick of file timestamps.
naptime = 0.012
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

#[derive(Debug, PartialEq)]
enum Verdict {
    Passed,
    Skipped(String),
    Failed(String),
}

/// Reads the report: a line for each test, then lines about it that are indented or a backtrace.
fn parse(report: &str) -> BTreeMap<String, Verdict> {
    let mut verdicts = BTreeMap::new();
    let mut last: Option<String> = None;
    for line in report.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let verdict = match words[..] {
            [_, "ok"] => Verdict::Passed,
            [_, "skipped"] => Verdict::Skipped(String::new()),
            [_, "FAILED"] => Verdict::Failed(String::new()),
            _ => {
                if line.starts_with("Backtrace") || line.starts_with("Summary") {
                    last = None;
                }
                let verdict = last.as_ref().and_then(|name| verdicts.get_mut(name));
                if let Some(Verdict::Skipped(why) | Verdict::Failed(why)) = verdict {
                    *why += " ";
                    *why += line.trim();
                }
                continue;
            }
        };
        last = Some(words[0].to_owned());
        verdicts.insert(words[0].to_owned(), verdict);
    }
    verdicts
}

/// A failure in pjdfstest's report is noticed.
#[test]
fn report_is_read() {
    let report = "a::b    ok\nc::d   FAILED\n\tassertion failed\n  left: 0\nBacktrace:\n 0: x\n\
                  e::f  skipped\n\tno such thing\n\nSummary: 1 failed, 1 skipped, 1 passed";
    let verdicts = parse(report);
    assert_eq!(verdicts["a::b"], Verdict::Passed);
    assert_eq!(
        verdicts["c::d"],
        Verdict::Failed(" assertion failed left: 0".into())
    );
    assert_eq!(verdicts["e::f"], Verdict::Skipped(" no such thing ".into()));
    assert_eq!(verdicts.len(), 3);
}

fn suite(dir: &Path, scratch: &Scratch) -> std::process::Command {
    let mut suite = command(tool("pjdfstest"), ["--configuration-file"]);
    suite.arg(scratch.path("configuration"));
    suite
        .arg("--path")
        .arg(dir)
        .arg("--secondary-fs")
        .arg(scratch.path("secondary"));
    suite.env("NO_COLOR", "1").env_remove("RUST_BACKTRACE");
    suite
}

fn passes_what_the_host_passes(transport: Transport) {
    use Need::*;
    if !has(&[Mount(transport), Tool("pjdfstest"), Program("mkfs.ext4")]) {
        return;
    }
    let scratch = Scratch::new();
    fs::write(scratch.path("configuration"), CONFIGURATION).unwrap();
    scratch.tmpfs("secondary", "16m");
    let at = scratch.dir("mount");
    let mut differences = Vec::new();
    for (name, source) in [
        ("tmpfs", scratch.tmpfs("tmpfs", "256m")),
        ("ext4", scratch.ext4("ext4")),
    ] {
        let host = parse(&run(&mut suite(&source, &scratch)).stdout);
        let passed = host.values().filter(|v| **v == Verdict::Passed).count();
        assert!(
            passed > 300,
            "only {passed} tests pass on {name} itself: {host:#?}"
        );
        for option in ["", "writeback"] {
            let serve = Serve::over(transport).option(option);
            let mount = crate::harness::Mount::new(&serve, &source, &at);
            let outcome = mount.run(&mut suite(&at, &scratch));
            let through = parse(&outcome.stdout);
            for (test, _) in host.iter().filter(|(_, v)| **v == Verdict::Passed) {
                let verdict = match through.get(test) {
                    Some(Verdict::Passed) => continue,
                    _ if BY_NATURE.iter().any(|(known, _)| known == test) => continue,
                    Some(other) => format!("{other:?}"),
                    None => format!("not run: {}", outcome.stderr.trim()),
                };
                differences.push(format!("{test} on {name}, -o {option:?}: {verdict}"));
            }
            mount.unmount();
        }
    }
    assert!(
        differences.is_empty(),
        "{} tests pass on the host and not through uvfs over {transport}:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

/// The mount keeps POSIX where pjdfstest looks.
#[test]
fn passes_over_dev() {
    passes_what_the_host_passes(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn passes_over_uring() {
    passes_what_the_host_passes(Transport::Uring);
}

/// The same while the server is replaced again and again.
#[test]
fn passes_while_the_server_is_replaced() {
    use Need::*;
    if !has(&[Mount(Transport::Dev), Tool("pjdfstest"), Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    fs::write(scratch.path("configuration"), CONFIGURATION).unwrap();
    scratch.tmpfs("secondary", "16m");
    let source = scratch.tmpfs("tmpfs", "256m");
    let host = parse(&run(&mut suite(&source, &scratch)).stdout);
    let passes = |(_, verdict): &(&String, &Verdict)| **verdict == Verdict::Passed;
    let passed = host.iter().filter(passes).count();
    assert!(passed > 300, "only {passed} tests pass on the host");
    let mount = crate::harness::Mount::new(&survives(), &source, &scratch.dir("mount"));
    for round in 0..if full() { 20 } else { 1 } {
        let mut command = suite(&mount.at, &scratch);
        let outcome = while_replaced(&mount, || mount.run_within(LATER, &mut command));
        let through = parse(&outcome.stdout);
        let differences: Vec<_> = host
            .iter()
            .filter(passes)
            .filter(|(test, verdict)| {
                let by_nature = BY_NATURE.iter().any(|(known, _)| known == test);
                through.get(*test) != Some(verdict) && !by_nature
            })
            .map(|(test, _)| format!("{test}: {:?}", through.get(test)))
            .collect();
        assert!(differences.is_empty(), "round {round}: {differences:#?}");
    }
    mount.unmount();
}

/// The suite as a program under `uvfs run`: passes what it passes without.
#[test]
fn under_uvfs_run() {
    use Need::*;
    if !has(&[Mount(Transport::Dev), Tool("pjdfstest"), Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    fs::write(scratch.path("configuration"), CONFIGURATION).unwrap();
    scratch.tmpfs("secondary", "16m");
    let at = scratch.dir("mount");
    let source = scratch.tmpfs("tmpfs", "256m");
    let mount = crate::harness::Mount::new(&Serve::over(Transport::Dev), &source, &at);
    let plain = parse(&mount.run(&mut suite(&at, &scratch)).stdout);
    let passed = plain.values().filter(|v| **v == Verdict::Passed).count();
    assert!(passed > 300, "only {passed} tests pass without");
    let suite = suite(&at, &scratch);
    let mut command = uvfs_run(How::Eager);
    command.env("NO_COLOR", "1").env_remove("RUST_BACKTRACE");
    command.arg("--").arg(suite.get_program());
    command.args(suite.get_args());
    let outcome = mount.run_within(LATER, &mut command);
    let under = parse(&outcome.stdout);
    let differences: Vec<_> = plain
        .iter()
        .filter(|(test, v)| **v == Verdict::Passed && under.get(*test) != Some(v))
        .map(|(test, _)| format!("{test}: {:?}", under.get(test)))
        .collect();
    assert!(differences.is_empty(), "{differences:#?}\n{outcome}");
}

/// Kinds of tests that a store with `-o write=close,metadata` does not pass, which docs/remote.md names.
const NOT_ON_STORES: &[(&str, &[&str])] = &[
    (
        "hard links",
        &[
            "link::",
            "rename::to_multiply_linked::",
            "unlink::unchanged_ctime_failed::",
            "unlink::update_ctime_success::",
        ],
    ),
    (
        "links and times of directories",
        &[
            "rename::updates_link_parent",
            "utimensat::changes_timestamps::dir",
        ],
    ),
    // The number of a file follows from its key.
    ("numbers of renamed files", &["rename::preserve_metadata"]),
    // S3's limit.
    ("keys of more than 1024 bytes", &["enametoolong_path"]),
    // The store of this test takes no uploads in parts.
    ("large files", &["open::interact_2gb"]),
];

/// An object store that is written passes what a disk passes, but for four kinds.
#[cfg(feature = "object")]
#[test]
fn a_store_passes_but_for_some_kinds() {
    use Need::*;
    if !has(&[Mount(Transport::Dev), Tool("pjdfstest"), Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    fs::write(scratch.path("configuration"), CONFIGURATION).unwrap();
    scratch.tmpfs("secondary", "16m");
    let host = scratch.tmpfs("tmpfs", "256m");
    let host = parse(&run(&mut suite(&host, &scratch)).stdout);
    let fake = crate::fake::Fake::start();
    let uri = crate::stores::At::uri(&fake).replacen("/p?", "/p/?", 1);
    let cache = format!("cache_dir={}", scratch.path("cache").display());
    let serve = Serve::over(Transport::Dev).option(&cache);
    let serve = serve.option("write=close").option("metadata");
    let mount = crate::harness::Mount::new(&serve, Path::new(&uri), &scratch.dir("mount"));
    let mut command = suite(&mount.at, &scratch);
    let stored = parse(&mount.run_within(LATER, &mut command).stdout);
    let is_known = |test: &str| {
        let kinds = NOT_ON_STORES.iter().flat_map(|(_, tests)| tests.iter());
        kinds.clone().any(|known| test.contains(known))
    };
    let passes = |(_, verdict): &(&String, &Verdict)| **verdict == Verdict::Passed;
    let host = host.iter().filter(passes);
    let differences: Vec<_> = host
        .filter(|(test, v)| stored.get(*test) != Some(v) && !is_known(test))
        .map(|(test, _)| format!("{test}: {:?}", stored.get(test)))
        .collect();
    assert!(differences.is_empty(), "{differences:#?}");
    let passed = stored.iter().filter(passes).count();
    assert!(passed > 300, "only {passed} tests pass");
    mount.unmount();
}
