//! Sectors that lie over those of an image: what a repair changes, or what a check has read.

use crate::blocks::{Block, Blocks, DiskExtent, Stream, Verifier};
use crate::geometry::BBSIZE;
use smallvec::SmallVec;
use std::collections::btree_map::{BTreeMap, Entry};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// Where the changes are written to: the image that is repaired.
pub trait Sink: Sync {
    /// The most bytes of memory that it takes, which a bound on the repair's memory has to leave it.
    fn memory(&self) -> u64 {
        0
    }
    /// Writes at a byte of the image.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes durable what was written.
    fn flush(&self) -> io::Result<()>;
    /// Where a log on another device is written to.
    fn log(&self) -> Option<&dyn Sink> {
        None
    }
}

/// The unit of what is kept.
const SECTOR: usize = 512;
/// Blocks that are read ahead at a time.
const FETCHED: usize = 256;
/// Bytes of one write.
const MAX_WRITE: usize = 1 << 20;
/// Bytes that are compared with the disk at a time.
const MAX_COMPARED: usize = 128 << 10;
/// Changed sectors are read at once if fewer than so many are between them.
const NEAR: u64 = 64;
/// Most bytes of what was read that are kept.
const MAX_REMEMBERED: usize = 16 << 20;

/// Where a sector is, in sectors.
#[derive(Clone, Copy)]
enum Sector {
    /// In memory.
    Here(u32),
    /// In the temporary file.
    Spilled(u32),
}

/// Parts of a buffer.
type Parts = SmallVec<[Range<usize>; 2]>;

/// Sectors by their number.
#[derive(Default)]
struct Sectors {
    map: BTreeMap<u64, Sector>,
    /// Those in memory. One allocation: for one of each sector a thread's heap would grow page by page.
    here: Vec<[u8; SECTOR]>,
    /// Sectors that are kept in memory; further ones go to the file.
    room: u64,
    file: Option<File>,
    spilled: u32,
}

impl Sectors {
    fn put(&mut self, at: u64, bytes: &[u8; SECTOR]) {
        let next = self.here.len() as u32;
        let place = match self.map.entry(at) {
            Entry::Occupied(entry) => match *entry.get() {
                Sector::Here(place) => {
                    self.here[place as usize] = *bytes;
                    return;
                }
                Sector::Spilled(place) => place,
            },
            Entry::Vacant(entry) if u64::from(next) < self.room => {
                entry.insert(Sector::Here(next));
                self.here.push(*bytes);
                return;
            }
            Entry::Vacant(_) => self.spilled,
        };
        let sector = match self.spill(place, bytes) {
            true => {
                self.spilled = self.spilled.max(place + 1);
                Sector::Spilled(place)
            }
            false => {
                self.here.push(*bytes);
                Sector::Here(next)
            }
        };
        self.map.insert(at, sector);
    }

    /// Writes to a place of the file; without it the sector stays in memory.
    fn spill(&mut self, place: u32, bytes: &[u8; SECTOR]) -> bool {
        if self.file.is_none() {
            self.file = tempfile::tempfile().ok();
        }
        let at = u64::from(place) * SECTOR as u64;
        (self.file.as_ref()).is_some_and(|file| file.write_all_at(bytes, at).is_ok())
    }

    fn get(&self, sector: Sector) -> io::Result<[u8; SECTOR]> {
        match sector {
            Sector::Here(place) => Ok(self.here[place as usize]),
            Sector::Spilled(place) => {
                let mut bytes = [0; SECTOR];
                let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
                file.read_exact_at(&mut bytes, u64::from(place) * SECTOR as u64)?;
                Ok(bytes)
            }
        }
    }

    /// The sectors that a range of bytes has a part of.
    fn range(&self, offset: u64, len: usize) -> impl Iterator<Item = (&u64, &Sector)> {
        let end = offset.saturating_add(len as u64).div_ceil(SECTOR as u64);
        self.map.range(offset / SECTOR as u64..end)
    }

    /// Copies what there is of a range of bytes; gives the parts of `buf` that are not there.
    fn copy(&self, offset: u64, buf: &mut [u8]) -> io::Result<Parts> {
        let (mut missing, mut done) = (Parts::new(), 0);
        for (at, sector) in self.range(offset, buf.len()) {
            let start = at * SECTOR as u64;
            let skip = offset.saturating_sub(start) as usize;
            let from = start.saturating_sub(offset) as usize;
            let to = buf.len().min(from + SECTOR - skip);
            if done < from {
                missing.push(done..from);
            }
            done = to;
            let spilled;
            let bytes = match sector {
                Sector::Here(place) => &self.here[*place as usize],
                sector => {
                    spilled = self.get(*sector)?;
                    &spilled
                }
            };
            buf[from..to].copy_from_slice(&bytes[skip..][..to - from]);
        }
        if done < buf.len() {
            missing.push(done..buf.len());
        }
        Ok(missing)
    }
}

