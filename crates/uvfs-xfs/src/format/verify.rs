//! The checks that a block must pass before its contents mean anything.

use super::*;

/// The identity that a metadata block must have in its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ident {
    /// Version 5: there are checksums and the rest of this counts.
    pub crc: bool,
    /// The metadata uuid.
    pub uuid: Uuid,
    /// Where the block is, in 512-byte sectors.
    pub daddr: u64,
    /// Allocation group or inode that owns it; `None` when it is not known.
    pub owner: Option<u64>,
    /// Its checksum was found right already, when it was read.
    pub summed: bool,
}

impl Ident {
    fn check_crc(&self, bytes: &[u8], crc_offset: usize) -> Result<(), Fault> {
        match self.summed {
            true => Ok(()),
            false => check_crc(bytes, crc_offset),
        }
    }

    fn check_uuid(&self, found: &Uuid) -> Result<(), Fault> {
        let fault = |expected, found| Fault::Uuid { expected, found };
        same(self.uuid, *found, fault)
    }

    /// Checks the checksum and uuid of a header, and the block number and owner in it.
    fn check_all(
        &self,
        block: &[u8],
        crc_offset: usize,
        uuid: &Uuid,
        blkno: Be64,
        owner: u64,
    ) -> Result<(), Fault> {
        self.check_crc(block, crc_offset)?;
        self.check_uuid(uuid)?;
        let fault = |expected, found| Fault::BlockNumber { expected, found };
        same(self.daddr, blkno.get(), fault)?;
        self.check_owner(owner)
    }

    fn check_owner(&self, found: u64) -> Result<(), Fault> {
        match self.owner {
            Some(expected) if expected != found => Err(Fault::Owner { expected, found }),
            _ => Ok(()),
        }
    }
}

/// Compares what a field should be with what it is.
fn same<T: PartialEq>(expected: T, found: T, fault: fn(T, T) -> Fault) -> Result<(), Fault> {
    match expected == found {
        true => Ok(()),
        false => Err(fault(expected, found)),
    }
}

fn check_magic(expected: u32, found: u32) -> Result<(), Fault> {
    let fault = |expected, found| Fault::Magic { expected, found };
    same(expected, found, fault)
}

/// The CRC32c of `bytes` with the four bytes at `crc_offset` taken as zero.
///
/// # Panics
/// If `crc_offset + 4` is beyond `bytes`.
pub fn compute_crc(bytes: &[u8], crc_offset: usize) -> u32 {
    let c = crc32c::crc32c(&bytes[..crc_offset]);
    let c = crc32c::crc32c_append(c, &[0; 4]);
    crc32c::crc32c_append(c, &bytes[crc_offset + 4..])
}

/// Compares the checksum stored at `crc_offset` with the one that `bytes` have.
pub fn check_crc(bytes: &[u8], crc_offset: usize) -> Result<(), Fault> {
    let found = Le32::at(bytes, crc_offset)?.get();
    let fault = |expected, found| Fault::Crc { expected, found };
    same(compute_crc(bytes, crc_offset), found, fault)
}

/// Stores the checksum of `bytes` at `crc_offset`; for programs that damage or make images.
///
/// # Panics
/// If `crc_offset + 4` is beyond `bytes`.
pub fn store_crc(bytes: &mut [u8], crc_offset: usize) {
    let crc = compute_crc(bytes, crc_offset);
    bytes[crc_offset..crc_offset + 4].copy_from_slice(&crc.to_le_bytes());
}

/// A copy of `bytes` whose checksum at `crc_offset` is right: what only had a wrong one passes its check then.
///
/// # Panics
/// If `crc_offset + 4` is beyond `bytes`.
pub fn summed(bytes: &[u8], crc_offset: usize) -> Vec<u8> {
    let mut out = bytes.to_vec();
    store_crc(&mut out, crc_offset);
    out
}

