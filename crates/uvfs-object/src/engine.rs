//! An object as a device of the buffer cache: an image in a store.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use opendal::OperatorUri;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use uvfs_io::device::Geometry;
use uvfs_io::engine::{Engine, EngineStats, ExtentResult, Io, Op};
use uvfs_server::fs::{Error, Result};

use crate::store::{Store, Version};
use crate::{Options, fs, map};

/// Bytes of a version that is described, at most.
const MOST_DESCRIBED: usize = map::ENTRIES as usize;

/// One version of one object. Reads are requests for ranges of it; nothing is kept on the local disk.
pub struct ObjectEngine {
    shared: Arc<Shared>,
    /// Begins with the first request, and ends with the engine; what it has under way is dropped.
    runtime: OnceLock<Runtime>,
}

struct Shared {
    store: Store,
    key: String,
    version: Version,
    requests: usize,
    /// One for each request that may be under way.
    permits: Semaphore,
    /// The first failure is the last.
    gives_up: bool,
    state: Mutex<State>,
    /// An I/O is done.
    done: Condvar,
}

#[derive(Default)]
struct State {
    /// Taken and not done.
    running: usize,
    finished: VecDeque<Io>,
    stats: EngineStats,
    /// Why the device was given up.
    failure: Option<(Errno, String)>,
}

/// The URI of what an object is in, and the object's key there.
fn split(uri: &str) -> Option<(String, String)> {
    let (path, query) = uri.split_at(uri.find(['?', '#']).unwrap_or(uri.len()));
    let begins = path.find("://")? + 3;
    let slash = begins + path[begins..].rfind('/')?;
    let parent = format!("{}{query}", &path[..=slash]);
    let root = |uri: &str| {
        let uri = OperatorUri::new(uri, []).ok()?;
        Some(uri.root().unwrap_or_default().to_owned())
    };
    let (whole, above) = (root(uri)?, root(&parent)?);
    let key = whole.strip_prefix(&above)?.trim_start_matches('/');
    let is_object = slash + 1 < path.len() && !key.is_empty();
    is_object.then(|| (parent, key.to_owned()))
}

impl ObjectEngine {
    /// The object of a URI such as `s3://bucket/disk.img`, as it is now; `None` if the store has none of this very key.
    /// `timeout` and `requests` count of the options. With `gives_up` a request that fails ends the device:
    /// all further ones fail at once, and [`Engine::failure`] tells why. Without it no thread begins before the first read, so the
    /// process may fork.
    ///
    /// # Errors
    /// A URI that names no store, and a store that does not answer or refuses.
    pub fn open(uri: &str, options: &Options, gives_up: bool) -> io::Result<Option<Arc<Self>>> {
        let Some((parent, key)) = split(uri) else {
            return Ok(None);
        };
        let store = Store::open(&parent, options)?;
        let runtime = match gives_up {
            true => fs::runtime()?,
            false => fs::runtime_to_ask()?,
        };
        let version = runtime.block_on(version_of(&store, &key))?;
        Ok(version.map(|version| {
            let engine = Self::new(store, key, version, options, gives_up);
            if gives_up {
                let _ = engine.runtime.set(runtime);
            }
            Arc::new(engine)
        }))
    }

    /// The same version for a mount that an earlier program of this process has served; `None` if `described` is not what
    /// [`ObjectEngine::describe`] has given for this URI.
    ///
    /// # Errors
    /// A URI that names no store, and a descriptor that can't be read.
    pub fn again(
        uri: &str,
        options: &Options,
        described: BorrowedFd<'_>,
    ) -> io::Result<Option<Arc<Self>>> {
        let mut bytes = vec![0; MOST_DESCRIBED];
        let len = rustix::io::pread(described, &mut bytes, 0)?;
        let found = map::described(&bytes[..len]);
        let found = split(uri).zip(found).filter(|(at, found)| at.1 == found.0);
        let Some(((parent, key), (_, version))) = found else {
            return Ok(None);
        };
        let store = Store::open(&parent, options)?;
        let engine = Self::new(store, key, version, options, false);
        Ok(Some(Arc::new(engine)))
    }

    fn new(store: Store, key: String, version: Version, options: &Options, gives_up: bool) -> Self {
        let shared = Arc::new(Shared {
            store,
            key,
            version,
            requests: options.requests.max(1),
            permits: Semaphore::new(options.requests.max(1)),
            gives_up,
            state: Mutex::default(),
            done: Condvar::new(),
        });
        Self {
            shared,
            runtime: OnceLock::new(),
        }
    }

    /// A file in memory from which the next program of this process knows the version.
    ///
    /// # Errors
    /// ENAMETOOLONG for a key or an ETag of more than some thousand bytes; no descriptor or memory.
    pub fn describe(&self) -> io::Result<OwnedFd> {
        let Shared { key, version, .. } = &*self.shared;
        let bytes = map::describe(key, version).ok_or(Errno::NAMETOOLONG)?;
        let file = memfd_create(c"uvfs-version", MemfdFlags::CLOEXEC)?;
        File::from(file.try_clone()?).write_all(&bytes)?;
        Ok(file)
    }

