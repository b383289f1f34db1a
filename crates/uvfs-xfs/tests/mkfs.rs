//! `mkfs`: its images against the checker, xfs_repair, and the kernel's view of them.

#[path = "mkfs/archives.rs"]
mod archives;
#[path = "mkfs/builders.rs"]
mod builders;
mod common;
#[path = "mkfs/images.rs"]
mod images;
#[path = "mkfs/members.rs"]
mod members;
#[path = "mkfs/random.rs"]
mod random;

use common::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::check::{CheckOptions, CheckProgress, check};
use uvfs_xfs::mkfs::{From, Made, MkfsError, MkfsOptions, MkfsProgress, mkfs};
use uvfs_xfs::{Inode, Volume};

/// A directory for an image and a source, removed at the end.
fn scratch() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("uvfs-mkfs-")
        .tempdir_in(Image::new().dir().parent().unwrap())
        .unwrap()
}

fn make(image: &Path, options: &MkfsOptions, from: From) -> Result<Made, MkfsError> {
    mkfs(image, options, from, &MkfsProgress::default())
}

/// The findings of the checker.
fn findings(image: &Path) -> Vec<String> {
    let blocks = Arc::new(FileBlocks::open(image).unwrap());
    let progress = CheckProgress::default();
    let outcome = check(blocks, &CheckOptions::default(), &progress).unwrap();
    outcome.findings.iter().map(|f| f.to_string()).collect()
}

/// Asserts that neither the checker nor, if it is there, xfs_repair finds anything wrong.
#[track_caller]
fn sound(image: &Path, what: &str) {
    assert_eq!(findings(image), Vec::<String>::new(), "{what}");
    let mut repair = Command::new("xfs_repair");
    let sb = Volume::open(Arc::new(FileBlocks::open(image).unwrap())).unwrap();
    if sb.geometry().agcount == 1 {
        repair.args(["-o", "force_geometry"]);
    }
    if let Ok(out) = repair.arg("-n").arg(image).output() {
        let text = String::from_utf8_lossy(&out.stderr).into_owned()
            + &String::from_utf8_lossy(&out.stdout);
        let odd = ["would", "inconsistent", "bad ", "WARNING"];
        assert!(
            out.status.success() && !odd.iter().any(|w| text.contains(w)),
            "{what}: xfs_repair: {text}"
        );
    }
}

fn sized(bytes: u64) -> MkfsOptions {
    MkfsOptions {
        size: Some(bytes),
        ..MkfsOptions::default()
    }
}

/// Option sets that the format allows, and their names.
fn sweep() -> Vec<(&'static str, MkfsOptions)> {
    let base = sized(400 << 20);
    let with = |change: &dyn Fn(&mut MkfsOptions)| {
        let mut o = base.clone();
        change(&mut o);
        o
    };
    vec![
        ("plain", base.clone()),
        ("1 KiB blocks", with(&|o| o.block_size = 1024)),
        ("2 KiB blocks", with(&|o| o.block_size = 2048)),
        (
            "16 KiB blocks, 2 KiB inodes",
            with(&|o| (o.block_size, o.inode_size) = (16384, 2048)),
        ),
        ("32 KiB blocks", with(&|o| o.block_size = 32768)),
        ("64 KiB blocks", with(&|o| o.block_size = 65536)),
        ("1 KiB inodes", with(&|o| o.inode_size = 1024)),
        ("4 KiB sectors", with(&|o| o.sector_size = 4096)),
        (
            "4 KiB sectors, 64 KiB blocks",
            with(&|o| (o.sector_size, o.block_size) = (4096, 65536)),
        ),
        ("one group", with(&|o| o.agcount = Some(1))),
        ("two groups", with(&|o| o.agcount = Some(2))),
        (
            "16 groups and a small log",
            with(&|o| (o.agcount, o.log_size) = (Some(16), Some(12 << 20))),
        ),
        ("groups of 96 MiB", with(&|o| o.agsize = Some(96 << 20))),
        ("small", sized(64 << 20)),
        ("large", sized(5 << 40)),
        (
            "a label",
            with(&|o| (o.label, o.max_pct) = (b"twelve bytes".to_vec(), Some(50))),
        ),
    ]
}

