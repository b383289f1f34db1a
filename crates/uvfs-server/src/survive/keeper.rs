//! The process that keeps the mount while workers come and go.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Mode, OFlags, fstatfs, statfs};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus, getpgid, kill_process,
    wait as wait_any, waitid,
};
use uvfs_queue::placement;
use uvfs_sys::process::{
    Orphans, SignalSet, close_on_exec, fork_sharing_descriptors, fork_without_descriptors,
    open_descriptors,
};

use super::book::Book;
use super::ledger::Ledger;
use crate::mount::Mount;
use crate::notify::Writers;
use crate::signals::SIGNALS;

/// So many workers in a row may crash before they have served for [`SOON`], and ten times as many may be killed before they serve.
const MOST_CRASHES: u32 = 10;
const SOON: Duration = Duration::from_millis(100);

/// How often a keeper looks whether its worker is dead but for threads that can't die ([`Child::only_notifies`]): no signal
/// says so. Programs wait that much longer then. It costs a call and a look at memory.
const LOOKS: Duration = Duration::from_millis(100);

/// When [`fetch`] calls: more than once, as the first request that the worker answers may wait for one that the kernel still has.
const FETCHES: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(2),
    Duration::from_millis(20),
    Duration::from_millis(200),
    Duration::from_secs(1),
];

/// A worker's word that it serves.
pub(super) const READY: Signal = Signal::USR1;
/// Asks for another program.
const UPGRADE: Signal = Signal::USR2;

/// A process that serves a mount which outlives it.
#[derive(Debug)]
pub struct Worker {
    ledger: Arc<Ledger>,
    before: Option<String>,
}

impl Worker {
    /// What a session needs to serve on: [`Session::outlives`](crate::Session::outlives).
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// How the worker before this one ended; nothing if this is the first.
    pub fn before(&self) -> Option<&str> {
        self.before.as_deref()
    }

    /// Says that the mount answers. From the first worker's word on, the next one serves it if a worker is killed.
    pub fn ready(&self) {
        self.ledger.tell_ready();
    }
}

/// What a program does in the keeper of its mount.
pub trait Keeper {
    /// Whether it has a [`successor`](Self::successor).
    const REPLACES: bool = false;

    /// The first worker has called [`Worker::ready`].
    fn ready(&mut self) {}

    /// The program that is to keep the mount from now on, at SIGUSR2: mostly the same file, which was replaced. The keeper
    /// executes it, as the same process. It finds the mount by [`Kept::take`], and calls [`keep`] with that.
    ///
    /// # Errors
    /// Why there is none. The mount stays as it is.
    fn successor(&mut self) -> io::Result<Command> {
        Err(Errno::OPNOTSUPP.into())
    }
}

/// A keeper that does no more than keep.
impl Keeper for () {}

/// The variable that tells a successor of what it has: its process, so that no child takes it for its own, and descriptors of
/// the book, of the connection, and of the program from before (-1: none).
const KEPT: &str = "UVFS_KEPT";

/// A mount that an earlier program of this process has kept.
#[derive(Debug)]
pub struct Kept {
    book: Book,
    device: OwnedFd,
    /// The program from before; nothing if this is that one again.
    old: Option<OwnedFd>,
    /// Those of its last worker, which is dead.
    orphans: BTreeSet<RawFd>,
}

impl Kept {
    /// What an earlier program has kept, if there is one, and the descriptors `own`, which it has told of by means of its
    /// own. To be called before this process opens anything.
    ///
    /// # Errors
    /// When this is not what it was told.
    pub fn take(own: &[RawFd]) -> io::Result<Option<(Self, Vec<OwnedFd>)>> {
        let Some(kept) = std::env::var_os(KEPT) else {
            return Ok(None);
        };
        let kept = kept.to_str().unwrap_or_default();
        let invalid = || io::Error::new(io::ErrorKind::InvalidInput, format!("{KEPT}={kept}"));
        let numbers: Vec<RawFd> = kept.split(',').flat_map(str::parse).collect();
        let &[process, book, device, old] = numbers.as_slice() else {
            return Err(invalid());
        };
        if process as u32 != std::process::id() {
            // A child of the one that it is for.
            return Ok(None);
        }
        let mut orphans = open_descriptors()?;
        let known = [book, device, old];
        orphans.retain(|fd| *fd > 2 && !own.contains(fd) && !known.contains(fd));
        // SAFETY: this process has opened nothing yet, and the descriptors are those of the program before.
        let found = unsafe { Orphans::find(&orphans)? };
        let claim = |fd| found.claim(fd).map_err(|_| invalid());
        let kept = Self {
            book: Book::open(claim(book)?)?,
            device: claim(device)?,
            old: (old >= 0).then(|| claim(old)).transpose()?,
            orphans,
        };
        let own = own.iter().map(|fd| claim(*fd)).collect::<io::Result<_>>()?;
        close_on_exec(&open_descriptors()?, true)?;
        Ok(Some((kept, own)))
    }

