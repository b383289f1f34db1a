//! A client: path operations, which are requests, and the cache that its files share.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::backend::{
    Attr, Backend, DirEntry, Entry, FileOps, NewFile, NodeId, ROOT, SetAttr, StatFs,
};
use crate::cache::{Cache, Config, Handle, Inode, errno};
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
///
/// # fn main() -> std::io::Result<()> {
/// # let dir = tempfile::tempdir()?;
/// # let client = Client::new(uvfs_local::LocalStore::open(dir.path())?, Config::default())?;
/// client.mkdir("a", 0o755)?;
/// client.create("a/b")?.close()?;
/// client.rename("a/b", "c", 0)?;
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
            self.cache.backend.files().forget(self.node, 1);
        }
    }
}

impl Client {
    /// A client of `backend` with a cache of its own.
    ///
    /// # Errors
    /// The errors of making the arena, and of the backend taking it.
    pub fn new(backend: impl Backend, config: Config) -> io::Result<Self> {
        let cache = Cache::new(Arc::new(backend), config)?;
        if let Some(server) = cache.backend.shared() {
            let weak = Arc::downgrade(&cache);
            server.on_recall(Box::new(move |recall| {
                if let Some(cache) = weak.upgrade() {
                    cache.recalled(recall);
                }
            }));
            let weak = Arc::downgrade(&cache);
            let figures = move || weak.upgrade().map(|cache| cache.stats());
            server.publish_from(Box::new(figures));
            let weak = Arc::downgrade(&cache);
            server.on_reattach(Box::new(move |found| {
                if let Some(cache) = weak.upgrade() {
                    cache.reattached(found);
                }
            }));
        }
        let weak = Arc::downgrade(&cache);
        let flusher = std::thread::Builder::new()
            .name("uvfs-flusher".into())
            .spawn(move || Cache::flusher(&weak))?;
        Ok(Self(Arc::new(Shared {
            cache,
            flusher: Some(flusher),
        })))
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.0.cache.backend
    }

    fn files(&self) -> &dyn FileOps {
        self.backend().files()
    }

    pub(crate) fn cache(&self) -> &Arc<Cache> {
        &self.0.cache
    }

