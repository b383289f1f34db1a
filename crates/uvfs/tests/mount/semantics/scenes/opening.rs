//! How files are opened and made.

use super::*;

pub fn open_flags(s: &mut Scene) {
    use OFlags as O;
    s.done("missing", s.open("missing", O::RDONLY));
    s.done(
        "exclusive new",
        s.open("new", O::WRONLY | O::CREATE | O::EXCL),
    );
    s.done(
        "exclusive old",
        s.open("new", O::WRONLY | O::CREATE | O::EXCL),
    );
    s.file("file", "content");
    fs::symlink("file", s.at("link")).unwrap();
    fs::symlink("nowhere", s.at("dangling")).unwrap();
    fs::mkdir(s.at("dir"), Mode::from(0o755)).unwrap();
    s.done("nofollow link", s.open("link", O::RDONLY | O::NOFOLLOW));
    s.done(
        "exclusive through dangling link",
        s.open("dangling", O::WRONLY | O::CREATE | O::EXCL),
    );
    s.done(
        "create through dangling link",
        s.open("dangling", O::WRONLY | O::CREATE),
    );
    s.note("created by link", s.names("."));
    s.done(
        "directory of file",
        s.open("file", O::RDONLY | O::DIRECTORY),
    );
    s.done("write directory", s.open("dir", O::WRONLY));
    s.done("create directory", s.open("dir", O::RDONLY | O::CREATE));
    s.done("read directory", s.open("dir", O::RDONLY));
    s.done("below file", s.open("file/x", O::RDONLY));
    s.done("file with slash", s.open("file/", O::RDONLY));
    s.done("truncate", s.open("file", O::RDWR | O::TRUNC));
    s.note("truncated", s.size("file"));
    s.done("noatime", s.open("file", O::RDONLY | O::NOATIME));
    s.done("sync", s.open("file", O::RDWR | O::SYNC));
    s.done("dsync", s.open("file", O::RDWR | O::DSYNC));
    let file = s.open("file", O::RDONLY).unwrap();
    s.note("write to read-only", io::write(&file, b"x"));
    let file = s.open("file", O::WRONLY).unwrap();
    s.note("read from write-only", io::read(&file, &mut [0; 4][..]));
    let path = s.open("file", O::PATH).unwrap();
    s.note("read from path", io::read(&path, &mut [0; 4][..]));
    s.note("stat of path", fs::fstat(&path).map(|st| st.st_size));
    let dir = s.open("dir", O::RDONLY).unwrap();
    s.note("read a directory", io::read(&dir, &mut [0; 4][..]));
    let flags = fs::fcntl_getfl(s.open("file", O::RDWR | O::APPEND).unwrap());
    s.note("flags kept", flags.map(|f| f.contains(O::APPEND | O::RDWR)));
    s.done("mode 000 as owner root", {
        s.chmod("file", 0).unwrap();
        s.open("file", O::RDWR)
    });
    let created = fs::open(s.at("read-only"), O::RDWR | O::CREATE, Mode::from(0o444)).unwrap();
    s.note("write to a new 0444 file", io::write(&created, b"x"));
    let created = as_nobody_in(s, |s| {
        let created = fs::open(s.at("read-only"), O::RDWR | O::CREATE, Mode::from(0o444));
        created.and_then(|file| io::write(&file, b"x"))
    });
    s.note("write to a new 0444 file as nobody", created);
}

