//! Open files.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use rustix::fs::{FallocateFlags, OFlags, Statx};
use rustix::io::Errno;
use uvfs_io::blocking;
use uvfs_io::ops::{self, File};
use uvfs_server::fs::{
    Context, CopyRange, Entry, IoHow, NewNode, OpenFlags, OpenHow, Opened, Origin, Payload,
};

use crate::inode::{BackingUse, Inode, Told};
use crate::io;
use crate::namespace::name_ok;
use crate::sys::{self, FileIoctl, Result};
use crate::{Backed, KeepCache, Source, creds, meta};

/// Copies up to this long are made at once; longer ones on another thread.
const SHORT_COPY: u64 = 256 << 10;
/// Files up to this many bytes are read as they are opened for reading: that costs less than the
/// request by which they would be.
const SMALL_FILE: u64 = 32 << 10;

/// An open file.
pub(crate) struct OpenFile {
    pub(crate) fd: Arc<File>,
    pub(crate) inode: Arc<Inode>,
    /// open(2)'s flags of the caller.
    asked: u32,
    by: By,
    /// The kernel sends each write as it is made, and no FSYNC after one that is to be synchronous.
    unsynced: bool,
}

/// Who has a file open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// The kernel, which reads and writes it at the inode's backing file.
    Backed,
    /// The kernel, which asks for what it reads and writes.
    Plain,
    /// A client.
    Client,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.inode.opens.fetch_sub(1, Ordering::AcqRel);
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl OpenFile {
    /// Whether a write is to be followed by a sync, because of the call (RWF_DSYNC) or of the mount: then of the data
    /// only, or of all. The host sees to an open file's own flags.
    pub(crate) fn syncs_after(&self, how: &IoHow) -> Option<bool> {
        let synchronous = OFlags::from_bits_retain(how.flags) & (OFlags::SYNC | OFlags::DSYNC);
        let syncs = self.unsynced && !OFlags::from_bits_retain(self.asked).contains(synchronous);
        syncs.then(|| !synchronous.contains(OFlags::SYNC))
    }
}

/// Whether a caller opens with O_DIRECT.
fn asked_direct(flags: u32) -> bool {
    OFlags::from_bits_retain(flags).contains(OFlags::DIRECT)
}

/// Whether a caller only reads, past all caches, a file that others answer for. The kernel is then left to
/// have all pieces of a large call under way. Not for writers: it would let in one at a time.
fn reads_far(inode: &Inode, asked: u32) -> bool {
    inode.mount.remote && OFlags::from_bits_retain(asked) & OFlags::ACCMODE == OFlags::RDONLY
}

/// Whether the host opens this file with O_DIRECT, as the kernel does for a caller who asked for that.
fn takes_direct(fd: BorrowedFd<'_>) -> bool {
    let Ok(flags) = rustix::fs::fcntl_getfl(fd) else {
        return false;
    };
    let takes = rustix::fs::fcntl_setfl(fd, flags | OFlags::DIRECT).is_ok();
    // Nobody else uses it yet.
    takes && rustix::fs::fcntl_setfl(fd, flags).is_ok()
}

impl Source {
    pub(crate) fn file(&self, fh: u64) -> Result<Arc<OpenFile>> {
        self.files.get(fh).ok_or(Errno::BADF)
    }

    /// The flags that a file of the host is opened with for a caller who asks for `flags`.
    fn host_flags(&self, flags: u32, may_noatime: bool) -> Result<OFlags> {
        let asked = OFlags::from_bits_retain(flags);
        // O_DIRECT is between the caller and the kernel's cache of the mount, O_APPEND goes with
        // each write, and the rest is about names or descriptors.
        let mut host = asked & (OFlags::TRUNC | OFlags::SYNC | OFlags::DSYNC);
        host |= match asked & OFlags::ACCMODE {
            // The page cache reads what a partial write does not cover.
            OFlags::WRONLY if self.options.writeback => OFlags::RDWR,
            OFlags::WRONLY => OFlags::WRONLY,
            OFlags::RDONLY => OFlags::RDONLY,
            // Both, or the descriptor for ioctls alone that open(2) gives for 3.
            both => both,
        };
        if self.rules.read_only() && host.intersects(OFlags::RWMODE | OFlags::TRUNC) {
            return Err(Errno::ROFS);
        }
        if self.rules.noatime() || (asked.contains(OFlags::NOATIME) && may_noatime) {
            host |= OFlags::NOATIME;
        }
        Ok(host)
    }

