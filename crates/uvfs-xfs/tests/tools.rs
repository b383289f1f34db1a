//! Listing, showing and copying out of an image, against the kernel's view of the same image.
//! Needs root, loop devices and mkfs.xfs.

mod common;
#[path = "tools/swapped.rs"]
mod swapped;

use common::*;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use uvfs_xfs::tools::{self, LsOptions, Trust};
use uvfs_xfs::{Error, Volume};

fn no_errors(path: &Path, e: &Error) {
    panic!("{}: {e}", path.display());
}

fn filled() -> Option<Image> {
    if !can_run() {
        return None;
    }
    let image = Image::new();
    assert!(image.mkfs(&["-m", "reflink=1,bigtime=1"]));
    let mount = Mount::new(&image.path(), "rw").unwrap();
    fill(mount.path(), 4096);
    drop(mount);
    Some(image)
}

/// Every path below `root` and what identifies its contents and attributes.
fn walk(root: &Path) -> Vec<PathBuf> {
    let (mut all, mut todo) = (vec![], vec![PathBuf::new()]);
    while let Some(dir) = todo.pop() {
        for e in fs::read_dir(root.join(&dir)).unwrap() {
            let e = e.unwrap();
            let path = dir.join(e.file_name());
            if e.file_type().unwrap().is_dir() {
                todo.push(path.clone());
            }
            all.push(path);
        }
    }
    all.sort();
    all
}

/// Copies out of an image keep owners, times, holes and links.
#[test]
fn copy_out_keeps_everything() {
    let Some(image) = filled() else { return };
    // Another XFS file system takes whatever this one has.
    let target = Image::new();
    assert!(target.mkfs(&["-m", "reflink=1,bigtime=1"]));
    let to = Mount::new(&target.path(), "rw").unwrap();
    let volume = image.open();
    let copied = tools::copy_out(&volume, b"/", to.path(), Trust::TRUSTED, &mut no_errors).unwrap();
    assert!(
        copied.files > 6000 && copied.directories > 400 && copied.links == 2,
        "{copied:?}"
    );
    assert_eq!(copied.errors, 0);
    drop(to);
    let to = Mount::new(&target.path(), "ro,noatime").unwrap();
    let from = Mount::new(&image.path(), "ro,norecovery,noatime").unwrap();
    let names = walk(from.path());
    assert_eq!(names, walk(to.path()));
    let mut links = std::collections::HashMap::new();
    for name in names {
        let (a, b) = (from.path().join(&name), to.path().join(&name));
        let (ma, mb) = (
            fs::symlink_metadata(&a).unwrap(),
            fs::symlink_metadata(&b).unwrap(),
        );
        let shown = name.display();
        let facts = |m: &fs::Metadata| {
            let times = (m.mtime(), m.mtime_nsec(), m.atime(), m.atime_nsec());
            let size = if m.is_dir() { 0 } else { m.size() };
            (m.mode(), m.uid(), m.gid(), size, m.nlink(), m.rdev(), times)
        };
        assert_eq!(facts(&ma), facts(&mb), "{shown}");
        assert_eq!(
            *links.entry(ma.ino()).or_insert(mb.ino()),
            mb.ino(),
            "{shown}: links"
        );
        assert_eq!(kernel_xattrs(&a), kernel_xattrs(&b), "{shown}: attributes");
        if ma.is_symlink() {
            assert_eq!(
                fs::read_link(&a).unwrap(),
                fs::read_link(&b).unwrap(),
                "{shown}"
            );
        } else if ma.is_file() {
            // Holes stay holes: no more space than at the source (space beyond the end and
            // unwritten space are not copied).
            assert!(
                mb.blocks() <= ma.blocks(),
                "{shown}: {} > {}",
                mb.blocks(),
                ma.blocks()
            );
            if ma.size() < 32 << 20 {
                assert!(
                    fs::read(&a).unwrap() == fs::read(&b).unwrap(),
                    "{shown}: bytes"
                );
            } else {
                let same = Command::new("cmp")
                    .arg("-n")
                    .arg("16M")
                    .arg(&a)
                    .arg(&b)
                    .status();
                assert!(same.unwrap().success(), "{shown}: bytes");
            }
        }
    }
}

