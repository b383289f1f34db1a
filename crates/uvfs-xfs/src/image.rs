//! Images by path: the short way to read, check and repair one.

use crate::blocks::{Blocks, FileBlocks, with_log};
use crate::check::{self, CheckOptions, CheckOutcome, CheckProgress, DeviceBlocks};
use crate::error::Error;
use crate::read::CachedBlocks;
use crate::read::volume::Volume;
use crate::repair::{self, DeviceSink, RepairError, RepairOptions, RepairOutcome, Sink};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uvfs_buf::Target;
use uvfs_io::device::{Device, OpenError, OpenOptions};
use uvfs_io::engine::{Engine, EngineKind};

/// How an image is read.
#[derive(Debug, Clone, Copy)]
pub struct ImageOptions {
    /// Most bytes of metadata that are cached.
    pub memory: u64,
    /// How metadata is read.
    pub engine: EngineKind,
    /// Past the kernel's page cache.
    pub direct: bool,
}

impl Default for ImageOptions {
    fn default() -> ImageOptions {
        ImageOptions {
            memory: 64 << 20,
            engine: EngineKind::Sync,
            direct: false,
        }
    }
}

/// Why an image could not be opened, checked or repaired.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file or device could not be opened, or is in use.
    #[error("{0}")]
    Open(#[from] OpenError),
    /// There is no way to read it.
    #[error("{}: starting the engine: {error}", image.display())]
    Engine {
        /// The image.
        image: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// It could not be read.
    #[error("{}: {error}", image.display())]
    Read {
        /// The image.
        image: PathBuf,
        /// The error; [`Error::NotXfs`] if it holds something else.
        error: Error,
    },
    /// It could not be repaired.
    #[error("{}: {error}", image.display())]
    Repair {
        /// The image.
        image: PathBuf,
        /// The error.
        error: RepairError,
    },
}

/// An XFS file system in a file, on a device or behind an engine, to be read through a cache of its metadata. All that
/// reads is in [`Volume`].
pub struct Image {
    volume: Volume,
    target: Arc<Target>,
}

impl Image {
    /// Opens an image file or a block device.
    ///
    /// # Errors
    /// [`ImageError::Open`], [`ImageError::Engine`] and [`ImageError::Read`].
    pub fn open(path: &Path, options: &ImageOptions) -> Result<Image, ImageError> {
        let how = OpenOptions {
            direct: options.direct,
            ..OpenOptions::default()
        };
        Image::on(&Arc::new(Device::open(path, how)?), None, options)
    }

    /// The image on an open device, and its log if that is on another.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn on(
        device: &Arc<Device>,
        log: Option<FileBlocks>,
        options: &ImageOptions,
    ) -> Result<Image, ImageError> {
        let name = device.path();
        let target = Target::open(device.clone(), options.engine, config(options.memory));
        let target = Arc::new(target.map_err(|error| engine(name, error))?);
        let blocks = Arc::new(CachedBlocks::new(target.clone(), device.clone()));
        Image::of(target, with_log(blocks, log), name)
    }

    /// The image that an engine reads, such as one in an object store. `name` is for messages.
    ///
    /// # Errors
    /// As [`Image::open`]. The engine's own failure is [`Target::failure`] of [`Image::target`], and comes before them.
    pub fn remote(
        from: Arc<dyn Engine>,
        memory: u64,
        name: &Path,
    ) -> Result<(Arc<Target>, Result<Image, ImageError>), ImageError> {
        let target = remote_target(from, memory).map_err(|error| engine(name, error))?;
        let blocks = Arc::new(CachedBlocks::remote(target.clone()));
        Ok((target.clone(), Image::of(target, blocks, name)))
    }

    fn of(target: Arc<Target>, blocks: Arc<dyn Blocks>, name: &Path) -> Result<Image, ImageError> {
        if target.geometry().size < uvfs_buf::SECTOR {
            // Too short for a superblock.
            return Err(read(name)(Error::NotXfs { found: 0 }));
        }
        let volume = Volume::open(blocks).map_err(read(name))?;
        let geometry = volume.geometry();
        let group = u64::from(geometry.ag_blocks(0)) << (geometry.blocklog - 9);
        target.set_groups(group);
        Ok(Image { volume, target })
    }

    /// The file system.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// The cache.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    /// The file system and the cache.
    pub fn into_parts(self) -> (Volume, Arc<Target>) {
        (self.volume, self.target)
    }
}

