//! Follows the mounts below the source. A mount point's name leads elsewhere as soon as something is
//! mounted there, which no event of a file system tells.

use std::collections::BTreeSet;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use uvfs_server::mount::{self, MountLine};

use crate::inode::{Inode, Inodes, Key};
use crate::sys::{self, BENEATH, ProcPath};

const TABLE: &str = "/proc/self/mountinfo";

/// Follows the table of mounts.
pub(crate) struct Mounted {
    /// Ready (POLLPRI) when the table has changed.
    table: File,
    source: Arc<OwnedFd>,
    /// Mounts below the source, with their ids.
    now: BTreeSet<(u64, PathBuf)>,
}

impl AsFd for Mounted {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.table.as_fd()
    }
}

impl Mounted {
    pub(crate) fn new(source: Arc<OwnedFd>) -> std::io::Result<Self> {
        let mut mounted = Self {
            table: File::open(TABLE)?,
            source,
            now: BTreeSet::new(),
        };
        mounted.now = mounted.read()?;
        Ok(mounted)
    }

    /// Counts all that is mounted now as new.
    pub(crate) fn forget(&mut self) {
        self.now.clear();
    }

    fn read(&self) -> std::io::Result<BTreeSet<(u64, PathBuf)>> {
        let path = ProcPath::new(self.source.as_fd());
        let source = rustix::fs::readlink(path.as_c_str(), Vec::new())?;
        let source = PathBuf::from(OsString::from_vec(source.into_bytes()));
        let below = |line: MountLine| {
            let at = line.at.strip_prefix(&source).ok()?;
            (at != Path::new("")).then(|| (line.id, at.to_owned()))
        };
        Ok(mount::table()?.into_iter().filter_map(below).collect())
    }

    /// The names that lead elsewhere since the last call, with their directories, as far as the server knows those.
    pub(crate) fn changed(&mut self, inodes: &Inodes) -> Vec<(Arc<Inode>, CString)> {
        let Ok(now) = self.read() else {
            return Vec::new();
        };
        let before = std::mem::replace(&mut self.now, now);
        let changed = before.symmetric_difference(&self.now);
        changed
            .filter_map(|(_, path)| {
                let name = CString::new(path.file_name()?.as_bytes()).ok()?;
                Some((self.known(path.parent()?, inodes)?, name))
            })
            .collect()
    }

    /// The inode of a directory below the source.
    fn known(&self, path: &Path, inodes: &Inodes) -> Option<Arc<Inode>> {
        let path = match path == Path::new("") {
            true => Path::new("."),
            false => path,
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat2(&*self.source, path, flags, Mode::empty(), BENEATH).ok()?;
        let st = sys::stat(fd.as_fd()).ok()?;
        let (handle, mount) = sys::handle_at(fd.as_fd(), c"").ok()?;
        inodes.known(&Key::new(mount, &st, Some(handle)))
    }
}
