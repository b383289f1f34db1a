//! Files, directories and names.

mod common;

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

#[test]
fn what_is_written_is_read_and_names_move() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        let dir = served.mkdir(&ROOT_USER, ROOT, "dir", 0o777).node;
        let (entry, opened) = served.create(&ROOT_USER, dir, "file", 0o666);
        let how = IoHow {
            fh: opened.fh,
            offset: 3,
            ..Default::default()
        };
        assert_eq!(served.write(how, b"hello"), Ok(5), "{store}");
        assert_eq!(served.read(opened.fh, 0, 100).unwrap(), b"\0\0\0hello");
        assert_eq!(
            std::fs::read(source.join("dir/file")).unwrap(),
            b"\0\0\0hello"
        );
        let append = IoHow {
            flags: OFlags::APPEND,
            ..how
        };
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

#[test]
fn a_new_file_is_never_taken_for_one_that_had_its_inode_number() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        let mut nodes = BTreeSet::new();
        let mut numbers = BTreeSet::new();
        for n in 0..200 {
            // Removed on the host, and not forgotten by the kernel.
            let path = source.join("file");
            std::fs::write(&path, format!("{n}")).unwrap();
            let entry = served.lookup(ROOT, "file").unwrap();
            assert!(nodes.insert(entry.node), "{store}: two files are one node");
            numbers.insert(entry.attr.ino);
            let opened = served.open(entry.node, libc::O_RDONLY).unwrap();
            assert_eq!(
                served.read(opened.fh, 0, 10).unwrap(),
                n.to_string().as_bytes()
            );
            served.release(opened.fh);
            std::fs::remove_file(&path).unwrap();
        }
        eprintln!("{store}: {} inode numbers for 200 files", numbers.len());
    });
}

#[test]
fn a_file_is_shown_with_its_own_attributes_while_names_change_hands() {
    const LOOKUPS: usize = 20_000;
    on_each_store(|store, source| {
        for (name, mode) in [("closed", 0o600), ("open", 0o666)] {
            std::fs::write(source.join(name), name).unwrap();
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(source.join(name), mode).unwrap();
        }
        let numbers = ["closed", "open"].map(|name| {
            let st = std::fs::metadata(source.join(name)).unwrap();
            (st.ino(), st.mode())
        });
        let served = Served::new(source, Options::default());
        let looked_up = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let dir = std::fs::File::open(source).unwrap();
                let end = Instant::now() + Duration::from_secs(10);
                while looked_up.load(Ordering::Relaxed) < LOOKUPS && Instant::now() < end {
                    let exchange = RenameFlags::EXCHANGE;
                    let swapped = rustix::fs::renameat_with(&dir, "open", &dir, "closed", exchange);
                    assert_eq!(swapped, Ok(()));
                }
            });
            for _ in 0..LOOKUPS {
                looked_up.fetch_add(1, Ordering::Relaxed);
                let entry = served.lookup(ROOT, "open").unwrap();
                let shown = (entry.attr.ino, entry.attr.mode);
                assert!(numbers.contains(&shown), "{store}");
                // The node leads to this file, however it was found.
                let attr = now(served.fs.getattr(&ROOT_USER, entry.node, None)).unwrap();
                assert_eq!((attr.attr.ino, attr.attr.mode), shown, "{store}");
                served.fs.forget(entry.node, 1);
            }
        });
        assert_eq!(served.fs.known_inodes(), 0);
    });
}

/// The files that this process has open below a directory. Other tests open and close files meanwhile: a
/// descriptor that is gone by the time it is looked at holds nothing.
fn open_below(source: &Path) -> Vec<String> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let open = open.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    let below = open.filter(|to| to.starts_with(source));
    below.map(|to| to.to_string_lossy().into_owned()).collect()
}

