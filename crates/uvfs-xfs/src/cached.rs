//! Reading through the buffer cache.

use crate::blocks::{Block, Blocks, DiskExtent, ReadError, Verify};
use std::io;
use std::sync::Arc;
use uvfs_buf::{Anything, BufError, Buffer, Extent, MAX_SECTORS, Prefetch, SECTOR, Target};
use uvfs_io::device::Device;

/// Sectors of file data that are read at a time where the device must be read past the page cache.
const DATA_SECTORS: u64 = 2048;

/// A device behind a buffer cache: metadata is cached there, file data is not.
///
/// What the device reads in units larger than a sector (direct I/O on 4 KiB sectors) is read in
/// those units.
pub struct CachedBlocks {
    target: Arc<Target>,
    device: Arc<Device>,
}

impl CachedBlocks {
    /// Reads `device` through `target`, which must be a cache of the same device.
    pub fn new(target: Arc<Target>, device: Arc<Device>) -> CachedBlocks {
        CachedBlocks { target, device }
    }

    /// The cache.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    /// `e` widened to whole units of the device, and how many bytes come before it.
    fn widen(&self, daddr: u64, bytes: u64) -> (Extent, usize) {
        let unit = (u64::from(self.target.geometry().block) / SECTOR).max(1);
        let start = daddr / unit * unit;
        let end = (daddr + bytes.div_ceil(SECTOR)).next_multiple_of(unit);
        (
            Extent {
                daddr: start,
                len: (end - start) as u32,
            },
            ((daddr - start) * SECTOR) as usize,
        )
    }

    fn widen_all(&self, extents: &[DiskExtent]) -> Vec<Extent> {
        extents
            .iter()
            .map(|e| self.widen(e.daddr, e.bytes.into()).0)
            .collect()
    }

    fn is_exact(&self, extents: &[DiskExtent], wide: &[Extent]) -> bool {
        extents
            .iter()
            .zip(wide)
            .all(|(e, w)| e.daddr == w.daddr && u64::from(e.bytes) == u64::from(w.len) * SECTOR)
    }
}

fn error(e: BufError) -> ReadError {
    ReadError::Io(match e {
        BufError::Io { errno, .. } => errno.into(),
        BufError::Range { .. } => io::ErrorKind::UnexpectedEof.into(),
        e => io::Error::other(e),
    })
}

impl Blocks for CachedBlocks {
    fn size(&self) -> u64 {
        self.target.geometry().size
    }

    fn read(&self, extents: &[DiskExtent], verify: Verify<'_>) -> Result<Block, ReadError> {
        let wide = self.widen_all(extents);
        let mut bytes = Vec::with_capacity(extents.iter().map(|e| e.bytes as usize).sum());
        if self.is_exact(extents, &wide) {
            let buffer: Buffer = self.target.read(&wide, &Anything).map_err(error)?;
            bytes.extend_from_slice(&buffer.read());
        } else {
            for (e, w) in extents.iter().zip(&wide) {
                let buffer = self.target.read(&[*w], &Anything).map_err(error)?;
                let skip = ((e.daddr - w.daddr) * SECTOR) as usize;
                bytes.extend_from_slice(&buffer.read()[skip..skip + e.bytes as usize]);
            }
        }
        verify(&bytes).map_err(ReadError::Fault)?;
        Ok(Block::new(bytes))
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if !self.device.is_direct() {
            let mut done = 0;
            while done < buf.len() {
                let at = offset + done as u64;
                match rustix::io::pread(&*self.device, &mut buf[done..], at) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(n) => done += n,
                    Err(rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            return Ok(());
        }
        const { assert!(DATA_SECTORS < MAX_SECTORS) };
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let want = (buf.len() - done).min((DATA_SECTORS * SECTOR) as usize);
            let within = (at % SECTOR) as usize;
            let (extent, skip) = self.widen(at / SECTOR, (within + want) as u64);
            let read =
                self.target
                    .read_uncached(&[extent], &Anything)
                    .map_err(|e| match error(e) {
                        ReadError::Io(e) => e,
                        ReadError::Fault(f) => io::Error::other(f),
                    })?;
            let from = skip + within;
            buf[done..done + want].copy_from_slice(&read.read()[from..from + want]);
            done += want;
        }
        Ok(())
    }

    fn readahead(&self, extents: &[DiskExtent]) {
        let wide = self.widen_all(extents);
        if self.is_exact(extents, &wide) {
            self.target
                .readahead([&wide[..]], &Anything, Prefetch::Exact);
        } else {
            self.target
                .readahead(wide.chunks(1), &Anything, Prefetch::Exact);
        }
    }
}
