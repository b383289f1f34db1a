//! The image as it will be: what was changed lies over what is on disk.

use super::Sink;
use crate::blocks::{Block, Blocks, Stream};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, RwLock};

/// The unit of what is kept.
const SECTOR: usize = 512;
/// Blocks that are read ahead at a time.
const FETCHED: usize = 256;
/// Bytes of one write.
const MAX_WRITE: usize = 1 << 20;

/// A changed sector.
#[derive(Clone)]
enum ChangedSector {
    Here(Box<[u8; SECTOR]>),
    /// In the temporary file, at this place.
    Spilled(u32),
}

/// Changed sectors.
#[derive(Default)]
struct Sectors {
    map: BTreeMap<u64, ChangedSector>,
    /// Sectors that are kept in memory; further ones go to the file.
    room: u64,
    file: Option<File>,
    spilled: u32,
}

impl Sectors {
    fn put(&mut self, at: u64, bytes: &[u8; SECTOR]) {
        let full = self.map.len() as u64 - u64::from(self.spilled) >= self.room;
        let changed = match self.map.get(&at) {
            Some(ChangedSector::Spilled(place)) => self.spill(*place, bytes),
            None if full => self.spill(self.spilled, bytes),
            _ => None,
        };
        self.spilled += u32::from(changed == Some(self.spilled));
        let changed = changed.map_or_else(
            || ChangedSector::Here(Box::new(*bytes)),
            ChangedSector::Spilled,
        );
        self.map.insert(at, changed);
    }

    /// Writes to a place of the file; without it the sector stays in memory.
    fn spill(&mut self, place: u32, bytes: &[u8; SECTOR]) -> Option<u32> {
        if self.file.is_none() {
            self.file = tempfile::tempfile().ok();
        }
        let written = self.file.as_ref()?;
        let written = written.write_all_at(bytes, u64::from(place) * SECTOR as u64);
        written.ok().map(|()| place)
    }

    fn get(&self, changed: &ChangedSector) -> io::Result<[u8; SECTOR]> {
        match changed {
            ChangedSector::Here(bytes) => Ok(**bytes),
            ChangedSector::Spilled(place) => {
                let mut bytes = [0; SECTOR];
                let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
                file.read_exact_at(&mut bytes, u64::from(*place) * SECTOR as u64)?;
                Ok(bytes)
            }
        }
    }
}

/// Blocks that were read ahead, by their place.
pub(crate) type Fetched = HashMap<u64, Vec<u8>>;

/// Changed sectors over an image.
pub(crate) struct Overlay {
    base: Arc<dyn Blocks>,
    sectors: RwLock<Sectors>,
    /// Blocks that were read ahead of their use.
    ahead: Mutex<Fetched>,
}

impl Overlay {
    /// Without changes. About `keep` bytes of them are kept in memory, the others in a temporary file.
    pub fn new(base: Arc<dyn Blocks>, keep: u64) -> Overlay {
        // A sector, its box, and its place in the map.
        let room = keep / (SECTOR as u64 + 48);
        Overlay {
            base,
            sectors: RwLock::new(Sectors {
                room,
                ..Sectors::default()
            }),
            ahead: Mutex::default(),
        }
    }

    /// The image as it is now, without the changes that were put into a temporary file.
    pub fn snapshot(&self) -> Overlay {
        let sectors = self.sectors.read().expect("no holder panics");
        let here = sectors
            .map
            .iter()
            .filter(|(_, c)| matches!(c, ChangedSector::Here(_)));
        let copy = Overlay::new(self.base.clone(), u64::MAX);
        copy.sectors.write().expect("just made").map =
            here.map(|(at, c)| (*at, c.clone())).collect();
        copy
    }

