//! Mounting and serving a file system in one call.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::mount::MountFlags;

use crate::fs::FileSystem;
use crate::mount::{self, MountOptions};
use crate::server::{Server, ServerOptions};
use crate::session::{Session, SessionOptions};

/// How [`crate::mount()`] mounts and serves a file system.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How the mount looks to the kernel.
    pub mount: MountOptions,
    /// Sizes of requests, and what the session promises.
    pub session: SessionOptions,
    /// The transport, the wait policy, and limits for clients over shared memory.
    pub server: ServerOptions,
}

impl Options {
    /// The default options, with the name that /proc/mounts and `uvfs stats` show.
    ///
    /// ```
    /// use uvfs_server::Options;
    ///
    /// let mut options = Options::named("hello").read_only();
    /// options.mount.allow_other = true;
    /// assert_eq!(options.mount.name, "hello");
    /// ```
    pub fn named(name: &str) -> Self {
        let mut options = Self::default();
        options.mount.name = name.to_owned();
        options
    }

    /// Has the kernel refuse every change (EROFS).
    pub fn read_only(mut self) -> Self {
        self.mount.flags |= MountFlags::RDONLY;
        self
    }
}

/// Mounts a file system on a directory and serves it on threads of its own.
///
/// Root mounts directly. For other users fusermount3(1) does it, from the package fuse3.
///
/// ```no_run
/// # struct Hello;
/// # impl uvfs_server::FileSystem for Hello {}
/// # fn main() -> std::io::Result<()> {
/// uvfs_server::mount(Hello, "/mnt", uvfs_server::Options::named("hello"))?.wait();
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// When the file system can't be mounted there, the chosen transport can't be had, or a thread.
pub fn mount<F: FileSystem>(
    fs: F,
    at: impl AsRef<Path>,
    mut options: Options,
) -> io::Result<Mounted<F>> {
    let at = std::path::absolute(at)?;
    if options.session.source.is_empty() {
        options.session.source.clone_from(&options.mount.name);
    }
    let device = mount::mount(&at, &options.mount)?;
    let session = Arc::new(Session::new(fs, device, options.session));
    match Server::start(session, options.server) {
        Ok(server) => Ok(Mounted {
            server: Some(server),
            at,
        }),
        Err(error) => {
            let _ = mount::unmount(&at, true);
            Err(error)
        }
    }
}

/// A file system that is mounted and served. Dropping it takes the mount out of the tree; programs
/// that still use it are served as long as this process lives.
pub struct Mounted<F: FileSystem> {
    /// There until [`Mounted::wait`] takes it.
    server: Option<Server<F>>,
    at: PathBuf,
}

impl<F: FileSystem> Mounted<F> {
    /// The mount point, as an absolute path.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// The session: it has the file system, and tells the kernel of changes.
    pub fn session(&self) -> &Arc<Session<F>> {
        match &self.server {
            Some(server) => server.session(),
            None => unreachable!("only `wait` takes the server, and it takes `self` too"),
        }
    }

    /// Unmounts.
    ///
    /// # Errors
    /// EBUSY while a program uses the mount, EINVAL when somebody else has unmounted it.
    pub fn unmount(&self) -> io::Result<()> {
        mount::unmount(&self.at, false)
    }

    /// Waits until somebody has unmounted it and every request is answered.
    pub fn wait(mut self) {
        if let Some(server) = self.server.take() {
            server.wait();
        }
    }
}

impl<F: FileSystem> Drop for Mounted<F> {
    fn drop(&mut self) {
        if self.server.is_some() {
            // It may have been unmounted already.
            let _ = mount::unmount(&self.at, true);
        }
    }
}
