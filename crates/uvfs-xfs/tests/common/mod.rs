//! Images made by mkfs.xfs and filled through the kernel, and the comparison of what the kernel
//! shows with what the reader shows.

#![allow(dead_code, missing_docs)]

pub mod proto;

use rustix::fs::{
    self as rfs, AtFlags, CWD, FallocateFlags, Gid, Mode, StatxFlags, Timestamps, Uid, XattrFlags,
};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirEntryExt, FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, Weak};
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::format::FileType;
use uvfs_xfs::{Error, Fork, Inode, Volume};

/// Runs a command and gives its output, whatever its status.
pub fn output(program: &str, args: &[&OsStr]) -> std::io::Result<Output> {
    Command::new(program).args(args).output()
}

/// Runs a command that must succeed.
pub fn run<S: AsRef<OsStr>>(program: &str, args: &[S]) -> String {
    let args: Vec<&OsStr> = args.iter().map(AsRef::as_ref).collect();
    let out = output(program, &args).unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(
        out.status.success(),
        "{program} {args:?} failed: {}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Whether images can be made and mounted here; says why not, and fails in CI.
pub fn can_run() -> bool {
    let why = if !rustix::process::geteuid().is_root() {
        "not root"
    } else if Command::new("mkfs.xfs").arg("-V").output().is_err() {
        "no mkfs.xfs"
    } else if !Path::new("/dev/loop-control").exists() {
        "no loop devices"
    } else {
        return true;
    };
    assert!(std::env::var_os("CI").is_none(), "cannot run in CI: {why}");
    eprintln!("skipped: {why} (needs root, loop devices and mkfs.xfs)");
    false
}

/// Whether the whole set of feature combinations was asked for.
pub fn full() -> bool {
    std::env::var_os("UVFS_XFS_FULL").is_some_and(|v| v == "1")
}

/// Where images go: memory if there is plenty, because each unmount flushes its image to disk.
fn base_dir() -> PathBuf {
    let shm = Path::new("/dev/shm");
    let room = rfs::statvfs(shm).map_or(0, |s| s.f_bavail * s.f_frsize);
    if std::env::var_os("TMPDIR").is_none() && room > 2 << 30 {
        shm.into()
    } else {
        std::env::temp_dir()
    }
}

/// An image in a directory of its own, removed at the end.
pub struct Image {
    dir: tempfile::TempDir,
}

impl Image {
    pub fn new() -> Image {
        let dir = tempfile::Builder::new()
            .prefix("uvfs-xfs-")
            .tempdir_in(base_dir())
            .unwrap();
        Image { dir }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// A sparse image of 400 MiB, made with `args`. Gives whether this mkfs knows them.
    pub fn mkfs(&self, args: &[&str]) -> bool {
        let path = self.path();
        File::create(&path).unwrap().set_len(400 << 20).unwrap();
        let mut all: Vec<&OsStr> = vec![OsStr::new("-q"), OsStr::new("-f")];
        all.extend(args.iter().map(OsStr::new));
        all.push(path.as_os_str());
        let out = output("mkfs.xfs", &all).unwrap();
        if !out.status.success() {
            eprintln!(
                "mkfs.xfs {args:?}: {}",
                String::from_utf8_lossy(&out.stderr)
            );
        }
        out.status.success()
    }

    pub fn open(&self) -> Volume {
        Volume::open(FileBlocks::open(&self.path()).unwrap()).unwrap()
    }
}

/// A mount, undone when dropped.
pub struct Mount {
    dir: tempfile::TempDir,
}

impl Mount {
    /// Mounts `image`; an error is what mount said.
    pub fn new(image: &Path, options: &str) -> Result<Mount, String> {
        let dir = tempfile::Builder::new()
            .prefix("uvfs-xfs-mnt-")
            .tempdir()
            .unwrap();
        let options = format!("loop,{options}");
        let args: Vec<&OsStr> = vec![
            OsStr::new("-t"),
            OsStr::new("xfs"),
            OsStr::new("-o"),
            OsStr::new(&options),
            image.as_os_str(),
            dir.path().as_os_str(),
        ];
        let out = output("mount", &args).map_err(|e| e.to_string())?;
        if out.status.success() {
            Ok(Mount { dir })
        } else {
            Err(String::from_utf8_lossy(&out.stderr).into_owned())
        }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let dir = self.dir.path().as_os_str();
        for flags in [&[][..], &["-l"][..]] {
            let mut args: Vec<&OsStr> = flags.iter().map(OsStr::new).collect();
            args.push(dir);
            if output("umount", &args).is_ok_and(|o| o.status.success()) {
                return;
            }
        }
        eprintln!("could not unmount {}", self.dir.path().display());
    }
}

/// Bytes that differ from place to place.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut v = Vec::with_capacity(len + 8);
    while v.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        v.extend_from_slice(&x.to_le_bytes());
    }
    v.truncate(len);
    v
}

fn mknod(path: &Path, kind: rfs::FileType, major: u32, minor: u32) {
    rfs::mknodat(
        CWD,
        path,
        kind,
        Mode::from_raw_mode(0o640),
        rfs::makedev(major, minor),
    )
    .unwrap_or_else(|e| panic!("mknod {}: {e}", path.display()));
}

fn set_times(path: &Path, atime: (i64, i64), mtime: (i64, i64)) {
    let ts = |(tv_sec, tv_nsec)| rfs::Timespec { tv_sec, tv_nsec };
    let times = Timestamps {
        last_access: ts(atime),
        last_modification: ts(mtime),
    };
    rfs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    rfs::lsetxattr(path, name, value, XattrFlags::empty())
        .unwrap_or_else(|e| panic!("setxattr {name} on {}: {e}", path.display()));
}

/// The name of entry `i` of a big directory.
pub fn entry_name(i: usize) -> String {
    format!("entry-{i:05}-{}", "x".repeat(i * 7 % 60))
}

/// A directory of `count` entries of several types.
fn fill_dir(dir: &Path, count: usize) {
    fs::create_dir(dir).unwrap();
    for i in 0..count {
        let path = dir.join(entry_name(i));
        match i {
            _ if i % 7 == 3 => symlink(format!("target-{i}"), &path).unwrap(),
            _ if i % 11 == 5 => mknod(&path, rfs::FileType::Fifo, 0, 0),
            _ if i % 13 == 7 => fs::create_dir(&path).unwrap(),
            _ => fs::write(&path, if i % 5 == 0 { &b"some bytes"[..] } else { b"" }).unwrap(),
        }
    }
}

/// Fills a mounted file system with files of every kind and shape.
pub fn fill(root: &Path, block_size: u64) {
    // Directories of every form, some with holes where entries were.
    for count in [0, 5, 60, 500, 6000] {
        fill_dir(&root.join(format!("dir{count}")), count);
    }
    fill_dir(&root.join("holes"), 700);
    for i in (0..700).filter(|i| i % 3 != 0 || (200..500).contains(i)) {
        let path = root.join("holes").join(entry_name(i));
        fs::remove_file(&path)
            .or_else(|_| fs::remove_dir(&path))
            .unwrap();
    }
    fill_dir(&root.join("shrunk"), 600);
    for i in 4..600 {
        let path = root.join("shrunk").join(entry_name(i));
        fs::remove_file(&path)
            .or_else(|_| fs::remove_dir(&path))
            .unwrap();
    }
    let mut deep = root.join("deep");
    for i in 0..40 {
        fs::create_dir(&deep).unwrap();
        fs::write(deep.join("here"), format!("{i}")).unwrap();
        deep.push(format!("level-{i}"));
    }
    let names = root.join("names");
    fs::create_dir(&names).unwrap();
    for i in 0..12u8 {
        let long = OsString::from_vec(vec![b'a' + i; 255]);
        fs::write(names.join(long), [i]).unwrap();
    }
    let odd: Vec<u8> = (1..=255u8).filter(|b| *b != b'/').collect();
    fs::write(names.join(OsStr::from_bytes(&odd)), b"odd").unwrap();
    fs::write(names.join(OsStr::from_bytes(b"\xff\xfe")), b"not text").unwrap();
    fs::write(names.join("x"), b"").unwrap();

    // Files: sizes, holes, unwritten space, many extents.
    let files = root.join("files");
    fs::create_dir(&files).unwrap();
    for (i, len) in [0usize, 1, 511, 4096, 4097, 70_000, 1 << 20]
        .into_iter()
        .enumerate()
    {
        fs::write(files.join(format!("plain-{len}")), pattern(i as u64, len)).unwrap();
    }
    let sparse = File::create(files.join("sparse")).unwrap();
    sparse.write_all_at(&pattern(20, 9000), 1 << 20).unwrap();
    sparse
        .write_all_at(&pattern(21, 5000), (5 << 30) + 77)
        .unwrap();
    sparse.set_len((6 << 30) + 1).unwrap();
    let hole = File::create(files.join("hole")).unwrap();
    hole.set_len(3 << 20).unwrap();
    let mut many = File::create(files.join("many-extents")).unwrap();
    let count = if block_size <= 4096 { 1500 } else { 200 };
    let piece = pattern(30, block_size as usize);
    for i in 0..count {
        many.seek(SeekFrom::Start(i * 2 * block_size)).unwrap();
        many.write_all(&piece).unwrap();
    }
    drop(many);
    let alloc = File::create(files.join("fallocated")).unwrap();
    rfs::fallocate(&alloc, FallocateFlags::empty(), 0, 2 << 20).unwrap();
    alloc.write_all_at(&pattern(40, 10_000), 300_001).unwrap();
    let beyond = File::create(files.join("beyond-the-end")).unwrap();
    beyond.write_all_at(&pattern(41, 10_000), 0).unwrap();
    rfs::fallocate(&beyond, FallocateFlags::KEEP_SIZE, 0, 3 << 20).unwrap();
    let punched = File::create(files.join("punched")).unwrap();
    punched.write_all_at(&pattern(42, 1 << 20), 0).unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rfs::fallocate(&punched, punch, 100_000, 500_000).unwrap();
    rfs::fallocate(&punched, FallocateFlags::ZERO_RANGE, 700_000, 100_000).unwrap();
    // A copy that shares blocks, where the file system can.
    let copy = File::create(files.join("shared-copy")).unwrap();
    let of = File::open(files.join("plain-1048576")).unwrap();
    of.sync_all().unwrap();
    if rfs::ioctl_ficlone(&copy, &of).is_ok() {
        copy.write_all_at(&pattern(43, 8192), 65536).unwrap();
    }
    fs::hard_link(files.join("plain-4097"), files.join("link")).unwrap();
    fs::hard_link(files.join("plain-4097"), root.join("dir5").join("link")).unwrap();

    // Attributes: in the inode, in a leaf, in a tree, in blocks of their own.
    let attrs = root.join("attrs");
    fs::create_dir(&attrs).unwrap();
    let file = |name: &str| {
        let p = attrs.join(name);
        fs::write(&p, name).unwrap();
        p
    };
    let small = file("small");
    set_xattr(&small, "user.colour", b"green");
    set_xattr(&small, "user.empty", b"");
    set_xattr(&small, "trusted.secret", b"\0\x01\xff");
    set_xattr(&small, "security.label", b"unit");
    let leaf = file("leaf");
    for i in 0..20 {
        set_xattr(
            &leaf,
            &format!("user.attribute-{i}"),
            &pattern(i, 5 + i as usize * 4),
        );
    }
    rfs::lremovexattr(&leaf, "user.attribute-7").unwrap();
    let tree = file("tree");
    for i in 0..300 {
        set_xattr(&tree, &format!("user.attribute-{i}"), &pattern(i, 200));
    }
    for i in (0..300).step_by(4) {
        rfs::lremovexattr(&tree, format!("user.attribute-{i}")).unwrap();
    }
    // Two files that grow by turns, so that their attribute forks have many extents.
    let (first, second) = (file("turns-1"), file("turns-2"));
    for i in 0..120 {
        for (seed, path) in [(1000, &first), (2000, &second)] {
            set_xattr(
                path,
                &format!("user.attribute-{i}"),
                &pattern(seed + i, 1500),
            );
        }
    }
    let large = file("large");
    for (i, len) in [61_440usize, 65_536, 3000, 10_000].into_iter().enumerate() {
        set_xattr(
            &large,
            &format!("user.large-{i}"),
            &pattern(50 + i as u64, len),
        );
    }
    set_xattr(&attrs, "user.on-a-directory", b"yes");
    // u::rwx, user 7 r--, g::r-x, mask rwx, o::r--
    let acl: Vec<u8> = [
        (1u16, 7u16, u32::MAX),
        (2, 4, 7),
        (4, 5, u32::MAX),
        (16, 7, u32::MAX),
        (32, 4, u32::MAX),
    ]
    .iter()
    .fold(2u32.to_le_bytes().to_vec(), |mut v, (tag, perm, id)| {
        v.extend_from_slice(&tag.to_le_bytes());
        v.extend_from_slice(&perm.to_le_bytes());
        v.extend_from_slice(&id.to_le_bytes());
        v
    });
    for (path, name) in [
        (&small, "system.posix_acl_access"),
        (&attrs, "system.posix_acl_default"),
    ] {
        match rfs::lsetxattr(path, name, &acl, XattrFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
            Err(e) => panic!("{name}: {e}"),
        }
    }

    // Links, devices, owners, modes, times.
    let special = root.join("special");
    fs::create_dir(&special).unwrap();
    for len in [1usize, 60, 100, 500, 1000, 1023] {
        symlink(
            "t/".repeat(len)[..len].trim_end_matches('/'),
            special.join(format!("link-{len}")),
        )
        .unwrap();
    }
    symlink("../files/plain-70000", special.join("to-file")).unwrap();
    symlink("/files/../dir60", special.join("to-dir")).unwrap();
    mknod(&special.join("char"), rfs::FileType::CharacterDevice, 5, 1);
    mknod(
        &special.join("block"),
        rfs::FileType::BlockDevice,
        259,
        200_000,
    );
    mknod(&special.join("fifo"), rfs::FileType::Fifo, 0, 0);
    mknod(&special.join("socket"), rfs::FileType::Socket, 0, 0);
    for (name, mode) in [("setuid", 0o4755), ("none", 0), ("all", 0o7777)] {
        let p = special.join(name);
        fs::write(&p, name).unwrap();
        rfs::chownat(
            CWD,
            &p,
            Some(Uid::from_raw(12_345)),
            Some(Gid::from_raw(4_000_000_000)),
            AtFlags::empty(),
        )
        .unwrap();
        fs::set_permissions(&p, fs::Permissions::from_mode(mode)).unwrap();
    }
    // 1901, just before 1970, 2038, and 2400 (kept with bigtime, cut without).
    let times = [
        (-2_147_483_648, 0),
        (-1, 999_999_999),
        (2_147_483_647, 5),
        (13_569_465_600, 123),
    ];
    for (i, t) in times.into_iter().enumerate() {
        let p = special.join(format!("time-{i}"));
        fs::write(&p, b"").unwrap();
        set_times(&p, t, (t.0, (t.1 + 1) % 1_000_000_000));
    }
    set_times(&special.join("link-60"), (86_400, 1), (172_800, 2));
}

/// A few files of each form, for tests that look at an image often.
pub fn fill_some(root: &Path) {
    for count in [5, 30, 300, 1200] {
        let dir = root.join(format!("dir{count}"));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("file"), b"bytes").unwrap();
        for i in 0..count {
            fs::hard_link(dir.join("file"), dir.join(entry_name(i))).unwrap();
        }
    }
    let many = File::create(root.join("many-extents")).unwrap();
    for i in 0..300 {
        many.write_all_at(&[i as u8; 4096], i * 8192).unwrap();
    }
    let file = root.join("attrs");
    fs::write(&file, b"").unwrap();
    let other = root.join("more-attrs");
    fs::write(&other, b"").unwrap();
    set_xattr(&root.join("dir5"), "user.small", b"value");
    for i in 0..60 {
        set_xattr(&file, &format!("user.attribute-{i}"), &pattern(i, 700));
        set_xattr(&other, &format!("user.attribute-{i}"), &pattern(i, 100));
    }
    set_xattr(&file, "user.large", &pattern(99, 9000));
    for len in [10usize, 300, 1000] {
        symlink("t".repeat(len), root.join(format!("link-{len}"))).unwrap();
    }
    mknod(&root.join("device"), rfs::FileType::CharacterDevice, 1, 3);
}

