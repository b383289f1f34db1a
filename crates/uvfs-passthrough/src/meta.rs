//! Attributes.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::fs::{
    Access as Wanted, AtFlags, CWD, FallocateFlags, Gid, Statx, StatxFlags, StatxTimestamp,
    Timespec, Timestamps, Uid,
};
use rustix::io::Errno;
use uvfs_proto::abi;
use uvfs_server::fs::{Attributes, Context, Entry, Handle, Mode, Node, SetAttr, SetTime};
use uvfs_server::interrupt;

use crate::Source;
use crate::creds;
use crate::creds::Caller;
use crate::inode::{Access, Inode, Told};
use crate::sys::{self, ProcPath, Result};
use crate::watcher::FOREVER;
use rustix::fs::OFlags;

pub(crate) fn attr(st: &Statx) -> abi::Attr {
    abi::Attr {
        ino: st.stx_ino,
        size: st.stx_size,
        blocks: st.stx_blocks,
        atime: st.stx_atime.tv_sec as u64,
        mtime: st.stx_mtime.tv_sec as u64,
        ctime: st.stx_ctime.tv_sec as u64,
        atimensec: st.stx_atime.tv_nsec,
        mtimensec: st.stx_mtime.tv_nsec,
        ctimensec: st.stx_ctime.tv_nsec,
        mode: u32::from(st.stx_mode),
        nlink: st.stx_nlink,
        uid: st.stx_uid,
        gid: st.stx_gid,
        rdev: abi::encode_dev(st.stx_rdev_major, st.stx_rdev_minor),
        blksize: st.stx_blksize,
        flags: 0,
    }
}

fn sx(st: &Statx) -> abi::Statx {
    let time = |time: &StatxTimestamp| abi::SxTime::new(time.tv_sec, time.tv_nsec);
    abi::Statx {
        mask: st.stx_mask,
        blksize: st.stx_blksize,
        attributes: st.stx_attributes.bits(),
        nlink: st.stx_nlink,
        uid: st.stx_uid,
        gid: st.stx_gid,
        mode: st.stx_mode,
        ino: st.stx_ino,
        size: st.stx_size,
        blocks: st.stx_blocks,
        attributes_mask: st.stx_attributes_mask.bits(),
        atime: time(&st.stx_atime),
        btime: time(&st.stx_btime),
        ctime: time(&st.stx_ctime),
        mtime: time(&st.stx_mtime),
        rdev_major: st.stx_rdev_major,
        rdev_minor: st.stx_rdev_minor,
        dev_major: st.stx_dev_major,
        dev_minor: st.stx_dev_minor,
        ..Default::default()
    }
}

pub(crate) fn has_set_id(file: &Statx) -> bool {
    u32::from(file.stx_mode) & (libc::S_ISUID | libc::S_ISGID) != 0
}

/// Clears set-user-id and set-group-id as a write by one without CAP_FSETID does. Capabilities the
/// host clears by itself, whichever user writes. Says whether there were any bits to clear.
pub(crate) fn kill_suidgid(cx: &Context, fd: BorrowedFd<'_>) -> Result<bool> {
    match kill_sgid(cx, fd, libc::S_ISUID)? {
        Some(mode) => strip(fd, mode).map(|()| true),
        None => Ok(false),
    }
}

/// Likewise for requests that don't tell who has CAP_FSETID.
pub(crate) fn kill_suidgid_unless_kept(cx: &Context, fd: BorrowedFd<'_>) -> Result<bool> {
    match kill_sgid(cx, fd, libc::S_ISUID)? {
        Some(mode) if !creds::keeps_set_id(cx) => strip(fd, mode).map(|()| true),
        _ => Ok(false),
    }
}

fn strip(fd: BorrowedFd<'_>, mode: u32) -> Result<()> {
    match sys::chmod(fd, mode) {
        // The mode of an append-only file changes by what is done to its data alone.
        Err(Errno::PERM) => creds::without_fsetid(|| {
            rustix::fs::fallocate(fd, FallocateFlags::KEEP_SIZE, 0, 1)?;
            Ok(())
        })
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::PERM)),
        result => result,
    }
}

/// The mode that is left of a regular file's when it loses the bits in `kill` and set-group-id, if that
/// changes it. Set-group-id of a file that its group may not execute stays for a member of the group.
pub(crate) fn kill_sgid(cx: &Context, fd: BorrowedFd<'_>, kill: u32) -> Result<Option<u32>> {
    let wanted = StatxFlags::MODE | StatxFlags::TYPE | StatxFlags::GID;
    let st = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, wanted)?;
    let mode = u32::from(st.stx_mode);
    if mode & libc::S_IFMT != libc::S_IFREG {
        return Ok(None);
    }
    let mut kill = mode & kill;
    if mode & libc::S_ISGID != 0
        && (mode & libc::S_IXGRP != 0 || !creds::in_group_or_capable(cx, st.stx_gid))
    {
        kill |= libc::S_ISGID;
    }
    Ok((kill != 0).then_some(mode & 0o7777 & !kill))
}

