//! Open files.

mod backing;
mod open;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use uvfs_io::ops::{self, File};
use uvfs_server::fs::{Context, CopyRange, Handle, IoHow, Node, Payload, Seek};

use crate::inode::Inode;
use crate::io::{self, Place};
use crate::open_file::{By, OpenFile};
use crate::sys::{self, FileIoctl, Result};
use crate::{Backed, Source, apart, meta};

/// Copies up to this long are made at once; longer ones on another thread.
const SHORT_COPY: u64 = 256 << 10;
/// A file of up to this many bytes is read when it is opened for reading: that costs less than the READ that would
/// follow.
const SMALL_FILE: u64 = 32 << 10;

/// Whether a caller opens with O_DIRECT.
fn asked_direct(flags: OFlags) -> bool {
    flags.contains(OFlags::DIRECT)
}

/// Whether an open with O_DIRECT only reads a file of a remote file system. Without FOPEN_DIRECT_IO the kernel has
/// all pieces of a large call under way at once. Not for writers, which it would then admit one at a time.
fn reads_far(inode: &Inode, asked: OFlags) -> bool {
    inode.mount.remote && asked & OFlags::ACCMODE == OFlags::RDONLY
}

/// Whether the host opens this file with O_DIRECT, as the kernel does for a caller who asked for that.
fn takes_direct(fd: BorrowedFd<'_>) -> bool {
    let Ok(flags) = rustix::fs::fcntl_getfl(fd) else {
        return false;
    };
    let takes = rustix::fs::fcntl_setfl(fd, flags | OFlags::DIRECT).is_ok();
    // No other thread uses it yet.
    takes && rustix::fs::fcntl_setfl(fd, flags).is_ok()
}

impl Source {
    pub(crate) fn file(&self, fh: Handle) -> Result<Arc<OpenFile>> {
        self.files.get(fh).ok_or(Errno::BADF)
    }

    pub(crate) fn release_file(&self, fh: Handle) -> Result<()> {
        let file = self.files.remove(fh).ok_or(Errno::BADF)?;
        self.end_use(&file);
        {
            let mut state = file.inode.state();
            let last = Arc::strong_count(&file.fd) == 1;
            if last && std::ptr::eq(state.open.as_ptr(), Arc::as_ptr(&file.fd)) {
                // A weak reference would keep the memory, though not the file.
                state.open = Weak::new();
            }
        }
        // Clients lock by handle whether the kernel asks us for locks or not.
        self.drop_locks_by(&file.inode, fh);
        Ok(())
    }

    /// The open file with this number, which is one of the node's.
    fn file_of(&self, node: Node, fh: Handle) -> Result<Arc<OpenFile>> {
        let file = self.file(fh)?;
        match file.inode.node == node {
            true => Ok(file),
            false => Err(Errno::BADF),
        }
    }

    /// The flags of an open file that a client wants to share. Files with a backing file are left to the
    /// kernel, unless all have one.
    pub(crate) fn asked_flags(&self, node: Node, fh: Handle) -> Result<OFlags> {
        let file = self.file_of(node, fh)?;
        match file.by == By::Backed && self.options.passthrough != Backed::All {
            true => Err(Errno::BUSY),
            false => Ok(file.asked),
        }
    }

    /// A second open file on the same descriptor of the host: nothing here uses its position. With
    /// locks on the host's files one of its own, as closing it gives up locks.
    pub(crate) fn share_file(&self, node: Node, fh: Handle) -> Result<Handle> {
        let file = self.file_of(node, fh)?;
        if !file.inode.is_regular() {
            return Err(Errno::OPNOTSUPP);
        }
        let fd = if self.options.host_locks {
            let asked = file.asked;
            let flags = self.host_flags(asked, false)? - OFlags::TRUNC;
            let fd = apart::or_busy(self.open_host(&file.inode, flags, asked))?;
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
            writer: None,
            written: AtomicU64::new(0),
            direct: false,
            appends: file.appends,
        };
        self.files.insert(Arc::new(shared)).ok_or_else(|| {
            self.inodes.forget(node, 1);
            Errno::NFILE
        })
    }

    pub(crate) async fn read_file(&self, how: &IoHow, data: &Payload) -> Result<usize> {
        let file = self.file(how.fh)?;
        let uncached = how.uncached || self.options.uncached;
        io::read(&file, data, how.offset, uncached).await
    }

    pub(crate) async fn write_file(
        &self,
        cx: &Context,
        how: &IoHow,
        data: &Payload,
    ) -> Result<usize> {
        let (file, place) = self.begin_write(cx, how)?;
        let uncached = how.uncached || self.options.uncached;
        let write = io::write(&file, data, place, uncached);
        let reserves = file.inode.mount.reserves;
        let written = match self.creds.spender(cx, reserves, how.from_cache) {
            Some(spender) => Box::pin(spender.spends(write)).await?,
            None => write.await?,
        };
        file.written.fetch_add(written as u64, Ordering::Relaxed);
        if let Some(data_only) = file.syncs_after(how) {
            ops::fsync(&file.fd, data_only).await?;
        }
        Ok(written)
    }

