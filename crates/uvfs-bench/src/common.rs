//! Options that the benchmarks share, and how they run and end.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum;
use serde_json::{Value, json};
use uvfs_cli::{Result, printed};

use super::interrupt;
use super::report::{Report, Work};
use super::runner::{Sample, Say, interleave};
use super::server::{Target, raise_file_limit};
use super::workspace::Workspace;

/// Options of every benchmark.
#[derive(clap::Args)]
pub struct Common {
    /// Where to make the private directory to work in [default: /dev/shm, a tmpfs]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// How many times each target is measured [default: 5, with --quick 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Measure for a shorter time, on less data
    #[arg(long)]
    quick: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// The name of a value on the command line, and its help.
pub fn words(value: &impl ValueEnum) -> (String, String) {
    let value = value.to_possible_value().expect("no value is skipped");
    let help = value.get_help().map(ToString::to_string);
    (value.get_name().into(), help.unwrap_or_default())
}

impl Common {
    /// Makes the directory to work in; `bytes` is the room that it needs.
    pub fn workspace(&self, bytes: u64) -> Result<Workspace> {
        interrupt::install()?;
        raise_file_limit()?;
        Workspace::new(self.dir.as_deref(), bytes)
    }

    /// One of two values, by `--quick`.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Measures by [`interleave`] and prints the report, and on standard error what could not be measured.
    /// `settings` are the benchmark's own.
    pub fn measure<S: Into<Option<Sample>>>(
        &self,
        bench: &str,
        targets: &[Target],
        works: Vec<Work>,
        settings: Value,
        round: impl FnMut(usize, &Target, Say<'_>) -> Result<Vec<S>>,
    ) -> Result<ExitCode> {
        let rounds = self.rounds.unwrap_or(self.pick(3, 5));
        let outcomes = interleave(rounds as usize, targets, works.len(), round)?;
        let mut all = json!({"rounds": rounds, "quick": self.quick});
        if let (Value::Object(all), Value::Object(own)) = (&mut all, settings) {
            all.extend(own);
        }
        let report = Report::new(bench, all, targets, works, &outcomes);
        let text = match self.json {
            true => report.json(),
            false => report.table(),
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
