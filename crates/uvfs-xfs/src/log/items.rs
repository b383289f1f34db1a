//! What the items of committed transactions change.
//!
//! Each structure says which record it was last written after, and an item of an earlier one is
//! not applied: what is on disk is newer. Items of the same record are applied one after the other.

use super::finish::INTENTS;
use super::transactions::{Item, Transaction};
use crate::blocks::Blocks;
use crate::format::*;
use crate::geometry::Geometry;
use crate::overlay::Overlay;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::offset_of;

const SECTOR: usize = 512;
/// Sectors of a buffer, at most: the largest block, or cluster of inodes.
const MAX_SECTORS: u64 = 128;
/// Words of a buffer's map, at most.
const MAX_MAP: usize = 17;
/// Bytes that a replay may change.
const MAX_REPLAYED: u64 = 2 << 30;
/// Bytes of a logged quota record (`xfs_disk_dquot`): what a block has more is checksum and identity.
const DQUOT_LOGGED: usize = 104;
/// Log sequence number of a quota record.
const DQUOT_LSN: usize = 112;
/// No log sequence number.
const NO_LSN: u64 = u64::MAX;

const INODE: u16 = 0x123b;
const BUFFER: u16 = 0x123c;
const DQUOT: u16 = 0x123d;
const QUOTAOFF: u16 = 0x123e;
const CHUNK: u16 = 0x123f;

/// What the first pass over the log finds.
#[derive(Default)]
pub(super) struct Cancelled {
    /// Buffers whose blocks were freed: how many cancels of theirs are still to come.
    buffers: HashMap<(u64, u16), u32>,
    /// Quota types that were turned off.
    quotas: u8,
}

impl Cancelled {
    pub fn note(&mut self, transaction: &Transaction) {
        for item in &transaction.items {
            match item.kind() {
                BUFFER => {
                    if let Ok(b) = LogBuffer::at(item.header(), 0)
                        && b.flags.get() & LOG_BUFFER_CANCEL != 0
                    {
                        let key = (b.blkno.get(), b.len.get());
                        *self.buffers.entry(key).or_default() += 1;
                    }
                }
                QUOTAOFF => {
                    let flags = Le32::at(item.header(), 4).map_or(0, |f| f.get());
                    for (flag, kind) in [
                        (u32::from(UQUOTA_ACCT), DQTYPE_USER),
                        (u32::from(GQUOTA_ACCT), DQTYPE_GROUP),
                        (u32::from(PQUOTA_ACCT), DQTYPE_PROJ),
                    ] {
                        if flags & flag != 0 {
                            self.quotas |= kind;
                        }
                    }
                }
                _ => {}
            }
        }
    }

    fn has(&self, blkno: u64, len: u16) -> bool {
        self.buffers.contains_key(&(blkno, len))
    }

    fn is_passed(&mut self, key: (u64, u16)) {
        if let Some(n) = self.buffers.get_mut(&key) {
            *n -= 1;
            if *n == 0 {
                self.buffers.remove(&key);
            }
        }
    }
}

/// Applies transactions to an overlay.
pub(super) struct Applying<'a> {
    pub disk: &'a Overlay,
    /// The sizes, also of groups that the log tells of.
    pub g: Geometry,
    pub cancelled: Cancelled,
    /// The record whose transactions are being applied, and the buffers that they have changed.
    lsn: u64,
    fresh: HashSet<u64>,
    /// Intents that are not done, in the order of the log, by their number.
    pending: BTreeMap<u64, Item>,
    numbers: HashMap<(u16, u64), u64>,
    next: u64,
}

/// The place of the log sequence number and of the checksum in a block of metadata.
#[derive(Clone, Copy)]
struct Stamp {
    lsn: usize,
    crc: usize,
    uuid: usize,
}