#[test]
fn what_was_removed_stays_for_those_who_have_it_open() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        let (file, opened) = served.create(&ROOT_USER, ROOT, "file", 0o600);
        now(served.fs.unlink(&ROOT_USER, ROOT, c"file")).unwrap();
        let attr = now(served.fs.getattr(&ROOT_USER, file.node, None))
            .unwrap()
            .attr;
        assert_eq!(attr.nlink, 0, "{store}");
        let set = SetAttr {
            mode: Some(Mode::from_raw_mode(0o640)),
            size: Some(77),
            ..Default::default()
        };
        let attr = now(served.fs.setattr(&ROOT_USER, file.node, &set))
            .unwrap()
            .attr;
        assert_eq!((attr.mode, attr.size), (libc::S_IFREG | 0o640, 77));
        served.release(opened.fh);

        let dir = served.mkdir(&ROOT_USER, ROOT, "dir", 0o755);
        now(served.fs.rmdir(&ROOT_USER, ROOT, c"dir")).unwrap();
        assert_eq!(served.mode(dir.node), libc::S_IFDIR | 0o755);
        assert_eq!(served.lookup(dir.node, "x").err(), Some(Errno::NOENT));
        // `..` and names are still refused in it.
        assert_eq!(served.lookup(dir.node, "..").err(), Some(Errno::INVAL));
        // Nobody has these open, but the kernel still knows them: someone may be at them by an
        // O_PATH descriptor.
        let (late, opened) = served.create(&ROOT_USER, ROOT, "late", 0o600);
        served.release(opened.fh);
        let (over, opened) = served.create(&ROOT_USER, ROOT, "over", 0o600);
        served.release(opened.fh);
        let two = now(served.fs.link(&ROOT_USER, late.node, ROOT, c"two")).unwrap();
        assert_eq!(two.node, late.node);
        now(served.fs.unlink(&ROOT_USER, ROOT, c"late")).unwrap();
        now(served.fs.rename(
            &ROOT_USER,
            ROOT,
            c"two",
            ROOT,
            c"over",
            RenameFlags::empty(),
        ))
        .unwrap();
        now(served.fs.unlink(&ROOT_USER, ROOT, c"over")).unwrap();
        for node in [late.node, over.node] {
            let set = SetAttr {
                mode: Some(Mode::from_raw_mode(0o640)),
                ..Default::default()
            };
            let attr = now(served.fs.setattr(&ROOT_USER, node, &set))
                .unwrap_or_else(|errno| panic!("{store}: {errno}"))
                .attr;
            assert_eq!((attr.mode, attr.nlink), (libc::S_IFREG | 0o640, 0));
            let opened = served.open(node, libc::O_RDWR).unwrap();
            let how = IoHow {
                fh: opened.fh,
                ..Default::default()
            };
            served.write(how, b"data").unwrap();
            assert_eq!(served.read(opened.fh, 0, 10).unwrap(), b"data");
            served.release(opened.fh);
        }
        served.fs.forget(over.node, 1);
        served.fs.forget(late.node, 1);
        served.fs.forget(late.node, 1);
        served.fs.forget(dir.node, 1);
        served.fs.forget(file.node, 1);
        assert_eq!(served.fs.known_inodes(), 0);
        // Nothing of them is held.
        let open = open_below(source);
        let deleted = |to: &String| to.contains("deleted");
        assert!(!open.iter().any(deleted), "{store}: {open:?}");
    });
}

/// Says when it is dropped, by a panic too, that all is over.
struct Stop<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Does something while the file `name` is another one all the time. Removed ones' numbers are used
/// again.
fn while_a_name_is_replaced(source: &Path, work: impl FnOnce()) {
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::fs::write(source.join("name"), "").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                std::fs::write(source.join("new"), "").unwrap();
                std::fs::rename(source.join("new"), source.join("name")).unwrap();
            }
        });
        let _stop = Stop(&stop);
        work();
    });
}

/// A node that was found is the file that it was found as, or gone by now, for which hosts have
/// several errors.
fn is_as_found(served: &Served, found: &Entry, store: &str) {
    if let Ok(now) = now(served.fs.getattr(&ROOT_USER, found.node, None)) {
        assert_eq!(now.attr.ino, found.attr.ino, "{store}");
    }
}

#[test]
fn a_name_that_is_replaced_all_the_time_is_always_one_file() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        while_a_name_is_replaced(source, || {
            for _ in 0..5_000 {
                let found = served.lookup(ROOT, "name");
                let found = found.unwrap_or_else(|errno| panic!("{store}: {errno}"));
                is_as_found(&served, &found, store);
                served.fs.forget(found.node, 1);
            }
        });
        assert_eq!(served.fs.known_inodes(), 0, "{store}");
    });
}

