//! The in-process store: a host directory as a backend, without a server in between.

mod engine;
mod sys;

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Mode, OFlags, RenameFlags, SeekFrom, Timespec, Timestamps,
    XattrFlags,
};
use uvfs_client::backend::{
    Attr, Backend, DirEntry, Entry, FileOps, Limits, LockKind, LockRequest, NewFile, NodeId, Op,
    PageIo, ROOT, RangeLock, Request, SetAttr, SharedServer, StatFs,
};
use uvfs_queue::arena::Arena;
use uvfs_sys::lock;

use crate::errno;
use engine::Engine;
use sys::{attr_of, check, flags, ofd_lock, proc_path};

/// A host directory, served in this process. Reads and writes go from and to the arena's pages by
/// preadv(2) and pwritev(2), on worker threads or in the thread that submits them.
pub struct LocalStore {
    nodes: Mutex<Nodes>,
    handles: Mutex<HashMap<u64, Arc<OwnedFd>>>,
    engine: Arc<Engine>,
    workers: Vec<JoinHandle<()>>,
    limits: Limits,
}

struct LocalNode {
    /// Opened with `O_PATH`.
    fd: Arc<OwnedFd>,
    key: (u64, u64),
    lookups: u64,
}

struct Nodes {
    by_id: HashMap<NodeId, LocalNode>,
    by_key: HashMap<(u64, u64), NodeId>,
    next: NodeId,
    next_handle: u64,
}

impl std::fmt::Debug for LocalStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalStore").finish_non_exhaustive()
    }
}

impl LocalStore {
    /// Serves `directory` with one worker thread and requests of up to 1 MiB.
    ///
    /// # Errors
    /// The errors of opening the directory.
    pub fn open(directory: impl AsRef<Path>) -> io::Result<Self> {
        Self::with(directory, 1, 1 << 20)
    }

    /// As [`LocalStore::open`] with `workers` threads (0: requests run in the thread that submits
    /// them) and reads and writes of at most `max_request` bytes (a multiple of 4096).
    ///
    /// # Errors
    /// The errors of opening the directory.
    pub fn with(
        directory: impl AsRef<Path>,
        workers: usize,
        max_request: usize,
    ) -> io::Result<Self> {
        let fd = rustix::fs::open(
            directory.as_ref(),
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let stat = rustix::fs::fstat(&fd)?;
        let key = (stat.st_dev, stat.st_ino);
        let root = LocalNode {
            fd: Arc::new(fd),
            key,
            lookups: 1,
        };
        let engine = Arc::new(Engine::default());
        let workers = (0..workers)
            .map(|i| {
                let engine = engine.clone();
                std::thread::Builder::new()
                    .name(format!("uvfs-local-{i}"))
                    .spawn(move || engine.work())
            })
            .collect::<io::Result<_>>()?;
        Ok(Self {
            nodes: Mutex::new(Nodes {
                by_id: HashMap::from([(ROOT, root)]),
                by_key: HashMap::from([(key, ROOT)]),
                next: ROOT + 1,
                next_handle: 1,
            }),
            handles: Mutex::default(),
            engine,
            workers,
            limits: Limits {
                max_read: max_request,
                max_write: max_request,
            },
        })
    }

    fn fd(&self, node: NodeId) -> io::Result<Arc<OwnedFd>> {
        lock(&self.nodes)
            .by_id
            .get(&node)
            .map(|n| n.fd.clone())
            .ok_or_else(|| errno(libc::ESTALE))
    }

    fn handle(&self, handle: u64) -> io::Result<Arc<OwnedFd>> {
        lock(&self.handles)
            .get(&handle)
            .cloned()
            .ok_or_else(|| errno(libc::EBADF))
    }

    fn entry(&self, fd: OwnedFd) -> io::Result<Entry> {
        let attr = attr_of(&fd)?;
        let stat = rustix::fs::fstat(&fd)?;
        let key = (stat.st_dev, stat.st_ino);
        let mut nodes = lock(&self.nodes);
        let node = match nodes.by_key.get(&key).copied() {
            Some(node) => node,
            None => {
                let node = nodes.next;
                nodes.next += 1;
                nodes.by_key.insert(key, node);
                nodes.by_id.insert(
                    node,
                    LocalNode {
                        fd: Arc::new(fd),
                        key,
                        lookups: 0,
                    },
                );
                node
            }
        };
        nodes.by_id.get_mut(&node).expect("both maps agree").lookups += 1;
        Ok(Entry { node, attr })
    }

    fn new_handle(&self, fd: OwnedFd) -> u64 {
        let mut nodes = lock(&self.nodes);
        let handle = nodes.next_handle;
        nodes.next_handle += 1;
        drop(nodes);
        lock(&self.handles).insert(handle, Arc::new(fd));
        handle
    }
}

impl Drop for LocalStore {
    fn drop(&mut self) {
        lock(&self.engine.queue).stop = true;
        self.engine.more.notify_all();
        for worker in self.workers.drain(..) {
            // The last reference may go in a worker, which cannot wait for itself.
            if worker.thread().id() != std::thread::current().id() {
                let _ = worker.join();
            }
        }
    }
}

impl Backend for LocalStore {
    fn pages(&self) -> &dyn PageIo {
        self
    }

