//! Copies trees out of an image.

use crate::error::{Error, Result};
use crate::format::*;
use crate::inode::{Fork, Inode, Time};
use crate::volume::Volume;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{self as rfs, AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::ls::escape;
use super::{BATCH, CHUNK, MAX_DEPTH, output};

/// The counts of a copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copied {
    /// Files of any kind but directories, further names of one file not counted.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Further names.
    pub links: u64,
    /// Bytes of data, holes not counted.
    pub bytes: u64,
    /// Errors that were reported.
    pub errors: u64,
}

/// Copies `from` out of the image with everything below it: holes stay holes; modes, owners,
/// times, extended attributes and hard links are kept, as far as the caller may set them.
///
/// Like `cp -r`: into the directory `to` if that exists (under the last name of `from`; the
/// contents of the root go straight in), otherwise as `to`. Nothing that exists is overwritten.
/// An error is handed to `report` (path below `to`, error) and copying goes on.
pub fn copy_out(
    volume: &Volume,
    from: &[u8],
    to: &Path,
    report: &mut dyn FnMut(&Path, &Error),
) -> Result<Copied> {
    let inode = volume.resolve(from, false)?;
    let name = from.rsplit(|b| *b == b'/').find(|c| !c.is_empty());
    let name = name.filter(|n| *n != b"." && *n != b"..");
    let open_dir = |path: &Path| {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        rfs::openat(rfs::CWD, path, flags, Mode::empty())
    };
    let failed = |path: &Path, e: rustix::io::Errno| Error::Output {
        what: path.display().to_string(),
        source: e.into(),
    };
    let mut copy = Copy {
        volume,
        root: PathBuf::new(),
        links: HashMap::new(),
        seen: HashSet::new(),
        done: Copied::default(),
        report,
        buf: vec![0; CHUNK],
    };
    match (open_dir(to), name) {
        // Into an existing directory, under the source's own name.
        (Ok(fd), Some(name)) => {
            copy.root = to.to_path_buf();
            copy.tree(fd, OsStr::from_bytes(name), inode);
        }
        // The root's contents into an existing directory, whose own attributes stay.
        (Ok(fd), None) => {
            copy.root = to.to_path_buf();
            copy.contents(fd, PathBuf::new(), inode, false);
        }
        (Err(rustix::io::Errno::NOENT), _) => {
            let parent = match to.parent() {
                Some(p) if !p.as_os_str().is_empty() => p,
                _ => Path::new("."),
            };
            let Some(last) = to.file_name() else {
                return Err(failed(to, rustix::io::Errno::NOENT));
            };
            let fd = open_dir(parent).map_err(|e| failed(parent, e))?;
            copy.root = parent.to_path_buf();
            copy.tree(fd, last, inode);
        }
        (Err(e), _) => return Err(failed(to, e)),
    }
    Ok(copy.done)
}

pub(super) struct Copy<'a> {
    volume: &'a Volume,
    /// The directory that the paths in `links` begin from.
    root: PathBuf,
    /// Where the first name of a file with several went.
    links: HashMap<u64, PathBuf>,
    /// Directories met: a damaged image may have loops.
    seen: HashSet<u64>,
    done: Copied,
    report: &'a mut dyn FnMut(&Path, &Error),
    buf: Vec<u8>,
}

/// A directory that is being copied.
struct Frame {
    fd: OwnedFd,
    /// From the copy's root.
    path: PathBuf,
    inode: Inode,
    /// Entries read and not copied yet, and where to go on reading.
    batch: VecDeque<(Vec<u8>, u64)>,
    next: u64,
    complete: bool,
    /// Attributes are to be set when it is done.
    own: bool,
}

