//! A repair keeps the contents that look lost and are not.

use super::*;
use mutate::Region;
use std::os::unix::fs::FileExt;
use uvfs_xfs::format::{
    Agi, BTREE_LONG_CRC_OFFSET, BTREE_SHORT_CRC_OFFSET, BmdrBlock, BtreeLong, BtreeLongCrc,
    BtreeShort, DinodeV2, FORMAT_BTREE,
};

/// Repairs a damaged copy of the image; xfs_repair and the kernel find it sound, and all files are what they were.
fn nothing_is_lost(image: &Image, name: &str, damage: impl Fn(&File)) {
    let path = image.dir().join(format!("kept-{name}"));
    copy(&image.path(), &path);
    damage(&File::options().read(true).write(true).open(&path).unwrap());
    assert!(!findings(&path).is_empty(), "{name}: nothing is found");
    let o = repair_file(&path, &options()).unwrap();
    assert_eq!(o.left_count, 0, "{name}: {:?}", o.left);
    assert_eq!(findings(&path), [""; 0], "{name}");
    assert_eq!(xfs_repair_n(&path), None, "{name}");
    let v = Volume::open(Arc::new(FileBlocks::open(&path).unwrap())).unwrap();
    let before = image.open();
    for link in ["special/link-60", "special/link-1000"] {
        let target = |v: &Volume| {
            v.readlink(&v.resolve(link.as_bytes(), false).unwrap())
                .unwrap()
        };
        assert_eq!(target(&v), target(&before), "{name}: {link}");
    }
    let (was, is) = (files(&image.path()), files(&path));
    let lost: Vec<&u64> = was
        .iter()
        .filter(|f| is.get(f.0) != Some(f.1))
        .map(|f| f.0)
        .collect();
    assert!(
        lost.is_empty(),
        "{name}: lost {lost:?} of {}: {:?}",
        was.len(),
        o.changes
    );
    drop(Mount::new(&path, "rw,nouuid").expect(name));
    fs::remove_file(&path).unwrap();
}

fn bytes_of(file: &File, r: &Region) -> Vec<u8> {
    let mut bytes = vec![0; r.len];
    file.read_exact_at(&mut bytes, r.offset).unwrap();
    bytes
}

/// Flips a bit at the end of the structure: what it holds is whole, and its checksum wrong.
fn flip_the_last_bit(file: &File, r: &Region) {
    let mut bytes = bytes_of(file, r);
    *bytes.last_mut().unwrap() ^= 1;
    file.write_all_at(&bytes, r.offset).unwrap();
}

/// A wrong checksum alone costs no symbolic link, no tree of extents and no directory.
#[test]
fn only_the_checksum_is_wrong() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    for kind in ["symbolic link", "bmbt", "directory data", "attribute leaf"] {
        let r = regions.iter().rfind(|r| r.kind == kind).unwrap();
        nothing_is_lost(&image, &kind.replace(' ', "-"), |file| {
            flip_the_last_bit(file, r)
        });
    }
}

/// The attributes' place says that the root of the extents' tree has no room: the repair looks for the place
/// where it has.
#[test]
fn a_tree_without_room_for_its_root() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let is_tree = |r: &&Region| {
        let mut bytes = vec![0; r.len];
        let there = r.kind == "inode" && mem.get(r.offset, &mut bytes);
        let d = DinodeV2::at(&bytes, 0).unwrap();
        there && d.mode.get() >> 12 == 8 && d.format == FORMAT_BTREE
    };
    let r = regions.iter().find(is_tree).unwrap();
    for forkoff in [1u8, 2, 9, 255] {
        nothing_is_lost(&image, &format!("forkoff-{forkoff}"), |file| {
            let mut bytes = bytes_of(file, r);
            assert!(BmdrBlock::at(&bytes, DINODE_V3_SIZE).unwrap().numrecs.get() > 0);
            bytes[82] = forkoff;
            store_crc(&mut bytes, DINODE_CRC_OFFSET);
            file.write_all_at(&bytes, r.offset).unwrap();
        });
    }
}