/// utimensat(2)'s form of a time.
fn time(set: Option<SetTime>) -> Timespec {
    let special = |nsec: i64| Timespec {
        tv_sec: 0,
        tv_nsec: nsec as _,
    };
    match set {
        None => special(libc::UTIME_OMIT),
        Some(SetTime::Now) => special(libc::UTIME_NOW),
        Some(SetTime::At(secs, nanos)) => Timespec {
            tv_sec: secs,
            tv_nsec: nanos.into(),
        },
    }
}

/// Sets mode and owner.
fn change_owner(cx: &Context, fd: BorrowedFd<'_>, set: &SetAttr) -> Result<()> {
    if let Some(mode) = set.mode {
        sys::chmod(fd, mode.as_raw_mode())?;
    }
    if set.uid.is_none() && set.gid.is_none() {
        return Ok(());
    }
    // The host knows nothing of the caller's groups. All else that goes with a change of owner it
    // clears by itself.
    if let Some(mode) = kill_sgid(cx, fd, 0)? {
        sys::chmod(fd, mode)?;
    }
    rustix::fs::chownat(
        fd,
        c"",
        set.uid.map(Uid::from_raw),
        set.gid.map(Gid::from_raw),
        AtFlags::EMPTY_PATH,
    )
}

fn set_times(set: &SetAttr) -> bool {
    set.atime.is_some() || set.mtime.is_some()
}

fn change_times(fd: BorrowedFd<'_>, set: &SetAttr) -> Result<()> {
    if !set_times(set) {
        return Ok(());
    }
    let times = Timestamps {
        last_access: time(set.atime),
        last_modification: time(set.mtime),
    };
    rustix::fs::utimensat(fd, c"", &times, AtFlags::EMPTY_PATH)
}

/// Whether the kernel writes back the times that it keeps with the writeback cache. It does so for
/// a removed file, too, when that is already gone from the host; an error would be told to the program that syncs next.
fn is_written_back(set: &SetAttr) -> bool {
    set.ctime.is_some()
        && set.mode.is_none()
        && set.uid.is_none()
        && set.gid.is_none()
        && set.size.is_none()
        && set.atime.is_none()
}

/// How long what is said of an inode may be cached: `elsewhere` where no watcher tells of changes.
fn lifetime(inode: &Inode, elsewhere: Duration) -> Duration {
    match inode.is_watched() {
        true => FOREVER,
        false => elsewhere,
    }
}

impl Source {
    /// The attributes of a file that is gone from the host.
    fn removed(&self, inode: &Inode) -> Attributes {
        let attr = abi::Attr {
            ino: inode.key.ino,
            mode: inode.kind,
            ..Default::default()
        };
        Attributes::new(attr, Duration::ZERO)
    }

    /// Notes what the kernel is told of a file, and says for how long it may cache that. Not while a backing
    /// file changes what the kernel does not look at: times by stores through a mapping, set-user-id and
    /// set-group-id by writes.
    ///
    /// `to_kernel`: the kernel is told, not a client. It checks its callers by these attributes from now on.
    fn tell(&self, inode: &Inode, st: &Statx, to_kernel: bool) -> Duration {
        let set_id = inode.is_regular() && has_set_id(st);
        if set_id
            && !std::mem::replace(&mut inode.state().set_id, true)
            && let Some(session) = self.session.get()
        {
            session.save_again(inode.node, &mut |to| Ok(self.save_inode(inode.node, to)?));
        }
        let mut state = inode.state();
        if to_kernel {
            state.access = Some(Access::of(st));
        }
        if inode.is_regular() {
            let now = Told::of(st);
            if state.is_mappable() || set_id && state.backing.is_some() {
                state.told = None;
                return Duration::ZERO;
            }
            state.told = Some(now);
            state.settled = now.is_settled();
        }
        drop(state);
        lifetime(inode, self.options.attr_ttl)
    }

    pub(crate) fn entry(&self, cx: &Context, inode: &Inode, st: &Statx) -> Entry {
        let mut entry = Entry::new(attr(st), self.tell(inode, st, !interrupt::is_client(cx)));
        entry.node = inode.node;
        entry.entry_ttl = lifetime(inode, self.options.entry_ttl);
        entry
    }

    /// How long it may be cached that a directory lacks a name.
    pub(crate) fn negative_ttl(&self, directory: &Inode) -> Duration {
        lifetime(directory, self.options.negative_ttl)
    }

    fn attributes(&self, cx: &Context, inode: &Inode, st: &Statx) -> Attributes {
        let ttl = self.tell(inode, st, !interrupt::is_client(cx));
        Attributes::new(attr(st), ttl)
    }