impl Copy<'_> {
    fn fail(&mut self, path: &Path, e: Error) {
        self.done.errors += 1;
        (self.report)(path, &e);
    }

    fn check<T>(&mut self, path: &Path, r: Result<T>) -> Option<T> {
        r.map_err(|e| self.fail(path, e)).ok()
    }

    fn check_os<T>(&mut self, path: &Path, what: &str, r: rustix::io::Result<T>) -> Option<T> {
        let what = || format!("{what} {}", path.display());
        let r = r.map_err(|e| Error::Output {
            what: what(),
            source: e.into(),
        });
        self.check(path, r)
    }

    /// Copies `inode` as `name` in `dir`, with everything below it.
    fn tree(&mut self, dir: OwnedFd, name: &OsStr, inode: Inode) {
        let path = PathBuf::from(name);
        if !inode.is_dir() {
            self.file(dir.as_fd(), name, &path, &inode);
        } else if let Some(fd) = self.make_dir(dir.as_fd(), name, &path) {
            self.contents(fd, path, inode, true);
        }
    }

    fn make_dir(&mut self, dir: BorrowedFd<'_>, name: &OsStr, path: &Path) -> Option<OwnedFd> {
        self.check_os(path, "making", rfs::mkdirat(dir, name, Mode::RWXU))?;
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rfs::openat(dir, name, flags, Mode::empty());
        let fd = self.check_os(path, "opening", fd)?;
        self.done.directories += 1;
        Some(fd)
    }

    /// Copies what is in the directory `inode` into `fd`, depth first.
    fn contents(&mut self, fd: OwnedFd, path: PathBuf, inode: Inode, own: bool) {
        self.seen.insert(inode.ino);
        let frame = |fd, path, inode, own| Frame {
            fd,
            path,
            inode,
            batch: VecDeque::new(),
            next: 0,
            complete: false,
            own,
        };
        let mut stack = vec![frame(fd, path, inode, own)];
        while let Some(top) = stack.last_mut() {
            let Some((name, ino)) = top.batch.pop_front() else {
                if !top.complete {
                    self.refill(top);
                    continue;
                }
                let top = stack.pop().expect("it was there");
                if top.own {
                    self.attributes(top.fd.as_fd(), &top.path, &top.inode);
                }
                continue;
            };
            let path = top.path.join(OsStr::from_bytes(&name));
            let Some(child) = self.check(&path, self.volume.inode(ino)) else {
                continue;
            };
            let name = OsStr::from_bytes(&name);
            if !child.is_dir() {
                self.file(top.fd.as_fd(), name, &path, &child);
                continue;
            }
            if !self.seen.insert(ino) {
                let f = Fault::field("inumber", "a directory that is in one place", ino);
                let e = top.inode.fault("directory", f);
                self.fail(&path, e);
                continue;
            }
            let fd = self.make_dir(top.fd.as_fd(), name, &path);
            if stack.len() >= MAX_DEPTH {
                let what = format!(
                    "{}: copying deeper than {MAX_DEPTH} directories is",
                    path.display()
                );
                self.fail(&path, Error::Unsupported(what));
            } else if let Some(fd) = fd {
                stack.push(frame(fd, path, child, true));
            }
        }
    }

    fn refill(&mut self, frame: &mut Frame) {
        let (batch, next) = (&mut frame.batch, &mut frame.next);
        let mut full = false;
        let start = *next;
        let read = self.volume.readdir(&frame.inode, start, &mut |e| {
            if batch.len() == BATCH {
                full = true;
                return false;
            }
            *next = e.next;
            if e.name != b"." && e.name != b".." {
                batch.push_back((e.name.to_vec(), e.ino));
            }
            true
        });
        // Positions grow, so that this ends.
        frame.complete = !full || *next <= start;
        if let Err(e) = read {
            frame.complete = true;
            let path = frame.path.clone();
            self.fail(&path, e);
        }
    }

    /// Copies anything but a directory.
    fn file(&mut self, dir: BorrowedFd<'_>, name: &OsStr, path: &Path, inode: &Inode) {
        if let Some(first) = self.links.get(&inode.ino) {
            let first = self.root.join(first);
            let linked = rfs::linkat(rfs::CWD, &first, dir, name, AtFlags::empty());
            if self.check_os(path, "linking", linked).is_some() {
                self.done.links += 1;
            }
            return;
        }
        if self.make(dir, name, path, inode) && inode.nlink > 1 {
            // Only of a file that this copy made: another name becomes a link to it.
            self.links.insert(inode.ino, path.to_path_buf());
        }
    }

    /// Makes and fills a file that is no directory; whether it was made.
    fn make(&mut self, dir: BorrowedFd<'_>, name: &OsStr, path: &Path, inode: &Inode) -> bool {
        let kind = inode.file_type();
        match kind {
            FileType::Regular => {
                let flags = OFlags::WRONLY
                    | OFlags::CREATE
                    | OFlags::EXCL
                    | OFlags::NOFOLLOW
                    | OFlags::CLOEXEC;
                let fd = rfs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR);
                let Some(fd) = self.check_os(path, "making", fd) else {
                    return false;
                };
                let copied = self.bytes(fd.as_fd(), inode);
                self.check(path, copied);
                self.done.files += 1;
                self.attributes(fd.as_fd(), path, inode);
                return true;
            }
            FileType::Symlink => {
                let Some(target) = self.check(path, self.volume.readlink(inode)) else {
                    return false;
                };
                let made = rfs::symlinkat(OsStr::from_bytes(&target), dir, name);
                if self.check_os(path, "making", made).is_none() {
                    return false;
                }
            }
            _ => {
                let kind = rfs::FileType::from_raw_mode(kind.mode_bits());
                let dev = rfs::makedev(inode.rdev.0, inode.rdev.1);
                let made = rfs::mknodat(dir, name, kind, Mode::RUSR | Mode::WUSR, dev);
                if self.check_os(path, "making", made).is_none() {
                    return false;
                }
            }
        }
        self.done.files += 1;
        self.special_attributes(dir, name, path, inode);
        true
    }

    /// Copies data where there is any, and sets the size.
    fn bytes(&mut self, fd: BorrowedFd<'_>, inode: &Inode) -> Result<()> {
        let (volume, buf, copied) = (self.volume, &mut self.buf, &mut self.done.bytes);
        let failed = |e: rustix::io::Errno| output("writing")(e.into());
        rfs::ftruncate(fd, inode.size).map_err(failed)?;
        let log = volume.geometry().blocklog;
        let blocks = inode.size.div_ceil(1 << log);
        volume.map(inode, Fork::Data, 0, blocks, &mut |e| {
            if e.unwritten {
                return Ok(true);
            }
            let mut at = e.startoff << log;
            let end = ((e.startoff + u64::from(e.blockcount)) << log).min(inode.size);
            while at < end {
                let want = (end - at).min(buf.len() as u64) as usize;
                let n = volume.read(inode, at, &mut buf[..want])?;
                let mut done = 0;
                while done < n {
                    done +=
                        rustix::io::pwrite(fd, &buf[done..n], at + done as u64).map_err(failed)?;
                }
                at += want as u64;
                *copied += n as u64;
            }
            Ok(true)
        })
    }

    /// Sets everything on an open file or directory. The order matters: a change of owner takes
    /// away set-user-id bits and capabilities, attributes need a mode that lets them be written,
    /// and all of it changes times.
    fn attributes(&mut self, fd: BorrowedFd<'_>, path: &Path, inode: &Inode) {
        let (uid, gid) = owner(inode);
        self.check_os(path, "setting the owner of", rfs::fchown(fd, uid, gid));
        self.xattrs(path, inode, &mut |name, value| {
            rfs::fsetxattr(fd, name, value, XattrFlags::empty())
        });
        let mode = Mode::from_raw_mode(u32::from(inode.mode & 0o7777));
        self.check_os(path, "setting the mode of", rfs::fchmod(fd, mode));
        self.check_os(
            path,
            "setting the times of",
            rfs::futimens(fd, &times(inode)),
        );
    }

    /// The same for what is not opened: links, devices, fifos, sockets.
    fn special_attributes(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        path: &Path,
        inode: &Inode,
    ) {
        let (uid, gid) = owner(inode);
        let chown = rfs::chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW);
        self.check_os(path, "setting the owner of", chown);
        if inode.file_type() != FileType::Symlink {
            let mode = Mode::from_raw_mode(u32::from(inode.mode & 0o7777));
            let chmod = rfs::chmodat(dir, name, mode, AtFlags::empty());
            self.check_os(path, "setting the mode of", chmod);
        }
        let on = self.root.join(path);
        self.xattrs(path, inode, &mut |name, value| {
            rfs::lsetxattr(&on, name, value, XattrFlags::empty())
        });
        let set = rfs::utimensat(dir, name, &times(inode), AtFlags::SYMLINK_NOFOLLOW);
        self.check_os(path, "setting the times of", set);
    }

    fn xattrs(
        &mut self,
        path: &Path,
        inode: &Inode,
        set: &mut dyn FnMut(&OsStr, &[u8]) -> rustix::io::Result<()>,
    ) {
        let volume = self.volume;
        let mut names = Vec::new();
        let listed = volume.xattr_names(inode, &mut |name| {
            // ACLs go under the name that every file system knows.
            if !name.starts_with(b"trusted.SGI_ACL_") {
                names.push(name.to_vec());
            }
            true
        });
        self.check(path, listed);
        for name in names {
            let Some(value) = self.check(path, volume.xattr(inode, &name)) else {
                continue;
            };
            let r = set(OsStr::from_bytes(&name), &value);
            self.check_os(path, &format!("setting {} of", escape(&name)), r);
        }
    }
}

fn owner(inode: &Inode) -> (Option<Uid>, Option<Gid>) {
    // All bits set would mean "leave it".
    let id = |v: u32| (v != u32::MAX).then_some(v);
    (
        id(inode.uid).map(Uid::from_raw),
        id(inode.gid).map(Gid::from_raw),
    )
}

fn times(inode: &Inode) -> Timestamps {
    let spec = |t: Time| Timespec {
        tv_sec: t.sec,
        tv_nsec: i64::from(t.nsec.min(999_999_999)),
    };
    Timestamps {
        last_access: spec(inode.atime),
        last_modification: spec(inode.mtime),
    }
}
