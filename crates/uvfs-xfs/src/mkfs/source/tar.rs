//! Tar archives as a source.
//!
//! An archive has its members in any order and tells sizes only as it goes, so all of it is read first, into a
//! [`Tree`]. Members become what GNU tar makes of them as root (`--acls --xattrs --selinux --numeric-owner`); what it
//! would not extract, or what XFS can't hold, is refused by name. Unlike there, symbolic links on the way to a member
//! never lead out of the tree: an absolute target begins at its root. An archive may be compressed.

use super::member::{Member, Members};
use super::tree::{Body, Inode, ROOT, Refused, Tree};
use super::{Root, as_path};
use super::{compressed, oci};
use crate::format::SYMLINK_MAXLEN;
use crate::mkfs::MkfsError;
use std::io::Read;
use std::path::{Path, PathBuf};

/// An archive, and what messages call it.
pub struct Archive {
    /// Its path.
    pub name: PathBuf,
    /// Its bytes.
    pub from: Box<dyn Read + Send>,
}

/// Reads archives that lie on each other as the layers of an image do, or a single one, which may hold an image.
/// Contents go to a temporary file in the directory `beside`. `size` is that of the new file system if it is known.
///
/// # Errors
/// [`MkfsError::Source`], [`MkfsError::Unfit`] and [`MkfsError::NoSpace`], which name the member.
pub fn read(archives: Vec<Archive>, beside: &Path, size: Option<u64>) -> Result<Root, MkfsError> {
    let mut tree = Tree::new(beside, archives.len() > 1, size)?;
    for (i, archive) in archives.into_iter().enumerate() {
        add(&mut tree, archive.from, &archive.name)?;
        if !tree.may_be_image()? {
            continue;
        }
        let finished = tree.finish()?;
        let layers = oci::layers(&finished.root())?;
        tree = match (layers, finished.into_tree()) {
            (Some(_), _) if i > 0 => {
                let why = "an image of layers has to be the first source";
                return Err(MkfsError::unfit(archive.name, why));
            }
            (Some(layers), _) => layered(layers, beside, size)?,
            (None, tree) => tree.ok_or(MkfsError::Stopped)?,
        };
    }
    Ok(tree.finish()?.root())
}

/// Reads the layers of an image, the lowest first. As [`read`] else.
///
/// # Errors
/// As [`read`].
pub fn read_layers(
    layers: Vec<Archive>,
    beside: &Path,
    size: Option<u64>,
) -> Result<Root, MkfsError> {
    Ok(layered(layers, beside, size)?.finish()?.root())
}

fn layered(layers: Vec<Archive>, beside: &Path, size: Option<u64>) -> Result<Tree, MkfsError> {
    let mut tree = Tree::new(beside, true, size)?;
    for layer in layers {
        add(&mut tree, layer.from, &layer.name)?;
    }
    Ok(tree)
}

/// Adds a layer.
fn add(tree: &mut Tree, from: impl Read + Send + 'static, archive: &Path) -> Result<(), MkfsError> {
    tree.next_layer();
    let from = compressed::plain(from);
    let from = from.map_err(|e| MkfsError::source(archive.into(), "reading it", e))?;
    let mut members = Members::new(from);
    loop {
        let next = members.next().map_err(|(path, error)| {
            let path = if path.is_empty() {
                archive.into()
            } else {
                as_path(&path)
            };
            MkfsError::source(path, "reading it", error)
        })?;
        match next {
            Some(member) => add_member(tree, member, &mut members)?,
            None => return Ok(()),
        }
    }
}

/// The names on the way to a member, without "." and leading slashes; `None` if one is "..".
fn names(path: &[u8]) -> Option<Vec<&[u8]>> {
    let names: Vec<&[u8]> = path
        .split(|b| *b == b'/')
        .filter(|n| !n.is_empty() && *n != b".")
        .collect();
    let fits = |n: &&[u8]| *n != b".." && n.len() <= 255 && !n.contains(&0);
    names.iter().all(fits).then_some(names)
}

