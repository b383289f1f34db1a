//! Errors that the commands of uvfs share: one line for people, and an exit status.

use std::any::Any;
use std::{fmt, io};

use rustix::io::Errno;
use uvfs_sys::limits;

/// Why a command could not do its work.
///
/// Shown by `main` as `uvfs: MESSAGE` on one line. A message says what was being done, why it
/// failed and, where there is something to do about it, what, as `what: why (what to do)`.
#[derive(Debug)]
pub struct Error {
    message: String,
    code: u8,
}

/// The result of a command's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A failure: exit status 1.
    pub fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            code: 1,
        }
    }

    /// The command line asks for something that makes no sense: exit status 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(message).with_code(2)
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
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
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
