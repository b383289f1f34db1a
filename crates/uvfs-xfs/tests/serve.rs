//! An image served over FUSE, read through the buffer cache, must look as the reader says (which
//! `reader.rs` compares with the kernel). Needs root, loop devices, mkfs.xfs and /dev/fuse.

mod common;
#[path = "serve/slow.rs"]
mod slow;

use common::*;
use rustix::mount::MountFlags;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use uvfs_buf::{Config, Target};
use uvfs_io::device::{Device, OpenOptions};
use uvfs_io::engine::EngineKind;
use uvfs_server::mount::{self, MountOptions};
use uvfs_server::{Server, ServerOptions, Session, SessionOptions, Transport};
use uvfs_testing::{Need, has};
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::check::{CheckOptions, CheckProgress, check};
use uvfs_xfs::{Blocks, CachedBlocks, Volume, XfsFs};

/// A FUSE mount of an image, undone when dropped.
struct Served {
    dir: tempfile::TempDir,
    server: Option<Server<XfsFs>>,
}

impl Served {
    fn new(volume: Volume) -> Served {
        let dir = tempfile::Builder::new()
            .prefix("uvfs-xfs-fuse-")
            .tempdir()
            .unwrap();
        let options = MountOptions {
            name: "image".into(),
            subtype: "uvfs".into(),
            allow_other: false,
            default_permissions: true,
            flags: MountFlags::RDONLY | MountFlags::NOATIME,
            ..MountOptions::default()
        };
        let device = mount::mount(dir.path(), &options).unwrap();
        let device = device.device().unwrap();
        let mut served = Served { dir, server: None };
        let fs = XfsFs::new(Arc::new(volume));
        let session = Arc::new(Session::new(fs, device, SessionOptions::default()));
        let options = ServerOptions {
            transport: Transport::Auto,
            ..ServerOptions::default()
        };
        served.server = Some(Server::start(session, options).unwrap());
        served
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Err(e) = mount::unmount(self.dir.path(), true) {
            eprintln!("could not unmount {}: {e}", self.dir.path().display());
        }
        if let Some(server) = self.server.take() {
            assert!(server.ends_within(Duration::from_secs(30)) || std::thread::panicking());
        }
    }
}

/// Opens an image through the buffer cache.
fn cached(path: &Path, direct: bool, limit: usize) -> Option<Volume> {
    let blocks = through_cache(path, direct, limit, EngineKind::Sync)?;
    Some(Volume::open(Arc::new(blocks)).unwrap())
}

/// The blocks of an image, behind the buffer cache.
fn through_cache(
    path: &Path,
    direct: bool,
    limit: usize,
    engine: EngineKind,
) -> Option<CachedBlocks> {
    let options = OpenOptions {
        direct,
        ..OpenOptions::default()
    };
    let device = match Device::open(path, options) {
        Ok(d) => Arc::new(d),
        Err(e) => {
            uvfs_testing::say(e);
            return None;
        }
    };
    let config = Config {
        limit,
        ..Config::default()
    };
    let target = match Target::open(device.clone(), engine, config) {
        Ok(target) => Arc::new(target),
        Err(e) => {
            uvfs_testing::say(format_args!("{engine}: {e}"));
            return None;
        }
    };
    Some(CachedBlocks::new(target, device))
}

fn image(args: &[&str]) -> Option<Image> {
    if !can_run() {
        return None;
    }
    let image = Image::new();
    assert!(image.mkfs(args));
    let mount = Mount::new(&image.path(), "rw").unwrap();
    fill(mount.path(), 4096);
    drop(mount);
    Some(image)
}

