//! Directories: lookup by hash, and listing.
//!
//! A directory is one of: short form (entries inside the inode), block (entries and hash index
//! in one block), leaf (data blocks and one index block), node (data blocks and an index tree).
//! The magic numbers of its blocks tell the last three apart.

use crate::blocks::Block;
use crate::error::{Error, Result};
use crate::format::*;
use crate::geometry::Geometry;
use crate::inode::{Fork, Inode};
use crate::verifier;
use crate::volume::Volume;
use smallvec::SmallVec;

/// Neighbouring index blocks that may hold nothing but one hash before it counts as a loop.
/// Collisions beyond this (hundreds of thousands of names with one hash) are refused.
const MAX_EQUAL_BLOCKS: u32 = 4096;

/// Directory blocks that a listing reads ahead.
const READAHEAD_BLOCKS: usize = 16;

const LEAF: &str = "directory leaf block";
const NODE: &str = "directory node block";
const DATA: &str = "directory data block";

/// One entry of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// Inode.
    pub ino: u64,
    /// Name.
    pub name: &'a [u8],
    /// Type; [`FileType::Unknown`] if the file system does not record it.
    pub file_type: FileType,
    /// Where a listing goes on after this entry: for [`Volume::readdir`]. It grows from entry to
    /// entry and an entry keeps it for as long as it exists. It is less than 2^32.
    pub next: u64,
}

impl Volume {
    /// The inode of the entry `name` of a directory; [`Error::NotFound`] if there is none.
    pub fn lookup(&self, dir: &Inode, name: &[u8]) -> Result<u64> {
        if !dir.is_dir() {
            return Err(Error::NotDirectory(dir.ino));
        }
        let g = self.geometry();
        if dir.fork_format(Fork::Data) == Some(FORMAT_LOCAL) {
            if name == b"." {
                return Ok(dir.ino);
            }
            let mut found = None;
            for_each_shortform(dir, g, &mut |e| {
                if g.same_name(e.name, name) {
                    found = Some(e.ino);
                }
                found.is_none()
            })?;
            return found.ok_or(Error::NotFound("entry"));
        }
        let hash = g.hash_name(name);
        let first = self
            .dir_data_block(dir, 0)?
            .ok_or_else(|| hole(dir, DATA, 0))?;
        if is_single(&first, g.features.crc) {
            let (_, index) = dir_block_entries(&first).map_err(|f| dir.fault(DATA, f))?;
            let found = self.find(dir, index, hash, name, Some(&first))?;
            return found.ok_or(Error::NotFound("entry"));
        }
        self.lookup_tree(dir, name, hash)
    }

    /// Looks `name` up through the leaf, or the tree of nodes and leaves.
    fn lookup_tree(&self, dir: &Inode, name: &[u8], hash: u32) -> Result<u64> {
        let g = self.geometry();
        let crc = g.features.crc;
        let bad = |what, f| dir.fault(what, f);
        let mut number = (DIR2_LEAF_OFFSET >> g.blocklog) as u32;
        let mut descent = Descent::default();
        let mut block = self.dir_index_block(dir, number)?;
        // Down to the leaf: the level falls by one at each step.
        while da_block_kind(&block, crc) == Some(DA_NODE_MAGIC) {
            let (counts, entries) = da_node_entries(&block, crc).map_err(|f| bad(NODE, f))?;
            let level = counts.level.get();
            descent.node(level).map_err(|f| bad(NODE, f))?;
            let i = entries.partition_point(|e| e.hashval.get() < hash);
            let Some(e) = entries.get(i) else {
                return Err(Error::NotFound("entry"));
            };
            number = e.before.get();
            block = self.dir_index_block(dir, number)?;
        }
        descent.leaf().map_err(|f| bad(NODE, f))?;
        // Along the leaves, for as long as they hold this hash.
        for _ in 0..MAX_EQUAL_BLOCKS {
            let (_, index) = dir_leaf_entries(&block, crc).map_err(|f| bad(LEAF, f))?;
            if let Some(ino) = self.find(dir, index, hash, name, None)? {
                return Ok(ino);
            }
            let forw = DaBlockInfo::at(&block, 0)
                .map_err(|f| bad(LEAF, f))?
                .forw
                .get();
            let past = index.last().is_some_and(|e| e.hashval.get() > hash);
            if past || forw == 0 || da_block_kind(&block, crc) == Some(DIR2_LEAF1_MAGIC) {
                return Err(Error::NotFound("entry"));
            }
            block = self.dir_index_block(dir, forw)?;
            if da_block_kind(&block, crc) != Some(DIR2_LEAFN_MAGIC) {
                return Err(bad(LEAF, Fault::field("forw", "the next leaf", forw)));
            }
        }
        Err(bad(LEAF, Fault::field("forw", "leaves that end", number)))
    }

