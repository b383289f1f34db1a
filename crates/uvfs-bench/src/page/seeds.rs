//! The tables of the mailing-list threads that the benchmarks retake, each in its thread's shape: what the thread
//! measured before and after its change, the source itself, and peers.

use maud::{Markup, html};

use super::super::data::{RowData, Run, WorkData};
use super::super::report::digits;

/// A row: its name and its cells.
type Line = (String, Vec<Option<f64>>);

/// A table of one thread.
struct Table {
    title: String,
    /// The unit of the cells, where the columns name none.
    unit: &'static str,
    columns: Vec<String>,
    rows: Vec<Line>,
}

/// The tables of a benchmark's thread, under a line that names the thread; nothing where there is none.
pub fn of(run: &Run) -> Markup {
    let (thread, tables) = match run.bench.as_str() {
        "writeback" => (
            "“fuse: remove tmp folio for writebacks and internal rb tree”, November 2024: buffered writes \
             by block size, before and after the copies went",
            writeback(run),
        ),
        "direct" => (
            "“fuse: process direct IO asynchronously”, December 2012: dd makes calls of 2 MiB, aio-stress \
             many of 128 KiB at a time; before, each piece waits for the one before it",
            direct(run),
        ),
        "uncached" => (
            "“mm/filemap: make buffered writes work with RWF_UNCACHED”, December 2024: 32 files, second by \
             second, cached and uncached",
            uncached(run),
        ),
        "wakeup" => (
            "“RFC fuse waitq latency”, March 2022: small files as bonnie++ makes them, with a server that \
             sleeps and one that waits awake; CPU is the client's and the server's, in percent of one",
            wakeup(run),
        ),
        "check" => (
            "“xfsprogs: xfs_buf unification and AIO”, October 2020: the same check by each I/O engine; the \
             thread gives no table of its own",
            check(run),
        ),
        _ => return html! {},
    };
    let tables = tables.into_iter().filter(|table| !table.rows.is_empty());
    html! {
        @for (number, table) in tables.enumerate() {
            @if number == 0 { h3 { "The table of the thread" } p.quiet { (thread) } }
            (draw(&table))
        }
    }
}

fn draw(table: &Table) -> Markup {
    html! {
        div.scroll {
            table.seed {
                caption { (table.title) }
                thead { tr {
                    th scope="col" { (table.unit) }
                    @for column in &table.columns { th scope="col" { (column) } }
                } }
                tbody { @for (name, cells) in &table.rows { tr {
                    th scope="row" { (name) }
                    @for (column, cell) in table.columns.iter().zip(cells) {
                        td { (cell.map_or("-".into(), |value| written(column, name, value))) }
                    }
                } } }
            }
        }
    }
}

/// A value, with its sign where it is a difference.
fn written(column: &str, row: &str, value: f64) -> String {
    match [column, row].contains(&DIFFERENCE) {
        true => format!("{value:+.0}%"),
        false => digits(value),
    }
}

/// The name of a row or column that compares the two before it.
const DIFFERENCE: &str = "difference";

fn rate(row: &RowData) -> Option<f64> {
    Some(row.rate?.median)
}

/// The CPU time of the client and the server, in percent of one CPU.
fn busy(row: &RowData) -> Option<f64> {
    let server = row.server_cpu_us.map_or(0.0, |s| s.median);
    Some((row.client_cpu_us?.median + server) * rate(row)? / 1e4)
}

fn difference(before: Option<f64>, after: Option<f64>) -> Option<f64> {
    let change = (after? / before? - 1.0) * 100.0;
    change.is_finite().then_some(change)
}

fn work<'r>(run: &'r Run, name: &str) -> Option<&'r WorkData> {
    run.works.iter().find(|work| work.name == name)
}

