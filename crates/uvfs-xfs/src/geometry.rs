//! Sizes and address conversions of one file system, from its superblock.
//!
//! XFS has four kinds of addresses: a block number within an allocation group (`agbno`), a file
//! system block number (`fsbno`: allocation group in the high bits, `agbno` in the low
//! [`Geometry::agblklog`] bits), a disk address (`daddr`: 512-byte sectors from the start of the
//! device) and an inode number (allocation group, block and index in the block). Conversions from
//! numbers that were read from disk give `None` when the number is out of range.

use crate::error::{At, Error, Result};
use crate::format::*;
use std::cmp::Ordering;
use std::ops::Range;

/// Bytes of a disk sector in `daddr` units ("basic blocks").
pub const BBSIZE: u64 = 512;

/// The feature words of a superblock, decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// Version 5: checksums in all metadata, version 3 inodes.
    pub crc: bool,
    /// File types in directory entries.
    pub ftype: bool,
    /// Free inode B-tree.
    pub finobt: bool,
    /// Reverse mapping B-tree.
    pub rmapbt: bool,
    /// Reference count B-tree.
    pub reflink: bool,
    /// Inode B-tree block counts in the AGI.
    pub inobtcount: bool,
    /// Sparse inode chunks.
    pub sparse: bool,
    /// Wide timestamps.
    pub bigtime: bool,
    /// Wide extent counts.
    pub nrext64: bool,
    /// Metadata carries `meta_uuid`.
    pub meta_uuid: bool,
    /// A repair must run first.
    pub needsrepair: bool,
    /// Parent pointers.
    pub parent: bool,
    /// Names match without regard to ASCII case.
    pub ascii_ci: bool,
    /// Counters in the superblock are kept lazily.
    pub lazy_counters: bool,
    /// 32-bit project identifiers.
    pub projid32: bool,
    /// Inode chunks are aligned to `inoalignmt` blocks.
    pub aligned_inodes: bool,
    /// Unwritten extents.
    pub unwritten: bool,
    /// Quota bit of the superblock.
    pub quota: bool,
    /// Read-only compatible feature bits that are not known here: a reader does not need to know
    /// them, a checker does.
    pub unknown_ro_compat: u32,
    /// Log feature bits that are not known here.
    pub unknown_log_incompat: u32,
}

impl Features {
    /// Whether allocation groups have this tree.
    pub fn has_tree(&self, tree: Btree) -> bool {
        match tree {
            Btree::Fino => self.finobt,
            Btree::Rmap => self.rmapbt,
            Btree::Refcount => self.reflink,
            _ => true,
        }
    }
}

/// Sizes of a file system and the conversions between its addresses.
#[derive(Debug, Clone)]
pub struct Geometry {
    /// The features.
    pub features: Features,
    /// User-visible uuid.
    pub uuid: Uuid,
    /// The uuid in metadata blocks.
    pub meta_uuid: Uuid,
    /// Label without padding.
    pub label: Vec<u8>,
    /// Block size in bytes.
    pub block_size: u32,
    /// log2 of the block size.
    pub blocklog: u8,
    /// Sector size in bytes: the unit of allocation group headers.
    pub sector_size: u32,
    /// Inode size in bytes.
    pub inode_size: u32,
    /// log2 of the inode size.
    pub inodelog: u8,
    /// log2 of inodes per block.
    pub inopblog: u8,
    /// Allocation groups.
    pub agcount: u32,
    /// Blocks of every allocation group but the last.
    pub agblocks: u32,
    /// log2 of `agblocks`, rounded up.
    pub agblklog: u8,
    /// Blocks of the data section.
    pub dblocks: u64,
    /// Bytes of a directory block.
    pub dir_block_size: u32,
    /// log2 of blocks per directory block.
    pub dirblklog: u8,
    /// First block of the log, 0 if it is on another device.
    pub logstart: u64,
    /// Blocks of the log.
    pub logblocks: u32,
    /// Log stripe unit in bytes (0 or 1: none).
    pub logsunit: u32,
    /// Root directory.
    pub rootino: u64,
    /// Realtime bitmap inode.
    pub rbmino: u64,
    /// Realtime summary inode.
    pub rsumino: u64,
    /// Blocks of the realtime section.
    pub rblocks: u64,
    /// User, group and project quota inodes, those that there are.
    pub quota_inodes: [Option<u64>; 3],
    /// Inode chunk alignment in blocks (0: none).
    pub inoalignmt: u32,
    /// Sparse inode chunk alignment in blocks.
    pub spino_align: u32,
    /// Blocks that inodes are read in at once: a cluster lies wholly inside a chunk.
    pub cluster_blocks: u32,
    /// Most of the space that inodes may take, in percent; 0 is no limit.
    pub imax_pct: u8,
}

