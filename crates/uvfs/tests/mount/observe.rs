//! How a running mount is looked at: stuck requests and metrics.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::*;

const ANY: Transport = Transport::Dev;

fn stats(at: &Path) -> Value {
    let stats = run(uvfs().args(["stats", "--json"]).arg(at));
    serde_json::from_str(&stats.ok()).expect("JSON")
}

/// A mount whose source has a FUSE mount below it, of which the server is stopped: a program waits for a
/// file there.
struct Stuck {
    // Dropped in this order, so that nothing waits for the stopped server.
    hung: Mount,
    reader: Running,
    served: Served,
}

impl Stuck {
    fn new(serve: &Serve) -> Stuck {
        let served = Served::new(serve);
        let (other, below) = (served.scratch.dir("other"), served.source.join("below"));
        fs::create_dir(&below).unwrap();
        fs::write(other.join("file"), "one").unwrap();
        let mut hung = Mount::new(&Serve::over(ANY), &other, &below);
        // The mount above keeps files open there until it ends itself.
        hung.expect_gone();
        let at = served.at("below");
        // So that the server knows the mount point.
        served.mount.run(Command::new("stat").arg(&at)).ok();
        hung.server.signal(Signal::STOP);
        let reader = Running::start(Command::new("cat").arg(at.join("file")));
        Stuck {
            hung,
            reader,
            served,
        }
    }

    /// Lets the stopped server go on: the program gets its answer, and no request stays stuck.
    fn end(mut self) -> Outcome {
        self.hung.server.signal(Signal::CONT);
        let read = self.reader.wait(SOON).expect("it is answered");
        assert_eq!(read.ok(), "one");
        let at = self.served.mount.at.clone();
        wait_for("nothing to be stuck", || {
            stats(&at)["stuck"].as_array().is_some_and(Vec::is_empty)
        });
        self.served.mount.unmount()
    }
}

#[test]
fn a_stuck_request_is_logged_and_listed() {
    for transport in [Transport::Dev, Transport::Uring] {
        if !has(&[Need::Mount(transport), Need::Uvfs]) {
            continue;
        }
        let stuck = Stuck::new(&Serve::over(transport).option("slow=0.5"));
        let at = stuck.served.mount.at.clone();
        let mut listed = Value::Null;
        let found = wait_until(SOON, || {
            listed = stats(&at)["stuck"].clone();
            stuck
                .served
                .mount
                .server
                .stderr()
                .contains("a request waits")
                && listed[0]["age_ms"].as_u64() > Some(500)
        });
        let table = run(uvfs().arg("stats").arg(&at)).ok();
        let metrics = run(uvfs().args(["stats", "--prometheus"]).arg(&at)).ok();
        let log = stuck.served.mount.server.stderr();
        // Before the assertions, so that a failure leaves nothing that hangs.
        stuck.end().ok();
        assert!(found, "{listed}\n{log}");
        assert_eq!(listed.as_array().map(Vec::len), Some(1), "{listed}");
        assert_eq!(listed[0]["waits_for"], "the file system", "{listed}");
        let file = listed[0]["file"].as_str().expect("a path");
        assert!(["/below", "/below/file"].contains(&file), "{listed}");
        assert!(listed[0]["pid"].as_u64() > Some(0), "{listed}");
        let opcode = listed[0]["opcode"].as_str().unwrap();
        for word in [opcode, "the file system", "seconds=", "pid=", "file="] {
            assert!(log.contains(word), "no {word:?}: {log}");
        }
        assert!(table.contains("stuck") && table.contains(opcode), "{table}");
        let metrics = Metrics::parse(&metrics);
        assert_eq!(metrics.value("uvfs_stuck_requests", &at, &[]), 1.0);
        assert!(metrics.value("uvfs_stuck_oldest_seconds", &at, &[]) >= 0.5);
    }
}

/// With `slow=0` a request that waits for long is neither logged nor listed.
#[test]
fn slow_requests_can_be_left_out() {
    if !has(&[Need::Mount(ANY), Need::Uvfs]) {
        return;
    }
    let stuck = Stuck::new(&Serve::over(ANY).option("slow=0"));
    let at = stuck.served.mount.at.clone();
    wait_for("the reader's request", || {
        let queues = stats(&at)["queues"].clone();
        let under_way = |queue: &Value| queue["in_flight"].as_u64().unwrap();
        queues
            .as_array()
            .unwrap()
            .iter()
            .map(under_way)
            .sum::<u64>()
            > 0
    });
    thread::sleep(Duration::from_secs(1));
    let listed = stats(&at)["stuck"].clone();
    let log = stuck.served.mount.server.stderr();
    stuck.end().ok();
    assert_eq!(listed, Value::Array(Vec::new()));
    assert!(!log.contains("a request waits"), "{log}");
}

/// Parsed metrics: the types of the families, and the samples by name and labels.
#[derive(Debug, Default)]
struct Metrics {
    types: HashMap<String, String>,
    samples: HashMap<(String, Vec<(String, String)>), f64>,
}

