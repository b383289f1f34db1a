//! `uvfs run --metadata`: paths below uvfs mounts go to their servers as well.
//!
//! A path is served where it is simple: absolute, below a mount's own path, or relative to the
//! current directory. Paths relative to descriptors, symbolic links, `..`, other mounts below, and every error but the most common ones are left to the kernel,
//! which has the same file system and the last word. Nothing is cached: each call asks the server,
//! so what others did is seen, and the server tells the kernel what it has to drop.
//!
//! Only who may do everything that the server does is served: root with its capabilities, or the
//! mount's own user where the kernel checks nothing. Who becomes somebody else goes through the
//! kernel from then on, as do other namespaces and roots.

use std::ffi::{CStr, CString, c_char, c_int};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use uvfs_client::{Client, Directory, Names, Place};

use crate::calls::{Attributes, aside};
use crate::import;
use crate::real::Calm;
use crate::table::{self, Held, Known, Opened, Position, Use, lock};

/// How old what is known of the mounts may be.
const MOUNTS: Duration = Duration::from_millis(1);
/// Capabilities without which even root is refused things (linux/capability.h): CAP_CHOWN,
/// CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_FSETID.
const CAPABILITIES: u64 = 0b11111;
/// Descriptors of this library's own are at least this.
const HIGH: c_int = 500;
/// What open(2) adds to the flags of every file (asm-generic/fcntl.h and arm64's own).
#[cfg(target_arch = "aarch64")]
const O_LARGEFILE: c_int = 0o400_000;
#[cfg(not(target_arch = "aarch64"))]
const O_LARGEFILE: c_int = 0o100_000;

/// Whether paths are served at all.
static ON: AtomicBool = AtomicBool::new(false);
/// The process may have become somebody else.
static CHANGED: AtomicBool = AtomicBool::new(true);
static UMASK: AtomicU32 = AtomicU32::new(0);
/// Descriptions that the kernel has no descriptor of.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// A mount whose paths are served.
struct Mount {
    /// Its path.
    point: CString,
    device: u64,
    client: Client,
    root: Arc<Place>,
}

/// A directory that paths may start from.
#[derive(Clone)]
struct Base {
    mount: Arc<Mount>,
    place: Arc<Place>,
}

/// As /proc/self/mountinfo has it.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    point: Vec<u8>,
    device: u64,
}

#[derive(Default)]
struct State {
    /// Of /proc/self/mountinfo; readable in a special way when it changed.
    table: Option<c_int>,
    checked: Option<Instant>,
    seen: Vec<Seen>,
    mounts: Vec<Arc<Mount>>,
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

/// The process may be about to become somebody else.
pub(crate) fn identity_changes() {
    CHANGED.store(true, Ordering::Relaxed);
}

/// The current directory may be about to change.
pub(crate) fn moved() {
    if on() {
        aside(|| {
            if let Some(state) = &mut *lock(&STATE) {
                state.current = None;
            }
        });
    }
}

/// The umask is another one.
pub(crate) fn masked(mask: u32) {
    UMASK.store(mask & 0o777, Ordering::Relaxed);
}

/// A field of /proc/self/status.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
}

/// Whether this process may do all that the server of a mount with these options may.
fn entitled(status: &str, options: &str) -> bool {
    let ids = |name| {
        let ids: Option<Vec<u32>> = field(status, name)?
            .split_whitespace()
            .map(|id| id.parse().ok())
            .collect();
        let ids = ids?;
        // All four: what it is and what it uses for files.
        let first = *ids.first()?;
        ids.iter().all(|id| *id == first).then_some(first)
    };
    let (Some(user), Some(_)) = (ids("Uid"), ids("Gid")) else {
        return false;
    };
    if user == 0 {
        let capabilities = field(status, "CapEff").map(str::trim);
        let capabilities = capabilities.and_then(|hex| u64::from_str_radix(hex, 16).ok());
        return capabilities.is_some_and(|have| have & CAPABILITIES == CAPABILITIES);
    }
    let has = |option: &str| options.split(',').any(|one| one == option);
    has(&format!("user_id={user}")) && !has("allow_other") && !has("default_permissions")
}

/// A path of mountinfo without its octal escapes.
fn unescaped(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        match (first, octal) {
            (b'\\', Some(byte)) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    bytes
}

/// What is below a directory's path: nothing for other paths.
fn below<'a>(point: &[u8], path: &'a [u8]) -> Option<&'a [u8]> {
    match path.strip_prefix(point)? {
        b"" => Some(b""),
        rest => rest.strip_prefix(b"/"),
    }
}

