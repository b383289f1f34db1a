//! [`FileOps`] by requests to the server.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;

use uvfs_proto::abi::{self, Opcode, SetattrValid};
use uvfs_proto::reply;
use uvfs_queue::pair::{Direction, INLINE_SIZE};
use zerocopy::{FromBytes, IntoBytes};

use super::codec::{attr_of, joined, lock_in, parse};
use super::session::{Session, Waiting};
use super::{LISTING, Server};
use crate::backend::{
    Attr, DirEntry, Done, Entry, FileOps, LockKind, LockRequest, NewFile, NodeId, Op, RangeLock,
    SetAttr, SharedServer, StatFs,
};
use crate::cache::errno;

impl FileOps for Server {
    fn lookup(&self, parent: NodeId, name: &OsStr) -> io::Result<Entry> {
        self.call_entry(Opcode::Lookup, parent, &[], &[name])
    }

    fn forget(&self, node: NodeId, lookups: u64) {
        if let Ok(session) = self.current() {
            let told = self.known().forget(session.generation, node, lookups);
            if let Some((node, nlookup)) = told {
                let op = abi::ForgetIn { nlookup };
                session.tell(Opcode::Forget as u32, node, op.as_bytes());
            }
        }
    }

    fn getattr(&self, node: NodeId) -> io::Result<Attr> {
        let op = abi::GetattrIn::default();
        let out: abi::AttrOut = parse(&self.call(Opcode::Getattr, node, op.as_bytes(), &[])?)?;
        Ok(attr_of(&out.attr))
    }

    fn setattr(&self, node: NodeId, set: &SetAttr) -> io::Result<Attr> {
        let mut valid = SetattrValid::empty();
        valid.set(SetattrValid::MODE, set.mode.is_some());
        valid.set(SetattrValid::UID, set.uid.is_some());
        valid.set(SetattrValid::GID, set.gid.is_some());
        valid.set(SetattrValid::SIZE, set.size.is_some());
        valid.set(SetattrValid::ATIME, set.atime.is_some());
        valid.set(SetattrValid::MTIME, set.mtime.is_some());
        valid.set(SetattrValid::FH, set.handle.is_some() && set.size.is_some());
        let (atime, mtime) = (set.atime.unwrap_or_default(), set.mtime.unwrap_or_default());
        let session = self.living()?;
        let (node, fh) = match set.handle {
            Some(handle) => self.at(&session, node, handle)?,
            None => (self.node(&session, node)?, 0),
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
        let out: abi::AttrOut = parse(&session.call(opcode, node, op.as_bytes(), &[], &[])?)?;
        Ok(attr_of(&out.attr))
    }

    fn readlink(&self, node: NodeId) -> io::Result<OsString> {
        let target = self.call_long(Opcode::Readlink, node, &[], &[])?;
        Ok(OsStr::from_bytes(&target).to_owned())
    }

    fn symlink(&self, parent: NodeId, name: &OsStr, target: &OsStr) -> io::Result<Entry> {
        self.call_entry(Opcode::Symlink, parent, &[], &[name, target])
    }

    fn mknod(&self, parent: NodeId, name: &OsStr, mode: u32, rdev: u32) -> io::Result<Entry> {
        let op = abi::MknodIn {
            mode,
            rdev,
            umask: 0,
            padding: 0,
        };
        self.call_entry(Opcode::Mknod, parent, op.as_bytes(), &[name])
    }

    fn mkdir(&self, parent: NodeId, name: &OsStr, mode: u32) -> io::Result<Entry> {
        let op = abi::MkdirIn { mode, umask: 0 };
        self.call_entry(Opcode::Mkdir, parent, op.as_bytes(), &[name])
    }

    fn unlink(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Unlink, parent, &[], &[name]).map(drop)
    }

