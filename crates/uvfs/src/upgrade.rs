//! `uvfs upgrade`, and the keeper of a mount that outlives its server.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use clap::ValueHint;
use rustix::process::{Pid, Signal, kill_process};
use sd_notify::NotifyState;
use uvfs_cli::{Context, Error, Result, log};
use uvfs_server::mount::{self, MountLine};
use uvfs_server::stats::SurviveReport;
use uvfs_server::survive::{self, Keeper, Kept};

use crate::stats;
use crate::umount::absolute;

const EXAMPLES: &str = "\
Examples:
  uvfs upgrade /mnt
  uvfs upgrade --all    every mount of this user whose program was replaced

For a mount with -o survive: once the program was replaced, for instance by a new version of the package, this has the
mount served by the new one, with the options of the mount. No call of a program fails; calls wait for some
milliseconds. If the new program can't serve the mount, the old one goes on.

--all leaves alone what it is not for: mounts without -o survive, those of other users, and those that the program from
which they were started serves already. The Debian package calls it when it was upgraded.

Exit status: 0 the program that is installed now serves, 1 it does not (the log says why), 2 wrong usage. With --all the
others are upgraded all the same.";

/// Have a mount served by the program that is installed now.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print the version of the state that a server leaves to the next one
    #[arg(long, hide = true, exclusive = true)]
    state_version: bool,
    /// All mounts of this user whose program was replaced
    #[arg(short, long, conflicts_with = "mountpoint")]
    all: bool,
    /// The mount
    #[arg(required_unless_present_any = ["state_version", "all"], value_hint = ValueHint::DirPath)]
    mountpoint: Option<PathBuf>,
}

/// How long a new program may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.state_version {
        uvfs_cli::print(|out| writeln!(out, "{}", survive::VERSION))?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.all {
        return upgrade_all();
    }
    let mountpoint = args.mountpoint.unwrap_or_default();
    let name = mountpoint.display();
    let line = mount::mounted(&absolute(&mountpoint)?).context(|| name.to_string())?;
    if line.is_some_and(|line| !is_own(&line)) {
        return Err(Error::new(format!(
            "{name}: mounted by another user, who can have it upgraded"
        )));
    }
    let survive = stats::ask(&mountpoint)?.survive.ok_or_else(|| {
        Error::new(format!(
            "{name}: not mounted with -o survive (it has to be mounted again)"
        ))
    })?;
    Upgrade::of(&mountpoint, survive)?.run()?;
    Ok(ExitCode::SUCCESS)
}

/// Whether this user has mounted it: the kernel says so, while another user's server may say anything.
fn is_own(line: &MountLine) -> bool {
    let own = format!("user_id={}", rustix::process::geteuid().as_raw());
    line.file_system.split(',').any(|option| option == own)
}

/// Upgrades the mounts of this user whose program was replaced.
fn upgrade_all() -> Result<ExitCode> {
    let table = mount::table().context(|| "/proc/self/mountinfo".into())?;
    let mut seen = HashSet::new();
    let mut failed = None;
    for line in table {
        // One file system may be mounted at several places.
        if mount::subtype(&line.kind) == "uvfs" && is_own(&line) && seen.insert(line.device) {
            let upgraded = upgrade_if_replaced(&line.at);
            if let Err(error) = upgraded
                && let Some(earlier) = failed.replace(error)
            {
                uvfs_cli::complain(&earlier);
            }
        }
    }
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}

fn upgrade_if_replaced(mountpoint: &Path) -> Result<()> {
    let survive = stats::ask(mountpoint)?.survive;
    // The programs of other mounts don't let another one go on.
    let Some(survive) = survive.filter(|survive| survive.programs > 0) else {
        return Ok(());
    };
    let upgrade = Upgrade::of(mountpoint, survive)?;
    match upgrade.serves() {
        true => Ok(()),
        false => upgrade.run(),
    }
}

/// A mount that is to be served by another program.
struct Upgrade<'a> {
    mountpoint: &'a Path,
    keeper: Pid,
    /// The program that the keeper runs.
    exe: PathBuf,
    /// The one that is installed now.
    program: PathBuf,
    /// How many programs have served the mount.
    programs: u64,
}

impl<'a> Upgrade<'a> {
    fn of(mountpoint: &'a Path, survive: SurviveReport) -> Result<Self> {
        let keeper = Pid::from_raw(survive.keeper as i32)
            .ok_or_else(|| Error::new(format!("{}: its keeper is dead", mountpoint.display())))?;
        if survive.programs == 0 {
            return Err(Error::new(format!(
                "{}: the program that serves it does not let another one go on",
                mountpoint.display()
            )));
        }
        let exe = PathBuf::from(format!("/proc/{}/exe", survive.keeper));
        let program = installed(&exe).context(|| exe.display().to_string())?;
        Ok(Self {
            mountpoint,
            keeper,
            exe,
            program,
            programs: survive.programs,
        })
    }

    /// Whether the program that is installed now serves.
    fn serves(&self) -> bool {
        let file = |path: &Path| std::fs::metadata(path).map(|file| (file.dev(), file.ino()));
        match (file(&self.exe), file(&self.program)) {
            (Ok(now), Ok(installed)) => now == installed,
            _ => false,
        }
    }