/// Where a block of version 5 has them, by its magic number; `None` for inodes, quota records and what is not
/// metadata.
fn stamp(block: &[u8]) -> Option<Stamp> {
    let at = |lsn, crc, uuid| Some(Stamp { lsn, crc, uuid });
    let word = Be32::at(block, 0).ok()?.get();
    let short = [
        Btree::Bno,
        Btree::Cnt,
        Btree::Ino,
        Btree::Fino,
        Btree::Rmap,
        Btree::Refcount,
    ];
    if short.iter().any(|tree| tree.magic(true) == word) {
        return at(24, BTREE_SHORT_CRC_OFFSET, 32);
    }
    if word == Btree::Bmap.magic(true) {
        return at(32, BTREE_LONG_CRC_OFFSET, 40);
    }
    match word {
        AGF_MAGIC => at(offset_of!(Agf, lsn), AGF_CRC_OFFSET, offset_of!(Agf, uuid)),
        AGI_MAGIC => at(offset_of!(Agi, lsn), AGI_CRC_OFFSET, offset_of!(Agi, uuid)),
        AGFL_MAGIC => at(
            offset_of!(Agfl, lsn),
            AGFL_CRC_OFFSET,
            offset_of!(Agfl, uuid),
        ),
        SB_MAGIC => at(offset_of!(Superblock, lsn), SB_CRC_OFFSET, usize::MAX),
        SYMLINK_MAGIC => at(REMOTE_LSN_OFFSET, REMOTE_CRC_OFFSET, 16),
        DIR3_BLOCK_MAGIC | DIR3_DATA_MAGIC | DIR3_FREE_MAGIC => at(16, DIR3_DATA_CRC_OFFSET, 24),
        _ => match Be16::at(block, 8).ok()?.get() {
            DIR3_LEAF1_MAGIC | DIR3_LEAFN_MAGIC | DA3_NODE_MAGIC | ATTR3_LEAF_MAGIC => {
                at(24, DA3_CRC_OFFSET, 32)
            }
            _ => None,
        },
    }
}

/// A block that was built, with its log sequence number and checksum.
pub(super) fn stamped(mut block: Vec<u8>, lsn: u64) -> Vec<u8> {
    if let Some(s) = stamp(&block) {
        Be64::new(lsn).put(&mut block, s.lsn);
        store_crc(&mut block, s.crc);
    }
    block
}

fn is_newer(on_disk: u64, lsn: u64) -> bool {
    on_disk != 0 && on_disk != NO_LSN && on_disk > lsn
}

/// What is wrong with an item.
type Done = Result<(), String>;

