//! Directories: all entries read, and those with damage built anew.

use super::contents::Contents;
use super::{Mend, fork, reader};
use crate::bulk::dir::{DirLayout, NewEntry, Owner, fill, layout};
use crate::format::*;
use crate::geometry::Geometry;
use crate::read::inode::{Fork, Inode};
use crate::walk::dir::{data_end, dir_blocks, records, short_entries, short_header_len};
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
    for db in dir_blocks(&map.extents, per).take_while(|db| db * per < leaf_at) {
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
        let end = data_end(&bytes, true);
        fine &= end.is_ok();
        for record in records(&bytes, end.unwrap_or(bytes.len()), db, g) {
            let Ok(record) = record else {
                fine = false;
                if lenient {
                    continue;
                }
                break;
            };
            if let Some(e) = record.entry {
                visit(e.name, e.ino, e.file_type);
            }
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
        let (parent, entries) = short_entries(data, wide, g).ok()?;
        let mut out = vec![(b"..".to_vec(), parent, FileType::Directory)];
        let mut at = short_header_len(wide);
        let mut whole = true;
        for e in entries {
            if out.len() > usize::from(head.count) && at >= end {
                break;
            }
            let Some(e) = e.ok().filter(|e| !e.name.is_empty()) else {
                whole = false;
                break;
            };
            at = e.end;
            // The entries after one that leads nowhere may still be sound.
            let there = g.inode(e.ino).is_some();
            whole &= there && is_name(e.name);
            if there {
                let kind = FileType::from_ftype(e.ftype).unwrap_or_default();
                out.push((e.name.to_vec(), e.ino, kind));
            }
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

    /// The entries of a directory that are to stay: what they lead to is there. They have its type.
    pub fn entries(&self, dir: &Inode) -> Vec<FoundEntry> {
        let mut out = Vec::new();
        let mut names: HashSet<Vec<u8>> = HashSet::new();
        read(self, dir, true, &mut |name, ino, _| {
            let kind = self.kind_of(ino);
            let there = kind != FileType::Unknown && ino != self.g.rootino && !self.g.is_own(ino);
            if there && is_name(name) && names.insert(name.to_vec()) {
                let name = name.to_vec();
                out.push(FoundEntry { name, ino, kind });
            }
        });
        out
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
    let (mut dotdot, mut dots, mut links) = (None, true, Vec::new());
    let whole = read(m, dir, lenient, &mut |name, to, kind| {
        if !matches!(name, b"." | b"..") {
            return links.push((to, kind));
        }
        dots &= kind == FileType::Directory;
        if name == b".." {
            dotdot = dotdot.or(Some(to));
        }
    });
    let mut fine = whole && dots && !lenient;
    if lenient {
        for e in m.entries(dir) {
            count(m, e.ino, e.kind, ino, tree);
        }
    } else {
        for (to, kind) in links {
            let actual = m.expect(to, kind);
            fine &= actual != FileType::Unknown && kind == actual;
            if actual != FileType::Unknown {
                count(m, to, actual, ino, tree);
            }
        }
    }
    if !fine {
        tree.rebuild.insert(ino);
    }
    tree.dotdot.insert(ino, dotdot.unwrap_or(0));
}

/// Counts an entry.
fn count(m: &mut Mend<'_>, to: u64, kind: FileType, from: u64, tree: &mut DirectoryTree) {
    if kind == FileType::Directory {
        tree.entries.push((to, from));
        return;
    }
    if let Some((ag, slot)) = m.slot(to) {
        let seen = &mut m.ags[ag].seen[slot];
        *seen = seen.saturating_add(1);
    }
}

/// Builds a directory anew. Gives whether there was space for it.
pub(crate) fn build(m: &mut Mend<'_>, ino: u64, parent: u64, entries: &[FoundEntry]) -> bool {
    let done = try_build(m, ino, parent, entries).is_some();
    // Blocks that were allocated for it are not in use.
    m.recount |= !done;
    done
}

fn try_build(m: &mut Mend<'_>, ino: u64, parent: u64, entries: &[FoundEntry]) -> Option<()> {
    let g = m.g.clone();
    let raw = m.raw(ino)?;
    let old = Inode::parse(ino, &raw, &g).ok()?;
    let new = entries.iter().map(|e| NewEntry {
        name: &e.name,
        ino: e.ino,
        file_type: e.kind,
    });
    let new: Vec<NewEntry<'_>> = new.collect();
    let (contents, size) = match layout(&g, parent, &new, old.fork_bytes(Fork::Data).len()) {
        DirLayout::Short(bytes) => {
            let size = bytes.len() as u64;
            (Contents::here(FORMAT_LOCAL, bytes), size)
        }
        DirLayout::Blocks(plan) => {
            let per = 1u32 << g.dirblklog;
            let runs = plan.runs(&g).into_iter();
            let runs: Vec<_> = runs.map(|(at, n)| (at, n as u32 * per)).collect();
            let owner = Owner { ino, parent };
            let made = Contents::in_blocks(m, &old, Fork::Data, &runs, per, |daddr, put| {
                fill(&g, owner, &new, &plan, daddr, put)
            });
            (made?, plan.size(&g))
        }
    };
    if let Some(FORMAT_EXTENTS | FORMAT_BTREE) = old.fork_format(Fork::Data) {
        fork::read(m, &old, Fork::Data).release(m, ino);
    }
    contents.map.own(m, ino, Fork::Data);
    contents.put(m, &old, raw, Fork::Data, Some(size));
    m.moved = true;
    Some(())
}
