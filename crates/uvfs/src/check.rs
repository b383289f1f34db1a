//! `uvfs check`: is an XFS file system sound?

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::ValueHint;
use serde_json::{Value, json};
use uvfs_buf::Target;
use uvfs_cli::{Context, Error, Progress, Result, size, warn};
use uvfs_io::device::{Device, OpenOptions};
use uvfs_io::engine::EngineKind;
use uvfs_xfs::blocks::with_log;
use uvfs_xfs::check::{
    CheckOptions, CheckOutcome, CheckProgress, DeviceBlocks, Finding, Prefetch, check, least_memory,
};
use uvfs_xfs::image::{open_direct, remote_target};
use uvfs_xfs::{Blocks, CachedBlocks, LogState};

use crate::image::{self, remote};
use crate::{confine, options};

/// Exit status: corruption was found.
const CORRUPT: u8 = 1;
/// Exit status: the check could not run.
const COULD_NOT_RUN: u8 = 2;
/// Exit status: the log is dirty.
const DIRTY: u8 = 3;

const EXAMPLES: &str = "\
Examples:
  uvfs check disk.img
  uvfs check /dev/sdb1 --memory 64M
  uvfs check disk.img --json > findings.json

Nothing is ever written: a dirty log is replayed in memory. Each finding is one line: the structure,
where it is (AG, block in the AG, inode, path), what is wrong, what was expected and found.
What only follows from having seen everything (lost blocks, link counts, owners) is not judged
when a damaged structure could not be followed to its end; a check after the repair does that.

Exit status: 0 sound, 1 damaged, 2 the check could not run (not XFS, unreadable, mounted for
writing, a feature that is not supported), 3 the log is dirty and could not be replayed, or ends
within changes that the kernel finishes when it mounts: the findings may come of that.";

const JSON_HELP: &str = "\
JSON: one object with
  verdict     \"clean\", \"corrupt\" or \"dirty-log\"
  image       the path
  log         \"clean\", \"zeroed\", \"replayed\", \"dirty\", \"external\" or \"unreadable\"
  log_device  what --logdev names, or null
  incomplete  true if what follows from having seen everything was not judged
  count       number of findings
  findings    at most 10,000 of them: what, ag, block, inode, path, problem, expected, found;
              what does not apply is null
  inodes      in use
  allocated_inodes
              with the free ones of their chunks
  blocks, free_blocks
  passes, threads, prefetch, engine, direct, reads, bytes_read, seconds
  peak_memory in bytes, null where /proc is not mounted";

/// Options of the command.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n\n", JSON_HELP].concat())]
pub struct Args {
    /// Image file, block device, or image in an object store (s3://BUCKET/KEY)
    #[arg(value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
    /// How to read: sync, aio or uring [default: uring, or what there is; sync with --buffered]
    #[arg(long, value_name = "ENGINE", value_parser = options::one_of(options::ENGINES, options::engine), hide_possible_values = true)]
    engine: Option<EngineKind>,
    /// The device or image of the log, if that is not in the image
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    logdev: Option<PathBuf>,
    /// Large reads that cover much metadata, exact small ones, or what suits the device
    #[arg(long, value_enum, default_value_t = Strategy::Auto)]
    prefetch: Strategy,
    /// Most memory to use, such as 64M; the image is gone through several times if need be. The
    /// least is 24M and a quarter of a byte for each inode [default: no bound]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// Threads [default: one for each CPU, two with sync and for an image in a store]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Read through the kernel's page cache instead of past it
    #[arg(long)]
    buffered: bool,
    #[command(flatten)]
    store: remote::StoreArgs,
}

/// [`Prefetch`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Strategy {
    /// Few large reads
    Large,
    /// Many small reads
    Exact,
    /// Exact for an image in a store; else the way that suits the device: 32 reads of 4 KiB in flight are timed against
    /// 1 MiB in reads of 256 KiB, and large reads are chosen if a byte costs less than an eighth with them
    Auto,
}

/// An image that is read for a check.
pub(crate) enum Checked {
    Device(Arc<DeviceBlocks>),
    /// In a store, through a cache.
    Remote(Arc<Target>),
}

/// Threads that check an image in a store. It is the requests that are many.
const REMOTE_THREADS: u32 = 2;
/// The cache for each of these threads: more than what it reads ahead, which stays there until it is used.
const REMOTE_CACHE: u64 = 16 << 20;