/// An error of the superblock unless `holds`.
fn require(
    holds: bool,
    name: &'static str,
    expected: &'static str,
    found: impl Into<u64>,
) -> Result<()> {
    let fault = Fault::field(name, expected, found);
    match holds {
        true => Ok(()),
        false => Err(Error::corrupt("superblock", At::Disk(0), fault)),
    }
}

/// The sizes of blocks, sectors and inodes, once they are known to fit each other.
fn sizes(sb: &Superblock) -> Result<(u32, u32, u32)> {
    let block = sb.blocksize.get();
    let good = block.is_power_of_two() && (512..=65536).contains(&block);
    let expected = "a power of two from 512 to 65536";
    require(good, "sb_blocksize", expected, block)?;
    let blocklog = block.trailing_zeros() as u8;
    let good = sb.blocklog == blocklog;
    require(good, "sb_blocklog", "log2 of sb_blocksize", sb.blocklog)?;

    let sector = sb.sector_size();
    let expected = "a power of two from 512 to 32768";
    require(sector.is_some(), "sb_sectsize", expected, sb.sectsize.get())?;
    let good = 1usize.checked_shl(sb.sectlog.into()) == sector;
    require(good, "sb_sectlog", "log2 of sb_sectsize", sb.sectlog)?;

    let inode = u32::from(sb.inodesize.get());
    let good = inode.is_power_of_two() && (256..=2048).contains(&inode) && inode <= block;
    let expected = "a power of two from 256 to 2048";
    require(good, "sb_inodesize", expected, inode)?;
    let inodelog = inode.trailing_zeros() as u8;
    let good = sb.inodelog == inodelog;
    require(good, "sb_inodelog", "log2 of sb_inodesize", sb.inodelog)?;
    let found = sb.inopblock.get();
    let good = sb.inopblog == blocklog - inodelog && u32::from(found) == block / inode;
    require(good, "sb_inopblock", "sb_blocksize / sb_inodesize", found)?;

    let good = sb.dirblklog <= 16 && sb.dirblklog + blocklog <= 16;
    let most = "directory blocks of 64 KiB at most";
    require(good, "sb_dirblklog", most, sb.dirblklog)?;
    Ok((block, sector.unwrap_or_default() as u32, inode))
}

/// Checks the allocation groups and the blocks that they have together; log2 of the blocks of one, rounded up.
fn check_groups(sb: &Superblock, inopblog: u8) -> Result<u8> {
    let (agcount, agblocks) = (sb.agcount.get(), sb.agblocks.get());
    require(agcount != 0, "sb_agcount", "at least 1", agcount)?;
    let good = (64..=1 << 31).contains(&agblocks);
    require(good, "sb_agblocks", "from 64 to 2^31", agblocks)?;
    let agblklog = (32 - (agblocks - 1).leading_zeros()) as u8;
    let (good, found) = (sb.agblklog == agblklog, sb.agblklog);
    let expected = "log2 of sb_agblocks, rounded up";
    require(good, "sb_agblklog", expected, found)?;
    let good = agblklog + inopblog <= 32;
    let fit = "inode numbers that fit in 32 bits";
    require(good, "sb_agblocks", fit, agblocks)?;

    let dblocks = sb.dblocks.get();
    let most = u64::from(agcount) * u64::from(agblocks);
    let least = u64::from(agcount - 1) * u64::from(agblocks) + 64;
    let good = (least..=most).contains(&dblocks) && dblocks <= u64::MAX >> 10 >> sb.blocklog;
    let expected = "as many as sb_agcount groups hold";
    require(good, "sb_dblocks", expected, dblocks)?;
    Ok(agblklog)
}

