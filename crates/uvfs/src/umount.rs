//! `uvfs umount`.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use uvfs_cli::{Context, Error, Result};
use uvfs_server::mount::users::{entries, processes, users};
use uvfs_server::mount::{self, Mount};

use crate::daemon::ended_by;

const EXAMPLES: &str = "\
Examples:
  uvfs umount /mnt
  uvfs umount /mnt/a /mnt/b
  uvfs umount --all           every mount of uvfs that this command can see
  uvfs umount --lazy /mnt     out of the tree now, ended when its last user is gone
  uvfs umount --force /mnt    its users get errors

Waits up to 5 seconds for the server to end too: afterwards its source can be
unmounted, checked or mounted again. With --lazy it does not wait. The server of an
object store has until the store takes nothing more (-o timeout=): what programs
wrote goes there first. What is left stays in the cache for the next mount.

--force ends the connection with the server: calls under way and all later ones
fail, and what the kernel has not written yet (-o writeback) is lost. It is for a
server that hangs; --lazy loses nothing. An object store's server is killed, and the
next mount puts what it did not.

Exit status: 0 all are unmounted, 1 one of them is not (in use: says by whom), 2 wrong
usage. The others are unmounted all the same.";

/// How long a server may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// How long a mount may be in use by what can't be seen. A process that ends is seen to have no files before the
/// kernel has closed them.
const LETS_GO_WITHIN: Duration = Duration::from_secs(2);

/// Unmount; also what a server that died left behind.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Take it out of the tree although it is in use
    #[arg(short, long)]
    lazy: bool,
    /// End the connection with the server, and unmount
    #[arg(short, long)]
    force: bool,
    /// All mounts of uvfs, the last one first
    #[arg(short, long, conflicts_with = "mountpoints")]
    all: bool,
    /// Print the processes that use the file system with this device number: [`users_by_child`]
    #[arg(long, hide = true, value_name = "MAJOR:MINOR", exclusive = true)]
    users_of: Option<String>,
    /// The mount points
    #[arg(required_unless_present_any = ["all", "users_of"], value_name = "MOUNTPOINT")]
    mountpoints: Vec<PathBuf>,
}

/// [`mount::real_path`], with an error that names the path.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    mount::real_path(path).context(|| path.display().to_string())
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    if let Some(device) = &args.users_of {
        println!("{}", mount::list(&users(device), &[]));
        return Ok(ExitCode::SUCCESS);
    }
    let mountpoints = match args.all {
        true => all()?,
        false => args.mountpoints.clone(),
    };
    let mut failed = None;
    for mountpoint in &mountpoints {
        if let Err(error) = unmount(mountpoint, &args)
            && let Some(earlier) = failed.replace(error)
        {
            uvfs_cli::complain(&earlier);
        }
    }
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// The processes that use a mount, for its server. A server has given up the capability to look into other processes,
/// which a child of root gets again.
pub fn users_by_child(mount: &Mount) -> String {
    let child = Command::new("/proc/self/exe")
        .args(["umount", "--users-of", mount.number()])
        .output();
    match child {
        Ok(output) if output.status.success() && mount::mounts_below(mount.at()).is_empty() => {
            String::from_utf8_lossy(output.stdout.trim_ascii_end()).into_owned()
        }
        _ => mount.users(),
    }
}

/// Where uvfs is mounted, the last mount first: one may be in another.
fn all() -> Result<Vec<PathBuf>> {
    let table = mount::table().context(|| "/proc/self/mountinfo".into())?;
    let own = |line: &mount::MountLine| {
        mount::subtype(&line.kind) == "uvfs" || !Server::all_of(&line.device).is_empty()
    };
    let fuse = table
        .into_iter()
        .filter(|line| line.kind.starts_with("fuse") && own(line));
    Ok(fuse.map(|line| line.at).rev().collect())
}

fn unmount(mountpoint: &Path, args: &Args) -> Result<()> {
    let path = absolute(mountpoint)?;
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
    // An object store's server goes on until the store has what programs wrote.
    let is_store = line.source.contains("://");
    let waiting = match is_store && !args.force && !args.lazy {
        true => changes_waiting(&path),
        false => 0,
    };
    let servers = match args.lazy && !args.force {
        true => Vec::new(),
        false => Server::all_of(&line.device),
    };
    if args.force {
        mount::abort(&line.device).context(|| path.display().to_string())?;
    }
    take_away(&path, &line.device, args.lazy || args.force)?;
    if waiting > 0 {
        let path = path.display();
        uvfs_cli::warn(format!(
            "{path}: {waiting} changes are on their way to the store: waiting"
        ));
    }
    let end = Instant::now() + ENDS_WITHIN;
    for server in servers {
        if is_store {
            // What is written is in the cache, and the next mount goes on with it.
            if args.force {
                let _ = pidfd_send_signal(&server.process, Signal::KILL);
            }
            while !ended_by(&server.process, Instant::now() + ENDS_WITHIN) {}
        }
        if !ended_by(&server.process, end) {
            let (path, pid) = (path.display(), server.pid);
            let what = format!("{path}: unmounted; its server (pid {pid}) has not ended yet");
            uvfs_cli::warn(what);
        }
    }
    Ok(())
}

/// How many changes the store of a mount does not have; 0 where the server does not say.
fn changes_waiting(path: &Path) -> u64 {
    let report = crate::stats::ask(path).ok();
    let counts = report.map(|report| report.counts).unwrap_or_default();
    let waiting = counts
        .iter()
        .find(|one| one.name == "store_changes_waiting");
    waiting.map_or(0, |one| one.count)
}

/// Unmounts. If that fails because the mount is in use, the error says by whom.
fn take_away(path: &Path, device: &str, lazily: bool) -> Result<()> {
    let end = Instant::now() + LETS_GO_WITHIN;
    loop {
        let Err(error) = mount::unmount(path, lazily) else {
            return Ok(());
        };
        let (users, below) = (users(device), mount::mounts_below(path));
        let busy = error.raw_os_error() == Some(Errno::BUSY.raw_os_error());
        let used = !users.is_empty() || !below.is_empty();
        if busy && !used && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        let path = path.display();
        return Err(Error::new(match busy || used {
            true => {
                let by = mount::list(&users, &below);
                format!("{path}: in use by {by} (end them, or use --lazy)")
            }
            false => format!("{path}: {error}"),
        }));
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
