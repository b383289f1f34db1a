//! `uvfs ls`.

use std::io::{BufWriter, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use uvfs_cli::Result;
use uvfs_xfs::tools::{self, LsOptions};

use super::{Access, Image};
use crate::confine;

const EXAMPLES: &str = "\
Examples:
  uvfs ls disk.img
  uvfs ls -lR disk.img /etc
  uvfs ls -a /dev/sdb1 /home

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
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    #[command(flatten)]
    access: Access,
    /// The path to list (default: the root)
    #[arg(default_value = "/", hide_default_value = true)]
    path: PathBuf,
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let image = Image::open(&args.access, confine::reader)?;
    let options = LsOptions {
        long: args.long,
        recursive: args.recursive,
        all: args.all,
        human: args.human_readable,
        quoted: std::io::stdout().is_terminal(),
    };
    let mut out = BufWriter::with_capacity(1 << 16, std::io::stdout().lock());
    let listed = tools::ls(
        image.volume(),
        super::bytes(&args.path),
        options,
        &mut out,
        &mut image.report(),
    );
    let written = out.flush().map_err(|source| uvfs_xfs::Error::Output {
        what: "writing the listing".into(),
        source,
    });
    let outcome = listed.and_then(|errors| written.map(|()| errors));
    image.finish(&args.path, outcome, |errors| super::status(errors as u64))
}
