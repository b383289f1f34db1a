//! Repairing a damaged file system, as xfs_repair does.
//!
//! A repair changes nothing on disk until it knows the outcome. It works on the image with its
//! changes laid over it (`overlay.rs`), in rounds: [`mod@crate::check`] tells what is wrong, the phases
//! below repair it, and the next round's check tells whether that was enough. Without findings there
//! is nothing to do; `-n` is the same work, with the changes thrown away.
//!
//! If all findings are numbers that the check itself has counted, such as link counts, [`local`] sets them. Otherwise
//! a round is:
//!
//! 1. Geometry and superblock ([`superblock`]): the primary one if most copies agree with it,
//!    otherwise a copy.
//! 2. Inodes ([`chunks`], [`inode`]): the chunks that the inode trees have, or, in a group whose trees are damaged,
//!    all whose inodes name themselves. Each inode's fields are corrected and its forks followed. A block belongs to
//!    the inode that claims it first: inodes without findings go before others, and those that can prove their claim
//!    ([`contest`]) before those that cannot. An extent that leads outside, or to another inode's blocks, is cut off.
//! 3. Directories ([`dir`]), in the same pass, and attributes ([`attr`]): those with damage are built
//!    anew from their good entries. An entry is believed to say the type of an inode that comes
//!    later; where that turns out wrong, the directories are read once more.
//! 4. Links ([`links`]): one parent for each directory, link counts, and what no directory leads to
//!    into lost+found, named by its number.
//! 5. Groups ([`groups`]): the headers and B-trees of the groups are built from what the inodes own. Step 2 has
//!    recorded that. The inodes are walked again only if blocks have got another owner otherwise than by rebuilt
//!    directories. The new blocks come from space that nothing used before.
//! 6. Counters, superblock copies, and the log.
//!
//! The order in which the changes go to disk ([`commit`]) leaves a file system that the next repair
//! finishes, wherever it is cut off (docs/images.md). If something is left that cannot be repaired,
//! nothing is written at all.
//!
//! Memory: a repair keeps ten bytes for each inode, four bits for each block, a record for each run of
//! blocks if there is a reverse mapping tree, and 160 bytes for each directory. With
//! [`CheckOptions::memory`] the checks get what these and the sink leave, and if they leave too little
//! the repair says so before it begins; changed sectors beyond an eighth go to a temporary file. The
//! entries of one directory, and the references to shared blocks, come on top.

mod attr;
mod chunks;
mod commit;
mod contents;
mod contest;
mod dir;
mod error;
mod fields;
mod fork;
mod groups;
mod inode;
mod links;
mod local;
mod log;
mod quick;
mod quota;
mod reader;
mod space;
mod superblock;
mod trees;

pub use crate::overlay::Sink;
pub use commit::DeviceSink;
pub use error::RepairError;

use crate::blocks::Blocks;
use crate::check::{self, CheckOptions, CheckProgress, Finding, Place, Problem, Structure, Use};
use crate::error::{Error, Result};
use crate::format::*;
use crate::geometry::Geometry;
use crate::log::LogState;
use crate::overlay::{Overlay, remembered};
use space::AgToMend;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::Arc;

/// Rounds of checking and repairing.
const MAX_ROUNDS: usize = 6;
/// Directories that are looked through for the paths of inodes: with more this could take longer than all
/// else.
const PATH_DIRS: usize = 200;
/// Changed sectors may take this part (an eighth) of a bound on memory; more go to a temporary file.
const KEPT_SHARE: u64 = 8;
/// The most changes that are reported in full.
const MAX_CHANGES: usize = 10_000;

/// How to repair.
#[derive(Debug, Clone, Default)]
pub struct RepairOptions {
    /// Throw the log away if it is dirty: what it holds is lost.
    pub zero_log: bool,
    /// How the checks are done.
    pub check: CheckOptions,
}

/// A change that a repair made, or would make, in words.
pub type Change = Finding<String>;

/// The result of a repair.
#[derive(Debug, Clone, Default)]
pub struct RepairOutcome {
    /// The findings of the first check.
    pub found: Vec<Finding>,
    /// How many findings that were.
    pub found_count: u64,
    /// The changes that were made, or would be: at most 10,000 in full.
    pub changes: Vec<Change>,
    /// How many changes there were.
    pub change_count: u64,
    /// The findings of the last check. If there are any, nothing was written.
    pub left: Vec<Finding>,
    /// How many findings are left.
    pub left_count: u64,
    /// The log is dirty, cannot be replayed and may not be zeroed: nothing was done. Says why it cannot.
    pub dirty_log: Option<String>,
    /// Inodes in use.
    pub inodes: u64,
    /// Blocks.
    pub blocks: u64,
    /// Free blocks that the superblock counts in the end.
    pub free_blocks: u64,
    /// Rounds of repairing.
    pub rounds: usize,
    /// Bytes written.
    pub written: u64,
}

