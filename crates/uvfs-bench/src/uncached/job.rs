//! Streams through many files, second by second.

use std::fs::File as HostFile;
use std::io::{self, IoSlice, IoSliceMut};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::{Errno, ReadWriteFlags};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use uvfs_client::{Client, Config, File, Flags, OpenOptions};
use uvfs_io::ops::{DONTCACHE, cached_bytes};
use uvfs_local::LocalStore;

use super::super::child::cpu_seconds;
use super::super::measure::{Measured, Watch};

/// Bytes of a call.
pub const CALL: usize = 64 << 10;

/// How often it looks how much the caches hold.
const LOOK: Duration = Duration::from_millis(50);

/// How the files are reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "way", rename_all = "kebab-case")]
pub enum UncachedAccess {
    /// By the host's system calls.
    Host {
        /// The directory.
        dir: PathBuf,
        /// With RWF_DONTCACHE.
        dontcache: bool,
    },
    /// By `uvfs-client` over its in-process store of the source.
    Client {
        /// Bytes of its cache.
        memory: usize,
        /// With DONTCACHE.
        dontcache: bool,
    },
}

/// The streams, and how long they go on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UncachedJob {
    /// How.
    pub way: UncachedAccess,
    /// Writes, not reads.
    pub write: bool,
    /// The source, whose page cache is looked at.
    pub source: PathBuf,
    /// The files there.
    pub files: Vec<String>,
    /// The size of each, a multiple of [`CALL`].
    pub bytes: u64,
    /// How many seconds to go on.
    pub seconds: usize,
}

/// One open file.
enum Stream {
    Host(HostFile, ReadWriteFlags),
    Client(File, Flags),
}

impl Stream {
    fn call(&self, write: bool, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        Ok(match self {
            Stream::Host(file, flags) if write => {
                rustix::io::pwritev2(file, &[IoSlice::new(buffer)], at, *flags)?
            }
            Stream::Host(file, flags) => {
                rustix::io::preadv2(file, &mut [IoSliceMut::new(buffer)], at, *flags)?
            }
            Stream::Client(file, flags) if write => file.write_at(buffer, at, *flags)?,
            Stream::Client(file, flags) => file.read_at(buffer, at, *flags)?,
        })
    }
}

/// The clock of all processors, and of kswapd alone.
struct Machine {
    kswapd: Vec<Pid>,
}

impl Machine {
    fn new() -> io::Result<Self> {
        let mut kswapd = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let entry = entry?;
            let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            let pid = entry.file_name().to_str().and_then(|pid| pid.parse().ok());
            if name.starts_with("kswapd") {
                kswapd.extend(pid.and_then(Pid::from_raw));
            }
        }
        Ok(Self { kswapd })
    }

    /// Seconds that all processors have worked since boot, and that kswapd has.
    fn seconds(&self) -> io::Result<(f64, Option<f64>)> {
        // Each may be hidden from an unprivileged process; then nothing is known.
        let each = self.kswapd.iter().map(|pid| cpu_seconds(*pid).ok());
        let kswapd = each
            .sum::<Option<f64>>()
            .filter(|_| !self.kswapd.is_empty());
        Ok((machine_cpu_seconds()?, kswapd))
    }
}

impl UncachedJob {
    /// Does it; answers each second, and then all but the first together: the caches are full. With
    /// each comes the CPU time in seconds that the rest of the machine took meanwhile.
    pub fn run(&self) -> io::Result<Vec<(Measured, f64)>> {
        let (streams, client) = self.open()?;
        let host: Vec<HostFile> = self
            .files
            .iter()
            .map(|name| HostFile::open(self.source.join(name)))
            .collect::<io::Result<_>>()?;
        for file in &host {
            file.sync_all()?;
            // Pages that a tmpfs keeps all the same do not count.
            rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
        }
        let cached = |files: &mut dyn Iterator<Item = &HostFile>| {
            files
                .map(|file| cached_bytes(file).ok())
                .sum::<Option<u64>>()
        };
        let before = cached(&mut host.iter());
        // How much the client's cache, or the kernel's of a mount, holds.
        let held = || match &client {
            Some(client) => Some(client.stats().cached_pages as f64 / 256.0),
            None => cached(&mut streams.iter().filter_map(|stream| match stream {
                Stream::Host(file, _) => Some(file),
                Stream::Client(..) => None,
            }))
            .map(mib),
        };
        let (calls, over) = (AtomicU64::new(0), AtomicBool::new(false));
        let machine = Machine::new()?;
        let one_second = || {
            let (watch, (busy, kswapd)) = (Watch::start(), machine.seconds()?);
            let calls_before = calls.load(Ordering::Relaxed);
            let (mut most, end) = (held(), watch.start + Duration::from_secs(1));
            while Instant::now() < end {
                thread::sleep(LOOK.min(end.saturating_duration_since(Instant::now())));
                most = most.zip(held()).map(|(most, now)| f64::max(most, now));
            }
            let calls = calls.load(Ordering::Relaxed) - calls_before;
            let mut measured = watch.stop(mib(calls * CALL as u64));
            measured.memory_mib = most;
            let grown = cached(&mut host.iter()).zip(before);
            measured.host_cache_mib = grown.map(|(now, before)| mib(now.saturating_sub(before)));
            let (busy_now, kswapd_now) = machine.seconds()?;
            measured.kswapd_cpu_seconds = kswapd_now.zip(kswapd).map(|(now, before)| now - before);
            let others = busy_now - busy - measured.cpu_seconds;
            Ok((measured, others.max(0.0)))
        };
        let seconds: io::Result<Vec<(Measured, f64)>> = thread::scope(|scope| {
            let workers: Vec<_> = streams
                .iter()
                .map(|stream| scope.spawn(|| self.go_on(stream, &calls, &over)))
                .collect();
            let seconds = (0..self.seconds).map(|_| one_second()).collect();
            over.store(true, Ordering::Relaxed);
            for worker in workers {
                worker.join().expect("a stream does not panic")?;
            }
            seconds
        });
        let mut seconds = seconds?;
        let full = seconds[1..].iter().fold(
            (Measured::default(), 0.0),
            |(measured, others), (one, its_others)| (sum(measured, one), others + its_others),
        );
        seconds.push(full);
        Ok(seconds)
    }