    /// The connection to the kernel, for [`mount::held`](crate::mount::held).
    ///
    /// # Errors
    /// EMFILE when there can be no other descriptor.
    pub fn device(&self) -> io::Result<OwnedFd> {
        self.device.try_clone()
    }

    /// Goes back to the earlier program, with its arguments. Returns if that fails, or if it has failed, too.
    pub fn go_back(&self) -> io::Error {
        let Some(old) = &self.old else {
            return io::Error::other("the program from before can't serve it either");
        };
        let mut args = self.book.args().into_iter();
        let mut program = Command::new(format!("/proc/self/fd/{}", old.as_raw_fd()));
        program.arg0(args.next().unwrap_or_default()).args(args);
        execute(program, &self.book, &self.device, None)
    }
}

/// Executes a successor, which has all descriptors of this process. Returns if that fails.
fn execute(
    mut program: Command,
    book: &Book,
    device: &OwnedFd,
    old: Option<&OwnedFd>,
) -> io::Error {
    let (book, device) = (book.as_fd().as_raw_fd(), device.as_raw_fd());
    let old = old.map_or(-1, AsRawFd::as_raw_fd);
    let process = std::process::id();
    program.env(KEPT, format!("{process},{book},{device},{old}"));
    let keeps = |closes| open_descriptors().and_then(|all| close_on_exec(&all, closes));
    if let Err(error) = keeps(false) {
        return error;
    }
    let error = program.exec();
    let _ = keeps(true);
    error
}

/// Splits the process into a keeper of `mount` and a worker, in which this returns. Whenever a signal kills the worker, it
/// returns in the next one. It returns in no keeper: that ends with the status of the worker that exits, or by SIGTERM,
/// SIGINT or SIGHUP as the worker did.
///
/// To be called after mounting, before the process has a second thread, and with SIGTERM, SIGINT and SIGHUP blocked. `kept`
/// is what an earlier program of this process has kept.
///
/// # Errors
/// EBUSY when the process has a second thread; when there can be no process or no shared memory.
pub fn keep<K: Keeper>(mount: &Mount, kept: Option<Kept>, keeper: &mut K) -> io::Result<Worker> {
    let mut owned = open_descriptors()?;
    let (book, mut old) = match kept {
        None => (Book::create()?, None),
        Some(kept) => {
            owned.retain(|fd| !kept.orphans.contains(fd));
            (kept.book, Some((kept.device, kept.old)))
        }
    };
    owned.insert(book.as_fd().as_raw_fd());
    let waited = [libc::SIGCHLD, READY.as_raw(), UPGRADE.as_raw()];
    let signals = SignalSet::block(&[&SIGNALS[..], &waited].concat());
    let own = SignalSet::of(&waited);
    let process = rustix::process::getpid();
    let (mut serves, mut crashes) = (false, 0);
    let mut before = (old.is_some()).then(|| "the server was replaced".to_owned());
    loop {
        // Before there is another worker: what this process opens from then on is no orphan.
        let orphans = match before {
            Some(_) => Some(orphans(&owned)?),
            None => None,
        };
        let Some(pid) = fork_sharing_descriptors()? else {
            own.unblock();
            // The keeper's: what is dropped here is closed there, too.
            std::mem::forget(old.take());
            return Ok(Worker {
                ledger: Arc::new(Ledger::new(book, orphans, process)),
                before,
            });
        };
        let _ = rustix::thread::set_name(c"uvfs-keeper");
        let worker = Child {
            pid,
            writers: book.writers(),
        };
        let mut since = None;
        let ended = loop {
            match wait(&worker, &signals) {
                Happened::Ready => {
                    // Also when it has another entry of io_uring.
                    let waits = since.is_some() || before.is_some();
                    if waits && matches!(book.entries(), Ok(Some(_))) {
                        fetch(mount);
                    }
                    since.get_or_insert_with(Instant::now);
                    if !std::mem::replace(&mut serves, true) {
                        if K::REPLACES {
                            book.count_program();
                        }
                        book.set_args(std::env::args_os());
                        keeper.ready();
                        if let Some((device, program)) = old.take() {
                            // There is no way back any more. Their numbers are for the workers from now on.
                            owned.remove(&device.as_raw_fd());
                            program.map(|program| owned.remove(&program.as_raw_fd()));
                        }
                    }
                }
                Happened::Upgrade if serves => {
                    let error = replace(&worker, &book, mount, keeper);
                    tracing::error!(%error, "{}: not replaced", mount.at().display());
                }
                Happened::Upgrade => {}
                Happened::Ended(end) => break end,
            }
        };
        if !serves
            && ended != End::Status(0)
            && let Some((device, Some(old))) = old.take()
        {
            // The worker that the new program began with does not serve.
            let kept = Kept {
                book,
                device,
                old: Some(old),
                orphans: BTreeSet::new(),
            };
            let error = kept.go_back();
            tracing::error!(%error, "{}: the mount ends", mount.at().display());
            std::process::exit(1);
        }
        let signal = match ended {
            End::Signal(signal) => signal,
            End::Status(status) => {
                if status != 0 {
                    let _ = mount.detach();
                }
                std::process::exit(status);
            }
        };
        if SIGNALS.contains(&signal) {
            // It did as it was told, and so does this.
            let _ = mount.detach();
            end_by(signal);
        }
        // In tenths of a crash. What kills a worker may have other reasons than the worker.
        let killed = signal == libc::SIGKILL;
        crashes = match since {
            Some(since) if killed || since.elapsed() >= SOON => 0,
            None if killed => crashes + 1,
            _ => crashes + 10,
        };
        let how = format!("the server, process {pid}, was ended by signal {signal}");
        if !serves || crashes >= MOST_CRASHES * 10 {
            let gone = mount.detach();
            let at = mount.at().display();
            tracing::error!(%how, ?gone, "{at}: the mount ends");
            std::process::exit(1);
        }
        before = Some(how);
    }
}