    /// Where data is appended. An earlier server may have appended it for the same request: then it goes there again.
    fn append_at(&self, cx: &Context, file: &OpenFile) -> Result<Place> {
        if !self.outlives() {
            return Ok(Place::End);
        }
        if let Some(size) = self.again(cx).and_then(|again| again.note) {
            return Ok(Place::Again(size));
        }
        self.note(cx, sys::stat(file.as_fd())?.stx_size);
        Ok(Place::End)
    }

    /// The file of a write that is allowed, and where in it the write goes.
    pub(crate) fn begin_write(&self, cx: &Context, how: &IoHow) -> Result<(Arc<OpenFile>, Place)> {
        self.writable()?;
        let file = self.file(how.fh)?;
        if how.kill_suidgid {
            let changed = meta::kill_suidgid(cx, file.as_fd())?;
            self.mode_changed(file.inode.node, changed);
        }
        if how.from_cache && file.appends {
            // A page that was stored to through a mapping. The host would append it.
            return Err(Errno::PERM);
        }
        // With the writeback cache the kernel says where the end is.
        let append = how.flags.contains(OFlags::APPEND)
            && !how.from_cache
            && (file.appends || !self.writes_back());
        let place = match append {
            true => self.append_at(cx, &file)?,
            false => Place::At(how.offset),
        };
        Ok((file, place))
    }

    pub(crate) async fn fallocate_file(
        &self,
        cx: &Context,
        fh: Handle,
        offset: u64,
        len: u64,
        mode: FallocateFlags,
    ) -> Result<()> {
        self.writable()?;
        let file = self.file(fh)?;
        let allocate = ops::fallocate(&file.fd, mode.bits(), offset, len);
        match self.creds.spender(cx, file.inode.mount.reserves, false) {
            Some(spender) => Box::pin(spender.spends(allocate)).await?,
            None => allocate.await?,
        }
        self.content_changed(cx, &file)
    }

    /// As [`Source::fallocate_file`], in this thread, which may wait.
    pub(crate) fn fallocate_waiting(
        &self,
        cx: &Context,
        fh: Handle,
        range: (u64, u64),
        mode: FallocateFlags,
    ) -> Result<()> {
        self.writable()?;
        let file = self.file(fh)?;
        rustix::fs::fallocate(file.as_fd(), mode, range.0, range.1)?;
        self.content_changed(cx, &file)
    }

    fn content_changed(&self, cx: &Context, file: &OpenFile) -> Result<()> {
        let changed = meta::kill_suidgid_unless_kept(cx, file.as_fd())?;
        self.mode_changed(file.inode.node, changed);
        Ok(())
    }

    /// Tells the kernel that a file has lost set-user-id or set-group-id, as the answer does not carry that: the
    /// kernel must not execute it with the bits that it has cached.
    fn mode_changed(&self, node: Node, changed: bool) {
        if changed && let Some(session) = self.session.get() {
            session.attributes_changed(node);
        }
    }

    pub(crate) fn seek_file(&self, fh: Handle, offset: u64, seek: Seek) -> Result<u64> {
        let file = self.file(fh)?;
        // The host file's own position is used by nothing else.
        let to = match seek {
            Seek::Data => rustix::fs::SeekFrom::Data(offset),
            Seek::Hole => rustix::fs::SeekFrom::Hole(offset),
        };
        rustix::fs::seek(file.as_fd(), to)
    }

    pub(crate) async fn copy_file(&self, cx: &Context, copy: &CopyRange) -> Result<u64> {
        let call = self.begin_copy(cx, copy)?;
        match copy.len <= SHORT_COPY {
            true => call(),
            false => self.apart.copiers.run(cx.uid, call).await,
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
        let spender = self.creds.spender(cx, to.inode.mount.reserves, false);
        Ok(move || {
            let _caller = spender.and_then(|spender| spender.here());
            let (from, to) = (from.as_fd(), to.as_fd());
            let places = (Some(&mut offset_in), Some(&mut offset_out));
            rustix::fs::copy_file_range(from, places.0, to, places.1, len).map(|n| n as u64)
        })
    }

    /// Inode flags, project ids and generations (`lsattr`, `chattr`), and the file system's label.
    pub(crate) fn file_ioctl(
        &self,
        cx: &Context,
        node: Node,
        ioctl: &uvfs_server::fs::Ioctl<'_>,
    ) -> Result<(i32, Vec<u8>)> {
        let command = FileIoctl::new(ioctl.cmd).ok_or(Errno::NOTTY)?;
        let size = command.size();
        let mut data = [0; sys::IOCTL_ROOM];
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
        data: &[u8; sys::IOCTL_ROOM],
    ) -> Result<()> {
        if sys::stat(fd)?.stx_uid != cx.uid {
            return Err(Errno::PERM);
        }
        let word = |data: &[u8]| u32::from_ne_bytes([data[0], data[1], data[2], data[3]]);
        let mut now = [0; sys::IOCTL_ROOM];
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
