//! The using side of a benchmark, as a process of its own (`uvfs bench client JOB`).
//!
//! A job comes as one JSON argument and its result goes as one JSON line to standard output.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::process::Signal;
use rustix::thread::CpuSet;
use rustix::time::ClockId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uvfs_cli::{Context, Error, Result};

use super::aio;
use super::child::Process;
use super::direct;
use super::load;
use super::server::own_path;
use super::stats::{Histogram, Latency};
use super::store;
use super::uncached;
use super::writeback;

/// The size of a small request and of a small file, in bytes.
pub const BLOCK: usize = 4096;

/// The size of a streaming request, in bytes.
const STREAM: usize = 1 << 20;

/// Looking at the clock costs something beside an operation that stays in the kernel: of so many operations the
/// last is timed.
const TIMED: u64 = 8;

/// Reads in flight in [`Work::Read16`].
const DEPTH: usize = 16;

/// A client that takes this much longer than its job says is stuck.
const PATIENCE: Duration = Duration::from_secs(60);

/// Memory that direct I/O may use.
#[derive(Clone, Copy)]
#[repr(align(4096))]
pub struct Page(pub [u8; BLOCK]);

impl Default for Page {
    fn default() -> Self {
        Self([0; BLOCK])
    }
}

impl Page {
    /// Their bytes.
    pub fn bytes_mut(pages: &mut [Self]) -> &mut [u8] {
        let len = size_of_val(pages);
        // SAFETY: pages are arrays of bytes one after another, and the slice borrows them.
        unsafe { std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast(), len) }
    }
}

/// What a client does with files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
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

impl Work {
    /// Every work, in the order in which they run.
    pub const ALL: [Work; 8] = [
        Work::Read1,
        Work::Read16,
        Work::Create,
        Work::Stat,
        Work::Read,
        Work::Unlink,
        Work::Seqread,
        Work::Seqwrite,
    ];

    /// The name on the command line and in the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Work::Read1 => "read-1",
            Work::Read16 => "read-16",
            Work::Create => "create",
            Work::Stat => "stat",
            Work::Read => "read",
            Work::Unlink => "unlink",
            Work::Seqread => "seqread",
            Work::Seqwrite => "seqwrite",
        }
    }
}

/// What a client is asked to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "job", rename_all = "kebab-case")]
pub enum Job {
    /// Wait until another file system than that of device number `old_dev` answers at `path`.
    WaitMounted { path: PathBuf, old_dev: u64 },
    /// Wait until a server listens at the socket.
    WaitSocket { path: PathBuf },
    /// See [`direct::job`].
    Direct(direct::job::Job),
    /// See [`writeback::job`].
    Writeback(writeback::job::Job),
    /// See [`uncached::job`].
    Uncached(uncached::job::Job),
    /// See [`load::job`].
    Load(load::job::Job),
    /// See [`store`].
    Store(store::Job),
    /// Keep a CPU busy until the process is ended.
    Spin,
    /// Do a work and measure it.
    Work {
        work: Work,
        /// The file of the reads and `seqwrite`, or the directory of the small files.
        path: PathBuf,
        /// How long the direct reads go on, in seconds.
        seconds: f64,
        /// The number of small files.
        files: u64,
        /// The size of the file that `seqwrite` writes.
        bytes: u64,
        /// The CPU that the client is to stay on.
        cpu: Option<usize>,
        /// Where the random orders start.
        seed: u64,
    },
}

/// What a client measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Operations, or MiB for the streams.
    pub amount: f64,
    /// Wall time, in seconds.
    pub seconds: f64,
    /// CPU time of the client, in seconds.
    pub cpu_seconds: f64,
    /// MiB that the cache in use held at most, where that is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<f64>,
    /// MiB by which the host's page cache grew, where that is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_cache_mib: Option<f64>,
    /// CPU time of the kernel's threads that reclaim memory (kswapd), in seconds, where that is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kswapd_cpu_seconds: Option<f64>,
    /// How long an operation took, where that is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<Latency>,
    /// How long each timed operation took, in nanoseconds, where all rounds are to be shown together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub histogram: Option<Histogram>,
}

/// The name of small file number `number`.
pub fn file_name(number: u64) -> String {
    format!("f{number:07}")
}

