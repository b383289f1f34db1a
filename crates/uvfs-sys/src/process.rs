//! Processes that share their descriptors, and signals that threads wait for.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, set_parent_process_death_signal};

use crate::lock;

/// Signals. Once they are blocked, a thread can wait for them.
#[derive(Clone, Copy)]
pub struct SignalSet(libc::sigset_t);

impl SignalSet {
    /// These signals.
    pub fn of(signals: &[i32]) -> Self {
        // SAFETY: the set is written by sigemptyset before anything reads it; the pointers are to local values.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for &signal in signals {
                libc::sigaddset(&mut set, signal);
            }
            Self(set)
        }
    }

    /// Blocks these signals in the calling thread, and in those that it starts.
    pub fn block(signals: &[i32]) -> Self {
        let set = Self::of(signals);
        set.change_mask(libc::SIG_BLOCK);
        set
    }

    /// Blocks these signals for as long as what it gives lives.
    pub fn blocked(signals: &[i32]) -> Blocked {
        Blocked(Self::of(signals).change_mask(libc::SIG_BLOCK))
    }

    /// Lets the calling thread have them again.
    pub fn unblock(&self) {
        self.change_mask(libc::SIG_UNBLOCK);
    }

    /// Changes what the calling thread blocks, and gives what it blocked before.
    fn change_mask(&self, how: i32) -> Self {
        // SAFETY: `before` is a plain structure, which pthread_sigmask fills; the set was filled by `of`, or so.
        unsafe {
            let mut before = std::mem::zeroed();
            libc::pthread_sigmask(how, &self.0, &mut before);
            Self(before)
        }
    }

    /// Waits for one and gives its number; nothing after this time.
    pub fn wait(&self, time: Option<Duration>) -> Option<i32> {
        Some(self.receive(time)?.si_signo)
    }

    /// Waits for one, for so long. Its number, and whether the kernel has sent it by itself, as it does for a terminal, and then to all of
    /// the process group.
    pub fn wait_for_any(&self, time: Option<Duration>) -> Option<(i32, bool)> {
        let received = self.receive(time)?;
        Some((received.si_signo, received.si_code == libc::SI_KERNEL))
    }

    fn receive(&self, time: Option<Duration>) -> Option<libc::siginfo_t> {
        let time = time.map(|time| libc::timespec {
            tv_sec: time.as_secs() as libc::time_t,
            tv_nsec: time.subsec_nanos().into(),
        });
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        loop {
            // SAFETY: the set was filled by `of`; the time is none, or lives over the call. `received` is a plain structure,
            // which the call fills if it gives a signal.
            let (signal, received) = unsafe {
                let mut received = std::mem::zeroed();
                (libc::sigtimedwait(&self.0, &mut received, time), received)
            };
            match io::Error::last_os_error().kind() {
                _ if signal > 0 => return Some(received),
                io::ErrorKind::Interrupted => {}
                _ => return None,
            }
        }
    }
}

/// Signals that a thread blocks, and then what it blocked before.
pub struct Blocked(SignalSet);

impl Drop for Blocked {
    fn drop(&mut self) {
        self.0.change_mask(libc::SIG_SETMASK);
    }
}

/// As fork(2), but parent and child have one table of descriptors: what either opens or closes, the other has opened or
/// closed. A descriptor stays open when one of them is killed. `None` in the child.
///
/// The child has copies of the parent's values. If a value that owns a descriptor is dropped in one process, it is
/// closed in the other: so one of them has to drop none.
///
/// # Errors
/// EBUSY if the process has more than one thread: others may hold locks, which nothing would unlock in the child. The
/// errors of clone(2).
pub fn fork_sharing_descriptors() -> io::Result<Option<Pid>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(rustix::io::Errno::BUSY.into());
    }
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: there is one thread, so the child's copy of every lock and buffer is consistent. It runs on a copy of this
    // stack, as after fork(2); no pointer is given to the kernel.
    let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    Ok(Pid::from_raw(crate::checked(child)? as i32))
}

