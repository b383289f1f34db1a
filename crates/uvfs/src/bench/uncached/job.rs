//! One stream through a file that the client's cache has no room for, second by second.

use std::fs::File as HostFile;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uvfs_client::{Client, Config, Flags, LocalStore, OpenOptions};

use super::super::client::{Measured, Watch};
use uvfs_io::ops::cached_bytes;

/// Bytes of a call.
const CALL: usize = 1 << 20;

/// What to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// With DONTCACHE.
    pub uncached: bool,
    /// Writes, not reads.
    pub write: bool,
    /// The directory that is the store.
    pub store: PathBuf,
    /// The file in it, of `bytes` bytes.
    pub file: String,
    /// Its size, a multiple of 1 MiB.
    pub bytes: u64,
    /// Bytes of the client's cache.
    pub memory: usize,
    /// How many seconds to go on.
    pub seconds: usize,
}

impl Job {
    /// Does it; answers each second, and then all but the first together: the cache is full. With
    /// each comes the CPU time in seconds that the rest of the machine took meanwhile.
    pub fn run(&self) -> io::Result<Vec<(Measured, f64)>> {
        let config = Config {
            memory: self.memory,
            ..Config::default()
        };
        let client = Client::new(LocalStore::open(&self.store)?, config)?;
        let options = OpenOptions::new().read(true).write(self.write);
        let file = client.open(&self.file, options)?;
        let flags = if self.uncached {
            Flags::DONTCACHE
        } else {
            Flags::empty()
        };
        let host = HostFile::open(self.store.join(&self.file))?;
        host.sync_all()?;
        // What a tmpfs keeps all the same does not count.
        rustix::fs::fadvise(&host, 0, None, rustix::fs::Advice::DontNeed)?;
        let before = cached_bytes(&host).ok();
        let mut buffer = vec![0x5a; CALL];
        let mut offset = 0;
        let mut one_second = || {
            let (watch, busy) = (Watch::start(), machine_cpu_seconds()?);
            let (mut calls, mut held) = (0, 0);
            while watch.start.elapsed().as_secs_f64() < 1.0 {
                let moved = if self.write {
                    file.write_at(&buffer, offset, flags)?
                } else {
                    file.read_at(&mut buffer, offset, flags)?
                };
                if moved != CALL {
                    return Err(io::Error::other("a call came back short"));
                }
                offset = (offset + CALL as u64) % self.bytes;
                held = held.max(client.stats().cached_pages);
                calls += 1;
            }
            let mut measured = watch.stop(f64::from(calls));
            measured.memory_mib = Some(held as f64 / 256.0);
            measured.host_cache_mib = cached_bytes(&host)
                .ok()
                .zip(before)
                .map(|(now, before)| now.saturating_sub(before) as f64 / f64::from(1 << 20));
            let others = machine_cpu_seconds()? - busy - measured.cpu_seconds;
            Ok((measured, others.max(0.0)))
        };
        let mut seconds: Vec<(Measured, f64)> = (0..self.seconds)
            .map(|_| one_second())
            .collect::<io::Result<_>>()?;
        let full = seconds[1..].iter().fold(
            (Measured::default(), 0.0),
            |(measured, others), (one, its_others)| (sum(measured, one), others + its_others),
        );
        seconds.push(full);
        file.close()?;
        Ok(seconds)
    }
}

/// What all processors have worked since boot (/proc/stat, proc(5)), in seconds.
fn machine_cpu_seconds() -> io::Result<f64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let ticks: Vec<f64> = text
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("cpu "))
        .unwrap_or("")
        .split_ascii_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = ticks[..] else {
        return Err(io::Error::other(
            "/proc/stat has another form than proc(5) says",
        ));
    };
    let busy = user + nice + system + irq + softirq;
    Ok(busy / rustix::param::clock_ticks_per_second() as f64)
}

fn most(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    Some(f64::max(a.unwrap_or(0.0), b?))
}

fn sum(sum: Measured, one: &Measured) -> Measured {
    Measured {
        amount: sum.amount + one.amount,
        seconds: sum.seconds + one.seconds,
        cpu_seconds: sum.cpu_seconds + one.cpu_seconds,
        memory_mib: most(sum.memory_mib, one.memory_mib),
        host_cache_mib: most(sum.host_cache_mib, one.host_cache_mib),
        latency_us: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_second_and_the_rest_are_answered_and_uncached_holds_little() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("data"), vec![1; 16 << 20]).unwrap();
        for write in [false, true] {
            let job = Job {
                uncached: true,
                write,
                store: dir.path().into(),
                file: "data".into(),
                bytes: 16 << 20,
                memory: 4 << 20,
                seconds: 2,
            };
            let found = job.run().unwrap();
            assert_eq!(found.len(), 3);
            assert_eq!(found[2], found[1]);
            assert!(found[0].0.memory_mib.unwrap() <= 4.0);
        }
        let data = std::fs::read(dir.path().join("data")).unwrap();
        assert_eq!(data.len(), 16 << 20);
        assert_eq!(data[0], 0x5a);
    }
}
