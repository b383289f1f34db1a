//! `uvfs mkfs`: makes an XFS image, empty or filled from a directory.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::ValueHint;
use serde_json::json;
use uvfs_cli::{Error, Progress, Result, size, warn};
use uvfs_io::engine::EngineKind;
use uvfs_xfs::format::format_uuid;
use uvfs_xfs::mkfs::{
    Archive, From, Made, MkfsError, MkfsOptions, MkfsProgress, mkfs, parse_uuid, scratch,
};
use uvfs_xfs::tools::escape;

use crate::check::peak_memory;
use crate::{confine, options};

const EXAMPLES: &str = "\
Examples:
  uvfs mkfs --size 10G disk.img
  uvfs mkfs --from rootfs disk.img                 as large as the contents need
  uvfs mkfs --from rootfs --size 4G -L root disk.img
  docker export box | uvfs mkfs --from - disk.img
  docker save debian | uvfs mkfs --from - disk.img
  uvfs mkfs --from base.tar.zst --from changes.tar disk.img
  uvfs mkfs -f -b size=4096 -d agcount=8 -m uuid=6f5e3c1a-0a3f-4a68-9a3f-3f4b5a9f3a10 /dev/sdb1
  SOURCE_DATE_EPOCH=1700000000 uvfs mkfs --reproducible --from rootfs disk.img

Needs no mount and no root, only the right to read the source and to write the image. The file system
is of version 5 with the features that mkfs.xfs 6.1 gives; its sizes are chosen as there, and the
options -b, -d, -i, -l, -m, -s and -L are those of mkfs.xfs(8).

With --from, names, types, modes, owners, times, hard and symbolic links, devices, FIFOs, sockets,
extended attributes, ACLs and holes are kept. Blocks that files share with each other (reflinks) are
copied for each. An image inside of the source is left out.

Archives are tar archives of any kind, plain or compressed by gzip, bzip2, xz or zstd. What becomes of them
is what GNU tar extracts as root with owners by number, ACLs and all attributes; what it would not extract is
refused. They are read as a whole first, into a temporary file beside the image. Of an image for several
platforms, that of this machine is taken. With several archives, and in an image, names that begin with .wh.
remove what lies below (whiteouts).

A size is taken from --size, from a device, or from a file that is not empty; otherwise it is what the
source needs with a twentieth to spare, at least 300M.

Existing contents are not overwritten without --force, but the remains of an interrupted mkfs are. The
superblock is completed last: until then no program takes the image for a file system.

A file that other programs remove, replace or cut off while it is copied is reported; zeros stand for
what is gone.

Exit status: 0 made; 1 failure (a file that was not there before is removed); 2 wrong usage; 3 made, but
files changed while they were copied.";

const JSON_HELP: &str = "\
JSON: one object with
  image, uuid, label, size, block_size, sector_size, inode_size
  agcount, agblocks, log_blocks
  inodes      in use
  free_blocks, blocks
  bytes       of contents copied, in whole blocks
  changed_count  files that changed while they were copied
  changed     at most 1,000 of them: path, what
  engine, direct, seconds
  peak_memory in bytes, null where /proc is not mounted";

/// Exit status: made, but files changed while they were copied.
const CHANGED: u8 = 3;

