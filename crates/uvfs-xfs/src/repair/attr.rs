//! Extended attributes: those that can be read, built anew.

use super::contents::Contents;
use super::fork::{self, Map};
use super::{Mend, Place, Structure};
use crate::bulk::attr::{AttrPlan, NewAttr, short_form};
use crate::format::*;
use crate::read::attr::acl_miscount;
use crate::read::inode::{Fork, Inode};
use crate::walk::attr::{Stored, Value, leaf_attr, short_attrs};

/// Builds an inode's attributes anew, if there are findings about them.
pub(crate) fn mend(m: &mut Mend<'_>, ino: u64) {
    let attributes = |what: &Structure| {
        use Structure::{AttributeFork, AttributeValue, Attributes, ShortAttributes, Tree};
        let parts = [Attributes, ShortAttributes, AttributeValue, AttributeFork];
        parts.contains(what) || *what == Tree(Btree::Bmap)
    };
    let about = m.findings.about.get(&ino);
    if !about.is_none_or(|about| about.iter().any(attributes)) {
        return;
    }
    let Some(inode) = m.inode(ino) else { return };
    let Some(format) = inode.fork_format(Fork::Attr) else {
        return;
    };
    let map = fork::read(m, &inode, Fork::Attr);
    let mut attrs = match format {
        FORMAT_LOCAL => short(inode.fork_bytes(Fork::Attr)),
        _ => blocks(m, ino, &map),
    };
    let mut seen = std::collections::HashSet::new();
    attrs.retain(|a| {
        let namespaces = (a.flags & ATTR_NSP_MASK).count_ones();
        let named = !a.name.is_empty() && !a.name.contains(&0);
        let acl = acl_miscount(a.flags, &a.name, &a.value).is_none();
        named && namespaces <= 1 && acl && seen.insert((a.flags, a.name.clone()))
    });
    let n = attrs.len();
    let text = match put(m, &inode, &attrs) {
        Some(()) => format!("built anew: {n}"),
        None => "no space to build them anew".into(),
    };
    m.moved = true;
    m.recount = true;
    m.say(Place::inode(Structure::Attributes, ino), text);
}

fn new(stored: &Stored<'_>, value: Vec<u8>) -> NewAttr {
    NewAttr {
        flags: stored.flags & ATTR_NSP_MASK,
        name: stored.name.into(),
        value: value.into(),
    }
}

fn short(bytes: &[u8]) -> Vec<NewAttr> {
    let mut out = Vec::new();
    let head = AttrSfHeader::at(bytes, 0).map(|h| (h.count, h.totsize.get()));
    let (count, total) = head.unwrap_or_default();
    let mut at = AttrSfHeader::SIZE;
    let named = short_attrs(bytes).map_while(|a| a.ok().filter(|a| !a.name.is_empty()));
    for stored in named {
        // Either of the two may be wrong.
        if out.len() >= usize::from(count) && at >= usize::from(total) {
            break;
        }
        at = stored.end;
        if let (Value::Here(value), 0) = (&stored.value, stored.flags & !ATTR_NSP_MASK) {
            out.push(new(&stored, value.to_vec()));
        }
    }
    out
}

/// The attributes of all leaves of a fork.
fn blocks(m: &Mend<'_>, ino: u64, map: &Map) -> Vec<NewAttr> {
    let g = &m.g;
    let mut out = Vec::new();
    for e in &map.extents {
        for i in 0..u64::from(e.blockcount) {
            let Some(at) = map.offset(m, e.startoff + i, 1) else {
                continue;
            };
            let block = m.block(at >> 9).unwrap_or_default();
            let info = Da3BlockInfo::at(&block, 0).ok();
            let sound = info.is_some_and(|i| {
                let signs = [
                    i.hdr.magic.get() == ATTR3_LEAF_MAGIC,
                    i.owner.get() == ino,
                    i.uuid == g.meta_uuid,
                    i.blkno.get() == at >> 9,
                    check_crc(&block, DA3_CRC_OFFSET).is_ok(),
                ];
                signs[0] && signs.iter().filter(|s| **s).count() >= 3
            });
            if sound {
                leaf(m, ino, map, &block, &mut out);
            }
        }
    }
    out
}

fn leaf(m: &Mend<'_>, ino: u64, map: &Map, block: &[u8], out: &mut Vec<NewAttr>) {
    let most = (block.len() - attr_leaf_header_len(true)) / AttrLeafEntry::SIZE;
    let count = AttrLeafCounts::at(block, Da3BlockInfo::SIZE);
    let count = count.map_or(0, |c| usize::from(c.count.get())).min(most);
    let entries = AttrLeafEntry::slice_at(block, attr_leaf_header_len(true), count);
    for e in entries.unwrap_or_default() {
        if e.flags & ATTR_INCOMPLETE != 0 || e.flags & ATTR_PARENT != 0 {
            continue;
        }
        let Ok(stored) = leaf_attr(block, e) else {
            continue;
        };
        let bytes = match stored.value {
            Value::Here(bytes) => Some(bytes.to_vec()),
            Value::Remote { block, len } => value(m, ino, map, block, len),
        };
        // A wrong hash tells of a wrong name.
        let right = da_hashname(stored.name) == e.hashval.get() || e.flags & ATTR_LOCAL != 0;
        out.extend(bytes.filter(|_| right).map(|bytes| new(&stored, bytes)));
    }
}

/// A value in blocks of its own.
fn value(m: &Mend<'_>, ino: u64, map: &Map, first: u32, len: u32) -> Option<Vec<u8>> {
    if len as usize > ATTR_MAX_VALUE || first == 0 {
        return None;
    }
    let mut out: Vec<u8> = Vec::new();
    let mut block = u64::from(first);
    while out.len() < len as usize {
        let (_, bytes, part) = map.remote(m, ino, (block, 1), ATTR3_RMT_MAGIC, out.len())?;
        out.extend_from_slice(&bytes[part]);
        block += 1;
    }
    out.truncate(len as usize);
    Some(out)
}

/// Gives an inode these attributes and no others; `None` if there is no space for them.
fn put(m: &mut Mend<'_>, inode: &Inode, attrs: &[NewAttr]) -> Option<()> {
    let g = m.g.clone();
    let mut raw = m.raw(inode.ino)?;
    let room = inode.fork_bytes(Fork::Attr).len();
    let tree = inode.fork_format(Fork::Data) == Some(FORMAT_BTREE);
    let contents = if attrs.is_empty() && !tree {
        // The byte of the fork's place.
        raw[82] = 0;
        Contents::here(FORMAT_EXTENTS, Vec::new())
    } else if let Some(bytes) = short_form(attrs).filter(|b| b.len() <= room) {
        Contents::here(FORMAT_LOCAL, bytes)
    } else {
        let plan = AttrPlan::new(&g, attrs);
        let runs = [(0, plan.blocks() as u32)];
        Contents::in_blocks(m, inode, Fork::Attr, &runs, 1, |daddr, put| {
            plan.fill(&g, inode.ino, attrs, daddr, put)
        })?
    };
    contents.put(m, inode, raw, Fork::Attr, None);
    Some(())
}
