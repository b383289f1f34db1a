//! Damages by xfs_db, by random changes, by cutting off and by overwriting.

#![allow(dead_code, missing_docs)]

use crate::common::output;
use crate::mutate::{self, Choose, MemImage, Random};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use uvfs_xfs::Volume;

/// Something to do to a copy of an image.
pub enum Damage {
    /// Commands of xfs_db that lead to a structure, then a field and what to write there.
    Db {
        go: Vec<String>,
        field: String,
        value: String,
    },
    /// Random damage with this seed.
    Random(u64),
    /// One to three fields changed, with this seed.
    Fields(u64),
    /// The image ends here.
    Truncate(u64),
    /// A block of random bytes, zeros or another block over a structure.
    Overwrite(u64),
}

impl Damage {
    /// The damage in words.
    pub fn name(&self) -> String {
        match self {
            Damage::Db { go, field, value } => format!("{}: {field} = {value}", go.join(", ")),
            Damage::Random(seed) => format!("random {seed}"),
            Damage::Fields(seed) => format!("fields {seed}"),
            Damage::Truncate(at) => format!("truncate to {at}"),
            Damage::Overwrite(seed) => format!("overwrite {seed}"),
        }
    }

    /// Does it; gives what was done, or `None` if there was no such field or nothing changed.
    pub fn apply(&self, path: &Path, mem: &MemImage, regions: &[mutate::Region]) -> Option<String> {
        match self {
            Damage::Db { go, field, value } => {
                let mut args: Vec<String> = vec!["-x".into()];
                let write = format!("write -d {field} {value}");
                for command in go.iter().chain([&write]) {
                    args.extend(["-c".into(), command.clone()]);
                }
                args.push(path.display().to_string());
                let args: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
                output("xfs_db", &args).unwrap();
                let after = MemImage::load(path).unwrap();
                differs(mem, &after).then(|| self.name())
            }
            Damage::Random(seed) => {
                let mut damaged = mem.clone();
                let what = mutate::damage(&mut damaged, regions, &mut Random(*seed));
                if !differs(mem, &damaged) {
                    return None;
                }
                write_regions(path, &damaged, regions);
                Some(format!("random {seed}: {what}"))
            }
            Damage::Fields(seed) => {
                let mut damaged = mem.clone();
                let mut random = Random(*seed);
                let change = |_| mutate::change_field(&mut damaged, regions, &mut random);
                let what: Vec<String> = (0..1 + seed % 3).map(change).collect();
                if !differs(mem, &damaged) {
                    return None;
                }
                write_regions(path, &damaged, regions);
                Some(format!("fields {seed}: {}", what.join(", and ")))
            }
            Damage::Truncate(at) => {
                let file = File::options().write(true).open(path).unwrap();
                file.set_len(*at).unwrap();
                Some(self.name())
            }
            Damage::Overwrite(seed) => {
                let mut c = Random(*seed);
                let r = regions[c.below(regions.len() as u64) as usize];
                let mut bytes = vec![0u8; r.len];
                let how = match c.below(3) {
                    0 => {
                        bytes.iter_mut().for_each(|b| *b = c.next() as u8);
                        "random bytes"
                    }
                    1 => "zeros",
                    _ => {
                        let other = regions[c.below(regions.len() as u64) as usize];
                        let n = r.len.min(other.len);
                        mem.get(other.offset, &mut bytes[..n]);
                        "another structure"
                    }
                };
                let mut before = vec![0u8; r.len];
                mem.get(r.offset, &mut before);
                let file = File::options().write(true).open(path).unwrap();
                file.write_all_at(&bytes, r.offset).unwrap();
                (before != bytes)
                    .then(|| format!("overwrite {seed}: {} at {:#x} by {how}", r.kind, r.offset))
            }
        }
    }
}

pub fn differs(a: &MemImage, b: &MemImage) -> bool {
    !a.same(b)
}

pub fn write_regions(path: &Path, image: &MemImage, regions: &[mutate::Region]) {
    let file = File::options().write(true).open(path).unwrap();
    for r in regions {
        let (mut new, mut old) = (vec![0; r.len], vec![0; r.len]);
        if image.get(r.offset, &mut new) {
            use std::os::unix::fs::FileExt as _;
            let n = File::open(path)
                .unwrap()
                .read_at(&mut old, r.offset)
                .unwrap();
            if new[..n] != old[..n] || n < new.len() {
                file.write_all_at(&new, r.offset).unwrap();
            }
        }
    }
}

