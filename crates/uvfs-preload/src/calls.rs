//! The C library's functions, as programs call them. Each asks [`with`] for the imported file behind its descriptor,
//! and calls the next definition of the function if there is none.

mod status;
mod transfer;

use std::ffi::c_int;

use libc::off_t;
use rustix::io::Errno;
use uvfs_client::{Advice, AllocateMode, Error};

use crate::aio;
use crate::args::{MOST, flags_of, is_plausible, vectors};
use crate::dispatch;
use crate::guard::aside;
use crate::import::{self, Wants, described};
use crate::next;
use crate::promotion::{self, Moves};
pub(crate) use crate::real::is_borrowed;
use crate::real::{errno, is_inside, set_errno};
use crate::report::{self, Why};
use crate::table::{self, Known, Opened, Position, Use};
use uvfs_sys::lock;

/// A served call's result, as the C library gives it.
macro_rules! served {
    ($served:expr, $otherwise:expr) => {
        match $served {
            Some(Ok(done)) => done as _,
            Some(Err(code)) => {
                set_errno(code);
                -1
            }
            // SAFETY: the caller's own arguments.
            None => unsafe { $otherwise },
        }
    };
}

enum Step<T> {
    Done(Result<T, Error>),
    Kernel,
}

/// Serves a call, or says that the kernel is to.
fn with<T>(
    fd: c_int,
    wants: Wants,
    call: impl FnOnce(&Use, &Opened) -> Step<T>,
) -> Option<Result<T, c_int>> {
    if table::is_foreign(fd) || !import::may_serve(fd, wants) {
        report::passed();
        return None;
    }
    let work = || {
        let one = described(fd, wants)?;
        let step = call(&one, one.opened()?);
        match step {
            Step::Kernel => None,
            Step::Done(Ok(done)) => Some(Ok(done)),
            Step::Done(Err(error)) => match error.errno() {
                // The session is over, or came back without the file: it is the kernel's to say what
                // has become of it.
                Errno::NOTCONN | Errno::STALE => {
                    import::trouble(format_args!("the server's session: {error}"));
                    import::give_up(fd, &one, Why::NoSession);
                    None
                }
                errno => Some(Err(errno.raw_os_error())),
            },
        }
    };
    let done = aside(work).flatten();
    if done.is_none() {
        report::passed();
    }
    done
}

/// Serves a transfer at a place, or at the position, which it moves.
fn transfer(
    fd: c_int,
    at: Option<off_t>,
    moves: Moves,
    call: impl FnOnce(&Opened, u64) -> Result<usize, Error>,
) -> Option<Result<usize, c_int>> {
    let Some(at) = at else {
        return with(fd, Wants::Position(moves), |one, opened| {
            let mut position = lock(&one.position);
            let Position::Here(at) = *position else {
                return Step::Kernel;
            };
            let done = call(opened, at);
            if let Ok(n) = done {
                *position = Position::Here(at + n as u64);
            }
            Step::Done(done)
        });
    };
    let at = u64::try_from(at).ok()?;
    with(fd, Wants::File(moves), |_, opened| {
        // The kernel appends, whatever the place (pwrite(2), BUGS).
        match matches!(moves, Moves::Write(_)) && opened.flags & libc::O_APPEND != 0 {
            true => Step::Kernel,
            false => Step::Done(call(opened, at)),
        }
    })
}

/// preadv2(2): -1 is the position.
fn place(at: off_t) -> Option<off_t> {
    (at != -1).then_some(at)
}

fn seek(fd: c_int, offset: off_t, whence: c_int) -> Option<Result<off_t, c_int>> {
    with(fd, Wants::Imported, |one, opened| {
        let mut position = lock(&one.position);
        let Position::Here(at) = *position else {
            return Step::Kernel;
        };
        let from = match whence {
            libc::SEEK_SET => Ok(0),
            libc::SEEK_CUR => Ok(at),
            libc::SEEK_END => opened.file.current_size(),
            libc::SEEK_DATA | libc::SEEK_HOLE => {
                let Ok(offset) = u64::try_from(offset) else {
                    return Step::Done(Err(Errno::NXIO.into()));
                };
                let found = match whence {
                    libc::SEEK_DATA => opened.file.seek_data(offset),
                    _ => opened.file.seek_hole(offset),
                };
                if let Ok(to) = found {
                    *position = Position::Here(to);
                }
                return Step::Done(found.map(|to| to as off_t));
            }
            _ => return Step::Kernel,
        };
        Step::Done(from.and_then(|from| {
            let to = (from as off_t).checked_add(offset).filter(|to| *to >= 0);
            let to = to.ok_or(Errno::INVAL)?;
            *position = Position::Here(to as u64);
            Ok(to)
        }))
    })
}

