//! Scenes of system calls. Each writes down the results of its steps, which must be the same on
//! every file system with Linux's semantics: errors, sizes, modes, contents, and whether a time
//! has changed, but never a time, an inode number or a directory position itself.

use std::ffi::OsString;
use std::fmt::Debug;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{
    self, AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Gid, IFlags, Mode, OFlags,
    RenameFlags, SeekFrom, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
    XattrFlags,
};
use rustix::io::{self, Errno};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_res_uid};

const NOBODY: u32 = 65534;

/// One scene's directory and the results so far.
struct Scene<'a> {
    name: &'static str,
    dir: PathBuf,
    report: &'a mut String,
}

impl Scene<'_> {
    fn at(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Writes down a result.
    fn note<T: Debug>(&mut self, step: &str, result: io::Result<T>) {
        let result = match result {
            Ok(value) => format!("{value:?}"),
            Err(e) => e.to_string(),
        };
        self.value(step, result);
    }

    /// Writes down that a call succeeded or how it failed.
    fn done<T>(&mut self, step: &str, result: io::Result<T>) {
        self.note(step, result.map(|_| ()));
    }

    fn value(&mut self, step: &str, value: impl ToString) {
        let value = value.to_string().replace('\n', "\\n");
        self.report
            .push_str(&format!("{} {step}: {value}\n", self.name));
    }

    fn open(&self, name: &str, flags: OFlags) -> io::Result<OwnedFd> {
        fs::open(self.at(name), flags | OFlags::CLOEXEC, Mode::from(0o644))
    }

    /// A new file with this content, open for reading and writing.
    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> OwnedFd {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC;
        let file = self
            .open(name, flags)
            .unwrap_or_else(|e| panic!("{}: {e}", self.at(name).display()));
        write_all(&file, content.as_ref());
        file
    }

    fn chmod(&self, name: &str, mode: u32) -> io::Result<()> {
        fs::chmod(self.at(name), Mode::from_raw_mode(mode))
    }

    /// Mode and owner.
    fn who(&self, name: &str) -> io::Result<String> {
        let stat = fs::lstat(self.at(name))?;
        Ok(format!(
            "{:o} {}:{}",
            stat.st_mode, stat.st_uid, stat.st_gid
        ))
    }

    fn size(&self, name: &str) -> io::Result<i64> {
        fs::lstat(self.at(name)).map(|stat| stat.st_size)
    }

    fn links(&self, name: &str) -> io::Result<u64> {
        #[allow(clippy::unnecessary_cast, reason = "the type differs by architecture")]
        fs::lstat(self.at(name)).map(|stat| stat.st_nlink as u64)
    }

    fn content(&self, name: &str) -> io::Result<String> {
        read_all(&self.open(name, OFlags::RDONLY)?)
    }

    /// The sorted names in a directory.
    fn names(&self, name: &str) -> io::Result<Vec<String>> {
        let dir = self.open(name, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut names = list(&dir)?;
        names.sort();
        Ok(names)
    }

    /// Access, modification and change times in nanoseconds.
    fn times(&self, name: &str) -> [i128; 3] {
        let s = fs::lstat(self.at(name)).expect("stat");
        #[allow(clippy::unnecessary_cast, reason = "the types differ by architecture")]
        [
            (s.st_atime, s.st_atime_nsec),
            (s.st_mtime, s.st_mtime_nsec),
            (s.st_ctime, s.st_ctime_nsec),
        ]
        .map(|(s, ns)| s as i128 * 1_000_000_000 + ns as i128)
    }

    /// Which of the modification and change times a call moves.
    fn moves(&mut self, step: &str, name: &str, call: impl FnOnce(&Self)) {
        let before = self.times(name);
        // Longer than the tick of file times.
        thread::sleep(Duration::from_millis(15));
        call(self);
        let after = self.times(name);
        let moved = format!(
            "mtime {} ctime {}",
            after[1] > before[1],
            after[2] > before[2]
        );
        self.value(&format!("{step} moves"), moved);
    }
}

fn write_all(file: &OwnedFd, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let n = io::write(file, bytes).expect("write");
        bytes = &bytes[n..];
    }
}

/// From the start. Long content is cut down to its length and a sum.
fn read_all(file: &OwnedFd) -> io::Result<String> {
    let (mut bytes, mut chunk) = (Vec::new(), vec![0; 65536]);
    loop {
        let n = io::pread(file, &mut chunk[..], bytes.len() as u64)?;
        if n == 0 {
            break;
        }
        bytes.extend_from_slice(&chunk[..n]);
    }
    if bytes.len() > 100 {
        let sum = bytes.iter().fold(0u64, |sum, b| {
            sum.wrapping_mul(31).wrapping_add(u64::from(*b))
        });
        return Ok(format!("{} bytes, sum {sum:x}", bytes.len()));
    }
    Ok(bytes.escape_ascii().to_string())
}

/// Names from the descriptor's position on, without `.` and `..`.
fn list(dir: &OwnedFd) -> io::Result<Vec<String>> {
    let mut buffer = [MaybeUninit::uninit(); 2048];
    let mut entries = fs::RawDir::new(dir, &mut buffer);
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    Ok(names)
}

/// Calls a function as another user, in a thread whose credentials alone are changed.
pub fn as_user<T: Send>(uid: u32, gid: u32, groups: &[u32], call: impl FnOnce() -> T + Send) -> T {
    let groups: Vec<Gid> = groups.iter().map(|g| Gid::from_raw(*g)).collect();
    let user = move || {
        set_thread_groups(&groups).expect("setgroups");
        set_thread_gid(Gid::from_raw(gid)).expect("setgid");
        let uid = Uid::from_raw(uid);
        set_thread_res_uid(uid, uid, uid).expect("setresuid");
        call()
    };
    thread::scope(|scope| scope.spawn(user).join().expect("the other user's thread"))
}

fn as_nobody<T: Send>(call: impl FnOnce() -> T + Send) -> T {
    as_user(NOBODY, NOBODY, &[], call)
}

type Play = fn(&mut Scene);

const SCENES: &[(&str, Play)] = &[
    ("open", open_flags),
    ("append", append),
    ("tmpfile", tmpfile),
    ("rename", rename),
    ("mknod", mknod),
    ("symlink", symlink),
    ("link", link),
    ("names", names),
    ("setuid", setuid_clearing),
    ("permission", permission),
    ("sticky", sticky),
    ("umask", umask_and_acls),
    ("group", groups),
    ("xattr", xattrs),
    ("fallocate", fallocate),
    ("append-only", append_only),
    ("holes", holes),
    ("copy", copy_range),
    ("statx", statx),
    ("locks", locks),
    ("sync", sync),
    ("statfs", statfs),
    ("readdir", readdir),
    ("mmap", mmap),
    ("direct", direct),
    ("direct alone", direct_alone),
    ("direct and others", direct_and_others),
    ("direct owners", direct_owners),
    ("unlinked", unlinked),
    ("removed", removed_directory),
    ("at removed", at_removed),
    ("executed", executed),
    ("utimens", utimens),
    ("truncate", truncate),
    ("reopen", reopen),
    ("times", times),
    ("rw", read_and_write),
    ("access", access),
];

