//! A read-only check of a whole file system.
//!
//! Allocation groups are worked on in parallel. First their headers and trees: free space, sharing
//! and inode chunks are known then. Then all inodes in the order they lie on disk, in large reads;
//! each inode's forks, directory entries and attributes are checked when it comes by, its blocks
//! are marked in a map of two bits a block, and links are counted in eight bytes an inode. Last
//! what only the whole tells: link counts, parents, blocks nobody owns, sharing, owners, counters.
//!
//! Owners and sharing are not kept but summed up (see [`space::Fingerprint`]): what the rmapbt and
//! refcountbt say, less what was seen, must be nothing in each region.
//!
//! With a bound on memory that is too small for all groups at once, the image is gone through
//! several times, each time for the blocks and links of some groups.

mod ag;
mod attr;
mod ctx;
mod da;
mod device;
mod dir;
mod inode;
mod links;
mod paths;
mod quota;
mod reader;
mod report;
mod space;
mod superblock;

use crate::blocks::Blocks;
use crate::error::{Error, Result};
use crate::format::*;
use crate::geometry::Geometry;
use crate::log::{self, LogState};
use ctx::{Ag, Ctx, Facts, Tree};
use reader::{MAX_AHEAD, MIN_AHEAD, Reader};
use report::{Place, Report};
use space::{BlockMap, Fingerprint, Use};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

pub use device::DeviceBlocks;
pub use report::Finding;

/// Chunks of inodes that are one piece of work.
const CHUNKS_PER_ITEM: usize = 256;
/// Bytes that each thread may use beside what it reads ahead: one directory or fork.
const THREAD_BYTES: u64 = 1 << 20;
/// A device that takes no longer for a small read is good at many of them at once: nothing is gained
/// by reading what lies between.
const FAST_READ: Duration = Duration::from_micros(300);

/// How metadata is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prefetch {
    /// Few large reads that cover much metadata.
    Large,
    /// Many small reads of just what is needed.
    Exact,
    /// Whichever suits the device: a few small reads are timed first.
    #[default]
    Auto,
}

/// How to check.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Threads; 0 is one for each CPU, or two where reading waits for the device.
    pub threads: usize,
    /// How metadata is read.
    pub prefetch: Prefetch,
    /// Most bytes to use for what is known of blocks and inodes; `None` is no bound. What cannot
    /// be split (one allocation group, the tree of directories) may exceed it.
    pub memory: Option<u64>,
}

/// How far a check has come, for whoever watches.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Inodes looked at, and how many there are as far as is known.
    pub fn get(&self) -> (u64, u64) {
        (
            self.done.load(Ordering::Relaxed),
            self.total.load(Ordering::Relaxed),
        )
    }

    pub(crate) fn add_done(&self, n: u64) {
        self.done.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn add_total(&self, n: u64) {
        self.total.fetch_add(n, Ordering::Relaxed);
    }
}

/// The result of a check.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// What is wrong: at most 10,000 in full.
    pub findings: Vec<Finding>,
    /// How many findings there were.
    pub count: u64,
    /// The log's state. If it is dirty, findings may come from what it still holds.
    pub log: LogState,
    /// A structure could not be followed to its end; what only follows from having seen
    /// everything (lost blocks, link counts, owners) was not looked at.
    pub incomplete: bool,
    /// Inodes looked at.
    pub inodes: u64,
    /// Times that the image was gone through.
    pub passes: usize,
    /// How metadata was read: [`Prefetch::Large`] or [`Prefetch::Exact`].
    pub prefetch: Prefetch,
}

/// Checks the file system in `blocks`.
///
/// Fails with [`Error::NotXfs`] if there is no trace of XFS, [`Error::Unsupported`] for features
/// that cannot be checked, [`Error::Io`] if the start of the image cannot be read. Damage is never
/// an error but a finding.
pub fn check(blocks: Arc<dyn Blocks>, options: &Options, progress: &Progress) -> Result<Outcome> {
    let report = Report::default();
    let (sb, mut g) = superblock::find(&*blocks, &report)?;
    let log = log::state(&blocks, &g);
    let head_lsn = log.is_clean().then(|| log::head_lsn(&blocks, &g)).flatten();
    if let LogState::Unreadable(why) = &log {
        report.bad(Place::fs("log"), format!("cannot tell its state: {why}"));
    }
    superblock::fields(&sb, &g, &report);
    fit(&mut g, blocks.size(), &report);
    let threads = match options.threads {
        0 => {
            let cpus = std::thread::available_parallelism().map_or(2, |n| n.get());
            if blocks.waits() { cpus * 2 } else { cpus }
        }
        n => n,
    };
    let large = match options.prefetch {
        Prefetch::Large => true,
        Prefetch::Exact => false,
        Prefetch::Auto => suits_large(&*blocks),
    };
    // A quarter of the memory, if it is bounded.
    let ahead = options.memory.map_or(256 << 20, |m| (m / 4) as usize) / threads;
    let ahead = ahead.clamp(MIN_AHEAD, MAX_AHEAD);
    let ranges = passes(&g, &*blocks, options.memory, threads, ahead);
    let mut inodes = 0;
    for (i, range) in ranges.iter().enumerate() {
        let ctx = context(
            &g,
            &sb,
            &*blocks,
            &report,
            progress,
            range.clone(),
            large,
            ahead,
            &log,
            head_lsn,
            i == 0,
        );
        inodes = pass(&ctx, threads);
        if i == 0 {
            finish_whole(&ctx);
        }
        drop(ctx);
    }
    let incomplete = report.is_incomplete();
    let (mut findings, count) = report.take();
    paths::name(&blocks, &mut findings);
    Ok(Outcome {
        findings,
        count,
        log,
        incomplete,
        inodes,
        passes: ranges.len(),
        prefetch: if large {
            Prefetch::Large
        } else {
            Prefetch::Exact
        },
    })
}

