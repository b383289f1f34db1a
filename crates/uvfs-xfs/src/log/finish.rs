//! Intents: changes that the log announces and does not have. The kernel does them once it has replayed the log
//! (`xlog_recover_process_intents`), and so does this module, in the order of the log but for attributes, which come last.
//!
//! The log says what a change is about, not how it is done. Extents, free runs, owners and reference counts become what
//! the kernel makes of them. Which blocks trees are in, and how full these are, may differ: trees are built anew.

use super::attributes;
use super::mappings::Fork;
use super::space::Space;
use super::transactions::Item;
use crate::format::*;
use crate::geometry::{AgBlock, Geometry};
use crate::overlay::Overlay;
use std::collections::BTreeMap;

/// Records that may be looked at, all changes together: with more a log that was made to take long would.
const MAX_WORK: usize = 1 << 32;

/// What an intent announces, in words.
pub(super) fn name(kind: u16) -> &'static str {
    let names = INTENTS.iter().find(|(intent, ..)| *intent == kind);
    names.map_or("a change", |(.., name)| name)
}

const FREE: u16 = 0x1236;
const OWNERS: u16 = 0x1240;
const REFERENCES: u16 = 0x1242;
const MAPPING: u16 = 0x1244;
const ATTRIBUTE: u16 = 0x1246;
const EXCHANGE: u16 = 0x1248;
/// Intents, and the items that say that they are done: (intent, done, what it announces).
pub(super) const INTENTS: [(u16, u16, &str); 9] = [
    (FREE, 0x1237, "the freeing of blocks"),
    (OWNERS, 0x1241, "a change of the reverse mapping tree"),
    (REFERENCES, 0x1243, "a change of the reference count tree"),
    (MAPPING, 0x1245, "a change of a file's mapping"),
    (ATTRIBUTE, 0x1247, "a change of an extended attribute"),
    (EXCHANGE, 0x1249, "an exchange of files' contents"),
    (0x124a, 0x124b, "the freeing of realtime blocks"),
    (
        0x124c,
        0x124d,
        "a change of the realtime reverse mapping tree",
    ),
    (
        0x124e,
        0x124f,
        "a change of the realtime reference count tree",
    ),
];

/// Changes that the log announces, under way.
pub(super) struct Finishing<'a> {
    pub disk: &'a Overlay,
    pub g: &'a Geometry,
    /// What is written has this log sequence number.
    pub lsn: u64,
    /// The groups that have changed; `None` if a group's trees are damaged.
    groups: BTreeMap<u32, Option<Space>>,
    /// Something could not be done.
    failed: bool,
    work: usize,
}

/// Does what these intents announce. Gives the changes that were done and those that could not be, in words.
pub(super) fn finish(
    disk: &Overlay,
    g: &Geometry,
    lsn: u64,
    intents: &[Item],
) -> (Vec<&'static str>, Vec<&'static str>) {
    let mut f = Finishing {
        disk,
        g,
        lsn,
        groups: BTreeMap::new(),
        failed: false,
        work: 0,
    };
    let (mut done, mut left) = (Vec::new(), Vec::new());
    // An attribute's change writes the whole fork anew, so what is announced of the fork's old blocks comes first.
    let attribute = |item: &&Item| item.kind() == ATTRIBUTE;
    let others = intents.iter().filter(|item| !attribute(item));
    for item in others.chain(intents.iter().filter(attribute)) {
        f.failed = false;
        match f.intent(item) {
            Some(()) if !f.failed => done.push(name(item.kind())),
            _ => left.push(name(item.kind())),
        }
    }
    for group in f.groups.into_values().flatten() {
        if group.write(disk, g, lsn).is_none() {
            left.push("the freeing of blocks");
        }
    }
    (done, left)
}

