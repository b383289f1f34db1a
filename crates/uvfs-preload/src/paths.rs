//! `uvfs run --metadata`: paths below uvfs mounts go to their servers as well.
//!
//! A path is served where it is simple: absolute, below a mount's own path, or relative to the
//! current directory. Paths relative to descriptors, symbolic links, `..`, other mounts below, and
//! every error but the most common ones are left to the kernel, which has the same file system and
//! the last word. The client keeps names under leases, so what others did is seen, and the server
//! tells the kernel what it has to drop.
//!
//! Files that are opened so have a *placeholder* for a descriptor, which keeps the number and does
//! nothing else: an O_PATH duplicate of the mount's root. Whatever isn't served of it has the kernel
//! open the file first ([`solid`]). It has no duplicates: whoever makes one gets a real one.
//!
//! Mounts come and go: /proc/self/mountinfo tells. It is asked once in a tick of the kernel's clock
//! (at most 10 ms), and at once after what this process, or a child that it waited for, may have done
//! to mounts.
//!
//! Only who may do everything that the server does is served: root with its capabilities, or the
//! mount's own user where the kernel checks nothing. Who becomes somebody else goes through the
//! kernel from then on, as do other namespaces and roots.

use std::ffi::{CStr, CString, c_char, c_int};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use uvfs_client::{Client, Directory, Names, Place, ShortFile};

use crate::calls::{Attributes, aside, is_borrowed};
use crate::engage;
use crate::import;
use crate::mounts::{Seen, below, field, served_mounts};
use crate::real::Calm;
use crate::table::{self, Held, Known, Opened, Position, Use, lock};

/// Descriptors of this library's own are at least this.
const HIGH: c_int = 500;
/// What open(2) adds to the flags of every file (asm-generic/fcntl.h and arm64's own).
#[cfg(target_arch = "aarch64")]
const O_LARGEFILE: c_int = 0o400_000;
#[cfg(not(target_arch = "aarch64"))]
const O_LARGEFILE: c_int = 0o100_000;

/// Whether paths are served at all.
static ON: AtomicBool = AtomicBool::new(false);
/// The process may have become somebody else, or changed mounts.
static CHANGED: AtomicBool = AtomicBool::new(true);
/// The current directory may be another one.
static MOVED: AtomicBool = AtomicBool::new(false);
/// Somebody whom this process waited for may have changed mounts.
static WAITED: AtomicBool = AtomicBool::new(false);
static UMASK: AtomicU32 = AtomicU32::new(0);
/// Descriptions that the kernel has no descriptor of.
static HELD: AtomicUsize = AtomicUsize::new(0);
/// Held by whoever makes such a descriptor, and against all of them by whoever forks.
static OPENING: RwLock<()> = RwLock::new(());
/// A mount has a descriptor to duplicate.
static SPARE: AtomicBool = AtomicBool::new(false);

/// A mount whose paths are served.
struct Mount {
    /// Its path.
    point: CString,
    device: u64,
    /// Programs on it are not run.
    noexec: bool,
    client: Client,
    root: Arc<Place>,
    path: Arc<[u8]>,
    /// An O_PATH descriptor of its root, or -1. It keeps the mount busy, as what is made of it does,
    /// so it goes when the program waits for something. Used with [`OPENING`] held.
    spare: AtomicI32,
}

impl Mount {
    fn spare(&self) -> io::Result<c_int> {
        let known = self.spare.load(Ordering::Acquire);
        if known >= 0 {
            return Ok(known);
        }
        let path = self.point.as_ptr();
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        // SAFETY: a C string and numbers.
        let fd = high(unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags) })?;
        let (order, other) = (Ordering::AcqRel, Ordering::Acquire);
        match self.spare.compare_exchange(-1, fd, order, other) {
            Ok(_) => {
                SPARE.store(true, Ordering::Relaxed);
                Ok(fd)
            }
            Err(faster) => {
                discard(fd);
                Ok(faster)
            }
        }
    }

    fn base(self: &Arc<Self>) -> Base {
        Base {
            mount: self.clone(),
            place: self.root.clone(),
            path: self.path.clone(),
        }
    }

    /// Whether the path leads there, as the kernel and the server see it: others may lie above it.
    fn is_there(&self) -> bool {
        // The server may not want to, or not understand.
        let attr = self.client.stat_at(&self.root, &Names::default(), false);
        let st = stat(libc::AT_FDCWD, &self.point, 0);
        attr.is_ok_and(|attr| {
            st.is_some_and(|st| (st.st_dev, st.st_ino) == (self.device, attr.ino))
        })
    }

    fn drop_spare(&self) {
        let fd = self.spare.swap(-1, Ordering::AcqRel);
        if fd >= 0 {
            discard(fd);
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.drop_spare();
    }
}

