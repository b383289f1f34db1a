//! Observing a running mount: stuck requests, metrics, and `uvfs top` in a terminal.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

use crate::harness::*;

const ANY: Transport = Transport::Dev;

pub(crate) fn stats(at: &Path) -> Value {
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

/// The log and `uvfs stats` name a request that hangs.
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
                && listed[0]["file"].is_string()
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

/// A server in the background has no standard error: it writes to the system's log.
#[test]
fn in_the_background_the_system_log_has_it() {
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("unshare")]) {
        return;
    }
    let scratch = Scratch::new();
    let log = UnixDatagram::bind(scratch.path("log")).unwrap();
    log.set_read_timeout(Some(SOON)).unwrap();
    for dir in ["dev", "other", "source", "source/below", "at"] {
        scratch.dir(dir);
    }
    fs::write(scratch.path("other/file"), "one").unwrap();
    // In a namespace with a /dev of its own, which has the log. The server below stops while a file there is read.
    let script = "
        cd \"$0\"
        mount --rbind /dev dev && mount -t tmpfs tmpfs /dev || exit
        for device in fuse null; do touch /dev/$device; mount --bind dev/$device /dev/$device; done
        ln -s \"$0/log\" /dev/log
        \"$1\" mount other source/below
        \"$1\" mount -o slow=0.3 source at
        stat at/below
        below=$(\"$1\" stats --json source/below | sed 's/.*\"pid\":\\([0-9]*\\),\"up.*/\\1/')
        kill -STOP $below
        cat at/below/file &
        sleep 2
        kill -CONT $below
        wait
        \"$1\" umount at
        \"$1\" umount source/below";
    let mut command = command("unshare", ["--mount", "sh", "-c", script]);
    command
        .arg(scratch.path(""))
        .arg(env!("CARGO_BIN_EXE_uvfs"));
    let outcome = run(&mut command);
    let mut message = [0; 1024];
    let len = log.recv(&mut message).expect("a message");
    let message = String::from_utf8_lossy(&message[..len]);
    assert!(
        message.starts_with("<27>uvfs[") && message.contains("a request waits for the file system"),
        "{message}"
    );
    assert!(outcome.ok().ends_with("one"));
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
pub(crate) struct Metrics {
    types: HashMap<String, String>,
    samples: HashMap<(String, Vec<(String, String)>), f64>,
}

impl Metrics {
    /// Parses the text; fails if it is not OpenMetrics.
    #[track_caller]
    pub(crate) fn parse(text: &str) -> Metrics {
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
    pub(crate) fn value(&self, name: &str, mount: &Path, labels: &[(&str, &str)]) -> f64 {
        let mut pairs = vec![("mount".to_owned(), mount.display().to_string())];
        pairs.extend(labels.iter().map(|(a, b)| (a.to_string(), b.to_string())));
        pairs.sort();
        let key = (name.to_owned(), pairs);
        let found = self.samples.get(&key);
        *found.unwrap_or_else(|| panic!("no {key:?}: {self:#?}"))
    }
}

/// Prometheus gets the numbers of `uvfs stats`.
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
    let here = ("mount".to_owned(), one.display().to_string());
    let buckets = metrics.samples.iter().filter(|((name, labels), _)| {
        name == "uvfs_latency_seconds_bucket" && labels.contains(&here)
    });
    let bound = |labels: &[(String, String)]| {
        let le = labels.iter().find(|(name, _)| name == "le");
        le.unwrap().1.replace("+Inf", "inf").parse::<f64>().unwrap()
    };
    let mut buckets: Vec<_> = buckets
        .map(|((_, labels), count)| (bound(labels), *count))
        .collect();
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    // All of them, from below 1 us to beyond 100 s, and cumulative.
    assert_eq!(buckets.len(), 31, "{buckets:?}");
    assert!(
        buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1),
        "{buckets:?}"
    );
    let missing = |report: &Value| {
        let failures = report["failures"].as_array().unwrap().iter();
        let missing = failures.filter(|it| it["op"] == "GETXATTR" && it["errno"] == "ENODATA");
        missing.map(|it| it["count"].as_f64().unwrap()).sum()
    };
    let labels = [("op", "GETXATTR"), ("errno", "ENODATA")];
    between("uvfs_errors_total", &labels, &missing);
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

/// A program in a terminal of its own.
struct Terminal {
    child: Child,
    keys: File,
    output: Receiver<Vec<u8>>,
    screen: vt100::Parser,
}

impl Terminal {
    fn new(rows: u16, columns: u16, arguments: &[&str]) -> Terminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let name = Path::new(std::ffi::OsStr::from_bytes(name.as_bytes()));
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&master, size).unwrap();
        // The child opens the terminal, which would else become this process's.
        let script = "exec setsid --ctty \"$@\" <\"$0\" >\"$0\" 2>&1";
        let child = command("sh", ["-c", script])
            .arg(name)
            .arg(env!("CARGO_BIN_EXE_uvfs"))
            .args(arguments)
            .env("TERM", "xterm-256color")
            .stdin(Stdio::null())
            .spawn()
            .expect("sh");
        let mut from: File = OwnedFd::try_clone(&master).unwrap().into();
        let (sender, output) = channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            let mut idle = 0;
            // Reading fails before the child opens the other side, and once it has ended.
            while idle < 200 {
                match from.read(&mut bytes) {
                    Ok(len) if len > 0 => {
                        idle = 0;
                        if sender.send(bytes[..len].to_vec()).is_err() {
                            return;
                        }
                    }
                    _ => {
                        idle += 1;
                        thread::sleep(Duration::from_millis(10));
                    }
                }
            }
        });
        let (rows, columns) = (NonZeroU16::new(rows), NonZeroU16::new(columns));
        Terminal {
            child,
            keys: master.into(),
            output,
            screen: vt100::Parser::new(rows.unwrap(), columns.unwrap(), 0),
        }
    }

    fn shown(&mut self) -> String {
        while let Ok(bytes) = self.output.recv_timeout(Duration::from_millis(20)) {
            self.screen.process(&bytes);
        }
        self.screen.screen().contents()
    }

    #[track_caller]
    fn wait_for(&mut self, what: &str, mut seen: impl FnMut(&str) -> bool) -> String {
        let end = Instant::now() + SOON;
        loop {
            let shown = self.shown();
            if seen(&shown) {
                return shown;
            }
            assert!(Instant::now() < end, "no {what}:\n{shown}");
        }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for the end.
    #[track_caller]
    fn end(&mut self) -> Option<i32> {
        let mut status = None;
        wait_for("the program in the terminal to end", || {
            status = self.child.try_wait().expect("wait");
            status.is_some()
        });
        self.shown();
        status.unwrap().code()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The word that follows `word` in a frame.
fn number(shown: &str, word: &str) -> Option<String> {
    let rest = shown.split(word).nth(1)?;
    rest.split_whitespace().next().map(str::to_owned)
}

/// `uvfs top` shows the mount, and restores the terminal.
#[test]
fn top_in_a_terminal() {
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("setsid")]) {
        return;
    }
    let stuck = Stuck::new(&Serve::over(ANY).option("slow=0.5"));
    let at = stuck.served.mount.at.clone();
    let at_name = at.to_str().unwrap();
    let mut terminal = Terminal::new(24, 80, &["top", "--interval", "0.2", at_name]);
    // The server finds the name of the file a moment later than the request.
    let shown = terminal.wait_for("stuck request and its file", |shown| {
        shown.contains("stuck requests: 1") && shown.contains("/below")
    });
    for word in [
        at_name,
        "queues",
        "latency",
        "requests",
        "clients",
        "leases",
        "memory",
        "pressure",
        "age",
        "the file system",
        "/below",
        "spins/s",
        "enter/s",
        "write/s",
        "q quits",
    ] {
        assert!(shown.contains(word), "no {word:?}:\n{shown}");
    }
    println!("{shown}");
    // The display is updated.
    let age = number(&shown, " up ").unwrap();
    terminal.wait_for("later frame", |shown| {
        number(shown, " up ").is_some_and(|now| now != age)
    });
    stuck.hung.server.signal(Signal::CONT);
    terminal.wait_for("end of the wait", |shown| {
        shown.contains("stuck requests: none")
    });
    terminal.press(" ");
    terminal.wait_for("freeze", |shown| shown.contains("space continues"));
    terminal.press("q");
    assert_eq!(terminal.end(), Some(0));
    assert!(
        !terminal.screen.screen().alternate_screen(),
        "the terminal stays as it was"
    );

    let once = run(uvfs().args(["top", "--once", "--interval", "0.1"]).arg(&at)).ok();
    assert!(
        once.lines().all(|line| line.chars().count() <= 80),
        "{once}"
    );
    assert_eq!(once.lines().count(), 24, "{once}");
    assert!(once.contains("stuck requests: none"), "{once}");
    let no_terminal = run(uvfs().arg("top").arg(&at));
    assert_eq!(no_terminal.status.code(), Some(2), "{no_terminal}");
    stuck.end().ok();
}

/// Unmounting ends `uvfs top`, which says why.
#[test]
fn top_of_a_mount_that_goes() {
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("setsid")]) {
        return;
    }
    let served = Served::new(&Serve::over(ANY));
    let at = served.mount.at.clone();
    let mut terminal = Terminal::new(10, 40, &["top", "--interval", "0.2", at.to_str().unwrap()]);
    // A small terminal shows less.
    terminal.wait_for("frame", |shown| shown.contains("requests"));
    served.mount.unmount().ok();
    assert_eq!(terminal.end(), Some(1));
    let shown = terminal.shown();
    assert!(shown.contains("uvfs: "), "no reason: {shown}");
    assert!(!terminal.screen.screen().alternate_screen());
}
