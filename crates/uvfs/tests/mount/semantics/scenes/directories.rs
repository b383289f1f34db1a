//! Listings, and directories and files that are removed while in use.

use super::*;

pub fn readdir(s: &mut Scene) {
    fs::mkdir(s.at("dir"), Mode::from(0o755)).unwrap();
    for n in 0..1000 {
        s.file(&format!("dir/{n:04}"), "");
    }
    let dir = s.open("dir", OFlags::RDONLY).unwrap();
    let mut all = list(&dir).unwrap();
    all.sort();
    all.dedup();
    s.value("all", all.len());
    s.note("at the end", list(&dir));
    fs::seek(&dir, SeekFrom::Start(0)).unwrap();
    s.note("after rewind", list(&dir).map(|l| l.len()));
    positions_lead_on(s, &dir);
    removed_while_read(s, &dir);
    let fresh = s.open("dir", OFlags::RDONLY).unwrap();
    s.done("rmdir full", fs::rmdir(s.at("dir")));
    let new = s.names("dir").unwrap();
    new.iter()
        .for_each(|n| fs::unlink(s.at(&format!("dir/{n}"))).unwrap());
    s.note("seen by an open one", list(&fresh));
    s.file("dir/late", "");
    fs::seek(&fresh, SeekFrom::Start(0)).unwrap();
    s.note("late one", list(&fresh));
    types_and_inodes(s);
}

/// Each position that a listing hands out leads on to the name that came after it.
fn positions_lead_on(s: &mut Scene, dir: &OwnedFd) {
    fs::seek(dir, SeekFrom::Start(0)).unwrap();
    let mut order = Vec::new();
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut entries = fs::RawDir::new(dir, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry.unwrap();
        order.push((entry.file_name().to_owned(), entry.next_entry_cookie()));
    }
    let mut right = 0;
    for index in (0..order.len() - 1).step_by(97) {
        fs::seek(dir, SeekFrom::Start(order[index].1)).unwrap();
        let mut buffer = [MaybeUninit::uninit(); 1024];
        let mut entries = fs::RawDir::new(dir, &mut buffer);
        let next = entries.next().unwrap().unwrap().file_name().to_owned();
        right += usize::from(next == order[index + 1].0);
    }
    s.value("positions lead on", right);
}

/// When names are removed and added during a listing, no other name is lost or seen twice.
fn removed_while_read(s: &mut Scene, dir: &OwnedFd) {
    fs::seek(dir, SeekFrom::Start(0)).unwrap();
    let mut seen = Vec::new();
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut entries = fs::RawDir::new(dir, &mut buffer);
    while let Some(entry) = entries.next() {
        let name = entry.unwrap().file_name().to_str().unwrap().to_owned();
        if name.starts_with('0') {
            fs::unlink(s.at(&format!("dir/{name}"))).unwrap();
            if name.ends_with('5') {
                s.file(&format!("dir/new{name}"), "");
            }
            seen.push(name);
        }
    }
    seen.sort();
    let whole = seen.iter().map(|n| n.parse::<usize>().unwrap()).eq(0..1000);
    s.value("each once while removing", whole);
    s.note("then", s.names("dir").map(|n| n.len()));
}

/// A listing gives the types of files, and the inode numbers that stat gives.
fn types_and_inodes(s: &mut Scene) {
    fs::mkdir(s.at("kinds"), Mode::from(0o755)).unwrap();
    s.file("kinds/file", "");
    fs::mkdir(s.at("kinds/dir"), Mode::from(0o755)).unwrap();
    fs::symlink("x", s.at("kinds/link")).unwrap();
    let fifo = s.at("kinds/fifo");
    fs::mknodat(CWD, fifo, FileType::Fifo, Mode::from(0o644), 0).unwrap();
    let dir = s.open("kinds", OFlags::RDONLY).unwrap();
    let mut kinds = Vec::new();
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut entries = fs::RawDir::new(&dir, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry.unwrap();
        let name = entry.file_name().to_str().unwrap().to_owned();
        let inode = fs::lstat(s.at(&format!("kinds/{name}"))).unwrap().st_ino;
        kinds.push(format!(
            "{name} {:?} {}",
            entry.file_type(),
            name == ".." || inode == entry.ino()
        ));
    }
    kinds.sort();
    s.value("kinds", kinds.join(", "));
    let mut small = [MaybeUninit::uninit(); 8];
    fs::seek(&dir, SeekFrom::Start(0)).unwrap();
    let tiny = fs::RawDir::new(&dir, &mut small)
        .next()
        .map(|e| e.map(|_| ()));
    s.value("tiny buffer", format!("{tiny:?}"));
}