    pub(crate) fn open_file(&self, cx: &Context, node: u64, how: &OpenHow) -> Result<Opened> {
        let inode = self.inode(node)?;
        let asked = OFlags::from_bits_retain(how.flags);
        let may_noatime = asked.contains(OFlags::NOATIME)
            && (cx.uid == 0 || sys::stat(self.path_fd(&inode)?.as_fd())?.stx_uid == cx.uid);
        let mut flags = self.host_flags(how.flags, may_noatime)?;
        if inode.mount.remote {
            flags |= asked & OFlags::DIRECT;
        }
        let fd = self.open_host(&inode, flags, asked)?;
        if flags.contains(OFlags::TRUNC) && how.kill_suidgid {
            self.mode_changed(node, meta::kill_suidgid(cx, fd.as_fd())?);
        }
        let st = sys::stat(fd.as_fd())?;
        let (now, mode) = (Told::of(&st), u32::from(st.stx_mode));
        let (told, settled) = {
            let state = inode.state();
            // The watcher reports writes of the host, also those that leave the time as it is.
            (state.told, state.settled || inode.is_watched())
        };
        let known = told == Some(now);
        let keep = match self.options.keep_cache {
            _ if self.rules.strictatime() => false,
            KeepCache::Never => false,
            KeepCache::Unchanged => known && settled,
            KeepCache::Always => true,
        };
        let mut opened = self.opened(inode.clone(), fd, how, mode, keep)?;
        opened.changed = !known && !self.writes_back() && !flags.contains(OFlags::TRUNC);
        opened.changed |= inode.state().is_mappable();
        if known
            && asked & OFlags::ACCMODE == OFlags::RDONLY
            && opened.flags.contains(OpenFlags::KEEP_CACHE)
        {
            opened.contents = self.small_contents(opened.fh, now);
        }
        Ok(opened)
    }

    /// The contents of a file that was opened for reading and is this, if it is small, only open
    /// here, and the kernel was not given them yet.
    fn small_contents(&self, fh: u64, now: Told) -> Option<Vec<u8>> {
        if now.size == 0 || now.size > SMALL_FILE || self.writes_back() {
            return None;
        }
        let file = self.files.get(fh)?;
        // Counted before: of two opens at a time neither takes itself for the only one.
        if file.inode.opens.load(Ordering::Acquire) != 1
            || file.inode.state().given.replace(now.into()).as_deref() == Some(&now)
        {
            return None;
        }
        io::read_now(&file, now.size as usize)
    }

    /// Opens a file of the host, with less than wanted where the host allows no more.
    fn open_host(&self, inode: &Arc<Inode>, flags: OFlags, asked: OFlags) -> Result<OwnedFd> {
        let result = match self.open_inode(inode, flags) {
            Err(Errno::PERM) if flags.contains(OFlags::NOATIME) => {
                self.open_inode(inode, flags - OFlags::NOATIME)
            }
            result => result,
        };
        let result = match result {
            // A file that may only be appended to (`chattr +a`) opens in no other way.
            Err(Errno::PERM) if asked.contains(OFlags::APPEND) && !self.writes_back() => {
                self.open_inode(inode, (flags - OFlags::NOATIME) | OFlags::APPEND)
            }
            // The remote file system has no direct I/O.
            Err(Errno::INVAL) if flags.contains(OFlags::DIRECT) => {
                self.open_inode(inode, flags - OFlags::DIRECT)
            }
            result => result,
        };
        match result {
            Err(Errno::ACCESS)
                if flags.contains(OFlags::RDWR) && asked & OFlags::ACCMODE == OFlags::WRONLY =>
            {
                // May be written, not read; the page cache then can only write whole pages.
                self.open_inode(inode, (flags - OFlags::RDWR) | OFlags::WRONLY)
            }
            result => result,
        }
    }

