//! Several writers, each with a new file of its own.

use std::fs::File as HostFile;
use std::io::{self, Write};
use std::path::PathBuf;
use std::thread;

use serde::{Deserialize, Serialize};
use uvfs_client::{Client, Config, Connection, File, Flags, OpenOptions};

use super::super::measure::{Measured, Watch};
use super::super::store;
use super::copying;

/// The value of every byte.
pub const FILL: u8 = 0x5a;

/// How the files are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WritebackAccess {
    /// By system calls, in a directory.
    Host,
    /// By `uvfs-client` over a server of a directory in the same process.
    Local,
    /// The same with a layer that copies pages ([`copying`]).
    Copying,
    /// By `uvfs-client` over the socket of `uvfs serve`.
    Served,
}

/// The writers and their files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WritebackJob {
    /// How.
    pub way: WritebackAccess,
    /// The directory or the socket.
    pub path: PathBuf,
    /// A file for each writer, which must not be there yet; with `discard` a store's.
    pub files: Vec<String>,
    /// A store throws the data away, and has the files.
    pub discard: bool,
    /// A client drops pages once they are written.
    pub uncached: bool,
    /// Bytes of a write.
    pub block: usize,
    /// Bytes of a file.
    pub bytes: u64,
    /// Bytes of the client's cache.
    pub memory: usize,
}

/// A file in the making.
enum Output {
    Host(HostFile),
    Client(File, Flags),
}

impl Output {
    fn fill(mut self, block: &[u8], bytes: u64) -> io::Result<()> {
        let mut at = 0;
        while at < bytes {
            let part = &block[..block.len().min((bytes - at) as usize)];
            match &mut self {
                Output::Host(file) => file.write_all(part)?,
                Output::Client(file, flags) => {
                    file.write_at(part, at, *flags)?;
                }
            }
            at += part.len() as u64;
        }
        match self {
            Output::Host(file) => file.sync_all(),
            Output::Client(file, _) => Ok(file.sync_all()?),
        }
    }
}

impl WritebackJob {
    /// Does it. Making the files does not count, making them durable does.
    pub fn run(&self) -> io::Result<Measured> {
        let config = Config::default().memory(self.memory);
        let (_serving, connection) = match self.way {
            WritebackAccess::Host => (None, None),
            WritebackAccess::Served => (None, Some(Connection::connect(&self.path)?)),
            WritebackAccess::Local | WritebackAccess::Copying => {
                let (serving, connection) = match self.discard {
                    true => store::slow(None, 0, self.bytes)?,
                    false => store::directory(&self.path)?,
                };
                (Some(serving), Some(connection))
            }
        };
        let client = match connection {
            Some(connection) if self.way == WritebackAccess::Copying => {
                Some(copying::client(connection, self.memory)?)
            }
            Some(connection) => Some(Client::new(connection, config)?),
            None => None,
        };
        let mut flags = Flags::empty();
        flags.set(Flags::DONTCACHE, self.uncached);
        let open = |name: &String| match &client {
            None if self.discard => HostFile::options()
                .write(true)
                .open(self.path.join(name))
                .map(Output::Host),
            None => HostFile::create_new(self.path.join(name)).map(Output::Host),
            Some(client) => Ok(Output::Client(
                client.open(name, OpenOptions::new().write(true).create(!self.discard))?,
                flags,
            )),
        };
        let outputs: Vec<Output> = self.files.iter().map(open).collect::<io::Result<_>>()?;
        let block = vec![FILL; self.block];
        let watch = Watch::start();
        let written: io::Result<()> = thread::scope(|scope| {
            let writers: Vec<_> = outputs
                .into_iter()
                .map(|output| scope.spawn(|| output.fill(&block, self.bytes)))
                .collect();
            writers
                .into_iter()
                .try_for_each(|w| w.join().expect("a writer does not panic"))
        });
        written?;
        let total = self.bytes * self.files.len() as u64;
        Ok(watch.stop(total as f64 / f64::from(1 << 20)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every way that `uvfs bench writeback` measures writes all bytes.
    #[test]
    fn every_way_without_a_server_writes_all_bytes() {
        for (way, block, uncached) in [
            (WritebackAccess::Host, 1000, false),
            (WritebackAccess::Local, 4096, false),
            (WritebackAccess::Local, 1000, true),
            (WritebackAccess::Copying, 4096, false),
            (WritebackAccess::Copying, 1000, false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let job = WritebackJob {
                way,
                path: dir.path().into(),
                files: vec!["a".into(), "b".into()],
                discard: false,
                uncached,
                block,
                bytes: 3 << 20,
                memory: 1 << 20,
            };
            assert_eq!(job.run().unwrap().amount, 6.0);
            for name in ["a", "b"] {
                let data = std::fs::read(dir.path().join(name)).unwrap();
                assert_eq!(data.len(), 3 << 20, "{job:?}");
                assert!(data.iter().all(|&byte| byte == FILL), "{job:?}");
            }
        }
    }

    /// A store that discards data writes none of it.
    #[test]
    fn a_store_that_discards_keeps_nothing() {
        for way in [WritebackAccess::Local, WritebackAccess::Copying] {
            let dir = tempfile::tempdir().unwrap();
            let job = WritebackJob {
                way,
                path: dir.path().into(),
                files: vec!["0".into()],
                discard: true,
                uncached: false,
                block: 4096,
                bytes: 3 << 20,
                memory: 1 << 20,
            };
            assert_eq!(job.run().unwrap().amount, 3.0);
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{job:?}");
        }
    }
}
