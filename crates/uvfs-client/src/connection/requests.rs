//! The requests of FUSE but reads and writes. Their callers wait for the answer.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;

use rustix::fs::{FallocateFlags, FileType, OFlags, RenameFlags, XattrFlags};
use rustix::io::{self, Errno};
use uvfs_proto::abi::{self, Opcode, SetattrValid};
use uvfs_proto::reply;
use uvfs_queue::pair::INLINE_SIZE;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::channel::{Channel, Reply, Waiting};
use super::codec::{joined, lock_in, malformed, parse};
use super::pages::{Done, Op};
use super::{Connection, LISTING};
use crate::types::{
    Attr, DirEntry, Entry, LockKind, LockRequest, NewFile, NodeId, RangeLock, SetAttr, StatFs,
};

impl Connection {
    /// Finds a name.
    pub fn lookup(&self, parent: NodeId, name: &OsStr) -> io::Result<Entry> {
        self.call_entry(Opcode::Lookup, parent, &[], &[name])
    }

    /// Undoes `lookups` lookups.
    pub fn forget(&self, node: NodeId, lookups: u64) {
        if let Ok(channel) = self.current() {
            let told = self.known().forget(channel.generation, node, lookups);
            if let Some((node, nlookup)) = told {
                let op = abi::ForgetIn { nlookup };
                channel.tell(Opcode::Forget as u32, node, op.as_bytes());
            }
        }
    }

    /// Attributes.
    pub fn getattr(&self, node: NodeId) -> io::Result<Attr> {
        let op = abi::GetattrIn::default();
        let out: abi::AttrOut = parse(&self.call(Opcode::Getattr, node, op.as_bytes(), &[])?)?;
        Ok(out.attr)
    }

    /// Changes attributes; answers the new ones.
    pub fn setattr(&self, node: NodeId, set: &SetAttr) -> io::Result<Attr> {
        let mut valid = SetattrValid::empty();
        valid.set(SetattrValid::MODE, set.mode.is_some());
        valid.set(SetattrValid::UID, set.uid.is_some());
        valid.set(SetattrValid::GID, set.gid.is_some());
        valid.set(SetattrValid::SIZE, set.size.is_some());
        valid.set(SetattrValid::ATIME, set.atime.is_some());
        valid.set(SetattrValid::MTIME, set.mtime.is_some());
        valid.set(SetattrValid::FH, set.handle.is_some() && set.size.is_some());
        let (atime, mtime) = (set.atime.unwrap_or_default(), set.mtime.unwrap_or_default());
        let channel = self.living()?;
        let (node, fh) = match set.handle {
            Some(handle) => self.at(&channel, node, handle)?,
            None => (self.node(&channel, node)?, 0),
        };
        let op = abi::SetattrIn {
            valid: valid.bits(),
            fh,
            size: set.size.unwrap_or(0),
            atime: atime.0 as u64,
            atimensec: atime.1,
            mtime: mtime.0 as u64,
            mtimensec: mtime.1,
            mode: set.mode.unwrap_or(0),
            uid: set.uid.unwrap_or(0),
            gid: set.gid.unwrap_or(0),
            ..Default::default()
        };
        let opcode = Opcode::Setattr as u32;
        let out: abi::AttrOut = parse(&channel.call(opcode, node, op.as_bytes(), &[], &[])?)?;
        Ok(out.attr)
    }

    /// The target of a symbolic link.
    pub fn readlink(&self, node: NodeId) -> io::Result<OsString> {
        let target = self.call_long(Opcode::Readlink, node, &[], &[])?;
        Ok(OsStr::from_bytes(&target).to_owned())
    }

    /// Makes a symbolic link.
    pub fn symlink(&self, parent: NodeId, name: &OsStr, target: &OsStr) -> io::Result<Entry> {
        self.call_entry(Opcode::Symlink, parent, &[], &[name, target])
    }

    /// Makes a file, fifo, socket or device, as mknod(2).
    pub fn mknod(&self, parent: NodeId, name: &OsStr, mode: u32, rdev: u32) -> io::Result<Entry> {
        let op = abi::MknodIn {
            mode,
            rdev,
            umask: 0,
            padding: 0,
        };
        self.call_entry(Opcode::Mknod, parent, op.as_bytes(), &[name])
    }

    /// Makes a directory.
    pub fn mkdir(&self, parent: NodeId, name: &OsStr, mode: u32) -> io::Result<Entry> {
        let op = abi::MkdirIn { mode, umask: 0 };
        self.call_entry(Opcode::Mkdir, parent, op.as_bytes(), &[name])
    }