/// Takes what leads to a structure, its fields, and values for each.
type Add<'a> = dyn FnMut(&[&str], &[&str], &[&str]) + 'a;

/// Values for a field.
const FEW: &[&str] = &["0", "1", "77777"];
/// The same, for fields of which there are many.
const TWO: &[&str] = &["0", "3"];

fn words(list: &str) -> Vec<&str> {
    list.split_whitespace().collect()
}

/// The way to the inode of a path.
fn inode(v: &Volume, path: &str) -> String {
    format!("inode {}", v.resolve(path.as_bytes(), false).unwrap().ino)
}

/// Every damage by xfs_db.
pub fn db_damages(v: &Volume) -> Vec<Damage> {
    let mut out = Vec::new();
    let mut add = |go: &[&str], fields: &[&str], values: &[&str]| {
        for field in fields {
            for value in values {
                out.push(Damage::Db {
                    go: go.iter().map(|s| s.to_string()).collect(),
                    field: field.to_string(),
                    value: value.to_string(),
                });
            }
        }
    };
    group_damages(&mut add);
    inode_damages(v, &mut add);
    directory_damages(v, &mut add);
    attribute_damages(v, &mut add);
    out
}

/// Superblocks, headers and B-trees of allocation groups.
fn group_damages(add: &mut Add<'_>) {
    let sb = "magicnum blocksize dblocks rblocks rextents uuid logstart rootino rbmino rsumino \
              rextsize agblocks agcount rbmblocks logblocks versionnum sectsize inodesize \
              inopblock blocklog sectlog inodelog inopblog agblklog rextslog inprogress imax_pct \
              icount ifree fdblocks frextents uquotino gquotino pquotino qflags flags shared_vn \
              inoalignmt unit width dirblklog logsectlog logsectsize logsunit features2 \
              bad_features2 features_compat features_ro_compat features_incompat \
              features_log_incompat spino_align meta_uuid";
    add(&["sb 0"], &words(sb), &["0", "3"]);
    add(&["sb 1"], &words(sb), &["0", "77"]);
    let agf = "magicnum versionnum seqno length bnoroot cntroot rmaproot refcntroot bnolevel \
               cntlevel rmaplevel refcntlevel rmapblocks refcntblocks flfirst fllast flcount \
               freeblks longest btreeblks uuid";
    add(&["agf 1"], &words(agf), FEW);
    let agi = "magicnum versionnum seqno length count root level freecount newino dirino \
               unlinked[0] unlinked[63] uuid free_root free_level ino_blocks fino_blocks";
    add(&["agi 1"], &words(agi), FEW);
    add(
        &["agfl 1"],
        &[
            "magicnum", "seqno", "uuid", "bno[0]", "bno[1]", "bno[2]", "bno[3]",
        ],
        FEW,
    );
    // B-trees of an allocation group: root and leaf.
    let node = words(
        "magic level numrecs leftsib rightsib bno uuid owner keys[1].startblock \
         keys[2].startblock keys[1].startino keys[2].startino keys[1].owner ptrs[1] ptrs[2] \
         keys[1].blockcount",
    );
    let leaf = words(
        "magic level numrecs leftsib rightsib bno uuid owner recs[1].startblock \
         recs[2].startblock recs[1].blockcount recs[2].blockcount recs[1].startino \
         recs[2].startino recs[1].freecount recs[1].count recs[1].holemask recs[1].free \
         recs[1].owner recs[2].owner recs[1].offset recs[2].offset recs[1].extentflag \
         recs[1].attrfork recs[1].bmbtblock recs[1].refcount recs[2].refcount",
    );
    for (header, root) in [
        ("agf 0", "addr bnoroot"),
        ("agf 0", "addr cntroot"),
        ("agf 0", "addr rmaproot"),
        ("agf 0", "addr refcntroot"),
        ("agi 0", "addr root"),
        ("agi 0", "addr free_root"),
    ] {
        add(&[header, root], &node, TWO);
        add(&[header, root], &leaf, TWO);
        add(&[header, root, "addr ptrs[1]"], &leaf, TWO);
    }
}