/// Each combination of sizes gives a sound image.
#[test]
fn empty_images_are_sound_over_a_sweep_of_options() {
    let dir = scratch();
    for (name, options) in sweep() {
        let image = dir.path().join("image");
        let made = make(&image, &options, From::Nothing).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(made.inodes, 3);
        sound(&image, name);
        fs::remove_file(&image).unwrap();
    }
}

/// The kernel allocates in a new image, which stays sound.
#[test]
fn the_kernel_writes_to_empty_images() {
    if !can_run() {
        return;
    }
    let dir = scratch();
    for (name, options) in sweep() {
        let image = dir.path().join("image");
        make(&image, &options, From::Nothing).unwrap();
        let mount = match Mount::new(&image, "rw") {
            Ok(m) => m,
            // Blocks larger than pages: Linux 6.12 and later.
            Err(_) if options.block_size > 4096 => continue,
            Err(e) => panic!("{name}: {e}"),
        };
        fs::create_dir(mount.path().join("d")).unwrap();
        for i in 0..300 {
            fs::write(mount.path().join(format!("d/{i}")), pattern(i, 5000)).unwrap();
        }
        drop(mount);
        sound(&image, name);
        fs::remove_file(&image).unwrap();
    }
}

/// Sizes and features are those that mkfs.xfs chooses.
#[test]
fn sizes_are_those_of_mkfs_xfs() {
    if !uvfs_testing::has(&[uvfs_testing::Need::Program("mkfs.xfs")]) {
        return;
    }
    let dir = scratch();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    let word = |o: &str, v: u64| vec![o.to_string(), format!("size={v}")];
    for bytes in [
        300u64 << 20,
        512 << 20,
        16 << 30,
        300 << 30,
        3 << 40,
        5 << 40,
    ] {
        for (block, inode, sector) in [
            (4096, 512, 512),
            (1024, 512, 512),
            (65536, 512, 512),
            (4096, 2048, 4096),
        ] {
            let options = MkfsOptions {
                block_size: block,
                inode_size: inode,
                sector_size: sector,
                ..sized(bytes)
            };
            if bytes > 16 << 30 && block < 4096 {
                continue;
            }
            let made = make(&ours, &options, From::Nothing).unwrap();
            fs::File::create(&theirs).unwrap().set_len(bytes).unwrap();
            let mut args = vec!["-q".to_string(), "-f".into()];
            args.extend(word("-b", block.into()));
            args.extend(word("-i", inode.into()));
            args.extend(word("-s", sector.into()));
            args.push(theirs.to_str().unwrap().into());
            run("mkfs.xfs", &args);
            let mut sector = vec![0; 512];
            std::os::unix::fs::FileExt::read_exact_at(
                &fs::File::open(&theirs).unwrap(),
                &mut sector,
                0,
            )
            .unwrap();
            use uvfs_xfs::format::{Layout, Superblock};
            let theirs = *Superblock::at(&sector, 0).unwrap();
            let mut ours = made.superblock;
            (ours.uuid, ours.crc) = (theirs.uuid, theirs.crc);
            assert_eq!(
                format!("{ours:?}"),
                format!("{theirs:?}"),
                "{bytes} bytes, {options:?}"
            );
            fs::remove_file(dir.path().join("ours")).unwrap();
        }
    }
}

/// All of a tree by the kernel, as lines to be compared. Access times are left out: looking changes
/// them. A directory's size and blocks depend on its form.
fn tree(root: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut dirs = vec![PathBuf::new()];
    while let Some(rel) = dirs.pop() {
        let mut names: Vec<_> = fs::read_dir(root.join(&rel))
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        names.sort();
        let mut all = vec![rel.clone()];
        all.extend(names.iter().map(|n| rel.join(n)));
        for (i, rel) in all.iter().enumerate() {
            let path = match rel.as_os_str().is_empty() {
                true => root.to_path_buf(),
                false => root.join(rel),
            };
            let m = fs::symlink_metadata(&path).unwrap();
            if i > 0 && m.is_dir() {
                dirs.push(rel.clone());
                continue;
            }
            let mut line = format!(
                "{rel:?} {:o} {} {} {} {}.{:09} {:x}",
                m.mode(),
                m.uid(),
                m.gid(),
                m.nlink(),
                m.mtime(),
                m.mtime_nsec(),
                m.rdev()
            );
            line += &contents(&path, &m);
            lines.push(line);
        }
    }
    lines.sort();
    lines
}

