//! Where the reader gets bytes from.

use crate::error::Error;
use crate::geometry::BBSIZE;
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::ops::{Deref, Range};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
pub use uvfs_buf::Verifier;

/// A run of bytes on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskExtent {
    /// First 512-byte sector.
    pub daddr: u64,
    /// Bytes: a multiple of 512.
    pub bytes: u32,
}

/// Bytes of a block, held until the last clone is dropped.
#[derive(Clone)]
pub struct Block {
    holder: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
    verified: bool,
}

impl Block {
    /// A block that keeps `holder` (say, a buffer's reference) for as long as it lives.
    pub fn new(holder: impl AsRef<[u8]> + Send + Sync + 'static) -> Block {
        Block {
            range: 0..holder.as_ref().len(),
            holder: Arc::new(holder),
            verified: false,
        }
    }

    /// A part of the block, which is not verified.
    pub(crate) fn part(&self, range: Range<usize>) -> Block {
        let start = self.range.start;
        Block {
            holder: self.holder.clone(),
            range: start + range.start..start + range.end,
            verified: false,
        }
    }

    /// The same block, whose checksum is not to be computed: a cache's verifier has, or a repair does without it.
    pub(crate) fn verified(mut self) -> Block {
        self.verified = true;
        self
    }

    /// Whether a cache's verifier found the block sound when it was read: its checksum need not be
    /// computed again.
    pub fn is_verified(&self) -> bool {
        self.verified
    }
}

impl Deref for Block {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &(*self.holder).as_ref()[self.range.clone()]
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Block({} bytes)", self.len())
    }
}

/// A device or image, possibly behind a cache.
pub trait Blocks: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Reads metadata: `extents` one after another as one block. A cache has `verifier` look at the
    /// content when it comes in; a block without [`Block::is_verified`] the caller has to verify.
    fn read(&self, extents: &[DiskExtent], verifier: &'static dyn Verifier) -> io::Result<Block> {
        let _ = verifier;
        let total = extents.iter().map(|e| e.bytes as usize).sum();
        let mut bytes = vec![0; total];
        let mut rest = &mut bytes[..];
        for e in extents {
            let (part, next) = rest.split_at_mut(e.bytes as usize);
            self.read_data(e.daddr.saturating_mul(BBSIZE), part)?;
            rest = next;
        }
        Ok(Block::new(bytes))
    }

    /// Reads file data at byte `offset` of the device into the whole of `buf`; it is not worth
    /// keeping in a metadata cache.
    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Reads `len` bytes as [`Blocks::read_data`] does.
    fn bytes(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read_data(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// A descriptor that file data can be read from instead of by [`Blocks::read_data`], at the
    /// same offsets, with no demands on alignment; `None` if there is no such thing.
    fn data_file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// A way to have many reads in flight, with about `room` bytes read and not let go of at a
    /// time; `None` if there is none.
    fn stream(&self, _room: usize) -> Option<Box<dyn Stream + '_>> {
        None
    }

    /// Whether a thread that reads has to wait for each read, also through a [`Stream`].
    fn waits(&self) -> bool {
        true
    }

    /// The device that the log is on, if it is another one and was named.
    fn log(&self) -> Option<Arc<dyn Blocks>> {
        None
    }

    /// Says that the block made of `extents` will be read soon. Never waits.
    fn readahead(&self, extents: &[DiskExtent]) {
        let _ = extents;
    }

    /// Says that these `len` bytes of file data will be read soon, by one [`Blocks::read_data`]. Never waits.
    fn readahead_data(&self, offset: u64, len: usize) {
        let _ = (offset, len);
    }
}

/// A device, and another one that its log is on.
pub struct WithLog {
    image: Arc<dyn Blocks>,
    log: Arc<dyn Blocks>,
}

impl WithLog {
    /// Puts the two together.
    pub fn new(image: Arc<dyn Blocks>, log: Arc<dyn Blocks>) -> WithLog {
        WithLog { image, log }
    }
}

/// An image, with the device of its log if there is one.
pub fn with_log(image: Arc<dyn Blocks>, log: Option<FileBlocks>) -> Arc<dyn Blocks> {
    match log {
        Some(log) => Arc::new(WithLog::new(image, Arc::new(log))),
        None => image,
    }
}

impl Blocks for WithLog {
    fn size(&self) -> u64 {
        self.image.size()
    }

    fn read(&self, extents: &[DiskExtent], verifier: &'static dyn Verifier) -> io::Result<Block> {
        self.image.read(extents, verifier)
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.image.read_data(offset, buf)
    }

    fn data_file(&self) -> Option<BorrowedFd<'_>> {
        self.image.data_file()
    }

    fn stream(&self, room: usize) -> Option<Box<dyn Stream + '_>> {
        self.image.stream(room)
    }

    fn waits(&self) -> bool {
        self.image.waits()
    }

    fn log(&self) -> Option<Arc<dyn Blocks>> {
        Some(self.log.clone())
    }

    fn readahead(&self, extents: &[DiskExtent]) {
        self.image.readahead(extents);
    }

    fn readahead_data(&self, offset: u64, len: usize) {
        self.image.readahead_data(offset, len);
    }
}

/// Reads of one thread, many in flight.
pub trait Stream {
    /// Offsets and lengths must be multiples of this, in bytes.
    fn unit(&self) -> u64;

    /// Takes a read of `len` bytes at byte `offset`, which must be inside the device. False: there
    /// is no memory for it.
    fn start(&mut self, offset: u64, len: usize) -> bool;

    /// Sends what was taken to the device.
    fn send(&mut self);

    /// Waits for a read to end: its offset, and what was read or why not. `None` if there is none
    /// in flight.
    fn next(&mut self) -> Option<(u64, io::Result<Block>)>;
}

/// A plain file or block device, read with pread and no cache but the kernel's.
#[derive(Debug)]
pub struct FileBlocks {
    file: File,
    size: u64,
}

impl FileBlocks {
    /// Opens `path` for reading.
    pub fn open(path: &Path) -> io::Result<FileBlocks> {
        FileBlocks::new(File::open(path)?)
    }

    /// Reads from `file`, an image or a block device.
    pub fn new(mut file: File) -> io::Result<FileBlocks> {
        let size = file.seek(SeekFrom::End(0))?;
        Ok(FileBlocks { file, size })
    }
}

impl Blocks for FileBlocks {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        pread_exact(&self.file, offset, buf)
    }

    fn data_file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}

/// Reads into `buf` what there is from byte `at` on, and gives how much that is.
pub(crate) fn pread(fd: impl AsFd, at: u64, buf: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match rustix::io::pread(&fd, &mut buf[done..], at + done as u64) {
            Ok(0) => break,
            // Direct I/O goes on where a file ended, at no multiple of its unit.
            Err(Errno::INVAL) if done > 0 => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(done)
}

/// Reads all of `buf` from byte `at` on.
pub(crate) fn pread_exact(fd: impl AsFd, at: u64, buf: &mut [u8]) -> io::Result<()> {
    match pread(fd, at, buf)? == buf.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

pub(crate) fn io_error(extents: &[DiskExtent], source: io::Error) -> Error {
    let daddr = extents.first().map_or(0, |e| e.daddr);
    let len = extents.iter().map(|e| e.bytes as usize).sum();
    Error::Io { daddr, len, source }
}
