//! The words in which a repair reports its changes.

use super::*;
use uvfs_xfs::mkfs::{From, MkfsOptions, MkfsProgress, mkfs};

/// An inode that is cleared and then becomes lost+found is not named by the path that it had.
#[test]
fn an_inode_that_becomes_lost_and_found() {
    let scratch = tempfile::tempdir().unwrap();
    let (source, path) = (scratch.path().join("source"), scratch.path().join("image"));
    fs::create_dir_all(source.join("directory")).unwrap();
    fs::write(source.join("directory/orphan"), "orphan").unwrap();
    fs::write(source.join("file"), "file").unwrap();
    let from = From::Directory(source);
    mkfs(
        &path,
        &MkfsOptions::default(),
        from,
        &MkfsProgress::default(),
    )
    .unwrap();
    let mut image = MemImage::load(&path).unwrap();
    let v = Volume::open(Arc::new(image.clone())).unwrap();
    let g = v.geometry();
    let mut cleared = BTreeMap::new();
    for name in ["/directory", "/file"] {
        let ino = v.resolve(name.as_bytes(), false).unwrap().ino;
        let a = g.inode(ino).unwrap();
        let block = uvfs_xfs::geometry::AgBlock {
            agno: a.agno,
            agbno: a.agbno,
        };
        let at = (g.daddr(block) << 9) + (u64::from(a.index) << g.inodelog);
        let mut raw = vec![0; g.inode_size as usize];
        assert!(image.get(at, &mut raw));
        let mut d = *Dinode::at(&raw, 0).unwrap();
        // No type has this number.
        d.v2.mode.set(0xf1a4);
        d.put(&mut raw, 0);
        store_crc(&mut raw, DINODE_CRC_OFFSET);
        image.put(at, &raw);
        cleared.insert(ino, name);
    }
    let o = repair_mem(&image, &MemSink::new(&image, usize::MAX, EIO)).unwrap();
    assert_eq!(o.left_count, 0, "{:?}", o.left);
    let made = o
        .changes
        .iter()
        .position(|c| c.place.what.name() == "lost+found");
    let (before, after) = o.changes.split_at(made.expect("lost+found is made"));
    let lost = after[0].place.inode.unwrap();
    let old = cleared.get(&lost).expect("an inode that was cleared");
    let paths = |changes: &[uvfs_xfs::repair::Change]| -> BTreeSet<String> {
        let of_it = changes.iter().filter(|c| c.place.inode == Some(lost));
        of_it.filter_map(|c| c.path.clone()).collect()
    };
    assert_eq!(paths(before), BTreeSet::from([old.to_string()]));
    assert_eq!(paths(after), BTreeSet::from(["/lost+found".to_string()]));
}
