//! One frame of `uvfs top`. It fits 80 columns and 24 lines.

use std::time::Duration;

use uvfs_cli::printable;
use uvfs_server::stats::{ClientReport, QueueReport, Report};

use super::Sample;
use crate::stats::file_of;

pub(super) const COLUMNS: usize = 80;
pub(super) const ROWS: usize = 24;

/// A line, and how it is shown: the parameters of an SGR sequence (console_codes(4)).
#[derive(Clone, Default)]
pub(super) struct Line {
    pub text: String,
    pub style: &'static str,
}

const BOLD: &str = "1";
const RED: &str = "31";

/// Formats a number in few characters.
fn short(number: f64) -> String {
    for (unit, size) in [("G", 1e9), ("M", 1e6), ("k", 1e3)] {
        if number >= size {
            return format!("{:.1}{unit}", number / size);
        }
    }
    format!("{number:.0}")
}

/// Formats a size in KiB in few characters.
fn kib(size: Option<u64>) -> String {
    match size {
        None => "?".into(),
        Some(size) if size >= 10 << 20 => format!("{} GiB", size >> 20),
        Some(size) => format!("{} MiB", size >> 10),
    }
}

/// Two reports, and the time between them.
struct Span<'a> {
    before: &'a Report,
    now: &'a Report,
    seconds: f64,
}

impl Span<'_> {
    /// The rate of a counter, in a second.
    fn rate(&self, count: impl Fn(&Report) -> u64) -> f64 {
        count(self.now).saturating_sub(count(self.before)) as f64 / self.seconds
    }

    /// The latencies below which these percentages of the timed requests were, and how many were timed in the
    /// interval. If none was, the latencies are those since the mount began.
    fn latency(&self, percents: [u64; 4]) -> (Vec<(u64, Duration)>, u64) {
        let old = |below: u64| {
            let bars = self.before.latency.iter();
            bars.filter(|bar| bar.below_ns == below)
                .map(|bar| bar.count)
                .sum::<u64>()
        };
        let bars = self.now.latency.iter();
        let all: Vec<(u64, u64)> = bars.map(|bar| (bar.below_ns, bar.count)).collect();
        let mut recent = all.clone();
        for (below, count) in &mut recent {
            *count = count.saturating_sub(old(*below));
        }
        let timed = recent.iter().map(|(_, count)| count).sum::<u64>();
        let bars = if timed == 0 { all } else { recent };
        let total = bars.iter().map(|(_, count)| count).sum::<u64>();
        let mut found = Vec::new();
        for percent in percents {
            let mut left = (total * percent).div_ceil(100);
            let bar = bars.iter().find(|(_, count)| {
                left = left.saturating_sub(*count);
                left == 0
            });
            if let (Some((below, _)), true) = (bar, total > 0) {
                found.push((percent, Duration::from_nanos(*below)));
            }
        }
        (found, timed)
    }
}

/// A frame of so many lines, each of so many characters at most.
pub(super) fn lines(
    name: &str,
    before: &Sample,
    now: &Sample,
    columns: usize,
    rows: usize,
) -> Vec<Line> {
    let span = Span {
        before: &before.report,
        now: &now.report,
        seconds: (now.at - before.at).as_secs_f64().max(1e-3),
    };
    let head = head(name, &span, now);
    let (clients, stuck) = (clients(&span), stuck(&span));
    let beside = [queues(&span), latency(&span), ops(&span)];
    // A higher terminal shows more queues and kinds of requests. What is stuck goes before clients.
    let longest = beside.iter().map(Vec::len).max().unwrap_or(0);
    let side = longest.min(6 + rows.saturating_sub(ROWS) / 2);
    let room = rows.saturating_sub(head.len() + side + stuck.len() + 3);
    let side = (0..side).map(|row| {
        let text = |table: &Vec<String>| table.get(row).cloned().unwrap_or_default();
        cells([38, 18, 0], beside.each_ref().map(text))
    });
    let mut lines = Vec::new();
    let mut add = |titles: usize, style, table: &mut dyn Iterator<Item = String>| {
        lines.extend(table.enumerate().map(|(row, text)| Line {
            text: text.trim_end().chars().take(columns).collect(),
            style: if row < titles { BOLD } else { style },
        }));
        lines.push(Line::default());
    };
    add(1, "", &mut head.into_iter());
    add(2, "", &mut side.into_iter());
    add(2, "", &mut clients.into_iter().take(room.max(2)));
    add(2, RED, &mut stuck.into_iter());
    lines.resize(rows, Line::default());
    lines
}

/// The cells of a line, each as wide as its column or cut off there; one without a width as it is.
fn cells<const N: usize>(widths: [usize; N], texts: [String; N]) -> String {
    let cells = texts.iter().zip(widths).map(|(text, width)| match width {
        0 => printable(text).into_owned(),
        width => format!("{:<width$.width$} ", printable(text)),
    });
    cells.collect()
}