/// Inodes, and what they hold themselves.
fn inode_damages(v: &Volume, add: &mut Add<'_>) {
    let ino = |path: &str| inode(v, path);
    let core = words(
        "core.magic core.mode core.version core.format core.uid core.nlinkv2 core.projid_lo \
         core.projid_hi core.size core.nblocks core.extsize core.nextents core.naextents \
         core.forkoff core.aformat core.realtime core.prealloc core.newrtbm core.immutable \
         core.append core.rtinherit core.projinherit core.nosymlinks core.extsz core.extszinherit \
         core.filestream core.gen core.nrext64 next_unlinked v3.inumber v3.uuid v3.flags2 \
         v3.cowextsize v3.reflink v3.cowextsz v3.bigtime v3.dax v3.crtime.sec core.atime.nsec",
    );
    let files = [
        "/",
        "/files/plain-4097",
        "/files/many-extents",
        "/files/shared-copy",
        "/dir0",
        "/dir5",
        "/dir60",
        "/dir500",
        "/dir6000",
        "/special/link-60",
        "/special/link-1000",
        "/special/char",
        "/attrs/small",
        "/attrs/tree",
    ];
    for (i, f) in files.iter().enumerate() {
        let values = if i % 2 == 0 { &["0", "5"] } else { &["1", "9"] };
        add(&[&ino(f)], &core, values);
    }
    let bmx = words(
        "u3.bmx[0].startoff u3.bmx[0].startblock u3.bmx[0].blockcount u3.bmx[0].extentflag \
         u3.bmx[1].startoff u3.bmx[1].startblock u3.bmx[1].blockcount",
    );
    for f in [
        "/files/plain-70000",
        "/files/punched",
        "/files/shared-copy",
        "/dir60",
        "/dir500",
    ] {
        add(&[&ino(f)], &bmx, &["0", "1", "999999999"]);
    }
    let bmbt = words("u3.bmbt.level u3.bmbt.numrecs u3.bmbt.keys[1].startoff u3.bmbt.ptrs[1]");
    add(&[&ino("/files/many-extents")], &bmbt, FEW);
    add(
        &[&ino("/files/many-extents"), "addr u3.bmbt.ptrs[1]"],
        &words(
            "magic level numrecs leftsib rightsib bno uuid owner keys[1].startoff ptrs[1] \
             recs[1].startoff recs[1].startblock recs[1].blockcount recs[1].extentflag \
             recs[2].startoff recs[2].startblock recs[2].blockcount",
        ),
        FEW,
    );
    let sf = words(
        "u3.sfdir3.hdr.count u3.sfdir3.hdr.i8count u3.sfdir3.hdr.parent.i4 \
         u3.sfdir3.list[0].namelen u3.sfdir3.list[0].offset u3.sfdir3.list[0].name \
         u3.sfdir3.list[0].inumber.i4 u3.sfdir3.list[0].filetype u3.sfdir3.list[1].inumber.i4 \
         u3.sfdir3.list[1].name u3.sfdir3.list[1].filetype",
    );
    for f in ["/dir0", "/dir5", "/special", "/shrunk", "/deep"] {
        add(&[&ino(f)], &sf, &["0", "1", "5"]);
    }
    let sfattr = words(
        "a.sfattr.hdr.totsize a.sfattr.hdr.count a.sfattr.list[0].namelen \
         a.sfattr.list[0].valuelen a.sfattr.list[0].root a.sfattr.list[0].secure \
         a.sfattr.list[0].name a.sfattr.list[1].namelen a.sfattr.list[1].valuelen",
    );
    add(&[&ino("/attrs/small")], &sfattr, &["0", "1", "7"]);
}

