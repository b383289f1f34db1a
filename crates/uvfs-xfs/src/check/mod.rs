//! A read-only check of a whole file system.
//!
//! Allocation groups are worked on in parallel. First their headers and trees: free space, sharing and inode chunks are
//! known then. Then all inodes in the order they lie on disk, in large reads; each inode's forks, directory entries and
//! attributes are checked when it comes by, its blocks are marked in a map of two bits a block, and links are counted
//! in eight bytes an inode. Last the facts that only the whole tells: link counts, parents, blocks without an owner,
//! sharing, owners, counters.
//!
//! Owners and sharing are not kept but summed up (see [`space::Fingerprint`]): what the rmapbt and
//! refcountbt say, less what was seen, must be nothing in each region.
//!
//! With a bound on memory that is too small for all blocks and inodes at once, the image is gone
//! through several times, each time for some of them (see [`budget`]).

mod ag;
mod attr;
mod budget;
mod ctx;
mod da;
mod device;
mod dir;
mod inode;
mod kept;
mod links;
mod paths;
mod probe;
mod problem;
mod progress;
pub(crate) mod quota;
mod reader;
mod report;
mod runs;
pub(crate) mod space;
pub(crate) mod superblock;
mod tree;
mod usage;

use crate::blocks::Blocks;
use crate::error::{Error, Result};
use crate::format::*;
use crate::geometry::Geometry;
use crate::log::{self, LogState};
use crate::overlay::remembered;
use crate::read::volume::read_superblock;
use budget::{Budget, Window};
use ctx::{AgFacts, Chunk, Counted, Ctx, Facts};
use links::Ups;
pub use progress::CheckProgress;
use reader::Reader;
use space::{BlockMap, Fingerprint};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use usage::{Class, Usage};

pub use budget::least_memory;
pub(crate) use budget::repair_tables;
pub use device::DeviceBlocks;
pub(crate) use kept::{ChangedSince, Kept, TREES};
pub use problem::{Counter, Finding, Place, Problem, Structure};
pub(crate) use report::Late;
use report::Report;
pub use space::Use;

/// Chunks of inodes that are one piece of work.
const CHUNKS_PER_ITEM: usize = 256;
/// How metadata is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prefetch {
    /// Few large reads that cover much metadata.
    Large,
    /// Many small reads of just what is needed.
    Exact,
    /// Whichever suits the device: small reads in flight and large ones are timed first.
    #[default]
    Auto,
}

/// How to check.
#[derive(Debug, Clone, Default)]
pub struct CheckOptions {
    /// Threads; 0 is one for each CPU, or two where reading waits for the device.
    pub threads: usize,
    /// How metadata is read.
    pub prefetch: Prefetch,
    /// Most bytes to use, with the 16 MiB that are set aside for the program; `None` is no bound.
    /// Less than [`least_memory`] is as much as that.
    pub memory: Option<u64>,
    /// Most directories to look through for the paths of inodes with findings, if not 200,000.
    pub path_dirs: Option<usize>,
}