/// Leaves out allocation groups that begin beyond the end of the image.
fn fit(g: &mut Geometry, size: u64, report: &Report) {
    if size >= g.data_bytes() {
        return;
    }
    report.differ(
        Place::fs("image"),
        "bytes",
        format!("at least {}", g.data_bytes()),
        size,
    );
    report.incomplete();
    let ag_bytes = u64::from(g.agblocks) << g.blocklog;
    let count = size.div_ceil(ag_bytes).clamp(1, g.agcount.into()) as u32;
    if count < g.agcount {
        g.agcount = count;
        g.dblocks = u64::from(count) * u64::from(g.agblocks);
    }
}

/// Times a few small reads, spread over the device: large ones pay where each has to be waited for
/// long, as of disks and remote devices.
fn suits_large(blocks: &dyn Blocks) -> bool {
    let size = blocks.size();
    let mut buf = vec![0; 4096];
    let mut times: Vec<Duration> = (1..8u64)
        .filter_map(|i| {
            let at = (size / 8).checked_mul(i)? / 4096 * 4096;
            let start = Instant::now();
            blocks.read_data(at, &mut buf).ok()?;
            Some(start.elapsed())
        })
        .collect();
    times.sort_unstable();
    times.get(times.len() / 2).is_some_and(|t| *t > FAST_READ)
}

/// The allocation groups of each pass.
fn passes(
    g: &Geometry,
    blocks: &dyn Blocks,
    memory: Option<u64>,
    threads: usize,
    ahead: usize,
) -> Vec<Range<u32>> {
    let all = 0..g.agcount;
    let Some(memory) = memory else {
        return vec![all];
    };
    let room = memory.saturating_sub(threads as u64 * (ahead as u64 + THREAD_BYTES));
    let mut out: Vec<Range<u32>> = Vec::new();
    let mut used = 0u64;
    for agno in all {
        let mut head = vec![0; g.sector_size as usize];
        let at = g.ag_header_daddr(agno, AGI_SECTOR) << 9;
        let most = u64::from(g.ag_blocks(agno)) << g.inopblog;
        let inodes = match blocks.read_data(at, &mut head) {
            Ok(()) => Agi::at(&head, 0).map_or(0, |a| a.count.get().into()),
            Err(_) => 0,
        };
        let need = inodes.min(most) * 8 + BlockMap::max_bytes(g.ag_blocks(agno).into()) + 8192;
        match out.last_mut() {
            Some(r) if used + need <= room => {
                r.end = agno + 1;
                used += need;
            }
            _ => {
                out.push(agno..agno + 1);
                used = need;
            }
        }
    }
    out
}

#[allow(clippy::too_many_arguments)]
fn context<'a>(
    g: &'a Geometry,
    sb: &'a Superblock,
    blocks: &'a dyn Blocks,
    report: &'a Report,
    progress: &'a Progress,
    range: Range<u32>,
    large: bool,
    ahead: usize,
    log: &LogState,
    head_lsn: Option<u64>,
    first: bool,
) -> Ctx<'a> {
    let ags = (0..g.agcount)
        .map(|agno| {
            let n = g.ag_blocks(agno);
            let here = range.contains(&agno);
            Ag {
                map: here.then(|| Mutex::new(BlockMap::new(n))),
                owners: (here && g.features.rmapbt).then(|| Fingerprint::new(n)),
                refs: (here && g.features.reflink).then(|| Fingerprint::new(n)),
                chunks: OnceLock::new(),
                free: OnceLock::new(),
                facts: OnceLock::new(),
                shared: OnceLock::new(),
                unlinked: OnceLock::new(),
                sums: OnceLock::new(),
                inodes_known: AtomicBool::new(true),
            }
        })
        .collect();
    Ctx {
        g,
        sb,
        blocks,
        report,
        progress,
        ags,
        range,
        bases: OnceLock::new(),
        tree: Mutex::new(Tree::default()),
        large,
        ahead,
        log_clean: log.is_clean(),
        head_lsn,
        usage: (first && quota::counted(sb)).then(|| Mutex::new(quota::Usage::default())),
    }
}

