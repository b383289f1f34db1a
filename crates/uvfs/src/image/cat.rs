//! `uvfs cat`.

use std::path::PathBuf;
use std::process::ExitCode;

use uvfs_cli::Result;
use uvfs_xfs::tools;

use super::{Access, Image};
use crate::confine;

const EXAMPLES: &str = "\
Examples:
  uvfs cat disk.img /etc/fstab
  uvfs cat disk.img /var/lib/db.tar | tar t

Symbolic links are followed, inside the image.

Exit status: 0 written, 1 failed, 2 wrong usage.";

/// Write a file of an XFS image to standard output.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    access: Access,
    /// The file, or a pattern of several
    path: PathBuf,
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let image = Image::open(&args.access, confine::reader)?;
    let out = &mut std::io::stdout().lock();
    let volume = image.volume();
    let outcome = tools::expand(volume, super::bytes(&args.path)).and_then(|all| {
        all.iter()
            .try_for_each(|path| tools::cat(volume, path, out))
    });
    image.finish(&args.path, outcome, |()| ExitCode::SUCCESS)
}
