//! A directory of the host as a source.

use super::{Data, Meta, Root, SourceDir, SourceEntry, SourceReader, Time, as_path};
use crate::bulk::attr::{NewAttr, acl_from_xattr};
use crate::format::*;
use crate::mkfs::MkfsError;
use crate::read::attr::{ACL_NAMES, split_name};
use rustix::fs::{self as rfs, AtFlags, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The state that all directories of a tree share.
#[derive(Debug)]
struct HostTree {
    path: PathBuf,
    /// Files that are not to be seen, by device and inode: the image itself and its log.
    hidden: Vec<(u64, u64)>,
    /// Files may be read without changing their access times.
    noatime: AtomicBool,
}

/// A directory of the host. It keeps a descriptor, so that the length of paths has no bound.
#[derive(Debug)]
pub struct HostDir {
    tree: Arc<HostTree>,
    fd: OwnedFd,
    parent: Option<Arc<HostDir>>,
    name: Box<[u8]>,
}

const STATX: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);
const OPEN: OFlags = OFlags::CLOEXEC
    .union(OFlags::RDONLY)
    .union(OFlags::NOFOLLOW);

impl HostDir {
    /// The directory at `path`. `hidden` are files in it that are to be left out, by device and inode:
    /// the image that is being made, and its log.
    ///
    /// # Errors
    /// [`MkfsError::Source`] if it is no directory or cannot be read.
    pub fn root(path: &Path, hidden: Vec<(u64, u64)>) -> Result<Root, MkfsError> {
        let failed =
            |what: &'static str| move |e: Errno| MkfsError::source(path.into(), what, e.into());
        let flags = OFlags::CLOEXEC | OFlags::RDONLY | OFlags::DIRECTORY;
        let fd = rfs::open(path, flags, Mode::empty()).map_err(failed("opening it"))?;
        let stat = rfs::statx(&fd, c"", AtFlags::EMPTY_PATH, STATX).map_err(failed("stat"))?;
        let dir = HostDir {
            tree: Arc::new(HostTree {
                path: path.into(),
                hidden,
                noatime: AtomicBool::new(true),
            }),
            fd,
            parent: None,
            name: Box::default(),
        };
        let attrs = dir.attrs(b".")?;
        Ok(Root {
            meta: meta(&stat),
            attrs,
            dir: Arc::new(dir),
        })
    }

    fn failed(&self, name: &[u8], what: &'static str, e: Errno) -> MkfsError {
        MkfsError::source(self.path(name), what, e.into())
    }

    /// The extended attributes of an entry.
    fn attrs(&self, name: &[u8]) -> Result<Vec<NewAttr>, MkfsError> {
        // There is no listxattrat(2) before Linux 6.13.
        let mut path = format!("/proc/self/fd/{}/", self.fd.as_raw_fd()).into_bytes();
        path.extend_from_slice(name);
        let Ok(path) = CString::new(path) else {
            return Ok(Vec::new());
        };
        let failed = |e| self.failed(name, "reading its extended attributes", e);
        let mut names = [0u8; 1024];
        let mut more = Vec::new();
        let names = match rfs::llistxattr(&path, &mut names) {
            Ok(0) | Err(Errno::OPNOTSUPP | Errno::NOENT) => return Ok(Vec::new()),
            Ok(n) => &names[..n],
            Err(Errno::RANGE) => {
                more.resize(65536, 0);
                let n = rfs::llistxattr(&path, &mut more).map_err(failed)?;
                &more[..n]
            }
            Err(e) => return Err(failed(e)),
        };
        let mut attrs = Vec::new();
        let mut value = vec![0u8; 4096];
        for full in uvfs_sys::xattr_names(names) {
            if namespace(full).is_none() {
                continue;
            }
            let Ok(c) = CString::new(full) else {
                continue;
            };
            let mut read = rfs::lgetxattr(&path, &c, &mut value[..]);
            if read == Err(Errno::RANGE) && value.len() < ATTR_MAX_VALUE {
                value.resize(ATTR_MAX_VALUE, 0);
                read = rfs::lgetxattr(&path, &c, &mut value[..]);
            }
            let n = match read {
                // It was removed meanwhile, or the file was.
                Err(Errno::NODATA | Errno::NOENT) => continue,
                read => read.map_err(failed)?,
            };
            let attr = attribute(full, &value[..n]);
            attrs.extend(attr.map_err(|why| MkfsError::unfit(self.path(name), why))?);
        }
        // An XFS source lists its ACLs under both names.
        sort_attributes(&mut attrs);
        Ok(attrs)
    }