    fn rmdir(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Rmdir, parent, &[], &[name]).map(drop)
    }

    fn rename(&self, p: NodeId, n: &OsStr, np: NodeId, nn: &OsStr, flags: u32) -> io::Result<()> {
        let session = self.living()?;
        let op = abi::Rename2In {
            newdir: self.node(&session, np)?,
            flags,
            padding: 0,
        };
        let (p, names) = (self.node(&session, p)?, joined(&[n, nn])?);
        let opcode = Opcode::Rename2 as u32;
        session
            .call(opcode, p, op.as_bytes(), &names, &[])
            .map(drop)
    }

    fn link(&self, node: NodeId, new_parent: NodeId, new_name: &OsStr) -> io::Result<Entry> {
        let session = self.living()?;
        let op = abi::LinkIn {
            oldnodeid: self.node(&session, node)?,
        };
        let (parent, names) = (self.node(&session, new_parent)?, joined(&[new_name])?);
        let opcode = Opcode::Link as u32;
        let reply = session.call(opcode, parent, op.as_bytes(), &names, &[])?;
        self.entry(&session, &reply, new_parent, new_name)
    }

    fn open(&self, node: NodeId, flags: i32) -> io::Result<u64> {
        let op = abi::OpenIn {
            flags: flags as u32,
            open_flags: 0,
        };
        let session = self.living()?;
        let at_server = self.node(&session, node)?;
        let reply = session.call(Opcode::Open as u32, at_server, op.as_bytes(), &[], &[])?;
        let out: abi::OpenOut = parse(&reply)?;
        let identity = &reply[size_of::<abi::OpenOut>()..];
        self.known()
            .opened(session.generation, node, out.fh, flags, identity, false)
    }

    fn create(&self, parent: NodeId, name: &OsStr, new: NewFile) -> io::Result<(Entry, u64)> {
        let op = abi::CreateIn {
            flags: (new.flags | libc::O_CREAT) as u32,
            mode: new.mode | libc::S_IFREG,
            ..Default::default()
        };
        let session = self.living()?;
        let (at_server, names) = (self.node(&session, parent)?, joined(&[name])?);
        let opcode = Opcode::Create as u32;
        let reply = session.call(opcode, at_server, op.as_bytes(), &names, &[])?;
        let entry = self.entry(&session, &reply, parent, name)?;
        let rest = &reply[size_of::<abi::EntryOut>()..];
        let (out, identity) = abi::OpenOut::read_from_prefix(rest).map_err(|_| errno(libc::EIO))?;
        let (generation, flags) = (session.generation, new.flags);
        let mut known = self.known();
        let fh = known.opened(generation, entry.node, out.fh, flags, identity, false)?;
        Ok((entry, fh))
    }

    fn release(&self, node: NodeId, handle: u64) {
        if let Ok(session) = self.current() {
            let at_server = self.node(&session, node);
            let fh = self.known().closed(session.generation, node, handle);
            if let (Ok(node), Some(fh)) = (at_server, fh) {
                let op = abi::ReleaseIn {
                    fh,
                    ..Default::default()
                };
                session.tell(Opcode::Release as u32, node, op.as_bytes());
            }
        }
    }

    fn fsync(&self, node: NodeId, handle: u64, data_only: bool) -> io::Result<()> {
        let fsync_flags = if data_only { abi::FSYNC_FDATASYNC } else { 0 };
        let session = self.living()?;
        let (node, fh) = self.at(&session, node, handle)?;
        let op = abi::FsyncIn {
            fh,
            fsync_flags,
            padding: 0,
        };
        match session.call(Opcode::Fsync as u32, node, op.as_bytes(), &[], &[]) {
            // As the kernel: a file system without fsync has nothing to do for it.
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
            other => other.map(drop),
        }
    }

    fn submit_fsync(&self, node: NodeId, handle: u64, data_only: bool, done: Done) {
        let done: Done = Box::new(|result| match result {
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => done(Ok(0)),
            other => done(other),
        });
        let found = self.living().and_then(|session| {
            let at = self.at(&session, node, handle)?;
            let id = session.reserve()?;
            Ok((session, at, id))
        });
        let (session, (node, fh), id) = match found {
            Ok(found) => found,
            Err(e) => return done(Err(e)),
        };
        let op = abi::FsyncIn {
            fh,
            fsync_flags: if data_only { abi::FSYNC_FDATASYNC } else { 0 },
            padding: 0,
        };
        let (to, op) = (Direction::ToServer, op.as_bytes());
        // Its answer has no body, as that of a read of nothing.
        let waiting = Waiting::Data(Op::Read, 0, done);
        session.send(id, Opcode::Fsync as u32, node, op, &[], &[], to, waiting);
        session.queue.ring();
    }

    fn lock(&self, n: NodeId, handle: u64, request: &LockRequest, wait: bool) -> io::Result<()> {
        let opcode = if wait { Opcode::Setlkw } else { Opcode::Setlk };
        if request.kind.is_none() {
            // It is not to be taken again, whatever the answer; without a server it is gone as it is.
            self.known().locked(n, handle, request);
            if !self.is_alive() {
                return Ok(());
            }
        }
        let session = self.living()?;
        let (at, fh) = self.at(&session, n, handle)?;
        let op = lock_in(fh, request);
        session.call(opcode as u32, at, op.as_bytes(), &[], &[])?;
        if request.kind.is_some() {
            let mut known = self.known();
            known.check(session.generation)?;
            known.locked(n, handle, request);
        }
        Ok(())
    }

    fn test_lock(&self, n: NodeId, h: u64, lock: &LockRequest) -> io::Result<Option<RangeLock>> {
        let session = self.living()?;
        let (n, h) = self.at(&session, n, h)?;
        let op = lock_in(h, lock);
        let opcode = Opcode::Getlk as u32;
        let out: abi::LkOut = parse(&session.call(opcode, n, op.as_bytes(), &[], &[])?)?;
        let kind = match out.lk.r#type as i32 {
            libc::F_RDLCK => LockKind::Shared,
            libc::F_WRLCK => LockKind::Exclusive,
            _ => return Ok(None),
        };
        Ok(Some(RangeLock {
            kind,
            start: out.lk.start,
            end: out.lk.end,
            pid: out.lk.pid,
        }))
    }

    fn copy_range(
        &self,
        from: (NodeId, u64),
        from_offset: u64,
        to: (NodeId, u64),
        to_offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let session = self.living()?;
        let (node, fh_in) = self.at(&session, from.0, from.1)?;
        let (nodeid_out, fh_out) = self.at(&session, to.0, to.1)?;
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
        match session.call(opcode, node, op.as_bytes(), &[], &[]) {
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => Err(errno(libc::EOPNOTSUPP)),
            Err(e) => Err(e),
            Ok(reply) => Ok(parse::<abi::CopyFileRangeOut>(&reply)?
                .bytes_copied
                .min(len)),
        }
    }

    fn fallocate(&self, n: NodeId, h: u64, mode: i32, offset: u64, len: u64) -> io::Result<()> {
        let session = self.living()?;
        let (n, h) = self.at(&session, n, h)?;
        let op = abi::FallocateIn {
            fh: h,
            offset,
            length: len,
            mode: mode as u32,
            padding: 0,
        };
        match session.call(Opcode::Fallocate as u32, n, op.as_bytes(), &[], &[]) {
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => Err(errno(libc::EOPNOTSUPP)),
            other => other.map(drop),
        }
    }

    fn lseek(&self, node: NodeId, handle: u64, offset: u64, whence: i32) -> io::Result<u64> {
        let session = self.living()?;
        let (node, fh) = self.at(&session, node, handle)?;
        let op = abi::LseekIn {
            fh,
            offset,
            whence: whence as u32,
            padding: 0,
        };
        let out: abi::LseekOut =
            parse(&session.call(Opcode::Lseek as u32, node, op.as_bytes(), &[], &[])?)?;
        Ok(out.offset)
    }

    fn readdir(&self, node: NodeId) -> io::Result<Vec<DirEntry>> {
        let op = abi::OpenIn {
            flags: libc::O_DIRECTORY as u32,
            open_flags: 0,
        };
        let session = self.living()?;
        let node = self.node(&session, node)?;
        let opcode = Opcode::Opendir as u32;
        let opened: abi::OpenOut = parse(&session.call(opcode, node, op.as_bytes(), &[], &[])?)?;
        let list = self.list_all(&session, node, opened.fh);
        let op = abi::ReleaseIn {
            fh: opened.fh,
            ..Default::default()
        };
        session.tell(Opcode::Releasedir as u32, node, op.as_bytes());
        list
    }

    fn statfs(&self, node: NodeId) -> io::Result<StatFs> {
        let out: abi::StatfsOut = parse(&self.call(Opcode::Statfs, node, &[], &[])?)?;
        Ok(StatFs {
            blocks: out.st.blocks,
            bfree: out.st.bfree,
            bavail: out.st.bavail,
            files: out.st.files,
            ffree: out.st.ffree,
            bsize: out.st.bsize,
            frsize: out.st.frsize,
            namelen: out.st.namelen,
        })
    }

    fn setxattr(&self, node: NodeId, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        // Without SETXATTR_EXT, which this session does not negotiate, the structure is short.
        let mut op = (value.len() as u32).to_ne_bytes().to_vec();
        op.extend_from_slice(&flags.to_ne_bytes());
        let mut inline = name.as_bytes().to_vec();
        inline.push(0);
        inline.extend_from_slice(value);
        if inline.len() > INLINE_SIZE {
            return Err(errno(libc::E2BIG));
        }
        let session = self.living()?;
        let node = self.node(&session, node)?;
        session
            .call(Opcode::Setxattr as u32, node, &op, &inline, &[])
            .map(drop)
    }

    fn getxattr(&self, node: NodeId, name: &OsStr) -> io::Result<Vec<u8>> {
        let op = abi::GetxattrIn {
            size: LISTING as u32,
            padding: 0,
        };
        let mut inline = name.as_bytes().to_vec();
        inline.push(0);
        self.call_long(Opcode::Getxattr, node, op.as_bytes(), &inline)
    }

    fn listxattr(&self, node: NodeId) -> io::Result<Vec<OsString>> {
        let op = abi::GetxattrIn {
            size: LISTING as u32,
            padding: 0,
        };
        let list = self.call_long(Opcode::Listxattr, node, op.as_bytes(), &[])?;
        Ok(uvfs_sys::xattr_names(&list)
            .map(|name| OsStr::from_bytes(name).to_owned())
            .collect())
    }

    fn removexattr(&self, node: NodeId, name: &OsStr) -> io::Result<()> {
        self.call(Opcode::Removexattr, node, &[], &[name]).map(drop)
    }
}

impl Server {
    /// The entries of a session's open directory, without `.` and `..`.
    fn list_all(&self, session: &Session, node: u64, fh: u64) -> io::Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        let mut offset = 0;
        loop {
            let op = abi::ReadIn {
                fh,
                offset,
                size: LISTING as u32,
                ..Default::default()
            };
            let bytes = self.call_long_at(session, Opcode::Readdir, node, op.as_bytes(), &[])?;
            let mut next = offset;
            for one in reply::dirents(&bytes) {
                let (entry, name) = one.map_err(|_| errno(libc::EIO))?;
                next = entry.off;
                if name != b"." && name != b".." {
                    entries.push(DirEntry {
                        name: OsStr::from_bytes(name).to_owned(),
                        ino: entry.ino,
                        kind: entry.r#type as u8,
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
