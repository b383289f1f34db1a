//! Benchmarks as one HTML page that needs nothing else: no script, no other file, no network.

mod chart;
mod plots;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::report::{All, Report};

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
             themselves. The difference is the price of the copies. The uncached targets drop pages once they \
             are written.",
        ),
        "uncached" => (
            "Streams that do not fit into memory",
            "32 streams through files four times as large as the memory of the control group. The uncached targets drop pages \
             once they are used. A cache that is full costs what it takes to make room in it.",
        ),
        "direct" => (
            "Direct I/O over a store that takes its time",
            "A large call that is cut into pieces either sends all pieces at once (client, mount) or waits for \
             each before it sends the next (client-one-at-a-time). The slower the store, the larger the \
             difference.",
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
pub fn page(all: &All) -> String {
    let runs = &all.runs;
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
                @if let Some(run) = runs.first() {
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
                nav { @for run in runs { a href=(format!("#{}", run.bench)) { (run.bench) } } }
                main { @for run in runs { (section(run)) } }
            }
        }
    };
    page.into_string()
}

fn section(run: &Report) -> Markup {
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
            (medians(run))
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
fn settings(run: &Report) -> String {
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

/// The medians: a line for each work, and a column for each target.
fn medians(run: &Report) -> Markup {
    let lines = run.medians();
    let (heads, rows) = (&lines[0], &lines[1..]);
    html! {
        div.scroll {
            table.medians {
                thead { tr { @for cell in heads { th scope="col" { (cell) } } } }
                tbody { @for row in rows { tr {
                    @for (column, cell) in row.iter().enumerate() {
                        @if column == 0 { th scope="row" { (cell) } } @else { td { (cell) } }
                    }
                } } }
            }
        }
    }
}

/// All figures.
fn table(run: &Report) -> Markup {
    let columns = run.columns();
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
