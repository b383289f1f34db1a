//! The reader against the kernel: images that mkfs.xfs made in many feature combinations, filled
//! through a mount, must look the same through both.
//!
//! Needs root, loop devices and mkfs.xfs. Every combination runs with `UVFS_XFS_FULL=1`.

mod common;

use common::*;

/// Makes, fills and compares one image.
fn through_kernel(args: &[&str]) {
    if !can_run() {
        return;
    }
    let image = Image::new();
    if !image.mkfs(args) {
        eprintln!("skipped: this mkfs.xfs does not know {args:?}");
        return;
    }
    fill_and_compare(&image, args);
}

fn fill_and_compare(image: &Image, args: &[&str]) {
    let block_size = image.open().geometry().block_size.into();
    let mount = match Mount::new(&image.path(), "rw") {
        Ok(m) => m,
        Err(e) => {
            eprintln!("skipped: this kernel does not mount {args:?}: {e}");
            return;
        }
    };
    fill(mount.path(), block_size);
    drop(mount);
    let volume = image.open();
    assert_eq!(volume.warnings(), &[] as &[String], "{args:?}");
    let mount = Mount::new(&image.path(), "ro,norecovery,noatime").unwrap();
    let count = compare(&volume, mount.path());
    assert!(count > 6800, "{count} inodes");
}

macro_rules! combinations {
    ($($name:ident: $args:expr,)*) => {$(
        #[test]
        fn $name() {
            through_kernel($args);
        }
    )*};
}

macro_rules! more_combinations {
    ($($name:ident: $args:expr,)*) => {$(
        #[test]
        fn $name() {
            if full() {
                through_kernel($args);
            } else {
                eprintln!("skipped: set UVFS_XFS_FULL=1 to run it");
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
    many_groups_striped: &["-d", "agcount=16,su=65536,sw=4", "-l", "su=65536"],
}