/// Moves a descriptor that was just opened out of the program's way.
fn high(low: i64) -> io::Result<c_int> {
    if low < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: numbers; `low` is nobody else's.
    unsafe {
        let high = libc::syscall(libc::SYS_fcntl, low, libc::F_DUPFD_CLOEXEC, HIGH);
        let error = io::Error::last_os_error();
        if high >= 0 {
            table::own(high as c_int, true);
        }
        libc::syscall(libc::SYS_close, low);
        match high < 0 {
            true => Err(error),
            false => Ok(high as c_int),
        }
    }
}

/// Closes a descriptor of this library's own.
fn discard(fd: c_int) {
    // SAFETY: numbers.
    table::close_own(fd, || unsafe {
        libc::syscall(libc::SYS_close, fd) as c_int
    });
}

/// A directory that paths may start from.
#[derive(Clone)]
struct Base {
    mount: Arc<Mount>,
    place: Arc<Place>,
    /// Where it was when it was looked at.
    path: Arc<[u8]>,
}

enum Attached {
    /// Nobody has asked for it.
    NotYet,
    /// It can't be served.
    Never,
    Is(Arc<Mount>),
}

#[derive(Default)]
struct State {
    /// Of /proc/self/mountinfo; readable in a special way when it changed.
    table: Option<c_int>,
    /// The kernel's clock when it was.
    checked: (i64, i64),
    mounts: Vec<(Seen, Attached)>,
    /// Nothing: not looked at; nothing in it: none of a mount's.
    current: Option<Option<Base>>,
    /// Whom the servers take this process for.
    group: Option<u32>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Reads the environment.
pub(crate) fn begin() {
    if std::env::var_os("UVFS_RUN_METADATA").is_none() {
        return;
    }
    // With io_uring a program uses descriptors where nobody can see it.
    // SAFETY: a C string.
    let uring = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"io_uring_queue_init".as_ptr()) };
    HOLDS.store(uring.is_null(), Ordering::Relaxed);
    ON.store(true, Ordering::Relaxed);
}

/// Whether files may be opened without the kernel.
static HOLDS: AtomicBool = AtomicBool::new(true);

/// Whether paths are served.
#[inline]
pub(crate) fn on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// No paths are served any more.
pub(crate) fn off() {
    ON.store(false, Ordering::Relaxed);
}

/// The process may have become somebody else, or have other mounts.
pub(crate) fn identity_changed() {
    CHANGED.store(true, Ordering::Release);
}

/// The current directory may have changed.
pub(crate) fn moved() {
    if !is_borrowed() {
        MOVED.store(true, Ordering::Release);
    }
}

/// Another process has ended, and may have changed mounts before.
pub(crate) fn waited() {
    WAITED.store(true, Ordering::Release);
}

/// The umask is another one.
pub(crate) fn masked(mask: u32) {
    if !is_borrowed() {
        UMASK.store(mask & 0o777, Ordering::Relaxed);
    }
}

/// The program uses descriptors where nobody can see it: it gets the kernel's, from now on.
pub(crate) fn holds_no_more() {
    HOLDS.store(false, Ordering::Relaxed);
    if HELD.load(Ordering::Relaxed) > 0 {
        aside(all_solid);
    }
}

fn all_solid() {
    let _opening = starts_no_other();
    for fd in table::all() {
        if let Known::Described(one) = table::look(fd) {
            let _ = give(fd, &one);
        }
    }
}

/// syscall(2) is about to be called, with these arguments.
pub(crate) fn calls_the_kernel(number: i64, arguments: &[usize]) {
    /// Of asm-generic/unistd.h.
    const RINGS: std::ops::RangeInclusive<i64> = 425..=427;
    /// What changes who or where this process is, or makes another one.
    const LOST: &[i64] = &[
        libc::SYS_chdir,
        libc::SYS_fchdir,
        libc::SYS_umask,
        libc::SYS_chroot,
        libc::SYS_pivot_root,
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_setuid,
        libc::SYS_setgid,
        libc::SYS_setreuid,
        libc::SYS_setregid,
        libc::SYS_setresuid,
        libc::SYS_setresgid,
        libc::SYS_setfsuid,
        libc::SYS_setfsgid,
        libc::SYS_capset,
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_clone,
        CLONE3,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_vfork,
    ];
    const CLONE3: i64 = 435;
    if !on() || crate::real::is_inside() || is_borrowed() {
        return;
    }
    if LOST.contains(&number) {
        off();
        return holds_no_more();
    }
    if RINGS.contains(&number) {
        return holds_no_more();
    }
    if HELD.load(Ordering::Relaxed) == 0 {
        return;
    }
    for argument in arguments {
        if let Ok(fd) = c_int::try_from(*argument) {
            held_publish(fd);
        }
    }
}

