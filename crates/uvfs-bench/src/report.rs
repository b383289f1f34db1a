//! The results of a benchmark: one structure, shown as a table or as JSON, and read from JSON again.

mod text;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uvfs_cli::{Context, Error, Result};

use super::measure::Measured;
use super::runner::{Outcome, Sample};
use super::server::Target;
use super::stats::{Latency, Summary};
pub use text::{columns, digits};

/// Describes [`Report`] in a command's help.
pub const JSON_HELP: &str = "\
JSON (--json), one object on standard output:
  version       of this format: 1
  bench         the benchmark's name
  uvfs, kernel  versions
  cpus          CPUs that the benchmark may run on
  settings      the run's settings: rounds and the benchmark's own
  targets       what was measured: name, kind (native, uvfs, run, client, peer), options or
                command, for a client served (over shared memory) and base (others are compared
                with it), and error (why it could not be measured) or null
  works         name, title, unit (op, MiB or run), and results by target, without those that
                failed:
    target      its name
    samples     one for each round: amount (of units), seconds, cpu_seconds (of the client),
                memory_mib, read_mib, slowest and latency_us (median and p99) where they were measured, and
                server_cpu_seconds (null where there is no server)
    rate        units in a second: median, min, max over the rounds
    client_cpu_us, server_cpu_us
                CPU microseconds for a unit: median, min, max, or null
    memory_mib, read_mib
                MiB of memory that the program had at most, and MiB that came from the device, where that was
                measured: median, min, max
    slowest     units in the slowest second, where that was measured: median, min, max
    latency_us, latency_p99_us
                microseconds of an operation, where they were measured: median, min, max over the
                rounds of a round's median and of its 99th percentile
    ratio       median rate divided by that of native, of each peer and of a base, by name
    run_seconds, time_ratio
                only where the unit is run: seconds of a run (median, min, max), and their median
                divided by that of each other target, by name
Fields may be added to it; those named here stay.";

/// The results of a benchmark; see [`JSON_HELP`] for the fields.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    version: u32,
    pub bench: String,
    pub uvfs: String,
    #[serde(default)]
    pub kernel: String,
    #[serde(default)]
    pub cpus: usize,
    #[serde(default)]
    pub settings: Value,
    pub targets: Vec<TargetReport>,
    pub works: Vec<Work>,
}

/// A target, and why it could not be measured.
#[derive(Debug, Serialize, Deserialize)]
pub struct TargetReport {
    pub name: String,
    #[serde(default)]
    pub kind: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    #[serde(default)]
    pub error: Option<String>,
    /// The fields that a [`Target`] has for its kind alone.
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// The unit of a work's amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    /// Operations.
    #[serde(rename = "op")]
    Op,
    /// 2^20 bytes.
    MiB,
    /// Runs of a program.
    #[serde(rename = "run")]
    Run,
}

/// A work with the results of each target.
#[derive(Debug, Serialize, Deserialize)]
pub struct Work {
    /// The short name.
    pub name: String,
    /// The calls that it makes, in words.
    pub title: String,
    /// The unit of its amount.
    pub unit: Unit,
    pub results: Vec<Row>,
}

/// The results of one target.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    pub target: String,
    pub samples: Vec<Sample>,
    pub rate: Option<Summary>,
    pub client_cpu_us: Option<Summary>,
    pub server_cpu_us: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_mib: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowest: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_p99_us: Option<Summary>,
    pub ratio: BTreeMap<String, f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_seconds: Option<Summary>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub time_ratio: BTreeMap<String, f64>,
}

impl Row {
    /// Sums up the samples of one target.
    fn new(target: &Target, samples: &[Sample], unit: Unit) -> Self {
        let summary = |figure: &dyn Fn(&Measured) -> Option<f64>| {
            Summary::of(samples.iter().filter_map(|s| figure(&s.client)))
        };
        let latency = |pick: fn(Latency) -> f64| summary(&|m| m.latency_us.map(pick));
        let server = |s: &Sample| Some(s.server_cpu_seconds? * 1e6 / s.client.amount);
        Self {
            target: target.name.clone(),
            rate: summary(&|m| Some(m.amount / m.seconds)),
            client_cpu_us: summary(&|m| Some(m.cpu_seconds * 1e6 / m.amount)),
            server_cpu_us: Summary::of(samples.iter().filter_map(server)),
            memory_mib: summary(&|m| m.memory_mib),
            read_mib: summary(&|m| m.read_mib),
            slowest: summary(&|m| m.slowest),
            latency_us: latency(|l| l.median),
            latency_p99_us: latency(|l| l.p99),
            samples: samples.to_vec(),
            run_seconds: summary(&|m| (unit == Unit::Run).then_some(m.seconds / m.amount)),
            ..Self::default()
        }
    }

    /// Milliseconds of a run, or units in a second.
    pub fn value(&self, unit: Unit) -> Option<Summary> {
        match unit {
            Unit::Run => self.run_seconds.map(|seconds| seconds.times(1e3)),
            _ => self.rate,
        }
    }

