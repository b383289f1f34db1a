//! `uvfs bench direct`: direct calls over a store that takes small pieces and its time.

pub mod job;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;

use serde_json::json;
use uvfs_cli::{Context, Result};

use super::common::Common;
use super::report::{JSON_HELP, Unit, Work};
use super::runner::{Sample, Say, measure};
use super::server::{Kind, Target, start_store};
use super::sides::{self, Side, Sides, Stored};
use super::workspace::Workspace;
use super::{client, interrupt, store};
use job::{CALL, Calls, DirectAccess, DirectJob, PIECE};

const EXAMPLES: &str = "\
Examples:
  uvfs bench direct --quick
  uvfs bench direct --latency-us 0,100,1000,5000 --json > result.json
  uvfs bench direct --source 's3://bucket?endpoint=http://127.0.0.1:9000' --objects /srv/store/bucket --dir /var/tmp
  uvfs bench direct --sides native,mount,mount-dev \\
    --peer hp='passthrough_hp --foreground {source} {mountpoint}'

Reads and writes past the page cache of a file that is there: calls of 2 MiB, each waited for, as dd
makes them; and calls of 128 KiB, 16 at a time, as programs make them with libaio. Below is a store that takes 128 KiB at once and that much longer for each piece. Without latency it is the
source directory, with it a FUSE file system of this benchmark's own, over the same file.
  native                the host's file, on the store itself
  mount                 `uvfs mount` over the store, with its default options
  mount-dev             the same over /dev/fuse
  client                uvfs-client over a store in the same process
  client-one-at-a-time  the same, but each piece is waited for before the next is sent; it is only
                        here, to show what that costs

With --source the mount is read-only: writes are left out, and so is the side client.

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.
";

/// The file that is read and written, in the source and below the store.
const DATA: &str = "data";

/// The measurements and their options.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n", JSON_HELP].concat())]
pub struct Args {
    /// Microseconds that the store takes longer for each piece
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0,100,1000",
        value_parser = clap::value_parser!(u64).range(0..=1_000_000),
        value_name = "LIST",
        conflicts_with = "source"
    )]
    latency_us: Vec<u64>,
    #[command(flatten)]
    stored: Stored,
    #[command(flatten)]
    sides: Sides,
    #[command(flatten)]
    common: Common,
}

/// One work on one store.
#[derive(Clone, Copy)]
struct DirectPoint {
    latency_us: u64,
    write: bool,
    calls: Calls,
}

impl DirectPoint {
    /// The works, by whether they write.
    const WORKS: [(bool, Calls); 4] = [
        (false, Calls::One),
        (false, Calls::Many),
        (true, Calls::One),
        (true, Calls::Many),
    ];

    fn describe(&self) -> Work {
        let verb = if self.write { "write" } else { "read" };
        let (how, calls) = match self.calls {
            Calls::Many => ("many", "128 KiB, 16 at a time"),
            Calls::One => ("one", "2 MiB, one at a time"),
        };
        let us = self.latency_us;
        Work::new(
            format!("{verb}-{how}-{us}us"),
            format!("direct {verb}s of {calls}, {us} µs more for each 128 KiB"),
            Unit::MiB,
        )
    }
}

/// The benchmark while it runs.
struct DirectBench<'w> {
    workspace: &'w Workspace,
    /// Points of one store follow one another.
    points: Vec<DirectPoint>,
    bytes: u64,
    seconds: f64,
}

impl DirectBench<'_> {
    /// Measures every point on one side.
    fn round(&self, target: &Target, say: Say<'_>) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for points in self.points.chunk_by(|a, b| a.latency_us == b.latency_us) {
            samples.extend(self.over_store(target, points, say)?);
        }
        Ok(samples)
    }

    /// Measures all points of one latency.
    fn over_store(
        &self,
        target: &Target,
        points: &[DirectPoint],
        say: Say<'_>,
    ) -> Result<Vec<Sample>> {
        let (workspace, latency_us) = (self.workspace, points[0].latency_us);
        let client = matches!(target.kind, Kind::Client { .. });
        // Dropped after the server over it.
        let slow = match client || latency_us == 0 {
            true => None,
            false => Some(start_store(
                workspace,
                store::StoreJob {
                    mountpoint: workspace.store(),
                    data: Some(workspace.source().join(DATA)),
                    bytes: self.bytes,
                    piece: PIECE as u32,
                    latency_us,
                    dev: false,
                },
            )?),
        };
        let (running, name) = match slow {
            Some(_) => (target.start_over(workspace, workspace.store())?, "0"),
            None => (target.start(workspace)?, DATA),
        };
        let way = match client {
            true => DirectAccess::Client {
                data: workspace.source().join(DATA),
                latency_us,
                one_at_a_time: target.is_base(),
            },
            false => DirectAccess::Host {
                path: running.path().join(name),
            },
        };
        let one = |point: &DirectPoint| -> Result<Sample> {
            interrupt::check()?;
            let name = point.describe().name;
            say(&name);
            let job = client::Job::Direct(DirectJob {
                way: way.clone(),
                write: point.write,
                calls: point.calls,
                bytes: self.bytes,
                seconds: self.seconds,
            });
            let sample = measure(&running, &job).map_err(|e| running.blame(e))?;
            if point.write {
                self.check().context(|| format!("after {name}"))?;
            }
            Ok(sample)
        };
        points.iter().map(one).collect()
    }

    /// Looks, behind the server's back, at what a work left.
    fn check(&self) -> Result<()> {
        let path = self.workspace.source().join(DATA);
        let what = || path.display().to_string();
        let file = File::open(&path).context(what)?;
        let mut buffer = vec![0; CALL];
        for at in (0..self.bytes).step_by(CALL) {
            file.read_exact_at(&mut buffer, at).context(what)?;
            job::check(&buffer, at).context(what)?;
        }
        Ok(())
    }
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let common = &args.common;
    let seconds = common.pick(0.1, 0.3);
    let bytes = common.pick(16, 64) * CALL as u64;
    let clients = [
        sides::client("client", false, false),
        sides::client("client-one-at-a-time", false, true),
    ];
    let stored = &args.stored;
    let clients = match stored.is_some() {
        true => &[][..],
        false => &clients,
    };
    let targets = stored.targets(&args.sides, &Side::CALLS, &[], clients)?;
    let latencies = match stored.is_some() {
        true => &[0][..],
        false => &args.latency_us,
    };
    let mut points = Vec::new();
    for &latency_us in latencies {
        points.extend(DirectPoint::WORKS.map(|(write, calls)| DirectPoint {
            latency_us,
            write,
            calls,
        }));
    }
    let points = stored.works(points, |point| point.write.then(|| point.describe().name))?;
    let workspace = stored.put_below(args.common.workspace(2 * bytes)?)?;
    workspace.fill(DATA, bytes)?;
    let works = points.iter().map(DirectPoint::describe).collect();
    let bench = DirectBench {
        workspace: &workspace,
        points,
        bytes,
        seconds,
    };
    let settings = json!({"seconds": seconds, "bytes": bytes, "call": CALL, "piece": PIECE});
    let round = |_, target: &Target, say: Say<'_>| bench.round(target, say);
    common.measure("direct", &targets, works, settings, round)
}
