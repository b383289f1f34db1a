//! Locks of ranges and of whole files.

use super::*;

/// Forks: the child calls a function and ends with what it gives as exit status.
fn forked(call: impl FnOnce() -> u8) -> u8 {
    // SAFETY: the child calls plain system calls only and leaves by _exit; no other thread of
    // this program is at work that it would need.
    match unsafe { libc::fork() } {
        0 => {
            let code = call();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(code)) }
        }
        -1 => panic!("fork"),
        child => {
            let child = rustix::process::Pid::from_raw(child);
            let status = rustix::process::waitpid(child, rustix::process::WaitOptions::empty());
            let status = status.expect("wait").expect("a status").1;
            status.exit_status().expect("an exit status") as u8
        }
    }
}

/// A byte-range lock by fcntl: POSIX or, with `open`, of the open file description.
fn range_lock(file: &OwnedFd, kind: i32, start: i64, len: i64, open: bool) -> io::Result<()> {
    let kind = kind as i16;
    // SAFETY: flock is plain data, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_whence, lock.l_start, lock.l_len) = (kind, 0, start, len);
    let command = if open {
        libc::F_OFD_SETLK
    } else {
        libc::F_SETLK
    };
    // SAFETY: the descriptor is open and the lock outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &lock) };
    if result == 0 {
        Ok(())
    } else {
        Err(last_error())
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).expect("an errno")
}

/// The lock that keeps this range from a write lock: type, start, length.
fn holder(file: &OwnedFd, start: i64, len: i64) -> io::Result<(i16, i64, i64, bool)> {
    // SAFETY: flock is plain data, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_start, lock.l_len) = (libc::F_WRLCK as i16, start, len);
    // SAFETY: the descriptor is open and the lock outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &mut lock) };
    // SAFETY: has no preconditions.
    let parent = unsafe { libc::getppid() };
    let from_parent = lock.l_pid == parent;
    if result == 0 {
        Ok((lock.l_type, lock.l_start, lock.l_len, from_parent))
    } else {
        Err(last_error())
    }
}

fn errno(result: io::Result<()>) -> u8 {
    result.map_or_else(|e| e.raw_os_error() as u8, |()| 0)
}

pub fn locks(s: &mut Scene) {
    flocks(s);
    for open in [false, true] {
        range_locks(s, open);
    }
    let read_only = s.open("file", OFlags::RDONLY).unwrap();
    s.done(
        "write lock of read-only",
        range_lock(&read_only, libc::F_WRLCK, 0, 1, false),
    );
    s.done(
        "negative",
        range_lock(&read_only, libc::F_RDLCK, -1, 1, false),
    );
}

/// Locks of the whole file.
fn flocks(s: &mut Scene) {
    let file = s.file("file", "content");
    let path = s.at("file");
    let other = || fs::open(&path, OFlags::RDWR, Mode::empty()).unwrap();
    let fresh = other();
    use FlockOperation as F;
    s.done("flock", fs::flock(&file, F::NonBlockingLockExclusive));
    s.done(
        "flock by another descriptor",
        fs::flock(&fresh, F::NonBlockingLockShared),
    );
    let child = other();
    let code = forked(|| errno(fs::flock(&child, F::NonBlockingLockExclusive)));
    s.value("flock by another process", code);
    s.done(
        "flock down to shared",
        fs::flock(&file, F::NonBlockingLockShared),
    );
    s.done(
        "shared by another",
        fs::flock(&fresh, F::NonBlockingLockShared),
    );
    s.done(
        "up to exclusive",
        fs::flock(&file, F::NonBlockingLockExclusive),
    );
    s.done("unlock", fs::flock(&fresh, F::NonBlockingUnlock));
    s.done("up then", fs::flock(&file, F::NonBlockingLockExclusive));
    let copy = io::dup(&file).unwrap();
    drop(file);
    let code = forked(|| errno(fs::flock(&child, F::NonBlockingLockExclusive)));
    s.value("held by a duplicate", code);
    drop(copy);
    // A close is done before the server is told of it, so the lock may go a little later.
    let mut code = 1;
    for _ in 0..500 {
        code = forked(|| errno(fs::flock(&child, F::NonBlockingLockExclusive)));
        if code == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    s.value("gone with the last", code);
    s.done(
        "unlock the child's",
        fs::flock(&child, F::NonBlockingUnlock),
    );
}

/// Locks of ranges: of a process, or of an open file.
fn range_locks(s: &mut Scene, open: bool) {
    let path = s.at("file");
    let other = || fs::open(&path, OFlags::RDWR, Mode::empty()).unwrap();
    let (read, write, none) = (libc::F_RDLCK, libc::F_WRLCK, libc::F_UNLCK);
    let kind = if open { "open" } else { "posix" };
    let step = |what: &str| format!("{kind} {what}");
    let (file, same) = (other(), other());
    s.done(&step("write 0+10"), range_lock(&file, write, 0, 10, open));
    s.done(&step("read 20+10"), range_lock(&file, read, 20, 10, open));
    s.done(
        &step("other descriptor"),
        range_lock(&same, write, 5, 1, open),
    );
    for (what, lock, start, len) in [
        ("child writes 5+1", write, 5, 1),
        ("child writes 10+10", write, 10, 10),
        ("child reads 20+10", read, 20, 10),
        ("child writes 25+0", write, 25, 0),
    ] {
        let code = forked(|| {
            let own = fs::open(s.at("file"), OFlags::RDWR, Mode::empty()).unwrap();
            errno(range_lock(&own, lock, start, len, open))
        });
        s.value(&step(what), code);
    }
    let code = forked(|| {
        let own = fs::open(s.at("file"), OFlags::RDWR, Mode::empty()).unwrap();
        match holder(&own, 0, 100) {
            Ok((kind, start, len, parent)) => {
                u8::from(i32::from(kind) == write && start == 0 && len == 10) + 2 * u8::from(parent)
            }
            Err(e) => e.raw_os_error() as u8,
        }
    });
    s.value(&step("child asks who"), code);
    s.done(&step("split"), range_lock(&file, none, 3, 3, open));
    let code = forked(|| {
        let own = fs::open(s.at("file"), OFlags::RDWR, Mode::empty()).unwrap();
        errno(range_lock(&own, write, 3, 3, open)) + errno(range_lock(&own, write, 2, 1, open))
    });
    s.value(&step("child takes the middle"), code);
    drop(same);
    let code = forked(|| {
        let own = fs::open(s.at("file"), OFlags::RDWR, Mode::empty()).unwrap();
        errno(range_lock(&own, write, 0, 1, open))
    });
    s.value(&step("after another close"), code);
    drop(file);
    let code = forked(|| {
        let own = fs::open(s.at("file"), OFlags::RDWR, Mode::empty()).unwrap();
        errno(range_lock(&own, write, 0, 100, open))
    });
    s.value(&step("after all closed"), code);
}
