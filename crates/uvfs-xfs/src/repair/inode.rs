//! Inodes: those without findings first, then the others.

use super::contest::{self, Claim};
use super::dir::{self, DirectoryTree};
use super::fork::{self, Map};
use super::reader::each;
use super::space::{EXPECTED, UNSEEN};
use super::{Mend, Place, Structure};
use crate::format::*;
use crate::geometry::Geometry;
use crate::read::inode::{Fork, Inode};

/// Looks at all inodes, and repairs those that need it; reads all directories on the way.
///
/// Nothing is built that takes blocks until every inode has claimed its own.
pub(crate) fn all(m: &mut Mend<'_>) -> DirectoryTree {
    let mut later: Vec<(Claim, u64, usize)> = Vec::new();
    let mut changed: Vec<u64> = Vec::new();
    let mut unbuilt = Unbuilt::default();
    let mut tree = DirectoryTree::default();
    let owners = contest::owners(m);
    let mapped = contest::mapped(m);
    (m.recount, m.again) = (false, false);
    for agno in 0..m.g.agcount {
        each(m, agno, true, &mut |m, ino, slot, raw| {
            let parsed = Inode::parse(ino, raw, &m.g).ok();
            let free = Be16::at(raw, 2).is_ok_and(|mode| mode.get() == 0);
            if let Ok(d) = Dinode::at(raw, 0) {
                let lsn = d.lsn.get();
                if d.ino.get() == ino && lsn != u64::MAX {
                    m.max_lsn = m.max_lsn.max(lsn);
                }
            }
            let claim = match &parsed {
                Some(inode) if !m.findings.contested.is_empty() => {
                    contest::claim(m, inode, &owners)
                }
                Some(_) => Claim::None,
                None => Claim::Unproven,
            };
            let wait = !free && claim != Claim::None;
            match parsed {
                Some(inode) if !wait && !m.is_bad(ino) => {
                    let maps = read_maps(m, &inode);
                    if maps.iter().any(|(_, map)| map.hurt) {
                        later.push((claim, ino, slot));
                        return;
                    }
                    let dir = inode.file_type() == FileType::Directory;
                    let seen = Seen::new(ino, slot, inode, false);
                    match follow(m, seen, raw, maps, &mut unbuilt) {
                        Some(inode) if dir => dir::one(m, &inode, &mut tree),
                        None if dir => changed.push(ino),
                        _ => {}
                    }
                }
                None if free && !m.is_bad(ino) => m.note_kind(agno as usize, slot, 0),
                _ => later.push((claim, ino, slot)),
            }
        });
    }
    later.sort_by_key(|l| l.0);
    for (_, ino, slot) in &later {
        if let Some(raw) = m.raw(*ino) {
            let mapped = mapped.get(ino).map_or(&[][..], |e| e);
            damaged(m, *ino, *slot, &raw, mapped, &mut unbuilt);
        }
    }
    for (seen, maps) in std::mem::take(&mut unbuilt.trees) {
        let old = m.raw(seen.ino).unwrap_or_default();
        build_forks(m, seen, &old, maps, &mut unbuilt);
    }
    for ino in unbuilt.attrs {
        super::attr::mend(m, ino);
    }
    for agno in 0..m.ags.len() {
        for slot in 0..m.ags[agno].kind.len() {
            if m.ags[agno].kind[slot] & EXPECTED != 0 {
                m.note_kind(agno, slot, 0);
            }
        }
    }
    if m.again {
        return dir::all(m);
    }
    for ino in changed.into_iter().chain(later.iter().map(|l| l.1)) {
        if m.kind_of(ino) == FileType::Directory
            && let Some(dir) = m.inode(ino)
        {
            dir::one(m, &dir, &mut tree);
        }
    }
    tree
}

/// An inode that is followed.
struct Seen {
    ino: u64,
    slot: usize,
    inode: Inode,
    /// The bytes that it is to have.
    raw: Vec<u8>,
    /// It has findings.
    bad: bool,
}

impl Seen {
    fn new(ino: u64, slot: usize, inode: Inode, bad: bool) -> Seen {
        let raw = inode.raw().to_vec();
        Seen {
            ino,
            slot,
            inode,
            raw,
            bad,
        }
    }

    /// Whether a fork has to be built that does not fit into the inode.
    fn takes_blocks(&self, maps: &[(Fork, Map)]) -> bool {
        maps.iter().any(|(f, map)| {
            let room = self.inode.fork_bytes(*f).len();
            map.rebuild && map.extents.len() * ExtentRecord::SIZE > room
        })
    }
}