    fn entry(&self, name: &[u8]) -> Result<Option<SourceEntry>, MkfsError> {
        let how = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        let stat = match rfs::statx(&self.fd, name, how, STATX) {
            // It was removed meanwhile.
            Err(Errno::NOENT) => return Ok(None),
            other => other.map_err(|e| self.failed(name, "stat", e))?,
        };
        let device = rfs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
        let id = (device, stat.stx_ino);
        if self.tree.hidden.contains(&id) {
            return Ok(None);
        }
        let meta = meta(&stat);
        let kind = FileType::from_mode(meta.mode);
        let target = match kind {
            FileType::Symlink => match rfs::readlinkat(&self.fd, name, Vec::new()) {
                // It was removed or replaced since.
                Err(Errno::NOENT | Errno::INVAL) => return Ok(None),
                other => other
                    .map_err(|e| self.failed(name, "reading the link", e))?
                    .into_bytes()
                    .into(),
            },
            _ => Box::default(),
        };
        let holes = kind == FileType::Regular && stat.stx_blocks * 512 < meta.size;
        let data = match holes {
            true => self.runs(name, meta.size)?,
            false => Data::Dense,
        };
        let attrs = self.attrs(name)?;
        let several = kind != FileType::Directory && stat.stx_nlink > 1;
        Ok(Some(SourceEntry {
            name: name.into(),
            meta,
            links: several.then_some(id),
            attrs,
            target,
            data,
        }))
    }

    /// Where a file has data.
    fn runs(&self, name: &[u8], size: u64) -> Result<Data, MkfsError> {
        let Some((fd, _)) = self.open_file(name)? else {
            // This is found again, and reported, when its contents are copied.
            return Ok(Data::Dense);
        };
        let failed = |e| self.failed(name, "looking for its holes", e);
        let mut runs = Vec::new();
        let mut at = 0;
        while at < size {
            let start = match rfs::seek(&fd, SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(Errno::NXIO) => break,
                // Not known there: all of it is data.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Data::Dense),
                Err(e) => return Err(failed(e)),
            };
            let end = rfs::seek(&fd, SeekFrom::Hole(start))
                .map_err(failed)?
                .min(size);
            if end <= start {
                break;
            }
            runs.push((start, end - start));
            at = end;
        }
        // tmpfs does not find data in the last page that a file can have: read that in any case.
        let last = size & !0xffff;
        if size > i64::MAX as u64 - 0xffff && at <= last {
            runs.push((last, size - last));
        }
        Ok(Data::Runs(runs))
    }

    /// A regular file and its size; `None` if there is none of this name any more.
    fn open_file(&self, name: &[u8]) -> Result<Option<(OwnedFd, u64)>, MkfsError> {
        let failed = |e| self.failed(name, "opening it", e);
        let fd = match self.open_fd(name) {
            // Removed, or replaced by a symbolic link, a socket, or a device without a driver.
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO | Errno::NODEV) => return Ok(None),
            other => other.map_err(failed)?,
        };
        let stat = rfs::fstat(&fd).map_err(failed)?;
        let regular = rfs::FileType::from_raw_mode(stat.st_mode) == rfs::FileType::RegularFile;
        Ok(regular.then_some((fd, stat.st_size as u64)))
    }

    fn open_fd(&self, name: &[u8]) -> Result<OwnedFd, Errno> {
        // A FIFO that has taken the file's place would wait for a writer.
        const FILE: OFlags = OPEN.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);
        if self.tree.noatime.load(Ordering::Relaxed) {
            match rfs::openat(&self.fd, name, FILE | OFlags::NOATIME, Mode::empty()) {
                Ok(fd) => return Ok(fd),
                // Only the owner may.
                Err(Errno::PERM) => self.tree.noatime.store(false, Ordering::Relaxed),
                Err(e) => return Err(e),
            }
        }
        rfs::openat(&self.fd, name, FILE, Mode::empty())
    }
}

impl SourceDir for HostDir {
    fn list_wanted(&self, wanted: &dyn Fn(&[u8]) -> bool) -> Result<Vec<SourceEntry>, MkfsError> {
        let failed = |e| self.failed(b"", "listing it", e);
        let mut names = Vec::new();
        for e in rfs::Dir::read_from(&self.fd).map_err(failed)? {
            let e = e.map_err(failed)?;
            let name = e.file_name().to_bytes();
            if name != b"." && name != b".." && wanted(name) {
                names.push((e.ino(), Box::<[u8]>::from(name)));
            }
        }
        // Inodes in the order of their numbers lie together on disk.
        names.sort_unstable();
        let mut entries = Vec::with_capacity(names.len());
        for (_, name) in names {
            entries.extend(self.entry(&name)?);
        }
        entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    fn enter(self: Arc<Self>, name: &[u8]) -> Result<Option<Arc<dyn SourceDir>>, MkfsError> {
        let flags = OPEN | OFlags::DIRECTORY;
        let fd = match rfs::openat(&self.fd, name, flags, Mode::empty()) {
            // Removed, or replaced by something else.
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => return Ok(None),
            other => other.map_err(|e| self.failed(name, "opening it", e))?,
        };
        Ok(Some(Arc::new(HostDir {
            tree: self.tree.clone(),
            fd,
            name: name.into(),
            parent: Some(self),
        })))
    }

    fn open(&self, name: &[u8]) -> Result<Option<SourceReader>, MkfsError> {
        let opened = self.open_file(name)?;
        Ok(opened.map(|(fd, size)| SourceReader::Host(fd, size)))
    }

    fn path(&self, name: &[u8]) -> PathBuf {
        let mut names = vec![name];
        let mut dir = self;
        while let Some(parent) = &dir.parent {
            names.push(&dir.name);
            dir = parent;
        }
        let mut path = self.tree.path.clone();
        for name in names.iter().rev().filter(|n| !n.is_empty()) {
            path.push(as_path(name));
        }
        path
    }
}

/// An attribute by its full name, as it is stored; `None` for one that is not kept.
///
/// # Errors
/// Why it can't be stored.
pub(super) fn attribute(full: &[u8], value: &[u8]) -> Result<Option<NewAttr>, &'static str> {
    let Some((flags, name)) = namespace(full) else {
        return Ok(None);
    };
    let acl = full.starts_with(b"system.posix_acl_");
    let value = match acl {
        true => acl_from_xattr(value)
            .ok_or("its access control list is not one")?
            .into(),
        false => value.into(),
    };
    Ok(Some(NewAttr {
        flags,
        name: name.into(),
        value,
    }))
}

