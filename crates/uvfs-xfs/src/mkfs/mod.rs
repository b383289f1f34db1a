//! Makes an XFS file system in a file or on a device, and fills it from a directory.
//!
//! The format is version 5 with the features that mkfs.xfs of xfsprogs 6.1 gives by default:
//! checksums, free inode B-tree, sparse inodes, reflink, bigtime, inode B-tree counters.
//!
//! | | |
//! |---|---|
//! | `builder` | the short way to make one |
//! | `layout` | chooses the sizes |
//! | `space` | allocates blocks and inodes |
//! | `source` | what it is filled from, and the rules that change it on the way |
//! | `estimate` | how large it has to be for that |
//! | `pool` | threads that list directories ahead and copy contents |
//! | `fill` | the walk that allocates everything and writes inodes and directories |
//! | `inode` | encodes inodes |
//! | `meta` | metadata on its way through the buffer cache |
//! | `log` | the empty log |
//! | `target` | the file or device that it is made on |
//! | `signatures` | what that may hold already |
//!
//! [`mkfs`] writes a superblock that says that it is in progress, then everything else, and the
//! superblock proper when that is durable. So an interrupted mkfs leaves nothing that looks like a file
//! system. Memory is bounded but for three things: the entries of the largest directories (of each
//! level on the way down, the subdirectories still to come), files with several names (some 50 bytes
//! each), and four bytes for each chunk of 64 inodes.

mod builder;
mod estimate;
mod fill;
mod inode;
mod layout;
mod log;
mod meta;
mod pool;
mod signatures;
pub mod source;
mod space;
mod target;

pub use builder::Builder;
pub use layout::{MIN_BYTES, MIN_ORDINARY_BYTES, MIN_TWO_GROUPS_BYTES};
pub use source::tar::Archive;
pub use target::scratch;

pub(crate) use log::of_cycle as log_of_cycle;

use crate::format::*;
use crate::geometry::AgBlock;
use crate::read::verifier;
use fill::{Filler, Times};
use inode::{ForkData, NewInode};
use layout::FixedBlocks;
use meta::Metadata;
use pool::{Output, WorkPool};
use source::{HostDir, Meta, Root, Time};
use space::{Full, SpaceMap};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use uvfs_buf::Target;
use uvfs_io::device::OpenError;
use uvfs_io::engine::EngineKind;

/// The choices of a caller; sizes are in bytes.
#[derive(Debug, Clone)]
pub struct MkfsOptions {
    /// Size of the file system; `None`: that of the device or of a file that is not empty, otherwise
    /// what the source needs.
    pub size: Option<u64>,
    /// Without a size: as small as the source allows, from [`MIN_TWO_GROUPS_BYTES`] on, instead of from [`MIN_ORDINARY_BYTES`] on.
    pub smallest: bool,
    /// Without a size: the room to spare.
    pub margin: Margin,
    /// Take the space of the whole image on its own file system, instead of leaving holes in it.
    pub whole: bool,
    /// Only find out what would be made: nothing is written.
    pub dry_run: bool,
    /// What is left out of the source, and whose its files are.
    pub rules: source::Rules,
    /// Block size.
    pub block_size: u32,
    /// Sector size; a device with larger sectors takes its own.
    pub sector_size: u32,
    /// Inode size.
    pub inode_size: u32,
    /// Most of the space for inodes, in percent.
    pub max_pct: Option<u8>,
    /// Number of allocation groups.
    pub agcount: Option<u64>,
    /// Size of an allocation group.
    pub agsize: Option<u64>,
    /// Size of the log. `None`: what fits the file system; on another device all of that.
    pub log_size: Option<u64>,
    /// Another file or device for the log.
    pub log_device: Option<PathBuf>,
    /// Label: at most 12 bytes.
    pub label: Vec<u8>,
    /// UUID; `None`: a random one, or with `reproducible` one that follows from the input.
    pub uuid: Option<Uuid>,
    /// Overwrite what is there.
    pub force: bool,
    /// Give the same bytes for the same input: all times are the last change of contents, and not
    /// later than `epoch`.
    pub reproducible: bool,
    /// Seconds since 1970 (`SOURCE_DATE_EPOCH`); `None`: the newest change in the source.
    pub epoch: Option<i64>,
    /// Write through the kernel's page cache.
    pub buffered: bool,
    /// The engine that writes; `None`: io_uring or what there is.
    pub engine: Option<EngineKind>,
    /// Threads that read the source; 0: four for each CPU, or two if it is an archive.
    pub threads: usize,
}

