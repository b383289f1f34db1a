//! The handlers.

use std::collections::{HashMap, VecDeque};
use std::ffi::CStr;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{self, Poll, Waker};
use std::time::{Duration, Instant, SystemTime};

use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, RwLock, Semaphore};
use uvfs_io::ops;
use uvfs_server::fs::*;
use uvfs_server::interrupt::until_killed;
use uvfs_server::{DEPTH, FileSystem};

use crate::cache::{self, Cache};
use crate::draft::{self, Drafts};
use crate::listing::{Found, Listing, Listings, MOST_NAMES};
use crate::names::There;
use crate::object::{Fetch, Object};
use crate::posix::Posix;
use crate::put::Writing;
use crate::store::{self, Facts, Listed, Store};
use crate::tree::{self, Known, Tree, is_now};
use crate::unseen::Host;
use crate::upload::Conditions;
use crate::window::Window;
use crate::{Options, Writes};

/// How long the kernel may keep names and attributes, at least.
const TTL: Duration = Duration::from_secs(1);
/// Threads that talk to the store.
const WORKERS: usize = 2;
/// Memory that a request to the store takes at most: HTTP and TLS have buffers of half of this.
pub(crate) const REQUEST: u64 = 1 << 20;
/// The largest read is between these, in bytes.
const LEAST_READ: u64 = 32 << 10;
const MOST_READ: u64 = 1 << 20;
/// Objects that were fetched ahead and are held open. An open object has three descriptors.
const MOST_AHEAD: usize = 128;
/// Files from this size on get a backing file. For a smaller one that costs more at each open than the kernel's own
/// pages, which it keeps.
pub(crate) const LARGE_FILE: u64 = 1 << 20;
/// Bytes of an entry of READDIRPLUS before its name.
const DIRENTPLUS: usize = 152;
/// Entries of one answer to READDIRPLUS that the store is asked for, at most.
const ASKED: usize = 256;
/// The longest target of a symbolic link.
const TARGET_MAX: u64 = 4095;
/// The unit of st_blocks.
pub(crate) const SECTOR: u64 = 512;

/// An object store as a file system.
pub struct ObjectFs {
    /// Ends with the file system; what it has under way is dropped.
    runtime: Option<Runtime>,
    pub(crate) fetch: Fetch,
    pub(crate) tree: Arc<Tree>,
    pub(crate) listings: Arc<Listings>,
    /// Programs may change files.
    pub(crate) writing: Option<Arc<Writing>>,
    /// Objects that were fetched ahead, until they are opened or others take their place.
    ahead: Mutex<VecDeque<Arc<Object>>>,
    open: Mutex<Handles>,
    pub(crate) session: OnceLock<Arc<dyn SessionHandle>>,
    /// The kernel, or the cache's file system, takes no backing files.
    no_backing: AtomicBool,
    pub(crate) options: Options,
    /// The times of directories, which stores have none of.
    begun: (i64, u32),
    /// It serves a mount that an earlier server has served.
    goes_on: bool,
}

/// Open files and directories, and the next number.
#[derive(Default)]
struct Handles {
    all: HashMap<u64, Arc<Open>>,
    next: u64,
}

/// A store that was found to answer, and the directory of its cache. It can be made before a process is forked.
pub struct Prepared {
    store: Store,
    /// The threads that talk to the store, unless a process is forked first.
    runtime: Option<Runtime>,
    cache: cache::Lock,
}

impl Prepared {
    /// Asks the store whether it can be served with these options, and takes a directory of the cache. If the process `forks`
    /// before it serves, no thread is left.
    ///
    /// # Errors
    /// A URI that names no store, a store or prefix that does not answer or may not be listed, and a cache directory that
    /// can't be made or is used by too many mounts.
    pub fn new(uri: &str, options: &Options, forks: bool) -> io::Result<Self> {
        let mut store = Store::open(uri, options)?;
        let runtime = match forks {
            true => runtime_to_ask()?,
            false => runtime()?,
        };
        let answer = runtime.block_on(async {
            store.holds("").await?;
            if options.writes != Writes::No {
                store.puts = store.probe().await?;
            }
            Ok::<_, Error>(())
        });
        answer.map_err(|error| io::Error::other(error.to_string()))?;
        let dir = (options.cache_dir.clone()).map_or_else(default_dir, Ok)?;
        let cache = cache::Lock::take(&dir, store.name())?;
        cache.note(store.puts.bits())?;
        Ok(Self {
            store,
            runtime: (!forks).then_some(runtime),
            cache,
        })
    }

    /// The same for a mount that an earlier program of this process has served, which had asked the store. `cache` is what
    /// [`Prepared::cache`] was there.
    ///
    /// # Errors
    /// A URI that names no store, and a descriptor of something else.
    pub fn again(uri: &str, options: &Options, cache: OwnedFd) -> io::Result<Self> {
        let cache = cache::Lock::again(cache)?;
        let mut store = Store::open(uri, options)?;
        store.puts = Conditions::from_bits(cache.noted()?);
        Ok(Self {
            store,
            runtime: None,
            cache,
        })
    }

    /// The descriptor that the cache's directory is locked by.
    pub fn cache(&self) -> BorrowedFd<'_> {
        self.cache.as_fd()
    }
}

/// For requests before a process forks: no thread.
pub(crate) fn runtime_to_ask() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
}

/// The threads that talk to the store, which begin at once.
pub(crate) fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("uvfs-store")
        .enable_all()
        .build()
}

/// An open file or directory.
pub(crate) enum Open {
    File {
        known: Arc<Known>,
        window: Mutex<Window>,
        flags: OFlags,
        by: By,
    },
    /// The listing that READDIR goes through.
    Directory(Mutex<Option<Arc<Listing>>>),
}

