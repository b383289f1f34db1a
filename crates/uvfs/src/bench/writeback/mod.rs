//! `uvfs bench writeback`: buffered writes, well past what may stay dirty.

mod copying;
pub mod job;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;

use serde_json::json;

use super::common::Common;
use super::report::{JSON_HELP, Report, Unit, Work};
use super::runner::{Sample, interleave, measure};
use super::server::{Kind, Peer, Running, Target, check_names, raise_file_limit};
use super::workspace::Workspace;
use super::{client, interrupt};
use crate::error::{Context, Error, Result};
use job::{FILL, Job, Way};

const EXAMPLES: &str = "\
Examples:
  uvfs bench writeback --quick
  uvfs bench writeback --peer \\
    ll='passthrough_ll -f -o writeback,source={source} {mountpoint}' --json > result.json

Two writers, each with a new file, which it writes from start to end in writes of 1 KiB, 4 KiB or
1 MiB and then makes durable. The files are many times as large as what may be dirty.
  native          the host's file
  mount           a kernel mount of uvfs with -o writeback
  client          uvfs-client with its store in the same process: its pages are what is written
  client-copying  the same, but each page is copied for writeback, kept in a tree and ended alone;
                  it is only here, to show what that costs
  client-served   uvfs-client over memory that it shares with `uvfs serve`

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.
";

/// Writers at a time.
const WRITERS: usize = 2;

/// Bytes of the client's cache, of which 40% may be dirty.
const MEMORY: usize = 64 << 20;

/// Bytes of a write, and their name.
const BLOCKS: [(usize, &str); 3] = [(1 << 10, "1k"), (4 << 10, "4k"), (1 << 20, "1m")];

/// What it measures and how.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n", JSON_HELP].concat())]
pub struct Args {
    /// Another file server: it is run without a shell, has to stay in the foreground, and is
    /// unmounted at the end
    #[arg(long, value_name = "NAME='COMMAND {source} {mountpoint}'")]
    peer: Vec<Peer>,
    /// Leave out the kernel mount of uvfs
    #[arg(long)]
    no_mount: bool,
    #[command(flatten)]
    common: Common,
}

fn targets(args: &Args) -> Result<Vec<Target>> {
    let client = |name: &str, served, base| Target {
        name: name.into(),
        kind: Kind::Client { served, base },
    };
    let mut targets = vec![Target::native()];
    if !args.no_mount {
        targets.push(Target {
            name: "mount".into(),
            kind: Kind::Uvfs {
                options: vec!["-o".into(), "writeback".into()],
            },
        });
    }
    targets.push(client("client", false, false));
    targets.push(client("client-copying", false, true));
    targets.push(client("client-served", true, false));
    targets.extend(args.peer.iter().cloned().map(Target::from));
    check_names(&targets)?;
    Ok(targets)
}

/// How the client reaches a target.
fn way(kind: &Kind) -> Way {
    match kind {
        Kind::Native | Kind::Uvfs { .. } | Kind::Run | Kind::Peer { .. } => Way::Host,
        Kind::Client { served: true, .. } => Way::Served,
        Kind::Client { base: true, .. } => Way::Copying,
        Kind::Client { .. } => Way::Local,
    }
}

/// Measures one block size, looks whether the bytes are there, and clears them away.
fn one(
    workspace: &Workspace,
    target: &Target,
    running: &Running<'_>,
    (block, name): (usize, &str),
    bytes: u64,
) -> Result<Sample> {
    let files: Vec<String> = (0..WRITERS).map(|n| format!("out-{name}-{n}")).collect();
    for file in &files {
        workspace.clear(file)?;
    }
    let job = client::Job::Writeback(Job {
        way: way(&target.kind),
        path: running.path().into(),
        files: files.clone(),
        block,
        bytes,
        memory: MEMORY,
    });
    let sample = measure(running, &job)?;
    for file in &files {
        let path = workspace.source().join(file);
        let what = || format!("looking at {}", path.display());
        let written = File::open(&path).context(what)?;
        let mut end = [0; 4096];
        let len = written.metadata().context(what)?.len();
        let read = written.read_exact_at(&mut end, len.saturating_sub(4096));
        read.context(what)?;
        if len != bytes || end != [FILL; 4096] {
            return Err(Error::new(format!("{}: other bytes arrived", what())));
        }
        workspace.clear(file)?;
    }
    Ok(sample)
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let common = &args.common;
    let targets = targets(&args)?;
    let bytes = common.pick(128 << 20, 512 << 20);
    interrupt::install()?;
    raise_file_limit()?;
    // The files, and the kernel's cache of them over a mount.
    let workspace = Workspace::new(common.dir.as_deref(), 2 * WRITERS as u64 * bytes)?;
    let outcomes = interleave(
        common.rounds(),
        &targets,
        BLOCKS.len(),
        |_, target, progress| {
            let running = target.start(&workspace)?;
            let mut samples = Vec::new();
            for block in BLOCKS {
                interrupt::check()?;
                progress.set_message(format!("{} {}", target.name, block.1));
                let sample = one(&workspace, target, &running, block, bytes);
                samples.push(sample.map_err(|e| running.blame(e))?);
            }
            Ok(samples)
        },
    )?;
    drop(workspace);
    let settings = json!({
        "rounds": common.rounds(),
        "pinned": false,
        "quick": common.quick,
        "bytes": bytes,
        "writers": WRITERS,
        "memory": MEMORY,
    });
    let works = BLOCKS.iter().map(|(block, name)| Work {
        name: format!("write-{name}"),
        title: format!("{WRITERS} writers, {block} bytes at a time, with an fsync at the end"),
        unit: Unit::MiB,
    });
    let report = Report::new("writeback", settings, targets, works.collect(), &outcomes);
    common.finish(&report)
}