    fn files(&self) -> &dyn FileOps {
        self
    }

    fn shared(&self) -> Option<&dyn SharedServer> {
        None
    }
}

impl PageIo for LocalStore {
    fn attach(&self, arena: &Arc<Arena>) -> io::Result<()> {
        self.engine
            .arena
            .set(arena.clone())
            .map_err(|_| errno(libc::EBUSY))
    }

    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn reserved_pages(&self) -> u32 {
        0
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn submit(&self, batch: &mut Vec<Request>) {
        let mut ready = Vec::with_capacity(batch.len());
        for request in batch.drain(..) {
            match self.handle(request.handle) {
                Ok(fd) => ready.push((request, fd)),
                Err(e) => (request.done)(Err(e)),
            }
        }
        if self.workers.is_empty() {
            for (request, fd) in ready {
                let result = self.engine.transfer(&request, &fd);
                (request.done)(result);
            }
            return;
        }
        lock(&self.engine.queue).waiting.extend(ready);
        self.engine.more.notify_all();
    }

    fn carry_out(&self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            let fd = match self.handle(request.handle) {
                Ok(fd) => fd,
                Err(e) => {
                    (request.done)(Err(e));
                    continue;
                }
            };
            {
                let mut queue = lock(&self.engine.queue);
                if request.op == Op::Write && queue.writing.contains(&request.node) {
                    // The thread that writes to the file looks for more when it is done.
                    queue.waiting.push_back((request, fd));
                    continue;
                }
                if request.op == Op::Write {
                    queue.writing.push(request.node);
                }
            }
            self.engine.run((request, fd));
        }
    }

    fn poll(&self, done: &mut dyn FnMut() -> bool) {
        self.help(done);
    }

    fn help(&self, done: &mut dyn FnMut() -> bool) {
        while !done() {
            let Some(task) = lock(&self.engine.queue).take() else {
                return;
            };
            self.engine.run(task);
        }
    }
}

impl FileOps for LocalStore {
    fn lookup(&self, parent: NodeId, name: &OsStr) -> io::Result<Entry> {
        let dir = self.fd(parent)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.entry(rustix::fs::openat(dir, check(name)?, flags, Mode::empty())?)
    }

    fn forget(&self, node: NodeId, lookups: u64) {
        let mut nodes = lock(&self.nodes);
        let Some(found) = nodes.by_id.get_mut(&node) else {
            return;
        };
        found.lookups = found.lookups.saturating_sub(lookups);
        if found.lookups == 0 && node != ROOT {
            let key = found.key;
            nodes.by_id.remove(&node);
            nodes.by_key.remove(&key);
        }
    }

    fn getattr(&self, node: NodeId) -> io::Result<Attr> {
        attr_of(&*self.fd(node)?)
    }

    fn setattr(&self, node: NodeId, set: &SetAttr) -> io::Result<Attr> {
        let fd = self.fd(node)?;
        if let Some(mode) = set.mode {
            rustix::fs::chmod(proc_path(&fd), Mode::from_raw_mode(mode & 0o7777))?;
        }
        if set.uid.is_some() || set.gid.is_some() {
            rustix::fs::chownat(
                &fd,
                c"",
                set.uid.map(rustix::fs::Uid::from_raw),
                set.gid.map(rustix::fs::Gid::from_raw),
                AtFlags::EMPTY_PATH,
            )?;
        }
        if let Some(size) = set.size {
            match set.handle {
                Some(handle) => rustix::fs::ftruncate(self.handle(handle)?, size)?,
                None => {
                    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
                    let file = rustix::fs::open(proc_path(&fd), flags, Mode::empty())?;
                    rustix::fs::ftruncate(file, size)?;
                }
            }
        }
        if set.atime.is_some() || set.mtime.is_some() {
            let omit = Timespec {
                tv_sec: 0,
                tv_nsec: rustix::fs::UTIME_OMIT,
            };
            let time = |t: Option<(i64, u32)>| {
                t.map_or(omit, |(s, ns)| Timespec {
                    tv_sec: s,
                    tv_nsec: ns.into(),
                })
            };
            let times = Timestamps {
                last_access: time(set.atime),
                last_modification: time(set.mtime),
            };
            rustix::fs::utimensat(rustix::fs::CWD, proc_path(&fd), &times, AtFlags::empty())?;
        }
        attr_of(&fd)
    }

