//! `uvfs bench uncached`: what happens once page caches are full, cached and uncached.

pub mod job;

use std::fs::File;
use std::process::ExitCode;

use indicatif::ProgressBar;
use serde_json::json;
use uvfs_cli::{Context, Result};

use super::common::Common;
use super::measure::Measured;
use super::report::{JSON_HELP, Report, Unit, WorkInfo};
use super::runner::{Sample, interleave};
use super::server::{Kind, Target};
use super::sides::{self, Side, Sides};
use super::workspace::Workspace;
use super::{client, interrupt};
use job::{CALL, UncachedAccess, UncachedJob, has_dontcache};

const EXAMPLES: &str = "\
Examples:
  uvfs bench uncached --quick
  uvfs bench uncached --seconds 20 --dir /var/tmp --json > result.json
  uvfs bench uncached --dir /var/tmp --mib 32768 --sides native,mount

32 threads go each through a file of its own from start to end, again and again, in calls of 64 KiB.
  native           the source directory itself
  mount            `uvfs mount`, with its default options
  mount-dev        the same over /dev/fuse
  client           uvfs-client with its store in the same process, and a cache for a quarter of
                   the files
  ...-uncached     the same with RWF_DONTCACHE (native, where the source's file system has it),
                   with -o uncached (mounts), with DONTCACHE (client)
Each second is shown by itself, and all but the first together as `full`. The client's CPU time is
that of the threads, with uvfs-client that of the whole path through uvfs. As the server's stands what
the rest of the machine took meanwhile: the server, the kernel's own threads that write back, reclaim
and run the device, and whatever else runs; of that, kswapd's own. What is held is the most that the
client's cache, or the kernel's of the mount, held; `host MiB` is by how much the host's page cache of
the files has grown (a tmpfs is all page cache). For a host's page cache that is full, have more files
(--mib) than memory, or run it in a memory control group.

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.
";

/// How many files there are.
const FILES: u64 = 32;

/// The measurements and their options.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n", JSON_HELP].concat())]
pub struct Args {
    /// How many seconds each target is measured for [default: 6, with --quick 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=600))]
    seconds: Option<u32>,
    /// The size of all files together in MiB [default: 1024, with --quick 256]
    #[arg(long, value_parser = clap::value_parser!(u64).range(32..=1 << 20))]
    mib: Option<u64>,
    #[command(flatten)]
    sides: Sides,
    #[command(flatten)]
    common: Common,
}

/// The end of an uncached target's name.
const UNCACHED: &str = "-uncached";

/// Each side, and then each again, uncached.
fn targets(sides: &Sides, native_too: bool) -> Result<Vec<Target>> {
    let cached = [sides::client("client", false, true)];
    let mut targets = sides.targets(&Side::CALLS, &[], &cached)?;
    let uncached = [sides::client("client", false, false)];
    for mut target in sides.targets(&Side::CALLS, &["-o", "uncached"], &uncached)? {
        let comes = match target.kind {
            Kind::Native => native_too,
            Kind::Peer { .. } => false,
            _ => true,
        };
        if comes {
            target.name += UNCACHED;
            targets.push(target);
        }
    }
    Ok(targets)
}

/// The benchmark while it runs.
struct UncachedBench<'w> {
    workspace: &'w Workspace,
    files: Vec<String>,
    /// Of a file.
    bytes: u64,
    seconds: usize,
}

impl UncachedBench<'_> {
    fn round(&self, target: &Target, progress: &ProgressBar) -> Result<Vec<Sample>> {
        let running = target.start(self.workspace)?;
        let dontcache = target.name.ends_with(UNCACHED);
        let mut samples = Vec::new();
        for write in [true, false] {
            interrupt::check()?;
            progress.set_message(format!("{} {}", target.name, verb(write)));
            let way = match target.kind {
                Kind::Client { .. } => UncachedAccess::Client {
                    memory: (FILES * self.bytes / 4) as usize,
                    dontcache,
                },
                _ => UncachedAccess::Host {
                    dir: running.path().into(),
                    dontcache: dontcache && target.kind == Kind::Native,
                },
            };
            let job = client::Job::Uncached(UncachedJob {
                way,
                write,
                source: self.workspace.source(),
                files: self.files.clone(),
                bytes: self.bytes,
                seconds: self.seconds,
            });
            let measured: Result<Vec<(Measured, f64)>> = job.run(running.process());
            let measured = measured.map_err(|e| running.blame(e))?;
            samples.extend(measured.into_iter().map(|(client, others)| Sample {
                client,
                server_cpu_seconds: Some(others),
            }));
        }
        Ok(samples)
    }
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let common = &args.common;
    let seconds = args.seconds.unwrap_or(common.pick(3, 6)) as usize;
    let bytes = args.mib.unwrap_or(common.pick(256, 1024)) << 20;
    let bytes = bytes / FILES / CALL as u64 * CALL as u64;
    let files: Vec<String> = (0..FILES).map(|number| format!("data-{number}")).collect();
    let workspace = common.workspace(2 * FILES * bytes)?;
    for name in &files {
        workspace.fill(name, bytes)?;
    }
    let probe = workspace.source().join(&files[0]);
    let probe = File::open(&probe).context(|| probe.display().to_string())?;
    let native_too = has_dontcache(&probe);
    if !native_too {
        uvfs_cli::warn("native-uncached: left out: this file system has no RWF_DONTCACHE");
    }
    let targets = targets(&args.sides, native_too)?;
    let bench = UncachedBench {
        workspace: &workspace,
        files,
        bytes,
        seconds,
    };
    let outcomes = interleave(
        common.rounds(),
        &targets,
        2 * (seconds + 1),
        |_, target, progress| bench.round(target, progress),
    )?;
    drop(workspace);
    let settings = common.settings(json!({
        "seconds": seconds,
        "files": FILES,
        "bytes": bytes,
        "call": CALL,
    }));
    let works = [true, false].into_iter().flat_map(|write| {
        let verb = verb(write);
        let second = move |n| WorkInfo {
            name: format!("{verb}-second-{n}"),
            title: format!("{FILES} streams of 64 KiB {verb}s, second {n}"),
            unit: Unit::MiB,
        };
        (1..=seconds).map(second).chain([WorkInfo {
            name: format!("{verb}-full"),
            title: format!("{FILES} streams of 64 KiB {verb}s, all but the first second"),
            unit: Unit::MiB,
        }])
    });
    let report = Report::new("uncached", settings, targets, works.collect(), &outcomes);
    common.finish(&report)
}

fn verb(write: bool) -> &'static str {
    if write { "write" } else { "read" }
}