#[test]
fn what_takes_a_name_that_is_being_removed_is_not_taken_for_what_had_it() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        while_a_name_is_replaced(source, || {
            let mut removed = 0;
            while removed < 3_000 {
                let Ok(found) = served.lookup(ROOT, "name") else {
                    continue;
                };
                if let Ok(lost) = now(served.fs.unlink(&ROOT_USER, ROOT, c"name")) {
                    removed += 1;
                    assert!(lost.node.is_none_or(|node| node == found.node), "{store}");
                }
                is_as_found(&served, &found, store);
                served.fs.forget(found.node, 1);
            }
        });
        assert_eq!(served.fs.known_inodes(), 0, "{store}");
    });
}

#[test]
fn a_name_says_who_loses_it_if_that_is_known() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        let unlink = |name: &str| now(served.fs.unlink(&ROOT_USER, ROOT, &c(name))).unwrap();
        std::fs::write(source.join("known"), "").unwrap();
        std::fs::write(source.join("unknown"), "").unwrap();
        std::fs::hard_link(source.join("known"), source.join("other")).unwrap();
        let known = served.lookup(ROOT, "known").unwrap().node;
        assert_eq!(unlink("unknown").node, None, "{store}");
        let lost = unlink("other");
        assert_eq!((lost.node, lost.last), (Some(known), false), "{store}");
        let lost = unlink("known");
        assert_eq!((lost.node, lost.last), (Some(known), true), "{store}");
        let attr = now(served.fs.getattr(&ROOT_USER, known, None)).unwrap();
        assert_eq!(attr.attr.nlink, 0, "{store}");
        let gone = now(served.fs.unlink(&ROOT_USER, ROOT, c"known"));
        assert_eq!(gone.err(), Some(Errno::NOENT), "{store}");
        std::fs::create_dir(source.join("dir")).unwrap();
        let is_dir = now(served.fs.unlink(&ROOT_USER, ROOT, c"dir"));
        assert_eq!(is_dir.err(), Some(Errno::ISDIR), "{store}");
        served.fs.forget(known, 1);
        assert_eq!(served.fs.known_inodes(), 0, "{store}");
    });
}

#[test]
fn what_is_kept_of_removed_files_is_bounded_and_gives_way() {
    if !is_root() {
        eprintln!("skipped: needs root, to mount a small tmpfs");
        return;
    }
    let test = || {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display();
        assert!(own_mounts() && command(&format!("mount -t tmpfs -o size=4m tmpfs {at}")));
        let served = Served::new(dir.path(), Options::default());
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = descriptors();
        for n in 0..3000 {
            let name = format!("file{n}");
            let (_, opened) = served.create(&ROOT_USER, ROOT, &name, 0o600);
            served.release(opened.fh);
            now(served.fs.unlink(&ROOT_USER, ROOT, &c(&name))).unwrap();
        }
        // Other tests of this process open some too.
        assert!(descriptors() < before + 1200, "{before} {}", descriptors());
        // The space of what the kernel has not forgotten yet is there for those who need it.
        for name in ["large", "another", "third"] {
            let (_, opened) = served.create(&ROOT_USER, ROOT, name, 0o600);
            let how = IoHow {
                fh: opened.fh,
                ..Default::default()
            };
            // Children of other tests have everything open until they have executed something.
            let late = Instant::now() + Duration::from_secs(30);
            loop {
                let wrote = served.write(how, &[7; 3 << 20]);
                if wrote == Ok(3 << 20) {
                    break;
                }
                assert!(Instant::now() < late, "{name}: {wrote:?}");
            }
            served.release(opened.fh);
            now(served.fs.unlink(&ROOT_USER, ROOT, &c(name))).unwrap();
        }
        drop(served);
        assert!(command(&format!("umount -l {at}")));
    };
    std::thread::spawn(test).join().unwrap();
}

