//! The parts of a report: its targets, its works, and the results of each target.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::measure::Measured;
use super::super::runner::Sample;
use super::super::server::Target;
use super::super::stats::{Histogram, Latency, Summary};

/// The unit of a work's amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Unit {
    /// Operations.
    #[serde(rename = "op")]
    Op,
    /// 2^20 bytes.
    #[serde(rename = "MiB")]
    MiB,
    /// Runs of a program.
    #[serde(rename = "run")]
    Run,
}

impl Unit {
    /// The unit as it is written.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Op => "op",
            Unit::MiB => "MiB",
            Unit::Run => "run",
        }
    }
}

/// A work as it is shown.
#[derive(Clone, Debug, Serialize)]
pub struct WorkInfo {
    /// The short name.
    pub name: String,
    /// The calls that it makes, in words.
    pub title: String,
    /// The unit of its amount.
    pub unit: Unit,
}

/// A target, and why it could not be measured.
#[derive(Debug, Serialize)]
pub struct TargetReport {
    #[serde(flatten)]
    pub target: Target,
    pub error: Option<String>,
}

/// A work with the results of each target.
#[derive(Debug, Serialize)]
pub struct WorkReport {
    #[serde(flatten)]
    pub work: WorkInfo,
    pub results: Vec<Row>,
}

/// The results of one target.
#[derive(Debug, Serialize)]
pub struct Row {
    pub target: String,
    pub samples: Vec<Sample>,
    pub rate: Summary,
    pub client_cpu_us: Summary,
    pub server_cpu_us: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kswapd_cpu_us: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_cache_mib: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_p99_us: Option<Summary>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub latency_histogram: Vec<(f64, u64)>,
    pub ratio: BTreeMap<String, f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_seconds: Option<Summary>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub time_ratio: BTreeMap<String, f64>,
}

impl Row {
    /// Sums up the samples of one target; nothing where there are none.
    pub fn new(target: &Target, samples: &[Sample]) -> Option<Self> {
        let per_unit = |cpu: f64, s: &Sample| cpu * 1e6 / s.client.amount;
        let client = samples.iter().map(|s| per_unit(s.client.cpu_seconds, s));
        let server = samples
            .iter()
            .filter_map(|s| Some(per_unit(s.server_cpu_seconds?, s)));
        let kswapd = samples
            .iter()
            .filter_map(|s| Some(per_unit(s.client.kswapd_cpu_seconds?, s)));
        let latency = |pick: fn(Latency) -> f64| {
            Summary::of(samples.iter().filter_map(|s| s.client.latency_us.map(pick)))
        };
        let mut histogram = Histogram::default();
        let histograms = samples.iter().filter_map(|s| s.client.histogram.as_ref());
        histograms.for_each(|one| histogram.merge(one));
        // A sample keeps the figures alone.
        let figures = samples.iter().map(|s| Sample {
            client: Measured {
                histogram: None,
                ..s.client.clone()
            },
            ..s.clone()
        });
        Some(Self {
            target: target.name.clone(),
            rate: Summary::of(samples.iter().map(|s| s.client.amount / s.client.seconds))?,
            client_cpu_us: Summary::of(client)?,
            server_cpu_us: Summary::of(server),
            kswapd_cpu_us: Summary::of(kswapd),
            memory_mib: Summary::of(samples.iter().filter_map(|s| s.client.memory_mib)),
            host_cache_mib: Summary::of(samples.iter().filter_map(|s| s.client.host_cache_mib)),
            latency_us: latency(|l| l.median),
            latency_p99_us: latency(|l| l.p99),
            latency_histogram: histogram
                .quarters()
                .into_iter()
                .map(|(ns, count)| (ns as f64 / 1e3, count))
                .collect(),
            samples: figures.collect(),
            ratio: BTreeMap::new(),
            run_seconds: None,
            time_ratio: BTreeMap::new(),
        })
    }

    /// Adds how long a run took.
    pub fn add_time(&mut self) {
        let seconds = self
            .samples
            .iter()
            .map(|s| s.client.seconds / s.client.amount);
        self.run_seconds = Summary::of(seconds);
    }
}
