//! The lines that `--report` prints at exit.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use crate::import;
use crate::real::is_set;
use crate::table;

static ON: AtomicBool = AtomicBool::new(false);
static DONE: AtomicBool = AtomicBool::new(false);
/// Where it goes: a duplicate of standard error, which programs close before they end.
static TO: AtomicI32 = AtomicI32::new(2);
static SERVED: AtomicU64 = AtomicU64::new(0);
static PASSED: AtomicU64 = AtomicU64::new(0);
static FILES: AtomicU64 = AtomicU64::new(0);
static READ: AtomicU64 = AtomicU64::new(0);
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// A line on standard error, whole, without allocation on the C library's side.
pub(crate) fn say(line: std::fmt::Arguments<'_>) {
    let mut text = String::new();
    let _ = writeln!(text, "{line}");
    let to = TO.load(Ordering::Relaxed);
    // SAFETY: the text is as long as it says.
    unsafe { libc::syscall(libc::SYS_write, to, text.as_ptr(), text.len()) };
}

/// Reads the environment.
pub(crate) fn begin() {
    if !is_set(c"UVFS_RUN_REPORT") {
        return;
    }
    // SAFETY: no pointers.
    let high = unsafe { libc::syscall(libc::SYS_fcntl, 2, libc::F_DUPFD_CLOEXEC, 500) };
    if let Ok(fd) = i32::try_from(high)
        && fd >= 0
    {
        TO.store(fd, Ordering::Relaxed);
        table::own(fd, true);
    }
    ON.store(true, Ordering::Relaxed);
}

/// In a child: it counts for itself.
pub(crate) fn forget() {
    for counter in [&SERVED, &PASSED, &FILES, &READ, &WRITTEN] {
        counter.store(0, Ordering::Relaxed);
    }
    let to = TO.load(Ordering::Relaxed);
    if to != 2 {
        table::own(to, true);
    }
}

pub(crate) fn imported() {
    FILES.fetch_add(1, Ordering::Relaxed);
}

/// A call went to the kernel.
#[inline]
pub(crate) fn passed() {
    if ON.load(Ordering::Relaxed) {
        PASSED.fetch_add(1, Ordering::Relaxed);
    }
}

/// A call was served, with so many bytes read and written.
pub(crate) fn served(read: usize, written: usize) {
    if ON.load(Ordering::Relaxed) {
        SERVED.fetch_add(1, Ordering::Relaxed);
        READ.fetch_add(read as u64, Ordering::Relaxed);
        WRITTEN.fetch_add(written as u64, Ordering::Relaxed);
    }
}

/// Prints, once, if this process used a mount.
pub(crate) fn end() {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    if !ON.load(Ordering::Relaxed) || DONE.swap(true, Ordering::Relaxed) || get(&FILES) == 0 {
        return;
    }
    let (mut hits, mut requests, mut waited) = (0, 0, 0);
    for stats in import::stats() {
        hits += stats.hits;
        waited += stats.waited_ns;
        requests += stats.read_requests + stats.direct_requests + stats.writeback_requests;
    }
    let name = std::env::current_exe().unwrap_or_default();
    let name = name.file_name().unwrap_or_default().to_string_lossy();
    say(format_args!(
        "uvfs run: {name} (pid {}): {} files, {} calls served, {} passed on, {hits} cache hits, \
         {requests} requests, {} bytes read, {} written, {:?} waited",
        std::process::id(),
        get(&FILES),
        get(&SERVED),
        get(&PASSED),
        get(&READ),
        get(&WRITTEN),
        Duration::from_nanos(waited),
    ));
}
