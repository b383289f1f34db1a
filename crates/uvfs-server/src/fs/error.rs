//! The error of a handler.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::io;

use rustix::io::Errno;
use tracing::Level;

/// The result of a handler: a value, or the error that the caller gets.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error of a request: the errno that its caller gets and, for the log, a message and what caused it.
///
/// Most errors are an errno and no more, which `?` converts; such an error allocates nothing and is not logged. One with
/// a message is logged once, where its request ends, with the operation and the node, at [`Level::ERROR`] or the level
/// that it was given.
///
/// ```
/// use uvfs_server::fs::*;
///
/// fn block(device: &[u8], at: usize) -> Result<&[u8]> {
///     let block = device.get(at..at + 512).ok_or(Errno::NXIO)?;
///     match block[0] {
///         0x42 => Ok(block),
///         magic => Err(Error::new(Errno::IO, format!("block at {at}: bad magic {magic:#x}"))),
///     }
/// }
///
/// let error = block(&[0; 1024], 512).context("reading the root").unwrap_err();
/// assert!(error == Errno::IO);
/// assert_eq!(error.to_string(), "reading the root: block at 512: bad magic 0x0");
/// assert!(block(&[], 0).unwrap_err() == Errno::NXIO);
/// ```
pub struct Error(Repr);

enum Repr {
    Plain(Errno),
    Detailed(Box<Detail>),
}

type Source = Box<dyn StdError + Send + Sync>;

struct Detail {
    errno: Errno,
    message: Cow<'static, str>,
    source: Option<Source>,
    level: Level,
}

impl Error {
    /// An error with a message for the log.
    pub fn new(errno: Errno, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Repr::Detailed(Box::new(Detail {
            errno,
            message: message.into(),
            source: None,
            level: Level::ERROR,
        })))
    }

    /// The errno that the caller gets.
    pub fn errno(&self) -> Errno {
        match &self.0 {
            Repr::Plain(errno) => *errno,
            Repr::Detailed(detail) => detail.errno,
        }
    }

    /// Says what failed, before what the message says already.
    pub fn context(self, message: impl Into<Cow<'static, str>>) -> Self {
        match self.0 {
            Repr::Plain(errno) => Self::new(errno, message),
            Repr::Detailed(mut detail) => {
                detail.message = format!("{}: {}", message.into(), detail.message).into();
                Self(Repr::Detailed(detail))
            }
        }
    }

    /// Attaches the error that caused this one. It and its own sources are logged behind the message.
    pub fn because(self, source: impl Into<Source>) -> Self {
        self.with(|detail| detail.source = Some(source.into()))
    }

    /// Has the error logged at this level.
    pub fn level(self, level: Level) -> Self {
        self.with(|detail| detail.level = level)
    }

    fn with(mut self, change: impl FnOnce(&mut Detail)) -> Self {
        if let Repr::Plain(errno) = self.0 {
            self = Self::new(errno, errno.to_string());
        }
        if let Repr::Detailed(detail) = &mut self.0 {
            change(detail);
        }
        self
    }

    /// Logs the error of a request that ends, if it has a message, and gives the errno for its answer.
    pub(crate) fn answer(self, opcode: &str, node: u64) -> Errno {
        match self.0 {
            Repr::Plain(errno) => errno,
            Repr::Detailed(detail) => detail.log(opcode, node),
        }
    }
}

impl Detail {
    #[cold]
    fn log(&self, opcode: &str, node: u64) -> Errno {
        let mut text = self.message.to_string();
        let mut source = self.source.as_deref().map(|source| source as &dyn StdError);
        while let Some(error) = source {
            text.push_str(&format!(": {error}"));
            source = error.source();
        }
        let errno = self.errno;
        macro_rules! log {
            ($($level:ident)*) => {
                match self.level {
                    $(Level::$level => {
                        tracing::event!(Level::$level, opcode, node, %errno, "{text}");
                    })*
                }
            };
        }
        log!(ERROR WARN INFO DEBUG TRACE);
        errno
    }
}

