//! Options that all benchmarks have, and how they end.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::{Value, json};
use uvfs_cli::{Result, printed};

use super::interrupt;
use super::report::Report;
use super::server::raise_file_limit;
use super::workspace::Workspace;

/// Options of every benchmark.
#[derive(clap::Args)]
pub struct Common {
    /// How many times each target is measured [default: 5, with --quick 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Measure for a shorter time, on less data
    #[arg(long)]
    pub quick: bool,
    /// Where to make the private directory to work in [default: /dev/shm, a tmpfs]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

impl Common {
    /// How many times each target is measured.
    pub fn rounds(&self) -> usize {
        self.rounds.unwrap_or(self.pick(3, 5)) as usize
    }

    /// One of two values, by `--quick`.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Prepares for a run, and makes the directory to work in; `bytes` is the room that it needs.
    pub fn workspace(&self, bytes: u64) -> Result<Workspace> {
        interrupt::install()?;
        raise_file_limit()?;
        Workspace::new(self.dir.as_deref(), bytes)
    }

    /// The settings of a run, in its JSON: those of all benchmarks, and the benchmark's own.
    pub fn settings(&self, own: Value) -> Value {
        let mut settings = json!({"rounds": self.rounds(), "pinned": false, "quick": self.quick});
        if let (Value::Object(settings), Value::Object(own)) = (&mut settings, own) {
            settings.extend(own);
        }
        settings
    }

    /// Prints the report, and on standard error what could not be measured.
    pub fn finish(&self, report: &Report) -> Result<ExitCode> {
        let text = if self.json {
            report.json()
        } else {
            report.table()
        };
        printed(io::stdout().lock().write_all(text.as_bytes()))?;
        let mut code = ExitCode::SUCCESS;
        for (target, error) in report.failures() {
            uvfs_cli::warn(format!("{target}: not measured: {error}"));
            code = ExitCode::FAILURE;
        }
        Ok(code)
    }
}