/// A title, the columns' names, and the rows.
fn table<const N: usize>(
    title: String,
    widths: [usize; N],
    names: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> Vec<String> {
    let names = [names.map(String::from)].into_iter();
    let lines = names.chain(rows).map(|row| cells(widths, row));
    [title].into_iter().chain(lines).collect()
}

fn head(name: &str, span: &Span<'_>, sample: &Sample) -> Vec<String> {
    let report = span.now;
    let in_flight: u64 = report.queues.iter().map(|queue| queue.in_flight).sum();
    let host = match &report.watch {
        None => String::new(),
        Some(watch) if watch.on => format!(
            ", host changes passed on {}, lost {}",
            watch.told, watch.lost
        ),
        Some(_) => ", host changes not watched".to_owned(),
    };
    let memory = &sample.memory;
    let percent = |value: &Option<String>| value.clone().unwrap_or_else(|| "?".into());
    let hits = span.rate(|r| r.clients.iter().map(|client| client.says.hits).sum());
    let calls = span.rate(|r| r.clients.iter().map(|client| client.says.calls).sum());
    let cache = match calls > 0.0 {
        true => format!("{:.0} %", hits / calls * 100.0),
        false => "-".into(),
    };
    vec![
        printable(&format!("{name}  ({})", report.source)).into_owned(),
        format!(
            "{}, pid {}, up {} s{host}",
            report.transport, report.pid, report.uptime_s
        ),
        format!(
            "requests {}/s  errors {}/s  read {}B/s  written {}B/s  in flight {in_flight}",
            short(span.rate(|r| r.requests)),
            short(span.rate(|r| r.errors)),
            short(span.rate(|r| r.bytes_read)),
            short(span.rate(|r| r.bytes_written)),
        ),
        format!(
            "leases {} read, {} write  client cache hits {cache}  backed opens {}",
            report.leases.read, report.leases.write, report.backed_opens
        ),
        format!(
            "memory {} of {} free, server {}  pressure some {} %, full {} %",
            kib(memory.available),
            kib(memory.total),
            kib(memory.server),
            percent(&memory.some),
            percent(&memory.full)
        ),
    ]
}

fn queues(span: &Span<'_>) -> Vec<String> {
    let rows = span.now.queues.iter().enumerate().map(|(number, queue)| {
        let rate = |count: fn(&QueueReport) -> u64| {
            short(span.rate(|r| r.queues.get(number).map_or(0, count)))
        };
        [
            number.to_string(),
            queue.in_flight.to_string(),
            queue.deepest.to_string(),
            rate(|queue| queue.spins),
            rate(|queue| queue.sleeps),
            rate(|queue| queue.enters),
        ]
    });
    let title = format!("queues: {}", span.now.queues.len());
    let names = ["#", "now", "most", "spins/s", "sleep/s", "enter/s"];
    table(title, [3, 3, 4, 7, 7, 7], names, rows)
}

fn latency(span: &Span<'_>) -> Vec<String> {
    let (percents, timed) = span.latency([50, 90, 99, 100]);
    let timed = match timed {
        0 => "(since mount)".to_owned(),
        timed => format!("{timed} timed"),
    };
    let lines = (percents.iter()).map(|(percent, below)| format!("{percent:>3} % <{below:>8.1?}"));
    ["latency".into(), timed].into_iter().chain(lines).collect()
}

fn ops(span: &Span<'_>) -> Vec<String> {
    let count = |report: &Report, name: &str| {
        let mut ops = report.ops.iter();
        ops.find(|op| op.name == name).map_or(0, |op| op.count)
    };
    let ops = span.now.ops.iter();
    let mut rates: Vec<(&str, f64, u64)> = ops
        .map(|op| (&*op.name, span.rate(|r| count(r, &op.name)), op.count))
        .collect();
    rates.sort_by(|a, b| b.1.total_cmp(&a.1).then(b.2.cmp(&a.2)));
    let rows = rates
        .into_iter()
        .map(|(name, rate, all)| [name.to_owned(), short(rate), short(all as f64)]);
    table("requests".into(), [9, 6, 0], ["", "/s", "all"], rows)
}

fn clients(span: &Span<'_>) -> Vec<String> {
    let rows = span.now.clients.iter().map(|client| {
        let rate = |count: fn(&ClientReport) -> u64| {
            let same = |r: &Report| {
                let mut clients = r.clients.iter();
                clients
                    .find(|other| other.pid == client.pid)
                    .map_or(0, count)
            };
            short(span.rate(same))
        };
        [
            client.pid.to_string(),
            client.says.name.clone(),
            rate(|client| client.says.calls),
            rate(|client| client.says.hits),
            rate(|client| client.requests),
            rate(|client| client.says.bytes_read),
            rate(|client| client.says.bytes_written),
        ]
    });
    let title = format!("clients: {}", span.now.clients.len());
    let names = [
        "pid",
        "name",
        "calls/s",
        "hits/s",
        "requests/s",
        "read/s",
        "write/s",
    ];
    table(title, [8, 15, 8, 8, 10, 8, 0], names, rows)
}

fn stuck(span: &Span<'_>) -> Vec<String> {
    let rows = span.now.stuck.iter().map(|request| {
        [
            format!("{:.0} s", request.age_ms as f64 / 1e3),
            request.opcode.clone(),
            request.pid.to_string(),
            request.waits_for.clone(),
            file_of(request),
        ]
    });
    let title = match span.now.stuck.len() {
        0 => "stuck requests: none".to_owned(),
        count => format!("stuck requests: {count}"),
    };
    let names = ["age", "request", "pid", "waits for", "file"];
    table(title, [7, 11, 8, 16, 0], names, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers fit the columns of `uvfs top`.
    #[test]
    fn numbers_are_short() {
        let shorts = [0.0, 999.0, 1500.0, 2.5e6, 1e12].map(short);
        assert_eq!(shorts, ["0", "999", "1.5k", "2.5M", "1000.0G"]);
        assert_eq!(kib(Some(2048)), "2 MiB");
        assert_eq!(kib(Some(24 << 20)), "24 GiB");
        assert_eq!(kib(None), "?");
    }
}
