//! The sizes of a new file system: chosen as mkfs.xfs of xfsprogs 6.1 chooses them (mkfs.xfs(8)).

use super::{MkfsError, MkfsOptions};
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use std::ops::RangeInclusive;
use zerocopy::FromZeros;

/// Smallest allocation group: 16 MiB.
const MIN_AG_BYTES: u64 = 16 << 20;
/// The last allocation group may be smaller, down to this, in a file system that is too small for two of that size.
const MIN_LAST_AG_BYTES: u64 = 1 << 20;
/// Largest allocation group: a block less than 1 TiB.
const MAX_AG_BYTES: u64 = 1 << 40;
/// Smallest file system whose log is of an ordinary size, and the smallest that mkfs.xfs makes.
pub const MIN_ORDINARY_BYTES: u64 = 300 << 20;
/// Smallest file system with two groups. A single one has no copy of the superblock, so that xfs_repair refuses it
/// without `-o force_geometry`.
pub const MIN_TWO_GROUPS_BYTES: u64 = MIN_AG_BYTES + MIN_LAST_AG_BYTES;
/// Smallest file system that can be made at all: of a single group, which the kernel wants to be this large.
pub const MIN_BYTES: u64 = 16 << 20;
/// Smallest log of an ordinary file system.
const MIN_LOG_BYTES: u64 = 64 << 20;
/// Largest log.
const MAX_LOG_BYTES: u64 = (2 << 30) - (10 << 20);
/// The log takes this part of the file system, between those bounds.
const LOG_RATIO: u64 = 2048;

/// The blocks of a new file system that are at fixed places.
#[derive(Debug, Clone)]
pub(crate) struct FixedBlocks {
    /// The superblock, with counters of 0; not in progress.
    pub sb: Superblock,
    /// The geometry of that.
    pub g: Geometry,
    /// Blocks in each allocation group's free list.
    pub free_list: u32,
    /// The allocation group with the log; `None` if that is on another device.
    pub log_ag: Option<u32>,
}

/// Checks the sizes of blocks, sectors and inodes, and the label.
fn check_options(o: &MkfsOptions) -> Result<(), MkfsError> {
    let block = o.block_size;
    let fits = |size: u32, range: RangeInclusive<u32>, most: u32| {
        size.is_power_of_two() && range.contains(&size) && size <= most
    };
    if !fits(block, 1024..=65536, u32::MAX) {
        let range = "powers of two from 1024 to 65536";
        return refuse(format!("a block size of {block}: {range} are possible"));
    }
    let sector = o.sector_size;
    if !fits(sector, 512..=32768, block) {
        let range = "powers of two from 512 to 32768, at most the block size,";
        return refuse(format!("a sector size of {sector}: {range} are possible"));
    }
    let inode = o.inode_size;
    if !fits(inode, 512..=2048, block / 2) {
        let range = "powers of two from 512 to 2048, at most half of a block,";
        return refuse(format!("an inode size of {inode}: {range} are possible"));
    }
    match o.label.len() {
        ..=12 => Ok(()),
        _ => refuse("a label of more than 12 bytes".into()),
    }
}

fn refuse<T>(why: String) -> Result<T, MkfsError> {
    Err(MkfsError::Options(why))
}

/// How many percent of the blocks may hold inodes.
fn max_pct(o: &MkfsOptions, bytes: u64) -> Result<u8, MkfsError> {
    match o.max_pct {
        Some(p) if p > 100 => refuse(format!("maxpct={p}: at most 100")),
        Some(p) => Ok(p),
        None if bytes < 1 << 40 => Ok(25),
        None if bytes < 50 << 40 => Ok(5),
        None => Ok(1),
    }
}

fn set_features(sb: &mut Superblock, large_sectors: bool) {
    let mut version = 5 | if large_sectors { VERSION_SECTOR } else { 0 };
    let mut features2 = 0;
    fit_v5(&mut version, &mut features2);
    sb.versionnum.set(version);
    sb.features2.set(features2);
    sb.bad_features2.set(features2);
    sb.features_ro_compat
        .set(RO_COMPAT_FINOBT | RO_COMPAT_REFLINK | RO_COMPAT_INOBTCNT);
    sb.features_incompat
        .set(INCOMPAT_FTYPE | INCOMPAT_SPINODES | INCOMPAT_BIGTIME);
}

/// The roots of the B-trees of an allocation group lie after the headers, in this order.
pub(crate) const ROOTS: [Btree; 5] = [
    Btree::Bno,
    Btree::Cnt,
    Btree::Ino,
    Btree::Fino,
    Btree::Refcount,
];

impl FixedBlocks {
    /// The block of the root of a tree, in its allocation group.
    pub fn root(&self, tree: Btree) -> u32 {
        let i = ROOTS.iter().position(|t| *t == tree).unwrap_or(0);
        self.g.header_blocks() + i as u32
    }