impl<'a> Applying<'a> {
    pub fn new(disk: &'a Overlay, g: Geometry, cancelled: Cancelled) -> Applying<'a> {
        Applying {
            disk,
            g,
            cancelled,
            lsn: NO_LSN,
            fresh: HashSet::new(),
            pending: BTreeMap::new(),
            numbers: HashMap::new(),
            next: 0,
        }
    }

    /// Applies a transaction: buffers and new chunks first, then inodes and others, then the lists of unlinked
    /// inodes; cancels of buffers count at the end.
    pub fn apply(&mut self, t: &Transaction) -> Done {
        if self.lsn != t.lsn {
            self.lsn = t.lsn;
            self.fresh.clear();
        }
        let flags = |item: &Item| match item.kind() {
            BUFFER => LogBuffer::at(item.header(), 0).map_or(0, |b| b.flags.get()),
            _ => 0,
        };
        let class = |item: &Item| match (item.kind(), flags(item)) {
            (BUFFER, flags) if flags & LOG_BUFFER_CANCEL != 0 => 3,
            (BUFFER, flags) if flags & LOG_BUFFER_INODES != 0 => 2,
            (BUFFER | CHUNK, _) => 0,
            _ => 1,
        };
        for wanted in 0..4 {
            for item in t.items.iter().filter(|item| class(item) == wanted) {
                if self.disk.changed() > MAX_REPLAYED {
                    let most = MAX_REPLAYED >> 30;
                    return Err(format!("it changes more than {most} GiB"));
                }
                self.item(item)?;
            }
        }
        Ok(())
    }

    /// The intents that are not done, in the order of the log.
    pub fn pending(self) -> Vec<Item> {
        self.pending.into_values().collect()
    }

    fn item(&mut self, item: &Item) -> Done {
        let short = |what: &str| format!("{what} is cut off");
        match item.kind() {
            BUFFER => self.buffer(item),
            INODE => self.inode(item),
            DQUOT => self.dquot(item),
            QUOTAOFF => Ok(()),
            CHUNK => self.chunk(item),
            kind => {
                let header = LogItemHeader::at(item.header(), 0);
                let id = header.map_err(|_| short("an intent"))?.id.get();
                for (intent, done, _) in INTENTS {
                    if kind == intent {
                        self.pending.insert(self.next, item.clone());
                        self.numbers.insert((intent, id), self.next);
                        self.next += 1;
                        return Ok(());
                    }
                    if kind == done {
                        if let Some(number) = self.numbers.remove(&(intent, id)) {
                            self.pending.remove(&number);
                        }
                        return Ok(());
                    }
                }
                Err(format!(
                    "an item has the type {kind:#x}, which is not known"
                ))
            }
        }
    }

    /// Reads the buffer of an item.
    fn read(&self, blkno: u64, sectors: u64) -> Result<Vec<u8>, String> {
        let last = blkno
            .checked_add(sectors)
            .filter(|end| *end <= self.disk.size() / 512);
        if last.is_none() || sectors == 0 || sectors > MAX_SECTORS {
            return Err(format!("a buffer of {sectors} sectors at sector {blkno}"));
        }
        let read = self.disk.get(blkno * 512, sectors as usize * SECTOR);
        read.map_err(|e| format!("reading {sectors} sectors at sector {blkno}: {e}"))
    }

    fn buffer(&mut self, item: &Item) -> Done {
        let b = *LogBuffer::at(item.header(), 0).map_err(|_| "a buffer's item is cut off")?;
        let (blkno, len, flags) = (b.blkno.get(), b.len.get(), b.flags.get());
        if flags & LOG_BUFFER_CANCEL != 0 {
            self.cancelled.is_passed((blkno, len));
            return Ok(());
        }
        if self.cancelled.has(blkno, len) {
            return Ok(());
        }
        let mut buffer = self.read(blkno, len.into())?;
        if let Some(s) = stamp(&buffer)
            && self.is_ours(&buffer, s)
            && !self.fresh.contains(&blkno)
            && let Ok(lsn) = Be64::at(&buffer, s.lsn)
            && (is_newer(lsn.get(), self.lsn) || lsn.get() == self.lsn)
            // A replay that was cut off may have written a part of the block.
            && check_crc(&buffer, s.crc).is_ok()
        {
            return Ok(());
        }
        let inodes = flags & LOG_BUFFER_INODES != 0;
        for (place, part) in regions(item, &b, buffer.len())? {
            match inodes {
                true => self.unlinked(&mut buffer, place, part)?,
                false => buffer[place..place + part.len()].copy_from_slice(part),
            }
        }
        if !inodes
            && let Some(s) = stamp(&buffer)
            && self.is_whole(&buffer)
        {
            Be64::new(self.lsn).put(&mut buffer, s.lsn);
            store_crc(&mut buffer, s.crc);
            self.fresh.insert(blkno);
        }
        self.disk.write(blkno * 512, &buffer);
        // The file system may have grown.
        if blkno == 0
            && let Some((g, _)) = super::superblock(self.disk)
        {
            self.g = g;
        }
        Ok(())
    }

    /// Whether a block is of this file system, and not of one that was there before.
    fn is_ours(&self, block: &[u8], s: Stamp) -> bool {
        match s.uuid {
            // The superblock has its UUID under several names; there is none but this.
            usize::MAX => true,
            at => block.get(at..at + 16) == Some(&self.g.meta_uuid[..]),
        }
    }

    /// Whether a buffer is a whole directory block, or no part of one.
    fn is_whole(&self, block: &[u8]) -> bool {
        let word = Be32::at(block, 0).map_or(0, |w| w.get());
        let half = Be16::at(block, 8).map_or(0, |w| w.get());
        let dir = matches!(word, DIR3_BLOCK_MAGIC | DIR3_DATA_MAGIC | DIR3_FREE_MAGIC)
            || matches!(half, DIR3_LEAF1_MAGIC | DIR3_LEAFN_MAGIC);
        !dir || block.len() == self.g.dir_block_size as usize
    }

    /// Takes the next inodes on the lists of unlinked ones from a logged part of a buffer of inodes.
    fn unlinked(&self, buffer: &mut [u8], place: usize, part: &[u8]) -> Done {
        let size = self.g.inode_size as usize;
        let field = offset_of!(DinodeV2, next_unlinked);
        for inode in buffer.chunks_exact_mut(size).enumerate() {
            let (i, inode) = inode;
            let at = i * size + field;
            let Some(next) = at.checked_sub(place).and_then(|at| part.get(at..at + 4)) else {
                continue;
            };
            if next == [0; 4] {
                return Err("a list of unlinked inodes leads to inode 0".into());
            }
            inode[field..field + 4].copy_from_slice(next);
            store_crc(inode, DINODE_CRC_OFFSET);
        }
        Ok(())
    }

    fn inode(&mut self, item: &Item) -> Done {
        let f = *LogInode::at(item.header(), 0).map_err(|_| "an inode's item is cut off")?;
        let (ino, blkno, len) = (f.ino.get(), f.blkno.get(), f.len.get());
        let wrong = |why: &str| Err(format!("inode {ino}: {why}"));
        let sectors = u16::try_from(len).unwrap_or(u16::MAX);
        if self.cancelled.has(blkno, sectors) {
            return Ok(());
        }
        let mut buffer = self.read(blkno, sectors.into())?;
        let (size, at) = (self.g.inode_size as usize, f.boffset.get() as usize);
        if !at.is_multiple_of(size) || at + size > buffer.len() {
            return wrong("it lies outside its buffer");
        }
        let inode = &mut buffer[at..at + size];
        if Be16::at(inode, 0).is_ok_and(|m| m.get() != DINODE_MAGIC) {
            return wrong("there is no inode in its place");
        }
        let core = logged_core(item.region(1));
        let is_core = |d: &DinodeV2| d.magic.get() == DINODE_MAGIC && d.version == 3;
        let Some(core) = core.filter(|core| is_core(&core.v2)) else {
            return wrong("what was logged of it makes no sense");
        };
        let on_disk = Dinode::at(inode, 0).map_or(0, |d| d.lsn.get());
        if is_newer(on_disk, self.lsn) && check_crc(inode, DINODE_CRC_OFFSET).is_ok() {
            return Ok(());
        }
        if f.fields.get() & LOG_INODE_OWNER != 0 {
            return wrong("its blocks were another's before: this cannot be replayed yet");
        }
        put_core(inode, core, self.lsn);
        let start = DINODE_V3_SIZE;
        let attr = match core.v2.forkoff {
            0 => size,
            n => start + usize::from(n) * 8,
        };
        if attr > size {
            return wrong("its attributes lie outside of it");
        }
        let fields = f.fields.get();
        if fields & LOG_INODE_DEV != 0 {
            Be32::new(f.rdev.get()).put(inode, start);
        }
        let mut next = 2;
        for (names, fork) in [(LOG_INODE_DATA, start..attr), (LOG_INODE_ATTR, attr..size)] {
            let [_, _, root] = names;
            let named = names.iter().fold(0, |all, name| all | name) & fields;
            if named == 0 {
                continue;
            }
            let region = item.region(next);
            next += 1;
            let fork = &mut inode[fork];
            match named & root != 0 {
                true => put_root(fork, region)
                    .ok_or_else(|| format!("inode {ino}: the root of its tree makes no sense"))?,
                false => {
                    // A region ends at a multiple of four bytes, or in a kernel's log at one of eight.
                    let n = region.len().min(fork.len());
                    fork[..n].copy_from_slice(&region[..n]);
                }
            }
        }
        store_crc(inode, DINODE_CRC_OFFSET);
        self.disk.write(blkno * 512, &buffer);
        Ok(())
    }

    /// Initialises the inodes of a new chunk.
    fn chunk(&mut self, item: &Item) -> Done {
        let c = *LogInodeChunk::at(item.header(), 0).map_err(|_| "a chunk's item is cut off")?;
        let g = &self.g;
        let (agno, agbno, length) = (c.ag.get(), c.agbno.get(), c.length.get());
        let inside = agbno
            .checked_add(length)
            .is_some_and(|end| end <= g.ag_blocks(agno));
        let most = INODES_PER_CHUNK.max(1 << g.inopblog);
        let count = c.count.get();
        let fits = length > 0 && u64::from(count) == u64::from(length) << g.inopblog;
        if !inside || agbno == 0 || c.isize.get() != g.inode_size || count > most || !fits {
            return Err(format!(
                "{count} new inodes at block {agbno} of group {agno}"
            ));
        }
        let cluster = g.cluster_blocks;
        let daddr = |agbno| g.daddr(crate::geometry::AgBlock { agno, agbno });
        let sectors = (cluster << (g.blocklog - 9)) as u16;
        let mut clusters = (0..length).step_by(cluster as usize);
        if clusters.any(|i| self.cancelled.has(daddr(agbno + i), sectors)) {
            return Ok(());
        }
        let size = g.inode_size as usize;
        let first = g.ino(agno, agbno << g.inopblog);
        let mut block = vec![0; (length as usize) << g.blocklog];
        for (inode, ino) in block.chunks_exact_mut(size).zip(first..) {
            Dinode::free(g.meta_uuid, ino, c.r#gen.get()).put(inode, 0);
            store_crc(inode, DINODE_CRC_OFFSET);
        }
        self.disk.write(daddr(agbno) * 512, &block);
        Ok(())
    }

    fn dquot(&mut self, item: &Item) -> Done {
        let f = *LogDquot::at(item.header(), 0).map_err(|_| "a quota record's item is cut off")?;
        let (id, logged) = (f.id.get(), item.region(1));
        let kind = logged.get(offset_of!(Dquot, r#type)).copied();
        let Some(kind) = kind.filter(|_| logged.len() >= DQUOT_LOGGED) else {
            return Err(format!("the quota record of {id} is cut off"));
        };
        if self.cancelled.quotas & kind != 0 {
            return Ok(());
        }
        let blkno = f.blkno.get();
        let sectors = u64::from(f.len.get()) << (self.g.blocklog - 9);
        let mut buffer = self.read(blkno, sectors)?;
        let at = f.boffset.get() as usize;
        let Some(record) = buffer.get_mut(at..at + Dquot::SIZE) else {
            return Err(format!("the quota record of {id} lies outside its block"));
        };
        let lsn = Be64::at(record, DQUOT_LSN).map_or(0, |lsn| lsn.get());
        if is_newer(lsn, self.lsn) || lsn == self.lsn {
            return Ok(());
        }
        record[..DQUOT_LOGGED].copy_from_slice(&logged[..DQUOT_LOGGED]);
        store_crc(record, DQUOT_CRC_OFFSET);
        self.disk.write(blkno * 512, &buffer);
        Ok(())
    }
}

/// The logged parts of a buffer of `len` bytes, and where they go.
fn regions<'i>(
    item: &'i Item,
    b: &LogBuffer,
    len: usize,
) -> Result<Vec<(usize, &'i [u8])>, String> {
    let words = b.map_size.get() as usize;
    let wrong = || {
        format!(
            "the map of the buffer at sector {} makes no sense",
            b.blkno.get()
        )
    };
    if words > MAX_MAP {
        return Err(wrong());
    }
    let map = Le32::slice_at(item.header(), LogBuffer::SIZE, words).map_err(|_| wrong())?;
    let is_set = |bit: usize| {
        map.get(bit / 32)
            .is_some_and(|w| w.get() >> (bit % 32) & 1 != 0)
    };
    let bits = words * 32;
    let (mut out, mut bit, mut next) = (Vec::new(), 0, 1);
    while bit < bits {
        if !is_set(bit) {
            bit += 1;
            continue;
        }
        let run = (bit..bits).take_while(|bit| is_set(*bit)).count();
        let part = item.region(next);
        // A run of chunks may have been logged in several regions.
        let n = run.min(part.len() / LOG_BUFFER_CHUNK);
        let (start, bytes) = (bit * LOG_BUFFER_CHUNK, n * LOG_BUFFER_CHUNK);
        if n == 0 || start + bytes > len {
            return Err(wrong());
        }
        out.push((start, &part[..bytes]));
        next += 1;
        bit += n;
    }
    Ok(out)
}

/// A logged core (`xfs_log_dinode`): it has the fields of [`Dinode`] in the machine's byte order.
fn logged_core(logged: &[u8]) -> Option<Dinode> {
    let mut bytes = logged.get(..Dinode::SIZE)?.to_vec();
    // The first field of `Dinode` stands for those of `DinodeV2`.
    let fields = DinodeV2::FIELDS.iter().chain(&Dinode::FIELDS[1..]);
    for field in fields.filter(|f| matches!(f.len, 2 | 4 | 8)) {
        bytes[field.at..field.at + field.len].reverse();
    }
    Dinode::at(&bytes, 0).ok().copied()
}

/// Writes a logged core. The checksum is the caller's.
fn put_core(inode: &mut [u8], mut core: Dinode, lsn: u64) {
    let Ok(to) = Dinode::at_mut(inode, 0) else {
        return;
    };
    let (d, flags) = (&mut core.v2, core.flags2.get());
    if flags & DIFLAG2_BIGTIME == 0 {
        // Then a time is two words, each in the machine's byte order.
        for time in [&mut d.atime, &mut d.mtime, &mut d.ctime, &mut core.crtime] {
            time.set(time.get().rotate_left(32));
        }
    }
    if flags & DIFLAG2_NREXT64 == 0 {
        d.big_nextents.set(0);
    }
    // The inode's buffer has it.
    d.next_unlinked = to.v2.next_unlinked;
    core.lsn.set(lsn);
    core.pad2 = [0; 12];
    *to = core;
}

/// Writes the root of a fork's tree, which was logged as the block that it is in memory.
fn put_root(fork: &mut [u8], logged: &[u8]) -> Option<()> {
    let head = BtreeLong::SIZE + BtreeLongCrc::SIZE;
    let block = BtreeLong::at(logged, 0).ok()?;
    let (level, n) = (block.level.get(), usize::from(block.numrecs.get()));
    let room = logged.len().checked_sub(head)? / 16;
    let most = fork.len().checked_sub(4)? / 16;
    if level == 0 || n > room || n > most {
        return None;
    }
    Be16::new(level).put(fork, 0);
    Be16::new(n as u16).put(fork, 2);
    fork[4..4 + n * 8].copy_from_slice(logged.get(head..head + n * 8)?);
    let (from, to) = (head + room * 8, 4 + most * 8);
    fork[to..to + n * 8].copy_from_slice(logged.get(from..from + n * 8)?);
    Some(())
}
