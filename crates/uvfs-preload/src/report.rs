//! The lines that `--report` prints at exit.

use std::ffi::c_int;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use uvfs_client::Stats;

use crate::real::{is_set, stat};
use crate::table;

/// Why the kernel serves a file of a mount.
#[derive(Clone, Copy)]
pub(crate) enum Why {
    /// The server refused, because the kernel reads and writes the file by itself.
    Backed,
    /// It is mapped shared and writable, and the kernel can't tell when a store changes it.
    Mapped,
    /// The process has a limit on the size of files.
    Limited,
    /// Another thread was in a call that uses its position.
    Position,
    /// The process has no session with the server.
    NoSession,
    /// The program switched O_APPEND or O_DIRECT.
    Changed,
    /// A call that did not come by the C library used it.
    Around,
    /// Not all calls of the process can be seen.
    Unseen,
}

impl Why {
    const ALL: [(Self, &str); 8] = [
        (Self::Backed, "with a backing file"),
        (Self::Mapped, "mapped shared and writable"),
        (Self::Limited, "under a limit on file size"),
        (Self::Position, "in use by another thread"),
        (Self::NoSession, "without a session"),
        (Self::Changed, "with changed flags"),
        (Self::Around, "used around the C library"),
        (Self::Unseen, "in a process that falls back to the kernel"),
    ];
}

/// The state of this module.
struct Counts {
    on: AtomicBool,
    done: AtomicBool,
    /// Where it goes: a duplicate of standard error, which programs close before they end.
    to: AtomicI32,
    /// The file that is there.
    inode: AtomicU64,
    served: AtomicU64,
    passed: AtomicU64,
    files: AtomicU64,
    read: AtomicU64,
    written: AtomicU64,
    /// Files of mounts that the process opened.
    opened: AtomicU64,
    /// Files that could not be imported, by [`Why`].
    refused: [AtomicU64; Why::ALL.len()],
    /// Files that were imported and went back to the kernel, by [`Why`].
    returned: [AtomicU64; Why::ALL.len()],
}

impl Counts {
    pub(crate) const fn new() -> Self {
        Self {
            on: AtomicBool::new(false),
            done: AtomicBool::new(false),
            to: AtomicI32::new(2),
            inode: AtomicU64::new(0),
            served: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            files: AtomicU64::new(0),
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            refused: [const { AtomicU64::new(0) }; Why::ALL.len()],
            returned: [const { AtomicU64::new(0) }; Why::ALL.len()],
        }
    }
}

static STATE: Counts = Counts::new();

/// A line on standard error, whole, without allocation on the C library's side.
pub(crate) fn say(line: std::fmt::Arguments<'_>) {
    let mut text = String::new();
    let _ = writeln!(text, "{line}");
    let to = STATE.to.load(Ordering::Relaxed);
    // The program may have put another file there, around the C library.
    if is_on() && stat(to).map(|st| st.st_ino) != Some(get(&STATE.inode)) {
        return;
    }
    // SAFETY: the text is as long as it says.
    unsafe { crate::real::syscall()(libc::SYS_write, to, text.as_ptr(), text.len()) };
}

/// Reads the environment.
pub(crate) fn begin() {
    if !is_set(c"UVFS_RUN_REPORT") {
        return;
    }
    // SAFETY: no pointers.
    let high = unsafe { crate::real::syscall()(libc::SYS_fcntl, 2, libc::F_DUPFD_CLOEXEC, 500) };
    if let Ok(fd) = i32::try_from(high)
        && fd >= 0
    {
        STATE.to.store(fd, Ordering::Relaxed);
        table::own(fd, true);
    }
    let inode = stat(2).map_or(0, |st| st.st_ino);
    STATE.inode.store(inode, Ordering::Relaxed);
    STATE.on.store(true, Ordering::Relaxed);
}

/// In a child: it counts for itself.
pub(crate) fn forget() {
    let one = &STATE;
    let whole = [
        &one.served,
        &one.passed,
        &one.files,
        &one.read,
        &one.written,
        &one.opened,
    ];
    for counter in whole.into_iter().chain(&one.refused).chain(&one.returned) {
        counter.store(0, Ordering::Relaxed);
    }
    let to = STATE.to.load(Ordering::Relaxed);
    if to != 2 {
        table::own(to, true);
    }
}

/// The program takes the descriptor that the report was to go to.
pub(crate) fn taken(fd: c_int) {
    let order = Ordering::Relaxed;
    let _ = STATE.to.compare_exchange(fd, 2, order, order);
}

