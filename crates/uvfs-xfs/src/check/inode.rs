//! Inodes: cores and forks. [`Inode::parse`] tests what an inode needs to be decoded, `core` the other fields.

mod fork;
mod scan;

use super::ctx::{DirectoryFacts, KIND_BAD};
use super::runs::read_run;
use super::{Ctx, Place, Reader, Structure, attr, dir, quota};
use crate::format::*;
use crate::read::inode::{FLAGS2, Fork, Inode, SPECIAL_FLAGS, known_flags2, unfit_flags};
use fork::ForkWalk;
pub(crate) use scan::scan;

/// Reads of inodes in flight or waiting to be checked.
const READS_AHEAD: usize = 96;
/// The reads at the front of these whose inodes' blocks are read ahead, too.
const SURVEYED: usize = 48;
/// Blocks of one fork that are read ahead; more are when they are gone through.
const FORK_AHEAD: u32 = 16;

fn place(ino: u64) -> Place {
    Place::inode(Structure::Inode, ino)
}

pub(crate) fn free_inode(ctx: &Ctx<'_>, ino: u64, raw: &[u8]) {
    let (place, report) = (place(ino), ctx.report);
    let checked = check_dinode(raw, &ctx.g.ident(0, Some(ino)));
    let Some(d) = report.sound(place, checked) else {
        return;
    };
    ctx.lsn(place, raw, 112);
    if d.mode.get() != 0 {
        let found = format!("{:#o}", d.mode.get());
        report.differ(place, "free in the inobt, but di_mode", 0, found);
    }
    let next = d.next_unlinked.get();
    if next != NULLAGINO {
        report.differ(place, "di_next_unlinked of a free inode", "none", next);
    }
    if let Ok(v3) = Dinode::at(raw, 0)
        && ctx.g.features.crc
    {
        flags2(ctx, place, v3.flags2.get());
    }
}

fn flags2(ctx: &Ctx<'_>, place: Place, flags2: u64) {
    if flags2 & !known_flags2() != 0 {
        let found = format!("{flags2:#x}");
        ctx.report
            .differ(place, "di_flags2", "no unknown bits", found);
    }
}

/// Checks an inode in use; gives its kind and link count.
pub(crate) fn used_inode(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    ino: u64,
    raw: &[u8],
    out: &mut DirectoryFacts,
) -> (u32, u32) {
    let (g, report) = (ctx.g, ctx.report);
    let parsed = Inode::parse(ino, raw, g);
    let (Ok(inode), Ok(d)) = (&parsed, DinodeV2::at(raw, 0)) else {
        report.incomplete();
        match parsed {
            Err(crate::Error::Corrupt { fault, .. }) => report.bad(place(ino), fault),
            // The other inode that parse refuses is one without a mode.
            _ => report.bad(place(ino), "in use in the inobt, but di_mode is 0"),
        }
        return (KIND_BAD, 0);
    };
    ctx.lsn(place(ino), raw, 112);
    core(ctx, inode, d, raw);
    let kind = inode.file_type();
    let special = g.quota_inodes.contains(&Some(ino));
    let mut total = 0;
    for fork in [Fork::Data, Fork::Attr] {
        let Some(format) = inode.fork_format(fork) else {
            continue;
        };
        let keep = fork == Fork::Attr || kind != FileType::Regular || special;
        let mut walk = ForkWalk {
            ctx,
            inode,
            fork,
            kind,
            next: 0,
            records: 0,
            blocks: 0,
            keep: keep.then(Vec::new),
            whole: true,
            realtime: fork == Fork::Data && inode.flags & DIFLAG_REALTIME != 0,
        };
        walk.run(rd, format);
        total += walk.blocks;
        let want = inode.extents(fork);
        let (whole, extents) = (walk.whole, walk.keep.take().unwrap_or_default());
        let has_extents = matches!(format, FORMAT_EXTENTS | FORMAT_BTREE);
        let found = if has_extents { walk.records } else { 0 };
        if whole && want != found {
            let name = match fork {
                Fork::Data => "di_nextents",
                Fork::Attr => "di_anextents",
            };
            report.differ(place(ino), name, found, want);
        }
        if !whole {
            report.incomplete();
            total = u64::MAX;
            if fork == Fork::Data && kind == FileType::Directory {
                continue;
            }
        }
        match (fork, kind) {
            (Fork::Data, FileType::Directory) => dir::check(ctx, rd, inode, &extents, out),
            (Fork::Data, FileType::Symlink) => symlink(ctx, rd, inode, &extents),
            (Fork::Data, _) if special => quota::records(ctx, rd, inode, &extents),
            (Fork::Data, _) => {}
            (Fork::Attr, _) => attr::check(ctx, rd, inode, &extents),
        }
        if total == u64::MAX {
            break;
        }
    }
    if total != u64::MAX && total != inode.nblocks {
        report.differ(place(ino), "di_nblocks", total, inode.nblocks);
    }
    if let Some(u) = &ctx.counted.usage
        && !g.is_own(ino)
    {
        u.lock().expect("no holder panics").add(inode, ctx.undo);
    }
    (kind as u32, inode.nlink)
}

