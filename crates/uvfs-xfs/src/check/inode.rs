//! Inodes: cores and forks.

use super::ag::CHILDREN_AHEAD;
use super::ctx::{Chunk, Ctx, KIND_BAD, Pair, Tree};
use super::reader::{Bytes, MAX_READ, Reader};
use super::report::Place;
use super::space::Use;
use super::{attr, dir, quota};
use crate::format::*;
use crate::geometry::AgBlock;
use crate::inode::{Fork, Inode};
use std::collections::{HashSet, VecDeque};
use std::ops::Range;

/// Reads of inodes in flight or waiting to be checked.
const READS_AHEAD: usize = 96;
/// Of these, how many are looked through for what their inodes lead to.
const SURVEYED: usize = 48;
/// Blocks of one fork that are read ahead; more are when they are gone through.
const FORK_AHEAD: u32 = 16;
/// Extents of a fork that are kept; no directory or attribute fork comes near.
const MAX_EXTENTS: usize = 1 << 20;

/// What one thread gathers from the inodes that it looks at.
#[derive(Default)]
pub(crate) struct Gathered {
    pub dotdot: Vec<Pair>,
    pub parent: Vec<Pair>,
}

impl Gathered {
    pub fn merge(&mut self, tree: &mut Tree) {
        tree.dotdot.append(&mut self.dotdot);
        tree.parent.append(&mut self.parent);
    }
}

/// Some chunks of an allocation group that are read at once.
struct Run {
    agno: u32,
    /// Index of the first chunk.
    first: usize,
    chunks: usize,
    /// Byte on the device.
    offset: u64,
    len: usize,
    /// What was asked for ahead for it.
    pieces: Vec<u64>,
}

fn chunk_bytes(ctx: &Ctx<'_>) -> u64 {
    u64::from(INODES_PER_CHUNK) << ctx.g.inodelog
}

/// Cuts the next run off the front of a range of chunks.
fn cut(ctx: &Ctx<'_>, gap: u64, agno: u32, range: &mut Range<usize>) -> Option<Run> {
    let g = ctx.g;
    let chunks = ctx.ags[agno as usize].chunks.get()?;
    let offset = |i: usize| u64::from(chunks[i].start) << g.inodelog;
    let first = range.clone().next()?;
    let bytes = chunk_bytes(ctx);
    let mut n = 1;
    while first + n < range.end {
        let between = offset(first + n) - (offset(first + n - 1) + bytes);
        if between > gap || offset(first + n) + bytes - offset(first) > MAX_READ {
            break;
        }
        n += 1;
    }
    range.start += n;
    // A sparse chunk may reach beyond the end of the group.
    let ag_bytes = u64::from(g.ag_blocks(agno)) << g.blocklog;
    let end = (offset(first + n - 1) + bytes).min(ag_bytes);
    Some(Run {
        agno,
        first,
        chunks: n,
        offset: (g.daddr(AgBlock { agno, agbno: 0 }) << 9) + offset(first),
        len: end.saturating_sub(offset(first)) as usize,
        pieces: Vec::new(),
    })
}

