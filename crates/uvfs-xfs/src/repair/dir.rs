//! Directories: all entries read, and those with damage built anew.

use super::fork::{self, Map};
use super::{Mend, reader};
use crate::bulk::dir::{DirLayout, NewEntry, Owner, fill, layout};
use crate::dir::data_record;
use crate::format::*;
use crate::geometry::Geometry;
use crate::inode::{Fork, Inode};
use std::collections::{BTreeMap, HashSet};

/// An entry that was read.
#[derive(Debug, Clone)]
pub(crate) struct FoundEntry {
    pub name: Vec<u8>,
    pub ino: u64,
    pub kind: FileType,
}

/// How the directories lead to each other.
#[derive(Default)]
pub(crate) struct DirectoryTree {
    /// The directory that each names as its parent.
    pub dotdot: BTreeMap<u64, u64>,
    /// (directory, one that has an entry for it), as they were found.
    pub entries: Vec<(u64, u64)>,
    /// Directories to be built anew.
    pub rebuild: HashSet<u64>,
}

/// Whether a name may be an entry's.
fn is_name(name: &[u8]) -> bool {
    !name.is_empty() && !matches!(name, b"." | b"..") && !name.iter().any(|b| matches!(b, b'/' | 0))
}

/// Visits the entries of a directory block. `lenient`: goes on after what makes no sense. Gives
/// whether all made sense.
fn block(
    g: &Geometry,
    bytes: &[u8],
    db: u64,
    lenient: bool,
    visit: &mut dyn FnMut(&[u8], u64, FileType),
) -> bool {
    let single = Be32::at(bytes, 0).is_ok_and(|m| m.get() == DIR3_BLOCK_MAGIC);
    let mut end = bytes.len();
    let mut fine = true;
    if single {
        match dir_block_entries(bytes) {
            Ok((_, index)) => end = bytes.len() - Dir2BlockTail::SIZE - size_of_val(index),
            Err(_) => fine = false,
        }
    }
    let mut offset = dir_data_header_len(true);
    while offset < end {
        match data_record(bytes, offset, end, db, g) {
            Ok((len, entry)) => {
                if let Some(e) = entry {
                    visit(e.name, e.ino, e.file_type);
                }
                offset += len;
            }
            Err(_) => {
                fine = false;
                if !lenient {
                    return false;
                }
                offset += match untagged(g, bytes, offset, end, db) {
                    Some((len, name, ino, kind)) => {
                        visit(name, ino, kind);
                        len
                    }
                    None => DIR2_DATA_ALIGN,
                };
            }
        }
    }
    fine
}

/// An entry whose tag is wrong, but after which the next record begins.
fn untagged<'b>(
    g: &Geometry,
    bytes: &'b [u8],
    offset: usize,
    end: usize,
    db: u64,
) -> Option<(usize, &'b [u8], u64, FileType)> {
    let e = Dir2DataEntry::at(&bytes[..end], offset).ok()?;
    let n = usize::from(e.namelen);
    let len = dir_entry_len(n, true);
    let at = offset + Dir2DataEntry::SIZE;
    let name = bytes.get(at..at + n)?;
    let there = is_name(name) || matches!(name, b"." | b"..");
    let next = offset + len == end
        || (offset + len < end && data_record(bytes, offset + len, end, db, g).is_ok());
    let kind = FileType::from_ftype(*bytes.get(at + n)?)?;
    (there && next && g.inode(e.inumber.get()).is_some()).then_some((
        len,
        name,
        e.inumber.get(),
        kind,
    ))
}

