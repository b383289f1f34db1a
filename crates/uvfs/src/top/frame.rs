//! One frame of `uvfs top`. It fits 80 columns and 24 lines.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Stylize;
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, Table};
use uvfs_server::stats::Report;

use super::Sample;
use crate::stats::file_of;

pub(super) const WIDTH: u16 = 80;
pub(super) const HEIGHT: u16 = 24;

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

/// Draws a frame.
pub(super) fn draw(
    frame: &mut Frame<'_>,
    name: &str,
    before: &Sample,
    now: &Sample,
    keys: &'static str,
) {
    let span = Span {
        before: &before.report,
        now: &now.report,
        seconds: (now.at - before.at).as_secs_f64().max(1e-3),
    };
    let stuck = (now.report.stuck.len() as u16 + 3).max(6);
    // A higher terminal shows more queues and kinds of requests, and more clients.
    let spare = frame.area().height.saturating_sub(HEIGHT) / 2;
    let rows = now.report.queues.len().max(now.report.ops.len()) as u16 + 3;
    let [head, middle, clients, stuck, foot] = Layout::vertical([
        Constraint::Length(5),
        Constraint::Length(rows.clamp(7, 7 + spare)),
        Constraint::Min(5),
        Constraint::Max(stuck),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let [queues, latency, ops] = Layout::horizontal([
        Constraint::Length(39),
        Constraint::Length(18),
        Constraint::Min(20),
    ])
    .areas(middle);
    draw_head(frame, head, name, &span, now);
    draw_queues(frame, queues, &span);
    draw_latency(frame, latency, &span);
    draw_ops(frame, ops, &span);
    draw_clients(frame, clients, &span);
    draw_stuck(frame, stuck, &span);
    frame.render_widget(Line::from(keys).dim(), foot);
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, name: &str, span: &Span<'_>, sample: &Sample) {
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
    let lines = vec![
        Line::from(format!("{name}  ({})", report.source)).bold(),
        Line::from(format!(
            "{}, pid {}, up {} s{host}",
            report.transport, report.pid, report.uptime_s
        )),
        Line::from(format!(
            "requests {}/s  errors {}/s  read {}B/s  written {}B/s  in flight {in_flight}",
            short(span.rate(|r| r.requests)),
            short(span.rate(|r| r.errors)),
            short(span.rate(|r| r.bytes_read)),
            short(span.rate(|r| r.bytes_written)),
        )),
        Line::from(format!(
            "leases {} read, {} write  client cache hits {cache}  backed opens {}",
            report.leases.read, report.leases.write, report.backed_opens
        )),
        Line::from(format!(
            "memory {} of {} free, server {}  pressure some {} %, full {} %",
            kib(memory.available),
            kib(memory.total),
            kib(memory.server),
            percent(&memory.some),
            percent(&memory.full)
        )),
    ];
    frame.render_widget(Paragraph::new(lines), area);
}

fn draw_queues(frame: &mut Frame<'_>, area: Rect, span: &Span<'_>) {
    let rows = span.now.queues.iter().enumerate().map(|(number, queue)| {
        let rate = |count: fn(&uvfs_server::stats::QueueReport) -> u64| {
            short(span.rate(|r| r.queues.get(number).map_or(0, count)))
        };
        Row::new([
            number.to_string(),
            queue.in_flight.to_string(),
            queue.deepest.to_string(),
            rate(|queue| queue.spins),
            rate(|queue| queue.sleeps),
            rate(|queue| queue.enters),
        ])
    });
    let widths = [3, 3, 4, 7, 7, 7].map(Constraint::Length);
    let title = format!("queues: {}", span.now.queues.len());
    let table = Table::new(rows, widths)
        .header(Row::new(["#", "now", "most", "spins/s", "sleep/s", "enter/s"]).bold())
        .block(Block::bordered().title(title));
    frame.render_widget(table, area);
}

fn draw_latency(frame: &mut Frame<'_>, area: Rect, span: &Span<'_>) {
    let (percents, timed) = span.latency([50, 90, 99, 100]);
    let mut lines: Vec<Line<'_>> = (percents.iter())
        .map(|(percent, below)| Line::from(format!("{percent:>3} % <{below:>8.1?}")))
        .collect();
    lines.push(Line::from(match timed {
        0 => "(since mount)".to_owned(),
        timed => format!("{timed} timed"),
    }));
    let block = Block::bordered().title("latency");
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn draw_ops(frame: &mut Frame<'_>, area: Rect, span: &Span<'_>) {
    let count = |report: &Report, name: &str| {
        let mut ops = report.ops.iter();
        ops.find(|op| op.name == name).map_or(0, |op| op.count)
    };
    let mut rates: Vec<(&str, f64, u64)> = (span.now.ops.iter())
        .map(|op| {
            (
                op.name.as_str(),
                span.rate(|r| count(r, &op.name)),
                op.count,
            )
        })
        .collect();
    rates.sort_by(|a, b| b.1.total_cmp(&a.1).then(b.2.cmp(&a.2)));
    let rows = rates
        .into_iter()
        .map(|(name, rate, all)| Row::new([name.to_owned(), short(rate), short(all as f64)]));
    let widths = [
        Constraint::Min(8),
        Constraint::Length(6),
        Constraint::Length(6),
    ];
    let table = Table::new(rows, widths)
        .header(Row::new(["", "/s", "all"]).bold())
        .block(Block::bordered().title("requests"));
    frame.render_widget(table, area);
}

fn draw_clients(frame: &mut Frame<'_>, area: Rect, span: &Span<'_>) {
    let rows = span.now.clients.iter().map(|client| {
        let rate = |count: fn(&uvfs_server::stats::ClientReport) -> u64| {
            let same = |r: &Report| {
                let mut clients = r.clients.iter();
                clients
                    .find(|other| other.pid == client.pid)
                    .map_or(0, count)
            };
            short(span.rate(same))
        };
        Row::new([
            client.pid.to_string(),
            client.says.name.clone(),
            rate(|client| client.says.calls),
            rate(|client| client.says.hits),
            rate(|client| client.requests),
            rate(|client| client.says.bytes_read),
            rate(|client| client.says.bytes_written),
        ])
    });
    let widths = [
        Constraint::Length(8),
        Constraint::Min(12),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(10),
        Constraint::Length(8),
        Constraint::Length(8),
    ];
    let header = [
        "pid",
        "name",
        "calls/s",
        "hits/s",
        "requests/s",
        "read/s",
        "write/s",
    ];
    let table = Table::new(rows, widths)
        .header(Row::new(header).bold())
        .block(Block::bordered().title(format!("clients: {}", span.now.clients.len())));
    frame.render_widget(table, area);
}

fn draw_stuck(frame: &mut Frame<'_>, area: Rect, span: &Span<'_>) {
    let rows = span.now.stuck.iter().map(|request| {
        Row::new([
            format!("{:.0} s", request.age_ms as f64 / 1e3),
            request.opcode.clone(),
            request.pid.to_string(),
            request.waits_for.clone(),
            file_of(request),
        ])
        .red()
    });
    let widths = [
        Constraint::Length(7),
        Constraint::Length(11),
        Constraint::Length(8),
        Constraint::Length(16),
        Constraint::Min(20),
    ];
    let title = match span.now.stuck.len() {
        0 => "stuck requests: none".to_owned(),
        count => format!("stuck requests: {count}"),
    };
    let table = Table::new(rows, widths)
        .header(Row::new(["age", "request", "pid", "waits for", "file"]).bold())
        .block(Block::bordered().title(title));
    frame.render_widget(table, area);
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
