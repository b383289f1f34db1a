//! When a file moves from the kernel to this library: once it has shown that this pays.
//!
//! The kernel's path costs nothing to enter, and every process shares its page cache. Attaching to a
//! server takes a process about 13 ms, and importing a file about 0.1 ms. So a program's calls go to
//! the kernel at first, and are counted for each descriptor:
//!
//! - *Writes.* Each write(2) to a mount is a request to its server; a served one is a copy. The
//!   difference is about 6.5 µs a call, and 0.2 ms for each MiB. It is the unit of a score, and a
//!   descriptor is imported once its score has paid for that. A sync takes the score back, as what
//!   is synced after a few writes gains nothing from a cache.
//! - *Buffered reads.* The kernel has the pages as well, so only a program that reads the same bytes
//!   over and over gains: one that has read a file's whole size twice, in many calls.
//! - *Direct reads.* They are requests as well. Files whose direct I/O the kernel does without the
//!   server refuse to be imported.
//!
//! The first import of a process attaches it. A process pays for that from the score that its descriptors
//! reach beyond their own import, within a few seconds. So a daemon that logs a line now and then never
//! attaches, and neither does a program that writes many small files. `uvfs run --eager`
//! (`UVFS_RUN_EAGER`) imports every file at its first call.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use uvfs_client::Config;

use crate::next;
use crate::passing::Calls;
use crate::real::{is_set, seconds};
use crate::table::{self, Known, Use};
use crate::traffic::of;

/// The score of one descriptor that pays for its import.
const IMPORT: u64 = 16;
/// The score that pays for attaching a process: what its descriptors have beyond [`IMPORT`].
const ATTACH: u64 = 2_000;
/// Seconds within which a process has to reach that score.
const WINDOW: u64 = 3;
/// Bytes that count as one more call.
const BYTES: u64 = 32 << 10;
/// Direct reads of one descriptor that pay for all.
const DIRECT_READS: u32 = 1 << 10;
/// Buffered reads of one descriptor before it is looked at whether they repeat themselves.
const REPEATED_READS: u32 = 1 << 14;

/// The state of this module.
struct Scores {
    /// The score of all descriptors beyond [`IMPORT`], since `began`.
    written: AtomicU64,
    /// When the first of that was counted, in seconds of the monotonic clock.
    began: AtomicU64,
    eager: AtomicBool,
}

static STATE: Scores = Scores {
    written: AtomicU64::new(0),
    began: AtomicU64::new(0),
    eager: AtomicBool::new(false),
};

/// The bytes that a call moves, and the direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moves {
    Read(usize),
    Write(usize),
}

/// Reads the environment.
pub(crate) fn begin() {
    STATE
        .eager
        .store(is_set(c"UVFS_RUN_EAGER"), Ordering::Relaxed);
}

/// Whether the process has reached its score within [`WINDOW`]. If not, the count begins anew.
fn is_fast(now: u64) -> bool {
    let fast = now.saturating_sub(STATE.began.load(Ordering::Relaxed)) <= WINDOW;
    if !fast {
        STATE.began.store(now, Ordering::Relaxed);
        STATE.written.store(0, Ordering::Relaxed);
    }
    fast
}

/// Whether everything is served from its first call on.
fn is_eager() -> bool {
    STATE.eager.load(Ordering::Relaxed)
}

/// Whether a file that is opened with these flags may come to be imported while the kernel's position is
/// known: reads alone pay late, if ever.
pub(crate) fn is_likely(flags: c_int) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_DIRECT != 0 || is_eager()
}

/// In a child process, which has to pay for a session of its own.
pub(crate) fn child() {
    STATE.written.store(0, Ordering::Relaxed);
}

/// Counts a call of a descriptor that is not imported, and says whether [`pays`] is worth asking.
/// `attached` says whether the process has a session already.
///
/// Every call to the kernel comes by here: no locks, no system calls.
#[inline]
pub(crate) fn count(fd: c_int, moves: Moves, attached: impl FnOnce() -> bool) -> bool {
    if is_eager() {
        return true;
    }
    let Some(traffic) = of(fd) else { return false };
    match moves {
        Moves::Write(bytes) => {
            let score = 1 + bytes as u64 / BYTES;
            let one = traffic.written.fetch_add(score, Ordering::Relaxed) + score;
            if one <= IMPORT {
                return false;
            }
            let gain = score.min(one - IMPORT);
            let before = STATE.written.fetch_add(gain, Ordering::Relaxed);
            if before == 0 {
                STATE.began.store(seconds(), Ordering::Relaxed);
            }
            before + gain >= ATTACH || attached()
        }
        Moves::Read(bytes) => {
            traffic.read.fetch_add(bytes as u64, Ordering::Relaxed);
            let reads = traffic.reads.fetch_add(1, Ordering::Relaxed) + 1;
            // Ever more rarely, as looking takes system calls.
            reads >= DIRECT_READS && reads.is_power_of_two()
        }
    }
}

/// Whether a descriptor should be imported, once [`count`] says that it may be worth it.
pub(crate) fn pays(fd: c_int, moves: Moves, attached: impl FnOnce() -> bool) -> bool {
    if is_eager() {
        return true;
    }
    if let Moves::Write(_) = moves {
        return attached() || is_fast(seconds());
    }
    let Some(traffic) = of(fd) else { return false };
    let reads = traffic.reads.load(Ordering::Relaxed);
    let read = traffic.read.load(Ordering::Relaxed);
    reads >= REPEATED_READS && repeats(fd, read) || is_direct(fd)
}

