//! Shows a directory at another place, and goes on when its process is killed: `cargo run -p uvfs-fuser --example mirror --
//! DIRECTORY [OPTIONS] MOUNTPOINT`.
//!
//! Each node and each open file is a descriptor. Those stay open when the process is killed, so the next one needs no
//! more than their numbers.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use rustix::fs::{Mode, OFlags};
use uvfs_fuser::survive::{Again, Handle, Node, Orphans, Survive};
use uvfs_fuser::*;

const TTL: Duration = Duration::from_secs(1);
const NEW: Generation = Generation(0);

struct Known {
    /// A descriptor with O_PATH. While it is open, no other file gets the inode's number.
    file: File,
    lookups: u64,
}

#[derive(Default)]
struct State {
    /// By the inode's number; the directory itself is not among them.
    nodes: HashMap<u64, Known>,
    open: HashMap<u64, Arc<File>>,
    opened: u64,
}

impl State {
    /// Gives an open file a number that no process has given: the kernel may release once more what one that was killed
    /// had closed.
    fn add(&mut self, file: File) -> FileHandle {
        self.opened += 1;
        let number = u64::from(std::process::id()) << 32 | self.opened;
        self.open.insert(number, Arc::new(file));
        FileHandle(number)
    }
}

struct Mirror {
    /// Open before the mount is made, so that each process has it.
    root: File,
    state: Mutex<State>,
}

fn code(error: io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}

fn attributes(ino: INodeNo, from: &Metadata) -> FileAttr {
    let kind = from.file_type();
    let kind = match () {
        () if kind.is_dir() => FileType::Directory,
        () if kind.is_symlink() => FileType::Symlink,
        () if kind.is_fifo() => FileType::NamedPipe,
        () => FileType::RegularFile,
    };
    let time = |time: io::Result<SystemTime>| time.unwrap_or(SystemTime::UNIX_EPOCH);
    FileAttr {
        ino,
        size: from.size(),
        blocks: from.blocks(),
        atime: time(from.accessed()),
        mtime: time(from.modified()),
        ctime: changed(from),
        crtime: time(from.created()),
        kind,
        perm: from.mode() as u16 & 0o7777,
        nlink: from.nlink() as u32,
        uid: from.uid(),
        gid: from.gid(),
        rdev: from.rdev() as u32,
        blksize: 4096,
        flags: 0,
    }
}

fn changed(from: &Metadata) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::new(from.ctime() as u64, from.ctime_nsec() as u32)
}

/// Whether an earlier process has made this file for the request that it had begun.
fn made_before(again: Option<Again>, path: &PathBuf) -> bool {
    let found = again.zip(fs::symlink_metadata(path).ok());
    found.is_some_and(|(again, found)| found.created().unwrap_or(changed(&found)) >= again.began)
}

/// Takes for success what shows that an earlier process has done it.
fn unless_done(again: Option<Again>, done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound && again.is_some() => Ok(()),
        done => done,
    }
}

impl Mirror {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// A path that leads to a node, whatever its names are by now.
    fn path(&self, ino: INodeNo) -> io::Result<PathBuf> {
        let number = match ino == INodeNo::ROOT {
            true => self.root.as_raw_fd(),
            false => {
                let state = self.state();
                let known = state.nodes.get(&ino.0);
                let stale = || io::Error::from_raw_os_error(libc::ESTALE);
                known.ok_or_else(stale)?.file.as_raw_fd()
            }
        };
        Ok(format!("/proc/self/fd/{number}").into())
    }

    fn named(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        Ok(self.path(parent)?.join(name))
    }

    fn find(&self, parent: INodeNo, name: &OsStr) -> io::Result<FileAttr> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = self.named(parent, name)?;
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        let found = file.metadata()?;
        let new = Known { file, lookups: 0 };
        let mut state = self.state();
        state.nodes.entry(found.ino()).or_insert(new).lookups += 1;
        Ok(attributes(INodeNo(found.ino()), &found))
    }

    fn opened(&self, path: PathBuf, flags: i32, mode: u32) -> io::Result<FileHandle> {
        // The kernel says where a write to the end goes.
        let flags = OFlags::from_bits_retain(flags as u32) - OFlags::APPEND - OFlags::DIRECT;
        let mode = Mode::from_raw_mode(mode);
        let file = File::from(rustix::fs::open(path, flags | OFlags::CLOEXEC, mode)?);
        Ok(self.state().add(file))
    }

    fn file(&self, fh: FileHandle) -> io::Result<Arc<File>> {
        let file = self.state().open.get(&fh.0).cloned();
        file.ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    fn list(&self, ino: INodeNo, offset: u64, reply: &mut ReplyDirectory) -> io::Result<()> {
        let entries = fs::read_dir(self.path(ino)?)?;
        for (next, entry) in (1..).zip(entries).skip(offset as usize) {
            let (entry, next) = (entry?, next as u64);
            let kind = match entry.file_type()?.is_dir() {
                true => FileType::Directory,
                false => FileType::RegularFile,
            };
            let ino = fs::symlink_metadata(entry.path()).map_or(0, |found| found.ino());
            if reply.add(INodeNo(ino), next, kind, entry.file_name()) {
                break;
            }
        }
        Ok(())
    }
}

fn entry(reply: ReplyEntry, found: io::Result<FileAttr>) {
    match found {
        Ok(attr) => reply.entry(&TTL, &attr, NEW),
        Err(error) => reply.error(code(error)),
    }
}

fn empty(reply: ReplyEmpty, done: io::Result<()>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(code(error)),
    }
}

impl Filesystem for Mirror {
    fn survive(&self) -> Option<&dyn Survive> {
        Some(self)
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        entry(reply, self.find(parent, name));
    }