    /// Reads blocks of `len` bytes, many at a time, for [`Overlay::expect`].
    pub fn fetch(&self, wanted: &[u64], len: usize) -> Fetched {
        let mut out = Fetched::new();
        for some in wanted.chunks(FETCHED) {
            let Some(mut stream) = self.base.stream(FETCHED * len) else {
                break;
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
                    out.insert(at, block.to_vec());
                }
            }
        }
        out
    }

    /// These blocks will be asked for next. Earlier ones that were not asked for are dropped.
    pub fn expect(&self, blocks: Fetched) {
        *self.ahead.lock().expect("no holder panics") = blocks;
    }

    /// Changes whole sectors from byte `offset` on.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        debug_assert!(offset.is_multiple_of(SECTOR as u64) && bytes.len().is_multiple_of(SECTOR));
        let mut sectors = self.sectors.write().expect("no holder panics");
        for (i, part) in bytes.as_chunks::<SECTOR>().0.iter().enumerate() {
            sectors.put(offset / SECTOR as u64 + i as u64, part);
        }
    }

    /// Reads `len` bytes; nothing if part of them cannot be read.
    pub fn get(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let there = self.ahead.lock().expect("no holder panics").remove(&offset);
        if let Some(mut bytes) = there.filter(|b| b.len() == len) {
            self.patch(offset, &mut bytes)?;
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
        sectors.map.iter().any(|(at, new)| {
            let read = self.base.read_data(at * SECTOR as u64, &mut old);
            read.is_err() || !sectors.get(new).is_ok_and(|new| old == new)
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
        for (at, new) in sectors.map.iter().filter(|(at, _)| class(**at) == wanted) {
            let new = sectors.get(new)?;
            let same = self.base.read_data(at * SECTOR as u64, &mut old).is_ok() && old == new;
            if same {
                continue;
            }
            let next = run.0 + (run.1.len() / SECTOR) as u64;
            if next != *at || run.1.len() >= MAX_WRITE {
                send(&mut run)?;
                run.0 = *at;
            }
            run.1.extend_from_slice(&new);
        }
        send(&mut run)?;
        if written > 0 {
            sink.flush()?;
        }
        Ok(written)
    }

    /// Puts what was changed over bytes that were read.
    fn patch(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let sectors = self.sectors.read().expect("no holder panics");
        let end = offset + buf.len() as u64;
        let first = offset / SECTOR as u64;
        for (at, new) in sectors.map.range(first..end.div_ceil(SECTOR as u64)) {
            let new = sectors.get(new)?;
            let start = at * SECTOR as u64;
            let (from, to) = (start.max(offset), (start + SECTOR as u64).min(end));
            buf[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&new[(from - start) as usize..(to - start) as usize]);
        }
        Ok(())
    }

    /// Whether any sector of a range was changed.
    fn changes(&self, offset: u64, len: usize) -> bool {
        let sectors = self.sectors.read().expect("no holder panics");
        let end = (offset + len as u64).div_ceil(SECTOR as u64);
        sectors
            .map
            .range(offset / SECTOR as u64..end)
            .next()
            .is_some()
    }

    /// Whether every sector of a range was changed, so that the disk need not be asked.
    fn covers(&self, offset: u64, len: usize) -> bool {
        let sectors = self.sectors.read().expect("no holder panics");
        let (first, end) = (offset / SECTOR as u64, offset + len as u64);
        let end = end.div_ceil(SECTOR as u64);
        sectors.map.range(first..end).count() as u64 == end - first
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
        self.patch(offset, buf)
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

    fn next(&mut self) -> Option<(u64, io::Result<Block>)> {
        let (offset, result) = self.stream.next()?;
        let patched = result.and_then(|block| {
            if !self.overlay.changes(offset, block.len()) {
                return Ok(block);
            }
            let mut bytes = block.to_vec();
            self.overlay.patch(offset, &mut bytes)?;
            Ok(Block::new(bytes))
        });
        Some((offset, patched))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::FileBlocks;

    /// A repair with little memory writes back the same blocks.
    #[test]
    fn what_goes_to_the_file_comes_back() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let blocks = Arc::new(FileBlocks::new(file).unwrap());
        // All in memory, some of it, and nothing.
        for keep in [u64::MAX, 5000, 0] {
            let overlay = Overlay::new(blocks.clone(), keep);
            for (at, byte) in [(0u64, 1u8), (40, 2), (41, 3), (3, 4), (40, 5)] {
                overlay.write(at * 512, &[byte; 4 * 512]);
            }
            let first = |at: u64| overlay.get(at * 512, 512).unwrap()[0];
            let found: Vec<u8> = [0, 2, 3, 6, 7, 39, 40, 43, 44, 45].map(first).into();
            assert_eq!(found, [1, 1, 4, 4, 0, 0, 5, 5, 3, 0], "{keep}");
            assert!(overlay.is_changed());
            let sectors = overlay.sectors.read().unwrap();
            assert_eq!(sectors.file.is_some(), keep != u64::MAX);
            assert_eq!(sectors.map.len(), 12);
            let here = sectors
                .map
                .values()
                .filter(|c| matches!(c, ChangedSector::Here(_)));
            assert!(here.count() as u64 <= keep / 512);
        }
    }
}
