//! Tracks which names and attributes the kernel of a mount may still have in its caches, so that a
//! client's change of anything else costs neither of them a notification.
//!
//! The kernel keeps a name, or a file's attributes, for as long as an answer said (their lifetime),
//! and then asks again before it uses them. So every answer with a lifetime is noted here, by a hash
//! of what it was about, until the lifetime and a good while for the kernel to take the answer in have
//! passed. That is a table of times which is only ever too careful: things whose hashes meet share a
//! time. A change looks here after it was made; if nothing is noted, the kernel has nothing to drop.
//!
//! An answer may overlap with a change. Then either the change sees what the answer noted, and tells
//! the kernel, which takes in the answer first; or the answer, which looks for changes once it is
//! noted, sees the change, and gives no lifetime. Both write first and then read, in an order that all
//! agree on (SeqCst).
//!
//! FUSE_NOTIFY_INC_EPOCH, which makes all that is cached stale at once, is no way to this: a stale
//! name is dropped rather than looked up again, and with it, seen with Linux 6.18, what is mounted
//! below it; and files that are open there lose their path in /proc.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use foldhash::quality::FixedState;

use crate::lock;

/// Times that are kept: 1 MiB of them.
const TIMES: usize = 1 << 17;
/// Changes that are told apart.
const CHANGES: usize = 1 << 12;
/// How long the kernel may take until it has an answer in its caches. It does so as soon as the
/// thread that asked runs.
const UNDER_WAY: Duration = Duration::from_secs(30);
/// What the kernel had to drop is given no lifetime for so long after it was changed last: who
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

/// What the table had of a key: of each of its two places the time until which the kernel may have
/// it, in the upper half, and how often that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version([u64; 2]);

impl Version {
    /// Whether the key can't have been given between this and `other`.
    fn is_not_given_until(self, other: Self) -> bool {
        self.0[0] == other.0[0] || self.0[1] == other.0[1]
    }
}

struct Told {
    version: Version,
    /// When it was changed last.
    at: Instant,
}

/// Tracks which names and attributes the kernel may still have.
pub(crate) struct KernelCache {
    began: Instant,
    times: Box<[AtomicU64]>,
    /// The number of the last change of any key that is counted here.
    changes: Box<[AtomicU64]>,
    /// The number of the last change of all.
    last: AtomicU64,
    /// The longest lifetime that was ever given, in ticks.
    longest: AtomicU32,
    /// Of keys that the kernel was told to drop, what it had been given by then.
    told: [Mutex<HashMap<Key, Told>>; SHARDS],
}

/// A lifetime in ticks of 16 ms, rounded up.
fn ticks(time: Duration) -> u32 {
    u32::try_from(time.as_millis() / 16 + 1).unwrap_or(u32::MAX)
}

impl Default for KernelCache {
    fn default() -> Self {
        let zeros = |n| (0..n).map(|_| AtomicU64::new(0)).collect();
        Self {
            began: Instant::now(),
            times: zeros(TIMES),
            changes: zeros(CHANGES),
            last: AtomicU64::new(0),
            longest: AtomicU32::new(0),
            told: Default::default(),
        }
    }
}

impl KernelCache {
    fn now(&self) -> u32 {
        ticks(self.began.elapsed())
    }

    fn told(&self, key: Key) -> &Mutex<HashMap<Key, Told>> {
        &self.told[key.0 as usize % SHARDS]
    }

    /// The number of the last change: to be had before what an answer says is read.
    pub(crate) fn last(&self) -> u64 {
        self.last.load(Ordering::SeqCst)
    }

    /// Notes that the kernel is given what `key` stands for.
    pub(crate) fn give(&self, key: Key, lifetime: Duration) {
        let lifetime = ticks(lifetime);
        if self.longest.load(Ordering::Relaxed) < lifetime {
            self.longest.fetch_max(lifetime, Ordering::SeqCst);
        }
        self.note(key, lifetime);
    }