impl Job {
    /// Starts a client process for this job.
    pub fn spawn(&self) -> Result<Process> {
        self.spawn_by(Command::new(own_path()?))
    }

    /// The same by a command that runs uvfs with the arguments that are added.
    pub fn spawn_by(&self, mut command: Command) -> Result<Process> {
        self.add_to(&mut command)?;
        Process::spawn(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped()),
            Signal::KILL,
        )
    }

    /// Adds the arguments that have uvfs run this job.
    pub fn add_to(&self, command: &mut Command) -> Result<()> {
        let job = serde_json::to_string(self).context(|| "describing a job".into())?;
        command.args(["bench", "client", &job]);
        Ok(())
    }

    /// Runs this job in a client process. Ends early when `server` does.
    pub fn run<T: DeserializeOwned>(&self, server: Option<&Process>) -> Result<T> {
        let limit = match self {
            Job::Work { seconds, .. } => PATIENCE + Duration::from_secs_f64(2.0 * seconds),
            Job::Uncached(job) => PATIENCE + Duration::from_secs(2 * job.seconds as u64),
            _ => PATIENCE,
        };
        let mut client = self.spawn()?;
        client.finish(server, limit)?;
        finished(&mut client)
    }
}

/// The result of a client that has ended.
pub fn finished<T: DeserializeOwned>(client: &mut Process) -> Result<T> {
    let (out, err) = client.output();
    client.wait(PATIENCE);
    match client.status() {
        Some(status) if status.success() => {
            serde_json::from_str(&out).context(|| "reading the client's result".into())
        }
        _ => {
            let line = err.lines().rfind(|l| !l.trim().is_empty());
            let line = line.unwrap_or("the client ended without a word");
            Err(Error::new(line.trim_start_matches("uvfs: ")))
        }
    }
}

/// The hidden command's arguments.
#[derive(clap::Args)]
pub struct Args {
    /// The job, as JSON.
    job: String,
}

/// Does the job and prints its result.
pub fn run(args: Args) -> Result<ExitCode> {
    let job: Job =
        serde_json::from_str(&args.job).map_err(|e| Error::usage(format!("the job: {e}")))?;
    let measured = match job {
        Job::Uncached(job) => return answer(&job.run().context(|| "a stream".into())?),
        Job::Load(job) => return answer(&job.run().context(|| "one of many".into())?),
        Job::Store(job) => {
            job.run().context(|| "a store".into())?;
            return Ok(ExitCode::SUCCESS);
        }
        Job::Spin => loop {
            std::hint::spin_loop();
        },
        Job::WaitMounted { path, old_dev } => wait_mounted(&path, old_dev)?,
        Job::WaitSocket { path } => wait_socket(&path),
        Job::Direct(job) => job.run().context(|| "direct calls".into())?,
        Job::Writeback(job) => job.run().context(|| "buffered writes".into())?,
        Job::Work {
            work,
            path,
            seconds,
            files,
            bytes,
            cpu,
            seed,
        } => {
            if let Some(cpu) = cpu {
                pin(cpu)?;
            }
            let random = Random(seed);
            match work {
                Work::Read1 => read_one(&path, seconds, random),
                Work::Read16 => read_many(&path, seconds, random),
                Work::Create => create(&path, files),
                Work::Stat => stat(&path, files, random),
                Work::Read => read_small(&path, files, random),
                Work::Unlink => unlink(&path, files, random),
                Work::Seqread => stream_in(&path),
                Work::Seqwrite => stream_out(&path, bytes),
            }
            .context(|| work.name().to_string())?
        }
    };
    answer(&measured)
}

fn answer(measured: &impl Serialize) -> Result<ExitCode> {
    let line = serde_json::to_string(measured).context(|| "describing the result".into())?;
    println!("{line}");
    Ok(ExitCode::SUCCESS)
}

fn wait_mounted(path: &Path, old_dev: u64) -> Result<Measured> {
    // The parent bounds this.
    while fs::metadata(path).map_or(true, |m| m.dev() == old_dev) {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(Measured::default())
}

fn wait_socket(path: &Path) -> Measured {
    // The parent bounds this.
    while UnixStream::connect(path).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
    Measured::default()
}

fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).context(|| format!("pinning to CPU {cpu}"))
}