/// The link count of version 1, which no other has.
#[test]
fn the_old_link_count() {
    let Some(image) = base() else { return };
    let root = image.open().geometry().rootino;
    let offset = image.open().geometry().inode(root).map(|a| {
        (u64::from(a.agbno) << 10)
            + u64::from(a.index) * u64::from(image.open().geometry().inode_size)
    });
    nothing_is_lost(&image, "onlink", |file| {
        let mut bytes = vec![0; image.open().geometry().inode_size as usize];
        file.read_exact_at(&mut bytes, offset.unwrap()).unwrap();
        bytes[7] = 1;
        store_crc(&mut bytes, DINODE_CRC_OFFSET);
        file.write_all_at(&bytes, offset.unwrap()).unwrap();
    });
}

/// A free inode has a flag that no version of XFS knows.
#[test]
fn an_unknown_flag_of_a_free_inode() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let is_free = |r: &&Region| {
        let mut bytes = vec![0; r.len];
        let there = r.kind == "inode" && mem.get(r.offset, &mut bytes);
        there && DinodeV2::at(&bytes, 0).unwrap().mode.get() == 0
    };
    let regions = mutate::regions(&mem);
    let r = regions.iter().find(is_free).unwrap();
    nothing_is_lost(&image, "flags2", |file| {
        let mut bytes = bytes_of(file, r);
        bytes[120] = 1;
        store_crc(&mut bytes, DINODE_CRC_OFFSET);
        file.write_all_at(&bytes, r.offset).unwrap();
    });
}

/// A block of a file's extent tree that says that it has fewer records than it has, or that can't be read: the reverse
/// mapping tree has the extents.
#[test]
fn extent_trees_that_forgot_records() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let v = image.open();
    let ino = v.resolve(b"/files/many-extents", false).unwrap().ino;
    let records = |r: &Region| {
        let mut bytes = vec![0; r.len];
        assert!(mem.get(r.offset, &mut bytes));
        let head = BtreeLong::at(&bytes, 0).unwrap();
        let owner = BtreeLongCrc::at(&bytes, BtreeLong::SIZE).unwrap().owner;
        let leaf = head.level.get() == 0 && owner.get() == ino;
        leaf.then_some(head.numrecs.get())
    };
    let mut maps = regions.iter().filter(|r| r.kind == "bmbt");
    let (leaf, all) = maps.find_map(|r| Some((r, records(r)?))).unwrap();
    for left in [1, all - 1, u16::MAX] {
        nothing_is_lost(&image, &format!("bmbt-{left}"), |file| {
            let mut bytes = bytes_of(file, leaf);
            bytes[6..8].copy_from_slice(&left.to_be_bytes());
            store_crc(&mut bytes, BTREE_LONG_CRC_OFFSET);
            file.write_all_at(&bytes, leaf.offset).unwrap();
        });
    }
}

/// A block of an inode tree that says that it has fewer records than it has, with a group header that agrees or
/// not: directories lead to the inodes.
#[test]
fn inode_trees_that_forgot_records() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let leaf = |r: &&Region| {
        let mut bytes = vec![0; r.len];
        assert!(mem.get(r.offset, &mut bytes));
        let head = BtreeShort::at(&bytes, 0).unwrap();
        r.kind == "inobt" && head.level.get() == 0 && head.numrecs.get() > 3
    };
    let leaf = regions
        .iter()
        .filter(|r| r.kind == "inobt")
        .find(leaf)
        .unwrap();
    let mut header = regions.iter().filter(|r| r.kind == "AGI");
    let header = header.rfind(|r| r.offset <= leaf.offset).unwrap();
    for agrees in [false, true] {
        nothing_is_lost(&image, &format!("inobt-{agrees}"), |file| {
            let mut bytes = bytes_of(file, leaf);
            bytes[6..8].copy_from_slice(&1u16.to_be_bytes());
            store_crc(&mut bytes, BTREE_SHORT_CRC_OFFSET);
            file.write_all_at(&bytes, leaf.offset).unwrap();
            if agrees {
                let mut bytes = bytes_of(file, header);
                let mut agi = *Agi::at(&bytes, 0).unwrap();
                agi.count.set(64);
                agi.put(&mut bytes, 0);
                store_crc(&mut bytes, header.crc.unwrap());
                file.write_all_at(&bytes, header.offset).unwrap();
            }
        });
    }
}
