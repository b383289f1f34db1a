//! Links: one parent for each directory, link counts, and lost+found.

use super::dir::{self, DirectoryTree, FoundEntry};
use super::inode::new_inode;
use super::{Mend, local};
use crate::check::{Counter, Place, Structure};
use crate::format::*;
use std::collections::{BTreeMap, HashMap, HashSet};

/// The directory for what no directory leads to.
const LOST: &[u8] = b"lost+found";

/// Gives each directory one parent, builds those anew that need it, and moves what nothing leads
/// to into lost+found.
pub(crate) fn settle(m: &mut Mend<'_>, tree: DirectoryTree) {
    let root = m.g.rootino;
    let DirectoryTree {
        dotdot,
        mut entries,
        mut rebuild,
    } = tree;
    entries.sort_unstable();
    // The parent that a directory names, or the first that has an entry for it.
    let mut parent: BTreeMap<u64, u64> = BTreeMap::new();
    for (child, from) in &entries {
        let named = dotdot.get(child) == Some(from);
        if named || !parent.contains_key(child) {
            parent.insert(*child, *from);
        }
    }
    // An entry in each other directory goes, and so does a second one in the same.
    let mut last = None;
    for e in &entries {
        if parent.get(&e.0) != Some(&e.1) || last == Some(*e) {
            rebuild.insert(e.1);
        }
        last = Some(*e);
    }
    cut_cycles(m, &dotdot, &mut parent, &mut rebuild);
    let lost_dirs: Vec<u64> = dotdot
        .keys()
        .filter(|d| **d != root && !parent.contains_key(d))
        .copied()
        .collect();
    let lost = lost_files(m);
    let mut orphans: HashMap<u64, Vec<u64>> = HashMap::new();
    if !lost_dirs.is_empty() || !lost.is_empty() {
        match lost_and_found(m, &mut rebuild) {
            Some(to) => {
                parent.entry(to).or_insert(root);
                for ino in lost_dirs.iter().filter(|d| **d != to) {
                    parent.insert(*ino, to);
                    rebuild.insert(*ino);
                    let text = "moved to lost+found";
                    m.say(Place::inode(Structure::Directory, *ino), text);
                    orphans.entry(to).or_default().push(*ino);
                }
                for ino in lost {
                    m.say(Place::inode(Structure::Inode, ino), "moved to lost+found");
                    orphans.entry(to).or_default().push(ino);
                    see(m, ino);
                }
                rebuild.insert(to);
            }
            None => {
                let text = "no inode is free for it";
                m.say(Place::fs(Structure::LostAndFound), text);
            }
        }
    }
    for (dir, up) in &dotdot {
        let want = parent.get(dir).copied().unwrap_or(root);
        if *up != want {
            rebuild.insert(*dir);
        }
    }
    let mut todo: Vec<u64> = rebuild.into_iter().collect();
    todo.sort_unstable();
    for ino in todo {
        one(m, ino, &parent, orphans.get(&ino).map_or(&[], |o| &o[..]));
    }
    let mut subdirs: HashMap<u64, u32> = HashMap::new();
    for up in parent.values() {
        *subdirs.entry(*up).or_default() += 1;
    }
    let mut dirs: HashSet<u64> = dotdot.keys().copied().collect();
    dirs.extend(parent.keys());
    for ino in dirs {
        if m.kind_of(ino) == FileType::Directory
            && let Some((ag, slot)) = m.slot(ino)
        {
            m.ags[ag].seen[slot] = 2 + subdirs.get(&ino).copied().unwrap_or(0);
        }
    }
}

/// Builds a directory anew from its entries that stay and orphans.
fn one(m: &mut Mend<'_>, ino: u64, parent: &BTreeMap<u64, u64>, orphans: &[u64]) {
    let Some(dir) = m.inode(ino) else { return };
    let mut entries = m.entries(&dir);
    let before = entries.len();
    let mut had = HashSet::new();
    entries.retain(|e| {
        e.kind != FileType::Directory || (parent.get(&e.ino) == Some(&ino) && had.insert(e.ino))
    });
    let mut names: HashSet<Vec<u8>> = HashSet::new();
    if !orphans.is_empty() {
        names.extend(entries.iter().map(|e| e.name.clone()));
    }
    for o in orphans {
        let mut name = o.to_string().into_bytes();
        while !names.insert(name.clone()) {
            name.extend_from_slice(b".1");
        }
        entries.push(FoundEntry {
            name,
            ino: *o,
            kind: m.kind_of(*o),
        });
    }
    if ino == m.g.rootino
        && let Some(lost) = m.lost
        && !entries.iter().any(|e| e.ino == lost)
    {
        entries.push(FoundEntry {
            name: LOST.to_vec(),
            ino: lost,
            kind: FileType::Directory,
        });
    }
    let up = match ino == m.g.rootino {
        true => ino,
        false => parent.get(&ino).copied().unwrap_or(m.g.rootino),
    };
    let text = match dir::build(m, ino, up, &entries) {
        true => {
            let (n, dropped) = (entries.len(), before.saturating_sub(entries.len()));
            format!("built anew: {n} entries, {dropped} dropped")
        }
        false => "no space to build it anew".into(),
    };
    m.say(Place::inode(Structure::Directory, ino), text);
}

