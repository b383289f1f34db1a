//! `uvfs bench check`: checking an XFS image, against xfs_repair -n.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use rustix::fs::Advice;
use serde_json::{Value, json};
use uvfs_cli::{Context, Error, Result, printed};

use super::interrupt;
use super::stats::Summary;

const EXAMPLES: &str = "\
Examples:
  uvfs bench check disk.img
  uvfs bench check disk.img --engine sync,uring --prefetch large --cache cold --json

Every target runs once in each round, as a process of its own, beginning with another target each
time. Cold: the image is dropped from the page cache before each run (of a block device, what the
kernel lets go), and uvfs reads past the cache. Warm: the image is read into the cache first, and
uvfs reads through it. MiB read are what came from the device.

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.";

const JSON_HELP: &str = "\
JSON: one object with version, bench, uvfs, image, rounds and targets: for each name, command,
error, and medians with min and max of seconds, cpu_seconds, peak_bytes, read_bytes and (uvfs
only) reads; samples: for each round, seconds; \"speedup\" is xfs_repair's median time in the same cache state divided by this one's.";

/// The measurements and their options.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n\n", JSON_HELP].concat())]
pub struct Args {
    /// XFS image or block device
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
    /// How many times each target is measured
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Pass on to the check
    #[arg(long, value_name = "BYTES")]
    memory: Option<String>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// The state of the page cache before a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Cache {
    Cold,
    Warm,
}

/// One way to check.
struct CheckTarget {
    name: String,
    cache: Cache,
    program: PathBuf,
    args: Vec<String>,
    uvfs: bool,
}

/// One run.
struct CheckRun {
    seconds: f64,
    cpu_seconds: f64,
    peak_bytes: f64,
    read_bytes: f64,
    reads: Option<f64>,
}

