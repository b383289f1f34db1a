//! Shared by all tests: scratch directories, running programs with a deadline, and the mount.
//!
//! | variable | meaning |
//! |---|---|
//! | `UVFS_TEST_DIR` | where scratch directories are made (default: the temporary directory) |
//! | `UVFS_TEST_TOOLS` | where `pjdfstest` and `fsx` are (default: `target/tools/bin`) |
//! | `UVFS_TEST_FULL` | run the long variants |
//! | `UVFS_TEST_CELLS` | words that the cells of `run_around` must have, to run only some of them |
//! | `UVFS_TEST_SERVER` | a shell command that serves in the foreground instead of `uvfs`, with `{options}`, `{source}`, `{mountpoint}` and `{uring}` replaced |
//! | `UVFS_TEST_SERVER_URING` | what `{uring}` becomes on the uring transport; without it that transport is skipped |
//! | `UVFS_TEST_NO_IO_URING` | every program is refused io_uring, as in a container: with 1, EPERM, ENOSYS or ENOMEM |
//! | `CI` | a missing requirement fails the test instead of skipping it |

#[path = "harness/sandbox.rs"]
pub mod sandbox;
#[path = "harness/serve.rs"]
mod serve;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::{Pid, Signal};

pub use serve::*;
pub use uvfs_testing::full;

/// For everything that should take seconds: generous, as the machine may be loaded.
pub const SOON: Duration = Duration::from_secs(90);
/// A change of the host's that a mount did not show by then is never shown.
pub const SEEN: Duration = Duration::from_secs(20);
/// For what takes a minute or so by itself.
pub const LATER: Duration = Duration::from_secs(420);

/// The two ways in which the kernel's requests reach the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// /dev/fuse.
    Dev,
    /// FUSE-over-io_uring.
    Uring,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Dev => "dev",
            Transport::Uring => "uring",
        })
    }
}

/// Something that a test cannot do without.
#[derive(Clone, Copy, Debug)]
pub enum Need {
    /// A mount over this transport; implies root and /dev/fuse.
    Mount(Transport),
    /// A program on the PATH.
    Program(&'static str),
    /// A program that `./test` installs into `target/tools`.
    Tool(&'static str),
    /// The command itself, not a server that stands in for it.
    Uvfs,
}

impl Need {
    fn missing(self) -> Option<String> {
        match self {
            Need::Mount(Transport::Dev) => uvfs_testing::Need::Fuse.missing(),
            Need::Mount(Transport::Uring) if sandbox::no_io_uring().is_some() => {
                Some("io_uring, which UVFS_TEST_NO_IO_URING refuses".into())
            }
            Need::Mount(Transport::Uring) => uvfs_testing::Need::Uring.missing().or_else(|| {
                let without = std::env::var_os("UVFS_TEST_SERVER_URING").is_none();
                (substitute().is_some() && without).then(|| "UVFS_TEST_SERVER_URING".into())
            }),
            Need::Program(name) => uvfs_testing::Need::Program(name).missing(),
            Need::Tool(name) => (!tool(name).exists()).then(|| format!("{name}, run ./test")),
            Need::Uvfs => substitute()
                .is_some()
                .then(|| "uvfs itself, not UVFS_TEST_SERVER".into()),
        }
    }
}

/// Whether the machine has all of this. If it lacks something, the test has to end; in CI it fails, unless another
/// server is tested, which need not have everything.
pub fn has(needs: &[Need]) -> bool {
    let missing = needs.iter().find_map(|need| need.missing());
    match &missing {
        Some(missing) if substitute().is_some() || sandbox::no_io_uring().is_some() => {
            uvfs_testing::say(format_args!("needs {missing}"));
        }
        Some(missing) => uvfs_testing::skip(format_args!("needs {missing}")),
        None => {}
    }
    missing.is_none()
}

/// The transports that there are here.
pub fn transports() -> impl Iterator<Item = Transport> {
    [Transport::Dev, Transport::Uring]
        .into_iter()
        .filter(|transport| has(&[Need::Mount(*transport)]))
}

fn substitute() -> Option<String> {
    std::env::var("UVFS_TEST_SERVER").ok()
}

/// Where `./test` put a program from crates.io.
pub fn tool(name: &str) -> PathBuf {
    let dir = std::env::var_os("UVFS_TEST_TOOLS")
        .map(PathBuf::from)
        .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/bin"));
    dir.join(name)
}

/// The command under test.
pub fn uvfs() -> Command {
    Command::new(env!("CARGO_BIN_EXE_uvfs"))
}

/// A copy of the command under test where every user can reach it.
pub fn uvfs_for_all(scratch: &Scratch) -> PathBuf {
    let copy = scratch.path("uvfs");
    // Not copied by this process: a child that another thread starts meanwhile would have the copy
    // open for writing for a moment, and it could not be executed.
    run(Command::new("install")
        .args(["-m", "755", env!("CARGO_BIN_EXE_uvfs")])
        .arg(&copy))
    .ok();
    copy
}

/// Calls `done` until it is true; fails after [`SOON`].
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    assert!(wait_until(SOON, &mut done), "waited {SOON:?} for {what}");
}

pub fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if done() {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until the clock that gives files their times, which moves in ticks, has passed the time that it is now.
pub fn next_file_time() {
    let clock = |id| {
        let time = rustix::time::clock_gettime(id);
        (time.tv_sec, time.tv_nsec)
    };
    let now = clock(rustix::time::ClockId::Realtime);
    while clock(rustix::time::ClockId::RealtimeCoarse) <= now {
        thread::sleep(Duration::from_millis(1));
    }
}

/// The outcome of a program.
#[derive(Debug)]
pub struct Outcome {
    pub what: String,
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// Fails unless the program succeeded; gives its standard output.
    #[track_caller]
    pub fn ok(self) -> String {
        assert!(self.status.success(), "{self}");
        self.stdout
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tail = |text: &str| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(60)..].join("\n")
        };
        write!(
            f,
            "{}: {}\n{}\n{}",
            self.what,
            self.status,
            tail(&self.stdout),
            tail(&self.stderr)
        )
    }
}

