//! `uvfs cp`.

use std::path::PathBuf;
use std::process::ExitCode;

use uvfs_cli::{Error, Result};
use uvfs_xfs::tools;

use super::Access;

const EXAMPLES: &str = "\
Examples:
  uvfs cp disk.img /etc/fstab .
  uvfs cp -r disk.img /home/ann /mnt/rescue
  uvfs cp -r disk.img / /mnt/everything

Goes into DEST under its own name if DEST is a directory (the contents of the root go straight
in), else becomes DEST. Holes, modes, owners, times, extended attributes and hard links are kept
as far as the caller may set them. Nothing that exists is overwritten. What can't be copied is
reported, and copying goes on.

Exit status: 0 all copied, 1 something could not be copied, 2 wrong usage.";

/// Copy out of an XFS image.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directories with all that is in them
    #[arg(short, long)]
    recursive: bool,
    #[command(flatten)]
    access: Access,
    /// An image file or block device
    image: PathBuf,
    /// The path in the image to copy
    path: PathBuf,
    /// Where to
    dest: PathBuf,
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let volume = super::open(&args.image, &args.access)?;
    let path = super::bytes(&args.path);
    let inode = volume
        .resolve(path, false)
        .map_err(|error| super::inside(&args.image, &args.path, error))?;
    if inode.is_dir() && !args.recursive {
        let what = "a directory (-r copies it with all that is in it)";
        return Err(super::inside(&args.image, &args.path, what));
    }
    if args.dest.symlink_metadata().is_ok() && !args.dest.is_dir() {
        return Err(Error::new(format!(
            "{}: exists already (nothing is overwritten)",
            args.dest.display()
        )));
    }
    let report = &mut super::report(&args.image);
    let outcome = tools::copy_out(&volume, path, &args.dest, report);
    super::finish(&args.image, &args.path, outcome, |copied| {
        super::status(copied.errors)
    })
}