    /// The inode of the entry `name` among those that an index has for `hash`. The entries are in the directory's
    /// `only` block, if it has but one.
    fn find(
        &self,
        dir: &Inode,
        index: &[Dir2LeafEntry],
        hash: u32,
        name: &[u8],
        only: Option<&Block>,
    ) -> Result<Option<u64>> {
        let g = self.geometry();
        for e in equal_run(index, hash) {
            let dataptr = e.address.get();
            if dataptr == DIR2_NULL_DATAPTR {
                continue;
            }
            let address = u64::from(dataptr) * DIR2_DATA_ALIGN as u64;
            let size = u64::from(g.dir_block_size);
            let (db, offset) = (address / size, (address % size) as usize);
            let fault = || {
                dir.fault(
                    LEAF,
                    Fault::field("address", "an entry in a data block", dataptr),
                )
            };
            let header = dir_data_header_len(g.features.crc);
            if offset < header || (only.is_some() && db != 0) {
                return Err(fault());
            }
            let read = |only: Option<&Block>| match only {
                Some(block) => Ok(block.clone()),
                None => self
                    .dir_data_block(dir, db)?
                    .ok_or_else(|| hole(dir, DATA, db)),
            };
            let block = read(only)?;
            let bad = |f| dir.fault(DATA, f);
            let end = data_end(&block, g.features.crc).map_err(bad)?;
            let (_, entry) = data_record(&block, offset, end, db, g, true).map_err(bad)?;
            let entry = entry.ok_or_else(fault)?;
            if g.same_name(entry.name, name) {
                return Ok(Some(entry.ino));
            }
        }
        Ok(None)
    }

    /// Lists a directory from `start` (0, or [`DirEntry::next`] of an earlier entry), "." and ".."
    /// included, until `visit` gives `false`.
    pub fn readdir(
        &self,
        dir: &Inode,
        start: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        if !dir.is_dir() {
            return Err(Error::NotDirectory(dir.ino));
        }
        let g = self.geometry();
        if dir.fork_format(Fork::Data) == Some(FORMAT_LOCAL) {
            return for_each_shortform(dir, g, &mut |e| e.next <= start || visit(e));
        }
        let dir_log = g.dir_block_size.trailing_zeros();
        let per_block = 1u64 << g.dirblklog;
        // Positions are below 2^32; beyond that there is nothing.
        let mut db = (start.min(1 << 32) * DIR2_DATA_ALIGN as u64) >> dir_log;
        let limit = DIR2_LEAF_OFFSET >> dir_log;
        while db < limit {
            // The directory blocks that are there from here on; holes are of any length. They may be
            // all over the disk, so that many are read ahead at once.
            let begins = db.is_multiple_of(READAHEAD_BLOCKS as u64 / 2);
            let mut there: SmallVec<[u64; READAHEAD_BLOCKS]> = SmallVec::new();
            self.map(
                dir,
                Fork::Data,
                db * per_block,
                limit * per_block,
                &mut |e| {
                    let last = (e.startoff + u64::from(e.blockcount) - 1) / per_block;
                    let first = (e.startoff / per_block).max(there.last().map_or(db, |l| l + 1));
                    there.extend((first..=last).take(READAHEAD_BLOCKS - there.len()));
                    Ok(begins && there.len() < READAHEAD_BLOCKS)
                },
            )?;
            let Some(next) = there.first() else { break };
            db = *next;
            for db in there.iter().skip(1).filter(|_| begins) {
                let start = db * per_block;
                let e = self.fork_extents(DATA, dir, Fork::Data, start, per_block as u32)?;
                if let Some(e) = e {
                    self.blocks().readahead(&e);
                }
            }
            let block = self
                .dir_data_block(dir, db)?
                .ok_or_else(|| hole(dir, DATA, db))?;
            let end = data_end(&block, g.features.crc).map_err(|f| dir.fault(DATA, f))?;
            for record in records(&block, end, db, g) {
                let record = record.map_err(|f| dir.fault(DATA, f))?;
                if let Some(e) = record.entry
                    && e.next > start
                    && !visit(e)
                {
                    return Ok(());
                }
            }
            db += 1;
        }
        Ok(())
    }

