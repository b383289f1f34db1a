//! Mounting and serving a file system in one call.

use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};

use rustix::io::Errno;
use rustix::mount::MountFlags;
use uvfs_sys::lock;
use uvfs_sys::process::SignalSet;

use crate::fs::FileSystem;
use crate::mount::{self, Mount, MountOptions};
use crate::server::{Server, ServerOptions};
use crate::session::{Session, SessionOptions};
use crate::signals::{OnSignals, SIGNALS};
use crate::survive;

/// What SIGTERM, SIGINT and SIGHUP do to a mount of [`crate::mount()`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnSignal {
    /// They unmount, and the process ends: by [`Mounted::wait`], which returns, or else by the signal once the file
    /// system is destroyed. A mount in use is waited for after SIGINT, and detached after the others and a second
    /// SIGINT: its users are served until they are done. One more signal cuts them off.
    ///
    /// A signal that the program ignores, or has a handler for, is left to it, and a handler that it installs later
    /// takes over.
    #[default]
    Unmount,
    /// What the program has decided on. By default the process dies, [`FileSystem::destroy`] is not called, and the
    /// mount stays without a server ([`MountOptions::auto_unmount`] takes it away).
    Nothing,
}

/// How [`crate::mount()`] mounts and serves a file system.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// How the mount looks to the kernel.
    pub mount: MountOptions,
    /// Sizes of requests, and what the session promises.
    pub session: SessionOptions,
    /// The transport, the wait policy, and limits for clients over shared memory.
    pub server: ServerOptions,
    /// What signals do.
    pub on_signal: OnSignal,
    /// The mount outlives its server ([`survive`]), for a file system with [`FileSystem::survive`]. If the process that
    /// serves is killed or crashes, the next one serves on, and no call of a program fails.
    ///
    /// [`mount()`] then splits the process in two: the first one waits, and [`mount()`] returns in the second. It returns
    /// anew in each further one, where all memory is as it was at the call. What is to be kept lies in files, or in a
    /// memfd, that the program has opened before; it must not close those. The process must have no other thread at the
    /// call.
    ///
    /// The mount is over `/dev/fuse`, or with [`Transport::Uring`](crate::Transport::Uring) over io_uring.
    pub survive: bool,
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
/// When the file system can't be mounted there, the chosen transport can't be had, or a thread; what
/// [`Options::survive`] can't be had with.
pub fn mount<F: FileSystem>(
    fs: F,
    at: impl AsRef<Path>,
    mut options: Options,
) -> io::Result<Mounted<F>> {
    if options.session.source.is_empty() {
        options.session.source.clone_from(&options.mount.name);
    }
    if options.survive {
        can_survive(&fs, &options)?;
    }
    let mount = mount::mount(at.as_ref(), &options.mount)?;
    serve(fs, &mount, options).inspect_err(|_| {
        let _ = mount.detach();
    })
}

/// Refuses what a mount that outlives its server can't have.
fn can_survive<F: FileSystem>(fs: &F, options: &Options) -> io::Result<()> {
    let why = match options {
        _ if fs.survive().is_none() => "the file system does not have FileSystem::survive",
        _ if options.mount.auto_unmount => "not with auto_unmount",
        _ => return Ok(()),
    };
    let why = format!("Options::survive: {why}");
    Err(io::Error::new(io::ErrorKind::InvalidInput, why))
}

fn serve<F: FileSystem>(fs: F, mount: &Mount, options: Options) -> io::Result<Mounted<F>> {
    // The keeper waits for them. A worker that is told to end before it can unmount is to do so later.
    let _blocked = (options.survive).then(|| SignalSet::blocked(&SIGNALS));
    let worker = options.survive.then(|| survive::keep_plainly(mount));
    let worker = worker.transpose()?;
    let session = Arc::new(Session::new(fs, mount.device()?, options.session));
    if let Some(worker) = &worker {
        session.outlives(worker.ledger())?;
    }
    let server = Server::start(session.clone(), options.server)?;
    let signals = match options.on_signal {
        OnSignal::Unmount => Some(OnSignals::new(mount.clone())?),
        OnSignal::Nothing => None,
    };
    let life = Arc::new(Life {
        mount: mount.clone(),
        ended: Mutex::new(false),
        end: Condvar::new(),
        signals: Mutex::new(signals),
    });
    let ending = life.clone();
    std::thread::Builder::new()
        .name("uvfs-mount".into())
        .spawn(move || {
            server.wait();
            *lock(&ending.ended) = true;
            ending.end.notify_all();
            drop(lock(&ending.signals).take());
        })?;
    if let Some(worker) = worker {
        worker.ready();
    }
    Ok(Mounted { session, life })
}

