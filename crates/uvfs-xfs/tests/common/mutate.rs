//! Images in memory, and damage to them that knows where structures are and can set their checksums
//! right again. Shared by the tests and the fuzz target.

#![allow(dead_code, missing_docs)]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use uvfs_xfs::Blocks;
use uvfs_xfs::blocks::{Block, DiskExtent, Stream, Verifier};
use uvfs_xfs::format::*;

#[path = "fields.rs"]
mod fields;
#[allow(unused_imports, reason = "not every test program changes fields")]
pub use fields::{FieldChange, change_field, field_changes};
#[path = "records.rs"]
mod records;
#[allow(unused_imports, reason = "not every test program damages logs")]
pub use records::{LogRecord, damage_log, log_records};

const PAGE: usize = 4096;

/// An image whose pages of zeros take no memory; clones share pages until they are written.
#[derive(Clone)]
pub struct MemImage {
    pages: Vec<Option<Arc<[u8; PAGE]>>>,
    size: u64,
}

impl MemImage {
    pub fn load(path: &Path) -> io::Result<MemImage> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut pages = vec![None; (size as usize).div_ceil(PAGE)];
        // Holes are skipped.
        let mut at = 0;
        while let Ok(data) = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
            let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(data))?;
            let first = data as usize / PAGE;
            for (i, page) in pages.iter_mut().enumerate().skip(first) {
                let start = (i * PAGE) as u64;
                if start >= hole {
                    break;
                }
                let mut bytes = [0u8; PAGE];
                let n = (size - start).min(PAGE as u64) as usize;
                file.read_exact_at(&mut bytes[..n], start)?;
                if bytes != [0u8; PAGE] {
                    *page = Some(Arc::new(bytes));
                }
            }
            at = hole;
        }
        Ok(MemImage { pages, size })
    }

    /// Whether two images have the same bytes.
    pub fn same(&self, other: &MemImage) -> bool {
        self.size == other.size
            && self
                .pages
                .iter()
                .zip(&other.pages)
                .all(|(a, b)| match (a, b) {
                    (Some(a), Some(b)) => Arc::ptr_eq(a, b) || a == b,
                    (None, None) => true,
                    _ => false,
                })
    }

    /// Cuts it off.
    pub fn truncate(&mut self, size: u64) {
        self.size = self.size.min(size);
    }

    pub fn get(&self, offset: u64, buf: &mut [u8]) -> bool {
        if offset
            .checked_add(buf.len() as u64)
            .is_none_or(|e| e > self.size)
        {
            return false;
        }
        let mut done = 0;
        while done < buf.len() {
            let at = offset as usize + done;
            let (page, from) = (at / PAGE, at % PAGE);
            let n = (PAGE - from).min(buf.len() - done);
            match &self.pages[page] {
                Some(p) => buf[done..done + n].copy_from_slice(&p[from..from + n]),
                None => buf[done..done + n].fill(0),
            }
            done += n;
        }
        true
    }

    pub fn put(&mut self, offset: u64, bytes: &[u8]) {
        if offset + bytes.len() as u64 > self.size {
            return;
        }
        let mut done = 0;
        while done < bytes.len() {
            let at = offset as usize + done;
            let (page, from) = (at / PAGE, at % PAGE);
            let n = (PAGE - from).min(bytes.len() - done);
            let p = self.pages[page].get_or_insert_with(|| Arc::new([0; PAGE]));
            Arc::make_mut(p)[from..from + n].copy_from_slice(&bytes[done..done + n]);
            done += n;
        }
    }
}

impl Blocks for MemImage {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if self.get(offset, buf) {
            Ok(())
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }

    fn stream(&self, _: usize) -> Option<Box<dyn Stream + '_>> {
        Some(mem_stream(self))
    }
}

/// Reads ahead of an image, the last one first.
pub fn mem_stream(blocks: &dyn Blocks) -> Box<dyn Stream + '_> {
    Box::new(MemStream {
        blocks,
        in_flight: Vec::new(),
    })
}

/// An image, less a range that cannot be read; with reads ahead or without.
pub struct Partly {
    pub image: MemImage,
    pub bad: std::ops::Range<u64>,
    pub ahead: bool,
}

impl Blocks for Partly {
    fn size(&self) -> u64 {
        self.image.size()
    }

    fn read(&self, extents: &[DiskExtent], verifier: &'static dyn Verifier) -> io::Result<Block> {
        self.image.read(extents, verifier)
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if offset < self.bad.end && self.bad.start < offset + buf.len() as u64 {
            return Err(io::Error::other("bad sector"));
        }
        self.image.read_data(offset, buf)
    }