/// The namespace flags of an attribute's full name, and its name on disk. `None` for what is not
/// kept: attributes that the source's file system makes up.
fn namespace(full: &[u8]) -> Option<(u8, &[u8])> {
    if let Some((flags, name)) = split_name(full).filter(|(_, name)| !name.is_empty()) {
        // Under these names an XFS source shows its ACLs as it stores them.
        let acl = ACL_NAMES.iter().any(|(stored, _)| *stored == name);
        return (flags != ATTR_ROOT || !acl).then_some((flags, name));
    }
    let acl = ACL_NAMES.iter().find(|(_, shown)| *shown == full);
    acl.map(|(stored, _)| (ATTR_ROOT, *stored))
}

/// Sorts attributes as they are kept, one of each name.
pub(super) fn sort_attributes(attrs: &mut Vec<NewAttr>) {
    attrs.sort_by(|a, b| (a.flags, &a.name).cmp(&(b.flags, &b.name)));
    attrs.dedup_by(|a, b| (a.flags, &a.name) == (b.flags, &b.name));
}

fn meta(s: &rfs::Statx) -> Meta {
    let time = |t: rfs::StatxTimestamp| Time {
        sec: t.tv_sec,
        nsec: t.tv_nsec,
    };
    let birth = StatxFlags::from_bits_retain(s.stx_mask).contains(StatxFlags::BTIME);
    Meta {
        mode: s.stx_mode,
        uid: s.stx_uid,
        gid: s.stx_gid,
        size: s.stx_size,
        rdev: (s.stx_rdev_major, s.stx_rdev_minor),
        atime: time(s.stx_atime),
        mtime: time(s.stx_mtime),
        ctime: time(s.stx_ctime),
        crtime: time(if birth { s.stx_btime } else { s.stx_mtime }),
        flags: [
            (rfs::StatxAttributes::IMMUTABLE, DIFLAG_IMMUTABLE),
            (rfs::StatxAttributes::APPEND, DIFLAG_APPEND),
            (rfs::StatxAttributes::NODUMP, DIFLAG_NODUMP),
        ]
        .into_iter()
        .filter(|(attribute, _)| s.stx_attributes.contains(*attribute))
        .fold(0, |flags, (_, flag)| flags | flag),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A file that is removed, or becomes something else, after it was listed is found to be gone; its opening waits for
    /// nothing.
    #[test]
    fn what_was_replaced_after_the_listing_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name| dir.path().join(name);
        for name in ["fifo", "link", "directory", "removed", "same"] {
            fs::write(at(name), "12345").unwrap();
        }
        let root = HostDir::root(dir.path(), Vec::new()).unwrap();
        assert_eq!(root.dir.list().unwrap().len(), 5);
        for name in ["fifo", "link", "directory", "removed"] {
            fs::remove_file(at(name)).unwrap();
        }
        rfs::mknodat(rfs::CWD, at("fifo"), rfs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        std::os::unix::fs::symlink("same", at("link")).unwrap();
        fs::create_dir(at("directory")).unwrap();
        for name in ["fifo", "link", "directory", "removed"] {
            assert!(root.dir.open(name.as_bytes()).unwrap().is_none(), "{name}");
        }
        let same = root.dir.open(b"same").unwrap().unwrap();
        assert_eq!(same.changeable_size(), Some(5));
        let mut buf = [1; 8];
        assert_eq!(same.read_at(2, &mut buf).unwrap(), 3);
        assert_eq!(&buf, b"345\0\0\0\0\0");
    }

    /// Attributes that XFS can't store are refused.
    #[test]
    fn attributes_that_cannot_be_stored_are_refused() {
        assert!(attribute(b"user.a", b"x").unwrap().is_some());
        assert!(attribute(b"btrfs.compression", b"x").unwrap().is_none());
        assert!(attribute(b"system.posix_acl_access", b"no ACL").is_err());
    }
}
