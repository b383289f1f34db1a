//! Files that are opened for a moment: a short one's contents come as it is opened, a few bytes are
//! written as they come, and the page cache knows nothing of it. A file that is used for more
//! becomes a [`File`] of the page cache.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use uvfs_proto::ext::PEEK_MAX;

use crate::at::Names;
use crate::backend::{Attr, NodeId, SetAttr};
use crate::cache::{Handle, errno, lock};
use crate::client::{Client, Shared};
use crate::dentry::{NodeChange, Pinned, Short};
use crate::file::{File, OpenOptions, carried};

/// Writes to a file before it is thought to be used for more.
const WRITES: u32 = 4;
/// The longest of them.
const SHORT: usize = 4096;

/// An open file that may never need the page cache.
#[derive(Debug)]
pub struct ShortFile {
    // First: it goes before the node that it is of is forgotten.
    file: OnceLock<File>,
    /// Nothing as long as the contents are all that was asked for.
    handle: Mutex<Option<Arc<Handle>>>,
    pin: Pinned,
    /// The same file at a server that came back, if it was not open at the one before.
    again: OnceLock<Pinned>,
    client: Arc<Shared>,
    attr: Attr,
    flags: i32,
    short: Option<Arc<Short>>,
    writes: AtomicU32,
    written: Mutex<Option<Written>>,
}

/// What a file holds that was made here.
#[derive(Debug)]
enum Written {
    Nothing,
    /// And what [`NodeChange::wrote`] answered last.
    All(Arc<Short>, u64),
}

impl ShortFile {
    pub(crate) fn new(
        client: Arc<Shared>,
        pin: Pinned,
        attr: Attr,
        flags: i32,
        handle: Option<Arc<Handle>>,
        short: Option<Arc<Short>>,
    ) -> Self {
        Self {
            client,
            pin,
            again: OnceLock::new(),
            attr,
            flags,
            handle: Mutex::new(handle),
            short,
            writes: AtomicU32::new(0),
            written: Mutex::default(),
            file: OnceLock::new(),
        }
    }

    /// It was made as it was opened, so nothing is in it.
    pub(crate) fn just_made(self) -> Self {
        *lock(&self.written) = Some(Written::Nothing);
        self
    }

    /// What is known of it since it was opened: its inode's number does not change.
    pub fn opened_as(&self) -> &Attr {
        &self.attr
    }

    /// Its handle at the server, opened now if it has none.
    fn handle(&self) -> io::Result<Arc<Handle>> {
        let mut handle = lock(&self.handle);
        if let Some(handle) = &*handle {
            return Ok(handle.clone());
        }
        let cache = &self.client.cache;
        let open = || {
            let open = || {
                cache
                    .backend
                    .open(self.node(), self.flags & libc::O_ACCMODE)
            };
            carried(&*cache.backend, open)
        };
        let fh = match open() {
            Err(e) if e.raw_os_error() == Some(libc::ESTALE) && self.again.get().is_none() => {
                let _ = self.again.set(self.find_again().ok_or(e)?);
                open()
            }
            opened => opened,
        }?;
        Ok(handle.insert(Handle::new(cache, self.node(), fh)).clone())
    }

    fn pin(&self) -> &Pinned {
        self.again.get().unwrap_or(&self.pin)
    }

    fn node(&self) -> NodeId {
        self.pin().node
    }

    /// Finds the file where it was, if it is the same one and as it was when it was opened: a server
    /// that came back knows nothing of it, as it had no handle.
    fn find_again(&self) -> Option<Pinned> {
        let client = Client(self.client.clone());
        let path = client.backend().found_at(self.pin.node)?;
        let found = client
            .find_at(&client.root(), &Names::parse(&path)?, true)
            .ok()?;
        let is = |attr: &Attr| (attr.ino, attr.size, attr.mtime, attr.ctime);
        (is(&found.attr?) == is(&self.attr)).then_some(found.pin)
    }

    /// The file in the page cache, from now on.
    pub fn file(&self) -> &File {
        self.file.get_or_init(|| {
            let cache = &self.client.cache;
            let handle = self.handle().unwrap_or_else(|error| {
                let node = self.node();
                tracing::error!(node, %error, "a file that was open can't be opened");
                // Which the server knows nothing of: EBADF.
                Handle::new(cache, node, u64::MAX)
            });
            let node = self.node();
            let inode = cache.inode(node, self.attr.mtime, self.attr.size);
            inode.pin(cache.pin(self.pin()));
            let access = self.flags & libc::O_ACCMODE;
            let options = OpenOptions::new()
                .read(access != libc::O_WRONLY)
                .write(access != libc::O_RDONLY)
                .append(self.flags & libc::O_APPEND != 0 && access != libc::O_RDONLY);
            File::new(self.client.clone(), inode, handle, &options)
        })
    }