/// As [`keep`], with a keeper that does no more than keep. The log has how the worker before this one ended.
///
/// # Errors
/// As there.
pub fn keep_plainly(mount: &Mount) -> io::Result<Worker> {
    let worker =
        keep(mount, None, &mut ()).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::BUSY) => io::Error::new(
                io::ErrorKind::ResourceBusy,
                "a mount that outlives its server is made before the process has a second thread",
            ),
            _ => error,
        })?;
    if let Some(before) = worker.before() {
        tracing::error!("{}: {before}; this one goes on", mount.at().display());
    }
    Ok(worker)
}

/// Has the kernel give out, over io_uring, what programs have asked for while there was no worker. It does so when the next
/// request of the same core is answered, and not when a worker registers entries. So a process calls statfs(2) on each core. The
/// worker must not: if it is killed, its call ends only when the next worker answers it. The process has no descriptor, as that of
/// the connection would keep the mount alive that it waits for. It asks by a copy of the mount, if it may have one (CAP_SYS_ADMIN):
/// a call under way would have umount(8) fail.
fn fetch(mount: &Mount) {
    if !matches!(fork_without_descriptors(), Ok(None)) {
        return;
    }
    let _ = rustix::thread::set_name(c"uvfs-fetches");
    let cores = placement::allowed_cores().unwrap_or_default();
    let copied = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    for pause in FETCHES {
        std::thread::sleep(pause);
        let copy = open_tree(CWD, mount.at(), copied).ok();
        for &core in &cores {
            let _ = placement::bind_to_core(core);
            let _ = match &copy {
                Some(copy) => fstatfs(copy),
                None => statfs(mount.at()),
            };
        }
    }
    std::process::exit(0);
}

/// Ends the process as the signal does.
fn end_by(signal: i32) -> ! {
    SignalSet::of(&[signal]).unblock();
    if let Some(signal) = Signal::from_named_raw(signal) {
        let _ = kill_process(rustix::process::getpid(), signal);
    }
    // The program has a handler for it, or ignores it.
    std::process::exit(128 + signal)
}

/// Kills a worker, and has another program keep the mount. Returns if that fails: then the next worker is this program's.
fn replace(worker: &Child, book: &Book, mount: &Mount, keeper: &mut impl Keeper) -> io::Error {
    let mut prepare = || {
        let program = keeper.successor()?;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let old = rustix::fs::open("/proc/self/exe", flags, Mode::empty())?;
        let device = mount.device()?;
        kill_process(worker.pid, Signal::KILL)?;
        worker.wait()?;
        Ok((program, old, device))
    };
    match prepare() {
        Ok((program, old, device)) => execute(program, book, &device, Some(&old)),
        Err(error) => error,
    }
}