/// The kernel is about to use a descriptor and its position, if it has none of it.
fn held_publish(fd: c_int) {
    if table::is_foreign(fd) {
        return;
    }
    aside(|| {
        if let Known::Described(one) = table::look(fd)
            && one.is_held()
        {
            import::publish(fd, &one);
        }
    });
}

/// The program may be about to wait: mounts without open files are not to be busy.
#[inline]
pub(crate) fn idle() {
    if SPARE.load(Ordering::Relaxed) && HELD.load(Ordering::Relaxed) == 0 {
        idle_now();
    }
}

#[cold]
fn idle_now() {
    aside(|| {
        let Ok(opening) = OPENING.try_write() else {
            return;
        };
        if HELD.load(Ordering::Relaxed) == 0 {
            drop_spares(lock(&STATE).as_ref());
        }
        drop(opening);
    });
}

/// With [`OPENING`] held against all others.
fn drop_spares(state: Option<&State>) {
    SPARE.store(false, Ordering::Relaxed);
    for (_, attached) in state.iter().flat_map(|state| &state.mounts) {
        if let Attached::Is(mount) = attached {
            mount.drop_spare();
        }
    }
}

/// Says that a descriptor is about to be made that the kernel does not know.
pub(crate) fn starts() -> RwLockReadGuard<'static, ()> {
    OPENING.read().unwrap_or_else(PoisonError::into_inner)
}

fn starts_no_other() -> RwLockWriteGuard<'static, ()> {
    OPENING.write().unwrap_or_else(PoisonError::into_inner)
}

fn stat(dir: c_int, path: &CStr, flags: c_int) -> Option<libc::stat> {
    // SAFETY: plain data, filled by the call.
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a C string and a stat buffer.
    (unsafe { crate::calls::next::fstatat(dir, path.as_ptr(), &mut st, flags) } == 0).then_some(st)
}

