//! Directories: lookup by hash, and listing.
//!
//! A directory is one of: short form (entries inside the inode), block (entries and hash index
//! in one block), leaf (data blocks and one index block), node (data blocks and an index tree).
//! The magic numbers of its blocks tell the last three apart.

use super::da::{DaTree, MAX_EQUAL_BLOCKS};
use crate::blocks::Block;
use crate::error::{Error, Result};
use crate::format::*;
use crate::geometry::Geometry;
use crate::read::inode::{Fork, ForkRange, Inode};
use crate::read::verifier;
use crate::read::volume::Volume;
use crate::walk::dir::{
    DirEntry, check_inumber, check_name, data_end, data_record, is_single, records, short_entries,
};
use smallvec::SmallVec;

/// Directory blocks that a listing reads ahead.
const READAHEAD_BLOCKS: usize = 16;

const LEAF: &str = "directory leaf block";
const DATA: &str = "directory data block";

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
        let first = self.dir_data_block(dir, 0)?;
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
        let tree = DaTree {
            volume: self,
            inode: dir,
            fork: Fork::Data,
        };
        let root = g.dir_index().start as u32;
        let mut leaf = tree.descend(root, Some(hash))?;
        // Along the leaves, for as long as they hold this hash.
        for _ in 0..=MAX_EQUAL_BLOCKS {
            let block = leaf.ok_or(Error::NotFound("entry"))?;
            let (_, index) = dir_leaf_entries(&block, crc).map_err(|f| dir.fault(LEAF, f))?;
            if let Some(ino) = self.find(dir, index, hash, name, None)? {
                return Ok(ino);
            }
            let past = index.last().is_some_and(|e| e.hashval.get() > hash);
            leaf = match past || da_block_kind(&block, crc) == Some(DIR2_LEAF1_MAGIC) {
                true => None,
                false => tree.next(&block, DIR2_LEAFN_MAGIC)?,
            };
        }
        Err(dir.wrong(LEAF, "forw", "leaves that end", root))
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
            let (db, offset) = g.dir_entry(dataptr);
            let fault = || dir.wrong(LEAF, "address", "an entry in a data block", dataptr);
            let header = dir_data_header_len(g.features.crc);
            if offset < header || (only.is_some() && db != 0) {
                return Err(fault());
            }
            let block = match only {
                Some(block) => block.clone(),
                None => self.dir_data_block(dir, db)?,
            };
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

    /// Says that a directory will be read soon. Never waits.
    pub(crate) fn readahead_dir(&self, dir: &Inode) {
        if dir.fork_format(Fork::Data) == Some(FORMAT_EXTENTS)
            && let Ok(Some(e)) = self.fork_extents(DATA, dir, dir_range(self.geometry(), 0))
        {
            self.blocks().readahead(&e);
        }
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
        let per_block = g.dir_blocks();
        // Positions are below 2^32; beyond that there is nothing.
        let mut db = (start.min(1 << 32) * DIR2_DATA_ALIGN as u64) >> dir_log;
        let limit = DIR2_LEAF_OFFSET >> dir_log;
        while db < limit {
            // The directory blocks that are there from here on; holes are of any length. They may be
            // all over the disk, so that many are read ahead at once.
            let begins = db.is_multiple_of(READAHEAD_BLOCKS as u64 / 2);
            let mut there: SmallVec<[u64; READAHEAD_BLOCKS]> = SmallVec::new();
            let (from, to) = (db * per_block, limit * per_block);
            self.map(dir, Fork::Data, from, to, &mut |e| {
                let last = (e.end() - 1) / per_block;
                let first = (e.startoff / per_block).max(there.last().map_or(db, |l| l + 1));
                there.extend((first..=last).take(READAHEAD_BLOCKS - there.len()));
                Ok(begins && there.len() < READAHEAD_BLOCKS)
            })?;
            let Some(next) = there.first() else { break };
            db = *next;
            for db in there.iter().skip(1).filter(|_| begins) {
                if let Some(e) = self.fork_extents(DATA, dir, dir_range(g, *db))? {
                    self.blocks().readahead(&e);
                }
            }
            let block = self.dir_data_block(dir, db)?;
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

    /// Reads directory block `db` (counted in directory blocks).
    fn dir_data_block(&self, dir: &Inode, db: u64) -> Result<Block> {
        let single = |b: &[u8], crc| db == 0 && is_single(b, crc);
        let check = |b: &[u8], i: &Ident| check_dir_data(b, single(b, i.crc), i).map(|_| ());
        let range = dir_range(self.geometry(), db);
        let block = self.read_fork_block(DATA, dir, range, verifier::DIR_DATA, &check)?;
        block.ok_or_else(|| dir.wrong(DATA, "mapping", "a block, not a hole", db))
    }
}

/// The file blocks of directory block `db`.
fn dir_range(g: &Geometry, db: u64) -> ForkRange {
    (Fork::Data, db * g.dir_blocks(), g.dir_blocks() as u32)
}

/// The entries of a hash-ordered index that have `hash`.
fn equal_run(index: &[Dir2LeafEntry], hash: u32) -> impl Iterator<Item = &Dir2LeafEntry> {
    let first = index.partition_point(|e| e.hashval.get() < hash);
    let rest = index[first..].iter();
    rest.take_while(move |e| e.hashval.get() == hash)
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
    let file_type = match g.features.ftype {
        true => FileType::Directory,
        false => FileType::Unknown,
    };
    let dots = [(dir.ino, &b"."[..], dot), (parent, &b".."[..], dotdot)];
    for (ino, name, offset) in dots {
        let next = next(offset);
        let entry = DirEntry {
            ino,
            name,
            file_type,
            next,
        };
        if !visit(entry) {
            return Ok(());
        }
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