/// Tests the fields of the core that [`Inode::parse`], and so the reader, does not test.
fn core(ctx: &Ctx<'_>, i: &Inode, d: &DinodeV2, raw: &[u8]) {
    let (g, report) = (ctx.g, ctx.report);
    let f = &g.features;
    let place = place(i.ino);
    let kind = i.file_type();
    let dir = kind == FileType::Directory;
    let flag = |bit: u16| i.flags & bit != 0;
    let hex = |v: u64| format!("{v:#x}");
    if flag(0x8000) {
        report.differ(place, "di_flags", "no unknown bits", hex(i.flags.into()));
    }
    let realtime = flag(DIFLAG_REALTIME);
    let (unfit, unfit2) = unfit_flags(g, i.ino, kind, realtime);
    for (_, name) in SPECIAL_FLAGS.iter().filter(|f| flag(f.0 & unfit)) {
        report.bad(place, format!("di_flags: {name} does not fit this inode"));
    }
    let hint = d.extsize.get();
    let has_hint = flag(DIFLAG_EXTSIZE) || flag(DIFLAG_EXTSZINHERIT);
    if has_hint != (hint != 0) || (!realtime && hint > g.agblocks / 2) {
        let expected = if has_hint { "a size" } else { "0" };
        report.differ(place, "di_extsize", expected, hint);
    }
    let next = d.next_unlinked.get();
    if next != NULLAGINO && ctx.fact(i.ino).is_some_and(|f| !f.unlinked) {
        report.differ(place, "di_next_unlinked", "none", next);
    }
    if !f.projid32 && d.version != 1 {
        report.same(place, "di_projid_hi", 0, d.projid_hi.get());
    }
    // The link count of version 1.
    if d.version > 1 {
        report.same(place, "di_onlink", 0, d.onlink.get());
    }
    if dir && d.format != FORMAT_LOCAL && i.size <= i.fork_bytes(Fork::Data).len() as u64 {
        report.differ(place, "di_format of a directory that fits", 1, d.format);
    }
    if d.format == FORMAT_DEV && d.forkoff > 1 {
        report.differ(place, "di_forkoff of a special file", "0 or 1", d.forkoff);
    }
    if d.forkoff == 0 {
        if d.aformat != FORMAT_EXTENTS {
            report.differ(place, "di_aformat without attributes", 2, d.aformat);
        }
        report.same(place, "di_anextents", 0, i.anextents);
    }
    if kind.is_special() {
        report.same(place, "di_size of a special file", 0, i.size);
    }
    if i.flags2 & DIFLAG2_BIGTIME == 0 {
        let times = [
            ("di_atime", Some(i.atime)),
            ("di_mtime", Some(i.mtime)),
            ("di_ctime", Some(i.ctime)),
            ("di_crtime", i.crtime),
        ];
        for (name, t) in times {
            let nsec = t.map_or(0, |t| t.nsec);
            if nsec >= 1_000_000_000 {
                report.differ(place, format!("{name}: nanoseconds"), "below 10^9", nsec);
            }
        }
    }
    if let Ok(v3) = Dinode::at(raw, 0)
        && f.crc
    {
        for (_, name) in FLAGS2.iter().filter(|f| i.flags2 & f.0 & unfit2 != 0) {
            report.bad(place, format!("di_flags2: {name} does not fit this inode"));
        }
        core_v3(ctx, i, d, v3);
    }
}

