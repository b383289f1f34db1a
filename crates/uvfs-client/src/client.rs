//! A client: path operations, which are requests, and the cache that its files share.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::{BorrowedFd, RawFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::types::{Attr, DirEntry, Entry, NewFile, NodeId, ROOT, SetAttr, StatFs};
use rustix::fs::{OFlags, RenameFlags, XattrFlags};
use rustix::io::{self, Errno};
use uvfs_queue::arena::Arena;

use crate::cache::{Cache, Config, Handle, Inode};
use crate::connection::Connection;
use crate::connection::pages::PageIo;
use crate::error::{Doing, Result};
use crate::file::{File, OpenOptions, retried};
use crate::shared::Shared;
use crate::stats::Stats;
use crate::token::Token;

/// Symbolic links that one path may go through, as in the kernel.
const MAX_LINKS: usize = 40;

/// A client of one file system. Clones share the cache. Paths are relative to the file system's
/// root; a leading `/` means the same.
///
/// ```
/// # use uvfs_client::{Client, Config};
/// use rustix::fs::RenameFlags;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let fs = uvfs_passthrough::Passthrough::open(dir.path(), uvfs_passthrough::Options::default())?;
/// # let session = uvfs_server::Session::unmounted(fs, uvfs_server::SessionOptions::default())?;
/// # let limits = uvfs_server::ClientLimits::default();
/// # let (_serving, socket) = uvfs_server::in_process(&std::sync::Arc::new(session), limits)?;
/// # let client = Client::new(socket.into(), Config::default())?;
/// client.mkdir("a", 0o755)?;
/// client.create("a/b")?.close()?;
/// client.rename("a/b", "c", RenameFlags::empty())?;
/// assert_eq!(client.readdir("a")?.len(), 0);
/// assert_eq!(client.stat("c")?.size, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Client(pub(crate) Arc<Shared>);

fn components(path: &Path) -> Vec<OsString> {
    path.components()
        .filter_map(|c| match c {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => None,
        })
        .collect()
}

/// A node that a path led to. The lookup goes back when this is dropped.
struct Walked {
    cache: Arc<Cache>,
    node: NodeId,
    /// Nothing for the root, which is not looked up.
    attr: Option<Attr>,
    /// The inode gives the lookup back; the root has none.
    is_kept: bool,
}

impl Walked {
    fn root(cache: &Arc<Cache>) -> Self {
        Self {
            cache: cache.clone(),
            node: ROOT,
            attr: None,
            is_kept: true,
        }
    }

    fn new(cache: &Arc<Cache>, entry: Entry) -> Self {
        Self {
            cache: cache.clone(),
            node: entry.node,
            attr: Some(entry.attr),
            is_kept: false,
        }
    }

    /// Its type, as `S_IF*`.
    fn kind(&self) -> u32 {
        self.attr
            .map_or(libc::S_IFDIR, |attr| attr.mode & libc::S_IFMT)
    }
}

impl Drop for Walked {
    fn drop(&mut self) {
        if !self.is_kept {
            self.cache.server.forget(self.node, 1);
        }
    }
}

impl Client {
    /// A client of a server, with a cache of its own.
    ///
    /// # Errors
    /// The errors of making the arena, and of attaching to the server.
    pub fn new(connection: Connection, config: Config) -> Result<Self> {
        Self::layered(connection, config, 0, |_, connection| connection)
    }

    /// As [`Client::new`], with a layer between the page cache and the connection: it sees each read and write of
    /// pages, and may change, delay or answer it. For measurements and tests.
    ///
    /// `layer` gets the arena, and the connection to pass requests on to. Behind the cache's pages the arena has
    /// `layer_pages` for the layer, and then [`Connection::RESERVED_PAGES`].
    ///
    /// # Errors
    /// As [`Client::new`].
    pub fn layered(
        connection: Connection,
        config: Config,
        layer_pages: u32,
        layer: impl FnOnce(&Arc<Arena>, Arc<Connection>) -> Arc<dyn PageIo>,
    ) -> Result<Self> {
        let cache = Cache::new(connection, config, layer_pages, layer)?;
        let weak = Arc::downgrade(&cache);
        cache.server.tell(weak);
        let weak = Arc::downgrade(&cache);
        let flusher = std::thread::Builder::new()
            .name("uvfs-flusher".into())
            .spawn(move || Cache::flusher(&weak))?;
        Ok(Self(Arc::new(Shared {
            cache,
            flusher: Some(flusher),
        })))
    }

