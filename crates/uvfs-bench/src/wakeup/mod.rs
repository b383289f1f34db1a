//! `uvfs bench wakeup`: what going to a file server and back costs.

pub mod job;

use std::process::ExitCode;

use indicatif::ProgressBar;
use serde_json::json;
use uvfs_cli::Result;

use super::client::Job;
use super::common::Common;
use super::report::{JSON_HELP, Report, Unit};
use super::runner::{Sample, interleave, measure};
use super::server::{Kind, Running, Target};
use super::sides::Peers;
use super::workspace::Workspace;
use super::{interrupt, report};
use job::{WakeupJob, WakeupWork};

const EXAMPLES: &str = "\
Examples:
  uvfs bench wakeup --quick
  uvfs bench wakeup --transport uring --wait adaptive,sleep --work read-1,read-16
  uvfs bench wakeup --peer \\
    hp='passthrough_hp --foreground --nopassthrough {source} {mountpoint}' --json > result.json

Each round starts every target once, begins with another one each time, and gives each work a
client process of its own. CPU time is given for the client's and the server's process
separately (without the server's children), in microseconds for an operation or a MiB. Small
files have 4 KiB, and each of them is seen by the mount for the first time; a round uses at most
four times --files of them, which matters for a server that keeps a descriptor for each.

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.
";

/// The file that is read directly and in sequence.
const DATA: &str = "data";

/// The file that is written in sequence.
const OUT: &str = "out";

/// The directory of the small files of the present work.
const SMALL: &str = "small";

/// The measurements and their options.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n", JSON_HELP].concat())]
pub struct Args {
    /// Transports of uvfs to measure
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "dev,uring",
        value_name = "LIST"
    )]
    transport: Vec<Transport>,
    /// Wait policies of uvfs to measure with each transport
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "adaptive,spin,sleep",
        value_name = "LIST"
    )]
    wait: Vec<Wait>,
    /// Measure only native and the peers
    #[arg(long, conflicts_with_all = ["transport", "wait"])]
    no_uvfs: bool,
    #[command(flatten)]
    peers: Peers,
    /// Works that the client does
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "read-1,read-16,create,stat,read,unlink,seqread,seqwrite",
        value_name = "LIST"
    )]
    work: Vec<WakeupWork>,
    /// How many small files a work uses [default: 3000, with --quick 1000]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    files: Option<u32>,
    /// Keep the client on one CPU
    #[arg(long)]
    pin: bool,
    /// Leave it to the scheduler where the client runs (the default)
    #[arg(long, conflicts_with = "pin")]
    unpinned: bool,
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Transport {
    Dev,
    Uring,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Wait {
    Adaptive,
    Spin,
    Sleep,
}

/// The name of a value on the command line.
fn name(value: impl clap::ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |v| v.get_name().to_string())
}

/// How long and how much.
struct Plan {
    works: Vec<WakeupWork>,
    seconds: f64,
    files: u64,
    bytes: u64,
    cpu: Option<usize>,
}

impl Plan {
    fn new(args: &Args) -> Self {
        let common = &args.common;
        Self {
            works: WakeupWork::ALL
                .into_iter()
                .filter(|work| args.work.contains(work))
                .collect(),
            seconds: common.pick(0.15, 0.5),
            files: args.files.unwrap_or(common.pick(1000, 3000)).into(),
            bytes: common.pick(64 << 20, 256 << 20),
            cpu: args.pin.then(first_cpu).flatten(),
        }
    }

    /// Measures every work on one target.
    fn round(
        &self,
        workspace: &Workspace,
        round: usize,
        target: &Target,
        progress: &ProgressBar,
    ) -> Result<Vec<Sample>> {
        let running = target.start(workspace)?;
        let mut samples = Vec::new();
        for &work in &self.works {
            interrupt::check()?;
            progress.set_message(format!("{} {}", target.name, work.name()));
            let sample = self.one(workspace, round, &running, work);
            samples.push(sample.map_err(|e| running.blame(e))?);
        }
        Ok(samples)
    }

    /// Measures one work. Its files are prepared, and cleared away, behind the server's back.
    fn one(
        &self,
        workspace: &Workspace,
        round: usize,
        running: &Running<'_>,
        work: WakeupWork,
    ) -> Result<Sample> {
        // A new name each time: the mount must not know it yet.
        let small = format!("{SMALL}-{}-{round}", work.name());
        let used = match work {
            WakeupWork::Read1 | WakeupWork::Read16 | WakeupWork::Seqread => DATA,
            WakeupWork::Seqwrite => OUT,
            WakeupWork::Create => {
                workspace.populate(&small, 0)?;
                &small
            }
            WakeupWork::Stat | WakeupWork::Read | WakeupWork::Unlink => {
                workspace.populate(&small, self.files)?;
                &small
            }
        };
        let job = Job::Wakeup(WakeupJob {
            work,
            path: running.path().join(used),
            seconds: self.seconds,
            files: self.files,
            bytes: self.bytes,
            cpu: self.cpu,
            seed: round as u64,
        });
        let sample = measure(running, &job);
        if used != DATA {
            workspace.clear(used)?;
        }
        sample
    }
}

/// The first CPU that this process may run on.
fn first_cpu() -> Option<usize> {
    let set = rustix::thread::sched_getaffinity(None).ok()?;
    (0..rustix::thread::CpuSet::MAX_CPU).find(|&cpu| set.is_set(cpu))
}

/// Native, uvfs in each way that was asked for, and the peers.
fn targets(args: &Args) -> Result<Vec<Target>> {
    let mut targets = vec![Target::native()];
    if !args.no_uvfs {
        for &transport in &args.transport {
            for &wait in &args.wait {
                let (transport, wait) = (name(transport), name(wait));
                targets.push(Target {
                    name: format!("{transport}-{wait}"),
                    kind: Kind::Uvfs {
                        // The direct reads are to go to the server.
                        options: [
                            "--transport",
                            &transport,
                            "--wait",
                            &wait,
                            "-o",
                            "nopassthrough",
                        ]
                        .map(String::from)
                        .into(),
                    },
                });
            }
        }
    }
    args.peers.add_to(&mut targets)?;
    Ok(targets)
}

/// A work as the report shows it.
fn describe(work: WakeupWork) -> report::WorkInfo {
    let unit = match work {
        WakeupWork::Seqread | WakeupWork::Seqwrite => Unit::MiB,
        _ => Unit::Op,
    };
    let help = clap::ValueEnum::to_possible_value(&work)
        .and_then(|v| v.get_help().map(|help| help.to_string()));
    report::WorkInfo {
        name: work.name().into(),
        title: help.unwrap_or_default(),
        unit,
    }
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let targets = targets(&args)?;
    let plan = Plan::new(&args);
    // The source, what is written to it, and the page cache of the mount over both.
    let workspace = args.common.workspace(4 * plan.bytes)?;
    workspace.fill(DATA, plan.bytes)?;
    let outcomes = interleave(
        args.common.rounds(),
        &targets,
        plan.works.len(),
        |round, target, progress| plan.round(&workspace, round, target, progress),
    )?;
    drop(workspace);
    let settings = args.common.settings(json!({
        "pinned": plan.cpu.is_some(),
        "seconds": plan.seconds,
        "files": plan.files,
        "bytes": plan.bytes,
    }));
    let works = plan.works.iter().copied().map(describe).collect();
    let report = Report::new("wakeup", settings, targets, works, &outcomes);
    args.common.finish(&report)
}