    /// Removes a name that is no directory.
    pub fn unlink(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Unlink, parent, &[], &[name]).map(drop)
    }

    /// Removes an empty directory.
    pub fn rmdir(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Rmdir, parent, &[], &[name]).map(drop)
    }

    /// Renames; `flags` as renameat2(2).
    pub fn rename(
        &self,
        p: NodeId,
        n: &OsStr,
        np: NodeId,
        nn: &OsStr,
        flags: RenameFlags,
    ) -> io::Result<()> {
        let channel = self.living()?;
        let op = abi::Rename2In {
            newdir: self.node(&channel, np)?,
            flags: flags.bits(),
            padding: 0,
        };
        let (p, names) = (self.node(&channel, p)?, joined(&[n, nn])?);
        let opcode = Opcode::Rename2 as u32;
        channel
            .call(opcode, p, op.as_bytes(), &names, &[])
            .map(drop)
    }

    /// Makes a hard link.
    pub fn link(&self, node: NodeId, new_parent: NodeId, new_name: &OsStr) -> io::Result<Entry> {
        let channel = self.living()?;
        let op = abi::LinkIn {
            oldnodeid: self.node(&channel, node)?,
        };
        let (parent, names) = (self.node(&channel, new_parent)?, joined(&[new_name])?);
        let opcode = Opcode::Link as u32;
        let reply = channel.call(opcode, parent, op.as_bytes(), &names, &[])?;
        self.entry(&channel, &reply, new_parent, new_name)
    }

    /// Opens a file; `flags` as open(2), never with `O_APPEND`, `O_CREAT` or `O_EXCL`.
    pub fn open(&self, node: NodeId, flags: OFlags) -> io::Result<u64> {
        let op = abi::OpenIn {
            flags: flags.bits(),
            open_flags: 0,
        };
        let channel = self.living()?;
        let at_server = self.node(&channel, node)?;
        let reply = channel.call(Opcode::Open as u32, at_server, op.as_bytes(), &[], &[])?;
        let out: abi::OpenOut = parse(&reply)?;
        let identity = &reply[size_of::<abi::OpenOut>()..];
        self.known()
            .opened(channel.generation, node, out.fh, flags, identity, false)
    }

    /// Makes and opens a file; fails with `EEXIST` only when its flags have `O_EXCL`.
    pub fn create(&self, parent: NodeId, name: &OsStr, new: NewFile) -> io::Result<(Entry, u64)> {
        let op = abi::CreateIn {
            flags: (new.flags | OFlags::CREATE).bits(),
            mode: new.mode | libc::S_IFREG,
            ..Default::default()
        };
        let channel = self.living()?;
        let (at_server, names) = (self.node(&channel, parent)?, joined(&[name])?);
        let opcode = Opcode::Create as u32;
        let reply = channel.call(opcode, at_server, op.as_bytes(), &names, &[])?;
        let entry = self.entry(&channel, &reply, parent, name)?;
        let rest = &reply[size_of::<abi::EntryOut>()..];
        let (out, identity) = abi::OpenOut::read_from_prefix(rest).map_err(|_| malformed())?;
        let (generation, flags) = (channel.generation, new.flags);
        let mut known = self.known();
        let fh = known.opened(generation, entry.node, out.fh, flags, identity, false)?;
        Ok((entry, fh))
    }

    /// Closes a file.
    pub fn release(&self, node: NodeId, handle: u64) {
        if let Ok(channel) = self.current() {
            let at_server = self.node(&channel, node);
            let fh = self.known().closed(channel.generation, node, handle);
            if let (Ok(node), Some(fh)) = (at_server, fh) {
                let op = abi::ReleaseIn {
                    fh,
                    ..Default::default()
                };
                channel.tell(Opcode::Release as u32, node, op.as_bytes());
            }
        }
    }

    /// Tells the file system that a program closes a file: what the answer says is close(2)'s.
    pub fn flush(&self, node: NodeId, handle: u64, owner: u32) -> io::Result<()> {
        // As the kernel: one that does nothing then is asked once.
        if self.inner.ignores_closes.load(Ordering::Relaxed) {
            return Ok(());
        }
        let op = |fh| abi::FlushIn {
            fh,
            lock_owner: owner.into(),
            ..Default::default()
        };
        match self.call_open(Opcode::Flush, node, handle, op) {
            Err(Errno::NOSYS) => {
                self.inner.ignores_closes.store(true, Ordering::Relaxed);
                Ok(())
            }
            other => other.map(drop),
        }
    }

    /// Makes a file's data (and, unless `data_only`, its attributes) durable.
    pub fn fsync(&self, node: NodeId, handle: u64, data_only: bool) -> io::Result<()> {
        let synced = self.call_open(Opcode::Fsync, node, handle, |fh| fsync_in(fh, data_only));
        match synced {
            // As the kernel: a file system without fsync has nothing to do for it.
            Err(Errno::NOSYS) => Ok(()),
            other => other.map(drop),
        }
    }

    /// As [`Connection::fsync`], without waiting: `done` is called with the result (the number means nothing).
    pub fn submit_fsync(&self, node: NodeId, handle: u64, data_only: bool, done: Done) {
        let done: Done = Box::new(|result| match result {
            Err(Errno::NOSYS) => done(Ok(0)),
            other => done(other),
        });
        let found = self.living().and_then(|channel| {
            let at = self.at(&channel, node, handle)?;
            let id = channel.reserve()?;
            Ok((channel, at, id))
        });
        let (channel, (node, fh), id) = match found {
            Ok(found) => found,
            Err(e) => return done(Err(e)),
        };
        let op = fsync_in(fh, data_only);
        // Its answer has no body, as that of a read of nothing.
        let waiting = Waiting::Data(Op::Read, 0, done);
        channel.send(
            id,
            Opcode::Fsync as u32,
            node,
            op.as_bytes(),
            &[],
            &[],
            waiting,
        );
        channel.queue.ring();
    }

    /// Takes or gives back a lock; waits for it with `wait`, else fails with `EAGAIN`. Locks go
    /// with their handle.
    pub fn lock(
        &self,
        n: NodeId,
        handle: u64,
        request: &LockRequest,
        wait: bool,
    ) -> io::Result<()> {
        let opcode = if wait { Opcode::Setlkw } else { Opcode::Setlk };
        if request.kind.is_none() {
            // It is not to be taken again, whatever the answer; without a server it is gone as it is.
            self.known().locked(n, handle, request);
            if !self.is_alive() {
                return Ok(());
            }
        }
        let channel = self.living()?;
        let (at, fh) = self.at(&channel, n, handle)?;
        let op = lock_in(fh, request);
        channel.call(opcode as u32, at, op.as_bytes(), &[], &[])?;
        if request.kind.is_some() {
            let mut known = self.known();
            known.check(channel.generation)?;
            known.locked(n, handle, request);
        }
        Ok(())
    }

    /// The first lock that is in the way of a range lock.
    pub fn test_lock(
        &self,
        node: NodeId,
        handle: u64,
        lock: &LockRequest,
    ) -> io::Result<Option<RangeLock>> {
        let reply = self.call_open(Opcode::Getlk, node, handle, |fh| lock_in(fh, lock))?;
        let found = parse::<abi::LkOut>(&reply)?.lk;
        let kind = match found.r#type as i32 {
            libc::F_RDLCK => LockKind::Shared,
            libc::F_WRLCK => LockKind::Exclusive,
            _ => return Ok(None),
        };
        Ok(Some(RangeLock {
            kind,
            start: found.start,
            end: found.end,
            pid: found.pid,
        }))
    }

    /// Copies up to `len` bytes between open files, `from` and `to` by node and handle, and answers how
    /// many; 0 at the end of the one that is read.
    pub fn copy_range(
        &self,
        from: (NodeId, u64),
        from_offset: u64,
        to: (NodeId, u64),
        to_offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let channel = self.living()?;
        let (node, fh_in) = self.at(&channel, from.0, from.1)?;
        let (nodeid_out, fh_out) = self.at(&channel, to.0, to.1)?;
        let op = abi::CopyFileRangeIn {
            fh_in,
            off_in: from_offset,
            nodeid_out,
            fh_out,
            off_out: to_offset,
            len,
            flags: 0,
        };
        let opcode = Opcode::CopyFileRange64 as u32;
        match channel.call(opcode, node, op.as_bytes(), &[], &[]) {
            Err(Errno::NOSYS) => Err(Errno::OPNOTSUPP),
            Err(e) => Err(e),
            Ok(reply) => Ok(parse::<abi::CopyFileRangeOut>(&reply)?
                .bytes_copied
                .min(len)),
        }
    }

    /// As fallocate(2).
    pub fn fallocate(
        &self,
        node: NodeId,
        handle: u64,
        mode: FallocateFlags,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        let op = |fh| abi::FallocateIn {
            fh,
            offset,
            length,
            mode: mode.bits(),
            padding: 0,
        };
        match self.call_open(Opcode::Fallocate, node, handle, op) {
            Err(Errno::NOSYS) => Err(Errno::OPNOTSUPP),
            other => other.map(drop),
        }
    }

    /// As lseek(2) with `SEEK_DATA` or `SEEK_HOLE`.
    pub fn lseek(&self, node: NodeId, handle: u64, offset: u64, whence: i32) -> io::Result<u64> {
        let op = |fh| abi::LseekIn {
            fh,
            offset,
            whence: whence as u32,
            padding: 0,
        };
        let reply = self.call_open(Opcode::Lseek, node, handle, op)?;
        Ok(parse::<abi::LseekOut>(&reply)?.offset)
    }

    /// All names of a directory, without `.` and `..`.
    pub fn readdir(&self, node: NodeId) -> io::Result<Vec<DirEntry>> {
        let op = abi::OpenIn {
            flags: OFlags::DIRECTORY.bits(),
            open_flags: 0,
        };
        let channel = self.living()?;
        let node = self.node(&channel, node)?;
        let opcode = Opcode::Opendir as u32;
        let opened: abi::OpenOut = parse(&channel.call(opcode, node, op.as_bytes(), &[], &[])?)?;
        let list = self.list_all(&channel, node, opened.fh);
        let op = abi::ReleaseIn {
            fh: opened.fh,
            ..Default::default()
        };
        channel.tell(Opcode::Releasedir as u32, node, op.as_bytes());
        list
    }

    /// The file system's numbers.
    pub fn statfs(&self, node: NodeId) -> io::Result<StatFs> {
        let out: abi::StatfsOut = parse(&self.call(Opcode::Statfs, node, &[], &[])?)?;
        Ok(out.st)
    }

    /// As setxattr(2).
    pub fn setxattr(
        &self,
        node: NodeId,
        name: &OsStr,
        value: &[u8],
        flags: XattrFlags,
    ) -> io::Result<()> {
        // Without SETXATTR_EXT, which this session does not negotiate, the structure is short.
        let mut op = (value.len() as u32).to_ne_bytes().to_vec();
        op.extend_from_slice(&flags.bits().to_ne_bytes());
        let mut inline = joined(&[name])?;
        inline.extend_from_slice(value);
        if inline.len() > INLINE_SIZE {
            return Err(Errno::TOOBIG);
        }
        let channel = self.living()?;
        let node = self.node(&channel, node)?;
        channel
            .call(Opcode::Setxattr as u32, node, &op, &inline, &[])
            .map(drop)
    }

    /// As getxattr(2), the whole value.
    pub fn getxattr(&self, node: NodeId, name: &OsStr) -> io::Result<Vec<u8>> {
        let op = abi::GetxattrIn {
            size: LISTING as u32,
            padding: 0,
        };
        self.call_long(Opcode::Getxattr, node, op.as_bytes(), &[name])
    }

    /// All attribute names.
    pub fn listxattr(&self, node: NodeId) -> io::Result<Vec<OsString>> {
        let op = abi::GetxattrIn {
            size: LISTING as u32,
            padding: 0,
        };
        let list = self.call_long(Opcode::Listxattr, node, op.as_bytes(), &[])?;
        Ok(uvfs_sys::xattr_names(&list)
            .map(|name| OsStr::from_bytes(name).to_owned())
            .collect())
    }

    /// As removexattr(2).
    pub fn removexattr(&self, node: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Removexattr, node, &[], &[name]).map(drop)
    }

    /// A call on an open file; `op` makes its structure of the handle's number at the server.
    fn call_open<T: IntoBytes + Immutable>(
        &self,
        opcode: Opcode,
        node: NodeId,
        handle: u64,
        op: impl FnOnce(u64) -> T,
    ) -> Reply {
        let channel = self.living()?;
        let (node, fh) = self.at(&channel, node, handle)?;
        channel.call(opcode as u32, node, op(fh).as_bytes(), &[], &[])
    }

    /// The entries of a session's open directory, without `.` and `..`.
    fn list_all(&self, channel: &Channel, node: u64, fh: u64) -> io::Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        let mut offset = 0;
        loop {
            let op = abi::ReadIn {
                fh,
                offset,
                size: LISTING as u32,
                ..Default::default()
            };
            let bytes = self.call_long_at(channel, Opcode::Readdir, node, op.as_bytes(), &[])?;
            let mut next = offset;
            for one in reply::dirents(&bytes) {
                let (entry, name) = one.map_err(|_| malformed())?;
                next = entry.off;
                if name != b"." && name != b".." {
                    entries.push(DirEntry {
                        name: OsStr::from_bytes(name).to_owned(),
                        ino: entry.ino,
                        kind: FileType::from_raw_mode(entry.r#type << 12),
                    });
                }
            }
            // None, or a server that would go on for ever.
            if next == offset {
                return Ok(entries);
            }
            offset = next;
        }
    }
}

fn fsync_in(fh: u64, data_only: bool) -> abi::FsyncIn {
    abi::FsyncIn {
        fh,
        fsync_flags: if data_only { abi::FSYNC_FDATASYNC } else { 0 },
        padding: 0,
    }
}