    fn open(&self) -> io::Result<(Vec<Stream>, Option<Client>)> {
        match &self.way {
            UncachedAccess::Host { dir, dontcache } => {
                let flags = if *dontcache { DONTCACHE } else { 0 };
                let flags = ReadWriteFlags::from_bits_retain(flags);
                let open = |name: &String| {
                    let mut options = HostFile::options();
                    let file = options.read(true).write(self.write).open(dir.join(name))?;
                    io::Result::Ok(Stream::Host(file, flags))
                };
                Ok((
                    self.files.iter().map(open).collect::<io::Result<_>>()?,
                    None,
                ))
            }
            UncachedAccess::Client { memory, dontcache } => {
                let config = Config {
                    memory: *memory,
                    ..Config::default()
                };
                let client = Client::new(LocalStore::open(&self.source)?, config)?;
                let flags = match dontcache {
                    true => Flags::DONTCACHE,
                    false => Flags::empty(),
                };
                let open = |name: &String| {
                    let options = OpenOptions::new().read(true).write(self.write);
                    io::Result::Ok(Stream::Client(client.open(name, options)?, flags))
                };
                let streams = self.files.iter().map(open).collect::<io::Result<_>>()?;
                Ok((streams, Some(client)))
            }
        }
    }

    /// Goes through a file again and again.
    fn go_on(&self, stream: &Stream, calls: &AtomicU64, over: &AtomicBool) -> io::Result<()> {
        let mut buffer = vec![0x5a; CALL];
        let mut at = 0;
        while !over.load(Ordering::Relaxed) {
            if stream.call(self.write, &mut buffer, at)? != CALL {
                return Err(io::Error::other("a call came back short"));
            }
            at = (at + CALL as u64) % self.bytes;
            calls.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Whether the file system of a file has RWF_DONTCACHE.
pub fn has_dontcache(file: &HostFile) -> bool {
    let flags = ReadWriteFlags::from_bits_retain(DONTCACHE);
    let mut byte = [0];
    let read = rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut byte)], 0, flags);
    !matches!(read, Err(Errno::OPNOTSUPP | Errno::INVAL))
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Seconds that all processors have worked since boot (/proc/stat, proc(5)).
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
        kswapd_cpu_seconds: one
            .kswapd_cpu_seconds
            .map(|one| sum.kswapd_cpu_seconds.unwrap_or(0.0) + one),
        ..Measured::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `uvfs bench uncached` measures every second, and an uncached client holds little.
    #[test]
    fn each_second_and_the_rest_are_answered_and_uncached_holds_little() {
        let dir = tempfile::tempdir().unwrap();
        let files = ["a".to_string(), "b".to_string()];
        for name in &files {
            std::fs::write(dir.path().join(name), vec![1; 8 << 20]).unwrap();
        }
        let host = UncachedAccess::Host {
            dir: dir.path().into(),
            dontcache: false,
        };
        let client = UncachedAccess::Client {
            memory: 4 << 20,
            dontcache: true,
        };
        for (way, write) in [
            (client.clone(), false),
            (client.clone(), true),
            (host, false),
        ] {
            let job = UncachedJob {
                way: way.clone(),
                write,
                source: dir.path().into(),
                files: files.to_vec(),
                bytes: 8 << 20,
                seconds: 2,
            };
            let found = job.run().unwrap();
            assert_eq!(found.len(), 3);
            assert_eq!(found[2], found[1]);
            assert!(found[0].0.amount > 0.0);
            if way == client {
                assert!(found[0].0.memory_mib.unwrap() <= 4.0);
            }
        }
        for name in files {
            let data = std::fs::read(dir.path().join(name)).unwrap();
            assert_eq!(data.len(), 8 << 20);
            assert_eq!(data[0], 0x5a);
        }
    }
}
