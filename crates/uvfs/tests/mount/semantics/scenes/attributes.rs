//! Extended attributes, flags, statx(2) and times.

use super::*;

fn set_xattr(path: &Path, name: &str, value: &[u8]) -> io::Result<()> {
    fs::lsetxattr(path, name, value, XattrFlags::empty())
}

/// The first 50 bytes of a value, as text.
fn get_xattr(path: &Path, name: &str) -> io::Result<String> {
    let mut value = vec![0; 70000];
    fs::lgetxattr(path, name, &mut value[..]).map(|n| value[..n.min(50)].escape_ascii().to_string())
}

/// The sorted names of a file's attributes, without the label that SELinux adds.
fn list_xattrs(path: &Path) -> io::Result<Vec<String>> {
    let mut names = vec![0; 4096];
    fs::llistxattr(path, &mut names[..]).map(|n| {
        let mut names: Vec<_> = names[..n]
            .split(|b| *b == 0)
            .map(|n| String::from_utf8_lossy(n).into_owned())
            .filter(|n| n != "security.selinux")
            .collect();
        names.sort();
        names
    })
}

pub fn xattrs(s: &mut Scene) {
    let file = s.file("file", "x");
    fs::symlink("file", s.at("link")).unwrap();
    let path = s.at("file");
    xattrs_by_namespace(s);
    let replace = XattrFlags::REPLACE;
    s.done(
        "replace missing",
        fs::lsetxattr(&path, "user.none", b"v", replace),
    );
    s.note("get missing", get_xattr(&path, "user.none"));
    s.done("remove missing", fs::lremovexattr(&path, "user.none"));
    s.done("empty value", set_xattr(&path, "user.empty", b""));
    s.note("get empty", get_xattr(&path, "user.empty"));
    sizes_of_xattrs(s, &path);
    s.done(
        "by descriptor",
        fs::fsetxattr(&file, "user.fd", b"fd", XattrFlags::empty()),
    );
    s.note("got", get_xattr(&path, "user.fd"));
    s.done("remove", fs::fremovexattr(&file, "user.fd"));
    s.note("list at the end", list_xattrs(&path));
    fs::mknodat(CWD, s.at("fifo"), FileType::Fifo, Mode::from(0o644), 0).unwrap();
    s.done("user of fifo", set_xattr(&s.at("fifo"), "user.x", b"y"));
    s.moves("set", "file", |s| {
        set_xattr(&s.at("file"), "user.test", b"new").unwrap()
    });
}

/// Users may set and see the attributes of some namespaces only, on a file and on a symbolic link.
fn xattrs_by_namespace(s: &mut Scene) {
    let (file, link) = (&s.at("file"), &s.at("link"));
    for space in ["user", "trusted", "security", "system", "other"] {
        let name = format!("{space}.test");
        for (where_, path) in [("file", file), ("link", link)] {
            let step = |what: &str| format!("{space} {where_} {what}");
            s.done(&step("set"), set_xattr(path, &name, b"value\0binary"));
            s.note(&step("get"), get_xattr(path, &name));
            s.done(
                &step("create again"),
                fs::lsetxattr(path, &name, b"v", XattrFlags::CREATE),
            );
            let got = as_nobody(|| get_xattr(path, &name));
            s.note(&step("get as nobody"), got);
            let set = as_nobody(|| set_xattr(path, &name, b"x"));
            s.done(&step("set as nobody"), set);
            s.note(&step("list as nobody"), as_nobody(|| list_xattrs(path)));
        }
    }
    s.note("list", list_xattrs(file));
    s.note("list of link", list_xattrs(link));
}

