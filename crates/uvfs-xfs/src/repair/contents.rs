//! New contents of a fork: in the inode, or in blocks of its own.

use super::Mend;
use super::fork::{self, Map};
use crate::format::*;
use crate::read::inode::{Fork, Inode};

/// The contents of a fork.
pub(crate) struct Contents {
    pub format: u8,
    /// The bytes in the inode.
    pub bytes: Vec<u8>,
    /// The blocks that they lead to.
    pub map: Map,
}

impl Contents {
    /// Contents in the inode.
    pub fn here(format: u8, bytes: Vec<u8>) -> Contents {
        Contents {
            format,
            bytes,
            map: Map::default(),
        }
    }

    /// Contents in new blocks: `runs` are (file block, blocks), in pieces of `per`. `fill` is given the sector of each
    /// file block, and puts the blocks' bytes. `None` if there is no space.
    pub fn in_blocks(
        m: &mut Mend<'_>,
        inode: &Inode,
        f: Fork,
        runs: &[(u64, u32)],
        per: u32,
        fill: impl FnOnce(
            &dyn Fn(u64) -> u64,
            &mut dyn FnMut(u64, &[u8]) -> Result<(), ()>,
        ) -> Result<(), ()>,
    ) -> Option<Contents> {
        let near = m.g.inode(inode.ino).map_or(0, |a| a.agno);
        let mut map = Map::default();
        for (at, n) in runs {
            let blocks = m.allocate(near, *n, per)?;
            fork::append(m, &mut map.extents, *at, &blocks);
        }
        let daddr = |b: u64| map.offset(m, b, 1).unwrap_or(0) >> 9;
        let put = &mut |b: u64, bytes: &[u8]| {
            let crc = match Be32::at(bytes, 0).map_or(0, |w| w.get()) {
                DIR3_BLOCK_MAGIC | DIR3_DATA_MAGIC | DIR3_FREE_MAGIC => DIR3_DATA_CRC_OFFSET,
                ATTR3_RMT_MAGIC => REMOTE_CRC_OFFSET,
                _ => DA3_CRC_OFFSET,
            };
            m.put_block(daddr(b), bytes, crc);
            Ok(())
        };
        fill(&daddr, put).ok()?;
        let root = fork::make(m, inode.ino, &map.extents, inode.fork_bytes(f).len())?;
        map.tree = root.tree;
        Some(Contents {
            format: root.format,
            bytes: root.bytes,
            map,
        })
    }

    /// Gives the fork of an inode, whose bytes are to be `raw`, these contents and, with `size`, that size.
    pub fn put(
        &self,
        m: &mut Mend<'_>,
        inode: &Inode,
        mut raw: Vec<u8>,
        f: Fork,
        size: Option<u64>,
    ) {
        let other = match f {
            Fork::Data => Fork::Attr,
            Fork::Attr => Fork::Data,
        };
        let others = match inode.fork_format(other) {
            Some(FORMAT_EXTENTS | FORMAT_BTREE) => fork::read(m, inode, other).blocks(),
            _ => 0,
        };
        store(&mut raw, inode, f, self.format, &self.bytes);
        if let Ok(d) = DinodeV2::at_mut(&mut raw, 0) {
            d.nblocks.set(self.map.blocks() + others);
            d.size.set(size.unwrap_or(d.size.get()));
        }
        fork::set_extents(&mut raw, f, self.map.extents.len() as u64);
        m.put_inode(inode.ino, &mut raw);
    }
}

/// Puts a fork's bytes into those of its inode.
pub(crate) fn store(raw: &mut [u8], inode: &Inode, f: Fork, format: u8, bytes: &[u8]) {
    let room = inode.fork_bytes(f).len();
    let (at, format_at) = match f {
        Fork::Data => (DINODE_V3_SIZE, 5),
        Fork::Attr => (raw.len() - room, 83),
    };
    raw[at..at + room].fill(0);
    raw[at..at + bytes.len()].copy_from_slice(bytes);
    raw[format_at] = format;
}
