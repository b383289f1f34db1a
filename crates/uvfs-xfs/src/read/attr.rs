//! Extended attributes.
//!
//! Names are given as the kernel shows them, with the namespace in front. Parent pointers live in
//! a namespace of their own that is never listed; values whose change was cut short are not seen
//! either. POSIX ACLs are kept by XFS in a form of its own under the trusted namespace; they are
//! listed under both names and read under `system.posix_acl_*` in the form that programs know.

use crate::blocks::Block;
use crate::error::{Error, Result};
use crate::format::*;
use crate::read::inode::{Fork, Inode};
use crate::read::verifier;
use crate::read::volume::Volume;
use crate::walk::attr::{Stored, Value, leaf_attr, short_attrs};

const LEAF: &str = "attribute leaf block";
const NODE: &str = "attribute node block";
const REMOTE: &str = "attribute value block";
const SHORTFORM: &str = "short-form attributes";

/// Neighbouring leaves that may hold nothing but one hash before it counts as a loop.
const MAX_EQUAL_BLOCKS: u32 = 4096;

const ACL_NAMES: [(&[u8], &[u8]); 2] = [
    (b"SGI_ACL_FILE", b"system.posix_acl_access"),
    (b"SGI_ACL_DEFAULT", b"system.posix_acl_default"),
];

/// Bytes of an entry of a POSIX ACL.
const ACL_ENTRY: usize = 12;

/// The namespace's flag and the name within it.
fn split_name(name: &[u8]) -> Option<(u8, &[u8])> {
    let prefixes: [(&[u8], u8); 3] = [
        (b"user.", 0),
        (b"trusted.", ATTR_ROOT),
        (b"security.", ATTR_SECURE),
    ];
    prefixes
        .iter()
        .find_map(|(p, flag)| Some((*flag, name.strip_prefix(*p)?)))
}

impl Volume {
    /// Visits the name of each extended attribute of an inode, until `visit` gives `false`.
    pub fn xattr_names(&self, inode: &Inode, visit: &mut dyn FnMut(&[u8]) -> bool) -> Result<()> {
        self.for_each_attr(inode, None, &mut |a| {
            let prefix: &[u8] = match a.flags & ATTR_NSP_MASK {
                ATTR_ROOT => b"trusted.",
                ATTR_SECURE => b"security.",
                _ => b"user.",
            };
            if a.flags & ATTR_ROOT != 0
                && let Some((_, acl)) = ACL_NAMES.iter().find(|(n, _)| *n == a.name)
                && !visit(acl)
            {
                return Ok(false);
            }
            Ok(visit(&[prefix, a.name].concat()))
        })
    }

    /// The value of an extended attribute; [`Error::NotFound`] if there is none by that name.
    pub fn xattr(&self, inode: &Inode, name: &[u8]) -> Result<Vec<u8>> {
        if let Some((stored, _)) = ACL_NAMES.iter().find(|(_, acl)| *acl == name) {
            let value = self.stored_xattr(inode, ATTR_ROOT, stored)?;
            return acl_to_xattr(&value).map_err(|f| inode.fault("access control list", f));
        }
        let (flag, rest) = split_name(name).ok_or(Error::NotFound("attribute"))?;
        self.stored_xattr(inode, flag, rest)
    }

    fn stored_xattr(&self, inode: &Inode, namespace: u8, name: &[u8]) -> Result<Vec<u8>> {
        let mut found: Option<Vec<u8>> = None;
        let mut remote = None;
        self.for_each_attr(inode, Some(da_hashname(name)), &mut |a| {
            if a.flags & ATTR_NSP_MASK != namespace || a.name != name {
                return Ok(true);
            }
            match a.value {
                Value::Here(v) => found = Some(v.to_vec()),
                Value::Remote { block, len } => remote = Some((block, len)),
            }
            Ok(false)
        })?;
        match (found, remote) {
            (Some(v), _) => Ok(v),
            (None, Some((block, len))) => self.remote_value(inode, block, len),
            (None, None) => Err(Error::NotFound("attribute")),
        }
    }