impl Default for MkfsOptions {
    fn default() -> MkfsOptions {
        MkfsOptions {
            size: None,
            smallest: false,
            margin: Margin::default(),
            whole: false,
            dry_run: false,
            rules: source::Rules::default(),
            block_size: 4096,
            sector_size: 512,
            inode_size: 512,
            max_pct: None,
            agcount: None,
            agsize: None,
            log_size: None,
            log_device: None,
            label: Vec::new(),
            uuid: None,
            force: false,
            reproducible: false,
            epoch: None,
            buffered: false,
            engine: None,
            threads: 0,
        }
    }
}

impl MkfsOptions {
    /// Those of the device of the log.
    fn of_log(&self) -> MkfsOptions {
        MkfsOptions {
            size: self.log_size,
            smallest: false,
            ..self.clone()
        }
    }
}

/// Room to spare in a file system that is as large as its contents need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Margin {
    /// A part of the contents and their metadata, in percent.
    Percent(u32),
    /// Bytes.
    Bytes(u64),
}

impl Default for Margin {
    fn default() -> Margin {
        Margin::Percent(5)
    }
}

/// How far [`mkfs`] is; read by other threads.
#[derive(Debug, Default)]
pub struct MkfsProgress {
    pub(crate) inodes: AtomicU64,
    pub(crate) bytes: AtomicU64,
    changed: Mutex<Changed>,
}

/// Files of a source that other programs changed between the time that they were listed and the time that they were
/// copied.
#[derive(Debug, Clone, Default)]
pub struct Changed {
    /// How many there were.
    pub count: u64,
    /// The first [`Changed::LISTED`] of them, with what became of each.
    pub files: Vec<(PathBuf, &'static str)>,
}

impl Changed {
    /// So many are listed, so that a source that changes all the time needs no memory for it.
    pub const LISTED: usize = 1000;
}

impl MkfsProgress {
    /// Notes a file that is not what it was when it was listed.
    pub(crate) fn note_changed(&self, path: PathBuf, what: &'static str) {
        let mut changed = uvfs_sys::lock(&self.changed);
        // Several threads may read parts of one file.
        if changed.files.iter().any(|(p, _)| *p == path) {
            return;
        }
        changed.count += 1;
        if changed.files.len() < Changed::LISTED {
            changed.files.push((path, what));
        }
    }

