//! Files, directories and names.

#[path = "files/caching.rs"]
mod caching;
mod common;
#[path = "files/names.rs"]
mod names;

use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::*;
use rustix::mount::MountFlags;
use uvfs_passthrough::{Backed, KeepCache, Options};
use uvfs_server::FileSystem;
use uvfs_server::fs::{
    CopyRange, Entry, Errno, FallocateFlags, FileType, InitFlags, IoHow, Mode, NewNode, Node,
    OFlags, OpenFlags, OpenHow, Origin, ROOT, RenameFlags, Seek, SetAttr, SetTime, XattrFlags,
};
use uvfs_testing::{Need, has};

/// Data that is written is read back, and names move.
#[test]
fn what_is_written_is_read_and_names_move() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        let dir = served.mkdir(&ROOT_USER, ROOT, "dir", 0o777).node;
        let (entry, opened) = served.create(&ROOT_USER, dir, "file", 0o666);
        let how = IoHow::new(opened.fh, 3);
        assert_eq!(served.write(how, b"hello"), Ok(5), "{store}");
        assert_eq!(served.read(opened.fh, 0, 100).unwrap(), b"\0\0\0hello");
        assert_eq!(
            std::fs::read(source.join("dir/file")).unwrap(),
            b"\0\0\0hello"
        );
        let append = how.with_flags(OFlags::APPEND);
        assert_eq!(served.write(append, b"!"), Ok(1));
        let attr = now(served.fs.getattr(&ROOT_USER, entry.node, Some(opened.fh)))
            .unwrap()
            .attr;
        assert_eq!(
            (attr.size, attr.mode, attr.nlink),
            (9, libc::S_IFREG | 0o644, 1)
        );
        served.release(opened.fh);
        assert_eq!(served.read(opened.fh, 0, 1), Err(Errno::BADF));

        let moved = now(served.fs.rename(
            &ROOT_USER,
            dir,
            c"file",
            ROOT,
            c"moved",
            RenameFlags::empty(),
        ));
        assert_eq!(moved.map(drop), Ok(()));
        assert_eq!(served.lookup(dir, "file").err(), Some(Errno::NOENT));
        assert_eq!(served.lookup(ROOT, "moved").unwrap().node, entry.node);
        let link = now(served.fs.link(&ROOT_USER, entry.node, dir, c"link")).unwrap();
        assert_eq!((link.node, link.attr.nlink), (entry.node, 2));
        let noreplace = RenameFlags::NOREPLACE;
        let refused = now(served
            .fs
            .rename(&ROOT_USER, dir, c"link", ROOT, c"moved", noreplace));
        assert_eq!(refused, Err(Errno::EXIST));
        let exchange = RenameFlags::EXCHANGE;
        let swapped = now(served
            .fs
            .rename(&ROOT_USER, ROOT, c"dir", ROOT, c"moved", exchange));
        assert_eq!(swapped.map(drop), Ok(()));
        assert!(source.join("dir").is_file() && source.join("moved").is_dir());

        assert_eq!(
            now(served.fs.rmdir(&ROOT_USER, ROOT, c"moved")),
            Err(Errno::NOTEMPTY)
        );
        assert!(now(served.fs.unlink(&ROOT_USER, dir, c"link")).is_ok());
        assert_eq!(
            now(served.fs.unlink(&ROOT_USER, ROOT, c"moved")),
            Err(Errno::ISDIR)
        );
        assert!(now(served.fs.rmdir(&ROOT_USER, ROOT, c"moved")).is_ok());
        let statfs = now(served.fs.statfs(&ROOT_USER, ROOT)).unwrap();
        assert!(statfs.blocks > 0 && statfs.namelen == 255);
    });
}

