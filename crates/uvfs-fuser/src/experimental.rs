//! File systems of async functions on a tokio runtime (feature `experimental`, as in fuser).

use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use uvfs_server::fs::Context;

use crate::*;

/// The result of a handler.
pub type Result<T> = std::result::Result<T, Errno>;

/// The caller of a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestContext(Context);

impl RequestContext {
    /// The caller's user id.
    pub fn user_id(&self) -> u32 {
        self.0.uid
    }

    /// The caller's group id.
    pub fn group_id(&self) -> u32 {
        self.0.gid
    }

    /// The caller's thread id.
    pub fn process_id(&self) -> u32 {
        self.0.pid
    }

    /// The kernel's number of the request.
    pub fn request_id(&self) -> RequestId {
        RequestId(self.0.unique)
    }
}

impl From<&Request> for RequestContext {
    fn from(request: &Request) -> Self {
        Self(request.cx)
    }
}

/// Takes the entries of a listing.
#[derive(Debug)]
pub struct DirEntListBuilder<'a>(&'a mut ReplyDirectory);

impl DirEntListBuilder<'_> {
    /// Adds an entry; a later listing goes on after it with `offset`. True when there was no room for it,
    /// and it was not added.
    #[must_use]
    pub fn add<T: AsRef<OsStr>>(
        &mut self,
        ino: INodeNo,
        offset: u64,
        kind: FileType,
        name: T,
    ) -> bool {
        self.0.add(ino, offset, kind, name)
    }
}

/// A node that was found.
#[derive(Debug)]
pub struct LookupResponse(Duration, FileAttr, Generation);

impl LookupResponse {
    /// A node, which the kernel may keep, with its name, for `ttl`.
    pub fn new(ttl: Duration, attr: FileAttr, generation: Generation) -> Self {
        Self(ttl, attr, generation)
    }
}

/// Attributes.
#[derive(Debug)]
pub struct GetAttrResponse(Duration, FileAttr);

impl GetAttrResponse {
    /// Attributes that the kernel may keep for `ttl`.
    pub fn new(ttl: Duration, attr: FileAttr) -> Self {
        Self(ttl, attr)
    }
}

/// A file system of async functions.
#[async_trait::async_trait]
pub trait AsyncFilesystem: Send + Sync + 'static {
    /// Finds a name in a directory.
    async fn lookup(
        &self,
        context: &RequestContext,
        parent: INodeNo,
        name: &OsStr,
    ) -> Result<LookupResponse>;

    /// A node's attributes.
    async fn getattr(
        &self,
        context: &RequestContext,
        ino: INodeNo,
        file_handle: Option<FileHandle>,
    ) -> Result<GetAttrResponse>;

    /// Adds `size` bytes to `out_data`; fewer mean the end of the file.
    #[allow(clippy::too_many_arguments)]
    async fn read(
        &self,
        context: &RequestContext,
        ino: INodeNo,
        file_handle: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        lock: Option<LockOwner>,
        out_data: &mut Vec<u8>,
    ) -> Result<()>;

    /// Lists a directory from `offset` on.
    async fn readdir(
        &self,
        context: &RequestContext,
        ino: INodeNo,
        file_handle: FileHandle,
        offset: u64,
        builder: DirEntListBuilder<'_>,
    ) -> Result<()>;
}

/// Serves an [`AsyncFilesystem`] on a tokio runtime of its own.
pub struct TokioAdapter<T: AsyncFilesystem> {
    fs: Arc<T>,
    runtime: tokio::runtime::Runtime,
}

impl<T: AsyncFilesystem> fmt::Debug for TokioAdapter<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokioAdapter").finish_non_exhaustive()
    }
}

impl<T: AsyncFilesystem> TokioAdapter<T> {
    /// Makes a runtime for a file system.
    ///
    /// # Panics
    /// When there can be no threads for the runtime.
    pub fn new(inner: T) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build();
        Self {
            fs: Arc::new(inner),
            runtime: runtime.expect("a runtime needs threads"),
        }
    }
}

impl<T: AsyncFilesystem> Filesystem for TokioAdapter<T> {
    fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (fs, cx, name) = (self.fs.clone(), RequestContext::from(req), name.to_owned());
        self.runtime.spawn(async move {
            match fs.lookup(&cx, parent, &name).await {
                Ok(LookupResponse(ttl, attr, generation)) => reply.entry(&ttl, &attr, generation),
                Err(error) => reply.error(error),
            }
        });
    }

    fn getattr(&self, req: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        let (fs, cx) = (self.fs.clone(), RequestContext::from(req));
        self.runtime.spawn(async move {
            match fs.getattr(&cx, ino, fh).await {
                Ok(GetAttrResponse(ttl, attr)) => reply.attr(&ttl, &attr),
                Err(error) => reply.error(error),
            }
        });
    }

    fn read(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let (fs, cx) = (self.fs.clone(), RequestContext::from(req));
        self.runtime.spawn(async move {
            let mut data = Vec::new();
            let read = fs.read(&cx, ino, fh, offset, size, flags, lock_owner, &mut data);
            match read.await {
                Ok(()) => reply.data(&data),
                Err(error) => reply.error(error),
            }
        });
    }

    fn readdir(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let (fs, cx) = (self.fs.clone(), RequestContext::from(req));
        self.runtime.spawn(async move {
            let listed = fs.readdir(&cx, ino, fh, offset, DirEntListBuilder(&mut reply));
            match listed.await {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error),
            }
        });
    }
}
