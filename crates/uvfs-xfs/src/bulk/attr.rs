//! An inode's extended attributes from names and values.
//!
//! Short form (in the inode) if they fit; otherwise one leaf, or a tree of nodes and leaves. A value
//! for which a leaf is too small lies in blocks of its own behind them ("remote").

use super::Put;
use super::dir::NewBlocks;
use crate::format::*;
use crate::geometry::Geometry;
use std::ops::Range;

/// An attribute to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewAttr {
    /// `ATTR_ROOT`, `ATTR_SECURE` or 0: the namespace.
    pub flags: u8,
    /// The name without its namespace: 1 to 255 bytes.
    pub name: Box<[u8]>,
    /// The value: at most [`ATTR_MAX_VALUE`] bytes.
    pub value: Box<[u8]>,
}

impl NewAttr {
    /// The hash of its name; of a parent pointer, the value is part of it.
    fn hash(&self, g: &Geometry) -> u32 {
        match self.flags & ATTR_PARENT {
            0 => da_hashname(&self.name),
            _ => {
                let word = |at| Be32::at(&self.value, at).map_or(0, |w| w.get());
                g.hash_name(&self.name) ^ word(0) ^ word(4)
            }
        }
    }
}

/// The bytes of the short form, `None` if an attribute is too long for it.
pub fn short_form(attrs: &[NewAttr]) -> Option<Vec<u8>> {
    let fits = |a: &NewAttr| a.value.len() <= usize::from(u8::MAX);
    if attrs.len() > usize::from(u8::MAX) || !attrs.iter().all(fits) {
        return None;
    }
    let mut out = vec![0; AttrSfHeader::SIZE];
    for a in attrs {
        let (namelen, valuelen) = (a.name.len() as u8, a.value.len() as u8);
        out.extend_from_slice(&[namelen, valuelen, a.flags]);
        out.extend_from_slice(&a.name);
        out.extend_from_slice(&a.value);
    }
    let totsize = u16::try_from(out.len()).ok()?;
    AttrSfHeader {
        totsize: Be16::new(totsize),
        count: attrs.len() as u8,
        padding: 0,
    }
    .put(&mut out, 0);
    Some(out)
}

/// An attribute's place in the leaves.
#[derive(Debug)]
struct LeafEntry {
    hash: u32,
    /// Its place among the attributes.
    attr: usize,
    /// Blocks of its value, 0 if that is in the leaf.
    value_blocks: usize,
    /// Bytes of name and value (or of where that is) in the leaf.
    len: usize,
}

/// Attributes laid out in blocks of the attribute fork.
#[derive(Debug)]
pub struct AttrPlan {
    /// In the order of hashes.
    entries: Vec<LeafEntry>,
    /// The entries of each leaf.
    leaves: Vec<Range<usize>>,
    /// Nodes other than the root.
    nodes: usize,
    values: usize,
}

impl AttrPlan {
    /// Lays out attributes.
    pub fn new(g: &Geometry, attrs: &[NewAttr]) -> AttrPlan {
        let block = g.block_size as usize;
        let mut entries: Vec<LeafEntry> = attrs
            .iter()
            .enumerate()
            .map(|(attr, a)| {
                let local =
                    (AttrNameLocal::SIZE + a.name.len() + a.value.len()).next_multiple_of(4);
                // The bound for values in a leaf is three quarters of a block.
                let inside = local < block / 2 + block / 4;
                // In C the head's size is rounded up from 9 to 12, less one byte of the name.
                let remote = (AttrNameRemote::SIZE + 2 + a.name.len()).next_multiple_of(4);
                LeafEntry {
                    hash: a.hash(g),
                    attr,
                    value_blocks: match inside {
                        true => 0,
                        false => a.value.len().div_ceil(block - RemoteHeader::SIZE),
                    },
                    len: if inside { local } else { remote },
                }
            })
            .collect();
        entries.sort_by_key(|e| e.hash);
        let head = attr_leaf_header_len(true);
        let mut leaves = Vec::new();
        let (mut start, mut used) = (0, head);
        for (i, e) in entries.iter().enumerate() {
            let len = e.len + AttrLeafEntry::SIZE;
            if used + len > block {
                leaves.push(start..i);
                (start, used) = (i, head);
            }
            used += len;
        }
        leaves.push(start..entries.len());
        let per_node = (block - da_header_len(true)) / DaNodeEntry::SIZE;
        let mut nodes = 0;
        let mut n = leaves.len();
        while n > per_node {
            n = n.div_ceil(per_node);
            nodes += n;
        }
        AttrPlan {
            values: entries.iter().map(|e| e.value_blocks).sum(),
            entries,
            leaves,
            nodes,
        }
    }

    /// Blocks of the fork, which begin at its block 0.
    pub fn blocks(&self) -> usize {
        self.index_blocks() + self.values
    }

    fn index_blocks(&self) -> usize {
        match self.leaves.len() {
            1 => 1,
            n => 1 + n + self.nodes,
        }
    }