/// Checks the part of a core that only version 3 has.
fn core_v3(ctx: &Ctx<'_>, i: &Inode, d: &DinodeV2, v3: &Dinode) {
    let (g, report) = (ctx.g, ctx.report);
    let place = place(i.ino);
    flags2(ctx, place, i.flags2);
    let cow = v3.cowextsize.get();
    let has_cow = i.flags2 & DIFLAG2_COWEXTSIZE != 0;
    if (cow != 0 && !has_cow) || (has_cow && (cow == 0 || cow > g.agblocks / 2)) {
        let expected = if has_cow { "a size" } else { "0" };
        report.differ(place, "di_cowextsize", expected, cow);
    }
    match i.flags2 & DIFLAG2_NREXT64 {
        0 => report.same(place, "di_v3_pad", 0, d.big_nextents.get()),
        _ => report.same(place, "di_nrext64_pad", 0, d.anextents.get()),
    }
}

fn symlink(ctx: &Ctx<'_>, rd: &mut Reader<'_>, inode: &Inode, extents: &[Extent]) {
    let (g, report) = (ctx.g, ctx.report);
    let place = Place::inode(Structure::SymbolicLink, inode.ino);
    // The kernel takes up to 1023 bytes, the format has room for 1024.
    if inode.size == 0 || inode.size > SYMLINK_MAXLEN as u64 {
        report.differ(place, "di_size", "from 1 to 1024", inode.size);
        return;
    }
    let len = inode.size as usize;
    if inode.fork_format(Fork::Data) == Some(FORMAT_LOCAL) {
        if inode.local_data().contains(&0) {
            report.bad(place, "a zero byte in the target");
        }
        return;
    }
    // A target in blocks may fit in the inode: the kernel leaves it there when the attributes that had moved it go.
    let mut done = 0;
    for (i, e) in extents.iter().enumerate() {
        if done >= len {
            report.bad(place, format!("extent {i} is beyond the target"));
            return;
        }
        let count = u64::from(e.blockcount);
        if count << g.blocklog > 1 << 17 {
            report.differ(place, "blocks", "as many as a target needs", count);
            return;
        }
        let Some((bytes, a)) = read_run(ctx, rd, place, extents, e.startoff, count) else {
            return;
        };
        let ident = g.ident(g.daddr(a), Some(inode.ino));
        let at = place.at(a.agno, a.agbno);
        ctx.lsn(at, &bytes, REMOTE_LSN_OFFSET);
        let checked = check_remote(&bytes, SYMLINK_MAGIC, done as u32, &ident);
        let Some(part) = report.sound(at, checked) else {
            return;
        };
        if g.features.crc && part.len() > len - done {
            // The kernel takes no block that has more of the target than is left of it.
            report.differ(place, "bytes of the target", len, done + part.len());
            return;
        }
        let part = &part[..part.len().min(len - done)];
        if part.contains(&0) {
            report.bad(place, "a zero byte in the target");
        }
        done += part.len();
        if part.is_empty() {
            break;
        }
    }
    if done < len {
        report.differ(place, "bytes of the target", len, done);
    }
}
