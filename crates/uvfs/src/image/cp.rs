//! `uvfs cp`.

use std::path::PathBuf;
use std::process::ExitCode;

use uvfs_cli::{Error, Result};
use uvfs_xfs::tools::{self, Trust};

use super::{Access, Image};
use crate::confine;

const EXAMPLES: &str = "\
Examples:
  uvfs cp disk.img /etc/fstab .
  uvfs cp -r disk.img /home/ann /mnt/rescue
  uvfs cp -r disk.img / /mnt/everything

Goes into DEST under its own name if DEST is a directory (the contents of the root go straight
in), else becomes DEST. Holes, modes, owners, times, extended attributes, inode flags and hard links are
kept as far as the caller may set them. Nothing that exists is overwritten. What can't be copied is
reported, and copying goes on.

An image may hold devices, and programs that run with another user's rights. No device is made, and
set-user-id and set-group-id bits and capabilities are taken off, unless --trusted says otherwise.

Exit status: 0 all copied, 1 something was not copied, 2 wrong usage.";

/// Copy out of an XFS image.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directories with all that is in them
    #[arg(short, long)]
    recursive: bool,
    /// Copy devices, set-user-id and set-group-id bits, and capabilities too
    #[arg(long)]
    trusted: bool,
    #[command(flatten)]
    access: Access,
    /// The path in the image to copy
    path: PathBuf,
    /// Where to
    #[arg(value_hint = clap::ValueHint::AnyPath)]
    dest: PathBuf,
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let image = Image::open(&args.access, |engine| confine::copier(&args.dest, engine))?;
    let volume = image.volume();
    let path = super::bytes(&args.path);
    let inode = match volume.resolve(path, false) {
        Ok(inode) => inode,
        Err(error) => return image.finish(&args.path, Err(error), |()| ExitCode::SUCCESS),
    };
    if inode.is_dir() && !args.recursive {
        let what = "a directory (-r copies it with all that is in it)";
        return Err(image.inside(&args.path, what));
    }
    if args.dest.symlink_metadata().is_ok() && !args.dest.is_dir() {
        return Err(Error::new(format!(
            "{}: exists already (nothing is overwritten)",
            args.dest.display()
        )));
    }
    let report = &mut image.report();
    let trust = match args.trusted {
        true => Trust::Trusted,
        false => Trust::Untrusted,
    };
    let outcome = tools::copy_out(volume, path, &args.dest, trust, report);
    image.finish(&args.path, outcome, |copied| {
        let left = [
            (copied.devices_left_out, "devices were not made"),
            (
                copied.rights_taken_off,
                "set-user-id bits, set-group-id bits and capabilities were taken off",
            ),
        ];
        for (count, what) in left.iter().filter(|(count, _)| *count > 0) {
            let name = image.name.display();
            uvfs_cli::warn(format!("{name}: {count} {what} (--trusted copies them)"));
        }
        super::status(copied.errors + copied.devices_left_out)
    })
}
