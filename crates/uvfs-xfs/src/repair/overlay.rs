//! The image as it will be: what was changed lies over what is on disk.

use super::Sink;
use crate::blocks::{Blocks, Stream};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex, RwLock};

/// The unit of what is kept.
const SECTOR: usize = 512;
/// Blocks that are read ahead at a time.
const FETCHED: usize = 256;
/// Bytes of one write.
const MAX_WRITE: usize = 1 << 20;

/// Changed sectors over an image.
pub(crate) struct Overlay {
    base: Arc<dyn Blocks>,
    sectors: RwLock<BTreeMap<u64, Box<[u8; SECTOR]>>>,
    /// Blocks that were read ahead of their use.
    ahead: Mutex<HashMap<u64, Vec<u8>>>,
}

impl Overlay {
    pub fn new(base: Arc<dyn Blocks>) -> Overlay {
        Overlay {
            base,
            sectors: RwLock::default(),
            ahead: Mutex::default(),
        }
    }

    /// Reads blocks of `len` bytes, many at a time, that will be asked for next. What was read
    /// before and nobody has asked for is dropped.
    pub fn fetch(&self, wanted: &[u64], len: usize) {
        let mut ahead = self.ahead.lock().expect("no holder panics");
        ahead.clear();
        for some in wanted.chunks(FETCHED) {
            let Some(mut stream) = self.base.stream(FETCHED * len) else {
                return;
            };
            let unit = stream.unit();
            for at in some {
                let fits = at.is_multiple_of(unit) && (len as u64).is_multiple_of(unit);
                if !fits || at + len as u64 > self.size() || !stream.start(*at, len) {
                    break;
                }
            }
            stream.send();
            while let Some((at, read)) = stream.next() {
                if let Ok(block) = read {
                    ahead.insert(at, block.to_vec());
                }
            }
        }
    }

    /// Changes whole sectors from byte `offset` on.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        debug_assert!(offset.is_multiple_of(SECTOR as u64) && bytes.len().is_multiple_of(SECTOR));
        let mut sectors = self.sectors.write().expect("no holder panics");
        for (i, part) in bytes.chunks_exact(SECTOR).enumerate() {
            let mut sector = Box::new([0; SECTOR]);
            sector.copy_from_slice(part);
            sectors.insert(offset / SECTOR as u64 + i as u64, sector);
        }
    }

    /// Reads `len` bytes; nothing if part of them cannot be read.
    pub fn get(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let there = self.ahead.lock().expect("no holder panics").remove(&offset);
        if let Some(mut bytes) = there.filter(|b| b.len() == len) {
            self.patch(offset, &mut bytes);
            return Ok(bytes);
        }
        let mut bytes = vec![0; len];
        self.read_data(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Whether anything differs from what is on disk.
    pub fn is_changed(&self) -> bool {
        let sectors = self.sectors.read().expect("no holder panics");
        let mut old = [0; SECTOR];
        sectors.iter().any(|(at, new)| {
            let read = self.base.read_data(at * SECTOR as u64, &mut old);
            read.is_err() || old != **new
        })
    }

    /// Writes the changed sectors for which `class` says `wanted`, in order, and makes them
    /// durable. Gives how many bytes were written.
    pub fn commit(
        &self,
        sink: &dyn Sink,
        wanted: u8,
        class: &dyn Fn(u64) -> u8,
    ) -> io::Result<u64> {
        let sectors = self.sectors.read().expect("no holder panics");
        let mut run: (u64, Vec<u8>) = (0, Vec::new());
        let mut written = 0;
        let mut old = [0; SECTOR];
        let mut send = |run: &mut (u64, Vec<u8>)| {
            if run.1.is_empty() {
                return Ok(());
            }
            written += run.1.len() as u64;
            sink.write(run.0 * SECTOR as u64, &std::mem::take(&mut run.1))
        };
        for (at, new) in sectors.iter().filter(|(at, _)| class(**at) == wanted) {
            let same = self.base.read_data(at * SECTOR as u64, &mut old).is_ok() && old == **new;
            if same {
                continue;
            }
            let next = run.0 + (run.1.len() / SECTOR) as u64;
            if next != *at || run.1.len() >= MAX_WRITE {
                send(&mut run)?;
                run.0 = *at;
            }
            run.1.extend_from_slice(&**new);
        }
        send(&mut run)?;
        if written > 0 {
            sink.flush()?;
        }
        Ok(written)
    }

    /// Puts what was changed over bytes that were read.
    fn patch(&self, offset: u64, buf: &mut [u8]) {
        let sectors = self.sectors.read().expect("no holder panics");
        let end = offset + buf.len() as u64;
        let first = offset / SECTOR as u64;
        for (at, new) in sectors.range(first..end.div_ceil(SECTOR as u64)) {
            let start = at * SECTOR as u64;
            let (from, to) = (start.max(offset), (start + SECTOR as u64).min(end));
            buf[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&new[(from - start) as usize..(to - start) as usize]);
        }
    }

    /// Whether every sector of a range was changed, so that the disk need not be asked.
    fn covers(&self, offset: u64, len: usize) -> bool {
        let sectors = self.sectors.read().expect("no holder panics");
        let (first, end) = (offset / SECTOR as u64, offset + len as u64);
        let end = end.div_ceil(SECTOR as u64);
        sectors.range(first..end).count() as u64 == end - first
    }
}

impl Blocks for Overlay {
    fn size(&self) -> u64 {
        self.base.size()
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if let Err(e) = self.base.read_data(offset, buf)
            && !self.covers(offset, buf.len())
        {
            return Err(e);
        }
        self.patch(offset, buf);
        Ok(())
    }

    fn stream(&self, room: usize) -> Option<Box<dyn Stream + '_>> {
        Some(Box::new(Patched {
            stream: self.base.stream(room)?,
            overlay: self,
        }))
    }

    fn waits(&self) -> bool {
        self.base.waits()
    }
}

/// Reads ahead, with the changes put over them.
struct Patched<'a> {
    stream: Box<dyn Stream + 'a>,
    overlay: &'a Overlay,
}

impl Stream for Patched<'_> {
    fn unit(&self) -> u64 {
        self.stream.unit()
    }

    fn start(&mut self, offset: u64, len: usize) -> bool {
        self.stream.start(offset, len)
    }

    fn send(&mut self) {
        self.stream.send();
    }

    fn next(&mut self) -> Option<(u64, io::Result<uvfs_mem::Block>)> {
        let (offset, mut result) = self.stream.next()?;
        if let Ok(block) = &mut result {
            self.overlay.patch(offset, block);
        }
        Some((offset, result))
    }
}