pub fn unlinked(s: &mut Scene) {
    let file = s.file("file", "content");
    let reader = s.open("file", OFlags::RDONLY).unwrap();
    fs::unlink(s.at("file")).unwrap();
    s.note("links", fs::fstat(&file).map(|st| st.st_nlink));
    s.note("write", io::write(&file, b" more"));
    s.note("read", read_all(&reader));
    s.done("chmod", fs::fchmod(&file, Mode::from(0o600)));
    s.done("truncate", fs::ftruncate(&file, 3));
    s.note("size", fs::fstat(&reader).map(|st| st.st_size));
    s.done(
        "fallocate",
        fs::fallocate(&file, FallocateFlags::empty(), 0, 100),
    );
    s.note("names", s.names("."));
    s.note("write far", io::pwrite(&file, b"x", 100_000));
    s.done("utimens", fs::futimens(&file, &now()));
    s.done("chown", fs::fchown(&file, Some(Uid::from_raw(1)), None));
    s.done(
        "set xattr",
        fs::fsetxattr(&file, "user.x", b"y", XattrFlags::empty()),
    );
    s.note("get xattr", fs::fgetxattr(&file, "user.x", &mut [0; 8][..]));
    s.note(
        "mode",
        fs::fstat(&file).map(|st| format!("{:o} {}", st.st_mode, st.st_uid)),
    );
    let new = s.file("file", "new");
    s.note("new one", read_all(&new));
    s.value(
        "another inode",
        fs::fstat(&new).unwrap().st_ino != fs::fstat(&file).unwrap().st_ino,
    );
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    s.done(
        "link",
        fs::linkat(CWD, &name, CWD, s.at("back"), AtFlags::SYMLINK_FOLLOW),
    );
    // Many at once, as mail servers and databases do.
    let many: Vec<_> = (0..200)
        .map(|n| {
            let name = format!("many{n}");
            let file = s.file(&name, format!("{n}"));
            fs::unlink(s.at(&name)).unwrap();
            file
        })
        .collect();
    let kept = many
        .iter()
        .enumerate()
        .filter(|(n, f)| read_all(f).unwrap() == n.to_string());
    s.value("many", kept.count());
}

