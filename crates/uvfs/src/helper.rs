//! `uvfs install-helper`: makes `mount -t fuse.uvfs` and fstab lines work.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::error::{Context, Error, Result};

/// What mount(8) looks for.
pub const NAME: &str = "mount.fuse.uvfs";

const EXAMPLES: &str = "\
Examples:
  uvfs install-helper
  mount -t fuse.uvfs /srv/data /mnt -o ro,allow_other
  echo '/srv/data /mnt fuse.uvfs allow_other 0 0' >> /etc/fstab

Exit status: 0 installed, 1 failed, 2 wrong usage.";

/// Install the helper that mount(8) calls.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Where mount(8) looks for helpers
    #[arg(long, default_value = "/sbin")]
    dir: PathBuf,
    /// Take it away again
    #[arg(long)]
    remove: bool,
}

/// Runs it: a symbolic link to this program, which knows its job by the name it is called by.
pub fn run(args: Args) -> Result<ExitCode> {
    let program = std::env::current_exe().context(|| "this program's path".into())?;
    let link = args.dir.join(NAME);
    let name = || link.display().to_string();
    match std::fs::symlink_metadata(&link) {
        Ok(meta) if !meta.is_symlink() => {
            return Err(Error::new(format!(
                "{}: there is a file that is not ours",
                name()
            )));
        }
        Ok(_) => std::fs::remove_file(&link).context(name)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(Error::new(format!("{}: {error}", name()))),
    }
    if !args.remove {
        std::os::unix::fs::symlink(&program, &link).context(name)?;
    }
    Ok(ExitCode::SUCCESS)
}
