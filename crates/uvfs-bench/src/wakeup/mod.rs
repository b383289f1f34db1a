//! `uvfs bench wakeup`: what going to a file server and back costs.

pub mod job;

use std::process::ExitCode;

use clap::ValueEnum;
use serde_json::json;
use uvfs_cli::Result;

use super::client::Job;
use super::common::{Common, words};
use super::interrupt;
use super::report::{JSON_HELP, Unit, Work};
use super::runner::{Sample, Say, measure};
use super::server::{Running, Target};
use super::sides::Peers;
use super::workspace::Workspace;
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
        value_parser = ["dev", "uring"],
        value_name = "LIST"
    )]
    transport: Vec<String>,
    /// Wait policies of uvfs to measure with each transport
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "adaptive,spin,sleep",
        value_parser = ["adaptive", "spin", "sleep"],
        value_name = "LIST"
    )]
    wait: Vec<String>,
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
    #[command(flatten)]
    common: Common,
}

/// How long and how much.
struct Plan {
    works: Vec<WakeupWork>,
    seconds: f64,
    files: u64,
    bytes: u64,
}

impl Plan {
    fn new(args: &Args) -> Self {
        let common = &args.common;
        Self {
            works: WakeupWork::value_variants()
                .iter()
                .filter(|work| args.work.contains(work))
                .copied()
                .collect(),
            seconds: common.pick(0.15, 0.5),
            files: args.files.unwrap_or(common.pick(1000, 3000)).into(),
            bytes: common.pick(64 << 20, 256 << 20),
        }
    }

    /// Measures every work on one target.
    fn round(
        &self,
        workspace: &Workspace,
        round: usize,
        target: &Target,
        say: Say<'_>,
    ) -> Result<Vec<Sample>> {
        let running = target.start(workspace)?;
        let mut samples = Vec::new();
        for &work in &self.works {
            interrupt::check()?;
            let (name, _) = words(&work);
            say(&name);
            let sample = self.one(workspace, round, &running, work, &name);
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
        name: &str,
    ) -> Result<Sample> {
        // A new name each time: the mount must not know it yet.
        let small = format!("{SMALL}-{name}-{round}");
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
            seed: round as u64,
        });
        let sample = measure(running, &job);
        if used != DATA {
            workspace.clear(used)?;
        }
        sample
    }
}

/// Native, uvfs in each way that was asked for, and the peers.
fn targets(args: &Args) -> Result<Vec<Target>> {
    let mut targets = vec![Target::native()];
    for transport in &args.transport {
        for wait in &args.wait {
            // The direct reads are to go to the server.
            let direct = ["-o", "nopassthrough"];
            let options = [&["--transport", transport, "--wait", wait], &direct[..]].concat();
            targets.push(Target::uvfs(format!("{transport}-{wait}"), &options));
        }
    }
    args.peers.add_to(&mut targets)?;
    Ok(targets)
}

/// A work as the report shows it.
fn describe(work: WakeupWork) -> Work {
    let unit = match work {
        WakeupWork::Seqread | WakeupWork::Seqwrite => Unit::MiB,
        _ => Unit::Op,
    };
    let (name, title) = words(&work);
    Work::new(name, title, unit)
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let targets = targets(&args)?;
    let plan = Plan::new(&args);
    // The source, what is written to it, and the page cache of the mount over both.
    let workspace = args.common.workspace(4 * plan.bytes)?;
    workspace.fill(DATA, plan.bytes)?;
    let settings = json!({"seconds": plan.seconds, "files": plan.files, "bytes": plan.bytes});
    let works = plan.works.iter().copied().map(describe).collect();
    let round = |round, target: &Target, say: Say<'_>| plan.round(&workspace, round, target, say);
    args.common
        .measure("wakeup", &targets, works, settings, round)
}