/// Checks the inodes of all the chunks that `next` gives: (allocation group, range of chunks).
///
/// Reads of inodes are started well ahead. When one has arrived, what its directories, attributes
/// and trees lead to is read ahead, too, so that little is left to wait for when it is checked.
pub(crate) fn scan(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    next: &mut dyn FnMut() -> Option<(u32, Range<usize>)>,
) {
    let mut out = Gathered::default();
    let gap = rd.gap();
    let mut item: Option<(u32, Range<usize>)> = None;
    let mut cut_next = || loop {
        if let Some((agno, range)) = &mut item
            && let Some(run) = cut(ctx, gap, *agno, range)
        {
            return Some(run);
        }
        item = Some(next()?);
    };
    let mut queue: VecDeque<Run> = VecDeque::with_capacity(READS_AHEAD);
    let mut surveyed = 0;
    let mut more = true;
    loop {
        while more && queue.len() < READS_AHEAD && (queue.is_empty() || rd.has_room()) {
            let Some(mut run) = cut_next() else {
                more = false;
                break;
            };
            let mark = rd.mark();
            rd.want(run.offset, run.len as u64);
            rd.go();
            run.pieces = rd.since(mark);
            queue.push_back(run);
        }
        // Not those at the end of the queue: they have only just been sent.
        while surveyed < queue.len().div_ceil(2).min(SURVEYED) {
            let run = &mut queue[surveyed];
            surveyed += 1;
            if run.pieces.is_empty() {
                continue;
            }
            if let Ok(bytes) = rd.bytes(run.offset, run.len) {
                let mark = rd.mark();
                survey(ctx, rd, run, &bytes);
                rd.go();
                run.pieces.append(&mut rd.since(mark));
            }
        }
        rd.send();
        let Some(run) = queue.pop_front() else { break };
        surveyed = surveyed.saturating_sub(1);
        scan_run(ctx, rd, &run, &mut out);
        for p in run.pieces {
            rd.forget(p);
        }
    }
    out.merge(&mut ctx.tree.lock().expect("no holder panics"));
}

/// The inodes of a run that are there: (chunk, index in the chunk, where in the run).
fn inodes_of<'c>(
    ctx: &'c Ctx<'_>,
    run: &'c Run,
) -> impl Iterator<Item = (usize, &'c Chunk, u32, usize)> {
    let g = ctx.g;
    let chunks = ctx.ags[run.agno as usize]
        .chunks
        .get()
        .map_or(&[][..], |c| &c[..]);
    let range = run.first..run.first + run.chunks;
    let start = chunks.get(run.first).map_or(0, |c| c.start);
    range.flat_map(move |k| {
        let chunk = &chunks[k];
        let at = ((chunk.start - start) as usize) << g.inodelog;
        (0..INODES_PER_CHUNK)
            .filter(|slot| chunk.holemask >> (slot / INODES_PER_HOLEMASK_BIT) & 1 == 0)
            .map(move |slot| (k, chunk, slot, at + ((slot as usize) << g.inodelog)))
    })
}

/// Says what the inodes of a run lead to. Nothing here is believed: what makes no sense is found
/// when the inode is checked.
fn survey(ctx: &Ctx<'_>, rd: &mut Reader<'_>, run: &Run, bytes: &[u8]) {
    let g = ctx.g;
    let Some(frees) = ctx.ags[run.agno as usize].free.get() else {
        return;
    };
    let size = g.inode_size as usize;
    for (k, _, slot, from) in inodes_of(ctx, run) {
        if frees[k] >> slot & 1 != 0 {
            continue;
        }
        let Some(raw) = bytes.get(from..from + size) else {
            continue;
        };
        let Ok(d) = DinodeV2::at(raw, 0) else {
            continue;
        };
        let kind = FileType::from_mode(d.mode.get());
        let (data_at, big) = match Dinode::at(raw, 0) {
            Ok(v3) if d.version == 3 => (DINODE_V3_SIZE, v3.flags2.get() & DIFLAG2_NREXT64 != 0),
            _ => (DINODE_V2_SIZE, false),
        };
        let (n, an) = if big {
            (d.big_nextents.get(), d.nextents.get())
        } else {
            (d.nextents.get().into(), d.anextents.get().into())
        };
        let attr_at = match d.forkoff {
            0 => size,
            f => (data_at + usize::from(f) * 8).min(size),
        };
        if kind != FileType::Regular || d.format == FORMAT_BTREE {
            survey_fork(ctx, rd, d.format, n, raw.get(data_at..attr_at));
        }
        if d.forkoff != 0 {
            survey_fork(ctx, rd, d.aformat, an.into(), raw.get(attr_at..));
        }
    }
}

