//! Many streams at a time, each through a file of its own.

use std::fs::File as HostFile;
use std::io::{self, IoSlice, IoSliceMut};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rustix::io::ReadWriteFlags;
use serde::{Deserialize, Serialize};
use uvfs_client::{Client, Config, File, Flags, OpenOptions};
use uvfs_io::ops::DONTCACHE;

use super::super::measure::{Measured, Watch};
use super::super::store;
use super::super::writeback::job::FILL;

const MIB: f64 = (1 << 20) as f64;

/// The streams and their files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StreamsJob {
    /// By `uvfs-client` over a server in the same process, else by system calls.
    pub by_client: bool,
    /// The directory.
    pub path: PathBuf,
    /// A file for each stream.
    pub files: Vec<String>,
    /// Reads, else writes to new files and an fsync.
    pub reads: bool,
    /// Each call asks that its pages are dropped.
    pub uncached: bool,
    /// Bytes of a call.
    pub block: usize,
    /// Bytes of a file.
    pub bytes: u64,
    /// Bytes of the client's cache.
    pub memory: usize,
}

/// An open file.
enum Stream {
    Host(HostFile),
    Client(File),
}

impl Stream {
    /// Reads or writes a block.
    fn call(&self, job: &StreamsJob, block: &mut [u8], at: u64) -> io::Result<usize> {
        let mut flags = ReadWriteFlags::empty();
        if job.uncached {
            flags = ReadWriteFlags::from_bits_retain(DONTCACHE);
        }
        let mut ours = Flags::empty();
        ours.set(Flags::DONTCACHE, job.uncached);
        Ok(match (self, job.reads) {
            (Self::Host(file), true) => {
                rustix::io::preadv2(file, &mut [IoSliceMut::new(block)], at, flags)?
            }
            (Self::Host(file), false) => {
                rustix::io::pwritev2(file, &[IoSlice::new(block)], at, flags)?
            }
            (Self::Client(file), true) => file.read_at(block, at, ours)?,
            (Self::Client(file), false) => file.write_at(block, at, ours)?,
        })
    }

    /// Goes through the file, and counts its bytes as they are moved.
    fn run(&self, job: &StreamsJob, moved: &AtomicU64) -> io::Result<()> {
        let mut block = vec![FILL; job.block];
        let mut at = 0;
        while at < job.bytes {
            let part = job.block.min((job.bytes - at) as usize);
            let done = self.call(job, &mut block[..part], at)?;
            if done == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            at += done as u64;
            moved.fetch_add(done as u64, Ordering::Relaxed);
        }
        match self {
            _ if job.reads => Ok(()),
            Self::Host(file) => file.sync_all(),
            Self::Client(file) => Ok(file.sync_all()?),
        }
    }
}

impl StreamsJob {
    /// Does it. Opening the files does not count, making them durable does.
    pub fn run(&self) -> io::Result<Measured> {
        let serving = match self.by_client {
            true => Some(store::directory(&self.path)?),
            false => None,
        };
        let (_serving, connection) = serving.unzip();
        let config = Config::default().memory(self.memory);
        let client = connection.map(|connection| Client::new(connection, config));
        let client = client.transpose()?;
        let open = |name: &String| match &client {
            None if self.reads => HostFile::open(self.path.join(name)).map(Stream::Host),
            None => HostFile::create_new(self.path.join(name)).map(Stream::Host),
            Some(client) => {
                let options = OpenOptions::new().read(self.reads).write(!self.reads);
                let file = client.open(name, options.create(!self.reads))?;
                Ok(Stream::Client(file))
            }
        };
        let streams: Vec<Stream> = self.files.iter().map(open).collect::<io::Result<_>>()?;
        let moved = AtomicU64::new(0);
        let watch = Watch::start();
        let slowest = thread::scope(|scope| {
            let moved = &moved;
            let run = |stream: &'_ Stream| stream.run(self, moved);
            let threads: Vec<_> = streams
                .iter()
                .map(|stream| scope.spawn(move || run(stream)))
                .collect();
            let mut slowest: Option<u64> = None;
            let mut before = 0;
            loop {
                for _ in 0..100 {
                    if threads.iter().all(thread::ScopedJoinHandle::is_finished) {
                        let all = threads.into_iter().map(|one| one.join().expect("no panic"));
                        return all.collect::<io::Result<()>>().map(|()| slowest);
                    }
                    thread::sleep(Duration::from_millis(10));
                }
                let now = moved.load(Ordering::Relaxed);
                slowest = Some(slowest.unwrap_or(u64::MAX).min(now - before));
                before = now;
            }
        })?;
        let total = self.bytes * self.files.len() as u64;
        Ok(Measured {
            slowest: slowest.map(|bytes| bytes as f64 / MIB),
            ..watch.stop(total as f64 / MIB)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streams write files of the given size, and read them to their ends, cached and uncached.
    #[test]
    fn streams_go_through_whole_files() {
        for (by_client, uncached) in [(false, false), (true, false), (true, true)] {
            let dir = tempfile::tempdir().unwrap();
            for reads in [false, true] {
                let job = StreamsJob {
                    by_client,
                    path: dir.path().into(),
                    files: vec!["a".into(), "b".into()],
                    reads,
                    uncached,
                    block: 5000,
                    bytes: 3 << 20,
                    memory: 1 << 20,
                };
                assert_eq!(job.run().unwrap().amount, 6.0, "{job:?}");
            }
            for name in ["a", "b"] {
                let data = std::fs::read(dir.path().join(name)).unwrap();
                assert!(data.len() == 3 << 20 && data.iter().all(|&byte| byte == FILL));
            }
        }
    }
}
