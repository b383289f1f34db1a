//! Drives the handlers directly, without a mount.
#![allow(dead_code)] // Each test binary uses a part of it.

use std::ffi::CString;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::task::{Poll, Waker};

use uvfs_io::IoBuf;
use uvfs_io::runtime::Runtime;
use uvfs_passthrough::{Options, Passthrough};
use uvfs_queue::wait::WaitConfig;
use uvfs_server::FileSystem;
use uvfs_server::fs::{
    self, Config, Context, DirEntry, DirSink, Entry, Errno, FileType, Handle, InitFlags, IoHow,
    Mode, NewNode, Node, OFlags, OpenHow, Opened, Payload, ROOT, SessionHandle,
};

/// Root as the caller.
pub const ROOT_USER: Context = Context {
    unique: 1,
    uid: 0,
    gid: 0,
    pid: 0,
    group: None,
};
/// A user other than root.
pub const USER: Context = Context {
    unique: 2,
    uid: 4321,
    gid: 8765,
    pid: 0,
    group: None,
};

/// The result of a handler, its error as a number, which can be compared.
pub type Result<T> = std::result::Result<T, Errno>;

/// Most handlers wait for nothing.
pub fn now<T>(future: impl Future<Output = fs::Result<T>>) -> Result<T> {
    match pin!(future).poll(&mut std::task::Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value.map_err(|error| error.errno()),
        Poll::Pending => panic!("it waits"),
    }
}

/// Others need a runtime.
pub fn run<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    Runtime::new(WaitConfig::default())
        .unwrap()
        .block_on(future)
        .unwrap()
}

pub fn c(name: &str) -> CString {
    CString::new(name).unwrap()
}

/// A served directory.
#[derive(Clone)]
pub struct Served {
    pub fs: Arc<Passthrough>,
    pub source: PathBuf,
    session: Arc<dyn SessionHandle>,
}

/// An entry that was listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub name: String,
    pub next: u64,
    pub ino: u64,
    pub kind: FileType,
    pub node: Node,
}

pub struct Sink {
    pub offset: u64,
    pub room: usize,
    pub plus: bool,
    pub entries: Vec<Listed>,
}

impl Sink {
    fn put(&mut self, dir: DirEntry<'_>, node: Node) -> bool {
        if self.entries.len() >= self.room {
            return false;
        }
        self.entries.push(Listed {
            name: String::from_utf8_lossy(dir.name).into_owned(),
            next: dir.next,
            ino: dir.ino,
            kind: dir.kind,
            node,
        });
        true
    }
}

impl DirSink for Sink {
    fn offset(&self) -> u64 {
        self.offset
    }
    fn add(&mut self, entry: DirEntry<'_>) -> bool {
        assert!(!self.plus);
        self.put(entry, Node(0))
    }
    fn wants_attributes(&self) -> bool {
        self.plus
    }
    fn fits(&self, _: usize) -> bool {
        self.entries.len() < self.room
    }
    fn room(&self) -> usize {
        (self.room - self.entries.len()) << 12
    }
    fn add_plus(&mut self, dir: DirEntry<'_>, entry: &Entry) -> bool {
        assert!(self.plus);
        self.put(dir, entry.node)
    }
}

impl Served {
    pub fn new(source: &Path, options: Options) -> Self {
        Self::over(source, options, Arc::new(()))
    }

    /// Serves `source` over a session of the test's own.
    pub fn over(source: &Path, options: Options, session: Arc<dyn SessionHandle>) -> Self {
        let fs = Arc::new(Passthrough::open(source, options).unwrap());
        let served = Self {
            fs,
            source: source.to_owned(),
            session,
        };
        served.init(InitFlags::all());
        served
    }

    pub fn init(&self, offered: InitFlags) -> Config {
        let mut config = Config::new(offered, 45);
        self.fs.init(&mut config, self.session.clone()).unwrap();
        config
    }

    pub fn lookup(&self, parent: Node, name: &str) -> Result<Entry> {
        now(self.fs.lookup(&ROOT_USER, parent, &c(name)))
    }

    /// Finds a path below the root; all that is found on the way stays counted.
    pub fn walk(&self, path: &str) -> Result<Entry> {
        let mut node = ROOT;
        let mut entry = None;
        for name in path.split('/') {
            let found = self.lookup(node, name)?;
            node = found.node;
            entry = Some(found);
        }
        entry.ok_or(Errno::INVAL)
    }

    pub fn create(&self, cx: &Context, parent: Node, name: &str, mode: u32) -> (Entry, Opened) {
        self.try_create(cx, parent, name, mode, 0o022, libc::O_RDWR as u32)
            .unwrap()
    }

    pub fn try_create(
        &self,
        cx: &Context,
        parent: Node,
        name: &str,
        mode: u32,
        umask: u32,
        flags: u32,
    ) -> Result<(Entry, Opened)> {
        let new = NewNode {
            kind: FileType::RegularFile,
            mode: Mode::from_raw_mode(mode),
            umask: Mode::from_raw_mode(umask),
            rdev: 0,
        };
        let how = OpenHow::new(OFlags::from_bits_retain(flags));
        now(self.fs.create(cx, parent, &c(name), &new, &how))
    }

    pub fn mkdir(&self, cx: &Context, parent: Node, name: &str, mode: u32) -> Entry {
        let new = NewNode {
            kind: FileType::Directory,
            mode: Mode::from_raw_mode(mode),
            umask: Mode::from_raw_mode(0o022),
            rdev: 0,
        };
        now(self.fs.mkdir(cx, parent, &c(name), &new)).unwrap()
    }