/// The size and data of a file, or the target of a link, and extended attributes.
fn contents(path: &Path, m: &fs::Metadata) -> String {
    let mut line = String::new();
    if m.is_file() {
        line += &format!(" {} {}", m.size(), digest(path, m.size()));
    } else if m.is_symlink() {
        line += &format!(" -> {:?}", fs::read_link(path).unwrap());
    }
    line + &format!(" {:?}", xattrs(path))
}

/// A hash of a file's data with the offsets of what is not zero.
fn digest(path: &Path, size: u64) -> u64 {
    use rustix::fs::SeekFrom;
    let file = fs::File::open(path).unwrap();
    let (mut hash, mut at) = (size, 0);
    while at < size {
        let Ok(start) = rustix::fs::seek(&file, SeekFrom::Data(at)) else {
            break;
        };
        let end = rustix::fs::seek(&file, SeekFrom::Hole(start)).unwrap();
        let mut bytes = vec![0; (end - start) as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, start).unwrap();
        for (i, b) in bytes.iter().enumerate().filter(|(_, b)| **b != 0) {
            let word = (start + i as u64) << 8 | u64::from(*b);
            hash = (hash ^ word)
                .wrapping_mul(0x0000_0100_0000_01b3)
                .rotate_left(5);
        }
        at = end;
    }
    hash
}

/// The attributes, less the names under which XFS shows ACLs as it stores them.
fn xattrs(path: &Path) -> Vec<(String, u64, usize)> {
    let mut names = vec![0u8; 1 << 16];
    let n = rustix::fs::llistxattr(path, &mut names).unwrap_or(0);
    let mut out: Vec<_> = names[..n]
        .split(|b| *b == 0)
        .filter(|n| !n.is_empty() && !n.starts_with(b"trusted.SGI_ACL"))
        .map(|name| {
            let mut value = vec![0u8; 1 << 16];
            let n = rustix::fs::lgetxattr(path, name, &mut value).unwrap();
            let hash = value[..n].iter().fold(7u64, |h, b| {
                (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3)
            });
            (String::from_utf8_lossy(name).into_owned(), hash, n)
        })
        .collect();
    out.sort();
    out
}

/// The lines that only one side has.
#[track_caller]
fn same(ours: &[String], expected: &[String], what: &str) {
    let only = |a: &[String], b: &[String]| -> Vec<String> {
        let b: std::collections::HashSet<_> = b.iter().collect();
        a.iter()
            .filter(|l| !b.contains(l))
            .take(5)
            .cloned()
            .collect()
    };
    let (more, less) = (only(ours, expected), only(expected, ours));
    assert!(
        more.is_empty() && less.is_empty() && ours.len() == expected.len(),
        "{what}: the image has {more:#?}, the source {less:#?}"
    );
}

/// The image has all files, links and attributes of the source.
#[test]
fn a_filled_image_shows_what_the_source_has() {
    if !can_run() {
        return;
    }
    let dir = scratch();
    // A source on XFS has every kind of attribute.
    let source = Image::new();
    assert!(source.mkfs(&[]));
    let at = Mount::new(&source.path(), "rw").unwrap();
    fill(at.path(), 4096);
    let expected = tree(at.path());
    for (name, mut options) in sweep() {
        if ["large", "small"].contains(&name) {
            continue;
        }
        // As large as is needed.
        options.size = None;
        let image = dir.path().join("image");
        let from = From::Directory(at.path().into());
        make(&image, &options, from).unwrap_or_else(|e| panic!("{name}: {e}"));
        sound(&image, name);
        match Mount::new(&image, "ro,norecovery") {
            Ok(m) => same(&tree(m.path()), &expected, name),
            Err(_) if options.block_size > 4096 => {}
            Err(e) => panic!("{name}: {e}"),
        }
        // The kernel goes on with it.
        if let Ok(m) = Mount::new(&image, "rw") {
            for i in 0..500 {
                fs::write(m.path().join(format!("dir60/new-{i}")), pattern(i, 9000)).unwrap();
            }
            fs::remove_dir_all(m.path().join("holes")).unwrap();
            drop(m);
            sound(&image, name);
        }
        fs::remove_file(&image).unwrap();
    }
}

