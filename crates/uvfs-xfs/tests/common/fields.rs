//! Changes of single fields, as xfs_db makes them, by the layouts that the crate itself reads with.

use super::{Choose, MemImage, Region, choose, fix};
use uvfs_xfs::format::*;

/// The layouts at places in a structure.
type Layouts = Vec<(&'static str, usize, &'static [FieldAt])>;

/// Entries of a list that get changes: the first ones.
const ENTRIES: usize = 3;

fn list<T>(out: &mut Layouts, name: &'static str, at: usize, n: usize, fields: &'static [FieldAt]) {
    for i in 0..n.min(ENTRIES) {
        out.push((name, at + i * size_of::<T>(), fields));
    }
}

fn group_tree(out: &mut Layouts, tree: Btree, bytes: &[u8]) {
    out.push(("head", 0, BtreeShort::FIELDS));
    out.push(("head", BtreeShort::SIZE, BtreeShortCrc::FIELDS));
    let at = tree.header_len(true);
    let Ok(head) = BtreeShort::at(bytes, 0) else {
        return;
    };
    let n = usize::from(head.numrecs.get());
    if head.level.get() > 0 {
        for i in 0..n.min(ENTRIES) {
            let key = at + i * tree.key_len();
            match tree {
                Btree::Rmap => out.push(("key", key, RmapKey::FIELDS)),
                _ => out.push(("key", key, NUMBER)),
            }
            out.push(("pointer", tree.ptr_offset(bytes.len(), true, i), NUMBER));
        }
        return;
    }
    match tree {
        Btree::Bno | Btree::Cnt => list::<AllocRecord>(out, "record", at, n, AllocRecord::FIELDS),
        Btree::Ino | Btree::Fino => list::<InobtRecord>(out, "record", at, n, InobtRecord::FIELDS),
        Btree::Rmap => list::<RmapRecord>(out, "record", at, n, RmapRecord::FIELDS),
        _ => list::<RefcountRecord>(out, "record", at, n, RefcountRecord::FIELDS),
    }
}

/// A number of 32 bits that is part of no layout.
const NUMBER: &[FieldAt] = &[FieldAt {
    name: "number",
    at: 0,
    len: 4,
}];

fn fork(out: &mut Layouts, format: u8, dir: bool, at: usize) {
    match format {
        FORMAT_LOCAL if dir => {
            out.push(("directory", at, Dir2SfHeader::FIELDS));
            out.push(("entry", at + 6, Dir2SfEntry::FIELDS));
        }
        FORMAT_EXTENTS => list::<ExtentRecord>(out, "extent", at, 2, ExtentRecord::FIELDS),
        FORMAT_BTREE => out.push(("root", at, BmdrBlock::FIELDS)),
        _ => {}
    }
}

fn inode(out: &mut Layouts, bytes: &[u8]) {
    out.push(("core", 0, DinodeV2::FIELDS));
    out.push(("core", 0, Dinode::FIELDS));
    let Ok(d) = DinodeV2::at(bytes, 0) else {
        return;
    };
    let dir = FileType::from_mode(d.mode.get()) == FileType::Directory;
    fork(out, d.format, dir, DINODE_V3_SIZE);
    let at = DINODE_V3_SIZE + usize::from(d.forkoff) * 8;
    if d.forkoff != 0 && at < bytes.len() {
        match d.aformat {
            FORMAT_LOCAL => {
                out.push(("attributes", at, AttrSfHeader::FIELDS));
                out.push(("attribute", at + AttrSfHeader::SIZE, AttrSfEntry::FIELDS));
            }
            format => fork(out, format, false, at),
        }
    }
}

fn directory_data(out: &mut Layouts, single: bool, bytes: &[u8]) {
    out.push(("head", 0, Dir3BlockHeader::FIELDS));
    list::<Dir2DataFree>(out, "hole", Dir3BlockHeader::SIZE, 3, Dir2DataFree::FIELDS);
    out.push(("entry", Dir3DataHeader::SIZE, Dir2DataEntry::FIELDS));
    if single && let Ok((_, index)) = dir_block_entries(bytes) {
        let tail = bytes.len() - Dir2BlockTail::SIZE;
        out.push(("tail", tail, Dir2BlockTail::FIELDS));
        let at = tail - size_of_val(index);
        list::<Dir2LeafEntry>(out, "leaf", at, index.len(), Dir2LeafEntry::FIELDS);
    }
}

