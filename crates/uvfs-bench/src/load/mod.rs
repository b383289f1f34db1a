//! `uvfs bench load`: many processes at a time, with and without others that keep the CPUs busy.

pub mod job;

use std::fs::{self, File};
use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use serde_json::json;
use uvfs_cli::{Context, Error, Result};

use super::child::{Process, Waited, own_path, wait_any};
use super::client;
use super::common::{Common, words};
use super::interrupt;
use super::measure::Measured;
use super::report::{JSON_HELP, Unit, Work};
use super::runner::{Sample, Say};
use super::server::{Running, Target};
use super::sides::{Side, Sides, Stored};
use super::stats::{Histogram, Latency};
use super::workspace::Workspace;
use job::{LoadJob, LoadWork, Loaded};

const EXAMPLES: &str = "\
Examples:
  uvfs bench load --quick
  uvfs bench load --work stat,open --processes 1,16 --neighbours 0,2 --rounds 3 --json > result.json
  uvfs bench load --sides mount,run --seconds 5 --work direct
  uvfs bench load --source 's3://bucket?endpoint=http://127.0.0.1:9000' --objects /srv/store/bucket --dir /var/tmp
  uvfs bench load --peer hp='passthrough_hp --foreground {source} {mountpoint}'

Each point is one work, done by a number of processes at once beside a number of neighbours:
processes of normal priority that only spin. Shown are the operations of all processes in a second,
and how long one took: the median, and the 99th percentile (within 3%). Each work gets a new mount.
A file that is read has 64 MiB (with --quick 8), a small file 4 KiB, and there are 1,000 of these.
Without --quick, a round of all points takes about a minute and a half for each side. Where a mount
hands direct reads to the host's file (see `uvfs mount --help`, passthrough), they don't reach the
server; on a tmpfs that is the default.

The sides are:
  native     the source directory itself
  mount      `uvfs mount`, with its default options
  mount-dev  the same over /dev/fuse
  run        the same mount, with each process under `uvfs run`

With --source the mount is read-only: what writes is left out.

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.
";

const JSON_NOTE: &str = "
The works are named WORK-PROCESSESp-NEIGHBOURSn. Client CPU time is that of all processes together.";

/// The file for process number 0, and so on.
const DATA: &str = "data";

/// The directory of the small files.
const SMALL: &str = "small";

/// The directory in which process number 0 makes files, and so on.
const OWN: &str = "own";

/// The file beside the source that is locked while processes prepare.
const GATE: &str = "gate";

/// The directory beside the source with a file for each process that is prepared.
const READY: &str = "ready";

/// The number of small files.
const FILES: u64 = 1000;

/// Processes that take this much longer than they should are stuck.
const PATIENCE: Duration = Duration::from_secs(60);

/// The measurements and their options.
#[derive(clap::Args)]
#[command(
    after_help = EXAMPLES,
    after_long_help = [EXAMPLES, "\n", JSON_HELP, JSON_NOTE].concat()
)]
pub struct Args {
    /// The work of each process
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "direct,buffered,create,stat,open",
        value_name = "LIST"
    )]
    work: Vec<LoadWork>,
    /// How many processes do it at a time [default: 1,2,4,8,16, with --quick 1,4]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LIST",
        value_parser = clap::value_parser!(u32).range(1..=256)
    )]
    processes: Option<Vec<u32>>,
    /// How many processes spin meanwhile [default: 0,2]
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0,2",
        hide_default_value = true,
        value_name = "LIST",
        value_parser = clap::value_parser!(u32).range(0..=256)
    )]
    neighbours: Vec<u32>,
    /// How long each point is measured, in seconds [default: 1, with --quick 0.1]
    #[arg(long)]
    seconds: Option<f64>,
    #[command(flatten)]
    stored: Stored,
    #[command(flatten)]
    sides: Sides,
    #[command(flatten)]
    common: Common,
}

/// One work at one load.
#[derive(Clone, Copy)]
struct LoadPoint {
    work: LoadWork,
    processes: u32,
    neighbours: u32,
}

impl LoadPoint {
    /// A point as the report shows it.
    fn describe(&self) -> Work {
        let (name, title) = words(&self.work);
        let (processes, neighbours) = (self.processes, self.neighbours);
        Work::new(
            format!("{name}-{processes}p-{neighbours}n"),
            format!("{title}; processes: {processes}, busy neighbours: {neighbours}"),
            Unit::Op,
        )
    }
}

/// All points, those of a work one after another.
fn points(args: &Args) -> Result<Vec<LoadPoint>> {
    let asked = args.stored.works(args.work.clone(), |work| {
        (*work == LoadWork::Create).then(|| words(work).0)
    })?;
    let processes = args.processes.clone();
    let processes = processes.unwrap_or(args.common.pick(vec![1, 4], vec![1, 2, 4, 8, 16]));
    let mut points = Vec::new();
    for &work in LoadWork::value_variants() {
        for &neighbours in args.neighbours.iter().filter(|_| asked.contains(&work)) {
            points.extend(processes.iter().map(|&processes| LoadPoint {
                work,
                processes,
                neighbours,
            }));
        }
    }
    Ok(points)
}

/// Processes that are ended when this goes.
#[derive(Default)]
struct Group(Vec<Process>);

impl Drop for Group {
    fn drop(&mut self) {
        let mut left: Vec<&mut Process> = self.0.iter_mut().collect();
        left.retain_mut(|process| process.status().is_none());
        for process in &left {
            process.signal(Signal::KILL);
        }
        for process in left {
            // It may hang in the file system until the server is gone.
            process.wait(Duration::from_secs(1));
        }
    }
}

/// The settings that all points share.
struct Load<'w> {
    workspace: &'w Workspace,
    points: Vec<LoadPoint>,
    seconds: f64,
}

