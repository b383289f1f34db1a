//! `uvfs cp`.

use std::ffi::OsStr;
use std::io::{self, BufWriter, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use uvfs_cli::{Error, Result};
use uvfs_xfs::tools::{self, Copied, Trust};

use super::{Access, Image};
use crate::confine;

const EXAMPLES: &str = "\
Examples:
  uvfs cp disk.img /etc/fstab .
  uvfs cp -r disk.img /home/ann /mnt/rescue
  uvfs cp -r disk.img / /mnt/everything
  uvfs cp disk.img '/etc/*.conf' /home/ann/keys .
  uvfs cp -r disk.img:/etc - | tar t

Goes into DEST under its own name if DEST is a directory (the contents of the root go straight
in), else becomes DEST. Holes, modes, owners, times, extended attributes, inode flags and hard links are
kept as far as the caller may set them. Nothing that exists is overwritten. What can't be copied is
reported, and copying goes on.

A path that does not exist and has * ? or [ ] is a pattern as a shell has them. To - goes a tar archive (pax), with owners
as numbers, extended attributes, hard links and holes; sockets are left out. Only into images nothing is copied:
uvfs mkfs --from makes one of an archive.

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
    /// Make no devices, and do not warn of it
    #[arg(long)]
    no_devices: bool,
    /// Take set-user-id and set-group-id bits and capabilities off, and do not warn of it
    #[arg(long)]
    no_suid: bool,
    #[command(flatten)]
    access: Access,
    /// The paths in the image to copy, or patterns of them, then where to: - is a tar archive on standard output.
    /// IMAGE:/PATH DEST stands for IMAGE PATH DEST
    #[arg(value_name = "PATH... DEST", required = true, num_args = 1.., value_hint = clap::ValueHint::AnyPath)]
    paths: Vec<PathBuf>,
}

/// The image and the path of `IMAGE:/PATH`, which stands for both.
fn split(argument: &Path) -> Option<(PathBuf, PathBuf)> {
    let bytes = super::bytes(argument);
    // Not the slashes of a URI.
    let at = (1..bytes.len()).rev().find(|at| {
        bytes[*at - 1] == b':' && bytes[*at] == b'/' && bytes.get(at + 1) != Some(&b'/')
    })?;
    let (image, path) = (&bytes[..at - 1], &bytes[at..]);
    let path_of = |bytes| PathBuf::from(OsStr::from_bytes(bytes));
    Some((path_of(image), path_of(path)))
}

/// Runs it.
pub fn run(mut args: Args) -> Result<ExitCode> {
    // There is at least one.
    let dest = args.paths.pop().unwrap_or_default();
    if args.paths.is_empty() {
        let both = split(&args.access.image);
        let (image, path) = both.ok_or_else(|| {
            Error::usage("the path in the image is missing: IMAGE PATH DEST, or IMAGE:/PATH DEST")
        })?;
        args.access.image = image;
        args.paths.push(path);
    }
    let to_output = dest.as_os_str() == "-";
    if to_output && io::stdout().is_terminal() {
        return Err(Error::usage("an archive is not written to a terminal"));
    }
    let image = Image::open(&args.access, |engine| match to_output {
        true => confine::reader(engine),
        false => confine::copier(&dest, engine),
    })?;
    let volume = image.volume();
    let mut from = Vec::new();
    for path in &args.paths {
        match tools::expand(volume, super::bytes(path)) {
            Ok(all) => from.extend(all),
            Err(error) => return image.finish(path, Err(error), |()| ExitCode::SUCCESS),
        }
    }
    for path in &from {
        let shown = Path::new(OsStr::from_bytes(path));
        match volume.resolve(path, false) {
            Ok(inode) if inode.is_dir() && !args.recursive => {
                let what = "a directory (-r copies it with all that is in it)";
                return Err(image.inside(shown, what));
            }
            Ok(_) => {}
            Err(error) => return image.finish(shown, Err(error), |()| ExitCode::SUCCESS),
        }
    }
    let shown = dest.display();
    if !to_output && !dest.is_dir() {
        if dest.symlink_metadata().is_ok() {
            let why = format!("{shown}: exists already (nothing is overwritten)");
            return Err(Error::new(why));
        }
        if from.len() > 1 {
            let why = format!("{shown}: not a directory, which several files need");
            return Err(Error::new(why));
        }
    }
    let report = &mut image.report();
    let trust = Trust {
        devices: args.trusted && !args.no_devices,
        rights: args.trusted && !args.no_suid,
    };
    let mut out = BufWriter::with_capacity(1 << 16, io::stdout().lock());
    let mut all = Copied::default();
    for path in &from {
        let copied = match to_output {
            true => tools::archive(volume, path, &mut out, trust, report),
            false => tools::copy_out(volume, path, &dest, trust, report),
        };
        match copied {
            Ok(copied) => all += copied,
            Err(error) => {
                let path = Path::new(OsStr::from_bytes(path));
                return image.finish(path, Err(error), |()| ExitCode::SUCCESS);
            }
        }
    }
    let finished = match to_output {
        true => tools::finish(&mut out),
        false => Ok(()),
    };
    image.finish(&args.paths[0], finished, |()| {
        let rights = "set-user-id bits, set-group-id bits and capabilities were taken off";
        for (count, asked, what) in [
            (
                all.devices_left_out,
                args.no_devices,
                "devices were not made",
            ),
            (all.rights_taken_off, args.no_suid, rights),
        ] {
            if count > 0 && !asked {
                let name = image.name.display();
                uvfs_cli::warn(format!("{name}: {count} {what} (--trusted copies them)"));
            }
        }
        if all.sockets_left_out > 0 {
            let (name, count) = (image.name.display(), all.sockets_left_out);
            uvfs_cli::warn(format!(
                "{name}: {count} sockets were left out (an archive has no place for them)"
            ));
        }
        let unasked = if args.no_devices {
            0
        } else {
            all.devices_left_out
        };
        super::status(all.errors + unasked)
    })
}