fn add_member(
    tree: &mut Tree,
    mut m: Member,
    contents: &mut Members<impl Read>,
) -> Result<(), MkfsError> {
    let path = std::mem::take(&mut m.path);
    let unfit = |why| MkfsError::unfit(as_path(&path), why);
    let refused = |why: Refused| why.of(as_path(&path));
    let all = names(&path).ok_or_else(|| unfit("a path with \"..\" or a long name"))?;
    if tree.has_whiteouts() && whiteout(tree, &all).map_err(refused)? {
        return Ok(());
    }
    let attrs = m.extended.attributes(m.meta.mode);
    let mut inode = Inode {
        meta: m.meta,
        attrs,
        body: Body::Special,
    };
    let Some((name, above)) = all.split_last() else {
        // GNU tar skips members without a name.
        return match inode.meta.is_dir() {
            true => {
                tree.describe(inode);
                Ok(())
            }
            false if path.is_empty() => Ok(()),
            false => Err(unfit("a root that is no directory")),
        };
    };
    let above = tree.directory(above, true).map_err(refused)?;
    let above = above.unwrap_or(ROOT);
    match inode.meta.mode & 0o170_000 {
        0 => {
            // The kernel finds no file under a name with a slash behind it.
            let to = names(&m.link).filter(|_| !m.link.ends_with(b"/"));
            let to = to.map(|n| tree.file(&n)).transpose();
            let to = to.map_err(refused)?.flatten();
            let to = to.ok_or_else(|| unfit("a hard link to nothing that came before"))?;
            return tree.link(above, name, &to).map_err(refused);
        }
        0o040_000 => {
            inode.body = Body::Directory;
            return tree.put_directory(above, name, &inode).map_err(refused);
        }
        0o100_000 => {
            let sparse = &mut m.extended.sparse;
            let map = sparse.parts(contents);
            let map = map.map_err(|error| {
                MkfsError::source(as_path(&path), "reading where its holes are", error)
            })?;
            let holes = map.is_some();
            if holes {
                inode.meta.size = sparse.size.unwrap_or(inode.meta.size);
            }
            let map = map.unwrap_or_else(|| vec![(0, inode.meta.size)]);
            let stored = map.iter().map(|(_, len)| len).sum::<u64>();
            if holes && stored > contents.left() {
                return Err(unfit("there is less of it than between its holes"));
            }
            inode.body = Body::File(tree.store(contents, &map, || as_path(&path))?, holes);
        }
        0o120_000 if m.link.is_empty() || m.link.len() >= SYMLINK_MAXLEN => {
            let why = "XFS has targets of symbolic links from 1 to 1023 bytes";
            return Err(unfit(why));
        }
        0o120_000 => inode.body = Body::Symlink(m.link.into()),
        _ => {}
    }
    tree.put(above, name, &inode).map_err(refused)?;
    Ok(())
}

