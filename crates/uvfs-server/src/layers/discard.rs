//! A file system that takes no data.

use super::Layer;
use crate::fs::{Context, CopyRange, Errno, FileSystem, IoHow, Node, OFlags, Payload, Result};

/// Throws away what is written, to measure all but the store. Files get their length and times: the last byte of each
/// write is passed on, and nothing else.
///
/// For files that are open with O_DIRECT the file system below has to take writes of one byte.
///
/// ```no_run
/// use uvfs_server::layers::Discard;
/// use uvfs_server::{FileSystem, Options, mount};
///
/// # fn serve(fs: impl FileSystem) -> std::io::Result<()> {
/// mount(Discard::new(fs), "/mnt", Options::named("null"))?.wait();
/// # Ok(())
/// # }
/// ```
pub struct Discard<F>(F);

impl<F: FileSystem> Discard<F> {
    /// Over `fs`.
    pub fn new(fs: F) -> Self {
        Self(fs)
    }
}

impl<F: FileSystem> Layer for Discard<F> {
    type Inner = F;

    fn inner(&self) -> &F {
        &self.0
    }

    async fn write(&self, cx: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let len = data.len();
        let Some(before) = len.checked_sub(1) else {
            return self.0.write(cx, node, how, data).await;
        };
        let offset = how.offset + before as u64;
        // Not at the end of the file, which is there only once this is written.
        let flags = how.flags - OFlags::APPEND;
        let last = IoHow {
            offset,
            flags,
            ..*how
        };
        let written = self
            .0
            .write(cx, node, &last, &data.slice(before..len))
            .await?;
        Ok(before + written)
    }

    /// The caller then reads and writes.
    async fn copy_file_range(&self, _: &Context, _: Node, _: &CopyRange) -> Result<u64> {
        Err(Errno::NOSYS.into())
    }
}
