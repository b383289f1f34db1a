//! The pages that the kernel may keep of a file, and its own reads and writes.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use uvfs_server::fs::SessionHandle;

use super::*;

/// Uncached I/O works on hosts with it and without.
#[test]
fn uncached_io_works_where_the_host_has_it_and_where_not() {
    on_each_store(|store, source| {
        let served = Served::new(
            source,
            Options {
                uncached: true,
                ..Default::default()
            },
        );
        let (_, opened) = served.create(&ROOT_USER, ROOT, "file", 0o600);
        let mut how = IoHow::new(opened.fh, 0);
        how.uncached = true;
        for round in 0..2 {
            let data = vec![round; 300_000];
            assert_eq!(served.write(how, &data), Ok(data.len()), "{store}");
            assert!(
                served.read(opened.fh, 0, 400_000).unwrap() == data,
                "{store}"
            );
        }
    });
}

/// The kernel keeps the pages of a file until the host changes it.
#[test]
fn cached_pages_are_kept_while_the_file_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, b"data").unwrap();
    let old = std::time::SystemTime::now() - Duration::from_secs(100);
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(old)
        .unwrap();
    let served = Served::new(dir.path(), Options::default());
    let node = served.lookup(ROOT, "file").unwrap().node;
    let keeps = || {
        let opened = served.open(node, libc::O_RDONLY).unwrap();
        served.release(opened.fh);
        opened.flags.contains(OpenFlags::KEEP_CACHE)
    };
    assert!(keeps() && keeps());
    std::fs::write(&path, b"changed").unwrap();
    assert!(!keeps() && !keeps());
    // The kernel hears of the change; but the file may change again in the same tick.
    now(served.fs.getattr(&ROOT_USER, node, None)).unwrap();
    std::fs::write(&path, b"CHANGED").unwrap();
    assert!(!keeps());
    let served = Served::new(
        dir.path(),
        Options {
            keep_cache: KeepCache::Never,
            ..Default::default()
        },
    );
    let node = served.lookup(ROOT, "file").unwrap().node;
    let flags = served.open(node, libc::O_RDONLY).unwrap().flags;
    assert!(!flags.contains(OpenFlags::KEEP_CACHE));
    assert!(flags.contains(OpenFlags::NOFLUSH));
}

/// With `-o writeback` a small write succeeds on a file that is open for writing only.
#[test]
fn writeback_reads_what_it_writes_around() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), b"data").unwrap();
    let served = Served::new(
        dir.path(),
        Options {
            writeback: true,
            ..Default::default()
        },
    );
    let wanted = served.init(InitFlags::all()).wanted;
    assert!(wanted.contains(InitFlags::WRITEBACK_CACHE));
    assert!(!wanted.contains(InitFlags::AUTO_INVAL_DATA));
    let node = served.lookup(ROOT, "file").unwrap().node;
    let opened = served.open(node, libc::O_WRONLY | libc::O_APPEND).unwrap();
    assert!(!opened.flags.contains(OpenFlags::NOFLUSH));
    assert_eq!(served.read(opened.fh, 0, 10).unwrap(), b"data");
    let flags = OFlags::WRONLY | OFlags::APPEND;
    // The kernel has worked out where.
    served
        .write(IoHow::new(opened.fh, 1).with_flags(flags), b"A")
        .unwrap();
    assert_eq!(served.read(opened.fh, 0, 10).unwrap(), b"dAta");
    // Without the kernel's consent it is off.
    let wanted = served.init(InitFlags::empty()).wanted;
    assert!(!wanted.contains(InitFlags::WRITEBACK_CACHE));
}

/// The kernel keeps no files open that are not in use.
#[test]
fn backing_files_are_registered_once_and_taken_back() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), b"data").unwrap();
    let options = Options {
        passthrough: Backed::All,
        ..Default::default()
    };
    let kernel = Arc::new(Kernel::default());
    let served = Served::over(dir.path(), options, kernel.clone());
    let live = || kernel.live.lock().unwrap().len();
    let config = served.init(InitFlags::all());
    assert!(config.wanted.contains(InitFlags::PASSTHROUGH) && config.max_stack_depth >= 1);
    let node = served.lookup(ROOT, "file").unwrap().node;
    let first = served.open(node, libc::O_RDONLY).unwrap();
    let second = served.open(node, libc::O_RDWR).unwrap();
    assert_eq!((first.backing, second.backing, live()), (10, 10, 1));
    assert!(first.flags.contains(OpenFlags::PASSTHROUGH));
    served.release(first.fh);
    assert_eq!(live(), 1);
    served.release(second.fh);
    assert_eq!(live(), 0);
    let (_, made) = served.create(&ROOT_USER, ROOT, "new", 0o600);
    assert_eq!(made.backing, 11);
    served.release(made.fh);
    // A file that is being closed elsewhere doesn't keep the next open from having one: the kernel
    // would then have both kinds at once, and refuse.
    let opened_and_closed = || {
        for _ in 0..2000 {
            let opened = served.open(node, libc::O_RDONLY).unwrap();
            assert!(opened.flags.contains(OpenFlags::PASSTHROUGH));
            served.release(opened.fh);
        }
    };
    std::thread::scope(|scope| {
        let others = [(); 2].map(|()| scope.spawn(opened_and_closed));
        for other in others {
            other.join().unwrap();
        }
    });
    assert_eq!(live(), 0);
    // A kernel without it.
    assert!(
        !served
            .init(InitFlags::empty())
            .wanted
            .contains(InitFlags::PASSTHROUGH)
    );
    let opened = served.open(node, libc::O_RDONLY).unwrap();
    assert!(!opened.flags.contains(OpenFlags::PASSTHROUGH));
}

