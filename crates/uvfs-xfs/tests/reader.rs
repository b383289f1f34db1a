//! The reader against the kernel: images that mkfs.xfs made in many feature combinations, filled
//! through a mount, must look the same through both.
//!
//! Needs root, loop devices and mkfs.xfs. Every combination runs with `UVFS_TEST_FULL=1`.

mod common;

use common::*;
use rustix::fs as rfs;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::format::*;
use uvfs_xfs::{Error, Fork, LogState, Volume};

/// Makes, fills and compares one image.
fn through_kernel(args: &[&str]) {
    if !can_run() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(args), "mkfs.xfs {args:?}");
    fill_and_compare(&image, args);
}

fn fill_and_compare(image: &Image, args: &[&str]) {
    let block_size = image.open().geometry().block_size.into();
    let mount = match Mount::new(&image.path(), "rw") {
        Ok(m) => m,
        Err(e) => {
            return uvfs_testing::say(format_args!("this kernel does not mount {args:?}: {e}"));
        }
    };
    fill(mount.path(), block_size);
    drop(mount);
    let volume = image.open();
    assert_eq!(volume.warnings(), &[] as &[String], "{args:?}");
    let mount = Mount::new(&image.path(), "ro,norecovery,noatime").unwrap();
    let count = compare(&volume, mount.path());
    if block_size == 1024 {
        // Every form of both forks was there.
        let seen = formats(&volume, mount.path());
        for fork in [false, true] {
            for format in [FORMAT_LOCAL, FORMAT_EXTENTS, FORMAT_BTREE] {
                assert!(seen.contains_key(&(fork, format)), "{seen:?}");
            }
        }
    }
    assert!(count > 6800, "{count} inodes");
}

macro_rules! combinations {
    ($($name:ident: $args:expr,)*) => {$(
        /// uvfs reads an image of this shape as the kernel does.
        #[test]
        fn $name() {
            through_kernel($args);
        }
    )*};
}

macro_rules! more_combinations {
    ($($name:ident: $args:expr,)*) => {$(
        /// As above, for the less common shapes.
        #[test]
        fn $name() {
            if uvfs_testing::runs_long() {
                through_kernel($args);
            }
        }
    )*};
}

combinations! {
    defaults: &[],
    block_1k: &["-b", "size=1024"],
    block_64k: &["-b", "size=65536"],
    all_features: &["-m", "rmapbt=1,reflink=1,finobt=1,bigtime=1,inobtcount=1", "-i", "sparse=1,nrext64=1"],
    no_features: &["-m", "rmapbt=0,reflink=0,finobt=0,bigtime=0,inobtcount=0", "-i", "sparse=0"],
    directories_64k: &["-n", "size=65536"],
    sector_4k_inode_2k: &["-s", "size=4096", "-i", "size=2048"],
}

more_combinations! {
    block_2k: &["-b", "size=2048", "-m", "rmapbt=1"],
    block_16k: &["-b", "size=16384"],
    block_32k_sector_32k: &["-b", "size=32768", "-s", "size=32768"],
    block_1k_directories_8k: &["-b", "size=1024", "-n", "size=8192", "-i", "nrext64=1"],
    block_1k_directories_64k: &["-b", "size=1024", "-n", "size=65536"],
    inode_1k: &["-i", "size=1024"],
    no_nrext64: &["-i", "nrext64=0"],
    no_finobt_no_sparse: &["-m", "finobt=0,inobtcount=0", "-i", "sparse=0"],
    no_reflink: &["-m", "reflink=0"],
    many_groups_striped: &["-d", "agcount=5,su=65536,sw=3", "-l", "su=65536,size=64m"],
    sector_4k_rmapbt: &["-s", "size=4096", "-m", "rmapbt=1"],
    no_bigtime: &["-m", "bigtime=0,inobtcount=0"],
    block_8k_directories_32k: &["-b", "size=8192", "-n", "size=32768"],
    v4: &["-m", "crc=0"],
    v4_block_512: &["-m", "crc=0", "-b", "size=512"],
}

