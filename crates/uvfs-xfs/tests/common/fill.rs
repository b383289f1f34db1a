//! The contents of the test images.

use super::*;

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

pub fn mknod(path: &Path, kind: rfs::FileType, major: u32, minor: u32) {
    rfs::mknodat(
        CWD,
        path,
        kind,
        Mode::from_raw_mode(0o640),
        rfs::makedev(major, minor),
    )
    .unwrap_or_else(|e| panic!("mknod {}: {e}", path.display()));
}

pub fn set_times(path: &Path, atime: (i64, i64), mtime: (i64, i64)) {
    let ts = |(tv_sec, tv_nsec)| rfs::Timespec { tv_sec, tv_nsec };
    let times = Timestamps {
        last_access: ts(atime),
        last_modification: ts(mtime),
    };
    rfs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

pub fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    rfs::lsetxattr(path, name, value, XattrFlags::empty())
        .unwrap_or_else(|e| panic!("setxattr {name} on {}: {e}", path.display()));
}

/// The name of entry `i` of a big directory.
pub fn entry_name(i: usize) -> String {
    format!("entry-{i:05}-{}", "x".repeat(i * 7 % 60))
}

/// A directory of `count` entries of several types.
pub fn fill_dir(dir: &Path, count: usize) {
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
    fill_directories(root);
    fill_files(root, block_size);
    fill_attributes(&root.join("attrs"));
    fill_special(&root.join("special"));
}

/// Directories of every form, some with holes where entries were.
fn fill_directories(root: &Path) {
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
}

/// Files: sizes, holes, unwritten space, many extents.
fn fill_files(root: &Path, block_size: u64) {
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
}

/// Attributes: in the inode, in a leaf, in a tree, in blocks of their own.
fn fill_attributes(attrs: &Path) {
    fs::create_dir(attrs).unwrap();
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
    set_xattr(attrs, "user.on-a-directory", b"yes");
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
        (&*small, "system.posix_acl_access"),
        (attrs, "system.posix_acl_default"),
    ] {
        match rfs::lsetxattr(path, name, &acl, XattrFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
            Err(e) => panic!("{name}: {e}"),
        }
    }
}

/// Links, devices, owners, modes, times.
fn fill_special(special: &Path) {
    fs::create_dir(special).unwrap();
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
    for (name, mode) in [
        ("setuid", 0o4755),
        ("none", 0),
        ("idle", 0o7000),
        ("all", 0o7777),
    ] {
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