    /// The first block after the roots: the log's, or the free list's.
    pub fn after_roots(&self) -> u32 {
        self.g.header_blocks() + ROOTS.len() as u32
    }

    /// The first block of an allocation group that is not taken by headers, roots, log and free
    /// list.
    pub fn first_free(&self, agno: u32) -> u32 {
        self.free_list_start(agno) + self.free_list
    }

    /// The first block of the free list.
    pub fn free_list_start(&self, agno: u32) -> u32 {
        match Some(agno) == self.log_ag {
            true => self.after_roots() + self.g.logblocks,
            false => self.after_roots(),
        }
    }

    /// Inodes that are allocated together, at least a chunk and at least a block.
    pub fn unit_inodes(&self) -> u32 {
        INODES_PER_CHUNK.max(1 << self.g.inopblog)
    }

    /// Chooses all sizes for a file system of `bytes` bytes.
    pub fn new(o: &MkfsOptions, bytes: u64, uuid: Uuid) -> Result<FixedBlocks, MkfsError> {
        check_options(o)?;
        let (block, sector, inode) = (o.block_size, o.sector_size, o.inode_size);
        if bytes < MIN_BYTES {
            let least = MIN_BYTES >> 20;
            return refuse(format!(
                "{bytes} bytes are too few: at least {least}M are needed"
            ));
        }
        let blocklog = block.trailing_zeros();
        let mut dblocks = bytes >> blocklog;
        let (agblocks, mut agcount) = groups(o, dblocks, blocklog)?;
        // A last group that is too small is left out.
        let rest = dblocks % agblocks;
        let least = match bytes < 2 * MIN_AG_BYTES {
            true => MIN_LAST_AG_BYTES,
            false => MIN_AG_BYTES,
        };
        if rest != 0 && rest < least >> blocklog {
            if agcount == 1 {
                return refuse("the only allocation group is too small".into());
            }
            dblocks -= rest;
            agcount -= 1;
        }
        let Ok(agcount) = u32::try_from(agcount) else {
            return refuse(format!("{agcount} allocation groups are too many"));
        };
        let agblocks = agblocks as u32;
        let agblklog = 32 - (agblocks - 1).leading_zeros();
        let inopblog = blocklog - inode.trailing_zeros();
        if agblklog + inopblog > 32 {
            return refuse("allocation groups with more than 2^32 inodes".into());
        }
        // Directory blocks are of 4 KiB at least.
        let dirblklog = 12u32.saturating_sub(blocklog);
        let after_roots = (4 * sector).div_ceil(block) + ROOTS.len() as u32;
        let free_list = 2 * alloc_levels(agblocks, block).min(2);
        let log_ag = match bytes < 2 * MIN_AG_BYTES {
            _ if o.log_device.is_some() => None,
            true => Some(0),
            false => Some(agcount / 2),
        };
        // Leave the log's group some room of its own.
        let last = dblocks - u64::from(agcount - 1) * u64::from(agblocks);
        let ag = match log_ag == Some(agcount - 1) {
            true => last as u32,
            false => agblocks,
        };
        let most = match log_ag {
            Some(_) => ag.saturating_sub(after_roots + free_list + 64 + ag / 16),
            None => u32::MAX,
        };
        let log = log_blocks(o, dblocks, blocklog, most)?;
        let cluster = 8192 * (inode / 256);
        let sectors = sector > 512;
        let mut sb = Superblock::new_zeroed();
        sb.magicnum.set(SB_MAGIC);
        sb.blocksize.set(block);
        sb.dblocks.set(dblocks);
        sb.uuid = uuid;
        let start = |ag| u64::from(ag) << agblklog | u64::from(after_roots);
        sb.logstart.set(log_ag.map_or(0, start));
        // Realtime extents are of 4 KiB at least.
        sb.rextsize.set((4096 >> blocklog).max(1));
        sb.agblocks.set(agblocks);
        sb.agcount.set(agcount);
        sb.logblocks.set(log);
        let align = (INODES_PER_CHUNK * inode) >> blocklog;
        sb.sectsize.set(sector as u16);
        sb.inodesize.set(inode as u16);
        sb.inopblock.set((block / inode) as u16);
        sb.fname[..o.label.len()].copy_from_slice(&o.label);
        sb.blocklog = blocklog as u8;
        sb.sectlog = sector.trailing_zeros() as u8;
        sb.inodelog = inode.trailing_zeros() as u8;
        sb.inopblog = inopblog as u8;
        sb.agblklog = agblklog as u8;
        sb.imax_pct = max_pct(o, bytes)?;
        sb.inoalignmt.set(align);
        sb.dirblklog = dirblklog as u8;
        if sectors {
            sb.logsectlog = sb.sectlog;
            sb.logsectsize.set(sector as u16);
        }
        // A log stripe of a block where sectors are large; 1 stands for none.
        sb.logsunit.set(if sectors { block } else { 1 });
        set_features(&mut sb, sectors);
        sb.spino_align.set(cluster >> blocklog);
        // The root directory has the first inode that there can be.
        let mut first = after_roots + free_list;
        if log_ag == Some(0) {
            first += log;
        }
        let root = u64::from(first.next_multiple_of(align.max(1))) << inopblog;
        sb.rootino.set(root);
        sb.rbmino.set(root + 1);
        sb.rsumino.set(root + 2);
        let g = Geometry::new(&sb).map_err(|e| MkfsError::Options(e.to_string()))?;
        Ok(FixedBlocks {
            sb,
            g,
            free_list,
            log_ag,
        })
    }