    /// How its figure compares with that of another target, the same unit above and below.
    pub fn compared(&self, unit: Unit, target: &str) -> Option<f64> {
        let ratios = match unit {
            Unit::Run => &self.time_ratio,
            _ => &self.ratio,
        };
        ratios.get(target).copied()
    }
}

impl Work {
    /// One without results.
    pub fn new(name: impl Into<String>, title: impl Into<String>, unit: Unit) -> Self {
        Self {
            name: name.into(),
            title: title.into(),
            unit,
            results: Vec::new(),
        }
    }

    /// The unit of [`Row::value`].
    pub fn measure(&self) -> &'static str {
        match self.unit {
            Unit::Op => "op/s",
            Unit::MiB => "MiB/s",
            Unit::Run => "ms",
        }
    }

    /// The row of a target.
    pub fn row(&self, target: &str) -> Option<&Row> {
        self.results.iter().find(|row| row.target == target)
    }

    /// Compares each target with the others: rates with those of `bases`, and times with those of all.
    fn compare(&mut self, bases: &[&str]) {
        let pick = |figure: &dyn Fn(&Row) -> Option<Summary>| -> Vec<(String, f64)> {
            let medians = self.results.iter();
            let medians = medians.filter_map(|row| Some((row.target.clone(), figure(row)?.median)));
            medians.collect()
        };
        let mut rates = pick(&|row| row.rate);
        rates.retain(|(name, _)| bases.contains(&name.as_str()));
        let times = pick(&|row| row.run_seconds);
        for row in &mut self.results {
            let by = |own: Option<Summary>, others: &[(String, f64)]| -> BTreeMap<String, f64> {
                let others = others.iter();
                let ratio =
                    |(name, other): &(String, f64)| Some((name.clone(), own?.median / other));
                others.filter_map(ratio).collect()
            };
            row.ratio = by(row.rate, &rates);
            row.time_ratio = by(row.run_seconds, &times);
            row.time_ratio.remove(&row.target);
        }
    }
}

/// The text of a column for one row, if the row has that figure.
type Cell = dyn Fn(&Work, &Row) -> Option<String>;

/// A column of a table of all figures.
pub struct Column {
    pub title: String,
    pub cell: Box<Cell>,
}

impl Column {
    fn new(title: &str, cell: impl Fn(&Work, &Row) -> Option<String> + 'static) -> Self {
        Self {
            title: title.into(),
            cell: Box::new(cell),
        }
    }

    fn median(title: &str, figure: fn(&Row) -> Option<Summary>) -> Self {
        Self::new(title, move |_, row| Some(digits(figure(row)?.median)))
    }
}