/// Repairs the file system in `blocks`, with `sink` to write to the same image. Without it the outcome says what would be
/// done.
pub fn repair(
    blocks: Arc<dyn Blocks>,
    sink: Option<&dyn Sink>,
    options: &RepairOptions,
    progress: &CheckProgress,
) -> std::result::Result<RepairOutcome, RepairError> {
    let bound = options.check.memory;
    let keep = bound.map_or(u64::MAX, |m| m / KEPT_SHARE);
    let mut blocks = remembered(blocks, bound);
    let choices = superblock::settle(&*blocks)?;
    let mut choice = better(choices, &blocks, options)?;
    refuse(&choice.g, &*blocks)?;
    let mut out = RepairOutcome::default();
    let surveyed = crate::log::survey(&*blocks, &choice.g);
    let replay = match options.zero_log {
        true => Ok(None),
        false => crate::log::replay(&blocks, &choice.g, &surveyed, keep),
    };
    let mut state = surveyed.0;
    let mut replayed = None;
    match replay {
        Ok(None) => {}
        Ok(Some(r)) => {
            out.written = r.free_unlinked(sink).map_err(RepairError::Write)?;
            (blocks, state) = (r.disk.clone(), r.state.clone());
            let choices = superblock::settle(&*blocks)?;
            choice = better(choices, &blocks, options)?;
            replayed = Some(r);
        }
        Err(why) => {
            out.dirty_log = Some(why.to_string());
            return Ok(out);
        }
    }
    let superblock::Choice { mut sb, g, as_is } = choice;
    // The image changes with what the log only announces: that is done in the changes of the repair, with which the log
    // becomes empty, and not twice.
    let mut changes = |keep: u64| {
        let disk = Arc::new(Overlay::new(blocks.clone(), keep));
        if let Some(r) = &mut replayed {
            r.finish(&disk);
            let done = disk.get(0, 512).unwrap_or_default();
            if let Ok(done) = Superblock::at(&done, 0) {
                sb.set_counts(done.counts());
            }
        }
        (disk, sb)
    };
    let mut checking = CheckOptions {
        path_dirs: options.check.path_dirs.or(Some(PATH_DIRS)),
        ..options.check.clone()
    };
    let mut first = None;
    // The first check, and all of the repair if the damage is of the kinds that `quick.rs` names.
    if bound.is_none() {
        let (disk, sb) = changes(u64::MAX);
        let (mut m, before) = Mend::new(&disk, sb, g.clone(), as_is, &state);
        match quick::mend(&mut m, &disk, &checking, progress)? {
            quick::Quick::Mended(mut out) => {
                out.found_count += before;
                return finish(m, out, sink);
            }
            quick::Quick::Not(outcome) => first = outcome,
        }
    }
    let (disk, sb) = changes(keep);
    let (mut m, before) = Mend::new(&disk, sb, g, as_is, &state);
    out.found_count = before;
    let mut best = u64::MAX;
    loop {
        let outcome = match first.take() {
            Some(outcome) => outcome,
            None => check::keeping(disk.clone(), &checking, progress, false)?.0,
        };
        // Only the first findings are given paths.
        checking.path_dirs = Some(0);
        out.inodes = outcome.inodes;
        if out.rounds == 0 {
            out.found_count += outcome.count;
            out.found = outcome.findings.clone();
        }
        let late = outcome.late;
        (out.left_count, out.left) = (outcome.count, outcome.findings);
        let stuck = out.rounds >= 3 && out.left_count >= best;
        if out.left_count == 0 || out.rounds == MAX_ROUNDS || stuck {
            break;
        }
        best = best.min(out.left_count);
        out.rounds += 1;
        if local::mend(&mut m, &out.left, out.left_count, late) {
            out.left.clear();
            out.left_count = 0;
            break;
        }
        if let Some(memory) = bound.filter(|_| out.rounds == 1) {
            let tables = check::repair_tables(&m.g, &*blocks, outcome.directories);
            let tables = tables + sink.map_or(0, Sink::memory) + memory / KEPT_SHARE;
            let least = check::least_memory(&*disk)?;
            if tables + least > memory {
                // The share of what is kept grows with the bound.
                let least = (tables - memory / KEPT_SHARE + least) * KEPT_SHARE;
                return Err(RepairError::Memory(least.div_ceil(KEPT_SHARE - 1)));
            }
            checking.memory = Some(memory - tables);
        }
        m.max_lsn = m.max_lsn.max(late.latest);
        m.missing = outcome.missing;
        m.round(&out.left, out.left_count > out.left.len() as u64);
    }
    finish(m, out, sink)
}