/// The mounts of a mountinfo whose paths can be served, for a process with this status.
fn served_mounts(mountinfo: &str, status: &str) -> Vec<Seen> {
    let mut all: Vec<Vec<u8>> = Vec::new();
    let mut ours = Vec::new();
    for line in mountinfo.lines() {
        // proc_pid_mountinfo(5): id, parent, device, root, point, options, fields, "-", type,
        // source, options of the file system.
        let mut parts = line.split(" - ");
        let (Some(first), Some(second)) = (parts.next(), parts.next()) else {
            continue;
        };
        let first: Vec<&str> = first.split(' ').collect();
        let second: Vec<&str> = second.split(' ').collect();
        let (Some(device), Some(root), Some(point), Some(options)) =
            (first.get(2), first.get(3), first.get(4), first.get(5))
        else {
            continue;
        };
        let point = unescaped(point);
        all.push(point.clone());
        let device = device.split_once(':').and_then(|(major, minor)| {
            Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
        });
        let kind = second.first();
        if kind == Some(&"fuse.uvfs")
            && *root == "/"
            && options.split(',').next() == Some("rw")
            && point != b"/"
            && let Some(device) = device
            && entitled(status, second.get(2).unwrap_or(&""))
        {
            ours.push(Seen { point, device });
        }
    }
    // Others below, or above at the same place, are the kernel's to find.
    ours.retain(|one| {
        let there = all
            .iter()
            .filter(|other| below(&one.point, other).is_some());
        there.count() == 1
    });
    ours
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
        let now = Instant::now();
        let changed = CHANGED.load(Ordering::Relaxed);
        if !changed && self.checked.is_some_and(|then| now - then < MOUNTS) {
            return;
        }
        let first = self.table.is_none();
        if first {
            self.open_table();
        }
        self.checked = Some(now);
        if first || changed || self.table_changed() {
            CHANGED.store(false, Ordering::Relaxed);
            self.read_mounts();
        }
    }

    fn open_table(&mut self) {
        // SAFETY: C strings and numbers.
        let fd = unsafe {
            let path = c"/proc/self/mountinfo".as_ptr();
            let flags = libc::O_RDONLY | libc::O_CLOEXEC;
            let low = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags) as c_int;
            let high = libc::syscall(libc::SYS_fcntl, low, libc::F_DUPFD_CLOEXEC, HIGH) as c_int;
            libc::syscall(libc::SYS_close, low);
            high
        };
        if fd >= 0 {
            table::own(fd, true);
            self.table = Some(fd);
        }
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
        if seen == self.seen {
            return;
        }
        self.current = None;
        self.mounts = seen.iter().filter_map(|one| self.attach(one)).collect();
        self.seen = seen;
        if !self.mounts.is_empty() {
            self.group = Some(group);
        }
    }

    fn attach(&self, seen: &Seen) -> Option<Arc<Mount>> {
        let same =
            |one: &&Arc<Mount>| one.device == seen.device && one.point.as_bytes() == seen.point;
        if let Some(known) = self.mounts.iter().find(same) {
            return Some(known.clone());
        }
        let point = CString::new(seen.point.clone()).ok()?;
        let client = import::client_at(socket_of(&point)?)?;
        let root = Arc::new(client.root());
        // The server may not want to, or not understand.
        let attr = client.stat_at(&root, &Names::default(), false).ok()?;
        let st = stat(libc::AT_FDCWD, &point, 0)?;
        (st.st_dev == seen.device && st.st_ino == attr.ino).then(|| {
            Arc::new(Mount {
                point,
                device: seen.device,
                client,
                root,
            })
        })
    }

    fn of_path(&self, path: &[u8]) -> Option<(Base, Names)> {
        self.mounts.iter().find_map(|mount| {
            let names = match below(mount.point.as_bytes(), path)? {
                b"" => Names::default(),
                rest => Names::parse(rest)?,
            };
            let base = Base {
                mount: mount.clone(),
                place: mount.root.clone(),
            };
            Some((base, names))
        })
    }

    /// The directory that a link of /proc leads to, if the kernel and the server agree about it.
    fn behind(&self, link: &str, st: &libc::stat) -> Option<Base> {
        if st.st_mode & libc::S_IFMT != libc::S_IFDIR
            || self.mounts.iter().all(|mount| mount.device != st.st_dev)
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
        })
    }

    fn current(&mut self) -> Option<Base> {
        if self.current.is_none() {
            let found =
                stat(libc::AT_FDCWD, c".", 0).and_then(|st| self.behind("/proc/self/cwd", &st));
            self.current = Some(found);
        }
        self.current.clone().flatten()
    }
}