    /// Whether what is written by an open with these flags goes past the kernel's page cache, which nobody
    /// can read or map through it. Before the first write to a page cache the kernel asks for the file's
    /// capabilities, and it copies once more. Where it never looks whether the file has changed, a reader
    /// beside the writer could keep an old page.
    fn writes_around(&self, asked: u32) -> bool {
        let asked = OFlags::from_bits_retain(asked);
        asked & OFlags::ACCMODE == OFlags::WRONLY
            && !self.writes_back()
            && self.options.keep_cache != KeepCache::Always
    }

    /// Gives an open file of this mode a number. What the kernel has cached of it stays with `keep`.
    fn opened(
        &self,
        inode: Arc<Inode>,
        fd: OwnedFd,
        how: &OpenHow,
        mode: u32,
        keep: bool,
    ) -> Result<Opened> {
        let asked = how.flags;
        let mut flags = OpenFlags::empty();
        let (by, backing) = match how.origin {
            Origin::Kernel => self.begin_use(&inode, fd.as_fd(), asked, mode),
            Origin::Client(()) => (By::Client, 0),
        };
        if by == By::Backed {
            flags |= OpenFlags::PASSTHROUGH;
        } else if self.options.direct_io
            || (asked_direct(asked) && !self.writes_back() && !reads_far(&inode, asked))
        {
            // A caller's own O_DIRECT as well: its synchronous calls are then plain requests, which
            // cost the kernel less than the asynchronous ones that it makes of them otherwise.
            flags |= OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES;
        } else if by == By::Plain && self.writes_around(asked) {
            flags |= OpenFlags::DIRECT_IO;
        } else {
            // Once after backing files: whatever is cached is older than what went to them.
            let old = by == By::Plain && std::mem::take(&mut inode.state().was_backed);
            flags.set(OpenFlags::KEEP_CACHE, keep && !old);
        }
        if !self.writes_back() && !self.options.host_locks {
            flags |= OpenFlags::NOFLUSH;
        }
        inode.opens.fetch_add(1, Ordering::AcqRel);
        let file = Arc::new(OpenFile {
            fd: Arc::new(File::new(fd, inode.mount.in_memory)),
            inode: inode.clone(),
            asked,
            by,
            unsynced: flags.contains(OpenFlags::DIRECT_IO),
        });
        inode.state().open = Arc::downgrade(&file);
        match self.files.insert(file) {
            Some(fh) => Ok(Opened {
                fh,
                flags,
                backing,
                ..Opened::default()
            }),
            None => {
                self.end_use(&inode, by);
                Err(Errno::NFILE)
            }
        }
    }

    /// Makes a file and opens it, or opens the one that is there.
    pub(crate) fn create_file(
        &self,
        cx: &Context,
        parent: u64,
        name: &CStr,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        name_ok(name)?;
        self.writable()?;
        let (parent, dir) = self.dir_fd(parent)?;
        let asked = OFlags::from_bits_retain(how.flags);
        // EXCL: what is there already could be a device or pipe, not to be opened unseen.
        let flags = (self.host_flags(how.flags, true)? - OFlags::TRUNC)
            | OFlags::CREATE
            | OFlags::EXCL
            | OFlags::NOFOLLOW
            | OFlags::NOCTTY
            | OFlags::CLOEXEC;
        let mode = self.mode_in(cx, dir.as_fd(), new.mode)?;
        let made = {
            let caller = self.creds.caller(cx, new.umask)?;
            rustix::fs::openat(dir.as_fd(), name, flags, caller.mode(mode))
        };
        match made {
            Ok(fd) => {
                let (inode, st) = self.adopt_open(&parent, fd.as_fd())?;
                let again = flags - (OFlags::CREATE | OFlags::EXCL);
                let fd = self.by_rules(&inode, fd, again);
                self.opened_entry(inode, &st, fd, how)
            }
            Err(Errno::EXIST) if !asked.contains(OFlags::EXCL) => {
                let (inode, st) = self.find(&parent, dir.as_fd(), name)?;
                let entry = self.entry(&inode, &st);
                match self.open_file(cx, inode.node, how) {
                    Ok(opened) => Ok((entry, opened)),
                    Err(errno) => {
                        self.inodes.forget(inode.node, 1);
                        Err(errno)
                    }
                }
            }
            Err(errno) => Err(errno),
        }
    }