/// Compares everything that the kernel shows under `root` with what the volume shows.
/// Gives the number of inodes compared.
pub fn compare(volume: &Volume, root: &Path) -> usize {
    let mut count = 0;
    let mut todo = vec![(PathBuf::new(), volume.root().unwrap())];
    assert_eq!(fs::metadata(root).unwrap().ino(), volume.geometry().rootino);
    while let Some((relative, inode)) = todo.pop() {
        let path = root.join(&relative);
        compare_inode(volume, &path, &inode);
        count += 1;
        if inode.is_dir() {
            for (name, ino) in compare_dir(volume, &path, &inode) {
                let child = volume
                    .inode(ino)
                    .unwrap_or_else(|e| panic!("{}: {e}", path.join(&name).display()));
                todo.push((relative.join(&name), child));
            }
        }
    }
    count
}

fn compare_inode(volume: &Volume, path: &Path, i: &Inode) {
    let name = path.display();
    let s = rfs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::ALL).unwrap();
    assert_eq!(s.stx_ino, i.ino, "{name}: inode");
    assert_eq!(s.stx_mode, i.mode, "{name}: mode");
    assert_eq!(s.stx_nlink, i.nlink, "{name}: links");
    assert_eq!((s.stx_uid, s.stx_gid), (i.uid, i.gid), "{name}: owner");
    assert_eq!(s.stx_size, i.size, "{name}: size");
    let blocks = i.nblocks << (volume.geometry().blocklog - 9);
    assert_eq!(s.stx_blocks, blocks, "{name}: blocks");
    for (what, kernel, ours) in [
        ("atime", s.stx_atime, Some(i.atime)),
        ("mtime", s.stx_mtime, Some(i.mtime)),
        ("ctime", s.stx_ctime, Some(i.ctime)),
        ("btime", s.stx_btime, i.crtime),
    ] {
        if let Some(t) = ours {
            assert_eq!(
                (kernel.tv_sec, kernel.tv_nsec),
                (t.sec, t.nsec),
                "{name}: {what}"
            );
        }
    }
    let kind = i.file_type();
    if matches!(kind, FileType::CharDevice | FileType::BlockDevice) {
        assert_eq!(
            (s.stx_rdev_major, s.stx_rdev_minor),
            i.rdev,
            "{name}: device"
        );
    }
    match kind {
        FileType::Regular => compare_bytes(volume, path, i),
        FileType::Symlink => {
            let target = fs::read_link(path).unwrap();
            assert_eq!(
                target.as_os_str().as_bytes(),
                volume.readlink(i).unwrap(),
                "{name}"
            );
        }
        _ => {}
    }
    compare_xattrs(volume, path, i);
}

