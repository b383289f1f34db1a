//! Reads the JSON that the benchmarks printed: one report, or those of `uvfs bench all`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use uvfs_cli::{Context, Error, Result};

use super::stats::Summary;

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
    pub runs: Vec<Value>,
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
        if value["bench"] == "all" {
            return serde_json::from_value(value).context(what);
        }
        Ok(Self {
            version: 1,
            bench: "all".into(),
            command: Vec::new(),
            seconds: 0.0,
            runs: vec![value],
            failures: Vec::new(),
        })
    }

    /// The reports, in one shape.
    pub fn runs(&self) -> Result<Vec<Run>> {
        let run = |value: &Value| {
            let name = || format!("the report of {}", value["bench"]);
            if value["bench"] == "check" {
                let check: Check = Deserialize::deserialize(value).context(name)?;
                return Ok(check.into());
            }
            Deserialize::deserialize(value).context(name)
        };
        self.runs.iter().map(run).collect()
    }
}

/// The report of one benchmark; see `report::JSON_HELP` for the fields.
#[derive(Debug, Deserialize)]
pub struct Run {
    pub bench: String,
    pub uvfs: String,
    #[serde(default)]
    pub kernel: String,
    #[serde(default)]
    pub cpus: usize,
    #[serde(default)]
    pub settings: Value,
    pub targets: Vec<TargetData>,
    pub works: Vec<WorkData>,
}

#[derive(Debug, Deserialize)]
pub struct TargetData {
    pub name: String,
    #[serde(default)]
    pub kind: String,
    #[serde(default)]
    pub command: Vec<String>,
    #[serde(default)]
    pub error: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct WorkData {
    pub name: String,
    pub title: String,
    pub unit: String,
    pub results: Vec<RowData>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RowData {
    pub target: String,
    pub samples: Vec<SampleData>,
    pub rate: Option<Summary>,
    pub client_cpu_us: Option<Summary>,
    pub server_cpu_us: Option<Summary>,
    pub kswapd_cpu_us: Option<Summary>,
    pub memory_mib: Option<Summary>,
    pub host_cache_mib: Option<Summary>,
    pub latency_us: Option<Summary>,
    pub latency_p99_us: Option<Summary>,
    pub latency_histogram: Vec<(f64, u64)>,
    pub ratio: BTreeMap<String, f64>,
    pub run_seconds: Option<Summary>,
    pub time_ratio: BTreeMap<String, f64>,
}

#[derive(Debug, Deserialize)]
pub struct SampleData {
    pub amount: f64,
    pub seconds: f64,
}

impl WorkData {
    /// Whether the figure is the time of a run, so that less is better.
    pub fn is_timed(&self) -> bool {
        self.unit == "run"
    }

    /// The unit of [`RowData::value`].
    pub fn measure(&self) -> String {
        match self.is_timed() {
            true => "ms".into(),
            false => format!("{}/s", self.unit),
        }
    }

    /// The row of a target.
    pub fn row(&self, target: &str) -> Option<&RowData> {
        self.results.iter().find(|row| row.target == target)
    }
}

impl RowData {
    /// Milliseconds of a run, or units in a second.
    pub fn value(&self, timed: bool) -> Option<Summary> {
        if !timed {
            return self.rate;
        }
        self.run_seconds.map(|s| Summary {
            median: s.median * 1e3,
            min: s.min * 1e3,
            max: s.max * 1e3,
        })
    }

    /// How its figure compares with that of another target, the same unit above and below.
    pub fn compared(&self, timed: bool, target: &str) -> Option<f64> {
        let ratios = if timed { &self.time_ratio } else { &self.ratio };
        ratios.get(target).copied()
    }
}

/// The output of `uvfs bench check --json`.
#[derive(Deserialize)]
struct Check {
    uvfs: String,
    rounds: u32,
    targets: Vec<Checked>,
}

#[derive(Deserialize)]
struct Checked {
    name: String,
    error: Option<String>,
    #[serde(default)]
    samples: Vec<CheckSample>,
    seconds: Option<Summary>,
    peak_bytes: Option<Summary>,
    speedup: Option<f64>,
}

#[derive(Deserialize)]
struct CheckSample {
    seconds: f64,
}

/// States of the page cache, as the names of the targets of `check` end.
const STATES: [(&str, &str); 2] = [
    ("cold", "with nothing of the image in the page cache"),
    ("warm", "with all of the image in the page cache"),
];

impl From<Check> for Run {
    /// A work for each state of the page cache.
    fn from(check: Check) -> Self {
        let mut works = Vec::new();
        let mut targets: Vec<TargetData> = Vec::new();
        for (state, title) in STATES {
            let mut results = Vec::new();
            for checked in &check.targets {
                let Some(name) = checked.name.strip_suffix(&format!("-{state}")) else {
                    continue;
                };
                results.extend(checked.row(name));
                if checked.error.is_some() || !targets.iter().any(|t| t.name == name) {
                    targets.push(TargetData {
                        name: name.into(),
                        kind: "check".into(),
                        command: Vec::new(),
                        error: checked.error.clone(),
                    });
                }
            }
            if !results.is_empty() {
                works.push(WorkData {
                    name: state.into(),
                    title: title.into(),
                    unit: "run".into(),
                    results,
                });
            }
        }
        Self {
            bench: "check".into(),
            uvfs: check.uvfs,
            kernel: String::new(),
            cpus: 0,
            settings: serde_json::json!({"rounds": check.rounds}),
            targets,
            works,
        }
    }
}

impl Checked {
    fn row(&self, name: &str) -> Option<RowData> {
        let seconds = self.seconds?;
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let samples = self.samples.iter().map(|s| SampleData {
            amount: 1.0,
            seconds: s.seconds,
        });
        let base = self.speedup.filter(|_| name != "xfs_repair");
        Some(RowData {
            target: name.into(),
            samples: samples.collect(),
            run_seconds: Some(seconds),
            memory_mib: self.peak_bytes.map(|s| Summary {
                median: mib(s.median),
                min: mib(s.min),
                max: mib(s.max),
            }),
            time_ratio: base
                .map(|speedup| ("xfs_repair".to_string(), 1.0 / speedup))
                .into_iter()
                .collect(),
            ..RowData::default()
        })
    }
}