    /// Makes a file without a name and opens it.
    pub(crate) fn make_tmpfile(
        &self,
        cx: &Context,
        parent: u64,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        self.writable()?;
        let (parent, dir) = self.dir_fd(parent)?;
        let asked = OFlags::from_bits_retain(how.flags);
        let flags = (self.host_flags(how.flags, true)? - OFlags::TRUNC)
            | OFlags::TMPFILE
            | (asked & OFlags::EXCL)
            | OFlags::CLOEXEC;
        let mode = self.mode_in(cx, dir.as_fd(), new.mode)?;
        let fd = {
            let caller = self.creds.caller(cx, new.umask)?;
            rustix::fs::openat(dir.as_fd(), c".", flags, caller.mode(mode))?
        };
        let (inode, st) = self.adopt_open(&parent, fd.as_fd())?;
        self.opened_entry(inode, &st, fd, how)
    }

    fn opened_entry(
        &self,
        inode: Arc<Inode>,
        st: &Statx,
        fd: OwnedFd,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        match self.opened(inode.clone(), fd, how, st.stx_mode.into(), false) {
            // The lifetime of attributes depends on how the file is open.
            Ok(opened) => Ok((self.entry(&inode, st), opened)),
            Err(errno) => {
                self.inodes.forget(inode.node, 1);
                Err(errno)
            }
        }
    }

    /// Counts an open of the kernel's, and decides whether it gets a backing file; which.
    ///
    /// The kernel has each inode in one of two modes (fs/fuse/iomode.c): while an open with a backing
    /// file lives, others have to have the same; while an open that its page cache is used by lives
    /// (also FOPEN_DIRECT_IO ones, once they are mapped), none may have one. Else open(2) fails with
    /// EIO. It leaves a mode before it sends the RELEASE, and enters one after the answer, so the
    /// counts here are on the safe side if they change in one step with the decision.
    fn begin_use(&self, inode: &Inode, fd: BorrowedFd<'_>, asked: u32, mode: u32) -> (By, i32) {
        let mut state = inode.state();
        let mappable = OFlags::from_bits_retain(asked) & OFlags::ACCMODE == OFlags::RDWR;
        if let Some(backing) = &mut state.backing {
            backing.opens += 1;
            backing.mappable |= mappable;
            let id = backing.id;
            assert_eq!(state.plain, 0, "opens with a backing file and without");
            state.told = state.told.filter(|_| !state.is_mappable());
            return (By::Backed, id);
        }
        if state.plain == 0
            && self.wants_backing(inode, asked, mode)
            && let Some(id) = self.register(inode, fd, asked)
        {
            state.backing = Some(BackingUse {
                id,
                opens: 1,
                mappable,
            });
            state.told = state.told.filter(|_| !mappable);
            state.was_backed = true;
            return (By::Backed, id);
        }
        state.plain += 1;
        (By::Plain, 0)
    }

    /// The kernel has closed a file, or never got to know of it.
    fn end_use(&self, inode: &Inode, by: By) {
        let mut state = inode.state();
        match by {
            By::Client => {}
            By::Plain => {
                assert!(state.backing.is_none() && state.plain > 0, "it was open");
                state.plain -= 1;
            }
            By::Backed => {
                assert_eq!(state.plain, 0, "opens with a backing file and without");
                let backing = state.backing.as_mut().expect("it was open");
                backing.opens -= 1;
                if backing.opens == 0 {
                    let id = backing.id;
                    state.backing = None;
                    if let Some(hooks) = self.backing.get() {
                        // Under the lock, so that a next open registers after this.
                        (hooks.unregister)(inode.node, id);
                    }
                }
            }
        }
    }