/// The kernel's extended attributes of a file.
pub fn kernel_xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut list = vec![0u8; 65536];
    let n = rfs::llistxattr(path, &mut list[..]).unwrap();
    let mut value = vec![0u8; 65536];
    let names = list[..n].split(|b| *b == 0).filter(|n| !n.is_empty());
    names
        .map(|n| {
            let len = rfs::lgetxattr(path, OsStr::from_bytes(n), &mut value[..]).unwrap();
            (n.to_vec(), value[..len].to_vec())
        })
        .collect()
}

fn compare_xattrs(volume: &Volume, path: &Path, i: &Inode) {
    let kernel = kernel_xattrs(path);
    let mut ours = Vec::new();
    volume
        .xattr_names(i, &mut |n| {
            ours.push(n.to_vec());
            true
        })
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    ours.sort();
    assert_eq!(
        kernel.keys().cloned().collect::<Vec<_>>(),
        ours,
        "{}: attributes",
        path.display()
    );
    for (name, value) in &kernel {
        let got = volume.xattr(i, name).unwrap();
        assert!(
            got == *value,
            "{}: {}",
            path.display(),
            String::from_utf8_lossy(name)
        );
    }
    let missing = volume.xattr(i, b"user.there-is-no-such-attribute");
    assert!(matches!(missing, Err(Error::NotFound("attribute"))));
}

