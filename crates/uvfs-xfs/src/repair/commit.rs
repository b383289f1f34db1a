//! Writing the changes, in an order that a later repair can go on from.

use super::Mend;
use crate::format::*;
use crate::overlay::Sink;
use std::io;
use std::sync::{Arc, Mutex};
use uvfs_buf::{Anything, BufError, Config, Extent, SECTOR, Target, WriteQueue};
use uvfs_io::device::Device;
use uvfs_io::engine::EngineKind;

/// Bytes that are collected before they are written; as many more may be on their way.
const QUEUE_BYTES: usize = 2 << 20;
/// The cache's bound on memory.
const CACHE_BYTES: usize = 8 << 20;

/// A device that is written through a [`WriteQueue`]: many writes in flight, each of what lies side by
/// side. The checksums are in what it is given, because the checks read that before it is written.
pub struct DeviceSink {
    target: Target,
    /// The waiting writes, and their bytes.
    queue: Mutex<(WriteQueue, usize)>,
    /// The device of the log.
    log: Option<Box<DeviceSink>>,
}

impl DeviceSink {
    /// Writes to this device.
    pub fn new(device: Arc<Device>) -> io::Result<DeviceSink> {
        let config = || Config {
            limit: CACHE_BYTES,
            ..Config::default()
        };
        let target = Target::open(device.clone(), EngineKind::Uring, config())
            .or_else(|_| Target::open(device, EngineKind::Sync, config()))?;
        Ok(DeviceSink::through(target))
    }

    /// Writes through this cache, which has no other user.
    pub fn through(target: Target) -> DeviceSink {
        DeviceSink {
            queue: Mutex::new((WriteQueue::new(&target), 0)),
            target,
            log: None,
        }
    }

    /// The log is written to another device.
    pub fn with_log(self, log: DeviceSink) -> DeviceSink {
        let log = Some(log.into());
        DeviceSink { log, ..self }
    }

    /// Writes everything that waits, and forgets it: another write may overlap it.
    fn drain(&self, (queue, bytes): &mut (WriteQueue, usize)) -> Result<(), BufError> {
        let done = queue.flush();
        if done.is_err() {
            // A failed write is not tried again.
            queue.clear();
        }
        *bytes = 0;
        self.target.invalidate_all();
        done
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> Result<(), BufError> {
        let mut queue = self.queue.lock().expect("no holder panics");
        let unit = u64::from(self.target.geometry().block).max(SECTOR);
        let end = offset + bytes.len() as u64;
        let (start, stop) = (offset / unit * unit, end.next_multiple_of(unit));
        let place = [Extent {
            daddr: start / SECTOR,
            len: ((stop - start) / SECTOR) as u32,
        }];
        if (start, stop) == (offset, end) {
            let buffer = self.target.get(&place, &Anything)?;
            buffer.write().copy_from_slice(bytes);
            queue.1 += bytes.len();
            queue.0.push(buffer);
        } else {
            // The device takes larger pieces only, which others may be parts of.
            self.drain(&mut queue)?;
            let buffer = self.target.read(&place, &Anything)?;
            let from = (offset - start) as usize;
            buffer.write()[from..from + bytes.len()].copy_from_slice(bytes);
            queue.0.push(buffer);
            self.drain(&mut queue)?;
        }
        if queue.1 >= QUEUE_BYTES {
            queue.1 = 0;
            // Earlier writes have been on their way for long.
            queue.0.wait()?;
            queue.0.submit();
        }
        Ok(())
    }
}

impl Sink for DeviceSink {
    fn memory(&self) -> u64 {
        // The buffers of the queue are the cache's own; the queue adds a handle for each, at most one
        // for every sector of what is collected and of what is on its way.
        let handles = 2 * QUEUE_BYTES / SECTOR as usize * std::mem::size_of::<uvfs_buf::Buffer>();
        (self.target.memory().limit + handles) as u64
    }

    fn log(&self) -> Option<&dyn Sink> {
        Some(&**self.log.as_ref()?)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.put(offset, bytes).map_err(failed)
    }

    fn flush(&self) -> io::Result<()> {
        let mut queue = self.queue.lock().expect("no holder panics");
        self.drain(&mut queue).map_err(failed)?;
        self.target.sync().map_err(failed)
    }
}

fn failed(e: BufError) -> io::Error {
    io::Error::from_raw_os_error(e.errno())
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
    let mut sb = m.sb;
    let bits = sb.features_incompat.get() | INCOMPAT_NEEDSREPAIR;
    sb.features_incompat.set(bits);
    sink.write(0, &sb.sector(m.g.sector_size as usize))?;
    sink.flush()?;
    let mut written = 0;
    if m.g.logstart == 0 {
        let log = sink
            .log()
            .ok_or_else(|| io::Error::other("no device to write the log to"))?;
        written += m.disk.of_log().commit(log, LOG, &|_| LOG)?;
    }
    for wanted in [LOG, BLOCKS, INODES, HEADERS, COPIES] {
        written += m.disk.commit(sink, wanted, &|s| class(m, s))?;
    }
    let bytes = m.disk.get(0, m.g.sector_size as usize)?;
    sink.write(0, &bytes)?;
    sink.flush()?;
    Ok(written + 2 * bytes.len() as u64)
}