pub fn append(s: &mut Scene) {
    let file = s.file("file", "first");
    let end = s.open("file", OFlags::RDWR | OFlags::APPEND).unwrap();
    s.note("write", io::write(&end, b" second"));
    s.note("pwrite appends", io::pwrite(&end, b" third", 0));
    s.note("position", fs::seek(&end, SeekFrom::Current(0)));
    io::pwrite(&file, b"FIRST", 0).unwrap();
    write_all(&end, b" fourth");
    s.note("content", s.content("file"));
    let threads: Vec<_> = (0..4)
        .map(|n: u8| {
            let file = s
                .open("shared", OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE)
                .unwrap();
            thread::spawn(move || (0..100).for_each(|_| write_all(&file, &[b'a' + n; 10])))
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    let bytes = std::fs::read(s.at("shared")).unwrap();
    let whole = bytes.chunks(10).all(|c| c.iter().all(|b| *b == c[0]));
    s.value("four at once", format!("{} {whole}", bytes.len()));
    fs::fcntl_setfl(&file, OFlags::APPEND).unwrap();
    fs::seek(&file, SeekFrom::Start(0)).unwrap();
    write_all(&file, b" fifth");
    s.note("set later", s.content("file"));
}

pub fn tmpfile(s: &mut Scene) {
    let flags = OFlags::TMPFILE | OFlags::RDWR;
    match s.open(".", flags) {
        Err(e) => s.done("open", Err::<(), _>(e)),
        Ok(file) => {
            write_all(&file, b"content");
            s.note("links", fs::fstat(&file).map(|st| st.st_nlink));
            s.note("names", s.names("."));
            let name = format!("/proc/self/fd/{}", file.as_raw_fd());
            s.done(
                "link",
                fs::linkat(CWD, &name, CWD, s.at("linked"), AtFlags::SYMLINK_FOLLOW),
            );
            s.note("links then", fs::fstat(&file).map(|st| st.st_nlink));
            s.note("content", s.content("linked"));
            s.note("who", s.who("linked"));
            write_all(&file, b" more");
            s.note("content then", s.content("linked"));
        }
    }
    let exclusive = s.open(".", flags | OFlags::EXCL);
    if let Ok(file) = exclusive {
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        s.done(
            "link exclusive",
            fs::linkat(CWD, &name, CWD, s.at("no"), AtFlags::SYMLINK_FOLLOW),
        );
    }
    s.done("read-only", s.open(".", OFlags::TMPFILE | OFlags::RDONLY));
    s.note("names at the end", s.names("."));
}

pub fn mknod(s: &mut Scene) {
    let make = |s: &Scene, name: &str, kind, mode: u32, dev| {
        fs::mknodat(CWD, s.at(name), kind, Mode::from_raw_mode(mode), dev)
    };
    let kinds = [
        ("fifo", FileType::Fifo, 0),
        ("socket", FileType::Socket, 0),
        ("char", FileType::CharacterDevice, fs::makedev(1, 3)),
        ("block", FileType::BlockDevice, fs::makedev(7, 300)),
        ("regular", FileType::RegularFile, 0),
    ];
    for (name, kind, dev) in kinds {
        s.done(name, make(s, name, kind, 0o666, dev));
        let stat = fs::lstat(s.at(name));
        s.note(
            &format!("{name} is"),
            stat.map(|st| (st.st_mode, st.st_rdev, st.st_nlink)),
        );
        let user = as_nobody_made(s, name, kind, dev);
        s.done(&format!("{name} as nobody"), user);
    }
    s.done("again", make(s, "fifo", FileType::Fifo, 0o666, 0));
    s.done(
        "directory",
        make(s, "directory", FileType::Directory, 0o777, 0),
    );
    s.done(
        "below nothing",
        make(s, "no/fifo", FileType::Fifo, 0o666, 0),
    );
    let reader = s.open("fifo", OFlags::RDONLY | OFlags::NONBLOCK).unwrap();
    let writer = s.open("fifo", OFlags::WRONLY | OFlags::NONBLOCK).unwrap();
    write_all(&writer, b"through");
    let mut bytes = [0; 16];
    s.note("fifo carries", io::read(&reader, &mut bytes[..]));
    s.done("open socket", s.open("socket", OFlags::RDONLY));
    let listener = std::os::unix::net::UnixListener::bind(s.at("bound"));
    s.value("socket bound", listener.is_ok());
    let connected = std::os::unix::net::UnixStream::connect(s.at("bound"));
    s.value("socket connected", connected.is_ok());
}

fn as_nobody_made(s: &Scene, name: &str, kind: FileType, dev: u64) -> io::Result<()> {
    let dir = s.at("open");
    let _ = fs::mkdir(&dir, Mode::from(0o777));
    s.chmod("open", 0o777).unwrap();
    as_nobody(|| fs::mknodat(CWD, dir.join(name), kind, Mode::from(0o644), dev))
}

pub fn symlink(s: &mut Scene) {
    let target = |s: &Scene, name: &str| {
        fs::readlink(s.at(name), Vec::new()).map(|t| t.to_string_lossy().len())
    };
    s.done("loop", fs::symlink("loop", s.at("loop")));
    s.done("open loop", s.open("loop", OFlags::RDONLY));
    fs::symlink("two", s.at("one")).unwrap();
    fs::symlink("one", s.at("two")).unwrap();
    s.done("stat loop of two", fs::stat(s.at("one")));
    s.done("again", fs::symlink("x", s.at("loop")));
    s.done("empty", fs::symlink("", s.at("empty")));
    for length in [1, 255, 1000, 4094, 4095, 4096] {
        let name = format!("long{length}");
        s.done(
            &format!("of {length}"),
            fs::symlink("x".repeat(length), s.at(&name)),
        );
        s.note(&format!("read {length}"), target(s, &name));
        s.note(&format!("size {length}"), s.size(&name));
    }
    let odd = OsString::from_vec(b"\xff\xfe not utf-8".to_vec());
    s.done("odd", fs::symlink(&*odd, s.at("odd")));
    let read = fs::readlink(s.at("odd"), Vec::new());
    s.note("read odd", read.map(|t| t.as_bytes() == odd.as_bytes()));
    s.file("file", "");
    s.note("read a file", target(s, "file"));
    s.done(
        "chmod",
        fs::chmodat(
            CWD,
            s.at("odd"),
            Mode::from(0o600),
            AtFlags::SYMLINK_NOFOLLOW,
        ),
    );
    let owner = (Some(Uid::from_raw(1)), Some(Gid::from_raw(2)));
    let chown = fs::chownat(
        CWD,
        s.at("odd"),
        owner.0,
        owner.1,
        AtFlags::SYMLINK_NOFOLLOW,
    );
    s.done("chown", chown);
    s.note("who", s.who("odd"));
    fs::mkdir(s.at("dir"), Mode::from(0o755)).unwrap();
    fs::symlink("dir", s.at("to-dir")).unwrap();
    s.done(
        "create through",
        s.open("to-dir/x", OFlags::WRONLY | OFlags::CREATE),
    );
    s.done("rmdir", fs::rmdir(s.at("to-dir")));
    s.done("unlink with slash", fs::unlink(s.at("to-dir/")));
    s.done(
        "up and out",
        fs::symlink("../../../../../../../../../../etc", s.at("out")),
    );
    s.done("hard link to link", fs::link(s.at("odd"), s.at("odd2")));
    s.note("links", s.links("odd"));
    // 41 links in a row are one too many.
    s.file("chain0", "end");
    for n in 1..=41 {
        fs::symlink(format!("chain{}", n - 1), s.at(&format!("chain{n}"))).unwrap();
    }
    s.done("40 in a row", s.open("chain40", OFlags::RDONLY));
    s.done("41 in a row", s.open("chain41", OFlags::RDONLY));
}

pub fn statfs(s: &mut Scene) {
    let file = s.file("file", "content");
    let by_path = fs::statvfs(&s.dir).unwrap();
    s.value(
        "sizes",
        format!(
            "{} {} {}",
            by_path.f_bsize, by_path.f_frsize, by_path.f_namemax
        ),
    );
    s.value("total", format!("{} {}", by_path.f_blocks, by_path.f_files));
    s.value(
        "free is sane",
        by_path.f_bavail <= by_path.f_bfree && by_path.f_bfree <= by_path.f_blocks,
    );
    s.note(
        "by descriptor",
        fs::fstatvfs(&file).map(|st| st.f_blocks == by_path.f_blocks),
    );
}

/// A file that is being executed can't be written, and is none the worse for trying.
pub fn executed(s: &mut Scene) {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};
    let program = std::fs::read("/bin/cat").expect("cat");
    drop(s.file("cat", &program));
    s.chmod("cat", 0o755).unwrap();
    let mut child = Command::new(s.at("cat"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the copy runs");
    for (step, flags) in [
        ("write", OFlags::WRONLY),
        ("read and write", OFlags::RDWR),
        ("truncate", OFlags::RDONLY | OFlags::TRUNC),
    ] {
        s.done(step, s.open("cat", flags));
    }
    let truncated = std::fs::File::options().write(true).open(s.at("cat"));
    s.done(
        "set length",
        truncated
            .and_then(|file| file.set_len(1))
            .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO)),
    );
    let same = std::fs::read(s.at("cat")).is_ok_and(|now| now == program);
    s.value("it is the same", same);
    let mut line = String::new();
    let answer = child
        .stdin
        .take()
        .expect("its input")
        .write_all(b"still here\n");
    let output = child.stdout.take().expect("its output");
    let read = BufReader::new(output).read_line(&mut line);
    s.value(
        "it runs",
        answer.is_ok() && read.is_ok() && line == "still here\n",
    );
    s.value("it ends", child.wait().expect("its end").success());
    s.done("write afterwards", s.open("cat", OFlags::RDWR));
}

pub fn reopen(s: &mut Scene) {
    let file = s.file("file", "content");
    let again = |file: &OwnedFd, flags| {
        fs::open(
            format!("/proc/self/fd/{}", file.as_raw_fd()),
            flags,
            Mode::empty(),
        )
    };
    s.done(
        "for writing",
        again(&s.open("file", OFlags::RDONLY).unwrap(), OFlags::RDWR),
    );
    let path = s.open("file", OFlags::PATH).unwrap();
    s.note(
        "of path",
        again(&path, OFlags::RDONLY).and_then(|f| read_all(&f)),
    );
    fs::rename(s.at("file"), s.at("moved")).unwrap();
    s.note(
        "of moved",
        again(&path, OFlags::RDONLY).and_then(|f| read_all(&f)),
    );
    fs::unlink(s.at("moved")).unwrap();
    s.note(
        "of unlinked",
        again(&file, OFlags::RDONLY).and_then(|f| read_all(&f)),
    );
    s.note(
        "of unlinked path",
        again(&path, OFlags::RDONLY).and_then(|f| read_all(&f)),
    );
    s.note(
        "of unlinked, truncating",
        again(&file, OFlags::WRONLY | OFlags::TRUNC).and_then(|f| {
            io::write(&f, b"new")?;
            read_all(&file)
        }),
    );
    if let Ok(file) = s.open(".", OFlags::TMPFILE | OFlags::RDWR) {
        write_all(&file, b"temporary");
        s.note(
            "of temporary",
            again(&file, OFlags::RDONLY).and_then(|f| read_all(&f)),
        );
    }
    let dir = s.open(".", OFlags::PATH).unwrap();
    s.note(
        "of directory",
        again(&dir, OFlags::RDONLY).and_then(|d| list(&d)),
    );
}

pub fn access(s: &mut Scene) {
    use rustix::fs::Access;
    s.file("file", "x");
    fs::mkdir(s.at("dir"), Mode::from(0o711)).unwrap();
    for mode in [0o000, 0o444, 0o222, 0o111, 0o755, 0o604] {
        s.chmod("file", mode).unwrap();
        for (name, access) in [
            ("read", Access::READ_OK),
            ("write", Access::WRITE_OK),
            ("execute", Access::EXEC_OK),
        ] {
            let check = || fs::accessat(CWD, s.at("file"), access, AtFlags::empty());
            let root = check();
            let path = s.at("file");
            let nobody = as_nobody(|| fs::accessat(CWD, &path, access, AtFlags::empty()));
            let open = |name: &str| match name {
                "read" => OFlags::RDONLY,
                _ => OFlags::WRONLY,
            };
            if name != "execute" {
                let opened = as_nobody(|| fs::open(&path, open(name), Mode::empty()));
                s.done(&format!("{mode:o} {name} opened by nobody"), opened);
            }
            s.done(&format!("{mode:o} {name} by root"), root);
            s.done(&format!("{mode:o} {name} by nobody"), nobody);
        }
    }
    std::fs::copy("/bin/true", s.at("program")).unwrap();
    for mode in [0o755, 0o644] {
        s.chmod("program", mode).unwrap();
        let run = std::process::Command::new(s.at("program")).status();
        s.value(
            &format!("run {mode:o}"),
            run.map_or_else(|e| e.to_string(), |s| s.to_string()),
        );
    }
    s.chmod("program", 0o755).unwrap();
    let writer = s.open("program", OFlags::WRONLY).unwrap();
    let busy = std::process::Command::new(s.at("program")).status();
    s.value(
        "run while open for writing",
        busy.map_or_else(|e| e.to_string(), |s| s.to_string()),
    );
    drop(writer);
}

/// The answers of access(2) and chdir(2) to root, and what then happens.
pub fn access_alone(s: &mut Scene) {
    use rustix::fs::Access;
    std::fs::copy("/bin/true", s.at("program")).unwrap();
    fs::mkdir(s.at("dir"), Mode::from(0o755)).unwrap();
    let kinds = [
        ("exists", Access::EXISTS),
        ("read", Access::READ_OK),
        ("write", Access::WRITE_OK),
        ("execute", Access::EXEC_OK),
        ("all", Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK),
    ];
    for name in ["program", "dir"] {
        for mode in [0o755, 0o644, 0o000, 0o010, 0o444, 0o100] {
            s.chmod(name, mode).unwrap();
            for (kind, access) in kinds {
                for flags in [AtFlags::empty(), AtFlags::EACCESS] {
                    let may = fs::accessat(CWD, s.at(name), access, flags);
                    s.done(&format!("{name} {mode:o} {kind} {flags:?}"), may);
                }
            }
            if name == "program" {
                let run = std::process::Command::new(s.at(name)).status();
                let run = run.map_or_else(|e| e.to_string(), |status| status.to_string());
                s.value(&format!("run {mode:o}"), run);
            }
        }
    }
    let missing = fs::accessat(CWD, s.at("missing"), Access::EXISTS, AtFlags::empty());
    s.done("missing", missing);
    let in_it = std::process::Command::new("true")
        .current_dir(s.at("dir"))
        .status();
    s.value("chdir", in_it.is_ok_and(|status| status.success()));
    hooks(s);
}

/// git asks access(2) whether a hook may be executed, and executes it.
fn hooks(s: &mut Scene) {
    let git = |args: &[&str]| {
        let mut git = std::process::Command::new("git");
        git.args(["-c", "user.name=n", "-c", "user.email=e"])
            .args(args);
        let outcome = git.current_dir(s.at(".")).output();
        outcome.map(|outcome| outcome.status.success()).ok()
    };
    let made = git(&["init", "-q", "repository"]);
    let hook = s.at("repository/.git/hooks/pre-commit");
    let mut committed = Vec::new();
    if made == Some(true) {
        std::fs::write(&hook, "#!/bin/sh\nexit 1\n").unwrap();
        for mode in [0o644, 0o755] {
            fs::chmod(&hook, Mode::from_raw_mode(mode)).unwrap();
            let commit = ["commit", "-q", "--allow-empty", "-m", "message"];
            committed.push(git(&[&["-C", "repository"][..], &commit].concat()));
        }
    }
    s.value("git", format!("{made:?} {committed:?}"));
}