/// Byte offset of the checksum in the superblock.
pub const SB_CRC_OFFSET: usize = 224;
/// Byte offset of the checksum in the AGF.
pub const AGF_CRC_OFFSET: usize = 216;
/// Byte offset of the checksum in the AGI.
pub const AGI_CRC_OFFSET: usize = 312;
/// Byte offset of the checksum in the AGFL.
pub const AGFL_CRC_OFFSET: usize = 32;
/// Byte offset of the checksum in a short B-tree block.
pub const BTREE_SHORT_CRC_OFFSET: usize = 52;
/// Byte offset of the checksum in a long B-tree block.
pub const BTREE_LONG_CRC_OFFSET: usize = 64;
/// Byte offset of the checksum in an inode.
pub const DINODE_CRC_OFFSET: usize = 100;
/// Byte offset of the checksum in directory data and free index blocks.
pub const DIR3_DATA_CRC_OFFSET: usize = 4;
/// Byte offset of the checksum in leaf and node blocks of directories and attributes.
pub const DA3_CRC_OFFSET: usize = 12;
/// Byte offset of the checksum in remote attribute and symbolic link blocks.
pub const REMOTE_CRC_OFFSET: usize = 12;
/// Byte offset of the log sequence number in these.
pub const REMOTE_LSN_OFFSET: usize = 48;
/// Byte offset of the checksum in a quota record.
pub const DQUOT_CRC_OFFSET: usize = 108;

/// Checks a superblock sector's magic and, on version 5, checksum, and gives the superblock.
/// `sector` is one whole sector; [`Superblock::sector_size`] tells how long that is.
pub fn check_superblock(sector: &[u8]) -> Result<&Superblock, Fault> {
    let sb = Superblock::at(sector, 0)?;
    check_magic(SB_MAGIC, sb.magicnum.get())?;
    if sb.is_v5() {
        check_crc(sector, SB_CRC_OFFSET)?;
    }
    Ok(sb)
}

impl Superblock {
    /// Whether the version is 5 (checksums).
    pub fn is_v5(&self) -> bool {
        self.versionnum.get() & VERSION_NUMBITS == 5
    }

    /// The sector size if it is one that XFS knows (512 to 32768 bytes).
    pub fn sector_size(&self) -> Option<usize> {
        let s = usize::from(self.sectsize.get());
        (s.is_power_of_two() && (512..=32768).contains(&s)).then_some(s)
    }

    /// The uuid that metadata carries.
    pub fn metadata_uuid(&self) -> Uuid {
        match self.is_v5() && self.features_incompat.get() & INCOMPAT_META_UUID != 0 {
            true => self.meta_uuid,
            false => self.uuid,
        }
    }
}

/// Checks an AGF sector's magic, checksum and uuid.
pub fn check_agf<'a>(sector: &'a [u8], ident: &Ident) -> Result<&'a Agf, Fault> {
    let agf = Agf::at(sector, 0)?;
    check_magic(AGF_MAGIC, agf.magicnum.get())?;
    if ident.crc {
        ident.check_crc(sector, AGF_CRC_OFFSET)?;
        ident.check_uuid(&agf.uuid)?;
    }
    Ok(agf)
}

/// Checks an AGI sector's magic, checksum and uuid.
pub fn check_agi<'a>(sector: &'a [u8], ident: &Ident) -> Result<&'a Agi, Fault> {
    let agi = Agi::at(sector, 0)?;
    check_magic(AGI_MAGIC, agi.magicnum.get())?;
    if ident.crc {
        ident.check_crc(sector, AGI_CRC_OFFSET)?;
        ident.check_uuid(&agi.uuid)?;
    }
    Ok(agi)
}

/// Checks an AGFL sector's magic, checksum and uuid (version 4 has none) and gives its slots.
pub fn check_agfl<'a>(sector: &'a [u8], ident: &Ident) -> Result<&'a [Be32], Fault> {
    if !ident.crc {
        return Be32::slice_at(sector, 0, sector.len() / 4);
    }
    let agfl = Agfl::at(sector, 0)?;
    check_magic(AGFL_MAGIC, agfl.magicnum.get())?;
    ident.check_crc(sector, AGFL_CRC_OFFSET)?;
    ident.check_uuid(&agfl.uuid)?;
    Be32::slice_at(sector, Agfl::SIZE, (sector.len() - Agfl::SIZE) / 4)
}

