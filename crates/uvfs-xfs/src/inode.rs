//! Inodes, their forks, and file contents.

use crate::blocks::{Block, DiskExtent, Verify};
use crate::error::{At, Error, Result};
use crate::format::*;
use crate::geometry::{BBSIZE, Geometry};
use crate::volume::Volume;

/// Checks a metadata block of a fork against what it must say about itself.
pub(crate) type VerifyIdent<'a> = &'a (dyn Fn(&[u8], &Ident) -> Result<(), Fault> + Sync);

/// A moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Time {
    /// Seconds since 1970.
    pub sec: i64,
    /// Nanoseconds.
    pub nsec: u32,
}

/// Which of an inode's two forks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fork {
    /// Contents.
    Data,
    /// Extended attributes.
    Attr,
}

impl Fork {
    fn name(self) -> &'static str {
        match self {
            Fork::Data => "data fork",
            Fork::Attr => "attribute fork",
        }
    }

    fn btree_name(self) -> &'static str {
        match self {
            Fork::Data => "data fork B-tree block",
            Fork::Attr => "attribute fork B-tree block",
        }
    }
}

/// A run of a file's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataRun {
    /// Its length in bytes.
    pub len: usize,
    /// Where it begins on the device, in bytes; `None` for zeros (a hole or unwritten).
    pub device: Option<u64>,
}

/// An inode, decoded and checked.
#[derive(Debug, Clone)]
pub struct Inode {
    /// Its number.
    pub ino: u64,
    /// Type and permissions.
    pub mode: u16,
    /// Link count.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Project.
    pub projid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Blocks used by both forks.
    pub nblocks: u64,
    /// Access time.
    pub atime: Time,
    /// Modification time.
    pub mtime: Time,
    /// Change time.
    pub ctime: Time,
    /// Birth time, on version 5.
    pub crtime: Option<Time>,
    /// Generation.
    pub generation: u32,
    /// `DIFLAG_*`.
    pub flags: u16,
    /// `DIFLAG2_*`.
    pub flags2: u64,
    /// Major and minor number of a device.
    pub rdev: (u32, u32),
    /// Extents of the data fork.
    pub nextents: u64,
    /// Extents of the attribute fork.
    pub anextents: u64,
    format: u8,
    aformat: u8,
    /// Byte offsets of the forks in `raw`: data from, attributes from (or the end if there are
    /// none).
    data_at: usize,
    attr_at: usize,
    raw: Box<[u8]>,
}

