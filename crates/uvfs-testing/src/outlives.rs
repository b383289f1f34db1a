//! Servers whose mounts outlive them, killed while programs use the mount.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::{Need, full, has};

/// Programs that know what their calls have to give: `python3 -c PROGRAMS DIRECTORY SECONDS [WITHOUT,...]`.
pub const PROGRAMS: &str = include_str!("../../uvfs/tests/mount/programs/outlives.py");

/// Between two kills.
pub const PAUSE: Duration = Duration::from_millis(150);
const DEADLINE: Duration = Duration::from_secs(60);

/// How often the server is killed.
pub fn kills() -> u32 {
    if full() { 1000 } else { 25 }
}

/// The process that serves: the last child of the keeper that lives, but for one that fetches what the kernel has.
pub fn worker(keeper: u32) -> Option<Pid> {
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
    let stat = |child: &str| fs::read_to_string(format!("/proc/{child}/stat")).ok();
    let fetches = |child: &&str| stat(child).is_some_and(|stat| stat.contains("(uvfs-fetches)"));
    let mut children = children.split_whitespace().rev();
    let last = children.find(|child| !fetches(child))?;
    // The process that looks whether the mount answers ends soon.
    (!stat(last)?.contains(") Z ")).then(|| Pid::from_raw(last.parse().ok()?))?
}

/// An example of the package whose test this is, which `./test` builds.
pub fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this program");
    let built = test.ancestors().nth(2).expect("it lies in target");
    built.join("examples").join(name)
}

/// A server that outlives being killed. Dropping it ends it, and its mount.
pub struct Server {
    keeper: Child,
    output: BufReader<ChildStdout>,
    /// The mount point.
    pub at: PathBuf,
    _dir: tempfile::TempDir,
}

impl Server {
    /// Starts a server, whose last argument is to be the mount point, and waits until it prints `process PID serves`.
    ///
    /// # Panics
    /// When it ends before.
    pub fn start(command: &mut Command) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let at = dir.path().canonicalize().expect("a path").join("mount");
        fs::create_dir(&at).expect("a mount point");
        let keeper = command.arg(&at).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut keeper = keeper.spawn().expect("the server starts");
        let output = keeper.stdout.take().expect("a pipe");
        let mut server = Self {
            keeper,
            output: BufReader::new(output),
            at,
            _dir: dir,
        };
        let mut line = String::new();
        while !line.starts_with("process ") {
            line.clear();
            let read = server.output.read_line(&mut line);
            assert!(read.is_ok_and(|read| read > 0), "it ended without a word");
        }
        server
    }

    fn is_mounted(&self) -> bool {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let at = format!(" {} ", self.at.display());
        table.lines().any(|line| line.contains(&at))
    }

    /// Sends the process that serves a signal, and waits for the next one.
    ///
    /// # Panics
    /// When there is none in time.
    pub fn replaced(&self, signal: Signal) {
        let old = worker(self.keeper.id()).expect("a worker");
        kill_process(old, signal).expect("it lives");
        wait_for("the next worker", || {
            worker(self.keeper.id()).is_some_and(|now| now != old)
        });
    }

    /// Kills the server again and again while a program runs, which has to succeed.
    ///
    /// # Panics
    /// When it fails, or hangs, or the server was hardly ever killed.
    pub fn is_killed_during(&self, load: &mut Command) {
        let mut load = load.spawn().expect("the program starts");
        let (began, mut killed) = (Instant::now(), 0);
        let ended = loop {
            if let Some(ended) = load.try_wait().expect("a child") {
                break ended;
            }
            if began.elapsed() > DEADLINE + PAUSE * (kills() + 4) {
                let _ = load.kill();
                panic!("{load:?} hung after {killed} kills");
            }
            std::thread::sleep(PAUSE);
            if killed < kills()
                && let Some(worker) = worker(self.keeper.id())
                && kill_process(worker, Signal::KILL).is_ok()
            {
                killed += 1;
            }
        };
        assert!(ended.success(), "{ended} after {killed} kills");
        assert!(killed > kills() / 2, "only {killed} kills");
    }

    /// Unmounts, and waits for the end of the server.
    ///
    /// # Panics
    /// When either fails.
    pub fn unmount(mut self) {
        done(Command::new("umount").arg(&self.at));
        let mut ended = None;
        wait_for("the end of the server", || {
            ended = self.keeper.try_wait().expect("a child");
            ended.is_some()
        });
        assert!(ended.is_some_and(|ended| ended.success()), "{ended:?}");
    }

    /// Sends the keeper a signal, and gives what it ends with.
    ///
    /// # Panics
    /// When it does not end.
    pub fn ends_by(mut self, signal: Signal) -> ExitStatus {
        kill_process(Pid::from_child(&self.keeper), signal).expect("it lives");
        let mut ended = None;
        wait_for("the end of the server", || {
            ended = self.keeper.try_wait().expect("a child");
            ended.is_some()
        });
        assert!(!self.is_mounted(), "the mount stays");
        ended.expect("it has ended")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let worker = worker(self.keeper.id());
        // First, so that it starts no other worker.
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        if let Some(worker) = worker {
            let _ = kill_process(worker, Signal::KILL);
        }
        if self.is_mounted() {
            let _ = Command::new("umount").arg("--lazy").arg(&self.at).status();
        }
    }
}

/// Runs [`PROGRAMS`] on the mount of a server while that is killed. They leave out what the file system does not have.
///
/// # Panics
/// When a call of theirs fails.
pub fn killed_under_load(server: &mut Command, without: &str) {
    if !has(&[Need::Fuse, Need::Program("python3")]) {
        return;
    }
    let server = Server::start(server);
    let time = PAUSE * (kills() + 4);
    server.is_killed_during(&mut programs(&server.at, time, without));
    server.unmount();
}

fn programs(at: &Path, time: Duration, without: &str) -> Command {
    let mut programs = Command::new("python3");
    programs.args(["-c", PROGRAMS]).arg(at);
    programs.arg(time.as_secs_f64().to_string()).arg(without);
    programs
}

fn done(command: &mut Command) {
    let status = command.stdout(Stdio::null()).status().expect("it starts");
    assert!(status.success(), "{command:?}: {status}");
}

fn wait_for(what: &str, mut there: impl FnMut() -> bool) {
    let began = Instant::now();
    while !there() {
        assert!(began.elapsed() < DEADLINE, "no {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