/// Nodes that the kernel has forgotten are freed.
#[test]
fn everything_is_forgotten_that_was_counted() {
    on_each_store(|store, source| {
        for n in 0..300 {
            std::fs::write(source.join(format!("f{n}")), b"x").unwrap();
        }
        let served = Served::new(source, Options::default());
        // Lookups and forgets of the same few inodes, all at once.
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let served = &served;
                scope.spawn(move || {
                    for round in 0..2000 {
                        let name = format!("f{}", (round * (thread + 1)) % 7);
                        let entry = served.lookup(ROOT, &name).unwrap();
                        assert_eq!(served.mode(entry.node), libc::S_IFREG | 0o644);
                        served.fs.forget(entry.node, 1);
                    }
                });
            }
        });
        assert_eq!(served.fs.known_inodes(), 0, "{store}");
        let twice: Vec<_> = [7, 1000]
            .iter()
            .flat_map(|room| served.list_all(ROOT, *room, true))
            .collect();
        assert_eq!(twice.len(), 600);
        assert_eq!(served.fs.known_inodes(), 300);
        for entry in &twice {
            assert!(served.mode(entry.node) != 0);
            served.fs.forget(entry.node, 1);
        }
        assert_eq!(served.fs.known_inodes(), 0);
        let stale = now(served.fs.getattr(&ROOT_USER, twice[0].node, None));
        assert_eq!(stale.err(), Some(Errno::STALE));
        // Too many forgets do no harm.
        served.fs.forget(twice[0].node, 5);
        served.fs.forget(ROOT, 5);
    });
}

/// Times and sizes are the host's.
#[test]
fn times_sizes_and_birth() {
    on_each_store(|_, source| {
        let served = Served::new(source, Options::default());
        let (entry, opened) = served.create(&ROOT_USER, ROOT, "file", 0o600);
        let set = SetAttr {
            atime: Some(SetTime::At(-5, 7)),
            mtime: Some(SetTime::At(1_000_000_000, 999_999_999)),
            size: Some(12345),
            ..Default::default()
        };
        now(served.fs.setattr(&ROOT_USER, entry.node, &set)).unwrap();
        let got = std::fs::metadata(source.join("file")).unwrap();
        // A file system that has no times before 1970 keeps the nearest that it has.
        assert!(got.atime() == -5 || got.atime() >= 0);
        assert_eq!(
            (got.mtime(), got.mtime_nsec(), got.size()),
            (1_000_000_000, 999_999_999, 12345)
        );
        let mtime = Some(SetTime::Now);
        now(served.fs.setattr(
            &ROOT_USER,
            entry.node,
            &SetAttr {
                mtime,
                ..Default::default()
            },
        ))
        .unwrap();
        let (stx, _) = now(served.fs.statx(&ROOT_USER, entry.node, None, 0xfff)).unwrap();
        assert!(stx.mtime.tv_sec > 1_000_000_000);
        assert!(stx.mask & libc::STATX_BTIME != 0 && stx.btime.tv_sec > 1_000_000_000);
        assert_eq!((stx.size, stx.ino), (12345, entry.attr.ino));
        // A symbolic link has times of its own.
        let link = now(served.fs.symlink(&ROOT_USER, ROOT, c"link", c"file")).unwrap();
        let mtime = Some(SetTime::At(77, 0));
        let set = SetAttr {
            mtime,
            uid: Some(5),
            ..Default::default()
        };
        if is_root() {
            now(served.fs.setattr(&ROOT_USER, link.node, &set)).unwrap();
            let got = std::fs::symlink_metadata(source.join("link")).unwrap();
            assert_eq!((got.mtime(), got.uid()), (77, 5));
            assert_eq!(std::fs::metadata(source.join("file")).unwrap().uid(), 0);
        }
        let truncate = SetAttr {
            size: Some(0),
            ..Default::default()
        };
        let dir = now(served.fs.setattr(&ROOT_USER, ROOT, &truncate));
        assert_eq!(dir.err(), Some(Errno::ISDIR));
        served.release(opened.fh);
    });
}