impl Inode {
    /// The bytes that it was decoded from.
    pub(crate) fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// Checks and decodes the inode `ino` from its bytes (one inode size of them).
    pub fn parse(ino: u64, raw: &[u8], g: &Geometry) -> Result<Inode> {
        let bad = |fault| Error::corrupt("inode", At::Inode(ino), fault);
        let d = check_dinode(raw, &g.ident(0, Some(ino))).map_err(bad)?;
        let v3 = if d.version == 3 {
            Some(Dinode::at(raw, 0).map_err(bad)?)
        } else {
            None
        };
        let mode = d.mode.get();
        if mode == 0 {
            return Err(Error::NotFound("inode"));
        }
        let kind = FileType::from_mode(mode);
        let size = d.size.get();
        if i64::try_from(size).is_err() {
            return Err(bad(Fault::field("di_size", "less than 2^63", size)));
        }
        let flags2 = v3.map_or(0, |v| v.flags2.get());
        let (nextents, anextents) = if flags2 & DIFLAG2_NREXT64 != 0 {
            (d.big_nextents.get(), u64::from(d.nextents.get()))
        } else {
            (u64::from(d.nextents.get()), u64::from(d.anextents.get()))
        };
        let data_at = if v3.is_some() {
            DINODE_V3_SIZE
        } else {
            DINODE_V2_SIZE
        };
        let attr_at = match d.forkoff {
            0 => raw.len(),
            f => data_at + usize::from(f) * 8,
        };
        if attr_at > raw.len() || (d.forkoff != 0 && attr_at == raw.len()) {
            return Err(bad(Fault::field(
                "di_forkoff",
                "inside the inode",
                d.forkoff,
            )));
        }
        let data_len = attr_at - data_at;
        let formats: &[u8] = match kind {
            FileType::Regular => &[FORMAT_EXTENTS, FORMAT_BTREE],
            FileType::Directory | FileType::Symlink => {
                &[FORMAT_LOCAL, FORMAT_EXTENTS, FORMAT_BTREE]
            }
            FileType::Unknown => {
                return Err(bad(Fault::field("di_mode", "a file type", mode)));
            }
            _ => &[FORMAT_DEV],
        };
        if !formats.contains(&d.format) {
            return Err(bad(Fault::field(
                "di_format",
                "one for this type of file",
                d.format,
            )));
        }
        match d.format {
            FORMAT_LOCAL if size > data_len as u64 => {
                return Err(bad(Fault::field("di_size", "what fits in the inode", size)));
            }
            FORMAT_EXTENTS if nextents > (data_len / ExtentRecord::SIZE) as u64 => {
                return Err(bad(Fault::field(
                    "di_nextents",
                    "what fits in the inode",
                    nextents,
                )));
            }
            _ => {}
        }
        if d.forkoff != 0 {
            match d.aformat {
                FORMAT_LOCAL | FORMAT_BTREE => {}
                FORMAT_EXTENTS
                    if anextents <= ((raw.len() - attr_at) / ExtentRecord::SIZE) as u64 => {}
                FORMAT_EXTENTS => {
                    let expected = "what fits in the inode";
                    return Err(bad(Fault::field("di_anextents", expected, anextents)));
                }
                f => {
                    return Err(bad(Fault::field(
                        "di_aformat",
                        "local, extents or btree",
                        f,
                    )));
                }
            }
        }
        let rdev = if d.format == FORMAT_DEV {
            let dev = Be32::at(&raw[..attr_at], data_at).map_err(bad)?.get();
            (dev >> 18 & 0x3fff, dev & 0x3_ffff)
        } else {
            (0, 0)
        };
        let time = |raw: Be64| {
            let (sec, nsec) = timestamp(raw.get(), flags2 & DIFLAG2_BIGTIME != 0);
            Time { sec, nsec }
        };
        Ok(Inode {
            ino,
            mode,
            nlink: if d.version == 1 {
                d.onlink.get().into()
            } else {
                d.nlink.get()
            },
            uid: d.uid.get(),
            gid: d.gid.get(),
            projid: if d.version == 1 {
                0
            } else {
                u32::from(d.projid_hi.get()) << 16 | u32::from(d.projid_lo.get())
            },
            size,
            nblocks: d.nblocks.get(),
            atime: time(d.atime),
            mtime: time(d.mtime),
            ctime: time(d.ctime),
            crtime: v3.map(|v| time(v.crtime)),
            generation: d.r#gen.get(),
            flags: d.flags.get(),
            flags2,
            rdev,
            nextents,
            anextents,
            format: d.format,
            aformat: d.aformat,
            data_at,
            attr_at,
            raw: raw.into(),
        })
    }

    /// The type.
    pub fn file_type(&self) -> FileType {
        FileType::from_mode(self.mode)
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.file_type() == FileType::Directory
    }

    /// A fork's format, `FORMAT_*`; `None` if there is no such fork.
    pub fn fork_format(&self, fork: Fork) -> Option<u8> {
        match fork {
            Fork::Data => Some(self.format),
            Fork::Attr => (self.attr_at < self.raw.len()).then_some(self.aformat),
        }
    }

    /// A fork's part of the inode.
    pub fn fork_bytes(&self, fork: Fork) -> &[u8] {
        match fork {
            Fork::Data => &self.raw[self.data_at..self.attr_at],
            Fork::Attr => &self.raw[self.attr_at..],
        }
    }

    /// The contents of a local data fork.
    pub(crate) fn local_data(&self) -> &[u8] {
        // Inode::parse has checked that the size fits.
        &self.fork_bytes(Fork::Data)[..self.size as usize]
    }

