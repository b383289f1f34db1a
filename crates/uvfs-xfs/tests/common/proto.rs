//! Trees that mkfs.xfs itself puts into an image, from a prototype file: the way to images that
//! this machine's kernel cannot mount (version 4, case-insensitive names).

use super::{Image, entry_name, list, output, pattern};
use std::ffi::OsStr;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use uvfs_xfs::format::FileType;
use uvfs_xfs::{Error, Inode, Volume};

pub enum Node {
    Dir(Vec<(String, Node)>),
    File(Vec<u8>),
    Link(String),
    Device(char, u32, u32),
    Fifo,
}

/// A tree with directories of every form; with symbolic links that do not fit in an inode if asked.
pub fn tree(long_links: bool) -> Node {
    let dir = |count: usize| {
        let node = |i: usize| match i {
            _ if i % 7 == 3 => Node::Link(format!("target-{i}")),
            _ if i % 11 == 5 => Node::Fifo,
            _ if i % 13 == 7 => Node::Dir(vec![]),
            _ => Node::File(vec![]),
        };
        Node::Dir((0..count).map(|i| (entry_name(i), node(i))).collect())
    };
    let mut root: Vec<(String, Node)> = [0, 5, 60, 500, 3000]
        .into_iter()
        .map(|n| (format!("dir{n}"), dir(n)))
        .collect();
    for (i, len) in [0usize, 1, 511, 4096, 4097, 70_000].into_iter().enumerate() {
        root.push((format!("plain-{len}"), Node::File(pattern(i as u64, len))));
    }
    // mkfs.xfs of before 6.14 makes broken long links on version 5: keep to what fits in the inode.
    for len in [1usize, 60, 100]
        .into_iter()
        .chain(long_links.then_some([300, 500, 1000]).into_iter().flatten())
    {
        root.push((format!("link-{len}"), Node::Link("t".repeat(len))));
    }
    root.push(("char".into(), Node::Device('c', 5, 1)));
    root.push(("block".into(), Node::Device('b', 8, 200)));
    root.push(("X".repeat(255), Node::File(b"long".to_vec())));
    Node::Dir(root)
}

/// Writes the prototype of `node`, and the contents of its files into `dir`.
fn describe(out: &mut String, dir: &Path, name: &str, node: &Node) {
    let mut line = |s: std::fmt::Arguments<'_>| writeln!(out, "{name} {s}").unwrap();
    match node {
        Node::Dir(entries) => {
            line(format_args!("d--755 3 4"));
            for (name, node) in entries {
                describe(out, dir, name, node);
            }
            writeln!(out, "$").unwrap();
        }
        Node::File(bytes) if bytes.is_empty() => line(format_args!("---644 1 2 /dev/null")),
        Node::File(bytes) => {
            let from = dir.join(&name[..name.len().min(40)]);
            fs::write(&from, bytes).unwrap();
            line(format_args!("-u-751 1 2 {}", from.display()));
        }
        Node::Link(target) => line(format_args!("l--777 0 0 {target}")),
        Node::Device(kind, major, minor) => line(format_args!("{kind}--640 0 0 {major} {minor}")),
        Node::Fifo => line(format_args!("p--600 0 0")),
    }
}

/// Makes an image with `tree` in it. `None` if this mkfs does not know `args`.
pub fn make(args: &[&str], tree: &Node) -> Option<Image> {
    let image = Image::new();
    let mut text = String::from("-\n0 0\n");
    let mut body = String::new();
    describe(&mut body, image.dir(), "", tree);
    text.push_str(body.trim_start());
    let proto = image.dir().join("proto");
    fs::write(&proto, text).unwrap();
    let mut all = args.to_vec();
    all.extend(["-p", proto.to_str().unwrap()]);
    image.mkfs(&all).then_some(image)
}

