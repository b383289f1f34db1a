//! The benchmarks that use mounts, as short as they can be: what they measure and print, and that
//! nothing stays behind, not how fast anything is.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::*;

/// `uvfs bench NAME --quick --json` in a directory.
fn bench(name: &str, rounds: u32, dir: &Path) -> Command {
    // The test has no dependency by which cargo would make it.
    if !Path::new(env!("CARGO_BIN_EXE_uvfs"))
        .with_file_name("uvfs-bench")
        .exists()
    {
        let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--offline", "-p", "uvfs-bench"]);
        build.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        run_within(LATER, &mut build).ok();
    }
    let mut command = uvfs();
    command.args(["bench", name, "--quick", "--json", "--rounds"]);
    command.args([&rounds.to_string(), "--dir"]).arg(dir);
    command
}

fn report(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

fn names(list: &Value, field: &str) -> Vec<String> {
    let list = list.as_array().unwrap().iter();
    list.map(|item| item[field].as_str().unwrap().into())
        .collect()
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).unwrap().next().is_none()
}

fn can_run_programs() -> bool {
    has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("git"),
    ])
}

/// `uvfs bench programs` measures each side, and leaves no files or mounts behind.
#[test]
fn programs_run_on_each_side() {
    if !can_run_programs() {
        return;
    }
    let scratch = Scratch::new();
    let dir = scratch.dir("bench");
    let only = [
        "git-clone",
        "git-status",
        "cp",
        "tar-create",
        "sh-cat",
        "rm",
    ];
    let mut command = bench("programs", 1, &dir);
    command.args(["--only", &only.join(",")]);
    command.args(["--sides", "native,mount,run"]);
    let report = report(&run_within(LATER, &mut command).ok());
    assert_eq!(report["bench"], "programs");
    let sides = ["native", "mount", "run"];
    assert_eq!(names(&report["targets"], "name"), sides);
    let works = [
        "git-clone",
        "git-status-first",
        "git-status-second",
        "cp",
        "tar-create-first",
        "tar-create-second",
        "sh-cat",
        "rm",
        "total",
    ];
    assert_eq!(names(&report["works"], "name"), works);
    for work in report["works"].as_array().unwrap() {
        assert_eq!(work["unit"], "run");
        assert_eq!(names(&work["results"], "target"), sides, "{work}");
        for result in work["results"].as_array().unwrap() {
            assert!(result["run_seconds"]["median"].as_f64().unwrap() > 0.0);
        }
        let ratio = &work["results"][2]["time_ratio"];
        assert!(ratio["native"].as_f64().unwrap() > 0.0, "{work}");
        assert!(ratio["mount"].as_f64().unwrap() > 0.0, "{work}");
    }
    assert!(is_empty(&dir));
}