/// `--reproducible` images of the same input are the same.
#[test]
fn the_same_input_gives_the_same_bytes() {
    let dir = scratch();
    let source = |name: &str| {
        let at = dir.path().join(name);
        fs::create_dir_all(at.join("sub/below")).unwrap();
        for i in 0..300 {
            let file = at.join(format!("sub/{i}"));
            fs::write(&file, pattern(i, i as usize * 30)).unwrap();
        }
        symlink("sub/7", at.join("link")).unwrap();
        fs::hard_link(at.join("sub/8"), at.join("hard")).unwrap();
        let time = rustix::fs::Timespec {
            tv_sec: 1_600_000_000,
            tv_nsec: 5,
        };
        for path in ["sub/below", "sub", "link", ""] {
            let times = rustix::fs::Timestamps {
                last_access: time,
                last_modification: time,
            };
            let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
            rustix::fs::utimensat(rustix::fs::CWD, at.join(path), &times, flags).unwrap();
        }
        at
    };
    let options = MkfsOptions {
        reproducible: true,
        epoch: Some(1_500_000_000),
        ..MkfsOptions::default()
    };
    let images: Vec<Vec<u8>> = ["one", "two"]
        .iter()
        .map(|name| {
            let image = dir.path().join("image");
            let source = source(name);
            for threads in [1, 7] {
                let options = MkfsOptions {
                    threads,
                    force: true,
                    ..options.clone()
                };
                let _ = fs::remove_file(&image);
                make(&image, &options, From::Directory(source.clone())).unwrap();
            }
            sound(&image, name);
            fs::read(&image).unwrap()
        })
        .collect();
    assert!(images[0] == images[1], "the images differ");
}

/// A file system with data is only overwritten with `--force`.
#[test]
fn what_is_there_is_not_overwritten_unasked() {
    let dir = scratch();
    let image = dir.path().join("image");
    make(&image, &sized(300 << 20), From::Nothing).unwrap();
    let again = make(&image, &sized(300 << 20), From::Nothing);
    assert!(matches!(again, Err(MkfsError::Exists { .. })), "{again:?}");
    let force = MkfsOptions {
        force: true,
        ..sized(300 << 20)
    };
    make(&image, &force, From::Nothing).unwrap();
    sound(&image, "made again");
    let text = dir.path().join("text");
    fs::write(&text, "not an image").unwrap();
    let over = make(&text, &sized(300 << 20), From::Nothing);
    assert!(matches!(over, Err(MkfsError::Exists { .. })), "{over:?}");
    assert_eq!(fs::read(&text).unwrap(), b"not an image");
}

/// A failed mkfs leaves no image.
#[test]
fn errors_name_the_path_and_leave_no_file() {
    let dir = scratch();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("large"), vec![1; 64 << 20]).unwrap();
    let image = dir.path().join("image");
    let from = || From::Directory(source.clone());
    let full = make(&image, &sized(40 << 20), from()).unwrap_err();
    assert!(matches!(full, MkfsError::NoSpace { .. }), "{full}");
    assert!(full.to_string().contains("large"), "{full}");
    assert!(!image.exists());
    let target = "x/".repeat(600);
    symlink(&target, source.join("long")).unwrap();
    let unfit = make(&image, &sized(400 << 20), from()).unwrap_err();
    assert!(unfit.to_string().contains("long"), "{unfit}");
    assert!(!image.exists());
    let none = From::Directory(dir.path().join("none"));
    let missing = make(&image, &MkfsOptions::default(), none).unwrap_err();
    assert!(missing.to_string().contains("none"), "{missing}");
    assert!(!image.exists());
}

