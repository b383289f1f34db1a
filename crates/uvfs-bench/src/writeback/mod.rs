//! `uvfs bench writeback`: buffered writes, well past what may stay dirty.

mod copying;
pub mod job;

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use uvfs_cli::{Context, Error, Result};

use super::common::Common;
use super::files::BLOCK;
use super::report::{JSON_HELP, Unit, Work};
use super::runner::{Sample, Say, measure};
use super::server::{Kind, Running, Target, start_store};
use super::sides::{self, Side, Sides, Stored};
use super::workspace::Workspace;
use super::{client, interrupt, store};
use job::{FILL, WritebackAccess, WritebackJob};

const EXAMPLES: &str = "\
Examples:
  uvfs bench writeback --quick
  uvfs bench writeback --sides mount,mount-dev,client --json > result.json
  uvfs bench writeback --source 's3://bucket?endpoint=http://127.0.0.1:9000' --objects /srv/store/bucket --dir /var/tmp
  uvfs bench writeback --peer \\
    ll='passthrough_ll -f -o writeback,source={source} {mountpoint}' --json > result.json

Two writers, each with a new file, which it writes from start to end in writes of 1 KiB, 4 KiB or
1 MiB and then makes durable. The files are many times as large as what may be dirty.
  native          the host's file
  mount           a kernel mount of uvfs with -o writeback
  mount-dev       the same over /dev/fuse
  client          uvfs-client with its server in the same process: its pages are what is written
  ...-uncached    the same with -o uncached (mount) or DONTCACHE (client): pages are dropped once they
                  are written
  client-copying  the same as client, but each page is copied for writeback, kept in a tree and ended alone;
                  it is only here, to show what that costs
  client-served   uvfs-client over memory that it shares with `uvfs serve`

And 32 writers in writes of 1 MiB whose data is thrown away at the end of its way (discard): by a
FUSE server in place of the mount's, over the same transport, and in place of the client's.

With --source the files are objects of a store, which has them when the server has ended:
  native          the store's own directory
  mount           a kernel mount of uvfs with -o write=back,nofsync: fsync waits for the local disk
  mount-close     the same with -o write=close: fsync waits for the store
  mount-dev       as mount, over /dev/fuse
  client          uvfs-client, over memory that it shares with the server of a mount as of mount
  client-close    the same with -o write=close

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.
";

/// The end of an uncached target's name.
const UNCACHED: &str = "-uncached";

/// The end of the name of a target that waits for the store.
const CLOSE: &str = "-close";

/// The name of a target with a mount that is written by `uvfs-client`, and how it begins.
const CLIENT: &str = "client";

/// Writers at a time.
const WRITERS: usize = 2;

/// Writers at a time whose data is thrown away, and the bytes of each, for this part of those of others.
const DISCARDED: (usize, u64) = (32, 8);

/// Bytes of the client's cache, of which 40% may be dirty.
const MEMORY: usize = 64 << 20;

/// Bytes of a write, and their name.
const BLOCKS: [(usize, &str); 3] = [(1 << 10, "1k"), (4 << 10, "4k"), (1 << 20, "1m")];

/// The measurements and their options.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n", JSON_HELP].concat())]
pub struct Args {
    #[command(flatten)]
    stored: Stored,
    #[command(flatten)]
    sides: Sides,
    #[command(flatten)]
    common: Common,
}

/// How the client reaches a target.
fn way(target: &Target) -> WritebackAccess {
    match target.kind {
        Kind::Uvfs { .. } if target.name.starts_with(CLIENT) => WritebackAccess::Served,
        Kind::Native | Kind::Uvfs { .. } | Kind::Run | Kind::Peer { .. } => WritebackAccess::Host,
        Kind::Client { served: true, .. } => WritebackAccess::Served,
        Kind::Client { base: true, .. } => WritebackAccess::Copying,
        Kind::Client { .. } => WritebackAccess::Local,
    }
}

/// The files of a block size.
fn files(name: &str) -> impl Iterator<Item = String> {
    (0..WRITERS).map(move |n| format!("out-{name}-{n}"))
}

/// The socket of a mount.
fn socket(mount: &Path) -> Result<PathBuf> {
    let mut room = [0; 4096];
    let len = rustix::fs::getxattr(mount, "user.uvfs.socket", &mut room);
    let len = len.context(|| format!("{}: its socket", mount.display()))?;
    Ok(OsStr::from_bytes(&room[..len]).into())
}

/// Measures one block size.
fn one(
    workspace: &Workspace,
    target: &Target,
    running: &Running<'_>,
    (block, name): (usize, &str),
    bytes: u64,
) -> Result<Sample> {
    files(name).try_for_each(|file| workspace.clear(&file))?;
    let mut files: Vec<String> = files(name).collect();
    let mut path = running.path().to_owned();
    let way = way(target);
    if let Some((_, source)) = workspace.stored()
        && way == WritebackAccess::Served
    {
        path = socket(&workspace.mountpoint())?;
        let below = |file: &String| format!("{}/{file}", source.to_string_lossy());
        files = files.iter().map(below).collect();
    }
    let job = client::Job::Writeback(WritebackJob {
        way,
        path,
        files,
        discard: false,
        uncached: target.name.ends_with(UNCACHED),
        block,
        bytes,
        memory: MEMORY,
    });
    measure(running, &job)
}

