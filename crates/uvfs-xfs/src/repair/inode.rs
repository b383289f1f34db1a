//! Inodes: those without findings first, then the others.

use super::Mend;
use super::contest::{self, Claim};
use super::dir::{self, Tree};
use super::fork::{self, Map};
use super::overlay::{Fetched, Overlay};
use super::space::{Chunk, EXPECTED, UNSEEN};
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use crate::inode::{Fork, Inode};
use crate::mkfs::free_inode;
use std::sync::mpsc;

/// Bytes of inodes read at once.
const MAX_READ: u64 = 1 << 20;
/// Bytes of directory blocks that are read with them.
const MAX_AHEAD: usize = 2 << 20;
/// Threads that read inodes, each of which holds one run.
const READERS: usize = 4;

/// The bytes of a run of inodes, and blocks of its directories.
type Run = (Vec<u8>, Option<Fetched>);

/// Is given an inode's number, its place in the lists, and its bytes.
type Visit<'v> = &'v mut dyn FnMut(&mut Mend<'_>, u64, usize, &[u8]);

/// Visits the inodes of a group that are there: number, place in the lists, bytes.
/// `ahead`: directories will be read, too.
pub(crate) fn each(m: &mut Mend<'_>, agno: u32, ahead: bool, visit: Visit<'_>) {
    let geometry = m.g.clone();
    let g = &*geometry;
    let size = g.inode_size as usize;
    let bytes = u64::from(INODES_PER_CHUNK) << g.inodelog;
    let base = g.daddr(AgBlock { agno, agbno: 0 }) << 9;
    let ag_bytes = u64::from(g.ag_blocks(agno)) << g.blocklog;
    let runs = runs(&m.ags[agno as usize].chunks, g);
    let disk = m.disk;
    let read = |(_, n): (usize, usize), start: u64| {
        let len = (start + n as u64 * bytes)
            .min(ag_bytes)
            .saturating_sub(start);
        let mut run = vec![0; len as usize];
        let at = base + start;
        // Bytes that cannot be read stay zeros, and so are no inodes.
        if crate::Blocks::read_data(disk, at, &mut run).is_err() {
            for (k, one) in run.chunks_mut(size).enumerate() {
                let _ = crate::Blocks::read_data(disk, at + (k * size) as u64, one);
            }
        }
        let ahead = ahead.then(|| fetch(disk, g, &run));
        (run, ahead)
    };
    let chunks = &m.ags[agno as usize].chunks;
    let starts = runs
        .iter()
        .map(|r| u64::from(chunks[r.0].start) << g.inodelog);
    let runs: Vec<((usize, usize), u64)> = runs.iter().copied().zip(starts).collect();
    std::thread::scope(|s| {
        // Reader k has the runs k, k + READERS and so on: they are taken in order.
        let readers: Vec<mpsc::Receiver<Run>> = (0..READERS.min(runs.len()))
            .map(|k| {
                let (give, take) = mpsc::sync_channel(0);
                let (read, mine) = (&read, runs[k..].iter().step_by(READERS));
                s.spawn(move || {
                    for (run, start) in mine {
                        if give.send(read(*run, *start)).is_err() {
                            break;
                        }
                    }
                });
                take
            })
            .collect();
        for (i, ((first, n), start_at)) in runs.iter().enumerate() {
            let Ok((run, blocks)) = readers[i % READERS].recv() else {
                break;
            };
            if let Some(blocks) = blocks {
                disk.expect(blocks);
            }
            for k in *first..first + n {
                let chunk = m.ags[agno as usize].chunks[k];
                for slot in (0..INODES_PER_CHUNK).filter(|s| chunk.has(*s)) {
                    let from = ((u64::from(chunk.start + slot) << g.inodelog) - start_at) as usize;
                    if let Some(raw) = run.get(from..from + size) {
                        let ino = g.ino(agno, chunk.start + slot);
                        visit(m, ino, k * 64 + slot as usize, raw);
                    }
                }
            }
        }
    });
}

/// Runs of chunks that lie one after another: the first, and how many.
fn runs(chunks: &[Chunk], g: &Geometry) -> Vec<(usize, usize)> {
    let most = (MAX_READ >> (g.inodelog + 6)).max(1) as usize;
    let mut out: Vec<(usize, usize)> = Vec::new();
    for (i, c) in chunks.iter().enumerate() {
        match out.last_mut() {
            Some((_, n)) if *n < most && chunks[i - 1].start + INODES_PER_CHUNK == c.start => {
                *n += 1;
            }
            _ => out.push((i, 1)),
        }
    }
    out
}

/// Reads the blocks of directories in a run of inodes ahead. Nothing here is believed.
fn fetch(disk: &Overlay, g: &Geometry, run: &[u8]) -> Fetched {
    let per = 1u32 << g.dirblklog;
    let mut wanted = Vec::new();
    for raw in run.chunks_exact(g.inode_size as usize) {
        let Ok(d) = Dinode::at(raw, 0) else { continue };
        let dir = FileType::from_mode(d.v2.mode.get()) == FileType::Directory;
        if !dir || d.v2.format != FORMAT_EXTENTS {
            continue;
        }
        let n = (d.v2.nextents.get() as usize).min((raw.len() - DINODE_V3_SIZE) / 16);
        let extents = ExtentRecord::slice_at(raw, DINODE_V3_SIZE, n);
        for e in extents.unwrap_or_default() {
            let e = e.unpack();
            if e.startoff >= DIR2_LEAF_OFFSET >> g.blocklog {
                break;
            }
            if let Some(a) = g.fsb_run(e.startblock, e.blockcount) {
                let blocks = (0..e.blockcount.min(1024)).step_by(per as usize);
                wanted.extend(blocks.map(|b| {
                    let agbno = a.agbno + b;
                    g.daddr(AgBlock { agbno, ..a }) << 9
                }));
            }
        }
    }
    // Further blocks are read when they are needed.
    wanted.truncate((MAX_AHEAD / g.dir_block_size as usize).max(1));
    wanted.sort_unstable();
    disk.fetch(&wanted, g.dir_block_size as usize)
}

/// Looks at all inodes, and mends those that need it; reads all directories on the way.
pub(crate) fn all(m: &mut Mend<'_>) -> Tree {
    let mut later: Vec<(Claim, u64, usize)> = Vec::new();
    let mut changed: Vec<u64> = Vec::new();
    let mut tree = Tree::default();
    let owners = contest::owners(m);
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
                Some(inode) if !m.contested.is_empty() => contest::claim(m, inode, &owners),
                Some(_) => Claim::None,
                None => Claim::Unproven,
            };
            let wait = !free && claim != Claim::None;
            match parsed {
                Some(inode) if !wait && !m.is_bad(ino) && !has_broken_tree(m, &inode) => {
                    let dir = inode.file_type() == FileType::Directory;
                    match follow(m, ino, slot, raw, inode, false) {
                        Some(inode) if dir => dir::one(m, &inode, &mut tree),
                        None if dir => changed.push(ino),
                        _ => {}
                    }
                }
                None if free && !m.is_bad(ino) => m.found(agno as usize, slot, 0),
                _ => later.push((claim, ino, slot)),
            }
        });
    }
    later.sort_by_key(|l| l.0);
    for (_, ino, slot) in &later {
        if let Some(raw) = m.raw(*ino) {
            damaged(m, *ino, *slot, &raw);
        }
    }
    for agno in 0..m.ags.len() {
        for slot in 0..m.ags[agno].kind.len() {
            if m.ags[agno].kind[slot] & EXPECTED != 0 {
                m.found(agno, slot, 0);
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

/// Whether the tree of a fork has to be built anew. That takes blocks, and is done when all others have
/// claimed theirs.
fn has_broken_tree(m: &Mend<'_>, inode: &Inode) -> bool {
    [Fork::Data, Fork::Attr]
        .into_iter()
        .any(|f| inode.fork_format(f) == Some(FORMAT_BTREE) && fork::read(m, inode, f).hurt)
}

/// Makes an inode free.
fn clear(m: &mut Mend<'_>, ino: u64, slot: usize, raw: &[u8], why: &str) {
    let g = m.g.clone();
    let generation = DinodeV2::at(raw, 0).map_or(0, |d| d.r#gen.get());
    let mut new = vec![0; g.inode_size as usize];
    let mut d = free_inode(&g, ino, generation.wrapping_add(1));
    let own = ino == g.rbmino || ino == g.rsumino;
    if own || ino == g.rootino {
        d.v2.mode.set(if own { 0o100000 } else { 0o040755 });
        d.v2.nlink.set(if own { 1 } else { 2 });
        d.v2.format = FORMAT_EXTENTS;
        d.v2.aformat = FORMAT_EXTENTS;
        if ino == g.rbmino {
            d.v2.flags.set(DIFLAG_NEWRTBM);
        }
        if !own {
            d.v2.format = FORMAT_LOCAL;
            d.v2.size.set(6);
            // No entries, its own parent.
            let parent = (ino as u32).to_be_bytes();
            new[DINODE_V3_SIZE + 2..DINODE_V3_SIZE + 6].copy_from_slice(&parent);
        }
        if g.features.bigtime {
            d.flags2.set(DIFLAG2_BIGTIME);
            let zero = Be64::new(bigtime_stamp(0, 0));
            (d.v2.atime, d.v2.mtime, d.v2.ctime, d.crtime) = (zero, zero, zero, zero);
        }
        m.say("inode", None, Some(ino), format!("made anew: {why}"));
    } else {
        m.say("inode", None, Some(ino), format!("cleared: {why}"));
    }
    d.put(&mut new, 0);
    m.put_inode(ino, &mut new);
    m.moved = true;
    m.recount = true;
    let ag = agno(&m.g, ino);
    let kind = FileType::from_mode(d.v2.mode.get()) as u8;
    m.found(ag, slot, kind);
    m.ags[ag].nlink[slot] = d.v2.nlink.get();
}

fn agno(g: &Geometry, ino: u64) -> usize {
    g.inode(ino).map_or(0, |a| a.agno as usize)
}

/// Follows an inode that may have findings.
fn damaged(m: &mut Mend<'_>, ino: u64, slot: usize, old: &[u8]) {
    let parsed = Inode::parse(ino, old, &m.g);
    if !m.is_bad(ino)
        && let Ok(inode) = parsed
    {
        follow(m, ino, slot, old, inode, false);
        return;
    }
    let mut raw = old.to_vec();
    match super::fields::core(m, ino, &mut raw) {
        super::fields::Core::Keep => {}
        super::fields::Core::Free => return m.found(agno(&m.g, ino), slot, 0),
        super::fields::Core::Clear(why) => return clear(m, ino, slot, old, why),
    }
    store_crc(&mut raw, DINODE_CRC_OFFSET);
    match Inode::parse(ino, &raw, &m.g) {
        Ok(inode) => {
            follow(m, ino, slot, old, inode, true);
        }
        Err(e) => clear(m, ino, slot, old, &e.to_string()),
    }
}

/// Sets the size of a symbolic link whose target is in blocks of its own to what they have.
fn mend_link(m: &mut Mend<'_>, ino: u64, inode: &mut Inode, raw: &mut [u8]) {
    if inode.fork_format(Fork::Data) != Some(FORMAT_LOCAL)
        && let Some(size) = super::fields::link_size(m, inode)
        && let Ok(d) = Dinode::at(raw, 0)
    {
        if m.is_about(ino, "symbolic link") {
            super::fields::link_lsns(m, inode);
            let text = "its log sequence number set right";
            m.say("symbolic link", None, Some(ino), text.into());
        }
        let mut d = *d;
        d.v2.size.set(size);
        d.put(raw, 0);
        inode.size = size;
    }
}

/// Follows an inode's forks and claims its blocks. `old` is on disk, `inode` what was made of it.
/// Gives the inode back if nothing had to be changed.
fn follow(
    m: &mut Mend<'_>,
    ino: u64,
    slot: usize,
    old: &[u8],
    mut inode: Inode,
    bad: bool,
) -> Option<Inode> {
    let ag = agno(&m.g, ino);
    let mut raw = inode.raw().to_vec();
    let kind = inode.file_type();
    if bad && kind == FileType::Symlink {
        mend_link(m, ino, &mut inode, &mut raw);
    }
    let mut total = 0;
    let mut hurt = false;
    let mut counted = true;
    for f in [Fork::Data, Fork::Attr] {
        let Some(FORMAT_EXTENTS | FORMAT_BTREE) = inode.fork_format(f) else {
            continue;
        };
        let mut map = fork::read(m, &inode, f);
        let data = f == Fork::Data && kind == FileType::Regular;
        claim(m, &mut map, data);
        hurt |= map.hurt;
        if bad && !map.hurt {
            // A tree is built anew with the rest.
            let tree = m.is_about(ino, "bmbt");
            map.hurt = tree && !map.tree.is_empty();
        }
        if map.hurt {
            m.recount = true;
            if !put_fork(m, ino, &mut raw, &inode, f, &mut map) {
                clear(m, ino, slot, old, "no space for its extents");
                return None;
            }
        } else {
            map.own(m, ino, f);
        }
        total += map.blocks();
        let n = if f == Fork::Data {
            inode.nextents
        } else {
            inode.anextents
        };
        if map.extents.len() as u64 != n {
            counted = false;
            set_extents(&mut raw, f, map.extents.len() as u64);
        }
        if bad && data {
            file_size(m, &mut raw, &map);
        }
    }
    m.found(ag, slot, kind as u8);
    m.ags[ag].nlink[slot] = inode.nlink;
    if !bad && !hurt && counted && total == inode.nblocks && !m.sharing.contains(&ino) {
        return Some(inode);
    }
    if hurt {
        let text = "extents that led outside or to blocks of others cut off";
        m.say("inode", None, Some(ino), text.into());
        m.moved = true;
    }
    if bad && kind == FileType::Symlink && !super::fields::is_link(m, &inode) {
        clear(m, ino, slot, old, "its target cannot be read");
        return None;
    }
    if let Ok(d) = Dinode::at(&raw, 0) {
        let mut d = *d;
        d.v2.nblocks.set(total);
        if m.sharing.contains(&ino) {
            d.flags2.set(d.flags2.get() | DIFLAG2_REFLINK);
        }
        if bad && m.is_about(ino, "unlinked list") {
            d.v2.next_unlinked.set(NULLAGINO);
        }
        d.put(&mut raw, 0);
    }
    store_crc(&mut raw, DINODE_CRC_OFFSET);
    if raw != old {
        m.put_inode(ino, &mut raw);
        if !hurt {
            m.say("inode", None, Some(ino), "fields set right".into());
        }
    }
    if bad {
        super::attr::mend(m, ino);
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
        for (s, n) in super::space::subtract(&[(a.agbno, e.blockcount)], &runs) {
            let skip = s - a.agbno;
            kept.push(Extent {
                startoff: e.startoff + u64::from(skip),
                startblock: e.startblock + u64::from(skip),
                blockcount: n,
                unwritten: e.unwritten,
            });
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

/// Puts new extents into a fork.
fn put_fork(
    m: &mut Mend<'_>,
    ino: u64,
    raw: &mut [u8],
    inode: &Inode,
    f: Fork,
    map: &mut Map,
) -> bool {
    let room = inode.fork_bytes(f).len();
    let at = match f {
        Fork::Data => DINODE_V3_SIZE,
        Fork::Attr => raw.len() - room,
    };
    let Some(made) = fork::make(m, ino, &map.extents, room) else {
        return false;
    };
    raw[at..at + room].fill(0);
    raw[at..at + made.bytes.len()].copy_from_slice(&made.bytes);
    match f {
        Fork::Data => raw[5] = made.format,
        Fork::Attr => raw[83] = made.format,
    }
    map.tree = made.tree;
    m.moved = true;
    true
}

/// Sets the number of extents of a fork.
pub(crate) fn set_extents(raw: &mut [u8], f: Fork, n: u64) {
    let Ok(d) = Dinode::at(raw, 0) else { return };
    let mut d = *d;
    match (f, d.flags2.get() & DIFLAG2_NREXT64 != 0) {
        (Fork::Data, true) => d.v2.big_nextents.set(n),
        (Fork::Data, false) => d.v2.nextents.set(n as u32),
        (Fork::Attr, true) => d.v2.nextents.set(n as u32),
        (Fork::Attr, false) => d.v2.anextents.set(n as u16),
    }
    d.put(raw, 0);
}

/// A size that makes no sense is that of the extents.
fn file_size(m: &Mend<'_>, raw: &mut [u8], map: &Map) {
    let Ok(d) = Dinode::at(raw, 0) else { return };
    if i64::try_from(d.v2.size.get()).is_err() {
        let mut d = *d;
        let end = map.extents.last();
        let end = end.map_or(0, |e| e.startoff + u64::from(e.blockcount));
        d.v2.size.set(end << m.g.blocklog);
        d.put(raw, 0);
    }
}

/// Mends the quota inodes: their records, and whether they are to be counted again.
pub(crate) fn quota(m: &mut Mend<'_>) {
    const KINDS: [(&str, u8, u16, u16); 3] = [
        ("user quota", DQTYPE_USER, 0x0004, 0x0003),
        ("group quota", DQTYPE_GROUP, 0x0100, 0x00c0),
        ("project quota", DQTYPE_PROJ, 0x0400, 0x0208),
    ];
    let mut sb = m.sb;
    let inodes = m.g.quota_inodes;
    for (k, (what, kind, checked, on)) in KINDS.into_iter().enumerate() {
        let Some(ino) = inodes[k] else { continue };
        let regular = m.kind_of(ino) == FileType::Regular;
        let twice = inodes[..k].contains(&Some(ino)) || ino == m.g.rootino;
        let records = m.is_about(ino, what);
        if !regular || twice {
            [&mut sb.uquotino, &mut sb.gquotino, &mut sb.pquotino][k].set(0);
            sb.qflags.set(sb.qflags.get() & !(checked | on));
            m.say(what, None, Some(ino), "taken away: it is no file".into());
        } else if records || m.hurt(what, 0) {
            if records {
                dquots(m, ino, kind);
            }
            sb.qflags.set(sb.qflags.get() & !checked);
            let text = "to be counted again at the next mount";
            m.say(what, None, None, text.into());
        }
    }
    if zerocopy::IntoBytes::as_bytes(&sb) != zerocopy::IntoBytes::as_bytes(&m.sb) {
        m.put_superblock(sb);
    }
}

/// Resets the records of a quota inode that make no sense.
fn dquots(m: &mut Mend<'_>, ino: u64, kind: u8) {
    let g = m.g.clone();
    let Some(Ok(inode)) = m.raw(ino).map(|raw| Inode::parse(ino, &raw, &g)) else {
        return;
    };
    let map = fork::read(m, &inode, Fork::Data);
    let per = g.block_size as usize / Dquot::SIZE;
    for e in map.extents.iter().filter(|e| !e.unwritten) {
        for i in 0..u64::from(e.blockcount) {
            let Some(at) = map.offset(m, e.startoff + i, 1) else {
                continue;
            };
            let Ok(mut bytes) = m.disk.get(at, g.block_size as usize) else {
                continue;
            };
            let ident = g.ident(at >> 9, None);
            let mut changed = false;
            for k in 0..per {
                let id = ((e.startoff + i) * per as u64 + k as u64) as u32;
                let record = &mut bytes[k * Dquot::SIZE..(k + 1) * Dquot::SIZE];
                let fine = check_dquot(record, &ident)
                    .is_ok_and(|d| d.id.get() == id && d.r#type & !DQTYPE_BIGTIME == kind);
                if fine {
                    continue;
                }
                changed = true;
                record.fill(0);
                use zerocopy::FromZeros;
                let mut d = Dquot::new_zeroed();
                d.magic.set(DQUOT_MAGIC);
                d.version = 1;
                d.r#type = kind;
                d.id.set(id);
                d.uuid = g.meta_uuid;
                d.put(record, 0);
                store_crc(record, DQUOT_CRC_OFFSET);
            }
            if changed {
                m.disk.write(at, &bytes);
            }
        }
    }
}

impl Mend<'_> {
    /// An inode was looked at: this is its kind, 0 if it is free.
    fn found(&mut self, ag: usize, slot: usize, kind: u8) {
        let known = &mut self.ags[ag].kind[slot];
        self.again |= *known != UNSEEN && *known & !EXPECTED != kind;
        *known = kind;
    }

    /// The kind of an inode that a directory says is of `kind`; of one that was not looked at yet, that
    /// is believed until it is.
    pub fn expect(&mut self, ino: u64, kind: FileType) -> FileType {
        if ino == self.g.rootino || self.is_own(ino) {
            return FileType::Unknown;
        }
        let a = self.g.inode(ino);
        let place =
            a.and_then(|a| Some((a.agno as usize, self.ags[a.agno as usize].slot(a.agino)?)));
        let Some((ag, slot)) = place else {
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
        let Some(a) = self.g.inode(ino) else {
            return FileType::Unknown;
        };
        let ag = &self.ags[a.agno as usize];
        let kind = ag.slot(a.agino).and_then(|s| ag.kind.get(s));
        kind.and_then(|k| FileType::from_ftype(*k))
            .unwrap_or_default()
    }
}