/// The largest stripe unit of a log that Linux mounts, in bytes: that of its largest record (XLOG_MAX_RECORD_BSIZE).
const MAX_LOG_UNIT: u32 = 256 << 10;

impl Geometry {
    /// Takes the geometry from a superblock that [`check_superblock`] passed.
    ///
    /// Fails with [`Error::Unsupported`] for a feature that cannot be read and with
    /// [`Error::Corrupt`] for sizes that contradict each other, or if mkfs was interrupted.
    pub fn new(sb: &Superblock) -> Result<Geometry> {
        let features = features(sb)?;
        let (block_size, sector_size, inode_size) = sizes(sb)?;
        let blocklog = block_size.trailing_zeros() as u8;
        let inodelog = inode_size.trailing_zeros() as u8;
        let agblklog = check_groups(sb, blocklog - inodelog)?;
        let label = sb.fname.split(|b| *b == 0).next();
        let g = Geometry {
            features,
            uuid: sb.uuid,
            meta_uuid: sb.metadata_uuid(),
            label: label.unwrap_or_default().to_vec(),
            block_size,
            blocklog,
            sector_size,
            inode_size,
            inodelog,
            inopblog: blocklog - inodelog,
            agcount: sb.agcount.get(),
            agblocks: sb.agblocks.get(),
            agblklog,
            dblocks: sb.dblocks.get(),
            dir_block_size: block_size << sb.dirblklog,
            dirblklog: sb.dirblklog,
            logstart: sb.logstart.get(),
            logblocks: sb.logblocks.get(),
            logsunit: sb.logsunit.get(),
            rootino: sb.rootino.get(),
            rbmino: sb.rbmino.get(),
            rsumino: sb.rsumino.get(),
            rblocks: sb.rblocks.get(),
            quota_inodes: quota_inodes(sb, &features),
            inoalignmt: sb.inoalignmt.get(),
            spino_align: sb.spino_align.get(),
            cluster_blocks: cluster_blocks(sb, &features),
            imax_pct: sb.imax_pct,
        };
        let root = g.inode(g.rootino).is_some();
        let inside = "an inode inside the file system";
        require(root, "sb_rootino", inside, g.rootino)?;
        let fits = |a: AgBlock| g.logblocks <= g.ag_blocks(a.agno) - a.agbno;
        let log = g.logstart == 0 || g.fsb(g.logstart).is_some_and(fits);
        let inside = "a log inside one allocation group";
        require(log, "sb_logstart", inside, g.logstart)?;
        let units = g.logsunit <= 1 || g.logsunit.is_multiple_of(block_size);
        let unit = units && g.logsunit <= MAX_LOG_UNIT;
        require(unit, "sb_logsunit", "blocks of 256 KiB at most", g.logsunit)?;
        Ok(g)
    }

    /// Blocks of allocation group `agno`, 0 for one that does not exist.
    pub fn ag_blocks(&self, agno: u32) -> u32 {
        match agno.cmp(&(self.agcount - 1)) {
            Ordering::Less => self.agblocks,
            // In range: the constructor has checked that dblocks ends inside the last group.
            Ordering::Equal => (self.dblocks - u64::from(agno) * u64::from(self.agblocks)) as u32,
            Ordering::Greater => 0,
        }
    }

    /// Blocks at the beginning of each allocation group that its headers are in.
    pub fn header_blocks(&self) -> u32 {
        (4 * self.sector_size).div_ceil(self.block_size)
    }

    /// Splits a file system block number, `None` if there is no such block or a group's headers are in it.
    pub fn fsb(&self, fsbno: u64) -> Option<AgBlock> {
        let agno = u32::try_from(fsbno >> self.agblklog).ok()?;
        let agbno = (fsbno & ((1u64 << self.agblklog) - 1)) as u32;
        self.has_agb(agno, agbno).then_some(AgBlock { agno, agbno })
    }

    /// Splits the file system block number of a run of `count` blocks; `None` unless all of them
    /// are there, in one allocation group, and `count` is not 0.
    pub fn fsb_run(&self, fsbno: u64, count: u32) -> Option<AgBlock> {
        let a = self.fsb(fsbno)?;
        (count > 0 && count <= self.ag_blocks(a.agno) - a.agbno).then_some(a)
    }