fn socket_of(point: &CStr) -> Option<PathBuf> {
    let mut value = [0u8; 256];
    // SAFETY: C strings, and room of the length that is given.
    let len = unsafe {
        libc::getxattr(
            point.as_ptr(),
            c"user.uvfs.socket".as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    let value = value.get(..usize::try_from(len).ok()?)?;
    Some(std::ffi::OsStr::from_bytes(value).into())
}

impl State {
    /// Finds out what mounts there are, if that may have changed.
    fn refresh(&mut self) {
        if MOVED.load(Ordering::Relaxed) && MOVED.swap(false, Ordering::AcqRel) {
            self.current = None;
        }
        let now = clock();
        let changed = CHANGED.load(Ordering::Relaxed);
        if !changed && now == self.checked && !WAITED.load(Ordering::Relaxed) {
            return;
        }
        // First, as what changes after that is to be seen by the next one.
        WAITED.store(false, Ordering::Relaxed);
        let changed = CHANGED.swap(false, Ordering::AcqRel);
        let first = self.table.is_none();
        if first {
            self.open_table();
        }
        self.checked = now;
        if self.table_changed() || first || changed {
            self.read_mounts();
        }
    }

    fn open_table(&mut self) {
        let (path, flags) = (c"/proc/self/mountinfo", libc::O_RDONLY | libc::O_CLOEXEC);
        let dir = libc::AT_FDCWD;
        // SAFETY: a C string and numbers.
        let fd = unsafe { libc::syscall(libc::SYS_openat, dir, path.as_ptr(), flags) };
        self.table = high(fd).ok();
    }

    fn table_changed(&self) -> bool {
        let Some(fd) = self.table else { return true };
        let mut one = libc::pollfd {
            fd,
            events: libc::POLLPRI,
            revents: 0,
        };
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: one entry, and a time.
        let ready = unsafe {
            libc::syscall(
                libc::SYS_ppoll,
                &raw mut one,
                1,
                &raw const now,
                std::ptr::null::<libc::sigset_t>(),
                0,
            )
        };
        ready != 0
    }

    fn read_mounts(&mut self) {
        // Files are read: a thread that is cancelled would leave with the lock.
        let _calm = Calm::new();
        let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        if let Some(mask) = field(&status, "Umask") {
            masked(u32::from_str_radix(mask.trim(), 8).unwrap_or(0o22));
        }
        // SAFETY: no arguments.
        let group = unsafe { libc::getegid() };
        if self.group.is_some_and(|before| before != group) {
            off();
        }
        let seen = match crate::calls::owners_agree() && on() {
            true => served_mounts(&mountinfo, &status),
            false => Vec::new(),
        };
        // Another file system may be there under the same number, and directories be elsewhere.
        self.current = None;
        let mut before = std::mem::take(&mut self.mounts);
        let keep = |seen: Seen| {
            let known = before.iter().position(|(one, _)| *one == seen);
            let known = known.map(|at| before.swap_remove(at).1);
            let attached = known.unwrap_or(Attached::NotYet);
            match &attached {
                Attached::Is(mount) if !mount.is_there() => (seen, Attached::Never),
                _ => (seen, attached),
            }
        };
        self.mounts = seen.into_iter().map(keep).collect();
    }

    /// The mount at this place in the list, attached to now if it was not.
    fn mount(&mut self, index: usize) -> Option<Arc<Mount>> {
        let (seen, attached) = &mut self.mounts[index];
        if matches!(attached, Attached::NotYet) {
            *attached = match attach(seen) {
                Some(mount) => Attached::Is(Arc::new(mount)),
                None => Attached::Never,
            };
            // SAFETY: no arguments.
            self.group = Some(unsafe { libc::getegid() });
        }
        match attached {
            Attached::Is(mount) => Some(mount.clone()),
            _ => None,
        }
    }

    fn of_path(&mut self, path: &[u8]) -> Option<(Base, Names)> {
        let at = |(seen, _): &(Seen, Attached)| below(&seen.point, path).is_some();
        let index = self.mounts.iter().position(at)?;
        if matches!(self.mounts[index].1, Attached::NotYet) && !engage::paths_pay() {
            return None;
        }
        let names = match below(&self.mounts[index].0.point, path)? {
            b"" => Names::default(),
            rest => Names::parse(rest)?,
        };
        Some((self.mount(index)?.base(), names))
    }

    /// The directory that a link of /proc leads to, if the kernel and the server agree about it.
    fn behind(&mut self, link: &str, st: &libc::stat) -> Option<Base> {
        if st.st_mode & libc::S_IFMT != libc::S_IFDIR
            || self.mounts.iter().all(|(seen, _)| seen.device != st.st_dev)
        {
            return None;
        }
        let path = std::fs::read_link(link).ok()?;
        let (base, names) = self.of_path(path.as_os_str().as_bytes())?;
        let client = &base.mount.client;
        let (place, attr) = client.place_at(&base.place, &names).ok()?;
        (attr.ino == st.st_ino && base.mount.device == st.st_dev).then(|| Base {
            mount: base.mount.clone(),
            place: Arc::new(place),
            path: path.as_os_str().as_bytes().into(),
        })
    }

    fn current(&mut self) -> Option<Base> {
        if self.current.is_none() {
            let found =
                stat(libc::AT_FDCWD, c".", 0).and_then(|st| self.behind("/proc/self/cwd", &st));
            let waits = |(_, attached): &(Seen, Attached)| matches!(attached, Attached::NotYet);
            if found.is_none() && self.mounts.iter().any(waits) {
                // It may be served later.
                return None;
            }
            self.current = Some(found);
        }
        self.current.clone().flatten()
    }
}

fn attach(seen: &Seen) -> Option<Mount> {
    let point = CString::new(seen.point.clone()).ok()?;
    let client = import::client_at(socket_of(&point)?)?;
    let root = Arc::new(client.root());
    let mount = Mount {
        path: point.as_bytes().into(),
        point,
        device: seen.device,
        noexec: seen.noexec,
        client,
        root,
        spare: AtomicI32::new(-1),
    };
    (mount.client.paths_served().is_ok() && mount.is_there()).then_some(mount)
}

/// The kernel's clock, which is cheap to ask and goes on with its ticks.
fn clock() -> (i64, i64) {
    // SAFETY: plain data, filled by the call.
    let mut now: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: a timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
    (now.tv_sec, now.tv_nsec)
}

/// Where a path leads, if that is simple.
fn locate(state: &mut State, dir: c_int, path: &[u8]) -> Option<(Base, Names)> {
    if path.len() >= libc::PATH_MAX as usize {
        return None;
    }
    if path.first() == Some(&b'/') {
        return state.of_path(path);
    }
    let names = Names::parse(path)?;
    // Descriptors are closed and opened inside the C library as well, unseen: theirs are the
    // kernel's to know.
    let base = (dir == libc::AT_FDCWD).then(|| state.current())??;
    Some((base, names))
}

/// A path as a call has it.
#[derive(Clone, Copy)]
pub(crate) struct Given {
    pub(crate) dir: c_int,
    pub(crate) path: *const c_char,
}

impl Given {
    /// # Safety
    /// `path` is a string, or what the kernel refuses.
    unsafe fn bytes<'a>(self) -> Option<&'a [u8]> {
        if !crate::calls::is_plausible(self.path.cast(), 1) {
            return None;
        }
        // SAFETY: the caller's string.
        Some(unsafe { CStr::from_ptr(self.path) }.to_bytes())
    }

    /// # Safety
    /// As for a system call with this path.
    unsafe fn locate(&self) -> Option<(Base, Names)> {
        // SAFETY: the caller's duty.
        let path = unsafe { self.bytes() }?;
        let mut guard = lock(&STATE);
        let state = guard.get_or_insert_default();
        state.refresh();
        if state.mounts.is_empty() {
            return None;
        }
        locate(state, self.dir, path)
    }
}

/// What only the kernel says right is left to it.
fn said<T>(done: io::Result<T>) -> Option<Result<T, c_int>> {
    match done {
        Ok(done) => Some(Ok(done)),
        Err(error) => match error.raw_os_error() {
            Some(code @ (libc::ENOENT | libc::EEXIST | libc::ENOTEMPTY)) => Some(Err(code)),
            _ => None,
        },
    }
}

/// Serves a call with a path.
///
/// # Safety
/// As for a system call with this path.
unsafe fn with<T>(
    given: Given,
    call: impl FnOnce(&Base, &Names) -> io::Result<T>,
) -> Option<Result<T, c_int>> {
    if !on() {
        return None;
    }
    // SAFETY: the caller's duty.
    aside(|| unsafe { at_work(given, call) }).flatten()
}

/// As [`with`], where the thread is at work here already.
///
/// # Safety
/// As for a system call with this path.
unsafe fn at_work<T>(
    given: Given,
    call: impl FnOnce(&Base, &Names) -> io::Result<T>,
) -> Option<Result<T, c_int>> {
    if !import::READY.load(Ordering::Relaxed) {
        return None;
    }
    if HELD.load(Ordering::Relaxed) > 0 {
        // SAFETY: the caller's duty.
        let path = unsafe { given.bytes() }?;
        if path.starts_with(b"/proc/") || path.starts_with(b"/dev/") {
            // Perhaps that of a descriptor.
            all_solid();
            return None;
        }
    }
    // SAFETY: the caller's duty.
    let (base, names) = unsafe { given.locate() }?;
    let done = said(call(&base, &names));
    if done.is_some() {
        crate::report::served(0, 0);
    }
    done
}

/// As [`with`], with two paths of one mount.
///
/// # Safety
/// As for a system call with these paths.
unsafe fn with_two(
    from: Given,
    to: Given,
    call: impl FnOnce(&Client, (&Place, &Names), (&Place, &Names)) -> io::Result<()>,
) -> Option<Result<c_int, c_int>> {
    // SAFETY: the caller's duty.
    let done = unsafe {
        with(from, |base, names| {
            let Some((other, others)) = to.locate() else {
                return Err(io::Error::from_raw_os_error(libc::ELOOP));
            };
            if !Arc::ptr_eq(&other.mount, &base.mount) || names.is_empty() || others.is_empty() {
                return Err(io::Error::from_raw_os_error(libc::ELOOP));
            }
            call(
                &base.mount.client,
                (&base.place, names),
                (&other.place, &others),
            )
        })
    };
    done.map(|done| done.map(|()| 0))
}

fn named(names: &Names) -> io::Result<()> {
    match names.is_empty() {
        true => Err(io::Error::from_raw_os_error(libc::ELOOP)),
        false => Ok(()),
    }
}

/// Attributes, with the device and inode numbers that the mount gives.
///
/// # Safety
/// As for a system call with this path.
pub(crate) unsafe fn look(
    given: Given,
    follow: bool,
    only_below: bool,
) -> Option<Result<Attributes, c_int>> {
    // SAFETY: the caller's duty.
    unsafe {
        with(given, |base, names| {
            if only_below {
                named(names)?;
            }
            let mount = &base.mount;
            let attr = mount.client.stat_at(&base.place, names, follow)?;
            let number = attr.ino;
            Ok((attr, (mount.device, number)))
        })
    }
}

/// A system call: for who can't do without.
fn is_root() -> bool {
    // SAFETY: no arguments.
    unsafe { libc::geteuid() == 0 }
}

/// faccessat(2), of what is asked for everybody who may do everything.
///
/// # Safety
/// As for a system call with this path.
pub(crate) unsafe fn access(
    given: Given,
    mode: c_int,
    follow: bool,
) -> Option<Result<c_int, c_int>> {
    if mode & !(libc::R_OK | libc::W_OK | libc::X_OK) != 0 || (mode != libc::F_OK && !is_root()) {
        return None;
    }
    // SAFETY: the caller's duty.
    unsafe {
        with(given, |base, names| {
            let attr = base.mount.client.stat_at(&base.place, names, follow)?;
            let directory = attr.mode & libc::S_IFMT == libc::S_IFDIR;
            // The host may know better: immutable files, for one.
            let barred = base.mount.noexec || attr.mode & 0o111 == 0;
            let refused = mode & libc::X_OK != 0 && !directory && barred;
            match refused || mode & libc::W_OK != 0 {
                true => Err(io::Error::from_raw_os_error(libc::EACCES)),
                false => Ok(0),
            }
        })
    }
}

/// # Safety
/// As for readlinkat(2).
pub(crate) unsafe fn readlink(
    given: Given,
    to: *mut c_char,
    room: usize,
) -> Option<Result<isize, c_int>> {
    if room == 0 || !crate::calls::is_plausible(to.cast(), room) {
        return None;
    }
    // SAFETY: the caller's duty, and the caller's room.
    unsafe {
        with(given, |base, names| {
            named(names)?;
            let target = base.mount.client.readlink_at(&base.place, names)?;
            let n = target.len().min(room);
            std::ptr::copy_nonoverlapping(target.as_ptr(), to.cast(), n);
            Ok(n as isize)
        })
    }
}

/// # Safety
/// As for mkdirat(2).
pub(crate) unsafe fn mkdir(given: Given, mode: u32) -> Option<Result<c_int, c_int>> {
    // SAFETY: the caller's duty.
    unsafe {
        with(given, |base, names| {
            named(names)?;
            // Known by now, at the latest.
            let mask = UMASK.load(Ordering::Relaxed);
            let mode = mode & 0o1777;
            base.mount.client.mkdir_at(&base.place, names, mode, mask)?;
            Ok(0)
        })
    }
}

/// # Safety
/// As for unlinkat(2).
pub(crate) unsafe fn remove(given: Given, directory: bool) -> Option<Result<c_int, c_int>> {
    // SAFETY: the caller's duty.
    unsafe {
        with(given, |base, names| {
            named(names)?;
            base.mount.client.remove_at(&base.place, names, directory)?;
            Ok(0)
        })
    }
}

/// # Safety
/// As for renameat2(2).
pub(crate) unsafe fn rename(from: Given, to: Given, flags: u32) -> Option<Result<c_int, c_int>> {
    // SAFETY: the caller's duty.
    unsafe {
        with_two(from, to, |client, (from, names), (to, new)| {
            client.rename_at(from, names, to, new, flags)
        })
    }
}

/// # Safety
/// As for linkat(2), without flags.
pub(crate) unsafe fn link(from: Given, to: Given) -> Option<Result<c_int, c_int>> {
    if !is_root() {
        // fs.protected_hardlinks is for the kernel to judge.
        return None;
    }
    // SAFETY: the caller's duty.
    unsafe {
        with_two(from, to, |client, (from, names), (to, new)| {
            client.link_at(from, names, to, new)
        })
    }
}

/// # Safety
/// As for symlinkat(2).
pub(crate) unsafe fn symlink(target: *const c_char, given: Given) -> Option<Result<c_int, c_int>> {
    let target = Given {
        dir: 0,
        path: target,
    };
    // SAFETY: the caller's duty.
    unsafe {
        let target = target.bytes().filter(|target| !target.is_empty())?;
        with(given, |base, names| {
            named(names)?;
            let client = &base.mount.client;
            client.symlink_at(target, &base.place, names).map(|()| 0)
        })
    }
}

/// opendir(3) without the kernel: the directory, and an O_PATH descriptor of it.
///
/// The caller is at work here already.
///
/// # Safety
/// As for opendir(3).
pub(crate) unsafe fn directory(path: *const c_char) -> Option<Result<(Directory, c_int), c_int>> {
    let given = Given {
        dir: libc::AT_FDCWD,
        path,
    };
    // SAFETY: the caller's duty.
    unsafe {
        at_work(given, |base, names| {
            let directory = base.mount.client.open_directory_at(&base.place, names)?;
            let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
            let fd = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags) as c_int;
            let same = stat(fd, c"", libc::AT_EMPTY_PATH)
                .is_some_and(|st| (st.st_dev, st.st_ino) == (base.mount.device, directory.ino));
            match fd >= 0 && same {
                true => Ok((directory, fd)),
                false => {
                    libc::syscall(libc::SYS_close, fd);
                    Err(io::Error::from_raw_os_error(libc::ELOOP))
                }
            }
        })
    }
}

/// Whether an open with these flags is one that may be served.
fn opens(flags: c_int) -> bool {
    let known = libc::O_ACCMODE
        | libc::O_CREAT
        | libc::O_EXCL
        | libc::O_TRUNC
        | libc::O_NOCTTY
        | libc::O_NONBLOCK
        | libc::O_NOFOLLOW
        | libc::O_CLOEXEC
        | libc::O_SYNC
        | O_LARGEFILE;
    if flags & !known != 0 {
        return false;
    }
    match flags & libc::O_ACCMODE {
        libc::O_RDONLY => flags & libc::O_TRUNC == 0,
        libc::O_WRONLY | libc::O_RDWR => !import::limited(),
        _ => false,
    }
}

/// open(2) of a regular file: a descriptor that stands for it until the kernel needs it.
///
/// # Safety
/// As for openat(2).
pub(crate) unsafe fn open(given: Given, flags: c_int, mode: u32) -> Option<Result<c_int, c_int>> {
    if !on() || !HOLDS.load(Ordering::Relaxed) || !opens(flags) {
        return None;
    }
    let wants = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => 0o400,
        libc::O_WRONLY => 0o200,
        _ => 0o600,
    };
    if flags & libc::O_CREAT != 0 && mode & wants != wants && !is_root() {
        // It can't be opened again, when the kernel needs it.
        return None;
    }
    // SAFETY: the caller's duty.
    unsafe {
        with(given, |base, names| {
            named(names)?;
            let _opening = starts();
            let mask = UMASK.load(Ordering::Relaxed);
            // Whatever may be missing, before anything is made.
            let way = Way::new(base, given.bytes().unwrap_or_default())?;
            let one = Use::new(true).ok_or(io::ErrorKind::OutOfMemory)?;
            let number = Reserved::new(&base.mount, flags)?;
            let file = opened(base, names, flags, mode, mask)?;
            let kept = libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY | libc::O_TRUNC;
            let opened = Opened {
                inode: (base.mount.device, file.opened_as().ino),
                file: Held::short(file, way),
                flags: flags & !(kept | libc::O_CLOEXEC) | O_LARGEFILE,
            };
            *lock(&one.position) = Position::Here(0);
            one.set_opened(opened);
            one.hold(true);
            HELD.fetch_add(1, Ordering::Relaxed);
            crate::report::imported();
            Ok(number.becomes(one))
        })
    }
}

