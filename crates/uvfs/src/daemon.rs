//! Going into the background: the command returns when the mount answers, or says why not.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use sd_notify::NotifyState;
use uvfs_cli::{Context, Error, Result};
use uvfs_server::mount;
use uvfs_server::signals::SIGNALS;
use uvfs_sys::limits;
use uvfs_sys::process::SignalSet;

/// How long a mount may take to answer.
const ANSWER: Duration = Duration::from_secs(20);
/// Asks the other process to look whether the mount answers. No exit status is so high.
const LOOK: u8 = u8::MAX;

/// A server's line to a process that does not serve: the one that was started, or for a server in the foreground
/// one that ends with the first answer. A process must not use a mount that it serves, so that one looks whether
/// the mount answers.
pub struct Report {
    socket: UnixStream,
    /// The process that looks; `None` in the background, where it is the parent.
    child: Option<Pid>,
}

/// What asking the server of a mount shows.
pub enum Asked {
    Answers,
    Dead,
    /// It did not answer in time.
    Silent,
}

/// The side of the fork that this is.
pub enum Side {
    /// The one that serves.
    Server(Report),
    /// The one that was started, after the server in the background has reported.
    Parent(Result<ExitCode>),
}

impl Report {
    /// Of a server that goes on where another was replaced.
    pub fn none(foreground: bool) -> Result<Self> {
        let (socket, _) = UnixStream::pair().context(|| "a pair of sockets".into())?;
        let child = foreground.then(rustix::process::getpid);
        Ok(Self { socket, child })
    }

