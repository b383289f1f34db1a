//! `uvfs umount`.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rustix::io::Errno;
use uvfs_server::mount;

use crate::error::{Context, Error, Result};

const EXAMPLES: &str = "\
Examples:
  uvfs umount /mnt
  uvfs umount --lazy /mnt     out of the tree now, ended when its last user is gone

Exit status: 0 unmounted, 1 failed (in use: says by whom), 2 wrong usage.";

/// Unmount; also what a server that died left behind.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Take it out of the tree although it is in use
    #[arg(short, long)]
    lazy: bool,
    /// The mount point
    mountpoint: PathBuf,
}

/// The path without symbolic links, but without asking a server that may be dead: only the
/// directory that it is in is looked at.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    let name = || path.display().to_string();
    if let Ok(path) = path.canonicalize() {
        return Ok(path);
    }
    let full = std::path::absolute(path).context(name)?;
    match (full.parent(), full.file_name()) {
        (Some(parent), Some(last)) => Ok(parent.canonicalize().context(name)?.join(last)),
        _ => Ok(full),
    }
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let path = absolute(&args.mountpoint)?;
    let line = mount::mounted(&path).context(|| "/proc/self/mountinfo".into())?;
    match line.map(|line| line.kind) {
        None => {
            return Err(Error::new(format!(
                "{}: nothing is mounted here",
                path.display()
            )));
        }
        Some(kind) if !kind.starts_with("fuse") => {
            return Err(Error::new(format!(
                "{}: mounted as {kind}, not by uvfs (umount takes it away)",
                path.display()
            )));
        }
        Some(_) => {}
    }
    match mount::unmount(&path, args.lazy) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            let users = users(&path);
            let busy = error.raw_os_error() == Some(Errno::BUSY.raw_os_error());
            if !busy && users.is_empty() {
                return Err(Error::new(format!("{}: {error}", path.display())));
            }
            let by = if users.is_empty() {
                "by a process that can't be seen from here".to_owned()
            } else {
                format!("by {}", users.join(", "))
            };
            Err(Error::new(format!(
                "{}: in use {by} (end them, or use --lazy)",
                path.display()
            )))
        }
    }
}

/// Processes with something open, mapped or as their directory below the mount point.
fn users(mountpoint: &Path) -> Vec<String> {
    let below = |link: &Path| link.starts_with(mountpoint);
    let mut users = Vec::new();
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return users;
    };
    for process in processes.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let base = process.path();
        // Only links are read, so nothing here asks the file system itself.
        let mut links: Vec<PathBuf> = ["cwd", "root"].map(|name| base.join(name)).to_vec();
        for dir in ["fd", "map_files"] {
            links.extend(
                std::fs::read_dir(base.join(dir))
                    .into_iter()
                    .flatten()
                    .flatten()
                    .map(|entry| entry.path()),
            );
        }
        let uses = links
            .iter()
            .filter_map(|link| std::fs::read_link(link).ok())
            .map(|target| strip_deleted(&target))
            .any(|target| below(&target));
        if uses {
            let program = std::fs::read_to_string(base.join("comm")).unwrap_or_default();
            users.push(format!("{} (pid {pid})", program.trim()));
        }
    }
    users
}

/// /proc marks removed files.
fn strip_deleted(target: &Path) -> PathBuf {
    let bytes = target.as_os_str().as_bytes();
    let bytes = bytes.strip_suffix(b" (deleted)").unwrap_or(bytes);
    OsString::from_vec(bytes.to_vec()).into()
}
