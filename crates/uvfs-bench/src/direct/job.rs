//! Direct calls on a file whose store takes its time.

use std::collections::VecDeque;
use std::fs::File as HostFile;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uvfs_client::{Client, Config, File, Flags, OpenOptions};

use super::super::aio;
use super::super::files::{BLOCK, Page};
use super::super::measure::{Measured, for_a_while};
use super::super::store;

/// Bytes of a call that is waited for.
pub const CALL: usize = 2 << 20;

/// Bytes that the store takes at once, and of a call of many.
pub const PIECE: usize = 128 << 10;

/// Calls of [`PIECE`] bytes at a time.
const DEPTH: usize = CALL / PIECE;

/// The calls that a program makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Calls {
    /// One after another, each of [`CALL`] bytes.
    One,
    /// Many of [`PIECE`] bytes at a time.
    Many,
}

/// How the file is reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "way", rename_all = "kebab-case")]
pub enum DirectAccess {
    /// By the host's system calls, with O_DIRECT, on this file.
    Host {
        /// The file.
        path: PathBuf,
    },
    /// By `uvfs-client` over a store in the same process.
    Client {
        /// The contents of the store's file.
        data: PathBuf,
        /// The store takes so much longer for each piece.
        latency_us: u64,
        /// A call for each piece, each waited for: what a file system does that cuts requests.
        one_at_a_time: bool,
    },
}

/// The calls, and the file that they go to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DirectJob {
    /// How. The file has `bytes` bytes; each 4 KiB block begins with its number.
    pub way: DirectAccess,
    /// Writes, not reads.
    pub write: bool,
    /// Their size and number at a time.
    pub calls: Calls,
    /// The file's size, a multiple of [`CALL`].
    pub bytes: u64,
    /// How long to go on.
    pub seconds: f64,
}

impl DirectJob {
    /// Does it.
    pub fn run(&self) -> io::Result<Measured> {
        let measured = match &self.way {
            DirectAccess::Host { path } => {
                let file = HostFile::options()
                    .read(true)
                    .write(self.write)
                    .custom_flags(libc::O_DIRECT)
                    .open(path)?;
                match self.calls {
                    Calls::Many => self.queue(file)?,
                    Calls::One => self.calls(&mut |buffer, at| {
                        match self.write {
                            true => file.write_at(buffer, at),
                            false => file.read_at(buffer, at),
                        }
                        .and_then(|moved| whole(moved, buffer.len()))
                    })?,
                }
            }
            DirectAccess::Client {
                data,
                latency_us,
                one_at_a_time,
            } => {
                let (_serving, connection) = store::slow(Some(data), *latency_us, self.bytes)?;
                let config = Config::default().max_request(PIECE);
                let client = Client::new(connection, config)?;
                let options = OpenOptions::new().read(true).write(self.write);
                let file = client.open("0", options)?;
                let size = if *one_at_a_time { PIECE } else { CALL };
                match self.calls == Calls::Many && !one_at_a_time {
                    true => self.submitted(&file)?,
                    false => self.calls(&mut |buffer, at| {
                        let mut parts = (at..).step_by(size).zip(buffer.chunks_mut(size));
                        parts.try_for_each(|(at, part)| {
                            match self.write {
                                true => file.write_at(part, at, Flags::DIRECT),
                                false => file.read_at(part, at, Flags::DIRECT),
                            }
                            .map_err(io::Error::from)
                            .and_then(|moved| whole(moved, size))
                        })
                    })?,
                }
            }
        };
        Ok(Measured {
            amount: measured.amount / f64::from(1 << 20),
            ..measured
        })
    }

    /// Calls one after another.
    fn calls(
        &self,
        call: &mut dyn FnMut(&mut [u8], u64) -> io::Result<()>,
    ) -> io::Result<Measured> {
        let mut pages = vec![Page::default(); CALL / BLOCK];
        let buffer = Page::bytes_mut(&mut pages);
        let mut next = 0;
        for_a_while(self.seconds, || {
            let at = self.advance(&mut next, CALL);
            if self.write {
                stamp(buffer, at);
            }
            call(buffer, at)?;
            if !self.write {
                check(buffer, at)?;
            }
            Ok(CALL as u64)
        })
    }