/// Blocks that were read ahead, by their place.
pub(crate) type Fetched = HashMap<u64, Vec<u8>>;

/// Sectors over an image.
pub(crate) struct Overlay {
    base: Arc<dyn Blocks>,
    /// Over the log, if that is on another device.
    log: Option<Arc<Overlay>>,
    sectors: RwLock<Sectors>,
    /// Sectors that are read are kept here, until they are too many.
    remembers: AtomicBool,
    /// Blocks that were read ahead of their use.
    ahead: Mutex<Fetched>,
}

/// Keeps what is read of `base`, so that a small file system is read once, unless there is a bound on memory. Of a
/// large one the part that could be kept would save little, so nothing of it is.
pub(crate) fn remembered(base: Arc<dyn Blocks>, bound: Option<u64>) -> Arc<dyn Blocks> {
    match bound {
        Some(_) => base,
        None => {
            let overlay = Overlay::new(base, u64::MAX);
            overlay.remembers.store(true, Ordering::Relaxed);
            Arc::new(overlay)
        }
    }
}

impl Overlay {
    /// Without changes. About `keep` bytes of them are kept in memory, the others in a temporary file.
    pub fn new(base: Arc<dyn Blocks>, keep: u64) -> Overlay {
        // A sector, and its place in the map.
        let room = keep / (SECTOR as u64 + 48);
        let sectors = Sectors {
            room,
            ..Sectors::default()
        };
        Overlay {
            log: base.log().map(|log| Arc::new(Overlay::new(log, keep))),
            base,
            sectors: sectors.into(),
            remembers: false.into(),
            ahead: Mutex::default(),
        }
    }

    /// The image as it is now, without the changes that were put into a temporary file.
    pub fn snapshot(&self) -> Overlay {
        let sectors = self.sectors.read().expect("no holder panics");
        let mut copy = Overlay::new(self.base.clone(), u64::MAX);
        let of_copy = copy.sectors.get_mut().expect("just made");
        of_copy.map.clone_from(&sectors.map);
        (of_copy.map).retain(|_, sector| matches!(sector, Sector::Here(_)));
        of_copy.here.clone_from(&sectors.here);
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

    /// What the log is written to: this, or what is over the device that it is on.
    pub fn of_log(&self) -> &Overlay {
        self.log.as_deref().unwrap_or(self)
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
            self.copy(offset, &mut bytes)?;
            return Ok(bytes);
        }
        self.bytes(offset, len)
    }

    /// Whether anything differs from what is on disk.
    pub fn is_changed(&self) -> bool {
        if self.log.as_ref().is_some_and(|log| log.is_changed()) {
            return true;
        }
        let sectors = self.sectors.read().expect("no holder panics");
        let ends = |_, _: &_| Err(io::ErrorKind::Interrupted.into());
        self.differing(&sectors, |_| true, ends).is_err()
    }

    /// Gives `take` the sectors that `wanted` is for and that differ from those on disk, in order. Sectors that are near each other are
    /// read at once.
    fn differing(
        &self,
        sectors: &Sectors,
        wanted: impl Fn(u64) -> bool,
        mut take: impl FnMut(u64, &[u8; SECTOR]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut old = vec![0; MAX_COMPARED];
        let mut near = Vec::new();
        let mut all = (sectors.map.iter())
            .filter(|(at, _)| wanted(**at))
            .peekable();
        while let Some((&first, &sector)) = all.next() {
            let mut last = first;
            near.push((first, sector));
            let most = first + (MAX_COMPARED / SECTOR) as u64;
            while let Some((&at, &sector)) = all.next_if(|(at, _)| **at < most.min(last + NEAR)) {
                near.push((at, sector));
                last = at;
            }
            let place =
                |at: u64| ((at - first) as usize * SECTOR)..((at - first + 1) as usize * SECTOR);
            let all_read = self
                .base
                .read_data(first * SECTOR as u64, &mut old[..place(last).end]);
            for (at, sector) in near.drain(..) {
                let new = sectors.get(sector)?;
                let old = &mut old[place(at)];
                // Of sectors that can't be read together, some may be readable.
                let read = all_read.is_ok() || self.base.read_data(at * SECTOR as u64, old).is_ok();
                if !read || *old != new {
                    take(at, &new)?;
                }
            }
        }
        Ok(())
    }

    /// Bytes of the sectors that it has.
    pub fn changed(&self) -> u64 {
        let sectors = self.sectors.read().expect("no holder panics");
        (sectors.map.len() * SECTOR) as u64
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
        let mut send = |run: &mut (u64, Vec<u8>)| {
            if run.1.is_empty() {
                return Ok(());
            }
            written += run.1.len() as u64;
            sink.write(run.0 * SECTOR as u64, &std::mem::take(&mut run.1))
        };
        self.differing(
            &sectors,
            |at| class(at) == wanted,
            |at, new| {
                let next = run.0 + (run.1.len() / SECTOR) as u64;
                if next != at || run.1.len() >= MAX_WRITE {
                    send(&mut run)?;
                    run.0 = at;
                }
                run.1.extend_from_slice(new);
                Ok(())
            },
        )?;
        send(&mut run)?;
        if written > 0 {
            sink.flush()?;
        }
        Ok(written)
    }

    /// Copies the sectors there are of a range; gives the parts of `buf` that are not there.
    fn copy(&self, offset: u64, buf: &mut [u8]) -> io::Result<Parts> {
        let sectors = self.sectors.read().expect("no holder panics");
        sectors.copy(offset, buf)
    }

    /// Keeps the whole sectors of what was read. If that is too much all is given up.
    fn remember(&self, offset: u64, bytes: &[u8]) {
        if !self.remembers.load(Ordering::Relaxed) {
            return;
        }
        let mut sectors = self.sectors.write().expect("no holder panics");
        if sectors.map.len() * SECTOR + bytes.len() > MAX_REMEMBERED {
            self.remembers.store(false, Ordering::Relaxed);
            *sectors = Sectors::default();
            return;
        }
        let first = offset.next_multiple_of(SECTOR as u64);
        let whole = bytes.get((first - offset) as usize..).unwrap_or_default();
        for (at, part) in (first / SECTOR as u64..).zip(whole.as_chunks::<SECTOR>().0) {
            sectors.put(at, part);
        }
    }
}

impl Blocks for Overlay {
    fn size(&self) -> u64 {
        self.base.size()
    }

