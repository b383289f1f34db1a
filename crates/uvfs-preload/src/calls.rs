//! The C library's functions, as programs call them. Each asks [`with`] for the open file behind its
//! descriptor and goes on to the next definition where there is none.

use std::ffi::{c_char, c_int, c_void};
use std::io::{self, IoSlice, IoSliceMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use libc::{iovec, off_t, size_t, ssize_t};
use uvfs_client::{Advice, AllocateMode, Attr, Flags};

use crate::aio;
use crate::engage::{self, Moves, Passing};
use crate::import::{self, Wants, described};
use crate::real::{Inside, errno, is_inside, set_errno};
use crate::report;
use crate::table::{self, Known, Opened, Position, Use, lock};

/// The next definitions.
#[allow(non_snake_case)] // As C has them.
pub(crate) mod next {
    use std::ffi::{CStr, c_char, c_int, c_void};

    use libc::{FILE, iovec, mode_t, msghdr, off_t, size_t, ssize_t};

    use crate::real::{Next, next};

    next! {
        open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
        open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
        openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
        openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
        creat(path: *const c_char, mode: mode_t) -> c_int;
        creat64(path: *const c_char, mode: mode_t) -> c_int;
        __open_2(path: *const c_char, flags: c_int) -> c_int;
        __open64_2(path: *const c_char, flags: c_int) -> c_int;
        __openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int;
        __openat64_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int;
        mkstemp(path: *mut c_char) -> c_int;
        mkstemp64(path: *mut c_char) -> c_int;
        mkostemp(path: *mut c_char, flags: c_int) -> c_int;
        mkostemp64(path: *mut c_char, flags: c_int) -> c_int;
        mkstemps(path: *mut c_char, suffix: c_int) -> c_int;
        mkostemps(path: *mut c_char, suffix: c_int, flags: c_int) -> c_int;
        close(fd: c_int) -> c_int;
        socket(family: c_int, kind: c_int, protocol: c_int) -> c_int;
        memfd_create(name: *const c_char, flags: u32) -> c_int;
        close_range(first: u32, last: u32, flags: c_int) -> c_int;
        dup(fd: c_int) -> c_int;
        dup2(fd: c_int, to: c_int) -> c_int;
        dup3(fd: c_int, to: c_int, flags: c_int) -> c_int;
        fcntl(fd: c_int, command: c_int, arg: usize) -> c_int;
        fcntl64(fd: c_int, command: c_int, arg: usize) -> c_int;
        read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t;
        __read_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t) -> ssize_t;
        pread(fd: c_int, to: *mut c_void, len: size_t, at: off_t) -> ssize_t;
        pread64(fd: c_int, to: *mut c_void, len: size_t, at: off_t) -> ssize_t;
        __pread_chk(fd: c_int, to: *mut c_void, len: size_t, at: off_t, room: size_t) -> ssize_t;
        __pread64_chk(fd: c_int, to: *mut c_void, len: size_t, at: off_t, room: size_t) -> ssize_t;
        write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t;
        pwrite(fd: c_int, from: *const c_void, len: size_t, at: off_t) -> ssize_t;
        pwrite64(fd: c_int, from: *const c_void, len: size_t, at: off_t) -> ssize_t;
        readv(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t;
        writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t;
        preadv(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t;
        preadv64(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t;
        pwritev(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t;
        pwritev64(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t;
        preadv2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
        preadv64v2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
        pwritev2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
        pwritev64v2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
        lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t;
        lseek64(fd: c_int, offset: off_t, whence: c_int) -> off_t;
        fsync(fd: c_int) -> c_int;
        fdatasync(fd: c_int) -> c_int;
        sync_file_range(fd: c_int, from: off_t, len: off_t, flags: u32) -> c_int;
        posix_fadvise(fd: c_int, from: off_t, len: off_t, advice: c_int) -> c_int;
        fstat(fd: c_int, to: *mut libc::stat) -> c_int;
        fstat64(fd: c_int, to: *mut libc::stat) -> c_int;
        __fxstat(version: c_int, fd: c_int, to: *mut libc::stat) -> c_int;
        __fxstat64(version: c_int, fd: c_int, to: *mut libc::stat) -> c_int;
        statx(fd: c_int, path: *const c_char, flags: c_int, mask: u32, to: *mut libc::statx) -> c_int;
        ftruncate(fd: c_int, len: off_t) -> c_int;
        ftruncate64(fd: c_int, len: off_t) -> c_int;
        fallocate(fd: c_int, mode: c_int, from: off_t, len: off_t) -> c_int;
        fallocate64(fd: c_int, mode: c_int, from: off_t, len: off_t) -> c_int;
        mmap(at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, from: off_t) -> *mut c_void;
        mmap64(at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, from: off_t) -> *mut c_void;
        sendfile(to: c_int, from: c_int, at: *mut off_t, len: size_t) -> ssize_t;
        sendfile64(to: c_int, from: c_int, at: *mut off_t, len: size_t) -> ssize_t;
        splice(from: c_int, at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t, flags: u32) -> ssize_t;
        copy_file_range(from: c_int, at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t, flags: u32) -> ssize_t;
        sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
        sendmmsg(socket: c_int, list: *mut libc::mmsghdr, count: u32, flags: c_int) -> c_int;
        fdopen(fd: c_int, mode: *const c_char) -> *mut FILE;
        fclose(stream: *mut FILE) -> c_int;
        freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE;
        freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE;
        _exit(code: c_int) -> ();
        _Exit(code: c_int) -> ();
    }
}

/// The most that one call moves, as in the kernel (MAX_RW_COUNT).
const MOST: usize = 0x7fff_f000;
/// UIO_MAXIOV.
const VECTORS: c_int = 1024;
/// RWF_DONTCACHE of linux/fs.h, which the libc crate does not have yet.
const RWF_DONTCACHE: c_int = 0x80;

/// The process that this is, once [`VFORKED`] says so; its vfork children have another number and the
/// same memory.
static PROCESS: AtomicI32 = AtomicI32::new(0);
/// vfork was called: there may be such children.
static VFORKED: AtomicBool = AtomicBool::new(false);

/// The process is a new one, alone in its memory.
pub(crate) fn new_process() {
    VFORKED.store(false, Ordering::Relaxed);
}

/// The process may have children that run in its memory, from now on.
pub(crate) fn vforks() {
    if !is_borrowed() {
        // SAFETY: no arguments.
        PROCESS.store(unsafe { libc::getpid() }, Ordering::Relaxed);
        VFORKED.store(true, Ordering::Relaxed);
    }
}

/// Whether this is a child that runs in its parent's memory, whose descriptors are not these.
pub(crate) fn is_borrowed() -> bool {
    VFORKED.load(Ordering::Relaxed)
        // SAFETY: no arguments.
        && PROCESS.load(Ordering::Relaxed) != unsafe { libc::getpid() }
}

/// Runs `work` unless this thread is at work here already, with errno as it was.
pub(crate) fn aside<T>(work: impl FnOnce() -> T) -> Option<T> {
    if is_borrowed() {
        return None;
    }
    let _inside = Inside::enter()?;
    let before = errno();
    let done = catch_unwind(AssertUnwindSafe(work)).ok();
    set_errno(before);
    done
}

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
    Done(io::Result<T>),
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
            Step::Done(Err(error)) => match error.raw_os_error() {
                // The session is over, or came back without the file: it is the kernel's to say what
                // has become of it.
                Some(libc::ENOTCONN | libc::ESTALE) => {
                    import::trouble("the server's session", &error);
                    import::give_up(fd, &one);
                    None
                }
                code => Some(Err(code.unwrap_or(libc::EIO))),
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
    call: impl FnOnce(&Opened, u64) -> io::Result<usize>,
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
        Step::Done(call(opened, at))
    })
}

fn read_at(
    fd: c_int,
    bufs: &mut [IoSliceMut<'_>],
    at: Option<off_t>,
    flags: Flags,
) -> Option<Result<usize, c_int>> {
    let moves = Moves::Read(bufs.iter().map(|buf| buf.len()).sum());
    let done = transfer(fd, at, moves, |opened, at| {
        let how = flags | opened.how();
        opened.file.read_vectored_at(bufs, at, how)
    });
    if let Some(Ok(n)) = done {
        report::served(n, 0);
    }
    done
}

fn write_at(
    fd: c_int,
    bufs: &[IoSlice<'_>],
    at: Option<off_t>,
    flags: Flags,
) -> Option<Result<usize, c_int>> {
    let moves = Moves::Write(bufs.iter().map(|buf| buf.len()).sum());
    let done = transfer(fd, at, moves, |opened, at| {
        let how = flags | opened.how();
        let done = opened.file.write_vectored_at(bufs, at, how)?;
        if opened.syncs_all() {
            opened.file.sync_all()?;
        }
        Ok(done)
    });
    if let Some(Ok(n)) = done {
        report::served(0, n);
    }
    done
}

/// Whether memory can be there at all; else the kernel is asked, which gives EFAULT. What is merely
/// not mapped is not seen here and faults in the program: finding out would cost every call a system
/// call.
#[inline]
pub(crate) fn is_plausible(at: *const u8, len: usize) -> bool {
    /// Below no program has memory, as a rule (vm.mmap_min_addr).
    const LOWEST: usize = 4096;
    /// With four levels of page tables; what is above, and tagged, is the kernel's to judge.
    const END: usize = 1 << 47;
    let at = at as usize;
    (LOWEST..END).contains(&at) && len <= END - at
}

/// The caller's buffers, cut to what one call moves; nothing for what the kernel refuses.
///
/// # Safety
/// As for readv(2).
pub(crate) unsafe fn vectors(vector: *const iovec, count: c_int) -> Option<Vec<(*mut u8, usize)>> {
    if !(0..=VECTORS).contains(&count) || !is_plausible(vector.cast(), 0) {
        return None;
    }
    let mut left = MOST;
    let mut list = Vec::with_capacity(count as usize);
    for index in 0..count as usize {
        // SAFETY: the caller's array has `count` entries.
        let one = unsafe { vector.add(index).read() };
        let len = one.iov_len.min(left);
        left -= len;
        if len > 0 {
            if !is_plausible(one.iov_base.cast(), len) {
                return None;
            }
            list.push((one.iov_base.cast::<u8>(), len));
        }
    }
    Some(list)
}

/// # Safety
/// `to` has room for `len` bytes, as for read(2).
unsafe fn read_one(
    fd: c_int,
    to: *mut c_void,
    len: usize,
    at: Option<off_t>,
) -> Option<Result<usize, c_int>> {
    // What a foreign descriptor gets may be anything: looked at by the kernel alone.
    if table::is_foreign(fd) || !is_plausible(to.cast(), len.min(MOST)) {
        report::passed();
        return None;
    }
    // SAFETY: the caller's room; bytes are only ever written to it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), len.min(MOST)) };
    read_at(fd, &mut [IoSliceMut::new(bytes)], at, Flags::empty())
}

/// # Safety
/// `from` has `len` bytes, as for write(2).
unsafe fn write_one(
    fd: c_int,
    from: *const c_void,
    len: usize,
    at: Option<off_t>,
) -> Option<Result<usize, c_int>> {
    if table::is_foreign(fd) || !is_plausible(from.cast(), len.min(MOST)) {
        report::passed();
        return None;
    }
    // SAFETY: the caller's bytes.
    let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len.min(MOST)) };
    write_at(fd, &[IoSlice::new(bytes)], at, Flags::empty())
}

/// The buffers of a call that may be served.
///
/// # Safety
/// As for readv(2).
unsafe fn buffers(fd: c_int, vector: *const iovec, count: c_int) -> Option<Vec<(*mut u8, usize)>> {
    if table::is_foreign(fd) {
        report::passed();
        return None;
    }
    // SAFETY: the caller's duty.
    aside(|| unsafe { vectors(vector, count) }).flatten()
}

/// # Safety
/// As for preadv(2).
unsafe fn read_many(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    at: Option<off_t>,
    flags: Flags,
) -> Option<Result<usize, c_int>> {
    // SAFETY: the caller's duty.
    let mut bufs: Vec<_> = unsafe { buffers(fd, vector, count) }?
        .into_iter()
        // SAFETY: the caller's room; bytes are only ever written to it.
        .map(|(to, len)| IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(to, len) }))
        .collect();
    read_at(fd, &mut bufs, at, flags)
}

/// # Safety
/// As for pwritev(2).
unsafe fn write_many(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    at: Option<off_t>,
    flags: Flags,
) -> Option<Result<usize, c_int>> {
    // SAFETY: the caller's duty.
    let bufs: Vec<_> = unsafe { buffers(fd, vector, count) }?
        .into_iter()
        // SAFETY: the caller's bytes.
        .map(|(from, len)| IoSlice::new(unsafe { std::slice::from_raw_parts(from, len) }))
        .collect();
    write_at(fd, &bufs, at, flags)
}

/// RWF_* as the client has them; nothing for what only the kernel knows.
pub(crate) fn flags_of(raw: c_int) -> Option<Flags> {
    let known = libc::RWF_HIPRI | libc::RWF_DSYNC | RWF_DONTCACHE;
    if raw & !known != 0 {
        return None;
    }
    let mut flags = Flags::empty();
    flags.set(Flags::DSYNC, raw & libc::RWF_DSYNC != 0);
    flags.set(Flags::DONTCACHE, raw & RWF_DONTCACHE != 0);
    Some(flags)
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
                    return Step::Done(Err(io::Error::from_raw_os_error(libc::ENXIO)));
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
            let to = to.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
            *position = Position::Here(to as u64);
            Ok(to)
        }))
    })
}

