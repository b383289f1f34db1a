//! Where the data of a fork lies, and its contents.

use crate::blocks::{Block, DiskExtent, io_error};
use crate::error::{At, Error, Result};
use crate::format::*;
use crate::geometry::{AgBlock, BBSIZE, Geometry};
use crate::read::verifier;
use crate::read::volume::Volume;
use crate::walk::btree::{Cause, Defect, Item, Visitor, fork_tree};
use std::io;
use std::ops::Range;
use uvfs_buf::Verifier;

use super::{Fork, ForkRange, Inode, VerifyIdent};

/// A walk over a fork's extents: everything below `pos` has been visited.
struct MapWalk<'a> {
    volume: &'a Volume,
    inode: &'a Inode,
    fork: Fork,
    pos: u64,
    end: u64,
    visit: &'a mut dyn FnMut(Extent) -> Result<bool>,
    result: Result<()>,
}

impl MapWalk<'_> {
    fn bad(&self, fault: Fault) -> Error {
        self.inode.fault(self.fork.name(), fault)
    }

    /// Ends the walk.
    fn stop(&mut self, error: Error) -> bool {
        self.result = Err(error);
        false
    }

    /// Visits the records of one leaf that overlap `pos..end`; gives whether to go on.
    fn leaf(&mut self, recs: &[ExtentRecord]) -> Result<bool> {
        let g = self.volume.geometry();
        let first = recs.partition_point(|r| r.unpack().end() <= self.pos);
        for (i, r) in recs[first..].iter().enumerate() {
            let e = r.unpack();
            if e.startoff >= self.end {
                return Ok(false);
            }
            // Only the first may begin before the position: otherwise they overlap.
            let skip = match self.pos.checked_sub(e.startoff) {
                Some(skip) if skip > 0 && i > 0 => {
                    return Err(self.bad(Fault::field("br_startoff", "in order", e.startoff)));
                }
                Some(skip) => skip,
                None => 0,
            };
            if g.fsb_run(e.startblock, e.blockcount).is_none() {
                let expected = "an extent inside an allocation group";
                return Err(self.bad(Fault::field("br_startblock", expected, e.startblock)));
            }
            if skip >= u64::from(e.blockcount) {
                return Err(self.bad(Fault::field("br_startoff", "in order", e.startoff)));
            }
            let from = e.startoff + skip;
            self.pos = self.end.min(e.end());
            if !(self.visit)(e.part(skip, (self.pos - from) as u32))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Visitor for MapWalk<'_> {
    fn read(&mut self, a: AgBlock) -> io::Result<Block> {
        let g = self.volume.geometry();
        let extent = DiskExtent {
            daddr: g.daddr(a),
            bytes: g.block_size,
        };
        self.volume.read_block(&[extent], verifier::BTREE_LONG)
    }

    fn range(&self) -> Option<Range<u64>> {
        Some(self.pos..self.end)
    }

    fn passed(&mut self, key: u64) {
        // Progress even where there was nothing.
        self.pos = self.pos.max(key);
    }

    fn item(&mut self, item: Result<Item<'_>, Defect>) -> bool {
        let (at, why) = match item {
            Ok(Item::Records { bytes, n, .. }) => {
                let recs = ExtentRecord::slice_at(bytes, 0, n).unwrap_or_default();
                return self.leaf(recs).unwrap_or_else(|e| self.stop(e));
            }
            // A tree can be followed in spite of fields that do not fit.
            Ok(_) | Err(Defect::Differs { .. }) => return true,
            Err(Defect::Lost { at, why, .. }) => (at, why),
        };
        let g = self.volume.geometry();
        let ino = self.inode.ino;
        let daddr = at.and_then(|b| g.fsb(b)).map(|a| g.daddr(a));
        self.stop(match (why, daddr) {
            (Cause::Io(source), daddr) => Error::Io {
                daddr: daddr.unwrap_or(0),
                len: g.block_size as usize,
                source,
            },
            (Cause::Fault(fault), None) => self.bad(fault),
            (Cause::Fault(fault), Some(daddr)) => {
                let at = At::InodeBlock { ino, daddr };
                Error::corrupt(self.fork.btree_name(), at, fault)
            }
        })
    }
}

impl Volume {
    /// Visits the extents of a fork that overlap file blocks `start..end`, in order, until `visit`
    /// gives `false`. Gaps between them are holes. Every extent lies wholly in one allocation
    /// group.
    pub fn map(
        &self,
        inode: &Inode,
        fork: Fork,
        start: u64,
        end: u64,
        visit: &mut dyn FnMut(Extent) -> Result<bool>,
    ) -> Result<()> {
        let mut walk = MapWalk {
            volume: self,
            inode,
            fork,
            pos: start,
            end,
            visit,
            result: Ok(()),
        };
        match inode.fork_format(fork) {
            Some(FORMAT_EXTENTS) => walk.leaf(inode.records(fork)).map(|_| ()),
            Some(FORMAT_BTREE) => {
                let (g, root) = (self.geometry(), inode.fork_bytes(fork));
                fork_tree(g, inode.ino, root, &mut walk);
                walk.result
            }
            _ => Ok(()),
        }
    }

    /// Reads a range of a fork as one metadata block, which has to pass `check`. `None` if none of its blocks is mapped.
    pub(crate) fn read_fork_block(
        &self,
        what: &'static str,
        inode: &Inode,
        range: ForkRange,
        verifier: &'static dyn Verifier,
        check: VerifyIdent<'_>,
    ) -> Result<Option<Block>> {
        let Some(extents) = self.fork_extents(what, inode, range)? else {
            return Ok(None);
        };
        let (ino, daddr) = (inode.ino, extents[0].daddr);
        let read = self.read_block(&extents, verifier);
        let block = read.map_err(|e| io_error(&extents, e))?;
        match check(&block, &self.ident(&block, daddr, ino)) {
            Ok(()) => Ok(Some(block)),
            Err(fault) => Err(Error::corrupt(what, At::InodeBlock { ino, daddr }, fault)),
        }
    }

    /// Where on disk a metadata block of a fork is; `None` if it is a hole.
    pub(crate) fn fork_extents(
        &self,
        what: &'static str,
        inode: &Inode,
        (fork, start, count): ForkRange,
    ) -> Result<Option<Vec<DiskExtent>>> {
        let g = self.geometry();
        let unfit = |at| inode.wrong(what, "mapping", "whole and written", at);
        let mut extents: Vec<DiskExtent> = Vec::new();
        let mut next = start;
        self.map(inode, fork, start, start + u64::from(count), &mut |e| {
            if e.unwritten || e.startoff != next {
                return Err(unfit(e.startoff));
            }
            next += u64::from(e.blockcount);
            extents.push(DiskExtent {
                daddr: extent_daddr(g, &e),
                bytes: e.blockcount << g.blocklog,
            });
            Ok(true)
        })?;
        match extents.is_empty() {
            true => Ok(None),
            false if next != start + u64::from(count) => Err(unfit(next)),
            false => Ok(Some(extents)),
        }
    }

    /// Reads `len` bytes that are in blocks of their own, from a block of a fork on: a value (`magic` is
    /// [`ATTR3_RMT_MAGIC`]) has a header on each block, a symbolic link's target on each extent.
    pub(crate) fn read_remote(
        &self,
        what: &'static str,
        inode: &Inode,
        (fork, first): (Fork, u64),
        magic: u32,
        len: usize,
    ) -> Result<Vec<u8>> {
        let g = self.geometry();
        let header = if g.features.crc {
            RemoteHeader::SIZE
        } else {
            0
        };
        let mut out = Vec::with_capacity(len);
        let mut block = first;
        while out.len() < len {
            let left = len - out.len();
            let count = match magic {
                ATTR3_RMT_MAGIC => 1,
                _ => {
                    let most = left.div_ceil(g.block_size as usize - header) as u64;
                    self.run_at(what, inode, (fork, block), most)?
                }
            };
            let offset = out.len() as u32;
            let check = |b: &[u8], ident: &Ident| check_remote(b, magic, offset, ident).map(|_| ());
            let range = (fork, block, count);
            let read = self.read_fork_block(what, inode, range, verifier::REMOTE, &check)?;
            let hole = || inode.wrong(what, "mapping", "a block, not a hole", block);
            let bytes = read.ok_or_else(hole)?;
            let end = match g.features.crc {
                // The check has made sure that they fit.
                true => RemoteHeader::at(&bytes, 0).map_or(0, |h| h.bytes.get() as usize) + header,
                false => bytes.len(),
            };
            let part = &bytes[header..end];
            if part.is_empty() {
                return Err(inode.wrong(what, "bytes", "some bytes", 0u64));
            }
            out.extend_from_slice(&part[..part.len().min(left)]);
            block += u64::from(count);
        }
        Ok(out)
    }

    /// How many blocks of a fork lie one after another from `block` on, `most` at most.
    fn run_at(
        &self,
        what: &'static str,
        inode: &Inode,
        (fork, block): (Fork, u64),
        most: u64,
    ) -> Result<u32> {
        let mut extent = None;
        self.map(inode, fork, block, block + most, &mut |e| {
            extent = Some(e);
            Ok(false)
        })?;
        let extent = extent.filter(|e| e.startoff == block && !e.unwritten);
        let unfit = || inode.wrong(what, "mapping", "whole and written", block);
        extent.map(|e| e.blockcount).ok_or_else(unfit)
    }

    /// Reads from a regular file at byte `offset`. Gives the number of bytes read, which is less
    /// than the length of `buf` only at the end of the file. Holes and unwritten extents read as
    /// zeros.
    pub fn read(&self, inode: &Inode, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        for run in self.data_runs(inode, offset, buf.len())? {
            let (at, part) = (done, &mut buf[done..done + run.len]);
            done = at + run.len;
            match run.device {
                None => part.fill(0),
                Some(from) => {
                    let failed = |source| Error::Io {
                        daddr: from / BBSIZE,
                        len: run.len,
                        source,
                    };
                    self.blocks().read_data(from, part).map_err(failed)?;
                }
            }
        }
        Ok(done)
    }

    /// Where `len` bytes of a regular file from byte `offset` are: runs one after another, up to
    /// the end of the file.
    pub fn data_runs(&self, inode: &Inode, offset: u64, len: usize) -> Result<Vec<DataRun>> {
        if inode.file_type() != FileType::Regular {
            return Err(Error::WrongType {
                ino: inode.ino,
                wanted: "regular file",
            });
        }
        if inode.flags & DIFLAG_REALTIME != 0 {
            let what = format!("inode {}: data in the realtime section is", inode.ino);
            return Err(Error::Unsupported(what));
        }
        let len = inode.size.saturating_sub(offset).min(len as u64);
        let mut runs: Vec<DataRun> = Vec::new();
        if len == 0 {
            return Ok(runs);
        }
        let g = self.geometry();
        let end = offset + len;
        let mut push = |from: &mut u64, to: u64, device: Option<u64>| {
            let len = (to - *from) as usize;
            *from = to;
            if len == 0 {
                return;
            }
            let ended = |r: &DataRun| r.device.map(|at| at + r.len as u64);
            match runs.last_mut() {
                Some(last) if ended(last) == device => last.len += len,
                _ => runs.push(DataRun { len, device }),
            }
        };
        let mut at = offset;
        let (first, last) = (offset >> g.blocklog, (end - 1) >> g.blocklog);
        self.map(inode, Fork::Data, first, last + 1, &mut |e| {
            if e.unwritten {
                return Ok(true);
            }
            // The part of this extent that was asked for; map has clipped it to whole blocks.
            let from = (e.startoff << g.blocklog).max(offset);
            let to = (e.end() << g.blocklog).min(end);
            let device = extent_daddr(g, &e) * BBSIZE + (from - (e.startoff << g.blocklog));
            push(&mut at, from, None);
            push(&mut at, to, Some(device));
            Ok(true)
        })?;
        push(&mut at, end, None);
        Ok(runs)
    }

    /// The target of a symbolic link.
    pub fn readlink(&self, inode: &Inode) -> Result<Vec<u8>> {
        if inode.file_type() != FileType::Symlink {
            return Err(Error::WrongType {
                ino: inode.ino,
                wanted: "symbolic link",
            });
        }
        if inode.size == 0 || inode.size > SYMLINK_MAXLEN as u64 {
            let expected = "from 1 to 1024 for a symbolic link";
            return Err(inode.wrong("symbolic link", "di_size", expected, inode.size));
        }
        if inode.fork_format(Fork::Data) == Some(FORMAT_LOCAL) {
            return Ok(inode.local_data().to_vec());
        }
        let (what, len) = ("symbolic link block", inode.size as usize);
        self.read_remote(what, inode, (Fork::Data, 0), SYMLINK_MAGIC, len)
    }
}

/// Where an extent that [`Volume::map`] gave is on disk, in 512-byte sectors.
fn extent_daddr(g: &Geometry, e: &Extent) -> u64 {
    let a = g.fsb(e.startblock);
    g.daddr(a.expect("map checks that extents lie inside"))
}

/// A run of a file's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataRun {
    /// Its length in bytes.
    pub len: usize,
    /// Where it begins on the device, in bytes; `None` for zeros (a hole or unwritten).
    pub device: Option<u64>,
}
