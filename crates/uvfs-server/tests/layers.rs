//! File systems that wrap another, over the example's file system in memory.

#[path = "../examples/memory/fs.rs"]
mod memory;

use std::collections::HashMap;
use std::ffi::CStr;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use memory::Memory;
use uvfs_io::IoBuf;
use uvfs_io::runtime::Runtime;
use uvfs_queue::wait::WaitConfig;
use uvfs_server::fs::*;
use uvfs_server::layers::{
    self, AttributeCache, Discard, Faults, Latency, Opcode, Prefix, ReadOnly,
};
use uvfs_server::{FileSystem, Session, SessionOptions};

/// The result of a handler that waits for nothing.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut std::task::Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("it waits"),
    }
}

fn cx() -> Context {
    Context::default()
}

fn new(kind: FileType) -> NewNode {
    NewNode {
        kind,
        mode: Mode::from_raw_mode(0o755),
        umask: Mode::empty(),
        rdev: 0,
    }
}

fn mkdir(fs: &impl FileSystem, parent: Node, name: &CStr) -> Node {
    let new = new(FileType::Directory);
    now(fs.mkdir(&cx(), parent, name, &new)).unwrap().node
}

fn mknod(fs: &impl FileSystem, parent: Node, name: &CStr) -> Node {
    let new = new(FileType::RegularFile);
    now(fs.mknod(&cx(), parent, name, &new)).unwrap().node
}

fn write(fs: &impl FileSystem, node: Node, offset: u64, bytes: &[u8]) -> Result<usize> {
    let data = Payload::from(IoBuf::alloc(4096).unwrap()).slice(0..bytes.len());
    data.copy_in(0, bytes);
    let how = IoHow::new(Handle(0), offset);
    now(fs.write(&cx(), node, &how, &data))
}

fn read(fs: &impl FileSystem, node: Node) -> Result<Vec<u8>> {
    let data = Payload::from(IoBuf::alloc(4096).unwrap());
    let len = now(fs.read(&cx(), node, &IoHow::default(), &data))?;
    let mut bytes = vec![0; len];
    data.copy_out(0, &mut bytes);
    Ok(bytes)
}

fn errno<T>(result: Result<T>) -> Option<Errno> {
    result.err().map(|error| error.errno())
}

/// A delay is that of the requests that are to have one, and those under way at once wait at once.
#[test]
fn latency_delays_the_requests_that_it_is_told_to() {
    const TIME: Duration = Duration::from_millis(100);
    let slow = Latency::new(Memory::new(), TIME).only(&[Opcode::Getattr]);
    let runtime = Runtime::new(WaitConfig::default()).unwrap();
    let took = runtime.block_on(async move {
        let begin = Instant::now();
        assert_eq!(
            errno(slow.lookup(&cx(), ROOT, c"x").await),
            Some(Errno::NOENT)
        );
        let fast = begin.elapsed();
        let one = || slow.getattr(&ROOT_CX, ROOT, None);
        let all = futures_util::future::join_all([one(), one(), one()]).await;
        assert!(all.iter().all(Result::is_ok));
        (fast, begin.elapsed() - fast)
    });
    let (fast, slow) = took.unwrap();
    assert!(
        fast < TIME && slow >= TIME && slow < 3 * TIME,
        "{fast:?} {slow:?}"
    );
}

const ROOT_CX: Context = Context {
    unique: 0,
    uid: 0,
    gid: 0,
    pid: 0,
    group: None,
};

/// A request fails as the plan says, or moves as much as that says, and the file system sees no more of it.
#[test]
fn faults_come_as_planned() {
    let calls = AtomicU32::new(0);
    let faults = Faults::new(Memory::new(), move |call| match call.opcode {
        Opcode::Write if call.range.contains(&100) => Err(Errno::NOSPC.into()),
        Opcode::Write => Ok(3),
        Opcode::Getattr if calls.fetch_add(1, Ordering::Relaxed) == 1 => Err(Errno::IO.into()),
        _ => Ok(usize::MAX),
    });
    let node = mknod(&faults, ROOT, c"file");
    assert_eq!(write(&faults, node, 0, b"12345").unwrap(), 3);
    assert_eq!(
        errno(write(&faults, node, 98, b"12345")),
        Some(Errno::NOSPC)
    );
    assert_eq!(read(&faults, node).unwrap(), b"123");
    let getattr = || errno(now(faults.getattr(&cx(), node, None)));
    assert_eq!(
        [getattr(), getattr(), getattr()],
        [None, Some(Errno::IO), None]
    );
}