#[test]
fn no_name_leads_out_and_no_device_is_opened() {
    on_each_store(|_, source| {
        std::fs::create_dir(source.join("d")).unwrap();
        symlink("/etc", source.join("link")).unwrap();
        symlink("/etc/passwd", source.join("passwd")).unwrap();
        assert!(command(&format!(
            "mkfifo {}",
            source.join("fifo").display()
        )));
        let served = Served::new(source, Options::default());
        for bad in ["", ".", "..", "d/x", "../x", "/etc"] {
            assert_eq!(
                served.lookup(ROOT, bad).err(),
                Some(Errno::INVAL),
                "{bad:?}"
            );
            let new = NewNode {
                kind: FileType::RegularFile,
                mode: Mode::from_raw_mode(0o600),
                umask: Mode::empty(),
                rdev: 0,
            };
            let name = c(bad);
            let made = now(served.fs.mknod(&ROOT_USER, ROOT, &name, &new));
            assert_eq!(made.err(), Some(Errno::INVAL));
            assert_eq!(
                now(served.fs.unlink(&ROOT_USER, ROOT, &name)),
                Err(Errno::INVAL)
            );
            assert_eq!(
                now(served.fs.rmdir(&ROOT_USER, ROOT, &name)),
                Err(Errno::INVAL)
            );
            let moved =
                now(served
                    .fs
                    .rename(&ROOT_USER, ROOT, &name, ROOT, c"to", RenameFlags::empty()));
            assert_eq!(moved, Err(Errno::INVAL));
        }
        assert_eq!(
            served.lookup(ROOT, &"n".repeat(256)).err(),
            Some(Errno::NAMETOOLONG)
        );
        let link = served.lookup(ROOT, "link").unwrap();
        assert_eq!(link.attr.mode & libc::S_IFMT, libc::S_IFLNK);
        assert_eq!(
            now(served.fs.readlink(&ROOT_USER, link.node)).unwrap(),
            b"/etc"
        );
        assert_eq!(
            served.lookup(link.node, "passwd").err(),
            Some(Errno::NOTDIR)
        );
        let passwd = served.lookup(ROOT, "passwd").unwrap();
        for flags in [libc::O_RDONLY, libc::O_RDWR, libc::O_RDWR | libc::O_TRUNC] {
            assert_eq!(served.open(passwd.node, flags).err(), Some(Errno::NXIO));
            // Nobody has the pipe open: opening it would wait for ever, or fail otherwise.
            let fifo = served.lookup(ROOT, "fifo").unwrap();
            assert_eq!(served.open(fifo.node, flags).err(), Some(Errno::NXIO));
            // Nor by a creat(2) of the name.
            let flags = flags as u32 | libc::O_CREAT as u32;
            for name in ["passwd", "fifo"] {
                let made = served.try_create(&ROOT_USER, ROOT, name, 0o600, 0, flags);
                assert_eq!(made.err(), Some(Errno::NXIO), "{name}");
            }
        }
        // The directories above the source show nowhere.
        let fh = now(served.fs.opendir(&ROOT_USER, ROOT, &OpenHow::default()))
            .unwrap()
            .fh;
        let root = std::fs::metadata(source).unwrap().ino();
        let dots: Vec<_> = served.list(fh, 0, 100, false);
        for dot in dots.iter().filter(|entry| entry.name.starts_with('.')) {
            assert_eq!(dot.ino, root, "{}", dot.name);
        }
    });
}

#[test]
fn a_listing_goes_on_where_it_was_whatever_changed() {
    on_each_store(|store, source| {
        let names: BTreeSet<String> = (0..500).map(|n| format!("name-{n:03}")).collect();
        for name in &names {
            std::fs::write(source.join(name), b"").unwrap();
        }
        let served = Served::new(source, Options::default());
        for plus in [false, true] {
            for room in [1, 10, 600] {
                let listed = served.list_all(ROOT, room, plus);
                let found: BTreeSet<String> =
                    listed.iter().map(|entry| entry.name.clone()).collect();
                assert_eq!((listed.len(), &found), (500, &names), "{store} {room}");
                for entry in listed {
                    served.fs.forget(entry.node, 1);
                }
            }
        }
        // Remove what was listed as it goes, and list each piece twice.
        let fh = now(served.fs.opendir(&ROOT_USER, ROOT, &OpenHow::default()))
            .unwrap()
            .fh;
        let (mut seen, mut offset) = (Vec::new(), 0);
        loop {
            let part = served.list(fh, offset, 20, false);
            assert_eq!(part, served.list(fh, offset, 20, false));
            let Some(last) = part.last() else { break };
            offset = last.next;
            for entry in part.iter().filter(|entry| !entry.name.starts_with('.')) {
                std::fs::remove_file(source.join(&entry.name)).unwrap();
                seen.push(entry.name.clone());
            }
        }
        seen.sort();
        assert!(seen.iter().eq(&names), "{store}: each name once");
        // From the start, what is new shows.
        std::fs::write(source.join("late"), b"").unwrap();
        assert!(
            served
                .list(fh, 0, 100, false)
                .iter()
                .any(|entry| entry.name == "late")
        );
    });
}