/// Buffers that are too small, and the largest values and names.
fn sizes_of_xattrs(s: &mut Scene, path: &Path) {
    let mut none: [u8; 0] = [];
    s.note("size alone", fs::getxattr(path, "user.test", &mut none[..]));
    s.note(
        "size of list",
        fs::listxattr(path, &mut none[..]).map(|n| n > 0),
    );
    s.note(
        "buffer too small",
        fs::getxattr(path, "user.test", &mut [0; 3][..]),
    );
    s.note(
        "list buffer too small",
        fs::listxattr(path, &mut [0; 3][..]),
    );
    s.done("large", set_xattr(path, "user.large", &[b'l'; 3000]));
    s.note("get large", get_xattr(path, "user.large").map(|v| v.len()));
    s.done("too large", set_xattr(path, "user.huge", &[0; 65537]));
    for (step, length) in [("long name", 250), ("too long name", 251)] {
        let name = format!("user.{}", "n".repeat(length));
        s.done(step, set_xattr(path, &name, b"v"));
    }
}

/// An access control list is a part of the mode: it shows at once, and goes with the list.
pub fn acl_mode(s: &mut Scene) {
    s.file("file", "x");
    let path = s.at("file");
    let list = |mask| {
        let none = u32::MAX;
        let entries = [(1, 6, none), (2, 4, 7), (4, 4, none), (16, mask, none)];
        super::acl(&[&entries[..], &[(32, 4, none)]].concat())
    };
    let name = "system.posix_acl_access";
    for mask in [7, 4, 0] {
        let set = fs::setxattr(&path, name, &list(mask), XattrFlags::empty());
        s.done(&format!("mask {mask}"), set);
        s.note(&format!("mode with mask {mask}"), s.who("file"));
        let mode = fs::statx(CWD, &path, AtFlags::empty(), StatxFlags::MODE);
        let mode = mode.map(|st| format!("{:o}", st.stx_mode));
        s.note(&format!("mode alone with mask {mask}"), mode);
    }
    s.done("removed", fs::removexattr(&path, name));
    s.note("mode without a list", s.who("file"));
    s.moves("access control list", "file", |s| {
        let set = fs::setxattr(s.at("file"), name, &list(7), XattrFlags::empty());
        set.unwrap();
    });
}

/// A file that may only be appended to (`chattr +a`).
pub fn append_only(s: &mut Scene) {
    appending(s, true);
}

pub fn append_only_alone(s: &mut Scene) {
    appending(s, false);
}

fn appending(s: &mut Scene, by_others: bool) {
    drop(s.file("file", "first"));
    s.chmod("file", 0o666).unwrap();
    let only_append = |s: &Scene, only| {
        let file = s.open("file", OFlags::RDONLY).unwrap();
        let mut flags = fs::ioctl_getflags(&file).unwrap();
        flags.set(IFlags::APPEND, only);
        fs::ioctl_setflags(&file, flags)
    };
    s.done("chattr", only_append(s, true));
    let path = s.at("file");
    let append = OFlags::WRONLY | OFlags::APPEND;
    for (name, flags) in [
        ("writing", OFlags::WRONLY),
        ("both", OFlags::RDWR),
        ("truncating", append | OFlags::TRUNC),
        ("appending", append),
        ("reading and appending", OFlags::RDWR | OFlags::APPEND),
        ("appending, with its time kept", append | OFlags::NOATIME),
        ("made if missing", append | OFlags::CREATE),
    ] {
        let write = || fs::open(&path, flags, Mode::empty()).and_then(|f| io::pwrite(&f, b"+", 0));
        s.note(&format!("{name} as root"), write());
        if by_others {
            s.note(&format!("{name} as nobody"), as_nobody(write));
        }
    }
    s.note("content", s.content("file"));
    s.note("size", s.size("file"));
    // The pages that a reader has cached grow with it.
    let reader = s.open("file", OFlags::RDONLY).unwrap();
    s.note("read before", read_all(&reader));
    let writer = s.open("file", append).unwrap();
    for text in ["one", "two", "three"] {
        s.note(
            &format!("append {text}"),
            io::write(&writer, text.as_bytes()),
        );
        s.note(&format!("read after {text}"), read_all(&reader));
    }
    drop((reader, writer));
    s.done("unlink", fs::unlink(&path));
    s.done("rename", fs::rename(&path, s.at("other")));
    s.done("link", fs::link(&path, s.at("other")));
    only_append(s, false).unwrap();
    s.done("unlink afterwards", fs::unlink(&path));
}