    pub fn open(&self, node: Node, flags: i32) -> Result<Opened> {
        let how = OpenHow::new(OFlags::from_bits_retain(flags as u32));
        now(self.fs.open(&ROOT_USER, node, &how))
    }

    pub fn release(&self, fh: Handle) {
        now(self.fs.release(&ROOT_USER, ROOT, fh, OFlags::empty(), None)).unwrap();
    }

    pub fn read(&self, fh: Handle, offset: u64, len: usize) -> Result<Vec<u8>> {
        let fs = self.fs.clone();
        run(async move {
            let data = Payload::from(IoBuf::alloc(len).unwrap().slice(0..len));
            let how = IoHow::new(fh, offset);
            let read = fs.read(&ROOT_USER, Node(0), &how, &data).await;
            let n = read.map_err(|error| error.errno())?;
            let mut bytes = vec![0; n];
            data.copy_out(0, &mut bytes);
            Ok(bytes)
        })
    }

    pub fn write(&self, how: IoHow, bytes: &[u8]) -> Result<usize> {
        let (fs, bytes) = (self.fs.clone(), bytes.to_vec());
        run(async move {
            let data = Payload::from(IoBuf::alloc(bytes.len()).unwrap().slice(0..bytes.len()));
            data.copy_in(0, &bytes);
            let written = fs.write(&ROOT_USER, Node(0), &how, &data).await;
            written.map_err(|error| error.errno())
        })
    }

    pub fn list(&self, fh: Handle, offset: u64, room: usize, plus: bool) -> Vec<Listed> {
        let mut sink = Sink {
            offset,
            room,
            plus,
            entries: Vec::new(),
        };
        now(self.fs.readdir(&ROOT_USER, Node(0), fh, &mut sink)).unwrap();
        sink.entries
    }

    /// A whole listing in pieces of `room` entries.
    pub fn list_all(&self, node: Node, room: usize, plus: bool) -> Vec<Listed> {
        let fh = now(self.fs.opendir(&ROOT_USER, node, &OpenHow::default()))
            .unwrap()
            .fh;
        let mut all: Vec<Listed> = Vec::new();
        loop {
            let part = self.list(fh, all.last().map_or(0, |last| last.next), room, plus);
            if part.is_empty() {
                break;
            }
            all.extend(part);
        }
        now(self.fs.releasedir(&ROOT_USER, node, fh, OFlags::empty())).unwrap();
        all.retain(|entry| entry.name != "." && entry.name != "..");
        all
    }

    pub fn mode(&self, node: Node) -> u32 {
        now(self.fs.getattr(&ROOT_USER, node, None))
            .unwrap()
            .attr
            .mode
    }
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

pub fn command(command: &str) -> bool {
    Command::new("sh")
        .args(["-c", command])
        .status()
        .is_ok_and(|status| status.success())
}

/// The store on which inodes hold descriptors, as where the server may not open handles.
pub const HELD: &str = "held";

/// Takes from the thread the capability to open file handles.
fn without_handles() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None).unwrap();
    sets.effective -= CapabilitySet::DAC_READ_SEARCH;
    set_capabilities(None, sets).unwrap();
}

/// Runs `test` on a directory of every file system that can be had here: where temporary files are,
/// and as root a tmpfs, an ext4 and an xfs image, mounted where only the thread sees them, so that
/// they go with it; and once without file handles. The name says which.
pub fn on_each_store(test: fn(&str, &Path)) {
    let mut done = 1;
    {
        let dir = tempfile::tempdir().unwrap();
        test("here", dir.path());
    }
    if !is_root() {
        eprintln!("not root: only on {:?}", std::env::temp_dir());
        return;
    }
    let held = std::thread::spawn(move || {
        without_handles();
        let dir = tempfile::tempdir().unwrap();
        test(HELD, dir.path());
    });
    if let Err(panic) = held.join() {
        std::panic::resume_unwind(panic);
    }
    for store in ["tmpfs", "ext4", "xfs"] {
        let ran = std::thread::spawn(move || {
            let dir = tempfile::tempdir().unwrap();
            let (image, at) = (dir.path().join("image"), dir.path().join("at"));
            std::fs::create_dir(&at).unwrap();
            if !own_mounts() {
                return false;
            }
            let (image, at_name) = (image.display(), at.display());
            let mounted = match store {
                "tmpfs" => command(&format!("mount -t tmpfs tmpfs {at_name}")),
                _ => command(&format!(
                    "truncate -s 400M {image} && mkfs.{store} -q {image} && \
                     mount -o loop {image} {at_name}"
                )),
            };
            if mounted {
                let source = at.join("source");
                std::fs::create_dir(&source).unwrap();
                test(store, &source);
                assert!(command(&format!("umount -l {at_name}")));
            }
            mounted
        })
        .join();
        match ran {
            Ok(true) => done += 1,
            Ok(false) => eprintln!("no {store} to be had here"),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    eprintln!("on {done} file systems");
}

/// Gives the thread mounts of its own, which no other thread sees and which end with it.
pub fn own_mounts() -> bool {
    // SAFETY: only detaches this thread's view of the mounts and its working directory.
    let unshared = unsafe { libc::unshare(libc::CLONE_NEWNS) } == 0;
    unshared && command("mount --make-rprivate /")
}
