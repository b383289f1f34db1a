//! The sources that a new file system is filled from.

mod acl;
mod compressed;
mod contexts;
mod glob;
mod host;
mod member;
pub mod oci;
mod pax;
pub(super) mod proto;
mod rules;
mod sparse;
mod table;
pub mod tar;
mod tree;

pub use contexts::Contexts;
pub use glob::Patterns;
pub use host::HostDir;
pub use rules::{IdRange, Others, Owners, Rules};

use super::MkfsError;
use crate::blocks::{pread, pread_exact};
use crate::bulk::attr::NewAttr;
pub use crate::read::inode::Time;
use std::error::Error;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

fn invalid(why: impl Into<Box<dyn Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// An inode's attributes as the source has them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meta {
    /// Type and permissions.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Major and minor number of a device.
    pub rdev: (u32, u32),
    /// Last access.
    pub atime: Time,
    /// Last change of the contents.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
    /// Birth.
    pub crtime: Time,
    /// `DIFLAG_IMMUTABLE`, `DIFLAG_APPEND` and `DIFLAG_NODUMP`.
    pub flags: u16,
}

impl Meta {
    /// A directory of root's, with all these times.
    pub(super) fn directory(time: Time) -> Meta {
        Meta {
            mode: 0o040_755,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            ..Meta::default()
        }
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.mode & 0o170_000 == 0o040_000
    }
}

/// The parts of a file that hold data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// All of it.
    Dense,
    /// These ranges of bytes (start, length), in order and apart; the rest is holes.
    Runs(Vec<(u64, u64)>),
}

/// A name in a directory, with the inode that it leads to.
#[derive(Debug, Clone)]
pub struct SourceEntry {
    /// The name: 1 to 255 bytes.
    pub name: Box<[u8]>,
    /// The inode.
    pub meta: Meta,
    /// The same for all names of an inode that has several; `None` if this is the only one.
    pub links: Option<(u64, u64)>,
    /// Extended attributes in the order of their names.
    pub attrs: Vec<NewAttr>,
    /// The target of a symbolic link; empty for others.
    pub target: Box<[u8]>,
    /// Where a regular file has data.
    pub data: Data,
}

/// A directory of a source.
pub trait SourceDir: Send + Sync {
    /// All entries in the order of their names' bytes, without "." and "..".
    ///
    /// # Errors
    /// [`MkfsError::Source`], which names the path.
    fn list(&self) -> Result<Vec<SourceEntry>, MkfsError> {
        self.list_wanted(&|_| true)
    }

    /// As [`SourceDir::list`], but only entries with these names. Nothing else is looked at.
    ///
    /// # Errors
    /// As [`SourceDir::list`].
    fn list_wanted(&self, wanted: &dyn Fn(&[u8]) -> bool) -> Result<Vec<SourceEntry>, MkfsError>;

    /// The directory `name` in this one; `None` if there is none any more.
    ///
    /// # Errors
    /// As [`SourceDir::list`].
    fn enter(self: Arc<Self>, name: &[u8]) -> Result<Option<Arc<dyn SourceDir>>, MkfsError>;

    /// The regular file `name` in this directory; `None` if there is none any more.
    ///
    /// # Errors
    /// As [`SourceDir::list`].
    fn open(&self, name: &[u8]) -> Result<Option<SourceReader>, MkfsError>;

    /// The path of the entry `name`, or of the directory itself if that is empty, for messages.
    fn path(&self, name: &[u8]) -> PathBuf;
}

/// A source: its root directory, whose own attributes become those of the new root directory.
#[derive(Clone)]
pub struct Root {
    /// The directory.
    pub dir: Arc<dyn SourceDir>,
    /// Its inode.
    pub meta: Meta,
    /// Its extended attributes.
    pub attrs: Vec<NewAttr>,
}

/// An open file of a source.
#[derive(Debug)]
pub enum SourceReader {
    /// A file of the host, and its size when it was opened.
    Host(OwnedFd, u64),
    /// Parts of another file.
    Parts {
        /// The file.
        file: Arc<File>,
        /// Where the contents are: offset, length, and where that is in the other file. Sorted;
        /// what is in between reads as zeros.
        parts: Arc<[(u64, u64, u64)]>,
    },
}

impl SourceReader {
    /// The size of a file that others may change meanwhile.
    pub(super) fn changeable_size(&self) -> Option<u64> {
        match self {
            SourceReader::Host(_, size) => Some(*size),
            SourceReader::Parts { .. } => None,
        }
    }

    /// Reads into `buf` from `offset`, and gives the bytes that there were: fewer than asked for only if the file ends.
    /// The rest of `buf` becomes zeros.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<usize> {
        match self {
            SourceReader::Host(fd, _) => {
                let n = pread(fd, offset, buf)?;
                buf[n..].fill(0);
                Ok(n)
            }
            SourceReader::Parts { file, parts } => {
                buf.fill(0);
                let end = offset + buf.len() as u64;
                let first = parts.partition_point(|(start, len, _)| start + len <= offset);
                let here = parts[first..].iter().take_while(|p| p.0 < end);
                for (start, len, at) in here {
                    let from = offset.max(*start);
                    let to = end.min(start + len);
                    if from < to {
                        let part = (from - offset) as usize..(to - offset) as usize;
                        pread_exact(&**file, at + (from - start), &mut buf[part])?;
                    }
                }
                Ok(buf.len())
            }
        }
    }
}

fn as_path(bytes: &[u8]) -> PathBuf {
    OsStr::from_bytes(bytes).into()
}