    fn readlink(&self, node: NodeId) -> io::Result<OsString> {
        let fd = self.fd(node)?;
        let target = match rustix::fs::readlinkat(&*fd, c"", Vec::new()) {
            // The empty name of anything but a link gives this.
            Err(rustix::io::Errno::NOENT) => return Err(errno(libc::EINVAL)),
            target => target?,
        };
        Ok(OsStr::from_bytes(target.as_bytes()).to_owned())
    }

    fn symlink(&self, parent: NodeId, name: &OsStr, target: &OsStr) -> io::Result<Entry> {
        rustix::fs::symlinkat(target, self.fd(parent)?, check(name)?)?;
        self.lookup(parent, name)
    }

    fn mknod(&self, parent: NodeId, name: &OsStr, mode: u32, rdev: u32) -> io::Result<Entry> {
        let kind = FileType::from_raw_mode(mode);
        let mode = Mode::from_raw_mode(mode & 0o7777);
        rustix::fs::mknodat(self.fd(parent)?, check(name)?, kind, mode, rdev.into())?;
        self.lookup(parent, name)
    }

    fn mkdir(&self, parent: NodeId, name: &OsStr, mode: u32) -> io::Result<Entry> {
        let mode = Mode::from_raw_mode(mode & 0o7777);
        rustix::fs::mkdirat(self.fd(parent)?, check(name)?, mode)?;
        self.lookup(parent, name)
    }

    fn unlink(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(
            self.fd(parent)?,
            check(name)?,
            AtFlags::empty(),
        )?)
    }