impl Finishing<'_> {
    fn intent(&mut self, item: &Item) -> Option<()> {
        match item.kind() {
            FREE => self.extents(item),
            OWNERS => self.each(item, Self::owner),
            REFERENCES => self.references(item),
            MAPPING => self.each(item, Self::mapping),
            ATTRIBUTE => attributes::change(self, item),
            EXCHANGE => self.exchange(item),
            _ => None,
        }
    }

    /// A group, which will be written.
    fn group(&mut self, agno: u32) -> Option<&mut Space> {
        let (disk, g) = (self.disk, self.g);
        let read = || Space::read(disk, g, agno);
        let space = self.groups.entry(agno).or_insert_with(read).as_mut();
        self.work += space.as_ref().map_or(0, |space| space.len());
        self.failed |= space.is_none() || self.work > MAX_WORK;
        space.filter(|_| self.work <= MAX_WORK)
    }

    /// So many more records were looked at.
    pub fn worked(&mut self, records: usize) {
        self.work += records;
        self.failed |= self.work > MAX_WORK;
    }

    fn at(&mut self, start: u64, len: u32) -> Option<(u32, &mut Space)> {
        let a = self.g.fsb_run(start, len)?;
        Some((a.agbno, self.group(a.agno)?))
    }

    /// Frees blocks, which have no owner any more.
    pub fn free(&mut self, start: u64, len: u32) {
        if let Some((at, group)) = self.at(start, len) {
            group.free(at, len);
        }
    }

    /// Gives blocks an owner, if the file system keeps account of that.
    pub fn own(&mut self, start: u64, len: u32, owner: u64, offset: u64) {
        if self.g.features.rmapbt
            && let Some((at, group)) = self.at(start, len)
        {
            group.own((at, len, owner, offset));
        }
    }

    /// Takes blocks away from an owner.
    pub fn disown(&mut self, start: u64, len: u32, owner: u64, offset: u64) {
        if self.g.features.rmapbt
            && let Some((at, group)) = self.at(start, len)
        {
            group.disown((at, len, owner, offset));
        }
    }

    /// Takes free blocks of the group of `near`, or of another.
    pub fn take(&mut self, near: u64, blocks: u32) -> Option<Vec<(u64, u32)>> {
        if blocks == 0 {
            return Some(Vec::new());
        }
        let first = self.g.fsb(near).map_or(0, |a| a.agno);
        for k in 0..self.g.agcount {
            let agno = (first + k) % self.g.agcount;
            if let Some(runs) = self.group(agno).and_then(|group| group.take(blocks)) {
                let block = |(agbno, n)| (self.g.fsbno(AgBlock { agno, agbno }), n);
                return Some(runs.into_iter().map(block).collect());
            }
        }
        None
    }

    /// Blocks that are freed (`xfs_efi_log_format`): start and length of each run.
    fn extents(&mut self, item: &Item) -> Option<()> {
        let h = item.header();
        let n = LogItemHeader::at(h, 0).ok()?.count.get() as usize;
        // 32-bit machines do not align the lengths.
        let each = (h.len().checked_sub(LogItemHeader::SIZE)?).checked_div(n)?;
        if each < 12 {
            return None;
        }
        for i in 0..n {
            let at = LogItemHeader::SIZE + i * each.min(16);
            let (start, len) = (Le64::at(h, at).ok()?.get(), Le32::at(h, at + 8).ok()?.get());
            let rmap = self.g.features.rmapbt;
            let (at, group) = self.at(start, len)?;
            if rmap {
                group.disown_any(at, len);
            }
            group.free(at, len);
        }
        Some(())
    }

    /// Changes of owners or mappings (`xfs_map_extent`).
    fn each(
        &mut self,
        item: &Item,
        change: fn(&mut Self, &LogMapping) -> Option<()>,
    ) -> Option<()> {
        let n = LogItemHeader::at(item.header(), 0).ok()?.count.get() as usize;
        let all = LogMapping::slice_at(item.header(), LogItemHeader::SIZE, n).ok()?;
        all.iter().try_for_each(|m| change(self, m))
    }

    fn owner(&mut self, m: &LogMapping) -> Option<()> {
        const ATTR_FORK: u32 = 1 << 31;
        const TREE: u32 = 1 << 30;
        const UNWRITTEN: u32 = 1 << 29;
        let (flags, owner) = (m.flags.get(), m.owner.get());
        let of = |flag, value| if flags & flag != 0 { value } else { 0 };
        let place = of(ATTR_FORK, RMAP_OFF_ATTR_FORK) | of(TREE, RMAP_OFF_BMBT_BLOCK);
        let place = m.startoff.get() & RMAP_OFF_MASK | place;
        let place = if owner >> 63 != 0 { 0 } else { place };
        let unwritten = of(UNWRITTEN, RMAP_OFF_UNWRITTEN);
        let len = m.len.get();
        let (at, group) = self.at(m.startblock.get(), len)?;
        match flags & 0xff {
            // Mapped, also where others own the blocks, or taken.
            1 | 2 | 7 => group.own((at, len, owner, place | unwritten)),
            3 | 4 | 8 => group.disown((at, len, owner, place)),
            // Converted, to what the flag says.
            5 | 6 => {
                group.disown((at, len, owner, place));
                group.own((at, len, owner, place | unwritten));
            }
            _ => return None,
        }
        Some(())
    }

    /// Counts of references (`xfs_phys_extent`).
    fn references(&mut self, item: &Item) -> Option<()> {
        let h = item.header();
        for i in 0..LogItemHeader::at(h, 0).ok()?.count.get() as usize {
            let at = LogItemHeader::SIZE + i * 16;
            let start = Le64::at(h, at).ok()?.get();
            let (len, flags) = (Le32::at(h, at + 8).ok()?.get(), Le32::at(h, at + 12).ok()?);
            let (at, group) = self.at(start, len)?;
            match flags.get() {
                kind @ (1 | 2) => {
                    for (start, len) in group.count(at, len, kind == 1) {
                        group.free(start, len);
                    }
                }
                kind @ (3 | 4) => group.stage(at, len, kind == 3),
                _ => return None,
            }
        }
        Some(())
    }

    /// A change of a file's mapping.
    fn mapping(&mut self, m: &LogMapping) -> Option<()> {
        const ATTR_FORK: u32 = 1 << 31;
        const UNWRITTEN: u32 = 1 << 30;
        let (flags, len) = (m.flags.get(), m.len.get());
        let e = Extent {
            startoff: m.startoff.get(),
            startblock: m.startblock.get(),
            blockcount: len,
            unwritten: flags & UNWRITTEN != 0,
        };
        let inside = e.startoff <= 1 << (63 - self.g.blocklog) && len <= MAX_EXTENT_BLOCKS;
        if !inside || self.g.fsb_run(e.startblock, len).is_none() {
            return None;
        }
        let mut fork = Fork::read(self, m.owner.get(), flags & ATTR_FORK != 0)?;
        match flags & !(ATTR_FORK | UNWRITTEN) {
            1 => fork.map(self, e)?,
            2 => drop(fork.unmap(self, e.startoff..e.end())),
            _ => return None,
        }
        fork.write(self)
    }

    /// An exchange of the contents of two files (`xfs_xmi_log_format`).
    fn exchange(&mut self, item: &Item) -> Option<()> {
        const SIZES: u64 = 1 << 1;
        const WRITTEN: u64 = 1 << 2;
        const NOT_SHARED: [u64; 2] = [1 << 3, 1 << 4];
        let x = *LogExchange::at(item.header(), 0).ok()?;
        let (flags, blocks) = (x.flags.get(), x.blocks.get());
        let known = SIZES | WRITTEN | NOT_SHARED[0] | NOT_SHARED[1];
        let most = 1 << (63 - self.g.blocklog);
        let starts = x.start.map(|start| start.get());
        let inos = x.ino.map(|ino| ino.get());
        let inside = starts.iter().all(|s| *s <= most) && blocks <= most && inos[0] != inos[1];
        if flags & !known != 0 || !inside {
            return None;
        }
        for (ino, generation) in inos.iter().zip(x.generation) {
            let raw = super::read_inode(self.disk, self.g, *ino)?;
            let d = DinodeV2::at(&raw, 0).ok()?;
            let regular = FileType::from_mode(d.mode.get()) == FileType::Regular;
            if d.r#gen.get() != generation.get() || !regular || d.flags.get() & DIFLAG_REALTIME != 0
            {
                return None;
            }
        }
        let mut one = Fork::read(self, inos[0], false)?;
        let mut other = Fork::read(self, inos[1], false)?;
        // Runs from the starts on: all, or where the first file has something written.
        let mut runs = vec![(0, blocks)];
        if flags & WRITTEN != 0 {
            let within = one.extents.iter().filter(|e| !e.unwritten).map(|e| {
                let from = e.startoff.max(starts[0]);
                let to = e.end().min(starts[0] + blocks);
                (from - starts[0].min(from), to.saturating_sub(from))
            });
            runs = within.filter(|run| run.1 > 0).collect();
        }
        for (from, len) in runs {
            if self.failed {
                return None;
            }
            let ranges = starts.map(|start| start + from..start + from + len);
            let [a, b] = ranges;
            let (a, b) = (one.unmap(self, a), other.unmap(self, b));
            for (fork, extents, [from, to]) in [
                (&mut other, a, starts),
                (&mut one, b, [starts[1], starts[0]]),
            ] {
                for mut e in extents {
                    e.startoff = e.startoff - from + to;
                    fork.map(self, e)?;
                }
            }
        }
        one.write(self)?;
        other.write(self)?;
        for (i, ino) in inos.into_iter().enumerate() {
            super::with_inode(self.disk, self.g, ino, |inode| {
                let d = Dinode::at_mut(inode, 0).ok()?;
                if flags & SIZES != 0 {
                    d.v2.size.set(x.size_bytes[i].get());
                }
                if flags & NOT_SHARED[i] != 0 {
                    d.flags2.set(d.flags2.get() & !DIFLAG2_REFLINK);
                }
                Some(())
            })?;
        }
        Some(())
    }
}
