//! Locks that are shared with programs of the host.

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::rc::Rc;

use common::*;
use rustix::fs::FlockOperation;
use uvfs_io::{ops, runtime};
use uvfs_passthrough::Options;
use uvfs_server::FileSystem;
use uvfs_server::fs::{Errno, Handle, InitFlags, Lock, LockHow, LockOwner, Node, OFlags, ROOT};

const READ: u32 = libc::F_RDLCK as u32;
const WRITE: u32 = libc::F_WRLCK as u32;
const UNLOCK: u32 = libc::F_UNLCK as u32;
const END: u64 = i64::MAX as u64;

/// Whether another program would get an OFD lock of bytes 0 to 9.
fn host_locks(file: &File, kind: i32) -> bool {
    let mut flock = libc::flock {
        l_type: kind as _,
        l_whence: libc::SEEK_SET as _,
        l_start: 0,
        l_len: 10,
        l_pid: 0,
    };
    // SAFETY: F_OFD_SETLK takes a struct flock, which outlives the call.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &mut flock) == 0 }
}

fn served() -> (tempfile::TempDir, Served, File, Handle) {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::new(
        dir.path(),
        Options {
            host_locks: true,
            ..Default::default()
        },
    );
    let (_, opened) = served.create(&ROOT_USER, ROOT, "file", 0o600);
    assert!(!opened.flags.contains(uvfs_server::fs::OpenFlags::NOFLUSH));
    let path = dir.path().join("file");
    let host = File::options().read(true).write(true).open(path).unwrap();
    (dir, served, host, opened.fh)
}

/// An exclusive lock has one owner, on the mount and on the host.
#[test]
fn owners_and_the_host_keep_each_other_out() {
    let (_dir, served, host, fh) = served();
    let wanted = served.init(InitFlags::all()).wanted;
    assert!(wanted.contains(InitFlags::POSIX_LOCKS | InitFlags::FLOCK_LOCKS));
    let fs = &served.fs;
    let how = |owner| LockHow {
        fh,
        owner: LockOwner(owner),
        flock: false,
        wait: false,
    };
    let lock = |start, end, kind| Lock {
        start,
        end,
        kind,
        pid: 4242,
    };
    let set = |owner, l: Lock| {
        let (fs, how) = (served.fs.clone(), how(owner));
        let done = run(async move { fs.setlk(&ROOT_USER, Node(0), &how, &l).await });
        done.map_err(|error| error.errno())
    };
    let get = |owner, l: Lock| now(fs.getlk(&ROOT_USER, Node(0), &how(owner), &l)).unwrap();

    assert_eq!(set(1, lock(0, 9, READ)), Ok(()));
    assert_eq!(set(2, lock(5, 20, READ)), Ok(()));
    assert!(host_locks(&host, libc::F_RDLCK) && !host_locks(&host, libc::F_WRLCK));
    assert!(host_locks(&host, libc::F_UNLCK));
    assert_eq!(set(2, lock(0, 3, WRITE)), Err(Errno::AGAIN));
    let held = get(3, lock(0, 3, WRITE));
    assert_eq!(
        held,
        Lock {
            start: 0,
            end: 9,
            kind: READ,
            pid: 4242
        }
    );
    assert_eq!(get(3, lock(30, END, WRITE)).kind, UNLOCK);
    // A part is given back, then all that an owner has as it closes the file.
    assert_eq!(set(1, lock(0, 3, UNLOCK)), Ok(()));
    assert_eq!(set(2, lock(0, 3, WRITE)), Ok(()));
    now(fs.flush(&ROOT_USER, Node(0), fh, LockOwner(2))).unwrap();
    assert_eq!(get(1, lock(0, END, WRITE)).kind, UNLOCK);
    assert!(!host_locks(&host, libc::F_WRLCK));
    now(fs.flush(&ROOT_USER, Node(0), fh, LockOwner(1))).unwrap();
    assert!(host_locks(&host, libc::F_WRLCK));
    assert_eq!(set(1, lock(9, END, READ)), Err(Errno::AGAIN));
    assert_eq!(get(1, lock(9, END, READ)).kind, WRITE);
    // OFD locks of the mount go with their handle.
    assert!(host_locks(&host, libc::F_UNLCK));
    let other = served
        .open(served.lookup(ROOT, "file").unwrap().node, libc::O_RDWR)
        .unwrap();
    let by_other = LockHow {
        fh: other.fh,
        ..how(5)
    };
    assert_eq!(
        now(fs.setlk(&ROOT_USER, Node(0), &by_other, &lock(0, 9, WRITE))),
        Ok(())
    );
    assert!(!host_locks(&host, libc::F_WRLCK));
    served.release(other.fh);
    assert!(host_locks(&host, libc::F_WRLCK));
    // Nothing to give back is no error.
    assert_eq!(set(9, lock(0, END, UNLOCK)), Ok(()));
    assert_eq!(set(1, lock(5, 4, READ)), Err(Errno::INVAL));
}

/// A program that waits for a lock gets it when it is free.
#[test]
fn who_waits_gets_the_lock_when_it_is_free() {
    let (_dir, served, host, fh) = served();
    assert!(host_locks(&host, libc::F_WRLCK));
    let fs = served.fs.clone();
    run(async move {
        let got = Rc::new(std::cell::Cell::new(0));
        for owner in [1, 2] {
            let (fs, got) = (fs.clone(), got.clone());
            runtime::spawn(async move {
                let how = LockHow {
                    fh,
                    owner: LockOwner(owner),
                    flock: false,
                    wait: true,
                };
                let lock = Lock {
                    start: 0,
                    end: END,
                    kind: WRITE,
                    pid: 1,
                };
                fs.setlk(&ROOT_USER, Node(0), &how, &lock).await.unwrap();
                got.set(got.get() + 1);
                fs.flush(&ROOT_USER, Node(0), fh, LockOwner(owner))
                    .await
                    .unwrap();
            });
        }
        for _ in 0..20 {
            ops::sleep(std::time::Duration::from_millis(1)).await;
            assert_eq!(got.get(), 0);
        }
        assert!(host_locks(&host, libc::F_UNLCK));
        while got.get() < 2 {
            ops::sleep(std::time::Duration::from_millis(1)).await;
        }
    });
}

/// A flock(2) belongs to the open file, holds on the host, and ends with the file's release.
#[test]
fn flock_is_of_the_open_file() {
    let (_dir, served, host, fh) = served();
    let fs = &served.fs;
    let how = LockHow {
        fh,
        owner: LockOwner(1),
        flock: true,
        wait: false,
    };
    let set = |kind| {
        let fs = served.fs.clone();
        let lock = Lock {
            end: END,
            kind,
            ..Lock::default()
        };
        let done = run(async move { fs.setlk(&ROOT_USER, Node(0), &how, &lock).await });
        done.map_err(|error| error.errno())
    };
    assert_eq!(set(WRITE), Ok(()));
    let lock = |operation| rustix::fs::flock(&host, operation);
    let shared = FlockOperation::NonBlockingLockShared;
    assert_eq!(lock(shared), Err(Errno::AGAIN));
    assert_eq!(set(READ), Ok(()));
    assert_eq!(lock(shared), Ok(()));
    assert_eq!(set(WRITE), Err(Errno::AGAIN));
    lock(FlockOperation::Unlock).unwrap();
    assert_eq!(set(WRITE), Ok(()));
    let released = fs.release(&ROOT_USER, Node(0), fh, OFlags::empty(), Some(LockOwner(1)));
    now(released).unwrap();
    assert_eq!(lock(FlockOperation::NonBlockingLockExclusive), Ok(()));
}
