//! Finding out which reads suit a device.
//!
//! Small reads of just what is needed pay where the device does many of them at a time. Where it does
//! not, it costs less to read what lies between them as well. Both are measured: small reads with many
//! in flight, as [`Prefetch::Exact`](super::Prefetch::Exact) sends them, and large ones, as
//! [`Prefetch::Large`](super::Prefetch::Large) does.

use super::reader::MAX_READ;
use crate::blocks::Blocks;
use std::time::{Duration, Instant};

/// Bytes of a small read.
const SMALL: usize = 4096;
/// Small reads in flight at once.
const SMALL_READS: u64 = 32;
/// Large reads in flight at once: 1 MiB together.
const LARGE_READS: u64 = 4;
/// Reads that go first. If they take long, they are all that is measured.
const FIRST: usize = 4;
/// No further read begins after so long. Reads in flight are waited for.
const LONGEST: Duration = Duration::from_millis(10);
/// Of the bytes of a large read about one in this many is wanted, as directories and B-trees lie among
/// data: a large read is worth the small ones of this part of it.
const WANTED: u32 = 8;

/// The measured behaviour of a device.
#[derive(Debug, Clone, Copy, Default)]
struct Done {
    bytes: u64,
    time: Duration,
}

impl Done {
    /// Time for each byte, in seconds.
    fn per_byte(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.time.as_secs_f64() / self.bytes as f64)
    }
}

/// Whether large reads suit the device better than many small ones.
pub(super) fn suits_large(blocks: &dyn Blocks) -> bool {
    // The two are at different places, so that neither finds what the other left in a cache.
    let small = read(blocks, SMALL_READS, SMALL, 1);
    let large = read(blocks, LARGE_READS, MAX_READ as usize, 2);
    is_large(small, large)
}

fn is_large(small: Done, large: Done) -> bool {
    match (small.per_byte(), large.per_byte()) {
        (Some(small), Some(large)) => large * f64::from(WANTED) < small,
        // An image too small for a large read, or one that cannot be read.
        _ => false,
    }
}

/// Reads at `count` places spread over the device, in thirds of their distance.
fn read(blocks: &dyn Blocks, count: u64, len: usize, third: u64) -> Done {
    let mut done = Done::default();
    let mut stream = blocks.stream(count as usize * len);
    let unit = stream.as_ref().map_or(1, |s| s.unit()).max(SMALL as u64);
    let gap = blocks.size() / count;
    let places = (0..count).map(|i| (i * gap + gap * third / 3) / unit * unit);
    let len = len.next_multiple_of(unit as usize);
    let places = places.filter(|at| at.saturating_add(len as u64) <= blocks.size());
    let mut start = Instant::now();
    match &mut stream {
        Some(stream) => {
            let places: Vec<u64> = places.collect();
            let (first, rest) = places.split_at(places.len().min(FIRST));
            for round in [first, rest] {
                if round.is_empty() || start.elapsed() > LONGEST {
                    break;
                }
                (start, done.bytes) = (Instant::now(), 0);
                for at in round {
                    if !stream.start(*at, len) {
                        break;
                    }
                }
                stream.send();
                while let Some((_, read)) = stream.next() {
                    done.bytes += read.map_or(0, |block| block.len() as u64);
                }
            }
        }
        None => {
            let mut buf = vec![0; len];
            for at in places {
                if blocks.read_data(at, &mut buf).is_ok() {
                    done.bytes += len as u64;
                }
                if start.elapsed() > LONGEST {
                    break;
                }
            }
        }
    }
    done.time = start.elapsed();
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::Mutex;

    /// A device whose reads take `latency` and then `per_mib` of its only wire.
    struct Made {
        size: u64,
        latency: Duration,
        per_mib: Duration,
        /// Bytes read.
        read: Mutex<u64>,
    }

    impl Blocks for Made {
        fn size(&self) -> u64 {
            self.size
        }
        fn read_data(&self, _: u64, buf: &mut [u8]) -> io::Result<()> {
            *self.read.lock().unwrap() += buf.len() as u64;
            let wire = self.per_mib.mul_f64(buf.len() as f64 / (1 << 20) as f64);
            std::thread::sleep(self.latency + wire);
            Ok(())
        }
    }

    fn took(bytes: u64, micros: u64) -> Done {
        let time = Duration::from_micros(micros);
        Done { bytes, time }
    }

    const SMALL_BYTES: u64 = SMALL_READS * SMALL as u64;
    const LARGE_BYTES: u64 = LARGE_READS * MAX_READ;

    /// Microseconds for the small reads and for the large ones, and which of them suit the device.
    #[test]
    fn devices_get_the_reads_that_suit_them() {
        for (small, large, suits_large, device) in [
            (
                80,
                500,
                false,
                "a fast disk: 400,000 reads, or 2 GB, a second",
            ),
            (600, 1100, false, "a long way that takes many at once"),
            (
                32 * 8000,
                4 * 8000 + 7000,
                true,
                "a disk that seeks: 8 ms a place, 150 MB a second",
            ),
            (
                32 * 333,
                8400,
                true,
                "a network disk of 3,000 reads, or 125 MB, a second",
            ),
            (
                1100,
                1000 + 8400,
                false,
                "a network without a limit: reads in flight hide latency",
            ),
        ] {
            let (small, large) = (took(SMALL_BYTES, small), took(LARGE_BYTES, large));
            assert_eq!(is_large(small, large), suits_large, "{device}");
        }
    }

    /// Without reads in flight the same latency counts for each, and the probe ends early.
    #[test]
    fn latency_that_is_waited_for_asks_for_large_reads() {
        let made = Made {
            size: 1 << 30,
            latency: Duration::from_millis(4),
            per_mib: Duration::from_millis(1),
            read: Mutex::new(0),
        };
        assert!(suits_large(&made));
        let read = *made.read.lock().unwrap();
        assert!(read <= SMALL_BYTES + LARGE_BYTES, "{read}");
        // Three small reads and three large ones are enough to know; sleeps are never shorter.
        assert!(read < SMALL_BYTES + LARGE_BYTES, "it did not end early");
    }

    /// A device that cannot be read, or is too small for a large read, is no reason for large reads.
    #[test]
    fn nothing_measured_is_small_reads() {
        let made = Made {
            size: 8192,
            latency: Duration::ZERO,
            per_mib: Duration::ZERO,
            read: Mutex::new(0),
        };
        assert!(!suits_large(&made));
        assert!(!is_large(Done::default(), took(LARGE_BYTES, 1)));
    }
}