    fn rmdir(&self, parent: NodeId, name: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(
            self.fd(parent)?,
            check(name)?,
            AtFlags::REMOVEDIR,
        )?)
    }

    fn rename(&self, p: NodeId, n: &OsStr, np: NodeId, nn: &OsStr, flags: u32) -> io::Result<()> {
        Ok(rustix::fs::renameat_with(
            self.fd(p)?,
            check(n)?,
            self.fd(np)?,
            check(nn)?,
            RenameFlags::from_bits_retain(flags),
        )?)
    }

    fn link(&self, node: NodeId, new_parent: NodeId, new_name: &OsStr) -> io::Result<Entry> {
        let source = proc_path(&*self.fd(node)?);
        rustix::fs::linkat(
            rustix::fs::CWD,
            source,
            self.fd(new_parent)?,
            check(new_name)?,
            AtFlags::SYMLINK_FOLLOW,
        )?;
        self.lookup(new_parent, new_name)
    }

    fn open(&self, node: NodeId, open: i32) -> io::Result<u64> {
        let fd = self.fd(node)?;
        let open = (flags(open) - OFlags::NOFOLLOW - OFlags::APPEND) | OFlags::CLOEXEC;
        let file = rustix::fs::open(proc_path(&fd), open, Mode::empty())?;
        Ok(self.new_handle(file))
    }

    fn create(&self, p: NodeId, n: &OsStr, new: NewFile) -> io::Result<(Entry, u64)> {
        let dir = self.fd(p)?;
        let open = (flags(new.flags) - OFlags::APPEND)
            | OFlags::CREATE
            | OFlags::NOFOLLOW
            | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(new.mode & 0o7777);
        let file = rustix::fs::openat(&*dir, check(n)?, open, mode)?;
        let path = OFlags::PATH | OFlags::CLOEXEC;
        let entry = self.entry(rustix::fs::open(proc_path(&file), path, Mode::empty())?)?;
        Ok((entry, self.new_handle(file)))
    }

    fn release(&self, _node: NodeId, handle: u64) {
        lock(&self.handles).remove(&handle);
    }

    fn fsync(&self, _node: NodeId, handle: u64, data_only: bool) -> io::Result<()> {
        let fd = self.handle(handle)?;
        if data_only {
            rustix::fs::fdatasync(fd)?
        } else {
            rustix::fs::fsync(fd)?
        }
        Ok(())
    }

    fn lock(&self, _: NodeId, handle: u64, request: &LockRequest, wait: bool) -> io::Result<()> {
        use rustix::fs::FlockOperation as How;
        let fd = self.handle(handle)?;
        if request.flock {
            let how = match (request.kind, wait) {
                (Some(LockKind::Shared), true) => How::LockShared,
                (Some(LockKind::Shared), false) => How::NonBlockingLockShared,
                (Some(LockKind::Exclusive), true) => How::LockExclusive,
                (Some(LockKind::Exclusive), false) => How::NonBlockingLockExclusive,
                (None, _) => How::Unlock,
            };
            return Ok(rustix::io::retry_on_intr(|| rustix::fs::flock(&*fd, how))?);
        }
        let command = if wait {
            libc::F_OFD_SETLKW
        } else {
            libc::F_OFD_SETLK
        };
        ofd_lock(&fd, command, request).map(drop)
    }

    fn test_lock(&self, _: NodeId, h: u64, lock: &LockRequest) -> io::Result<Option<RangeLock>> {
        let found = ofd_lock(&*self.handle(h)?, libc::F_OFD_GETLK, lock)?;
        let kind = match i32::from(found.l_type) {
            libc::F_RDLCK => LockKind::Shared,
            libc::F_WRLCK => LockKind::Exclusive,
            _ => return Ok(None),
        };
        let start = found.l_start as u64;
        Ok(Some(RangeLock {
            kind,
            start,
            end: match found.l_len {
                0 => i64::MAX as u64,
                len => start + (len as u64 - 1),
            },
            pid: u32::try_from(found.l_pid).unwrap_or(0),
        }))
    }

    fn copy_range(
        &self,
        from: (NodeId, u64),
        mut from_offset: u64,
        to: (NodeId, u64),
        mut to_offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let (from, to) = (self.handle(from.1)?, self.handle(to.1)?);
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let (at, into) = (Some(&mut from_offset), Some(&mut to_offset));
        Ok(rustix::fs::copy_file_range(from, at, to, into, len)? as u64)
    }

    fn fallocate(&self, _: NodeId, h: u64, mode: i32, offset: u64, len: u64) -> io::Result<()> {
        let mode = FallocateFlags::from_bits_retain(mode as u32);
        Ok(rustix::fs::fallocate(self.handle(h)?, mode, offset, len)?)
    }

    fn lseek(&self, _node: NodeId, handle: u64, offset: u64, whence: i32) -> io::Result<u64> {
        let to = match whence {
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            _ => return Err(errno(libc::EINVAL)),
        };
        Ok(rustix::fs::seek(self.handle(handle)?, to)?)
    }

    fn readdir(&self, node: NodeId) -> io::Result<Vec<DirEntry>> {
        let fd = self.fd(node)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(proc_path(&fd), flags, Mode::empty())?;
        let mut entries = Vec::new();
        for entry in rustix::fs::Dir::read_from(dir.as_fd())? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                entries.push(DirEntry {
                    name: OsStr::from_bytes(name).to_owned(),
                    ino: entry.ino(),
                    kind: (entry.file_type().as_raw_mode() >> 12) as u8,
                });
            }
        }
        Ok(entries)
    }

    fn statfs(&self, node: NodeId) -> io::Result<StatFs> {
        let s = rustix::fs::fstatvfs(self.fd(node)?)?;
        Ok(StatFs {
            blocks: s.f_blocks,
            bfree: s.f_bfree,
            bavail: s.f_bavail,
            files: s.f_files,
            ffree: s.f_ffree,
            bsize: s.f_bsize as u32,
            frsize: s.f_frsize as u32,
            namelen: s.f_namemax as u32,
        })
    }

    fn setxattr(&self, node: NodeId, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        let flags = XattrFlags::from_bits_retain(flags as u32);
        Ok(rustix::fs::setxattr(
            proc_path(&*self.fd(node)?),
            name,
            value,
            flags,
        )?)
    }

    fn getxattr(&self, node: NodeId, name: &OsStr) -> io::Result<Vec<u8>> {
        let mut value = vec![0; 65536];
        let n = rustix::fs::getxattr(proc_path(&*self.fd(node)?), name, &mut value[..])?;
        value.truncate(n);
        Ok(value)
    }

    fn listxattr(&self, node: NodeId) -> io::Result<Vec<OsString>> {
        let mut list = vec![0u8; 65536];
        let n = rustix::fs::listxattr(proc_path(&*self.fd(node)?), &mut list[..])?;
        list.truncate(n);
        Ok(uvfs_sys::xattr_names(&list)
            .map(|name| OsStr::from_bytes(name).to_owned())
            .collect())
    }

    fn removexattr(&self, node: NodeId, name: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::removexattr(proc_path(&*self.fd(node)?), name)?)
    }
}