/// Chooses a superblock: the one whose UUID most group headers have; among equals the one with which the check sees
/// most inodes; then the one with fewest findings, those about superblock copies not counted.
fn better(
    choices: Vec<superblock::Choice>,
    blocks: &Arc<dyn Blocks>,
    options: &RepairOptions,
) -> Result<superblock::Choice> {
    let findings = |choice: &superblock::Choice| {
        if choices.len() == 1 || refuse(&choice.g, &**blocks).is_err() {
            return (0, u64::MAX);
        }
        let disk = Arc::new(Overlay::new(blocks.clone(), u64::MAX));
        let state = crate::log::survey(&*disk, &choice.g).0;
        Mend::new(&disk, choice.sb, choice.g.clone(), choice.as_is, &state);
        let checking = CheckOptions {
            path_dirs: Some(0),
            ..options.check.clone()
        };
        let found = check::keeping(disk.clone(), &checking, &CheckProgress::default(), false);
        found.map_or((0, u64::MAX), |(o, _)| {
            let is_copy = |f: &&Finding| f.place.what == Structure::SuperblockCopy;
            let copies = o.findings.iter().filter(is_copy);
            (o.inodes, o.count - copies.count() as u64)
        })
    };
    let ranks = choices.iter().enumerate().map(|(i, choice)| {
        let (inodes, count) = findings(choice);
        (Reverse((choice.headers(&**blocks), inodes)), count, i)
    });
    let best = ranks.min().map_or(0, |(.., i)| i);
    let mut choices = choices;
    match choices.is_empty() {
        true => Err(Error::NotXfs { found: 0 }),
        false => Ok(choices.swap_remove(best)),
    }
}

/// Reports the changes, and writes them to the image if no finding is left.
fn finish(
    mut m: Mend<'_>,
    mut out: RepairOutcome,
    sink: Option<&dyn Sink>,
) -> std::result::Result<RepairOutcome, RepairError> {
    let known = out
        .found
        .iter()
        .filter_map(|f| Some((f.place.inode?, f.path.as_ref()?)));
    let paths: HashMap<u64, &String> = known.collect();
    // An inode that was cleared may have become lost+found.
    let mut made = None;
    for c in &mut m.changes {
        let Place { what, inode, .. } = c.place;
        made = made.or(inode.filter(|_| what == Structure::LostAndFound));
        c.path = match inode {
            Some(_) if inode == made => Some(format!("/{}", Structure::LostAndFound)),
            _ => inode.and_then(|i| paths.get(&i)).map(|p| (*p).clone()),
        };
    }
    (out.blocks, out.free_blocks) = (m.sb.dblocks.get(), m.sb.fdblocks.get());
    (out.change_count, out.changes) = (m.change_count, std::mem::take(&mut m.changes));
    // An image that cannot be repaired completely is left as it is, rather than half changed.
    if let Some(sink) = sink
        && out.left_count == 0
        && m.disk.is_changed()
    {
        out.written += commit::commit(&m, sink).map_err(RepairError::Write)?;
    }
    Ok(out)
}

/// Refuses what cannot be repaired.
fn refuse(g: &Geometry, blocks: &dyn Blocks) -> Result<()> {
    let f = &g.features;
    let refuse = |what: &str| Err(Error::Unsupported(what.into()));
    if !f.crc {
        return refuse("repairing XFS version 4 is");
    }
    if f.unknown_ro_compat != 0 || f.parent {
        return refuse("repairing XFS with parent pointers or unknown features is");
    }
    if g.rblocks != 0 {
        return refuse("repairing XFS with a realtime section is");
    }
    if g.logstart == 0 && blocks.log().is_none() {
        return Err(Error::LogDevice);
    }
    if blocks.size() < g.data_bytes() {
        let (size, wanted) = (blocks.size(), g.data_bytes());
        return refuse(&format!(
            "repairing an image of {size} bytes whose file system has {wanted} is"
        ));
    }
    Ok(())
}

