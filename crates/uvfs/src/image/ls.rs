//! `uvfs ls`.

use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use uvfs_cli::Result;
use uvfs_xfs::Volume;
use uvfs_xfs::tools::{self, LsOptions, escape};

use super::{Access, Image};
use crate::confine;

const EXAMPLES: &str = "\
Examples:
  uvfs ls disk.img
  uvfs ls -lR disk.img /etc
  uvfs ls -a /dev/sdb1 /home
  uvfs ls disk.img '/etc/*.conf'
  uvfs ls -R --json disk.img / | jq '.entries[].path'

Owners are shown as numbers and times in UTC. On a terminal names are quoted as ls(1) quotes them; elsewhere they are
written as they are. Symbolic links are followed on the way, inside the image, but
not at the end.

Exit status: 0 listed, 1 something could not be read, 2 wrong usage.";

/// List a directory of an XFS image.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, disable_help_flag = true)]
pub struct Args {
    /// Mode, links, owner, group, size and modification time too
    #[arg(short)]
    long: bool,
    /// Directories below too
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Names that begin with a dot too
    #[arg(short, long)]
    all: bool,
    /// Sizes with K, M, G and so on, for powers of 1024
    #[arg(short = 'h', long)]
    human_readable: bool,
    /// One JSON object: version, path and entries, each with what uvfs stat --json has
    #[arg(long)]
    json: bool,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    #[command(flatten)]
    access: Access,
    /// The path to list, or a pattern of several (default: the root)
    #[arg(default_value = "/", hide_default_value = true)]
    path: PathBuf,
}

/// Writes the object entry by entry, so that a large listing takes no memory. An entry that cannot be read is reported.
fn as_json(
    volume: &Volume,
    args: &Args,
    paths: &[Vec<u8>],
    out: &mut dyn Write,
    report: &mut dyn FnMut(&Path, &uvfs_xfs::Error),
) -> uvfs_xfs::Result<u64> {
    let failed = |source| uvfs_xfs::Error::Output {
        what: "writing the listing".into(),
        source,
    };
    for path in paths {
        volume.resolve(path, false)?;
    }
    let path = json!(escape(super::bytes(&args.path)));
    let version = uvfs_cli::JSON_VERSION;
    write!(out, "{{\"version\":{version},\"path\":{path},\"entries\":[").map_err(failed)?;
    let (mut first, mut errors) = (true, 0);
    for listed in paths {
        let whole = paths.len() > 1;
        errors += tools::walk(
            volume,
            listed,
            args.recursive,
            &mut |path, inode| {
                let above = path == &listed[..] && inode.is_dir() && !whole;
                let mut names = path[listed.len()..].split(|b| *b == b'/');
                if above || (!args.all && names.any(|name| name.starts_with(b"."))) {
                    return Ok(());
                }
                let entry = super::stat::as_json(volume, path, inode)?;
                let comma = if std::mem::take(&mut first) { "" } else { "," };
                write!(out, "{comma}{entry}").map_err(failed)
            },
            report,
        )?;
    }
    writeln!(out, "]}}").map_err(failed)?;
    Ok(errors)
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let image = Image::open(&args.access, confine::reader)?;
    let options = LsOptions {
        long: args.long,
        recursive: args.recursive,
        heading: false,
        all: args.all,
        human: args.human_readable,
        quoted: std::io::stdout().is_terminal(),
    };
    let volume = image.volume();
    let mut out = BufWriter::with_capacity(1 << 16, std::io::stdout().lock());
    let listed = tools::expand(volume, super::bytes(&args.path)).and_then(|all| {
        let mut errors = 0;
        let options = LsOptions {
            heading: all.len() > 1,
            ..options
        };
        if args.json {
            return as_json(volume, &args, &all, &mut out, &mut image.report());
        }
        for path in &all {
            errors += tools::ls(volume, path, options, &mut out, &mut image.report())?;
        }
        Ok(errors as u64)
    });
    let written = out.flush().map_err(|source| uvfs_xfs::Error::Output {
        what: "writing the listing".into(),
        source,
    });
    let outcome = listed.and_then(|errors| written.map(|()| errors));
    image.finish(&args.path, outcome, super::status)
}