    /// Whether the store still has the version that is read.
    ///
    /// # Errors
    /// The store does not answer, or refuses.
    pub fn is_current(&self) -> io::Result<bool> {
        let Shared { store, key, .. } = &*self.shared;
        let now = fs::runtime_to_ask()?.block_on(version_of(store, key))?;
        Ok(now.is_some_and(|now| now.is(&self.shared.version)))
    }

    fn runtime(&self) -> io::Result<&Runtime> {
        if let Some(runtime) = self.runtime.get() {
            return Ok(runtime);
        }
        let begun = fs::runtime()?;
        Ok(self.runtime.get_or_init(|| begun))
    }
}

/// The version that the store has of an object.
async fn version_of(store: &Store, key: &str) -> io::Result<Option<Version>> {
    let facts = store.stat(key).await;
    let facts = facts.map_err(|error| io::Error::other(error.to_string()))?;
    Ok(facts.and_then(|facts| facts.version))
}

impl Drop for ObjectEngine {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        uvfs_sys::lock(&self.state)
    }

    /// Does all of an I/O, and hands it back.
    async fn run(&self, mut io: Io) {
        if let Err(error) = self.read(&mut io).await {
            let errno = match error.errno() {
                // It was there: the image is another one now, or none.
                Errno::NOENT => Errno::STALE,
                errno => errno,
            };
            io.fail(errno);
            let why = match errno {
                Errno::STALE => format!("object {:?} has changed in the store", self.key),
                _ => error.to_string(),
            };
            let mut state = self.state();
            if self.gives_up && state.failure.is_none() {
                state.failure = Some((errno, why));
            } else if !self.gives_up {
                tracing::warn!(key = self.key, why, "a part of an image can't be read");
            }
        }
        self.end(io);
    }

    fn end(&self, io: Io) {
        let mut state = self.state();
        for result in &io.results {
            state.stats.count(io.op, result);
        }
        state.running -= 1;
        state.finished.push_back(io);
        drop(state);
        self.done.notify_all();
    }

    /// Fills the memory of an I/O.
    async fn read(&self, io: &mut Io) -> Result<()> {
        let _permit = self.store.permit(&self.key, &self.permits).await?;
        let mut memory = Cursor::default();
        for n in 0..io.extents.len() {
            if let Some((errno, why)) = &self.state().failure {
                return Err(Error::new(*errno, why.clone()));
            }
            let extent = io.extents[n];
            let end = extent.offset + extent.len as u64;
            let fetch = (self.store).fetch(&self.key, &self.version, extent.offset..end);
            let mut stream = fetch.await?;
            let mut left = extent.len;
            while let Some(data) = self.store.next(&self.key, &mut stream).await? {
                for part in data {
                    left = left.checked_sub(part.len()).ok_or(Errno::IO)?;
                    memory.put(io, &part);
                }
            }
            if left > 0 {
                let why = format!("object {:?}: an answer has {left} bytes too few", self.key);
                return Err(Error::new(Errno::IO, why));
            }
        }
        // Without conditions it is known only now whether all is of one version.
        self.store.still(&self.key, &self.version).await?;
        let whole = |extent: &uvfs_io::engine::IoExtent| ExtentResult {
            bytes: extent.len,
            error: None,
        };
        io.results = io.extents.iter().map(whole).collect();
        Ok(())
    }
}

/// A place in the memory of an I/O.
#[derive(Default)]
struct Cursor {
    block: usize,
    at: usize,
}

impl Cursor {
    /// Writes on. There is room: the extents are as long as the memory.
    fn put(&mut self, io: &mut Io, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let block = &mut io.memory[self.block][self.at..];
            let (now, rest) = bytes.split_at(bytes.len().min(block.len()));
            block[..now.len()].copy_from_slice(now);
            self.at += now.len();
            if now.len() == block.len() {
                (self.block, self.at) = (self.block + 1, 0);
            }
            bytes = rest;
        }
    }
}