    /// Where the log begins, if it is not on another device.
    pub fn log(&self) -> Option<AgBlock> {
        let agbno = self.after_roots();
        self.log_ag.map(|agno| AgBlock { agno, agbno })
    }
}

/// Blocks of each allocation group and their number. The last one may be smaller.
fn groups(o: &MkfsOptions, dblocks: u64, blocklog: u32) -> Result<(u64, u64), MkfsError> {
    let most = (MAX_AG_BYTES >> blocklog) - 1;
    let least = MIN_AG_BYTES >> blocklog;
    let agblocks = match (o.agcount, o.agsize) {
        (Some(_), Some(_)) => return refuse("agcount and agsize cannot both be given".into()),
        (Some(0), _) => return refuse("agcount=0".into()),
        (Some(n), None) => dblocks.div_ceil(n),
        (None, Some(bytes)) if !bytes.is_multiple_of(1 << blocklog) => {
            return refuse(format!("agsize={bytes} is no multiple of the block size"));
        }
        (None, Some(bytes)) => (bytes >> blocklog).min(dblocks),
        (None, None) => match dblocks << blocklog {
            b if b >= 4 << 40 => most,
            b if b >= 64 << 20 => dblocks.div_ceil(4).min(most),
            b if b >= 32 << 20 => dblocks.div_ceil(2).min(most),
            // A second group only for a copy of the superblock: of a single group xfs_repair checks nothing unless it
            // is told to.
            _ => dblocks.min(least),
        },
    };
    if agblocks > most || agblocks < least {
        let (bytes, range) = (agblocks << blocklog, "from 16M to a block less than 1T");
        return refuse(format!(
            "allocation groups of {bytes} bytes: {range} are possible"
        ));
    }
    Ok((agblocks, dblocks.div_ceil(agblocks)))
}

/// Levels that a free space tree of an allocation group can have, at most (`m_alloc_maxlevels`).
fn alloc_levels(agblocks: u32, block: u32) -> u32 {
    let least = |level| Btree::Bno.max_records(block as usize, true, level) / 2;
    let mut n = (agblocks as usize).div_ceil(2).div_ceil(least(0));
    let mut levels = 1;
    while n > 1 {
        n = n.div_ceil(least(1));
        levels += 1;
    }
    levels
}

/// The smallest log that the largest transaction allows, in blocks, for each block size from 1 KiB
/// (what mkfs.xfs 6.1 says for these features, rounded up to the next multiple of 64).
const LEAST_LOG: [u32; 7] = [4224, 2496, 1984 + 64, 1152, 1024, 960, 960];

fn log_blocks(o: &MkfsOptions, dblocks: u64, blocklog: u32, most: u32) -> Result<u32, MkfsError> {
    let least = LEAST_LOG[(blocklog - 10) as usize];
    let bytes = dblocks << blocklog;
    let blocks = match o.log_size {
        Some(bytes) => {
            let max = MAX_LOG_BYTES >> blocklog;
            let n = bytes >> blocklog;
            if n < u64::from(least) || n > max {
                let (least, max) = (u64::from(least) << blocklog, max << blocklog);
                return refuse(format!(
                    "a log of {bytes} bytes: from {least} to {max} are possible"
                ));
            }
            n
        }
        // Where space counts, the log is as small as it can be.
        None if bytes < 2 * MIN_AG_BYTES || (o.smallest && bytes < MIN_ORDINARY_BYTES) => {
            least.into()
        }
        None if bytes < MIN_ORDINARY_BYTES => u64::from(2 * least).min(most.into()),
        None => (dblocks / LOG_RATIO)
            .clamp(MIN_LOG_BYTES >> blocklog, MAX_LOG_BYTES >> blocklog)
            .max(least.into())
            .min(most.into()),
    };
    if blocks > u64::from(most) || blocks < u64::from(least) {
        let bytes = blocks.max(least.into()) << blocklog;
        let hint = "ask for a smaller log, or for fewer or larger allocation groups";
        return refuse(format!(
            "a log of {bytes} bytes does not fit in an allocation group: {hint}"
        ));
    }
    Ok(blocks as u32)
}
