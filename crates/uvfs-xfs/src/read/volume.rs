//! An open file system.

use crate::blocks::{Block, Blocks, DiskExtent, io_error};
use crate::error::{At, Error, Result};
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use crate::log::{self, LogState};
use crate::read::inode::Inode;
use std::io;
use std::sync::Arc;
use uvfs_buf::{Anything, Verifier};

/// Symbolic links followed in one path before it counts as a loop, as in the kernel.
const MAX_SYMLINKS: usize = 40;

/// The longest file that is read ahead as a whole, in bytes.
const MAX_AHEAD: u64 = 256 << 10;

/// Bytes of what is replayed of a dirty log that are kept in memory; more go to a temporary file.
const REPLAYED_MEMORY: u64 = 256 << 20;

/// An XFS file system, open for reading.
pub struct Volume {
    blocks: Arc<dyn Blocks>,
    geometry: Geometry,
    warnings: Vec<String>,
    log: LogState,
    space: Space,
}

/// The answer of statfs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Block size in bytes.
    pub block_size: u32,
    /// Blocks of the data section less the log.
    pub blocks: u64,
    /// Free blocks.
    pub free_blocks: u64,
    /// Inodes that there are or could be.
    pub files: u64,
    /// Inodes free or that could be made.
    pub free_files: u64,
}

impl Volume {
    /// Opens a file system: checks its superblock, takes its geometry and, if its log is dirty, replays it in memory. The
    /// caller should show the user [`Volume::warnings`].
    pub fn open(blocks: Arc<dyn Blocks>) -> Result<Volume> {
        let (mut sb, mut geometry) = read_superblock(&*blocks)?;
        log::wanted(&*blocks, &geometry)?;
        let (blocks, log, failure) = log::recovered(blocks, &geometry, REPLAYED_MEMORY);
        let mut warnings: Vec<String> = failure.iter().map(ToString::to_string).collect();
        if matches!(log, LogState::Replayed { .. }) {
            (sb, geometry) = read_superblock(&*blocks)?;
        }
        if blocks.size() < geometry.data_bytes() {
            warnings.push(format!(
                "the image ends at byte {} but the file system at byte {}: what lies beyond cannot \
                 be read",
                blocks.size(),
                geometry.data_bytes()
            ));
        }
        if geometry.features.needsrepair {
            let what = "the file system is marked as needing repair";
            let text = format!("{what}: expect contradictions until xfs_repair has run");
            warnings.push(text);
        }
        warnings.extend(log.warning());
        let space = space(&sb, &geometry);
        Ok(Volume {
            blocks,
            geometry,
            warnings,
            log,
            space,
        })
    }

    /// Sizes and features.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The warnings: things that may be wrong or stale, in sentences.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Whether the file system was unmounted cleanly.
    pub fn log(&self) -> &LogState {
        &self.log
    }

    /// Size and free space. The free counts are those of the last clean unmount.
    pub fn space(&self) -> Space {
        self.space
    }

    /// Sectors of 512 bytes that an inode's blocks take.
    pub fn sectors(&self, inode: &Inode) -> u64 {
        let per_block = u64::from(self.geometry.block_size) / 512;
        inode.nblocks.saturating_mul(per_block)
    }

    /// Where the bytes come from.
    pub fn blocks(&self) -> &dyn Blocks {
        &*self.blocks
    }

    /// Reads a metadata block. The caller verifies it by the identity that [`Volume::ident`] gives.
    pub(crate) fn read_block(
        &self,
        extents: &[DiskExtent],
        verifier: &'static dyn Verifier,
    ) -> io::Result<Block> {
        // Version 4 has no checksums.
        let verifier = match self.geometry.features.crc {
            true => verifier,
            false => &Anything,
        };
        self.blocks.read(extents, verifier)
    }

    /// The identity that a block of an inode must have, less the checksum if the cache has verified that.
    pub(crate) fn ident(&self, block: &Block, daddr: u64, ino: u64) -> Ident {
        Ident {
            summed: block.is_verified(),
            ..self.geometry.ident(daddr, Some(ino))
        }
    }

    /// Reads an inode. Fails with [`Error::NotFound`] if there can be no such inode or it is free.
    pub fn inode(&self, ino: u64) -> Result<Inode> {
        let g = &self.geometry;
        let a = g.inode(ino).ok_or(Error::NotFound("inode"))?;
        let (extent, first) = self.cluster(a.block());
        let read = self.read_block(&[extent], &Anything);
        let block = read.map_err(|e| io_error(&[extent], e))?;
        let at = ((a.agbno - first) << g.blocklog) as usize + (a.index << g.inodelog) as usize;
        let raw = block.get(at..at + g.inode_size as usize);
        Inode::parse(ino, raw.ok_or(Error::NotFound("inode"))?, g)
    }

    /// Says that an inode will be read soon.
    pub fn readahead_inode(&self, ino: u64) {
        if let Some(a) = self.geometry.inode(ino) {
            self.blocks.readahead(&[self.cluster(a.block()).0]);
        }
    }