    pub(crate) fn get_attr(
        &self,
        cx: &Context,
        node: Node,
        fh: Option<Handle>,
    ) -> Result<Attributes> {
        // A directory's handle is in another table; its inode does as well.
        if let Some(file) = fh.and_then(|fh| self.files.get(fh)) {
            let st = sys::stat(file.as_fd())?;
            return Ok(self.attributes(cx, &file.inode, &st));
        }
        let inode = self.inode(node)?;
        let st = sys::stat(self.path_fd(&inode)?.as_fd())?;
        Ok(self.attributes(cx, &inode, &st))
    }

    pub(crate) fn get_statx(
        &self,
        cx: &Context,
        node: Node,
        fh: Option<Handle>,
        mask: u32,
    ) -> Result<(abi::Statx, Duration)> {
        let mask = StatxFlags::from_bits_retain(mask) & StatxFlags::ALL;
        let ask = |fd: BorrowedFd<'_>| {
            rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, mask | StatxFlags::BASIC_STATS)
        };
        let inode = self.inode(node)?;
        let st = match fh.and_then(|fh| self.files.get(fh)) {
            Some(file) => ask(file.as_fd())?,
            None => ask(self.path_fd(&inode)?.as_fd())?,
        };
        let ttl = self.tell(&inode, &st, !interrupt::is_client(cx));
        Ok((sx(&st), ttl))
    }

    /// Whether the host lets the server read, write or execute a file. Where the kernel does not check permissions,
    /// opens go by the server's as well.
    pub(crate) fn may_access(&self, node: Node, mask: Wanted) -> Result<()> {
        let inode = self.inode(node)?;
        let fd = self.path_fd(&inode)?;
        let path = ProcPath::new(fd.as_fd());
        rustix::fs::accessat(CWD, path.as_c_str(), mask, AtFlags::EACCESS)
    }

    pub(crate) fn set_attr(&self, cx: &Context, node: Node, set: &SetAttr) -> Result<Attributes> {
        self.writable()?;
        let inode = self.inode(node)?;
        let file = set.fh.and_then(|fh| self.files.get(fh));
        let path;
        let fd = match &file {
            Some(file) => file.as_fd(),
            None => {
                path = match self.path_fd(&inode) {
                    Err(Errno::STALE) if is_written_back(set) => {
                        return Ok(self.removed(&inode));
                    }
                    path => path?,
                };
                path.as_fd()
            }
        };
        // Times that go with a new size, or that the kernel kept, are not the caller's to set or not.
        let own_times = set.size.is_none() && set.ctime.is_none();
        if set.mode.is_some()
            || set.uid.is_some()
            || set.gid.is_some()
            || own_times && set_times(set)
        {
            self.creds.as_caller(cx, None, |_: &Caller| {
                change_owner(cx, fd, set)?;
                match own_times {
                    true => change_times(fd, set),
                    false => Ok(()),
                }
            })?;
        }
        if let Some(size) = set.size {
            match &file {
                Some(file) => rustix::fs::ftruncate(file.as_fd(), size)?,
                None if inode.is_regular() => {
                    let file = self.open_inode(&inode, OFlags::WRONLY)?;
                    if !self.creds.may_open(cx, file.as_fd(), OFlags::WRONLY, true) {
                        return Err(Errno::ACCESS);
                    }
                    rustix::fs::ftruncate(file.as_fd(), size)?;
                }
                None if inode.is_dir() => return Err(Errno::ISDIR),
                None => return Err(Errno::INVAL),
            }
            if set.kill_suidgid {
                // The answer tells the kernel.
                kill_suidgid(cx, fd)?;
            }
        }
        if !own_times {
            change_times(fd, set)?;
        }
        let st = sys::stat(fd)?;
        Ok(self.attributes(cx, &inode, &st))
    }

    /// The mode for a new file in `dir`. Set-group-id of an executable file is only for members of
    /// the group that it gets; newer kernels have seen to it, as they know all the caller's groups.
    pub(crate) fn mode_in(&self, cx: &Context, dir: BorrowedFd<'_>, mode: Mode) -> Result<Mode> {
        if cx.uid == 0 || !mode.contains(Mode::SGID | Mode::XGRP) {
            return Ok(mode);
        }
        let st = sys::stat(dir)?;
        let inherits = u32::from(st.stx_mode) & libc::S_ISGID != 0;
        if inherits && st.stx_gid != cx.gid && cx.group != Some(st.stx_gid) {
            return Ok(mode - Mode::SGID);
        }
        Ok(mode)
    }

    pub(crate) fn stat_fs(&self, node: Node) -> Result<abi::Kstatfs> {
        let inode = self.inode(node)?;
        let st = rustix::fs::fstatvfs(self.path_fd(&inode)?)?;
        Ok(abi::Kstatfs {
            blocks: st.f_blocks,
            bfree: st.f_bfree,
            bavail: st.f_bavail,
            files: st.f_files,
            ffree: st.f_ffree,
            bsize: st.f_bsize as u32,
            namelen: st.f_namemax as u32,
            frsize: st.f_frsize as u32,
            ..Default::default()
        })
    }
}
