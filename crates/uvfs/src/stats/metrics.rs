//! Mounts' statistics as metrics, in the text format of OpenMetrics, which Prometheus reads.

use std::collections::BTreeSet;
use std::fmt::{self, Write};

use uvfs_server::stats::{
    ClientReport, Failure, LatencyBar, QueueReport, Report, SurviveReport, WatchReport,
};

/// One value, and the labels that tell it from others of its mount.
type Value = (Vec<(&'static str, String)>, f64);

struct Metric {
    /// Without the prefix `uvfs_`, and without a counter's `_total`.
    name: &'static str,
    help: &'static str,
    /// A gauge; a counter's value only grows.
    kind: &'static str,
    values: fn(&Report) -> Vec<Value>,
}

macro_rules! metrics {
    ($($kind:ident $name:ident, $help:literal: $values:expr;)*) => {
        &[$(Metric {
            name: stringify!($name),
            help: $help,
            kind: stringify!($kind),
            values: $values,
        }),*]
    };
}

/// A value without further labels.
fn one(value: u64) -> Vec<Value> {
    vec![(Vec::new(), value as f64)]
}

fn per_queue(report: &Report, value: impl Fn(&QueueReport) -> u64) -> Vec<Value> {
    let queues = report.queues.iter().enumerate();
    queues
        .map(|(number, queue)| (vec![("queue", number.to_string())], value(queue) as f64))
        .collect()
}

fn per_client(report: &Report, value: impl Fn(&ClientReport) -> f64) -> Vec<Value> {
    let clients = report.clients.iter();
    clients
        .map(|client| {
            // A process may attach more than once. The label `session` then keeps its samples apart.
            let twins = report
                .clients
                .iter()
                .take_while(|other| !std::ptr::eq(*other, client));
            let number = twins.filter(|other| other.pid == client.pid).count();
            let labels = vec![
                ("pid", client.pid.to_string()),
                ("name", client.says.name.clone()),
                ("session", number.to_string()),
            ];
            (labels, value(client))
        })
        .collect()
}

fn watch(report: &Report, value: impl Fn(&WatchReport) -> u64) -> Vec<Value> {
    optional(&report.watch, value)
}

fn survive(report: &Report, value: impl Fn(&SurviveReport) -> u64) -> Vec<Value> {
    optional(&report.survive, value)
}

/// The value of a part that not every mount has.
fn optional<T>(part: &Option<T>, value: impl Fn(&T) -> u64) -> Vec<Value> {
    part.as_ref().map_or(Vec::new(), |part| one(value(part)))
}

/// All but the latency.
const METRICS: &[Metric] = metrics! {
    gauge uptime_seconds, "Seconds since the mount began": |r| one(r.uptime_s);
    counter answered_with_error, "Requests answered with an error": |r| one(r.errors);
    counter errors, "Requests answered with an error, by kind and errno": |r| {
        let labels = |one: &Failure| vec![("op", one.op.clone()), ("errno", one.errno.clone())];
        r.failures.iter().map(|one| (labels(one), one.count as f64)).collect()
    };
    counter read_bytes,
        "Bytes that callers read, without those of backed opens, which the kernel does not report":
        |r| one(r.bytes_read);
    counter written_bytes,
        "Bytes that callers wrote, without those of backed opens, which the kernel does not report":
        |r| one(r.bytes_written);
    counter backed_opens,
        "Opens whose bytes are counted nowhere: the kernel reads and writes the host's file by itself":
        |r| one(r.backed_opens);
    counter requests, "Requests received, by kind": |r| {
        r.ops.iter().map(|op| (vec![("op", op.name.clone())], op.count as f64)).collect()
    };
    gauge queue_requests, "Requests under way": |r| per_queue(r, |q| q.in_flight);
    gauge queue_requests_most, "The most requests that were ever under way":
        |r| per_queue(r, |q| q.deepest);
    counter queue_spins, "Waits that ended while spinning": |r| per_queue(r, |q| q.spins);
    counter queue_sleeps, "Waits that went to sleep": |r| per_queue(r, |q| q.sleeps);
    counter queue_enters, "Calls of io_uring_enter": |r| per_queue(r, |q| q.enters);
    gauge server_generation, "How many servers the mount has had, this one included": |r| survive(r, |s| s.generation);
    counter sent_again_requests, "Requests that a killed server had not answered":
        |r| survive(r, |s| s.sent_again);
    gauge watch_on, "Whether the server watches the host for changes":
        |r| watch(r, |w| w.on.into());
    gauge watch_unwatched, "File systems that are not watched": |r| watch(r, |w| w.unwatched);
    counter watch_events, "Events of changes below the source": |r| watch(r, |w| w.events);
    counter watch_told, "Names and files that the kernel was told to drop": |r| watch(r, |w| w.told);
    counter watch_lost, "Times that events were lost": |r| watch(r, |w| w.lost);
    gauge clients, "Attached clients": |r| one(r.clients.len() as u64);
    counter client_requests, "Requests of a client": |r| per_client(r, |c| c.requests as f64);
    counter client_request_read_bytes, "Bytes that a client's requests read":
        |r| per_client(r, |c| c.bytes_read as f64);
    counter client_request_written_bytes, "Bytes that a client's requests wrote":
        |r| per_client(r, |c| c.bytes_written as f64);
    counter client_calls, "Reads and writes of a client's program":
        |r| per_client(r, |c| c.says.calls as f64);
    counter client_hits, "Reads that a client's cache served":
        |r| per_client(r, |c| c.says.hits as f64);
    counter client_read_bytes, "Bytes that a client's program read":
        |r| per_client(r, |c| c.says.bytes_read as f64);
    counter client_written_bytes, "Bytes that a client's program wrote":
        |r| per_client(r, |c| c.says.bytes_written as f64);
    counter client_waited_seconds, "Time that a client's threads waited":
        |r| per_client(r, |c| c.says.waited_ns as f64 / 1e9);
    gauge leases, "Leases that clients have": |r| {
        let mode = |name: &str, count: u64| (vec![("mode", name.to_owned())], count as f64);
        vec![mode("read", r.leases.read), mode("write", r.leases.write)]
    };
    gauge stuck_requests, "Requests that have waited for long": |r| one(r.stuck.len() as u64);
    gauge stuck_oldest_seconds, "Age of the oldest request that has waited for long": |r| {
        let oldest = r.stuck.iter().map(|request| request.age_ms).max();
        vec![(Vec::new(), oldest.unwrap_or(0) as f64 / 1e3)]
    };
};

/// The metrics of mounts, each with its name as the label `mount`.
pub fn text(mounts: &[(String, Report)]) -> Result<String, fmt::Error> {
    let mut text = String::new();
    for one in METRICS {
        let end = if one.kind == "counter" { "_total" } else { "" };
        begin(&mut text, one.name, one.help, one.kind)?;
        for (mount, report) in mounts {
            for (mut labels, value) in (one.values)(report) {
                labels.insert(0, ("mount", mount.clone()));
                sample(&mut text, one.name, end, &labels, value)?;
            }
        }
    }
    counts(&mut text, mounts)?;
    let (name, help) = (
        "latency_seconds",
        "Time from decoding to the answer, of one request in 16",
    );
    begin(&mut text, name, help, "histogram")?;
    for (mount, report) in mounts {
        // No request takes less than a microsecond: one bucket for those bars. The last bar has longer times, too.
        let bars = report.latency.iter();
        let mut bars: Vec<&LatencyBar> = bars.skip_while(|bar| bar.below_ns < 1024).collect();
        bars.pop();
        let count = |below: u64| {
            let bars = report.latency.iter().filter(|bar| bar.below_ns <= below);
            bars.map(|bar| bar.count).sum::<u64>() as f64
        };
        let mount = ("mount", mount.clone());
        let all = std::slice::from_ref(&mount);
        sample(&mut text, name, "_sum", all, report.latency_ns as f64 / 1e9)?;
        sample(&mut text, name, "_count", all, count(u64::MAX))?;
        for bar in bars {
            let le = ("le", format!("{:?}", bar.below_ns as f64 / 1e9));
            let labels = [mount.clone(), le];
            sample(&mut text, name, "_bucket", &labels, count(bar.below_ns))?;
        }
        let labels = [mount, ("le", "+Inf".into())];
        sample(&mut text, name, "_bucket", &labels, count(u64::MAX))?;
    }
    text += "# EOF\n";
    Ok(text)
}

/// The counts of file systems' own, each name a metric.
fn counts(text: &mut String, mounts: &[(String, Report)]) -> fmt::Result {
    let all = mounts.iter().flat_map(|(_, report)| &report.counts);
    let names: BTreeSet<&str> = all.map(|one| &*one.name).collect();
    // Another name would end the whole text for its reader.
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    for name in names.into_iter().filter(|name| name.chars().all(plain)) {
        let metric = format!("fs_{name}");
        // What waits may get less.
        let (kind, end) = match name.ends_with("_waiting") {
            true => ("gauge", ""),
            false => ("counter", "_total"),
        };
        begin(text, &metric, "A count of the file system's own", kind)?;
        for (mount, report) in mounts {
            if let Some(one) = report.counts.iter().find(|one| one.name == name) {
                let labels = [("mount", mount.clone())];
                sample(text, &metric, end, &labels, one.count as f64)?;
            }
        }
    }
    Ok(())
}

/// The head of a metric.
fn begin(text: &mut String, name: &str, help: &str, kind: &str) -> fmt::Result {
    writeln!(
        text,
        "# HELP uvfs_{name} {help}.\n# TYPE uvfs_{name} {kind}"
    )
}

/// One value of a metric.
fn sample(
    text: &mut String,
    name: &str,
    end: &str,
    labels: &[(&'static str, String)],
    value: f64,
) -> fmt::Result {
    let quoted = |text: &str| {
        text.replace('\\', "\\\\")
            .replace('"', "\\\"")
            .replace('\n', "\\n")
    };
    let labels = labels.iter();
    let labels: Vec<_> = labels
        .map(|(name, value)| format!("{name}=\"{}\"", quoted(value)))
        .collect();
    writeln!(text, "uvfs_{name}{end}{{{}}} {value:?}", labels.join(","))
}