/// Runs `work` on `count` items, each once, on `threads` threads.
fn parallel(
    ctx: &Ctx<'_>,
    threads: usize,
    count: usize,
    work: &(dyn Fn(&mut Reader<'_>, usize) + Sync),
) {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut rd = Reader::new(ctx);
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                break;
            }
            work(&mut rd, i);
        }
    };
    std::thread::scope(|s| {
        for _ in 1..threads.min(count) {
            s.spawn(run);
        }
        run();
    });
}

/// Goes through the image once; gives the number of inodes.
fn pass(ctx: &Ctx<'_>, threads: usize) -> u64 {
    let groups = ctx.g.agcount as usize;
    parallel(ctx, threads, groups, &|rd, i| ag::check(ctx, rd, i as u32));
    let mut bases = Vec::with_capacity(groups);
    let mut items: Vec<(u32, Range<usize>)> = Vec::new();
    let (mut base, mut inodes) = (0u64, 0u64);
    for (agno, ag) in ctx.ags.iter().enumerate() {
        let chunks = ag.chunks.get().map_or(&[][..], |c| &c[..]);
        // Indices of inodes are 32 bits: four thousand million of them would not fit in memory.
        bases.push(u32::try_from(base).unwrap_or(u32::MAX / 64));
        base += chunks.len() as u64;
        inodes += chunks
            .iter()
            .map(|c| u64::from(64 - c.holemask.count_ones() * 4))
            .sum::<u64>();
        if ctx.in_range(agno as u32) {
            let _ = ag.facts.set(Facts::new(chunks.len()));
        }
        for from in (0..chunks.len()).step_by(CHUNKS_PER_ITEM) {
            let to = chunks.len().min(from + CHUNKS_PER_ITEM);
            items.push((agno as u32, from..to));
        }
    }
    if base > u64::from(u32::MAX / 64) {
        ctx.report.incomplete();
    }
    let _ = ctx.bases.set(bases);
    parallel(ctx, threads, groups, &|rd, i| {
        links::unlinked(ctx, rd, i as u32);
    });
    let taken = AtomicUsize::new(0);
    parallel(ctx, threads, threads.min(items.len()), &|rd, _| {
        let mut next = || items.get(taken.fetch_add(1, Ordering::Relaxed)).cloned();
        inode::scan(ctx, rd, &mut next);
    });
    parallel(ctx, threads, groups, &|_, i| {
        links::counts(ctx, i as u32);
        space(ctx, i as u32);
    });
    inodes
}

/// What is left over when all blocks have been claimed.
fn space(ctx: &Ctx<'_>, agno: u32) {
    let (report, ag) = (ctx.report, &ctx.ags[agno as usize]);
    let Some(map) = ag.map.as_ref().filter(|_| !report.is_incomplete()) else {
        return;
    };
    let map = map.lock().expect("no holder panics");
    map.runs(Use::Unknown, &mut |start, len| {
        report.bad(
            Place::block("free space", agno, start),
            format!("{len} blocks from here are neither free nor in use"),
        );
    });
    if let Some(refs) = &ag.refs {
        // Each reference less those recorded; blocks that are in use but not recorded have one.
        let shared = ag.shared.get().map_or(&[][..], |s| &s[..]);
        for s in shared {
            refs.add(s.start, s.len, 1, u64::from(s.count).wrapping_neg());
        }
        let mut i = 0;
        map.runs(Use::Data, &mut |start, len| {
            let end = start + len;
            let mut at = start;
            while i < shared.len() && shared[i].start + shared[i].len <= start {
                i += 1;
            }
            let mut k = i;
            while at < end {
                let (from, to) = match shared.get(k) {
                    Some(s) if s.start < end => (s.start.max(at), s.start + s.len),
                    _ => (end, end),
                };
                refs.add(at, from - at, 1, u64::MAX);
                at = to.min(end).max(from);
                k += 1;
            }
        });
        for (start, len) in refs.differences() {
            report.bad(
                Place::block("refcountbt", agno, start),
                format!("references to the {len} blocks from here are not as recorded"),
            );
        }
    }
    if let Some(owners) = &ag.owners {
        for (start, len) in owners.differences() {
            report.bad(
                Place::block("rmapbt", agno, start),
                format!("owners of the {len} blocks from here are not as recorded"),
            );
        }
    }
}

/// What needs no map of blocks or links: counters, the directory tree, quota.
fn finish_whole(ctx: &Ctx<'_>) {
    links::tree(ctx);
    superblock::quota(ctx);
    superblock::counters(ctx);
    if let Some(u) = &ctx.usage
        && !ctx.report.is_incomplete()
        && ctx.log_clean
    {
        u.lock().expect("no holder panics").compare(ctx);
    }
}

/// Whether this error says that there is nothing to check here, as opposed to damage.
pub(crate) fn is_refusal(e: &Error) -> bool {
    matches!(e, Error::Unsupported(_) | Error::Io { .. })
}