fn survey_fork(ctx: &Ctx<'_>, rd: &mut Reader<'_>, format: u8, n: u64, fork: Option<&[u8]>) {
    let g = ctx.g;
    let Some(fork) = fork else { return };
    match format {
        FORMAT_EXTENTS => {
            let n = n.min((fork.len() / ExtentRecord::SIZE) as u64) as usize;
            let mut left = FORK_AHEAD;
            for r in ExtentRecord::slice_at(fork, 0, n).unwrap_or_default() {
                let e = r.unpack();
                let count = e.blockcount.min(left);
                left -= count;
                if let Some(a) = g.fsb_run(e.startblock, count).filter(|_| count > 0) {
                    rd.want_blocks(g, a.agno, a.agbno, count);
                }
            }
        }
        FORMAT_BTREE => {
            let Ok(head) = BmdrBlock::at(fork, 0) else {
                return;
            };
            let room = (fork.len() - BmdrBlock::SIZE) / 16;
            let n = usize::from(head.numrecs.get()).min(room);
            for p in Be64::slice_at(fork, BmdrBlock::SIZE + room * 8, n).unwrap_or_default() {
                if let Some(a) = g.fsb(p.get()) {
                    rd.want_blocks(g, a.agno, a.agbno, 1);
                }
            }
        }
        _ => {}
    }
}

fn scan_run(ctx: &Ctx<'_>, rd: &mut Reader<'_>, run: &Run, out: &mut Gathered) {
    let (g, agno) = (ctx.g, run.agno);
    let ag = &ctx.ags[agno as usize];
    let (Some(chunks), Some(frees)) = (ag.chunks.get(), ag.free.get()) else {
        return;
    };
    let bytes = match rd.bytes(run.offset, run.len) {
        Ok(b) => b,
        // Find the chunk that cannot be read.
        Err(_) if run.chunks > 1 => {
            let start = chunks[run.first].start;
            for (k, chunk) in chunks.iter().enumerate().skip(run.first).take(run.chunks) {
                let skip = u64::from(chunk.start - start) << g.inodelog;
                let len = (run.len as u64 - skip).min(chunk_bytes(ctx));
                let one = Run {
                    agno,
                    first: k,
                    chunks: 1,
                    offset: run.offset + skip,
                    len: len as usize,
                    pieces: Vec::new(),
                };
                scan_run(ctx, rd, &one, out);
            }
            return;
        }
        Err(e) => {
            let block = chunks[run.first].start >> g.inopblog;
            ctx.io(Place::block("inode chunk", agno, block), &e);
            if let Some(f) = ag.facts.get() {
                for slot in 0..64 {
                    f.set_inode(run.first * 64 + slot, KIND_BAD, 0);
                }
            }
            return;
        }
    };
    let size = g.inode_size as usize;
    let mut done = 0;
    for (k, chunk, slot, from) in inodes_of(ctx, run) {
        done += 1;
        let Some(raw) = bytes.get(from..from + size) else {
            continue;
        };
        let ino = g.ino(agno, chunk.start + slot);
        if frees[k] >> slot & 1 != 0 {
            free_inode(ctx, ino, raw);
        } else {
            let (kind, nlink) = used_inode(ctx, rd, ino, raw, out);
            if let Some(f) = ag.facts.get() {
                f.set_inode(k * 64 + slot as usize, kind, nlink);
            }
        }
    }
    ctx.progress.add_done(done);
}

fn place(ino: u64) -> Place {
    Place::inode("inode", ino)
}

fn free_inode(ctx: &Ctx<'_>, ino: u64, raw: &[u8]) {
    let ident = ctx.g.ident(0, Some(ino));
    match check_dinode(raw, &ident) {
        Err(f) => ctx.report.fault(place(ino), &f),
        Ok(d) => {
            ctx.lsn(place(ino), raw, 112);
            if d.mode.get() != 0 {
                ctx.report.differ(
                    place(ino),
                    "free in the inobt, but di_mode",
                    0,
                    format!("{:#o}", d.mode.get()),
                );
            }
            if d.next_unlinked.get() != NULLAGINO {
                let found = d.next_unlinked.get();
                ctx.report.differ(
                    place(ino),
                    "di_next_unlinked of a free inode",
                    "none",
                    found,
                );
            }
        }
    }
}

