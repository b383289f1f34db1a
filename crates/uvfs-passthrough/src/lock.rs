//! Locks that are shared with programs of the host (option `host_locks`). Without it the kernel
//! keeps the locks of a mount by itself and none of this is asked.
//!
//! Each owner of POSIX locks has an open file description of its own per inode, and takes OFD locks
//! on it: these conflict with other owners' and with locks of host programs. A wait tries again and
//! again, as a call that waits in the kernel would hold a thread for as long.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;
use uvfs_io::ops;
use uvfs_server::fs::{Handle, Lock, LockHow, LockOwner};

use crate::Source;
use crate::inode::Inode;
use crate::open_file::OpenFile;
use crate::owners::Owner;
use crate::sys::{self, Result};

/// Between the first two tries of a lock that is held, and at most between later ones.
const FIRST_WAIT: Duration = Duration::from_micros(100);
const LAST_WAIT: Duration = Duration::from_millis(10);

/// The kernel does not wait for the answer to a last close. The locks that go with it are free for the next request,
/// though that may be served first: so look again before refusing.
const GRACE: Duration = Duration::from_millis(5);

/// As fcntl(2) has it.
fn flock_of(lock: &Lock) -> Result<libc::flock> {
    let kind = match lock.kind as i32 {
        kind @ (libc::F_RDLCK | libc::F_WRLCK | libc::F_UNLCK) => kind,
        _ => return Err(Errno::INVAL),
    };
    let start = i64::try_from(lock.start).map_err(|_| Errno::INVAL)?;
    let len = match lock.end {
        end if end >= i64::MAX as u64 => 0,
        end if end < lock.start => return Err(Errno::INVAL),
        end => (end - lock.start + 1) as i64,
    };
    // OFD locks want l_pid to be 0.
    Ok(libc::flock {
        l_start: start,
        l_len: len,
        ..uvfs_sys::whole_file(kind)
    })
}

/// As the kernel's protocol has it.
fn lock_of(flock: &libc::flock, pid: u32) -> Lock {
    let start = flock.l_start as u64;
    let end = match flock.l_len {
        0 => i64::MAX as u64,
        len => start + (len as u64 - 1),
    };
    Lock {
        start,
        end,
        kind: flock.l_type as u32,
        pid,
    }
}

/// Waits until `attempt` does not say EAGAIN; for [`GRACE`] even if it should not wait.
pub(crate) async fn patiently(
    wait: bool,
    mut attempt: impl AsyncFnMut() -> Result<()>,
) -> Result<()> {
    let mut pause = FIRST_WAIT;
    let mut waited = Duration::ZERO;
    loop {
        match attempt().await {
            Err(Errno::AGAIN | Errno::ACCESS) if wait || waited < GRACE => {}
            Err(Errno::ACCESS) => return Err(Errno::AGAIN),
            result => return result,
        }
        ops::sleep(pause).await;
        if uvfs_server::interrupt::interrupted() {
            return Err(Errno::INTR);
        }
        waited += pause;
        pause = (2 * pause).min(LAST_WAIT);
    }
}

impl Source {
    /// The description that `owner` locks ranges of the file by.
    fn owner_fd(&self, file: &OpenFile, how: &LockHow, pid: u32) -> Result<Arc<OwnedFd>> {
        if let Some(owners) = &mut file.inode.state().owners.0
            && let Some(owner) = owners.get_mut(&how.owner)
        {
            (owner.pid, owner.fh) = (pid, how.fh);
            return Ok(owner.fd.clone());
        }
        // Not waiting for a program of the host that has a lease.
        let reopen = |flags| sys::reopen(file.as_fd(), flags | OFlags::NONBLOCK);
        // For both kinds of lock, or for those that the file itself is open for.
        let fd = reopen(OFlags::RDWR)
            .or_else(|_| reopen(OFlags::RDONLY))
            .or_else(|_| reopen(OFlags::WRONLY))?;
        let mut state = file.inode.state();
        let owners = state.owners.0.get_or_insert_default();
        let owner = owners.entry(how.owner).or_insert_with(|| Owner {
            fd: Arc::new(fd),
            pid,
            fh: how.fh,
        });
        Ok(owner.fd.clone())
    }