/// Tells the table of a descriptor that was opened.
fn noted(fd: c_int, flags: c_int) -> c_int {
    if fd < 0 || is_borrowed() {
        return fd;
    }
    match is_inside() {
        true => out_of_reach(fd),
        false => {
            aside(|| {
                dispatch::opened(fd, promotion::is_likely(flags));
                if report::is_on() && import::is_on_mount(fd) {
                    report::opened();
                }
            });
            fd
        }
    }
}

/// A guard for a descriptor that this library itself opens.
fn making() -> Option<table::RaceGuard> {
    (is_inside() && !is_borrowed()).then(table::RaceGuard::makes)
}

/// Moves what this library opens for a moment to where the program doesn't close it, if there is
/// room.
fn out_of_reach(fd: c_int) -> c_int {
    /// This library's descriptors have numbers from here on.
    const HIGH: usize = 500;
    let before = errno();
    // SAFETY: numbers; the descriptor is this library's.
    let high = unsafe { next::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIGH) };
    if high < 0 {
        // The program has closed the descriptor meanwhile.
        if errno() == libc::EBADF {
            return -1;
        }
        set_errno(before);
        return fd;
    }
    table::own(high, true);
    // SAFETY: as above.
    unsafe { next::close(fd) };
    high
}

/// Tells the table of a duplicate.
fn duplicated(from: c_int, to: c_int) -> c_int {
    if to < 0 || from == to {
        return to;
    }
    let duplicate = || match table::look(from) {
        Known::Described(one) if to as usize >= crate::DESCRIPTORS => import::publish(from, &one),
        Known::Described(one) => table::duplicate(to, one),
        Known::Foreign | Known::Own => table::foreign(to),
        Known::Undecided(_, false) => table::made(to),
        Known::Undecided(seen, true) => match Use::new(true) {
            // They share a position, which may come to be here.
            Some(one) => {
                let other = one.again();
                match table::decide(from, seen, Some(one)) {
                    true => {
                        if promotion::passes(from) {
                            // It is not counted as one of the description's.
                            other.give_to_kernel();
                        }
                        table::duplicate(to, other);
                    }
                    false => table::made(to),
                }
            }
            None => {
                table::no_longer_private(from);
                table::made(to);
            }
        },
    };
    aside(|| {
        if to == libc::STDERR_FILENO {
            // perror(3) and others write to it inside the C library.
            import::publish_fd(from);
        }
        duplicate();
    });
    to
}

/// Whether the program names a descriptor that is not its own but this library's.
fn is_hidden(fd: c_int) -> bool {
    table::is_own(fd) && !is_inside() && !is_borrowed()
}

/// EBADF for a descriptor that the program doesn't have.
fn refuses(fd: c_int) -> bool {
    let hidden = is_hidden(fd);
    if hidden {
        set_errno(libc::EBADF);
    }
    hidden
}

/// Ends serving, and with it this library's descriptors and threads.
pub(crate) fn leave() {
    aio::leave();
    import::leave();
}

/// Positions go to the kernel, and dirty data to the servers.
pub(crate) fn publish_all() {
    import::publish_all();
    aio::settle();
    import::show();
}

/// Does the last work of the process before it ends.
pub(crate) fn ending() {
    if !import::any_session() && !report::is_on() {
        return;
    }
    aside(|| {
        aio::settle();
        import::flush();
        report::end(import::stats, dispatch::reason);
    });
}

/// Ends what this number stands for, before a call closes or replaces the descriptor.
fn vacate(fd: c_int) -> Option<table::Closing> {
    closing(fd, || {
        if let Known::Own = table::look(fd) {
            report::taken(fd);
            leave();
            dispatch::retired();
        }
        // If that call fails, the descriptor lives on without its description.
        import::publish_fd(fd);
    })
}

fn closing(fd: c_int, before: impl FnOnce()) -> Option<table::Closing> {
    if fd < 0 || is_borrowed() {
        return None;
    }
    let done = aside(|| {
        before();
        table::Closing::begin(fd)
    });
    if done.is_none() {
        table::abandon(fd);
    }
    done.flatten()
}

