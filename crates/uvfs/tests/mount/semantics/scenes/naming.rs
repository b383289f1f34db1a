//! Renames, links, and names at their limits.

use super::*;

pub fn rename(s: &mut Scene) {
    let go = |s: &Scene, from: &str, to: &str, flags| {
        fs::renameat_with(CWD, s.at(from), CWD, s.at(to), flags)
    };
    let (none, keep, swap) = (
        RenameFlags::empty(),
        RenameFlags::NOREPLACE,
        RenameFlags::EXCHANGE,
    );
    s.file("a", "a");
    s.file("b", "b");
    fs::mkdir(s.at("d"), Mode::from(0o755)).unwrap();
    fs::mkdir(s.at("e"), Mode::from(0o755)).unwrap();
    fs::mkdir(s.at("d/sub"), Mode::from(0o755)).unwrap();
    s.done("no replace", go(s, "a", "b", keep));
    s.done("no replace, free", go(s, "a", "c", keep));
    s.done("exchange", go(s, "c", "b", swap));
    s.note(
        "exchanged",
        s.content("c").and_then(|c| Ok(c + &s.content("b")?)),
    );
    s.done("exchange file and directory", go(s, "c", "d", swap));
    s.done("exchange back", go(s, "c", "d", swap));
    s.done("exchange missing", go(s, "c", "missing", swap));
    s.done("both flags", go(s, "c", "b", keep | swap));
    s.done("whiteout", go(s, "c", "w", RenameFlags::WHITEOUT));
    let whiteout = fs::lstat(s.at("c")).map(|st| (st.st_mode, st.st_rdev));
    s.note("whiteout is", whiteout);
    let _ = fs::unlink(s.at("c"));
    s.done("file over directory", go(s, "b", "d", none));
    s.done("directory over file", go(s, "d", "b", none));
    s.done("directory over full", go(s, "e", "d", none));
    s.done("directory into itself", go(s, "d", "d/sub/x", none));
    s.done("directory over empty", go(s, "d", "e", none));
    s.done("same", go(s, "b", "b", none));
    s.done("missing", go(s, "missing", "x", none));
    s.done("dot", go(s, "e/.", "x", none));
    s.note("names", s.names("."));
    s.note("names below", s.names("e"));
    fs::link(s.at("b"), s.at("hard")).unwrap();
    s.done("over own hard link", go(s, "b", "hard", none));
    s.note("names with hard link", s.names("."));
    let old = s.file("old", "old");
    s.file("new", "new");
    s.done("over an open file", go(s, "new", "old", none));
    s.note("the open file", read_all(&old));
    s.note("the new file", s.content("old"));
    s.note(
        "links of the open file",
        fs::fstat(&old).map(|st| st.st_nlink),
    );
    let sub = s.open("e/sub", OFlags::RDONLY).unwrap();
    s.done("of an open directory", go(s, "e", "f", none));
    let below = fs::openat(
        &sub,
        "below",
        OFlags::CREATE | OFlags::WRONLY,
        Mode::from(0o644),
    );
    s.done("create below it", below);
    s.note("there it is", s.names("f/sub"));
    s.note(
        "links of parents",
        s.links(".").and_then(|a| Ok((a, s.links("f")?))),
    );
    s.done("parent of moved", {
        fs::mkdir(s.at("g"), Mode::from(0o755)).unwrap();
        go(s, "f/sub", "g/sub", none)
    });
    let up = fs::openat(&sub, "..", OFlags::RDONLY, Mode::empty()).unwrap();
    let same = fs::fstat(&up).unwrap().st_ino == fs::stat(s.at("g")).unwrap().st_ino;
    s.value("parent is the new one", same);
}

pub fn link(s: &mut Scene) {
    s.file("file", "content");
    fs::mkdir(s.at("dir"), Mode::from(0o755)).unwrap();
    s.done("link", fs::link(s.at("file"), s.at("dir/other")));
    s.done("again", fs::link(s.at("file"), s.at("dir/other")));
    s.done("directory", fs::link(s.at("dir"), s.at("dir2")));
    s.done("missing", fs::link(s.at("missing"), s.at("x")));
    s.note("links", s.links("file"));
    let inode = |name: &str| fs::lstat(s.at(name)).unwrap().st_ino;
    let same = inode("file") == inode("dir/other");
    s.value("one inode", same);
    s.open("dir/other", OFlags::WRONLY | OFlags::TRUNC)
        .map(|f| write_all(&f, b"new"))
        .unwrap();
    s.note("content by the other name", s.content("file"));
    s.done("unlink", fs::unlink(s.at("file")));
    s.note("links then", s.links("dir/other"));
    let file = s.open("dir/other", OFlags::RDONLY).unwrap();
    let by_fd = fs::linkat(&file, "", CWD, s.at("by-fd"), AtFlags::EMPTY_PATH);
    s.done("by descriptor", by_fd);
    s.note("links at last", s.links("dir/other"));
    for n in 0..300 {
        fs::link(s.at("dir/other"), s.at(&format!("many{n}"))).unwrap();
    }
    s.note("many", s.links("dir/other"));
}

pub fn names(s: &mut Scene) {
    for length in [255, 256, 1000] {
        let name = "n".repeat(length);
        s.done(
            &format!("file of {length}"),
            s.open(&name, OFlags::WRONLY | OFlags::CREATE),
        );
        s.done(&format!("stat of {length}"), fs::stat(s.at(&name)));
        s.done(
            &format!("mkdir of {length}"),
            fs::mkdir(s.at(&name), Mode::from(0o755)),
        );
        let other = format!("{}x", &name[1..]);
        s.done(
            &format!("rename to {length}"),
            fs::rename(s.at(&name), s.at(&other)),
        );
        s.done(
            &format!("symlink of {length}"),
            fs::symlink("x", s.at(&name)),
        );
    }
    let long = "x/".repeat(2100);
    s.done("path too long", fs::stat(s.at(&long)));
    for (number, bytes) in [&b"\xff\xfe"[..], b" ", b"new\nline", b"\\", b"..."]
        .iter()
        .enumerate()
    {
        let name = s.dir.join(OsString::from_vec(bytes.to_vec()));
        let flags = OFlags::WRONLY | OFlags::CREATE;
        s.done(
            &format!("odd {number}"),
            fs::open(&name, flags, Mode::from(0o644)),
        );
        s.done(&format!("odd {number} is there"), fs::lstat(&name));
    }
    let listed = s.names(".").map(|names| names.len());
    s.note("listed", listed);
    s.done(
        "empty",
        fs::openat(
            s.open(".", OFlags::RDONLY).unwrap(),
            "",
            OFlags::RDONLY,
            Mode::empty(),
        ),
    );
    let mut deep = s.dir.clone();
    for _ in 0..40 {
        deep.push("d".repeat(80));
        match fs::mkdir(&deep, Mode::from(0o755)) {
            Ok(()) => {}
            Err(e) => return s.done("deep", Err::<(), _>(e)),
        }
    }
    s.done("deep", fs::stat(&deep));
}