/// Bytes of shared memory of each session.
pub(crate) fn memory() -> usize {
    let memory = std::env::var("UVFS_RUN_CACHE").ok();
    let memory = memory.and_then(|bytes| bytes.parse().ok());
    memory.unwrap_or(Config::MEMORY)
}

/// Whether a descriptor's reads have gone over its file twice.
fn repeats(fd: c_int, read: u64) -> bool {
    crate::real::size_of(fd).is_some_and(|size| {
        let fits = size <= memory() / 2;
        fits && read >= 2 * size as u64
    })
}

fn is_direct(fd: c_int) -> bool {
    next::status_flags(fd).is_some_and(|flags| flags & libc::O_DIRECT != 0)
}

/// A descriptor's writes were synced: what came before needed no cache.
pub(crate) fn synced(fd: c_int) {
    if let Some(traffic) = of(fd)
        && traffic.written.load(Ordering::Relaxed) != 0
    {
        traffic.written.store(0, Ordering::Relaxed);
    }
}

/// A call that uses the position that the kernel has. It begins before the descriptor is looked at,
/// so an import either sees it or comes first ([`others_pass`]).
pub(crate) enum Passing {
    /// Of a descriptor without a description.
    Number(&'static Calls),
    /// Of a description that several descriptors may share.
    Shared(Use),
}

impl Passing {
    /// Nothing for a descriptor that is not going to be imported.
    #[inline]
    pub(crate) fn begin(fd: c_int) -> Option<Self> {
        if table::is_foreign(fd) || table::is_imported(fd) {
            return None;
        }
        if let Known::Described(one) = table::look(fd) {
            one.passing.begin();
            return Some(Self::Shared(one));
        }
        let passing = &of(fd)?.passing;
        passing.begin();
        Some(Self::Number(passing))
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        match self {
            Self::Number(passing) => passing.end(),
            Self::Shared(one) => one.passing.end(),
        }
    }
}

/// Whether calls other than the caller's use the kernel's position of a descriptor, or of the
/// description that it has, at this moment.
pub(crate) fn others_pass(fd: c_int, one: &Use, own: bool) -> bool {
    let number = of(fd).map_or(0, |traffic| traffic.passing.under_way());
    number + one.passing.under_way() > u32::from(own)
}

/// Whether a call uses the kernel's position of a descriptor that has no description.
pub(crate) fn passes(fd: c_int) -> bool {
    of(fd).is_some_and(|traffic| traffic.passing.under_way() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that no test opens.
    const WRITER: c_int = 60_001;
    const SYNCER: c_int = 60_002;
    const SECOND: c_int = 60_003;
    const SMALL: c_int = 60_005;

    /// `uvfs run` attaches no short-lived programs, which it would only make slower.
    #[test]
    fn a_descriptor_pays_once_it_has_written_enough() {
        let not = || false;
        // Small files cost their imports, and gain nothing.
        for _ in 0..ATTACH {
            let calls = (0..IMPORT).map(|_| count(SMALL, Moves::Write(100), not));
            assert_eq!(calls.filter(|pays| *pays).count(), 0);
            crate::traffic::forget(SMALL);
        }
        let calls = (1..).take_while(|_| !count(WRITER, Moves::Write(100), not));
        assert_eq!(calls.count() as u64, IMPORT + ATTACH - 1);
        // The process has paid for attaching: the next descriptor pays for itself alone.
        let calls = (1..).take_while(|_| !count(SECOND, Moves::Write(100), not));
        assert_eq!(calls.count() as u64, IMPORT);
        for _ in 0..100 {
            assert!(!count(SYNCER, Moves::Write(100), || true));
            synced(SYNCER);
        }
        assert!(count(SYNCER, Moves::Write(1 << 20), || true), "a large one");
        crate::traffic::forget(SYNCER);
        assert!(!count(SYNCER, Moves::Write(100), || true), "another file");
        // A slow writer begins anew.
        let began = STATE.began.load(Ordering::Relaxed);
        assert!(is_fast(began + WINDOW));
        assert!(!is_fast(began + WINDOW + 1));
        assert!(is_fast(began + WINDOW + 1));
        assert_eq!(STATE.written.load(Ordering::Relaxed), 0);
    }

    /// No file is imported while another thread's call moves its position.
    #[test]
    fn a_call_under_way_is_seen() {
        let fd = 60_004;
        let one = Use::new(true).unwrap();
        table::opened(fd);
        let own = Passing::begin(fd);
        assert!(!others_pass(fd, &one, true));
        assert!(others_pass(fd, &one, false));
        let other = Passing::begin(fd);
        assert!(others_pass(fd, &one, true) && passes(fd));
        drop(other);
        let Known::Undecided(word, true) = table::look(fd) else {
            panic!("opened here");
        };
        assert!(table::decide(fd, word, Some(one.again())));
        let shared = Passing::begin(fd);
        assert!(others_pass(fd, &one, true));
        drop(own);
        assert!(!others_pass(fd, &one, true));
        drop(shared);
        assert!(!others_pass(fd, &one, false));
        table::foreign(fd);
    }
}
