//! A directory that another program replaces by a symbolic link while it is copied: what the link leads to is neither
//! changed nor copied, and the copy goes on.

use super::*;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::mkfs::{From, MkfsOptions, MkfsProgress, mkfs};

/// Directories in the tree that is copied.
const DIRECTORIES: usize = 400;

/// A directory and the file in it, and whether these are what they were.
struct Outside(tempfile::TempDir);

impl Outside {
    fn new() -> Outside {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("secret"), "secret").unwrap();
        let outside = Outside(dir);
        for (path, mode) in [
            (outside.0.path().join("secret"), 0o600),
            (outside.0.path().into(), 0o700),
        ] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        outside
    }

    fn is_as_it_was(&self) {
        assert_eq!(walk(self.0.path()), [Path::new("secret")]);
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!(mode(&self.0.path().join("secret")), 0o600);
        assert_eq!(mode(self.0.path()), 0o700);
        assert_eq!(fs::read(self.0.path().join("secret")).unwrap(), b"secret");
    }
}

/// A tree of directories, each with files, one of them named as the file outside.
fn source(at: &Path) {
    for i in 0..DIRECTORIES {
        let dir = at.join(format!("dir-{i:03}"));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("secret"), "public").unwrap();
        fs::set_permissions(dir.join("secret"), fs::Permissions::from_mode(0o666)).unwrap();
        fs::hard_link(dir.join("secret"), dir.join("second")).unwrap();
        fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
    }
}

/// While `copy` runs, puts a link to `outside` in the place of each directory in `dir` that is seen, and the directory
/// back if `back`; gives how often.
fn swapping(dir: &Path, outside: &Path, back: bool, copy: impl FnOnce()) -> usize {
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let swapper = s.spawn(|| {
            let mut swapped = 0;
            while !stop.load(Ordering::Relaxed) {
                for i in 0..DIRECTORIES {
                    let (path, aside) = (
                        dir.join(format!("dir-{i:03}")),
                        dir.join(format!("away-{i:03}")),
                    );
                    if fs::symlink_metadata(&path).is_ok_and(|m| m.is_dir()) {
                        fs::rename(&path, &aside).unwrap();
                        // The copy may have made it anew.
                        swapped += usize::from(symlink(outside, &path).is_ok());
                        if back {
                            fs::remove_file(&path).unwrap();
                            fs::rename(&aside, &path).unwrap();
                        }
                    }
                }
            }
            swapped
        });
        copy();
        stop.store(true, Ordering::Relaxed);
        swapper.join().unwrap()
    })
}

fn image_of(source: &Path, image: &Path) {
    let from = From::Directory(source.into());
    mkfs(
        image,
        &MkfsOptions::default(),
        from,
        &MkfsProgress::default(),
    )
    .unwrap();
}

#[test]
fn out_of_an_image() {
    let scratch = tempfile::tempdir().unwrap();
    let (from, image) = (scratch.path().join("from"), scratch.path().join("image"));
    fs::create_dir(&from).unwrap();
    source(&from);
    image_of(&from, &image);
    let volume = Volume::open(Arc::new(FileBlocks::open(&image).unwrap())).unwrap();
    let outside = Outside::new();
    let to = scratch.path().join("to");
    fs::create_dir(&to).unwrap();
    let swapped = swapping(&to, outside.0.path(), false, || {
        // The entry that was swapped in is in the way, and is reported.
        tools::copy_out(&volume, b"/", &to, Trust::TRUSTED, &mut |_, _| {}).unwrap();
    });
    assert!(swapped > 0);
    outside.is_as_it_was();
}

#[test]
fn into_an_image() {
    let scratch = tempfile::tempdir().unwrap();
    let (from, image) = (scratch.path().join("from"), scratch.path().join("image"));
    fs::create_dir(&from).unwrap();
    source(&from);
    let outside = Outside::new();
    let swapped = swapping(&from, outside.0.path(), true, || {
        for _ in 0..5 {
            let _ = fs::remove_file(&image);
            image_of(&from, &image);
            let volume = Volume::open(Arc::new(FileBlocks::open(&image).unwrap())).unwrap();
            contents_are_public(&volume);
        }
    });
    assert!(swapped > 0);
    outside.is_as_it_was();
}

/// No file in the image is the one outside of the source.
fn contents_are_public(volume: &Volume) {
    let mut todo = vec![volume.geometry().rootino];
    while let Some(ino) = todo.pop() {
        let inode = volume.inode(ino).unwrap();
        if inode.is_dir() {
            let entries = &mut |e: uvfs_xfs::DirEntry<'_>| {
                todo.extend((e.name != b"." && e.name != b"..").then_some(e.ino));
                true
            };
            volume.readdir(&inode, 0, entries).unwrap();
        } else if inode.file_type() == uvfs_xfs::format::FileType::Regular {
            let mut buf = [0; 6];
            volume.read(&inode, 0, &mut buf).unwrap();
            assert_ne!(&buf, b"secret");
        }
    }
}