/// Tells the table of a descriptor that was opened.
fn noted(fd: c_int) -> c_int {
    if fd < 0 || is_borrowed() {
        return fd;
    }
    match is_inside() {
        true => out_of_reach(fd),
        false => {
            aside(|| table::opened(fd));
            fd
        }
    }
}

/// For what this library itself opens.
fn making() -> Option<table::Apart> {
    (is_inside() && !is_borrowed()).then(table::Apart::makes)
}

/// Moves what this library opens for a moment to where the program doesn't close it, if there is
/// room.
fn out_of_reach(fd: c_int) -> c_int {
    /// This library's descriptors have numbers from here on.
    const HIGH: usize = 500;
    let before = errno();
    // SAFETY: numbers; the descriptor is nobody else's.
    let high = unsafe { next::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIGH) };
    if high < 0 {
        // The program was faster, and has closed it: nobody owns the number.
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
    aside(|| match table::look(from) {
        Known::Described(one) if to as usize >= table::DESCRIPTORS => import::publish(from, &one),
        Known::Described(one) => table::duplicate(to, one),
        Known::Foreign | Known::Own => table::foreign(to),
        Known::Undecided(_, false) => table::made(to),
        Known::Undecided(seen, true) => match Use::new(true) {
            // They share a position, which may come to be here.
            Some(one) => {
                let other = one.again();
                match table::decide(from, seen, Some(one)) {
                    true => {
                        if engage::passes(from) {
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
    });
    to
}

/// Makes way for what will have this number.
fn vacate(fd: c_int) -> Option<table::Closing> {
    if fd < 0 || is_borrowed() {
        return None;
    }
    let done = aside(|| {
        if let Known::Own = table::look(fd) {
            import::retire();
        }
        // If it comes to nothing, the descriptor lives on without its description.
        import::publish_fd(fd);
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
    engage::synced(fd);
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

/// Whether owners are numbered here as at the server: not so in a user namespace.
fn owners_agree() -> bool {
    static AGREE: OnceLock<bool> = OnceLock::new();
    *AGREE.get_or_init(|| {
        ["/proc/self/uid_map", "/proc/self/gid_map"]
            .iter()
            .all(|path| {
                let map = std::fs::read_to_string(path).unwrap_or_default();
                map.split_whitespace().eq(["0", "0", "4294967295"])
            })
    })
}

/// Attributes, and the device and inode numbers that the mount gives.
type Attributes = (Attr, (u64, u64));

/// The attributes of what is imported.
fn attributes(fd: c_int) -> Option<Result<Attributes, c_int>> {
    with(fd, Wants::Imported, |_, opened| match owners_agree() {
        true => Step::Done(opened.file.stat().map(|attr| (attr, opened.inode))),
        false => Step::Kernel,
    })
}

/// The kernel gives the power of two below, and the page's size for none.
fn block_size(attr: &Attr) -> u32 {
    attr.blksize.checked_ilog2().map_or(4096, |bits| 1 << bits)
}

/// # Safety
/// `to` is a caller's buffer.
unsafe fn status(fd: c_int, to: *mut libc::stat) -> Option<Result<c_int, c_int>> {
    if table::is_foreign(fd) || !is_plausible(to.cast(), size_of::<libc::stat>()) {
        return None;
    }
    let found = match attributes(fd)? {
        Ok(found) => found,
        Err(code) => return Some(Err(code)),
    };
    // SAFETY: the caller's buffer.
    unsafe { to.write(stat_of(&found)) };
    Some(Ok(0))
}

/// What the kernel makes of a device's number (new_decode_dev).
fn device(number: u32) -> libc::dev_t {
    libc::makedev(number >> 8 & 0xfff, number & 0xff | number >> 12 & 0xfff00)
}

/// As stat(2) gives them.
fn stat_of((attr, (dev, ino)): &Attributes) -> libc::stat {
    let (dev, ino) = (*dev, *ino);
    // SAFETY: plain data.
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    st.st_rdev = device(attr.rdev);
    st.st_dev = dev;
    st.st_ino = ino;
    st.st_mode = attr.mode;
    st.st_nlink = attr.nlink as _;
    st.st_uid = attr.uid;
    st.st_gid = attr.gid;
    st.st_size = attr.size as _;
    st.st_blksize = block_size(attr) as _;
    st.st_blocks = attr.blocks as _;
    (st.st_atime, st.st_atime_nsec) = (attr.atime.0, attr.atime.1.into());
    (st.st_mtime, st.st_mtime_nsec) = (attr.mtime.0, attr.mtime.1.into());
    (st.st_ctime, st.st_ctime_nsec) = (attr.ctime.0, attr.ctime.1.into());
    st
}

/// Whether a path names the descriptor itself.
///
/// # Safety
/// `path` is null or a string.
unsafe fn is_itself(fd: c_int, path: *const c_char, flags: c_int) -> bool {
    flags & libc::AT_EMPTY_PATH != 0
        && !table::is_foreign(fd)
        && is_plausible(path.cast(), 1)
        // SAFETY: the caller's string has a first byte.
        && unsafe { *path } == 0
}

/// # Safety
/// As for statx(2).
unsafe fn status_of(
    fd: c_int,
    path: *const c_char,
    flags: c_int,
    mask: u32,
    to: *mut libc::statx,
) -> Option<Result<c_int, c_int>> {
    let known = libc::AT_EMPTY_PATH | libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT;
    // SAFETY: the caller's string.
    if !unsafe { is_itself(fd, path, flags) }
        || flags & !known != 0
        || mask & !libc::STATX_BASIC_STATS != 0
        || !is_plausible(to.cast(), size_of::<libc::statx>())
    {
        return None;
    }
    let found = match attributes(fd)? {
        Ok(found) => found,
        Err(code) => return Some(Err(code)),
    };
    // SAFETY: the caller's buffer.
    unsafe { to.write(statx_of(&found)) };
    Some(Ok(0))
}

/// As statx(2) gives them.
fn statx_of((attr, (dev, ino)): &Attributes) -> libc::statx {
    let (dev, ino) = (*dev, *ino);
    // SAFETY: plain data.
    let mut st: libc::statx = unsafe { std::mem::zeroed() };
    st.stx_mask = libc::STATX_BASIC_STATS;
    st.stx_blksize = block_size(attr);
    let rdev = device(attr.rdev);
    (st.stx_rdev_major, st.stx_rdev_minor) = (libc::major(rdev) as _, libc::minor(rdev) as _);
    st.stx_nlink = attr.nlink;
    st.stx_uid = attr.uid;
    st.stx_gid = attr.gid;
    st.stx_mode = attr.mode as u16;
    st.stx_ino = ino;
    st.stx_size = attr.size;
    st.stx_blocks = attr.blocks;
    (st.stx_dev_major, st.stx_dev_minor) = (libc::major(dev) as _, libc::minor(dev) as _);
    for (to, from) in [
        (&mut st.stx_atime, attr.atime),
        (&mut st.stx_mtime, attr.mtime),
        (&mut st.stx_ctime, attr.ctime),
    ] {
        (to.tv_sec, to.tv_nsec) = from;
    }
    st
}

/// The kernel is to use a descriptor's position.
fn published(fd: c_int) {
    if !table::is_foreign(fd) {
        aside(|| import::publish_fd(fd));
    }
}

/// A mapping that writes to the file, if it is of one that can be.
fn mapping(prot_shared: c_int, fd: c_int) {
    let shared = prot_shared & libc::MAP_TYPE;
    if fd < 0 || (shared != libc::MAP_SHARED && shared != libc::MAP_SHARED_VALIDATE) {
        return;
    }
    if table::is_foreign(fd) || !import::READY.load(Ordering::Relaxed) {
        return;
    }
    aside(|| {
        // SAFETY: without a third argument.
        let flags = unsafe { next::fcntl(fd, libc::F_GETFL, 0) };
        if flags >= 0 && flags & libc::O_ACCMODE == libc::O_RDWR {
            import::mapped(fd);
        }
    });
}

/// What has to be done before the process is no more.
pub(crate) fn ending() {
    if !import::any_session() {
        return;
    }
    aside(|| {
        aio::settle();
        import::flush();
        report::end();
    });
}

/// Functions under the names by which programs know them. Unit tests don't want them.
#[cfg(not(test))]
#[allow(non_snake_case)]
mod exported {
    use libc::{FILE, mode_t, msghdr};

    use super::*;

    macro_rules! opens {
        ($($name:ident($($arg:ident: $type:ty),*);)*) => {
            $(
                /// As the manual says.
                ///
                /// # Safety
                /// As the manual says.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                    let _making = making();
                    // SAFETY: the caller's own arguments.
                    noted(unsafe { next::$name($($arg),*) })
                }
            )*
        };
    }

    opens! {
        open(path: *const c_char, flags: c_int, mode: mode_t);
        open64(path: *const c_char, flags: c_int, mode: mode_t);
        openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t);
        openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t);
        creat(path: *const c_char, mode: mode_t);
        creat64(path: *const c_char, mode: mode_t);
        __open_2(path: *const c_char, flags: c_int);
        __open64_2(path: *const c_char, flags: c_int);
        __openat_2(dir: c_int, path: *const c_char, flags: c_int);
        __openat64_2(dir: c_int, path: *const c_char, flags: c_int);
        mkstemp(path: *mut c_char);
        mkstemp64(path: *mut c_char);
        mkostemp(path: *mut c_char, flags: c_int);
        mkostemp64(path: *mut c_char, flags: c_int);
        mkstemps(path: *mut c_char, suffix: c_int);
        mkostemps(path: *mut c_char, suffix: c_int, flags: c_int);
    }

    /// Functions that this library makes descriptors of its own by. The program's are not files of a
    /// mount.
    macro_rules! makes {
        ($($name:ident($($arg:ident: $type:ty),*);)*) => {
            $(
                /// As the manual says.
                ///
                /// # Safety
                /// As the manual says.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                    let _making = making();
                    // SAFETY: the caller's own arguments.
                    let fd = unsafe { next::$name($($arg),*) };
                    match fd >= 0 && is_inside() && !is_borrowed() {
                        true => out_of_reach(fd),
                        false => fd,
                    }
                }
            )*
        };
    }

    makes! {
        socket(family: c_int, kind: c_int, protocol: c_int);
        memfd_create(name: *const c_char, flags: u32);
    }

    /// The call neither reads nor moves the kernel's position, or moves it to where it says.
    fn no_position(_: c_int) {}

    /// Functions whose result comes from an expression in `served`, or from the next definition.
    /// The first function's result lives until the call is over.
    macro_rules! serves {
        ($begin:path => $($name:ident($fd:ident: $first:ty $(, $arg:ident: $type:ty)*) -> $result:ty
            = $served:expr;)*) => {
            $(
                /// As the manual says.
                ///
                /// # Safety
                /// As the manual says.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($fd: $first $(, $arg: $type)*) -> $result {
                    #[allow(clippy::let_unit_value)] // Most hold nothing.
                    let _passing = $begin($fd);
                    // SAFETY: the caller's own arguments.
                    #[allow(unused_unsafe)]
                    let done = unsafe { $served };
                    served!(done, next::$name($fd $(, $arg)*))
                }
            )*
        };
    }

    serves! {
        Passing::begin =>
        read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t = read_one(fd, to, len, None);
        __read_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t) -> ssize_t =
            if len > room { None } else { read_one(fd, to, len, None) };
        write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t =
            write_one(fd, from, len, None);
        readv(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t =
            read_many(fd, vector, count, None, Flags::empty());
        writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t =
            write_many(fd, vector, count, None, Flags::empty());
        preadv2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t =
            flags_of(flags).and_then(|f| read_many(fd, vector, count, place(at), f));
        preadv64v2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int)
            -> ssize_t = flags_of(flags).and_then(|f| read_many(fd, vector, count, place(at), f));
        pwritev2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int)
            -> ssize_t = flags_of(flags).and_then(|f| write_many(fd, vector, count, place(at), f));
        pwritev64v2(fd: c_int, vector: *const iovec, count: c_int, at: off_t, flags: c_int)
            -> ssize_t = flags_of(flags).and_then(|f| write_many(fd, vector, count, place(at), f));
    }

    serves! {
        no_position =>
        pread(fd: c_int, to: *mut c_void, len: size_t, at: off_t) -> ssize_t =
            read_one(fd, to, len, Some(at));
        pread64(fd: c_int, to: *mut c_void, len: size_t, at: off_t) -> ssize_t =
            read_one(fd, to, len, Some(at));
        __pread_chk(fd: c_int, to: *mut c_void, len: size_t, at: off_t, room: size_t) -> ssize_t =
            if len > room { None } else { read_one(fd, to, len, Some(at)) };
        __pread64_chk(fd: c_int, to: *mut c_void, len: size_t, at: off_t, room: size_t) -> ssize_t =
            if len > room { None } else { read_one(fd, to, len, Some(at)) };
        pwrite(fd: c_int, from: *const c_void, len: size_t, at: off_t) -> ssize_t =
            write_one(fd, from, len, Some(at));
        pwrite64(fd: c_int, from: *const c_void, len: size_t, at: off_t) -> ssize_t =
            write_one(fd, from, len, Some(at));
        preadv(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t =
            read_many(fd, vector, count, Some(at), Flags::empty());
        preadv64(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t =
            read_many(fd, vector, count, Some(at), Flags::empty());
        pwritev(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t =
            write_many(fd, vector, count, Some(at), Flags::empty());
        pwritev64(fd: c_int, vector: *const iovec, count: c_int, at: off_t) -> ssize_t =
            write_many(fd, vector, count, Some(at), Flags::empty());
        lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t = seek(fd, offset, whence);
        lseek64(fd: c_int, offset: off_t, whence: c_int) -> off_t = seek(fd, offset, whence);
        fsync(fd: c_int) -> c_int = sync(fd, false);
        fdatasync(fd: c_int) -> c_int = sync(fd, true);
        sync_file_range(fd: c_int, from: off_t, len: off_t, flags: u32) -> c_int =
            sync_range(fd, from, len, flags);
        fstat(fd: c_int, to: *mut libc::stat) -> c_int = status(fd, to);
        fstat64(fd: c_int, to: *mut libc::stat) -> c_int = status(fd, to);
        __fxstat(version: c_int, fd: c_int, to: *mut libc::stat) -> c_int = status(fd, to);
        __fxstat64(version: c_int, fd: c_int, to: *mut libc::stat) -> c_int = status(fd, to);
        statx(fd: c_int, path: *const c_char, flags: c_int, mask: u32, to: *mut libc::statx)
            -> c_int = status_of(fd, path, flags, mask, to);
        ftruncate(fd: c_int, len: off_t) -> c_int = truncate(fd, len);
        ftruncate64(fd: c_int, len: off_t) -> c_int = truncate(fd, len);
        fallocate(fd: c_int, mode: c_int, from: off_t, len: off_t) -> c_int =
            allocate(fd, mode, from, len);
        fallocate64(fd: c_int, mode: c_int, from: off_t, len: off_t) -> c_int =
            allocate(fd, mode, from, len);
    }

    /// Functions that go to the next definition after something was done.
    macro_rules! prepares {
        ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty = $first:expr;)*) => {
            $(
                /// As the manual says.
                ///
                /// # Safety
                /// As the manual says.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                    #[allow(clippy::let_unit_value)] // Most have nothing to hold.
                    let _first = $first;
                    // SAFETY: the caller's own arguments.
                    unsafe { next::$name($($arg),*) }
                }
            )*
        };
    }

    fn published_unless(fd: c_int, at: *mut off_t) {
        if at.is_null() {
            published(fd);
        }
    }

    /// The kernel reads from a descriptor by a call that takes the size as it knew it last: it is made
    /// to ask.
    fn read_by_kernel(fd: c_int, at: *mut off_t) {
        published_unless(fd, at);
        if !table::is_foreign(fd) {
            aside(|| import::refresh(fd));
        }
    }

    /// A stream's descriptor, which the C library uses without asking here.
    fn stream(file: *mut FILE) -> Option<table::Closing> {
        match file.is_null() {
            true => None,
            // SAFETY: an open stream, as the caller's function wants.
            false => vacate(unsafe { libc::fileno(file) }),
        }
    }

    prepares! {
        mmap(at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, from: off_t)
            -> *mut c_void = mapping(flags, fd);
        mmap64(at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, from: off_t)
            -> *mut c_void = mapping(flags, fd);
        sendfile(to: c_int, from: c_int, at: *mut off_t, len: size_t) -> ssize_t =
            (published(to), read_by_kernel(from, at));
        sendfile64(to: c_int, from: c_int, at: *mut off_t, len: size_t) -> ssize_t =
            (published(to), read_by_kernel(from, at));
        splice(from: c_int, at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t, flags: u32)
            -> ssize_t = (read_by_kernel(from, at), published_unless(to, to_at));
        copy_file_range(from: c_int, at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t,
            flags: u32) -> ssize_t = (read_by_kernel(from, at), published_unless(to, to_at));
        sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t = {
            // SAFETY: the caller's message. It may carry descriptors to other processes.
            if !message.is_null() && unsafe { (*message).msg_controllen } > 0 {
                aside(import::publish_all);
            }
        };
        sendmmsg(socket: c_int, list: *mut libc::mmsghdr, count: u32, flags: c_int) -> c_int = {
            // SAFETY: the caller's messages.
            let carries = |at: usize| unsafe { (*list.add(at)).msg_hdr.msg_controllen } > 0;
            if !list.is_null() && (0..count as usize).any(carries) {
                aside(import::publish_all);
            }
        };
        fdopen(fd: c_int, mode: *const c_char) -> *mut FILE = published(fd);
        fclose(file: *mut FILE) -> c_int = stream(file);
        freopen(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE =
            stream(file);
        freopen64(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE =
            stream(file);
        _exit(code: c_int) -> () = ending();
        _Exit(code: c_int) -> () = ending();
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn posix_fadvise(
        fd: c_int,
        from: off_t,
        len: off_t,
        advice: c_int,
    ) -> c_int {
        match advise(fd, from, len, advice) {
            true => 0,
            // SAFETY: the caller's own arguments.
            false => unsafe { next::posix_fadvise(fd, from, len, advice) },
        }
    }

    /// As [`posix_fadvise`].
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn posix_fadvise64(
        fd: c_int,
        from: off_t,
        len: off_t,
        advice: c_int,
    ) -> c_int {
        // SAFETY: the caller's own arguments.
        unsafe { posix_fadvise(fd, from, len, advice) }
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn close(fd: c_int) -> c_int {
        if is_inside()
            && !is_borrowed()
            // SAFETY: this library's own argument.
            && let Some(done) = table::close_own(fd, || unsafe { next::close(fd) })
        {
            return done;
        }
        let ours = || aside(|| matches!(table::look(fd), Known::Own)) == Some(true);
        if fd >= 0 && ours() {
            // Programs close whatever they did not open.
            set_errno(libc::EBADF);
            return -1;
        }
        let apart =
            import::any_session() && table::is_unknown(fd) && !is_inside() && !is_borrowed();
        let _apart = apart.then(table::Apart::closes);
        let _closing = close_word(fd);
        // SAFETY: the caller's own argument.
        unsafe { next::close(fd) }
    }

    fn close_word(fd: c_int) -> Option<table::Closing> {
        if fd < 0 || is_borrowed() {
            return None;
        }
        match aside(|| table::Closing::begin(fd)) {
            Some(closing) => closing,
            None => {
                table::abandon(fd);
                None
            }
        }
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn close_range(first: u32, last: u32, flags: c_int) -> c_int {
        if flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 || is_borrowed() || first > last {
            // SAFETY: the caller's own arguments.
            return unsafe { next::close_range(first, last, flags) };
        }
        let _apart = (import::any_session() && !is_inside()).then(table::Apart::closes);
        let mut from = first;
        for fd in table::all().filter(|fd| (first..=last).contains(&(*fd as u32))) {
            if !matches!(table::look(fd), Known::Own) {
                drop(close_word(fd));
                continue;
            }
            if (fd as u32) > from {
                // SAFETY: a part of what the caller asked for, without this library's own.
                let done = unsafe { next::close_range(from, fd as u32 - 1, flags) };
                if done < 0 {
                    return done;
                }
            }
            from = fd as u32 + 1;
        }
        if from > last {
            return 0;
        }
        // SAFETY: as above.
        unsafe { next::close_range(from, last, flags) }
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn closefrom(first: c_int) {
        // SAFETY: the caller's own argument.
        unsafe { close_range(first.max(0) as u32, u32::MAX, 0) };
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
        // SAFETY: the caller's own argument.
        duplicated(fd, unsafe { next::dup(fd) })
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn dup2(fd: c_int, to: c_int) -> c_int {
        if fd == to {
            // SAFETY: the caller's own arguments.
            return unsafe { next::dup2(fd, to) };
        }
        let _closing = vacate(to);
        // SAFETY: the caller's own arguments.
        duplicated(fd, unsafe { next::dup2(fd, to) })
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
        let _closing = if fd == to { None } else { vacate(to) };
        // SAFETY: the caller's own arguments.
        duplicated(fd, unsafe { next::dup3(fd, to, flags) })
    }

    fn controlled(fd: c_int, command: c_int, arg: usize, done: c_int) -> c_int {
        if done < 0 {
            return done;
        }
        match command {
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicated(fd, done),
            libc::F_SETFL if !table::is_foreign(fd) => {
                aside(|| {
                    if let Known::Described(one) = table::look(fd)
                        && let Some(opened) = one.opened()
                        && (arg as c_int ^ opened.flags) & Opened::SWITCHED != 0
                    {
                        // It was imported as something else.
                        import::give_up(fd, &one);
                    }
                });
                done
            }
            _ => done,
        }
    }

    /// As the manual says; its third argument is one word at most, whatever it is.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, arg: usize) -> c_int {
        // SAFETY: the caller's own arguments.
        controlled(fd, command, arg, unsafe { next::fcntl(fd, command, arg) })
    }

    /// As [`fcntl`].
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, arg: usize) -> c_int {
        // SAFETY: the caller's own arguments.
        controlled(fd, command, arg, unsafe { next::fcntl64(fd, command, arg) })
    }
}
