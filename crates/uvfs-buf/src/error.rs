//! The errors of a buffer.

use std::borrow::Cow;

use rustix::io::Errno;

/// A defect that a verifier found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Corrupt(Cow<'static, str>);

impl From<&'static str> for Corrupt {
    fn from(what: &'static str) -> Self {
        Corrupt(what.into())
    }
}

impl From<String> for Corrupt {
    fn from(what: String) -> Self {
        Corrupt(what.into())
    }
}

/// An error of the buffer cache. Addresses and lengths are in sectors of 512 bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BufError {
    /// The device failed. Reading again tries again.
    #[error("{what} {len} sectors at daddr {daddr}: {}", std::io::Error::from(*errno))]
    Io {
        /// "reading" or "writing".
        what: &'static str,
        /// The first sector of the buffer.
        daddr: u64,
        /// The length of the buffer.
        len: u64,
        /// The kernel's error.
        errno: Errno,
    },
    /// The content is not what it should be.
    #[error("{verifier} at daddr {daddr}: {what}")]
    Verify {
        /// The first sector of the buffer.
        daddr: u64,
        /// The name of the verifier.
        verifier: &'static str,
        /// The defect.
        what: Corrupt,
    },
    /// Not on the device.
    #[error("{len} sectors at daddr {daddr} are beyond the device's end at {end}")]
    Range {
        /// The first sector of the extent.
        daddr: u64,
        /// The length of the extent.
        len: u64,
        /// The device's size.
        end: u64,
    },
    /// Empty, too long, of too many extents, or not a multiple of the device's block.
    #[error("bad extents ({len} sectors at daddr {daddr}): {why}")]
    Shape {
        /// The first sector.
        daddr: u64,
        /// The length.
        len: u64,
        /// The defect.
        why: &'static str,
    },
    /// The memory limit is reached and everything is in use.
    #[error("no memory for {len} sectors at daddr {daddr}: {in_use} bytes of {limit} are in use")]
    NoMemory {
        /// The first sector.
        daddr: u64,
        /// The length.
        len: u64,
        /// Bytes in use.
        in_use: usize,
        /// The limit in bytes.
        limit: usize,
    },
}

impl BufError {
    /// The errno that a file system in the kernel gives: `EUCLEAN` for bad content, also called
    /// `EFSCORRUPTED`.
    pub fn errno(&self) -> i32 {
        match self {
            BufError::Io { errno, .. } => match *errno {
                Errno::ROFS | Errno::NOMEM | Errno::NOSPC => errno.raw_os_error(),
                _ => Errno::IO.raw_os_error(),
            },
            BufError::Verify { .. } | BufError::Range { .. } | BufError::Shape { .. } => {
                Errno::UCLEAN.raw_os_error()
            }
            BufError::NoMemory { .. } => Errno::NOMEM.raw_os_error(),
        }
    }
}