    /// Whether `agbno` is a block of allocation group `agno`, behind its headers.
    pub fn has_agb(&self, agno: u32, agbno: u32) -> bool {
        (self.header_blocks()..self.ag_blocks(agno)).contains(&agbno)
    }

    /// The file system block number of a block of an allocation group.
    pub fn fsbno(&self, a: AgBlock) -> u64 {
        u64::from(a.agno) << self.agblklog | u64::from(a.agbno)
    }

    /// Where a block of an allocation group is on disk, in 512-byte sectors.
    pub fn daddr(&self, a: AgBlock) -> u64 {
        (u64::from(a.agno) * u64::from(self.agblocks) + u64::from(a.agbno)) << (self.blocklog - 9)
    }

    /// Where a header sector ([`AGF_SECTOR`] and its like; 0 is the superblock's copy) of an
    /// allocation group is on disk, in 512-byte sectors.
    pub fn ag_header_daddr(&self, agno: u32, sector: u32) -> u64 {
        self.daddr(AgBlock { agno, agbno: 0 })
            + u64::from(sector) * u64::from(self.sector_size >> 9)
    }

    /// The allocation group and block that a disk address lies in, `None` if it is outside.
    pub fn daddr_block(&self, daddr: u64) -> Option<AgBlock> {
        let block = daddr >> (self.blocklog - 9);
        (block < self.dblocks).then(|| AgBlock {
            agno: (block / u64::from(self.agblocks)) as u32,
            agbno: (block % u64::from(self.agblocks)) as u32,
        })
    }

    /// The first byte of an inode on the device.
    pub fn inode_byte(&self, a: InodeAddress) -> u64 {
        (self.daddr(a.block()) << 9) + (u64::from(a.index) << self.inodelog)
    }

    /// Splits an inode number, `None` if there can be no such inode.
    pub fn inode(&self, ino: u64) -> Option<InodeAddress> {
        let agino_log = self.agblklog + self.inopblog;
        let agno = u32::try_from(ino >> agino_log).ok()?;
        let agino = (ino & ((1u64 << agino_log) - 1)) as u32;
        let agbno = (u64::from(agino) >> self.inopblog) as u32;
        (agbno != 0 && agbno < self.ag_blocks(agno)).then_some(InodeAddress {
            agno,
            agino,
            agbno,
            index: agino & ((1u32 << self.inopblog) - 1),
        })
    }

    /// Whether an inode is one of the file system's own, in no directory.
    pub fn is_own(&self, ino: u64) -> bool {
        ino == self.rbmino || ino == self.rsumino || self.quota_inodes.contains(&Some(ino))
    }

    /// The number of inode `agino` of allocation group `agno`.
    pub fn ino(&self, agno: u32, agino: u32) -> u64 {
        u64::from(agno) << (self.agblklog + self.inopblog) | u64::from(agino)
    }

    /// Whether the holes of a sparse chunk may be: inodes are allocated in clusters of `spino_align` blocks,
    /// so each cluster is there as a whole, or in a hole as a whole.
    pub fn holes_fit(&self, holemask: u16) -> bool {
        let inodes = self.spino_align.clamp(1, 64) << self.inopblog;
        let bits = (inodes / INODES_PER_HOLEMASK_BIT).clamp(1, 16);
        let cluster = u16::MAX >> (16 - bits);
        let mut parts = (0..16)
            .step_by(bits as usize)
            .map(|i| holemask >> i & cluster);
        parts.all(|hole| hole == 0 || hole == cluster)
    }

    /// Whether a chunk of inodes of allocation group `agno` may begin with this one.
    pub fn is_chunk(&self, agno: u32, startino: u32) -> bool {
        let aligned = match self.chunk_blocks() {
            // Several chunks in a block, or exactly one.
            1 => startino.is_multiple_of(INODES_PER_CHUNK),
            _ => startino & ((1 << self.inopblog) - 1) == 0,
        };
        aligned && (1..self.ag_blocks(agno)).contains(&(startino >> self.inopblog))
    }