/// Every program that is installed gives the same result each time, in the source itself.
#[test]
fn every_program_runs_twice_in_the_same_way() {
    if !has(&[Need::Program("git"), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let dir = scratch.dir("bench");
    let mut command = bench("programs", 2, &dir);
    command.args(["--sides", "native"]);
    let outcome = run_within(LATER, &mut command);
    let missing = outcome.stderr.clone();
    let report = report(&outcome.ok());
    let works = names(&report["works"], "name").join(" ");
    for name in [
        "git-log",
        "find-second",
        "make",
        "python",
        "sqlite",
        "ripgrep",
    ] {
        let left_out = missing.contains(&format!("{name}: left out"));
        assert_ne!(works.contains(name), left_out, "{works}\n{missing}");
    }
    assert!(is_empty(&dir));
}

/// A file system on which a program fails or differs is named.
#[test]
fn a_side_on_which_a_program_fails_or_differs_is_named() {
    if !can_run_programs() {
        return;
    }
    let scratch = Scratch::new();
    let dir = scratch.dir("bench");
    let server = format!("{} mount --foreground", env!("CARGO_BIN_EXE_uvfs"));
    let readonly = format!("readonly={server} -o ro {{source}} {{mountpoint}}");
    let other = format!(
        "other=sh -ec 'cp -a $0 $0.new; (cd $0.new && head -c 99999 /dev/zero >work/tree/new); \
         exec {server} $0.new $1' {{source}} {{mountpoint}}"
    );
    let mut command = bench("programs", 1, &dir);
    command.args(["--only", "find,rm", "--sides", "native"]);
    command.args(["--peer", &readonly, "--peer", &other]);
    let outcome = run_within(LATER, &mut command);
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    let report = report(&outcome.stdout);
    let error = |index: usize| report["targets"][index]["error"].clone();
    assert_eq!(error(0), Value::Null);
    let (readonly, other) = (error(1).to_string(), error(2).to_string());
    assert!(readonly.contains("rm: exit status: 1"), "{readonly}");
    assert!(other.contains("find-first: it printed"), "{other}");
    assert!(other.contains("than on native"), "{other}");
    assert!(outcome.stderr.contains("readonly: not measured"));
    assert!(is_empty(&dir));
}

/// Ctrl-C leaves no mount behind.
#[test]
fn an_interrupted_suite_leaves_nothing_behind() {
    if !can_run_programs() {
        return;
    }
    let scratch = Scratch::new();
    let dir = scratch.dir("bench");
    let mut command = bench("programs", 1, &dir);
    command.args(["--only", "sh-true", "--sides", "mount"]);
    let mut running = Running::start(&mut command);
    let place = format!("{}/", dir.display());
    wait_for("a mount", || {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        table.contains(&place)
    });
    // As timeout(1) does: to the process, and to its group.
    running.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(20));
    running.signal(Signal::TERM);
    let outcome = running.wait(SOON).expect("an end");
    assert_eq!(outcome.status.code(), Some(130), "{outcome}");
    assert!(is_empty(&dir));
}

/// A misspelt `--only` is refused.
#[test]
fn a_program_that_does_not_exist_is_refused() {
    let scratch = Scratch::new();
    let mut command = bench("programs", 1, &scratch.dir("bench"));
    command.args(["--only", "emacs"]);
    let outcome = run(&mut command);
    assert_eq!(outcome.status.code(), Some(2), "{outcome}");
    assert!(outcome.stderr.contains("git-clone"), "{outcome}");
}

/// `bench all` writes a page and JSON, and names a benchmark that fails.
#[test]
fn all_runs_the_benchmarks_that_are_named() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (dir, out) = (scratch.dir("bench"), scratch.dir("out"));
    let page = out.join("report.html");
    let mut command = bench("all", 1, &dir);
    command.args(["--only", "wakeup,check", "--image", "/no/such/image"]);
    command.arg("--report").arg(&page);
    let outcome = run_within(LATER, &mut command);
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    assert!(outcome.stderr.contains("not measured"), "{outcome}");
    let report = report(&outcome.stdout);
    assert_eq!(report["bench"], "all");
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(runs[0]["bench"], "wakeup");
    let read = &runs[0]["works"][0];
    assert_eq!(read["name"], "read-1");
    for result in read["results"].as_array().unwrap() {
        assert!(result["latency_us"]["median"].as_f64().unwrap() > 0.0);
    }
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("read-1") && page.contains("uvfs bench check"));
    assert_eq!(fs::read_dir(&out).unwrap().count(), 1);
    assert!(is_empty(&dir));
}

/// Ctrl-C in `bench all` ends the current benchmark.
#[test]
fn all_interrupted_leaves_nothing_behind() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (dir, out) = (scratch.dir("bench"), scratch.dir("out"));
    let mut command = bench("all", 1, &dir);
    command
        .args(["--only", "wakeup", "--report"])
        .arg(out.join("report.html"));
    let mut running = Running::start(&mut command);
    let place = format!("{}/", dir.display());
    wait_for("a mount", || {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        table.contains(&place)
    });
    running.signal(Signal::TERM);
    let outcome = running.wait(SOON).expect("an end");
    assert_eq!(outcome.status.code(), Some(130), "{outcome}");
    assert!(is_empty(&dir) && is_empty(&out));
}

/// `uvfs bench load` measures each point of its curve.
#[test]
fn load_measures_each_point_on_each_side() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    // Direct reads need a file system that has them.
    let dir = scratch.ext4("bench");
    let before = fs::read_dir(&dir).unwrap().count();
    let mut command = bench("load", 1, &dir);
    command.args([
        "--processes",
        "1,3",
        "--neighbours",
        "0,1",
        "--seconds",
        "0.05",
    ]);
    command.args(["--sides", "native,mount,run"]);
    let report = report(&run_within(LATER, &mut command).ok());
    assert_eq!(report["bench"], "load");
    let works = ["direct", "buffered", "create", "stat", "open"]
        .map(|work| ["1p-0n", "3p-0n", "1p-1n", "3p-1n"].map(|point| format!("{work}-{point}")));
    assert_eq!(names(&report["works"], "name"), works.concat());
    let sides = ["native", "mount", "run"];
    for work in report["works"].as_array().unwrap() {
        assert_eq!(names(&work["results"], "target"), sides, "{work}");
        for result in work["results"].as_array().unwrap() {
            let median = |field: &str| result[field]["median"].as_f64().unwrap();
            assert!(median("rate") > 0.0, "{work}");
            assert!(median("latency_us") > 0.0, "{work}");
            assert!(median("latency_us") <= median("latency_p99_us"), "{work}");
        }
    }
    assert_eq!(fs::read_dir(&dir).unwrap().count(), before);
}