    /// Whether an open of a file of this mode is one to begin with a backing file.
    fn wants_backing(&self, inode: &Inode, asked: u32, mode: u32) -> bool {
        let flags = OFlags::from_bits_retain(asked);
        let (direct, appends) = (asked_direct(asked), flags.contains(OFlags::APPEND));
        // Whether a write leaves set-user-id as it is depends on who writes, which the host would not
        // know.
        let plain = mode & (libc::S_ISUID | libc::S_ISGID) == 0;
        let wanted = match self.options.passthrough {
            Backed::Off => false,
            Backed::Auto if direct => {
                let reads = flags & OFlags::ACCMODE == OFlags::RDONLY;
                reads || inode.mount.in_memory && !appends
            }
            Backed::Auto => {
                let updates = flags & OFlags::ACCMODE == OFlags::RDWR;
                updates && !appends && !self.options.direct_io
            }
            Backed::Direct => direct,
            Backed::All => true,
        };
        wanted
            && plain
            && self.passes_through.load(Ordering::Relaxed)
            && inode.is_regular()
            && self.keeps_times(inode)
            && !self.backing_refused.load(Ordering::Relaxed)
            && !inode.mount.no_backing.load(Ordering::Relaxed)
    }

    /// Registers a file with the kernel. What can't be otherwise next time is not tried again.
    fn register(&self, inode: &Inode, fd: BorrowedFd<'_>, asked: u32) -> Option<i32> {
        let hooks = self.backing.get()?;
        let all = self.options.passthrough == Backed::All;
        let registered = match all || !asked_direct(asked) || takes_direct(fd) {
            true => creds::without_fsetid(|| (hooks.register)(inode.node, fd)),
            false => Err(Errno::OPNOTSUPP.into()),
        };
        let error = match registered {
            Ok(id) => return Some(id),
            Err(error) => error,
        };
        match Errno::from_io_error(&error) {
            // A client has a lease.
            Some(Errno::BUSY) => return None,
            Some(Errno::NOMEM | Errno::NFILE | Errno::MFILE | Errno::INTR) => {}
            // The file system is stacked on others, or has no such files.
            Some(Errno::LOOP | Errno::OPNOTSUPP) => {
                inode.mount.no_backing.store(true, Ordering::Relaxed);
            }
            _ => self.backing_refused.store(true, Ordering::Relaxed),
        }
        match all {
            true => tracing::warn!(%error, "a backing file is refused; going on without"),
            false => tracing::debug!(%error, "a backing file is refused; going on without"),
        }
        None
    }

    pub(crate) fn release_file(&self, fh: u64) -> Result<()> {
        let file = self.files.remove(fh).ok_or(Errno::BADF)?;
        self.end_use(&file.inode, file.by);
        {
            let mut state = file.inode.state();
            if std::ptr::eq(state.open.as_ptr(), &*file) {
                // It would keep the memory, if not the file.
                state.open = Weak::new();
            }
        }
        // Clients lock by handle whether the kernel asks us for locks or not.
        self.drop_locks_by(&file.inode, fh);
        Ok(())
    }

    /// The open file with this number, which is one of the node's.
    fn file_of(&self, node: u64, fh: u64) -> Result<Arc<OpenFile>> {
        let file = self.file(fh)?;
        match file.inode.node == node {
            true => Ok(file),
            false => Err(Errno::BADF),
        }
    }

    /// For who wants to share the file. Those with a backing file are left to the kernel, unless all
    /// have one.
    pub(crate) fn asked_flags(&self, node: u64, fh: u64) -> Result<u32> {
        let file = self.file_of(node, fh)?;
        match file.by == By::Backed && self.options.passthrough != Backed::All {
            true => Err(Errno::BUSY),
            false => Ok(file.asked),
        }
    }

    /// A second open file on the same descriptor of the host: nothing here uses its position. With
    /// locks on the host's files one of its own, as closing it gives up locks.
    pub(crate) fn share_file(&self, node: u64, fh: u64) -> Result<u64> {
        let file = self.file_of(node, fh)?;
        if !file.inode.is_regular() {
            return Err(Errno::OPNOTSUPP);
        }
        let fd = if self.options.host_locks {
            let asked = OFlags::from_bits_retain(file.asked);
            let flags = self.host_flags(file.asked, false)? - OFlags::TRUNC;
            let fd = self.open_host(&file.inode, flags, asked)?;
            Arc::new(File::new(fd, file.inode.mount.in_memory))
        } else {
            file.fd.clone()
        };
        self.inodes.remember(node)?;
        file.inode.opens.fetch_add(1, Ordering::AcqRel);
        let shared = OpenFile {
            fd,
            inode: file.inode.clone(),
            asked: file.asked,
            by: By::Client,
            unsynced: false,
        };
        self.files.insert(Arc::new(shared)).ok_or_else(|| {
            self.inodes.forget(node, 1);
            Errno::NFILE
        })
    }

