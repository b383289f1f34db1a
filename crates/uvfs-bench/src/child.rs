//! Child processes: started so that they cannot outlive the benchmark, waited for with a
//! deadline, and their CPU time.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal};
use uvfs_cli::{Context, Error, Result};

use super::interrupt;

/// How often a wait looks for an interrupt that came just before it slept.
const SLICE: Duration = Duration::from_millis(200);

/// A child in a process group of its own, with a descriptor to wait for it.
pub struct Process {
    child: Child,
    pid: Pid,
    pidfd: OwnedFd,
}

/// How a wait ended.
pub enum Waited {
    /// The process with this index has ended.
    Ended(usize),
    /// The time is up.
    TimedOut,
    /// A signal told the benchmark to end.
    Interrupted,
}

impl Process {
    /// Starts `command` in a process group of its own, so that a Ctrl-C at the terminal reaches
    /// only the benchmark, which then ends its children in order. `on_orphan` is sent to the
    /// child when the benchmark itself dies.
    pub fn spawn(command: &mut Command, on_orphan: Signal) -> Result<Self> {
        command.process_group(0);
        // SAFETY: the closure runs between fork and exec and makes one system call, which is
        // async-signal-safe; it allocates nothing and takes no lock.
        unsafe {
            command.pre_exec(move || {
                rustix::process::set_parent_process_death_signal(Some(on_orphan))?;
                Ok(())
            });
        }
        let what = || format!("starting {}", command.get_program().to_string_lossy());
        let program = what();
        let child = command.spawn().context(|| program.clone())?;
        let pid = Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty());
        match pidfd {
            Ok(pidfd) => Ok(Self { child, pid, pidfd }),
            Err(e) => {
                let mut child = child;
                let _ = child.kill();
                let _ = child.wait();
                Err(e).context(|| program)
            }
        }
    }

    /// The child's standard output and error as text, once it has ended.
    pub fn output(&mut self) -> (String, String) {
        use std::io::Read;
        let (mut out, mut err) = (Vec::new(), Vec::new());
        if let Some(pipe) = self.child.stdout.as_mut() {
            let _ = pipe.read_to_end(&mut out);
        }
        if let Some(pipe) = self.child.stderr.as_mut() {
            let _ = pipe.read_to_end(&mut err);
        }
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (text(out), text(err))
    }

    /// The exit status, when the process has ended.
    pub fn status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends `signal` to the child's process group.
    pub fn signal(&self, signal: Signal) {
        // Fails only when the whole group is gone, which is what the signal is for.
        let _ = rustix::process::kill_process_group(self.pid, signal);
    }

    /// Waits until the process has ended; `false` when it has not within `limit`. Interrupts do
    /// not end this wait: it is for cleaning up.
    pub fn wait(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while self.status().is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            poll_once(&[self], left.min(SLICE));
        }
        true
    }

    /// Waits until the process has ended. Ends it when it takes longer than `limit`, when `server`
    /// ends first, or when the benchmark is interrupted.
    pub fn finish(&mut self, server: Option<&Process>, limit: Duration) -> Result<()> {
        let mut processes = vec![&*self];
        processes.extend(server);
        let error = match wait_any(&processes, limit) {
            Waited::Ended(0) => return Ok(()),
            Waited::Ended(_) => Error::new("the server ended"),
            Waited::TimedOut => Error::new(format!("no end after {} s", limit.as_secs())),
            Waited::Interrupted => interrupt::check()
                .err()
                .unwrap_or(Error::new("interrupted")),
        };
        self.signal(Signal::KILL);
        // It may hang in the file system until the server is gone; the caller ends that next.
        self.wait(Duration::from_secs(1));
        Err(error)
    }

    /// CPU seconds that the process has used so far, all threads, ended ones too.
    pub fn cpu_seconds(&self) -> Result<f64> {
        cpu_seconds(self.pid).context(|| "reading the server's CPU time".into())
    }
}

/// CPU seconds that a process has used so far.
pub fn cpu_seconds(pid: Pid) -> io::Result<f64> {
    let mut clock: libc::clockid_t = 0;
    // SAFETY: `clock` is valid for the write. Where there is no such process the call fails.
    let code = unsafe { libc::clock_getcpuclockid(pid.as_raw_pid(), &mut clock) };
    if code != 0 {
        return Err(io::Error::from_raw_os_error(code));
    }
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is valid for the write.
    if unsafe { libc::clock_gettime(clock, &mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
}

/// CPU seconds of all children that have ended and were waited for, and of theirs.
pub fn ended_cpu_seconds() -> f64 {
    // SAFETY: all zeros is a valid value of this plain C structure.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is valid for the write. The call fails only for another first argument.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Waits until one of the processes has ended, the time is up or the benchmark is interrupted.
pub fn wait_any(processes: &[&Process], limit: Duration) -> Waited {
    let deadline = Instant::now() + limit;
    loop {
        if interrupt::seen() {
            return Waited::Interrupted;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if let Some(index) = poll_once(processes, left.min(SLICE)) {
            return Waited::Ended(index);
        }
        if left.is_zero() {
            return Waited::TimedOut;
        }
    }
}

fn poll_once(processes: &[&Process], limit: Duration) -> Option<usize> {
    let mut fds: Vec<_> = processes
        .iter()
        .map(|p| PollFd::new(&p.pidfd, PollFlags::IN))
        .collect();
    let limit = Timespec::try_from(limit).ok();
    // An error is EINTR; the caller looks again.
    poll(&mut fds, limit.as_ref()).ok()?;
    fds.iter().position(|fd| !fd.revents().is_empty())
}

/// The path of this command.
pub fn own_path() -> Result<PathBuf> {
    std::env::current_exe().context(|| "finding this command".into())
}

/// The path of the command that is measured.
pub fn uvfs() -> PathBuf {
    uvfs_cli::beside("uvfs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    const LONG: Duration = Duration::from_secs(60);

    fn start(program: &str, args: &[&str]) -> Process {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::piped());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Process::spawn(&mut command, Signal::KILL).unwrap()
    }

    /// The exit status and the output of a child reach the benchmark.
    #[test]
    fn a_child_is_waited_for_and_heard() {
        let mut child = start("sh", &["-c", "echo yes; echo no >&2; exit 3"]);
        assert!(matches!(wait_any(&[&child], LONG), Waited::Ended(0)));
        assert!(child.wait(LONG));
        assert_eq!(child.status().unwrap().code(), Some(3));
        assert_eq!(child.output(), ("yes\n".into(), "no\n".into()));
    }

    /// A program that hangs neither hangs the benchmark nor is left behind.
    #[test]
    fn a_wait_has_an_end_and_a_signal_ends_the_child() {
        // It reads from a pipe that stays open.
        let mut child = start("cat", &[]);
        let limit = Duration::from_millis(1);
        assert!(matches!(wait_any(&[&child], limit), Waited::TimedOut));
        assert!(!child.wait(limit));
        assert!(child.cpu_seconds().unwrap() >= 0.0);
        child.signal(Signal::TERM);
        assert!(child.wait(LONG));
        assert!(!child.status().unwrap().success());
    }

    /// The error of a missing program names it.
    #[test]
    fn a_program_that_is_not_there_is_named() {
        let e = Process::spawn(&mut Command::new("/no/such/program"), Signal::KILL);
        let e = e.err().unwrap().to_string();
        assert!(e.contains("/no/such/program"), "{e}");
    }
}