pub fn removed_directory(s: &mut Scene) {
    fs::mkdir(s.at("dir"), Mode::from(0o755)).unwrap();
    let dir = s.open("dir", OFlags::RDONLY).unwrap();
    fs::rmdir(s.at("dir")).unwrap();
    s.note("list", list(&dir));
    s.note("links", fs::fstat(&dir).map(|st| st.st_nlink));
    let create = OFlags::CREATE | OFlags::WRONLY;
    s.done(
        "create",
        fs::openat(&dir, "file", create, Mode::from(0o644)),
    );
    s.done("mkdir", fs::mkdirat(&dir, "sub", Mode::from(0o755)));
    s.done("symlink", fs::symlinkat("x", &dir, "link"));
    s.done("stat", fs::statat(&dir, "file", AtFlags::empty()));
    s.done("open again", s.open("dir", OFlags::RDONLY));
    s.done("mkdir again", fs::mkdir(s.at("dir"), Mode::from(0o755)));
    s.file("dir/new", "new");
    s.note("the old one", list(&dir));
    s.done(
        "open in the old one",
        fs::openat(&dir, "new", OFlags::RDONLY, Mode::empty()),
    );
    s.done("fsync", fs::fsync(&dir));
    s.done("rmdir full", fs::rmdir(s.at("dir")));
    s.done("rmdir of file", fs::rmdir(s.at("dir/new")));
    s.done("unlink of directory", fs::unlink(s.at("dir")));
    s.done("rmdir of dot", fs::rmdir(s.at("dir/.")));
    s.done("rmdir of dot dot", fs::rmdir(s.at("dir/..")));
    // A name that was known not to be there.
    s.done("missing", fs::stat(s.at("later")));
    s.file("later", "x");
    s.done("not missing", fs::stat(s.at("later")));
    for _ in 0..100 {
        fs::unlink(s.at("later")).unwrap();
        assert_eq!(fs::stat(s.at("later")).map(|_| ()), Err(Errno::NOENT));
        fs::mkdir(s.at("later"), Mode::from(0o755)).unwrap();
        assert!(FileType::from_raw_mode(fs::stat(s.at("later")).unwrap().st_mode).is_dir());
        fs::rmdir(s.at("later")).unwrap();
        s.file("later", "x");
    }
}

/// By descriptors that nothing was opened for, of what loses its last name.
pub fn at_removed(s: &mut Scene) {
    type Loss = fn(&Scene);
    let losses: [(&str, Loss); 3] = [
        ("unlink", |s| fs::unlink(s.at("file")).unwrap()),
        ("rename over", |s| {
            s.file("other", "other");
            fs::rename(s.at("other"), s.at("file")).unwrap();
            fs::unlink(s.at("file")).unwrap();
        }),
        ("unlink twice", |s| {
            fs::link(s.at("file"), s.at("second")).unwrap();
            fs::unlink(s.at("file")).unwrap();
            fs::unlink(s.at("second")).unwrap();
        }),
    ];
    for (name, lose) in losses {
        drop(s.file("file", "content"));
        let path = s.open("file", OFlags::PATH).unwrap();
        lose(s);
        let by_path = format!("/proc/self/fd/{}", path.as_raw_fd());
        let read = || read_all(&fs::open(&by_path, OFlags::RDONLY, Mode::empty())?);
        s.note(
            &format!("{name}: size"),
            fs::fstat(&path).map(|st| st.st_size),
        );
        s.note(
            &format!("{name}: links"),
            fs::fstat(&path).map(|st| st.st_nlink),
        );
        s.note(&format!("{name}: content"), read());
        s.done(
            &format!("{name}: chmod"),
            fs::chmod(by_path.as_str(), Mode::from(0o640)),
        );
        s.note(
            &format!("{name}: mode"),
            fs::fstat(&path).map(|st| format!("{:o}", st.st_mode)),
        );
        let written = fs::open(&by_path, OFlags::WRONLY, Mode::empty());
        s.done(
            &format!("{name}: write"),
            written.and_then(|file| io::write(file, b"CON")),
        );
        s.note(&format!("{name}: written"), read());
    }
    fs::symlink("target", s.at("link")).unwrap();
    let link = s.open("link", OFlags::PATH | OFlags::NOFOLLOW).unwrap();
    fs::unlink(s.at("link")).unwrap();
    s.note("link", fs::readlinkat(&link, "", Vec::new()));
    fs::mkdir(s.at("dir"), Mode::from(0o755)).unwrap();
    let dir = s.open("dir", OFlags::PATH).unwrap();
    fs::mkdir(s.at("empty"), Mode::from(0o755)).unwrap();
    fs::rename(s.at("empty"), s.at("dir")).unwrap();
    s.note("dir: links", fs::fstat(&dir).map(|st| st.st_nlink));
    s.done(
        "dir: create",
        fs::openat(
            &dir,
            "x",
            OFlags::CREATE | OFlags::WRONLY,
            Mode::from(0o644),
        ),
    );
    s.note("dir: names", s.names("dir"));
}