/// A mounted image shows the files of the kernel's mount of it.
#[test]
fn served_like_the_kernel() {
    let Some(image) = image(&[]) else { return };
    if !has(&[Need::Fuse]) {
        return;
    }
    // Past the page cache, where data cannot be read straight into an answer.
    if let Some(volume) = cached(&image.path(), true, 16 << 20) {
        let served = Served::new(volume);
        assert!(compare(&image.open(), served.path()) > 6800);
    }
    // In so little memory that metadata is read again and again.
    let served = Served::new(cached(&image.path(), false, 1 << 20).unwrap());
    assert!(compare(&image.open(), served.path()) > 6800);
    drop(served);
    let served = Served::new(cached(&image.path(), false, 64 << 20).unwrap());
    let count = compare(&image.open(), served.path());
    assert!(count > 6800, "{count} inodes");
    let full = fs::File::options()
        .write(true)
        .open(served.path().join("files/plain-511"));
    assert_eq!(full.unwrap_err().raw_os_error(), Some(30));
    let kernel = Mount::new(&image.path(), "ro,norecovery,noatime").unwrap();
    let view = |root: &Path| {
        let s = rustix::fs::statvfs(root).unwrap();
        (s.f_blocks, s.f_bsize, s.f_namemax)
    };
    assert_eq!(view(served.path()), view(kernel.path()));
    let archive = |root: &Path| {
        // Attributes and holes are compared above; tar writes them in an order that may differ.
        let args = [
            "--numeric-owner",
            "--sort=name",
            "--exclude=./files/sparse",
            "-cf",
            "-",
            ".",
        ];
        let tar = Command::new("tar")
            .args(args)
            .current_dir(root)
            .output()
            .unwrap();
        assert!(
            tar.status.success(),
            "{}",
            String::from_utf8_lossy(&tar.stderr)
        );
        tar.stdout
    };
    assert!(archive(served.path()) == archive(kernel.path()));
}

/// Through the cache, in little memory, and past the page cache in units of the device's own.
#[test]
fn cached_like_the_kernel() {
    let Some(image) = image(&["-s", "size=4096"]) else {
        return;
    };
    let kernel = Mount::new(&image.path(), "ro,norecovery,noatime").unwrap();
    for (direct, limit) in [(false, 4 << 20), (true, 16 << 20)] {
        if let Some(volume) = cached(&image.path(), direct, limit) {
            assert!(compare(&volume, kernel.path()) > 6800);
        }
    }
}

/// The checker finds the same through the cache, in little memory, as by its own reads.
#[test]
fn checked_through_the_cache() {
    let Some(image) = image(&[]) else { return };
    let path = image.path();
    let found = |blocks: Arc<dyn Blocks>| {
        let o = check(blocks, &CheckOptions::default(), &CheckProgress::default()).unwrap();
        let all: Vec<String> = o.findings.iter().map(|f| f.to_string()).collect();
        (o.inodes, all)
    };
    let own = || found(Arc::new(FileBlocks::open(&path).unwrap()));
    let sound = own();
    assert!(sound.0 > 6800 && sound.1.is_empty(), "{sound:?}");
    for engine in EngineKind::ALL {
        if let Some(blocks) = through_cache(&path, true, 40 << 20, engine) {
            assert_eq!(found(Arc::new(blocks)), sound, "{engine}");
        }
    }
    // A directory block, whose checksum is wrong then.
    let v = image.open();
    let dir = v.resolve(b"/dir500", false).unwrap();
    let mut first = None;
    v.map(&dir, uvfs_xfs::Fork::Data, 0, 1 << 20, &mut |e| {
        first = first.or(Some(e.startblock));
        Ok(true)
    })
    .unwrap();
    let at = v
        .geometry()
        .daddr(v.geometry().fsb(first.unwrap()).unwrap())
        << 9;
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[0xff; 64], at + 128).unwrap();
    file.sync_all().unwrap();
    let damaged = own();
    assert!(!damaged.1.is_empty());
    for engine in EngineKind::ALL {
        if let Some(blocks) = through_cache(&path, true, 40 << 20, engine) {
            assert_eq!(found(Arc::new(blocks)), damaged, "{engine}");
        }
    }
}
