//! The results of a benchmark: one structure, shown as a table or as JSON.

mod rows;
mod text;
mod times;

use std::fmt::Write;

use serde::Serialize;

use super::runner::Outcome;
use super::server::Target;
use super::stats::Summary;
use rows::{Row, TargetReport, WorkReport};
pub use rows::{Unit, WorkInfo};
use text::thousands;
pub use text::{columns, digits};

/// Describes [`Report`] in a command's help.
pub const JSON_HELP: &str = "\
JSON (--json), one object on standard output:
  version       of this format: 1
  bench         the benchmark's name
  uvfs, kernel  versions
  cpus          CPUs that the benchmark may run on
  settings      the run's settings: rounds, pinned and the benchmark's own
  targets       what was measured: name, kind (native, uvfs, run, client, peer), options or
                command, for a client served (over shared memory) and base (others are compared
                with it), and error (why it could not be measured) or null
  works         name, title, unit (op, MiB or run), and results by target, without those that
                failed:
    target      its name
    samples     one for each round: amount (of units), seconds, cpu_seconds (of the client),
                memory_mib, host_cache_mib, kswapd_cpu_seconds and latency_us (median and p99)
                where they were measured, and server_cpu_seconds (null where there is no server)
    rate        units in a second: median, min, max over the rounds
    client_cpu_us, server_cpu_us
                CPU microseconds for a unit: median, min, max, or null
    kswapd_cpu_us
                of server_cpu_us, the kernel's threads that reclaim memory, where that was measured
    memory_mib  MiB of memory that the client's cache, or the kernel's of a mount, held at most,
                where that was measured: median, min, max
    host_cache_mib
                MiB by which the host's page cache has grown since the start, where that was
                measured: median, min, max
    latency_us, latency_p99_us
                microseconds of an operation, where they were measured: median, min, max over the
                rounds of a round's median and of its 99th percentile
    latency_histogram
                only for single operations of `wakeup`, over all rounds: pairs of microseconds and a count of
                the operations that took from so many to a quarter of a power of two more
    ratio       median rate divided by that of native, of each peer and of a base, by name
    run_seconds, time_ratio
                only where the unit is run: seconds of a run (median, min, max), and their median
                divided by that of each other target, by name
Fields may be added to it; those named here stay.";

/// The results of a benchmark; see [`JSON_HELP`] for the fields.
#[derive(Debug, Serialize)]
pub struct Report {
    version: u32,
    bench: String,
    uvfs: &'static str,
    kernel: String,
    cpus: usize,
    settings: serde_json::Value,
    targets: Vec<TargetReport>,
    works: Vec<WorkReport>,
}

/// A column of the table: its figure, and how the median is written.
type ColumnValue = fn(&Row) -> Option<Summary>;
type Format = fn(f64) -> String;

