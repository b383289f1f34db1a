//! A file system that can't be changed.

use super::{Layer, Opcode};
use crate::fs::IOC_WRITE;
use crate::fs::{
    Access, Bytes, Context, Errno, FileSystem, Ioctl, Node, OFlags, OpenHow, Opened, Result,
};

/// Refuses every change with EROFS, as a read-only mount does: also opens for writing or truncation, locks excepted,
/// and access(2) for writing. [`Options::read_only`](crate::Options::read_only) has the kernel do that for a whole mount;
/// this also holds for clients over shared memory, after a remount, and for a part of a file system.
///
/// Of ioctl(2), commands that hand something over are refused (`_IOC_WRITE`), as those that set flags do.
///
/// ```no_run
/// use uvfs_server::layers::{Prefix, ReadOnly};
/// use uvfs_server::{FileSystem, Options, mount};
///
/// # fn serve(fs: impl FileSystem) -> std::io::Result<()> {
/// let public = ReadOnly::new(Prefix::new(fs, "srv/public")?);
/// mount(public, "/mnt", Options::named("public"))?.wait();
/// # Ok(())
/// # }
/// ```
pub struct ReadOnly<F>(F);

impl<F: FileSystem> ReadOnly<F> {
    /// Over `fs`.
    pub fn new(fs: F) -> Self {
        Self(fs)
    }
}

impl<F: FileSystem> Layer for ReadOnly<F> {
    type Inner = F;

    fn inner(&self) -> &F {
        &self.0
    }

    async fn around<T>(
        &self,
        _: &Context,
        opcode: Opcode,
        node: Node,
        call: impl AsyncFnOnce(Node) -> Result<T>,
    ) -> Result<T> {
        match changes(opcode) {
            true => Err(Errno::ROFS.into()),
            false => call(node).await,
        }
    }

    async fn open(&self, cx: &Context, node: Node, how: &OpenHow) -> Result<Opened> {
        if how.writes() || how.flags.contains(OFlags::TRUNC) {
            return Err(Errno::ROFS.into());
        }
        self.0.open(cx, node, how).await
    }

    async fn access(&self, cx: &Context, node: Node, mask: Access) -> Result<()> {
        if mask.contains(Access::WRITE_OK) {
            return Err(Errno::ROFS.into());
        }
        self.0.access(cx, node, mask).await
    }

    async fn ioctl(&self, cx: &Context, node: Node, ioctl: &Ioctl<'_>) -> Result<(i32, Bytes)> {
        if ioctl.cmd & IOC_WRITE != 0 {
            return Err(Errno::ROFS.into());
        }
        self.0.ioctl(cx, node, ioctl).await
    }
}

/// Whether a request changes something, whatever its arguments.
pub(super) fn changes(opcode: Opcode) -> bool {
    use Opcode::*;
    matches!(
        opcode,
        Setattr
            | Symlink
            | Mknod
            | Mkdir
            | Unlink
            | Rmdir
            | Rename2
            | Link
            | Create
            | Tmpfile
            | Write
            | Setxattr
            | Removexattr
            | Fallocate
            | CopyFileRange
    )
}
