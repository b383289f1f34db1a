//! Calls on mounts below the source that others answer for: FUSE, NFS and their like. And opens of files that a
//! program of the host has a lease of (F_SETLEASE): it has 45 s to give that up.
//!
//! Such a call may wait for ever, and its queue's thread serves all callers. So it is made by threads that
//! the mount has to itself, and the request waits as a task. It waits as long as a program on the host
//! would, and as there ends when the caller is killed. Only when nothing on the mount has ended for
//! [`HUNG`] and more than [`CROWD`] requests wait for such mounts do further ones fail.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, Statx};
use rustix::io::Errno;
use uvfs_io::blocking::{PerUser, Pool};
use uvfs_io::{Payload, ops, runtime};
use uvfs_server::fs::{Context, Entry, IoHow, Node, Opened};
use uvfs_server::interrupt::until_killed;

use crate::Source;
use crate::inode::Inode;
use crate::io;
use crate::sys::{self, Result};
use uvfs_sys::lock;

/// Threads of a mount, for each user.
const THREADS: usize = 16;
/// Opens of one user that may wait for leases of programs of the host: a quarter of what a queue has at a time.
const LEASED_OPENS: usize = 16;
/// So many requests may wait for mounts that hang: half of what a queue has at a time, and of what the kernel
/// sends ahead of its callers.
const CROWD: usize = 32;
/// Nothing ended on a mount for so long.
const HUNG: Duration = Duration::from_secs(5);
/// How often a request that waits looks whether its mount hangs.
const TICK: Duration = Duration::from_millis(100);
/// Names of which it is remembered that they lead to such mounts.
const MOST_CROSSINGS: usize = 1024;

/// A handler's error that has it called again on another thread. No system call gives it.
const ELSEWHERE: Errno = Errno::from_raw_os_error(4000);

/// Stands for the mount of files that programs of the host have leases of, wherever they are.
const LEASED: u64 = u64::MAX - 1;
/// Stands for the mount at a name, before it is known which that is.
const UNKNOWN: u64 = u64::MAX;

thread_local! {
    /// This thread is one that may wait for a mount.
    static MAY_WAIT: Cell<bool> = const { Cell::new(false) };
    /// The mount that a handler was to look at when it ended with [`ELSEWHERE`].
    static WHERE: Cell<u64> = const { Cell::new(0) };
}

/// Opens a file, which may wait for a program of the host that has a lease of it: in this thread only where no other
/// request waits for that.
pub(crate) fn open_leased(
    flags: OFlags,
    open: impl FnOnce(OFlags) -> Result<OwnedFd>,
) -> Result<OwnedFd> {
    if MAY_WAIT.get() || !runtime::is_running() {
        return open(flags);
    }
    match open(flags | OFlags::NONBLOCK) {
        Ok(fd) => {
            rustix::fs::fcntl_setfl(
                &fd,
                flags & (OFlags::APPEND | OFlags::DIRECT | OFlags::NOATIME),
            )?;
            Ok(fd)
        }
        Err(Errno::AGAIN) => {
            WHERE.set(LEASED);
            Err(ELSEWHERE)
        }
        Err(errno) => Err(errno),
    }
}

/// An error for callers that can't wait elsewhere.
pub(crate) fn or_busy<T>(done: Result<T>) -> Result<T> {
    match done {
        Err(ELSEWHERE) => Err(Errno::BUSY),
        done => done,
    }
}

/// One user's threads for a mount, so that no user waits for another's calls.
struct RemoteMount {
    pool: Arc<Pool>,
    /// Calls that have not ended, and when one last did, or began as the only one.
    state: Mutex<(usize, Instant)>,
}

impl RemoteMount {
    fn hangs(&self) -> bool {
        lock(&self.state).1.elapsed() > HUNG
    }
}

/// One of the calls on a mount.
struct UnderWay(Arc<RemoteMount>);

impl UnderWay {
    /// Unless `most` are under way.
    fn begin(mount: &Arc<RemoteMount>, most: usize) -> Option<Self> {
        let mut state = lock(&mount.state);
        if state.0 >= most {
            return None;
        }
        if state.0 == 0 {
            state.1 = Instant::now();
        }
        state.0 += 1;
        Some(Self(mount.clone()))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.0 -= 1;
        state.1 = Instant::now();
    }
}

/// The mounts below the source that others answer for, and other calls that take long.
pub(crate) struct Apart {
    /// There are, or were, any.
    any: AtomicBool,
    /// Requests that wait for them.
    waits: AtomicUsize,
    /// By the user whose calls they are.
    mounts: Mutex<HashMap<(u64, u32), Arc<RemoteMount>>>,
    /// Names that lead to them, by their directories' nodes.
    crossings: Mutex<HashSet<(Node, CString)>>,
    /// For copies that take long.
    pub(crate) copiers: PerUser,
}

