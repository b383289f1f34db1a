//! The further questions that clients over shared memory ask of a file system.

use std::pin::Pin;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::error::Result;
use super::types::{Bytes, Context, Entry, Handle, Node};

/// A future that stays on the thread of its queue.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A file system gives this in [`FileSystem::clients`](super::FileSystem::clients) to serve programs under
/// `uvfs run`, and clients that outlive a restart of their server.
///
/// With [`open_flags`](Self::open_flags) and [`share`](Self::share) a program takes its open files of the mount
/// into its session over shared memory. The other methods have defaults:
/// [`lookups`](Self::lookups) spares the kernel's caches, and [`identity`](Self::identity) and
/// [`find`](Self::find) let a client find its files at the next server.
///
/// ```
/// use uvfs_server::FileSystem;
/// use uvfs_server::fs::*;
///
/// struct ReadOnly;
///
/// impl FileSystem for ReadOnly {
///     fn clients(&self) -> Option<&dyn ClientSupport> {
///         Some(self)
///     }
/// }
///
/// impl ClientSupport for ReadOnly {
///     fn open_flags(&self, _: Node, _: Handle) -> Result<OFlags> {
///         Ok(OFlags::RDONLY)
///     }
///
///     fn share(&self, _: Node, fh: Handle) -> BoxFuture<'_, Result<Handle>> {
///         // Handles count nothing here, so that any number of users can have one.
///         Box::pin(async move { Ok(fh) })
///     }
/// }
///
/// assert!(ReadOnly.clients().is_some());
/// ```
#[allow(unused_variables)]
pub trait ClientSupport {
    /// The flags that a file was opened with. EBUSY has the program leave this file to the kernel, for a file
    /// that the kernel reads and writes without requests.
    fn open_flags(&self, node: Node, fh: Handle) -> Result<OFlags>;

    /// Makes a further handle of an open file, of the same access, for a client that has a descriptor of it.
    /// The new handle outlives `fh`, is released like any other, and comes with a lookup of the node.
    fn share(&self, node: Node, fh: Handle) -> BoxFuture<'_, Result<Handle>>;

    /// How many lookups of a node are counted. With it the server knows whether the kernel has a node, too.
    /// `None` where that is not known.
    fn lookups(&self, node: Node) -> Option<u64> {
        None
    }

    /// A name of the node's file that outlives the server and never names another file. When its server came
    /// back, a client gives it to [`find`](Self::find). The root's says which source is served. At most
    /// [`uvfs_proto::ext::IDENTITY_MAX`] bytes. Where it is `None`, clients can't write what they have
    /// dirty after a restart. Asked for at each open.
    fn identity(&self, node: Node) -> Option<Bytes> {
        None
    }

    /// The path below the root by which a node's file can be found now. The server's statistics show it for a
    /// slow request, and a client that did not look the file up gives it to [`find`](Self::find).
    fn path(&self, node: Node) -> Option<Bytes> {
        None
    }

    /// Finds the node of an identity and counts a lookup; ESTALE when the file is gone. The identity may be
    /// followed by a path by which the client found the file. All of it comes from a client: it must lead to
    /// nothing that lookups would not.
    fn find<'a>(&'a self, cx: &'a Context, identity: &'a [u8]) -> BoxFuture<'a, Result<Entry>> {
        Box::pin(std::future::ready(Err(Errno::OPNOTSUPP.into())))
    }
}
