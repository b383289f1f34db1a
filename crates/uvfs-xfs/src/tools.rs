//! What the command line does with an image: list, show, describe, copy out.
//!
//! Names and contents come from an image that nobody vouches for. Control characters in names are
//! shown escaped; a copy never follows a link that came out of the image and never overwrites.

use crate::error::{Error, Result};
use crate::format::*;
use crate::inode::{Fork, Inode, Time};
use crate::volume::Volume;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{self as rfs, AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;
/// Directories with more entries than this are listed in their own order, not by name.
const SORT_LIMIT: usize = 100_000;
/// Entries of a directory that a copy holds at a time.
const BATCH: usize = 1024;
/// Directories within directories that a copy goes down: each holds a file descriptor.
const MAX_DEPTH: usize = 500;

fn output(what: &str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Output {
        what: what.to_string(),
        source,
    }
}

// ---------------------------------------------------------------------------------------------
// ls
// ---------------------------------------------------------------------------------------------

/// How [`ls`] lists.
#[derive(Debug, Clone, Copy, Default)]
pub struct LsOptions {
    /// Mode, links, owner, group, size and modification time before each name.
    pub long: bool,
    /// Directories below as well.
    pub recursive: bool,
    /// Names that begin with a dot, "." and ".." too.
    pub all: bool,
}

/// Lists `path` as `ls` does: a directory's entries by name, or one file. What cannot be read
/// further down is handed to `report` (path and error), and listing goes on; gives how often that
/// was.
pub fn ls(
    volume: &Volume,
    path: &[u8],
    options: LsOptions,
    out: &mut dyn Write,
    report: &mut dyn FnMut(&Path, &Error),
) -> Result<usize> {
    let write_failed = output("writing the listing");
    let start = volume.resolve(path, false)?;
    if !start.is_dir() {
        line(volume, path, start.ino, options, out, report).map_err(write_failed)?;
        return Ok(0);
    }
    let mut errors = 0;
    let mut report = |p: &Path, e: &Error| {
        errors += 1;
        report(p, e);
    };
    let mut seen = HashSet::from([start.ino]);
    let mut todo = vec![(path.to_vec(), start)];
    let mut first = true;
    while let Some((path, dir)) = todo.pop() {
        if options.recursive {
            let gap = if first { "" } else { "\n" };
            writeln!(out, "{gap}{}:", escape(&path)).map_err(&write_failed)?;
        }
        first = false;
        let shown = |name: &[u8]| options.all || !name.starts_with(b".");
        let mut entries: Vec<(Vec<u8>, u64, FileType)> = Vec::new();
        let mut next = 0;
        let mut below = Vec::new();
        loop {
            let mut more = false;
            let read = volume.readdir(&dir, next, &mut |e| {
                if entries.len() >= SORT_LIMIT {
                    more = true;
                    return false;
                }
                next = e.next;
                if shown(e.name) {
                    entries.push((e.name.to_vec(), e.ino, e.file_type));
                }
                true
            });
            if let Err(e) = read {
                report(Path::new(OsStr::from_bytes(&path)), &e);
            }
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            for (name, ino, kind) in entries.drain(..) {
                line(volume, &name, ino, options, out, &mut report).map_err(&write_failed)?;
                let directory = matches!(kind, FileType::Directory | FileType::Unknown);
                if options.recursive && directory && name != b"." && name != b".." {
                    below.push((name, ino));
                }
            }
            if !more {
                break;
            }
        }
        // Last in, first out: the first name is listed next.
        for (name, ino) in below.into_iter().rev() {
            let child = join(&path, &name);
            match volume.inode(ino) {
                Ok(i) if !i.is_dir() => {}
                Ok(i) if seen.insert(ino) => todo.push((child, i)),
                Ok(_) => {
                    let f = Fault::field("inumber", "a directory that is in one place", ino);
                    report(
                        Path::new(OsStr::from_bytes(&child)),
                        &dir.fault("directory", f),
                    );
                }
                Err(e) if !options.long => report(Path::new(OsStr::from_bytes(&child)), &e),
                Err(_) => {} // Reported with its line.
            }
        }
    }
    Ok(errors)
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if dir.is_empty() || dir.ends_with(b"/") {
        b""
    } else {
        b"/"
    };
    [dir, slash, name].concat()
}

/// Writes one line of a listing.
fn line(
    volume: &Volume,
    name: &[u8],
    ino: u64,
    options: LsOptions,
    out: &mut dyn Write,
    report: &mut dyn FnMut(&Path, &Error),
) -> io::Result<()> {
    if !options.long {
        return writeln!(out, "{}", escape(name));
    }
    let inode = match volume.inode(ino) {
        Ok(i) => i,
        Err(e) => {
            report(Path::new(OsStr::from_bytes(name)), &e);
            return writeln!(out, "??????????   ? ? ? ? ? {}", escape(name));
        }
    };
    let size = match inode.file_type() {
        FileType::CharDevice | FileType::BlockDevice => {
            format!("{}, {}", inode.rdev.0, inode.rdev.1)
        }
        _ => inode.size.to_string(),
    };
    write!(
        out,
        "{} {:>3} {:>5} {:>5} {size:>12} {} {}",
        mode_string(inode.mode),
        inode.nlink,
        inode.uid,
        inode.gid,
        format_time(inode.mtime),
        escape(name)
    )?;
    if inode.file_type() == FileType::Symlink {
        match volume.readlink(&inode) {
            Ok(target) => write!(out, " -> {}", escape(&target))?,
            Err(e) => report(Path::new(OsStr::from_bytes(name)), &e),
        }
    }
    writeln!(out)
}

/// A name with control characters and backslashes escaped, so that it stays on its line and
/// cannot drive a terminal. Bytes that are not UTF-8 are escaped too.
pub fn escape(name: &[u8]) -> String {
    let mut s = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' => s.push_str("\\\\"),
                c if c.is_control() => c
                    .encode_utf8(&mut [0; 4])
                    .bytes()
                    .for_each(|b| s.push_str(&format!("\\{b:03o}"))),
                c => s.push(c),
            }
        }
        chunk
            .invalid()
            .iter()
            .for_each(|b| s.push_str(&format!("\\{b:03o}")));
    }
    s
}

