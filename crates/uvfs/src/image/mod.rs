//! XFS images: opening one, and the commands that look into it without mounting it.

pub mod cat;
pub mod cp;
pub mod ls;
pub mod remote;
pub mod stat;

use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use uvfs_buf::Target;
use uvfs_cli::{Context, Error, Result, complain, warn};
use uvfs_io::device::{Device, OpenOptions};
use uvfs_io::engine::{Engine, EngineKind};
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::tools::escape;
use uvfs_xfs::{ImageError, ImageOptions, Volume};

use crate::options;

/// Metadata is cached in so much memory unless told otherwise.
pub const MEMORY: u64 = 64 << 20;

/// An image, and how to read it; arguments of each command that looks into one.
#[derive(clap::Args)]
pub struct Access {
    /// An image file, block device, or image in an object store (s3://BUCKET/KEY)
    #[arg(value_hint = clap::ValueHint::FilePath)]
    image: PathBuf,
    /// Limit of the metadata cache
    #[arg(long, value_name = "SIZE", value_parser = options::memory, default_value = "64M")]
    memory: u64,
    /// How metadata is read
    #[arg(long, value_name = "sync|aio|uring", value_parser = options::one_of(options::ENGINES, options::engine), default_value = "sync", hide_possible_values = true)]
    engine: EngineKind,
    /// The device or image of the log, if that is not in the image
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    logdev: Option<PathBuf>,
    /// Read past the kernel's page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    #[command(flatten)]
    store: remote::StoreArgs,
}

/// Opens an image or device.
pub fn open_device(path: &Path, direct: bool) -> Result<Arc<Device>> {
    let options = OpenOptions {
        direct,
        ..OpenOptions::default()
    };
    // The error names the device.
    let device = Device::open(path, options).map_err(|error| Error::new(error.to_string()))?;
    Ok(Arc::new(device))
}

/// Opens the device of an image's log, if one is named.
pub fn open_log(logdev: Option<&Path>) -> Result<Option<FileBlocks>> {
    let open = |path: &Path| FileBlocks::open(path).context(|| path.display().to_string());
    logdev.map(open).transpose()
}

/// The file system on a device, read through a cache of its own.
pub fn open_volume(
    device: &Arc<Device>,
    log: Option<FileBlocks>,
    engine: EngineKind,
    memory: u64,
) -> Result<Opened> {
    let options = ImageOptions {
        memory,
        engine,
        ..ImageOptions::default()
    };
    let opened = uvfs_xfs::Image::on(device, log, &options);
    opened
        .map(Opened::from)
        .map_err(|e| Error::new(e.to_string()))
}

/// The file system of an image in a store, read through a cache of its own.
pub fn open_remote(engine: Arc<dyn Engine>, memory: u64, name: &Path) -> Result<Opened> {
    let failed = |e: ImageError| Error::new(e.to_string());
    let (target, opened) = uvfs_xfs::Image::remote(engine, memory, name).map_err(failed)?;
    match given_up(&target, name) {
        Some(error) => Err(error),
        None => opened.map(Opened::from).map_err(failed),
    }
}

/// The error of an image whose device was given up.
fn given_up(target: &Target, name: &Path) -> Option<Error> {
    let why = target.failure()?;
    Some(Error::new(format!("{}: {why}", name.display())))
}

/// An open file system and its cache.
pub struct Opened {
    pub volume: Volume,
    pub target: Arc<Target>,
}

impl From<uvfs_xfs::Image> for Opened {
    fn from(image: uvfs_xfs::Image) -> Self {
        let (volume, target) = image.into_parts();
        Self { volume, target }
    }
}

impl Opened {
    /// Tells on standard error what may be wrong with what is read.
    pub fn warn(&self, path: &Path) {
        for warning in self.volume.warnings() {
            warn(format!("warning: {}: {warning}", path.display()));
        }
    }
}

/// An image that a command looks into.
struct Image<'a> {
    /// As it is shown.
    name: &'a Path,
    opened: Opened,
}

impl<'a> Image<'a> {
    /// Opens an image as the command line says, and warns. `confine` confines all that reads it from then on.
    fn open(access: &'a Access, confine: impl FnOnce(EngineKind)) -> Result<Self> {
        let path = access.image.as_path();
        let name = remote::shown(path);
        let opened = match remote::uri(path) {
            Some(uri) => {
                // Its threads talk to the store, and are not confined.
                let engine = remote::open(uri, &access.store)?;
                confine(EngineKind::Sync);
                open_remote(engine, access.memory, name)?
            }
            None => {
                let device = open_device(path, access.direct)?;
                let log = open_log(access.logdev.as_deref())?;
                confine(access.engine);
                open_volume(&device, log, access.engine, access.memory)?
            }
        };
        opened.warn(name);
        Ok(Self { name, opened })
    }

    fn volume(&self) -> &Volume {
        &self.opened.volume
    }

    /// The command's error for a path inside the image.
    fn inside(&self, path: &Path, error: impl fmt::Display) -> Error {
        let image = self.name.display();
        Error::new(format!("{image}: {}: {error}", shown(path)))
    }

    /// Tells of something that failed while the rest goes on. What fails because the image can't be read any more
    /// is told once, at the end.
    fn report(&self) -> impl FnMut(&Path, &uvfs_xfs::Error) {
        move |path, error| {
            if self.opened.target.failure().is_none() {
                complain(&self.inside(path, error));
            }
        }
    }

    /// Ends a command that writes to standard output. When no program reads that any more there is
    /// nothing to say.
    fn finish<T>(
        &self,
        path: &Path,
        outcome: uvfs_xfs::Result<T>,
        code: impl FnOnce(T) -> ExitCode,
    ) -> Result<ExitCode> {
        if let Some(error) = given_up(&self.opened.target, self.name) {
            return Err(error);
        }
        match outcome {
            Ok(value) => Ok(code(value)),
            Err(uvfs_xfs::Error::Output { source, .. })
                if source.kind() == io::ErrorKind::BrokenPipe =>
            {
                Ok(ExitCode::FAILURE)
            }
            Err(error @ uvfs_xfs::Error::Output { .. }) => Err(Error::new(error.to_string())),
            Err(error) => Err(self.inside(path, error)),
        }
    }
}

/// A path of an image, fit for a terminal.
fn shown(path: &Path) -> String {
    escape(path.as_os_str().as_bytes())
}

/// Failure if anything was reported.
fn status(errors: u64) -> ExitCode {
    if errors == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}
