//! Extended attributes.

use std::ffi::{OsStr, OsString};
use std::io;

use super::File;

impl File {
    /// Sets an extended attribute, as fsetxattr(2) with its `flags`.
    ///
    /// # Errors
    /// The backend's error.
    pub fn setxattr(&self, name: impl AsRef<OsStr>, value: &[u8], flags: i32) -> io::Result<()> {
        let f = &*self.0;
        f.cache
            .backend
            .files()
            .setxattr(f.inode.node, name.as_ref(), value, flags)
    }

    /// An extended attribute's value, as fgetxattr(2).
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the backend answers.
    pub fn getxattr(&self, name: impl AsRef<OsStr>) -> io::Result<Vec<u8>> {
        let f = &*self.0;
        self.retried(|| {
            f.cache
                .backend
                .files()
                .getxattr(f.inode.node, name.as_ref())
        })
    }

    /// The names of all extended attributes, as flistxattr(2).
    ///
    /// # Errors
    /// The backend's error.
    pub fn listxattr(&self) -> io::Result<Vec<OsString>> {
        let f = &*self.0;
        self.retried(|| f.cache.backend.files().listxattr(f.inode.node))
    }

    /// Removes an extended attribute, as fremovexattr(2).
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the backend answers.
    pub fn removexattr(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        let f = &*self.0;
        f.cache
            .backend
            .files()
            .removexattr(f.inode.node, name.as_ref())
    }
}
