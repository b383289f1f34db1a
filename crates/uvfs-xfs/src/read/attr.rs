//! Extended attributes.
//!
//! Names are given as the kernel shows them, with the namespace in front. Parent pointers live in
//! a namespace of their own that is never listed; values whose change was cut short are not seen
//! either. POSIX ACLs are kept by XFS in a form of its own under the trusted namespace; they are
//! listed under both names and read under `system.posix_acl_*` in the form that programs know.

use super::da::{DaTree, MAX_EQUAL_BLOCKS};
use crate::error::{Error, Result};
use crate::format::*;
use crate::read::inode::{Fork, Inode};
use crate::read::volume::Volume;
use crate::walk::attr::{Stored, Value, leaf_attr, short_attrs};

const LEAF: &str = "attribute leaf block";
const SHORTFORM: &str = "short-form attributes";

/// The names of POSIX ACLs: as they are stored, in the trusted namespace, and as programs know them.
pub(crate) const ACL_NAMES: [(&[u8], &[u8]); 2] = [
    (b"SGI_ACL_FILE", b"system.posix_acl_access"),
    (b"SGI_ACL_DEFAULT", b"system.posix_acl_default"),
];

/// The namespaces that programs see: the prefix of names, and the flag.
const NAMESPACES: [(&[u8], u8); 3] = [
    (b"user.", 0),
    (b"trusted.", ATTR_ROOT),
    (b"security.", ATTR_SECURE),
];

/// Bytes of an entry of a POSIX ACL.
const ACL_ENTRY: usize = 12;

/// The namespace's flag and the name within it.
pub(crate) fn split_name(name: &[u8]) -> Option<(u8, &[u8])> {
    let mut known = NAMESPACES.iter();
    known.find_map(|(prefix, flag)| Some((*flag, name.strip_prefix(*prefix)?)))
}

impl Volume {
    /// Visits the name of each extended attribute of an inode, until `visit` gives `false`.
    pub fn xattr_names(&self, inode: &Inode, visit: &mut dyn FnMut(&[u8]) -> bool) -> Result<()> {
        self.for_each_attr(inode, None, &mut |a| {
            let space = NAMESPACES.iter().find(|s| s.1 == a.flags & ATTR_NSP_MASK);
            let prefix = space.map_or(NAMESPACES[0].0, |s| s.0);
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
        let mut found = Err(Error::NotFound("attribute"));
        self.for_each_attr(inode, Some(da_hashname(name)), &mut |a| {
            if a.flags & ATTR_NSP_MASK != namespace || a.name != name {
                return Ok(true);
            }
            found = match a.value {
                Value::Here(v) => Ok(v.to_vec()),
                Value::Remote { block, len } => self.remote_value(inode, block, len),
            };
            Ok(false)
        })?;
        found
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
        let bad = |f| inode.fault(LEAF, f);
        let tree = DaTree {
            volume: self,
            inode,
            fork: Fork::Attr,
        };
        let mut leaf = tree.descend(0, hash)?;
        // Hashes grow along the leaves. Where they do not, a loop is possible: count those.
        let (mut last, mut equal) = (0u32, 0u32);
        while let Some(block) = leaf {
            let (_, entries) = attr_leaf_entries(&block, crc).map_err(bad)?;
            if let Some(first) = entries.first().filter(|e| e.hashval.get() < last) {
                let found = first.hashval.get();
                return Err(inode.wrong(LEAF, "hashval", "in order", found));
            }
            let highest = entries.last().map_or(last, |e| e.hashval.get());
            equal = if highest > last { 0 } else { equal + 1 };
            if equal > MAX_EQUAL_BLOCKS || highest < last {
                return Err(inode.wrong(LEAF, "forw", "leaves that end", highest));
            }
            last = highest;
            let from = hash.map_or(0, |h| entries.partition_point(|e| e.hashval.get() < h));
            for e in &entries[from..] {
                if hash.is_some_and(|h| e.hashval.get() != h) {
                    return Ok(());
                }
                let stored = leaf_attr(&block, e).map_err(bad)?;
                if stored.visible() && !visit(stored)? {
                    return Ok(());
                }
            }
            leaf = tree.next(&block, ATTR_LEAF_MAGIC)?;
        }
        Ok(())
    }

    /// Reads a value that is in blocks of its own.
    fn remote_value(&self, inode: &Inode, first: u32, len: u32) -> Result<Vec<u8>> {
        if len as usize > ATTR_MAX_VALUE {
            return Err(inode.wrong(LEAF, "valuelen", "at most 65536", len));
        }
        let what = "attribute value block";
        let place = (Fork::Attr, first.into());
        self.read_remote(what, inode, place, ATTR3_RMT_MAGIC, len as usize)
    }
}

/// Visits the attributes inside an inode.
fn shortform(inode: &Inode, visit: &mut dyn FnMut(Stored<'_>) -> Result<bool>) -> Result<()> {
    let bad = |f| inode.fault(SHORTFORM, f);
    let fork = inode.fork_bytes(Fork::Attr);
    let h = AttrSfHeader::at(fork, 0).map_err(bad)?;
    let total = h.totsize.get();
    let fits = || inode.wrong(SHORTFORM, "totsize", "what fits in the inode", total);
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
        let id = match NAMED.contains(&tag) {
            true => Be32::at(e, 4)?.get(),
            false => u32::MAX,
        };
        let perm = Be16::at(e, 8)?.get();
        out.extend_from_slice(&(tag as u16).to_le_bytes());
        out.extend_from_slice(&perm.to_le_bytes());
        out.extend_from_slice(&id.to_le_bytes());
    }
    Ok(out)
}