#[test]
fn nameless_files_get_names() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        let new = NewNode {
            kind: FileType::RegularFile,
            mode: Mode::from_raw_mode(0o640),
            umask: Mode::from_raw_mode(0o022),
            rdev: 0,
        };
        let how = OpenHow {
            flags: OFlags::RDWR,
            kill_suidgid: false,
            origin: Origin::Kernel,
        };
        let (entry, opened) = now(served.fs.tmpfile(&USER, ROOT, &new, &how)).unwrap();
        assert_eq!(entry.attr.nlink, 0, "{store}");
        served
            .write(
                IoHow {
                    fh: opened.fh,
                    ..Default::default()
                },
                b"data",
            )
            .unwrap();
        let link = now(served.fs.link(&USER, entry.node, ROOT, c"named")).unwrap();
        assert_eq!(
            (link.node, link.attr.nlink, link.attr.size),
            (entry.node, 1, 4)
        );
        served.release(opened.fh);
        assert_eq!(std::fs::read(source.join("named")).unwrap(), b"data");
        if is_root() {
            assert_eq!((entry.attr.uid, entry.attr.gid), (USER.uid, USER.gid));
        }
        // Links to symbolic links are to the links.
        let soft = now(served.fs.symlink(&USER, ROOT, c"soft", c"named")).unwrap();
        let hard = now(served.fs.link(&USER, soft.node, ROOT, c"hard")).unwrap();
        assert_eq!((hard.node, hard.attr.nlink), (soft.node, 2));
    });
}

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

#[test]
fn holes_are_made_and_found_and_data_is_copied() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        let (_, a) = served.create(&ROOT_USER, ROOT, "a", 0o600);
        let (to, b) = served.create(&ROOT_USER, ROOT, "b", 0o600);
        let data = vec![7; 1 << 20];
        served
            .write(
                IoHow {
                    fh: a.fh,
                    ..Default::default()
                },
                &data,
            )
            .unwrap();
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
            assert_eq!(bad, Err(Errno::INVAL));
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
        served.write(
            IoHow {
                fh: opened.fh,
                ..Default::default()
            },
            b"x"
        ),
        Err(Errno::ROFS)
    );
}

#[test]
fn uncached_io_works_where_the_host_has_it_and_where_not() {
    on_each_store(|store, source| {
        let served = Served::new(
            source,
            Options {
                uncached: true,
                ..Default::default()
            },
        );
        let (_, opened) = served.create(&ROOT_USER, ROOT, "file", 0o600);
        let how = IoHow {
            fh: opened.fh,
            uncached: true,
            ..Default::default()
        };
        for round in 0..2 {
            let data = vec![round; 300_000];
            assert_eq!(served.write(how, &data), Ok(data.len()), "{store}");
            assert!(
                served.read(opened.fh, 0, 400_000).unwrap() == data,
                "{store}"
            );
        }
    });
}

#[test]
fn cached_pages_are_kept_while_the_file_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, b"data").unwrap();
    let old = std::time::SystemTime::now() - Duration::from_secs(100);
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(old)
        .unwrap();
    let served = Served::new(dir.path(), Options::default());
    let node = served.lookup(ROOT, "file").unwrap().node;
    let keeps = || {
        let opened = served.open(node, libc::O_RDONLY).unwrap();
        served.release(opened.fh);
        opened.flags.contains(OpenFlags::KEEP_CACHE)
    };
    assert!(keeps() && keeps());
    std::fs::write(&path, b"changed").unwrap();
    assert!(!keeps() && !keeps());
    // The kernel hears of the change; but the file may change again in the same tick.
    now(served.fs.getattr(&ROOT_USER, node, None)).unwrap();
    std::fs::write(&path, b"CHANGED").unwrap();
    assert!(!keeps());
    let served = Served::new(
        dir.path(),
        Options {
            keep_cache: KeepCache::Never,
            ..Default::default()
        },
    );
    let node = served.lookup(ROOT, "file").unwrap().node;
    let flags = served.open(node, libc::O_RDONLY).unwrap().flags;
    assert!(!flags.contains(OpenFlags::KEEP_CACHE));
    assert!(flags.contains(OpenFlags::NOFLUSH));
}