/// A kernel that registers backing files, or refuses to.
#[derive(Default)]
struct Kernel {
    /// Why it refuses; 0 if it does not.
    refusal: AtomicI32,
    asked: AtomicUsize,
    /// The nodes with a backing file, and its number.
    live: Mutex<Vec<(Node, i32)>>,
}

/// The number that [`Kernel`] gives the first backing file.
const FIRST_ID: i32 = 10;

impl SessionHandle for Kernel {
    fn register_backing(&self, node: Node, _: BorrowedFd<'_>) -> std::io::Result<i32> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        match self.refusal.load(Ordering::Relaxed) {
            0 => {
                let id = FIRST_ID + asked as i32;
                self.live.lock().unwrap().push((node, id));
                Ok(id)
            }
            code => Err(std::io::Error::from_raw_os_error(code)),
        }
    }

    fn unregister_backing(&self, node: Node, id: i32) {
        let mut live = self.live.lock().unwrap();
        let at = live.iter().position(|&other| other == (node, id));
        live.remove(at.expect("it is registered"));
    }
}

impl Kernel {
    fn refuses(&self, code: i32) {
        self.refusal.store(code, Ordering::Relaxed);
    }
}

/// A file gets a backing file only while it is not open otherwise, and all its opens share that.
#[test]
fn a_backing_file_is_for_files_that_are_not_open_otherwise() {
    // Only root registers backing files.
    if !has(&[Need::Root]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for name in ["file", "other", "setuid"] {
        std::fs::write(dir.path().join(name), b"data").unwrap();
    }
    let setuid = std::os::unix::fs::PermissionsExt::from_mode(0o4755);
    std::fs::set_permissions(dir.path().join("setuid"), setuid).unwrap();
    let kernel = Arc::new(Kernel::default());
    let served = Served::over(dir.path(), Options::default(), kernel.clone());
    let config = served.init(InitFlags::all());
    assert!(config.wanted.contains(InitFlags::PASSTHROUGH));
    let [file, other, setuid] =
        ["file", "other", "setuid"].map(|name| served.lookup(ROOT, name).unwrap().node);
    let open = |node, flags| {
        let opened = served.open(node, flags).unwrap();
        let backed = opened.flags.contains(OpenFlags::PASSTHROUGH);
        let live = kernel
            .live
            .lock()
            .unwrap()
            .contains(&(node, opened.backing));
        assert_eq!(backed, live);
        assert!(!backed || !opened.flags.contains(OpenFlags::DIRECT_IO));
        (opened.fh, backed)
    };
    let direct = libc::O_RDONLY | libc::O_DIRECT;
    // Nothing else may be open, and all that is opened then is the same.
    let plain = open(file, libc::O_WRONLY);
    let refused = open(file, direct);
    assert!(!plain.1 && !refused.1);
    served.release(plain.0);
    let refused_too = open(file, direct);
    assert!(!refused_too.1);
    served.release(refused.0);
    served.release(refused_too.0);
    let first = open(file, direct);
    let buffered = open(file, libc::O_RDWR);
    assert!(first.1 && buffered.1);
    served.release(first.0);
    assert!(open(file, direct).1);
    let live: Vec<Node> = kernel
        .live
        .lock()
        .unwrap()
        .iter()
        .map(|one| one.0)
        .collect();
    assert_eq!(live, [file]);
    assert!(!open(other, libc::O_RDONLY).1 && !open(setuid, direct).1);
    // Clients are not the kernel.
    let mut how = OpenHow::new(OFlags::from_bits_retain(direct as u32));
    how.origin = Origin::Client(());
    let client = now(served.fs.open(&ROOT_USER, file, &how)).unwrap();
    assert_eq!(client.backing, 0);
    let fresh = |name: &str| {
        std::fs::write(dir.path().join(name), b"data").unwrap();
        served.lookup(ROOT, name).unwrap().node
    };
    // A lease is in the way, for once.
    kernel.refuses(libc::EBUSY);
    let node = fresh("busy");
    let busy = open(node, direct);
    served.release(busy.0);
    kernel.refuses(0);
    assert!(!busy.1 && open(node, direct).1);
    // A refusal that can't change is asked for once.
    kernel.refuses(libc::EPERM);
    assert!(!open(fresh("a"), direct).1);
    let before = kernel.asked.load(Ordering::Relaxed);
    kernel.refuses(0);
    assert!(!open(fresh("b"), direct).1);
    assert_eq!(kernel.asked.load(Ordering::Relaxed), before);
    assert!(open(file, libc::O_RDONLY).1, "as the others of it");
}
