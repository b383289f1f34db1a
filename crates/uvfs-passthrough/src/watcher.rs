//! The fanotify group that watches the source's file systems, and whether there is one.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities};
use rustix::time::ClockId;
use uvfs_queue::shm::SharedMemory;
use uvfs_server::fs::{Node, SessionHandle, Watch};
use uvfs_sys::lock;

use crate::mount::{FsId, Mount};
use crate::sys::{self, ProcPath, Result};

/// How long names, attributes and data are cached where the kernel is told of changes.
pub(crate) const FOREVER: Duration = Duration::from_secs(1 << 30);
/// FUSE_NOTIFY_INC_EPOCH, which drops all names, came with this version of the protocol (Linux 6.16).
const EPOCH_MINOR: u32 = 44;

/// Events that are waited for: of names, and of the inodes themselves.
pub(crate) const NAMES: u64 =
    libc::FAN_CREATE | libc::FAN_DELETE | libc::FAN_MOVED_FROM | libc::FAN_MOVED_TO;
pub(crate) const CONTENTS: u64 = libc::FAN_MODIFY | libc::FAN_CLOSE_WRITE;
pub(crate) const MASK: u64 = NAMES | CONTENTS | libc::FAN_ATTRIB | libc::FAN_ONDIR;

const NO_HANDLES: &str = "the server can't open files of the source by handle, which takes CAP_DAC_READ_SEARCH and a \
    file system that has handles";

/// A fanotify group, and counts of what it reported. The group and the memory stay when the server is killed.
pub(crate) struct Watcher {
    pub(crate) events: OwnedFd,
    pub(crate) recent: Recent,
    /// An earlier server has left both, and no event of names is missing.
    pub(crate) goes_on: bool,
    /// Nor is one of contents and attributes.
    contents_go_on: bool,
    /// Told when the mount ends.
    pub(crate) stop: OwnedFd,
    /// Batches that were begun, and events that they had.
    pub(crate) batches: AtomicU64,
    pub(crate) count: AtomicU64,
    unwatched: AtomicU64,
}

/// Bytes of events read at once.
pub(crate) const BUFFER: usize = 64 << 10;
/// Room that any event has.
const EVENT: usize = 4 << 10;
/// So many buffers of events are kept of each kind.
const BUFFERS: usize = 16;
/// The kinds: changes of names, with all that was read with them, and changes of contents and attributes alone. Programs that write
/// much make many of the latter, so that some may be lost.
const KINDS: usize = 2;
const OF_NAMES: usize = 0;
const OF_CONTENTS: usize = 1;
/// The kernel has been told of an event by then, several times.
const LATELY: Duration = Duration::from_secs(10);
/// Words of the memory: what it is, when a buffer of each kind was last used again too early, and when each had its last event.
const MAGIC: u64 = u64::from_be_bytes(*b"uvfswtch");
const LOST: usize = 8;
const TIMES: usize = 64;
const FIRST: usize = 4096;
const SIZE: usize = FIRST + KINDS * BUFFERS * BUFFER;

/// The changes of lately, as fanotify told of them, in memory that outlives the server: one that is killed may have
/// read events without having told the kernel. The next server tells the kernel of all that is here.
pub(crate) struct Recent {
    memory: SharedMemory,
    at: Mutex<[Place; KINDS]>,
    /// What the present buffer of contents tells of: nodes, and what has changed of each.
    told: Mutex<HashSet<(Node, u64)>>,
}

/// Where the next events of a kind go.
#[derive(Clone, Copy, Default)]
struct Place {
    buffer: usize,
    offset: usize,
    /// So many bytes there are not zero.
    used: usize,
}

impl Recent {
    fn new() -> std::io::Result<Self> {
        let memory = SharedMemory::create(c"uvfs-watch", SIZE)?;
        memory.u64_at(0).store(MAGIC, Ordering::Release);
        Ok(Self {
            memory,
            at: Mutex::default(),
            told: Mutex::default(),
        })
    }

