//! `uvfs bench uncached`: streams that do not fit into memory, through caches and around them.

mod group;
pub mod job;

use std::fs::File;
use std::process::ExitCode;

use rustix::fs::Advice;
use serde_json::json;
use uvfs_cli::{Context, Result};

use super::common::Common;
use super::report::{JSON_HELP, Unit, Work};
use super::runner::{Say, measure};
use super::server::{Kind, Target};
use super::sides::{self, Side, Sides};
use super::workspace::Workspace;
use super::{client, interrupt};
use group::Group;
use job::StreamsJob;

const EXAMPLES: &str = "\
Examples:
  uvfs bench uncached --dir /var/tmp
  uvfs bench uncached --dir /var/tmp --quick --sides native,client --json > result.json

32 streams, each through a file of its own, 64 KiB at a time: first writes with an fsync at the end, then
reads. The benchmark and the servers are in a control group that has memory for a quarter of the files.
  native       the host's files
  mount        a kernel mount of uvfs
  mount-dev    the same over /dev/fuse
  client       uvfs-client with its server in the same process, and a cache of a quarter of that memory
  ...-uncached the same with RWF_DONTCACHE (native), -o uncached (mount), or DONTCACHE (client): pages are
               dropped once they are used

The figure beside the rate is the rate in the slowest second: it falls when the caches are full. --dir has to
be on ext4, XFS or btrfs (Linux 6.14) for native-uncached. Control groups are made by root.

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.
";

/// The end of an uncached target's name.
const UNCACHED: &str = "-uncached";

/// Files, and streams at a time.
const STREAMS: u64 = 32;
/// Bytes of a call.
const BLOCK: usize = 64 << 10;
/// The files are so many times as large as the memory that there is.
const TIMES: u64 = 4;

/// The measurements and their options.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n", JSON_HELP].concat())]
pub struct Args {
    #[command(flatten)]
    sides: Sides,
    #[command(flatten)]
    common: Common,
}

/// The targets, each also uncached.
fn targets(args: &Args) -> Result<Vec<Target>> {
    let clients = [sides::client("client", false, false)];
    let mut both = Vec::new();
    for cached in args.sides.targets(&Side::CALLS, &[], &clients)? {
        let mut uncached = cached.clone();
        uncached.name += UNCACHED;
        let has_both = match &mut uncached.kind {
            Kind::Uvfs { options } => {
                options.extend(["-o".into(), "uncached".into()]);
                true
            }
            Kind::Native | Kind::Client { .. } => true,
            Kind::Run | Kind::Peer { .. } => false,
        };
        both.push(cached);
        both.extend(Some(uncached).filter(|_| has_both));
    }
    Ok(both)
}

fn files() -> impl Iterator<Item = String> {
    (0..STREAMS).map(|n| format!("stream-{n}"))
}

/// Writes the files back, and lets the kernel forget their pages.
fn forget(workspace: &Workspace) -> Result<()> {
    for name in files() {
        let path = workspace.source().join(name);
        let what = || path.display().to_string();
        let file = File::open(&path).context(what)?;
        file.sync_all().context(what)?;
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).context(what)?;
    }
    Ok(())
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let common = &args.common;
    let memory: u64 = common.pick(128 << 20, 512 << 20);
    let bytes = TIMES * memory / STREAMS;
    let targets = targets(&args)?;
    let workspace = common.workspace(STREAMS * bytes)?;
    let _group = Group::enter(memory)?;
    let does = |verb: &str| format!("{STREAMS} {verb}, {BLOCK} bytes at a time");
    let works = vec![
        Work::new(
            "write",
            does("writers") + ", with an fsync at the end",
            Unit::MiB,
        ),
        Work::new("read", does("readers"), Unit::MiB),
    ];
    let settings = json!({"bytes": bytes, "streams": STREAMS, "memory": memory});
    let round = |_, target: &Target, say: Say<'_>| {
        files().try_for_each(|file| workspace.clear(&file))?;
        let mut samples = Vec::new();
        for reads in [false, true] {
            interrupt::check()?;
            say(if reads { "read" } else { "write" });
            // A new mount has nothing in the kernel's cache.
            let running = target.start(&workspace)?;
            let job = client::Job::Streams(StreamsJob {
                by_client: matches!(target.kind, Kind::Client { .. }),
                path: running.path().into(),
                files: files().collect(),
                reads,
                uncached: target.name.ends_with(UNCACHED)
                    && !matches!(target.kind, Kind::Uvfs { .. }),
                block: BLOCK,
                bytes,
                memory: memory as usize / 4,
            });
            samples.push(measure(&running, &job).map_err(|e| running.blame(e))?);
            drop(running);
            forget(&workspace)?;
        }
        Ok(samples)
    };
    common.measure("uncached", &targets, works, settings, round)
}