    /// Waits until the mount has answered another process.
    pub fn answers(&mut self) -> Result<()> {
        let mut ask = || -> io::Result<i32> {
            self.socket.write_all(&[LOOK])?;
            self.socket.set_read_timeout(Some(ANSWER))?;
            let mut errno = [0; 4];
            self.socket.read_exact(&mut errno)?;
            Ok(i32::from_ne_bytes(errno))
        };
        match ask() {
            Ok(0) => Ok(()),
            Ok(errno) => Err(Error::new(format!(
                "the mount does not answer: {}",
                io::Error::from_raw_os_error(errno)
            ))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(Error::new(format!(
                "the mount did not answer within {} s",
                ANSWER.as_secs()
            ))),
            Err(error) => Err(Error::new(format!(
                "the process that looks whether the mount answers: {error}"
            ))),
        }
    }

    /// Reports that the mount answers, and lets go of the terminal.
    pub fn ready(&mut self) -> Result<()> {
        if let Some(child) = self.child {
            // The child ends now.
            let _ = self.socket.write_all(&[0]);
            let _ = waitpid(Some(child), WaitOptions::empty());
            return Ok(());
        }
        let null = File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .context(|| "/dev/null".into())?;
        rustix::stdio::dup2_stdin(null.as_fd()).context(|| "standard input".into())?;
        rustix::stdio::dup2_stdout(null.as_fd()).context(|| "standard output".into())?;
        // Without a system log the messages go to /dev/null.
        uvfs_cli::log::to_system();
        // Only now: a mount point under autofs lets in only the process group of the automounter (systemd's,
        // which starts mounts in its own group) until something is mounted there.
        rustix::process::setsid().context(|| "setsid".into())?;
        let wrote = self.socket.write_all(&[0]);
        let _ = self.socket.shutdown(Shutdown::Both);
        // Last, so that an error of the above is still seen.
        rustix::stdio::dup2_stderr(null.as_fd()).context(|| "standard error".into())?;
        // The process that was started may have been killed meanwhile; the mount stays.
        drop(wrote);
        Ok(())
    }

    /// Tells systemd that the mount answers, if that started this process as a unit of Type=notify.
    pub fn tells_systemd(&self) -> Result<()> {
        match self.child {
            Some(_) => sd_notify::notify(&[NotifyState::Ready]).context(|| "NOTIFY_SOCKET".into()),
            None => Ok(()),
        }
    }

    /// Leaves the terminal to the keeper of this server's mount, which passes on the signals that come from it; in the
    /// background, leaves it for the system's log.
    pub fn leaves_terminal(&self) {
        match self.child {
            Some(_) => drop(rustix::process::setpgid(None, None)),
            None => uvfs_cli::log::to_system(),
        }
    }

    /// Reports that the server failed, for this reason. True if another process shows it.
    pub fn failed(&mut self, error: &Error) -> bool {
        let mut message = vec![error.code().max(1)];
        message.extend_from_slice(error.messages().join("\n").as_bytes());
        self.socket.write_all(&message).is_ok() && self.child.is_none()
    }
}

/// fork(2), for a process with one thread; `None` in the child.
fn fork() -> Result<Option<Pid>> {
    // SAFETY: there is one thread, so the child's copy of every lock and buffer is consistent.
    match unsafe { libc::fork() } {
        -1 => Err(Error::new(format!(
            "fork: {}",
            limits::explain_start(&io::Error::last_os_error())
        ))),
        child => Ok(Pid::from_raw(child)),
    }
}

/// Splits the process into one that serves at `path` and one that looks. To be called while it has one thread.
pub fn split(path: &Path, background: bool) -> Result<Side> {
    let (ours, theirs) = UnixStream::pair().context(|| "a pair of sockets".into())?;
    let child = fork()?;
    match (background, child) {
        (true, None) => {
            drop(theirs);
            rustix::process::chdir("/").context(|| "/".into())?;
            Ok(Side::Server(Report {
                socket: ours,
                child: None,
            }))
        }
        (true, Some(child)) => {
            drop(ours);
            let followed = follow(theirs, path).unwrap_or_else(|| Err(ended()));
            if followed.is_err() {
                // Wait until the server is gone: as long as it has its threads, the unmounting process may not be
                // able to start.
                if let Ok(process) = pidfd_open(child, PidfdFlags::empty()) {
                    ended_by(&process, Instant::now() + ANSWER);
                }
                take_away(path);
            }
            Ok(Side::Parent(followed))
        }
        (false, None) => {
            drop(ours);
            // The mount of a server that was killed stays, as it does later.
            if let Some(Err(_)) = follow(theirs, path) {
                take_away(path);
            }
            // SAFETY: ends the process, and runs no code of it. Its copies of buffers are the server's to write.
            unsafe { libc::_exit(0) }
        }
        (false, child) => {
            drop(theirs);
            Ok(Side::Server(Report {
                socket: ours,
                child,
            }))
        }
    }
}

/// Looks whether the mount at `path` answers as often as the server asks, and gives its report; `None` if it ended
/// without one.
fn follow(mut server: UnixStream, path: &Path) -> Option<Result<ExitCode>> {
    let mut code = [0];
    loop {
        server.read_exact(&mut code).ok()?;
        match code[0] {
            LOOK => {
                let errno = look(path).err().map_or(0, Errno::raw_os_error);
                server.write_all(&errno.to_ne_bytes()).ok()?;
            }
            0 => return Some(Ok(ExitCode::SUCCESS)),
            code => {
                let mut text = Vec::new();
                let _ = server.take(65536).read_to_end(&mut text);
                let text = String::from_utf8_lossy(&text);
                let errors = text.lines().map(|line| Error::new(line).with_code(code));
                return Some(Err(
                    Error::all(errors).unwrap_or_else(|| ended().with_code(code))
                ));
            }
        }
    }
}

fn ended() -> Error {
    // A server that finds no memory ends without a word of its own.
    let limit = limits::behind(Errno::NOMEM).map_or(String::new(), |limit| format!("; {limit}"));
    Error::new(format!("the server ended before the mount answered{limit}"))
}

/// Takes a dead server's mount away. The path had none before.
fn take_away(path: &Path) {
    if look(path).is_err() {
        let _ = mount::unmount(path, true);
    }
}

/// Asks the server of the mount at `path`. A process that waits for an answer can't be killed, so another one asks,
/// and is left alone if there is none in time. To be called while this one has one thread.
pub fn ask(path: &Path) -> Result<Asked> {
    let Some(child) = fork()? else {
        // SAFETY: the child looks and ends, and runs no code of the process. While it waits it must not hold what the
        // command writes to, as pipes whose readers wait for their end.
        unsafe {
            libc::close_range(0, u32::MAX, 0);
            libc::_exit(i32::from(look(path).is_err()))
        }
    };
    let process = pidfd_open(child, PidfdFlags::empty()).context(|| "pidfd_open".into())?;
    if !ended_by(&process, Instant::now() + ANSWER) {
        // It ends with the answer.
        let _ = kill_process(child, Signal::KILL);
        return Ok(Asked::Silent);
    }
    let status = waitpid(Some(child), WaitOptions::empty()).context(|| "waitpid".into())?;
    match status.and_then(|(_, status)| status.exit_status()) {
        Some(0) => Ok(Asked::Answers),
        _ => Ok(Asked::Dead),
    }
}

/// Waits for the end of a process; false if it has not ended by then.
pub fn ended_by(process: &OwnedFd, end: Instant) -> bool {
    let left = end.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).ok();
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    poll(&mut fds, left.as_ref()).is_ok_and(|ready| ready > 0)
}

/// Has the kernel ask the mount's server for the root. Any answer but a dead mount's shows that the server answers:
/// other errors are the host's.
fn look(path: &Path) -> Result<(), Errno> {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    let fresh = AtFlags::STATX_FORCE_SYNC;
    match statx(CWD, path, fresh, StatxFlags::BASIC_STATS) {
        Err(errno @ (Errno::NOTCONN | Errno::CONNABORTED)) => Err(errno),
        _ => Ok(()),
    }
}

/// Blocks SIGTERM, SIGINT and SIGHUP, which end a server, for every thread that is started after this. Ignores SIGXFSZ: a
/// caller's write beyond the limit that the server has for the size of files (RLIMIT_FSIZE) is to fail with EFBIG, and
/// not to end the server.
pub fn block_signals() -> SignalSet {
    // SAFETY: to ignore a signal runs no code.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    SignalSet::block(&SIGNALS)
}