impl Apart {
    pub(crate) fn new() -> Self {
        Self {
            any: AtomicBool::new(false),
            waits: AtomicUsize::new(0),
            mounts: Mutex::default(),
            crossings: Mutex::default(),
            copiers: PerUser::new(THREADS),
        }
    }

    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    fn mount(&self, id: u64, uid: u32) -> Arc<RemoteMount> {
        if id != LEASED {
            self.any.store(true, Ordering::Relaxed);
        }
        let mut mounts = lock(&self.mounts);
        let new = || {
            Arc::new(RemoteMount {
                pool: Pool::new(THREADS),
                state: Mutex::new((0, Instant::now())),
            })
        };
        mounts.entry((id, uid)).or_insert_with(new).clone()
    }

    fn is_crossing(&self, node: Node, name: &CStr) -> bool {
        // Few, and seldom.
        lock(&self.crossings).contains(&(node, name.to_owned()))
    }
}

/// The result of a call that no request waits for any more.
pub(crate) trait Unwanted {
    /// Takes back what it gave to the caller.
    fn take_back(self, source: &Source);
}

macro_rules! nothing_to_take_back {
    ($($ty:ty),*) => { $(impl Unwanted for $ty {
        fn take_back(self, _: &Source) {}
    })* };
}
nothing_to_take_back!(
    (),
    u64,
    usize,
    bool,
    Vec<u8>,
    (i32, Vec<u8>),
    std::sync::Arc<crate::dir::OpenDir>,
    uvfs_server::fs::Attributes,
    uvfs_server::fs::Lock,
    uvfs_server::fs::Unlinked,
    uvfs_proto::abi::Kstatfs,
    (uvfs_proto::abi::Statx, Duration)
);

impl Unwanted for Entry {
    fn take_back(self, source: &Source) {
        source.inodes.forget(self.node, 1);
    }
}

impl Unwanted for Opened {
    fn take_back(self, source: &Source) {
        // One of the two.
        let _ = source.release_file(self.fh);
        let _ = source.dirs.remove(self.fh);
    }
}

impl Unwanted for (Entry, Opened) {
    fn take_back(self, source: &Source) {
        self.1.take_back(source);
        self.0.take_back(source);
    }
}

impl Source {
    /// Whether a call on an inode may wait for another server, which answers for its mount. Not where that serves the
    /// whole source.
    pub(crate) fn is_apart(&self, inode: &Inode) -> bool {
        inode.mount.remote && inode.mount.id != self.inodes.root().mount.id
    }

    /// Attributes of what was found in `parent`. Ends with [`ELSEWHERE`] where that is another mount, as it is not
    /// known yet which server answers for that.
    pub(crate) fn stat_found(
        &self,
        parent: &Inode,
        fd: std::os::fd::BorrowedFd<'_>,
    ) -> Result<Statx> {
        if MAY_WAIT.get() {
            return sys::stat(fd);
        }
        let st = sys::stat_known(fd)?;
        if st.stx_mnt_id != parent.mount.id {
            WHERE.set(st.stx_mnt_id);
            return Err(ELSEWHERE);
        }
        match parent.mount.remote {
            true => sys::stat(fd),
            false => Ok(st),
        }
    }

    /// Calls a handler on this thread. `None` if one of `nodes` is apart, on a file system that may hang: then
    /// [`Source::elsewhere`] is to call it.
    pub(crate) fn here<T>(
        &self,
        nodes: &[Node],
        name: Option<&CStr>,
        call: impl FnOnce(&Self) -> Result<T>,
    ) -> Option<Result<T>> {
        if self.apart.any() {
            for &node in nodes {
                let Ok(inode) = self.inode(node) else {
                    continue;
                };
                if self.is_apart(&inode) {
                    WHERE.set(inode.mount.id);
                    return None;
                }
                if let Some(name) = name
                    && self.apart.is_crossing(node, name)
                {
                    // Only a call that may wait can tell which mount is there now.
                    WHERE.set(UNKNOWN);
                    return None;
                }
            }
        }
        match call(self) {
            Err(ELSEWHERE) => {
                if let (Some(&node), Some(name)) = (nodes.first(), name)
                    && WHERE.get() != LEASED
                {
                    let mut crossings = lock(&self.apart.crossings);
                    if crossings.len() < MOST_CROSSINGS {
                        crossings.insert((node, name.to_owned()));
                    }
                }
                None
            }
            done => Some(done),
        }
    }

    /// Whether a node is apart, so that calls on it are for [`Source::elsewhere`]. Without such mounts this costs one
    /// atomic load.
    pub(crate) fn leads_elsewhere(&self, node: Node) -> bool {
        self.here(&[node], None, |_| Ok(())).is_none()
    }

