//! A mount of the host below the source, and its private copy with other rules for access times.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use rustix::fs::{OFlags, StatVfsMountFlags, Statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, OpenTreeFlags};

use crate::sys::{self, O_PATH, Result};

/// MOUNT_ATTR_NOATIME, MOUNT_ATTR_STRICTATIME and the mask of their field; MOUNT_ATTR_NODIRATIME.
const NOATIME: u64 = 0x10;
const STRICTATIME: u64 = 0x20;
const ATIME: u64 = 0x70;
const NODIRATIME: u64 = 0x80;

/// A file system's number: f_fsid of statfs(2).
pub(crate) type FsId = [u8; 8];

/// A mount below the source.
pub(crate) struct Mount {
    /// As in `/proc/self/mountinfo`.
    pub(crate) id: u64,
    /// A descriptor that handles of this mount are opened through; `None` when it has none that
    /// can be opened.
    pub(crate) fd: Option<OwnedFd>,
    /// A private copy with rules for access times of its own, once there was a need.
    pub(crate) private: OnceLock<Option<MountCopy>>,
    /// statfs(2)'s f_type.
    pub(crate) fs_type: i64,
    /// Its device, of all its files where handles tell the inode's number.
    pub(crate) device: (u32, u32),
    /// Its file system, if changes there are watched for.
    pub(crate) watched: OnceLock<FsId>,
    /// It keeps blocks for root.
    pub(crate) reserves: bool,
    /// Its data is in memory.
    pub(crate) in_memory: bool,
    /// Others answer for it, and may not do so.
    pub(crate) remote: bool,
    /// Its file system has no uncached I/O (RWF_DONTCACHE).
    pub(crate) no_dontcache: AtomicBool,
    /// Its files can't be backing files.
    pub(crate) no_backing: AtomicBool,
}

/// Whether others answer for a file system of this type (statfs(2)'s f_type): FUSE, NFS, CIFS, 9P, Ceph,
/// AFS (two of them), autofs, Coda, OCFS2, GFS2, Lustre, or one that did not even say.
pub(crate) fn is_remote(fs_type: i64) -> bool {
    matches!(
        fs_type,
        0x6573_5546
            | 0x6969
            | 0xff53_4d42
            | 0xfe53_4d42
            | 0x0102_1997
            | 0x00c3_6400
            | 0x5346_414f
            | 0x6b41_4653
            | 0x0187
            | 0x7375_7245
            | 0x7461_636f
            | 0x0116_1970
            | 0x0bd0_0bd0
            | 0
    )
}

impl Mount {
    /// Of a file on it. It has handles if that file has one which can be opened.
    pub(crate) fn new(id: u64, file: BorrowedFd<'_>, st: &Statx) -> Self {
        let kind = u32::from(st.stx_mode) & libc::S_IFMT;
        let try_handles = || {
            let fd = match kind {
                libc::S_IFDIR => sys::reopen(file, OFlags::RDONLY | OFlags::DIRECTORY)?,
                libc::S_IFREG => sys::reopen(file, OFlags::RDONLY | OFlags::NONBLOCK)?,
                // Opening anything else could act on a device or wait for a peer.
                _ => return Err(Errno::OPNOTSUPP),
            };
            let (handle, _) = sys::handle_at(file, c"")?;
            sys::open_handle(fd.as_fd(), &handle, O_PATH)?;
            Ok(fd)
        };
        let fd = try_handles();
        if let Err(errno) = &fd {
            tracing::info!(mount = id, %errno, "no file handles: a descriptor for every inode");
        }
        let fs_type = rustix::fs::fstatfs(file).map_or(0, |stat| stat.f_type);
        Self {
            id,
            fd: fd.ok(),
            private: OnceLock::new(),
            fs_type,
            remote: is_remote(fs_type),
            // ext2 to ext4, and F2FS.
            reserves: matches!(fs_type, 0xef53 | 0xf2f5_2010),
            device: (st.stx_dev_major, st.stx_dev_minor),
            watched: OnceLock::new(),
            in_memory: uvfs_io::ops::in_memory(file),
            no_dontcache: AtomicBool::new(false),
            no_backing: AtomicBool::new(false),
        }
    }
}

/// A private copy of a host's mount.
pub(crate) struct MountCopy {
    /// As it was made, which keeps it a mount whose rules can be changed.
    tree: OwnedFd,
    /// The descriptor that handles are opened through; that can't be the other.
    root: OwnedFd,
}

/// A private copy of the mount that `fd` is on, without those mounted below it, beginning at `fd`.
pub(crate) fn alone(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(fd, c"", flags)
}

/// Has access times move by these rules in a private copy of `host`.
fn apply(copy: BorrowedFd<'_>, host: BorrowedFd<'_>, rules: MountFlags) -> Result<()> {
    let host = rustix::fs::fstatvfs(host)?.f_flag;
    let mut set = if rules.contains(MountFlags::STRICTATIME) {
        STRICTATIME
    } else if rules.contains(MountFlags::NOATIME) || host.contains(StatVfsMountFlags::NOATIME) {
        NOATIME
    } else if host.contains(StatVfsMountFlags::RELATIME) {
        0
    } else {
        STRICTATIME
    };
    if rules.contains(MountFlags::NODIRATIME) || host.contains(StatVfsMountFlags::NODIRATIME) {
        set |= NODIRATIME;
    }
    sys::mount_setattr(copy, set, ATIME | NODIRATIME)
}

impl Mount {
    /// The private copy, made when it is first needed. `None` where the server may not make one, or the file
    /// system has no handles that files could be opened by.
    pub(crate) fn private(&self, rules: MountFlags) -> Option<BorrowedFd<'_>> {
        let made = self.private.get_or_init(|| {
            let host = self.fd.as_ref()?.as_fd();
            let made = alone(host).and_then(|tree| {
                apply(tree.as_fd(), host, rules)?;
                let root = sys::reopen(tree.as_fd(), OFlags::RDONLY | OFlags::NONBLOCK)?;
                Ok(MountCopy { tree, root })
            });
            made.inspect_err(|errno| {
                tracing::info!(mount = self.id, %errno, "access times move as on the host");
            })
            .ok()
        });
        made.as_ref().map(|copy| copy.root.as_fd())
    }

    /// Has access times of what is open move by these rules.
    pub(crate) fn follow(&self, rules: MountFlags) {
        if let (Some(Some(copy)), Some(host)) = (self.private.get(), &self.fd)
            && let Err(errno) = apply(copy.tree.as_fd(), host.as_fd(), rules)
        {
            tracing::warn!(mount = self.id, %errno, "access times move by the old rules");
        }
    }
}
