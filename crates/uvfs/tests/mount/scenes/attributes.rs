//! Extended attributes, flags, statx(2) and times.

use super::*;

pub fn xattrs(s: &mut Scene) {
    let file = s.file("file", "x");
    fs::symlink("file", s.at("link")).unwrap();
    let set =
        |path: &Path, name: &str, value: &[u8], flags| fs::lsetxattr(path, name, value, flags);
    let get = |path: &Path, name: &str| {
        let mut value = vec![0; 70000];
        fs::lgetxattr(path, name, &mut value[..])
            .map(|n| value[..n.min(50)].escape_ascii().to_string())
    };
    let list = |path: &Path| {
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
    };
    let (path, link) = (s.at("file"), s.at("link"));
    let (any, create) = (XattrFlags::empty(), XattrFlags::CREATE);
    for space in ["user", "trusted", "security", "system", "other"] {
        let name = format!("{space}.test");
        for (where_, path) in [("file", &path), ("link", &link)] {
            let step = |what: &str| format!("{space} {where_} {what}");
            s.done(&step("set"), set(path, &name, b"value\0binary", any));
            s.note(&step("get"), get(path, &name));
            s.done(&step("create again"), set(path, &name, b"v", create));
            let (p, n) = (path.clone(), name.clone());
            s.note(&step("get as nobody"), as_nobody(move || get(&p, &n)));
            let (p, n) = (path.clone(), name.clone());
            s.done(
                &step("set as nobody"),
                as_nobody(move || set(&p, &n, b"x", any)),
            );
            let p = path.clone();
            s.note(&step("list as nobody"), as_nobody(move || list(&p)));
        }
    }
    s.note("list", list(&path));
    s.note("list of link", list(&link));
    s.done(
        "replace missing",
        set(&path, "user.none", b"v", XattrFlags::REPLACE),
    );
    s.note("get missing", get(&path, "user.none"));
    s.done("remove missing", fs::lremovexattr(&path, "user.none"));
    s.done("empty value", set(&path, "user.empty", b"", any));
    s.note("get empty", get(&path, "user.empty"));
    let mut none: [u8; 0] = [];
    s.note(
        "size alone",
        fs::getxattr(&path, "user.test", &mut none[..]),
    );
    s.note(
        "size of list",
        fs::listxattr(&path, &mut none[..]).map(|n| n > 0),
    );
    s.note(
        "buffer too small",
        fs::getxattr(&path, "user.test", &mut [0; 3][..]),
    );
    s.note(
        "list buffer too small",
        fs::listxattr(&path, &mut [0; 3][..]),
    );
    s.done("large", set(&path, "user.large", &[b'l'; 3000], any));
    s.note("get large", get(&path, "user.large").map(|v| v.len()));
    s.done("too large", set(&path, "user.huge", &[0; 65537], any));
    s.done(
        "long name",
        set(&path, &format!("user.{}", "n".repeat(250)), b"v", any),
    );
    s.done(
        "too long name",
        set(&path, &format!("user.{}", "n".repeat(251)), b"v", any),
    );
    s.done("by descriptor", fs::fsetxattr(&file, "user.fd", b"fd", any));
    s.note("got", get(&path, "user.fd"));
    s.done("remove", fs::fremovexattr(&file, "user.fd"));
    s.note("list at the end", list(&path));
    fs::mknodat(CWD, s.at("fifo"), FileType::Fifo, Mode::from(0o644), 0).unwrap();
    s.done("user of fifo", set(&s.at("fifo"), "user.x", b"y", any));
    s.moves("set", "file", |s| {
        set(&s.at("file"), "user.test", b"new", any).unwrap()
    });
}

/// A file that may only be appended to (`chattr +a`).
pub fn append_only(s: &mut Scene) {
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
        s.note(&format!("{name} as nobody"), as_nobody(write));
    }
    s.note("content", s.content("file"));
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
    thread::sleep(Duration::from_millis(15));
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
    let exact = |ns| Timespec {
        tv_sec: 1_000_000_000,
        tv_nsec: ns,
    };
    let set = |s: &Scene, a, m| {
        let times = Timestamps {
            last_access: a,
            last_modification: m,
        };
        fs::utimensat(CWD, s.at("file"), &times, AtFlags::empty())
    };
    let omit = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_OMIT,
    };
    let current = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    s.done("exact", set(s, exact(123_456_789), exact(987_654_321)));
    s.value("are", format!("{:?}", &s.times("file")[..2]));
    s.done("omit access", set(s, omit, exact(5)));
    s.value("omit access are", format!("{:?}", &s.times("file")[..2]));
    s.done("omit modification", set(s, exact(6), omit));
    s.value(
        "omit modification are",
        format!("{:?}", &s.times("file")[..2]),
    );
    s.done("omit both", set(s, omit, omit));
    s.done("now", set(s, omit, current));
    s.value(
        "now is recent",
        s.times("file")[1] > 1_700_000_000_000_000_000,
    );
    s.value("access stays", s.times("file")[0]);
    let far = Timespec {
        tv_sec: -1_000_000,
        tv_nsec: 999_999_999,
    };
    s.done("before 1970", set(s, far, far));
    s.value("before 1970 are", format!("{:?}", &s.times("file")[..2]));
    let late = Timespec {
        tv_sec: 5_000_000_000,
        tv_nsec: 1,
    };
    s.done("after 2038", set(s, late, late));
    s.value("after 2038 are", format!("{:?}", &s.times("file")[..2]));
    let bad = Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000_000,
    };
    s.done("bad", set(s, bad, bad));
    s.done(
        "by descriptor",
        fs::futimens(
            &file,
            &Timestamps {
                last_access: exact(1),
                last_modification: exact(2),
            },
        ),
    );
    s.value("by descriptor are", format!("{:?}", &s.times("file")[..2]));
    // Writing after setting, and setting after writing: the last one counts.
    write_all(&file, b"more");
    s.done(
        "after writing",
        fs::futimens(
            &file,
            &Timestamps {
                last_access: exact(3),
                last_modification: exact(4),
            },
        ),
    );
    drop(file);
    s.value(
        "after writing and closing",
        format!("{:?}", &s.times("file")[..2]),
    );
    let times = Timestamps {
        last_access: exact(7),
        last_modification: exact(8),
    };
    utimens_of_link_and_by_others(s, &times);
}

fn utimens_of_link_and_by_others(s: &mut Scene, times: &Timestamps) {
    fs::symlink("file", s.at("link")).unwrap();
    s.done(
        "of link",
        fs::utimensat(CWD, s.at("link"), times, AtFlags::SYMLINK_NOFOLLOW),
    );
    s.value("of link is", s.times("link")[1]);
    s.value("file keeps its own", s.times("file")[1]);
    // Anyone who may write may say now; only the owner may say when.
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
