//! The fields of an inode with findings.

use super::fork;
use super::{Mend, Place, Structure};
use crate::format::*;
use crate::geometry::Geometry;
use crate::read::inode::{Fork, Inode, known_flags2, unfit_flags};

/// The fate of an inode.
pub(crate) enum Core {
    /// Its fields are corrected: it can be decoded now.
    Keep,
    /// It is a free inode, and was made anew.
    Free,
    /// It can't be repaired, for this reason.
    Clear(&'static str),
}

/// The offset of an inode's attribute fork; the end of the inode if it has none.
fn attr_at(forkoff: u8, size: usize) -> usize {
    match forkoff {
        0 => size,
        f => (DINODE_V3_SIZE + usize::from(f) * 8).min(size),
    }
}

/// Corrects the fields of an inode, so that it can be decoded.
pub(crate) fn core(m: &mut Mend<'_>, ino: u64, raw: &mut [u8]) -> Core {
    let g = m.g.clone();
    let Ok(d) = Dinode::at(raw, 0) else {
        return Core::Clear("it cannot be read");
    };
    let mut d = *d;
    let sound = check_crc(raw, DINODE_CRC_OFFSET).is_ok();
    let named = d.ino.get() == ino;
    let ours = d.uuid == g.meta_uuid;
    let magic = d.v2.magic.get() == DINODE_MAGIC;
    let signs = [sound, named, ours, magic, d.v2.version == 3];
    if signs.iter().filter(|s| **s).count() < 3 || !(named || ours) {
        return Core::Clear("it is not this inode");
    }
    if d.v2.mode.get() == 0 && ino != g.rootino && !g.is_own(ino) {
        return free(m, ino, raw, &d);
    }
    d.v2.magic.set(DINODE_MAGIC);
    d.v2.version = 3;
    d.ino.set(ino);
    d.uuid = g.meta_uuid;
    let mut kind = FileType::from_mode(d.v2.mode.get());
    let wanted = match ino {
        _ if ino == g.rootino => Some(FileType::Directory),
        _ if ino == g.rbmino || ino == g.rsumino => Some(FileType::Regular),
        _ => None,
    };
    if let Some(want) = wanted.filter(|w| *w != kind) {
        let dir = want == FileType::Directory;
        let bits = if dir { 0o755 } else { 0 };
        d.v2.mode.set(want.mode_bits() as u16 | bits);
        kind = want;
    }
    if kind == FileType::Unknown {
        return Core::Clear("it has no type");
    }
    flags(&g, ino, kind, &mut d);
    times(&mut d);
    d.put(raw, 0);
    if let Some(why) = forks(m, ino, kind, raw) {
        return Core::Clear(why);
    }
    Core::Keep
}

/// A free inode: all of it is made anew if anything is wrong.
fn free(m: &mut Mend<'_>, ino: u64, raw: &[u8], d: &Dinode) -> Core {
    let mut new = vec![0; raw.len()];
    let fresh = Dinode::free(m.g.meta_uuid, ino, d.v2.r#gen.get());
    fresh.put(&mut new, 0);
    m.put_inode(ino, &mut new);
    m.moved = true;
    let text = "a free inode made anew";
    m.say(Place::inode(Structure::Inode, ino), text);
    Core::Free
}

fn flags(g: &Geometry, ino: u64, kind: FileType, d: &mut Dinode) {
    let (unfit, unfit2) = unfit_flags(g, ino, kind, false);
    let mut flags = d.v2.flags.get() & 0x7fff & !unfit;
    let hint = d.v2.extsize.get();
    let has = flags & (DIFLAG_EXTSIZE | DIFLAG_EXTSZINHERIT) != 0;
    if !has || hint == 0 || hint > g.agblocks / 2 {
        flags &= !(DIFLAG_EXTSIZE | DIFLAG_EXTSZINHERIT);
        d.v2.extsize.set(0);
    }
    d.v2.flags.set(flags);
    let mut flags2 = d.flags2.get() & known_flags2() & !unfit2;
    let cow = d.cowextsize.get();
    if flags2 & DIFLAG2_COWEXTSIZE == 0 || cow == 0 || cow > g.agblocks / 2 {
        flags2 &= !DIFLAG2_COWEXTSIZE;
        d.cowextsize.set(0);
    }
    if flags2 & DIFLAG2_NREXT64 != 0 {
        d.v2.anextents.set(0);
    } else {
        d.v2.big_nextents.set(0);
    }
    d.flags2.set(flags2);
    d.v2.next_unlinked.set(NULLAGINO);
    d.v2.onlink.set(0);
    d.lsn.set(0);
    if kind.is_special() {
        d.v2.size.set(0);
    }
}

fn times(d: &mut Dinode) {
    if d.flags2.get() & DIFLAG2_BIGTIME != 0 {
        return;
    }
    let v2 = &mut d.v2;
    for t in [&mut v2.atime, &mut v2.mtime, &mut v2.ctime, &mut d.crtime] {
        if t.get() as u32 >= 1_000_000_000 {
            t.set(t.get() & !0xffff_ffff);
        }
    }
}

/// Extents at the beginning of a fork's bytes that make sense: the sum of their blocks after each.
fn plausible(g: &Geometry, bytes: &[u8]) -> Vec<u64> {
    let mut sums = vec![0];
    let (mut next, mut sum) = (0, 0);
    let n = bytes.len() / ExtentRecord::SIZE;
    for r in ExtentRecord::slice_at(bytes, 0, n).unwrap_or_default() {
        let e = r.unpack();
        if e.startoff < next || g.fsb_run(e.startblock, e.blockcount).is_none() {
            break;
        }
        next = e.end();
        sum += u64::from(e.blockcount);
        sums.push(sum);
    }
    sums
}

/// Corrects the forks' places, formats and counts. Gives the reason if that is impossible.
fn forks(m: &mut Mend<'_>, ino: u64, kind: FileType, raw: &mut [u8]) -> Option<&'static str> {
    let g = m.g.clone();
    let Ok(d) = Dinode::at(raw, 0) else {
        return Some("it cannot be read");
    };
    let mut d = *d;
    let size = raw.len();
    let special = kind.is_special();
    if special {
        d.v2.format = FORMAT_DEV;
        // Attributes follow the eight bytes of the device's number.
        let attrs = AttrSfHeader::at(raw, DINODE_V3_SIZE + 8);
        if d.v2.forkoff > 1 {
            let there = attrs.is_ok_and(|h| h.count > 0 && usize::from(h.totsize.get()) < size);
            d.v2.forkoff = u8::from(there && d.v2.aformat == FORMAT_LOCAL);
        }
    }
    let at = DINODE_V3_SIZE + usize::from(d.v2.forkoff) * 8;
    let known = matches!(d.v2.aformat, FORMAT_LOCAL | FORMAT_EXTENTS | FORMAT_BTREE);
    let big = d.flags2.get() & DIFLAG2_NREXT64 != 0;
    if at >= size || !known {
        d.v2.forkoff = 0;
    }
    // The place of the attributes may be what is wrong: the extents must fit before it.
    let (n, _) = d.extent_counts();
    let whole = plausible(&g, &raw[DINODE_V3_SIZE..]);
    let fits = |d: &Dinode| (attr_at(d.v2.forkoff, size) - DINODE_V3_SIZE) / ExtentRecord::SIZE;
    if d.v2.format == FORMAT_EXTENTS
        && n as usize > fits(&d)
        && whole
            .get(n as usize)
            .is_some_and(|s| *s == d.v2.nblocks.get())
    {
        d.v2.forkoff = 0;
    }
    if d.v2.format == FORMAT_BTREE {
        fit_root(m, ino, &mut d, raw);
    }
    let allowed: &[u8] = match kind {
        FileType::Regular => &[FORMAT_EXTENTS, FORMAT_BTREE],
        _ if special => &[FORMAT_DEV],
        _ => &[FORMAT_LOCAL, FORMAT_EXTENTS, FORMAT_BTREE],
    };
    let data_len = attr_at(d.v2.forkoff, size) - DINODE_V3_SIZE;
    let negative = i64::try_from(d.v2.size.get()).is_err();
    if negative && kind != FileType::Regular {
        d.v2.size.set(match kind {
            FileType::Directory => 0,
            _ => return Some("its size makes no sense"),
        });
    }
    let local_fits = d.v2.size.get() <= data_len as u64;
    if d.v2.format == FORMAT_LOCAL && !local_fits && kind == FileType::Directory {
        d.v2.size.set(data_len as u64);
    } else if !allowed.contains(&d.v2.format) || (d.v2.format == FORMAT_LOCAL && !local_fits) {
        // The format that the counts and the size fit.
        let data = &raw[DINODE_V3_SIZE..DINODE_V3_SIZE + data_len];
        let sums = plausible(&g, data);
        let (n, _) = d.extent_counts();
        let extents = n > 0 && sums.get(n as usize).is_some();
        let tree = BmdrBlock::at(data, 0)
            .is_ok_and(|h| (1..6).contains(&h.level.get()) && h.numrecs.get() > 0);
        d.v2.format = match kind {
            _ if extents => FORMAT_EXTENTS,
            FileType::Regular if n == 0 && d.v2.nblocks.get() == 0 => FORMAT_EXTENTS,
            _ if tree && n as usize > data_len / ExtentRecord::SIZE => FORMAT_BTREE,
            FileType::Directory | FileType::Symlink if n == 0 && local_fits => FORMAT_LOCAL,
            _ => return Some("its format makes no sense"),
        };
    }
    if d.v2.forkoff == 0 {
        d.v2.aformat = FORMAT_EXTENTS;
        match big {
            true => d.v2.nextents.set(0),
            false => d.v2.anextents.set(0),
        }
    }
    d.put(raw, 0);
    count_extents(m, &d, raw);
    None
}

/// Sets the place of the attributes so that the root of the data fork's tree is whole before it: where its
/// pointers lie depends on that.
fn fit_root(m: &Mend<'_>, ino: u64, d: &mut Dinode, raw: &[u8]) {
    let size = raw.len();
    let end = |forkoff| attr_at(forkoff, size);
    let last = ((size - DINODE_V3_SIZE) / 8) as u8;
    let fits = |f: &u8| {
        let root = raw.get(DINODE_V3_SIZE..end(*f));
        root.is_some_and(|r| fork::whole_root(m, ino, r).is_some())
    };
    // An empty list of attributes has no fork.
    let attrs = |f: &u8| {
        *f == 0 || d.v2.aformat != FORMAT_LOCAL || {
            let head = AttrSfHeader::at(raw, end(*f));
            head.is_ok_and(|h| h.count > 0 && usize::from(h.totsize.get()) <= size - end(*f))
        }
    };
    let mut places = [d.v2.forkoff, 0].into_iter().chain(1..last);
    if let Some(f) = places.find(|f| fits(f) && attrs(f)) {
        d.v2.forkoff = f;
    }
}

/// Sets the numbers of extents so that all blocks are as many as the inode says, if that can be.
fn count_extents(m: &Mend<'_>, d: &Dinode, raw: &mut [u8]) {
    let g = &m.g;
    let (n, an) = d.extent_counts();
    let end = attr_at(d.v2.forkoff, raw.len());
    if matches!(d.v2.format, FORMAT_LOCAL | FORMAT_DEV) {
        fork::set_extents(raw, Fork::Data, 0);
    }
    if d.v2.forkoff != 0 && d.v2.aformat == FORMAT_LOCAL {
        fork::set_extents(raw, Fork::Attr, 0);
    }
    let data = match d.v2.format {
        FORMAT_EXTENTS => plausible(g, &raw[DINODE_V3_SIZE..end]),
        _ => vec![0],
    };
    let attr = match d.v2.aformat {
        FORMAT_EXTENTS if d.v2.forkoff != 0 => plausible(g, &raw[end..]),
        _ => vec![0],
    };
    if d.v2.format == FORMAT_BTREE || (d.v2.forkoff != 0 && d.v2.aformat == FORMAT_BTREE) {
        // Too many to be in the inode are cut off.
        let fits = ((end - DINODE_V3_SIZE) / ExtentRecord::SIZE) as u64;
        if d.v2.format == FORMAT_EXTENTS && n > fits {
            fork::set_extents(raw, Fork::Data, fits);
        }
        let fits = ((raw.len() - end) / ExtentRecord::SIZE) as u64;
        if d.v2.forkoff != 0 && d.v2.aformat == FORMAT_EXTENTS && an > fits {
            fork::set_extents(raw, Fork::Attr, fits);
        }
        return;
    }
    let total = d.v2.nblocks.get();
    let sum = |i: usize, k: usize| data.get(i).zip(attr.get(k)).map(|(a, b)| a + b);
    let mut best = (n as usize, an as usize);
    // If the counts cover all extents that make sense, the number of blocks is wrong.
    let all = (data.len() - 1, attr.len() - 1) == best;
    if !all && sum(best.0, best.1) != Some(total) {
        let pairs = (0..data.len()).flat_map(|i| (0..attr.len()).map(move |k| (i, k)));
        let near = |p: &(usize, usize)| p.0.abs_diff(n as usize) + p.1.abs_diff(an as usize);
        let found = pairs
            .filter(|(i, k)| sum(*i, *k) == Some(total))
            .min_by_key(near);
        let fits = |from: usize, to: usize| (to - from) / ExtentRecord::SIZE;
        best = found.unwrap_or((
            best.0.min(fits(DINODE_V3_SIZE, end)),
            best.1.min(fits(end, raw.len())),
        ));
    }
    if d.v2.format == FORMAT_EXTENTS {
        fork::set_extents(raw, Fork::Data, best.0 as u64);
    }
    if d.v2.forkoff != 0 && d.v2.aformat == FORMAT_EXTENTS {
        fork::set_extents(raw, Fork::Attr, best.1 as u64);
    }
}

/// The target of a symbolic link, if all its blocks are sound, or have only wrong checksums and together as many
/// bytes as the inode says. Each is given to `visit`, with its byte on the device.
fn target(m: &Mend<'_>, inode: &Inode, visit: &mut dyn FnMut(u64, Vec<u8>)) -> Option<Vec<u8>> {
    let g = &m.g;
    let map = fork::read(m, inode, Fork::Data);
    let mut target = Vec::new();
    let mut sound = true;
    for e in &map.extents {
        let count = u64::from(e.blockcount);
        if target.len() > SYMLINK_MAXLEN || count << g.blocklog > 1 << 17 {
            return None;
        }
        let run = (e.startoff, count);
        let (at, bytes, part) = map.remote(m, inode.ino, run, SYMLINK_MAGIC, target.len())?;
        let old = m.disk.get(at, bytes.len()).ok()?;
        sound &= check_crc(&old, REMOTE_CRC_OFFSET).is_ok();
        target.extend_from_slice(&bytes[part]);
        visit(at, bytes);
    }
    (sound || target.len() as u64 == inode.size).then_some(target)
}

/// The length of a symbolic link's target, as its blocks say.
pub(crate) fn link_size(m: &Mend<'_>, inode: &Inode) -> Option<u64> {
    let len = target(m, inode, &mut |_, _| {})?.len();
    // A shorter target would be in the inode.
    let room = inode.fork_bytes(Fork::Data).len();
    (len > room && len <= SYMLINK_MAXLEN).then_some(len as u64)
}

/// Whether a symbolic link's target can be read.
pub(crate) fn is_link(m: &Mend<'_>, inode: &Inode) -> bool {
    let len = inode.size as usize;
    if len == 0 || len > SYMLINK_MAXLEN {
        return false;
    }
    if inode.fork_format(Fork::Data) == Some(FORMAT_LOCAL) {
        return !inode.local_data().contains(&0);
    }
    let target = target(m, inode, &mut |_, _| {}).unwrap_or_default();
    target.len() == len && !target.contains(&0)
}

/// Writes the blocks of a symbolic link's target with right checksums and without log sequence numbers.
pub(crate) fn link_blocks(m: &Mend<'_>, inode: &Inode) {
    target(m, inode, &mut |at, mut bytes| {
        Be64::new(0).put(&mut bytes, REMOTE_LSN_OFFSET);
        m.put_block(at >> 9, &bytes, REMOTE_CRC_OFFSET);
    });
}