#[test]
fn writeback_reads_what_it_writes_around() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), b"data").unwrap();
    let served = Served::new(
        dir.path(),
        Options {
            writeback: true,
            ..Default::default()
        },
    );
    let wanted = served.init(InitFlags::all()).wanted;
    assert!(wanted.contains(InitFlags::WRITEBACK_CACHE));
    assert!(!wanted.contains(InitFlags::AUTO_INVAL_DATA));
    let node = served.lookup(ROOT, "file").unwrap().node;
    let opened = served.open(node, libc::O_WRONLY | libc::O_APPEND).unwrap();
    assert!(!opened.flags.contains(OpenFlags::NOFLUSH));
    assert_eq!(served.read(opened.fh, 0, 10).unwrap(), b"data");
    let flags = OFlags::WRONLY | OFlags::APPEND;
    // The kernel has worked out where.
    served
        .write(
            IoHow {
                fh: opened.fh,
                flags,
                offset: 1,
                ..Default::default()
            },
            b"A",
        )
        .unwrap();
    assert_eq!(served.read(opened.fh, 0, 10).unwrap(), b"dAta");
    // Without the kernel's consent it is off.
    let wanted = served.init(InitFlags::empty()).wanted;
    assert!(!wanted.contains(InitFlags::WRITEBACK_CACHE));
}

#[test]
fn backing_files_are_registered_once_and_taken_back() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI32, Ordering};
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), b"data").unwrap();
    let served = Served::new(
        dir.path(),
        Options {
            passthrough: Backed::All,
            ..Default::default()
        },
    );
    let config = served.init(InitFlags::all());
    assert!(config.wanted.contains(InitFlags::PASSTHROUGH) && config.max_stack_depth >= 1);
    let (live, next) = (Arc::new(AtomicI32::new(0)), AtomicI32::new(10));
    let (up, down) = (live.clone(), live.clone());
    served.fs.set_backing(uvfs_passthrough::Backing {
        register: Box::new(move |_, _| {
            up.fetch_add(1, Ordering::Relaxed);
            Ok(next.fetch_add(1, Ordering::Relaxed))
        }),
        unregister: Box::new(move |_, _| {
            down.fetch_sub(1, Ordering::Relaxed);
        }),
        changed: Box::new(|_| {}),
    });
    let node = served.lookup(ROOT, "file").unwrap().node;
    let first = served.open(node, libc::O_RDONLY).unwrap();
    let second = served.open(node, libc::O_RDWR).unwrap();
    assert_eq!(
        (first.backing, second.backing, live.load(Ordering::Relaxed)),
        (10, 10, 1)
    );
    assert!(first.flags.contains(OpenFlags::PASSTHROUGH));
    served.release(first.fh);
    assert_eq!(live.load(Ordering::Relaxed), 1);
    served.release(second.fh);
    assert_eq!(live.load(Ordering::Relaxed), 0);
    let (_, made) = served.create(&ROOT_USER, ROOT, "new", 0o600);
    assert_eq!(made.backing, 11);
    served.release(made.fh);
    // A file that is being closed elsewhere doesn't keep the next open from having one: the kernel
    // would then have both kinds at once, and refuse.
    let opened_and_closed = || {
        for _ in 0..2000 {
            let opened = served.open(node, libc::O_RDONLY).unwrap();
            assert!(opened.flags.contains(OpenFlags::PASSTHROUGH));
            served.release(opened.fh);
        }
    };
    std::thread::scope(|scope| {
        let others = [(); 2].map(|()| scope.spawn(opened_and_closed));
        for other in others {
            other.join().unwrap();
        }
    });
    assert_eq!(live.load(Ordering::Relaxed), 0);
    // A kernel without it.
    assert!(
        !served
            .init(InitFlags::empty())
            .wanted
            .contains(InitFlags::PASSTHROUGH)
    );
    let opened = served.open(node, libc::O_RDONLY).unwrap();
    assert!(!opened.flags.contains(OpenFlags::PASSTHROUGH));
}