/// Where a path leads, if that is simple.
fn locate(state: &mut State, dir: c_int, path: &[u8]) -> Option<(Base, Names)> {
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
pub(crate) struct Given {
    pub(crate) dir: c_int,
    pub(crate) path: *const c_char,
}

impl Given {
    /// # Safety
    /// `path` is a string, or what the kernel refuses.
    unsafe fn bytes(&self) -> Option<&[u8]> {
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
    if !on() || !import::READY.load(Ordering::Relaxed) {
        return None;
    }
    let work = || {
        // SAFETY: the caller's duty.
        let (base, names) = unsafe { given.locate() }?;
        let done = said(call(&base, &names));
        if done.is_some() {
            crate::report::served(0, 0);
        }
        done
    };
    aside(work).flatten()
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
pub(crate) unsafe fn look(given: Given, follow: bool) -> Option<Result<Attributes, c_int>> {
    // SAFETY: the caller's duty.
    unsafe {
        with(given, |base, names| {
            let mount = &base.mount;
            let attr = mount.client.stat_at(&base.place, names, follow)?;
            let number = attr.ino;
            Ok((attr, (mount.device, number)))
        })
    }
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
    // SAFETY: no arguments.
    let root = unsafe { libc::geteuid() } == 0;
    if mode & !(libc::R_OK | libc::W_OK | libc::X_OK) != 0 || (mode != libc::F_OK && !root) {
        return None;
    }
    // SAFETY: the caller's duty.
    unsafe {
        with(given, |base, names| {
            let attr = base.mount.client.stat_at(&base.place, names, follow)?;
            let directory = attr.mode & libc::S_IFMT == libc::S_IFDIR;
            // The host may know better: immutable files, for one.
            let refused = mode & libc::X_OK != 0 && !directory && attr.mode & 0o111 == 0;
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
/// # Safety
/// As for opendir(3).
pub(crate) unsafe fn directory(path: *const c_char) -> Option<Result<(Directory, c_int), c_int>> {
    let given = Given {
        dir: libc::AT_FDCWD,
        path,
    };
    // SAFETY: the caller's duty.
    unsafe {
        with(given, |base, names| {
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
    let never = libc::O_PATH
        | libc::O_TMPFILE
        | libc::O_DIRECTORY
        | libc::O_DIRECT
        | libc::O_APPEND
        | libc::O_NOATIME
        | libc::O_ASYNC;
    match flags & libc::O_ACCMODE {
        libc::O_RDONLY => flags & (never | libc::O_TRUNC) == 0,
        libc::O_WRONLY | libc::O_RDWR => flags & never == 0 && !import::limited(),
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
    // SAFETY: no arguments.
    let root = unsafe { libc::geteuid() } == 0;
    let wants = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => 0o400,
        libc::O_WRONLY => 0o200,
        _ => 0o600,
    };
    if flags & libc::O_CREAT != 0 && !root && mode & wants != wants {
        // It can't be opened again, when the kernel needs it.
        return None;
    }
    // SAFETY: the caller's duty.
    unsafe {
        with(given, |base, names| {
            named(names)?;
            let mask = UMASK.load(Ordering::Relaxed);
            let mount = &base.mount;
            let number = Reserved::new(&mount.point, flags)?;
            let file = mount
                .client
                .open_at(&base.place, names, flags, mode, mask)?;
            let kept = libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY | libc::O_TRUNC;
            let opened = Opened {
                inode: (mount.device, file.opened_as().ino),
                file: Held::short(file, mount.point.clone()),
                flags: flags & !(kept | libc::O_CLOEXEC) | O_LARGEFILE,
            };
            let one = Use::new(true).ok_or(io::ErrorKind::OutOfMemory)?;
            *lock(&one.position) = Position::Here(0);
            one.set_opened(opened);
            one.hold(true);
            HELD.fetch_add(1, Ordering::Relaxed);
            crate::report::imported();
            Ok(number.becomes(one))
        })
    }
}

/// A descriptor's number that nobody else gets: one that can do nothing, on the mount, which stays
/// busy with it as with any open file.
struct Reserved(c_int);

impl Reserved {
    fn new(point: &CStr, flags: c_int) -> io::Result<Self> {
        let flags = libc::O_PATH | (flags & libc::O_CLOEXEC);
        // SAFETY: a C string and numbers.
        let fd = unsafe {
            libc::syscall(libc::SYS_openat, libc::AT_FDCWD, point.as_ptr(), flags) as c_int
        };
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
    let work = || match table::look(fd) {
        Known::Described(one) => give(&one),
        _ => Ok(()),
    };
    aside(work).unwrap_or(Ok(()))
}

/// Gives the kernel the descriptors of a description, with its position.
///
/// # Errors
/// As [`solid`].
pub(crate) fn give(one: &Use) -> Result<(), c_int> {
    if !one.is_held() {
        return Ok(());
    }
    let position = lock(&one.position);
    let Some(opened) = one.opened().filter(|_| one.is_held()) else {
        return Ok(());
    };
    let _calm = Calm::new();
    let (short, point) = opened.file.held().ok_or(libc::EIO)?;
    let code = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    let name = short.name_at_mount().map_err(code)?;
    let path = [point.to_bytes(), b"/", name.as_bytes()].concat();
    let path = CString::new(path).map_err(|_| libc::EIO)?;
    let flags = opened.flags | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: a C string and numbers.
    let real =
        unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags) as c_int };
    if real < 0 {
        return Err(code(io::Error::last_os_error()));
    }
    if let Position::Here(at) = *position {
        // SAFETY: no pointers.
        unsafe { libc::syscall(libc::SYS_lseek, real, at as i64, libc::SEEK_SET) };
    }
    for fd in table::all().filter(|fd| table::is(*fd, one)) {
        // SAFETY: no pointers; the number is this description's.
        unsafe {
            let kept = libc::syscall(libc::SYS_fcntl, fd, libc::F_GETFD) as c_int;
            let kept = match kept & libc::FD_CLOEXEC {
                0 => 0,
                _ => libc::O_CLOEXEC,
            };
            libc::syscall(libc::SYS_dup3, real, fd, kept);
        }
    }
    // SAFETY: opened above.
    unsafe { libc::syscall(libc::SYS_close, real) };
    one.hold(false);
    let_go();
    Ok(())
}

/// Keeps other threads from holding this module's lock, for a fork.
pub(crate) fn pause() -> Pause {
    Pause(lock(&STATE))
}

/// While it lives, no path is looked at.
pub(crate) struct Pause(MutexGuard<'static, Option<State>>);

impl Pause {
    /// In the child: places and sessions are the parent's.
    pub(crate) fn child(mut self) {
        if let Some(state) = self.0.take() {
            if let Some(fd) = state.table {
                table::own(fd, false);
                // SAFETY: this library's own.
                unsafe { libc::syscall(libc::SYS_close, fd) };
            }
            std::mem::forget(state);
        }
        HELD.store(0, Ordering::Relaxed);
        crate::dirs::forget();
        identity_changes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str =
        "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\nUmask:\t0022\n";

    #[test]
    fn who_may_do_all_is_served() {
        assert!(entitled(
            ROOT,
            "rw,user_id=0,default_permissions,allow_other"
        ));
        assert!(!entitled(&ROOT.replace("ff\n", "fd\n"), "rw,user_id=0"));
        assert!(!entitled(&ROOT.replace("\t0\n", "\t5\n"), "rw,user_id=0"));
        let user = "Uid:\t7\t7\t7\t7\nGid:\t7\t7\t7\t7\nCapEff:\t0\n";
        assert!(entitled(user, "rw,user_id=7,group_id=7"));
        assert!(!entitled(user, "rw,user_id=8,group_id=7"));
        assert!(!entitled(user, "rw,user_id=7,default_permissions"));
        assert!(!entitled("", "rw,user_id=0"));
    }

    #[test]
    fn mounts_alone_at_their_place_are_served() {
        let line = |at: &str, kind: &str| {
            format!("30 1 0:50 / {at} rw,nosuid shared:1 - {kind} /src rw,user_id=0\n")
        };
        let one = line("/mnt/a\\040b", "fuse.uvfs");
        let seen = |text: &str| served_mounts(text, ROOT);
        let found = seen(&(line("/", "ext4") + &one));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].point, b"/mnt/a b");
        assert_eq!(found[0].device, libc::makedev(0, 50));
        assert!(seen(&(one.clone() + &line("/mnt/a\\040b/c", "tmpfs"))).is_empty());
        assert!(seen(&(one.clone() + &line("/mnt/a\\040b", "tmpfs"))).is_empty());
        assert_eq!(seen(&(one + &line("/mnt/a\\040bc", "tmpfs"))).len(), 1);
        assert!(seen(&line("/m", "fuse.other")).is_empty());
        assert!(seen(&line("/m", "fuse.uvfs").replace(" rw,nosuid", " ro")).is_empty());
    }

    #[test]
    fn a_path_is_below_or_not() {
        assert_eq!(below(b"/mnt", b"/mnt"), Some(&b""[..]));
        assert_eq!(below(b"/mnt", b"/mnt/a"), Some(&b"a"[..]));
        assert_eq!(below(b"/mnt", b"/mnta"), None);
        assert_eq!(below(b"/mnt", b"/mn"), None);
    }
}
