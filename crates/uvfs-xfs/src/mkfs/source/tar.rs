//! A tar archive as a source.
//!
//! An archive has its members in any order and tells sizes only as it goes, so all of it is read
//! first: names and attributes into memory, contents into a temporary file without a name.

use super::sparse::Sparse;
use super::{Data, Meta, Root, SourceDir, SourceEntry, SourceReader, Time, as_path};
use crate::bulk::attr::NewAttr;
use crate::mkfs::MkfsError;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tar::{Archive, EntryType};

/// The name of the archive in messages.
const NAME: &str = "the tar archive";
/// The unit in which zeros of a sparse member become holes.
const GRAIN: usize = 4096;

/// Where the contents of a member are: offset, length, offset in the temporary file.
type Parts = Vec<(u64, u64, u64)>;

/// A member, or a directory that members lie in.
#[derive(Debug, Default)]
struct Node {
    meta: Meta,
    attrs: Vec<NewAttr>,
    target: Box<[u8]>,
    parts: Parts,
    sparse: bool,
    names: u32,
    below: BTreeMap<Box<[u8]>, usize>,
}

#[derive(Debug)]
struct TarTree {
    nodes: Vec<Node>,
    contents: Arc<File>,
    /// Bytes in that file.
    end: u64,
}

#[derive(Debug)]
struct TarDir {
    tree: Arc<TarTree>,
    node: usize,
    path: PathBuf,
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> MkfsError {
    move |error| MkfsError::source(NAME.into(), what, error)
}

fn directory() -> Node {
    Node {
        meta: Meta::directory(Time::default()),
        names: 1,
        ..Node::default()
    }
}

/// Reads an archive. Contents go to a temporary file in the directory `beside`.
///
/// # Errors
/// [`MkfsError::Source`] and [`MkfsError::Unfit`], which name the member.
pub fn read(archive: impl Read, beside: &Path) -> Result<Root, MkfsError> {
    let contents = tempfile::tempfile_in(beside).map_err(failed("making a temporary file"))?;
    let mut tree = TarTree {
        nodes: vec![directory()],
        contents: Arc::new(contents),
        end: 0,
    };
    let mut archive = Archive::new(Input {
        from: archive,
        bytes: 0,
        zeros: 0,
    });
    for member in archive.entries().map_err(failed("reading it"))? {
        tree.add(member.map_err(failed("reading it"))?)?;
    }
    let rest = archive.into_inner().finish();
    rest.map_err(failed("reading it"))?;
    let (meta, attrs) = (tree.nodes[0].meta.clone(), tree.nodes[0].attrs.clone());
    let dir = TarDir {
        tree: Arc::new(tree),
        node: 0,
        path: PathBuf::new(),
    };
    Ok(Root {
        dir: Arc::new(dir),
        meta,
        attrs,
    })
}

/// An archive on its way in. A program that fails while it writes one into a pipe leaves it without its end, which is
/// not to be taken for a whole one.
struct Input<R> {
    from: R,
    bytes: u64,
    /// Bytes since the last one that was not zero.
    zeros: u64,
}

impl<R: Read> Input<R> {
    /// Reads what follows the last member: an end of two blocks of zeros, and padding, until the writer is done.
    fn finish(mut self) -> io::Result<()> {
        const END: u64 = 2 * 512;
        let why = match self.bytes {
            0 => "it is empty; did the program that writes it fail?",
            // The first block of zeros ended the reading of members.
            _ if self.zeros < END / 2 => "it has no end; did the program that writes it fail?",
            _ => return io::copy(&mut self, &mut io::sink()).map(drop),
        };
        Err(io::Error::new(io::ErrorKind::UnexpectedEof, why))
    }
}

impl<R: Read> Read for Input<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.from.read(buf)?;
        self.bytes += n as u64;
        self.zeros = match buf[..n].iter().rposition(|b| *b != 0) {
            None => self.zeros + n as u64,
            Some(last) => (n - 1 - last) as u64,
        };
        Ok(n)
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

/// Decimal seconds with a fraction, as PAX headers have times.
fn pax_time(text: &str) -> Option<Time> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let sec: i64 = whole.parse().ok()?;
    let nsec: u32 = format!("{fraction:0<9.9}").parse().ok()?;
    Some(match whole.starts_with('-') && nsec > 0 {
        true => Time {
            sec: sec - 1,
            nsec: 1_000_000_000 - nsec,
        },
        false => Time { sec, nsec },
    })
}