impl Report {
    /// Sums up a run. `outcomes` are by target and hold samples by work.
    pub fn new(
        bench: &str,
        settings: serde_json::Value,
        targets: Vec<Target>,
        works: Vec<WorkInfo>,
        outcomes: &[Outcome],
    ) -> Self {
        assert_eq!(targets.len(), outcomes.len());
        let works = works.into_iter().enumerate().map(|(index, work)| {
            let rows = targets.iter().zip(outcomes);
            let mut results: Vec<Row> = rows
                .filter_map(|(target, outcome)| Row::new(target, &outcome.samples[index]))
                .collect();
            let bases: Vec<(String, f64)> = results
                .iter()
                .filter(|row| targets.iter().any(|t| t.name == row.target && t.is_base()))
                .map(|row| (row.target.clone(), row.rate.median))
                .collect();
            for row in &mut results {
                let ratios = bases.iter();
                row.ratio = ratios
                    .map(|(base, rate)| (base.clone(), row.rate.median / rate))
                    .collect();
            }
            if work.unit == Unit::Run {
                results.iter_mut().for_each(Row::add_time);
                times::compare(&mut results);
            }
            WorkReport { work, results }
        });
        Self {
            version: 1,
            bench: bench.into(),
            uvfs: env!("CARGO_PKG_VERSION"),
            kernel: rustix::system::uname()
                .release()
                .to_string_lossy()
                .into_owned(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            settings,
            works: works.collect(),
            targets: targets
                .into_iter()
                .zip(outcomes)
                .map(|(target, outcome)| TargetReport {
                    target,
                    error: outcome.error.clone(),
                })
                .collect(),
        }
    }

    /// The targets that could not be measured, and why.
    pub fn failures(&self) -> impl Iterator<Item = (&str, &str)> {
        self.targets
            .iter()
            .filter_map(|t| Some((t.target.name.as_str(), t.error.as_deref()?)))
    }

    /// The report as JSON, with a new line at its end.
    pub fn json(&self) -> String {
        // Numbers, strings and string keys only: there is nothing that JSON could refuse.
        let mut text = serde_json::to_string_pretty(self).expect("a report is valid JSON");
        text.push('\n');
        text
    }

    /// The report for people.
    pub fn table(&self) -> String {
        let mut text = format!(
            "uvfs {} bench {}, Linux {}, {} CPUs\n",
            self.uvfs, self.bench, self.kernel, self.cpus
        );
        if self.works.iter().all(|work| work.work.unit == Unit::Run) {
            text += &times::table(&self.targets, &self.works);
            return text;
        }
        let bases: Vec<&Target> = self
            .targets
            .iter()
            .map(|t| &t.target)
            .filter(|t| t.is_base())
            .collect();
        for work in &self.works {
            let unit = work.work.unit.name();
            // Writing to a string does not fail.
            let _ = writeln!(text, "\n{}: {}", work.work.name, work.work.title);
            let rows = &work.results;
            let mut lines = vec![vec![
                String::new(),
                format!("{unit}/s"),
                "min..max".into(),
                format!("client µs/{unit}"),
                format!("server µs/{unit}"),
            ]];
            lines.extend(rows.iter().map(|row| {
                vec![
                    row.target.clone(),
                    thousands(row.rate.median),
                    format!("{}..{}", thousands(row.rate.min), thousands(row.rate.max)),
                    format!("{:.2}", row.client_cpu_us.median),
                    row.server_cpu_us
                        .map_or("-".into(), |cpu| format!("{:.2}", cpu.median)),
                ]
            }));
            // Columns of what was not measured anywhere are left out.
            let more: [(String, ColumnValue, Format); 5] = [
                (
                    format!("kswapd µs/{unit}"),
                    |row| row.kswapd_cpu_us,
                    |us| format!("{us:.2}"),
                ),
                ("held MiB".into(), |row| row.memory_mib, thousands),
                ("host MiB".into(), |row| row.host_cache_mib, thousands),
                (
                    "median µs".into(),
                    |row| row.latency_us,
                    |us| format!("{us:.1}"),
                ),
                (
                    "99% µs".into(),
                    |row| row.latency_p99_us,
                    |us| format!("{us:.1}"),
                ),
            ];
            for (title, figure, format) in more {
                if rows.iter().any(|row| figure(row).is_some()) {
                    let cell = |row| figure(row).map_or("-".into(), |found| format(found.median));
                    let column = [title].into_iter().chain(rows.iter().map(cell));
                    lines
                        .iter_mut()
                        .zip(column)
                        .for_each(|(l, cell)| l.push(cell));
                }
            }
            let ratio = |row: &Row, base: &Target| {
                let ratio = row.ratio.get(&base.name);
                ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"))
            };
            for base in &bases {
                let column = rows.iter().map(|row| ratio(row, base));
                let column = [format!("× {}", base.name)].into_iter().chain(column);
                lines
                    .iter_mut()
                    .zip(column)
                    .for_each(|(l, cell)| l.push(cell));
            }
            text += &columns(&lines);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::measure::Measured;
    use super::super::runner::Sample;
    use super::*;
    use serde_json::{Value, json};

    fn sample(rate: f64, server: Option<f64>) -> Sample {
        Sample {
            client: Measured {
                amount: rate * 2.0,
                seconds: 2.0,
                cpu_seconds: 1.0,
                ..Measured::default()
            },
            server_cpu_seconds: server,
        }
    }

    fn report() -> Report {
        let peer: super::super::server::Peer = "hp=hp {source} {mountpoint}".parse().unwrap();
        let uvfs = Target {
            name: "dev-spin".into(),
            kind: super::super::server::Kind::Uvfs {
                options: vec!["--wait=spin".into()],
            },
        };
        let broken = Target {
            name: "broken".into(),
            ..uvfs.clone()
        };
        let outcome = |rates: &[f64], server| Outcome {
            samples: vec![rates.iter().map(|&r| sample(r, server)).collect()],
            error: None,
        };
        let failed = Outcome {
            samples: vec![vec![]],
            error: Some("no ring".into()),
        };
        Report::new(
            "wakeup",
            json!({"rounds": 3}),
            vec![Target::native(), uvfs, peer.into(), broken],
            vec![WorkInfo {
                name: "read-1".into(),
                title: "reads".into(),
                unit: Unit::Op,
            }],
            &[
                outcome(&[1e6, 3e6, 2e6], None),
                outcome(&[5e5, 4e5, 6e5], Some(0.5)),
                outcome(&[1e5, 1e5, 1e5], Some(3.0)),
                failed,
            ],
        )
    }

    /// `--json` prints the fields that `--help` documents.
    #[test]
    fn the_json_has_the_documented_shape() {
        let report = report();
        let json: Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(json["version"], 1);
        assert_eq!(json["bench"], "wakeup");
        assert_eq!(json["settings"], json!({"rounds": 3}));
        assert!(json["kernel"].is_string() && json["uvfs"].is_string());
        assert!(json["cpus"].as_u64().unwrap() > 0);
        assert_eq!(
            json["targets"],
            json!([
                {"name": "native", "kind": "native", "error": null},
                {"name": "dev-spin", "kind": "uvfs", "options": ["--wait=spin"], "error": null},
                {"name": "hp", "kind": "peer", "command": ["hp", "{source}", "{mountpoint}"],
                 "error": null},
                {"name": "broken", "kind": "uvfs", "options": ["--wait=spin"],
                 "error": "no ring"},
            ])
        );
        let work = &json["works"][0];
        assert_eq!(work["name"], "read-1");
        assert_eq!(work["unit"], "op");
        let rows = work["results"].as_array().unwrap();
        assert_eq!(rows.len(), 3);
        assert_eq!(
            rows[1],
            json!({
                "target": "dev-spin",
                "samples": [
                    {"amount": 1e6, "seconds": 2.0, "cpu_seconds": 1.0, "server_cpu_seconds": 0.5},
                    {"amount": 8e5, "seconds": 2.0, "cpu_seconds": 1.0, "server_cpu_seconds": 0.5},
                    {"amount": 12e5, "seconds": 2.0, "cpu_seconds": 1.0, "server_cpu_seconds": 0.5},
                ],
                "rate": {"median": 5e5, "min": 4e5, "max": 6e5},
                "client_cpu_us": {"median": 1.0, "min": 1.0 / 1.2, "max": 1.25},
                "server_cpu_us": {"median": 0.5, "min": 0.5 / 1.2, "max": 0.625},
                "ratio": {"native": 0.25, "hp": 5.0},
            })
        );
        assert_eq!(rows[0]["server_cpu_us"], Value::Null);
        for field in [
            "samples",
            "rate",
            "client_cpu_us",
            "server_cpu_us",
            "memory_mib",
            "latency_us",
            "latency_p99_us",
            "latency_histogram",
            "ratio",
            "run_seconds",
            "time_ratio",
        ] {
            assert!(JSON_HELP.contains(field), "{field} is documented");
        }
    }

    /// A benchmark's table has each figure in its column, and says which target failed.
    #[test]
    fn the_table_shows_medians_spread_cpu_and_ratios() {
        let table = report().table();
        let line = table.lines().find(|l| l.contains("dev-spin")).unwrap();
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(
            cells,
            [
                "dev-spin",
                "500,000",
                "400,000..600,000",
                "1.00",
                "0.50",
                "0.25",
                "5.00"
            ]
        );
        assert!(!table.contains("broken"));
        assert_eq!(
            report().failures().collect::<Vec<_>>(),
            [("broken", "no ring")]
        );
    }

    /// Large numbers in tables have commas.
    #[test]
    fn numbers_get_commas() {
        assert_eq!(thousands(0.4), "0");
        assert_eq!(thousands(999.0), "999");
        assert_eq!(thousands(1000.0), "1,000");
        assert_eq!(thousands(1234567.8), "1,234,568");
    }
}
