//! Going into the background: the command returns when the mount answers, or says why not.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::process::ExitCode;
use std::sync::OnceLock;

use sd_notify::NotifyState;
use uvfs_cli::{Context, Error, Result};

/// The system's log, which a server in the background writes to.
static SYSTEM_LOG: OnceLock<File> = OnceLock::new();

/// Writes log lines: to standard error, or in the background to the system's log.
pub struct Log;

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let Some(mut log) = SYSTEM_LOG.get() else {
            return io::stderr().write(line);
        };
        // Facility daemon, severity error: what UVFS_LOG lets through is meant to be seen.
        let mut message = format!("<27>uvfs[{}]: ", std::process::id()).into_bytes();
        message.extend_from_slice(line.trim_ascii_end());
        // A line is lost if the log takes none now: the server must not wait for it.
        let _ = log.write(&message);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn system_log() -> io::Result<File> {
    let socket = UnixDatagram::unbound()?;
    socket.connect("/dev/log")?;
    socket.set_nonblocking(true)?;
    Ok(File::from(OwnedFd::from(socket)))
}

/// The report of the process in the background to the one that was started.
pub struct Report(Option<File>);

/// The side of the fork that this is.
pub enum Side {
    /// In the background.
    Child(Report),
    /// The one that was started, after the child has reported.
    Parent(Result<ExitCode>),
}

impl Report {
    /// For a server that stays in the foreground: only systemd may want to know.
    pub fn nobody() -> Self {
        Self(None)
    }

    /// The mount answers. The terminal is let go of.
    pub fn ready(&mut self) -> Result<()> {
        let Some(mut pipe) = self.0.take() else {
            // Does nothing unless systemd started a unit of Type=notify.
            return sd_notify::notify(&[NotifyState::Ready]).context(|| "NOTIFY_SOCKET".into());
        };
        let null = File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .context(|| "/dev/null".into())?;
        rustix::stdio::dup2_stdin(null.as_fd()).context(|| "standard input".into())?;
        rustix::stdio::dup2_stdout(null.as_fd()).context(|| "standard output".into())?;
        // Without a system log the messages go to /dev/null.
        if let Ok(log) = system_log() {
            let _ = SYSTEM_LOG.set(log);
        }
        // Only now: a mount point under autofs lets in nobody but the process group of the automounter (systemd's,
        // which starts mounts in its own group) until something is mounted there.
        rustix::process::setsid().context(|| "setsid".into())?;
        let wrote = pipe.write_all(&[0]);
        // Last, so that an error of the above is still seen.
        rustix::stdio::dup2_stderr(null.as_fd()).context(|| "standard error".into())?;
        // The one that was started may have been killed meanwhile; the mount stays.
        drop(wrote);
        Ok(())
    }

    /// It failed, for this reason. True when somebody was there to be told.
    pub fn failed(&mut self, error: &Error) -> bool {
        let Some(mut pipe) = self.0.take() else {
            return false;
        };
        let mut message = vec![error.code().max(1)];
        message.extend_from_slice(error.to_string().as_bytes());
        pipe.write_all(&message).is_ok()
    }
}

/// Splits the process. To be called while it has one thread.
pub fn split() -> Result<Side> {
    let (reader, writer): (OwnedFd, OwnedFd) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).context(|| "a pipe".into())?;
    // SAFETY: there is one thread, so the child's copy of every lock and buffer is consistent.
    match unsafe { libc::fork() } {
        -1 => Err(Error::new(format!(
            "fork: {}",
            std::io::Error::last_os_error()
        ))),
        0 => {
            drop(reader);
            rustix::process::chdir("/").context(|| "/".into())?;
            Ok(Side::Child(Report(Some(File::from(writer)))))
        }
        _ => {
            drop(writer);
            let mut message = Vec::new();
            File::from(reader)
                .take(65536)
                .read_to_end(&mut message)
                .context(|| "the server's report".into())?;
            Ok(Side::Parent(match message.split_first() {
                Some((0, _)) => Ok(ExitCode::SUCCESS),
                Some((&code, text)) => {
                    Err(Error::new(String::from_utf8_lossy(text).into_owned()).with_code(code))
                }
                None => Err(Error::new("the server ended before the mount answered")),
            }))
        }
    }
}

/// The signals that end a server, blocked for every thread that is started after this.
pub struct Signals(libc::sigset_t);

impl Signals {
    /// Blocks SIGTERM, SIGINT and SIGHUP. Ignores SIGXFSZ: a caller's write beyond the limit that the server has for
    /// the size of files (RLIMIT_FSIZE) is to fail with EFBIG, and not to end the server.
    pub fn block() -> Self {
        // SAFETY: the set is written by sigemptyset before anything reads it; all pointers are to
        // local values. To ignore a signal runs no code.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                libc::sigaddset(&mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            Self(set)
        }
    }

    /// Waits for one and gives its number.
    pub fn wait(&self) -> i32 {
        let mut signal = 0;
        // SAFETY: both pointers are to values that live over the call.
        while unsafe { libc::sigwait(&self.0, &mut signal) } != 0 {}
        signal
    }
}
