//! Comparing a volume with the kernel's mount of it.

use super::*;

/// Compares everything that the kernel shows under `root` with what the volume shows.
/// Gives the number of inodes compared.
pub fn compare(volume: &Volume, root: &Path) -> usize {
    compare_trees(volume, root, true)
}

/// The same; `exact` is whether forks' trees have to have as many blocks as the kernel's.
pub fn compare_trees(volume: &Volume, root: &Path, exact: bool) -> usize {
    let mut count = 0;
    let mut todo = vec![(PathBuf::new(), volume.root().unwrap())];
    assert_eq!(fs::metadata(root).unwrap().ino(), volume.geometry().rootino);
    while let Some((relative, inode)) = todo.pop() {
        let path = root.join(&relative);
        compare_inode(volume, &path, &inode, exact);
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

fn compare_inode(volume: &Volume, path: &Path, i: &Inode, exact: bool) {
    let name = path.display();
    let s = rfs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::ALL).unwrap();
    assert_eq!(s.stx_ino, i.ino, "{name}: inode");
    assert_eq!(s.stx_mode, i.mode, "{name}: mode");
    assert_eq!(s.stx_nlink, i.nlink, "{name}: links");
    assert_eq!((s.stx_uid, s.stx_gid), (i.uid, i.gid), "{name}: owner");
    assert_eq!(s.stx_size, i.size, "{name}: size");
    let blocks = i.nblocks << (volume.geometry().blocklog - 9);
    match exact {
        true => assert_eq!(s.stx_blocks, blocks, "{name}: blocks"),
        false if i.file_type() == FileType::Regular => compare_mapping(volume, path, i),
        false => {}
    }
    for (what, kernel, ours) in [
        ("atime", s.stx_atime, Some(i.atime)),
        ("mtime", s.stx_mtime, Some(i.mtime)),
        // The kernel changes it when it finishes a change of attributes.
        ("ctime", s.stx_ctime, exact.then_some(i.ctime)),
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

/// Compares where the data of a file is.
fn compare_mapping(volume: &Volume, path: &Path, i: &Inode) {
    let args = ["-r", "-c", "bmap -vp"].map(OsStr::new);
    let said = run("xfs_io", &[&args[..], &[path.as_os_str()]].concat());
    let number = |text: &str| {
        text.trim_matches(|c: char| !c.is_ascii_digit())
            .parse::<u64>()
    };
    // Sectors of the file and of the disk, of what is written.
    let theirs = said.lines().filter_map(|line| {
        let mut words = line.split_once(": [")?.1.split_whitespace();
        let (from, to) = words.next()?.split_once("..")?;
        let (from, to) = (number(from).ok()?, number(to).ok()?);
        let (at, _) = words.next()?.split_once("..")?;
        let flags = words.last()?;
        // The second flag is that of unwritten extents.
        (flags.len() < 6 || !flags.starts_with(['0', '1']) || &flags[1..2] == "0").then(|| {
            (
                from * 512,
                (to + 1 - from) * 512,
                at.parse::<u64>().unwrap() * 512,
            )
        })
    });
    let mut at = 0;
    let runs = volume.data_runs(i, 0, i.size as usize).unwrap();
    let ours = runs.iter().filter_map(|run| {
        let from = at;
        at += run.len as u64;
        Some((from, run.len as u64, run.device?))
    });
    let each = |(from, len, at): (u64, u64, u64)| {
        (0..len.min(i.size - from.min(i.size)).div_ceil(512))
            .map(move |k| (from + k * 512, at + k * 512))
    };
    let (theirs, ours): (Vec<_>, Vec<_>) = (
        theirs.flat_map(each).collect(),
        ours.flat_map(each).collect(),
    );
    let differs = theirs.iter().zip(&ours).find(|(a, b)| a != b);
    assert_eq!(differs, None, "{}: where bytes are on disk", path.display());
    assert_eq!(theirs.len(), ours.len(), "{}: {said}", path.display());
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
