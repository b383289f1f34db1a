//! The file or device that becomes a file system: looked at, made ready, opened.

use super::layout::FixedBlocks;
use super::pool::Output;
use super::signatures;
use super::{MkfsError, MkfsOptions};
use crate::format::{Layout as _, Superblock};
use rustix::fs::FallocateFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use uvfs_io::device::{Device, OpenError, OpenOptions as DeviceOptions};
use uvfs_io::engine::{self, EngineConfig, EngineKind};

/// How much of the start and the end of a device is wiped, so that nothing that was there is found again: the labels
/// of ZFS reach farthest, half a MiB from either end.
const WIPED: u64 = 1 << 20;

/// The directory of the temporary file that an archive is read into: that of an image, but not that of a device.
pub fn scratch(image: &Path) -> PathBuf {
    let meta = image.metadata();
    match meta.is_ok_and(|it| it.file_type().is_block_device()) {
        true => std::env::temp_dir(),
        false => uvfs_sys::directory_of(image).to_owned(),
    }
}

/// Where a file system is to be made.
#[derive(Debug)]
pub(crate) struct Destination {
    pub image: PathBuf,
    /// Device and inode.
    pub id: (u64, u64),
    /// The device's own sectors, at least 512.
    pub sector: u32,
    /// Bytes there are; 0 for an empty file.
    bytes: u64,
    block_device: bool,
    /// It did not exist.
    created: bool,
    /// Holds the lock of an image file until the file system is made.
    _lock: Option<Device>,
}

impl Destination {
    /// Looks at what is there, and makes a file if nothing is.
    pub fn prepare(image: &Path, options: &MkfsOptions) -> Result<Destination, MkfsError> {
        let failed = |what| {
            move |error: io::Error| MkfsError::Image {
                image: image.into(),
                what,
                error,
            }
        };
        if options.dry_run && !image.exists() {
            return Ok(Destination {
                image: image.into(),
                id: (0, 0),
                sector: 512,
                bytes: 0,
                block_device: false,
                created: false,
                _lock: None,
            });
        }
        let made = OpenOptions::new().write(true).create_new(true).open(image);
        let (created, meta) = match made {
            Ok(f) => (true, f.metadata()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => (false, std::fs::metadata(image)),
            Err(e) => return Err(failed("making it")(e)),
        };
        let meta = meta.map_err(failed("stat"))?;
        let block_device = meta.file_type().is_block_device();
        if !block_device && !meta.file_type().is_file() {
            return Err(OpenError::Kind(image.into()).into());
        }
        // It refuses what is mounted or otherwise in use.
        let how = DeviceOptions {
            write: !options.dry_run,
            ..DeviceOptions::default()
        };
        let device = Device::open(image, how)?;
        let geometry = device.geometry();
        let place = Destination {
            image: image.into(),
            id: (meta.dev(), meta.ino()),
            sector: match block_device {
                true => geometry.block.max(512),
                false => 512,
            },
            bytes: geometry.size,
            block_device,
            created,
            _lock: (!block_device).then_some(device),
        };
        if !created && !options.force && !options.dry_run {
            place.refuse_used()?;
        }
        Ok(place)
    }

    pub fn failed(&self, what: &'static str, error: io::Error) -> MkfsError {
        MkfsError::Image {
            image: self.image.clone(),
            what,
            error,
        }
    }

    /// Refuses to overwrite what can be told to be something.
    fn refuse_used(&self) -> Result<(), MkfsError> {
        let file = File::open(&self.image).map_err(|e| self.failed("opening it", e))?;
        let failed = |e| self.failed("reading it", e);
        let mut start = vec![0; self.bytes.min(signatures::START) as usize];
        file.read_exact_at(&mut start, 0).map_err(failed)?;
        let mut end = vec![0; self.bytes.min(signatures::END) as usize];
        let end_at = self.bytes - end.len() as u64;
        file.read_exact_at(&mut end, end_at).map_err(failed)?;
        // An interrupted mkfs leaves no file system.
        if Superblock::at(&start, 0).is_ok_and(|s| &start[..4] == b"XFSB" && s.inprogress == 1) {
            return Ok(());
        }
        let what = match signatures::find(&start, &end) {
            Some(name) => format!("it holds {name}"),
            None if !self.block_device && start.iter().chain(&end).any(|b| *b != 0) => {
                "it is not empty, nor a file of zeros".into()
            }
            None => return Ok(()),
        };
        Err(MkfsError::Exists {
            image: self.image.clone(),
            what,
        })
    }

    /// The size of the file system if that does not depend on what comes into it.
    pub fn size(&self, options: &MkfsOptions) -> Option<u64> {
        let own = self.bytes > 0 && !options.smallest;
        options.size.or(own.then_some(self.bytes))
    }

    /// It is a file that gets the file system's size.
    fn is_resized(&self, options: &MkfsOptions) -> bool {
        !self.block_device && (options.size.is_some() || options.smallest || self.bytes == 0)
    }

    /// Gives it its size and opens it. The parts that the new file system expects to be zeros are zeros then.
    pub fn open(
        &self,
        options: &MkfsOptions,
        bytes: u64,
        l: &FixedBlocks,
    ) -> Result<(Output, bool), MkfsError> {
        self.resize(options, bytes)?;
        let (device, direct) = self.device(options)?;
        if !self.is_resized(options) {
            let log_bytes = u64::from(l.g.logblocks) << l.g.blocklog;
            let log = l.log().map(|log| (l.g.daddr(log) << 9, log_bytes));
            let size = device.geometry().size;
            // While the old one in the first sector still says where they are.
            for at in self.old_superblocks(size) {
                self.zero(at, 512)?;
            }
            let end = size.saturating_sub(WIPED);
            for (at, len) in [(0, WIPED), (end, WIPED)].into_iter().chain(log) {
                self.zero(at, len.min(size - at))?;
            }
        }
        let open = |kind| engine::open(kind, device.clone(), EngineConfig::default()).map(|_| kind);
        let kind = match (options.engine, direct) {
            (Some(kind), _) => open(kind),
            (None, true) => (open(EngineKind::Uring).or_else(|_| open(EngineKind::Aio)))
                .or_else(|_| open(EngineKind::Sync)),
            (None, false) => open(EngineKind::Sync),
        };
        let kind = kind.map_err(|e| self.failed("starting the engine", e))?;
        let image = self.image.clone();
        let output = Output {
            device,
            kind,
            image,
        };
        Ok((output, direct))
    }

    /// Gives a file its size, and makes sure that a device has it.
    fn resize(&self, options: &MkfsOptions, bytes: u64) -> Result<(), MkfsError> {
        if bytes > self.bytes && !self.is_resized(options) {
            let (image, bytes) = (self.image.display(), self.bytes);
            let why = format!("{image}: it has only {bytes} bytes");
            return Err(MkfsError::Options(why));
        }
        if self.is_resized(options) {
            let file = OpenOptions::new().write(true).open(&self.image);
            let file = file.map_err(|e| self.failed("opening it", e))?;
            // All of it is a hole then.
            let sized = file.set_len(0).and_then(|()| file.set_len(bytes));
            sized.map_err(|e| self.failed("setting its size", e))?;
        }
        if options.whole && !self.block_device {
            let file = OpenOptions::new().write(true).open(&self.image);
            let file = file.map_err(|e| self.failed("opening it", e))?;
            let taken = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes);
            taken.map_err(|e| self.failed("taking the space of all of it", e.into()))?;
        }
        Ok(())
    }

