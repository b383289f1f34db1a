//! `uvfs bench check`: checking an XFS image, against xfs_repair -n, or one in an object store.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::fs::Advice;
use serde_json::{Value, json};
use uvfs_cli::{Context, Error, Result};

use super::child::uvfs;
use super::common::{Common, words};
use super::interrupt;
use super::measure::Measured;
use super::programs::is_installed;
use super::proxy;
use super::report::{JSON_HELP, Unit, Work};
use super::runner::{Sample, Say};
use super::server::{Kind, Target, start_store};
use super::store::StoreJob;

const EXAMPLES: &str = "\
Examples:
  uvfs bench check disk.img
  uvfs bench check disk.img --engine sync,uring --prefetch large --cache cold --json
  uvfs bench check disk.img --latency-us 0,1000,20000 --cache cold
  uvfs bench check 's3://bucket/disk.img?endpoint=http://127.0.0.1:9000' \\
    --prefetch large,exact,auto --requests 8,64 --latency-us 0,1000,20000

Every target runs once in each round, as a process of its own, beginning with another target each
time. Cold: the image is dropped from the page cache before each run (of a block device, what the
kernel lets go), and uvfs reads past the cache. Warm: the image is read into the cache first, and
uvfs reads through it. MiB read are what came from the device.

With latency the image is a file of a store (a mount) whose reads, of 1 MiB at most, take so much
longer, as those of a network disk do. Nothing of it is in a cache.

An image in an object store is checked by each prefetch strategy with each number of --requests. With
latency each request takes so much longer, by way of a proxy; the URI then has to have an endpoint=http://
of its own. MiB read are what was asked of the store.

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.";

/// The measurements and their options.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n\n", JSON_HELP].concat())]
pub struct Args {
    /// XFS image, block device, or image in an object store (s3://BUCKET/KEY)
    image: PathBuf,
    /// Engines to measure
    #[arg(long, value_delimiter = ',', default_value = "sync,aio,uring")]
    engine: Vec<String>,
    /// Prefetch strategies to measure
    #[arg(long, value_delimiter = ',', default_value = "large,exact")]
    prefetch: Vec<String>,
    /// States of the page cache to measure
    #[arg(long, value_delimiter = ',', value_enum, default_value = "cold,warm")]
    cache: Vec<Cache>,
    /// Pass on to the check
    #[arg(long, value_name = "BYTES")]
    memory: Option<String>,
    /// Requests to an object store that may be under way at a time, to measure
    #[arg(long, value_delimiter = ',', default_value = "64", value_name = "LIST")]
    requests: Vec<u32>,
    /// Microseconds that each read takes longer; 0 reads the image itself
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0",
        value_parser = clap::value_parser!(u64).range(0..=1_000_000),
        value_name = "LIST"
    )]
    latency_us: Vec<u64>,
    #[command(flatten)]
    common: Common,
}

/// The most that one read of a slow store carries, in bytes.
const PIECE: u32 = 1 << 20;

/// The state of the page cache before a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Cache {
    /// with nothing of the image in the page cache
    Cold,
    /// with all of the image in the page cache
    Warm,
}

/// The ways to check. Their command lines lack `--buffered` and the image.
fn targets(args: &Args) -> Vec<Target> {
    let mut targets = Vec::new();
    let stored = uri(&args.image).is_some();
    let (option, values) = match stored {
        true => {
            let requests = args.requests.iter().map(ToString::to_string);
            ("--requests", requests.collect())
        }
        false => ("--engine", args.engine.clone()),
    };
    for value in &values {
        for prefetch in &args.prefetch {
            let mut options = vec!["check", "--json", option, value];
            options.extend(["--prefetch", prefetch]);
            if let Some(memory) = &args.memory {
                options.extend(["--memory", memory]);
            }
            targets.push(Target::uvfs(format!("{value}-{prefetch}"), &options));
        }
    }
    if !stored && is_installed("xfs_repair") {
        let mut command = vec!["xfs_repair".to_string(), "-n".into()];
        command.extend(args.image.is_file().then(|| "-f".into()));
        targets.push(Target {
            name: "xfs_repair".into(),
            kind: Kind::Peer { command },
        });
    }
    targets
}

/// The image's URI, if it is in an object store.
fn uri(image: &Path) -> Option<&str> {
    image.to_str().filter(|image| image.contains("://"))
}

/// Brings the page cache into a state.
fn prepare(image: &Path, cache: Cache) -> Result<()> {
    let what = || format!("preparing {}", image.display());
    let mut file = File::open(image).context(what)?;
    match cache {
        Cache::Cold => {
            rustix::fs::sync();
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).context(what)?;
        }
        Cache::Warm => {
            let mut buf = vec![0; 1 << 20];
            while file.read(&mut buf).context(what)? > 0 {}
        }
    }
    Ok(())
}