pub(crate) fn imported() {
    STATE.files.fetch_add(1, Ordering::Relaxed);
}

/// A call went to the kernel.
#[inline]
pub(crate) fn passed() {
    if is_on() {
        STATE.passed.fetch_add(1, Ordering::Relaxed);
    }
}

/// A call was served, with so many bytes read and written.
pub(crate) fn served(read: usize, written: usize) {
    if is_on() {
        STATE.served.fetch_add(1, Ordering::Relaxed);
        STATE.read.fetch_add(read as u64, Ordering::Relaxed);
        STATE.written.fetch_add(written as u64, Ordering::Relaxed);
    }
}

/// Whether there is a report.
#[inline]
pub(crate) fn is_on() -> bool {
    STATE.on.load(Ordering::Relaxed)
}

/// The program opened a file of a mount.
pub(crate) fn opened() {
    STATE.opened.fetch_add(1, Ordering::Relaxed);
}

/// A file of a mount was not imported.
pub(crate) fn refused(why: Why) {
    STATE.refused[why as usize].fetch_add(1, Ordering::Relaxed);
}

/// A file was imported, and went back to the kernel.
pub(crate) fn returned(why: Why) {
    STATE.returned[why as usize].fetch_add(1, Ordering::Relaxed);
}

/// Prints, once, if this process used a mount; `stats` gives the statistics of its caches, and `reason` says why
/// nothing is served any more.
pub(crate) fn end(stats: impl FnOnce() -> Vec<Stats>, reason: impl FnOnce() -> Option<String>) {
    if !is_on() || STATE.done.swap(true, Ordering::Relaxed) {
        return;
    }
    let name = std::env::current_exe().unwrap_or_default();
    let name = name.file_name().unwrap_or_default().to_string_lossy();
    let name = format!("{name} (pid {})", std::process::id());
    if get(&STATE.files) > 0 {
        say_served(&name, &stats());
    }
    if let Some(left) = left_to_kernel(&STATE) {
        say(format_args!("uvfs run: {name}: {left}"));
        if let Some(reason) = reason() {
            say(format_args!(
                "uvfs run: {name}: falls back to the kernel: {reason}"
            ));
        }
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn say_served(name: &str, stats: &[Stats]) {
    let (mut hits, mut requests, mut waited) = (0, 0, 0);
    for stats in stats {
        hits += stats.hits;
        waited += stats.waited_ns;
        requests += stats.read_requests + stats.direct_requests + stats.writeback_requests;
    }
    say(format_args!(
        "uvfs run: {name}: {} files, {} calls served, {} passed on, {hits} cache hits, \
         {requests} requests, {} bytes read, {} written, {:?} waited",
        get(&STATE.files),
        get(&STATE.served),
        get(&STATE.passed),
        get(&STATE.read),
        get(&STATE.written),
        Duration::from_nanos(waited),
    ));
}

/// How many files the kernel served, and why; nothing if there were none.
fn left_to_kernel(counts: &Counts) -> Option<String> {
    let sum = |each: &[AtomicU64]| each.iter().map(get).sum::<u64>();
    let (refused, returned) = (sum(&counts.refused), sum(&counts.returned));
    // A process also imports and refuses descriptors that it inherited.
    let unused = get(&counts.opened).saturating_sub(get(&counts.files) + refused);
    let all = unused + refused + returned;
    if all == 0 {
        return None;
    }
    let mut text = format!("{all} files left to the kernel:");
    let mut add = |n: u64, why: &str, when: &str| {
        if n > 0 {
            let comma = if text.ends_with(':') { "" } else { "," };
            let _ = write!(text, "{comma} {n} {why}{when}");
        }
    };
    add(unused, "used too little to gain", "");
    for (why, words) in Why::ALL {
        add(get(&counts.refused[why as usize]), words, "");
        add(get(&counts.returned[why as usize]), words, " later");
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `--report` names the reason that was counted, and counts a file once.
    #[test]
    fn each_file_has_one_reason() {
        let counts = Counts::new();
        assert_eq!(left_to_kernel(&counts), None);
        for (index, (why, _)) in Why::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, index);
        }
        counts.opened.store(9, Ordering::Relaxed);
        counts.files.store(2, Ordering::Relaxed);
        counts.refused[Why::Backed as usize].store(3, Ordering::Relaxed);
        counts.returned[Why::Mapped as usize].store(1, Ordering::Relaxed);
        let text = left_to_kernel(&counts).unwrap();
        assert_eq!(
            text,
            "8 files left to the kernel: 4 used too little to gain, 3 with a backing file, \
             1 mapped shared and writable later"
        );
    }
}
