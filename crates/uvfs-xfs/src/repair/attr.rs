//! Extended attributes: those that can be read, built anew.

use super::Mend;
use super::fork::{self, Map};
use crate::bulk::attr::{AttrPlan, NewAttr, short_form};
use crate::check::{Place, Structure};
use crate::format::*;
use crate::inode::{Fork, Inode};

/// Builds an inode's attributes anew, if there are findings about them.
pub(crate) fn mend(m: &mut Mend<'_>, ino: u64) {
    let attributes = |what: &Structure| {
        use Structure::{AttributeFork, AttributeValue, Attributes, ShortAttributes, Tree};
        let parts = [Attributes, ShortAttributes, AttributeValue, AttributeFork];
        parts.contains(what) || *what == Tree(Btree::Bmap)
    };
    let about = m.about.get(&ino);
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
        named && namespaces <= 1 && is_acl(a) && seen.insert((a.flags, a.name.clone()))
    });
    let n = attrs.len();
    let text = match put(m, &inode, &attrs) {
        true => format!("built anew: {n}"),
        false => "no space to build them anew".into(),
    };
    m.moved = true;
    m.recount = true;
    m.say(Place::inode(Structure::Attributes, ino), text);
}

/// A POSIX ACL's entries are counted.
fn is_acl(a: &NewAttr) -> bool {
    let acl = matches!(&*a.name, b"SGI_ACL_FILE" | b"SGI_ACL_DEFAULT");
    if a.flags & ATTR_ROOT == 0 || !acl {
        return true;
    }
    let count = Be32::at(&a.value, 0).map_or(0, |c| c.get());
    (count as usize)
        .checked_mul(12)
        .and_then(|n| n.checked_add(4))
        == Some(a.value.len())
}

fn short(bytes: &[u8]) -> Vec<NewAttr> {
    let mut out = Vec::new();
    let mut at = AttrSfHeader::SIZE;
    let count = AttrSfHeader::at(bytes, 0).map_or(0, |h| h.count);
    let total = AttrSfHeader::at(bytes, 0).map_or(0, |h| usize::from(h.totsize.get()));
    // Either of the two may be wrong.
    while out.len() < usize::from(count) || at < total.min(bytes.len()) {
        let Ok(e) = AttrSfEntry::at(bytes, at) else {
            break;
        };
        let name_at = at + AttrSfEntry::SIZE;
        let value_at = name_at + usize::from(e.namelen);
        let end = value_at + usize::from(e.valuelen);
        let (Some(name), Some(value)) = (bytes.get(name_at..value_at), bytes.get(value_at..end))
        else {
            break;
        };
        if name.is_empty() {
            break;
        }
        if e.flags & !ATTR_NSP_MASK == 0 {
            out.push(NewAttr {
                flags: e.flags,
                name: name.into(),
                value: value.into(),
            });
        }
        at = end;
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
            let block = m.disk.get(at, g.block_size as usize).unwrap_or_default();
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
        let at = usize::from(e.nameidx.get());
        let found = if e.flags & ATTR_LOCAL != 0 {
            AttrNameLocal::at(block, at).ok().and_then(|n| {
                let name_at = at + AttrNameLocal::SIZE;
                let value_at = name_at + usize::from(n.namelen);
                let end = value_at + usize::from(n.valuelen.get());
                let value = block.get(value_at..end)?.to_vec();
                Some((block.get(name_at..value_at)?, value))
            })
        } else {
            AttrNameRemote::at(block, at).ok().and_then(|n| {
                let name_at = at + AttrNameRemote::SIZE;
                let name = block.get(name_at..name_at + usize::from(n.namelen))?;
                let value = value(m, ino, map, n.valueblk.get(), n.valuelen.get())?;
                Some((name, value))
            })
        };
        let Some((name, value)) = found else { continue };
        // A wrong hash tells of a wrong name.
        if da_hashname(name) == e.hashval.get() || e.flags & ATTR_LOCAL != 0 {
            out.push(NewAttr {
                flags: e.flags & (ATTR_ROOT | ATTR_SECURE),
                name: name.into(),
                value: value.into(),
            });
        }
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
        let at = map.offset(m, block, 1)?;
        let bytes = m.disk.get(at, m.g.block_size as usize).ok()?;
        // The bytes of the value are as many as its leaf says, whatever the checksum.
        let bytes = summed(&bytes, REMOTE_CRC_OFFSET);
        let ident = m.g.ident(at >> 9, Some(ino));
        let part = check_remote(&bytes, ATTR3_RMT_MAGIC, out.len() as u32, &ident).ok()?;
        if part.is_empty() {
            return None;
        }
        out.extend_from_slice(part);
        block += 1;
    }
    out.truncate(len as usize);
    Some(out)
}

/// Gives an inode these attributes and no others.
fn put(m: &mut Mend<'_>, inode: &Inode, attrs: &[NewAttr]) -> bool {
    let g = m.g.clone();
    let ino = inode.ino;
    let Some(mut raw) = m.raw(ino) else {
        return false;
    };
    let room = inode.fork_bytes(Fork::Attr).len();
    let at = raw.len() - room;
    let data = match inode.fork_format(Fork::Data) {
        Some(FORMAT_EXTENTS | FORMAT_BTREE) => fork::read(m, inode, Fork::Data).blocks(),
        _ => 0,
    };
    let tree = inode.fork_format(Fork::Data) == Some(FORMAT_BTREE);
    let (format, bytes, extents, blocks);
    if attrs.is_empty() && !tree {
        (format, bytes, extents, blocks) = (FORMAT_EXTENTS, Vec::new(), 0, 0);
        // The byte of the fork's place.
        raw[82] = 0;
    } else if let Some(b) = short_form(attrs).filter(|b| b.len() <= room) {
        (format, bytes, extents, blocks) = (FORMAT_LOCAL, b, 0, 0);
    } else {
        let plan = AttrPlan::new(&g, attrs);
        let near = g.inode(ino).map_or(0, |a| a.agno);
        let Some(runs) = m.allocate(near, plan.blocks() as u32, 1) else {
            return false;
        };
        let mut map = Map::default();
        fork::append(m, &mut map.extents, 0, &runs);
        let daddr = |b: u64| map.offset(m, b, 1).unwrap_or(0) >> 9;
        let filled: Result<(), ()> = plan.fill(&g, ino, attrs, &daddr, &mut |b, bytes| {
            let remote = Be32::at(bytes, 0).is_ok_and(|m| m.get() == ATTR3_RMT_MAGIC);
            let crc = if remote {
                REMOTE_CRC_OFFSET
            } else {
                DA3_CRC_OFFSET
            };
            m.put_block(daddr(b), bytes, crc);
            Ok(())
        });
        let made = fork::make(m, ino, &map.extents, room);
        let Some(made) = made.filter(|_| filled.is_ok()) else {
            return false;
        };
        extents = map.extents.len() as u64;
        blocks = map.blocks() + made.tree.len() as u64;
        (format, bytes) = (made.format, made.bytes);
    }
    raw[at..].fill(0);
    raw[at..at + bytes.len()].copy_from_slice(&bytes);
    raw[83] = format;
    if let Ok(d) = Dinode::at(&raw, 0) {
        let mut d = *d;
        d.v2.nblocks.set(data + blocks);
        d.put(&mut raw, 0);
    }
    fork::set_extents(&mut raw, Fork::Attr, extents);
    m.put_inode(ino, &mut raw);
    true
}