    /// Reads directory block `db` (counted in directory blocks); `None` if it is a hole.
    fn dir_data_block(&self, dir: &Inode, db: u64) -> Result<Option<Block>> {
        let per_block = 1u32 << self.geometry().dirblklog;
        let start = db * u64::from(per_block);
        let kind = verifier::DIR_DATA;
        self.read_fork_block(
            DATA,
            dir,
            Fork::Data,
            start,
            per_block,
            kind,
            &|b, ident| check_dir_data(b, db == 0 && is_single(b, ident.crc), ident).map(|_| ()),
        )
    }

    /// Reads a leaf or node block, `number` counted in file system blocks.
    fn dir_index_block(&self, dir: &Inode, number: u32) -> Result<Block> {
        let g = self.geometry();
        let start = u64::from(number);
        let range = DIR2_LEAF_OFFSET >> g.blocklog..DIR2_FREE_OFFSET >> g.blocklog;
        if !range.contains(&start) {
            let expected = "a block of the directory's index";
            return Err(dir.fault(NODE, Fault::field("before", expected, number)));
        }
        let what = "directory index block";
        let block = self.read_fork_block(
            what,
            dir,
            Fork::Data,
            start,
            1 << g.dirblklog,
            verifier::DA,
            &|b, ident| {
                match da_block_kind(b, ident.crc) {
                    Some(DIR2_LEAF1_MAGIC | DIR2_LEAFN_MAGIC | DA_NODE_MAGIC) => {}
                    _ => {
                        let found = DaBlockInfo::at(b, 0)?.magic.get();
                        let expected = if ident.crc {
                            DIR3_LEAFN_MAGIC
                        } else {
                            DIR2_LEAFN_MAGIC
                        };
                        return Err(Fault::Magic {
                            expected: expected.into(),
                            found: found.into(),
                        });
                    }
                }
                check_da_info(b, ident).map(|_| ())
            },
        )?;
        let block = block.ok_or_else(|| hole(dir, what, start))?;
        // A cache may have verified this block as something else.
        match da_block_kind(&block, g.features.crc) {
            Some(DIR2_LEAF1_MAGIC | DIR2_LEAFN_MAGIC | DA_NODE_MAGIC) => Ok(block),
            _ => Err(dir.fault(what, Fault::field("magic", "a leaf or node", start))),
        }
    }
}

fn hole(dir: &Inode, what: &'static str, block: u64) -> Error {
    dir.fault(what, Fault::field("mapping", "a block, not a hole", block))
}

pub(crate) fn is_single(block: &[u8], crc: bool) -> bool {
    let magic = if crc {
        DIR3_BLOCK_MAGIC
    } else {
        DIR2_BLOCK_MAGIC
    };
    Be32::at(block, 0).is_ok_and(|m| m.get() == magic)
}

/// The entries of a hash-ordered index that have `hash`.
fn equal_run(index: &[Dir2LeafEntry], hash: u32) -> impl Iterator<Item = &Dir2LeafEntry> {
    let first = index.partition_point(|e| e.hashval.get() < hash);
    index[first..]
        .iter()
        .take_while(move |e| e.hashval.get() == hash)
}

/// Where the entries of a data block end: at its end, or where a single block's index begins.
pub(crate) fn data_end(block: &[u8], crc: bool) -> Result<usize, Fault> {
    if is_single(block, crc) {
        let (_, index) = dir_block_entries(block)?;
        Ok(block.len() - Dir2BlockTail::SIZE - size_of_val(index))
    } else {
        Ok(block.len())
    }
}

/// The directory blocks in `extents`, by number, once each: a directory block is of `per` file blocks, and may be made
/// of several extents.
pub(crate) fn dir_blocks(extents: &[Extent], per: u64) -> impl Iterator<Item = u64> {
    let mut previous = None;
    let blocks = move |e: &Extent| {
        let last = e.startoff + u64::from(e.blockcount) - 1;
        e.startoff / per..=last / per
    };
    let all = extents.iter().flat_map(blocks);
    all.filter(move |db| previous.replace(*db) != Some(*db))
}