    /// What an earlier server has left.
    fn open(fd: OwnedFd) -> std::io::Result<Self> {
        let memory = SharedMemory::open(fd, SIZE)?;
        if memory.len() != SIZE || memory.u64_at(0).load(Ordering::Acquire) != MAGIC {
            return Err(Errno::INVAL.into());
        }
        let recent = Self {
            memory,
            at: Mutex::default(),
            told: Mutex::default(),
        };
        for kind in 0..KINDS {
            let time = |buffer: &usize| recent.time(kind, *buffer).load(Ordering::Acquire);
            let last = (0..BUFFERS).max_by_key(time);
            recent.turn(kind, last.unwrap_or(0), now());
        }
        Ok(recent)
    }

    fn time(&self, kind: usize, buffer: usize) -> &AtomicU64 {
        self.memory.u64_at(TIMES + 8 * (kind * BUFFERS + buffer))
    }

    /// When events of a kind were lost; 0 if none were.
    fn lost(&self, kind: usize) -> &AtomicU64 {
        self.memory.u64_at(LOST + 8 * kind)
    }

    /// Where a buffer begins.
    fn start(kind: usize, buffer: usize) -> usize {
        FIRST + (kind * BUFFERS + buffer) * BUFFER
    }

    /// Goes on in the buffer behind this one.
    fn turn(&self, kind: usize, buffer: usize, now: u64) {
        let next = (buffer + 1) % BUFFERS;
        let time = self.time(kind, next).swap(0, Ordering::AcqRel);
        if is_lately(time, now) {
            self.lost(kind).store(now, Ordering::Release);
        }
        lock(&self.at)[kind] = Place {
            buffer: next,
            offset: 0,
            used: BUFFER,
        };
    }

    /// Reads events.
    pub(crate) fn read<'a>(
        &self,
        events: BorrowedFd<'_>,
        to: &'a mut [u8; BUFFER],
    ) -> Result<&'a [u8]> {
        let place = &mut lock(&self.at)[OF_NAMES];
        let at = Self::start(OF_NAMES, place.buffer) + place.offset;
        // A server that is killed in the next call can't say where the events end: zeros do.
        self.memory.zero(at, std::mem::take(&mut place.used));
        let len = sys::read_shared(events, &self.memory, at, BUFFER - place.offset)?;
        place.used = len;
        let read = &mut to[..len];
        self.memory.read(at, read);
        Ok(read)
    }

    /// Keeps the events that were read last.
    pub(crate) fn keep(&self) {
        let place = {
            let place = &mut lock(&self.at)[OF_NAMES];
            place.offset += std::mem::take(&mut place.used);
            *place
        };
        self.kept(OF_NAMES, place);
    }

    /// Keeps those of the events that were read last which tell of contents and attributes: nodes, what has changed of each (the
    /// event's mask), and the event.
    pub(crate) fn keep_contents<'a>(
        &self,
        events: impl IntoIterator<Item = (Node, u64, &'a [u8])>,
    ) {
        for (node, mask, event) in events {
            let place = {
                let place = &mut lock(&self.at)[OF_CONTENTS];
                let start = Self::start(OF_CONTENTS, place.buffer);
                if std::mem::take(&mut place.used) > 0 {
                    self.memory.zero(start, BUFFER);
                }
                if lock(&self.told).insert((node, mask)) {
                    self.memory.write(start + place.offset, event);
                    place.offset += event.len();
                }
                *place
            };
            self.kept(OF_CONTENTS, place);
        }
    }

    /// The buffer of `place` has an event more.
    fn kept(&self, kind: usize, place: Place) {
        let now = now();
        self.time(kind, place.buffer).store(now, Ordering::Release);
        if place.offset > BUFFER - EVENT {
            if kind == OF_CONTENTS {
                lock(&self.told).clear();
            }
            self.turn(kind, place.buffer, now);
        }
    }

    /// Whether all of lately is here.
    fn is_whole(&self, kind: usize) -> bool {
        !is_lately(self.lost(kind).load(Ordering::Acquire), now())
    }

    /// Gives what each buffer has to `each`.
    pub(crate) fn each(&self, to: &mut [u8; BUFFER], mut each: impl FnMut(&[u8])) {
        for (kind, buffer) in (0..KINDS).flat_map(|kind| (0..BUFFERS).map(move |n| (kind, n))) {
            self.memory.read(Self::start(kind, buffer), to);
            each(to);
        }
    }
}

/// Nanoseconds of a clock that all processes have.
fn now() -> u64 {
    uvfs_sys::nanoseconds(ClockId::Monotonic)
}

