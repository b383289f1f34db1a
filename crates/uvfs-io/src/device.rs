//! Block devices and image files.
//!
//! A [`Device`] is opened so that two users of it do no harm to each other. A block device is claimed exclusively
//! (the kernel then refuses to mount it, and refuses the claim while it is mounted). An image file is locked:
//! readers share it, a writer has it alone, also among the tools that know such locks, as QEMU does. Neither a
//! device nor an image behind a loop device is opened while it is mounted for writing. [`Geometry`] is all that the layers
//! above know of it, so that a device that is no local file needs its own
//! [`Engine`](crate::engine::Engine) and nothing else.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;
use uvfs_sys::mountinfo::MountLine;

/// How long a block device may stay claimed, or an image locked, by a program that has ended: the kernel ends that
/// program's rings in the background, and services look at devices that have changed.
const RELEASE: Duration = Duration::from_secs(1);
/// Between two attempts to claim a device.
const RETRY: Duration = Duration::from_millis(5);

/// How to open a [`Device`].
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenOptions {
    /// For writing too.
    pub write: bool,
    /// Without the kernel's page cache (`O_DIRECT`). Fails where the file system underneath has
    /// no direct I/O.
    pub direct: bool,
    /// Even when it is mounted for writing or otherwise in use, and without a lock: what is read may then be
    /// inconsistent, what is written destroys it. For read-only looks at a live system, and for a further
    /// descriptor of an image whose lock the caller holds.
    pub shared: bool,
}

/// The sizes that rule I/O on a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Its size.
    pub size: u64,
    /// Offsets and lengths are multiples of this (a power of two, 512 to 64 KiB; 1 for
    /// buffered image files).
    pub block: u32,
    /// Memory is aligned to this.
    pub memory_align: u32,
    /// Writes are refused.
    pub read_only: bool,
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The system call that failed.
    #[error("{path}: {what}: {error}")]
    Io {
        /// The device or image.
        path: PathBuf,
        /// The call that failed.
        what: &'static str,
        /// The kernel's error.
        #[source]
        error: io::Error,
    },
    /// Neither a block device nor a regular file.
    #[error("{0}: neither a block device nor an image file")]
    Kind(PathBuf),
    /// Mounted for writing (or mounted at all, when it was to be opened for writing).
    #[error("{path}: mounted at {at}: unmount it (or remount it read-only to read it) first")]
    Mounted {
        /// The device or image.
        path: PathBuf,
        /// Where it is mounted.
        at: PathBuf,
    },
    /// Claimed by something that is no mount: another program, a volume group, a RAID, swap.
    #[error("{0}: in use by another program, a volume group, a RAID or as swap")]
    Busy(PathBuf),
    /// An image file that another process reads or writes, and that this one may not write or read meanwhile.
    #[error(
        "{path}: {} by another process, such as a mount, mkfs, check or repair of it, or QEMU: \
         end that process {}",
        if *write { "in use" } else { "being written" },
        if *write { "before it is written" } else { "before it is read" },
    )]
    Locked {
        /// The image.
        path: PathBuf,
        /// It was to be opened for writing.
        write: bool,
    },
    /// The file system that holds the image has no direct I/O.
    #[error("{0}: its file system has no direct I/O: open it buffered")]
    NoDirect(PathBuf),
}

impl OpenError {
    /// The errno that describes it best.
    pub fn errno(&self) -> i32 {
        match self {
            OpenError::Io { error, .. } => error.raw_os_error().unwrap_or(libc::EIO),
            OpenError::Kind(_) => libc::ENOTBLK,
            OpenError::Mounted { .. } | OpenError::Busy(_) | OpenError::Locked { .. } => {
                libc::EBUSY
            }
            OpenError::NoDirect(_) => libc::EINVAL,
        }
    }
}

/// An open block device or image file.
#[derive(Debug)]
pub struct Device {
    file: File,
    path: PathBuf,
    geometry: Geometry,
    direct: bool,
    block_device: bool,
}