/// `cp` copies into a directory that is there, or to a new name.
#[test]
fn copy_out_as_and_into() {
    let Some(image) = filled() else { return };
    let volume = image.open();
    let dir = image.dir().join("out");
    fs::create_dir(&dir).unwrap();
    tools::copy_out(
        &volume,
        b"/files/plain-4097",
        &dir,
        Trust::TRUSTED,
        &mut no_errors,
    )
    .unwrap();
    assert!(fs::read(dir.join("plain-4097")).unwrap() == pattern(4, 4097));
    tools::copy_out(
        &volume,
        b"files/plain-4097",
        &dir.join("as"),
        Trust::TRUSTED,
        &mut no_errors,
    )
    .unwrap();
    assert!(fs::read(dir.join("as")).unwrap() == pattern(4, 4097));
    tools::copy_out(
        &volume,
        b"/deep/level-0/",
        &dir,
        Trust::TRUSTED,
        &mut no_errors,
    )
    .unwrap();
    assert_eq!(fs::read(dir.join("level-0/level-1/here")).unwrap(), b"2");
    // A file that is there stays.
    fs::write(dir.join("as"), "mine").unwrap();
    let mut failed = 0;
    let mut count = |_: &Path, _: &Error| failed += 1;
    let copied = tools::copy_out(
        &volume,
        b"/files/plain-4097",
        &dir,
        Trust::TRUSTED,
        &mut count,
    )
    .unwrap();
    assert_eq!((copied.errors, copied.files), (1, 0));
    assert_eq!(failed, 1);
    assert!(tools::copy_out(&volume, b"/nowhere", &dir, Trust::TRUSTED, &mut no_errors).is_err());
    assert!(
        tools::copy_out(
            &volume,
            b"/",
            Path::new("/no/such/place"),
            Trust::TRUSTED,
            &mut no_errors
        )
        .is_err()
    );
}

/// `uvfs ls`, `cat` and `stat` show the same as the kernel's mount of the image.
#[test]
fn ls_cat_and_stat() {
    let Some(image) = filled() else { return };
    let volume = image.open();
    let mount = Mount::new(&image.path(), "ro,norecovery,noatime").unwrap();
    long_listings_are_those_of_ls(&volume, mount.path());
    every_directory_is_listed_once(&volume, mount.path());
    contents_and_errors_are_the_kernels(&volume, mount.path());
    stat_describes_what_there_is(&volume, mount.path());
}

fn long_listings_are_those_of_ls(volume: &Volume, mount: &Path) {
    // Names that need no escapes; `names` has the others.
    for dir in ["dir60", "dir6000", "files", "special", "attrs", "holes"] {
        let options = LsOptions {
            long: true,
            all: true,
            ..LsOptions::default()
        };
        let mut ours = Vec::new();
        assert_eq!(
            tools::ls(volume, dir.as_bytes(), options, &mut ours, &mut no_errors).unwrap(),
            0
        );
        let args = ["-lnaU", "--time-style=full-iso"];
        let kernel = Command::new("ls")
            .args(args)
            .arg(mount.join(dir))
            .env("TZ", "UTC")
            .env("LC_ALL", "C")
            .output()
            .unwrap();
        // In columns; the first line is a sum that is not shown here, and a mark after the mode
        // stands for an ACL.
        let columns = |text: &[u8]| -> Vec<Vec<String>> {
            let mut lines: Vec<Vec<String>> = String::from_utf8_lossy(text)
                .lines()
                .filter(|l| !l.starts_with("total "))
                .map(|l| {
                    l.split_whitespace()
                        .map(|w| w.trim_end_matches('+').into())
                        .collect()
                })
                .collect();
            lines.sort();
            lines
        };
        let (a, b) = (columns(&kernel.stdout), columns(&ours));
        let marks = |v: &[Vec<String>]| v.iter().map(|l| l.join(" ")).collect::<Vec<_>>();
        assert_eq!(marks(&a), marks(&b), "{dir}");
    }
}

