//! One of several processes that do the same at the same time.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::super::files::{BLOCK, Page, check_block, file_name, open_direct};
use super::super::measure::{Measured, Watch};
use super::super::stats::Histogram;

/// The work of a process, by calls of the C library: `uvfs run` sees no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LoadWork {
    /// 4 KiB random direct reads of a file that all processes share
    Direct,
    /// 4 KiB random buffered reads of a file of its own, which it has read once before
    Buffered,
    /// create, write, close and unlink a 4 KiB file in a directory of its own
    Create,
    /// stat files in random order
    Stat,
    /// open, read and close 4 KiB files in random order
    Open,
}

/// The work, and when it begins and ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadJob {
    /// The work to do.
    pub work: LoadWork,
    /// The file, or the directory of the small files.
    pub path: PathBuf,
    /// The number of small files.
    pub files: u64,
    /// How long, in seconds.
    pub seconds: f64,
    /// Where the random orders start.
    pub seed: u64,
    /// The file to make when all is prepared.
    pub ready: PathBuf,
    /// The file that is locked until all processes are prepared.
    pub gate: PathBuf,
}

/// The figures of one process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Loaded {
    /// Operations and time.
    pub measured: Measured,
    /// How long each operation took, in nanoseconds.
    pub latency: Histogram,
}

impl LoadJob {
    /// Prepares it, waits for the others, and does it.
    pub fn run(&self) -> io::Result<Loaded> {
        let mut operation = self.prepare()?;
        File::create(&self.ready)?;
        flock(File::open(&self.gate)?, FlockOperation::LockShared)?;
        repeat(self.seconds / 10.0, &mut operation)?;
        repeat(self.seconds, &mut operation)
    }

    /// One operation, to be called again and again.
    fn prepare(&self) -> io::Result<Box<dyn FnMut() -> io::Result<()> + '_>> {
        let mut random = fastrand::Rng::with_seed(self.seed);
        let mut page = Box::new(Page::default());
        Ok(match self.work {
            LoadWork::Direct | LoadWork::Buffered => {
                let (file, blocks) = if self.work == LoadWork::Direct {
                    open_direct(&self.path)?
                } else {
                    let mut file = File::open(&self.path)?;
                    let bytes = io::copy(&mut file, &mut io::sink())?;
                    (file, bytes / BLOCK as u64)
                };
                Box::new(move || {
                    let number = random.u64(..blocks);
                    let n = file.read_at(&mut page.0, number * BLOCK as u64)?;
                    check_block(number, &page.0[..n])
                })
            }
            LoadWork::Create => {
                let path = self.path.join(file_name(0));
                Box::new(move || {
                    fs::write(&path, page.0)?;
                    fs::remove_file(&path)
                })
            }
            LoadWork::Stat => Box::new(move || {
                let path = self.path.join(file_name(random.u64(..self.files)));
                match fs::metadata(path)?.len() {
                    len if len == BLOCK as u64 => Ok(()),
                    _ => Err(io::Error::other("a file has another size")),
                }
            }),
            LoadWork::Open => Box::new(move || {
                let number = random.u64(..self.files);
                let mut file = File::open(self.path.join(file_name(number)))?;
                let n = file.read(&mut page.0)?;
                check_block(number, &page.0[..n])
            }),
        })
    }
}

/// Does it for this many seconds.
fn repeat(seconds: f64, operation: &mut dyn FnMut() -> io::Result<()>) -> io::Result<Loaded> {
    let (mut operations, mut latency) = (0_u64, Histogram::default());
    let limit = Duration::from_secs_f64(seconds);
    let watch = Watch::start();
    let mut before = watch.start;
    while before - watch.start < limit {
        operation()?;
        let now = Instant::now();
        latency.add((now - before).as_nanos() as u64);
        before = now;
        operations += 1;
    }
    Ok(Loaded {
        measured: watch.stop(operations as f64),
        latency,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;
    use clap::ValueEnum;

    /// `uvfs bench load` counts each operation, and leaves no files behind.
    #[test]
    fn every_work_counts_its_operations() {
        let parent = tempfile::tempdir().unwrap();
        let workspace = Workspace::new(Some(parent.path()), 1 << 20).unwrap();
        workspace.fill("data", 8 * BLOCK as u64).unwrap();
        workspace.populate("small", 5).unwrap();
        workspace.populate("own", 0).unwrap();
        let gate = workspace.beside("gate");
        File::create(&gate).unwrap();
        for &work in LoadWork::value_variants() {
            let name = match work {
                // Not every file system that holds temporary files does direct I/O.
                LoadWork::Direct => continue,
                LoadWork::Buffered => "data",
                LoadWork::Create => "own",
                LoadWork::Stat | LoadWork::Open => "small",
            };
            let job = LoadJob {
                work,
                path: workspace.source().join(name),
                files: 5,
                seconds: 0.01,
                seed: 1,
                ready: workspace.beside("ready"),
                gate: gate.clone(),
            };
            let done = job.run().unwrap();
            assert!(done.measured.amount > 0.0);
            assert_eq!(done.measured.amount, done.latency.count() as f64);
            assert!(workspace.beside("ready").exists());
        }
        assert_eq!(
            fs::read_dir(workspace.source().join("own"))
                .unwrap()
                .count(),
            0
        );
    }
}
