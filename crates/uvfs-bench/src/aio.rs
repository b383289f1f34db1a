//! Linux native asynchronous I/O (io_submit(2)), as much as reading and writing at a queue depth needs.
//!
//! It is what the field's tools use for queue depths, and unlike io_uring it hands a direct read
//! to a FUSE file system without a worker thread in between.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use uvfs_sys::aio::{Context, IoEvent, Iocb, PREAD, PWRITE};

use super::files::Page;

/// The opcodes of linux/aio_abi.h.
#[derive(Clone, Copy)]
#[repr(u16)]
pub enum Call {
    Read = PREAD,
    Write = PWRITE,
}

/// Reads or writes pieces of one file, a fixed number of them at a time.
pub struct Queue {
    /// Goes before the pieces, and waits for what is in flight.
    context: Context,
    file: File,
    call: Call,
    /// By slot.
    pieces: Vec<Box<[Page]>>,
    idle: Vec<usize>,
    offsets: Vec<u64>,
}

impl Queue {
    /// Prepares to keep up to `depth` calls on `file` in flight, each of so many pages.
    pub fn new(file: File, call: Call, depth: usize, pages: usize) -> io::Result<Self> {
        Ok(Self {
            context: Context::new(depth)?,
            file,
            call,
            pieces: vec![vec![Page::default(); pages].into_boxed_slice(); depth],
            idle: (0..depth).collect(),
            offsets: vec![0; depth],
        })
    }

    /// Whether any call is in flight.
    pub fn is_busy(&self) -> bool {
        self.idle.len() < self.pieces.len()
    }

    /// Starts a call at each of the offsets that `next` gives, on every idle slot, in one system call.
    /// `next` may fill the piece that is written.
    pub fn submit(&mut self, mut next: impl FnMut(&mut [u8]) -> u64) -> io::Result<()> {
        let iocbs: Vec<Iocb> = self
            .idle
            .iter()
            .map(|&slot| {
                let piece = Page::bytes_mut(&mut self.pieces[slot]);
                let offset = next(piece);
                self.offsets[slot] = offset;
                Iocb {
                    data: slot as u64,
                    opcode: self.call as u16,
                    fd: self.file.as_raw_fd() as u32,
                    buf: piece.as_mut_ptr() as u64,
                    len: piece.len() as u64,
                    offset: offset as i64,
                    ..Iocb::default()
                }
            })
            .collect();
        let mut sent = 0;
        while sent < iocbs.len() {
            let calls: Vec<&Iocb> = iocbs[sent..].iter().collect();
            // SAFETY: each block's buffer is one of `self.pieces`, on the heap and not moved or touched until its
            // event was taken, or the context dropped.
            let n = unsafe { self.context.submit(&calls) }?;
            self.idle.drain(..n);
            sent += n;
        }
        Ok(())
    }

    /// Waits for at least one call and gives each that has ended to `done`, with its offset.
    /// Returns how many there were.
    pub fn wait(&mut self, mut done: impl FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<u64> {
        let mut events = [IoEvent::default(); 64];
        let n = self.context.events(1, &mut events)?;
        let mut result = Ok(());
        for event in &events[..n] {
            let slot = event.data as usize;
            self.idle.push(slot);
            let one = match usize::try_from(event.res) {
                Ok(len) => done(
                    self.offsets[slot],
                    &Page::bytes_mut(&mut self.pieces[slot])[..len],
                ),
                Err(_) => Err(io::Error::from_raw_os_error(-event.res as i32)),
            };
            result = result.and(one);
        }
        result.map(|()| n as u64)
    }
}