/// Version 4, and names without case: the tree comes from mkfs, so that no kernel is needed.
fn through_mkfs(args: &[&str]) -> Option<Image> {
    if !can_run() {
        return None;
    }
    let tree = proto::tree(args.contains(&"crc=0"));
    let Some(image) = proto::make(args, &tree) else {
        uvfs_testing::say(format_args!("this mkfs.xfs does not make {args:?}"));
        return None;
    };
    let volume = image.open();
    assert!(volume.log().is_clean(), "{:?}", volume.log());
    let count = proto::compare(&volume, &tree);
    assert!(count > 3500, "{count} inodes");
    Some(image)
}

/// Images of the old format can be read.
#[test]
fn v4_from_mkfs() {
    let Some(image) = through_mkfs(&["-m", "crc=0"]) else {
        return;
    };
    let small: Vec<(String, usize)> = (0..6).map(|i| (format!("small-{i}"), 10 + i)).collect();
    let mut all: Vec<(&str, usize)> = small.iter().map(|(n, l)| (n.as_str(), *l)).collect();
    all.extend([("medium", 200), ("large", 20_000)]);
    let set = proto::attributes(&image, "/plain-1", &all);
    eprintln!("xfs_db set {set} attributes of {}", all.len());
}

/// Images of the oldest format that mkfs.xfs makes can be read.
#[test]
fn v4_old_from_mkfs() {
    through_mkfs(&[
        "-m",
        "crc=0",
        "-b",
        "size=512",
        "-n",
        "ftype=0",
        "-i",
        "attr=1,projid32bit=0",
        "-l",
        "lazy-count=0,version=1",
    ]);
}

/// A name is found by another case on a file system that ignores case.
#[test]
fn names_without_case() {
    if !can_run() {
        return;
    }
    through_mkfs(&["-n", "version=ci"]);
    let tree = proto::Node::Dir(
        (0..200)
            .map(|i| (format!("Entry-{i}"), proto::Node::Fifo))
            .collect(),
    );
    let Some(image) = proto::make(&["-n", "version=ci"], &tree) else {
        return;
    };
    let volume = image.open();
    let root = volume.root().unwrap();
    for i in 0..200 {
        let exact = volume
            .lookup(&root, format!("Entry-{i}").as_bytes())
            .unwrap();
        assert_eq!(
            volume
                .lookup(&root, format!("eNTRY-{i}").as_bytes())
                .unwrap(),
            exact
        );
    }
}

/// Parent pointers are read over and not shown. Old versions of mkfs.xfs cannot make such a file
/// system, so the feature is switched on in an empty one.
#[test]
fn parent_pointers() {
    if !can_run() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&[]));
    patch_superblock(&image.path(), |sb| {
        sb.features_incompat
            .set(sb.features_incompat.get() | INCOMPAT_PARENT | INCOMPAT_EXCHRANGE);
    });
    fill_and_compare(&image, &["parent=1"]);
    assert!(image.open().geometry().features.parent);
}

/// Changes the first superblock and sets its checksum right.
fn patch_superblock(image: &Path, change: impl FnOnce(&mut Superblock)) {
    use zerocopy::FromBytes;
    let file = File::options().read(true).write(true).open(image).unwrap();
    let mut sector = vec![0; 512];
    file.read_exact_at(&mut sector, 0).unwrap();
    change(Superblock::mut_from_prefix(&mut sector).unwrap().0);
    store_crc(&mut sector, SB_CRC_OFFSET);
    file.write_all_at(&sector, 0).unwrap();
}

/// An image that cannot be read is refused by name.
#[test]
fn refusals() {
    if !can_run() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&[]));
    let open = || Volume::open(Arc::new(FileBlocks::open(&image.path()).unwrap()));
    for (bit, name) in [
        (INCOMPAT_METADIR, "metadir"),
        (INCOMPAT_ZONED, "zoned"),
        (1 << 30, "unknown"),
    ] {
        patch_superblock(&image.path(), |sb| {
            sb.features_incompat.set(sb.features_incompat.get() | bit);
        });
        match open() {
            Err(Error::Unsupported(what)) => assert!(what.contains(name), "{what}"),
            other => panic!("{:?}", other.map(|_| "opened")),
        }
        patch_superblock(&image.path(), |sb| {
            sb.features_incompat.set(sb.features_incompat.get() & !bit);
        });
    }
    patch_superblock(&image.path(), |sb| {
        sb.features_incompat
            .set(sb.features_incompat.get() | INCOMPAT_NEEDSREPAIR);
    });
    let volume = open().unwrap();
    assert!(
        volume
            .warnings()
            .iter()
            .any(|w| w.contains("needing repair"))
    );
    // A wrong checksum, and something else altogether.
    let file = File::options().write(true).open(image.path()).unwrap();
    file.write_all_at(b"label", 108).unwrap();
    assert!(matches!(open(), Err(e @ Error::Corrupt { .. }) if e.errno() == 74));
    file.write_all_at(b"EXT4", 0).unwrap();
    assert!(matches!(open(), Err(Error::NotXfs { .. })));
    file.set_len(100).unwrap();
    assert!(matches!(open(), Err(Error::Io { .. })));
}