fn attribute_leaf(out: &mut Layouts, bytes: &[u8]) {
    out.push(("head", Da3BlockInfo::SIZE, AttrLeafCounts::FIELDS));
    let Ok((_, entries)) = attr_leaf_entries(bytes, true) else {
        return;
    };
    let at = attr_leaf_header_len(true);
    list::<AttrLeafEntry>(out, "entry", at, entries.len(), AttrLeafEntry::FIELDS);
    for e in entries.iter().take(ENTRIES) {
        let fields = match e.flags & ATTR_LOCAL {
            0 => AttrNameRemote::FIELDS,
            _ => AttrNameLocal::FIELDS,
        };
        out.push(("name", e.nameidx.get().into(), fields));
    }
}

/// The parts of a structure.
fn layouts(kind: &str, bytes: &[u8]) -> Layouts {
    let mut out = Layouts::new();
    let info = [
        ("head", 0, DaBlockInfo::FIELDS),
        ("head", 0, Da3BlockInfo::FIELDS),
    ];
    let after = Da3BlockInfo::SIZE;
    match kind {
        "superblock" => out.push(("", 0, Superblock::FIELDS)),
        "AGF" => out.push(("", 0, Agf::FIELDS)),
        "AGI" => out.push(("", 0, Agi::FIELDS)),
        "AGFL" => {
            out.push(("", 0, Agfl::FIELDS));
            list::<Be32>(&mut out, "slot", Agfl::SIZE, ENTRIES, NUMBER);
        }
        "bnobt" => group_tree(&mut out, Btree::Bno, bytes),
        "cntbt" => group_tree(&mut out, Btree::Cnt, bytes),
        "inobt" => group_tree(&mut out, Btree::Ino, bytes),
        "finobt" => group_tree(&mut out, Btree::Fino, bytes),
        "rmapbt" => group_tree(&mut out, Btree::Rmap, bytes),
        "refcountbt" => group_tree(&mut out, Btree::Refcount, bytes),
        "bmbt" => {
            out.push(("head", 0, BtreeLong::FIELDS));
            out.push(("head", BtreeLong::SIZE, BtreeLongCrc::FIELDS));
            let at = Btree::Bmap.header_len(true);
            list::<ExtentRecord>(&mut out, "record", at, ENTRIES, ExtentRecord::FIELDS);
        }
        "inode" => inode(&mut out, bytes),
        "directory block" => directory_data(&mut out, true, bytes),
        "directory data" => directory_data(&mut out, false, bytes),
        "directory free" => {
            out.push(("head", 0, Dir3BlockHeader::FIELDS));
            out.push(("head", Dir3BlockHeader::SIZE, Dir2FreeCounts::FIELDS));
        }
        "directory leaf" => {
            out.extend(info);
            out.push(("head", after, Dir2LeafCounts::FIELDS));
            list::<Dir2LeafEntry>(&mut out, "entry", 64, ENTRIES, Dir2LeafEntry::FIELDS);
        }
        "node" => {
            out.extend(info);
            out.push(("head", after, DaNodeCounts::FIELDS));
            list::<DaNodeEntry>(&mut out, "entry", 64, ENTRIES, DaNodeEntry::FIELDS);
        }
        "attribute leaf" => {
            out.extend(info);
            attribute_leaf(&mut out, bytes);
        }
        "attribute value" | "symbolic link" => out.push(("head", 0, RemoteHeader::FIELDS)),
        _ => {}
    }
    out
}

/// The fields of a structure: names and bytes. Checksums are not among them.
fn fields(r: &Region, bytes: &[u8]) -> Vec<(String, usize, usize)> {
    let all = layouts(r.kind, bytes).into_iter();
    let all = all.flat_map(|(part, at, fields)| {
        let named = move |f: &FieldAt| (format!("{part} {}", f.name), at + f.at, f.len);
        fields.iter().map(named)
    });
    all.filter(|(name, at, len)| {
        // Longer ones are made of others.
        let whole = *len <= 16 && at + len <= bytes.len();
        whole && !name.ends_with(" crc")
    })
    .collect()
}