    /// Whether another program has begun to serve. No server answers while one takes over from the other.
    fn is_done(&self) -> bool {
        let report = stats::ask(self.mountpoint).ok();
        let survive = report.and_then(|report| report.survive);
        survive.is_some_and(|survive| survive.programs > self.programs)
    }

    fn run(&self) -> Result<()> {
        let name = self.mountpoint.display();
        takes_over(&self.program).context(|| name.to_string())?;
        let keeper = self.keeper;
        kill_process(keeper, Signal::USR2).context(|| format!("{name}: the process {keeper}"))?;
        let end = Instant::now() + PATIENCE;
        while !self.is_done() {
            if Instant::now() > end {
                return Err(self.failed());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        match self.serves() {
            true => Ok(()),
            false => Err(self.failed()),
        }
    }

    fn failed(&self) -> Error {
        Error::new(format!(
            "{}: {} can't serve it, and the program from before goes on; the log of the mount says why",
            self.mountpoint.display(),
            self.program.display()
        ))
    }
}

/// The file from which a running program would be started now.
fn installed(exe: &Path) -> io::Result<PathBuf> {
    let path = std::fs::read_link(exe)?.into_os_string().into_vec();
    // The file that was replaced.
    let path = path.strip_suffix(b" (deleted)").unwrap_or(&path);
    Ok(Path::new(OsStr::from_bytes(path)).to_owned())
}

/// Whether a program runs, and takes over what this one leaves.
fn takes_over(program: &Path) -> io::Result<()> {
    let name = program.display();
    let reads = Command::new(program)
        .args(["upgrade", "--state-version"])
        .output();
    let reads = reads.map_err(|error| io::Error::other(format!("{name}: {error}")))?;
    let reads = String::from_utf8_lossy(&reads.stdout).trim().to_owned();
    let leaves = survive::VERSION.to_string();
    match reads == leaves {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "{name} takes over state of version {reads:?}, and this is {leaves}"
        ))),
    }
}

/// The variables that tell the next program of the mount point, the source, and the source's descriptors.
const AT: &str = "UVFS_KEPT_AT";
const SOURCE: &str = "UVFS_KEPT_SOURCE";
const ROOT: &str = "UVFS_KEPT_ROOT";

/// What a keeper of this command does.
pub struct Own<'a> {
    pub foreground: bool,
    pub at: &'a Path,
    pub source: &'a Path,
    /// Of the directory, or of the image and the device of its log.
    pub opened: &'a [RawFd],
}

impl Keeper for Own<'_> {
    const REPLACES: bool = true;

    fn ready(&mut self) {
        match self.foreground {
            // The process that systemd knows.
            true => drop(sd_notify::notify(&[NotifyState::Ready])),
            false => {
                let _ = rustix::process::setsid();
                log::to_system();
            }
        }
    }

    fn successor(&mut self) -> io::Result<Command> {
        let program = installed(Path::new("/proc/self/exe"))?;
        takes_over(&program)?;
        let mut command = Command::new(program);
        let mut args = std::env::args_os();
        if let Some(name) = args.next() {
            command.arg0(name);
        }
        command.args(args).env(AT, self.at).env(SOURCE, self.source);
        let opened: Vec<_> = self.opened.iter().map(RawFd::to_string).collect();
        command.env(ROOT, opened.join(","));
        Ok(command)
    }
}

/// What the program that this one replaces has kept.
pub struct Replaced {
    pub kept: Kept,
    pub at: PathBuf,
    pub source: PathBuf,
    /// As [`Own::opened`].
    pub opened: Vec<OwnedFd>,
}

/// What this program replaces, until it keeps the mount itself.
static REPLACED: Mutex<Option<Replaced>> = Mutex::new(None);

/// What this program replaces, if it does and does not keep the mount yet.
pub fn replaced() -> MutexGuard<'static, Option<Replaced>> {
    uvfs_sys::lock(&REPLACED)
}

/// Takes what the program that this one replaces has kept. To be called before this process opens anything.
///
/// # Errors
/// When this is not what it was told.
pub fn begin() -> io::Result<()> {
    let variable = |name| std::env::var_os(name);
    let (Some(at), Some(source), Some(root)) = (variable(AT), variable(SOURCE), variable(ROOT))
    else {
        return Ok(());
    };
    let numbers = root.to_string_lossy();
    let numbers: std::result::Result<Vec<RawFd>, _> = numbers.split(',').map(str::parse).collect();
    let numbers = numbers.map_err(|_| io::ErrorKind::InvalidInput)?;
    *replaced() = Kept::take(&numbers)?.map(|(kept, opened)| Replaced {
        kept,
        at: at.into(),
        source: source.into(),
        opened,
    });
    Ok(())
}

/// Goes back to the program that this one was to replace, if this one has failed to.
pub fn end() {
    if let Some(replaced) = replaced().take() {
        let error = replaced.kept.go_back();
        let _ = mount::unmount(&replaced.at, true);
        tracing::error!(%error, "{}: the mount ends", replaced.at.display());
    }
}