    /// Blocks of an inode chunk (64 inodes), at least 1.
    pub fn chunk_blocks(&self) -> u32 {
        (INODES_PER_CHUNK >> self.inopblog).max(1)
    }

    /// First block, within its allocation group, of the cluster that holds `agbno`.
    pub fn cluster_start(&self, agbno: u32) -> u32 {
        agbno & !(self.cluster_blocks - 1)
    }

    /// A number of the cluster that an inode is read in: inodes of one cluster have the same one.
    pub fn cluster_of(&self, ino: u64) -> u64 {
        ino >> (self.cluster_blocks.trailing_zeros() + u32::from(self.inopblog))
    }

    /// The identity that a metadata block at `daddr` that `owner` (inode or allocation group) owns must have in
    /// its header.
    pub fn ident(&self, daddr: u64, owner: Option<u64>) -> Ident {
        Ident {
            crc: self.features.crc,
            uuid: self.meta_uuid,
            daddr,
            owner,
            summed: false,
        }
    }

    /// The identity of a header sector ([`AGF_SECTOR`] and its like) of an allocation group.
    pub fn header_ident(&self, agno: u32, sector: u32) -> Ident {
        self.ident(self.ag_header_daddr(agno, sector), Some(agno.into()))
    }

    /// The hash of a directory entry's name.
    pub fn hash_name(&self, name: &[u8]) -> u32 {
        match self.features.ascii_ci {
            true => da_hashname_ci(name),
            false => da_hashname(name),
        }
    }

    /// Whether two directory entries' names are the same.
    pub fn same_name(&self, a: &[u8], b: &[u8]) -> bool {
        let lower = |c: &u8| ascii_ci_lower(*c);
        match self.features.ascii_ci {
            true => a.iter().map(lower).eq(b.iter().map(lower)),
            false => a == b,
        }
    }

    /// File system blocks of a directory block.
    pub fn dir_blocks(&self) -> u64 {
        1 << self.dirblklog
    }

    /// The file blocks of a directory's index; the entries are before it, and the free index is behind it.
    pub fn dir_index(&self) -> Range<u64> {
        DIR2_LEAF_OFFSET >> self.blocklog..DIR2_FREE_OFFSET >> self.blocklog
    }

    /// The directory block of an entry, by the address in the index, and its first byte there.
    pub fn dir_entry(&self, address: u32) -> (u64, usize) {
        let byte = u64::from(address) * DIR2_DATA_ALIGN as u64;
        let size = u64::from(self.dir_block_size);
        (byte / size, (byte % size) as usize)
    }

    /// Bytes of the data section.
    pub fn data_bytes(&self) -> u64 {
        self.dblocks << self.blocklog
    }
}

/// A block of an allocation group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AgBlock {
    /// Allocation group.
    pub agno: u32,
    /// Block in it.
    pub agbno: u32,
}

/// Where an inode is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeAddress {
    /// Allocation group.
    pub agno: u32,
    /// Number in the allocation group.
    pub agino: u32,
    /// Block in the allocation group.
    pub agbno: u32,
    /// Index in the block.
    pub index: u32,
}

impl InodeAddress {
    /// The block that it is in.
    pub fn block(self) -> AgBlock {
        let InodeAddress { agno, agbno, .. } = self;
        AgBlock { agno, agbno }
    }
}

/// Blocks of the clusters that inodes may be read in, 1 where alignment does not promise more.
fn cluster_blocks(sb: &Superblock, f: &Features) -> u32 {
    // mkfs and the kernel use 8 KiB for 256-byte inodes and scale it with the inode size on
    // version 5. A cluster must not straddle a chunk, or (sparse) half a chunk.
    let inodes = if f.crc { sb.inodesize.get() / 256 } else { 1 };
    let want = ((8192 * u32::from(inodes)) >> sb.blocklog).max(1);
    let align = match f.sparse {
        true => sb.spino_align.get(),
        false => sb.inoalignmt.get(),
    };
    match f.aligned_inodes && align != 0 && align % want == 0 {
        true => want,
        false => 1,
    }
}