    pub(crate) async fn read_file(&self, how: &IoHow, data: &Payload) -> Result<usize> {
        let file = self.file(how.fh)?;
        let uncached = how.uncached || self.options.uncached;
        let mount = &file.inode.mount;
        io::read(&file.fd, mount, data, how.offset, uncached).await
    }

    pub(crate) async fn write_file(
        &self,
        cx: &Context,
        how: &IoHow,
        data: &Payload,
    ) -> Result<usize> {
        let (file, append) = self.begin_write(cx, how)?;
        let uncached = how.uncached || self.options.uncached;
        let written = io::write(&file, data, how.offset, append, uncached).await?;
        if let Some(data_only) = file.syncs_after(how) {
            ops::fsync(&file.fd, data_only).await?;
        }
        Ok(written)
    }

    /// The file of a write that is allowed, and whether the write is to go to its end.
    pub(crate) fn begin_write(&self, cx: &Context, how: &IoHow) -> Result<(Arc<OpenFile>, bool)> {
        self.writable()?;
        let file = self.file(how.fh)?;
        if how.kill_suidgid {
            let changed = meta::kill_suidgid(cx, file.as_fd())?;
            self.mode_changed(file.inode.node, changed);
        }
        let append = io::appends(how.flags) && !how.from_cache && !self.writes_back();
        Ok((file, append))
    }

    pub(crate) async fn fallocate_file(
        &self,
        cx: &Context,
        fh: u64,
        offset: u64,
        len: u64,
        mode: u32,
    ) -> Result<()> {
        self.writable()?;
        let file = self.file(fh)?;
        ops::fallocate(&file.fd, mode, offset, len).await?;
        self.content_changed(cx, &file)
    }

    /// As [`Source::fallocate_file`], in this thread, which may wait.
    pub(crate) fn fallocate_waiting(
        &self,
        cx: &Context,
        fh: u64,
        range: (u64, u64),
        mode: u32,
    ) -> Result<()> {
        self.writable()?;
        let file = self.file(fh)?;
        let mode = FallocateFlags::from_bits_retain(mode);
        rustix::fs::fallocate(file.as_fd(), mode, range.0, range.1)?;
        self.content_changed(cx, &file)
    }

    fn content_changed(&self, cx: &Context, file: &OpenFile) -> Result<()> {
        let changed = meta::kill_suidgid_unless_kept(cx, file.as_fd())?;
        self.mode_changed(file.inode.node, changed);
        Ok(())
    }

    /// A file has lost set-user-id or set-group-id, which the answer does not tell. The kernel must not
    /// execute it with those that it has cached.
    fn mode_changed(&self, node: u64, changed: bool) {
        if changed && let Some(hooks) = self.backing.get() {
            (hooks.changed)(node);
        }
    }

    pub(crate) fn seek_file(&self, fh: u64, offset: u64, whence: u32) -> Result<u64> {
        let file = self.file(fh)?;
        // The host file's own position is used by nothing else.
        let to = match whence as i32 {
            libc::SEEK_DATA => rustix::fs::SeekFrom::Data(offset),
            libc::SEEK_HOLE => rustix::fs::SeekFrom::Hole(offset),
            libc::SEEK_END => {
                rustix::fs::SeekFrom::End(i64::try_from(offset).map_err(|_| Errno::INVAL)?)
            }
            _ => return Err(Errno::INVAL),
        };
        rustix::fs::seek(file.as_fd(), to)
    }

    pub(crate) async fn copy_file(&self, cx: &Context, copy: &CopyRange) -> Result<u64> {
        let call = self.begin_copy(cx, copy)?;
        match copy.len <= SHORT_COPY {
            true => call(),
            false => blocking::run(call).await,
        }
    }

