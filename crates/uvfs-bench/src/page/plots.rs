//! The plots of each benchmark.

use maud::Markup;

use super::super::report::{Report, Row, TargetReport, Unit, Work};
use super::chart::{Bar, Bars, Lines, Scale, Series};

/// A median of a row.
type Figure = fn(&Row) -> Option<f64>;

const RATE: Figure = |row| row.rate.map(|s| s.median);
const MEDIAN: Figure = |row| row.latency_us.map(|s| s.median);
const P99: Figure = |row| row.latency_p99_us.map(|s| s.median);

/// The plots of a benchmark.
pub fn of(run: &Report) -> Vec<Markup> {
    match run.bench.as_str() {
        "wakeup" => latencies(run),
        "direct" => stores(run),
        "load" => loads(run),
        "programs" => relative(run),
        _ => medians(run),
    }
}

/// A line for each target over the given works.
fn lines(run: &Report, works: &[&Work], figure: Figure, name: &str, dashed: bool) -> Vec<Series> {
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

/// Works whose names begin and end so, with the number between.
fn numbered<'r>(run: &'r Report, prefix: &str, suffix: &str) -> (Vec<String>, Vec<&'r Work>) {
    let rest = |work: &'r Work| {
        let rest = work.name.strip_prefix(prefix)?.strip_suffix(suffix)?;
        rest.parse::<u64>()
            .is_ok()
            .then(|| (rest.to_string(), work))
    };
    run.works.iter().filter_map(rest).unzip()
}

/// Median and 99th percentile of each target where an operation was timed.
fn latencies(run: &Report) -> Vec<Markup> {
    let title = "Latency: median (bar) and 99th percentile (dot)";
    let x = "µs, logarithmic; shorter is better";
    grouped(run, title, x, Scale::Log, |_, row| {
        let (median, p99) = (MEDIAN(row)?, P99(row)?);
        Some((median, Some(p99), format!("{median:.1} .. {p99:.1}")))
    })
}

/// The figures of each work.
fn medians(run: &Report) -> Vec<Markup> {
    let better = match run.works.first() {
        Some(work) if work.unit == Unit::Run => "ms; shorter is better".into(),
        Some(work) => format!("{}; longer is better", work.measure()),
        None => String::new(),
    };
    grouped(run, "Medians", &better, Scale::Linear, |work, row| {
        let value = row.value(work.unit)?.median;
        Some((value, None, format!("{value:.0}")))
    })
}

/// How much longer each program takes than on native.
fn relative(run: &Report) -> Vec<Markup> {
    let native = run.targets.iter().find(|target| target.kind == "native");
    let Some(native) = native.map(|target| target.name.as_str()) else {
        return Vec::new();
    };
    let title = format!("Time of each program, as a multiple of that on {native}");
    let x = "times as long, logarithmic; to the left is better";
    grouped(run, &title, x, Scale::Log, |work, row| {
        let value = row.compared(work.unit, native)?;
        Some((value, None, format!("{value:.2}")))
    })
}

/// One plot with a group for each work, unless there are none, of bars of the targets for which `bar` gives a value, a
/// mark and a label.
fn grouped(
    run: &Report,
    title: &str,
    x: &str,
    scale: Scale,
    bar: impl Fn(&Work, &Row) -> Option<(f64, Option<f64>, String)>,
) -> Vec<Markup> {
    let group = |work: &Work| {
        let bar = |(color, target): (usize, &TargetReport)| {
            let (value, mark, label) = bar(work, work.row(&target.name)?)?;
            Some(Bar {
                name: target.name.clone(),
                color,
                value,
                mark,
                label,
            })
        };
        let targets = run.targets.iter().enumerate();
        (
            work.name.clone(),
            targets.filter_map(bar).collect::<Vec<_>>(),
        )
    };
    let groups = run.works.iter().map(group);
    let groups: Vec<_> = groups.filter(|(_, bars)| !bars.is_empty()).collect();
    let plot = (!groups.is_empty()).then(|| {
        let (title, x) = (title.into(), x.into());
        Bars {
            title,
            x,
            scale,
            groups,
        }
        .draw()
    });
    plot.into_iter().collect()
}

/// Bandwidth by what the store takes, for each kind of call.
fn stores(run: &Report) -> Vec<Markup> {
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
fn loads(run: &Report) -> Vec<Markup> {
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
