//! Random use of a file system.

use crate::common::*;
use crate::mutate::{Choose, Random};
use rustix::fs::{self as rfs, CWD, FallocateFlags, OFlags, XattrFlags};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// Names in a directory.
const NAMES: u64 = 60;
/// Directories.
const DIRS: u64 = 12;

/// A directory below `root`, which may not be there.
fn some_dir(root: &Path, r: &mut Random) -> PathBuf {
    let mut dir = root.to_path_buf();
    for _ in 0..r.below(3) {
        dir.push(format!("dir-{}", r.below(DIRS)));
    }
    dir
}

/// A name, some of them long.
fn some_name(root: &Path, r: &mut Random) -> PathBuf {
    let n = r.below(NAMES);
    let long = "long".repeat((n % 7) as usize * 6);
    some_dir(root, r).join(format!("file-{long}-{n}"))
}

/// A length, most of them short.
fn some_len(r: &mut Random) -> usize {
    let bits = r.below(18);
    r.below(1 << bits) as usize + 1
}

fn write_some(file: &File, r: &mut Random) {
    let bytes = pattern(r.next(), some_len(r));
    let _ = file.write_all_at(&bytes, r.below(1 << 20));
}

/// Does `count` things. Files that were unlinked are kept open until the caller drops them. What fails, fails: names
/// that are not there, a full file system.
pub fn work(root: &Path, r: &mut Random, count: usize) -> Vec<File> {
    let mut held = Vec::new();
    for _ in 0..count {
        let (name, other) = (some_name(root, r), some_name(root, r));
        let opened = || File::options().read(true).write(true).open(&name);
        match r.below(24) {
            0..=3 => {
                if let Ok(file) = File::create(&name) {
                    write_some(&file, r);
                }
            }
            4 | 5 => {
                if let Ok(file) = opened() {
                    for _ in 0..1 + r.below(20) {
                        write_some(&file, r);
                    }
                    if r.below(4) == 0 {
                        let _ = file.sync_all();
                    }
                }
            }
            6 => _ = fs::remove_file(&name),
            7 => {
                let file = opened();
                if fs::remove_file(&name).is_ok() {
                    held.extend(file);
                }
            }
            8 => {
                let dir = name.parent().unwrap_or(root);
                let flags = OFlags::TMPFILE | OFlags::RDWR;
                if let Ok(fd) = rfs::open(dir, flags, 0o600.into()) {
                    let file = File::from(fd);
                    write_some(&file, r);
                    held.push(file);
                }
            }
            9 => _ = fs::rename(&name, &other),
            10 => _ = rfs::renameat_with(CWD, &name, CWD, &other, rfs::RenameFlags::EXCHANGE),
            11 => _ = fs::hard_link(&name, &other),
            12 => {
                let dir = some_dir(root, r).join(format!("dir-{}", r.below(DIRS)));
                let _ = fs::create_dir(dir);
            }
            13 => _ = fs::rename(some_dir(root, r), some_dir(root, r).join("dir-1")),
            14 => {
                let _ = fs::remove_dir(some_dir(root, r));
                if r.below(20) == 0 {
                    let _ = fs::remove_dir_all(some_dir(root, r).join("dir-0"));
                }
            }
            15 => {
                let target = "target/".repeat(1 + r.below(140) as usize);
                let _ = symlink(target, &name);
            }
            16 | 17 => {
                let key = format!("user.key-{}", r.below(12));
                let most = [40, 40, 1000, 20_000][r.below(4) as usize];
                let value = pattern(r.next(), r.below(most) as usize);
                let _ = rfs::lsetxattr(&name, &key, &value, XattrFlags::empty());
            }
            18 => _ = rfs::lremovexattr(&name, format!("user.key-{}", r.below(12))),
            19 => {
                if let Ok(file) = opened() {
                    let _ = file.set_len(r.below(1 << 20));
                }
            }
            20 => {
                if let Ok(file) = opened() {
                    let flags = [
                        FallocateFlags::empty(),
                        FallocateFlags::KEEP_SIZE,
                        FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE,
                        FallocateFlags::ZERO_RANGE,
                        FallocateFlags::COLLAPSE_RANGE,
                        FallocateFlags::INSERT_RANGE,
                        FallocateFlags::UNSHARE_RANGE,
                    ][r.below(7) as usize];
                    let (at, len) = (r.below(200) * 4096, (1 + r.below(50)) * 4096);
                    let _ = rfs::fallocate(&file, flags, at, len);
                }
            }
            21 => {
                // A file of many extents, whose tree leaves the inode.
                if let Ok(file) = File::create(&name) {
                    for i in 0..r.below(60) {
                        let _ = file.write_all_at(b"x", i * 16_384);
                        if i % 5 == 0 {
                            let _ = file.sync_data();
                        }
                    }
                }
            }
            22 => {
                if let (Ok(from), Ok(to)) = (opened(), File::create(&other)) {
                    let _ = rfs::ioctl_ficlone(&to, &from);
                    if r.below(2) == 0 {
                        write_some(&to, r);
                    }
                }
            }
            _ => match r.below(40) {
                0 => _ = File::open(root).map(rfs::syncfs),
                1 => {
                    let dir = some_dir(root, r).join("many");
                    let _ = fs::create_dir(&dir);
                    for i in 0..r.below(600) {
                        let _ = File::create(dir.join(format!("entry-{i}")));
                    }
                }
                2 => _ = fs::remove_dir_all(some_dir(root, r).join("many")),
                // Opening them fails: there is no such device, and a socket is not opened.
                3 => {
                    let kind = [rfs::FileType::CharacterDevice, rfs::FileType::Socket];
                    let device = rfs::makedev(400, r.below(1 << 20) as u32);
                    let kind = kind[r.below(2) as usize];
                    let _ = rfs::mknodat(CWD, &name, kind, 0o640.into(), device);
                }
                4..=10 => {
                    if let Ok(file) = opened() {
                        let _ = file.sync_all();
                    }
                }
                _ => {
                    let mode = fs::Permissions::from_mode(r.below(0o10000) as u32);
                    if fs::symlink_metadata(&name).is_ok_and(|m| m.is_file()) {
                        let _ = fs::set_permissions(&name, mode);
                        let owner = Some(rfs::Uid::from_raw(r.below(5) as u32));
                        let group = Some(rfs::Gid::from_raw(r.below(5) as u32));
                        let _ = rfs::chown(&name, owner, group);
                    }
                }
            },
        }
    }
    held
}

/// Changes a file and makes it durable, until the mount is cut off.
pub fn sync_until_it_fails(root: &Path) {
    let Ok(file) = File::create(root.join("synced")) else {
        return;
    };
    let mut size = 0;
    while file.set_len(size).is_ok() && file.sync_all().is_ok() {
        size = (size + 1) % 5000;
    }
}

/// Shares the blocks of files and writes to them, until the mount is cut off or cannot share.
pub fn share_until_it_fails(root: &Path) {
    let from = File::create(root.join("share-from"));
    let Ok(from) = from.and_then(|from| from.write_all_at(&pattern(9, 200_000), 0).map(|()| from))
    else {
        return;
    };
    for i in 0u64.. {
        let Ok(to) = File::create(root.join(format!("shared-{}", i % 8))) else {
            return;
        };
        let shared = rfs::ioctl_ficlone(&to, &from).is_ok();
        let written = (0..10).all(|n| to.write_all_at(&[7; 3000], n * 19_000 + i % 7).is_ok());
        if !shared || !written || to.sync_data().is_err() {
            return;
        }
    }
}