    /// A copy that is allowed; what makes it may block.
    pub(crate) fn begin_copy(
        &self,
        cx: &Context,
        copy: &CopyRange,
    ) -> Result<impl FnOnce() -> Result<u64> + Send + 'static + use<>> {
        self.writable()?;
        if copy.flags != 0 {
            return Err(Errno::INVAL);
        }
        let (from, to) = (self.file(copy.fh_in)?, self.file(copy.fh_out)?);
        self.content_changed(cx, &to)?;
        let (mut offset_in, mut offset_out) = (copy.offset_in, copy.offset_out);
        let len = usize::try_from(copy.len).unwrap_or(usize::MAX);
        Ok(move || {
            let (from, to) = (from.as_fd(), to.as_fd());
            let places = (Some(&mut offset_in), Some(&mut offset_out));
            rustix::fs::copy_file_range(from, places.0, to, places.1, len).map(|n| n as u64)
        })
    }

    /// Inode flags and project ids (`lsattr`, `chattr`).
    pub(crate) fn file_ioctl(
        &self,
        cx: &Context,
        node: u64,
        ioctl: &uvfs_server::fs::Ioctl<'_>,
    ) -> Result<(i32, Vec<u8>)> {
        let (command, size) = match ioctl.cmd {
            c if c == FileIoctl::GetFlags as u32 => (FileIoctl::GetFlags, 4),
            c if c == FileIoctl::SetFlags as u32 => (FileIoctl::SetFlags, 4),
            c if c == FileIoctl::FsGetXattr as u32 => (FileIoctl::FsGetXattr, 28),
            c if c == FileIoctl::FsSetXattr as u32 => (FileIoctl::FsSetXattr, 28),
            _ => return Err(Errno::NOTTY),
        };
        let mut data = [0; 64];
        let sets = matches!(command, FileIoctl::SetFlags | FileIoctl::FsSetXattr);
        if sets {
            self.writable()?;
            let input = ioctl.input.get(..size).ok_or(Errno::INVAL)?;
            data[..size].copy_from_slice(input);
        }
        let (file, dir) = match self.files.get(ioctl.fh) {
            Some(file) if file.inode.node == node => (Some(file), None),
            _ => (None, Some(self.dir(node, ioctl.fh)?)),
        };
        let fd = match (&file, &dir) {
            (Some(file), _) => file.as_fd(),
            (_, Some(dir)) => dir.as_fd(),
            _ => return Err(Errno::BADF),
        };
        if sets && cx.uid != 0 {
            self.may_set_flags(cx, fd, command, &data)?;
        }
        let result = sys::ioctl(fd, command, &mut data)?;
        let out = if sets {
            0
        } else {
            size.min(ioctl.out_size as usize)
        };
        Ok((result, data[..out].to_vec()))
    }

    /// The server may set what its callers may not: only owners change flags, and none but root
    /// those that take an administrator.
    fn may_set_flags(
        &self,
        cx: &Context,
        fd: BorrowedFd<'_>,
        command: FileIoctl,
        data: &[u8; 64],
    ) -> Result<()> {
        if sys::stat(fd)?.stx_uid != cx.uid {
            return Err(Errno::PERM);
        }
        let word = |data: &[u8; 64]| u32::from_ne_bytes([data[0], data[1], data[2], data[3]]);
        let mut now = [0; 64];
        let guarded = match command {
            FileIoctl::SetFlags => {
                sys::ioctl(fd, FileIoctl::GetFlags, &mut now)?;
                // FS_IMMUTABLE_FL and FS_APPEND_FL.
                0x10 | 0x20
            }
            _ => {
                sys::ioctl(fd, FileIoctl::FsGetXattr, &mut now)?;
                if now[12..16] != data[12..16] {
                    // The project id.
                    return Err(Errno::PERM);
                }
                // FS_XFLAG_IMMUTABLE and FS_XFLAG_APPEND.
                0x8 | 0x10
            }
        };
        if (word(data) ^ word(&now)) & guarded != 0 {
            return Err(Errno::PERM);
        }
        Ok(())
    }
}
