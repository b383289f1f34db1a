//! Directories.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use rustix::fs::{FileType, OFlags, SeekFrom};
use rustix::io::Errno;
use uvfs_io::ops::File;
use uvfs_server::fs::{Context, DirEntry, DirSink, Handle, Node, OpenFlags, Opened};

use crate::Source;
use crate::inode::Inode;
use crate::sys::{self, Result};
use uvfs_sys::lock;

/// Bytes of entries read from the host at once.
const BUFFER: usize = 32 << 10;
/// Bytes of struct linux_dirent64 before the name: d_ino, d_off, d_reclen, d_type.
const HEADER: usize = 19;

/// The entries of a directory that were read and not yet given on.
#[derive(Default)]
struct Reader {
    /// Empty until the first listing.
    buf: Box<[u8]>,
    /// `buf[at..end]` holds whole entries.
    at: usize,
    end: usize,
    /// The offset that the entry at `at` is listed from: 0, or the d_off of the one before it.
    offset: u64,
}

/// An open directory.
pub(crate) struct OpenDir {
    pub(crate) fd: Arc<File>,
    inode: Arc<Inode>,
    reader: Mutex<Reader>,
}

impl AsFd for OpenDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One entry as getdents64(2) gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dirent<'a> {
    ino: u64,
    /// Where the next entry is listed from.
    next: u64,
    kind: u32,
    /// With its 0 byte.
    name: &'a CStr,
    /// Bytes it takes.
    size: usize,
}

impl<'a> Dirent<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (ino, rest) = bytes.split_first_chunk::<8>()?;
        let (next, rest) = rest.split_first_chunk::<8>()?;
        let (size, rest) = rest.split_first_chunk::<2>()?;
        let size = usize::from(u16::from_ne_bytes(*size));
        let kind = u32::from(*rest.first()?);
        let name = CStr::from_bytes_until_nul(bytes.get(HEADER..size)?).ok()?;
        Some(Self {
            ino: u64::from_ne_bytes(*ino),
            next: u64::from_ne_bytes(*next),
            kind,
            name,
            size,
        })
    }

    fn kind(&self) -> FileType {
        // A DT_* number is the upper bits of a mode.
        FileType::from_raw_mode(self.kind << 12)
    }
}

impl Reader {
    /// Goes to `offset` and reads on where nothing is left; false at the end.
    fn fill(&mut self, fd: BorrowedFd<'_>, offset: u64) -> Result<bool> {
        // From the start, the directory is read anew: rewinddir(3) shows what changed.
        if offset != self.offset || offset == 0 {
            rustix::fs::seek(fd, SeekFrom::Start(offset))?;
            self.offset = offset;
            (self.at, self.end) = (0, 0);
        }
        self.more(fd)
    }

    fn more(&mut self, fd: BorrowedFd<'_>) -> Result<bool> {
        if self.at == self.end {
            if self.buf.is_empty() {
                self.buf = vec![0; BUFFER].into();
            }
            (self.at, self.end) = (0, 0);
            self.end = sys::getdents(fd, &mut self.buf)?;
        }
        Ok(self.at < self.end)
    }
}

impl Source {
    /// The open directory with this handle. Without one, which is 0, it is opened for this request.
    pub(crate) fn dir(&self, node: Node, fh: Handle) -> Result<Arc<OpenDir>> {
        if fh == Handle(0) && self.lists_unopened.load(Ordering::Relaxed) {
            return Ok(Arc::new(self.host_dir(self.inode(node)?)?));
        }
        self.dirs.get(fh).ok_or(Errno::BADF)
    }