/// Checks an inode in use; gives its kind and link count.
fn used_inode(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    ino: u64,
    raw: &[u8],
    out: &mut Gathered,
) -> (u32, u32) {
    let (g, report) = (ctx.g, ctx.report);
    let inode = match Inode::parse(ino, raw, g) {
        Ok(i) => i,
        Err(crate::Error::Corrupt { fault, .. }) => {
            report.incomplete();
            report.fault(place(ino), &fault);
            return (KIND_BAD, 0);
        }
        Err(_) => {
            // What parse refuses otherwise is an inode without a mode.
            report.incomplete();
            report.bad(place(ino), "in use in the inobt, but di_mode is 0");
            return (KIND_BAD, 0);
        }
    };
    let Ok(d) = DinodeV2::at(raw, 0) else {
        return (KIND_BAD, 0);
    };
    ctx.lsn(place(ino), raw, 112);
    core(ctx, &inode, d, raw);
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
            inode: &inode,
            fork,
            kind,
            next: 0,
            records: 0,
            blocks: 0,
            keep: keep.then(Vec::new),
            seen: HashSet::new(),
            last: [None; BTREE_MAXLEVELS as usize],
            whole: true,
            realtime: fork == Fork::Data && inode.flags & DIFLAG_REALTIME != 0,
        };
        walk.run(rd, format);
        total += walk.blocks;
        let want = match fork {
            Fork::Data => inode.nextents,
            Fork::Attr => inode.anextents,
        };
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
            (Fork::Data, FileType::Directory) => dir::check(ctx, rd, &inode, &extents, out),
            (Fork::Data, FileType::Symlink) => symlink(ctx, rd, &inode, &extents),
            (Fork::Data, _) if special => quota::records(ctx, rd, &inode, &extents),
            (Fork::Data, _) => {}
            (Fork::Attr, _) => attr::check(ctx, rd, &inode, &extents),
        }
        if total == u64::MAX {
            break;
        }
    }
    if total != u64::MAX && total != inode.nblocks {
        report.differ(place(ino), "di_nblocks", total, inode.nblocks);
    }
    if let Some(u) = &ctx.usage
        && !special
        && ino != g.rbmino
        && ino != g.rsumino
    {
        u.lock().expect("no holder panics").add(&inode);
    }
    (kind as u32, inode.nlink)
}

