//! Opens and creates files, and says what the kernel may do with them.

use crate::creds::FMODE_EXEC;
use crate::inode::{Access, Inode, Told};
use crate::io;
use crate::meta::has_set_id;
use crate::namespace::name_ok;
use crate::sys::{self, Result};
use crate::{KeepCache, Source, meta};
use rustix::fs::{AtFlags, Mode, OFlags, Statx};
use rustix::io::Errno;
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use uvfs_io::ops::File;
use uvfs_server::fs::{Context, Entry, Handle, NewNode, Node, OpenFlags, OpenHow, Opened, Origin};

use super::{SMALL_FILE, asked_direct, reads_far};
use crate::open_file::{By, OpenFile};

/// Whether the kernel may be about to execute a file with set-user-id bits that the file has lost. Before the
/// kernel executes a file it asks for the mode, but it ignores the answer if a notification comes before it
/// (fs/fuse/inode.c, `attr_version`). After ESTALE it asks again. Says yes once for each loss.
fn executes_old_mode(inode: &Inode, file: &Statx) -> bool {
    !has_set_id(file) && std::mem::take(&mut inode.state().set_id)
}

impl Source {
    /// The flags that a file of the host is opened with for a caller who asks for `asked`.
    pub(super) fn host_flags(&self, asked: OFlags, may_noatime: bool) -> Result<OFlags> {
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

    pub(crate) fn open_file(&self, cx: &Context, node: Node, how: &OpenHow) -> Result<Opened> {
        let inode = self.inode(node)?;
        let asked = how.flags;
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
        self.check_open(cx, &inode, fd.as_fd(), &st, asked)?;
        if asked.bits() & FMODE_EXEC != 0 && executes_old_mode(&inode, &st) {
            return Err(Errno::STALE);
        }
        let now = Told::of(&st);
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
        let mut opened = self.opened(cx, inode.clone(), fd, how, &st, keep)?;
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

    /// Refuses an open that the kernel allowed by attributes that the file no longer has, if the caller may not have
    /// the file as it is now. After ESTALE the kernel looks the name up again, and checks by what it is told then.
    pub(crate) fn check_open(
        &self,
        cx: &Context,
        inode: &Inode,
        fd: BorrowedFd<'_>,
        st: &Statx,
        asked: OFlags,
    ) -> Result<()> {
        if !self.creds.exceeds(cx) {
            return Ok(());
        }
        let (told, now) = (inode.state().access, Access::of(st));
        let same = told.is_some_and(|told| told.mode_and_owner() == now.mode_and_owner());
        if told == Some(now) || self.creds.may_open(cx, fd, asked, same) {
            return Ok(());
        }
        // For who opens the file by a descriptor, without a name.
        self.mode_changed(inode.node, true);
        Err(Errno::STALE)
    }

    /// The contents of a file that was opened for reading and is this, if it is small, only open
    /// here, and the kernel was not given them yet.
    fn small_contents(&self, fh: Handle, now: Told) -> Option<Vec<u8>> {
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
    pub(super) fn open_host(
        &self,
        inode: &Arc<Inode>,
        flags: OFlags,
        asked: OFlags,
    ) -> Result<OwnedFd> {
        let result = match self.open_inode(inode, flags) {
            Err(Errno::PERM) if flags.contains(OFlags::NOATIME) => {
                self.open_inode(inode, flags - OFlags::NOATIME)
            }
            result => result,
        };
        let result = match result {
            // A file that may only be appended to (`chattr +a`) opens in no other way.
            Err(Errno::PERM) if asked.contains(OFlags::APPEND) => {
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

    /// Whether writes by an open with these flags go past the kernel's page cache: nothing is read or mapped through
    /// it. Before the first write to a page cache the kernel asks for the file's capabilities, and it copies once more.
    /// Where it never looks whether the file has changed, a reader beside the writer could keep an old page.
    fn writes_around(&self, asked: OFlags) -> bool {
        asked & OFlags::ACCMODE == OFlags::WRONLY
            && !self.writes_back()
            && self.options.keep_cache != KeepCache::Always
    }

    /// Gives an open file a number. With `keep` the kernel's cached pages of it stay.
    fn opened(
        &self,
        cx: &Context,
        inode: Arc<Inode>,
        fd: OwnedFd,
        how: &OpenHow,
        file: &Statx,
        keep: bool,
    ) -> Result<Opened> {
        let asked = how.flags;
        let mut flags = OpenFlags::empty();
        // Only where the file opens in no other way.
        let appends = asked.contains(OFlags::APPEND)
            && rustix::fs::fcntl_getfl(&fd)?.contains(OFlags::APPEND);
        let (by, backing) = match how.origin {
            Origin::Kernel => self.begin_use(&inode, fd.as_fd(), asked, file, cx.pid),
            Origin::Client(()) => (By::Client, 0),
        };
        if by == By::Backed {
            flags |= OpenFlags::PASSTHROUGH;
        } else if self.options.direct_io
            // Pages that are written back later, where they belong, the host would append.
            || appends && self.writes_back()
            || (asked_direct(asked) && !self.writes_back() && !reads_far(&inode, asked))
        {
            // A caller's own O_DIRECT as well: its synchronous calls are then plain requests, which
            // cost the kernel less than the asynchronous ones that it makes of them otherwise.
            flags |= OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES;
        } else if by == By::Around || by == By::Plain && self.writes_around(asked) {
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
            writer: (by != By::Client && asked & OFlags::ACCMODE == OFlags::WRONLY)
                .then_some(cx.pid),
            written: AtomicU64::new(0),
            direct: flags.contains(OpenFlags::DIRECT_IO),
            appends,
        });
        inode.state().open = Arc::downgrade(&file.fd);
        match self.files.insert(file.clone()) {
            Some(fh) => {
                let mut opened = Opened::new(fh).with_flags(flags);
                opened.backing = backing;
                Ok(opened)
            }
            None => {
                self.end_use(&file);
                Err(Errno::NFILE)
            }
        }
    }

    /// Makes a file and opens it, or opens the one that is there.
    pub(crate) fn create_file(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        name_ok(name)?;
        self.writable()?;
        let (parent, dir) = self.dir_fd(parent)?;
        let asked = how.flags;
        // EXCL: what is there already could be a device or pipe, not to be opened unseen.
        let flags = (self.host_flags(how.flags, true)? - OFlags::TRUNC)
            | OFlags::CREATE
            | OFlags::EXCL
            | OFlags::NOFOLLOW
            | OFlags::NOCTTY
            | OFlags::CLOEXEC;
        let mode = self.mode_in(cx, dir.as_fd(), new.mode)?;
        let made = self.creds.as_caller(cx, Some(new.umask), |caller| {
            rustix::fs::openat(dir.as_fd(), name, flags, caller.mode(mode))
        });
        match made {
            Ok(fd) => {
                let adopted = self.adopt_open(&parent, fd.as_fd());
                let (inode, st) =
                    adopted.inspect_err(|_| self.unmake(cx, dir.as_fd(), name, fd.as_fd()))?;
                let again = flags - (OFlags::CREATE | OFlags::EXCL);
                let fd = self.by_rules(&inode, fd, again);
                self.opened_entry(cx, inode, &st, fd, how)
            }
            // As the server: the caller may not open a file again that it has made for reading only.
            Err(Errno::EXIST) if self.made_before(cx, dir.as_fd(), name) => {
                let again = flags - (OFlags::CREATE | OFlags::EXCL);
                let fd = rustix::fs::openat(dir.as_fd(), name, again, Mode::empty())?;
                let (inode, st) = self.adopt_open(&parent, fd.as_fd())?;
                self.opened_entry(cx, inode, &st, fd, how)
            }
            Err(Errno::EXIST) if !asked.contains(OFlags::EXCL) => {
                let (inode, st) = self.find(&parent, dir.as_fd(), name)?;
                let entry = self.entry(cx, &inode, &st);
                let opened = match self.creds.exceeds(cx) {
                    // The kernel did not see this file, so it has not checked the caller. It does after ESTALE.
                    true if st.stx_uid != cx.uid => Err(Errno::STALE),
                    checked => {
                        if checked {
                            inode.state().access = None;
                        }
                        self.open_file(cx, inode.node, how)
                    }
                };
                match opened {
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

    /// Removes a file that was just made as `file` and can't be served, mostly for lack of descriptors. So an error leaves
    /// nothing behind, and the next attempt does not find the name taken.
    fn unmake(&self, cx: &Context, dir: BorrowedFd<'_>, name: &CStr, file: BorrowedFd<'_>) {
        let is = |st: Statx| (st.stx_dev_major, st.stx_dev_minor, st.stx_ino);
        let (made, now) = (sys::stat(file).map(is), sys::stat_at(dir, name).map(is));
        if made.is_ok() && made == now {
            let remove = |_: &_| rustix::fs::unlinkat(dir, name, AtFlags::empty());
            let _ = self.creds.as_caller(cx, None, remove);
        }
    }

    /// Makes a file without a name and opens it.
    pub(crate) fn make_tmpfile(
        &self,
        cx: &Context,
        parent: Node,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        self.writable()?;
        let (parent, dir) = self.dir_fd(parent)?;
        let asked = how.flags;
        let flags = (self.host_flags(how.flags, true)? - OFlags::TRUNC)
            | OFlags::TMPFILE
            | (asked & OFlags::EXCL)
            | OFlags::CLOEXEC;
        let mode = self.mode_in(cx, dir.as_fd(), new.mode)?;
        let fd = self.creds.as_caller(cx, Some(new.umask), |caller| {
            rustix::fs::openat(dir.as_fd(), c".", flags, caller.mode(mode))
        })?;
        let (inode, st) = self.adopt_open(&parent, fd.as_fd())?;
        self.opened_entry(cx, inode, &st, fd, how)
    }

    fn opened_entry(
        &self,
        cx: &Context,
        inode: Arc<Inode>,
        st: &Statx,
        fd: OwnedFd,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        match self.opened(cx, inode.clone(), fd, how, st, false) {
            // The lifetime of attributes depends on how the file is open.
            Ok(opened) => Ok((self.entry(cx, &inode, st), opened)),
            Err(errno) => {
                self.inodes.forget(inode.node, 1);
                Err(errno)
            }
        }
    }
}