    fn stream(&self, _: usize) -> Option<Box<dyn Stream + '_>> {
        self.ahead.then(|| mem_stream(self))
    }
}

/// Reads that are done when they are waited for, the last one first.
struct MemStream<'a> {
    blocks: &'a dyn Blocks,
    in_flight: Vec<(u64, usize)>,
}

impl Stream for MemStream<'_> {
    fn unit(&self) -> u64 {
        512
    }

    fn start(&mut self, offset: u64, len: usize) -> bool {
        self.in_flight.push((offset, len));
        true
    }

    fn send(&mut self) {}

    fn next(&mut self) -> Option<(u64, io::Result<Block>)> {
        let (offset, len) = self.in_flight.pop()?;
        let mut bytes = vec![0; len];
        let result = self.blocks.read_data(offset, &mut bytes);
        Some((offset, result.map(|()| Block::new(bytes))))
    }
}

/// A structure in an image.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    pub kind: &'static str,
    pub offset: u64,
    pub len: usize,
    /// Where its checksum is, on version 5.
    pub crc: Option<usize>,
}

/// The structures of an image, found by their magic numbers.
pub fn regions(image: &MemImage) -> Vec<Region> {
    let mut sector = vec![0; 512];
    assert!(image.get(0, &mut sector));
    let sb = *Superblock::at(&sector, 0).unwrap();
    let v5 = sb.is_v5();
    let block = sb.blocksize.get() as usize;
    let (sect, inode) = (
        usize::from(sb.sectsize.get()),
        usize::from(sb.inodesize.get()),
    );
    let dir = block << sb.dirblklog;
    let mut out = Vec::new();
    for page in 0..image.pages.len() {
        if image.pages[page].is_none() {
            continue;
        }
        for s in 0..PAGE / 256 {
            let offset = (page * PAGE + s * 256) as u64;
            let mut head = [0u8; 16];
            if !image.get(offset, &mut head) {
                continue;
            }
            let half = u16::from_be_bytes([head[8], head[9]]);
            let found = match &head[..4] {
                b"XFSB" => Some(("superblock", sect, SB_CRC_OFFSET)),
                b"XAGF" => Some(("AGF", sect, AGF_CRC_OFFSET)),
                b"XAGI" => Some(("AGI", sect, AGI_CRC_OFFSET)),
                b"XAFL" => Some(("AGFL", sect, AGFL_CRC_OFFSET)),
                b"AB3B" | b"ABTB" => Some(("bnobt", block, BTREE_SHORT_CRC_OFFSET)),
                b"AB3C" | b"ABTC" => Some(("cntbt", block, BTREE_SHORT_CRC_OFFSET)),
                b"IAB3" | b"IABT" => Some(("inobt", block, BTREE_SHORT_CRC_OFFSET)),
                b"FIB3" | b"FIBT" => Some(("finobt", block, BTREE_SHORT_CRC_OFFSET)),
                b"RMB3" => Some(("rmapbt", block, BTREE_SHORT_CRC_OFFSET)),
                b"R3FC" => Some(("refcountbt", block, BTREE_SHORT_CRC_OFFSET)),
                b"BMA3" | b"BMAP" => Some(("bmbt", block, BTREE_LONG_CRC_OFFSET)),
                b"XDB3" | b"XD2B" => Some(("directory block", dir, DIR3_DATA_CRC_OFFSET)),
                b"XDD3" | b"XD2D" => Some(("directory data", dir, DIR3_DATA_CRC_OFFSET)),
                b"XDF3" | b"XD2F" => Some(("directory free", dir, DIR3_DATA_CRC_OFFSET)),
                b"XARM" => Some(("attribute value", block, REMOTE_CRC_OFFSET)),
                b"XSLM" => Some(("symbolic link", block, REMOTE_CRC_OFFSET)),
                [b'I', b'N', ..] => Some(("inode", inode, DINODE_CRC_OFFSET)),
                _ => match half {
                    DA3_NODE_MAGIC | DA_NODE_MAGIC => Some(("node", block, DA3_CRC_OFFSET)),
                    ATTR3_LEAF_MAGIC | ATTR_LEAF_MAGIC => {
                        Some(("attribute leaf", block, DA3_CRC_OFFSET))
                    }
                    DIR3_LEAF1_MAGIC | DIR3_LEAFN_MAGIC | DIR2_LEAF1_MAGIC | DIR2_LEAFN_MAGIC => {
                        Some(("directory leaf", dir, DA3_CRC_OFFSET))
                    }
                    _ => None,
                },
            };
            // Nothing but inodes is aligned to less than a sector.
            let Some((kind, len, crc)) = found.filter(|f| f.0 == "inode" || s % 2 == 0) else {
                continue;
            };
            if offset.is_multiple_of((len as u64).min(512)) {
                out.push(Region {
                    kind,
                    offset,
                    len,
                    crc: v5.then_some(crc),
                });
            }
        }
    }
    out
}

