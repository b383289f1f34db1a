//! A file system that fails when it is told to.

use std::ops::Range;

use super::{Layer, Opcode};
use crate::fs::{Context, FileSystem, IoHow, Node, Payload, Result};

/// A request that comes by a [`Faults`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Call {
    /// The request: that of the kernel that the method is for.
    pub opcode: Opcode,
    /// The node that it is about.
    pub node: Node,
    /// The bytes of the file that a READ or WRITE is about; empty for others.
    pub range: Range<u64>,
}

/// Fails requests, and cuts reads and writes short, as a function says: for tests of what is above. FORGET never fails.
///
/// ```
/// use std::sync::atomic::{AtomicU32, Ordering};
/// use uvfs_server::fs::*;
/// use uvfs_server::layers::{Faults, Opcode};
/// use uvfs_server::{Session, SessionOptions};
///
/// # struct Memory;
/// # impl FileSystem for Memory {}
/// # use uvfs_server::FileSystem;
/// # fn main() -> std::io::Result<()> {
/// // Every third write finds the disk full, and each read gets a page at most.
/// let writes = AtomicU32::new(0);
/// let faults = Faults::new(Memory, move |call| match call.opcode {
///     Opcode::Write if writes.fetch_add(1, Ordering::Relaxed) % 3 == 2 => Err(Errno::NOSPC.into()),
///     Opcode::Read => Ok(4096),
///     _ => Ok(usize::MAX),
/// });
/// let session = Session::unmounted(faults, SessionOptions::default())?;
/// # Ok(())
/// # }
/// ```
pub struct Faults<F, P> {
    fs: F,
    plan: P,
}

impl<F, P> Faults<F, P>
where
    F: FileSystem,
    P: Fn(&Call) -> Result<usize> + Send + Sync + 'static,
{
    /// Over `fs`. `plan` is called for each request: with its error the request fails, before `fs` sees it; else it
    /// reads or writes at most so many bytes.
    pub fn new(fs: F, plan: P) -> Self {
        Self { fs, plan }
    }

    fn ask(&self, opcode: Opcode, node: Node, range: Range<u64>) -> Result<usize> {
        (self.plan)(&Call {
            opcode,
            node,
            range,
        })
    }

    /// The part of a read or write that is made.
    fn part(&self, opcode: Opcode, node: Node, how: &IoHow, data: &Payload) -> Result<Payload> {
        let range = how.offset..how.offset.saturating_add(data.len() as u64);
        let most = self.ask(opcode, node, range)?;
        Ok(data.slice(0..data.len().min(most)))
    }
}

impl<F, P> Layer for Faults<F, P>
where
    F: FileSystem,
    P: Fn(&Call) -> Result<usize> + Send + Sync + 'static,
{
    type Inner = F;

    fn inner(&self) -> &F {
        &self.fs
    }

    async fn around<T>(
        &self,
        _: &Context,
        opcode: Opcode,
        node: Node,
        call: impl AsyncFnOnce(Node) -> Result<T>,
    ) -> Result<T> {
        self.ask(opcode, node, 0..0)?;
        call(node).await
    }

    async fn read(&self, cx: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let part = self.part(Opcode::Read, node, how, data)?;
        self.fs.read(cx, node, how, &part).await
    }

    async fn write(&self, cx: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let part = self.part(Opcode::Write, node, how, data)?;
        self.fs.write(cx, node, how, &part).await
    }
}