fn compare_bytes(volume: &Volume, path: &Path, i: &Inode) {
    let name = path.display();
    let file = File::open(path).unwrap();
    let check = |offset: u64, len: usize| {
        let (mut a, mut b) = (vec![0u8; len], vec![0xaau8; len]);
        let n = file.read_at(&mut a, offset).unwrap();
        let m = volume
            .read(i, offset, &mut b)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(n, m, "{name}: bytes read at {offset}");
        assert!(a[..n] == b[..m], "{name}: bytes at {offset}");
    };
    if i.size <= 32 << 20 {
        check(0, i.size as usize + 10);
    } else {
        // A large sparse one: both ends, and around each run of data.
        check(0, 1 << 20);
        check(i.size - 4096, 8192);
        let mut at = 0;
        while let Ok(data) = rfs::seek(&file, rfs::SeekFrom::Data(at)) {
            let hole = rfs::seek(&file, rfs::SeekFrom::Hole(data)).unwrap();
            check(
                data.saturating_sub(5000),
                (hole - data).min(4 << 20) as usize + 10_000,
            );
            at = hole;
        }
    }
    // At odd places.
    for (offset, len) in [
        (1, 1),
        (511, 3),
        (4095, 70_001),
        (i.size, 5),
        (i.size + 9, 5),
    ] {
        check(offset, len);
    }
}