impl Open {
    /// The file, if it is open for writing. The kernel sends nothing else, but a client may.
    pub(crate) fn written(&self) -> Result<&Arc<Known>> {
        match self {
            Self::File { known, flags, .. } if flags.intersects(OFlags::RWMODE) => Ok(known),
            _ => Err(Errno::BADF.into()),
        }
    }
}

/// The way of an open file's reads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// The kernel by itself, from this backing file.
    Backed(i32),
    /// The kernel by requests.
    Kernel,
    /// A client.
    Client,
}

impl ObjectFs {
    /// Serves the store of a URI such as `s3://bucket/prefix`. Credentials come from where the store's tools look for them.
    ///
    /// # Errors
    /// A URI that names no store, a store or prefix that does not answer or may not be listed, and a cache directory that
    /// can't be made or is used by too many mounts.
    pub fn open(uri: &str, options: Options) -> io::Result<Self> {
        let prepared = Prepared::new(uri, &options, false)?;
        Self::serve(prepared, options, false)
    }

    /// The same for a store that was prepared with these options. With `goes_on`, a server of the mount was there before, and
    /// [`Survive`] gives what it left.
    ///
    /// # Errors
    /// A cache that can't be read or written; no thread.
    pub fn serve(prepared: Prepared, options: Options, goes_on: bool) -> io::Result<Self> {
        let Prepared {
            store,
            runtime: begun,
            cache,
        } = prepared;
        let runtime = begun.map_or_else(runtime, Ok)?;
        let writes = options.writes != Writes::No;
        let cache = Cache::open(cache, options.cache_size)?;
        let cache = Arc::new(cache);
        let permits = permits(&options);
        let fetch = Fetch {
            store,
            runtime: runtime.handle().clone(),
            cache,
            permits: Arc::new(Semaphore::new(permits)),
        };
        let drafts = if goes_on { Drafts::go_on } else { Drafts::open };
        let (tree, listings) = (Arc::new(Tree::new()), Arc::default());
        let writing = match writes {
            true => Some(Arc::new(Writing {
                fetch: fetch.clone(),
                tree: tree.clone(),
                listings: Arc::clone(&listings),
                drafts: drafts(fetch.cache.clone(), options.writes == Writes::Back)?,
                permits,
                back: options.writes == Writes::Back,
                local_fsync: options.local_fsync,
                turns: Semaphore::new(options.requests.max(1)),
                soon: Mutex::default(),
                host: match options.writes {
                    Writes::Back => Host::of(&fetch.cache),
                    _ => Host::default(),
                },
                mapped: Mutex::default(),
                maps: Notify::new(),
                begun: Notify::new(),
                hurry: Notify::new(),
                moving: RwLock::default(),
            })),
            false => {
                draft::warn_of(&fetch.cache)?;
                None
            }
        };
        Ok(Self {
            runtime: Some(runtime),
            fetch,
            tree,
            listings,
            writing,
            ahead: Mutex::default(),
            open: Mutex::default(),
            session: OnceLock::new(),
            no_backing: AtomicBool::new(!options.backing_files),
            options,
            begun: timespec(SystemTime::now()),
            goes_on,
        })
    }

    fn ttl(&self) -> Duration {
        self.options.ttl.max(TTL)
    }

    /// How long the kernel may keep attributes. Stores through a mapping move the times of what the kernel writes by itself.
    fn attr_ttl(&self, known: &Known) -> Duration {
        match known.state().backing {
            Some(_) if self.writing.is_some() => Duration::ZERO,
            _ => self.ttl(),
        }
    }

    pub(crate) fn known(&self, node: Node) -> Result<Arc<Known>> {
        Ok(self.tree.get(node).ok_or(Errno::STALE)?)
    }

    pub(crate) fn handle(&self, fh: Handle) -> Result<Arc<Open>> {
        let open = uvfs_sys::lock(&self.open);
        Ok(open.all.get(&fh.0).ok_or(Errno::BADF)?.clone())
    }

    fn add(&self, open: Open) -> Handle {
        let mut handles = uvfs_sys::lock(&self.open);
        let fh = handles.next;
        handles.next += 1;
        handles.all.insert(fh, Arc::new(open));
        Handle(fh)
    }

    /// Gives an open file its number from before.
    pub(crate) fn restore(&self, fh: Handle, open: Open) -> io::Result<()> {
        let mut handles = uvfs_sys::lock(&self.open);
        if handles.all.contains_key(&fh.0) {
            return Err(Errno::EXIST.into());
        }
        handles.next = handles.next.max(fh.0 + 1);
        handles.all.insert(fh.0, Arc::new(open));
        Ok(())
    }

    /// All are restored. The next ones get numbers that the earlier server has not given.
    pub(crate) fn restored_handles(&self) {
        uvfs_sys::lock(&self.open).next += tree::RESERVED;
    }

    /// A file or directory is closed.
    pub(crate) fn close(&self, fh: Handle) {
        let open = uvfs_sys::lock(&self.open).all.remove(&fh.0);
        if let Some(open) = open
            && let Open::File {
                known, by, flags, ..
            } = &*open
        {
            self.end_use(known, *flags, *by);
        }
    }