fn truncate(fd: c_int, len: off_t) -> Option<Result<c_int, c_int>> {
    if len < 0 {
        return None;
    }
    with(fd, Wants::Imported, |_, opened| {
        Step::Done(opened.file.set_len(len as u64).map(|()| 0))
    })
}

fn allocate(fd: c_int, mode: c_int, from: off_t, len: off_t) -> Option<Result<c_int, c_int>> {
    let mode = match mode {
        0 => AllocateMode::Extend,
        libc::FALLOC_FL_KEEP_SIZE => AllocateMode::KeepSize,
        m if m == libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE => AllocateMode::PunchHole,
        libc::FALLOC_FL_ZERO_RANGE => AllocateMode::ZeroRange,
        _ => return None,
    };
    let (Ok(from), Ok(len)) = (u64::try_from(from), u64::try_from(len)) else {
        return None;
    };
    with(fd, Wants::Imported, |_, opened| {
        Step::Done(opened.file.allocate(mode, from, len).map(|()| 0))
    })
}

fn sync(fd: c_int, data_only: bool) -> Option<Result<c_int, c_int>> {
    promotion::synced(fd);
    with(fd, Wants::Imported, |_, opened| {
        let done = match data_only {
            true => opened.file.sync_data(),
            false => opened.file.sync_all(),
        };
        Step::Done(done.map(|()| 0))
    })
}

/// sync_file_range(2), whose length 0 is all that follows.
fn sync_range(fd: c_int, from: off_t, len: off_t, flags: u32) -> Option<Result<c_int, c_int>> {
    const WAITS: u32 = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    if flags & !(WAITS | libc::SYNC_FILE_RANGE_WRITE) != 0 {
        return None;
    }
    let (from, len) = range(from, len)?;
    with(fd, Wants::Imported, |_, opened| {
        let done = match flags {
            0 => Ok(()),
            flags => opened.file.write_back(from, len, flags & WAITS != 0),
        };
        Step::Done(done.map(|()| 0))
    })
}

/// A range of which length 0 means all that follows; nothing where it is impossible.
fn range(from: off_t, len: off_t) -> Option<(u64, u64)> {
    from.checked_add(len)?;
    let (from, len) = (u64::try_from(from).ok()?, u64::try_from(len).ok()?);
    Some((from, if len == 0 { u64::MAX - from } else { len }))
}

/// posix_fadvise(2) of what is imported; whether it was.
fn advise(fd: c_int, from: off_t, len: off_t, advice: c_int) -> bool {
    let advice = match advice {
        libc::POSIX_FADV_NORMAL => Advice::Normal,
        libc::POSIX_FADV_RANDOM => Advice::Random,
        libc::POSIX_FADV_SEQUENTIAL => Advice::Sequential,
        libc::POSIX_FADV_WILLNEED => Advice::WillNeed,
        libc::POSIX_FADV_DONTNEED => Advice::DontNeed,
        _ => return false,
    };
    let Some((from, len)) = range(from, len) else {
        return false;
    };
    let done = with(fd, Wants::Imported, |_, opened| {
        // It is advice: an error in writing is told by fsync and close.
        let _ = opened.file.advise(advice, from, len);
        Step::Done(Ok(()))
    });
    matches!(done, Some(Ok(())))
}

/// The kernel is to use a descriptor's position.
fn published(fd: c_int) {
    if !table::is_foreign(fd) {
        aside(|| import::publish_fd(fd));
    }
}

/// A mapping that writes to the file, if it is of one that can be.
pub(crate) fn mapping(prot_shared: c_int, fd: c_int) {
    let shared = prot_shared & libc::MAP_TYPE;
    if fd < 0 || (shared != libc::MAP_SHARED && shared != libc::MAP_SHARED_VALIDATE) {
        return;
    }
    if table::is_foreign(fd) || !import::is_ready() {
        return;
    }
    aside(|| {
        if next::status_flags(fd).is_some_and(|flags| flags & libc::O_ACCMODE == libc::O_RDWR) {
            import::mapped(fd);
        }
    });
}

#[cfg(not(test))]
#[allow(non_snake_case)]
mod exported;
#[cfg(not(test))]
pub(crate) use exported::{close, close_range, dup, dup2, dup3, fcntl};
#[cfg(test)]
pub(crate) use libc::{close, close_range, dup, dup2, dup3, fcntl};