/// A mount's life, as threads see it that wait for its end.
struct Life {
    mount: Mount,
    /// The file system is destroyed.
    ended: Mutex<bool>,
    end: Condvar,
    signals: Mutex<Option<OnSignals>>,
}

impl Life {
    fn wait(&self) {
        let ended = lock(&self.ended);
        let waited = self.end.wait_while(ended, |ended| !*ended);
        drop(waited);
    }

    fn unmount(&self) -> io::Result<()> {
        if uvfs_io::runtime::is_running() {
            // The kernel may have pages to write first, and this thread is the one to take them.
            return Err(Errno::DEADLK.into());
        }
        self.mount.unmount()
    }

    /// Unmounts, or detaches where that fails. True if the end follows at once.
    fn end(&self) -> bool {
        let unmounted = self.mount.unmount().is_ok();
        if !unmounted && let Err(error) = self.mount.detach() {
            tracing::warn!(at = %self.mount.at().display(), %error, "unmounting");
        }
        unmounted
    }

    /// Does so on a thread of its own.
    fn end_elsewhere(self: &Arc<Self>) {
        let life = self.clone();
        std::thread::spawn(move || life.end());
    }
}

/// A file system that is mounted and served. All methods can be called from several threads at once: share it in an
/// [`Arc`], or hand out [`Mounted::unmounter`].
///
/// Dropping it unmounts, and waits until the file system is destroyed. If programs use the mount, it is detached
/// instead: they are served as long as this process lives, and nothing is waited for.
pub struct Mounted<F: FileSystem> {
    session: Arc<Session<F>>,
    life: Arc<Life>,
}

impl<F: FileSystem> Mounted<F> {
    /// The mount point, as an absolute path without symbolic links.
    pub fn path(&self) -> &Path {
        self.life.mount.at()
    }

    /// The session: it has the file system, and tells the kernel of changes.
    pub fn session(&self) -> &Arc<Session<F>> {
        &self.session
    }

    /// Unmounts. That another thread or program has done so before is no error.
    ///
    /// # Errors
    /// EBUSY while a program uses the mount; EDEADLK in a handler of the file system, which
    /// [`Unmounter::end`] is for.
    pub fn unmount(&self) -> io::Result<()> {
        self.life.unmount()
    }

    /// Ends the mount from elsewhere: a handler of the file system, or of a signal that the program has chosen. It
    /// does not keep the mount.
    pub fn unmounter(&self) -> Unmounter {
        Unmounter(self.life.clone())
    }

    /// Waits until the mount has ended, whatever ended it, every request is answered, and the file system is
    /// destroyed. Not to be called in a handler of the file system.
    pub fn wait(&self) {
        if let Some(signals) = &*lock(&self.life.signals) {
            signals.waiter().waits();
        }
        self.life.wait();
    }
}

impl<F: FileSystem> Drop for Mounted<F> {
    fn drop(&mut self) {
        match uvfs_io::runtime::is_running() {
            true => self.life.end_elsewhere(),
            false if self.life.end() => self.life.wait(),
            false => {}
        }
    }
}

/// Ends a mount, from any thread.
#[derive(Clone)]
pub struct Unmounter(Arc<Life>);

impl Unmounter {
    /// As [`Mounted::unmount`].
    ///
    /// # Errors
    /// EBUSY while a program uses the mount; EDEADLK in a handler of the file system.
    pub fn unmount(&self) -> io::Result<()> {
        self.0.unmount()
    }

    /// Ends the mount, and does not wait for it: unmounts it, or takes it out of the tree if programs use it, which
    /// are served until they are done. [`Mounted::wait`] returns then.
    pub fn end(&self) {
        self.0.end_elsewhere();
    }
}

impl std::fmt::Debug for Unmounter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Unmounter").field(&self.0.mount).finish()
    }
}
