//! The figures that a client measures, and its clocks.

use std::io;
use std::time::Instant;

use rustix::time::ClockId;
use serde::{Deserialize, Serialize};

use super::stats::Latency;

/// The figures of a client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Measured {
    /// Operations, or MiB for the streams.
    pub amount: f64,
    /// Wall time, in seconds.
    pub seconds: f64,
    /// CPU time of the client, in seconds.
    pub cpu_seconds: f64,
    /// MiB of memory that the program had at most, where that is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<f64>,
    /// MiB that came from the device, where that is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_mib: Option<f64>,
    /// The amount in the slowest second, where that is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowest: Option<f64>,
    /// How long an operation took, where that is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<Latency>,
}

/// Wall and CPU time from a moment on.
pub struct Watch {
    pub start: Instant,
    cpu: f64,
}

impl Watch {
    pub fn start() -> Self {
        Self {
            cpu: cpu_seconds(),
            start: Instant::now(),
        }
    }

    pub fn stop(&self, amount: f64) -> Measured {
        Measured {
            amount,
            seconds: self.start.elapsed().as_secs_f64(),
            cpu_seconds: cpu_seconds() - self.cpu,
            ..Measured::default()
        }
    }
}

fn cpu_seconds() -> f64 {
    let t = rustix::time::clock_gettime(ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// Repeats `batch`, which returns how many operations it did, for a tenth of `seconds` to warm
/// up, and then for `seconds`.
pub fn for_a_while(
    seconds: f64,
    mut batch: impl FnMut() -> io::Result<u64>,
) -> io::Result<Measured> {
    let mut repeat = |limit: f64| {
        let watch = Watch::start();
        let mut done = 0;
        while watch.start.elapsed().as_secs_f64() < limit {
            done += batch()?;
        }
        io::Result::Ok(watch.stop(done as f64))
    };
    repeat(seconds / 10.0)?;
    repeat(seconds)
}