/// Another value for a field of these bytes.
fn value(old: &[u8], c: &mut dyn Choose) -> Vec<u8> {
    let mut new = old.to_vec();
    if old.len() > 8 || c.below(4) == 0 {
        let at = c.below(old.len() as u64) as usize;
        new[at] ^= 1 << c.below(8);
        return new;
    }
    let mut wide = [0; 8];
    wide[8 - old.len()..].copy_from_slice(old);
    let v = u64::from_be_bytes(wide);
    let values = [
        0,
        1,
        3,
        77,
        77_777,
        v.wrapping_add(1),
        v.wrapping_sub(1),
        v / 2,
        u64::MAX,
    ];
    let v = values[c.below(values.len() as u64) as usize].to_be_bytes();
    new.copy_from_slice(&v[8 - old.len()..]);
    new
}

/// Changes a field of a structure and sets the checksum right; gives what was done.
pub fn change_field(image: &mut MemImage, regions: &[Region], c: &mut dyn Choose) -> String {
    let Some((r, mut bytes)) = choose(image, regions, c) else {
        return "nothing".into();
    };
    let mut all = fields(r, &bytes);
    if all.is_empty() {
        return "nothing".into();
    }
    let (name, at, len) = all.swap_remove(c.below(all.len() as u64) as usize);
    let new = value(&bytes[at..at + len], c);
    let what = format!(
        "{} at {:#x}: {name}: {:02x?} -> {new:02x?}",
        r.kind,
        r.offset,
        &bytes[at..at + len]
    );
    bytes[at..at + len].copy_from_slice(&new);
    image.put(r.offset, &bytes);
    fix(image, r);
    what
}

/// A structure with one field changed, and its checksum right.
pub struct FieldChange {
    pub what: String,
    pub offset: u64,
    pub bytes: Vec<u8>,
}

/// Values of a field that may be wrong: numbers, and for words of flags each bit.
fn values(name: &str, old: &[u8]) -> Vec<Vec<u8>> {
    if old.len() > 8 {
        let mut new = old.to_vec();
        new[0] ^= 1;
        return vec![new];
    }
    let mut wide = [0; 8];
    wide[8 - old.len()..].copy_from_slice(old);
    let v = u64::from_be_bytes(wide);
    let (more, less) = (v.wrapping_add(1), v.wrapping_sub(1));
    let top = 1 << (old.len() * 8 - 1);
    let mut all = vec![0, 1, 3, 77, 77_777, more, less, v / 2, u64::MAX, top];
    if ["flags", "version", "features", "mode", "format"]
        .iter()
        .any(|f| name.contains(f))
    {
        all.extend((0..old.len() * 8).map(|bit| v ^ 1 << bit));
    }
    let mut all: Vec<_> = all
        .iter()
        .map(|v| v.to_be_bytes()[8 - old.len()..].to_vec())
        .collect();
    all.sort();
    all.dedup();
    all.retain(|new| new != old);
    all
}

/// Every field of a structure of every kind, changed to several values: of those that have the same fields, the
/// first and the last one.
pub fn field_changes(image: &MemImage, regions: &[Region]) -> Vec<FieldChange> {
    let mut ends = std::collections::BTreeMap::new();
    for r in regions {
        let mut bytes = vec![0; r.len];
        image.get(r.offset, &mut bytes);
        let names: Vec<String> = fields(r, &bytes)
            .into_iter()
            .map(|(name, ..)| name)
            .collect();
        let sort = if r.kind == "inode" { bytes[2] >> 4 } else { 0 };
        let ends = ends.entry((r.kind, sort, names)).or_insert((r, r));
        ends.1 = r;
    }
    let mut out = Vec::new();
    for (first, last) in ends.into_values() {
        let both = [first, last];
        for r in &both[..1 + usize::from(first.offset != last.offset)] {
            let mut bytes = vec![0; r.len];
            image.get(r.offset, &mut bytes);
            for (name, at, len) in fields(r, &bytes) {
                let old = &bytes[at..at + len];
                for new in values(&name, old) {
                    let what = format!(
                        "{} at {:#x}: {name}: {old:02x?} -> {new:02x?}",
                        r.kind, r.offset
                    );
                    let mut bytes = bytes.clone();
                    bytes[at..at + len].copy_from_slice(&new);
                    if let Some(crc) = r.crc {
                        store_crc(&mut bytes, crc);
                    }
                    out.push(FieldChange {
                        what,
                        offset: r.offset,
                        bytes,
                    });
                }
            }
        }
    }
    out
}