    pub(crate) fn test_lock(&self, how: &LockHow, lock: &Lock) -> Result<Lock> {
        let file = self.file(how.fh)?;
        let mut flock = flock_of(lock)?;
        let kept = file.inode.state().owners.get(how.owner);
        // One who holds nothing may ask by any description but the others'.
        let fd = match kept {
            Some(fd) => fd,
            None => Arc::new(sys::reopen(
                file.as_fd(),
                OFlags::RDONLY | OFlags::NONBLOCK,
            )?),
        };
        uvfs_sys::ofd_lock(fd.as_fd(), libc::F_OFD_GETLK, &mut flock)?;
        if i32::from(flock.l_type) == libc::F_UNLCK {
            return Ok(Lock {
                kind: libc::F_UNLCK as u32,
                ..*lock
            });
        }
        let pid = match u32::try_from(flock.l_pid) {
            Ok(pid) if pid > 0 => pid,
            // An OFD lock has no process. If an owner here holds it, it does not see it itself.
            _ => self.holder(&file.inode, how.owner, &flock),
        };
        Ok(lock_of(&flock, pid))
    }

    /// The process of the owner of a lock that is in the way of `asker`, or 0.
    fn holder(&self, inode: &Inode, asker: LockOwner, held: &libc::flock) -> u32 {
        let state = inode.state();
        let Some(owners) = &state.owners.0 else {
            return 0;
        };
        for (_, owner) in owners.iter().filter(|(id, _)| **id != asker) {
            let mut flock = *held;
            flock.l_type = libc::F_WRLCK as _;
            flock.l_pid = 0;
            let seen = uvfs_sys::ofd_lock(owner.fd.as_fd(), libc::F_OFD_GETLK, &mut flock).is_err()
                || i32::from(flock.l_type) != libc::F_UNLCK
                    && (flock.l_start, flock.l_len) == (held.l_start, held.l_len);
            if !seen {
                return owner.pid;
            }
        }
        0
    }

    /// Takes a lock, or gives one back, without waiting: EAGAIN, or EACCES, when another owner has it.
    pub(crate) fn try_lock(&self, how: &LockHow, lock: &Lock) -> Result<()> {
        let file = self.file(how.fh)?;
        if how.flock {
            let op = match lock.kind as i32 {
                libc::F_RDLCK => FlockOperation::NonBlockingLockShared,
                libc::F_WRLCK => FlockOperation::NonBlockingLockExclusive,
                libc::F_UNLCK => FlockOperation::NonBlockingUnlock,
                _ => return Err(Errno::INVAL),
            };
            return rustix::fs::flock(file.as_fd(), op);
        }
        let mut flock = flock_of(lock)?;
        if lock.kind as i32 == libc::F_UNLCK && file.inode.state().owners.get(how.owner).is_none() {
            return Ok(());
        }
        // Looked up each time: the owner's description goes when it closes the file meanwhile.
        let fd = self.owner_fd(&file, how, lock.pid)?;
        uvfs_sys::ofd_lock(fd.as_fd(), libc::F_OFD_SETLK, &mut flock)
    }

    /// The last descriptor of a handle was closed. Owners of POSIX locks have given theirs back by
    /// then (FLUSH); an OFD lock's owner is the handle's file itself.
    pub(crate) fn drop_locks_by(&self, inode: &Inode, fh: Handle) {
        let mut gone = Vec::new();
        let mut state = inode.state();
        if let Some(owners) = &mut state.owners.0 {
            gone.extend(owners.extract_if(|_, owner| owner.fh == fh));
        }
        drop(state);
        drop(gone);
    }

    /// A descriptor of `owner` was closed: its POSIX locks of the file go.
    pub(crate) fn drop_locks(&self, fh: Handle, owner: LockOwner) -> Result<()> {
        let file = self.file(fh)?;
        let gone = file.inode.state().owners.remove(owner);
        drop(gone);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lock through the mount covers the same range for programs of the host.
    #[test]
    fn ranges_are_inclusive_on_the_wire_and_lengths_on_the_host() {
        let to_end = Lock {
            start: 5,
            end: i64::MAX as u64,
            kind: libc::F_RDLCK as u32,
            pid: 0,
        };
        assert_eq!(flock_of(&to_end).unwrap().l_len, 0);
        let some = Lock {
            start: 5,
            end: 5,
            kind: libc::F_WRLCK as u32,
            pid: 3,
        };
        let flock = flock_of(&some).unwrap();
        assert_eq!((flock.l_start, flock.l_len), (5, 1));
        assert_eq!(lock_of(&flock, 3), some);
        assert_eq!(
            flock_of(&Lock { start: 6, ..some }).err(),
            Some(Errno::INVAL)
        );
        assert_eq!(
            flock_of(&Lock { kind: 77, ..some }).err(),
            Some(Errno::INVAL)
        );
        assert_eq!(
            flock_of(&Lock {
                start: u64::MAX,
                ..to_end
            })
            .err(),
            Some(Errno::INVAL)
        );
    }
}