    fn server(&self) -> &Connection {
        &self.0.cache.server
    }

    pub(crate) fn cache(&self) -> &Arc<Cache> {
        &self.0.cache
    }

    /// Makes a call that does no harm when it is made twice: again when the server went and came back.
    fn retried<T>(&self, call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        retried(self.server(), call)
    }

    fn walk(&self, path: &Path, follow: bool) -> io::Result<Walked> {
        self.retried(|| self.walk_once(path, follow))
    }

    /// Finds what a path leads to.
    fn walk_once(&self, path: &Path, follow: bool) -> io::Result<Walked> {
        let mut todo: VecDeque<OsString> = components(path).into();
        let mut stack = vec![Walked::root(self.cache())];
        let mut links = 0;
        while let Some(name) = todo.pop_front() {
            if name == ".." {
                if stack.len() > 1 {
                    stack.pop();
                }
                continue;
            }
            let top = stack.last().expect("the root stays");
            // A path through what is no directory, not one that isn't there.
            if top.kind() != libc::S_IFDIR {
                return Err(Errno::NOTDIR);
            }
            let entry = self.server().lookup(top.node, &name)?;
            let found = Walked::new(self.cache(), entry);
            if found.kind() != libc::S_IFLNK || (todo.is_empty() && !follow) {
                stack.push(found);
                continue;
            }
            links += 1;
            if links > MAX_LINKS {
                return Err(Errno::LOOP);
            }
            let target = PathBuf::from(self.server().readlink(found.node)?);
            if target.is_absolute() {
                stack.truncate(1);
            }
            for part in components(&target).into_iter().rev() {
                todo.push_front(part);
            }
        }
        Ok(stack.pop().expect("the root stays"))
    }

