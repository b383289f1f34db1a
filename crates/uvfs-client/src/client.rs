//! A client: a file system's names, and the cache that its files share.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use crate::backend::{Attr, Backend, DirEntry, Entry, NewFile, NodeId, ROOT, SetAttr, StatFs};
use crate::cache::{Cache, Config, Handle, errno};
use crate::dentry::{Found, Pinned};
use crate::file::{File, OpenOptions, carried};
use crate::stats::Stats;
use crate::token::Token;

/// Symbolic links that one path may go through, as in the kernel.
const MAX_LINKS: usize = 40;

/// A client of one file system. Clones share the cache. Paths are relative to the file system's
/// root; a leading `/` means the same.
#[derive(Debug, Clone)]
pub struct Client(pub(crate) Arc<Shared>);

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) cache: Arc<Cache>,
    flusher: Option<JoinHandle<()>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The last user is gone, so nothing becomes dirty any more: write what is.
        self.cache.write_all(|inode, error| {
            tracing::error!(node = inode.node, %error, "dirty pages are lost: writeback failed");
        });
        self.cache.stop_flusher();
        if let Some(flusher) = self.flusher.take() {
            // A request's end may hold the last reference, and the flusher may be that end.
            if flusher.thread().id() != std::thread::current().id() {
                let _ = flusher.join();
            }
        }
        self.cache.forget_all();
    }
}

fn components(path: &Path) -> Vec<OsString> {
    path.components()
        .filter_map(|c| match c {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => None,
        })
        .collect()
}

impl Client {
    /// A client of `backend` with a cache of its own.
    ///
    /// # Errors
    /// Those of making the arena, and of the backend taking it.
    pub fn new(backend: impl Backend, config: Config) -> io::Result<Self> {
        let cache = Cache::new(Arc::new(backend), config)?;
        let weak = Arc::downgrade(&cache);
        cache.backend.on_recall(Box::new(move |recall| {
            if let Some(cache) = weak.upgrade() {
                cache.recalled(recall);
            }
        }));
        let weak = Arc::downgrade(&cache);
        let figures = move || weak.upgrade().map(|cache| cache.stats());
        cache.backend.publish_from(Box::new(figures));
        let weak = Arc::downgrade(&cache);
        cache.backend.on_reattach(Box::new(move |found| {
            if let Some(cache) = weak.upgrade() {
                cache.reattached(found);
            }
        }));
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

    pub(crate) fn cache(&self) -> &Arc<Cache> {
        &self.0.cache
    }

    /// Makes a call that does no harm when it is made twice: again when the server went and came back.
    fn carried<T>(&self, call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        carried(self.backend(), call)
    }

    fn walk(&self, path: &Path, follow: bool) -> io::Result<Found> {
        self.carried(|| self.walk_once(path, follow))
    }

    /// Finds what a path leads to; its attributes may have to be asked for ([`Client::attr`]).
    fn walk_once(&self, path: &Path, follow: bool) -> io::Result<Found> {
        let mut todo: VecDeque<OsString> = components(path).into();
        let mut stack = vec![self.cache().root()];
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
            if top.kind != libc::S_IFDIR {
                return Err(errno(libc::ENOTDIR));
            }
            let found = self
                .cache()
                .find_name(top.pin.node, &name, todo.is_empty())?;
            if found.kind != libc::S_IFLNK || (todo.is_empty() && !follow) {
                stack.push(found);
                continue;
            }
            links += 1;
            if links > MAX_LINKS {
                return Err(errno(libc::ELOOP));
            }
            let target = PathBuf::from(self.backend().readlink(found.pin.node)?);
            if target.is_absolute() {
                stack.truncate(1);
            }
            for part in components(&target).into_iter().rev() {
                todo.push_front(part);
            }
        }
        Ok(stack.pop().expect("the root stays"))
    }