pub fn statx(s: &mut Scene) {
    let file = s.file("file", "content");
    let flags = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let look = |at| fs::statx(CWD, at, AtFlags::SYMLINK_NOFOLLOW, flags);
    let first = look(s.at("file")).unwrap();
    let mask = StatxFlags::from_bits_retain(first.stx_mask);
    s.value("basic", mask.contains(StatxFlags::BASIC_STATS));
    s.value("birth", mask.contains(StatxFlags::BTIME));
    next_file_time();
    write_all(&file, b"more");
    fs::chmod(s.at("file"), Mode::from(0o600)).unwrap();
    fs::rename(s.at("file"), s.at("renamed")).unwrap();
    let then = look(s.at("renamed")).unwrap();
    let birth = |st: &fs::Statx| (st.stx_btime.tv_sec, st.stx_btime.tv_nsec);
    s.value(
        "birth stays",
        birth(&first) == birth(&then) && birth(&then).0 != 0,
    );
    s.value(
        "size and mode",
        format!("{} {:o}", then.stx_size, then.stx_mode),
    );
    let (by_stat, by_fd) = (
        fs::stat(s.at("renamed")).unwrap(),
        fs::fstat(&file).unwrap(),
    );
    s.value(
        "one inode",
        then.stx_ino == by_stat.st_ino && by_stat.st_ino == by_fd.st_ino,
    );
    let force = fs::statx(
        &file,
        "",
        AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC,
        flags,
    );
    s.note("forced", force.map(|st| st.stx_size));
    let lazy = fs::statx(
        &file,
        "",
        AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC,
        flags,
    );
    s.note("not synced", lazy.map(|st| st.stx_size));
    fs::mkdir(s.at("dir"), Mode::from(0o755)).unwrap();
    let dir = look(s.at("dir")).unwrap();
    s.value(
        "directory",
        format!("{:o} birth {}", dir.stx_mode, birth(&dir).0 != 0),
    );
    s.value(
        "attribute mask of mount root",
        fs::statx(CWD, s.at("dir"), AtFlags::empty(), flags)
            .map(|st| st.stx_attributes.contains(fs::StatxAttributes::MOUNT_ROOT))
            .unwrap(),
    );
}

pub fn utimens(s: &mut Scene) {
    let file = s.file("file", "x");
    let at = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    let exact = |ns| at(1_000_000_000, ns);
    let (omit, current) = (at(0, UTIME_OMIT), at(0, UTIME_NOW));
    let both = |last_access, last_modification| Timestamps {
        last_access,
        last_modification,
    };
    let set = |s: &Scene, access, modification| {
        let times = both(access, modification);
        fs::utimensat(CWD, s.at("file"), &times, AtFlags::empty())
    };
    let are = |s: &Scene| format!("{:?}", &s.times("file")[..2]);
    s.done("exact", set(s, exact(123_456_789), exact(987_654_321)));
    s.value("are", are(s));
    s.done("omit access", set(s, omit, exact(5)));
    s.value("omit access are", are(s));
    s.done("omit modification", set(s, exact(6), omit));
    s.value("omit modification are", are(s));
    s.done("omit both", set(s, omit, omit));
    s.done("now", set(s, omit, current));
    s.value(
        "now is recent",
        s.times("file")[1] > 1_700_000_000_000_000_000,
    );
    s.value("access stays", s.times("file")[0]);
    for (step, time) in [
        ("before 1970", at(-1_000_000, 999_999_999)),
        ("after 2038", at(5_000_000_000, 1)),
    ] {
        s.done(step, set(s, time, time));
        s.value(&format!("{step} are"), are(s));
    }
    let bad = at(0, 1_000_000_000);
    s.done("bad", set(s, bad, bad));
    s.done(
        "by descriptor",
        fs::futimens(&file, &both(exact(1), exact(2))),
    );
    s.value("by descriptor are", are(s));
    // Writing after setting, and setting after writing: the last one counts.
    write_all(&file, b"more");
    s.done(
        "after writing",
        fs::futimens(&file, &both(exact(3), exact(4))),
    );
    drop(file);
    s.value("after writing and closing", are(s));
    utimens_of_link_and_by_others(s, &both(exact(7), exact(8)));
}