/// Looks whether the bytes of a block size are there, and clears them away.
fn arrived(workspace: &Workspace, name: &str, bytes: u64) -> Result<()> {
    for file in files(name) {
        let path = workspace.source().join(&file);
        let what = || format!("looking at {}", path.display());
        let written = File::open(&path).context(what)?;
        let mut end = [0; 4096];
        let len = written.metadata().context(what)?.len();
        let read = written.read_exact_at(&mut end, len.saturating_sub(4096));
        read.context(what)?;
        if len != bytes || end != [FILL; 4096] {
            return Err(Error::new(format!("{}: other bytes arrived", what())));
        }
        workspace.clear(&file)?;
    }
    Ok(())
}

/// Measures writers whose data is thrown away; nothing where the target has no such thing.
fn discarded(workspace: &Workspace, target: &Target, bytes: u64) -> Result<Option<Sample>> {
    let (writers, part) = DISCARDED;
    let bytes = bytes / part;
    if target.name.ends_with(UNCACHED) {
        return Ok(None);
    }
    let files = (0..writers).map(|n| n.to_string()).collect();
    let running = match &target.kind {
        Kind::Uvfs { options } => start_store(
            workspace,
            store::StoreJob {
                mountpoint: workspace.mountpoint(),
                data: None,
                bytes,
                piece: 1 << 20,
                latency_us: 0,
                dev: options.iter().any(|word| word == "dev"),
            },
        )?,
        Kind::Client { served: false, .. } => target.start(workspace)?,
        _ => return Ok(None),
    };
    let job = client::Job::Writeback(WritebackJob {
        way: way(target),
        path: running.path().into(),
        files,
        discard: true,
        uncached: false,
        block: 1 << 20,
        bytes,
        memory: MEMORY,
    });
    let sample = measure(&running, &job).map_err(|e| running.blame(e))?;
    Ok(Some(sample))
}

/// The targets over a directory.
fn over_directory(args: &Args) -> Result<Vec<Target>> {
    let clients = [
        sides::client(CLIENT, false, false),
        sides::client(&format!("{CLIENT}{UNCACHED}"), false, false),
        sides::client("client-copying", false, true),
        sides::client("client-served", true, false),
    ];
    let options = ["-o", "writeback"];
    let mut targets = args.sides.targets(&Side::CALLS, &options, &clients)?;
    if let Some(mount) = targets.iter().position(|target| target.name == "mount") {
        let uncached = Target::uvfs(format!("mount{UNCACHED}"), &["-o", "uncached"]);
        targets.insert(mount + 1, uncached);
    }
    Ok(targets)
}

/// The targets over a store. The cache has room for all files.
fn over_store(args: &Args, bytes: u64) -> Result<Vec<Target>> {
    let room = format!("cache_size={}", 2 * WRITERS as u64 * bytes);
    let (back, close) = (
        format!("write=back,nofsync,{room}"),
        format!("write=close,{room}"),
    );
    let (back, close) = (["-o", &*back], ["-o", &*close]);
    let clients = [
        Target::uvfs(CLIENT, &back),
        Target::uvfs(format!("{CLIENT}{CLOSE}"), &close),
    ];
    let stored = &args.stored;
    let mut targets = stored.targets(&args.sides, &Side::CALLS, &back, &clients)?;
    if let Some(mount) = targets.iter().position(|target| target.name == "mount") {
        targets.insert(mount + 1, Target::uvfs(format!("mount{CLOSE}"), &close));
    }
    Ok(targets)
}

/// Runs the benchmark and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let common = &args.common;
    let (bytes, stored) = (common.pick(128 << 20, 512 << 20), &args.stored);
    let targets = match stored.is_some() {
        true => over_store(&args, bytes)?,
        false => over_directory(&args)?,
    };
    // The files, and the kernel's cache of them over a mount, or a store's.
    let workspace = args.common.workspace(2 * WRITERS as u64 * bytes)?;
    let workspace = stored.put_below(workspace)?;
    // Some stores show no directory that is empty.
    workspace.fill("there", BLOCK as u64)?;
    let works = BLOCKS.map(|(block, name)| {
        let title = format!("{WRITERS} writers, {block} bytes at a time, with an fsync at the end");
        Work::new(format!("write-{name}"), title, Unit::MiB)
    });
    let (writers, _) = DISCARDED;
    let title = format!(
        "{writers} writers, 1 MiB at a time, with an fsync at the end, to a store that discards"
    );
    let discard = Work::new("discard-1m", title, Unit::MiB);
    let discard = Some(discard).filter(|_| !stored.is_some());
    let works = works.into_iter().chain(discard).collect();
    let settings = json!({"bytes": bytes, "writers": WRITERS, "memory": MEMORY});
    let round = |_, target: &Target, say: Say<'_>| {
        let (mut running, mut samples) = (None, Vec::new());
        for block in BLOCKS {
            interrupt::check()?;
            say(block.1);
            let server = match running.take() {
                Some(server) => server,
                None => target.start(&workspace)?,
            };
            let sample = one(&workspace, target, &server, block, bytes);
            samples.push(Some(sample.map_err(|e| server.blame(e))?));
            // A store has it all when the server has ended.
            running = Some(server).filter(|_| !stored.is_some());
            arrived(&workspace, block.1, bytes)?;
        }
        drop(running);
        if !stored.is_some() {
            say("discard");
            samples.push(discarded(&workspace, target, bytes)?);
        }
        Ok(samples)
    };
    common.measure("writeback", &targets, works, settings, round)
}