impl Device {
    /// Opens the block device or image file at `path`.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(path: impl AsRef<Path>, options: OpenOptions) -> Result<Device, OpenError> {
        let path = path.as_ref();
        let failed = |what| {
            move |error: io::Error| OpenError::Io {
                path: path.into(),
                what,
                error,
            }
        };
        let meta = fs::metadata(path).map_err(failed("looking it up"))?;
        let block_device = match FileType::from_raw_mode(meta.mode()) {
            FileType::BlockDevice => true,
            FileType::RegularFile => false,
            _ => return Err(OpenError::Kind(path.into())),
        };
        let access = if options.write {
            OFlags::RDWR
        } else {
            OFlags::RDONLY
        };
        let mut flags = access | OFlags::CLOEXEC;
        flags.set(OFlags::DIRECT, options.direct);
        if !options.shared {
            refuse_mounted(path, &meta, block_device, options.write)?;
        }
        // O_EXCL without O_CREAT claims a block device (open(2)).
        let claim = block_device && !options.shared;
        let exclusive = if claim { flags | OFlags::EXCL } else { flags };
        let is_mounted = || mounted_at(&devices(meta.rdev())).is_some();
        let began = Instant::now();
        let first = retried(
            began,
            || rustix::fs::open(path, exclusive, Mode::empty()),
            |errno| errno == Errno::BUSY && claim && !is_mounted(),
        );
        let fd = match first {
            // The claim fails on a device that is mounted read-only too, which may be read.
            Err(Errno::BUSY) if claim && !options.write && is_mounted() => {
                rustix::fs::open(path, flags, Mode::empty())
            }
            other => other,
        };
        let fd = fd.map_err(|error| match error {
            Errno::BUSY if block_device => OpenError::Busy(path.into()),
            Errno::INVAL if options.direct => OpenError::NoDirect(path.into()),
            error => failed("opening it")(error.into()),
        })?;
        if !block_device && !options.shared {
            let locked = retried(
                began,
                || lock_image(fd.as_fd(), options.write),
                |errno| matches!(errno, Errno::AGAIN | Errno::ACCESS),
            );
            locked.map_err(|error| match error {
                Errno::AGAIN | Errno::ACCESS => OpenError::Locked {
                    path: path.into(),
                    write: options.write,
                },
                error => failed("locking it")(error.into()),
            })?;
        }
        Device::of(fd, path, block_device, options)
    }

    /// A device that an earlier program of this process has opened for reading, with the page cache. It has its claim or
    /// lock still.
    ///
    /// # Errors
    /// [`OpenError::Kind`] and [`OpenError::Io`].
    pub fn again(fd: OwnedFd, path: &Path) -> Result<Device, OpenError> {
        let failed = |error: Errno| OpenError::Io {
            path: path.into(),
            what: "looking it up",
            error: error.into(),
        };
        let stat = rustix::fs::fstat(&fd).map_err(failed)?;
        let block_device = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => true,
            FileType::RegularFile => false,
            _ => return Err(OpenError::Kind(path.into())),
        };
        Device::of(fd, path, block_device, OpenOptions::default())
    }

    /// The device, or the file, of an open descriptor.
    fn of(
        fd: OwnedFd,
        path: &Path,
        block_device: bool,
        options: OpenOptions,
    ) -> Result<Device, OpenError> {
        let failed = |what| {
            move |error: io::Error| OpenError::Io {
                path: path.into(),
                what,
                error,
            }
        };
        // Seeking to the end works for block devices as well, without their ioctls.
        let size = rustix::fs::seek(&fd, SeekFrom::End(0))
            .map_err(|error| failed("asking its size")(error.into()))?;
        let (block, memory_align) = if block_device {
            let block = rustix::fs::ioctl_blksszget(&fd)
                .map_err(|error| failed("asking its block size")(error.into()))?;
            (block, if options.direct { block } else { 1 })
        } else if options.direct {
            direct_alignment(fd.as_fd()).ok_or_else(|| OpenError::NoDirect(path.into()))?
        } else {
            (1, 1)
        };
        Ok(Device {
            file: fd.into(),
            path: path.into(),
            geometry: Geometry {
                size,
                block,
                memory_align,
                read_only: !options.write,
            },
            direct: options.direct,
            block_device,
        })
    }

    /// Its sizes.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The path it was opened by, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether I/O goes past the kernel's page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Whether it is a block device, and not an image file.
    pub fn is_block_device(&self) -> bool {
        self.block_device
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Makes a call again while it fails in a way that may pass, until [`RELEASE`] after `began`.
fn retried<T>(
    began: Instant,
    mut call: impl FnMut() -> Result<T, Errno>,
    passes: impl Fn(Errno) -> bool,
) -> Result<T, Errno> {
    loop {
        match call() {
            Err(errno) if began.elapsed() < RELEASE && passes(errno) => std::thread::sleep(RETRY),
            done => return done,
        }
    }
}

/// Locks a whole image file, for as long as its descriptor is open (open file description locks, fcntl(2)): shared
/// for reading, exclusive for writing. A file system without locks has none to ask for.
fn lock_image(fd: BorrowedFd<'_>, write: bool) -> Result<(), Errno> {
    // All zeros but for the kind: from the start of the file to wherever it ends.
    let kind = if write { libc::F_WRLCK } else { libc::F_RDLCK };
    let locked = uvfs_sys::ofd_lock(fd, libc::F_OFD_SETLK, &mut uvfs_sys::whole_file(kind));
    match locked {
        Err(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        other => other,
    }
}

/// Offset and memory alignment of direct I/O on a regular file. Kernels before 6.1 do not tell:
/// 4 KiB serves everywhere. `None` when the kernel says that there is no direct I/O.
fn direct_alignment(fd: BorrowedFd<'_>) -> Option<(u32, u32)> {
    let stat = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    match stat {
        Ok(stat) if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => (stat.stx_dio_offset_align
            != 0)
            .then_some((stat.stx_dio_offset_align, stat.stx_dio_mem_align.max(1))),
        _ => Some((4096, 4096)),
    }
}

/// The number of one device as mountinfo writes it.
fn devices(rdev: u64) -> Vec<String> {
    vec![format!(
        "{}:{}",
        rustix::fs::major(rdev),
        rustix::fs::minor(rdev)
    )]
}

/// The loop devices whose backing file is this one, as mountinfo writes their numbers.
fn loops_of(meta: &fs::Metadata) -> Vec<String> {
    let Ok(entries) = fs::read_dir("/sys/block") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let backing = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
            let other = fs::metadata(backing.trim_end_matches('\n')).ok()?;
            if (other.dev(), other.ino()) != (meta.dev(), meta.ino()) {
                return None;
            }
            let number = fs::read_to_string(entry.path().join("dev")).ok()?;
            Some(number.trim().to_owned())
        })
        .collect()
}

