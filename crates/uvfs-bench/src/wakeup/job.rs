//! A client's work: small requests and streams, one kind at a time.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use fastrand::Rng;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use serde::{Deserialize, Serialize};

use super::super::aio;
use super::super::files::{BLOCK, Page, check_block, file_name, open_direct};
use super::super::measure::{Measured, Watch, for_a_while};
use super::super::stats::{Histogram, Latency};

/// The size of a streaming request, in bytes.
const STREAM: usize = 1 << 20;

/// Looking at the clock costs something beside an operation that stays in the kernel: of so many operations the
/// last is timed.
const TIMED: u64 = 8;

/// Reads in flight in [`WakeupWork::Read16`].
const DEPTH: usize = 16;

/// A kind of calls that a client makes on files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum WakeupWork {
    /// 4 KiB random direct reads, one at a time
    #[value(name = "read-1")]
    #[serde(rename = "read-1")]
    Read1,
    /// 4 KiB random direct reads, 16 in flight
    #[value(name = "read-16")]
    #[serde(rename = "read-16")]
    Read16,
    /// create, write and close 4 KiB files
    Create,
    /// stat files in random order, each for the first time
    Stat,
    /// open, read and close 4 KiB files in random order, each for the first time
    Read,
    /// unlink files in random order, each for the first time
    Unlink,
    /// 1 MiB buffered reads of a file, for the first time
    Seqread,
    /// 1 MiB buffered writes of a new file, with an fsync at the end
    Seqwrite,
}

/// The work of a client, and on which files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WakeupJob {
    /// The calls to make.
    pub work: WakeupWork,
    /// The file of the reads and `seqwrite`, or the directory of the small files.
    pub path: PathBuf,
    /// How long the direct reads go on, in seconds.
    pub seconds: f64,
    /// The number of small files.
    pub files: u64,
    /// The size of the file that `seqwrite` writes.
    pub bytes: u64,
    /// Where the random orders start.
    pub seed: u64,
}

impl WakeupJob {
    /// Does the work and measures it.
    pub fn run(&self) -> io::Result<Measured> {
        let (path, files, random) = (&self.path, self.files, Rng::with_seed(self.seed));
        match self.work {
            WakeupWork::Read1 => read_one(path, self.seconds, random),
            WakeupWork::Read16 => read_many(path, self.seconds, random),
            WakeupWork::Create => create(path, files),
            WakeupWork::Stat => stat(path, files, random),
            WakeupWork::Read => read_small(path, files, random),
            WakeupWork::Unlink => unlink(path, files, random),
            WakeupWork::Seqread => stream_in(path),
            WakeupWork::Seqwrite => stream_out(path, self.bytes),
        }
    }
}

fn read_one(path: &Path, seconds: f64, mut random: Rng) -> io::Result<Measured> {
    let (file, blocks) = open_direct(path)?;
    let mut page = Box::new(Page::default());
    let mut latency = Histogram::default();
    let measured = for_a_while(seconds, || {
        for last in (0..TIMED).rev() {
            let number = random.u64(..blocks);
            let start = (last == 0).then(Instant::now);
            let n = file.read_at(&mut page.0, number * BLOCK as u64)?;
            if let Some(start) = start {
                latency.add(start.elapsed().as_nanos() as u64);
            }
            check_block(number, &page.0[..n])?;
        }
        Ok(TIMED)
    })?;
    Ok(timed(measured, latency))
}

/// The numbers below `count` in random order.
fn shuffled(mut random: Rng, count: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..count).collect();
    random.shuffle(&mut numbers);
    numbers
}

/// Adds how long operations took.
fn timed(measured: Measured, latency: Histogram) -> Measured {
    Measured {
        latency_us: Latency::of(&latency),
        ..measured
    }
}

fn read_many(path: &Path, seconds: f64, mut random: Rng) -> io::Result<Measured> {
    let (file, blocks) = open_direct(path)?;
    let mut reader = aio::Queue::new(file, aio::Call::Read, DEPTH, 1)?;
    let check = |offset, data: &[u8]| check_block(offset / BLOCK as u64, data);
    let measured = for_a_while(seconds, || {
        reader.submit(|_| random.u64(..blocks) * BLOCK as u64)?;
        reader.wait(check)
    })?;
    while reader.is_busy() {
        reader.wait(check)?;
    }
    Ok(measured)
}

fn open_dir(path: &Path) -> io::Result<rustix::fd::OwnedFd> {
    Ok(rustix::fs::openat(
        CWD,
        path,
        OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Does `one` with each number and name, in their order.
fn each_file(
    numbers: Vec<u64>,
    mut one: impl FnMut(u64, &str) -> io::Result<()>,
) -> io::Result<Measured> {
    let names: Vec<(u64, String)> = numbers.into_iter().map(|n| (n, file_name(n))).collect();
    let mut latency = Histogram::default();
    let watch = Watch::start();
    for (turn, (number, name)) in (1..).zip(&names) {
        let start = (turn % TIMED == 0).then(Instant::now);
        one(*number, name)?;
        if let Some(start) = start {
            latency.add(start.elapsed().as_nanos() as u64);
        }
    }
    Ok(timed(watch.stop(names.len() as f64), latency))
}

fn create(path: &Path, files: u64) -> io::Result<Measured> {
    let dir = open_dir(path)?;
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let page = Page::default();
    each_file((0..files).collect(), |_, name| {
        let mut file = File::from(rustix::fs::openat(&dir, name, flags, Mode::from(0o644))?);
        file.write_all(&page.0)
    })
}

fn stat(path: &Path, files: u64, random: Rng) -> io::Result<Measured> {
    let dir = open_dir(path)?;
    each_file(shuffled(random, files), |_, name| {
        let stat = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if stat.st_size != BLOCK as i64 {
            return Err(io::Error::other(format!("{name} has another size")));
        }
        Ok(())
    })
}

fn read_small(path: &Path, files: u64, random: Rng) -> io::Result<Measured> {
    let dir = open_dir(path)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let mut page = Box::new(Page::default());
    each_file(shuffled(random, files), |number, name| {
        let mut file = File::from(rustix::fs::openat(&dir, name, flags, Mode::empty())?);
        let n = file.read(&mut page.0)?;
        check_block(number, &page.0[..n])
    })
}

fn unlink(path: &Path, files: u64, random: Rng) -> io::Result<Measured> {
    let dir = open_dir(path)?;
    each_file(shuffled(random, files), |_, name| {
        Ok(rustix::fs::unlinkat(&dir, name, AtFlags::empty())?)
    })
}

/// Touched before the clock starts, so that its page faults are not counted.
fn stream_buffer() -> Vec<u8> {
    vec![0x5a; STREAM]
}

fn stream_in(path: &Path) -> io::Result<Measured> {
    let mut file = File::open(path)?;
    let mut buffer = stream_buffer();
    let mut total = 0;
    let watch = Watch::start();
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => total += n,
        }
    }
    Ok(watch.stop(total as f64 / STREAM as f64))
}

fn stream_out(path: &Path, bytes: u64) -> io::Result<Measured> {
    let buffer = stream_buffer();
    let mut file = File::create_new(path)?;
    let requests = bytes / STREAM as u64;
    let watch = Watch::start();
    for _ in 0..requests {
        file.write_all(&buffer)?;
    }
    file.sync_all()?;
    drop(file);
    Ok(watch.stop(requests as f64))
}

#[cfg(test)]
mod tests;