/// Work that takes blocks. It waits until all inodes have claimed theirs.
#[derive(Default)]
struct Unbuilt {
    /// Inodes with forks that become trees.
    trees: Vec<(Seen, Vec<(Fork, Map)>)>,
    /// Inodes whose attributes are to be repaired.
    attrs: Vec<u64>,
}

/// The forks of an inode that have blocks.
fn read_maps(m: &Mend<'_>, inode: &Inode) -> Vec<(Fork, Map)> {
    let forks = [Fork::Data, Fork::Attr].into_iter();
    let mapped = forks.filter(|f| {
        let format = inode.fork_format(*f);
        matches!(format, Some(FORMAT_EXTENTS | FORMAT_BTREE))
    });
    mapped.map(|f| (f, fork::read(m, inode, f))).collect()
}

/// A new inode in the place of `old`, and its bytes but for these fields: a directory without entries below `parent`, or
/// an empty file.
pub(crate) fn new_inode(
    g: &Geometry,
    ino: u64,
    old: &[u8],
    parent: Option<u64>,
    time: i64,
) -> (Dinode, Vec<u8>) {
    let generation = DinodeV2::at(old, 0).map_or(0, |d| d.r#gen.get());
    let mut raw = vec![0; g.inode_size as usize];
    let mut d = Dinode::free(g.meta_uuid, ino, generation.wrapping_add(1));
    d.v2.aformat = FORMAT_EXTENTS;
    match parent {
        Some(parent) => {
            d.v2.mode.set(0o040755);
            d.v2.nlink.set(2);
            d.v2.format = FORMAT_LOCAL;
            d.v2.size.set(6);
            Be32::new(parent as u32).put(&mut raw, DINODE_V3_SIZE + 2);
        }
        None => {
            d.v2.mode.set(0o100000);
            d.v2.nlink.set(1);
            d.v2.format = FORMAT_EXTENTS;
        }
    }
    if g.features.bigtime {
        d.flags2.set(DIFLAG2_BIGTIME);
        let stamp = Be64::new(bigtime_stamp(time, 0));
        (d.v2.atime, d.v2.mtime, d.v2.ctime, d.crtime) = (stamp, stamp, stamp, stamp);
    }
    (d, raw)
}

/// Makes an inode free, or one that the file system cannot do without empty.
fn clear(m: &mut Mend<'_>, ino: u64, slot: usize, old: &[u8], why: &str) {
    let g = m.g.clone();
    let own = ino == g.rbmino || ino == g.rsumino;
    // The root directory is its own parent.
    let parent = (ino == g.rootino).then_some(ino);
    let (mut d, mut new) = new_inode(&g, ino, old, parent.filter(|_| !own), 0);
    if ino == g.rbmino {
        d.v2.flags.set(DIFLAG_NEWRTBM);
    }
    let what = match own || parent.is_some() {
        true => "made anew",
        false => {
            d = Dinode::free(g.meta_uuid, ino, d.v2.r#gen.get());
            "cleared"
        }
    };
    let text = format!("{what}: {why}");
    m.say(Place::inode(Structure::Inode, ino), text);
    d.put(&mut new, 0);
    m.put_inode(ino, &mut new);
    m.moved = true;
    m.recount = true;
    let ag = agno(&m.g, ino);
    let kind = FileType::from_mode(d.v2.mode.get()) as u8;
    m.note_kind(ag, slot, kind);
    m.ags[ag].nlink[slot] = d.v2.nlink.get();
}

fn agno(g: &Geometry, ino: u64) -> usize {
    g.inode(ino).map_or(0, |a| a.agno as usize)
}

/// Corrects the fields of an inode that has findings, or clears it, and follows its forks. Extents that its data fork
/// has lost are taken from `mapped`.
fn damaged(
    m: &mut Mend<'_>,
    ino: u64,
    slot: usize,
    old: &[u8],
    mapped: &[Extent],
    unbuilt: &mut Unbuilt,
) {
    let parsed = Inode::parse(ino, old, &m.g);
    if !m.is_bad(ino)
        && let Ok(inode) = parsed
    {
        let maps = read_maps(m, &inode);
        follow(m, Seen::new(ino, slot, inode, false), old, maps, unbuilt);
        return;
    }
    let mut raw = old.to_vec();
    match super::fields::core(m, ino, &mut raw) {
        super::fields::Core::Keep => {}
        super::fields::Core::Free => return m.note_kind(agno(&m.g, ino), slot, 0),
        super::fields::Core::Clear(why) => return clear(m, ino, slot, old, why),
    }
    store_crc(&mut raw, DINODE_CRC_OFFSET);
    match Inode::parse(ino, &raw, &m.g) {
        Ok(inode) => {
            let mut seen = Seen::new(ino, slot, inode, true);
            if seen.inode.file_type() == FileType::Symlink {
                mend_link(m, ino, &mut seen.inode, &mut seen.raw);
            }
            let mut maps = read_maps(m, &seen.inode);
            for (_, map) in maps.iter_mut().filter(|(f, _)| *f == Fork::Data) {
                if map.complete(mapped, seen.inode.nextents) {
                    let text = "extents taken from the reverse mapping tree";
                    m.say(Place::inode(Structure::Inode, ino), text);
                }
            }
            follow(m, seen, old, maps, unbuilt);
        }
        Err(e) => clear(m, ino, slot, old, &e.to_string()),
    }
}

/// Sets the size of a symbolic link whose target is in blocks of its own to what they have.
fn mend_link(m: &mut Mend<'_>, ino: u64, inode: &mut Inode, raw: &mut [u8]) {
    if inode.fork_format(Fork::Data) != Some(FORMAT_LOCAL)
        && let Some(size) = super::fields::link_size(m, inode)
        && let Ok(d) = DinodeV2::at_mut(raw, 0)
    {
        if m.is_about(ino, Structure::SymbolicLink) {
            super::fields::link_blocks(m, inode);
            let text = "the heads of its blocks set right";
            m.say(Place::inode(Structure::SymbolicLink, ino), text);
        }
        d.size.set(size);
        inode.size = size;
    }
}

/// Claims the blocks of an inode's forks. `old` is on disk. Gives the inode back if nothing had to be
/// changed.
fn follow(
    m: &mut Mend<'_>,
    seen: Seen,
    old: &[u8],
    mut maps: Vec<(Fork, Map)>,
    unbuilt: &mut Unbuilt,
) -> Option<Inode> {
    let kind = seen.inode.file_type();
    for (f, map) in &mut maps {
        claim(m, map, *f == Fork::Data && kind == FileType::Regular);
        // A tree with findings is built anew with the rest.
        map.rebuild |= map.hurt
            || (seen.bad && m.is_about(seen.ino, Btree::Bmap.into()) && !map.tree.is_empty());
        m.recount |= map.rebuild;
    }
    let ag = agno(&m.g, seen.ino);
    m.note_kind(ag, seen.slot, kind as u8);
    m.ags[ag].nlink[seen.slot] = seen.inode.nlink;
    if seen.takes_blocks(&maps) {
        unbuilt.trees.push((seen, maps));
        return None;
    }
    build_forks(m, seen, old, maps, unbuilt)
}

/// Rebuilds forks of an inode whose blocks are claimed, if they need it, and corrects its counts. `old` is on disk.
/// Gives the inode back if nothing had to be changed.
fn build_forks(
    m: &mut Mend<'_>,
    seen: Seen,
    old: &[u8],
    maps: Vec<(Fork, Map)>,
    unbuilt: &mut Unbuilt,
) -> Option<Inode> {
    let Seen {
        ino,
        slot,
        inode,
        mut raw,
        bad,
    } = seen;
    let kind = inode.file_type();
    let mut total = 0;
    let mut counted = true;
    let hurt = maps.iter().any(|(_, map)| map.hurt);
    for (f, mut map) in maps {
        if map.rebuild {
            let Some(made) = fork::make(m, ino, &map.extents, inode.fork_bytes(f).len()) else {
                clear(m, ino, slot, old, "no space for its extents");
                return None;
            };
            super::contents::store(&mut raw, &inode, f, made.format, &made.bytes);
            map.tree = made.tree;
            m.moved = true;
        } else {
            map.own(m, ino, f);
        }
        total += map.blocks();
        if map.extents.len() as u64 != inode.extents(f) {
            counted = false;
            fork::set_extents(&mut raw, f, map.extents.len() as u64);
        }
        if bad && f == Fork::Data && kind == FileType::Regular {
            file_size(m, &mut raw, &map);
        }
    }
    if !bad && !hurt && counted && total == inode.nblocks && !m.findings.sharing.contains(&ino) {
        return Some(inode);
    }
    if hurt {
        let text = "extents that led outside or to blocks of others cut off";
        m.say(Place::inode(Structure::Inode, ino), text);
        m.moved = true;
    }
    if bad && kind == FileType::Symlink && !super::fields::is_link(m, &inode) {
        clear(m, ino, slot, old, "its target cannot be read");
        return None;
    }
    if let Ok(d) = Dinode::at_mut(&mut raw, 0) {
        d.v2.nblocks.set(total);
        if m.findings.sharing.contains(&ino) {
            d.flags2.set(d.flags2.get() | DIFLAG2_REFLINK);
        }
        if bad && m.is_about(ino, Structure::UnlinkedList) {
            d.v2.next_unlinked.set(NULLAGINO);
        }
    }
    store_crc(&mut raw, DINODE_CRC_OFFSET);
    if raw != old {
        m.put_inode(ino, &mut raw);
        if !hurt {
            m.say(Place::inode(Structure::Inode, ino), "fields set right");
        }
    }
    if bad {
        unbuilt.attrs.push(ino);
    }
    None
}

/// Claims the blocks of a fork; extents that reach into others' blocks are cut.
fn claim(m: &mut Mend<'_>, map: &mut Map, data: bool) {
    let g = m.g.clone();
    let mut kept = Vec::with_capacity(map.extents.len());
    for e in std::mem::take(&mut map.extents) {
        let Some(a) = g.fsb_run(e.startblock, e.blockcount) else {
            continue;
        };
        let mut clashes = m.claim(a, e.blockcount, data);
        clashes.retain(|(start, len, theirs)| {
            let shared = data && *theirs && g.features.reflink;
            if shared {
                m.ags[a.agno as usize].shared.push((*start, *len));
            }
            !shared
        });
        if clashes.is_empty() {
            kept.push(e);
            continue;
        }
        map.hurt = true;
        // The parts between the clashes stay.
        let runs: Vec<(u32, u32)> = clashes.iter().map(|(s, n, _)| (*s, *n)).collect();
        for (s, n) in crate::bulk::space::subtract(&[(a.agbno, e.blockcount)], &runs) {
            kept.push(e.part((s - a.agbno).into(), n));
        }
    }
    map.extents = kept;
    let tree = std::mem::take(&mut map.tree);
    for b in tree {
        let Some(a) = g.fsb(b) else { continue };
        match m.claim(a, 1, false).is_empty() {
            true => map.tree.push(b),
            false => map.hurt = true,
        }
    }
}

/// Replaces a size that makes no sense by that of the extents.
fn file_size(m: &Mend<'_>, raw: &mut [u8], map: &Map) {
    if let Ok(d) = DinodeV2::at_mut(raw, 0)
        && i64::try_from(d.size.get()).is_err()
    {
        let end = map.extents.last().map_or(0, Extent::end);
        d.size.set(end << m.g.blocklog);
    }
}

impl Mend<'_> {
    /// Notes the kind of an inode that was looked at: 0 if it is free.
    fn note_kind(&mut self, ag: usize, slot: usize, kind: u8) {
        let known = &mut self.ags[ag].kind[slot];
        self.again |= *known != UNSEEN && *known & !EXPECTED != kind;
        *known = kind;
    }

    /// The kind of an inode that a directory says is of `kind`; of one that was not looked at yet, that
    /// is believed until it is.
    pub fn expect(&mut self, ino: u64, kind: FileType) -> FileType {
        if ino == self.g.rootino || self.g.is_own(ino) {
            return FileType::Unknown;
        }
        let Some((ag, slot)) = self.slot(ino) else {
            return FileType::Unknown;
        };
        let known = &mut self.ags[ag].kind[slot];
        if *known & EXPECTED == 0 {
            return FileType::from_ftype(*known).unwrap_or_default();
        }
        self.again |= kind == FileType::Unknown || ![UNSEEN, EXPECTED | kind as u8].contains(known);
        *known = EXPECTED | kind as u8;
        kind
    }

    /// The kind of an inode in use.
    pub fn kind_of(&self, ino: u64) -> FileType {
        let slot = self.slot(ino);
        let kind = slot.and_then(|(ag, slot)| FileType::from_ftype(self.ags[ag].kind[slot]));
        kind.unwrap_or_default()
    }

    /// The group of an inode that is there, and its place among those of the group.
    pub fn slot(&self, ino: u64) -> Option<(usize, usize)> {
        let a = self.g.inode(ino)?;
        let ag = a.agno as usize;
        Some((ag, self.ags[ag].slot(a.agino)?))
    }
}