/// What the findings of a round are about.
#[derive(Default)]
pub(crate) struct Findings {
    /// Structures of groups, and some that are about no group.
    hurt: HashSet<(Structure, u32)>,
    /// Inodes that share blocks.
    pub sharing: HashSet<u64>,
    /// Inodes, and which of their structures.
    pub about: HashMap<u64, HashSet<Structure>>,
    /// Runs of blocks that more than one claims: group, first block, blocks.
    pub contested: Vec<(u32, u32, u32)>,
}

/// A repair under way.
pub(crate) struct Mend<'a> {
    pub disk: &'a Overlay,
    pub g: Arc<Geometry>,
    pub sb: Superblock,
    pub ags: Vec<AgToMend>,
    pub findings: Findings,
    /// All inodes and groups have findings: there were too many to tell.
    all_bad: bool,
    /// The greatest log sequence number seen in an inode, or ahead of the log.
    pub max_lsn: u64,
    pub changes: Vec<Change>,
    pub change_count: u64,
    said: HashSet<Change>,
    /// The groups' trees have to be built anew: they are damaged, or blocks have got another owner.
    pub moved: bool,
    /// The inodes have to be walked again to know whose the blocks are.
    pub recount: bool,
    /// A directory's entry was believed about the type of its inode, which turned out to have another.
    pub again: bool,
    /// The directory lost+found, if it was needed.
    pub lost: Option<u64>,
    /// The log was formatted.
    pub log_formatted: bool,
    /// Inodes that were written, those whose blocks were given up, and groups whose blocks or inodes
    /// changed hands.
    pub changed: BTreeSet<u64>,
    pub rebuilt: HashSet<u64>,
    pub touched: BTreeSet<u32>,
    /// Groups whose trees are not to be believed.
    pub broken: BTreeSet<u32>,
    /// Groups with inodes that directories lead to and no tree has.
    pub missing: BTreeSet<u32>,
}

impl<'a> Mend<'a> {
    /// Begins with what the superblock and the log need; gives how many findings that is.
    fn new(
        disk: &'a Overlay,
        sb: Superblock,
        g: Geometry,
        as_is: bool,
        log: &LogState,
    ) -> (Mend<'a>, u64) {
        let mut m = Mend {
            disk,
            ags: (0..g.agcount).map(|_| AgToMend::default()).collect(),
            g: Arc::new(g),
            sb,
            findings: Findings::default(),
            all_bad: false,
            max_lsn: 0,
            changes: Vec::new(),
            change_count: 0,
            said: HashSet::new(),
            moved: false,
            recount: true,
            again: false,
            lost: None,
            log_formatted: false,
            changed: BTreeSet::new(),
            rebuilt: HashSet::new(),
            touched: BTreeSet::new(),
            broken: BTreeSet::new(),
            missing: BTreeSet::new(),
        };
        let mut found = 0;
        if !as_is {
            m.say(Place::ag(Structure::Superblock, 0), "rewritten from a copy");
            found += 1;
        }
        if m.g.features.needsrepair {
            found += 1;
            let text = "the mark that a repair is needed taken away";
            m.say(Place::ag(Structure::Superblock, 0), text);
        }
        m.put_superblock(sb);
        if !log.is_clean() {
            found += 1;
            log::format(&mut m, matches!(log, LogState::Replayed { .. }));
        }
        (m, found)
    }

    /// Notes which inodes and groups the findings are about; gives whether log sequence numbers are ahead of the log.
    fn read_findings(&mut self, found: &[Finding]) -> bool {
        self.findings = Findings::default();
        let mut late = false;
        for Finding { place, problem, .. } in found {
            let what = place.what;
            if let Some(ino) = place.inode {
                let about = &mut self.findings.about;
                about.entry(ino).or_default().insert(what);
                if *problem == Problem::NoReflinkFlag {
                    self.findings.sharing.insert(ino);
                }
            } else {
                self.findings.hurt.insert((what, place.ag.unwrap_or(0)));
                // Damage of superblock copies needs no new trees.
                self.moved |= !matches!(what, Structure::SuperblockCopy | Structure::Log);
            }
            if let Problem::UsedTwice { blocks, was, .. } = problem
                && matches!(was, Use::Meta | Use::Data)
                && let (Some(ag), Some(block)) = (place.ag, place.block)
            {
                self.findings.contested.push((ag, block, *blocks));
            }
            late |= matches!(problem, Problem::AheadOfLog { .. });
        }
        late
    }