/// A record of a data block: an entry, or a hole.
pub(crate) struct Record<'a> {
    pub offset: usize,
    pub len: usize,
    pub entry: Option<DirEntry<'a>>,
}

/// The records of directory block `db` up to byte `end`. After a fault it goes on with the same record if only the
/// tag is wrong, or with the next bytes that look like a record.
pub(crate) fn records<'a>(
    block: &'a [u8],
    end: usize,
    db: u64,
    g: &'a Geometry,
) -> impl Iterator<Item = Result<Record<'a>, Fault>> {
    let (mut offset, mut fault) = (dir_data_header_len(g.features.crc), false);
    std::iter::from_fn(move || {
        let mut found = None;
        if std::mem::take(&mut fault) {
            found = untagged(block, offset, end, db, g);
            offset += if found.is_none() { DIR2_DATA_ALIGN } else { 0 };
        }
        if offset >= end {
            return None;
        }
        let read = found.map_or_else(|| data_record(block, offset, end, db, g, true), Ok);
        let record = read.map(|(len, entry)| Record { offset, len, entry });
        match &record {
            Ok(r) => offset += r.len,
            Err(_) => fault = true,
        }
        Some(record)
    })
}

/// An entry whose tag is wrong, but after which the next record begins.
fn untagged<'a>(
    block: &'a [u8],
    offset: usize,
    end: usize,
    db: u64,
    g: &Geometry,
) -> Option<(usize, Option<DirEntry<'a>>)> {
    let (len, entry) = data_record(block, offset, end, db, g, false).ok()?;
    FileType::from_ftype(*block.get(offset + Dir2DataEntry::SIZE + entry?.name.len())?)?;
    let next = offset + len;
    (next == end || data_record(block, next, end, db, g, true).is_ok()).then_some((len, entry))
}

/// The record at `offset` of a data block whose records end at `end`: its length, and the entry
/// if it is one and not a hole. If not `tagged`, an entry's tag may be anything.
pub(crate) fn data_record<'a>(
    block: &'a [u8],
    offset: usize,
    end: usize,
    db: u64,
    g: &Geometry,
    tagged: bool,
) -> Result<(usize, Option<DirEntry<'a>>), Fault> {
    let records = &block[..end];
    if Be16::at(records, offset)?.get() == DIR2_DATA_FREE_TAG {
        let u = Dir2DataUnused::at(records, offset)?;
        let len = usize::from(u.length.get());
        if len == 0 || !len.is_multiple_of(DIR2_DATA_ALIGN) || offset + len > end {
            return Err(Fault::field(
                "length",
                "a hole inside the block",
                u.length.get(),
            ));
        }
        return Ok((len, None));
    }
    let e = Dir2DataEntry::at(records, offset)?;
    let namelen = usize::from(e.namelen);
    let len = dir_entry_len(namelen, g.features.ftype);
    if namelen == 0 || offset + len > end {
        return Err(Fault::field(
            "namelen",
            "a name inside the block",
            e.namelen,
        ));
    }
    let tag = Be16::at(records, offset + len - 2)?.get();
    if tagged && usize::from(tag) != offset {
        return Err(Fault::field("tag", "the entry's own offset", tag));
    }
    let name_at = offset + Dir2DataEntry::SIZE;
    let name = &records[name_at..name_at + namelen];
    check_name(name)?;
    let ino = check_inumber(e.inumber.get(), g)?;
    let file_type = match g.features.ftype {
        true => FileType::from_ftype(records[name_at + namelen]).unwrap_or_default(),
        false => FileType::Unknown,
    };
    let dataptr = (db * u64::from(g.dir_block_size) + offset as u64) / DIR2_DATA_ALIGN as u64;
    Ok((
        len,
        Some(DirEntry {
            ino,
            name,
            file_type,
            next: dataptr + 1,
        }),
    ))
}

/// No name has a slash or a zero byte in it; a program that trusted one could be led astray.
fn check_name(name: &[u8]) -> Result<(), Fault> {
    match name.iter().find(|b| matches!(b, b'/' | 0)) {
        Some(b) => Err(Fault::field("name", "no slash and no zero byte", *b)),
        None => Ok(()),
    }
}

