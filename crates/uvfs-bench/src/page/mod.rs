//! Benchmarks as one HTML page that needs nothing else: no script, no other file, no network.

mod chart;
mod plots;
mod seeds;

use maud::{DOCTYPE, Markup, PreEscaped, html};
use uvfs_cli::Result;

use super::data::{All, RowData, Run, WorkData};
use super::report::digits;
use super::stats::Summary;

/// Nothing is loaded and no script runs, whatever a name holds. Both tags close themselves, so that the
/// page is well-formed XML too.
const HEAD: &str = "<meta charset=\"utf-8\"/>\
<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\
<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>";

const STYLE: &str = include_str!("style.css");

/// Longer tables are folded where there are plots.
const LONG: usize = 40;

/// A heading and what is compared.
fn describe(bench: &str) -> (&str, &str) {
    match bench {
        "wakeup" => (
            "What a trip to the file server and back costs",
            "Small requests and streams on the source directory itself (native), on mounts of uvfs by \
             transport (/dev/fuse or io_uring) and by how an idle server thread waits for the next \
             request (spin, sleep, or adaptive, which does the one that pays), and on other servers.",
        ),
        "writeback" => (
            "Buffered writes, far more than may stay dirty",
            "Writers that fill new files and make them durable. client-copying copies each page before \
             it is written back and keeps the copies in a tree; client writes the cache's pages \
             themselves. The difference is the price of the copies.",
        ),
        "direct" => (
            "Direct I/O over a store that takes its time",
            "A large call that is cut into pieces either sends all pieces at once (client, mount) or waits for \
             each before it sends the next (client-one-at-a-time). The slower the store, the larger the \
             difference.",
        ),
        "uncached" => (
            "What happens once the page cache is full",
            "32 streams of buffered reads and writes through more data than the cache may hold. The uncached \
             targets drop pages as soon as they were used.",
        ),
        "check" => (
            "Checking an XFS image",
            "uvfs check by I/O engine and by how it reads ahead, beside xfs_repair -n, on the same image. Each \
             run is a process of its own.",
        ),
        "programs" => (
            "Real programs on a source tree",
            "git, make, tar, python and others on the source directory itself (native), on a mount of uvfs, \
             on the same mount under uvfs run, and on other servers.",
        ),
        "load" => (
            "Many processes at a time",
            "The rate of all processes together and the latency of an operation, by number of processes, \
             alone and beside processes that only keep the CPUs busy.",
        ),
        other => (other, ""),
    }
}

/// The page.
pub fn page(all: &All) -> Result<String> {
    let runs = all.runs()?;
    let first = runs.first();
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                (PreEscaped(HEAD))
                title { "uvfs benchmarks" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "uvfs benchmarks" }
                @if let Some(run) = first {
                    p {
                        "uvfs " (run.uvfs)
                        @if let Some(run) = runs.iter().find(|run| !run.kernel.is_empty()) {
                            ", Linux " (run.kernel) ", " (run.cpus) " CPUs"
                        }
                        @if all.seconds > 0.0 { ", " (format!("{:.0}", all.seconds)) " seconds in all" }
                        "."
                    }
                }
                @if !all.command.is_empty() { p { "Made by " code { (all.command.join(" ")) } } }
                p.quiet {
                    "Figures are medians over rounds in which every target had its turn; min..max is their spread. "
                    "× NAME is the median divided by that of NAME: of rates, above 1 is faster; of times, below 1 is faster."
                }
                @for failure in &all.failures {
                    p.failed { strong { (failure.bench) } " was not measured: " (failure.error) }
                }
                nav { @for run in &runs { a href=(format!("#{}", run.bench)) { (run.bench) } } }
                main { @for run in &runs { (section(run)) } }
            }
        }
    };
    Ok(page.into_string())
}

