//! Changes of an inode's extended attributes that the log announces (`xfs_attri_log_format`): also of parent pointers,
//! which are attributes.

use super::finish::Finishing;
use super::items::stamped;
use super::mappings::{Fork, fork_range};
use super::transactions::Item;
use crate::bulk::attr::{AttrPlan, NewAttr, short_form};
use crate::format::*;
use crate::walk::attr::{Stored, Value, leaf_attr, short_attrs};

const SET: u32 = 1;
const REMOVE: u32 = 2;
const REPLACE: u32 = 3;
const SET_PARENT: u32 = 4;
const REMOVE_PARENT: u32 = 5;
const REPLACE_PARENT: u32 = 6;

/// Does what an intent announces; `None` if that is not possible.
pub(super) fn change(f: &mut Finishing<'_>, item: &Item) -> Option<()> {
    let h = *LogAttribute::at(item.header(), 0).ok()?;
    let (ino, op) = (h.ino.get(), h.op.get());
    let flags = h.filter.get() as u8 & ATTR_NSP_MASK;
    let part = |i: usize, len: usize| item.region(i).get(..len);
    let (len, value_len) = (h.name_len.get() as usize, h.value_len.get() as usize);
    let new = |name: &[u8], value: &[u8]| {
        let fits = (1..=255).contains(&name.len()) && value.len() <= ATTR_MAX_VALUE;
        fits.then(|| NewAttr {
            flags,
            name: name.into(),
            value: value.into(),
        })
    };
    let (old, new) = match op {
        SET | REPLACE | SET_PARENT => {
            let new = new(part(1, len)?, part(2, value_len)?)?;
            (new.clone(), Some(new))
        }
        REMOVE => (new(part(1, len)?, &[])?, None),
        REMOVE_PARENT => (new(part(1, len)?, part(2, value_len)?)?, None),
        REPLACE_PARENT => {
            let (old_len, new_len) = (len & 0xffff, len >> 16);
            (
                new(part(1, old_len)?, part(3, value_len)?)?,
                Some(new(part(2, new_len)?, part(4, value_len)?)?),
            )
        }
        _ => return None,
    };
    let mut attrs = read(f, ino)?;
    // A file has a parent pointer for each of its names.
    let parent = flags & ATTR_PARENT != 0;
    attrs
        .retain(|a| a.flags != old.flags || a.name != old.name || (parent && a.value != old.value));
    attrs.extend(new);
    write(f, ino, &attrs)
}

fn new(stored: &Stored<'_>, value: &[u8]) -> NewAttr {
    NewAttr {
        flags: stored.flags & ATTR_NSP_MASK,
        name: stored.name.into(),
        value: value.into(),
    }
}

