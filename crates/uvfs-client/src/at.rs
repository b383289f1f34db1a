//! What the `*at` system calls do: paths from a directory that is held.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use uvfs_proto::ext::PEEK_MAX;

use crate::backend::{Attr, DirHandle, ListedEntry, Listing, NewFile, NodeId, ROOT};
use crate::cache::{Handle, errno, lock};
use crate::client::{Client, Shared};
use crate::dentry::{Found, Pinned, Ticket};
use crate::short::ShortFile;

/// The longest path, as in the kernel (PATH_MAX, with its 0 byte).
const LONGEST: usize = 4096;

/// A directory that paths start from. It stays the same one when it is renamed or removed.
#[derive(Debug)]
pub struct Place(Pinned);

/// The names of a path, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names(Vec<OsString>);

impl Names {
    /// Takes a relative path apart; nothing for one with `..`, one that ends with a slash, and one
    /// that is too long. No names are the place itself.
    pub fn parse(path: &[u8]) -> Option<Self> {
        // The kernel refuses to make, remove or rename "name/.": it knows how.
        if path.len() >= LONGEST
            || path.is_empty()
            || path.ends_with(b"/")
            || (path.ends_with(b"/.") && path.iter().any(|byte| !b"./".contains(byte)))
        {
            return None;
        }
        let mut names = Vec::new();
        for name in path.split(|&byte| byte == b'/') {
            match name {
                b"" | b"." => {}
                b".." => return None,
                name => names.push(OsString::from_vec(name.to_vec())),
            }
        }
        Some(Self(names))
    }

    /// Whether the place itself is meant.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// An open directory.
#[derive(Debug)]
pub struct Directory {
    client: Arc<Shared>,
    pin: Pinned,
    handle: DirHandle,
    /// The part that is listed ahead.
    ahead: Mutex<Option<Ahead>>,
    /// Most of what is in it, or was in its part that was listed last, is known without its listing.
    known: AtomicBool,
    /// Its inode's number.
    pub ino: u64,
}

/// A part of a listing that was asked for before the program did.
#[derive(Debug)]
struct Ahead {
    offset: u64,
    ticket: Ticket,
    asked: Instant,
    part: Arc<Mutex<Part>>,
}

#[derive(Debug)]
enum Part {
    Asked,
    Came(io::Result<Listing>),
    /// Nobody waits for it any more, or has it already.
    Over,
}

impl Drop for Directory {
    fn drop(&mut self) {
        self.give_up_ahead();
        let backend = &self.client.cache.backend;
        backend.close_directory(self.pin.node, self.handle);
        self.client.cache.tell_used();
    }
}

impl Directory {
    /// Entries from `offset` on, `.` and `..` too; none at the end. The first offset is 0.
    ///
    /// # Errors
    /// What the server answers; ESTALE when it is another one by now.
    pub fn list(&self, offset: u64) -> io::Result<Vec<ListedEntry>> {
        let cache = &self.client.cache;
        let node = self.pin.node;
        // As the kernel does: who lists a directory often looks at what is in it. Unless most of that
        // is known.
        let searched = cache.dentries.take_searched(node) || offset == 0;
        if offset == 0 {
            self.known
                .store(cache.dentries.knows_most(node), Ordering::Relaxed);
        }
        if searched && self.known.load(Ordering::Relaxed) {
            let list = cache.backend.list(node, self.handle, offset, false)?;
            if list.entries.is_empty() || cache.listed_names(node, &list, offset == 0) {
                return Ok(list.entries);
            }
            self.known.store(false, Ordering::Relaxed);
        }
        let list = match self.take_ahead(offset) {
            Some(list) => list,
            None => {
                let ticket = cache.ticket(&self.pin);
                let list = cache.backend.list(node, self.handle, offset, searched)?;
                if searched {
                    cache.listed(node, &list, &ticket, offset == 0);
                }
                list
            }
        };
        // Not at first: it may be all.
        if searched && offset != 0 {
            self.look_ahead(&list);
        }
        Ok(list.entries)
    }

