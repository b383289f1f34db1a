//! A mount from its beginning to its end.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use uvfs_sys::lock;

use rustix::event::{PollFd, PollFlags};
use uvfs_server::{Agreed, Server, ServerOptions, SessionOptions, Transport};

use crate::adapter::Adapter;
use crate::calls::Held;
use crate::{Config, Filesystem, MountOption, Notifier, SessionACL};

/// A mount that ends when this is dropped.
#[derive(Debug)]
struct Mount {
    at: PathBuf,
    device: Arc<OwnedFd>,
    /// Unmounts when this process ends.
    guard: Option<Child>,
}

/// Waits until this process ends, and unmounts: its standard input is a pipe that nobody writes to.
const GUARD: &str =
    r#"read -r _; fusermount3 -u -q -z -- "$0" 2>/dev/null || umount -l -- "$0" 2>/dev/null"#;

impl Mount {
    fn new(at: &Path, config: &Config) -> io::Result<(OwnedFd, Self)> {
        let options = crate::options::for_mount(config)?;
        let at = at.canonicalize()?;
        let device = uvfs_server::mount::mount(&at, &options)?;
        let mut mount = Self {
            at,
            device: Arc::new(device.try_clone()?),
            guard: None,
        };
        if config.mount_options.contains(&MountOption::AutoUnmount) {
            let guard = Command::new("/bin/sh")
                .args(["-c", GUARD])
                .arg(&mount.at)
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                // A signal from the terminal is for the server alone.
                .process_group(0)
                .spawn()?;
            mount.guard = Some(guard);
        }
        Ok((device, mount))
    }

    /// Whether the mount still exists.
    fn is_there(&self) -> bool {
        let mut device = [PollFd::new(&self.device, PollFlags::empty())];
        let now = rustix::event::Timespec::default();
        match rustix::event::poll(&mut device, Some(&now)) {
            Ok(0) | Err(_) => true,
            Ok(_) => !device[0].revents().contains(PollFlags::ERR),
        }
    }

    fn unmount(&mut self) -> io::Result<()> {
        // Another mount may be there by now.
        if self.is_there() {
            uvfs_server::mount::unmount(&self.at, false)?;
        }
        if let Some(mut guard) = self.guard.take() {
            let _ = guard.kill();
            let _ = guard.wait();
        }
        Ok(())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(error) = self.unmount() {
            tracing::warn!(at = %self.at.display(), %error, "unmounting");
        }
    }
}

/// A mount that each of its holders may end.
type Shared = Arc<Mutex<Option<Mount>>>;

fn unmount(mount: &Shared) -> io::Result<()> {
    match lock(mount).take() {
        Some(mut mount) => mount.unmount(),
        None => Ok(()),
    }
}

/// Destroys the file system of a session that never ran.
struct Destroys<FS: Filesystem>(Arc<Held<FS>>);

impl<FS: Filesystem> Drop for Destroys<FS> {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

/// A mounted file system. Dropping it unmounts.
pub struct Session<FS: Filesystem> {
    held: Destroys<FS>,
    session: Arc<uvfs_server::Session<Adapter<FS>>>,
    agreed: Agreed,
    threads: usize,
    device: Arc<OwnedFd>,
    mount: Shared,
}

impl<FS: Filesystem> fmt::Debug for Session<FS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("mount", &self.mount)
            .finish_non_exhaustive()
    }
}

impl<FS: Filesystem> AsFd for Session<FS> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl<FS: Filesystem> Session<FS> {
    /// Mounts a file system and calls its `init`. Other requests wait until it runs.
    ///
    /// # Errors
    /// When the options make no sense, the mount fails, or `init` does.
    pub fn new<P: AsRef<Path>>(
        filesystem: FS,
        mountpoint: P,
        options: &Config,
    ) -> io::Result<Session<FS>> {
        let (device, mount) = Mount::new(mountpoint.as_ref(), options)?;
        Self::on(filesystem, device, Some(mount), options.acl, options)
    }

    /// Serves a `/dev/fuse` descriptor that another part of the program mounts.
    ///
    /// # Errors
    /// When the mount is gone, or `init` fails.
    pub fn from_fd(
        filesystem: FS,
        fd: OwnedFd,
        acl: SessionACL,
        config: Config,
    ) -> io::Result<Self> {
        Self::on(filesystem, fd, None, acl, &config)
    }