    /// Makes it the log of an image, of so many bytes, which begins with `start`. It is durable then.
    pub fn become_log(
        &self,
        options: &MkfsOptions,
        bytes: u64,
        start: &[u8],
    ) -> Result<(), MkfsError> {
        let options = options.of_log();
        self.resize(&options, bytes)?;
        if !self.is_resized(&options) {
            self.zero(0, bytes)?;
        }
        let file = OpenOptions::new().write(true).open(&self.image);
        let written = file.and_then(|file| {
            file.write_all_at(start, 0)?;
            file.sync_all()
        });
        written.map_err(|e| self.failed("writing the log", e))
    }

    /// Where the copies of the superblock of an XFS lie that was here before: xfs_repair would take their word for the
    /// geometry if the new superblock were lost.
    fn old_superblocks(&self, size: u64) -> Vec<u64> {
        let mut first = [0; 512];
        let read = File::open(&self.image).and_then(|f| f.read_exact_at(&mut first, 0));
        match (read, Superblock::at(&first, 0)) {
            (Ok(()), Ok(old)) if &first[..4] == b"XFSB" => {
                let group = u64::from(old.agblocks.get()) * u64::from(old.blocksize.get());
                // A damaged one can claim any number of groups, but none smaller than this.
                let step = group.max(super::MIN_BYTES.min(16 << 20)) & !511;
                (1..u64::from(old.agcount.get()))
                    .map_while(|n| n.checked_mul(step))
                    .take_while(|at| at + 512 <= size)
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    /// Opens it past the page cache, or through it where that cannot be.
    fn device(&self, options: &MkfsOptions) -> Result<(Arc<Device>, bool), MkfsError> {
        let open = |direct| {
            let how = DeviceOptions {
                write: true,
                direct,
                // A file is locked already.
                shared: !self.block_device,
            };
            Device::open(&self.image, how)
        };
        if !options.buffered {
            match open(true) {
                Ok(d) if options.block_size.is_multiple_of(d.geometry().block) => {
                    return Ok((Arc::new(d), true));
                }
                Ok(_) | Err(OpenError::NoDirect(_)) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok((Arc::new(open(false)?), false))
    }

    /// Fills a range with zeros: by the device or file system if it can, otherwise by writing them.
    fn zero(&self, at: u64, len: u64) -> Result<(), MkfsError> {
        let failed = |e| self.failed("filling it with zeros", e);
        let file = OpenOptions::new().write(true).open(&self.image);
        let file = file.map_err(failed)?;
        let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        if rustix::fs::fallocate(&file, flags, at, len).is_ok() {
            return Ok(());
        }
        let zeros = vec![0; 1 << 20];
        let mut done = 0;
        while done < len {
            let n = (len - done).min(zeros.len() as u64);
            file.write_all_at(&zeros[..n as usize], at + done)
                .map_err(failed)?;
            done += n;
        }
        file.sync_data().map_err(failed)
    }

    /// Waits until the device can be opened by other programs: a ring that had it as a registered file lets
    /// go of it some time after it was closed, and until then it can't be mounted.
    pub fn await_release(&self) {
        const TRIES: u32 = 500;
        for _ in 0..if self.block_device { TRIES } else { 0 } {
            match Device::open(&self.image, DeviceOptions::default()) {
                Err(OpenError::Busy(_)) => std::thread::sleep(Duration::from_millis(10)),
                _ => break,
            }
        }
    }

    /// Removes the file if it did not exist before.
    pub fn give_up(&self) {
        if self.created {
            let _ = std::fs::remove_file(&self.image);
        }
    }
}