    /// Repairs what `found` is about, in one round. With `more`, there were findings that are not in the list.
    fn round(&mut self, found: &[Finding], more: bool) {
        self.all_bad = more;
        self.moved = more;
        self.recount = true;
        self.lost = None;
        let late = self.read_findings(found);
        superblock::fields(self);
        for agno in 0..self.g.agcount {
            chunks::collect(self, agno);
        }
        space::begin(self);
        // If only the groups' own structures are damaged, only those are repaired. The next check finds what that
        // damage hid of inodes and directories.
        if !self.findings.about.is_empty() || self.all_bad || !self.only_groups() {
            let tree = inode::all(self);
            links::settle(self, tree);
            links::all(self);
            quota::all(self);
        }
        if self.moved {
            groups::all(self);
        }
        superblock::copies(self);
        if self.hurt(Structure::Log, 0) || (late && !self.log_formatted) {
            log::format(self, false);
        }
    }

    /// Whether all findings are about structures that [`groups`] builds.
    fn only_groups(&self) -> bool {
        use Structure::{Agf, Agfl, FreeSpace, Log, Superblock, SuperblockCopy, Tree};
        self.findings.hurt.iter().all(|(what, _)| match what {
            Agf | Agfl | FreeSpace | Superblock | SuperblockCopy | Log => true,
            Tree(tree) => !matches!(tree, Btree::Ino | Btree::Fino),
            _ => false,
        })
    }

    /// Whether there are findings about an inode.
    pub fn is_bad(&self, ino: u64) -> bool {
        self.all_bad || self.findings.about.contains_key(&ino)
    }

    /// Whether there are findings about this structure of an inode.
    pub fn is_about(&self, ino: u64, what: Structure) -> bool {
        self.findings
            .about
            .get(&ino)
            .is_some_and(|a| a.contains(&what))
    }

    /// Whether there are findings about a structure of a group.
    pub fn hurt(&self, what: Structure, agno: u32) -> bool {
        self.all_bad || self.findings.hurt.contains(&(what, agno))
    }

    /// Tells what was changed.
    pub fn say(&mut self, place: Place, text: impl Into<String>) {
        let change = Change {
            place,
            path: None,
            problem: text.into(),
        };
        // A later round does some things again.
        let room = self.changes.len() < MAX_CHANGES;
        if room && !self.said.insert(change.clone()) {
            return;
        }
        self.change_count += 1;
        if room {
            self.changes.push(change);
        }
    }

    /// Writes the primary superblock.
    pub fn put_superblock(&mut self, sb: Superblock) {
        let mut sb = sb;
        let bits = sb.features_incompat.get() & !INCOMPAT_NEEDSREPAIR;
        sb.features_incompat.set(bits);
        let bytes = sb.sector(self.g.sector_size as usize);
        self.disk.write(0, &bytes);
        if let Ok(sb) = Superblock::at(&bytes, 0) {
            self.sb = *sb;
        }
        if let Ok(g) = Geometry::new(&self.sb) {
            self.g = Arc::new(g);
        }
    }

    /// Byte of an inode on the device.
    pub fn inode_offset(&self, ino: u64) -> Option<u64> {
        self.g.inode(ino).map(|a| self.g.inode_byte(a))
    }

    /// A header sector of a group, as far as it can be read, and what it should say of itself.
    pub fn header(&self, agno: u32, sector: u32) -> (Vec<u8>, Ident) {
        let ident = self.g.header_ident(agno, sector);
        let bytes = (self.disk).get(ident.daddr << 9, self.g.sector_size as usize);
        (bytes.unwrap_or_default(), ident)
    }

    /// The block at a 512-byte sector.
    pub fn block(&self, daddr: u64) -> io::Result<Vec<u8>> {
        self.disk.get(daddr << 9, self.g.block_size as usize)
    }

    /// The bytes of an inode.
    pub fn raw(&self, ino: u64) -> Option<Vec<u8>> {
        let at = self.inode_offset(ino)?;
        self.disk.get(at, self.g.inode_size as usize).ok()
    }

    /// Writes an inode, with its checksum.
    pub fn put_inode(&mut self, ino: u64, raw: &mut [u8]) {
        store_crc(raw, DINODE_CRC_OFFSET);
        if let Some(at) = self.inode_offset(ino) {
            self.disk.write(at, raw);
            self.changed.insert(ino);
        }
    }

    /// Writes a block of metadata, with its checksum.
    pub fn put_block(&self, daddr: u64, bytes: &[u8], crc_offset: usize) {
        let mut bytes = bytes.to_vec();
        store_crc(&mut bytes, crc_offset);
        self.disk.write(daddr << 9, &bytes);
    }
}
