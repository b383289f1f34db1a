//! Shared by `uvfs` and `uvfs-bench`: a command line from its parsing to its exit status, help and manual pages, errors,
//! text, JSON and progress, the log, and the grammar of sizes and durations.

mod command;
pub mod log;
pub mod man;
mod notes;
mod output;
mod progress;
mod text;
mod units;

use std::any::Any;
use std::{fmt, io};

pub use command::{answer, beside, end};
pub use output::{JSON_VERSION, complain, json, json_errors, print, warn};
pub use progress::Progress;
use rustix::io::Errno;
pub use text::{Printable, plain, printable};
pub use units::{DURATIONS, SIZES, duration, microseconds, size};
use uvfs_sys::limits;

/// Why a command could not do its work.
///
/// Shown by [`complain`] as `uvfs: MESSAGE`, one line for each message. A message says what was being done, why it
/// failed and, where there is something to do about it, what, as `what: why (what to do)`.
#[derive(Debug)]
pub struct Error {
    /// Each fit for a terminal.
    messages: Vec<String>,
    code: u8,
}

/// The result of a command's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A failure: exit status 1. Control characters of the message are escaped, so that it is one line.
    pub fn new(message: impl AsRef<str>) -> Self {
        Self {
            messages: vec![plain(message.as_ref())],
            code: 1,
        }
    }

    /// The command line asks for something that makes no sense: exit status 2.
    pub fn usage(message: impl AsRef<str>) -> Self {
        Self::new(message).with_code(2)
    }

    /// Several at once, with the exit status of the first.
    pub fn all(errors: impl IntoIterator<Item = Error>) -> Option<Self> {
        let mut errors = errors.into_iter();
        let mut all = errors.next()?;
        all.messages.extend(errors.flat_map(|error| error.messages));
        Some(all)
    }

    /// The same error with another exit status.
    pub fn with_code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }

    /// The process's exit status for this error.
    pub fn code(&self) -> u8 {
        self.code
    }

    /// Its messages, one a line.
    pub fn messages(&self) -> &[String] {
        &self.messages
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.messages.join("; "))
    }
}

impl std::error::Error for Error {}

/// Names what failed when an operating-system or library error becomes the command's.
pub trait Context<T> {
    /// Puts `what: ` before the error's own words, and names the limit that is behind it.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: fmt::Display + 'static> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| {
            let any: &dyn Any = &e;
            let errno = (any
                .downcast_ref::<io::Error>()
                .and_then(Errno::from_io_error))
            .or(any.downcast_ref::<Errno>().copied());
            let limit = errno.and_then(limits::behind);
            let limit = limit.map_or(String::new(), |limit| format!(": {limit}"));
            Error::new(format!("{}: {e}{limit}", what()))
        })
    }
}

/// The outcome of printing. A reader may have seen enough and be gone: that is no failure.
///
/// # Errors
/// When standard output could not be written.
pub fn printed(outcome: io::Result<()>) -> Result<()> {
    match outcome {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::new(format!("standard output: {error}")))
        }
        _ => Ok(()),
    }
}