/// The fields of the core that [`Inode::parse`] takes as they come.
fn core(ctx: &Ctx<'_>, i: &Inode, d: &DinodeV2, raw: &[u8]) {
    let (g, report) = (ctx.g, ctx.report);
    let f = &g.features;
    let place = place(i.ino);
    let kind = i.file_type();
    let (dir, regular) = (kind == FileType::Directory, kind == FileType::Regular);
    let flag = |bit: u16| i.flags & bit != 0;
    let hex = |v: u64| format!("{v:#x}");
    if flag(0x8000) {
        report.differ(place, "di_flags", "no unknown bits", hex(i.flags.into()));
    }
    let only = |bit: u16, name: &str, fits: bool| {
        if flag(bit) && !fits {
            report.bad(place, format!("di_flags: {name} does not fit this inode"));
        }
    };
    only(DIFLAG_REALTIME, "realtime", regular && g.rblocks != 0);
    only(DIFLAG_NEWRTBM, "newrtbm", i.ino == g.rbmino);
    only(DIFLAG_RTINHERIT, "rtinherit", dir);
    only(DIFLAG_PROJINHERIT, "projinherit", dir);
    only(DIFLAG_NOSYMLINKS, "nosymlinks", dir);
    only(DIFLAG_EXTSZINHERIT, "extszinherit", dir);
    only(DIFLAG_EXTSIZE, "extsize", regular);
    let hint = d.extsize.get();
    let has_hint = flag(DIFLAG_EXTSIZE) || flag(DIFLAG_EXTSZINHERIT);
    if has_hint != (hint != 0) || (!flag(DIFLAG_REALTIME) && hint > g.agblocks / 2) {
        let expected = if has_hint { "a size" } else { "0" };
        report.differ(place, "di_extsize", expected, hint);
    }
    let next = d.next_unlinked.get();
    if next != NULLAGINO && ctx.fact(i.ino).is_some_and(|f| !f.unlinked) {
        report.differ(place, "di_next_unlinked", "none", next);
    }
    if !f.projid32 && d.version != 1 && d.projid_hi.get() != 0 {
        report.differ(place, "di_projid_hi", 0, d.projid_hi.get());
    }
    if d.version == 1 && f.crc {
        report.differ(place, "di_version", 3, d.version);
    }
    if d.format == FORMAT_DEV && d.forkoff > 1 {
        report.differ(place, "di_forkoff of a special file", "0 or 1", d.forkoff);
    }
    if d.forkoff == 0 {
        if d.aformat != FORMAT_EXTENTS {
            report.differ(place, "di_aformat without attributes", 2, d.aformat);
        }
        if i.anextents != 0 {
            report.differ(place, "di_anextents", 0, i.anextents);
        }
    }
    if !matches!(
        kind,
        FileType::Regular | FileType::Directory | FileType::Symlink
    ) && i.size != 0
    {
        report.differ(place, "di_size of a special file", 0, i.size);
    }
    let v3 = if f.crc { Dinode::at(raw, 0).ok() } else { None };
    let bigtime = i.flags2 & DIFLAG2_BIGTIME != 0;
    if !bigtime {
        let mut times = vec![
            ("di_atime", d.atime),
            ("di_mtime", d.mtime),
            ("di_ctime", d.ctime),
        ];
        times.extend(v3.map(|v| ("di_crtime", v.crtime)));
        for (name, t) in times {
            let nsec = t.get() as u32;
            if nsec >= 1_000_000_000 {
                report.differ(place, format!("{name}: nanoseconds"), "below 10^9", nsec);
            }
        }
    }
    let Some(v3) = v3 else { return };
    let flag2 = |bit: u64, name: &str, fits: bool| {
        if i.flags2 & bit != 0 && !fits {
            report.bad(place, format!("di_flags2: {name} does not fit this inode"));
        }
    };
    let known =
        DIFLAG2_DAX | DIFLAG2_REFLINK | DIFLAG2_COWEXTSIZE | DIFLAG2_BIGTIME | DIFLAG2_NREXT64;
    if i.flags2 & !known != 0 {
        report.differ(place, "di_flags2", "no unknown bits", hex(i.flags2));
    }
    flag2(DIFLAG2_DAX, "dax", regular || dir);
    flag2(
        DIFLAG2_REFLINK,
        "reflink",
        f.reflink && regular && !flag(DIFLAG_REALTIME),
    );
    flag2(
        DIFLAG2_COWEXTSIZE,
        "cowextsize",
        f.reflink && (regular || dir) && !flag(DIFLAG_REALTIME),
    );
    flag2(DIFLAG2_BIGTIME, "bigtime", f.bigtime);
    flag2(DIFLAG2_NREXT64, "nrext64", f.nrext64);
    let cow = v3.cowextsize.get();
    let has_cow = i.flags2 & DIFLAG2_COWEXTSIZE != 0;
    if (cow != 0 && !has_cow) || (has_cow && (cow == 0 || cow > g.agblocks / 2)) {
        let expected = if has_cow { "a size" } else { "0" };
        report.differ(place, "di_cowextsize", expected, cow);
    }
    if i.flags2 & DIFLAG2_NREXT64 != 0 && d.anextents.get() != 0 {
        report.differ(place, "di_nrext64_pad", 0, d.anextents.get());
    }
}

/// A fork's extents being walked.
struct ForkWalk<'c, 'a> {
    ctx: &'c Ctx<'a>,
    inode: &'c Inode,
    fork: Fork,
    kind: FileType,
    /// First file block that the next extent may begin at.
    next: u64,
    records: u64,
    /// Blocks of extents and of the tree.
    blocks: u64,
    keep: Option<Vec<Extent>>,
    seen: HashSet<u64>,
    last: [Option<(u64, u64)>; BTREE_MAXLEVELS as usize],
    whole: bool,
    realtime: bool,
}

