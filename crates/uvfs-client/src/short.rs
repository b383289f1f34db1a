//! Files that are opened for a moment: a short one's contents came with its open, a few bytes are
//! written as they come, and the cache knows nothing of it. A file that is used for more becomes a
//! [`File`] of the cache.
//!
//! Contents hold for as long as the lease that came with them, and only while the cache has no
//! inode of the file and this process does not write to it.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::backend::{Attr, Entry, Lease, NodeId, SetAttr};
use crate::cache::{Handle, errno, lock};
use crate::client::Shared;
use crate::file::{File, OpenOptions};

/// Writes to a file before it is thought to be used for more.
const WRITES: u32 = 4;
/// The longest of them.
const SHORT: usize = 4096;

/// A short file's contents.
#[derive(Debug)]
pub(crate) struct Short {
    valid: AtomicBool,
    bytes: Vec<u8>,
}

/// All contents that are kept.
#[derive(Debug, Default)]
pub(crate) struct Shorts {
    count: AtomicUsize,
    all: Mutex<HashMap<NodeId, Vec<Weak<Short>>>>,
    /// Recalls of nodes without an inode.
    strays: AtomicU64,
}

impl Shorts {
    pub(crate) fn insert(&self, node: NodeId, short: &Arc<Short>) {
        let mut all = lock(&self.all);
        all.entry(node).or_default().push(Arc::downgrade(short));
        self.count.store(all.len(), Ordering::SeqCst);
    }

    fn remove(&self, node: NodeId) {
        let mut all = lock(&self.all);
        if let Some(list) = all.get_mut(&node) {
            list.retain(|short| short.strong_count() > 0);
            if list.is_empty() {
                all.remove(&node);
            }
        }
        self.count.store(all.len(), Ordering::SeqCst);
    }

    /// A node's contents are not right any more.
    pub(crate) fn spoil(&self, node: NodeId) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut all = lock(&self.all);
        for short in all.remove(&node).iter().flatten().filter_map(Weak::upgrade) {
            short.valid.store(false, Ordering::SeqCst);
        }
        self.count.store(all.len(), Ordering::SeqCst);
    }

    /// The server wants the lease back, of contents that may still be on their way here.
    pub(crate) fn recalled(&self, node: NodeId) {
        self.strays.fetch_add(1, Ordering::SeqCst);
        self.spoil(node);
    }

    pub(crate) fn strays(&self) -> u64 {
        self.strays.load(Ordering::SeqCst)
    }
}

/// An open file that may never need the cache.
#[derive(Debug)]
pub struct ShortFile {
    client: Arc<Shared>,
    entry: Entry,
    handle: u64,
    flags: i32,
    /// The lease that came with the contents.
    seq: u64,
    short: Option<Arc<Short>>,
    writes: AtomicU32,
    file: OnceLock<File>,
}

impl ShortFile {
    pub(crate) fn new(
        client: Arc<Shared>,
        entry: Entry,
        handle: u64,
        flags: i32,
        seq: u64,
        contents: Option<(Vec<u8>, u64)>,
    ) -> Self {
        let cache = &client.cache;
        let short = contents.and_then(|(bytes, strays)| {
            let short = Arc::new(Short {
                valid: AtomicBool::new(true),
                bytes,
            });
            let kept = cache.keep_short(entry.node, &short);
            // Recalled before it was kept: nobody would have known whom to tell.
            (kept && cache.shorts.strays() == strays).then_some(short)
        });
        Self {
            client,
            entry,
            handle,
            flags,
            seq,
            short,
            writes: AtomicU32::new(0),
            file: OnceLock::new(),
        }
    }

    /// What is known of it since it was opened: its inode's number does not change.
    pub fn opened_as(&self) -> &Attr {
        &self.entry.attr
    }

    /// The file in the cache, from now on.
    pub fn file(&self) -> &File {
        self.file.get_or_init(|| {
            let cache = &self.client.cache;
            let (node, attr) = (self.entry.node, &self.entry.attr);
            let handle = Handle::new(cache, node, self.handle);
            let inode = cache.inode(node, attr.mtime, attr.size);
            inode.lookups.fetch_add(1, Ordering::AcqRel);
            if self.seq != 0 {
                cache.backend.return_lease(node, self.seq, Lease::None);
            }
            let access = self.flags & libc::O_ACCMODE;
            let options = OpenOptions::new()
                .read(access != libc::O_WRONLY)
                .write(access != libc::O_RDONLY)
                .append(self.flags & libc::O_APPEND != 0 && access != libc::O_RDONLY);
            File::new(self.client.clone(), inode, handle, &options)
        })
    }

    /// Reads, if it can be done without the cache.
    pub fn read_short(&self, buf: &mut [u8], offset: u64) -> Option<usize> {
        let short = self.short.as_ref()?;
        if !short.valid.load(Ordering::SeqCst) || !self.client.cache.backend.is_alive() {
            return None;
        }
        let from = usize::try_from(offset)
            .unwrap_or(usize::MAX)
            .min(short.bytes.len());
        let n = buf.len().min(short.bytes.len() - from);
        buf[..n].copy_from_slice(&short.bytes[from..from + n]);
        // Spoiled meanwhile: what was copied may be older than somebody's write that is over.
        short.valid.load(Ordering::SeqCst).then_some(n)
    }

    /// Writes, if it can be done without the cache.
    pub fn write_short(&self, buf: &[u8], offset: u64) -> Option<io::Result<usize>> {
        let cache = &self.client.cache;
        let node = self.entry.node;
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
        cache.shorts.spoil(node);
        let done = cache.backend.write_short(node, self.handle, offset, buf);
        // Whoever read it meanwhile may have what was there before.
        cache.shorts.spoil(node);
        if let Some(inode) = cache.find(node) {
            let end = offset + buf.len() as u64;
            inode.invalidate_range(offset / 4096, end / 4096, Some(end));
        }
        Some(done)
    }

    /// The attributes now.
    ///
    /// # Errors
    /// What the server answers.
    pub fn stat(&self) -> io::Result<Attr> {
        match (self.file.get(), self.client.cache.find(self.entry.node)) {
            (Some(file), _) => file.stat(),
            (None, Some(_)) => self.file().stat(),
            (None, None) => self.client.cache.backend.getattr(self.entry.node),
        }
    }

    /// Cuts it to nothing, as O_TRUNC does.
    pub(crate) fn truncate(&self) -> io::Result<()> {
        let cache = &self.client.cache;
        if cache.find(self.entry.node).is_some() {
            let file = self.file();
            if file.size() > 0 || file.current_size()? > 0 {
                return file.set_len(0);
            }
        }
        let set = SetAttr {
            size: Some(0),
            handle: Some(self.handle),
            ..SetAttr::default()
        };
        cache.backend.setattr(self.entry.node, &set).map(drop)
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
        backend.name_of(self.entry.node, self.handle)
    }
}

impl Drop for ShortFile {
    fn drop(&mut self) {
        let cache = &self.client.cache;
        if self.short.take().is_some() {
            cache.shorts.remove(self.entry.node);
        }
        if self.file.get().is_none() {
            cache.backend.close(self.entry.node, self.handle, self.seq);
        }
    }
}