/// Checks a B-tree block of an allocation group: magic, checksum, uuid, block number, owner, and
/// that its record count fits.
pub fn check_btree_short<'a>(
    block: &'a [u8],
    tree: Btree,
    ident: &Ident,
) -> Result<&'a BtreeShort, Fault> {
    debug_assert!(tree != Btree::Bmap);
    let h = BtreeShort::at(block, 0)?;
    check_magic(tree.magic(ident.crc), h.magic.get())?;
    if ident.crc {
        let c = BtreeShortCrc::at(block, BtreeShort::SIZE)?;
        let owner = c.owner.get().into();
        ident.check_all(block, BTREE_SHORT_CRC_OFFSET, &c.uuid, c.blkno, owner)?;
    }
    let most = |level| tree.max_records(block.len(), ident.crc, level);
    check_btree_counts(h.level.get(), h.numrecs.get(), most)?;
    Ok(h)
}

/// Checks a block of a fork's B-tree: magic, checksum, uuid, block number, owner, and that its
/// record count fits.
pub fn check_btree_long<'a>(block: &'a [u8], ident: &Ident) -> Result<&'a BtreeLong, Fault> {
    let h = BtreeLong::at(block, 0)?;
    check_magic(Btree::Bmap.magic(ident.crc), h.magic.get())?;
    if ident.crc {
        let c = BtreeLongCrc::at(block, BtreeLong::SIZE)?;
        let owner = c.owner.get();
        ident.check_all(block, BTREE_LONG_CRC_OFFSET, &c.uuid, c.blkno, owner)?;
    }
    let most = |level| Btree::Bmap.max_records(block.len(), ident.crc, level);
    check_btree_counts(h.level.get(), h.numrecs.get(), most)?;
    Ok(h)
}

fn check_btree_counts(level: u16, n: u16, most: impl Fn(u16) -> usize) -> Result<(), Fault> {
    if level >= BTREE_MAXLEVELS {
        let expected = "fewer levels than any tree has";
        return Err(Fault::field("bb_level", expected, level));
    }
    if usize::from(n) > most(level) {
        let expected = "as many records as fit in the block";
        return Err(Fault::field("bb_numrecs", expected, n));
    }
    Ok(())
}

/// Checks an inode: magic, version and, on version 3, checksum, uuid and inode number.
/// `inode` is the whole inode; `ident.owner` is its number.
pub fn check_dinode<'a>(inode: &'a [u8], ident: &Ident) -> Result<&'a DinodeV2, Fault> {
    let d = DinodeV2::at(inode, 0)?;
    check_magic(u32::from(DINODE_MAGIC), u32::from(d.magic.get()))?;
    if ident.crc {
        if d.version != 3 {
            return Err(Fault::field("di_version", "3", d.version));
        }
        let d3 = Dinode::at(inode, 0)?;
        ident.check_crc(inode, DINODE_CRC_OFFSET)?;
        ident.check_uuid(&d3.uuid)?;
        ident.check_owner(d3.ino.get())?;
    } else if !(1..=2).contains(&d.version) {
        return Err(Fault::field("di_version", "1 or 2", d.version));
    }
    Ok(d)
}

/// `count` structures from byte `at` of a block, of which the field `name` says that there are so many.
fn counted<'a, T: Layout>(
    block: &'a [u8],
    at: usize,
    name: &'static str,
    count: impl Into<u64>,
) -> Result<&'a [T], Fault> {
    let count = count.into();
    T::slice_at(block, at, count as usize)
        .map_err(|_| Fault::field(name, "as many as fit in the block", count))
}

/// Checks a directory data block (or, `single`, a single-block directory): magic, checksum,
/// uuid, block number, owner. Gives the table of largest holes.
pub fn check_dir_data<'a>(
    block: &'a [u8],
    single: bool,
    ident: &Ident,
) -> Result<&'a [Dir2DataFree; 3], Fault> {
    let magic = match (ident.crc, single) {
        (true, true) => DIR3_BLOCK_MAGIC,
        (true, false) => DIR3_DATA_MAGIC,
        (false, true) => DIR2_BLOCK_MAGIC,
        (false, false) => DIR2_DATA_MAGIC,
    };
    if ident.crc {
        let h = Dir3DataHeader::at(block, 0)?;
        check_magic(magic, h.hdr.magic.get())?;
        check_dir3_header(block, &h.hdr, ident)?;
        Ok(&h.bestfree)
    } else {
        let h = Dir2DataHeader::at(block, 0)?;
        check_magic(magic, h.magic.get())?;
        Ok(&h.bestfree)
    }
}