    /// Many calls at a time by libaio's system calls.
    fn queue(&self, file: HostFile) -> io::Result<Measured> {
        let call = match self.write {
            true => aio::Call::Write,
            false => aio::Call::Read,
        };
        let mut queue = aio::Queue::new(file, call, DEPTH, PIECE / BLOCK)?;
        let mut next = 0;
        let ended = |at: u64, data: &[u8]| {
            whole(data.len(), PIECE)?;
            if self.write { Ok(()) } else { check(data, at) }
        };
        let measured = for_a_while(self.seconds, || {
            queue.submit(|piece| {
                let at = self.advance(&mut next, PIECE);
                if self.write {
                    stamp(piece, at);
                }
                at
            })?;
            Ok(queue.wait(ended)? * PIECE as u64)
        })?;
        while queue.is_busy() {
            queue.wait(ended)?;
        }
        Ok(measured)
    }

    /// Many calls at a time by a client's.
    fn submitted(&self, file: &File) -> io::Result<Measured> {
        let mut reads = VecDeque::new();
        let mut writes = VecDeque::new();
        let mut buffers = vec![vec![0; PIECE]; DEPTH];
        let mut next = 0;
        for_a_while(self.seconds, || {
            while let Some(mut buffer) = buffers.pop() {
                let at = self.advance(&mut next, PIECE);
                if self.write {
                    stamp(&mut buffer, at);
                    writes.push_back(file.submit_write_at(&buffer, at, Flags::DIRECT));
                } else {
                    reads.push_back((at, file.submit_read_at(buffer, at, Flags::DIRECT)));
                }
            }
            if let Some(pending) = writes.pop_front() {
                whole(pending.wait()?, PIECE)?;
                buffers.push(vec![0; PIECE]);
            }
            if let Some((at, pending)) = reads.pop_front() {
                let buffer = pending.wait()?;
                whole(buffer.len(), PIECE)?;
                check(&buffer, at)?;
                buffers.push(buffer);
            }
            Ok(PIECE as u64)
        })
    }

    /// The place of the next call of so many bytes.
    fn advance(&self, next: &mut u64, size: usize) -> u64 {
        let at = *next;
        *next = (at + size as u64) % self.bytes;
        at
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

/// A fast file system that has other bytes has measured nothing.
pub fn check(buffer: &[u8], offset: u64) -> io::Result<()> {
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

    fn ways(dir: &std::path::Path) -> Vec<DirectAccess> {
        let client = |one_at_a_time| DirectAccess::Client {
            data: dir.join("data"),
            latency_us: 1,
            one_at_a_time,
        };
        let mut ways = vec![client(true), client(false)];
        let path = dir.join("data");
        // Not every file system that holds temporary files does direct I/O.
        let direct = HostFile::options()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(&path);
        if direct.is_ok() {
            ways.push(DirectAccess::Host { path });
        }
        ways
    }

    /// Every way that `uvfs bench direct` measures moves the right bytes.
    #[test]
    fn every_way_reads_and_writes_the_right_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let mut data = vec![7; 2 * CALL];
        stamp(&mut data, 0);
        std::fs::write(&path, &data).unwrap();
        for way in ways(dir.path()) {
            let calls = [Calls::One, Calls::Many];
            for (write, calls) in [false, true].iter().flat_map(|w| calls.map(|c| (*w, c))) {
                let job = DirectJob {
                    way: way.clone(),
                    write,
                    calls,
                    bytes: 2 * CALL as u64,
                    seconds: 0.001,
                };
                if write {
                    std::fs::write(&path, vec![7; 2 * CALL]).unwrap();
                    // Long enough to come around.
                    let job = DirectJob {
                        seconds: 0.1,
                        ..job
                    };
                    assert!(job.run().unwrap().amount >= 4.0, "{job:?}");
                    check(&std::fs::read(&path).unwrap(), 0).unwrap();
                } else {
                    assert!(job.run().unwrap().amount > 0.0, "{job:?}");
                }
            }
        }
        std::fs::write(&path, vec![7; 2 * CALL]).unwrap();
        for way in ways(dir.path()) {
            for calls in [Calls::One, Calls::Many] {
                let job = DirectJob {
                    way: way.clone(),
                    write: false,
                    calls,
                    bytes: 2 * CALL as u64,
                    seconds: 0.001,
                };
                assert!(job.run().is_err(), "other bytes are found out: {job:?}");
            }
        }
    }
}