/// Takes a member that says what a layer removes (image-spec, "Whiteouts"); gives whether this is one.
fn whiteout(tree: &mut Tree, names: &[&[u8]]) -> Result<bool, Refused> {
    const PREFIX: &[u8] = b".wh.";
    // Of AUFS, which these names come from: about itself.
    let own = |n: &&[u8]| n.starts_with(b".wh..wh.") && *n != b".wh..wh..opq";
    if names.iter().any(own) {
        return Ok(true);
    }
    let Some((name, above)) = names.split_last() else {
        return Ok(false);
    };
    let Some(hidden) = name.strip_prefix(PREFIX) else {
        return Ok(false);
    };
    if matches!(hidden, b"" | b"." | b"..") {
        return Err("it removes nothing that has a name".into());
    }
    if let Some(above) = tree.directory(above, false)? {
        match hidden {
            b".wh..opq" => tree.opaque(above)?,
            _ => tree.whiteout(above, hidden)?,
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mkfs::source::SourceEntry;
    use tar::EntryType;

    /// An archive names no files outside of the new image's root.
    #[test]
    fn names_stay_inside() {
        assert_eq!(names(b"./a//b/"), Some(vec![&b"a"[..], b"b"]));
        assert_eq!(names(b"/etc"), Some(vec![&b"etc"[..]]));
        assert_eq!(names(b"a/../b"), None);
    }

    fn header(kind: EntryType) -> tar::Header {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        header.set_uid(7);
        header.set_gid(7);
        header.set_mtime(0);
        header.set_entry_type(kind);
        header
    }

    const DIR: EntryType = EntryType::Directory;
    const FILE: EntryType = EntryType::Regular;
    const LINK: EntryType = EntryType::Symlink;
    const HARD: EntryType = EntryType::Link;

    /// An archive of members: `a/` is a directory, `a>b` a symbolic link, `a=b` a hard link, and `a` a file of five
    /// bytes, or without any where it is a whiteout.
    fn made(members: &str) -> Vec<u8> {
        let mut to = tar::Builder::new(Vec::new());
        for member in members.split_whitespace() {
            let (name, kind, target) = match (member.split_once('>'), member.split_once('=')) {
                (Some((name, target)), _) => (name, LINK, target),
                (_, Some((name, target))) => (name, HARD, target),
                _ if member.ends_with('/') => (member.trim_end_matches('/'), DIR, ""),
                _ => (member, FILE, ""),
            };
            let is_empty = kind != FILE || name.contains(".wh.");
            let contents = if is_empty { &b""[..] } else { b"12345" };
            let mut header = header(kind);
            header.set_size(contents.len() as u64);
            header.set_link_name_literal(target).unwrap();
            to.append_data(&mut header, name, contents).unwrap();
        }
        to.into_inner().unwrap()
    }

    /// An archive of one file, with extended headers.
    fn archive(headers: &[(&str, &[u8])], uid: u64) -> Vec<u8> {
        let mut to = tar::Builder::new(Vec::new());
        to.append_pax_extensions(headers.iter().copied()).unwrap();
        let mut header = header(FILE);
        header.set_size(5);
        header.set_uid(uid);
        to.append_data(&mut header, "file", &b"12345"[..]).unwrap();
        to.into_inner().unwrap()
    }

    fn reading(archives: &[&[u8]]) -> Result<Root, MkfsError> {
        let archive = |bytes: &&[u8]| Archive {
            name: "archive".into(),
            from: Box::new(std::io::Cursor::new(bytes.to_vec())),
        };
        let archives = archives.iter().map(archive).collect();
        read(archives, &std::env::temp_dir(), None)
    }

    /// All paths, those of directories with a slash.
    fn paths(root: &Root) -> Vec<String> {
        let mut out = Vec::new();
        let mut todo = vec![root.dir.clone()];
        while let Some(dir) = todo.pop() {
            for SourceEntry { name, meta, .. } in dir.list().unwrap() {
                let path = dir.path(&name).display().to_string();
                if meta.is_dir() {
                    todo.push(dir.clone().enter(&name).unwrap().unwrap());
                }
                out.push(path + if meta.is_dir() { "/" } else { "" });
            }
        }
        out.sort();
        out
    }

    /// The output of a program that failed is no archive: nothing at all, or one without its end.
    #[test]
    fn an_archive_needs_its_end() {
        let whole = archive(&[], 0);
        let read = |bytes| reading(&[bytes]);
        assert_eq!(read(&whole).unwrap().dir.list().unwrap().len(), 1);
        // Without a member, and with one block of the end, as some programs write it.
        read(&[0; 1024]).unwrap();
        read(&whole[..whole.len() - 512]).unwrap();
        for len in [0, 100, 512, 700, whole.len() - 1024] {
            assert!(read(&whole[..len]).is_err(), "{len} bytes");
        }
        let mut damaged = whole.clone();
        damaged[3] ^= 1;
        let error = read(&damaged).err().unwrap().to_string();
        assert!(error.contains("no tar archive"), "{error}");
    }

    /// Contents that no archive can have are found missing.
    #[test]
    fn sizes_have_no_bound() {
        for size in [u64::MAX, u64::MAX - 1, i64::MAX as u64, 1 << 40] {
            let size = size.to_string();
            for keyword in ["size", "GNU.sparse.realsize"] {
                let headers = [("GNU.sparse.major", &b"1"[..]), (keyword, size.as_bytes())];
                let error = reading(&[&archive(&headers, 0)]).err().unwrap();
                assert!(matches!(error, MkfsError::Source { .. }), "{error}");
            }
        }
    }

    /// Owners that XFS has no number for are refused.
    #[test]
    fn owners_fit() {
        let owner = |headers: &[(&str, &[u8])], uid| {
            let root = reading(&[&archive(headers, uid)])?;
            Ok::<_, MkfsError>(root.dir.list()?[0].meta.uid)
        };
        assert_eq!(owner(&[], 7).unwrap(), 7);
        assert_eq!(owner(&[("uid", b"4294967294")], 7).unwrap(), u32::MAX - 1);
        assert_eq!(owner(&[("uid", b"5")], 1 << 32).unwrap(), 5);
        assert!(owner(&[("uid", b"4294967295")], 7).is_err());
        assert!(owner(&[("uid", b"4294967296")], 7).is_err());
        assert!(owner(&[("gid", b"many")], 7).is_err());
        assert!(owner(&[], 1 << 32).is_err());
    }

    /// Names end at a NUL, as they do for the kernel; a keyword that has one is malformed.
    #[test]
    fn names_have_no_nul() {
        let root = reading(&[&archive(&[("path", b"name\0more")], 7)]).unwrap();
        assert_eq!(*root.dir.list().unwrap()[0].name, *b"name");
        let link = [("path", &b"link"[..]), ("linkpath", b"target\0more")];
        let mut to = tar::Builder::new(Vec::new());
        to.append_pax_extensions(link).unwrap();
        to.append_data(&mut header(LINK), "link", &b""[..]).unwrap();
        let root = reading(&[&to.into_inner().unwrap()]).unwrap();
        assert_eq!(*root.dir.list().unwrap()[0].target, *b"target");
        assert!(reading(&[&archive(&[("SCHILY.xattr.user.a\0b", b"v")], 7)]).is_err());
        assert!(reading(&[&archive(&[("path", b"\0more")], 7)]).is_err());
    }

    /// The archives as layers, from the lowest on, have these paths in the end.
    #[track_caller]
    fn layers<const N: usize>(all: [&str; N], expected: &str) {
        let all = all.map(made);
        let root = reading(&all.each_ref().map(Vec::as_slice)).unwrap();
        assert_eq!(paths(&root).join(" "), expected);
    }

    /// Whiteouts remove what lower layers have, wherever they come in their own.
    #[test]
    fn whiteouts_remove_what_is_below() {
        let lower = "d/a d/b e/f/g";
        layers([lower, "d/.wh.a"], "d/ d/b e/ e/f/ e/f/g");
        layers([lower, ".wh.d"], "e/ e/f/ e/f/g");
        layers([lower, ".wh.none x/.wh.y .wh.e"], "d/ d/a d/b");
        layers([lower, ".wh..wh..opq n"], "n");
        layers([lower, "n d/.wh..wh..opq .wh.e"], "d/ n");
        // The layer itself has something of that name: before and after.
        let again = "d/ d/c e/ e/f/ e/f/g";
        layers([lower, "d/c .wh.d"], again);
        layers([lower, ".wh.d d/c"], again);
        layers([lower, "d/c d/.wh..wh..opq"], again);
        layers([lower, "d/ d/.wh..wh..opq d/c"], again);
        // A whiteout that is a hard link, and what AUFS has for itself.
        layers([lower, ".wh.d=e/f/g .wh..wh.plnk/5.6"], "e/ e/f/ e/f/g");
        // In a single archive they are names like any other.
        layers([".wh.x"], ".wh.x");
        for wrong in [".wh.", "d/.wh..", ".wh..."] {
            assert!(reading(&[&made(lower), &made(wrong)]).is_err(), "{wrong}");
        }
    }

    /// Members of a layer replace what has another type, and go below what links lead to.
    #[test]
    fn layers_replace_other_types() {
        let lower = "d/a l>d f";
        layers([lower, "d"], "d f l");
        layers([lower, "f/x"], "d/ d/a f/ f/x l");
        layers([lower, "l/x"], "d/ d/a d/x f l");
        layers([lower, "l/ l/x"], "d/ d/a f l/ l/x");
        layers([lower, "l/ l/.wh..wh..opq"], "d/ d/a f l/");
        layers([lower, "h=d/a .wh.d"], "f h l");
        layers(["l>../../x/y", "l/z"], "l x/ x/y/ x/y/z");
    }

    /// Parents of a member that a whiteout removes are made again, whichever comes first.
    #[test]
    fn what_a_whiteout_removes_is_made_again() {
        let (lower, expected) = ("a/b/x c", "a/ a/b/ a/b/c/ a/b/c/d c");
        layers([lower, "a/.wh.b a/b/c/d"], expected);
        layers([lower, "a/b/c/d a/.wh.b"], expected);
        layers([lower, ".wh.c c/d"], "a/ a/b/ a/b/x c/ c/d");
    }

    /// Of a single archive, what GNU tar would not extract is refused.
    #[test]
    fn what_has_no_place_is_refused() {
        for wrong in [
            "d/a d",
            "f f/x",
            "l>none l/x",
            "l>l l/x",
            "h=none",
            "d/a h=d",
            "h=h",
        ] {
            assert!(reading(&[&made(wrong)]).is_err(), "{wrong}");
        }
        layers(["l>/ l/x"], "l x");
        layers(["d/ d"], "d");
        layers(["a l>. h=l/l/a h=h"], "a h l");
    }

    /// A short archive does not fill the disk: its contents and names have to fit into the file system.
    #[test]
    fn archives_are_bounded() {
        let within = |size| {
            let mut tree = Tree::new(&std::env::temp_dir(), false, Some(size)).unwrap();
            let archive = std::io::Cursor::new(made("a b"));
            add(&mut tree, archive, Path::new("archive"))
        };
        within(20).unwrap();
        for size in [19, 9] {
            let error = within(size).err().unwrap();
            assert!(matches!(error, MkfsError::NoSpace { .. }), "{error}");
        }
    }
}