    /// Runs a request to the store on the threads for that. It begins at once.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        cx: &Context,
        request: impl Future<Output = Result<T>> + Send + 'static,
    ) -> impl Future<Output = Result<T>> {
        // The handler's future has none of the request's: the compiler bounds how deep they may nest.
        let task = self.fetch.runtime.spawn(request);
        async move {
            match until_killed(cx, task).await.ok_or(Errno::INTR)? {
                Ok(answer) => answer,
                Err(error) => Err(Error::new(Errno::IO, "a request to the store").because(error)),
            }
        }
    }

    /// The same for what mostly waits for nothing: it begins on the handler's thread, and leaves that only where it waits.
    /// Another thread would have to be woken, and to wake the handler's.
    pub(crate) fn at_once<T: Send + 'static>(
        &self,
        cx: &Context,
        request: impl Future<Output = Result<T>> + Send + 'static,
    ) -> impl Future<Output = Result<T>> {
        let mut request = Box::pin(request) as futures_util::future::BoxFuture<'static, _>;
        let begun = {
            let _timers = self.fetch.runtime.enter();
            let mut nothing = task::Context::from_waker(Waker::noop());
            request.as_mut().poll(&mut nothing)
        };
        async move {
            match begun {
                Poll::Ready(done) => done,
                Poll::Pending => self.ask(cx, request).await,
            }
        }
    }

    /// Asks the store whether a key is a file or a directory, and for its attributes.
    pub(crate) async fn find(
        &self,
        cx: &Context,
        key: &str,
        directory: &str,
    ) -> Result<Option<Facts>> {
        let store = self.fetch.store.clone();
        let (file, below) = (key.to_owned(), directory.to_owned());
        let all = async move {
            let asked = (store.stat(&file), store.holds(&below), store.facts(&below));
            let (file, any, marker) = futures_util::future::join3(asked.0, asked.1, asked.2).await;
            let (file, any) = (file?, any?);
            Ok(if any { marker? } else { file })
        };
        self.ask(cx, all).await
    }

    /// Looks a key up in a listing of its directory that is still valid. Gives the attributes, and when the server asked the
    /// store for that listing; `None` if the store has to be asked for the key.
    pub(crate) async fn listed(
        &self,
        cx: &Context,
        parent: &Known,
        key: &str,
    ) -> Result<Option<(Option<Facts>, Instant)>> {
        // A listing has no user metadata.
        if self.options.metadata || self.options.ttl.is_zero() {
            return Ok(None);
        }
        let directory = parent.key();
        let name = &key[directory.len()..];
        let mut found = (self.listings).look_up(&directory, name, self.options.ttl);
        if matches!(found, Found::List) {
            match self.list(cx, parent, MOST_NAMES).await {
                // Listing may be forbidden.
                Err(error) if error == Errno::ACCESS => return Ok(None),
                listed => listed?,
            };
            found = (self.listings).look_up(&directory, name, self.options.ttl);
        }
        Ok(match found {
            Found::Known(facts, asked) => Some((facts, asked)),
            Found::Ask | Found::List => None,
        })
    }

    /// Asks the store for a listing, and keeps it. `None` if it has more than `most` names.
    async fn list(&self, cx: &Context, known: &Known, most: usize) -> Result<Option<Arc<Listing>>> {
        let (store, begun, key) = (self.fetch.store.clone(), Instant::now(), known.key());
        // A store need not know a directory that is only on its way there.
        if let Some(writing) = &self.writing
            && writing.is_new(&key)
        {
            return Ok(Some(Arc::new(Listing::new(&key, Vec::new(), begun))));
        }
        let directory = key.clone();
        let names = self.ask(cx, async move { store.list(&directory, most).await });
        let listing = names
            .await?
            .map(|names| Arc::new(Listing::new(&key, names, begun)));
        self.listings.keep(&key, listing.clone());
        Ok(listing)
    }

    /// Fetches the small files that a program which walks through a directory opens next.
    fn fetch_ahead(&self, known: &Known) {
        let key = known.key();
        let (directory, name) = split(&key);
        for (key, version) in self.listings.opened(directory, name) {
            // Opening its files is of no use to a program that the kernel has the pages for.
            if self.fetch.cache.is_whole(&key, &version) {
                continue;
            }
            // The cache's error is reported when the program opens this file.
            let Ok(object) = self.fetch.cache.object(&key, &version) else {
                return;
            };
            object.fetch(&self.fetch);
            let mut ahead = uvfs_sys::lock(&self.ahead);
            ahead.push_back(object);
            if ahead.len() > MOST_AHEAD {
                ahead.pop_front();
            }
        }
    }

    /// Asks the store for the attributes of each key. A key gives `None` if its object is gone, or if the store shows it in
    /// listings alone.
    async fn facts(&self, cx: &Context, keys: Vec<String>) -> Result<Vec<Option<Facts>>> {
        let (store, writing) = (self.fetch.store.clone(), self.writing.clone());
        let ask = move |key: String| {
            let store = store.clone();
            let made = writing.as_ref().and_then(|writing| writing.made(&key));
            async move {
                if let Some(made) = made {
                    return Ok(Some(made.directory()));
                }
                match store.facts(&key).await {
                    Err(error) if error == Errno::ACCESS => Ok(None),
                    found => found,
                }
            }
        };
        let asked = stream::iter(keys.into_iter().map(ask));
        let asked = asked.buffered(self.options.requests.max(1));
        self.ask(cx, asked.try_collect()).await
    }

    /// Makes sure that a file's version is the store's, or was within `age`.
    async fn is_current(&self, cx: &Context, known: &Known, age: Duration) -> Result<()> {
        if known.is_directory() && !self.options.metadata {
            return Ok(());
        }
        let asked = {
            let state = known.state();
            // The store does not have what programs wrote.
            if state.draft.is_some() {
                return Ok(());
            }
            state.asked
        };
        if asked.is_some_and(|asked| asked.elapsed() < age) {
            return Ok(());
        }
        let (store, key) = (self.fetch.store.clone(), known.key());
        let asked = Instant::now();
        let facts = self.ask(cx, async move { store.facts(&key).await });
        match facts.await? {
            Some(now) if is_now(known, &now, asked) => Ok(()),
            // The kernel looks the name up again.
            _ => {
                self.listings.forget(split(&known.key()).0);
                Err(Errno::STALE.into())
            }
        }
    }

    pub(crate) fn attr(&self, known: &Known) -> Attr {
        let state = known.state();
        let written = state.draft.as_ref();
        let written = written.map(|draft| (draft.state().posix, draft.metadata()));
        let posix = match &written {
            Some((posix, _)) => posix,
            None => &state.posix,
        };
        let (kind, mode) = match known.is_directory() {
            true => (FileType::Directory, self.options.dir_mode),
            false => (FileType::RegularFile, self.options.file_mode),
        };
        let (kind, rdev) = match posix.special {
            Some(special) if kind == FileType::RegularFile => special,
            _ => (kind, 0),
        };
        let mode = Mode::from_raw_mode(posix.mode.unwrap_or(mode));
        let mut attr = attr(Node(known.ino()), kind, mode);
        attr.rdev = rdev;
        if state.removed {
            attr.nlink = 0;
        }
        if let Some(version) = &state.version
            && let FileType::RegularFile | FileType::Symlink = kind
        {
            attr.size = version.size;
            attr.blocks = version.size.div_ceil(SECTOR);
        }
        let mtime = state.mtime().unwrap_or(self.begun);
        let changed = state.written.map(|[_, changed]| changed);
        let changed = posix.ctime.or(changed).or(state.stored());
        let unsigned = |(seconds, nanos): (i64, u32)| (seconds.cast_unsigned(), nanos);
        (attr.mtime, attr.mtimensec) = unsigned(mtime);
        (attr.ctime, attr.ctimensec) = unsigned(changed.unwrap_or(self.begun));
        (attr.atime, attr.atimensec) = unsigned(posix.atime.unwrap_or(mtime));
        attr.uid = posix.uid.unwrap_or(self.options.uid);
        attr.gid = posix.gid.unwrap_or(self.options.gid);
        if let Some((_, Ok(file))) = &written {
            attr.size = file.len();
            attr.blocks = file.len().div_ceil(SECTOR);
            let [mtime, ctime] = times(file).map(unsigned);
            (attr.mtime, attr.mtimensec) = mtime;
            (attr.ctime, attr.ctimensec) = ctime;
        }
        attr
    }

    pub(crate) fn entry(&self, known: &Known) -> Entry {
        let mut entry = Entry::new(self.attr(known), self.ttl());
        entry.attr_ttl = self.attr_ttl(known);
        entry.node = known.node;
        entry
    }

    /// The answer to a lookup of a name that the store did not have when it was `asked`.
    fn missing(&self, asked: Instant) -> Result<Entry> {
        match self.options.ttl.saturating_sub(asked.elapsed()) {
            Duration::ZERO => Err(Errno::NOENT.into()),
            left => Ok(Entry::missing(left)),
        }
    }

    /// Whether the kernel keeps listings. Not with metadata: names of a kept listing would be looked up one by one, and
    /// READDIRPLUS asks the store for many at a time.
    fn keeps_listings(&self) -> bool {
        !self.options.ttl.is_zero() && !self.options.metadata
    }

    /// Does what blocks on a thread for that, for a handler.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        cx: &Context,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let done = self.fetch.runtime.spawn_blocking(work);
        let done = async move { Ok(done.await.map_err(io::Error::other).flatten()?) };
        self.ask(cx, done).await
    }

    /// Has the kernel drop what it keeps of a directory's listing if that may be older than `ttl=`.
    async fn drop_old(&self, cx: &Context, known: &Arc<Known>) -> Result<()> {
        let session = self.session.get().ok_or(Errno::NODEV)?.clone();
        if !self.keeps_listings() || !known.state().pages.expire(self.options.ttl) {
            return Ok(());
        }
        let known = known.clone();
        // The kernel waits for programs that are reading its pages, and a thread for handlers must not.
        let drop = move || {
            let kernel = session.notifier();
            let dropped = kernel.and_then(|kernel| kernel.invalidate_inode(known.node, 0, 0));
            known.state().pages.dropped();
            dropped
        };
        self.blocking(cx, drop).await
    }

    /// Whether the kernel takes backing files.
    pub(crate) fn backs(&self) -> bool {
        !self.no_backing.load(Ordering::Relaxed)
    }

    /// Registers the data file of a version for a node that is open nowhere else, if all of it is there.
    fn back(&self, known: &Known, object: &Object) -> Option<i32> {
        if !object.back() {
            return None;
        }
        let id = self.register(known.node, object.data().as_fd());
        if id.is_none() {
            object.not_backed();
        }
        id
    }

    /// Registers a backing file for a node that is open nowhere else.
    pub(crate) fn register(&self, node: Node, file: BorrowedFd<'_>) -> Option<i32> {
        match self.session.get()?.register_backing(node, file) {
            Ok(id) => Some(id),
            Err(error) => {
                if Errno::from_io_error(&error) != Some(Errno::BUSY) {
                    tracing::debug!(%error, "a backing file is refused; going on without");
                    self.no_backing.store(true, Ordering::Relaxed);
                }
                None
            }
        }
    }

    /// Opens a file that has just been made.
    fn open_new(&self, known: Arc<Known>, how: &OpenHow) -> Result<(Entry, Opened)> {
        let opened = self.open_file(known.clone(), how.flags, how.origin);
        let (fh, by) = opened.inspect_err(|_| self.tree.forget(known.node, 1))?;
        Ok((self.entry(&known), self.opened(fh, by, how.flags)))
    }

    /// Counts an open, and decides whether the kernel reads the file by itself. In one step: the kernel holds an inode
    /// either by a backing file or by its own pages.
    fn begin_use(&self, known: &Known, flags: OFlags, origin: Origin) -> Result<By> {
        let mut state = known.state();
        if let Some(draft) = &state.draft {
            draft.contents()?;
        }
        let by = self.use_by(known, &mut state, flags, origin)?;
        state.writers += u64::from(flags.intersects(OFlags::RWMODE));
        Ok(by)
    }

    fn use_by(
        &self,
        known: &Known,
        state: &mut tree::State,
        flags: OFlags,
        origin: Origin,
    ) -> Result<By> {
        if origin != Origin::Kernel {
            if state.draft.is_none() {
                self.object(known, state)?;
            }
            state.clients += 1;
            return Ok(By::Client);
        }
        if let Some((id, opens)) = &mut state.backing {
            *opens += 1;
            let by = By::Backed(*id);
            self.back_again(state, flags);
            return Ok(by);
        }
        let version = state.version.as_ref().ok_or(Errno::ISDIR)?;
        let is_large = version.size >= LARGE_FILE;
        let id = match state.plain == 0 && self.backs() {
            // Programs may write it later.
            true if self.writing.is_some() => self.back_draft(known, state, flags),
            true if is_large => self.back(known, &*self.object(known, state)?),
            _ => None,
        };
        if let Some(id) = id {
            state.backing = Some((id, 1));
            return Ok(By::Backed(id));
        }
        state.plain += 1;
        Ok(By::Kernel)
    }

    /// The pieces of an open file. A small file has none before it is read: the kernel may have it whole.
    pub(crate) fn object(&self, known: &Known, state: &mut tree::State) -> Result<Arc<Object>> {
        if let Some(object) = &state.object {
            return Ok(object.clone());
        }
        let version = state.version.as_ref().ok_or(Errno::ISDIR)?;
        let object = self.fetch.cache.object(&known.key(), version)?;
        state.object = Some(object.clone());
        Ok(object)
    }

    /// Makes a handle of a file.
    pub(crate) fn open_file(
        &self,
        known: Arc<Known>,
        flags: OFlags,
        origin: Origin,
    ) -> Result<(Handle, By)> {
        let by = self.begin_use(&known, flags, origin)?;
        let open = Open::File {
            known,
            window: Mutex::default(),
            flags,
            by,
        };
        Ok((self.add(open), by))
    }

    /// A file was closed.
    fn end_use(&self, known: &Known, flags: OFlags, by: By) {
        let mut state = known.state();
        state.writers -= u64::from(flags.intersects(OFlags::RWMODE));
        match by {
            By::Client => state.clients -= 1,
            By::Kernel => state.plain -= 1,
            By::Backed(id) => {
                let (_, opens) = state.backing.as_mut().expect("it was open");
                *opens -= 1;
                if *opens == 0 {
                    state.backing = None;
                    if let Some(session) = self.session.get() {
                        session.unregister_backing(known.node, id);
                    }
                    if let Some(object) = &state.object
                        && self.writing.is_none()
                    {
                        object.not_backed();
                    }
                }
            }
        }
        if !state.is_open() {
            state.object = None;
        }
        drop(state);
        self.rest(known);
    }

    /// Opens what another program has made meanwhile.
    async fn open_made(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        if how.origin == Origin::Kernel {
            // The kernel looks it up, and checks whether the program may open it.
            return Err(Errno::STALE.into());
        }
        let entry = self.lookup(cx, parent, name).await?;
        if entry.node == Node::default() {
            return Err(Errno::NOENT.into());
        }
        let opened = self.open(cx, entry.node, how).await;
        let opened = opened.inspect_err(|_| self.tree.forget(entry.node, 1))?;
        Ok((entry, opened))
    }

    /// Reads from the store into the answer alone: the cache has no room.
    async fn read_around(
        &self,
        cx: &Context,
        object: &Arc<Object>,
        range: std::ops::Range<u64>,
        data: &Payload,
    ) -> Result<usize> {
        let (fetch, object) = (self.fetch.clone(), object.clone());
        let read = async move {
            let _permit = fetch.store.permit(&object.key, &fetch.permits).await?;
            (fetch.store.read(&object.key, &object.version, range)).await
        };
        let bytes = self.ask(cx, read).await?;
        data.copy_in(0, &bytes);
        Ok(bytes.len())
    }
}