/// Where one of these devices is mounted, and whether its file system may be written.
fn mounted_at(numbers: &[String]) -> Option<(PathBuf, bool)> {
    mounts_of(uvfs_sys::mountinfo::table().unwrap_or_default(), numbers)
}

/// As [`mounted_at`], from the mount table; a mount that may be written comes before one that may not.
fn mounts_of(
    table: impl IntoIterator<Item = MountLine>,
    numbers: &[String],
) -> Option<(PathBuf, bool)> {
    let found = table
        .into_iter()
        .filter(|line| numbers.contains(&line.device));
    let found = found.map(|line| {
        // The options of the mount may say `ro`; only those of the file system say that the kernel writes nothing.
        let writable = line.file_system.split(',').any(|option| option == "rw");
        (line.at, writable)
    });
    found.max_by_key(|(_, writable)| *writable)
}

fn refuse_mounted(
    path: &Path,
    meta: &fs::Metadata,
    block_device: bool,
    write: bool,
) -> Result<(), OpenError> {
    let numbers = if block_device {
        devices(meta.rdev())
    } else {
        loops_of(meta)
    };
    if numbers.is_empty() {
        return Ok(());
    }
    match mounted_at(&numbers) {
        Some((at, writable)) if writable || write => Err(OpenError::Mounted {
            path: path.into(),
            at,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image file opens with its size, and an error names the file that is missing.
    #[test]
    fn image_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        fs::write(&path, vec![0; 10_000]).unwrap();
        let device = Device::open(&path, OpenOptions::default()).unwrap();
        assert_eq!(
            device.geometry(),
            Geometry {
                size: 10_000,
                block: 1,
                memory_align: 1,
                read_only: true
            }
        );
        assert!(!device.is_block_device());
        let error = Device::open(dir.path(), OpenOptions::default()).unwrap_err();
        assert!(matches!(error, OpenError::Kind(_)));
        let error = Device::open(dir.path().join("none"), OpenOptions::default()).unwrap_err();
        assert_eq!(error.errno(), libc::ENOENT);
        assert!(error.to_string().contains("none: looking it up"), "{error}");
    }

    /// Readers of an image share it; a writer has it alone.
    #[test]
    fn image_files_are_locked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        fs::write(&path, vec![0; 10_000]).unwrap();
        let write = OpenOptions {
            write: true,
            ..OpenOptions::default()
        };
        let refused = |how| {
            let error = Device::open(&path, how).unwrap_err();
            assert!(matches!(error, OpenError::Locked { .. }), "{error}");
            assert_eq!(error.errno(), libc::EBUSY);
        };
        let reader = Device::open(&path, OpenOptions::default()).unwrap();
        let second = Device::open(&path, OpenOptions::default()).unwrap();
        refused(write);
        drop((reader, second));
        let writer = Device::open(&path, write).unwrap();
        refused(OpenOptions::default());
        let shared = OpenOptions {
            shared: true,
            ..OpenOptions::default()
        };
        Device::open(&path, shared).unwrap();
        // Closing another descriptor of the file does not end the lock.
        refused(write);
        drop(writer);
        Device::open(&path, write).unwrap();
    }

    /// The mount of a device is found, and whether it is mounted for writing.
    #[test]
    fn mounts_are_found() {
        let text = "\
36 35 7:3 / /mnt/a rw,noatime shared:1 - xfs /dev/loop3 ro,attr2\n\
37 35 7:4 / /mnt/b ro,noatime - xfs /dev/loop4 rw,attr2\n\
38 35 7:5 / /mnt/c ro - ext4 /dev/loop5 ro\n\
39 35 7:5 / /mnt/d ro - ext4 /dev/loop5 rw\n\
40 35 7:7 / /mnt/e\\040f rw - ext4 /dev/loop7 rw\n";
        let table = || {
            text.lines()
                .filter_map(|line| MountLine::parse(line.as_bytes()))
        };
        let at = |n: &str| mounts_of(table(), &[n.to_owned()]);
        assert_eq!(at("7:3"), Some(("/mnt/a".into(), false)));
        assert_eq!(at("7:4"), Some(("/mnt/b".into(), true)));
        assert_eq!(at("7:5"), Some(("/mnt/d".into(), true)));
        assert_eq!(at("7:6"), None);
        assert_eq!(at("7:7"), Some(("/mnt/e f".into(), true)));
    }
}
