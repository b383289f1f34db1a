//! A client without a library: the test decides what goes into the shared memory, and when.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use uvfs_proto::abi::{self, Opcode};
use uvfs_queue::arena::Arena;
use uvfs_queue::attach::{self, Message};
use uvfs_queue::pair::{ClientQueue, Direction, INLINE_SIZE, Seg};
use uvfs_server::{ClientLimits, FileSystem, InProcess, Session, in_process};
use zerocopy::{FromBytes, IntoBytes};

pub const ROOT: u64 = 1;

/// A client that sends whatever a test tells it to.
pub struct Raw {
    pub arena: Arena,
    pub queue: ClientQueue,
    /// The eventfd that wakes the server.
    pub bell: OwnedFd,
    pub socket: UnixStream,
    _serving: Option<InProcess>,
}

impl Raw {
    pub fn attach<F: FileSystem>(session: &Arc<Session<F>>) -> Self {
        let (serving, socket) = in_process(session, ClientLimits::default()).unwrap();
        Self::over(socket, 16, Some(serving))
    }

    /// Of a server that listens at a path.
    pub fn connect(path: &Path) -> Self {
        Self::with_pages(path, 16)
    }

    /// The same, with an arena of so many pages.
    pub fn with_pages(path: &Path, pages: u32) -> Self {
        Self::over(UnixStream::connect(path).unwrap(), pages, None)
    }

    fn over(socket: UnixStream, pages: u32, serving: Option<InProcess>) -> Self {
        let arena = Arena::create(pages).unwrap();
        let queue = ClientQueue::create(8).unwrap();
        attach::send(&socket, hello(), &[arena.as_fd(), queue.as_fd()]).unwrap();
        let (answer, mut fds) = attach::receive(&socket).unwrap();
        assert_eq!(answer.errno, 0);
        let bell = fds.pop().unwrap();
        queue.wake_through(bell.try_clone().unwrap());
        Self {
            arena,
            queue,
            bell,
            socket,
            _serving: serving,
        }
    }

    pub fn send(&self, opcode: u32, node: u64, op: &[u8], name: &[u8]) -> u32 {
        self.submit(opcode, node, op, name, &[], Direction::ToServer)
    }

    /// Sends a request with all that one can have, if there is an entry for it.
    #[allow(clippy::too_many_arguments)]
    pub fn try_submit(
        &self,
        opcode: u32,
        node: u64,
        op: &[u8],
        name: &[u8],
        segs: &[Seg],
        direction: Direction,
    ) -> Option<u32> {
        let header = abi::InHeader {
            len: (size_of::<abi::InHeader>() + op.len() + name.len()) as u32,
            opcode,
            nodeid: node,
            unique: 2,
            ..Default::default()
        };
        let id = self.queue.reserve()?;
        let header = header.as_bytes();
        self.queue.submit(id, header, op, name, segs, direction);
        Some(id)
    }

    fn submit(
        &self,
        opcode: u32,
        node: u64,
        op: &[u8],
        name: &[u8],
        segs: &[Seg],
        direction: Direction,
    ) -> u32 {
        self.try_submit(opcode, node, op, name, segs, direction)
            .expect("an entry is free")
    }

    /// The answer to the next request that ends.
    pub fn answer(&self) -> (u32, Result<Vec<u8>, i32>) {
        self.queue.ring();
        loop {
            let Some(id) = self.queue.pop().unwrap() else {
                std::thread::sleep(Duration::from_micros(100));
                continue;
            };
            let mut header = [0; size_of::<abi::OutHeader>()];
            let mut body = vec![0; INLINE_SIZE];
            self.queue.reply(id, &mut header, &mut body);
            self.queue.release(id);
            let out = abi::OutHeader::read_from_bytes(&header).unwrap();
            // Of an answer in the arena nothing is here.
            body.truncate(out.len as usize - header.len());
            let answer = match out.error {
                0 => Ok(body),
                code => Err(-code),
            };
            return (id, answer);
        }
    }

    pub fn call(&self, opcode: u32, node: u64, op: &[u8], name: &[u8]) -> Result<Vec<u8>, i32> {
        let id = self.send(opcode, node, op, name);
        let (answered, answer) = self.answer();
        assert_eq!(answered, id);
        answer
    }

    /// A request whose payload lies in the arena, or whose answer goes there.
    pub fn call_in_arena(
        &self,
        opcode: u32,
        node: u64,
        op: &[u8],
        seg: Seg,
        direction: Direction,
    ) -> Result<Vec<u8>, i32> {
        self.submit(opcode, node, op, &[], &[seg], direction);
        self.answer().1
    }

    /// Goes without a word; the session's end can still be seen.
    pub fn die(self) -> ClientQueue {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        self.queue
    }

    pub fn open(&self, node: u64, flags: i32) -> u64 {
        let op = abi::OpenIn {
            flags: flags as u32,
            open_flags: 0,
        };
        let opened = self.call(Opcode::Open as u32, node, op.as_bytes(), &[]);
        let (opened, _) = abi::OpenOut::read_from_prefix(&opened.unwrap()).unwrap();
        opened.fh
    }

    pub fn look_up(&self, name: &[u8]) -> u64 {
        let found = self.call(Opcode::Lookup as u32, ROOT, &[], name).unwrap();
        let (entry, _) = abi::EntryOut::read_from_prefix(&found).unwrap();
        entry.nodeid
    }

    pub fn links(&self, node: u64) -> Result<u32, i32> {
        let op = abi::GetattrIn::default();
        let answer = self.call(Opcode::Getattr as u32, node, op.as_bytes(), &[])?;
        Ok(abi::AttrOut::read_from_prefix(&answer)
            .unwrap()
            .0
            .attr
            .nlink)
    }
}

pub fn hello() -> Message {
    Message {
        errno: 0,
        max_payload: 0,
        source: [0; 16],
    }
}