impl Checked {
    /// Opens an image in a store.
    pub(crate) fn remote(
        uri: &str,
        store: &remote::StoreArgs,
        memory: Option<u64>,
        threads: Option<u32>,
    ) -> Result<Checked> {
        let threads = threads.unwrap_or(REMOTE_THREADS);
        let most = image::MEMORY.max(u64::from(threads) * REMOTE_CACHE);
        // With a bound the check reads less ahead: a quarter of what this leaves.
        let cache = memory.map_or(most, |memory| most.min(memory / 3));
        let engine = remote::open(uri, store).map_err(|e| e.with_code(COULD_NOT_RUN))?;
        let target = remote_target(engine, cache);
        let target = target.context(|| "the cache of metadata".into())?;
        Ok(Checked::Remote(target))
    }

    /// What a bound on memory leaves for a check; what is needed, if that is too little.
    fn bound(&self, memory: Option<u64>) -> std::result::Result<Option<u64>, String> {
        let Some(memory) = memory else {
            return Ok(None);
        };
        let least = least_memory(&*self.blocks());
        let least = least.map_err(|e| self.failure().unwrap_or(e.to_string()))?;
        let (left, needed) = match self {
            Checked::Device(_) => (memory, least),
            Checked::Remote(target) => {
                let cache = target.memory().limit as u64;
                let share = (least / 2).min(image::MEMORY);
                (memory.saturating_sub(cache), least + share)
            }
        };
        if left < least {
            let needed = needed.div_ceil(1 << 20);
            return Err(format!("--memory: at least {needed}M are needed"));
        }
        Ok(Some(left))
    }

    /// How to check it; what is needed, if there is too little memory.
    pub(crate) fn options(
        &self,
        memory: Option<u64>,
        threads: Option<u32>,
        strategy: Strategy,
    ) -> std::result::Result<CheckOptions, String> {
        let remote = matches!(self, Checked::Remote(_));
        let threads = threads.or(remote.then_some(REMOTE_THREADS));
        Ok(CheckOptions {
            threads: threads.map_or(0, |n| n as usize),
            prefetch: match strategy {
                Strategy::Large => Prefetch::Large,
                Strategy::Auto if !remote => Prefetch::Auto,
                // A store answers many requests at a time, and what lies between is not worth its price.
                _ => Prefetch::Exact,
            },
            memory: self.bound(memory)?,
            ..CheckOptions::default()
        })
    }

    pub(crate) fn blocks(&self) -> Arc<dyn Blocks> {
        match self {
            Checked::Device(blocks) => blocks.clone(),
            Checked::Remote(target) => Arc::new(CachedBlocks::remote(target.clone())),
        }
    }

    /// Why it can't be read any more, if so: then the findings are not the image's.
    pub(crate) fn failure(&self) -> Option<String> {
        match self {
            Checked::Device(_) => None,
            Checked::Remote(target) => target.failure(),
        }
    }

    fn engine(&self) -> &'static str {
        match self {
            Checked::Device(blocks) => blocks.engine().name(),
            Checked::Remote(target) => target.engine_name(),
        }
    }

    /// Reads, and bytes read.
    fn stats(&self) -> (u64, u64) {
        match self {
            Checked::Device(blocks) => blocks.stats(),
            Checked::Remote(target) => {
                let stats = target.engine_stats();
                (stats.reads, stats.read_bytes)
            }
        }
    }
}

/// Does some work, and shows how far it is.
pub(crate) fn shown<T>(quiet: bool, work: impl FnOnce(&CheckProgress) -> T) -> T {
    let progress = CheckProgress::default();
    let far = || {
        let (at, total) = progress.get();
        format!("{at}/{total} inodes")
    };
    Progress::new(quiet).during(far, || work(&progress))
}

fn log_name(log: &LogState) -> &'static str {
    match log {
        LogState::Clean => "clean",
        LogState::Zeroed => "zeroed",
        LogState::Replayed { .. } => "replayed",
        LogState::Dirty { .. } => "dirty",
        LogState::External => "external",
        LogState::Unreadable(_) => "unreadable",
    }
}

/// A finding as JSON.
pub(crate) fn finding_json(f: &Finding) -> Value {
    let (text, values) = f.problem.text();
    json_at(f, Some(f.problem.name()), &text, values)
}

/// A finding, or a change that a repair made, as JSON.
pub(crate) fn json_at<P>(
    f: &Finding<P>,
    name: Option<&str>,
    text: &str,
    values: Option<(String, String)>,
) -> Value {
    let (expected, found) = values.unzip();
    json!({
        "what": f.place.what.name(),
        "ag": f.place.ag,
        "block": f.place.block,
        "inode": f.place.inode,
        "path": f.path,
        "name": name,
        "problem": text,
        "expected": expected,
        "found": found,
    })
}

