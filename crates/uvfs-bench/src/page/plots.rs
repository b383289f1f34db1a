//! The plots of each benchmark.

use maud::Markup;

use super::super::data::{Row, Run, Work};
use super::chart::{Bar, Bars, Lines, Scale, Series};

/// A median of a row.
type Figure = fn(&Row) -> Option<f64>;

/// The plots of a benchmark; none of one that is better read as a table.
pub fn of(run: &Run) -> Vec<Markup> {
    match run.bench.as_str() {
        "wakeup" => latencies(run),
        "uncached" => seconds(run),
        "direct" => stores(run),
        "load" => loads(run),
        "writeback" => throughput(run),
        "programs" => relative(run),
        "check" => times(run),
        _ => Vec::new(),
    }
}

const RATE: Figure = |row| row.rate.map(|s| s.median);
const MEDIAN: Figure = |row| row.latency_us.map(|s| s.median);
const P99: Figure = |row| row.latency_p99_us.map(|s| s.median);

/// A line for each target over the given works.
fn lines(run: &Run, works: &[&Work], figure: Figure, name: &str, dashed: bool) -> Vec<Series> {
    let series = run
        .targets
        .iter()
        .enumerate()
        .map(|(color, target)| Series {
            name: format!("{}{name}", target.name),
            color,
            dashed,
            values: works
                .iter()
                .map(|work| figure(work.row(&target.name)?))
                .collect(),
        });
    series
        .filter(|s| s.values.iter().any(Option::is_some))
        .collect()
}

/// Works whose names begin with `prefix`, with the rest of the name.
fn numbered<'r>(run: &'r Run, prefix: &str, suffix: &str) -> (Vec<String>, Vec<&'r Work>) {
    let rest = |work: &'r Work| {
        let rest = work.name.strip_prefix(prefix)?.strip_suffix(suffix)?;
        rest.parse::<u64>()
            .is_ok()
            .then(|| (rest.to_string(), work))
    };
    run.works.iter().filter_map(rest).unzip()
}

/// Median and 99th percentile of each target where an operation was timed.
fn latencies(run: &Run) -> Vec<Markup> {
    let timed = |work: &&Work| work.results.iter().any(|row| MEDIAN(row).is_some());
    let bars = |work: &Work| Bars {
        title: format!(
            "Latency of {}: median (bar) and 99th percentile (dot)",
            work.name
        ),
        x: "µs, logarithmic; shorter is better".into(),
        scale: Scale::Log,
        groups: each(run, work, MEDIAN, P99, |median, p99| match p99 {
            Some(p99) => format!("{median:.1} .. {p99:.1}"),
            None => format!("{median:.1}"),
        }),
    };
    run.works
        .iter()
        .filter(timed)
        .map(|work| bars(work).draw())
        .collect()
}

/// A bar for each target.
fn each(
    run: &Run,
    work: &Work,
    value: Figure,
    mark: Figure,
    label: fn(f64, Option<f64>) -> String,
) -> Vec<(String, Vec<Bar>)> {
    let bar = |(color, name): (usize, &String)| {
        let row = work.row(name)?;
        let (value, mark) = (value(row)?, mark(row));
        let bar = Bar {
            name: name.clone(),
            color,
            value,
            mark,
            label: label(value, mark),
        };
        Some((name.clone(), vec![bar]))
    };
    let names = run.targets.iter().map(|target| &target.name);
    names.enumerate().filter_map(bar).collect()
}

fn seconds(run: &Run) -> Vec<Markup> {
    let draw = |verb: &str| {
        let (points, works) = numbered(run, &format!("{verb}-second-"), "");
        (!points.is_empty()).then(|| {
            Lines {
                title: format!("32 streams of {verb}s, second by second"),
                x: "second".into(),
                points,
                y: "MiB/s".into(),
                scale: Scale::Linear,
                series: lines(run, &works, RATE, "", false),
            }
            .draw()
        })
    };
    ["write", "read"].into_iter().filter_map(draw).collect()
}

