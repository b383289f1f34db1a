//! [`Backend`] by requests to the server.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use uvfs_proto::abi::{self, Opcode, SetattrValid};
use uvfs_proto::ext;
use uvfs_proto::import::{IMPORT, ImportIn, ImportOut};
use uvfs_proto::reply;
use uvfs_queue::arena::Arena;
use uvfs_queue::attach;
use uvfs_queue::pair::{Direction, End, INLINE_SIZE};
use zerocopy::{FromBytes, IntoBytes};

use super::codec::{attr_of, joined, lock_in, parse, wire};
use super::session::{ANSWERS_RECALLS, NEVER_WAITS, Session, Waiting};
use super::{Attempts, LAST_LOOK, LISTING, RECONNECT, SEQ_BITS, Server};
use crate::backend::{
    Attr, Backend, DirEntry, Done, Entry, Figures, FileOps, Grant, Imported, Lease, Limits,
    LockKind, LockRequest, NewFile, NodeId, OnReattach, OnRecall, Op, PageIo, RangeLock, Request,
    SetAttr, SharedServer, StatFs,
};
use crate::cache::errno;
use uvfs_sys::lock;

impl Backend for Server {
    fn pages(&self) -> &dyn PageIo {
        self
    }

    fn files(&self) -> &dyn FileOps {
        self
    }

    fn shared(&self) -> Option<&dyn SharedServer> {
        Some(self)
    }
}

impl PageIo for Server {
    fn attach(&self, arena: &Arc<Arena>) -> io::Result<()> {
        let socket = lock(&self.inner.first).take();
        let socket = socket.ok_or_else(|| errno(libc::EBUSY))?;
        // The last pages, which the cache was not given.
        *lock(&self.inner.room) = arena.pages() - self.reserved_pages();
        let ready = self.inner.ready(socket, false);
        if self.inner.path.is_some() {
            *lock(&self.inner.spare) = Some(self.inner.ready(attach::socket()?, true));
        }
        let session = self.inner.attach(ready, arena, 0)?;
        self.inner.current.store(Some(session));
        let inner = self.inner.clone();
        let watcher = std::thread::Builder::new().name("uvfs-watcher".into());
        *lock(&self.watcher) = Some(watcher.spawn(move || inner.watch())?);
        Ok(())
    }

    fn descriptors(&self) -> Vec<RawFd> {
        // Without waiting for a lock: also for the child of a fork.
        let current = self.inner.current.load();
        let mut descriptors = Vec::new();
        if let Some(session) = current.as_ref() {
            descriptors.extend(&session.descriptors.open);
            descriptors.push(session.arena.as_fd().as_raw_fd());
        }
        if let Ok(spare) = self.inner.spare.try_lock() {
            descriptors.extend(spare.iter().flat_map(|ready| &ready.descriptors.open));
        }
        descriptors
    }

    fn reserved_pages(&self) -> u32 {
        (LISTING / 4096) as u32
    }

    fn limits(&self) -> Limits {
        let max = self.current().map_or(4096, |s| s.max_payload);
        Limits {
            max_read: max,
            max_write: max,
        }
    }

    fn submit(&self, batch: &mut Vec<Request>) {
        let session = match self.current() {
            Ok(session) => session,
            Err(e) => {
                let code = e.raw_os_error().unwrap_or(libc::EIO);
                return batch.drain(..).for_each(|r| (r.done)(Err(errno(code))));
            }
        };
        for r in batch.drain(..) {
            let at = self.at(&session, r.node, r.handle);
            let reserved = at.and_then(|at| Ok((at, session.reserve()?)));
            let ((node, fh), id) = match reserved {
                Ok(reserved) => reserved,
                Err(e) => {
                    (r.done)(Err(e));
                    continue;
                }
            };
            let waiting = Waiting::Data(r.op, r.len, r.done);
            match r.op {
                Op::Read => {
                    let op = abi::ReadIn {
                        fh,
                        offset: r.offset,
                        size: r.len as u32,
                        read_flags: if r.dontcache {
                            abi::ReadFlags::DONTCACHE.bits()
                        } else {
                            0
                        },
                        ..Default::default()
                    };
                    let from = Direction::FromServer;
                    let op = op.as_bytes();
                    session.send(
                        id,
                        Opcode::Read as u32,
                        node,
                        op,
                        &[],
                        &r.segs,
                        from,
                        waiting,
                    );
                }
                Op::Write => {
                    let mut flags = abi::WriteFlags::empty();
                    flags.set(abi::WriteFlags::CACHE, r.writeback);
                    flags.set(abi::WriteFlags::DONTCACHE, r.dontcache);
                    let op = abi::WriteIn {
                        fh,
                        offset: r.offset,
                        size: r.len as u32,
                        write_flags: flags.bits(),
                        ..Default::default()
                    };
                    let (to, op) = (Direction::ToServer, op.as_bytes());
                    session.send(
                        id,
                        Opcode::Write as u32,
                        node,
                        op,
                        &[],
                        &r.segs,
                        to,
                        waiting,
                    );
                }
            }
        }
        session.queue.ring();
    }

    fn carry_out(&self, batch: &mut Vec<Request>) {
        self.submit(batch);
    }

    fn poll(&self, done: &mut dyn FnMut() -> bool) {
        if let Ok(session) = self.current() {
            session.poll(done);
        }
    }

    fn help(&self, _: &mut dyn FnMut() -> bool) {}
}