    /// Visits the visible attributes of an inode: all of them, or those with one hash.
    fn for_each_attr(
        &self,
        inode: &Inode,
        hash: Option<u32>,
        visit: &mut dyn FnMut(Stored<'_>) -> Result<bool>,
    ) -> Result<()> {
        match inode.fork_format(Fork::Attr) {
            None => Ok(()),
            Some(FORMAT_LOCAL) => shortform(inode, visit),
            Some(FORMAT_EXTENTS) if inode.anextents == 0 => Ok(()),
            Some(_) => self.attr_leaves(inode, hash, visit),
        }
    }

    /// Goes down to the first leaf (that may have `hash`) and along the leaves from there.
    fn attr_leaves(
        &self,
        inode: &Inode,
        hash: Option<u32>,
        visit: &mut dyn FnMut(Stored<'_>) -> Result<bool>,
    ) -> Result<()> {
        let crc = self.geometry().features.crc;
        let bad = |what, f| inode.fault(what, f);
        let mut descent = Descent::default();
        let mut block = self.attr_block(inode, 0)?;
        while da_block_kind(&block, crc) == Some(DA_NODE_MAGIC) {
            let (counts, entries) = da_node_entries(&block, crc).map_err(|f| bad(NODE, f))?;
            let level = counts.level.get();
            descent.node(level).map_err(|f| bad(NODE, f))?;
            let i = hash.map_or(0, |h| entries.partition_point(|e| e.hashval.get() < h));
            let next = match entries.get(i) {
                Some(e) => e.before.get(),
                None if hash.is_some() => return Ok(()),
                None => return Err(bad(NODE, Fault::field("count", "at least 1", 0u64))),
            };
            block = self.attr_block(inode, next)?;
        }
        descent.leaf().map_err(|f| bad(NODE, f))?;
        // Hashes grow along the leaves. Where they do not, a loop is possible: count those.
        let (mut last, mut equal) = (0u32, 0u32);
        loop {
            let (_, entries) = attr_leaf_entries(&block, crc).map_err(|f| bad(LEAF, f))?;
            if entries.first().is_some_and(|e| e.hashval.get() < last) {
                let found = entries[0].hashval.get();
                return Err(bad(LEAF, Fault::field("hashval", "in order", found)));
            }
            let highest = entries.last().map_or(last, |e| e.hashval.get());
            equal = if highest > last { 0 } else { equal + 1 };
            if equal > MAX_EQUAL_BLOCKS || highest < last {
                return Err(bad(LEAF, Fault::field("forw", "leaves that end", highest)));
            }
            last = highest;
            let from = hash.map_or(0, |h| entries.partition_point(|e| e.hashval.get() < h));
            for e in &entries[from..] {
                if hash.is_some_and(|h| e.hashval.get() != h) {
                    return Ok(());
                }
                let stored = leaf_attr(&block, e).map_err(|f| bad(LEAF, f))?;
                if stored.visible() && !visit(stored)? {
                    return Ok(());
                }
            }
            let forw = DaBlockInfo::at(&block, 0)
                .map_err(|f| bad(LEAF, f))?
                .forw
                .get();
            if forw == 0 {
                return Ok(());
            }
            block = self.attr_block(inode, forw)?;
            if da_block_kind(&block, crc) != Some(ATTR_LEAF_MAGIC) {
                return Err(bad(LEAF, Fault::field("forw", "the next leaf", forw)));
            }
        }
    }

    fn attr_block(&self, inode: &Inode, number: u32) -> Result<Block> {
        let what = "attribute block";
        let start = u64::from(number);
        let block = self.read_fork_block(
            what,
            inode,
            Fork::Attr,
            start,
            1,
            verifier::DA,
            &|b, ident| match da_block_kind(b, ident.crc) {
                Some(ATTR_LEAF_MAGIC | DA_NODE_MAGIC) => check_da_info(b, ident).map(|_| ()),
                _ => {
                    let found = DaBlockInfo::at(b, 0)?.magic.get();
                    let expected = if ident.crc {
                        ATTR3_LEAF_MAGIC
                    } else {
                        ATTR_LEAF_MAGIC
                    };
                    Err(Fault::Magic {
                        expected: expected.into(),
                        found: found.into(),
                    })
                }
            },
        )?;
        let bad = |expected| inode.fault(what, Fault::field("mapping", expected, number));
        let block = block.ok_or_else(|| bad("a block, not a hole"))?;
        match da_block_kind(&block, self.geometry().features.crc) {
            Some(ATTR_LEAF_MAGIC | DA_NODE_MAGIC) => Ok(block),
            _ => Err(bad("a leaf or node")),
        }
    }

    /// Reads a value that is in blocks of its own.
    fn remote_value(&self, inode: &Inode, first: u32, len: u32) -> Result<Vec<u8>> {
        let g = self.geometry();
        let crc = g.features.crc;
        let len = len as usize;
        if len > ATTR_MAX_VALUE {
            let f = Fault::field("valuelen", "at most 65536", len as u64);
            return Err(inode.fault(LEAF, f));
        }
        let mut value = Vec::with_capacity(len);
        let mut number = u64::from(first);
        let hole = |n: u64| inode.fault(REMOTE, Fault::field("mapping", "a block, not a hole", n));
        while value.len() < len {
            let offset = value.len() as u32;
            let kind = verifier::REMOTE;
            let block =
                self.read_fork_block(REMOTE, inode, Fork::Attr, number, 1, kind, &|b, ident| {
                    if crc {
                        check_remote(b, ATTR3_RMT_MAGIC, offset, ident).map(|_| ())
                    } else {
                        Ok(())
                    }
                })?;
            let block = block.ok_or_else(|| hole(number))?;
            let left = len - value.len();
            let part = if crc {
                let h = RemoteHeader::at(&block, 0).map_err(|f| inode.fault(REMOTE, f))?;
                let bytes = h.bytes.get();
                block[RemoteHeader::SIZE..]
                    .get(..bytes as usize)
                    .filter(|p| !p.is_empty())
                    .ok_or_else(|| inode.fault(REMOTE, Fault::field("bytes", "some", bytes)))?
            } else {
                &block[..]
            };
            value.extend_from_slice(&part[..part.len().min(left)]);
            number += 1;
        }
        Ok(value)
    }
}

/// Visits the attributes inside an inode.
fn shortform(inode: &Inode, visit: &mut dyn FnMut(Stored<'_>) -> Result<bool>) -> Result<()> {
    let bad = |f| inode.fault(SHORTFORM, f);
    let fork = inode.fork_bytes(Fork::Attr);
    let h = AttrSfHeader::at(fork, 0).map_err(bad)?;
    let total = h.totsize.get();
    let fits = || bad(Fault::field("totsize", "what fits in the inode", total));
    let data = fork.get(..total.into()).ok_or_else(fits)?;
    for stored in short_attrs(data).take(h.count.into()) {
        let stored = stored.map_err(bad)?;
        if stored.visible() && !visit(stored)? {
            break;
        }
    }
    Ok(())
}

/// The entries that a POSIX ACL has by its size, and the number that it says, if an attribute is one and they differ.
pub(crate) fn acl_miscount(flags: u8, name: &[u8], value: &[u8]) -> Option<(usize, u32)> {
    let acl = flags & ATTR_ROOT != 0 && ACL_NAMES.iter().any(|(n, _)| *n == name);
    let count = Be32::at(value, 0).map_or(0, |c| c.get());
    let bytes = (count as usize).checked_mul(ACL_ENTRY);
    let right = bytes.and_then(|n| n.checked_add(4)) == Some(value.len());
    (acl && !right).then(|| (value.len().saturating_sub(4) / ACL_ENTRY, count))
}

/// Turns an ACL as XFS stores it (`xfs_acl`: count, then tag, id, permissions, big-endian) into
/// the extended attribute that programs know (`posix_acl_xattr_header`, version 2,
/// little-endian).
fn acl_to_xattr(stored: &[u8]) -> Result<Vec<u8>, Fault> {
    // Tags of entries that name a user or group: ACL_USER and ACL_GROUP.
    const NAMED: [u32; 2] = [0x02, 0x08];
    let count = Be32::at(stored, 0)?.get();
    let entries = &stored[4..];
    if (count as usize).checked_mul(ACL_ENTRY) != Some(entries.len()) {
        let expected = "as many entries as there are";
        return Err(Fault::field("acl_cnt", expected, count));
    }
    let mut out = Vec::with_capacity(4 + entries.len());
    out.extend_from_slice(&2u32.to_le_bytes());
    for e in entries.chunks_exact(ACL_ENTRY) {
        let tag = Be32::at(e, 0)?.get();
        let id = if NAMED.contains(&tag) {
            Be32::at(e, 4)?.get()
        } else {
            u32::MAX
        };
        let perm = Be16::at(e, 8)?.get();
        out.extend_from_slice(&(tag as u16).to_le_bytes());
        out.extend_from_slice(&perm.to_le_bytes());
        out.extend_from_slice(&id.to_le_bytes());
    }
    Ok(out)
}
