//! Notifications to the kernel.

use std::ffi::{CString, OsStr};
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;

use uvfs_server::notify;

use crate::{INodeNo, PollHandle};

/// Wakes a caller that waits in poll(2).
#[derive(Clone)]
pub struct PollNotifier {
    handle: PollHandle,
    notifier: Notifier,
}

impl PollNotifier {
    pub(crate) fn new(handle: PollHandle, notifier: Notifier) -> Self {
        Self { handle, notifier }
    }

    /// The handle of the caller.
    pub fn handle(&self) -> PollHandle {
        self.handle
    }

    /// Makes the kernel ask the file again which events are ready.
    ///
    /// # Errors
    /// When the mount is gone.
    pub fn notify(self) -> io::Result<()> {
        self.notifier.poll(self.handle)
    }
}

impl fmt::Debug for PollNotifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PollHandle").field(&self.handle).finish()
    }
}

/// Sends the kernel notifications, from any thread.
#[derive(Clone)]
pub struct Notifier(notify::Notifier);

impl fmt::Debug for Notifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Notifier").finish()
    }
}

fn c_string(name: &OsStr) -> io::Result<CString> {
    CString::new(name.as_bytes()).map_err(Into::into)
}

impl Notifier {
    pub(crate) fn new(notifier: notify::Notifier) -> Self {
        Self(notifier)
    }

    /// Makes the kernel ask a polled file again which events are ready.
    ///
    /// # Errors
    /// When the mount is gone.
    pub fn poll(&self, kh: PollHandle) -> io::Result<()> {
        self.0.poll_ready(kh.0)
    }

    /// Drops a name from the kernel's cache.
    ///
    /// # Errors
    /// ENOTEMPTY for a directory in use; when the mount is gone.
    pub fn inval_entry(&self, parent: INodeNo, name: &OsStr) -> io::Result<()> {
        self.0.invalidate_entry(parent.0.into(), &c_string(name)?)
    }

    /// Drops a node's attributes, and its data from `offset` on for `len` bytes (0: to the end) unless
    /// `offset` is negative.
    ///
    /// # Errors
    /// When the mount is gone.
    pub fn inval_inode(&self, ino: INodeNo, offset: i64, len: i64) -> io::Result<()> {
        self.0.invalidate_inode(ino.0.into(), offset, len)
    }

    /// Puts data into the kernel's cache of a node, if it knows the node.
    ///
    /// # Errors
    /// When the mount is gone.
    pub fn store(&self, ino: INodeNo, offset: u64, data: &[u8]) -> io::Result<()> {
        match self.0.store(ino.0.into(), offset, data) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Invalidates a name that was removed, and tells programs that watch the directory.
    ///
    /// # Errors
    /// ENOTEMPTY for a directory in use; when the mount is gone.
    pub fn delete(&self, parent: INodeNo, child: INodeNo, name: &OsStr) -> io::Result<()> {
        self.0
            .deleted(parent.0.into(), child.0.into(), &c_string(name)?)
    }
}
