//! Names that move, go and come back, and what leads to which file.

use super::*;

/// A new file never shows the attributes of an old one that had its inode number.
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

/// A lookup during a rename never mixes two files.
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

/// A removed file stays for a program that has it open.
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
        // No program has these open, but the kernel still knows them: one may be at them by an O_PATH descriptor.
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
            let how = IoHow::new(opened.fh, 0);
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

/// A lookup during a replacement never mixes two files.
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

/// A removal counts against the file that it removed, not the one that has the name now.
#[test]
fn what_takes_a_name_that_is_being_removed_is_not_taken_for_what_had_it() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        while_a_name_is_replaced(source, || {
            let mut removed = 0;
            while removed < if uvfs_testing::full() { 3_000 } else { 1_000 } {
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

/// The kernel is told which file loses a name, so that its link count is right.
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

/// Removed files that the kernel never forgets don't use up all descriptors.
#[test]
fn what_is_kept_of_removed_files_is_bounded_and_gives_way() {
    // The test mounts a small tmpfs.
    if !has(&[Need::Root]) {
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
        // The space of what the kernel has not forgotten yet is there for writes that need it.
        for name in ["large", "another", "third"] {
            let (_, opened) = served.create(&ROOT_USER, ROOT, name, 0o600);
            let how = IoHow::new(opened.fh, 0);
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

/// No symbolic link or device leads out of the source.
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
            // No program has the pipe open: opening it would wait for ever, or fail otherwise.
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

/// A listing in pieces has each file once that was there all the time.
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

/// O_TMPFILE and linkat work together.
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
        let how = OpenHow::new(OFlags::RDWR);
        let (entry, opened) = now(served.fs.tmpfile(&USER, ROOT, &new, &how)).unwrap();
        assert_eq!(entry.attr.nlink, 0, "{store}");
        served.write(IoHow::new(opened.fh, 0), b"data").unwrap();
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
