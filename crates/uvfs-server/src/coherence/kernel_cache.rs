//! Tracks which names and attributes the kernel of a mount was ever given, so that a change of
//! anything else costs no notification.
//!
//! The kernel may keep a name, or a file's attributes, for as long as it likes. So every answer with
//! a lifetime is noted here, by a hash of what it was about. The table is only ever too careful:
//! things whose hashes meet share a place. A change looks here after it was made; if nothing is
//! noted, there is nothing to invalidate.
//!
//! An answer may overlap with a change. Then either the change sees what the answer noted, and tells
//! the kernel; or the answer, which looks for changes once it is noted, sees the change, and gives no
//! lifetime. Both write first and then read, in an order that all agree on (SeqCst).
//!
//! The kernel may take an answer in after it was told of a change that came later: it wakes the thread
//! that asked, and that thread fills the cache. It holds the directory's lock where it looks up a
//! new name, and discards old attributes of an inode that it knew; but not where it looks up again a
//! name that expired, or gets to know an inode, or where attributes come with the answer to a change.
//! So the table also has when each place was noted last: of what was given just before a change,
//! the kernel is told several times (`host.rs`).
//!
//! FUSE_NOTIFY_INC_EPOCH, which makes all that is cached stale at once, is only for the case that
//! changes of the host were lost: a stale name is dropped rather than looked up again, and with it,
//! seen with Linux 6.18, what is mounted below it; and files that are open there lose their path in
//! /proc.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use foldhash::quality::FixedState;
use rustix::time::{ClockId, clock_gettime};

use uvfs_sys::lock;

/// Times that are kept: 1 MiB of them.
const TIMES: usize = 1 << 17;
/// Changes that are told apart.
const CHANGES: usize = 1 << 12;
/// How long the kernel may take until it has an answer in its caches. It does so as soon as the
/// thread that asked runs.
pub(super) const UNDER_WAY: Duration = Duration::from_secs(5);
/// An item that the kernel had to drop is given no lifetime for so long after its last change: a client that
/// changes it once is likely to do so again.
const CONTENDED: Duration = Duration::from_secs(1);
const SHARDS: usize = 16;
/// Keys of a shard that are remembered as told; more are only there when clients change very many
/// things that the kernel uses.
const MOST_TOLD: usize = 1024;

/// A name in a directory, or a node's attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(u64);

impl Key {
    pub(crate) fn name(parent: u64, name: &[u8]) -> Self {
        let mut hasher = FixedState::default().build_hasher();
        (parent, b'/').hash(&mut hasher);
        hasher.write(name);
        Self(hasher.finish())
    }

    pub(crate) fn attributes(node: u64) -> Self {
        Self(FixedState::default().hash_one(node))
    }

    fn times(self) -> [usize; 2] {
        [self.0, self.0 >> 32].map(|half| half as usize % TIMES)
    }

    fn change(self) -> usize {
        (self.0 >> 20) as usize % CHANGES
    }
}

/// The table's entry of a key: for each of its two places the time at which the kernel was given it
/// last, in the upper half, and how often that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version([u64; 2]);

impl Version {
    /// Whether the key can't have been given between this and `other`.
    fn is_not_given_until(self, other: Self) -> bool {
        self.0[0] == other.0[0] || self.0[1] == other.0[1]
    }
}

/// Whether the kernel was given something that the host has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    /// It never was.
    Never,
    /// It was, so long ago that the answer is in its caches, if it still is.
    Before,
    /// It was, and the answer may still be under way.
    Lately,
}

struct Told {
    version: Version,
    /// When it was changed last.
    at: Instant,
}

/// Tracks which names and attributes the kernel may still have.
pub(crate) struct KernelCache {
    /// [`coarse`] then.
    began: Duration,
    times: Box<[AtomicU64]>,
    /// The number of the last change of any key that is counted here.
    changes: Box<[AtomicU64]>,
    /// The number of the last change of all.
    last: AtomicU64,
    /// Of keys that were invalidated, what the kernel had been given by then.
    told: [Mutex<HashMap<Key, Told>>; SHARDS],
}

/// The time since the system started, as of the last tick of its clock, which costs less than a finer one.
fn coarse() -> Duration {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32)
}

/// A lifetime in ticks of 16 ms, rounded up.
fn ticks(time: Duration) -> u32 {
    u32::try_from(time.as_millis() / 16 + 1).unwrap_or(u32::MAX)
}

impl Default for KernelCache {
    fn default() -> Self {
        let zeros = |n| (0..n).map(|_| AtomicU64::new(0)).collect();
        Self {
            began: coarse(),
            times: zeros(TIMES),
            changes: zeros(CHANGES),
            last: AtomicU64::new(0),
            told: Default::default(),
        }
    }
}

impl KernelCache {
    fn now(&self) -> u32 {
        ticks(coarse().saturating_sub(self.began))
    }

    fn told(&self, key: Key) -> &Mutex<HashMap<Key, Told>> {
        &self.told[key.0 as usize % SHARDS]
    }

    /// The number of the last change: to be had before what an answer says is read.
    pub(crate) fn last(&self) -> u64 {
        self.last.load(Ordering::SeqCst)
    }

    /// Notes that the kernel is given what `key` stands for, or may come to have it by moving it. How often counts only
    /// where there are clients (`tracks`), of whose changes the kernel is told once.
    pub(crate) fn give(&self, key: Key, tracks: bool) {
        let at = u64::from(self.now());
        for place in key.times() {
            // Times never fall: a change finds this one, as if it had been written now.
            if !tracks && self.times[place].load(Ordering::SeqCst) >> 32 >= at {
                continue;
            }
            let later = |old: u64| {
                // Never 0 again.
                let count = (old as u32).wrapping_add(1).max(1);
                Some(at.max(old >> 32) << 32 | u64::from(count))
            };
            let noted = self.times[place].fetch_update(Ordering::SeqCst, Ordering::SeqCst, later);
            debug_assert!(noted.is_ok(), "there is always something to write");
        }
    }