fn targets(args: &Args) -> Result<Vec<CheckTarget>> {
    let me = super::child::uvfs();
    let image = args.image.display().to_string();
    let mut out = Vec::new();
    for &cache in &args.cache {
        let state = if cache == Cache::Cold { "cold" } else { "warm" };
        for engine in &args.engine {
            for prefetch in &args.prefetch {
                let mut command: Vec<String> =
                    ["check", "--json", "--engine", engine, "--prefetch"]
                        .map(String::from)
                        .into();
                command.push(prefetch.clone());
                if let Some(m) = &args.memory {
                    command.extend(["--memory".into(), m.clone()]);
                }
                if cache == Cache::Warm {
                    command.push("--buffered".into());
                }
                command.push(image.clone());
                out.push(CheckTarget {
                    name: format!("{engine}-{prefetch}-{state}"),
                    cache,
                    program: me.clone(),
                    args: command,
                    uvfs: true,
                });
            }
        }
        let installed = Command::new("xfs_repair")
            .arg("-V")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok();
        if installed {
            let file = std::fs::metadata(&args.image).is_ok_and(|m| m.is_file());
            let mut command: Vec<String> = vec!["-n".into()];
            command.extend(file.then(|| "-f".into()));
            command.push(image.clone());
            out.push(CheckTarget {
                name: format!("xfs_repair-{state}"),
                cache,
                program: "xfs_repair".into(),
                args: command,
                uvfs: false,
            });
        }
    }
    Ok(out)
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

fn measure(target: &CheckTarget, image: &Path) -> Result<CheckRun> {
    prepare(image, target.cache)?;
    let what = || target.name.clone();
    let start = Instant::now();
    let mut child = Command::new(&target.program)
        .args(&target.args)
        .stdin(Stdio::null())
        .stdout(if target.uvfs {
            Stdio::piped()
        } else {
            Stdio::null()
        })
        .stderr(Stdio::null())
        .spawn()
        .context(what)?;
    let mut text = String::new();
    let read = match child.stdout.take() {
        Some(mut out) => out.read_to_string(&mut text).map(|_| ()),
        None => Ok(()),
    };
    let (status, usage) = wait(&child).context(what)?;
    let seconds = start.elapsed().as_secs_f64();
    read.context(what)?;
    // Findings (1) and a dirty log (3, or 2 of xfs_repair) still are a whole run.
    let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
    let whole = match code {
        Some(c) if target.uvfs => matches!(c, 0 | 1 | 3),
        Some(c) => matches!(c, 0..=2),
        None => false,
    };
    if !whole {
        return Err(Error::new(format!(
            "{}: ended with status {status:#x} (run it alone to see why)",
            target.name
        )));
    }
    let cpu = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    let reads = serde_json::from_str::<Value>(&text)
        .ok()
        .and_then(|v| v["reads"].as_f64());
    Ok(CheckRun {
        seconds,
        cpu_seconds: cpu(usage.ru_utime) + cpu(usage.ru_stime),
        peak_bytes: usage.ru_maxrss as f64 * 1024.0,
        read_bytes: usage.ru_inblock as f64 * 512.0,
        reads,
    })
}

/// One target's rounds, or why they failed.
type CheckOutcome = std::result::Result<Vec<CheckRun>, String>;

fn summary(samples: &[CheckRun], of: impl Fn(&CheckRun) -> Option<f64>) -> Option<Summary> {
    Summary::of(samples.iter().filter_map(of))
}

/// xfs_repair's median time in a state of the cache.
fn base(targets: &[CheckTarget], outcomes: &[CheckOutcome], cache: Cache) -> Option<f64> {
    let i = targets.iter().position(|t| !t.uvfs && t.cache == cache)?;
    let samples = outcomes[i].as_ref().ok()?;
    Some(summary(samples, |s| Some(s.seconds))?.median)
}

fn report_json(args: &Args, targets: &[CheckTarget], outcomes: &[CheckOutcome]) -> String {
    let show = |s: Option<Summary>| {
        s.map_or(
            Value::Null,
            |s| json!({"median": s.median, "min": s.min, "max": s.max}),
        )
    };
    let rows: Vec<Value> = targets
        .iter()
        .zip(outcomes)
        .map(|(t, o)| {
            let samples = o.as_deref().unwrap_or_default();
            let seconds = summary(samples, |s| Some(s.seconds));
            let speedup = base(targets, outcomes, t.cache)
                .zip(seconds.as_ref().map(|s| s.median))
                .map(|(b, s)| b / s);
            json!({
                "name": t.name,
                "command": std::iter::once(t.program.display().to_string())
                    .chain(t.args.iter().cloned()).collect::<Vec<_>>(),
                "error": o.as_ref().err(),
                "samples": samples.iter().map(|s| json!({"seconds": s.seconds})).collect::<Vec<_>>(),
                "seconds": show(seconds),
                "cpu_seconds": show(summary(samples, |s| Some(s.cpu_seconds))),
                "peak_bytes": show(summary(samples, |s| Some(s.peak_bytes))),
                "read_bytes": show(summary(samples, |s| Some(s.read_bytes))),
                "reads": show(summary(samples, |s| s.reads)),
                "speedup": speedup,
            })
        })
        .collect();
    let value = json!({
        "version": 1,
        "bench": "check",
        "uvfs": env!("CARGO_PKG_VERSION"),
        "image": args.image.display().to_string(),
        "rounds": args.rounds,
        "targets": rows,
    });
    format!("{value:#}\n")
}

fn report_table(targets: &[CheckTarget], outcomes: &[CheckOutcome]) -> String {
    let mut text = format!(
        "{:<24} {:>17} {:>8} {:>10} {:>10} {:>9} {:>8}\n",
        "", "seconds (spread)", "CPU s", "peak MiB", "MiB read", "reads", "speedup"
    );
    for (t, o) in targets.iter().zip(outcomes) {
        let Ok(samples) = o else { continue };
        let median = |of: &dyn Fn(&CheckRun) -> Option<f64>| summary(samples, of);
        let Some(seconds) = median(&|s| Some(s.seconds)) else {
            continue;
        };
        let number = |s: Option<Summary>, unit: f64, digits: usize| {
            s.map_or("-".into(), |s| format!("{:.digits$}", s.median / unit))
        };
        let mib = 1024.0 * 1024.0;
        let spread = format!(
            "{:.2} ({:.2}-{:.2})",
            seconds.median, seconds.min, seconds.max
        );
        let speedup = base(targets, outcomes, t.cache)
            .map_or("-".into(), |b| format!("{:.1}x", b / seconds.median));
        text += &format!(
            "{:<24} {:>17} {:>8} {:>10} {:>10} {:>9} {:>8}\n",
            t.name,
            spread,
            number(median(&|s| Some(s.cpu_seconds)), 1.0, 2),
            number(median(&|s| Some(s.peak_bytes)), mib, 1),
            number(median(&|s| Some(s.read_bytes)), mib, 0),
            number(median(&|s| s.reads), 1.0, 0),
            speedup,
        );
    }
    text
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    interrupt::install()?;
    let targets = targets(&args)?;
    let mut outcomes: Vec<CheckOutcome> = targets.iter().map(|_| Ok(Vec::new())).collect();
    let rounds = args.rounds as usize;
    let progress = ProgressBar::new((rounds * targets.len()) as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} ({eta} left)") {
        progress.set_style(style.progress_chars("=> "));
    }
    let progress = progress.with_finish(ProgressFinish::AndClear);
    for round in 0..rounds {
        for turn in 0..targets.len() {
            let i = (round + turn) % targets.len();
            interrupt::check()?;
            progress.set_message(targets[i].name.clone());
            if let Ok(samples) = &mut outcomes[i] {
                match measure(&targets[i], &args.image) {
                    Ok(s) => samples.push(s),
                    Err(e) => outcomes[i] = Err(e.to_string()),
                }
            }
            progress.inc(1);
        }
    }
    drop(progress);
    let text = if args.json {
        report_json(&args, &targets, &outcomes)
    } else {
        report_table(&targets, &outcomes)
    };
    printed(io::stdout().lock().write_all(text.as_bytes()))?;
    let mut code = ExitCode::SUCCESS;
    for (t, o) in targets.iter().zip(&outcomes) {
        if let Err(e) = o {
            uvfs_cli::warn(format!("{}: not measured: {e}", t.name));
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}
