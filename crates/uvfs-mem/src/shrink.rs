//! The list of caches that can give memory back.

use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A cache that can give memory back. Called from the monitor's thread (and by callers of
/// [`Shrinkers::shrink`]), so it must not wait for I/O that needs the caller.
pub trait Shrinker: Send + Sync {
    /// A name for logs and statistics.
    fn name(&self) -> &str;

    /// About how many bytes it could give back now.
    fn count(&self) -> usize;

    /// Gives back about `bytes`, oldest first; returns how many it did.
    fn scan(&self, bytes: usize) -> usize;
}

/// The shrinkers of a process (or of a part of it). Holds them weakly: a cache that is dropped
/// is forgotten.
#[derive(Default)]
pub struct Shrinkers(Mutex<Vec<Weak<dyn Shrinker>>>);

impl Shrinkers {
    /// No shrinkers yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one.
    pub fn register(&self, shrinker: &Arc<dyn Shrinker>) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|entry| entry.strong_count() > 0);
        list.push(Arc::downgrade(shrinker));
    }

    /// The live ones.
    pub fn live(&self) -> Vec<Arc<dyn Shrinker>> {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|entry| entry.strong_count() > 0);
        list.iter().filter_map(Weak::upgrade).collect()
    }

    /// Asks each for a `divisor`-th of what it has (all of it for 1); returns the bytes given
    /// back. The list is not locked meanwhile.
    pub fn shrink(&self, divisor: usize) -> usize {
        let mut total = 0;
        for shrinker in self.live() {
            let count = shrinker.count();
            if count == 0 {
                continue;
            }
            let freed = shrinker.scan(count.div_ceil(divisor.max(1)));
            tracing::debug!(name = shrinker.name(), count, freed, "shrunk");
            total += freed;
        }
        total
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    pub(crate) struct Pool(pub(crate) AtomicUsize);

    impl Shrinker for Pool {
        fn name(&self) -> &str {
            "pool"
        }
        fn count(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
        fn scan(&self, bytes: usize) -> usize {
            self.0.fetch_sub(bytes, Ordering::Relaxed);
            bytes
        }
    }

    /// A cache that was dropped takes no more part in shrinking.
    #[test]
    fn the_dropped_are_forgotten() {
        let shrinkers = Shrinkers::new();
        let first: Arc<dyn Shrinker> = Arc::new(Pool(100.into()));
        let second: Arc<dyn Shrinker> = Arc::new(Pool(40.into()));
        shrinkers.register(&first);
        shrinkers.register(&second);
        assert_eq!(shrinkers.shrink(4), 35);
        drop(second);
        assert_eq!(shrinkers.shrink(1), 75);
        assert_eq!(shrinkers.shrink(1), 0);
        assert_eq!(shrinkers.live().len(), 1);
    }
}