/// A mode as `ls -l` shows it.
pub fn mode_string(mode: u16) -> String {
    let kind = match FileType::from_mode(mode) {
        FileType::Regular => '-',
        FileType::Directory => 'd',
        FileType::CharDevice | FileType::Whiteout => 'c',
        FileType::BlockDevice => 'b',
        FileType::Fifo => 'p',
        FileType::Socket => 's',
        FileType::Symlink => 'l',
        FileType::Unknown => '?',
    };
    let mut s = String::from(kind);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        s.push(if bits & 4 != 0 { 'r' } else { '-' });
        s.push(if bits & 2 != 0 { 'w' } else { '-' });
        s.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => letter,
            (true, false) => letter.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    s
}

/// A time in UTC, as `ls --time-style=full-iso` shows it.
pub fn format_time(t: Time) -> String {
    let (days, second) = (t.sec.div_euclid(86_400), t.sec.rem_euclid(86_400));
    // Civil date from days since 1970, in years that begin on the first of March.
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}.{:09} +0000",
        second / 3600,
        second / 60 % 60,
        second % 60,
        t.nsec
    )
}

// ---------------------------------------------------------------------------------------------
// cat and stat
// ---------------------------------------------------------------------------------------------

/// Writes the contents of the regular file at `path`, links followed.
pub fn cat(volume: &Volume, path: &[u8], out: &mut dyn Write) -> Result<()> {
    let inode = volume.resolve(path, true)?;
    let mut buf = vec![0; CHUNK];
    let mut offset = 0;
    loop {
        let n = volume.read(&inode, offset, &mut buf)?;
        if n == 0 {
            return Ok(());
        }
        out.write_all(&buf[..n])
            .map_err(output("writing the contents"))?;
        offset += n as u64;
    }
}