/// What is written is gone, but for how long the file is.
#[test]
fn discarded_data_leaves_the_length() {
    let null = Discard::new(Memory::new());
    let node = mknod(&null, ROOT, c"file");
    assert_eq!(write(&null, node, 4, b"data").unwrap(), 4);
    assert_eq!(write(&null, node, 0, b"1234").unwrap(), 4);
    assert_eq!(read(&null, node).unwrap(), b"\0\0\x004\0\0\0a");
    assert_eq!(write(&null, node, 0, b"").unwrap(), 0);
}

/// Nothing changes through it, and what is there can be read.
#[test]
fn a_read_only_file_system_refuses_every_change() {
    let fs = Memory::new();
    let node = mknod(&fs, ROOT, c"file");
    write(&fs, node, 0, b"data").unwrap();
    let fs = ReadOnly::new(fs);
    let rofs = Some(Errno::ROFS);
    let (file, none) = (new(FileType::RegularFile), RenameFlags::empty());
    let open = |flags| errno(now(fs.open(&cx(), node, &OpenHow::new(flags))));
    assert_eq!(
        [
            open(OFlags::WRONLY),
            open(OFlags::RDWR),
            open(OFlags::TRUNC)
        ],
        [rofs; 3]
    );
    assert_eq!(open(OFlags::RDONLY), None);
    assert_eq!(errno(write(&fs, node, 0, b"x")), rofs);
    assert_eq!(errno(now(fs.mknod(&cx(), ROOT, c"new", &file))), rofs);
    assert_eq!(errno(now(fs.mkdir(&cx(), ROOT, c"new", &file))), rofs);
    assert_eq!(errno(now(fs.symlink(&cx(), ROOT, c"new", c"to"))), rofs);
    assert_eq!(errno(now(fs.link(&cx(), node, ROOT, c"new"))), rofs);
    assert_eq!(errno(now(fs.unlink(&cx(), ROOT, c"file"))), rofs);
    assert_eq!(errno(now(fs.rmdir(&cx(), ROOT, c"file"))), rofs);
    assert_eq!(
        errno(now(fs.rename(&cx(), ROOT, c"file", ROOT, c"new", none))),
        rofs
    );
    assert_eq!(
        errno(now(fs.setattr(&cx(), node, &SetAttr::default()))),
        rofs
    );
    assert_eq!(
        errno(now(fs.create(
            &cx(),
            ROOT,
            c"new",
            &file,
            &OpenHow::default()
        ))),
        rofs
    );
    assert_eq!(errno(now(fs.access(&cx(), node, Access::WRITE_OK))), rofs);
    assert_eq!(errno(now(fs.access(&cx(), node, Access::READ_OK))), None);
    assert_eq!(read(&fs, node).unwrap(), b"data");
}

/// Keeps its session, and counts the lookups of each node that it gave and that were not taken back, and its calls.
struct Watched<F> {
    fs: F,
    session: OnceLock<Arc<dyn SessionHandle>>,
    known: Arc<Mutex<HashMap<Node, i64>>>,
    calls: Arc<AtomicUsize>,
}

impl<F> Watched<F> {
    fn new(fs: F) -> Self {
        Self {
            fs,
            session: OnceLock::new(),
            known: Arc::default(),
            calls: Arc::default(),
        }
    }

    fn gives(&self, entry: Entry) -> Entry {
        *self.known.lock().unwrap().entry(entry.node).or_default() += 1;
        entry
    }
}

impl<F: FileSystem> layers::Layer for Watched<F> {
    type Inner = F;

    fn inner(&self) -> &F {
        &self.fs
    }

    fn init(&self, config: &mut Config, session: Arc<dyn SessionHandle>) -> Result<()> {
        let _ = self.session.set(session.clone());
        self.fs.init(config, session)
    }

    fn forget(&self, node: Node, lookups: u64) {
        let mut known = self.known.lock().unwrap();
        let count = known.get_mut(&node).expect("it was looked up");
        *count -= lookups as i64;
        assert!(
            *count >= 0,
            "{node} is forgotten more often than it was looked up"
        );
        drop(known);
        self.fs.forget(node, lookups);
    }

    async fn lookup(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Entry> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.fs
            .lookup(cx, parent, name)
            .await
            .map(|entry| self.gives(entry))
    }

    async fn mknod(&self, cx: &Context, parent: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        let made = self.fs.mknod(cx, parent, name, new).await;
        made.map(|entry| self.gives(entry))
    }

    async fn mkdir(&self, cx: &Context, parent: Node, name: &CStr, new: &NewNode) -> Result<Entry> {
        let made = self.fs.mkdir(cx, parent, name, new).await;
        made.map(|entry| self.gives(entry))
    }