/// Plays all scenes below the directory.
pub fn play(dir: &Path, _: &str) -> String {
    rustix::process::umask(Mode::from(0o022));
    let mut report = String::new();
    for (name, scene) in SCENES {
        let dir = dir.join(name);
        fs::mkdir(&dir, Mode::from(0o755)).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        let mut scene_report = String::new();
        let played = panic::catch_unwind(AssertUnwindSafe(|| {
            scene(&mut Scene {
                name,
                dir,
                report: &mut scene_report,
            });
        }));
        report += &scene_report;
        // A step that nothing can do without failed; the other scenes are played all the same.
        let end = if played.is_ok() {
            "to its end"
        } else {
            "stopped by a panic"
        };
        report += &format!("{name} scene played: {end}\n");
    }
    report
}

fn open_flags(s: &mut Scene) {
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

/// Calls a function as nobody in a new directory of theirs.
fn as_nobody_in<T: Send>(s: &Scene, call: impl FnOnce(&Scene) -> T + Send) -> T {
    let dir = s.at("nobody's");
    fs::mkdir(&dir, Mode::from(0o755)).unwrap();
    fs::chown(
        &dir,
        Some(Uid::from_raw(NOBODY)),
        Some(Gid::from_raw(NOBODY)),
    )
    .unwrap();
    as_nobody(|| {
        call(&Scene {
            name: s.name,
            dir,
            report: &mut String::new(),
        })
    })
}

fn append(s: &mut Scene) {
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

fn tmpfile(s: &mut Scene) {
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

fn rename(s: &mut Scene) {
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

fn mknod(s: &mut Scene) {
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

fn symlink(s: &mut Scene) {
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

fn link(s: &mut Scene) {
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

fn names(s: &mut Scene) {
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

fn setuid_clearing(s: &mut Scene) {
    let fresh = |s: &Scene, mode| {
        let file = s.file("file", "content");
        fs::fchown(
            &file,
            Some(Uid::from_raw(NOBODY)),
            Some(Gid::from_raw(NOBODY)),
        )
        .unwrap();
        s.chmod("file", mode).unwrap();
        // No capability outlives another user's write either.
        let capability = b"\x01\0\0\x02\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        fs::setxattr(
            s.at("file"),
            "security.capability",
            capability,
            XattrFlags::empty(),
        )
        .unwrap();
    };
    let look = |s: &mut Scene, step: &str| {
        s.note(step, s.who("file"));
        let mut value = [0; 64];
        let capability = fs::getxattr(s.at("file"), "security.capability", &mut value[..]);
        s.note(&format!("{step} (capability)"), capability);
    };
    for mode in [0o6777, 0o6755, 0o2767, 0o4666, 0o2666] {
        let path = s.at("file");
        let step = |what: &str| format!("{what} {mode:o}");
        fresh(s, mode);
        look(s, &step("before"));
        let write = |path: &Path| {
            fs::open(path, OFlags::WRONLY, Mode::empty()).and_then(|f| io::write(&f, b"x"))
        };
        s.note(&step("write call"), as_nobody(|| write(&path)));
        look(s, &step("write as owner"));
        fresh(s, mode);
        s.note(
            &step("other's write call"),
            as_user(1000, 1000, &[], || write(&path)),
        );
        look(s, &step("write as other"));
        fresh(s, mode);
        write(&path).unwrap();
        look(s, &step("write as root"));
        fresh(s, mode);
        s.done(
            &step("truncate call"),
            as_nobody(|| {
                fs::open(&path, OFlags::WRONLY, Mode::empty()).and_then(|f| fs::ftruncate(&f, 3))
            }),
        );
        look(s, &step("truncate as owner"));
        fresh(s, mode);
        s.done(
            &step("open truncating call"),
            as_nobody(|| fs::open(&path, OFlags::WRONLY | OFlags::TRUNC, Mode::empty())),
        );
        look(s, &step("open truncating"));
        fresh(s, mode);
        s.done(
            &step("chown call"),
            as_nobody(|| fs::chown(&path, None, Some(Gid::from_raw(NOBODY)))),
        );
        look(s, &step("chown as owner"));
        fresh(s, mode);
        s.done(
            &step("root's chown call"),
            fs::chown(&path, Some(Uid::from_raw(1)), None),
        );
        look(s, &step("chown as root"));
        fresh(s, mode);
        s.done(
            &step("fallocate call"),
            as_nobody(|| {
                fs::open(&path, OFlags::WRONLY, Mode::empty())
                    .and_then(|f| fs::fallocate(&f, FallocateFlags::empty(), 0, 100))
            }),
        );
        look(s, &step("fallocate"));
        let keep = FallocateFlags::KEEP_SIZE;
        for (name, flags) in [
            ("keep", keep),
            ("punch", FallocateFlags::PUNCH_HOLE | keep),
            ("zero", FallocateFlags::ZERO_RANGE),
        ] {
            fresh(s, mode);
            let done = as_nobody(|| {
                fs::open(&path, OFlags::WRONLY, Mode::empty())
                    .and_then(|f| fs::fallocate(&f, flags, 0, 3))
            });
            s.done(&step(&format!("fallocate {name} call")), done);
            match done {
                Ok(()) => look(s, &step(&format!("fallocate {name}"))),
                // FUSE takes capabilities before it asks whether the host can do it.
                Err(_) => s.note(&step(&format!("refused fallocate {name}")), s.who("file")),
            }
        }
        fresh(s, mode);
        s.done(
            &step("chmod call"),
            as_user(NOBODY, NOBODY, &[], || {
                fs::chmod(&path, Mode::from_raw_mode(mode))
            }),
        );
        look(s, &step("chmod as owner"));
    }
    // The owner is not in the file's group.
    fresh(s, 0o755);
    fs::chown(s.at("file"), None, Some(Gid::from_raw(5))).unwrap();
    let path = s.at("file");
    s.done(
        "setgid of a strange group",
        as_nobody(|| fs::chmod(&path, Mode::from_raw_mode(0o2755))),
    );
    look(s, "strange group");
    s.done(
        "setgid of a supplementary group",
        as_user(NOBODY, NOBODY, &[5], || {
            fs::chmod(&path, Mode::from_raw_mode(0o2755))
        }),
    );
    look(s, "supplementary group");
}

fn permission(s: &mut Scene) {
    s.file("secret", "secret");
    s.chmod("secret", 0o600).unwrap();
    s.file("readable", "x");
    fs::mkdir(s.at("closed"), Mode::from(0o700)).unwrap();
    s.file("closed/file", "x");
    fs::mkdir(s.at("passable"), Mode::from(0o711)).unwrap();
    s.file("passable/file", "x");
    let open = |path: PathBuf, flags| as_nobody(move || fs::open(path, flags, Mode::empty()));
    s.done("read secret", open(s.at("secret"), OFlags::RDONLY));
    s.done("write readable", open(s.at("readable"), OFlags::WRONLY));
    s.done(
        "truncate readable",
        open(s.at("readable"), OFlags::RDONLY | OFlags::TRUNC),
    );
    s.done(
        "noatime of another's",
        open(s.at("readable"), OFlags::RDONLY | OFlags::NOATIME),
    );
    s.done("into closed", open(s.at("closed/file"), OFlags::RDONLY));
    s.done("list closed", open(s.at("closed"), OFlags::RDONLY));
    s.done("into passable", open(s.at("passable/file"), OFlags::RDONLY));
    s.done("list passable", open(s.at("passable"), OFlags::RDONLY));
    let path = |name: &str| s.at(name);
    let (a, b) = (path("readable"), path("new"));
    let results = as_nobody(|| {
        [
            (
                "create",
                fs::open(&b, OFlags::CREATE | OFlags::WRONLY, Mode::from(0o644)).map(drop),
            ),
            ("mkdir", fs::mkdir(&b, Mode::from(0o755))),
            ("symlink", fs::symlink("x", &b)),
            ("link", fs::link(&a, &b)),
            ("unlink", fs::unlink(&a)),
            ("rename", fs::rename(&a, &b)),
            ("chmod", fs::chmod(&a, Mode::from(0o777))),
            ("chown", fs::chown(&a, Some(Uid::from_raw(NOBODY)), None)),
            ("utimens", fs::utimensat(CWD, &a, &now(), AtFlags::empty())),
            (
                "xattr",
                fs::setxattr(&a, "user.x", b"y", XattrFlags::empty()),
            ),
            (
                "truncate",
                fs::open(&a, OFlags::RDONLY, Mode::empty()).and_then(|f| fs::ftruncate(f, 0)),
            ),
        ]
    });
    results
        .into_iter()
        .for_each(|(step, result)| s.done(step, result));
    // A group that only the supplementary list has.
    s.chmod("secret", 0o640).unwrap();
    fs::chown(s.at("secret"), None, Some(Gid::from_raw(77))).unwrap();
    let secret = s.at("secret");
    let read = || fs::open(&secret, OFlags::RDONLY, Mode::empty());
    s.done("without the group", as_user(NOBODY, NOBODY, &[78], read));
    s.done("with the group", as_user(NOBODY, NOBODY, &[78, 77], read));
}

fn now() -> Timestamps {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    Timestamps {
        last_access: now,
        last_modification: now,
    }
}

fn sticky(s: &mut Scene) {
    fs::mkdir(s.at("dir"), Mode::from(0o777)).unwrap();
    s.chmod("dir", 0o1777).unwrap();
    s.file("dir/root's", "");
    s.file("dir/nobody's", "");
    let owner = Some(Uid::from_raw(NOBODY));
    fs::chown(s.at("dir/nobody's"), owner, None).unwrap();
    let (theirs, own) = (s.at("dir/root's"), s.at("dir/nobody's"));
    s.done(
        "rename another's",
        as_nobody(|| fs::rename(&theirs, theirs.with_extension("x"))),
    );
    s.done("unlink another's", as_nobody(|| fs::unlink(&theirs)));
    s.done("unlink own", as_nobody(|| fs::unlink(&own)));
}

/// A POSIX ACL as the kernel keeps it: version 2, then tag, permissions and id of each entry.
/// An access control list as its extended attribute has it, of tags, permissions and ids.
pub fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

fn umask_and_acls(s: &mut Scene) {
    let create = |s: &Scene, name: &str, mode: u32| {
        let flags = OFlags::CREATE | OFlags::WRONLY;
        fs::open(s.at(name), flags, Mode::from_raw_mode(mode)).unwrap();
        s.who(name)
    };
    for mask in [0, 0o027, 0o777] {
        rustix::process::umask(Mode::from(mask));
        s.note(
            &format!("file under {mask:o}"),
            create(s, &format!("f{mask:o}"), 0o666),
        );
        let dir = format!("d{mask:o}");
        fs::mkdir(s.at(&dir), Mode::from(0o777)).unwrap();
        s.note(&format!("directory under {mask:o}"), s.who(&dir));
        let fifo = format!("p{mask:o}");
        fs::mknodat(CWD, s.at(&fifo), FileType::Fifo, Mode::from(0o666), 0).unwrap();
        s.note(&format!("fifo under {mask:o}"), s.who(&fifo));
    }
    rustix::process::umask(Mode::from(0o077));
    const NONE: u32 = u32::MAX;
    let (user, group) = ((1, 7, NONE), (4, 5, NONE));
    let default = acl(&[
        user,
        (2, 6, NOBODY),
        group,
        (8, 4, 77),
        (0x10, 7, NONE),
        (0x20, 1, NONE),
    ]);
    fs::mkdir(s.at("acl"), Mode::from(0o755)).unwrap();
    s.chmod("acl", 0o755).unwrap();
    let set = |s: &Scene, name: &str, which: &str, value: &[u8]| {
        fs::setxattr(
            s.at(name),
            format!("system.posix_acl_{which}"),
            value,
            XattrFlags::empty(),
        )
    };
    let get = |s: &Scene, name: &str, which: &str| {
        let mut value = [0; 256];
        fs::getxattr(
            s.at(name),
            format!("system.posix_acl_{which}"),
            &mut value[..],
        )
        .map(|n| value[..n].to_vec())
    };
    s.done("set default", set(s, "acl", "default", &default));
    s.note("inherited mode", create(s, "acl/file", 0o666));
    s.note("inherited", get(s, "acl/file", "access"));
    fs::mkdir(s.at("acl/sub"), Mode::from(0o777)).unwrap();
    s.note("directory", s.who("acl/sub"));
    s.note("directory's access", get(s, "acl/sub", "access"));
    s.note("directory's default", get(s, "acl/sub", "default"));
    rustix::process::umask(Mode::from(0o022));
    s.file("file", "x");
    s.chmod("file", 0o600).unwrap();
    let access = acl(&[
        user,
        (2, 6, NOBODY),
        (4, 0, NONE),
        (0x10, 6, NONE),
        (0x20, 0, NONE),
    ]);
    let path = s.at("file");
    let open = |flags| as_nobody(|| fs::open(&path, flags, Mode::empty()));
    s.done("before", open(OFlags::RDWR));
    s.done("set access", set(s, "file", "access", &access));
    s.done("after", open(OFlags::RDWR));
    s.note("mode is the mask", s.who("file"));
    s.chmod("file", 0o640).unwrap();
    s.done("mask read only, write", open(OFlags::RDWR));
    s.done("mask read only, read", open(OFlags::RDONLY));
    s.note("after chmod", get(s, "file", "access"));
    s.done("malformed", set(s, "file", "access", b"\x02\0\0\0xyz"));
    s.done("default of a file", set(s, "file", "default", &default));
    let minimal = acl(&[(1, 6, NONE), (4, 4, NONE), (0x20, 0, NONE)]);
    s.done("minimal", set(s, "file", "access", &minimal));
    s.note("minimal mode", s.who("file"));
    s.note("minimal is none", get(s, "file", "access"));
    s.done(
        "remove default",
        fs::removexattr(s.at("acl"), "system.posix_acl_default"),
    );
    s.note("without default", create(s, "acl/file2", 0o666));
    let set_as_nobody = as_nobody(|| {
        fs::setxattr(
            &path,
            "system.posix_acl_access",
            &access,
            XattrFlags::empty(),
        )
    });
    s.done("set another's", set_as_nobody);
    // The setgid bit goes when the owner, not in the group, sets an ACL.
    fs::chown(
        s.at("file"),
        Some(Uid::from_raw(NOBODY)),
        Some(Gid::from_raw(5)),
    )
    .unwrap();
    s.chmod("file", 0o2750).unwrap();
    let own = as_nobody(|| {
        fs::setxattr(
            &path,
            "system.posix_acl_access",
            &access,
            XattrFlags::empty(),
        )
    });
    s.done("set own", own);
    s.note("setgid after", s.who("file"));
}

fn groups(s: &mut Scene) {
    fs::mkdir(s.at("dir"), Mode::from(0o777)).unwrap();
    fs::chown(s.at("dir"), None, Some(Gid::from_raw(77))).unwrap();
    s.chmod("dir", 0o2777).unwrap();
    fs::mkdir(s.at("plain"), Mode::from(0o777)).unwrap();
    s.chmod("plain", 0o777).unwrap();
    for dir in ["dir", "plain"] {
        for (who, groups) in [("member", &[77, 78][..]), ("stranger", &[][..])] {
            let at = |name: &str| s.at(&format!("{dir}/{who}-{name}"));
            let (file, sub, fifo, link) = (at("file"), at("sub"), at("fifo"), at("link"));
            as_user(NOBODY, NOBODY, groups, || {
                let flags = OFlags::CREATE | OFlags::WRONLY;
                fs::open(&file, flags, Mode::from_raw_mode(0o2775)).unwrap();
                fs::mkdir(&sub, Mode::from(0o775)).unwrap();
                fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o664), 0).unwrap();
                fs::symlink("x", &link).unwrap();
            });
            for kind in ["file", "sub", "fifo", "link"] {
                s.note(
                    &format!("{dir} {who} {kind}"),
                    s.who(&format!("{dir}/{who}-{kind}")),
                );
            }
            let path = s.at(&format!("{dir}/{who}-file"));
            let given = as_user(NOBODY, NOBODY, groups, || {
                fs::chown(&path, None, Some(Gid::from_raw(78)))
            });
            s.done(&format!("{dir} {who} gives to group 78"), given);
        }
    }
    // Only a supplementary group may write here.
    fs::mkdir(s.at("shared"), Mode::from(0o770)).unwrap();
    fs::chown(s.at("shared"), None, Some(Gid::from_raw(78))).unwrap();
    s.chmod("shared", 0o770).unwrap();
    let path = s.at("shared/file");
    let create = || fs::open(&path, OFlags::CREATE | OFlags::WRONLY, Mode::from(0o644));
    s.done(
        "stranger creates in shared",
        as_user(NOBODY, NOBODY, &[77], create),
    );
    s.done(
        "member creates in shared",
        as_user(NOBODY, NOBODY, &[77, 78], create),
    );
    s.note("member's file", s.who("shared/file"));
    let link = s.at("shared/link");
    let (from, to) = (s.at("shared/file"), s.at("shared/moved"));
    s.done(
        "member links",
        as_user(NOBODY, NOBODY, &[78], || fs::symlink("x", &link)),
    );
    s.done(
        "member renames",
        as_user(NOBODY, NOBODY, &[78], || fs::rename(&from, &to)),
    );
    s.done(
        "member removes",
        as_user(NOBODY, NOBODY, &[78], || fs::unlink(&to)),
    );
}

fn xattrs(s: &mut Scene) {
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
fn append_only(s: &mut Scene) {
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

fn fallocate(s: &mut Scene) {
    let block = 65536;
    let all = FallocateFlags::empty();
    let keep = FallocateFlags::KEEP_SIZE;
    for (name, flags, offset, length) in [
        ("plain", all, 0, 3 * block),
        ("keep size", keep, block, 5 * block),
        ("punch", FallocateFlags::PUNCH_HOLE | keep, 1000, block),
        (
            "punch past the end",
            FallocateFlags::PUNCH_HOLE | keep,
            block,
            9 * block,
        ),
        ("punch without keep", FallocateFlags::PUNCH_HOLE, 0, block),
        ("zero", FallocateFlags::ZERO_RANGE, 500, 3 * block),
        (
            "zero keep",
            FallocateFlags::ZERO_RANGE | keep,
            500,
            3 * block,
        ),
        ("collapse", FallocateFlags::COLLAPSE_RANGE, 0, block),
        ("insert", FallocateFlags::INSERT_RANGE, 0, block),
        ("unshare", FallocateFlags::UNSHARE_RANGE, 0, block),
        ("nothing", all, 0, 0),
    ] {
        let file = s.file(name, vec![b'a'; 2 * block as usize]);
        s.done(name, fs::fallocate(&file, flags, offset, length));
        s.note(&format!("{name} size"), s.size(name));
        s.note(&format!("{name} content"), read_all(&file));
    }
    let file = s.file("large", "");
    s.done("more than there is", fs::fallocate(&file, all, 0, 1 << 40));
    // What a file system may have allocated of it would be missing in the other scenes.
    drop(file);
    fs::unlink(s.at("large")).unwrap();
    let file = s.open("plain", OFlags::RDONLY).unwrap();
    s.done("read-only", fs::fallocate(&file, all, 0, block));
    let file = s.file("space", "");
    fs::fallocate(&file, all, 0, 16 * block).unwrap();
    fs::fsync(&file).unwrap();
    let blocks = fs::stat(s.at("space")).map(|st| st.st_blocks * 512 >= 16 * block as i64);
    s.note("has its blocks", blocks);
    fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | keep, 0, 16 * block).unwrap();
    fs::fsync(&file).unwrap();
    s.note(
        "gave them back",
        fs::stat(s.at("space")).map(|st| st.st_blocks * 512 < block as i64),
    );
}

fn holes(s: &mut Scene) {
    const M: u64 = 1 << 20;
    let file = s.file("file", "");
    fs::ftruncate(&file, 8 * M).unwrap();
    io::pwrite(&file, &[1; 65536], 2 * M).unwrap();
    io::pwrite(&file, &[1; 65536], 5 * M).unwrap();
    fs::fsync(&file).unwrap();
    for offset in [
        0,
        M,
        2 * M,
        2 * M + 1,
        2 * M + 65536,
        5 * M,
        6 * M,
        8 * M - 1,
        8 * M,
        9 * M,
    ] {
        s.note(
            &format!("data from {offset}"),
            fs::seek(&file, SeekFrom::Data(offset)),
        );
        s.note(
            &format!("hole from {offset}"),
            fs::seek(&file, SeekFrom::Hole(offset)),
        );
    }
    s.note("end", fs::seek(&file, SeekFrom::End(-1)));
    s.note(
        "before the start",
        fs::seek(&file, SeekFrom::End(-(9 * M as i64))),
    );
    s.note("position stays", fs::seek(&file, SeekFrom::Current(0)));
    let empty = s.file("empty", "");
    s.note("data of empty", fs::seek(&empty, SeekFrom::Data(0)));
    s.note("hole of empty", fs::seek(&empty, SeekFrom::Hole(0)));
    fs::ftruncate(&empty, M).unwrap();
    s.note("data of hole", fs::seek(&empty, SeekFrom::Data(0)));
    s.note(
        "blocks",
        fs::stat(s.at("file")).map(|st| (st.st_blocks * 512) as u64 <= 512 << 10),
    );
}

fn copy_range(s: &mut Scene) {
    let from = s.file(
        "from",
        (0..300_000u32).map(|n| (n % 251) as u8).collect::<Vec<_>>(),
    );
    let to = s.file("to", "");
    let (mut a, mut b) = (1000, 5);
    // A kernel may copy less than asked for.
    let mut copied = 0;
    while copied < 250_000 {
        match fs::copy_file_range(&from, Some(&mut a), &to, Some(&mut b), 250_000 - copied) {
            Ok(n) if n > 0 => copied += n,
            other => return s.note("copy", other),
        }
    }
    s.value("copied", format!("{copied} {a} {b}"));
    s.note("content", s.content("to"));
    s.note(
        "at the end",
        fs::copy_file_range(&from, Some(&mut 300_000), &to, None, 10),
    );
    let overlap = fs::copy_file_range(&from, Some(&mut 0), &from, Some(&mut 10), 100);
    s.note("overlap", overlap);
    let apart = fs::copy_file_range(&from, Some(&mut 0), &from, Some(&mut 200_000), 100);
    s.note("same file", apart);
    s.note("content of it", s.content("from"));
    let append = s.open("to", OFlags::WRONLY | OFlags::APPEND).unwrap();
    s.note(
        "to append",
        fs::copy_file_range(&from, Some(&mut 0), &append, None, 10),
    );
    let read_only = s.open("to", OFlags::RDONLY).unwrap();
    s.note(
        "to read-only",
        fs::copy_file_range(&from, Some(&mut 0), &read_only, None, 10),
    );
    let dir = s.open(".", OFlags::RDONLY).unwrap();
    s.note(
        "from directory",
        fs::copy_file_range(&dir, None, &to, None, 10),
    );
    let std_copy = std::fs::copy(s.at("from"), s.at("copy"));
    s.value("whole", std_copy.is_ok());
    s.note("whole content", s.content("copy"));
}

fn statx(s: &mut Scene) {
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

/// Forks: the child calls a function and ends with what it gives as exit status.
fn forked(call: impl FnOnce() -> u8) -> u8 {
    // SAFETY: the child calls plain system calls only and leaves by _exit; no other thread of
    // this program is at work that it would need.
    match unsafe { libc::fork() } {
        0 => {
            let code = call();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(code)) }
        }
        -1 => panic!("fork"),
        child => {
            let child = rustix::process::Pid::from_raw(child);
            let status = rustix::process::waitpid(child, rustix::process::WaitOptions::empty());
            let status = status.expect("wait").expect("a status").1;
            status.exit_status().expect("an exit status") as u8
        }
    }
}

/// A byte-range lock by fcntl: POSIX or, with `open`, of the open file description.
fn range_lock(file: &OwnedFd, kind: i32, start: i64, len: i64, open: bool) -> io::Result<()> {
    let kind = kind as i16;
    // SAFETY: flock is plain data, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_whence, lock.l_start, lock.l_len) = (kind, 0, start, len);
    let command = if open {
        libc::F_OFD_SETLK
    } else {
        libc::F_SETLK
    };
    // SAFETY: the descriptor is open and the lock outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &lock) };
    if result == 0 {
        Ok(())
    } else {
        Err(last_error())
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).expect("an errno")
}

/// Who holds what keeps this range from a write lock: type, start, length.
fn holder(file: &OwnedFd, start: i64, len: i64) -> io::Result<(i16, i64, i64, bool)> {
    // SAFETY: flock is plain data, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_start, lock.l_len) = (libc::F_WRLCK as i16, start, len);
    // SAFETY: the descriptor is open and the lock outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &mut lock) };
    // SAFETY: has no preconditions.
    let parent = unsafe { libc::getppid() };
    let from_parent = lock.l_pid == parent;
    if result == 0 {
        Ok((lock.l_type, lock.l_start, lock.l_len, from_parent))
    } else {
        Err(last_error())
    }
}

fn errno(result: io::Result<()>) -> u8 {
    result.map_or_else(|e| e.raw_os_error() as u8, |()| 0)
}

fn locks(s: &mut Scene) {
    let file = s.file("file", "content");
    let path = s.at("file");
    let other = || fs::open(&path, OFlags::RDWR, Mode::empty()).unwrap();
    let fresh = other();
    use FlockOperation as F;
    s.done("flock", fs::flock(&file, F::NonBlockingLockExclusive));
    s.done(
        "flock by another descriptor",
        fs::flock(&fresh, F::NonBlockingLockShared),
    );
    let child = other();
    let code = forked(|| errno(fs::flock(&child, F::NonBlockingLockExclusive)));
    s.value("flock by another process", code);
    s.done(
        "flock down to shared",
        fs::flock(&file, F::NonBlockingLockShared),
    );
    s.done(
        "shared by another",
        fs::flock(&fresh, F::NonBlockingLockShared),
    );
    s.done(
        "up to exclusive",
        fs::flock(&file, F::NonBlockingLockExclusive),
    );
    s.done("unlock", fs::flock(&fresh, F::NonBlockingUnlock));
    s.done("up then", fs::flock(&file, F::NonBlockingLockExclusive));
    let copy = io::dup(&file).unwrap();
    drop(file);
    let code = forked(|| errno(fs::flock(&child, F::NonBlockingLockExclusive)));
    s.value("held by a duplicate", code);
    drop(copy);
    // A close is done before the server is told of it, so the lock may go a little later.
    let mut code = 1;
    for _ in 0..500 {
        code = forked(|| errno(fs::flock(&child, F::NonBlockingLockExclusive)));
        if code == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    s.value("gone with the last", code);
    s.done(
        "unlock the child's",
        fs::flock(&child, F::NonBlockingUnlock),
    );

    let (read, write, none) = (libc::F_RDLCK, libc::F_WRLCK, libc::F_UNLCK);
    for open in [false, true] {
        let kind = if open { "open" } else { "posix" };
        let step = |what: &str| format!("{kind} {what}");
        let (file, same) = (other(), other());
        s.done(&step("write 0+10"), range_lock(&file, write, 0, 10, open));
        s.done(&step("read 20+10"), range_lock(&file, read, 20, 10, open));
        s.done(
            &step("other descriptor"),
            range_lock(&same, write, 5, 1, open),
        );
        for (what, lock, start, len) in [
            ("child writes 5+1", write, 5, 1),
            ("child writes 10+10", write, 10, 10),
            ("child reads 20+10", read, 20, 10),
            ("child writes 25+0", write, 25, 0),
        ] {
            let code = forked(|| {
                let own = fs::open(s.at("file"), OFlags::RDWR, Mode::empty()).unwrap();
                errno(range_lock(&own, lock, start, len, open))
            });
            s.value(&step(what), code);
        }
        let code = forked(|| {
            let own = fs::open(s.at("file"), OFlags::RDWR, Mode::empty()).unwrap();
            match holder(&own, 0, 100) {
                Ok((kind, start, len, parent)) => {
                    u8::from(i32::from(kind) == write && start == 0 && len == 10)
                        + 2 * u8::from(parent)
                }
                Err(e) => e.raw_os_error() as u8,
            }
        });
        s.value(&step("child asks who"), code);
        s.done(&step("split"), range_lock(&file, none, 3, 3, open));
        let code = forked(|| {
            let own = fs::open(s.at("file"), OFlags::RDWR, Mode::empty()).unwrap();
            errno(range_lock(&own, write, 3, 3, open)) + errno(range_lock(&own, write, 2, 1, open))
        });
        s.value(&step("child takes the middle"), code);
        drop(same);
        let code = forked(|| {
            let own = fs::open(s.at("file"), OFlags::RDWR, Mode::empty()).unwrap();
            errno(range_lock(&own, write, 0, 1, open))
        });
        s.value(&step("after another close"), code);
        drop(file);
        let code = forked(|| {
            let own = fs::open(s.at("file"), OFlags::RDWR, Mode::empty()).unwrap();
            errno(range_lock(&own, write, 0, 100, open))
        });
        s.value(&step("after all closed"), code);
    }
    let read_only = s.open("file", OFlags::RDONLY).unwrap();
    s.done(
        "write lock of read-only",
        range_lock(&read_only, write, 0, 1, false),
    );
    s.done("negative", range_lock(&read_only, read, -1, 1, false));
}

fn sync(s: &mut Scene) {
    let file = s.file("file", "content");
    s.done("fsync", fs::fsync(&file));
    s.done("fdatasync", fs::fdatasync(&file));
    let dir = s.open(".", OFlags::RDONLY).unwrap();
    s.done("directory", fs::fsync(&dir));
    s.done("directory's data", fs::fdatasync(&dir));
    s.done(
        "read-only",
        fs::fsync(s.open("file", OFlags::RDONLY).unwrap()),
    );
    s.done("path", fs::fsync(s.open("file", OFlags::PATH).unwrap()));
    s.done("file system", fs::syncfs(&file));
    fs::unlink(s.at("file")).unwrap();
    write_all(&file, b"more");
    s.done("unlinked", fs::fsync(&file));
    // SAFETY: the descriptor is open.
    let ranged =
        unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    s.value("range", ranged);
}

fn statfs(s: &mut Scene) {
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

fn readdir(s: &mut Scene) {
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

    // Every position that was handed out leads on to what came after it.
    fs::seek(&dir, SeekFrom::Start(0)).unwrap();
    let mut order = Vec::new();
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut entries = fs::RawDir::new(&dir, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry.unwrap();
        order.push((entry.file_name().to_owned(), entry.next_entry_cookie()));
    }
    let mut right = 0;
    for index in (0..order.len() - 1).step_by(97) {
        fs::seek(&dir, SeekFrom::Start(order[index].1)).unwrap();
        let mut buffer = [MaybeUninit::uninit(); 1024];
        let mut entries = fs::RawDir::new(&dir, &mut buffer);
        let next = entries.next().unwrap().unwrap().file_name().to_owned();
        right += usize::from(next == order[index + 1].0);
    }
    s.value("positions lead on", right);

    // Removed while being read: no other name is lost or seen twice.
    fs::seek(&dir, SeekFrom::Start(0)).unwrap();
    let mut seen = Vec::new();
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut entries = fs::RawDir::new(&dir, &mut buffer);
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
    let fresh = s.open("dir", OFlags::RDONLY).unwrap();
    s.done("rmdir full", fs::rmdir(s.at("dir")));
    let new = s.names("dir").unwrap();
    new.iter()
        .for_each(|n| fs::unlink(s.at(&format!("dir/{n}"))).unwrap());
    s.note("seen by an open one", list(&fresh));
    s.file("dir/late", "");
    fs::seek(&fresh, SeekFrom::Start(0)).unwrap();
    s.note("late one", list(&fresh));

    // Types come with the names, inode numbers are those of stat.
    fs::mkdir(s.at("kinds"), Mode::from(0o755)).unwrap();
    s.file("kinds/file", "");
    fs::mkdir(s.at("kinds/dir"), Mode::from(0o755)).unwrap();
    fs::symlink("x", s.at("kinds/link")).unwrap();
    fs::mknodat(
        CWD,
        s.at("kinds/fifo"),
        FileType::Fifo,
        Mode::from(0o644),
        0,
    )
    .unwrap();
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

fn mmap(s: &mut Scene) {
    const LENGTH: usize = 3 * 4096;
    let file = s.file("file", vec![b'a'; LENGTH - 100]);
    let map = |file: &OwnedFd, protection, flags| {
        // SAFETY: a new mapping at an address of the kernel's choice.
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), LENGTH, protection, flags, file, 0) }
    };
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let shared = match map(&file, both, MapFlags::SHARED) {
        Ok(pointer) => pointer.cast::<u8>(),
        Err(e) => return s.done("map", Err::<(), _>(e)),
    };
    // SAFETY: the mapping is LENGTH bytes, and the file reaches into its last page.
    let get = |offset: usize| unsafe { shared.add(offset).read_volatile() };
    // SAFETY: as above.
    let put = |offset: usize, byte: u8| unsafe { shared.add(offset).write_volatile(byte) };
    s.value("read", get(5000));
    s.value("past the end", get(LENGTH - 1));
    io::pwrite(&file, b"written", 5000).unwrap();
    s.value("written by the file", get(5000));
    put(100, b'M');
    let mut byte = [0];
    io::pread(&file, &mut byte[..], 100).unwrap();
    s.value("read by the file", byte[0]);
    // SAFETY: the range is mapped.
    let sync = unsafe { rustix::mm::msync(shared.cast(), LENGTH, rustix::mm::MsyncFlags::SYNC) };
    s.done("sync", sync);
    put(200, b'N');
    let other = s.open("file", OFlags::RDONLY).unwrap();
    io::pread(&other, &mut byte[..], 200).unwrap();
    s.value("read by another descriptor", byte[0]);
    s.value(
        "read-only, shared, writable",
        match map(&other, both, MapFlags::SHARED) {
            Ok(_) => "mapped".to_owned(),
            Err(e) => e.to_string(),
        },
    );
    let private = map(&other, both, MapFlags::PRIVATE).unwrap().cast::<u8>();
    // SAFETY: the mapping is LENGTH bytes, backed by the file.
    unsafe { private.write_volatile(b'P') };
    io::pread(&other, &mut byte[..], 0).unwrap();
    s.value("private stays private", byte[0]);
    put(300, b'O');
    drop((file, other));
    // SAFETY: mapped above and not used again.
    unsafe {
        rustix::mm::munmap(shared.cast(), LENGTH).unwrap();
        rustix::mm::munmap(private.cast(), LENGTH).unwrap();
    }
    s.note("after unmapping", s.content("file"));
    s.note("size", s.size("file"));
}

/// A page-aligned buffer.
#[repr(align(4096))]
struct Aligned([u8; 16384]);

fn direct(s: &mut Scene) {
    let file = s.file("file", vec![b'a'; 100_000]);
    let direct = match s.open("file", OFlags::RDWR | OFlags::DIRECT) {
        Ok(direct) => direct,
        Err(e) => return s.done("open", Err::<(), _>(e)),
    };
    let mut buffer = Box::new(Aligned([0; 16384]));
    s.note("read", io::pread(&direct, &mut buffer.0[..], 4096));
    s.value("right", buffer.0.iter().all(|b| *b == b'a'));
    s.note(
        "read at the end",
        io::pread(&direct, &mut buffer.0[..], 98304),
    );
    s.note(
        "read past the end",
        io::pread(&direct, &mut buffer.0[..], 1 << 20),
    );
    buffer.0.fill(b'b');
    s.note("write", io::pwrite(&direct, &buffer.0[..], 8192));
    let mut bytes = [0; 4];
    io::pread(&file, &mut bytes[..], 8190).unwrap();
    s.value("buffered read sees it", bytes.escape_ascii());
    io::pwrite(&file, b"cccc", 8190).unwrap();
    io::pread(&direct, &mut buffer.0[..4096], 8192).unwrap();
    s.value(
        "direct read sees the buffered write",
        buffer.0[..4].escape_ascii(),
    );
    buffer.0.fill(b'd');
    s.note(
        "write past the end",
        io::pwrite(&direct, &buffer.0[..], 102_400),
    );
    s.note("size", s.size("file"));
    let append = s
        .open("file", OFlags::WRONLY | OFlags::DIRECT | OFlags::APPEND)
        .unwrap();
    fs::ftruncate(&file, 8192).unwrap();
    s.note("append", io::write(&append, &buffer.0[..4096]));
    s.note("content", s.content("file"));
}

/// With O_DIRECT from the first open on.
fn direct_alone(s: &mut Scene) {
    use OFlags as O;
    let mut page = Box::new(Aligned([b'a'; 16384]));
    let new = O::RDWR | O::CREATE | O::EXCL | O::DIRECT;
    let file = match s.open("file", new) {
        Ok(file) => file,
        Err(e) => return s.done("open", Err::<(), _>(e)),
    };
    let size = |file: &OwnedFd| fs::fstat(file).map(|st| st.st_size);
    s.note("write", io::write(&file, &page.0[..8192]));
    s.note("size", size(&file));
    s.note("size by name", s.size("file"));
    s.note("position", fs::seek(&file, SeekFrom::Current(0)));
    s.note("end", fs::seek(&file, SeekFrom::End(0)));
    s.note("data", fs::seek(&file, SeekFrom::Data(4096)));
    s.note("hole", fs::seek(&file, SeekFrom::Hole(0)));
    s.note("read at the end", io::read(&file, &mut page.0[..]));
    page.0.fill(b'b');
    s.note("write far", io::pwrite(&file, &page.0[..4096], 65536));
    s.note("size", size(&file));
    s.note("blocks", fs::fstat(&file).map(|st| st.st_blocks));
    s.done("truncate", fs::ftruncate(&file, 5000));
    s.note("size", size(&file));
    s.note("short read", io::pread(&file, &mut page.0[..8192], 4096));
    s.value("of it", page.0[..2].escape_ascii());
    s.done(
        "fallocate",
        fs::fallocate(&file, FallocateFlags::empty(), 0, 20_000),
    );
    s.note("size", size(&file));
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    s.done("punch", fs::fallocate(&file, hole, 0, 4096));
    s.note("read the hole", io::pread(&file, &mut page.0[..4096], 0));
    s.value("zeros", page.0[..4096].iter().all(|b| *b == 0));
    s.done("sync", fs::fsync(&file).and(fs::fdatasync(&file)));

    let append = s.open("file", O::WRONLY | O::APPEND | O::DIRECT).unwrap();
    fs::ftruncate(&file, 8192).unwrap();
    page.0.fill(b'c');
    s.note("append", io::write(&append, &page.0[..4096]));
    s.note("append at", io::pwrite(&append, &page.0[..4096], 0));
    s.note("size", size(&file));
    let sync = O::RDWR | O::SYNC | O::DIRECT;
    let synced = s.open("file", sync).unwrap();
    s.note("synced write", io::pwrite(&synced, &page.0[..4096], 4096));
    s.note(
        "append refused",
        io::write(
            s.open("file", O::RDONLY | O::DIRECT).unwrap(),
            &page.0[..4096],
        ),
    );
    let vectored = [
        io::IoSlice::new(&page.0[..4096]),
        io::IoSlice::new(&page.0[4096..8192]),
    ];
    s.note("vectored", io::pwritev(&synced, &vectored, 16384));

    // SAFETY: a new mapping.
    let map = |file: &OwnedFd, how| unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            8192,
            ProtFlags::READ | ProtFlags::WRITE,
            how,
            file,
            0,
        )
    };
    let shared = map(&file, MapFlags::SHARED).unwrap().cast::<u8>();
    // SAFETY: the mapping has 8192 bytes, backed by the file.
    unsafe { shared.add(100).write_volatile(b'm') };
    s.note("content with a mapping", s.content("file"));
    page.0.fill(b'd');
    io::pwrite(&file, &page.0[..4096], 4096).unwrap();
    // SAFETY: as above.
    s.value("the mapping sees", unsafe {
        shared.add(5000).read_volatile()
    });
    // SAFETY: mapped above and not used again.
    unsafe { rustix::mm::munmap(shared.cast(), 8192).unwrap() };

    s.done(
        "lock",
        fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive),
    );
    s.done(
        "flock",
        fs::flock(&file, FlockOperation::NonBlockingLockExclusive),
    );
    let other = s.open("file", O::RDWR).unwrap();
    s.done(
        "locked",
        fs::flock(&other, FlockOperation::NonBlockingLockShared),
    );
    s.done("rename", fs::rename(s.at("file"), s.at("renamed")));
    page.0.fill(b'e');
    s.note("write renamed", io::pwrite(&file, &page.0[..4096], 0));
    s.note("content", s.content("renamed"));
    fs::unlink(s.at("renamed")).unwrap();
    page.0.fill(b'f');
    s.note("write unlinked", io::pwrite(&file, &page.0[..4096], 20480));
    s.note(
        "links and size",
        fs::fstat(&file).map(|st| (st.st_nlink, st.st_size)),
    );
    s.note("read unlinked", read_all(&other));
    drop((file, append, synced, other));
    s.note("names", s.names("."));

    let unnamed = fs::open(&s.dir, O::TMPFILE | O::RDWR | O::DIRECT, Mode::from(0o644));
    if let Ok(unnamed) = unnamed {
        s.note("write unnamed", io::write(&unnamed, &page.0[..4096]));
        let name = format!("/proc/self/fd/{}", unnamed.as_raw_fd());
        let link = fs::linkat(CWD, name, CWD, s.at("named"), AtFlags::SYMLINK_FOLLOW);
        s.done("link unnamed", link);
        s.note("content of it", s.content("named"));
    }
    let cut = s.open("named", O::RDWR | O::CREATE | O::TRUNC | O::DIRECT);
    s.note("cut", cut.as_ref().map_err(|e| *e).and_then(size));
}

/// What is opened while a direct one is open, and after.
fn direct_and_others(s: &mut Scene) {
    use OFlags as O;
    let mut page = Box::new(Aligned([0; 16384]));
    s.file("file", vec![b'a'; 50_000]);
    s.note("cached", s.content("file"));
    let Ok(direct) = s.open("file", O::RDWR | O::DIRECT) else {
        return;
    };
    page.0.fill(b'b');
    s.note("direct write", io::pwrite(&direct, &page.0[..8192], 4096));
    s.note("content", s.content("file"));
    let other = s.open("file", O::RDWR).unwrap();
    s.note("unaligned", io::pwrite(&other, b"other", 4090));
    s.note("direct read", io::pread(&direct, &mut page.0[..4096], 0));
    s.value("of it", page.0[4088..4096].escape_ascii());
    s.done("truncate by name", cut_to(&s.at("file"), 30_000));
    s.note(
        "direct at the end",
        io::pread(&direct, &mut page.0[..], 28_672),
    );
    s.done(
        "create again",
        s.open("file", O::RDWR | O::CREATE | O::TRUNC),
    );
    s.note("size", fs::fstat(&direct).map(|st| st.st_size));
    s.note("other writes", io::pwrite(&other, b"after", 0));
    drop(direct);
    s.note("after the last direct one", s.content("file"));
    s.note("other reads", read_all(&other));
    // What was cached meanwhile is not what is there.
    page.0.fill(b'c');
    let again = s.open("file", O::WRONLY | O::DIRECT).unwrap();
    s.note("direct again", io::pwrite(&again, &page.0[..4096], 0));
    drop(again);
    s.note("content", s.content("file"));
    drop(other);
    for round in 0..5u8 {
        page.0.fill(round);
        let direct = s.open("file", O::WRONLY | O::DIRECT).unwrap();
        io::pwrite(&direct, &page.0[..4096], u64::from(round) * 4096).unwrap();
        drop(direct);
        s.note("content", s.content("file"));
    }
    // The flag comes and goes.
    let file = s.open("file", O::RDWR | O::DIRECT).unwrap();
    let flags = fs::fcntl_getfl(&file).unwrap();
    s.done("not direct", fs::fcntl_setfl(&file, flags - O::DIRECT));
    s.note("unaligned", io::pwrite(&file, b"unaligned", 3));
    s.done("direct", fs::fcntl_setfl(&file, flags));
    s.note("read", io::pread(&file, &mut page.0[..4096], 0));
    s.value("of it", page.0[..12].escape_ascii());
}

fn cut_to(path: &Path, size: u64) -> io::Result<()> {
    fs::ftruncate(fs::open(path, OFlags::WRONLY, Mode::empty())?, size)
}

/// Who writes decides what is left of a file's mode.
fn direct_owners(s: &mut Scene) {
    use OFlags as O;
    let page = Box::new(Aligned([b'x'; 16384]));
    s.file("file", vec![b'a'; 8192]);
    let write = |path: &Path| {
        let file = fs::open(path, O::WRONLY | O::DIRECT, Mode::empty())?;
        io::pwrite(&file, &page.0[..4096], 0)
    };
    let path = s.at("file");
    for mode in [0o6777, 0o4777, 0o2767, 0o0777] {
        s.chmod("file", mode).unwrap();
        s.note("written by root", write(&path));
        s.note("mode", s.who("file"));
        s.chmod("file", mode).unwrap();
        s.note("written by another", as_nobody(|| write(&path)));
        s.note("mode", s.who("file"));
    }
    // Set while it is open.
    let open = |path: &Path| fs::open(path, O::WRONLY | O::DIRECT, Mode::empty());
    let file = as_nobody(|| open(&path)).unwrap();
    s.chmod("file", 0o6777).unwrap();
    s.note("mode", s.who("file"));
    s.note(
        "written by another",
        as_nobody(|| io::pwrite(&file, &page.0[..4096], 0)),
    );
    s.note("mode", s.who("file"));
    s.chmod("file", 0o600).unwrap();
    s.note("refused", as_nobody(|| open(&path)).map(drop));
    s.note(
        "allowed",
        as_nobody(|| io::pwrite(&file, &page.0[..4096], 4096)),
    );
    // Capabilities go with any write.
    let capability = [1, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let set = fs::setxattr(
        &path,
        "security.capability",
        &capability,
        XattrFlags::empty(),
    );
    s.done("capability", set);
    s.note("written", io::pwrite(&file, &page.0[..4096], 0));
    s.note(
        "left",
        fs::getxattr(&path, "security.capability", &mut [0; 64][..]),
    );
}

fn unlinked(s: &mut Scene) {
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

fn removed_directory(s: &mut Scene) {
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
fn at_removed(s: &mut Scene) {
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

/// A file that is being executed can't be written, and is none the worse for trying.
fn executed(s: &mut Scene) {
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

fn utimens(s: &mut Scene) {
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
    fs::symlink("file", s.at("link")).unwrap();
    let times = Timestamps {
        last_access: exact(7),
        last_modification: exact(8),
    };
    s.done(
        "of link",
        fs::utimensat(CWD, s.at("link"), &times, AtFlags::SYMLINK_NOFOLLOW),
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
        as_nobody(|| fs::utimensat(CWD, &path, &times, AtFlags::empty())),
    );
}

fn truncate(s: &mut Scene) {
    let file = s.file("file", vec![b'a'; 10_000]);
    for size in [5_000, 20_000, 4096, 4097, 0, 1, 1 << 30, 100] {
        s.done(&format!("to {size}"), fs::ftruncate(&file, size));
        s.note(&format!("size {size}"), s.size("file"));
        if size < 100_000 {
            s.note(&format!("content {size}"), read_all(&file));
        }
    }
    // What is cut off does not come back.
    io::pwrite(&file, &[b'z'; 8192], 0).unwrap();
    fs::ftruncate(&file, 10).unwrap();
    fs::ftruncate(&file, 8192).unwrap();
    s.note("grown again", read_all(&file));
    s.done("negative", fs::ftruncate(&file, u64::MAX));
    s.done("huge", fs::ftruncate(&file, (1 << 62) + 1));
    let read_only = s.open("file", OFlags::RDONLY).unwrap();
    s.done("read-only", fs::ftruncate(&read_only, 0));
    let dir = s.open(".", OFlags::RDONLY).unwrap();
    s.done("directory", fs::ftruncate(&dir, 0));
    let name = std::ffi::CString::new(s.at("file").into_os_string().into_vec()).unwrap();
    // SAFETY: the name ends with NUL.
    let by_path = unsafe { libc::truncate(name.as_ptr(), 77) };
    s.value("by path", by_path);
    s.note("by path size", s.size("file"));
    s.note("seen by the descriptor", fs::seek(&file, SeekFrom::End(0)));
}

fn reopen(s: &mut Scene) {
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

fn times(s: &mut Scene) {
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

fn read_and_write(s: &mut Scene) {
    let file = s.file("file", "");
    let mut expected = vec![0u8; 3 << 20];
    let mut state = 1u32;
    for _ in 0..300 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let offset = (state >> 8) as usize % (2 << 20);
        let length = (state >> 4) as usize % 40_000;
        let bytes = vec![(state >> 24) as u8; length];
        assert_eq!(io::pwrite(&file, &bytes, offset as u64), Ok(length));
        expected[offset..offset + length].copy_from_slice(&bytes);
    }
    let got = std::fs::read(s.at("file")).unwrap();
    s.value("random writes", expected.starts_with(&got));
    s.value("size", got.len());
    s.note(
        "read at the end",
        io::pread(&file, &mut [0; 10][..], got.len() as u64),
    );
    s.note("read far", io::pread(&file, &mut [0; 10][..], 1 << 40));
    s.note(
        "write at the limit",
        io::pwrite(&file, b"x", i64::MAX as u64),
    );
    s.note("write nothing", io::write(&file, b""));
    let slices = [b"one".as_slice(), b" two", b" three"].map(std::io::IoSlice::new);
    s.note("vector", io::pwritev(&file, &slices, 0));
    let (mut a, mut b) = ([0; 3], [0; 100]);
    let mut into = [
        std::io::IoSliceMut::new(&mut a),
        std::io::IoSliceMut::new(&mut b),
    ];
    s.note("read vector", io::preadv(&file, &mut into, 0));
    s.value(
        "is",
        format!("{} {}", a.escape_ascii(), b[..10].escape_ascii()),
    );
    let large = vec![b'L'; 5 << 20];
    let big = s.file("big", "");
    s.note("large write", io::write(&big, &large));
    let mut back = vec![0; 5 << 20];
    s.note("large read", io::pread(&big, &mut back[..], 0));
    s.value("large content", back == large);
    let pipe = rustix::pipe::pipe().unwrap();
    s.note(
        "splice out",
        rustix::pipe::splice(
            big.as_fd(),
            Some(&mut 0),
            pipe.1.as_fd(),
            None,
            4096,
            rustix::pipe::SpliceFlags::empty(),
        ),
    );
    s.note(
        "splice in",
        rustix::pipe::splice(
            pipe.0.as_fd(),
            None,
            file.as_fd(),
            Some(&mut 50),
            4096,
            rustix::pipe::SpliceFlags::empty(),
        ),
    );
    let mut byte = [0];
    io::pread(&file, &mut byte[..], 4000).unwrap();
    s.value("spliced", byte[0]);
}

fn access(s: &mut Scene) {
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
