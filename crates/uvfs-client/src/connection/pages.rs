//! Reads and writes between files and the pages that the client shares with its server.

use rustix::io::Errno;
use uvfs_proto::abi::{self, Opcode};
use uvfs_queue::pair::Seg;
use zerocopy::IntoBytes;

use super::Connection;
use super::channel::Waiting;
use crate::NodeId;

/// The direction of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// From the file into the pages.
    Read,
    /// From the pages into the file.
    Write,
}

/// Called once, from any thread, with the bytes moved or the error.
pub type Done = Box<dyn FnOnce(Result<usize, Errno>) + Send>;

/// One read or write of consecutive bytes of a file.
pub struct Request {
    /// The direction of the data.
    pub op: Op,
    /// The inode.
    pub node: NodeId,
    /// The open file.
    pub handle: u64,
    /// Where in the file.
    pub offset: u64,
    /// Where in the arena; together `len` bytes.
    pub segs: Vec<Seg>,
    /// Bytes.
    pub len: usize,
    /// The data should not stay in the server's caches either.
    pub dontcache: bool,
    /// Whether this is the cache's writeback (and not a direct write).
    pub writeback: bool,
    /// Takes the result at the end. Must be called whatever happens.
    pub done: Done,
}

/// Where the page cache sends its reads and writes: a [`Connection`], or a layer above it
/// ([`Client::layered`](crate::Client::layered)).
pub trait PageIo: Send + Sync {
    /// Starts all requests of a batch, and leaves it empty. The caller holds no lock of the cache, so a request
    /// may end before this returns.
    fn submit(&self, batch: &mut Vec<Request>);

    /// Takes answers in the calling thread until `done` says so, or for a short while: after that the caller
    /// sleeps until a request ends.
    fn poll(&self, done: &mut dyn FnMut() -> bool);
}

impl PageIo for Connection {
    fn submit(&self, batch: &mut Vec<Request>) {
        let current = self.current();
        for r in batch.drain(..) {
            let started = match &current {
                Ok(channel) => (self.at(channel, r.node, r.handle))
                    .and_then(|at| Ok((channel, at, channel.reserve()?))),
                Err(e) => Err(*e),
            };
            let (channel, (node, fh), id) = match started {
                Ok(started) => started,
                Err(e) => {
                    (r.done)(Err(e));
                    continue;
                }
            };
            let (read, write);
            let (opcode, op) = match r.op {
                Op::Read => {
                    let mut flags = abi::ReadFlags::empty();
                    flags.set(abi::ReadFlags::DONTCACHE, r.dontcache);
                    read = abi::ReadIn {
                        fh,
                        offset: r.offset,
                        size: r.len as u32,
                        read_flags: flags.bits(),
                        ..Default::default()
                    };
                    (Opcode::Read, read.as_bytes())
                }
                Op::Write => {
                    let mut flags = abi::WriteFlags::empty();
                    flags.set(abi::WriteFlags::CACHE, r.writeback);
                    flags.set(abi::WriteFlags::DONTCACHE, r.dontcache);
                    write = abi::WriteIn {
                        fh,
                        offset: r.offset,
                        size: r.len as u32,
                        write_flags: flags.bits(),
                        ..Default::default()
                    };
                    (Opcode::Write, write.as_bytes())
                }
            };
            let waiting = Waiting::Data(r.op, r.len, r.done);
            channel.send(id, opcode as u32, node, op, &[], &r.segs, waiting);
        }
        if let Ok(channel) = current {
            channel.queue.ring();
        }
    }

    fn poll(&self, done: &mut dyn FnMut() -> bool) {
        if let Ok(channel) = self.current() {
            channel.poll(done);
        }
    }
}