    async fn link(&self, cx: &Context, node: Node, at: Node, name: &CStr) -> Result<Entry> {
        let made = self.fs.link(cx, node, at, name).await;
        made.map(|entry| self.gives(entry))
    }

    async fn getattr(&self, cx: &Context, node: Node, fh: Option<Handle>) -> Result<Attributes> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.fs.getattr(cx, node, fh).await
    }
}

/// A session that notes what it is told of.
#[derive(Default)]
struct Told(Mutex<Vec<String>>);

impl SessionHandle for Told {
    fn host_changed(&self, change: HostChange<'_>) {
        self.0.lock().unwrap().push(format!("{change:?}"));
    }
}

/// A directory is a root like any other, what is outside is not to be found, and reports about it reach the kernel.
#[test]
fn a_directory_is_served_as_a_root() {
    let fs = Memory::new();
    let (a, outside) = (mkdir(&fs, ROOT, c"a"), mknod(&fs, ROOT, c"outside"));
    let b = mkdir(&fs, a, c"b");
    let file = mknod(&fs, b, c"file");
    let below = Arc::new(Watched::new(fs));
    let known = below.known.clone();
    let prefix = Prefix::new(Shared(below.clone()), "/a/./b").unwrap();
    let told = Arc::new(Told::default());
    prefix.init(&mut config(), told.clone()).unwrap();
    let look =
        |parent, name: &CStr| now(prefix.lookup(&cx(), parent, name)).map(|entry| entry.node);
    assert_eq!(look(ROOT, c"file").unwrap(), file);
    for name in [c"a", c"b", c"outside"] {
        assert_eq!(errno(look(ROOT, name)), Some(Errno::NOENT));
    }
    assert_eq!(look(ROOT, c"..").unwrap(), ROOT);
    assert_eq!(
        now(prefix.getattr(&cx(), ROOT, None)).unwrap().attr.ino,
        b.0
    );
    // Both directories of a request are below.
    let (none, sub) = (RenameFlags::empty(), mkdir(&prefix, ROOT, c"sub"));
    now(prefix.rename(&cx(), ROOT, c"file", sub, c"moved", none)).unwrap();
    now(prefix.rename(&cx(), sub, c"moved", ROOT, c"back", none)).unwrap();
    now(prefix.link(&cx(), file, ROOT, c"linked")).unwrap();
    assert_eq!(look(ROOT, c"linked").unwrap(), file);
    assert!(now(prefix.statfs(&cx(), ROOT)).is_ok());
    let session = below.session.get().unwrap();
    session.host_changed(HostChange::Name(b, c"new"));
    session.host_changed(HostChange::Contents(outside));
    let about = [
        HostChange::Name(ROOT, c"new"),
        HostChange::Contents(outside),
    ];
    assert_eq!(
        *told.0.lock().unwrap(),
        about.map(|change| format!("{change:?}"))
    );
    // The root stays, and nothing on the way to it.
    prefix.forget(ROOT, 1);
    let known = |node| {
        known
            .lock()
            .unwrap()
            .get(&node)
            .copied()
            .unwrap_or_default()
    };
    assert_eq!((known(a), known(b), known(file)), (0, 1, 3));
    prefix.destroy();
    assert_eq!(known(b), 0);

    let missing = Prefix::new(Memory::new(), "none").unwrap();
    assert_eq!(
        errno(now(missing.getattr(&cx(), ROOT, None))),
        Some(Errno::NOENT)
    );
    assert!(Prefix::new(Memory::new(), "a/../..").is_err());
}

/// A file system that a test uses, too.
struct Shared<F>(Arc<F>);

impl<F: FileSystem> layers::Layer for Shared<F> {
    type Inner = F;

    fn inner(&self) -> &F {
        &self.0
    }
}

/// What a kernel offers.
fn config() -> Config {
    Config::new(InitFlags::all(), 45)
}