    fn forget(&self, _: &Request, ino: INodeNo, lookups: u64) {
        let mut state = self.state();
        if let Some(known) = state.nodes.get_mut(&ino.0) {
            known.lookups = known.lookups.saturating_sub(lookups);
            if known.lookups == 0 {
                state.nodes.remove(&ino.0);
            }
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.path(ino).and_then(fs::metadata) {
            Ok(found) => reply.attr(&TTL, &attributes(ino, &found)),
            Err(error) => reply.error(code(error)),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
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
        let set = || {
            let path = self.path(ino)?;
            if let Some(size) = size {
                File::options().write(true).open(&path)?.set_len(size)?;
            }
            if let Some(mode) = mode {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode & 0o7777))?;
            }
            fs::metadata(path)
        };
        match set() {
            Ok(found) => reply.attr(&TTL, &attributes(ino, &found)),
            Err(error) => reply.error(code(error)),
        }
    }

    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let make = || {
            let path = self.named(parent, name)?;
            if !made_before(req.again(), &path) {
                fs::DirBuilder::new().mode(mode & !umask).create(path)?;
            }
            self.find(parent, name)
        };
        entry(reply, make());
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.named(parent, name).and_then(fs::remove_file);
        empty(reply, unless_done(req.again(), removed));
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.named(parent, name).and_then(fs::remove_dir);
        empty(reply, unless_done(req.again(), removed));
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if !flags.is_empty() {
            return reply.error(Errno::EINVAL);
        }
        let rename = || {
            let (old, new) = (self.named(parent, name)?, self.named(new_parent, new_name)?);
            let number = |path: &PathBuf| fs::symlink_metadata(path).map(|found| found.ino());
            let before = req.again().and_then(|again| again.note);
            if before.is_some() && number(&new).ok() == before {
                return Ok(());
            }
            req.note(number(&old)?);
            fs::rename(old, new)
        };
        empty(reply, rename());
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        // O_NOFOLLOW would be about the path in /proc.
        let flags = flags.0 & !libc::O_NOFOLLOW;
        match self.path(ino).and_then(|path| self.opened(path, flags, 0)) {
            Ok(fh) => reply.opened(fh, FopenFlags::empty()),
            Err(error) => reply.error(code(error)),
        }
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let make = || {
            let path = self.named(parent, name)?;
            let mut flags = flags | libc::O_CREAT;
            if made_before(req.again(), &path) {
                flags &= !libc::O_EXCL;
            }
            let fh = self.opened(path, flags, mode & !umask & 0o7777)?;
            Ok((self.find(parent, name)?, fh))
        };
        match make() {
            Ok((attr, fh)) => reply.created(&TTL, &attr, NEW, fh, FopenFlags::empty()),
            Err(error) => reply.error(code(error)),
        }
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.state().open.remove(&fh.0);
        reply.ok();
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut data = vec![0; size as usize];
        let read = (self.file(fh)).and_then(|file| file.read_at(&mut data, offset));
        match read {
            Ok(read) => reply.data(&data[..read]),
            Err(error) => reply.error(code(error)),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self
            .file(fh)
            .and_then(|file| file.write_all_at(data, offset));
        match written {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(code(error)),
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
        match self.list(ino, offset, &mut reply) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(code(error)),
        }
    }
}

fn number(saved: &[u8]) -> io::Result<i32> {
    let bytes = saved.try_into().map_err(io::Error::other)?;
    Ok(i32::from_ne_bytes(bytes))
}

impl Survive for Mirror {
    fn save_node(&self, node: Node, to: &mut Vec<u8>) -> io::Result<()> {
        if let Some(known) = self.state().nodes.get(&node.0) {
            to.extend(known.file.as_raw_fd().to_ne_bytes());
        }
        Ok(())
    }

    fn save_handle(&self, directory: bool, fh: Handle, to: &mut Vec<u8>) -> io::Result<()> {
        // The handle of a directory tells nothing.
        if !directory {
            let file = self.file(FileHandle(fh.0))?;
            to.extend(file.as_raw_fd().to_ne_bytes());
        }
        Ok(())
    }

    fn restore_node(
        &self,
        node: Node,
        lookups: u64,
        saved: &[u8],
        orphans: &Orphans,
    ) -> io::Result<()> {
        let file = File::from(orphans.claim(number(saved)?)?);
        if file.metadata()?.ino() != node.0 {
            return Err(io::Error::from_raw_os_error(libc::ESTALE));
        }
        self.state().nodes.insert(node.0, Known { file, lookups });
        Ok(())
    }

    fn restore_handle(
        &self,
        _: bool,
        _: Node,
        fh: Handle,
        saved: &[u8],
        orphans: &Orphans,
    ) -> io::Result<()> {
        let file = File::from(orphans.claim(number(saved)?)?);
        self.state().open.insert(fh.0, Arc::new(file));
        Ok(())
    }

    fn drop_handle(&self, directory: bool, fh: Handle) {
        if !directory {
            self.state().open.remove(&fh.0);
        }
    }
}

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (directory, options, at) = match args.as_slice() {
        [directory, at] => (directory, "", at),
        [directory, options, at] => (directory, options.as_str(), at),
        _ => panic!("usage: mirror DIRECTORY [OPTIONS] MOUNTPOINT"),
    };
    let mirror = Mirror {
        root: File::open(directory)?,
        state: Mutex::default(),
    };
    let mut config = Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(4);
    config.mount_options = vec![
        MountOption::FSName("mirror".into()),
        MountOption::DefaultPermissions,
        MountOption::CUSTOM(format!("survive,{options}")),
    ];
    let session = spawn_mount(mirror, at, &config)?;
    // Each process comes here.
    println!("process {} serves", std::process::id());
    session.join()
}