fn quota_inodes(sb: &Superblock, f: &Features) -> [Option<u64>; 3] {
    let some = |i: u64| (f.quota && i != 0 && i != NULLFSINO).then_some(i);
    let (u, g) = (some(sb.uquotino.get()), some(sb.gquotino.get()));
    match sb.qflags.get() & PQUOTA_ACCT {
        _ if f.crc => [u, g, some(sb.pquotino.get())],
        0 => [u, g, None],
        // Version 4 has one field for both; the flags say whose it is.
        _ => [u, None, g],
    }
}

/// Decodes the feature words and refuses, by name, what cannot be read.
fn features(sb: &Superblock) -> Result<Features> {
    let refuse = |what: String| Err(Error::Unsupported(what));
    let v = sb.versionnum.get();
    let version = v & VERSION_NUMBITS;
    if !(4..=5).contains(&version) {
        return refuse(format!("XFS version {version} is"));
    }
    if sb.inprogress != 0 {
        let fault = Fault::field("sb_inprogress", "0, as mkfs leaves it", sb.inprogress);
        return Err(Error::corrupt("superblock", At::Disk(0), fault));
    }
    if v & VERSION_SHARED != 0 || sb.shared_vn != 0 {
        return refuse("shared read-only XFS is".into());
    }
    let f2 = match v & VERSION_MOREBITS {
        0 => 0,
        _ => sb.features2.get(),
    };
    let common = Features {
        ascii_ci: v & VERSION_BORG != 0,
        quota: v & VERSION_QUOTA != 0,
        ..Features::default()
    };
    if version == 4 {
        if v & VERSION_DIRV2 == 0 {
            return refuse("version 1 directories are".into());
        }
        if sb.rblocks.get() != 0 {
            tracing::debug!("there is a realtime section; its files cannot be read");
        }
        return Ok(Features {
            ftype: f2 & VERSION2_FTYPE != 0,
            lazy_counters: f2 & VERSION2_LAZYSBCOUNT != 0,
            projid32: f2 & VERSION2_PROJID32 != 0,
            aligned_inodes: v & VERSION_ALIGN != 0,
            unwritten: v & VERSION_EXTFLG != 0,
            ..common
        });
    }
    let (ro, inc) = (sb.features_ro_compat.get(), sb.features_incompat.get());
    let readable = INCOMPAT_FTYPE
        | INCOMPAT_SPINODES
        | INCOMPAT_META_UUID
        | INCOMPAT_BIGTIME
        | INCOMPAT_NEEDSREPAIR
        | INCOMPAT_NREXT64
        | INCOMPAT_EXCHRANGE
        | INCOMPAT_PARENT;
    let rest = inc & !readable;
    if rest != 0 {
        let bits = (0..32).map(|i| 1u32 << i).filter(|b| rest & b != 0);
        let known = |bit| UNREADABLE_NAMES.iter().find(|(b, _)| *b == bit);
        let names: Vec<String> = bits
            .map(|bit| match known(bit) {
                Some((_, name)) => (*name).into(),
                None => format!("unknown incompatible bit {bit:#x}"),
            })
            .collect();
        return refuse(format!("XFS with {} is", names.join(", ")));
    }
    Ok(Features {
        crc: true,
        ftype: inc & INCOMPAT_FTYPE != 0,
        finobt: ro & RO_COMPAT_FINOBT != 0,
        rmapbt: ro & RO_COMPAT_RMAPBT != 0,
        reflink: ro & RO_COMPAT_REFLINK != 0,
        inobtcount: ro & RO_COMPAT_INOBTCNT != 0,
        sparse: inc & INCOMPAT_SPINODES != 0,
        bigtime: inc & INCOMPAT_BIGTIME != 0,
        nrext64: inc & INCOMPAT_NREXT64 != 0,
        meta_uuid: inc & INCOMPAT_META_UUID != 0,
        needsrepair: inc & INCOMPAT_NEEDSREPAIR != 0,
        parent: inc & INCOMPAT_PARENT != 0,
        // These are part of version 5.
        lazy_counters: true,
        projid32: true,
        aligned_inodes: true,
        unwritten: true,
        unknown_ro_compat: ro & !RO_COMPAT_ALL,
        unknown_log_incompat: sb.features_log_incompat.get() & !LOG_INCOMPAT_XATTRS,
        ..common
    })
}