    /// The kernel may have anything: nothing was noted until now.
    pub(crate) fn assume_all(&self) {
        let now = u64::from(self.now()) << 32 | 1;
        for time in &self.times {
            time.fetch_max(now, Ordering::SeqCst);
        }
    }

    /// Whether `key` was, or may have been, changed after `last` was the last change. To be asked
    /// once it was given.
    pub(crate) fn changed_since(&self, key: Key, last: u64) -> bool {
        self.changes[key.change()].load(Ordering::SeqCst) > last
    }

    /// Whether the kernel had to drop `key` and it was changed again just now.
    pub(crate) fn is_contended(&self, key: Key) -> bool {
        let told = lock(self.told(key));
        told.get(&key)
            .is_some_and(|told| told.at.elapsed() < CONTENDED)
    }

    fn count_change(&self, key: Key) -> Version {
        let number = self.last.fetch_add(1, Ordering::SeqCst) + 1;
        self.changes[key.change()].fetch_max(number, Ordering::SeqCst);
        Version(key.times().map(|at| self.times[at].load(Ordering::SeqCst)))
    }

    /// A client has changed `key`. If the kernel may have it, what [`KernelCache::dropped`] is to be given
    /// after the kernel was told.
    pub(crate) fn change(&self, key: Key) -> Option<Version> {
        let version = self.count_change(key);
        if version.0.contains(&0) {
            return None;
        }
        if let Some(told) = lock(self.told(key)).get_mut(&key) {
            told.at = Instant::now();
            if told.version.is_not_given_until(version) {
                return None;
            }
        }
        Some(version)
    }

    /// The host has changed `key`.
    pub(crate) fn host_change(&self, key: Key) -> Given {
        let version = self.count_change(key);
        let recent = self.now().saturating_sub(ticks(UNDER_WAY));
        if version.0.contains(&0) {
            Given::Never
        } else if version.0.iter().all(|time| time >> 32 >= u64::from(recent)) {
            Given::Lately
        } else {
            Given::Before
        }
    }

    /// The host may have changed anything.
    pub(crate) fn host_changed_all(&self) {
        let number = self.last.fetch_add(1, Ordering::SeqCst) + 1;
        for change in &self.changes {
            change.fetch_max(number, Ordering::SeqCst);
        }
    }

    /// The kernel has dropped what it had of `key`.
    pub(crate) fn dropped(&self, key: Key, version: Version) {
        let mut told = lock(self.told(key));
        if told.len() >= MOST_TOLD && !told.contains_key(&key) {
            told.clear();
        }
        let at = Instant::now();
        told.insert(key, Told { version, at });
    }

    /// Forgets what the kernel was told: no client changes anything behind its back any more.
    pub(crate) fn settle(&self) {
        for told in &self.told {
            lock(told).clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A change of an item that the kernel was given invalidates it there, until the kernel has dropped it.
    #[test]
    fn what_was_given_is_told_once() {
        let given = KernelCache::default();
        let (name, other) = (Key::name(1, b"name"), Key::name(1, b"other"));
        assert_ne!(name, other);
        assert_ne!(name, Key::name(2, b"name"));
        assert_ne!(Key::attributes(1), Key::name(1, b""));
        assert_eq!(given.change(name), None);
        given.give(name, true);
        let version = given.change(name).expect("it was given");
        assert_eq!(given.change(other), None);
        // Until the kernel has dropped it, each change has to.
        assert_eq!(given.change(name), Some(version));
        assert!(!given.is_contended(name));
        given.dropped(name, version);
        assert_eq!(given.change(name), None);
        assert!(given.is_contended(name) && !given.is_contended(other));
        given.give(name, true);
        let again = given.change(name).expect("it was given again");
        assert_ne!(again, version);
        // An item that is given while the kernel drops it is not dropped.
        given.give(name, true);
        given.dropped(name, again);
        assert!(given.change(name).is_some());
        given.settle();
        assert!(given.change(name).is_some());
    }

    /// An answer that began before a change is known to be old.
    #[test]
    fn a_change_shows_in_answers_that_began_before() {
        let given = KernelCache::default();
        let key = Key::attributes(5);
        let before = given.last();
        given.give(key, true);
        assert!(!given.changed_since(key, before));
        given.change(key);
        assert!(given.changed_since(key, before));
        assert!(!given.changed_since(key, given.last()));
    }

    /// A change of the host finds whether, and how long ago, the kernel was given the item.
    #[test]
    fn the_host_changes_what_was_given_lately_or_before() {
        let mut given = KernelCache::default();
        let key = Key::name(3, b"x");
        let before = given.last();
        assert_eq!(given.host_change(key), Given::Never);
        assert!(given.changed_since(key, before));
        given.give(key, true);
        assert_eq!(given.host_change(key), Given::Lately);
        given.began = given.began.saturating_sub(2 * UNDER_WAY);
        assert_eq!(given.host_change(key), Given::Before);
        assert!(given.change(key).is_some());
        let (all, other) = (given.last(), Key::attributes(9));
        assert!(!given.changed_since(other, all));
        given.host_changed_all();
        assert!(given.changed_since(other, all) && given.changed_since(key, all));
    }
}