/// Waits for a child; gives how it ended and what it used.
fn wait(child: &Child) -> io::Result<(i32, libc::rusage)> {
    let mut status = 0;
    // SAFETY: rusage is plain numbers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both pointers are to live variables of the right types; the child is ours and
        // no other thread waits for it.
        let pid = unsafe { libc::wait4(child.id() as i32, &mut status, 0, &mut usage) };
        if pid >= 0 {
            return Ok((status, usage));
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

fn measure(target: &Target, image: &Path, cache: Cache) -> Result<Sample> {
    let stored = uri(image).is_some();
    if !stored {
        prepare(image, cache)?;
    }
    let what = || target.name.clone();
    // Findings (1) and a dirty log (3, or 2 of xfs_repair) still are a whole run.
    let (mut command, whole) = match &target.kind {
        Kind::Peer { command } => {
            let mut peer = Command::new(&command[0]);
            peer.args(&command[1..]);
            (peer, [0, 1, 2])
        }
        Kind::Uvfs { options } => {
            let mut own = Command::new(uvfs());
            own.args(options);
            own.args((cache == Cache::Warm).then_some("--buffered"));
            (own, [0, 1, 3])
        }
        _ => unreachable!("no other kind checks"),
    };
    command.arg(image).stdin(Stdio::null());
    // It may be longer than a pipe takes.
    let mut report = tempfile::tempfile().context(what)?;
    let out = report.try_clone().context(what)?;
    command.stdout(out).stderr(Stdio::null());
    let start = Instant::now();
    let (status, usage) = command
        .spawn()
        .and_then(|child| wait(&child))
        .context(what)?;
    let seconds = start.elapsed().as_secs_f64();
    if !libc::WIFEXITED(status) || !whole.contains(&libc::WEXITSTATUS(status)) {
        return Err(Error::new(format!(
            "{}: ended with status {status:#x} (run it alone to see why)",
            what()
        )));
    }
    // Bytes that the device or the store gave.
    let mut read_mib = usage.ru_inblock as f64 / 2048.0;
    if stored {
        report.rewind().context(what)?;
        let report: Value = serde_json::from_reader(&report)
            .map_err(io::Error::other)
            .context(what)?;
        read_mib = report["bytes_read"].as_f64().unwrap_or(f64::NAN) / f64::from(1 << 20);
    }
    let cpu = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    Ok(Sample {
        client: Measured {
            amount: 1.0,
            seconds,
            cpu_seconds: cpu(usage.ru_utime) + cpu(usage.ru_stime),
            memory_mib: Some(usage.ru_maxrss as f64 / 1024.0),
            read_mib: Some(read_mib),
            ..Measured::default()
        },
        server_cpu_seconds: None,
    })
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    interrupt::install()?;
    let targets = targets(&args);
    if let Some(uri) = uri(&args.image) {
        return run_stored(&args, uri, &targets);
    }
    let itself = args.latency_us.contains(&0);
    let caches = args.cache.iter().filter(|_| itself);
    let slow = args.latency_us.iter().filter(|us| **us > 0);
    let mut works: Vec<Work> = (caches.clone())
        .map(|cache| {
            let (name, title) = words(cache);
            Work::new(name, title, Unit::Run)
        })
        .collect();
    works.extend(slow.clone().map(|us| {
        let title = format!("in a store, {us} \u{b5}s more for each read");
        Work::new(format!("{us}us"), title, Unit::Run)
    }));
    let image = || args.image.display().to_string();
    // A store serves it by its whole path, and says how long it is.
    let store = match slow.clone().next() {
        Some(_) => {
            let data = args.image.canonicalize().context(image)?;
            let bytes = File::open(&data).and_then(|mut file| file.seek(SeekFrom::End(0)));
            Some((args.common.workspace(0)?, data, bytes.context(image)?))
        }
        None => None,
    };
    let settings = json!({"image": args.image, "latency_us": args.latency_us});
    let round = |_, target: &Target, _: Say<'_>| -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for cache in caches.clone() {
            samples.push(measure(target, &args.image, *cache)?);
        }
        for latency_us in slow.clone() {
            let (workspace, data, bytes) = store.as_ref().expect("made for these");
            let store = StoreJob {
                mountpoint: workspace.store(),
                data: Some(data.clone()),
                bytes: *bytes,
                piece: PIECE,
                latency_us: *latency_us,
                dev: false,
            };
            let store = start_store(workspace, store)?;
            let image = store.path().join("0");
            let sample = measure(target, &image, Cache::Cold);
            samples.push(sample.map_err(|e| store.blame(e))?);
        }
        Ok(samples)
    };
    args.common
        .measure("check", &targets, works, settings, round)
}

/// The same for an image in an object store.
fn run_stored(args: &Args, uri: &str, targets: &[Target]) -> Result<ExitCode> {
    let mut works = Vec::new();
    let mut images = Vec::new();
    for us in &args.latency_us {
        let (title, image) = match us {
            0 => ("in the store".into(), uri.to_owned()),
            us => {
                let title = format!("in the store, {us} \u{b5}s more for each request");
                (title, proxy::before(uri, Duration::from_micros(*us))?)
            }
        };
        works.push(Work::new(format!("{us}us"), title, Unit::Run));
        images.push(PathBuf::from(image));
    }
    // The options of a URI may have a credential.
    let shown = uri.split('?').next();
    let settings =
        json!({"image": shown, "latency_us": args.latency_us, "requests": args.requests});
    let round = |_, target: &Target, _: Say<'_>| -> Result<Vec<Sample>> {
        let samples = images
            .iter()
            .map(|image| measure(target, image, Cache::Cold));
        samples.collect()
    };
    (args.common).measure("check", targets, works, settings, round)
}