/// Ctrl-C leaves no busy processes behind.
#[test]
fn an_interrupted_load_ends_its_processes() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let dir = scratch.dir("bench");
    let mut command = bench("load", 1, &dir);
    command.args(["--work", "stat", "--processes", "2", "--neighbours", "2"]);
    command.args(["--seconds", "60", "--sides", "mount"]);
    let mut running = Running::start(&mut command);
    // The server, the clients and the neighbours.
    let children = || {
        let path = format!("/proc/{0}/task/{0}/children", running.pid());
        let children = fs::read_to_string(path).unwrap_or_default();
        children
            .split_whitespace()
            .map(String::from)
            .collect::<Vec<_>>()
    };
    wait_for("all processes", || children().len() == 5);
    let children = children();
    running.signal(Signal::TERM);
    let outcome = running.wait(SOON).expect("an end");
    assert_eq!(outcome.status.code(), Some(130), "{outcome}");
    for child in children {
        assert!(!Path::new("/proc").join(child).exists());
    }
    assert!(is_empty(&dir));
}

/// `uvfs bench load` and `direct` measure the works that read over an object store, say what they leave out, and leave no
/// objects behind.
#[cfg(feature = "object")]
#[test]
fn works_that_read_are_measured_over_a_store() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    // Direct reads need a file system that has them.
    let place = scratch.ext4("place");
    let (dir, objects) = (place.join("bench"), place.join("objects"));
    fs::create_dir(&dir).unwrap();
    fs::create_dir(&objects).unwrap();
    let uri = format!("fs://{}", objects.display());
    let over_store = |name, args: &[&str]| {
        let mut command = bench(name, 1, &dir);
        command.args(["--source", &uri, "--objects"]).arg(&objects);
        run_within(LATER, command.args(args))
    };
    let peer = format!(
        "other={} mount --foreground -o cache_dir={{cache}} {uri} {{mountpoint}}",
        env!("CARGO_BIN_EXE_uvfs")
    );
    let load = ["--processes", "2", "--neighbours", "0", "--seconds", "0.05"];
    let load = [&load[..], &["--sides", "native,mount,run", "--peer", &peer]].concat();
    let direct = ["--sides", "native,mount", "--peer", &peer];
    for (name, args, works, left_out) in [
        (
            "load",
            &load[..],
            &["direct-2p-0n", "buffered-2p-0n", "stat-2p-0n", "open-2p-0n"][..],
            &["create"][..],
        ),
        (
            "direct",
            &direct,
            &["read-one-0us", "read-many-0us"],
            &["write-one-0us", "write-many-0us"],
        ),
    ] {
        let outcome = over_store(name, args);
        let said = outcome.stderr.clone();
        let report = report(&outcome.ok());
        assert_eq!(names(&report["works"], "name"), works);
        for work in left_out {
            assert!(said.contains(&format!("{work}: left out")), "{said}");
        }
        for work in report["works"].as_array().unwrap() {
            let targets = names(&work["results"], "target");
            assert!(targets.ends_with(&["other".into()]), "{work}");
            for result in work["results"].as_array().unwrap() {
                assert!(result["rate"]["median"].as_f64().unwrap() > 0.0, "{work}");
            }
        }
        assert!(is_empty(&objects) && is_empty(&dir));
    }
    for (name, args, word) in [
        ("load", &["--work", "create"][..], "no work is left"),
        ("direct", &["--sides", "client"], "no side client"),
        ("direct", &["--latency-us", "5"], "--latency-us"),
    ] {
        let outcome = over_store(name, args);
        assert_eq!(outcome.status.code(), Some(2), "{outcome}");
        assert!(outcome.stderr.contains(word), "{outcome}");
    }
    for (args, word) in [
        (&["--source", &uri][..], "--objects"),
        (&["--peer", &peer], "no {source}"),
    ] {
        let outcome = run(bench("load", 1, &dir).args(args));
        assert_eq!(outcome.status.code(), Some(2), "{outcome}");
        assert!(outcome.stderr.contains(word), "{outcome}");
    }
    assert!(is_empty(&objects) && is_empty(&dir));
}

/// `uvfs bench writeback` writes to an object store by its mount and by `uvfs-client`, which wait for the store or not.
/// `remote` puts what it reads there. Both leave no objects behind.
#[cfg(feature = "object")]
#[test]
fn writes_are_measured_over_a_store() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (dir, objects) = (scratch.dir("bench"), scratch.dir("objects"));
    let uri = format!("fs://{}", objects.display());
    let mut writeback = bench("writeback", 1, &dir);
    writeback.args(["--sides", "native,client", "--source", &uri]);
    let mut remote = bench("remote", 1, &dir);
    remote.args(["--work", "list,small", &uri]);
    for (command, works, sides) in [
        (
            writeback,
            &["write-1k", "write-4k", "write-1m"][..],
            &["native", "client", "client-close"][..],
        ),
        (remote, &["list", "small"], &["native", "opendal", "mount"]),
    ] {
        let mut command = command;
        let outcome = run_within(LATER, command.arg("--objects").arg(&objects));
        let report = report(&outcome.ok());
        assert_eq!(names(&report["works"], "name"), works);
        for work in report["works"].as_array().unwrap() {
            assert_eq!(names(&work["results"], "target"), sides);
        }
        assert!(is_empty(&objects) && is_empty(&dir));
    }
}
