//! Copies trees out of an image.

use crate::error::{Error, Result};
use crate::format::*;
use crate::read::inode::{Fork, Inode, KEPT_FLAGS, Time};
use crate::read::volume::Volume;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    self as rfs, AtFlags, Gid, IFlags, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::ls::escape;
use super::{BATCH, DATA_AHEAD, Entries, MAX_DEPTH, buffer, last_name, output, twice};

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
    /// Devices that were not made, see [`Trust`].
    pub devices_left_out: u64,
    /// Set-user-id and set-group-id bits, and capabilities, that were taken off, see [`Trust`].
    pub rights_taken_off: u64,
    /// Sockets that have no place in an archive.
    pub sockets_left_out: u64,
}

impl std::ops::AddAssign for Copied {
    fn add_assign(&mut self, more: Copied) {
        self.files += more.files;
        self.directories += more.directories;
        self.links += more.links;
        self.bytes += more.bytes;
        self.errors += more.errors;
        self.devices_left_out += more.devices_left_out;
        self.rights_taken_off += more.rights_taken_off;
        self.sockets_left_out += more.sockets_left_out;
    }
}

/// The parts of an image with power over the machine it is copied to that a copy takes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trust {
    /// Devices are made.
    pub devices: bool,
    /// Set-user-id and set-group-id bits of files, and capabilities, are kept.
    pub rights: bool,
}

impl Trust {
    /// None of them.
    pub const UNTRUSTED: Trust = Trust {
        devices: false,
        rights: false,
    };
    /// All of them.
    pub const TRUSTED: Trust = Trust {
        devices: true,
        rights: true,
    };
}

/// Copies `from` out of the image with everything below it: holes stay holes; modes, owners,
/// times, extended attributes and hard links are kept, as far as the caller may set them.
///
/// Like `cp -r`: into the directory `to` if that exists (under the last name of `from`; the
/// contents of the root go straight in), otherwise as `to`. Nothing that exists is overwritten.
/// An error is handed to `report` (path below `to`, error) and copying goes on.
///
/// Other users may change what lies at the destination meanwhile. Attributes are set by descriptors of what this copy
/// made, so that they never reach a file that another user has put in its place.
pub fn copy_out(
    volume: &Volume,
    from: &[u8],
    to: &Path,
    trust: Trust,
    report: &mut dyn FnMut(&Path, &Error),
) -> Result<Copied> {
    let inode = volume.resolve(from, false)?;
    let name = last_name(from);
    let open_dir = |path: &Path| {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        rfs::openat(rfs::CWD, path, flags, Mode::empty())
    };
    let failed = |path: &Path, e: Errno| Error::Output {
        what: path.display().to_string(),
        source: e.into(),
    };
    let mut copy = Copy {
        volume,
        trust,
        root: None,
        links: HashMap::new(),
        flagged: Vec::new(),
        seen: HashSet::new(),
        done: Copied::default(),
        report,
        buf: buffer(volume),
    };
    match (open_dir(to), name) {
        // Into an existing directory, under the source's own name.
        (Ok(fd), Some(name)) => {
            copy.tree(fd, OsStr::from_bytes(name), inode);
        }
        // The root's contents into an existing directory, whose own attributes stay.
        (Ok(fd), None) => {
            copy.root = rustix::io::dup(&fd).ok();
            copy.contents(fd, PathBuf::new(), inode, false);
        }
        (Err(Errno::NOENT), _) => {
            let parent = uvfs_sys::directory_of(to);
            let last = to.file_name().ok_or_else(|| failed(to, Errno::NOENT))?;
            let fd = open_dir(parent).map_err(|e| failed(parent, e))?;
            copy.tree(fd, last, inode);
        }
        (Err(e), _) => return Err(failed(to, e)),
    }
    copy.late_flags();
    Ok(copy.done)
}

