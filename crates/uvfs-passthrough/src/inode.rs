//! Inodes: which host file a node number stands for, and how it is reached.
//!
//! A file on a mount whose file system has handles is known by its handle alone and holds no
//! descriptor; a bounded cache keeps O_PATH descriptors of those in use. Elsewhere each inode holds
//! an O_PATH descriptor, which also keeps its inode number from being used again.

mod crowd;
mod find;
mod kept;
mod key;
mod mounts;
mod path_fds;
mod removed;
mod saved;
mod table;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, SystemTime};

use rustix::fs::{OFlags, Statx};
use uvfs_io::ops::File;
use uvfs_server::fs::Node;

use crate::mount::Mount;
use crate::owners::Owners;
use crate::sys;
pub(crate) use crowd::{Crowd, patiently};
pub(crate) use find::root;
use kept::Kept;
pub(crate) use key::Key;
pub(crate) use mounts::Mounts;
pub(crate) use path_fds::PathFds;
pub(crate) use removed::Removed;
pub(crate) use table::Inodes;
use uvfs_sys::lock;

/// A file that changed no longer ago than this may change again without its time changing.
const TIME_GRAIN: Duration = Duration::from_millis(50);

/// The attributes that the kernel was last told, to know whether what it has cached is still right.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Told {
    pub(crate) mtime: (i64, u32),
    pub(crate) size: u64,
}

impl Told {
    pub(crate) fn of(st: &Statx) -> Self {
        Self {
            mtime: (st.stx_mtime.tv_sec, st.stx_mtime.tv_nsec),
            size: st.stx_size,
        }
    }

    /// Whether a change from now on would show in the file's time.
    pub(crate) fn is_settled(&self) -> bool {
        let secs = u64::try_from(self.mtime.0).unwrap_or(0);
        let changed = SystemTime::UNIX_EPOCH + Duration::new(secs, self.mtime.1);
        SystemTime::now()
            .duration_since(changed)
            .is_ok_and(|age| age > TIME_GRAIN)
    }
}

/// The attributes that decide which users may use a file, but for its ACL: a change of that moves the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    ctime: (i64, u32),
    mode: u16,
    uid: u32,
    gid: u32,
}

impl Access {
    pub(crate) fn of(st: &Statx) -> Self {
        Self {
            ctime: (st.stx_ctime.tv_sec, st.stx_ctime.tv_nsec),
            mode: st.stx_mode,
            uid: st.stx_uid,
            gid: st.stx_gid,
        }
    }

    pub(crate) fn mode_and_owner(&self) -> (u16, u32, u32) {
        (self.mode, self.uid, self.gid)
    }
}

/// A backing file that is registered with the kernel while the inode is open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackingUse {
    pub(crate) id: i32,
    pub(crate) opens: u32,
    /// There was an open for reading and writing among them, which can be mapped to store to.
    pub(crate) mappable: bool,
}

/// The part of a file that the kernel may have cached and that is old after a write that it did not see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stale {
    /// The attributes that were told last are still right.
    Nothing,
    Attributes,
    /// Its pages, and its attributes.
    Contents,
}

/// The changing part of an inode. There are as many as the kernel and clients know files: fields that few
/// have lie elsewhere.
#[derive(Default)]
pub(crate) struct State {
    /// An O_PATH descriptor in the cache.
    fd: Option<Arc<OwnedFd>>,
    /// Of an inode that has lost its last name.
    kept: Option<Arc<Kept>>,
    /// The descriptor of the file as it was last opened. Reaches it when its last name is gone, at no cost.
    pub(crate) open: Weak<File>,
    /// None when it has none cached.
    pub(crate) told: Option<Told>,
    /// As the kernel was last told, who then checks its callers by that.
    pub(crate) access: Option<Access>,
    /// A change since `told` would show in the file's time.
    pub(crate) settled: bool,
    /// The kernel may have cached set-user-id or set-group-id bits of the file.
    pub(crate) set_id: bool,
    /// The file's size and time when the kernel was given its contents, unasked.
    pub(crate) given: Option<Box<Told>>,
    /// Of the kernel's opens those with a backing file, and how many there are without: never both
    /// at a time.
    pub(crate) backing: Option<BackingUse>,
    pub(crate) plain: u32,
    /// There were opens with a backing file since the last one that the kernel's cache was used by.
    pub(crate) was_backed: bool,
    /// The owners of locks on ranges of it (with the option `host_locks`).
    pub(crate) owners: Owners,
}

