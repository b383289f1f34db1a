//! `uvfs bench uncached`: what happens once the page cache is full, cached and with DONTCACHE.

pub mod job;

use std::process::ExitCode;

use serde_json::json;

use super::common::Common;
use super::report::{JSON_HELP, Report, Unit, Work};
use super::runner::{Sample, interleave};
use super::server::{Kind, Target};
use super::workspace::Workspace;
use super::{client, interrupt};
use crate::error::Result;
use job::Job;

const EXAMPLES: &str = "\
Examples:
  uvfs bench uncached --quick
  uvfs bench uncached --seconds 20 --dir /var/tmp --json > result.json

One program goes through a file from start to end, again and again, in calls of 1 MiB through
uvfs-client with its store in the same process. The cache has room for a quarter of the file.
Each second is shown by itself, and all but the first together as `full`: by then the cache is
full. The client's CPU time is that of the whole path through uvfs, writeback and reclaim included,
and as the server's stands what the rest of the machine took meanwhile: the kernel's own threads
that write back, reclaim and run the device, and whatever else runs. Where the host's page cache is
to be full as well, run it in a memory control group smaller than the file, on a file system that
has RWF_DONTCACHE. What is held is the most that the cache held, and `host MiB` by how much the host's page cache has grown
(where the host has RWF_DONTCACHE, an uncached run leaves it alone; a tmpfs is all page cache).

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.
";

/// The file that is read and written.
const DATA: &str = "data";

/// The targets; the first is what the other is compared with.
const NAMES: [&str; 2] = ["cached", "uncached"];

/// What it measures and how.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n", JSON_HELP].concat())]
pub struct Args {
    /// How many seconds each target is measured for [default: 6, with --quick 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=600))]
    seconds: Option<u32>,
    #[command(flatten)]
    common: Common,
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let common = &args.common;
    let seconds = args.seconds.unwrap_or(common.pick(3, 6)) as usize;
    let bytes: u64 = common.pick(256 << 20, 1 << 30);
    let memory = bytes as usize / 4;
    let targets = NAMES.map(|name| Target {
        name: name.into(),
        kind: Kind::Client {
            served: false,
            base: name == NAMES[0],
        },
    });
    interrupt::install()?;
    let workspace = Workspace::new(common.dir.as_deref(), bytes)?;
    workspace.fill(DATA, bytes)?;
    let outcomes = interleave(
        common.rounds(),
        &targets,
        2 * (seconds + 1),
        |_, target, progress| {
            let mut samples = Vec::new();
            for write in [true, false] {
                interrupt::check()?;
                progress.set_message(format!("{} {}", target.name, verb(write)));
                let job = client::Job::Uncached(Job {
                    uncached: target.name != NAMES[0],
                    write,
                    store: workspace.source(),
                    file: DATA.into(),
                    bytes,
                    memory,
                    seconds,
                });
                let measured: Vec<(client::Measured, f64)> = job.run(None)?;
                samples.extend(measured.into_iter().map(|(client, others)| Sample {
                    client,
                    server_cpu_seconds: Some(others),
                }));
            }
            Ok(samples)
        },
    )?;
    drop(workspace);
    let settings = json!({
        "rounds": common.rounds(),
        "pinned": false,
        "quick": common.quick,
        "seconds": seconds,
        "bytes": bytes,
        "memory": memory,
    });
    let works = [true, false].into_iter().flat_map(|write| {
        let verb = verb(write);
        let second = move |n| Work {
            name: format!("{verb}-second-{n}"),
            title: format!("1 MiB {verb}s, second {n}"),
            unit: Unit::MiB,
        };
        (1..=seconds).map(second).chain([Work {
            name: format!("{verb}-full"),
            title: format!("1 MiB {verb}s, all but the first second"),
            unit: Unit::MiB,
        }])
    });
    let report = Report::new(
        "uncached",
        settings,
        targets.to_vec(),
        works.collect(),
        &outcomes,
    );
    common.finish(&report)
}

fn verb(write: bool) -> &'static str {
    if write { "write" } else { "read" }
}
