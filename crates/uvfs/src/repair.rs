//! `uvfs repair`: repairs an XFS file system.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::ValueHint;
use serde_json::json;
use uvfs_cli::{Error, Result, size, warn};
use uvfs_io::device::{Device, OpenError, OpenOptions};
use uvfs_xfs::blocks::{FileBlocks, with_log};
use uvfs_xfs::check::{DeviceBlocks, Finding};
use uvfs_xfs::image::open_to_repair;
use uvfs_xfs::repair::{DeviceSink, RepairError, RepairOptions, RepairOutcome, Sink, repair};

use crate::check::{Checked, Strategy, finding_json, json_at, peak_memory, shown};
use crate::confine;
use crate::image::remote;

/// Exit status: damage was found with -n, or is left.
const DAMAGED: u8 = 1;
/// Exit status: the repair could not run, or could not write.
const COULD_NOT_RUN: u8 = 2;
/// Exit status: the log is dirty.
const DIRTY: u8 = 3;

const EXAMPLES: &str = "\
Examples:
  uvfs repair -n disk.img     say what would be done
  uvfs repair disk.img
  uvfs repair -L /dev/sdb1    throw the log away, if it cannot be replayed

Each change is one line, with the path of an inode if few directories had to be read for it
(uvfs check looks further). What is in use but in no directory is moved to lost+found, by its number.
A dirty log is replayed first, as a mount does. Nothing else is written before all changes are known. From the first write to the last the file system is
marked as needing repair, and no kernel mounts it; a repair that was cut off is done again. If something
is left that cannot be repaired, nothing is written.

Exit status: 0 sound, or repaired completely; 1 damage found with -n, or something is left that could
not be repaired; 2 the repair could not run (not XFS, unreadable, mounted, a feature that is not
supported) or could not write (and wrong usage); 3 the log is dirty and cannot be replayed: mount the
file system once with a kernel that can, or use -L.";

const JSON_HELP: &str = "\
JSON: one object with
  verdict       \"clean\", \"mended\", \"would-mend\", \"damaged\" or \"dirty-log\"
  image         the path
  log_device    what --logdev names, or null
  found_count   number of findings
  found         at most 10,000 of them: what, ag, block, inode, path, problem, expected, found
  change_count  number of changes
  changes       at most 10,000 of them, in the same form: problem says what was done, or would be; if
                something is left, nothing was done
  left_count    findings after the changes
  left          at most 10,000 of them
  inodes, blocks, free_blocks, rounds, written (bytes), seconds
  peak_memory   in bytes, null where /proc is not mounted";

/// Options of the command.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n\n", JSON_HELP].concat())]
pub struct Args {
    /// Image file or block device; with -n also an image in an object store (s3://BUCKET/KEY)
    #[arg(value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Change nothing; say what would be done
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Throw away what a dirty log holds, instead of replaying it
    #[arg(short = 'L', long)]
    zero_log: bool,
    /// The device or image of the log, if that is not in the image
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    logdev: Option<PathBuf>,
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
    /// Most memory to use, such as 256M. The repairing of the findings may need more: then it
    /// says how much, and does nothing [default: no bound]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    #[command(flatten)]
    store: remote::StoreArgs,
}

/// The verdict and its exit status.
fn verdict(outcome: &RepairOutcome, dry_run: bool) -> (&'static str, u8) {
    match outcome {
        o if o.dirty_log.is_some() => ("dirty-log", DIRTY),
        o if o.left_count > 0 => ("damaged", DAMAGED),
        o if o.found_count == 0 => ("clean", 0),
        _ if dry_run => ("would-mend", DAMAGED),
        _ => ("mended", 0),
    }
}

fn cannot_open(e: OpenError) -> Error {
    Error::new(e.to_string()).with_code(COULD_NOT_RUN)
}