impl ForkWalk<'_, '_> {
    fn place(&self) -> Place {
        let what = match self.fork {
            Fork::Data => "data fork",
            Fork::Attr => "attribute fork",
        };
        Place::inode(what, self.inode.ino)
    }

    fn run(&mut self, rd: &mut Reader<'_>, format: u8) {
        let root = self.inode.fork_bytes(self.fork);
        match format {
            FORMAT_EXTENTS => {
                let n = match self.fork {
                    Fork::Data => self.inode.nextents,
                    Fork::Attr => self.inode.anextents,
                };
                // Inode::parse has checked that they fit.
                let recs = ExtentRecord::slice_at(root, 0, n as usize).unwrap_or_default();
                for r in recs {
                    self.extent(r.unpack());
                }
            }
            FORMAT_BTREE => self.btree(rd, root),
            _ => {}
        }
    }

    fn extent(&mut self, e: Extent) {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        let n = self.records;
        self.records += 1;
        let len = u64::from(e.blockcount);
        if e.startoff < self.next {
            report.differ(
                self.place(),
                format!("extent {n} out of order: br_startoff"),
                format!("at least {}", self.next),
                e.startoff,
            );
            self.whole = false;
        }
        // The greatest file offset is 2^63 - 1.
        if e.startoff + len > 1 << (63 - g.blocklog) {
            report.differ(
                self.place(),
                format!("extent {n}: br_startoff"),
                "an offset that a file can have",
                e.startoff,
            );
            self.whole = false;
        }
        self.next = self.next.max(e.startoff + len);
        self.blocks += len;
        if self.realtime {
            if e.startblock >= g.rblocks || len > g.rblocks - e.startblock || len == 0 {
                report.differ(
                    self.place(),
                    format!("extent {n}: br_startblock"),
                    "a run of blocks of the realtime section",
                    e.startblock,
                );
            }
            return;
        }
        let Some(a) = g.fsb_run(e.startblock, e.blockcount) else {
            self.whole = false;
            report.differ(
                self.place(),
                format!("extent {n}: br_startblock, br_blockcount"),
                "a run of blocks inside an allocation group",
                format!("{}, {}", e.startblock, e.blockcount),
            );
            return;
        };
        let data = self.fork == Fork::Data && self.kind == FileType::Regular;
        if e.unwritten && (!data || !g.features.unwritten) {
            report.bad(self.place(), format!("extent {n} is unwritten"));
        }
        let place = self.place();
        let reflink = self.inode.flags2 & DIFLAG2_REFLINK != 0;
        let new = if data { Use::Data } else { Use::Meta };
        ctx.claim(
            place,
            a.agno,
            a.agbno,
            e.blockcount,
            new,
            data && g.features.reflink,
        );
        let mut flags = 0;
        if self.fork == Fork::Attr {
            flags |= RMAP_OFF_ATTR_FORK;
        }
        if e.unwritten {
            flags |= RMAP_OFF_UNWRITTEN;
        }
        let delta = e.startoff.wrapping_sub(a.agbno.into());
        ctx.own(a.agno, a.agbno, e.blockcount, self.inode.ino, flags, delta);
        if data {
            ctx.refer(a.agno, a.agbno, e.blockcount);
            if g.features.reflink
                && !reflink
                && let Some(shared) = ctx.ags[a.agno as usize].shared.get()
            {
                let i = shared.partition_point(|s| s.start + s.len <= a.agbno);
                if shared
                    .get(i)
                    .is_some_and(|s| s.start < a.agbno + e.blockcount)
                {
                    report.bad(
                        place.at(a.agno, shared[i].start.max(a.agbno)),
                        "shared blocks in an inode without the reflink flag",
                    );
                }
            }
        }
        if let Some(keep) = &mut self.keep {
            if keep.len() < MAX_EXTENTS {
                keep.push(e);
            } else {
                self.whole = false;
                report.bad(self.place(), "too many extents");
            }
        }
    }

