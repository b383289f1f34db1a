//! An open file: its descriptor, its inode and its user.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::OFlags;
use uvfs_io::ops::File;
use uvfs_server::fs::IoHow;

use crate::inode::Inode;

/// An open file.
pub(crate) struct OpenFile {
    pub(crate) fd: Arc<File>,
    pub(crate) inode: Arc<Inode>,
    /// The flags that the caller opened it with.
    pub(crate) asked: OFlags,
    pub(crate) by: By,
    /// The thread that opened it through the kernel for writing only.
    pub(crate) writer: Option<u32>,
    /// Bytes that WRITE requests brought.
    pub(crate) written: AtomicU64,
    /// The kernel sends each read and write as it is made, and no FSYNC after one that is to be synchronous.
    pub(crate) direct: bool,
    /// The host appends whatever is written, wherever: the file may only be appended to (`chattr +a`).
    pub(crate) appends: bool,
}

/// The user of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// The kernel, which reads and writes it at the inode's backing file.
    Backed,
    /// The kernel, which asks for what it reads and writes.
    Plain,
    /// The kernel, which asks for each read and write past its page cache, so the inode's mode does not matter.
    Around,
    /// A client.
    Client,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.inode.opens.fetch_sub(1, Ordering::AcqRel);
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl OpenFile {
    /// Whether a write is to be followed by a sync, because of the call (RWF_DSYNC) or of the mount: then of the data
    /// only, or of all. The host sees to an open file's own flags.
    pub(crate) fn syncs_after(&self, how: &IoHow) -> Option<bool> {
        let synchronous = how.flags & (OFlags::SYNC | OFlags::DSYNC);
        let syncs = self.direct && !self.asked.contains(synchronous);
        syncs.then(|| !synchronous.contains(OFlags::SYNC))
    }
}