/// A running program whose output goes to files, so that it never waits on a pipe.
pub struct Running {
    child: Child,
    what: String,
    output: tempfile::TempDir,
}

impl Running {
    /// Starts the program in a process group of its own, with no standard input.
    #[track_caller]
    pub fn start(command: &mut Command) -> Running {
        let output = tempfile::tempdir().expect("temporary directory");
        let what = format!("{command:?}");
        if let Some(errno) = sandbox::no_io_uring() {
            sandbox::refuse(command, sandbox::IO_URING, errno);
        }
        let file = |name| File::create(output.path().join(name)).expect("output file");
        let child = command
            .stdin(Stdio::null())
            .stdout(file("out"))
            .stderr(file("err"))
            .process_group(0)
            .spawn()
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        Running {
            child,
            what,
            output,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the program.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).expect("a pid");
        let _ = rustix::process::kill_process(pid, signal);
    }

    /// Its standard output so far.
    pub fn stdout(&self) -> String {
        self.read("out")
    }

    /// Its standard error so far.
    pub fn stderr(&self) -> String {
        self.read("err")
    }

    fn read(&self, name: &str) -> String {
        let bytes = fs::read(self.output.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The outcome, if the program has ended.
    pub fn ended(&mut self) -> Option<Outcome> {
        let status = self.child.try_wait().expect("wait")?;
        let (stdout, stderr) = (self.read("out"), self.read("err"));
        Some(Outcome {
            what: self.what.clone(),
            status,
            stdout,
            stderr,
        })
    }

    /// The outcome, if the program ends within the limit.
    pub fn wait(&mut self, limit: Duration) -> Option<Outcome> {
        let mut outcome = None;
        wait_until(limit, || {
            outcome = self.ended();
            outcome.is_some()
        });
        outcome
    }

    /// Kills the program and all that it started.
    pub fn kill(&mut self) {
        let group = Pid::from_raw(self.pid() as i32).expect("a pid");
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        // A process in an uninterruptible wait is left to init; the tests go on.
        self.wait(Duration::from_secs(10));
    }
}

/// Runs a program that does not use the mount, or a mount whose server is gone.
#[track_caller]
pub fn run_within(limit: Duration, command: &mut Command) -> Outcome {
    let mut running = Running::start(command);
    running.wait(limit).unwrap_or_else(|| {
        running.kill();
        panic!(
            "{} still ran after {limit:?}\n{}",
            running.what,
            running.stderr()
        )
    })
}

/// [`run_within`] [`SOON`].
#[track_caller]
pub fn run(command: &mut Command) -> Outcome {
    run_within(SOON, command)
}

/// `program` with `args`.
pub fn command<S: AsRef<OsStr>>(
    program: impl AsRef<OsStr>,
    args: impl IntoIterator<Item = S>,
) -> Command {
    let mut command = Command::new(program);
    command.args(args).env("LC_ALL", "C").env("TZ", "UTC");
    command
}

/// A shell script with arguments `$1`, `$2`…
pub fn shell(script: &str, args: &[&Path]) -> Command {
    let mut command = command("bash", ["-euo", "pipefail", "-c", script, "bash"]);
    command.args(args);
    command
}

/// A temporary directory whose mounts go when it goes.
pub struct Scratch {
    root: PathBuf,
}

impl Scratch {
    pub fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let base = std::env::var_os("UVFS_TEST_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = base.join(format!("uvfs-{}-{number}", std::process::id()));
        fs::create_dir(&root).unwrap_or_else(|e| panic!("{}: {e}", root.display()));
        let root = root.canonicalize().expect("scratch directory");
        open_to_all(&root);
        Scratch { root }
    }

    /// A path in the directory; nothing is made.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Makes a directory.
    pub fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        open_to_all(&path);
        path
    }

    /// Mounts a private tmpfs of this size (as in `size=`).
    pub fn tmpfs(&self, name: &str, size: &str) -> PathBuf {
        let path = self.dir(name);
        let data = std::ffi::CString::new(format!("size={size},mode=755")).expect("no NUL");
        rustix::mount::mount("tmpfs", &path, "tmpfs", MountFlags::empty(), Some(&*data))
            .unwrap_or_else(|e| panic!("tmpfs on {}: {e}", path.display()));
        path
    }

    /// Makes and mounts an ext4 of 256 MiB in a file on a tmpfs.
    pub fn ext4(&self, name: &str) -> PathBuf {
        self.image(name, "ext4")
    }

    /// Likewise of ext4 or, somewhat larger, of XFS.
    pub fn image(&self, name: &str, kind: &str) -> PathBuf {
        self.image_of(name, kind, if kind == "ext4" { 256 } else { 320 })
    }

    /// The same of so many MiB, most of which have to stay unused.
    #[track_caller]
    pub fn image_of(&self, name: &str, kind: &str, size: u64) -> PathBuf {
        let (mkfs, options) = match kind {
            "ext4" => (&["-F", "-b", "4096"][..], "loop,acl,user_xattr"),
            _ => (&[][..], "loop"),
        };
        let image = self.tmpfs(&format!("{name}.image"), "400m").join("image");
        File::create(&image)
            .and_then(|f| f.set_len(size << 20))
            .expect("image");
        run(Command::new(format!("mkfs.{kind}"))
            .arg("-q")
            .args(mkfs)
            .arg(&image))
        .ok();
        let path = self.dir(name);
        run(Command::new("mount")
            .args(["-o", options])
            .arg(&image)
            .arg(&path))
        .ok();
        open_to_all(&path);
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Mounts nest at most one deep here, and the last mounted goes first.
        for mount in mounts()
            .iter()
            .rev()
            .filter(|m| m.at.starts_with(&self.root))
        {
            if mount.kind.starts_with("fuse") {
                mount.abort();
            }
            let _ = rustix::mount::unmount(&mount.at, UnmountFlags::DETACH);
        }
        let busy = mounts().iter().any(|m| m.at.starts_with(&self.root));
        if !busy {
            let _ = fs::remove_dir_all(&self.root);
        }
    }
}

fn open_to_all(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("chmod");
}

/// A line of /proc/self/mountinfo.
#[derive(Debug)]
pub struct MountLine {
    pub at: PathBuf,
    pub kind: String,
    /// The options of the mount and of its superblock.
    pub options: Vec<String>,
    minor: u32,
}

impl MountLine {
    /// Ends a FUSE connection: every request on it fails from now on.
    fn abort(&self) {
        let _ = fs::write(
            format!("/sys/fs/fuse/connections/{}/abort", self.minor),
            "1",
        );
    }
}

/// All mounts that this process sees. Asks no file system.
pub fn mounts() -> Vec<MountLine> {
    let text = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    let line = |line: &str| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mount: Vec<&str> = mount.split(' ').collect();
        let file_system: Vec<&str> = file_system.split(' ').collect();
        let options = mount[5].split(',').chain(file_system.get(2)?.split(','));
        Some(MountLine {
            at: mount[4].into(),
            kind: file_system[0].into(),
            options: options.map(str::to_owned).collect(),
            minor: mount[2].split_once(':')?.1.parse().ok()?,
        })
    };
    text.lines().filter_map(line).collect()
}

/// The uppermost mount at exactly this path.
pub fn mounted(at: &Path) -> Option<MountLine> {
    mounts().into_iter().rfind(|m| m.at == at)
}

/// Clears up at a mount point of which no [`Mount`] knows.
pub fn unmount_by_force(at: &Path) {
    if let Some(mount) = mounted(at) {
        mount.abort();
        let _ = rustix::mount::unmount(at, UnmountFlags::DETACH);
    }
}

/// The names in a directory.
pub fn names_in(dir: &Path) -> BTreeSet<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
    let names = fs::read_dir(dir).unwrap().map(name);
    names.map(|name| name.into_string().unwrap()).collect()
}

/// Random numbers that are the same in every run: xorshift. The seed is not 0.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }
}