    /// Makes a call that does no harm when it is made twice: again when the server went and came back.
    fn retried<T>(&self, call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        retried(self.backend(), call)
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
                return Err(errno(libc::ENOTDIR));
            }
            let entry = self.files().lookup(top.node, &name)?;
            let found = Walked::new(self.cache(), entry);
            if found.kind() != libc::S_IFLNK || (todo.is_empty() && !follow) {
                stack.push(found);
                continue;
            }
            links += 1;
            if links > MAX_LINKS {
                return Err(errno(libc::ELOOP));
            }
            let target = PathBuf::from(self.files().readlink(found.node)?);
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
        let name = path.file_name().ok_or_else(|| errno(libc::EINVAL))?;
        let parent = self.walk(path.parent().unwrap_or(Path::new("")), true)?;
        if parent.kind() != libc::S_IFDIR {
            return Err(errno(libc::ENOTDIR));
        }
        Ok((parent, name))
    }

    /// The attributes of what was found.
    fn attr(&self, found: &Walked) -> io::Result<Attr> {
        let node = found.node;
        match found.attr {
            Some(attr) => Ok(self.overlay(&Entry { node, attr })),
            None => self.files().getattr(node),
        }
    }

    /// The attributes, with those that the cache knows better than the server.
    fn overlay(&self, entry: &Entry) -> Attr {
        let mut attr = entry.attr;
        if let Some(inode) = self.0.cache.find(entry.node) {
            match inode.known_size() {
                Some(size) => attr.size = size,
                // A recall may have been answered since the lookup.
                None if self.backend().is_shared() => {
                    return inode.current_attr().unwrap_or(attr);
                }
                None => {}
            }
        }
        attr
    }

    /// Opens a file.
    ///
    /// # Errors
    /// `EINVAL` for options that make no sense together, `EISDIR` for a directory, and what the
    /// backend answers.
    pub fn open(&self, path: impl AsRef<Path>, options: OpenOptions) -> io::Result<File> {
        let path = path.as_ref();
        match options.create_new {
            // Made, perhaps, by the first try.
            true => self.open_once(path, &options),
            false => self.retried(|| self.open_once(path, &options)),
        }
    }

    fn open_once(&self, path: &Path, options: &OpenOptions) -> io::Result<File> {
        let write = options.write || options.append;
        let flags = match (options.read, write) {
            (true, false) => libc::O_RDONLY,
            (false, true) => libc::O_WRONLY,
            (true, true) => libc::O_RDWR,
            (false, false) => return Err(errno(libc::EINVAL)),
        };
        if !write && (options.truncate || options.create || options.create_new) {
            return Err(errno(libc::EINVAL));
        }
        let existing = match self.walk(path, true) {
            _ if options.create_new => None,
            Err(e) if options.create && e.raw_os_error() == Some(libc::ENOENT) => None,
            found => Some(found?),
        };
        let (found, fh) = match existing {
            Some(found) => {
                match found.kind() {
                    libc::S_IFREG => {}
                    libc::S_IFDIR => return Err(errno(libc::EISDIR)),
                    _ => return Err(errno(libc::EINVAL)),
                }
                let fh = self.files().open(found.node, flags)?;
                (found, fh)
            }
            None => {
                let (parent, name) = self.parent(path)?;
                let excl = if options.create_new { libc::O_EXCL } else { 0 };
                let new = NewFile {
                    mode: options.mode,
                    flags: flags | excl,
                };
                let (entry, fh) = self.files().create(parent.node, name, new)?;
                (Walked::new(self.cache(), entry), fh)
            }
        };
        let (inode, handle) = self.hold(found, fh)?;
        let file = File::new(self.0.clone(), inode, handle, options);
        if options.truncate && file.size() > 0 {
            file.set_len(0)?;
        }
        Ok(file)
    }

    /// The inode of a file that was opened, which takes over the lookup, and the open file.
    fn hold(&self, mut found: Walked, fh: u64) -> io::Result<(Arc<Inode>, Arc<Handle>)> {
        let (cache, node) = (self.cache(), found.node);
        let handle = Handle::new(cache, node, fh);
        // Its size may have changed between the lookup and the open.
        let token = cache.find(node).and_then(|inode| inode.quiet());
        let attr = self.files().getattr(node)?;
        let inode = cache.inode(node, attr.mtime, attr.size);
        inode.lookups.fetch_add(1, Ordering::AcqRel);
        found.is_kept = true;
        inode.revalidate(token, attr.mtime, attr.size);
        Ok((inode, handle))
    }

    /// Takes over an open file of a mount of the same server: what `fd` may do, the result may.
    ///
    /// It is cached under leases, as files that were opened by their names are.
    ///
    /// # Errors
    /// The errors of [`Token::of`]; `EACCES` when this client is attached to another server.
    pub fn import(&self, fd: BorrowedFd<'_>) -> io::Result<File> {
        self.import_token(&Token::of(fd)?)
    }

    /// As [`Client::import`], with a token that was got before. It is used up, whatever comes.
    ///
    /// # Errors
    /// `EACCES` for a token that is wrong, used or too old, and what the backend answers.
    pub fn import_token(&self, token: &Token) -> io::Result<File> {
        let imported = self.backend().import(token.secret())?;
        let found = Walked::new(self.cache(), imported.entry);
        let (inode, handle) = self.hold(found, imported.handle)?;
        let access = imported.flags & libc::O_ACCMODE;
        let mut options = OpenOptions::new()
            .read(access == libc::O_RDONLY || access == libc::O_RDWR)
            .write(access == libc::O_WRONLY || access == libc::O_RDWR)
            .append(imported.flags & libc::O_APPEND != 0 && access != libc::O_RDONLY);
        options.synchronous = imported.flags & libc::O_DSYNC != 0;
        Ok(File::new(self.0.clone(), inode, handle, &options))
    }

    /// Makes a file and opens it for reading and writing; fails with `EEXIST` if it is there.
    ///
    /// # Errors
    /// The backend's error.
    pub fn create(&self, path: impl AsRef<Path>) -> io::Result<File> {
        self.open(
            path,
            OpenOptions::new().read(true).write(true).create_new(true),
        )
    }

    /// Finds a name without following it if it is a symbolic link: its inode and attributes.
    ///
    /// # Errors
    /// The backend's error.
    pub fn lookup(&self, path: impl AsRef<Path>) -> io::Result<(NodeId, Attr)> {
        self.retried(|| {
            let found = self.walk_once(path.as_ref(), false)?;
            Ok((found.node, self.attr(&found)?))
        })
    }

    /// Attributes, through symbolic links.
    ///
    /// # Errors
    /// The backend's error.
    pub fn stat(&self, path: impl AsRef<Path>) -> io::Result<Attr> {
        self.retried(|| {
            let found = self.walk_once(path.as_ref(), true)?;
            self.attr(&found)
        })
    }

    /// Attributes of the name itself.
    ///
    /// # Errors
    /// The backend's error.
    pub fn lstat(&self, path: impl AsRef<Path>) -> io::Result<Attr> {
        self.lookup(path).map(|(_, attr)| attr)
    }

    /// Changes attributes; a size of an open file is better changed with [`File::set_len`].
    ///
    /// # Errors
    /// The backend's error.
    pub fn setattr(&self, path: impl AsRef<Path>, set: &SetAttr) -> io::Result<Attr> {
        self.retried(|| self.setattr_once(path.as_ref(), set))
    }

    fn setattr_once(&self, path: &Path, set: &SetAttr) -> io::Result<Attr> {
        let found = self.walk_once(path, true)?;
        let node = found.node;
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
            inode.set_len(size, || self.files().setattr(node, &tell).map(drop))?;
            rest.size = None;
        }
        if rest.mtime.is_some() || rest.atime.is_some() {
            // Or writeback would change the times again.
            if let Some(inode) = self.0.cache.find(node) {
                inode.write_and_wait(0, u64::MAX)?;
            }
        }
        let attr = self.files().setattr(node, &rest)?;
        Ok(self.overlay(&Entry { node, attr }))
    }

    /// Makes a file, fifo, socket or device, as mknod(2): `mode` with the type, `rdev` the number
    /// of a device.
    ///
    /// # Errors
    /// The backend's error.
    pub fn mknod(&self, path: impl AsRef<Path>, mode: u32, rdev: u32) -> io::Result<()> {
        let (parent, name) = self.parent(path.as_ref())?;
        let entry = self.files().mknod(parent.node, name, mode, rdev)?;
        drop(Walked::new(self.cache(), entry));
        Ok(())
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// The backend's error.
    pub fn mkdir(&self, path: impl AsRef<Path>, mode: u32) -> io::Result<()> {
        let (parent, name) = self.parent(path.as_ref())?;
        let entry = self.files().mkdir(parent.node, name, mode)?;
        drop(Walked::new(self.cache(), entry));
        Ok(())
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// The backend's error.
    pub fn rmdir(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let (parent, name) = self.parent(path.as_ref())?;
        self.files().rmdir(parent.node, name)
    }

    /// Removes a name that is no directory.
    ///
    /// # Errors
    /// The backend's error.
    pub fn unlink(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let (parent, name) = self.parent(path.as_ref())?;
        self.files().unlink(parent.node, name)
    }

    /// Renames; `flags` are those of renameat2(2), 0 to replace what is there.
    ///
    /// # Errors
    /// The backend's error.
    pub fn rename(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        flags: u32,
    ) -> io::Result<()> {
        let (old, old_name) = self.parent(from.as_ref())?;
        let (new, new_name) = self.parent(to.as_ref())?;
        let (from, to) = (old.node, new.node);
        self.files().rename(from, old_name, to, new_name, flags)
    }

    /// Makes another name of a file.
    ///
    /// # Errors
    /// The backend's error.
    pub fn link(&self, original: impl AsRef<Path>, new: impl AsRef<Path>) -> io::Result<()> {
        let found = self.walk(original.as_ref(), false)?;
        let (parent, name) = self.parent(new.as_ref())?;
        let entry = self.files().link(found.node, parent.node, name)?;
        drop(Walked::new(self.cache(), entry));
        Ok(())
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// The backend's error.
    pub fn symlink(&self, target: impl AsRef<OsStr>, new: impl AsRef<Path>) -> io::Result<()> {
        let (parent, name) = self.parent(new.as_ref())?;
        let entry = self.files().symlink(parent.node, name, target.as_ref())?;
        drop(Walked::new(self.cache(), entry));
        Ok(())
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// The backend's error.
    pub fn readlink(&self, path: impl AsRef<Path>) -> io::Result<PathBuf> {
        self.retried(|| {
            let found = self.walk_once(path.as_ref(), false)?;
            self.files().readlink(found.node).map(PathBuf::from)
        })
    }

    /// The names in a directory, without `.` and `..`.
    ///
    /// # Errors
    /// The backend's error.
    pub fn readdir(&self, path: impl AsRef<Path>) -> io::Result<Vec<DirEntry>> {
        self.retried(|| {
            let found = self.walk_once(path.as_ref(), true)?;
            if found.kind() != libc::S_IFDIR {
                return Err(errno(libc::ENOTDIR));
            }
            self.files().readdir(found.node)
        })
    }

    /// The file system's numbers.
    ///
    /// # Errors
    /// The backend's error.
    pub fn statfs(&self) -> io::Result<StatFs> {
        self.retried(|| self.files().statfs(ROOT))
    }

    /// Sets an extended attribute; `flags` as setxattr(2).
    ///
    /// # Errors
    /// The backend's error.
    pub fn setxattr(
        &self,
        path: impl AsRef<Path>,
        name: impl AsRef<OsStr>,
        value: &[u8],
        flags: i32,
    ) -> io::Result<()> {
        let found = self.walk(path.as_ref(), true)?;
        self.files()
            .setxattr(found.node, name.as_ref(), value, flags)
    }

    /// An extended attribute's value.
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the backend answers.
    pub fn getxattr(&self, path: impl AsRef<Path>, name: impl AsRef<OsStr>) -> io::Result<Vec<u8>> {
        self.retried(|| {
            let found = self.walk_once(path.as_ref(), true)?;
            self.files().getxattr(found.node, name.as_ref())
        })
    }

    /// The names of all extended attributes.
    ///
    /// # Errors
    /// The backend's error.
    pub fn listxattr(&self, path: impl AsRef<Path>) -> io::Result<Vec<OsString>> {
        self.retried(|| {
            let found = self.walk_once(path.as_ref(), true)?;
            self.files().listxattr(found.node)
        })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the backend answers.
    pub fn removexattr(&self, path: impl AsRef<Path>, name: impl AsRef<OsStr>) -> io::Result<()> {
        let found = self.walk(path.as_ref(), true)?;
        self.files().removexattr(found.node, name.as_ref())
    }

    /// The descriptors that this client has open, for a caller that must not close them by mistake, or has to close
    /// them in a child process.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut descriptors = self.backend().pages().descriptors();
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
    pub fn flush(&self) -> io::Result<()> {
        let mut first = Ok(());
        self.0.cache.write_all(|_, error| {
            if first.is_ok() {
                first = Err(error);
            }
        });
        first
    }
}