fn section(run: &Run) -> Markup {
    let (heading, about) = describe(&run.bench);
    let plots = plots::of(run);
    let rows: usize = run.works.iter().map(|work| work.results.len()).sum();
    let folded = rows > LONG && !plots.is_empty();
    html! {
        section {
            h2 id=(run.bench) { (heading) }
            p { (about) }
            p.quiet { code { "uvfs bench " (run.bench) } ": " (settings(run)) }
            @for target in &run.targets {
                @if let Some(error) = &target.error {
                    p.failed { strong { (target.name) } " was not measured: " (error) }
                }
                @if target.kind == "peer" {
                    p.quiet { (target.name) " is " code { (target.command.join(" ")) } }
                }
            }
            (seeds::of(run))
            @if !plots.is_empty() { div.plots { @for plot in plots { (plot) } } }
            @if folded {
                details { summary { "All figures (" (rows) " rows)" } (table(run)) }
            } @else {
                (table(run))
            }
        }
    }
}

/// The settings that are numbers or words.
fn settings(run: &Run) -> String {
    let Some(settings) = run.settings.as_object() else {
        return String::new();
    };
    let shown = settings.iter().filter_map(|(name, value)| match value {
        serde_json::Value::Number(n) => Some(format!("{name} {n}")),
        serde_json::Value::Bool(true) => Some(name.clone()),
        _ => None,
    });
    shown.collect::<Vec<_>>().join(", ")
}

/// The text of a column for one row, if the row has that figure.
type Cell = dyn Fn(&WorkData, &RowData) -> Option<String>;

/// A column of the table.
struct Column {
    title: String,
    cell: Box<Cell>,
}

impl Column {
    fn new(
        title: impl Into<String>,
        cell: impl Fn(&WorkData, &RowData) -> Option<String> + 'static,
    ) -> Self {
        Self {
            title: title.into(),
            cell: Box::new(cell),
        }
    }

    fn median(title: &str, figure: fn(&RowData) -> Option<Summary>) -> Self {
        Self::new(title, move |_, row| Some(digits(figure(row)?.median)))
    }
}

/// The columns that have a figure anywhere.
fn columns(run: &Run) -> Vec<Column> {
    let mut columns = vec![
        Column::new("median", |work, row| {
            let value = row.value(work.is_timed())?;
            Some(format!("{} {}", digits(value.median), work.measure()))
        }),
        Column::new("min..max", |work, row| {
            let value = row.value(work.is_timed())?;
            Some(format!("{}..{}", digits(value.min), digits(value.max)))
        }),
    ];
    let mut bases: Vec<&String> = Vec::new();
    for row in run.works.iter().flat_map(|work| &work.results) {
        for base in row.ratio.keys().chain(row.time_ratio.keys()) {
            if !bases.contains(&base) {
                bases.push(base);
            }
        }
    }
    // In the targets' order.
    bases.sort_by_key(|base| run.targets.iter().position(|t| t.name == **base));
    for base in bases {
        let name = base.clone();
        columns.push(Column::new(format!("× {base}"), move |work, row| {
            let ratio = row.compared(work.is_timed(), &name)?;
            Some(format!("{ratio:.2}"))
        }));
    }
    columns.extend([
        Column::median("latency µs", |row| row.latency_us),
        Column::median("99% µs", |row| row.latency_p99_us),
        Column::median("client CPU µs", |row| row.client_cpu_us),
        Column::median("server CPU µs", |row| row.server_cpu_us),
        Column::median("kswapd µs", |row| row.kswapd_cpu_us),
        Column::median("memory MiB", |row| row.memory_mib),
        Column::median("host cache MiB", |row| row.host_cache_mib),
    ]);
    let used = |column: &Column| {
        let mut rows = run
            .works
            .iter()
            .flat_map(|w| w.results.iter().map(move |r| (w, r)));
        rows.any(|(work, row)| (column.cell)(work, row).is_some())
    };
    columns.retain(used);
    columns
}

fn table(run: &Run) -> Markup {
    let columns = columns(run);
    html! {
        div.scroll {
            table {
                thead { tr {
                    th scope="col" {}
                    @for column in &columns { th scope="col" { (column.title) } }
                } }
                @for work in &run.works {
                    tbody {
                        tr { th scope="rowgroup" colspan=(columns.len() + 1) {
                            (work.name) @if work.title != work.name { ": " (work.title) }
                        } }
                        @for row in &work.results {
                            tr {
                                th scope="row" { (row.target) }
                                @for column in &columns {
                                    td { (((column.cell)(work, row)).unwrap_or("-".into())) }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}