impl Report {
    /// Sums up a run. `outcomes` are by target and hold samples by work.
    pub fn new(
        bench: &str,
        settings: Value,
        targets: &[Target],
        mut works: Vec<Work>,
        outcomes: &[Outcome],
    ) -> Self {
        assert_eq!(targets.len(), outcomes.len());
        let bases = targets.iter().filter(|target| target.is_base());
        let bases: Vec<&str> = bases.map(|target| target.name.as_str()).collect();
        for (index, work) in works.iter_mut().enumerate() {
            let rows = targets.iter().zip(outcomes);
            let rows = rows.map(|(target, outcome)| (target, &outcome.samples[index]));
            let rows = rows.filter(|(_, samples)| !samples.is_empty());
            let rows = rows.map(|(target, samples)| Row::new(target, samples, work.unit));
            work.results = rows.collect();
            work.compare(&bases);
        }
        let described = |(target, outcome): (&Target, &Outcome)| {
            let target = serde_json::to_value(target).and_then(serde_json::from_value);
            TargetReport {
                error: outcome.error.clone(),
                ..target.expect("a target has a name and a kind")
            }
        };
        Self {
            version: 1,
            bench: bench.into(),
            uvfs: env!("CARGO_PKG_VERSION").into(),
            kernel: rustix::system::uname()
                .release()
                .to_string_lossy()
                .into_owned(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            settings,
            targets: targets.iter().zip(outcomes).map(described).collect(),
            works,
        }
    }

    /// The targets that could not be measured, and why.
    pub fn failures(&self) -> impl Iterator<Item = (&str, &str)> {
        self.targets
            .iter()
            .filter_map(|t| Some((t.name.as_str(), t.error.as_deref()?)))
    }

    /// The report as JSON, with a new line at its end.
    pub fn json(&self) -> String {
        // Numbers, strings and string keys only: there is nothing that JSON could refuse.
        serde_json::to_string_pretty(self).expect("a report is valid JSON") + "\n"
    }

    /// The columns that have a figure anywhere.
    pub fn columns(&self) -> Vec<Column> {
        let mut columns = vec![
            Column::new("median", |work, row| {
                let value = row.value(work.unit)?;
                Some(format!("{} {}", digits(value.median), work.measure()))
            }),
            Column::new("min..max", |work, row| {
                let value = row.value(work.unit)?;
                Some(format!("{}..{}", digits(value.min), digits(value.max)))
            }),
        ];
        for base in self.targets.iter().map(|target| target.name.clone()) {
            columns.push(Column::new(&format!("× {base}"), move |work, row| {
                // Of a target that is no base there is no ratio.
                row.ratio.get(&base)?;
                Some(format!("{:.2}", row.compared(work.unit, &base)?))
            }));
        }
        columns.extend([
            Column::median("slowest second", |row| row.slowest),
            Column::median("latency µs", |row| row.latency_us),
            Column::median("99% µs", |row| row.latency_p99_us),
            Column::median("client CPU µs", |row| row.client_cpu_us),
            Column::median("server CPU µs", |row| row.server_cpu_us),
            Column::median("memory MiB", |row| row.memory_mib),
            Column::median("read MiB", |row| row.read_mib),
        ]);
        columns.retain(|column| {
            let mut works = self.works.iter();
            works.any(|work| {
                let mut rows = work.results.iter();
                rows.any(|row| (column.cell)(work, row).is_some())
            })
        });
        columns
    }

    /// The medians: a line for each work, and a column for each target.
    pub fn medians(&self) -> Vec<Vec<String>> {
        self.across(|work, name| Some(digits(work.row(name)?.value(work.unit)?.median)))
    }

    /// A line for each work, with what `cell` gives for each target.
    fn across(&self, cell: impl Fn(&Work, &str) -> Option<String>) -> Vec<Vec<String>> {
        let targets = self.targets.iter();
        let names: Vec<&str> = targets.map(|target| target.name.as_str()).collect();
        let head = ["", ""].iter().chain(&names);
        let mut lines = vec![head.map(ToString::to_string).collect()];
        for work in &self.works {
            let mut line: Vec<String> = vec![work.name.clone(), work.measure().into()];
            line.extend(
                names
                    .iter()
                    .map(|name| cell(work, name).unwrap_or("-".into())),
            );
            lines.push(line);
        }
        lines
    }

    /// The report for people: all figures; or, of many programs, their times and how these compare.
    pub fn table(&self) -> String {
        let mut text = format!(
            "uvfs {} bench {}, Linux {}, {} CPUs\n",
            self.uvfs, self.bench, self.kernel, self.cpus
        );
        if self.bench == "programs" {
            let spread = |work: &Work, name: &str| {
                let time = work.row(name)?.value(work.unit)?;
                let [median, min, max] = [time.median, time.min, time.max].map(digits);
                Some(format!("{median} ({min}..{max})"))
            };
            text += &format!("\nMedians (min..max):\n{}", columns(&self.across(spread)));
            for base in &self.targets {
                let ratio = |work: &Work, name: &str| {
                    let ratio = work.row(name)?.compared(work.unit, &base.name)?;
                    Some(format!("{ratio:.2}"))
                };
                let lines = columns(&self.across(ratio));
                text += &format!("\nDivided by those of {}:\n{lines}", base.name);
            }
            return text;
        }
        let figures = self.columns();
        for work in &self.works {
            // Writing to a string does not fail.
            let _ = writeln!(text, "\n{}: {}", work.name, work.title);
            let titles = figures.iter().map(|column| column.title.clone());
            let mut lines = vec![[String::new()].into_iter().chain(titles).collect()];
            lines.extend(work.results.iter().map(|row| {
                let cell = |column: &Column| (column.cell)(work, row).unwrap_or("-".into());
                let name = [row.target.clone()].into_iter();
                name.chain(figures.iter().map(cell)).collect::<Vec<_>>()
            }));
            text += &columns(&lines);
        }
        text
    }
}

/// The output of `uvfs bench all --json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct All {
    /// Of the format: 1.
    pub version: u32,
    /// `all`.
    pub bench: String,
    /// Its command line.
    pub command: Vec<String>,
    /// How long it took.
    pub seconds: f64,
    /// Each benchmark's own report.
    pub runs: Vec<Report>,
    /// The benchmarks that gave no report.
    pub failures: Vec<Failure>,
}

/// A benchmark that gave no report.
#[derive(Debug, Serialize, Deserialize)]
pub struct Failure {
    /// Its name.
    pub bench: String,
    /// Why.
    pub error: String,
}

impl All {
    /// One with these reports alone.
    pub fn of(runs: Vec<Report>) -> Self {
        Self {
            version: 1,
            bench: "all".into(),
            command: Vec::new(),
            seconds: 0.0,
            runs,
            failures: Vec::new(),
        }
    }

    /// Reads a file with all benchmarks, or with the report of one.
    pub fn load(path: &Path) -> Result<Self> {
        let what = || path.display().to_string();
        let value: Value =
            serde_json::from_slice(&std::fs::read(path).context(what)?).context(what)?;
        if value["version"] != 1 || !value["bench"].is_string() {
            return Err(Error::new(format!(
                "{}: not what `uvfs bench … --json` prints",
                what()
            )));
        }
        match value["bench"] == "all" {
            true => serde_json::from_value(value).context(what),
            false => Ok(Self::of(vec![serde_json::from_value(value).context(what)?])),
        }
    }
}

#[cfg(test)]
mod tests;