/// Holes stay holes, and copies have the same data.
#[test]
fn holes_are_made_and_found_and_data_is_copied() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        let (_, a) = served.create(&ROOT_USER, ROOT, "a", 0o600);
        let (to, b) = served.create(&ROOT_USER, ROOT, "b", 0o600);
        let data = vec![7; 1 << 20];
        served.write(IoHow::new(a.fh, 0), &data).unwrap();
        let (fs, fh) = (served.fs.clone(), a.fh);
        run(async move {
            let keep = FallocateFlags::KEEP_SIZE;
            let punch = FallocateFlags::PUNCH_HOLE | keep;
            fs.fallocate(&ROOT_USER, Node(0), fh, 65536, 131_072, punch)
                .await
                .unwrap();
            fs.fallocate(&ROOT_USER, Node(0), fh, 0, 4 << 20, keep)
                .await
                .unwrap();
            fs.fsync(&ROOT_USER, Node(0), fh, false).await.unwrap();
            fs.fsync(&ROOT_USER, Node(0), fh, true).await.unwrap();
            let bad = fs
                .fallocate(&ROOT_USER, Node(0), fh, 0, 0, FallocateFlags::empty())
                .await;
            assert_eq!(bad.unwrap_err().errno(), Errno::INVAL);
            fs.syncfs(&ROOT_USER, ROOT).await.unwrap();
            let dir = fs
                .opendir(&ROOT_USER, ROOT, &OpenHow::default())
                .await
                .unwrap()
                .fh;
            fs.fsyncdir(&ROOT_USER, ROOT, dir, false).await.unwrap();
            fs.releasedir(&ROOT_USER, ROOT, dir, OFlags::empty())
                .await
                .unwrap();
        });
        let read = served.read(fh, 0, 1 << 20).unwrap();
        assert!(read[..65536].iter().all(|byte| *byte == 7), "{store}");
        assert!(read[65536..196_608].iter().all(|byte| *byte == 0));
        let copied = served.fs.clone();
        let (fh_in, fh_out) = (a.fh, b.fh);
        run(async move {
            let mut done = 0;
            while done < 1 << 20 {
                let copy = CopyRange {
                    fh_in,
                    offset_in: done,
                    node_out: to.node,
                    fh_out,
                    offset_out: done + 10,
                    len: (1 << 20) - done,
                    flags: 0,
                };
                let n = copied
                    .copy_file_range(&ROOT_USER, Node(0), &copy)
                    .await
                    .unwrap();
                assert!(n > 0);
                done += n;
            }
        });
        assert_eq!(&served.read(b.fh, 10, 1 << 20).unwrap(), &read);
        let seek = |offset, seek| now(served.fs.lseek(&ROOT_USER, Node(0), a.fh, offset, seek));
        let hole = seek(0, Seek::Hole).unwrap();
        assert!(hole <= 1 << 20);
        assert_eq!(seek(8 << 20, Seek::Data), Err(Errno::NXIO));
        served.release(a.fh);
        served.release(b.fh);
    });
}

/// A read-only mount refuses every change.
#[test]
fn read_only_refuses_every_change() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), b"data").unwrap();
    let served = Served::new(
        dir.path(),
        Options {
            rules: MountFlags::RDONLY,
            ..Default::default()
        },
    );
    let file = served.lookup(ROOT, "file").unwrap();
    let new = NewNode {
        kind: FileType::RegularFile,
        mode: Mode::from_raw_mode(0o700),
        umask: Mode::empty(),
        rdev: 0,
    };
    let fs = &served.fs;
    let rofs = Some(Errno::ROFS);
    for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_RDONLY | libc::O_TRUNC] {
        assert_eq!(served.open(file.node, flags).err(), rofs);
    }
    let how = OpenHow::default();
    assert_eq!(
        now(fs.create(&ROOT_USER, ROOT, c"x", &new, &how)).err(),
        rofs
    );
    assert_eq!(now(fs.tmpfile(&ROOT_USER, ROOT, &new, &how)).err(), rofs);
    assert_eq!(now(fs.mkdir(&ROOT_USER, ROOT, c"x", &new)).err(), rofs);
    assert_eq!(now(fs.mknod(&ROOT_USER, ROOT, c"x", &new)).err(), rofs);
    assert_eq!(now(fs.symlink(&ROOT_USER, ROOT, c"x", c"y")).err(), rofs);
    assert_eq!(now(fs.link(&ROOT_USER, file.node, ROOT, c"x")).err(), rofs);
    assert_eq!(now(fs.unlink(&ROOT_USER, ROOT, c"file")).err(), rofs);
    assert_eq!(now(fs.rmdir(&ROOT_USER, ROOT, c"file")).err(), rofs);
    assert_eq!(
        now(fs.rename(&ROOT_USER, ROOT, c"file", ROOT, c"x", RenameFlags::empty())).err(),
        rofs
    );
    assert_eq!(
        now(fs.setattr(&ROOT_USER, file.node, &SetAttr::default())).err(),
        rofs
    );
    assert_eq!(
        now(fs.setxattr(&ROOT_USER, ROOT, c"user.x", b"", XattrFlags::empty(), false)).err(),
        rofs
    );
    assert_eq!(now(fs.removexattr(&ROOT_USER, ROOT, c"user.x")).err(), rofs);
    let opened = served.open(file.node, libc::O_RDONLY).unwrap();
    assert_eq!(served.read(opened.fh, 0, 10).unwrap(), b"data");
    assert_eq!(
        served.write(IoHow::new(opened.fh, 0), b"x"),
        Err(Errno::ROFS)
    );
}

