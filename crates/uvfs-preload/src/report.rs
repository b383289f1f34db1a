//! The lines that `--report` prints at exit.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use uvfs_client::Stats;

use crate::real::is_set;
use crate::table;

/// The state of this module.
pub(crate) struct Counts {
    on: AtomicBool,
    done: AtomicBool,
    /// Where it goes: a duplicate of standard error, which programs close before they end.
    to: AtomicI32,
    served: AtomicU64,
    passed: AtomicU64,
    files: AtomicU64,
    read: AtomicU64,
    written: AtomicU64,
}

impl Counts {
    pub(crate) const fn new() -> Self {
        Self {
            on: AtomicBool::new(false),
            done: AtomicBool::new(false),
            to: AtomicI32::new(2),
            served: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            files: AtomicU64::new(0),
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
        }
    }
}

fn shared() -> &'static Counts {
    &crate::STATE.report
}

/// A line on standard error, whole, without allocation on the C library's side.
pub(crate) fn say(line: std::fmt::Arguments<'_>) {
    let mut text = String::new();
    let _ = writeln!(text, "{line}");
    let to = shared().to.load(Ordering::Relaxed);
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
        shared().to.store(fd, Ordering::Relaxed);
        table::own(fd, true);
    }
    shared().on.store(true, Ordering::Relaxed);
}

/// In a child: it counts for itself.
pub(crate) fn forget() {
    for counter in [
        &shared().served,
        &shared().passed,
        &shared().files,
        &shared().read,
        &shared().written,
    ] {
        counter.store(0, Ordering::Relaxed);
    }
    let to = shared().to.load(Ordering::Relaxed);
    if to != 2 {
        table::own(to, true);
    }
}

pub(crate) fn imported() {
    shared().files.fetch_add(1, Ordering::Relaxed);
}

/// A call went to the kernel.
#[inline]
pub(crate) fn passed() {
    if shared().on.load(Ordering::Relaxed) {
        shared().passed.fetch_add(1, Ordering::Relaxed);
    }
}

/// A call was served, with so many bytes read and written.
pub(crate) fn served(read: usize, written: usize) {
    if shared().on.load(Ordering::Relaxed) {
        shared().served.fetch_add(1, Ordering::Relaxed);
        shared().read.fetch_add(read as u64, Ordering::Relaxed);
        shared()
            .written
            .fetch_add(written as u64, Ordering::Relaxed);
    }
}

/// Prints, once, if this process used a mount; `stats` gives the statistics of its caches.
pub(crate) fn end(stats: impl FnOnce() -> Vec<Stats>) {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    if !shared().on.load(Ordering::Relaxed)
        || shared().done.swap(true, Ordering::Relaxed)
        || get(&shared().files) == 0
    {
        return;
    }
    let (mut hits, mut requests, mut waited) = (0, 0, 0);
    for stats in stats() {
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
        get(&shared().files),
        get(&shared().served),
        get(&shared().passed),
        get(&shared().read),
        get(&shared().written),
        Duration::from_nanos(waited),
    ));
}