/// Takes an entry away from each cycle of directories.
fn cut_cycles(
    m: &Mend<'_>,
    dotdot: &BTreeMap<u64, u64>,
    parent: &mut BTreeMap<u64, u64>,
    rebuild: &mut HashSet<u64>,
) {
    let mut done: HashSet<u64> = HashSet::from([m.g.rootino]);
    parent.remove(&m.g.rootino);
    for start in dotdot.keys() {
        let mut way = Vec::new();
        let mut on = HashSet::new();
        let mut at = *start;
        while !done.contains(&at) {
            if !on.insert(at) {
                if let Some(up) = parent.remove(&at) {
                    rebuild.insert(up);
                }
                break;
            }
            way.push(at);
            match parent.get(&at) {
                Some(up) => at = *up,
                None => break,
            }
        }
        done.extend(way);
    }
}

/// Files that no directory leads to.
fn lost_files(m: &Mend<'_>) -> Vec<u64> {
    let mut out = Vec::new();
    for (agno, ag) in (0..).zip(&m.ags) {
        for (slot, kind) in ag.kind.iter().enumerate() {
            let is = *kind != 0 && *kind != FileType::Directory as u8;
            if is && ag.seen[slot] == 0 {
                out.push(m.g.ino(agno, ag.agino(slot)));
            }
        }
    }
    out.retain(|ino| !m.g.is_own(*ino));
    out
}

fn see(m: &mut Mend<'_>, ino: u64) {
    if let Some((ag, slot)) = m.slot(ino) {
        m.ags[ag].seen[slot] += 1;
    }
}

/// The directory lost+found, which is made if there is none.
fn lost_and_found(m: &mut Mend<'_>, rebuild: &mut HashSet<u64>) -> Option<u64> {
    let root = m.inode(m.g.rootino)?;
    let entries = m.entries(&root);
    let there = entries
        .iter()
        .find(|e| e.name == LOST && e.kind == FileType::Directory);
    if let Some(e) = there {
        m.lost = Some(e.ino);
        return m.lost;
    }
    rebuild.insert(m.g.rootino);
    let (ino, agno, slot) = free_slot(m)?;
    let g = m.g.clone();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.map_or(0, |d| d.as_secs() as i64);
    let old = m.raw(ino).unwrap_or_default();
    let (d, mut raw) = new_inode(&g, ino, &old, Some(g.rootino), now);
    d.put(&mut raw, 0);
    m.put_inode(ino, &mut raw);
    m.ags[agno].kind[slot] = FileType::Directory as u8;
    m.ags[agno].nlink[slot] = 2;
    m.moved = true;
    m.touched.insert(agno as u32);
    m.lost = Some(ino);
    m.say(Place::inode(Structure::LostAndFound, ino), "made");
    m.lost
}

/// A free inode.
fn free_slot(m: &Mend<'_>) -> Option<(u64, usize, usize)> {
    m.ags.iter().enumerate().find_map(|(agno, ag)| {
        let there = |slot: &usize| ag.chunks[slot / 64].has(*slot as u32 % 64);
        let slot = (0..ag.kind.len()).find(|slot| ag.kind[*slot] == 0 && there(slot))?;
        Some((m.g.ino(agno as u32, ag.agino(slot)), agno, slot))
    })
}

/// Sets link counts right.
pub(crate) fn all(m: &mut Mend<'_>) {
    for agno in 0..m.g.agcount {
        let mut wrong: Vec<(u64, u32)> = Vec::new();
        let ag = &m.ags[agno as usize];
        for (slot, kind) in ag.kind.iter().enumerate() {
            if *kind == 0 {
                continue;
            }
            let ino = m.g.ino(agno, ag.agino(slot));
            let seen = match m.g.is_own(ino) {
                true => ag.nlink[slot].max(1),
                false => ag.seen[slot],
            };
            if seen != ag.nlink[slot] {
                wrong.push((ino, seen));
            }
        }
        for (ino, seen) in wrong {
            let place = Place::inode(Structure::Inode, ino);
            local::set(m, place, Counter::Links, seen.into());
        }
    }
}