    /// Opens a directory of the host.
    fn host_dir(&self, inode: Arc<Inode>) -> Result<OpenDir> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let fd = match self.rules.noatime() {
            true => self.open_inode(&inode, flags | OFlags::NOATIME),
            false => Err(Errno::PERM),
        };
        let fd = match fd {
            Err(Errno::PERM) => self.open_inode(&inode, flags)?,
            fd => fd?,
        };
        Ok(OpenDir {
            fd: Arc::new(fd.into()),
            inode,
            reader: Mutex::default(),
        })
    }

    /// Gives an open directory the number that it had for an earlier server.
    pub(crate) fn restore_dir(&self, inode: Arc<Inode>, fd: OwnedFd, fh: Handle) -> bool {
        let dir = OpenDir {
            fd: Arc::new(fd.into()),
            inode,
            reader: Mutex::default(),
        };
        self.dirs.restore(fh, Arc::new(dir))
    }

    pub(crate) fn open_dir(&self, cx: &Context, node: Node) -> Result<Opened> {
        let dir = self.host_dir(self.inode(node)?)?;
        if self.creds.exceeds(cx) {
            let st = sys::stat(dir.as_fd())?;
            self.check_open(cx, &dir.inode, dir.as_fd(), &st, OFlags::RDONLY)?;
        }
        let flags = match (dir.inode.is_watched(), self.options.cache_readdir) {
            _ if self.rules.strictatime() => OpenFlags::empty(),
            (true, _) => OpenFlags::CACHE_DIR | OpenFlags::KEEP_CACHE,
            (false, true) => OpenFlags::CACHE_DIR,
            (false, false) => OpenFlags::empty(),
        };
        let fh = self.dirs.insert(Arc::new(dir)).ok_or(Errno::NFILE)?;
        Ok(Opened::new(fh).with_flags(flags))
    }

    /// Lists entries until the sink is full. The host's own offsets go to the kernel, so that a
    /// listing goes on at the right place whatever was made or removed since.
    pub(crate) fn list(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let dir = self.dir(node, fh)?;
        let mut reader = lock(&dir.reader);
        let reader = &mut *reader;
        let plus = sink.wants_attributes();
        let mut given = false;
        let mut more = reader.fill(dir.as_fd(), sink.offset());
        loop {
            match more {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                // Entries that were given are not lost; the error comes with the next listing.
                Err(_) if given => return Ok(()),
                Err(errno) => return Err(errno),
            }
            let entry = Dirent::parse(&reader.buf[reader.at..reader.end]).ok_or(Errno::IO)?;
            if !self.give(cx, &dir, &entry, plus, sink)? {
                return Ok(());
            }
            given = true;
            (reader.at, reader.offset) = (reader.at + entry.size, entry.next);
            more = reader.more(dir.as_fd());
        }
    }

    /// Reads what [`Source::list_read`] gives.
    pub(crate) fn read_ahead(&self, node: Node, fh: Handle, offset: u64) -> Result<Arc<OpenDir>> {
        let dir = self.dir(node, fh)?;
        lock(&dir.reader).fill(dir.as_fd(), offset)?;
        Ok(dir)
    }

    /// Lists entries that were read, without asking the host for anything: no attributes.
    pub(crate) fn list_read(&self, dir: &OpenDir, sink: &mut dyn DirSink) -> Result<()> {
        let mut reader = lock(&dir.reader);
        let reader = &mut *reader;
        while reader.at < reader.end {
            let entry = Dirent::parse(&reader.buf[reader.at..reader.end]).ok_or(Errno::IO)?;
            let shown = DirEntry {
                ino: entry.ino,
                next: entry.next,
                kind: entry.kind(),
                name: entry.name.to_bytes(),
            };
            let fits = match sink.wants_attributes() {
                true => sink.add_plus(shown, &self.no_entry(entry.ino)),
                false => sink.add(shown),
            };
            if !fits {
                break;
            }
            (reader.at, reader.offset) = (reader.at + entry.size, entry.next);
        }
        Ok(())
    }

    /// Gives one entry; false when it does not fit.
    fn give(
        &self,
        cx: &Context,
        dir: &OpenDir,
        entry: &Dirent<'_>,
        plus: bool,
        sink: &mut dyn DirSink,
    ) -> Result<bool> {
        let name = entry.name.to_bytes();
        let dots = name == b"." || name == b"..";
        // Nothing above the source shows.
        let above = name == b".." && dir.inode.node == uvfs_server::fs::ROOT;
        let ino = if above { dir.inode.key.ino } else { entry.ino };
        let shown = DirEntry {
            ino,
            next: entry.next,
            kind: entry.kind(),
            name,
        };
        if !plus {
            return Ok(sink.add(shown));
        }
        if !sink.fits(name.len()) {
            return Ok(false);
        }
        if dots || self.crowd.is_busy() {
            return Ok(sink.add_plus(shown, &self.no_entry(ino)));
        }
        // Names are looked up on the host's own mount, which others are mounted below.
        let path = match self.rules.own_times() {
            true => Some(self.path_fd(&dir.inode)?),
            false => None,
        };
        let at = path.as_ref().map_or(dir.as_fd(), AsFd::as_fd);
        match self.find(&dir.inode, at, entry.name) {
            Ok((inode, st)) => {
                let found = self.entry(cx, &inode, &st);
                let fits = sink.add_plus(shown, &found);
                if !fits {
                    self.inodes.forget(inode.node, 1);
                }
                Ok(fits)
            }
            // Removed since it was read.
            Err(Errno::NOENT) => Ok(true),
            Err(_) => Ok(sink.add_plus(shown, &self.no_entry(ino))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Broken directory entries of a host file system don't crash the server.
    #[test]
    fn entries_are_parsed_within_bounds() {
        let mut bytes = Vec::new();
        bytes.extend(7u64.to_ne_bytes());
        bytes.extend(99u64.to_ne_bytes());
        bytes.extend(24u16.to_ne_bytes());
        bytes.extend(b"\x08abc\0\0");
        let entry = Dirent::parse(&bytes).unwrap();
        assert_eq!(
            (entry.ino, entry.next, entry.kind, entry.size),
            (7, 99, 8, 24)
        );
        assert_eq!(entry.name, c"abc");
        for len in 0..bytes.len() {
            assert_eq!(Dirent::parse(&bytes[..len]), None);
        }
        for size in [0u16, 1, 18, 19, 22, 25, u16::MAX] {
            bytes[16..18].copy_from_slice(&size.to_ne_bytes());
            assert_eq!(Dirent::parse(&bytes), None, "{size}");
        }
    }
}