/// Opens a file, whatever it takes.
fn opened(base: &Base, names: &Names, flags: c_int, mode: u32, mask: u32) -> io::Result<ShortFile> {
    let client = &base.mount.client;
    let open = |flags| client.open_at(&base.place, names, flags, mode, mask);
    let (truncates, creates) = (flags & libc::O_TRUNC != 0, flags & libc::O_CREAT != 0);
    let flags = flags & !libc::O_TRUNC;
    if creates && (truncates || flags & libc::O_EXCL != 0) {
        // There is nothing to truncate if it is new.
        match open(flags | libc::O_EXCL) {
            Err(error)
                if error.raw_os_error() == Some(libc::EEXIST) && flags & libc::O_EXCL == 0 => {}
            done => return done,
        }
    }
    let file = open(flags)?;
    if flags & libc::O_ACCMODE != libc::O_RDONLY && file.opened_as().mode & 0o111 != 0 {
        // The kernel knows whether it is being executed (ETXTBSY).
        return Err(io::Error::from_raw_os_error(libc::ELOOP));
    }
    if truncates {
        file.file().set_len(0)?;
    }
    Ok(file)
}

/// A descriptor's number that nobody else gets: one that can do nothing, on the mount, which stays
/// busy with it as with any open file.
struct Reserved(c_int);

