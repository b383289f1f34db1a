//! `uvfs mkfs`: makes an XFS image, empty or filled from a directory, archives or a prototype.

mod owners;
mod xfs_options;

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::ValueHint;
use serde_json::json;
use uvfs_cli::{Context, Error, Progress, Result, size, warn};
use uvfs_io::engine::EngineKind;
use uvfs_xfs::format::format_uuid;
use uvfs_xfs::mkfs::source::{Contexts, Patterns, Rules};
use uvfs_xfs::mkfs::{
    Archive, From, Made, Margin, MkfsError, MkfsOptions, MkfsProgress, mkfs, mkfs_to, scratch,
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
  SOURCE_DATE_EPOCH=1700000000 uvfs mkfs --from rootfs disk.img
  uvfs mkfs --from rootfs --size auto --margin 64M --owner 0 --group 0 --exclude '*.o' disk.img
  uvfs mkfs --from rootfs --selinux-contexts file_contexts --size auto - | zstd >disk.img.zst

Needs no mount and no root, only the right to read the source and to write the image. The file system
is of version 5 with the features that mkfs.xfs 6.1 gives; its sizes are chosen as there, and the
options -b to -s, -K, -L, -N and -p are those of mkfs.xfs(8). Of features it takes those that mkfs.xfs switches on
by default, and refuses others by name.

With --from, names, types, modes, owners, times, hard and symbolic links, devices, FIFOs, sockets,
extended attributes, ACLs and holes are kept. Blocks that files share with each other (reflinks) are
copied for each. An image inside of the source is left out.

Archives are tar archives of any kind, plain or compressed by gzip, bzip2, xz or zstd. What becomes of them
is what GNU tar extracts as root with owners by number, ACLs and all attributes; what it would not extract is
refused. They are read as a whole first, into a temporary file beside the image. Of an image for several
platforms, that of this machine is taken. With several archives, and in an image, names that begin with .wh.
remove what lies below (whiteouts).

PATTERN is compared with paths that begin with ./, as in tar -C DIR -c --exclude=PATTERN . : with the whole and with
what follows each slash; * ? [ ] match slashes, too. One that begins with a slash begins at the root: /dev/*, not
dev/*, leaves out only what is in /dev. One that ends with a slash matches nothing. What --exclude and --include both
match is left out.

A size is taken from --size, from a device, or from a file that is not empty; otherwise it is what the
source needs with --margin to spare, at least 300M, as mkfs.xfs refuses less. --size auto takes less, down to 17M;
--size 16M has a single allocation group, which xfs_repair checks with -o force_geometry only.

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
  log_device  null if the log is in the image
  inodes      in use
  blocks, free_blocks (null of a dry run)
  dry_run     whether nothing was written
  bytes       of contents copied, in whole blocks
  changed_count  files that changed while they were copied
  changed     at most 1,000 of them: path, what
  engine, direct, seconds
  peak_memory in bytes, null where /proc is not mounted";

/// Exit status: made, but files changed while they were copied.
const CHANGED: u8 = 3;

/// The word of `--size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Size {
    /// What the source needs.
    Auto,
    Bytes(u64),
}

/// Options of the command.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n\n", JSON_HELP].concat())]
pub struct Args {
    /// Image file or block device; - is standard output
    #[arg(value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Fill it from this directory, tar archive, or image of layers (an OCI layout, or what docker saves); - is standard
    /// input. Of several archives, each is laid over those before it
    #[arg(long, value_name = "SOURCE", value_hint = ValueHint::AnyPath)]
    from: Vec<PathBuf>,
    /// Prototype of mkfs.xfs: a directory, or a file that lists what comes in; file=FILE, slashes_are_spaces=0|1
    #[arg(short = 'p', value_name = "PROTOTYPE", conflicts_with = "from")]
    prototype: Vec<String>,
    /// Leave out what matches, as tar --exclude does
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
    /// Leave out what matches a line of this file
    #[arg(short = 'X', long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    exclude_from: Vec<PathBuf>,
    /// Take only what matches, with all below, and the directories that lead there
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// Give all files this owner: a number, or a name in /etc/passwd
    #[arg(long, value_name = "USER")]
    owner: Option<String>,
    /// Give all files this group: a number, or a name in /etc/group
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// Give files other owners: lines of an old and a new one. --owner is for the rest
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    owner_map: Option<PathBuf>,
    /// Give files other groups: lines of an old and a new one. --group is for the rest
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    group_map: Option<PathBuf>,
    /// Map COUNT owners from FROM on to those from TO on; owners in no range are an error
    #[arg(long, value_name = "FROM:TO:COUNT")]
    map_users: Vec<String>,
    /// Map COUNT groups from FROM on to those from TO on; groups in no range are an error
    #[arg(long, value_name = "FROM:TO:COUNT")]
    map_groups: Vec<String>,
    /// Labels of SELinux by path, in the format of file_contexts(5)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    selinux_contexts: Option<PathBuf>,
    /// Size of the file system, such as 10G; auto: as small as the source allows, from 17M on
    #[arg(long, value_name = "SIZE", value_parser = sized)]
    size: Option<Size>,
    /// Without a size: room to spare, as a size or a part of the contents [default: 5%]
    #[arg(long, value_name = "SIZE|PERCENT%", value_parser = margin)]
    margin: Option<Margin>,
    /// Take the space for the whole image file now, instead of leaving holes in it
    #[arg(long)]
    whole: bool,
    /// Say what would be made, as mkfs.xfs -N does, and write nothing
    #[arg(long, short = 'N')]
    dry_run: bool,
    /// Overwrite what is there
    #[arg(long, short)]
    force: bool,
    /// The same input gives the same bytes: UUID and generation numbers follow from it, all times are
    /// the last change of contents, but not after SOURCE_DATE_EPOCH. So it is also if that is set
    #[arg(long)]
    reproducible: bool,
    /// Label, at most 12 bytes
    #[arg(short = 'L', long, value_name = "LABEL", default_value = "")]
    label: String,
    /// Block size: size=BYTES
    #[arg(short = 'b', value_name = "OPTIONS")]
    block: Vec<String>,
    /// Options of mkfs.xfs from a file: options=FILE
    #[arg(short = 'c', value_name = "OPTIONS")]
    configuration: Vec<String>,
    /// Data: agcount=N, agsize=BYTES, size=BYTES, sectsize=BYTES
    #[arg(short = 'd', value_name = "OPTIONS")]
    data: Vec<String>,
    /// Inodes: size=BYTES, perblock=N, maxpct=PERCENT
    #[arg(short = 'i', value_name = "OPTIONS")]
    inode: Vec<String>,
    /// Log: size=BYTES, logdev=FILE (another file or device for it)
    #[arg(short = 'l', value_name = "OPTIONS")]
    log: Vec<String>,
    /// Metadata: uuid=UUID
    #[arg(short = 'm', value_name = "OPTIONS")]
    metadata: Vec<String>,
    /// Directories: what mkfs.xfs makes by default
    #[arg(short = 'n', value_name = "OPTIONS")]
    naming: Vec<String>,
    /// Realtime section: what mkfs.xfs makes by default
    #[arg(short = 'r', value_name = "OPTIONS")]
    realtime: Vec<String>,
    /// Do not discard a device's blocks, which uvfs never does
    #[arg(short = 'K')]
    keep_blocks: bool,
    /// Sectors: size=BYTES
    #[arg(short = 's', value_name = "OPTIONS")]
    sector: Vec<String>,
    /// How to write: sync, aio or uring [default: uring, or what there is; sync with --buffered]
    #[arg(long, value_name = "ENGINE", value_parser = options::one_of(options::ENGINES, options::engine), hide_possible_values = true)]
    engine: Option<EngineKind>,
    /// Threads that read the source [default: four for each CPU, two for archives]
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

impl Args {
    /// The image goes to standard output.
    fn to_output(&self) -> bool {
        self.image.as_os_str() == "-"
    }
}

/// Reads the word of `--size`.
fn sized(word: &str) -> Result<Size, String> {
    match word {
        "auto" => Ok(Size::Auto),
        word => size(word).map(Size::Bytes),
    }
}

/// Reads the word of `--margin`.
fn margin(word: &str) -> Result<Margin, String> {
    let Some(percent) = word.strip_suffix('%') else {
        return size(word).map(Margin::Bytes);
    };
    let percent = percent.parse().ok().filter(|p| *p <= 10_000);
    let percent = percent.ok_or_else(|| format!("{word}: a part from 0% to 10000% is expected"));
    percent.map(Margin::Percent)
}

fn mkfs_options(args: &Args) -> Result<MkfsOptions> {
    let mut o = MkfsOptions {
        size: match args.size {
            Some(Size::Bytes(bytes)) => Some(bytes),
            _ => None,
        },
        smallest: args.size == Some(Size::Auto),
        margin: args.margin.unwrap_or_default(),
        whole: args.whole,
        dry_run: args.dry_run,
        rules: rules(args)?,
        label: args.label.clone().into_bytes(),
        force: args.force,
        reproducible: args.reproducible,
        buffered: args.buffered,
        engine: args.engine,
        threads: args.threads.map_or(0, |n| n as usize),
        ..MkfsOptions::default()
    };
    let given: [(char, &[String]); 9] = [
        ('c', &args.configuration),
        ('b', &args.block),
        ('d', &args.data),
        ('i', &args.inode),
        ('l', &args.log),
        ('m', &args.metadata),
        ('n', &args.naming),
        ('r', &args.realtime),
        ('s', &args.sector),
    ];
    xfs_options::take(&mut o, &given)?;
    if let Some(epoch) = std::env::var_os("SOURCE_DATE_EPOCH") {
        let no = || Error::usage("SOURCE_DATE_EPOCH is not a number of seconds");
        let epoch = epoch.to_str().and_then(|e| e.parse().ok());
        o.epoch = Some(epoch.ok_or_else(no)?);
        o.reproducible = true;
    }
    Ok(o)
}

/// What is changed about the source.
fn rules(args: &Args) -> Result<Rules> {
    let mut exclude = args.exclude.clone();
    for file in &args.exclude_from {
        let text = std::fs::read_to_string(file).context(|| file.display().to_string())?;
        exclude.extend(text.lines().filter(|l| !l.is_empty()).map(str::to_owned));
    }
    let patterns = |option: &str, given: &[String]| {
        Patterns::new(given).map_err(|e| Error::usage(format!("{option}: {e}")))
    };
    let contexts = args.selinux_contexts.as_ref().map(|file| {
        let read = Contexts::read(file);
        read.map_err(|(path, e)| Error::new(format!("{}: {e}", path.display())))
    });
    Ok(Rules {
        exclude: patterns("--exclude", &exclude)?,
        include: patterns("--include", &args.include)?,
        users: owners::USERS.owners(
            args.owner.as_deref(),
            args.owner_map.as_ref(),
            &args.map_users,
        )?,
        groups: owners::GROUPS.owners(
            args.group.as_deref(),
            args.group_map.as_ref(),
            &args.map_groups,
        )?,
        contexts: contexts.transpose()?.map(Arc::new),
    })
}

/// What the prototype on the command line is.
fn prototype(words: &[String]) -> Result<From> {
    let wrong = |word: &str, why: &str| Error::usage(format!("-p {word}: {why}"));
    let (mut file, mut slashes_are_spaces) = (None, false);
    for word in words.iter().flat_map(|w| w.split(',')) {
        match word.split_once('=') {
            None => file = Some(PathBuf::from(word)),
            Some(("file", path)) => file = Some(PathBuf::from(path)),
            Some(("slashes_are_spaces", "0" | "1")) => slashes_are_spaces = word.ends_with('1'),
            // Of a directory; they are always kept.
            Some(("atime", "1")) => {}
            Some(("atime", _)) => return Err(wrong(word, "times of access are always kept")),
            Some(_) => return Err(wrong(word, "there is no such option")),
        }
    }
    let file = file.ok_or_else(|| wrong("", "a file or a directory is missing"))?;
    Ok(match file.is_dir() {
        true => From::Directory(file),
        false => From::Prototype {
            file,
            slashes_are_spaces,
        },
    })
}

/// What the image is to be filled from.
fn source(args: &Args, log_device: Option<&Path>) -> Result<From> {
    let beside = match args.to_output() {
        true => std::env::temp_dir(),
        false => scratch(&args.image),
    };
    let confined = |layout| confine::maker(&args.image, log_device, &beside, layout);
    match &args.from[..] {
        [] if !args.prototype.is_empty() => return prototype(&args.prototype),
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
    let log_device = options.log_device.as_deref();
    let from = source(&args, log_device)?;
    let progress = MkfsProgress::default();
    let far = || {
        let (inodes, bytes) = progress.get();
        format!("{inodes} inodes, {} MiB", bytes >> 20)
    };
    if args.to_output() && args.json {
        let why = "--json: standard output takes the image; give a file for that";
        return Err(Error::usage(why));
    }
    if args.to_output() && std::io::stdout().is_terminal() {
        return Err(Error::usage("an image is not written to a terminal"));
    }
    let made = Progress::new(args.json || args.quiet).during(far, || match args.to_output() {
        true => mkfs_to(&mut io::stdout().lock(), &options, from, &progress),
        false => mkfs(&args.image, &options, from, &progress),
    });
    let made = made.map_err(|e| match &e {
        MkfsError::Options(_) => Error::usage(e.to_string()),
        MkfsError::Exists { .. } => Error::new(format!("{e} (--force overwrites it)")),
        MkfsError::Output(_) => Error::new(format!("standard output: {e}")),
        _ => Error::new(e.to_string()),
    })?;
    if args.json {
        uvfs_cli::json(&as_json(&args, log_device, &made, start))?;
    } else if args.dry_run && !args.quiet {
        let lines = geometry(&args.image, log_device, &made);
        uvfs_cli::print(|out| out.write_all(lines.as_bytes()))?;
    } else if !args.quiet && !args.to_output() {
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

fn as_json(
    args: &Args,
    log_device: Option<&Path>,
    made: &Made,
    start: Instant,
) -> serde_json::Value {
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
        "log_device": log_device.map(|path| path.display().to_string()),
        "blocks": sb.dblocks.get(),
        "free_blocks": (!args.dry_run).then(|| sb.fdblocks.get()),
        "inodes": made.inodes,
        "bytes": made.bytes,
        "changed_count": made.changed.count,
        "changed": made.changed.files.iter().map(|(path, what)| {
            json!({ "path": path.display().to_string(), "what": what })
        }).collect::<Vec<_>>(),
        "dry_run": args.dry_run,
        "engine": made.engine.name(),
        "direct": made.direct,
        "peak_memory": peak_memory(),
        "seconds": start.elapsed().as_secs_f64(),
    })
}

/// The sizes as mkfs.xfs tells them.
fn geometry(image: &Path, log_device: Option<&Path>, made: &Made) -> String {
    let sb = &made.superblock;
    let block = sb.blocksize.get();
    let directory = block << sb.dirblklog;
    // Log stripes of one byte stand for none.
    let stripe = sb.logsunit.get() / block;
    let log = log_device.map_or("internal log".into(), |path| path.display().to_string());
    format!(
        "meta-data={:<22} isize={:<6} agcount={}, agsize={} blks
         ={none:<22} sectsz={:<5} attr=2, projid32bit=1
         ={none:<22} crc=1        finobt=1, sparse=1, rmapbt=0
         ={none:<22} reflink=1    bigtime=1 inobtcount=1 nrext64=0
data     ={none:<22} bsize={:<6} blocks={}, imaxpct={}
         ={none:<22} sunit=0      swidth=0 blks
naming   =version 2              bsize={:<6} ascii-ci=0, ftype=1
log      ={log:<22} bsize={:<6} blocks={}, version=2
         ={none:<22} sectsz={:<5} sunit={} blks, lazy-count=1
realtime =none                   extsz={:<6} blocks=0, rtextents=0
",
        image.display(),
        sb.inodesize.get(),
        sb.agcount.get(),
        sb.agblocks.get(),
        sb.sectsize.get(),
        block,
        sb.dblocks.get(),
        sb.imax_pct,
        directory,
        block,
        sb.logblocks.get(),
        sb.sectsize.get(),
        stripe,
        sb.rextsize.get() * block,
        none = "",
    )
}