    fn read(&self, extents: &[DiskExtent], verifier: &'static dyn Verifier) -> io::Result<Block> {
        let bytes = |e: &DiskExtent| (e.daddr.saturating_mul(BBSIZE), e.bytes as usize);
        let has_part = {
            let sectors = self.sectors.read().expect("no holder panics");
            let mut places = extents.iter().map(bytes);
            places.any(|(at, len)| sectors.range(at, len).next().is_some())
        };
        if !has_part && !self.remembers.load(Ordering::Relaxed) {
            return self.base.read(extents, verifier);
        }
        let mut block = Vec::with_capacity(extents.iter().map(|e| e.bytes as usize).sum());
        for (at, len) in extents.iter().map(bytes) {
            block.extend_from_slice(&self.bytes(at, len)?);
        }
        Ok(Block::new(block))
    }

    fn data_file(&self) -> Option<BorrowedFd<'_>> {
        self.base.data_file()
    }

    fn log(&self) -> Option<Arc<dyn Blocks>> {
        Some(self.log.clone()?)
    }

    fn readahead(&self, extents: &[DiskExtent]) {
        self.base.readahead(extents);
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        for part in self.copy(offset, buf)? {
            let (at, part) = (offset + part.start as u64, &mut buf[part]);
            self.base.read_data(at, part)?;
            self.remember(at, part);
        }
        Ok(())
    }

    fn stream(&self, room: usize) -> Option<Box<dyn Stream + '_>> {
        Some(Box::new(OverlayStream {
            stream: self.base.stream(room)?,
            overlay: self,
            here: VecDeque::new(),
        }))
    }

    fn waits(&self) -> bool {
        self.base.waits()
    }

    fn readahead_data(&self, offset: u64, len: usize) {
        self.base.readahead_data(offset, len);
    }
}

/// Reads ahead of the image, less those of which the overlay has a part.
struct OverlayStream<'a> {
    stream: Box<dyn Stream + 'a>,
    overlay: &'a Overlay,
    /// Reads of ranges that the overlay has a part of: they were done at once.
    here: VecDeque<(u64, io::Result<Block>)>,
}

impl Stream for OverlayStream<'_> {
    fn unit(&self) -> u64 {
        self.stream.unit()
    }

    fn start(&mut self, offset: u64, len: usize) -> bool {
        let sectors = self.overlay.sectors.read().expect("no holder panics");
        let has_part = sectors.range(offset, len).next().is_some();
        drop(sectors);
        if !has_part {
            return self.stream.start(offset, len);
        }
        let read = self.overlay.bytes(offset, len);
        self.here.push_back((offset, read.map(Block::new)));
        true
    }

    fn send(&mut self) {
        self.stream.send();
    }

    fn next(&mut self) -> Option<(u64, io::Result<Block>)> {
        if let Some(read) = self.here.pop_front() {
            return Some(read);
        }
        let (offset, read) = self.stream.next()?;
        if let Ok(block) = &read {
            self.overlay.remember(offset, block);
        }
        Some((offset, read))
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
                .filter(|c| matches!(c, Sector::Here(_)));
            assert!(here.count() as u64 <= keep / 512);
        }
    }
}