/// The most memory that this process has had at a time, in bytes.
pub(crate) fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

/// The verdict and its exit status.
fn verdict(outcome: &CheckOutcome) -> (&'static str, u8) {
    match (&outcome.log, outcome.count) {
        (LogState::Dirty { .. }, _) => ("dirty-log", DIRTY),
        (_, 0) => ("clean", 0),
        // The findings may be what the kernel finishes.
        (LogState::Replayed { unfinished, .. }, _) if !unfinished.is_empty() => {
            ("dirty-log", DIRTY)
        }
        _ => ("corrupt", CORRUPT),
    }
}

/// Runs the check.
pub fn run(args: Args) -> Result<ExitCode> {
    let start = Instant::now();
    let name = remote::shown(&args.image).display();
    let failed = |why: String| Error::new(format!("{name}: {why}")).with_code(COULD_NOT_RUN);
    let log = image::open_log(args.logdev.as_deref());
    let log = log.map_err(|e| e.with_code(COULD_NOT_RUN))?;
    let (checked, direct) = match remote::uri(&args.image) {
        Some(uri) => {
            let checked = Checked::remote(uri, &args.store, args.memory, args.threads)?;
            confine::checker();
            (checked, false)
        }
        None => {
            let how = OpenOptions::default();
            let opened = match args.buffered {
                true => Device::open(&args.image, how),
                false => open_direct(&args.image, how),
            };
            let device = opened.map_err(|e| Error::new(e.to_string()).with_code(COULD_NOT_RUN))?;
            confine::checker();
            let direct = device.is_direct();
            let device = Arc::new(device);
            let blocks = match args.engine {
                Some(kind) => DeviceBlocks::new(device, kind)
                    .map_err(|e| failed(format!("starting the {kind} engine: {e}")))?,
                None => DeviceBlocks::best(device).map_err(|e| failed(e.to_string()))?,
            };
            (Checked::Device(Arc::new(blocks)), direct)
        }
    };
    let blocks = with_log(checked.blocks(), log);
    let options = checked.options(args.memory, args.threads, args.prefetch);
    let options = options.map_err(failed)?;
    let outcome = shown(args.json, |progress| check(blocks, &options, progress));
    if let Some(why) = checked.failure() {
        return Err(failed(why));
    }
    let outcome = outcome.map_err(|e| match e {
        // Nothing is left to check it by.
        uvfs_xfs::Error::Corrupt { .. } => failed(e.to_string()).with_code(CORRUPT),
        e => failed(e.to_string()),
    })?;
    let (verdict, code) = verdict(&outcome);
    let written = if args.json {
        let (reads, bytes) = checked.stats();
        let value = json!({
            "verdict": verdict,
            "image": name.to_string(),
            "log": log_name(&outcome.log),
            "log_device": args.logdev.as_deref().map(|path| path.display().to_string()),
            "incomplete": outcome.incomplete,
            "count": outcome.count,
            "findings": outcome.findings.iter().map(finding_json).collect::<Vec<_>>(),
            "inodes": outcome.inodes,
            "allocated_inodes": outcome.allocated,
            "blocks": outcome.blocks,
            "free_blocks": outcome.free_blocks,
            "passes": outcome.passes,
            "threads": options.threads,
            "prefetch": if outcome.prefetch == Prefetch::Large { "large" } else { "exact" },
            "engine": checked.engine(),
            "direct": direct,
            "reads": reads,
            "bytes_read": bytes,
            "peak_memory": peak_memory(),
            "seconds": start.elapsed().as_secs_f64(),
        });
        uvfs_cli::json(&value)
    } else {
        uvfs_cli::print(|out| lines(out, &outcome))
    };
    written.map_err(|e| failed(e.to_string()))?;
    if !args.json {
        for text in outcome
            .not_replayed
            .into_iter()
            .chain(outcome.log.warning())
        {
            warn(format!("{name}: {text}"));
        }
    }
    Ok(ExitCode::from(code))
}

fn lines(out: &mut dyn Write, outcome: &CheckOutcome) -> io::Result<()> {
    for f in &outcome.findings {
        writeln!(out, "{f}")?;
    }
    let kept = outcome.findings.len() as u64;
    if outcome.count > kept {
        writeln!(out, "... and {} more", outcome.count - kept)?;
    }
    if outcome.incomplete {
        writeln!(
            out,
            "not judged, because damage was in the way: what follows from having seen everything"
        )?;
    }
    match outcome.count {
        0 => writeln!(out, "clean: {} inodes", outcome.inodes),
        n => writeln!(out, "{n} findings, {} inodes", outcome.inodes),
    }
}
