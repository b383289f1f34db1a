//! Rules of the mount that the server sees to, as the kernel leaves them to it: whether anything may
//! change, and which reads move access times.
//!
//! The kernel moves access times by the rules of the mount that a file was opened through. Where the
//! rules of the mount that is served are not the host's, files are opened through a private copy of the host's
//! mount, which has them. That holds for reads of the kernel at a backing file as well, and, as the
//! copy's rules can be changed, for files that are open.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::OFlags;
use rustix::mount::MountFlags;

use crate::Source;
use crate::inode::Inode;

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

    /// Whether the rules for access times hold for a reader of the host's file itself.
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
        match self.rules.own_times() && inode.key.handle.is_some() {
            true => self.open_inode(inode, flags).unwrap_or(file),
            false => file,
        }
    }
}