/// Visits all entries of a directory, "." and ".." included. Gives whether all of it made sense.
pub(crate) fn read(
    m: &Mend<'_>,
    dir: &Inode,
    lenient: bool,
    visit: &mut dyn FnMut(&[u8], u64, FileType),
) -> bool {
    let g = &m.g;
    if dir.fork_format(Fork::Data) == Some(FORMAT_LOCAL) {
        return short(g, dir, visit);
    }
    let map = fork::read(m, dir, Fork::Data);
    let per = 1u64 << g.dirblklog;
    let leaf_at = DIR2_LEAF_OFFSET >> g.blocklog;
    let mut fine = !map.hurt;
    let mut last = None;
    for e in map.extents.iter().take_while(|e| e.startoff < leaf_at) {
        let end = (e.startoff + u64::from(e.blockcount)).min(leaf_at);
        for db in e.startoff / per..=(end - 1) / per {
            if last.replace(db) == Some(db) {
                continue;
            }
            let Some(bytes) = map.read(m, db * per, per) else {
                fine = false;
                continue;
            };
            let daddr = map.offset(m, db * per, 1).unwrap_or(0) >> 9;
            let ident = g.ident(daddr, Some(dir.ino));
            let magic = Be32::at(&bytes, 0).map_or(0, |w| w.get());
            let sound = check_dir_data(&bytes, magic == DIR3_BLOCK_MAGIC, &ident).is_ok();
            if !sound {
                fine = false;
                let crc = check_crc(&bytes, DIR3_DATA_CRC_OFFSET).is_ok();
                let ours = Dir3BlockHeader::at(&bytes, 0).is_ok_and(|h| {
                    let data = matches!(magic, DIR3_BLOCK_MAGIC | DIR3_DATA_MAGIC);
                    let signs = [
                        data,
                        crc,
                        h.owner.get() == dir.ino,
                        h.uuid == g.meta_uuid,
                        h.blkno.get() == daddr,
                    ];
                    signs.iter().filter(|s| **s).count() >= 3
                });
                if !lenient || !ours {
                    continue;
                }
            }
            fine &= block(g, &bytes, db, lenient, visit);
        }
    }
    fine
}

/// The entries of a short form directory.
fn short(g: &Geometry, dir: &Inode, visit: &mut dyn FnMut(&[u8], u64, FileType)) -> bool {
    let data = dir.fork_bytes(Fork::Data);
    let end = (dir.size as usize).min(data.len());
    let Ok(head) = Dir2SfHeader::at(data, 0) else {
        return false;
    };
    // The width of inode numbers is told by a count, or by what fits.
    let parse = |wide: bool| {
        let ino_len = if wide { 8 } else { 4 };
        let ino_at = |at: usize| match wide {
            true => Be64::at(data, at).ok().map(|v| v.get()),
            false => Be32::at(data, at).ok().map(|v| v.get().into()),
        };
        let parent = ino_at(Dir2SfHeader::SIZE)?;
        let mut out = vec![(b"..".to_vec(), parent, FileType::Directory)];
        let mut at = Dir2SfHeader::SIZE + ino_len;
        let mut whole = true;
        while out.len() <= usize::from(head.count) || at < end {
            let Ok(e) = Dir2SfEntry::at(data, at) else {
                whole = false;
                break;
            };
            let n = usize::from(e.namelen);
            let name_at = at + Dir2SfEntry::SIZE;
            let parts = data.get(name_at..name_at + n).and_then(|name| {
                let kind = FileType::from_ftype(*data.get(name_at + n)?);
                Some((name, kind, ino_at(name_at + n + 1)?))
            });
            let next = name_at + n + 1 + ino_len;
            let Some((name, kind, ino)) = parts.filter(|_| n > 0 && next <= data.len()) else {
                whole = false;
                break;
            };
            if g.inode(ino).is_none() || !is_name(name) {
                whole = false;
                if g.inode(ino).is_none() {
                    // The entries after it may still be sound.
                    at = next;
                    continue;
                }
            }
            out.push((name.to_vec(), ino, kind.unwrap_or_default()));
            at = next;
        }
        let exact = whole && at == end && out.len() == usize::from(head.count) + 1;
        Some((out, exact))
    };
    let first = parse(head.i8count != 0);
    let best = match first {
        Some((_, true)) => first,
        _ => match parse(head.i8count == 0) {
            Some((o, true)) => Some((o, false)),
            _ => first,
        },
    };
    let Some((entries, exact)) = best else {
        return false;
    };
    visit(b".", dir.ino, FileType::Directory);
    for (name, ino, kind) in entries {
        visit(&name, ino, kind);
    }
    exact
}