fn stores(run: &Run) -> Vec<Markup> {
    let shapes = [
        ("read-one-", "Reads of 2 MiB, one at a time"),
        ("write-one-", "Writes of 2 MiB, one at a time"),
        ("read-many-", "Reads of 128 KiB, 16 at a time"),
        ("write-many-", "Writes of 128 KiB, 16 at a time"),
    ];
    let draw = |(prefix, title): (&str, &str)| {
        let (points, works) = numbered(run, prefix, "us");
        (!points.is_empty()).then(|| {
            Lines {
                title: title.into(),
                x: "µs that the store takes for each 128 KiB".into(),
                points,
                y: "MiB/s, logarithmic".into(),
                scale: Scale::Log,
                series: lines(run, &works, RATE, "", false),
            }
            .draw()
        })
    };
    shapes.into_iter().filter_map(draw).collect()
}

/// Rate and latency by number of processes, for each work and number of neighbours.
fn loads(run: &Run) -> Vec<Markup> {
    let mut shapes: Vec<(&str, &str)> = Vec::new();
    for work in &run.works {
        // WORK-PROCESSESp-NEIGHBOURSn
        let mut parts = work.name.rsplitn(3, '-');
        if let (Some(neighbours), Some(_), Some(name)) = (parts.next(), parts.next(), parts.next())
            && !shapes.contains(&(name, neighbours))
        {
            shapes.push((name, neighbours));
        }
    }
    let mut plots = Vec::new();
    for (name, neighbours) in shapes {
        let (points, works) = numbered(run, &format!("{name}-"), &format!("p-{neighbours}"));
        let beside = match neighbours.trim_end_matches('n') {
            "0" => "alone".into(),
            number => format!("beside {number} busy neighbours"),
        };
        let plot = |what: &str, y: &str, scale, series| Lines {
            title: format!("{name}, {beside}: {what}"),
            x: "processes".into(),
            points: points.clone(),
            y: y.into(),
            scale,
            series,
        };
        let rate = lines(run, &works, RATE, "", false);
        let mut latency = lines(run, &works, MEDIAN, ", median", false);
        latency.extend(lines(run, &works, P99, ", 99%", true));
        plots.push(plot("rate", "operations/s", Scale::Linear, rate).draw());
        plots.push(plot("latency", "µs, logarithmic", Scale::Log, latency).draw());
    }
    plots
}

fn throughput(run: &Run) -> Vec<Markup> {
    let bars = |work: &Work| Bars {
        title: format!("{}: {}", work.name, work.title),
        x: "MiB/s; longer is better".into(),
        scale: Scale::Linear,
        groups: each(run, work, RATE, |_| None, |rate, _| format!("{rate:.0}")),
    };
    run.works.iter().map(|work| bars(work).draw()).collect()
}

/// How much longer each program takes than on native.
fn relative(run: &Run) -> Vec<Markup> {
    let native = run.targets.iter().find(|target| target.kind == "native");
    let Some(native) = native.map(|target| target.name.as_str()) else {
        return Vec::new();
    };
    let group = |work: &Work| {
        let bar = |(color, target): (usize, &String)| {
            let value = work.row(target)?.compared(true, native)?;
            Some(Bar {
                name: target.clone(),
                color,
                value,
                mark: None,
                label: format!("{value:.2}"),
            })
        };
        let names = run.targets.iter().map(|target| &target.name).enumerate();
        (work.name.clone(), names.filter_map(bar).collect())
    };
    let groups: Vec<(String, Vec<Bar>)> = run.works.iter().map(group).collect();
    if groups.iter().all(|(_, bars)| bars.is_empty()) {
        return Vec::new();
    }
    let bars = Bars {
        title: format!("Time of each program, as a multiple of that on {native}"),
        x: "times as long, logarithmic; to the left is better".into(),
        scale: Scale::Log,
        groups,
    };
    vec![bars.draw()]
}

fn times(run: &Run) -> Vec<Markup> {
    let bars = |work: &Work| Bars {
        title: format!("Check {}", work.title),
        x: "seconds; shorter is better".into(),
        scale: Scale::Linear,
        groups: each(
            run,
            work,
            |row| row.run_seconds.map(|s| s.median),
            |_| None,
            |seconds, _| format!("{seconds:.3}"),
        ),
    };
    run.works.iter().map(|work| bars(work).draw()).collect()
}