/// The result of a check.
#[derive(Debug, Clone)]
pub struct CheckOutcome {
    /// The findings: at most 10,000 in full.
    pub findings: Vec<Finding>,
    /// How many findings there were.
    pub count: u64,
    /// The log's state. If it is dirty, findings may come from what it still holds.
    pub log: LogState,
    /// Why it was not replayed, if it is dirty.
    pub not_replayed: Option<String>,
    pub(crate) late: Late,
    /// Groups with inodes that directories lead to and no tree has.
    pub(crate) missing: BTreeSet<u32>,
    /// A structure could not be followed to its end; what only follows from having seen
    /// everything (lost blocks, link counts, owners) was not looked at.
    pub incomplete: bool,
    /// Inodes in use.
    pub inodes: u64,
    /// Inodes looked at: with the free ones of their chunks.
    pub allocated: u64,
    /// Blocks.
    pub blocks: u64,
    /// Free blocks, as the allocation groups count them; less if their headers are damaged.
    pub free_blocks: u64,
    /// Directories among the inodes in use that another leads to.
    pub directories: u64,
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
pub fn check(
    blocks: Arc<dyn Blocks>,
    options: &CheckOptions,
    progress: &CheckProgress,
) -> Result<CheckOutcome> {
    /// What is replayed of a dirty log may take this part (an eighth) of a bound on memory.
    const KEPT_SHARE: u64 = 8;
    let blocks = remembered(blocks, options.memory);
    let keep = options.memory.map_or(u64::MAX, |m| m / KEPT_SHARE);
    let (blocks, state, failure) = match read_superblock(&*blocks) {
        Ok((_, g)) => {
            log::wanted(&*blocks, &g)?;
            log::recovered(blocks, &g, keep)
        }
        // The check looks for a copy, and says what is wrong with the superblock.
        Err(_) => (blocks, LogState::Clean, None),
    };
    let mut outcome = keeping(blocks, options, progress, false)?.0;
    if matches!(state, LogState::Replayed { .. }) {
        outcome.log = state;
    }
    outcome.not_replayed = failure.map(|why| why.to_string());
    Ok(outcome)
}

/// The state of the log, whose damage is reported, and the log sequence number of its head.
fn log_state(blocks: &dyn Blocks, g: &Geometry, report: &Report) -> (LogState, Option<u64>) {
    let (log, head) = log::survey(blocks, g);
    let place = Place::fs(Structure::Log);
    if let LogState::Unreadable(why) = &log {
        report.bad(place, format!("cannot tell its state: {why}"));
    }
    if let Some(why) = log::damage(blocks, g, &log) {
        report.bad(place, why);
    }
    (log, head)
}

/// The number of threads to check with.
fn threads(options: &CheckOptions, blocks: &dyn Blocks) -> usize {
    match options.threads {
        0 => {
            let cpus = std::thread::available_parallelism().map_or(2, |n| n.get());
            if blocks.waits() { cpus * 2 } else { cpus }
        }
        n => n,
    }
}

/// Checks as [`check`] does, and keeps what was counted, if one pass was enough. With `stop` it ends
/// before the inodes if only the inode trees of some groups are damaged: most of the work is to be done
/// again when they are repaired.
pub(crate) fn keeping(
    blocks: Arc<dyn Blocks>,
    options: &CheckOptions,
    progress: &CheckProgress,
    stop: bool,
) -> Result<(CheckOutcome, Option<Kept>)> {
    let report = Report::default();
    let (sb, mut g) = superblock::find(&*blocks, &report)?;
    let (log, head_lsn) = log_state(&*blocks, &g, &report);
    superblock::fields(&sb, &g, head_lsn, &report);
    fit(&mut g, blocks.size(), &report);
    let large = match options.prefetch {
        Prefetch::Large => true,
        Prefetch::Exact => false,
        Prefetch::Auto => probe::suits_large(&*blocks),
    };
    let budget = Budget::new(&g, &*blocks, options.memory, threads(options, &*blocks));
    let mut run = CheckRun {
        g: &g,
        sb: &sb,
        blocks: &*blocks,
        report: &report,
        progress,
        large,
        budget: &budget,
        log_clean: log.is_clean(),
        head_lsn,
        groups: Vec::new(),
    };
    let windows = budget::windows(&run);
    let broken = |e| Error::Output {
        what: "a temporary file for the tree of directories".into(),
        source: e,
    };
    let mut ups = Ups::new(windows.len() > 1).map_err(broken)?;
    let mut class = Class {
        remainder: 0,
        classes: 1,
    };
    let has_quota = quota::counted(&sb);
    let (mut inodes, mut free_blocks, mut passes) = ((0, 0), 0, 0);
    let mut kept = None;
    // Further classes of quota ids may need passes of their own, with nothing else to look at.
    while passes < windows.len() || (has_quota && class.remainder < class.classes) {
        let window = windows.get(passes).copied().unwrap_or(Window::NOTHING);
        let usage = (has_quota && class.remainder < class.classes)
            .then(|| Usage::new(class, budget.quota_ids));
        let counted = run.counted(window, usage);
        let ctx = run.context(&counted);
        groups(&ctx, budget.threads);
        if passes == 0 {
            free_blocks = superblock::sums(&ctx).fdblocks;
        }
        let stop = stop && options.memory.is_none();
        if stop && report.all(|f| kept::TREES.contains(&f.place.what)) && report.count() > 0 {
            kept = Some(Kept::new(&run, counted, true));
            passes = 1;
            break;
        }
        inodes = pass(&ctx, budget.threads);
        links::tree(&ctx, &mut ups).map_err(broken)?;
        if passes == 0 {
            superblock::quota(&ctx);
            superblock::counters(&ctx);
        }
        if let Some(usage) = &counted.usage {
            let usage = usage.lock().expect("no holder panics");
            class = usage.class();
            class.remainder += 1;
            if !report.is_incomplete() && log.is_clean() {
                usage.compare(&ctx);
            }
        }
        passes += 1;
        if passes == windows.len() {
            links::cycles(&ctx, &mut ups).map_err(broken)?;
        }
        if passes == 1 {
            run.groups = counted.ags.iter().map(Known::of).collect();
        }
        // With a bound on memory nothing is kept.
        kept = (options.memory.is_none()).then(|| Kept::new(&run, counted, false));
    }
    let incomplete = report.is_incomplete();
    let (late, missing) = (report.late(), report.take_missing());
    let (mut findings, count) = report.take();
    let dirs = options.path_dirs.unwrap_or(usize::MAX);
    paths::name(&blocks, &mut findings, dirs.min(budget.path_dirs));
    let outcome = CheckOutcome {
        findings,
        count,
        log,
        not_replayed: None,
        late,
        missing,
        incomplete,
        inodes: inodes.0,
        allocated: inodes.1,
        blocks: sb.dblocks.get(),
        free_blocks,
        directories: ups.len() as u64,
        passes,
        prefetch: match large {
            true => Prefetch::Large,
            false => Prefetch::Exact,
        },
    };
    Ok((outcome, kept))
}

/// The inode chunks of an allocation group, known from the first pass on.
struct Known {
    chunks: Arc<Vec<Chunk>>,
    free: Arc<Vec<u64>>,
    all: bool,
}

impl Known {
    fn of(ag: &AgFacts) -> Known {
        Known {
            chunks: ag.chunks.get().cloned().unwrap_or_default(),
            free: ag.free.get().cloned().unwrap_or_default(),
            all: ag.inodes_known.load(Ordering::Relaxed),
        }
    }
}

/// The common state of the passes of a check.
pub(crate) struct CheckRun<'a> {
    g: &'a Geometry,
    sb: &'a Superblock,
    blocks: &'a dyn Blocks,
    report: &'a Report,
    progress: &'a CheckProgress,
    large: bool,
    budget: &'a Budget,
    log_clean: bool,
    /// The log sequence number of the log's end, if that is known.
    head_lsn: Option<u64>,
    /// Empty in the first pass: nothing is known of the groups yet.
    groups: Vec<Known>,
}