impl Mend<'_> {
    /// An inode, if it can be read.
    pub fn inode(&self, ino: u64) -> Option<Inode> {
        Inode::parse(ino, &self.raw(ino)?, &self.g).ok()
    }

    /// The entries of a directory that are to stay: what they lead to is there, and of its type.
    /// Gives whether all are as they are on disk.
    pub fn entries(&self, dir: &Inode, lenient: bool) -> (Vec<FoundEntry>, bool) {
        let mut out = Vec::new();
        let mut names: HashSet<Vec<u8>> = HashSet::new();
        let mut fine = true;
        let whole = read(self, dir, lenient, &mut |name, ino, kind| {
            if matches!(name, b"." | b"..") {
                return;
            }
            let actual = self.kind_of(ino);
            let there = actual != FileType::Unknown && ino != self.g.rootino && !self.is_own(ino);
            if !there || !is_name(name) || !names.insert(name.to_vec()) {
                fine = false;
                return;
            }
            fine &= kind == actual;
            out.push(FoundEntry {
                name: name.to_vec(),
                ino,
                kind: actual,
            });
        });
        (out, fine && whole)
    }
}

/// Reads all directories, when the kinds of all inodes are known.
pub(crate) fn all(m: &mut Mend<'_>) -> DirectoryTree {
    let mut tree = DirectoryTree::default();
    let directory = FileType::Directory as u8;
    for ag in &mut m.ags {
        ag.seen.fill(0);
    }
    for agno in 0..m.g.agcount {
        reader::each(m, agno, true, &mut |m, ino, slot, raw| {
            if m.ags[agno as usize].kind[slot] != directory {
                return;
            }
            if let Ok(dir) = Inode::parse(ino, raw, &m.g) {
                one(m, &dir, &mut tree);
            }
        });
    }
    tree
}

/// Reads a directory: counts what its entries lead to.
pub(crate) fn one(m: &mut Mend<'_>, dir: &Inode, tree: &mut DirectoryTree) {
    let ino = dir.ino;
    let lenient = m.is_bad(ino);
    let mut dotdot = None;
    if lenient {
        read(m, dir, true, &mut |name, to, _| {
            if name == b".." {
                dotdot = dotdot.or(Some(to));
            }
        });
        let (entries, _) = m.entries(dir, true);
        tree.rebuild.insert(ino);
        for e in entries {
            count(m, e.ino, e.kind, ino, tree);
        }
    } else {
        let mut links = Vec::new();
        let mut dots = true;
        let whole = read(m, dir, false, &mut |name, to, kind| {
            if !matches!(name, b"." | b"..") {
                return links.push((to, kind));
            }
            dots &= kind == FileType::Directory;
            if name == b".." {
                dotdot = dotdot.or(Some(to));
            }
        });
        let mut fine = whole && dots;
        for (to, kind) in links {
            let actual = m.expect(to, kind);
            fine &= actual != FileType::Unknown && kind == actual;
            if actual != FileType::Unknown {
                count(m, to, actual, ino, tree);
            }
        }
        if !fine {
            tree.rebuild.insert(ino);
        }
    }
    tree.dotdot.insert(ino, dotdot.unwrap_or(0));
}

/// Counts an entry.
fn count(m: &mut Mend<'_>, to: u64, kind: FileType, from: u64, tree: &mut DirectoryTree) {
    if kind == FileType::Directory {
        tree.entries.push((to, from));
        return;
    }
    let Some(a) = m.g.inode(to) else { return };
    let ag = &mut m.ags[a.agno as usize];
    if let Some(slot) = ag.slot(a.agino) {
        ag.seen[slot] = ag.seen[slot].saturating_add(1);
    }
}

