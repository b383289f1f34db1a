//! What the reader of an open file will want next.

use std::ops::Range;

const MIB: u64 = 1 << 20;
/// Bytes that are requested ahead at first.
const FIRST: u64 = MIB;
/// And at most.
const MOST: u64 = 32 * MIB;
/// The kernel sends the reads of a stream at the same time: they may come so far out of order.
const SLACK: u64 = 4 * MIB;
/// Objects up to this size are requested whole.
const SMALL: u64 = MIB;

/// The reads of one open file.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// The end of the furthest read of the stream.
    reached: u64,
    /// What was requested, up to here.
    requested: u64,
    /// How far ahead of the reader.
    ahead: u64,
}

impl Window {
    /// A read; gives the range to request beside it, within the object.
    pub(crate) fn read(&mut self, range: Range<u64>, size: u64) -> Range<u64> {
        if size <= SMALL {
            return 0..size;
        }
        let goes_on = range.start <= self.reached && range.end + SLACK >= self.reached;
        if !goes_on {
            *self = Self {
                reached: range.end,
                ..Self::default()
            };
            return range.end..range.end;
        }
        self.reached = self.reached.max(range.end);
        // Half of what was requested is used up.
        if self.reached + self.ahead / 2 < self.requested {
            return range.end..range.end;
        }
        self.ahead = (2 * self.ahead).clamp(FIRST, MOST);
        let from = self.requested.max(self.reached);
        self.requested = (self.reached + self.ahead).min(size);
        from.min(self.requested)..self.requested
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    /// The bytes that reads of these positions request ahead.
    fn ahead(size: u64, reads: impl IntoIterator<Item = u64>) -> Vec<Range<u64>> {
        let mut window = Window::default();
        let reads = reads.into_iter();
        let asked = reads.map(|at| window.read(at..at + 128 * KIB, size));
        asked.filter(|range| !range.is_empty()).collect()
    }

    #[test]
    fn a_stream_is_requested_once_and_ever_further_ahead() {
        let size = 256 * MIB;
        let asked = ahead(size, (0..size / (128 * KIB)).map(|n| n * 128 * KIB));
        let joined = asked.windows(2).all(|two| two[0].end == two[1].start);
        assert!(joined, "{asked:?}");
        assert_eq!(asked.last().unwrap().end, size);
        let longest = asked.iter().map(|range| range.end - range.start).max();
        assert!(
            longest >= Some(MOST / 2) && longest <= Some(MOST),
            "{asked:?}"
        );
    }

    #[test]
    fn a_stream_out_of_order_is_one() {
        let order = (0..64_u64).map(|n| (n ^ 1) * 128 * KIB);
        let asked = ahead(64 * MIB, order);
        assert!(asked.last().unwrap().end > 8 * MIB, "{asked:?}");
    }

    #[test]
    fn random_reads_request_nothing_ahead() {
        let places = (1..200_u64).map(|n| n * 7919 % 509 * 2 * MIB + 5 * MIB);
        let asked = ahead(2048 * MIB, places);
        assert!(asked.len() < 5, "{asked:?}");
    }

    #[test]
    fn a_small_object_is_requested_whole() {
        assert_eq!(ahead(MIB, [512 * KIB])[0], 0..MIB);
    }
}