    /// Has a thread of the mount that [`Source::here`] found call a handler.
    ///
    /// # Errors
    /// EINTR when the caller is being killed; ETIMEDOUT when the mount hangs and holds up others; EAGAIN when the user has
    /// too many opens that wait for leases.
    pub(crate) async fn elsewhere<T: Unwanted + Send + 'static>(
        self: &Arc<Self>,
        cx: &Context,
        call: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.on_its_threads(cx, false, call).await
    }

    /// As [`Source::elsewhere`], but the call is made in any case, if later.
    ///
    /// # Errors
    /// As there: the call then still comes.
    pub(crate) async fn surely_elsewhere(
        self: &Arc<Self>,
        cx: &Context,
        call: impl FnOnce(&Self) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.on_its_threads(cx, true, call).await
    }

    async fn on_its_threads<T: Unwanted + Send + 'static>(
        self: &Arc<Self>,
        cx: &Context,
        surely: bool,
        call: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if !runtime::is_running() {
            // This thread serves no other request.
            let before = MAY_WAIT.replace(true);
            let done = call(self);
            MAY_WAIT.set(before);
            return done;
        }
        let place = WHERE.get();
        let mount = self.apart.mount(place, cx.uid);
        let most = match place == LEASED && self.creds.exceeds(cx) {
            true => LEASED_OPENS,
            false => usize::MAX,
        };
        let under_way = UnderWay::begin(&mount, most).ok_or(Errno::AGAIN)?;
        let wanted = Arc::new(AtomicBool::new(true));
        let (source, still) = (self.clone(), wanted.clone());
        let call = mount.pool.run(move || {
            let _under_way = under_way;
            if !surely && !still.load(Ordering::Acquire) {
                return Err(Errno::INTR);
            }
            MAY_WAIT.set(true);
            let done = call(&source)?;
            // A caller that gave up meanwhile says so first.
            match still.swap(false, Ordering::AcqRel) {
                true => Ok(done),
                false => {
                    done.take_back(&source);
                    Err(Errno::INTR)
                }
            }
        });
        let _wait = Wait::begin(&self.apart.waits);
        let mut call = pin!(call);
        let why = loop {
            if self.apart.waits.load(Ordering::Relaxed) > CROWD && mount.hangs() {
                break Errno::TIMEDOUT;
            }
            match ops::within(TICK, until_killed(cx, call.as_mut())).await {
                Some(Some(done)) => return done,
                Some(None) => break Errno::INTR,
                None => {}
            }
        };
        match wanted.swap(false, Ordering::AcqRel) {
            true => Err(why),
            // It has ended at this moment, or failed.
            false => call.await,
        }
    }
}

/// Reads and writes of files that are apart. They have memory of their own: a call that no request waits for any more
/// may still come to write into it, when the memory of its request serves another.
impl Source {
    pub(crate) async fn read_elsewhere(
        self: &Arc<Self>,
        cx: &Context,
        how: &IoHow,
        data: &Payload,
    ) -> Result<usize> {
        let (fh, offset, len) = (how.fh, how.offset, data.len());
        let read = move |source: &Self| {
            let mut bytes = vec![0; len];
            let read = io::read_waiting(&*source.file(fh)?, &mut bytes, offset)?;
            bytes.truncate(read);
            Ok(bytes)
        };
        let bytes = self.elsewhere(cx, read).await?;
        data.copy_in(0, &bytes);
        Ok(bytes.len())
    }

    pub(crate) async fn write_elsewhere(
        self: &Arc<Self>,
        cx: &Context,
        how: &IoHow,
        data: &Payload,
    ) -> Result<usize> {
        let (context, how) = (*cx, *how);
        let mut bytes = vec![0; data.len()];
        data.copy_out(0, &mut bytes);
        self.elsewhere(cx, move |source| {
            let (file, place) = source.begin_write(&context, &how)?;
            let written = io::write_waiting(&file, &bytes, place)?;
            if let Some(data_only) = file.syncs_after(&how) {
                io::sync(file.as_fd(), data_only)?;
            }
            Ok(written)
        })
        .await
    }
}

/// A request that waits for a mount.
struct Wait<'a>(&'a AtomicUsize);

impl<'a> Wait<'a> {
    fn begin(waits: &'a AtomicUsize) -> Self {
        waits.fetch_add(1, Ordering::Relaxed);
        Self(waits)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Calls a handler here, or elsewhere if it may wait there: with copies of `$own` then.
macro_rules! apart {
    ($self:ident, $cx:ident, [$($node:expr),*], $name:expr, [$($own:ident),*],
     |$source:ident| $call:expr) => {
        match $self.0.here(&[$($node),*], $name, |$source| $call) {
            Some(done) => done,
            None => {
                let context = *$cx;
                $(let $own = $own.to_owned();)*
                let call = move |$source: &Source| { $(let $own = &$own;)* $call };
                Box::pin($self.0.elsewhere(&context, call)).await
            }
        }
        .map_err(From::from)
    };
}
pub(crate) use apart;