    /// Inodes made and bytes of contents copied.
    pub fn get(&self) -> (u64, u64) {
        (
            self.inodes.load(Ordering::Relaxed),
            self.bytes.load(Ordering::Relaxed),
        )
    }
}

/// The file system that was made.
#[derive(Debug, Clone)]
pub struct Made {
    /// The superblock.
    pub superblock: Superblock,
    /// Inodes in use, the root directory's and those of the realtime section included.
    pub inodes: u64,
    /// Bytes of contents copied, counted in blocks.
    pub bytes: u64,
    /// The engine that wrote.
    pub engine: EngineKind,
    /// Past the kernel's page cache.
    pub direct: bool,
    /// Files that changed while they were copied.
    pub changed: Changed,
}

/// Why no file system was made.
#[derive(Debug, thiserror::Error)]
pub enum MkfsError {
    /// The options contradict each other or the format.
    #[error("{0}")]
    Options(String),
    /// There is something already.
    #[error("{}: {what}", image.display())]
    Exists {
        /// The image.
        image: PathBuf,
        /// The size that there is.
        what: String,
    },
    /// The image could not be opened.
    #[error("{0}")]
    Open(#[from] OpenError),
    /// The image could not be made ready.
    #[error("{}: {what}: {error}", image.display())]
    Image {
        /// The image.
        image: PathBuf,
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
    /// The image could not be written.
    #[error("{}: writing: {error}", image.display())]
    Write {
        /// The image.
        image: PathBuf,
        /// The error.
        error: String,
    },
    /// [`mkfs_to`] could not write to what its caller gave, whose name only the caller knows.
    #[error("writing the image: {0}")]
    Output(io::Error),
    /// The source could not be read.
    #[error("{}: {what}: {error}", path.display())]
    Source {
        /// The file or directory.
        path: PathBuf,
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
    /// The source has something that XFS has not.
    #[error("{}: {why}", path.display())]
    Unfit {
        /// The file or directory.
        path: PathBuf,
        /// The kind of content that was found.
        why: &'static str,
    },
    /// The file system is full.
    #[error("{}: no space left in a file system of {size} bytes", path.display())]
    NoSpace {
        /// The structure that had no room.
        path: PathBuf,
        /// The file system's size.
        size: u64,
    },
    /// Another thread met an error, which is reported instead.
    #[error("stopped")]
    Stopped,
}

impl MkfsError {
    pub(crate) fn source(path: PathBuf, what: &'static str, error: io::Error) -> MkfsError {
        MkfsError::Source { path, what, error }
    }

    pub(crate) fn unfit(path: PathBuf, why: &'static str) -> MkfsError {
        MkfsError::Unfit { path, why }
    }
}

/// The source that a file system is filled from.
pub enum From {
    /// Nothing.
    Nothing,
    /// A directory of the host, or the image whose OCI layout that is.
    Directory(PathBuf),
    /// Tar archives, each laid over those before it as the layers of an image are; the first may hold an image. They are
    /// read as a whole first, into a temporary file beside the image.
    Archives(Vec<Archive>),
    /// A prototype file of mkfs.xfs(8).
    Prototype {
        /// The file.
        file: PathBuf,
        /// Slashes in names stand for spaces.
        slashes_are_spaces: bool,
    },
}

/// Makes a file system.
///
/// # Errors
/// [`MkfsError`]. A file that did not exist before is removed then.
pub fn mkfs(
    image: &Path,
    options: &MkfsOptions,
    from: From,
    progress: &MkfsProgress,
) -> Result<Made, MkfsError> {
    let place = target::Destination::prepare(image, options)?;
    let log = options.log_device.as_ref();
    let log = log.map(|path| {
        if std::fs::metadata(path).is_ok_and(|m| (m.dev(), m.ino()) == place.id) {
            let why = format!("{}: the log needs another file or device", path.display());
            return Err(MkfsError::Options(why));
        }
        target::Destination::prepare(path, &options.of_log())
    });
    let (log, made) = match log.transpose() {
        Ok(log) => {
            let made = make(&place, log.as_ref(), options, from, progress);
            (log, made)
        }
        Err(e) => (None, Err(e)),
    };
    for place in [Some(place), log].into_iter().flatten() {
        match made {
            Ok(_) => place.await_release(),
            Err(_) => place.give_up(),
        }
    }
    made
}

/// Makes a file system in a temporary file, and writes all of it to `out`, holes as zeros.
///
/// # Errors
/// [`MkfsError`].
pub fn mkfs_to(
    out: &mut dyn io::Write,
    options: &MkfsOptions,
    from: From,
    progress: &MkfsProgress,
) -> Result<Made, MkfsError> {
    let directory = std::env::temp_dir();
    let failed = |what| {
        let image = directory.clone();
        move |error| MkfsError::Image { image, what, error }
    };
    let file = tempfile::NamedTempFile::new_in(&directory);
    let mut file = file.map_err(failed("making a temporary file"))?;
    let made = mkfs(file.path(), options, from, progress)?;
    if !options.dry_run {
        let mut buf = vec![0; 1 << 20];
        loop {
            let read = io::Read::read(&mut file, &mut buf);
            let n = read.map_err(failed("reading the temporary file"))?;
            if n == 0 {
                break;
            }
            out.write_all(&buf[..n]).map_err(MkfsError::Output)?;
        }
    }
    Ok(made)
}

fn make(
    place: &target::Destination,
    log: Option<&target::Destination>,
    options: &MkfsOptions,
    from: From,
    progress: &MkfsProgress,
) -> Result<Made, MkfsError> {
    let mut options = options.clone();
    let sector = place.sector.max(log.map_or(512, |log| log.sector));
    if sector > 512 {
        options.sector_size = options.sector_size.max(sector);
    }
    if let Some(log) = log {
        let size = log.size(&options.of_log());
        let missing = || {
            let log = log.image.display();
            MkfsError::Options(format!("{log}: the size of a new log has to be given"))
        };
        options.log_size = Some(size.ok_or_else(missing)?);
    }
    let known = place.size(&options);
    let epoch = options.epoch.filter(|_| options.reproducible);
    let epoch = epoch.map(|sec| Time { sec, nsec: 0 });
    // An archive's files were written just now.
    let mut threads_per_cpu = 2;
    let root = match from {
        From::Nothing => None,
        From::Directory(dir) => Some(match source::oci::layout(dir.as_path())? {
            Some(layers) => source::tar::read_layers(layers, &scratch(&place.image), known)?,
            None => {
                // More than CPUs: they wait for the source's device.
                threads_per_cpu = 4;
                let places = [Some(place), log].into_iter().flatten();
                HostDir::root(&dir, places.map(|it| it.id).collect())?
            }
        }),
        From::Archives(all) => Some(source::tar::read(all, &scratch(&place.image), known)?),
        From::Prototype {
            file,
            slashes_are_spaces,
        } => {
            let time = epoch.unwrap_or_else(now);
            Some(source::proto::read(&file, slashes_are_spaces, time)?)
        }
    };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match options.threads {
        0 => (cpus * threads_per_cpu).clamp(4, 32),
        n => n,
    };
    let root = root.map(|root| options.rules.apply(root)).transpose()?;
    // Everything that has to be known before the first write.
    let mut sum = estimate::Sum::default();
    if let Some(root) = &root
        && (known.is_none() || options.reproducible || options.dry_run)
    {
        // Only the sizes of blocks and inodes count here.
        let any = MkfsOptions {
            agcount: None,
            agsize: None,
            log_size: None,
            log_device: None,
            ..options.clone()
        };
        let l = FixedBlocks::new(&any, 1 << 40, [0; 16])?;
        let idle = MkfsProgress::default();
        let pool = WorkPool::new(threads, &idle);
        sum = pool.run(None, || estimate::sum(&l.g, &pool, root, epoch))?;
    }
    let bytes = match (known, &root) {
        (Some(bytes), _) => bytes,
        (None, Some(_)) => estimate::size(&options, &sum)?,
        (None, None) if options.smallest => estimate::size(&options, &sum)?,
        (None, None) => {
            let why = "a size is needed for a new image without contents";
            return Err(MkfsError::Options(why.into()));
        }
    };
    let times = match options.reproducible {
        false => Times::Kept,
        true => Times::Until(epoch.unwrap_or(sum.newest)),
    };
    let now = match times {
        Times::Kept => now(),
        Times::Until(t) => t,
    };
    let uuid = match options.uuid {
        Some(u) => u,
        None if options.reproducible => derived_uuid(&options, bytes, now, &sum),
        None => random_uuid().map_err(|error| place.failed("getting a random UUID", error))?,
    };
    let l = FixedBlocks::new(&options, bytes, uuid)?;
    if options.dry_run {
        let inodes = sum.inodes * u64::from(options.inode_size);
        if (sum.blocks << l.g.blocklog) + inodes > bytes {
            return Err(MkfsError::NoSpace {
                path: place.image.clone(),
                size: bytes,
            });
        }
        return Ok(Made {
            superblock: l.sb,
            inodes: sum.inodes.max(1) + 2,
            bytes: sum.blocks << l.g.blocklog,
            engine: options.engine.unwrap_or(EngineKind::Sync),
            direct: false,
            changed: Changed::default(),
        });
    }
    let (output, direct) = place.open(&options, bytes, &l)?;
    if let Some(log) = log {
        let bytes = u64::from(l.g.logblocks) << l.g.blocklog;
        log.become_log(&options, bytes, &log::of_cycle(&l.g, log::CYCLE, 1))?;
    }

    let config = uvfs_buf::Config {
        limit: meta::CACHE_BYTES,
        ..uvfs_buf::Config::default()
    };
    let target = Target::open(output.device.clone(), output.kind, config)
        .map_err(|error| place.failed("starting the engine", error))?;
    target.set_groups(u64::from(l.g.agblocks) << (l.g.blocklog - 9));
    let mut meta = Metadata::new(&l, target, place.image.clone());
    let made = write(&l, root, times, now, &mut meta, &output, threads, progress);
    let (superblock, inodes) = match made {
        Ok(m) => m,
        Err(e) => {
            meta.abandon();
            return Err(e);
        }
    };
    Ok(Made {
        superblock,
        inodes,
        bytes: progress.get().1,
        engine: output.kind,
        direct,
        changed: uvfs_sys::lock(&progress.changed).clone(),
    })
}

/// Writes everything.
#[expect(clippy::too_many_arguments, reason = "one call")]
fn write<'a>(
    l: &'a FixedBlocks,
    root: Option<Root>,
    times: Times,
    now: Time,
    meta: &mut Metadata<'a>,
    output: &Output,
    threads: usize,
    progress: &'a MkfsProgress,
) -> Result<(Superblock, u64), MkfsError> {
    let g = &l.g;
    // From here on no program takes it for what it was before, nor for a file system.
    let mut sb = l.sb;
    sb.inprogress = 1;
    let mut unfinished = sb.sector(g.sector_size as usize);
    unfinished.resize(g.header_blocks() as usize * g.block_size as usize, 0);
    meta.put(0, &unfinished, &uvfs_buf::Anything)?;
    meta.finish()?;

    /// Inodes in use besides those of the source: root directory, realtime bitmap and summary.
    const FIXED: u32 = 3;
    let mut space = SpaceMap::new(l, FIXED);
    meta.new_unit(g.rootino);
    for (ino, flags) in [(g.rbmino, DIFLAG_NEWRTBM), (g.rsumino, 0)] {
        let file = Meta {
            mode: 0o100_000,
            atime: Time::default(),
            ..Meta::directory(now)
        };
        inode_without_contents(l, meta, ino, &file, 1, flags, ForkData::empty())?;
    }
    let pool = WorkPool::new(threads, progress);
    let (inodes, has_attrs) = match root {
        None => {
            // The short form of a directory without entries: no entries, and the parent.
            let mut bytes = vec![0, 0];
            bytes.extend_from_slice(&(g.rootino as u32).to_be_bytes());
            let data = ForkData::local(FORMAT_LOCAL, bytes);
            inode_without_contents(l, meta, g.rootino, &Meta::directory(now), 2, 0, data)?;
            (1, false)
        }
        Some(root) => pool.run(Some(output), || {
            let mut filler = Filler::new(l, &mut space, meta, &pool, progress, times);
            filler.fill(root)?;
            Ok((filler.inodes, filler.has_attrs))
        })?,
    };
    let mut counts = Counts::default();
    let mut headers = Vec::with_capacity(g.agcount as usize);
    for agno in 0..g.agcount {
        let group = space.finish(l, agno).map_err(|Full| MkfsError::NoSpace {
            path: "the B-trees of an allocation group".into(),
            size: g.data_bytes(),
        })?;
        for b in group.blocks(g) {
            let daddr = g.daddr(AgBlock { agno, agbno: b.at });
            meta.put(daddr, &b.bytes, verifier::BTREE_SHORT)?;
        }
        counts += group.counts();
        headers.push(group.headers(g));
    }
    let mut sb = l.sb;
    sb.set_counts(counts);
    if has_attrs {
        sb.versionnum.set(sb.versionnum.get() | VERSION_ATTR);
    }
    // The copies of the superblock stay in progress, as those of mkfs.xfs.
    sb.inprogress = 1;
    let head = |sb: &Superblock, sectors: &[Vec<u8>; 3]| {
        let mut bytes = [&[sb.sector(g.sector_size as usize)], &sectors[..]]
            .concat()
            .concat();
        bytes.resize(g.header_blocks() as usize * g.block_size as usize, 0);
        bytes
    };
    for (agno, sectors) in (0..).zip(&headers).skip(1) {
        let daddr = g.daddr(AgBlock { agno, agbno: 0 });
        meta.put(daddr, &head(&sb, sectors), verifier::AG_HEADERS)?;
    }
    if let Some(at) = l.log() {
        let sizes = uvfs_io::device::Device::geometry(&output.device);
        let log = log::start(l, &sizes);
        meta.put(g.daddr(at), &log, &uvfs_buf::Anything)?;
    }
    meta.finish()?;

    sb.inprogress = 0;
    meta.put(0, &head(&sb, &headers[0]), verifier::AG_HEADERS)?;
    meta.finish()?;
    Ok((sb, inodes + u64::from(FIXED) - 1))
}

fn inode_without_contents(
    l: &FixedBlocks,
    meta: &mut Metadata<'_>,
    ino: u64,
    m: &Meta,
    nlink: u32,
    flags: u16,
    data: ForkData,
) -> Result<(), MkfsError> {
    let new = NewInode {
        ino,
        generation: fill::generation(&l.g, ino),
        meta: m,
        nlink,
        size: data.bytes.len() as u64,
        flags,
        data,
        forkoff: 0,
        attr: ForkData::empty(),
    };
    meta.inode(ino, true, |b| inode::put(&l.g, &new, b))
}

fn now() -> Time {
    let t = SystemTime::now().duration_since(UNIX_EPOCH);
    let t = t.unwrap_or_default();
    Time {
        sec: t.as_secs() as i64,
        nsec: t.subsec_nanos(),
    }
}

/// Marks 128 bits as a UUID of this version (RFC 9562).
fn as_uuid(mut bytes: Uuid, version: u8) -> Uuid {
    bytes[6] = bytes[6] & 0x0f | version << 4;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}

fn random_uuid() -> io::Result<Uuid> {
    let mut bytes = [0u8; 16];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    Ok(as_uuid(bytes, 4))
}

/// A UUID that follows from what the file system is made of, but for contents.
fn derived_uuid(o: &MkfsOptions, bytes: u64, now: Time, sum: &estimate::Sum) -> Uuid {
    let mut d = estimate::Digest::new();
    let (block, inode) = (o.block_size.into(), o.inode_size.into());
    for word in [bytes, block, inode, now.sec as u64] {
        d.add(&word.to_le_bytes());
    }
    d.add(&o.label);
    d.add(&sum.digest.to_le_bytes());
    as_uuid(d.get().to_be_bytes(), 8)
}

/// Reads a UUID the way people write it.
pub fn parse_uuid(text: &str) -> Option<Uuid> {
    let fits = |(i, c): (usize, u8)| match i {
        8 | 13 | 18 | 23 => c == b'-',
        _ => c.is_ascii_hexdigit(),
    };
    let is_uuid = text.len() == 36 && text.bytes().enumerate().all(fits);
    let digits = text.replace('-', "");
    let number = u128::from_str_radix(&digits, 16).ok();
    number.filter(|_| is_uuid).map(u128::to_be_bytes)
}