/// What a worker that is dead has left open.
fn orphans(owned: &BTreeSet<RawFd>) -> io::Result<Orphans> {
    // SAFETY: `owned` are the descriptors from before the first worker. Since then only workers have opened any, the last
    // of which is dead, and the next one is not there yet. The keeper uses none but `owned`.
    unsafe { Orphans::find(owned) }
}

/// How a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Status(i32),
    Signal(i32),
}

impl From<WaitStatus> for End {
    fn from(status: WaitStatus) -> Self {
        match status.terminating_signal() {
            Some(signal) => Self::Signal(signal),
            None => Self::Status(status.exit_status().unwrap_or(1)),
        }
    }
}

/// A worker, for its keeper.
struct Child {
    pid: Pid,
    writers: Writers,
}

impl Child {
    /// How it ends, if all that is left of it are threads that notify. The kernel has them wait for a page that they write to
    /// or throw away, or for a directory in which a name is made, and lets no signal end that. It may be the next worker who
    /// has to answer what they wait for. They do nothing else any more: they die when they return to the program.
    ///
    /// If it is killed, its other threads are dead by then. If it crashes, one of them waits to dump all threads, and the
    /// others, which are dead or idle, wait for that.
    fn only_notifies(&self) -> Option<End> {
        let noted = self.writers.all();
        if noted.is_empty() {
            return None;
        }
        let process = PathBuf::from(format!("/proc/{}", self.pid));
        let number = |name: OsString| name.to_str().and_then(|name| name.parse().ok());
        let tasks = std::fs::read_dir(process.join("task")).ok()?;
        let tasks = tasks.flatten().flat_map(|task| number(task.file_name()));
        let (writers, others): (Vec<u64>, Vec<u64>) = tasks.partition(|task| noted.contains(task));
        if writers.is_empty() {
            return None;
        }
        let is_alive = |task: &&u64| {
            let stat = std::fs::read_to_string(process.join(format!("task/{task}/stat")));
            let ended = [") Z ", ") X ", ") I "];
            stat.is_ok_and(|stat| !ended.iter().any(|state| stat.contains(state)))
        };
        let alive = others.iter().filter(is_alive).count();
        let status = std::fs::read_to_string(process.join("status")).ok()?;
        match (alive, status.contains("\nCoreDumping:\t1")) {
            (0, false) => Some(End::Signal(libc::SIGKILL)),
            (1, true) => Some(End::Signal(libc::SIGABRT)),
            _ => None,
        }
    }

    /// Whether it is dead, or as good as dead.
    fn is_over(&self) -> io::Result<bool> {
        // It stays to be waited for.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        Ok(waitid(WaitId::Pid(self.pid), options)?.is_some() || self.only_notifies().is_some())
    }

    /// Waits until it is, after it was killed.
    fn wait(&self) -> io::Result<()> {
        while !self.is_over()? {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// What a keeper has to see to.
enum Happened {
    /// The worker serves.
    Ready,
    /// Another program is asked for.
    Upgrade,
    Ended(End),
}

/// Waits for something to see to, and passes on signals that end the mount.
fn wait(worker: &Child, signals: &SignalSet) -> Happened {
    loop {
        match wait_any(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == worker.pid => return Happened::Ended(status.into()),
            // A child from before.
            Ok(Some(_)) | Err(Errno::INTR) => continue,
            Ok(None) => {}
            Err(error) => unreachable!("waiting for a child: {error}"),
        }
        match signals.wait_for_any(Some(LOOKS)) {
            Some((signal, _)) if signal == READY.as_raw() => return Happened::Ready,
            Some((signal, _)) if signal == UPGRADE.as_raw() => return Happened::Upgrade,
            // The worker has it from the terminal. A second one would cut off the mount's users.
            Some((_, true)) if getpgid(Some(worker.pid)) == getpgid(None) => {}
            Some((signal, _)) if SIGNALS.contains(&signal) => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    let _ = kill_process(worker.pid, signal);
                }
            }
            None => {
                if let Some(end) = worker.only_notifies() {
                    return Happened::Ended(end);
                }
            }
            _ => {}
        }
    }
}