    fn on(
        filesystem: FS,
        fd: OwnedFd,
        mount: Option<Mount>,
        acl: SessionACL,
        config: &Config,
    ) -> io::Result<Self> {
        let device = Arc::new(fd.try_clone()?);
        let mount = Arc::new(Mutex::new(mount));
        let held = Destroys(Arc::new(Held::new(filesystem)));
        let threads = config.n_threads.unwrap_or(1);
        let adapter = Adapter::new(held.0.clone(), device.clone(), acl, threads)?;
        let options = SessionOptions {
            source: "fuser".into(),
            ..SessionOptions::default()
        };
        let session = Arc::new(uvfs_server::Session::new(adapter, fd, options));
        if let Some(notifier) = session.invalidator() {
            let _ = session.fs().notifier.set(notifier);
        }
        let failed = session.fs().failed.clone();
        let agreed = Agreed::on(&session, Transport::Auto)
            .map_err(|error| lock(&failed).take().unwrap_or(error))?;
        Ok(Self {
            held,
            session,
            agreed,
            threads,
            device,
            mount,
        })
    }

    /// Serves until the mount has ended.
    ///
    /// # Errors
    /// When a thread or its memory can't be had.
    pub fn run(self) -> io::Result<()> {
        if self.threads == 0 {
            return Err(io::Error::other("n_threads is 0: at least one is needed"));
        }
        let Self {
            held,
            session,
            agreed,
            mount: _until_the_end,
            ..
        } = self;
        let server = Server::serve(session, agreed, ServerOptions::default())?;
        server.wait();
        drop(held);
        Ok(())
    }

    /// Serves on a thread. Dropping the result unmounts.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn spawn(self) -> io::Result<BackgroundSession> {
        let notifier = self.notifier();
        let mount = lock(&self.mount).take();
        let guard = std::thread::Builder::new()
            .name("uvfs-fuser".into())
            .spawn(move || self.run())?;
        Ok(BackgroundSession {
            guard,
            notifier,
            mount,
        })
    }

    /// Unmounts.
    ///
    /// # Errors
    /// EBUSY while the mount is in use.
    pub fn unmount(&mut self) -> io::Result<()> {
        unmount(&self.mount)
    }

    /// An object that unmounts, from any thread.
    pub fn unmount_callable(&mut self) -> SessionUnmounter {
        SessionUnmounter {
            mount: self.mount.clone(),
        }
    }

    /// An object that sends the kernel notifications, from any thread.
    pub fn notifier(&self) -> Notifier {
        let notifier = self.session.invalidator();
        Notifier::new(notifier.unwrap_or_else(|| self.session.notifier()))
    }
}

/// Unmounts a session, from any thread.
#[derive(Debug)]
pub struct SessionUnmounter {
    mount: Shared,
}

impl SessionUnmounter {
    /// Unmounts, unless that was done before.
    ///
    /// # Errors
    /// EBUSY while the mount is in use.
    pub fn unmount(&mut self) -> io::Result<()> {
        unmount(&self.mount)
    }
}

/// A session that runs on a thread. Dropping it unmounts.
#[derive(Debug)]
pub struct BackgroundSession {
    /// The thread.
    pub guard: JoinHandle<io::Result<()>>,
    notifier: Notifier,
    mount: Option<Mount>,
}

impl BackgroundSession {
    /// Unmounts, and waits until the file system is destroyed.
    ///
    /// # Errors
    /// EBUSY while the mount is in use; the error of the session.
    pub fn umount_and_join(mut self) -> io::Result<()> {
        if let Some(mut mount) = self.mount.take() {
            mount.unmount()?;
        }
        self.join()
    }

    /// An object that sends the kernel notifications, from any thread.
    pub fn notifier(&self) -> Notifier {
        self.notifier.clone()
    }

    /// Waits until the mount has ended and the file system is destroyed.
    ///
    /// # Errors
    /// The error of the session.
    pub fn join(self) -> io::Result<()> {
        let panicked = |_| io::Error::other("the session's thread panicked");
        self.guard.join().map_err(panicked)?
    }
}