/// The error says what is wrong with the source.
#[test]
fn what_cannot_be_served_is_said_clearly() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |path: &Path| {
        uvfs_passthrough::Passthrough::open(path, Options::default())
            .err()
            .unwrap()
            .to_string()
    };
    let missing = refused(&dir.path().join("missing"));
    assert!(
        missing.contains("missing") && missing.contains("No such file"),
        "{missing}"
    );
    std::fs::write(dir.path().join("file"), b"").unwrap();
    let file = refused(&dir.path().join("file"));
    assert!(file.contains("Not a directory"), "{file}");
}

/// A file system that is mounted below the source is shown or, with `xdev`, what it covers.
#[test]
fn submounts_are_crossed_or_looked_below() {
    if !has(&[Need::Root]) {
        return;
    }
    let test = || {
        let dir = tempfile::tempdir().unwrap();
        if !own_mounts() {
            return;
        }
        let sub = dir.path().join("sub");
        std::fs::create_dir(&sub).unwrap();
        std::fs::write(sub.join("below"), b"").unwrap();
        assert!(command(&format!("mount -t tmpfs tmpfs {}", sub.display())));
        std::fs::write(sub.join("above"), b"in the submount").unwrap();
        std::fs::write(dir.path().join("file"), b"").unwrap();
        let served = Served::new(dir.path(), Options::default());
        let node = served.lookup(ROOT, "sub").unwrap().node;
        let above = served.lookup(node, "above").unwrap();
        assert_eq!(served.lookup(node, "below").err(), Some(Errno::NOENT));
        let opened = served.open(above.node, libc::O_RDONLY).unwrap();
        assert_eq!(served.read(opened.fh, 0, 100).unwrap(), b"in the submount");
        served.release(opened.fh);
        let across =
            now(served
                .fs
                .rename(&ROOT_USER, node, c"above", ROOT, c"x", RenameFlags::empty()));
        assert_eq!(across, Err(Errno::XDEV));
        let linked = now(served.fs.link(&ROOT_USER, above.node, ROOT, c"x"));
        assert_eq!(linked.err(), Some(Errno::XDEV));
        assert_eq!(
            now(served.fs.rmdir(&ROOT_USER, ROOT, c"sub")),
            Err(Errno::BUSY)
        );
        served.lookup(node, "above").unwrap();
        let listed = served.list_all(node, 10, true);
        assert_eq!((listed.len(), listed[0].node), (1, above.node));
        // Once all is forgotten, the mount is free again.
        served.fs.forget(above.node, 3);
        served.fs.forget(node, 1);
        assert_eq!(served.fs.known_inodes(), 0);
        assert!(command(&format!("umount {}", sub.display())));
        assert!(command(&format!("mount -t tmpfs tmpfs {}", sub.display())));

        let served = Served::new(
            dir.path(),
            Options {
                xdev: true,
                ..Default::default()
            },
        );
        let node = served.lookup(ROOT, "sub").unwrap().node;
        assert!(served.lookup(node, "below").is_ok());
        assert!(command(&format!("umount {}", sub.display())));
    };
    std::thread::spawn(test).join().unwrap();
}

/// Modes and owners are the host's.
#[test]
fn permissions_of_the_source_are_shown_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let mode = std::fs::Permissions::from_mode(0o1751);
    std::fs::set_permissions(dir.path(), mode).unwrap();
    let served = Served::new(dir.path(), Options::default());
    assert_eq!(served.mode(ROOT), libc::S_IFDIR | 0o1751);
    let set = SetAttr {
        mode: Some(Mode::from_raw_mode(0o2710)),
        ..Default::default()
    };
    now(served.fs.setattr(&ROOT_USER, ROOT, &set)).unwrap();
    assert_eq!(served.mode(ROOT), libc::S_IFDIR | 0o2710);
}