/// What was looked up is not asked for again, until it changes.
#[test]
fn a_cache_of_attributes_asks_once() {
    let below = Watched::new(Memory::new());
    let calls = below.calls.clone();
    let cached = AttributeCache::new(below, Duration::from_secs(3600), 100);
    let node = mknod(&cached, ROOT, c"file");
    let size = || now(cached.getattr(&cx(), node, None)).unwrap().attr.size;
    let found = || now(cached.lookup(&cx(), ROOT, c"file")).unwrap();
    let asked = || calls.swap(0, Ordering::Relaxed);
    for _ in 0..3 {
        assert_eq!((found().node, size()), (node, 0));
    }
    assert_eq!(asked(), 1);
    write(&cached, node, 0, b"data").unwrap();
    assert_eq!((size(), found().attr.size, size()), (4, 4, 4));
    assert_eq!(asked(), 1);
    now(cached.unlink(&cx(), ROOT, c"file")).unwrap();
    assert_eq!(
        errno(now(cached.lookup(&cx(), ROOT, c"file"))),
        Some(Errno::NOENT)
    );
    // Time is up.
    let cached = AttributeCache::new(Watched::new(Memory::new()), Duration::ZERO, 100);
    let calls = layers::Layer::inner(&cached).calls.clone();
    for count in 1..4 {
        now(cached.getattr(&cx(), ROOT, None)).unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), count);
    }
}

/// Whatever a kernel does, attributes are those that the file system has, and no lookup is counted twice or lost, also
/// where the cache is far too small.
#[test]
fn a_cache_of_attributes_agrees_with_its_file_system() {
    const NAMES: [&CStr; 5] = [c"a", c"b", c"c", c"d", c"e"];
    for (seed, most) in (0..40).zip([1, 2, 3, 100].into_iter().cycle()) {
        let below = Arc::new(Watched::new(Memory::new()));
        let cached = AttributeCache::new(Shared(below.clone()), Duration::from_secs(3600), most);
        let mut kernel = HashMap::<Node, u64>::new();
        let mut random = fastrand(seed);
        for _ in 0..400 {
            let (name, other) = (NAMES[random(5)], NAMES[random(5)]);
            let file = new(FileType::RegularFile);
            let nodes: Vec<Node> = kernel.keys().copied().collect();
            let node = nodes.get(random(nodes.len().max(1))).copied();
            let entry = match random(9) {
                0 => now(cached.mknod(&cx(), ROOT, name, &file)).ok(),
                1..=3 => now(cached.lookup(&cx(), ROOT, name)).ok(),
                4 if name != other => {
                    let none = RenameFlags::empty();
                    let _ = now(cached.rename(&cx(), ROOT, name, ROOT, other, none));
                    None
                }
                5 => {
                    let _ = now(cached.unlink(&cx(), ROOT, name));
                    None
                }
                6 => node.and_then(|node| now(cached.link(&cx(), node, ROOT, name)).ok()),
                4 | 7 => {
                    if let Some(node) = node {
                        let _ = write(&cached, node, random(4000) as u64, b"data");
                    }
                    None
                }
                _ => {
                    if let Some(node) = node {
                        let some = 1 + random(kernel[&node] as usize) as u64;
                        cached.forget(node, some);
                        let left = kernel[&node] - some;
                        kernel.insert(node, left);
                        kernel.retain(|_, count| *count > 0);
                    }
                    None
                }
            };
            if let Some(entry) = entry {
                *kernel.entry(entry.node).or_default() += 1;
                let real = now(below.fs.getattr(&cx(), entry.node, None)).unwrap();
                assert_eq!(
                    format!("{:?}", entry.attr),
                    format!("{:?}", real.attr),
                    "{seed}"
                );
            }
            for &node in kernel.keys() {
                let told = now(cached.getattr(&cx(), node, None)).unwrap();
                let real = now(below.fs.getattr(&cx(), node, None)).unwrap();
                assert_eq!(format!("{told:?}"), format!("{real:?}"), "{seed}");
            }
        }
        // What is left of names goes, and so do the nodes that only the cache had.
        for name in NAMES {
            let _ = now(cached.unlink(&cx(), ROOT, name));
        }
        for (node, count) in kernel {
            cached.forget(node, count);
        }
        assert!(
            below
                .known
                .lock()
                .unwrap()
                .values()
                .all(|&count| count == 0),
            "{seed}"
        );
    }
}

/// Numbers below a limit.
fn fastrand(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed.wrapping_mul(2) | 1;
    move |below| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    }
}

/// The session reports a file system's own counts, also those of one below a layer.
#[test]
fn counts_are_reported() {
    struct Counting;

    impl FileSystem for Counting {
        fn counts(&self) -> Vec<(&'static str, u64)> {
            vec![("things", 7)]
        }
    }

    let fs = ReadOnly::new(Counting);
    let session = Session::unmounted(fs, SessionOptions::default()).unwrap();
    let counts = session.report().counts;
    let counts: Vec<_> = counts.iter().map(|one| (&*one.name, one.count)).collect();
    assert_eq!(counts, [("things", 7)]);
    let session = Session::unmounted(Memory::new(), SessionOptions::default()).unwrap();
    assert_eq!(session.report().counts, []);
}