/// Only the data of a file of 8 EiB is read, not its holes.
#[test]
fn the_longest_file_keeps_its_holes() {
    let dir = scratch();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    let file = fs::File::create(source.join("long")).unwrap();
    let size = i64::MAX as u64;
    if file.set_len(size).is_err() {
        return uvfs_testing::say("no files of 2^63-1 bytes here");
    }
    for at in [0, 1 << 40, size - 5] {
        std::os::unix::fs::FileExt::write_all_at(&file, b"here!", at).unwrap();
    }
    let image = dir.path().join("image");
    make(&image, &MkfsOptions::default(), From::Directory(source)).unwrap();
    sound(&image, "the longest file");
    let v = Volume::open(Arc::new(FileBlocks::open(&image).unwrap())).unwrap();
    let ino = v.lookup(&v.root().unwrap(), b"long").unwrap();
    let inode = v.inode(ino).unwrap();
    assert_eq!(inode.size, size);
    for at in [0, 1 << 40, size - 5] {
        let mut bytes = [0; 5];
        assert_eq!(v.read(&inode, at, &mut bytes).unwrap(), 5);
        assert_eq!(&bytes, b"here!", "at {at}");
    }
}

/// An archive that `tar` writes of a tree becomes that tree.
#[test]
fn an_archive_becomes_an_image() {
    if !can_run() {
        return;
    }
    let dir = scratch();
    let source = dir.path().join("source");
    fs::create_dir_all(source.join("a/b")).unwrap();
    for i in 0..300u64 {
        fs::write(source.join(format!("a/{i}")), pattern(i, i as usize * 50)).unwrap();
    }
    fs::hard_link(source.join("a/7"), source.join("a/b/seven")).unwrap();
    symlink("a/9", source.join("link")).unwrap();
    symlink("x".repeat(900), source.join("long")).unwrap();
    fs::write(source.join("n".repeat(250)), "a long name").unwrap();
    let sparse = fs::File::create(source.join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"end", 40 << 20).unwrap();
    // One that ends with a hole, with a name that is cut off where headers have no room for it.
    let holes = fs::File::create(source.join(format!("a/b/{}", "h".repeat(200)))).unwrap();
    for i in 0..30u64 {
        let at = i * 300_000;
        std::os::unix::fs::FileExt::write_all_at(&holes, &pattern(i, 5000), at).unwrap();
    }
    holes.set_len(20 << 20).unwrap();
    run("mkfifo", &[source.join("fifo")]);
    run(
        "chown",
        &[
            "-h".as_ref(),
            "1234:99".as_ref(),
            source.join("link").as_os_str(),
        ],
    );
    let expected = tree(&source);
    for (format, sparse) in [
        ("pax", None),
        ("gnu", Some("--sparse")),
        ("pax", Some("--sparse-version=0.0")),
        ("pax", Some("--sparse-version=0.1")),
        ("pax", Some("--sparse-version=1.0")),
    ] {
        let archive = dir.path().join("archive");
        let mut tar = Command::new("tar");
        tar.arg(format!("--format={format}")).arg("-C").arg(&source);
        tar.args(sparse);
        assert!(
            tar.arg("-cf")
                .arg(&archive)
                .arg(".")
                .status()
                .unwrap()
                .success()
        );
        let image = dir.path().join("image");
        let from = From::Archives(vec![uvfs_xfs::mkfs::Archive {
            name: archive.clone(),
            from: Box::new(fs::File::open(&archive).unwrap()),
        }]);
        make(&image, &MkfsOptions::default(), from).unwrap();
        sound(&image, format);
        let mount = Mount::new(&image, "ro,norecovery").unwrap();
        // Other formats have no fractions of seconds.
        let whole = |lines: &[String]| -> Vec<String> {
            let cut = |l: &String| match l.split_once('.') {
                Some((a, b)) if format == "gnu" => format!("{a} {}", &b[9..]),
                _ => l.clone(),
            };
            lines.iter().map(cut).collect()
        };
        same(&whole(&tree(mount.path())), &whole(&expected), format);
        if sparse.is_some() {
            let blocks = fs::metadata(mount.path().join("sparse")).unwrap().blocks();
            assert!(blocks <= 64, "{blocks} blocks of a sparse file");
        }
        drop(mount);
        fs::remove_file(&image).unwrap();
    }
}
