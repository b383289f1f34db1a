//! Errors of the reader.

use crate::format::Fault;
use rustix::io::Errno;
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
    /// The log is dirty and cannot be replayed.
    #[error("the log cannot be replayed: {0}")]
    Log(String),
    /// The log is on another device, which was not named.
    #[error("the log is on another device, which --logdev has to name")]
    LogDevice,
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
        let errno = match self {
            Error::Io { source, .. } | Error::Output { source, .. } => {
                return source.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
            }
            Error::NotXfs { .. } => Errno::INVAL,
            Error::Unsupported(_) => Errno::OPNOTSUPP,
            Error::Corrupt { fault, .. } => match fault {
                Fault::Crc { .. } => Errno::BADMSG,
                _ => Errno::UCLEAN,
            },
            Error::Log(_) | Error::LogDevice => Errno::UCLEAN,
            Error::NotFound(what) if *what == "attribute" => Errno::NODATA,
            Error::NotFound(_) => Errno::NOENT,
            Error::NotDirectory(_) => Errno::NOTDIR,
            Error::WrongType { wanted, .. } if *wanted == "regular file" => Errno::ISDIR,
            Error::WrongType { .. } => Errno::INVAL,
        };
        errno.raw_os_error()
    }
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
