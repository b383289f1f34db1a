//! A directory of a file system as one of its own.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};
use std::sync::{Arc, OnceLock};

use super::{Layer, Opcode};
use crate::fs::*;

/// Serves a directory of another file system, as a bind mount does: it is the root, and nothing outside of it can be
/// reached, by no name (its `..` is itself) and by no identity of a client.
///
/// The directory is looked up with the first request, as root, and held until the end, also where it is renamed or
/// removed. Symbolic links on the way to it are not followed. Clients can use files, but do not find them again at the
/// next server ([`ClientSupport::find`]).
///
/// ```no_run
/// use uvfs_server::layers::Prefix;
/// use uvfs_server::{FileSystem, Options, mount};
///
/// # fn serve(fs: impl FileSystem) -> std::io::Result<()> {
/// mount(Prefix::new(fs, "home/alice")?, "/mnt", Options::named("alice"))?.wait();
/// # Ok(())
/// # }
/// ```
pub struct Prefix<F> {
    fs: F,
    path: Vec<CString>,
    /// The directory, once it was looked up.
    root: Arc<OnceLock<Node>>,
}

impl<F: FileSystem> Prefix<F> {
    /// The directory at `path` of `fs`.
    ///
    /// # Errors
    /// For a path with `..` or with a 0 byte in it (EINVAL).
    pub fn new(fs: F, path: impl AsRef<Path>) -> io::Result<Self> {
        let mut names = Vec::new();
        for part in path.as_ref().components() {
            match part {
                Component::Normal(name) => names.push(CString::new(name.as_bytes())?),
                Component::RootDir | Component::CurDir => {}
                Component::ParentDir | Component::Prefix(_) => return Err(Errno::INVAL.into()),
            }
        }
        let (path, root) = (names, Arc::default());
        Ok(Self { fs, path, root })
    }

    async fn root(&self) -> Result<Node> {
        if let Some(&root) = self.root.get() {
            return Ok(root);
        }
        let (cx, mut at) = (Context::default(), ROOT);
        for name in &self.path {
            let found = self.fs.lookup(&cx, at, name).await;
            self.release(at);
            at = found?.node;
            if at == Node(0) {
                return Err(Errno::NOENT.into());
            }
        }
        if self.root.set(at).is_err() {
            // Another request was faster.
            self.release(at);
        }
        Ok(at)
    }

    /// Takes back a lookup of a directory on the way.
    fn release(&self, node: Node) {
        if node != ROOT {
            self.fs.forget(node, 1);
        }
    }

    /// A node as the file system below knows it.
    async fn below(&self, node: Node) -> Result<Node> {
        match node {
            ROOT => self.root().await,
            node => Ok(node),
        }
    }

    /// The same without waiting: a node that a client or the kernel has was looked up, and the root before it.
    fn known(&self, node: Node) -> Node {
        match node {
            ROOT => self.root.get().copied().unwrap_or(ROOT),
            node => node,
        }
    }
}

impl<F: FileSystem> Layer for Prefix<F> {
    type Inner = F;

    fn inner(&self) -> &F {
        &self.fs
    }

    async fn around<T>(
        &self,
        _: &Context,
        _: Opcode,
        node: Node,
        call: impl AsyncFnOnce(Node) -> Result<T>,
    ) -> Result<T> {
        call(self.below(node).await?).await
    }

    fn init(&self, config: &mut Config, session: Arc<dyn SessionHandle>) -> Result<()> {
        let root = self.root.clone();
        self.fs.init(config, Arc::new(Above { session, root }))
    }

    fn destroy(&self) {
        if let Some(&root) = self.root.get() {
            self.release(root);
        }
        self.fs.destroy();
    }

    fn clients(&self) -> Option<&dyn ClientSupport> {
        self.fs.clients().map(|_| self as _)
    }

    /// The root would have two numbers.
    fn survive(&self) -> Option<&dyn Survive> {
        None
    }

    /// The root's lookup is not taken back before the end.
    fn forget(&self, node: Node, lookups: u64) {
        if node != ROOT {
            self.fs.forget(node, lookups);
        }
    }

    async fn lookup(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Entry> {
        let root = self.root().await?;
        let up = name == c"..";
        if up && parent == ROOT {
            return Ok(Entry {
                node: ROOT,
                ..self.fs.getattr(cx, root, None).await?.into()
            });
        }
        let mut entry = self.fs.lookup(cx, self.known(parent), name).await?;
        if entry.node == root {
            self.release(root);
            entry.node = ROOT;
        }
        Ok(entry)
    }

    async fn rename(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new_parent: Node,
        new_name: &CStr,
        flags: RenameFlags,
    ) -> Result<Unlinked> {
        let (parent, to) = (self.below(parent).await?, self.below(new_parent).await?);
        let fs = &self.fs;
        fs.rename(cx, parent, name, to, new_name, flags).await
    }

    async fn link(
        &self,
        cx: &Context,
        node: Node,
        new_parent: Node,
        new_name: &CStr,
    ) -> Result<Entry> {
        let to = self.below(new_parent).await?;
        self.fs.link(cx, node, to, new_name).await
    }
}

impl<F: FileSystem> Prefix<F> {
    fn support(&self) -> Result<&dyn ClientSupport> {
        Ok(self.fs.clients().ok_or(Errno::NOSYS)?)
    }
}

impl<F: FileSystem> ClientSupport for Prefix<F> {
    fn open_flags(&self, node: Node, fh: Handle) -> Result<OFlags> {
        self.support()?.open_flags(self.known(node), fh)
    }

    fn share(&self, node: Node, fh: Handle) -> BoxFuture<'_, Result<Handle>> {
        Box::pin(async move { self.support()?.share(self.known(node), fh).await })
    }

    fn lookups(&self, node: Node) -> Option<u64> {
        self.fs.clients()?.lookups(self.known(node))
    }
}

/// The session of the file system below, whose directory is the session's root.
struct Above {
    session: Arc<dyn SessionHandle>,
    root: Arc<OnceLock<Node>>,
}

impl Above {
    fn above(&self, node: Node) -> Node {
        match self.root.get() == Some(&node) {
            true => ROOT,
            false => node,
        }
    }
}

impl SessionHandle for Above {
    fn outer(&self) -> Option<&dyn SessionHandle> {
        Some(&*self.session)
    }

    fn attributes_changed(&self, node: Node) {
        self.session.attributes_changed(self.above(node));
    }

    fn host_changed(&self, change: HostChange<'_>) {
        self.session.host_changed(match change {
            HostChange::Contents(node) => HostChange::Contents(self.above(node)),
            HostChange::Attributes(node) => HostChange::Attributes(self.above(node)),
            HostChange::KnownAttributes(node) => HostChange::KnownAttributes(self.above(node)),
            HostChange::Name(parent, name) => HostChange::Name(self.above(parent), name),
            HostChange::Anything(nodes) => {
                let nodes = nodes.into_iter().map(|node| self.above(node));
                HostChange::Anything(nodes.collect())
            }
        });
    }
}