fn kernel_type(t: fs::FileType) -> FileType {
    match () {
        _ if t.is_dir() => FileType::Directory,
        _ if t.is_symlink() => FileType::Symlink,
        _ if t.is_fifo() => FileType::Fifo,
        _ if t.is_socket() => FileType::Socket,
        _ if t.is_char_device() => FileType::CharDevice,
        _ if t.is_block_device() => FileType::BlockDevice,
        _ => FileType::Regular,
    }
}

/// A directory as a list, with each entry's position.
pub fn list(volume: &Volume, dir: &Inode, start: u64) -> Vec<(Vec<u8>, u64, FileType, u64)> {
    let mut all = Vec::new();
    volume
        .readdir(dir, start, &mut |e| {
            all.push((e.name.to_vec(), e.ino, e.file_type, e.next));
            true
        })
        .unwrap_or_else(|e| panic!("directory {}: {e}", dir.ino));
    all
}

fn compare_dir(volume: &Volume, path: &Path, dir: &Inode) -> Vec<(OsString, u64)> {
    let name = path.display();
    let ftype = volume.geometry().features.ftype;
    let mut kernel = Vec::new();
    for e in fs::read_dir(path).unwrap() {
        let e = e.unwrap();
        kernel.push((
            e.file_name().into_vec(),
            e.ino(),
            kernel_type(e.file_type().unwrap()),
        ));
    }
    let ours = list(volume, dir, 0);
    assert_eq!(&ours[0].0, b".", "{name}");
    assert_eq!(ours[0].1, dir.ino, "{name}");
    assert_eq!(&ours[1].0, b"..", "{name}");
    let mut shown: Vec<_> = ours[2..]
        .iter()
        .map(|(n, i, t, _)| {
            let t = if ftype {
                *t
            } else {
                kernel_type_of(volume, *i)
            };
            (n.clone(), *i, t)
        })
        .collect();
    kernel.sort_by(|a, b| a.0.cmp(&b.0));
    shown.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(kernel, shown, "{name}: entries");
    check_dir_positions(volume, dir, &ours);
    for (n, ino, ..) in &ours {
        assert_eq!(volume.lookup(dir, n).unwrap(), *ino, "{name}");
    }
    for missing in [&b"no such name"[..], b"", b"entry-99999-"] {
        assert!(
            matches!(volume.lookup(dir, missing), Err(Error::NotFound("entry"))),
            "{name}"
        );
    }
    kernel
        .into_iter()
        .map(|(n, i, _)| (OsString::from_vec(n), i))
        .collect()
}