impl Reserved {
    /// With [`OPENING`] held.
    fn new(mount: &Mount, flags: c_int) -> io::Result<Self> {
        let how = match flags & libc::O_CLOEXEC {
            0 => libc::F_DUPFD,
            _ => libc::F_DUPFD_CLOEXEC,
        };
        let of = mount.spare()?;
        // SAFETY: numbers.
        let fd = unsafe { libc::syscall(libc::SYS_fcntl, of, how, 0) as c_int };
        match usize::try_from(fd) {
            Ok(number) if number < table::DESCRIPTORS => Ok(Self(fd)),
            Ok(_) => {
                drop(Self(fd));
                Err(io::ErrorKind::Unsupported.into())
            }
            Err(_) => Err(io::Error::last_os_error()),
        }
    }

    fn becomes(self, one: Use) -> c_int {
        let fd = self.0;
        std::mem::forget(self);
        table::duplicate(fd, one);
        fd
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: its own, and nobody else knows it.
        unsafe { libc::syscall(libc::SYS_close, self.0) };
    }
}

/// How the kernel gets to a file that was opened without it.
pub(crate) struct Way {
    mount: Arc<Mount>,
    /// As it was opened.
    path: CString,
}

impl Way {
    fn new(base: &Base, path: &[u8]) -> io::Result<Self> {
        let path = match path.first() {
            Some(b'/') => path.to_vec(),
            _ => [&base.path, &b"/"[..], path].concat(),
        };
        Ok(Self {
            mount: base.mount.clone(),
            path: CString::new(path)?,
        })
    }

