//! The plots of each benchmark.

use maud::Markup;

use super::super::data::{RowData, Run, TargetData, WorkData};
use super::chart::{Bar, Bars, Lines, Scale, Series};

/// A median of a row.
type Figure = fn(&RowData) -> Option<f64>;

/// The plots of a benchmark; none of one that is better read as a table.
pub fn of(run: &Run) -> Vec<Markup> {
    match run.bench.as_str() {
        "wakeup" => [histograms(run), latencies(run)].concat(),
        "uncached" => seconds(run),
        "direct" => [speedups(run), stores(run)].concat(),
        "load" => loads(run),
        "writeback" => [blocks(run), discarded(run)].concat(),
        "programs" => relative(run),
        "check" => times(run),
        _ => Vec::new(),
    }
}

const RATE: Figure = |row| row.rate.map(|s| s.median);
const MEDIAN: Figure = |row| row.latency_us.map(|s| s.median);
const P99: Figure = |row| row.latency_p99_us.map(|s| s.median);

/// A line for each target over the given works.
fn lines(run: &Run, works: &[&WorkData], figure: Figure, name: &str, dashed: bool) -> Vec<Series> {
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
fn numbered<'r>(run: &'r Run, prefix: &str, suffix: &str) -> (Vec<String>, Vec<&'r WorkData>) {
    let rest = |work: &'r WorkData| {
        let rest = work.name.strip_prefix(prefix)?.strip_suffix(suffix)?;
        rest.parse::<u64>()
            .is_ok()
            .then(|| (rest.to_string(), work))
    };
    run.works.iter().filter_map(rest).unzip()
}

/// How the operations of a work are spread over latencies: a plot for each transport of uvfs, with a line for
/// each wait policy, native and the peers.
fn histograms(run: &Run) -> Vec<Markup> {
    let mut plots = Vec::new();
    // A small request that the kernel passes on, and several that change something.
    let works = run.works.iter();
    for work in works.filter(|work| ["read-1", "create"].contains(&work.name.as_str())) {
        for (transport, name) in [("dev-", "/dev/fuse"), ("uring-", "io_uring")] {
            let ours = |target: &&TargetData| target.name.starts_with(transport);
            let shown = |target: &&TargetData| {
                let row = work.row(&target.name);
                (ours(target) || target.kind != "uvfs")
                    && row.is_some_and(|row| !row.latency_histogram.is_empty())
            };
            if run.targets.iter().filter(shown).any(|target| ours(&target)) {
                plots.push(histogram(run, work, name, shown));
            }
        }
    }
    plots
}

fn histogram(
    run: &Run,
    work: &WorkData,
    transport: &str,
    shown: impl Fn(&&TargetData) -> bool,
) -> Markup {
    let targets = run.targets.iter().enumerate();
    let targets: Vec<(usize, &TargetData)> = targets.filter(|(_, target)| shown(target)).collect();
    let counts = |target: &TargetData| {
        let row = work.row(&target.name);
        row.map_or(&[][..], |row| &row.latency_histogram)
    };
    // A thousandth of the operations of each target at either end is left out, as there is no end to outliers.
    let (mut first, mut last) = (f64::INFINITY, 0.0_f64);
    for (_, target) in &targets {
        let counts = counts(target);
        let most = counts.iter().map(|(_, n)| *n).sum::<u64>() / 1000;
        let end = |counts: &mut dyn Iterator<Item = &(f64, u64)>| {
            let mut seen = 0;
            let mut at = counts.skip_while(|(_, n)| {
                seen += n;
                seen <= most
            });
            at.next().map(|(at, _)| *at)
        };
        first = first.min(end(&mut counts.iter()).unwrap_or(first));
        last = last.max(end(&mut counts.iter().rev()).unwrap_or(last));
    }
    let mut points = Vec::new();
    let mut power = first.log2().floor().exp2();
    while power <= last {
        points.extend([1.0, 1.25, 1.5, 1.75].map(|part| part * power));
        power *= 2.0;
    }
    points.retain(|at| (first * 0.99..=last * 1.01).contains(at));
    let share = |target: &TargetData| {
        let counts = counts(target);
        let all = counts.iter().map(|(_, n)| *n).sum::<u64>().max(1);
        let part = |at: &f64| {
            let in_it = counts
                .iter()
                .filter(|(from, _)| (from / at - 1.0).abs() < 0.05);
            Some(in_it.map(|(_, n)| *n).sum::<u64>() as f64 * 100.0 / all as f64)
        };
        points.iter().map(part).collect()
    };
    let label = |at: &f64| match at.log2().fract().abs() < 1e-9 {
        true => format!("{at}"),
        false => String::new(),
    };
    Lines {
        title: format!("Latency of {} over {transport}, by wait policy", work.name),
        x: "µs, logarithmic".into(),
        points: points.iter().map(label).collect(),
        y: "% of the operations".into(),
        scale: Scale::Linear,
        series: targets
            .iter()
            .map(|(color, target)| Series {
                name: target.name.clone(),
                color: *color,
                dashed: target.kind != "uvfs",
                values: share(target),
            })
            .collect(),
    }
    .draw()
}