/// Attaches a message to the error of a result: see [`Error::context`].
pub trait ErrorContext<T> {
    /// Says what failed.
    ///
    /// # Errors
    /// The error that was there, with the message.
    fn context(self, message: impl Into<Cow<'static, str>>) -> Result<T>;

    /// Says what failed, by a message that is made only for an error.
    ///
    /// # Errors
    /// The error that was there, with the message.
    fn with_context<M: Into<Cow<'static, str>>>(self, message: impl FnOnce() -> M) -> Result<T>;
}

impl<T, E: Into<Error>> ErrorContext<T> for Result<T, E> {
    fn context(self, message: impl Into<Cow<'static, str>>) -> Result<T> {
        self.map_err(|error| error.into().context(message))
    }

    fn with_context<M: Into<Cow<'static, str>>>(self, message: impl FnOnce() -> M) -> Result<T> {
        self.map_err(|error| error.into().context(message()))
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self(Repr::Plain(errno))
    }
}

impl From<io::Error> for Error {
    /// An error of a system call keeps its errno. One of a library gets the errno of its kind, or EIO, and is the source.
    fn from(error: io::Error) -> Self {
        if let Some(errno) = Errno::from_io_error(&error) {
            return errno.into();
        }
        let errno = match error.kind() {
            io::ErrorKind::NotFound => Errno::NOENT,
            io::ErrorKind::PermissionDenied => Errno::ACCESS,
            io::ErrorKind::AlreadyExists => Errno::EXIST,
            io::ErrorKind::Interrupted => Errno::INTR,
            io::ErrorKind::TimedOut => Errno::TIMEDOUT,
            io::ErrorKind::StorageFull => Errno::NOSPC,
            _ => Errno::IO,
        };
        match error.downcast::<Self>() {
            Ok(own) => own,
            Err(error) => Self::from(errno).because(error),
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let plain = Self::from(error.errno());
        match error.0 {
            Repr::Plain(_) => plain,
            Repr::Detailed(_) => Self::new(plain.kind(), error),
        }
    }
}

impl PartialEq<Errno> for Error {
    fn eq(&self, errno: &Errno) -> bool {
        self.errno() == *errno
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Plain(errno) => errno.fmt(f),
            Repr::Detailed(detail) => {
                let mut fields = f.debug_struct("Error");
                fields.field("errno", &detail.errno);
                fields.field("message", &detail.message);
                fields.field("source", &detail.source).finish()
            }
        }
    }
}

/// The message, or what the errno means.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Plain(errno) => fmt::Display::fmt(errno, f),
            Repr::Detailed(detail) => f.write_str(&detail.message),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.0 {
            Repr::Plain(_) => None,
            Repr::Detailed(detail) => detail.source.as_deref().map(|source| source as _),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plain errno stays one on its way, in both directions, and a result is no larger than the error.
    #[test]
    fn a_plain_errno_costs_nothing() {
        assert_eq!(size_of::<Result<()>>(), 2 * size_of::<usize>());
        for errno in [Errno::NOENT, Errno::NOSYS, Errno::IO] {
            let error = Error::from(io::Error::from(Error::from(errno)));
            assert!(matches!(error.0, Repr::Plain(same) if same == errno));
            assert_eq!(error.answer("READ", 1), errno);
        }
    }

    /// What a library's error says, and its kind, are not lost; nor is an error of a handler in one of the standard
    /// library.
    #[test]
    fn an_error_of_a_library_keeps_its_reason() {
        let error = Error::from(io::Error::new(io::ErrorKind::NotFound, "no such object"));
        assert!(error == Errno::NOENT);
        assert_eq!(error.source().unwrap().to_string(), "no such object");
        assert!(Error::from(io::Error::other("a reset connection")) == Errno::IO);
        let damaged = Error::new(Errno::UCLEAN, "a bad magic").level(Level::WARN);
        let again = Error::from(io::Error::from(damaged.context("block 7")));
        assert!(again == Errno::UCLEAN);
        assert_eq!(again.to_string(), "block 7: a bad magic");
    }
}
