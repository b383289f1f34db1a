//! `uvfs install-helper`: makes `mount -t fuse.uvfs` and fstab lines work.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
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

/// Whether somebody but root may put another file where `path` is. mount(8) runs the helper as root.
fn replaceable(path: &Path) -> io::Result<Option<PathBuf>> {
    for part in path.ancestors() {
        let meta = std::fs::metadata(part)?;
        let by_others = meta.mode() & 0o022 != 0;
        // In a directory with the sticky bit others can't rename root's files.
        let sticky = meta.is_dir() && meta.mode() & 0o1000 != 0;
        if meta.uid() != 0 || (by_others && !sticky) {
            return Ok(Some(part.to_owned()));
        }
    }
    Ok(None)
}

/// Runs it: a symbolic link to this program, which knows its job by the name it is called by.
pub fn run(args: Args) -> Result<ExitCode> {
    let program = std::env::current_exe().context(|| "this program's path".into())?;
    if !args.remove
        && let Some(part) = replaceable(&program).context(|| program.display().to_string())?
    {
        return Err(Error::new(format!(
            "{}: others than root may change {}, and mount(8) would run it as root; install uvfs where \
             only root may write (/usr/local/bin)",
            program.display(),
            part.display()
        )));
    }
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