impl CheckRun<'_> {
    /// What a pass for the blocks and inodes of `window` counts, before it begins.
    fn counted(&self, window: Window, usage: Option<Usage>) -> Counted {
        let g = self.g;
        let ag = |agno| {
            let n = g.ag_blocks(agno);
            let window = window.of(agno, n);
            let here = !window.is_empty();
            let known = self.groups.get(agno as usize);
            AgFacts {
                map: here.then(|| Mutex::new(BlockMap::new(window.end - window.start))),
                owners: (here && g.features.rmapbt).then(|| Fingerprint::new(n)),
                refs: (here && g.features.reflink).then(|| Fingerprint::new(n)),
                window,
                chunks: known.map_or_else(OnceLock::new, |k| k.chunks.clone().into()),
                free: known.map_or_else(OnceLock::new, |k| k.free.clone().into()),
                inodes_known: AtomicBool::new(known.is_none_or(|k| k.all)),
                ..AgFacts::default()
            }
        };
        Counted {
            ags: (0..g.agcount).map(ag).collect(),
            bases: OnceLock::new(),
            tree: Mutex::default(),
            usage: usage.map(Mutex::new),
        }
    }

    /// A pass.
    fn context<'c>(&'c self, counted: &'c Counted) -> Ctx<'c> {
        Ctx {
            run: self,
            counted,
            ags: &counted.ags,
            undo: false,
        }
    }
}