    /// Reads, if it can be done without the page cache.
    pub fn read_short(&self, buf: &mut [u8], offset: u64) -> Option<usize> {
        let short = self.short.as_ref()?;
        if !self.client.cache.backend.is_alive() {
            return None;
        }
        let n = short.read(buf, offset)?;
        if short.take_unseen() {
            self.client.cache.was_read(self.node());
        }
        Some(n)
    }

    /// Writes, if it can be done without the page cache.
    pub fn write_short(&self, buf: &[u8], offset: u64) -> Option<io::Result<usize>> {
        let cache = &self.client.cache;
        let node = self.node();
        if buf.is_empty()
            || buf.len() > SHORT
            || offset > i64::MAX as u64 - SHORT as u64
            || self.file.get().is_some()
            || self.flags & libc::O_ACCMODE == libc::O_RDONLY
            || self.writes.fetch_add(1, Ordering::Relaxed) >= WRITES
            || cache.find(node).is_some()
        {
            return None;
        }
        let handle = match self.handle() {
            Ok(handle) => handle,
            Err(error) => return Some(Err(error)),
        };
        let change = cache.change_node(node);
        let write = || cache.backend.write_short(node, handle.fh, offset, buf);
        let done = carried(&*cache.backend, write);
        if let Ok((n, Some(attr))) = &done {
            self.wrote(change, attr, offset, &buf[..*n]);
        }
        let done = done.map(|(n, _)| n);
        if let Some(inode) = cache.find(node) {
            let end = offset + buf.len() as u64;
            inode.invalidate_range(offset / 4096, end / 4096, Some(end));
        }
        Some(done)
    }

    /// A write is done. Of a file that was made here, and written from its beginning to its end by
    /// nobody else, it is known what it holds.
    fn wrote(&self, change: NodeChange<'_>, attr: &Attr, offset: u64, data: &[u8]) {
        let mut written = lock(&self.written);
        let before = match written.take() {
            Some(Written::Nothing) => None,
            Some(Written::All(short, after)) if change.follows(after) => Some(short),
            _ => return,
        };
        let before = before.as_ref().map_or(&[][..], |short| short.bytes());
        let end = before.len() + data.len();
        if before.len() as u64 != offset || end as u64 != attr.size || end > PEEK_MAX {
            return;
        }
        let short = Short::new([before, data].concat(), true);
        let after = change.wrote(attr, Some(short.clone()));
        *written = after.map(|after| Written::All(short, after));
    }

    /// The attributes now.
    ///
    /// # Errors
    /// What the server answers.
    pub fn stat(&self) -> io::Result<Attr> {
        match (self.file.get(), self.client.cache.find(self.node())) {
            (Some(file), _) => file.stat(),
            (None, Some(_)) => self.file().stat(),
            (None, None) => {
                let backend = &*self.client.cache.backend;
                let stat = || carried(backend, || backend.getattr(self.node()));
                match stat() {
                    Err(e) if e.raw_os_error() == Some(libc::ESTALE) => {
                        self.handle()?;
                        stat()
                    }
                    done => done,
                }
            }
        }
    }

    /// Cuts it to nothing, as O_TRUNC does.
    pub(crate) fn truncate(&self) -> io::Result<()> {
        let cache = &self.client.cache;
        let node = self.node();
        if cache.find(node).is_some() {
            let file = self.file();
            if file.size() > 0 || file.current_size()? > 0 {
                return file.set_len(0);
            }
        }
        let set = SetAttr {
            size: Some(0),
            handle: Some(self.handle()?.fh),
            ..SetAttr::default()
        };
        let _change = cache.change_node(node);
        cache.backend.setattr(node, &set).map(drop)
    }

    /// The name that the mount's root has for it, once and for some seconds.
    ///
    /// # Errors
    /// What the server answers.
    pub fn name_at_mount(&self) -> io::Result<std::ffi::OsString> {
        let backend = &self.client.cache.backend;
        if !backend.is_alive() {
            return Err(errno(libc::ENOTCONN));
        }
        let handle = self.handle()?;
        backend.name_of(self.node(), handle.fh)
    }
}
