//! `uvfs-bench`, as which `uvfs bench` goes on: measures file systems side by side, in one interleaved run.
//!
//! The benchmarks share:
//! - [`workspace`]: a private directory with the source, the mount point and the servers' log;
//! - [`server`]: a file server as a child process, from its start until it is unmounted;
//! - [`store`]: a store that is slow, or keeps nothing, to put below the servers;
//! - [`proxy`]: what makes requests to an object store slow;
//! - [`client`]: the using side, in a process of its own, so that it is scheduled like any program;
//! - [`common`]: options that all of them have, and how they end;
//! - [`runner`]: rounds over all targets in turn, progress, and what happens when one fails;
//! - [`stats`] and [`report`]: medians and spread, the table and the JSON, which [`page`], the HTML page of all,
//!   and [`compare`] read again.

mod aio;
mod all;
mod check;
mod child;
mod client;
mod common;
mod compare;
mod direct;
mod files;
mod interrupt;
mod load;
mod measure;
mod page;
mod programs;
mod proxy;
mod remote;
mod report;
mod runner;
mod server;
mod sides;
mod stats;
mod store;
mod uncached;
mod wakeup;
mod workspace;
mod writeback;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use uvfs_cli::{Result, answer, end, json_errors, log, man};

const EXAMPLES: &str = "\
Examples:
  uvfs bench all --quick --report report.html
  uvfs bench compare before.json after.json
  uvfs bench wakeup --quick
  uvfs bench check disk.img
  uvfs bench writeback --quick
  uvfs bench uncached --dir /var/tmp
  uvfs bench direct --quick
  uvfs bench programs --quick
  uvfs bench load --quick
  uvfs bench remote --help
  uvfs bench wakeup --help";

/// Measure file systems side by side.
#[derive(Parser)]
#[command(name = "uvfs-bench", bin_name = "uvfs bench", version, after_help = EXAMPLES)]
#[command(propagate_version = true, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(clap::Subcommand)]
enum Bench {
    /// All of them one after another, and their tables and plots as one HTML page.
    All(all::Args),
    /// Two runs: what became faster or slower by more than chance.
    Compare(compare::Args),
    /// The HTML page of a run that is there as JSON.
    Report(all::PageArgs),
    /// Small requests and streams: native, uvfs by transport and wait policy, other servers.
    Wakeup(wakeup::Args),
    /// Checking an XFS image: uvfs by engine and prefetch strategy, xfs_repair.
    Check(check::Args),
    /// Buffered writes past the dirty limit, and to a server that discards them.
    Writeback(writeback::Args),
    /// Streams that do not fit into memory, through caches and around them.
    Uncached(uncached::Args),
    /// Direct calls of 2 MiB, and many at a time, over a store that takes its time.
    Direct(direct::Args),
    /// Real programs on a source tree: native, mounted, under `uvfs run`, other servers.
    Programs(programs::Args),
    /// Many processes at a time, beside busy neighbours: rate and latency, on the same sides.
    Load(load::Args),
    /// An object store: listing, small files, streams and random reads, cold and cached; other servers.
    Remote(remote::Args),
    /// Runs one job of a benchmark and prints what it measured.
    #[command(hide = true)]
    Client(client::Args),
    /// Writes the manual pages into a directory.
    #[command(hide = true)]
    Man { dir: PathBuf },
}

/// Runs the benchmark that was asked for.
fn run(argv: Vec<OsString>) -> Result<ExitCode> {
    json_errors(argv.iter().any(|word| word == "--json"));
    log::init();
    let cli = match Cli::try_parse_from(&argv) {
        Ok(cli) => cli,
        Err(error) => return answer(error, Cli::command(), argv),
    };
    match cli.bench {
        Bench::All(args) => all::run(args),
        Bench::Compare(args) => compare::run(args),
        Bench::Report(args) => all::run_page(args),
        Bench::Wakeup(args) => wakeup::run(args),
        Bench::Check(args) => check::run(args),
        Bench::Writeback(args) => writeback::run(args),
        Bench::Uncached(args) => uncached::run(args),
        Bench::Direct(args) => direct::run(args),
        Bench::Programs(args) => programs::bench(args),
        Bench::Load(args) => load::run(args),
        Bench::Remote(args) => remote::run(args),
        Bench::Client(args) => client::run(args),
        Bench::Man { dir } => {
            let mut command = Cli::command();
            command.build();
            man::write_pages(command, &dir)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn main() -> ExitCode {
    end(run(std::env::args_os().collect()))
}