/// Leaves out allocation groups that begin beyond the end of the image.
fn fit(g: &mut Geometry, size: u64, report: &Report) {
    if size >= g.data_bytes() {
        return;
    }
    let expected = format!("at least {}", g.data_bytes());
    report.differ(Place::fs(Structure::Image), "bytes", expected, size);
    report.incomplete();
    let ag_bytes = u64::from(g.agblocks) << g.blocklog;
    let count = size.div_ceil(ag_bytes).clamp(1, g.agcount.into()) as u32;
    if count < g.agcount {
        g.agcount = count;
        g.dblocks = u64::from(count) * u64::from(g.agblocks);
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
        let take = || next.fetch_add(1, Ordering::Relaxed);
        while let Some(i) = Some(take()).filter(|i| *i < count) {
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

/// Looks at the headers and trees of all groups.
fn groups(ctx: &Ctx<'_>, threads: usize) {
    parallel(ctx, threads, ctx.g.agcount as usize, &|rd, i| {
        if ctx.groups.is_empty() || ctx.in_pass(i as u32) {
            ag::check(ctx, rd, i as u32);
        }
    });
}

/// Goes through the inodes once; gives how many are in use, and how many there are.
fn pass(ctx: &Ctx<'_>, threads: usize) -> (u64, u64) {
    let groups = ctx.g.agcount as usize;
    let mut bases = Vec::with_capacity(groups);
    let mut items: Vec<(u32, Range<usize>)> = Vec::new();
    let (mut base, mut inodes, mut unused) = (0u64, 0u64, 0u64);
    for (agno, ag) in ctx.ags.iter().enumerate() {
        let chunks = ag.chunks.get().map_or(&[][..], |c| &c[..]);
        // Indices of inodes are 32 bits: four thousand million of them would not fit in memory.
        bases.push(u32::try_from(base).unwrap_or(u32::MAX / 64));
        base += chunks.len() as u64;
        inodes += chunks
            .iter()
            .map(|c| u64::from(64 - c.holemask.count_ones() * 4))
            .sum::<u64>();
        let free = ag.free.get().map_or(&[][..], |free| &free[..]);
        unused += (chunks.iter().zip(free))
            .map(|(chunk, free)| u64::from((free & !holes(chunk.holemask)).count_ones()))
            .sum::<u64>();
        let blocks = |c: &Chunk| c.start >> ctx.g.inopblog;
        let first = chunks.partition_point(|c| blocks(c) < ag.window.start);
        let end = chunks.partition_point(|c| blocks(c) < ag.window.end);
        if first < end {
            let _ = ag.facts.set(Facts::new(first..end));
        }
        for from in (0..chunks.len()).step_by(CHUNKS_PER_ITEM) {
            let to = chunks.len().min(from + CHUNKS_PER_ITEM);
            items.push((agno as u32, from..to));
        }
    }
    if base > u64::from(u32::MAX / 64) {
        ctx.report.incomplete();
    }
    let _ = ctx.counted.bases.set(bases);
    ctx.progress.add_total(inodes);
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
    (inodes - unused, inodes)
}

/// Checks the blocks that are left over when all have been claimed.
fn space(ctx: &Ctx<'_>, agno: u32) {
    let (report, ag) = (ctx.report, &ctx.ags[agno as usize]);
    let Some(map) = ag.map.as_ref().filter(|_| !report.is_incomplete()) else {
        return;
    };
    let map = map.lock().expect("no holder panics");
    let base = ag.window.start;
    map.runs(Use::Unknown, &mut |start, len| {
        let place = Place::block(Structure::FreeSpace, agno, base + start);
        report.add(place, Problem::Unowned(len));
    });
    // Not in the sums themselves, which may be needed again.
    if let Some(refs) = ag.refs.as_ref().map(Fingerprint::copy) {
        // Each reference less those recorded; blocks that are in use but not recorded have one.
        let shared = ag.shared.get().map_or(&[][..], |s| &s[..]);
        for s in shared {
            let from = s.start.max(base);
            let to = (s.start + s.len).min(ag.window.end);
            if from < to {
                refs.add(from, to - from, 1, u64::from(s.count).wrapping_neg());
            }
        }
        let mut i = 0;
        map.runs(Use::Data, &mut |start, len| {
            let start = base + start;
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
        differences(report, agno, Btree::Refcount, &refs, "references to");
    }
    if let Some(owners) = &ag.owners {
        differences(report, agno, Btree::Rmap, owners, "owners of");
    }
}

/// Reports where a tree has other sums than what was seen.
fn differences(report: &Report, agno: u32, tree: Btree, sums: &Fingerprint, what: &str) {
    for (start, len) in sums.differences() {
        let text = format!("{what} the {len} blocks from here are not as recorded");
        report.bad(Place::block(tree, agno, start), text);
    }
}

/// Whether this error says that there is nothing to check here, as opposed to damage.
pub(crate) fn is_refusal(e: &Error) -> bool {
    matches!(e, Error::Unsupported(_) | Error::Io { .. })
}