pub(super) struct Copy<'a> {
    volume: &'a Volume,
    trust: Trust,
    /// The directory that the paths in `links` begin from.
    root: Option<OwnedFd>,
    /// The first name of a file with several, and the inode that was made for it.
    links: HashMap<u64, (PathBuf, Made)>,
    /// Inode flags that are set when everything else is done: a file that may not be changed gets no further names.
    flagged: Vec<(PathBuf, Made, IFlags)>,
    /// Directories met: a damaged image may have loops.
    seen: HashSet<u64>,
    done: Copied,
    report: &'a mut dyn FnMut(&Path, &Error),
    buf: Vec<u8>,
}

/// Identifies an inode that this copy made: device and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Made(u64, u64);

impl Made {
    fn of(stat: &rfs::Stat) -> Made {
        Made(stat.st_dev, stat.st_ino)
    }
}

/// The path of an open file, for calls that have no form for a descriptor opened with O_PATH.
fn by_descriptor(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// A directory that is being copied.
struct Frame {
    fd: OwnedFd,
    /// From the copy's root.
    path: PathBuf,
    inode: Inode,
    entries: Entries,
    /// The data of so many of the first is read ahead.
    ahead: usize,
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
        let failed = |e: Errno| output(&format!("{what} {}", path.display()))(e.into());
        self.check(path, r.map_err(failed))
    }

    /// Copies `inode` as `name` in `dir`, with everything below it.
    fn tree(&mut self, dir: OwnedFd, name: &OsStr, inode: Inode) {
        let path = PathBuf::from(name);
        self.root = rustix::io::dup(&dir).ok();
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
        // The directory just made, or one that another user has put in its place?
        let stat = self.check_os(path, "stat", rfs::fstat(&fd))?;
        let ours = stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o077 == 0;
        let ours = if ours { Ok(()) } else { Err(Errno::STALE) };
        self.check_os(path, "opening", ours)?;
        self.done.directories += 1;
        Some(fd)
    }

    /// Opens what was just made as `name`, to set its attributes. An error if another user has put something else in its
    /// place.
    fn open_made(
        &self,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        kind: rfs::FileType,
        rdev: u64,
    ) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rfs::openat(dir, name, flags, Mode::empty())?;
        let stat = rfs::fstat(&fd)?;
        let ours = stat.st_uid == rustix::process::geteuid().as_raw()
            && stat.st_nlink == 1
            && rfs::FileType::from_raw_mode(stat.st_mode) == kind
            && (kind == rfs::FileType::Symlink || stat.st_mode & 0o177 == 0)
            && stat.st_rdev == rdev;
        if ours { Ok(fd) } else { Err(Errno::STALE) }
    }

    /// Opens again, from the copy's root, what this copy made; symbolic links on the way are not followed.
    fn open_again(&self, path: &Path, made: Made, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let root = self.root.as_ref().ok_or(Errno::BADF)?;
        let beneath =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rfs::openat2(root, path, flags, Mode::empty(), beneath)?;
        match Made::of(&rfs::fstat(&fd)?) == made {
            true => Ok(fd),
            false => Err(Errno::STALE),
        }
    }

    /// Copies what is in the directory `inode` into `fd`, depth first.
    fn contents(&mut self, fd: OwnedFd, path: PathBuf, inode: Inode, own: bool) {
        self.seen.insert(inode.ino);
        let frame = |fd, path, inode, own| Frame {
            fd,
            path,
            inode,
            entries: Entries::default(),
            ahead: 0,
            own,
        };
        let mut stack = vec![frame(fd, path, inode, own)];
        while let Some(top) = stack.last_mut() {
            let entries = &mut top.entries;
            let Some((name, ino)) = entries.read.pop_front() else {
                if !entries.complete {
                    let read = entries.refill(self.volume, &top.inode, BATCH);
                    entries.readahead(self.volume);
                    self.check(&top.path, read);
                    continue;
                }
                let top = stack.pop().expect("it was there");
                if top.own {
                    self.attributes(top.fd.as_fd(), &top.path, &top.inode);
                }
                continue;
            };
            top.ahead = top.ahead.saturating_sub(1);
            while let Some((_, ino)) = entries.read.get(top.ahead)
                && top.ahead < DATA_AHEAD
            {
                self.volume.readahead_file(*ino);
                top.ahead += 1;
            }
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
                let e = twice(&top.inode, ino);
                self.fail(&path, e);
                continue;
            }
            let fd = self.make_dir(top.fd.as_fd(), name, &path);
            if stack.len() >= MAX_DEPTH {
                let shown = path.display();
                let what = format!("{shown}: copying deeper than {MAX_DEPTH} directories is");
                self.fail(&path, Error::Unsupported(what));
            } else if let Some(fd) = fd {
                stack.push(frame(fd, path, child, true));
            }
        }
    }

    /// Copies anything but a directory.
    fn file(&mut self, dir: BorrowedFd<'_>, name: &OsStr, path: &Path, inode: &Inode) {
        if let Some((first, made)) = self.links.get(&inode.ino) {
            let linked = self.open_again(first, *made, OFlags::PATH).and_then(|fd| {
                let (old, how) = (by_descriptor(fd.as_fd()), AtFlags::SYMLINK_FOLLOW);
                rfs::linkat(rfs::CWD, old, dir, name, how)
            });
            if self.check_os(path, "linking", linked).is_some() {
                self.done.links += 1;
            }
            return;
        }
        if let Some(made) = self.make(dir, name, path, inode)
            && inode.nlink > 1
        {
            // Only of a file that this copy made: another name becomes a link to it.
            self.links.insert(inode.ino, (path.to_path_buf(), made));
        }
    }

    /// Makes and fills a file that is no directory; `None` if it was not made.
    fn make(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        path: &Path,
        inode: &Inode,
    ) -> Option<Made> {
        let kind = inode.file_type();
        let raw = rfs::FileType::from_raw_mode(kind.mode_bits());
        let mut rdev = 0;
        match kind {
            FileType::Regular => {
                let flags = OFlags::WRONLY
                    | OFlags::CREATE
                    | OFlags::EXCL
                    | OFlags::NOFOLLOW
                    | OFlags::CLOEXEC;
                let fd = rfs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR);
                let fd = self.check_os(path, "making", fd)?;
                let copied = self.bytes(fd.as_fd(), inode);
                self.check(path, copied);
                self.done.files += 1;
                return self.attributes(fd.as_fd(), path, inode);
            }
            FileType::Symlink => {
                let target = self.check(path, self.volume.readlink(inode))?;
                let made = rfs::symlinkat(OsStr::from_bytes(&target), dir, name);
                self.check_os(path, "making", made)?;
            }
            FileType::CharDevice | FileType::BlockDevice if !self.trust.devices => {
                self.done.devices_left_out += 1;
                return None;
            }
            _ => {
                if matches!(kind, FileType::CharDevice | FileType::BlockDevice) {
                    rdev = rfs::makedev(inode.rdev.0, inode.rdev.1);
                }
                let made = rfs::mknodat(dir, name, raw, Mode::RUSR | Mode::WUSR, rdev);
                self.check_os(path, "making", made)?;
            }
        }
        self.done.files += 1;
        let fd = self.open_made(dir, name, raw, rdev);
        let fd = self.check_os(path, "opening", fd)?;
        self.special_attributes(fd.as_fd(), path, inode)
    }

    /// Copies data where there is any, and sets the size.
    fn bytes(&mut self, fd: BorrowedFd<'_>, inode: &Inode) -> Result<()> {
        let (volume, buf, copied) = (self.volume, &mut self.buf, &mut self.done.bytes);
        let failed = |e: Errno| output("writing")(e.into());
        rfs::ftruncate(fd, inode.size).map_err(failed)?;
        let log = volume.geometry().blocklog;
        let blocks = inode.size.div_ceil(1 << log);
        volume.map(inode, Fork::Data, 0, blocks, &mut |e| {
            if e.unwritten {
                return Ok(true);
            }
            let mut at = e.startoff << log;
            let end = (e.end() << log).min(inode.size);
            while at < end {
                let want = (end - at).min(buf.len() as u64) as usize;
                let n = volume.read(inode, at, &mut buf[..want])?;
                let mut done = 0;
                while done < n {
                    let written = rustix::io::pwrite(fd, &buf[done..n], at + done as u64);
                    done += written.map_err(failed)?;
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
    fn attributes(&mut self, fd: BorrowedFd<'_>, path: &Path, inode: &Inode) -> Option<Made> {
        let (uid, gid) = owner(inode);
        self.check_os(path, "setting the owner of", rfs::fchown(fd, uid, gid));
        self.xattrs(path, inode, &mut |name, value| {
            rfs::fsetxattr(fd, name, value, XattrFlags::empty())
        });
        let mode = self.mode(inode);
        self.check_os(path, "setting the mode of", rfs::fchmod(fd, mode));
        let set = rfs::futimens(fd, &times(inode));
        self.check_os(path, "setting the times of", set);
        let made = Made::of(&self.check_os(path, "stat", rfs::fstat(fd))?);
        self.flags(fd, path, inode, made);
        Some(made)
    }

    /// The permissions for a copy.
    fn mode(&mut self, inode: &Inode) -> Mode {
        let mut bits = u32::from(inode.mode & 0o7777);
        if !self.trust.rights && !inode.is_dir() && bits & 0o6000 != 0 {
            self.done.rights_taken_off += 1;
            bits &= !0o6000;
        }
        Mode::from_raw_mode(bits)
    }

    /// Sets the inode flags that other tools know: immutable, append only, no dump. A file system without them has none.
    fn flags(&mut self, fd: BorrowedFd<'_>, path: &Path, inode: &Inode, made: Made) {
        let flags = inode.common_flags() & KEPT_FLAGS;
        if flags.is_empty() {
        } else if inode.is_dir() || inode.nlink == 1 {
            let set = add_flags(fd, flags);
            self.check_os(path, "setting the flags of", set);
        } else {
            self.flagged.push((path.to_path_buf(), made, flags));
        }
    }

    /// Sets the flags of files that have several names.
    fn late_flags(&mut self) {
        for (path, made, flags) in std::mem::take(&mut self.flagged) {
            let set = self
                .open_again(&path, made, OFlags::RDONLY | OFlags::NONBLOCK)
                .and_then(|fd| add_flags(fd.as_fd(), flags));
            self.check_os(&path, "setting the flags of", set);
        }
    }

    /// The same for what is not opened: links, devices, fifos, sockets. `fd` was opened with O_PATH.
    fn special_attributes(
        &mut self,
        fd: BorrowedFd<'_>,
        path: &Path,
        inode: &Inode,
    ) -> Option<Made> {
        let (uid, gid) = owner(inode);
        let on = by_descriptor(fd);
        let chown = rfs::chownat(fd, c"", uid, gid, AtFlags::EMPTY_PATH);
        self.check_os(path, "setting the owner of", chown);
        if inode.file_type() != FileType::Symlink {
            let mode = self.mode(inode);
            self.check_os(path, "setting the mode of", rfs::chmod(&on, mode));
        }
        self.xattrs(path, inode, &mut |name, value| {
            rfs::setxattr(&on, name, value, XattrFlags::empty())
        });
        let set = rfs::utimensat(fd, c"", &times(inode), AtFlags::EMPTY_PATH);
        self.check_os(path, "setting the times of", set);
        let stat = self.check_os(path, "stat", rfs::fstat(fd))?;
        Some(Made::of(&stat))
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
            if name == b"security.capability" && !self.trust.rights {
                self.done.rights_taken_off += 1;
                continue;
            }
            let Some(value) = self.check(path, volume.xattr(inode, &name)) else {
                continue;
            };
            let r = set(OsStr::from_bytes(&name), &value);
            self.check_os(path, &format!("setting {} of", escape(&name)), r);
        }
    }
}

fn add_flags(fd: BorrowedFd<'_>, flags: IFlags) -> rustix::io::Result<()> {
    rfs::ioctl_setflags(fd, rfs::ioctl_getflags(fd)? | flags)
}

fn owner(inode: &Inode) -> (Option<Uid>, Option<Gid>) {
    // All bits set would mean "leave it".
    let id = |v: u32| (v != u32::MAX).then_some(v);
    let (uid, gid) = (id(inode.uid), id(inode.gid));
    (uid.map(Uid::from_raw), gid.map(Gid::from_raw))
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