fn check_dir3_header(block: &[u8], h: &Dir3BlockHeader, ident: &Ident) -> Result<(), Fault> {
    let owner = h.owner.get();
    ident.check_all(block, DIR3_DATA_CRC_OFFSET, &h.uuid, h.blkno, owner)
}

/// Checks a free index block: magic, checksum, uuid, block number, owner, and that its slots fit.
/// Gives the counts and the slots (`nvalid` of them).
pub fn check_dir_free<'a>(
    block: &'a [u8],
    ident: &Ident,
) -> Result<(&'a Dir2FreeCounts, &'a [Be16]), Fault> {
    let magic = Be32::at(block, 0)?.get();
    let counts_at = if ident.crc {
        check_magic(DIR3_FREE_MAGIC, magic)?;
        check_dir3_header(block, Dir3BlockHeader::at(block, 0)?, ident)?;
        Dir3BlockHeader::SIZE
    } else {
        check_magic(DIR2_FREE_MAGIC, magic)?;
        4
    };
    let c = Dir2FreeCounts::at(block, counts_at)?;
    let bests = counted(block, da_header_len(ident.crc), "nvalid", c.nvalid.get())?;
    Ok((c, bests))
}

/// The kind of a leaf or node block by its magic number, with version 4's number: one of
/// [`DIR2_LEAF1_MAGIC`], [`DIR2_LEAFN_MAGIC`], [`DA_NODE_MAGIC`], [`ATTR_LEAF_MAGIC`], or `None`
/// for a number that does not belong to this version.
pub fn da_block_kind(block: &[u8], crc: bool) -> Option<u16> {
    let m = DaBlockInfo::at(block, 0).ok()?.magic.get();
    let mut pairs = [
        (DIR2_LEAF1_MAGIC, DIR3_LEAF1_MAGIC),
        (DIR2_LEAFN_MAGIC, DIR3_LEAFN_MAGIC),
        (DA_NODE_MAGIC, DA3_NODE_MAGIC),
        (ATTR_LEAF_MAGIC, ATTR3_LEAF_MAGIC),
    ]
    .into_iter();
    pairs.find_map(|(v4, v5)| (m == if crc { v5 } else { v4 }).then_some(v4))
}

/// Checks what all leaf and node blocks share (checksum, uuid, block number, owner) and gives the
/// head's common part. The kind must have been told by [`da_block_kind`] first.
pub fn check_da_info<'a>(block: &'a [u8], ident: &Ident) -> Result<&'a DaBlockInfo, Fault> {
    if ident.crc {
        let i = Da3BlockInfo::at(block, 0)?;
        ident.check_all(block, DA3_CRC_OFFSET, &i.uuid, i.blkno, i.owner.get())?;
        Ok(&i.hdr)
    } else {
        DaBlockInfo::at(block, 0)
    }
}

fn da_counts_offset(crc: bool) -> usize {
    match crc {
        true => Da3BlockInfo::SIZE,
        false => DaBlockInfo::SIZE,
    }
}

/// The counts and entries of a directory leaf block whose kind and head were checked.
pub fn dir_leaf_entries(
    block: &[u8],
    crc: bool,
) -> Result<(&Dir2LeafCounts, &[Dir2LeafEntry]), Fault> {
    let c = Dir2LeafCounts::at(block, da_counts_offset(crc))?;
    let entries = counted(block, da_header_len(crc), "count", c.count.get())?;
    Ok((c, entries))
}

/// The table at the end of a [`DIR2_LEAF1_MAGIC`] block: longest free space of each data block.
pub fn dir_leaf1_bests(block: &[u8]) -> Result<&[Be16], Fault> {
    let tail = block.len().saturating_sub(4);
    counted_before(block, tail, "bestcount", Be32::at(block, tail)?.get())
}

/// `count` structures that end at byte `end` of a block, of which the field `name` says that there are so many.
fn counted_before<'a, T: Layout>(
    block: &'a [u8],
    end: usize,
    name: &'static str,
    count: u32,
) -> Result<&'a [T], Fault> {
    let len = (count as usize).checked_mul(T::SIZE);
    let start = len.and_then(|len| end.checked_sub(len));
    let start = start.ok_or(Fault::field(name, "as many as fit in the block", count))?;
    T::slice_at(block, start, count as usize)
}

