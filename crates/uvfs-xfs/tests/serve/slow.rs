//! An image on a device that takes its time.

use super::*;
use std::ffi::CStr;
use std::sync::{Condvar, Mutex};
use uvfs_io::{Payload, blocking};
use uvfs_server::fs::{
    Attr, Attributes, Context, Entry, Errno, FileSystem, FileType, Handle, IoHow, Node, ROOT,
    Result, attr, read_from,
};

/// Reads are held back for so long at most.
const LIMIT: Duration = Duration::from_secs(30);

/// Reads that are held back.
#[derive(Default)]
struct Gate {
    /// Whether it is closed, and how many reads wait.
    state: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    fn set(&self, closed: bool) {
        self.state.lock().unwrap().0 = closed;
        self.changed.notify_all();
    }

    /// Waits while it is closed.
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        self.changed.notify_all();
        // A test that fails must end: the kernel waits for this read, also when the process is killed.
        let waited = self.changed.wait_timeout_while(state, LIMIT, |s| s.0);
        waited.unwrap().0.1 -= 1;
    }

    /// Waits until so many reads wait.
    fn wait_for(&self, reads: usize) {
        let state = self.state.lock().unwrap();
        let limit = Duration::from_secs(60);
        let waited = self
            .changed
            .wait_timeout_while(state, limit, |s| s.1 < reads);
        let (state, timeout) = waited.unwrap();
        assert!(!timeout.timed_out(), "{} reads wait", state.1);
    }
}

/// Opens a gate at the end, also of a test that fails.
struct Opened<'g>(&'g Gate);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// A file system with one file, whose reads pass a gate.
struct Slow {
    file: Arc<fs::File>,
    size: u64,
    gate: Arc<Gate>,
}

const IMAGE: Node = Node(2);

impl Slow {
    fn attributes(&self, node: Node) -> Attributes {
        let attr = match node {
            ROOT => attr(ROOT, FileType::Directory, 0o555),
            _ => Attr {
                size: self.size,
                ..attr(IMAGE, FileType::RegularFile, 0o444)
            },
        };
        Attributes::new(attr, Duration::from_secs(3600))
    }
}

impl FileSystem for Slow {
    async fn lookup(&self, _: &Context, _: Node, name: &CStr) -> Result<Entry> {
        match name.to_bytes() {
            b"image" => Ok(self.attributes(IMAGE).into()),
            _ => Err(Errno::NOENT.into()),
        }
    }

    async fn getattr(&self, _: &Context, node: Node, _: Option<Handle>) -> Result<Attributes> {
        Ok(self.attributes(node))
    }

    async fn read(&self, _: &Context, _: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let (file, gate, at) = (self.file.clone(), self.gate.clone(), how.offset);
        let len = data.len();
        let bytes = blocking::run(move || {
            gate.pass();
            let mut bytes = vec![0; len];
            let n = file.read_at(&mut bytes, at).unwrap();
            bytes.truncate(n);
            bytes
        });
        Ok(read_from(&bytes.await, 0, data))
    }
}

/// A server that reads its image by AIO goes on answering while the device takes its time over reads: here more
/// requests wait for the device than the server has threads, and others are answered.
#[test]
fn requests_go_on_while_reads_wait() {
    let Some(image) = image(&[]) else { return };
    if !has(&[Need::Fuse]) {
        return;
    }
    let file = fs::File::open(image.path()).unwrap();
    let gate = Arc::new(Gate::default());
    let slow = Slow {
        size: file.metadata().unwrap().len(),
        file: Arc::new(file),
        gate: gate.clone(),
    };
    let dir = tempfile::Builder::new().prefix("uvfs-xfs-slow-").tempdir();
    let dir = dir.unwrap();
    let options = uvfs_server::Options::named("slow").read_only();
    let device = uvfs_server::mount(slow, dir.path(), options).unwrap();
    let path = device.path().join("image");
    let blocks = through_cache(&path, false, 64 << 20, EngineKind::Aio);
    let served = Served::new(Volume::open(Arc::new(blocks.expect("AIO"))).unwrap());
    let root = served.path().to_path_buf();
    let list = |name: &str| fs::read_dir(root.join(name)).unwrap().count();
    // Their blocks are in the cache then.
    let short = list("dir5");
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get());
    let dirs = [
        "dir500", "dir6000", "dir60", "holes", "names", "attrs", "deep",
    ];
    let dirs = &dirs[..dirs.len().min(threads + 1)];
    for name in dirs {
        fs::metadata(root.join(name)).unwrap();
    }
    // The kernel has read ahead.
    let cached = fs::File::open(&path).unwrap();
    rustix::fs::fadvise(&cached, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    gate.set(true);
    std::thread::scope(|s| {
        let opened = Opened(&gate);
        let waiting: Vec<_> = dirs.iter().map(|d| s.spawn(|| list(d))).collect();
        gate.wait_for(dirs.len());
        assert_eq!(list("dir5"), short);
        assert!(rustix::fs::statvfs(&root).unwrap().f_blocks > 0);
        assert!(waiting.iter().all(|w| !w.is_finished()));
        drop(opened);
        for (name, listed) in dirs.iter().zip(waiting) {
            assert_eq!(listed.join().unwrap(), list(name), "{name}");
        }
    });
}