    /// Says that these inodes will be read soon.
    pub(crate) fn readahead_inodes(&self, inodes: impl Iterator<Item = u64>) {
        let places = inodes.filter_map(|ino| self.geometry.inode(ino));
        let clusters = places.map(|place| self.cluster(place.block()).0);
        let mut clusters: Vec<DiskExtent> = clusters.collect();
        clusters.sort_unstable_by_key(|cluster| cluster.daddr);
        clusters.dedup();
        for cluster in clusters {
            self.blocks.readahead(&[cluster]);
        }
    }

    /// Says that all of a file will be read soon, if it is small.
    pub(crate) fn readahead_file(&self, ino: u64) {
        // An error here comes again when the file is read.
        let Ok(inode) = self.inode(ino) else { return };
        if inode.file_type() != FileType::Regular || inode.size > MAX_AHEAD {
            return;
        }
        let runs = self.data_runs(&inode, 0, inode.size as usize);
        for run in runs.unwrap_or_default() {
            if let Some(at) = run.device {
                self.blocks.readahead_data(at, run.len);
            }
        }
    }

    /// The cluster that an inode block is read in, and its first block.
    fn cluster(&self, b: AgBlock) -> (DiskExtent, u32) {
        let g = &self.geometry;
        let start = g.cluster_start(b.agbno);
        // A cluster cannot lie across the end of an allocation group.
        let count = g.cluster_blocks.min(g.ag_blocks(b.agno) - start);
        let first = AgBlock { agbno: start, ..b };
        let extent = DiskExtent {
            daddr: g.daddr(first),
            bytes: count << g.blocklog,
        };
        (extent, start)
    }

    /// The root directory.
    pub fn root(&self) -> Result<Inode> {
        self.inode(self.geometry.rootino)
    }

    /// The inode at `path`, from the root, whether or not it starts with a slash. Symbolic links
    /// on the way are followed, inside the image; one at the end only if `follow`.
    pub fn resolve(&self, path: &[u8], follow: bool) -> Result<Inode> {
        // Components still to be walked, last one first.
        let split = |p: &[u8]| -> Vec<Vec<u8>> {
            let parts = p.split(|b| *b == b'/').filter(|c| !c.is_empty());
            parts.rev().map(<[u8]>::to_vec).collect()
        };
        let mut todo = split(path);
        let mut links = 0;
        let mut dir = self.root()?;
        while let Some(name) = todo.pop() {
            if !dir.is_dir() {
                return Err(Error::NotDirectory(dir.ino));
            }
            let next = match &name[..] {
                b"." => continue,
                _ => self.inode(self.lookup(&dir, &name)?)?,
            };
            if next.file_type() == FileType::Symlink && (follow || !todo.is_empty()) {
                links += 1;
                let target = self.readlink(&next)?;
                if links > MAX_SYMLINKS {
                    return Err(Error::NotFound("file (too many symbolic links)"));
                }
                if target.first() == Some(&b'/') {
                    dir = self.root()?;
                }
                todo.extend(split(&target));
                continue;
            }
            dir = next;
        }
        Ok(dir)
    }
}

/// Reads and checks the first superblock.
pub(crate) fn read_superblock(blocks: &dyn Blocks) -> Result<(Superblock, Geometry)> {
    let read = |bytes: u32| {
        let e = [DiskExtent { daddr: 0, bytes }];
        blocks.read(&e, &Anything).map_err(|err| io_error(&e, err))
    };
    let bad = |fault| Error::corrupt("superblock", At::Disk(0), fault);
    let first = read(512)?;
    let sb = Superblock::at(&first, 0).map_err(bad)?;
    if sb.magicnum.get() != SB_MAGIC {
        return Err(Error::NotXfs {
            found: sb.magicnum.get(),
        });
    }
    let Some(sector_size) = sb.sector_size() else {
        let found = sb.sectsize.get();
        let expected = "a power of two from 512 to 32768";
        return Err(bad(Fault::field("sb_sectsize", expected, found)));
    };
    let sector = match sector_size {
        512 => first,
        size => read(size as u32)?,
    };
    let sb = *check_superblock(&sector).map_err(bad)?;
    let geometry = Geometry::new(&sb)?;
    Ok((sb, geometry))
}

fn space(sb: &Superblock, g: &Geometry) -> Space {
    let log = match g.logstart {
        0 => 0,
        _ => u64::from(g.logblocks),
    };
    let free = sb.fdblocks.get().min(g.dblocks);
    let (icount, ifree) = (sb.icount.get(), sb.ifree.get());
    let could = free.saturating_mul(1 << g.inopblog);
    let limit = match g.imax_pct {
        0 => u64::MAX,
        pct => (g.dblocks / 100 * u64::from(pct)).saturating_mul(1 << g.inopblog),
    };
    let files = icount.saturating_add(could).min(limit.max(icount));
    Space {
        block_size: g.block_size,
        blocks: g.dblocks.saturating_sub(log),
        free_blocks: free,
        files,
        free_files: files.saturating_sub(icount.saturating_sub(ifree)),
    }
}