    /// Asks for the next part, if the last ones were looked at one by one, and nothing was changed
    /// meanwhile, which would make it worth little.
    fn look_ahead(&self, list: &Listing) {
        let cache = &self.client.cache;
        let Some(offset) = list.entries.last().map(|last| last.next) else {
            return;
        };
        let ticket = cache.ticket(&self.pin);
        if !cache.dentries.is_calm(self.pin.node) {
            return;
        }
        let part = Arc::new(Mutex::new(Part::Asked));
        let (mine, weak) = (part.clone(), Arc::downgrade(cache));
        // The ticket is of a node that is known for as long.
        let pin = cache.pin(&self.pin);
        let came = move |list: io::Result<Listing>| {
            let mut part = lock(&mine);
            if matches!(*part, Part::Asked) {
                *part = Part::Came(list);
                return;
            }
            drop(part);
            if let (Some(cache), Ok(list)) = (weak.upgrade(), list) {
                cache.listed(pin.node, &list, &ticket, false);
            }
        };
        let node = self.pin.node;
        if cache
            .backend
            .list_ahead(node, self.handle, offset, Box::new(came))
        {
            *lock(&self.ahead) = Some(Ahead {
                offset,
                ticket,
                asked: Instant::now(),
                part,
            });
        }
    }

    /// The part from `offset` on, if it was asked for ahead. Another one is given up.
    fn take_ahead(&self, offset: u64) -> Option<Listing> {
        let cache = &self.client.cache;
        let asked = lock(&self.ahead).take()?;
        let waits = asked.offset == offset;
        if waits {
            let mut came = || !matches!(*lock(&asked.part), Part::Asked);
            cache.backend.wait(&mut came);
        }
        let part = std::mem::replace(&mut *lock(&asked.part), Part::Over);
        let Part::Came(Ok(mut list)) = part else {
            return None;
        };
        // Lifetimes are those of when it was asked for.
        let age = asked.asked.elapsed();
        for looked in list
            .entries
            .iter_mut()
            .filter_map(|one| one.looked.as_mut())
        {
            looked.entry_ttl = looked.entry_ttl.saturating_sub(age);
            looked.attr_ttl = looked.attr_ttl.saturating_sub(age);
        }
        cache.listed(self.pin.node, &list, &asked.ticket, false);
        waits.then_some(list)
    }

    fn give_up_ahead(&self) {
        // No part is listed from there.
        self.take_ahead(u64::MAX);
    }
}

/// What has to be done by a way that knows more: symbolic links, special files.
fn elsewhere<T>() -> io::Result<T> {
    Err(errno(libc::ELOOP))
}

/// Symbolic links are not followed: a path that leads through one, or to one where that would be
/// followed, fails with ELOOP.
impl Client {
    /// The file system's root.
    pub fn root(&self) -> Place {
        Place(self.cache().root().pin)
    }

    /// Whether names can be used as if the kernel did, by who runs a program that knows nothing of
    /// this.
    ///
    /// # Errors
    /// ENOSYS of an older server, EOPNOTSUPP where the kernel keeps data and sizes of its own
    /// (`-o writeback`), and what else the server answers.
    pub fn paths_served(&self) -> io::Result<()> {
        match self.backend().peek(ROOT) {
            Err(e) if !matches!(e.raw_os_error(), Some(libc::EISDIR | libc::EAGAIN)) => Err(e),
            _ => Ok(()),
        }
    }

    fn step(&self, found: Found, name: &OsStr, with_attr: bool) -> io::Result<Found> {
        match found.kind {
            libc::S_IFDIR => self.cache().find_name(found.pin.node, name, with_attr),
            libc::S_IFLNK => elsewhere(),
            _ => Err(errno(libc::ENOTDIR)),
        }
    }

    fn start(&self, from: &Place) -> Found {
        Found {
            pin: self.cache().pin(&from.0),
            kind: libc::S_IFDIR,
            attr: None,
        }
    }

    /// The directory that all names but the last lead to, and the last.
    fn parent_at<'n>(&self, from: &Place, names: &'n Names) -> io::Result<(Pinned, &'n OsStr)> {
        let Some((last, way)) = names.0.split_last() else {
            return elsewhere();
        };
        let mut found = self.start(from);
        for name in way {
            found = self.step(found, name, false)?;
        }
        match found.kind {
            libc::S_IFDIR => Ok((found.pin, last)),
            libc::S_IFLNK => elsewhere(),
            _ => Err(errno(libc::ENOTDIR)),
        }
    }