impl Engine for ObjectEngine {
    fn name(&self) -> &'static str {
        "object"
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.shared.version.size,
            block: 1,
            memory_align: 1,
            read_only: true,
        }
    }

    fn depth(&self) -> usize {
        self.shared.requests
    }

    fn submit(&self, ios: &mut Vec<Io>) {
        let runtime = self.runtime();
        let room = (4 * self.depth()).saturating_sub(self.in_flight());
        for mut io in ios.drain(..room.min(ios.len())) {
            self.shared.state().running += 1;
            match (io.refuse(&self.geometry()), &runtime) {
                (Some(errno), _) => {
                    io.fail(errno);
                    self.shared.end(io);
                }
                // Nothing is ever written.
                (None, _) if io.op == Op::Flush => {
                    io.results = [ExtentResult::default()].into_iter().collect();
                    self.shared.end(io);
                }
                (None, Err(_)) => {
                    io.fail(Errno::AGAIN);
                    self.shared.end(io);
                }
                (None, Ok(runtime)) => {
                    let shared = self.shared.clone();
                    self.shared.state().stats.submits += io.extents.len() as u64;
                    runtime.spawn(async move { shared.run(io).await });
                }
            }
        }
    }

    fn reap(&self, wait: bool, out: &mut Vec<Io>) -> usize {
        let mut state = self.shared.state();
        while wait && state.finished.is_empty() && state.running > 0 {
            let more = self.shared.done.wait(state);
            state = more.unwrap_or_else(PoisonError::into_inner);
        }
        let count = state.finished.len();
        out.extend(state.finished.drain(..));
        count
    }

    fn in_flight(&self) -> usize {
        let state = self.shared.state();
        state.running + state.finished.len()
    }

    fn stats(&self) -> EngineStats {
        self.shared.state().stats
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        self.shared.store.counters.of_store().to_vec()
    }

    fn failure(&self) -> Option<String> {
        let state = self.shared.state();
        state.failure.as_ref().map(|(_, why)| why.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use uvfs_io::engine::IoExtent;
    use uvfs_mem::Arena;

    /// Reads `extents` into blocks of these lengths; gives what was read, and the error.
    fn read(
        engine: &ObjectEngine,
        extents: &[(u64, usize)],
        blocks: &[usize],
    ) -> (Vec<u8>, Option<Errno>) {
        let arena = Arena::new(1 << 20).unwrap();
        let extents = extents
            .iter()
            .map(|&(offset, len)| IoExtent { offset, len });
        let blocks = blocks.iter().map(|len| arena.alloc(*len).unwrap());
        let mut ios = vec![Io::new(Op::Read, 7, extents, blocks)];
        engine.submit(&mut ios);
        assert!(ios.is_empty());
        let mut done = Vec::new();
        assert_eq!(engine.reap(true, &mut done), 1);
        assert_eq!(engine.in_flight(), 0);
        let io = done.pop().unwrap();
        assert_eq!(io.tag, 7);
        (
            io.memory.iter().flat_map(|block| block.to_vec()).collect(),
            io.error(),
        )
    }

    /// Reads of any shape get the object's bytes, and a changed object ends the device if it is to.
    #[test]
    fn one_version_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let object = dir.path().join("disk.img");
        let bytes: Vec<u8> = (0..100_000_u32).map(|n| (n / 7) as u8).collect();
        fs::write(&object, &bytes).unwrap();
        let uri = format!("fs://{}/disk.img", dir.path().display());
        let open = |gives_up| ObjectEngine::open(&uri, &Options::default(), gives_up).unwrap();
        assert!(
            ObjectEngine::open(&format!("{uri}.none"), &Options::default(), true)
                .unwrap()
                .is_none()
        );
        let engines = [open(false).unwrap(), open(true).unwrap()];
        for engine in &engines {
            assert_eq!(engine.geometry().size, 100_000);
            let (shown, error) = read(engine, &[(90_000, 5000), (17, 3000)], &[4096, 512, 3392]);
            assert_eq!(error, None);
            assert!(shown == [&bytes[90_000..95_000], &bytes[17..3017]].concat());
            assert_eq!(
                read(engine, &[(99_000, 4096)], &[4096]).1,
                Some(Errno::NXIO)
            );
            assert_eq!(engine.failure(), None);
            assert_eq!(engine.stats().read_bytes, 8000);
        }
        fs::write(&object, &bytes[..50_000]).unwrap();
        for engine in &engines {
            assert_eq!(read(engine, &[(0, 4096)], &[4096]).1, Some(Errno::STALE));
        }
        assert_eq!(engines[0].failure(), None);
        let why = engines[1].failure().unwrap();
        assert!(why.contains("disk.img") && why.contains("changed"), "{why}");
        fs::remove_file(&object).unwrap();
        for engine in &engines {
            assert_eq!(read(engine, &[(0, 4096)], &[4096]).1, Some(Errno::STALE));
        }
    }

    #[test]
    fn a_uri_is_split_at_its_last_slash() {
        let split = |uri| split(uri).map(|(parent, key)| format!("{parent} {key}"));
        let cases = [
            ("s3://b/disk.img", Some("s3://b/ disk.img")),
            ("s3://b/a/d.img?x=/y/z", Some("s3://b/a/?x=/y/z d.img")),
            ("s3://b/a%20b/c%2Fd", Some("s3://b/a%20b/ c/d")),
            ("fs:///srv/images/d", Some("fs:///srv/images/ d")),
            ("s3://b", None),
            ("s3://b/", None),
            ("s3://b/a/", None),
            ("s3://b/a/?endpoint=http://h/x", None),
            ("disk.img", None),
        ];
        for (uri, expected) in cases {
            assert_eq!(split(uri).as_deref(), expected, "{uri}");
        }
    }
}