/// As fork(2), but the child has no descriptors, and ends with the parent. It must drop no value that owns one. `None` in the
/// child.
///
/// # Errors
/// As for [`fork_sharing_descriptors`].
pub fn fork_without_descriptors() -> io::Result<Option<Pid>> {
    let child = fork_sharing_descriptors()?;
    if child.is_none() {
        let (all, unshare) = (u32::MAX, libc::CLOSE_RANGE_UNSHARE);
        // SAFETY: the table is the child's own from then on, and its caller promises to use no descriptor.
        let closed = unsafe { libc::syscall(libc::SYS_close_range, 0u32, all, unshare) };
        if closed != 0 {
            std::process::exit(1);
        }
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
    }
    Ok(child)
}

/// The descriptors that are open in this process.
///
/// # Errors
/// When /proc is missing.
pub fn open_descriptors() -> io::Result<BTreeSet<RawFd>> {
    let mut all = BTreeSet::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        all.extend(
            entry?
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<RawFd>().ok()),
        );
    }
    // That of the listing is among them.
    all.retain(|&fd| is_open(fd));
    Ok(all)
}

/// Says whether a program that this process executes gets these descriptors, but for 0 to 2, which it gets.
///
/// # Errors
/// EBADF if one is not open.
pub fn close_on_exec(all: &BTreeSet<RawFd>, close: bool) -> io::Result<()> {
    let flags = if close { libc::FD_CLOEXEC } else { 0 };
    for &fd in all.iter().filter(|fd| **fd > 2) {
        // SAFETY: the command takes numbers, and changes nothing but a flag of the descriptor.
        crate::checked(unsafe { libc::fcntl(fd, libc::F_SETFD, flags) })?;
    }
    Ok(())
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: the command takes a number, and does nothing to the descriptor.
    unsafe { libc::fcntl(fd, libc::F_GETFD) != -1 }
}

/// The descriptors that a process with the same table of descriptors has left behind when it was killed.
///
/// Each can be claimed once. What is not claimed is closed by [`Orphans::close`].
#[derive(Debug)]
pub struct Orphans(Mutex<BTreeSet<RawFd>>);

impl Orphans {
    /// All that are open now, but those in `owned`, which are this process's own.
    ///
    /// # Errors
    /// When /proc is missing.
    ///
    /// # Safety
    /// No value of this process may own a descriptor that is open and not in `owned`, and no other process with this
    /// table of descriptors may use one.
    pub unsafe fn find(owned: &BTreeSet<RawFd>) -> io::Result<Self> {
        let mut left = open_descriptors()?;
        left.retain(|fd| !owned.contains(fd));
        Ok(Self(Mutex::new(left)))
    }

    /// Takes a descriptor into ownership.
    ///
    /// # Errors
    /// EBADF if it is not open, is another's, or was claimed before.
    pub fn claim(&self, fd: RawFd) -> io::Result<OwnedFd> {
        match lock(&self.0).remove(&fd) {
            // SAFETY: it is open, and no other value owns it, as `find` has its caller promise; it was taken out of the
            // set, so this is the only claim.
            true => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            false => Err(rustix::io::Errno::BADF.into()),
        }
    }

    /// The numbers of those that were not claimed.
    pub fn left(&self) -> Vec<RawFd> {
        lock(&self.0).iter().copied().collect()
    }

    /// Looks at a descriptor that was not claimed; nothing if there is none. `look` must not claim any.
    pub fn look<T>(&self, fd: RawFd, look: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        let left = lock(&self.0);
        let known = left.contains(&fd);
        // SAFETY: it is open until it is claimed or closed, which the lock keeps from happening.
        known.then(|| look(unsafe { BorrowedFd::borrow_raw(fd) }))
    }

    /// Closes what was not claimed, and says how many those were.
    pub fn close(self) -> usize {
        let left = self.0.into_inner();
        let left = left.unwrap_or_else(PoisonError::into_inner);
        let count = left.len();
        for fd in left {
            // SAFETY: as in `claim`.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        count
    }
}