/// Describes the file at `path`, links not followed: what stat(1) shows, and what is particular
/// to XFS.
pub fn stat(volume: &Volume, path: &[u8], out: &mut dyn Write) -> Result<()> {
    let i = volume.resolve(path, false)?;
    let mut text = format!("  File: {}", escape(path));
    if i.file_type() == FileType::Symlink {
        text += &format!(" -> {}", escape(&volume.readlink(&i)?));
    }
    let kind = match i.file_type() {
        FileType::Regular => "regular file",
        FileType::Directory => "directory",
        FileType::CharDevice | FileType::Whiteout => "character special file",
        FileType::BlockDevice => "block special file",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::Symlink => "symbolic link",
        FileType::Unknown => "unknown",
    };
    let sectors = i
        .nblocks
        .saturating_mul(u64::from(volume.geometry().block_size) / 512);
    let block_size = volume.geometry().block_size;
    text += &format!(
        "\n  Size: {}\tBlocks: {sectors}\tIO Block: {block_size}\t{kind}\n Inode: {}\tLinks: {}",
        i.size, i.ino, i.nlink
    );
    if matches!(i.file_type(), FileType::CharDevice | FileType::BlockDevice) {
        text += &format!("\tDevice type: {},{}", i.rdev.0, i.rdev.1);
    }
    text += &format!(
        "\nAccess: ({:04o}/{})\tUid: {}\tGid: {}\tProject: {}",
        i.mode & 0o7777,
        mode_string(i.mode),
        i.uid,
        i.gid,
        i.projid
    );
    for (name, t) in [
        ("Access", Some(i.atime)),
        ("Modify", Some(i.mtime)),
        ("Change", Some(i.ctime)),
        (" Birth", i.crtime),
    ] {
        text += &format!("\n{name}: {}", t.map_or("-".into(), format_time));
    }
    let form = |fork, extents: u64| match i.fork_format(fork) {
        None => "none".to_string(),
        Some(FORMAT_LOCAL) => "in the inode".to_string(),
        Some(FORMAT_DEV) => "device".to_string(),
        Some(FORMAT_BTREE) => format!("{extents} extents in a B-tree"),
        Some(_) => format!("{extents} extents"),
    };
    text += &format!(
        "\n  Data: {}\tAttributes: {}\tGeneration: {}\tFlags: {:#x} {:#x}\n",
        form(Fork::Data, i.nextents),
        form(Fork::Attr, i.anextents),
        i.generation,
        i.flags,
        i.flags2
    );
    volume.xattr_names(&i, &mut |name| {
        text += &format!(" Xattr: {}\n", escape(name));
        true
    })?;
    out.write_all(text.as_bytes())
        .map_err(output("writing the description"))
}

// ---------------------------------------------------------------------------------------------
// cp
// ---------------------------------------------------------------------------------------------

/// What a copy did.
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
    /// What failed and was reported.
    pub errors: u64,
}

/// Copies `from` out of the image with everything below it: holes stay holes; modes, owners,
/// times, extended attributes and hard links are kept, as far as the caller may set them.
///
/// Like `cp -r`: into the directory `to` if that exists (under the last name of `from`; the
/// contents of the root go straight in), otherwise as `to`. Nothing that exists is overwritten.
/// What fails is handed to `report` (path below `to`, error) and copying goes on.
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

struct Copy<'a> {
    volume: &'a Volume,
    /// What the paths in `links` begin from.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown() {
        let show = |sec, nsec| format_time(Time { sec, nsec });
        assert_eq!(show(0, 0), "1970-01-01 00:00:00.000000000 +0000");
        assert_eq!(show(-1, 999_999_999), "1969-12-31 23:59:59.999999999 +0000");
        assert_eq!(show(951_782_400, 5), "2000-02-29 00:00:00.000000005 +0000");
        assert_eq!(
            show(13_569_465_600, 0),
            "2400-01-01 00:00:00.000000000 +0000"
        );
        assert_eq!(
            show(-2_147_483_648, 0),
            "1901-12-13 20:45:52.000000000 +0000"
        );
    }

    #[test]
    fn modes_are_shown() {
        assert_eq!(mode_string(0o100644), "-rw-r--r--");
        assert_eq!(mode_string(0o047777), "drwsrwsrwt");
        assert_eq!(mode_string(0o127000), "l--S--S--T");
    }

    #[test]
    fn names_are_escaped() {
        assert_eq!(escape(b"plain \xc3\xa4"), "plain \u{e4}");
        assert_eq!(escape(b"a\nb\\c\x1b[1m\xff"), "a\\012b\\\\c\\033[1m\\377");
    }
}
