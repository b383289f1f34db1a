//! Extended attributes.

use std::ffi::{OsStr, OsString};

use rustix::fs::XattrFlags;

use super::File;
use crate::error::{Doing, Result};

/// The words that errors of these calls begin with, before the file: see [`Doing::doing`].
const SETTING: &str = "setting an attribute of";
const READING: &str = "reading attributes of";

impl File {
    /// Sets an extended attribute, as fsetxattr(2) with its `flags`.
    ///
    /// # Errors
    /// The server's error.
    pub fn setxattr(&self, name: impl AsRef<OsStr>, value: &[u8], flags: XattrFlags) -> Result<()> {
        let (f, name) = (&*self.0, name.as_ref());
        let set = f.cache.server.setxattr(f.inode.node, name, value, flags);
        set.doing(SETTING, &f.name)
    }

    /// An extended attribute's value, as fgetxattr(2).
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the server answers.
    pub fn getxattr(&self, name: impl AsRef<OsStr>) -> Result<Vec<u8>> {
        let (f, name) = (&*self.0, name.as_ref());
        let value = self.retried(|| f.cache.server.getxattr(f.inode.node, name));
        value.doing(READING, &f.name)
    }

    /// The names of all extended attributes, as flistxattr(2).
    ///
    /// # Errors
    /// The server's error.
    pub fn listxattr(&self) -> Result<Vec<OsString>> {
        let f = &*self.0;
        let names = self.retried(|| f.cache.server.listxattr(f.inode.node));
        names.doing(READING, &f.name)
    }

    /// Removes an extended attribute, as fremovexattr(2).
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the server answers.
    pub fn removexattr(&self, name: impl AsRef<OsStr>) -> Result<()> {
        let (f, name) = (&*self.0, name.as_ref());
        let removed = f.cache.server.removexattr(f.inode.node, name);
        removed.doing(SETTING, &f.name)
    }
}