impl Metrics {
    /// Parses the text; fails if it is not OpenMetrics.
    #[track_caller]
    fn parse(text: &str) -> Metrics {
        let mut metrics = Metrics::default();
        let body = text.strip_suffix("# EOF\n").expect("an end");
        for line in body.lines() {
            if let Some(meta) = line.strip_prefix("# ") {
                let words: Vec<&str> = meta.splitn(3, ' ').collect();
                assert!(["HELP", "TYPE", "UNIT"].contains(&words[0]), "{line}");
                if words[0] == "TYPE" {
                    let twice = metrics.types.insert(words[1].into(), words[2].into());
                    assert_eq!(twice, None, "{line}");
                }
                continue;
            }
            let (name, rest) = line.split_once('{').unwrap_or_else(|| panic!("{line}"));
            let (labels, value) = rest.rsplit_once("} ").unwrap_or_else(|| panic!("{line}"));
            let mut pairs: Vec<(String, String)> = labels
                .split("\",")
                .map(|pair| {
                    let (name, value) = pair.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
                    (name.into(), value.trim_end_matches('"').into())
                })
                .collect();
            pairs.sort();
            let value = value.parse().unwrap_or_else(|_| panic!("{line}"));
            let twice = metrics.samples.insert((name.into(), pairs), value);
            assert_eq!(twice, None, "{line}");
        }
        metrics
    }

    #[track_caller]
    fn value(&self, name: &str, mount: &Path, labels: &[(&str, &str)]) -> f64 {
        let mut pairs = vec![("mount".to_owned(), mount.display().to_string())];
        pairs.extend(labels.iter().map(|(a, b)| (a.to_string(), b.to_string())));
        pairs.sort();
        let key = (name.to_owned(), pairs);
        let found = self.samples.get(&key);
        *found.unwrap_or_else(|| panic!("no {key:?}: {self:#?}"))
    }
}

#[test]
fn metrics_are_the_numbers_of_the_report() {
    if !has(&[Need::Mount(ANY), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::over(ANY));
    let second = Served::new(&Serve::over(ANY));
    let script =
        "cd \"$1\"; for i in $(seq 200); do echo $i >$i; done; cat missing; ls -l >/dev/null; true";
    for mount in [&served.mount, &second.mount] {
        let mut work = command("sh", ["-c", script, "sh"]);
        mount.run(work.arg(&mount.at)).ok();
    }
    let ask = |mounts: &[&Path]| {
        let text = run(uvfs().args(["stats", "--prometheus"]).args(mounts)).ok();
        Metrics::parse(&text)
    };
    let (one, two) = (served.mount.at.as_path(), second.mount.at.as_path());
    // Asking is a request itself, so the counts move.
    let before = stats(one);
    let metrics = ask(&[one, two]);
    let after = stats(one);
    let between = |name: &str, labels: &[(&str, &str)], of: &dyn Fn(&Value) -> f64| {
        let value = metrics.value(name, one, labels);
        let (low, high) = (of(&before), of(&after));
        assert!(
            (low..=high).contains(&value),
            "{name}: {low} {value} {high}"
        );
    };
    let field =
        |path: &'static str| move |report: &Value| report.pointer(path).unwrap().as_f64().unwrap();
    between("uvfs_answered_with_error_total", &[], &field("/errors"));
    between("uvfs_written_bytes_total", &[], &field("/bytes_written"));
    between("uvfs_read_bytes_total", &[], &field("/bytes_read"));
    between("uvfs_backed_opens_total", &[], &field("/backed_opens"));
    between("uvfs_uptime_seconds", &[], &field("/uptime_s"));
    between(
        "uvfs_queue_enters_total",
        &[("queue", "0")],
        &field("/queues/0/enters"),
    );
    between(
        "uvfs_queue_sleeps_total",
        &[("queue", "0")],
        &field("/queues/0/sleeps"),
    );
    let ops = |name: &'static str| {
        move |report: &Value| {
            let ops = report["ops"].as_array().unwrap();
            let op = ops.iter().find(|op| op["name"] == name).unwrap();
            op["count"].as_f64().unwrap()
        }
    };
    for name in ["CREATE", "WRITE", "LOOKUP"] {
        between("uvfs_requests_total", &[("op", name)], &ops(name));
        assert!(metrics.value("uvfs_requests_total", two, &[("op", name)]) > 0.0);
    }
    let bars = |report: &Value| {
        let bars = report["latency"].as_array().unwrap().iter();
        bars.map(|bar| bar["count"].as_f64().unwrap()).sum::<f64>()
    };
    between("uvfs_latency_seconds_count", &[], &bars);
    between("uvfs_latency_seconds_bucket", &[("le", "+Inf")], &bars);
    let nanos = |report: &Value| report["latency_ns"].as_f64().unwrap() / 1e9;
    between("uvfs_latency_seconds_sum", &[], &nanos);
    for (name, kind) in [
        ("uvfs_requests", "counter"),
        ("uvfs_queue_requests", "gauge"),
        ("uvfs_latency_seconds", "histogram"),
    ] {
        assert_eq!(
            metrics.types.get(name).map(String::as_str),
            Some(kind),
            "{name}"
        );
    }
    let several = run(uvfs().arg("stats").args([one, two]));
    assert_eq!(several.status.code(), Some(2), "{several}");
}