impl State {
    /// Whether programs may store to the file through a mapping of its backing file. That moves its times unseen by the
    /// mount, so the kernel caches no attributes meanwhile.
    pub(crate) fn is_mappable(&self) -> bool {
        self.backing.is_some_and(|backing| backing.mappable)
    }
}

/// A host file that the kernel knows.
pub(crate) struct Inode {
    pub(crate) node: Node,
    pub(crate) key: Key,
    /// S_IFMT bits of its mode.
    pub(crate) kind: u32,
    /// Its time of birth; zeros where the file system has none.
    pub(crate) born: (i64, u32),
    pub(crate) mount: Arc<Mount>,
    /// The O_PATH descriptor of an inode without a handle.
    held: Option<OwnedFd>,
    /// The cached descriptor was used since the cache last looked.
    used: AtomicBool,
    /// Open files of it.
    pub(crate) opens: AtomicUsize,
    state: Mutex<State>,
}

impl Inode {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Closes the cached descriptor, outside the lock.
    fn drop_fd(&self) {
        let fd = self.state().fd.take();
        drop(fd);
    }

    /// Whether these are its attributes, as far as they tell.
    fn is(&self, st: &Statx) -> bool {
        let device = (st.stx_dev_major, st.stx_dev_minor);
        let same = self.key.ino == st.stx_ino && self.key.device == device;
        same && self.mount.id == st.stx_mnt_id && self.born == born(st)
    }

    /// Whether the kernel is told of what the host changes: then it may cache for ever.
    pub(crate) fn is_watched(&self) -> bool {
        self.mount.watched.get().is_some() && self.key.handle.is_some()
    }

    /// A file of the host was written to, by a program of the host or by the kernel of the mount, which
    /// writes to backing files itself. Says what the kernel may have cached of it that is old now.
    pub(crate) fn written(&self) -> Stale {
        let (told, open) = {
            let mut state = self.state();
            state.given = None;
            if !self.is_regular() {
                return Stale::Attributes;
            }
            // The kernel drops pages that are older than a backing file before a program can read them.
            if state.backing.is_none() && (!state.was_backed || state.plain > 0) {
                return Stale::Contents;
            }
            (state.told, state.open.upgrade())
        };
        let Some(told) = told else {
            return Stale::Contents;
        };
        let Some(now) = self.attributes_now(open) else {
            return Stale::Contents;
        };
        match now.is_ok_and(|now| told == Told::of(&now)) {
            true => Stale::Nothing,
            // Its pages are none, but the size that the kernel knows may be too small.
            false => Stale::Contents,
        }
    }

    /// The attributes of a file of a watched file system, by `open` if that is a descriptor of it.
    fn attributes_now(&self, open: Option<Arc<File>>) -> Option<sys::Result<Statx>> {
        match (open, &self.mount.fd, &self.key.handle) {
            (Some(open), ..) => Some(sys::stat(open.as_fd())),
            (None, Some(mount), Some(handle)) => Some(
                sys::open_handle(mount.as_fd(), handle, OFlags::PATH)
                    .and_then(|fd| sys::stat(fd.as_fd())),
            ),
            _ => None,
        }
    }

    /// The size of a regular file, if its file system is watched for changes of the host.
    pub(crate) fn size_now(&self) -> Option<u64> {
        if !self.is_regular() || !self.is_watched() {
            return None;
        }
        let open = self.state().open.upgrade();
        let now = self.attributes_now(open)?.ok()?;
        Some(now.stx_size)
    }

    pub(crate) fn is_regular(&self) -> bool {
        self.kind == libc::S_IFREG
    }

    pub(crate) fn is_dir(&self) -> bool {
        self.kind == libc::S_IFDIR
    }
}

/// A file's time of birth.
pub(crate) fn born(st: &Statx) -> (i64, u32) {
    (st.stx_btime.tv_sec, st.stx_btime.tv_nsec)
}