/// Options of the command.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n\n", JSON_HELP].concat())]
pub struct Args {
    /// Image file or block device
    #[arg(value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Fill it from this directory, tar archive, or image of layers (an OCI layout, or what docker saves); - is standard
    /// input. Of several archives, each is laid over those before it
    #[arg(long, value_name = "SOURCE", value_hint = ValueHint::AnyPath)]
    from: Vec<PathBuf>,
    /// Size of the file system, such as 10G
    #[arg(long, value_name = "SIZE", value_parser = size)]
    size: Option<u64>,
    /// Overwrite what is there
    #[arg(long, short)]
    force: bool,
    /// The same input gives the same bytes: UUID and generation numbers follow from it, all times are
    /// the last change of contents, but not after SOURCE_DATE_EPOCH
    #[arg(long)]
    reproducible: bool,
    /// Label, at most 12 bytes
    #[arg(short = 'L', long, value_name = "LABEL", default_value = "")]
    label: String,
    /// Block size: size=BYTES
    #[arg(short = 'b', value_name = "OPTIONS")]
    block: Vec<String>,
    /// Data: agcount=N, agsize=BYTES, size=BYTES, sectsize=BYTES
    #[arg(short = 'd', value_name = "OPTIONS")]
    data: Vec<String>,
    /// Inodes: size=BYTES, maxpct=PERCENT
    #[arg(short = 'i', value_name = "OPTIONS")]
    inode: Vec<String>,
    /// Log: size=BYTES
    #[arg(short = 'l', value_name = "OPTIONS")]
    log: Vec<String>,
    /// Metadata: uuid=UUID
    #[arg(short = 'm', value_name = "OPTIONS")]
    metadata: Vec<String>,
    /// Sectors: size=BYTES
    #[arg(short = 's', value_name = "OPTIONS")]
    sector: Vec<String>,
    /// How to write: sync, aio or uring [default: uring, or what there is; sync with --buffered]
    #[arg(long, value_name = "ENGINE", value_parser = options::one_of(options::ENGINES, options::engine), hide_possible_values = true)]
    engine: Option<EngineKind>,
    /// Threads that read the source [default: four for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Write through the kernel's page cache instead of past it
    #[arg(long)]
    buffered: bool,
    /// Say nothing but errors
    #[arg(long, short)]
    quiet: bool,
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
}

/// The `key=value` parts of one of the options of mkfs.xfs.
fn parts(option: char, given: &[String]) -> Result<Vec<(&str, &str)>> {
    let part = |p: &'_ str| Error::usage(format!("-{option} {p}: NAME=VALUE is expected"));
    given
        .iter()
        .flat_map(|g| g.split(','))
        .map(|p| p.split_once('=').ok_or_else(|| part(p)))
        .collect()
}

fn bytes(option: char, name: &str, value: &str) -> Result<u64> {
    size(value).map_err(|e| Error::usage(format!("-{option} {name}={value}: {e}")))
}

fn number<T: std::str::FromStr>(option: char, name: &str, value: &str) -> Result<T> {
    let no = || Error::usage(format!("-{option} {name}={value}: not such a number"));
    value.parse().map_err(|_| no())
}

/// A size that has to fit into 32 bits.
fn small(option: char, name: &str, value: &str) -> Result<u32> {
    let n = bytes(option, name, value)?;
    u32::try_from(n).map_err(|_| Error::usage(format!("-{option} {name}={value}: too much")))
}

fn mkfs_options(args: &Args) -> Result<MkfsOptions> {
    let mut o = MkfsOptions {
        size: args.size,
        label: args.label.clone().into_bytes(),
        force: args.force,
        reproducible: args.reproducible,
        buffered: args.buffered,
        engine: args.engine,
        threads: args.threads.map_or(0, |n| n as usize),
        ..MkfsOptions::default()
    };
    let given = [
        ('b', &args.block),
        ('d', &args.data),
        ('i', &args.inode),
        ('l', &args.log),
        ('m', &args.metadata),
        ('s', &args.sector),
    ];
    for (option, list) in given {
        for (name, value) in parts(option, list)? {
            match (option, name) {
                ('b', "size") => o.block_size = small(option, name, value)?,
                ('d', "agcount") => o.agcount = Some(number(option, name, value)?),
                ('d', "agsize") => o.agsize = Some(bytes(option, name, value)?),
                ('d', "size") => o.size = Some(bytes(option, name, value)?),
                ('d', "sectsize") | ('s', "size") => o.sector_size = small(option, name, value)?,
                ('i', "size") => o.inode_size = small(option, name, value)?,
                ('i', "maxpct") => o.max_pct = Some(number(option, name, value)?),
                ('l', "size") => o.log_size = Some(bytes(option, name, value)?),
                ('m', "uuid") => {
                    let no = || Error::usage(format!("-m uuid={value}: not a UUID"));
                    o.uuid = Some(parse_uuid(value).ok_or_else(no)?);
                }
                _ => {
                    let why = format!("-{option} {name}: there is no such option");
                    return Err(Error::usage(why));
                }
            }
        }
    }
    if o.reproducible
        && let Some(epoch) = std::env::var_os("SOURCE_DATE_EPOCH")
    {
        let no = || Error::usage("SOURCE_DATE_EPOCH is not a number of seconds");
        let epoch = epoch.to_str().and_then(|e| e.parse().ok());
        o.epoch = Some(epoch.ok_or_else(no)?);
    }
    Ok(o)
}