/// The counts and entries of a node block whose kind and head were checked.
pub fn da_node_entries(block: &[u8], crc: bool) -> Result<(&DaNodeCounts, &[DaNodeEntry]), Fault> {
    let c = DaNodeCounts::at(block, da_counts_offset(crc))?;
    let entries = counted(block, da_header_len(crc), "count", c.count.get())?;
    Ok((c, entries))
}

/// The levels of node blocks on the way from the root of a directory's or an attribute's tree to its
/// leaves.
#[derive(Debug, Default)]
pub struct Descent(Option<u16>);

impl Descent {
    /// Goes on to a node block: one level below the one before, and above the leaves.
    pub fn node(&mut self, level: u16) -> Result<(), Fault> {
        let fits = match self.0 {
            None => (1..=DA_NODE_MAXDEPTH).contains(&level),
            Some(above) => level > 0 && level == above - 1,
        };
        if !fits {
            return Err(Fault::field("level", "one less than the parent's", level));
        }
        self.0 = Some(level);
        Ok(())
    }

    /// Goes on to a leaf, which is below a node block of level 1 or the root.
    pub fn leaf(&self) -> Result<(), Fault> {
        match self.0 {
            None | Some(1) => Ok(()),
            Some(level) => Err(Fault::field("level", "1 above a leaf", level)),
        }
    }
}

/// The counts and entries of an attribute leaf whose kind and head were checked.
pub fn attr_leaf_entries(
    block: &[u8],
    crc: bool,
) -> Result<(&AttrLeafCounts, &[AttrLeafEntry]), Fault> {
    let c = AttrLeafCounts::at(block, da_counts_offset(crc))?;
    let entries = counted(block, attr_leaf_header_len(crc), "count", c.count.get())?;
    Ok((c, entries))
}

/// The tail and leaf entries of a single-block directory.
pub fn dir_block_entries(block: &[u8]) -> Result<(&Dir2BlockTail, &[Dir2LeafEntry]), Fault> {
    let tail_at = block.len().saturating_sub(Dir2BlockTail::SIZE);
    let tail = Dir2BlockTail::at(block, tail_at)?;
    let entries = counted_before(block, tail_at, "count", tail.count.get())?;
    Ok((tail, entries))
}

/// Checks a block of a remote attribute value or remote symbolic link (`magic` is [`ATTR3_RMT_MAGIC`] or
/// [`SYMLINK_MAGIC`]): magic, checksum, uuid, block number, owner, offset, and that its bytes fit. Gives its part of
/// the contents, which is all of it on version 4.
pub fn check_remote<'a>(
    block: &'a [u8],
    magic: u32,
    offset: u32,
    ident: &Ident,
) -> Result<&'a [u8], Fault> {
    if !ident.crc {
        return Ok(block);
    }
    let h = RemoteHeader::at(block, 0)?;
    check_magic(magic, h.magic.get())?;
    ident.check_all(block, REMOTE_CRC_OFFSET, &h.uuid, h.blkno, h.owner.get())?;
    let (found, bytes) = (h.offset.get(), h.bytes.get());
    if found != offset {
        let expected = "where the previous block ends";
        return Err(Fault::field("offset", expected, found));
    }
    let part = block[RemoteHeader::SIZE..].get(..bytes as usize);
    let expected = "as many bytes as fit in the block";
    part.ok_or(Fault::field("bytes", expected, bytes))
}

/// Checks a quota record: magic and version and, on version 5, checksum and uuid.
pub fn check_dquot<'a>(record: &'a [u8], ident: &Ident) -> Result<&'a Dquot, Fault> {
    let d = Dquot::at(record, 0)?;
    check_magic(u32::from(DQUOT_MAGIC), u32::from(d.magic.get()))?;
    if d.version != 1 {
        return Err(Fault::field("d_version", "1", d.version));
    }
    if ident.crc {
        ident.check_crc(&record[..Dquot::SIZE], DQUOT_CRC_OFFSET)?;
        ident.check_uuid(&d.uuid)?;
    }
    Ok(d)
}