    /// A descriptor of the kernel's, of the file with this inode.
    fn open(&self, file: &ShortFile, inode: (u64, u64), flags: c_int) -> io::Result<c_int> {
        if let Ok(path) = Found::at(&self.path)
            && path.is(inode)
            && let Ok(fd) = path.open(flags)
        {
            return Ok(fd);
        }
        // Renamed, or removed.
        let name = file.name_at_mount()?;
        let path = [self.mount.point.as_bytes(), b"/", name.as_bytes()].concat();
        Found::at(&CString::new(path)?)?.open(flags)
    }
}

/// An O_PATH descriptor.
struct Found(c_int);

impl Found {
    fn at(path: &CStr) -> io::Result<Self> {
        let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: a C string and numbers.
        let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags) };
        match fd < 0 {
            true => Err(io::Error::last_os_error()),
            false => Ok(Self(fd as c_int)),
        }
    }

    fn is(&self, inode: (u64, u64)) -> bool {
        stat(self.0, c"", libc::AT_EMPTY_PATH).is_some_and(|st| (st.st_dev, st.st_ino) == inode)
    }

    /// The file, opened with these flags and O_CLOEXEC.
    fn open(&self, flags: c_int) -> io::Result<c_int> {
        let path = CString::new(format!("/proc/self/fd/{}", self.0))?;
        let flags = flags & !libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: a C string and numbers.
        let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags) };
        match fd < 0 {
            true => Err(io::Error::last_os_error()),
            false => Ok(fd as c_int),
        }
    }
}