#[test]
fn a_backing_file_is_for_files_that_are_not_open_otherwise() {
    use std::io::{Error, Result};
    use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root registers backing files");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for name in ["file", "other", "setuid"] {
        std::fs::write(dir.path().join(name), b"data").unwrap();
    }
    let setuid = std::os::unix::fs::PermissionsExt::from_mode(0o4755);
    std::fs::set_permissions(dir.path().join("setuid"), setuid).unwrap();
    let served = Served::new(dir.path(), Options::default());
    let (refusal, asked) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicUsize::new(0)));
    let live = Arc::new(Mutex::new(Vec::<Node>::new()));
    let (why, count, up, down) = (refusal.clone(), asked.clone(), live.clone(), live.clone());
    served.fs.set_backing(uvfs_passthrough::Backing {
        register: Box::new(move |node, _| -> Result<i32> {
            count.fetch_add(1, Ordering::Relaxed);
            match why.load(Ordering::Relaxed) {
                0 => {
                    up.lock().unwrap().push(node);
                    Ok(7)
                }
                code => Err(Error::from_raw_os_error(code)),
            }
        }),
        unregister: Box::new(move |node, id| {
            let mut live = down.lock().unwrap();
            let at = live.iter().position(|&other| (other, id) == (node, 7));
            live.remove(at.expect("it is registered"));
        }),
        changed: Box::new(|_| {}),
    });
    let config = served.init(InitFlags::all());
    assert!(config.wanted.contains(InitFlags::PASSTHROUGH));
    let [file, other, setuid] =
        ["file", "other", "setuid"].map(|name| served.lookup(ROOT, name).unwrap().node);
    let open = |node, flags| {
        let opened = served.open(node, flags).unwrap();
        let backed = opened.flags.contains(OpenFlags::PASSTHROUGH);
        assert_eq!(backed, opened.backing == 7);
        assert!(!backed || !opened.flags.contains(OpenFlags::DIRECT_IO));
        (opened.fh, backed)
    };
    let direct = libc::O_RDONLY | libc::O_DIRECT;
    // Nothing else may be open, and all that is opened then is the same.
    let plain = open(file, libc::O_WRONLY);
    let refused = open(file, direct);
    assert!(!plain.1 && !refused.1);
    served.release(plain.0);
    let refused_too = open(file, direct);
    assert!(!refused_too.1);
    served.release(refused.0);
    served.release(refused_too.0);
    let first = open(file, direct);
    let buffered = open(file, libc::O_RDWR);
    assert!(first.1 && buffered.1);
    served.release(first.0);
    assert!(open(file, direct).1 && *live.lock().unwrap() == [file]);
    assert!(!open(other, libc::O_RDONLY).1 && !open(setuid, direct).1);
    // Clients are not the kernel.
    let how = OpenHow {
        flags: OFlags::from_bits_retain(direct as u32),
        kill_suidgid: false,
        origin: Origin::Client(()),
    };
    let client = now(served.fs.open(&ROOT_USER, file, &how)).unwrap();
    assert_eq!(client.backing, 0);
    let fresh = |name: &str| {
        std::fs::write(dir.path().join(name), b"data").unwrap();
        served.lookup(ROOT, name).unwrap().node
    };
    // A lease is in the way, for once.
    refusal.store(libc::EBUSY, Ordering::Relaxed);
    let node = fresh("busy");
    let busy = open(node, direct);
    served.release(busy.0);
    refusal.store(0, Ordering::Relaxed);
    assert!(!busy.1 && open(node, direct).1);
    // A refusal that can't change is asked for once.
    refusal.store(libc::EPERM, Ordering::Relaxed);
    assert!(!open(fresh("a"), direct).1);
    let before = asked.load(Ordering::Relaxed);
    refusal.store(0, Ordering::Relaxed);
    assert!(!open(fresh("b"), direct).1);
    assert_eq!(asked.load(Ordering::Relaxed), before);
    assert!(open(file, libc::O_RDONLY).1, "as the others of it");
}

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

#[test]
fn submounts_are_crossed_or_looked_below() {
    if !is_root() {
        eprintln!("not root: no mounts");
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