/// Blocks of directories.
fn directory_damages(v: &Volume, add: &mut Add<'_>) {
    let ino = |path: &str| inode(v, path);
    let per_leaf = 1u64 << (35 - v.geometry().blocklog);
    let data = words(
        "bhdr.hdr.magic bhdr.hdr.uuid bhdr.hdr.owner bhdr.hdr.bno bhdr.bestfree[0].offset \
         bhdr.bestfree[0].length bhdr.bestfree[1].length bu[0].inumber bu[0].namelen bu[0].name \
         bu[0].tag bu[0].filetype bu[1].inumber bu[1].tag bu[2].inumber bu[2].namelen bu[2].name \
         bu[2].tag bu[2].filetype bu[3].inumber bu[3].filetype bu[4].inumber bleaf[0].hashval \
         bleaf[0].address bleaf[1].hashval bleaf[1].address btail.count btail.stale \
         dhdr.hdr.magic dhdr.hdr.uuid dhdr.hdr.owner dhdr.hdr.bno dhdr.bestfree[0].offset \
         dhdr.bestfree[0].length dhdr.bestfree[1].length du[0].inumber du[0].namelen du[0].name \
         du[0].tag du[1].inumber du[2].inumber du[2].namelen du[2].name du[2].tag \
         du[2].filetype du[3].inumber du[3].filetype",
    );
    for f in ["/dir60", "/dir500", "/dir6000", "/holes", "/"] {
        add(&[&ino(f), "dblock 0"], &data, &["0", "1", "4"]);
    }
    let leaf = words(
        "lhdr.info.hdr.forw lhdr.info.hdr.back lhdr.info.hdr.magic lhdr.info.uuid \
         lhdr.info.owner lhdr.info.bno lhdr.count lhdr.stale lents[0].hashval lents[0].address \
         lents[5].hashval lents[5].address lbests[0] lbests[1] ltail.bestcount \
         nhdr.info.hdr.forw nhdr.info.hdr.back nhdr.info.hdr.magic nhdr.info.owner nhdr.count \
         nhdr.level nbtree[0].hashval nbtree[0].before nbtree[1].hashval nbtree[1].before \
         fhdr.hdr.magic fhdr.hdr.owner fhdr.firstdb fhdr.nvalid fhdr.nused fbests[0] fbests[1]",
    );
    for f in ["/dir500", "/dir6000", "/holes"] {
        for at in [per_leaf, per_leaf + 1, 2 * per_leaf] {
            add(&[&ino(f), &format!("dblock {at}")], &leaf, TWO);
        }
    }
}

/// Blocks of attributes and of long symbolic links.
fn attribute_damages(v: &Volume, add: &mut Add<'_>) {
    let ino = |path: &str| inode(v, path);
    let attr = words(
        "hdr.info.hdr.forw hdr.info.hdr.back hdr.info.hdr.magic hdr.info.uuid hdr.info.owner \
         hdr.info.bno hdr.count hdr.usedbytes hdr.firstused hdr.holes hdr.freemap[0].base \
         hdr.freemap[0].size hdr.level entries[0].hashval entries[0].nameidx \
         entries[0].incomplete entries[0].root entries[0].secure entries[0].local \
         entries[1].hashval entries[1].nameidx nvlist[0].namelen nvlist[0].valuelen \
         nvlist[0].name nvlist[0].valueblk btree[0].hashval btree[0].before btree[1].hashval \
         magic offset bytes owner uuid bno",
    );
    for (f, blocks) in [("/attrs/leaf", 1), ("/attrs/tree", 3), ("/attrs/large", 4)] {
        for b in 0..blocks {
            add(&[&ino(f), &format!("ablock {b}")], &attr, &["0", "2"]);
        }
    }
    let remote = words("magic offset bytes owner uuid bno");
    add(&[&ino("/special/link-1000"), "dblock 0"], &remote, TWO);
    let ahead = ["0x700000000000"];
    add(&[&ino("/special/link-1000"), "dblock 0"], &["lsn"], &ahead);
}

/// All damages to an image.
pub fn all_damages(path: &Path) -> Vec<Damage> {
    let v = Volume::open(Arc::new(uvfs_xfs::blocks::FileBlocks::open(path).unwrap())).unwrap();
    let mut damages = db_damages(&v);
    let size = std::fs::metadata(path).unwrap().len();
    for i in 1..16 {
        damages.push(Damage::Truncate(size / 16 * i / 512 * 512));
    }
    for seed in 0..600 {
        damages.push(Damage::Fields(seed));
    }
    for seed in 0..400 {
        damages.push(Damage::Random(seed));
        if seed % 2 == 0 {
            damages.push(Damage::Overwrite(seed));
        }
    }
    damages
}