    pub(crate) fn find_at(&self, from: &Place, names: &Names, follow: bool) -> io::Result<Found> {
        let found = match names.is_empty() {
            true => self.start(from),
            false => {
                let (parent, name) = self.parent_at(from, names)?;
                self.cache().find_name(parent.node, name, true)?
            }
        };
        match found.kind == libc::S_IFLNK && follow {
            true => elsewhere(),
            false => Ok(found),
        }
    }

    /// Another place, and its attributes: a directory, or what else the path leads to.
    ///
    /// # Errors
    /// What the server answers.
    pub fn place_at(&self, from: &Place, names: &Names) -> io::Result<(Place, Attr)> {
        let found = self.find_at(from, names, true)?;
        let attr = self.attr(&found)?;
        Ok((Place(found.pin), attr))
    }

    /// Attributes; with `follow` fails with ELOOP where they would be a symbolic link's.
    ///
    /// # Errors
    /// What the server answers.
    pub fn stat_at(&self, from: &Place, names: &Names, follow: bool) -> io::Result<Attr> {
        self.attr(&self.find_at(from, names, follow)?)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// What the server answers.
    pub fn readlink_at(&self, from: &Place, names: &Names) -> io::Result<Vec<u8>> {
        let found = self.find_at(from, names, false)?;
        match found.kind {
            libc::S_IFLNK => Ok(self.backend().readlink(found.pin.node)?.into_vec()),
            _ => Err(errno(libc::EINVAL)),
        }
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// What the server answers.
    pub fn mkdir_at(&self, from: &Place, names: &Names, mode: u32, umask: u32) -> io::Result<()> {
        let (parent, name) = self.parent_at(from, names)?;
        self.mkdir_in(&parent, name, mode, umask)
    }

    /// Removes a name; of a directory, if `directory`.
    ///
    /// # Errors
    /// What the server answers.
    pub fn remove_at(&self, from: &Place, names: &Names, directory: bool) -> io::Result<()> {
        let (parent, name) = self.parent_at(from, names)?;
        self.remove_in(&parent, name, directory)
    }

    /// Renames, with the flags of renameat2(2).
    ///
    /// # Errors
    /// What the server answers.
    pub fn rename_at(
        &self,
        from: &Place,
        names: &Names,
        to: &Place,
        new: &Names,
        flags: u32,
    ) -> io::Result<()> {
        let (old, old_name) = self.parent_at(from, names)?;
        let (new, new_name) = self.parent_at(to, new)?;
        self.rename_in((&old, old_name), (&new, new_name), flags)
    }

    /// Makes another name of a file.
    ///
    /// # Errors
    /// What the server answers.
    pub fn link_at(&self, from: &Place, names: &Names, to: &Place, new: &Names) -> io::Result<()> {
        let found = self.find_at(from, names, false)?;
        let (parent, name) = self.parent_at(to, new)?;
        self.link_in(&found.pin, &parent, name)
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// What the server answers.
    pub fn symlink_at(&self, target: &[u8], from: &Place, names: &Names) -> io::Result<()> {
        let (parent, name) = self.parent_at(from, names)?;
        self.symlink_in(OsStr::from_bytes(target), &parent, name)
    }

    /// Opens a directory.
    ///
    /// # Errors
    /// What the server answers.
    pub fn open_directory_at(&self, from: &Place, names: &Names) -> io::Result<Directory> {
        let found = self.find_at(from, names, true)?;
        if found.kind != libc::S_IFDIR {
            return Err(errno(libc::ENOTDIR));
        }
        let ino = self.attr(&found)?.ino;
        Ok(Directory {
            handle: self.backend().open_directory(found.pin.node)?,
            ahead: Mutex::default(),
            known: AtomicBool::new(false),
            client: self.0.clone(),
            pin: found.pin,
            ino,
        })
    }

    /// Opens a regular file, with the flags of open(2).
    ///
    /// # Errors
    /// What the server answers.
    pub fn open_at(
        &self,
        from: &Place,
        names: &Names,
        flags: i32,
        mode: u32,
        umask: u32,
    ) -> io::Result<ShortFile> {
        let (parent, name) = self.parent_at(from, names)?;
        let (creates, only_new) = (flags & libc::O_CREAT != 0, flags & libc::O_EXCL != 0);
        // Somebody may be making and removing it all the time.
        for _ in 0..4 {
            if creates {
                match self.create_in(&parent, name, flags, mode, umask) {
                    Err(e) if e.raw_os_error() == Some(libc::EEXIST) && !only_new => {}
                    made => return made,
                }
            }
            match self.cache().find_name(parent.node, name, true) {
                Err(e) if e.raw_os_error() == Some(libc::ENOENT) && creates => {}
                Ok(found) => {
                    if creates && self.is_sticky(&parent)? {
                        // What fs.protected_regular says of it the kernel knows.
                        return elsewhere();
                    }
                    return self.open_found(parent.node, found, flags);
                }
                Err(e) => return Err(e),
            }
        }
        elsewhere()
    }

    fn is_sticky(&self, directory: &Pinned) -> io::Result<bool> {
        let attr = self.backend().getattr(directory.node)?;
        Ok(attr.mode & libc::S_ISVTX != 0)
    }

    fn create_in(
        &self,
        parent: &Pinned,
        name: &OsStr,
        flags: i32,
        mode: u32,
        umask: u32,
    ) -> io::Result<ShortFile> {
        if self.cache().is_kept(parent.node, name) {
            return Err(errno(libc::EEXIST));
        }
        let change = self.cache().change(parent.node, name);
        let new = NewFile {
            mode,
            umask,
            flags: flags & !libc::O_TRUNC | libc::O_EXCL,
        };
        let (looked, entry, fh) = self.backend().create_leased(parent.node, name, new)?;
        let handle = Some(Handle::new(self.cache(), entry.node, fh));
        let pin = change.made_leased(&entry, &looked);
        let client = self.0.clone();
        Ok(ShortFile::new(client, pin, entry.attr, flags, handle, None).just_made())
    }

    fn open_found(&self, parent: NodeId, found: Found, flags: i32) -> io::Result<ShortFile> {
        if found.kind != libc::S_IFREG {
            return elsewhere();
        }
        let (node, attr) = (found.pin.node, found.attr.unwrap_or_default());
        let reads = flags & libc::O_ACCMODE == libc::O_RDONLY;
        if reads && attr.size <= PEEK_MAX as u64 && self.cache().find(node).is_none() {
            match self.cache().contents(parent, &found.pin) {
                Ok(Some(short)) => {
                    let short = Some(short);
                    let client = self.0.clone();
                    return Ok(ShortFile::new(client, found.pin, attr, flags, None, short));
                }
                Ok(None) => {}
                Err(e) if matches!(e.raw_os_error(), Some(libc::EFBIG | libc::EAGAIN)) => {}
                Err(e) => return Err(e),
            }
        }
        let made = libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY | libc::O_TRUNC;
        let fh = self.backend().open(node, flags & !made)?;
        let handle = Handle::new(self.cache(), node, fh);
        let client = self.0.clone();
        let file = ShortFile::new(client, found.pin, attr, flags, Some(handle), None);
        if flags & libc::O_TRUNC != 0 {
            file.truncate()?;
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simple_paths_are_names() {
        let of = |path: &str| Names::parse(path.as_bytes());
        let names = |names: &[&str]| Some(Names(names.iter().map(OsString::from).collect()));
        assert_eq!(of("a"), names(&["a"]));
        assert_eq!(of("./a//b/./c"), names(&["a", "b", "c"]));
        assert_eq!(of("."), names(&[]));
        for other in ["", "..", "a/..", "../a", "a/", "a/.", "a/../b"] {
            assert_eq!(of(other), None, "{other}");
        }
        assert_eq!(of(&"x".repeat(4096)), None);
        assert!(of(&"x".repeat(4095)).is_some());
    }
}
