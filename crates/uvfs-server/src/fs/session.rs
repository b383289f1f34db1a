//! What a file system asks of the session that serves it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;

use super::{Again, Context, HostChange, Node};
use crate::notify::Notifier;

/// Says how long a file is, if that is known at once.
pub type Sizes = dyn Fn(Node) -> Option<u64> + Send + Sync;

/// The session of a file system, which [`FileSystem::init`](super::FileSystem::init) gets: for all that a file system
/// does beside answering requests. From any thread, and for as long as the file system likes: it does not keep the
/// session alive, and once that has ended nothing happens, or the error is ENODEV.
///
/// A test of a file system implements this with what it wants to see. `()` is no session at all.
///
/// ```
/// use std::sync::{Arc, OnceLock};
/// use uvfs_server::FileSystem;
/// use uvfs_server::fs::*;
///
/// /// A file whose length others change.
/// #[derive(Default)]
/// struct Feed {
///     session: OnceLock<Arc<dyn SessionHandle>>,
/// }
///
/// impl FileSystem for Feed {
///     fn init(&self, _: &mut Config, session: Arc<dyn SessionHandle>) -> Result<()> {
///         let _ = self.session.set(session);
///         Ok(())
///     }
/// }
///
/// impl Feed {
///     /// The feed has `size` bytes now, and programs that follow it see them.
///     fn grown(&self, size: u64) -> std::io::Result<()> {
///         match self.session.get() {
///             Some(session) => session.notifier()?.grow(Node(2), size),
///             None => Ok(()),
///         }
///     }
/// }
///
/// let feed = Feed::default();
/// let session: Arc<dyn SessionHandle> = Arc::new(());
/// let _ = feed.session.set(session);
/// assert!(feed.grown(100).is_err(), "there is no session");
/// ```
pub trait SessionHandle: Send + Sync {
    /// Another session, which does what this has no method for: for a layer that looks at a part of that.
    fn outer(&self) -> Option<&dyn SessionHandle> {
        None
    }

    /// Notifications of the kernel.
    ///
    /// # Errors
    /// ENODEV when the session has ended, or has no mount.
    fn notifier(&self) -> io::Result<Notifier> {
        self.outer().ok_or(Errno::NODEV)?.notifier()
    }

    /// Registers a backing file for opens of a node with [`OpenFlags::PASSTHROUGH`](crate::fs::OpenFlags), one at a
    /// time for each node. Clients are granted no lease of the node until it is taken back: the kernel reads and writes
    /// it without telling the server.
    ///
    /// # Errors
    /// EBUSY while a client has a lease of the node, or waits for one; EPERM without CAP_SYS_ADMIN,
    /// ELOOP where the file's file system is itself stacked on others, EINVAL, ENOTTY or EOPNOTSUPP
    /// where there is no passthrough; ENODEV when the session has ended.
    fn register_backing(&self, node: Node, file: BorrowedFd<'_>) -> io::Result<i32> {
        let outer = self.outer().ok_or(Errno::NODEV)?;
        outer.register_backing(node, file)
    }

    /// Takes back a node's registration, after the last of its opens was released.
    fn unregister_backing(&self, node: Node, id: i32) {
        if let Some(outer) = self.outer() {
            outer.unregister_backing(node, id);
        }
    }

    /// Counts a registration that an earlier server of the mount made, and that still holds.
    fn restored_backing(&self, node: Node) {
        if let Some(outer) = self.outer() {
            outer.restored_backing(node);
        }
    }

    /// Whether the mount outlives its server ([`survive`](crate::survive)).
    fn outlives(&self) -> bool {
        self.outer().is_some_and(|outer| outer.outlives())
    }

    /// The descriptors that the file system of an earlier server has [kept](Self::keep), which are now this one's. Check that
    /// they are what they have to be.
    fn kept(&self) -> Option<[OwnedFd; 2]> {
        self.outer()?.kept()
    }

    /// Has the next server of the mount get two descriptors. They stay open, so the kernel goes on with what they stand for
    /// while there is no server.
    fn keep(&self, kept: [BorrowedFd<'_>; 2]) {
        if let Some(outer) = self.outer() {
            outer.keep(kept);
        }
    }

    /// Saves again what the next server finds a node by, because that has changed: `save` is
    /// [`Survive::save_node`](super::Survive::save_node), for instance. Does nothing for a node that the kernel does not know. Not to
    /// be called with a lock that `save_node` takes.
    fn save_again(&self, node: Node, save: &mut dyn FnMut(&mut Vec<u8>) -> io::Result<()>) {
        if let Some(outer) = self.outer() {
            outer.save_again(node, save);
        }
    }

    /// Keeps a number of the file system's own for the next server, before a handler does what must not be done twice:
    /// for instance the size of a file that it is about to append to. Only for requests that change something other
    /// than attributes and data at a fixed place.
    fn note(&self, cx: &Context, note: u64) {
        if let Some(outer) = self.outer() {
            outer.note(cx, note);
        }
    }

    /// Whether an earlier server had begun this request when it was killed, so that it may be done already. If the
    /// handler finds that it is (a name that it is to make exists since then, or one that it is to remove is
    /// missing), it answers as it would have then.
    fn again(&self, cx: &Context) -> Option<Again> {
        self.outer()?.again(cx)
    }

    /// Invalidates the attributes that the kernel has of a node, which a request changed whose answer
    /// does not tell. Does not wait.
    fn attributes_changed(&self, node: Node) {
        if let Some(outer) = self.outer() {
            outer.attributes_changed(node);
        }
    }

    /// Says that changes which other programs make will be reported by [`host_changed`](Self::host_changed), so that
    /// names and attributes may be given for long. False where that is of no use, as no kernel caches them.
    ///
    /// After a report that contents changed, the session asks `size`, on a thread of its own, and tells the kernel of a
    /// file that is longer ([`Notifier::grow`]).
    fn host_is_watched(&self, size: Box<Sizes>) -> bool {
        let outer = self.outer();
        outer.is_some_and(|outer| outer.host_is_watched(size))
    }

    /// Another program has changed something behind the mount: the server invalidates what the
    /// kernel has of it.
    fn host_changed(&self, change: HostChange<'_>) {
        if let Some(outer) = self.outer() {
            outer.host_changed(change);
        }
    }
}

impl SessionHandle for () {}