    pub(crate) fn fault(&self, what: &'static str, fault: Fault) -> Error {
        Error::corrupt(what, At::Inode(self.ino), fault)
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
        };
        match inode.fork_format(fork) {
            Some(FORMAT_EXTENTS) => {
                let count = match fork {
                    Fork::Data => inode.nextents,
                    Fork::Attr => inode.anextents,
                };
                // Inode::parse has checked that they fit.
                let recs = ExtentRecord::slice_at(inode.fork_bytes(fork), 0, count as usize)
                    .map_err(|f| inode.fault(fork.name(), f))?;
                walk.leaf(recs).map(|_| ())
            }
            Some(FORMAT_BTREE) => walk.btree(),
            _ => Ok(()),
        }
    }

    /// Reads `count` blocks of a fork from file block `start` as one metadata block. `None` if
    /// none of them is mapped.
    pub(crate) fn read_fork_block(
        &self,
        what: &'static str,
        inode: &Inode,
        fork: Fork,
        start: u64,
        count: u32,
        verify: VerifyIdent<'_>,
    ) -> Result<Option<Block>> {
        let g = self.geometry();
        let Some(extents) = self.fork_extents(what, inode, fork, start, count)? else {
            return Ok(None);
        };
        let ident = g.ident(extents[0].daddr, Some(inode.ino));
        let verify: Verify<'_> = &|bytes| verify(bytes, &ident);
        self.read_block(what, inode.ino, &extents, verify).map(Some)
    }

    /// Where on disk a metadata block of a fork is; `None` if it is a hole.
    pub(crate) fn fork_extents(
        &self,
        what: &'static str,
        inode: &Inode,
        fork: Fork,
        start: u64,
        count: u32,
    ) -> Result<Option<Vec<DiskExtent>>> {
        let g = self.geometry();
        let mut extents: Vec<DiskExtent> = Vec::new();
        let mut next = start;
        self.map(inode, fork, start, start + u64::from(count), &mut |e| {
            if e.unwritten || e.startoff != next {
                let expected = "whole and written";
                return Err(inode.fault(what, Fault::field("mapping", expected, e.startoff)));
            }
            next += u64::from(e.blockcount);
            let a = g
                .fsb(e.startblock)
                .expect("map checks that extents lie inside");
            extents.push(DiskExtent {
                daddr: g.daddr(a),
                bytes: e.blockcount << g.blocklog,
            });
            Ok(true)
        })?;
        if extents.is_empty() {
            return Ok(None);
        }
        if next != start + u64::from(count) {
            return Err(inode.fault(what, Fault::field("mapping", "whole and written", next)));
        }
        Ok(Some(extents))
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
                Some(from) => self
                    .blocks()
                    .read_data(from, part)
                    .map_err(|source| Error::Io {
                        daddr: from / BBSIZE,
                        len: run.len,
                        source,
                    })?,
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
            let to = ((e.startoff + u64::from(e.blockcount)) << g.blocklog).min(end);
            let a = g
                .fsb(e.startblock)
                .expect("map checks that extents lie inside");
            let device = g.daddr(a) * BBSIZE + (from - (e.startoff << g.blocklog));
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
            let f = Fault::field("di_size", "from 1 to 1024 for a symbolic link", inode.size);
            return Err(inode.fault("symbolic link", f));
        }
        if inode.fork_format(Fork::Data) == Some(FORMAT_LOCAL) {
            return Ok(inode.local_data().to_vec());
        }
        let len = inode.size as usize;
        let g = self.geometry();
        let mut target = Vec::with_capacity(len);
        let mut block = 0u64;
        let payload = |crc| g.block_size as usize - if crc { RemoteHeader::SIZE } else { 0 };
        // The kernel puts one header on each extent, not on each block.
        while target.len() < len {
            let what = "symbolic link block";
            let mut extent = None;
            let left = len - target.len();
            let blocks = left.div_ceil(payload(g.features.crc)) as u64;
            self.map(inode, Fork::Data, block, block + blocks, &mut |e| {
                extent = Some(e);
                Ok(false)
            })?;
            let Some(e) = extent.filter(|e| e.startoff == block && !e.unwritten) else {
                return Err(inode.fault(what, Fault::field("mapping", "whole and written", block)));
            };
            let offset = target.len() as u32;
            let crc = g.features.crc;
            let b = self
                .read_fork_block(what, inode, Fork::Data, block, e.blockcount, &|b, ident| {
                    if crc {
                        check_remote(b, SYMLINK_MAGIC, offset, ident).map(|_| ())
                    } else {
                        Ok(())
                    }
                })?
                .ok_or_else(|| inode.fault(what, Fault::field("mapping", "whole", block)))?;
            let part = if crc {
                let h = RemoteHeader::at(&b, 0).map_err(|f| inode.fault(what, f))?;
                let part = b
                    .get(RemoteHeader::SIZE..)
                    .and_then(|p| p.get(..h.bytes.get() as usize));
                part.filter(|p| !p.is_empty()).ok_or_else(|| {
                    inode.fault(what, Fault::field("sl_bytes", "some bytes", h.bytes.get()))
                })?
            } else {
                &b[..]
            };
            target.extend_from_slice(&part[..part.len().min(left)]);
            block += u64::from(e.blockcount);
        }
        Ok(target)
    }
}

/// A walk over a fork's extents: everything below `pos` has been visited.
struct MapWalk<'a> {
    volume: &'a Volume,
    inode: &'a Inode,
    fork: Fork,
    pos: u64,
    end: u64,
    visit: &'a mut dyn FnMut(Extent) -> Result<bool>,
}

