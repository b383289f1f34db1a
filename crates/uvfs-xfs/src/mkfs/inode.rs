//! Inodes: the core, and both forks.

use super::source::Meta;
use crate::format::*;
use crate::geometry::Geometry;

/// A fork's contents.
#[derive(Debug, Clone)]
pub(crate) struct ForkData {
    /// `FORMAT_*`.
    pub format: u8,
    /// Its bytes in the inode.
    pub bytes: Vec<u8>,
    /// Extents, however they are kept.
    pub extents: u64,
    /// Blocks: of the extents and of their B-tree.
    pub blocks: u64,
}

impl ForkData {
    /// No extents.
    pub fn empty() -> ForkData {
        ForkData::local(FORMAT_EXTENTS, Vec::new())
    }

    /// Bytes in the inode.
    pub fn local(format: u8, bytes: Vec<u8>) -> ForkData {
        ForkData {
            format,
            bytes,
            extents: 0,
            blocks: 0,
        }
    }
}

/// An inode to be written.
pub(crate) struct NewInode<'a> {
    pub ino: u64,
    pub generation: u32,
    pub meta: &'a Meta,
    pub nlink: u32,
    pub size: u64,
    pub flags: u16,
    pub data: ForkData,
    /// The attribute fork's offset in units of 8 bytes (0 for none), and its contents.
    pub forkoff: u8,
    pub attr: ForkData,
}

/// Puts an inode into its place, all of whose bytes are overwritten.
pub(crate) fn put(g: &Geometry, n: &NewInode<'_>, out: &mut [u8]) {
    out.fill(0);
    let mut d = Dinode::free(g.meta_uuid, n.ino, n.generation);
    let m = n.meta;
    let stamp = |t: super::source::Time| Be64::new(bigtime_stamp(t.sec, t.nsec));
    d.v2.mode.set(m.mode);
    d.v2.format = n.data.format;
    d.v2.uid.set(m.uid);
    d.v2.gid.set(m.gid);
    d.v2.nlink.set(n.nlink);
    d.v2.atime = stamp(m.atime);
    d.v2.mtime = stamp(m.mtime);
    d.v2.ctime = stamp(m.ctime);
    d.v2.size.set(n.size);
    d.v2.nblocks.set(n.data.blocks + n.attr.blocks);
    d.v2.nextents.set(n.data.extents as u32);
    d.v2.anextents.set(n.attr.extents as u16);
    d.v2.forkoff = n.forkoff;
    d.v2.aformat = n.attr.format;
    d.v2.flags.set(n.flags | m.flags);
    d.changecount.set(1);
    d.flags2.set(DIFLAG2_BIGTIME);
    d.crtime = stamp(m.crtime);
    d.put(out, 0);
    out[DINODE_V3_SIZE..][..n.data.bytes.len()].copy_from_slice(&n.data.bytes);
    if n.forkoff > 0 {
        let at = DINODE_V3_SIZE + usize::from(n.forkoff) * 8;
        out[at..at + n.attr.bytes.len()].copy_from_slice(&n.attr.bytes);
    }
}

/// The bytes of a device number as an inode's data fork has them: the major number in the high 14
/// bits, the minor one in the low 18. `None` for a number that does not fit, or of whose major number
/// the kernel would show only the low 9 bits.
pub(crate) fn device(major: u32, minor: u32) -> Option<Vec<u8>> {
    let fits = major <= 0x1ff && minor <= 0x3_ffff;
    fits.then(|| (major << 18 | minor).to_be_bytes().to_vec())
}
