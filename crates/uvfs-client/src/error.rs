//! The error of a call: its errno, and what the client did to what.

use std::fmt::{self, Display, Formatter};
use std::path::Path;

use rustix::io::Errno;

/// The result of a client's call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed: an errno, as the kernel would give it, what the client was doing, and on what.
///
/// ```
/// use rustix::io::Errno;
/// use uvfs_client::{Connection, Error};
///
/// let error = Connection::connect("/nowhere/files").unwrap_err();
/// assert_eq!(error.errno(), Errno::NOENT);
/// assert_eq!(
///     error.to_string(),
///     "connecting to /nowhere/files: No such file or directory (os error 2)"
/// );
/// // An errno alone is an error, too.
/// assert_eq!(Error::from(Errno::STALE).errno(), Errno::STALE);
/// ```
pub struct Error {
    errno: Errno,
    context: Option<Box<Context>>,
}

#[derive(Default)]
struct Context {
    /// The call ("opening"), and the file that it was for.
    doing: Option<(&'static str, Box<Path>)>,
    /// The underlying error or message: it is shown in place of the errno's text.
    cause: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// The errno.
    pub fn errno(&self) -> Errno {
        self.errno
    }

    /// An errno, and the reason for it.
    pub(crate) fn because(
        errno: Errno,
        cause: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        let context = Context {
            doing: None,
            cause: Some(cause.into()),
        };
        Self {
            errno,
            context: Some(Box::new(context)),
        }
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let context = self.context.as_deref();
        if let Some((what, on)) = context.and_then(|context| context.doing.as_ref()) {
            write!(f, "{what} {}: ", on.display())?;
        }
        match context.and_then(|context| context.cause.as_ref()) {
            Some(cause) => Display::fmt(cause, f),
            None => Display::fmt(&self.errno, f),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}: {self})", self.errno)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&**self.context.as_ref()?.cause.as_ref()?)
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self {
            errno,
            context: None,
        }
    }
}

/// The cause of an error without an errno is kept, and its errno is EIO.
impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        match Errno::from_io_error(&error) {
            Some(errno) => errno.into(),
            None => Self::because(Errno::IO, error),
        }
    }
}

/// Keeps the message. [`std::io::Error::raw_os_error`] has nothing for an error that says what failed.
impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        match error.context {
            None => error.errno.into(),
            Some(_) => Self::new(error.errno.kind(), error),
        }
    }
}

/// Says what a failed call did, and on what.
pub(crate) trait Doing<T> {
    fn doing(self, what: &'static str, on: &Path) -> Result<T>;
}

impl<T, E: Into<Error>> Doing<T> for Result<T, E> {
    fn doing(self, what: &'static str, on: &Path) -> Result<T> {
        self.map_err(|error| {
            let mut error = error.into();
            let context = error.context.get_or_insert_default();
            context.doing.get_or_insert_with(|| (what, on.into()));
            error
        })
    }
}
