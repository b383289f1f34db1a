//! The log of the command and of its servers: on standard error, or in the system's log, as text or as JSON.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::OnceLock;

use crate::{Printable, warn};
use tracing::{Level, Metadata};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::prelude::*;

/// The system's log, which a server in the background writes to.
static SYSTEM_LOG: OnceLock<File> = OnceLock::new();

/// Logs what `UVFS_LOG` asks for, in the form that `UVFS_LOG_FORMAT` asks for; only errors, as text, without them.
pub fn init() {
    let wanted = std::env::var("UVFS_LOG").unwrap_or_default();
    let wanted = if wanted.is_empty() { "error" } else { &wanted };
    let filter: Targets = wanted.parse().unwrap_or_else(|error| {
        warn(format!(
            "UVFS_LOG={wanted}: {error} (only errors are logged)"
        ));
        Targets::new().with_default(Level::ERROR)
    });
    let format = std::env::var("UVFS_LOG_FORMAT").unwrap_or_default();
    let json = match format.as_str() {
        "json" => true,
        "" | "text" => false,
        _ => {
            warn(format!(
                "UVFS_LOG_FORMAT={format}: is none of text, json (text is written)"
            ));
            false
        }
    };
    let level = Level::ERROR;
    let log = fmt::layer()
        .with_writer(Message { json, level })
        .with_ansi(false);
    let log = match json {
        true => log.json().flatten_event(true).boxed(),
        false => log.boxed(),
    };
    tracing_subscriber::registry().with(log).with(filter).init();
}

/// From now on the log is the system's; without one, it stays where it is.
pub fn to_system() {
    let open = || -> io::Result<File> {
        let socket = UnixDatagram::unbound()?;
        socket.connect("/dev/log")?;
        socket.set_nonblocking(true)?;
        Ok(File::from(OwnedFd::from(socket)))
    };
    if let Ok(log) = open() {
        let _ = SYSTEM_LOG.set(log);
    }
}

/// Whether the log is the system's: a server in the background has let go of its terminal.
pub fn is_system() -> bool {
    SYSTEM_LOG.get().is_some()
}

/// Writes one message.
#[derive(Clone, Copy)]
struct Message {
    json: bool,
    level: Level,
}

impl MakeWriter<'_> for Message {
    type Writer = Message;

    fn make_writer(&self) -> Message {
        *self
    }

    fn make_writer_for(&self, about: &Metadata<'_>) -> Message {
        let level = *about.level();
        Message { level, ..*self }
    }
}

/// Facility daemon, and the severity of a level.
fn priority(level: Level) -> u8 {
    const DAEMON: u8 = 3 << 3;
    DAEMON
        | match level {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        }
}

impl Write for Message {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let Some(mut log) = SYSTEM_LOG.get() else {
            return match self.json {
                true => io::stderr().write(line),
                false => Printable(io::stderr()).write(line),
            };
        };
        let (priority, pid) = (priority(self.level), std::process::id());
        let mut message = format!("<{priority}>uvfs[{pid}]: ").into_bytes();
        message.extend_from_slice(line.trim_ascii_end());
        // A line is lost if the log takes none now: the server must not wait for it.
        let _ = log.write(&message);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// journalctl -p err shows errors only.
    #[test]
    fn each_level_has_its_severity() {
        let levels = [
            Level::ERROR,
            Level::WARN,
            Level::INFO,
            Level::DEBUG,
            Level::TRACE,
        ];
        assert_eq!(levels.map(priority), [27, 28, 30, 31, 31]);
    }
}