/// Builds a directory anew. Gives whether there was space for it.
pub(crate) fn build(m: &mut Mend<'_>, ino: u64, parent: u64, entries: &[FoundEntry]) -> bool {
    let done = try_build(m, ino, parent, entries);
    // Blocks that were allocated for it are not in use.
    m.recount |= !done;
    done
}

fn try_build(m: &mut Mend<'_>, ino: u64, parent: u64, entries: &[FoundEntry]) -> bool {
    let g = m.g.clone();
    let Some(mut raw) = m.raw(ino) else {
        return false;
    };
    let Ok(old) = Inode::parse(ino, &raw, &g) else {
        return false;
    };
    let room = old.fork_bytes(Fork::Data).len();
    let new: Vec<NewEntry<'_>> = entries
        .iter()
        .map(|e| NewEntry {
            name: &e.name,
            ino: e.ino,
            file_type: e.kind,
        })
        .collect();
    let (format, bytes, size, blocks, extents);
    let mut made = Map::default();
    match layout(&g, parent, &new, room) {
        DirLayout::Short(b) => {
            (format, size, blocks, extents) = (FORMAT_LOCAL, b.len() as u64, 0, 0);
            bytes = b;
        }
        DirLayout::Blocks(plan) => {
            let near = g.inode(ino).map_or(0, |a| a.agno);
            let per = 1u32 << g.dirblklog;
            let mut map = Map::default();
            for (at, n) in plan.runs(&g) {
                let Some(runs) = m.allocate(near, n as u32 * per, per) else {
                    return false;
                };
                fork::append(m, &mut map.extents, at, &runs);
            }
            let daddr = |b: u64| map.offset(m, b, 1).unwrap_or(0) >> 9;
            let owner = Owner { ino, parent };
            let filled: Result<(), ()> = fill(&g, owner, &new, &plan, &daddr, &mut |b, bytes| {
                let magic = Be32::at(bytes, 0).map_or(0, |w| w.get());
                let data = [DIR3_BLOCK_MAGIC, DIR3_DATA_MAGIC, DIR3_FREE_MAGIC];
                let crc = match data.contains(&magic) {
                    true => DIR3_DATA_CRC_OFFSET,
                    false => DA3_CRC_OFFSET,
                };
                m.put_block(daddr(b), bytes, crc);
                Ok(())
            });
            let Some(root) = fork::make(m, ino, &map.extents, room).filter(|_| filled.is_ok())
            else {
                return false;
            };
            map.tree = root.tree;
            blocks = map.blocks();
            size = plan.size(&g);
            extents = map.extents.len() as u64;
            (format, bytes) = (root.format, root.bytes);
            made = map;
        }
    }
    let attr = match old.fork_format(Fork::Attr) {
        Some(FORMAT_EXTENTS | FORMAT_BTREE) => fork::read(m, &old, Fork::Attr).blocks(),
        _ => 0,
    };
    if let Some(FORMAT_EXTENTS | FORMAT_BTREE) = old.fork_format(Fork::Data) {
        fork::read(m, &old, Fork::Data).release(m, ino);
    }
    made.own(m, ino, Fork::Data);
    raw[DINODE_V3_SIZE..DINODE_V3_SIZE + room].fill(0);
    raw[DINODE_V3_SIZE..DINODE_V3_SIZE + bytes.len()].copy_from_slice(&bytes);
    if let Ok(d) = Dinode::at(&raw, 0) {
        let mut d = *d;
        d.v2.format = format;
        d.v2.size.set(size);
        d.v2.nblocks.set(blocks + attr);
        d.put(&mut raw, 0);
    }
    fork::set_extents(&mut raw, Fork::Data, extents);
    m.put_inode(ino, &mut raw);
    m.moved = true;
    true
}