fn utimens_of_link_and_by_others(s: &mut Scene, times: &Timestamps) {
    fs::symlink("file", s.at("link")).unwrap();
    s.done(
        "of link",
        fs::utimensat(CWD, s.at("link"), times, AtFlags::SYMLINK_NOFOLLOW),
    );
    s.value("of link is", s.times("link")[1]);
    s.value("file keeps its own", s.times("file")[1]);
    // A user who may write may say now; only the owner may say when.
    s.chmod("file", 0o666).unwrap();
    let path = s.at("file");
    s.done(
        "now as nobody",
        as_nobody(|| fs::utimensat(CWD, &path, &now(), AtFlags::empty())),
    );
    s.done(
        "when as nobody",
        as_nobody(|| fs::utimensat(CWD, &path, times, AtFlags::empty())),
    );
}

pub fn times(s: &mut Scene) {
    let file = s.file("file", "content");
    fs::mkdir(s.at("dir"), Mode::from(0o755)).unwrap();
    s.moves("write", "file", |_| write_all(&file, b"x"));
    s.moves("empty write", "file", |_| {
        assert_eq!(io::write(&file, b""), Ok(0));
    });
    s.moves("chmod", "file", |s| s.chmod("file", 0o600).unwrap());
    s.moves("chown", "file", |s| {
        fs::chown(s.at("file"), Some(Uid::from_raw(1)), None).unwrap()
    });
    s.moves("truncate", "file", |_| fs::ftruncate(&file, 3).unwrap());
    s.moves("truncate to the same", "file", |_| {
        fs::ftruncate(&file, 3).unwrap()
    });
    s.moves("read", "file", |s| drop(s.content("file")));
    s.moves("fallocate", "file", |_| {
        fs::fallocate(&file, FallocateFlags::empty(), 0, 99).unwrap()
    });
    s.moves("chattr", "file", |_| {
        let flags = fs::ioctl_getflags(&file).unwrap();
        fs::ioctl_setflags(&file, flags | IFlags::NODUMP).unwrap()
    });
    s.moves("link (file)", "file", |s| {
        fs::link(s.at("file"), s.at("dir/link")).unwrap()
    });
    s.moves("link (directory)", "dir", |s| {
        fs::link(s.at("file"), s.at("dir/link2")).unwrap()
    });
    s.moves("unlink (file)", "file", |s| {
        fs::unlink(s.at("dir/link")).unwrap()
    });
    s.moves("unlink (directory)", "dir", |s| {
        fs::unlink(s.at("dir/link2")).unwrap()
    });
    s.moves("create", "dir", |s| drop(s.file("dir/new", "")));
    s.moves("rename", "dir", |s| {
        fs::rename(s.at("dir/new"), s.at("dir/newer")).unwrap()
    });
    s.moves("mkdir", "dir", |s| {
        fs::mkdir(s.at("dir/sub"), Mode::from(0o755)).unwrap()
    });
    s.moves("exchange", "dir/newer", |s| {
        let (a, b) = (s.at("dir/newer"), s.at("dir/other"));
        s.file("dir/other", "");
        fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).unwrap();
    });
    s.moves("listing", "dir", |s| drop(s.names("dir")));
    s.moves("open for writing", "file", |s| {
        drop(s.open("file", OFlags::RDWR))
    });
    s.moves("open truncating", "file", |s| {
        drop(s.open("file", OFlags::RDWR | OFlags::TRUNC))
    });
}