    /// Notes that the kernel may come to have what `key` stands for by moving it.
    pub(crate) fn moves(&self, key: Key) {
        self.note(key, self.longest.load(Ordering::SeqCst));
    }

    fn note(&self, key: Key, lifetime: u32) {
        let until = self.now().saturating_add(lifetime);
        let until = u64::from(until.saturating_add(ticks(UNDER_WAY)));
        for at in key.times() {
            let later = |old: u64| {
                let count = (old as u32).wrapping_add(1);
                Some(until.max(old >> 32) << 32 | u64::from(count))
            };
            let noted = self.times[at].fetch_update(Ordering::SeqCst, Ordering::SeqCst, later);
            debug_assert!(noted.is_ok(), "there is always something to write");
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

    /// A client has changed `key`. If the kernel may have it, what [`KernelCache::dropped`] is to be given
    /// after the kernel was told.
    pub(crate) fn change(&self, key: Key) -> Option<Version> {
        let number = self.last.fetch_add(1, Ordering::SeqCst) + 1;
        self.changes[key.change()].fetch_max(number, Ordering::SeqCst);
        let version = Version(key.times().map(|at| self.times[at].load(Ordering::SeqCst)));
        let now = u64::from(self.now());
        if version.0.iter().any(|time| time >> 32 < now) {
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

    /// The kernel has dropped what it had of `key`.
    pub(crate) fn dropped(&self, key: Key, version: Version) {
        let mut told = lock(self.told(key));
        if told.len() >= MOST_TOLD && !told.contains_key(&key) {
            told.clear();
        }
        let at = Instant::now();
        told.insert(key, Told { version, at });
    }

    /// Forgets what the kernel was told: nobody changes anything behind its back any more.
    pub(crate) fn settle(&self) {
        for told in &self.told {
            lock(told).clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn what_was_given_is_told_once() {
        let given = KernelCache::default();
        let (name, other) = (Key::name(1, b"name"), Key::name(1, b"other"));
        assert_ne!(name, other);
        assert_ne!(name, Key::name(2, b"name"));
        assert_ne!(Key::attributes(1), Key::name(1, b""));
        assert_eq!(given.change(name), None);
        given.give(name, SECOND);
        let version = given.change(name).expect("it was given");
        assert_eq!(given.change(other), None);
        // Until that was done, everybody has to.
        assert_eq!(given.change(name), Some(version));
        assert!(!given.is_contended(name));
        given.dropped(name, version);
        assert_eq!(given.change(name), None);
        assert!(given.is_contended(name) && !given.is_contended(other));
        given.give(name, SECOND);
        let again = given.change(name).expect("it was given again");
        assert_ne!(again, version);
        // What is given while the kernel drops it is not dropped.
        given.give(name, SECOND);
        given.dropped(name, again);
        assert!(given.change(name).is_some());
        given.settle();
        assert!(given.change(name).is_some());
    }

    #[test]
    fn a_change_shows_in_answers_that_began_before() {
        let given = KernelCache::default();
        let key = Key::attributes(5);
        let before = given.last();
        given.give(key, SECOND);
        assert!(!given.changed_since(key, before));
        given.change(key);
        assert!(given.changed_since(key, before));
        assert!(!given.changed_since(key, given.last()));
    }

    #[test]
    fn times_pass() {
        let mut given = KernelCache::default();
        let key = Key::name(3, b"x");
        given.give(key, Duration::from_secs(90));
        given.moves(Key::name(3, b"y"));
        let back = |given: &mut KernelCache, secs| given.began -= Duration::from_secs(secs);
        back(&mut given, 110);
        assert!(given.change(key).is_some());
        assert!(given.change(Key::name(3, b"y")).is_some());
        given.give(key, SECOND);
        back(&mut given, 20);
        assert!(given.change(key).is_some());
        back(&mut given, 20);
        assert_eq!(given.change(key), None);
        assert_eq!(given.change(Key::name(3, b"y")), None);
        // A lifetime without end.
        given.give(key, Duration::MAX);
        back(&mut given, 1 << 20);
        assert!(given.change(key).is_some());
    }
}
