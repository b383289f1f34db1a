//! How a queue's thread waits for the next request: the one policy that every transport uses.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// The behaviour of a thread that has nothing to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WaitMode {
    /// Spin only while the gaps between requests are so short that it pays, else sleep.
    #[default]
    Adaptive,
    /// Spin for the configured time after each request, then sleep.
    Spin,
    /// Sleep at once.
    Sleep,
}

/// The mode and its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitConfig {
    /// The mode.
    pub mode: WaitMode,
    /// The longest spin.
    pub spin: Duration,
}

impl Default for WaitConfig {
    fn default() -> Self {
        Self {
            mode: WaitMode::Adaptive,
            spin: Duration::from_micros(50),
        }
    }
}

/// Threads of this process that spin now; one core is always left to the threads that ask.
static SPINNING: AtomicUsize = AtomicUsize::new(0);

/// Counts of how waits ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitCounts {
    /// Waits that ended while spinning.
    pub spins: u64,
    /// Waits that went to sleep.
    pub sleeps: u64,
}

/// Decides for one waiter, from the gaps it has seen, how long to spin.
#[derive(Debug)]
pub struct Spinner {
    config: WaitConfig,
    cores: usize,
    /// Moving average of the gaps in nanoseconds, each cut at twice the longest spin so that one
    /// pause doesn't outweigh a busy second.
    gap: u64,
    counts: WaitCounts,
}

impl Spinner {
    /// A waiter with no history; it sleeps until gaps prove short.
    pub fn new(config: WaitConfig) -> Self {
        // The process's, not this thread's: that may be bound to one.
        let process = rustix::thread::sched_getaffinity(Some(rustix::process::getpid()));
        let cores = process.map_or(1, |set| set.count() as usize);
        Self {
            config,
            cores,
            gap: 2 * nanos(config.spin),
            counts: WaitCounts::default(),
        }
    }

    /// How long to spin before going to sleep; zero for not at all.
    pub fn budget(&self) -> Duration {
        match self.config.mode {
            WaitMode::Sleep => Duration::ZERO,
            _ if self.cores < 2 => Duration::ZERO,
            WaitMode::Spin => self.config.spin,
            WaitMode::Adaptive if self.gap < nanos(self.config.spin) => self.config.spin,
            WaitMode::Adaptive => Duration::ZERO,
        }
    }

    /// Permission to spin, unless the most threads that may spin do already.
    pub fn begin(&self) -> Option<SpinLeave> {
        let most = self.cores.saturating_sub(1);
        SPINNING
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| {
                (n < most).then_some(n + 1)
            })
            .ok()
            .map(|_| SpinLeave(()))
    }

    /// Learns from a wait that took `gap` and says whether it slept.
    pub fn ended(&mut self, gap: Duration, slept: bool) {
        let gap = nanos(gap).min(2 * nanos(self.config.spin));
        self.gap = (self.gap * 7 + gap) / 8;
        self.count(slept);
    }

    /// Counts a wait whose length was not measured.
    pub fn count(&mut self, slept: bool) {
        if slept {
            self.counts.sleeps += 1;
        } else {
            self.counts.spins += 1;
        }
    }

    /// How the waits so far ended.
    pub fn counts(&self) -> WaitCounts {
        self.counts
    }
}

/// Decides for threads that wait for an answer whether to spin, from what came of the last spins.
///
/// A spin that ends without an answer has kept a core from other threads, perhaps from the very
/// thread that answers. So after each such spin twice as many waits sleep at once, up to
/// 256; an answer while spinning ends that.
#[derive(Debug, Default)]
pub struct Patience {
    /// Spins in a row that brought nothing.
    failed: AtomicU32,
    /// Waits that are still to sleep at once.
    sleeps: AtomicU32,
}

impl Patience {
    /// How long to spin, of `longest`.
    pub fn budget(&self, longest: Duration) -> Duration {
        let less = |n: u32| n.checked_sub(1);
        let order = Ordering::Relaxed;
        match self.sleeps.fetch_update(order, order, less) {
            Ok(_) => Duration::ZERO,
            Err(_) => longest,
        }
    }

    /// A spin has ended, with an answer or without.
    pub fn ended(&self, answered: bool) {
        if answered {
            if self.failed.load(Ordering::Relaxed) != 0 {
                self.failed.store(0, Ordering::Relaxed);
            }
            return;
        }
        let failed = self.failed.fetch_add(1, Ordering::Relaxed).min(7);
        self.sleeps.store(2 << failed, Ordering::Relaxed);
    }
}

/// Held while spinning.
#[derive(Debug)]
pub struct SpinLeave(());

impl Drop for SpinLeave {
    fn drop(&mut self) {
        SPINNING.fetch_sub(1, Ordering::Relaxed);
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos())
        .unwrap_or(u64::MAX / 4)
        .min(u64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adaptive() -> Spinner {
        let mut spinner = Spinner::new(WaitConfig::default());
        spinner.cores = 2;
        spinner
    }

    /// A thread spins while requests come at short gaps, and sleeps once the gaps are long.
    #[test]
    fn adaptive_spins_once_gaps_are_short_and_stops_when_they_grow() {
        let mut spinner = adaptive();
        assert_eq!(spinner.budget(), Duration::ZERO);
        for _ in 0..20 {
            spinner.ended(Duration::from_micros(5), true);
        }
        assert!(spinner.budget() > Duration::ZERO);
        for _ in 0..20 {
            spinner.ended(Duration::from_secs(1), true);
        }
        assert_eq!(spinner.budget(), Duration::ZERO);
    }

    /// Each spin without an answer makes twice as many of the next waits sleep, up to 256.
    #[test]
    fn spins_without_an_answer_make_the_next_waits_sleep() {
        let longest = Duration::from_micros(50);
        let patience = Patience::default();
        let sleeps = |patience: &Patience| {
            let asleep = |_: &i32| patience.budget(longest) == Duration::ZERO;
            (0..1000).take_while(asleep).count()
        };
        assert_eq!(sleeps(&patience), 0);
        for expected in [2, 4, 8, 16, 32, 64, 128, 256, 256] {
            patience.ended(false);
            assert_eq!(sleeps(&patience), expected);
        }
        patience.ended(true);
        assert_eq!(sleeps(&patience), 0);
        patience.ended(false);
        assert_eq!(sleeps(&patience), 2);
    }

    /// A thread that is bound to one core counts the cores of its process.
    #[test]
    fn a_thread_bound_to_one_core_of_several_may_spin() {
        let cores = crate::placement::allowed_cores().unwrap();
        let bound = std::thread::spawn(move || {
            crate::placement::bind_to_core(cores[0]).unwrap();
            Spinner::new(WaitConfig::default()).cores
        });
        let process = rustix::thread::sched_getaffinity(Some(rustix::process::getpid())).unwrap();
        assert_eq!(bound.join().unwrap(), process.count() as usize);
    }

    /// On a machine with one core no thread spins: it would keep the other side from running.
    #[test]
    fn on_one_core_nobody_spins() {
        let mut spinner = Spinner::new(WaitConfig {
            mode: WaitMode::Spin,
            ..Default::default()
        });
        spinner.cores = 1;
        assert_eq!(spinner.budget(), Duration::ZERO);
        assert!(spinner.begin().is_none());
    }
}
