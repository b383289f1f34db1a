//! The process that keeps the mount while workers come and go.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getppid, kill_process, wait as wait_any,
};
use uvfs_sys::process::{Orphans, SignalSet, fork_sharing_descriptors, open_descriptors};

use super::book::Book;
use super::ledger::Ledger;
use crate::mount::Mount;

/// So many workers in a row may crash before they have served for [`SOON`].
const MOST_CRASHES: u32 = 10;
const SOON: Duration = Duration::from_millis(100);

/// The signals that the keeper waits for: those that end the mount, which it passes on, the end of a worker, and a
/// worker's word that it serves.
const ENDING: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
const READY: Signal = Signal::USR1;

/// A process that serves a mount which outlives it.
#[derive(Debug)]
pub struct Worker {
    ledger: Arc<Ledger>,
    keeper: Option<Pid>,
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
        let keeper = self.keeper.filter(|keeper| getppid() == Some(*keeper));
        if let Some(keeper) = keeper {
            let _ = kill_process(keeper, READY);
        }
    }
}

/// Splits the process into a keeper of `mount` and a worker, in which this returns. Whenever a signal kills the worker, it
/// returns in the next one. It returns in no keeper: that ends with the status of the worker that exits.
///
/// To be called after mounting, before the process has a second thread, and with SIGTERM, SIGINT and SIGHUP blocked.
/// `ready` is called in the keeper once the first worker has called [`Worker::ready`].
///
/// # Errors
/// EBUSY when the process has a second thread; when there can be no process or no shared memory.
pub fn keep(mount: &Mount, mut ready: impl FnMut()) -> io::Result<Worker> {
    let book = Book::create()?;
    let owned = open_descriptors()?;
    let mut signals = ENDING.to_vec();
    signals.extend([libc::SIGCHLD, READY.as_raw()]);
    let signals = SignalSet::block(&signals);
    let own = SignalSet::of(&[libc::SIGCHLD, READY.as_raw()]);
    let keeper = rustix::process::getpid();
    let (mut serves, mut crashes, mut before) = (false, 0, None);
    loop {
        let Some(worker) = fork_sharing_descriptors()? else {
            own.unblock();
            // The keeper alone hears of the terminal's signals, and passes them on.
            let _ = rustix::process::setpgid(None, None);
            let orphans = match before {
                Some(_) => Some(orphans(&owned)?),
                None => None,
            };
            return Ok(Worker {
                ledger: Arc::new(Ledger::new(book, orphans)),
                keeper: Some(keeper),
                before,
            });
        };
        if before.is_none() {
            let _ = rustix::thread::set_name(c"uvfs-keeper");
        }
        let mut since = None;
        let status = wait(worker, &signals, || {
            since = Some(Instant::now());
            if !std::mem::replace(&mut serves, true) {
                ready();
            }
        });
        let Some(signal) = status.terminating_signal() else {
            std::process::exit(status.exit_status().unwrap_or(1));
        };
        let soon = since.is_none_or(|since| since.elapsed() < SOON) && signal != libc::SIGKILL;
        crashes = if soon { crashes + 1 } else { 0 };
        let how = format!("the server, process {worker}, was ended by signal {signal}");
        if !serves || crashes == MOST_CRASHES {
            let gone = mount.detach();
            let at = mount.at().display();
            tracing::error!(%how, crashes, ?gone, "{at}: the mount ends");
            std::process::exit(1);
        }
        before = Some(how);
    }
}

/// What a worker that is dead has left open.
fn orphans(owned: &BTreeSet<RawFd>) -> io::Result<Orphans> {
    // SAFETY: `owned` are the descriptors from before the first worker. Since then only workers have opened any, the last
    // of which is dead, and this process has not begun to. The keeper uses none but `owned`.
    unsafe { Orphans::find(owned) }
}

/// Waits for a worker's end, and passes on signals meanwhile.
fn wait(worker: Pid, signals: &SignalSet, mut ready: impl FnMut()) -> WaitStatus {
    loop {
        match wait_any(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == worker => return status,
            // A child from before.
            Ok(Some(_)) | Err(Errno::INTR) => continue,
            Ok(None) => {}
            Err(error) => unreachable!("waiting for a child: {error}"),
        }
        match signals.wait(None) {
            Some(signal) if signal == READY.as_raw() => ready(),
            Some(signal) if ENDING.contains(&signal) => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    let _ = kill_process(worker, signal);
                }
            }
            _ => {}
        }
    }
}
