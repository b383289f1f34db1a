//! The works of the benchmark: each lists, reads or streams the files of a mounted object store.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::files::{BLOCK, check_block, file_name, write_blocks};
use crate::measure::{Measured, Watch};
use crate::stats::{Histogram, Latency};

/// Bytes of a random read.
pub const PIECE: usize = 64 << 10;
/// Threads that read at random.
pub const READERS: usize = 16;
/// The part of the large file that they read.
const PART: u64 = 8;

/// The directories and files of the benchmark.
pub const STREAM: &str = "stream";
pub const RANDOM: &str = "random";
pub const NAMES: &str = "names";
pub const SMALL: &str = "small";

/// A work over a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RemoteWork {
    /// list a directory and stat(2) all that is in it
    List,
    /// read small files, one after another
    Small,
    /// read the small files again
    SmallAgain,
    /// read a large file from its beginning to its end
    Stream,
    /// read the large file again
    StreamAgain,
    /// 16 threads read an eighth of a large file, 64 KiB at a time at random places
    Random,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RemoteJob {
    /// The directory with what the store has.
    pub path: PathBuf,
    pub work: RemoteWork,
    /// Small files.
    pub files: u64,
}

impl RemoteJob {
    /// Does it.
    pub fn run(&self) -> io::Result<Measured> {
        match self.work {
            RemoteWork::List => self.list(),
            RemoteWork::Small | RemoteWork::SmallAgain => self.small(),
            RemoteWork::Stream | RemoteWork::StreamAgain => self.stream(),
            RemoteWork::Random => self.random(),
        }
    }

    fn list(&self) -> io::Result<Measured> {
        let watch = Watch::start();
        let mut seen = 0;
        for entry in fs::read_dir(self.path.join(NAMES))? {
            fs::symlink_metadata(entry?.path())?;
            seen += 1;
        }
        Ok(watch.stop(f64::from(seen)))
    }

    fn small(&self) -> io::Result<Measured> {
        let dir = self.path.join(SMALL);
        let watch = Watch::start();
        let mut names: Vec<_> = fs::read_dir(&dir)?
            .map(|entry| Ok(entry?.path()))
            .collect::<io::Result<_>>()?;
        names.sort();
        if names.len() as u64 != self.files {
            let found = names.len();
            return Err(io::Error::other(format!("{found} files are there")));
        }
        for (number, path) in names.iter().enumerate() {
            let bytes = fs::read(path)?;
            check_block(number as u64, bytes.get(..BLOCK).unwrap_or_default())?;
        }
        Ok(watch.stop(names.len() as f64))
    }

    fn stream(&self) -> io::Result<Measured> {
        let mut buffer = vec![0; 1 << 20];
        let watch = Watch::start();
        let mut file = File::open(self.path.join(STREAM))?;
        let mut at = 0;
        loop {
            let read = file.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            if at % BLOCK as u64 == 0 && read >= BLOCK {
                check_block(at / BLOCK as u64, &buffer[..BLOCK])?;
            }
            at += read as u64;
        }
        if at != file.metadata()?.len() {
            return Err(io::Error::other("the file ended early"));
        }
        Ok(watch.stop(at as f64 / f64::from(1 << 20)))
    }

    fn random(&self) -> io::Result<Measured> {
        let file = File::open(self.path.join(RANDOM))?;
        let pieces = shuffled(file.metadata()?.len() / PIECE as u64);
        let watch = Watch::start();
        let reader = |first: usize| -> io::Result<Histogram> {
            let mut buffer = vec![0; PIECE];
            let mut took = Histogram::default();
            for piece in pieces.iter().skip(first).step_by(READERS) {
                let begin = std::time::Instant::now();
                file.read_exact_at(&mut buffer, piece * PIECE as u64)?;
                took.add(begin.elapsed().as_nanos() as u64);
                check_block(piece * (PIECE / BLOCK) as u64, &buffer[..BLOCK])?;
            }
            Ok(took)
        };
        let all = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..READERS)
                .map(|first| scope.spawn(move || reader(first)))
                .collect();
            let mut all = Histogram::default();
            for reader in readers {
                all.merge(&reader.join().expect("a reader does not panic")?);
            }
            io::Result::Ok(all)
        })?;
        let mut measured = watch.stop(all.count() as f64);
        measured.latency_us = Latency::of(&all);
        Ok(measured)
    }
}

/// The pieces that are read of so many, each once, in the order of the reads.
pub fn shuffled(pieces: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..pieces).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut order);
    order.truncate((pieces / PART) as usize);
    order
}

/// Makes what the works read, in a directory of the store.
pub fn fill(dir: &std::path::Path, bytes: u64, names: u64, files: u64) -> io::Result<()> {
    for large in [STREAM, RANDOM] {
        write_blocks(&dir.join(large), 0..bytes / BLOCK as u64)?;
    }
    for (name, count, blocks) in [(NAMES, names, 0), (SMALL, files, 4)] {
        fs::create_dir(dir.join(name))?;
        for number in 0..count {
            let path = dir.join(name).join(file_name(number));
            write_blocks(&path, number..number + blocks)?;
        }
    }
    Ok(())
}
