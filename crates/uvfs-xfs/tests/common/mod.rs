//! Images made by mkfs.xfs and filled through the kernel, and the comparison of what the kernel
//! shows with what the reader shows.

#![allow(dead_code, missing_docs)]

mod compare;
mod fill;
pub mod proto;

use rustix::fs::{
    self as rfs, AtFlags, CWD, FallocateFlags, Gid, Mode, StatxFlags, Timestamps, Uid, XattrFlags,
};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirEntryExt, FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, Weak};
use uvfs_testing::{Need, has};
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::format::FileType;
use uvfs_xfs::{Error, Fork, Inode, Volume};

pub use fill::*;

pub use compare::*;

/// Runs a command and gives its output, whatever its status.
pub fn output(program: &str, args: &[&OsStr]) -> std::io::Result<Output> {
    Command::new(program).args(args).output()
}

/// Runs a command that must succeed.
pub fn run<S: AsRef<OsStr>>(program: &str, args: &[S]) -> String {
    let args: Vec<&OsStr> = args.iter().map(AsRef::as_ref).collect();
    let out = output(program, &args).unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(
        out.status.success(),
        "{program} {args:?} failed: {}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Whether images can be made and mounted here.
pub fn can_run() -> bool {
    if !has(&[Need::Root, Need::Program("mkfs.xfs")]) {
        return false;
    }
    let loop_devices = Path::new("/dev/loop-control").exists();
    if !loop_devices {
        uvfs_testing::skip("needs loop devices");
    }
    loop_devices
}

/// Where images go: memory if there is plenty, because each unmount flushes its image to disk.
fn base_dir() -> PathBuf {
    let shm = Path::new("/dev/shm");
    let room = rfs::statvfs(shm).map_or(0, |s| s.f_bavail * s.f_frsize);
    if std::env::var_os("TMPDIR").is_none() && room > 2 << 30 {
        shm.into()
    } else {
        std::env::temp_dir()
    }
}

/// An image in a directory of its own, removed at the end.
pub struct Image {
    dir: tempfile::TempDir,
}

impl Image {
    pub fn new() -> Image {
        let dir = tempfile::Builder::new()
            .prefix("uvfs-xfs-")
            .tempdir_in(base_dir())
            .unwrap();
        Image { dir }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// A sparse image of 400 MiB, made with `args`. Gives whether this mkfs knows them.
    pub fn mkfs(&self, args: &[&str]) -> bool {
        let path = self.path();
        File::create(&path).unwrap().set_len(400 << 20).unwrap();
        let mut all: Vec<&OsStr> = vec![OsStr::new("-q"), OsStr::new("-f")];
        all.extend(args.iter().map(OsStr::new));
        all.push(path.as_os_str());
        let out = output("mkfs.xfs", &all).unwrap();
        if !out.status.success() {
            eprintln!(
                "mkfs.xfs {args:?}: {}",
                String::from_utf8_lossy(&out.stderr)
            );
        }
        out.status.success()
    }

    pub fn open(&self) -> Volume {
        Volume::open(Arc::new(FileBlocks::open(&self.path()).unwrap())).unwrap()
    }
}

/// A mount, undone when dropped.
pub struct Mount {
    dir: tempfile::TempDir,
}

impl Mount {
    /// Mounts `image`; an error is what mount said.
    pub fn new(image: &Path, options: &str) -> Result<Mount, String> {
        let dir = tempfile::Builder::new()
            .prefix("uvfs-xfs-mnt-")
            .tempdir()
            .unwrap();
        let options = format!("loop,{options}");
        let args: Vec<&OsStr> = vec![
            OsStr::new("-t"),
            OsStr::new("xfs"),
            OsStr::new("-o"),
            OsStr::new(&options),
            image.as_os_str(),
            dir.path().as_os_str(),
        ];
        let out = output("mount", &args).map_err(|e| e.to_string())?;
        if out.status.success() {
            Ok(Mount { dir })
        } else {
            Err(String::from_utf8_lossy(&out.stderr).into_owned())
        }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let dir = self.dir.path().as_os_str();
        for flags in [&[][..], &["-l"][..]] {
            let mut args: Vec<&OsStr> = flags.iter().map(OsStr::new).collect();
            args.push(dir);
            if output("umount", &args).is_ok_and(|o| o.status.success()) {
                return;
            }
        }
        eprintln!("could not unmount {}", self.dir.path().display());
    }
}

/// The forks' formats found on a volume: (fork, format) to how many inodes have it.
pub fn formats(volume: &Volume, root: &Path) -> BTreeMap<(bool, u8), usize> {
    let mut seen = BTreeMap::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(path) = todo.pop() {
        let m = fs::symlink_metadata(&path).unwrap();
        let inode = volume.inode(m.ino()).unwrap();
        for fork in [Fork::Data, Fork::Attr] {
            if let Some(f) = inode.fork_format(fork) {
                *seen.entry((fork == Fork::Attr, f)).or_insert(0) += 1;
            }
        }
        if m.is_dir() {
            todo.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
    }
    seen
}

/// Whether images can be made, mounted and compared here.
pub fn can_compare() -> bool {
    can_run() && has(&[Need::Program("xfs_repair"), Need::Program("xfs_db")])
}

/// A filled image, looked at by `empty` before it was filled; `None` if this kernel does not mount such.
pub fn filled_after(args: &[&str], empty: impl FnOnce(&Path)) -> Option<Image> {
    let image = Image::new();
    assert!(image.mkfs(args), "mkfs.xfs {args:?}");
    empty(&image.path());
    let block_size = image.open().geometry().block_size.into();
    match Mount::new(&image.path(), "rw") {
        Ok(m) => fill(m.path(), block_size),
        Err(e) => {
            uvfs_testing::say(format_args!("this kernel does not mount {args:?}: {e}"));
            return None;
        }
    }
    Some(image)
}

/// The complaint of `xfs_repair -n` about an image, unless it finds it sound.
pub fn xfs_repair_n(path: &Path) -> Option<String> {
    let args = ["60", "xfs_repair", "-n", "-f"].map(OsStr::new);
    let out = output("timeout", &[&args[..], &[path.as_os_str()]].concat()).unwrap();
    (out.status.code() != Some(0)).then(|| {
        String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
    })
}

/// Lines of xfs_repair that say nothing of what it found.
pub fn is_noise(line: &str) -> bool {
    [
        "Phase",
        "        - ",
        "No modify",
        "Cannot get host",
        "Repair may fail",
        "the image and the host",
    ]
    .iter()
    .any(|n| line.starts_with(n))
}

/// The image that most damage is done to: small blocks, so that every tree has levels. Tests that
/// run at the same time share one; the last removes it. `empty` looks at it before it is filled.
pub fn base_after(empty: impl FnOnce(&Path)) -> Option<Arc<Image>> {
    static BASE: Mutex<Weak<Image>> = Mutex::new(Weak::new());
    if !can_compare() {
        return None;
    }
    let mut base = BASE.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(image) = base.upgrade() {
        return Some(image);
    }
    let args = ["-b", "size=1024", "-m", "rmapbt=1,reflink=1"];
    let image = Arc::new(filled_after(&args, empty)?);
    *base = Arc::downgrade(&image);
    Some(image)
}