fn kernel_type_of(volume: &Volume, ino: u64) -> FileType {
    volume.inode(ino).unwrap().file_type()
}

/// A listing goes on at every position where it can stop.
fn check_dir_positions(volume: &Volume, dir: &Inode, all: &[(Vec<u8>, u64, FileType, u64)]) {
    let step = (all.len() / 40).max(1);
    for (i, (.., next)) in all.iter().enumerate().step_by(step) {
        let mut first = None;
        volume
            .readdir(dir, *next, &mut |e| {
                first = Some(e.name.to_vec());
                false
            })
            .unwrap();
        assert_eq!(first.as_ref(), all.get(i + 1).map(|e| &e.0));
    }
    assert!(all.windows(2).all(|w| w[0].3 < w[1].3));
    assert!(all.iter().all(|e| e.3 < 1 << 32));
}

/// The forks' formats found on a volume: (fork, format) to how many inodes have it.
pub fn formats(volume: &Volume, root: &Path) -> BTreeMap<(bool, u8), usize> {
    let mut seen = BTreeMap::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(path) = todo.pop() {
        let m = fs::symlink_metadata(&path).unwrap();
        let inode = volume.inode(m.ino()).unwrap();
        for fork in [Fork::Data, Fork::Attr] {
            if let Some(f) = inode.fork_format(fork) {
                *seen.entry((fork == Fork::Attr, f)).or_insert(0) += 1;
            }
        }
        if m.is_dir() {
            todo.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
    }
    seen
}

/// Whether images can be made, mounted and compared here.
pub fn can_compare() -> bool {
    if !can_run() {
        return false;
    }
    let there = |p| std::process::Command::new(p).arg("-V").output().is_ok();
    if there("xfs_repair") && there("xfs_db") {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "no xfs_repair or xfs_db");
    eprintln!("skipped: no xfs_repair or xfs_db");
    false
}

/// A filled image, looked at by `empty` before it was filled; `None` if this kernel does not mount such.
pub fn filled_after(args: &[&str], empty: impl FnOnce(&Path)) -> Option<Image> {
    let image = Image::new();
    assert!(image.mkfs(args), "mkfs.xfs {args:?}");
    empty(&image.path());
    let block_size = image.open().geometry().block_size.into();
    match Mount::new(&image.path(), "rw") {
        Ok(m) => fill(m.path(), block_size),
        Err(e) => {
            eprintln!("skipped: this kernel does not mount {args:?}: {e}");
            return None;
        }
    }
    Some(image)
}

/// The image that most damage is done to: small blocks, so that every tree has levels. Tests that
/// run at the same time share one; the last removes it. `empty` looks at it before it is filled.
pub fn base_after(empty: impl FnOnce(&Path)) -> Option<Arc<Image>> {
    static BASE: Mutex<Weak<Image>> = Mutex::new(Weak::new());
    if !can_compare() {
        return None;
    }
    let mut base = BASE.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(image) = base.upgrade() {
        return Some(image);
    }
    let args = ["-b", "size=1024", "-m", "rmapbt=1,reflink=1"];
    let image = Arc::new(filled_after(&args, empty)?);
    *base = Arc::downgrade(&image);
    Some(image)
}
