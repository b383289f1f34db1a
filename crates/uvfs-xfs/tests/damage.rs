//! The checker against xfs_repair -n.

mod common;

use common::*;
use std::path::Path;
use std::sync::Arc;
use uvfs_xfs::Blocks;
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::check::{Options, Outcome, Progress, check};

fn check_file(path: &Path, options: &Options) -> uvfs_xfs::Result<Outcome> {
    let blocks: Arc<dyn Blocks> = Arc::new(FileBlocks::open(path).unwrap());
    check(blocks, options, &Progress::default())
}

fn assert_clean(path: &Path, what: &str) {
    let outcome = check_file(path, &Options::default()).unwrap();
    for f in &outcome.findings {
        eprintln!("{f}");
    }
    assert_eq!(outcome.count, 0, "{what}");
    assert!(outcome.log.is_clean(), "{what}");
    assert!(!outcome.incomplete);
}

fn clean(args: &[&str]) {
    if !can_run() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(args), "mkfs.xfs {args:?}");
    assert_clean(&image.path(), "empty");
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
    assert_clean(&image.path(), "filled");
}

#[test]
fn clean_default() {
    clean(&[]);
}

#[test]
fn clean_1k_rmapbt() {
    clean(&["-b", "size=1024", "-m", "rmapbt=1,reflink=1"]);
}

#[test]
fn clean_16k() {
    clean(&["-b", "size=16384", "-m", "rmapbt=1", "-i", "size=1024"]);
}

#[test]
fn clean_large_dirs() {
    clean(&["-b", "size=1024", "-n", "size=16384", "-m", "finobt=0,reflink=0", "-i", "sparse=0"]);
}