/// Runs the repair.
pub fn run(args: Args) -> Result<ExitCode> {
    let start = Instant::now();
    let name = remote::shown(&args.image).display();
    let failed = |why: String| Error::new(format!("{name}: {why}")).with_code(COULD_NOT_RUN);
    let how = OpenOptions {
        write: true,
        ..OpenOptions::default()
    };
    // Before the command is confined.
    let logdev = args.logdev.as_deref().filter(|_| !args.dry_run);
    let log_sink = logdev.map(|path| Device::open(path, how)).transpose();
    let log_sink = log_sink.map_err(cannot_open)?.map(Arc::new);
    let log = args.logdev.as_deref().map(FileBlocks::open).transpose();
    let log = log.map_err(|e| failed(format!("--logdev: {e}")))?;
    let (sink, checked) = match remote::uri(&args.image) {
        Some(_) if !args.dry_run => {
            let why =
                "an image in an object store can't be changed (-n says what a repair would do)";
            return Err(failed(why.into()));
        }
        Some(uri) => {
            let checked = Checked::remote(uri, &args.store, args.memory, None)?;
            confine::checker();
            (None, checked)
        }
        None => {
            let opened = open_to_repair(&args.image, !args.dry_run);
            let (sink, device) = opened.map_err(cannot_open)?;
            confine::checker();
            let blocks = DeviceBlocks::best(device).map_err(|e| failed(e.to_string()))?;
            (sink, Checked::Device(Arc::new(blocks)))
        }
    };
    let blocks = with_log(checked.blocks(), log);
    let check = checked.options(args.memory, None, Strategy::Auto);
    let options = RepairOptions {
        zero_log: args.zero_log,
        check: check.map_err(failed)?,
    };
    let device = sink.map(DeviceSink::new).transpose();
    let device = device.map_err(|e| failed(e.to_string()))?;
    let log = log_sink.map(DeviceSink::new).transpose();
    let log = log.map_err(|e| failed(format!("--logdev: {e}")))?;
    let device = device.map(|device| match log {
        Some(log) => device.with_log(log),
        None => device,
    });
    let to = device.as_ref().map(|device| device as &dyn Sink);
    let outcome = shown(args.json, |progress| repair(blocks, to, &options, progress));
    if let Some(why) = checked.failure() {
        return Err(failed(why));
    }
    let outcome = outcome.map_err(|e| match e {
        // Nothing is left to repair it by.
        RepairError::Check(uvfs_xfs::Error::Corrupt { .. }) => {
            failed(e.to_string()).with_code(DAMAGED)
        }
        RepairError::Memory(_) => failed(format!("--memory: {e}")),
        e => failed(e.to_string()),
    })?;
    let (verdict, code) = verdict(&outcome, args.dry_run);
    let list = |l: &[Finding]| l.iter().map(finding_json).collect::<Vec<_>>();
    let changes = outcome.changes.iter();
    let changes = changes.map(|c| json_at(c, None, &c.problem, None));
    let written = if args.json {
        let value = json!({
            "verdict": verdict,
            "image": name.to_string(),
            "log_device": args.logdev.as_deref().map(|path| path.display().to_string()),
            "found_count": outcome.found_count,
            "found": list(&outcome.found),
            "change_count": outcome.change_count,
            "changes": changes.collect::<Vec<_>>(),
            "left_count": outcome.left_count,
            "left": list(&outcome.left),
            "inodes": outcome.inodes,
            "blocks": outcome.blocks,
            "free_blocks": outcome.free_blocks,
            "rounds": outcome.rounds,
            "written": outcome.written,
            "peak_memory": peak_memory(),
            "seconds": start.elapsed().as_secs_f64(),
        });
        uvfs_cli::json(&value)
    } else {
        uvfs_cli::print(|out| lines(out, &outcome, args.dry_run))
    };
    written.map_err(|e| failed(e.to_string()))?;
    if let Some(why) = outcome.dirty_log.filter(|_| !args.json) {
        warn(format!(
            "{name}: {why}; mount the file system once with a kernel that can, and unmount it, \
             or, if it cannot be mounted, use -L, which throws away what the log holds"
        ));
    }
    Ok(ExitCode::from(code))
}

/// Findings or changes, as what is printed.
fn all<T: Display>(list: &[T]) -> Vec<&dyn Display> {
    list.iter().map(|item| item as &dyn Display).collect()
}

fn lines(out: &mut dyn Write, o: &RepairOutcome, dry_run: bool) -> io::Result<()> {
    if o.dirty_log.is_some() {
        return Ok(());
    }
    for (title, list, count) in [
        ("found", all(&o.found), o.found_count),
        (
            match dry_run {
                true => "would mend",
                false if o.left_count > 0 => "not done",
                false => "mended",
            },
            all(&o.changes),
            o.change_count,
        ),
        ("left", all(&o.left), o.left_count),
    ] {
        for f in &list {
            writeln!(out, "{title}: {f}")?;
        }
        let kept = list.len() as u64;
        // The superblock and the log are looked at before the first check: that has no lines.
        if count > kept && kept >= 10_000 {
            writeln!(out, "{title}: ... and {} more", count - kept)?;
        }
    }
    match o.found_count {
        0 => writeln!(out, "clean: {} inodes", o.inodes),
        n => writeln!(
            out,
            "{n} findings, {} changes, {} left, {} inodes",
            o.change_count, o.left_count, o.inodes
        ),
    }
}