/// Sets the checksum of a structure right.
pub fn fix(image: &mut MemImage, r: &Region) {
    let mut bytes = vec![0; r.len];
    if let Some(crc) = r.crc
        && image.get(r.offset, &mut bytes)
    {
        store_crc(&mut bytes, crc);
        image.put(r.offset, &bytes);
    }
}

/// A source of choices: random in tests, the fuzzer's bytes in fuzzing.
pub trait Choose {
    fn next(&mut self) -> u64;

    fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { self.next() % n }
    }
}

/// Random choices (splitmix64).
pub struct Random(pub u64);

impl Choose for Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Choices taken from bytes, zeros when they are used up.
pub struct Bytes<'a>(pub &'a [u8]);

impl Choose for Bytes<'_> {
    fn next(&mut self) -> u64 {
        let n = self.0.len().min(4);
        let mut v = 0;
        for b in &self.0[..n] {
            v = v << 8 | u64::from(*b);
        }
        self.0 = &self.0[n..];
        v
    }
}

/// One of the structures, and its bytes, if the image has them.
fn choose<'r>(
    image: &MemImage,
    regions: &'r [Region],
    c: &mut dyn Choose,
) -> Option<(&'r Region, Vec<u8>)> {
    // A kind first, so that rare structures get their share.
    let mut kinds: Vec<&str> = regions.iter().map(|r| r.kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let kind = kinds[c.below(kinds.len() as u64) as usize];
    let of: Vec<&Region> = regions.iter().filter(|r| r.kind == kind).collect();
    let r = of[c.below(of.len() as u64) as usize];
    let mut bytes = vec![0; r.len];
    image.get(r.offset, &mut bytes).then_some((r, bytes))
}

/// Damages one structure; gives what was done.
pub fn damage(image: &mut MemImage, regions: &[Region], c: &mut dyn Choose) -> String {
    let Some((r, mut bytes)) = choose(image, regions, c) else {
        return "nothing".into();
    };
    let near = if c.below(4) == 0 {
        r.len
    } else {
        r.len.min(256)
    };
    let at = c.below(near as u64) as usize;
    let what = match c.below(6) {
        0 | 1 => {
            let bit = c.below(8);
            bytes[at] ^= 1 << bit;
            format!("bit {bit} of byte {at}")
        }
        2 | 3 => {
            let width = 1usize << c.below(4);
            let at = at / width * width;
            let interesting = [
                0,
                1,
                2,
                0x7f,
                0xff,
                0x1000,
                u64::MAX,
                u64::MAX >> 1,
                1 << 31,
            ];
            let v = match c.below(2) {
                0 => interesting[c.below(interesting.len() as u64) as usize],
                _ => c.next(),
            };
            let v = v.to_be_bytes();
            let n = width.min(r.len - at);
            bytes[at..at + n].copy_from_slice(&v[8 - n..]);
            format!("{n} bytes at {at} to {:02x?}", &v[8 - n..])
        }
        4 => {
            let width = 1usize << c.below(4);
            let at = at / width * width;
            let n = width.min(8).min(r.len - at);
            let mut v = [0; 8];
            v[8 - n..].copy_from_slice(&bytes[at..at + n]);
            let d = c.below(7).wrapping_sub(3);
            let v = u64::from_be_bytes(v).wrapping_add(d).to_be_bytes();
            bytes[at..at + n].copy_from_slice(&v[8 - n..]);
            format!("{n} bytes at {at} by {}", d as i64)
        }
        _ => {
            let len = 1 + c.below(64) as usize;
            let from = c.below(r.len as u64) as usize;
            let n = len.min(r.len - at).min(r.len - from);
            bytes.copy_within(from..from + n, at);
            format!("{n} bytes from {from} to {at}")
        }
    };
    image.put(r.offset, &bytes);
    let fixed = c.below(8) != 0;
    if fixed {
        fix(image, r);
    }
    let crc = if fixed { "" } else { ", checksum left" };
    format!("{} at {:#x}: {what}{crc}", r.kind, r.offset)
}
