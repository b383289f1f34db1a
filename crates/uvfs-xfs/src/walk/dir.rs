//! What is in the blocks of a directory, and in a directory inside an inode.

use crate::format::*;
use crate::geometry::Geometry;

/// One entry of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// Inode.
    pub ino: u64,
    /// Name.
    pub name: &'a [u8],
    /// Type; [`FileType::Unknown`] if the file system does not record it.
    pub file_type: FileType,
    /// Where a listing goes on after this entry: for [`Volume::readdir`](crate::Volume::readdir). It grows from entry to
    /// entry and an entry keeps it for as long as it exists. It is less than 2^32.
    pub next: u64,
}

pub(crate) fn is_single(block: &[u8], crc: bool) -> bool {
    let magic = match crc {
        true => DIR3_BLOCK_MAGIC,
        false => DIR2_BLOCK_MAGIC,
    };
    Be32::at(block, 0).is_ok_and(|m| m.get() == magic)
}

/// Where the entries of a data block end: at its end, or where a single block's index begins.
pub(crate) fn data_end(block: &[u8], crc: bool) -> Result<usize, Fault> {
    let index = match is_single(block, crc) {
        true => Dir2BlockTail::SIZE + size_of_val(dir_block_entries(block)?.1),
        false => 0,
    };
    Ok(block.len() - index)
}

/// The directory blocks in `extents`, by number, once each: a directory block is of `per` file blocks, and may be made
/// of several extents.
pub(crate) fn dir_blocks(extents: &[Extent], per: u64) -> impl Iterator<Item = u64> {
    let mut previous = None;
    let blocks = move |e: &Extent| {
        let last = e.end() - 1;
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
            let expected = "a hole inside the block";
            return Err(Fault::field("length", expected, u.length.get()));
        }
        return Ok((len, None));
    }
    let e = Dir2DataEntry::at(records, offset)?;
    let namelen = usize::from(e.namelen);
    let len = dir_entry_len(namelen, g.features.ftype);
    if namelen == 0 || offset + len > end {
        let expected = "a name inside the block";
        return Err(Fault::field("namelen", expected, e.namelen));
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
    let entry = DirEntry {
        ino,
        name,
        file_type,
        next: dataptr + 1,
    };
    Ok((len, Some(entry)))
}

/// No name has a slash or a zero byte in it; a program that trusted one could be led astray.
pub(crate) fn check_name(name: &[u8]) -> Result<(), Fault> {
    match name.iter().find(|b| matches!(b, b'/' | 0)) {
        Some(b) => Err(Fault::field("name", "no slash and no zero byte", *b)),
        None => Ok(()),
    }
}

pub(crate) fn check_inumber(ino: u64, g: &Geometry) -> Result<u64, Fault> {
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