fn every_directory_is_listed_once(volume: &Volume, mount: &Path) {
    let mut ours = Vec::new();
    let options = LsOptions {
        recursive: true,
        quoted: true,
        ..LsOptions::default()
    };
    tools::ls(volume, b"", options, &mut ours, &mut no_errors).unwrap();
    let text = String::from_utf8(ours).unwrap();
    assert!(text.contains("\n\ndeep/level-0/level-1:\nhere\nlevel-2\n"));
    assert!(text.contains("\\001\\002") && text.contains("\\377\\376"));
    let directories = walk(mount)
        .iter()
        .filter(|p| mount.join(p).is_dir())
        .count();
    let links_to_directories = 1;
    let headings = text
        .lines()
        .filter(|l| l.ends_with(':') && !l.starts_with("entry"))
        .count();
    assert!(headings > directories - links_to_directories - 10 && headings <= directories + 1);
    let mut one = Vec::new();
    tools::ls(
        volume,
        b"/files/hole",
        LsOptions::default(),
        &mut one,
        &mut no_errors,
    )
    .unwrap();
    assert_eq!(one, b"/files/hole\n");
}

fn contents_and_errors_are_the_kernels(volume: &Volume, mount: &Path) {
    let mut bytes = Vec::new();
    tools::cat(volume, b"/files/punched", &mut bytes).unwrap();
    assert!(bytes == fs::read(mount.join("files/punched")).unwrap());
    bytes.clear();
    tools::cat(volume, b"special/to-file", &mut bytes).unwrap();
    assert!(bytes == pattern(5, 70_000));
    assert_eq!(
        tools::cat(volume, b"/special", &mut bytes)
            .unwrap_err()
            .errno(),
        21
    );
    assert_eq!(
        tools::cat(volume, b"/special/nothing", &mut bytes)
            .unwrap_err()
            .errno(),
        2
    );
    assert_eq!(
        tools::cat(volume, b"/files/hole/x", &mut bytes)
            .unwrap_err()
            .errno(),
        20
    );
    assert!(volume.resolve(b"/special/to-dir/..", true).unwrap().ino == volume.root().unwrap().ino);
}

fn stat_describes_what_there_is(volume: &Volume, mount: &Path) {
    let about = |path: &str| stat_text(volume, path);
    let block = about("special/block");
    assert!(
        block.contains("block special file") && block.contains("259,200000"),
        "{block}"
    );
    let small = about("attrs/small");
    assert!(
        small.contains("user.colour") && small.contains("(0774/-rwxrwxr--)"),
        "{small}"
    );
    assert!(about("special/link-60").contains(" -> t/t/"));
    assert!(about("special/time-3").contains("Modify: 2400-01-01 00:00:00.000000124 +0000"));
    let kernel = Command::new("stat")
        .arg(mount.join("files/sparse"))
        .output()
        .unwrap();
    let kernel = String::from_utf8_lossy(&kernel.stdout).into_owned();
    let word = |text: &str, label: &str| {
        let mut words = text.split_whitespace().skip_while(|w| *w != label);
        words.nth(1).unwrap().to_string()
    };
    for label in ["Size:", "Blocks:", "Links:"] {
        assert_eq!(
            word(&kernel, label),
            word(&about("files/sparse"), label),
            "{label}"
        );
    }
}

fn stat_text(volume: &Volume, path: &str) -> String {
    let mut out = Vec::new();
    tools::stat(volume, OsStr::new(path).as_bytes(), &mut out).unwrap();
    String::from_utf8(out).unwrap()
}
