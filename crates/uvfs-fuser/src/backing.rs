//! Backing files: the kernel reads and writes them itself.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use uvfs_server::mount::{backing_close, backing_open};

/// A file that the kernel reads and writes by itself. Dropping this closes it, so it has to be kept for as
/// long as it is open.
#[derive(Debug)]
pub struct BackingId {
    device: Weak<OwnedFd>,
    pub(crate) backing_id: u32,
}

impl BackingId {
    /// Registers a file with a mount's `/dev/fuse` descriptor. The caller has to close the number.
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN; what the kernel says of the file otherwise.
    pub fn create_raw(fuse_dev: impl AsFd, fd: impl AsFd) -> io::Result<u32> {
        let id = backing_open(fuse_dev.as_fd(), fd.as_fd())?;
        u32::try_from(id).map_err(io::Error::other)
    }

    pub(crate) fn create(device: &Arc<OwnedFd>, fd: impl AsFd) -> io::Result<Self> {
        let id = Self::create_raw(device.as_fd(), fd)?;
        Ok(Self::wrap(device, id))
    }

    pub(crate) fn wrap(device: &Arc<OwnedFd>, id: u32) -> Self {
        Self {
            device: Arc::downgrade(device),
            backing_id: id,
        }
    }

    /// Gives the number, which the caller then has to close.
    pub fn into_raw(mut self) -> u32 {
        self.device = Weak::new();
        self.backing_id
    }
}

impl Drop for BackingId {
    fn drop(&mut self) {
        let Some(device) = self.device.upgrade() else {
            return;
        };
        if let Err(error) = backing_close(device.as_fd(), self.backing_id as i32) {
            tracing::error!(id = self.backing_id, %error, "closing a backing file");
        }
    }
}