impl Load<'_> {
    /// Measures every point on one side.
    fn round(&self, round: usize, target: &Target, say: Say<'_>) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for points in self.points.chunk_by(|a, b| a.work == b.work) {
            let running = target.start(self.workspace)?;
            for point in points {
                interrupt::check()?;
                let name = point.describe().name;
                say(&name);
                let sample = self.one(point, round, &running);
                let sample = sample.map_err(|e| running.blame(e));
                samples.push(sample.context(|| name)?);
            }
        }
        Ok(samples)
    }

    /// Measures one point.
    fn one(&self, point: &LoadPoint, round: usize, running: &Running<'_>) -> Result<Sample> {
        let gate = File::create(self.workspace.beside(GATE)).context(|| "a file".into())?;
        flock(&gate, FlockOperation::LockExclusive).context(|| "locking a file".into())?;
        self.clear_ready()?;
        let mut clients = Group::default();
        for number in 0..point.processes {
            let job = client::Job::Load(self.job(point, round, number, running));
            clients.0.push(job.spawn_by(running.command(own_path()?))?);
        }
        self.wait_ready(&mut clients, running)?;
        let mut neighbours = Group::default();
        for _ in 0..point.neighbours {
            neighbours.0.push(client::Job::Spin.spawn()?);
        }
        let before = running.cpu_seconds()?;
        drop(gate);
        let mut results = Vec::new();
        for process in &mut clients.0 {
            let limit = PATIENCE + Duration::from_secs_f64(2.0 * self.seconds);
            process.finish(running.process(), limit)?;
            results.push(client::finished(process)?);
        }
        Ok(Sample {
            client: together(&results),
            server_cpu_seconds: running.cpu_since(before)?,
        })
    }

    fn job(&self, point: &LoadPoint, round: usize, number: u32, running: &Running<'_>) -> LoadJob {
        let name = match point.work {
            LoadWork::Direct => format!("{DATA}-0"),
            LoadWork::Buffered => format!("{DATA}-{number}"),
            LoadWork::Create => format!("{OWN}-{number}"),
            LoadWork::Stat | LoadWork::Open => SMALL.into(),
        };
        LoadJob {
            work: point.work,
            path: running.path().join(name),
            files: FILES,
            seconds: self.seconds,
            seed: round as u64 * 1000 + u64::from(number),
            ready: self.workspace.beside(READY).join(number.to_string()),
            gate: self.workspace.beside(GATE),
        }
    }

    /// Makes the directory with a file for each process that is prepared, without any.
    fn clear_ready(&self) -> Result<()> {
        let dir = self.workspace.beside(READY);
        let what = || format!("emptying {}", dir.display());
        if dir.exists() {
            fs::remove_dir_all(&dir).context(what)?;
        }
        fs::create_dir(&dir).context(what)
    }

    /// Waits until all processes are prepared.
    fn wait_ready(&self, clients: &mut Group, running: &Running<'_>) -> Result<()> {
        let dir = self.workspace.beside(READY);
        let deadline = Instant::now() + PATIENCE;
        let count = || io::Result::Ok(fs::read_dir(&dir)?.count());
        while count().context(|| format!("{}", dir.display()))? < clients.0.len() {
            let mut processes: Vec<&Process> = clients.0.iter().collect();
            processes.extend(running.process());
            match wait_any(&processes, Duration::from_millis(2)) {
                Waited::TimedOut if Instant::now() < deadline => {}
                Waited::TimedOut => return Err(Error::new("the processes don't get ready")),
                Waited::Interrupted => interrupt::check()?,
                Waited::Ended(index) => {
                    if let Some(client) = clients.0.get_mut(index) {
                        client::finished::<Loaded>(client)?;
                    }
                    return Err(Error::new("the server or a client ended too early"));
                }
            }
        }
        Ok(())
    }
}

/// The figures of all processes together.
fn together(results: &[Loaded]) -> Measured {
    let sum = |value: fn(&Measured) -> f64| results.iter().map(|r| value(&r.measured)).sum::<f64>();
    let mut latency = Histogram::default();
    for result in results {
        latency.merge(&result.latency);
    }
    Measured {
        amount: sum(|m| m.amount),
        // They start and end at the same time, nearly.
        seconds: sum(|m| m.seconds) / results.len() as f64,
        cpu_seconds: sum(|m| m.cpu_seconds),
        latency_us: Latency::of(&latency),
        ..Measured::default()
    }
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let common = &args.common;
    let stored = &args.stored;
    let targets = stored.targets(&args.sides, &Side::PROGRAMS, &[], &[])?;
    let seconds = args.seconds.unwrap_or(common.pick(0.1, 1.0));
    if !(0.01..=3600.0).contains(&seconds) {
        return Err(Error::usage("--seconds: from 0.01 to 3600"));
    }
    let points = points(&args)?;
    let most = points.iter().map(|p| p.processes).max().unwrap_or(0);
    let bytes: u64 = common.pick(8 << 20, 64 << 20);
    // The files, and the page cache of the mount over them.
    let room = 2 * (u64::from(most) * bytes + FILES * 4096);
    let workspace = stored.put_below(args.common.workspace(room)?)?;
    for number in 0..most {
        workspace.fill(&format!("{DATA}-{number}"), bytes)?;
        workspace.populate(&format!("{OWN}-{number}"), 0)?;
    }
    workspace.populate(SMALL, FILES)?;
    let works = points.iter().map(LoadPoint::describe).collect();
    let load = Load {
        workspace: &workspace,
        points,
        seconds,
    };
    let settings = json!({"seconds": seconds, "bytes": bytes, "files": FILES});
    let round = |round, target: &Target, say: Say<'_>| load.round(round, target, say);
    common.measure("load", &targets, works, settings, round)
}