/// A cache of what only an engine reaches, of so many bytes.
///
/// # Errors
/// The kernel's error.
pub fn remote_target(from: Arc<dyn Engine>, memory: u64) -> io::Result<Arc<Target>> {
    Target::with_engine(from, config(memory)).map(Arc::new)
}

fn config(memory: u64) -> uvfs_buf::Config {
    uvfs_buf::Config {
        limit: usize::try_from(memory).unwrap_or(usize::MAX),
        ..uvfs_buf::Config::default()
    }
}

fn engine(image: &Path, error: io::Error) -> ImageError {
    let image = image.into();
    ImageError::Engine { image, error }
}

fn read(image: &Path) -> impl Fn(Error) -> ImageError {
    move |error| ImageError::Read {
        image: image.into(),
        error,
    }
}

/// Opens an image past the page cache, or through it where its file system has no direct I/O.
///
/// # Errors
/// [`OpenError`].
pub fn open_direct(path: &Path, how: OpenOptions) -> Result<Device, OpenError> {
    let direct = OpenOptions {
        direct: true,
        ..how
    };
    match Device::open(path, direct) {
        Err(OpenError::NoDirect(_)) => Device::open(path, how),
        opened => opened,
    }
}

/// Opens an image to read it, and to write to it if `write` is set: the device to write to comes first.
///
/// # Errors
/// [`OpenError`]; also if it is mounted, or in use by another process.
pub fn open_to_repair(
    path: &Path,
    write: bool,
) -> Result<(Option<Arc<Device>>, Arc<Device>), OpenError> {
    // It claims a block device, and refuses what is mounted.
    let how = OpenOptions {
        write: true,
        ..OpenOptions::default()
    };
    let sink = write.then(|| Device::open(path, how).map(Arc::new));
    let sink = sink.transpose()?;
    let device = match &sink {
        // A claimed device is not opened once more.
        Some(device) if device.is_block_device() => device.clone(),
        // A locked image is: past the page cache, which the sink goes through.
        locked => {
            let how = OpenOptions {
                shared: locked.is_some(),
                ..OpenOptions::default()
            };
            Arc::new(open_direct(path, how)?)
        }
    };
    Ok((sink, device))
}

/// Checks an image file or a block device, as [`check::check`] does.
///
/// # Errors
/// [`ImageError`]. Damage is no error but a finding.
pub fn check(path: &Path, options: &CheckOptions) -> Result<CheckOutcome, ImageError> {
    let device = open_direct(path, OpenOptions::default())?;
    let blocks = DeviceBlocks::best(Arc::new(device)).map_err(|e| engine(path, e))?;
    let blocks: Arc<dyn Blocks> = Arc::new(blocks);
    check::check(blocks, options, &CheckProgress::default()).map_err(read(path))
}

/// Repairs an image file or a block device, as [`repair::repair`] does; without `write` the outcome only says what would
/// be done.
///
/// # Errors
/// [`ImageError`].
pub fn repair(
    path: &Path,
    options: &RepairOptions,
    write: bool,
) -> Result<RepairOutcome, ImageError> {
    let (sink, device) = open_to_repair(path, write)?;
    let blocks = DeviceBlocks::best(device).map_err(|e| engine(path, e))?;
    let sink = sink.map(DeviceSink::new).transpose();
    let sink = sink.map_err(|e| engine(path, e))?;
    let to = sink.as_ref().map(|sink| sink as &dyn Sink);
    let done = repair::repair(Arc::new(blocks), to, options, &CheckProgress::default());
    done.map_err(|error| ImageError::Repair {
        image: path.into(),
        error,
    })
}
