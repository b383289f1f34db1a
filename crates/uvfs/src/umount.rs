//! `uvfs umount`.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use uvfs_cli::{Context, Error, Result};
use uvfs_server::mount;

const EXAMPLES: &str = "\
Examples:
  uvfs umount /mnt
  uvfs umount --lazy /mnt     out of the tree now, ended when its last user is gone

Waits up to 5 seconds for the server to end too: afterwards its source can be
unmounted, checked or mounted again. With --lazy it does not wait.

Exit status: 0 unmounted, 1 failed (in use: says by whom), 2 wrong usage.";

/// How long a server may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

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
    let Some(line) = line else {
        return Err(Error::new(format!(
            "{}: nothing is mounted here",
            path.display()
        )));
    };
    if !line.kind.starts_with("fuse") {
        return Err(Error::new(format!(
            "{}: mounted as {}, not by uvfs (umount takes it away)",
            path.display(),
            line.kind
        )));
    }
    let servers = if args.lazy {
        Vec::new()
    } else {
        Server::all_of(&line.device)
    };
    match mount::unmount(&path, args.lazy) {
        Ok(()) => {
            let end = Instant::now() + ENDS_WITHIN;
            for server in servers {
                if !server.ends_by(end) {
                    let (path, pid) = (path.display(), server.pid);
                    eprintln!("uvfs: {path}: unmounted; its server (pid {pid}) has not ended yet");
                }
            }
            Ok(ExitCode::SUCCESS)
        }
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

/// A process of this command that serves a mount.
struct Server {
    pid: u32,
    process: OwnedFd,
}

impl Server {
    /// The mounts of a file system with this device number; none where an older kernel does not tell, or where they are
    /// another user's. No server is asked: it may be dead. Another program's server may go on after its mount.
    fn all_of(device: &str) -> Vec<Self> {
        let Some((_, minor)) = device.split_once(':') else {
            return Vec::new();
        };
        let mut servers = Vec::new();
        for pid in processes() {
            let base = PathBuf::from(format!("/proc/{pid}"));
            if !says(&base.join("comm"), "uvfs") {
                continue;
            }
            let Some(id) = Pid::from_raw(pid as i32).filter(|_| serves(pid, minor)) else {
                continue;
            };
            if let Ok(process) = pidfd_open(id, PidfdFlags::empty()) {
                servers.push(Self { pid, process });
            }
        }
        servers
    }

    fn ends_by(&self, end: Instant) -> bool {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok();
        let mut fds = [PollFd::new(&self.process, PollFlags::IN)];
        poll(&mut fds, left.as_ref()).is_ok_and(|ready| ready > 0)
    }
}

/// Whether a process serves the FUSE file system with this minor device number; false where an older kernel does not
/// tell, or where the process is another user's.
pub fn serves(pid: u32, minor: &str) -> bool {
    // A descriptor of /dev/fuse has this line (fuse_dev_show_fdinfo in the kernel's fs/fuse/dev.c).
    let line = format!("fuse_connection:\t{minor}");
    let infos = PathBuf::from(format!("/proc/{pid}/fdinfo"));
    entries(&infos).any(|info| says(&info, &line))
}

/// Whether a file of /proc has this line.
fn says(file: &Path, line: &str) -> bool {
    std::fs::read_to_string(file).is_ok_and(|text| text.lines().any(|own| own == line))
}

fn processes() -> impl Iterator<Item = u32> {
    entries(Path::new("/proc")).filter_map(|entry| entry.file_name()?.to_str()?.parse().ok())
}

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

/// Processes with something open, mapped or as their directory below the mount point.
fn users(mountpoint: &Path) -> Vec<String> {
    let below = |link: &Path| link.starts_with(mountpoint);
    let mut users = Vec::new();
    for pid in processes() {
        let base = PathBuf::from(format!("/proc/{pid}"));
        // Only links are read, so nothing here asks the file system itself.
        let links = ["cwd", "root"].map(|name| base.join(name)).into_iter();
        let uses = links
            .chain(entries(&base.join("fd")))
            .chain(entries(&base.join("map_files")))
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