/// Median and 99th percentile of each target where an operation was timed.
fn latencies(run: &Run) -> Vec<Markup> {
    let timed = |work: &&WorkData| work.results.iter().any(|row| MEDIAN(row).is_some());
    let bars = |work: &WorkData| Bars {
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
    work: &WorkData,
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

/// The gain of sending all pieces of a call at once, by their number: a line for each store.
fn speedups(run: &Run) -> Vec<Markup> {
    const SIZES: [u64; 5] = [1, 2, 4, 8, 16];
    let (points, _) = numbered(run, "read-one-", "us");
    let ratio = |target: &str, base: &str, delay: &str, pieces: u64| {
        let name = match pieces {
            16 => format!("read-one-{delay}us"),
            _ => format!("read-{pieces}-pieces-{delay}us"),
        };
        let work = run.works.iter().find(|work| work.name == name)?;
        Some(RATE(work.row(target)?)? / RATE(work.row(base)?)?)
    };
    let lines = |target: &str, base: &str| -> Vec<Series> {
        let line = |(color, delay): (usize, &String)| Series {
            name: format!("{delay} µs"),
            color,
            dashed: false,
            values: SIZES
                .iter()
                .map(|pieces| ratio(target, base, delay, *pieces))
                .collect(),
        };
        let lines = points.iter().enumerate().map(line);
        lines
            .filter(|line| line.values.iter().flatten().count() > 1)
            .collect()
    };
    let plot = |(target, base): (&str, &str)| {
        let series = lines(target, base);
        (!series.is_empty()).then(|| {
            Lines {
                title: format!("Reads by {target}, as a multiple of {base}"),
                x: "pieces of 128 KiB in a call; colours: what the store takes for each".into(),
                points: SIZES.map(|pieces| pieces.to_string()).into(),
                y: "times as fast, logarithmic".into(),
                scale: Scale::Log,
                series,
            }
            .draw()
        })
    };
    let base = "client-one-at-a-time";
    let targets = ["client", "mount"].into_iter();
    targets.filter_map(|target| plot((target, base))).collect()
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

/// Bandwidth by block size.
fn blocks(run: &Run) -> Vec<Markup> {
    let sized = |work: &'_ WorkData| {
        let (number, unit) = work.name.strip_prefix("write-")?.split_at_checked(1)?;
        match unit {
            "k" => Some(format!("{number} KiB")),
            "m" => Some(format!("{number} MiB")),
            _ => None,
        }
    };
    let all = run
        .works
        .iter()
        .filter_map(|work| Some((sized(work)?, work)));
    let (points, works): (Vec<String>, Vec<&WorkData>) = all.unzip();
    if works.is_empty() {
        return Vec::new();
    }
    let plot = Lines {
        title: "Bandwidth of two writers by block size".into(),
        x: "bytes of a write".into(),
        points,
        y: "MiB/s".into(),
        scale: Scale::Linear,
        series: lines(run, &works, RATE, "", false),
    };
    vec![plot.draw()]
}

/// Writers whose data is thrown away.
fn discarded(run: &Run) -> Vec<Markup> {
    let bars = |work: &WorkData| Bars {
        title: work.title.clone(),
        x: "MiB/s; longer is better".into(),
        scale: Scale::Linear,
        groups: each(run, work, RATE, |_| None, |rate, _| format!("{rate:.0}")),
    };
    let works = run.works.iter().filter(|w| w.name.starts_with("discard"));
    works.map(|work| bars(work).draw()).collect()
}

/// How much longer each program takes than on native.
fn relative(run: &Run) -> Vec<Markup> {
    let native = run.targets.iter().find(|target| target.kind == "native");
    let Some(native) = native.map(|target| target.name.as_str()) else {
        return Vec::new();
    };
    let group = |work: &WorkData| {
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
    let bars = |work: &WorkData| Bars {
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