/// Compares the volume with the tree it was made of. Gives the number of inodes compared.
pub fn compare(volume: &Volume, tree: &Node) -> usize {
    let mut count = 0;
    let mut todo = vec![(String::from("/"), volume.root().unwrap(), tree)];
    while let Some((path, inode, node)) = todo.pop() {
        count += 1;
        check(volume, &path, &inode, node);
        let Node::Dir(entries) = node else { continue };
        let listed = list(volume, &inode, 0);
        assert_eq!(listed.len(), entries.len() + 2, "{path}");
        for (name, child) in entries {
            let ino = volume.lookup(&inode, name.as_bytes()).unwrap_or_else(|e| {
                panic!("{path}{name}: {e}");
            });
            assert!(
                listed.iter().any(|e| e.0 == name.as_bytes() && e.1 == ino),
                "{path}{name}"
            );
            todo.push((format!("{path}{name}/"), volume.inode(ino).unwrap(), child));
        }
        assert!(matches!(
            volume.lookup(&inode, b"no-such"),
            Err(Error::NotFound("entry"))
        ));
    }
    count
}

fn check(volume: &Volume, path: &str, inode: &Inode, node: &Node) {
    let (kind, perm, owner) = match node {
        Node::Dir(_) => (FileType::Directory, 0o755, (3, 4)),
        Node::File(b) if b.is_empty() => (FileType::Regular, 0o644, (1, 2)),
        Node::File(_) => (FileType::Regular, 0o4751, (1, 2)),
        Node::Link(_) => (FileType::Symlink, 0o777, (0, 0)),
        Node::Device('c', ..) => (FileType::CharDevice, 0o640, (0, 0)),
        Node::Device(..) => (FileType::BlockDevice, 0o640, (0, 0)),
        Node::Fifo => (FileType::Fifo, 0o600, (0, 0)),
    };
    assert_eq!(inode.file_type(), kind, "{path}");
    assert_eq!(inode.mode & 0o7777, perm, "{path}");
    assert_eq!((inode.uid, inode.gid), owner, "{path}");
    match node {
        Node::File(bytes) => {
            let mut got = vec![1; bytes.len() + 10];
            let n = volume.read(inode, 0, &mut got).unwrap();
            assert!(got[..n] == bytes[..], "{path}: bytes");
        }
        Node::Link(target) => {
            assert_eq!(volume.readlink(inode).unwrap(), target.as_bytes(), "{path}");
        }
        Node::Device(_, major, minor) => assert_eq!(inode.rdev, (*major, *minor), "{path}"),
        Node::Dir(_) | Node::Fifo => {}
    }
}

/// Sets attributes with xfs_db and checks that they are read back: (name, length) pairs; the value
/// is the letter v throughout. Fields that xfs_db fails to set are left out. Gives how many were
/// set.
pub fn attributes(image: &Image, file: &str, attributes: &[(&str, usize)]) -> usize {
    let volume = image.open();
    let ino = volume.resolve(file.as_bytes(), false).unwrap().ino;
    let mut set = Vec::new();
    for (name, len) in attributes {
        let go_to = format!("inode {ino}");
        let command = format!("attr_set -v {len} {name}");
        let path = image.path();
        let args = ["-x", "-c", &go_to, "-c", &command].map(OsStr::new);
        let args: Vec<&OsStr> = args.into_iter().chain([path.as_os_str()]).collect();
        match output("xfs_db", &args) {
            Ok(o) if o.status.success() && o.stderr.is_empty() => set.push((*name, *len)),
            Ok(o) => eprintln!("xfs_db could not set {name} ({len} bytes): {}", o.status),
            Err(e) => eprintln!("xfs_db: {e}"),
        }
    }
    let volume = image.open();
    let inode = volume.inode(ino).unwrap();
    for (name, len) in &set {
        let value = volume
            .xattr(&inode, format!("user.{name}").as_bytes())
            .unwrap();
        assert!(value == vec![b'v'; *len], "{name}");
    }
    let mut names = 0;
    volume
        .xattr_names(&inode, &mut |_| {
            names += 1;
            true
        })
        .unwrap();
    assert_eq!(names, set.len());
    set.len()
}