    fn btree(&mut self, rd: &mut Reader<'_>, root: &[u8]) {
        let (g, report) = (self.ctx.g, self.ctx.report);
        let place = self.place();
        let Ok(head) = BmdrBlock::at(root, 0) else {
            self.whole = false;
            return report.bad(place, "no room for the root of its B-tree");
        };
        let (level, n) = (head.level.get(), usize::from(head.numrecs.get()));
        let room = (root.len() - BmdrBlock::SIZE) / 16;
        if level == 0 || level >= BTREE_MAXLEVELS || n == 0 || n > room {
            self.whole = false;
            return report.differ(
                place,
                "bmdr level, numrecs",
                format!("a level from 1, 1 to {room} records"),
                format!("{level}, {n}"),
            );
        }
        let keys = Be64::slice_at(root, BmdrBlock::SIZE, n).unwrap_or_default();
        let ptrs = Be64::slice_at(root, BmdrBlock::SIZE + room * 8, n).unwrap_or_default();
        for (key, ptr) in keys.iter().zip(ptrs) {
            if let Some(low) = self.node(rd, ptr.get(), level - 1, n == 1)
                && low != key.get()
            {
                report.differ(place, "key of its B-tree's root", low, key.get());
            }
        }
        for (b, right) in self.last.into_iter().flatten() {
            if right != NULLFSBLOCK {
                let a = g.fsb(b).unwrap_or(AgBlock { agno: 0, agbno: 0 });
                let place = Place::inode("bmbt", self.inode.ino).at(a.agno, a.agbno);
                report.differ(place, "bb_rightsib", "none", right);
            }
        }
    }

    /// Gives the first key below.
    fn node(&mut self, rd: &mut Reader<'_>, fsbno: u64, level: u16, alone: bool) -> Option<u64> {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        let Some(a) = g.fsb(fsbno) else {
            self.whole = false;
            report.differ(
                self.place(),
                "pointer in its B-tree",
                "a block of the file system",
                fsbno,
            );
            return None;
        };
        let place = Place::inode("bmbt", self.inode.ino).at(a.agno, a.agbno);
        if !self.seen.insert(fsbno) {
            self.whole = false;
            report.bad(place, "the tree leads to this block twice");
            return None;
        }
        self.blocks += 1;
        ctx.claim(place, a.agno, a.agbno, 1, Use::Meta, false);
        let flags = RMAP_OFF_BMBT_BLOCK
            | match self.fork {
                Fork::Data => 0,
                Fork::Attr => RMAP_OFF_ATTR_FORK,
            };
        ctx.own(a.agno, a.agbno, 1, self.inode.ino, flags, 0);
        let block = match rd.blocks(g, a.agno, a.agbno, 1) {
            Ok(b) => b,
            Err(e) => {
                self.whole = false;
                ctx.io(place, &e);
                return None;
            }
        };
        let ident = g.ident(g.daddr(a), Some(self.inode.ino));
        let head = match check_btree_long(&block, &ident) {
            Ok(h) => *h,
            Err(f) => {
                self.whole = false;
                report.fault(place, &f);
                return None;
            }
        };
        ctx.lsn(place, &block, 32);
        if head.level.get() != level {
            self.whole = false;
            report.differ(place, "bb_level", level, head.level.get());
            return None;
        }
        let n = usize::from(head.numrecs.get());
        let most = Btree::Bmap.max_records(block.len(), g.features.crc, level);
        if n == 0 || (!alone && n < most / 2) {
            report.differ(place, "bb_numrecs", format!("at least {}", most / 2), n);
        }
        let slot = self.last[usize::from(level)];
        let left = slot.map_or(NULLFSBLOCK, |(b, _)| b);
        if head.leftsib.get() != left {
            report.differ(place, "bb_leftsib", left, head.leftsib.get());
        }
        if let Some((_, right)) = slot
            && right != fsbno
        {
            report.differ(place, "right neighbour of the block before", fsbno, right);
        }
        self.last[usize::from(level)] = Some((fsbno, head.rightsib.get()));
        let at = Btree::Bmap.header_len(g.features.crc);
        if level == 0 {
            let recs = ExtentRecord::slice_at(&block, at, n).unwrap_or_default();
            for r in recs {
                self.extent(r.unpack());
            }
            return recs.first().map(|r| r.unpack().startoff);
        }
        let keys = Be64::slice_at(&block, at, n).unwrap_or_default();
        let ptrs_at = Btree::Bmap.ptr_offset(block.len(), g.features.crc, 0);
        let ptrs = Be64::slice_at(&block, ptrs_at, n).unwrap_or_default();
        let mark = rd.mark();
        for (i, (key, ptr)) in keys.iter().zip(ptrs).enumerate() {
            if i % CHILDREN_AHEAD == 0 {
                rd.release(mark);
                for a in ptrs[i..]
                    .iter()
                    .take(CHILDREN_AHEAD)
                    .filter_map(|p| g.fsb(p.get()))
                {
                    rd.want_blocks(g, a.agno, a.agbno, 1);
                }
                rd.go();
            }
            if let Some(low) = self.node(rd, ptr.get(), level - 1, false)
                && low != key.get()
            {
                report.differ(place, format!("key {i}"), low, key.get());
            }
        }
        rd.release(mark);
        keys.first().map(|k| k.get())
    }
}