/// What the image is to be filled from.
fn source(args: &Args) -> Result<From> {
    let confined = |layout| confine::maker(&args.image, &scratch(&args.image), layout);
    match &args.from[..] {
        [] => return Ok(From::Nothing),
        [dir] if dir.is_dir() => {
            // Its layers may come from anywhere.
            let marks = ["oci-layout", "index.json"];
            if marks.iter().all(|name| dir.join(name).exists()) {
                confined(Some(dir));
            }
            return Ok(From::Directory(dir.clone()));
        }
        _ => {}
    }
    let mut archives = Vec::with_capacity(args.from.len());
    for path in &args.from {
        let shown = || escape(path.as_os_str().as_bytes());
        if path.is_dir() {
            let why = "a directory has to be the only source; make an archive of it for several (tar -C DIR -c .)";
            return Err(Error::usage(format!("--from {}: {why}", shown())));
        }
        let standard_input = path.as_os_str() == "-";
        let opened =
            || File::open(path).map_err(|e| Error::new(format!("{}: opening it: {e}", shown())));
        archives.push(Archive {
            name: match standard_input {
                true => "standard input".into(),
                false => path.clone(),
            },
            from: match standard_input {
                true => Box::new(io::stdin()),
                false => Box::new(opened()?),
            },
        });
    }
    confined(None);
    Ok(From::Archives(archives))
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let start = Instant::now();
    let options = mkfs_options(&args)?;
    let from = source(&args)?;
    let progress = MkfsProgress::default();
    let far = || {
        let (inodes, bytes) = progress.get();
        format!("{inodes} inodes, {} MiB", bytes >> 20)
    };
    let made = Progress::new(args.json || args.quiet)
        .during(far, || mkfs(&args.image, &options, from, &progress));
    let made = made.map_err(|e| match &e {
        MkfsError::Options(_) => Error::usage(e.to_string()),
        _ => Error::new(e.to_string()),
    })?;
    if args.json {
        uvfs_cli::json(&as_json(&args, &made, start))?;
    } else if !args.quiet {
        let sb = &made.superblock;
        let line = format!(
            "{}: XFS {}, {} blocks of {} bytes, {} allocation groups, a log of {} blocks, {} inodes",
            args.image.display(),
            format_uuid(&sb.uuid),
            sb.dblocks,
            sb.blocksize,
            sb.agcount,
            sb.logblocks,
            made.inodes,
        );
        uvfs_cli::print(|out| writeln!(out, "{line}"))?;
    }
    if made.changed.count == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    for (path, what) in &made.changed.files {
        warn(format!(
            "warning: {}: {what}",
            escape(path.as_os_str().as_bytes())
        ));
    }
    let more = made.changed.count - made.changed.files.len() as u64;
    if more > 0 {
        warn(format!(
            "warning: {more} more changes of files while they were copied"
        ));
    }
    Ok(ExitCode::from(CHANGED))
}

fn as_json(args: &Args, made: &Made, start: Instant) -> serde_json::Value {
    let sb = &made.superblock;
    json!({
        "image": args.image.display().to_string(),
        "uuid": format_uuid(&sb.uuid),
        "label": args.label,
        "size": sb.dblocks.get() * u64::from(sb.blocksize.get()),
        "block_size": sb.blocksize.get(),
        "sector_size": sb.sectsize.get(),
        "inode_size": sb.inodesize.get(),
        "agcount": sb.agcount.get(),
        "agblocks": sb.agblocks.get(),
        "log_blocks": sb.logblocks.get(),
        "blocks": sb.dblocks.get(),
        "free_blocks": sb.fdblocks.get(),
        "inodes": made.inodes,
        "bytes": made.bytes,
        "changed_count": made.changed.count,
        "changed": made.changed.files.iter().map(|(path, what)| {
            json!({ "path": path.display().to_string(), "what": what })
        }).collect::<Vec<_>>(),
        "engine": made.engine.name(),
        "direct": made.direct,
        "peak_memory": peak_memory(),
        "seconds": start.elapsed().as_secs_f64(),
    })
}