/// The type that a member's inode has; none for a further name of one.
fn type_bits(kind: EntryType) -> Option<u16> {
    Some(match kind {
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => 0o100_000,
        EntryType::Link => 0,
        EntryType::Symlink => 0o120_000,
        EntryType::Char => 0o020_000,
        EntryType::Block => 0o060_000,
        EntryType::Directory => 0o040_000,
        EntryType::Fifo => 0o010_000,
        _ => return None,
    })
}

/// An owner that the format has no number for.
fn no_owner() -> io::Error {
    let why = "XFS has owners and groups from 0 to 4294967295";
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Takes a member's extended headers: times, owners, attributes and holes.
fn extended(
    m: &mut tar::Entry<'_, impl Read>,
    meta: &mut Meta,
    attrs: &mut Vec<NewAttr>,
    sparse: &mut Sparse,
) -> io::Result<()> {
    let mut accessed = None;
    for x in m.pax_extensions()?.into_iter().flatten() {
        let x = x?;
        let key = x.key_bytes();
        let text = std::str::from_utf8(x.value_bytes()).unwrap_or("");
        match key {
            b"mtime" => {
                if let Some(t) = pax_time(text) {
                    (meta.mtime, meta.ctime, meta.crtime) = (t, t, t);
                }
            }
            b"atime" => accessed = pax_time(text),
            b"uid" => meta.uid = text.parse().map_err(|_| no_owner())?,
            b"gid" => meta.gid = text.parse().map_err(|_| no_owner())?,
            _ => match key.strip_prefix(b"SCHILY.xattr.") {
                Some(name) => {
                    let attr = super::host::attribute(name, x.value_bytes());
                    let invalid = |why| io::Error::new(io::ErrorKind::InvalidData, why);
                    attrs.extend(attr.map_err(invalid)?);
                }
                None => sparse.take(key, x.value_bytes())?,
            },
        }
    }
    meta.atime = accessed.unwrap_or(meta.mtime);
    super::host::sort_attributes(attrs);
    Ok(())
}

impl TarTree {
    /// The directory that these names lead to, made where it is missing.
    fn directory(&mut self, names: &[&[u8]]) -> Option<usize> {
        let mut at = 0;
        for name in names {
            at = match self.nodes[at].below.get(*name) {
                Some(next) => *next,
                None => {
                    let next = self.nodes.len();
                    self.nodes.push(directory());
                    self.nodes[at].below.insert((*name).into(), next);
                    next
                }
            };
            if !self.nodes[at].meta.is_dir() {
                return None;
            }
        }
        Some(at)
    }

    fn find(&self, names: &[&[u8]]) -> Option<usize> {
        let mut at = 0;
        for name in names {
            at = *self.nodes[at].below.get(*name)?;
        }
        Some(at)
    }

    fn add(&mut self, mut m: tar::Entry<'_, impl Read>) -> Result<(), MkfsError> {
        let path = m.path_bytes().into_owned();
        let shown = || as_path(&path);
        let bad = |error: io::Error| MkfsError::source(as_path(&path), "reading it", error);
        let unfit = |why| MkfsError::unfit(as_path(&path), why);
        let kind = m.header().entry_type();
        let link = m.link_name_bytes().map(|l| l.into_owned());
        let header = m.header();
        let mtime = Time {
            sec: header.mtime().map_err(bad)? as i64,
            nsec: 0,
        };
        // A header about the archive.
        if kind == EntryType::XGlobalHeader {
            return Ok(());
        }
        let type_bits =
            type_bits(kind).ok_or_else(|| unfit("a kind of member that is not known"))?;
        let rdev = match kind {
            EntryType::Char | EntryType::Block => (
                header.device_major().map_err(bad)?.unwrap_or(0),
                header.device_minor().map_err(bad)?.unwrap_or(0),
            ),
            _ => (0, 0),
        };
        let (uid, gid) = (header.uid().map_err(bad)?, header.gid().map_err(bad)?);
        // A header that gives the number again overrides what does not fit here.
        let narrow = |id: u64| u32::try_from(id).unwrap_or(u32::MAX);
        let mut meta = Meta {
            mode: type_bits | (header.mode().map_err(bad)? as u16 & 0o7777),
            uid: narrow(uid),
            gid: narrow(gid),
            size: m.size(),
            rdev,
            atime: mtime,
            mtime,
            ctime: mtime,
            crtime: mtime,
            flags: 0,
        };
        let (mut attrs, mut sparse) = (Vec::new(), Sparse::default());
        extended(&mut m, &mut meta, &mut attrs, &mut sparse).map_err(bad)?;
        let outside = |id: u64, now: u32| id > u64::from(u32::MAX) && now == u32::MAX;
        if outside(uid, meta.uid) || outside(gid, meta.gid) {
            return Err(bad(no_owner()));
        }
        let path = sparse.name.take().map_or(path.clone(), Vec::from);
        let names_of = names(&path).ok_or_else(|| unfit("a path with \"..\" or a long name"))?;
        let Some((name, above)) = names_of.split_last() else {
            // The root itself.
            if meta.is_dir() {
                (self.nodes[0].meta, self.nodes[0].attrs) = (meta, attrs);
            }
            return Ok(());
        };
        let above = self.directory(above);
        let above = above.ok_or_else(|| unfit("it lies in something that is no directory"))?;
        if kind == EntryType::Link {
            let to = link.unwrap_or_default();
            let to = names(&to).and_then(|n| self.find(&n));
            let to = to.filter(|n| !self.nodes[*n].meta.is_dir());
            let to = to.ok_or_else(|| unfit("a hard link to nothing that came before"))?;
            self.put(above, name, to);
            self.nodes[to].names += 1;
            return Ok(());
        }
        if meta.is_dir()
            && let Some(&old) = self.nodes[above].below.get(*name)
            && self.nodes[old].meta.is_dir()
        {
            (self.nodes[old].meta, self.nodes[old].attrs) = (meta, attrs);
            return Ok(());
        }
        let regular = type_bits == 0o100_000;
        let failed = |error| MkfsError::source(shown(), "reading its contents", error);
        let mut holes = kind == EntryType::GNUSparse;
        let parts = match regular {
            true => match sparse.parts(&mut m).map_err(failed)? {
                Some(map) => {
                    holes = true;
                    meta.size = sparse.size.unwrap_or(meta.size);
                    self.store_parts(&mut m, &map)
                }
                None => self.store(&mut m, holes),
            }
            .map_err(failed)?,
            false => Vec::new(),
        };
        let node = self.nodes.len();
        self.nodes.push(Node {
            meta: Meta {
                size: if regular { meta.size } else { 0 },
                ..meta
            },
            attrs,
            target: match kind {
                EntryType::Symlink => link.unwrap_or_default().into(),
                _ => Box::default(),
            },
            parts,
            sparse: holes,
            ..directory()
        });
        self.put(above, name, node);
        Ok(())
    }

    /// Gives a node a name; what had the name before loses it.
    fn put(&mut self, above: usize, name: &[u8], node: usize) {
        if let Some(old) = self.nodes[above].below.insert(name.into(), node) {
            self.nodes[old].names -= 1;
        }
    }

    /// Copies the parts of a member that are there to the temporary file.
    fn store_parts(&mut self, m: &mut impl Read, map: &[(u64, u64)]) -> io::Result<Parts> {
        let mut parts = Vec::with_capacity(map.len());
        let mut buf = vec![0; 256 << 10];
        for (at, len) in map {
            parts.push((*at, *len, self.end));
            let mut left = *len;
            while left > 0 {
                let n = left.min(buf.len() as u64) as usize;
                m.read_exact(&mut buf[..n])?;
                self.contents.write_all_at(&buf[..n], self.end)?;
                (left, self.end) = (left - n as u64, self.end + n as u64);
            }
        }
        Ok(parts)
    }

    /// Copies a member's contents to the temporary file.
    fn store(&mut self, m: &mut impl Read, sparse: bool) -> io::Result<Parts> {
        let mut parts = Parts::new();
        let mut buf = vec![0; 256 << 10];
        let mut at = 0;
        loop {
            let mut n = 0;
            while n < buf.len() {
                match m.read(&mut buf[n..])? {
                    0 => break,
                    more => n += more,
                }
            }
            if n == 0 {
                return Ok(parts);
            }
            let grain = if sparse { GRAIN } else { buf.len() };
            for part in buf[..n].chunks(grain) {
                let len = part.len() as u64;
                if !sparse || part.iter().any(|b| *b != 0) {
                    self.contents.write_all_at(part, self.end)?;
                    match parts.last_mut() {
                        Some((start, had, _)) if *start + *had == at => *had += len,
                        _ => parts.push((at, len, self.end)),
                    }
                    self.end += len;
                }
                at += len;
            }
        }
    }
}

impl SourceDir for TarDir {
    fn list(&self) -> Result<Vec<SourceEntry>, MkfsError> {
        let below = &self.tree.nodes[self.node].below;
        let entries = below.iter().map(|(name, node)| {
            let n = &self.tree.nodes[*node];
            SourceEntry {
                name: name.clone(),
                meta: n.meta.clone(),
                links: (n.names > 1).then_some((0, *node as u64)),
                attrs: n.attrs.clone(),
                target: n.target.clone(),
                data: match n.sparse {
                    true => Data::Runs(n.parts.iter().map(|p| (p.0, p.1)).collect()),
                    false => Data::Dense,
                },
            }
        });
        Ok(entries.collect())
    }

    fn enter(self: Arc<Self>, name: &[u8]) -> Result<Option<Arc<dyn SourceDir>>, MkfsError> {
        let node = self.node_of(name)?;
        Ok(Some(Arc::new(TarDir {
            tree: self.tree.clone(),
            node,
            path: self.path(name),
        })))
    }

    fn open(&self, name: &[u8]) -> Result<Option<SourceReader>, MkfsError> {
        let node = self.node_of(name)?;
        Ok(Some(SourceReader::Parts {
            file: self.tree.contents.clone(),
            parts: self.tree.nodes[node].parts.as_slice().into(),
        }))
    }

    fn path(&self, name: &[u8]) -> PathBuf {
        match name.is_empty() {
            true => self.path.clone(),
            false => self.path.join(as_path(name)),
        }
    }
}

impl TarDir {
    fn node_of(&self, name: &[u8]) -> Result<usize, MkfsError> {
        let node = self.tree.nodes[self.node].below.get(name);
        let missing = || {
            let error = io::ErrorKind::NotFound.into();
            MkfsError::source(self.path(name), "opening it", error)
        };
        node.copied().ok_or_else(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files from an archive get its times, with fractions.
    #[test]
    fn times_have_fractions() {
        let t = |sec, nsec| Some(Time { sec, nsec });
        assert_eq!(pax_time("12.5"), t(12, 500_000_000));
        assert_eq!(pax_time("12"), t(12, 0));
        assert_eq!(pax_time("-1.25"), t(-2, 750_000_000));
        assert_eq!(pax_time("1.1234567891"), t(1, 123_456_789));
        assert_eq!(pax_time("x"), None);
    }

    /// An archive names no files outside of the new image's root.
    #[test]
    fn names_stay_inside() {
        assert_eq!(names(b"./a//b/"), Some(vec![&b"a"[..], b"b"]));
        assert_eq!(names(b"/etc"), Some(vec![&b"etc"[..]]));
        assert_eq!(names(b"a/../b"), None);
    }

    /// An archive of one file, with extended headers.
    fn archive(headers: &[(&str, &[u8])], uid: u64) -> Vec<u8> {
        let mut to = tar::Builder::new(Vec::new());
        to.append_pax_extensions(headers.iter().copied()).unwrap();
        let mut header = tar::Header::new_ustar();
        header.set_size(5);
        header.set_mode(0o644);
        header.set_uid(uid);
        header.set_gid(7);
        header.set_mtime(0);
        header.set_entry_type(EntryType::Regular);
        to.append_data(&mut header, "file", &b"12345"[..]).unwrap();
        to.into_inner().unwrap()
    }

    fn reading(bytes: &[u8]) -> Result<Root, MkfsError> {
        read(bytes, &std::env::temp_dir())
    }

    /// The output of a program that failed is no archive: nothing at all, or one without its end.
    #[test]
    fn an_archive_needs_its_end() {
        let whole = archive(&[], 0);
        assert_eq!(reading(&whole).unwrap().dir.list().unwrap().len(), 1);
        // Without a member, and with one block of the end, as some programs write it.
        reading(&[0; 1024]).unwrap();
        reading(&whole[..whole.len() - 512]).unwrap();
        for len in [0, 100, 512, whole.len() - 1024] {
            assert!(reading(&whole[..len]).is_err(), "{len} bytes");
        }
    }

    /// Owners that XFS has no number for are refused.
    #[test]
    fn owners_fit() {
        let owner = |headers: &[(&str, &[u8])], uid| {
            let root = reading(&archive(headers, uid))?;
            Ok::<_, MkfsError>(root.dir.list()?[0].meta.uid)
        };
        assert_eq!(owner(&[], 7).unwrap(), 7);
        assert_eq!(owner(&[("uid", b"4294967294")], 7).unwrap(), u32::MAX - 1);
        assert!(owner(&[("uid", b"4294967296")], 7).is_err());
        assert!(owner(&[("gid", b"many")], 7).is_err());
        assert!(owner(&[], 1 << 32).is_err());
    }
}