    /// Fills the blocks, as [`super::dir::fill`] does. `attrs` are those that were laid out.
    pub fn fill<E>(
        &self,
        g: &Geometry,
        ino: u64,
        attrs: &[NewAttr],
        daddr: &dyn Fn(u64) -> u64,
        put: &mut Put<'_, E>,
    ) -> Result<(), E> {
        let size = g.block_size as usize;
        let new = NewBlocks { g, ino, daddr };
        let n = self.leaves.len();
        let first = u64::from(n > 1);
        let row: Vec<u64> = (first..first + n as u64).collect();
        let mut value_at = self.index_blocks() as u64;
        let mut lasts = Vec::with_capacity(n);
        let mut bytes = vec![0; size];
        for (i, range) in self.leaves.iter().enumerate() {
            bytes.fill(0);
            let entries = &self.entries[range.clone()];
            new.da_header(&row, i, ATTR3_LEAF_MAGIC, (0, 0), &mut bytes);
            let mut end = size;
            for (k, e) in entries.iter().enumerate() {
                let a = &attrs[e.attr];
                end -= e.len;
                let local = e.value_blocks == 0;
                let entry_at = attr_leaf_header_len(true) + k * AttrLeafEntry::SIZE;
                AttrLeafEntry {
                    hashval: Be32::new(e.hash),
                    nameidx: Be16::new(end as u16),
                    flags: a.flags | if local { ATTR_LOCAL } else { 0 },
                    pad2: 0,
                }
                .put(&mut bytes, entry_at);
                let namelen = a.name.len() as u8;
                let (head, value) = if local {
                    let valuelen = Be16::new(a.value.len() as u16);
                    AttrNameLocal { valuelen, namelen }.put(&mut bytes, end);
                    (AttrNameLocal::SIZE, &a.value[..])
                } else {
                    AttrNameRemote {
                        valueblk: Be32::new(value_at as u32),
                        valuelen: Be32::new(a.value.len() as u32),
                        namelen,
                    }
                    .put(&mut bytes, end);
                    value_at += e.value_blocks as u64;
                    (AttrNameRemote::SIZE, &[][..])
                };
                let name_at = end + head;
                let value_at = name_at + a.name.len();
                bytes[name_at..value_at].copy_from_slice(&a.name);
                bytes[value_at..value_at + value.len()].copy_from_slice(value);
            }
            let table = attr_leaf_header_len(true) + entries.len() * AttrLeafEntry::SIZE;
            let mut freemap = [[Be16::new(0); 2]; 3];
            freemap[0] = [table, end - table].map(|n| Be16::new(n as u16));
            AttrLeafCounts {
                count: Be16::new(entries.len() as u16),
                usedbytes: Be16::new((size - end) as u16),
                firstused: Be16::new(end as u16),
                holes: 0,
                pad1: 0,
                freemap,
            }
            .put(&mut bytes, Da3BlockInfo::SIZE);
            lasts.push((entries.last().map_or(0, |e| e.hash), row[i]));
            put(row[i], &bytes)?;
        }
        if n > 1 {
            let others = 1 + n as u64..1 + (n + self.nodes) as u64;
            let nodes: Vec<u64> = [0].into_iter().chain(others).collect();
            new.fill_nodes(size, lasts, &nodes, put)?;
        }
        let mut at = self.index_blocks() as u64;
        for e in self.entries.iter().filter(|e| e.value_blocks > 0) {
            let parts = attrs[e.attr].value.chunks(size - RemoteHeader::SIZE);
            let mut offset = 0;
            for part in parts {
                bytes.fill(0);
                remote_header(g, ino, ATTR3_RMT_MAGIC, daddr(at), offset, part, &mut bytes);
                put(at, &bytes)?;
                offset += part.len();
                at += 1;
            }
        }
        Ok(())
    }
}

/// Puts a part of a remote value or symbolic link into a block, with its head.
pub(crate) fn remote_header(
    g: &Geometry,
    ino: u64,
    magic: u32,
    daddr: u64,
    offset: usize,
    part: &[u8],
    bytes: &mut [u8],
) {
    RemoteHeader {
        magic: Be32::new(magic),
        offset: Be32::new(offset as u32),
        bytes: Be32::new(part.len() as u32),
        crc: Le32::new(0),
        uuid: g.meta_uuid,
        owner: Be64::new(ino),
        blkno: Be64::new(daddr),
        lsn: Be64::new(0),
    }
    .put(bytes, 0);
    bytes[RemoteHeader::SIZE..RemoteHeader::SIZE + part.len()].copy_from_slice(part);
}

/// Turns an ACL as programs know it (`posix_acl_xattr_header` of version 2 and its entries,
/// little-endian) into the form that XFS stores (`xfs_acl`: count, then tag, id, permissions,
/// big-endian). `None` if it is none.
pub fn acl_from_xattr(value: &[u8]) -> Option<Vec<u8>> {
    /// ACL_USER and ACL_GROUP: the tags of entries that have an id.
    const WITH_ID: [u16; 2] = [2, 8];
    let (head, entries) = value.split_at_checked(4)?;
    if head != 2u32.to_le_bytes() || !entries.len().is_multiple_of(8) {
        return None;
    }
    let mut out = ((entries.len() / 8) as u32).to_be_bytes().to_vec();
    for e in entries.chunks_exact(8) {
        let tag = u16::from_le_bytes([e[0], e[1]]);
        let perm = u16::from_le_bytes([e[2], e[3]]);
        let id = match WITH_ID.contains(&tag) {
            true => u32::from_le_bytes([e[4], e[5], e[6], e[7]]),
            false => u32::MAX,
        };
        out.extend_from_slice(&u32::from(tag).to_be_bytes());
        out.extend_from_slice(&id.to_be_bytes());
        out.extend_from_slice(&perm.to_be_bytes());
        out.extend_from_slice(&[0, 0]);
    }
    Some(out)
}
