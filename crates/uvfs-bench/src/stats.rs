//! Medians and spread.

use serde::{Deserialize, Serialize};

/// The middle and the ends of some measured values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The middle value; the mean of the middle two when their number is even.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

impl Summary {
    /// Summarises `values`; nothing when there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = match values.len() {
            0 => return None,
            n if n % 2 == 1 => values[middle],
            _ => (values[middle - 1] + values[middle]) / 2.0,
        };
        Some(Self {
            median,
            min: values[0],
            max: values[values.len() - 1],
        })
    }

    /// The same in another unit.
    pub fn times(self, factor: f64) -> Self {
        Self {
            median: self.median * factor,
            min: self.min * factor,
            max: self.max * factor,
        }
    }
}

/// How often which value came. Values are kept within 3%.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Histogram {
    counts: Vec<u64>,
}

impl Histogram {
    /// A power of two is divided into 2^5 parts.
    const BITS: u32 = 5;

    /// Adds a value.
    pub fn add(&mut self, value: u64) {
        let index = Self::index(value);
        if index >= self.counts.len() {
            self.counts.resize(index + 1, 0);
        }
        self.counts[index] += 1;
    }

    /// Adds the values of another one.
    pub fn merge(&mut self, other: &Self) {
        let len = self.counts.len().max(other.counts.len());
        self.counts.resize(len, 0);
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
    }

    /// How many values there are.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The value that this part of all values does not exceed; nothing when there are none.
    pub fn quantile(&self, part: f64) -> Option<u64> {
        let wanted = (part * self.count() as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        let reached = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        reached.map(Self::value)
    }

    fn index(value: u64) -> usize {
        let shift = (u64::BITS - value.leading_zeros()).saturating_sub(Self::BITS + 1);
        ((u64::from(shift) << Self::BITS) + (value >> shift)) as usize
    }

    /// The smallest value with this index.
    fn value(index: usize) -> u64 {
        let shift = (index >> Self::BITS).saturating_sub(1) as u32;
        (index as u64 - (u64::from(shift) << Self::BITS)) << shift
    }
}

/// How long operations took, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Half of them took no longer.
    pub median: f64,
    /// 99% of them took no longer.
    pub p99: f64,
}

impl Latency {
    /// Sums up a histogram of nanoseconds, unless it is empty.
    pub fn of(nanoseconds: &Histogram) -> Option<Self> {
        let microseconds = |part| nanoseconds.quantile(part).map(|ns| ns as f64 / 1e3);
        let (median, p99) = microseconds(0.5).zip(microseconds(0.99))?;
        Some(Self { median, p99 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The median of rounds is the middle one, or the mean of the middle two; there is none without samples.
    #[test]
    fn a_summary_has_the_median_and_the_ends() {
        for (values, summary) in [
            (&[7.0][..], (7.0, 7.0, 7.0)),
            (&[9.0, 1.0, 4.0], (1.0, 4.0, 9.0)),
            (&[4.0, 10.0, 1.0, 2.0], (1.0, 3.0, 10.0)),
        ] {
            let s = Summary::of(values.iter().copied()).unwrap();
            assert_eq!((s.min, s.median, s.max), summary);
        }
        assert_eq!(Summary::of([]), None);
    }

    /// Latencies are within the 3% that `--help` promises.
    #[test]
    fn a_histogram_keeps_values_within_three_percent() {
        assert_eq!(Histogram::default().quantile(0.5), None);
        let last = |value| {
            let mut histogram = Histogram::default();
            histogram.add(value);
            histogram.quantile(1.0).unwrap()
        };
        for value in (0..100).chain((0..64).map(|bit| 1 << bit)) {
            let kept = last(value);
            assert!(
                kept <= value && value - kept <= value / 32,
                "{value} {kept}"
            );
        }
        assert!(last(u64::MAX) > u64::MAX / 100 * 96);
    }

    /// Percentiles over several processes or rounds count every sample.
    #[test]
    fn histograms_add_up() {
        let (mut a, mut b) = (Histogram::default(), Histogram::default());
        (0..50).for_each(|_| a.add(10));
        (0..49).for_each(|_| b.add(20));
        b.add(30);
        a.merge(&b);
        assert_eq!(a.count(), 100);
        let quantiles = [0.0, 0.5, 0.51, 0.99, 1.0].map(|part| a.quantile(part).unwrap());
        assert_eq!(quantiles, [10, 10, 20, 20, 30]);
    }
}
