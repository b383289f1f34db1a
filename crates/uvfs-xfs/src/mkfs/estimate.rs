//! How large a file system has to be for a source, and what is told of a source before it is copied.

use super::fill::{AttrForm, block_runs, divide};
use super::layout::{FixedBlocks, MIN_ORDINARY_BYTES, MIN_TWO_GROUPS_BYTES};
use super::pool::{SourceWalk, WorkPool};
use super::source::{Root, Time};
use super::space::region_blocks;
use super::{Margin, MkfsError, MkfsOptions};
use crate::bulk::btree::{Shape, fork_root_room};
use crate::bulk::dir::{DirLayout, NewEntry, layout};
use crate::format::*;
use crate::geometry::Geometry;
use std::collections::HashSet;

/// The blocks and inodes that a source needs.
#[derive(Debug, Default)]
pub(crate) struct Sum {
    pub inodes: u64,
    /// Blocks of data and of metadata, without inodes.
    pub blocks: u64,
    /// Of the latest change of contents.
    pub newest: Time,
    /// Of all names, attributes and link targets, but of no contents.
    pub digest: u128,
}

/// The 128-bit FNV-1a hash.
pub(crate) struct Digest(u128);

impl Digest {
    pub fn new() -> Digest {
        Digest(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    pub fn add(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 ^= u128::from(*b);
            self.0 = self
                .0
                .wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }

    pub fn get(&self) -> u128 {
        self.0
    }
}

/// Walks a source without reading any contents. `last`: no later change of contents counts.
pub(crate) fn sum(
    g: &Geometry,
    pool: &WorkPool<'_>,
    root: &Root,
    last: Option<Time>,
) -> Result<Sum, MkfsError> {
    let mut sum = Sum {
        inodes: 1,
        newest: root.meta.mtime,
        ..Sum::default()
    };
    let mut digest = Digest::new();
    let mut seen = HashSet::new();
    let mut walk = SourceWalk::new(pool, root.dir.clone(), root.attrs.clone());
    while let Some(((dir, entries), attrs)) = walk.next()? {
        let names: Vec<NewEntry<'_>> = entries
            .iter()
            .map(|e| NewEntry {
                name: &e.name,
                // Numbers that need 8 bytes take the most room.
                ino: u64::MAX >> 8,
                file_type: FileType::from_mode(e.meta.mode),
            })
            .collect();
        let (form, room) = divide(g, &attrs, false);
        sum.blocks += attr_blocks(&form);
        if let DirLayout::Blocks(plan) = layout(g, 0, &names, room) {
            let blocks: usize = plan.runs(g).iter().map(|(_, n)| n).sum();
            sum.blocks += (blocks as u64) << g.dirblklog;
        }
        let mut below = Vec::new();
        for e in entries {
            let m = &e.meta;
            digest.add(&e.name);
            digest.add(&[0]);
            // The size of a directory is its file system's affair.
            let size = if m.is_dir() { 0 } else { m.size };
            for word in [m.mode.into(), m.uid.into(), m.gid.into(), size] {
                digest.add(&u64::to_le_bytes(word));
            }
            let mtime = last.map_or(m.mtime, |l| m.mtime.min(l));
            digest.add(&mtime.sec.to_le_bytes());
            digest.add(&mtime.nsec.to_le_bytes());
            digest.add(&e.target);
            sum.newest = sum.newest.max(m.mtime);
            if e.links.is_some_and(|id| !seen.insert(id)) {
                continue;
            }
            sum.inodes += 1;
            if m.is_dir() {
                below.push((e.name, e.attrs));
                continue;
            }
            let kind = FileType::from_mode(m.mode);
            let special = !matches!(kind, FileType::Regular | FileType::Symlink);
            let (form, room) = divide(g, &e.attrs, special);
            sum.blocks += attr_blocks(&form);
            match kind {
                FileType::Regular => {
                    let runs = block_runs(g, m.size, &e.data);
                    sum.blocks += runs.iter().map(|(_, n)| n).sum::<u64>();
                    if runs.len() * ExtentRecord::SIZE > room {
                        let root = fork_root_room(room);
                        let shape = Shape::of_fork(g.block_size as usize, runs.len(), root);
                        sum.blocks += shape.blocks() as u64;
                    }
                }
                FileType::Symlink if e.target.len() > room => {
                    let payload = g.block_size as usize - RemoteHeader::SIZE;
                    sum.blocks += e.target.len().div_ceil(payload) as u64;
                }
                _ => {}
            }
        }
        walk.descend(&dir, below);
    }
    sum.digest = digest.get();
    Ok(sum)
}

fn attr_blocks(form: &AttrForm) -> u64 {
    match form {
        AttrForm::Blocks(plan) => plan.blocks() as u64,
        _ => 0,
    }
}

/// The size in bytes for a source that comes to `sum`: everything, the margin, and the file system's own blocks; at least
/// what mkfs.xfs makes, or what XFS allows.
pub(crate) fn size(o: &MkfsOptions, sum: &Sum) -> Result<u64, MkfsError> {
    let (least, round) = match o.smallest {
        true => (MIN_TWO_GROUPS_BYTES, 1 << 20),
        false => (MIN_ORDINARY_BYTES, 4 << 20),
    };
    let block = u64::from(o.block_size);
    let inodes = sum.inodes.next_multiple_of(64) * u64::from(o.inode_size);
    let content = sum.blocks * block + inodes;
    let content = content.saturating_add(match o.margin {
        Margin::Percent(percent) => (content / 100).saturating_mul(percent.into()),
        Margin::Bytes(bytes) => bytes,
    });
    let mut bytes = least;
    // The log and the number of groups follow from the size, which they are part of.
    for _ in 0..64 {
        let l = match FixedBlocks::new(o, bytes, [0; 16]) {
            // Groups that are too small for the log, at this size.
            Err(_) if bytes < MIN_ORDINARY_BYTES => {
                bytes = (bytes + (16 << 20)).min(MIN_ORDINARY_BYTES);
                continue;
            }
            other => other?,
        };
        let log = match l.log() {
            Some(_) => u64::from(l.g.logblocks) * block,
            None => 0,
        };
        let groups = u64::from(l.g.agcount);
        // The unused part of regions that are not full (inodes, metadata, data of small files), and the B-trees.
        let unused = match o.smallest {
            true => 3 * u64::from(region_blocks(&l.g)) * block + (1 << 18),
            false => 6 << 20,
        };
        let each = u64::from(l.first_free(u32::MAX)) * block + unused;
        let need = content
            .saturating_add(log + groups * each + bytes / 100)
            .min(1 << 62);
        let need = need.next_multiple_of(round).max(least);
        if need <= bytes {
            break;
        }
        bytes = need;
    }
    Ok(bytes)
}