/// The targets in a thread's order, each with the name that the table gives it: those that stand for before and
/// after, where both were measured, and then all others.
fn sides<'r>(run: &'r Run, before: &str, after: &str) -> Vec<(&'r str, String)> {
    let there = |name: &str| run.works.iter().any(|work| work.row(name).is_some());
    let names = || run.targets.iter().map(|target| target.name.as_str());
    let names = || names().filter(|name| there(name));
    let labelled = |wanted: &str, label: &str| {
        let found = names().find(|name| *name == wanted);
        found.map(|name| (name, format!("{label} ({name})")))
    };
    let first = [labelled(before, "before"), labelled(after, "after")];
    let rest = names().filter(|name| ![before, after].contains(name));
    let rest = rest.map(|name| (name, name.to_string()));
    first.into_iter().flatten().chain(rest).collect()
}

/// Rows by side, with the difference of the first two after them.
fn with_difference(
    sides: &[(&str, String)],
    cells: impl Fn(&str) -> Vec<Option<f64>>,
) -> Vec<Line> {
    let mut rows: Vec<_> = sides
        .iter()
        .map(|(target, label)| (label.clone(), cells(target)))
        .collect();
    let both = |rows: &[(String, _)]| {
        rows.len() >= 2 && rows[0].0.starts_with("before") && rows[1].0.starts_with("after")
    };
    if both(&rows) {
        let pairs = rows[0].1.iter().zip(&rows[1].1);
        let changes = pairs.map(|(a, b)| difference(*a, *b)).collect();
        rows.insert(2, (DIFFERENCE.into(), changes));
    }
    rows
}

/// The same with sides as columns and the works as rows.
fn across(sides: &[(&str, String)], works: &[(String, &WorkData)]) -> (Vec<String>, Vec<Line>) {
    let values = |target: &str| works.iter().map(|(_, w)| rate(w.row(target)?)).collect();
    let columns = with_difference(sides, values);
    let row = |index: usize| columns.iter().map(|(_, values)| values[index]).collect();
    let rows = works
        .iter()
        .enumerate()
        .map(|(index, (name, _))| (name.clone(), row(index)))
        .collect();
    (columns.into_iter().map(|(name, _)| name).collect(), rows)
}

fn writeback(run: &Run) -> Vec<Table> {
    let named = [
        ("write-1k", "bs=1k"),
        ("write-4k", "bs=4k"),
        ("write-1m", "bs=1M"),
        ("discard-1m", "32 writers, bs=1M, discarded"),
    ];
    let works: Vec<(&str, &WorkData)> = named
        .into_iter()
        .filter_map(|(name, column)| Some((column, work(run, name)?)))
        .collect();
    let cells = |target: &str| works.iter().map(|(_, w)| rate(w.row(target)?)).collect();
    vec![Table {
        title: "Buffered writes by block size".into(),
        unit: "MiB/s",
        columns: works.iter().map(|(column, _)| column.to_string()).collect(),
        rows: with_difference(&sides(run, "client-copying", "client"), cells),
    }]
}

fn direct(run: &Run) -> Vec<Table> {
    let delays = run.works.iter().filter_map(|work| {
        let delay = work.name.strip_prefix("read-one-")?;
        Some(delay.strip_suffix("us")?.to_string())
    });
    let table = |delay: String| {
        let named = [
            ("dd reads", "read-one"),
            ("dd writes", "write-one"),
            ("aio reads", "read-many"),
            ("aio writes", "write-many"),
        ];
        let works = named.into_iter().filter_map(|(row, name)| {
            Some((row.to_string(), work(run, &format!("{name}-{delay}us"))?))
        });
        let sides = sides(run, "client-one-at-a-time", "client");
        let (columns, rows) = across(&sides, &works.collect::<Vec<_>>());
        Table {
            title: format!("A store that takes {delay} µs for each 128 KiB"),
            unit: "MiB/s",
            columns,
            rows,
        }
    };
    delays.map(table).collect()
}