impl SharedServer for Server {
    fn lease(&self, node: NodeId, lease: Lease) -> io::Result<Grant> {
        let op = ext::LeaseIn {
            mode: wire(lease),
            padding: 0,
        };
        let session = self.living()?;
        let node = self.node(&session, node)?;
        let reply = session.call(ext::LEASE, node, op.as_bytes(), &[], &[])?;
        let out: ext::LeaseOut = parse(&reply)?;
        Ok(if out.granted == ext::LEASE_NONE {
            let retry = Duration::from_millis(out.retry_ms.into());
            match out.seq {
                0 => Grant::Refused(retry),
                _ => Grant::Taken(retry),
            }
        } else {
            Grant::Granted {
                session: session.generation,
                seq: session.generation << SEQ_BITS | out.seq,
                attr: attr_of(&out.attr),
            }
        })
    }

    fn return_lease(&self, node: NodeId, seq: u64, keep: Lease) {
        // One of a server that is gone went with it.
        if let Ok(session) = self.current()
            && session.generation == seq >> SEQ_BITS
            && let Ok(node) = self.node(&session, node)
        {
            let op = ext::LeaseReturnIn {
                seq: seq & ((1 << SEQ_BITS) - 1),
                keep: wire(keep),
                padding: 0,
            };
            session.tell(ext::LEASE_RETURN, node, op.as_bytes());
        }
    }

    fn on_recall(&self, call: OnRecall) {
        let Some(recalls) = lock(&self.inner.recalled).take() else {
            return;
        };
        let known = self.inner.known.clone();
        let answer = move || {
            ANSWERS_RECALLS.set(true);
            NEVER_WAITS.set(true);
            while let Ok((generation, mut recall)) = recalls.recv() {
                let node = lock(&known).ours(generation, recall.node);
                if let Some(node) = node {
                    recall.node = node;
                    recall.seq |= generation << SEQ_BITS;
                    call(recall);
                }
            }
        };
        let thread = std::thread::Builder::new().name("uvfs-recalls".into());
        if let Err(error) = thread.spawn(answer) {
            tracing::error!(%error, "recalls will not be answered");
        }
    }

    fn publish_from(&self, figures: Figures) {
        let _ = self.inner.figures.set(figures);
    }

    fn is_alive(&self) -> bool {
        (self.inner.current.load().as_ref()).is_some_and(|session| session.is_alive())
    }

    fn session(&self) -> Option<u64> {
        let current = self.inner.current.load();
        let session = current.as_ref().filter(|session| session.is_alive())?;
        Some(session.generation)
    }

    fn still_open(&self, node: NodeId, handle: u64) -> io::Result<()> {
        let session = self.current()?;
        self.at(&session, node, handle).map(drop)
    }

    fn names(&self, node: NodeId, handle: u64) -> (u64, u64, u64) {
        let Ok(session) = self.current() else {
            return (0, node, handle);
        };
        if session.generation == 0 {
            return (0, node, handle);
        }
        let known = self.known();
        let generation = session.generation;
        (
            generation,
            known.node(generation, node).unwrap_or(u64::MAX),
            known.handle(generation, node, handle).unwrap_or(u64::MAX),
        )
    }

    fn reconnect(&self) -> io::Result<()> {
        let inner = &*self.inner;
        let gone = Err(errno(libc::ENOTCONN));
        if self.is_alive() {
            return Ok(());
        }
        if NEVER_WAITS.get() || inner.path.is_none() {
            return gone;
        }
        let mut attempts = lock(&inner.attempts);
        if self.is_alive() {
            return Ok(());
        }
        let bound = *inner.patience.get().unwrap_or(&RECONNECT);
        let lost = *attempts.lost.get_or_insert_with(Instant::now);
        let left = bound.saturating_sub(lost.elapsed());
        // One that began before may have looked too early.
        let wait_for = attempts.begun + 1;
        attempts.wanted = true;
        inner.attempted.notify_all();
        let waits = |a: &mut Attempts| {
            !a.over && a.lost.is_some() && (lost.elapsed() < bound || a.ended < wait_for)
        };
        let waited =
            inner
                .attempted
                .wait_timeout_while(attempts, left.max(LAST_LOOK.min(bound)), waits);
        let (attempts, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match attempts.other {
            _ if self.is_alive() => Ok(()),
            true => Err(errno(libc::ESTALE)),
            false => gone,
        }
    }

    fn has_written(&self) -> bool {
        let Ok(session) = self.current() else {
            return false;
        };
        let bound = *self.inner.patience.get().unwrap_or(&RECONNECT);
        let began = Instant::now();
        loop {
            // Looked at first: once the watcher has ended the session nothing changes any more.
            let last = session.stop.load(Ordering::Acquire) || NEVER_WAITS.get();
            match session.queue.server_end() {
                End::Closed if !last && began.elapsed() < bound => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                end => return end == End::Written,
            }
        }
    }

    fn on_reattach(&self, call: OnReattach) {
        *lock(&self.inner.on_reattach) = Some(Arc::new(call));
    }

    fn import(&self, secret: &[u8; 32]) -> io::Result<Imported> {
        let op = ImportIn { token: *secret };
        let session = self.living()?;
        let reply = session.call(IMPORT, 0, op.as_bytes(), &[], &[])?;
        let out: ImportOut = parse(&reply)?;
        let identity = &reply[size_of::<ImportOut>()..];
        let flags = out.flags as i32;
        let mut known = self.known();
        let node = known.looked_up(session.generation, out.nodeid, None)?;
        let handle = known.opened(session.generation, node, out.fh, flags, identity, true)?;
        Ok(Imported {
            entry: Entry {
                node,
                attr: attr_of(&out.attr),
            },
            handle,
            flags,
        })
    }
}

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
            // Whatever comes, it is not to be taken again; without a server it is gone as it is.
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
        Ok(list
            .split(|&b| b == 0)
            .filter(|name| !name.is_empty())
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