/// Whether a time, which is 0 if there is none, is not long ago.
fn is_lately(time: u64, now: u64) -> bool {
    time != 0 && now.saturating_sub(time) < LATELY.as_nanos() as u64
}

/// Whether a descriptor is a fanotify group.
fn is_group(fd: BorrowedFd<'_>) -> bool {
    let path = ProcPath::new(fd);
    let target = rustix::fs::readlink(path.as_c_str(), Vec::new());
    target.is_ok_and(|target| target.as_bytes() == b"anon_inode:[fanotify]")
}

/// A watcher, or why there is none; nothing before the mount begins.
#[derive(Default)]
pub(crate) struct Watching(OnceLock<std::result::Result<Arc<Watcher>, String>>);

impl Watching {
    pub(crate) fn get(&self) -> Option<&Arc<Watcher>> {
        self.0.get()?.as_ref().ok()
    }

    /// Notes why there is no watcher, or that there is one.
    pub(crate) fn set(&self, watcher: std::result::Result<Arc<Watcher>, String>) {
        let _ = self.0.set(watcher);
    }

    /// Moves with what the host changes. An inode that became known since this was read last may have
    /// changed without having been found: attributes that were read before then are to be read
    /// again.
    pub(crate) fn batches(&self) -> u64 {
        self.get()
            .map_or(0, |watcher| watcher.batches.load(Ordering::SeqCst))
    }

    pub(crate) fn report(&self) -> Option<Watch> {
        Some(match self.0.get()? {
            Ok(watcher) => Watch {
                why_not: None,
                unwatched: watcher.unwatched.load(Ordering::Relaxed),
                events: watcher.count.load(Ordering::Relaxed),
                goes_on: watcher.goes_on,
                contents_go_on: watcher.contents_go_on,
            },
            Err(why) => Watch {
                why_not: Some(why.clone()),
                ..Watch::default()
            },
        })
    }

    pub(crate) fn stop(&self) {
        if let Some(watcher) = self.get() {
            let _ = rustix::io::write(&watcher.stop, &1u64.to_ne_bytes());
        }
    }
}

/// Whether everything that changes on a file system of this type (statfs(2)'s f_type) changes through
/// this kernel and is reported, with handles that lead to inodes: ext2 to ext4, tmpfs and XFS.
///
/// Network file systems and FUSE report only what is changed here; overlayfs not what is changed
/// below it; btrfs tells of other subvolumes with other ids.
pub(crate) fn is_local(fs_type: i64) -> bool {
    matches!(fs_type, 0xef53 | 0x0102_1994 | 0x5846_5342)
}

/// Why a mark, or a watcher, can't be had, for people.
fn why_not(errno: Errno) -> String {
    let why = match errno {
        Errno::PERM => "the server lacks CAP_SYS_ADMIN, which fanotify takes",
        Errno::NOSYS | Errno::INVAL => "the kernel lacks fanotify with file handles (Linux 5.17)",
        Errno::OPNOTSUPP | Errno::NODEV | Errno::XDEV => {
            "the source's file system has no file handles, or no id, for fanotify"
        }
        Errno::MFILE | Errno::NOSPC => {
            "there are too many watchers (fs.fanotify.max_user_groups, max_user_marks)"
        }
        _ => return format!("fanotify: {errno}"),
    };
    why.into()
}

/// Tries whether this process may watch file systems for changes. Whether a source can be watched
/// depends on its file system as well.
///
/// # Errors
/// The reason why not, as a text.
pub fn can_watch() -> std::result::Result<(), String> {
    let watch = || {
        let events = sys::fanotify_init(0)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open("/", flags, Mode::empty())?;
        sys::fanotify_mark(events.as_fd(), root.as_fd(), MASK)
    };
    match watch() {
        // The root's own file system can't be watched; others may.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NODEV | Errno::XDEV) => {}
        Err(errno) => return Err(why_not(errno)),
    }
    let opens_handles =
        |now: CapabilitySets| now.effective.contains(CapabilitySet::DAC_READ_SEARCH);
    match capabilities(None).is_ok_and(opens_handles) {
        true => Ok(()),
        false => Err(NO_HANDLES.into()),
    }
}

