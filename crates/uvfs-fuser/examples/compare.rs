//! The example `either`, served by uvfs and by fuser: rates beside each other.
//!
//! `cargo build --release -p uvfs-fuser --examples`, then as root
//! `target/release/examples/compare [--rounds N] [--threads N] [--jobs N]`
//!
//! Each round mounts each of the two once and runs every kind of work. The order changes from round to
//! round. A line gives the medians, the median of the rounds' ratios, and the least and the largest ratio.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const FILE: usize = 32 * MIB;

/// A kind of work: its name, the operations of all jobs together, and the operation, of a job and a number.
type Work = (&'static str, usize, fn(&Job, usize) -> io::Result<()>);

const WORK: [Work; 8] = [
    ("create a file", 8_000, |job, number| {
        File::create_new(job.name(number)).map(drop)
    }),
    ("look up a missing name", 40_000, |job, number| {
        assert!(fs::metadata(job.name(number + 1_000_000)).is_err());
        Ok(())
    }),
    ("open and close", 20_000, |job, _| {
        File::open(job.data.as_path()).map(drop)
    }),
    ("write 4 KiB", 40_000, |job, number| {
        job.write(number, 4 * KIB)
    }),
    ("read 4 KiB", 40_000, |job, number| {
        job.read(number, 4 * KIB)
    }),
    ("write 1 MiB", 2_000, |job, number| job.write(number, MIB)),
    ("read 1 MiB", 2_000, |job, number| job.read(number, MIB)),
    ("remove a file", 8_000, |job, number| {
        fs::remove_file(job.name(number))
    }),
];

/// One of the callers, with a directory and an open file of its own.
struct Job {
    at: PathBuf,
    data: PathBuf,
    file: File,
    /// Memory on a page boundary, as direct I/O wants it.
    memory: std::cell::RefCell<Vec<u8>>,
}

impl Job {
    fn new(root: &Path, number: usize) -> io::Result<Self> {
        let at = root.join(format!("job-{number}"));
        fs::create_dir(&at)?;
        let data = at.join("data");
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        let file = options.custom_flags(libc::O_DIRECT).open(&data)?;
        let job = Self {
            at,
            data,
            file,
            memory: vec![b'x'; MIB + 4 * KIB].into(),
        };
        for number in 0..FILE / MIB {
            job.write(number, MIB)?;
        }
        Ok(job)
    }

    fn name(&self, number: usize) -> PathBuf {
        self.at.join(format!("file-{number}"))
    }

    fn place(number: usize, len: usize) -> u64 {
        (number.wrapping_mul(7919) % (FILE / len) * len) as u64
    }

    fn write(&self, number: usize, len: usize) -> io::Result<()> {
        let memory = self.memory.borrow();
        let from = memory.as_ptr().align_offset(4 * KIB);
        (self.file).write_all_at(&memory[from..from + len], Self::place(number, len))
    }

    fn read(&self, number: usize, len: usize) -> io::Result<()> {
        let mut memory = self.memory.borrow_mut();
        let from = memory.as_ptr().align_offset(4 * KIB);
        (self.file).read_exact_at(&mut memory[from..from + len], Self::place(number, len))
    }
}

/// A mount that ends when this is dropped.
struct Served<'a>(Child, &'a Path);

impl<'a> Served<'a> {
    fn new(at: &'a Path, threads: usize, by_fuser: bool) -> io::Result<Self> {
        let example = std::env::current_exe()?.with_file_name("either");
        let mut server = Command::new(example);
        server.arg(at).args(["--threads", &threads.to_string()]);
        if by_fuser {
            server.arg("--fuser");
        }
        let served = Self(server.spawn()?, at);
        let end = Instant::now() + Duration::from_secs(10);
        while fs::read_to_string("/proc/self/mountinfo")?
            .lines()
            .all(|line| line.split(' ').nth(4) != at.to_str())
        {
            assert!(Instant::now() < end, "no mount after ten seconds");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(served)
    }
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.1, rustix::mount::UnmountFlags::empty());
        let _ = self.0.wait();
    }
}

/// The operations in a second, of each kind.
fn round(at: &Path, threads: usize, jobs: usize, by_fuser: bool) -> io::Result<Vec<f64>> {
    let _served = Served::new(at, threads, by_fuser)?;
    // Dropped before the mount, which could not end while files are open.
    let callers: io::Result<Vec<_>> = (0..jobs).map(|number| Job::new(at, number)).collect();
    let mut callers = callers?;
    let mut rates = Vec::new();
    for (_, count, operation) in WORK {
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let run = |job: &mut Job| -> io::Result<()> {
                (0..count / jobs).try_for_each(|number| operation(job, number))
            };
            let running: Vec<_> = callers
                .iter_mut()
                .map(|job| scope.spawn(move || run(job)))
                .collect();
            running
                .into_iter()
                .try_for_each(|running| running.join().unwrap())
        })?;
        rates.push(count as f64 / begin.elapsed().as_secs_f64());
    }
    Ok(rates)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> io::Result<()> {
    let (mut rounds, mut threads, mut jobs) = (7, 1, 1);
    let mut args = std::env::args().skip(1);
    while let (Some(name), Some(value)) = (args.next(), args.next()) {
        let value = value.parse().expect("a number");
        match name.as_str() {
            "--rounds" => rounds = value,
            "--threads" => threads = value,
            "--jobs" => jobs = value,
            _ => panic!("{name} is no option: --rounds, --threads, --jobs"),
        }
    }
    let dir = tempfile::tempdir()?;
    let mut pairs = Vec::new();
    for number in 0..rounds {
        let uvfs_first = number % 2 == 0;
        let first = round(dir.path(), threads, jobs, !uvfs_first)?;
        let second = round(dir.path(), threads, jobs, uvfs_first)?;
        pairs.push(match uvfs_first {
            true => (first, second),
            false => (second, first),
        });
    }
    println!("{rounds} rounds, {threads} threads, {jobs} jobs");
    println!("                           fuser/s    uvfs/s   ratio  (least to largest)");
    for (kind, (name, ..)) in WORK.iter().enumerate() {
        let of = |value: fn(f64, f64) -> f64| -> Vec<f64> {
            let values = pairs.iter().map(|(uvfs, fuser)| (uvfs[kind], fuser[kind]));
            values.map(|(uvfs, fuser)| value(uvfs, fuser)).collect()
        };
        let ratios = of(|uvfs, fuser| uvfs / fuser);
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let most = ratios.iter().copied().fold(0.0, f64::max);
        println!(
            "{name:24} {:9.0} {:9.0} {:7.2}  ({least:.2} to {most:.2})",
            median(of(|_, fuser| fuser)),
            median(of(|uvfs, _| uvfs)),
            median(ratios),
        );
    }
    Ok(())
}
