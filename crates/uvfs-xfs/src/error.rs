//! Errors of the reader.

use crate::format::Fault;
use std::{fmt, io};

/// A result of the reader.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device failed.
    #[error("reading {len} bytes at sector {daddr}: {source}")]
    Io {
        /// First 512-byte sector.
        daddr: u64,
        /// Bytes asked for.
        len: usize,
        /// The device's error.
        source: io::Error,
    },
    /// There is no XFS superblock at the start of the image.
    #[error("not an XFS file system (magic number {found:#010x})")]
    NotXfs {
        /// The value that is there instead.
        found: u32,
    },
    /// The file system uses something that is not supported.
    #[error("{0} not supported")]
    Unsupported(String),
    /// A structure is damaged.
    #[error("{place}: {fault} (run a check of the image)")]
    Corrupt {
        /// The structure, and where it is.
        place: Location,
        /// The defect.
        fault: Fault,
    },
    /// No such name, attribute or inode.
    #[error("no such {0}")]
    NotFound(&'static str),
    /// A directory was needed.
    #[error("inode {0} is not a directory")]
    NotDirectory(u64),
    /// The operation does not fit this type of file.
    #[error("inode {ino} is not a {wanted}")]
    WrongType {
        /// The inode.
        ino: u64,
        /// The expected item.
        wanted: &'static str,
    },
    /// Writing results elsewhere failed.
    #[error("{what}: {source}")]
    Output {
        /// The item that was being written.
        what: String,
        /// The system's error.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn corrupt(what: &'static str, at: At, fault: Fault) -> Error {
        Error::Corrupt {
            place: Location { what, at },
            fault,
        }
    }

    /// Whether the reader only failed because it must not wait for the device.
    pub(crate) fn would_wait(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.kind() == io::ErrorKind::WouldBlock)
    }

    /// The errno that the kernel's XFS gives for this: `EUCLEAN` for corruption, `EBADMSG` for a
    /// wrong checksum.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Io { source, .. } | Error::Output { source, .. } => {
                source.raw_os_error().unwrap_or(libc_errno::EIO)
            }
            Error::NotXfs { .. } => libc_errno::EINVAL,
            Error::Unsupported(_) => libc_errno::EOPNOTSUPP,
            Error::Corrupt {
                fault: Fault::Crc { .. },
                ..
            } => libc_errno::EBADMSG,
            Error::Corrupt { .. } => libc_errno::EUCLEAN,
            Error::NotFound(what) if *what == "attribute" => libc_errno::ENODATA,
            Error::NotFound(_) => libc_errno::ENOENT,
            Error::NotDirectory(_) => libc_errno::ENOTDIR,
            Error::WrongType { wanted, .. } if *wanted == "regular file" => libc_errno::EISDIR,
            Error::WrongType { .. } => libc_errno::EINVAL,
        }
    }
}

/// Error numbers of Linux, the same on every architecture that is supported.
mod libc_errno {
    pub const ENOENT: i32 = 2;
    pub const EIO: i32 = 5;
    pub const ENOTDIR: i32 = 20;
    pub const EISDIR: i32 = 21;
    pub const EINVAL: i32 = 22;
    pub const ENODATA: i32 = 61;
    pub const EBADMSG: i32 = 74;
    pub const EOPNOTSUPP: i32 = 95;
    pub const EUCLEAN: i32 = 117;
}

/// Where a structure is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// At a disk address (512-byte sectors).
    Disk(u64),
    /// In an inode.
    Inode(u64),
    /// In an inode's block at a disk address.
    InodeBlock {
        /// The inode.
        ino: u64,
        /// 512-byte sectors.
        daddr: u64,
    },
}

/// A structure and where it is, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    /// The structure.
    pub what: &'static str,
    /// Where it is.
    pub at: At,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            At::Disk(daddr) => write!(f, "{} at sector {daddr}", self.what),
            At::Inode(ino) => write!(f, "{} of inode {ino}", self.what),
            At::InodeBlock { ino, daddr } => {
                write!(f, "{} of inode {ino} at sector {daddr}", self.what)
            }
        }
    }
}