/// All attributes that are complete.
fn read(f: &Finishing<'_>, ino: u64) -> Option<Vec<NewAttr>> {
    let raw = super::read_inode(f.disk, f.g, ino)?;
    let d = Dinode::at(&raw, 0).ok()?;
    if d.v2.mode.get() == 0 || d.v2.forkoff == 0 {
        return None;
    }
    let mut out = Vec::new();
    if d.v2.aformat == FORMAT_LOCAL {
        let bytes = raw.get(fork_range(d, raw.len(), true))?;
        let count = AttrSfHeader::at(bytes, 0).ok()?.count;
        for stored in short_attrs(bytes).take(count.into()) {
            let stored = stored.ok()?;
            if let Value::Here(value) = stored.value {
                out.push(new(&stored, value));
            }
        }
        return Some(out);
    }
    let fork = Fork::read(f, ino, true)?;
    let block = |block: u64| {
        let e = fork.extents.iter().find(|e| e.end() > block)?;
        let skip = block.checked_sub(e.startoff)?;
        let at = f.g.daddr(f.g.fsb(e.startblock + skip)?);
        let bytes = f.disk.get(at << 9, f.g.block_size as usize).ok()?;
        Some((f.g.ident(at, Some(ino)), bytes))
    };
    let value = |first: u32, len: usize| {
        let mut out: Vec<u8> = Vec::new();
        let mut at = u64::from(first);
        while out.len() < len && len <= ATTR_MAX_VALUE {
            let (ident, bytes) = block(at)?;
            let part = check_remote(&bytes, ATTR3_RMT_MAGIC, out.len() as u32, &ident).ok()?;
            if part.is_empty() {
                return None;
            }
            out.extend_from_slice(part);
            at += 1;
        }
        (out.len() >= len).then(|| out[..len].to_vec())
    };
    // Each leaf is a block of the fork.
    for e in &fork.extents {
        for at in e.startoff..e.end() {
            let (ident, bytes) = block(at)?;
            if Be16::at(&bytes, 8).ok()?.get() != ATTR3_LEAF_MAGIC {
                continue;
            }
            check_crc(&bytes, DA3_CRC_OFFSET).ok()?;
            let info = Da3BlockInfo::at(&bytes, 0).ok()?;
            if info.owner.get() != ino || info.blkno.get() != ident.daddr {
                return None;
            }
            let (_, entries) = attr_leaf_entries(&bytes, true).ok()?;
            for e in entries.iter().filter(|e| e.flags & ATTR_INCOMPLETE == 0) {
                let stored = leaf_attr(&bytes, e).ok()?;
                match stored.value {
                    Value::Here(value) => out.push(new(&stored, value)),
                    Value::Remote { block, len } => {
                        out.push(new(&stored, &value(block, len as usize)?));
                    }
                }
            }
        }
    }
    Some(out)
}

/// Gives an inode these attributes and no others; `None` if there is no space for them.
fn write(f: &mut Finishing<'_>, ino: u64, attrs: &[NewAttr]) -> Option<()> {
    let g = f.g;
    let mut fork = Fork::read(f, ino, true)?;
    for e in fork.extents.clone() {
        fork.unmap(f, e.startoff..e.end());
        f.free(e.startblock, e.blockcount);
    }
    let short = short_form(attrs).filter(|bytes| bytes.len() <= fork.room);
    if short.is_none() {
        let plan = AttrPlan::new(g, attrs);
        let mut at = 0;
        for (start, n) in f.take(g.fsbno(g.inode(ino)?.block()), plan.blocks() as u32)? {
            let e = Extent {
                startoff: at,
                startblock: start,
                blockcount: n,
                unwritten: false,
            };
            fork.map(f, e)?;
            at += u64::from(n);
        }
        let extents = fork.extents.clone();
        let daddr = |block: u64| {
            let of = extents.iter().find(|e| e.end() > block);
            let at = of.and_then(|e| g.fsb(e.startblock + block.saturating_sub(e.startoff)));
            at.map_or(0, |a| g.daddr(a))
        };
        let put = &mut |block: u64, bytes: &[u8]| {
            let mut bytes = stamped(bytes.to_vec(), f.lsn);
            if Be32::at(&bytes, 0).is_ok_and(|m| m.get() == ATTR3_RMT_MAGIC) {
                store_crc(&mut bytes, REMOTE_CRC_OFFSET);
            }
            f.disk.write(daddr(block) << 9, &bytes);
            Ok::<(), std::convert::Infallible>(())
        };
        let Ok(()) = plan.fill(g, ino, attrs, &daddr, put);
    }
    fork.write(f)?;
    let Some(bytes) = short else {
        return Some(());
    };
    super::with_inode(f.disk, g, ino, |inode| {
        let d = Dinode::at_mut(inode, 0).ok()?;
        // The place of the fork stays, but for an inode without attributes.
        if attrs.is_empty() && d.v2.format != FORMAT_BTREE && !g.features.parent {
            d.v2.forkoff = 0;
            return Some(());
        }
        d.v2.aformat = FORMAT_LOCAL;
        let range = fork_range(&d.clone(), inode.len(), true);
        let fork = inode.get_mut(range)?;
        fork.get_mut(..bytes.len())?.copy_from_slice(&bytes);
        Some(())
    })
}
