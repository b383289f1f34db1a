//! Rules of the mount that the server sees to, as the kernel leaves them to it: whether anything may
//! change, and which reads move access times.
//!
//! The kernel moves access times by the rules of the mount that a file was opened through. Where the
//! rules of the mount that is served are not the host's, files are opened through a private copy of the host's
//! mount, which has them. That holds for reads of the kernel at a backing file as well, and, as the
//! copy's rules can be changed, for files that are open.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{OFlags, StatVfsMountFlags};
use rustix::mount::{MountFlags, OpenTreeFlags};

use crate::Source;
use crate::inode::{Inode, Mount};
use crate::sys::{self, Result};

/// MOUNT_ATTR_NOATIME, MOUNT_ATTR_STRICTATIME and the mask of their field; MOUNT_ATTR_NODIRATIME.
const NOATIME: u64 = 0x10;
const STRICTATIME: u64 = 0x20;
const ATIME: u64 = 0x70;
const NODIRATIME: u64 = 0x80;

/// The flags about access times.
const TIMES: MountFlags = MountFlags::NOATIME
    .union(MountFlags::NODIRATIME)
    .union(MountFlags::STRICTATIME);

/// The rules that hold now.
pub(crate) struct Rules(AtomicU32);

impl Rules {
    pub(crate) fn new(rules: MountFlags) -> Self {
        Self(AtomicU32::new(rules.bits()))
    }

    pub(crate) fn set(&self, rules: MountFlags) {
        self.0.store(rules.bits(), Ordering::Relaxed);
    }

    pub(crate) fn now(&self) -> MountFlags {
        MountFlags::from_bits_retain(self.0.load(Ordering::Relaxed))
    }

    pub(crate) fn read_only(&self) -> bool {
        self.now().contains(MountFlags::RDONLY)
    }

    /// No read moves an access time.
    pub(crate) fn noatime(&self) -> bool {
        self.now().contains(MountFlags::NOATIME)
    }

    /// All reads that get here move it, so the kernel has to be made to ask.
    pub(crate) fn strictatime(&self) -> bool {
        self.now().contains(MountFlags::STRICTATIME)
    }

    /// Access times move by other rules than the host's.
    pub(crate) fn own_times(&self) -> bool {
        self.now().intersects(TIMES)
    }
}

/// A private copy of a host's mount.
pub(crate) struct Copy {
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
    fn private(&self, rules: MountFlags) -> Option<BorrowedFd<'_>> {
        let made = self.private.get_or_init(|| {
            let host = self.fd.as_ref()?.as_fd();
            let made = alone(host).and_then(|tree| {
                apply(tree.as_fd(), host, rules)?;
                let root = sys::reopen(tree.as_fd(), OFlags::RDONLY | OFlags::NONBLOCK)?;
                Ok(Copy { tree, root })
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

impl Source {
    /// The descriptor that a handle of this inode is opened through with these flags.
    pub(crate) fn mount_for<'a>(&self, inode: &'a Inode, flags: OFlags) -> Option<BorrowedFd<'a>> {
        let own = !flags.contains(OFlags::PATH) && self.rules.own_times();
        let private = match own {
            true => inode.mount.private(self.rules.now()),
            false => None,
        };
        private.or(inode.mount.fd.as_ref().map(AsFd::as_fd))
    }

    /// Whether the rules for access times hold for whoever reads at the host's file itself.
    pub(crate) fn keeps_times(&self, inode: &Inode) -> bool {
        !self.rules.own_times() || inode.mount.private(self.rules.now()).is_some()
    }

    /// Opens a file again that was opened by its name, where it has to be by its handle for the rules.
    pub(crate) fn by_rules(
        &self,
        inode: &std::sync::Arc<Inode>,
        file: OwnedFd,
        flags: OFlags,
    ) -> OwnedFd {
        match self.rules.own_times() && inode.key.handle().is_some() {
            true => self.open_inode(inode, flags).unwrap_or(file),
            false => file,
        }
    }
}