impl Drop for Found {
    fn drop(&mut self) {
        // SAFETY: its own.
        unsafe { libc::syscall(libc::SYS_close, self.0) };
    }
}

/// A description has gone.
pub(crate) fn let_go() {
    HELD.fetch_sub(1, Ordering::Relaxed);
}

/// The kernel is about to use a descriptor: if it has none, it gets one.
///
/// # Errors
/// What opening the file through the mount gives.
pub(crate) fn solid(fd: c_int) -> Result<(), c_int> {
    if HELD.load(Ordering::Relaxed) == 0 || table::is_foreign(fd) {
        return Ok(());
    }
    aside(|| solid_at_work(fd)).unwrap_or(Ok(()))
}

/// As [`solid`], where the thread is at work here already.
///
/// # Errors
/// As [`solid`].
pub(crate) fn solid_at_work(fd: c_int) -> Result<(), c_int> {
    match table::look(fd) {
        Known::Described(one) => give(fd, &one),
        _ => Ok(()),
    }
}

/// Gives the kernel the descriptor of a description, with its position.
///
/// # Errors
/// As [`solid`].
pub(crate) fn give(fd: c_int, one: &Use) -> Result<(), c_int> {
    if !one.is_held() {
        return Ok(());
    }
    // Also keeps others from closing it meanwhile.
    let mut position = lock(&one.position);
    let Some(opened) = one.opened().filter(|_| one.is_held()) else {
        return Ok(());
    };
    if !table::is(fd, one) {
        return Ok(());
    }
    let _calm = Calm::new();
    let code = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    let (short, way) = opened.file.held().ok_or(libc::EIO)?;
    let real = way.open(short, opened.inode, opened.flags).map_err(code)?;
    // SAFETY: numbers: of this description, and of what was opened above.
    unsafe {
        if let Position::Here(at) = *position {
            libc::syscall(libc::SYS_lseek, real, at as i64, libc::SEEK_SET);
        }
        let kept = libc::syscall(libc::SYS_fcntl, fd, libc::F_GETFD) as c_int;
        let kept = match kept & libc::FD_CLOEXEC {
            0 => 0,
            _ => libc::O_CLOEXEC,
        };
        libc::syscall(libc::SYS_dup3, real, fd, kept);
        libc::syscall(libc::SYS_close, real);
    }
    // From here on it is as any other that this process has just opened: who uses it next may be the
    // C library itself, at the kernel's position.
    *position = Position::Kernel;
    one.hold(false);
    let_go();
    table::opened(fd);
    Ok(())
}

/// This library's own descriptors are the program's from now on: no session goes on.
pub(crate) fn retire() {
    off();
    let _opening = starts_no_other();
    let state = lock(&STATE).take();
    SPARE.store(false, Ordering::Relaxed);
    if let Some(fd) = state.as_ref().and_then(|state| state.table) {
        table::own(fd, false);
    }
}

/// Keeps other threads from making descriptors that the kernel doesn't know, and from this module's
/// lock, for a fork.
pub(crate) fn pause() -> Pause {
    let opening = starts_no_other();
    let state = lock(&STATE);
    drop_spares(state.as_ref());
    Pause {
        state,
        _opening: opening,
    }
}

/// While it lives, no path is looked at.
pub(crate) struct Pause {
    state: MutexGuard<'static, Option<State>>,
    _opening: RwLockWriteGuard<'static, ()>,
}

impl Pause {
    /// In the child: places and sessions are the parent's.
    pub(crate) fn child(mut self) {
        if let Some(state) = self.state.take() {
            if let Some(fd) = state.table {
                discard(fd);
            }
            std::mem::forget(state);
        }
        HELD.store(0, Ordering::Relaxed);
        identity_changed();
    }
}