fn uncached(run: &Run) -> Vec<Table> {
    let table = |verb: &str| {
        let works: Vec<(String, &WorkData)> = run
            .works
            .iter()
            .filter_map(|work| {
                let rest = work.name.strip_prefix(verb)?.strip_prefix('-')?;
                Some(match rest.strip_prefix("second-") {
                    Some(second) => (format!("{second}s"), work),
                    None => ("all but the first".into(), work),
                })
            })
            .collect();
        let sides = sides(run, "client", "client-uncached");
        let (columns, mut rows) = across(&sides, &works);
        if let Some((_, full)) = works.last() {
            let of = |figure: fn(&RowData) -> Option<f64>| {
                with_difference(&sides, |target| vec![full.row(target).and_then(figure)])
            };
            let row = |figure| of(figure).into_iter().map(|(_, cell)| cell[0]).collect();
            let kswapd: fn(&RowData) -> Option<f64> =
                |row| Some(row.kswapd_cpu_us?.median * rate(row)? / 1e4);
            rows.push(("CPU of all, % of one".into(), row(busy)));
            rows.push(("kswapd, % of a CPU".into(), row(kswapd)));
        }
        Table {
            title: format!("32 streams of 64 KiB {verb}s"),
            unit: "MiB/s",
            columns,
            rows,
        }
    };
    let tables = ["write", "read"].map(table).into_iter();
    tables
        .filter(|table| table.rows.len() > 2)
        .collect::<Vec<_>>()
}

fn wakeup(run: &Run) -> Vec<Table> {
    let named = [("Create", "create"), ("Read", "read"), ("Delete", "unlink")];
    let works: Vec<(&str, &WorkData)> = named
        .into_iter()
        .filter_map(|(column, name)| Some((column, work(run, name)?)))
        .collect();
    let columns = works
        .iter()
        .flat_map(|(column, _)| [format!("{column} /s"), "% CPU".into(), "99% µs".into()]);
    let cells = |target: &str| {
        let figures = |(_, work): &(&str, &WorkData)| match work.row(target) {
            None => [None; 3],
            Some(row) => [rate(row), busy(row), row.latency_p99_us.map(|s| s.median)],
        };
        works.iter().flat_map(figures).collect()
    };
    let columns: Vec<String> = columns.collect();
    let table = |(transport, name): (&str, &str)| {
        let [sleep, spin] = ["sleep", "spin"].map(|policy| format!("{transport}-{policy}"));
        let mut sides = sides(run, &sleep, &spin);
        // Each transport has a table, with native and the peers.
        sides.retain(|(target, _)| target.starts_with(transport) || !is_uvfs(run, target));
        Table {
            title: format!("Small files of 4 KiB over {name}"),
            unit: "",
            columns: columns.clone(),
            rows: with_difference(&sides, cells),
        }
    };
    let transports = [("dev", "/dev/fuse"), ("uring", "io_uring")].into_iter();
    let measured = transports.filter(|(transport, _)| {
        let mut targets = run.targets.iter();
        !works.is_empty() && targets.any(|t| t.name.starts_with(transport))
    });
    measured.map(table).collect()
}

fn is_uvfs(run: &Run, target: &str) -> bool {
    let found = run.targets.iter().find(|t| t.name == target);
    found.is_some_and(|target| target.kind == "uvfs")
}

fn check(run: &Run) -> Vec<Table> {
    let seconds = |row: &RowData| row.run_seconds.map(|s| s.median);
    let cells = |target: &str| {
        let figures = |work: &WorkData| match work.row(target) {
            None => [None; 2],
            Some(row) => [seconds(row), row.memory_mib.map(|s| s.median)],
        };
        run.works.iter().flat_map(figures).collect()
    };
    let columns = run.works.iter().flat_map(|work| {
        [
            format!("{}, seconds", work.name),
            format!("{}, MiB of memory", work.name),
        ]
    });
    vec![Table {
        title: "Check of one image".into(),
        unit: "",
        columns: columns.collect(),
        rows: with_difference(&sides(run, "sync-exact", "aio-exact"), cells),
    }]
}
