//! Inode trees damaged together with what their inodes lead to.

use super::*;
use uvfs_xfs::format::{BTREE_LONG_CRC_OFFSET, BTREE_SHORT_CRC_OFFSET};

/// Trees that are damaged together with what their inodes lead to are repaired in rounds, and no inode in
/// them is lost: what only the inodes say is not taken for free.
#[test]
fn a_tree_and_a_directory_damaged_together() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let before = files(&image.path());
    let of = |kind: &str| {
        regions
            .iter()
            .filter(|r| r.kind == kind)
            .collect::<Vec<_>>()
    };
    let (trees, dirs, maps) = (of("inobt"), of("directory data"), of("bmbt"));
    for (i, tree) in trees.iter().enumerate() {
        for others in [&dirs, &maps] {
            let other = others[i * 7 % others.len()];
            let mut damaged = mem.clone();
            damaged.put(tree.offset + 60, &[0xff; 100]);
            damaged.put(other.offset + 70, &[0xff; 100]);
            let what = (tree.offset, other.kind, other.offset);
            let (after, _) = mended(&damaged).unwrap_or_else(|e| panic!("{what:?}: {e}"));
            let after = files_of(after);
            let lost: Vec<_> = before
                .iter()
                .filter(|(ino, file)| after.get(ino) != Some(file))
                .map(|(ino, file)| (ino, file, after.get(ino)))
                .collect();
            // A file may lose the extents of a damaged block of its map.
            let most = usize::from(other.kind == "bmbt");
            assert!(lost.len() <= most, "{what:?}: {lost:?}");
        }
    }
}

/// No hole of a part of a cluster stays in the inode tree: for xfs_repair the whole cluster is then a hole, and the
/// inodes in it are lost.
#[test]
fn a_hole_is_whole_clusters() {
    const HOLEMASK: usize = 60;
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let trees: Vec<_> = regions.iter().filter(|r| r.kind == "inobt").collect();
    judged::each(&image, trees.len(), &|i, path| {
        let mut block = vec![0; trees[i].len];
        assert!(mem.get(trees[i].offset, &mut block));
        // Four inodes, of a cluster of 32.
        block[HOLEMASK] ^= 1;
        store_crc(&mut block, BTREE_SHORT_CRC_OFFSET);
        let mut damaged = mem.clone();
        damaged.put(trees[i].offset, &block);
        damages::write_regions(path, &damaged, &regions);
        Some(format!("a hole of four inodes in {:#x}", trees[i].offset))
    });
}

/// A walk over inodes that the check could not see builds the extent tree of a file that claims a directory's
/// block only when all others have theirs: otherwise files that come later lose their data to the new tree.
#[test]
fn a_tree_and_an_extent_of_a_directory() {
    const OWNER: usize = 56;
    const RECORDS: usize = 72;
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let before = files(&image.path());
    let v = image.open();
    let g = v.geometry();
    let file = |path: &str| v.resolve(path.as_bytes(), false).unwrap();
    let (victim, thief) = (file("/dir500"), file("/files/many-extents"));
    assert!(victim.ino < thief.ino);
    let mut theirs = None;
    v.map(&victim, uvfs_xfs::Fork::Data, 0, 1 << 20, &mut |e| {
        theirs = theirs.or(Some(e.startblock));
        Ok(true)
    })
    .unwrap();
    let bytes = |r: &mutate::Region| {
        let mut bytes = vec![0; r.len];
        assert!(mem.get(r.offset, &mut bytes));
        bytes
    };
    let leaf = regions.iter().find(|r| {
        let block = bytes(r);
        let owner = u64::from_be_bytes(block[OWNER..OWNER + 8].try_into().unwrap());
        r.kind == "bmbt" && owner == thief.ino && block[4..6] == [0; 2]
    });
    let leaf = leaf.expect("the file has a tree");
    let mut clash = mem.clone();
    let mut block = bytes(leaf);
    let at = RECORDS + 3 * ExtentRecord::SIZE;
    let mut extent = ExtentRecord::at(&block, at).unwrap().unpack();
    extent.startblock = theirs.unwrap();
    ExtentRecord::pack(&extent).put(&mut block, at);
    store_crc(&mut block, BTREE_LONG_CRC_OFFSET);
    clash.put(leaf.offset, &block);

    let ag_bytes = u64::from(g.agblocks) << g.blocklog;
    let agno = u64::from(g.inode(thief.ino).unwrap().agno);
    let mut trees = 0;
    for tree in regions.iter().filter(|r| r.kind == "inobt") {
        if tree.offset / ag_bytes != agno {
            continue;
        }
        trees += 1;
        let mut damaged = clash.clone();
        damaged.put(tree.offset + 60, &[0xff; 100]);
        let (after, _) = mended(&damaged).unwrap_or_else(|e| panic!("{tree:?}: {e}"));
        let after = files_of(after);
        let kept = |ino: &u64, file| after.get(ino) == Some(file);
        let lost: Vec<_> = before.iter().filter(|(i, f)| !kept(i, f)).collect();
        assert!(
            lost.iter().all(|(ino, _)| **ino == thief.ino),
            "{tree:?}: {lost:?}, and not {}",
            thief.ino
        );
    }
    assert!(trees > 0);
}