impl Drop for ObjectFs {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Requests for data at a time.
fn permits(options: &Options) -> usize {
    let fitting = usize::try_from(options.memory / 2 / REQUEST).unwrap_or(usize::MAX);
    options.requests.min(fitting).max(1)
}

/// The largest read, so that all that the kernel may send at a time fit into their half of the memory.
fn largest_read(options: &Options) -> u32 {
    let all = uvfs_server::mount::online_cores();
    let cores = all.unwrap_or_else(|_| std::thread::available_parallelism().map_or(1, usize::from));
    let each = options.memory / 2 / (DEPTH * cores) as u64;
    // Whole pages.
    (each.clamp(LEAST_READ, MOST_READ) & !(LEAST_READ - 1)) as u32
}

fn default_dir() -> io::Result<PathBuf> {
    let dir = |name| std::env::var_os(name).map(PathBuf::from);
    let cache = dir("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    let cache = cache.or_else(|| Some(dir("HOME")?.join(".cache")));
    let none =
        "neither XDG_CACHE_HOME nor HOME is set: -o cache_dir= has to say where the cache is";
    Ok(cache.ok_or_else(|| io::Error::other(none))?.join("uvfs"))
}

/// When a file was modified and changed.
pub(crate) fn times(file: &Metadata) -> [(i64, u32); 2] {
    [
        (file.mtime(), file.mtime_nsec() as u32),
        (file.ctime(), file.ctime_nsec() as u32),
    ]
}

/// The attributes of a file that a program makes.
fn posix_of(cx: &Context, new: &NewNode) -> Posix {
    let is_special = !matches!(new.kind, FileType::RegularFile | FileType::Directory);
    Posix {
        special: Some((new.kind, new.rdev)).filter(|_| is_special),
        mode: Some(new.mode.as_raw_mode() & 0o7777),
        uid: Some(cx.uid),
        gid: Some(cx.gid),
        ..Posix::default()
    }
}

/// The directory of a file, and its name.
pub(crate) fn split(key: &str) -> (&str, &str) {
    key.split_at(key.rfind('/').map_or(0, |slash| slash + 1))
}

/// The key of a name in a directory.
pub(crate) fn child(directory: &Known, name: &CStr) -> Result<String> {
    if name.count_bytes() > store::NAME_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    let name = name.to_str().map_err(|_| Errno::NOENT)?;
    let key = format!("{}{name}", directory.key());
    match store::is_name(name) && store::is_reached(&key) {
        true => Ok(key),
        false => Err(Errno::NOENT.into()),
    }
}

impl FileSystem for ObjectFs {
    fn init(&self, config: &mut Config, session: Arc<dyn SessionHandle>) -> Result<()> {
        if session.outlives() {
            let _ = self.tree.session.set(session.clone());
        }
        let _ = self.session.set(session);
        if let Some(writing) = &self.writing {
            // The kernel truncates after it has opened, because only it knows whether a program runs from the file.
            config.wanted -= InitFlags::ATOMIC_O_TRUNC;
            // Clients change sizes, which the kernel then has to ask for before it reads.
            config.wanted |= InitFlags::AUTO_INVAL_DATA;
            writing.watch_mapped();
            if writing.back {
                writing.bring_in_time();
                writing.commit_each_second();
            }
            if !self.goes_on {
                writing.resume();
            }
        }
        config.wanted |= InitFlags::ASYNC_READ
            | InitFlags::ASYNC_DIO
            | InitFlags::DO_READDIRPLUS
            | InitFlags::MAX_PAGES
            | InitFlags::NO_EXPORT_SUPPORT
            | InitFlags::PARALLEL_DIROPS;
        config.wanted -= InitFlags::WRITEBACK_CACHE | InitFlags::EXPORT_SUPPORT;
        // The protocol has one limit for reads and writes.
        config.max_write = config.max_write.min(largest_read(&self.options));
        // An answer with attributes costs a request for each name: only what looks at them gets it.
        if self.options.metadata {
            config.wanted |= InitFlags::READDIRPLUS_AUTO;
        }
        if self.options.backing_files && config.offered.contains(InitFlags::PASSTHROUGH) {
            config.wanted |= InitFlags::PASSTHROUGH;
            config.max_stack_depth = 1;
        } else {
            self.no_backing.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        let waiting = self.writing.as_ref().map_or(0, |all| all.drafts.waiting());
        let mut all = self.fetch.store.counters.all();
        all.push(("store_changes_waiting", waiting as u64));
        all
    }

    fn clients(&self) -> Option<&dyn ClientSupport> {
        Some(self)
    }

    fn survive(&self) -> Option<&dyn Survive> {
        Some(self)
    }

    fn destroy(&self) {
        let (Some(runtime), Some(writing)) = (&self.runtime, &self.writing) else {
            return;
        };
        let all = writing.clone();
        let patience = self.options.timeout;
        let left = runtime.block_on(async move { all.put_all(patience).await });
        if left > 0 {
            tracing::error!("{left} changes are not in the store: the next mount goes on");
        }
        self.fetch.store.end();
    }

    fn forget(&self, node: Node, lookups: u64) {
        self.tree.forget(node, lookups);
    }

    async fn lookup(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Entry> {
        let parent = self.known(parent)?;
        let key = child(&parent, name)?;
        let known = loop {
            let (there, asked) = self.there(cx, &parent, &key).await?;
            match there {
                None => return self.missing(asked),
                Some(There::Draft(draft)) => {
                    if let Some(known) = self.tree.drafted(&key, &draft) {
                        break known;
                    }
                }
                Some(There::Facts(facts)) => {
                    let key = match facts.version {
                        None => format!("{key}/"),
                        Some(_) => key,
                    };
                    break self.tree.looked_up(key, facts, asked);
                }
            }
        };
        Ok(self.entry(&known))
    }

    async fn getattr(&self, cx: &Context, node: Node, _: Option<Handle>) -> Result<Attributes> {
        let known = self.known(node)?;
        // The kernel asks before it lists a directory anew for a program that has it open.
        if known.is_directory() {
            self.drop_old(cx, &known).await?;
        }
        // An open file is what it was opened as.
        if !known.state().is_open() {
            self.is_current(cx, &known, self.ttl()).await?;
        }
        Ok(Attributes::new(self.attr(&known), self.attr_ttl(&known)))
    }

    async fn readlink(&self, cx: &Context, node: Node) -> Result<Bytes> {
        let known = self.known(node)?;
        let version = {
            let state = known.state();
            if let Some(draft) = &state.draft {
                let mut target = Vec::new();
                File::open(draft.path())?
                    .take(TARGET_MAX)
                    .read_to_end(&mut target)?;
                return Ok(target);
            }
            state.version.clone().ok_or(Errno::INVAL)?
        };
        let key = known.key();
        if version.size > TARGET_MAX {
            let why = format!("object {key:?} is too long for a symbolic link");
            return Err(Error::new(Errno::NAMETOOLONG, why));
        }
        let store = self.fetch.store.clone();
        let read = async move { store.read(&key, &version, 0..version.size).await };
        let target = self.ask(cx, read).await?;
        match target.is_empty() || target.contains(&0) {
            true => Err(Error::new(
                Errno::IO,
                format!("object {:?} is no path", known.key()),
            )),
            false => Ok(target),
        }
    }

    async fn open(&self, cx: &Context, node: Node, how: &OpenHow) -> Result<Opened> {
        let known = self.known(node)?;
        if how.writes() {
            self.writing()?;
        }
        self.is_current(cx, &known, self.options.ttl).await?;
        self.fetch_ahead(&known);
        let _begun = self.prepare(cx, &known, how).await;
        let (fh, by) = self.open_file(known.clone(), how.flags, how.origin)?;
        let mut opened = self.opened(fh, by, how.flags);
        opened.changed = self.writing.is_some() && matches!(by, By::Backed(_));
        if !how.writes() {
            opened.flags |= OpenFlags::NOFLUSH;
        }
        Ok(opened)
    }

    async fn release(
        &self,
        _: &Context,
        _: Node,
        fh: Handle,
        _: OFlags,
        _: Option<LockOwner>,
    ) -> Result<()> {
        self.close(fh);
        Ok(())
    }

    async fn read(&self, cx: &Context, _: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let open = self.handle(how.fh)?;
        let Open::File {
            known,
            window,
            flags,
            ..
        } = &*open
        else {
            return Err(Errno::ISDIR.into());
        };
        if flags.contains(OFlags::WRONLY) {
            return Err(Errno::BADF.into());
        }
        let contents = {
            let state = known.state();
            let draft = state.draft.clone();
            let open = draft.map(|draft| Ok::<_, Error>((draft.contents()?, draft)));
            open.transpose()?
        };
        if let Some((contents, draft)) = contents {
            if !draft.has(how.offset) {
                let why = format!(
                    "object {:?} is larger than the cache: it can be read when it is closed",
                    known.key()
                );
                return Err(Error::new(Errno::IO, why));
            }
            return Ok(ops::read_at(&contents.data, data, how.offset, 0).await?);
        }
        let object = self.object(known, &mut known.state())?;
        let size = object.version.size;
        let range = how.offset.min(size)..(how.offset.saturating_add(data.len() as u64)).min(size);
        if range.is_empty() {
            return Ok(0);
        }
        let ahead = uvfs_sys::lock(window).read(range.clone(), size);
        let pieces = object.have(&self.fetch, range.clone(), ahead);
        let pinned = match until_killed(cx, pieces).await.ok_or(Errno::INTR)? {
            Err(error) if error == Errno::NOSPC => {
                return self.read_around(cx, &object, range, data).await;
            }
            pinned => pinned.inspect_err(|error| {
                // The next open asks for the version that there is now, also within `ttl=`.
                if *error == Errno::STALE {
                    known.state().asked = None;
                    self.listings.forget(split(&known.key()).0);
                }
            })?,
        };
        let data = data.slice(0..(range.end - range.start) as usize);
        let read = ops::read_at(object.data(), &data, range.start, 0).await;
        drop(pinned);
        Ok(read?)
    }

    async fn write(&self, cx: &Context, _: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let open = self.handle(how.fh)?;
        self.write_to(cx, open.written()?, how, data).await
    }

    async fn flush(&self, cx: &Context, _: Node, fh: Handle, _: LockOwner) -> Result<()> {
        self.sync(cx, fh, false).await
    }

    async fn fsync(&self, cx: &Context, _: Node, fh: Handle, _: bool) -> Result<()> {
        self.sync(cx, fh, true).await
    }

    async fn fsyncdir(&self, cx: &Context, node: Node, _: Handle, _: bool) -> Result<()> {
        self.sync_names(cx, node).await
    }

    async fn fallocate(
        &self,
        cx: &Context,
        _: Node,
        fh: Handle,
        offset: u64,
        len: u64,
        mode: FallocateFlags,
    ) -> Result<()> {
        self.allocate(cx, fh, (offset, len), mode).await
    }

    async fn setattr(&self, cx: &Context, node: Node, set: &SetAttr) -> Result<Attributes> {
        self.set(cx, node, set).await?;
        let known = self.known(node)?;
        self.tree.save_again(&known);
        Ok(Attributes::new(self.attr(&known), self.attr_ttl(&known)))
    }

    async fn create(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        let known = match self.make_file(cx, parent, name, posix_of(cx, new)).await {
            Err(error) if error == Errno::EXIST && !how.flags.contains(OFlags::EXCL) => {
                return Box::pin(self.open_made(cx, parent, name, how)).await;
            }
            made => made?,
        };
        self.open_new(known, how)
    }

    async fn tmpfile(
        &self,
        cx: &Context,
        parent: Node,
        new: &NewNode,
        how: &OpenHow,
    ) -> Result<(Entry, Opened)> {
        self.open_new(self.make_nameless(parent, posix_of(cx, new))?, how)
    }

    async fn mknod(&self, cx: &Context, parent: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        let posix = posix_of(cx, new);
        Ok(self.entry(&*self.make_node(cx, parent, name, &[], posix).await?))
    }

    async fn symlink(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        target: &CStr,
    ) -> Result<Entry> {
        let posix = Posix {
            special: Some((FileType::Symlink, 0)),
            mode: Some(0o777),
            uid: Some(cx.uid),
            gid: Some(cx.gid),
            ..Posix::default()
        };
        let target = target.to_bytes();
        Ok(self.entry(&*self.make_node(cx, parent, name, target, posix).await?))
    }

    async fn link(&self, cx: &Context, node: Node, parent: Node, name: &CStr) -> Result<Entry> {
        Ok(self.entry(&*self.give_name(cx, node, parent, name).await?))
    }

    async fn mkdir(&self, cx: &Context, parent: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        let made = self.make_directory(cx, parent, name, posix_of(cx, new));
        Ok(self.entry(&*made.await?))
    }

    async fn unlink(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        self.remove_file(cx, parent, name).await
    }

    async fn rmdir(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        self.remove_directory(cx, parent, name).await
    }

    async fn rename(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new_parent: Node,
        new_name: &CStr,
        flags: RenameFlags,
    ) -> Result<Unlinked> {
        self.change_name(cx, (parent, name), (new_parent, new_name), flags)
            .await
    }

    async fn opendir(&self, cx: &Context, node: Node, _: &OpenHow) -> Result<Opened> {
        self.drop_old(cx, &self.known(node)?).await?;
        let opened = Opened::new(self.add(Open::Directory(Mutex::default())));
        Ok(match self.keeps_listings() {
            true => opened.with_flags(OpenFlags::CACHE_DIR | OpenFlags::KEEP_CACHE),
            false => opened,
        })
    }

    async fn releasedir(&self, _: &Context, _: Node, fh: Handle, _: OFlags) -> Result<()> {
        self.close(fh);
        Ok(())
    }

    async fn readdir(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let (known, open) = (self.known(node)?, self.handle(fh)?);
        let Open::Directory(listing) = &*open else {
            return Err(Errno::NOTDIR.into());
        };
        // From its beginning it is listed again, as rewinddir(3) has it.
        let had = uvfs_sys::lock(listing)
            .clone()
            .filter(|_| sink.offset() > 0);
        let list = match had {
            Some(list) => list,
            None => {
                let key = known.key();
                let changes = self.writing.as_ref().map(|all| all.changes(&key));
                let list = match self.listings.fresh(&key, self.options.ttl) {
                    Some(list) => list,
                    None => {
                        let all = self.list(cx, &known, usize::MAX).await?;
                        all.expect("no listing has more names")
                    }
                };
                let list = list.as_changed(&key, changes.unwrap_or_default());
                *uvfs_sys::lock(listing) = Some(list.clone());
                list
            }
        };
        known.state().pages.given(list.begun);
        let offset = sink.offset();
        let first = usize::try_from(offset).unwrap_or(usize::MAX);
        let plus = sink.wants_attributes();
        let nothing = Entry::missing(Duration::ZERO);
        for (at, name) in [".", ".."].into_iter().enumerate().skip(first) {
            let entry = DirEntry {
                ino: if name == "." { known.ino() } else { ROOT.0 },
                next: at as u64 + 1,
                kind: FileType::Directory,
                name: name.as_bytes(),
            };
            let added = match plus {
                true => sink.add_plus(entry, &nothing),
                false => sink.add(entry),
            };
            if !added {
                return Ok(());
            }
        }
        let directory = known.key();
        let key = |listed: &Listed| {
            let end = if listed.version.is_some() { "" } else { "/" };
            format!("{directory}{}{end}", listed.name)
        };
        // What fits into this answer.
        let (mut asked, mut begun) = (None, list.begun);
        if plus && self.options.metadata {
            let mut room = sink.room();
            let mut fits = |listed: &&Listed| {
                let size = (DIRENTPLUS + listed.name.len()).next_multiple_of(8);
                room.checked_sub(size)
                    .inspect(|rest| room = *rest)
                    .is_some()
            };
            let fitting = list.beyond(offset).map(|(_, listed)| listed).take(ASKED);
            let keys = fitting.take_while(&mut fits).map(key).collect();
            begun = Instant::now();
            asked = Some(self.facts(cx, keys).await?.into_iter());
        }
        for (next, listed) in list.beyond(offset) {
            let key = key(listed);
            let entry = |ino, kind| DirEntry {
                ino,
                next,
                kind,
                name: listed.name.as_bytes(),
            };
            let facts = match &mut asked {
                _ if !plus => None,
                None => Some(Facts::from(listed.version.clone())),
                Some(asked) => match asked.next() {
                    Some(facts) => facts,
                    None => break,
                },
            };
            let written = self.writing.as_ref().and_then(|all| all.drafts.file(&key));
            let written = written.filter(|_| plus && sink.fits(listed.name.len()));
            let written = written.and_then(|draft| self.tree.drafted(&key, &draft));
            let added = match facts {
                _ if written.is_some() => {
                    let found = self.entry(&written.expect("it is some"));
                    let kind = FileType::from_raw_mode(found.attr.mode);
                    sink.add_plus(entry(found.attr.ino, kind), &found)
                }
                Some(facts) if sink.fits(listed.name.len()) => {
                    let found = self.entry(&self.tree.looked_up(key, facts, begun));
                    let kind = FileType::from_raw_mode(found.attr.mode);
                    sink.add_plus(entry(found.attr.ino, kind), &found)
                }
                _ => {
                    let kind = match listed.version {
                        None => FileType::Directory,
                        // The listing does not have the type.
                        Some(_) if self.options.metadata => FileType::Unknown,
                        Some(_) => FileType::RegularFile,
                    };
                    sink.add(entry(tree::ino(&key), kind))
                }
            };
            if !added {
                break;
            }
        }
        Ok(())
    }

    async fn statfs(&self, _: &Context, _: Node) -> Result<Kstatfs> {
        const BLOCK: u32 = 4096;
        // As good as endless, and below what programs compute with.
        const BLOCKS: u64 = 1 << 38;
        Ok(Kstatfs {
            blocks: BLOCKS,
            bfree: BLOCKS,
            bavail: BLOCKS,
            files: BLOCKS,
            ffree: BLOCKS,
            bsize: BLOCK,
            frsize: BLOCK,
            namelen: 255,
            ..Kstatfs::default()
        })
    }
}