/// A file system that was frozen and copied while in use: its log is dirty, with an inode that is
/// unlinked but open. Freezing has written everything in place, so nothing is missing.
#[test]
fn dirty_log() {
    if !can_run() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&[]));
    let copy = image.dir().join("copy");
    let crashed = image.dir().join("crashed");
    let mount = Mount::new(&image.path(), "rw").unwrap();
    fill(mount.path(), 4096);
    let open = File::create(mount.path().join("unlinked")).unwrap();
    open.write_all_at(&pattern(99, 100_000), 0).unwrap();
    fs::remove_file(mount.path().join("unlinked")).unwrap();
    rfs::syncfs(&open).unwrap();
    run(
        "cp",
        &[
            "--sparse=always".as_ref(),
            image.path().as_os_str(),
            crashed.as_os_str(),
        ],
    );
    run("xfs_freeze", &["-f".as_ref(), mount.path().as_os_str()]);
    run(
        "cp",
        &[
            "--sparse=always".as_ref(),
            image.path().as_os_str(),
            copy.as_os_str(),
        ],
    );
    run("xfs_freeze", &["-u".as_ref(), mount.path().as_os_str()]);
    drop(open);
    drop(mount);
    assert!(image.open().log().is_clean());

    let volume = Volume::open(Arc::new(FileBlocks::open(&copy).unwrap())).unwrap();
    let replayed = |volume: &Volume| matches!(volume.log(), LogState::Replayed { .. });
    assert!(replayed(&volume), "{:?}", volume.log());
    assert!(volume.warnings().is_empty(), "{:?}", volume.warnings());
    let mount = Mount::new(&copy, "ro,norecovery,nouuid,noatime").unwrap();
    assert!(compare(&volume, mount.path()) > 6800);
    drop(mount);

    // Without the freeze much is in the log only: the reader and the kernel see the same of it.
    let volume = Volume::open(Arc::new(FileBlocks::open(&crashed).unwrap())).unwrap();
    assert!(replayed(&volume), "{:?}", volume.log());
    let again = image.dir().join("again");
    fs::copy(&crashed, &again).unwrap();
    let mount = Mount::new(&again, "rw,nouuid,noatime").unwrap();
    assert!(compare(&volume, mount.path()) > 6800);
    drop(mount);
    // Replayed, it is clean.
    drop(Mount::new(&crashed, "rw,nouuid").unwrap());
    let volume = Volume::open(Arc::new(FileBlocks::open(&crashed).unwrap())).unwrap();
    assert!(volume.log().is_clean(), "{:?}", volume.log());
}

/// Quota inodes are found, and their records are what the format says.
#[test]
fn quotas() {
    if !can_run() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&[]));
    let mount = match Mount::new(&image.path(), "rw,uquota,gquota,pquota") {
        Ok(m) => m,
        Err(e) => {
            return uvfs_testing::say(format_args!("this kernel has no XFS quotas: {e}"));
        }
    };
    fill_some(mount.path());
    drop(mount);
    let volume = image.open();
    let g = volume.geometry();
    for ino in g.quota_inodes {
        let inode = volume.inode(ino.expect("three quota inodes")).unwrap();
        let mut records = 0;
        // Quota files have blocks, but no size.
        volume
            .map(&inode, Fork::Data, 0, 1, &mut |e| {
                let at = g.daddr(g.fsb(e.startblock).unwrap()) * 512;
                let mut record = vec![0; size_of::<Dquot>()];
                volume.blocks().read_data(at, &mut record).unwrap();
                let dquot = check_dquot(&record, &g.ident(0, None)).unwrap();
                assert_eq!(dquot.id.get(), 0);
                records += 1;
                Ok(true)
            })
            .unwrap();
        assert_eq!(records, 1);
    }
}
