//! Keeps what was read, so that a small file system is read once.
//!
//! A check and the rounds of a repair read many structures several times. Of a large file system the part that
//! could be kept would save little, so nothing of it is.

use crate::blocks::{Block, Blocks, Stream};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The unit of what is kept.
const SECTOR: usize = 512;
/// Most bytes that are kept. Once more were read, nothing is kept any longer.
const MOST: usize = 16 << 20;

/// Sectors that were read.
#[derive(Default)]
struct ImageSectors {
    /// The place of each in `bytes`.
    places: HashMap<u64, usize>,
    bytes: Vec<u8>,
}

impl ImageSectors {
    /// Copies what is kept of a range; gives the parts of `buf` that are not.
    fn get(&self, offset: u64, buf: &mut [u8]) -> Vec<Range<usize>> {
        let mut missing: Vec<Range<usize>> = Vec::new();
        let mut from = 0;
        while from < buf.len() {
            let at = offset + from as u64;
            let within = (at % SECTOR as u64) as usize;
            let to = (from + SECTOR - within).min(buf.len());
            match self.places.get(&(at / SECTOR as u64)) {
                Some(place) => {
                    let kept = &self.bytes[place + within..][..to - from];
                    buf[from..to].copy_from_slice(kept);
                }
                None => match missing.last_mut() {
                    Some(last) if last.end == from => last.end = to,
                    _ => missing.push(from..to),
                },
            }
            from = to;
        }
        missing
    }

    /// Keeps the whole sectors of a range.
    fn put(&mut self, offset: u64, bytes: &[u8]) {
        let first = offset.next_multiple_of(SECTOR as u64);
        let skip = ((first - offset) as usize).min(bytes.len());
        let sectors = bytes[skip..].as_chunks::<SECTOR>().0.iter();
        for (sector, bytes) in (first / SECTOR as u64..).zip(sectors) {
            self.places.entry(sector).or_insert_with(|| {
                self.bytes.extend_from_slice(bytes);
                self.bytes.len() - SECTOR
            });
        }
    }
}

/// An image of which the sectors that were read are kept.
pub(crate) struct Remembered {
    base: Arc<dyn Blocks>,
    sectors: Mutex<ImageSectors>,
    /// More was read than is kept.
    full: AtomicBool,
}

/// Keeps what is read of `base`, unless there is a bound on memory.
pub(crate) fn remembered(base: Arc<dyn Blocks>, bound: Option<u64>) -> Arc<dyn Blocks> {
    match bound {
        Some(_) => base,
        None => Arc::new(Remembered {
            base,
            sectors: Mutex::default(),
            full: AtomicBool::new(false),
        }),
    }
}

impl Remembered {
    /// Gives up what is kept, and keeps nothing from now on.
    fn forget(&self) {
        self.full.store(true, Ordering::Relaxed);
        *self.sectors.lock().expect("no holder panics") = ImageSectors::default();
    }

    fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    /// Copies what is kept of a range; gives the parts of `buf` that are not.
    fn get(&self, offset: u64, buf: &mut [u8]) -> Vec<Range<usize>> {
        let sectors = self.sectors.lock().expect("no holder panics");
        sectors.get(offset, buf)
    }

    /// Reads those parts of `buf`.
    fn fill(&self, offset: u64, buf: &mut [u8], missing: Vec<Range<usize>>) -> io::Result<()> {
        for part in missing {
            let (at, part) = (offset + part.start as u64, &mut buf[part]);
            self.base.read_data(at, part)?;
            self.put(at, part);
        }
        Ok(())
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        if self.is_full() {
            return;
        }
        let mut sectors = self.sectors.lock().expect("no holder panics");
        if sectors.bytes.len() + bytes.len() > MOST {
            drop(sectors);
            self.forget();
        } else {
            sectors.put(offset, bytes);
        }
    }
}

impl Blocks for Remembered {
    fn size(&self) -> u64 {
        self.base.size()
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if self.is_full() {
            return self.base.read_data(offset, buf);
        }
        let missing = self.get(offset, buf);
        self.fill(offset, buf, missing)
    }

    fn stream(&self, room: usize) -> Option<Box<dyn Stream + '_>> {
        Some(Box::new(Remembering {
            stream: self.base.stream(room)?,
            image: self,
            here: VecDeque::new(),
        }))
    }

    fn waits(&self) -> bool {
        self.base.waits()
    }
}

/// Reads ahead, less those of what is kept.
struct Remembering<'a> {
    stream: Box<dyn Stream + 'a>,
    image: &'a Remembered,
    /// Reads that were kept.
    here: VecDeque<(u64, Block)>,
}

impl Stream for Remembering<'_> {
    fn unit(&self) -> u64 {
        self.stream.unit()
    }

    fn start(&mut self, offset: u64, len: usize) -> bool {
        let image = self.image;
        if !image.is_full() {
            let mut bytes = vec![0; len];
            let missing = image.get(offset, &mut bytes);
            // Of a read that is kept in part the rest is read at once. That it failed is told in the end.
            let part = missing.iter().map(|m| m.len()).sum::<usize>() < len;
            if part && image.fill(offset, &mut bytes, missing).is_ok() {
                self.here.push_back((offset, Block::new(bytes)));
                return true;
            }
        }
        self.stream.start(offset, len)
    }

    fn send(&mut self) {
        self.stream.send();
    }

    fn next(&mut self) -> Option<(u64, io::Result<Block>)> {
        if let Some((offset, block)) = self.here.pop_front() {
            return Some((offset, Ok(block)));
        }
        let (offset, read) = self.stream.next()?;
        if let Ok(block) = &read {
            self.image.put(offset, block);
        }
        Some((offset, read))
    }
}
