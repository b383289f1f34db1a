//! Random trees are made, and read back.

use super::*;

/// A file of a random tree.
#[derive(Debug, Clone)]
struct Node {
    name: Vec<u8>,
    kind: Kind,
    mode: u32,
    attrs: Vec<(String, usize)>,
}

#[derive(Debug, Clone)]
enum Kind {
    /// Pieces: how far from the one before, and how long.
    File(Vec<(u64, usize)>),
    Link(usize),
    Dir(Vec<Node>),
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(
        any::<u8>().prop_filter("a name", |b| !matches!(b, 0 | b'/')),
        1..=255,
    )
    .prop_filter("a name", |n| n != b"." && n != b"..")
}

fn node() -> impl Strategy<Value = Node> {
    let leaf = prop_oneof![
        prop::collection::vec((0u64..200_000, 1usize..70_000), 0..4).prop_map(Kind::File),
        (1usize..1023).prop_map(Kind::Link),
    ];
    let attrs = || prop::collection::vec(("[a-z]{1,100}", 0usize..5000), 0..6);
    let with = move |kind| {
        (name(), kind, 0u32..0o1000, attrs()).prop_map(|(name, kind, mode, attrs)| Node {
            name,
            kind,
            mode: mode | 0o600,
            attrs,
        })
    };
    with(leaf.boxed()).prop_recursive(3, 40, 12, move |inner| {
        with(
            prop::collection::vec(inner, 0..12)
                .prop_map(Kind::Dir)
                .boxed(),
        )
    })
}

fn build(at: &Path, nodes: &[Node]) {
    for n in nodes {
        let path = at.join(std::ffi::OsStr::from_bytes(&n.name));
        if fs::symlink_metadata(&path).is_ok() {
            continue;
        }
        match &n.kind {
            Kind::File(pieces) => {
                let file = fs::File::create(&path).unwrap();
                let mut at = 0;
                for (skip, len) in pieces {
                    at += skip;
                    let bytes = pattern(at, *len);
                    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, at).unwrap();
                    at += *len as u64;
                }
            }
            Kind::Link(len) => {
                symlink("t".repeat(*len), &path).unwrap();
                continue;
            }
            Kind::Dir(below) => {
                fs::create_dir(&path).unwrap();
                build(&path, below);
            }
        }
        for (name, len) in &n.attrs {
            let value = pattern(*len as u64, *len);
            // Not every file system has (so many of) them.
            let none = rustix::fs::XattrFlags::empty();
            let _ = rustix::fs::lsetxattr(&path, format!("user.{name}"), &value, none);
        }
        let mode = if path.is_dir() {
            n.mode | 0o700
        } else {
            n.mode
        };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
}

/// Compares a directory of the host with one of the image, by the reader.
fn compare(v: &Volume, host: &Path, dir: &Inode) {
    let mut found = Vec::new();
    v.readdir(dir, 0, &mut |e| {
        if e.name != b"." && e.name != b".." {
            found.push((e.name.to_vec(), e.ino));
        }
        true
    })
    .unwrap();
    found.sort();
    let mut expected: Vec<_> = fs::read_dir(host)
        .unwrap()
        .map(|e| e.unwrap().file_name().as_bytes().to_vec())
        .collect();
    expected.sort();
    let names: Vec<_> = found.iter().map(|(n, _)| n.clone()).collect();
    assert_eq!(names, expected, "{}", host.display());
    for (name, ino) in found {
        assert_eq!(v.lookup(dir, &name).unwrap(), ino);
        let path = host.join(std::ffi::OsStr::from_bytes(&name));
        let inode = v.inode(ino).unwrap();
        let m = fs::symlink_metadata(&path).unwrap();
        assert_eq!(u32::from(inode.mode), m.mode(), "{}", path.display());
        assert_eq!(
            (inode.mtime.sec, inode.mtime.nsec.into()),
            (m.mtime(), m.mtime_nsec())
        );
        if m.is_dir() {
            compare(v, &path, &inode);
        } else if m.is_symlink() {
            let target = fs::read_link(&path).unwrap();
            assert_eq!(v.readlink(&inode).unwrap(), target.as_os_str().as_bytes());
        } else {
            let expected = fs::read(&path).unwrap();
            let mut bytes = vec![0; expected.len()];
            assert_eq!(inode.size, expected.len() as u64);
            assert_eq!(v.read(&inode, 0, &mut bytes).unwrap(), expected.len());
            assert!(bytes == expected, "{}", path.display());
        }
        let mut names = vec![0u8; 1 << 16];
        let n = rustix::fs::llistxattr(&path, &mut names).unwrap_or(0);
        for name in names[..n]
            .split(|b| *b == 0)
            .filter(|n| n.starts_with(b"user."))
        {
            let mut value = vec![0u8; 1 << 16];
            let n = rustix::fs::lgetxattr(&path, name, &mut value).unwrap();
            assert_eq!(v.xattr(&inode, name).unwrap(), &value[..n]);
        }
    }
}

/// An image made from any tree holds the tree's contents.
#[test]
fn random_trees_are_read_back() {
    let cases = if uvfs_testing::full() { 400 } else { 25 };
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 200,
        ..Config::default()
    };
    let blocks = prop_oneof![Just(4096u32), Just(1024), Just(65536)];
    let trees = (prop::collection::vec(node(), 0..20), blocks);
    TestRunner::new(config)
        .run(&trees, |(nodes, block_size)| {
            let dir = scratch();
            let source = dir.path().join("source");
            fs::create_dir(&source).unwrap();
            build(&source, &nodes);
            let image = dir.path().join("image");
            let options = MkfsOptions {
                block_size,
                ..MkfsOptions::default()
            };
            make(&image, &options, From::Directory(source.clone())).unwrap();
            assert_eq!(findings(&image), Vec::<String>::new());
            let v = Volume::open(Arc::new(FileBlocks::open(&image).unwrap())).unwrap();
            compare(&v, &source, &v.root().unwrap());
            Ok(())
        })
        .unwrap();
}

/// Of an archive of any bytes mkfs makes a sound image, or none.
#[test]
fn random_archives_are_refused_or_become_sound_images() {
    let cases = if uvfs_testing::full() { 100_000 } else { 3000 };
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 200,
        ..Config::default()
    };
    let dir = scratch();
    let image = dir.path().join("image");
    let made = std::cell::Cell::new(0);
    TestRunner::new(config)
        .run(&prop::collection::vec(any::<u8>(), 0..400), |bytes| {
            members::read(&bytes);
            Ok(())
        })
        .unwrap();
    let config = Config {
        cases: cases / 10,
        failure_persistence: None,
        ..Config::default()
    };
    let few = prop::collection::vec(any::<u8>(), 0..40);
    TestRunner::new(config)
        .run(&few, |bytes| {
            let from = From::Archives(members::from_bytes(&bytes));
            if make(&image, &MkfsOptions::default(), from).is_ok() {
                assert_eq!(findings(&image), Vec::<String>::new());
                fs::remove_file(&image).unwrap();
                made.set(made.get() + 1);
            }
            Ok(())
        })
        .unwrap();
    assert!(made.get() > cases / 100, "{} images", made.get());
}