/// Where a run of file blocks is on disk, as (group, block, blocks): `None` if part of it is a
/// hole.
pub(crate) fn map_run(
    ctx: &Ctx<'_>,
    extents: &[Extent],
    start: u64,
    count: u64,
) -> Option<Vec<(AgBlock, u32)>> {
    let mut out = Vec::new();
    let (mut at, end) = (start, start + count);
    let mut i = extents.partition_point(|e| e.startoff + u64::from(e.blockcount) <= start);
    while at < end {
        let e = extents.get(i).filter(|e| e.startoff <= at)?;
        let skip = at - e.startoff;
        let n = (u64::from(e.blockcount).checked_sub(skip)?).min(end - at);
        let a = ctx.g.fsb_run(e.startblock + skip, n as u32)?;
        out.push((a, n as u32));
        at += n;
        i += 1;
    }
    Some(out)
}

/// Reads a run of file blocks; with its first block's place.
pub(crate) fn read_run(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    place: Place,
    extents: &[Extent],
    start: u64,
    count: u64,
) -> Option<(Bytes, AgBlock)> {
    let Some(runs) = map_run(ctx, extents, start, count) else {
        ctx.report
            .bad(place, format!("file block {start} is a hole"));
        return None;
    };
    let first = runs.first()?.0;
    let mut bytes: Option<Bytes> = None;
    for (a, n) in &runs {
        match rd.blocks(ctx.g, a.agno, a.agbno, *n) {
            Ok(b) => {
                bytes = Some(match bytes.take() {
                    None => b,
                    Some(first) => {
                        let mut all = first.into_vec();
                        all.extend_from_slice(&b);
                        Bytes::Own(all)
                    }
                });
            }
            Err(e) => {
                ctx.io(place.at(a.agno, a.agbno), &e);
                return None;
            }
        }
    }
    Some((bytes?, first))
}

/// Says that a run of file blocks will be needed.
pub(crate) fn want_run(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    extents: &[Extent],
    start: u64,
    count: u64,
) {
    for (a, n) in map_run(ctx, extents, start, count).unwrap_or_default() {
        rd.want_blocks(ctx.g, a.agno, a.agbno, n);
    }
}

fn symlink(ctx: &Ctx<'_>, rd: &mut Reader<'_>, inode: &Inode, extents: &[Extent]) {
    let (g, report) = (ctx.g, ctx.report);
    let place = Place::inode("symbolic link", inode.ino);
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
    if g.features.crc && len <= inode.fork_bytes(Fork::Data).len() {
        report.differ(place, "di_size", "more than fits in the inode", len);
    }
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
        let part = if g.features.crc {
            ctx.lsn(place.at(a.agno, a.agbno), &bytes, REMOTE_LSN_OFFSET);
            match check_remote(&bytes, SYMLINK_MAGIC, done as u32, &ident) {
                Ok(p) => p,
                Err(f) => return report.fault(place.at(a.agno, a.agbno), &f),
            }
        } else {
            &bytes[..]
        };
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