    fn parent<'p>(&self, path: &'p Path) -> io::Result<(Pinned, &'p OsStr)> {
        let name = path.file_name().ok_or_else(|| errno(libc::EINVAL))?;
        let parent = self.walk(path.parent().unwrap_or(Path::new("")), true)?;
        if parent.kind != libc::S_IFDIR {
            return Err(errno(libc::ENOTDIR));
        }
        Ok((parent.pin, name))
    }

    /// The attributes of what was found.
    pub(crate) fn attr(&self, found: &Found) -> io::Result<Attr> {
        let node = found.pin.node;
        match found.attr {
            Some(attr) => Ok(self.overlay(&Entry { node, attr })),
            None => match self.cache().find(node) {
                Some(inode) => inode.current_attr(),
                None => self.backend().getattr(node),
            },
        }
    }

    /// What the cache knows better than the server.
    pub(crate) fn overlay(&self, entry: &Entry) -> Attr {
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
            false => self.carried(|| self.open_once(path, &options)),
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
        let (pin, fh) = match existing {
            Some(found) => {
                match found.kind {
                    libc::S_IFREG => {}
                    libc::S_IFDIR => return Err(errno(libc::EISDIR)),
                    _ => return Err(errno(libc::EINVAL)),
                }
                let fh = self.backend().open(found.pin.node, flags)?;
                (found.pin, fh)
            }
            None => {
                let (parent, name) = self.parent(path)?;
                let excl = if options.create_new { libc::O_EXCL } else { 0 };
                let change = self.cache().change(parent.node, name);
                let new = NewFile {
                    mode: options.mode,
                    umask: 0,
                    flags: flags | excl,
                };
                let made = self.backend().create(parent.node, name, new)?;
                (change.made(&made.0), made.1)
            }
        };
        let (cache, node) = (&self.0.cache, pin.node);
        let handle = Handle::new(cache, node, fh);
        // Its size may have changed between the lookup and the open.
        let token = cache.find(node).and_then(|inode| inode.quiet());
        let attr = self.backend().getattr(node)?;
        let inode = cache.inode(node, attr.mtime, attr.size);
        inode.pin(pin);
        inode.revalidate(token, attr.mtime, attr.size);
        let file = File::new(self.0.clone(), inode, handle, options);
        if options.truncate && (attr.size > 0 || file.size() > 0) {
            file.set_len(0)?;
        }
        Ok(file)
    }

    /// Does something to a node that makes old what is known of it.
    fn changing<T>(&self, node: NodeId, change: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let _change = self.cache().change_node(node);
        change()
    }

    pub(crate) fn mkdir_in(
        &self,
        parent: &Pinned,
        name: &OsStr,
        mode: u32,
        umask: u32,
    ) -> io::Result<()> {
        let change = self.cache().change(parent.node, name);
        let entry = self.backend().mkdir(parent.node, name, mode, umask)?;
        change.made(&entry);
        Ok(())
    }

    pub(crate) fn remove_in(&self, parent: &Pinned, name: &OsStr, dir: bool) -> io::Result<()> {
        let mut change = self.cache().change(parent.node, name);
        if dir {
            return self.backend().rmdir(parent.node, name);
        }
        match change.forgets() {
            Some((node, lookups)) => self.backend().remove(parent.node, name, node, lookups),
            None => self.backend().unlink(parent.node, name),
        }
    }

    pub(crate) fn rename_in(
        &self,
        from: (&Pinned, &OsStr),
        to: (&Pinned, &OsStr),
        flags: u32,
    ) -> io::Result<()> {
        let (old, new) = (from.0.node, to.0.node);
        let _from = self.cache().change(old, from.1);
        let _to = self.cache().change(new, to.1);
        self.backend().rename(old, from.1, new, to.1, flags)
    }

    pub(crate) fn link_in(&self, node: &Pinned, parent: &Pinned, name: &OsStr) -> io::Result<()> {
        let change = self.cache().change(parent.node, name);
        let entry = self.changing(node.node, || {
            self.backend().link(node.node, parent.node, name)
        })?;
        change.made(&entry);
        Ok(())
    }

    pub(crate) fn symlink_in(
        &self,
        target: &OsStr,
        parent: &Pinned,
        name: &OsStr,
    ) -> io::Result<()> {
        let change = self.cache().change(parent.node, name);
        let entry = self.backend().symlink(parent.node, name, target)?;
        change.made(&entry);
        Ok(())
    }

    /// Takes over an open file of a mount of the same server: what `fd` may do, the result may.
    ///
    /// It is cached under leases, as files that were opened by their names are.
    ///
    /// # Errors
    /// Those of [`Token::of`]; `EACCES` when this client is attached to another server.
    pub fn import(&self, fd: BorrowedFd<'_>) -> io::Result<File> {
        self.import_token(&Token::of(fd)?)
    }

    /// As [`Client::import`], with a token that was got before. It is used up, whatever comes.
    ///
    /// # Errors
    /// `EACCES` for a token that is wrong, used or too old, and what the backend answers.
    pub fn import_token(&self, token: &Token) -> io::Result<File> {
        let imported = self.backend().import(token.secret())?;
        let node = imported.entry.node;
        let cache = &self.0.cache;
        let handle = Handle::new(cache, node, imported.handle);
        // As in `open`: what the server says now, if the cache has nothing newer by then.
        let token = cache.find(node).and_then(|inode| inode.quiet());
        let attr = self.backend().getattr(node)?;
        let inode = cache.inode(node, attr.mtime, attr.size);
        inode.lookups.fetch_add(1, Ordering::AcqRel);
        inode.revalidate(token, attr.mtime, attr.size);
        let access = imported.flags & libc::O_ACCMODE;
        let options = OpenOptions::new()
            .read(access == libc::O_RDONLY || access == libc::O_RDWR)
            .write(access == libc::O_WRONLY || access == libc::O_RDWR)
            .append(imported.flags & libc::O_APPEND != 0 && access != libc::O_RDONLY);
        Ok(File::new(self.0.clone(), inode, handle, &options))
    }

    /// Makes a file and opens it for reading and writing; fails with `EEXIST` if it is there.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn create(&self, path: impl AsRef<Path>) -> io::Result<File> {
        self.open(
            path,
            OpenOptions::new().read(true).write(true).create_new(true),
        )
    }

    /// Finds a name without following it if it is a symbolic link: its inode and attributes.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn lookup(&self, path: impl AsRef<Path>) -> io::Result<(NodeId, Attr)> {
        self.carried(|| {
            let found = self.walk_once(path.as_ref(), false)?;
            Ok((found.pin.node, self.attr(&found)?))
        })
    }

    /// Attributes, through symbolic links.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn stat(&self, path: impl AsRef<Path>) -> io::Result<Attr> {
        self.carried(|| {
            let found = self.walk_once(path.as_ref(), true)?;
            self.attr(&found)
        })
    }

    /// Attributes of the name itself.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn lstat(&self, path: impl AsRef<Path>) -> io::Result<Attr> {
        self.lookup(path).map(|(_, attr)| attr)
    }

    /// Changes attributes; a size of an open file is better changed with [`File::set_len`].
    ///
    /// # Errors
    /// What the backend answers.
    pub fn setattr(&self, path: impl AsRef<Path>, set: &SetAttr) -> io::Result<Attr> {
        self.carried(|| self.setattr_once(path.as_ref(), set))
    }

    fn setattr_once(&self, path: &Path, set: &SetAttr) -> io::Result<Attr> {
        let found = self.walk_once(path, true)?;
        let node = found.pin.node;
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
            inode.set_len(size, || self.backend().setattr(node, &tell).map(drop))?;
            rest.size = None;
        }
        if rest.mtime.is_some() || rest.atime.is_some() {
            // Or writeback would change the times again.
            if let Some(inode) = self.0.cache.find(node) {
                inode.write_and_wait(0, u64::MAX)?;
            }
        }
        let attr = self.changing(node, || self.backend().setattr(node, &rest))?;
        Ok(self.overlay(&Entry { node, attr }))
    }

    /// Makes a file, fifo, socket or device, as mknod(2): `mode` with the type, `rdev` the number
    /// of a device.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn mknod(&self, path: impl AsRef<Path>, mode: u32, rdev: u32) -> io::Result<()> {
        let (parent, name) = self.parent(path.as_ref())?;
        let change = self.cache().change(parent.node, name);
        let entry = self.backend().mknod(parent.node, name, mode, rdev)?;
        change.made(&entry);
        Ok(())
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn mkdir(&self, path: impl AsRef<Path>, mode: u32) -> io::Result<()> {
        let (parent, name) = self.parent(path.as_ref())?;
        self.mkdir_in(&parent, name, mode, 0)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn rmdir(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let (parent, name) = self.parent(path.as_ref())?;
        self.remove_in(&parent, name, true)
    }

    /// Removes a name that is no directory.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn unlink(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let (parent, name) = self.parent(path.as_ref())?;
        self.remove_in(&parent, name, false)
    }

    /// Renames; `flags` are those of renameat2(2), 0 to replace what is there.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn rename(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        flags: u32,
    ) -> io::Result<()> {
        let (old, old_name) = self.parent(from.as_ref())?;
        let (new, new_name) = self.parent(to.as_ref())?;
        self.rename_in((&old, old_name), (&new, new_name), flags)
    }

    /// Makes another name of a file.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn link(&self, original: impl AsRef<Path>, new: impl AsRef<Path>) -> io::Result<()> {
        let node = self.walk(original.as_ref(), false)?;
        let (parent, name) = self.parent(new.as_ref())?;
        self.link_in(&node.pin, &parent, name)
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn symlink(&self, target: impl AsRef<OsStr>, new: impl AsRef<Path>) -> io::Result<()> {
        let (parent, name) = self.parent(new.as_ref())?;
        self.symlink_in(target.as_ref(), &parent, name)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn readlink(&self, path: impl AsRef<Path>) -> io::Result<PathBuf> {
        self.carried(|| {
            let held = self.walk_once(path.as_ref(), false)?;
            self.backend().readlink(held.pin.node).map(PathBuf::from)
        })
    }

    /// The names in a directory, without `.` and `..`.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn readdir(&self, path: impl AsRef<Path>) -> io::Result<Vec<DirEntry>> {
        self.carried(|| {
            let held = self.walk_once(path.as_ref(), true)?;
            if held.kind != libc::S_IFDIR {
                return Err(errno(libc::ENOTDIR));
            }
            self.backend().readdir(held.pin.node)
        })
    }

    /// The file system's numbers.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn statfs(&self) -> io::Result<StatFs> {
        self.carried(|| self.backend().statfs(ROOT))
    }

    /// Sets an extended attribute; `flags` as setxattr(2).
    ///
    /// # Errors
    /// What the backend answers.
    pub fn setxattr(
        &self,
        path: impl AsRef<Path>,
        name: impl AsRef<OsStr>,
        value: &[u8],
        flags: i32,
    ) -> io::Result<()> {
        let held = self.walk(path.as_ref(), true)?;
        let node = held.pin.node;
        self.changing(node, || {
            self.backend().setxattr(node, name.as_ref(), value, flags)
        })
    }

    /// An extended attribute's value.
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the backend answers.
    pub fn getxattr(&self, path: impl AsRef<Path>, name: impl AsRef<OsStr>) -> io::Result<Vec<u8>> {
        self.carried(|| {
            let held = self.walk_once(path.as_ref(), true)?;
            self.backend().getxattr(held.pin.node, name.as_ref())
        })
    }

    /// The names of all extended attributes.
    ///
    /// # Errors
    /// What the backend answers.
    pub fn listxattr(&self, path: impl AsRef<Path>) -> io::Result<Vec<OsString>> {
        self.carried(|| {
            let held = self.walk_once(path.as_ref(), true)?;
            self.backend().listxattr(held.pin.node)
        })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `ENODATA` when there is none, and what the backend answers.
    pub fn removexattr(&self, path: impl AsRef<Path>, name: impl AsRef<OsStr>) -> io::Result<()> {
        let held = self.walk(path.as_ref(), true)?;
        let node = held.pin.node;
        self.changing(node, || self.backend().removexattr(node, name.as_ref()))
    }

    /// The descriptors that this client has open, for who must not close them by mistake, or has to
    /// close them in a child process.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut descriptors = self.backend().descriptors();
        descriptors.extend(crate::cache::memory::descriptors());
        descriptors
    }

    /// What the cache has done so far.
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
