//! Writing the changes, in an order that a later repair can go on from.

use super::Mend;
use crate::format::*;
use std::io;
use std::sync::Arc;
use uvfs_io::device::Device;

/// Where the changes are written to: the image that is repaired.
pub trait Sink: Sync {
    /// Writes at a byte of the image.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes durable what was written.
    fn flush(&self) -> io::Result<()>;
}

/// A device that is written through the kernel's page cache.
#[derive(Debug)]
pub struct DeviceSink(pub Arc<Device>);

impl Sink for DeviceSink {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(&*self.0, &bytes[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => done += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&*self.0)?)
    }
}

const LOG: u8 = 0;
const BLOCKS: u8 = 1;
const INODES: u8 = 2;
const HEADERS: u8 = 3;
const COPIES: u8 = 4;
const PRIMARY: u8 = 5;

/// The structure that a sector belongs to.
fn class(m: &Mend<'_>, sector: u64) -> u8 {
    let g = &m.g;
    let per = u64::from(g.sector_size >> 9);
    if sector < per {
        return PRIMARY;
    }
    let Some(a) = g.daddr_block(sector) else {
        return BLOCKS;
    };
    let within = sector - g.ag_header_daddr(a.agno, 0);
    if within < per {
        return COPIES;
    }
    if within < 4 * per {
        return HEADERS;
    }
    if let Some(log) = g.fsb(g.logstart)
        && a.agno == log.agno
        && a.agbno >= log.agbno
        && a.agbno - log.agbno < g.logblocks
    {
        return LOG;
    }
    let chunk = m.ags[a.agno as usize].chunk_of(a.agbno << g.inopblog, g);
    if chunk { INODES } else { BLOCKS }
}

/// Writes everything.
pub(crate) fn commit(m: &Mend<'_>, sink: &dyn Sink) -> io::Result<u64> {
    // The mark, in the superblock that will be there in the end.
    let mut bytes = m.disk.get(0, m.g.sector_size as usize)?;
    let mut sb = m.sb;
    let bits = sb.features_incompat.get() | INCOMPAT_NEEDSREPAIR;
    sb.features_incompat.set(bits);
    bytes[..264].copy_from_slice(&zerocopy::IntoBytes::as_bytes(&sb)[..264]);
    store_crc(&mut bytes, SB_CRC_OFFSET);
    sink.write(0, &bytes)?;
    sink.flush()?;
    let mut written = 0;
    for wanted in [LOG, BLOCKS, INODES, HEADERS, COPIES] {
        written += m.disk.commit(sink, wanted, &|s| class(m, s))?;
    }
    let bytes = m.disk.get(0, m.g.sector_size as usize)?;
    sink.write(0, &bytes)?;
    sink.flush()?;
    Ok(written + 2 * bytes.len() as u64)
}
