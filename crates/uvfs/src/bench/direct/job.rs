//! Direct calls of `uvfs-client` over a store that takes its time.

use std::fs::File as HostFile;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use uvfs_client::{Client, Config, Faulty, File, Flags, LocalStore, OpenOptions};

use super::super::client::{BLOCK, Measured, for_a_while};

/// Bytes of a call.
pub const CALL: usize = 2 << 20;

/// Bytes that the store takes at once.
pub const PIECE: usize = 128 << 10;

/// How a call goes to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// A call for each piece, each waited for: what a file system does that cuts requests.
    OneAtATime,
    /// One blocking call.
    AllAtOnce,
    /// One call that is submitted and then waited for.
    AllAtOnceAsync,
}

impl Way {
    /// All of them, with their names; the first is what the others are compared with.
    pub const ALL: [(Way, &'static str); 3] = [
        (Way::OneAtATime, "one-at-a-time"),
        (Way::AllAtOnce, "all-at-once"),
        (Way::AllAtOnceAsync, "all-at-once-async"),
    ];
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// How.
    pub way: Way,
    /// Writes, not reads.
    pub write: bool,
    /// The directory that is the store.
    pub store: PathBuf,
    /// The file in it, of `bytes` bytes; each 4 KiB block begins with its number.
    pub file: String,
    /// Its size, a multiple of [`CALL`].
    pub bytes: u64,
    /// What the store takes longer for each piece.
    pub latency_us: u64,
    /// How long to go on.
    pub seconds: f64,
}

impl Job {
    /// Does it.
    pub fn run(&self) -> io::Result<Measured> {
        let store = Faulty::new(LocalStore::with(&self.store, 1, PIECE)?);
        let fault = store.fault.clone();
        let client = Client::new(store, Config::default())?;
        let options = OpenOptions::new().read(true).write(self.write);
        let file = client.open(&self.file, options)?;
        fault.latency_us.store(self.latency_us, Ordering::Relaxed);
        let mut buffer: Vec<u8> = vec![0; CALL];
        let (mut call, mut last) = (0, 0);
        let measured = for_a_while(self.seconds, || {
            let offset = call * CALL as u64 % self.bytes;
            if self.write {
                stamp(&mut buffer, offset);
                self.write(&file, &buffer, offset)?;
                last = offset;
            } else {
                self.read(&file, &mut buffer, offset)?;
                check(&buffer, offset)?;
            }
            call += 1;
            Ok(1)
        })?;
        if self.write {
            // A fast store that keeps other bytes has measured nothing.
            let host = HostFile::open(self.store.join(&self.file))?;
            host.read_exact_at(&mut buffer, last)?;
            check(&buffer, last)?;
        }
        Ok(Measured {
            amount: measured.amount * (CALL >> 20) as f64,
            ..measured
        })
    }

    fn read(&self, file: &File, buffer: &mut Vec<u8>, offset: u64) -> io::Result<()> {
        match self.way {
            Way::OneAtATime => {
                for (piece, part) in buffer.chunks_mut(PIECE).enumerate() {
                    let at = offset + (piece * PIECE) as u64;
                    whole(file.read_at(part, at, Flags::DIRECT)?, PIECE)?;
                }
                Ok(())
            }
            Way::AllAtOnce => whole(file.read_at(buffer, offset, Flags::DIRECT)?, CALL),
            Way::AllAtOnceAsync => {
                let taken = std::mem::take(buffer);
                *buffer = file.submit_read_at(taken, offset, Flags::DIRECT).wait()?;
                whole(buffer.len(), CALL)
            }
        }
    }

    fn write(&self, file: &File, buffer: &[u8], offset: u64) -> io::Result<()> {
        match self.way {
            Way::OneAtATime => {
                for (piece, part) in buffer.chunks(PIECE).enumerate() {
                    let at = offset + (piece * PIECE) as u64;
                    whole(file.write_at(part, at, Flags::DIRECT)?, PIECE)?;
                }
                Ok(())
            }
            Way::AllAtOnce => whole(file.write_at(buffer, offset, Flags::DIRECT)?, CALL),
            Way::AllAtOnceAsync => {
                let pending = file.submit_write_at(buffer, offset, Flags::DIRECT);
                whole(pending.wait()?, CALL)
            }
        }
    }
}

fn whole(moved: usize, asked: usize) -> io::Result<()> {
    if moved == asked {
        return Ok(());
    }
    Err(io::Error::other(format!("{moved} bytes of {asked} moved")))
}

/// Begins each block with its number.
fn stamp(buffer: &mut [u8], offset: u64) {
    for (number, block) in (offset / BLOCK as u64..).zip(buffer.chunks_mut(BLOCK)) {
        block[..8].copy_from_slice(&number.to_le_bytes());
    }
}

fn check(buffer: &[u8], offset: u64) -> io::Result<()> {
    for (number, block) in (offset / BLOCK as u64..).zip(buffer.chunks(BLOCK)) {
        if block[..8] != number.to_le_bytes() {
            return Err(io::Error::other(format!("block {number} has other bytes")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_reads_and_writes_the_right_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let mut data = vec![7; 2 * CALL];
        stamp(&mut data, 0);
        std::fs::write(dir.path().join("data"), &data).unwrap();
        for (way, _) in Way::ALL {
            for write in [false, true] {
                let job = Job {
                    way,
                    write,
                    store: dir.path().into(),
                    file: "data".into(),
                    bytes: 2 * CALL as u64,
                    latency_us: 1,
                    seconds: 0.001,
                };
                assert!(job.run().unwrap().amount >= 2.0, "{job:?}");
            }
        }
        std::fs::write(dir.path().join("data"), vec![7; 2 * CALL]).unwrap();
        let job = Job {
            way: Way::AllAtOnce,
            write: false,
            store: dir.path().into(),
            file: "data".into(),
            bytes: 2 * CALL as u64,
            latency_us: 0,
            seconds: 0.001,
        };
        assert!(job.run().is_err(), "other bytes are found out");
    }
}
