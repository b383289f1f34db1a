//! The file system, written against the interface that fuser and uvfs-fuser share.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use super::serving::{
    self, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

const TTL: Duration = Duration::from_secs(1);
const NEW: Generation = Generation(0);

struct Node {
    attr: FileAttr,
    data: Vec<u8>,
    names: BTreeMap<OsString, INodeNo>,
}

#[derive(Default)]
struct Nodes {
    all: HashMap<INodeNo, Node>,
    last: u64,
}

impl Nodes {
    fn make(&mut self, req: &Request, kind: FileType, perm: u16) -> FileAttr {
        self.last += 1;
        let (ino, now) = (INodeNo(self.last), SystemTime::now());
        let attr = FileAttr {
            ino,
            size: 0,
            blocks: 0,
            atime: now,
            mtime: now,
            ctime: now,
            crtime: now,
            kind,
            perm,
            nlink: 1,
            uid: req.uid(),
            gid: req.gid(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        let (data, names) = Default::default();
        self.all.insert(ino, Node { attr, data, names });
        attr
    }

    fn get(&mut self, ino: INodeNo) -> Result<&mut Node, Errno> {
        self.all.get_mut(&ino).ok_or(Errno::ESTALE)
    }

    fn find(&mut self, parent: INodeNo, name: &OsStr) -> Result<INodeNo, Errno> {
        let found = self.get(parent)?.names.get(name);
        found.copied().ok_or(Errno::ENOENT)
    }

    fn add(
        &mut self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        kind: FileType,
        mode: u32,
    ) -> Result<FileAttr, Errno> {
        if self.get(parent)?.names.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        let attr = self.make(req, kind, mode as u16 & 0o7777);
        self.get(parent)?.names.insert(name.to_owned(), attr.ino);
        Ok(attr)
    }

    fn remove(&mut self, parent: INodeNo, name: &OsStr) -> Result<(), Errno> {
        let ino = self.find(parent, name)?;
        if !self.get(ino)?.names.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.get(parent)?.names.remove(name);
        // Handles that are still open get ESTALE; good enough for an example.
        self.all.remove(&ino);
        Ok(())
    }
}

struct Memory(Mutex<Nodes>);

impl Memory {
    fn with<T>(&self, work: impl FnOnce(&mut Nodes) -> T) -> T {
        work(&mut self.0.lock().unwrap())
    }
}

impl Filesystem for Memory {
    fn init(&mut self, req: &Request, _: &mut serving::KernelConfig) -> std::io::Result<()> {
        self.with(|nodes| nodes.make(req, FileType::Directory, 0o755));
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.with(|nodes| {
            let ino = nodes.find(parent, name)?;
            Ok(nodes.get(ino)?.attr)
        });
        match found {
            Ok(attr) => reply.entry(&TTL, &attr, NEW),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.with(|nodes| nodes.get(ino).map(|node| node.attr)) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = self.with(|nodes| {
            let node = nodes.get(ino)?;
            let attr = &mut node.attr;
            attr.perm = mode.map_or(attr.perm, |mode| mode as u16 & 0o7777);
            attr.uid = uid.unwrap_or(attr.uid);
            attr.gid = gid.unwrap_or(attr.gid);
            if let Some(size) = size {
                node.data.resize(size as usize, 0);
                attr.size = size;
            }
            Ok(*attr)
        });
        match set {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(error) => reply.error(error),
        }
    }

    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        match self.with(|nodes| nodes.add(req, parent, name, FileType::Directory, mode)) {
            Ok(attr) => reply.entry(&TTL, &attr, NEW),
            Err(error) => reply.error(error),
        }
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        match self.with(|nodes| nodes.add(req, parent, name, FileType::RegularFile, mode)) {
            Ok(attr) => reply.created(&TTL, &attr, NEW, FileHandle(0), FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        match self.with(|nodes| nodes.remove(parent, name)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.unlink(req, parent, name, reply);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut nodes = self.0.lock().unwrap();
        match nodes.get(ino) {
            Ok(node) => {
                let rest = node.data.get(offset as usize..).unwrap_or_default();
                reply.data(&rest[..rest.len().min(size as usize)]);
            }
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self.with(|nodes| {
            let node = nodes.get(ino)?;
            let (from, to) = (offset as usize, offset as usize + data.len());
            if node.data.len() < to {
                node.data.resize(to, 0);
            }
            node.data[from..to].copy_from_slice(data);
            node.attr.size = node.data.len() as u64;
            node.attr.blocks = node.attr.size.div_ceil(512);
            node.attr.mtime = SystemTime::now();
            Ok(data.len() as u32)
        });
        match written {
            Ok(written) => reply.written(written),
            Err(error) => reply.error(error),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.with(|nodes| {
            let names = nodes.get(ino)?.names.clone();
            for (at, (name, ino)) in (1..).zip(&names).skip(offset as usize) {
                let kind = nodes.get(*ino)?.attr.kind;
                if reply.add(*ino, at, kind, name) {
                    break;
                }
            }
            Ok(())
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }
}

/// Serves a file system until it is unmounted.
pub fn serve(mountpoint: &Path, threads: Option<usize>) -> std::io::Result<()> {
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("memory".into())];
    config.n_threads = threads;
    serving::mount(Memory(Mutex::default()), mountpoint, &config)
}