/// SplitMix64: a fixed sequence for a fixed seed.
pub struct Random(pub u64);

impl Random {
    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    /// The numbers below `count` in random order.
    pub fn shuffled(&mut self, count: u64) -> Vec<u64> {
        let mut numbers: Vec<u64> = (0..count).collect();
        for i in (1..numbers.len()).rev() {
            numbers.swap(i, self.below(i as u64 + 1) as usize);
        }
        numbers
    }
}

/// Wall and CPU time from a moment on.
pub struct Watch {
    pub start: Instant,
    cpu: f64,
}

impl Watch {
    pub fn start() -> Self {
        Self {
            cpu: cpu_seconds(),
            start: Instant::now(),
        }
    }

    pub fn stop(&self, amount: f64) -> Measured {
        Measured {
            amount,
            seconds: self.start.elapsed().as_secs_f64(),
            cpu_seconds: cpu_seconds() - self.cpu,
            ..Measured::default()
        }
    }
}

fn cpu_seconds() -> f64 {
    let t = rustix::time::clock_gettime(ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// Repeats `batch`, which returns how many operations it did, for a tenth of `seconds` to warm
/// up, and then for `seconds`.
pub fn for_a_while(
    seconds: f64,
    mut batch: impl FnMut() -> io::Result<u64>,
) -> io::Result<Measured> {
    let mut repeat = |limit: f64| {
        let watch = Watch::start();
        let mut done = 0;
        while watch.start.elapsed().as_secs_f64() < limit {
            done += batch()?;
        }
        io::Result::Ok(watch.stop(done as f64))
    };
    repeat(seconds / 10.0)?;
    repeat(seconds)
}

pub fn open_direct(path: &Path) -> io::Result<(File, u64)> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)?;
    let blocks = file.metadata()?.len() / BLOCK as u64;
    if blocks == 0 {
        return Err(io::Error::other("the file is empty"));
    }
    Ok((file, blocks))
}

/// A fast server that returns other bytes has measured nothing.
pub fn check_block(number: u64, data: &[u8]) -> io::Result<()> {
    if data.len() == BLOCK && data[..8] == number.to_le_bytes() {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "block {number} came back short or with other bytes"
    )))
}

fn read_one(path: &Path, seconds: f64, mut random: Random) -> io::Result<Measured> {
    let (file, blocks) = open_direct(path)?;
    let mut page = Box::new(Page::default());
    let mut latency = Histogram::default();
    let measured = for_a_while(seconds, || {
        for last in (0..TIMED).rev() {
            let number = random.below(blocks);
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

/// Adds how long operations took.
fn timed(measured: Measured, latency: Histogram) -> Measured {
    Measured {
        latency_us: Latency::of(&latency),
        histogram: Some(latency),
        ..measured
    }
}

fn read_many(path: &Path, seconds: f64, mut random: Random) -> io::Result<Measured> {
    let (file, blocks) = open_direct(path)?;
    let mut reader = aio::Queue::new(file, aio::Call::Read, DEPTH, 1)?;
    let check = |offset, data: &[u8]| check_block(offset / BLOCK as u64, data);
    let measured = for_a_while(seconds, || {
        reader.submit(|_| random.below(blocks) * BLOCK as u64)?;
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

fn stat(path: &Path, files: u64, mut random: Random) -> io::Result<Measured> {
    let dir = open_dir(path)?;
    each_file(random.shuffled(files), |_, name| {
        let stat = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if stat.st_size != BLOCK as i64 {
            return Err(io::Error::other(format!("{name} has another size")));
        }
        Ok(())
    })
}

fn read_small(path: &Path, files: u64, mut random: Random) -> io::Result<Measured> {
    let dir = open_dir(path)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let mut page = Box::new(Page::default());
    each_file(random.shuffled(files), |number, name| {
        let mut file = File::from(rustix::fs::openat(&dir, name, flags, Mode::empty())?);
        let n = file.read(&mut page.0)?;
        check_block(number, &page.0[..n])
    })
}

fn unlink(path: &Path, files: u64, mut random: Random) -> io::Result<Measured> {
    let dir = open_dir(path)?;
    each_file(random.shuffled(files), |_, name| {
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