fn check_inumber(ino: u64, g: &Geometry) -> Result<u64, Fault> {
    let outside = || Fault::field("inumber", "an inode inside the file system", ino);
    g.inode(ino).map(|_| ino).ok_or_else(outside)
}

/// An entry inside an inode, as it is stored.
pub(crate) struct ShortEntry<'a> {
    pub name: &'a [u8],
    pub ino: u64,
    /// The byte of its type, 0 without that feature.
    pub ftype: u8,
    /// Where it would be in a block.
    pub offset: usize,
    /// Where its bytes end in the inode.
    pub end: usize,
}

/// The parent that a short-form directory names, and its entries, with inode numbers of eight bytes or four: as many
/// entries as are asked for, whatever the header says. After a fault there is only the same fault.
pub(crate) fn short_entries<'a>(
    data: &'a [u8],
    wide: bool,
    g: &Geometry,
) -> Result<(u64, impl Iterator<Item = Result<ShortEntry<'a>, Fault>>), Fault> {
    let ftype = g.features.ftype;
    let number = move |at: usize| match wide {
        true => Be64::at(data, at).map(|v| v.get()),
        false => Be32::at(data, at).map(|v| v.get().into()),
    };
    let mut at = short_header_len(wide);
    let entries = std::iter::repeat_with(move || {
        let e = Dir2SfEntry::at(data, at)?;
        let name_at = at + Dir2SfEntry::SIZE;
        let name_end = name_at + usize::from(e.namelen);
        let ino_at = name_end + usize::from(ftype);
        let ino = number(ino_at)?;
        at = ino_at + if wide { 8 } else { 4 };
        Ok(ShortEntry {
            name: &data[name_at..name_end],
            ino,
            ftype: if ftype { data[name_end] } else { 0 },
            offset: e.offset.get().into(),
            end: at,
        })
    });
    Ok((number(Dir2SfHeader::SIZE)?, entries))
}

/// Bytes of the header of a short-form directory, the parent's number included.
pub(crate) fn short_header_len(wide: bool) -> usize {
    Dir2SfHeader::SIZE + if wide { 8 } else { 4 }
}

/// Visits the entries of a short-form directory, "." and ".." first, until `visit` gives `false`.
/// Positions are those that the entries would have in a block.
fn for_each_shortform(
    dir: &Inode,
    g: &Geometry,
    visit: &mut dyn FnMut(DirEntry<'_>) -> bool,
) -> Result<()> {
    const WHAT: &str = "short-form directory";
    let bad = |f| dir.fault(WHAT, f);
    let data = dir.local_data();
    let h = Dir2SfHeader::at(data, 0).map_err(bad)?;
    let (parent, entries) = short_entries(data, h.i8count != 0, g).map_err(bad)?;
    let parent = check_inumber(parent, g).map_err(bad)?;
    let next = |offset: usize| (offset / DIR2_DATA_ALIGN) as u64 + 1;
    let dot = dir_data_header_len(g.features.crc);
    let dotdot = dot + dir_entry_len(1, g.features.ftype);
    let file_type = if g.features.ftype {
        FileType::Directory
    } else {
        FileType::Unknown
    };
    if !visit(DirEntry {
        ino: dir.ino,
        name: b".",
        file_type,
        next: next(dot),
    }) || !visit(DirEntry {
        ino: parent,
        name: b"..",
        file_type,
        next: next(dotdot),
    }) {
        return Ok(());
    }
    let mut least = dotdot + dir_entry_len(2, g.features.ftype);
    for e in entries.take(h.count.into()) {
        let e = e.map_err(bad)?;
        if e.name.is_empty() {
            return Err(bad(Fault::field("namelen", "at least 1", 0u64)));
        }
        if e.offset < least || !e.offset.is_multiple_of(DIR2_DATA_ALIGN) {
            let found = e.offset as u64;
            return Err(bad(Fault::field("offset", "after the entry before", found)));
        }
        least = e.offset + dir_entry_len(e.name.len(), g.features.ftype);
        check_name(e.name).map_err(bad)?;
        let entry = DirEntry {
            ino: check_inumber(e.ino, g).map_err(bad)?,
            name: e.name,
            file_type: FileType::from_ftype(e.ftype).unwrap_or_default(),
            next: next(e.offset),
        };
        if !visit(entry) {
            break;
        }
    }
    Ok(())
}
