//! `uvfs bench`: measures file systems side by side, in one interleaved run.

use std::process::ExitCode;

use crate::error::Result;

/// The benchmarks.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(clap::Subcommand)]
enum Bench {}

/// Runs the benchmark that was asked for.
pub fn run(args: Args) -> Result<ExitCode> {
    match args.bench {}
}
