//! `uvfs bench direct`: a large direct call over a store that takes small pieces and its time.

pub mod job;

use std::process::ExitCode;

use serde_json::json;

use super::client;
use super::common::Common;
use super::interrupt;
use super::report::{JSON_HELP, Report, Unit, Work};
use super::runner::{Sample, interleave};
use super::server::{Kind, Target};
use super::workspace::Workspace;
use crate::error::Result;
use job::{CALL, Job, PIECE, Way};

const EXAMPLES: &str = "\
Examples:
  uvfs bench direct --quick
  uvfs bench direct --latency-us 0,100,1000,5000 --json > result.json

Calls of 2 MiB, through uvfs-client and past its cache, over a store in the same process that
takes 128 KiB at once and that much longer for each piece. one-at-a-time waits for each piece
before it sends the next; all-at-once sends all of them and waits once.

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.
";

/// The file that is read and written.
const DATA: &str = "data";

/// What it measures and how.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n", JSON_HELP].concat())]
pub struct Args {
    /// Microseconds that the store takes longer for each piece
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0,100,1000",
        value_parser = clap::value_parser!(u64).range(0..=1_000_000),
        value_name = "LIST"
    )]
    latency_us: Vec<u64>,
    #[command(flatten)]
    common: Common,
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let common = &args.common;
    let seconds = common.pick(0.15, 0.5);
    let bytes = common.pick(16, 64) * CALL as u64;
    let works: Vec<(bool, u64)> = [false, true]
        .into_iter()
        .flat_map(|write| args.latency_us.iter().map(move |&us| (write, us)))
        .collect();
    let targets: Vec<Target> = Way::ALL
        .iter()
        .map(|&(way, name)| Target {
            name: name.into(),
            kind: Kind::Client {
                served: false,
                base: way == Way::OneAtATime,
            },
        })
        .collect();
    interrupt::install()?;
    let workspace = Workspace::new(common.dir.as_deref(), 2 * bytes)?;
    workspace.fill(DATA, bytes)?;
    let one = |target: &Target, write, latency_us| -> Result<Sample> {
        let way = Way::ALL.iter().find(|way| way.1 == target.name);
        let job = client::Job::Direct(Job {
            way: way.expect("each target is a way").0,
            write,
            store: workspace.source(),
            file: DATA.into(),
            bytes,
            latency_us,
            seconds,
        });
        interrupt::check()?;
        Ok(Sample {
            client: job.run(None)?,
            server_cpu_seconds: None,
        })
    };
    let outcomes = interleave(
        common.rounds(),
        &targets,
        works.len(),
        |_, target, _progress| works.iter().map(|&(w, us)| one(target, w, us)).collect(),
    )?;
    let settings = json!({
        "rounds": common.rounds(),
        "pinned": false,
        "quick": common.quick,
        "seconds": seconds,
        "bytes": bytes,
        "call": CALL,
        "piece": PIECE,
    });
    let works = works.iter().map(|&(write, us)| {
        let what = if write { "write" } else { "read" };
        Work {
            name: format!("{what}-{us}us"),
            title: format!("2 MiB direct {what}s, {us} µs more for each 128 KiB"),
            unit: Unit::MiB,
        }
    });
    let report = Report::new("direct", settings, targets, works.collect(), &outcomes);
    common.finish(&report)
}