    fn parent<'p>(&self, path: &'p Path) -> io::Result<(Walked, &'p OsStr)> {
        let name = path.file_name().ok_or(Errno::INVAL)?;
        let parent = self.walk(path.parent().unwrap_or(Path::new("")), true)?;
        if parent.kind() != libc::S_IFDIR {
            return Err(Errno::NOTDIR);
        }
        Ok((parent, name))
    }

    /// The attributes of what was found.
    fn attr(&self, found: &Walked) -> io::Result<Attr> {
        match found.attr {
            Some(attr) => Ok(self.overlay(found.node, attr)),
            None => self.server().getattr(found.node),
        }
    }

    /// The attributes, with those that the cache knows better than the server.
    fn overlay(&self, node: NodeId, mut attr: Attr) -> Attr {
        if let Some(inode) = self.0.cache.find(node) {
            match inode.known_size() {
                Some(size) => attr.size = size,
                // A recall may have been answered since the lookup.
                None => return inode.current_attr().unwrap_or(attr),
            }
        }
        attr
    }

    /// Makes a call on the name that a path ends with, and on its directory.
    fn in_directory<T>(
        &self,
        doing: &'static str,
        path: impl AsRef<Path>,
        call: impl FnOnce(NodeId, &OsStr) -> io::Result<T>,
    ) -> Result<T> {
        let path = path.as_ref();
        let found = self.parent(path);
        let called = found.and_then(|(parent, name)| call(parent.node, name));
        called.doing(doing, path)
    }

    /// As [`Client::in_directory`], where the call makes the name.
    fn make(
        &self,
        path: impl AsRef<Path>,
        call: impl FnOnce(NodeId, &OsStr) -> io::Result<Entry>,
    ) -> Result<()> {
        let entry = self.in_directory("making", path, call)?;
        drop(Walked::new(self.cache(), entry));
        Ok(())
    }

    /// Makes a call on what a path leads to. It does no harm when it is made twice.
    fn on<T>(
        &self,
        doing: &'static str,
        path: impl AsRef<Path>,
        follow: bool,
        mut call: impl FnMut(&Walked) -> io::Result<T>,
    ) -> Result<T> {
        let path = path.as_ref();
        let called = self.retried(|| call(&self.walk_once(path, follow)?));
        called.doing(doing, path)
    }

    /// As [`Client::on`], made once.
    fn once_on<T>(
        &self,
        doing: &'static str,
        path: impl AsRef<Path>,
        call: impl FnOnce(&Walked) -> io::Result<T>,
    ) -> Result<T> {
        let path = path.as_ref();
        let called = self.walk(path, true).and_then(|found| call(&found));
        called.doing(doing, path)
    }

    /// Opens a file.
    ///
    /// # Errors
    /// `EINVAL` for options that make no sense together, `EISDIR` for a directory, and what the
    /// server answers.
    pub fn open(&self, path: impl AsRef<Path>, options: OpenOptions) -> Result<File> {
        let path = path.as_ref();
        let opened = match options.create_new {
            // Made, perhaps, by the first try.
            true => self.open_once(path, &options),
            false => self.retried(|| self.open_once(path, &options)),
        };
        opened.doing("opening", path)
    }

    fn open_once(&self, path: &Path, options: &OpenOptions) -> io::Result<File> {
        let write = options.write || options.append;
        let flags = match (options.read, write) {
            (true, false) => OFlags::RDONLY,
            (false, true) => OFlags::WRONLY,
            (true, true) => OFlags::RDWR,
            (false, false) => return Err(Errno::INVAL),
        };
        if !write && (options.truncate || options.create || options.create_new) {
            return Err(Errno::INVAL);
        }
        let existing = match self.walk(path, true) {
            _ if options.create_new => None,
            Err(e) if options.create && e == Errno::NOENT => None,
            found => Some(found?),
        };
        let (found, fh) = match existing {
            Some(found) => {
                match found.kind() {
                    libc::S_IFREG => {}
                    libc::S_IFDIR => return Err(Errno::ISDIR),
                    _ => return Err(Errno::INVAL),
                }
                let fh = self.server().open(found.node, flags)?;
                (found, fh)
            }
            None => {
                let (parent, name) = self.parent(path)?;
                let mut new = NewFile {
                    mode: options.mode,
                    flags,
                };
                new.flags.set(OFlags::EXCL, options.create_new);
                let (entry, fh) = self.server().create(parent.node, name, new)?;
                (Walked::new(self.cache(), entry), fh)
            }
        };
        let (inode, handle) = self.hold(found, fh)?;
        let file = File::new(self.0.clone(), inode, handle, path, options);
        if options.truncate && file.size() > 0 {
            file.cut(0)?;
        }
        Ok(file)
    }

    /// The inode of a file that was opened, which takes over the lookup, and the open file.
    fn hold(&self, mut found: Walked, fh: u64) -> io::Result<(Arc<Inode>, Arc<Handle>)> {
        let (cache, node) = (self.cache(), found.node);
        let handle = Handle::new(cache, node, fh);
        // Its size may have changed between the lookup and the open.
        let inode = cache.inode(node, self.server().getattr(node)?.size);
        inode.lookups.fetch_add(1, Ordering::AcqRel);
        found.is_kept = true;
        Ok((inode, handle))
    }

    /// Takes over an open file of a mount of the same server: what `fd` may do, the result may.
    ///
    /// It is cached under leases, as files that were opened by their names are.
    ///
    /// # Errors
    /// The errors of [`Token::of`]; `EACCES` when this client is attached to another server.
    pub fn import(&self, fd: BorrowedFd<'_>) -> Result<File> {
        self.import_token(&Token::of(fd)?)
    }

    /// As [`Client::import`], with a token that was got before. It is used up, whatever comes.
    ///
    /// # Errors
    /// `EACCES` for a token that is wrong, used or too old, and what the server answers.
    pub fn import_token(&self, token: &Token) -> Result<File> {
        let name = Path::new("an open file");
        let import = || {
            let imported = self.server().import(token.secret())?;
            let found = Walked::new(self.cache(), imported.entry);
            let (inode, handle) = self.hold(found, imported.handle)?;
            let flags = imported.flags;
            let access = flags & OFlags::ACCMODE;
            let mut options = OpenOptions::new()
                .read(access == OFlags::RDONLY || access == OFlags::RDWR)
                .write(access == OFlags::WRONLY || access == OFlags::RDWR)
                .append(flags.contains(OFlags::APPEND) && access != OFlags::RDONLY);
            options.synchronous = flags.contains(OFlags::DSYNC);
            Ok(File::new(self.0.clone(), inode, handle, name, &options))
        };
        io::Result::doing(import(), "importing", name)
    }

    /// Makes a file and opens it for reading and writing; fails with `EEXIST` if it is there.
    ///
    /// # Errors
    /// The server's error.
    pub fn create(&self, path: impl AsRef<Path>) -> Result<File> {
        let options = OpenOptions::new().read(true).write(true);
        self.open(path, options.create_new(true))
    }

    /// Finds a name without following it if it is a symbolic link: its inode and attributes.
    ///
    /// # Errors
    /// The server's error.
    pub fn lookup(&self, path: impl AsRef<Path>) -> Result<(NodeId, Attr)> {
        self.on("looking up", path, false, |found| {
            Ok((found.node, self.attr(found)?))
        })
    }

    /// Attributes, through symbolic links.
    ///
    /// # Errors
    /// The server's error.
    pub fn stat(&self, path: impl AsRef<Path>) -> Result<Attr> {
        self.on("looking up", path, true, |found| self.attr(found))
    }

    /// Attributes of the name itself.
    ///
    /// # Errors
    /// The server's error.
    pub fn lstat(&self, path: impl AsRef<Path>) -> Result<Attr> {
        self.lookup(path).map(|(_, attr)| attr)
    }

    /// Changes attributes; a size of an open file is better changed with [`File::set_len`].
    ///
    /// # Errors
    /// The server's error.
    pub fn setattr(&self, path: impl AsRef<Path>, set: &SetAttr) -> Result<Attr> {
        self.on("changing the attributes of", path, true, |found| {
            self.setattr_once(found.node, set)
        })
    }

    fn setattr_once(&self, node: NodeId, set: &SetAttr) -> io::Result<Attr> {
        let mut rest = SetAttr {
            handle: None,
            ..*set
        };
        if let (Some(size), Some(inode)) = (set.size, self.0.cache.find(node)) {
            let _writer = inode.exclusive();
            let tell = SetAttr {
                size: Some(size),
                ..SetAttr::default()
            };
            inode.set_len(size, || self.server().setattr(node, &tell).map(drop))?;
            rest.size = None;
        }
        if rest.mtime.is_some() || rest.atime.is_some() {
            // Or writeback would change the times again.
            if let Some(inode) = self.0.cache.find(node) {
                inode.write_and_wait(0, u64::MAX)?;
            }
        }
        let attr = self.server().setattr(node, &rest)?;
        Ok(self.overlay(node, attr))
    }

    /// Makes a file, fifo, socket or device, as mknod(2): `mode` with the type, `rdev` the number
    /// of a device.
    ///
    /// # Errors
    /// The server's error.
    pub fn mknod(&self, path: impl AsRef<Path>, mode: u32, rdev: u32) -> Result<()> {
        self.make(path, |parent, name| {
            self.server().mknod(parent, name, mode, rdev)
        })
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// The server's error.
    pub fn mkdir(&self, path: impl AsRef<Path>, mode: u32) -> Result<()> {
        self.make(path, |parent, name| self.server().mkdir(parent, name, mode))
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// The server's error.
    pub fn rmdir(&self, path: impl AsRef<Path>) -> Result<()> {
        self.in_directory("removing", path, |parent, name| {
            self.server().rmdir(parent, name)
        })
    }

    /// Removes a name that is no directory.
    ///
    /// # Errors
    /// The server's error.
    pub fn unlink(&self, path: impl AsRef<Path>) -> Result<()> {
        self.in_directory("removing", path, |parent, name| {
            self.server().unlink(parent, name)
        })
    }

    /// Renames, as renameat2(2) with its `flags`.
    ///
    /// # Errors
    /// The server's error.
    pub fn rename(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        flags: RenameFlags,
    ) -> Result<()> {
        self.in_directory("renaming", from, |old, old_name| {
            let (new, new_name) = self.parent(to.as_ref())?;
            self.server()
                .rename(old, old_name, new.node, new_name, flags)
        })
    }

    /// Makes another name of a file.
    ///
    /// # Errors
    /// The server's error.
    pub fn link(&self, original: impl AsRef<Path>, new: impl AsRef<Path>) -> Result<()> {
        let original = original.as_ref();
        let found = self.walk(original, false).doing("linking", original)?;
        self.make(new, |parent, name| {
            self.server().link(found.node, parent, name)
        })
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// The server's error.
    pub fn symlink(&self, target: impl AsRef<OsStr>, new: impl AsRef<Path>) -> Result<()> {
        self.make(new, |parent, name| {
            self.server().symlink(parent, name, target.as_ref())
        })
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// The server's error.
    pub fn readlink(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        self.on("reading the link", path, false, |found| {
            self.server().readlink(found.node).map(PathBuf::from)
        })
    }

    /// The names in a directory, without `.` and `..`.
    ///
    /// # Errors
    /// The server's error.
    pub fn readdir(&self, path: impl AsRef<Path>) -> Result<Vec<DirEntry>> {
        self.on("listing", path, true, |found| match found.kind() {
            libc::S_IFDIR => self.server().readdir(found.node),
            _ => Err(Errno::NOTDIR),
        })
    }

    /// The file system's numbers.
    ///
    /// # Errors
    /// The server's error.
    pub fn statfs(&self) -> Result<StatFs> {
        let found = self.retried(|| self.server().statfs(ROOT));
        found.doing("asking for the space of", Path::new("/"))
    }

    /// Sets an extended attribute, as setxattr(2) with its `flags`.
    ///
    /// # Errors
    /// The server's error.
    pub fn setxattr(
        &self,
        path: impl AsRef<Path>,
        name: impl AsRef<OsStr>,
        value: &[u8],
        flags: XattrFlags,
    ) -> Result<()> {
        self.once_on("setting an attribute of", path, |found| {
            self.server()
                .setxattr(found.node, name.as_ref(), value, flags)
        })
    }

    /// An extended attribute's value.
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the server answers.
    pub fn getxattr(&self, path: impl AsRef<Path>, name: impl AsRef<OsStr>) -> Result<Vec<u8>> {
        self.on("reading attributes of", path, true, |found| {
            self.server().getxattr(found.node, name.as_ref())
        })
    }

    /// The names of all extended attributes.
    ///
    /// # Errors
    /// The server's error.
    pub fn listxattr(&self, path: impl AsRef<Path>) -> Result<Vec<OsString>> {
        self.on("reading attributes of", path, true, |found| {
            self.server().listxattr(found.node)
        })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the server answers.
    pub fn removexattr(&self, path: impl AsRef<Path>, name: impl AsRef<OsStr>) -> Result<()> {
        self.once_on("setting an attribute of", path, |found| {
            self.server().removexattr(found.node, name.as_ref())
        })
    }

    /// The descriptors that this client has open, for a caller that must not close them by mistake, or has to close
    /// them in a child process.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut descriptors = self.server().descriptors();
        descriptors.extend(crate::cache::memory::descriptors());
        descriptors
    }

    /// Ends the thread that all clients of this process have in common, and closes its descriptors. It asks them for
    /// memory when the machine is short of it. The next client begins another one.
    pub fn end_common_thread() {
        crate::cache::memory::unwatch();
    }

    /// The cache's statistics.
    pub fn stats(&self) -> Stats {
        self.0.cache.stats()
    }

    /// Takes back up to `bytes` of clean pages and gives their memory to the system; answers how
    /// many bytes that were. Never waits for I/O, so the server of this very client may call it.
    pub fn shrink(&self, bytes: usize) -> usize {
        uvfs_mem::Shrinker::scan(&*self.0.cache, bytes)
    }

    /// Writes everything that is dirty and waits for it; says nothing about durability.
    ///
    /// # Errors
    /// The first failed writeback's. The pages stay dirty.
    pub fn flush(&self) -> Result<()> {
        let mut first = Ok(());
        self.0.cache.write_all(|_, error| {
            if first.is_ok() {
                first = Err(error.into());
            }
        });
        first
    }
}