impl MapWalk<'_> {
    fn bad(&self, fault: Fault) -> Error {
        self.inode.fault(self.fork.name(), fault)
    }

    /// Visits the records of one leaf that overlap `pos..end`; gives whether to go on.
    fn leaf(&mut self, recs: &[ExtentRecord]) -> Result<bool> {
        let g = self.volume.geometry();
        let first = recs.partition_point(|r| {
            let e = r.unpack();
            e.startoff + u64::from(e.blockcount) <= self.pos
        });
        for (i, r) in recs[first..].iter().enumerate() {
            let mut e = r.unpack();
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
            e.startoff += skip;
            e.startblock += skip;
            e.blockcount -= skip as u32;
            let len = (self.end - e.startoff).min(u64::from(e.blockcount));
            e.blockcount = len as u32;
            self.pos = e.startoff + len;
            if !(self.visit)(e)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Goes down the fork's B-tree once for each leaf that the range touches. The level falls by
    /// one at each step, so that no path is longer than the root's level says, and the position
    /// only grows, so that no leaf is visited twice.
    fn btree(&mut self) -> Result<()> {
        let g = self.volume.geometry();
        let crc = g.features.crc;
        let root = self.inode.fork_bytes(self.fork);
        let head = *BmdrBlock::at(root, 0).map_err(|f| self.bad(f))?;
        let (level, numrecs) = (head.level.get(), usize::from(head.numrecs.get()));
        let room = (root.len() - BmdrBlock::SIZE) / 16;
        if level == 0 || level >= BTREE_MAXLEVELS {
            return Err(self.bad(Fault::field("bb_level", "from 1 to the greatest", level)));
        }
        if numrecs == 0 || numrecs > room {
            let found = head.numrecs.get();
            return Err(self.bad(Fault::field("bb_numrecs", "what fits in the inode", found)));
        }
        let root_keys = Be64::slice_at(root, BmdrBlock::SIZE, numrecs);
        let root_keys = root_keys.map_err(|f| self.bad(f))?;
        let root_ptrs = Be64::slice_at(root, BmdrBlock::SIZE + room * 8, numrecs);
        let root_ptrs = root_ptrs.map_err(|f| self.bad(f))?;
        loop {
            // The lowest key to the right of the path: where the next leaf begins.
            let (mut child, mut bound) = pick(root_keys, root_ptrs, self.pos);
            for want in (0..level).rev() {
                let block = self.tree_block(child, want)?;
                let h = BtreeLong::at(&block, 0).map_err(|f| self.bad(f))?;
                let n = usize::from(h.numrecs.get());
                let at = Btree::Bmap.header_len(crc);
                if want == 0 {
                    let recs = ExtentRecord::slice_at(&block, at, n).map_err(|f| self.bad(f))?;
                    if !self.leaf(recs)? {
                        return Ok(());
                    }
                    break;
                }
                let ptrs_at = Btree::Bmap.ptr_offset(block.len(), crc, 0);
                let keys = Be64::slice_at(&block, at, n).map_err(|f| self.bad(f))?;
                let ptrs = Be64::slice_at(&block, ptrs_at, n).map_err(|f| self.bad(f))?;
                if keys.is_empty() {
                    return Err(self.bad(Fault::field("bb_numrecs", "at least 1", 0u64)));
                }
                let (c, b) = pick(keys, ptrs, self.pos);
                child = c;
                bound = match (bound, b) {
                    (Some(x), Some(y)) => Some(x.min(y)),
                    (x, y) => x.or(y),
                };
            }
            match bound {
                Some(b) if b < self.end => {
                    if b < self.pos {
                        return Err(self.bad(Fault::field("br_startoff", "keys in order", b)));
                    }
                    // `pick` gave a key greater than the position was, so this is progress even
                    // when the leaf had nothing.
                    self.pos = b;
                }
                _ => return Ok(()),
            }
        }
    }

    fn tree_block(&self, fsbno: u64, level: u16) -> Result<Block> {
        let g = self.volume.geometry();
        let a = g.fsb(fsbno).ok_or_else(|| {
            self.bad(Fault::field(
                "bb_ptr",
                "a block inside the file system",
                fsbno,
            ))
        })?;
        let daddr = g.daddr(a);
        let ident = g.ident(daddr, Some(self.inode.ino));
        let what = self.fork.btree_name();
        let extents = [DiskExtent {
            daddr,
            bytes: g.block_size,
        }];
        let block = self
            .volume
            .read_block(what, self.inode.ino, &extents, &|b| {
                check_btree_long(b, &ident).map(|_| ())
            })?;
        let h = BtreeLong::at(&block, 0).map_err(|f| self.bad(f))?;
        if h.level.get() != level {
            let at = At::InodeBlock {
                ino: self.inode.ino,
                daddr,
            };
            let fault = Fault::field("bb_level", "one less than the parent's", h.level.get());
            return Err(Error::corrupt(what, at, fault));
        }
        Ok(block)
    }
}

/// The child that covers `pos` and the next child's key, which is greater than `pos`. `keys` is
/// not empty.
fn pick(keys: &[Be64], ptrs: &[Be64], pos: u64) -> (u64, Option<u64>) {
    let i = keys.partition_point(|k| k.get() <= pos).saturating_sub(1);
    let bound = keys[i + 1..].iter().map(|k| k.get()).find(|k| *k > pos);
    (ptrs[i].get(), bound)
}
