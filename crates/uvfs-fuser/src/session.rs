//! A mount from its beginning to its end.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use uvfs_sys::lock;
use uvfs_sys::process::SignalSet;

use uvfs_server::mount::Mount;
use uvfs_server::signals::{OnSignals, SIGNALS, Waiter};
use uvfs_server::survive::{Worker, keep_plainly};
use uvfs_server::{Agreed, Server, ServerOptions, SessionOptions, Transport};

use crate::adapter::Adapter;
use crate::calls::Held;
use crate::{Config, Filesystem, Notifier, SessionACL};

/// A mount that ends when this is dropped.
#[derive(Debug)]
struct Mounted(Mount);

impl Mounted {
    fn new(at: &Path, config: &Config) -> io::Result<Self> {
        let options = crate::options::for_mount(config)?;
        uvfs_server::mount::mount(at, &options).map(Self)
    }

    /// As fuser: with AutoUnmount also while it is in use, whose users are served until they are done.
    fn unmount(&self) -> io::Result<()> {
        match self.0.is_guarded() {
            true => self.0.detach(),
            false => self.0.unmount(),
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = self.unmount() {
            tracing::warn!(at = %self.0.at().display(), %error, "unmounting");
        }
    }
}

/// A mount that each of its holders may end.
type Shared = Arc<Mutex<Option<Mounted>>>;

fn unmount(mount: &Shared) -> io::Result<()> {
    match lock(mount).take() {
        Some(mount) => mount.unmount(),
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
    signals: Option<OnSignals>,
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
        let survives = crate::options::survives(options);
        if survives && filesystem.survive().is_none() {
            let text = "survive: the file system does not have Filesystem::survive";
            return Err(crate::options::invalid(text.into()));
        }
        let mount = Mounted::new(mountpoint.as_ref(), options)?;
        // The keeper waits for them. A worker that is told to end before it can unmount is to do so later.
        let _blocked = survives.then(|| SignalSet::blocked(&SIGNALS));
        let worker = survives.then(|| keep_plainly(&mount.0)).transpose()?;
        let device = mount.0.device()?;
        let signals = match crate::options::leaves_signals(options) {
            true => None,
            false => Some(mount.0.clone()),
        };
        let mut session = Self::on(filesystem, device, Some(mount), options, worker)?;
        session.signals = signals.map(OnSignals::new).transpose()?;
        Ok(session)
    }

    /// Serves a `/dev/fuse` descriptor that another part of the program mounts.
    ///
    /// # Errors
    /// When the mount is gone, or `init` fails.
    pub fn from_fd(
        filesystem: FS,
        fd: OwnedFd,
        acl: SessionACL,
        mut config: Config,
    ) -> io::Result<Self> {
        config.acl = acl;
        Self::on(filesystem, fd, None, &config, None)
    }

    fn on(
        filesystem: FS,
        fd: OwnedFd,
        mount: Option<Mounted>,
        config: &Config,
        worker: Option<Worker>,
    ) -> io::Result<Self> {
        let device = Arc::new(fd.try_clone()?);
        let mount = Arc::new(Mutex::new(mount));
        let held = Destroys(Arc::new(Held::new(filesystem)));
        let threads = config.n_threads.unwrap_or(1);
        let adapter = Adapter::new(held.0.clone(), device.clone(), config.acl, threads)?;
        let options = SessionOptions {
            source: "fuser".into(),
            ..SessionOptions::default()
        };
        let session = Arc::new(uvfs_server::Session::new(adapter, fd, options));
        if let Some(worker) = &worker {
            session.outlives(worker.ledger())?;
        }
        let failed = session.fs().failed.clone();
        let agreed = Agreed::on(&session, Transport::Auto)
            .map_err(|error| lock(&failed).take().unwrap_or(error))?;
        if let Some(worker) = worker {
            worker.ready();
        }
        Ok(Self {
            held,
            session,
            agreed,
            threads,
            device,
            mount,
            signals: None,
        })
    }

    /// Serves until the mount has ended. SIGTERM, SIGINT and SIGHUP end it, unless the program does something else
    /// about them, or has `MountOption::CUSTOM("leave_signals")`.
    ///
    /// # Errors
    /// When a thread or its memory can't be had.
    pub fn run(self) -> io::Result<()> {
        if let Some(signals) = &self.signals {
            signals.waiter().waits();
        }
        self.serve()
    }

    fn serve(self) -> io::Result<()> {
        if self.threads == 0 {
            return Err(io::Error::other("n_threads is 0: at least one is needed"));
        }
        let Self {
            held,
            session,
            agreed,
            mount: _until_the_end,
            signals,
            ..
        } = self;
        let server = Server::serve(session, agreed, ServerOptions::default())?;
        server.wait();
        drop(held);
        drop(signals);
        Ok(())
    }

    /// Serves on a thread. Dropping the result unmounts. A signal as in [`Session::run`] ends the mount, and then the
    /// process, unless a thread is in [`BackgroundSession::join`].
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn spawn(self) -> io::Result<BackgroundSession> {
        let notifier = self.notifier();
        let mount = lock(&self.mount).take();
        let waiter = self.signals.as_ref().map(OnSignals::waiter);
        let guard = std::thread::Builder::new()
            .name("uvfs-fuser".into())
            .spawn(move || self.serve())?;
        Ok(BackgroundSession {
            guard,
            notifier,
            mount,
            waiter,
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
        Notifier::new(self.session.notifier())
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
    mount: Option<Mounted>,
    waiter: Option<Waiter>,
}

impl BackgroundSession {
    /// Unmounts, and waits until the file system is destroyed.
    ///
    /// # Errors
    /// EBUSY while the mount is in use, but not with `MountOption::AutoUnmount`, which detaches it and waits for its
    /// users; the error of the session.
    pub fn umount_and_join(mut self) -> io::Result<()> {
        if let Some(waiter) = self.waiter {
            waiter.waits();
        }
        if let Some(mount) = self.mount.take() {
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
        if let Some(waiter) = self.waiter {
            waiter.waits();
        }
        let panicked = |_| io::Error::other("the session's thread panicked");
        self.guard.join().map_err(panicked)?
    }
}