impl Watcher {
    /// Watches the file system of the source's mount. `minor` is the kernel's version of the
    /// protocol. Goes on where an earlier server's watcher ended.
    pub(crate) fn new(
        root: &Mount,
        minor: u32,
        session: &dyn SessionHandle,
    ) -> std::result::Result<Arc<Self>, String> {
        let left = session
            .kept()
            .filter(|[events, _]| is_group(events.as_fd()));
        let left = left.and_then(|[events, recent]| Some((events, Recent::open(recent).ok()?)));
        let (events, recent, [goes_on, contents_go_on]) = match left {
            Some((events, recent)) => {
                let whole = [OF_NAMES, OF_CONTENTS].map(|kind| recent.is_whole(kind));
                (events, recent, whole)
            }
            None => {
                // Where names can't all be dropped no event may be lost.
                let unlimited = match minor < EPOCH_MINOR {
                    true => libc::FAN_UNLIMITED_QUEUE,
                    false => 0,
                };
                let events = sys::fanotify_init(unlimited).map_err(why_not)?;
                let recent = Recent::new().map_err(|error| format!("memory: {error}"))?;
                session.keep([events.as_fd(), recent.memory.as_fd()]);
                (events, recent, [false; 2])
            }
        };
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| format!("eventfd: {errno}"))?;
        let watcher = Self {
            events,
            recent,
            goes_on,
            contents_go_on,
            stop,
            batches: AtomicU64::new(0),
            count: AtomicU64::new(0),
            unwatched: AtomicU64::new(0),
        };
        watcher.mark(root)?;
        Ok(Arc::new(watcher))
    }

    /// Watches the file system of a mount.
    fn mark(&self, mount: &Mount) -> std::result::Result<(), String> {
        let fd = match &mount.fd {
            Some(fd) if is_local(mount.fs_type) => fd.as_fd(),
            Some(_) => {
                return Err(format!(
                    "file systems of type {:#x} may change unseen: not one of ext2 to ext4, XFS, tmpfs",
                    mount.fs_type
                ));
            }
            None => {
                return Err(NO_HANDLES.into());
            }
        };
        let id = fs_id(fd).map_err(why_not)?;
        sys::fanotify_mark(self.events.as_fd(), fd, MASK).map_err(why_not)?;
        let _ = mount.watched.set(id);
        Ok(())
    }

    /// Watches the file system of a further mount, if it can.
    pub(crate) fn add(&self, mount: &Mount) {
        if let Err(why) = self.mark(mount) {
            tracing::info!(mount = mount.id, why, "changes are not watched for");
            self.unwatched.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The id of the file system of `fd`, as events have it.
fn fs_id(fd: BorrowedFd<'_>) -> Result<FsId> {
    // Two words, the first one low.
    let id = rustix::fs::fstatvfs(fd)?.f_fsid;
    let (a, b) = ((id as u32).to_ne_bytes(), ((id >> 32) as u32).to_ne_bytes());
    Ok(std::array::from_fn(|i| if i < 4 { a[i] } else { b[i - 4] }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next server finds each change of lately, and whether there were too many of one kind.
    #[test]
    fn changes_of_contents_are_kept_and_lost_apart_from_names() {
        const EVENT: [u8; 64] = [7; 64];
        let events = |recent: &Recent| {
            let mut bytes = 0;
            let count = |buffer: &[u8]| bytes += buffer.iter().filter(|byte| **byte == 7).count();
            recent.each(&mut Box::new([0; BUFFER]), count);
            bytes / EVENT.len()
        };
        let recent = Recent::new().unwrap();
        let keep = |node, mask| recent.keep_contents([(Node(node), mask, &EVENT[..])]);
        for node in [1, 1, 2, 1] {
            keep(node, libc::FAN_ATTRIB);
        }
        assert_eq!(events(&recent), 2);
        // Its pages have changed, too.
        keep(1, libc::FAN_MODIFY);
        keep(1, libc::FAN_MODIFY);
        assert_eq!(events(&recent), 3);
        let copy = recent.memory.as_fd().try_clone_to_owned().unwrap();
        let next = Recent::open(copy).unwrap();
        assert_eq!(events(&next), 3);
        assert!(next.is_whole(OF_CONTENTS));
        for node in 0..(BUFFERS * BUFFER / EVENT.len()) as u64 {
            next.keep_contents([(Node(node), libc::FAN_MODIFY, &EVENT[..])]);
        }
        assert!(!next.is_whole(OF_CONTENTS) && next.is_whole(OF_NAMES));
    }
}
